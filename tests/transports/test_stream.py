"""The ZeroMQ wire against peers that say strange things."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvxfer.config import Config
from kvxfer.errors import TransportUnavailable
from kvxfer.testing_peer import Context
from kvxfer.transfer.plan import Chunk
from kvxfer.transfer.pull import chunk_list
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
from kvxfer.transports.zmq_sink import ZmqSink
from kvxfer.transports.zmq_source import ZmqSource
from kvxfer.transports.zmq_stream import (
    AskTrial,
    Attach,
    ChunkHeader,
    Credit,
    Expect,
    TrialHeader,
    decode_to_source,
    encode,
)
from tests.transports.pair import (
    CONFIG,
    Pair,
    a_move,
    expect_of,
    key_of,
    read_request,
    send_request,
)

ZMQ = msgspec.structs.replace(CONFIG, transport="zmq")


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair(ZMQ)
    yield pair
    pair.close()


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
        numbers: list[int] = []
        while len(numbers) < count:
            message = self.receive()[1]
            assert isinstance(message, Credit)
            numbers.extend(message.numbers)
        return numbers


@pytest.fixture
def fake(pair: Pair) -> Iterator[FakeSource]:
    fake = FakeSource(pair.context)
    yield fake
    fake.socket.close()


def _attach(pair: Pair, fake: FakeSource) -> None:
    pair.manifest = msgspec.structs.replace(pair.manifest, data_endpoints={"zmq": fake.endpoint})
    pair.sink.attach(pair.manifest)


def test_sink_drops_counts_and_credits_everything_it_did_not_ask_for(
    pair: Pair, fake: FakeSource
) -> None:
    _attach(pair, fake)
    key, move = key_of(1), a_move()
    pair.sink.submit_expect(read_request(key, move, pair.manifest))
    identity, attach = fake.receive()
    assert attach == Attach(1, 4)
    assert fake.receive() == (identity, Expect(key.nonce, b"sink-incarnation", "pp0tp0"))
    chunks = chunk_list((move.pull,), 2048)
    good = ChunkHeader(key.nonce, key.incarnation, "pp0tp0", "pp0tp0", 0, chunks[0].nbytes)
    change = msgspec.structs.replace
    body = b"\x01" * chunks[0].nbytes
    messages = [
        ([b"\xc1nonsense", body], "malformed"),
        ([b"", body], "malformed"),
        ([encode(good)], "malformed"),
        ([encode(good), body, b"more"], "malformed"),
        ([encode(TrialHeader(5)), b"12345"], "unknown_key"),
        ([encode(change(good, nonce=b"other")), body], "unknown_key"),
        ([encode(change(good, incarnation=b"other")), body], "unknown_key"),
        ([encode(change(good, sequence=len(chunks))), body], "unknown_sequence"),
        ([encode(change(good, sequence=-1)), body], "unknown_sequence"),
        ([encode(change(good, nbytes=1)), b"1"], "wrong_nbytes"),
        ([encode(good), body + b"1"], "wrong_nbytes"),
        ([encode(change(good, nbytes=len(body) + 1)), body + b"1"], "wrong_nbytes"),
    ]
    for frames, reason in messages:
        before = pair.sink.counts[reason]
        fake.socket.send_multipart([identity, *frames])
        pair.until(lambda: pair.sink.counts[reason] == before + 1)  # noqa: B023
    assert pair.content() == b"\xee" * len(pair.content())
    assert pair.seen == []
    # The connection is as good as before, and every message was credited by its number.
    fake.socket.send_multipart([identity, encode(good), body])
    pair.until(lambda: bool(pair.seen))
    fake.socket.send_multipart([identity, encode(good), body])
    pair.until(lambda: pair.sink.counts["duplicate"] == 1)
    pair.turn()
    assert sorted(fake.credits(len(messages) + 2)) == list(range(len(messages) + 2))
    assert pair.content() != b"\xee" * len(pair.content())
    pair.sink.stop_read(key)
    assert isinstance(pair.end(key), ReadStopped)


@given(header=st.binary(max_size=80), body=st.binary(max_size=40))
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_no_frame_ends_the_sink(pair: Pair, fake: FakeSource, header: bytes, body: bytes) -> None:
    if pair.manifest.data_endpoints["zmq"] != fake.endpoint:
        _attach(pair, fake)
        pair.sink.submit_expect(read_request(key_of(1), a_move(), pair.manifest))
    identity = getattr(fake, "identity", None) or fake.receive()[0]
    fake.identity = identity  # type: ignore[attr-defined]
    before = pair.sink.counts.total()
    fake.socket.send_multipart([identity, header, body])
    pair.until(lambda: pair.sink.counts.total() == before + 1)
    assert not any(isinstance(c, ReadBroke | PeerGone) for c in pair.seen)


def test_chunk_of_another_source_is_not_taken(pair: Pair, fake: FakeSource) -> None:
    pair.sink.attach(pair.manifest)
    other = msgspec.structs.replace(
        pair.manifest, control_endpoint="tcp://127.0.0.1:1", data_endpoints={"zmq": fake.endpoint}
    )
    pair.sink.attach(other)
    key, move = key_of(1), a_move()
    pair.sink.submit_expect(read_request(key, move, pair.manifest))
    pair.sink.submit_expect(read_request(key_of(2), move, other))
    identity, _ = fake.receive()
    nbytes = chunk_list((move.pull,), 2048)[0].nbytes
    header = ChunkHeader(key.nonce, key.incarnation, "pp0tp0", "pp0tp0", 0, nbytes)
    fake.socket.send_multipart([identity, encode(header), bytes(nbytes)])
    pair.until(lambda: pair.sink.counts["foreign_source"] == 1)
    pair.source.submit_send(send_request(key, move))
    assert isinstance(pair.end(key), ReadDone)
    assert pair.content() == pair.expected(move)


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
    "message",
    [
        Attach(2, 4),
        Attach(1, 0),
        Attach(1, 1 << 20),
        Credit(tuple(range(8000))),
        Expect(b"", b"i", "pp0tp0"),
        Expect(b"n" * 65, b"i", "pp0tp0"),
        Expect(b"n", b"", "pp0tp0"),
        Expect(b"n", b"i" * 65, "pp0tp0"),
        Expect(b"n", b"i", "r" * 33),
        AskTrial(TRIAL_NBYTES - 1),
        AskTrial(1),
    ],
    ids=[
        *("version", "no slots", "too many slots", "too long", "no nonce", "long nonce"),
        *("no incarnation", "long incarnation", "long rank", "trial of its own", "small trial"),
    ],
)
def test_source_counts_what_makes_no_sense(
    pair: Pair, message: Attach | Expect | Credit | AskTrial
) -> None:
    endpoint = pair.source.data_endpoint()
    assert endpoint is not None
    with pair.context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(endpoint)
        dealer.send(encode(message))
        pair.until(lambda: pair.source.counts["malformed"] == 1)


def test_no_more_chunks_in_flight_than_slots_and_credits_of_nobody_free_nothing(pair: Pair) -> None:
    endpoint = pair.source.data_endpoint()
    assert endpoint is not None
    with pair.context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(endpoint)
        dealer.send(encode(Attach(1, 2)))
        dealer.send(encode(expect_of(key_of(1))))
        pair.source.submit_send(send_request(key_of(1), a_move()))
        for count, numbers in ((2, (7, 8, -1)), (2, (1,)), (3, (1, 1)), (3, (0, 2)), (5, ())):
            deadline_s = time.monotonic() + 0.1
            while time.monotonic() < deadline_s:
                pair.turn()
                time.sleep(0.002)
            assert len([c for c in pair.said if isinstance(c, Packed)]) == count
            dealer.send(encode(Credit(numbers)))
        assert pair.source.counts["unknown_credit"] == 5


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


def test_a_stopped_read_waits_for_the_scatter_that_runs_and_takes_no_more(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, opened = threading.Event(), threading.Event()
    scatter = ZmqSink.scatter
    scattered: list[int] = []

    def slow(self: ZmqSink, read: Any, chunk: Chunk, payload: zmq.Frame) -> None:
        entered.set()
        assert opened.wait(10)
        scatter(self, read, chunk, payload)
        scattered.append(chunk.sequence)

    monkeypatch.setattr(ZmqSink, "scatter", slow)
    # One process has one copy thread for both ends here, so everything is packed before it is kept.
    pair.sink.attach(pair.manifest)
    pair.hold = True
    pair.start(key_of(1), a_move())
    pair.until(lambda: sum(isinstance(c, Packed) for c in pair.said) == 4)
    pair.source.send_packed(key_of(1), 0)
    pair.until(entered.is_set)
    pair.sink.stop_read(key_of(1))
    for sequence in (1, 2, 3):
        pair.source.send_packed(key_of(1), sequence)
    pair.until(lambda: pair.sink.counts["unknown_key"] == 3)
    assert not any(isinstance(c, ReadStopped) for c in pair.seen)
    opened.set()
    assert isinstance(pair.end(key_of(1)), ReadStopped)
    assert scattered == [0]


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
        ({}, "expected a zmq endpoint of .*, got"),
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
    memory = LocalMemory((), ())
    config = Config(transport="zmq", host="203.0.113.1")
    with pytest.raises(TransportUnavailable, match="203.0.113.1 cannot be listened on"):
        ZmqSource(memory, config, pair.copy_thread, pair.wake, pair.context)


def test_headers_are_small_and_stable() -> None:
    header = ChunkHeader(b"n" * 16, b"i" * 16, "pp0tp1", "pp1tp0", 3, 1 << 20)
    assert msgspec.msgpack.decode(encode(header)) == {
        "type": "chunk",
        "nonce": b"n" * 16,
        "incarnation": b"i" * 16,
        "sink_rank": "pp0tp1",
        "source_rank": "pp1tp0",
        "sequence": 3,
        "nbytes": 1 << 20,
    }
    assert np.frombuffer(encode(Credit((1, 2))), dtype=np.uint8).size < 32
