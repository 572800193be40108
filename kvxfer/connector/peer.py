"""One source engine as loads on this sink rank use it: its ranks, the wires to them, and the
control connections. Runs on the IO thread.

:mod:`kvxfer.connector.peer_session` decides how a peer is met and how it ends;
:mod:`kvxfer.connector.peers`, which owns all peers, performs that.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import zmq

from kvxfer.config import Config
from kvxfer.connector.access import server_key_of
from kvxfer.connector.board import BoardView
from kvxfer.connector.control import ControlClient, LastWords
from kvxfer.connector.io_thread import IoThread, Now, Timer, ZmqSocket
from kvxfer.connector.ledger import Ledger
from kvxfer.connector.peer_session import (
    Answered,
    Ended,
    Failure,
    LifeHeard,
    PeerEvent,
    PeerSnapshot,
    PeerState,
)
from kvxfer.connector.records import Identity, SourceRef
from kvxfer.errors import TransportUnavailable
from kvxfer.transfer.costs import REFERENCE_TOKENS, Workload
from kvxfer.transfer.manifest import EngineManifest, RankId, RankManifest
from kvxfer.transfer.plan import Plan, Route
from kvxfer.transfer.pull import block_chunk_nbytes, pull_class, route_nbytes
from kvxfer.transfer.wire import (
    BIND_TOKENS,
    PARTS,
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    VERIFY,
    Cancel,
    Hello,
    Malformed,
    Manifest,
    NotReady,
    Ping,
    Pong,
    Reason,
    ToSink,
    ToSource,
)
from kvxfer.transports.base import SinkTransport
from kvxfer.transports.choice import Choice, choose

HELLO_AGAIN_S = 0.05
"""How soon an engine that does not know all its ranks yet is asked again."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What every peer of a sink rank shares.

    ``can_leave_unhashed``: this engine can keep single blocks from prefix reuse. ``on_message``:
    gets each message of a rank about loads. ``on_over``: called for each peer that is over.
    """

    io: IoThread
    context: zmq.Context[ZmqSocket]
    config: Config
    ledger: Ledger
    last_words: LastWords
    identity: Identity
    transports: Mapping[str, SinkTransport]
    can_leave_unhashed: bool
    on_message: Callable[[Peer, RankId, ToSink], None]
    on_over: Callable[[Peer, Failure], None]


@dataclass(frozen=True, slots=True, eq=False)
class Waiter:
    """Someone who waits for the peer of one offer. ``tell(*about, found)`` is called once, with the
    peer, or with the Failure that keeps it from being used.

    ``needs_wire``: waits until the peer can be read (READY); else until it is known (TRYING).
    """

    source: SourceRef
    needs_wire: bool
    tell: Callable[..., object]
    about: tuple[object, ...]

    def answer(self, found: Peer | Failure) -> None:
        self.tell(*self.about, found)


class Moments:
    """The durations of the consecutive parts of a first contact."""

    def __init__(self, now: Now) -> None:
        self._now = now
        self._started_s = self._ended_s = now()
        self._parts_s: dict[str, float] = {}

    def end(self, part: str) -> None:
        """The part ended now; a part that comes again adds to its time."""
        before_s, self._ended_s = self._ended_s, self._now()
        self._parts_s[part] = self._parts_s.get(part, 0.0) + self._ended_s - before_s

    def __str__(self) -> str:
        """For the log: 27 ms (hello 3, plan 4, trials 15, attach 5)."""
        parts = ", ".join(f"{part} {took_s * 1e3:.0f}" for part, took_s in self._parts_s.items())
        return f"{(self._ended_s - self._started_s) * 1e3:.0f} ms ({parts})"


class Peer:
    """One source engine. ``manifest``, its ``entries`` by rank, ``plan`` and ``choices`` are there
    from TRYING and READY on. ``routes``: of the plan, those that end here, null routes too.
    ``brought_s``: when a wire last brought something from a rank, for whatever load.

    ``step``: takes each event of this peer.
    """

    def __init__(
        self, around: Surroundings, source: SourceRef, step: Callable[[Peer, PeerEvent], None]
    ) -> None:
        self.engine_id = source.engine_id
        self.endpoint = source.endpoint
        self.curve_public_key = source.curve_public_key
        self.snapshot = PeerSnapshot(source.engine_id, source.endpoint)
        self.asked_as = source.offer.incarnation
        self.entries: dict[RankId, RankManifest] = {}
        self.ranks_at: dict[str, RankId] = {}
        self.plan = Plan(())
        self.routes: tuple[Route, ...] = ()
        self.tried: dict[RankId, Choice] = {}
        """What trials have opened and no wire was attached to yet."""
        self.choices: dict[RankId, Choice] = {}
        self.boards: dict[RankId, BoardView] = {}
        self.brought_s: dict[RankId, float] = {}
        self.waiters: list[Waiter] = []
        self.deadline: Timer | None = None
        self.until_s = 0.0
        self.moments = Moments(around.io.now)
        self._around = around
        self._step = step
        self._clients: dict[str, ControlClient] = {}
        self._is_closed = False
        self._num_loads = 0
        self._watch: Timer | None = None

    # -------------------------------------------------- what is known of it

    @property
    def state(self) -> PeerState:
        return self.snapshot.state

    @property
    def manifest(self) -> EngineManifest | None:
        return self.snapshot.manifest

    @property
    def can_verify(self) -> bool:
        """It makes digests of the KV that it gives; engines of versions before that do not."""
        return self._can(VERIFY)

    @property
    def can_cut(self) -> bool:
        """It cuts streams where this side says; engines of versions before that do not."""
        return self._can(PARTS)

    def _can(self, capability: str) -> bool:
        return self.manifest is not None and capability in self.manifest.capabilities

    @property
    def protocol(self) -> int:
        """The last version that it speaks; 0 before it is known."""
        return self.manifest.protocol[1] if self.manifest is not None else 0

    @property
    def slowest(self) -> Choice | None:
        """Of the chosen wires; None: there is nothing to read."""
        choices = list(self.choices.values())
        return max(choices, key=attrgetter("duration_s"), default=None)

    def is_alive_as(self, source: SourceRef) -> bool:
        """Whether the offer is of the life (incarnation) of the engine that this peer knows."""
        manifest = self.snapshot.manifest
        return manifest is not None and manifest.incarnation == source.offer.incarnation

    def know(self, entries: Sequence[RankManifest]) -> None:
        """Its ranks, as its front door has named them."""
        self.entries = {entry.rank: entry for entry in entries}
        self.ranks_at = {entry.control_endpoint: entry.rank for entry in entries}

    def transport(self, rank: RankId) -> SinkTransport:
        return self._around.transports[self.choices[rank].transport]

    # -------------------------------------------------- what is said to it

    def send(self, rank: RankId, message: ToSource) -> None:
        self._send(self.entries[rank].control_endpoint, message)

    def send_later(self, rank: RankId, message: ToSource) -> None:
        """One that nobody waits for: behind the reports of loads that end in this round."""
        self._around.io.defer(self.send, rank, message)

    def cancel(self, source: SourceRef, reason: Reason) -> None:
        """Give an offer up at every rank."""
        if self.is_alive_as(source):
            life = self._around.identity.incarnation
            message = Cancel(source.offer, life, reason, source.digest)
            for rank in self.entries:
                self.send(rank, message)

    def say_hello(self, endpoint: str) -> None:
        around = self._around
        names = (BIND_TOKENS,) if around.config.bind_tokens else ()
        versions = (PROTOCOL_MIN, PROTOCOL_MAX)
        self._send(endpoint, Hello(versions, names, *around.identity[:2]))

    def _send(self, endpoint: str, message: ToSource) -> None:
        if self._around.io.is_lent:  # a borrower of the IO thread's turn touches no socket
            self._around.io.defer(self._send, endpoint, message)
            self._around.io.wake()
        elif not self._is_closed:
            client = self._clients.get(endpoint) or self._connect(endpoint)
            client.send(message)

    def _connect(self, endpoint: str) -> ControlClient:
        around = self._around
        client = self._clients[endpoint] = ControlClient(
            around.io,
            around.context,
            around.config,
            around.ledger,
            around.last_words,
            endpoint,
            server_key_of(around.config, self.engine_id, self._key_at(endpoint)),
            self._heard,
            self._gone,
        )
        return client

    def _key_at(self, endpoint: str) -> str | None:
        """The key that its params state of the front door, and its manifest of the other ranks."""
        rank = self.ranks_at.get(endpoint)
        if rank is None or endpoint == self.endpoint:
            return self.curve_public_key
        return self.entries[rank].curve_public_key

    def close(self) -> None:
        self._is_closed = True
        self._num_loads = 0
        if self._watch is not None:
            self._watch.cancel()
        for client in self._clients.values():
            client.close()

    # -------------------------------------------------- what comes from it

    def end(self, failure: Failure) -> None:
        """End the peer: it cannot be used any more. Idempotent."""
        self._step(self, Ended(failure))

    def lost(self, detail: str) -> None:
        self.end(self.failure(detail))

    def failure(self, detail: str) -> Failure:
        """Why the peer is lost: NOT_ALLOWED if a listener refuses this engine, else PEER_LOST."""
        is_refused = any(client.dealer.is_refused for client in self._clients.values())
        return Failure(Reason.NOT_ALLOWED if is_refused else Reason.PEER_LOST, detail)

    @property
    def problem(self) -> str:
        """Why its front door is not connected, as far as this side knows; "" if unknown."""
        client = self._clients.get(self.endpoint)
        return client.dealer.problem if client is not None else ""

    def _gone(self, endpoint: str, detail: str) -> None:
        self.lost(f"{endpoint}: {detail}")

    def _heard(self, endpoint: str, message: ToSink) -> None:
        match message:
            case Manifest(manifest):
                self._step(self, Answered(endpoint, manifest))
            case NotReady():
                self._around.io.after(HELLO_AGAIN_S, self.say_hello, endpoint)
            case Malformed(detail):
                self._around.ledger.count("control.malformed_answers")
                self._clients[endpoint].dealer.problem = detail
            case Pong(incarnation):
                self._step(self, LifeHeard(incarnation))
            case _:
                rank = self.ranks_at.get(endpoint)
                if rank is None:
                    self._around.ledger.count("control.unexpected")
                else:
                    self._around.on_message(self, rank, message)

    # -------------------------------------------------- its silence

    def begin_load(self) -> None:
        """A load waits for answers of this peer: from now on its silence is noticed."""
        if self._is_closed:
            return
        self._num_loads += 1
        if self._watch is None:
            for client in self._clients.values():
                client.unanswered_s = None  # an earlier load's Ping
            self._around.io.guard(self._listen)

    def end_load(self) -> None:
        if not self._is_closed:
            self._num_loads -= 1

    def _listen(self) -> None:
        """Ping each rank that has been silent; a rank that does not answer the Ping is lost."""
        io, silent_s = self._around.io, self._around.config.peer_silent_s
        self._watch = None
        if not self._num_loads:
            return
        self._watch = io.after(silent_s / 8, self._listen)
        now_s = io.now()
        for client in self._clients.values():
            if client.unanswered_s is None:
                if now_s - client.heard_s >= silent_s / 4:
                    client.unanswered_s = now_s
                    io.defer(client.send, Ping())
            elif now_s - client.unanswered_s >= silent_s / 2:
                silence_s = now_s - client.heard_s
                self.lost(f"{client.endpoint} was silent for {silence_s:.1f} s")
                return


# ------------------------------------------------------------------ the trial of its wires


Choices = dict[RankId, Choice]

_log = logging.getLogger("kvxfer.connector")


def workload_of(route: Route) -> Workload:
    """How many bytes a long prompt has on a route, and the least size of its chunks."""
    pulls = [pull_class(each, 0, REFERENCE_TOKENS) for each in route.classes]
    return Workload(route_nbytes(pulls), block_chunk_nbytes(pulls))


def start_trial(
    around: Surroundings, peer: Peer, done: Callable[[Peer, Choices | Failure], object]
) -> None:
    """Try the wires to each source rank that is read, one after the other: trials side by side
    would share the link and measure too low a rate. On a thread of its own: a trial may wait for
    the network, and loads from other peers go on meanwhile.

    ``done``: called on the IO thread, unless this rank shuts down. It owns the choices from then
    on, and attaches or discards each.
    """
    routes = [(route, peer.entries[route.source_rank]) for route in peer.routes]
    read = [(route, entry) for route, entry in routes if not route.is_null]
    until_s = peer.until_s

    def run() -> None:
        choices: Choices = {}
        result = _try_all(around, read, until_s, choices)
        is_told = result is not None and around.io.post(done, peer, result)
        if not is_told or result is not choices:
            _close(choices)

    threading.Thread(target=run, name="kvxfer-probe", daemon=True).start()


def discard(choices: Choices) -> None:
    """A thread closes what they hold open: CUDA may wait for the GPU's work first."""
    if any(choice.trial.held for choice in choices.values()):
        threading.Thread(target=_close, args=(choices,), name="kvxfer-probe", daemon=True).start()


