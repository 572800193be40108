"""Whole connectors without an engine: a scheduler side and the ranks of :mod:`tests.connector.rig`,
stepped by hand as an engine would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace as Bag
from typing import Any

import numpy as np

from kvxfer.connector.aggregator import KVOutputAggregator
from kvxfer.connector.records import KVConnectorOutput
from kvxfer.connector.scheduler_side import SchedulerConnector
from tests.builders import EngineShape, identity_of
from tests.connector.rig import Engine, Table, until

UNCOMPUTED = 0x77


@dataclass
class Request:
    """As an engine has it. ``computed``: tokens whose KV is here; ``table``: blocks by group."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    kv_transfer_params: dict[str, Any] | None = None
    status: str = "RUNNING"
    computed: int = 0
    table: Table = ()
    is_new: bool = True
    num_told: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    def get_block_ids(self) -> Table:
        return self.table


def first_blocks(shape: EngineShape, table: Table, num_tokens: int) -> Table:
    return tuple(ids[: -(-num_tokens // shape.table_tokens)] for ids in table)


def table_of(shape: EngineShape, num_tokens: int, seed: int) -> Table:
    """Ids in no order, that no two groups share."""
    num = -(-num_tokens // shape.table_tokens)
    ids = np.random.default_rng(seed).permutation(np.arange(1, shape.num_blocks)).tolist()
    return tuple(tuple(ids[g * num : (g + 1) * num]) for g in range(shape.num_groups))


@dataclass
class Side:
    """One engine's scheduler side and its ranks."""

    engine: Engine
    scheduler: SchedulerConnector = field(init=False)
    reports: KVConnectorOutput = field(default_factory=KVConnectorOutput)
    finished: dict[str, str | None] = field(default_factory=dict)
    sent: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        engine = self.engine
        self._aggregator = KVOutputAggregator(len(engine.workers))
        identity = identity_of(engine.manifest, incarnation=engine.incarnation, facts=engine.facts)
        self.scheduler = SchedulerConnector(
            engine.config, identity, can_send=True, can_receive=True
        )
        ranks = {(r.rank.pp, r.rank.tp): r for r in engine.manifest.ranks}
        self.scheduler.set_xfer_handshake_metadata_pp_aware(ranks)
        self.step()

    def step(
        self,
        counts: Sequence[tuple[Request, int]] = (),
        *,
        preempted: frozenset[str] = frozenset(),
        compute: Callable[[], object] = lambda: None,
    ) -> None:
        """One step, in which requests compute so many tokens: ``compute`` is the forward pass."""
        shape = self.engine.shape
        new, known, resumed = [], [], set()
        for request, num in counts:
            blocks = first_blocks(shape, request.table, request.computed + num)
            more = tuple(ids[request.num_told :] for ids in blocks)
            if request.is_new:
                new.append(
                    Bag(
                        req_id=request.request_id,
                        block_ids=blocks,
                        num_computed_tokens=request.computed,
                    )
                )
            else:
                known.append((request.request_id, more, request.computed))
                if not request.num_told:
                    resumed.add(request.request_id)
            request.is_new, request.num_told = False, len(blocks[0])
        output = Bag(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=Bag(
                req_ids=[name for name, _, _ in known],
                new_block_ids=[more if any(more) else None for _, more, _ in known],
                num_computed_tokens=[computed for _, _, computed in known],
                resumed_req_ids=resumed,
            ),
            num_scheduled_tokens={request.request_id: num for request, num in counts},
            preempted_req_ids=preempted,
        )
        metadata = self.scheduler.build_connector_meta(output)
        for worker in self.engine.workers:
            worker.handle_preemptions(metadata)
            worker.bind_connector_metadata(metadata)
            worker.start_load_kv()
        compute()
        for worker in self.engine.workers:
            worker.wait_for_save()
        outputs = [Bag(kv_connector_output=w.build_output(())) for w in self.engine.workers]
        for worker in self.engine.workers:
            worker.clear_connector_metadata()
        for request, num in counts:
            request.computed += num
        merged = self._aggregator.aggregate(outputs)
        assert merged is not None
        self.scheduler.update_connector_output(merged.kv_connector_output)
        if merged.kv_connector_output.kv_connector_stats is not None:
            stats = merged.kv_connector_output.kv_connector_stats
            self.engine.stats = self.engine.stats.aggregate(stats)
        failed = merged.kv_connector_output.failed_recving or {}
        for name in merged.kv_connector_output.finished_recving or ():
            self.finished[name] = failed.get(name)
        self.sent |= merged.kv_connector_output.finished_sending or set()

    def until(self, condition: Callable[[], object]) -> None:
        """Step without work until something is so."""

        def is_so() -> object:
            self.step()
            return condition()

        until(is_so)

    def ask(self, request: Request, num_cached: int = 0) -> tuple[int | None, bool]:
        return self.scheduler.get_num_new_matched_tokens(request, num_cached)

    def load(self, request: Request) -> int:
        """Allocate and hand over what can be loaded now: how many tokens."""
        num, _ = self.ask(request, request.computed)
        assert num
        self.scheduler.update_state_after_alloc(request, request, num)
        self.step()
        return num

    def finish(self, request: Request, status: str) -> tuple[bool, dict[str, Any] | None]:
        request.status = status
        return self.scheduler.request_finished_all_groups(request, request.table)

    def reasons(self) -> dict[str, int]:
        stats = self.scheduler.get_kv_connector_stats()
        return stats.reasons if stats is not None else {}
