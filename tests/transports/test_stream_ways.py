"""A pipe with two ways: which one a trial takes, and that transfers then go that way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvxfer.config import Config
from kvxfer.errors import TransportUnavailable
from kvxfer.transfer.costs import Staging, WireCosts, Workload
from kvxfer.transports import stream_trial
from kvxfer.transports.base import ReadDone, Trial
from kvxfer.transports.choice import choose
from kvxfer.transports.nixl_pipe import NixlPipe
from kvxfer.transports.pipe import CHUNK_S, DEVICE_STAGING, HOST_STAGING, Pipe, Slots, StagingSize
from kvxfer.transports.stream_link import Terms
from kvxfer.transports.stream_sink import StreamSink
from kvxfer.transports.stream_trial import (
    LEAST_FURTHER_S,
    NUM_TURNS,
    TrialTaker,
    best_way,
    take_trial,
)
from kvxfer.transports.zmq_pipe import ZmqPipe
from tests.helpers import needs_nixl
from tests.transports.memory_pipe import MemoryPipe, World
from tests.transports.pair import CONFIG, Pair, a_move, key_of, link_of
from tests.wires import use_pipe, use_sink

MIB = 1 << 20
COSTS = WireCosts(1e-4, 2e-4, 1e9)
SLOTS = Slots(2, 4 * MIB)
MOVES = 0.1
"""How much longer the slow way takes: several times what a busy machine scatters."""

# ------------------------------------------------------------------ which one, by hand


def tried(**large_ms: float) -> list[Any]:
    return [SimpleNamespace(way=way, large_s=ms / 1e3) for way, ms in large_ms.items()]


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


Round = float | str
"""What a large message takes, or why it does not come."""


class Takers:
    """Of a trial whose ways begin within so long, or fail, and whose large messages then take so
    long in each round, on a clock that only they move.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, begins: dict[str, Round], *rounds: dict[str, Round]
    ) -> None:
        self.now_s = 0.0
        self.limits_s: list[float] = []
        self.opened: list[tuple[Slots, str]] = []
        self.num_open = self.num_rounds = 0
        self._rounds = [begins, *rounds]
        clock = SimpleNamespace(monotonic=lambda: self.now_s, perf_counter=lambda: self.now_s)
        monkeypatch.setattr(stream_trial, "time", clock)
        monkeypatch.setattr(stream_trial, "Link", self._open)
        monkeypatch.setattr(TrialTaker, "__init__", self._make)
        monkeypatch.setattr(TrialTaker, "begin", lambda taker, limit: self._begin(taker, limit))
        monkeypatch.setattr(TrialTaker, "time_round", lambda taker, left: self._time(taker, left))

    def _open(self, pipe: Pipe, terms: Terms, *_: object, **__: object) -> Any:
        self.opened.append((terms.slots, terms.way))
        self.num_open += 1
        return self

    def close(self) -> None:
        self.num_open -= 1

    def _make(self, pipe: Pipe, link: object, wake: object, way: str) -> None:
        """In place of its own."""

    def _begin(self, taker: Any, limit_s: float) -> None:
        self.limits_s.append(limit_s)
        taker.way, taker.path, taker.large_s, taker.num_rounds = self.opened[-1][1], "", 9.9, 0
        took = self._rounds[0][taker.way]
        if isinstance(took, str):
            raise TransportUnavailable(took)
        self.now_s += min(took, limit_s)
        if took >= limit_s:
            raise TransportUnavailable("late")

    def _time(self, taker: Any, left_s: float) -> None:
        assert left_s == pytest.approx(self.timeout_s - self.now_s)
        taker.num_rounds += 1
        took = self._rounds[taker.num_rounds][taker.way]
        if isinstance(took, str):
            raise TransportUnavailable(took)
        self.now_s += took
        taker.large_s = min(taker.large_s, took)
        taker.costs = lambda message_s: replace(COSTS, message_s=message_s)
        self.num_rounds = max(taker.num_rounds, self.num_rounds)

    def try_all(self, timeout_s: float = 2.0) -> Trial:
        pipe = MemoryPipe(World(ways=("usual", "other")), lambda: None)
        nothing: Any = None
        self.timeout_s = timeout_s
        try:
            return take_trial(
                *(pipe, nothing, {"cpu"}, nothing, nothing, nothing, timeout_s),
                uses_unix_sockets=True,
            )
        finally:
            assert self.num_open == 0


def both(usual: Round, other: Round) -> dict[str, Round]:
    return {"usual": usual, "other": other}


