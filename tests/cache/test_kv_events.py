"""Events of a pool: what a router is told, and in which bytes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvxfer.cache import get_kv_cache_config
from kvxfer.cache.block_pool import BlockPool
from kvxfer.cache.kv_cache_manager import CacheHit, KVCacheManager
from kvxfer.cache.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVEventBatch,
    KVEventLog,
)
from kvxfer.cache.specs import KVCacheSpec
from tests.cache.planning_cases import chunked, config, full, latent, layers, state, window

NAMES = [number.to_bytes(32, "big") for number in range(1, 40)]
SPEC = full(block_size=4)
# Written by vLLM 0.32, from the fields of test_bytes_as_they_are_published.
PUBLISHED = (
    "93cb3ff8000000000000938ca474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739207c4"
    "200101010101010101010101010101010101010101010101010101010101010101b1706172656e745f626c6f63"
    "6b5f68617368c0a9746f6b656e5f696473920102aa626c6f636b5f73697a6501a76c6f72615f6964c0a66d6564"
    "69756da3475055a96c6f72615f6e616d65c0aa65787472615f6b65797392c091a173a967726f75705f69647800"
    "b26b765f63616368655f737065635f6b696e64ae736c6964696e675f77696e646f77bc6b765f63616368655f73"
    "7065635f736c6964696e675f77696e646f771884a474797065ac426c6f636b52656d6f766564ac626c6f636b5f"
    "6861736865739107a66d656469756da3475055a967726f75705f6964780181a474797065b0416c6c426c6f636b"
    "73436c656172656403"
)


def request(num_tokens: int = 40, **more: Any) -> Any:
    return SimpleNamespace(all_token_ids=list(range(100, 100 + num_tokens)), **more)


def make_pool(num_blocks: int = 5, *, int_block_hashes: bool = False) -> BlockPool:
    return BlockPool(num_blocks + 1, True, KVEventLog(int_block_hashes=int_block_hashes))


def stored(**changed: Any) -> BlockStored:
    """Two blocks of 4 tokens, the first of their request."""
    fields: dict[str, Any] = {
        "block_hashes": NAMES[:2],
        "parent_block_hash": None,
        "token_ids": list(range(100, 108)),
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None, None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    return BlockStored(**(fields | changed))


def removed(name: bytes, group: int = 0) -> BlockRemoved:
    return BlockRemoved(block_hashes=[name], medium="GPU", group_idx=group)


def test_without_a_log_there_are_no_events() -> None:
    pool = BlockPool(4)
    pool.cache_full_blocks(pool.get_new_blocks(1), NAMES, 0, 1)
    assert pool.take_events() == []


def test_names_that_come_and_go() -> None:
    pool = make_pool()
    blocks = pool.get_new_blocks(3)
    assert pool.take_events() == []
    pool.cache_full_blocks(blocks, NAMES, 0, 2, 0, request(), SPEC)
    pool.cache_full_blocks(blocks, NAMES, 2, 3, 0, request(), SPEC)
    last = stored(
        block_hashes=[NAMES[2]],
        parent_block_hash=NAMES[1],
        token_ids=[108, 109, 110, 111],
        extra_keys=[None],
    )
    assert pool.take_events() == [stored(), last]
    assert pool.take_events() == []
    pool.free_blocks(reversed(blocks))
    assert pool.take_events() == []  # still found
    pool.evict_blocks([1, 4])  # block 4 has no name
    pool.get_new_blocks(3)  # 4 and 5, then 3
    assert pool.take_events() == [removed(NAMES[0]), removed(NAMES[2])]


def test_events_of_a_pool_that_is_reset() -> None:
    pool = make_pool()
    blocks = pool.get_new_blocks(1)
    pool.cache_full_blocks(blocks, NAMES, 0, 1, 0, request(), SPEC)
    assert not pool.reset_prefix_cache()
    assert len(pool.take_events()) == 1
    pool.free_blocks(blocks)
    assert pool.reset_prefix_cache()
    assert pool.take_events() == [AllBlocksCleared()]
    pool.get_new_blocks(5)
    assert pool.take_events() == []


def test_two_blocks_with_one_name_go_one_by_one() -> None:
    pool = make_pool()
    for _ in range(2):
        pool.cache_full_blocks(pool.get_new_blocks(1), NAMES, 0, 1, 0, request(), SPEC)
    pool.evict_blocks([1, 2])
    assert pool.take_events()[2:] == [removed(NAMES[0]), removed(NAMES[0])]


def test_nothing_is_told_of_null_blocks() -> None:
    """Each run of blocks has its own event, so that names and tokens belong together."""
    pool = make_pool()
    a, b, c = pool.get_new_blocks(3)
    table = [pool.null_block, a, pool.null_block, b, c, pool.null_block]
    pool.cache_full_blocks(table, NAMES, 0, 6, 1, request(), SPEC)
    first = stored(
        block_hashes=[NAMES[1]],
        parent_block_hash=NAMES[0],
        token_ids=[104, 105, 106, 107],
        extra_keys=[None],
        group_idx=1,
    )
    second = stored(
        block_hashes=NAMES[3:5],
        parent_block_hash=NAMES[2],
        token_ids=list(range(112, 120)),
        group_idx=1,
    )
    assert pool.take_events() == [first, second]


def test_what_else_decides_a_name() -> None:
    image = SimpleNamespace(identifier="img", mm_position=SimpleNamespace(offset=2, length=4))
    adapter = SimpleNamespace(lora_name="l", lora_path="p", lora_int_id=3)
    keyed = request(
        mm_features=[image], lora_request=adapter, cache_salt="s", session_id="dialogue"
    )
    pool = make_pool()
    pool.cache_full_blocks(pool.get_new_blocks(2), NAMES, 0, 2, 0, keyed, SPEC)
    keys = [("l", ("img", 2), "s"), ("l", ("img", -2))]
    want = stored(lora_id=3, lora_name="l", extra_keys=keys, session_id="dialogue")
    assert pool.take_events() == [want]


def test_names_as_integers() -> None:
    pool = make_pool(int_block_hashes=True)
    name = bytes(range(32))
    pool.cache_full_blocks(pool.get_new_blocks(2), [name, name], 1, 2, 0, request(), SPEC)
    pool.evict_blocks([2])
    came, went = pool.take_events()
    assert isinstance(came, BlockStored)
    assert isinstance(went, BlockRemoved)
    assert came.block_hashes == went.block_hashes == [0x18191A1B1C1D1E1F]
    assert came.parent_block_hash == 0x18191A1B1C1D1E1F


def test_events_need_the_request() -> None:
    pool = make_pool()
    blocks = pool.get_new_blocks(1)
    for request_of, spec in ((None, SPEC), (request(), None)):
        with pytest.raises(ValueError, match="request and spec: expected both, as events tell"):
            pool.cache_full_blocks(blocks, NAMES, 0, 1, 0, request_of, spec)
    assert blocks[0].block_hash is None


@pytest.mark.parametrize(
    ("spec", "kind", "sliding_window"),
    [
        (full(), "full_attention", None),
        (full(sliding_window=9), "full_attention", None),
        (latent(), "mla_attention", None),
        (window(24), "sliding_window", 24),
        (chunked(), "chunked_local_attention", None),
        (state(block_size=16), "mamba", None),
    ],
)
def test_kinds(spec: KVCacheSpec, kind: str, sliding_window: int | None) -> None:
    plan = get_kv_cache_config(config(num_gpu_blocks_override=200), layers((1, spec)), 0)
    log = KVEventLog(int_block_hashes=False)
    manager = KVCacheManager(plan, enable_caching=True, max_step_tokens=16, events=log)
    manager.admit("a", num_tokens=16, hit=CacheHit(((),), 0))
    manager.grow("a", 0, 16)
    manager.cache_blocks("a", NAMES, 16, request())
    (event,) = manager.take_events()
    assert isinstance(event, BlockStored)
    assert (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) == (kind, sliding_window)
    assert event.token_ids == list(range(100, 116))


def test_bytes_as_they_are_published() -> None:
    name = b"\x01" * 32
    events: list[KVCacheEvent] = [
        BlockStored(
            block_hashes=[7, name],
            parent_block_hash=None,
            token_ids=[1, 2],
            block_size=1,
            lora_id=None,
            medium="GPU",
            lora_name=None,
            extra_keys=[None, ("s",)],
            group_idx=0,
            kv_cache_spec_kind="sliding_window",
            kv_cache_spec_sliding_window=24,
        ),
        BlockRemoved(block_hashes=[7], medium="GPU", group_idx=1),
        AllBlocksCleared(),
    ]
    batch = KVEventBatch(1.5, events, 3)  # type: ignore[arg-type]  # of all three kinds
    packed = msgspec.msgpack.encode(batch)
    assert packed.hex() == PUBLISHED
    assert msgspec.msgpack.decode(packed, type=KVEventBatch).events[1:] == events[1:]
