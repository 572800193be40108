"""The worker side of the connector: one per rank, called by its engine thread.

Method names and semantics are those of vLLM's V1 connector contract, so that the plugin is
translation. Orders go to the IO thread; what has ended comes back through
:class:`~kvxfer.connector.ledger.Ledger`. No call waits, but for a load that is part of the step
(:mod:`~kvxfer.connector.loads`), which has been promised to be there. An offer whose blocks
are taken back ends at once, in memory that the IO thread and the sinks read
(:class:`~kvxfer.connector.board.Ends`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from itertools import chain

import msgspec
import torch

from kvxfer.config import Config
from kvxfer.connector.borrower import Borrower
from kvxfer.connector.ledger import NONE_FINISHED, Finished, Ledger
from kvxfer.connector.rank_service import LATE_S, RankService
from kvxfer.connector.records import (
    NO_ORDERS,
    ConnectorMetadata,
    Identity,
    KVConnectorOutput,
    KVConnectorStats,
    NearSources,
)
from kvxfer.connector.source import IsReady
from kvxfer.connector.tracing import tell_of
from kvxfer.errors import ConfigError
from kvxfer.tensors.cuda_driver import CurrentStream, StreamEvent
from kvxfer.transfer.layout import Region
from kvxfer.transfer.manifest import EngineIdentity, EngineManifest, RankId, RankManifest
from kvxfer.transfer.plan import ALL
from kvxfer.transfer.windows import group_keepings
from kvxfer.transfer.wire import Reason
from kvxfer.transports.base import LocalMemory

HOST = torch.device("cpu")
_LOOK_S = 0.01
LOOK_AT_IO_S = 0.1
"""How soon a step looks again where the IO thread stands, which is said after seconds."""
LOOK_AGAIN_S = 0.0002
"""How soon the engine's thread looks again whether such a load has ended."""
ASIDE_S = 0.001
"""How long a step waits at most until a sink is told of KV that it can have now: the IO thread does
so within 0.3 ms, and behind the launches of the step, for the interpreter, 1 ms later.
"""


def stream_of(device: torch.device) -> CurrentStream | None:
    """The engine's; None on a CPU, where work is complete when its call returns."""
    return None if device.type == "cpu" else CurrentStream(device)


def _is_ready() -> bool:
    return True


