"""The class that vLLM makes, once in the scheduler's process and once in every worker. Each method
is passed on to the side of its role.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterable, Mapping
from functools import cached_property, partial
from typing import Any

from torch import Tensor

from kvxfer.errors import ConfigError
from kvxfer.integrations.vllm.compat import (
    KVConnectorBase,
    KVConnectorRole,
    KvxferHandshake,
    KvxferMetadata,
    KvxferWorkerMetadata,
    SupportsHMA,
    check_groups,
    counts_no_references,
    peer_hit_source,
)
from kvxfer.integrations.vllm.facts import cache_facts, cache_model, num_own_tokens
from kvxfer.integrations.vllm.plugin import register, show_logs
from kvxfer.integrations.vllm.regions import locate
from kvxfer.integrations.vllm.scheduler import SchedulerSide
from kvxfer.integrations.vllm.settings import Settings, check_names, read_settings
from kvxfer.integrations.vllm.stats import KvxferPromMetrics, KvxferStats, rebuilt
from kvxfer.integrations.vllm.step_loads import is_engines_own, why_never, why_not_heard
from kvxfer.integrations.vllm.worker import WorkerSide
from kvxfer.transfer.manifest import RankId

register()  # MultiConnector finds its children's statistics by name, in the front end too


class KvxferConnector(KVConnectorBase, SupportsHMA):  # type: ignore[misc]  # vLLM has no types here
    """vLLM's KVConnectorBase_V1 and SupportsHMA; their documentation says when each method is
    called. ConfigError names what cannot be served.
    """

    _cache_hit_source = peer_hit_source()

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = read_settings(vllm_config)
        show_logs(settings.config.log_level)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(
                settings,
                len(kv_cache_config.kv_cache_groups),
                can_pin=counts_no_references(vllm_config),
                no_step_loads=why_never(
                    vllm_config,
                    len(kv_cache_config.kv_cache_groups),
                    is_own=is_engines_own(self, vllm_config),
                ),
                no_early=why_not_heard(),
                num_own_tokens=num_own_tokens(vllm_config, kv_cache_config),
            )
        else:
            self._worker = _make_worker(settings, vllm_config, kv_cache_config)

    @cached_property
    def scheduler_side(self) -> SchedulerSide:
        """In the scheduler's process. Raises ConfigError elsewhere."""
        if self._scheduler is None:
            raise ConfigError("connector: expected the scheduler's role, got a worker's")
        return self._scheduler

    @cached_property
    def worker_side(self) -> WorkerSide:
        """In a worker. Raises ConfigError elsewhere."""
        if self._worker is None:
            raise ConfigError("connector: expected a worker's role, got the scheduler's")
        return self._worker

    # -------------------------------------------------- worker

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self.worker_side.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> KvxferHandshake | None:
        return self.worker_side.get_handshake_metadata()

    def handle_preemptions(self, kv_connector_metadata: KvxferMetadata) -> None:
        self.worker_side.handle_preemptions(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KvxferMetadata) -> None:
        # The base class is not told: while it has metadata vLLM makes two calls in every layer, and
        # there is nothing to do in a layer.
        self.worker_side.bind_connector_metadata(connector_metadata)

    def clear_connector_metadata(self) -> None:
        self.worker_side.clear_connector_metadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: they have begun when the orders were bound."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request runs only after its load was reported, or behind its copies."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: sinks fetch KV from the pool."""

    def wait_for_save(self) -> None:
        self.worker_side.wait_for_save()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        return self.worker_side.get_transfer_results(finished_req_ids)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return self.worker_side.get_finished(finished_req_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker_side.get_block_ids_with_load_errors()

    def build_connector_worker_meta(self) -> KvxferWorkerMetadata | None:
        return self.worker_side.build_connector_worker_meta()

    # -------------------------------------------------- scheduler

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, object]) -> None:
        """Of versions that know one pipeline stage."""
        self.set_xfer_handshake_metadata_pp_aware({(0, tp): m for tp, m in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], object]
    ) -> None:
        self.scheduler_side.set_xfer_handshake_metadata_pp_aware(metadata)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Not called in versions that do not have it."""
        self.scheduler_side.bind_block_pool(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        self.scheduler_side.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self.scheduler_side.get_num_new_matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return self.scheduler_side.loaded_group_ids()

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.scheduler_side.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KvxferMetadata:
        return self.scheduler_side.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self.scheduler_side.update_connector_output(connector_output)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler_side.request_finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler_side.request_finished(request, block_ids)

    def take_events(self) -> Iterable[Any]:
        """None: block events are the engine's own."""
        return ()

    def has_pending_push_work(self) -> bool:
        return self.scheduler_side.has_pending_push_work()

    def get_finished_count(self) -> int | None:
        """None: every rank reports every request."""
        return None

    def reset_cache(self) -> bool | None:
        return self.scheduler_side.reset_cache()

    # -------------------------------------------------- either

    def get_kv_connector_stats(self) -> KvxferStats | None:
        side = self._worker if self._worker is not None else self.scheduler_side
        return side.get_kv_connector_stats()

    def shutdown(self) -> None:
        for side in (self._worker, self._scheduler):
            if side is not None:
                side.shutdown()

    # -------------------------------------------------- of the class

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """None: kvxfer asks for no layout of its own."""
        return None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """No: there is nothing to do in a layer. vLLM asks while it reads its command line, if it
        captures whole graphs: a key that is spelt wrong is refused before anything is loaded.
        """
        check_names(extra_config)
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """No: peers may be reading the memory that sleeping gives back."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvxferStats:
        return rebuilt(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
    ) -> KvxferPromMetrics:
        return KvxferPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def cp_rank_of(vllm_config: Any) -> int:
    if getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1) == 1:
        return 0
    from vllm.distributed.parallel_state import get_dcp_group

    return int(get_dcp_group().rank_in_group)


def agree_on_rank(parallel: Any, incarnation: bytes) -> tuple[bytes, RankId]:
    """The first rank's ``incarnation``, and this rank's place. Ranks of prefill context parallelism
    are behind each other, as in the keys of vLLM's handshake.
    """
    from vllm.distributed import parallel_state

    tp_size, place = parallel.tensor_parallel_size, {"tp": 0, "pcp": 0, "pp": 0}
    sizes = {
        "tp": tp_size,
        "pcp": getattr(parallel, "prefill_context_parallel_size", 1),
        "pp": parallel.pipeline_parallel_size,
    }
    for name, size in sizes.items():
        if size > 1:
            group = getattr(parallel_state, f"get_{name}_group")()
            incarnation = group.broadcast_object(incarnation, src=0)
            place[name] = group.rank_in_group
    return incarnation, RankId(place["pp"], place["tp"] + place["pcp"] * tp_size)


def _make_worker(settings: Settings, vllm_config: Any, kv_cache_config: Any) -> WorkerSide:
    """The side of this worker's rank. Every rank must come here: they agree on an incarnation."""
    check_groups(len(kv_cache_config.kv_cache_groups))
    if settings.switch_interval_s is not None:
        sys.setswitchinterval(settings.switch_interval_s)
    incarnation, rank = agree_on_rank(vllm_config.parallel_config, secrets.token_bytes(16))
    model = cache_model(vllm_config, cp_rank=cp_rank_of(vllm_config))
    return WorkerSide(
        settings,
        facts=cache_facts(vllm_config, kv_cache_config),
        rank=rank,
        incarnation=incarnation,
        locate=partial(
            locate,
            kv_cache_config=kv_cache_config,
            tp_rank=rank.tp,
            tp_size=settings.tp_size,
            model=model,
        ),
    )
