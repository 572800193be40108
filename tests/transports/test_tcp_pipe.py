"""Plain TCP as a pipe: the contract, what a sink takes, and whom a source's listener admits."""

from __future__ import annotations

import errno
import gc
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.config import Config
from kvxfer.errors import ConfigError, ProtocolError, TransportUnavailable
from kvxfer.tensors.device_memory import Gpu
from kvxfer.transfer.wire import Reason
from kvxfer.transports import registry, tcp_listener, tcp_pipe
from kvxfer.transports.base import PeerGone, ReadBroke, SendStopped, Wake
from kvxfer.transports.pipe import HOST_STAGING, PipeBroken, Slots
from kvxfer.transports.tcp_listener import GREETING, HELLO, MOST_UNPROVED
from kvxfer.transports.tcp_pipe import (
    LEAST_PART_NBYTES,
    PART,
    USUAL_PART_NBYTES,
    SinkAddress,
    SourceAddress,
    TcpPipe,
    TcpSinkLane,
    TcpSourceLane,
    cut,
)
from tests.far_peers import count_as_far, limit_descriptors
from tests.helpers import POISON, assert_same_bytes
from tests.transports.pair import CONFIG, Pair, a_move, connections_of, key_of, load
from tests.transports.pipe_contract import (
    NUM_OPENS_ON_GPU,
    PipeCase,
    check_pipe,
    scenario_names,
    scenario_params,
)
from tests.transports.worker import Worker
from tests.wires import use_sink, use_source

SLOTS = Slots(num_slots=3, slot_nbytes=1 << 20)
WAIT_S = 30.0


def one_socket(device: torch.device, wake: Wake) -> TcpPipe:
    return TcpPipe(Config(zmq_streams=1), wake)


def four_sockets(device: torch.device, wake: Wake) -> TcpPipe:
    pinned = Gpu(device).pinned if device.type == "cuda" else None
    return TcpPipe(Config(zmq_streams=4), wake, pinned)


@pytest.mark.parametrize("scenario", scenario_params())
def test_tcp_keeps_the_contract(scenario: str) -> None:
    check_pipe(PipeCase(four_sockets), scenario)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", scenario_names())
def test_one_socket_keeps_the_contract(scenario: str) -> None:
    check_pipe(PipeCase(one_socket), scenario)


@pytest.mark.gpu
@pytest.mark.parametrize("scenario", scenario_names())
def test_pinned_memory_keeps_the_contract(scenario: str) -> None:
    check_pipe(PipeCase(four_sockets, device="cuda:0", num_opens=NUM_OPENS_ON_GPU), scenario)


# ------------------------------------------------------------------ how a payload is cut


@given(st.integers(1, 64 << 20), st.integers(1, 16), st.integers(-40, 16))
def test_the_parts_of_a_chunk_are_all_of_it_once(nbytes: int, sockets: int, idle: int) -> None:
    parts = list(cut(nbytes, sockets, idle))
    at = 0
    for first, part_nbytes in parts:
        assert first == at
        assert part_nbytes > 0
        at += part_nbytes
    assert at == nbytes
    assert len(parts) <= sockets


