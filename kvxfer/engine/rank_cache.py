"""One rank's KV cache: planned, allocated, bound to the layers, described for the wires."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from kvxfer.cache.manager import NO_BLOCK
from kvxfer.cache.specs import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from kvxfer.engine.attention import (
    AttentionMetadata,
    ForwardContext,
    PagedAttention,
    PagedBackend,
    Sight,
    paged_layers,
    sharing_layers,
)
from kvxfer.engine.config import EngineConfig, Role
from kvxfer.engine.kv_plan import plan_kv_caches
from kvxfer.engine.model_config import (
    ModelConfig,
    TpShard,
    attention_layers,
    state_shard,
)
from kvxfer.engine.state import StateLayer, layer_regions
from kvxfer.tensors.attention import (
    AttentionGroup,
    build_attn_metadata,
    init_attn_backend,
    prepare_kernel_block_sizes,
)
from kvxfer.tensors.block_zeroer import KVBlockZeroer
from kvxfer.tensors.kv_cache import add_kv_sharing_layers_to_kv_cache_groups, init_kv_cache
from kvxfer.tensors.regions import kv_regions
from kvxfer.tensors.shared_memory import make_pool
from kvxfer.transfer.layout import Region
from kvxfer.transports.base import LocalMemory


@dataclass(frozen=True, slots=True)
class RequestStep:
    """One request's part of a step. ``block_ids``: for each group its table, by position."""

    block_ids: Sequence[Sequence[int]]
    num_computed_tokens: int
    num_new_tokens: int

    @property
    def seq_len(self) -> int:
        return self.num_computed_tokens + self.num_new_tokens


class _StepTables(TypedDict):
    """Arguments of ``build_attn_metadata``; ``block_tables`` (0 where there is no block) and
    ``slot_mappings`` by group. All int64.
    """

    num_reqs: int
    num_tokens: int
    query_start_loc: Tensor
    seq_lens: Tensor
    num_computed_tokens_cpu: Tensor
    block_tables: tuple[Tensor, ...]
    slot_mappings: tuple[Tensor, ...]


def step_tables(
    requests: Sequence[RequestStep],
    groups: Sequence[KVCacheGroupSpec],
    device: torch.device | str = "cpu",
) -> _StepTables:
    """Raises ValueError for too few blocks, or none where a new token sees one."""
    for index, request in enumerate(requests):
        _check(index, request, groups)
    starts = itertools.accumulate((request.num_new_tokens for request in requests), initial=0)
    query_start_loc = list(starts)
    block_tables: list[Tensor] = []
    slot_mappings: list[Tensor] = []
    for number, group in enumerate(groups):
        tables = [request.block_ids[number] for request in requests]
        most = max(map(len, tables), default=0)
        rows = [[*table, *itertools.repeat(0, most - len(table))] for table in tables]
        table = torch.tensor(rows, dtype=torch.int64, device=device).reshape(len(rows), most)
        block_tables.append(table.clamp_(min=0))
        slots = [
            slot
            for request, blocks in zip(requests, tables, strict=True)
            for slot in _new_slots(request, blocks, group.kv_cache_spec)
        ]
        slot_mappings.append(torch.tensor(slots, dtype=torch.int64, device=device))
    return _StepTables(
        num_reqs=len(requests),
        num_tokens=query_start_loc[-1],
        query_start_loc=torch.tensor(query_start_loc, dtype=torch.int64),
        seq_lens=torch.tensor([request.seq_len for request in requests], dtype=torch.int64),
        num_computed_tokens_cpu=torch.tensor(
            [request.num_computed_tokens for request in requests], dtype=torch.int64
        ),
        block_tables=tuple(block_tables),
        slot_mappings=tuple(slot_mappings),
    )


def _new_slots(request: RequestStep, blocks: Sequence[int], spec: KVCacheSpec) -> list[int]:
    if isinstance(spec, MambaSpec):
        return [0] * request.num_new_tokens  # of a state only its block counts
    block_size = spec.block_size
    slots: list[int] = []
    token = request.num_computed_tokens
    while token < request.seq_len:
        position, offset = divmod(token, block_size)
        count = min(block_size - offset, request.seq_len - token)
        first = blocks[position] * block_size + offset
        slots += range(first, first + count)
        token += count
    return slots


