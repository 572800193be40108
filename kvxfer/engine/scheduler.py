"""Continuous batching over a paged cache with prefix caching; decides, and touches no tensor or
socket.

Blocks for the prompt and all new tokens are reserved at admission, so nothing is ever preempted. A
request's blocks are
hashed, and so found by others, only after their KV is computed or its load was accepted by every
rank. A load's blocks are
given back only after every rank has reported it, an offer's only after every rank has reported it
sent.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from kvxfer.cache.block_pool import BlockPool
from kvxfer.cache.hashing import hash_request_tokens, none_hash, sha256
from kvxfer.cache.manager import FullAttentionManager
from kvxfer.connector.records import KVConnectorOutput, LoadReport
from kvxfer.connector.scheduler_side import SchedulerConnector
from kvxfer.engine.config import EngineConfig, OnLoadFailure, Role
from kvxfer.engine.digest import KVDigest
from kvxfer.engine.request import Request, Status
from kvxfer.engine.steps import (
    CachedRequestData,
    DigestOrder,
    NewRequestData,
    Sample,
    SchedulerOutput,
    StepOutput,
)
from kvxfer.errors import OutOfBlocks

log = logging.getLogger("kvxfer.engine")


@dataclass(frozen=True, slots=True)
class NewToken:
    """A request has one more token."""

    request_id: str
    token_id: int
    logit_gap: float


@dataclass(frozen=True, slots=True)
class Finished:
    """A request ended. ``digest`` only where the engine digests, by rank."""

    request: Request
    kv_transfer_params: dict[str, Any] | None
    loads: tuple[LoadReport, ...]
    digests: tuple[KVDigest, ...] = ()


@dataclass(slots=True)
class _Live:
    """What the scheduler keeps of a request beside the request itself."""

    request: Request
    is_known_to_workers: bool = False
    num_tokens_told: int = 0
    reports: list[LoadReport] = field(default_factory=list)
    digests: tuple[KVDigest, ...] = ()


@dataclass(slots=True)
class _Orders:
    """What the next step carries besides tokens to compute."""

    finished: set[str] = field(default_factory=set)
    zeroed: list[int] = field(default_factory=list)
    digests: list[DigestOrder] = field(default_factory=list)


class Scheduler:
    """Requests of one engine.

    Args:
        connector: None for an engine that runs alone.
        eos_token_ids: tokens that end a request; they are part of its output.
    """

    def __init__(
        self,
        config: EngineConfig,
        connector: SchedulerConnector | None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self._config = config
        self._connector = connector
        self._eos_token_ids = frozenset(eos_token_ids)
        self._pool = BlockPool(config.num_blocks, config.enable_prefix_caching)
        self._manager = FullAttentionManager(self._pool, config.block_size)
        self._hash_root = none_hash(config.kv.hash_seed_bytes)
        self._live: dict[str, _Live] = {}
        self._waiting: deque[Request] = deque()
        self._loading: dict[str, Request] = {}
        self._running: list[Request] = []
        # Finished requests whose blocks something may still read (offers) or write (aborted loads).
        self._held_offers: set[str] = set()
        self._draining_loads: set[str] = set()
        self._undigested: dict[str, Finished] = {}
        self._orders = _Orders()
        # The head of the queue does not fit now; without this an idle engine would try for ever.
        self._is_blocked = False

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nothing uses; cached ones count as free."""
        return self._pool.num_free_blocks

    def has_work(self) -> bool:
        """Something is to be computed or told to the workers now."""
        return bool(
            (self._waiting and not self._is_blocked)
            or self._running
            or self._orders != _Orders()
            or (self._connector is not None and self._connector.has_orders())
        )

    def add(self, request: Request) -> None:
        """A new request. Raises OutOfBlocks when it can never fit, ValueError for an id that is in
        use.
        """
        if request.request_id in self._live:
            raise ValueError(f"request {request.request_id}: expected a new id, got one in use")
        num_tokens = request.num_prompt_tokens + request.max_new_tokens
        num_needed = self._manager.blocks_needed(num_tokens)
        num_total = self._config.num_blocks - 1
        if num_needed > num_total or num_tokens > self._config.max_model_len:
            raise OutOfBlocks(
                f"request {request.request_id}: {num_tokens} tokens need {num_needed} blocks of "
                f"{self._config.block_size}, the cache has {num_total} and requests may have "
                f"{self._config.max_model_len} tokens; raise num_blocks or max_model_len"
            )
        if self._config.enable_prefix_caching:
            self._name_full_blocks(request)
        self._live[request.request_id] = _Live(request)
        self._waiting.append(request)
        if self._connector is not None:
            self._connector.on_new_request(request)

    def abort(self, request_id: str) -> list[NewToken | Finished]:
        """End a request now, wherever it stands; nothing happens when it is not there any more."""
        events: list[NewToken | Finished] = []
        live = self._live.get(request_id)
        if live is not None and not live.request.status.is_finished:
            self._finish(live, Status.FINISHED_ABORTED, events)
        return events

    # ------------------------------------------------------------------ one step

    def schedule(self) -> SchedulerOutput:
        """Admit what fits, and give every running request its share of the step's tokens."""
        self._admit()
        budget = self._config.max_num_batched_tokens
        counts: dict[str, int] = {}
        for request in self._running:
            num_new = min(request.num_tokens - request.num_computed_tokens, budget)
            if num_new > 0:
                counts[request.request_id] = num_new
                budget -= num_new
        new, cached = self._request_data(counts)
        orders, self._orders = self._orders, _Orders()
        output = SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=counts,
            finished_req_ids=frozenset(orders.finished),
            zero_block_ids=tuple(orders.zeroed),
            digests=tuple(orders.digests),
        )
        if self._connector is None:
            return output
        metadata = self._connector.build_connector_meta(output)
        return msgspec.structs.replace(output, kv_connector_metadata=metadata)

    def update(
        self, step: SchedulerOutput, outputs: Sequence[StepOutput]
    ) -> list[NewToken | Finished]:
        """What the ranks returned; ``outputs[0]`` carries the samples and the aggregated connector
        output.
        """
        events: list[NewToken | Finished] = []
        self._take_digests(outputs, events)
        if outputs[0].kv_connector_output is not None:
            self._update_transfers(outputs[0].kv_connector_output, events)
        for request_id, num_new in step.num_scheduled_tokens.items():
            live = self._live.get(request_id)
            if live is None or live.request.status is not Status.RUNNING:
                continue  # aborted while the step ran
            request = live.request
            request.num_computed_tokens += num_new
            if self._config.enable_prefix_caching:
                self._extend_hashes(request)
                self._manager.cache_blocks(
                    request_id, request.block_hashes, request.num_computed_tokens
                )
        for sample in outputs[0].samples:
            self._sampled(sample, events)
        return events

    def _request_data(
        self, counts: dict[str, int]
    ) -> tuple[tuple[NewRequestData, ...], CachedRequestData]:
        new: list[NewRequestData] = []
        known: list[_Live] = []
        for request_id in counts:
            live = self._live[request_id]
            if live.is_known_to_workers:
                known.append(live)
                continue
            live.is_known_to_workers = True
            live.num_tokens_told = live.request.num_prompt_tokens
            new.append(
                NewRequestData(
                    req_id=request_id,
                    prompt_token_ids=live.request.prompt_token_ids,
                    block_ids=(tuple(self._manager.block_ids(request_id)),),
                    num_computed_tokens=live.request.num_computed_tokens,
                )
            )
        cached = CachedRequestData(
            req_ids=tuple(live.request.request_id for live in known),
            new_block_ids=(None,) * len(known),  # all blocks are reserved at admission
            num_computed_tokens=tuple(live.request.num_computed_tokens for live in known),
            new_token_ids=tuple(_untold(live) for live in known),
        )
        return tuple(new), cached

    # ------------------------------------------------------------------ admission

    def _admit(self) -> None:
        self._is_blocked = False
        while self._waiting:
            num_live = len(self._running) + len(self._loading)
            if num_live >= self._config.max_num_seqs or not self._admit_one(self._waiting[0]):
                self._is_blocked = True
                return
            self._waiting.popleft()

    def _admit_one(self, request: Request) -> bool:
        block_size = self._config.block_size
        hit = self._manager.find_longest_cache_hit(request.block_hashes, request.num_prompt_tokens)
        num_external = 0
        if self._connector is not None:
            # The whole hit is shown, also where its last block will be computed again to sample
            # from: a prompt that is fully cached needs nothing from elsewhere.
            found, _ = self._connector.get_num_new_matched_tokens(request, len(hit) * block_size)
            num_external = found or 0
        if num_external == 0:
            hit = hit[: (request.num_prompt_tokens - 1) // block_size]
        new_ids = self._manager.allocate(
            request.request_id, request.num_prompt_tokens + request.max_new_tokens, hit
        )
        if new_ids is None:
            return False
        request.num_cached_tokens = request.num_computed_tokens = len(hit) * block_size
        request.num_external_tokens = num_external
        if self._connector is not None:
            blocks = _Blocks(self._manager.block_ids(request.request_id))
            self._connector.update_state_after_alloc(request, blocks, num_external)
        # Blocks that a load will fill are not zeroed: the load may be writing by then.
        num_loaded = self._manager.blocks_needed(num_external)
        self._orders.zeroed += new_ids[num_loaded:]
        if num_external:
            request.status = Status.WAITING_FOR_REMOTE_KVS
            self._loading[request.request_id] = request
        else:
            self._run(request)
        return True

    def _run(self, request: Request) -> None:
        request.status = Status.RUNNING
        self._running.append(request)
        if self._config.digests and self._config.role in {Role.DECODE, Role.BOTH}:
            self._order_digest(request, request.num_computed_tokens)

    def _order_digest(self, request: Request, num_tokens: int) -> None:
        ids = tuple(self._manager.block_ids(request.request_id))
        self._orders.digests.append(DigestOrder(request.request_id, ids, num_tokens))

    # ------------------------------------------------------------------ what came back

    def _update_transfers(
        self, output: KVConnectorOutput, events: list[NewToken | Finished]
    ) -> None:
        if self._connector is not None:
            self._connector.update_connector_output(output)
        for report in output.kv_connector_stats.loads if output.kv_connector_stats else ():
            live = self._live.get(report.request_id)
            if live is not None:
                live.reports.append(report)
        failed = output.failed_recving or {}
        for request_id in output.finished_recving or ():
            if request_id in self._draining_loads:
                self._draining_loads.remove(request_id)
                self._free(request_id)
            elif request_id in self._loading:
                self._loaded(self._loading.pop(request_id), failed.get(request_id), events)
        for request_id in output.finished_sending or ():
            if request_id in self._held_offers:
                self._held_offers.remove(request_id)
                self._free(request_id)

    def _loaded(
        self, request: Request, failure: str | None, events: list[NewToken | Finished]
    ) -> None:
        if failure is None:
            request.num_computed_tokens += request.num_external_tokens
            if self._config.enable_prefix_caching:
                self._manager.cache_blocks(
                    request.request_id, request.block_hashes, request.num_computed_tokens
                )
            self._run(request)
            return
        request.failure = failure
        reports = self._live[request.request_id].reports
        details = {
            report.detail for report in reports if report.reason is not None and report.detail
        }
        log.warning(
            "request %s: KV not loaded: %s",
            *(request.request_id, ": ".join([failure, *sorted(details)])),
        )
        if self._config.on_load_failure is OnLoadFailure.FAIL:
            self._finish(self._live[request.request_id], Status.FINISHED_ERROR, events)
        else:
            self._run(request)

    def _sampled(self, sample: Sample, events: list[NewToken | Finished]) -> None:
        live = self._live.get(sample.req_id)
        if live is None or live.request.status is not Status.RUNNING:
            return  # aborted while the step ran
        request = live.request
        request.output_token_ids.append(sample.token_id)
        events.append(NewToken(sample.req_id, sample.token_id, sample.logit_gap))
        if sample.token_id in self._eos_token_ids:
            self._finish(live, Status.FINISHED_STOPPED, events)
        elif len(request.output_token_ids) >= request.max_new_tokens:
            self._finish(live, Status.FINISHED_LENGTH_CAPPED, events)

    def _take_digests(
        self, outputs: Sequence[StepOutput], events: list[NewToken | Finished]
    ) -> None:
        for request_id in outputs[0].digests:
            digests = tuple(output.digests[request_id] for output in outputs)
            finished = self._undigested.pop(request_id, None)
            if finished is not None:
                events.append(replace(finished, digests=digests))
            elif request_id in self._live:
                self._live[request_id].digests = digests

    def _extend_hashes(self, request: Request) -> None:
        # Only when a block has become full: asked for every token, the prompt would be copied for
        # each.
        if (len(request.block_hashes) + 1) * self._config.block_size <= request.num_computed_tokens:
            self._name_full_blocks(request)

    def _name_full_blocks(self, request: Request) -> None:
        request.block_hashes += hash_request_tokens(
            sha256,
            self._config.block_size,
            request,
            root=self._hash_root,
            known=request.block_hashes,
        )

    # ------------------------------------------------------------------ the end of a request

    def _finish(self, live: _Live, status: Status, events: list[NewToken | Finished]) -> None:
        self._is_blocked = False
        request = live.request
        was = request.status
        request.status = status
        if was is Status.WAITING:
            self._waiting.remove(request)
        elif was is Status.RUNNING:
            self._running.remove(request)
        if live.is_known_to_workers:
            self._orders.finished.add(request.request_id)
        block_ids = [] if was is Status.WAITING else self._manager.block_ids(request.request_id)
        keep, params = False, None
        if self._connector is not None:
            keep, params = self._connector.request_finished(request, block_ids)
        finished = Finished(request, params, tuple(live.reports), live.digests)
        if self._config.digests and params is not None:
            self._undigested[request.request_id] = finished
            self._order_digest(request, request.num_prompt_tokens)
        else:
            events.append(finished)
        if request.request_id in self._loading:
            del self._loading[request.request_id]
            self._draining_loads.add(request.request_id)
        elif keep:
            self._held_offers.add(request.request_id)
        elif block_ids:
            self._free(request.request_id)
        else:
            del self._live[request.request_id]

    def _free(self, request_id: str) -> None:
        self._is_blocked = False
        self._manager.free(request_id)
        del self._live[request_id]


@dataclass(frozen=True, slots=True)
class _Blocks:
    """A request's block table as the connector reads it."""

    block_ids: list[int]

    def get_block_ids(self) -> tuple[list[int], ...]:
        """One group."""
        return (self.block_ids,)


def _untold(live: _Live) -> tuple[int, ...]:
    """Tokens sampled since the workers were last told, now told."""
    told, live.num_tokens_told = live.num_tokens_told, live.request.num_tokens
    return tuple(live.request.output_token_ids[told - live.request.num_prompt_tokens :])
