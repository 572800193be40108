"""Several streams of one connection: who may have how many, what goes over which, and its end."""

from __future__ import annotations

import errno
import os
import queue
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.config import Config
from kvxfer.errors import ProtocolError
from kvxfer.tensors.device_memory import Gpu
from kvxfer.testing import check_transport
from kvxfer.testing.peers import PiecesJob
from kvxfer.transfer.wire import Reason
from kvxfer.transports.base import (
    Packed,
    PeerGone,
    ReadBroke,
    ReadDone,
    SendStopped,
)
from kvxfer.transports.channel import Dealer
from kvxfer.transports.copy_thread import CopyJob, CopyThreads
from kvxfer.transports.parallel import (
    MOST_FURTHER,
    make_context,
    make_copier,
    num_cores,
    num_streams,
    stream_threads,
    thread_of_stream,
)
from kvxfer.transports.pipe import HOST_STAGING, Slots
from kvxfer.transports.stream_connections import MAX_STAGING_NBYTES
from kvxfer.transports.stream_machine import SlotEvent, SourceSlots
from kvxfer.transports.stream_sink import StreamSink
from kvxfer.transports.stream_source import StreamSource
from kvxfer.transports.stream_wire import (
    Attach,
    Attached,
    Credit,
    Join,
    Refused,
    Streams,
    decode_to_sink,
    decode_to_source,
    encode,
)
from kvxfer.transports.zmq_pipe import ZmqSourceLane
from tests.far_peers import limit_descriptors, use_tcp
from tests.machine import CPU_QUOTA, put
from tests.spoken import change_frames, watch_dealers, watch_frames
from tests.transports.pair import (
    ATTACH,
    ZMQ,
    Pair,
    TcpSink,
    a_move,
    connections_of,
    end_stream,
    key_of,
    link_of,
    load,
    stream_side,
    zmq_pipe,
)


def with_streams(number: int, **others: object) -> Config:
    return msgspec.structs.replace(ZMQ, zmq_streams=number, **others)


@contextmanager
def a_pair(source: int, sink: int | None = None, **others: object) -> Iterator[Pair]:
    """Both ends, with so many streams each."""
    sink = source if sink is None else sink
    with closing(Pair(with_streams(source, **others), with_streams(sink, **others))) as pair:
        pair.sink.attach(pair.manifest)
        yield pair


def until_joined(pair: Pair, number: int) -> None:
    """Streams, the first included."""
    pair.until(lambda: [len(each.streams) for each in connections_of(pair).all()] == [number])


@pytest.fixture
def carried(monkeypatch: pytest.MonkeyPatch) -> Counter[bytes]:
    """How many chunks went to each identity."""
    found: Counter[bytes] = Counter()

    def look(frames: list[bytes]) -> None:
        found[frames[0]] += len(frames) > 2

    watch_frames(monkeypatch, look)
    return found


def load_over(pair: Pair, num_streams: int, carried: Counter[bytes]) -> None:
    """Loads until so many streams have carried chunks, and no more have: on a busy machine one
    after the other does for some loads.
    """
    for number in range(1, 100):
        load(pair, number)
        if number >= 3 and len(+carried) >= num_streams:
            break
    assert len(+carried) == num_streams


# ------------------------------------------------------------------ how many


@pytest.mark.parametrize(
    ("source", "sink", "used"), [(1, 1, 1), (2, 2, 2), (4, 4, 4), (1, 4, 1), (4, 1, 1), (2, 4, 2)]
)
def test_the_sink_says_how_many_and_the_source_bounds_it(
    source: int, sink: int, used: int, carried: Counter[bytes]
) -> None:
    with a_pair(source, sink) as pair:
        until_joined(pair, used)
        load_over(pair, used, carried)
        assert len(link_of(pair).dealers) == used
        (connection,) = connections_of(pair).all()
        pair.until(lambda: connection.table.is_idle)
        assert connection.table.owed == [0] * used


def test_a_load_does_not_wait_for_streams_to_join(carried: Counter[bytes]) -> None:
    with a_pair(4) as pair:
        load(pair, 1)
    assert carried.total() >= 9  # over however many had joined


