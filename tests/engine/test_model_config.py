"""Reading model configs: both spellings, the default, and a refusal by name for everything else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvxfer.engine.model_config import (
    Llama3Rope,
    TpShard,
    attention_layers,
    attention_pattern,
    layer_names,
    load_model_config,
    shard_for,
)
from kvxfer.errors import ModelError

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3_ROPE = Llama3Rope(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)


def write(folder: Path, **changes: object) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(BASE | changes))
    return file


def test_default_is_the_tiny_model() -> None:
    config = load_model_config(None)
    facts = (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads)
    assert facts == (4, 256, 8, 8)
    assert (config.head_size, config.vocab_size, config.intermediate_size) == (64, 2048, 512)
    assert (config.max_position_embeddings, config.dtype, config.weights) == (8192, "float32", None)
    assert layer_names(config)[3] == "model.layers.3.self_attn"


def test_kv_heads_and_dtype_override_the_default() -> None:
    config = load_model_config(None, num_kv_heads=2, dtype="bfloat16")
    assert (config.num_kv_heads, config.dtype) == (2, "bfloat16")


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({}, 10000.0, None),
        ({"rope_theta": 500000}, 500000.0, None),
        ({"rope_theta": 5e5, "rope_scaling": None}, 500000.0, None),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, 500000.0, None),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
            500000.0,
            LLAMA3_ROPE,
        ),
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
            500000.0,
            LLAMA3_ROPE,
        ),
    ],
)
def test_both_spellings_of_rope(
    tmp_path: Path, changes: dict[str, Any], theta: float, scaling: Llama3Rope | None
) -> None:
    config = load_model_config(write(tmp_path, **changes))
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_of_the_file_is_taken_only_when_asked_for(tmp_path: Path, key: str) -> None:
    file = write(tmp_path, **{key: "bfloat16"})
    assert load_model_config(file).dtype == "float32"
    assert load_model_config(file, dtype="auto").dtype == "bfloat16"
    assert load_model_config(file, dtype="float16").dtype == "float16"


def test_head_size_and_kv_heads_follow_from_the_rest_when_absent(tmp_path: Path) -> None:
    config = load_model_config(write(tmp_path, num_key_value_heads=None))
    assert (config.num_kv_heads, config.head_size) == (8, 8)
    assert load_model_config(write(tmp_path, head_dim=16)).head_size == 16


@pytest.mark.parametrize(("eos", "want"), [(None, ()), (7, (7,)), ([7, 9], (7, 9))])
def test_end_tokens(tmp_path: Path, eos: object, want: tuple[int, ...]) -> None:
    assert load_model_config(write(tmp_path, eos_token_id=eos)).eos_token_ids == want


def test_folder_with_weights_takes_end_tokens_of_the_generation_config(tmp_path: Path) -> None:
    write(tmp_path, eos_token_id=1)
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    config = load_model_config(tmp_path)
    assert (config.eos_token_ids, config.weights) == ((3, 4), tmp_path)
    with pytest.raises(ModelError, match=r"num_kv_heads: the weights in .* have 2, got 4"):
        load_model_config(tmp_path, num_kv_heads=4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "mamba"},
            "model_type: expected one of llama, mistral, ministral, got 'mamba'",
        ),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu', got 'gelu'"),
        ({"attention_bias": True}, "attention_bias: expected False, got True"),
        ({"mlp_bias": True}, "mlp_bias: expected False, got True"),
        ({"sliding_window": 128}, "sliding_window: expected null for llama, got 128"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types: expected none for llama, got 2 layers",
        ),
        ({"model_type": "mistral"}, "sliding_window: expected it to be given for mistral"),
        (
            {"model_type": "ministral", "sliding_window": 8, "num_key_value_heads": None},
            "num_key_value_heads: expected it to be given for ministral",
        ),
        (
            {"model_type": "mistral", "sliding_window": 0},
            "sliding_window: expected at least 1 token, got 0",
        ),
        (
            {"model_type": "mistral", "sliding_window": 8, "layer_types": ["full_attention"] * 2},
            "layer_types: expected none for mistral, got 2 layers; give model_type ministral",
        ),
        (
            {"model_type": "ministral", "sliding_window": 8, "layer_types": ["full_attention"]},
            "layer_types: expected one for each of 2 layers, got 1",
        ),
        (
            {
                "model_type": "ministral",
                "sliding_window": 8,
                "layer_types": ["full_attention", "chunked_attention"],
            },
            "layer_types: expected full_attention or sliding_attention, got 'chunked_attention'",
        ),
        (
            {
                "model_type": "ministral",
                "sliding_window": None,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            "sliding_window: expected a number of tokens for sliding_attention, got null",
        ),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers: expected 0 to 1 of 2 layers, got 2"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers: expected 0 to 1 of 2 layers, got -1"),
        (
            {
                "model_type": "ministral",
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"],
                "num_kv_shared_layers": 1,
            },
            r"num_kv_shared_layers: model\.layers\.1\.self_attn: expected a layer with full "
            "attention among the first 1, got none",
        ),
        ({"quantization_config": {"bits": 4}}, "quantization_config: expected None, got"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor: expected 1\.0, got 0\.5"),
        (
            {"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}},
            r"rope_parameters\.partial_rotary_factor: expected 1\.0, got 0\.5",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            "rope_type: expected 'default' or 'llama3', got 'yarn'",
        ),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling: .*missing required field"),
        ({"rope_parameters": {"rope_theta": "big"}}, "rope_theta: expected a number, got 'big'"),
        ({"vocab_size": "many"}, "Expected `int`, got `str`"),
        ({"num_key_value_heads": 3}, "num_kv_heads: expected a divisor of num_heads 8, got 3"),
        ({"num_attention_heads": 7}, "num_attention_heads: expected a divisor of hidden_size 64"),
        ({"head_dim": 7}, "head_size: expected an even number"),
        ({"num_hidden_layers": 0}, "num_layers: expected more than 0, got 0"),
        ({"num_key_value_heads": 0}, "num_kv_heads: expected more than 0, got 0"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load_model_config(write(tmp_path, **changes))


def test_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="dtype: expected one of float32, .* got 'float8'"):
        load_model_config(None, dtype="float8")
    with pytest.raises(ModelError, match="dtype: expected one of float32, .* got 'int8'"):
        load_model_config(write(tmp_path, dtype="int8"), dtype="auto")


S, F = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("changes", "windows", "pattern"),
    [
        ({}, [None, None], "full"),
        ({"layer_types": [F, F], "sliding_window": None}, [None, None], "full"),
        ({"model_type": "mistral", "sliding_window": None}, [None, None], "full"),
        ({"model_type": "mistral", "sliding_window": 9}, [9, 9], "9, 9"),
        ({"model_type": "ministral", "sliding_window": None}, [None, None], "full"),
        ({"model_type": "ministral", "sliding_window": 9}, [9, 9], "9, 9"),
        (
            {"model_type": "ministral", "sliding_window": 9, "layer_types": [S, F]},
            [9, None],
            "9, full",
        ),
        (
            {"model_type": "ministral", "sliding_window": 9, "layer_types": [F, F]},
            [None, None],
            "full",
        ),
        ({"num_kv_shared_layers": 1}, [None, None], "full, full=0"),
    ],
)
def test_windows_of_the_layers(
    tmp_path: Path, changes: dict[str, Any], windows: list[int | None], pattern: str
) -> None:
    config = load_model_config(write(tmp_path, **changes))
    assert [layer.window for layer in attention_layers(config)] == windows
    assert attention_pattern(config) == pattern


def test_sharing_layers_read_the_last_own_layer_of_their_kind(tmp_path: Path) -> None:
    config = load_model_config(
        write(
            tmp_path,
            model_type="ministral",
            sliding_window=9,
            num_hidden_layers=7,
            layer_types=[S, F, F, S, F, S, F],
            num_kv_shared_layers=3,
        )
    )
    targets = [layer.target for layer in attention_layers(config)]
    window, full = "model.layers.3.self_attn", "model.layers.2.self_attn"
    assert targets == [None, None, None, None, full, window, full]
    assert attention_pattern(config) == "9, full, full, 9, full=2, 9=3, full=2"


def test_built_in_models() -> None:
    tiny, hybrid, sharing = (load_model_config(name) for name in (None, "hybrid", "kv-sharing"))
    assert [layer.window for layer in attention_layers(tiny)] == [None] * 4
    assert [layer.window for layer in attention_layers(hybrid)] == [48, None, 48, None]
    assert attention_pattern(sharing) == "48, full, 48, full, 48=2, full=3"
    for config in (hybrid, sharing):
        facts = (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_size)
        assert facts == (256, 8, 8, 64)
        assert config.weights is None
    assert load_model_config("hybrid", num_kv_heads=2, dtype="float16").num_kv_heads == 2


def test_a_folder_may_be_called_like_a_built_in_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hybrid").mkdir()
    write(tmp_path / "hybrid")
    (tmp_path / "hybrid" / "model.safetensors").touch()
    monkeypatch.chdir(tmp_path)
    assert load_model_config("./hybrid").num_layers == 2
    assert load_model_config(Path("hybrid")).num_layers == 2
    assert load_model_config("hybrid").num_layers == 4


def test_missing_files_are_named(tmp_path: Path) -> None:
    message = r"nowhere: cannot be read \(No such file.*or one of hybrid, kv-sharing"
    with pytest.raises(ModelError, match=message):
        load_model_config(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
        load_model_config(tmp_path)
    write(tmp_path)
    with pytest.raises(ModelError, match=r"expected \*\.safetensors files, got none; give .*json"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: .*truncated"):
        load_model_config(tmp_path)


def test_shards_split_and_replicate() -> None:
    config = load_model_config(None, num_kv_heads=2)
    assert shard_for(config, 1, 2) == TpShard(
        tp_rank=1, tp_size=2, query_lo=4, query_hi=8, kv_lo=1, kv_hi=2, mlp_lo=256, mlp_hi=512
    )
    assert shard_for(config, 0, 1).kv_hi == 2
    four = [shard_for(config, rank, 4) for rank in range(4)]
    assert [(shard.kv_lo, shard.kv_hi) for shard in four] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert [(shard.query_lo, shard.query_hi) for shard in four] == [(0, 2), (2, 4), (4, 6), (6, 8)]


def test_tp_sizes_that_do_not_fit_are_refused() -> None:
    config = load_model_config(None)
    with pytest.raises(ModelError, match="a divisor or a multiple of 8 KV heads, got 3"):
        shard_for(config, 0, 3)
    with pytest.raises(ModelError, match="expected a divisor of num_heads 8, got 16"):
        shard_for(config, 0, 16)
    with pytest.raises(ModelError, match=r"tp_rank: expected 0 <= tp_rank < tp_size, got 2 of 2"):
        shard_for(config, 2, 2)
