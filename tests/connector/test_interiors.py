"""Loads between engines whose blocks are opaque or have channels apart, over real wires."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from kvxfer.transfer.layout import Interior
from tests.builders import EngineShape
from tests.connector.rig import POISON, WIRES, Engine, Table, expect_moved, until

Spans = dict[int, tuple[int, int]]

OPAQUE = EngineShape(interior=Interior.OPAQUE, num_kv_heads=4, kernel_blocks=2, num_blocks=24)
PADDED = replace(OPAQUE, outermost="blocks", padding_nbytes=7)
HYBRID = replace(
    OPAQUE, num_layers=4, groups=(0, 1, 0, 1), windows=(48, None), shares=((1, 0), (3, 2))
)
TURNED = EngineShape(
    num_kv_heads=4, turned=("k",), outermost="inner", channel_nbytes=4, num_blocks=24
)


def table(shape: EngineShape, num_tokens: int, first: int) -> Table:
    """Ids that no two groups share."""
    num_blocks = -(-num_tokens // shape.block_tokens)
    ids = [1 + (first + 5 * i) % (shape.num_blocks - 1) for i in range(num_blocks * 2)]
    return tuple(tuple(ids[group::2]) for group in range(shape.num_groups))


def load(
    source: Engine,
    sink: Engine,
    offered: int,
    span: tuple[int, int],
    dropped: int = 0,
    name: str = "p",
) -> tuple[Table, Table]:
    """One load, to its report; the first ``dropped`` blocks of group 0 are out of the windows."""
    given = table(source.shape, offered, 0)
    taken = table(sink.shape, span[1], 3)
    taken = ((-1,) * dropped + taken[0][dropped:], *taken[1:])
    ref = source.offer_groups(name, offered, given)
    source.compute(name)
    sink.load_groups(f"d of {name}", ref, taken, span)
    until(lambda: sink.received(f"d of {name}"))
    until(lambda: source.sent(name))
    return given, taken


@dataclass(frozen=True)
class Case:
    """``offered`` tokens of which the sink takes ``span``; what then must have moved."""

    source: EngineShape
    sink: EngineShape
    offered: int
    span: tuple[int, int]
    moved: Spans
    dropped: int = 0


CASES = {
    "one token": Case(OPAQUE, OPAQUE, 1, (0, 1), {0: (0, 16)}),
    "a block less one": Case(OPAQUE, OPAQUE, 15, (0, 15), {0: (0, 16)}),
    "all of a block but the last token": Case(OPAQUE, PADDED, 16, (0, 15), {0: (0, 16)}),
    "a block": Case(OPAQUE, OPAQUE, 16, (0, 16), {0: (0, 16)}),
    "a block and one": Case(PADDED, OPAQUE, 17, (0, 17), {0: (0, 32)}),
    "the last token lies in a block of its own": Case(OPAQUE, OPAQUE, 17, (0, 16), {0: (0, 16)}),
    "a prefix": Case(OPAQUE, PADDED, 77, (32, 76), {0: (32, 80)}),
    "a prefix, all offered": Case(OPAQUE, PADDED, 77, (64, 77), {0: (64, 80)}),
    "TP 2": Case(replace(OPAQUE, tp_size=2), replace(PADDED, tp_size=2), 33, (0, 32), {0: (0, 32)}),
    # token 100 looks back to 53: kept from 48 on
    "a window": Case(HYBRID, HYBRID, 101, (0, 100), {0: (48, 112), 1: (0, 112)}, 3),
    "a window and a prefix": Case(HYBRID, HYBRID, 101, (64, 100), {0: (64, 112), 1: (64, 112)}, 3),
    "a larger window at the source": Case(
        replace(HYBRID, windows=(64, None)), HYBRID, 101, (0, 100), {0: (48, 112), 1: (0, 112)}, 3
    ),
}


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("name", CASES)
def test_opaque_blocks_are_moved_whole(name: str, wire: str) -> None:
    case = CASES[name]
    with (
        Engine(case.source, "prefill", fill=None, transport=wire) as source,
        Engine(case.sink, "decode", fill=POISON, transport=wire) as sink,
    ):
        given, taken = load(source, sink, case.offered, case.span, case.dropped)
        assert sink.reasons("d of p") == {None}
        expect_moved(source, sink, given, taken, case.moved)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("lo", [1, 8, 17])  # 8: where a kernel block ends
def test_a_start_within_an_opaque_block_fails_the_load_by_name(lo: int, wire: str) -> None:
    with (
        Engine(OPAQUE, "prefill", fill=None, transport=wire) as source,
        Engine(OPAQUE, "decode", fill=POISON, transport=wire) as sink,
    ):
        load(source, sink, 40, (lo, 39))
        assert sink.reasons("d of p") == {"plan"}
        (report,) = sink.reports("d of p")
        assert report.detail == (
            "span of group 0: opaque blocks move whole: expected a start at a multiple of 16 "
            f"tokens, got {lo}"
        )
        assert sink.count("loads.unforeseen") == 0
        # The threads still run, and nothing was written.
        assert all((pool.tensor == POISON).all() for pool in sink.pools)
        given, taken = load(source, sink, 40, (16, 39), name="next")
        assert sink.reasons("d of next") == {None}
        expect_moved(source, sink, given, taken, {0: (16, 48)})


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    ("other", "says"),
    [
        (replace(OPAQUE, block_tokens=32), "block_tokens is 16 at the source, 32 at the sink"),
        (replace(OPAQUE, kernel_blocks=1), "kernel_blocks is 2 at the source, 1 at the sink"),
        (replace(OPAQUE, tp_size=2), "head_hi is 4 at the source, 2 at the sink"),
        (replace(OPAQUE, layout="NHD"), "expected equal blocks without gaps, got strides"),
        (replace(OPAQUE, interior=Interior.PLAIN), "interior of layers.0/k"),
        (replace(OPAQUE, inner_nbytes=16), "inner_nbytes of layers.0/k"),
    ],
)
def test_unequal_opaque_sides_are_refused_by_name(other: EngineShape, says: str, wire: str) -> None:
    facts = {"head_size": 2}
    with (
        Engine(OPAQUE, "prefill", fill=None, transport=wire, facts=facts) as source,
        Engine(other, "decode", fill=POISON, transport=wire, facts=facts) as sink,
    ):
        ref = source.offer("p", 40, range(3))
        source.compute("p")
        sink.load("d", ref, range(3), (0, 39))
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"incompatible"}
        assert all(says in report.detail for report in sink.reports("d"))
        assert all((pool.tensor == POISON).all() for pool in sink.pools)


PLAIN = replace(TURNED, turned=(), outermost="planes")
CHANNELS = {
    "both": (TURNED, replace(TURNED, block_tokens=32)),
    "both, TP 2 to 1": (replace(TURNED, tp_size=2, block_tokens=48), TURNED),
    "source": (TURNED, replace(PLAIN, layout="NHD", block_tokens=24, kernel_blocks=3)),
    "sink": (replace(PLAIN, tp_size=2), replace(TURNED, block_tokens=32)),
    "sink, TP 1 to 2": (PLAIN, replace(TURNED, tp_size=2, turned=("k", "v"))),
}


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("span", [(0, 1), (0, 100), (37, 100)])
@pytest.mark.parametrize("name", CHANNELS)
def test_channels_apart_arrive(name: str, span: tuple[int, int], wire: str) -> None:
    given, taken = CHANNELS[name]
    with (
        Engine(given, "prefill", fill=None, transport=wire) as source,
        Engine(taken, "decode", fill=POISON, transport=wire) as sink,
    ):
        ids = load(source, sink, 101, span)
        assert sink.reasons("d of p") == {None}
        expect_moved(source, sink, *ids, {0: span})


@pytest.mark.parametrize("wire", WIRES)
def test_channels_of_other_sizes_are_refused_by_name(wire: str) -> None:
    with (
        Engine(TURNED, "prefill", fill=None, transport=wire) as source,
        Engine(replace(TURNED, channel_nbytes=2), "decode", fill=POISON, transport=wire) as sink,
    ):
        load(source, sink, 40, (0, 39))
        assert sink.reasons("d of p") == {"incompatible"}
        (report,) = sink.reports("d of p")
        assert "source has channels of 4 bytes apart, sink of 2" in report.detail
