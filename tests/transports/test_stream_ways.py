"""A pipe with two ways: which one a trial takes, and that transfers then go that way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from kvxfer.config import Config
from kvxfer.errors import TransportUnavailable
from kvxfer.transfer.costs import Staging, WireCosts, Workload
from kvxfer.transports import registry, stream_ways
from kvxfer.transports.base import ReadDone, Trial
from kvxfer.transports.nixl_pipe import NixlPipe
from kvxfer.transports.pipe import DEVICE_STAGING, HOST_STAGING, Pipe, Slots, StagingSize
from kvxfer.transports.probe import probe
from kvxfer.transports.stream_sink import StreamSink
from kvxfer.transports.stream_source import StreamSource
from kvxfer.transports.stream_trial import CHUNK_S, Measured, TrialTaker
from kvxfer.transports.stream_ways import (
    LEAST_FURTHER_S,
    NUM_AGAIN,
    TriedWay,
    best_way,
    further_slots,
    try_ways,
)
from kvxfer.transports.wake_up import WakeUp
from kvxfer.transports.zmq_pipe import ZmqPipe
from tests.helpers import needs_nixl
from tests.transports.memory_pipe import MemoryPipe, World
from tests.transports.pair import CONFIG, Pair, a_move, key_of

MIB = 1 << 20
COSTS = WireCosts(1e-4, 2e-4, 1e9)
SLOTS = Slots(5, 4 * MIB)
MOVES = 0.1
"""How much longer the slow way takes: several times what a busy machine scatters."""

# ------------------------------------------------------------------ which one, by hand


def tried(**large_ms: float) -> list[TriedWay]:
    return [TriedWay(way, COSTS, ms / 1e3, f"by {way}") for way, ms in large_ms.items()]


@pytest.mark.parametrize(
    ("large_ms", "best"),
    [
        ({"usual": 10.0}, "usual"),
        ({"usual": 10.0, "other": 30.0}, "usual"),
        ({"usual": 10.0, "other": 8.1}, "usual"),  # as may be by accident
        ({"usual": 10.0, "other": 8.0}, "other"),
        ({"usual": 10.0, "other": 1.0}, "other"),
        ({"usual": 10.0, "other": 7.0, "third": 6.0}, "third"),
        ({"other": 10.0, "third": 9.0}, "other"),  # the usual one does not work
    ],
)
def test_another_way_has_to_be_faster_by_a_margin(large_ms: dict[str, float], best: str) -> None:
    assert best_way(tried(**large_ms)).way == best


def test_further_ways_take_little_staging() -> None:
    assert further_slots(SLOTS) == Slots(2, 4 * MIB)
    assert further_slots(Slots(1, 7)) == Slots(1, 7)


class Takers:
    """Trials that take so long, or fail, on a clock that only they move. Their large messages take
    a tenth, or later what is in ``again``.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *runs: float | str) -> None:
        self.again: list[float | str] = [1.0 for _ in range(2 * NUM_AGAIN)]
        self.now_s = 0.0
        self.limits_s: list[float] = []
        self.opened: list[tuple[Slots, str]] = []
        self.num_open = 0
        self._runs = list(runs)
        monkeypatch.setattr(stream_ways, "TrialTaker", self._take)
        clock = SimpleNamespace(monotonic=lambda: self.now_s)
        monkeypatch.setattr(stream_ways, "time", clock)

    def _take(self, pipe: Pipe, link: object, wake: object, timeout_s: float) -> Any:
        self.limits_s.append(timeout_s)
        return self

    def run(self) -> Measured:
        run = self._runs.pop(0)
        if isinstance(run, str):
            raise TransportUnavailable(run)
        self.now_s += min(run, self.limits_s[-1])
        if run >= self.limits_s[-1]:
            raise TransportUnavailable("late")
        costs = replace(COSTS, bytes_per_s=1e6 / run, message_s=0.003 / len(self.limits_s))
        return Measured(costs, run / 10)

    def time_large(self, timeout_s: float) -> float:
        assert timeout_s == pytest.approx(2.0 - self.now_s)
        again = self.again.pop(0)
        if isinstance(again, str):
            raise TransportUnavailable(again)
        return again

    def try_all(self, timeout_s: float) -> Trial:
        def make_link(slots: Slots, way: str) -> Any:
            self.opened.append((slots, way))
            self.num_open += 1
            return self

        pipe = MemoryPipe(World(ways=("usual", "other")), lambda: None)
        try:
            return try_ways(pipe, make_link, SLOTS, cast("WakeUp", None), timeout_s)
        finally:
            assert self.num_open == 0

    path = "a path"

    def close(self) -> None:
        self.num_open -= 1