@pytest.mark.parametrize(
    ("nbytes", "sockets", "idle", "num_parts"),
    [
        (LEAST_PART_NBYTES, 8, 8, 1),
        (4 << 20, 8, 8, 8),  # a trial in host memory: it measures all sockets
        (4 << 20, 8, 3, 3),
        (4 << 20, 8, 0, 1),  # chunks follow each other
        (8 << 20, 8, -5, (8 << 20) // USUAL_PART_NBYTES),
        (32 << 20, 8, 0, 8),
        (32 << 20, 1, 1, 1),
    ],
)
def test_idle_sockets_share_a_chunk(nbytes: int, sockets: int, idle: int, num_parts: int) -> None:
    assert len(list(cut(nbytes, sockets, idle))) == num_parts


# ------------------------------------------------------------------ two ends in one process


@dataclass
class Ends:
    """Both ends of a connection, each on a pipe of its own."""

    source_pipe: TcpPipe
    sink_pipe: TcpPipe
    source: TcpSourceLane
    sink: TcpSinkLane

    def send(self, slot: int, generation: int, fill: int, nbytes: int) -> None:
        self.source.staging(slot, nbytes).fill_(fill)
        assert self.source.send(slot, generation, nbytes) == ()
        assert self.source.poll() == [slot]
        assert self.source.tell(b"%d %d %d" % (slot, generation, nbytes))

    def take(self) -> int:
        """The slot of the chunk that comes next."""
        (message,) = until(self.sink.heard)
        slot, generation, nbytes = map(int, message.split())
        self.sink.announced(slot, generation, nbytes, ())
        assert self.sink.poll() == [slot]
        return slot

    @property
    def address(self) -> SourceAddress:
        return msgspec.msgpack.decode(self.source.address, type=SourceAddress)


def until(wanted: Callable[[], Any]) -> Any:
    deadline_s = time.monotonic() + WAIT_S
    while not (found := wanted()):
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.001)
    return found


@contextmanager
def two_ends(source: int = 2, sink: int = 2, **settings: Any) -> Iterator[Ends]:
    pipes = [
        TcpPipe(Config(zmq_streams=number, **settings), lambda: None) for number in (source, sink)
    ]
    try:
        taking = pipes[1].open_sink(SLOTS)
        giving = pipes[0].open_source(taking.address, SLOTS)
        yield Ends(pipes[0], pipes[1], giving, taking)
    finally:
        for pipe in pipes:
            pipe.close()


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("kvxfer-tcp")]


def test_chunks_come_with_their_announcements() -> None:
    with two_ends() as ends:
        ends.sink.connected(ends.source.address)
        for generation in range(3):
            for slot, nbytes in ((1, SLOTS.slot_nbytes), (0, 5)):
                ends.send(slot, generation, 7 + slot + generation, nbytes)
                assert ends.take() == slot
                want = torch.full((nbytes,), 7 + slot + generation, dtype=torch.uint8)
                assert_same_bytes(ends.sink.payload(slot), want)
                assert ends.sink.heard() == ()
                assert ends.sink.poll() == []
                ends.sink.free(slot)


def test_an_announcement_may_come_before_and_by_zeromq() -> None:
    """Of one that is too long, and of a chunk without bytes."""
    with two_ends() as ends:
        ends.sink.connected(ends.source.address)
        ends.source.staging(0, 9).fill_(3)
        ends.source.send(0, 0, 9)
        assert not ends.source.tell(bytes(tcp_pipe.MOST_MESSAGE_NBYTES + 1))
        ends.sink.announced(0, 0, 9, ())
        assert until(ends.sink.poll) == [0]
        assert ends.sink.heard() == ()
        ends.source.send(1, 0, 0)
        assert not ends.source.tell(b"nothing")
        ends.sink.announced(1, 0, 0, ())
        assert until(ends.sink.poll) == [1]
        assert not ends.source.tell(b"of no chunk")
        with pytest.raises(ProtocolError, match="generation 0 of slot 0, got 1"):
            ends.sink.announced(0, 1, 9, ())
        with pytest.raises(ProtocolError, match="nothing beside its header"):
            ends.sink.announced(2, 0, 9, [cast(Any, b"x")])


@pytest.mark.parametrize(("source", "sink", "used"), [(1, 4, 1), (4, 1, 1), (4, 3, 3), (2, 2, 2)])
def test_both_sides_agree_on_the_lesser_number(source: int, sink: int, used: int) -> None:
    with two_ends(source, sink) as ends:
        ends.sink.connected(ends.source.address)
        until(lambda: threads().count("kvxfer-tcp-send") == used)
        assert threads().count("kvxfer-tcp-take") == used
        assert ends.source.num_sockets == ends.sink.num_sockets == used


def test_sockets_beyond_the_first_are_bounded_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_descriptors(monkeypatch, 160)
    pipe = TcpPipe(Config(zmq_streams=4), lambda: None)
    with closing(pipe):
        lanes = [pipe.open_sink(SLOTS) for _ in range(3)]
        assert [lane.num_sockets for lane in lanes] == [4, 3, 1]
        lanes[0].close()
        assert pipe.open_sink(SLOTS).num_sockets == 4


