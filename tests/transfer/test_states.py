"""States between engines of any tensor parallel sizes and page layouts, against the naive writer
of a model's channels.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace as with_fields

from kvxfer.errors import IncompatiblePeer, ProtocolError
from kvxfer.tensors.strided_copy import Scratch, gather, scatter, strided_copy
from kvxfer.transfer.chunks import chunk_list
from kvxfer.transfer.compatibility import differences
from kvxfer.transfer.layout import Region, check_region
from kvxfer.transfer.manifest import RankId, validate_manifest
from kvxfer.transfer.plan import ALL, CopyClass, Plan, Route, make_plan
from kvxfer.transfer.pull import PullResolver, open_to
from kvxfer.transfer.states import StatePart, part_heads, state_regions
from kvxfer.transfer.windows import group_keepings, held_ids
from tests.builders import (
    DELTA_NET,
    MAMBA1,
    MAMBA2,
    EngineShape,
    StateShape,
    build_manifest,
    build_memories,
    pull_classes,
)
from tests.transfer.naive import Case, Memories, same, side_addresses
from tests.transfer.naive_states import write_state

KINDS = {
    "mamba1": MAMBA1,
    "mamba2": MAMBA2,
    "mamba2, one group": replace(
        MAMBA2, conv=(StatePart("x", 8, 4), StatePart("B", 1, 6), StatePart("C", 1, 6))
    ),
    "gated delta net": DELTA_NET,
}
POISON = 0x5A


class StateCase:
    """A state after ``num_tokens`` tokens at a source, and a sink that is poisoned. Each side has
    its own block for it.
    """

    def __init__(self, source: EngineShape, sink: EngineShape, num_tokens: int) -> None:
        self.shapes = (source, sink)
        self.source, self.sink = build_manifest(source, "source"), build_manifest(sink, "sink")
        self.num_tokens = num_tokens
        tables = [
            tuple(
                tuple((7 * place + 3 + side + 2 * group) % shape.num_blocks for place in range(40))
                for group in range(shape.num_groups)
            )
            for side, shape in enumerate(self.shapes)
        ]
        keepings = [
            group_keepings(r for entry in each.ranks for r in entry.regions)
            for each in (self.source, self.sink)
        ]
        self.ids = [
            held_ids(table, {1: kept[1]}, num_tokens)
            for table, kept in zip(tables, keepings, strict=True)
        ]
        for shape, table, ids in zip(self.shapes, tables, self.ids, strict=True):
            assert shape.state
            assert ids[1] == (table[1][(num_tokens - 1) // shape.state.state_tokens],)
        self.given = self._memories(0, filled=True)

    def poisoned(self) -> Memories:
        return self._memories(1, filled=False)

    def expected(self) -> Memories:
        return self._memories(1, filled=True)

    def _memories(self, side: int, *, filled: bool) -> Memories:
        shape, manifest = self.shapes[side], (self.source, self.sink)[side]
        found = {entry.rank: build_memories(entry, POISON) for entry in manifest.ranks}
        if filled and shape.state:
            for rank, memories in found.items():
                write_state(shape, shape.state, rank.tp, self.ids[side][1][0], 5, memories[0])
        return found

    def spans(self) -> dict[int, tuple[int, int]]:
        """Nothing of the attention layers, which other tests look at."""
        return {0: (0, 0), 1: (self.num_tokens // 2, self.num_tokens)}

    def moves(self, route: Route) -> list[tuple[CopyClass, tuple[int, int]]]:
        """What is read of each class."""
        wanted = pull_classes(route, self.spans())
        spans = ((asked.token_lo, asked.token_hi) for asked in wanted)
        return list(zip(route.classes, spans, strict=True))

    def copied(self, plan: Plan) -> Memories:
        """By the naive walk over each route's addresses."""
        memories = self.poisoned()
        for route in plan.routes:
            given, taken = self.given[route.source_rank], memories[route.sink_rank]
            for copy_class, span in self.moves(route):
                nbytes = copy_class.sink.tile.channel_nbytes or copy_class.sink.tile.inner_nbytes
                for (number, source), (sink_number, sink) in zip(
                    side_addresses(copy_class.source, self.ids[0], span),
                    side_addresses(copy_class.sink, self.ids[1], span),
                    strict=True,
                ):
                    taken[sink_number][sink : sink + nbytes] = given[number][
                        source : source + nbytes
                    ]
        return memories

    def streamed(self, plan: Plan, chunk_nbytes: int) -> Memories:
        """By the copy on a CPU, as stream wires have it."""
        memories = self.poisoned()
        for route in plan.routes:
            classes = pull_classes(route, self.spans())
            given = [torch.from_numpy(m) for m in self.given[route.source_rank]]
            taken = [torch.from_numpy(m) for m in memories[route.sink_rank]]
            sides = PullResolver(self.source.rank(route.source_rank)).resolve(classes)
            for chunk in chunk_list(classes, chunk_nbytes):
                number = chunk.class_index
                bounds = ((chunk.region_lo, chunk.region_hi), (chunk.token_lo, chunk.token_hi))
                sink, order = route.classes[number].sink, classes[number].order
                dense = torch.full((chunk.nbytes,), POISON, dtype=torch.uint8)
                gather(
                    given, sides[number], self.array(0, sides[number].group), order, *bounds, dense
                )
                scatter(taken, sink, self.array(1, sink.group), *bounds, dense)
        return memories

    def pulled(self, plan: Plan) -> Memories:
        """By the copy on a CPU, as direct wires have it."""
        memories = self.poisoned()
        for route in plan.routes:
            given = [torch.from_numpy(m) for m in self.given[route.source_rank]]
            taken = [torch.from_numpy(m) for m in memories[route.sink_rank]]
            for copy_class, span in self.moves(route):
                strided_copy(
                    given,
                    taken,
                    copy_class,
                    self.array(0, copy_class.source.group),
                    self.array(1, copy_class.sink.group),
                    span,
                    scratch=Scratch(),
                )
        return memories

    def array(self, side: int, group: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.array(self.ids[side][group], np.int64)


def shape_of(state: StateShape, tp_size: int, **changes: Any) -> EngineShape:
    changed = replace(state, **changes)
    return EngineShape(tp_size=tp_size, num_layers=1, num_blocks=10, state=changed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layouts", list(itertools.product(("SD", "DS"), repeat=2)), ids="-".join)
def test_every_pair_of_tensor_parallel_sizes(kind: str, layouts: tuple[str, str]) -> None:
    """Sizes 1, 2 and 4 on both sides; blocks of other lengths, and none but the first."""
    for sizes in itertools.product((1, 2, 4), repeat=2):
        source = shape_of(KINDS[kind], sizes[0], conv_layout=layouts[0], state_tokens=8)
        sink = shape_of(
            KINDS[kind], sizes[1], conv_layout=layouts[1], state_tokens=1 << 20, padding_nbytes=12
        )
        case = StateCase(source, sink, num_tokens=37)
        for manifest in (case.source, case.sink):
            validate_manifest(manifest)
        plan, expected = make_plan(case.source, case.sink), case.expected()
        assert same(case.copied(plan), expected), sizes
        assert same(case.pulled(plan), expected), sizes
        assert same(case.streamed(plan, 100), expected), sizes


@given(data=st.data(), num_tokens=st.integers(1, 300))
def test_any_state(data: st.DataObject, num_tokens: int) -> None:
    heads = st.sampled_from((1, 2, 4, 8))
    channels = st.integers(1, 5)
    parts = tuple(
        StatePart(plane, data.draw(heads), data.draw(channels))
        for plane in "xBC"[: data.draw(st.integers(1, 3))]
    )
    state = StateShape(
        conv=parts,
        recurrence=StatePart("ssm", data.draw(heads), data.draw(channels)),
        steps=data.draw(st.integers(1, 5)),
    )
    shapes = [
        shape_of(
            state,
            data.draw(st.sampled_from((1, 2, 4))),
            conv_layout=data.draw(st.sampled_from(("SD", "DS"))),
            state_tokens=data.draw(st.sampled_from((8, 17, 1 << 20))),
            padding_nbytes=4 * data.draw(st.integers(0, 2)),
        )
        for _ in range(2)
    ]
    case = StateCase(shapes[0], shapes[1], num_tokens)
    plan, expected = make_plan(case.source, case.sink), case.expected()
    assert same(case.copied(plan), expected)
    assert same(case.pulled(plan), expected)
    assert same(case.streamed(plan, data.draw(st.integers(1, 500))), expected)


def test_tokens_beside_states() -> None:
    """Attention layers move as ever; states come last among the classes of a route."""
    shape, other = EngineShape(tp_size=2, state=MAMBA2), EngineShape(state=MAMBA2)
    case = Case(replace(shape, state=None), replace(other, state=None), 20)
    plan = make_plan(build_manifest(shape, "source"), build_manifest(other, "sink"))
    for route in plan.routes:
        kinds = [each.sink.state_tokens > 0 for each in route.classes]
        assert kinds == sorted(kinds) == [False, True, True, True]
    tokens = replace_classes(plan)
    assert same(case.copied(tokens, {0: (3, 20)}), case.expected({0: (3, 20)}))


def replace_classes(plan: Plan) -> Plan:
    routes = tuple(
        replace(r, classes=tuple(c for c in r.classes if not c.sink.state_tokens))
        for r in plan.routes
    )
    return Plan(routes)


def test_the_block_of_a_state() -> None:
    keepings = group_keepings(r for r in build_manifest(EngineShape(state=MAMBA1)).ranks[0].regions)
    assert str(keepings[1]) == "a state in each 16 tokens"
    tables = ((1, 2, 3), (4, 5, 6))
    for num_tokens, block in ((1, 4), (16, 4), (17, 5), (32, 5), (33, 6)):
        assert held_ids(tables, keepings, num_tokens) == ((1, 2, 3), (block,))
    assert held_ids(tables, keepings, 49) == ((1, 2, 3), ())


def test_a_state_opens_with_the_last_token() -> None:
    plan = make_plan(*(build_manifest(EngineShape(state=DELTA_NET), n) for n in ("a", "b")))
    classes = pull_classes(plan.routes[0], {0: (0, 40), 1: (0, 40)})
    for wanted in classes:
        ends = [open_to(wanted, open_tokens) for open_tokens in (0, 5, 39, ALL)]
        assert ends == ([0, 0, 0, wanted.token_hi] if wanted.is_state else [0, 5, 39, 40])
    for chunk in chunk_list(classes, 1 << 20):
        is_state = classes[chunk.class_index].is_state
        assert chunk.opens_at == (ALL if is_state else chunk.token_hi)


def test_planted_shards_are_found() -> None:
    """Were a convolution sharded as one range of channels, the oracle would tell."""
    source = shape_of(MAMBA2, 2)
    case = StateCase(source, shape_of(MAMBA2, 1), 30)
    blended = with_fields(
        case.source,
        ranks=tuple(
            with_fields(entry, regions=tuple(_as_one_range(r, entry.rank) for r in entry.regions))
            for entry in case.source.ranks
        ),
    )
    assert not same(case.copied(make_plan(blended, case.sink)), case.expected())


def _as_one_range(region: Region, rank: RankId) -> Region:
    """B and C exchanged, as they would be if x, B and C were cut in the middle together."""
    if region.plane in "BC" and rank.tp == 1:
        return with_fields(region, plane="C" if region.plane == "B" else "B")
    return region


# ---------------------------------------------------------------- refused


def plan_of(source: EngineShape, sink: EngineShape) -> Plan:
    return make_plan(build_manifest(source, "source"), build_manifest(sink, "sink"))


def test_unlike_states_are_refused_by_name() -> None:
    source, sink = shape_of(MAMBA1, 1), shape_of(MAMBA1, 1, steps=4)
    with pytest.raises(
        IncompatiblePeer, match="layers.1/x heads .0, 8.: source has a state of 3 s"
    ):
        plan_of(source, sink)
    with pytest.raises(IncompatiblePeer, match="no source rank holds it"):
        plan_of(shape_of(MAMBA1, 1), shape_of(MAMBA2, 1))
    found = differences(
        build_manifest(shape_of(MAMBA1, 1)),
        build_manifest(shape_of(replace(MAMBA1, recurrence=StatePart("ssm", 16, 5)), 1)),
    )
    assert [each.field for each in found] == ["inner_nbytes of layers.1/ssm and 1 more planes"]


def test_a_state_is_no_tokens() -> None:
    manifest = build_manifest(shape_of(MAMBA1, 1), "source")
    as_tokens = with_fields(
        manifest,
        ranks=tuple(
            with_fields(
                entry, regions=tuple(with_fields(r, state_tokens=UNSET) for r in entry.regions)
            )
            for entry in manifest.ranks
        ),
    )
    with pytest.raises(IncompatiblePeer, match="source keeps tokens, sink a state"):
        make_plan(as_tokens, manifest)
    classes = pull_classes(make_plan(manifest, manifest).routes[0], {0: (0, 9), 1: (0, 9)})
    with pytest.raises(ProtocolError, match="expected to be asked for tokens, got a state"):
        PullResolver(as_tokens.ranks[0]).resolve(classes)
    resolver = PullResolver(manifest.ranks[0])
    assert [each.state_of for each in classes] == [UNSET, 9, 9]
    for wanted in (
        with_fields(classes[1], token_lo=1),
        with_fields(classes[1], token_hi=2),
    ):
        with pytest.raises(ProtocolError, match=r"states move whole: expected steps \[0, 3\), got"):
            resolver.resolve((wanted,))
    with pytest.raises(ProtocolError, match="expected to be asked for a state, got tokens"):
        resolver.resolve((with_fields(classes[1], state_of=UNSET),))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"state_tokens": 0}, "state_tokens: expected 1 or more, got 0"),
        (
            {"window": 5},
            "expected a state without a window, in one kernel block, got a window of 5",
        ),
        ({"block_tokens": 4, "kernel_blocks": 2}, "in one kernel block, got .* in 2"),
    ],
)
def test_states_are_checked(changes: dict[str, int], match: str) -> None:
    region = build_manifest(shape_of(MAMBA1, 1)).ranks[0].regions[-1]
    with pytest.raises(ValueError, match=match):
        check_region(with_fields(region, **changes), 1 << 30)


def test_parts_are_checked() -> None:
    assert [part_heads(StatePart("B", 2, 6), rank, 4) for rank in range(4)] == [
        (0, 1),
        (0, 1),
        (1, 2),
        (1, 2),
    ]
    with pytest.raises(ValueError, match="x: expected a number of heads that 3 ranks share equal"):
        part_heads(StatePart("x", 8, 2), 0, 3)
    region = build_manifest(shape_of(MAMBA1, 1)).ranks[0].regions[-1]
    with pytest.raises(ValueError, match="expected 8 channels of a and b on each of 1 ranks, got"):
        state_regions(region, (StatePart("a", 2, 2), StatePart("b", 2, 2)), 0, 1)
