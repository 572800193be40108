"""The stream wire, and its source against peers that say strange things."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import msgspec
import numpy as np
import pytest
import torch
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvxfer.config import Config
from kvxfer.errors import TransportUnavailable
from kvxfer.testing.cases import CASES, make_move
from kvxfer.testing.peers import PiecesJob
from kvxfer.transfer.costs import Staging
from kvxfer.transfer.wire import Reason
from kvxfer.transports.base import (
    TRIAL_NBYTES,
    LocalMemory,
    Packed,
    PeerGone,
    ReadBroke,
    ReadDone,
    ReadStopped,
    SendStopped,
    Sent,
)
from kvxfer.transports.copy_thread import CopyJob
from kvxfer.transports.pipe import Slots, SourceLane, make_staging
from kvxfer.transports.stream_connections import MAX_STAGING_NBYTES
from kvxfer.transports.stream_source import StreamSource
from kvxfer.transports.stream_wire import (
    FRAME_MAX_NBYTES,
    AskTrial,
    Attach,
    Attached,
    ChunkHeader,
    Credit,
    Expect,
    Refused,
    ToSource,
    decode_to_sink,
    encode,
)
from kvxfer.transports.zmq_pipe import ZmqPipe, ZmqSinkLane, ZmqSourceLane, untouched
from tests.copies import HeldPieces, is_pack, is_unpack
from tests.spoken import watch_frames
from tests.transports.pair import (
    ATTACH,
    CONFIG,
    ZMQ,
    Pair,
    a_move,
    connections_of,
    expect_of,
    key_of,
    load,
    read_request,
    send_request,
)
from tests.wires import run_pieces, use_pipe, use_source


def test_a_wire_is_idle_until_it_has_something_to_say_or_can_be_read(pair: Pair) -> None:
    source, sink, key = pair.source, pair.sink, key_of(1)
    assert source.is_idle
    assert sink.is_idle
    source.stop_send(key)
    sink.stop_read(key)
    assert not source.is_idle
    assert not sink.is_idle
    pair.until(lambda: pair.said == [SendStopped(key, None)] and pair.seen == [ReadStopped(key)])
    assert source.is_idle
    assert sink.is_idle
    source.submit_send(send_request(key, a_move()))  # no sink has come for it
    assert source.is_idle
    source.stop_send(key)
    pair.until(lambda: pair.said_kind(SendStopped, key))
    sink.attach(pair.manifest)
    assert sink.is_idle
    pair.until(lambda: bool(len(connections_of(pair))))  # the attach is read, although it was idle
    pair.hold = True
    pair.start(key_of(2), a_move())
    pair.until(lambda: pair.said_kind(Packed, key_of(2)))
    pair.until(lambda: source.is_idle)  # all slots are full, and the next word is the owner's
    assert sink.is_idle
    sink.detach(pair.manifest.control_endpoint)
    assert not sink.is_idle
    pair.until(lambda: not len(connections_of(pair)))  # and so is the end of the connection
    pair.until(lambda: source.is_idle and sink.is_idle)


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[SourceLane]:
    """The lanes that the source of a pair has closed that is made after it."""
    lanes: list[SourceLane] = []

    class Lane(ZmqSourceLane):
        def close(self) -> None:
            lanes.append(self)
            super().close()

    class Noting(ZmqPipe):
        def open_source(
            self, address: bytes, slots: Slots, *, fd: int | None = None
        ) -> ZmqSourceLane:
            return Lane(slots, untouched)

    use_source(monkeypatch, "zmq", partial(StreamSource, lambda *_: Noting()))
    return lanes


def test_a_source_is_not_idle_while_it_fills_the_slot_of_a_trial_that_has_gone(
    closed: list[SourceLane], pair: Pair
) -> None:
    source, gate = pair.source, threading.Event()

    def hold() -> Iterator[None]:
        gate.wait(120)
        yield

    pair.copy_thread.submit(PiecesJob("gate", hold(), lambda job: None))
    with pytest.raises(TransportUnavailable):
        pair.trial(0.3)
    pair.until(lambda: not len(connections_of(pair)))
    assert not source.is_idle
    assert closed == []
    gate.set()
    pair.until(lambda: source.is_idle)
    assert len(closed) == 1


def test_a_chunk_that_no_slot_holds_is_refused_on_both_sides(pair: Pair) -> None:
    small = msgspec.structs.replace(CONFIG, transport="zmq", chunk_nbytes=4096)
    other = Pair(small)
    try:
        key, move = key_of(1), make_move(CASES[0], 1)
        request = read_request(key, move, other.manifest)
        large = msgspec.structs.replace(request, chunk_nbytes=1 << 20)
        other.sink.attach(other.manifest)
        other.sink.submit_expect(large)
        end = other.end(key)
        assert isinstance(end, ReadBroke)
        assert end.reason is Reason.PLAN
        assert "expected at most 4096 bytes" in end.detail
        # A sink that asks all the same
        other.sink.submit_expect(msgspec.structs.replace(large, key=key_of(2), chunk_nbytes=2048))
        other.source.submit_send(
            dataclasses.replace(send_request(key_of(2), move), chunk_nbytes=1 << 20)
        )
        other.until(lambda: other.said_kind(SendStopped, key_of(2)))
        assert other.said[-1] == SendStopped(key_of(2), Reason.PLAN)
        # The slots that were chosen for this connection hold its chunks
        other.sink.detach(other.manifest.control_endpoint)
        other.sink.attach(other.manifest, Staging(2, 1 << 20, None))
        other.start(key_of(3), move)
        assert isinstance(other.end(key_of(3)), ReadDone)
    finally:
        other.close()


@given(frames=st.lists(st.binary(max_size=60), min_size=1, max_size=3))
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_no_frame_ends_the_source(pair: Pair, frames: list[bytes]) -> None:
    endpoint = pair.source.data_endpoint()
    assert endpoint is not None
    before = pair.source.counts["malformed"]
    with pair.context.socket(zmq.DEALER) as dealer:
        dealer.connect(endpoint)
        dealer.send_multipart(frames)
        pair.until(lambda: pair.source.counts["malformed"] == before + 1)
        dealer.setsockopt(zmq.LINGER, 0)


@pytest.mark.parametrize(
    ("messages", "refusal"),
    [
        ((Attach(1, 4),), "attach: version: expected 4, got 1"),
        ((msgspec.structs.replace(ATTACH, pipe="ucx"),), "attach: pipe: expected zmq, got ucx"),
        ((msgspec.structs.replace(ATTACH, num_slots=0),), "num_slots: expected 1 to 1024, got 0"),
        ((msgspec.structs.replace(ATTACH, num_slots=1 << 20),), "num_slots"),
        ((msgspec.structs.replace(ATTACH, slot_nbytes=0),), "slot_nbytes: expected 1 to 67108864"),
        ((msgspec.structs.replace(ATTACH, slot_nbytes=(64 << 20) + 1),), "slot_nbytes"),
        (
            (msgspec.structs.replace(ATTACH, is_trial=True, num_slots=6),),
            "attach: expected at most Slots(num_slots=5, slot_nbytes=4194304) of a trial",
        ),
        ((msgspec.structs.replace(ATTACH, address=b"x" * 16385, address_crc32=None),), None),
        ((ATTACH, ATTACH), None),
        ((Credit(tuple(range(8000))),), None),
        ((Expect(b"", b"i", "pp0tp0"),), None),
        ((Expect(b"n" * 65, b"i", "pp0tp0"),), None),
        ((Expect(b"n", b"", "pp0tp0"),), None),
        ((Expect(b"n", b"i" * 65, "pp0tp0"),), None),
        ((Expect(b"n", b"i", "r" * 33),), None),
        ((ATTACH, AskTrial(TRIAL_NBYTES - 1)), None),
        ((ATTACH, AskTrial(1)), None),
    ],
    ids=[
        *(
            "version",
            "pipe",
            "no slots",
            "too many slots",
            "no bytes",
            "large slots",
            "trial's slots",
        ),
        "address",
        *("twice", "too long", "no nonce", "long nonce", "no incarnation", "long incarnation"),
        *("long rank", "trial of its own", "small trial"),
    ],
)
def test_source_counts_what_makes_no_sense(
    pair: Pair, messages: tuple[ToSource, ...], refusal: str | None
) -> None:
    endpoint = pair.source.data_endpoint()
    assert endpoint is not None
    with pair.context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(endpoint)
        for message in messages:
            dealer.send(encode(message))
        pair.until(lambda: pair.source.counts["malformed"] == 1)
        if refusal is not None:
            assert dealer.poll(120_000)
            answer = decode_to_sink(memoryview(dealer.recv()))
            assert isinstance(answer, Refused)
            assert refusal in answer.detail


def test_no_more_chunks_in_flight_than_slots_and_credits_of_nobody_free_nothing(pair: Pair) -> None:
    endpoint = pair.source.data_endpoint()
    assert endpoint is not None
    with pair.context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(endpoint)
        dealer.send(encode(msgspec.structs.replace(ATTACH, num_slots=2)))
        dealer.send(encode(expect_of(key_of(1))))
        pair.source.submit_send(send_request(key_of(1), a_move()))

        def num_packed() -> int:
            return sum(isinstance(each, Packed) for each in pair.said)

        for count, slots in ((2, (7, 8, -1)), (2, (1,)), (3, (1, 1)), (4, (0, 2)), (5, ())):
            pair.until(lambda count=count: num_packed() >= count)  # type: ignore[misc]
            deadline_s = time.monotonic() + 0.1  # for one too many to come
            while time.monotonic() < deadline_s:
                pair.turn()
                time.sleep(0.002)
            assert num_packed() == count
            dealer.send(encode(Credit(slots)))
        pair.until(lambda: pair.source.counts["unknown_credit"] == 5)
        headers: list[object] = []
        while len(headers) < 6 or dealer.poll(0):
            assert dealer.poll(120_000)
            headers.append(decode_to_sink(memoryview(dealer.recv_multipart()[0])))
        assert headers[0] == Attached(b"")
        places = [(h.slot, h.generation) for h in headers[1:] if isinstance(h, ChunkHeader)]
        assert places == [(1, 0), (0, 0), (1, 1), (1, 2), (0, 1)]


def test_a_source_with_fewer_slots_than_its_sink_waits_for_no_credit() -> None:
    """What a sink holds for others leaves with its next look, and here nobody looks."""
    with closing(Pair(ZMQ, msgspec.structs.replace(ZMQ, staging_slots=24))) as pair:
        pair.sink.attach(pair.manifest)
        for number in (1, 2):
            load(pair, number)


def test_a_packed_slot_is_not_freed_by_a_credit(pair: Pair) -> None:
    endpoint = pair.source.data_endpoint()
    assert endpoint is not None
    pair.hold = True
    with pair.context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(endpoint)
        dealer.send(encode(ATTACH))
        dealer.send(encode(expect_of(key_of(1))))
        pair.source.submit_send(send_request(key_of(1), a_move()))
        pair.until(lambda: sum(isinstance(c, Packed) for c in pair.said) == 4)
        dealer.send(encode(Credit((0, 1, 2, 3))))
        pair.until(lambda: pair.source.counts["unknown_credit"] == 4)
        assert sum(isinstance(c, Packed) for c in pair.said) == 4


@pytest.fixture
def wide() -> Iterator[Pair]:
    """Its source gives a sink half of all staging; memory is taken for what is packed only."""
    slots = {"staging_slots": MAX_STAGING_NBYTES // 2 // FRAME_MAX_NBYTES}
    pair = Pair(msgspec.structs.replace(ZMQ, staging_nbytes=MAX_STAGING_NBYTES // 2, **slots))
    yield pair
    pair.close()


def test_staging_of_all_sinks_is_bounded(wide: Pair) -> None:
    """Room for two connections: idle ones go, busy ones stay."""
    pair = wide
    num_slots = MAX_STAGING_NBYTES // 2 // FRAME_MAX_NBYTES
    attach = msgspec.structs.replace(ATTACH, num_slots=num_slots, slot_nbytes=FRAME_MAX_NBYTES)
    endpoint = pair.source.data_endpoint()
    assert endpoint is not None
    pair.hold = True
    dealers = [pair.context.socket(zmq.DEALER) for _ in range(4)]
    try:
        for number, dealer in enumerate(dealers):
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(endpoint)
            dealer.send(encode(attach))
            dealer.send(encode(expect_of(key_of(number))))
            pair.source.submit_send(send_request(key_of(number), a_move()))
            if number == 0:  # it has staging, and nothing to do
                pair.until(lambda: pair.said_kind(Packed, key_of(0)))
                pair.source.stop_send(key_of(0))
            ended = SendStopped if number == 3 else Packed
            pair.until(lambda: pair.said_kind(ended, key_of(number)))  # noqa: B023
        assert pair.source.counts["sent_away"] == 1
        assert pair.source.counts["too_much_staging"] == 1
        for number, sentence in ((0, b"idle"), (3, b"expected staging of at most 4294967296")):
            said = b""
            while sentence not in said:
                assert dealers[number].poll(120_000)
                said = dealers[number].recv_multipart()[0]
    finally:
        for dealer in dealers:
            dealer.close()


def test_transfers_of_one_connection_interleave(pair: Pair) -> None:
    pair.sink.attach(pair.manifest)
    for number in (1, 2):
        pair.start(key_of(number), a_move(number))
    for number in (1, 2):
        assert isinstance(pair.end(key_of(number)), ReadDone)
    order = [c.key.nonce[-1] for c in pair.said if isinstance(c, Packed)]
    # The first one alone takes the four free slots; from then on they take turns.
    assert order[:4] == [1] * 4
    assert order[4:14] == [1, 2] * 5


def test_a_chunk_that_is_packed_at_once_leaves_before_the_next_is_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks of two transfers, on the IO thread itself: the wire has something to carry early."""
    order: list[str] = []

    def noted(job: CopyJob) -> bool:
        order.extend(["pack"] * is_pack(job))
        return job.run()

    run_pieces(monkeypatch, "zmq", noted, at_once=True)
    watch_frames(monkeypatch, lambda frames: order.extend(["send"] * (len(frames) - 2)))
    pair = Pair(ZMQ, small_nbytes=64 << 20)
    try:
        pair.sink.attach(pair.manifest)
        for number in (1, 2):
            pair.start(key_of(number), a_move(number))

        def are_done() -> bool:
            assert order[-1:] != ["pack"]  # it leaves in the round in which it was packed
            return sum(isinstance(each, ReadDone) for each in pair.seen) == 2

        pair.until(are_done)
        assert len(order) >= 2 * 2 * 9
        assert order == ["pack", "send"] * (len(order) // 2)
    finally:
        pair.close()


def test_the_source_has_more_while_chunks_that_are_packed_at_once_have_slots() -> None:
    pair = Pair(ZMQ, small_nbytes=64 << 20)
    try:
        pair.sink.attach(pair.manifest)
        pair.start(key_of(1), a_move())
        pair.hold = True
        pair.until(lambda: bool(pair.said))
        assert len(pair.said) == 1
        while pair.source.has_more:
            pair.said += pair.source.poll()
        packed = [each.sequence for each in pair.said if isinstance(each, Packed)]
        assert packed == [0, 1, 2, 3]  # four slots
    finally:
        pair.close()


def test_the_first_chunk_of_an_idle_connection_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    are_awaited: list[bool] = []

    def noted(job: CopyJob) -> bool:
        are_awaited.extend([job.is_awaited] * is_pack(job))
        return job.run()

    run_pieces(monkeypatch, "zmq", noted)
    pair = Pair(ZMQ)
    try:
        pair.sink.attach(pair.manifest)
        pair.hold = True
        pair.start(key_of(1), a_move())
        pair.until(lambda: len(pair.said) == 4)  # as many as there are slots
        assert are_awaited == [True, False, False, False]
    finally:
        pair.close()


def test_source_waits_for_the_sink_to_attach(pair: Pair) -> None:
    pair.source.submit_send(send_request(key_of(1), a_move()))
    pair.source.submit_send(send_request(key_of(2), a_move()))
    pair.source.stop_send(key_of(2))
    pair.until(lambda: pair.said_kind(SendStopped, key_of(2)))
    assert not any(isinstance(c, Packed) for c in pair.said)
    pair.sink.attach(pair.manifest)
    pair.sink.submit_expect(read_request(key_of(1), a_move(), pair.manifest))
    assert isinstance(pair.end(key_of(1)), ReadDone)
    assert pair.content() == pair.expected(a_move())
    pair.until(lambda: pair.said_kind(Sent, key_of(1)))


def test_dropped_chunks_are_not_sent_and_use_up_no_slot(pair: Pair) -> None:
    pair.sink.attach(pair.manifest)
    pair.hold = True
    for number in range(1, 6):
        key = key_of(number)
        pair.start(key, a_move())
        pair.until(lambda: pair.said_kind(Packed, key))  # noqa: B023
        packed = [c for c in pair.said if isinstance(c, Packed) and c.key == key]
        for chunk in packed:
            pair.source.drop_packed(key, chunk.sequence)
        pair.source.stop_send(key)
        pair.until(lambda: pair.said_kind(SendStopped, key))  # noqa: B023
        pair.sink.stop_read(key)
        assert isinstance(pair.end(key), ReadStopped)
    assert pair.content() == b"\xee" * len(pair.content())
    pair.hold = False
    pair.start(key_of(9), a_move())
    assert isinstance(pair.end(key_of(9)), ReadDone)
    assert pair.content() == pair.expected(a_move())


def test_without_a_dropped_chunk_nothing_more_of_its_transfer_is_packed(pair: Pair) -> None:
    pair.sink.attach(pair.manifest)
    pair.hold = True
    pair.start(key_of(1), a_move())

    def packed() -> list[int]:
        return [c.sequence for c in pair.said if isinstance(c, Packed)]

    pair.until(lambda: len(packed()) == 4)
    pair.source.drop_packed(key_of(1), packed()[0])
    for _ in range(20):
        pair.turn()
    assert len(packed()) == 4
    pair.source.stop_send(key_of(1))
    pair.until(lambda: pair.said_kind(SendStopped, key_of(1)))


def test_a_stopped_send_gives_its_packed_buffers_back(pair: Pair) -> None:
    pair.sink.attach(pair.manifest)
    pair.hold = True
    pair.start(key_of(1), a_move())
    pair.until(lambda: sum(isinstance(c, Packed) for c in pair.said) == 4)
    pair.source.stop_send(key_of(1))
    pair.until(lambda: pair.said_kind(SendStopped, key_of(1)))
    pair.hold = False
    pair.start(key_of(2), a_move())
    assert isinstance(pair.end(key_of(2)), ReadDone)
    pair.source.send_packed(key_of(1), 0)  # too late: the buffer is another chunk's
    assert pair.source.counts["unknown_packed"] == 1


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> HeldPieces:
    """What is unpacked by a pair that is made after it."""
    return HeldPieces(monkeypatch, "zmq", is_unpack)


def test_a_stopped_read_waits_for_the_scatter_that_runs_and_takes_no_more(
    held: HeldPieces, pair: Pair
) -> None:
    # One process has one copy thread for both ends here, so everything is packed before it is kept.
    pair.sink.attach(pair.manifest)
    pair.hold = True
    pair.start(key_of(1), a_move())
    pair.until(lambda: sum(isinstance(c, Packed) for c in pair.said) == 4)
    pair.source.send_packed(key_of(1), 0)
    pair.until(held.has_begun.is_set)
    pair.sink.stop_read(key_of(1))
    for sequence in (1, 2, 3):
        pair.source.send_packed(key_of(1), sequence)
    pair.until(lambda: pair.sink.counts["unknown_key"] == 3)
    assert not any(isinstance(c, ReadStopped) for c in pair.seen)
    held.may_end.set()
    assert isinstance(pair.end(key_of(1)), ReadStopped)
    assert held.num_ended == 1


def test_a_new_attach_of_the_same_sink_ends_what_was_sent_to_the_old_one(pair: Pair) -> None:
    pair.sink.attach(pair.manifest)
    pair.hold = True
    pair.start(key_of(1), a_move())
    pair.until(lambda: pair.said_kind(Packed, key_of(1)))
    pair.sink.detach(pair.manifest.control_endpoint)
    assert pair.end(key_of(1)) == ReadBroke(
        key_of(1), Reason.PEER_LOST, "the source rank was detached"
    )
    pair.sink.attach(pair.manifest)
    pair.sink.submit_expect(read_request(key_of(2), a_move(), pair.manifest))
    pair.until(lambda: pair.said_kind(SendStopped, key_of(1)))
    stopped = next(c for c in pair.said if isinstance(c, SendStopped))
    assert stopped.reason is Reason.PEER_LOST


def test_ids_outside_the_pool_break_the_transfer_only(pair: Pair) -> None:
    pair.sink.attach(pair.manifest)
    key, move = key_of(1), a_move()
    pair.sink.submit_expect(read_request(key, move, pair.manifest))
    bad = send_request(key, move)
    pair.source.submit_send(type(bad)(key, bad.classes, bad.sides, ((99,) * 20,), bad.chunk_nbytes))
    pair.until(lambda: pair.said_kind(SendStopped, key))
    stopped = next(c for c in pair.said if isinstance(c, SendStopped))
    assert stopped.reason is Reason.READ_FAILED
    pair.sink.stop_read(key)
    assert isinstance(pair.end(key), ReadStopped)
    pair.start(key_of(2), move)
    assert isinstance(pair.end(key_of(2)), ReadDone)


class Full(ZmqPipe):
    """One side has no memory for staging."""

    def __init__(self, side: str) -> None:
        super().__init__()
        self._side = side

    def open_source(self, address: bytes, slots: Slots, *, fd: int | None = None) -> ZmqSourceLane:
        self._allocate("source")
        return super().open_source(address, slots)

    def open_sink(self, slots: Slots, way: str = "") -> ZmqSinkLane:
        self._allocate("sink")
        return super().open_sink(slots, way)

    def _allocate(self, side: str) -> None:
        if side == self._side:
            make_staging(1 << 62, torch.device("cpu"))


def test_a_sink_is_told_that_its_source_has_no_memory_for_staging(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_pipe(monkeypatch, "zmq", lambda *_: Full("source"))
    with closing(Pair(ZMQ)) as pair:
        pair.sink.attach(pair.manifest)
        pair.start(key_of(1), a_move())
        end = pair.end(key_of(1))
        assert isinstance(end, ReadBroke)
        assert end.reason is Reason.PEER_LOST
        assert "refuses the connection: staging: expected 46116860" in end.detail
        assert pair.said_kind(SendStopped, key_of(1))
        with pytest.raises(TransportUnavailable, match="refuses: staging: expected 46116860"):
            pair.trial()


def test_a_sink_without_memory_for_staging_has_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """So another wire may be taken."""
    use_pipe(monkeypatch, "zmq", lambda *_: Full("sink"))
    with closing(Pair(ZMQ)) as pair:
        with pytest.raises(TransportUnavailable, match="staging: expected 46116860"):
            pair.trial()
        with pytest.raises(TransportUnavailable, match="staging: expected 46116860"):
            pair.sink.attach(pair.manifest)


def test_nobody_listens(pair: Pair) -> None:
    nowhere = msgspec.structs.replace(pair.manifest, data_endpoints={"zmq": "tcp://127.0.0.1:9"})
    pair.sink.attach(nowhere)
    pair.sink.submit_expect(read_request(key_of(1), a_move(), nowhere))
    end = pair.end(key_of(1))
    assert isinstance(end, ReadBroke)
    assert end.reason is Reason.PEER_LOST
    pair.until(lambda: PeerGone(nowhere.control_endpoint) in pair.seen)


@pytest.mark.parametrize(
    ("endpoints", "sentence"),
    [
        ({}, "a source that offers it, got .* with no stream wire; to have it, set transport zmq"),
        ({"tcp": "tcp://127.0.0.1:9", "ucx": "tcp://127.0.0.1:9"}, "with tcp and ucx; to have it"),
        ({"zmq": "tcp://8.8.8.8:53"}, "of an allowed peer"),
        ({"zmq": "ipc:///tmp/x"}, "of an allowed peer"),
        ({"zmq": "tcp://"}, "of an allowed peer"),
    ],
)
def test_endpoints_that_are_not_connected_to(
    pair: Pair, endpoints: dict[str, str], sentence: str
) -> None:
    manifest = msgspec.structs.replace(pair.manifest, data_endpoints=endpoints)
    with pytest.raises(TransportUnavailable, match=sentence):
        pair.sink.attach(manifest)
    with pytest.raises(TransportUnavailable, match=sentence):
        pair.sink.trial(manifest, 1.0)


def test_a_host_that_is_not_ours(pair: Pair) -> None:
    memory = LocalMemory((pair.source_pool.tensor,), (pair.source_pool.info,))
    config = Config(transport="zmq", host="203.0.113.1")
    with pytest.raises(TransportUnavailable, match="203.0.113.1 cannot be listened on"):
        StreamSource(
            lambda *_: ZmqPipe(), memory, config, pair.copy_thread, pair.wake, pair.context
        )


def test_headers_are_small_and_stable() -> None:
    header = ChunkHeader(b"n" * 16, b"i" * 16, "pp0tp1", "pp1tp0", 3, 1 << 20, 5, 7)
    assert msgspec.msgpack.decode(encode(header)) == {
        "type": "chunk",
        "nonce": b"n" * 16,
        "incarnation": b"i" * 16,
        "sink_rank": "pp0tp1",
        "source_rank": "pp1tp0",
        "sequence": 3,
        "nbytes": 1 << 20,
        "slot": 5,
        "generation": 7,
    }
    assert np.frombuffer(encode(Credit((1, 2))), dtype=np.uint8).size < 32


def test_a_trial_needs_no_room_in_the_staging_that_a_source_allows() -> None:
    """Its slots are the trial's own, and go with it; settings are for what carries KV."""
    pair = Pair(msgspec.structs.replace(ZMQ, staging_nbytes=64 << 10), ZMQ)
    try:
        assert pair.trial().costs.bytes_per_s > 0
    finally:
        pair.close()
