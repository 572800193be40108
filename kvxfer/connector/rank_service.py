"""Builds all of one rank that runs on its IO thread: listener, source, sink, peers, wires."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from queue import Empty, SimpleQueue

import msgspec
import zmq

from kvxfer.config import Config
from kvxfer.connector.access import protection
from kvxfer.connector.board import Board, Ends
from kvxfer.connector.borrower import Borrower
from kvxfer.connector.control import ControlServer, LastWords
from kvxfer.connector.io_thread import STANDS_S, IoThread
from kvxfer.connector.keeper import Finder, Keeper
from kvxfer.connector.ledger import Ledger
from kvxfer.connector.load_routes import Addressing
from kvxfer.connector.metrics import key, peer_label
from kvxfer.connector.peer import Peer, Surroundings
from kvxfer.connector.peer_session import Failure
from kvxfer.connector.peers import Peers
from kvxfer.connector.records import (
    AbortLoad,
    ConnectorMetadata,
    Identity,
    NearSource,
    NearSources,
    SourceRef,
)
from kvxfer.connector.sink import Sink
from kvxfer.connector.source import IsReady, Served, Source
from kvxfer.connector.verifier import EVERY, Verifier
from kvxfer.log_limit import LogLimit
from kvxfer.tensors.cuda_driver import StreamEvent
from kvxfer.tensors.device_memory import current_context
from kvxfer.transfer.costs import REFERENCE_TOKENS
from kvxfer.transfer.layout import Region
from kvxfer.transfer.manifest import EngineManifest, RankId, RankManifest
from kvxfer.transfer.wire import (
    Consumer,
    Drain,
    Draining,
    Found,
    Hello,
    Manifest,
    NotReady,
    Ping,
    Pong,
    Reason,
    ToSink,
    ToSource,
    encode,
)
from kvxfer.transports.base import (
    DirectSource,
    LocalMemory,
    ReceivingSink,
    SendingSource,
    SinkTransport,
    SourceTransport,
)
from kvxfer.transports.copy_thread import SMALL_NBYTES
from kvxfer.transports.guard import Guard
from kvxfer.transports.key_folder import with_folder_keys
from kvxfer.transports.parallel import make_context, make_copier, make_room
from kvxfer.transports.registry import data_endpoints, make_sinks, make_sources, published_infos
from kvxfer.transports.visitors import TURN_S

LATE_S = 1.0
"""A load that is part of a step and has not ended by then is given up. It was promised because its
offer stood on the board: it ends in milliseconds, unless its source or this host stands still.
"""
DRAIN_S = 2.0
"""How long shutdown waits for what is in flight, and then for its threads: a job is 10 ms, a last
word 200 ms.
"""

SETTLE_LOOK_S = 0.002
_LookedAt = ControlServer | SendingSource | ReceivingSink
_log = logging.getLogger("kvxfer.connector")


class RankService:
    """One rank's part in the protocol; listens as soon as it is constructed.

    Methods are called by the engine thread; :meth:`carry_out` brings orders to ``source``, ``sink``
    and ``keeper``, which belong to the IO thread.

    Args:
        config: with this rank's ports. Raises ConfigError if they cannot be had.
        can_leave_unhashed: as :class:`~kvxfer.connector.worker_side.WorkerConnector` has it.
    """

    def __init__(
        self,
        config: Config,
        ledger: Ledger,
        identity: Identity,
        regions: tuple[Region, ...],
        memory: LocalMemory,
        *,
        can_leave_unhashed: bool,
    ) -> None:
        make_room()
        config = with_folder_keys(config)
        self._ledger = ledger
        self._identity, self._rank = identity, str(identity.rank)
        self._is_front_door = identity.rank == RankId(0, 0)
        self.introduction: zmq.Frame | None = None
        """What is answered to a Hello; None: the engine's manifest is not known yet."""
        self.io = IoThread(
            f"kvxfer-io-{identity.rank}",
            ledger.failed_call,
            # The context is entered once a round, and not around each call of CUDA or UCX
            within=current_context(memory.device) if memory.device.type == "cuda" else None,
        )
        self._context = make_context(config)
        self._copy_thread = make_copier(config, memory.device, small_nbytes=SMALL_NBYTES)
        self._num_changes = -1
        self._near: NearSources = {}
        self._peer_gauges: dict[str, float] = {}
        self.has_looked = True
        """Set a few times a second: gauges may have changed although nothing was counted."""
        self._stands: LogLimit[str] = LogLimit()
        self.is_draining = False
        self._num_open: int | None = None
        """As the scheduler has said last; None: it has not heard that it is to drain."""
        self._parts: list[ControlServer | SendingSource | SinkTransport | Board | LastWords] = []
        try:
            sources, sinks = self._build(
                config, regions, memory, can_leave_unhashed=can_leave_unhashed
            )
        except BaseException:
            self._close_all()
            self._copy_thread.close()
            self.io.stop(0)
            self._end_context()
            raise
        if self._is_front_door:
            said = protection(config, self._server.endpoint, sources)
            names = identity.engine_id, self._server.endpoint
            _log.log(said.level, "protection of engine %s at %s: %s", *names, said.text)
        self._watch(sources.values(), sinks.values())
        self.io.start()

    def _build(
        self,
        config: Config,
        regions: tuple[Region, ...],
        memory: LocalMemory,
        *,
        can_leave_unhashed: bool,
    ) -> tuple[dict[str, SourceTransport], dict[str, SinkTransport]]:
        """The listener, the wires, the source and the sink; whatever has begun is in ``_parts``."""
        identity, ledger = self._identity, self._ledger
        Guard(self._context, config, ledger.refused)
        self._server = ControlServer(
            self.io, self._context, config, ledger, self._dispatch, self._on_gone
        )
        self._parts.append(self._server)
        sources, sinks = self._make_wires(config, memory)
        board = self._make_board(config, sources)
        self.manifest = RankManifest(
            rank=identity.rank,
            control_endpoint=self._server.endpoint,
            data_endpoints=data_endpoints(sources),
            memories=published_infos(sources, memory),
            regions=regions,
            board=board.handle if board is not None else None,
            curve_public_key=config.curve_public_key,
        )
        self.ends = Ends(board)
        verifier = Verifier(memory, self._copy_thread, self.io.post)
        self.source = Source(
            self.io,
            config,
            ledger,
            Served(identity.incarnation, self.manifest, sources),
            server=self._server,
            ends=self.ends,
            verifier=verifier,
        )
        self._make_sink(config, sinks, verifier, can_leave_unhashed=can_leave_unhashed)
        return sources, sinks

    def _watch(
        self, sources: Collection[SourceTransport], sinks: Collection[SinkTransport]
    ) -> None:
        """Have the IO thread look after the wires, and lend it to the engine's where that helps."""
        self.borrower = Borrower.make(self.io, self._ledger, self.sink, sinks)
        receiving = [sink for sink in sinks if isinstance(sink, ReceivingSink)]
        direct = [sink for sink in sinks if sink not in receiving]
        for sink in (*direct, *receiving):  # completed reads are told before sockets are read
            self.io.watch_group(sink, self._poll_sink)
        self._sending = [source for source in sources if isinstance(source, SendingSource)]
        for source in self._sending:
            self.io.watch_group(source, self._poll_source)
        self._streams = (("source", self._sending), ("sink", receiving))
        looked_at: list[_LookedAt] = [self._server, *self._sending, *receiving]
        for each in looked_at:
            self.io.after(each.look_s, self._inspect, each)

    def _make_wires(
        self, config: Config, memory: LocalMemory
    ) -> tuple[dict[str, SourceTransport], dict[str, SinkTransport]]:
        args = (memory, config, self._copy_thread, self.io.attend, self._context)
        sources = make_sources(*args)
        self._parts += [each for each in sources.values() if isinstance(each, SendingSource)]
        sinks = make_sinks(*args)
        self._parts += sinks.values()
        return sources, sinks

    def _make_board(self, config: Config, sources: Mapping[str, SourceTransport]) -> Board | None:
        """For sinks with a direct wire; those of a stream wire do not look at it."""
        is_direct = any(isinstance(source, DirectSource) for source in sources.values())
        if not (config.offer_board and is_direct):
            return None
        board = Board.make()
        if board is not None:
            self._parts.append(board)
        return board

    def _make_sink(
        self,
        config: Config,
        transports: dict[str, SinkTransport],
        verifier: Verifier,
        *,
        can_leave_unhashed: bool,
    ) -> None:
        identity = self._identity
        consumer = Consumer(identity.incarnation, identity.rank)
        every = EVERY.get(config.verify, 0)
        addressing = Addressing(consumer, transports, can_leave_unhashed, every)
        last_words = LastWords(self.io)
        self._parts.append(last_words)
        around = Surroundings(
            io=self.io,
            context=self._context,
            config=config,
            ledger=self._ledger,
            last_words=last_words,
            identity=identity,
            transports=transports,
            can_leave_unhashed=can_leave_unhashed,
            on_message=self._on_answer,
            on_over=self._on_over,
        )
        self._peers = Peers(around)
        self.keeper, self.finder = Keeper(around, self._peers), Finder(around, self._peers)
        self.sink = Sink(around, addressing, self._peers, self.keeper, verifier)

    # -------------------------------------------------- on the IO thread

    def _set_engine(self, manifest: EngineManifest) -> None:
        """All ranks of this engine, as its scheduler knows them. Peers that were matched with
        others are met anew.
        """
        self._peers.set_own(manifest)
        # The front door answers for all ranks; any other rank answers for itself, to sinks that
        # have met the engine.
        if self._identity.rank != RankId(0, 0):
            manifest = msgspec.structs.replace(manifest, ranks=(self.manifest,))
        # Encoded and copied once: a manifest of 100 KB times every Hello would be too much.
        self.introduction = zmq.Frame(encode(Manifest(manifest)), copy=True)

    def _dispatch(self, identity: bytes, message: ToSource) -> None:
        match message:
            case Hello():
                if self.introduction is None:
                    self._server.send(identity, NotReady())
                else:
                    self._server.send(identity, self.introduction)
            case Ping():
                self._server.send(identity, Pong(self._identity.incarnation))
            case Drain():
                self._server.check_own()
                self.drain()
                num_open = max(self.source.num_offers + self.sink.num_loads, self._num_open or 0)
                self._server.send(identity, Draining(num_open, self._num_open is not None))
            case _:
                self.source.handle(identity, message)

    def drain(self) -> None:
        """Have the scheduler hear that it is to take nothing new. From any thread."""
        self.is_draining = self.has_looked = True
        if self._num_open is None:
            self._ledger.drain()

    def _on_gone(self, identity: bytes) -> None:
        self.source.gone(identity)

    def _on_answer(self, peer: Peer, source: RankId, message: ToSink) -> None:
        if isinstance(message, Found):
            self.finder.on_message(peer, message)
            return
        self.sink.on_message(peer, source, message)

    def _on_over(self, peer: Peer, failure: Failure) -> None:
        self.sink.on_over(peer, failure)

    def _poll_source(self, transport: SendingSource) -> None:
        """Chunks that are packed one by one leave in one round, as many as a turn of it allows."""
        until_s = time.perf_counter() + TURN_S
        while True:
            for completion in transport.poll():
                self.io.guard(self.source.on_completion, transport, completion)
            if not transport.has_more or time.perf_counter() >= until_s:
                break
        if transport.counts:
            self._ledger.take_counts(transport.name, transport.counts)

    def _poll_sink(self, transport: SinkTransport) -> None:
        for completion in transport.poll():
            self.io.guard(self.sink.on_completion, completion)
        if transport.counts:
            self._ledger.take_counts(transport.name, transport.counts)

    def _inspect(self, each: _LookedAt) -> None:
        """A few times a second, let it end what peers hold without use."""
        self.io.after(each.look_s, self._inspect, each)
        self.io.guard(each.inspect)
        self.has_looked = True

    def _close_all(self) -> None:
        self.io.unwatch_groups()
        parts, self._parts = self._parts, []
        for part in reversed(parts):
            try:
                part.close()
            except Exception:  # noqa: BLE001  # the others are closed all the same
                _log.exception("shutdown: something did not close")

    # -------------------------------------------------- orders, from the engine thread

    def carry_out(
        self,
        orders: ConnectorMetadata,
        after: StreamEvent | None = None,
        begun: IsReady | None = None,
        *,
        in_step: Sequence[str] = (),
    ) -> list[StreamEvent] | None:
        """Have a step's orders carried out by the IO thread; or on this thread at once, if the IO
        thread sleeps and the orders are quick and touch no socket. ``after``: as :meth:`Sink.load`
        has it. ``begun``: whether all is over that was launched before this step. ``in_step``:
        loads that are waited for, LATE_S at most, until they have begun. Returns their copies, as
        :meth:`Sink.copied` has them.
        """
        copied: SimpleQueue[list[StreamEvent] | None] = SimpleQueue()
        handed_s = self.io.now()

        def order() -> None:
            self._take(orders, handed_s, after, begun)
            if in_step:
                copied.put(self.sink.copied(in_step))

        is_begun = (
            self.borrower is not None
            and orders.has_only_loads
            and self.borrower.begin(
                orders.loads, order, sees_through=len(in_step) == len(orders.loads)
            )
        )
        if not is_begun:
            self.io.post(order)
        if not in_step:
            return None
        try:
            return copied.get(timeout=LATE_S)
        except Empty:
            return None

    def wait_for_orders(self, timeout_s: float) -> None:
        """Until the IO thread has carried out what it was given before."""
        are_done = threading.Event()
        self.io.post(are_done.set)
        are_done.wait(timeout_s)

    def abort(self, request_ids: Iterable[str], reason: Reason) -> None:
        """Give these loads up; those that have ended stay as they are."""
        for request_id in request_ids:
            self.io.post(self.sink.abort, AbortLoad(request_id, reason))

    def _take(
        self,
        orders: ConnectorMetadata,
        handed_s: float,
        after: StreamEvent | None,
        begun: IsReady | None,
    ) -> None:
        """Each order, even if others fail; aborts last: of a load of this step, perhaps."""
        guard = self.io.guard
        if orders.manifest is not None:
            guard(self._set_engine, orders.manifest)
        for offer in orders.offers:
            guard(self.source.add, offer)
        for table in orders.blocks:
            guard(self.source.set_blocks, table)
        if begun is not None:
            cached = [(each.request_id, each.open_tokens) for each in orders.offers]
            guard(self.source.computed, [each for each in cached if each[1]], begun)
        if orders.delayed:
            guard(self.source.delay, orders.delayed)
        if orders.num_open is not None:
            self.is_draining, self._num_open = True, orders.num_open
        if self._is_front_door:
            for hold in orders.holds:
                guard(self.keeper.hold, hold.request_id, hold.source)
            for unhold in orders.unholds:
                guard(self.keeper.release, unhold.request_id, unhold.source)
                if unhold.reason is not None:
                    guard(self.keeper.cancel, unhold.source, unhold.reason)
            for find in orders.finds:
                guard(self.finder.find, find)
        for load in orders.loads:
            guard(self.sink.load, load, handed_s, after)
        for abort in orders.aborts:
            guard(self.sink.abort, abort)

    def look_at_io(self) -> None:
        """On the engine thread, some times a second: say where the IO thread stands, if it does."""
        if self.io.stands() and self._stands.note("", time.monotonic()):
            self._ledger.count("io.stands")
            _log.error(
                "rank %s: no load and no offer goes on: expected a round of the IO thread within "
                "%g s, got none; it stands at\n%s",
                *(self._rank, STANDS_S, self.io.stack()),
            )

    def stand(self) -> tuple[dict[str, float], NearSources]:
        """How things stand, by metric and labels (:mod:`kvxfer.connector.metrics`), and what this
        rank can load from within a step. On the engine thread: reads plain numbers that the IO
        thread writes.
        """
        if self._num_changes != self._peers.num_changes:
            self._num_changes = self._peers.num_changes  # first: a change meanwhile is seen again
            self._look_at(self._peers.all_ready())
        rank = self._rank
        stand: dict[str, float] = {
            **self._peer_gauges,
            key("loads_in_flight", rank): self.sink.num_loads,
            key("offers_held", rank): self.source.num_offers,
            key("blocks_held", rank): self.source.num_held_blocks,
            key("board_on", rank): int(self.ends.has_board),
            key("draining", rank): int(self.is_draining),
        }
        for side, streams in self._streams:
            for stream in streams:
                stand[key("staging_bytes", rank, side, stream.name)] = stream.staging_nbytes
        return stand, self._near

    def _look_at(self, peers: Sequence[Peer]) -> None:
        """Peers that can be read, which stay as they are until one is ready or lost."""
        rank = self._rank
        found = [(peer.manifest, near_source(peer)) for peer in peers]
        self._near = {of.incarnation: source for of, source in found if of and source}
        self._peer_gauges = {
            key("peers_ready", rank): len(peers),
            key("boards_open", rank): sum(len(peer.boards) for peer in peers),
        }
        for peer in peers:
            wire = peer.slowest
            if wire is not None:
                label = peer_label(peer.endpoint)
                place = key("wire_bytes_per_second", rank, label, wire.transport)
                self._peer_gauges[place] = wire.costs.gb_per_s * 1e9

    def meet(
        self,
        own: EngineManifest,
        source: SourceRef,
        tell: Callable[[Peer | Failure], object],
    ) -> None:
        """Meet an engine as a load from it would. ``tell`` is called once, on the IO thread.
        ``own``: all ranks of this engine.
        """

        def begin() -> None:
            self._peers.set_own(own)
            self._peers.want(source, tell, needs_wire=True)

        self.io.post(begin)

    # -------------------------------------------------- the end, on the engine thread

    def shutdown(self) -> None:
        """Break all offers, abort all loads, wait for what is in flight (bounded)."""
        if self.is_draining:
            settled = threading.Event()
            self.io.post(self._when_settled, settled.set)
            settled.wait(DRAIN_S)
        self.ends.end_all(Reason.SHUTDOWN)  # even if the IO thread is stuck
        drained = [threading.Event(), threading.Event()]
        self.io.post(self.sink.shutdown, Reason.SHUTDOWN, drained[0].set)
        self.io.post(self.source.shutdown, drained[1].set)
        if not all(event.wait(DRAIN_S) for event in drained):
            _log.error("shutdown: transfers did not end within %s s", DRAIN_S)
        self.io.post(self._peers.shutdown, Failure(Reason.SHUTDOWN, "this engine ends"))
        self.io.post(self._close_all)
        if not self.io.stop(2 * DRAIN_S):
            _log.error("shutdown: the IO thread did not end; its sockets are left open")
            return
        self._copy_thread.close()
        self._end_context()

    def _when_settled(self, done: Callable[[], object]) -> None:
        """The last chunks may be on their way: with the process they would be lost."""
        if all(stream.is_settled for stream in self._sending):
            done()
        else:
            self.io.after(SETTLE_LOOK_S, self._when_settled, done)

    def _end_context(self) -> None:
        """When the last messages have left; a trial that still waits is cut short."""
        thread = threading.Thread(target=self._context.term, daemon=True)
        thread.start()
        thread.join(DRAIN_S)
        if thread.is_alive():
            _log.error("shutdown: a socket was left open")


def near_source(peer: Peer) -> NearSource | None:
    """How long loads take within a step; None where they need a message or a stream."""
    choices, boards = list(peer.choices.values()), []
    for route in peer.routes:
        board = peer.entries[route.source_rank].board
        if board is None or route.source_rank not in peer.boards:  # a stream has none
            return None
        boards.append(board)
    latency_s = sum(choice.costs.latency_s for choice in choices)
    reference_s = sum(choice.workload.nbytes / choice.costs.bytes_per_s for choice in choices)
    return NearSource(latency_s, reference_s / REFERENCE_TOKENS, tuple(boards))
