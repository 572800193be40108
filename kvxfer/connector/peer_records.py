"""What a sink rank's source engines share, and what others give them and get from them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq

from kvxfer.config import Config
from kvxfer.connector.io_thread import IoThread, Now, ZmqSocket
from kvxfer.connector.ledger import Ledger
from kvxfer.connector.records import SourceRef
from kvxfer.transfer.manifest import EngineManifest, RankId, RankManifest
from kvxfer.transfer.wire import Reason, ToSink
from kvxfer.transports.base import SinkTransport

if TYPE_CHECKING:
    from kvxfer.connector.peer import Peer


class PeerState(enum.Enum):
    """How far the acquaintance has come."""

    GREETING = "greeting"
    KNOWN = "known"
    READY = "ready"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a peer cannot be used."""

    reason: Reason
    detail: str


class Moments:
    """How long each part of a first contact took, one after the other."""

    def __init__(self, now: Now) -> None:
        self._now = now
        self._started_s = self._ended_s = now()
        self._parts_s: dict[str, float] = {}

    def end(self, part: str) -> None:
        """It ended now; of one that comes again the times are added."""
        before_s, self._ended_s = self._ended_s, self._now()
        self._parts_s[part] = self._parts_s.get(part, 0.0) + self._ended_s - before_s

    def __str__(self) -> str:
        """For the log: 27 ms (hello 3, plan 4, trials 15, attach 5)."""
        parts = ", ".join(f"{part} {took_s * 1e3:.0f}" for part, took_s in self._parts_s.items())
        return f"{(self._ended_s - self._started_s) * 1e3:.0f} ms ({parts})"


@dataclass(frozen=True, slots=True, eq=False)
class Waiter:
    """Somebody who wants a peer for one offer: called once, with the peer or with why not.

    ``needs_wire``: wants to read; else it is enough that the peer is known.
    """

    source: SourceRef
    needs_wire: bool
    ready: Callable[[Peer], object]
    failed: Callable[[Failure], object]


def _nobody(waiter: Waiter) -> None:
    waiter.failed(Failure(Reason.PEER_LOST, "the engine was started anew"))


def _nothing(peer: Peer, entry: RankManifest) -> None:
    """There is no other peer in its place."""


def _alone(peer: Peer, rank: RankId) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What every peer of a sink rank shares.

    ``manifest``: this engine's own, once known. ``again``: takes a waiter that needs another life.
    ``confirmed``: ends other peers that were known where this rank of the peer has just answered.
    ``is_shared``: whether another live peer uses the same attachment to this rank.
    ``can_leave_unhashed``: this engine can keep single blocks from prefix reuse.
    """

    io: IoThread
    context: zmq.Context[ZmqSocket]
    config: Config
    ledger: Ledger
    engine_id: str
    incarnation: bytes
    rank: RankId
    transports: Mapping[str, SinkTransport]
    can_leave_unhashed: bool
    manifest: Callable[[], EngineManifest | None]
    on_message: Callable[[Peer, RankId, ToSink], None]
    on_over: Callable[[Peer, Failure], None]
    again: Callable[[Waiter], None] = _nobody
    confirmed: Callable[[Peer, RankManifest], None] = _nothing
    is_shared: Callable[[Peer, RankId], bool] = _alone
