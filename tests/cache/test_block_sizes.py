"""Groups whose blocks have as many bytes and other numbers of tokens, as the planner makes them."""

from __future__ import annotations

import pytest

from kvxfer.cache import get_kv_cache_config
from kvxfer.cache.block_pool import BlockPool
from kvxfer.cache.kv_cache_manager import CacheHit, KVCacheManager
from kvxfer.cache.manager import manager_for
from kvxfer.cache.specs import FullAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec
from tests.cache.planning_cases import config, full, layers, window

HASHES = [number.to_bytes(32, "big") for number in range(1, 1200)]


def managed(
    specs: dict[str, KVCacheSpec], *, num_usable: int = 900, max_step_tokens: int = 64
) -> KVCacheManager:
    plan = get_kv_cache_config(
        config(max_num_batched_tokens=max_step_tokens, num_gpu_blocks_override=num_usable + 1),
        specs,
        0,
    )
    return KVCacheManager(plan, enable_caching=True, max_step_tokens=max_step_tokens)


def two_sizes(num_usable: int = 900) -> KVCacheManager:
    """Blocks of 16 tokens that keep everything, and of 32 that keep a window of 48."""
    return managed(layers((1, full(2)), (1, window(48))), num_usable=num_usable)


def compute(manager: KVCacheManager, request_id: str, start: int, end: int, step: int = 64) -> None:
    for lo in range(start, end, step):
        hi = min(lo + step, end)
        manager.grow(request_id, lo, hi)
        manager.cache_blocks(request_id, HASHES, hi)


def no_hit(manager: KVCacheManager) -> CacheHit:
    return CacheHit(((),) * len(manager.groups), 0)


def test_sizes_of_a_plan() -> None:
    manager = two_sizes()
    assert [group.block_size for group in manager.groups] == [16, 32]
    assert (manager.hash_block_size, manager.alignment_tokens) == (16, 32)


def test_each_group_has_blocks_of_its_own_size() -> None:
    manager = two_sizes()
    manager.admit("a", num_tokens=200, hit=no_hit(manager))
    # 13 blocks of 16. A step of 64 after 47 of the window: 1 + 110 / 32 blocks, rounded up.
    assert manager.num_unpromised_blocks == 900 - 13 - 5
    assert manager.grow("a", 0, 50) == ((1, 2, 3, 4), (5, 6))
    assert manager.grow("a", 50, 65) == ((7,), (8,))
    assert manager.block_ids("a") == ((1, 2, 3, 4, 7), (5, 6, 8))
    manager.grow("a", 65, 80)
    manager.grow("a", 80, 81)  # sees tokens 33 to 80
    assert manager.block_ids("a")[1][:2] == (-1, 6)
    manager.free("a")
    assert manager.num_free_blocks == manager.num_unpromised_blocks == 900


def test_a_hit_ends_where_blocks_of_all_groups_end() -> None:
    manager = two_sizes()
    manager.admit("a", num_tokens=112, hit=no_hit(manager))
    compute(manager, "a", 0, 112)
    # Seven blocks of 16 are known, and three of 32: 96 tokens.
    hit = manager.find_longest_cache_hit(HASHES, 112)
    assert hit.num_tokens == 96
    assert [len(blocks) for blocks in hit.blocks] == [6, 3]
    assert manager.find_longest_cache_hit(HASHES, 95).num_tokens == 64
    assert manager.find_longest_cache_hit(HASHES[:5], 95).num_tokens == 64  # of 80 hashed tokens
    assert manager.find_longest_cache_hit(HASHES, 31) == no_hit(manager)
    manager.pool.evict_blocks([manager.block_ids("a")[0][5]])  # tokens 80 to 95
    assert manager.find_longest_cache_hit(HASHES, 112).num_tokens == 64


def test_groups_that_keep_everything_agree_too() -> None:
    manager = managed(layers((1, full()), (1, full(block_size=24))))
    assert [group.block_size for group in manager.groups] == [16, 24]
    assert (manager.hash_block_size, manager.alignment_tokens) == (8, 48)
    manager.admit("a", num_tokens=120, hit=no_hit(manager))
    compute(manager, "a", 0, 120)
    # 112 tokens in blocks of 16, 120 in blocks of 24.
    hit = manager.find_longest_cache_hit(HASHES, 120)
    assert hit.num_tokens == 96
    assert [len(blocks) for blocks in hit.blocks] == [6, 4]
    alone = manager.groups[0].find_longest_cache_hit(HASHES, 120, 48)
    assert len(alone) == 6


