"""Messages that nobody waits for: they leave after the report of a load that the board serves, all
of them, and in the order in which the source has to hear them.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import zmq

from kvxfer.connector import control
from kvxfer.connector.peer_session import Failure
from kvxfer.connector.records import (
    AbortLoad,
    ConnectorMetadata,
    Hold,
    NewLoad,
    SourceRef,
)
from kvxfer.transfer.manifest import RankId
from kvxfer.transfer.wire import (
    Broken,
    Cancel,
    Consumer,
    Grant,
    Hello,
    Keep,
    OfferRef,
    Ping,
    Reason,
    Refuse,
    Verdict,
    decode_to_source,
)
from kvxfer.transports.base import ReadBroke, ReadDone, SinkCompletion
from kvxfer.transports.guard import nearest_endpoint
from kvxfer.transports.shm_direct import ShmSink
from tests.builders import EngineShape
from tests.connector.rig import (
    POISON,
    Engine,
    expect_copied,
    num_pulls,
    only_peer_of,
    service_of,
    until,
    watch_reports,
)
from tests.spoken import watch_dealers
from tests.wires import use_sink

ONE = EngineShape(num_kv_heads=2, num_blocks=64)
SPAN = (0, 64)
ZERO = RankId(0, 0)


REPORT = "a load's report"


class Said(list[tuple[str, str]]):
    """What leaves, and when a load of the engines that are watched is reported, in order: what and
    where to.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._patch = patch

    def note_message(self, dealer: zmq.Socket[bytes], frame: bytes) -> None:
        where = dealer.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.append((type(decode_to_source(frame)).__name__, where))

    def watch(self, engine: Engine) -> None:
        watch_reports(self._patch, engine, lambda: self.append((REPORT, "")))


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Said:
    said = Said(monkeypatch)
    watch_dealers(monkeypatch, lambda *_: None, said.note_message)
    return said


def names(events: Said) -> list[str]:
    return [name for name, _ in events]


def expect_said(events: Said, wanted: list[str], *, without: frozenset[str] = frozenset()) -> None:
    """These, in this order, and no others; ``without``: those that may come at any time."""

    def heard() -> list[str]:
        return [name for name in names(events) if name not in without]

    until(lambda: len(heard()) >= len(wanted))
    assert heard() == wanted


@pytest.fixture
def source() -> Iterator[Engine]:
    with Engine(ONE, "prefill", fill=None, transport="shm") as engine:
        yield engine


def decode(**more: Any) -> Engine:
    """Its clock says nothing meanwhile."""
    return Engine(ONE, "decode", fill=POISON, transport="shm", keep_s=100.0, **more)


def offered(source: Engine, name: str) -> SourceRef:
    before = source.count("board.posted")
    ref = source.offer(name, 64, range(4))
    source.compute(name)
    until(lambda: source.count("board.posted") == before + len(source.workers))
    return ref


def meet(source: Engine, sink: Engine, said: Said) -> None:
    """A first load; what it says is forgotten."""
    said.watch(sink)
    sink.load("first", offered(source, "p0"), range(4), SPAN)
    until(lambda: sink.received("first"))
    until(lambda: source.sent("p0"))
    until(lambda: names(said).count("Release") == len(sink.workers))
    said.clear()


@pytest.fixture
def sink(source: Engine, said: Said) -> Iterator[Engine]:
    """It knows the source."""
    with decode() as engine:
        meet(source, engine, said)
        yield engine


def order_of(name: str, ref: SourceRef) -> NewLoad:
    return NewLoad(
        request_id=name,
        source=ref,
        token_lo=0,
        token_hi=64,
        block_ids=(tuple(range(4)),),
    )


# ------------------------------------------------------------------ loads


def test_a_load_is_reported_before_anything_is_said(
    source: Engine, sink: Engine, said: Said
) -> None:
    sink.load("d", offered(source, "p"), range(4, 8), SPAN, hold=True)
    until(lambda: sink.received("d"))
    until(lambda: source.sent("p"))  # it has heard of all of it
    expect_said(said, [REPORT, "Keep", "Pull", "Release"])
    assert source.count("offers.done") == 2
    assert not source.count("offers.broken")
    expect_copied(source, sink, [0, 1, 2, 3] * 2, range(8), (0, 128))


def test_loads_of_one_step_are_all_reported_first(source: Engine, sink: Engine, said: Said) -> None:
    refs = [offered(source, f"p{number}") for number in (1, 2, 3)]
    orders = tuple(order_of(f"d{number}", ref) for number, ref in enumerate(refs))
    sink.step(ConnectorMetadata(loads=orders))
    until(lambda: all(sink.received(order.request_id) for order in orders))
    until(lambda: source.sent("p3"))
    expect_said(said, [*[REPORT] * 3, *["Pull"] * 3, *["Release"] * 3])


def test_the_pull_of_a_longer_copy_does_not_wait_for_its_end(source: Engine, said: Said) -> None:
    with decode(faults="read:slow=300ms") as sink:
        meet(source, sink, said)
        sink.load("d", offered(source, "p"), range(4), SPAN, hold=True)
        until(lambda: sink.received("d"))
        until(lambda: source.sent("p"))
        expect_said(said, ["Keep", "Pull", REPORT, "Release"])


