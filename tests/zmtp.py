"""A peer that speaks ZMTP by hand, and so says what ZeroMQ never would."""

from __future__ import annotations

import socket
import struct
from contextlib import closing, suppress

GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
EMPTY_PART = b"\x01\x00"
"""A part of no bytes, after which more of its message comes."""
EMPTY_END = b"\x00\x00"
"""A last part of no bytes."""
READY = b"\x05READY"
"""The command that ends a handshake."""


CONNECT_S = 2.0
"""For a connection to this host. The kernel tries again after 1 s."""


class KeptOut(ConnectionError):
    """Nobody answers at this port."""


def open_tcp(
    endpoint: str, timeout_s: float = 30.0, address: str = "", connect_s: float = CONNECT_S
) -> socket.socket:
    """A connection from this address of the host, on which nothing was said. Raises KeptOut if it
    does not stand after ``connect_s``.
    """
    host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
    try:
        peer = socket.create_connection((host, int(port)), connect_s, (address, 0))
    except TimeoutError as exc:
        raise KeptOut(f"{endpoint}: no answer within {connect_s:g} s") from exc
    peer.settimeout(timeout_s)
    return peer


def flood(endpoint: str, address: str, says: bytes = b"") -> None:
    """Connect, say so much and go, over and over, until this address is kept out."""
    for _ in range(50_000):
        try:
            peer = open_tcp(endpoint, address=address)
        except KeptOut:
            return
        with closing(peer), suppress(OSError):
            if says:
                peer.sendall(says)
                has_ended(peer)
    raise AssertionError(f"{address}: expected to be kept out, it never was")


def connect(
    endpoint: str,
    timeout_s: float = 30.0,
    name: bytes = b"",
    address: str = "",
    *,
    waits: bool = True,
    connect_s: float = CONNECT_S,
) -> socket.socket:
    """A DEALER (of that name) that has shaken hands without a key. ``waits``: for the answer.
    Raises OSError where it is refused.
    """
    peer = open_tcp(endpoint, timeout_s, address, connect_s)
    try:
        peer.sendall(GREETING)
        if waits:
            read(peer, len(GREETING))
        peer.sendall(_ready(b"DEALER", name))
        if waits:
            read_command(peer, READY)
    except BaseException:
        peer.close()
        raise
    return peer


def answer(peer: socket.socket) -> None:
    """As the ROUTER that has accepted this connection: shake hands without a key."""
    peer.sendall(GREETING)
    read(peer, len(GREETING))
    peer.sendall(_ready(b"ROUTER"))
    read_command(peer, READY)


def _ready(kind: bytes, name: bytes = b"") -> bytes:
    ready = READY + b"".join(
        bytes([len(key)]) + key + struct.pack(">I", len(value)) + value
        for key, value in ((b"Socket-Type", kind), (b"Identity", name))
    )
    return bytes([4, len(ready)]) + ready


def read_command(peer: socket.socket, name: bytes) -> bytes:
    """What it says after its name. Raises ConnectionError where another one comes."""
    kind, size = read(peer, 2)
    command = read(peer, size)
    if kind != 4 or not command.startswith(name):
        raise ConnectionError(f"refused: {command!r}")
    return command[len(name) :]


def frame(content: bytes) -> bytes:
    """A message of one part."""
    if len(content) > 255:
        return b"\x02" + len(content).to_bytes(8, "big") + content
    return bytes([0, len(content)]) + content


def has_ended(peer: socket.socket) -> bool:
    """Read until the other side closes; False if it has not after the time-out."""
    try:
        while peer.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def read(peer: socket.socket, nbytes: int) -> bytes:
    content = b""
    while len(content) < nbytes:
        some = peer.recv(nbytes - len(content))
        if not some:
            raise ConnectionError(f"expected {nbytes} bytes, got the end after {len(content)}")
        content += some
    return content
