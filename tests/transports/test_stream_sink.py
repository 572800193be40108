"""The taking end of a stream wire against a source that says strange things."""

from __future__ import annotations

import select
import threading
from collections.abc import Collection, Iterator
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvxfer.errors import TransportUnavailable
from kvxfer.testing.cases import Move
from kvxfer.testing.peers import Context
from kvxfer.transfer.chunks import chunk_list
from kvxfer.transfer.costs import Staging
from kvxfer.transfer.manifest import MemoryInfo
from kvxfer.transfer.wire import Reason
from kvxfer.transports.base import (
    PeerGone,
    ReadBroke,
    ReadDone,
    ReadStopped,
    SendStopped,
    TransferKey,
)
from kvxfer.transports.pipe import HOST_STAGING, Slots, StagingSize
from kvxfer.transports.stream_sink import StreamSink
from kvxfer.transports.stream_wire import (
    Attach,
    Attached,
    ChunkHeader,
    Credit,
    Expect,
    Refused,
    TrialHeader,
    decode_to_sink,
    decode_to_source,
    encode,
)
from kvxfer.transports.zmq_pipe import ZmqPipe, ZmqSinkLane
from tests.copies import HeldPieces, is_unpack
from tests.helpers import needs_nixl, needs_ucxx
from tests.spoken import change_frames
from tests.transports.pair import (
    ATTACH,
    CONFIG,
    Pair,
    a_move,
    connections_of,
    key_of,
    link_of,
    load,
    read_request,
    send_request,
)
from tests.wires import use_pipe

UCX = pytest.param("ucx", marks=needs_ucxx)
NIXL = pytest.param("nixl", marks=needs_nixl)


class SmallOnGpus(ZmqPipe):
    """Another pipe, which has less staging for memory of a GPU."""

    @classmethod
    def staging_size(cls, device_type: str) -> StagingSize:
        is_host = device_type == "cpu"
        return HOST_STAGING if is_host else StagingSize(16 << 20, 2 << 20, busy_slots=4)


@pytest.fixture
def small_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a pair that is made after it."""
    use_pipe(monkeypatch, "zmq", lambda *_: SmallOnGpus())


@pytest.mark.parametrize("device", ["cpu", "cuda:3"])
def test_staging_is_bounded_by_the_memory_of_both_sides(
    small_on_gpus: None, pair: Pair, device: str
) -> None:
    sink = pair.sink
    assert isinstance(sink, StreamSink)
    memories = (MemoryInfo(device="cpu", nbytes=1), MemoryInfo(device=device, nbytes=1))
    bounds = sink.staging_bounds(msgspec.structs.replace(pair.manifest, memories=memories))
    sizes = bounds.nbytes, bounds.most_chunk_nbytes, bounds.busy_slots
    assert sizes == ((32 << 20, 8 << 20, 6) if device == "cpu" else (16 << 20, 2 << 20, 4))


class FakeSource:
    """A ROUTER that sends what a test wants."""

    def __init__(self, context: Context) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, 5000)
        self.endpoint = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"

    def receive(self) -> tuple[bytes, Attach | Expect | Credit]:
        identity, frame = self.socket.recv_multipart()
        message = decode_to_source(memoryview(frame))
        assert isinstance(message, Attach | Expect | Credit)
        return identity, message

    def credits(self, count: int) -> list[int]:
        slots: list[int] = []
        while len(slots) < count:
            message = self.receive()[1]
            assert isinstance(message, Credit)
            slots.extend(message.slots)
        return slots


@pytest.fixture
def fake(pair: Pair) -> Iterator[FakeSource]:
    fake = FakeSource(pair.context)
    yield fake
    fake.socket.close()


def _attach(pair: Pair, fake: FakeSource) -> bytes:
    """What the sink says first, and what a source answers; returns the sink's identity."""
    pair.manifest = msgspec.structs.replace(pair.manifest, data_endpoints={"zmq": fake.endpoint})
    pair.sink.attach(pair.manifest)
    identity, attach = fake.receive()
    assert attach == ATTACH
    fake.socket.send_multipart([identity, encode(Attached(b""))])
    return identity


