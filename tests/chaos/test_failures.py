"""Failures that users of KV transfer have met, each as a test with its name: none may come back."""

from __future__ import annotations

import os
import random
import socket
import stat
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import zmq
from msgspec.structs import replace

from kvxfer.connector.aggregator import KVOutputAggregator
from kvxfer.connector.records import ConnectorMetadata, KVConnectorOutput
from kvxfer.kernels.strided_copy import launch_copy
from kvxfer.tensors import device_launch
from kvxfer.tensors.device_launch import HostEvent
from kvxfer.transfer.wire import Cancel, Reason
from tests.builders import EngineShape
from tests.conftest import HAS_CUDA
from tests.connector.rig import (
    POISON,
    Engine,
    expect_copied,
    io_thread_of,
    num_pulls,
    until,
)
from tests.copies import HeldPieces, is_pack
from tests.defined import files_by_test
from tests.spoken import watch_frames, watch_messages
from tests.transports.host_gpu import serve_without_gpu
from tests.wires import keep_wires

SHAPE = EngineShape(num_blocks=16)
SPAN = (0, 64)
BLOCKS = (1, 2, 3, 4)
WIRES = ("shm", "zmq")
ENDED = {"ended", "expired", "preempted", "aborted", "reset"}

SHOWN_BY: Mapping[str, tuple[str, ...]] = {
    # A reference that is wrong, stale or unknown; leases that end while somebody reads
    "vLLM 52234": (
        "test_block_ids_out_of_range_are_never_read",
        "test_a_stale_reference_never_gives_the_previous_prompts_answer",
        "test_an_unknown_reference_is_refused_by_name",
    ),
    "vLLM 21570, 20139, 25897, 38027": (
        "test_a_time_out_at_prefill_frees_no_blocks_that_decode_still_reads",
        "test_a_lease_that_ends_before_the_release_discards_the_kv",
    ),
    "aws-do-eks 84": ("test_kv_of_released_blocks_is_not_decoded_from",),
    "vLLM 47021": ("test_a_second_turn_hears_that_the_kv_of_the_first_has_expired",),
    # KV that changes on its way, or little by little
    "InferenceX 1944": (
        "test_bits_that_flip_in_a_header_fail_the_load",
        "test_kv_that_was_corrupted_on_its_way_is_not_used",
    ),
    "vLLM 52617": ("test_a_full_hit_is_right_from_its_first_token_on_or_no_hit",),
    "vLLM 52627": ("test_kv_that_was_corrupted_on_its_way_is_not_used",),
    "SGLang 23020": ("test_the_two_hundredth_request_is_as_right_as_the_first",),
    "vllm-backport 33": ("test_engines_meet_again_when_all_their_connections_have_ended",),
    # Blocks that never come back, or too early
    "vLLM 41269": (
        "test_a_request_rejected_before_admission_strands_no_blocks",
        "test_turned_away_before_admission",
    ),
    "vLLM 56104, 55900": ("test_one_failed_route_frees_no_blocks_while_its_sibling_still_writes",),
    "vLLM 50754": (
        "test_a_chunk_that_cannot_be_posted_fails_the_load_without_a_deadline",
        "test_a_pull_that_cannot_be_posted_ends_in_its_deadline",
    ),
    # Steps and loads
    "vLLM 45357": ("test_a_step_in_flight_never_overwrites_received_blocks",),
    "vLLM 45096, 37285": (
        "test_a_step_in_flight_never_overwrites_received_blocks",
        "test_states_move_with_the_rest",
    ),
    "vLLM 48481": (
        "test_a_step_in_flight_never_overwrites_received_blocks",
        "test_a_load_waits_then_computes_the_rest",
    ),
    "vLLM 50297": (
        "test_an_offer_preempted_in_its_last_step_is_never_read",
        "test_preempted_and_aborted_before_the_next_step",
    ),
    "vLLM 49250": (
        "test_no_token_comes_of_kv_that_is_not_proven",
        "test_a_second_load_into_blocks_of_a_failed_one_has_the_right_kv",
    ),
    "vLLM 47812, 52268": (
        "test_a_failed_load_of_several_groups_is_told_by_request",
        "test_several_groups_need_failures_by_request",
    ),
    "vLLM 32200, 34896": (
        "test_a_failure_is_counted_under_its_reason",
        "test_failed_and_recomputed",
        "test_failed_and_given_up",
    ),
    # Several ranks, several connectors, several models
    "vLLM 53049": (
        "test_a_rank_that_reports_twice_ends_no_request_and_no_engine",
        "test_within_multi_connector_there_is_none",
    ),
    "vLLM 36549": (
        "test_within_multi_connector_an_offer_has_the_blocks_of_all_groups",
        "test_beside_a_connector_for_one_group_there_are_offers",
    ),
    "vLLM 53903": ("test_every_rank_reports_every_request",),
    "vLLM 54926, 49230": (
        "test_layers_of_a_draft_model_move_with_the_others",
        "test_as_much_is_accepted_as_in_one_engine",
        "test_a_draft_at_decode_alone",
    ),
}
"""Public reports of other connectors, by number: which tests fail where kvxfer does the same."""


