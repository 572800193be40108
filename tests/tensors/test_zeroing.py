"""Zeroing: exactly the named blocks of all layers, nothing beside them."""

from __future__ import annotations

import pytest
import torch

from kvxfer.tensors.allocate import KVPool, KVPoolSpec, PoolLayout, allocate_kv_pool
from kvxfer.tensors.zeroing import zero_blocks


def make_pool(layout: PoolLayout, block_tokens: int) -> KVPool:
    spec = KVPoolSpec(
        layout=layout,
        layer_names=("a", "b"),
        num_blocks=5,
        block_tokens=block_tokens,
        head_lo=0,
        head_hi=2,
        head_size=4,
        dtype=torch.bfloat16,
    )
    pool = allocate_kv_pool(spec)
    pool.buffer.fill_(0xEE)
    return pool


def naive_zero(pool: KVPool, block_ids: list[int]) -> bytes:
    """The buffer as it must be: byte ranges found token by token through the regions."""
    raw = bytearray(pool.buffer.numpy().tobytes())
    for region in pool.regions:
        kernel_tokens = region.block_tokens // region.kernel_blocks
        for block in block_ids:
            for token in range(region.block_tokens):
                for head in range(region.head_hi - region.head_lo):
                    kernel = block * region.kernel_blocks + token // kernel_tokens
                    at = region.offset + kernel * region.stride_block + head * region.stride_head
                    at += token % kernel_tokens * region.stride_token
                    raw[at : at + region.inner_nbytes] = bytes(region.inner_nbytes)
    return bytes(raw)


@pytest.mark.parametrize("block_ids", [[], [0], [4], [3, 1], [2, 2], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize(
    ("layout", "block_tokens"),
    [(PoolLayout.HND, 8), (PoolLayout.HND, 24), (PoolLayout.NHD, 16), (PoolLayout.NHD, 24)],
)
def test_zeroes_exactly_the_blocks(
    layout: PoolLayout, block_tokens: int, block_ids: list[int]
) -> None:
    pool = make_pool(layout, block_tokens)
    want = naive_zero(pool, block_ids)
    zero_blocks(pool, block_ids)
    assert pool.buffer.numpy().tobytes() == want
    share = len(set(block_ids)) / 5
    assert int((pool.buffer == 0).sum()) == share * pool.buffer.numel()


@pytest.mark.parametrize(("block_ids", "wrong"), [([0, 5], "5"), ([-1, 2], "-1")])
def test_ids_outside_the_pool_change_nothing(block_ids: list[int], wrong: str) -> None:
    pool = make_pool(PoolLayout.NHD, 24)
    with pytest.raises(ValueError, match=rf"block_ids: expected ids in \[0, 5\), got {wrong}"):
        zero_blocks(pool, block_ids)
    assert int((pool.buffer != 0xEE).sum()) == 0