def test_a_blocks_name_is_the_hash_at_its_end() -> None:
    manager = two_sizes()
    manager.admit("a", num_tokens=64, hit=no_hit(manager))
    compute(manager, "a", 0, 64)
    of_16, of_32 = manager.block_ids("a")
    blocks = manager.pool.blocks
    assert [blocks[block_id].block_hash for block_id in of_16] == HASHES[:4]
    assert [blocks[block_id].block_hash for block_id in of_32] == [HASHES[1], HASHES[3]]


def test_states_in_blocks_of_4096_beside_attention_in_blocks_of_16() -> None:
    state = MambaSpec(block_size=4096, shapes=((64,),), dtypes=("float16",))
    manager = managed(layers((2, full()), (2, state)), max_step_tokens=1024)
    assert [group.block_size for group in manager.groups] == [16, 4096]
    manager.admit("a", num_tokens=5000, hit=no_hit(manager))
    compute(manager, "a", 0, 5000, step=1024)  # a step ends at 4096
    hit = manager.find_longest_cache_hit(HASHES, 4999)
    assert hit.num_tokens == 4096
    assert [len(blocks) for blocks in hit.blocks] == [256, 1]
    assert manager.find_longest_cache_hit(HASHES, 4095) == no_hit(manager)
    assert manager.admit("b", num_tokens=5000, hit=hit)
    compute(manager, "b", 4096, 5000, step=1024)
    assert manager.block_ids("b")[0][:256] == manager.block_ids("a")[0][:256]
    manager.free("a")
    manager.free("b")
    assert manager.num_free_blocks == 900


def test_heads_of_512_beside_256_with_a_window() -> None:
    heads = {"num_kv_heads": 1, "dtype": "bfloat16", "block_size": 16}
    specs: dict[str, KVCacheSpec] = {
        "full": FullAttentionSpec(head_size=512, **heads),  # type: ignore[arg-type]
        "window": SlidingWindowSpec(head_size=256, sliding_window=100, **heads),  # type: ignore[arg-type]
    }
    manager = managed(specs)
    assert [group.block_size for group in manager.groups] == [16, 32]
    manager.admit("a", num_tokens=300, hit=no_hit(manager))
    compute(manager, "a", 0, 300)
    manager.free("a")
    hit = manager.find_longest_cache_hit(HASHES, 299)
    assert hit.num_tokens == 288
    assert [sum(not block.is_null for block in blocks) for blocks in hit.blocks] == [18, 4]


def test_tokens_from_elsewhere() -> None:
    manager = two_sizes()
    # 100 tokens are loaded: a window of 48 begins at 53, in the second block of 32.
    assert manager.admit("a", num_tokens=120, hit=no_hit(manager), num_external_tokens=100)
    assert manager.block_ids("a") == ((1, 2, 3, 4, 5, 6, 7), (-1, 8, 9, 10))
    manager.leave_unhashed("a", 1, [1])
    manager.cache_blocks("a", HASHES, 100)
    assert manager.find_longest_cache_hit(HASHES, 100) == no_hit(manager)
    assert manager.pool.get_cached_block(HASHES[5], 1) is manager.pool.blocks[9]


def test_hashes_must_divide_a_block() -> None:
    with pytest.raises(ValueError, match="hash_block_size: expected a divisor of the 16 .* got 6"):
        manager_for(full(), BlockPool(4), hash_block_size=6)


@pytest.mark.parametrize("wrong", [1.7, 1.0, "1", None])
def test_ids_that_are_no_integers_are_refused(wrong: object) -> None:
    manager = two_sizes()
    manager.admit("a", num_tokens=64, hit=no_hit(manager), num_external_tokens=64)
    with pytest.raises(TypeError, match=r"positions\[1\]: expected an integer, got "):
        manager.leave_unhashed("a", 0, [0, wrong])  # type: ignore[list-item]
    manager.cache_blocks("a", HASHES, 64)
    with pytest.raises(TypeError, match=r"block_ids\[1\]: expected an integer, got "):
        manager.pool.evict_blocks([1, wrong])  # type: ignore[list-item]
    assert manager.find_longest_cache_hit(HASHES, 64).num_tokens == 64
