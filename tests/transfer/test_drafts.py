"""A draft's layers beside the model's: heads, blocks, a group and tensor parallelism of their own,
on both sides or on one. The copies are the oracle's, byte for byte.
"""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest
from msgspec.structs import replace as changed

from kvxfer.transfer.compatibility import differences
from kvxfer.transfer.manifest import EngineManifest, MemoryInfo, RankId, validate_manifest
from kvxfer.transfer.plan import make_plan
from tests import planted
from tests.builders import (
    EngineShape,
    LayoutName,
    build_memories,
    build_regions,
    scattered_ids,
)
from tests.oracle import oracle_fill
from tests.transfer.naive import Case

MODEL = EngineShape(num_kv_heads=2, num_layers=2, num_blocks=8)
NUM_TOKENS = 37
SPANS = {0: (16, 36), 1: (16, 36)}


def draft(tp_size: int, block_tokens: int, layout: LayoutName) -> EngineShape:
    """With more heads than the model has."""
    return EngineShape(
        tp_size=tp_size,
        num_kv_heads=4,
        num_layers=1,
        block_tokens=block_tokens,
        layout=layout,
        inner_nbytes=12,
    )


def with_draft(engine: EngineManifest, shape: EngineShape) -> EngineManifest:
    """Its layers on every rank: sharded as the model's or, with one rank, whole on each."""
    ranks = []
    for entry in engine.ranks:
        regions, nbytes = build_regions(shape, RankId(0, entry.rank.tp % shape.tp_size))
        own = tuple(
            changed(each, layer=f"draft.{each.layer}", group=1, memory=1, is_draft=True)
            for each in regions
        )
        memory = MemoryInfo(device="cpu", nbytes=nbytes)
        ranks.append(
            changed(entry, regions=(*entry.regions, *own), memories=(*entry.memories, memory))
        )
    facts = changed(engine.facts, draft_layers=("eagle of x",), num_kv_heads=4)
    return changed(engine, ranks=tuple(ranks), facts=facts)


def case_of(
    tp_sizes: tuple[int, int], source: EngineShape | None, sink: EngineShape | None
) -> Case:
    """``source``, ``sink``: their drafts, None without."""
    given, taken = (dataclasses.replace(MODEL, tp_size=tp_size) for tp_size in tp_sizes)
    case = Case(given, taken, NUM_TOKENS)
    if source is not None:
        case.source = with_draft(case.source, source)
        ids = scattered_ids(NUM_TOKENS, source.block_tokens, source.num_blocks, seed=3)
        case.source_ids = (*case.source_ids, ids)
    if sink is not None:
        case.sink = with_draft(case.sink, sink)
        ids = scattered_ids(NUM_TOKENS, sink.block_tokens, sink.num_blocks, seed=4)
        case.sink_ids = (*case.sink_ids, ids)
    for entry in case.source.ranks:
        memories = case.source_memories[entry.rank] = build_memories(entry)
        oracle_fill(entry.regions, memories, ids=case.source_ids, num_tokens=NUM_TOKENS)
    for engine in (case.source, case.sink):
        validate_manifest(engine)
    assert not differences(case.source, case.sink)
    return case


def check(case: Case, expected_empty: tuple[str, ...]) -> None:
    plan = make_plan(case.source, case.sink)
    assert plan.empty_layers == expected_empty
    assert not case.differing(plan, SPANS, 300)


@pytest.mark.parametrize("tp_sizes", list(product((1, 2, 4), repeat=2)), ids=str)
def test_the_copies_are_the_oracles(tp_sizes: tuple[int, int]) -> None:
    """As parallel as its model, or whole on each rank, on either side."""
    for given_tp, taken_tp in product(*({1, tp_size} for tp_size in tp_sizes)):
        check(case_of(tp_sizes, draft(given_tp, 16, "HND"), draft(taken_tp, 24, "NHD")), ())


@pytest.mark.parametrize("tp_sizes", [(1, 1), (2, 1), (1, 2), (4, 2)], ids=str)
def test_a_draft_on_one_side(tp_sizes: tuple[int, int]) -> None:
    """A source's is not read; a sink's stays as it was, and is named."""
    given, taken = (draft(tp_size, 16, "HND") for tp_size in tp_sizes)
    check(case_of(tp_sizes, given, None), ())
    check(case_of(tp_sizes, None, taken), ("draft.layers.0",))


# ---------------------------------------------------------------- planted faults


@pytest.mark.parametrize(
    ("plant", "block_tokens"),
    [
        (planted.of_the_models_ranks, 24),
        (planted.blocks_of_the_model, 8),
        (planted.table_of_the_model, 24),
        (planted.no_draft, 24),
    ],
)
def test_planted_drafts_are_found(plant: planted.Plant, block_tokens: int) -> None:
    """The oracle tells of each on every kind of wire. The sink has all of its draft on each rank,
    in blocks of ``block_tokens``.
    """
    case = case_of((2, 2), draft(2, 16, "HND"), draft(1, block_tokens, "NHD"))
    check(case, ())
    with planted.planted(plant):
        plan = make_plan(case.source, case.sink)
        assert case.differing(plan, SPANS, 300) == ["direct", "stream"]


def test_another_draft_is_refused_by_name() -> None:
    case = case_of((1, 1), draft(1, 16, "HND"), draft(1, 16, "HND"))
    facts = changed(case.sink.facts, draft_layers=("eagle of y",))
    (found,) = differences(case.source, changed(case.sink, facts=facts))
    assert str(found) == (
        "draft_layers: source has eagle of x, sink has eagle of y; "
        "use the same draft on both sides, or none on one"
    )
