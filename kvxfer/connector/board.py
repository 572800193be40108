"""The offer board: shared memory in which sinks on the same host see which offers are open.

A source rank with a direct wire publishes each open offer there: the contents of its Grant, and a
state. A sink that finds its offer on the board reads at once and looks at the state again after the
read. An offer that is still open then is a valid verdict. Both round trips of a direct read are
saved. The sink still sends Pull and Release, so the source knows its consumers, but the sink does
not wait for the answers. What the board cannot show (an offer that is not open yet, has other
tokens, has too many ids or is over) the source answers by message.

Digests that sinks will ask for (:mod:`kvxfer.connector.foresight`) stand in an entry of their own,
whose nonce is made of the offer's and the question. They are of the bytes as they were offered, so
they say nothing of whether the offer is still open.

Theory of operation
-------------------
An entry is a state, the offer's nonce and the offer. The source writes OPEN after everything else
of the entry, and OVER before any block of the offer may be freed. The engine's thread writes OVER
before it frees blocks; the IO thread writes it between the step of the session that ends the offer
and the actions of that step. So a sink that reads the blocks and then sees OPEN beside its nonce
knows that no block was freed before its read was complete.

The protocol depends only on the order of loads and stores. x86-64 keeps stores in order and loads
in order. Other processors need a fence, which Python does not have, so only x86-64 has boards. A
killed source leaves its entries OPEN. Its blocks stay unchanged, too: a mapping keeps them, and
nobody writes to them any more.

The nonce, which is random, says in which slots an entry may be: it takes the first free one of
``PROBES``. A nonce is never used again, so a sink cannot mistake the next entry of a slot for the
one before.
"""

from __future__ import annotations

import hashlib
import logging
import platform
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import TypeVar

import msgspec
from torch import Tensor

from kvxfer.errors import TransportUnavailable
from kvxfer.tensors.shared_memory import MappedPool, SharedPool, open_shared
from kvxfer.transfer.manifest import MemfdHandle
from kvxfer.transfer.wire import Reason, Verify

NUM_SLOTS = 1024
SLOT_NBYTES = 16 << 10
"""About 4000 block ids; the memory of a slot is there once it has been written."""
PROBES = 8
ORDERED_MACHINES = ("x86_64", "AMD64")

_OVER, _OPEN = 0, 1
_WORDS = SLOT_NBYTES // 8
_HEADER_NBYTES = 32  # state, nonce (two words), bytes of the offer
_NONCE = struct.Struct("=QQ")  # 16 bytes, as every source draws them

_log = logging.getLogger("kvxfer.connector")


class Posted(msgspec.Struct, frozen=True, array_like=True):
    """An open offer: the digest of its tokens (None: any tokens), and the contents of its Grant."""

    digest: bytes | None
    num_tokens: int
    block_ids: tuple[tuple[int, ...], ...]


class PostedDigests(msgspec.Struct, frozen=True, array_like=True):
    """Of each region that a sink asks about, the classes one after the other."""

    digests: tuple[int, ...]


def nonce_of_digests(nonce: bytes, verify: Verify) -> bytes:
    """Where the digests stand that a sink asks of an offer: 16 bytes that nobody draws."""
    return hashlib.blake2b(_encoder.encode(verify), digest_size=_NONCE.size, key=nonce).digest()


_Entry = TypeVar("_Entry", Posted, PostedDigests)
_encoder = msgspec.msgpack.Encoder()
_offers = msgspec.msgpack.Decoder(Posted)
_digests = msgspec.msgpack.Decoder(PostedDigests)


def _slots(first: int) -> Iterator[int]:
    """Where an entry may be whose nonce begins with this word: positions of first words."""
    for i in range(PROBES):
        yield (first + i) % NUM_SLOTS * _WORDS


def _view(tensor: Tensor) -> memoryview:
    return memoryview(tensor.numpy())  # type: ignore[arg-type]  # NumPy's stubs lack the buffer


class Board:
    """The source's end, for one thread at a time (:class:`Ends` sees to it).
    Raises OSError where there is no shared memory.
    """

    def __init__(self) -> None:
        self._pool = SharedPool.create(NUM_SLOTS * SLOT_NBYTES)
        self._bytes = _view(self._pool.tensor)
        self._words = self._bytes.cast("Q")
        self._posted: dict[bytes, int] = {}

    @classmethod
    def make(cls) -> Board | None:
        """None where a board cannot be had."""
        if platform.machine() not in ORDERED_MACHINES:
            return None
        with suppress(OSError):
            return cls()
        return None

    @property
    def handle(self) -> MemfdHandle:
        handle = self._pool.info.handle
        assert isinstance(handle, MemfdHandle)
        return handle

    def post(self, nonce: bytes, entry: Posted | PostedDigests) -> bool:
        """Show an open offer, or digests. False if there is no room."""
        frame = _encoder.encode(entry)
        if len(frame) > SLOT_NBYTES - _HEADER_NBYTES:
            return False
        first, second = _NONCE.unpack(nonce)
        words = self._words
        slot = next((slot for slot in _slots(first) if words[slot] == _OVER), None)
        if slot is None:
            return False
        words[slot + 1], words[slot + 2], words[slot + 3] = first, second, len(frame)
        begin = slot * 8 + _HEADER_NBYTES
        self._bytes[begin : begin + len(frame)] = frame
        words[slot] = _OPEN
        self._posted[nonce] = slot
        return True

    def end(self, nonce: bytes) -> None:
        """End an offer, before any block of it is freed. An unknown nonce is ignored."""
        slot = self._posted.pop(nonce, None)
        if slot is not None:
            self._words[slot] = _OVER

    def end_all(self) -> None:
        for nonce in list(self._posted):
            self.end(nonce)

    def close(self) -> None:
        self.end_all()
        self._words.release()
        self._bytes.release()
        self._pool.close()


