"""Two engines in one process: aborts at every stage, leases, claims, deadlines."""

from __future__ import annotations

import time

import pytest
import zmq

from kvxfer.connector.records import (
    AbortLoad,
    ConnectorMetadata,
    NewLoad,
    SourceRef,
)
from kvxfer.transfer.manifest import RankId
from kvxfer.transfer.wire import (
    Broken,
    Cancel,
    Consumer,
    Grant,
    Keep,
    OfferRef,
    Pull,
    Reason,
    Release,
    Verdict,
    decode_to_sink,
    encode,
)
from kvxfer.transports.base import TransferKey
from kvxfer.transports.shm_direct import ShmSink
from tests.builders import EngineShape
from tests.connector.rig import (
    DIGEST,
    HOST_WIRES,
    POISON,
    Engine,
    given_offer,
    pass_s,
    service_of,
    until,
)
from tests.copies import HeldPieces
from tests.wires import use_sink

SOURCE = EngineShape(tp_size=2, num_kv_heads=4, block_tokens=16, layout="HND", num_blocks=12)
SINK = EngineShape(tp_size=1, num_kv_heads=4, block_tokens=24, layout="NHD", num_blocks=10)
ONE = EngineShape(num_kv_heads=2, num_blocks=8)


@pytest.mark.parametrize("wire", HOST_WIRES)
def test_an_abort_while_reading_reaches_the_source_at_once(wire: str) -> None:
    with (
        Engine(ONE, "prefill", fill=1, transport=wire) as source,
        Engine(ONE, "decode", fill=POISON, transport=wire, faults="read:slow=300ms") as sink,
    ):
        ref = source.offer("p", 16, [1])
        source.compute("p")
        sink.load("d", ref, [3], (0, 16))
        until(lambda: sink.count("peers.ready"))
        time.sleep(0.05)
        sink.abort("d")
        until(lambda: source.sent("p"))
        until(lambda: sink.received("d"))
        assert sink.reasons("d") <= {"cancelled", None}


def test_an_abort_while_asked_ends_the_parked_pull() -> None:
    with Engine(ONE, "prefill", fill=1) as source, Engine(ONE, "decode", fill=POISON) as sink:
        ref = source.offer("p", 16, [1])
        sink.load("d", ref, [3], (0, 16))
        until(lambda: sink.count("peers.ready"))
        time.sleep(0.05)
        sink.abort("d")
        until(lambda: source.count("offers.broken"))
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"cancelled"}


def test_an_abort_in_the_step_of_the_load() -> None:
    with Engine(ONE, "prefill", fill=1) as source, Engine(ONE, "decode", fill=POISON) as sink:
        ref = source.offer("p", 16, [1])
        load = NewLoad(
            request_id="d",
            source=ref,
            token_lo=0,
            token_hi=16,
            block_ids=((3,),),
        )
        sink.step(ConnectorMetadata(loads=(load,), aborts=(AbortLoad("d", Reason.CANCELLED),)))
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"cancelled"}
        until(lambda: source.count("offers.broken"))
        assert (sink.pools[0].tensor == POISON).all()
        assert sink.count("aborts.late") == 0


def test_200_aborts_give_everything_back() -> None:
    with (
        Engine(SOURCE, "prefill", fill=1, transport="auto") as source,
        Engine(SINK, "decode", fill=POISON, transport="auto") as sink,
    ):
        for number in range(200):
            ref = source.offer(f"p{number}", 16, [number % 12])
            source.compute(f"p{number}")
            sink.load(f"d{number}", ref, [number % 10], (0, 16))
            if number % 3:
                time.sleep(0.0005 * (number % 3))
            sink.abort(f"d{number}")
        until(lambda: all(sink.received(f"d{number}") for number in range(200)))
        until(lambda: all(source.sent(f"p{number}") for number in range(200)))
        assert not sink.workers[0].has_pending()
        assert not any(worker.has_pending() for worker in source.workers)


def test_unhold_gives_an_offer_back_at_every_rank() -> None:
    with (
        Engine(SOURCE, "prefill", fill=1) as source,
        Engine(EngineShape(tp_size=2, num_kv_heads=4), "decode", fill=POISON) as sink,
    ):
        ref = source.offer("p", 16, [1])
        source.compute("p")
        sink.unhold("d", ref)
        until(lambda: source.sent("p"))
        assert source.take_stats().reasons == {"cancelled": 2}
        assert not sink.received("d")


def test_holds_keep_the_lease_until_the_cap(caplog: pytest.LogCaptureFixture) -> None:
    with (
        Engine(SOURCE, "prefill", fill=1, max_hold_s=1200.0) as source,
        Engine(ONE_OF_4, "decode", fill=POISON, keep_s=0.1) as sink,
    ):
        ref = source.offer("p", 16, [1])
        source.compute("p")
        sink.hold("d", ref)
        for _ in range(5):
            pass_s(source, 200.0)
            until_kept(source, ref)
        source.collect()
        assert not any("p" in results.sent for results in source.results)  # at no rank
        pass_s(source, 150.0)
        assert not source.sent("p")
        pass_s(source, 100.0)
        until(lambda: source.sent("p"))
        assert source.take_stats().reasons == {"expired": 2}
    assert warnings(caplog) == [  # one for both ranks
        "request p: KV not taken: a decode engine wanted it, and has not read it in time "
        "(lease_s, max_hold_s)"
    ]


def until_kept(source: Engine, ref: SourceRef) -> None:
    """Each rank has heard of late that the offer is wanted, or it has been so for max_hold_s."""
    for number in range(len(source.workers)):
        io = service_of(source, number).io
        offer = given_offer(source, ref.offer.nonce, number)
        assert offer is not None
        ends_s = offer.opened_s + source.config.max_hold_s
        until(lambda: offer.lease_until_s >= min(ends_s, io.now() + 250.0))  # noqa: B023


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]


