"""What the cache's tensors are made of, and what is done to their blocks. Needs torch."""

from __future__ import annotations

from kvxfer.kernels.block_rewrite import BlockOrder as BlockOrder
from kvxfer.tensors.attention import (
    AttentionBackend as AttentionBackend,
    AttentionGroup as AttentionGroup,
    AttentionLayer as AttentionLayer,
    AttentionMetadataBuilder as AttentionMetadataBuilder,
    CommonAttentionMetadata as CommonAttentionMetadata,
    MultipleOf as MultipleOf,
    build_attn_metadata as build_attn_metadata,
    get_kv_cache_spec as get_kv_cache_spec,
    init_attn_backend as init_attn_backend,
    prepare_kernel_block_sizes as prepare_kernel_block_sizes,
    select_common_block_size as select_common_block_size,
)
from kvxfer.tensors.block_zeroer import KVBlockZeroer as KVBlockZeroer
from kvxfer.tensors.copy_blocks import (
    copy_kv_blocks as copy_kv_blocks,
    make_src_and_dst_indices as make_src_and_dst_indices,
)
from kvxfer.tensors.kv_cache import (
    add_kv_sharing_layers_to_kv_cache_groups as add_kv_sharing_layers_to_kv_cache_groups,
    allocate_kv_cache as allocate_kv_cache,
    bind_kv_cache as bind_kv_cache,
    init_kv_cache as init_kv_cache,
    initialize_kv_cache_for_kv_sharing as initialize_kv_cache_for_kv_sharing,
    reshape_kv_cache as reshape_kv_cache,
)
from kvxfer.tensors.placeholders import (
    gather_mm_placeholders as gather_mm_placeholders,
    sanity_check_mm_encoder_outputs as sanity_check_mm_encoder_outputs,
    scatter_mm_placeholders as scatter_mm_placeholders,
)
from kvxfer.tensors.postprocess import (
    Postprocessor as Postprocessor,
    kv_postprocess_blksize_and_layout_on_receive as kv_postprocess_blksize_and_layout_on_receive,
    kv_postprocess_blksize_on_receive as kv_postprocess_blksize_on_receive,
    kv_postprocess_layout_on_receive as kv_postprocess_layout_on_receive,
    zero_uncovered_tokens as zero_uncovered_tokens,
)
from kvxfer.tensors.regions import kv_regions as kv_regions
from kvxfer.tensors.worker_utils import (
    is_residual_scattered_for_sp as is_residual_scattered_for_sp,
    request_memory as request_memory,
)
