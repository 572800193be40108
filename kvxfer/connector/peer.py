"""One source engine as this sink rank knows it: from the first Hello to the last word. Runs on the
IO thread.

    GREETING --Manifest--> KNOWN: Keep and Cancel can be sent
    KNOWN --wires tried, and every rank that is read has said the same of itself--> READY: Pulls too
    any of them --refused, silent, gone--> OVER, for ever: the next contact makes a new peer
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial

import zmq

from kvxfer.connector.access import (
    check_host,
    check_introduction,
    check_owners,
    check_partner,
    check_rank,
)
from kvxfer.connector.board import BoardView
from kvxfer.connector.io_thread import Call, Timer
from kvxfer.connector.peer_links import PeerLinks
from kvxfer.connector.peer_records import Failure, Moments, PeerState, Surroundings, Waiter
from kvxfer.connector.peer_trial import Choices, discard, start_trial
from kvxfer.connector.peer_waiters import Waiters
from kvxfer.connector.records import SourceRef
from kvxfer.errors import IncompatiblePeer, UnknownEngine
from kvxfer.transfer.manifest import EngineManifest, RankId, RankManifest
from kvxfer.transfer.plan import Plan, Route, make_plan
from kvxfer.transfer.wire import (
    BIND_TOKENS,
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    Cancel,
    Hello,
    Malformed,
    Manifest,
    NotReady,
    Pong,
    Reason,
    ToSink,
    ToSource,
)
from kvxfer.transports.base import SinkTransport

HELLO_AGAIN_S = 0.05
"""How soon an engine that does not know all its ranks yet is asked again."""
TRIALS_S = 2.0
"""What a first contact may take beyond connect_timeout_s, for the trials of all wires together."""

_log = logging.getLogger("kvxfer.connector")


class Peer:
    """See the head of the file. ``manifest``, ``plan`` and ``choices`` are there from KNOWN and
    READY on.
    """

    def __init__(self, around: Surroundings, source: SourceRef) -> None:
        self.engine_id = source.engine_id
        self.endpoint = source.endpoint
        self.state = PeerState.GREETING
        self.manifest: EngineManifest | None = None
        self.plan = Plan(())
        self.choices: Choices = {}
        self.was_ready = False
        self._around = around
        self._tried: Choices | None = None
        self._unconfirmed: dict[str, RankManifest] = {}
        self._confirmed: dict[str, RankManifest] = {}
        self._boards: dict[RankId, BoardView] = {}
        self._waiters = Waiters(around.io)
        self._links: PeerLinks | None = None
        self._deadline: Timer | None = None
        self._greeted_s = 0.0
        self._moments = Moments(around.io.now)

    # -------------------------------------------------- getting acquainted

    def start(self) -> None:
        """Say Hello; the rest follows from the answer, or from its absence."""
        around = self._around
        try:
            check_host(around.config, self.endpoint)
            check_owners(around.config, [self.endpoint], are_up=False)
            self._links = PeerLinks(around, self.engine_id, self._on_message, self._lost)
            self._greet()
        except KeyError:
            detail = f"curve_server_keys: expected a key of engine {self.engine_id}, got none"
            self.end(Failure(Reason.NOT_ALLOWED, detail))
        except PermissionError as e:
            self.end(Failure(Reason.NOT_ALLOWED, str(e)))
        except zmq.ZMQError as e:
            self._lost(f"{self.endpoint}: expected a socket to connect with, got none: {e}")

    def wait(self, waiter: Waiter) -> None:
        """Call the waiter when the peer is as far as it needs; at once if it is."""
        self._waiters.add(waiter)
        self._waiters.serve(self)

    def forget(self, waiter: Waiter) -> None:
        """The waiter is not to be called any more."""
        self._waiters.forget(waiter)

    def recheck(self) -> None:
        """An offer names another life of this engine: ask it who it is now."""
        if self._deadline is None:
            self._greet()

    def _greet(self) -> None:
        timeout_s = self._around.config.connect_timeout_s
        self._greeted_s = self._around.io.now()
        self._set_deadline(timeout_s, self._give_up)
        self._hello(self.endpoint)

    def _set_deadline(self, delay_s: float, call: Call) -> None:
        self._clear_deadline()
        self._deadline = self._around.io.after(delay_s, call)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _hello(self, endpoint: str) -> None:
        if self._links is not None:
            around = self._around
            names = (BIND_TOKENS,) if around.config.bind_tokens else ()
            versions = (PROTOCOL_MIN, PROTOCOL_MAX)
            message = Hello(versions, names, around.engine_id, around.incarnation)
            self._links.send(endpoint, message)

    def _give_up(self) -> None:
        problem = self._links.problem(self.endpoint) if self._links is not None else ""
        timeout_s = self._around.config.connect_timeout_s
        self._lost(
            f"{self.endpoint} did not answer within {timeout_s} s"
            + (f": {problem}" * bool(problem))
        )

    def _lost(self, detail: str) -> None:
        is_refused = self._links is not None and self._links.is_refused
        self.end(Failure(Reason.NOT_ALLOWED if is_refused else Reason.PEER_LOST, detail))

    def _on_manifest(self, manifest: EngineManifest) -> None:
        if self.state is PeerState.KNOWN:
            return  # a second answer while the wires are tried
        self._clear_deadline()
        if self.state is PeerState.READY and self.manifest is not None:
            if manifest.incarnation != self.manifest.incarnation:
                waiters = self._waiters.take()
                self._lost("the engine was started anew")
                for waiter in waiters:
                    self._around.again(waiter)
            else:
                self._waiters.refuse_other_lives(self)
            return
        try:
            self._get_to_know(manifest)
        except IncompatiblePeer as e:
            self.end(Failure(Reason.INCOMPATIBLE, str(e)))
        except UnknownEngine as e:
            self.end(Failure(Reason.INCARNATION, str(e)))
        except PermissionError as e:
            self.end(Failure(Reason.NOT_ALLOWED, str(e)))
        except Exception as e:  # noqa: BLE001  # whoever waits must hear of it
            _log.exception("engine %s cannot be met", self.engine_id)
            self._lost(f"{type(e).__name__}: {e}")

    def _get_to_know(self, manifest: EngineManifest) -> None:
        around = self._around
        self._moments.end("hello")
        check_introduction(around.config, self.engine_id, self.endpoint, manifest)
        self.manifest = manifest
        self.state = PeerState.KNOWN
        until_s = self._greeted_s + around.config.connect_timeout_s + TRIALS_S
        self._set_deadline(until_s - around.io.now(), self._not_tried)
        self._waiters.refuse_other_lives(self)
        self._waiters.serve(self)
        own = around.manifest()
        check_partner(around.config, manifest, own, can_leave_unhashed=around.can_leave_unhashed)
        if own is None or self.state is not PeerState.KNOWN:
            return  # a waiter has ended it
        self.plan = make_plan(manifest, own)
        routes = [
            (route, manifest.rank(route.source_rank))
            for route in self.routes()
            if not route.is_null
        ]
        self._moments.end("plan")
        self._ask_ranks()
        start_trial(around, routes, until_s, self._on_tried)

    def _ask_ranks(self) -> None:
        """Have every rank that will be asked for anything confirm what the front door says of it.
        Trials go on meanwhile: they carry no KV.
        """
        read = [self.source(route.source_rank) for route in self.routes()]
        self._unconfirmed = {entry.control_endpoint: entry for entry in read}
        for endpoint in list(self._unconfirmed):
            if endpoint == self.endpoint:
                self._confirm(endpoint)  # it has just said so
            else:
                self._hello(endpoint)

    def _on_said(self, endpoint: str, said: EngineManifest) -> None:
        """A rank has answered for itself."""
        entry = self._unconfirmed.get(endpoint)
        if self.manifest is None or entry is None:
            return
        same_engine = said.engine_id == self.engine_id
        if same_engine and said.incarnation != self.manifest.incarnation:
            self._lost("the engine was started anew")
            return
        try:
            check_rank(self.manifest, entry, said)
        except PermissionError as e:
            self.end(Failure(Reason.NOT_ALLOWED, str(e)))
            return
        self._confirm(endpoint)
        self._complete()

    def _confirm(self, endpoint: str) -> None:
        entry = self._confirmed[endpoint] = self._unconfirmed.pop(endpoint)
        self._around.confirmed(self, entry)

    def is_replaced_by(self, peer: Peer, entry: RankManifest) -> bool:
        """Whether this rank of the other peer listens where this peer has heard another, or the
        same one say something else. Under two names of its host an engine says the same.
        """
        known = self._confirmed.get(entry.control_endpoint)
        if known is None or self.manifest is None or peer.manifest is None:
            return False
        return known != entry or self.manifest.incarnation != peer.manifest.incarnation

    def _not_tried(self) -> None:
        if self._tried is None:
            self.end(Failure(Reason.TRANSPORT, "the trials of its wires did not end in time"))
            return
        silent = ", ".join(self._unconfirmed)
        self._lost(f"{silent}: expected its ranks to confirm what its front door says, got nothing")

    def _on_tried(self, result: Choices | Failure) -> None:
        if isinstance(result, Failure):
            if self.state is PeerState.KNOWN:
                self.end(result)
            return
        if self.state is not PeerState.KNOWN:
            discard(result)
            return
        self._moments.end("trials")
        self._tried = result
        self._complete()

    def _complete(self) -> None:
        """READY, once nothing is missing."""
        if self._tried is None or self._unconfirmed:
            return
        self._moments.end("ranks")
        self.choices, self._tried = self._tried, None
        unattached = dict(self.choices)
        try:
            for rank, choice in self.choices.items():
                del unattached[rank]  # from here on the wire has what the trial has opened
                self.transport(rank).attach(self.source(rank), choice.staging, choice.trial)
            self._open_boards()
        except Exception as e:  # noqa: BLE001  # whoever waits must hear of it
            _log.debug("engine %s: its wires", self.engine_id, exc_info=True)
            discard(unattached)
            self.end(Failure(Reason.TRANSPORT, str(e) or type(e).__name__))
            return
        self._clear_deadline()
        self.state, self.was_ready = PeerState.READY, True
        self._around.ledger.count("peers.ready")
        self._moments.end("attach")
        names = self.engine_id, self.endpoint
        _log.info("engine %s at %s, met in %s: %s", *names, self._moments, self.wire)
        self._waiters.serve(self)
        if self._waiters:  # of offers that name another life
            self.recheck()

    def _open_boards(self) -> None:
        """Of the ranks that this one reads by itself, or reads nothing of."""
        if not self._around.config.offer_board:
            return
        for route in self.routes():
            rank = route.source_rank
            if rank in self.choices and self.transport(rank).is_stream:
                continue
            board = BoardView.open(self.source(rank).board)
            if board is not None:
                self._boards[rank] = board
        self._around.ledger.count("boards.seen", len(self._boards))

    # -------------------------------------------------- in use

    @property
    def wire(self) -> str:
        """The slowest of the chosen wires with its measured costs, and why it was not another."""
        slowest = max(self.choices.values(), key=lambda choice: choice.duration_s, default=None)
        return str(slowest) if slowest is not None else "nothing to read"

    def routes(self) -> tuple[Route, ...]:
        """The routes that end here, null routes too."""
        return self.plan.of_sink(self._around.rank)

    def source(self, rank: RankId) -> RankManifest:
        """The manifest of one of its ranks."""
        if self.manifest is None:
            raise KeyError(f"engine {self.engine_id} is not known yet")
        return self.manifest.rank(rank)

    def transport(self, rank: RankId) -> SinkTransport:
        """The chosen wire to one of its ranks."""
        return self._around.transports[self.choices[rank].transport]

    def board(self, rank: RankId) -> BoardView | None:
        """Where one of its ranks shows its open offers, if it can be seen from here."""
        return self._boards.get(rank)

    def send(self, rank: RankId, message: ToSource) -> None:
        """To one of its ranks; a peer that is over gets nothing."""
        if self._links is not None:
            self._links.send(self.source(rank).control_endpoint, message)

    def send_later(self, rank: RankId, message: ToSource) -> None:
        """The same for a message that nobody waits for: it leaves in its turn, when a load that is
        under way in this round has been reported.
        """
        self._around.io.defer(partial(self.send, rank, message))

    def ranks(self) -> Iterator[RankId]:
        """All its ranks, once it is known."""
        for entry in self.manifest.ranks if self.manifest is not None else ():
            yield entry.rank

    def cancel(self, source: SourceRef, reason: Reason) -> None:
        """Give an offer up at every rank."""
        if self.is_alive_as(source):
            message = Cancel(source.offer, self._around.incarnation, reason, source.digest)
            for rank in self.ranks():
                self.send(rank, message)

    def is_alive_as(self, source: SourceRef) -> bool:
        """Whether the offer is of the life that this peer is known in."""
        return self.manifest is not None and self.manifest.incarnation == source.offer.incarnation

    def begin_load(self) -> None:
        """A load waits for answers of this peer: from now on its silence is noticed."""
        if self._links is not None:
            self._links.begin_load()

    def end_load(self) -> None:
        """A load has ended."""
        if self._links is not None:
            self._links.end_load()

    # -------------------------------------------------- ends

    def end(self, failure: Failure) -> None:
        """The peer cannot be used any more: tell everybody, let its connections and mappings go.
        Idempotent.
        """
        if self.state is PeerState.OVER:
            return
        if self.manifest is not None and failure.reason is not Reason.PEER_LOST:
            for source in self._waiters.sources():  # it will never be read
                self._around.io.guard(partial(self.cancel, source, failure.reason))
        self.state = PeerState.OVER
        self._clear_deadline()
        tried, self._tried = self._tried, None
        if tried is not None:
            discard(tried)
        guard = self._around.io.guard  # what fails here must not keep the rest from ending
        guard(partial(self._around.on_over, self, failure))  # its Cancels still leave
        for rank in self.choices:
            if not self._around.is_shared(self, rank):
                endpoint = self.source(rank).control_endpoint
                guard(partial(self.transport(rank).detach, endpoint))
        boards, self._boards = self._boards, {}
        for board in boards.values():
            guard(board.close)
        self._around.io.run_deferred()
        links, self._links = self._links, None
        if links is not None:
            guard(links.close)
        self._waiters.fail(failure)

    # -------------------------------------------------- messages

    def _on_message(self, endpoint: str, message: ToSink) -> None:
        ledger = self._around.ledger
        match message:
            case Manifest(manifest) if endpoint == self.endpoint:
                self._on_manifest(manifest)
            case Manifest(said):
                self._on_said(endpoint, said)
            case NotReady():
                self._around.io.after(HELLO_AGAIN_S, partial(self._hello, endpoint))
            case Malformed(detail):
                ledger.count("control.malformed_answers")
                if self._links is not None:
                    self._links.note(endpoint, detail)
            case Pong(incarnation):
                if self.manifest is not None and incarnation != self.manifest.incarnation:
                    self._lost("the engine was started anew")
            case _:
                for entry in self.manifest.ranks if self.manifest is not None else ():
                    if entry.control_endpoint == endpoint:
                        self._around.on_message(self, entry.rank, message)
                        return
                ledger.count("control.unexpected")
