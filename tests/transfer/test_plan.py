"""Every wanted byte comes from exactly one place, over the whole grid and by hand."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace as replace_shape

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvxfer.errors import IncompatiblePeer
from kvxfer.transfer.layout import Interior
from kvxfer.transfer.manifest import RankId
from kvxfer.transfer.plan import Base, Plan, RegionName, Route, make_plan
from kvxfer.transfer.topology import TpKVTopology
from kvxfer.transfer.windows import Keeping
from tests.builders import EngineShape, LayoutName, Outermost, build_manifest
from tests.transfer.naive import Case, same

TP_SIZES = (1, 2, 3, 4, 6, 8)
HEADS = (1, 2, 4, 6, 8)


def plan_of(source: EngineShape, sink: EngineShape) -> Plan:
    return make_plan(build_manifest(source, "source"), build_manifest(sink, "sink"))


def giving(plan: Plan) -> list[tuple[int, int]]:
    """(source tp, sink tp) of every route that moves bytes."""
    return [(r.source_rank.tp, r.sink_rank.tp) for r in plan.routes if not r.is_null]


def heads_by_source(route: Route) -> set[tuple[int, int, int]]:
    return {(route.source_rank.tp, c.head_lo, c.head_hi) for c in route.classes}


def splits(tp_size: int, num_kv_heads: int) -> bool:
    return num_kv_heads % tp_size == 0 or tp_size % num_kv_heads == 0


def covered(plan: Plan) -> Counter[tuple[RankId, str, str, int]]:
    return Counter(
        (route.sink_rank, name.layer, plane, head)
        for route in plan.routes
        for copy_class in route.classes
        for name in copy_class.names
        for plane in name.planes
        for head in range(copy_class.head_lo, copy_class.head_hi)
    )


# ---------------------------------------------------------------- the whole grid


@st.composite
def shapes(
    draw: st.DrawFn,
    tp_sizes: tuple[int, ...],
    num_kv_heads: int,
    num_layers: int,
    is_mla: bool,
    planes: Outermost | None,
    cell_tokens: int,
) -> EngineShape:
    kernel_blocks = draw(st.sampled_from((1, 2, 4)))
    return EngineShape(
        tp_size=draw(st.sampled_from([tp for tp in tp_sizes if splits(tp, num_kv_heads)])),
        pp_size=draw(st.integers(1, num_layers)),
        num_kv_heads=num_kv_heads,
        is_mla=is_mla,
        num_layers=num_layers,
        block_tokens=kernel_blocks * cell_tokens * draw(st.sampled_from((1, 3, 4, 6, 8))),
        kernel_blocks=kernel_blocks,
        num_blocks=45,
        inner_nbytes=2,
        layout=draw(st.sampled_from(("HND", "NHD"))),
        outermost=draw(st.sampled_from(("planes", "blocks", "inner")))
        if planes is None
        else planes,
        padding_nbytes=draw(st.sampled_from((0, 3))),
        turned=() if is_mla else draw(st.sampled_from(((), ("k",), ("k", "v")))),
        channel_nbytes=1,
        groups=draw(st.sampled_from(((), tuple(range(num_layers))[::-1]))),
        cell_tokens=cell_tokens,
    )


@st.composite
def cases(draw: st.DrawFn, source_tp: int) -> tuple[EngineShape, EngineShape]:
    is_mla = draw(st.integers(0, 3)) == 3
    split = [heads for heads in HEADS if splits(source_tp, heads)]
    num_kv_heads = 1 if is_mla else draw(st.sampled_from(split))
    num_layers = draw(st.integers(1, 3))
    planes: Outermost | None = "inner" if draw(st.booleans()) else None
    cell_tokens = draw(st.sampled_from((1, 1, 2, 5)))
    alike = (num_kv_heads, num_layers, is_mla, planes, cell_tokens)
    return draw(shapes((source_tp,), *alike)), draw(shapes(TP_SIZES, *alike))


@pytest.mark.parametrize("source_tp", TP_SIZES)
@given(data=st.data(), num_tokens=st.integers(1, 45))
def test_planned_copies_are_the_oracles(
    source_tp: int, data: st.DataObject, num_tokens: int
) -> None:
    sides = data.draw(cases(source_tp))
    case = Case(*sides, num_tokens)
    plan = make_plan(case.source, case.sink)
    spans: dict[int, tuple[int, int]] = {}
    for group in range(sides[1].num_groups):
        lo = data.draw(st.integers(0, num_tokens))
        spans[group] = (lo, data.draw(st.integers(lo, num_tokens)))
    expected = case.expected(spans)
    assert same(case.copied(plan, spans), expected)
    assert same(case.streamed(plan, spans, data.draw(st.integers(1, 400))), expected)


@pytest.mark.parametrize("source_tp", TP_SIZES)
@given(data=st.data())
def test_every_head_once_and_every_source_rank_heard(source_tp: int, data: st.DataObject) -> None:
    sides = data.draw(cases(source_tp))
    source, sink = build_manifest(sides[0]), build_manifest(sides[1])
    plan = make_plan(source, sink)
    assert covered(plan) == {
        (entry.rank, region.layer, region.plane, head): 1
        for entry in sink.ranks
        for region in entry.regions
        for head in range(region.head_lo, region.head_hi)
    }
    for entry in source.ranks:
        routes = [route for route in plan.routes if route.source_rank == entry.rank]
        assert routes, f"{entry.rank} is told nothing"
        assert len(routes) == 1 or not any(route.is_null for route in routes)
        assert plan.consumers(entry.rank) == tuple(sorted({r.sink_rank for r in routes}))
    assert len({(r.source_rank, r.sink_rank) for r in plan.routes}) == len(plan.routes)
    for route in plan.routes:
        for copy_class in route.classes:
            assert len(copy_class.names) == len(copy_class.source.bases)
            assert len(copy_class.names) == len(copy_class.sink.bases)


@pytest.mark.parametrize("is_mla", [False, True])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
def test_ranks_are_among_the_targets_of_the_topology(num_kv_heads: int, is_mla: bool) -> None:
    """On the dividing grid; the ranks cover every head once."""
    for source_tp in (1, 2, 4, 8, 16):
        for sink_tp in (1, 2, 4, 8, 16):
            shape = EngineShape(tp_size=source_tp, num_kv_heads=num_kv_heads, is_mla=is_mla)
            other = EngineShape(tp_size=sink_tp, num_kv_heads=num_kv_heads, is_mla=is_mla)
            plan = plan_of(shape, other)
            for tp_rank in range(sink_tp):
                topology = TpKVTopology(
                    tp_rank=tp_rank,
                    remote_tp_size={"sink": sink_tp, "source": source_tp},
                    is_mla=is_mla,
                    total_num_kv_heads=num_kv_heads,
                    attn_backend=None,
                    engine_id="sink",
                    remote_block_size={"sink": 16, "source": 16},
                )
                targets = topology.get_target_remote_ranks_from_engine_id("source")
                # Null routes keep to them too: each side speaks to no other rank.
                ranks = {route.source_rank.tp for route in plan.of_sink(RankId(0, tp_rank))}
                assert ranks <= set(targets)
                heads = [
                    head
                    for route in plan.of_sink(RankId(0, tp_rank))
                    for _, lo, hi in heads_by_source(route)
                    for head in range(lo, hi)
                ]
                assert sorted(heads) == list(range(*other.heads_of(tp_rank)))


# ---------------------------------------------------------------- by hand


def test_equal_engines_move_rank_to_rank() -> None:
    plan = plan_of(EngineShape(tp_size=2), EngineShape(tp_size=2))
    assert giving(plan) == [(0, 0), (1, 1)]
    assert not any(route.is_null for route in plan.routes)


def test_three_ranks_to_two() -> None:
    plan = plan_of(EngineShape(tp_size=3, num_kv_heads=6), EngineShape(tp_size=2, num_kv_heads=6))
    first, second = (plan.of_sink(RankId(0, tp)) for tp in range(2))
    assert set().union(*map(heads_by_source, first)) == {(0, 0, 2), (1, 2, 3)}
    assert set().union(*map(heads_by_source, second)) == {(1, 3, 4), (2, 4, 6)}


def test_six_ranks_to_four() -> None:
    plan = plan_of(EngineShape(tp_size=6, num_kv_heads=12), EngineShape(tp_size=4, num_kv_heads=12))
    found = [set().union(*map(heads_by_source, plan.of_sink(RankId(0, t)))) for t in range(4)]
    assert found == [
        {(0, 0, 2), (1, 2, 3)},
        {(1, 3, 4), (2, 4, 6)},
        {(3, 6, 8), (4, 8, 9)},
        {(4, 9, 10), (5, 10, 12)},
    ]


@pytest.mark.parametrize(
    ("source_tp", "sink_tp", "pairs"),
    [
        (8, 1, [(0, 0), (4, 0)]),
        (8, 2, [(0, 0), (4, 1)]),
        (8, 4, [(0, 0), (2, 1), (4, 2), (6, 3)]),
        (8, 8, [(tp, tp) for tp in range(8)]),
        (4, 8, [(0, 0), (0, 1), (1, 2), (1, 3), (2, 4), (2, 5), (3, 6), (3, 7)]),
        (2, 8, [(0, 0), (0, 1), (0, 2), (0, 3), (1, 4), (1, 5), (1, 6), (1, 7)]),
    ],
)
def test_replicas_of_two_heads_share_the_load(
    source_tp: int, sink_tp: int, pairs: list[tuple[int, int]]
) -> None:
    plan = plan_of(EngineShape(tp_size=source_tp), EngineShape(tp_size=sink_tp))
    assert giving(plan) == pairs


@pytest.mark.parametrize("source_tp", [1, 2, 4, 8])
@pytest.mark.parametrize("sink_tp", [1, 2, 4, 8])
def test_latent_replicas_share_the_load(source_tp: int, sink_tp: int) -> None:
    plan = plan_of(
        EngineShape(tp_size=source_tp, is_mla=True), EngineShape(tp_size=sink_tp, is_mla=True)
    )
    assert giving(plan) == [(tp * source_tp // sink_tp, tp) for tp in range(sink_tp)]
    load = Counter(source for source, _ in giving(plan))
    assert max(load.values()) == max(1, sink_tp // source_tp)


def test_ranks_that_give_nothing_get_a_null_route() -> None:
    plan = plan_of(EngineShape(tp_size=8), EngineShape(tp_size=2))
    nulls = [(r.source_rank.tp, r.sink_rank.tp) for r in plan.routes if r.is_null]
    assert nulls == [(1, 0), (2, 0), (3, 0), (5, 1), (6, 1), (7, 1)]
    assert plan.consumers(RankId(0, 0)) == (RankId(0, 0),)
    assert plan.consumers(RankId(0, 7)) == (RankId(0, 1),)


def test_consumers_are_all_that_read() -> None:
    plan = plan_of(EngineShape(num_kv_heads=4), EngineShape(tp_size=4, num_kv_heads=4))
    assert plan.consumers(RankId(0, 0)) == tuple(RankId(0, tp) for tp in range(4))


def test_layers_spread_over_stages_on_both_sides() -> None:
    plan = plan_of(EngineShape(pp_size=3, num_layers=6), EngineShape(pp_size=2, num_layers=6))
    assert [(r.source_rank.pp, r.sink_rank.pp) for r in plan.routes] == [
        *((0, 0), (1, 0), (1, 1), (2, 1))
    ]
    layers = [sorted({n.layer for c in r.classes for n in c.names}) for r in plan.routes]
    assert layers == [
        ["layers.0", "layers.1"],
        ["layers.2"],
        ["layers.3"],
        ["layers.4", "layers.5"],
    ]


def test_regions_are_matched_by_name_whatever_the_group() -> None:
    plan = plan_of(
        EngineShape(num_layers=3, groups=(0, 1, 0)), EngineShape(num_layers=3, groups=(1, 0, 1))
    )
    (route,) = plan.routes
    found = [(c.source.group, c.sink.group, {n.layer for n in c.names}) for c in route.classes]
    assert found == [(0, 1, {"layers.0", "layers.2"}), (1, 0, {"layers.1"})]


def test_one_class_for_all_layers_and_planes_alike() -> None:
    (route,) = plan_of(EngineShape(), EngineShape(block_tokens=8, layout="NHD")).routes
    (only,) = route.classes
    assert only.names == (
        RegionName("layers.0", ("k",)),
        RegionName("layers.0", ("v",)),
        RegionName("layers.1", ("k",)),
        RegionName("layers.1", ("v",)),
    )
    # HND 16 x 2 heads x 8 bytes, 8 blocks a plane, behind a header of 64 bytes
    assert only.source.bases == tuple(Base(0, 64 + i * 8 * 256) for i in range(4))
    assert only.source.tile.stride_head == 128
    assert only.sink.tile.stride_head == 8


def test_wanted_heads_begin_at_their_own_byte() -> None:
    plan = plan_of(EngineShape(num_kv_heads=4), EngineShape(tp_size=2, num_kv_heads=4))
    (copy_class,) = plan.of_sink(RankId(0, 1))[0].classes
    assert (copy_class.head_lo, copy_class.head_hi) == (2, 4)
    assert copy_class.source.bases[0] == Base(0, 64 + 2 * 128)
    assert copy_class.sink.bases[0] == Base(0, 64)
    assert copy_class.source.tile.num_heads == 2


@pytest.mark.parametrize("layouts", [("HND", "HND"), ("HND", "NHD"), ("NHD", "NHD")])
def test_planes_side_by_side_on_both_sides_move_as_one(
    layouts: tuple[LayoutName, LayoutName],
) -> None:
    sides = [EngineShape(layout=layout, outermost="inner") for layout in layouts]
    (route,) = plan_of(*sides).routes
    (only,) = route.classes
    assert only.names == tuple(RegionName(f"layers.{i}", ("k", "v")) for i in range(2))
    assert only.source.tile.inner_nbytes == 16
    assert only.sink.tile.inner_nbytes == 16


def test_planes_side_by_side_on_one_side_stay_two() -> None:
    (route,) = plan_of(EngineShape(outermost="inner"), EngineShape()).routes
    assert {name.planes for c in route.classes for name in c.names} == {("k",), ("v",)}


def test_planes_of_other_heads_are_not_joined() -> None:
    """Another rank gives one head of K but none of V: the rest of K is not as wide as V."""
    source = build_manifest(EngineShape(tp_size=2, outermost="inner"))
    whole = build_manifest(EngineShape(outermost="inner"))
    first, second = source.ranks
    first = replace(first, regions=tuple(r for r in first.regions if r.plane == "k"))
    second = replace(second, regions=whole.ranks[0].regions)
    plan = make_plan(replace(source, ranks=(first, second)), whole)
    assert set(covered(plan).values()) == {1}
    given = [
        (route.source_rank.tp, name.planes, c.head_lo, c.head_hi)
        for route in plan.routes
        for c in route.classes
        for name in c.names
        if name.layer == "layers.0"
    ]
    assert given == [(0, ("k",), 0, 1), (1, ("k",), 1, 2), (1, ("v",), 0, 2)]


def test_layers_that_share_memory_move_once() -> None:
    shared = EngineShape(num_layers=3, shares=((2, 0),))
    plain = EngineShape(num_layers=3)
    (route,) = plan_of(plain, shared).routes
    assert {n.layer for c in route.classes for n in c.names} == {"layers.0", "layers.1"}
    (route,) = plan_of(shared, plain).routes
    assert {n.layer for c in route.classes for n in c.names} == {f"layers.{i}" for i in range(3)}
    # In two groups the same bytes are two blocks of a request.
    (route,) = plan_of(
        EngineShape(num_layers=3), EngineShape(num_layers=3, shares=((2, 0),), groups=(0, 0, 1))
    ).routes
    assert sum(len(c.names) for c in route.classes) == 6


def test_shared_layer_is_taken_under_the_name_that_the_source_has() -> None:
    source = build_manifest(EngineShape(num_layers=3))
    sink = build_manifest(EngineShape(num_layers=3, shares=((2, 0),)))
    entry = source.ranks[0]
    without = tuple(region for region in entry.regions if region.layer != "layers.0")
    plan = make_plan(replace(source, ranks=(replace(entry, regions=without),)), sink)
    layers = {n.layer for c in plan.routes[0].classes for n in c.names}
    assert layers == {"layers.1", "layers.2"}


# ---------------------------------------------------------------- refused by name


def test_missing_layers_planes_and_heads_are_named() -> None:
    source = build_manifest(EngineShape(num_layers=1), "p")
    with pytest.raises(IncompatiblePeer) as e:
        make_plan(source, build_manifest(EngineShape(num_layers=2), "d"))
    assert str(e.value) == (
        "plan from engine p to d: layers.1/k heads [0, 2): no source rank holds it; "
        "layers.1/v heads [0, 2): no source rank holds it"
    )
    with pytest.raises(IncompatiblePeer, match=r"layers.0/latent heads \[0, 1\)"):
        make_plan(source, build_manifest(EngineShape(num_layers=1, is_mla=True)))
    with pytest.raises(IncompatiblePeer, match=r"layers.0/k heads \[2, 4\): no source rank"):
        make_plan(source, build_manifest(EngineShape(num_layers=1, num_kv_heads=4)))


def test_a_gap_between_heads_is_named() -> None:
    source = build_manifest(EngineShape(tp_size=4, num_kv_heads=4, num_layers=1))
    holed = replace(source, ranks=(source.ranks[0], source.ranks[3]))
    with pytest.raises(IncompatiblePeer, match=r"layers.0/k heads \[1, 3\)") as e:
        make_plan(holed, build_manifest(EngineShape(num_kv_heads=4, num_layers=1)))
    assert "[3, 4)" not in str(e.value)


def test_a_long_list_is_cut() -> None:
    with pytest.raises(IncompatiblePeer, match="; and 118 more") as e:
        plan_of(EngineShape(num_layers=1), EngineShape(num_layers=64))
    assert len(str(e.value)) < 1000


def test_inner_sizes_must_be_equal() -> None:
    with pytest.raises(IncompatiblePeer, match="source has 8 bytes a head and token, sink 16"):
        plan_of(EngineShape(), EngineShape(inner_nbytes=16))


TURNED = EngineShape(turned=("k",), channel_nbytes=4)


@pytest.mark.parametrize("sides", [(TURNED, EngineShape()), (EngineShape(), TURNED)])
def test_both_sides_are_described_by_channel(sides: tuple[EngineShape, EngineShape]) -> None:
    (route,) = plan_of(*sides).routes
    by_plane = {c.names[0].planes: c for c in route.classes}
    assert set(by_plane) == {("k",), ("v",)}
    by_channel = by_plane["k",]
    tiles = (by_channel.source.tile, by_channel.sink.tile)
    # 2 channels of 4 bytes; [head][channel][token] of 16 tokens on one side
    assert [tile.channel_nbytes for tile in tiles] == [4, 4]
    assert sorted(tile.stride_channel for tile in tiles) == [4, 64]
    assert sorted(tile.stride_token for tile in tiles) == [4, 8]
    assert by_channel.sink.tile.has_channels_apart == (sides[1] is TURNED)
    plain = by_plane["v",]
    assert [s.tile.channel_nbytes for s in (plain.source, plain.sink)] == [0, 0]


def test_one_token_or_one_channel_is_not_apart() -> None:
    (route,) = plan_of(replace_shape(TURNED, block_tokens=1), EngineShape()).routes
    assert {c.sink.tile.channel_nbytes for c in route.classes} == {0}
    (route,) = plan_of(replace_shape(TURNED, channel_nbytes=8), EngineShape()).routes
    assert {c.sink.tile.channel_nbytes for c in route.classes} == {0}


def test_channels_of_other_sizes_are_refused_by_name() -> None:
    with pytest.raises(IncompatiblePeer, match="channels of 4 bytes apart, sink of 2") as e:
        plan_of(TURNED, replace_shape(TURNED, channel_nbytes=2))
    assert "layers.0/k heads [0, 2)" in str(e.value)
    assert "/v" not in str(e.value)


OPAQUE = EngineShape(interior=Interior.OPAQUE, num_kv_heads=4, tp_size=2)


def test_opaque_blocks_move_whole_between_equal_sides() -> None:
    wide = EngineShape(
        interior=Interior.OPAQUE, num_kv_heads=4, tp_size=2, outermost="blocks", padding_nbytes=7
    )
    plan = plan_of(OPAQUE, wide)  # only the stride of blocks differs
    assert giving(plan) == [(0, 0), (1, 1)]
    assert all(c.interior is Interior.OPAQUE for r in plan.routes for c in r.classes)


@pytest.mark.parametrize(
    ("sink", "message"),
    [
        (EngineShape(num_kv_heads=4, tp_size=2), "source has interior opaque, sink plain"),
        (
            EngineShape(interior=Interior.OPAQUE, num_kv_heads=4, tp_size=2, block_tokens=32),
            "opaque blocks move whole: block_tokens is 16 at the source, 32 at the sink",
        ),
        (
            EngineShape(interior=Interior.OPAQUE, num_kv_heads=4, tp_size=2, kernel_blocks=2),
            "kernel_blocks is 1 at the source, 2 at the sink",
        ),
        (EngineShape(interior=Interior.OPAQUE, num_kv_heads=4, tp_size=4), "head_hi is 2 at the"),
        (
            EngineShape(interior=Interior.OPAQUE, num_kv_heads=4, tp_size=2, layout="NHD"),
            r"strides of head and token \(128, 8\) at the source, \(8, 16\) at the sink",
        ),
        (
            EngineShape(interior=Interior.OPAQUE, num_kv_heads=4, tp_size=2, outermost="inner"),
            "expected equal blocks without gaps",
        ),
    ],
)
def test_opaque_blocks_are_never_split(sink: EngineShape, message: str) -> None:
    with pytest.raises(IncompatiblePeer, match=message):
        plan_of(OPAQUE, sink)


# ---------------------------------------------------------------- speed


def test_a_large_pair_is_planned_quickly() -> None:
    source = build_manifest(EngineShape(tp_size=8, num_kv_heads=8, num_layers=64))
    sink = build_manifest(EngineShape(tp_size=4, num_kv_heads=8, num_layers=64, layout="NHD"))
    durations = []
    for _ in range(3):
        start = time.perf_counter()
        plan = make_plan(source, sink)
        durations.append(time.perf_counter() - start)
    assert len(plan.routes) == 8
    assert min(durations) < 1


def test_hybrid_engines_move_each_group_by_itself() -> None:
    """Layers of two groups in the same bytes, and a layer that shares another's KV."""
    source = EngineShape(
        num_layers=5,
        groups=(0, 1, 0, 1, 1),
        windows=(48, None),
        shares=((1, 0), (3, 2), (4, 3)),
        num_blocks=4,
    )
    sink = EngineShape(
        num_layers=5,
        groups=(1, 0, 1, 0, 0),  # the groups' numbers are each engine's own
        windows=(None, 32),
        shares=((1, 0), (3, 2), (4, 2)),
        num_blocks=4,
        block_tokens=32,
    )
    (route,) = make_plan(build_manifest(source), build_manifest(sink)).routes
    moved = [
        (
            [name.layer for name in copied.names if name.planes == ("k",)],
            (copied.source.group, copied.source.keeping),
            (copied.sink.group, copied.sink.keeping),
        )
        for copied in route.classes
    ]
    assert moved == [
        (["layers.0", "layers.2"], (0, Keeping(16, 48)), (1, Keeping(32, 32))),
        (["layers.1", "layers.3"], (1, Keeping(16)), (0, Keeping(32))),
    ]
    windowed, full = route.classes
    # the same bytes under both groups' names
    assert windowed.sink.bases == full.sink.bases
    assert windowed.source.bases == full.source.bases
