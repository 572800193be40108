"""One rank's KV cache: planned, allocated in one piece, bound to the layers, and described for the
wires.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from kvxfer.cache.specs import KVCacheConfig
from kvxfer.engine.attention import AttentionMetadata, PagedBackend
from kvxfer.engine.config import EngineConfig, Role
from kvxfer.engine.kv_plan import plan_kv_caches
from kvxfer.engine.layers import ForwardContext, PagedAttention, paged_layers, sharing_layers
from kvxfer.engine.model_config import ModelConfig, TpShard
from kvxfer.engine.step_tables import RequestStep, step_tables
from kvxfer.tensors.attention import (
    AttentionGroup,
    build_attn_metadata,
    init_attn_backend,
    prepare_kernel_block_sizes,
)
from kvxfer.tensors.block_zeroer import KVBlockZeroer
from kvxfer.tensors.kv_cache import add_kv_sharing_layers_to_kv_cache_groups, init_kv_cache
from kvxfer.tensors.regions import kv_regions
from kvxfer.tensors.shared_memory import SharedPool, plain_info
from kvxfer.transfer.layout import Region
from kvxfer.transports.base import LocalMemory

log = logging.getLogger("kvxfer.engine")


class RankCache:
    """One rank's cache and the layers that read and write it.

    Attributes:
        config: groups (layers that read another one's KV included), buffers, number of blocks.
        layers: the model's attention layers by name, bound.
        buffer: all bytes of it, flat uint8; the regions' offsets count from its first.
        regions: where every plane of every layer lies.
        memory: the buffer as the wires want it.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        shard: TpShard,
        backend: type[PagedBackend],
    ) -> None:
        """Allocate and bind. Raises ConfigError for a cache that cannot be planned, ValueError for
        blocks that the backend cannot serve.
        """
        self._device = torch.device(config.rank_devices[shard.tp_rank])
        self.config: KVCacheConfig = plan_kv_caches(config, model)[shard.tp_rank]
        self.layers: dict[str, PagedAttention] = paged_layers(model, shard, backend)
        sharing = sharing_layers(self.layers)
        runner_only: set[str] = set()
        groups = self.config.kv_cache_groups
        add_kv_sharing_layers_to_kv_cache_groups(sharing, groups, runner_only)
        backends, self._builders = init_attn_backend(
            self.config, ForwardContext(config, model, self.layers), self._device
        )
        attn_groups = [
            AttentionGroup(backend, group.layer_names, group.kv_cache_spec, number)
            for number, group in enumerate(groups)
        ]
        kernel_tokens = prepare_kernel_block_sizes(self.config, [[each] for each in attn_groups])
        memory = _Memory(config, self._device)
        kv_caches = init_kv_cache(
            [],
            self.layers,
            self.config,
            backends,
            self._device,
            allocator=memory.allocate,
            kernel_block_sizes=kernel_tokens,
            shared_kv_cache_layers=sharing,
        )
        self._shared = memory.shared
        self.memory = memory.local()
        (self.buffer,) = self.memory.tensors
        self.regions: tuple[Region, ...] = kv_regions(
            self.config, kv_caches, backends, [self.buffer], shard.kv_lo, shard.kv_hi
        )
        if shard.tp_rank == 0:
            log.debug(
                "KV cache: %d blocks of %d tokens, %d groups, %d bytes on each rank",
                *(self.config.num_blocks, config.block_size, len(groups), self.buffer.numel()),
            )
        self._zeroer = KVBlockZeroer(self._device, pin_memory=True)
        self._zeroer.init_meta(attn_groups, kernel_tokens, model.dtype, runner_only, self.layers)

    def zero(self, block_ids: Sequence[int]) -> None:
        """Clear these blocks in all layers, so that a new owner never sees what another left.

        On a GPU in the current stream, so before what the step computes.
        """
        self._zeroer.zero_block_ids(block_ids)

    def metadata(self, requests: Sequence[RequestStep]) -> dict[str, AttentionMetadata]:
        """What the layers need to know of a step, by layer name. Raises ValueError for requests
        that do not have the blocks that their new tokens see.
        """
        tables = step_tables(requests, self.config.kv_cache_groups, self._device)
        return build_attn_metadata(
            self._builders,
            tables.num_reqs,
            tables.num_tokens,
            tables.query_start_loc,
            tables.seq_lens,
            tables.num_computed_tokens,
            tables.block_tables,
            tables.slot_mappings,
            self.config,
        )

    def close(self) -> None:
        """Let nobody map it any more, and drop it."""
        if self._shared is not None:
            self._shared.close()


class _Memory:
    """Host memory that peers on this host can map, unless no wire of this engine could use that;
    on a GPU an allocation of torch's, which a wire can export by itself.
    """

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        self._device = device
        self._is_shared = (
            device.type == "cpu"
            and config.role is not Role.ALONE
            and config.kv.transport in {"auto", "shm"}
        )
        self._tensor: Tensor | None = None
        self.shared: SharedPool | None = None

    def allocate(self, nbytes: int) -> Tensor:
        """All buffers of the cache; zeroed."""
        if self._is_shared:
            self.shared = SharedPool.create(nbytes)
            self._tensor = self.shared.tensor
        else:
            self._tensor = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        return self._tensor

    def local(self) -> LocalMemory:
        """What was allocated."""
        if self._tensor is None:
            raise ValueError("KV cache: expected layers that keep KV, got none")
        info = self.shared.info if self.shared else plain_info(self._tensor)
        return LocalMemory((self._tensor,), (info,))