def test_the_other_way_is_tried_with_less_and_for_as_long_as_the_usual_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    takers = Takers(monkeypatch, 0.5, 0.25)
    trial = takers.try_all(2.0)
    # It has no burst: what a message costs is the usual way's
    assert trial == Trial(WireCosts(COSTS.latency_s, 0.003, 4e6), "a path", "other")
    assert takers.opened == [(SLOTS, "usual"), (Slots(2, 4 * MIB), "other")]
    assert takers.limits_s == [2.0, 0.5]


@pytest.mark.parametrize(
    ("again", "way"),
    [
        # the usual one, the other, and so on; before: 50 ms, 25 ms
        ([1.0, 1.0] * NUM_AGAIN, "other"),
        ([1.0, 1.0] * (NUM_AGAIN - 1) + [0.03, 1.0], "usual"),
        ([0.03, 1.0, 1.0, 0.02] + [1.0, 1.0] * (NUM_AGAIN - 2), "other"),
        ([1.0, "gone"], "usual"),
        (["gone"], "usual"),
    ],
)
def test_a_way_that_looks_faster_is_timed_again(
    monkeypatch: pytest.MonkeyPatch, again: list[float | str], way: str
) -> None:
    takers = Takers(monkeypatch, 0.5, 0.25)
    takers.again = [*again]
    assert takers.try_all(2.0).way == way
    assert not takers.again


def test_a_way_that_looks_slower_is_not_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    takers = Takers(monkeypatch, 0.25, 0.24)
    assert takers.try_all(2.0).way == "usual"
    assert len(takers.again) == 2 * NUM_AGAIN


@pytest.mark.parametrize(
    ("runs", "timeout_s", "limits_s", "end"),
    [
        ((0.01, 0.3), 2.0, [2.0, LEAST_FURTHER_S], "usual"),
        ((0.6, 9.9), 1.0, [1.0, 0.4], "usual"),  # both together
        (("no", 0.3), 2.0, [2.0, 2.0], "other"),
        ((0.3, "no"), 2.0, [2.0, 0.3], "usual"),
        (("no", "neither"), 2.0, [2.0, 2.0], TransportUnavailable("no")),
        ((9.9, 0.1), 2.0, [2.0], TransportUnavailable("late")),  # nothing is left
    ],
)
def test_ways_that_fail_and_times(
    monkeypatch: pytest.MonkeyPatch,
    runs: tuple[float | str, ...],
    timeout_s: float,
    limits_s: list[float],
    end: str | TransportUnavailable,
) -> None:
    takers = Takers(monkeypatch, *runs)
    if isinstance(end, TransportUnavailable):
        with pytest.raises(TransportUnavailable, match=f"^{end}$"):
            takers.try_all(timeout_s)
    else:
        assert takers.try_all(timeout_s).way == end
    assert takers.limits_s == pytest.approx(limits_s)
    assert takers.now_s <= timeout_s


# ------------------------------------------------------------------ over the stream engine


@pytest.fixture(params=[False, True], ids=["sink sees the end", "source sees the end"])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> World:
    world = World(is_write=request.param, ways=("usual", "other"))
    monkeypatch.setitem(registry.SOURCES, "ucx", partial(StreamSource, world.make_pipe))
    monkeypatch.setitem(registry.SINKS, "ucx", partial(StreamSink, world.make_pipe))
    return world


@pytest.fixture
def pair(world: World) -> Iterator[Pair]:
    pair = Pair(msgspec.structs.replace(CONFIG, transport="ucx"))
    yield pair
    pair.close()
    assert (world.num_open, world.num_pipes) == (0, 0)


@pytest.mark.parametrize("fast", ["usual", "other"])
def test_a_trial_takes_the_faster_way(pair: Pair, world: World, fast: str) -> None:
    world.large_s = {way: MOVES for way in world.ways if way != fast}
    trial = pair.trial()
    assert trial.way == fast
    assert 4 * MIB / trial.costs.bytes_per_s < MOVES / 2  # its own costs, not the other one's
    assert CHUNK_S <= trial.costs.message_s < 1
    lanes = list(world.sinks.values())
    assert [(lane.way, len(lane.parts)) for lane in lanes] == [("usual", 5), ("other", 2)]
    pair.until(lambda: world.num_open == 0)


