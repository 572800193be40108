"""Sums over the ranks on the engine's thread, while its loads are in flight."""

from __future__ import annotations

import pytest

from tests.distributed.content import make_pair
from tests.distributed.engine import NUM_SUMS_BESIDE
from tests.distributed.play import Play, expected_wire, run
from tests.distributed.world import NUM_RANKS, UNDER_TORCHRUN, WHY_SKIPPED, World, team_sizes

if not UNDER_TORCHRUN:
    pytest.skip(WHY_SKIPPED, allow_module_level=True)


def test_collectives_and_loads_do_not_disturb_each_other(world: World) -> None:
    # Each step begins one load, and its forward sums until every rank has ended its own, which it
    # holds for some sums.
    tp_size = team_sizes(NUM_RANKS)[-1]
    pair = make_pair((tp_size, tp_size))
    faults = dict.fromkeys(range(tp_size), "read:hold")
    play = Play(sink_faults=faults, loads_per_step=1, until_ended=True)
    sink = run(world, pair, play).sink
    assert sink.failed == {}
    assert sink.stats.counts["loads.nbytes"] == pair.num_loaded_nbytes
    assert {report.transports for report in sink.stats.loads} == {(expected_wire(world, "auto"),)}
    for step, prompt in enumerate(pair.prompts):
        sums_s = sink.collectives_s[step]
        reports = [each for each in sink.stats.loads if each.request_id == prompt.sink_id]
        assert len(reports) == tp_size
        for report in reports:
            # All ranks are on this host and read one clock, but these are the driver's moments: a
            # rank that has the last sum a little earlier may let its load go before the driver
            during = [s for s in sums_s if report.started_s < s < report.finished_s]
            assert len(during) >= NUM_SUMS_BESIDE - 1, f"{prompt.sink_id}: {len(sums_s)} sums"
            assert report.finished_s < sums_s[-1]