def test_a_load_that_breaks_in_its_round_says_so_in_order(
    source: Engine, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_broken = False

    class Breaking(ShmSink):
        def poll(self) -> list[SinkCompletion]:
            return [
                ReadBroke(each.key, Reason.READ_FAILED, "")
                if is_broken and isinstance(each, ReadDone)
                else each
                for each in super().poll()
            ]

    use_sink(monkeypatch, "shm", Breaking)
    with decode() as sink:
        meet(source, sink, said)
        is_broken = True
        sink.load("d", offered(source, "p"), range(4), SPAN, hold=True)
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"read_failed"}
        until(lambda: source.sent("p"))
        expect_said(said, ["Keep", "Pull", "Cancel"], without=frozenset({REPORT}))


def test_a_load_that_is_aborted_in_its_round_says_so_in_order(
    source: Engine, sink: Engine, said: Said
) -> None:
    ref = offered(source, "p")
    step = ConnectorMetadata(
        loads=(order_of("d", ref),),
        holds=(Hold("d", ref),),
        aborts=(AbortLoad("d", Reason.CANCELLED),),
    )
    sink.step(step)
    until(lambda: sink.received("d"))
    assert sink.reasons("d") == {"cancelled"}
    until(lambda: source.sent("p"))
    expect_said(said, ["Keep", "Pull", "Cancel"], without=frozenset({REPORT}))


def test_a_hold_is_told_to_every_rank_though_its_load_has_ended_here(
    said: Said,
) -> None:
    """Rank 0 reads one source rank only, and is through before the Keeps leave."""
    shape = EngineShape(num_kv_heads=2, num_blocks=64, tp_size=2)
    with (
        Engine(shape, "prefill", fill=None, transport="shm") as source,
        Engine(shape, "decode", fill=POISON, transport="shm") as sink,
    ):
        meet(source, sink, said)
        sink.load("d", offered(source, "p"), range(4), SPAN, hold=True)
        until(lambda: sink.received("d"))
        until(lambda: source.sent("p"))
        ranks = {nearest_endpoint(entry.control_endpoint) for entry in source.manifest.ranks}

        def told() -> set[str]:
            return {endpoint for name, endpoint in said if name == "Keep"}

        until(lambda: told() >= ranks)
        assert told() == ranks


# ------------------------------------------------------------------ single messages


def test_a_message_that_cannot_wait_does_not_overtake(
    source: Engine, sink: Engine, said: Said
) -> None:
    peer, service = only_peer_of(sink), service_of(sink)
    keep = Keep((OfferRef(secrets.token_bytes(16), source.incarnation),), b"k" * 16, 1.0)
    hello = Hello((1, 1), (), "decode", sink.incarnation)

    def say() -> None:
        peer.send_later(ZERO, keep)
        peer.send_later(ZERO, Ping())
        peer.send(ZERO, hello)

    service.io.post(say)
    expect_said(said, ["Keep", "Ping", "Hello"])


def test_what_was_deferred_leaves_before_the_connection_ends(
    source: Engine, sink: Engine, said: Said
) -> None:
    ref = offered(source, "p")
    peer, service = only_peer_of(sink), service_of(sink)
    cancel = Cancel(ref.offer, sink.incarnation, Reason.LOCAL_HIT, ref.digest)

    def say_and_end() -> None:
        peer.send_later(ZERO, cancel)
        peer.end(Failure(Reason.SHUTDOWN, "the test says so"))

    service.io.post(say_and_end)
    until(lambda: source.sent("p"))
    expect_said(said, ["Cancel"])


def test_nothing_is_lost_when_the_engine_ends_after_a_report(
    source: Engine, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "LINGER_S", 60.0)  # ZeroMQ's thread may be late, too
    sink = decode()
    meet(source, sink, said)
    refs = [offered(source, f"p{number}") for number in (1, 2, 3)]
    orders = tuple(order_of(f"d{number}", ref) for number, ref in enumerate(refs))
    sink.step(ConnectorMetadata(loads=orders))
    until(lambda: all(sink.received(order.request_id) for order in orders))
    sink.close()
    until(lambda: source.count("offers.done") == 4)
    assert not source.count("offers.broken")


def test_answers_to_another_life_or_rank_are_counted_and_change_nothing(
    source: Engine, sink: Engine
) -> None:
    """The offer is not open yet, so its load waits for a Grant; these are not its own."""
    ref = source.offer("p", 64, range(4))
    sink.load("d", ref, range(4), SPAN)
    service, peer = service_of(sink), only_peer_of(sink)
    until(lambda: num_pulls(source, ref.offer.nonce))
    others = (Consumer(b"another life", ZERO), Consumer(sink.incarnation, RankId(0, 1)))
    for number, other in enumerate(others, start=1):
        for message in (
            Grant(ref.offer, other, (tuple(range(4)),), 64),
            Verdict(ref.offer, other, True),
            Refuse(ref.offer, other, Reason.ENDED),
            Broken(ref.offer, Reason.EXPIRED, other),
        ):
            service.io.post(partial(service.sink.on_message, peer, ZERO, message))
        until(lambda: sink.count("control.misaddressed") == 4 * number)  # noqa: B023
    assert not sink.received("d")
    assert bool((sink.pools[0].tensor[: ONE.block_tokens] == POISON).all())
    source.compute("p")
    until(lambda: sink.received("d"))
    assert sink.reasons("d") == {None}