def test_staging_is_for_every_socket() -> None:
    assert TcpPipe.staging_size("cpu") == HOST_STAGING
    size = TcpPipe.staging_size("cuda")
    assert size.over(8).nbytes == 8 * size.nbytes
    assert size.over(8).busy_slots == size.busy_slots  # all of them carry each chunk


# ------------------------------------------------------------------ ends


def test_nothing_stays_of_a_connection_that_stands_still() -> None:
    """The sink takes nothing while the source sends 3 MiB: close does not wait for it."""
    with two_ends() as ends:
        taking = _Deaf(ends.address)
        with closing(taking):
            for slot in range(SLOTS.num_slots):
                ends.send(slot, 0, 1, SLOTS.slot_nbytes)
            memory = weakref.ref(ends.source.staging(0, 1).untyped_storage())
            began_s = time.monotonic()
            ends.source.close()
            ends.source.close()
            assert time.monotonic() - began_s < WAIT_S
            assert "kvxfer-tcp-send" not in threads()
            gc.collect()
            assert memory() is None
        ends.sink.close()
        assert threads() == ["kvxfer-tcp-listen"]
    assert threads() == []


class _Deaf:
    """Proves itself on both sockets, and reads nothing."""

    def __init__(self, address: SourceAddress) -> None:
        self.sockets = [dial(address) for _ in range(2)]
        for sock in self.sockets:
            sock.sendall(HELLO.pack(GREETING, address.connection, address.token))
            assert sock.recv(16, socket.MSG_WAITALL) == address.answer

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()


def test_a_sink_that_credits_what_it_has_not_read_is_sent_no_more_than_its_slots() -> None:
    with two_ends() as ends, closing(_Deaf(ends.address)):

        def send_all() -> None:
            for generation in range(100):  # as many MiB: more than the kernel takes
                ends.send(0, generation, 1, SLOTS.slot_nbytes)

        with pytest.raises(PipeBroken, match="the sink credits what it has not read"):
            send_all()
        assert ends.source._num_queued - sum(ends.source._num_done) <= 2 * SLOTS.num_slots + 2


def test_what_is_on_its_way_when_a_sink_closes_goes_nowhere() -> None:
    with two_ends() as ends:
        ends.sink.connected(ends.source.address)
        ends.send(0, 0, 1, SLOTS.slot_nbytes)
        until(lambda: ends.sink._arrivals[0].begun_nbytes)
        memory = weakref.ref(ends.sink._memory)
        ends.sink.close()
        assert "kvxfer-tcp-take" not in threads()
        assert memory() is None


def test_a_source_that_ends_breaks_the_sink_and_not_what_has_come() -> None:
    with two_ends() as ends:
        ends.sink.connected(ends.source.address)
        ends.send(0, 0, 1, 1000)
        until(lambda: ends.sink._messages)
        ends.source.close()
        until(lambda: ends.sink._why)
        assert ends.take() == 0
        for look in (ends.sink.poll, ends.sink.heard):
            with pytest.raises(PipeBroken, match="the other end has closed it"):
                look()


def test_a_sink_that_ends_breaks_what_is_sent() -> None:
    with two_ends() as ends:
        ends.sink.connected(ends.source.address)
        until(lambda: threads().count("kvxfer-tcp-send") == 2)
        ends.sink.close()
        ends.send(0, 0, 1, SLOTS.slot_nbytes)
        until(lambda: ends.source._why)
        with pytest.raises(PipeBroken, match="a connection that stands"):
            ends.source.heard()
        with pytest.raises(PipeBroken, match="a connection that stands"):
            ends.source.send(1, 0, 1)


