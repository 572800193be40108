"""Messages that are lost, late, doubled, out of order, cut off or garbled on their way.

Every message of ZeroMQ leaves through ``Router.send`` or ``Dealer.send``; these are replaced in a
process of the tests. What is drawn is decided by a seed and the messages that come.

A flipped bit may make another message that is whole: a Grant of other blocks, a Verdict that says
the opposite. Nothing in the message can show that: CURVE does, and digests of the KV. So a flip
leaves a message that cannot be read, or one that differs in names alone, or a chunk's header.

The two ends of a stream count slots, on a connection that loses and doubles nothing. There a lost
message is one that comes as nonsense, and a Credit, which names no generation, comes once.
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from kvxfer.errors import ProtocolError
from kvxfer.transfer import wire
from kvxfer.transports import stream_wire
from kvxfer.transports.channel import Dealer, Router

KINDS = ("drop", "delay", "duplicate", "reorder", "truncate", "flip")
LONGEST_DELAY_S = 0.4
_DECODERS: tuple[Callable[[memoryview], Any], ...] = (
    wire.decode_to_source,
    wire.decode_to_sink,
    stream_wire.decode_to_source,
    stream_wire.decode_to_sink,
)
Frames = tuple[bytes, ...]
_UNREADABLE = b"\xc1"  # never used in msgpack


class Mangler:
    """What this process does to the messages that it sends.

    ``share``: of the messages, while :attr:`until_s` has not come.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._late: dict[int, deque[tuple[float, Callable[[], object]]]] = {}
        self.kinds: tuple[str, ...] = ()
        self.share = 0.0
        self.until_s = 0.0
        self.counts: Counter[str] = Counter()

    def begin(self, kinds: tuple[str, ...], share: float, duration_s: float) -> None:
        """From now on, for so long."""
        self.kinds, self.share = kinds, share
        self.until_s = time.monotonic() + duration_s

    def install(self) -> None:
        """Into the two ways out of this process."""
        to_router, to_dealer = Router.send, Dealer.send
        look_router, look_dealer = Router.inspect, Dealer.inspect

        def send_back(router: Router, identity: bytes, *frames: bytes | zmq.Frame) -> bool:
            self._leave(router)
            drawn = self._draw()
            if drawn is None:
                return to_router(router, identity, *frames)
            copied = tuple(_bytes_of(frame) for frame in frames)
            return self._mangle(
                drawn, router, copied, lambda new: to_router(router, identity, *new)
            )

        def send(dealer: Dealer, frame: bytes) -> bool:
            self._leave(dealer)
            drawn = self._draw()
            if drawn is None:
                return to_dealer(dealer, frame)
            copied = (_bytes_of(frame),)
            return self._mangle(drawn, dealer, copied, lambda new: to_dealer(dealer, new[0]))

        def inspect_router(router: Router) -> int:
            self._leave(router)
            return look_router(router)

        def inspect_dealer(dealer: Dealer) -> None:
            self._leave(dealer)
            look_dealer(dealer)

        for owner, name, function in (
            (Router, "send", send_back),
            (Dealer, "send", send),
            (Router, "inspect", inspect_router),
            (Dealer, "inspect", inspect_dealer),
        ):
            setattr(owner, name, function)

    def _draw(self) -> str | None:
        if not self.kinds or time.monotonic() >= self.until_s:
            return None
        return self._random.choice(self.kinds) if self._random.random() < self.share else None

    def _mangle(
        self, kind: str, end: Router | Dealer, frames: Frames, send: Callable[[Frames], bool]
    ) -> bool:
        """True: as far as the sender knows it has left."""
        self.counts[kind] += 1
        is_data, is_credit = _of_stream(frames[0])
        if kind == "drop" and not is_data:
            return True
        if kind == "drop" or (kind == "duplicate" and is_credit):
            frames = (_UNREADABLE + frames[0][1:], *frames[1:])
            return send(frames)
        if kind in ("delay", "reorder"):
            # A message that is out of order leaves with the next one, or when somebody looks
            wait_s = self._random.random() * LONGEST_DELAY_S if kind == "delay" else 0.0
            late = self._late.setdefault(id(end), deque())
            late.append((time.monotonic() + wait_s, lambda: send(frames)))
            return True
        if kind == "duplicate":
            send(frames)
        elif kind == "truncate":
            which = self._random.randrange(len(frames))
            cut = frames[which][: self._random.randrange(max(1, len(frames[which])))]
            frames = (*frames[:which], cut, *frames[which + 1 :])
        elif kind == "flip":
            frames = (self._flipped(frames[0]), *frames[1:])
        return send(frames)

    def _leave(self, end: Router | Dealer) -> None:
        """What was held back and is due."""
        late = self._late.get(id(end))
        while late and (late[0][0] <= time.monotonic()) and not end.socket.closed:
            late.popleft()[1]()
        if late is not None and end.socket.closed:
            del self._late[id(end)]

    def _flipped(self, frame: bytes) -> bytes:
        for _ in range(20):
            changed = bytearray(frame)
            bit = self._random.randrange(len(frame) * 8)
            changed[bit // 8] ^= 1 << bit % 8
            if _shows(frame, bytes(changed)):
                return bytes(changed)
        return frame[:-1]


def _bytes_of(frame: bytes | zmq.Frame) -> bytes:
    return frame if isinstance(frame, bytes) else bytes(frame.buffer)


def _of_stream(frame: bytes) -> tuple[bool, bool]:
    """Whether this is a message of a stream, and whether it is a credit."""
    for decode in (stream_wire.decode_to_source, stream_wire.decode_to_sink):
        try:
            return True, isinstance(decode(memoryview(frame)), stream_wire.Credit)
        except ProtocolError:
            continue
    return False, False


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
        if isinstance(was, stream_wire.ChunkHeader) and type(now) is type(was):
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
