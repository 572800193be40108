"""Messages on their way: what this process gives to ZeroMQ leaves changed, twice or never."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import zmq

from kvxfer.errors import ProtocolError
from kvxfer.transfer.wire import ToSink, ToSource, decode_to_sink, decode_to_source, encode

Change = Callable[[Any], Iterable[ToSource | ToSink]]
_DECODERS: dict[int, Callable[[bytes], Any]] = {
    zmq.ROUTER: decode_to_sink,
    zmq.DEALER: decode_to_source,
}


class _Part(NamedTuple):
    data: Any
    flags: int
    how: dict[str, Any]


def change_messages(patch: pytest.MonkeyPatch, change: Change) -> None:
    """``change(message)``: which control messages leave in its place. What it raises is raised
    where it is sent. Messages of streams are none of this.
    """

    def changed(socket: zmq.Socket[bytes], parts: list[_Part]) -> list[list[_Part]]:
        message = _message_of(socket, parts)
        if message is None:
            return [parts]
        *before, last = parts
        return [
            [*before, last if each is message else last._replace(data=encode(each))]
            for each in change(message)
        ]

    _intercept(patch, changed)


def watch_messages(patch: pytest.MonkeyPatch, look: Callable[[Any], object]) -> None:
    """``look`` at each control message before it leaves; it may raise."""

    def change(message: Any) -> Iterable[Any]:
        look(message)
        return (message,)

    change_messages(patch, change)


def watch_frames(patch: pytest.MonkeyPatch, look: Callable[[list[Any]], object]) -> None:
    """``look`` at the frames of each message of a ROUTER, the peer's name first, before they leave;
    it may raise.
    """

    def seen(frames: list[Any]) -> list[Any]:
        look(frames)
        return frames

    change_frames(patch, seen)


def change_frames(
    patch: pytest.MonkeyPatch,
    change: Callable[[list[Any]], list[Any]],
    kind: int = zmq.ROUTER,
) -> None:
    """``change(frames)``: as many frames as leave in the place of those of a message of such a
    socket, of a ROUTER the peer's name first.
    """

    def changed(socket: zmq.Socket[bytes], parts: list[_Part]) -> list[list[_Part]]:
        if socket.type == kind and not _is_of_guard(parts):
            frames = change([part.data for part in parts])
            parts = [part._replace(data=data) for part, data in zip(parts, frames, strict=True)]
        return [parts]

    _intercept(patch, changed)


def watch_dealers(
    patch: pytest.MonkeyPatch,
    hear: Callable[[zmq.Socket[bytes], memoryview], object],
    say: Callable[[zmq.Socket[bytes], bytes], object],
) -> None:
    """``hear`` the first frame of each message that a DEALER takes, and ``say`` what it sends,
    before it does.
    """
    recv, amid = zmq.Socket.recv, set[int]()

    def heard(socket: zmq.Socket[bytes], *args: Any, **how: Any) -> Any:
        frame = recv(socket, *args, **how)
        if socket.type == zmq.DEALER and isinstance(frame, zmq.Frame):
            if id(socket) not in amid:
                hear(socket, frame.buffer)
            (amid.add if frame.more else amid.discard)(id(socket))
        return frame

    def said(socket: zmq.Socket[bytes], parts: list[_Part]) -> list[list[_Part]]:
        if socket.type == zmq.DEALER:
            say(socket, parts[0].data)
        return [parts]

    patch.setattr(zmq.Socket, "recv", heard)
    _intercept(patch, said)


def _intercept(
    patch: pytest.MonkeyPatch,
    change: Callable[[zmq.Socket[bytes], list[_Part]], list[list[_Part]]],
) -> None:
    """``change``: which messages are sent in the place of this one. Its parts wait for the last."""
    send = zmq.Socket.send
    begun: dict[int, list[_Part]] = {}

    def send_changed(socket: zmq.Socket[bytes], data: Any, flags: int = 0, **how: Any) -> Any:
        parts = [*begun.pop(id(socket), []), _Part(data, flags, how)]
        if flags & zmq.SNDMORE:
            begun[id(socket)] = parts
            return None
        sent = None
        for message in change(socket, parts):
            for part in message:
                sent = send(socket, part.data, part.flags, **part.how)
        return sent

    patch.setattr(zmq.Socket, "send", send_changed)


def _is_of_guard(parts: list[_Part]) -> bool:
    """An answer to ZeroMQ's question who may connect: a name, nothing, the version (RFC 27)."""
    return [part.data for part in parts[1:3]] == [b"", b"1.0"]


def _message_of(socket: zmq.Socket[bytes], parts: list[_Part]) -> Any:
    """None for what is no control message. Only a ROUTER names the peer first."""
    decode = _DECODERS.get(int(socket.type))
    if decode is None or len(parts) != 1 + int(socket.type == zmq.ROUTER):
        return None
    data = parts[-1].data
    try:
        return decode(data.bytes if isinstance(data, zmq.Frame) else bytes(data))
    except ProtocolError:
        return None
