"""Control messages on their way: what this process sends leaves changed, twice or never."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import zmq

from kvxfer.errors import ProtocolError
from kvxfer.transfer.wire import ToSink, ToSource, decode_to_sink, decode_to_source, encode

Change = Callable[[Any], Iterable[ToSource | ToSink]]
_DECODERS: dict[int, Callable[[bytes], Any]] = {
    zmq.ROUTER: decode_to_sink,
    zmq.DEALER: decode_to_source,
}


def change_messages(patch: pytest.MonkeyPatch, change: Change) -> None:
    """``change(message)``: what leaves in its place. What it raises is raised where it is sent.
    Messages of streams are none of this.
    """
    send = zmq.Socket.send
    begun: dict[int, list[tuple[Any, int, dict[str, Any]]]] = {}

    def changed(socket: zmq.Socket[bytes], data: Any, flags: int = 0, **how: Any) -> Any:
        parts = begun.pop(id(socket), [])
        if flags & zmq.SNDMORE:
            begun[id(socket)] = [*parts, (data, flags, how)]
            return None
        last = None
        message = _message_of(socket, data, len(parts))
        for each in [message] if message is None else change(message):
            for part, more, as_given in parts:
                send(socket, part, more, **as_given)
            last = send(socket, data if each is message else encode(each), flags, **how)
        return last

    patch.setattr(zmq.Socket, "send", changed)


def watch_messages(patch: pytest.MonkeyPatch, look: Callable[[Any], object]) -> None:
    """``look`` at each one before it leaves; it may raise."""

    def change(message: Any) -> Iterable[Any]:
        look(message)
        return (message,)

    change_messages(patch, change)


def _message_of(socket: zmq.Socket[bytes], data: Any, num_before: int) -> Any:
    """None for what is no control message. Only a ROUTER names the peer first."""
    decode = _DECODERS.get(socket.type)
    if decode is None or num_before != int(socket.type == zmq.ROUTER):
        return None
    try:
        return decode(data.bytes if isinstance(data, zmq.Frame) else bytes(data))
    except ProtocolError:
        return None