def test_a_lane_that_connects_to_nobody_closes_at_once() -> None:
    """An address from which nothing ever comes back: of TEST-NET-1, or one that is not routed."""
    settings = Config(zmq_streams=3, allowed_peers=("192.0.2.1",), connect_timeout_s=60.0)
    with closing(TcpPipe(settings, lambda: None)) as pipe:
        lane = pipe.open_sink(SLOTS)
        with suppress(PipeBroken):  # the kernel has no way there
            lane.connected(_address(host="192.0.2.1"))
        began_s = time.monotonic()
        lane.close()
        assert time.monotonic() - began_s < settings.connect_timeout_s / 2
        assert threads() == []


# ------------------------------------------------------------------ what a sink takes


def _address(**changes: Any) -> bytes:
    known = SourceAddress("127.0.0.1", 9, 1, b"t" * 16, b"a" * 16, 2)
    return msgspec.msgpack.encode(msgspec.structs.replace(known, **changes))


class FakeSource:
    """Listens, answers, and sends what a test wants."""

    def __init__(self, answer: bytes = b"a" * 16) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.answer = answer
        self.pipe = TcpPipe(Config(zmq_streams=2), lambda: None)
        self.lane = self.pipe.open_sink(SLOTS)
        self.sockets: list[socket.socket] = []

    def meet(self) -> None:
        self.lane.connected(_address(port=self.listener.getsockname()[1]))
        for _ in range(2):
            sock = self.listener.accept()[0]
            assert sock.recv(HELLO.size, socket.MSG_WAITALL) == HELLO.pack(GREETING, 1, b"t" * 16)
            sock.sendall(self.answer)
            self.sockets.append(sock)

    def part(
        self,
        nbytes: int,
        *,
        slot: int = 0,
        generation: int = 0,
        chunk_nbytes: int | None = None,
        first: int = 0,
        said: bytes = b"said",
        sock: int = 0,
        fill: int = 1,
    ) -> None:
        chunk_nbytes = nbytes if chunk_nbytes is None else chunk_nbytes
        header = PART.pack(generation, slot, chunk_nbytes, first, nbytes, len(said), said)
        self.sockets[sock].sendall(header + bytes([fill]) * nbytes)

    def broken(self) -> str:
        until(lambda: self.lane._why)
        with pytest.raises(PipeBroken) as caught:
            self.lane.poll()
        return str(caught.value)

    def staging(self, slot: int) -> torch.Tensor:
        assert self.lane._memory is not None
        return self.lane._memory.beginning(slot, SLOTS.slot_nbytes)

    def close(self) -> None:
        self.pipe.close()
        for sock in (self.listener, *self.sockets):
            sock.close()


@pytest.fixture
def fake() -> Iterator[FakeSource]:
    with closing(FakeSource()) as fake:
        fake.meet()
        yield fake


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"slot": 3}, "a part of slot 3, of 3"),
        ({"slot": 2**32 - 1}, "a part of slot 4294967295"),
        ({"generation": 1}, "generation 1 of slot 0, which is due for 0"),
        ({"generation": 2**64 - 1}, "which is due for 0"),
        ({"chunk_nbytes": SLOTS.slot_nbytes + 1}, f"1048577 bytes for slot 0 of {1 << 20}"),
        ({"chunk_nbytes": 99}, "100 bytes at 0 of a chunk of 99"),
        ({"first": 1}, "100 bytes at 1 of a chunk of 100"),
        ({"first": 2**32 - 1, "chunk_nbytes": 1 << 20}, "100 bytes at 4294967295"),
        ({"nbytes": 0}, "0 of 0 bytes for slot 0"),
        ({"nbytes": 2**32 - 1, "chunk_nbytes": 1 << 20}, "of a chunk of 1048576"),
    ],
)
def test_a_part_that_is_wrong_ends_the_connection_before_a_byte_is_written(
    change: dict[str, int], sentence: str, fake: FakeSource
) -> None:
    for slot in range(SLOTS.num_slots):
        fake.staging(slot).fill_(POISON)
    fields = {"nbytes": 100, "chunk_nbytes": None, **change}
    if fields["nbytes"] == 2**32 - 1:  # more than anybody sends: its header alone
        header = PART.pack(0, 0, 1 << 20, 0, 2**32 - 1, 0, b"")
        fake.sockets[0].sendall(header + bytes(100))
    else:
        fake.part(**cast(Any, fields))
    assert sentence in fake.broken()
    for slot in range(SLOTS.num_slots):
        assert bool((fake.staging(slot) == POISON).all())


