"""Two engines in one process, real sockets and wires: what offers and loads do, end to end."""

from __future__ import annotations

import time

import msgspec
import pytest

from kvxfer.connector.records import (
    ConnectorMetadata,
    SourceRef,
)
from kvxfer.connector.worker_side import WorkerConnector
from kvxfer.errors import ConfigError
from kvxfer.transfer.wire import (
    OfferRef,
    Reason,
)
from tests.builders import EngineShape
from tests.connector.rig import (
    POISON,
    WIRES,
    Engine,
    expect_copied,
    pass_s,
    stuck,
    until,
)

SOURCE = EngineShape(tp_size=2, num_kv_heads=4, block_tokens=16, layout="HND", num_blocks=12)
SINK = EngineShape(tp_size=1, num_kv_heads=4, block_tokens=24, layout="NHD", num_blocks=10)
ONE = EngineShape(num_kv_heads=2, num_blocks=8)


@pytest.mark.parametrize("wire", ["shm", "zmq", "auto"])
def test_a_load_brings_the_right_bytes(wire: str) -> None:
    with (
        Engine(SOURCE, "prefill", fill=None, transport=wire) as source,
        Engine(SINK, "decode", fill=POISON, transport=wire) as sink,
    ):
        ref = source.offer("p", 70, [3, 1, 7, 0, 9])
        source.compute("p")
        before_s = time.monotonic()
        sink.load("d", ref, [4, 2, 8], (5, 70))
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {None}
        until(lambda: source.sent("p"))
        expect_copied(source, sink, [3, 1, 7, 0, 9], [4, 2, 8], (5, 70))
        (report,) = sink.reports("d")
        # 65 tokens, 4 heads of 8 bytes, K and V of 2 layers
        assert (report.nbytes, report.reason) == (65 * 4 * 8 * 4, None)
        assert report.transports == (("zmq",) if wire == "zmq" else ("shm",))
        moments = (report.handed_s, report.started_s, report.placed_s, report.finished_s)
        assert moments == tuple(sorted(moments))
        assert before_s <= report.handed_s


def test_a_load_that_was_never_asked_for_has_no_moments_after_its_order() -> None:
    with Engine(ONE, "prefill", fill=1) as source, Engine(ONE, "decode", fill=POISON) as sink:
        ref = source.offer("p", 32, [1, 2])
        sink.load("d", ref, [3, 4, 5], (0, 33))
        until(lambda: sink.received("d"))
        (report,) = sink.reports("d")
        assert report.handed_s > 0
        assert (report.started_s, report.placed_s) == (0.0, 0.0)
        assert report.finished_s >= report.handed_s


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(("source_tp", "sink_tp"), [(1, 2), (4, 1), (4, 2)])
def test_any_tp_and_replicated_heads_free_every_rank(
    wire: str, source_tp: int, sink_tp: int
) -> None:
    # 2 KV heads: with 4 source ranks two replicas are never read, and are freed all the same.
    with (
        Engine(
            EngineShape(tp_size=source_tp), "prefill", fill=POISON - 1, transport=wire
        ) as source,
        Engine(EngineShape(tp_size=sink_tp), "decode", fill=POISON, transport=wire) as sink,
    ):
        ref = source.offer("p", 32, [5, 2])
        source.compute("p")
        sink.load("d", ref, [0, 6], (0, 32))
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {None}
        until(lambda: source.sent("p"))
        expect_copied(source, sink, [5, 2], [0, 6], (0, 32))


@pytest.mark.parametrize("wire", WIRES)
def test_a_pull_waits_for_the_ready_event(wire: str) -> None:
    is_ready = [False]
    with (
        Engine(ONE, "prefill", fill=1, transport=wire, ready_event=lambda: lambda: is_ready[0]) as (
            source
        ),
        Engine(ONE, "decode", fill=POISON, transport=wire) as sink,
    ):
        ref = source.offer("p", 16, [1])
        sink.load("d", ref, [2], (0, 16))
        time.sleep(0.1)
        source.compute("p")
        time.sleep(0.1)
        assert not sink.received("d")
        assert source.count("offers.opened") == 0
        is_ready[0] = True
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {None}


def test_small_loads_are_quick_and_orders_never_wait() -> None:
    with Engine(ONE, "prefill", fill=1) as source, Engine(ONE, "decode", fill=POISON) as sink:

        def duration_s(number: int) -> float:
            ref = source.offer(f"p{number}", 16, [1])
            source.compute(f"p{number}")
            started_s = time.perf_counter()
            sink.load(f"d{number}", ref, [2], (0, 16))
            assert time.perf_counter() - started_s < 60
            assert sink.workers[0].wait_for_activity(120)
            duration_s = time.perf_counter() - started_s
            assert sink.received(f"d{number}")
            return duration_s

        # About 1 ms when nothing else runs. A poll interval anywhere would show as its multiple in
        # all tries; what else is done here may spoil some.
        tries = (sorted(duration_s(30 * n + number) for number in range(30)) for n in range(20))
        assert any(durations[15] < 0.02 for durations in tries)


