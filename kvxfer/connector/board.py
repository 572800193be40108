"""The offer board: where the sinks of the same host see for themselves which offers are open.

A source rank with a direct wire publishes each open offer in shared memory: what a Grant would say,
and a state. A sink that finds its offer there reads at once, and looks again when it has read; if
the offer is still open then, that is its verdict. Both round trips of a direct read are saved. The
messages are sent all the same, so the source knows its consumers as ever; only nobody waits for
the answers. Whatever the board does not say (not open yet, other tokens, too many ids, over), the
source says by message.

Theory of operation
-------------------
An entry is a state, the offer's nonce and the offer. The source writes OPEN after everything else
of the entry, and OVER before anything of the offer may be freed: the engine's thread before it lets
blocks go, the IO thread between the step of the session that ends the offer and the actions of that
step. So a sink that has read the blocks and then sees OPEN beside its nonce knows that nothing was
freed before it had read.

The order of loads and stores is all that this rests on. x86-64 keeps stores in order and loads in
order; other processors do not without a fence, which Python does not have, so only x86-64 has
boards. A source that is killed leaves its entries OPEN: its blocks stay as they are, too, because a
mapping keeps them and nobody writes them any more.

Slots are found by the nonce, which is random: the first of ``PROBES`` that is free. A nonce is
never used again, so an entry that changes hands cannot be mistaken for the one before.
"""

from __future__ import annotations

import logging
import platform
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress

import msgspec
from torch import Tensor

from kvxfer.errors import TransportUnavailable
from kvxfer.tensors.shared_memory import MappedPool, SharedPool, open_shared
from kvxfer.transfer.manifest import MemfdHandle
from kvxfer.transfer.wire import Reason

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
    """An open offer: the digest of its tokens (None: any), and what its Grant would say."""

    digest: bytes | None
    num_tokens: int
    block_ids: tuple[tuple[int, ...], ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Posted)


def _slots(first: int) -> Iterator[int]:
    """The first words of the slots where a nonce may be that begins with this word."""
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
        """How a sink on this host maps the board; stands in the manifest."""
        handle = self._pool.info.handle
        assert isinstance(handle, MemfdHandle)
        return handle

    def post(self, nonce: bytes, offer: Posted) -> bool:
        """The offer is open. False if there is no room for it."""
        frame = _encoder.encode(offer)
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
        """The offer is over, before anything of it is freed. Unknown ones: nothing."""
        slot = self._posted.pop(nonce, None)
        if slot is not None:
            self._words[slot] = _OVER

    def end_all(self) -> None:
        """Every offer that is shown is over."""
        for nonce in list(self._posted):
            self.end(nonce)

    def close(self) -> None:
        """Every offer is over, and nobody can map the board any more."""
        self.end_all()
        self._words.release()
        self._bytes.release()
        self._pool.close()


class Ends:
    """Which offers of a source rank their engine has ended: memory that board, verdicts and packers
    look at. ``board``: where open offers are shown; None: nowhere.

    Whoever lets blocks go ends their offer here first, on its own thread. From then on nothing of
    the offer can become valid: the board does not show it, and the source takes the end in before
    whatever else it hears of the offer (:func:`~kvxfer.transfer.source_session.events_due`). So no
    engine waits for its IO thread, and an IO thread that is stuck makes nothing valid.

    One lock keeps an offer from being shown behind its end; it is held for some microseconds.
    """

    def __init__(self, board: Board | None = None) -> None:
        self._board = board
        self._lock = threading.Lock()
        self._reasons: dict[bytes, Reason] = {}
        self._all: Reason | None = None

    # -------------------------------------------------- from any thread

    def end(self, nonce: bytes, reason: Reason) -> None:
        """The offer is over when this returns. It need not be known yet."""
        with self._lock:
            self._reasons.setdefault(nonce, reason)
            self._take_down(nonce)

    def end_all(self, reason: Reason) -> None:
        """Every offer is over, those to come too."""
        with self._lock:
            self._all = self._all or reason
            if self._board is not None:
                self._board.end_all()

    def reason(self, nonce: bytes) -> Reason | None:
        """Why the engine ended this offer; None if it has not."""
        return self._reasons.get(nonce, self._all)

    # -------------------------------------------------- on the IO thread

    def show(self, nonce: bytes, posted: Posted) -> bool | None:
        """The offer is open. False where the board has no room for it; None where there is no
        board, or the engine has ended the offer meanwhile.
        """
        with self._lock:
            if self._board is None or self.reason(nonce) is not None:
                return None
            return self._board.post(nonce, posted)

    def hide(self, nonce: bytes) -> None:
        """The source has ended the offer itself, before anything of it is freed."""
        if self._board is not None:
            with self._lock:
                self._take_down(nonce)

    def forget(self, nonce: bytes) -> None:
        """The source has taken the end in."""
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
        """None where there is no board, or none that can be seen from here."""
        if handle is None:
            return None
        try:
            return cls(handle)
        except TransportUnavailable as exc:
            _log.debug("not used: %s", exc)
            return None

    def find(self, nonce: bytes) -> Posted | None:
        """The offer, if it is open."""
        slot = self._find(nonce)
        if slot is None:
            return None
        nbytes = self._words[slot + 3]
        if nbytes > SLOT_NBYTES - _HEADER_NBYTES:
            return None
        begin = slot * 8 + _HEADER_NBYTES
        frame = bytes(self._bytes[begin : begin + nbytes])
        # It may have ended, and another begun, while it was copied
        if not self._is_at(slot, *_NONCE.unpack(nonce)):
            return None
        try:
            return _decoder.decode(frame)
        except msgspec.MsgspecError:
            return None

    def is_open(self, nonce: bytes) -> bool:
        """The offer is open: what was read of it before this call is whole and unchanged."""
        return self._find(nonce) is not None

    def close(self) -> None:
        """Unmap the board. Idempotent."""
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
