"""Continuous batching over a paged cache with prefix caching; decides, and touches no tensor or
socket.

All blocks that a request can need are promised at admission and taken step by step, so nothing is
ever preempted. A load's blocks are given back only after every rank has reported it, an offer's
only after every rank has reported it sent.

Steps are synchronous: :meth:`Scheduler.schedule` is called only after the outputs of the step
before went through :meth:`Scheduler.update`. So every block that is free or dropped when a step is
scheduled was last written by a step that is complete, and may be given to a load in this step's
metadata: the ranks begin it before they compute, and nothing that they compute writes to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kvxfer.cache.kv_cache_manager import CacheHit
from kvxfer.cache.kv_events import KVCacheEvent
from kvxfer.cache.manager import NO_BLOCK
from kvxfer.cache.specs import KVCacheConfig
from kvxfer.connector.params import Plain
from kvxfer.connector.records import KVConnectorOutput
from kvxfer.connector.scheduler_side import SchedulerConnector
from kvxfer.engine.config import EngineConfig, OnLoadFailure, Role
from kvxfer.engine.request import Event, Finished, NewToken, Request, Status
from kvxfer.engine.request_blocks import RequestBlocks
from kvxfer.engine.steps import (
    CachedRequestData,
    DigestOrder,
    GroupIds,
    NewRequestData,
    Sample,
    SchedulerOutput,
    StepOutput,
)


@dataclass(frozen=True, slots=True)
class _Share:
    """A request's part of a step: how many tokens, and the blocks that its tables get for them."""

    request: Request
    num_new_tokens: int
    new_block_ids: GroupIds


@dataclass(frozen=True, slots=True)
class _BlockTables:
    """A request's block tables by group, as the connector asks for them."""

    block_ids: GroupIds

    def get_block_ids(self) -> GroupIds:
        return self.block_ids


