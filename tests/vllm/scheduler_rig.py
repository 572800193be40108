"""vLLM's own scheduler with our connector in it, and no model: steps by hand, reports by hand.

The ranks are made up, so what the workers would be told is read from each step's metadata.
"""

from __future__ import annotations

import itertools
import json
import pickle
import secrets
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvxfer.connector.metrics import add
from kvxfer.connector.params import make_params
from kvxfer.connector.records import ConnectorMetadata, NewLoad, SourceRef
from kvxfer.tensors.shared_memory import SharedPool
from kvxfer.transfer.manifest import RankId
from kvxfer.transfer.wire import OfferRef
from kvxfer.transports.base import LocalMemory
from tests.builders import EngineShape, build_manifest, build_regions

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM loads parts of torch that other parts call deprecated
    from vllm import EngineArgs, SamplingParams
    from vllm.distributed.kv_events import BlockRemoved
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
        MultiConnector,
        MultiKVConnectorStats,
        MultiKVConnectorWorkerMetadata,
    )
    from vllm.utils.hashing import sha256
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        SlidingWindowSpec,
    )
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.structured_output import StructuredOutputManager

    from kvxfer.integrations.vllm.compat import (
        REPORTS_FAILED_REQUESTS,
        KvxferHandshake,
        KvxferWorkerMetadata,
    )
    from kvxfer.integrations.vllm.connector import KvxferConnector
    from kvxfer.integrations.vllm.regions import ClearedGroup, Located
    from kvxfer.integrations.vllm.settings import read_settings
    from kvxfer.integrations.vllm.step_loads import (
        UnprovenKV,
        is_engines_own,
        why_never,
        why_not_heard,
    )
    from kvxfer.integrations.vllm.worker import WorkerSide, failed_block_ids

Status = RequestStatus
__all__ = [
    "BlockPool",
    "BlockRemoved",
    "ClearedGroup",
    "Located",
    "Request",
    "SamplingParams",
    "UnprovenKV",
    "get_request_block_hasher",
    "init_none_hash",
    "is_engines_own",
    "sha256",
    "why_never",
    "why_not_heard",
]

BLOCK = 16
NUM_BLOCKS = 64
INCARNATION = b"i" * 16
THEIRS = b"t" * 16
OFFERED = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}


def offered_by(nonce: bytes, num_tokens: int) -> dict[str, Any]:
    """The params that another engine's prefill would have returned."""
    source = SourceRef(
        engine_id="source",
        endpoint="tcp://127.0.0.1:5700",
        offer=OfferRef(nonce, THEIRS),
        num_tokens=num_tokens,
    )
    return make_params(source, request_id="there", number=1, tp_size=1, pp_size=1)


def failed_fields(
    request_ids: set[str], block_ids: set[int], *, by_request: bool = REPORTS_FAILED_REQUESTS
) -> dict[str, set[Any]]:
    """How a version of vLLM is told of failed loads: by request, or by block before it could."""
    return {"failed_recving": request_ids} if by_request else {"invalid_block_ids": block_ids}


