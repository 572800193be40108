"""Context parallelism: every token comes from a rank that keeps it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace as replace_shape
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace

from kvxfer.errors import IncompatiblePeer, ProtocolError
from kvxfer.tensors.strided_index import side_ids
from kvxfer.transfer.chunks import chunk_list
from kvxfer.transfer.interleave import MAX_PERIOD, WHOLE, Interleave, shared
from kvxfer.transfer.layout import Interior
from kvxfer.transfer.manifest import EngineManifest, RankId, validate_manifest
from kvxfer.transfer.plan import make_plan
from kvxfer.transfer.pull import PullResolver, check_table, open_to, pull_class
from kvxfer.transfer.wire import CELLS, INTERLEAVES, PROTOCOL_MIN, STATES, first_protocol
from tests import planted
from tests.builders import DELTA_NET, EngineShape, build_manifest
from tests.transfer.naive import Case, same

SIZES = (1, 2, 4)
PAIRS = list(product(SIZES, SIZES))


def keeps(kept: Interleave, token: int) -> bool:
    return token // kept.run % kept.size == kept.index


@st.composite
def interleaves(draw: st.DrawFn) -> Interleave:
    size = draw(st.integers(1, 6))
    return Interleave(size, draw(st.integers(0, size - 1)), draw(st.integers(1, 9)))


@given(ours=interleaves(), theirs=interleaves(), num_tokens=st.integers(0, 300))
def test_what_two_ranks_share_is_what_both_keep(
    ours: Interleave, theirs: Interleave, num_tokens: int
) -> None:
    both = [p for p in range(2000) if keeps(ours, p) and keeps(theirs, p)]
    found = shared(ours, theirs)
    if found is None:
        assert not both
        return
    assert found.count(num_tokens) == sum(p < num_tokens for p in both)
    assert [found.token(number) for number in range(len(both))] == both
    own = [p for p in range(num_tokens) if keeps(ours, p)]
    assert [ours.own(p) for p in own] == list(range(len(own)))


# ---------------------------------------------------------------- the whole grid


@st.composite
def shapes(draw: st.DrawFn, cp_size: int, heads: int, inner: bool) -> EngineShape:
    """``heads``: of the model; as many ranks as there must be for these hold the same."""
    run = draw(st.sampled_from((1, 2, 3, 4)))
    kernel_blocks = draw(st.sampled_from((1, 2)))
    is_mla = heads == 0
    num_replicas = draw(st.sampled_from((1, 2))) if cp_size > 1 else 1
    return EngineShape(
        tp_size=cp_size * max(1, heads) * num_replicas
        if cp_size > 1
        else draw(st.sampled_from((1, 2, 4))),
        cp_size=cp_size,
        # Of prefill context parallelism those with the same tokens are next to each other.
        cp_stride=draw(st.sampled_from((1, num_replicas))) if is_mla else 1,
        cp_run=run,
        is_mla=is_mla,
        num_kv_heads=max(1, heads),
        num_layers=1,
        block_tokens=run * kernel_blocks * draw(st.sampled_from((1, 2, 4))),
        kernel_blocks=kernel_blocks,
        num_blocks=41,
        inner_nbytes=4,
        layout=draw(st.sampled_from(("HND", "NHD"))),
        outermost="inner" if inner else draw(st.sampled_from(("planes", "blocks"))),
        padding_nbytes=draw(st.sampled_from((0, 3))),
        turned=() if is_mla else draw(st.sampled_from(((), ("k",)))),
        channel_nbytes=1,
    )


@pytest.mark.parametrize(("source_cp", "sink_cp"), PAIRS)
@settings(max_examples=12)
@given(data=st.data(), num_tokens=st.integers(1, 41))
def test_planned_copies_are_the_oracles(
    source_cp: int, sink_cp: int, data: st.DataObject, num_tokens: int
) -> None:
    check_copies((source_cp, sink_cp), data, num_tokens)


@pytest.mark.slow
@pytest.mark.parametrize(("source_cp", "sink_cp"), PAIRS)
@settings(max_examples=200)
@given(data=st.data(), num_tokens=st.integers(1, 41))
def test_many_planned_copies_are_the_oracles(
    source_cp: int, sink_cp: int, data: st.DataObject, num_tokens: int
) -> None:
    check_copies((source_cp, sink_cp), data, num_tokens)


def check_copies(sizes: tuple[int, int], data: st.DataObject, num_tokens: int) -> None:
    heads, inner = data.draw(st.sampled_from((0, 1, 2))), data.draw(st.booleans())
    source, sink = (data.draw(shapes(size, heads, inner)) for size in sizes)
    case = Case(source, sink, num_tokens)
    for engine in (case.source, case.sink):
        validate_manifest(engine)
    plan = make_plan(case.source, case.sink)
    lo = data.draw(st.integers(0, num_tokens))
    spans = {0: (lo, data.draw(st.integers(lo, num_tokens)))}
    assert not case.differing(plan, spans, data.draw(st.integers(1, 200)))


@pytest.mark.parametrize(("source_cp", "sink_cp"), PAIRS)
def test_every_token_once_and_every_source_rank_heard(source_cp: int, sink_cp: int) -> None:
    source, sink = (
        build_manifest(EngineShape(tp_size=4, num_kv_heads=1, cp_size=size, cp_run=run))
        for size, run in ((source_cp, 2), (sink_cp, 8))
    )
    plan, num_tokens = make_plan(source, sink), 100
    got = Counter(
        (route.sink_rank, name.layer, plane, asked.token(number))
        for route in plan.routes
        for each in route.classes
        for asked in [pull_class(each, 0, num_tokens)]
        for number in range(asked.token_lo, asked.token_hi)
        for name in each.names
        for plane in name.planes
    )
    assert got == {
        (entry.rank, region.layer, region.plane, token): 1
        for entry in sink.ranks
        for region in entry.regions
        for token in range(num_tokens)
        if keeps(region.kept, token)
    }
    assert {route.source_rank for route in plan.routes} == {entry.rank for entry in source.ranks}


def test_a_token_comes_from_the_rank_that_keeps_it() -> None:
    """Four ranks of one head, two of which keep the tokens by turns, to one that keeps all: rank 0
    or 2 has the even ones.
    """
    source = build_manifest(EngineShape(tp_size=4, num_kv_heads=1, cp_size=2))
    plan = make_plan(source, build_manifest(EngineShape(tp_size=1, num_kv_heads=1)))
    tokens = {
        route.source_rank.tp: [asked.token(number) for number in range(asked.token_hi)]
        for route in plan.routes
        for each in route.classes
        for asked in [pull_class(each, 0, 5)]
    }
    assert tokens == {0: [0, 2, 4], 1: [1, 3]}
    assert [route.source_rank.tp for route in plan.routes if route.is_null] == [2, 3]


def test_replicas_are_shared_out_among_those_that_want_their_tokens() -> None:
    source = build_manifest(EngineShape(tp_size=4, num_kv_heads=1, cp_size=2))
    sink = build_manifest(EngineShape(tp_size=4, num_kv_heads=1, cp_size=2))
    giving = {(r.source_rank.tp, r.sink_rank.tp) for r in make_plan(source, sink).routes}
    assert giving == {(0, 0), (1, 1), (2, 2), (3, 3)}
    # Of runs of two, the first two of four sink ranks want those of ranks 0 and 2
    source = build_manifest(EngineShape(tp_size=4, num_kv_heads=1, cp_size=2, cp_run=2))
    sink = build_manifest(EngineShape(tp_size=4, num_kv_heads=1, cp_size=4))
    giving = {(r.source_rank.tp, r.sink_rank.tp) for r in make_plan(source, sink).routes}
    assert giving == {(0, 0), (2, 1), (1, 2), (3, 3)}


def test_layers_of_other_stages_keep_their_interleave() -> None:
    """Pipeline stages on both sides beside context parallelism: no stage is left out."""
    source = EngineShape(
        pp_size=3, tp_size=2, num_kv_heads=1, num_layers=6, cp_size=2, block_tokens=4
    )
    sink = EngineShape(pp_size=2, tp_size=1, num_kv_heads=1, num_layers=6, block_tokens=6)
    case = Case(source, sink, 33)
    plan, spans = make_plan(case.source, case.sink), {0: (5, 33)}
    assert {route.source_rank for route in plan.routes if not route.is_null} == {
        RankId(pp, tp) for pp in range(3) for tp in range(2)
    }
    assert same(case.copied(plan, spans), case.expected(spans))


# ---------------------------------------------------------------- planted faults


@pytest.mark.parametrize(
    "plant",
    [
        planted.runs_of_one_token,
        planted.whole_periods,
        planted.ranks_the_other_way_round,
        planted.one_unit_further,
    ],
)
def test_planted_interleaves_are_found(plant: planted.Plant) -> None:
    """The oracle tells of each on every kind of wire."""
    two = EngineShape(tp_size=2, num_kv_heads=1, cp_size=2, num_layers=1)
    source = replace_shape(two, cp_run=4)
    sink = replace_shape(two, cp_run=3, block_tokens=12, layout="NHD")
    case, spans = Case(source, sink, 70), {0: (5, 67)}
    assert not case.differing(make_plan(case.source, case.sink), spans, 100)
    with planted.planted(plant):
        found = case.differing(make_plan(case.source, case.sink), spans, 100)
    assert found == ["direct", "stream"]


# ---------------------------------------------------------------- growing


@given(open_tokens=st.integers(0, 60))
def test_of_a_growing_offer_the_open_tokens_are_the_ranks_own(open_tokens: int) -> None:
    source, sink = (
        build_manifest(EngineShape(tp_size=2, num_kv_heads=1, cp_size=size, cp_run=4))
        for size in (2, 1)
    )
    for route in make_plan(source, sink).of_sink(RankId(0, 0)):
        asked = pull_class(route.classes[0], 3, 50)
        hi = open_to(asked, open_tokens)
        tokens = [asked.token(number) for number in range(asked.token_lo, hi)]
        kept = Interleave(2, route.source_rank.tp, 4)
        assert tokens == [p for p in range(3, min(50, open_tokens)) if keeps(kept, p)]


def test_a_chunk_leaves_when_its_last_token_is_open() -> None:
    source, sink = (
        build_manifest(EngineShape(tp_size=2, num_kv_heads=1, cp_size=size, cp_run=run))
        for size, run in ((2, 4), (1, 1))
    )
    for route in make_plan(source, sink).of_sink(RankId(0, 0)):
        asked = pull_class(route.classes[0], 0, 50)
        kept = Interleave(2, route.source_rank.tp, 4)
        tokens = [p for p in range(50) if keeps(kept, p)]
        chunks = chunk_list((asked,), 4096 // 64)
        assert len(chunks) > 2
        assert [each.opens_at for each in chunks] == [tokens[c.token_hi - 1] + 1 for c in chunks]


def test_ids_of_a_striped_side_are_looked_at_where_its_tokens_lie() -> None:
    """Tokens 0 to 15 of two ranks that share them lie in the first block of 8 of each; rank 1's
    part of token 17 in the second one.
    """
    source, sink = (
        build_manifest(
            EngineShape(tp_size=2, num_kv_heads=1, cp_size=size, block_tokens=tokens, num_blocks=9)
        )
        for size, tokens in ((2, 8), (1, 4))
    )
    (_, route) = make_plan(source, sink).of_sink(RankId(0, 0))
    side = route.classes[0].sink
    assert side.stripe is not None
    asked = pull_class(route.classes[0], 0, 18)
    assert (asked.token_lo, asked.token_hi) == (0, 9)
    check_table(side, [(3, 1, 2, 5, 7)], 0, 9)
    check_table(side, [(-1, -1, -1, -1, 7)], 8, 9)
    for ids, span in (
        ((3, 1, 2, 5), (0, 9)),
        ((3, -1, 2, 5, 7), (0, 9)),
        ((3, 1, 2, 5, 9), (0, 9)),
        ((-1, 1, 2, 5, -1), (8, 9)),
    ):
        with pytest.raises(ProtocolError, match="block ids of group 0"):
            check_table(side, [ids], *span)
    assert side_ids(side, [(3, -1, 2)]).tolist()[2:4] == [-1, -1]
    assert min(side_ids(side, [(3, 1, 2)]).tolist()) >= 0


EQUAL = EngineShape(tp_size=2, num_kv_heads=1, cp_size=2, interior=Interior.OPAQUE)


@given(open_tokens=st.integers(0, 60))
def test_of_a_growing_offer_opaque_blocks_open_when_they_are_full(open_tokens: int) -> None:
    manifest = build_manifest(replace_shape(EQUAL, block_tokens=4))
    for route in make_plan(manifest, manifest).routes:
        asked = pull_class(route.classes[0], 8, 61)
        assert (asked.token_lo, asked.token_hi) == (4, 32)
        own = sum(p % 2 == route.sink_rank.tp for p in range(open_tokens))
        assert open_to(asked, open_tokens, whole=4) == max(4, own // 4 * 4)


# ---------------------------------------------------------------- what is refused


def test_opaque_blocks_move_between_equal_interleaves() -> None:
    case = Case(EQUAL, EQUAL, 64)
    plan, spans = make_plan(case.source, case.sink), {0: (32, 64)}
    assert same(case.copied(plan, spans), case.expected(spans))
    other = replace_shape(EQUAL, cp_run=16)
    with pytest.raises(IncompatiblePeer, match="opaque blocks move whole: source keeps tokens of"):
        make_plan(build_manifest(EQUAL), build_manifest(other))


def with_kept(manifest: EngineManifest, number: int, kept: Any) -> EngineManifest:
    """Rank ``number`` says something else."""
    ranks = list(manifest.ranks)
    regions = tuple(replace(each, interleave=kept) for each in ranks[number].regions)
    ranks[number] = replace(ranks[number], regions=regions)
    return replace(manifest, ranks=tuple(ranks))


GOOD = build_manifest(EngineShape(tp_size=2, num_kv_heads=1, cp_size=2))


def test_tokens_that_no_source_rank_holds_are_named() -> None:
    lacking = with_kept(GOOD, 1, Interleave(2, 0, 1))
    with pytest.raises(IncompatiblePeer, match="no source rank holds the tokens of rank 1 of 2"):
        make_plan(lacking, build_manifest(EngineShape(tp_size=1, num_kv_heads=1)))


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (Interleave(4, 0, 1), "expected the 2 ranks of dcp_size x pcp_size"),
        (Interleave(2, 1, 2), "expected runs as on the ranks before"),
        (UNSET, "expected runs as on the ranks before"),
        (Interleave(2, 2, 1), "expected an index below its size"),
        (Interleave(2, 1, 3), "runs that fill blocks of 16 tokens"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(kept: Any, message: str) -> None:
    validate_manifest(GOOD)
    with pytest.raises(IncompatiblePeer, match=message):
        validate_manifest(with_kept(GOOD, 1, kept))


def test_windows_and_states_are_not_interleaved() -> None:
    shape = EngineShape(tp_size=2, num_kv_heads=1, cp_size=2, windows=(32,))
    with pytest.raises(IncompatiblePeer, match="expected none where a layer keeps a window of 32"):
        validate_manifest(build_manifest(shape))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (UNSET, "interleaves: expected rank 1 of 2, runs of 1 tokens of the source, got rank 0"),
        ((WHOLE, WHOLE), "interleaves: expected rank 1 of 2"),
        ((Interleave(2, 0, 1), WHOLE), "interleaves: expected rank 1 of 2"),
        ((Interleave(2, 1, 1), Interleave(2, 0, 1)), "expected tokens that both keep"),
        ((Interleave(2, 1, 1), Interleave(3, 3, 1)), "expected an index below the size"),
        ((Interleave(2, 1, 1), Interleave(1023, 0, 1023)), f"repeat within {MAX_PERIOD}"),
    ],
)
def test_a_source_takes_no_interleave_on_trust(asked: Any, message: str) -> None:
    sink = build_manifest(EngineShape(tp_size=1, num_kv_heads=1))
    route = next(r for r in make_plan(GOOD, sink).routes if r.source_rank == RankId(0, 1))
    wanted = replace(pull_class(route.classes[0], 0, 20), interleaves=asked)
    with pytest.raises(ProtocolError, match=message):
        PullResolver(GOOD.ranks[1]).resolve((wanted,))


def test_an_engine_speaks_no_version_before_what_its_regions_need() -> None:
    plain = build_manifest(EngineShape()).ranks[0].regions
    states = build_manifest(EngineShape(state=DELTA_NET)).ranks[0].regions
    assert first_protocol(plain) == PROTOCOL_MIN
    cells = build_manifest(EngineShape(cell_tokens=4)).ranks[0].regions
    assert first_protocol(states) == STATES
    assert first_protocol(cells) == CELLS > STATES
    assert first_protocol(GOOD.ranks[0].regions) == INTERLEAVES