def test_streams_that_join_while_chunks_are_on_their_way_are_used_at_once(
    carried: Counter[bytes],
) -> None:
    with a_pair(4) as pair:
        pair.hold = True
        pair.start(key_of(1), a_move())
        pair.until(lambda: len(pair.said) == 4)  # all slots are packed, over the first stream
        until_joined(pair, 4)
        for packed in [each for each in pair.said if isinstance(each, Packed)]:
            pair.source.send_packed(packed.key, packed.sequence)
        pair.hold = False
        assert isinstance(pair.end(key_of(1)), ReadDone)
    assert len(carried) == 4


def test_credits_go_over_the_stream_that_was_heard_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener that is full ends the connection that has been silent longest: the streams that
    carry chunks must not be silent.
    """
    heard: list[zmq.Socket[bytes]] = []
    credited: list[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]] = []

    def sent(dealer: zmq.Socket[bytes], frame: bytes) -> None:
        if isinstance(decode_to_source(memoryview(frame)), Credit):
            credited.append((dealer, heard[-1]))

    with a_pair(4) as pair:
        until_joined(pair, 4)
        watch_dealers(monkeypatch, lambda dealer, _: heard.append(dealer), sent)
        (first, *further), number = [each.socket for each in link_of(pair).dealers], 0
        while not {latest for _, latest in credited}.intersection(further):
            number += 1
            load(pair, number)
            assert number < 100
        assert all(dealer is latest for dealer, latest in credited)
        assert any(dealer is not first for dealer, _ in credited)


@pytest.mark.parametrize(
    ("cores", "quota", "streams"),
    [
        (1, "max 100000", 1),
        (2, "max 100000", 1),
        (7, "max 100000", 1),
        (16, "max 100000", 4),
        (128, "max 100000", 8),
        (128, "200000 100000", 1),
        (128, "50000 100000", 1),
        (128, "1600000 100000", 4),
        (4, "1600000 100000", 1),
        (8, None, 2),
    ],
)
def test_streams_follow_the_cores_that_the_process_may_use(
    cores: int,
    quota: str | None,
    streams: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "cpu.max"
    if quota is not None:
        file.write_text(quota + "\n")
    put(monkeypatch, CPU_QUOTA, file)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert num_streams(Config()) == streams
    assert num_streams(Config(zmq_streams=3)) == 3
    assert 1 <= num_cores() <= cores


@pytest.mark.parametrize(
    ("cores", "streams", "threads", "for_streams"),
    [
        (1, 0, 1, 0),
        (2, 0, 1, 0),
        (3, 0, 3, 0),
        (16, 0, 9, 5),
        (32, 0, 13, 9),
        (2, 3, 5, 4),
        (64, 16, 21, 17),
    ],
)
def test_zeromq_has_a_thread_for_each_stream_and_some_more(
    cores: int, streams: int, threads: int, for_streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those whose connections send much at once do not hold up all others."""
    put(monkeypatch, CPU_QUOTA, Path("/nowhere"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    with make_context(Config(zmq_streams=streams)) as context:
        assert context.get(zmq.IO_THREADS) == threads
        found = stream_threads(context)
        assert sorted(found) == [1 << number for number in range(threads - for_streams, threads)]
        with context.socket(zmq.PAIR) as other:  # any that says nothing
            assert not int(other.getsockopt(zmq.AFFINITY)) & sum(found)
        number = max(0, for_streams - 1)
        threads_of = [thread_of_stream(context, each) for each in range(2 * number)]
    assert threads_of == [*found[1:], *found[1:]]


def test_each_stream_has_a_thread_of_its_own_at_both_ends() -> None:
    """ZeroMQ's own choice puts several on one. A thread that carries something wakes for it, and
    the kernel counts how often.
    """
    config, before = with_streams(6), {*_wakes()}
    with closing(Pair(config, is_apart=True)) as pair:
        of_source = {*_wakes()} - before
        pair.sink.attach(pair.manifest)
        until_joined(pair, 6)
        used: list[tuple[int, int]] = []
        for dealer in link_of(pair).dealers:
            earlier = _wakes()
            for _ in range(40):
                dealer.send(encode(Credit(())))
                time.sleep(0.002)
            woken = Counter({each: count - earlier[each] for each, count in _wakes().items()})
            busy = [
                Counter({each: woken[each] for each in woken if (each in of_source) is is_source})
                for is_source in (True, False)
            ]
            used.append((busy[0].most_common(1)[0][0], busy[1].most_common(1)[0][0]))
    assert len({source for source, _ in used}) == len({sink for _, sink in used}) == 6


def _wakes() -> dict[int, int]:
    """How often each of ZeroMQ's IO threads has slept, by its id."""
    found: dict[int, int] = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread that has ended
            status = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
            if status["Name"].strip().startswith("ZMQbg/IO/"):
                found[int(task.name)] = int(status["voluntary_ctxt_switches"])
    return found


def test_further_streams_keep_no_sink_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for five of them the second connection has three streams and the third has one, of
    which the sink asks for no more.
    """
    limit_descriptors(monkeypatch, ROOM_FOR_FIVE)
    asked: list[int] = []

    def say(_: object, frame: bytes) -> None:
        message = decode_to_source(memoryview(frame))
        if isinstance(message, Attach):
            asked.append(message.num_streams)

    watch_dealers(monkeypatch, lambda *_: None, say)
    with a_pair(4) as pair:
        until_joined(pair, 4)
        for number, want in ((2, 3), (3, 1)):
            manifest = msgspec.structs.replace(
                pair.manifest, control_endpoint=f"tcp://127.0.0.1:{6000 + number}"
            )
            pair.sink.attach(manifest)
            pair.until(partial(_has_joined, pair, want))
        pair.until(lambda: len(connections_of(pair)) == 3)
        pair.sink.detach(pair.manifest.control_endpoint)
        pair.until(lambda: connections_of(pair).num_further == 2)
        pair.sink.attach(pair.manifest)
        pair.until(partial(_has_joined, pair, 4))
    assert asked == [4, 3, 1, 4]


ROOM_FOR_FIVE = 8 * 20
"""Descriptors: an eighth are connections, of which a quarter are further streams."""


def _has_joined(pair: Pair, number: int) -> bool:
    """Streams of the connection that came last."""
    return len(connections_of(pair).all()[-1].streams) == number


def test_a_trial_has_one_stream() -> None:
    with closing(Pair(with_streams(4))) as pair:
        assert pair.trial().costs.bytes_per_s > 0


def test_a_source_that_may_have_streams_has_staging_for_them() -> None:
    with a_pair(4, staging_slots=64) as pair:
        bounds = pair.sink.staging_bounds(pair.manifest)
        assert (bounds.nbytes, bounds.busy_slots) == (4 * HOST_STAGING.nbytes, 15)
        assert bounds.num_streams == 4
        assert pair.source._admission.admit(
            msgspec.structs.replace(ATTACH, num_slots=16, slot_nbytes=8 << 20), 4
        ) == Slots(16, 8 << 20)
    assert HOST_STAGING.over(1) == HOST_STAGING
    assert MOST_FURTHER * HOST_STAGING.nbytes <= MAX_STAGING_NBYTES // 2


# ------------------------------------------------------------------ who may join


class Stranger:
    """A peer without the sink's code; over TCP."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.socket: zmq.Socket[bytes] = pair.context.socket(zmq.DEALER)
        self.socket.connect(pair.source.data_endpoint())

    def ask(self, message: object) -> object:
        """The answer, as the sink reads it."""
        self.socket.send(encode(message))  # type: ignore[arg-type]
        self.pair.until(lambda: bool(self.socket.poll(0)))
        return decode_to_sink(memoryview(self.socket.recv_multipart()[0]))

    def close(self) -> None:
        self.socket.close(linger=0)


def test_nobody_joins_without_the_token_nor_more_than_may() -> None:
    with closing(Pair(with_streams(3))) as pair, closing(Stranger(pair)) as first:
        answer = first.ask(msgspec.structs.replace(ATTACH, num_streams=2))
        assert isinstance(answer, Streams)
        assert answer.num_streams == 2
        assert len(answer.token) == 16
        first.socket.send(encode(Join(answer.token)))  # of a connection that is one
        pair.until(lambda: pair.source.counts["malformed"] == 1)
        with closing(Stranger(pair)) as second, closing(Stranger(pair)) as third:
            assert isinstance(second.ask(Join(bytes(16))), Refused)
            second.socket.send(encode(Join(answer.token)))
            until_joined(pair, 2)
            assert isinstance(third.ask(Join(answer.token)), Refused)
        pair.until(lambda: not len(connections_of(pair)))  # it has lost a stream
        refused = decode_to_sink(memoryview(first.socket.recv_multipart()[0]))
        assert isinstance(refused, Refused)
        assert connections_of(pair).num_further == 0
        with closing(Stranger(pair)) as late:
            assert isinstance(late.ask(Join(answer.token)), Refused)
        assert pair.source.counts["not_attached"] == 3


def test_a_source_has_no_more_streams_than_it_has_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever sinks ask for: with room for five the second has three and the third has one."""
    limit_descriptors(monkeypatch, ROOM_FOR_FIVE)
    with closing(Pair(with_streams(4))) as pair, ExitStack() as stack:
        sinks = [stack.enter_context(closing(Stranger(pair))) for _ in range(3)]
        attach = msgspec.structs.replace(ATTACH, num_streams=4)
        for sink, want in zip(sinks, (4, 3), strict=False):
            answer = sink.ask(attach)
            assert isinstance(answer, Streams)
            assert answer.num_streams == want
        sinks[2].socket.send(encode(attach))
        pair.until(lambda: len(connections_of(pair)) == 3)
        for _ in range(20):
            pair.turn()
        assert not sinks[2].socket.poll(0)


@pytest.mark.parametrize(
    ("num_streams", "is_trial"), [(-1, False), (0, False), (1, False), (4, True)]
)
def test_who_asks_for_one_stream_or_a_trial_hears_of_none(num_streams: int, is_trial: bool) -> None:
    attach = msgspec.structs.replace(ATTACH, num_streams=num_streams, is_trial=is_trial)
    with closing(Pair(with_streams(4))) as pair, closing(Stranger(pair)) as sink:
        sink.socket.send(encode(attach))
        until_joined(pair, 1)
        for _ in range(20):
            pair.turn()
        assert not sink.socket.poll(0)


def test_a_source_that_offers_more_than_was_asked_for_gets_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:

    def offer_more(frames: list[Any]) -> list[Any]:
        message = decode_to_sink(memoryview(frames[1]))
        if isinstance(message, Streams):
            frames[1] = encode(Streams(message.token, 1000))
            offered.append(message)
        return frames

    offered: list[Streams] = []
    change_frames(monkeypatch, offer_more)
    with a_pair(3) as pair:
        until_joined(pair, 3)
        assert len(link_of(pair).dealers) == 3
        with pytest.raises(ProtocolError, match="expected them once"):
            link_of(pair).add_streams(Streams(b"x", 3))
    assert [each.num_streams for each in offered] == [3]


@pytest.mark.parametrize("is_early", [False, True])
def test_each_stream_begins_with_attached(
    is_early: bool, monkeypatch: pytest.MonkeyPatch, carried: Counter[bytes]
) -> None:
    """So a chunk over one of them does not wait for another."""
    heard: list[tuple[zmq.Socket[bytes], str]] = []

    def seen(dealer: zmq.Socket[bytes], frame: memoryview) -> None:
        heard.append((dealer, type(decode_to_sink(frame)).__name__))

    watch_dealers(monkeypatch, seen, lambda *_: None)
    with a_pair(3) as pair:
        if is_early:
            load(pair, 100)
        until_joined(pair, 3)
        load_over(pair, 3, carried)
        streams = [each.socket for each in link_of(pair).dealers]
    assert len(streams) == 3
    for stream in streams[1:]:
        kinds = [kind for dealer, kind in heard if dealer is stream]
        assert kinds[0] == Attached.__name__
        assert set(kinds[1:]) == {"ChunkHeader"}


# ------------------------------------------------------------------ its end


@pytest.mark.parametrize("number", [0, 1, 3])
def test_the_end_of_a_stream_ends_the_connection_and_nothing_stays(number: int) -> None:
    with a_pair(4) as pair:
        until_joined(pair, 4)
        load(pair, 1)
        pair.hold = True
        pair.start(key_of(2), a_move(2))
        pair.until(lambda: sum(type(each).__name__ == "Packed" for each in pair.said) >= 9 + 4)
        end_stream(pair, number)
        end = pair.end(key_of(2))
        assert isinstance(end, ReadBroke)
        assert end.reason is Reason.PEER_LOST
        pair.until(lambda: any(isinstance(each, PeerGone) for each in pair.seen))
        pair.until(lambda: pair.said_kind(SendStopped, key_of(2)))
        pair.until(lambda: not len(connections_of(pair)))
        assert connections_of(pair).num_further == 0
        pair.until(lambda: pair.source.is_idle and pair.sink.is_idle)
        pair.hold = False
        pair.sink.attach(pair.manifest)
        until_joined(pair, 4)
        load(pair, 3)


def test_a_stream_that_cannot_be_made_is_done_without(
    monkeypatch: pytest.MonkeyPatch, carried: Counter[bytes]
) -> None:
    with a_pair(4) as pair:
        made: list[Dealer] = []
        connect = link_of(pair).connect_stream

        def fails() -> Dealer:
            if made:
                raise zmq.ZMQError(errno.EMFILE)
            made.append(connect())
            return made[0]

        monkeypatch.setattr(link_of(pair), "connect_stream", fails)
        until_joined(pair, 2)
        load(pair, 1)
    assert len(carried) == 2


def test_a_stream_that_is_refused_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by the guard, while its address has a penalty. No other is begun before it stands."""
    with a_pair(3) as pair:
        link, connect, begun = link_of(pair), zmq.Socket.connect, list[str]()

        def nowhere(socket: zmq.Socket[bytes], endpoint: str) -> object:
            if endpoint.startswith("inproc:"):  # of a monitor
                return connect(socket, endpoint)
            begun.append(endpoint)
            return connect(socket, "tcp://127.0.0.1:9")

        monkeypatch.setattr(zmq.Socket, "connect", nowhere)
        pair.until(lambda: len(link.dealers) == 2)
        pair.until(lambda: len(link.dealers) == 1)
        load(pair, 1)
        assert len(link.dealers) == len(begun) == 1


# ------------------------------------------------------------------ what goes over which


@given(
    st.integers(1, 5),
    st.integers(1, 12),
    st.lists(st.tuples(st.booleans(), st.integers(0, 11)), max_size=60),
)
def test_a_stream_that_stands_still_holds_no_more_than_its_share(
    num_streams: int, num_slots: int, moves: list[tuple[bool, int]]
) -> None:
    """Chunks leave and are credited in any order, but none of the last stream's ever is."""
    slots = SourceSlots(num_slots)
    slots.owed += [0] * (num_streams - 1)
    for leaves, number in moves:
        if leaves and slots.free:
            least = min(slots.owed)
            assert slots.owed[_leave(slots)] <= least + 3
        elif number < num_slots and slots.stream_of[number] != num_streams - 1:
            slots.credited([number])
        busy = [n for n in range(num_slots) if n not in slots.free]
        by_stream = Counter(slots.stream_of[n] for n in busy)
        assert slots.owed == [by_stream[n] for n in range(num_streams)]
        if num_streams > 1:
            assert slots.owed[-1] <= -(-num_slots // num_streams) + 2


@pytest.mark.parametrize("uncredited", range(3))
def test_streams_have_as_many_chunks_as_each_other_where_credits_come_late(uncredited: int) -> None:
    """The sink tells of the last chunks of a transfer when the next one has begun."""
    slots = SourceSlots(28)
    slots.owed += [0] * 7
    for _ in range(4):
        sent = [_leave(slots) for _ in range(16)]
        assert set(Counter(sent).values()) == {2}
        busy = [n for n in range(28) if n not in slots.free]
        slots.credited(busy[uncredited:])


def _leave(slots: SourceSlots) -> int:
    """A chunk leaves; over which stream."""
    slot = slots.free[-1]
    slots.fill(slot)
    slots.move(slot, SlotEvent.FILLED)
    slots.leave(slot)
    slots.move(slot, SlotEvent.ANNOUNCED)
    return slots.stream_of[slot]


# ------------------------------------------------------------------ the wire's contract


PUBLIC_KEY, SECRET_KEY = (key.decode() for key in zmq.curve_keypair())
CURVE = {"curve_public_key": PUBLIC_KEY, "curve_secret_key": SECRET_KEY}


@pytest.mark.parametrize("number", [2, 4])
def test_the_wire_keeps_every_promise_over_streams(number: int) -> None:
    sink, config = TcpSink if number == 4 else StreamSink, with_streams(number)
    check_transport(
        partial(stream_side, StreamSource, zmq_pipe, config),
        partial(stream_side, sink, zmq_pipe, config),
    )


def test_all_streams_have_curve_keys(
    monkeypatch: pytest.MonkeyPatch, carried: Counter[bytes]
) -> None:
    use_tcp(monkeypatch)
    with closing(Pair(with_streams(4, **CURVE))) as pair:
        pair.manifest = msgspec.structs.replace(pair.manifest, curve_public_key=PUBLIC_KEY)
        pair.sink.attach(pair.manifest)
        until_joined(pair, 4)
        load_over(pair, 4, carried)
        sockets = [dealer.socket for dealer in link_of(pair).dealers]
        assert [each.get(zmq.MECHANISM) for each in sockets] == [zmq.CURVE] * 4


# ------------------------------------------------------------------ copy threads and frames


def test_jobs_go_to_the_thread_that_has_fewest_and_can_be_cancelled_there() -> None:
    gate = threading.Event()
    ended: list[tuple[object, str]] = []

    class Job(CopyJob):
        __slots__ = ()

        def run(self) -> bool:
            gate.wait(120)
            return False

        def on_end(self) -> None:
            ended.append((self.lane, self.end.value if self.end else ""))

    threads = CopyThreads(3)
    jobs = [Job(number) for number in range(6)]
    for job in jobs:
        threads.submit(job)
    assert [each.num_jobs for each in threads._threads] == [2, 2, 2]
    threads.cancel(jobs[4])
    assert ended == [(4, "cancelled")]
    assert [each.num_jobs for each in threads._threads] == [2, 1, 2]
    gate.set()
    threads.close()
    assert sorted(ended)[4] == (4, "cancelled")
    assert len(ended) == 6


@pytest.mark.parametrize(
    ("device", "num_threads", "num_cores"), [("cpu", 3, 1), ("cuda", 1, 3)], ids=str
)
def test_beside_a_gpu_one_thread_copies_with_a_core_for_each_stream(
    device: str, num_threads: int, num_cores: int
) -> None:
    inside: queue.SimpleQueue[int] = queue.SimpleQueue()

    def pieces() -> Iterator[None]:
        inside.put(torch.get_num_threads())
        yield

    before = set(threading.enumerate())
    threads = make_copier(Config(zmq_streams=3), torch.device(device))
    assert len(set(threading.enumerate()) - before) == num_threads
    for lane in range(3):
        threads.submit(PiecesJob(lane, pieces()))
    assert [inside.get(timeout=120) for _ in range(3)] == [num_cores] * 3
    threads.close()


def test_frames_lie_in_the_memory_that_a_gpu_reaches_and_are_freed() -> None:
    made: list[int] = []

    def pinned(nbytes: int) -> torch.Tensor:
        tensor = torch.empty(nbytes, dtype=torch.uint8)
        made.append(tensor.data_ptr())
        return tensor

    lane = ZmqSourceLane(Slots(2, 1 << 20), pinned)
    for nbytes in (1 << 20, 1000, 1 << 20):
        staging = lane.staging(1, nbytes)
        assert (staging.data_ptr(), staging.numel()) == (made[0], nbytes)
        staging.numpy()[:] = np.arange(nbytes) % 251
        (frame,) = lane.send(1, 0, nbytes)
        assert isinstance(frame, zmq.Frame)
        assert bytes(frame.buffer) == bytes(staging.numpy())
    assert len(made) == 1
    lane.close()


def test_a_slot_costs_its_memory_once_whatever_is_sent_from_it_and_not_read() -> None:
    """Chunks of many sizes whose frames somebody still has: a sink that credits them unread."""
    made: list[weakref.ref[Any]] = []

    def noted(nbytes: int) -> torch.Tensor:
        made.append(weakref.ref(memory := np.zeros(nbytes, dtype=np.uint8)))
        return torch.from_numpy(memory)

    lane = ZmqSourceLane(Slots(1, 1 << 20), noted)
    held: list[bytes | zmq.Frame] = []
    for nbytes in (1 << 20, 64 << 10, 1 << 20, 1000, 999, 1 << 20):
        lane.staging(0, nbytes).fill_(1)
        held += lane.send(0, 0, nbytes)
    lane.close()
    (memory,) = made
    assert memory() is not None
    held.clear()
    deadline_s = time.monotonic() + 30.0
    while memory() is not None:  # a thread of pyzmq's lets go of it
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


@pytest.mark.gpu
def test_a_gpu_packs_straight_into_frames() -> None:
    gpu = Gpu(torch.device("cuda:0"))
    lane = ZmqSourceLane(Slots(1, 1 << 20), gpu.pinned)
    for nbytes in (1 << 20, 1000):
        staging = lane.staging(0, nbytes)
        assert gpu.reaches(staging)
        staging.copy_(torch.full((nbytes,), 7, dtype=torch.uint8, device=gpu.device))
        (frame,) = lane.send(0, 0, nbytes)
        assert isinstance(frame, zmq.Frame)
        assert bytes(frame.buffer) == b"\7" * nbytes
    lane.close()
