"""Messages and chunks that are lost, late, doubled, out of order, cut off or garbled on their way.

Every message of ZeroMQ leaves through ``Router.send`` or ``Dealer.send``, every chunk of a stream
wire through ``StreamSource._carry``; these are replaced in a process of the tests. What is drawn is
decided by a seed and the messages that come. What was really done is said, one by one.

A flipped bit may make another message that is whole: a Grant of other blocks, a Verdict that says
the opposite. Nothing in the message can show that: CURVE does, and digests of the KV. So a flip
leaves a message that cannot be read, or one that differs in names alone, or the header of the same
chunk in the same slot.

The two ends of a stream count slots, on a connection that loses and doubles nothing. There a lost
message is one that comes as nonsense, and a Credit, which names no generation, comes once.

``tcp`` has its chunks in a stream of bytes. Their announcements may be nonsense, flipped or double;
their bytes come late, or the connection ends in the middle of them. Nothing else can befall them.
"""

from __future__ import annotations

import errno
import random
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import zmq

from kvxfer.errors import ProtocolError
from kvxfer.transfer import wire
from kvxfer.transports import stream_wire
from kvxfer.transports.channel import Dealer, Router
from kvxfer.transports.pipe import Parts, PipeBroken
from kvxfer.transports.stream_connections import Connection
from kvxfer.transports.stream_source import StreamSource
from kvxfer.transports.tcp_pipe import TcpSourceLane

KINDS = ("drop", "delay", "duplicate", "reorder", "truncate", "flip")
ANNOUNCED_KINDS, BYTES_KINDS = ("drop", "duplicate", "flip"), ("delay", "truncate")
"""Of chunks of ``tcp``: what befalls their announcements, and their bytes."""
MESSAGE, CHUNK = "message", "chunk"
LONGEST_DELAY_S = 0.4
_DECODERS: tuple[Callable[[memoryview], Any], ...] = (
    wire.decode_to_source,
    wire.decode_to_sink,
    stream_wire.decode_to_source,
    stream_wire.decode_to_sink,
)
Frames = Sequence[bytes | zmq.Frame]
Send = Callable[[Frames], bool]
Way = tuple[Router | Dealer | Connection, bytes]
"""What messages to one peer leave by, in their order; and its name where there are several."""
_UNREADABLE = b"\xc1"  # never used in msgpack


@dataclass(frozen=True, slots=True)
class _Drawn:
    """``order``: the number of the injection; ``what``: a message or a chunk."""

    order: int
    what: str
    kind: str


@dataclass(frozen=True, slots=True)
class _Held:
    """It leaves when it is due. One that is to be out of order leaves behind the next one, and is
    but late where none comes.
    """

    drawn: _Drawn
    due_s: float
    send: Callable[[], object]


@dataclass(slots=True)
class _Window:
    """It lasts so long from the first message on: who stands still, or is alone, sends none.
    ``until_s``: None before that.
    """

    order: int
    kinds: tuple[str, ...]
    share: float
    duration_s: float
    until_s: float | None = None

    def is_open(self) -> bool:
        """One more message has come."""
        now_s = time.monotonic()
        if self.until_s is None:
            self.until_s = now_s + self.duration_s
        return now_s < self.until_s