def test_a_part_that_is_cut_off_brings_nothing(fake: FakeSource) -> None:
    fake.sockets[0].sendall(PART.pack(0, 0, 100, 0, 100, 4, b"said") + bytes(60))
    until(lambda: fake.lane._arrivals[0].begun_nbytes == 100)
    fake.sockets[0].close()
    assert "the other end has closed it" in fake.broken()


def test_parts_of_a_chunk_are_no_more_than_it(fake: FakeSource) -> None:
    fake.part(60, chunk_nbytes=100)
    until(lambda: fake.lane._arrivals[0].landed_nbytes == 60)
    fake.part(60, chunk_nbytes=100, first=40, sock=1)
    assert "60 bytes at 40 of a chunk of 100, of which 60 are there" in fake.broken()


def test_parts_of_a_chunk_say_one_size(fake: FakeSource) -> None:
    fake.part(60, chunk_nbytes=100)
    until(lambda: fake.lane._arrivals[0].landed_nbytes == 60)
    fake.part(40, chunk_nbytes=101, first=60, sock=1)
    assert "a chunk of 101 bytes in slot 0, of 100" in fake.broken()


def test_a_chunk_is_what_was_announced(fake: FakeSource) -> None:
    fake.lane.announced(0, 0, 100, ())
    fake.part(60)
    assert "a chunk of 60 bytes in slot 0, of 100" in fake.broken()


def test_an_announcement_is_of_the_chunk_that_came(fake: FakeSource) -> None:
    fake.part(60)
    until(fake.lane.heard)
    with pytest.raises(PipeBroken, match="expected 61 bytes of slot 0, as announced, got 60"):
        fake.lane.announced(0, 0, 61, ())


@pytest.mark.parametrize("is_announced", [False, True])
def test_a_slot_is_written_again_only_when_it_is_free(is_announced: bool, fake: FakeSource) -> None:
    fake.part(60, fill=5)
    until(fake.lane.heard)
    if is_announced:
        fake.lane.announced(0, 0, 60, ())
        assert fake.lane.poll() == [0]
    fake.part(60, generation=1, fill=6, sock=1)
    assert "generation 1 of slot 0, which is due for 0 after its credit" in fake.broken()
    assert bool((fake.staging(0)[:60] == 5).all())


def test_an_older_generation_never_shows_up(fake: FakeSource) -> None:
    for generation in range(2):
        fake.part(60, generation=generation)
        until(fake.lane.heard)
        fake.lane.announced(0, generation, 60, ())
        assert fake.lane.poll() == [0]
        fake.lane.free(0)
    fake.part(60, generation=1, sock=1)
    assert "generation 1 of slot 0, which is due for 2" in fake.broken()


def test_who_does_not_know_the_answer_brings_nothing() -> None:
    with closing(FakeSource(answer=b"b" * 16)) as fake:
        fake.meet()
        fake.part(60)
        assert "an answer of somebody else" in fake.broken()
        assert fake.lane._arrivals[0].begun_nbytes == 0


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        (_address(host="192.0.2.7"), "expected the address of an allowed peer, got '192.0.2.7'"),
        (_address(host="localhost"), "localhost cannot be connected to"),
        (b"", "address of another end"),
        (_address(port=0), "address of another end"),
        (_address(token=b"short"), "address of another end"),
        (_address(num_sockets=1000), "address of another end"),
        (_address(host="1" * 65), "address of another end"),
    ],
)
def test_a_sink_connects_to_admitted_addresses_only(address: bytes, sentence: str) -> None:
    with closing(TcpPipe(Config(), lambda: None)) as pipe:
        lane = pipe.open_sink(SLOTS)
        with pytest.raises(PipeBroken, match=sentence):
            lane.connected(address)
        assert threads() == []


# ------------------------------------------------------------------ whom a listener admits


