"""What stands in for a GPU: where there is none, shared pools that another process maps and kernels
in Triton's interpreter; where there is one, memory that its own process may map too.
"""

from __future__ import annotations

import os
import struct
from typing import ClassVar

import torch
from torch import Tensor

from kvxfer.config import Config
from kvxfer.kernels.strided_cast import launch_cast
from kvxfer.kernels.strided_copy import launch_copy
from kvxfer.tensors import device_launch
from kvxfer.tensors.device_memory import DeviceMemory, Gpu, MappedMemory
from kvxfer.tensors.shared_memory import open_shared
from kvxfer.transfer.manifest import CudaIpcHandle, MemfdHandle
from kvxfer.transports import registry
from kvxfer.transports.base import DirectSource, LocalMemory, Wake
from kvxfer.transports.channel import Context
from kvxfer.transports.copy_thread import Copier
from kvxfer.transports.cuda_ipc_direct import CudaIpcSink, cuda_ipc_source
from tests.conftest import HAS_CUDA

_PACKED = struct.Struct("<16si44x")


class HostGpu(Gpu):
    """Of one rank's memory, which must be shared pools."""

    def __init__(self, memory: LocalMemory, *, reaches_host: bool = True) -> None:
        super().__init__(torch.device("cpu"))
        self._reaches_host = reaches_host
        self._pinned: set[int] = set()
        self._handles = {
            tensor.data_ptr(): info.handle
            for tensor, info in zip(memory.tensors, memory.infos, strict=True)
        }
        self.num_mapped = 0

    def export(self, tensor: Tensor) -> CudaIpcHandle:
        known = self._handles[tensor.data_ptr()]
        assert isinstance(known, MemfdHandle)
        return CudaIpcHandle(
            boot_id=known.boot_id,
            pid=known.pid,
            handle=_PACKED.pack(known.nonce, known.fd),
            offset=0,
            nbytes=known.nbytes,
        )

    def map(self, handle: CudaIpcHandle) -> MappedMemory:
        nonce, fd = _PACKED.unpack(handle.handle)
        known = MemfdHandle(
            boot_id=handle.boot_id, pid=handle.pid, fd=fd, nbytes=handle.nbytes, nonce=nonce
        )
        pool = open_shared(known)
        self.num_mapped += 1

        def close() -> None:
            pool.close()
            self.num_mapped -= 1

        return MappedMemory(DeviceMemory(pool.tensor.data_ptr(), handle.nbytes), close)

    def make_stream(self) -> None:
        return None

    def reaches(self, tensor: Tensor) -> bool:
        return self._reaches_host or tensor.data_ptr() in self._pinned

    def pinned(self, nbytes: int) -> Tensor:
        tensor = torch.empty(nbytes, dtype=torch.uint8)
        self._pinned.add(tensor.data_ptr())
        return tensor


class OneProcessGpu(Gpu):
    """A GPU whose memory this process can "map" as well: CUDA maps that of others only."""

    _own: ClassVar[dict[tuple[bytes, int], int]] = {}

    def export(self, tensor: Tensor) -> CudaIpcHandle:
        handle = super().export(tensor)
        self._own[handle.handle, handle.offset] = tensor.data_ptr()
        return handle

    def map(self, handle: CudaIpcHandle) -> MappedMemory:
        if handle.pid != os.getpid():
            return super().map(handle)
        address = self._own[handle.handle, handle.offset]
        return MappedMemory(DeviceMemory(address, handle.nbytes), lambda: None)


def gpu_of(memory: LocalMemory) -> Gpu:
    """What a rank of a test has."""
    return OneProcessGpu(memory.device) if memory.device.type == "cuda" else HostGpu(memory)


def gpu_of_sink(sink: object) -> HostGpu:
    """What stands in for the GPU of this sink."""
    assert isinstance(sink, CudaIpcSink)
    assert isinstance(sink._gpu, HostGpu)
    return sink._gpu


def source_without_gpu(
    memory: LocalMemory, config: Config, copy_thread: Copier, wake: Wake, context: Context
) -> DirectSource:
    return cuda_ipc_source(memory, gpu=gpu_of(memory))


def sink_without_gpu(
    memory: LocalMemory, config: Config, copy_thread: Copier, wake: Wake, context: Context
) -> CudaIpcSink:
    return CudaIpcSink(memory, config, copy_thread, wake, context, gpu_of(memory))


def serve_without_gpu() -> None:
    """In this process, ``cuda_ipc`` takes what stands in."""
    registry.SOURCES["cuda_ipc"] = source_without_gpu
    registry.SINKS["cuda_ipc"] = sink_without_gpu
    if not HAS_CUDA:
        vars(device_launch).update(launch_copy=launch_copy, launch_cast=launch_cast)