def _transfer_config(
    role: str,
    policy: str,
    connectors: Sequence[Mapping[str, Any]] | None,
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """vLLM's, with our connector; or with these in MultiConnector, without ``extra``."""
    ours: dict[str, Any] = {
        "kv_connector": "KvxferConnector",
        "kv_connector_module_path": "kvxfer.integrations.vllm",
        "kv_role": role,
        "engine_id": "here",
        "kv_connector_extra_config": {"port": 0, **extra},
        "kv_load_failure_policy": policy,
    }
    if connectors is None:
        return ours
    return ours | {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": None,
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


def _cache(
    block_tokens: int, num_blocks: int, window: int | None
) -> tuple[KVCacheConfig, EngineShape]:
    """One cache, as vLLM's scheduler and as our manifests have it: a layer that keeps all, and if
    there is a window one that keeps that.
    """
    kind: dict[str, Any] = {
        "block_size": block_tokens,
        "num_kv_heads": 1,
        "head_size": 2,
        "dtype": torch.float32,
    }
    groups = [KVCacheGroupSpec(["layers.0"], FullAttentionSpec(**kind))]
    if window is not None:
        spec = SlidingWindowSpec(**kind, sliding_window=window)
        groups.append(KVCacheGroupSpec(["layers.1"], spec))
    shape = EngineShape(
        num_layers=len(groups),
        block_tokens=block_tokens,
        num_blocks=num_blocks,
        groups=tuple(range(len(groups))),
        windows=(None, window)[: len(groups)],
    )
    return KVCacheConfig(num_blocks, [], groups), shape


class Rig:
    """One engine's scheduler.

    Args:
        window: None: one group that keeps all; else a second one that keeps this many tokens.
        connectors: what goes into MultiConnector; None: ours alone.
        hybrid_manager: vLLM's, of groups; without it one of a connector's two calls is made.
    """

    def __init__(
        self,
        folder: Path,
        *,
        role: str = "kv_both",
        policy: str = "recompute",
        window: int | None = None,
        is_async: bool = False,
        max_batched_tokens: int = 8192,
        num_blocks: int = NUM_BLOCKS,
        block_tokens: int = BLOCK,
        prefix_caching: bool = True,
        data_parallel_size: int = 1,
        connectors: Sequence[Mapping[str, Any]] | None = None,
        hybrid_manager: bool = True,
        **extra: Any,
    ) -> None:
        init_none_hash(sha256)
        (folder / "config.json").write_text(json.dumps(_LLAMA))
        config = EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            block_size=block_tokens,
            max_model_len=2048,
            max_num_seqs=16,
            max_num_batched_tokens=max_batched_tokens,
            enable_chunked_prefill=True,
            enable_prefix_caching=prefix_caching,
            disable_hybrid_kv_cache_manager=not hybrid_manager,
            async_scheduling=is_async,
            kv_cache_memory_bytes=64 << 20,
            kv_transfer_config=_transfer_config(role, policy, connectors, extra),
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = num_blocks
        config.scheduler_config.async_scheduling = is_async  # on a CPU vLLM has turned it off
        config.parallel_config.data_parallel_size = data_parallel_size
        cache, shape = _cache(block_tokens, num_blocks, window)
        make = AsyncScheduler if is_async else Scheduler
        self.scheduler = make(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_tokens,
            log_stats=True,
        )
        self._is_multi = connectors is not None
        connector = self.scheduler.connector
        names = [child["kv_connector"] for child in connectors or ()]
        self._our_index = names.index("KvxferConnector") if names else 0
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): self._handshake(config, shape)})
        self.connector: KvxferConnector = (
            connector if connectors is None else connector.sub_connectors[self._our_index]
        )
        self.num_free = self.free_blocks()
        self.stats: dict[str, dict[str, float]] = {}
        self.outputs: list[Any] = []
        self._hasher = get_request_block_hasher(block_tokens, sha256)
        self.in_flight: list[Any] = []  # steps whose output is to come, vLLM's own
        self._loads: dict[str, NewLoad] = {}
        self._block_tokens = block_tokens

    def _handshake(self, config: Any, shape: EngineShape) -> KvxferHandshake:
        """What the one rank says of itself."""
        manifest = build_manifest(shape)
        return KvxferHandshake(INCARNATION, manifest.facts, manifest.ranks[0])

    def set_clock(self, now: Callable[[], float]) -> None:
        """What our scheduler side takes the time from; its last step was now."""
        side = self.connector.scheduler_side
        side._now, side._last_step_s = now, now()

    def free_blocks(self) -> int:
        """Blocks that nothing uses."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def request(
        self,
        request_id: str,
        prompt: Sequence[int] | None,
        params: Mapping[str, Any] | None = None,
        *,
        max_tokens: int = 4,
        abort_immediately: bool = False,
        prompt_embeds: Any = None,
        prompt_logprobs: int | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> Request:
        """A request that was added to the scheduler."""
        request = Request(
            request_id=request_id,
            prompt_token_ids=None if prompt is None else list(prompt),
            sampling_params=SamplingParams(
                max_tokens=max_tokens,
                temperature=0,
                ignore_eos=True,
                prompt_logprobs=prompt_logprobs,
                extra_args=None if params is None else {"kv_transfer_params": dict(params)},
            ),
            pooling_params=None,
            prompt_embeds=prompt_embeds,
            block_hasher=self._hasher,
            abort_immediately=abort_immediately,
            trace_headers=trace_headers,
        )
        self.scheduler.add_request(request)
        return request

    # -------------------------------------------------- one step

    def schedule(self) -> ConnectorMetadata:
        """What the workers are told in the next step, whose output is kept for :meth:`finish`."""
        step = self.scheduler.schedule()
        self.in_flight.append(step)
        metadata = step.kv_connector_metadata
        if self._is_multi:
            metadata = metadata.metadata[self._our_index]
        assert metadata.is_idle == (step.total_num_scheduled_tokens == 0)
        orders: ConnectorMetadata = metadata.orders
        self._loads.update((load.request_id, load) for load in orders.loads)
        return orders

    def finish(
        self,
        *,
        sent: Iterable[str] = (),
        received: Iterable[str] = (),
        failed: Mapping[str, str] | None = None,
    ) -> None:
        """The output of the oldest step that has none, with what the ranks report."""
        failures = dict(failed or {})
        told = {name: reason for name, reason in failures.items() if reason}
        worker = KvxferWorkerMetadata(told) if told else None
        loads = [self._loads[name] for name in failures]
        self._update(
            KVConnectorOutput(
                finished_sending=set(sent),
                finished_recving={*received, *failures},
                kv_connector_worker_meta=None if self._is_multi else worker,
                **failed_fields(set(failures), failed_block_ids(loads, self._block_tokens)),
            )
        )

    def _update(self, reported: KVConnectorOutput | None) -> None:
        step = self.in_flight.pop(0)
        names = list(step.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[self._sampled(step, name) for name in names],
            kv_connector_output=reported,
        )
        for answers in self.scheduler.update_from_output(step, output).values():
            self.outputs += answers.outputs
            if answers.scheduler_stats and answers.scheduler_stats.kv_connector_stats:
                self._add(answers.scheduler_stats.kv_connector_stats)

    def step(self, **reports: Any) -> ConnectorMetadata:
        """Both."""
        orders = self.schedule()
        self.finish(**reports)
        return orders

    def _sampled(self, step: Any, name: str) -> list[int]:
        """What this step's model has sampled for a request."""
        return [7] if self._reaches_end(step, name) else []

    def _reaches_end(self, step: Any, name: str) -> bool:
        request = self.scheduler.requests.get(name)
        if request is None:
            return True
        before = dict(
            itertools.chain(
                ((new.req_id, new.num_computed_tokens) for new in step.scheduled_new_reqs),
                zip(
                    step.scheduled_cached_reqs.req_ids,
                    step.scheduled_cached_reqs.num_computed_tokens,
                    strict=True,
                ),
            )
        )
        return bool(before[name] + step.num_scheduled_tokens[name] >= request.num_prompt_tokens)

    def _add(self, data: Mapping[str, Mapping[str, Any]]) -> None:
        tables = data["KvxferConnector"] if self._is_multi else data
        add(self.stats, tables)

    # -------------------------------------------------- what comes of it

    def abort(self, request_id: str) -> None:
        """As a client that went away."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def params_of(self, request_id: str) -> dict[str, Any] | None:
        """What a finished request returned to its client."""
        (answer,) = [o for o in self.outputs if o.request_id == request_id and o.finish_reason]
        params: dict[str, Any] | None = answer.kv_transfer_params
        return params

    def is_quiet(self) -> bool:
        """Nothing is left to do, and every block came back."""
        return not self.scheduler.has_requests() and self.free_blocks() == self.num_free


class Engine(Rig):
    """A scheduler and one real worker side, with a pool of bytes and no model: what vLLM's model
    runner calls in a step is called here, in its order. ``connectors`` may have ours alone.
    """

    def __init__(self, folder: Path, *, fill: int | None = None, **settings: Any) -> None:
        self._fill = fill
        self.pool: SharedPool
        self.shape: EngineShape
        self.worker: WorkerSide
        self.reported: list[KVConnectorOutput] = []
        self.reports_failed_requests = REPORTS_FAILED_REQUESTS
        self.ends_steps = True
        """Not so: a stage before the last of vLLM's V1 runner, where the last one has a draft."""
        super().__init__(folder, **settings)

    def _handshake(self, config: Any, shape: EngineShape) -> KvxferHandshake:
        regions, nbytes = build_regions(shape, RankId(0, 0))
        self.shape, self.pool = shape, SharedPool.create(nbytes)
        values = np.random.default_rng(5).integers(0, 256, nbytes, dtype=np.uint8)
        self.pool.tensor.numpy()[:] = values if self._fill is None else self._fill
        memory = LocalMemory((self.pool.tensor,), (self.pool.info,))
        if self._is_multi:
            made = MultiConnector._get_connector_classes_and_configs(config)
            config = made[self._our_index][1]
        self.worker = WorkerSide(
            read_settings(config),
            facts=build_manifest(shape).facts,
            rank=RankId(0, 0),
            incarnation=secrets.token_bytes(16),
            locate=lambda kv_caches: Located(regions, memory),
        )
        self.worker.register_kv_caches({"layers.0": self.pool.tensor})
        handshake: KvxferHandshake = pickle.loads(
            pickle.dumps(self.worker.get_handshake_metadata())
        )
        return handshake

    def run(self) -> ConnectorMetadata:
        """One step, as vLLM's runner makes it."""
        orders = self.schedule()
        reported = self._execute(self.in_flight[-1])
        # vLLM's runner passes on only what says something.
        self._update(None if reported.is_empty() else pickle.loads(pickle.dumps(reported)))
        return orders

    def compute(self, step: Any) -> None:
        """The forward pass: nothing."""

    def _execute(self, step: Any) -> KVConnectorOutput:
        metadata = pickle.loads(pickle.dumps(step.kv_connector_metadata))
        if self._is_multi:
            (metadata,) = metadata.metadata
        worker = self.worker
        worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        self.compute(step)
        is_ended = self.ends_steps or not step.total_num_scheduled_tokens
        if is_ended:
            worker.wait_for_save()
        results = worker.get_transfer_results(step.finished_req_ids)
        reported = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            kv_connector_stats=worker.get_kv_connector_stats(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
            failed_recving=results.failed_recving if self.reports_failed_requests else set(),
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
        )
        if is_ended:
            worker.clear_connector_metadata()
        if self._is_multi:
            said, stats = reported.kv_connector_worker_meta, reported.kv_connector_stats
            reported.kv_connector_worker_meta = said and MultiKVConnectorWorkerMetadata((said,))
            if stats:
                reported.kv_connector_stats = MultiKVConnectorStats({"KvxferConnector": stats})
        self.reported.append(pickle.loads(pickle.dumps(reported)))
        return reported

    def run_until(self, condition: Callable[[], object], timeout_s: float = 120.0) -> None:
        """Step while there is something to do, and wait while there is not."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "waited in vain"
            if self.scheduler.has_requests():
                self.run()
            else:
                time.sleep(0.001)

    def reports_of(self, kind: str, request_id: str) -> int:
        """In how many steps this rank has reported a request."""
        return sum(request_id in (getattr(report, kind) or ()) for report in self.reported)

    def block(self, layer: int, block_id: int) -> bytes:
        """The bytes of K of a block."""
        return bytes(self.pool.tensor.numpy()[self._place(layer, block_id)])

    def fill(self, layer: int, block_id: int, value: int) -> None:
        """Write every byte of K of a block."""
        self.pool.tensor.numpy()[self._place(layer, block_id)] = value

    def _place(self, layer: int, block_id: int) -> slice:
        region = build_regions(self.shape, RankId(0, 0))[0][2 * layer]
        start = region.offset + block_id * region.stride_block
        return slice(start, start + region.stride_block)

    def close(self) -> None:
        """Twice, as vLLM may."""
        for _ in range(2):
            self.worker.shutdown()
            self.scheduler.shutdown()
        self.pool.close()
