"""The names that others build on: where they are, and the parameters that callers pass."""

from __future__ import annotations

import importlib
import inspect

import pytest

SIGNATURES = {
    "kvxfer": {
        "KVOutputAggregator": "expected_finished_count",
        "KVOutputAggregator.aggregate": "self outputs output_rank",
        "KVOutputAggregator.from_connector": "connector world_size",
        "TpKVTopology": "tp_rank remote_tp_size is_mla total_num_kv_heads attn_backend engine_id "
        "remote_block_size",
        "TpKVTopology.tp_ratio": "self remote_tp_size",
        "TpKVTopology.tp_ratio_from_engine_id": "self engine_id",
        "TpKVTopology.block_size_ratio": "self remote_block_size",
        "TpKVTopology.block_size_ratio_from_engine_id": "self engine_id",
        "TpKVTopology.is_kv_replicated": "self engine_id",
        "TpKVTopology.replicates_kv_cache": "self engine_id",
        "TpKVTopology.get_target_remote_ranks": "self remote_tp_size",
        "TpKVTopology.get_target_remote_ranks_from_engine_id": "self engine_id",
    },
    "kvxfer.cache": {
        "FreeKVCacheBlockQueue": "blocks",
        "FreeKVCacheBlockQueue.append": "self block",
        "FreeKVCacheBlockQueue.get_all_free_blocks": "self",
        "FreeKVCacheBlockQueue.popleft": "self",
        "FreeKVCacheBlockQueue.remove": "self block",
        "KVCacheBlock": "block_id ref_cnt block_hash prev_free_block next_free_block",
        "KVCacheBlock.incr_ref": "self",
        "KVCacheBlock.decr_ref": "self",
        "PrefixCachingMetrics": "max_recent_requests",
        "PrefixCachingMetrics.observe": "self stats",
        "PrefixCachingMetrics.reset": "self",
        "check_enough_kv_cache_memory": "config kv_cache_spec available_memory",
        "create_kv_cache_group_specs": "kv_cache_spec grouped_layer_names",
        "estimate_max_model_len": "config kv_cache_spec available_memory",
        "gen_lora_extra_hash_keys": "request",
        "gen_mm_extra_hash_keys": "request start_token_idx end_token_idx start_mm_idx",
        "generate_block_hash_extra_keys": "request start_token_idx end_token_idx start_mm_idx",
        "get_kv_cache_config": "config kv_cache_spec available_memory",
        "get_kv_cache_config_uniform_type": "config kv_cache_spec available_memory",
        "hash_block_tokens": "hash_function parent_block_hash curr_block_token_ids extra_keys",
        "hash_request_tokens": "hash_function block_size request",
        "is_kv_cache_type_uniform": "kv_cache_spec",
        "need_extra_keys": "request",
        "unify_hybrid_kv_cache_specs": "kv_cache_spec",
        "unify_kv_cache_configs": "kv_cache_configs",
    },
    "kvxfer.tensors": {
        "KVBlockZeroer": "device pin_memory",
        "KVBlockZeroer.init_meta": "self attn_groups_iter kernel_block_sizes cache_dtype "
        "runner_only_attn_layers static_forward_context",
        "KVBlockZeroer.zero_block_ids": "self block_ids",
        "add_kv_sharing_layers_to_kv_cache_groups": "shared_kv_cache_layers kv_cache_groups "
        "runner_only_attn_layers",
        "allocate_kv_cache": "kv_cache_config device",
        "bind_kv_cache": "kv_caches forward_context runner_kv_caches num_attn_module",
        "build_attn_metadata": "attn_metadata_builders num_reqs num_tokens query_start_loc "
        "seq_lens num_computed_tokens_cpu block_tables slot_mappings kv_cache_config",
        "copy_kv_blocks": "src_kv_caches dst_kv_caches src_block_ids dst_block_ids direction",
        "gather_mm_placeholders": "placeholders is_embed",
        "get_kv_cache_spec": "vllm_config kv_cache_dtype",
        "init_attn_backend": "kv_cache_config vllm_config device",
        "init_kv_cache": "runner_kv_caches forward_context kv_cache_config attn_backends device",
        "initialize_kv_cache_for_kv_sharing": "shared_kv_cache_layers kv_cache_groups kv_caches",
        "is_residual_scattered_for_sp": "vllm_config num_input_tokens",
        "kv_postprocess_blksize_and_layout_on_receive": "cache indices block_size_ratio",
        "kv_postprocess_blksize_on_receive": "cache indices block_size_ratio",
        "kv_postprocess_layout_on_receive": "cache indices",
        "make_src_and_dst_indices": "src_block_ids dst_block_ids src_device dst_device",
        "prepare_kernel_block_sizes": "kv_cache_config attn_groups",
        "request_memory": "init_snapshot cache_config",
        "reshape_kv_cache": "kv_cache_config raw_tensors attn_backends",
        "sanity_check_mm_encoder_outputs": "mm_embeddings expected_num_items",
        "scatter_mm_placeholders": "embeds is_embed",
        "select_common_block_size": "kv_manager_block_size backends",
    },
    "kvxfer.connector.utils": {
        "get_current_attn_backend": "vllm_config",
        "get_kv_connector_cache_layout": "",
        "yield_req_data": "scheduler_output",
    },
}
CASES = [(home, name, spec) for home, names in SIGNATURES.items() for name, spec in names.items()]


@pytest.mark.parametrize(("home", "name", "expected"), CASES, ids=[case[1] for case in CASES])
def test_signature(home: str, name: str, expected: str) -> None:
    found: object = importlib.import_module(home)
    for part in name.split("."):
        found = getattr(found, part)
    assert callable(found)
    parameters = inspect.signature(found).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    names = expected.split()
    assert [p.name for p in positional[: len(names)]] == names
    assert all(p.default is not p.empty for p in positional[len(names) :])


@pytest.mark.parametrize("home", ["kvxfer", "kvxfer.cache", "kvxfer.tensors"])
def test_everything_that_a_room_exports_is_there_and_described(home: str) -> None:
    room = importlib.import_module(home)
    names = getattr(room, "__all__", dir(room))
    found = {name: getattr(room, name) for name in names if not name.startswith("__")}
    described = {n for n, v in found.items() if inspect.isclass(v) or inspect.isfunction(v)}
    assert described
    assert [name for name in described if not inspect.getdoc(found[name])] == []


def test_the_root_of_all_chains_is_one_hash_everywhere() -> None:
    from kvxfer import cache
    from kvxfer.cache import hashing

    assert isinstance(cache.NONE_HASH, bytes)
    assert len(cache.NONE_HASH) == 32
    assert cache.NONE_HASH == hashing.NONE_HASH