def test_an_engine_that_steps_says_where_its_io_thread_stands(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Engine(ONE, "prefill", fill=1) as source:
        with stuck(source):
            until(lambda: source.count("io.stands"))
            for _ in range(3):
                source.take_stats()
        (said,) = (each for each in caplog.messages if "it stands at" in each)
        assert "rank pp0tp0: no load and no offer goes on" in said
        assert "in stand\n" in said  # what holds it, in tests/connector/rig.py
        ref = source.offer("p", 16, [1])
        source.compute("p")
        until(lambda: source.count("offers.opened"))
        assert ref.num_tokens == 16


def test_the_second_load_needs_no_second_hello() -> None:
    with Engine(ONE, "prefill", fill=1) as source, Engine(ONE, "decode", fill=POISON) as sink:
        for number in range(3):
            ref = source.offer(f"p{number}", 16, [1])
            source.compute(f"p{number}")
            sink.load(f"d{number}", ref, [2], (0, 16))
            until(lambda number=number: sink.received(f"d{number}"))  # type: ignore[misc]
        assert sink.count("peers.ready") == 1


# ------------------------------------------------------------------ refusals


def _refused(source: Engine, sink: Engine, request_id: str) -> set[str | None]:
    until(lambda: sink.received(request_id))
    return sink.reasons(request_id)


def test_refusals_name_their_reason() -> None:
    with Engine(ONE, "prefill", fill=1) as source, Engine(ONE, "decode", fill=POISON) as sink:
        ref = source.offer("p", 32, [1, 2])
        source.compute("p")
        sink.load("tokens", ref, [3, 4], (0, 32), digest=b"x" * 32)
        assert _refused(source, sink, "tokens") == {"tokens"}
        # Parameters of another prompt cancel nothing: the right request may still come.
        sink.load("right", ref, [3, 4], (0, 32))
        assert _refused(source, sink, "right") == {None}
        until(lambda: source.sent("p"))
        sink.pools[0].tensor.fill_(POISON)
        sink.load("twice", ref, [3, 4], (0, 32))  # one read per rank: not even asked
        assert _refused(source, sink, "twice") == {"ended"}
        with Engine(ONE, "other", fill=POISON) as late:
            late.load("ended", ref, [3, 4], (0, 32))
            assert _refused(source, late, "ended") == {"ended"}
        unknown = _with_offer(ref, OfferRef(b"n" * 16, source.incarnation))
        sink.load("unknown", unknown, [3, 4], (0, 32))
        assert _refused(source, sink, "unknown") == {"unknown"}
        other_life = _with_offer(ref, OfferRef(ref.offer.nonce, b"i" * 16))
        sink.load("incarnation", other_life, [3, 4], (0, 32))
        assert _refused(source, sink, "incarnation") == {"incarnation"}
        ref = source.offer("q", 32, [1, 2])
        source.compute("q")
        sink.load("span", ref, [3, 4, 5], (0, 33))
        assert _refused(source, sink, "span") == {"plan"}
        until(lambda: source.sent("q"))
        assert (sink.pools[0].tensor == POISON).all()
        counts = source.take_stats().counts
        assert counts["refused.tokens"] == counts["refused.ended"] == 1
        assert counts["refused.unknown"] == 1
        assert sink.take_stats().reasons == {
            "tokens": 1,
            "ended": 1,
            "unknown": 1,
            "incarnation": 1,
            "plan": 1,
        }


def _with_offer(ref: SourceRef, offer: OfferRef) -> SourceRef:
    return msgspec.structs.replace(ref, offer=offer)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("ids", [[3], [3, -1], [3, 8]])
def test_bad_block_ids_of_the_sink_are_refused_before_anything_is_asked(
    wire: str, ids: list[int]
) -> None:
    with (
        Engine(ONE, "prefill", fill=1, transport=wire) as source,
        Engine(ONE, "decode", fill=POISON, transport=wire) as sink,
    ):
        ref = source.offer("p", 32, [1, 2])
        source.compute("p")
        sink.load("d", ref, ids, (0, 32))
        assert _refused(source, sink, "d") == {"plan"}
        assert "block ids" in sink.reports("d")[0].detail
        until(lambda: source.sent("p"))


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("ids", [[1, -1], [1, 8]])
def test_bad_block_ids_of_the_source_are_never_read(wire: str, ids: list[int]) -> None:
    with (
        Engine(ONE, "prefill", fill=1, transport=wire) as source,
        Engine(ONE, "decode", fill=POISON, transport=wire) as sink,
    ):
        ref = source.offer("p", 32, ids)
        source.compute("p")
        sink.load("d", ref, [3, 4], (0, 32))
        assert _refused(source, sink, "d") == {"plan"}
        until(lambda: source.sent("p"))
        assert (sink.pools[0].tensor == POISON).all()


def test_an_offer_without_enough_blocks_never_opens() -> None:
    with Engine(ONE, "prefill", fill=1) as source, Engine(ONE, "decode", fill=POISON) as sink:
        ref = source.offer("p", 32, [1])
        source.compute("p")
        until(lambda: source.sent("p"))
        sink.load("d", ref, [3, 4], (0, 32))
        assert _refused(source, sink, "d") == {"ended"}


def test_tokens_need_not_be_bound() -> None:
    with (
        Engine(ONE, "prefill", fill=1, bind_tokens=False) as source,
        Engine(ONE, "decode", fill=POISON, bind_tokens=False) as sink,
    ):
        ref = source.offer("p", 16, [1])
        source.compute("p")
        sink.load("d", ref, [3], (0, 16), digest=b"x" * 32)
        assert _refused(source, sink, "d") == {None}


# ------------------------------------------------------------------ ends at the source


def test_finished_sending_is_told_only_of_requests_whose_blocks_are_kept() -> None:
    with Engine(ONE, "prefill", fill=1) as source:
        source.offer("p", 16, [1])
        source.end("p", Reason.PREEMPTED)
        time.sleep(0.05)
        assert not source.sent("p")
        source.offer("p", 16, [2])  # resumed: another nonce, the same request
        source.step(ConnectorMetadata(computed=("p",)))
        source.end("p")
        time.sleep(0.05)
        assert not source.sent("p")
        source.step(ConnectorMetadata(delayed=("p",)))
        until(lambda: source.sent("p"))
        time.sleep(0.05)
        assert source.sent("p")
        assert not source.workers[0].has_pending()


def test_an_offer_that_nobody_wants_expires() -> None:
    with Engine(ONE, "prefill", fill=1) as source:
        ref = source.offer("p", 16, [1])
        pass_s(source, 400.0)
        assert source.count("offers.broken") == 0  # the lease begins when the offer opens
        source.compute("p")
        pass_s(source, 200.0)
        assert not source.sent("p")
        pass_s(source, 100.0)
        until(lambda: source.sent("p"))
        assert source.take_stats().reasons == {"expired": 1}
        with Engine(ONE, "decode", fill=POISON) as sink:
            sink.load("d", ref, [3], (0, 16))
            assert _refused(source, sink, "d") == {"ended"}


def test_shutdown_breaks_offers_and_tells_their_consumers() -> None:
    with Engine(ONE, "decode", fill=POISON, faults="read:stall=300s", transport="shm") as sink:
        with Engine(ONE, "prefill", fill=1) as source:
            ref = source.offer("p", 16, [1])
            source.compute("p")
            sink.load("d", ref, [3], (0, 16))
            until(lambda: sink.count("peers.ready"))
            time.sleep(0.1)
            started_s = time.perf_counter()
            source.close()
            assert time.perf_counter() - started_s < 100
            source.close()
        until(lambda: sink.received("d"))
        assert sink.reasons("d") <= {"shutdown", "peer_lost"}


def test_a_sink_that_shuts_down_gives_its_offers_back() -> None:
    with Engine(ONE, "prefill", fill=1) as source:
        ref = source.offer("p", 16, [1])
        source.compute("p")
        with Engine(ONE, "decode", fill=POISON, faults="read:stall=300s", transport="shm") as sink:
            sink.load("d", ref, [3], (0, 16))
            until(lambda: sink.count("peers.ready"))
            time.sleep(0.1)
        until(lambda: source.sent("p"))
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"shutdown"}


