"""The cache of every rank from settings alone: groups, buffers and blocks written out by hand."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from kvxfer.cache.specs import FullAttentionSpec, KVCacheConfig, SlidingWindowSpec
from kvxfer.engine.attention import ForwardContext, attention_backend, paged_layers
from kvxfer.engine.config import EngineConfig, Role
from kvxfer.engine.kv_plan import kv_cache_specs, longest_request, plan_kv_caches
from kvxfer.engine.model_config import load_model_config, shard_for
from kvxfer.errors import ConfigError
from kvxfer.tensors.attention import get_kv_cache_spec


def engine(**settings: Any) -> EngineConfig:
    return EngineConfig(role=Role.ALONE, engine_id="e", **settings)


def names(*layers: int) -> list[str]:
    return [f"model.layers.{layer}.self_attn" for layer in layers]


def shape(plan: KVCacheConfig) -> tuple[list[list[str]], list[tuple[int, list[str]]]]:
    groups = [group.layer_names for group in plan.kv_cache_groups]
    return groups, [(tensor.size, tensor.shared_by) for tensor in plan.kv_cache_tensors]


# K and V of 16 tokens, 8 heads of 64 float32
BLOCK_NBYTES = 2 * 16 * 8 * 64 * 4


def test_one_kind_of_layers_is_one_group() -> None:
    (plan,) = plan_kv_caches(engine(num_blocks=20), load_model_config(None))
    assert plan.num_blocks == 20
    assert shape(plan) == (
        [names(0, 1, 2, 3)],
        [(20 * BLOCK_NBYTES, names(layer)) for layer in range(4)],
    )
    assert plan.kv_cache_groups[0].kv_cache_spec == FullAttentionSpec(
        block_size=16, num_kv_heads=8, head_size=64, dtype="float32"
    )


def test_windows_are_a_group_of_their_own_in_the_same_buffers() -> None:
    (plan,) = plan_kv_caches(engine(num_blocks=200), load_model_config("hybrid"))
    groups, tensors = shape(plan)
    assert groups == [names(0, 2), names(1, 3)]
    assert tensors == [(200 * BLOCK_NBYTES, names(0, 1)), (200 * BLOCK_NBYTES, names(2, 3))]
    assert plan.kv_cache_groups[0].kv_cache_spec == SlidingWindowSpec(
        block_size=16, num_kv_heads=8, head_size=64, dtype="float32", sliding_window=48
    )


def test_layers_that_share_have_no_place_of_their_own() -> None:
    model = load_model_config("kv-sharing")
    assert list(kv_cache_specs(engine(), model, shard_for(model, 0, 1))) == names(0, 1, 2, 3)
    (plan,) = plan_kv_caches(engine(num_blocks=200), model)
    assert shape(plan)[0] == [names(0, 2), names(1, 3)]


def test_one_table_for_all_where_the_hybrid_manager_is_off() -> None:
    config = engine(num_blocks=20, disable_hybrid_kv_cache_manager=True)
    (plan,) = plan_kv_caches(config, load_model_config("hybrid"))
    assert shape(plan)[0] == [names(0, 1, 2, 3)]
    assert isinstance(plan.kv_cache_groups[0].kv_cache_spec, FullAttentionSpec)


@pytest.mark.parametrize(("tp_size", "num_heads"), [(2, 4), (8, 1)])
def test_every_rank_has_the_same_blocks(tp_size: int, num_heads: int) -> None:
    plans = plan_kv_caches(engine(num_blocks=20, tp_size=tp_size), load_model_config("hybrid"))
    assert len(plans) == tp_size
    assert all(plan == plans[0] for plan in plans)
    spec = plans[0].kv_cache_groups[1].kv_cache_spec
    assert isinstance(spec, FullAttentionSpec)
    assert spec.num_kv_heads == num_heads
    assert plans == plan_kv_caches(
        engine(num_blocks=20, tp_size=tp_size), load_model_config("hybrid")
    )


def test_few_blocks_serve_short_requests() -> None:
    config = engine(num_blocks=2, max_model_len=4096)
    (plan,) = plan_kv_caches(config, load_model_config(None))
    assert plan.num_blocks == 2
    with pytest.raises(ConfigError, match="^num_blocks: expected at least 3, one for each group"):
        plan_kv_caches(config, load_model_config("hybrid"))  # one block for each group


@pytest.mark.parametrize("name", [None, "hybrid", "kv-sharing", "chunked"])
@pytest.mark.parametrize("tp_size", [1, 4])
def test_the_layers_themselves_ask_for_the_same(name: str | None, tp_size: int) -> None:
    model = load_model_config(name, dtype="bfloat16")
    config, shard = engine(tp_size=tp_size), shard_for(model, tp_size - 1, tp_size)
    layers = paged_layers(model, shard, attention_backend("NHD"))
    context = ForwardContext(config, model, layers)
    assert get_kv_cache_spec(context) == kv_cache_specs(config, model, shard)


def test_longest_request() -> None:
    model = load_model_config(None)
    assert longest_request(engine(num_blocks=101, max_model_len=7), model) == 1600
    # n tokens take their blocks in the full group; in the other all but what a window of 48 and a
    # step of 64 leave behind: 7 blocks for 111 tokens, and one as they may begin inside a block
    hybrid = engine(num_blocks=101, max_num_batched_tokens=64)
    assert longest_request(hybrid, load_model_config("hybrid")) == (100 - 8) * 16


def test_planning_needs_no_torch() -> None:
    code = "import sys, kvxfer.engine.kv_plan; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_settings_under_the_names_of_the_utilities() -> None:
    config = engine(num_blocks=9, max_num_batched_tokens=64)
    for section in (config.cache_config, config.model_config, config.scheduler_config):
        assert section is config
    assert config.num_gpu_blocks_override == 9
