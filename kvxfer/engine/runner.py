"""One rank's half of a step: zero, digest, load, compute, save, report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from msgspec.structs import replace
from torch import Tensor

from kvxfer.connector.records import ConnectorMetadata, KVConnectorOutput
from kvxfer.connector.worker_side import WorkerConnector
from kvxfer.engine.attention import attention_backend
from kvxfer.engine.config import EngineConfig, Role
from kvxfer.engine.digest import KVDigest, blocks_on_host, kv_digests
from kvxfer.engine.model import LlamaModel
from kvxfer.engine.model_config import ModelConfig, attention_pattern, load_model_config, shard_for
from kvxfer.engine.rank_cache import RankCache, RequestStep
from kvxfer.engine.steps import GroupIds, Sample, SchedulerOutput, StepOutput
from kvxfer.engine.weights import load_weights, weights_identity
from kvxfer.transfer.layout import Elements
from kvxfer.transfer.manifest import CacheFacts, EngineIdentity, RankId, RankManifest


@dataclass(slots=True)
class _Sequence:
    """What a rank keeps of a running request. ``block_ids``: by group, then by position; entries
    of a group with a window may be old ones, or -1, where they are out of the window.
    """

    token_ids: list[int]
    block_ids: list[list[int]]
    num_computed_tokens: int = 0


def model_of(config: EngineConfig) -> ModelConfig:
    """Raises ModelError."""
    return load_model_config(config.model, num_kv_heads=config.num_kv_heads, dtype=config.dtype)


def cache_facts(config: EngineConfig, model: ModelConfig) -> CacheFacts:
    """What both sides of a transfer must agree on."""
    return CacheFacts(
        model=model.model_type,
        weights=weights_identity(model, seed=config.seed),
        rope=f"theta={model.rope_theta:g} scaling={model.rope_scaling}",
        dtype=model.dtype,
        quantisation="none",
        num_kv_heads=model.num_kv_heads,
        head_size=model.head_size,
        num_layers=model.num_layers,
        attention=attention_pattern(model),
    )


def engine_identity(config: EngineConfig, model: ModelConfig, incarnation: bytes) -> EngineIdentity:
    """What a life of such an engine is to its connector."""
    return EngineIdentity(
        engine_id=config.engine_id,
        incarnation=incarnation,
        facts=cache_facts(config, model),
        tp_size=config.tp_size,
        pp_size=1,
        block_tokens=config.block_size,
        layout=config.layout,
    )


class Runner:
    """One rank of an engine.

    Args:
        incarnation: 16 random bytes, the same on all ranks of one life.
        all_reduce: sum over the ranks, called inside the forward pass only; None with one rank.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        tp_rank: int,
        incarnation: bytes,
        all_reduce: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self._config = config
        self._tp_rank = tp_rank
        self._device = torch.device(config.rank_devices[tp_rank])
        model_config = model_of(config)
        shard = shard_for(model_config, tp_rank, config.tp_size)
        self.cache = RankCache(config, model_config, shard, attention_backend(config.layout))
        self._model = LlamaModel(
            model_config,
            load_weights(model_config, shard, seed=config.seed, device=self._device),
            tp_rank=tp_rank,
            tp_size=config.tp_size,
            layers=self.cache.layers,
            all_reduce=all_reduce,
        )
        self._sequences: dict[str, _Sequence] = {}
        self.connector: WorkerConnector | None = None
        if config.role is not Role.ALONE:
            self.connector = self._connect(model_config, incarnation)

    def _connect(self, model: ModelConfig, incarnation: bytes) -> WorkerConnector:
        config = self._config
        gives_kv = config.role is not Role.DECODE
        connector = WorkerConnector(
            config.kv.for_engine(gives_kv=gives_kv, num_ranks=config.tp_size),
            engine_identity(config, model, incarnation),
            RankId(0, self._tp_rank),
            can_leave_unhashed=True,
            device=self._device,
        )
        elements = Elements(model.dtype)
        regions = (
            region if region.is_state else replace(region, elements=elements)
            for region in self.cache.regions
        )
        connector.register_kv_caches(tuple(regions), self.cache.memory)
        return connector

    @property
    def manifest(self) -> RankManifest | None:
        return self.connector.get_handshake_metadata() if self.connector else None

    def execute(self, step: SchedulerOutput) -> StepOutput:
        """Run one step. Samples come from rank 0 only."""
        metadata = step.kv_connector_metadata or ConnectorMetadata()
        if self.connector is not None:
            # Offers that the engine takes back are over before anything below can overwrite their
            # blocks.
            self.connector.handle_preemptions(metadata)
            self.connector.bind_connector_metadata(metadata)
        self.cache.zero(step.zero_block_ids)
        if self.connector is not None:
            self.connector.start_load_kv()
        # Behind the loads that are part of this step: their KV is digested too.
        digests = {
            order.req_id: self._digest(order.block_ids, order.num_tokens) for order in step.digests
        }
        self._learn(step)
        samples = self._compute(step.num_scheduled_tokens) if step.num_scheduled_tokens else ()
        if self.connector is not None:
            self.connector.wait_for_save()
        self._finish()
        return StepOutput(
            samples=samples,
            kv_connector_output=self._report(step.finished_req_ids),
            digests=digests,
        )

    def report(self) -> StepOutput:
        """What has ended between two steps."""
        return StepOutput(kv_connector_output=self._report(frozenset()))

    def _finish(self) -> None:
        """Wait for what the step has launched on a GPU: its zeros and what it computes are in one
        stream. The scheduler takes a step that has come back as complete, on every rank, and may
        give a block that is free then to a load; nothing must be about to write it.
        """
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _report(self, finished_req_ids: frozenset[str]) -> KVConnectorOutput | None:
        if self.connector is None:
            return None
        output = self.connector.build_output(set(finished_req_ids))
        self.connector.clear_connector_metadata()
        return output

    def _digest(self, block_ids: GroupIds, num_tokens: int) -> KVDigest:
        regions, buffer = self.cache.regions, self.cache.buffer
        if self._device.type != "cpu":
            buffer = blocks_on_host(regions, buffer, block_ids)
        return kv_digests(regions, buffer, block_ids, num_tokens)

    def _learn(self, step: SchedulerOutput) -> None:
        """Keep what the step tells of its requests. One that has ended may come again at once: it
        is computed after its load has failed.
        """
        for req_id in step.finished_req_ids:
            self._sequences.pop(req_id, None)
        for new in step.scheduled_new_reqs:
            self._sequences[new.req_id] = _Sequence(
                list(new.prompt_token_ids),
                [list(ids) for ids in new.block_ids],
                new.num_computed_tokens,
            )
        cached = step.scheduled_cached_reqs
        for req_id, tokens, num_computed, new_ids in zip(
            *(cached.req_ids, cached.new_token_ids, cached.num_computed_tokens),
            cached.new_block_ids,
            strict=True,
        ):
            sequence = self._sequences[req_id]
            sequence.token_ids += tokens
            sequence.num_computed_tokens = num_computed
            if req_id in cached.resumed_req_ids:
                sequence.block_ids = [[] for _ in sequence.block_ids]
            for table, ids in zip(sequence.block_ids, new_ids or (), strict=new_ids is not None):
                table += ids

    def _compute(self, num_scheduled_tokens: Mapping[str, int]) -> tuple[Sample, ...]:
        token_ids: list[int] = []
        positions: list[int] = []
        requests: list[RequestStep] = []
        ends: dict[str, int] = {}  # the row of the last known token, where it is computed now
        for req_id, num_new in num_scheduled_tokens.items():
            sequence = self._sequences[req_id]
            lo = sequence.num_computed_tokens
            token_ids += sequence.token_ids[lo : lo + num_new]
            positions += range(lo, lo + num_new)
            requests.append(RequestStep(sequence.block_ids, lo, num_new))
            if lo + num_new == len(sequence.token_ids):
                ends[req_id] = len(positions) - 1
        metadata = self.cache.metadata(requests)
        hidden = self._model.forward(self._ints(token_ids), self._ints(positions), metadata)
        if self._tp_rank != 0 or not ends:
            return ()
        best = self._model.logits(hidden[self._ints(list(ends.values()))]).topk(2, dim=-1)
        token_of, gap_of = best.indices[:, 0], best.values[:, 0] - best.values[:, 1]
        return tuple(map(Sample, ends, token_of.tolist(), gap_of.tolist()))

    def _ints(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def close(self) -> None:
        """End every offer and load, then give the memory back."""
        if self.connector is not None:
            self.connector.shutdown()
        self.cache.close()