class WorkerConnector:
    """One per rank.

    Args:
        config: with the ports of this engine, see :meth:`~kvxfer.config.Config.for_engine`. Rank 0
          of stage 0 answers for the engine and keeps held offers.
        can_leave_unhashed: the engine leaves the blocks of ``incomplete_blocks`` out of its prefix
          cache, or has no prefix cache. If False, a source whose windows could leave such blocks is
          refused by name.
        device: where the pools are. On a GPU, offers open and loads begin to write when what the
          current stream held at :meth:`wait_for_save` or :meth:`bind_connector_metadata` has run:
          what a step launches in between never writes a load's blocks.
        ready_event: replaces the event that offers wait for: called at the end of a step, and at
          the begin of one whose new offers have tokens in the engine's prefix cache; what it
          returns tells whether the KV that was launched before is complete.
        on_drain: called on any thread when the engine is told to drain, before whoever tells it
          has an answer. For an engine whose ranks do not step by themselves.
    """

    def __init__(
        self,
        config: Config,
        engine: EngineIdentity,
        rank: RankId,
        *,
        can_leave_unhashed: bool = False,
        device: torch.device = HOST,
        ready_event: Callable[[], IsReady] | None = None,
        on_drain: Callable[[], object] = lambda: None,
    ) -> None:
        self._config = config.for_rank(rank.pp * engine.tp_size + rank.tp)
        self._identity = Identity(engine.engine_id, engine.incarnation, rank)
        self._engine = engine
        self._can_leave_unhashed = can_leave_unhashed
        self._stream = stream_of(device)
        self._ready_event = ready_event or self._record_ready
        self._ledger = Ledger(on_drain)
        self._gauges: dict[str, float] = {}
        self._service: RankService | None = None
        self._borrower: Borrower | None = None
        """Notes loads that are over but not noted yet, so that this step reports them."""
        self._metadata = NO_ORDERS
        self._written: StreamEvent | None = None
        self._begun: IsReady | None = None
        self._ended: ConnectorMetadata | None = None
        self._loading: set[str] = set()
        self._in_step: tuple[str, ...] = ()
        self._awaited: dict[str, float] = {}
        """Loads that have begun with the step, and how long it may wait for their end."""
        self._copied: list[list[StreamEvent] | None] = []
        """Of loads that are part of the step that comes, what it has to run behind."""
        self._near: NearSources = {}
        self._near_news: NearSources | None = None
        self._look_at_io_s = 0.0
        self._sending: set[str] = set()
        self._finding: set[str] = set()

    # -------------------------------------------------- registration

    def register_kv_caches(self, regions: tuple[Region, ...], memory: LocalMemory) -> None:
        """Make the wires, listen, start the threads. Raises ConfigError, naming the port, if
        it cannot be had, and for layers of one group that keep different things.
        """
        if self._service is not None:
            raise ConfigError("register_kv_caches: expected one call, got another")
        try:
            group_keepings(regions)
        except ValueError as e:
            raise ConfigError(f"register_kv_caches: {e}") from e
        if not self._config.allow_cast:  # who states its elements allows that they are cast
            regions = tuple(
                msgspec.structs.replace(region, elements=msgspec.UNSET) for region in regions
            )
        self._service = RankService(
            self._config,
            self._ledger,
            self._identity,
            regions,
            memory,
            can_leave_unhashed=self._can_leave_unhashed,
        )
        self._borrower = self._service.borrower

    def get_handshake_metadata(self) -> RankManifest:
        return self._running().manifest

    # -------------------------------------------------- one step

    def handle_preemptions(self, metadata: ConnectorMetadata) -> None:
        """First call of a step: every offer whose blocks are taken back is over when this returns,
        even if the IO thread is stuck. A copy of such blocks may still run; its result is
        discarded.
        """
        if not metadata.ended or metadata is self._ended:
            return
        self._ended = metadata
        service = self._running()
        for order in metadata.ended:
            service.ends.end(order.nonce, order.reason)
        service.io.post(service.source.end, metadata.ended)

    def bind_connector_metadata(self, metadata: ConnectorMetadata) -> None:
        """Take this step's orders; offers whose blocks are used again are over on return."""
        service = self._running()
        self._metadata = metadata
        stream = self._stream
        self._written = stream.record() if stream is not None and metadata.loads else None
        has_cached = any(offer.open_tokens for offer in metadata.offers)
        self._begun = self._ready_event() if has_cached else None
        if metadata.ended:
            self.handle_preemptions(metadata)
        if metadata is NO_ORDERS:
            return
        if metadata.manifest is not None:
            self._check(metadata.manifest)
        self._sending.update(metadata.delayed)
        if metadata.finds and self._identity.rank == RankId(0, 0):
            self._finding.update(find.name for find in metadata.finds if find.is_wanted)
        if not (metadata.loads or metadata.aborts):  # else with the loads: one wake, not two
            is_awaited = has_cached and service.source.awaits(metadata.offers)
            service.carry_out(metadata, begun=self._begun)
            if is_awaited:
                service.wait_for_orders(ASIDE_S)

    def begin_ahead(self, orders: ConnectorMetadata) -> None:
        """Begin loads of the step that comes before it is told of its other orders, so that they
        copy while it is made ready. Only where nothing that was launched, or will be before they
        have ended, writes their blocks: no event holds them.
        """
        self._begin(orders)

    def start_load_kv(self, *args: object, **kwargs: object) -> None:
        """Begin this step's loads; before the step's work is launched where some are part of it:
        that work runs behind their copies. Returns at once, or where the host copies, when those
        have ended.
        """
        metadata = self._metadata
        if metadata.loads or metadata.aborts:
            self._begin(metadata, self._written, self._begun)
        if not self._copied:
            return
        copied, self._copied = self._copied, []
        if None in copied or self._stream is None:
            self._settle()
            return
        for event in chain.from_iterable(filter(None, copied)):
            self._stream.wait(event)

    def _begin(
        self,
        orders: ConnectorMetadata,
        written: StreamEvent | None = None,
        begun: IsReady | None = None,
    ) -> None:
        self._loading.update(load.request_id for load in orders.loads)
        self._awaited |= {load.request_id: load.wait_s for load in orders.loads if load.wait_s}
        in_step = tuple(load.request_id for load in orders.loads if load.in_step)
        copied = self._running().carry_out(orders, written, begun, in_step=in_step)
        if in_step:
            self._in_step += in_step
            self._copied.append(copied)

    def _settle(self) -> None:
        """Wait until the loads that are part of this step have ended, with their verdicts. What is
        late is given up; it ends when nothing can write its blocks any more.
        """
        in_step = set(self._in_step)
        if not self._have_ended(in_step, LATE_S):
            self._running().abort(in_step, Reason.DEADLINE)
            self._have_ended(in_step, math.inf)
        self._in_step = ()

    def _have_ended(self, request_ids: set[str], timeout_s: float) -> bool:
        """Wait until these loads have ended; False after ``timeout_s``."""
        until_s = time.monotonic() + timeout_s
        while True:
            if self._borrower is not None:
                self._borrower.look(sees_through=True)
            if self._ledger.wait_for_loads(request_ids, LOOK_AGAIN_S):
                return True
            if time.monotonic() > until_s:
                return False

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request runs only after its load was reported, or behind its copies."""

    def save_kv_layer(self, *args: object, **kwargs: object) -> None:
        """Nothing: sinks fetch KV from the pool."""

    def wait_for_save(self) -> None:
        """Record the ready event of the offers that this forward pass has computed."""
        metadata = self._metadata
        if metadata.computed or metadata.grown:
            service, is_ready = self._running(), self._ready_event()
            spans = (*metadata.grown, *((name, ALL) for name in metadata.computed))
            service.io.post(service.source.computed, spans, is_ready)

    def _record_ready(self) -> IsReady:
        return _is_ready if self._stream is None else self._stream.record().query

    def clear_connector_metadata(self) -> None:
        self._metadata = NO_ORDERS

    # -------------------------------------------------- what has ended

    def collect(self) -> Finished:
        """What has ended since the last call, each request once; all loads that are part of this
        step are in it, and those that it may wait for, if they have ended by then.
        """
        if self._in_step:
            self._settle()
        elif self._loading and self._borrower is not None and not self._awaited:
            self._borrower.look()
        if self._awaited:
            awaited, self._awaited = self._awaited, {}
            self._have_ended(set(awaited), max(awaited.values()))
        finished = self._ledger.take_finished()
        if finished is not NONE_FINISHED:
            self._finding.difference_update(finished.found)
            self._sending -= finished.sent
            self._loading.difference_update(report.request_id for report in finished.loads)
        return finished

    def get_finished(
        self, finished_req_ids: Iterable[str]
    ) -> tuple[set[str] | None, set[str] | None]:
        """:meth:`collect` as older engines call it."""
        finished = self.collect()
        received = {report.request_id for report in finished.loads}
        return set(finished.sent) or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Empty: a load fails as a whole and is reported by request."""
        return set()

    def get_kv_connector_stats(self, *, with_gauges: bool = True) -> KVConnectorStats | None:
        """What was counted since the last call, and the gauges that have changed."""
        stats, service = self._ledger.take_stats(), self._service
        if stats is not None and stats.loads:
            tell_of(stats.loads, self._identity.rank)
        if service is None:
            return stats
        now_s = time.monotonic()
        if now_s >= self._look_at_io_s:
            self._look_at_io_s = now_s + LOOK_AT_IO_S
            service.look_at_io()
        if not with_gauges or (stats is None and not service.has_looked):
            return stats
        service.has_looked = False
        before = self._gauges
        self._gauges, near = service.stand()
        if near != self._near:
            self._near = self._near_news = near
        changed = {place: n for place, n in self._gauges.items() if before.get(place) != n}
        changed |= {place: 0 for place in before if place not in self._gauges}
        if not changed:
            return stats
        return msgspec.structs.replace(stats or KVConnectorStats(), gauges=changed)

    def take_near(self) -> NearSources | None:
        """Where :meth:`get_kv_connector_stats` has found others than before."""
        near, self._near_news = self._near_news, None
        return near

    def build_output(self, finished_req_ids: Iterable[str]) -> KVConnectorOutput | None:
        finished, stats = self.collect(), self.get_kv_connector_stats()
        near = self.take_near()
        if finished is NONE_FINISHED and stats is None and near is None:
            return None
        failed = {load.request_id: load for load in finished.loads if load.reason is not None}
        incomplete = {load.request_id: load.incomplete_blocks for load in finished.loads}
        return KVConnectorOutput(
            finished_sending=set(finished.sent) or None,
            finished_recving={load.request_id for load in finished.loads} or None,
            failed_recving={name: str(load.reason) for name, load in failed.items()} or None,
            failure_details={name: load.detail for name, load in failed.items()} or None,
            incomplete_blocks={name: each for name, each in incomplete.items() if each} or None,
            kv_connector_stats=stats,
            must_drain=finished.must_drain,
            found=dict(finished.found) or None,
            near={str(self._identity.rank): near} if near is not None else None,
        )

    def has_pending(self) -> bool:
        """Something was handed over that has not been reported yet."""
        return bool(self._loading or self._sending or self._finding)

    def wait_for_activity(self, timeout_s: float) -> bool:
        """Sleep until something has ended; False if nothing has after ``timeout_s``."""
        if self._loading and self._borrower is not None:
            self._borrower.look()
        return self._ledger.wait(timeout_s)

    def activity_fileno(self) -> int:
        """Readable until the next step has collected what has ended."""
        return self._ledger.fileno()

    def drain(self) -> None:
        """As if an operator had told this rank. From any thread."""
        self._running().drain()

    def serve_open(self, timeout_s: float) -> bool:
        """Wait, before the end of an engine that drains, until every open offer was read or is
        over. False after ``timeout_s``. At once where it does not drain.
        """
        service, until_s = self._service, time.monotonic() + timeout_s
        if service is None or not service.is_draining:
            return True
        service.wait_for_orders(timeout_s)  # by which offers open
        while service.source.num_readable and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
        return not service.source.num_readable

    def shutdown(self) -> None:
        service, self._service, self._borrower = self._service, None, None
        if service is not None:
            service.shutdown()
        self._ledger.close()

    def _running(self) -> RankService:
        if self._service is None:
            raise ConfigError("connector: expected register_kv_caches before, and no shutdown")
        return self._service

    def _check(self, manifest: EngineManifest) -> None:
        for field in EngineIdentity.__struct_fields__:
            expected, got = getattr(self._engine, field), getattr(manifest, field)
            if got != expected:
                raise ConfigError(
                    f"{field}: the worker expected {expected!r}, the scheduler says {got!r}"
                )
