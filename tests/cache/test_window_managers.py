"""Managers of layers that look back at a part of the tokens. Every expectation by hand: block size
4, blocks of one request get the ids 1, 2, 3 ...; ``-`` in a pattern is a block without a name.
"""

from __future__ import annotations

from itertools import product

import pytest

from kvxfer.cache.block_pool import BlockPool
from kvxfer.cache.manager import (
    ChunkedLocalAttentionManager,
    FullAttentionManager,
    GroupManager,
    MambaManager,
    SlidingWindowManager,
    manager_for,
)
from kvxfer.cache.specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from tests.cache.group_tables import allocate

BLOCK_SIZE = 4
HASHES = [number.to_bytes(32, "big") for number in range(1, 40)]


def full() -> FullAttentionSpec:
    return FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype="float32")


def sliding(window: int, block_size: int = BLOCK_SIZE) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype="float32", sliding_window=window
    )


def chunked(chunk: int, block_size: int = BLOCK_SIZE) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=1,
        dtype="float32",
        attention_chunk_size=chunk,
    )


def state(num_speculative_blocks: int = 0) -> MambaSpec:
    return MambaSpec(
        block_size=BLOCK_SIZE,
        shapes=((2,),),
        dtypes=("float32",),
        num_speculative_blocks=num_speculative_blocks,
    )


def make(spec: KVCacheSpec, num_usable_blocks: int = 30) -> GroupManager:
    return manager_for(spec, BlockPool(num_usable_blocks + 1))


def with_names(spec: KVCacheSpec, pattern: str) -> GroupManager:
    """One block after the other gets the next name, those at ``-`` none."""
    manager = make(spec)
    blocks = manager.pool.get_new_blocks(len(pattern))
    for position, mark in enumerate(pattern):
        if mark != "-":
            manager.pool.cache_full_blocks(blocks, HASHES, position, position + 1)
    return manager


def hit_ids(manager: GroupManager, max_tokens: int, num_hashes: int = 39) -> list[int]:
    hit = manager.find_longest_cache_hit(HASHES[:num_hashes], max_tokens)
    return [0 if block.is_null else block.block_id for block in hit]


def free_ids(manager: GroupManager) -> list[int]:
    return [block.block_id for block in manager.pool.get_free_blocks()]


# --- choice ---------------------------------------------------------------------------------------


def test_manager_for_each_kind() -> None:
    pool = BlockPool(2)
    latent = MLAAttentionSpec(block_size=4, num_kv_heads=1, head_size=1, dtype="float32")
    made_full = FullAttentionSpec(
        block_size=4, num_kv_heads=1, head_size=1, dtype="float32", sliding_window=8
    )
    for spec, kind in [
        (full(), FullAttentionManager),
        (latent, FullAttentionManager),
        (made_full, FullAttentionManager),
        (sliding(8), SlidingWindowManager),
        (chunked(8), ChunkedLocalAttentionManager),
        (state(), MambaManager),
    ]:
        manager = manager_for(spec, pool, group_id=3)
        assert type(manager) is kind
        assert manager.group_id == 3
    with pytest.raises(ValueError, match="kv_cache_spec of group 2: .* got KVCacheSpec"):
        manager_for(KVCacheSpec(block_size=4), pool, group_id=2)


# --- skipped tokens -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (sliding(1), {0: 0, 1: 1, 9: 9}),
        (sliding(6), {0: 0, 5: 0, 6: 1, 8: 3, 13: 8}),
        (chunked(6), {0: 0, 5: 0, 6: 6, 11: 6, 12: 12}),
        (state(), {0: 0, 1: 0, 2: 1, 9: 8}),
    ],
)
def test_skipped_tokens(spec: KVCacheSpec, expected: dict[int, int]) -> None:
    manager = make(spec)
    assert {n: manager.num_skipped_tokens(n) for n in expected} == expected


