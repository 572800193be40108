"""Loads that the engine's thread begins and ends itself, in the IO thread's place: which, and that
it leaves sockets alone. The wire is cuda_ipc, which launches and waits for nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from kvxfer.connector import io_thread, worker_side
from kvxfer.connector.control import ControlClient
from kvxfer.connector.io_thread import IoThread
from kvxfer.connector.peer import Peer
from kvxfer.connector.records import (
    AbortLoad,
    ConnectorMetadata,
    EndOffer,
    Hold,
    NewLoad,
    NewOffer,
    OfferBlocks,
    SourceRef,
    Unhold,
)
from kvxfer.connector.sink import QUICK_IDS, Sink
from kvxfer.connector.source import Source
from kvxfer.transfer.wire import Pull, Reason
from kvxfer.transports.base import DirectSink, SinkTransport
from tests.builders import EngineShape, build_manifest
from tests.connector.rig import (
    DIGEST,
    POISON,
    Engine,
    expect_copied,
    has_foreseen,
    io_thread_of,
    live_offers,
    pass_s,
    service_of,
    until,
    wires_of,
)

SHAPE = EngineShape(num_kv_heads=2, num_blocks=32)
TWO = EngineShape(tp_size=2, num_kv_heads=2, num_blocks=32)


class Watch:
    """Which threads begin reads, report loads, and touch sockets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began: list[str] = []
        self.reported: list[str] = []
        self.touched: set[str] = set()
        self.engine = threading.current_thread().name
        self._patch = monkeypatch
        self.note(Sink, "_report", self.reported.append)
        for name in ("__init__", "send", "close", "_read", "_look"):
            self.note(ControlClient, name, self.touched.add)

    def wire(self, engine: Engine) -> SinkTransport:
        (wire,) = wires_of(engine).values()
        begins = "submit_read" if isinstance(wire, DirectSink) else "submit_expect"
        self.note(type(wire), begins, self.began.append)
        return wire

    def note(self, kind: type, name: str, note: Any) -> None:
        """Note the thread of each call."""
        self.note_calls(kind, name, lambda _: note(threading.current_thread().name))

    def note_calls(self, kind: type, name: str, note: Any) -> None:
        """Note each call, with its arguments, before it is made."""
        inner = vars(kind)[name]

        def noted(*arguments: Any, **named: Any) -> Any:
            note(arguments)
            return inner(*arguments, **named)

        self._patch.setattr(kind, name, noted)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    watch = Watch(monkeypatch)
    yield watch
    assert watch.engine not in watch.touched


class Two:
    """A source and a sink, which have met or are to."""

    def __init__(self, source: Engine, sink: Engine, *, have_met: bool = True) -> None:
        self.source, self.sink = source, sink
        self.io_thread = io_thread_of(sink)
        self._num = 0
        if have_met:
            self.move()
        borrow = self.io.borrow

        def wait_and_borrow(*, sees_through: bool = False) -> bool:
            """It may be amid a round, on a busy machine for long; then nothing would be quick."""
            until(lambda: borrow(sees_through=sees_through))
            return True

        vars(self.io)["borrow"] = wait_and_borrow

    def offered(self) -> tuple[str, Any]:
        self._num += 1
        name = f"r{self._num}"
        ref = self.source.offer(name, 32, [1, 2])
        self.source.compute(name)
        num_posted = self._num * len(self.source.workers)
        if self.source.config.offer_board and self.source.config.transport == "cuda_ipc":
            until(lambda: self.source.count("board.posted") == num_posted)
        return name, ref

    @property
    def io(self) -> IoThread:
        return service_of(self.sink).io

    def begin(self, hold: bool = False) -> str:
        name, ref = self.offered()
        self.sink.load(name, ref, [3, 4], (0, 32), hold=hold)
        return name

    @contextmanager
    def begun_unheard(self) -> Iterator[str]:
        """A load of which nobody tells the IO thread until the end."""
        name, ref = self.offered()
        with self.io_asleep():
            self.sink.load(name, ref, [3, 4], (0, 32))
            yield name

    @contextmanager
    def io_asleep(self) -> Iterator[None]:
        """The sink's IO thread sleeps, whatever would wake it: a timer, a socket, the engine."""
        sleeps, may_wake = threading.Event(), threading.Event()
        poll = zmq.Poller.poll

        def sleep(poller: zmq.Poller, timeout_ms: int | None = None) -> list[tuple[Any, int]]:
            if threading.current_thread() is not self.io_thread:
                return poll(poller, timeout_ms)
            sleeps.set()
            may_wake.wait()
            return poll(poller, 0)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(zmq.Poller, "poll", sleep)
            self.io.wake()
            try:
                assert sleeps.wait(60)
                yield
            finally:
                may_wake.set()

    def move(self, hold: bool = False) -> None:
        name = self.begin(hold)
        until(lambda: self.sink.received(name))
        assert self.sink.reasons(name) == {None}
        until(lambda: self.source.sent(name))