# ------------------------------------------------------------------ settings


def test_a_port_in_use_is_named() -> None:
    with (
        Engine(ONE, "prefill", fill=1) as source,
        pytest.raises(ConfigError, match=r"port: expected a free one on 127.0.0.1, got \d+"),
    ):
        Engine(ONE, "other", fill=1, port=int(source.endpoint.rpartition(":")[2]))


def test_a_wildcard_host_is_refused() -> None:
    with pytest.raises(ConfigError, match="peers can connect to"):
        Engine(ONE, "prefill", fill=1, host="0.0.0.0")


def test_calls_before_registration_and_after_shutdown() -> None:
    with Engine(ONE, "prefill", fill=1) as source:
        (worker,) = source.workers
        source.close()
        assert isinstance(worker, WorkerConnector)
        with pytest.raises(ConfigError, match="register_kv_caches"):
            worker.get_handshake_metadata()
        assert worker.get_finished(()) == (None, None)


def test_an_empty_digest_is_another_one_and_no_wild_card() -> None:
    with Engine(ONE, "prefill", fill=1) as source, Engine(ONE, "decode", fill=POISON) as sink:
        ref = source.offer("p", 16, [1])
        source.compute("p")
        sink.load("d", ref, [3], (0, 16), digest=b"")
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"tokens"}


@pytest.mark.parametrize(
    "change", [{"block_tokens": 48}, {"engine_id": "another"}, {"incarnation": b"a" * 16}], ids=str
)
def test_a_scheduler_of_another_engine_is_refused_by_field(change: dict[str, object]) -> None:
    with Engine(ONE, "prefill", fill=1) as source:
        manifest = msgspec.structs.replace(source.manifest, **change)
        ((field, said),) = change.items()
        with pytest.raises(ConfigError, match=rf"{field}: the worker expected .*says {said!r}"):
            source.workers[0].bind_connector_metadata(ConnectorMetadata(manifest=manifest))
