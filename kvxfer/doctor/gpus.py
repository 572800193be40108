"""The GPUs of this process, and CUDA IPC between them with real bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import numpy as np
import torch

from kvxfer.doctor.rows import GpuFacts, IpcTry
from kvxfer.errors import KvxferError
from kvxfer.tensors.device_memory import Gpu
from kvxfer.transfer.manifest import CudaIpcHandle

_IPC_NBYTES = 16 << 20


@contextmanager
def looking() -> Iterator[tuple[GpuFacts, ...]]:
    numbers = range(torch.cuda.device_count())
    yield tuple(
        GpuFacts(
            number,
            torch.cuda.get_device_name(number),
            *torch.cuda.mem_get_info(number),
            tuple(
                other
                for other in numbers
                if other != number and torch.cuda.can_device_access_peer(number, other)
            ),
        )
        for number in numbers
    )


@contextmanager
def lending() -> Iterator[tuple[CudaIpcHandle, ...]]:
    """Memory on each GPU that other processes can map. Raises TransportUnavailable."""
    lent = [_pattern(number, number) for number in range(torch.cuda.device_count())]
    for tensor in lent:
        torch.cuda.synchronize(tensor.device)
    yield tuple(Gpu(tensor.device).export(tensor) for tensor in lent)


@contextmanager
def borrowing(handles: tuple[CudaIpcHandle, ...]) -> Iterator[tuple[IpcTry, ...]]:
    """Copy the memory of each GPU of another process to each GPU of this one, and compare."""
    yield tuple(
        _try(source, handle, sink)
        for source, handle in enumerate(handles)
        for sink in range(torch.cuda.device_count())
    )


def _try(source: int, handle: CudaIpcHandle, sink: int) -> IpcTry:
    # They need Triton, and this module is imported without it
    from kvxfer.tensors.device_copy import CopySettings, DeviceCopier, flat_copy
    from kvxfer.transports.cuda_ipc_direct import measure_copies

    gpu = Gpu(torch.device("cuda", sink))
    try:
        with closing(gpu.map(handle)) as mapped, torch.cuda.device(gpu.device):
            landing = torch.zeros(_IPC_NBYTES, dtype=torch.uint8, device=gpu.device)
            torch.cuda.synchronize(gpu.device)
            stream, ids = gpu.make_stream(), np.zeros(1, np.int64)
            copier = DeviceCopier(gpu.device, CopySettings(ring_nbytes=1 << 16))
            copy = flat_copy(mapped.memory.address, landing.data_ptr(), _IPC_NBYTES)
            copier.copy(copy, ids, ids, (0, copy.sink.tile.block_tokens), stream=stream)
            copier.mark(stream).synchronize()
            is_equal = torch.equal(landing, _pattern(source, sink))
            speed = measure_copies(gpu, mapped.memory)
    except (KvxferError, RuntimeError) as exc:
        return IpcTry(source, sink, problem=f"{exc}".partition("\n")[0])
    return IpcTry(source, sink, is_equal=is_equal, gb_per_s=speed.gb_per_s)


def _pattern(number: int, device: int) -> torch.Tensor:
    numbers = torch.arange(_IPC_NBYTES, dtype=torch.int32, device=torch.device("cuda", device))
    return ((numbers + 31 * number) % 251).to(torch.uint8)
