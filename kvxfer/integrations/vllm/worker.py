"""The connector in one of vLLM's workers: a door in front of ``WorkerConnector``."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import reduce
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor

from kvxfer.connector.ledger import NONE_FINISHED
from kvxfer.connector.records import NO_ORDERS, ConnectorMetadata, KVConnectorStats, NewLoad
from kvxfer.connector.worker_side import WorkerConnector
from kvxfer.errors import ConfigError
from kvxfer.integrations.vllm.compat import (
    DEFERS_FREES,
    REPORTS_FAILED_REQUESTS,
    KVConnectorTransferResults,
    KvxferHandshake,
    KvxferMetadata,
    KvxferWorkerMetadata,
)
from kvxfer.integrations.vllm.drain_flag import DrainFlag
from kvxfer.integrations.vllm.regions import ClearedGroup, Located
from kvxfer.integrations.vllm.settings import Settings
from kvxfer.integrations.vllm.stats import Calm, KvxferStats, of_worker
from kvxfer.transfer.manifest import CacheFacts, RankId, RankManifest

_IDLE_WAIT_S = (0.0002, 0.02)
"""How long a step that computes nothing waits for a transfer to end, at least and at most."""
_STILL_SHARE = 0.02
"""In between, this share of the time for which nothing has ended. An engine whose load stands still
makes 50 steps a second after one second, not thousands, and a new request waits 20 ms for it at
worst; behind a load of 50 ms, 1 ms. Ranks in step do not wait: every other rank's step would take
that much longer, and the pace is a forward pass anyway.
"""

_log = logging.getLogger("kvxfer.integrations")
_Locate = Callable[[Mapping[str, Tensor]], Located]
_NOTHING = KvxferWorkerMetadata({})
_here: WeakValueDictionary[bytes, WorkerSide] = WeakValueDictionary()
"""The front doors of this process, by the incarnation of their engine."""


def worker_ahead(incarnation: bytes) -> WorkerSide | None:
    """An engine's front door, if it is in this process and can begin loads ahead of their step."""
    found = _here.get(incarnation)
    return found if found is not None and found.can_begin_ahead else None


