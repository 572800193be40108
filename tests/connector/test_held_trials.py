"""What a trial leaves open belongs to somebody at each moment of a first contact."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from kvxfer.transfer.manifest import RankManifest
from kvxfer.transfer.plan import CopyClass
from kvxfer.transports.base import Trial
from kvxfer.transports.shm_direct import ShmSink
from tests.builders import EngineShape
from tests.connector.rig import POISON, Engine, until
from tests.helpers import Opened
from tests.wires import use_sink

SHAPE = EngineShape(num_kv_heads=4, num_blocks=64)
TWO_RANKS = EngineShape(tp_size=2, num_kv_heads=4, num_blocks=64)
TOKENS = 256


class Trials:
    """Those of all ranks; each waits for ``go`` before it ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened: list[Opened] = []
        self.attached: list[Opened] = []
        self.go, self.has_begun = threading.Event(), threading.Event()
        self.go.set()
        self.fails_at = 0  # the attach of that number; the first is 1
        self.others_fail = False
        trials = self

        class Held(ShmSink):
            def trial(
                self, source: RankManifest, timeout_s: float, classes: Sequence[CopyClass] = ()
            ) -> Trial:
                if trials.others_fail and trials.opened:
                    raise ZeroDivisionError
                costs = super().trial(source, timeout_s).costs
                trials.has_begun.set()
                assert trials.go.wait(120)
                trials.opened.append(Opened())
                return Trial(costs, held=(trials.opened[-1],))

            def attach(self, source: RankManifest, trial: Trial | None = None) -> None:
                assert trial is not None
                (opened,) = trial.held
                assert isinstance(opened, Opened)
                trials.attached.append(opened)
                if len(trials.attached) == trials.fails_at:
                    raise RuntimeError("no room")
                super().attach(source)

        use_sink(monkeypatch, "shm", Held)

    def all_closed(self) -> bool:
        """Something was opened, and none of it is open."""
        return bool(self.opened) and not any(each.is_open for each in self.opened)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Trials:
    return Trials(monkeypatch)


@contextmanager
def engines(shape: EngineShape = SHAPE) -> Iterator[tuple[Engine, Engine]]:
    with (
        Engine(shape, "prefill", fill=1, transport="shm") as source,
        Engine(SHAPE, "decode", fill=POISON, transport="shm") as sink,
    ):
        yield source, sink


def begin(source: Engine, sink: Engine) -> None:
    blocks = range(TOKENS // 16)
    ref = source.offer("p", TOKENS, blocks)
    source.compute("p")
    sink.load("d", ref, blocks, (0, TOKENS))


def test_the_wire_that_is_attached_gets_it_open(trials: Trials) -> None:
    with engines(TWO_RANKS) as (source, sink):
        begin(source, sink)
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {None}
        assert trials.attached == trials.opened
        assert [each.is_open for each in trials.opened] == [True, True]


def test_an_attach_that_fails_has_it_and_the_others_are_closed(trials: Trials) -> None:
    trials.fails_at = 1
    with engines(TWO_RANKS) as (source, sink):
        begin(source, sink)
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"transport"}
        until(lambda: not trials.opened[1].is_open)
        assert trials.attached == trials.opened[:1]
        assert trials.opened[0].is_open  # the wire's own to close


def test_a_peer_that_is_over_when_its_trial_ends(trials: Trials) -> None:
    trials.go.clear()
    with engines() as (source, sink):
        begin(source, sink)
        assert trials.has_begun.wait(120)
        source.close()
        until(lambda: sink.received("d"))
        assert sink.reasons("d") <= {"peer_lost", "shutdown"}
        trials.go.set()
        until(trials.all_closed)
        assert not trials.attached


def test_a_rank_that_is_shut_down_before_its_trial_ends(trials: Trials) -> None:
    trials.go.clear()
    with engines() as (source, sink):
        begin(source, sink)
        assert trials.has_begun.wait(120)
        sink.close()
        trials.go.set()
        until(trials.all_closed)
        assert not trials.attached


def test_a_trial_of_another_rank_that_fails(trials: Trials) -> None:
    trials.others_fail = True
    with engines(TWO_RANKS) as (source, sink):
        begin(source, sink)
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"transport"}
        until(trials.all_closed)
