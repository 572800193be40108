"""Which differences keep two engines apart, and how they are told."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import fields, replace

from kvxfer.errors import IncompatiblePeer
from kvxfer.transfer.compatibility import check_compatible, differences
from kvxfer.transfer.layout import Interior
from kvxfer.transfer.manifest import CacheFacts, EngineManifest
from tests.builders import EngineShape, build_manifest

SOURCE = build_manifest(EngineShape(tp_size=2), "prefill")
SINK = build_manifest(EngineShape(block_tokens=24, kernel_blocks=3, layout="NHD"), "decode")

OTHER: dict[str, Any] = {
    "model": "other",
    "weights": "ffff",
    "rope": "theta=500000",
    "dtype": "bfloat16",
    "quantisation": "fp8",
    "num_kv_heads": 4,
    "head_size": 128,
    "num_layers": 99,
    "is_mla": True,
    "draft_layers": ("draft.0", "draft.1"),
    "attention": "full, sliding 48",
}


def with_facts(manifest: EngineManifest, **change: object) -> EngineManifest:
    return replace(manifest, facts=replace(manifest.facts, **change))


def test_tp_pp_block_size_and_layout_may_differ() -> None:
    check_compatible(SOURCE, SINK)
    check_compatible(SINK, SOURCE)
    check_compatible(build_manifest(EngineShape(pp_size=2, tp_size=2)), SINK)


def test_every_fact_is_listed_above() -> None:
    sizes = {"dcp_size", "pcp_size"}
    assert set(OTHER) | sizes == {field.name for field in fields(CacheFacts)}


@pytest.mark.parametrize("field", OTHER)
def test_every_fact_counts(field: str) -> None:
    source = with_facts(SOURCE, draft_layers=("draft.2",)) if field == "draft_layers" else SOURCE
    other = with_facts(SINK, **{field: OTHER[field]})
    assert field in [difference.field for difference in differences(source, other)]
    with pytest.raises(IncompatiblePeer, match=field):
        check_compatible(source, other)


@pytest.mark.parametrize(
    "field", ["model", "weights", "rope", "dtype", "quantisation", "attention"]
)
def test_unknown_never_equals_anything(field: str) -> None:
    ours, theirs = (with_facts(side, **{field: ""}) for side in (SOURCE, SINK))
    for pair in ((ours, SINK), (SOURCE, theirs), (ours, theirs)):
        (found,) = differences(*pair)
        assert found.field == field
        assert "unknown" in (found.source, found.sink)
        assert found.advice == "the side that does not know it must state it"


def test_all_differences_in_one_message() -> None:
    other = with_facts(
        replace(SINK, protocol=(4, 5)), rope="theta=500000", draft_layers=("draft.0", "draft.1")
    )
    with pytest.raises(IncompatiblePeer) as e:
        check_compatible(with_facts(SOURCE, draft_layers=("draft.2",)), other)
    assert str(e.value) == (
        "engines prefill and decode cannot exchange KV: "
        "protocol: source has versions 1 to 1, sink has versions 4 to 5; upgrade the older side | "
        "rope: source has theta=10000, sink has theta=500000; "
        "use the same rope settings on both sides | "
        "draft_layers: source has draft.2, sink has draft.0, draft.1; "
        "use the same draft on both sides, or none on one"
    )


def test_protocol_ranges_that_overlap() -> None:
    assert not differences(replace(SOURCE, protocol=(1, 3)), replace(SINK, protocol=(3, 5)))
    assert differences(replace(SOURCE, protocol=(1, 2)), replace(SINK, protocol=(3, 5)))


def test_inner_sizes_and_interiors_by_plane() -> None:
    wide = build_manifest(EngineShape(inner_nbytes=16, interior=Interior.OPAQUE))
    facts = replace(wide, facts=SOURCE.facts)
    assert [str(found) for found in differences(SOURCE, facts)] == [
        "inner_nbytes of layers.0/k and 3 more planes: source has 8, sink has 16; "
        "use the same head size and KV dtype on both sides",
        "interior of layers.0/k and 3 more planes: source has plain, sink has opaque; "
        "use the same attention backend on both sides",
    ]


def test_one_plane_that_differs_is_named() -> None:
    rank = SINK.ranks[0]
    regions = (*rank.regions[:3], replace(rank.regions[3], interior=Interior.OPAQUE))
    other = replace(SINK, ranks=(replace(rank, regions=regions),))
    (found,) = differences(SOURCE, other)
    assert found.field == "interior of layers.1/v"


def test_context_parallel_sizes_may_differ_where_the_tokens_of_each_rank_are_stated() -> None:
    one, two, four = (
        build_manifest(
            EngineShape(
                tp_size=4, num_kv_heads=1, block_tokens=tokens, cp_size=size, protocol=(1, 3)
            )
        )
        for size, tokens in ((1, 8), (2, 16), (4, 32))
    )
    for source, sink in ((two, four), (four, two), (one, two), (two, one)):
        check_compatible(source, sink)


@pytest.mark.parametrize("field", ["dcp_size", "pcp_size"])
def test_an_engine_that_does_not_state_the_tokens_of_its_ranks_is_refused(field: str) -> None:
    silent = with_facts(SOURCE, **{field: 2})
    for source, sink in ((silent, SINK), (SINK, silent), (silent, silent)):
        with pytest.raises(IncompatiblePeer, match=r"must state which tokens its ranks keep"):
            check_compatible(source, sink)


def test_tokens_that_two_sides_share_too_seldom_are_refused_by_name() -> None:
    many, few = (
        build_manifest(
            EngineShape(tp_size=size, num_kv_heads=1, block_tokens=run, cp_size=size, cp_run=run)
        )
        for size, run in ((7, 125), (2, 128))
    )
    (found,) = differences(many, few)
    assert (found.source, found.sink) == ("875", "256")
    assert "repeat within 32768 tokens" in str(found)


def hybrid(windows: tuple[int | None, ...], block_tokens: int = 16, layers: int = 4) -> EngineShape:
    return EngineShape(
        num_layers=layers,
        groups=tuple(layer % 2 for layer in range(layers)),
        windows=windows,
        block_tokens=block_tokens,
    )


@pytest.mark.parametrize(
    ("source", "sink"),
    [
        ((48, None), (48, None)),
        ((None, None), (48, None)),  # the source keeps everything
        ((64, None), (48, None)),
        ((48, None), (48, 16)),
    ],
)
def test_a_source_may_keep_more_than_the_sink(
    source: tuple[int | None, ...], sink: tuple[int | None, ...]
) -> None:
    check_compatible(build_manifest(hybrid(source)), build_manifest(hybrid(sink, 24)))


def test_a_source_must_not_keep_less_than_the_sink() -> None:
    all_kept, window, wide = (
        build_manifest(hybrid(windows), name)
        for windows, name in (((None, None), "d"), ((48, None), "p"), ((64, 48), "w"))
    )
    with pytest.raises(IncompatiblePeer) as e:
        check_compatible(window, all_kept)
    advice = (
        "make the source keep at least what the sink keeps: the same windows on both sides, or "
        "none at the source"
    )
    assert str(e.value) == (
        "engines p and d cannot exchange KV: window of layers.0, layers.2: source has 48 tokens, "
        f"sink has all tokens; {advice}"
    )
    (found,) = differences(window, wide)
    assert str(found) == (
        f"window of layers.0, layers.2: source has 48 tokens, sink has 64 tokens; {advice}"
    )
    many = build_manifest(hybrid((48, None), layers=12)), build_manifest(hybrid((), layers=12))
    (found,) = differences(*many)
    assert found.field == "window of layers.0, layers.2, layers.4, layers.6 and 2 more"


def test_blocks_that_would_have_to_stay_unhashed_are_refused_by_name() -> None:
    source = build_manifest(hybrid((48, None), 16), "p")
    sink = build_manifest(hybrid((48, None), 32), "d")
    check_compatible(source, sink)
    with pytest.raises(IncompatiblePeer) as e:
        check_compatible(source, sink, can_leave_unhashed=False)
    assert str(e.value) == (
        "engines p and d cannot exchange KV: block_tokens of layers.0, layers.2: "
        "source has 16 with a window of 48, sink has 32 with a window of 48; the window can begin "
        "within a sink block, which must then not be named for prefix reuse, and the sink cannot "
        "prevent that; give the source blocks that are a multiple of the sink's, or switch prefix "
        "caching off at the sink"
    )
    for other in (
        hybrid((48, None), 32),  # a multiple
        hybrid((48, None), 64),
        hybrid((None, None), 16),  # keeps everything
        hybrid((64, None), 16),  # a window so much larger that it always reaches
    ):
        check_compatible(build_manifest(other, "p"), sink, can_leave_unhashed=False)
    with pytest.raises(IncompatiblePeer):
        check_compatible(build_manifest(hybrid((63, None), 16)), sink, can_leave_unhashed=False)
