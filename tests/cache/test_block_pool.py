"""Blocks, their free queue and the pool; every expected order is written out by hand."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import pytest

from kvxfer.cache import BlockPool, FreeKVCacheBlockQueue, KVCacheBlock


def ids(blocks: Iterable[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


def make_queue(num_blocks: int) -> tuple[list[KVCacheBlock], FreeKVCacheBlockQueue]:
    blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
    return blocks, FreeKVCacheBlockQueue(blocks)


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


def assert_linked(queue: FreeKVCacheBlockQueue, block_ids: list[int]) -> None:
    """The same order forwards and backwards, and a count that agrees."""
    free = queue.get_all_free_blocks()
    assert ids(free) == block_ids
    assert queue.num_free_blocks == len(block_ids)
    for before, after in zip(free, free[1:], strict=False):
        assert after.prev_free_block is before
    for block in free:
        assert block.prev_free_block is not None
        assert block.prev_free_block.next_free_block is block
        assert block.next_free_block is not None
        assert block.next_free_block.prev_free_block is block


# --- KVCacheBlock -------------------------------------------------------------------------------


def test_block_defaults_and_references() -> None:
    block = KVCacheBlock(3)
    assert (block.block_id, block.ref_cnt, block.block_hash) == (3, 0, None)
    assert (block.prev_free_block, block.next_free_block) == (None, None)
    block.incr_ref()
    block.incr_ref()
    block.decr_ref()
    assert block.ref_cnt == 1
    block.decr_ref()
    with pytest.raises(ValueError, match="block 3: expected at least one user, got 0"):
        block.decr_ref()
    assert block.ref_cnt == 0


def test_block_repr_shows_neighbours_by_id() -> None:
    blocks, _ = make_queue(3)
    assert repr(blocks[1]) == (
        "KVCacheBlock(block_id=1, ref_cnt=0, block_hash=None, prev_free_block=0, next_free_block=2)"
    )


def test_blocks_are_equal_by_identity_and_hold_no_dict() -> None:
    assert KVCacheBlock(1) != KVCacheBlock(1)
    assert not hasattr(KVCacheBlock(1), "__dict__")


# --- FreeKVCacheBlockQueue ----------------------------------------------------------------------


def test_empty_queue() -> None:
    _, queue = make_queue(0)
    assert_linked(queue, [])
    with pytest.raises(ValueError, match="free blocks: expected 0 to 0, got a request for 1"):
        queue.popleft()


def test_popleft_in_order_and_unlinked() -> None:
    blocks, queue = make_queue(3)
    assert_linked(queue, [0, 1, 2])
    first = queue.popleft()
    assert first is blocks[0]
    assert (first.prev_free_block, first.next_free_block) == (None, None)
    assert_linked(queue, [1, 2])
    assert ids([queue.popleft(), queue.popleft()]) == [1, 2]
    assert_linked(queue, [])


def test_remove_from_each_place() -> None:
    blocks, queue = make_queue(5)
    queue.remove(blocks[2])
    assert_linked(queue, [0, 1, 3, 4])
    queue.remove(blocks[0])
    assert_linked(queue, [1, 3, 4])
    queue.remove(blocks[4])
    assert_linked(queue, [1, 3])
    assert (blocks[4].prev_free_block, blocks[4].next_free_block) == (None, None)


def test_remove_of_a_stranger() -> None:
    blocks, queue = make_queue(2)
    queue.remove(blocks[0])
    with pytest.raises(RuntimeError, match="block 0: expected it in the free queue"):
        queue.remove(blocks[0])
    assert_linked(queue, [1])


def test_append_goes_to_the_end() -> None:
    blocks, queue = make_queue(3)
    queue.append(queue.popleft())
    assert_linked(queue, [1, 2, 0])
    with pytest.raises(RuntimeError, match="block 1: expected it in no queue"):
        queue.append(blocks[1])
    assert_linked(queue, [1, 2, 0])


def test_popleft_n() -> None:
    blocks, queue = make_queue(5)
    assert queue.popleft_n(0) == []
    assert ids(queue.popleft_n(2)) == [0, 1]
    assert_linked(queue, [2, 3, 4])
    assert (blocks[1].prev_free_block, blocks[1].next_free_block) == (None, None)
    for num_blocks in (4, -1):
        with pytest.raises(ValueError, match=f"0 to 3, got a request for {num_blocks}"):
            queue.popleft_n(num_blocks)
    assert_linked(queue, [2, 3, 4])
    assert ids(queue.popleft_n(3)) == [2, 3, 4]
    assert_linked(queue, [])


def test_append_n() -> None:
    blocks, queue = make_queue(4)
    taken = queue.popleft_n(3)
    queue.append_n([])
    assert_linked(queue, [3])
    queue.append_n([taken[2], taken[0]])
    assert_linked(queue, [3, 2, 0])
    queue.append_n(iter([taken[1]]))
    assert_linked(queue, [3, 2, 0, 1])


@pytest.mark.parametrize("wrong", [[0, 1, 0], [0, 1, 3], [3]], ids=["twice", "member", "only"])
def test_append_n_of_a_member_changes_nothing(wrong: list[int]) -> None:
    blocks, queue = make_queue(4)
    queue.popleft_n(2)
    with pytest.raises(RuntimeError, match="expected it in no queue"):
        queue.append_n([blocks[block_id] for block_id in wrong])
    assert_linked(queue, [2, 3])
    queue.append_n(blocks[:2])
    assert_linked(queue, [2, 3, 0, 1])


# --- BlockPool ----------------------------------------------------------------------------------


def test_null_block_is_never_given_out_or_counted() -> None:
    pool = BlockPool(4)
    assert pool.null_block.block_id == 0
    assert pool.null_block.is_null
    assert (pool.num_free_blocks, pool.usage) == (3, 0.0)
    assert ids(pool.get_new_blocks(3)) == [1, 2, 3]
    assert (pool.num_free_blocks, pool.usage) == (0, 1.0)
    pool.touch([pool.null_block])
    pool.free_blocks([pool.null_block, pool.null_block])
    assert (pool.num_free_blocks, pool.null_block.ref_cnt) == (0, 0)


def test_pool_sizes() -> None:
    assert (BlockPool(1).num_free_blocks, BlockPool(1).usage) == (0, 0.0)
    with pytest.raises(ValueError, match="num_blocks: expected at least 1"):
        BlockPool(0)


def test_least_recently_freed_goes_first_and_of_a_list_its_first() -> None:
    pool = BlockPool(7)
    a, b = pool.get_new_blocks(3), pool.get_new_blocks(2)
    pool.cache_full_blocks(a + b, [name(number) for number in range(5)], 0, 5)
    assert pool.free_blocks(reversed(a)) == 3
    assert ids(pool.get_free_blocks()) == [6, 3, 2, 1]
    assert pool.free_blocks(reversed(b)) == 2
    assert ids(pool.get_free_blocks()) == [6, 3, 2, 1, 5, 4]
    assert ids(pool.get_new_blocks(2)) == [6, 3]


def test_blocks_without_a_name_go_before_all_others() -> None:
    """Nothing can find them again, so no name is lost while they are there."""
    pool = BlockPool(8)
    a, b = pool.get_new_blocks(3), pool.get_new_blocks(3)
    pool.cache_full_blocks(a, [name(1), name(2)], 0, 2)  # the last one is full in part
    pool.cache_full_blocks(b, [name(3)], 0, 1)
    pool.free_blocks(reversed(a))
    assert ids(pool.get_free_blocks()) == [3, 7, 2, 1]
    pool.free_blocks(reversed(b))
    assert ids(pool.get_free_blocks()) == [6, 5, 3, 7, 2, 1, 4]
    assert ids(pool.get_new_blocks(4)) == [6, 5, 3, 7]
    assert [pool.get_cached_block(name(number)) for number in (1, 2, 3)] == [a[0], a[1], b[0]]


@pytest.mark.parametrize("named", [(), (0,), (1,), (0, 1)])
def test_a_queue_that_was_empty_is_whole_again(named: tuple[int, ...]) -> None:
    pool = BlockPool(3)
    blocks = pool.get_new_blocks(2)
    for at in named:
        pool.cache_full_blocks(blocks, [name(0), name(1)], at, at + 1)
    pool.free_blocks(blocks)
    wanted = [block for block in blocks if block.block_hash is None]
    wanted += [block for block in blocks if block.block_hash is not None]
    assert pool.get_free_blocks() == wanted
    assert pool.get_new_blocks(2) == wanted
    assert pool.num_free_blocks == 0


def test_freed_too_often() -> None:
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(3)
    pool.free_blocks([blocks[1]])
    with pytest.raises(ValueError, match="block 2: expected at least one user, got 0"):
        pool.free_blocks([blocks[0], blocks[1], blocks[2]])
    # What came before the mistake is free, the rest is in use, and the queue is whole.
    assert ids(pool.get_free_blocks()) == [1, 2]
    assert pool.num_free_blocks == 2
    assert [block.ref_cnt for block in blocks] == [0, 0, 1]


def test_cached_block_is_found_touched_and_kept() -> None:
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(2)
    assert pool.get_cached_block(name(1)) is None
    pool.cache_full_blocks(blocks, [name(1), name(2)], 0, 1)
    assert pool.get_cached_block(name(1)) is blocks[0]
    assert pool.get_cached_block(name(2)) is None
    pool.cache_full_blocks(blocks, [name(1), name(2)], 1, 2)
    assert pool.get_cached_block(name(2)) is blocks[1]
    pool.free_blocks(reversed(blocks))
    assert ids(pool.get_free_blocks()) == [3, 2, 1]
    pool.touch([blocks[1]])  # out of the middle
    assert ids(pool.get_free_blocks()) == [3, 1]
    assert pool.get_cached_block(name(2)) is blocks[1]


def test_table_of_names_is_bounded() -> None:
    pool = BlockPool(4)
    for number in range(100):
        blocks = pool.get_new_blocks(3)
        names = [name(3 * number + place) for place in range(3)]
        pool.cache_full_blocks(blocks, names, 0, 3)
        pool.free_blocks(blocks)
    assert sum(len(table) for table in pool._named.values()) == 3


def test_null_blocks_are_not_named() -> None:
    pool = BlockPool(3)
    (block,) = pool.get_new_blocks(1)
    pool.cache_full_blocks([pool.null_block, block], [name(1), name(2)], 0, 2)
    assert pool.get_cached_block(name(1)) is None
    assert pool.get_cached_block(name(2)) is block


def test_refused_namings() -> None:
    pool = BlockPool(3)
    blocks = pool.get_new_blocks(2)
    with pytest.raises(ValueError, match="expected at most 2 blocks and 1 hashes, got 2"):
        pool.cache_full_blocks(blocks, [name(1)], 0, 2)
    with pytest.raises(ValueError, match="num_cached_blocks: expected at least 0, got -1"):
        pool.cache_full_blocks(blocks, [name(1), name(2)], -1, 2)
    pool.cache_full_blocks(blocks, [name(1)], 0, 1)
    with pytest.raises(ValueError, match=r"expected one in use without a name, got .*block_id=1"):
        pool.cache_full_blocks(blocks, [name(3)], 0, 1)
    assert pool.get_cached_block(name(3)) is None
    pool.free_blocks([blocks[1]])
    with pytest.raises(ValueError, match=r"expected one in use without a name, got .*block_id=2"):
        pool.cache_full_blocks(blocks, [name(1), name(2)], 1, 2)


def test_refused_evictions() -> None:
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(blocks, [name(1), name(2)], 0, 2)
    for block_id in (4, -1):
        with pytest.raises(ValueError, match=f"block id: expected 0 to 3, got {block_id}"):
            pool.evict_blocks([2, block_id])
    assert pool.get_cached_block(name(2)) is blocks[1]


def test_reset_waits_for_the_last_user(caplog: pytest.LogCaptureFixture) -> None:
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(blocks, [name(1), name(2)], 0, 2)
    with caplog.at_level(logging.WARNING, "kvxfer.cache"):
        assert not pool.reset_prefix_cache()
    assert caplog.messages == ["prefix cache not reset: 2 blocks are in use"]
    assert pool.get_cached_block(name(1)) is blocks[0]
    pool.free_blocks(blocks)
    assert pool.reset_prefix_cache()
    assert pool.get_cached_block(name(1)) is None
    assert ids(pool.get_new_blocks(3)) == [3, 1, 2]