def _check(index: int, request: RequestStep, groups: Sequence[KVCacheGroupSpec]) -> None:
    for number, (blocks, group) in enumerate(zip(request.block_ids, groups, strict=True)):
        block_size = group.kv_cache_spec.block_size
        if request.seq_len > len(blocks) * block_size:
            raise ValueError(
                f"request {index}: expected blocks for {request.seq_len} tokens in group {number}, "
                f"got {len(blocks)} of {block_size} tokens"
            )
        for position in _seen_blocks(request, group.kv_cache_spec):
            if blocks[position] == NO_BLOCK:
                raise ValueError(
                    f"request {index}: expected a block at position {position} of group {number}, "
                    "which a new token sees, got none"
                )


def _seen_blocks(request: RequestStep, spec: KVCacheSpec) -> Sequence[int]:
    """Positions of the blocks that the new tokens see, of a layer that keeps what ``spec`` says."""
    sight = Sight()
    match spec:
        case SlidingWindowSpec():
            sight = Sight(window=spec.sliding_window)
        case ChunkedLocalAttentionSpec():
            sight = Sight(chunk=spec.attention_chunk_size)
        case MambaSpec():  # the state before the step, and the one after it
            ends = (request.num_computed_tokens, request.seq_len)
            return [(end - 1) // spec.block_size for end in ends if end > 0]
    first_seen = sight.first_seen(request.num_computed_tokens)
    return range(first_seen // spec.block_size, -(-request.seq_len // spec.block_size))


log = logging.getLogger("kvxfer.engine")


class RankCache:
    """One rank's cache and the layers that read and write it, by name.

    ``config``: with the groups of layers that read another one's KV. ``buffer``: all bytes, flat
    uint8; the offsets of ``regions`` count from its first. ``memory``: as the wires want it.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        shard: TpShard,
        backend: type[PagedBackend],
    ) -> None:
        """Raises ConfigError for a cache that cannot be planned, ValueError for wrong blocks."""
        self._device = torch.device(config.rank_devices[shard.tp_rank])
        self.config: KVCacheConfig = plan_kv_caches(config, model)[shard.tp_rank]
        attention = paged_layers(model, shard, backend)
        sharing = sharing_layers(attention)
        self.layers: dict[str, PagedAttention | StateLayer] = {
            layer.name: StateLayer(state_shard(model, shard, config.layout))
            if layer.is_state
            else attention[layer.name]
            for layer in attention_layers(model)
        }
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
        # Unless no wire of this engine could use what peers on this host can map
        is_shared = config.role is not Role.ALONE and config.kv.transport in {"auto", "shm"}

        def allocate(nbytes: int) -> Tensor:
            self._pool = make_pool(self._device, nbytes, is_shared=is_shared)
            return self._pool.tensor

        kv_caches = init_kv_cache(
            [],
            self.layers,
            self.config,
            backends,
            self._device,
            allocator=allocate,
            kernel_block_sizes=kernel_tokens,
            shared_kv_cache_layers=sharing,
        )
        self.buffer = self._pool.tensor
        self.memory = LocalMemory((self.buffer,), (self._pool.info,))
        self.regions: tuple[Region, ...] = kv_regions(
            _without_states(self.config),
            *(kv_caches, backends, [self.buffer], shard.kv_lo, shard.kv_hi),
        ) + tuple(
            region
            for number, group in enumerate(groups)
            if isinstance(spec := group.kv_cache_spec, MambaSpec)
            for name in group.layer_names
            for region in layer_regions(
                name, kv_caches[name], self.buffer, model, shard, group=number, spec=spec
            )
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
        """By layer name. Raises ValueError where a block that a new token sees is missing."""
        tables = step_tables(requests, self.config.kv_cache_groups, self._device)
        return build_attn_metadata(self._builders, kv_cache_config=self.config, **tables)

    def close(self) -> None:
        self._pool.close()


def _without_states(config: KVCacheConfig) -> KVCacheConfig:
    """The same groups, of which those of states name no layer."""
    groups = [
        KVCacheGroupSpec([], group.kv_cache_spec)
        if isinstance(group.kv_cache_spec, MambaSpec)
        else group
        for group in config.kv_cache_groups
    ]
    return KVCacheConfig(config.num_blocks, config.kv_cache_tensors, groups)