def _header(key: TransferKey, move: Move) -> ChunkHeader:
    """Of the first chunk, in slot 0."""
    nbytes = chunk_list((move.pull,), 2048)[0].nbytes
    return ChunkHeader(key.nonce, key.incarnation, "pp0tp0", "pp0tp0", 0, nbytes, 0, 0)


def test_a_sink_answers_the_empty_frames_of_earlier_sources(pair: Pair, fake: FakeSource) -> None:
    identity = _attach(pair, fake)
    fake.socket.send_multipart([identity, b""])
    while not fake.socket.poll(10):
        pair.sink.poll()
    assert fake.socket.recv_multipart() == [identity, encode(Credit(()))]


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Addresses of sources that sinks have met, of a pair that is made after it."""
    met: list[bytes] = []

    class Lane(ZmqSinkLane):
        def connected(self, address: bytes) -> None:
            met.append(address)

    class Noting(ZmqPipe):
        def open_sink(self, slots: Slots, way: str = "") -> Lane:
            return Lane(slots)

    use_pipe(monkeypatch, "zmq", lambda *_: Noting())
    return met


def test_no_end_is_met_of_a_source_that_has_gone_when_its_word_is_read(
    met: list[bytes], monkeypatch: pytest.MonkeyPatch, pair: Pair, fake: FakeSource
) -> None:
    """It is killed after its word, and ZeroMQ has not told of that yet."""
    poll = select.poll

    class AfterTheEnd:
        def register(self, fd: int, events: int) -> None:
            self._poll = poll()
            self._poll.register(fd, events)

        def poll(self, _: float) -> list[tuple[int, int]]:
            fake.socket.close()
            return self._poll.poll(120_000)

    monkeypatch.setattr(select, "poll", AfterTheEnd)
    _attach(pair, fake)
    pair.until(lambda: PeerGone(pair.manifest.control_endpoint) in pair.seen)
    assert met == []


MANY_PARTS = [b""] * 1000


def test_a_source_that_sends_many_parts_is_gone(pair: Pair, fake: FakeSource) -> None:
    identity = _attach(pair, fake)
    key = key_of(1)
    pair.sink.submit_expect(read_request(key, a_move(), pair.manifest))
    fake.socket.send_multipart([identity, *MANY_PARTS])
    end = pair.end(key)
    assert isinstance(end, ReadBroke)
    assert end.detail == "the source rank makes no sense: it sent a message of many parts"
    pair.until(lambda: PeerGone(pair.manifest.control_endpoint) in pair.seen)
    assert pair.sink.counts["malformed"] == 1


def test_a_source_that_sends_many_parts_has_no_trial(pair: Pair, fake: FakeSource) -> None:
    def answer() -> None:
        identity, _ = fake.receive()
        fake.socket.send_multipart([identity, *MANY_PARTS])

    manifest = msgspec.structs.replace(pair.manifest, data_endpoints={"zmq": fake.endpoint})
    answering = threading.Thread(target=answer)
    answering.start()
    with pytest.raises(TransportUnavailable, match="it sent a message of many parts"):
        pair.sink.trial(manifest, 10.0)
    answering.join()


def test_sink_drops_counts_and_credits_everything_it_did_not_ask_for(
    pair: Pair, fake: FakeSource
) -> None:
    identity = _attach(pair, fake)
    key, move = key_of(1), a_move()
    pair.sink.submit_expect(read_request(key, move, pair.manifest))
    assert fake.receive() == (identity, Expect(key.nonce, b"sink-incarnation", "pp0tp0"))
    num_chunks = len(chunk_list((move.pull,), 2048))
    good = _header(key, move)
    body = b"\x01" * good.nbytes
    changes: list[tuple[dict[str, Any], str]] = [
        ({"nonce": b"other"}, "unknown_key"),
        ({"incarnation": b"other"}, "unknown_key"),
        ({"sequence": num_chunks}, "unknown_sequence"),
        ({"sequence": -1}, "unknown_sequence"),
        ({"nbytes": 1}, "wrong_nbytes"),
        ({"nbytes": len(body) + 1}, "wrong_nbytes"),
    ]
    for number, (change, reason) in enumerate(changes):
        slot, generation = number % 4, number // 4
        before = pair.sink.counts[reason]
        header = msgspec.structs.replace(good, slot=slot, generation=generation, **change)
        payload = bytes(header.nbytes)
        fake.socket.send_multipart([identity, encode(header), payload])
        pair.until(lambda: pair.sink.counts[reason] == before + 1)  # noqa: B023
        assert fake.credits(1) == [slot]
    trial = TrialHeader(5, slot=2, generation=1)
    fake.socket.send_multipart([identity, encode(trial), b"12345"])
    pair.until(lambda: pair.sink.counts["unknown_key"] == 3)
    assert fake.credits(1) == [2]
    assert pair.content() == b"\xee" * len(pair.content())
    assert pair.seen == []
    # The connection is as good as before.
    for generation in (2, 3):
        header = msgspec.structs.replace(good, generation=generation)
        fake.socket.send_multipart([identity, encode(header), body])
        pair.until(lambda: pair.sink.counts["duplicate"] == generation - 2)  # noqa: B023
        pair.until(lambda: bool(pair.seen))
        assert fake.credits(1) == [0]
    assert pair.content() != b"\xee" * len(pair.content())
    pair.sink.stop_read(key)
    assert isinstance(pair.end(key), ReadStopped)


def _unreadable(good: ChunkHeader) -> list[list[bytes]]:
    change, body = msgspec.structs.replace, b"\x01" * good.nbytes
    return [
        [b"\xc1nonsense", body],
        [b"", body],
        [encode(good)],
        [encode(good), body, b"more"],
        [encode(good), body + b"1"],
        [encode(change(good, nbytes=-1)), b""],
        [encode(change(good, nbytes=(4 << 20) + 1)), body],
        [encode(change(good, slot=-1)), body],
        [encode(change(good, slot=4)), body],
        [encode(change(good, generation=1)), body],
        [encode(change(good, generation=-1)), body],
        [encode(Attached(b""))],
        [encode(Attached(b"x" * (16385)))],
    ]


@pytest.mark.parametrize("number", range(13))
def test_what_cannot_be_read_is_dropped_until_no_slot_may_be_left(
    pair: Pair, fake: FakeSource, number: int
) -> None:
    identity = _attach(pair, fake)
    key, move = key_of(1), a_move()
    pair.sink.submit_expect(read_request(key, move, pair.manifest))
    frames = _unreadable(msgspec.structs.replace(_header(key, move), slot=3))[number]
    for count in (1, 2, 3):
        fake.socket.send_multipart([identity, *frames])
        pair.until(lambda: pair.sink.counts["malformed"] == count)  # noqa: B023
    good = _header(key, move)
    fake.socket.send_multipart([identity, encode(good), b"\x01" * good.nbytes])
    pair.until(lambda: bool(pair.seen))
    assert not any(isinstance(c, ReadBroke | PeerGone) for c in pair.seen)
    fake.socket.send_multipart([identity, *frames])
    end = pair.end(key)
    assert isinstance(end, ReadBroke)
    assert end.reason is Reason.PEER_LOST
    assert "makes no sense" in end.detail
    assert PeerGone(pair.manifest.control_endpoint) in pair.seen


@pytest.mark.parametrize("frame", [b"\xc1nonsense", encode(Attached(b"x" * 16385))])
def test_before_attached_nothing_that_cannot_be_read_is_let_pass(
    pair: Pair, fake: FakeSource, frame: bytes
) -> None:
    pair.manifest = msgspec.structs.replace(pair.manifest, data_endpoints={"zmq": fake.endpoint})
    pair.sink.attach(pair.manifest)
    identity, _ = fake.receive()
    key = key_of(1)
    pair.sink.submit_expect(read_request(key, a_move(), pair.manifest))
    fake.socket.send_multipart([identity, frame])
    end = pair.end(key)
    assert isinstance(end, ReadBroke)
    assert end.reason is Reason.PEER_LOST
    assert PeerGone(pair.manifest.control_endpoint) in pair.seen
    assert pair.sink.counts["malformed"] == 1


def _lose_the_first(pair: Pair, changed: Collection[bytes]) -> TransferKey:
    """Of a read whose connection ends by what was changed on its way."""
    pair.sink.attach(pair.manifest)
    key = key_of(1)
    pair.start(key, a_move())
    end = pair.end(key)
    assert changed
    assert isinstance(end, ReadBroke)
    assert end.reason is Reason.PEER_LOST
    return key


@pytest.mark.parametrize("wire", ["zmq", "tcp", UCX, NIXL])
def test_a_connection_whose_attached_is_cut_off_ends_at_both_ends_and_the_next_one_carries(
    monkeypatch: pytest.MonkeyPatch, wire: str
) -> None:
    """With most pipes nothing else would follow: the source waits for the sink's end of the pipe,
    or announces what only a sink that has met it hears.
    """
    cut: list[bytes] = []

    def change(frames: list[Any]) -> list[Any]:
        if not cut and isinstance(decode_to_sink(memoryview(frames[1])), Attached):
            cut.append(frames[1])
            return [frames[0], frames[1][:6]]
        return frames

    change_frames(monkeypatch, change)
    pair = Pair(msgspec.structs.replace(CONFIG, transport=wire))
    try:
        key = _lose_the_first(pair, cut)
        assert PeerGone(pair.manifest.control_endpoint) in pair.seen
        pair.until(lambda: pair.said_kind(SendStopped, key))
        assert not connections_of(pair).all()
        pair.sink.attach(pair.manifest)
        load(pair, 2)
    finally:
        pair.close()


@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.ROUTER], ids=["the sink's", "the source's"])
@pytest.mark.parametrize("wire", [UCX, NIXL])
def test_an_address_that_was_damaged_costs_its_connection_alone(
    monkeypatch: pytest.MonkeyPatch, wire: str, kind: int
) -> None:
    """NIXL keeps half of what it cannot read to its end, and then refuses that agent for ever."""
    damaged: list[bytes] = []
    at, decode = (1, decode_to_sink) if kind == zmq.ROUTER else (0, decode_to_source)

    def change(frames: list[Any]) -> list[Any]:
        frame = bytes(frames[at])
        message = frame and decode(memoryview(frame))
        if damaged or not isinstance(message, Attach | Attached):
            return frames
        damaged.append(frame)
        place = frame.index(message.address) + len(message.address) // 2
        changed = frame[:place] + bytes([frame[place] ^ 4]) + frame[place + 1 :]
        return [*frames[:at], changed, *frames[at + 1 :]]

    change_frames(monkeypatch, change, kind)
    pair = Pair(msgspec.structs.replace(CONFIG, transport=wire))
    try:
        _lose_the_first(pair, damaged)
        pair.until(lambda: not connections_of(pair).all())
        pair.sink.attach(pair.manifest)
        load(pair, 2)
    finally:
        pair.close()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> HeldPieces:
    """What is unpacked by a pair that is made after it."""
    return HeldPieces(monkeypatch, "zmq", is_unpack)


def test_a_slot_is_the_source_s_again_only_with_its_credit(
    held: HeldPieces, pair: Pair, fake: FakeSource
) -> None:
    identity = _attach(pair, fake)
    key, move = key_of(1), a_move()
    pair.sink.submit_expect(read_request(key, move, pair.manifest))
    good = _header(key, move)
    body = b"\x01" * good.nbytes
    for header in (good, msgspec.structs.replace(good, sequence=1, generation=1)):
        fake.socket.send_multipart([identity, encode(header), body])
    pair.until(lambda: pair.sink.counts["malformed"] == 1)
    fake.socket.send_multipart([identity, encode(good), body])  # announced before
    pair.until(lambda: pair.sink.counts["duplicate"] == 1)
    held.may_end.set()
    pair.until(lambda: bool(pair.seen))
    pair.sink.stop_read(key)
    assert isinstance(pair.end(key), ReadStopped)


def test_a_credit_waits_for_others_while_more_of_its_read_is_to_come(
    pair: Pair, fake: FakeSource
) -> None:
    pair.manifest = msgspec.structs.replace(pair.manifest, data_endpoints={"zmq": fake.endpoint})
    pair.sink.attach(pair.manifest, Staging(6, 4 << 20, None))
    identity, _ = fake.receive()
    fake.socket.send_multipart([identity, encode(Attached(b""))])
    key, move = key_of(1), a_move()
    pair.sink.submit_expect(read_request(key, move, pair.manifest))
    fake.receive()
    chunks = chunk_list((move.pull,), 2048)

    def send(number: int) -> None:
        header = msgspec.structs.replace(
            _header(key, move), sequence=number, slot=5 - number, nbytes=chunks[number].nbytes
        )
        fake.socket.send_multipart([identity, encode(header), bytes(header.nbytes)])
        pair.until(lambda: len(pair.seen) == number + 1)

    send(0)
    send(1)
    assert fake.receive()[1] == Credit((5, 4))  # a third of the slots
    send(2)
    pair.sink.inspect()  # the source is told in the end, also where nothing comes any more
    assert fake.receive()[1] == Credit((3,))
    send(3)
    pair.sink.stop_read(key)
    assert isinstance(pair.end(key), ReadStopped)
    pair.until(lambda: bool(fake.socket.poll(0)))
    assert fake.receive()[1] == Credit((2,))


def test_a_credit_that_was_not_taken_goes_along_with_the_next(
    pair: Pair, fake: FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source that stands still has a full queue; without its credits it would have no slots."""
    identity = _attach(pair, fake)
    key, move = key_of(1), a_move()
    pair.sink.submit_expect(read_request(key, move, pair.manifest))
    fake.receive()
    good = _header(key, move)
    with monkeypatch.context() as patched:
        patched.setattr(link_of(pair).latest, "send", lambda frame: False)
        fake.socket.send_multipart([identity, encode(good), bytes(good.nbytes)])
        pair.until(lambda: pair.sink.counts["send_failed"] == 1)
    pair.sink.inspect()
    assert fake.credits(1) == [0]
    pair.sink.stop_read(key)
    assert isinstance(pair.end(key), ReadStopped)