def test_a_lease_that_ends_without_a_sink_says_where_none_came(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Engine(SOURCE, "prefill", fill=1, lease_s=0.2, keep_s=0.1) as source:
        for number in range(3):
            source.offer(f"p{number}", 16, [number])
            source.compute(f"p{number}")
        until(lambda: all(source.sent(f"p{number}") for number in range(3)))
        endpoint = source.workers[0].get_handshake_metadata().control_endpoint
    (line,) = warnings(caplog)
    assert line == (
        f"request p0: KV not taken: expected a decode engine at {endpoint} within 0.2 s (lease_s), "
        "none came for it; look whether it can reach that port, and what its allowed_peers and "
        "CURVE keys admit"
    )


def test_a_sink_that_cannot_use_an_offer_is_named_at_its_source(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        Engine(ONE, "prefill", fill=1) as source,
        Engine(ONE, "decode", fill=POISON, facts={"model": "another"}) as sink,
    ):
        ref = source.offer("p", 16, [1])
        source.compute("p")
        sink.load("d", ref, [3], (0, 16))
        until(lambda: source.sent("p"))
        assert source.take_stats().reasons == {"incompatible": 1}
    assert warnings(caplog) == [
        "request p: KV not taken: the decode engine on this host cannot use it: incompatible; "
        "its log says what to set"
    ]


ONE_OF_4 = EngineShape(num_kv_heads=4)


def test_a_load_keeps_its_own_lease_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldPieces(monkeypatch, "shm")
    with (
        Engine(SOURCE, "prefill", fill=1, transport="shm", max_hold_s=3600.0) as source,
        Engine(
            EngineShape(tp_size=2, num_kv_heads=4),
            "decode",
            fill=POISON,
            keep_s=0.1,
            transport="shm",
        ) as sink,
    ):
        ref = source.offer("p", 16, [1])
        source.compute("p")
        until(lambda: source.count("offers.opened") == 2)
        sink.load("d", ref, [3], (0, 16))
        for _ in range(3):
            pass_s(source, 200.0)
            until_kept(source, ref)
        held.may_end.set()
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {None}
        until(lambda: source.sent("p"))


def test_a_silent_claimant_loses_its_claim_and_the_others_do_not() -> None:
    with (
        Engine(ONE, "prefill", fill=1) as source,
        Engine(ONE, "decode", fill=POISON, keep_s=0.1) as sink,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as silent,
    ):
        ref = source.offer("p", 16, [1])
        source.compute("p")
        sink.hold("other", ref)
        silent.connect(source.endpoint)
        rank = RankId(0, 0)
        claim = Pull(
            offer=ref.offer,
            consumer=Consumer(b"s" * 16, rank),
            claim=(rank,),
            digest=DIGEST,
            transport="shm",
        )
        silent.send(encode(claim))
        assert silent.poll(120_000)
        assert isinstance(decode_to_sink(silent.recv()), Grant)
        sink.load("d", ref, [3], (0, 16))
        until(lambda: sink.received("d"))
        pass_s(source, 200.0)
        until_kept(source, ref)
        assert not source.sent("p")  # claimed by somebody who does not read
        pass_s(source, 150.0)
        until(lambda: source.sent("p"))
        counts = source.take_stats().counts
        assert (counts["claims.lost"], counts["offers.done"]) == (1, 1)
        assert silent.poll(120_000)
        assert isinstance(decode_to_sink(silent.recv()), Broken)


def test_a_read_that_does_not_end_keeps_its_blocks_and_marks_the_peer_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Deaf(ShmSink):
        def stop_read(self, key: TransferKey) -> None:
            """The copy goes on."""

    use_sink(monkeypatch, "shm", Deaf)
    held = HeldPieces(monkeypatch, "shm")
    with (
        Engine(ONE, "prefill", fill=1, transport="shm") as source,
        Engine(ONE, "decode", fill=POISON, transport="shm", pull_timeout_s=0.4) as sink,
    ):
        ref = source.offer("p", 16, [1])
        source.compute("p")
        until(lambda: source.count("board.posted"))
        started_s = time.perf_counter()
        sink.load("d", ref, [3], (0, 16))
        until(lambda: source.sent("p"))  # cancelled at the deadline
        assert not sink.received("d")
        assert time.perf_counter() - started_s > 0.35
        until(lambda: sink.count("loads.undrained"))
        assert not sink.received("d")
        held.may_end.set()
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"deadline"}
        assert (sink.count("loads.undrained"), sink.count("peers.peer_lost")) == (1, 1)


def test_a_message_to_another_life_or_rank_is_counted_and_ignored() -> None:
    with (
        Engine(ONE, "prefill", fill=1) as source,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as dealer,
    ):
        ref = source.offer("p", 16, [1])
        source.compute("p")
        dealer.connect(source.endpoint)
        other = OfferRef(ref.offer.nonce, b"other life")
        consumer = Consumer(b"s" * 16, RankId(0, 0))
        dealer.send(encode(Cancel(other, b"s" * 16, Reason.CANCELLED)))
        dealer.send(encode(Keep((other, ref.offer), b"s" * 16, 5.0)))
        dealer.send(encode(Release(other, consumer)))
        assert dealer.poll(120_000)
        verdict = decode_to_sink(dealer.recv())
        assert verdict == Verdict(other, consumer, False, Reason.INCARNATION)
        counts = source.take_stats().counts
        assert counts["cancel.incarnation"] == counts["keep.incarnation"] == 1
        assert not source.sent("p")
