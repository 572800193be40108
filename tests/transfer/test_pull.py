"""What a source believes of a Pull (nothing), and the chunks both sides derive from it."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace

from kvxfer.errors import ProtocolError
from kvxfer.transfer.chunks import check_chunks, chunk_list, num_chunks
from kvxfer.transfer.layout import Interior, check_region
from kvxfer.transfer.manifest import RankId, RankManifest
from kvxfer.transfer.plan import (
    ALL,
    Base,
    DenseOrder,
    PullClass,
    RegionName,
    Route,
    Side,
    make_plan,
)
from kvxfer.transfer.pull import (
    BlockIdsError,
    PullResolver,
    check_ids,
    open_to,
    route_nbytes,
)
from tests.builders import EngineShape, build_manifest, pull_classes
from tests.transfer.naive import Case, dense_order, same


def route_of(source: EngineShape, sink: EngineShape, sink_tp: int = 0) -> Route:
    plan = make_plan(build_manifest(source), build_manifest(sink))
    return plan.of_sink(RankId(0, sink_tp))[0]


def wanted(**change: Any) -> PullClass:  # noqa: ANN401  (any field of a PullClass)
    """Both planes of two layers, 2 heads of 8 bytes, tokens 0 to 40, sink blocks of 8 NHD."""
    plain = PullClass(
        regions=tuple(RegionName(f"layers.{i}", (plane,)) for i in range(2) for plane in "kv"),
        head_lo=0,
        head_hi=2,
        inner_nbytes=8,
        order=DenseOrder(8, token_major=True),
        token_lo=0,
        token_hi=40,
    )
    return replace(plain, **change)


SOURCE = build_manifest(EngineShape()).ranks[0]
PACKED = build_manifest(EngineShape(outermost="inner")).ranks[0]
GROUPED = build_manifest(EngineShape(groups=(0, 1))).ranks[0]
OPAQUE = build_manifest(EngineShape(interior=Interior.OPAQUE)).ranks[0]
TURNED = build_manifest(EngineShape(turned=("k", "v"), channel_nbytes=4)).ranks[0]


# ---------------------------------------------------------------- pull_classes


def test_what_is_asked_for_by_hand() -> None:
    route = route_of(EngineShape(num_kv_heads=4), EngineShape(tp_size=2, num_kv_heads=4), 1)
    (asked,) = pull_classes(route, {0: (5, 20)})
    assert asked == PullClass(
        regions=tuple(RegionName(f"layers.{i}", (plane,)) for i in range(2) for plane in "kv"),
        head_lo=2,
        head_hi=4,
        inner_nbytes=8,
        order=DenseOrder(16, token_major=False),
        token_lo=5,
        token_hi=20,
    )
    assert route_nbytes((asked,)) == 4 * 2 * 15 * 8


def test_order_is_the_sinks() -> None:
    sink = EngineShape(block_tokens=24, kernel_blocks=3, layout="NHD")
    (asked,) = pull_classes(route_of(EngineShape(), sink), {0: (0, 24)})
    assert asked.order == DenseOrder(8, token_major=True)


@pytest.mark.parametrize("source", [EngineShape(), EngineShape(turned=("k", "v"))])
def test_order_is_by_channel_where_the_sink_is(source: EngineShape) -> None:
    sink = EngineShape(block_tokens=24, kernel_blocks=3, turned=("k", "v"))
    (asked,) = pull_classes(route_of(source, sink), {0: (0, 24)})
    assert asked.order == DenseOrder(8, token_major=False, channel_nbytes=2)
    # Where only the source is, it travels as the sink has it.
    (asked,) = pull_classes(route_of(sink, EngineShape(layout="NHD")), {0: (0, 24)})
    assert asked.order == DenseOrder(16, token_major=True)


def test_classes_with_nothing_to_move_keep_their_place() -> None:
    shape = EngineShape(groups=(0, 1))
    route = route_of(shape, shape)
    asked = pull_classes(route, {0: (7, 7), 1: (0, 20)})
    assert [(a.token_lo, a.token_hi) for a in asked] == [(7, 7), (0, 20)]
    assert {chunk.class_index for chunk in chunk_list(asked, 1 << 20)} == {1}
    assert len(PullResolver(GROUPED).resolve(asked)) == 2


def test_null_route_asks_for_nothing() -> None:
    null = Route(RankId(0, 0), RankId(0, 0), ())
    assert pull_classes(null, {}) == ()
    assert PullResolver(SOURCE).resolve(()) == ()
    assert chunk_list((), 1 << 20) == ()
    assert route_nbytes(()) == 0


@pytest.mark.parametrize(
    ("span", "message"),
    [
        ({0: (9, 8)}, r"span of group 0: expected 0 <= lo <= hi, got \[9, 8\)"),
        ({0: (-1, 8)}, "span of group 0"),
    ],
)
def test_span_must_make_sense(span: dict[int, tuple[int, int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pull_classes(route_of(EngineShape(), EngineShape()), span)


def test_opaque_blocks_are_asked_for_whole() -> None:
    shape = EngineShape(interior=Interior.OPAQUE)
    route = route_of(shape, shape)
    (asked,) = pull_classes(route, {0: (16, 37)})
    assert (asked.token_lo, asked.token_hi) == (16, 48)
    PullResolver(OPAQUE).resolve((asked,))
    with pytest.raises(ValueError, match="expected a start at a multiple of 16 tokens, got 8"):
        pull_classes(route, {0: (8, 37)})


def test_opaque_blocks_in_parts_are_never_split() -> None:
    """Chunks end where kernel blocks do, however small they shall be."""
    shape = EngineShape(interior=Interior.OPAQUE, kernel_blocks=2, num_blocks=8)
    case = Case(shape, shape, num_tokens=64)
    plan = make_plan(case.source, case.sink)
    (asked,) = pull_classes(plan.routes[0], {0: (0, 33)})
    chunks = chunk_list((asked,), 1)
    assert {(chunk.token_lo % 8, chunk.token_hi % 8) for chunk in chunks} == {(0, 0)}
    assert same(case.streamed(plan, {0: (0, 33)}, 1), case.expected({0: (0, 48)}))


def test_opaque_blocks_arrive_whole() -> None:
    shape = EngineShape(interior=Interior.OPAQUE, num_blocks=4)
    case = Case(shape, shape, num_tokens=32)
    plan = make_plan(case.source, case.sink)
    assert same(case.streamed(plan, {0: (16, 17)}, 100), case.expected({0: (16, 32)}))


# ---------------------------------------------------------------- PullResolver


def test_source_side_by_hand() -> None:
    (side,) = PullResolver(SOURCE).resolve((wanted(head_lo=1),))
    # HND: 16 tokens x 8 bytes a head, 2 heads, 8 blocks a plane, behind a header of 64 bytes
    assert side.bases == tuple(Base(0, 64 + i * 8 * 256 + 128) for i in range(4))
    assert side.tile.num_heads == 1
    assert side.tile.block_tokens == 16


@pytest.mark.parametrize(
    ("source", "sink"),
    [
        (EngineShape(), EngineShape(layout="NHD", block_tokens=8)),
        (EngineShape(outermost="inner"), EngineShape(outermost="inner", layout="NHD")),
        (EngineShape(tp_size=2, groups=(1, 0)), EngineShape(groups=(0, 1))),
        (EngineShape(is_mla=True, tp_size=2), EngineShape(is_mla=True, padding_nbytes=1)),
        (EngineShape(turned=("k",)), EngineShape()),
        (EngineShape(), EngineShape(turned=("k",), outermost="inner", block_tokens=8)),
        (EngineShape(turned=("k",)), EngineShape(turned=("k", "v"))),
    ],
)
def test_source_sees_the_sides_that_the_sink_planned(
    source: EngineShape, sink: EngineShape
) -> None:
    manifest = build_manifest(source)
    for route in make_plan(manifest, build_manifest(sink)).routes:
        asked = pull_classes(route, {0: (0, 40), 1: (3, 40)})
        sides = PullResolver(manifest.rank(route.source_rank)).resolve(asked)
        assert sides == tuple(copy_class.source for copy_class in route.classes)


KV = RegionName("layers.0", ("k", "v"))
HUGE = 1 << 63
NONSENSE: list[tuple[RankManifest, PullClass, str]] = [
    (SOURCE, wanted(regions=()), "class 0: expected at least one region, got none"),
    (
        SOURCE,
        wanted(regions=(RegionName("layers.9", ("k",)),)),
        "no region layers.9/k on this rank",
    ),
    (SOURCE, wanted(regions=(RegionName("layers.0", ("q",)),)), "no region layers.0/q"),
    (SOURCE, wanted(regions=(RegionName("layers.0", ()),)), "expected at least one plane"),
    (SOURCE, wanted(regions=wanted().regions * 2), "layers.0/k: expected once, got it again"),
    (SOURCE, wanted(regions=(RegionName("layers.0", ("k", "k")),)), "expected once"),
    (SOURCE, wanted(regions=(KV,), inner_nbytes=16), "expected planes that lie side by side"),
    (
        PACKED,
        wanted(regions=(RegionName("layers.0", ("v", "k")),), inner_nbytes=16),
        "expected planes that lie side by side",
    ),
    (PACKED, wanted(regions=(KV,)), "layers.0/k+v: inner_nbytes: expected 16, got 8"),
    (SOURCE, wanted(inner_nbytes=16), "layers.0/k: inner_nbytes: expected 8, got 16"),
    (SOURCE, wanted(inner_nbytes=0), "inner_nbytes: expected 1 or more, got 0"),
    (SOURCE, wanted(head_hi=3), "heads: expected within [0, 2), got [0, 3)"),
    (SOURCE, wanted(head_lo=-1), "heads: expected 0 <= lo < hi, got [-1, 2)"),
    (SOURCE, wanted(head_lo=2), "heads: expected 0 <= lo < hi, got [2, 2)"),
    (SOURCE, wanted(head_hi=HUGE), "kernel_tokens: expected 1 or more, of at most"),
    (SOURCE, wanted(token_lo=-1), "tokens: expected 0 <= lo <= hi"),
    (SOURCE, wanted(token_lo=41), "tokens: expected 0 <= lo <= hi"),
    (SOURCE, wanted(token_hi=HUGE), "tokens: expected 0 <= lo <= hi <= 2147483648"),
    (SOURCE, wanted(token_hi=129), "tokens: expected at most the pool's 128, got 129"),
    (SOURCE, wanted(order=DenseOrder(0, token_major=True)), "kernel_tokens: expected 1 or more"),
    (SOURCE, wanted(order=DenseOrder(HUGE, token_major=True)), "kernel_tokens: expected 1 or more"),
    (
        GROUPED,
        wanted(),
        "expected regions of one geometry and group, got layers.0 and layers.1",
    ),
    (OPAQUE, wanted(token_hi=32, head_hi=1), "opaque blocks move whole: expected all heads"),
    (
        OPAQUE,
        wanted(order=DenseOrder(16, token_major=True)),
        "opaque blocks move whole: expected multiples of 16 tokens, got [0, 40)",
    ),
    (OPAQUE, wanted(token_hi=32), "expected kernel blocks of 16 tokens, got 8"),
    (
        OPAQUE,
        wanted(token_hi=32, order=DenseOrder(16, False, 4)),
        "layers.0/k: opaque blocks move whole: expected no channels, got some of 4 bytes",
    ),
    *(
        (
            SOURCE,
            wanted(order=DenseOrder(8, False, nbytes)),
            "channel_nbytes: expected 0 or a divisor of the 8 inner bytes below them",
        )
        for nbytes in (-1, 3, 8, 16, HUGE)
    ),
    (SOURCE, wanted(order=DenseOrder(8, True, 4)), "token_major: expected false for channels of 4"),
    (
        SOURCE,
        wanted(order=DenseOrder(1 << 19, False, 1)),
        "channel_nbytes: expected at most 4194304 channels in a kernel block, got 8388608 of 1",
    ),
    (
        TURNED,
        wanted(order=DenseOrder(8, False, 2)),
        "layers.0/k: channel_nbytes: expected 4, got 2",
    ),
]


@pytest.mark.parametrize(("rank", "asked", "message"), NONSENSE)
def test_nonsense_is_refused_by_name(rank: RankManifest, asked: PullClass, message: str) -> None:
    with pytest.raises(ProtocolError) as e:
        PullResolver(rank).resolve((asked,))
    assert message in str(e.value)
    assert str(e.value).startswith("class 0: ")


def test_second_class_is_looked_at_too() -> None:
    first = wanted(regions=wanted().regions[:2])
    with pytest.raises(ProtocolError, match="class 1: layers.0/v: expected once, got it again"):
        PullResolver(SOURCE).resolve((first, wanted(regions=wanted().regions[1:])))
    assert len(PullResolver(SOURCE).resolve((first, wanted(regions=wanted().regions[2:])))) == 2


integers = st.one_of(st.integers(-2, 50), st.integers(-(1 << 63), (1 << 64) - 1))


@given(
    numbers=st.fixed_dictionaries(
        {},
        optional={
            "head_lo": integers,
            "head_hi": integers,
            "inner_nbytes": integers,
            "token_lo": integers,
            "token_hi": integers,
            "order": st.builds(
                DenseOrder, integers, st.booleans(), st.sampled_from((0, 1, 2, 4)) | integers
            ),
        },
    ),
    chunk_nbytes=integers,
    rank=st.sampled_from((SOURCE, TURNED)),
)
def test_hostile_numbers_end_soon_in_one_error(
    numbers: dict[str, object], chunk_nbytes: int, rank: RankManifest
) -> None:
    asked = wanted(**numbers)
    try:
        (side,) = PullResolver(rank).resolve((asked,))
        chunks = chunk_list((asked,), chunk_nbytes)
    except ProtocolError:
        return
    assert len(chunks) <= 4 * 128
    assert sum(chunk.nbytes for chunk in chunks) <= SOURCE.memories[0].nbytes
    assert all(base.offset < SOURCE.memories[0].nbytes for base in side.bases)


# ---------------------------------------------------------------- chunk_list


def pieces(asked: PullClass, chunk_nbytes: int) -> list[tuple[int, int, int, int, int]]:
    return [
        (c.region_lo, c.region_hi, c.token_lo, c.token_hi, c.nbytes)
        for c in chunk_list((asked,), chunk_nbytes)
    ]


def test_all_in_one_chunk() -> None:
    assert pieces(wanted(), 1 << 20) == [(0, 4, 0, 40, 4 * 40 * 16)]


def test_cut_at_multiples_of_the_sinks_kernel_block() -> None:
    # 16 bytes a token: 17 tokens fit 272 bytes, 16 of them are whole blocks of 8
    assert pieces(wanted(token_lo=3, token_hi=37), 272) == [
        *((r, r + 1, 3, 16, 208) for r in range(4)),
        *((r, r + 1, 16, 32, 256) for r in range(4)),
        (0, 3, 32, 37, 240),
        (3, 4, 32, 37, 80),
    ]


def test_at_least_one_kernel_block() -> None:
    assert pieces(wanted(token_lo=4, token_hi=16), 1)[:2] == [(0, 1, 4, 8, 64), (1, 2, 4, 8, 64)]
    assert len(pieces(wanted(token_lo=4, token_hi=16), 1)) == 8


def test_at_most_512_tokens_of_some_of_the_regions() -> None:
    # 16 bytes a token: 300 tokens of all four regions, or 512 of two
    asked = wanted(token_hi=1200)
    assert pieces(asked, 300 * 4 * 16) == [
        (0, 2, 0, 512, 2 * 512 * 16),
        (2, 4, 0, 512, 2 * 512 * 16),
        (0, 2, 512, 1024, 2 * 512 * 16),
        (2, 4, 512, 1024, 2 * 512 * 16),
        (0, 4, 1024, 1200, 4 * 176 * 16),
    ]


def test_of_all_regions_as_many_tokens_as_fit() -> None:
    # 606 tokens of all four regions: 600 are whole blocks of 8
    asked = wanted(token_lo=590, token_hi=1900)
    assert pieces(asked, 606 * 4 * 16) == [
        (0, 4, 590, 600, 4 * 10 * 16),
        (0, 4, 600, 1200, 4 * 600 * 16),
        (0, 4, 1200, 1800, 4 * 600 * 16),
        (0, 4, 1800, 1900, 4 * 100 * 16),
    ]
    assert pieces(wanted(token_hi=100_000), 64 << 20) == [(0, 4, 0, 100_000, 4 * 100_000 * 16)]
    wide = wanted(token_hi=1200, order=DenseOrder(1024, token_major=True))
    assert [piece[2:4] for piece in pieces(wide, 1)[::4]] == [(0, 1024), (1024, 1200)]


def test_chunks_of_one_head_are_as_large_as_others() -> None:
    """8192 tokens of 80 layers, one head a rank: 320 MiB, which were 16 chunks of 20."""
    names = tuple(RegionName(f"layers.{i}", (plane,)) for i in range(80) for plane in "kv")
    asked = wanted(regions=names, head_hi=1, inner_nbytes=256, token_hi=8192)
    sizes = [chunk.nbytes for chunk in chunk_list((asked,), 64 << 20)]
    assert len(sizes) == 6
    assert min(sizes[:-1]) > 63 << 20


def test_as_many_regions_as_fit() -> None:
    assert [piece[:2] for piece in pieces(wanted(), 3 * 640)] == [(0, 3), (3, 4)]


def test_sequences_count_through_all_classes() -> None:
    chunks = chunk_list((wanted(), wanted(token_lo=40), wanted(token_hi=8)), 640)
    assert [c.sequence for c in chunks] == list(range(len(chunks)))
    assert [c.class_index for c in chunks] == [0] * 4 + [2]


@pytest.mark.parametrize("chunk_nbytes", [0, -1, (64 << 20) + 1])
def test_chunk_size_is_bounded(chunk_nbytes: int) -> None:
    with pytest.raises(ProtocolError, match="chunk_nbytes: expected 1 to 67108864"):
        chunk_list((wanted(),), chunk_nbytes)


def test_number_of_chunks_is_bounded() -> None:
    asked = wanted(token_hi=1 << 31, order=DenseOrder(1, token_major=True))
    start = time.thread_time()
    with pytest.raises(ProtocolError, match="class 0: expected at most 65536 chunks"):
        chunk_list((asked,), 1)
    assert time.thread_time() - start < 1
    # 16 bytes a token: 256 fit, so 4 regions of 4 Mi tokens are 65536 chunks
    asked = wanted(token_hi=4 << 20)
    assert num_chunks((asked,), 4096) == 65536
    one_more = (asked, wanted(token_hi=1))
    with pytest.raises(ProtocolError, match="class 1: expected at most 65536 chunks, got 65537 of"):
        num_chunks(one_more, 4096)


@pytest.mark.parametrize("chunk_nbytes", [-1, 0, 1, 4095, 4096, 1 << 63])
@pytest.mark.parametrize("num_classes", [1, 64])
def test_a_hostile_pull_is_refused_at_once(chunk_nbytes: int, num_classes: int) -> None:
    """32 regions of 1 Mi tokens, in chunks of one token each: 2^25 a class."""
    names = tuple(RegionName(f"layers.{i}", ("k",)) for i in range(32))
    order = DenseOrder(1, token_major=True)
    asked = (wanted(regions=names, order=order, inner_nbytes=2048, token_hi=1 << 20),) * num_classes
    start = time.thread_time()
    with pytest.raises(ProtocolError, match=r"chunk_nbytes: expected 4096|at most 65536 chunks"):
        check_chunks(asked, chunk_nbytes)
    assert time.thread_time() - start < 1


def test_a_peer_asks_for_4_kib_or_more() -> None:
    assert check_chunks((wanted(),), 4096) == 1
    assert check_chunks((wanted(token_hi=0),), 4096) == 0
    with pytest.raises(ProtocolError, match="chunk_nbytes: expected 4096 to 67108864 of a peer"):
        check_chunks((wanted(),), 4095)


@given(
    token_lo=st.integers(0, 60),
    num_tokens=st.integers(0, 60),
    kernel_tokens=st.integers(1, 20),
    token_major=st.booleans(),
    chunk_nbytes=st.integers(1, 3000),
    part_tokens=st.sampled_from((1, 7, 512)),
)
def test_every_slice_travels_once(
    token_lo: int,
    num_tokens: int,
    kernel_tokens: int,
    token_major: bool,
    chunk_nbytes: int,
    part_tokens: int,
) -> None:
    asked = wanted(
        token_lo=token_lo,
        token_hi=token_lo + num_tokens,
        order=DenseOrder(kernel_tokens, token_major),
    )
    slices = []
    chunks = chunk_list((asked,), chunk_nbytes, part_tokens)
    assert num_chunks((asked, asked), chunk_nbytes, part_tokens) == 2 * len(chunks)
    for chunk in chunks:
        order = dense_order(asked, chunk)
        assert chunk.nbytes == len(order) * 8 > 0
        assert chunk.nbytes <= max(chunk_nbytes, kernel_tokens * 16)
        assert chunk.token_hi == asked.token_hi or chunk.token_hi % kernel_tokens == 0
        is_short = chunk.token_hi - chunk.token_lo <= max(part_tokens, kernel_tokens)
        assert is_short or (chunk.region_lo, chunk.region_hi) == (0, 4)
        slices += order
    assert sorted(slices) == [
        (region, token, head, -1)
        for region in range(4)
        for token in range(token_lo, token_lo + num_tokens)
        for head in range(2)
    ]
    assert sum(chunk.nbytes for chunk in chunks) == route_nbytes((asked,))


def test_chunks_are_cheap() -> None:
    """8192 tokens of 128 planes, 2 KiB a token: 2 GiB in chunks of 1 MiB."""
    names = tuple(RegionName(f"layers.{i}", (plane,)) for i in range(64) for plane in "kv")
    asked = wanted(regions=names, head_hi=8, inner_nbytes=256, token_hi=8192)
    start = time.thread_time()
    assert len(chunk_list((asked,), 1 << 20)) == 2048
    assert time.thread_time() - start < 1


# ---------------------------------------------------------------- check_ids


SIDE: Side = PullResolver(SOURCE).resolve((wanted(),))[0]  # 8 blocks of 16 tokens


@pytest.mark.parametrize(
    ("block_ids", "token_lo", "token_hi"),
    [
        ((0, 7, 3), 0, 48),
        ((0, 7, 3), 0, 33),
        ((-1, 7, 3), 16, 48),
        ((-1, 99, 3), 47, 48),
        ((), 5, 5),
        ((4, -1), 0, 16),
    ],
)
def test_ids_that_suffice(block_ids: tuple[int, ...], token_lo: int, token_hi: int) -> None:
    check_ids(SIDE, block_ids, token_lo, token_hi)


@pytest.mark.parametrize(
    ("block_ids", "token_lo", "token_hi", "message"),
    [
        ((0, 8, 3), 0, 48, "group 0: position 1: expected 0 to 7, got 8"),
        ((0, 1, -1), 0, 33, "position 2: expected 0 to 7, got -1"),
        ((-1, 1), 15, 17, "position 0: expected 0 to 7, got -1"),
        ((0, 1), 0, 33, "expected at least 3 for 33 tokens in blocks of 16, got 2"),
        ((0, 1), 17, 16, r"span: expected 0 <= lo <= hi, got \[17, 16\)"),
        ((0, 1), -1, 16, "span"),
    ],
)
def test_ids_that_do_not(
    block_ids: tuple[int, ...], token_lo: int, token_hi: int, message: str
) -> None:
    with pytest.raises(BlockIdsError, match=message):
        check_ids(SIDE, block_ids, token_lo, token_hi)


def test_bad_ids_are_both_kinds_of_error() -> None:
    """From a Grant they break the protocol, from a scheduler they are a wrong argument."""
    assert issubclass(BlockIdsError, ProtocolError)
    assert issubclass(BlockIdsError, ValueError)


# ---------------------------------------------------------------- PullResolver


def test_what_was_found_serves_other_tokens_and_nothing_else() -> None:
    """The same object, whatever was asked before it, says what a fresh one says."""
    resolver = PullResolver(SOURCE)
    first = resolver.resolve((wanted(),))
    assert resolver.resolve((wanted(token_lo=3, token_hi=9),))[0] is first[0]
    assert resolver.resolve((wanted(head_lo=1),)) == PullResolver(SOURCE).resolve(
        (wanted(head_lo=1),)
    )
    half = wanted(regions=wanted().regions[:2])
    assert resolver.resolve((half,)) == PullResolver(SOURCE).resolve((half,))
    assert resolver.resolve((wanted(),)) == first


@pytest.mark.parametrize(("rank", "asked", "message"), NONSENSE)
def test_nonsense_is_refused_by_a_resolver_that_knows_better(
    rank: RankManifest, asked: PullClass, message: str
) -> None:
    resolver = PullResolver(rank)
    block = rank.regions[0].block_tokens
    for good in (
        wanted(),
        replace(asked, token_lo=0, token_hi=block),
        replace(asked, token_lo=block, token_hi=block),
    ):
        with contextlib.suppress(ProtocolError):
            resolver.resolve((good,))
    for _ in range(2):
        with pytest.raises(ProtocolError) as e:
            resolver.resolve((asked,))
        assert message in str(e.value)


# ---------------------------------------------------------------- cells that tokens share


def test_a_shared_cell_is_asked_for_and_opens_with_its_last_token() -> None:
    shared = EngineShape(cell_tokens=4)
    route = route_of(shared, EngineShape(cell_tokens=4, block_tokens=24))
    (asked,) = pull_classes(route, {0: (6, 43)})
    assert (asked.token_lo, asked.token_hi, asked.token(9)) == (1, 10, 39)
    assert [open_to(asked, n) for n in (0, 7, 8, 39, 40, 43, ALL)] == [1, 1, 2, 9, 10, 10, 10]
    assert {c.opens_at - 4 * c.token_hi for c in chunk_list((asked,), 64)} == {0}
    resolver = PullResolver(build_manifest(shared).ranks[0])
    assert resolver.resolve((asked,))[0].keeping.block_tokens == 16
    for other in (UNSET, 8):
        with pytest.raises(ProtocolError, match="cell_tokens: expected 4 tokens to share a cell"):
            resolver.resolve((replace(asked, cell_tokens=other),))
    with pytest.raises(ProtocolError, match="tokens: expected at most the pool's 32, got 33"):
        resolver.resolve((replace(asked, token_lo=0, token_hi=33),))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"cell_tokens": 1}, "cell_tokens: expected 2 or more that divide the 16 tokens"),
        ({"cell_tokens": 3}, "cell_tokens: expected 2 or more that divide the 16 tokens"),
        ({"cell_tokens": 16, "kernel_blocks": 2}, "that divide the 8 tokens of a kernel block"),
        ({"interior": Interior.OPAQUE}, "cell_tokens: expected none of a state or an interior"),
        ({"cell_tokens": UNSET}, "expected at least the 128 bytes it steps over, got 32"),
    ],
)
def test_shared_cells_are_checked(changes: dict[str, Any], says: str) -> None:
    """An engine that does not know the field finds blocks that lie over each other (the last)."""
    region = build_manifest(EngineShape(cell_tokens=4)).ranks[0].regions[0]
    with pytest.raises(ValueError, match=says):
        check_region(replace(region, **changes), 1 << 30)
