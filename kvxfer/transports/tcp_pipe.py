"""Plain TCP as a pipe: the payload goes over sockets of its own, straight from staging to staging.

A connection has several sockets, each with a thread at either end that moves megabytes in one call,
without the interpreter: so a host with many cores is not bound by one flow, by ZeroMQ's threads and
copies, or by what Python does with each chunk. A payload is cut in *parts*: one chunk alone is
carried by all sockets, so a trial measures all of them.

The source listens (:mod:`~kvxfer.transports.tcp_listener`), and the sink connects when it has heard
``Attached``. Before each part stands a ``PART``: generation, slot, size of the whole chunk, where
in it the part begins and how long it is, and with the first part the announcement. So the sink's IO
thread is woken once for a chunk, when all of it is there, and not by ZeroMQ before. Credits stay on
ZeroMQ: a sink sends them several at a time.

The sink looks at a ``PART`` before a byte is written: the slot must be one of the connection's that
is the source's at the moment, the generation its next one, the chunk within the slot, of one size
in all its parts, and the parts no more than the chunk. Anything else ends the connection.

A thread only ever touches the memory of its lane, and a lane lets go of that when its threads have
ended: ``close`` shuts the sockets down, which wakes them, and waits.
"""

from __future__ import annotations

import errno
import hmac
import itertools
import logging
import queue
import select
import socket
import struct
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import msgspec
import torch
import zmq

from kvxfer.config import Config
from kvxfer.errors import ProtocolError, TransportUnavailable
from kvxfer.transports.base import Wake
from kvxfer.transports.native_peers import parse_address
from kvxfer.transports.parallel import most_further, num_streams
from kvxfer.transports.pipe import (
    HOST_STAGING,
    Parts,
    Pipe,
    PipeBroken,
    SinkLane,
    Slots,
    SourceLane,
    StagingSize,
    check_no_parts,
    make_staging,
)
from kvxfer.transports.tcp_listener import (
    GREETING,
    HELLO,
    TOKEN_NBYTES,
    Expected,
    Listener,
    end,
    numeric,
    prepare,
)

MOST_MESSAGE_NBYTES = 486
"""An announcement has 200 or so; a longer one goes over ZeroMQ."""
PART = struct.Struct(f"<QIIIIH{MOST_MESSAGE_NBYTES}s")
"""512 bytes, which one call reads: generation and slot; bytes of the chunk, of what is before the
part, of the part, of the announcement; the announcement, with the first part.
"""
LEAST_PART_NBYTES, USUAL_PART_NBYTES = 512 << 10, 4 << 20
"""As many parts as sockets are idle, but smaller ones are not worth a thread that is woken. Where
all are busy chunks follow each other, and each part costs both ends two turns of the interpreter.
"""
MOST_SOCKETS = 64
"""Of one connection, whatever a peer says."""
GPU_STAGING = StagingSize(32 << 20, 32 << 20, striped=True)
"""Host memory that a GPU packs at 50 GB/s: larger chunks cost the IO threads less, and all sockets
carry each of them.
"""
_PAGE_NBYTES = 4096

_log = logging.getLogger("kvxfer.transports")

_Token = Annotated[bytes, msgspec.Meta(min_length=TOKEN_NBYTES, max_length=TOKEN_NBYTES)]
_Number = Annotated[int, msgspec.Meta(ge=1, le=MOST_SOCKETS)]
MakeMemory = Callable[[int], torch.Tensor]
"""So many bytes of host memory: flat uint8."""


class SinkAddress(msgspec.Struct, frozen=True, array_like=True):
    """What a sink's end says of itself: how many sockets it would have."""

    num_sockets: _Number


