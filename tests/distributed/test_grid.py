"""Two engines of real ranks in processes of their own: every TP pair of this world, block sizes and
layouts of both sides.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import get_args

import pytest

from tests.builders import LayoutName
from tests.distributed.content import Pair, make_pair
from tests.distributed.play import Play, Stories, expected_wire, run
from tests.distributed.world import NUM_RANKS, UNDER_TORCHRUN, WHY_SKIPPED, World, team_sizes

if not UNDER_TORCHRUN:
    pytest.skip(WHY_SKIPPED, allow_module_level=True)

TP_PAIRS = tuple(itertools.product(team_sizes(NUM_RANKS), repeat=2))
# Equal, a multiple, neither divides the other; each one both given and taken.
BLOCK_PAIRS = ((16, 16), (16, 64), (64, 24), (24, 16))
ALL_BLOCK_PAIRS = tuple(itertools.product((16, 24, 64), repeat=2))
LAYOUT_PAIRS = tuple(itertools.product(get_args(LayoutName), repeat=2))


@dataclass(frozen=True, slots=True)
class Cell:
    """One pair of engines, each value as (source, sink)."""

    tp_sizes: tuple[int, ...]
    blocks: tuple[int, ...]
    layouts: tuple[LayoutName, ...]

    def __str__(self) -> str:
        return "-".join(f"{a}to{b}" for a, b in (self.tp_sizes, self.blocks, self.layouts))


def cells(*, is_long: bool) -> list[Cell]:
    """All, or so many that every layout pair meets every TP pair and, with four TP pairs and more,
    every block pair.
    """
    if is_long or len(TP_PAIRS) == 1:
        grid = itertools.product(TP_PAIRS, ALL_BLOCK_PAIRS, LAYOUT_PAIRS)
        return [Cell(*values) for values in grid]
    return [
        Cell(tp_sizes, blocks, LAYOUT_PAIRS[(i + j) % len(LAYOUT_PAIRS)])
        for i, tp_sizes in enumerate(TP_PAIRS)
        for j, blocks in enumerate(BLOCK_PAIRS)
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The grid, as large as the run wants it."""
    if "cell" in metafunc.fixturenames:
        metafunc.parametrize("cell", cells(is_long=metafunc.config.getoption("--long")), ids=str)


def test_every_rank_gets_its_bytes(world: World, cell: Cell) -> None:
    pair = make_pair(cell.tp_sizes, cell.blocks, cell.layouts)
    expect_all_moved(world, pair, run(world, pair), "auto")


@pytest.mark.parametrize("tp_sizes", TP_PAIRS, ids=lambda sizes: f"{sizes[0]}to{sizes[1]}")
def test_a_stream_brings_the_same(world: World, tp_sizes: tuple[int, ...]) -> None:
    if world.device.type == "cuda":
        pytest.skip("zmq moves host memory")
    pair = make_pair(tp_sizes, (24, 16), ("NHD", "HND"))
    expect_all_moved(world, pair, run(world, pair, Play(wire="zmq")), "zmq")


INTERLEAVES = (((2, 1), (1, 1)), ((1, 1), (2, 8)), ((2, 8), (2, 1)))
"""Ranks that share the tokens, and in which runs; each value as (source, sink)."""


@pytest.mark.parametrize("interleaves", INTERLEAVES, ids=str)
@pytest.mark.parametrize("wire", ["auto", "zmq"])
def test_tokens_of_ranks_that_share_them(
    world: World, interleaves: tuple[tuple[int, int], ...], wire: str
) -> None:
    tp_sizes = tuple(size for size, _ in interleaves)
    if tp_sizes not in TP_PAIRS:
        pytest.skip("needs two ranks of each side")
    if wire == "zmq" and world.device.type == "cuda":
        pytest.skip("zmq moves host memory")
    pair = make_pair(tp_sizes, (16, 24), interleaves=interleaves)
    expect_all_moved(world, pair, run(world, pair, Play(wire=wire)), wire)


def expect_all_moved(world: World, pair: Pair, stories: Stories, wire: str) -> None:
    """Every request once at both ends, over this wire, and the ranks' numbers added up."""
    source, sink = stories.source, stories.sink
    assert sorted(source.sent) == sorted(prompt.source_id for prompt in pair.prompts)
    assert sorted(sink.received) == sorted(prompt.sink_id for prompt in pair.prompts)
    assert (sink.failed, source.received, sink.sent) == ({}, [], [])
    assert Counter(sink.stats.counts) == sink.rank_counts
    assert Counter(source.stats.counts) == source.rank_counts
    num_requests = len(pair.prompts)
    assert source.stats.counts["offers.done"] == num_requests * pair.source.tp_size
    assert sink.stats.counts["loads.accepted"] == num_requests * pair.sink.tp_size
    assert sink.stats.counts["loads.nbytes"] == pair.num_loaded_nbytes
    assert "io.errors" not in source.stats.counts.keys() | sink.stats.counts.keys()
    assert (source.stats.reasons, sink.stats.reasons) == ({}, {})
    assert Counter(report.request_id for report in sink.stats.loads) == {
        prompt.sink_id: pair.sink.tp_size for prompt in pair.prompts
    }
    wires = {report.transports for report in sink.stats.loads}
    if pair.sink.cp_size > 1:
        wires -= {()}  # none of a short prompt's tokens is this rank's
    assert wires == {(expected_wire(world, wire),)}
    assert sink.scheduler_stats is not None
    assert sink.scheduler_stats.counts == {"requests.loaded": num_requests}
