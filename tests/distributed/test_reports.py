"""What the first rank makes of all ranks' reports: late ones, failed ones, and their numbers."""

from __future__ import annotations

from collections import Counter

import pytest

from kvxfer.connector.records import ConnectorMetadata, EndOffer
from kvxfer.transfer.wire import Reason
from tests.distributed.content import Ask, Pair, make_pair
from tests.distributed.driver import Story
from tests.distributed.engine import RankEngine
from tests.distributed.play import Play, run
from tests.distributed.world import NUM_RANKS, UNDER_TORCHRUN, WHY_SKIPPED, Half, World

if not UNDER_TORCHRUN:
    pytest.skip(WHY_SKIPPED, allow_module_level=True)
if NUM_RANKS < 4:
    pytest.skip("two ranks of each engine are needed", allow_module_level=True)

ASKS = (Ask(40), Ask(70, 1), Ask(33))
FAILED = 1
"""The number of the request that fails, of those above."""


def test_a_request_is_finished_when_its_slowest_rank_is(world: World) -> None:
    pair = make_pair((2, 2), asks=ASKS)
    stories = run(world, pair, Play(sink_faults={1: "read:stall=300ms"}))
    sink = stories.sink
    assert sorted(sink.received) == [prompt.sink_id for prompt in pair.prompts]
    assert sink.failed == {}
    for prompt in pair.prompts:
        (first_step, first_rank), (last_step, last_rank) = sink.steps_of["received", prompt.sink_id]
        assert (first_rank, last_rank) == (0, 1)
        assert first_step < last_step
    expect_sent_once(pair, stories.source)


def test_a_load_that_fails_on_one_sink_rank_has_failed(world: World) -> None:
    pair = make_pair((2, 2), asks=ASKS)
    play = Play(sink_faults={1: f"read:fail;nth={FAILED + 1}"}, loads_per_step=1, until_ended=True)
    stories = run(world, pair, play)
    expect_one_failed(pair, stories.sink, Reason.READ_FAILED)
    expect_sent_once(pair, stories.source)


def test_an_offer_that_broke_on_one_source_rank_fails_the_request(world: World) -> None:
    pair = make_pair((2, 2), asks=ASKS)
    name = pair.prompts[FAILED].source_id

    def break_offer(engine: RankEngine) -> None:
        if engine.seat.team.half is Half.SOURCE and engine.seat.tp_rank == 1:
            order = EndOffer(name, engine.nonces[name], Reason.PREEMPTED)
            engine.worker.handle_preemptions(ConnectorMetadata(ended=(order,)))

    stories = run(world, pair, Play(between=break_offer, loads_per_step=1))
    expect_one_failed(pair, stories.sink, Reason.ENDED)
    expect_sent_once(pair, stories.source)
    assert stories.source.stats.counts["offers.broken"] >= 1
    assert stories.source.stats.reasons[Reason.PREEMPTED] == 1


def expect_one_failed(pair: Pair, sink: Story, reason: Reason) -> None:
    """Sink rank 1 has failed one request, rank 0 none; the engine is told of it by request."""
    failed = pair.prompts[FAILED].sink_id
    num_requests = len(pair.prompts)
    assert sorted(sink.received) == [prompt.sink_id for prompt in pair.prompts]
    assert sink.failed == {failed: reason}
    assert Counter(report.request_id for report in sink.stats.loads) == {
        prompt.sink_id: 2 for prompt in pair.prompts
    }
    assert [r.request_id for r in sink.stats.loads if r.reason == reason] == [failed]
    assert Counter(sink.stats.counts) == sink.rank_counts
    assert sink.stats.counts["loads.failed"] == 1
    assert sink.stats.counts["loads.accepted"] == 2 * num_requests - 1
    assert sink.stats.reasons == {reason: 1}
    assert sink.scheduler_stats is not None
    assert sink.scheduler_stats.counts == {"requests.loaded": num_requests - 1}
    assert sink.scheduler_stats.failed == {reason: 1}


def expect_sent_once(pair: Pair, source: Story) -> None:
    """All blocks came back, those of failed requests too."""
    assert sorted(source.sent) == [prompt.source_id for prompt in pair.prompts]
    assert Counter(source.stats.counts) == source.rank_counts
