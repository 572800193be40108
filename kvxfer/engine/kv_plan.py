"""How an engine's KV cache is laid out: from settings alone, the same in every process of it.

Pure: the ranks allocate by it, and the scheduler hands out blocks by it.
"""

from __future__ import annotations

import copy

from msgspec.structs import replace

from kvxfer.cache.grouping import get_kv_cache_groups
from kvxfer.cache.planning import (
    estimate_max_model_len,
    get_kv_cache_config,
    unify_kv_cache_configs,
)
from kvxfer.cache.specs import KVCacheConfig, KVCacheSpec, MambaSpec, attention_layer_spec
from kvxfer.engine.config import EngineConfig
from kvxfer.engine.model_config import (
    ModelConfig,
    TpShard,
    attention_layers,
    shard_for,
    state_shard,
)
from kvxfer.errors import ConfigError

STATE_DTYPES = ("bfloat16", "float32")
"""Of a state's rows and its recurrence: both hold the layer's whole numbers exactly."""


def plan_kv_caches(config: EngineConfig, model: ModelConfig) -> tuple[KVCacheConfig, ...]:
    """The cache of every tensor-parallel rank, by rank; groups and numbers of blocks are the same
    on all.

    Layers that read another one's KV are in no group. Requests that can never fit are refused one
    by one. Raises ConfigError for blocks that do not hold a single token, ModelError for a TP size
    that does not fit the model.
    """
    shards = [shard_for(model, tp_rank, config.tp_size) for tp_rank in range(config.tp_size)]
    of_ranks = [kv_cache_specs(config, model, shard) for shard in shards]
    plans: list[KVCacheConfig] = []
    for specs in of_ranks:
        alike = [plan for plan, other in zip(plans, of_ranks, strict=False) if other == specs]
        # As a rule all ranks are alike: planned, and spoken of, once.
        plans.append(copy.deepcopy(alike[0]) if alike else _plan(config, specs))
    unify_kv_cache_configs(plans)
    return tuple(plans)


def _plan(config: EngineConfig, specs: dict[str, KVCacheSpec]) -> KVCacheConfig:
    try:
        longest = estimate_max_model_len(config, specs, 0)
        if longest < 1:
            num_groups = len(get_kv_cache_groups(config, specs))
            raise ConfigError(
                f"num_blocks: expected at least {num_groups + 1}, one for each group of layers "
                f"beside block 0, which is never used, got {config.num_blocks}"
            )
        return get_kv_cache_config(replace(config, max_model_len=longest), specs, 0)
    except ValueError as e:
        raise ConfigError(str(e)) from e


def longest_request(config: EngineConfig, model: ModelConfig) -> int:
    """Whatever ``max_model_len`` is. Raises ConfigError where not one token fits, ModelError."""
    plan_kv_caches(config, model)
    specs = kv_cache_specs(config, model, shard_for(model, 0, config.tp_size))
    # No block holds more than its tokens, so no request is longer than the pool.
    unbounded = replace(config, max_model_len=config.num_blocks * config.block_size)
    return estimate_max_model_len(unbounded, specs, 0)


def kv_cache_specs(
    config: EngineConfig, model: ModelConfig, shard: TpShard
) -> dict[str, KVCacheSpec]:
    """What each layer of a rank keeps, in order of depth; without those that read another's.

    With a prefix cache there is a state in each block, else one that is written over in place.
    """
    state_tokens = config.block_size if config.enable_prefix_caching else config.max_model_len
    return {
        layer.name: MambaSpec(
            block_size=state_tokens,
            shapes=state_shard(model, shard, config.layout).shapes,
            dtypes=STATE_DTYPES,
        )
        if layer.is_state
        else attention_layer_spec(
            layer.name,
            block_size=config.block_size,
            num_kv_heads=shard.kv_hi - shard.kv_lo,
            head_size=model.head_size,
            dtype=model.dtype,
            sliding_window=layer.window,
            attention_chunk_size=layer.chunk,
        )
        for layer in attention_layers(model)
        if layer.target is None
    }
