"""Failures that users of KV transfer have met, each as a test with its name: none may come back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from kvxfer.connector.aggregator import KVOutputAggregator
from kvxfer.connector.records import KVConnectorOutput
from kvxfer.transfer.wire import Reason
from tests.builders import EngineShape
from tests.connector.rig import PATIENT, POISON, Engine, expect_copied, num_pulls, until
from tests.spoken import watch_messages

SHAPE = EngineShape(num_blocks=16)
SPAN = (0, 64)
BLOCKS = (1, 2, 3, 4)
WIRES = ("shm", "zmq")
ENDED = {"ended", "expired", "preempted", "aborted", "reset"}


@contextmanager
def pair(
    wire: str,
    *,
    faults: str = "",
    shapes: tuple[EngineShape, EngineShape] = (SHAPE, SHAPE),
    sink: dict[str, Any] | None = None,
    **both: Any,
) -> Iterator[tuple[Engine, Engine]]:
    """``sink``, ``faults``: of the sink alone."""
    settings = {**PATIENT, "transport": wire, **both}
    with (
        Engine(shapes[0], "prefill", fill=None, **settings) as source,
        Engine(shapes[1], "decode", fill=POISON, faults=faults, **settings | (sink or {})) as taker,
    ):
        yield source, taker


def nothing_written(engine: Engine) -> bool:
    return all(bool((pool.tensor == POISON).all()) for pool in engine.pools)


# ------------------------------------------------------------------ silent wrong answers


@pytest.mark.parametrize("wire", WIRES)
def test_block_ids_out_of_range_are_never_read(wire: str) -> None:
    """Elsewhere: garbage, and status 200."""
    with pair(wire) as (source, sink):
        ref = source.offer("p", 64, (1, 2, SHAPE.num_blocks, 4))
        source.compute("p")
        sink.load("d", ref, BLOCKS, SPAN)
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"plan"}
        assert nothing_written(sink)


@pytest.mark.parametrize("wire", WIRES)
def test_a_stale_reference_never_gives_the_previous_prompts_answer(wire: str) -> None:
    """The blocks hold another prompt by now; the reference is that of the first."""
    with pair(wire) as (source, sink):
        stale = source.offer("first", 64, BLOCKS)
        source.compute("first")
        source.end("first")
        until(lambda: source.sent("first"))
        source.offer("second", 64, BLOCKS)
        source.compute("second")
        sink.load("d", stale, BLOCKS, SPAN)
        until(lambda: sink.received("d"))
        assert sink.reasons("d") <= ENDED
        assert nothing_written(sink)


@pytest.mark.parametrize("wire", WIRES)
def test_an_unknown_reference_is_refused_by_name(wire: str) -> None:
    with pair(wire) as (source, sink):
        ref = source.offer("p", 64, BLOCKS)
        source.compute("p")
        unknown = replace(ref, offer=replace(ref.offer, nonce=bytes(16)))
        sink.load("d", unknown, BLOCKS, SPAN)
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"unknown"}
        assert nothing_written(sink)


@pytest.mark.parametrize("wire", WIRES)
def test_a_time_out_at_prefill_frees_no_blocks_that_decode_still_reads(wire: str) -> None:
    """They are freed, and what is read of them afterwards counts for nothing."""
    with pair(wire, faults="read:slow=300ms") as (source, sink):
        ref = source.offer("p", 64, BLOCKS)
        source.compute("p")
        sink.load("d", ref, BLOCKS, SPAN)
        until(
            lambda: (
                sink.count("board.grants")
                or num_pulls(source, ref.offer.nonce)
                or sink.received("d")  # while this thread had no turn
            )
        )
        given = source.pools[0].tensor.clone()
        source.end("p", Reason.EXPIRED)
        source.pools[0].tensor.fill_(0)
        until(lambda: sink.received("d"))
        if wire == "zmq" and sink.reasons("d") == {None}:
            # What was sent while the offer was open is whole, whenever it is put in place
            source.pools[0].tensor.copy_(given)
            expect_copied(source, sink, BLOCKS, BLOCKS, SPAN)
        else:
            assert sink.reasons("d") <= ENDED


@pytest.mark.parametrize("wire", WIRES)
def test_kv_of_released_blocks_is_not_decoded_from(wire: str) -> None:
    """An offer that nobody took in time is over, whatever its blocks hold."""
    with pair(wire, lease_s=0.3, keep_s=0.2) as (source, sink):
        ref = source.offer("p", 64, BLOCKS)
        source.compute("p")
        until(lambda: source.sent("p"))
        sink.load("d", ref, BLOCKS, SPAN)
        until(lambda: sink.received("d"))
        assert sink.reasons("d") <= ENDED
        assert nothing_written(sink)


def test_bits_that_flip_in_a_header_fail_the_load() -> None:
    """Not one load of these is taken; flips in the KV itself are found by digests alone."""
    settings: dict[str, Any] = {**PATIENT, "transport": "zmq", "pull_timeout_s": 1.0}
    faults = "chunk:corrupt_header"
    with (
        Engine(SHAPE, "prefill", fill=None, faults=faults, **settings) as source,
        Engine(SHAPE, "decode", fill=POISON, **settings) as sink,
    ):
        ref = source.offer("p", 64, BLOCKS)
        source.compute("p")
        sink.load("d", ref, BLOCKS, SPAN)
        until(lambda: sink.received("d"))
        assert None not in sink.reasons("d")
        assert nothing_written(sink)


@pytest.mark.parametrize("wire", WIRES)
def test_a_full_hit_is_right_from_its_first_token_on_or_no_hit(wire: str) -> None:
    """vLLM 52617: all tokens were reported as loaded, and the first one was wrong already."""
    sink_shape = EngineShape(num_blocks=4, block_tokens=64, layout="NHD")
    shapes = (SHAPE, sink_shape)
    for faults, reasons in (("", {None}), ("read:blank", {"corrupt"})):
        with pair(wire, faults=faults, shapes=shapes, verify="all") as (source, sink):
            ref = source.offer("p", 64, BLOCKS)
            source.compute("p")
            sink.load("d", ref, (2,), SPAN)
            until(lambda: sink.received("d"))  # noqa: B023  # it waits here
            assert sink.reasons("d") == reasons
            if reasons == {None}:
                expect_copied(source, sink, BLOCKS, (2,), SPAN)
            else:
                assert nothing_written(sink)


@pytest.mark.parametrize("wire", WIRES)
def test_kv_that_was_corrupted_on_its_way_is_not_used(wire: str) -> None:
    """vLLM 52627: answers were wrong, and nothing had failed."""
    with pair(wire, faults="read:flip=1;seed=3", verify="all") as (source, sink):
        ref = source.offer("p", 64, BLOCKS)
        source.compute("p")
        sink.load("d", ref, BLOCKS, SPAN)
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"corrupt"}
        (report,) = sink.reports("d")
        assert "regions that differ" in report.detail
        assert sink.count("verify.differing") == 1


@pytest.mark.parametrize("wire", WIRES)
def test_a_second_turn_hears_that_the_kv_of_the_first_has_expired(wire: str) -> None:
    """vLLM 47021: decode gives the KV of the first turn back to prefill, and prefill is late."""
    with pair(wire, lease_s=1.0, keep_s=0.2) as (prefill, decode):
        ref = prefill.offer("first", 64, BLOCKS)
        prefill.compute("first")
        decode.load("first at decode", ref, BLOCKS, SPAN)
        until(lambda: decode.received("first at decode"))
        assert decode.reasons("first at decode") == {None}
        late = decode.offer("late", 64, BLOCKS)
        decode.compute("late")
        until(lambda: decode.sent("late"))  # its lease has run out
        decode.pools[0].tensor.fill_(7)  # and its blocks are another request's
        before = prefill.pools[0].tensor.clone()
        prefill.load("second", late, (5, 6, 7, 8), SPAN)
        until(lambda: prefill.received("second"))
        assert prefill.reasons("second") <= ENDED
        assert bool((prefill.pools[0].tensor == before).all())
        in_time = decode.offer("in time", 64, BLOCKS)
        decode.compute("in time")
        prefill.load("third", in_time, (5, 6, 7, 8), SPAN)
        until(lambda: prefill.received("third"))
        assert prefill.reasons("third") == {None}
        after = prefill.pools[0].tensor
        changed = after != before
        assert bool((after[changed] == 7).all())
        assert float(changed.float().mean()) > 0.9 * len(BLOCKS) / SHAPE.num_blocks


# ------------------------------------------------------------------ blocks that never come back


@pytest.mark.parametrize("wire", WIRES)
def test_a_request_rejected_before_admission_strands_no_blocks(wire: str) -> None:
    """Long before the lease of 300 s."""
    with pair(wire) as (source, sink):
        ref = source.offer("p", 64, BLOCKS)
        source.compute("p")
        sink.unhold("d", ref)
        until(lambda: source.sent("p"))


@pytest.mark.parametrize("wire", WIRES)
def test_one_failed_route_frees_no_blocks_while_its_sibling_still_writes(wire: str) -> None:
    """Two source ranks: one ends the load, the other one's copy goes on."""
    two = EngineShape(num_blocks=16, tp_size=2)
    with pair(wire, faults="read:slow=500ms,read:fail;nth=2", shapes=(two, SHAPE)) as (
        source,
        sink,
    ):
        ref = source.offer("p", 64, BLOCKS)
        source.compute("p")
        sink.load("d", ref, BLOCKS, SPAN)
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"read_failed"}
        # Nothing writes any more
        sink.pools[0].tensor.fill_(POISON)
        until(lambda: source.sent("p"))
        assert nothing_written(sink)


