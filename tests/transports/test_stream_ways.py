"""A pipe with two ways: which one a trial takes, and that transfers then go that way."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvxfer.config import Config
from kvxfer.errors import TransportUnavailable
from kvxfer.transfer.costs import Staging, WireCosts, Workload
from kvxfer.transports import stream_trial
from kvxfer.transports.base import LocalMemory, ReadDone, Trial, Wake
from kvxfer.transports.choice import choose
from kvxfer.transports.nixl_pipe import NixlPipe, NixlSinkLane
from kvxfer.transports.pipe import (
    CHUNK_S,
    DEVICE_STAGING,
    HOST_STAGING,
    Pipe,
    PipeBroken,
    Slots,
    StagingSize,
)
from kvxfer.transports.stream_sink import StreamSink
from kvxfer.transports.stream_trial import (
    LEAST_FURTHER_S,
    NUM_TURNS,
    best_way,
)
from kvxfer.transports.zmq_pipe import ZmqPipe
from tests.helpers import needs_nixl
from tests.transports.memory_pipe import MemoryPipe, MemorySinkLane, World
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
STEPS = 10
"""In which it comes: who waits looks at the clock behind each of them."""


class Clock:
    """It goes on only where a pipe has it go on."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    perf_counter = monotonic


class TimedLane(MemorySinkLane):
    """Its large messages take so long, in turn, by that clock."""

    def __init__(self, world: World, slots: Slots, way: str, wake: Wake, stage: Stage) -> None:
        super().__init__(world, slots, way)
        self._wake, self._stage, self._left_s = wake, stage, deque[float]()

    def announced(self, slot: int, generation: int, nbytes: int, parts: Sequence[Any]) -> None:
        if nbytes == SLOTS.slot_nbytes:
            took = self._stage.take(self.way)
            if isinstance(took, str):
                raise PipeBroken(took)
            self._left_s.extend([took / STEPS] * STEPS)
        super().announced(slot, generation, nbytes, parts)

    def poll(self) -> Sequence[int]:
        if not self._left_s:
            return super().poll()
        self._stage.clock.now_s += self._left_s.popleft()
        self._wake()
        return ()


class TimedPipe(MemoryPipe):
    def __init__(self, world: World, wake: Wake, stage: Stage) -> None:
        super().__init__(world, wake)
        self._stage = stage

    def open_sink(self, slots: Slots, way: str = "") -> MemorySinkLane:
        return TimedLane(self._world, slots, self.way_named(way), self._wake, self._stage)