# --- the longest hit ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "pattern", "max_tokens", "expected"),
    [
        # window 9: two blocks are enough, right to left
        (9, "NNNNN", 20, [0, 0, 0, 4, 5]),
        (9, "NNNNN", 19, [0, 0, 3, 4]),
        (9, "NNN-N", 20, [0, 2, 3]),
        (9, "N-NN-", 20, [0, 0, 3, 4]),
        # fewer than two: only from the first token on
        (9, "N-N-N", 20, [1]),
        (9, "-N-N-", 20, []),
        (9, "N----", 20, [1]),
        # window 10: nine tokens before, of three blocks
        (10, "NN-NN", 20, [1, 2]),
        (10, "-NNN-", 20, [0, 2, 3, 4]),
        # 8 has 7 tokens before: two blocks; 5 has four: one; 2 has one: one
        (8, "--NN-", 20, [0, 0, 3, 4]),
        (8, "---N-", 20, []),
        (5, "---N-", 20, [0, 0, 0, 4]),
        (2, "N---N", 20, [0, 0, 0, 0, 5]),
        # a token that sees itself alone needs nothing from before
        (1, "-----", 15, [0, 0, 0]),
        (9, "NNNNN", 3, []),
        (9, "", 20, []),
    ],
)
def test_sliding_window_hit(
    window: int, pattern: str, max_tokens: int, expected: list[int]
) -> None:
    assert hit_ids(with_names(sliding(window), pattern), max_tokens) == expected


@pytest.mark.parametrize(
    ("chunk", "pattern", "max_tokens", "expected"),
    [
        # chunks of two blocks: nothing is needed at a chunk's end
        (8, "NNNNN", 20, [0, 0, 0, 0, 5]),
        (8, "NNNN-", 20, [0, 0, 0, 0]),
        (8, "-----", 20, [0, 0, 0, 0]),
        (8, "--N--", 12, [0, 0, 3]),
        (8, "NN---", 15, [0, 0]),
        (8, "N----", 7, [1]),
        (8, "-----", 7, []),
        # chunks of 6 begin inside blocks: at 12 tokens one ends, at 8 the last began at 6
        (6, "-----", 20, [0, 0, 0]),
        (6, "-N---", 11, [0, 2]),
        (6, "N----", 11, [1]),
        (6, "---NN", 20, [0, 0, 0, 0, 5]),  # 20 tokens: its chunk began at 18, in block 4
    ],
)
def test_chunked_hit(chunk: int, pattern: str, max_tokens: int, expected: list[int]) -> None:
    assert hit_ids(with_names(chunked(chunk), pattern), max_tokens) == expected


@pytest.mark.parametrize(
    ("pattern", "max_tokens", "expected"),
    [
        ("NNNNN", 20, [0, 0, 0, 0, 5]),
        ("NNN--", 20, [0, 0, 3]),
        ("--N--", 20, [0, 0, 3]),
        ("--N--", 11, []),
        ("N----", 20, [1]),
        ("-----", 20, []),
    ],
)
def test_state_hit_is_the_rightmost_block_alone(
    pattern: str, max_tokens: int, expected: list[int]
) -> None:
    assert hit_ids(with_names(state(), pattern), max_tokens) == expected


