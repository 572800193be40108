"""What the wire between GPUs needs of one: memory that can be exported and mapped, and streams."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kvxfer.tensors.device_memory import MappedMemory, export_memory, map_memory
from kvxfer.transfer.manifest import CudaIpcHandle

PULL_PRIORITY = -1
"""Of the streams on which KV is copied. Thread blocks of a higher priority go first where an SM
becomes free: a load is short and narrow, and its request waits for it.
"""


class Gpu(Protocol):
    """A GPU, or what stands in for one where there is none."""

    @property
    def device(self) -> torch.device:
        """As PyTorch calls it."""

    def export(self, tensor: Tensor) -> CudaIpcHandle:
        """By what another process maps the tensor's memory. Raises TransportUnavailable."""

    def map(self, handle: CudaIpcHandle) -> MappedMemory:
        """Another process's memory. Raises TransportUnavailable."""

    def make_stream(self) -> torch.cuda.Stream | None:
        """A stream of its own; None where work runs on the host."""

    def reaches(self, tensor: Tensor) -> bool:
        """Whether kernels may read and write it: memory of this GPU, or pinned memory."""

    def pinned(self, nbytes: int) -> Tensor:
        """Memory of the host that kernels reach: flat uint8."""


class CudaDevice:
    """A CUDA device of this process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def device(self) -> torch.device:
        """As PyTorch calls it."""
        return self._device

    def export(self, tensor: Tensor) -> CudaIpcHandle:
        """By what another process maps the tensor's memory."""
        return export_memory(tensor)

    def map(self, handle: CudaIpcHandle) -> MappedMemory:
        """Another process's memory."""
        return map_memory(handle, self._device)

    def make_stream(self) -> torch.cuda.Stream:
        """A stream beside the compute stream, before which its blocks go."""
        return torch.cuda.Stream(self._device, priority=PULL_PRIORITY)  # type: ignore[no-untyped-call]

    def reaches(self, tensor: Tensor) -> bool:
        """Whether kernels may read and write it."""
        return tensor.device == self._device or (tensor.is_cpu and tensor.is_pinned())

    def pinned(self, nbytes: int) -> Tensor:
        """Memory of the host that kernels reach."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
