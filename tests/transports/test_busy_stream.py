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
NBYTES = 8 << 20
RING_NBYTES = 1 << 16
BUSY_CYCLES = tuple(1 << power for power in range(29, 36, 2))
"""Of an H200: 0.3 to 17 s."""


def while_busy(begin: Callable[[], Tensor], disturb: Callable[[], None]) -> Tensor:
    """What ``begin`` has put on the current stream behind work that was not over when ``disturb``
    returned; as the stream leaves it.
    """
    for cycles in BUSY_CYCLES:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what is free next is what ``begin`` has freed
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        result = begin()
        over = CurrentStream(CUDA).record()
        disturb()
        if not over.query():
            torch.cuda.synchronize()
            return result
    pytest.fail("expected a stream that is busy for longer than a trial, got none")


def measure() -> Callable[[], None]:
    memory = torch.full((NBYTES,), 0x5A, dtype=torch.uint8, device=CUDA)
    torch.cuda.synchronize()

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
    """PyTorch has given its memory away already."""
    disturb = make()
    disturb()  # compiled, loaded
    expected = torch.arange(nbytes // 8).pin_memory()

    def begin() -> Tensor:
        room, read = (torch.empty_like(expected, device=CUDA) for _ in range(2))
        room.copy_(expected, non_blocking=True)
        read.copy_(room)
        return read  # the room is free from now on, and is not read yet

    assert torch.equal(while_busy(begin, disturb).cpu(), expected)


def test_staging_is_zeroed_before_it_is_used() -> None:
    """And not when the engine's stream gets to it."""
    stream = Gpu(CUDA).make_stream()
    assert stream is not None
    found: list[Tensor] = []

    def disturb() -> None:
        staging = make_staging(NBYTES, CUDA)
        found.append(staging)
        with torch.cuda.stream(stream):
            staging.fill_(7)
        stream.synchronize()

    while_busy(lambda: torch.zeros(1, device=CUDA), disturb)
    assert bool((found[-1] == 7).all())


def test_staging_is_zero_when_it_is_there() -> None:
    """Memory that was another's tells nothing of it."""
    stream = Gpu(CUDA).make_stream()
    assert stream is not None
    seen: list[Tensor] = []
    used = [make_staging(NBYTES, CUDA).fill_(7) for _ in range(8)]
    torch.cuda.synchronize()
    del used

    def disturb() -> None:
        staging = make_staging(NBYTES, CUDA)
        with torch.cuda.stream(stream):
            seen.append(staging.clone())
        stream.synchronize()

    while_busy(lambda: torch.zeros(1, device=CUDA), disturb)
    assert not bool(seen[-1].any())