def test_a_transfer_that_cannot_be_posted_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere decode waits for ever."""
    with pair("zmq", pull_timeout_s=1.0) as (source, sink):
        first = source.offer("first", 64, BLOCKS)
        source.compute("first")
        sink.load("warm", first, BLOCKS, SPAN)
        until(lambda: sink.received("warm"))
        ref = source.offer("p", 64, BLOCKS)
        source.compute("p")

        def no_send(*_: object) -> None:
            raise OSError(24, "too many open files")

        with monkeypatch.context() as patch:
            watch_messages(patch, no_send)
            sink.load("d", ref, BLOCKS, SPAN)
            until(lambda: sink.received("d"))
        assert None not in sink.reasons("d")
        sink.expected_io_errors = sink.count("io.errors")


# ------------------------------------------------------------------ steps and loads


@pytest.mark.parametrize("wire", WIRES)
def test_a_step_in_flight_never_meets_received_blocks(wire: str) -> None:
    """Loads are reported only when nothing writes: what comes after stays as it was."""
    with pair(wire, faults="read:slow=50ms") as (source, sink):
        ref = source.offer("p", 64, BLOCKS)
        source.compute("p")
        sink.load("d", ref, BLOCKS, SPAN)
        sink.abort("d")
        until(lambda: sink.received("d"))
        sink.pools[0].tensor.fill_(7)
        until(lambda: source.sent("p"))
        assert bool((sink.pools[0].tensor == 7).all())


@pytest.mark.parametrize("wire", WIRES)
def test_an_offer_preempted_in_its_last_step_is_never_read(wire: str) -> None:
    with pair(wire) as (source, sink):
        ref = source.offer("p", 64, BLOCKS)
        sink.load("d", ref, BLOCKS, SPAN)  # parked: the offer is not open yet
        source.end("p", Reason.PREEMPTED)
        source.compute("p")
        until(lambda: sink.received("d"))
        assert sink.reasons("d") <= ENDED
        assert nothing_written(sink)


@pytest.mark.parametrize("wire", WIRES)
def test_a_failed_load_computed_anew_has_the_right_kv(wire: str) -> None:
    """The second request of the same prompt loads into the blocks of the failed one."""
    with pair(wire, faults="read:fail;nth=1") as (source, sink):
        for name, reasons in (("first", {"read_failed"}), ("second", {None})):
            ref = source.offer(name, 64, BLOCKS)
            source.compute(name)
            sink.load(name, ref, BLOCKS, SPAN)
            until(lambda name=name: sink.received(name))  # type: ignore[misc]
            assert sink.reasons(name) == reasons
        expect_copied(source, sink, BLOCKS, BLOCKS, SPAN)


def test_a_failed_load_of_several_groups_is_told_by_request() -> None:
    """Elsewhere it is told by block, and ends the engine."""
    hybrid = EngineShape(num_blocks=16, groups=(0, 1))
    with pair("shm", faults="read:fail", shapes=(hybrid, hybrid)) as (source, sink):
        ref = source.offer_groups("p", 64, (BLOCKS, (5, 6, 7, 8)))
        source.compute("p")
        sink.load_groups("d", ref, (BLOCKS, (5, 6, 7, 8)), SPAN)
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"read_failed"}
        assert sink.workers[0].get_block_ids_with_load_errors() == set()


def test_a_failure_is_counted_under_its_reason() -> None:
    """A policy that computes anew must not hide it."""
    with pair("shm", faults="read:fail") as (source, sink):
        ref = source.offer("p", 64, BLOCKS)
        source.compute("p")
        sink.load("d", ref, BLOCKS, SPAN)
        until(lambda: sink.received("d"))
        assert sink.count("loads.failed") == 1
        (report,) = sink.reports("d")
        assert report.reason is Reason.READ_FAILED
        assert report.detail


# ------------------------------------------------------------------ several ranks


def test_a_rank_that_reports_twice_ends_no_request_and_no_engine() -> None:
    aggregator = KVOutputAggregator(2)

    def step(*reports: set[str] | None) -> Any:
        outputs = [
            SimpleNamespace(kv_connector_output=KVConnectorOutput(finished_recving=report))
            for report in reports
        ]
        merged = aggregator.aggregate(outputs)
        assert merged is not None
        return merged.kv_connector_output.finished_recving

    assert step({"r"}, None) is None
    assert step({"r"}, None) is None
    assert step(None, {"r"}) == {"r"}


@pytest.mark.parametrize("wire", WIRES)
def test_every_rank_reports_every_request(wire: str) -> None:
    """Also those that read nothing: four ranks have two heads, one rank takes them."""
    many = EngineShape(num_blocks=16, tp_size=4)
    with pair(wire, shapes=(many, SHAPE)) as (source, sink):
        ref = source.offer("p", 64, BLOCKS)
        source.compute("p")
        sink.load("d", ref, BLOCKS, SPAN)
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {None}
        until(lambda: source.sent("p"))


@pytest.mark.parametrize("wire", WIRES)
def test_layers_of_a_draft_model_move_with_the_others(wire: str) -> None:
    """Two layers more in a group of their own; a sink that lacks them is refused by name."""
    drafted = EngineShape(num_blocks=16, num_layers=4, groups=(0, 0, 1, 1))
    table = (BLOCKS, (5, 6, 7, 8))
    with pair(wire, shapes=(drafted, drafted)) as (source, sink):
        ref = source.offer_groups("p", 64, table)
        source.compute("p")
        sink.load_groups("d", ref, table, SPAN)
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {None}
        got, given = (each.pools[0].tensor.numpy() for each in (sink, source))
        moved = got != POISON
        np.testing.assert_array_equal(got[moved], given[moved])
        assert moved.mean() > 0.98 * len(BLOCKS) / drafted.num_blocks
    with pair(wire, shapes=(SHAPE, drafted)) as (source, sink):
        ref = source.offer("p", 64, BLOCKS)
        source.compute("p")
        sink.load_groups("d", ref, table, SPAN)
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"incompatible"}
        assert "num_layers" in sink.reports("d")[0].detail