@pytest.mark.parametrize("spec", [full(), sliding(6), sliding(9), chunked(8), chunked(6), state()])
def test_hit_is_the_longest_that_the_next_token_can_use(spec: KVCacheSpec) -> None:
    """Every pattern of five blocks, against the definition: all blocks of needed tokens known."""
    for marks in product("N-", repeat=5):
        manager = with_names(spec, "".join(marks))
        lengths = [
            num_blocks
            for num_blocks in range(6)
            if all(
                marks[token // 4] == "N"
                for token in range(manager.num_skipped_tokens(4 * num_blocks), 4 * num_blocks)
            )
        ]
        for max_blocks in range(6):
            longest = max(length for length in lengths if length <= max_blocks)
            assert len(hit_ids(manager, 4 * max_blocks + 3)) == longest


def test_hit_is_at_most_the_known_names_and_refuses_negative_lengths() -> None:
    manager = with_names(sliding(9), "NNNNN")
    assert hit_ids(manager, 20, num_hashes=3) == [0, 2, 3]
    with pytest.raises(ValueError, match="max_tokens: expected at least 0, got -1"):
        manager.find_longest_cache_hit(HASHES, -1)


def test_lookups_do_not_depend_on_the_window() -> None:
    manager = with_names(sliding(17), "NNN-NNN-NNN-NNN-")
    asked: list[bytes] = []
    lookup = manager.pool.get_cached_block

    def count(block_hash: bytes, group_id: int = 0) -> object:
        asked.append(block_hash)
        return lookup(block_hash, group_id)

    manager.pool.get_cached_block = count  # type: ignore[method-assign,assignment]
    assert hit_ids(manager, 64) == [1, 2, 3]
    assert len(asked) == len(set(asked))


# --- dropping -------------------------------------------------------------------------------------


def test_dropped_blocks_are_null_and_freed_last_first_with_their_names() -> None:
    manager = make(sliding(6), 7)
    allocate(manager, "a", 24)
    manager.cache_blocks("a", HASHES, 24)
    manager.drop_skipped("a", 8)  # tokens 0 to 2: no whole block
    assert manager.block_ids("a") == [1, 2, 3, 4, 5, 6]
    manager.drop_skipped("a", 17)  # tokens 0 to 11
    assert manager.block_ids("a") == [-1, -1, -1, 4, 5, 6]
    assert free_ids(manager) == [7, 3, 2, 1]
    assert manager.num_used_blocks == manager.num_held_blocks("a") == 3
    assert [block.block_hash for block in manager.pool.blocks[1:4]] == HASHES[:3]
    manager.drop_skipped("a", 9)  # fewer than before
    manager.drop_skipped("a", 21)  # tokens 0 to 15
    assert manager.block_ids("a") == [-1, -1, -1, -1, 5, 6]
    assert free_ids(manager) == [7, 3, 2, 1, 4]
    manager.free("a")
    assert free_ids(manager) == [7, 3, 2, 1, 4, 6, 5]
    assert manager.num_used_blocks == 0


def test_dropped_blocks_that_another_request_holds_stay_in_use() -> None:
    manager = make(sliding(6), 5)
    allocate(manager, "a", 9)
    manager.cache_blocks("a", HASHES, 8)
    assert allocate(manager, "b", 9, manager.find_longest_cache_hit(HASHES, 8)) == [4]
    assert manager.block_ids("b") == [1, 2, 4]  # five tokens before the ninth: of two blocks
    manager.drop_skipped("a", 9)
    assert manager.block_ids("a") == [-1, 2, 3]
    assert free_ids(manager) == [5]
    assert manager.num_used_blocks == 4
    manager.free("b")
    assert free_ids(manager) == [4, 5, 1]


def test_growth_after_dropping_appends() -> None:
    manager = make(sliding(6), 4)
    for num_computed in range(40):
        manager.drop_skipped("a", num_computed) if num_computed else None
        assert allocate(manager, "a", num_computed + 1) is not None
        held = [i for i in manager.block_ids("a") if i != -1]
        assert len(set(held)) == len(held) <= 3
    assert manager.block_ids("a")[:8] == [-1] * 8


def test_tokens_from_elsewhere_get_blocks_from_the_window_on() -> None:
    manager = make(sliding(6), 6)
    allocate(manager, "a", 8)
    manager.cache_blocks("a", HASHES, 8)
    manager.free("a")
    hit = manager.find_longest_cache_hit(HASHES, 8)
    # 19 tokens ready: 14 to 18 are needed, of blocks 3 and 4; nothing of the hit
    assert allocate(manager, "b", 19, hit, 19) == [-1, 3, 4]
    assert manager.block_ids("b") == [-1, -1, -1, 3, 4]
    assert free_ids(manager) == [5, 6, 2, 1]
    # 11 tokens ready: 6 to 10 are needed, so the second block of the hit
    hit = manager.find_longest_cache_hit(HASHES, 8)
    assert allocate(manager, "c", 11, hit, 11) == [5]
    assert manager.block_ids("c") == [-1, 2, 5]


def test_null_blocks_are_not_named() -> None:
    manager = make(sliding(6), 6)
    allocate(manager, "a", 20, (), 20)
    manager.cache_blocks("a", HASHES, 20)
    named = [block.block_hash for block in manager.pool.blocks]
    assert named == [None, HASHES[3], HASHES[4], None, None, None, None]
    assert hit_ids(manager, 20) == [0, 0, 0, 1, 2]


# --- states ---------------------------------------------------------------------------------------


def test_a_state_is_written_where_its_tokens_end() -> None:
    manager = make(state(), 5)
    assert allocate(manager, "a", 10) == [-1, -1, 1]  # the state after 10 tokens
    assert allocate(manager, "a", 11) == []
    manager.drop_skipped("a", 11)
    assert allocate(manager, "a", 21) == [-1, -1, 2]
    assert manager.block_ids("a") == [-1, -1, 1, -1, -1, 2]
    manager.drop_skipped("a", 21)
    assert manager.block_ids("a") == [-1] * 5 + [2]
    assert free_ids(manager) == [1, 3, 4, 5]


def test_speculative_states_follow_the_last() -> None:
    manager = make(state(2), 9)
    assert allocate(manager, "a", 3) == [1, 2, 3]
    assert allocate(manager, "a", 13) == [4, 5, 6]  # two were there: states 3 and its followers
    assert manager.num_held_blocks("a") == manager.max_blocks(13, 10) == 6
    manager.drop_skipped("a", 13)
    assert manager.block_ids("a") == [-1, -1, -1, 4, 5, 6]


def test_only_states_at_a_blocks_end_are_named() -> None:
    manager = make(state(), 9)
    allocate(manager, "a", 3)
    manager.cache_blocks("a", HASHES, 3)
    allocate(manager, "a", 10)  # passes 4 and 8
    manager.cache_blocks("a", HASHES, 10)
    assert manager.block_ids("a") == [1, -1, 2]
    assert hit_ids(manager, 20) == []  # block 1 has the state after 3 tokens, not after 4
    allocate(manager, "a", 12)
    manager.cache_blocks("a", HASHES, 12)
    assert hit_ids(manager, 20) == [0, 0, 2]
    manager.drop_skipped("a", 12)
    allocate(manager, "a", 13)
    assert manager.block_ids("a") == [-1, -1, 2, 1]  # the named state is read, not written


def test_a_state_inside_a_block_that_a_step_ran_past_is_not_named() -> None:
    manager = make(state(), 9)
    allocate(manager, "a", 6)
    manager.cache_blocks("a", HASHES, 6)
    allocate(manager, "a", 10)
    manager.cache_blocks("a", HASHES, 10)
    # Still in the table: the step to 10 read it. It is the state after 6 tokens, not after 8.
    assert manager.block_ids("a") == [-1, 1, 2]
    assert hit_ids(manager, 20) == []
    assert manager.pool.get_cached_block(HASHES[1]) is None


# --- counts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [full(), sliding(1), sliding(6), sliding(9), chunked(8), chunked(6), state(), state(2)],
)
@pytest.mark.parametrize("num_held_tokens", [None, 0, 7, 19])
def test_never_more_blocks_than_max_blocks(spec: KVCacheSpec, num_held_tokens: int | None) -> None:
    """Every number of tokens ready at the start, every step size; held tokens stay."""
    for ready, step in product(range(0, 24, 3), (1, 3, 4, 7)):
        manager = make(spec)
        most = manager.max_blocks(26, step, num_held_tokens)
        allocate(manager, "a", ready, (), ready)
        num_computed = ready
        while num_computed < 26:
            clamp = num_computed if num_held_tokens is None else min(num_computed, num_held_tokens)
            manager.drop_skipped("a", clamp)
            num_computed = min(num_computed + step, 26)
            allocate(manager, "a", num_computed)
            assert manager.num_held_blocks("a") <= most <= manager.blocks_needed(26)
