"""One source engine as this sink rank knows it: from the first Hello to the last word. Runs on the
IO thread.

    GREETING --Manifest--> KNOWN: Keep and Cancel can be sent --wires tried--> READY: Pulls too
    any of them --refused, silent, gone--> OVER, for ever: the next contact makes a new peer
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import zmq

from kvxfer.connector.access import may_connect
from kvxfer.connector.io_thread import Timer
from kvxfer.connector.peer_links import PeerLinks
from kvxfer.connector.peer_records import Failure, PeerState, Surroundings, Waiter
from kvxfer.connector.records import SourceRef
from kvxfer.errors import IncompatiblePeer, KvxferError, TransportUnavailable
from kvxfer.transfer.compatibility import check_compatible
from kvxfer.transfer.manifest import EngineManifest, RankId, RankManifest, validate_manifest
from kvxfer.transfer.plan import Plan, Route, make_plan
from kvxfer.transfer.wire import (
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
from kvxfer.transports.probe import Choice, probe

HELLO_AGAIN_S = 0.05
"""How soon an engine that does not know all its ranks yet is asked again."""

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
        self.choices: dict[RankId, Choice] = {}
        self.was_ready = False
        self._around = around
        self._waiters: list[Waiter] = []
        self._links: PeerLinks | None = None
        self._deadline: Timer | None = None

    # -------------------------------------------------- getting acquainted

    def start(self) -> None:
        """Say Hello; the rest follows from the answer, or from its absence."""
        around = self._around
        if not may_connect(around.config, self.endpoint):
            detail = f"{self.endpoint} is not in allowed_peers"
            self.end(Failure(Reason.NOT_ALLOWED, detail))
            return
        try:
            self._links = PeerLinks(around, self.engine_id, self._on_message, self._lost)
        except KeyError:
            detail = f"curve_server_keys: expected a key of engine {self.engine_id}, got none"
            self.end(Failure(Reason.NOT_ALLOWED, detail))
            return
        self._greet()

    def wait(self, waiter: Waiter) -> None:
        """Call the waiter when the peer is as far as it needs; at once if it is."""
        self._waiters.append(waiter)
        self._serve_waiters()

    def forget(self, waiter: Waiter) -> None:
        """The waiter is not to be called any more."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)

    def recheck(self) -> None:
        """An offer names another life of this engine: ask it who it is now."""
        if self._deadline is None:
            self._greet()

    def _greet(self) -> None:
        timeout_s = self._around.config.connect_timeout_s
        self._deadline = self._around.io.after(timeout_s, self._give_up)
        self._hello()

    def _hello(self) -> None:
        if self._links is not None:
            around = self._around
            message = Hello((PROTOCOL_MIN, PROTOCOL_MAX), (), around.engine_id, around.incarnation)
            self._links.send(self.endpoint, message)

    def _give_up(self) -> None:
        problem = self._links.open(self.endpoint).problem if self._links is not None else ""
        timeout_s = self._around.config.connect_timeout_s
        self._lost(
            f"{self.endpoint} did not answer within {timeout_s} s"
            + (f": {problem}" * bool(problem))
        )

    def _lost(self, detail: str) -> None:
        self.end(Failure(Reason.PEER_LOST, detail))

    def _on_manifest(self, manifest: EngineManifest) -> None:
        if self.state is PeerState.KNOWN:
            return  # a second answer while the wires are tried
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self.state is PeerState.READY and self.manifest is not None:
            if manifest.incarnation != self.manifest.incarnation:
                waiters, self._waiters = self._waiters, []
                self._lost("the engine was started anew")
                for waiter in waiters:
                    self._around.again(waiter)
            else:
                self._refuse_other_lives()
            return
        try:
            self._get_to_know(manifest)
        except IncompatiblePeer as e:
            self.end(Failure(Reason.INCOMPATIBLE, str(e)))
        except PermissionError as e:
            self.end(Failure(Reason.NOT_ALLOWED, str(e)))
        except KvxferError as e:
            self._lost(str(e))

    def _get_to_know(self, manifest: EngineManifest) -> None:
        around = self._around
        validate_manifest(manifest)
        if manifest.engine_id != self.engine_id:
            raise IncompatiblePeer(
                f"engine_id: expected {self.engine_id} at {self.endpoint}, got {manifest.engine_id}"
            )
        for entry in manifest.ranks:
            if not may_connect(around.config, entry.control_endpoint):
                raise PermissionError(
                    f"rank {entry.rank} of {self.engine_id} listens on {entry.control_endpoint}, "
                    "which is not in allowed_peers"
                )
        self.manifest = manifest
        self.state = PeerState.KNOWN
        self._refuse_other_lives()
        self._serve_waiters()
        own = around.manifest()
        if own is None:
            raise IncompatiblePeer("this engine does not know its own ranks yet")
        check_compatible(manifest, own)
        self.plan = make_plan(manifest, own)
        sources = [manifest.rank(route.source_rank) for route in self.routes() if not route.is_null]
        # Not on the copy thread: a trial may wait for the network, and loads of other peers go on
        # meanwhile.
        threading.Thread(
            target=self._try_wires, args=(sources,), name="kvxfer-probe", daemon=True
        ).start()

    def _try_wires(self, sources: list[RankManifest]) -> None:
        """On a thread of its own: one trial for each source rank that is read."""
        config, io = self._around.config, self._around.io
        choices: dict[RankId, Choice] = {}
        try:
            for source in sources:
                choices[source.rank] = probe(
                    self._around.transports, source, min_gbps=config.min_gbps
                )
        except TransportUnavailable as e:
            failure = Failure(Reason.TRANSPORT, str(e))
        except zmq.ContextTerminated:
            return  # this rank shuts down
        except Exception as e:  # noqa: BLE001  # whoever waits must hear of it
            _log.exception("engine %s: the trial of its wires failed", self.engine_id)
            failure = Failure(Reason.TRANSPORT, f"{type(e).__name__}: {e}")
        else:
            io.post(lambda: self._on_choices(choices))
            return
        io.post(lambda: self.end(failure))

    def _on_choices(self, choices: dict[RankId, Choice]) -> None:
        if self.state is not PeerState.KNOWN or self.manifest is None:
            return
        self.choices = choices
        try:
            for rank, choice in choices.items():
                self._around.transports[choice.transport].attach(self.manifest.rank(rank))
        except TransportUnavailable as e:
            self.end(Failure(Reason.TRANSPORT, str(e)))
            return
        if self._links is not None:
            for route in self.routes():
                self._links.open(self.source(route.source_rank).control_endpoint)
        self.state, self.was_ready = PeerState.READY, True
        self._around.ledger.count("peers.ready")
        _log.info("engine %s at %s: %s", self.engine_id, self.endpoint, self.wire)
        self._serve_waiters()
        if self._waiters:  # of offers that name another life
            self.recheck()

    # -------------------------------------------------- in use

    @property
    def wire(self) -> str:
        """The slowest of the chosen wires with its measured speed, and why it was not another."""
        slowest = min(self.choices.values(), key=lambda choice: choice.gb_per_s, default=None)
        return str(slowest) if slowest is not None else "nothing to read"

    def routes(self) -> tuple[Route, ...]:
        """The routes that end here, null routes too."""
        return self.plan.of_sink(self._around.rank)

    def source(self, rank: RankId) -> RankManifest:
        """The manifest of one of its ranks."""
        if self.manifest is None:
            raise KeyError(f"engine {self.engine_id} is not known yet")
        return self.manifest.rank(rank)

    def send(self, rank: RankId, message: ToSource) -> None:
        """To one of its ranks; a peer that is over gets nothing."""
        if self._links is not None:
            self._links.send(self.source(rank).control_endpoint, message)

    def ranks(self) -> Iterator[RankId]:
        """All its ranks, once it is known."""
        for entry in self.manifest.ranks if self.manifest is not None else ():
            yield entry.rank

    def cancel(self, source: SourceRef, reason: Reason) -> None:
        """Give an offer up at every rank."""
        if self.is_alive_as(source):
            message = Cancel(source.offer, self._around.incarnation, reason)
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
            for waiter in self._waiters:
                self.cancel(waiter.source, failure.reason)  # it will never be read
        self.state = PeerState.OVER
        if self._deadline is not None:
            self._deadline.cancel()
        self._around.on_over(self, failure)  # its Cancels still leave, if anybody hears them
        for rank, choice in self.choices.items():
            endpoint = self.source(rank).control_endpoint
            self._around.transports[choice.transport].detach(endpoint)
        links, self._links = self._links, None
        if links is not None:
            links.close()
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.failed(failure)

    def _refuse_other_lives(self) -> None:
        """Offers of a life that is not the present one are stale."""
        stale = [w for w in self._waiters if not self.is_alive_as(w.source)]
        for waiter in stale:
            self._waiters.remove(waiter)
            detail = f"the offer is of another life of engine {self.engine_id}"
            waiter.failed(Failure(Reason.INCARNATION, detail))

    def _serve_waiters(self) -> None:
        if self.state not in (PeerState.KNOWN, PeerState.READY):
            return
        served = [
            waiter
            for waiter in self._waiters
            if self.is_alive_as(waiter.source)
            and (self.state is PeerState.READY or not waiter.needs_wire)
        ]
        for waiter in served:
            if waiter in self._waiters:  # an earlier one may have had it forgotten
                self._waiters.remove(waiter)
                waiter.ready(self)

    # -------------------------------------------------- messages

    def _on_message(self, endpoint: str, message: ToSink) -> None:
        ledger = self._around.ledger
        match message:
            case Manifest(manifest):
                self._on_manifest(manifest)
            case NotReady():
                self._around.io.after(HELLO_AGAIN_S, self._hello)
            case Malformed(detail):
                ledger.count("control.malformed_answers")
                if self._links is not None:
                    self._links.open(endpoint).problem = detail
            case Pong(incarnation):
                if self.manifest is not None and incarnation != self.manifest.incarnation:
                    self._lost("the engine was started anew")
            case _:
                for entry in self.manifest.ranks if self.manifest is not None else ():
                    if entry.control_endpoint == endpoint:
                        self._around.on_message(self, entry.rank, message)
                        return
                ledger.count("control.unexpected")
