"""One offer's trouble is not another's; blocks come back whatever fails; strangers are bounded."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import zmq

from kvxfer.connector import source as source_module
from kvxfer.connector.given_offer import read_pull
from kvxfer.connector.records import ConnectorMetadata, SourceRef
from kvxfer.connector.source import IsReady
from kvxfer.transfer.manifest import RankId
from kvxfer.transfer.plan import DenseOrder, PullClass, RegionName
from kvxfer.transfer.session import Break, OfferState, SourceEvent
from kvxfer.transfer.source_session import OfferSession
from kvxfer.transfer.wire import (
    Broken,
    Cancel,
    Consumer,
    Grant,
    Hello,
    Keep,
    Manifest,
    Ping,
    Pong,
    Pull,
    Reason,
    Refuse,
    Release,
    ToSink,
    Verdict,
    decode_to_sink,
    encode,
)
from kvxfer.transports.base import SendRequest
from kvxfer.transports.stream_source import StreamSource
from kvxfer.transports.visitors import MOST_UNREAD
from tests.builders import EngineShape
from tests.connector.rig import (
    DIGEST,
    POISON,
    Engine,
    num_pulls,
    opened_offer,
    pass_s,
    service_of,
    until,
)
from tests.spoken import watch_messages
from tests.wires import pipe_of, use_source

ONE = EngineShape(num_kv_heads=2, num_blocks=8)
LIFE = b"s" * 16


@contextmanager
def _dealer(engine: Engine, **options: int) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        for name, value in options.items():
            setattr(socket, name, value)
        socket.connect(engine.endpoint)
        yield socket


def _answer(socket: zmq.Socket[bytes]) -> ToSink:
    assert socket.poll(120_000), "no answer"
    return decode_to_sink(socket.recv())


def _pull(source: Engine, ref: SourceRef, *, digest: bytes = DIGEST, wire: str = "zmq") -> Pull:
    rank = RankId(0, 0)
    region = source.manifest.ranks[0].regions[0]
    wanted = PullClass(
        regions=(RegionName(region.layer, (region.plane,)),),
        head_lo=0,
        head_hi=1,
        inner_nbytes=region.inner_nbytes,
        order=DenseOrder(16, True),
        token_lo=0,
        token_hi=16,
    )
    return Pull(
        offer=ref.offer,
        consumer=Consumer(LIFE, rank),
        claim=(rank,),
        digest=digest,
        transport=wire,
        classes=(wanted,) if wire == "zmq" else (),
        chunk_nbytes=4096 if wire == "zmq" else 0,
    )


def _fail_to_write(record: logging.LogRecord) -> bool:
    if "its offer cannot open" in record.getMessage():
        raise OSError("no space left on device")
    return True


@pytest.mark.parametrize("can_write", [True, False], ids=["written", "not even written"])
def test_an_event_that_raises_breaks_its_offer_and_no_other(
    monkeypatch: pytest.MonkeyPatch, can_write: bool
) -> None:
    is_late, num_steps = False, 0
    log = logging.getLogger("kvxfer.connector")
    monkeypatch.setattr(log, "filters", [] if can_write else [_fail_to_write])

    def ready() -> IsReady:
        nonlocal num_steps
        num_steps += 1
        is_first = num_steps == 1

        def event() -> bool:
            is_complete = is_late  # read once: it changes meanwhile
            if is_complete and is_first:
                raise OSError("unforeseen")
            return is_complete

        return event

    with Engine(ONE, "prefill", fill=1, ready_event=ready) as source:
        source.expected_io_errors = 0 if can_write else 1
        for name in ("p0", "p1"):
            source.offer(name, 16, [1])
        source.compute("p0")
        source.compute("p1")
        time.sleep(0.02)
        is_late = True
        until(lambda: source.sent("p0"))
        assert source.take_stats().reasons == {"plan": 1}
        until(lambda: source.count("offers.opened") == 1)


def test_an_answer_that_fails_when_an_offer_opens_breaks_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail_grants(message: object) -> None:
        if isinstance(message, Grant):
            raise OSError("unforeseen")

    watch_messages(monkeypatch, fail_grants)
    with Engine(ONE, "prefill", fill=1) as source, _dealer(source) as dealer:
        ref = source.offer("p", 16, [1])
        dealer.send(encode(_pull(source, ref, wire="shm")))
        until(lambda: num_pulls(source, ref.offer.nonce))  # it is parked
        source.compute("p")
        assert isinstance(_answer(dealer), Broken)
        until(lambda: source.sent("p"))


def test_the_lease_of_an_offer_runs_before_anything_can_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step, num_broken = OfferSession.step, 0

    def fail_breaks(self: OfferSession, event: SourceEvent) -> list[Any]:
        nonlocal num_broken
        if isinstance(event, Break):
            num_broken += 1
            if num_broken == 1:
                raise OSError("unforeseen")
        return step(self, event)

    monkeypatch.setattr(OfferSession, "step", fail_breaks)
    with Engine(ONE, "prefill", fill=1, lease_s=0.2, keep_s=0.1) as source:
        source.expected_io_errors = 1
        source.offer("p", 16, [1])
        source.compute("p")
        until(lambda: source.sent("p"))  # the first end failed, the clock went on
        assert num_broken == 2


def test_a_stream_that_cannot_start_takes_the_ones_beside_it_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two parked Pulls of one engine: the first fails as the offer opens, the second has not begun,
    and all blocks come back.
    """
    num_sends = 0

    class FailsFirst(StreamSource):
        def submit_send(self, request: SendRequest) -> None:
            nonlocal num_sends
            num_sends += 1
            if num_sends == 1:
                raise RuntimeError("unforeseen")
            super().submit_send(request)

    use_source(monkeypatch, "zmq", partial(FailsFirst, pipe_of("zmq")))
    with (
        Engine(EngineShape(num_kv_heads=4), "prefill", fill=1, transport="zmq") as source,
        Engine(
            EngineShape(tp_size=2, num_kv_heads=4), "decode", fill=POISON, transport="zmq"
        ) as sink,
    ):
        ref = source.offer("p", 16, [1])
        sink.load("d", ref, [1], (0, 16))
        until(lambda: num_pulls(source, ref.offer.nonce) == 2)  # both are parked
        source.compute("p")
        until(lambda: sink.received("d"))
        assert None not in sink.reasons("d")
        until(lambda: source.sent("p"))
        assert num_sends == 1
        assert source.count("offers.unforeseen") == 0