class Ends:
    """Which offers of a source rank their engine has ended: memory that board, verdicts and packers
    look at. ``board``: where open offers are shown; None: nowhere.

    A thread that frees blocks first ends their offer here. From then on no read of the offer can
    become valid: the board does not show it, and the source handles the end before any other event
    of the offer (:func:`~kvxfer.transfer.source_session.events_due`). So the engine never waits for
    its IO thread, and a stuck IO thread makes no read valid.

    One lock, held for some microseconds, keeps the IO thread from showing an offer that the engine
    has ended.
    """

    def __init__(self, board: Board | None = None) -> None:
        self._board = board
        self._lock = threading.Lock()
        self._reasons: dict[bytes, Reason] = {}
        self._all: Reason | None = None

    # -------------------------------------------------- from any thread

    @property
    def has_board(self) -> bool:
        return self._board is not None

    def end(self, nonce: bytes, reason: Reason) -> None:
        """End an offer: it is over when this returns. The IO thread need not know the offer yet."""
        with self._lock:
            self._reasons.setdefault(nonce, reason)
            self._take_down(nonce)

    def end_all(self, reason: Reason) -> None:
        with self._lock:
            self._all = self._all or reason
            if self._board is not None:
                self._board.end_all()

    def reason(self, nonce: bytes) -> Reason | None:
        return self._reasons.get(nonce, self._all)

    # -------------------------------------------------- on the IO thread

    def show(self, nonce: bytes, posted: Posted) -> bool | None:
        """False: the board is full. None: there is none, or the engine has ended the offer."""
        with self._lock:
            if self._board is None or self.reason(nonce) is not None:
                return None
            return self._board.post(nonce, posted)

    def show_digests(self, nonce: bytes, verify: Verify, digests: tuple[int, ...]) -> None:
        """Of an offer, if there is room; until :meth:`hide_digests`."""
        if self._board is not None:
            with self._lock:
                self._board.post(nonce_of_digests(nonce, verify), PostedDigests(digests))

    def hide_digests(self, nonce: bytes, verify: Verify) -> None:
        self.hide(nonce_of_digests(nonce, verify))

    def hide(self, nonce: bytes) -> None:
        """The source itself has ended an offer, before any block of it is freed."""
        if self._board is not None:
            with self._lock:
                self._take_down(nonce)

    def forget(self, nonce: bytes) -> None:
        self._reasons.pop(nonce, None)

    def _take_down(self, nonce: bytes) -> None:
        if self._board is not None:
            self._board.end(nonce)


class BoardView:
    """A sink's view of the board of one source rank. Raises TransportUnavailable."""

    def __init__(self, handle: MemfdHandle) -> None:
        if platform.machine() not in ORDERED_MACHINES:
            raise TransportUnavailable(f"board: expected x86-64, got {platform.machine()}")
        if handle.nbytes != NUM_SLOTS * SLOT_NBYTES:
            raise TransportUnavailable(
                f"board: expected {NUM_SLOTS * SLOT_NBYTES} bytes, got {handle.nbytes}"
            )
        self._pool: MappedPool = open_shared(handle)
        self._bytes = _view(self._pool.tensor).toreadonly()
        self._words = self._bytes.cast("Q")

    @classmethod
    def open(cls, handle: MemfdHandle | None) -> BoardView | None:
        """None for a source rank without a board, or one that cannot be mapped here."""
        if handle is None:
            return None
        try:
            return cls(handle)
        except TransportUnavailable as exc:
            _log.debug("not used: %s", exc)
            return None

    def find(self, nonce: bytes) -> Posted | None:
        return self._read(nonce, _offers)

    def digests(self, nonce: bytes) -> tuple[int, ...] | None:
        """By the nonce of :func:`nonce_of_digests`."""
        found = self._read(nonce, _digests)
        return None if found is None else found.digests

    def _read(self, nonce: bytes, decoder: msgspec.msgpack.Decoder[_Entry]) -> _Entry | None:
        slot = self._find(nonce)
        if slot is None:
            return None
        nbytes = self._words[slot + 3]
        if nbytes > SLOT_NBYTES - _HEADER_NBYTES:
            return None
        begin = slot * 8 + _HEADER_NBYTES
        frame = bytes(self._bytes[begin : begin + nbytes])
        # The offer may have ended, and another taken its slot, while its bytes were copied
        if not self._is_at(slot, *_NONCE.unpack(nonce)):
            return None
        try:
            return decoder.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None

    def is_open(self, nonce: bytes) -> bool:
        """If so, all bytes that were read of the offer before this call are whole."""
        return self._find(nonce) is not None

    def close(self) -> None:
        self._words.release()
        self._bytes.release()
        self._pool.close()

    def _find(self, nonce: bytes) -> int | None:
        if len(nonce) != _NONCE.size:  # it came from outside
            return None
        first, second = _NONCE.unpack(nonce)
        for slot in _slots(first):
            if self._is_at(slot, first, second):
                return slot
        return None

    def _is_at(self, slot: int, first: int, second: int) -> bool:
        """The state between two looks at the nonce is this offer's: no nonce comes back."""
        words = self._words
        return (
            words[slot + 1] == first
            and words[slot + 2] == second
            and words[slot] == _OPEN
            and words[slot + 1] == first
            and words[slot + 2] == second
        )
