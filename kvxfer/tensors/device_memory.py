"""A GPU as the wire between GPUs needs it: streams, and memory that another process can map, by
CUDA IPC handles.

A handle stands for a whole allocation, so a tensor is described by the handle of its allocation and
an offset. Only memory of ``cudaMalloc`` has one (the ordinary allocators of PyTorch);
virtual-memory allocators do not. What is mapped lives on after its owner: the driver keeps the
bytes until the last mapping goes.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kvxfer.errors import TransportUnavailable
from kvxfer.extras import install
from kvxfer.tensors.cuda_driver import CudaError, CurrentContext, driver
from kvxfer.tensors.shared_memory import boot_id, check_same_host
from kvxfer.transfer.manifest import CudaIpcHandle

_HANDLE_NBYTES = 64
"""Of a CUDA IPC handle."""
_PULL_PRIORITY = -1
"""Of the streams on which KV is copied. Thread blocks of a higher priority go first where an SM
becomes free: a load is short and narrow, and its request waits for it.
"""
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the one flag that there is


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Contiguous bytes as this GPU addresses them: its own, or a peer's that is mapped here."""

    address: int
    nbytes: int


class MappedMemory:
    """A peer's, of :meth:`Gpu.map`, or this GPU's own, of :func:`allocate`."""

    def __init__(self, memory: DeviceMemory, close: Callable[[], None]) -> None:
        self.memory = memory
        self._close: Callable[[], None] | None = close

    def close(self) -> None:
        """Nothing may run on it any more; it may wait for other work of this GPU. Idempotent."""
        close, self._close = self._close, None
        if close is not None:
            close()


def is_pinned(tensor: Tensor) -> bool:
    """Whether it begins in memory of the host that kernels reach. PyTorch, too, asks the driver for
    that, but lets go of the GIL meanwhile: beside busy threads it took 15 to 27 us, and 2 alone.
    """
    return tensor.is_cpu and driver().is_pinned(tensor.data_ptr())


class Gpu:
    """A GPU of this process. Tests put something else in its place where there is none."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def make_stream(self) -> torch.cuda.Stream | None:
        """A stream of its own; None where work runs on the host."""
        return torch.cuda.Stream(self.device, priority=_PULL_PRIORITY)  # type: ignore[no-untyped-call]

    def reaches(self, tensor: Tensor) -> bool:
        """Whether kernels may read and write it: memory of this GPU, or pinned memory."""
        return tensor.device == self.device or is_pinned(tensor)

    def pinned(self, nbytes: int) -> Tensor:
        """Memory of the host that kernels reach: flat uint8."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def export(self, tensor: Tensor) -> CudaIpcHandle:
        """By what another process maps it: the handle of the tensor's allocation, and where in it
        the tensor begins. Raises TransportUnavailable for memory that has none.
        """
        bindings = _bindings()
        address = tensor.data_ptr()
        with current_context(tensor.device):
            base, _ = _allocation_of(address)
            try:
                (handle,) = _call(bindings, "cuIpcGetMemHandle", base)
            except TransportUnavailable as exc:
                raise TransportUnavailable(
                    f"{exc}; expected memory of cudaMalloc: expandable segments "
                    "(PYTORCH_CUDA_ALLOC_CONF) and sleep modes allocate memory that has no handle"
                ) from exc
        return CudaIpcHandle(
            boot_id=boot_id(),
            pid=os.getpid(),
            handle=bytes(handle.reserved),
            offset=address - base,
            nbytes=tensor.numel() * tensor.element_size(),
        )

    def map(self, handle: CudaIpcHandle) -> MappedMemory:
        """Map a peer's memory for kernels on this GPU.

        Raises TransportUnavailable with the reason: other host, process gone, no peer access,
        memory that is smaller than the handle says.
        """
        check_same_host("cuda_ipc", handle)
        if len(handle.handle) != _HANDLE_NBYTES:
            raise TransportUnavailable(
                f"cuda_ipc: expected a handle of {_HANDLE_NBYTES} bytes, got {len(handle.handle)}"
            )
        bindings = _bindings()
        reserved = bindings.CUipcMemHandle()
        reserved.reserved = handle.handle
        with current_context(self.device):
            try:
                (mapped,) = _call(bindings, "cuIpcOpenMemHandle", reserved, _LAZY_PEER_ACCESS)
            except TransportUnavailable as exc:
                raise TransportUnavailable(
                    f"{exc}; expected memory of process {handle.pid} that {self.device} can map: "
                    "another process, which lives, on a GPU with peer access to this one"
                ) from exc
            base = int(mapped)

            def close() -> None:
                with current_context(self.device):
                    _call(bindings, "cuIpcCloseMemHandle", base)

            with ExitStack() as undo:
                undo.callback(close)
                # A kernel that reads beyond a mapping ends this process's use of the GPU
                _, mapped_nbytes = _allocation_of(base)
                if handle.offset < 0 or handle.offset + handle.nbytes > mapped_nbytes:
                    raise TransportUnavailable(
                        f"cuda_ipc: expected {handle.nbytes} bytes at {handle.offset} of process "
                        f"{handle.pid}, got a mapping of {mapped_nbytes}"
                    )
                undo.pop_all()
        return MappedMemory(DeviceMemory(base + handle.offset, handle.nbytes), close)


