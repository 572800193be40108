"""A peer that speaks ZMTP by hand with a CURVE key (ZeroMQ RFC 26), as ``tests.zmtp`` does without.

libzmq's own client sends whole messages only, and waits for the end of a handshake.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import zmq
from zmq.utils import z85

from tests import zmtp

_GREETING = zmtp.GREETING[:12] + b"CURVE".ljust(20, b"\0") + zmtp.GREETING[32:]
_KEY_NBYTES, _MAC_NBYTES = 32, 16
Saying = Callable[[bytes], bytes]
"""What frames become on a connection: :class:`Seal`, or ``bytes`` without a key."""
_METADATA = b"\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0"


@dataclass(frozen=True, slots=True)
class Keys:
    """Of a client, and the server's that it expects."""

    public: bytes
    secret: bytes
    server: bytes


def keys_of(public: str, secret: str, server: str) -> Keys:
    """Of keys in Z85."""
    return Keys(*(z85.decode(key) for key in (public, secret, server)))


@dataclass(frozen=True, slots=True)
class Seal:
    """Seals what a peer without a key would say, frame by frame. A last frame that is not whole
    goes as it is.
    """

    key: bytes
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(3))

    def __call__(self, piece: bytes) -> bytes:
        sealed, at = [], 0
        while at < len(piece):
            flags, is_long = piece[at], piece[at] & 2
            begin = at + (9 if is_long else 2)
            end = begin + int.from_bytes(piece[at + 1 : begin], "big")
            if end > len(piece):
                sealed.append(piece[at:])
                break
            content = bytes([flags & 1]) + piece[begin:end]
            number = next(self.numbers).to_bytes(8, "big")
            box = _sealed(content, b"CurveZMQMESSAGEC" + number, self.key)
            sealed.append(zmtp.frame(b"\x07MESSAGE" + number + box))
            at = end
        return b"".join(sealed)


def connect(
    endpoint: str,
    keys: Keys,
    timeout_s: float = 30.0,
    address: str = "",
    *,
    waits: bool = True,
    connect_s: float = zmtp.CONNECT_S,
) -> tuple[socket.socket, Seal]:
    """A DEALER that has shaken hands. ``waits``: for the answer to its key. Raises OSError where it
    is refused.
    """
    public, secret = (z85.decode(key) for key in zmq.curve_keypair())
    peer = zmtp.open_tcp(endpoint, timeout_s, address, connect_s)
    try:
        peer.sendall(_GREETING)
        number = bytes(7) + b"\1"
        box = _sealed(bytes(64), b"CurveZMQHELLO---" + number, _shared(keys.server, secret))
        _command(peer, b"\x05HELLO\1\0" + bytes(72) + public + number + box)
        zmtp.read(peer, len(zmtp.GREETING))
        welcome = zmtp.read_command(peer, b"\x07WELCOME")
        content = _opened(welcome[16:], b"WELCOME-" + welcome[:16], _shared(keys.server, secret))
        passing, cookie = content[:_KEY_NBYTES], content[_KEY_NBYTES:]
        nonce, number, key = os.urandom(16), bytes(7) + b"\2", _shared(passing, secret)
        vouch = _sealed(public + keys.server, b"VOUCH---" + nonce, _shared(passing, keys.secret))
        box = _sealed(keys.public + nonce + vouch + _METADATA, b"CurveZMQINITIATE" + number, key)
        _command(peer, b"\x08INITIATE" + cookie + number + box)
        if waits:
            zmtp.read_command(peer, b"\x05READY")
    except BaseException:
        peer.close()
        raise
    return peer, Seal(key)


def _command(peer: socket.socket, content: bytes) -> None:
    is_long = len(content) > 255
    size = len(content).to_bytes(8 if is_long else 1, "big")
    peer.sendall((b"\x06" if is_long else b"\x04") + size + content)


# ------------------------------------------------------------------ boxes


@cache
def _sodium() -> ctypes.CDLL:
    """The one that libzmq has loaded."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    found = re.search(r"/\S*libsodium\S*", maps)
    if found is None:
        raise OSError("expected libzmq to use libsodium, got none; install a wheel of pyzmq")
    sodium, text, size = ctypes.CDLL(found[0]), ctypes.c_char_p, ctypes.c_ulonglong
    for name in ("crypto_box_easy_afternm", "crypto_box_open_easy_afternm"):
        getattr(sodium, name).argtypes = (text, text, size, text, text)
    return sodium


def _shared(public: bytes, secret: bytes) -> bytes:
    key = ctypes.create_string_buffer(_KEY_NBYTES)
    if _sodium().crypto_box_beforenm(key, public, secret):
        raise ValueError(f"expected a public key, got {public.hex()}")
    return key.raw


def _sealed(content: bytes, nonce: bytes, key: bytes) -> bytes:
    box = ctypes.create_string_buffer(len(content) + _MAC_NBYTES)
    _sodium().crypto_box_easy_afternm(box, content, len(content), nonce, key)
    return box.raw


def _opened(box: bytes, nonce: bytes, key: bytes) -> bytes:
    content = ctypes.create_string_buffer(len(box) - _MAC_NBYTES)
    if _sodium().crypto_box_open_easy_afternm(content, box, len(box), nonce, key):
        raise ConnectionError("expected a box of the server, got another")
    return content.raw
