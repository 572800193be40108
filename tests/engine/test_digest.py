"""The naive KV reader: against the oracle, across layouts, and over ranks with different heads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import msgspec
import numpy as np
import pytest
import torch

from kvxfer.engine.digest import (
    Difference,
    KVDigest,
    PlaneDigest,
    blocks_on_host,
    compare,
    kv_digests,
    merge_digests,
)
from kvxfer.transfer.layout import Interior, Region
from tests.builders import EngineShape, build_manifest, build_memories
from tests.oracle import Bytes, oracle_fill, oracle_pieces, oracle_value

HND16 = EngineShape(num_kv_heads=4, num_blocks=16, block_tokens=16)
NHD24 = replace(HND16, block_tokens=24, kernel_blocks=3, layout="NHD", outermost="blocks")
IDS = {16: [9, 2, 5], 24: [7, 1]}
"""Of 37 tokens, by the size of a block."""
KEPT = {16: [-1, 2, 5], 24: [-1, 1]}
"""The same where a window of 9 tokens keeps the last blocks: from token 16, and from 24 on."""
LAYERS = ("layers.0", "layers.1")


@dataclass(frozen=True)
class Pool:
    """One rank's memory and regions."""

    regions: tuple[Region, ...]
    memory: Bytes
    ids: Sequence[int]

    def digest(self, ids: Sequence[int] | None = None, num_tokens: int = 37) -> KVDigest:
        tables = [self.ids if ids is None else ids]
        return kv_digests(self.regions, torch.from_numpy(self.memory), tables, num_tokens)

    def change(self, layer: str, plane: str, head: int, token: int) -> None:
        (region,) = [each for each in self.regions if (each.layer, each.plane) == (layer, plane)]
        oracle_pieces(region, [self.memory], self.ids, token, head)[-1][-1] ^= 1


def pools(shape: EngineShape) -> list[Pool]:
    """Of each rank, with 37 tokens of a request: all has a value of its own."""
    found = []
    for entry in build_manifest(shape).ranks:
        (memory,) = build_memories(entry)
        ids = IDS[shape.block_tokens]
        oracle_fill(entry.regions, [memory], ids=[ids] * shape.num_groups, num_tokens=37)
        found.append(Pool(entry.regions, memory, ids))
    return found


def ranks(shape: EngineShape, tp_size: int = 1) -> list[KVDigest]:
    return [pool.digest() for pool in pools(replace(shape, tp_size=tp_size))]


def test_digest_by_hand() -> None:
    rank = ranks(HND16, 2)[1]
    assert rank.num_tokens == 37
    keys = [(d.layer, d.plane, d.head) for d in rank.planes]
    assert keys == [(x, p, h) for x in LAYERS for p in ("k", "v") for h in (2, 3)]
    regions = {(r.layer, r.plane): r for r in pools(HND16)[0].regions}
    for found in rank.planes:
        values = [oracle_value(regions[found.key[:2]], token, found.head) for token in range(37)]
        assert found.tokens == b"".join(
            blake2b(value.tobytes(), digest_size=8).digest() for value in values
        )


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_equal_kv_in_any_layout_and_split_is_equal(tp_size: int) -> None:
    assert compare(ranks(HND16), ranks(NHD24, tp_size)) == []
    assert compare(ranks(NHD24, tp_size), ranks(HND16)) == []


def test_one_changed_byte_is_named() -> None:
    (pool,) = pools(NHD24)
    for token in (30, 31):
        pool.change("layers.1", "v", 2, token)
    found = compare(ranks(HND16), [pool.digest()])
    want = Difference("layers.1", "v", 2, first_token=30, reason="source and sink differ")
    assert found == [want]
    assert str(want) == "layers.1 v head 2 from token 30: source and sink differ"


def test_slots_behind_the_last_token_do_not_count() -> None:
    (pool,) = pools(HND16)
    pool.change("layers.0", "k", 0, 37)
    assert compare(ranks(NHD24), [pool.digest()]) == []


def test_missing_heads_and_disagreeing_replicas_are_named() -> None:
    whole, (low, *_) = ranks(HND16, 2)[:1], ranks(HND16, 4)
    for sides, where in (((whole, [low]), "sink"), (([low], whole), "source")):
        reasons = {(d.layer, d.plane, d.head): d.reason for d in compare(*sides)}
        assert reasons == {(x, p, 1): f"missing on the {where}" for x in LAYERS for p in "kv"}
    pool = pools(replace(HND16, tp_size=4))[0]
    pool.change("layers.0", "k", 0, 4)
    torn = pool.digest()
    for sides, where in ((([low, torn], [low]), "source"), (([low], [low, torn]), "sink")):
        words = f"layers.0 k head 0 from token 4: {where} replicas differ"
        assert [str(d) for d in compare(*sides)] == [words]