@given(header=st.binary(max_size=80), body=st.binary(max_size=40))
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_no_frame_ends_the_sink(pair: Pair, fake: FakeSource, header: bytes, body: bytes) -> None:
    pair.sink.detach(pair.manifest.control_endpoint)
    identity = _attach(pair, fake)
    before = pair.sink.counts.total()
    fake.socket.send_multipart([identity, header, body])
    pair.until(lambda: pair.sink.counts.total() == before + 1)
    assert not any(isinstance(c, ReadBroke | PeerGone) for c in pair.seen)


def test_chunk_of_another_source_is_not_taken(pair: Pair, fake: FakeSource) -> None:
    pair.sink.attach(pair.manifest)
    first = pair.manifest
    key, move = key_of(1), a_move()
    pair.sink.submit_expect(read_request(key, move, first))
    pair.manifest = msgspec.structs.replace(first, control_endpoint="tcp://127.0.0.1:1")
    identity = _attach(pair, fake)
    pair.sink.submit_expect(read_request(key_of(2), move, pair.manifest))
    header = _header(key, move)
    fake.socket.send_multipart([identity, encode(header), bytes(header.nbytes)])
    pair.until(lambda: pair.sink.counts["foreign_source"] == 1)
    pair.source.submit_send(send_request(key, move))
    assert isinstance(pair.end(key), ReadDone)
    assert pair.content() == pair.expected(move)


def test_a_connection_that_is_dropped_on_the_way_is_not_looked_at_again(
    pair: Pair, fake: FakeSource
) -> None:
    """Its last words, and what the monitor says of it, are there at once."""
    pair.manifest = msgspec.structs.replace(pair.manifest, data_endpoints={"zmq": fake.endpoint})
    pair.sink.attach(pair.manifest)
    identity, _ = fake.receive()
    fake.socket.send_multipart([identity, encode(Refused("go away"))])
    for each in pair.sink.pollables():
        assert isinstance(each, zmq.Socket)
        assert each.poll(120_000)
    assert pair.sink.poll() == [PeerGone(pair.manifest.control_endpoint)]
    assert pair.sink.poll() == []
    assert not pair.sink.pollables()
