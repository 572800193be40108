"""What the cache's tensors are made of, and what is done to their blocks. Needs torch."""

from __future__ import annotations

from kvxfer.kernels.block_rewrite import BlockOrder
from kvxfer.tensors.attention import (
    AttentionBackend,
    AttentionGroup,
    AttentionLayer,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
    build_attn_metadata,
    get_kv_cache_spec,
    init_attn_backend,
    prepare_kernel_block_sizes,
    select_common_block_size,
)
from kvxfer.tensors.block_zeroer import KVBlockZeroer
from kvxfer.tensors.copy_blocks import copy_kv_blocks, make_src_and_dst_indices
from kvxfer.tensors.kv_cache import (
    add_kv_sharing_layers_to_kv_cache_groups,
    allocate_kv_cache,
    bind_kv_cache,
    init_kv_cache,
    initialize_kv_cache_for_kv_sharing,
    reshape_kv_cache,
)
from kvxfer.tensors.placeholders import (
    gather_mm_placeholders,
    sanity_check_mm_encoder_outputs,
    scatter_mm_placeholders,
)
from kvxfer.tensors.postprocess import (
    Postprocessor,
    kv_postprocess_blksize_and_layout_on_receive,
    kv_postprocess_blksize_on_receive,
    kv_postprocess_layout_on_receive,
    zero_uncovered_tokens,
)
from kvxfer.tensors.regions import kv_regions
from kvxfer.tensors.worker_utils import is_residual_scattered_for_sp, request_memory

__all__ = [
    "AttentionBackend",
    "AttentionGroup",
    "AttentionLayer",
    "AttentionMetadataBuilder",
    "BlockOrder",
    "CommonAttentionMetadata",
    "KVBlockZeroer",
    "MultipleOf",
    "Postprocessor",
    "add_kv_sharing_layers_to_kv_cache_groups",
    "allocate_kv_cache",
    "bind_kv_cache",
    "build_attn_metadata",
    "copy_kv_blocks",
    "gather_mm_placeholders",
    "get_kv_cache_spec",
    "init_attn_backend",
    "init_kv_cache",
    "initialize_kv_cache_for_kv_sharing",
    "is_residual_scattered_for_sp",
    "kv_postprocess_blksize_and_layout_on_receive",
    "kv_postprocess_blksize_on_receive",
    "kv_postprocess_layout_on_receive",
    "kv_regions",
    "make_src_and_dst_indices",
    "prepare_kernel_block_sizes",
    "request_memory",
    "reshape_kv_cache",
    "sanity_check_mm_encoder_outputs",
    "scatter_mm_placeholders",
    "select_common_block_size",
    "zero_uncovered_tokens",
]