def test_different_lengths_differ_at_the_first_missing_token() -> None:
    (pool,) = pools(HND16)
    found = compare([pool.digest()], [pool.digest(num_tokens=20)])
    assert [d.first_token for d in found] == [20] * 16


@pytest.mark.parametrize("shape", [HND16, NHD24], ids=["HND", "NHD"])
def test_blocks_that_were_copied_have_the_digests_of_all(shape: EngineShape) -> None:
    """As from a GPU. No byte of the pool is 0, and all of the memory that is there for a copy."""
    (pool,) = pools(replace(shape, groups=(0, 1)))
    buffer = torch.from_numpy(pool.memory).random_(1, 256)
    blank = [torch.zeros_like(buffer) for _ in range(4)]
    del blank
    ids = [[15, 0, 7, 3], [1, 4, 2, 14]]
    num_tokens = 3 * shape.block_tokens + 5
    copied = blocks_on_host(pool.regions, buffer, ids)
    assert copied.data_ptr() != buffer.data_ptr()
    want = kv_digests(pool.regions, buffer, ids, num_tokens)
    assert kv_digests(pool.regions, copied, ids, num_tokens) == want


def test_dropped_and_wrong_ids_are_left_to_the_reader() -> None:
    (pool,) = pools(replace(HND16, windows=(9,)))
    buffer = torch.from_numpy(pool.memory)
    for ids in ([[-1, 2, 5]], [[-1, 2, 19]], []):
        copied = blocks_on_host(pool.regions, buffer, ids)
        assert copied.shape == buffer.shape
    with pytest.raises(ValueError, match="block_ids: expected ids in"):
        kv_digests(pool.regions, copied, [[-1, 2, 19]], 37)


# ---------------------------------------------------------------- windows


def windowed(shape: EngineShape, tables: dict[int, list[int]], tp_size: int = 1) -> list[KVDigest]:
    """Of two heads whose layers see 9 tokens, by these tables."""
    shape = replace(shape, num_kv_heads=2, windows=(9,), tp_size=tp_size)
    return [pool.digest(tables[shape.block_tokens]) for pool in pools(shape)]


def test_dropped_blocks_are_not_digested() -> None:
    (whole,), (kept16,), (kept24,) = (
        windowed(HND16, IDS),
        windowed(HND16, KEPT),
        windowed(NHD24, KEPT),
    )
    assert {(d.first_token, d.end) for d in whole.planes} == {(0, 37)}
    assert {(d.first_token, d.end) for d in kept16.planes} == {(16, 37)}
    assert {(d.first_token, d.end) for d in kept24.planes} == {(24, 37)}
    for all_tokens, later in zip(whole.planes, kept24.planes, strict=True):
        assert later.tokens == all_tokens.tokens[24 * 8 :]


def test_compared_is_what_both_sides_hold() -> None:
    sides = [windowed(shape, tables) for shape in (HND16, NHD24) for tables in (IDS, KEPT)]
    for source in sides:
        for sink in sides:
            assert compare(source, sink) == []
            assert compare(windowed(NHD24, KEPT, 2), sink) == []


@pytest.mark.parametrize(("token", "is_found"), [(23, False), (24, True), (36, True)])
def test_a_difference_counts_from_the_first_token_of_both(token: int, *, is_found: bool) -> None:
    (pool,) = pools(replace(HND16, num_kv_heads=2, windows=(9,)))
    pool.change("layers.1", "v", 1, token)
    torn = [pool.digest(KEPT[16])]
    want = Difference("layers.1", "v", 1, token, "source and sink differ")
    assert compare(torn, windowed(NHD24, KEPT)) == ([want] if is_found else [])
    assert compare(windowed(NHD24, KEPT), torn) == ([want] if is_found else [])
    assert compare(windowed(HND16, KEPT), torn) == [want]


def test_a_plane_of_which_nothing_is_compared_is_named() -> None:
    pool = pools(replace(HND16, num_kv_heads=2, tp_size=2))[0]
    found = compare([pool.digest(num_tokens=16)], windowed(HND16, KEPT, 2)[:1])
    assert [str(d) for d in found] == [
        f"{layer} {plane} head 0 from token 16: no token is held by both sides"
        for layer in LAYERS
        for plane in "kv"
    ]
    nothing = pool.digest([], 0)
    assert compare([nothing], [nothing]) == []