@pytest.mark.parametrize("where", ["step", "send"])
def test_the_engine_goes_on_when_an_offer_cannot_be_broken(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    step = OfferSession.step

    def fail_step(self: OfferSession, event: SourceEvent) -> list[Any]:
        if isinstance(event, Break):
            raise OSError("unforeseen")
        return step(self, event)

    def fail_send(message: object) -> None:
        if isinstance(message, Broken):
            raise OSError("unforeseen")

    if where == "send":
        watch_messages(monkeypatch, fail_send)
    with Engine(ONE, "prefill", fill=1) as source, _dealer(source) as dealer:
        ref = source.offer("p", 16, [1])
        source.compute("p")
        dealer.send(encode(_pull(source, ref, wire="shm")))
        assert isinstance(_answer(dealer), Grant)
        with monkeypatch.context() as patch:
            if where == "step":
                patch.setattr(OfferSession, "step", fail_step)
            source.end("p")
            until(lambda: source.count("offers.unforeseen"))
        dealer.send(encode(_pull(source, ref, wire="shm")))
        assert isinstance(_answer(dealer), Refuse)


def test_a_pull_is_looked_into_once_and_not_at_all_when_it_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[int] = []

    def look(*args: Any) -> Any:  # noqa: ANN401
        looked.append(1)
        return read_pull(*args)

    monkeypatch.setattr(source_module, "read_pull", look)
    with Engine(ONE, "prefill", fill=1, transport="zmq") as source, _dealer(source) as dealer:
        ref = source.offer("p", 16, [1])
        wrong = _pull(source, ref, digest=b"x" * 32)
        for _ in range(3):
            dealer.send(encode(wrong))
            assert isinstance(_answer(dealer), Refuse)
        assert not looked
        for _ in range(3):  # parked
            dealer.send(encode(_pull(source, ref)))
        dealer.send(encode(Ping()))
        assert isinstance(_answer(dealer), Pong)
        source.compute("p")
        answer = _answer(dealer)
        assert isinstance(answer, Grant), answer
        dealer.send(encode(_pull(source, ref)))
        assert isinstance(_answer(dealer), Grant)
        assert len(looked) == 1
        source.end("p")
        assert isinstance(_answer(dealer), Broken)
        dealer.send(encode(_pull(source, ref)))
        assert isinstance(_answer(dealer), Refuse)
        assert len(looked) == 1


def test_the_lease_begins_anew_when_the_request_has_finished() -> None:
    """A sink hears of the offer only then, however long the request went on after its opening."""
    with Engine(ONE, "prefill", fill=1) as source:
        source.offer("p", 16, [1])
        source.step(ConnectorMetadata(computed=("p",)))
        pass_s(source, 200.0)
        source.step(ConnectorMetadata(delayed=("p",)))
        pass_s(source, 200.0)
        assert not source.sent("p")
        pass_s(source, 100.0)
        until(lambda: source.sent("p"))
        assert source.take_stats().reasons == {"expired": 1}


def _resident_nbytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def test_answers_that_nobody_reads_are_bounded() -> None:
    wide = EngineShape(num_kv_heads=2, num_blocks=8, num_layers=200)
    hello = encode(Hello((1, 1), (), "x", LIFE))
    with (
        Engine(wide, "prefill", fill=1, transport="shm") as source,
        _dealer(source, rcvhwm=1, rcvbuf=4096, sndhwm=0) as deaf,
        _dealer(source) as dealer,
    ):
        assert len(encode(Manifest(source.manifest))) > 60_000
        dealer.send(hello)
        assert isinstance(_answer(dealer), Manifest)
        before_nbytes = _resident_nbytes()
        for _ in range(6000):
            deaf.send(hello)
        until(lambda: source.count("control.dropped") >= MOST_UNREAD)
        assert _resident_nbytes() - before_nbytes < 16 << 20  # copies would be 30 MB
        dealer.send(hello)
        assert isinstance(_answer(dealer), Manifest)


# ------------------------------------------------------------------ who knows the nonce only


@pytest.mark.parametrize("is_over", [False, True])
def test_who_knows_only_the_nonce_changes_nothing_and_leaves_nothing(is_over: bool) -> None:
    with Engine(ONE, "prefill", fill=1) as source, _dealer(source) as dealer:
        ref, offer = opened_offer(source)
        if is_over:
            source.end("p")
            until(lambda: source.sent("p"))
        lease_until_s = offer.lease_until_s
        for number in range(50):
            life = number.to_bytes(16, "big")
            release = Release(ref.offer, Consumer(life, RankId(0, 0)))
            dealer.send(encode(release))
            answer = _answer(dealer)
            assert isinstance(answer, Verdict)
            assert not answer.valid
            dealer.send(encode(Cancel(ref.offer, life, Reason.CANCELLED, b"guessed")))
            dealer.send(encode(Keep((ref.offer,), life, 86400.0, {ref.offer.nonce: b"guessed"})))
        dealer.send(encode(Ping()))
        assert isinstance(_answer(dealer), Pong)
        assert (offer.heard_s, offer.identities, offer.session.snapshot.gone) == ({}, {}, {})
        assert offer.lease_until_s == lease_until_s
        assert source.sent("p") == is_over
        counts = source.take_stats().counts
        assert counts["keep.ended" if is_over else "keep.not_granted"] == 50
        assert counts["cancel.not_granted"] == 50


def test_a_keep_asks_for_a_lease_and_no_more() -> None:
    with Engine(ONE, "prefill", fill=1) as source, _dealer(source) as dealer:
        ref, offer = opened_offer(source)
        offer.lease_until_s = 0.0
        dealer.send(encode(Keep((ref.offer,), LIFE, 86400.0, {ref.offer.nonce: DIGEST})))
        dealer.send(encode(Ping()))
        assert isinstance(_answer(dealer), Pong)
        assert 0.0 < offer.lease_until_s <= service_of(source).io.now() + source.config.lease_s
        assert offer.heard_s == {}  # it has no claim whose silence would matter


@pytest.mark.parametrize("has_digest", [True, False])
def test_a_cancel_of_who_knows_the_tokens_or_was_granted_counts(has_digest: bool) -> None:
    with Engine(ONE, "prefill", fill=1) as source, _dealer(source) as dealer:
        ref = source.offer("p", 16, [1])
        source.compute("p")
        if not has_digest:
            dealer.send(encode(_pull(source, ref)))
            assert isinstance(_answer(dealer), Grant)
        digest = DIGEST if has_digest else b""
        dealer.send(encode(Cancel(ref.offer, LIFE, Reason.CANCELLED, digest)))
        until(lambda: source.sent("p"))


def test_a_stolen_name_neither_takes_a_read_over_nor_releases_it() -> None:
    """Who has learnt all that a consumer says: else its blocks would be used again while it reads,
    and its own Release be answered as valid.
    """
    with (
        Engine(ONE, "prefill", fill=1) as source,
        _dealer(source) as reader,
        _dealer(source) as thief,
    ):
        ref, offer = opened_offer(source)
        pull = _pull(source, ref, wire="shm")
        release = Release(ref.offer, pull.consumer)
        reader.send(encode(pull))
        assert isinstance(_answer(reader), Grant)
        thief.send(encode(release))
        answer = _answer(thief)
        assert isinstance(answer, Verdict)
        assert (answer.valid, answer.reason) == (False, Reason.PLAN)
        thief.send(encode(pull))
        answer = _answer(thief)
        assert isinstance(answer, Refuse)
        assert answer.detail == "another connection reads in this name"
        assert offer.state is OfferState.OPEN
        reader.send(encode(release))
        answer = _answer(reader)
        assert isinstance(answer, Verdict)
        assert answer.valid
        until(lambda: source.sent("p"))


def test_a_reader_whose_connection_has_ended_may_ask_over_another() -> None:
    with Engine(ONE, "prefill", fill=1) as source, _dealer(source) as again:
        ref, offer = opened_offer(source)
        pull = _pull(source, ref, wire="shm")
        with _dealer(source) as reader:
            reader.send(encode(pull))
            assert isinstance(_answer(reader), Grant)
        until(lambda: not offer.identities)
        again.send(encode(pull))
        assert isinstance(_answer(again), Grant)
        again.send(encode(Release(ref.offer, pull.consumer)))
        until(lambda: source.sent("p"))


# ------------------------------------------------------------------ sinks that are gone

SOON: dict[str, Any] = {"keep_s": 0.1, "peer_silent_s": 0.1, "lease_s": 300.0}


@pytest.mark.parametrize("is_granted", [True, False])
def test_what_a_sink_held_comes_back_with_its_connection(is_granted: bool) -> None:
    """Long before its lease of 300 s; also of one that only keeps the offer."""
    with Engine(ONE, "prefill", fill=1, **SOON) as source:
        ref, _ = opened_offer(source)
        with _dealer(source) as dealer:
            if is_granted:
                dealer.send(encode(_pull(source, ref)))
                assert isinstance(_answer(dealer), Grant)
            else:
                dealer.send(encode(Keep((ref.offer,), LIFE, 5.0, {ref.offer.nonce: DIGEST})))
            dealer.send(encode(Ping()))
            assert isinstance(_answer(dealer), Pong)
            assert not source.sent("p")
        until(lambda: source.sent("p"))
        assert source.take_stats().reasons == {"peer_lost": 1}


def test_a_sink_that_has_connected_anew_keeps_its_offer() -> None:
    with (
        Engine(ONE, "prefill", fill=1, **SOON) as source,
        _dealer(source) as again,
    ):
        ref, _ = opened_offer(source)
        other, _ = opened_offer(source, "other")
        with _dealer(source) as dealer:
            for offer in (ref, other):
                keep = Keep((offer.offer,), LIFE, 5.0, {offer.offer.nonce: DIGEST})
                dealer.send(encode(keep))
            dealer.send(encode(Ping()))
            assert isinstance(_answer(dealer), Pong)
            again.send(encode(Keep((ref.offer,), LIFE, 5.0, {ref.offer.nonce: DIGEST})))
            again.send(encode(Ping()))
            assert isinstance(_answer(again), Pong)
        until(lambda: source.sent("other"))  # of which nothing was heard over the new connection
        assert not source.sent("p")