def allocate(nbytes: int, device: torch.device) -> MappedMemory:
    """Outside of PyTorch's allocator, and mappable. Raises TransportUnavailable."""
    bindings = _bindings()
    with current_context(device):
        (address,) = _call(bindings, "cuMemAlloc", nbytes)

    def close() -> None:
        with current_context(device):
            _call(bindings, "cuMemFree", int(address))

    return MappedMemory(DeviceMemory(int(address), nbytes), close)


@cache
def _quiet_stream(device: torch.device) -> torch.cuda.Stream:
    """Not one of PyTorch's, which has 32 and gives each to several. Raises CudaError."""
    handle = driver().make_stream(device)
    return torch.cuda.ExternalStream(handle, device=device)  # type: ignore[no-untyped-call]


@contextmanager
def beside_engine(device: torch.device) -> Iterator[None]:
    """What PyTorch is told within the ``with`` is done at its end, and does not wait for what the
    engine has put on the current stream. Raises RuntimeError, PyTorch's. Nothing on a CPU.
    """
    if device.type == "cpu":
        yield
        return
    stream = _quiet_stream(device)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def make_scratch(nbytes: int, device: torch.device) -> Tensor:
    """Flat uint8 for work on streams of kvxfer's own, not zeroed. Who lets go of it has waited for
    all work that uses it. Raises RuntimeError, PyTorch's.

    PyTorch gives memory away as soon as its tensor is gone, to who asks for some on the same
    stream: kernels that wait there may still read it, and come before what the new owner puts on
    that stream. Not before what is put on another: a trial of ``cuda_ipc`` would write over what a
    kernel of the engine has still to read. So this memory is of a stream without such kernels.
    """
    with beside_engine(device):
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


def current_context(device: torch.device) -> CurrentContext:
    """The GPU's context, to be current on this thread within a ``with``: also for libraries that
    work in whatever it is. Raises TransportUnavailable.
    """
    try:
        return driver().current(device)
    except CudaError as exc:
        raise TransportUnavailable(f"cuda_ipc: {exc}") from exc


def _allocation_of(address: int) -> tuple[int, int]:
    try:
        return driver().address_range(address)
    except CudaError as exc:
        raise TransportUnavailable(f"cuda_ipc: {exc}") from exc


def _bindings() -> ModuleType:
    try:
        return importlib.import_module("cuda.bindings.driver")  # optional, and without types
    except ImportError as exc:
        raise TransportUnavailable(
            f"cuda_ipc: expected the cuda-bindings package, got {exc}; {install('cuda')}"
        ) from exc


def _call(bindings: ModuleType, name: str, *arguments: object) -> tuple[Any, ...]:
    error, *results = getattr(bindings, name)(*arguments)
    if int(error) != 0:
        _, text = bindings.cuGetErrorString(error)
        reason = text.decode() if isinstance(text, bytes) else str(error)
        raise TransportUnavailable(f"cuda_ipc: {name}: {reason}")
    return tuple(results)
