"""The naive KV reader: by hand, across layouts, and over ranks with different heads."""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgspec
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

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

NUM_BLOCKS = 16
VALUE_NBYTES = 4


class Layout(enum.Enum):
    """Physical orders, as the tests write them out."""

    HND = enum.auto()  # [K and V, blocks, heads, tokens, values]
    NHD = enum.auto()  # [kernel blocks of 8 tokens, K and V, tokens, heads, values]


@dataclass(frozen=True)
class Pool:
    """Two layers, "a" and "b", in one buffer."""

    buffer: Tensor
    layers: Mapping[str, Tensor]
    regions: tuple[Region, ...]


def make_pool(
    layout: Layout,
    block_tokens: int,
    heads: tuple[int, int],
    *,
    head_size: int = 2,
    window: int | None = None,
) -> Pool:
    """Strides are written out here, not asked of the views."""
    num_heads = heads[1] - heads[0]
    head_nbytes = head_size * VALUE_NBYTES
    plane_nbytes = NUM_BLOCKS * num_heads * block_tokens * head_nbytes
    buffer = torch.full((2 * 2 * plane_nbytes,), 0xEE, dtype=torch.uint8)
    layers, regions = {}, []
    for number, name in enumerate("ab"):
        start = number * 2 * plane_nbytes
        values = buffer[start : start + 2 * plane_nbytes].view(torch.float32)
        if layout is Layout.HND:
            layers[name] = values.view(2, NUM_BLOCKS, num_heads, block_tokens, head_size)
            stride_head, stride_token = block_tokens * head_nbytes, head_nbytes
            stride_block = num_heads * stride_head
            value_offset, kernel_blocks = plane_nbytes, 1
        else:
            kernel_blocks = block_tokens // 8
            layers[name] = values.view(NUM_BLOCKS * kernel_blocks, 2, 8, num_heads, head_size)
            value_offset = 8 * num_heads * head_nbytes
            stride_head, stride_token = head_nbytes, num_heads * head_nbytes
            stride_block = 2 * value_offset
        for plane, offset in (("k", start), ("v", start + value_offset)):
            region = Region(
                layer=name,
                plane=plane,
                group=0,
                memory=0,
                offset=offset,
                num_blocks=NUM_BLOCKS,
                block_tokens=block_tokens,
                head_lo=heads[0],
                head_hi=heads[1],
                inner_nbytes=head_nbytes,
                kernel_blocks=kernel_blocks,
                window=window,
                stride_block=stride_block,
                stride_head=stride_head,
                stride_token=stride_token,
            )
            regions.append(region)
    return Pool(buffer, layers, tuple(regions))


def value_of(layer: int, plane: int, head: int, token: int) -> float:
    return float(layer * 10000 + plane * 5000 + head * 1000 + token)


