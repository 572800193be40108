"""The cache that is being transferred: specs, plans of memory, blocks and their names. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.cache.block_pool import BlockPool as BlockPool
from kvxfer.cache.free_queue import (
    FreeKVCacheBlockQueue as FreeKVCacheBlockQueue,
    KVCacheBlock as KVCacheBlock,
)
from kvxfer.cache.grouping import (
    create_kv_cache_group_specs as create_kv_cache_group_specs,
    get_kv_cache_groups as get_kv_cache_groups,
    is_kv_cache_type_uniform as is_kv_cache_type_uniform,
    unify_hybrid_kv_cache_specs as unify_hybrid_kv_cache_specs,
    unify_kv_cache_spec_page_size as unify_kv_cache_spec_page_size,
)
from kvxfer.cache.hashing import (
    BlockHashType as BlockHashType,
    ObjectHash as ObjectHash,
    gen_lora_extra_hash_keys as gen_lora_extra_hash_keys,
    gen_mm_extra_hash_keys as gen_mm_extra_hash_keys,
    gen_prompt_embeds_extra_hash_keys as gen_prompt_embeds_extra_hash_keys,
    generate_block_hash_extra_keys as generate_block_hash_extra_keys,
    get_hash_fn_by_name as get_hash_fn_by_name,
    hash_block_tokens as hash_block_tokens,
    hash_request_tokens as hash_request_tokens,
    init_none_hash as init_none_hash,
    need_extra_keys as need_extra_keys,
    none_hash as none_hash,
    sha256 as sha256,
)
from kvxfer.cache.kv_cache_manager import CacheHit as CacheHit, KVCacheManager as KVCacheManager
from kvxfer.cache.kv_events import (
    AllBlocksCleared as AllBlocksCleared,
    BlockRemoved as BlockRemoved,
    BlockStored as BlockStored,
    KVCacheEvent as KVCacheEvent,
    KVEventBatch as KVEventBatch,
    KVEventLog as KVEventLog,
)
from kvxfer.cache.manager import (
    ChunkedLocalAttentionManager as ChunkedLocalAttentionManager,
    FullAttentionManager as FullAttentionManager,
    MambaManager as MambaManager,
    SlidingWindowManager as SlidingWindowManager,
    manager_for as manager_for,
)
from kvxfer.cache.metrics import (
    PrefixCacheStats as PrefixCacheStats,
    PrefixCachingMetrics as PrefixCachingMetrics,
)
from kvxfer.cache.planning import (
    check_enough_kv_cache_memory as check_enough_kv_cache_memory,
    estimate_max_model_len as estimate_max_model_len,
    get_kv_cache_config as get_kv_cache_config,
    get_kv_cache_config_uniform_type as get_kv_cache_config_uniform_type,
    get_kv_cache_configs as get_kv_cache_configs,
    unify_kv_cache_configs as unify_kv_cache_configs,
)
from kvxfer.cache.specs import (
    AttentionSpec as AttentionSpec,
    ChunkedLocalAttentionSpec as ChunkedLocalAttentionSpec,
    FullAttentionSpec as FullAttentionSpec,
    KVCacheConfig as KVCacheConfig,
    KVCacheGroupSpec as KVCacheGroupSpec,
    KVCacheSpec as KVCacheSpec,
    KVCacheTensor as KVCacheTensor,
    MambaSpec as MambaSpec,
    MLAAttentionSpec as MLAAttentionSpec,
    SlidingWindowSpec as SlidingWindowSpec,
    attention_layer_spec as attention_layer_spec,
)

if TYPE_CHECKING:
    from kvxfer.cache.hashing import NONE_HASH as NONE_HASH


if not TYPE_CHECKING:  # or a type checker would find every name in this module

    def __getattr__(name: str) -> BlockHashType:
        # Made on its first use, so that init_none_hash can choose it before.
        if name != "NONE_HASH":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from kvxfer.cache import hashing

        return hashing.NONE_HASH
