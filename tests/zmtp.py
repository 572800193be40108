"""A peer that speaks ZMTP by hand, and so says what ZeroMQ never would."""

from __future__ import annotations

import socket
import struct

GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
EMPTY_PART = b"\x01\x00"
"""A part of no bytes, after which more of its message comes."""
EMPTY_END = b"\x00\x00"
"""A last part of no bytes."""
READY = b"\x05READY"
"""The command that ends a handshake."""


def open_tcp(endpoint: str, timeout_s: float = 30.0, address: str = "") -> socket.socket:
    """A connection from this address of the host, on which nothing was said."""
    host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout_s, (address, 0))


def connect(
    endpoint: str,
    timeout_s: float = 30.0,
    name: bytes = b"",
    address: str = "",
    *,
    waits: bool = True,
) -> socket.socket:
    """A DEALER (of that name) that has shaken hands without a key. ``waits``: for the answer.
    Raises OSError where it is refused.
    """
    peer = open_tcp(endpoint, timeout_s, address)
    try:
        ready = READY + b"".join(
            bytes([len(key)]) + key + struct.pack(">I", len(value)) + value
            for key, value in ((b"Socket-Type", b"DEALER"), (b"Identity", name))
        )
        peer.sendall(GREETING)
        if waits:
            read(peer, len(GREETING))
        peer.sendall(bytes([4, len(ready)]) + ready)
        if waits:
            read_command(peer, READY)
    except BaseException:
        peer.close()
        raise
    return peer


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
