"""All source engines that a sink rank knows, by engine id and front door. Runs on the IO thread.

An event of a peer comes from its connections, its trials, a clock, or a load that wants it. The
table (:mod:`kvxfer.connector.peer_session`) answers with actions; :meth:`Peers._step` performs
them, and the outcome of an action is the next event.

A failed contact is remembered for a second; further contacts fail at once meanwhile, unless an
offer of another life comes, which proves that the engine lives. A lost peer is forgotten, so that a
restarted engine is met anew.

An engine states its own endpoints, so two engines may state the same one. Wires know a source rank
by its control endpoint: with another engine at that endpoint, the wrong memory would be read. So a
peer is READY only when each rank that is read has confirmed its entry of the manifest from that
endpoint. An unconfirmed entry keeps no other peer out, and of two statements the later one holds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

import zmq

from kvxfer.connector.access import (
    check_host,
    check_introduction,
    check_owners,
    check_partner,
    check_verifiable,
)
from kvxfer.connector.board import BoardView
from kvxfer.connector.peer import Choices, Peer, Surroundings, Waiter, discard, start_trial
from kvxfer.connector.peer_session import (
    Attach,
    Attached,
    Awaited,
    DeadlinePassed,
    End,
    Ended,
    Examine,
    Examined,
    Failure,
    Match,
    Matched,
    PeerAction,
    PeerEvent,
    PeerState,
    Replace,
    SayHello,
    Serve,
    TryWires,
    Wanted,
    WiresTried,
    step,
)
from kvxfer.connector.records import SourceRef
from kvxfer.errors import IncompatiblePeer, UnknownEngine
from kvxfer.transfer.manifest import EngineManifest, RankId, RankManifest
from kvxfer.transfer.plan import make_plan
from kvxfer.transfer.wire import Reason
from kvxfer.transports.base import DirectSink, ReceivingSink

BACK_OFF_S = 1.0
"""How long a failed contact is not tried again."""
MAX_FAILURES = 1024
MAX_GREETED = 64
"""Engines that are being met at one time; each costs sockets and a thread before it has proved
anything.
"""
TRIALS_S = 2.0
"""What a first contact may take beyond connect_timeout_s, for the trials of all wires together."""
TOLD_S = 0.5
"""A trial that has run out of time has this long to say what it waited for."""

_MEETING = (PeerState.MEETING, PeerState.TRYING, PeerState.CHECKING)
_log = logging.getLogger("kvxfer.connector")

Key = tuple[str, str, str | None]
"""Engine id, endpoint, CURVE key: an engine that has started anew with another key is another peer,
so that its loads need not wait for the end of the one before.
"""


def _key(of: SourceRef | Peer) -> Key:
    return of.engine_id, of.endpoint, of.curve_public_key


@dataclass(frozen=True, slots=True)
class _Failed:
    """A failed contact: why, the life whose offers asked for it, and until when further contacts
    fail at once.
    """

    failure: Failure
    incarnation: bytes
    until_s: float


class Peers:
    """Finds or makes the peer of an offer."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._io = around.io
        self._ledger = around.ledger
        self._own: EngineManifest | None = None
        self._peers: dict[Key, Peer] = {}
        self._failed: dict[Key, _Failed] = {}
        self._closed: Failure | None = None
        self.num_changes = 0
        """Of the set of peers that can be read."""

    def set_own(self, manifest: EngineManifest) -> None:
        """Set the manifest of this engine. If it changed, all peers are closed and met anew."""
        if self._own is not None and self._own != manifest:
            self._close(Failure(Reason.PEER_LOST, "this engine's manifest changed"))
        self._own = manifest

    def want(
        self, source: SourceRef, tell: Callable[..., object], *about: object, needs_wire: bool
    ) -> Waiter:
        """Get the peer that made this offer; ``tell(*about, found)`` is called once, perhaps before
        this returns. An exception of one waiter does not keep the others from being called.
        """
        waiter = Waiter(source, needs_wire, tell, about)
        self._wait(waiter)
        return waiter

    def known(self, source: SourceRef) -> Peer | None:
        peer = self._peers.get((source.engine_id, source.endpoint, source.curve_public_key))
        return peer if peer is not None and peer.is_alive_as(source) else None

    def ready(self, source: SourceRef) -> Peer | None:
        """The peer that made this offer, if it can be read at once."""
        peer = self.known(source)
        return peer if peer is not None and peer.state is PeerState.READY else None

    def all_ready(self) -> list[Peer]:
        """The peers that can be read now. May be called from any thread."""
        return [peer for peer in list(self._peers.values()) if peer.state is PeerState.READY]

    def forget(self, waiter: Waiter) -> None:
        peer = self._peers.get(_key(waiter.source))
        if peer is not None and waiter in peer.waiters:
            peer.waiters.remove(waiter)

    def lost(self, control_endpoint: str, detail: str) -> None:
        for peer in list(self._peers.values()):
            if control_endpoint in peer.ranks_at:
                peer.end(Failure(Reason.PEER_LOST, f"{control_endpoint}: {detail}"))

    def shutdown(self, failure: Failure) -> None:
        self._closed = failure
        self._close(failure)

    def _close(self, failure: Failure) -> None:
        for peer in list(self._peers.values()):
            peer.end(failure)

    def _wait(self, waiter: Waiter) -> None:
        source = waiter.source
        key = _key(source)
        failure = self._closed or self._failure_of(key, source)
        if failure is not None:
            waiter.answer(failure)
            return
        peer = self._peers.get(key)
        if peer is not None:
            self._wait_for(peer, waiter)
            return
        if sum(other.state in _MEETING for other in self._peers.values()) >= MAX_GREETED:
            self._ledger.count("peers.crowded")
            detail = f"expected at most {MAX_GREETED} engines that are being met, got another"
            waiter.answer(Failure(Reason.PEER_LOST, detail))
            return
        peer = self._peers[key] = Peer(self._around, source, self._step)
        peer.waiters.append(waiter)
        self._step(peer, Wanted())

    def _wait_for(self, peer: Peer, waiter: Waiter) -> None:
        """The others are not looked at: nothing has changed for them; there may be thousands."""
        if _serves(peer, waiter):
            self._io.guard(waiter.answer, peer)
            return
        peer.waiters.append(waiter)
        if peer.state is PeerState.READY:
            self._step(peer, Wanted())  # its offer names another life

    def _failure_of(self, key: Key, source: SourceRef) -> Failure | None:
        """Why the last contact with the offer's maker failed, less than a second ago."""
        known = self._failed.get(key)
        if known is not None and known.until_s <= self._io.now():
            del self._failed[key]
        elif known is not None and known.incarnation == source.offer.incarnation:
            return known.failure
        return None

    # -------------------------------------------------- from event to action

    def _step(self, peer: Peer, event: PeerEvent) -> None:
        before = peer.snapshot
        peer.snapshot, actions = step(before, event)
        if PeerState.READY in (before.state, peer.state) and before.state is not peer.state:
            self.num_changes += 1  # last: other threads look at the peers after this
        if peer.snapshot.awaited is not before.awaited:
            self._set_deadline(peer)
        self._perform(peer, actions)

    def _perform(self, peer: Peer, actions: list[PeerAction]) -> None:
        for action in actions:
            if peer.state is PeerState.OVER and not isinstance(action, End):
                return  # an earlier action has ended it
            try:
                after = self._do(peer, action)
            except Exception as e:  # noqa: BLE001  # whoever waits must hear of it
                after = Ended(_failure_from(peer, e))
            if after is not None:
                self._step(peer, after)

    def _do(self, peer: Peer, action: PeerAction) -> PeerEvent | None:
        """Perform one action; returns the event that it causes at once, if any."""
        config = self._around.config
        match action:
            case SayHello(endpoint):
                if peer.state is PeerState.MEETING:
                    check_host(config, endpoint)
                    check_owners(config, [endpoint], are_up=False)
                peer.say_hello(endpoint)
            case Examine(manifest):
                peer.moments.end("hello")
                check_introduction(config, peer.engine_id, peer.endpoint, manifest)
                peer.know(manifest.ranks)
                return Examined(manifest)
            case Serve(is_sure):
                return self._serve(peer, is_sure=is_sure)
            case Match():
                return self._match(peer)
            case TryWires():
                self._try_wires(peer)
            case Replace(entry):
                self._replace_others(peer, entry)
            case Attach():
                return self._attach(peer)
            case End(failure, is_anew):
                self._end(peer, failure, is_anew=is_anew)
            case _:
                assert_never(action)
        return None

    def _set_deadline(self, peer: Peer) -> None:
        if peer.deadline is not None:
            peer.deadline.cancel()
            peer.deadline = None
        now_s = self._io.now()
        match peer.snapshot.awaited:
            case Awaited.ANSWER:
                late_s = peer.until_s = now_s + self._around.config.connect_timeout_s
            case Awaited.REST:
                peer.until_s += TRIALS_S
                late_s = peer.until_s + TOLD_S
            case Awaited.NOTHING:
                return
        peer.deadline = self._io.after(late_s - now_s, self._late, peer)

    def _late(self, peer: Peer) -> None:
        timeout_s = self._around.config.connect_timeout_s
        detail, problem = f"{peer.endpoint} did not answer within {timeout_s} s", peer.problem
        self._step(
            peer, DeadlinePassed(peer.failure(f"{detail}: {problem}" if problem else detail))
        )

    # -------------------------------------------------- getting acquainted

    def _serve(self, peer: Peer, *, is_sure: bool) -> PeerEvent | None:
        if is_sure:
            detail = f"the offer is of another life of engine {peer.engine_id}"
            for waiter in [w for w in peer.waiters if not peer.is_alive_as(w.source)]:
                self.forget(waiter)
                self._io.guard(waiter.answer, Failure(Reason.INCARNATION, detail))
        for waiter in [waiter for waiter in peer.waiters if _serves(peer, waiter)]:
            if waiter in peer.waiters:  # an earlier one may have had it forgotten
                peer.waiters.remove(waiter)
                self._io.guard(waiter.answer, peer)
        if peer.state is PeerState.READY and peer.waiters:
            return Wanted()  # their offers name another life
        return None

    def _match(self, peer: Peer) -> PeerEvent | None:
        around, own = self._around, self._own
        if own is None:
            raise IncompatiblePeer("this engine does not know its own ranks yet")
        if peer.manifest is None:
            return None
        check_partner(
            around.config, peer.manifest, own, can_leave_unhashed=around.can_leave_unhashed
        )
        peer.plan = make_plan(peer.manifest, own)
        peer.routes = peer.plan.of_sink(around.identity.rank)
        check_verifiable(around.config, peer.plan, peer.manifest)
        if peer.plan.empty_layers:
            _log.warning(
                "engine %s at %s: expected the draft of this engine, got none: the draft begins "
                "with empty KV (%d layers), so fewer of its tokens are accepted; use the same "
                "draft on both sides",
                *(peer.engine_id, peer.endpoint, len(peer.plan.empty_layers)),
            )
        peer.moments.end("plan")
        return Matched(tuple(peer.entries[route.source_rank] for route in peer.routes))

    def _try_wires(self, peer: Peer) -> None:
        start_trial(self._around, peer, self._on_tried)

    def _on_tried(self, peer: Peer, result: Choices | Failure) -> None:
        if isinstance(result, Failure):
            peer.end(result)
        elif peer.state is PeerState.OVER:
            discard(result)
        else:
            peer.moments.end("trials")
            peer.tried = dict(result)
            self._step(peer, WiresTried())

    def _replace_others(self, peer: Peer, entry: RankManifest) -> None:
        for other in list(self._peers.values()):
            if other is not peer and other.snapshot.is_replaced_by(peer.snapshot, entry):
                detail = f"engine {peer.engine_id} answers in its place"
                other.end(Failure(Reason.PEER_LOST, detail))

    def _attach(self, peer: Peer) -> PeerEvent:
        peer.moments.end("ranks")
        peer.choices = dict(peer.tried)
        try:
            for rank, choice in peer.choices.items():
                del peer.tried[rank]  # from here on the wire has what the trial has opened
                wire = peer.transport(rank)
                if isinstance(wire, DirectSink):
                    wire.attach(peer.entries[rank], choice.trial)
                else:
                    wire.attach(peer.entries[rank], choice.staging)
            self._open_boards(peer)
        except Exception as e:  # noqa: BLE001  # whoever waits must hear of it
            _log.debug("engine %s: its wires", peer.engine_id, exc_info=True)
            return Ended(Failure(Reason.TRANSPORT, str(e) or type(e).__name__))
        self._ledger.count("peers.ready")
        for choice in peer.choices.values():
            self._ledger.count(f"trials.{choice.transport}.taken")
            for name in choice.reasons:
                self._ledger.count(f"trials.{name}.passed_over")
        peer.moments.end("attach")
        names = peer.engine_id, peer.endpoint
        chosen = peer.slowest or "nothing to read"
        _log.info("engine %s at %s, met in %s: %s", *names, peer.moments, chosen)
        return Attached()

    def _open_boards(self, peer: Peer) -> None:
        """Map the boards of the ranks that this rank reads by a direct wire or a null route."""
        if not self._around.config.offer_board:
            return
        for route in peer.routes:
            rank = route.source_rank
            if rank in peer.choices and isinstance(peer.transport(rank), ReceivingSink):
                continue
            board = BoardView.open(peer.entries[rank].board)
            if board is not None:
                peer.boards[rank] = board
        self._ledger.count("boards.seen", len(peer.boards))

    # -------------------------------------------------- the end

    def _end(self, peer: Peer, failure: Failure, *, is_anew: bool) -> None:
        guard = self._io.guard  # a failure here must not stop the other steps
        if failure.reason is not Reason.PEER_LOST:
            for waiter in peer.waiters:  # the offer will never be read
                guard(peer.cancel, waiter.source, failure.reason)
        tried, peer.tried = peer.tried, {}
        discard(tried)
        self._remember(peer, failure)
        guard(self._around.on_over, peer, failure)  # Cancels of its loads still leave
        for rank in peer.choices:
            if not self._is_shared(peer, rank):
                guard(peer.transport(rank).detach, peer.entries[rank].control_endpoint)
        for board in peer.boards.values():
            guard(board.close)
        peer.boards = {}
        self._io.run_deferred()
        guard(peer.close)
        waiters, peer.waiters = peer.waiters, []
        for waiter in waiters:
            if is_anew:
                self._wait(waiter)
            else:
                guard(waiter.answer, failure)

    def _remember(self, peer: Peer, failure: Failure) -> None:
        key = _key(peer)
        self._ledger.count(f"peers.{failure.reason.value}")
        if self._peers.get(key) is peer:
            del self._peers[key]
        if not peer.snapshot.was_ready:
            if len(self._failed) >= MAX_FAILURES:
                self._failed.clear()
            self._failed[key] = _Failed(failure, peer.asked_as, self._io.now() + BACK_OFF_S)

    def _is_shared(self, peer: Peer, rank: RankId) -> bool:
        """Whether another live peer uses the same attachment to this rank."""
        entry, wire = peer.entries[rank], peer.transport(rank)
        return any(
            other is not peer
            and other.state is PeerState.READY
            and any(
                other.entries[its] == entry and other.transport(its) is wire
                for its in other.choices
            )
            for other in self._peers.values()
        )


def _serves(peer: Peer, waiter: Waiter) -> bool:
    """Whether the peer is what somebody waits for, as it stands."""
    is_enough = peer.state is PeerState.READY or not waiter.needs_wire
    return is_enough and peer.is_alive_as(waiter.source)


def _failure_from(peer: Peer, exc: Exception) -> Failure:
    """The failure of a peer that this exception means."""
    match exc:
        case IncompatiblePeer():
            return Failure(Reason.INCOMPATIBLE, str(exc))
        case UnknownEngine():
            return Failure(Reason.INCARNATION, str(exc))
        case PermissionError():
            return Failure(Reason.NOT_ALLOWED, str(exc))
        case zmq.ZMQError():
            detail = f"{peer.endpoint}: expected a socket to connect with, got none: {exc}"
            return peer.failure(detail)
        case _:
            _log.exception("engine %s cannot be met", peer.engine_id)
            return peer.failure(f"{type(exc).__name__}: {exc}")
