"""All groups over one pool, by hand: block size 4, windows of 9 tokens (two blocks before the next
token), at most 8 tokens a step unless said otherwise.
"""

from __future__ import annotations

from itertools import product

import pytest

from kvxfer.cache.kv_cache_manager import CacheHit, KVCacheManager
from kvxfer.cache.specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

HASHES = [number.to_bytes(32, "big") for number in range(1, 40)]
FULL = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=1, dtype="float32")
SLIDING = SlidingWindowSpec(
    block_size=4, num_kv_heads=1, head_size=1, dtype="float32", sliding_window=9
)
NARROW = SlidingWindowSpec(
    block_size=4, num_kv_heads=1, head_size=1, dtype="float32", sliding_window=5
)
CHUNKED = ChunkedLocalAttentionSpec(
    block_size=4, num_kv_heads=1, head_size=1, dtype="float32", attention_chunk_size=6
)
STATE = MambaSpec(block_size=4, shapes=((2,),), dtypes=("float32",))
NONE = CacheHit(((), ()), 0)


def make(
    *specs: KVCacheSpec, num_usable: int = 40, enable_caching: bool = True, max_step_tokens: int = 8
) -> KVCacheManager:
    groups = [KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheManager(
        KVCacheConfig(num_usable + 1, [], groups),
        enable_caching=enable_caching,
        max_step_tokens=max_step_tokens,
    )


def run(manager: KVCacheManager, request_id: str, start: int, end: int, names: int = 0) -> None:
    """Compute tokens [start, end) in steps of 8; ``names`` is where the request's names begin."""
    for lo in range(start, end, 8):
        hi = min(lo + 8, end)
        manager.grow(request_id, lo, hi)
        manager.cache_blocks(request_id, HASHES[names:], hi)


def ids(hit: CacheHit) -> list[list[int]]:
    return [[0 if block.is_null else block.block_id for block in group] for group in hit.blocks]


def with_names(manager: KVCacheManager, *patterns: str) -> KVCacheManager:
    for group_id, pattern in enumerate(patterns):
        blocks = manager.pool.get_new_blocks(len(pattern))
        for at, mark in enumerate(pattern):
            if mark == "N":
                manager.pool.cache_full_blocks(blocks, HASHES, at, at + 1, group_id)
    return manager


# --- hits -----------------------------------------------------------------------------------------


def test_hit_is_one_that_all_groups_have() -> None:
    manager = with_names(make(FULL, SLIDING), "NNNN-", "-NNNN")
    hit = manager.find_longest_cache_hit(HASHES, 20)
    assert hit.num_tokens == 16
    assert ids(hit) == [[1, 2, 3, 4], [0, 0, 8, 9]]


def test_groups_shorten_each_other_until_they_agree() -> None:
    # Full knows 5 blocks; the wide window ends at 5 or 3 or 1, the narrow one at 4, 3 or 1.
    manager = with_names(make(NARROW, FULL, SLIDING), "N-NN-", "NNNNN", "NNN-N")
    hit = manager.find_longest_cache_hit(HASHES, 20)
    assert hit.num_tokens == 12
    assert ids(hit) == [[0, 0, 3], [6, 7, 8], [0, 12, 13]]
    assert manager.find_longest_cache_hit(HASHES, 11).num_tokens == 4


def test_a_shorter_hit_may_not_exist() -> None:
    manager = with_names(make(FULL, SLIDING), "NNNN", "--NN")
    assert manager.find_longest_cache_hit(HASHES, 16).num_tokens == 16
    assert manager.find_longest_cache_hit(HASHES, 15) == NONE


def test_no_hit_without_caching() -> None:
    # A state needs one block of the prefix and a chunk's end none: not even these are asked.
    manager = make(CHUNKED, STATE, enable_caching=False)
    assert manager.find_longest_cache_hit(HASHES, 100) == NONE


@pytest.mark.parametrize(
    "specs",
    [(FULL, SLIDING), (SLIDING, NARROW), (FULL, CHUNKED), (FULL, STATE), (CHUNKED, SLIDING)],
)
def test_hit_is_the_longest_that_all_can_continue(specs: tuple[KVCacheSpec, ...]) -> None:
    """Every pattern of four blocks in two groups, against the definition."""

    def can_continue(skipped: int, marks: tuple[str, ...], num_blocks: int) -> bool:
        return all(marks[token // 4] == "N" for token in range(skipped, 4 * num_blocks))

    for one, other in product(product("N-", repeat=4), repeat=2):
        manager = with_names(make(*specs), "".join(one), "".join(other))
        for max_tokens in (0, 5, 12, 16):
            longest = max(
                num_blocks
                for num_blocks in range(max_tokens // 4 + 1)
                if all(
                    can_continue(group.num_skipped_tokens(4 * num_blocks), marks, num_blocks)
                    for group, marks in zip(manager.groups, (one, other), strict=True)
                )
            )
            hit = manager.find_longest_cache_hit(HASHES[:4], max_tokens)
            assert hit.num_tokens == 4 * longest
            for group, found in zip(manager.groups, hit.blocks, strict=True):
                assert len(found) == longest
                kept = group.first_kept_block(hit.num_tokens)
                assert [block.is_null for block in found] == [at < kept for at in range(longest)]


# --- admission ------------------------------------------------------------------------------------


def test_admission_counts_what_is_held_at_a_time() -> None:
    # 40 tokens: 10 blocks in full. The window of 8 tokens before a step of 8: 16 tokens, 5 blocks.
    manager = make(FULL, SLIDING, num_usable=15)
    assert manager.blocks_needed(40) == 15
    assert manager.admit("a", num_tokens=40, hit=NONE)
    assert manager.num_free_blocks == 15
    assert manager.num_unpromised_blocks == 0
    assert not manager.admit("b", num_tokens=1, hit=NONE)
    assert "b" not in manager
    run(manager, "a", 0, 40)
    full, window = manager.block_ids("a")
    assert len(set(full) | set(window[6:])) == 14  # ten, and four of the window
    assert window[:6] == (-1,) * 6
    assert manager.usage == pytest.approx(14 / 15)
    manager.free("a")
    assert manager.num_free_blocks == manager.num_unpromised_blocks == 15
    assert manager.admit("b", num_tokens=40, hit=NONE)


def test_short_steps_need_fewer_blocks_of_a_window() -> None:
    # 8 tokens before and the one: three blocks, as the first may have begun before them, and one.
    manager = make(FULL, SLIDING, num_usable=14)
    assert manager.blocks_needed(40) == 15
    assert not manager.admit("a", num_tokens=40, hit=NONE)
    assert manager.admit("a", num_tokens=40, hit=NONE, num_external_tokens=20, max_step_tokens=1)
    for lo in range(20, 40):
        manager.grow("a", lo, lo + 1)
    with pytest.raises(ValueError, match="request a: expected a step of 0 to 1 tokens"):
        manager.grow("a", 38, 40)


@pytest.mark.parametrize("max_step_tokens", [0, -5])
def test_a_step_of_no_tokens_is_refused(max_step_tokens: int) -> None:
    manager = make(FULL, SLIDING)
    message = f"max_step_tokens: expected at least 1, got {max_step_tokens}"
    with pytest.raises(ValueError, match=message):
        manager.admit("a", num_tokens=40, hit=NONE, max_step_tokens=max_step_tokens)
    assert "a" not in manager
    assert manager.num_unpromised_blocks == 40


def test_no_longer_steps_are_promised_than_the_manager_takes() -> None:
    manager = make(FULL, SLIDING)
    assert manager.admit("a", num_tokens=40, hit=NONE, max_step_tokens=100)
    # 10 blocks, and 9 - 1 + 8 tokens, the first the last of its block: 1 + 4 blocks
    assert manager.num_unpromised_blocks == 40 - 10 - 5
    with pytest.raises(ValueError, match="expected a step of 0 to 8 tokens, got 0 to 9"):
        manager.grow("a", 0, 9)


def test_growth_appends_on_demand() -> None:
    manager = make(FULL, SLIDING)
    manager.admit("a", num_tokens=40, hit=NONE)
    assert manager.block_ids("a") == ((), ())
    assert manager.grow("a", 0, 8) == ((1, 2), (3, 4))
    assert manager.grow("a", 8, 9) == ((5,), (6,))
    assert manager.grow("a", 9, 10) == ((), ())
    # After 12 tokens 4 are out of the window: block 3, which has no name, is reused first.
    assert manager.grow("a", 12, 13) == ((3,), (7,))
    assert manager.block_ids("a") == ((1, 2, 5, 3), (-1, 4, 6, 7))


def test_a_shared_hit_in_full_groups_is_free_of_charge() -> None:
    manager = make(FULL, num_usable=8)
    manager.admit("a", num_tokens=21, hit=CacheHit(((),), 0))  # 6 blocks
    run(manager, "a", 0, 21)
    hit = manager.find_longest_cache_hit(HASHES, 20)
    assert manager.admit("b", num_tokens=28, hit=hit)  # 5 shared, 2 of its own
    assert manager.num_unpromised_blocks == 0
    assert not manager.admit("c", num_tokens=1, hit=CacheHit(((),), 0))
    manager.free("a")  # one block was its alone
    assert manager.num_unpromised_blocks == 1
    manager.free("b")
    assert manager.num_unpromised_blocks == 8


def test_a_free_hit_is_charged() -> None:
    manager = make(FULL, num_usable=4)
    manager.admit("a", num_tokens=12, hit=CacheHit(((),), 0))
    run(manager, "a", 0, 12)
    manager.free("a")
    hit = manager.find_longest_cache_hit(HASHES, 12)
    assert ids(hit) == [[1, 2, 3]]
    assert not manager.admit("b", num_tokens=17, hit=hit)
    assert manager.admit("b", num_tokens=16, hit=hit)
    assert manager.num_unpromised_blocks == 0


def test_a_shared_hit_that_leaves_the_window_gives_no_credit() -> None:
    """Two requests share the window's blocks; one goes on, and needs blocks of its own for all of
    it while the other still holds the shared ones.
    """
    manager = make(SLIDING, num_usable=10, max_step_tokens=4)
    assert manager.blocks_needed(40) == 4  # 8 tokens before, 4 of the step, one begun
    nothing = CacheHit(((),), 0)
    assert manager.admit("a", num_tokens=40, hit=nothing)
    for lo in range(0, 12, 4):
        manager.grow("a", lo, lo + 4)
        manager.cache_blocks("a", HASHES, lo + 4)
    hit = manager.find_longest_cache_hit(HASHES, 12)
    assert ids(hit) == [[0, 2, 3]]
    assert manager.admit("b", num_tokens=40, hit=hit)
    # 10 blocks, 4 for each. With credit for the two shared ones a third would be let in.
    assert not manager.admit("c", num_tokens=40, hit=hit)
    for lo in range(12, 40, 4):
        manager.grow("b", lo, lo + 4)
    for lo in range(12, 40, 4):
        manager.grow("a", lo, lo + 4)
    manager.free("a")
    manager.free("b")
    assert manager.num_free_blocks == 10


def test_hits_of_all_groups_are_taken_before_new_blocks() -> None:
    manager = make(FULL, SLIDING, num_usable=8)
    manager.admit("a", num_tokens=8, hit=NONE)
    run(manager, "a", 0, 8)
    manager.free("a")
    spare = manager.pool.get_new_blocks(4)
    manager.pool.cache_full_blocks(spare, HASHES[20:], 0, 4)  # so that they go last
    manager.pool.free_blocks(spare)
    assert [b.block_id for b in manager.pool.get_free_blocks()] == [2, 1, 4, 3, 5, 6, 7, 8]
    hit = manager.find_longest_cache_hit(HASHES, 8)
    assert manager.admit("b", num_tokens=15, hit=hit, num_external_tokens=7)
    # The full group's new blocks would have been 4 and 3: 4 is the window's hit, 3 is out of it.
    assert manager.block_ids("b") == ((1, 2, 3, 5), (-1, 4, 6, 7))
    assert manager.pool.blocks[4].block_hash == HASHES[1]


def test_external_tokens_get_the_blocks_that_are_needed_after_them() -> None:
    manager = make(FULL, SLIDING)
    manager.admit("a", num_tokens=8, hit=NONE)
    run(manager, "a", 0, 8)
    hit = manager.find_longest_cache_hit(HASHES, 8)
    assert manager.admit("b", num_tokens=30, hit=hit, num_external_tokens=13)
    # 21 tokens are ready; the window begins at token 13, in block 3: nothing of the hit's.
    assert manager.block_ids("b") == ((1, 2, 5, 6, 7, 8), (-1, -1, -1, 9, 10, 11))
    assert manager.grow("b", 21, 22) == ((), ())
    # 11 tokens ready: the window begins at 3, so both hit blocks are needed.
    assert manager.admit("c", num_tokens=11, hit=hit, num_external_tokens=3)
    assert manager.block_ids("c") == ((1, 2, 12), (3, 4, 13))


def test_requests_without_full_blocks_evict_no_names() -> None:
    manager = make(FULL, num_usable=6)
    nothing = CacheHit(((),), 0)
    manager.admit("long", num_tokens=12, hit=nothing)
    run(manager, "long", 0, 12)
    manager.free("long")
    for number in range(20):
        manager.admit(f"short{number}", num_tokens=3, hit=nothing)
        run(manager, f"short{number}", 0, 3)
        manager.free(f"short{number}")
    assert manager.find_longest_cache_hit(HASHES, 12).num_tokens == 12


def test_failed_load_leaves_nothing_to_find() -> None:
    manager = make(FULL, SLIDING)
    manager.admit("a", num_tokens=30, hit=NONE, num_external_tokens=21)
    manager.free("a")
    assert manager.find_longest_cache_hit(HASHES, 20) == NONE
    assert manager.num_unpromised_blocks == 40


def test_a_block_filled_in_part_is_never_found() -> None:
    manager = make(FULL, SLIDING)
    manager.admit("a", num_tokens=30, hit=NONE, num_external_tokens=21)
    assert manager.block_ids("a")[1] == (-1, -1, -1, 7, 8, 9)
    manager.leave_unhashed("a", 1, [3])
    manager.cache_blocks("a", HASHES, 21)
    assert manager.find_longest_cache_hit(HASHES, 20) == NONE  # needs window blocks 3 and 4
    run(manager, "a", 21, 25)
    assert manager.find_longest_cache_hit(HASHES, 24).num_tokens == 24  # blocks 4 and 5


# --- holding --------------------------------------------------------------------------------------


def test_held_tokens_keep_their_window() -> None:
    manager = make(FULL, SLIDING)
    # Sixteen tokens are offered, so fifteen are held: the window begins at 7, in block 1.
    assert manager.admit("a", num_tokens=40, hit=NONE, num_held_tokens=15)
    run(manager, "a", 0, 40)
    assert manager.block_ids("a")[1][:1] == (-1,)
    assert -1 not in manager.block_ids("a")[1][1:]
    manager.stop_growing("a", 40)
    assert -1 not in manager.block_ids("a")[1][1:]


def test_a_hold_is_counted_at_admission() -> None:
    # 10 blocks in full, and nine of the window: block 0 is dropped, block 1 never.
    manager = make(FULL, SLIDING, num_usable=19)
    assert manager.blocks_needed(40, num_held_tokens=15) == 19
    assert manager.admit("a", num_tokens=40, hit=NONE, num_held_tokens=15)
    assert manager.num_unpromised_blocks == 0
    run(manager, "a", 0, 40)
    assert manager.num_free_blocks == 0


def test_an_ended_request_gives_back_its_promise_and_keeps_its_window() -> None:
    manager = make(FULL, SLIDING, num_usable=24)
    manager.admit("a", num_tokens=40, hit=NONE, num_held_tokens=15)
    assert manager.num_unpromised_blocks == 24 - 19
    run(manager, "a", 0, 16)
    manager.stop_growing("a", 16)
    assert manager.block_ids("a") == ((1, 2, 5, 6), (-1, 4, 7, 8))
    assert manager.num_unpromised_blocks == manager.num_free_blocks == 17
    with pytest.raises(ValueError, match="request a: expected at most the 16 tokens"):
        manager.grow("a", 16, 17)
    manager.free("a")
    assert manager.num_unpromised_blocks == 24


def test_blocks_that_an_aborted_load_may_write_stay() -> None:
    manager = make(FULL, SLIDING)
    manager.admit("a", num_tokens=30, hit=NONE, num_external_tokens=21)
    before = manager.block_ids("a")
    manager.stop_growing("a", 0)
    assert manager.block_ids("a") == before


# --- refusals -------------------------------------------------------------------------------------


def test_groups_and_steps_must_be_there() -> None:
    with pytest.raises(ValueError, match=r"kv_cache_groups: expected one or more groups"):
        make()
    with pytest.raises(ValueError, match="max_step_tokens: expected at least 1, got 0"):
        make(FULL, max_step_tokens=0)


def test_refusals_change_nothing() -> None:
    manager = make(FULL, SLIDING)
    manager.admit("a", num_tokens=16, hit=NONE)
    run(manager, "a", 0, 16)
    hit = manager.find_longest_cache_hit(HASHES, 16)
    before = (manager.num_free_blocks, manager.num_unpromised_blocks)
    with pytest.raises(ValueError, match="request a: expected a new id"):
        manager.admit("a", num_tokens=16, hit=NONE)
    with pytest.raises(ValueError, match="tokens within its 18, got 16 and 3"):
        manager.admit("b", num_tokens=18, hit=hit, num_external_tokens=3)
    with pytest.raises(ValueError, match="num_held_tokens: expected 16 to 20, got 15"):
        manager.admit("b", num_tokens=20, hit=hit, num_held_tokens=15)
    with pytest.raises(ValueError, match="hit: expected blocks of 2 groups, got 1"):
        manager.admit("b", num_tokens=20, hit=CacheHit(((),), 0))
    with pytest.raises(ValueError, match="expected a step of 0 to 8 tokens, got 16 to 25"):
        manager.grow("a", 16, 25)
    with pytest.raises(ValueError, match="expected at most the 16 tokens .* got 17"):
        manager.grow("a", 16, 17)
    with pytest.raises(ValueError, match="group_id: expected 0 to 1, got 2"):
        manager.leave_unhashed("a", 2, [0])
    for call in (manager.free, manager.block_ids):
        with pytest.raises(ValueError, match="request b: expected one that was admitted"):
            call("b")
    manager.pool.evict_blocks([hit.blocks[1][-1].block_id])
    with pytest.raises(ValueError, match="hit_blocks: expected cached blocks"):
        manager.admit("b", num_tokens=20, hit=hit)
    assert (manager.num_free_blocks, manager.num_unpromised_blocks) == before
    assert "b" not in manager
