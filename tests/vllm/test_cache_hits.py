"""Prefix hits beside those of vLLM's coordinator, for the same groups and the same named blocks.

Not compared, as they differ on purpose (docs/cache.md): windows of one token, and chunks that are
no multiple of a block.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvxfer.cache import specs as ours
from kvxfer.cache.kv_cache_manager import KVCacheManager

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM loads parts of torch that other parts call deprecated
    from vllm.v1 import kv_cache_interface as theirs
    from vllm.v1.core.kv_cache_manager import KVCacheManager as TheirManager
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
NUM_BLOCKS = 80


def full(block_size: int) -> tuple[Any, Any]:
    shape = {"block_size": block_size, "num_kv_heads": 1, "head_size": 1}
    return (
        ours.FullAttentionSpec(**shape, dtype="float32"),
        theirs.FullAttentionSpec(**shape, dtype=torch.float32),
    )


def window(block_size: int, tokens: int) -> tuple[Any, Any]:
    shape = {"block_size": block_size, "num_kv_heads": 1, "head_size": 1, "sliding_window": tokens}
    return (
        ours.SlidingWindowSpec(**shape, dtype="float32"),
        theirs.SlidingWindowSpec(**shape, dtype=torch.float32),
    )


def chunked(block_size: int, tokens: int) -> tuple[Any, Any]:
    shape = {"block_size": block_size, "num_kv_heads": 1, "head_size": 1}
    return (
        ours.ChunkedLocalAttentionSpec(**shape, dtype="float32", attention_chunk_size=tokens),
        theirs.ChunkedLocalAttentionSpec(**shape, dtype=torch.float32, attention_chunk_size=tokens),
    )


def state(block_size: int) -> tuple[Any, Any]:
    return (
        ours.MambaSpec(block_size=block_size, shapes=((1,),), dtypes=("float32",)),
        theirs.MambaSpec(
            block_size=block_size,
            shapes=((1,),),
            dtypes=(torch.float32,),
            mamba_cache_mode="all",
        ),
    )


PLANS = {
    "full": [full(4)],
    "window": [window(4, 9)],
    "chunks": [chunked(4, 8)],
    "state": [state(4)],
    "full, window": [full(4), window(4, 9)],
    "full, two windows": [full(4), window(4, 9), window(4, 5)],
    "full, chunks": [full(4), chunked(4, 8)],
    "full, state": [full(4), state(4)],
    "full 4, window 8": [full(4), window(8, 17)],
    "full 8, window 4": [full(8), window(4, 10)],
    "full 4, windows 8 and 12": [full(4), window(8, 9), window(12, 13)],
    "full 6, window 4": [full(6), window(4, 7)],
}


def managers(plan: Sequence[tuple[Any, Any]]) -> tuple[KVCacheManager, Any]:
    groups = [ours.KVCacheGroupSpec([str(at)], spec) for at, (spec, _) in enumerate(plan)]
    own = KVCacheManager(
        ours.KVCacheConfig(NUM_BLOCKS, [], groups), enable_caching=True, max_step_tokens=64
    )
    their_groups = [theirs.KVCacheGroupSpec([str(at)], spec) for at, (_, spec) in enumerate(plan)]
    sizes = [spec.block_size for spec, _ in plan]
    other = TheirManager(
        theirs.KVCacheConfig(NUM_BLOCKS, [], their_groups),
        max_model_len=256,
        scheduler_block_size=math.lcm(*sizes),
        hash_block_size=math.gcd(*sizes),
        enable_caching=True,
    )
    return own, other


@pytest.mark.parametrize("name", PLANS)
def test_hits_are_equal(name: str) -> None:
    """Random blocks of a prompt are known; every second time most of them."""
    plan, generator = PLANS[name], random.Random(name)
    num_hits = 0
    for number in range(300):
        own, other = managers(plan)
        step, num_tokens = own.hash_block_size, 72
        hashes = [number.to_bytes(32, "big") for number in range(1, num_tokens // step + 1)]
        share = generator.choice([0.5, 0.95])
        for group, manager in enumerate(own.groups):
            names = manager.block_names(hashes)
            blocks = own.pool.get_new_blocks(len(names))
            assert [block.block_id for block in other.block_pool.get_new_blocks(len(names))] == [
                block.block_id for block in blocks
            ]
            for at, block in enumerate(blocks):
                if generator.random() > share:
                    continue
                own.pool.cache_full_blocks(blocks, names, at, at + 1, group)
                other.block_pool._insert_block_hash(
                    make_block_hash_with_group_id(names[at], group),
                    other.block_pool.blocks[block.block_id],
                    num_tokens=(at + 1) * manager.block_size,
                )
        max_tokens = generator.randrange(num_tokens + 1)
        hit = own.find_longest_cache_hit(hashes, max_tokens)
        their_blocks, their_tokens, _ = other.coordinator.find_longest_cache_hit(hashes, max_tokens)
        assert hit.num_tokens == their_tokens, number
        assert [[block.block_id for block in blocks] for blocks in hit.blocks] == [
            [block.block_id for block in blocks] for blocks in their_blocks
        ]
        num_hits += hit.num_tokens > 0
    assert num_hits > 30