def test_each_failure_has_tests_that_are_there() -> None:
    named = {name for names in SHOWN_BY.values() for name in names}
    assert named <= files_by_test().keys()


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
    settings = {"transport": wire, **both}
    with (
        Engine(shapes[0], "prefill", fill=None, **settings) as source,
        Engine(shapes[1], "decode", fill=POISON, faults=faults, **settings | (sink or {})) as taker,
    ):
        yield source, taker


@contextmanager
def met(wire: str, **settings: Any) -> Iterator[tuple[Engine, Engine]]:
    """A pair whose next load asks at once."""
    with pair(wire, **settings) as (source, sink):
        ref = source.offer("first", 64, BLOCKS)
        source.compute("first")
        sink.load("first", ref, BLOCKS, SPAN)
        until(lambda: sink.received("first"))
        assert sink.reasons("first") == {None}
        sink.pools[0].tensor.fill_(POISON)
        yield source, sink


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
    settings: dict[str, Any] = {"transport": "zmq", "pull_timeout_s": 1.0}
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


def what_is_open() -> dict[int, str]:
    """By descriptor. Its number may be another's a moment later, as when pools of an earlier test
    are collected; what the kernel calls a socket stays.
    """
    found: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the list itself, or closed meanwhile
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def connections_of(before: Collection[str]) -> Iterator[socket.socket]:
    """Those of this process that stand, but for what was open ``before``."""
    for fd in [fd for fd, what in what_is_open().items() if what not in before]:
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            found = socket.socket(fileno=os.dup(fd))
        except OSError:
            continue  # it has ended meanwhile
        with found:
            try:
                found.getpeername()
            except OSError:
                continue
            yield found


def test_connections_are_found_that_have_the_descriptors_of_what_was_closed() -> None:
    with ExitStack() as stack:
        files = [stack.enter_context(open(os.devnull)) for _ in range(8)]
        numbers, before = {file.fileno() for file in files}, set(what_is_open().values())
        stack.close()
        ends = [stack.enter_context(each) for each in socket.socketpair()]
        assert {each.fileno() for each in ends} <= numbers
        names = {os.readlink(f"/proc/self/fd/{each.fileno()}") for each in ends}
        taken = {os.readlink(f"/proc/self/fd/{each.fileno()}") for each in connections_of(before)}
        assert taken == names


@pytest.mark.parametrize("wire", WIRES)
def test_engines_meet_again_when_all_their_connections_have_ended(wire: str) -> None:
    """Elsewhere all ranks lost their connections in one second after days, no transfer went well
    from then on, and status 200 came with whatever the blocks held.
    """
    two = EngineShape(num_blocks=16, tp_size=2)
    before = set(what_is_open().values())
    with pair(wire, shapes=(two, two)) as (source, sink):

        def load(name: str) -> set[str | None]:
            for pool in sink.pools:
                pool.tensor.fill_(POISON)
            ref = source.offer(name, 64, BLOCKS)
            source.compute(name)
            sink.load(name, ref, BLOCKS, SPAN)
            until(lambda: sink.received(name))
            return sink.reasons(name)

        for number in range(4):
            assert load(f"whole {number}") == {None}
            expect_copied(source, sink, BLOCKS, BLOCKS, SPAN)
            lost = sink.count("peers.peer_lost")
            for each in connections_of(before):
                each.shutdown(socket.SHUT_RDWR)
            if number % 2:  # else the next load finds it out
                until(lambda lost=lost: sink.count("peers.peer_lost") >= lost + 2)  # type: ignore[misc]
            reasons = load(f"cut {number}")
            assert reasons <= {None, "peer_lost"}
            if reasons == {None}:
                expect_copied(source, sink, BLOCKS, BLOCKS, SPAN)
        until(lambda: all(source.sent(f"whole {number}") for number in range(4)))