class WorkerSide:
    """One per rank. ``incarnation``: 16 random bytes that all ranks agreed on. ``locate``: finds
    the regions of the caches that vLLM registers.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        facts: CacheFacts,
        rank: RankId,
        incarnation: bytes,
        locate: _Locate,
    ) -> None:
        self._settings = settings
        self._facts = facts
        self._rank = rank
        self._incarnation = incarnation
        self._locate = locate
        self._core: WorkerConnector | None = None
        self._drain_flag = DrainFlag()
        self._cleared: tuple[ClearedGroup, ...] = ()
        self._drafts: tuple[ClearedGroup, ...] = ()
        self._is_idle_step = False
        self._has_orders = False
        self._is_ahead = False
        """Loads of the step that comes have begun."""
        self.can_begin_ahead = False
        self._wants_answer = False
        self._still_since_s: float | None = None
        self._in_flight = InFlight()
        self._said = _NOTHING
        self._failed_block_ids: set[int] = set()
        self._has_loaded = False
        """Loads were part of this step, and tokens come of them."""
        self._calm = Calm()
        self._to_tell: list[tuple[KVConnectorStats | None, float, float]] = []
        """What was counted, seconds with a load in flight, and when that was collected."""

    # -------------------------------------------------- registration

    def register_kv_caches(self, kv_caches: Mapping[str, Tensor]) -> None:
        """Describe the caches, listen, start the threads. Raises ConfigError for a cache that
        cannot be described and for a port that cannot be had.
        """
        located = self._locate(kv_caches)
        settings = self._settings
        core = WorkerConnector(
            settings.config,
            settings.engine(self._incarnation, self._facts),
            self._rank,
            can_leave_unhashed=not settings.prefix_caching,
            device=located.memory.device,
            on_drain=self._drain_flag.set,
        )
        core.register_kv_caches(located.regions, located.memory)
        self._core, self._cleared, self._drafts = core, located.cleared, located.drafts
        # What a step clears is written by the step itself, a window lets go of blocks amid a
        # request, and a draft is behind the step's output
        self.can_begin_ahead = DEFERS_FREES and not (
            located.cleared
            or located.drafts
            or any(each.window is not None or each.is_state for each in located.regions)
        )
        if self._rank == RankId(0, 0):
            _here[self._incarnation] = self
            self._tell_where(core.get_handshake_metadata())

    def _tell_where(self, manifest: RankManifest) -> None:
        """Once for an engine, by its front door: what peers, doctor and drain are told."""
        settings = self._settings
        does = {(True, True): "gives and takes", (True, False): "gives", (False, True): "takes"}
        _log.info(
            "version %s: engine %s %s KV at %s; %d ranks, transport %s",
            vars(sys.modules["kvxfer"])["__version__"],
            settings.engine_id,
            does[settings.can_send, settings.can_receive],
            manifest.control_endpoint,
            settings.tp_size * settings.pp_size,
            settings.config.transport,
        )

    def get_handshake_metadata(self) -> KvxferHandshake:
        """What the scheduler side needs to know of this rank."""
        manifest = self._running().get_handshake_metadata()
        return KvxferHandshake(self._incarnation, self._facts, manifest, self._drain_flag.handle)

    # -------------------------------------------------- one step

    def handle_preemptions(self, metadata: KvxferMetadata) -> None:
        """Offers whose blocks were taken back are over when this returns."""
        self._running().handle_preemptions(metadata.orders)

    def begin_ahead(self, orders: ConnectorMetadata) -> None:
        """Begin loads of the step that is being scheduled. The scheduler's process calls it, which
        is this rank's: of 2 ms until the step is launched, copies need not wait one.
        """
        self._is_ahead, self._still_since_s = True, None
        self._in_flight.begin(orders.loads)
        self._running().begin_ahead(orders)

    def bind_connector_metadata(self, metadata: KvxferMetadata) -> None:
        """Take this step's orders. Without any, the calls for them have nothing to do."""
        if self._has_orders:
            # With a draft vLLM's V1 runner ends a step behind it, so it never ends one of a
            # pipeline stage before the last.
            self.wait_for_save()
            self.clear_connector_metadata()
        self._is_idle_step = metadata.is_idle
        self._wants_answer = metadata.wants_answer
        self._has_orders = metadata.orders != NO_ORDERS
        if not metadata.is_idle or self._has_orders:
            self._still_since_s = None
        if self._has_orders:
            self._in_flight.begin(metadata.orders.loads)
            for load in metadata.orders.loads:
                for group in self._cleared:
                    group.clear(load.block_ids, load.token_hi)
            core = self._running()
            core.bind_connector_metadata(metadata.orders)
            # vLLM's own call comes after the forward from 0.32 on, unless a load is part of the
            # step. What ends meanwhile would be reported a step later.
            core.start_load_kv()
        elif self._is_ahead:
            self._running().start_load_kv()
        self._is_ahead = False

    def wait_for_save(self) -> None:
        """The step's work was launched: offers that it completes open when it has run."""
        if self._has_orders:
            self._running().wait_for_save()

    def clear_connector_metadata(self) -> None:
        if self._has_orders and self._core is not None:
            self._core.clear_connector_metadata()
        self._has_orders = False

    # -------------------------------------------------- what has ended

    def get_transfer_results(self, finished_req_ids: Iterable[str]) -> Any:
        """Requests whose blocks come back, loads that are over, and those of them that failed."""
        core = self._running()
        if self._is_idle_step and not self._settings.is_lockstep and core.has_pending():
            self._wait(core)
        finished = core.collect()
        if finished is NONE_FINISHED:  # as in most steps: the rest takes 15 us of a cold core
            self._has_loaded, self._said, self._failed_block_ids = False, _NOTHING, set()
            return KVConnectorTransferResults()
        reports = {report.request_id: report for report in finished.loads}
        failed = {i: report for i, report in reports.items() if report.reason is not None}
        loads = self._in_flight.end(reports)
        if loads and self._drafts:
            empty = {i for i, each in reports.items() if each.has_empty_draft and i not in failed}
            self._clear_drafts(loads, empty)
        # vLLM knows no end of a load that is part of a step, only blocks of it that are no good.
        in_step = {load.request_id for load in loads if load.in_step}
        self._has_loaded = bool(in_step - failed.keys())
        said = KvxferWorkerMetadata(
            {i: str(report.reason) for i, report in failed.items()},
            {i: report.detail for i, report in failed.items()},
            in_step=tuple(sorted(in_step)),
            must_drain=finished.must_drain,
            found=dict(finished.found),
        )
        self._said = said if said.has_news else _NOTHING
        by_block = in_step if REPORTS_FAILED_REQUESTS else failed.keys()
        self._failed_block_ids = failed_block_ids(
            (load for load in loads if load.request_id in by_block & failed.keys()),
            self._settings.block_tokens,
        )
        return KVConnectorTransferResults(
            finished_sending=set(finished.sent),
            finished_recving=reports.keys() - in_step,
            failed_recving=failed.keys() - in_step,
        )

    def _clear_drafts(self, loads: Iterable[NewLoad], request_ids: AbstractSet[str]) -> None:
        """Before their requests run: on this thread, and on a GPU on the engine's stream."""
        for load in loads:
            if load.request_id in request_ids:
                for group in self._drafts:
                    group.clear_all(load.block_ids, load.token_lo, load.token_hi)

    def _wait(self, core: WorkerConnector) -> None:
        now_s = time.monotonic()
        if self._still_since_s is None:
            self._still_since_s = now_s
        least_s, most_s = _IDLE_WAIT_S
        wait_s = _STILL_SHARE * (now_s - self._still_since_s)
        if core.wait_for_activity(min(max(wait_s, least_s), most_s)):
            self._still_since_s = None

    def get_finished(
        self, finished_req_ids: Iterable[str]
    ) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """All blocks of the loads that failed, each once; only where vLLM has no better way: of
        those that were part of this step, and in versions without failed requests of all.
        """
        found, self._failed_block_ids = self._failed_block_ids, set()
        return found

    def build_connector_worker_meta(self) -> KvxferWorkerMetadata | None:
        """What vLLM has no word for, each once; nothing but an answer where one is wanted."""
        near = self._running().take_near()
        said, self._said = self._said, _NOTHING
        if near is not None:
            said = replace(said, near={str(self._rank): near})
        return said if said is not _NOTHING or self._wants_answer else None

    def get_kv_connector_stats(self) -> KvxferStats | None:
        """What was counted since the last call, or since before the last loads of a step."""
        if self._core is None:
            return None
        is_calm = self._calm.is_now(has_loaded=self._has_loaded)
        stats = self._core.get_kv_connector_stats(with_gauges=is_calm)
        busy_s = self._in_flight.take_busy_s() if stats or self._in_flight.has_news else 0.0
        if stats or busy_s:
            self._to_tell.append((stats, busy_s, time.monotonic()))
        if not is_calm:
            return None
        counted, self._to_tell = self._to_tell, []
        made = [
            of_worker(stats, rank=str(self._rank), busy_s=busy_s, collected_s=collected_s)
            for stats, busy_s, collected_s in counted
        ]
        told = [each for each in made if each is not None]
        return reduce(KvxferStats.aggregate, told) if told else None

    def shutdown(self) -> None:
        """End every offer and load, threads and sockets; of an engine that drains not before the
        open offers were read, or ``drain_timeout_s``. Idempotent.
        """
        core, self._core = self._core, None
        if core is not None:
            core.serve_open(self._settings.config.drain_timeout_s)
            core.shutdown()
        self._drain_flag.close()

    def _running(self) -> WorkerConnector:
        if self._core is None:
            raise ConfigError("connector: expected register_kv_caches before, and no shutdown")
        return self._core


