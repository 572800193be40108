"""Has the kernel drop what an address that floods sends to the listeners of a context.

ZeroMQ accepts each connection, and all that can be decided comes later: a stranger that connected
10,000 times a second took half a core, and a load on two cores twice as long. A filter on a
listening socket (``SO_ATTACH_FILTER``, socket(7); any user may have one) sees the first packet of a
connection, and what it drops takes about 1 us. The other side tries again after 1, 3, 7 s and so on
(``tcp_syn_retries``, tcp(7)). Connections that stand are not touched: one that is accepted inherits
the filter, which names other addresses than its own.
"""

from __future__ import annotations

import ctypes
import ipaddress
import logging
import socket as sockets
import struct
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

MOST_SHUT = 64
"""Addresses at a time, so that the program has 600 instructions at most (5 KB): the kernel takes
4,096, and 20 KB of all options of a socket (``optmem_max``).
"""
_ATTACH, _DETACH = 26, 27  # SO_ATTACH_FILTER and SO_DETACH_FILTER of asm-generic/socket.h
_INSTRUCTION = struct.Struct("=HBBI")  # "struct sock_filter" of linux/filter.h
_PROGRAM = struct.Struct("@HP")  # "struct sock_fprog"
_AT_NETWORK = 0xFFF00000  # SKF_NET_OFF: from here on it counts from the header of IP
_LOAD_WORD, _LOAD_BYTE, _SHIFT_RIGHT, _RETURN = 0x20, 0x30, 0x74, 0x06
_GO, _GO_IF_EQUAL = 0x05, 0x15
_SOURCE_AT = {4: (12,), 6: (8, 12, 16, 20)}
"""Where the words of the sender's address are, in either version's header."""
_ALL = 0xFFFFFFFF
_Instruction = tuple[int, int, int, int]
"""What to do, how many to skip if it is so, if not, and with what."""

_log = logging.getLogger("kvxfer.transports")


class SynFilter:
    """The listening sockets of a context, and whom they do not hear. Not for two threads at once,
    but for :meth:`watch` and :meth:`forget`.
    """

    def __init__(self) -> None:
        self._listeners: set[int] = set()
        self._program: bytes | None = None

    def watch(self, fd: int) -> None:
        """It listens from now on; of one that does not listen for TCP nothing is kept."""
        self._listeners.add(fd)
        self._apply(fd)

    def forget(self, fd: int) -> None:
        """Before it is closed: another socket gets the descriptor."""
        self._listeners.discard(fd)

    def keep_out(self, addresses: Collection[str]) -> bool:
        """These, and no others. False if no listener can do that."""
        self._program = program_of(addresses)
        return any([self._apply(fd) for fd in list(self._listeners)])

    def _apply(self, fd: int) -> bool:
        try:
            with lent(sockets.socket(fileno=fd)) as socket:
                _set_program(socket, self._program)
        except OSError as exc:  # no Linux, a sandbox, a Unix socket
            _log.debug("no filter at a listener: %s", exc)
            return False
        return self._program is not None


@contextmanager
def lent(socket: sockets.socket) -> Iterator[sockets.socket]:
    """ZeroMQ's socket, which stays open."""
    try:
        yield socket
    finally:
        socket.detach()


def _set_program(socket: sockets.socket, program: bytes | None) -> None:
    """Raises OSError if it does not listen for TCP, or the kernel does not do that."""
    is_tcp = socket.family in (sockets.AF_INET, sockets.AF_INET6)
    if not (is_tcp and socket.getsockopt(sockets.SOL_SOCKET, sockets.SO_ACCEPTCONN)):
        raise OSError("expected a TCP socket that listens, got another")
    if program is None:
        with suppress(FileNotFoundError):  # it has none
            socket.setsockopt(sockets.SOL_SOCKET, _DETACH, 0)
        return
    text = ctypes.create_string_buffer(program, len(program))
    number = len(program) // _INSTRUCTION.size
    socket.setsockopt(sockets.SOL_SOCKET, _ATTACH, _PROGRAM.pack(number, ctypes.addressof(text)))


# ------------------------------------------------------------------ the program


def program_of(addresses: Collection[str]) -> bytes | None:
    """Drops what comes from these, and takes all else. None: there are no addresses of IP."""
    words: dict[int, list[tuple[int, ...]]] = {4: [], 6: []}
    for address in addresses:
        parsed = _parsed(address)
        if parsed is not None:
            packed = parsed.packed
            words[parsed.version].append(struct.unpack(f">{len(packed) // 4}I", packed))
    if not any(words.values()):
        return None
    four, six = (_refusing(version, words[version]) for version in (4, 6))
    begin = [
        (_LOAD_BYTE, 0, 0, _AT_NETWORK),
        (_SHIFT_RIGHT, 0, 0, 4),
        (_GO_IF_EQUAL, 1, 0, 4),
        (_GO, 0, 0, len(four)),
    ]
    return b"".join(_INSTRUCTION.pack(*each) for each in (*begin, *four, *six))


def _parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """One of version 4 that a socket of version 6 has accepted is sent as version 4."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return None
    return getattr(parsed, "ipv4_mapped", None) or parsed


def _refusing(version: int, addresses: Collection[tuple[int, ...]]) -> list[_Instruction]:
    """Of one version: word by word, and on to the next address at the first that differs."""
    found: list[_Instruction] = []
    for address in addresses:
        num_left = 2 * len(address) + 1  # instructions of this address
        for at, word in zip(_SOURCE_AT[version], address, strict=True):
            num_left -= 2
            found.append((_LOAD_WORD, 0, 0, _AT_NETWORK + at))
            found.append((_GO_IF_EQUAL, 0, num_left, word))
        found.append((_RETURN, 0, 0, 0))
    return [*found, (_RETURN, 0, 0, _ALL)]
