"""The zeroing kernel, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from kvxfer.kernels.zero_blocks import zero_blocks
from tests.helpers import assert_same_bytes, poisoned

CASES = [  # (num_segments, num_blocks, nbytes, gap_nbytes, block_ids)
    pytest.param(1, 1, 4, 0, [0], id="one-word"),
    pytest.param(3, 8, 4096, 0, [7, 0, 3], id="several-segments"),
    pytest.param(2, 8, 4096 + 36, 64, [1, 2], id="ragged-with-gaps"),
    pytest.param(2, 4, 64, 0, [2, 2], id="repeated"),
    pytest.param(2, 4, 64, 0, [], id="nothing"),
]


def segment_table(pieces: torch.Tensor) -> torch.Tensor:
    """Of ``pieces`` [num_segments, num_blocks, n]: views whose last dimension is contiguous."""
    assert (pieces.stride(-1), pieces.element_size()) == (1, 1)
    rows = [(segment.data_ptr(), pieces.stride(1), pieces.shape[2]) for segment in pieces]
    return torch.tensor(rows, dtype=torch.int64, device=pieces.device)


@pytest.mark.parametrize(("num_segments", "num_blocks", "nbytes", "gap_nbytes", "block_ids"), CASES)
def test_zeroes_these_blocks_and_nothing_else(
    num_segments: int,
    num_blocks: int,
    nbytes: int,
    gap_nbytes: int,
    block_ids: list[int],
    device: torch.device,
) -> None:
    shape = (num_segments, num_blocks, nbytes + gap_nbytes)
    got, want = poisoned(shape, device), poisoned(shape, device)
    ids = torch.tensor(block_ids, dtype=torch.int64, device=device)
    zero_blocks(segment_table(got[:, :, :nbytes]), ids, nbytes)
    want[:, ids, :nbytes] = 0
    assert_same_bytes(got, want)
    num_zeros = int((got == 0).sum())
    assert num_zeros == num_segments * nbytes * len(set(block_ids))


def test_segments_of_different_allocations_and_sizes(device: torch.device) -> None:
    large, small = poisoned((1, 4, 8192), device), poisoned((1, 4, 12), device)
    table = torch.cat([segment_table(large), segment_table(small)])
    zero_blocks(table, torch.tensor([1, 3], device=device), 8192)
    for pool in (large, small):
        assert pool[0, [1, 3]].count_nonzero() == 0
        assert (pool[0, [0, 2]] == 0xEE).all()


@pytest.mark.parametrize(("word_nbytes", "nbytes"), [(1, 21), (1, 4097), (2, 42), (4, 84)])
def test_words_of_other_sizes(word_nbytes: int, nbytes: int, device: torch.device) -> None:
    """Pieces without gaps, so that a byte too many is a byte of the next block."""
    got, want = poisoned((2, 4, nbytes), device), poisoned((2, 4, nbytes), device)
    ids = torch.tensor([2, 0], device=device)
    zero_blocks(segment_table(got), ids, nbytes, word_nbytes)
    want[:, ids] = 0
    assert_same_bytes(got, want)


@pytest.mark.parametrize("tile_nbytes", [4096, 8192, 16384])
@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize("nbytes", [16, 8192, 8196, 40960])
def test_programs_of_any_size(
    tile_nbytes: int, first: int, nbytes: int, device: torch.device
) -> None:
    """Pieces that begin at a multiple of 16 bytes, or not; several programs each, or less."""
    got, want = poisoned((2, 3, nbytes + 48), device), poisoned((2, 3, nbytes + 48), device)
    ids = torch.tensor([2, 0], device=device)
    pieces = slice(first, first + nbytes)
    zero_blocks(segment_table(got[:, :, pieces]), ids, nbytes, tile_nbytes=tile_nbytes)
    want[:, ids, pieces] = 0
    assert_same_bytes(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("nbytes", [32768, 32772, 131072])
def test_a_pool_of_more_than_four_gib(nbytes: int) -> None:
    num_blocks = (5 << 30) // nbytes
    pool = poisoned((1, num_blocks, nbytes), "cuda")
    ids = torch.tensor([num_blocks - 1, 0, num_blocks // 2], device="cuda")
    zero_blocks(segment_table(pool), ids, nbytes)
    assert not pool[0, ids].any()
    pool[0, ids] = 0xEE
    assert bool((pool.view(-1).view(torch.int32) == -0x11111112).all())


def test_refusals(device: torch.device) -> None:
    table = torch.zeros((2, 3), dtype=torch.int64, device=device)
    ids = torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"expected shape \(num_segments, 3\), got \(3, 2\)"):
        zero_blocks(table.T, ids, 4)
    with pytest.raises(TypeError, match="expected int64"):
        zero_blocks(table, ids.int(), 4)
    with pytest.raises(ValueError, match="expected a multiple of 4, got 6"):
        zero_blocks(table, ids, 6)
    with pytest.raises(ValueError, match="word_nbytes: expected 1, 2 or 4, got 8"):
        zero_blocks(table, ids, 8, 8)
    with pytest.raises(ValueError, match="expected a multiple of 2, got 7"):
        zero_blocks(table, ids, 7, 2)
    with pytest.raises(ValueError, match="max_nbytes: expected at most 67107840, got 67107841"):
        zero_blocks(table, ids, 67107841, 1)
    with pytest.raises(
        ValueError, match="tile_nbytes: expected a power of two from 4096 on, got 2"
    ):
        zero_blocks(table, ids, 4, tile_nbytes=2048)
    many = torch.zeros((65536, 3), dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="expected at most 65535 segments, got 65536"):
        zero_blocks(many, ids, 4)