class InFlight:
    """The loads of a rank that were not collected yet, and how long there was one."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._loads: dict[str, NewLoad] = {}
        self._since_s = 0.0
        self._busy_s = 0.0

    @property
    def has_news(self) -> bool:
        """The last one has ended since :meth:`take_busy_s`."""
        return self._busy_s > 0 and not self._loads

    def begin(self, loads: Iterable[NewLoad]) -> None:
        for load in loads:
            if not self._loads:
                self._since_s = self._now()
            self._loads[load.request_id] = load

    def end(self, request_ids: Iterable[str]) -> list[NewLoad]:
        ended = [self._loads.pop(i) for i in request_ids if i in self._loads]
        if ended and not self._loads:
            self._busy_s += self._now() - self._since_s
        return ended

    def take_busy_s(self) -> float:
        """Seconds with a load in flight since the last call."""
        now_s = self._now()
        if self._loads:
            self._busy_s += now_s - self._since_s
            self._since_s = now_s
        busy_s, self._busy_s = self._busy_s, 0.0
        return busy_s


def failed_block_ids(loads: Iterable[NewLoad], block_tokens: int) -> set[int]:
    """Every block that these loads were to fill, in the one group that there is."""
    return {
        block_id
        for load in loads
        for ids in load.block_ids
        for block_id in ids[load.token_lo // block_tokens :]
        if block_id >= 0
    }