def _no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_source_that_may_have_no_more_threads_says_so_and_admits_others_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with two_ends() as ends:
        other = ends.sink_pipe.open_sink(SLOTS)
        source = ends.source_pipe.open_source(other.address, SLOTS)
        address = msgspec.msgpack.decode(source.address, type=SourceAddress)
        with monkeypatch.context() as patch, closing(dial(address)) as sock:
            patch.setattr(threading.Thread, "start", _no_thread)
            sock.sendall(HELLO.pack(GREETING, address.connection, address.token))
            assert sock.recv(16, socket.MSG_WAITALL) == address.answer
            assert has_ended(sock)
        until(lambda: source._why)
        with pytest.raises(PipeBroken, match="expected a thread for a socket, got can't start"):
            source.heard()
        source.close()
        ends.sink.connected(ends.source.address)
        ends.send(0, 0, 1, 100)
        assert ends.take() == 0


def test_a_sink_that_may_have_no_more_threads_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with two_ends() as ends:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", _no_thread)
            with pytest.raises(PipeBroken, match="expected a thread for a socket, got can't start"):
                ends.sink.connected(ends.source.address)
        ends.sink.close()
        assert threads().count("kvxfer-tcp-take") == 0


def test_what_cannot_be_foreseen_costs_one_connection(caplog: pytest.LogCaptureFixture) -> None:
    def fail(sock: socket.socket) -> bool:
        raise ZeroDivisionError

    admitted: list[socket.socket] = []

    def admit(sock: socket.socket) -> bool:
        admitted.append(sock)
        return True

    with closing(tcp_listener.Listener(Config())) as listener:
        for number, take in enumerate((fail, fail, admit)):
            expected = tcp_listener.Expected(number, take)
            listener.expect(expected)
            address = SourceAddress(
                listener.host, listener.port, number, expected.token, expected.answer, 1
            )
            with closing(dial(address)) as sock:
                sock.sendall(HELLO.pack(GREETING, number, expected.token))
                assert sock.recv(16, socket.MSG_WAITALL) == expected.answer
                if take is fail:
                    assert has_ended(sock)
                else:
                    until(lambda: admitted)
        admitted[0].close()
        assert listener.take_counts() == {"refused.handshake": 2}
    assert len(caplog.messages) == 1


def dial(address: SourceAddress, own: str = "") -> socket.socket:
    place = address.host, address.port
    sock = socket.create_connection(place, timeout=WAIT_S, source_address=(own, 0))
    sock.settimeout(WAIT_S)
    return sock


