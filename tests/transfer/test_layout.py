"""Addresses by hand, what a region must not be, and planes that lie side by side."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvxfer.transfer.layout import Interior, Region, check_region, join_planes, same_bytes
from kvxfer.transfer.manifest import RankId
from tests.builders import EngineShape, build_regions
from tests.oracle import oracle_address, oracle_pieces

# [block][token][head][inner] of 4 blocks of 6 tokens in 3 kernel blocks, heads 2 and 3, 8 bytes
PLANE = Region(
    layer="layers.0",
    plane="k",
    group=0,
    memory=0,
    offset=100,
    num_blocks=4,
    block_tokens=6,
    head_lo=2,
    head_hi=4,
    inner_nbytes=8,
    stride_block=40,
    stride_head=8,
    stride_token=16,
    kernel_blocks=3,
)


@pytest.mark.parametrize(
    ("block_id", "head", "token", "address"),
    [
        (0, 2, 0, 100),
        (0, 3, 0, 108),
        (0, 2, 1, 116),
        (0, 2, 2, 140),  # the second kernel block
        (1, 2, 0, 220),
        (3, 3, 5, 100 + 11 * 40 + 16 + 8),
    ],
)
def test_address_by_hand(block_id: int, head: int, token: int, address: int) -> None:
    assert PLANE.address(block_id, head, token) == address
    assert oracle_address(PLANE, block_id, head, token) == address


def test_sizes_by_hand() -> None:
    assert PLANE.kernel_cells == 2
    assert PLANE.num_heads == 2
    assert PLANE.end == 100 + 11 * 40 + 16 + 8 + 8
    assert PLANE.is_dense
    assert not replace(PLANE, stride_token=20).is_dense
    assert replace(PLANE, stride_head=16, stride_token=8).is_dense


@pytest.mark.parametrize(
    ("block_id", "head", "token"), [(4, 2, 0), (-1, 2, 0), (0, 1, 0), (0, 2, 6)]
)
def test_address_outside_is_refused(block_id: int, head: int, token: int) -> None:
    with pytest.raises(IndexError, match="expected"):
        PLANE.address(block_id, head, token)


def test_region_fits_its_memory_exactly() -> None:
    check_region(PLANE, PLANE.end)
    with pytest.raises(ValueError, match="layers.0/k: expected to end within the 571 bytes"):
        check_region(PLANE, PLANE.end - 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer": ""}, "names"),
        ({"offset": -1}, "offset: expected 0 or more, got -1"),
        ({"group": -1}, "group"),
        ({"num_blocks": 0}, "num_blocks: expected 1 or more"),
        ({"inner_nbytes": 0}, "inner_nbytes"),
        ({"kernel_blocks": 0}, "kernel_blocks"),
        ({"kernel_blocks": 4}, "block_tokens: expected a multiple of 4 kernel blocks, got 6"),
        ({"head_hi": 2}, r"heads: expected head_lo < head_hi, got \[2, 2\)"),
        ({"window": 0}, "window: expected 1 or more tokens, got 0"),
        ({"window": -48}, "window: expected 1 or more tokens, got -48"),
        ({"stride_head": -8}, "stride_head: expected 1 or more, got -8"),
        ({"stride_head": 7}, "stride_head: expected at least the 8 bytes it steps over, got 7"),
        ({"stride_token": 8}, "stride_token: expected at least the 16 bytes"),
        ({"stride_block": 31}, "stride_block: expected at least the 32 bytes"),
        ({"num_blocks": 1 << 62}, "expected to end within"),
    ],
)
def test_nonsense_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_region(replace(PLANE, **change), 1 << 63)


def test_strides_that_are_never_stepped_may_be_anything() -> None:
    one = replace(PLANE, head_hi=3, stride_head=1, block_tokens=3, stride_token=1)
    check_region(one, one.end)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("outermost", ["planes", "blocks", "inner"])
def test_every_layout_is_just_strides(layout: str, outermost: str) -> None:
    shape = EngineShape(
        layout=layout,  # type: ignore[arg-type]
        outermost=outermost,  # type: ignore[arg-type]
        num_kv_heads=3,
        block_tokens=6,
        kernel_blocks=2,
        num_blocks=2,
        inner_nbytes=2,
        padding_nbytes=1,
    )
    regions, nbytes = build_regions(shape, RankId(0, 0))
    seen: set[int] = set()
    for region in regions:
        check_region(region, nbytes)
        for block in range(2):
            for head in range(3):
                for token in range(6):
                    address = region.address(block, head, token)
                    assert address == oracle_address(region, block, head, token)
                    seen |= {address, address + 1}
    # 2 layers x 2 planes x 2 blocks x 3 heads x 6 tokens x 2 bytes: no byte twice
    assert len(seen) == 2 * 2 * 2 * 3 * 6 * 2


def test_planes_side_by_side_are_joined() -> None:
    (k, v, *_), _ = build_regions(EngineShape(outermost="inner"), RankId(0, 0))
    joined = join_planes(k, v)
    assert joined == replace(k, plane="k+v", inner_nbytes=16)
    assert join_planes(v, k) is None
    assert join_planes(k, replace(v, offset=v.offset + 1)) is None
    assert join_planes(k, replace(v, stride_token=17)) is None
    assert join_planes(k, replace(v, group=1)) is None
    assert join_planes(k, replace(v, window=48)) is None
    opaque = [replace(region, interior=Interior.OPAQUE) for region in (k, v)]
    assert join_planes(*opaque) is None


def test_planes_apart_are_not_joined() -> None:
    (k, v, *_), _ = build_regions(EngineShape(outermost="blocks"), RankId(0, 0))
    assert join_planes(k, v) is None


# [block][head][channel][token] of 3 blocks of 4 tokens, heads 2 and 3, 3 channels of 2 bytes
TURNED = Region(
    layer="layers.0",
    plane="k",
    group=0,
    memory=0,
    offset=100,
    num_blocks=3,
    block_tokens=4,
    head_lo=2,
    head_hi=4,
    inner_nbytes=6,
    stride_block=50,
    stride_head=24,
    stride_token=2,
    channel_nbytes=2,
    stride_channel=8,
)


def test_channels_apart_by_hand() -> None:
    assert TURNED.has_channels_apart
    assert TURNED.num_channels == 3
    assert TURNED.address(1, 3, 2) == oracle_address(TURNED, 1, 3, 2) == 100 + 50 + 24 + 4
    assert TURNED.end == 100 + 2 * 50 + 24 + 3 * 2 + 2 * 8 + 2
    assert TURNED.is_dense
    assert not replace(TURNED, stride_head=25).is_dense
    assert not replace(TURNED, stride_channel=9, stride_head=30).is_dense
    check_region(TURNED, TURNED.end)
    with pytest.raises(ValueError, match="expected to end within the 247 bytes"):
        check_region(TURNED, TURNED.end - 1)


@pytest.mark.parametrize(
    "same",
    [
        {"channel_nbytes": 4},
        {"channel_nbytes": 4, "stride_channel": 4},
        {"channel_nbytes": 8, "stride_channel": 99},  # one channel: never stepped
    ],
)
def test_channels_that_are_contiguous_have_one_meaning(same: dict[str, int]) -> None:
    spelled = replace(PLANE, **same)
    assert not spelled.has_channels_apart
    assert (spelled.num_channels, spelled.end, spelled.is_dense) == (1, PLANE.end, True)
    check_region(spelled, spelled.end)
    assert same_bytes(PLANE, spelled)
    (k, v, *_), _ = build_regions(EngineShape(outermost="inner"), RankId(0, 0))
    joined = replace(k, plane="k+v", inner_nbytes=16)
    assert join_planes(replace(k, **same), v) == joined
    assert join_planes(k, replace(v, **same)) == joined


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"channel_nbytes": -2}, "channel_nbytes: expected 0 or more, got -2"),
        ({"stride_channel": -8}, "stride_channel: expected 0 or more, got -8"),
        ({"channel_nbytes": 4}, "channel_nbytes: expected a divisor of the 6 inner bytes, got 4"),
        ({"channel_nbytes": 0}, "channel_nbytes: expected a divisor of the 6 inner bytes, got 0"),
        ({"channel_nbytes": 12}, "expected a divisor of the 6 inner bytes, got 12"),
        ({"stride_channel": 7}, "stride_channel: expected at least the 8 bytes it steps over"),
        ({"stride_token": 1}, "stride_token: expected at least the 2 bytes it steps over, got 1"),
        ({"stride_channel": 9}, "stride_head: expected at least the 26 bytes it steps over"),
        ({"stride_head": 23}, "stride_head: expected at least the 24 bytes"),
        ({"stride_block": 47}, "stride_block: expected at least the 48 bytes"),
        ({"interior": Interior.OPAQUE}, "stride_channel: expected 0 where the interior is opaque"),
    ],
)
def test_nonsense_of_channels_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_region(replace(TURNED, **change), 1 << 20)


@given(
    channel_nbytes=st.integers(1, 3),
    counts=st.tuples(*[st.integers(1, 3)] * 4),
    strides=st.tuples(*[st.integers(1, 40)] * 4),
)
def test_what_is_accepted_has_no_byte_twice(
    channel_nbytes: int, counts: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    num_blocks, num_heads, num_tokens, num_channels = counts
    region = replace(
        TURNED,
        offset=0,
        num_blocks=num_blocks,
        head_hi=2 + num_heads,
        block_tokens=num_tokens,
        inner_nbytes=num_channels * channel_nbytes,
        channel_nbytes=channel_nbytes,
        stride_block=strides[0],
        stride_head=strides[1],
        stride_token=strides[2],
        stride_channel=strides[3],
    )
    try:
        check_region(region, 1 << 20)
    except ValueError:
        return
    memory = np.arange(region.end)
    places = [
        int(place)
        for block in range(num_blocks)
        for head in range(2, 2 + num_heads)
        for token in range(num_tokens)
        for view in oracle_pieces(region, [memory], [block], token, head)  # type: ignore[list-item]
        for place in view
    ]
    assert len(places) == len(set(places))
    assert max(places) == region.end - 1


def test_planes_with_channels_apart_are_not_joined() -> None:
    (k, v, *_), _ = build_regions(EngineShape(outermost="inner"), RankId(0, 0))
    apart = {"channel_nbytes": 4, "stride_channel": 400}
    assert join_planes(replace(k, **apart), v) is None
    assert join_planes(k, replace(v, **apart)) is None
    assert join_planes(replace(k, **apart), replace(v, **apart)) is None


def test_channels_apart_are_other_bytes() -> None:
    assert not same_bytes(TURNED, replace(TURNED, stride_channel=10))
    assert not same_bytes(TURNED, replace(TURNED, stride_channel=0))
    assert same_bytes(TURNED, replace(TURNED, layer="layers.1"))


def test_same_bytes_whatever_the_name() -> None:
    assert same_bytes(PLANE, replace(PLANE, layer="layers.1"))
    assert not same_bytes(PLANE, replace(PLANE, layer="layers.1", offset=108))
    assert not same_bytes(PLANE, replace(PLANE, layer="layers.1", group=1))
