"""A scheduler, a connector that does as it is told, and ranks that answer every step at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from kvxfer.cache.specs import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from kvxfer.connector.contract import BlocksLike, RequestLike, SchedulerOutputLike
from kvxfer.connector.params import Plain
from kvxfer.connector.records import ConnectorMetadata, KVConnectorOutput
from kvxfer.connector.scheduler_side import SchedulerConnector
from kvxfer.engine.config import EngineConfig, Role
from kvxfer.engine.digest import KVDigest
from kvxfer.engine.request import Event, Request
from kvxfer.engine.scheduler import Scheduler
from kvxfer.engine.steps import GroupIds, Sample, SchedulerOutput, StepOutput

BLOCK = 8
EOS = 99
OFFER = {"do_remote_decode": True}


class FakeConnector:
    """Says what it is told to, and remembers what it was told."""

    def __init__(self) -> None:
        self.offered_tokens: dict[str, int] = {}
        self.in_step = False
        self.finding: set[str] = set()
        self.kept: set[str] = set()
        self.params: dict[str, dict[str, Any]] = {}
        self.asked: list[tuple[str, int]] = []
        self.allocated: list[tuple[str, GroupIds, int]] = []
        self.finished: list[tuple[str, str]] = []
        self.ended: dict[str, GroupIds] = {}
        self.withdrawn: list[str] = []
        self.has_more = False

    @property
    def handed(self) -> dict[str, GroupIds]:
        """The tables of the requests that load."""
        return {name: tables for name, tables, num_external in self.allocated if num_external}

    def on_new_request(self, request: RequestLike) -> None:
        pass

    def withdraw_offer(self, request_id: str) -> None:
        self.withdrawn.append(request_id)

    def get_num_new_matched_tokens(
        self, request: RequestLike, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self.asked.append((request.request_id, num_computed_tokens))
        if request.request_id in self.finding:
            return None, False
        more = max(0, self.offered_tokens.get(request.request_id, 0) - num_computed_tokens)
        return more, more > 0 and not self.in_step

    def update_state_after_alloc(
        self, request: RequestLike, blocks: BlocksLike, num_external_tokens: int
    ) -> None:
        tables = tuple(map(tuple, blocks.get_block_ids()))
        self.allocated.append((request.request_id, tables, num_external_tokens))

    def request_finished_all_groups(
        self, request: RequestLike, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        name = request.request_id
        self.finished.append((name, cast("Request", request).status.name))
        self.ended[name] = tuple(map(tuple, block_ids))
        is_kept = name in self.kept or request.kv_transfer_params is not None
        return is_kept, self.params.get(name)

    def build_connector_meta(self, scheduler_output: SchedulerOutputLike) -> ConnectorMetadata:
        self.has_more = False
        return ConnectorMetadata()

    def update_connector_output(self, output: KVConnectorOutput) -> dict[str, Plain]:
        for request_id in output.finished_recving or ():
            self.offered_tokens.pop(request_id, None)  # never asked for twice
        self.finding.difference_update(output.found or ())
        return {}

    def has_orders(self) -> bool:
        return self.has_more


def spec(window: int | None, block_size: int = BLOCK) -> FullAttentionSpec | SlidingWindowSpec:
    """Of a layer with the window, or one that sees everything."""
    shape: dict[str, Any] = {"block_size": block_size, "num_kv_heads": 1, "head_size": 1}
    if window is None:
        return FullAttentionSpec(**shape, dtype="float32")
    return SlidingWindowSpec(**shape, dtype="float32", sliding_window=window)


def cache(config: EngineConfig, windows: Sequence[int | None] = (None,)) -> KVCacheConfig:
    """A group for each of the windows."""
    groups = [KVCacheGroupSpec([str(each)], spec(each, config.block_size)) for each in windows]
    return KVCacheConfig(config.num_blocks, [], groups)


def config(**changes: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "role": Role.ALONE,
        "engine_id": "e",
        "block_size": BLOCK,
        "num_blocks": 11,  # ten to use
        "max_model_len": 80,
    }
    return EngineConfig(**{**values, **changes})


class Rig:
    """``windows``: of each group. Samples are 1, 2, and so on, if not said otherwise."""

    def __init__(
        self,
        *,
        with_connector: bool = False,
        windows: Sequence[int | None] = (None,),
        **changes: Any,
    ) -> None:
        self.connector = FakeConnector()
        connector = cast("SchedulerConnector", self.connector) if with_connector else None
        self.config = config(**changes)
        plan = cache(self.config, windows)
        self.scheduler = Scheduler(self.config, connector, plan, eos_token_ids=(EOS,))
        self.requests: dict[str, Request] = {}
        self.next_token = 1

    def add(
        self, name: str, tokens: Sequence[int], max_new: int = 1, *, is_offered: bool = False
    ) -> Request:
        params = OFFER if is_offered else None
        self.requests[name] = request = Request(name, tuple(tokens), max_new, params)
        self.scheduler.add(request)
        return request

    def step(
        self,
        output: KVConnectorOutput | None = None,
        digests: dict[str, KVDigest] | None = None,
        token: int | None = None,
    ) -> tuple[SchedulerOutput, list[Event]]:
        step = self.scheduler.schedule()
        samples = []
        for name, num_new in step.num_scheduled_tokens.items():
            request = self.requests[name]
            if request.num_computed_tokens + num_new == request.num_tokens:
                samples.append(Sample(name, self.next_token if token is None else token, 0.5))
                self.next_token += 1
        outputs = [
            StepOutput(samples=tuple(samples), kv_connector_output=output, digests=digests or {})
        ]
        return step, self.scheduler.update(step, outputs)

    @property
    def free(self) -> int:
        return self.scheduler.num_free_blocks

    @property
    def num_used(self) -> int:
        return self.config.num_blocks - 1 - self.free