def load_of(name: str, source: SourceRef, ids: tuple[int, ...]) -> NewLoad:
    """The order for all of an offer's tokens."""
    return NewLoad(request_id=name, source=source, token_lo=0, token_hi=32, block_ids=(ids,))


def engines(wire: str = "cuda_ipc", shape: EngineShape = SHAPE, **settings: Any) -> Any:
    return (
        Engine(shape, "prefill", fill=None, transport=wire, **settings),
        Engine(SHAPE, "decode", fill=POISON, transport=wire, **settings),
    )


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("shape", [SHAPE, TWO], ids=["one rank", "two ranks"])
def test_the_engine_begins_what_is_quick(watch: Watch, shape: EngineShape, hold: bool) -> None:
    source, sink = engines(shape=shape)
    with source, sink:
        watch.wire(sink)
        two = Two(source, sink)
        first = watch.began.copy()
        assert set(first) == {two.io_thread.name}  # it had to be met
        for _ in range(3):
            two.move(hold)
        assert watch.began[len(first) :] == [watch.engine] * (3 * len(first))
        expect_copied(source, sink, [1, 2], [3, 4], (0, 32))
        assert sink.count("board.verdicts") == 4 * len(source.workers)


@pytest.mark.parametrize("in_step", [True, False])
@pytest.mark.parametrize("foresees", [True, False])
@pytest.mark.parametrize(
    "settings", [{}, {"offer_board": False}, {"verify": "all"}], ids=["", "no board", "verified"]
)
def test_the_io_thread_sleeps_while_the_engine_sees_its_load_through(
    settings: dict[str, Any],
    foresees: bool,
    in_step: bool,
    watch: Watch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else both would want the interpreter while the step is launched. It is woken for a Pull whose
    answer is waited for, for digests, and for a load that the step does not wait for. A source
    foresees the digests of loads that are like those before.
    """
    sleeps = in_step and not settings
    is_shown = not settings or ("verify" in settings and foresees)
    woken: list[str] = []
    said: list[tuple[str, type]] = []
    watch.note(IoThread, "wake", woken.append)
    watch.note_calls(
        Peer, "send", lambda call: said.append((threading.current_thread().name, type(call[2])))
    )
    source, sink = engines(**settings)
    with source, sink:
        two = Two(source, sink)
        monkeypatch.setattr(io_thread, "LEISURE_S", 3600.0)
        monkeypatch.setattr(worker_side, "LATE_S", 300.0)
        (worker,) = sink.workers
        for token_lo in (0, 0, 0) if foresees else (8, 16, 24):
            name, ref = two.offered()
            if is_shown and settings:
                until(lambda: [has_foreseen(each) for each in live_offers(source)] == [True])
            load = load_of(name, ref, (3, 4))
            load = msgspec.structs.replace(load, token_lo=token_lo, in_step=in_step)
            until(lambda: not two.io._is_wanted)  # by the last wake: who borrows would pass it on
            woken.clear()
            said.clear()
            worker.bind_connector_metadata(ConnectorMetadata(loads=(load,)))
            worker.start_load_kv()
            worker.wait_for_save()
            until(lambda name=name: (sink.collect(), sink.received(name))[1])  # type: ignore[misc]
            assert sink.reasons(name) == {None}
            if settings.keys() != {"verify"}:  # digests are told by whoever has made them
                assert (watch.engine in woken) != sleeps
            assert ((watch.engine, Pull) in said) != is_shown
            two.io.wake()  # a timer's round may have come before
            until(lambda name=name: source.sent(name))  # type: ignore[misc]
        expect_copied(source, sink, [1, 2], [3, 4], (0, 32))


@pytest.mark.parametrize("has_board", [True, False])
def test_an_answer_behind_the_boards_own_is_no_problem(has_board: bool, watch: Watch) -> None:
    """A source answers the Pull and the Release that its board has answered. What comes of a load
    that is over is one all the same where no board has spoken.
    """
    heard: list[Any] = []
    watch.note_calls(Sink, "on_message", heard.append)
    source, sink = engines(offer_board=has_board)
    with source, sink:
        two = Two(source, sink, have_met=False)
        two.move()
        two.move()
        until(lambda: len(heard) == 4)  # a Grant and a Verdict each
        done = threading.Event()
        two.io.post(Sink.on_message, *heard[-1])
        two.io.post(done.set)  # behind all that was heard
        assert done.wait(60)
        assert sink.count("board.verdicts") == (2 if has_board else 0)
        assert sink.count("control.late") == (0 if has_board else 1)


def test_the_engine_notes_the_end_of_a_load_while_nobody_wakes_the_io_thread(
    watch: Watch,
) -> None:
    source, sink = engines()
    with source, sink:
        two = Two(source, sink)
        with two.begun_unheard() as name:
            sink.collect()
            assert sink.received(name)
        assert watch.reported[-1] == watch.engine
        assert sink.reasons(name) == {None}
        until(lambda: source.sent(name))  # the Pull and the Release have left in the end


def test_who_waits_notes_it_as_well(watch: Watch) -> None:
    source, sink = engines()
    with source, sink:
        two = Two(source, sink)
        with two.begun_unheard() as name:
            assert sink.workers[0].wait_for_activity(0.0)
        assert watch.reported[-1] == watch.engine
        assert sink.received(name)


@pytest.mark.parametrize("wire", ["shm", "zmq"])
def test_the_io_thread_begins_what_copies_or_sends(watch: Watch, wire: str) -> None:
    source, sink = engines(wire)
    with source, sink:
        watch.wire(sink)
        two = Two(source, sink, have_met=False)
        for _ in range(3):
            two.move()
        assert set(watch.began) == {two.io_thread.name}
        assert set(watch.reported) == {two.io_thread.name}


def test_the_io_thread_begins_loads_of_many_ids(watch: Watch) -> None:
    shape = EngineShape(num_kv_heads=1, num_layers=1, block_tokens=1, num_blocks=QUICK_IDS + 2)
    settings: dict[str, Any] = {"transport": "cuda_ipc"}
    with (
        Engine(shape, "prefill", fill=None, **settings) as source,
        Engine(shape, "decode", fill=POISON, **settings) as sink,
    ):
        watch.wire(sink)
        two = Two(source, sink, have_met=False)
        for number, num_tokens in enumerate((32, QUICK_IDS, QUICK_IDS + 1)):
            ids = range(1, num_tokens + 1)
            ref = source.offer(f"r{number}", num_tokens, ids)
            source.compute(f"r{number}")
            until(lambda: source.count("board.posted") == number + 1)  # noqa: B023
            sink.load(f"r{number}", ref, ids, (0, num_tokens))
            until(lambda: sink.received(f"r{number}"))  # noqa: B023
            assert sink.reasons(f"r{number}") == {None}
        assert watch.began == [two.io_thread.name, watch.engine, two.io_thread.name]


@pytest.mark.parametrize(("num_loads", "is_quick"), [(4, True), (5, False)])
def test_the_engine_begins_few_loads_of_a_step(
    watch: Watch, num_loads: int, is_quick: bool
) -> None:
    source, sink = engines()
    with source, sink:
        watch.wire(sink)
        two = Two(source, sink)
        offered = [two.offered() for _ in range(num_loads)]
        watch.began.clear()
        loads = tuple(
            load_of(name, ref, (2 * number + 5, 2 * number + 6))
            for number, (name, ref) in enumerate(offered)
        )
        sink.step(ConnectorMetadata(loads=loads))
        for name, _ in offered:
            until(lambda name=name: sink.received(name))  # type: ignore[misc]
            assert sink.reasons(name) == {None}
        who = watch.engine if is_quick else two.io_thread.name
        assert watch.began == [who] * num_loads


def test_a_hold_of_an_engine_that_is_not_allowed_comes_with_a_quick_load(watch: Watch) -> None:
    """It ends at once, and what was deferred before it leaves all the same, by the IO thread."""
    source, sink = engines(allowed_peers=("127.0.0.1",))
    with source, sink:
        watch.wire(sink)
        two = Two(source, sink)
        name, ref = two.offered()
        stranger = msgspec.structs.replace(ref, engine_id="stranger", endpoint="tcp://10.0.0.1:9")
        load = load_of(name, ref, (3, 4))
        watch.began.clear()
        sink.step(
            ConnectorMetadata(loads=(load,), holds=(Hold(name, ref), Hold("other", stranger)))
        )
        assert watch.began == [watch.engine]
        until(lambda: sink.received(name))
        assert sink.reasons(name) == {None}
        until(lambda: source.sent(name))
        assert sink.count("peers.not_allowed") == 1


def test_the_io_thread_begins_loads_over_other_wires_of_the_same_rank(watch: Watch) -> None:
    source, sink = engines()
    with source, sink:
        vars(watch.wire(sink))["is_quick"] = False
        two = Two(source, sink)
        two.move()
        assert set(watch.began) == {two.io_thread.name}


def test_the_io_thread_has_the_orders_of_a_step_that_also_offers(watch: Watch) -> None:
    source, sink = engines()
    with source, sink:
        watch.wire(sink)
        two = Two(source, sink)
        name, ref = two.offered()
        added: list[str] = []
        watch.note(Source, "add", added.append)
        watch.began.clear()
        load = load_of(name, ref, (3, 4))
        offer = NewOffer(request_id="p", nonce=b"n" * 16, num_tokens=1, digest=DIGEST)
        blocks = OfferBlocks("p", ((1,),))
        sink.step(ConnectorMetadata(loads=(load,), offers=(offer,), blocks=(blocks,)))
        until(lambda: sink.received(name))
        assert sink.reasons(name) == {None}
        assert added == watch.began == [two.io_thread.name]


def test_wires_without_loads_are_not_looked_at(watch: Watch) -> None:
    source, sink = engines()
    with source, sink:
        two = Two(source, sink)
        vars(two.io)["borrow"] = lambda **_: pytest.fail("nothing is on its way")
        borrower = service_of(sink).borrower
        assert borrower is not None
        borrower.look()


def test_an_offer_that_no_board_shows_is_asked_for_by_the_io_thread(watch: Watch) -> None:
    source, sink = engines(offer_board=False)
    with source, sink:
        watch.wire(sink)
        two = Two(source, sink, have_met=False)
        for _ in range(3):
            two.move()
        expect_copied(source, sink, [1, 2], [3, 4], (0, 32))


def test_an_offer_that_is_over_is_refused_by_name(watch: Watch) -> None:
    source, sink = engines()
    with source, sink:
        two = Two(source, sink)
        name, ref = two.offered()
        source.end(name)
        sink.load(name, ref, [3, 4], (0, 32), hold=True)
        until(lambda: sink.received(name))
        assert sink.reasons(name) <= {"ended", "aborted"}
        two.move()


def test_a_wire_that_does_not_know_the_source_any_more_ends_the_peer_and_it_is_met_anew(
    watch: Watch,
) -> None:
    source, sink = engines()
    with source, sink:
        wire = watch.wire(sink)
        two = Two(source, sink)
        (entry,) = source.manifest.ranks
        forgotten = threading.Event()

        def forget() -> None:
            wire.detach(entry.control_endpoint)
            forgotten.set()

        two.io.post(forget)
        assert forgotten.wait(60)
        name = two.begin()
        until(lambda: sink.received(name))
        assert sink.reasons(name) == {"peer_lost"}
        until(lambda: sink.count("peers.peer_lost") == 1)
        two.move()
        assert sink.count("peers.ready") == 2


def test_a_load_that_cannot_begin_is_reported(watch: Watch) -> None:
    source, sink = engines()
    with source, sink:
        two = Two(source, sink)
        name, ref = two.offered()
        sink.load(name, ref, [3, 4000], (0, 32), hold=True)  # no such block
        until(lambda: sink.received(name))
        assert sink.reasons(name) == {"plan"}
        until(lambda: source.sent(name))  # its Cancel has left
        two.move()


def test_engines_that_die_meanwhile(watch: Watch) -> None:
    source, sink = engines(pull_timeout_s=3600.0)
    with sink:
        with source:
            two = Two(source, sink)
            name, ref = two.offered()
        time.sleep(0.05)
        sink.load(name, ref, [3, 4], (0, 32))

        def is_over() -> object:
            pass_s(sink, 10.0)
            return sink.received(name)

        until(is_over)
        assert sink.reasons(name) <= {"peer_lost", "shutdown", "ended"}


def test_what_a_step_has_besides_loads_goes_to_the_io_thread() -> None:
    source: Any = None
    load = load_of("d", source, (1, 2))
    quick = ConnectorMetadata(
        loads=(load,),
        holds=(Hold("d", source),),
        unholds=(Unhold("d", source, Reason.CANCELLED),),
        computed=("p",),
        ended=(EndOffer("p", b"", Reason.ABORTED),),
    )
    assert quick.has_only_loads
    offer = NewOffer(request_id="p", nonce=b"", num_tokens=1, digest=DIGEST)
    others: list[dict[str, Any]] = [
        {"offers": (offer,)},
        {"blocks": (OfferBlocks("p", ((1,),)),)},
        {"delayed": ("p",)},
        {"aborts": (AbortLoad("e", Reason.ABORTED),)},
        {"manifest": build_manifest(SHAPE)},
    ]
    for other in others:
        assert not ConnectorMetadata(loads=(load,), **other).has_only_loads