class SourceAddress(msgspec.Struct, frozen=True, array_like=True):
    """What a source's end says of itself: where it listens, the number of the connection and its
    two tokens, and how many sockets it may have.
    """

    host: Annotated[str, msgspec.Meta(max_length=64)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    connection: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    token: _Token
    answer: _Token
    num_sockets: _Number


def cut(nbytes: int, num_sockets: int, num_idle: int) -> Iterator[tuple[int, int]]:
    """The parts of a payload, each where it begins and its size, of about the same size and at
    whole pages.
    """
    least = min(num_idle, nbytes // LEAST_PART_NBYTES)
    num_parts = max(1, min(num_sockets, max(least, nbytes // USUAL_PART_NBYTES)))
    share = -(-nbytes // (num_parts * _PAGE_NBYTES)) * _PAGE_NBYTES
    for offset in range(0, nbytes, share):
        yield offset, min(share, nbytes - offset)


# ------------------------------------------------------------------ what both ends share


class _Memory:
    """The staging of a connection: each slot's is made when it is used first."""

    def __init__(self, slots: Slots, make: MakeMemory) -> None:
        self._slot_nbytes, self._make = slots.slot_nbytes, make
        self._tensors: list[torch.Tensor | None] = [None] * slots.num_slots
        self._views: list[memoryview | None] = [None] * slots.num_slots
        self._cuts: list[torch.Tensor | None] = [None] * slots.num_slots
        """The beginning of each slot that was used last: most chunks are as long as the one before,
        and to cut a tensor takes up to 50 us."""
        self._making = threading.Lock()

    def beginning(self, slot: int, nbytes: int) -> torch.Tensor:
        found = self._cuts[slot]
        if found is None or found.numel() != nbytes:
            found = self._cuts[slot] = self._made(slot)[0][:nbytes]
        return found

    def view(self, slot: int) -> memoryview:
        found = self._views[slot]
        return found if found is not None else self._made(slot)[1]

    def _made(self, slot: int) -> tuple[torch.Tensor, memoryview]:
        with self._making:  # parts of one chunk come on several threads
            tensor, view = self._tensors[slot], self._views[slot]
            if tensor is None or view is None:
                tensor = self._make(self._slot_nbytes)
                view = tensor.numpy().data
                self._tensors[slot], self._views[slot] = tensor, view
        return tensor, view


class _Sockets:
    """The sockets of one end of a connection, and their threads. ``on_end`` is called on such a
    thread when it ends before ``close``, with the reason; and where it cannot start.
    """

    def __init__(self, name: str, on_end: Callable[[str], None]) -> None:
        self._name, self._on_end = name, on_end
        self._changing = threading.Lock()
        self._threads: dict[socket.socket, threading.Thread] = {}
        self.is_closed = False

    def __len__(self) -> int:
        return len(self._threads)

    def start(self, sock: socket.socket, serve: Callable[[socket.socket], None], most: int) -> bool:
        """A thread for the socket, which is this object's now. False if it is closed or has as many
        as it may, or where this process may have no more threads.
        """
        thread = threading.Thread(
            target=self._main, args=(sock, serve), name=self._name, daemon=True
        )
        with self._changing:
            if self.is_closed or len(self._threads) >= most:
                return False
            try:
                thread.start()
            except RuntimeError as exc:
                self._tell(f"tcp: expected a thread for a socket, got {exc}")
                return False
            self._threads[sock] = thread
        return True

    def _main(self, sock: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        try:
            serve(sock)
        except (OSError, PipeBroken) as exc:
            self._tell(f"tcp: expected a connection that stands, got {exc}")
        except Exception as exc:  # noqa: BLE001  # no memory, say; it ends this connection
            self._tell(f"tcp: expected to move a payload, got {exc!r}")

    def _tell(self, why: str) -> None:
        if not self.is_closed:
            self._on_end(why)

    def close(self, wake: Callable[[int], None] = lambda number: None) -> None:
        """Shut all of them down and wait for their threads. ``wake``: has so many threads return
        that wait for something else. Idempotent.
        """
        with self._changing:
            self.is_closed = True
            threads, self._threads = self._threads, {}
        for sock in threads:
            end(sock)
        wake(len(threads))
        for sock, thread in threads.items():
            thread.join()
            sock.close()


# ------------------------------------------------------------------ the giving end


@dataclass(frozen=True, slots=True)
class _Part:
    """``header``: what goes before the payload, which is the slot's from ``first`` to ``last``."""

    header: bytes
    slot: int
    first: int
    last: int


class TcpSourceLane(SourceLane):
    """Parts wait in one queue, and whichever socket is free takes the next: a slow one holds up no
    more than what it has taken. A chunk leaves when it was announced.
    """

    def __init__(
        self, slots: Slots, make: MakeMemory, wake: Wake, listener: Listener, number: int, most: int
    ) -> None:
        """``number``: of the connection; ``most``: sockets that it may have."""
        self._memory: _Memory | None = _Memory(slots, make)
        self._wake, self._listener, self._number, self.num_sockets = wake, listener, number, most
        self._parts: queue.SimpleQueue[_Part | None] = queue.SimpleQueue()
        self._sent: list[int] = []
        self._untold: deque[tuple[int, int, int]] = deque()
        """Slot, generation and size of those that were sent and not announced."""
        self._num_queued = 0
        self._num_done = [0] * most
        """Parts that were queued, and that each socket has sent."""
        self._most_waiting = slots.num_slots * most
        """Parts, when one more chunk is sent: those of all other slots, and one that each socket
        has sent and not counted. A sink that credits what it has not read would have more wait."""
        self._why = ""
        self._sockets = _Sockets("kvxfer-tcp-send", self._break)
        expected = Expected(number, self._admit)
        listener.expect(expected)
        self.address = msgspec.msgpack.encode(
            SourceAddress(
                listener.host, listener.port, number, expected.token, expected.answer, most
            )
        )

    def _admit(self, sock: socket.socket) -> bool:
        serve = partial(self._serve, len(self._sockets))  # one listener calls this
        return self._sockets.start(sock, serve, self.num_sockets)

    @property
    def is_closed(self) -> bool:
        return self._sockets.is_closed

    def staging(self, slot: int, nbytes: int) -> torch.Tensor:
        assert self._memory is not None
        return self._memory.beginning(slot, nbytes)

    def send(self, slot: int, generation: int, nbytes: int) -> Parts:
        self._check()
        self._sent.append(slot)
        self._untold.append((slot, generation, nbytes))
        return ()

    def tell(self, message: bytes) -> bool:
        """The announcement of what was sent first of all that were not announced: both leave."""
        self._check()
        if not self._untold:
            return False
        slot, generation, nbytes = self._untold.popleft()
        if not nbytes:
            return False
        is_told = len(message) <= MOST_MESSAGE_NBYTES
        self._queue(slot, generation, nbytes, message if is_told else b"")
        return is_told

    def _queue(self, slot: int, generation: int, nbytes: int, message: bytes) -> None:
        num_waiting = self._num_queued - sum(self._num_done)
        if num_waiting > self._most_waiting:
            raise PipeBroken(
                f"tcp: expected at most {self._most_waiting} parts that were not sent, got "
                f"{num_waiting}: the sink credits what it has not read"
            )
        num_idle = self.num_sockets - num_waiting
        for first, part_nbytes in cut(nbytes, self.num_sockets, num_idle):
            said = message if first == 0 else b""
            header = PART.pack(generation, slot, nbytes, first, part_nbytes, len(said), said)
            self._parts.put(_Part(header, slot, first, first + part_nbytes))
            self._num_queued += 1

    def poll(self) -> Sequence[int]:
        """At once: the sink counts the bytes itself."""
        self._check()
        sent, self._sent = self._sent, []
        return sent

    def heard(self) -> Sequence[bytes]:
        self._check()
        return ()

    def _check(self) -> None:
        if self._why:
            raise PipeBroken(self._why)

    def _break(self, why: str) -> None:
        self._why = self._why or why
        self._wake()

    def _serve(self, number: int, sock: socket.socket) -> None:
        """On the thread of one socket."""
        memory = self._memory
        assert memory is not None
        while (part := self._parts.get()) is not None:
            header, payload = part.header, memory.view(part.slot)[part.first : part.last]
            count = sock.sendmsg((header, payload))
            if count < len(header):
                sock.sendall(header[count:])
                count = len(header)
            if count < len(header) + len(payload):
                sock.sendall(payload[count - len(header) :])
            self._num_done[number] += 1

    def close(self) -> None:
        """No thread sends any more, and memory goes."""
        self._listener.forget(self._number)
        self._sockets.close(self._release)
        self._memory = None
        self._sent = []
        self._untold.clear()

    def _release(self, num_threads: int) -> None:
        for _ in range(num_threads):
            self._parts.put(None)


# ------------------------------------------------------------------ the taking end


@dataclass(slots=True)
class _Arrival:
    """What there is of the next chunk of a slot. ``is_sources``: the slot is the source's;
    ``nbytes``: of the chunk, None before its first part; ``begun_nbytes``: of parts whose headers
    have come. ``message``: its announcement; ``announced_nbytes``: what that says, once it is read.
    """

    generation: int = 0
    is_sources: bool = True
    nbytes: int | None = None
    begun_nbytes: int = 0
    landed_nbytes: int = 0
    message: bytes = b""
    announced_nbytes: int | None = None


class TcpSinkLane(SinkLane):
    """Each thread reads a header, checks it, and has the kernel write the part to its place."""

    def __init__(
        self, slots: Slots, make: MakeMemory, config: Config, wake: Wake, num_sockets: int
    ) -> None:
        self._slots, self._config, self._wake = slots, config, wake
        self._memory: _Memory | None = _Memory(slots, make)
        self._arrivals = [_Arrival() for _ in range(slots.num_slots)]
        self._changing = threading.Lock()
        self._arrived: list[int] = []
        self._messages: list[bytes] = []
        self._why = ""
        self.num_sockets = num_sockets
        self._sockets = _Sockets("kvxfer-tcp-take", self._break)
        self.address = msgspec.msgpack.encode(SinkAddress(num_sockets))

    @property
    def is_closed(self) -> bool:
        return self._sockets.is_closed

    def connected(self, address: bytes) -> None:
        """Connect the sockets, in the background."""
        source = parse_address("tcp", address, SourceAddress)
        if not self._config.peer_allowed(source.host):
            raise PipeBroken(
                f"tcp: expected the address of an allowed peer, got {source.host!r}; "
                "see allowed_peers"
            )
        self.num_sockets = min(self.num_sockets, source.num_sockets)
        for _ in range(self.num_sockets):
            sock = _connecting(source)
            serve = partial(self._serve, source)
            if not self._sockets.start(sock, serve, self.num_sockets):
                sock.close()
                self._check()
        _log.debug("tcp: %s:%d: %d sockets", source.host, source.port, self.num_sockets)

    def announced(
        self, slot: int, generation: int, nbytes: int, parts: Sequence[zmq.Frame]
    ) -> None:
        check_no_parts(parts)
        with self._changing:
            arrival = self._arrivals[slot]
            if generation != arrival.generation or arrival.announced_nbytes is not None:
                raise ProtocolError(
                    f"chunk: expected generation {arrival.generation} of slot {slot}, "
                    f"got {generation}"
                )
            if arrival.nbytes not in (None, nbytes):
                raise PipeBroken(
                    f"tcp: expected {nbytes} bytes of slot {slot}, as announced, got "
                    f"{arrival.nbytes}"
                )
            arrival.announced_nbytes = nbytes
            self._settle(slot, arrival)

    def poll(self) -> Sequence[int]:
        """What has come counts, whatever has become of the sockets since."""
        with self._changing:
            arrived, self._arrived = self._arrived, []
        if not arrived:
            self._check()
        return arrived

    def heard(self) -> Sequence[bytes]:
        """Announcements of chunks that are there."""
        if not self._messages:
            self._check()
            return ()
        with self._changing:
            messages, self._messages = self._messages, []
        return messages

    def _check(self) -> None:
        if self._why and not (self._arrived or self._messages):
            raise PipeBroken(self._why)

    def payload(self, slot: int) -> torch.Tensor:
        assert self._memory is not None
        return self._memory.beginning(slot, self._arrivals[slot].landed_nbytes)

    def free(self, slot: int) -> None:
        with self._changing:
            self._arrivals[slot] = _Arrival(self._arrivals[slot].generation + 1)

    def close(self) -> None:
        """No thread writes any more, and memory goes, unless somebody still reads it."""
        self._sockets.close()
        self._memory = None
        self._arrived, self._messages = [], []

    # -- the threads of the sockets

    def _serve(self, source: SourceAddress, sock: socket.socket) -> None:
        _greet(sock, source, self._config.connect_timeout_s)
        header = bytearray(PART.size)
        while True:
            _receive(sock, memoryview(header))
            generation, slot, chunk_nbytes, first, nbytes, said_nbytes, said = PART.unpack(header)
            into = self._begin(generation, slot, chunk_nbytes, first, nbytes)
            _receive(sock, into)
            self._land(slot, nbytes, said[:said_nbytes])

    def _begin(
        self, generation: int, slot: int, chunk_nbytes: int, first: int, nbytes: int
    ) -> memoryview:
        """Where a part goes. Raises PipeBroken for one that may not be written."""
        if slot >= self._slots.num_slots:
            raise PipeBroken(f"a part of slot {slot}, of {self._slots.num_slots}")
        with self._changing:
            arrival, memory = self._arrivals[slot], self._memory
            if generation != arrival.generation or not arrival.is_sources:
                raise PipeBroken(
                    f"generation {generation} of slot {slot}, which is due for "
                    f"{arrival.generation} after its credit"
                )
            for known in (arrival.nbytes, arrival.announced_nbytes):
                if known not in (None, chunk_nbytes):
                    raise PipeBroken(f"a chunk of {chunk_nbytes} bytes in slot {slot}, of {known}")
            begun_nbytes = arrival.begun_nbytes + nbytes
            if chunk_nbytes > self._slots.slot_nbytes or nbytes == 0:
                raise PipeBroken(
                    f"{nbytes} of {chunk_nbytes} bytes for slot {slot} of {self._slots.slot_nbytes}"
                )
            if max(first + nbytes, begun_nbytes) > chunk_nbytes:
                raise PipeBroken(
                    f"{nbytes} bytes at {first} of a chunk of {chunk_nbytes}, of which "
                    f"{arrival.begun_nbytes} are there or on their way"
                )
            arrival.nbytes, arrival.begun_nbytes = chunk_nbytes, begun_nbytes
        assert memory is not None  # it goes after this thread
        return memory.view(slot)[first : first + nbytes]

    def _land(self, slot: int, nbytes: int, message: bytes) -> None:
        with self._changing:
            arrival = self._arrivals[slot]
            arrival.landed_nbytes += nbytes
            arrival.message = arrival.message or message
            is_whole = arrival.landed_nbytes == arrival.nbytes
            if is_whole:
                arrival.is_sources = False
                if arrival.message:
                    self._messages.append(arrival.message)
                self._settle(slot, arrival)
        if is_whole:
            self._wake()

    def _settle(self, slot: int, arrival: _Arrival) -> None:
        """It is announced, and all of it is there: ``poll`` names it."""
        if arrival.landed_nbytes == arrival.announced_nbytes:
            self._arrived.append(slot)

    def _break(self, why: str) -> None:
        self._why = self._why or why
        self._wake()


def _connecting(source: SourceAddress) -> socket.socket:
    """A socket that is about to be connected, so that its end wakes who waits for it. Raises
    PipeBroken.
    """
    try:
        family, _, _, _, place = numeric(source.host, source.port)
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as exc:
        raise PipeBroken(f"tcp: {source.host} cannot be connected to: {exc}") from exc
    sock.setblocking(False)
    problem = sock.connect_ex(place)
    if problem not in (0, errno.EINPROGRESS):
        sock.close()
        raise PipeBroken(f"tcp: {source.host} cannot be connected to: {errno.errorcode[problem]}")
    return sock


def _greet(sock: socket.socket, source: SourceAddress, timeout_s: float) -> None:
    """Prove both ends to each other. Raises OSError, PipeBroken."""
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    if not poll.poll(round(timeout_s * 1000)):
        raise PipeBroken(f"no answer of {source.host}:{source.port}; can it be reached from here?")
    problem = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if problem:
        raise OSError(problem, errno.errorcode.get(problem, ""))
    sock.settimeout(timeout_s)
    prepare(sock)
    sock.sendall(HELLO.pack(GREETING, source.connection, source.token))
    answer = bytearray(TOKEN_NBYTES)
    _receive(sock, memoryview(answer))
    if not hmac.compare_digest(answer, source.answer):
        raise PipeBroken("an answer of somebody else")
    sock.settimeout(None)


def _receive(sock: socket.socket, into: memoryview) -> None:
    """All of it, in as few calls as can be. Raises OSError."""
    while into:
        count = sock.recv_into(into, 0, socket.MSG_WAITALL)
        if not count:
            raise ConnectionResetError(errno.ECONNRESET, "the other end has closed it")
        into = into[count:]


# ------------------------------------------------------------------ the pipe


class TcpPipe(Pipe):
    """``pinned``: makes memory that the GPU of the pool reaches."""

    name = "tcp"
    _numbers = itertools.count(1)

    def __init__(self, config: Config, wake: Wake, pinned: MakeMemory | None = None) -> None:
        self._config, self._wake = config, wake
        self._make = pinned or partial(make_staging, device=torch.device("cpu"))
        self.num_sockets = num_streams(config)
        self._listener: Listener | None = None
        self._lanes: list[TcpSourceLane | TcpSinkLane] = []

    @classmethod
    def staging_size(cls, device_type: str) -> StagingSize:
        """Of each socket; it is host memory."""
        return HOST_STAGING if device_type == "cpu" else GPU_STAGING

    def listen(self) -> None:
        if self._listener is None:
            self._listener = Listener(self._config)

    def take_counts(self) -> Counter[str]:
        return Counter() if self._listener is None else self._listener.take_counts()

    def open_source(self, address: bytes, slots: Slots, *, fd: int | None = None) -> TcpSourceLane:
        try:
            sink = parse_address("tcp", address, SinkAddress)
        except PipeBroken as exc:
            raise TransportUnavailable(str(exc)) from exc
        self.listen()
        assert self._listener is not None
        most = min(sink.num_sockets, self._most_sockets())
        lane = TcpSourceLane(
            slots, self._make, self._wake, self._listener, next(self._numbers), most
        )
        self._lanes.append(lane)
        return lane

    def open_sink(self, slots: Slots, way: str = "") -> TcpSinkLane:
        self.way_named(way)
        lane = TcpSinkLane(slots, self._make, self._config, self._wake, self._most_sockets())
        self._lanes.append(lane)
        return lane

    def _most_sockets(self) -> int:
        """Of one more connection: as with streams of ``zmq``, further ones are bounded in all."""
        self._lanes = [lane for lane in self._lanes if not lane.is_closed]
        further = sum(lane.num_sockets - 1 for lane in self._lanes)
        return max(1, min(self.num_sockets, 1 + most_further() - further))

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()
        self._lanes.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
