"""What the first rank of an engine has besides: its scheduler side, and the reports of all ranks
merged.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvxfer.connector.aggregator import KVOutputAggregator
from kvxfer.connector.records import KVConnectorStats
from kvxfer.connector.scheduler_side import SchedulerConnector
from kvxfer.transfer.manifest import RankManifest
from tests.distributed.content import Prompt
from tests.distributed.engine import SCRIPT_TIMEOUT_S, Fill, Orders, RankEngine, RankReport
from tests.distributed.world import Half, RankFailed

IDLE_S = 0.005
"""The longest that a driver without news waits before its next step: other ranks may have some."""

NUM_QUIET_STEPS = 3
"""Steps after the last report, in which a repeated one would show."""

FIRST_CHUNK_TOKENS = 48
"""Longer prompts are computed in two steps; three times 16 and twice 24, and less than 64."""

Params = dict[int, dict[str, Any]]
"""kv_transfer_params by number of the request."""


@dataclass(slots=True)
class Request:
    """As much of an engine's request as the connector reads."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    kv_transfer_params: dict[str, Any] | None
    status: str = "FINISHED_LENGTH_CAPPED"
    lora_request: object = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


@dataclass(frozen=True, slots=True)
class Blocks:
    """What was allocated for a request."""

    ids: tuple[int, ...]

    def get_block_ids(self) -> Sequence[Sequence[int]]:
        return (self.ids,)


@dataclass(slots=True)
class Story:
    """What one engine's ranks have reported, and what the aggregator made of it."""

    sent: list[str] = field(default_factory=list)
    received: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    stats: KVConnectorStats = field(default_factory=KVConnectorStats)
    scheduler_stats: KVConnectorStats | None = None
    rank_counts: Counter[str] = field(default_factory=Counter)
    """Sums over the ranks' own counts, made without the aggregator."""
    steps_of: dict[tuple[str, str], list[tuple[int, int]]] = field(default_factory=dict)
    """(step, rank) of each rank's report, by (direction, request)."""
    collectives_s: list[tuple[float, ...]] = field(default_factory=list)
    """By step, on the driver."""
    num_steps: int = 0


