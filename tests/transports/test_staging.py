"""Staging that no allocator hands out again."""

from __future__ import annotations

import pytest
import torch

from kvxfer.errors import TransportUnavailable
from kvxfer.transports.pipe import make_staging
from tests.helpers import assert_same_bytes, poisoned

MOST_NBYTES = 1 << 62
"""No machine has so many."""
CPU = torch.device("cpu")


def test_host_staging_is_zeroed_and_flat() -> None:
    staging = make_staging(4097, CPU)
    assert_same_bytes(staging, torch.zeros(4097, dtype=torch.uint8))
    staging.copy_(poisoned((4097,)))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_staging_for_which_there_is_no_room(device: str) -> None:
    with pytest.raises(TransportUnavailable, match=rf"{MOST_NBYTES} bytes|cuMemAlloc: "):
        make_staging(MOST_NBYTES, torch.device(device))


@pytest.mark.gpu
def test_staging_on_a_gpu_is_no_allocators() -> None:
    device = torch.device("cuda:0")
    before, nbytes = torch.cuda.memory_allocated(device), 8 << 20
    staging = make_staging(nbytes, device)
    assert (staging.dtype, staging.device, staging.numel()) == (torch.uint8, device, nbytes)
    assert torch.cuda.memory_allocated(device) == before
    staging.fill_(7)
    part = staging[5:]
    del staging
    others = [make_staging(nbytes, device) for _ in range(4)]
    for other in others:
        other.fill_(9)
    assert bool((part == 7).all())  # as long as a tensor of it lives, nobody else gets it
    del part, others, other
    for _ in range(64):  # more than any GPU has
        make_staging(4 << 30, device)