def has_ended(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize(
    ("said", "counted"),
    [
        (lambda a: HELLO.pack(GREETING, a.connection, bytes(16)), "refused.token"),
        (lambda a: HELLO.pack(GREETING, a.connection, a.answer), "refused.token"),
        (lambda a: HELLO.pack(GREETING, a.connection + 1, a.token), "refused.token"),
        (lambda a: HELLO.pack(b"kvxfer\0\2", a.connection, a.token), "refused.handshake"),
        (lambda a: b"GET / HTTP/1.1\r\n\r\n", "refused.handshake"),
        (lambda a: bytes(range(256)), "refused.handshake"),
    ],
)
def test_who_does_not_prove_himself_is_closed_and_counted(
    said: Callable[[SourceAddress], bytes], counted: str
) -> None:
    with two_ends() as ends, closing(dial(ends.address)) as sock:
        sock.sendall(said(ends.address))
        assert has_ended(sock)
        counts: Counter[str] = Counter()
        until(lambda: counts.update(ends.source_pipe.take_counts()) or counts[counted])
        assert counts == {counted: 1}
        assert "kvxfer-tcp-send" not in threads()
        ends.sink.connected(ends.source.address)
        ends.send(0, 0, 1, 100)
        assert ends.take() == 0


def test_a_token_is_good_for_as_many_sockets_as_were_agreed() -> None:
    with two_ends() as ends:
        with closing(_Deaf(ends.address)), closing(dial(ends.address)) as third:
            third.sendall(HELLO.pack(GREETING, ends.address.connection, ends.address.token))
            assert third.recv(16, socket.MSG_WAITALL) in (b"", ends.address.answer)
            assert has_ended(third)
            until(lambda: ends.source_pipe.take_counts()["refused.token"])
        late = ends.address
        ends.source.close()
        with closing(dial(late)) as sock:
            sock.sendall(HELLO.pack(GREETING, late.connection, late.token))
            assert has_ended(sock)


@pytest.mark.parametrize("said", [b"", GREETING, HELLO.pack(GREETING, 1, bytes(16))[:-1]])
def test_half_a_hello_has_a_deadline(said: bytes) -> None:
    with two_ends(connect_timeout_s=0.2) as ends, closing(dial(ends.address)) as sock:
        sock.settimeout(WAIT_S)
        sock.sendall(said)
        assert has_ended(sock)


def test_those_that_say_nothing_are_bounded_and_keep_nobody_out() -> None:
    with two_ends() as ends:
        idle = [dial(ends.address) for _ in range(3 * MOST_UNPROVED)]
        listener = ends.source_pipe._listener
        assert listener is not None
        assert len(listener._strangers) <= MOST_UNPROVED // 2  # they are of one address
        ends.sink.connected(ends.source.address)
        ends.send(0, 0, 1, 100)
        assert ends.take() == 0
        for sock in idle:
            sock.close()
        until(lambda: not listener._strangers)


def test_an_address_that_is_not_admitted_is_closed_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with two_ends() as ends:
        count_as_far(monkeypatch, "127.0.0.9".__eq__)
        for _ in range(3):
            # It may be over before the kernel has told of its begin
            with suppress(ConnectionError), closing(dial(ends.address, "127.0.0.9")) as sock:
                assert has_ended(sock)
        counts: Counter[str] = Counter()
        until(lambda: counts.update(ends.source_pipe.take_counts()) or counts.total() == 3)
        assert counts == {"refused.address": 3}
    warned = [each for each in caplog.messages if "was refused" in each]
    (line,) = warned
    assert line.startswith("a connection from 127.0.0.9 was refused: expected a peer on this host")


def test_without_descriptors_it_waits_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = [True]

    accept = socket.socket.accept

    def accept_but_once(sock: socket.socket) -> Any:
        if failing:
            failing.pop()
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(sock)

    monkeypatch.setattr(socket.socket, "accept", accept_but_once)
    with two_ends() as ends:
        ends.sink.connected(ends.source.address)
        ends.send(0, 0, 1, 100)
        assert ends.take() == 0
        assert not failing


# ------------------------------------------------------------------ ports and settings


def free_ports(number: int) -> str:
    """A range of ports that nobody has."""
    for first in range(42000, 60000, 50):
        taken = []
        try:
            for port in range(first, first + number):
                taken.append(socket.create_server(("127.0.0.1", port)))
        except OSError:
            continue
        finally:
            for sock in taken:
                sock.close()
        return f"{first}-{first + number - 1}"
    raise AssertionError("no ports")


@pytest.fixture
def worker() -> Iterator[Worker]:
    with closing(Worker()) as worker:
        yield worker


def test_both_ports_are_of_data_port_and_two_are_needed(worker: Worker) -> None:
    ports = free_ports(2)
    with closing(Pair(tcp_config(data_port=ports))) as pair:
        listener = pair.source._pipe._listener
        assert ports == f"{int(pair.source.data_endpoint().rpartition(':')[2])}-{listener.port}"
        with pytest.raises(ConfigError, match=f"data_port: expected a free one .* got {ports}"):
            worker.sources(worker.plain, tcp_config(data_port=ports))
    with (
        socket.create_server(("127.0.0.1", int(ports.partition("-")[0]))),
        pytest.raises(ConfigError, match=f"two free ones on 127.0.0.1 for tcp, got {ports}"),
    ):
        worker.sources(worker.plain, tcp_config(data_port=ports))


def test_one_port_is_too_few(worker: Worker) -> None:
    with pytest.raises(ConfigError, match="expected a range for tcp, which takes two ports, got 5"):
        worker.sources(worker.plain, tcp_config(data_port=5800))


def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    pipe = TcpPipe(Config(host="203.0.113.1"), lambda: None)
    with pytest.raises(TransportUnavailable, match="cannot be listened on"):
        pipe.listen()


KEYS = {"curve_public_key": "a" * 40, "curve_secret_key": "b" * 40}


@pytest.mark.parametrize("keys", [KEYS, {"curve_keys_dir": "/keys"}])
def test_tcp_by_name_and_keys_do_not_go_together(keys: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="transport: expected a wire that CURVE keys encrypt"):
        Config(transport="tcp", **cast(Any, keys))


@pytest.mark.parametrize(
    ("settings", "device", "is_offered"),
    [
        ({"zmq_streams": 2}, "cuda", True),
        ({"zmq_streams": 2}, "cpu", False),
        ({"zmq_streams": 1}, "cuda", False),
        ({"zmq_streams": 2, **KEYS}, "cuda", False),
        ({"zmq_streams": 2, "data_port": "20000-20063"}, "cuda", True),
        ({"zmq_streams": 2, "data_port": "20000-20062"}, "cuda", False),
    ],
)
def test_auto_offers_tcp_where_it_can_gain_something(
    settings: dict[str, Any], device: str, is_offered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in registry.SOURCES:
        use_source(monkeypatch, name, lambda *_: None)
        use_sink(monkeypatch, name, lambda *_: None)
    on_device = SimpleNamespace(device=torch.device(device))
    memory = cast(Any, SimpleNamespace(device=on_device.device, tensors=(on_device,)))
    made = registry.make_sources(memory, Config(**settings), *cast(Any, (None,) * 3))
    assert ("tcp" in made) is is_offered
    sinks = registry.make_sinks(memory, Config(**settings), *cast(Any, (None,) * 3))
    assert ("tcp" in sinks) is (is_offered or "data_port" in settings)  # no port of a sink's


# ------------------------------------------------------------------ the wire


def tcp_config(**settings: Any) -> Config:
    return msgspec.structs.replace(CONFIG, transport="tcp", zmq_streams=2, **settings)


def test_loads_a_trial_and_the_end_of_a_socket() -> None:
    with closing(Pair(tcp_config())) as pair:
        assert pair.trial().costs.bytes_per_s > 0
        pair.sink.attach(pair.manifest)
        for number in range(1, 4):
            load(pair, number)
        (lane,) = [each for each in pair.source._pipe._lanes if not each.is_closed]
        pair.hold = True
        pair.start(key_of(4), a_move(4))
        pair.until(lambda: sum(type(each).__name__ == "Packed" for each in pair.said) >= 27 + 4)
        tcp_listener.end(next(iter(lane._sockets._threads)))
        end = pair.end(key_of(4))
        assert isinstance(end, ReadBroke)
        assert end.reason is Reason.PEER_LOST
        pair.until(lambda: any(isinstance(each, PeerGone) for each in pair.seen))
        pair.until(lambda: pair.said_kind(SendStopped, key_of(4)))
        pair.until(lambda: not len(connections_of(pair)))
        assert lane.is_closed
        pair.hold = False
        pair.sink.attach(pair.manifest)
        load(pair, 5)
        pair.until(lambda: pair.source.is_settled)


def test_refused_connections_are_counted_by_the_wire() -> None:
    with closing(Pair(tcp_config())) as pair:
        pair.sink.attach(pair.manifest)
        load(pair, 1)
        listener = pair.source._pipe._listener
        with closing(socket.create_connection((listener.host, listener.port), WAIT_S)) as sock:
            sock.sendall(bytes(100))
            assert has_ended(sock)

        def counted() -> int:
            pair.source.inspect()
            return int(pair.source.counts["refused.handshake"])

        pair.until(lambda: counted() == 1)


def test_an_attach_with_an_address_that_makes_no_sense_is_refused() -> None:
    with closing(TcpPipe(Config(), lambda: None)) as pipe:
        for address in (b"", b"\xff" * 100, msgspec.msgpack.encode(SinkAddress(1000))):
            with pytest.raises(TransportUnavailable, match="address of another end"):
                pipe.open_source(address, SLOTS)
        assert threads() == []
