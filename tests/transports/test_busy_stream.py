"""An engine's stream has work to do while kvxfer works on streams of its own: neither harms the
other's memory.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvxfer.tensors.cuda_driver import CurrentStream
from kvxfer.tensors.device_copy import CopySettings, DeviceCopier, flat_copy
from kvxfer.tensors.device_memory import DeviceMemory, Gpu
from kvxfer.transports.cuda_ipc_direct import measure_copies
from kvxfer.transports.pipe import make_staging

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
NBYTES = 16 << 20
"""PyTorch shares no allocation of so many with others: what was freed is found again."""
RING_NBYTES = 1 << 16
BUSY_CYCLES = tuple(1 << power for power in range(29, 36, 2))
"""Of an H200: 0.3 to 17 s."""


def read_late(values: Tensor, disturb: Callable[[], None]) -> Tensor:
    """The values as a kernel of the current stream reads them that runs after ``disturb`` has
    returned; PyTorch has taken their memory back before.
    """
    for cycles in BUSY_CYCLES:
        torch.cuda.empty_cache()
        room, read = values.to(CUDA), torch.empty_like(values, device=CUDA)
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        read.copy_(room)
        del room
        over = CurrentStream(CUDA).record()
        disturb()
        was_late = not over.query()
        torch.cuda.synchronize()
        if was_late:
            return read.cpu()
    pytest.fail("expected a stream that is busy for longer than a trial, got none")


def measure() -> Callable[[], None]:
    memory = torch.full((NBYTES,), 0x5A, dtype=torch.uint8, device=CUDA)

    def disturb() -> None:
        measure_copies(Gpu(CUDA), DeviceMemory(memory.data_ptr(), NBYTES))

    return disturb


def launch() -> Callable[[], None]:
    stream = Gpu(CUDA).make_stream()

    def disturb() -> None:
        copier = DeviceCopier(CUDA, CopySettings(ring_nbytes=RING_NBYTES))
        copier.warm(flat_copy(0, 0, 1 << 20), stream).synchronize()

    return disturb


@pytest.mark.parametrize(
    ("make", "nbytes"),
    [
        pytest.param(measure, NBYTES, id="a trial's landing"),
        pytest.param(launch, RING_NBYTES, id="numbers of a launch"),
    ],
)
def test_what_a_waiting_kernel_reads_is_not_written(
    make: Callable[[], Callable[[], None]], nbytes: int
) -> None:
    disturb = make()
    disturb()  # compiled, loaded
    values = torch.arange(nbytes // 8)
    assert torch.equal(read_late(values, disturb), values)


def test_staging_is_zero_when_it_is_there_and_never_after() -> None:
    """Not when the engine's stream gets to it: what was packed meanwhile would be lost."""
    stream = Gpu(CUDA).make_stream()
    assert stream is not None
    stagings: list[Tensor] = []  # to free one is to wait for the GPU
    seen: list[Tensor] = []
    used = [make_staging(NBYTES, CUDA).fill_(7) for _ in range(8)]
    torch.cuda.synchronize()
    del used

    def disturb() -> None:
        staging = make_staging(NBYTES, CUDA)
        stagings.append(staging)
        with torch.cuda.stream(stream):
            seen.append(staging.clone())
            staging.fill_(9)
        stream.synchronize()

    read_late(torch.zeros(1), disturb)
    assert not bool(seen[-1].any())
    assert bool((stagings[-1] == 9).all())
