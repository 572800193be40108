"""The cache that is being transferred: specs, plans of memory, blocks and their names. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.cache.block_pool import BlockPool
from kvxfer.cache.free_queue import FreeKVCacheBlockQueue, KVCacheBlock
from kvxfer.cache.grouping import (
    create_kv_cache_group_specs,
    get_kv_cache_groups,
    is_kv_cache_type_uniform,
    unify_hybrid_kv_cache_specs,
    unify_kv_cache_spec_page_size,
)
from kvxfer.cache.hashing import (
    BlockHashType,
    ObjectHash,
    gen_lora_extra_hash_keys,
    gen_mm_extra_hash_keys,
    gen_prompt_embeds_extra_hash_keys,
    generate_block_hash_extra_keys,
    get_hash_fn_by_name,
    hash_block_tokens,
    hash_request_tokens,
    init_none_hash,
    need_extra_keys,
    none_hash,
    sha256,
)
from kvxfer.cache.kv_cache_manager import CacheHit, KVCacheManager
from kvxfer.cache.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVEventBatch,
    KVEventLog,
)
from kvxfer.cache.manager import (
    ChunkedLocalAttentionManager,
    FullAttentionManager,
    MambaManager,
    SlidingWindowManager,
    manager_for,
)
from kvxfer.cache.metrics import PrefixCacheStats, PrefixCachingMetrics
from kvxfer.cache.planning import (
    check_enough_kv_cache_memory,
    estimate_max_model_len,
    get_kv_cache_config,
    get_kv_cache_config_uniform_type,
    get_kv_cache_configs,
    unify_kv_cache_configs,
)
from kvxfer.cache.specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    attention_layer_spec,
)

if TYPE_CHECKING:
    from kvxfer.cache.hashing import NONE_HASH

__all__ = [
    "NONE_HASH",
    "AllBlocksCleared",
    "AttentionSpec",
    "BlockHashType",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "CacheHit",
    "ChunkedLocalAttentionManager",
    "ChunkedLocalAttentionSpec",
    "FreeKVCacheBlockQueue",
    "FullAttentionManager",
    "FullAttentionSpec",
    "KVCacheBlock",
    "KVCacheConfig",
    "KVCacheEvent",
    "KVCacheGroupSpec",
    "KVCacheManager",
    "KVCacheSpec",
    "KVCacheTensor",
    "KVEventBatch",
    "KVEventLog",
    "MLAAttentionSpec",
    "MambaManager",
    "MambaSpec",
    "ObjectHash",
    "PrefixCacheStats",
    "PrefixCachingMetrics",
    "SlidingWindowManager",
    "SlidingWindowSpec",
    "attention_layer_spec",
    "check_enough_kv_cache_memory",
    "create_kv_cache_group_specs",
    "estimate_max_model_len",
    "gen_lora_extra_hash_keys",
    "gen_mm_extra_hash_keys",
    "gen_prompt_embeds_extra_hash_keys",
    "generate_block_hash_extra_keys",
    "get_hash_fn_by_name",
    "get_kv_cache_config",
    "get_kv_cache_config_uniform_type",
    "get_kv_cache_configs",
    "get_kv_cache_groups",
    "hash_block_tokens",
    "hash_request_tokens",
    "init_none_hash",
    "is_kv_cache_type_uniform",
    "manager_for",
    "need_extra_keys",
    "none_hash",
    "sha256",
    "unify_hybrid_kv_cache_specs",
    "unify_kv_cache_configs",
    "unify_kv_cache_spec_page_size",
]

if not TYPE_CHECKING:  # or a type checker would find every name in this module

    def __getattr__(name: str) -> BlockHashType:
        # Made on its first use, so that init_none_hash can choose it before.
        if name != "NONE_HASH":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from kvxfer.cache import hashing

        return hashing.NONE_HASH