@pytest.mark.parametrize(
    ("rounds", "way", "num_rounds"),
    [
        # Over after 8 ms, or three rounds, where the usual one is not behind
        ([both(0.005, 0.005)], "usual", 1),
        ([both(0.001, 0.001)] * 3, "usual", 3),
        ([both(0.001, 0.00081)] * 3, "usual", 3),
        ([both(0.5, 0.001)], "other", NUM_TURNS),
        # Another one has to be ahead in each of five
        ([both(0.05, 0.025)] * NUM_TURNS, "other", NUM_TURNS),
        ([both(0.05, 0.025)] * (NUM_TURNS - 1) + [both(0.03, 0.1)], "usual", NUM_TURNS),
        ([both(0.05, 0.025), both(0.03, 0.1)], "usual", 2),
        ([both(0.05, 0.025), both(0.03, 0.02)] + [both(1e-1, 1e-1)] * 3, "other", NUM_TURNS),
        # One that fails is left out
        ([both(0.05, 0.025), both(0.05, "gone")], "usual", 2),
        ([both(0.001, 0.05), both("gone", 0.05)], "usual", 1),
        ([both(0.05, 0.025), both("gone", 0.025)], "other", 2),
    ],
)
def test_ways_are_timed_in_turn_until_the_faster_one_is_known(
    monkeypatch: pytest.MonkeyPatch, rounds: list[dict[str, Round]], way: str, num_rounds: int
) -> None:
    more = [rounds[-1]] * (NUM_TURNS - len(rounds))
    takers = Takers(monkeypatch, both(0.01, 0.01), *rounds, *more)
    trial = takers.try_all()
    assert (trial.way, takers.num_rounds) == (way, num_rounds)
    assert takers.opened == [(SLOTS, "usual"), (SLOTS, "other")]
    assert trial.costs == replace(COSTS, message_s=CHUNK_S)


@pytest.mark.parametrize(
    ("begins", "timeout_s", "limits_s", "end"),
    [
        (both(0.01, 0.3), 2.0, [2.0, LEAST_FURTHER_S], "usual"),
        (both(0.5, 0.49), 2.0, [2.0, 0.5], "usual"),
        (both(0.6, 9.9), 1.0, [1.0, 0.4], "usual"),  # both together
        (both("no", 0.3), 2.0, [2.0, 2.0], "other"),
        (both(0.3, "no"), 2.0, [2.0, 0.3], "usual"),
        (both("no", "neither"), 2.0, [2.0, 2.0], TransportUnavailable("no")),
        (both(9.9, 0.1), 2.0, [2.0], TransportUnavailable("late")),  # nothing is left
    ],
)
def test_ways_that_fail_and_times(
    monkeypatch: pytest.MonkeyPatch,
    begins: dict[str, Round],
    timeout_s: float,
    limits_s: list[float],
    end: str | TransportUnavailable,
) -> None:
    takers = Takers(monkeypatch, begins, both(0.01, 0.01))
    if isinstance(end, TransportUnavailable):
        with pytest.raises(TransportUnavailable, match=f"^{end}$"):
            takers.try_all(timeout_s)
    else:
        assert takers.try_all(timeout_s).way == end
    assert takers.limits_s == pytest.approx(limits_s)
    assert takers.now_s <= timeout_s + 0.02


# ------------------------------------------------------------------ over the stream engine


@pytest.fixture(params=[False, True], ids=["sink sees the end", "source sees the end"])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> World:
    world = World(is_write=request.param, ways=("usual", "other"))
    use_pipe(monkeypatch, "ucx", world.make_pipe)
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
    assert trial.costs.message_s == CHUNK_S
    lanes = list(world.sinks.values())
    assert [(lane.way, len(lane.parts)) for lane in lanes] == [("usual", 2), ("other", 2)]
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


class TriedTheOther(StreamSink):
    def trial(self, *_: object) -> Trial:
        return Trial(COSTS, "a path", "other")


@pytest.fixture
def tried_the_other(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trials of a pair that is made after it."""
    use_sink(monkeypatch, "ucx", partial(TriedTheOther, world.make_pipe))


def test_the_choice_keeps_the_way_of_the_trial(tried_the_other: None, pair: Pair) -> None:
    choice = choose(pair.sinks, pair.manifest, Workload(64 * MIB, 4096))
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
    _slow_but(way, monkeypatch)
    trial = nixl.trial()
    assert (trial.way, trial.path) == (way, way)
    assert 1e6 < trial.costs.bytes_per_s < 1e12
    nixl.sink.attach(nixl.manifest, Staging(4, MIB, None, trial.way))
    for number in (1, 2):
        nixl.sink_pool.tensor.fill_(0xEE)
        nixl.start(key_of(number), a_move(number))
        assert isinstance(nixl.end(key_of(number)), ReadDone)
        assert nixl.content() == nixl.expected(a_move(number))
    assert link_of(nixl).path == way


def _slow_but(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other way's large messages take a second."""
    time_round: Callable[[TrialTaker, float], None] = TrialTaker.time_round

    def timed(taker: TrialTaker, timeout_s: float) -> None:
        time_round(taker, timeout_s)
        if taker.way != way:
            taker.large_s = 1.0

    monkeypatch.setattr(TrialTaker, "time_round", timed)
