"""Random histories of an engine's scheduler with ranks that write down what each slot holds.

The ranks zero what the step says, load what the connector was given, and compute. Every token that
a computation reads must be there, right; a new block that no load fills must have been zeroed; no
block that a load may write is zeroed or written by anything else; at the end all blocks are free.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from kvxfer.connector.contract import BlocksLike, RequestLike, SchedulerOutputLike
from kvxfer.connector.params import Plain
from kvxfer.connector.records import ConnectorMetadata, KVConnectorOutput
from kvxfer.connector.scheduler_side import SchedulerConnector
from kvxfer.engine.config import EngineConfig, OnLoadFailure, Role
from kvxfer.engine.request import Request
from kvxfer.engine.scheduler import Scheduler
from kvxfer.engine.steps import GroupIds, Sample, SchedulerOutput, StepOutput
from kvxfer.errors import OutOfBlocks
from tests.engine.scheduler_rig import BLOCK, OFFER, cache

WINDOWS = {"full": (None,), "window": (12,), "hybrid": (None, 12), "three": (30, None, 9)}
Slot = tuple[int, tuple[int, ...]] | str


def first_seen(window: int | None, token: int) -> int:
    return 0 if window is None else max(0, token - window + 1)


@dataclass
class Connector:
    """Loads for the requests named ``l..``, once; keeps the offers that the ranks have heard of."""

    handed: dict[str, tuple[GroupIds, int, int]] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    local: dict[str, int] = field(default_factory=dict)
    offered: set[str] = field(default_factory=set)
    unsent: set[str] = field(default_factory=set)

    def on_new_request(self, request: RequestLike) -> None:
        pass

    def get_num_new_matched_tokens(
        self, request: RequestLike, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        name = request.request_id
        if not name.startswith("l") or name in self.asked:
            return 0, False
        self.local[name] = num_computed_tokens
        more = max(0, request.num_prompt_tokens - 1 - num_computed_tokens)
        return more, more > 0

    def update_state_after_alloc(
        self, request: RequestLike, blocks: BlocksLike, num_external_tokens: int
    ) -> None:
        name = request.request_id
        if num_external_tokens:
            lo = self.local[name]
            tables = tuple(map(tuple, blocks.get_block_ids()))
            self.handed[name] = (tables, lo, lo + num_external_tokens)
        self.asked.add(name)

    def request_finished_all_groups(
        self, request: RequestLike, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        is_kept = request.request_id in self.offered
        if is_kept:
            self.unsent.add(request.request_id)
        return is_kept, None

    def withdraw_offer(self, request_id: str) -> None:
        assert request_id in self.unsent  # reported sent by a later step, like any other

    def build_connector_meta(self, scheduler_output: SchedulerOutputLike) -> ConnectorMetadata:
        started = {new.req_id for new in scheduler_output.scheduled_new_reqs}
        self.offered |= {name for name in started if name.startswith("o")}
        return ConnectorMetadata()

    def update_connector_output(self, output: KVConnectorOutput) -> dict[str, Plain]:
        return {}

    def has_orders(self) -> bool:
        return False


class Ranks:
    """One rank's half of the steps, on records instead of tensors."""

    def __init__(self, windows: Sequence[int | None], num_blocks: int) -> None:
        self.windows = windows
        self.slots: dict[int, list[Slot]] = {b: ["never"] * BLOCK for b in range(1, num_blocks)}
        self.tables: dict[str, list[list[int]]] = {}
        self.tokens: dict[str, list[int]] = {}

    def take(self, step: SchedulerOutput, loading: set[int]) -> None:
        assert len(set(step.zero_block_ids)) == len(step.zero_block_ids)
        assert not loading & set(step.zero_block_ids)
        for block in step.zero_block_ids:
            self.slots[block] = ["zero"] * BLOCK
        for new in step.scheduled_new_reqs:
            self.tables[new.req_id] = [list(table) for table in new.block_ids]
            self.tokens[new.req_id] = list(new.prompt_token_ids)
        cached = step.scheduled_cached_reqs
        for name, more, tokens in zip(
            cached.req_ids, cached.new_block_ids, cached.new_token_ids, strict=True
        ):
            self.tokens[name] += tokens
            for table, ids in zip(self.tables[name], more or (), strict=more is not None):
                table += ids

    def compute(self, name: str, start: int, end: int, loading: set[int]) -> None:
        tokens = self.tokens[name]
        for group, window in enumerate(self.windows):
            table = self.tables[name][group]
            for token in range(first_seen(window, start), start):
                got = self.slots[table[token // BLOCK]][token % BLOCK]
                assert got == (group, tuple(tokens[: token + 1]))
            for token in range(start, end):
                block = table[token // BLOCK]
                assert block not in loading
                if token % BLOCK == 0:  # behind what was loaded: a new block
                    assert self.slots[block] == ["zero"] * BLOCK
                self.slots[block][token % BLOCK] = (group, tuple(tokens[: token + 1]))

    def load(self, tokens: Sequence[int], tables: GroupIds, lo: int, hi: int) -> None:
        for group, table in enumerate(tables):
            for token in range(lo, hi):
                if table[token // BLOCK] != -1:
                    block = self.slots[table[token // BLOCK]]
                    block[token % BLOCK] = (group, tuple(tokens[: token + 1]))


class World:
    """An engine and who asks it."""

    def __init__(self, windows: Sequence[int | None], seed: int) -> None:
        self.random = random.Random(seed)
        num_blocks = self.random.randint(12, 60)
        config = EngineConfig(
            role=Role.BOTH,
            engine_id="e",
            block_size=BLOCK,
            num_blocks=num_blocks,
            max_model_len=200,
            max_num_seqs=self.random.choice([2, 16]),
            max_num_batched_tokens=self.random.choice([5, 24, 200]),
            on_load_failure=self.random.choice(list(OnLoadFailure)),
        )
        self.connector = Connector()
        self.ranks = Ranks(windows, num_blocks)
        self.scheduler = Scheduler(
            config,
            cast("SchedulerConnector", self.connector),
            cache(config, windows),
            eos_token_ids=(9,),
        )
        self.num_usable = num_blocks - 1
        self.requests: dict[str, Request] = {}
        self.num_computed = 0

    def come(self) -> None:
        kind = self.random.choice("plo")  # plain, loads, offered
        name = f"{kind}{len(self.requests)}"
        prompt = [0] * self.random.randint(1, 60) + [1] * self.random.choice([0, 0, 9, 20])
        params = OFFER if kind == "o" else None
        request = Request(name, tuple(prompt), self.random.choice([1, 1, 3, 30]), params)
        try:
            self.scheduler.add(request)
        except OutOfBlocks:
            return
        self.requests[name] = request

    def loading(self) -> set[int]:
        """Blocks that loads may be writing now."""
        blocks: set[int] = set()
        for tables, lo, _ in self.connector.handed.values():
            blocks |= {i for table in tables for i in table[lo // BLOCK :] if i != -1}
        return blocks

    def some_transfers(self) -> KVConnectorOutput:
        received: set[str] = set()
        failed: dict[str, str] = {}
        for name in sorted(self.connector.handed):
            fate = self.random.choice(["later", "later", "accepted", "failed"])
            if fate == "later":
                continue
            tables, lo, hi = self.connector.handed.pop(name)
            received.add(name)
            self.ranks.load(self.requests[name].prompt_token_ids, tables, lo, hi)
            if fate == "failed" or self.requests[name].status.is_finished:
                failed[name] = "peer_lost"
                for table in tables:
                    for block in table[lo // BLOCK :]:
                        if block != -1:
                            self.ranks.slots[block] = ["torn"] * BLOCK
        sent = {name for name in sorted(self.connector.unsent) if self.random.random() < 0.3}
        for name in sent:
            self.check_offer(name)
        self.connector.unsent -= sent
        return KVConnectorOutput(
            finished_sending=sent, finished_recving=received, failed_recving=failed
        )

    def check_offer(self, name: str) -> None:
        """What a sink reads is right until the end: all, or what the last prompt token sees."""
        prompt = self.requests[name].prompt_token_ids
        if self.requests[name].num_computed_tokens < len(prompt):
            return
        for group, window in enumerate(self.ranks.windows):
            for token in range(first_seen(window, len(prompt) - 1), len(prompt)):
                block = self.ranks.tables[name][group][token // BLOCK]
                assert self.ranks.slots[block][token % BLOCK] == (group, prompt[: token + 1])

    def step(self) -> None:
        before = self.loading()
        step = self.scheduler.schedule()
        # Both the loads from before and those that begin with this step.
        loading = before | self.loading()
        self.ranks.take(step, loading)
        samples = []
        for name, num_new in step.num_scheduled_tokens.items():
            request = self.requests[name]
            start, end = request.num_computed_tokens, request.num_computed_tokens + num_new
            self.ranks.compute(name, start, end, loading)
            self.num_computed += num_new
            if end == request.num_tokens:
                samples.append(Sample(name, self.random.choice([2, 2, 2, 9]), 0.5))
        output = StepOutput(samples=tuple(samples), kv_connector_output=self.some_transfers())
        self.scheduler.update(step, [output])

    def abort(self) -> None:
        if self.requests:
            self.scheduler.abort(self.random.choice(sorted(self.requests)))


@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
def test_histories(windows: tuple[int | None, ...]) -> None:
    num_computed = 0
    for seed in range(60):
        world = World(windows, seed)
        for _ in range(70):
            action = world.random.choices([world.come, world.step, world.abort], [3, 6, 0.4])[0]
            action()
        for _ in range(2000):
            world.step()
            if all(r.status.is_finished for r in world.requests.values()) and not (
                world.connector.handed or world.connector.unsent
            ):
                break
        assert world.scheduler.num_free_blocks == world.num_usable
        num_computed += world.num_computed
    assert num_computed > 12_000  # they did run