def _close(choices: Choices) -> None:
    for choice in choices.values():
        choice.trial.close()


def _try_all(
    around: Surroundings,
    routes: Sequence[tuple[Route, RankManifest]],
    until_s: float,
    choices: Choices,
) -> Choices | Failure | None:
    """The choices, filled in one after the other; why there are none; None at shutdown.
    ``until_s``: when all trials together must have ended (the IO thread's clock).
    """
    try:
        for route, source in routes:
            left_s = until_s - around.io.now()
            if left_s <= 0:
                return Failure(
                    Reason.TRANSPORT,
                    f"the wires of {len(routes)} ranks: expected their trials to end in time, "
                    f"{len(choices)} have",
                )
            choices[source.rank] = choose(
                around.transports,
                source,
                workload_of(route),
                classes=route.classes,
                min_gbps=around.config.min_gbps,
                timeout_s=left_s,
            )
    except TransportUnavailable as e:
        return Failure(Reason.TRANSPORT, str(e))
    except zmq.ContextTerminated:
        return None
    except Exception as e:  # noqa: BLE001  # whoever waits must hear of it
        if around.context.closed:  # a socket could not be made any more
            return None
        _log.exception("the trial of a wire failed")
        return Failure(Reason.TRANSPORT, f"{type(e).__name__}: {e}")
    return choices