class Driver:
    """The scheduler's process of an engine; its methods are called within ``RankEngine.serve``.

    ``has_failed``: another rank, perhaps of the other engine, has: do not wait for it.
    """

    def __init__(
        self,
        engine: RankEngine,
        manifests: Sequence[RankManifest],
        has_failed: Callable[[], bool],
    ) -> None:
        self._engine = engine
        self._has_failed = has_failed
        self.story = Story()
        self.scheduler = SchedulerConnector(
            engine.config,
            engine.identity,
            can_send=engine.seat.team.half is Half.SOURCE,
            can_receive=engine.seat.team.half is Half.SINK,
        )
        self.scheduler.set_xfer_handshake_metadata_pp_aware(
            {(manifest.rank.pp, manifest.rank.tp): manifest for manifest in manifests}
        )
        self._aggregator = KVOutputAggregator.from_connector(
            self.scheduler, world_size=len(manifests)
        )

    # ------------------------------------------------------------------ what an engine does

    def prefill(self, prompts: Sequence[Prompt]) -> Params:
        """Compute the prompts, long ones in two steps, and end them: what a router takes along."""
        requests = {prompt.number: self._arrive(prompt) for prompt in prompts}
        self.step(_first_chunks(prompts, self._engine.shape.block_tokens), _fills(prompts, 0))
        long = [prompt for prompt in prompts if prompt.num_tokens > FIRST_CHUNK_TOKENS]
        if long:
            self.step(
                _last_chunks(long, self._engine.shape.block_tokens),
                _fills(long, FIRST_CHUNK_TOKENS),
            )
        params: Params = {}
        for prompt in prompts:
            keeps, made = self.scheduler.request_finished(
                requests[prompt.number], prompt.source_ids
            )
            assert keeps
            assert made is not None
            params[prompt.number] = made
        return params

    def await_sent(self, prompts: Sequence[Prompt]) -> Story:
        """Step until all blocks are given back."""
        self._until({prompt.source_id for prompt in prompts}, self.story.sent)
        return self._closed()

    def load(
        self, prompts: Sequence[Prompt], params: Params, *, loads_per_step: int, until_ended: bool
    ) -> Story:
        """Step until every load has ended; ``until_ended`` as in :class:`Orders`."""
        for first in range(0, len(prompts), loads_per_step):
            for prompt in prompts[first : first + loads_per_step]:
                self._ask(prompt, params[prompt.number])
            self.step(until_ended=until_ended)
        self._until({prompt.sink_id for prompt in prompts}, self.story.received)
        return self._closed()

    def step(
        self, scheduled: Any = None, fills: tuple[Fill, ...] = (), *, until_ended: bool = False
    ) -> None:
        """One step of all ranks; what they report is merged and given to the scheduler."""
        metadata = self.scheduler.build_connector_meta(scheduled or _scheduled())
        reports = self._engine.step(Orders(metadata, fills, until_ended))
        story = self.story
        story.collectives_s.append(reports[0].collectives_s)
        self._note(reports)
        merged = self._aggregator.aggregate(reports)
        assert merged is not None
        output = merged.kv_connector_output
        assert output is not None
        self.scheduler.update_connector_output(output)
        story.sent += sorted(output.finished_sending or ())
        story.received += sorted(output.finished_recving or ())
        story.failed |= output.failed_recving or {}
        if output.kv_connector_stats is not None:
            story.stats = story.stats.aggregate(output.kv_connector_stats)
        self._check_complete()
        story.num_steps += 1

    # ------------------------------------------------------------------ within

    def _arrive(self, prompt: Prompt) -> Request:
        request = Request(prompt.source_id, prompt.token_ids, {"do_remote_decode": True})
        self.scheduler.on_new_request(request)
        return request

    def _ask(self, prompt: Prompt, params: dict[str, Any]) -> None:
        request = Request(prompt.sink_id, prompt.token_ids, params)
        self.scheduler.on_new_request(request)
        num_tokens, is_async = self.scheduler.get_num_new_matched_tokens(request, prompt.token_lo)
        assert num_tokens == prompt.token_hi - prompt.token_lo
        assert is_async
        self.scheduler.update_state_after_alloc(request, Blocks(prompt.sink_ids), num_tokens)

    def _until(self, expected: set[str], reported: list[str]) -> None:
        deadline_s = time.monotonic() + SCRIPT_TIMEOUT_S
        while not expected <= set(reported):
            if self._has_failed():
                raise RankFailed(
                    f"{self._engine.engine_id}: ended, because another rank has failed"
                )
            if time.monotonic() > deadline_s:
                missing = sorted(expected - set(reported))
                raise AssertionError(
                    f"{self._engine.engine_id}: {missing}: expected reports of all ranks within "
                    f"{SCRIPT_TIMEOUT_S:g} s, got {self.story.steps_of}"
                )
            self._engine.worker.wait_for_activity(IDLE_S)
            self.step()

    def _closed(self) -> Story:
        for _ in range(NUM_QUIET_STEPS):
            self.step()
        assert self._aggregator.num_dropped == 0
        self.story.scheduler_stats = self.scheduler.get_kv_connector_stats()
        return self.story

    def _note(self, reports: Sequence[RankReport]) -> None:
        """Before they are merged: who said what, in which step."""
        for rank, report in enumerate(reports):
            output = report.kv_connector_output
            if output is None:
                continue
            ended = {"sent": output.finished_sending, "received": output.finished_recving}
            for direction, request_ids in ended.items():
                for request_id in request_ids or ():
                    steps = self.story.steps_of.setdefault((direction, request_id), [])
                    steps.append((self.story.num_steps, rank))
            if output.kv_connector_stats is not None:
                self.story.rank_counts.update(output.kv_connector_stats.counts)

    def _check_complete(self) -> None:
        """What the aggregator has let through is what all ranks have reported, each once."""
        all_ranks = list(range(self._engine.shape.tp_size))
        complete: dict[str, list[str]] = {"sent": [], "received": []}
        for (direction, request_id), steps in self.story.steps_of.items():
            ranks = sorted(rank for _, rank in steps)
            assert len(ranks) == len(set(ranks)), f"{request_id}: {direction} twice: {steps}"
            if ranks == all_ranks:
                complete[direction].append(request_id)
        assert sorted(self.story.sent) == sorted(complete["sent"])
        assert sorted(self.story.received) == sorted(complete["received"])


def _scheduled(new: Sequence[Any] = (), cached: Any = None, counts: Any = None) -> Any:
    """A scheduler's output."""
    return SimpleNamespace(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=cached or _cached((), (), ()),
        num_scheduled_tokens=counts or {},
        preempted_req_ids=None,
    )


def _cached(req_ids: Any, new_block_ids: Any, num_computed_tokens: Any) -> Any:
    return SimpleNamespace(
        req_ids=req_ids,
        new_block_ids=new_block_ids,
        num_computed_tokens=num_computed_tokens,
        resumed_req_ids=frozenset(),
    )


def _first_chunks(prompts: Sequence[Prompt], block_tokens: int) -> Any:
    counts = {p.source_id: min(p.num_tokens, FIRST_CHUNK_TOKENS) for p in prompts}
    new = [
        SimpleNamespace(
            req_id=prompt.source_id,
            block_ids=(prompt.source_ids[: -(-counts[prompt.source_id] // block_tokens)],),
            num_computed_tokens=0,
        )
        for prompt in prompts
    ]
    return _scheduled(new=new, counts=counts)


def _last_chunks(prompts: Sequence[Prompt], block_tokens: int) -> Any:
    num_blocks = -(-FIRST_CHUNK_TOKENS // block_tokens)
    cached = _cached(
        [prompt.source_id for prompt in prompts],
        [(prompt.source_ids[num_blocks:],) for prompt in prompts],
        [FIRST_CHUNK_TOKENS for _ in prompts],
    )
    counts = {p.source_id: p.num_tokens - FIRST_CHUNK_TOKENS for p in prompts}
    return _scheduled(cached=cached, counts=counts)


def _fills(prompts: Sequence[Prompt], lo: int) -> tuple[Fill, ...]:
    """What a step computes that begins at token ``lo``."""
    return tuple(
        Fill(
            p.number,
            p.source_ids,
            lo,
            p.num_tokens if lo else min(p.num_tokens, FIRST_CHUNK_TOKENS),
        )
        for p in prompts
    )
