"""The stream engine over a pipe whose payloads are late, or whose library fails."""

from __future__ import annotations

import itertools
import select
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from kvxfer.errors import TransportUnavailable
from kvxfer.testing.cases import CASES, make_move
from kvxfer.transfer.chunks import chunk_list
from kvxfer.transfer.costs import Staging
from kvxfer.transfer.wire import Reason
from kvxfer.transports import stream_sink, visitors
from kvxfer.transports.base import (
    LocalMemory,
    Packed,
    PeerGone,
    Progress,
    ReadBroke,
    ReadDone,
    ReadStopped,
    SendStopped,
    Sent,
)
from kvxfer.transports.pipe import CHUNK_S, Slots
from kvxfer.transports.stream_machine import SinkSlot
from kvxfer.transports.stream_sink import StreamSink
from kvxfer.transports.stream_source import StreamSource
from kvxfer.transports.stream_wire import (
    STREAM_VERSION,
    AskTrial,
    Attach,
    Credit,
    Refused,
    ToSink,
    ToSource,
    decode_to_sink,
    decode_to_source,
    encode,
)
from tests import zmtp
from tests.copies import HeldPieces, is_pack, is_unpack
from tests.spoken import watch_dealers, watch_frames
from tests.transports.memory_pipe import MemoryPipe, MemorySinkLane, MemorySourceLane, World
from tests.transports.pair import (
    CONFIG,
    Pair,
    a_move,
    connections_of,
    expect_of,
    forget_source,
    key_of,
    link_of,
    read_request,
    send_request,
)
from tests.wires import use_pipe

UCX = msgspec.structs.replace(CONFIG, transport="ucx")


@pytest.fixture(params=["sink sees the end", "source sees the end", "carries messages"])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> World:
    kind = request.param
    world = World(is_write=kind == "source sees the end", carries=kind == "carries messages")
    use_pipe(monkeypatch, "ucx", world.make_pipe)
    return world


@pytest.fixture
def pair(world: World) -> Iterator[Pair]:
    pair = Pair(UCX)
    pair.sink.attach(pair.manifest)
    yield pair
    pair.close()
    assert (world.num_open, world.num_pipes) == (0, 0)


def _works(pair: Pair, number: int) -> None:
    pair.sink.attach(pair.manifest)
    pair.start(key_of(number), a_move(number))
    assert isinstance(pair.end(key_of(number)), ReadDone)
    pair.until(lambda: pair.said_kind(Sent, key_of(number)))


def test_every_byte_comes_and_slots_come_back(pair: Pair, world: World) -> None:
    for number in range(1, 6):
        _works(pair, number)
        assert pair.content() == pair.expected(a_move(number))
        pair.sink_pool.tensor.fill_(0xEE)
    assert not pair.source.counts
    assert not pair.sink.counts
    assert bool(world.num_told) == world.carries


def test_a_wire_is_not_idle_while_its_pipe_may_have_to_be_driven(pair: Pair) -> None:
    pair.until(lambda: bool(len(connections_of(pair))))
    assert not pair.source.is_idle
    assert not pair.sink.is_idle
    pair.sink.detach(pair.manifest.control_endpoint)
    pair.until(lambda: pair.source.is_idle and pair.sink.is_idle)


def _num_awaited(pair: Pair) -> int:
    """Slots of the pair's connection that were announced."""
    return link_of(pair).table.num[SinkSlot.AWAITED]


def _one_at_a_time(world: World) -> None:
    """A payload comes each time that a pipe goes on."""
    following, world.moving = world.moving[:1], world.moving[1:]
    for source, sink, slot, generation, nbytes in following:
        sink.generations[slot] = generation + 1
        sink.parts[slot][:nbytes].copy_(source.parts[slot][:nbytes])
        sink.came.append(slot)
        world.wake()


@pytest.fixture
def at_once(world: World, pair: Pair) -> Iterator[Pair]:
    """A pair whose sink unpacks chunks when they come, of which a source may send two reads'."""
    if world.is_write:
        pytest.skip("chunks are announced when they are there")
    pair.close()
    quick = Pair(msgspec.structs.replace(UCX, staging_slots=None), small_nbytes=1 << 20)
    quick.sink.attach(quick.manifest, Staging(32, 1 << 20, None))
    yield quick
    quick.close()