def test_a_plane_between_tokens() -> None:
    plane = PlaneDigest(layer="a", plane="k", head=0, tokens=bytes(range(80)), first_token=5)
    assert plane.end == 15
    for lo, hi, first, begin, end in (
        (0, 15, 5, 0, 80),
        (5, 7, 5, 0, 16),
        (8, 15, 8, 24, 80),
        (0, 3, 3, 0, 0),
        (3, 5, 5, 0, 0),
        (15, 15, 15, 80, 80),
    ):
        part = plane.between(lo, hi)
        assert (part.first_token, part.tokens) == (first, bytes(range(80))[begin:end]), (lo, hi)


def test_regions_read_the_table_of_their_own_group() -> None:
    (pool,) = pools(HND16)
    buffer, whole = torch.from_numpy(pool.memory), pool.digest()
    regions = build_manifest(replace(HND16, groups=(0, 1))).ranks[0].regions
    assert kv_digests(regions, buffer, [[9, 2, 5]] * 2, 37) == whole
    swapped = kv_digests(regions, buffer, [[9, 2, 5], [9, 5, 2]], 37)
    same = [d.tokens == w.tokens for d, w in zip(swapped.planes, whole.planes, strict=True)]
    assert same == [True] * 8 + [False] * 8
    with pytest.raises(ValueError, match="expected a table for group 1 of layers.1, got 1 tables"):
        kv_digests(regions, buffer, [[9, 2, 5]], 37)


@pytest.mark.parametrize("shape", [HND16, NHD24], ids=["HND", "NHD"])
def test_channels_apart_have_the_digests_of_channels_together(shape: EngineShape) -> None:
    (together,) = pools(shape)
    apart, torn = (pools(replace(shape, turned=("k",), channel_nbytes=4))[0] for _ in range(2))
    assert compare([together.digest()], [apart.digest()]) == []
    torn.change("layers.0", "k", 1, 20)
    assert compare([together.digest()], [torn.digest()])


def test_a_hole_is_an_error() -> None:
    (pool,) = pools(replace(HND16, windows=(9,)))
    for table in ([9, -1, 5], [-1, 2, -1]):
        with pytest.raises(ValueError, match=r"expected ids in \[0, 16\), got -1"):
            pool.digest(table)


def test_travels_as_msgpack() -> None:
    (rank,) = ranks(HND16)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(rank), type=KVDigest)
    assert compare([rank], [again]) == []
    assert merge_digests([again])[0].num_tokens == 37


def test_refusals() -> None:
    (pool,) = pools(HND16)
    for block in (16, -1):
        with pytest.raises(ValueError, match=rf"expected ids in \[0, 16\), got {block}"):
            pool.digest([block], 3)
    with pytest.raises(ValueError, match="expected blocks for 17 tokens, got 1 of 16 tokens"):
        pool.digest([1], 17)
    opaque = msgspec.structs.replace(pool.regions[0], interior=Interior.OPAQUE)
    with pytest.raises(ValueError, match="layers.0 k: expected a plain interior, got opaque"):
        replace(pool, regions=(opaque,)).digest()
    for shape in (HND16, replace(HND16, turned=("k",))):
        short = replace(pools(shape)[0], memory=pool.memory[:200])
        with pytest.raises(ValueError, match="k: expected 8 bytes at .*, got a buffer of 200"):
            short.digest([1], 3)
    with pytest.raises(ValueError, match=r"ranks: expected one token count on all, got \[2, 3\]"):
        merge_digests([pool.digest([1], 2), pool.digest([1], 3)])


def test_is_quick_enough_for_every_request() -> None:
    """16 k digests: measured 20-44 ms; the limit leaves room for a busy machine."""
    shape = replace(NHD24, num_kv_heads=8, num_layers=4, block_tokens=16, inner_nbytes=256)
    (entry,) = build_manifest(replace(shape, kernel_blocks=2)).ranks
    pool = Pool(entry.regions, np.zeros(entry.memories[0].nbytes, np.uint8), range(16))
    start = time.process_time()
    rank = pool.digest(num_tokens=256)
    elapsed_s = time.process_time() - start
    assert sum(len(plane.tokens) // 8 for plane in rank.planes) == 16384
    assert elapsed_s < 1


def test_a_chunk_that_has_just_begun_has_no_token_to_compare() -> None:
    """Of chunks of 48 tokens, 48 of them moved: a side holds none. A window always has one."""
    empty, held = (
        KVDigest(
            num_tokens=48,
            planes=(PlaneDigest("l", "k", 0, bytes(8 * (48 - first)), first, is_chunk=True),),
        )
        for first in (48, 32)
    )
    assert compare([empty], [held]) == compare([held], [empty]) == []
    windows = [
        msgspec.structs.replace(
            each, planes=(msgspec.structs.replace(each.planes[0], is_chunk=False),)
        )
        for each in (empty, held)
    ]
    (found,) = compare([windows[0]], [windows[1]])
    assert found.reason == "no token is held by both sides"