@pytest.mark.parametrize(
    ("failing", "silent", "way"),
    [({"usual"}, set(), "other"), ({"other"}, set(), "usual"), (set(), {"other"}, "usual")],
)
def test_a_way_that_fails_is_left_out(
    pair: Pair, world: World, failing: set[str], silent: set[str], way: str
) -> None:
    world.failing, world.silent = failing, silent
    assert pair.trial().way == way
    pair.until(lambda: world.num_open == 0)


def test_a_trial_without_any_way_says_why_the_usual_one_failed(pair: Pair, world: World) -> None:
    world.failing.update(world.ways)
    with pytest.raises(TransportUnavailable, match="no way usual"):
        pair.trial()


def test_a_trial_that_gets_no_answer_is_over_in_time(pair: Pair, world: World) -> None:
    world.silent.update(world.ways)
    begin_s = time.monotonic()
    with pytest.raises(TransportUnavailable, match=r"within 0\.3 s, got no answer"):
        pair.trial(0.3)
    assert time.monotonic() - begin_s < 2


@pytest.mark.parametrize(
    ("staging", "way"),
    [
        (None, "usual"),
        (Staging(4, MIB, None), "usual"),
        (Staging(4, MIB, None, "usual"), "usual"),
        (Staging(4, MIB, None, "other"), "other"),
    ],
)
def test_transfers_go_the_way_of_the_staging(
    pair: Pair, world: World, staging: Staging | None, way: str
) -> None:
    pair.sink.attach(pair.manifest, staging)
    assert [lane.way for lane in world.sinks.values()] == [way]
    pair.start(key_of(1), a_move())
    assert isinstance(pair.end(key_of(1)), ReadDone)
    assert pair.content() == pair.expected(a_move())


def test_the_choice_keeps_the_way_of_the_trial(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamSink, "trial", lambda *_: Trial(COSTS, "a path", "other"))
    choice = probe(pair.sinks, pair.manifest, Workload(64 * MIB, 4096))
    assert choice.staging is not None
    assert (choice.staging.way, choice.trial.path) == ("other", "a path")


# ------------------------------------------------------------------ real pipes


def test_a_way_that_a_pipe_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"zmq: way: expected one of \('',\), got 'READ'"):
        ZmqPipe().open_sink(SLOTS, "READ")


def test_a_gpu_has_room_for_what_the_trial_leaves_at_the_source() -> None:
    pipe = NixlPipe.__new__(NixlPipe)  # its library is not needed for that
    assert pipe.staging_size("cpu") == HOST_STAGING
    size = pipe.staging_size("cuda")
    assert size == StagingSize(192 * MIB, 64 * MIB, busy_slots=4)
    assert size.nbytes + 2 * (32 * MIB) == DEVICE_STAGING.nbytes


@pytest.fixture
def nixl() -> Iterator[Pair]:
    pair = Pair(Config(transport="nixl", peer_silent_s=1.0, connect_timeout_s=2.0))
    yield pair
    pair.close()


@needs_nixl
@pytest.mark.parametrize("way", NixlPipe.ways)
def test_nixl_reads_or_writes_as_its_trial_says(
    nixl: Pair, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    seen = _slow_but(way, monkeypatch)
    trial = nixl.trial()
    assert seen == ["WRITE", "READ"]
    assert (trial.way, trial.path) == (way, way)
    assert 1e6 < trial.costs.bytes_per_s < 1e12
    nixl.sink.attach(nixl.manifest, Staging(4, MIB, None, trial.way))
    for number in (1, 2):
        nixl.sink_pool.tensor.fill_(0xEE)
        nixl.start(key_of(number), a_move(number))
        assert isinstance(nixl.end(key_of(number)), ReadDone)
        assert nixl.content() == nixl.expected(a_move(number))
    sink = nixl.sink
    assert isinstance(sink, StreamSink)
    assert [link.path for link in sink._links.all()] == [way]


def _slow_but(way: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every other way's trial finds a second for its large messages. The ways that are tried."""
    run: Callable[[TrialTaker], Measured] = TrialTaker.run
    again: Callable[[TrialTaker, float], float] = TrialTaker.time_large
    seen: list[str] = []

    def slow(taker: TrialTaker) -> Measured:
        measured = run(taker)
        seen.append(taker._link.path)
        return measured if seen[-1] == way else replace(measured, large_s=1.0)

    def slow_again(taker: TrialTaker, timeout_s: float) -> float:
        large_s = again(taker, timeout_s)
        return large_s if taker._link.path == way else 1.0

    monkeypatch.setattr(TrialTaker, "run", slow)
    monkeypatch.setattr(TrialTaker, "time_large", slow_again)
    return seen