def filled_pool(
    layout: Layout,
    block_tokens: int,
    heads: tuple[int, int],
    block_ids: Sequence[int],
    tokens: int,
    window: int | None = None,
) -> Pool:
    """A pool whose every (layer, plane, head, token) of one request has a value of its own."""
    pool = make_pool(layout, block_tokens, heads, window=window)
    for layer, view in enumerate(pool.layers.values()):
        for token in range(tokens):
            block, slot = block_ids[token // block_tokens], token % block_tokens
            for head in range(*heads):
                for plane in (0, 1):
                    value = value_of(layer, plane, head, token)
                    if block < 0:
                        continue
                    if layout is Layout.HND:
                        view[plane, block, head - heads[0], slot] = value
                    else:
                        at = block * (block_tokens // 8) + slot // 8
                        view[at, plane, slot % 8, head - heads[0]] = value
    return pool


def digest(pool: Pool, block_ids: Sequence[int], tokens: int) -> KVDigest:
    return kv_digests(pool.regions, pool.buffer, [block_ids], tokens)


HND16 = (Layout.HND, 16, [9, 2, 5])
NHD24 = (Layout.NHD, 24, [7, 1])


def ranks(side: tuple[Layout, int, list[int]], splits: list[tuple[int, int]]) -> list[KVDigest]:
    layout, block_tokens, ids = side
    return [digest(filled_pool(layout, block_tokens, s, ids, 37), ids, 37) for s in splits]


def test_digest_by_hand() -> None:
    (rank,) = ranks(HND16, [(2, 4)])
    assert rank.num_tokens == 37
    keys = [(d.layer, d.plane, d.head) for d in rank.planes]
    assert keys == [(x, p, h) for x in ("a", "b") for p in ("k", "v") for h in (2, 3)]
    for found in rank.planes:
        layer, plane = "ab".index(found.layer), "kv".index(found.plane)
        want = b""
        for token in range(37):
            value = value_of(layer, plane, found.head, token)
            raw = torch.tensor([value, value]).numpy().tobytes()
            want += blake2b(raw, digest_size=8).digest()
        assert found.tokens == want


@pytest.mark.parametrize(
    "splits",
    [[(0, 4)], [(0, 2), (2, 4)], [(0, 1), (1, 2), (2, 3), (3, 4)], [(0, 2)] * 2 + [(2, 4)] * 2],
)
def test_equal_kv_in_any_layout_and_split_is_equal(splits: list[tuple[int, int]]) -> None:
    assert compare(ranks(HND16, [(0, 4)]), ranks(NHD24, splits)) == []
    assert compare(ranks(NHD24, splits), ranks(HND16, [(0, 4)])) == []


def test_one_changed_byte_is_named() -> None:
    layout, block_tokens, ids = NHD24
    pool = filled_pool(layout, block_tokens, (0, 4), ids, 37)
    # token 30 is slot 6 of block 1: the first kernel block of that block
    pool.layers["b"][3, 1, 6, 2, 1] += 1
    pool.layers["b"][3, 1, 7, 2, 1] += 1
    found = compare(ranks(HND16, [(0, 4)]), [digest(pool, ids, 37)])
    want = Difference(layer="b", plane="v", head=2, first_token=30, reason="source and sink differ")
    assert found == [want]
    assert str(want) == "b v head 2 from token 30: source and sink differ"


def test_slots_behind_the_last_token_do_not_count() -> None:
    layout, block_tokens, ids = HND16
    pool = filled_pool(layout, block_tokens, (0, 4), ids, 37)
    pool.layers["a"][0, 5, 0, 5] += 1  # token 37
    assert compare(ranks(NHD24, [(0, 4)]), [digest(pool, ids, 37)]) == []


def test_missing_heads_and_disagreeing_replicas_are_named() -> None:
    whole, (low,) = ranks(HND16, [(0, 2)]), ranks(HND16, [(0, 1)])
    reasons = {(d.layer, d.plane, d.head): d.reason for d in compare(whole, [low])}
    assert reasons == {(x, p, 1): "missing on the sink" for x in "ab" for p in "kv"}
    reasons = {(d.layer, d.plane, d.head): d.reason for d in compare([low], whole)}
    assert reasons == {(x, p, 1): "missing on the source" for x in "ab" for p in "kv"}
    layout, block_tokens, ids = HND16
    pool = filled_pool(layout, block_tokens, (0, 1), ids, 37)
    pool.layers["a"][0, 9, 0, 4] += 1
    torn = digest(pool, ids, 37)
    assert [str(d) for d in compare([low, torn], [low])] == [
        "a k head 0 from token 4: source replicas differ"
    ]
    assert [str(d) for d in compare([low], [low, torn])] == [
        "a k head 0 from token 4: sink replicas differ"
    ]


def test_different_lengths_differ_at_the_first_missing_token() -> None:
    layout, block_tokens, ids = HND16
    short = digest(filled_pool(layout, block_tokens, (0, 1), ids, 37), ids, 20)
    found = compare(ranks(HND16, [(0, 1)]), [short])
    assert [d.first_token for d in found] == [20] * 4


@pytest.mark.parametrize(("layout", "block_tokens"), [(Layout.HND, 16), (Layout.NHD, 24)])
def test_blocks_that_were_copied_have_the_digests_of_all(layout: Layout, block_tokens: int) -> None:
    """As from a GPU. No byte of the pool is 0, and all of the memory that is there for a copy."""
    pool = make_pool(layout, block_tokens, (0, 3))
    pool.buffer.random_(1, 256)
    blank = [torch.zeros_like(pool.buffer) for _ in range(4)]
    del blank
    ids = [[NUM_BLOCKS - 1, 0, 7, 3]]
    num_tokens = 3 * block_tokens + 5
    copied = blocks_on_host(pool.regions, pool.buffer, ids)
    assert copied.data_ptr() != pool.buffer.data_ptr()
    want = kv_digests(pool.regions, pool.buffer, ids, num_tokens)
    assert kv_digests(pool.regions, copied, ids, num_tokens) == want


def test_dropped_and_wrong_ids_are_left_to_the_reader() -> None:
    pool = filled_pool(Layout.HND, 16, (0, 2), [-1, 2, 5], 37, window=9)
    for ids in ([[-1, 2, 5]], [[-1, 2, NUM_BLOCKS + 3]], []):
        copied = blocks_on_host(pool.regions, pool.buffer, ids)
        assert copied.shape == pool.buffer.shape
    with pytest.raises(ValueError, match="block_ids: expected ids in"):
        kv_digests(pool.regions, copied, [[-1, 2, NUM_BLOCKS + 3]], 37)


# ---------------------------------------------------------------- windows

# 37 tokens, of which a window keeps the last blocks: from token 16 in blocks of 16, from 24 in 24s
KEPT16 = (Layout.HND, 16, [-1, 2, 5])
KEPT24 = (Layout.NHD, 24, [-1, 1])


def windowed(side: tuple[Layout, int, list[int]], heads: tuple[int, int] = (0, 2)) -> KVDigest:
    layout, block_tokens, ids = side
    return digest(filled_pool(layout, block_tokens, heads, ids, 37, window=9), ids, 37)


def test_dropped_blocks_are_not_digested() -> None:
    whole, kept16, kept24 = (windowed(side) for side in (HND16, KEPT16, KEPT24))
    assert {(d.first_token, d.end) for d in whole.planes} == {(0, 37)}
    assert {(d.first_token, d.end) for d in kept16.planes} == {(16, 37)}
    assert {(d.first_token, d.end) for d in kept24.planes} == {(24, 37)}
    for all_tokens, later in zip(whole.planes, kept24.planes, strict=True):
        assert later.tokens == all_tokens.tokens[24 * 8 :]


def test_compared_is_what_both_sides_hold() -> None:
    sides = [windowed(side) for side in (HND16, NHD24, KEPT16, KEPT24)]
    for source in sides:
        for sink in sides:
            assert compare([source], [sink]) == []
            halves = [windowed(KEPT24, (0, 1)), windowed(KEPT24, (1, 2))]
            assert compare(halves, [sink]) == []


@pytest.mark.parametrize(("token", "is_found"), [(23, False), (24, True), (36, True)])
def test_a_difference_counts_from_the_first_token_of_both(token: int, *, is_found: bool) -> None:
    layout, block_tokens, ids = KEPT16
    pool = filled_pool(layout, block_tokens, (0, 2), ids, 37, window=9)
    pool.layers["b"][1, ids[token // 16], 1, token % 16] += 1
    torn = digest(pool, ids, 37)
    found = compare([torn], [windowed(KEPT24)])
    want = Difference(
        layer="b", plane="v", head=1, first_token=token, reason="source and sink differ"
    )
    assert found == ([want] if is_found else [])
    assert compare([windowed(KEPT24)], [torn]) == found
    assert compare([windowed(KEPT16)], [torn]) == [msgspec.structs.replace(want)]


def test_a_plane_of_which_nothing_is_compared_is_named() -> None:
    layout, block_tokens, ids = HND16
    early = digest(filled_pool(layout, block_tokens, (0, 1), ids, 16), ids, 16)
    found = compare([early], [windowed(KEPT16, (0, 1))])
    assert [str(d) for d in found] == [
        f"{layer} {plane} head 0 from token 16: no token is held by both sides"
        for layer in "ab"
        for plane in "kv"
    ]
    nothing = digest(make_pool(Layout.HND, 16, (0, 1)), [], 0)
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
    pool = filled_pool(Layout.HND, 16, (0, 1), [9, 2, 5], 37)
    other = tuple(msgspec.structs.replace(region, group=1) for region in pool.regions[2:])
    regions = pool.regions[:2] + other
    whole = digest(pool, [9, 2, 5], 37)
    assert kv_digests(regions, pool.buffer, [[9, 2, 5]] * 2, 37) == whole
    swapped = kv_digests(regions, pool.buffer, [[9, 2, 5], [9, 5, 2]], 37)
    assert [d.tokens == w.tokens for d, w in zip(swapped.planes, whole.planes, strict=True)] == [
        *(True, True, False, False)
    ]
    with pytest.raises(ValueError, match="expected a table for group 1 of b, got 1 tables"):
        kv_digests(regions, pool.buffer, [[9, 2, 5]], 37)


def turned(region: Region, memory: Tensor, buffer: Tensor) -> Region:
    """The same plane in ``memory``, [block][head][channel][token] of 4 bytes, behind a gap."""
    tokens, heads = region.block_tokens, region.num_heads
    values = region.inner_nbytes // VALUE_NBYTES
    lead = memory.numel() - NUM_BLOCKS * heads * values * tokens * VALUE_NBYTES
    view = memory[lead:].view(torch.float32).view(NUM_BLOCKS, heads, values, tokens)
    for block in range(NUM_BLOCKS):
        for head in range(heads):
            for token in range(tokens):
                at = region.address(block, region.head_lo + head, token)
                one = buffer[at : at + region.inner_nbytes].view(torch.float32)
                view[block, head, :, token] = one
    return msgspec.structs.replace(
        region,
        offset=lead,
        kernel_blocks=1,
        stride_block=heads * values * tokens * VALUE_NBYTES,
        stride_head=values * tokens * VALUE_NBYTES,
        stride_token=VALUE_NBYTES,
        channel_nbytes=VALUE_NBYTES,
        stride_channel=tokens * VALUE_NBYTES,
    )


@pytest.mark.parametrize("layout", list(Layout))
def test_channels_apart_have_the_digests_of_channels_together(layout: Layout) -> None:
    pool = make_pool(layout, 16, (0, 2), head_size=3)
    pool.buffer.copy_(torch.randint(0, 255, pool.buffer.shape, dtype=torch.uint8))
    region = pool.regions[0]
    memory = torch.full((64 + NUM_BLOCKS * 2 * 16 * 12,), 0xEE, dtype=torch.uint8)
    moved = turned(region, memory, pool.buffer)
    want = kv_digests([region], pool.buffer, [[9, 2, 5]], 37)
    assert kv_digests([moved], memory, [[9, 2, 5]], 37) == want
    wrong = msgspec.structs.replace(moved, stride_channel=68)
    assert compare([kv_digests([wrong], memory, [[1]], 3)], [kv_digests([moved], memory, [[1]], 3)])
    with pytest.raises(ValueError, match="a k: expected 12 bytes at .*, got a buffer of 200"):
        kv_digests([moved], memory[:200], [[0]], 16)


def test_a_hole_is_an_error() -> None:
    pool = filled_pool(Layout.HND, 16, (0, 1), [9, 2, 5], 37, window=9)
    for table in ([9, -1, 5], [-1, 2, -1]):
        with pytest.raises(ValueError, match=r"expected ids in \[0, 16\), got -1"):
            digest(pool, table, 37)


def test_travels_as_msgpack() -> None:
    (rank,) = ranks(HND16, [(0, 2)])
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(rank), type=KVDigest)
    assert compare([rank], [again]) == []
    assert merge_digests([again])[0].num_tokens == 37


def test_refusals() -> None:
    pool = filled_pool(Layout.HND, 16, (0, 1), [1], 3)
    with pytest.raises(ValueError, match=r"expected ids in \[0, 16\), got 16"):
        digest(pool, [16], 3)
    with pytest.raises(ValueError, match=r"expected ids in \[0, 16\), got -1"):
        digest(pool, [-1], 3)
    with pytest.raises(ValueError, match="expected blocks for 17 tokens, got 1 of 16 tokens"):
        digest(pool, [1], 17)
    opaque: Region = msgspec.structs.replace(pool.regions[0], interior=Interior.OPAQUE)
    with pytest.raises(ValueError, match="a k: expected a plain interior, got opaque"):
        kv_digests([opaque], pool.buffer, [[1]], 3)
    with pytest.raises(ValueError, match="a k: expected 8 bytes at .*, got a buffer of 64"):
        kv_digests(pool.regions[:1], pool.buffer[:64], [[1]], 3)
    with pytest.raises(ValueError, match=r"ranks: expected one token count on all, got \[2, 3\]"):
        merge_digests([digest(pool, [1], 2), digest(pool, [1], 3)])


def test_is_quick_enough_for_every_request() -> None:
    """16 k digests: measured 20-44 ms; the limit leaves room for a busy machine."""
    pool = make_pool(Layout.NHD, 16, (0, 8), head_size=64)
    pool = Pool(pool.buffer, pool.layers, pool.regions * 2)  # four layers
    start = time.process_time()
    rank = digest(pool, list(range(16)), 256)
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
        replace(each, planes=(replace(each.planes[0], is_chunk=False),)) for each in (empty, held)
    ]
    (found,) = compare([windows[0]], [windows[1]])
    assert found.reason == "no token is held by both sides"