class Scheduler:
    """Requests of one engine.

    Args:
        connector: None for an engine that runs alone.
        kv_cache_config: rank 0's cache; groups and number of blocks are the same on all ranks.
        eos_token_ids: tokens that end a request; they are part of its output.
    """

    def __init__(
        self,
        config: EngineConfig,
        connector: SchedulerConnector | None,
        kv_cache_config: KVCacheConfig,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self._config = config
        self._connector = connector
        self._eos_token_ids = frozenset(eos_token_ids)
        self._blocks = RequestBlocks(config, kv_cache_config)
        self._live: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._loading: dict[str, Request] = {}
        self._running: list[Request] = []
        # Those of the running ones whose KV is loaded by the very step that computes with it.
        self._loading_in_step: set[str] = set()
        # Finished requests whose blocks something may still read (offers) or write (aborted loads).
        self._held_offers: set[str] = set()
        self._draining_loads: set[str] = set()
        self._undigested: dict[str, Finished] = {}
        # What the next step tells the workers besides tokens to compute.
        self._finished: set[str] = set()
        self._digest_orders: list[DigestOrder] = []
        # The head of the queue does not fit now; without this an idle engine would try for ever.
        self._is_blocked = False

    @property
    def num_free_blocks(self) -> int:
        return self._blocks.num_free_blocks

    @property
    def is_empty(self) -> bool:
        """No request lives, and nothing is kept of one that has ended."""
        return not self._live

    @property
    def prefix_hit_rate(self) -> float:
        return self._blocks.prefix_hit_rate

    def take_events(self) -> list[KVCacheEvent]:
        """Names that came and went since, for a router; nothing unless events are enabled."""
        return self._blocks.take_events()

    def has_work(self) -> bool:
        """Something is to be computed or told to the workers now."""
        return bool(
            (self._waiting and not self._is_blocked)
            or self._running
            or self._finished
            or self._digest_orders
            or (self._connector is not None and self._connector.has_orders())
        )

    def add(self, request: Request) -> None:
        """A new request. Raises OutOfBlocks if it can never fit, ValueError for an id in use."""
        if request.request_id in self._live:
            raise ValueError(f"request {request.request_id}: expected a new id, got one in use")
        plain = self._shorten(request)
        self._blocks.add(request)
        self._live[request.request_id] = request
        self._waiting.append(request)
        if self._connector is not None:
            request.plain = plain or self._connector.on_new_request(request)

    def _shorten(self, request: Request) -> Plain | None:
        """A state moves without the last token of its prompt, which the sink computes: drop it, and
        compute no further. Why the request is not offered, where that leaves nothing.
        """
        if not (self._connector and self._blocks.keeps_states and self._blocks.is_offered(request)):
            return None
        if request.num_prompt_tokens < 2:
            plain = Plain("state", "its prompt has one token")
            self._connector.refuse_request(request, plain.reason, plain.detail)
            request.kv_transfer_params = None
            return plain
        request.prompt_token_ids = request.prompt_token_ids[:-1]
        request.max_new_tokens = 1
        return None

    def abort(self, request_id: str) -> list[Event]:
        """End a request now, wherever it stands; nothing happens when it is not there any more. The
        KV of one that has finished is not offered any more.
        """
        events: list[Event] = []
        request = self._live.get(request_id)
        if request is not None and not request.status.is_finished:
            self._finish(request, Status.FINISHED_ABORTED, events)
        elif self._connector is not None and self.is_held(request_id):
            self._connector.withdraw_offer(request_id)
        return events

    def is_held(self, request_id: str) -> bool:
        return request_id in self._held_offers

    # ------------------------------------------------------------------ one step

    def schedule(self) -> SchedulerOutput:
        """Admit what fits, and give every running request its share of the step's tokens."""
        self._admit()
        shares = self._shares()
        new = [share.request for share in shares if share.request.num_told_tokens is None]
        known = [share for share in shares if share.request.num_told_tokens is not None]
        output = SchedulerOutput(
            scheduled_new_reqs=tuple(map(self._new_data, new)),
            scheduled_cached_reqs=_cached_data(known),
            num_scheduled_tokens={s.request.request_id: s.num_new_tokens for s in shares},
            finished_req_ids=frozenset(self._finished),
            # What a load fills was allocated at admission and is not among them: the load may be
            # writing when the ranks zero.
            zero_block_ids=tuple(
                block_id
                for share in shares
                for group in share.new_block_ids
                for block_id in group
                if block_id != NO_BLOCK
            ),
            digests=tuple(self._digest_orders),
        )
        self._finished.clear()
        self._digest_orders.clear()
        if self._connector is None:
            return output
        metadata = self._connector.build_connector_meta(output)
        return msgspec.structs.replace(output, kv_connector_metadata=metadata)

    def update(self, step: SchedulerOutput, outputs: Sequence[StepOutput]) -> list[Event]:
        """What the ranks returned; ``outputs[0]`` has samples and aggregated connector output."""
        events: list[Event] = []
        self._take_digests(outputs, events)
        if outputs[0].kv_connector_output is not None:
            self._update_transfers(outputs[0].kv_connector_output, events)
        for request_id, num_new in step.num_scheduled_tokens.items():
            request = self._live.get(request_id)
            if request is None or request.status is not Status.RUNNING:
                continue  # aborted while the step ran
            request.num_computed_tokens += num_new
            self._blocks.computed(request)
        for sample in outputs[0].samples:
            self._sampled(sample, events)
        return events

    def _new_data(self, request: Request) -> NewRequestData:
        request.num_told_tokens = request.num_prompt_tokens
        return NewRequestData(
            req_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            block_ids=self._blocks.table(request),
            num_computed_tokens=request.num_computed_tokens,
        )

    def _shares(self) -> list[_Share]:
        budget = self._config.max_num_batched_tokens
        shares: list[_Share] = []
        for request in self._running:
            num_new = min(request.num_tokens - request.num_computed_tokens, budget)
            num_new = self._blocks.cut_step(request.num_computed_tokens, num_new)
            if num_new > 0:
                new_ids = self._blocks.grow(request, num_new)
                shares.append(_Share(request, num_new, new_ids))
                budget -= num_new
        return shares

    # ------------------------------------------------------------------ admission

    def _admit(self) -> None:
        """The oldest first; one that waits for another's load lets others pass."""
        self._is_blocked = False
        for request in list(self._waiting):
            num_live = len(self._running) + len(self._loading)
            if num_live >= self._config.max_num_seqs:
                break
            hit, (num_external, is_async) = self._find(request)
            if num_external is None:
                continue
            if not self._admit_one(request, hit, num_external, is_async=is_async):
                break
            self._waiting.remove(request)
        self._is_blocked = bool(self._waiting)

    def _admit_one(
        self, request: Request, hit: CacheHit, num_external: int, *, is_async: bool
    ) -> bool:
        if not self._blocks.admit(request, hit, num_external):
            return False
        request.num_cached_tokens = request.num_computed_tokens = hit.num_tokens
        if num_external:
            request.failure = None  # of a load before this one
        if request.failure is None:
            # After a failed load it stays what was to be loaded.
            request.num_external_tokens = num_external
        if self._connector is not None:
            blocks = _BlockTables(self._blocks.table(request))
            plain = self._connector.update_state_after_alloc(request, blocks, num_external)
            request.plain = request.plain or plain
        if num_external and is_async:
            request.status = Status.WAITING_FOR_REMOTE_KVS
            self._loading[request.request_id] = request
            return True
        if num_external:
            self._loading_in_step.add(request.request_id)
            request.num_computed_tokens += num_external
        self._run(request)
        return True

    def _find(self, request: Request) -> tuple[CacheHit, tuple[int | None, bool]]:
        """What is cached here of the prompt, how many tokens after it a load can bring, and whether
        that is asynchronous; None: another request's load brings them.
        """
        hit = self._blocks.find_hit(request, request.num_prompt_tokens)
        if hit.num_tokens < request.num_prompt_tokens:
            return hit, self._num_external_tokens(request, hit.num_tokens)
        # The last token must be computed, to sample from. A shorter hit is another one, not a part
        # of this: a group with a window needs older blocks for it, which may be gone.
        hit = self._blocks.find_hit(request, request.num_prompt_tokens - 1)
        external = self._num_external_tokens(request, hit.num_tokens)
        if request.num_prompt_tokens - hit.num_tokens <= self._config.block_size:
            external = 0, False  # the last block is computed again: nothing is worth moving
        return hit, external

    def _num_external_tokens(
        self, request: Request, num_hit_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens after the hit that the connector can load; it goes by the last question."""
        if self._connector is None:
            return 0, False
        return self._connector.get_num_new_matched_tokens(request, num_hit_tokens)

    def _run(self, request: Request) -> None:
        request.status = Status.RUNNING
        self._running.append(request)
        if self._config.digests and self._config.role in {Role.DECODE, Role.BOTH}:
            self._order_digest(request, request.num_computed_tokens)

    def _order_digest(self, request: Request, num_tokens: int) -> None:
        table = self._blocks.table(request)
        self._digest_orders.append(DigestOrder(request.request_id, table, num_tokens))

    # ------------------------------------------------------------------ what came back

    def _update_transfers(self, output: KVConnectorOutput, events: list[Event]) -> None:
        if self._connector is not None:
            missed = self._connector.update_connector_output(output)
            for request_id in missed.keys() & self._live.keys():
                self._live[request_id].plain = missed[request_id]
            if output.found:
                self._is_blocked = False  # who was answered "ask again" may have its load now
        for report in output.kv_connector_stats.loads if output.kv_connector_stats else ():
            if report.request_id in self._live:
                self._live[report.request_id].reports.append(report)
        failed = output.failed_recving or {}
        incomplete = output.incomplete_blocks or {}
        for request_id in output.finished_recving or ():
            self._is_blocked = False  # another request may have waited for it
            if request_id in self._draining_loads:
                self._draining_loads.remove(request_id)
                self._forget(request_id)
            elif request_id in self._loading:
                request = self._loading.pop(request_id)
                if request_id in failed:
                    self._load_failed(request, failed[request_id], events)
                else:
                    request.num_computed_tokens += request.num_external_tokens
                    self._blocks.loaded(request, incomplete.get(request_id, ()))
                    self._run(request)
            elif request_id in self._loading_in_step:
                self._loading_in_step.remove(request_id)
                request = self._live[request_id]
                if request_id in failed:
                    self._load_failed(request, failed[request_id], events)
                else:
                    self._blocks.loaded(request, incomplete.get(request_id, ()))
        for request_id in output.finished_sending or ():
            if request_id in self._held_offers:
                self._held_offers.remove(request_id)
                self._forget(request_id)

    def _load_failed(self, request: Request, failure: str, events: list[Event]) -> None:
        request.failure = failure
        if self._config.on_load_failure is OnLoadFailure.FAIL:
            self._finish(request, Status.FINISHED_ERROR, events)
            return
        # Its tables begin where the load's windows did; computing it needs what lies before. The
        # connector does not offer the load again.
        self._blocks.free(request.request_id)
        if request.status is Status.RUNNING:
            self._running.remove(request)
            request.num_told_tokens = None
            self._finished.add(request.request_id)  # the ranks learn of it anew
        request.num_computed_tokens = 0
        request.status = Status.WAITING
        self._waiting.appendleft(request)
        self._is_blocked = False

    def _sampled(self, sample: Sample, events: list[Event]) -> None:
        request = self._live.get(sample.req_id)
        if request is None or request.status is not Status.RUNNING:
            return  # aborted while the step ran
        request.output_token_ids.append(sample.token_id)
        events.append(NewToken(sample.req_id, sample.token_id, sample.logit_gap))
        if sample.token_id in self._eos_token_ids:
            self._finish(request, Status.FINISHED_STOPPED, events)
        elif len(request.output_token_ids) >= request.max_new_tokens:
            self._finish(request, Status.FINISHED_LENGTH_CAPPED, events)

    def _take_digests(self, outputs: Sequence[StepOutput], events: list[Event]) -> None:
        for request_id in outputs[0].digests:
            digests = tuple(output.digests[request_id] for output in outputs)
            finished = self._undigested.pop(request_id, None)
            if finished is not None:
                finished.request.digests = digests
                events.append(finished)
            elif request_id in self._live:
                self._live[request_id].digests = digests

    # ------------------------------------------------------------------ the end of a request

    def _finish(self, request: Request, status: Status, events: list[Event]) -> None:
        self._is_blocked = False
        was, request.status = request.status, status
        if was is Status.WAITING:
            self._waiting.remove(request)
        elif was is Status.RUNNING:
            self._running.remove(request)
        if request.num_told_tokens is not None:
            self._finished.add(request.request_id)
        keep, params = False, None
        if self._connector is not None:
            keep, params = self._connector.request_finished_all_groups(
                request, self._blocks.table(request)
            )
        is_loading = self._loading.pop(request.request_id, None) is not None
        if is_loading:
            self._draining_loads.add(request.request_id)
        elif keep:
            self._held_offers.add(request.request_id)
        if is_loading or keep:
            self._blocks.keep(request)
        finished = Finished(request, params)
        if self._config.digests and params is not None:
            self._undigested[request.request_id] = finished
            self._order_digest(request, request.num_prompt_tokens)
        else:
            events.append(finished)
        if not (is_loading or keep):
            self._forget(request.request_id)

    def _forget(self, request_id: str) -> None:
        self._is_blocked = False
        self._blocks.free(request_id)
        del self._live[request_id]


def _cached_data(known: Sequence[_Share]) -> CachedRequestData:
    """Of requests that the workers know only what has changed: it is marked as told."""
    return CachedRequestData(
        req_ids=tuple(share.request.request_id for share in known),
        new_block_ids=tuple(
            share.new_block_ids if any(share.new_block_ids) else None for share in known
        ),
        num_computed_tokens=tuple(share.request.num_computed_tokens for share in known),
        new_token_ids=tuple(_take_untold(share.request) for share in known),
    )


def _take_untold(request: Request) -> tuple[int, ...]:
    """Tokens sampled since the workers were last told, now told."""
    told = request.num_told_tokens or 0
    request.num_told_tokens = request.num_tokens
    return tuple(request.output_token_ids[told - request.num_prompt_tokens :])