@pytest.mark.parametrize("wire", WIRES)
def test_the_two_hundredth_request_is_as_right_as_the_first(wire: str) -> None:
    """Elsewhere answers went bad little by little: of requests 1 to 50 95 in 100 were right, of 101
    to 150 half of them. Stages and ranks differ, blocks are used again and again, and some loads
    are given up.
    """
    shapes = (
        EngineShape(num_blocks=16, pp_size=2, tp_size=2),
        EngineShape(num_blocks=12, layout="NHD"),
    )
    chance = random.Random(23020)
    descriptors: list[int] = []
    with pair(wire, shapes=shapes, chunk_nbytes=4096) as (source, sink):
        for number in range(200):
            values = np.random.default_rng(number)
            for pool in source.pools:  # another prompt's, in the blocks of those before it
                content = values.integers(0, 256, len(pool.tensor), np.uint8)
                pool.tensor.copy_(torch.from_numpy(content))
            sink.pools[0].tensor.fill_(POISON)
            name = f"r{number}"
            given, taken = (tuple(chance.sample(range(1, n), 4)) for n in (16, 12))
            ref = source.offer(name, 64, given)
            source.compute(name)
            sink.load(name, ref, taken, SPAN)
            is_given_up = number % 7 == 6
            if is_given_up:
                sink.abort(name)
            until(lambda name=name: sink.received(name))  # type: ignore[misc]
            if sink.reasons(name) == {None}:
                expect_copied(source, sink, given, taken, SPAN)
            else:
                assert is_given_up
            until(lambda name=name: source.sent(name))  # type: ignore[misc]
            if number in (20, 199):
                descriptors.append(len(os.listdir("/proc/self/fd")))
    assert descriptors[1] <= descriptors[0]


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
def test_one_failed_route_frees_no_blocks_while_its_sibling_still_writes(
    wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two source ranks: one ends its offer while the copy from the other one is held. Each has more
    chunks than slots, so that none has sent all of them by then.
    """
    keep_wires(monkeypatch)
    is_held = threading.Event()
    held = HeldPieces(monkeypatch, wire, lambda job: is_held.is_set() and not is_pack(job))
    one, two = (EngineShape(num_blocks=16, num_layers=32, tp_size=size) for size in (1, 2))
    settings: dict[str, Any] = {"chunk_nbytes": 4096, "staging_slots": 2}
    with met(wire, shapes=(two, one), **settings) as (source, sink):
        is_held.set()
        ref = source.offer("p", 64, BLOCKS)
        source.compute("p")
        sink.load("d", ref, BLOCKS, SPAN)
        assert held.has_begun.wait(60)
        cancels: list[Cancel] = []

        def look(message: object) -> None:
            if isinstance(message, Cancel):
                cancels.append(message)

        watch_messages(monkeypatch, look)
        ended = ConnectorMetadata(ended=(source.end_of("p"),))
        source.workers[1].handle_preemptions(ended)
        until(lambda: cancels)
        io_thread_of(sink)  # has done all that it does then
        sink.collect()
        assert sink.results[0].received == ["first"]
        held.may_end.set()
        until(lambda: sink.received("d"))
        num_ended = held.num_ended
        assert sink.reasons("d") <= ENDED
        sink.pools[0].tensor.fill_(POISON)  # nothing writes any more
        sink.load("later", source.offer("q", 64, BLOCKS), (5, 6, 7, 8), SPAN)
        source.compute("q")
        until(lambda: sink.received("later"))
        assert sink.reasons("later") == {None}
        assert held.num_ended > num_ended
        expect_copied(source, sink, BLOCKS, (5, 6, 7, 8), SPAN)


@pytest.mark.parametrize("nth", [1, 3])
def test_a_chunk_that_cannot_be_posted_fails_the_load_without_a_deadline(
    nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere decode, which was not told, waits for ever. Its deadline is far here."""
    deep = EngineShape(num_blocks=16, num_layers=8)
    settings: dict[str, Any] = {"pull_timeout_s": 3600.0, "chunk_nbytes": 4096}
    with met("zmq", shapes=(deep, deep), **settings) as (source, sink):
        ref = source.offer("p", 64, BLOCKS)
        source.compute("p")
        num_posted = 0

        def post(frames: list[Any]) -> None:
            nonlocal num_posted
            if len(frames) == 3:  # peer, announcement, payload
                num_posted += 1
                if num_posted == nth:
                    raise zmq.ZMQError(zmq.EHOSTUNREACH)

        with monkeypatch.context() as patch:
            watch_frames(patch, post)
            sink.load("d", ref, BLOCKS, SPAN)
            until(lambda: sink.received("d"))
        assert num_posted >= nth
        assert sink.reasons("d") == {"read_failed"}
        until(lambda: source.sent("p"))


def test_a_pull_that_cannot_be_posted_ends_in_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing leaves any more on either side."""
    with met("zmq") as (source, sink):
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


class Launched:
    """What was launched on the engine's stream and has not run yet: it does when somebody waits for
    an event behind it.
    """

    def __init__(self) -> None:
        self.work: list[Callable[[], object]] = []
        self.num_run = 0

    def run(self, until_number: int) -> None:
        while self.num_run < until_number:
            self.num_run += 1
            self.work[self.num_run - 1]()

    def use(self, patch: pytest.MonkeyPatch) -> None:
        """As the stream of a GPU."""
        patch.setattr("kvxfer.connector.worker_side.stream_of", lambda device: self)

    def record(self) -> Behind:
        return Behind(self, len(self.work))


class Behind(HostEvent):
    """An event behind the first works of a stream."""

    def __init__(self, launched: Launched, number: int) -> None:
        self._launched, self._number = launched, number

    def query(self) -> bool:
        return self._launched.num_run >= self._number

    def synchronize(self) -> None:
        self._launched.run(self._number)


@pytest.mark.skipif(HAS_CUDA, reason="the order of a stand-in's stream")
def test_a_step_in_flight_never_overwrites_received_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With async scheduling a request that has ended gives its blocks back while a step that still
    writes them is in flight, and the next load is into these.
    """
    keep_wires(monkeypatch)
    monkeypatch.setattr(device_launch, "launch_copy", launch_copy)
    serve_without_gpu()
    launched = Launched()
    launched.use(monkeypatch)
    with met("cuda_ipc", sink={"launches_on": torch.device("cuda")}) as (source, sink):
        ref = source.offer("p", 64, BLOCKS)
        source.compute("p")
        launched.work.append(lambda: sink.pools[0].tensor.fill_(POISON))
        sink.load("d", ref, BLOCKS, SPAN)
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {None}
        launched.run(len(launched.work))  # as late as it can
        expect_copied(source, sink, BLOCKS, BLOCKS, SPAN)


@pytest.mark.parametrize("wire", WIRES)
def test_a_load_that_was_given_up_writes_nothing_once_it_is_reported(wire: str) -> None:
    """Blocks are another request's from then on."""
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
def test_a_second_load_into_blocks_of_a_failed_one_has_the_right_kv(wire: str) -> None:
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
        assert sink.take_stats().reasons == {"read_failed": 1}


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


RANKS = {
    "four for two heads": EngineShape(num_blocks=16, tp_size=4),
    "two stages": EngineShape(num_blocks=16, pp_size=2, tp_size=2),
    "tokens in turns": EngineShape(
        num_blocks=16, num_kv_heads=1, tp_size=2, cp_size=2, protocol=(1, 3)
    ),
}


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("many", RANKS.values(), ids=RANKS)
def test_every_rank_reports_every_request(wire: str, many: EngineShape) -> None:
    """Also those that nobody reads; on both sides, and where the load is given up."""
    one = EngineShape(num_blocks=16, num_kv_heads=many.num_kv_heads, protocol=many.protocol)
    table = BLOCKS[: -(-64 // many.table_tokens)]
    with (
        pair(wire, shapes=(many, one)) as (source, sink),
        pair(wire, shapes=(one, many)) as (other, sinks),
    ):
        for takes, gives, given, taken in (
            (sink, source, table, BLOCKS),
            (sinks, other, BLOCKS, table),
        ):
            for name, is_given_up in (("p", False), ("q", True)):
                ref = gives.offer(name, 64, given)
                gives.compute(name)
                takes.load(name, ref, taken, SPAN)
                if is_given_up:
                    takes.abort(name)
                until(lambda takes=takes, name=name: takes.received(name))  # type: ignore[misc]
                assert is_given_up or takes.reasons(name) == {None}
                until(lambda gives=gives, name=name: gives.sent(name))  # type: ignore[misc]


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