class Mangler:
    """What this process does to what it sends. ``say``: is told the number of the injection, and
    what was done.
    """

    def __init__(self, seed: int, say: Callable[[int, str], object]) -> None:
        self.random = random.Random(seed)
        self._say = say
        self._held: dict[Way, list[_Held]] = {}
        self._windows: dict[str, _Window] = {}

    def begin(
        self, order: int, what: str, kinds: tuple[str, ...], share: float, duration_s: float
    ) -> None:
        """From the next one on, for so long. ``what``: MESSAGE or CHUNK; ``share``: of them."""
        self._windows[what] = _Window(order, kinds, share, duration_s)

    def end(self) -> None:
        """From now on nothing is mangled; what is held back leaves in its time."""
        self._windows.clear()

    def install(self) -> None:
        """Into the ways out of this process."""
        to_router, to_dealer, to_sink = Router.send, Dealer.send, StreamSource._carry
        look_router, look_dealer, look_source = Router.inspect, Dealer.inspect, StreamSource.inspect
        to_socket = TcpSourceLane._serve

        def send_back(router: Router, identity: bytes, *frames: bytes | zmq.Frame) -> bool:
            way = (router, identity)
            drawn = self._draw_message(frames)
            return self._send(drawn, way, frames, lambda new: to_router(router, identity, *new))

        def send(dealer: Dealer, frame: bytes) -> bool:
            drawn = self._draw_message((frame,))
            return self._send(
                drawn, (dealer, b""), (frame,), lambda new: to_dealer(dealer, _bytes_of(new[0]))
            )

        def carry(
            source: StreamSource, connection: Connection, slot: int, frame: bytes, parts: Parts
        ) -> bool:
            kinds = ANNOUNCED_KINDS if source.name == "tcp" else KINDS
            drawn = None if connection.is_trial else self.draw(CHUNK, kinds)
            return self._send(
                drawn,
                (connection, b""),
                (frame, *parts),
                lambda new: to_sink(source, connection, slot, _bytes_of(new[0]), tuple(new[1:])),
            )

        def inspect_router(router: Router) -> int:
            self._look(lambda end: end is router)
            return look_router(router)

        def inspect_dealer(dealer: Dealer) -> None:
            self._look(lambda end: end is dealer)
            look_dealer(dealer)

        def inspect_source(source: StreamSource) -> None:
            self._look(lambda end: isinstance(end, Connection))
            look_source(source)

        def serve(lane: TcpSourceLane, number: int, sock: socket.socket) -> None:
            to_socket(lane, number, cast(socket.socket, _Bytes(sock, self)))

        for owner, name, function in (
            (Router, "send", send_back),
            (Dealer, "send", send),
            (StreamSource, "_carry", carry),
            (Router, "inspect", inspect_router),
            (Dealer, "inspect", inspect_dealer),
            (StreamSource, "inspect", inspect_source),
            (TcpSourceLane, "_serve", serve),
        ):
            setattr(owner, name, function)

    def _draw_message(self, frames: Sequence[bytes | zmq.Frame]) -> _Drawn | None:
        if MESSAGE not in self._windows:
            return None
        is_chunk = isinstance(_of_stream(_bytes_of(frames[0])), stream_wire.ChunkHeader)
        return None if is_chunk else self.draw(MESSAGE, KINDS)

    def draw(self, what: str, kinds: Sequence[str]) -> _Drawn | None:
        """What befalls the next one, of what can."""
        window = self._windows.get(what)
        if window is None:
            return None
        if not window.is_open():
            self._windows.pop(what, None)  # another thread may be as far
            return None
        possible = [kind for kind in window.kinds if kind in kinds]
        if not possible or self.random.random() >= window.share:
            return None
        return _Drawn(window.order, what, self.random.choice(possible))

    def _send(self, drawn: _Drawn | None, way: Way, frames: Frames, send: Send) -> bool:
        """True: as far as the sender knows it has left."""
        if drawn is not None and drawn.kind in ("delay", "reorder"):
            wait_s = self.random.random() if drawn.kind == "delay" else 1.0
            copied = tuple(map(_bytes_of, frames))
            due_s = time.monotonic() + wait_s * LONGEST_DELAY_S
            held = _Held(drawn, due_s, lambda: send(copied))
            self._held.setdefault(way, []).append(held)
            return True
        if drawn is None:
            is_sent = send(frames)
        else:
            self.say(drawn)
            is_sent = self._mangled(drawn.kind, tuple(map(_bytes_of, frames)), send)
        if way in self._held:
            self._leave(way, has_overtaken=True)
        return is_sent

    def _mangled(self, kind: str, frames: tuple[bytes, ...], send: Send) -> bool:
        message = _of_stream(frames[0])
        if kind == "drop" and message is None:
            return True
        if kind == "drop" or (kind == "duplicate" and isinstance(message, stream_wire.Credit)):
            frames = (_UNREADABLE + frames[0][1:], *frames[1:])
        elif kind == "duplicate":
            send(frames)
        elif kind == "truncate":
            which = self.random.choice([n for n, frame in enumerate(frames) if frame] or [0])
            cut = frames[which][: self.random.randrange(max(1, len(frames[which])))]
            frames = (*frames[:which], cut, *frames[which + 1 :])
        elif kind == "flip":
            frames = (self._flipped(frames[0]), *frames[1:])
        return send(frames)

    def say(self, drawn: _Drawn, kind: str = "") -> None:
        """It is done. ``kind``: what has come of it, if not what was drawn."""
        self._say(drawn.order, f"{drawn.what}: {kind or drawn.kind}")

    def _look(self, is_own: Callable[[object], bool]) -> None:
        """By the thread that sends over these: others are only forgotten once they have ended."""
        for way in list(self._held):
            end = way[0]
            if end.is_lost if isinstance(end, Connection) else end.socket.closed:
                self._held.pop(way, None)
            elif is_own(end):
                self._leave(way, has_overtaken=False)

    def _leave(self, way: Way, *, has_overtaken: bool) -> None:
        """What was held back and is due, or was to be overtaken and is."""
        held, now_s, kept = self._held.pop(way, []), time.monotonic(), list[_Held]()
        for each in held:
            is_overtaken = has_overtaken and each.drawn.kind == "reorder"
            if not is_overtaken and each.due_s > now_s:
                kept.append(each)
                continue
            self.say(each.drawn, "" if is_overtaken else "delay")
            with suppress(PipeBroken):  # who polls the pipe is told, too
                each.send()
        if kept:
            self._held[way] = kept

    def _flipped(self, frame: bytes) -> bytes:
        for _ in range(20):
            changed = bytearray(frame)
            bit = self.random.randrange(len(frame) * 8)
            changed[bit // 8] ^= 1 << bit % 8
            if _shows(frame, bytes(changed)):
                return bytes(changed)
        return frame[:-1]


def _bytes_of(frame: bytes | zmq.Frame) -> bytes:
    return frame if isinstance(frame, bytes) else bytes(frame.buffer)


class _Bytes:
    """A socket that chunks of ``tcp`` go over: some come late, and some end in the middle."""

    def __init__(self, inner: socket.socket, mangler: Mangler) -> None:
        self._inner, self._mangler = inner, mangler
        self.sendall = inner.sendall

    def sendmsg(self, buffers: Sequence[bytes | memoryview]) -> int:
        """Of one part."""
        mangler = self._mangler
        if (drawn := mangler.draw(CHUNK, BYTES_KINDS)) is not None:
            mangler.say(drawn)
            if drawn.kind == "delay":
                time.sleep(mangler.random.random() * LONGEST_DELAY_S)
            else:
                whole = b"".join(buffers)
                self._inner.sendall(whole[: mangler.random.randrange(len(whole))])
                self._inner.shutdown(socket.SHUT_RDWR)
                raise ConnectionResetError(errno.ECONNRESET, "cut in the middle of a chunk")
        return self._inner.sendmsg(buffers)


def _of_stream(frame: bytes) -> object:
    """The message of a stream that this is; None for none."""
    for decode in (stream_wire.decode_to_source, stream_wire.decode_to_sink):
        try:
            return decode(memoryview(frame))
        except ProtocolError:
            continue
    return None


def _shows(before: bytes, after: bytes) -> bool:
    """Can its reader notice? See above."""
    for decode in _DECODERS:
        try:
            was = decode(memoryview(before))
        except ProtocolError:
            continue
        try:
            now = decode(memoryview(after))
        except ProtocolError:
            continue
        if isinstance(was, stream_wire.ChunkHeader) and isinstance(now, stream_wire.ChunkHeader):
            if (now.sequence, now.slot) != (was.sequence, was.slot):
                return False
            continue
        if type(now) is not type(was) or _without_names(was) != _without_names(now):
            return False
    return True


def _without_names(message: object) -> object:
    """Identifiers and digests are the byte strings."""

    def bare(value: object) -> object:
        if isinstance(value, (bytes, bytearray)):
            return b""
        if isinstance(value, dict):
            return [(bare(key), bare(each)) for key, each in value.items()]
        return [bare(each) for each in value] if isinstance(value, (list, tuple)) else value

    return bare(msgspec.to_builtins(message, builtin_types=(bytes,)))