class Stage:
    """A pair whose trial's large messages take so long on each way, or fail: the first of each, and
    then in each round.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, first: dict[str, Round], *rounds: dict[str, Round]
    ) -> None:
        self.clock, self.world = Clock(), World(ways=("usual", "other"))
        self.num_taken: Counter[str] = Counter()
        self._rounds = (first, *rounds)
        monkeypatch.setattr(stream_trial, "time", self.clock)
        use_pipe(monkeypatch, "ucx", lambda _, __, wake: TimedPipe(self.world, wake, self))

    def take(self, way: str) -> Round:
        self.num_taken[way] += 1
        return self._rounds[self.num_taken[way] - 1][way]

    @property
    def num_rounds(self) -> int:
        """Behind the first message of each."""
        return max(self.num_taken.values()) - 1

    def try_all(self, timeout_s: float = 2.0) -> Trial:
        with closing(Pair(msgspec.structs.replace(CONFIG, transport="ucx"))) as pair:
            try:
                return pair.trial(timeout_s)
            finally:
                pair.until(lambda: self.world.num_open == 0)


def both(usual: Round, other: Round) -> dict[str, Round]:
    return {"usual": usual, "other": other}


@pytest.mark.parametrize(
    ("rounds", "way", "num_rounds"),
    [
        # Over after 8 ms, or three rounds, where the usual one is not behind
        ([both(0.005, 0.005)], "usual", 1),
        ([both(0.001, 0.001)] * 3, "usual", 3),
        ([both(0.001, 0.00081)] * 3, "usual", 3),
        ([both(0.3, 0.001)], "other", NUM_TURNS),
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
    stage = Stage(monkeypatch, both(0.01, 0.01), *rounds, *more)
    trial = stage.try_all()
    assert (trial.way, stage.num_rounds) == (way, num_rounds)
    assert [lane.way for lane in stage.world.sinks.values()] == ["usual", "other"]
    assert trial.costs.message_s == CHUNK_S


@pytest.mark.parametrize(
    ("first", "timeout_s", "end"),
    [
        # The other one has as long as the usual one took, or this
        (both(0.01, LEAST_FURTHER_S - 0.01), 2.0, "other"),
        (both(0.01, LEAST_FURTHER_S + 0.01), 2.0, "usual"),
        (both(0.5, 0.49), 2.0, "other"),
        (both(0.5, 0.51), 2.0, "usual"),
        # But no more than half of what is left: the rest is for one that has begun
        (both(0.6, 0.19), 1.0, "other"),
        (both(0.6, 0.21), 1.0, "usual"),
        (both("no", 0.3), 2.0, "other"),
        (both("no", 1.99), 2.0, "other"),
        (both(0.3, "no"), 2.0, "usual"),
        (both("no", "neither"), 2.0, TransportUnavailable(": no$")),
        (both(9.9, 0.1), 2.0, TransportUnavailable("within 2 s, got none of")),  # nothing is left
    ],
)
def test_ways_that_fail_and_times(
    monkeypatch: pytest.MonkeyPatch,
    first: dict[str, Round],
    timeout_s: float,
    end: str | TransportUnavailable,
) -> None:
    """A way that has begun in time is taken where it is the faster one."""
    stage = Stage(monkeypatch, first, *[both(0.001, 0.0005)] * NUM_TURNS)
    if isinstance(end, TransportUnavailable):
        with pytest.raises(TransportUnavailable, match=str(end)):
            stage.try_all(timeout_s)
    else:
        assert stage.try_all(timeout_s).way == end


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


def test_a_trial_that_gets_no_bytes_is_over_in_time(pair: Pair, world: World) -> None:
    world.silent.update(world.ways)
    begin_s = time.monotonic()
    with pytest.raises(TransportUnavailable, match=r"within 0\.3 s, got none of them"):
        pair.trial(0.3)
    assert time.monotonic() - begin_s < 20


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


@pytest.mark.parametrize(
    ("device_types", "ways"),
    [
        ({"cpu"}, ("WRITE", "READ")),
        ({"cuda"}, ("WRITE",)),
        ({"cpu", "cuda"}, ("WRITE",)),
    ],
)
def test_no_sink_reads_by_nixl_where_a_gpu_is(device_types: set[str], ways: tuple[str]) -> None:
    """UCX would end the source's process if the sink were killed meanwhile."""
    pipe = NixlPipe.__new__(NixlPipe)  # its library is not needed for that
    assert tuple(pipe.ways_between(device_types)) == ways


def test_a_trial_takes_no_way_that_may_not_be_taken(pair: Pair, world: World) -> None:
    """Not even where it is the fastest."""
    world.large_s = {way: MOVES for way in world.ways if way != "other"}
    world.barred = {"other"}
    assert pair.trial().way == world.ways[0]


def test_a_gpu_has_room_for_what_the_trial_leaves_at_the_source() -> None:
    pipe = NixlPipe.__new__(NixlPipe)  # its library is not needed for that
    assert pipe.staging_size("cpu") == HOST_STAGING
    size = pipe.staging_size("cuda")
    assert size == StagingSize(192 * MIB, 64 * MIB, busy_slots=4)
    assert size.nbytes + 2 * (32 * MIB) == DEVICE_STAGING.nbytes


@contextmanager
def nixl_pair() -> Iterator[Pair]:
    pair = Pair(Config(transport="nixl", peer_silent_s=300.0, connect_timeout_s=300.0))
    yield pair
    pair.close()


@needs_nixl
@pytest.mark.parametrize("way", NixlPipe.ways)
def test_nixl_reads_or_writes_as_its_trial_says(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    _slow_but(way, monkeypatch)
    with nixl_pair() as nixl:
        _go_as_tried(nixl, way)


def _go_as_tried(nixl: Pair, way: str) -> None:
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


def _slow_but(good_way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pairs that are made after it every other way's messages are late by what a busy machine
    does not scatter.
    """

    class Slow(NixlPipe):
        def open_sink(self, slots: Slots, way: str = "") -> NixlSinkLane:
            lane = super().open_sink(slots, way)
            poll = lane.poll

            def late() -> Sequence[int]:
                if came := poll():
                    time.sleep(MOVES)
                return came

            if way != good_way:
                vars(lane)["poll"] = late
            return lane

    def make(memory: LocalMemory, config: Config, wake: Wake) -> Pipe:
        return Slow(memory.device, config)

    use_pipe(monkeypatch, "nixl", make)