def _all_announced(pair: Pair, world: World, *numbers: int) -> int:
    """Reads of which everything is on its way. How many chunks each of them has."""
    move = a_move(1)
    num_chunks = len(chunk_list((move.pull,), move.case.chunk_nbytes))
    world.is_held = True
    for number in numbers:
        pair.start(key_of(number), move)
    pair.until(lambda: _num_awaited(pair) == len(numbers) * num_chunks)
    return num_chunks


def clock_of(step_s: float) -> Any:
    """It goes on by so much with each look at it."""
    return SimpleNamespace(perf_counter=itertools.count(0.0, step_s).__next__)


@pytest.mark.parametrize("step_s", [0.0, stream_sink.TURN_S])
def test_chunks_that_follow_each_other_are_taken_in_one_turn_of_the_loop(
    at_once: Pair, world: World, monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    num_chunks = _all_announced(at_once, world, 1)
    monkeypatch.setattr(stream_sink, "time", clock_of(step_s))
    monkeypatch.setattr(World, "move", _one_at_a_time)
    told = [type(each) for each in at_once.sink.poll()]
    assert told == ([Progress] if step_s else [Progress] * (num_chunks - 1) + [ReadDone])


def test_an_announcement_does_not_wait_for_the_pipe_to_go_on(
    pair: Pair, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But where the source sees the end of a payload's way, it goes on."""
    pair.hold = True
    pair.start(key_of(1), a_move(1))
    pair.until(lambda: any(isinstance(each, Packed) for each in pair.said))
    num_before = world.num_progress
    packed = next(each for each in pair.said if isinstance(each, Packed))
    pair.source.send_packed(packed.key, packed.sequence)
    assert world.num_progress == num_before + world.is_write
    pair.until(lambda: len(pair.seen) == 1)


def test_the_end_of_a_read_is_told_at_once(
    at_once: Pair, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_chunks = _all_announced(at_once, world, 1, 2)
    monkeypatch.setattr(stream_sink, "time", clock_of(0.0))
    monkeypatch.setattr(World, "move", _one_at_a_time)
    polled = [at_once.sink.poll() for _ in range(2)]
    assert [type(told[-1]) for told in polled] == [ReadDone, ReadDone]
    assert sum(map(len, polled)) == 2 * num_chunks


@pytest.fixture
def carrying(pair: Pair, world: World) -> tuple[MemorySourceLane, MemorySinkLane]:
    """Both lanes of a connection that has worked."""
    if not world.carries:
        pytest.skip("nothing comes that way")
    _works(pair, 1)
    (source,), (sink,) = world.sources.values(), world.sinks.values()
    return source, sink


def test_announcements_and_credits_go_over_the_pipe_alone(
    pair: Pair,
    world: World,
    carrying: tuple[MemorySourceLane, MemorySinkLane],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    by_zmq: list[str] = []

    def carry(world: World, message: bytes, inbox: list[bytes]) -> bool:
        told.append(msgspec.msgpack.decode(message)["type"])
        inbox.append(message)
        return True

    def note(message: ToSource | ToSink) -> None:
        by_zmq.append(type(message).__name__)

    monkeypatch.setattr(World, "carry", carry)
    watch_frames(monkeypatch, lambda frames: note(decode_to_sink(memoryview(frames[-1]))))
    watch_dealers(
        monkeypatch, lambda *_: None, lambda _, frame: note(decode_to_source(memoryview(frame)))
    )
    _works(pair, 2)
    pair.until(lambda: "credit" in told)
    assert set(told) == {"chunk", "credit"}
    assert told.count("chunk") > 1
    assert by_zmq == ["Expect"]


@pytest.mark.parametrize("message", [b"\xff", encode(Attach(3, 1)), encode(AskTrial(1)), b""])
def test_what_a_sink_tells_by_the_pipe_and_is_no_credit_is_counted(
    pair: Pair, carrying: tuple[MemorySourceLane, MemorySinkLane], message: bytes
) -> None:
    carrying[0].inbox.extend([message, encode(Credit((99,)))])
    pair.until(lambda: pair.source.counts["malformed"] == 1)
    assert pair.source.counts["unknown_credit"] == 1  # what comes behind it is heard
    _works(pair, 2)


def test_a_credit_by_the_pipe_for_a_slot_that_is_free_is_counted(
    pair: Pair, carrying: tuple[MemorySourceLane, MemorySinkLane]
) -> None:
    pair.until(lambda: all(each.is_idle for each in connections_of(pair).all()))
    carrying[0].inbox.append(encode(Credit((0, 99))))
    pair.until(lambda: pair.source.counts["unknown_credit"] == 2)
    _works(pair, 2)


def test_what_a_source_tells_by_the_pipe_and_makes_no_sense_ends_the_connection(
    pair: Pair, carrying: tuple[MemorySourceLane, MemorySinkLane]
) -> None:
    carrying[1].inbox.append(b"\xff")
    pair.until(lambda: pair.sink.counts["malformed"] == 1)
    _works(pair, 2)
    link = link_of(pair)
    carrying[1].inbox.extend([b"\xff"] * link.slots.num_slots)
    pair.until(lambda: PeerGone(pair.manifest.control_endpoint) in pair.seen)
    _works(pair, 3)


def test_an_announcement_that_lies_there_when_the_connection_ends_counts(
    pair: Pair, carrying: tuple[MemorySourceLane, MemorySinkLane]
) -> None:
    key, move = key_of(2), make_move(next(case for case in CASES if case.name == "one token"), 1)
    sink = _sink(pair)
    pair.sink_pool.tensor.fill_(0xEE)
    request = read_request(key, move, pair.manifest)
    sink.submit_expect(request)
    sink.poll()
    pair.source.submit_send(send_request(key, move))

    def gave() -> bool:
        """The source alone goes on."""
        for completion in pair.source.poll():
            if isinstance(completion, Packed):
                pair.source.send_packed(completion.key, completion.sequence)
        return bool(carrying[1].inbox)

    deadline_s = time.monotonic() + 30
    while not gave():
        assert time.monotonic() < deadline_s
    forget_source(pair, "gone")
    assert isinstance(pair.end(key), ReadDone)
    assert pair.content() == pair.expected(move)


def _sink(pair: Pair) -> StreamSink:
    assert isinstance(pair.sink, StreamSink)
    return pair.sink


def test_sent_means_that_the_pool_is_free_not_that_the_payload_has_come(
    pair: Pair, world: World
) -> None:
    world.is_held = True
    pair.start(key_of(1), a_move())
    pair.until(lambda: sum(isinstance(c, Packed) for c in pair.said) == 4)
    pair.source.stop_send(key_of(1))
    pair.until(lambda: pair.said_kind(SendStopped, key_of(1)))
    pair.sink.stop_read(key_of(1))
    # At once: what is on its way goes to staging only
    assert isinstance(pair.end(key_of(1)), ReadStopped)
    before = pair.content()
    pair.start(key_of(2), a_move(2))  # it waits for the slots
    world.is_held = False
    pair.until(lambda: pair.said_kind(Sent, key_of(2)))
    assert isinstance(pair.end(key_of(2)), ReadDone)
    assert before == b"\xee" * len(before)
    assert pair.content() == pair.expected(a_move(2))
    assert pair.sink.counts.total() == 4  # each of the chunks that nobody wanted any more


@pytest.mark.parametrize("comes", [True, False])
def test_what_came_before_the_end_of_the_connection_counts(
    pair: Pair, world: World, comes: bool
) -> None:
    if world.is_write:
        pytest.skip("what is announced has come")
    key, move = key_of(1), make_move(next(case for case in CASES if case.name == "one token"), 1)
    world.is_held = True
    pair.start(key, move)
    link = link_of(pair)
    pair.until(lambda: bool(link.table.num[SinkSlot.AWAITED]))
    world.is_held = not comes
    forget_source(pair, "gone")
    end = pair.end(key)
    if comes:
        assert isinstance(end, ReadDone)
        assert pair.content() == pair.expected(move)
    else:
        assert end == ReadBroke(key, Reason.PEER_LOST, "gone")


@pytest.mark.parametrize(
    "call",
    [
        *("send", "source poll", "connected", "announced", "sink poll", "free"),
        *("source tell", "source heard", "sink tell", "sink heard"),
    ],
)
def test_a_pipe_that_breaks_ends_the_connection_and_no_more(
    pair: Pair, world: World, call: str
) -> None:
    world.breaks.add(call)
    pair.start(key_of(1), a_move())
    end = pair.end(key_of(1))
    assert isinstance(end, ReadBroke)
    assert end.reason is Reason.PEER_LOST
    assert f"no {call}" in end.detail
    assert PeerGone(pair.manifest.control_endpoint) in pair.seen
    pair.until(lambda: pair.said_kind(SendStopped, key_of(1)))
    stopped = next(c for c in pair.said if isinstance(c, SendStopped))
    assert stopped.reason is Reason.PEER_LOST
    assert pair.source.counts["pipe_broken"] + pair.sink.counts["pipe_broken"] == 1
    world.breaks.clear()
    _works(pair, 2)
    assert world.num_open == 2  # the first connection's lanes are closed


def test_a_pipe_that_breaks_when_all_is_announced_ends_the_read(pair: Pair, world: World) -> None:
    world.breaks.add("sink poll")
    pair.start(key_of(1), make_move(next(case for case in CASES if case.name == "one token"), 1))
    assert pair.end(key_of(1)) == ReadBroke(key_of(1), Reason.PEER_LOST, "no sink poll")


def test_a_source_that_cannot_open_its_end_says_why(pair: Pair, world: World) -> None:
    world.breaks.add("open_source")
    pair.start(key_of(1), a_move())
    end = pair.end(key_of(1))
    assert isinstance(end, ReadBroke)
    assert "refuses the connection: ucx: no way there" in end.detail
    pair.until(lambda: pair.said_kind(SendStopped, key_of(1)))
    with pytest.raises(TransportUnavailable, match="refuses: ucx: no way there"):
        pair.trial()
    world.breaks.clear()
    _works(pair, 2)


def test_a_sink_that_cannot_open_its_end_is_not_attached(pair: Pair, world: World) -> None:
    pair.sink.detach(pair.manifest.control_endpoint)
    world.breaks.add("open_sink")
    with pytest.raises(TransportUnavailable, match="no staging"):
        pair.sink.attach(pair.manifest)
    with pytest.raises(TransportUnavailable, match="no staging"):
        pair.trial()
    world.breaks.clear()
    _works(pair, 1)


def test_a_trial_measures_costs_and_leaves_nothing_open(pair: Pair, world: World) -> None:
    _works(pair, 1)
    trial = pair.trial()
    assert trial.costs.bytes_per_s > 1e6
    assert 0 < trial.costs.latency_s < 1
    assert trial.costs.message_s == CHUNK_S
    assert trial.path == "memory"
    pair.until(lambda: world.num_open == 2)
    assert world.num_pipes == 2


@pytest.mark.parametrize("source", ["cpu", "cuda:1"])
def test_a_chunk_costs_more_where_a_gpu_packs_or_unpacks(pair: Pair, source: str) -> None:
    memories = tuple(
        msgspec.structs.replace(each, device=source) for each in pair.manifest.memories
    )
    pair.manifest = msgspec.structs.replace(pair.manifest, memories=memories)
    costs = replace(pair.trial().costs, latency_s=1e-5, bytes_per_s=2e11)
    assert costs.message_s == CHUNK_S * (1 if source == "cpu" else 4)
    if source != "cpu":
        # 128 tokens of Llama-3-8B, and 1024: chunks of 16 MiB and more
        nbytes = 128 << 17
        assert costs.chunk_nbytes(nbytes, 1, 64 << 20) >= nbytes
        assert costs.chunk_nbytes(8 * nbytes, 1, 64 << 20) == 64 << 20


def test_a_trial_over_a_pipe_that_breaks_says_so(pair: Pair, world: World) -> None:
    world.breaks.add("sink poll")
    with pytest.raises(TransportUnavailable, match=r"ucx: trial with tcp://.*: no sink poll"):
        pair.trial()
    world.breaks.clear()
    pair.until(lambda: world.num_open == 1)


@pytest.fixture(params=[is_pack, is_unpack])
def held(
    request: pytest.FixtureRequest, world: World, monkeypatch: pytest.MonkeyPatch
) -> HeldPieces:
    """What is packed, or unpacked, by a pair that is made after it."""
    return HeldPieces(monkeypatch, "ucx", request.param)


def test_a_lane_outlives_what_is_packed_and_unpacked_there(
    held: HeldPieces, pair: Pair, world: World
) -> None:
    pair.start(key_of(1), a_move())
    pair.until(held.has_begun.is_set)
    assert world.num_open == 2
    pair.sink.detach(pair.manifest.control_endpoint)
    if held.is_held is is_pack:
        pair.until(lambda: world.num_open == 1)
        held.may_end.set()
        pair.until(lambda: pair.said_kind(SendStopped, key_of(1)))
    else:
        assert world.num_open == 2
        held.may_end.set()
    assert isinstance(pair.end(key_of(1)), ReadBroke)
    pair.until(lambda: world.num_open == 0)


def test_the_end_of_a_read_is_told_before_its_last_slot_is_freed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To post another receive takes longer than to tell."""
    freed: list[int] = []
    inner = MemorySinkLane.free

    def free(lane: MemorySinkLane, slot: int) -> None:
        freed.append(slot)
        inner(lane, slot)

    monkeypatch.setattr(MemorySinkLane, "free", free)
    pair.start(key_of(1), a_move())
    pair.until(lambda: any(isinstance(each, ReadDone) for each in pair.seen))
    num_chunks = sum(isinstance(each, Packed) for each in pair.said)
    assert len(freed) == num_chunks - 1
    pair.until(lambda: len(freed) == num_chunks)


def test_the_end_of_a_sink_that_has_gone_is_closed(pair: Pair, world: World) -> None:
    _works(pair, 1)
    pair.sink.detach(pair.manifest.control_endpoint)
    pair.until(lambda: world.num_open == 0)
    _works(pair, 2)


def test_no_end_is_made_for_a_sink_that_has_gone_when_its_words_are_read(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed while the source stood still: its words lie there, and then the end."""
    opened: list[bytes] = []
    open_source = MemoryPipe.open_source

    def open_and_tell(pipe: MemoryPipe, address: bytes, slots: Slots) -> MemorySourceLane:
        opened.append(address)
        return open_source(pipe, address, slots)

    monkeypatch.setattr(MemoryPipe, "open_source", open_and_tell)
    monkeypatch.setattr(visitors, "LISTENER_TURN_S", 60.0)  # both words are read in one
    key, move = key_of(1), a_move()
    pair.source.submit_send(send_request(key, move))
    attach = Attach(STREAM_VERSION, 4, 4 << 20, "ucx", b"an address")
    with closing(zmtp.connect(pair.source.data_endpoint())) as sink:
        sink.sendall(zmtp.frame(encode(attach)) + zmtp.frame(encode(expect_of(key))))
    pair.until(lambda: SendStopped(key, Reason.PEER_LOST) in pair.said)
    assert opened == []


def test_a_sink_that_is_taken_for_gone_hears_of_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for its answer until its own time is over."""

    class Ended:
        def register(self, fd: int, events: int) -> None:
            self._fd = fd

        def poll(self, timeout_ms: int) -> list[tuple[int, int]]:
            return [(self._fd, select.POLLRDHUP)]

    key = key_of(1)
    pair.source.submit_send(send_request(key, a_move()))
    attach = Attach(STREAM_VERSION, 4, 4 << 20, "ucx", b"an address")
    with zmq.Context() as context, context.socket(zmq.DEALER) as sink:
        sink.linger = 0
        sink.connect(pair.source.data_endpoint())
        sink.send(encode(attach))
        pair.until(lambda: bool(len(connections_of(pair))))
        monkeypatch.setattr(select, "poll", Ended)
        sink.send(encode(expect_of(key)))
        pair.until(lambda: SendStopped(key, Reason.PEER_LOST) in pair.said)
        assert sink.poll(120_000)
        said = decode_to_sink(memoryview(sink.recv()))
    assert isinstance(said, Refused)
    assert "attach anew" in said.detail


def test_a_source_that_cannot_listen_leaves_no_pipe(
    world: World, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = msgspec.structs.replace(UCX, host="203.0.113.1")
    memory = LocalMemory((pair.source_pool.tensor,), (pair.source_pool.info,))
    with pytest.raises(TransportUnavailable, match="ucx: .* cannot be listened on"):
        StreamSource(world.make_pipe, memory, config, pair.copy_thread, pair.wake, pair.context)
    assert world.num_pipes == 2


def test_descriptors_of_a_pipe_are_polled(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryPipe, "fds", lambda _: (98, 99))
    for end in (pair.source, pair.sink):
        assert tuple(end.pollables())[-2:] == (98, 99)
