"""Geometries from text and from Hugging Face configs, and the regions of real caches."""

from __future__ import annotations

import errno
import json
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

from kvxfer.engine.attention import attention_backend
from kvxfer.engine.config import EngineConfig, Role
from kvxfer.engine.model_config import load_model_config, shard_for
from kvxfer.engine.rank_cache import RankCache
from kvxfer.errors import ConfigError, IncompatiblePeer
from kvxfer.integrations.vllm.interior import Cells, Named, look_inside
from kvxfer.integrations.vllm.specs import LayerSpec
from kvxfer.plan.geometry import Geometry, make_manifest, parse_geometry, stage_layers
from kvxfer.transfer.interleave import Interleave
from kvxfer.transfer.manifest import RankId

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
GEMMA = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_size": 2560,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
    },
    "dtype": "bfloat16",
}
DEEPSEEK = {
    **LLAMA,
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 4096}
BY_KIND = ["sliding_attention", "full_attention"] * 16


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    def save(config: dict[str, Any]) -> str:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path)

    return save


def parsed(text: str, like: Geometry | None = None) -> Geometry:
    return parse_geometry("--source", text, like)


def facts_of(geometry: Geometry) -> Any:
    return make_manifest("--source", geometry, 64).facts


def test_flags() -> None:
    got = parsed("layers=32,kv_heads=8,head_dim=128,tp=4,block=32,layout=NHD,kv_cache_dtype=fp8")
    assert got == Geometry(
        layers=32,
        kv_heads=8,
        head_dim=128,
        tp=4,
        block=32,
        layout="NHD",
        kv_cache_dtype="fp8",
    )
    facts = facts_of(got)
    assert (facts.dtype, facts.quantisation) == ("uint8", "fp8_per_tensor float8_e4m3fn")


def test_a_sink_without_a_config_has_the_source_s_model() -> None:
    source = parsed("layers=32,kv_heads=8,head_dim=128,dtype=float16,tp=4,block=32,engine=kvxfer")
    sink = parsed("tp=2, layout=NHD", source)
    assert (sink.layers, sink.dtype, sink.engine) == (32, "float16", "kvxfer")
    assert (sink.tp, sink.block, sink.layout) == (2, 16, "NHD")


def test_a_config_or_its_folder(saved: Any) -> None:
    folder = saved(LLAMA)
    got = parsed(f"{folder},tp=4")
    assert got == parsed(f"{folder}/config.json,tp=4")
    assert (got.layers, got.kv_heads, got.head_dim, got.tp) == (32, 8, 128, 4)
    facts = facts_of(got)
    assert facts.model == "llama LlamaForCausalLM"
    assert facts.rope == "default rope_theta=500000"
    assert facts.attention == "full"


@pytest.mark.parametrize(
    ("more", "kv_heads"),
    [
        ({"multi_query": True}, 1),
        ({"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 4}, 4),
        ({}, 32),
    ],
)
def test_a_config_s_heads_under_other_names(
    saved: Any, more: dict[str, Any], kv_heads: int
) -> None:
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert parsed(saved(config | more)).kv_heads == kv_heads


def test_a_config_s_latent(saved: Any) -> None:
    got = parsed(saved(DEEPSEEK))
    assert (got.layers, got.kv_heads, got.head_dim, got.mla) == (61, 1, 576, True)
    assert facts_of(got).is_mla
    assert got.indexer == 0


def test_a_config_s_indexer(saved: Any) -> None:
    """DeepSeek V3.2: an fp8 key of 128 and its scale beside each latent. In a block of the backend
    all keys come first.
    """
    folder = saved(DEEPSEEK | {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64})
    got = parsed(f"{folder},block=128,kernel_block=64,kv_cache_dtype=fp8_ds_mla")
    assert (got.head_dim, got.indexer, str(got)[-34:]) == (
        *(576, 128),
        "one latent of 576, an indexer of 128"[-34:],
    )
    assert facts_of(got).quantisation == "fp8_ds_mla"
    regions = make_manifest("--source", got, 300).ranks[0].regions
    assert len(regions) == 3 * 61
    latent, key, scale = (each for each in regions if each.layer.startswith("model.layers.7."))
    assert (latent.plane, latent.inner_nbytes, latent.kernel_blocks) == ("latent", 656, 2)
    assert (key.inner_nbytes, key.stride_token, scale.inner_nbytes) == (128, 128, 4)
    assert (scale.offset - key.offset, scale.stride_block) == (64 * 128, 64 * 132)
    latent, key, *_ = make_manifest("--sink", parsed(folder), 300).ranks[0].regions
    assert {latent.inner_nbytes, key.inner_nbytes} <= {1152, 128}


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (LLAMA, ["full"] * 32),
        (MISTRAL, ["4096"] * 32),
        ({**LLAMA, "sliding_window": 100, "use_sliding_window": False}, ["full"] * 32),
        ({**LLAMA, "sliding_window": 100, "layer_types": BY_KIND}, ["100", "full"] * 16),
        (GEMMA, (["1024"] * 5 + ["full"]) * 4 + ["1024"] * 2),
    ],
)
def test_a_config_s_windows(saved: Any, config: dict[str, Any], windows: list[str]) -> None:
    manifest = make_manifest("--source", parsed(saved(config)), 64)
    found = {
        int(region.layer.split(".")[2]): str(region.window or "full")
        for region in manifest.ranks[0].regions
    }
    assert [found[layer] for layer in range(len(windows))] == windows


def test_groups_without_a_hybrid_manager_keep_everything(saved: Any) -> None:
    manifest = make_manifest("--source", parsed(f"{saved(GEMMA)},hybrid=false"), 64)
    assert {region.window for region in manifest.ranks[0].regions} == {None}
    assert manifest.facts == facts_of(parsed(saved(GEMMA)))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected a config.json or its folder, or KEY=VALUE"),
        ("tp=4", "missing required field `layers`; give [PATH,]KEY=VALUE"),
        (
            "layers=2,heads=4",
            "unknown field `heads`; give [PATH,]KEY=VALUE,... with keys of layers",
        ),
        ("layers=two,head_dim=8", "layers: expected a whole number, got 'two'"),
        ("layers=2,head_dim=8,tp=0", "tp: expected a whole number >= 1, got '0'"),
        ("layers=2,head_dim=8,mla=maybe", "mla: expected true or false, got 'maybe'"),
        ("layers=2,head_dim=8,layout=HDN", "layout: expected one of HND, NHD, got 'HDN'"),
        ("layers=2,head_dim=8,windows=-1", "windows: expected tokens or full, or several in turn"),
        ("layers=2,kv_heads=8,head_dim=8,tp=3", "expected a divisor or a multiple of 8 KV heads"),
        ("layers=2,kv_heads=8,head_dim=8,mla=true", "kv_heads: expected 1 with mla=true, got 8"),
        ("layers=2,head_dim=8,indexer=128", "indexer: expected 0 without mla=true, got 128"),
        (
            "layers=2,head_dim=512,mla=true,kv_cache_dtype=fp8_ds_mla",
            "kv_cache_dtype: expected fp8_ds_mla with mla=true and head_dim=576 only, got mla=true",
        ),
        (
            "layers=2,kv_heads=2,head_dim=8,tp=4,dcp=4",
            "dcp: expected a divisor of the 2 ranks that",
        ),
        (
            "layers=2,kv_heads=2,head_dim=8,dcp=2",
            "dcp: expected a divisor of the 0 ranks that hold",
        ),
        ("layers=2,head_dim=8,tp=2,dcp=2,engine=kvxfer", "dcp: expected 1 with engine=kvxfer"),
        ("layers=2,head_dim=8,tp=2,dcp=2,windows=8", "windows: expected full with dcp above 1"),
        (
            "layers=2,head_dim=8,tp=2,dcp=2,dcp_interleave=3",
            "dcp_interleave: expected a divisor of the block of 16 tokens, got 3",
        ),
        ("layers=2,head_dim=8,pp=3", "pp: expected at most 2 layers, got 3"),
        ("layers=2,head_dim=8,engine=kvxfer,block=12", "got 12 tokens; HND takes multiples of 8"),
        ("layers=2,head_dim=8,block=16,kernel_block=12", "got 16 tokens"),
        ("layers=2,head_dim=8,mla=true,windows=8", "expected no sliding_window with use_mla"),
        ("layers=4,head_dim=8,shared_layers=4", "shared_layers: expected 0 to 3 of 4"),
        ("/nowhere,tp=2", "'/nowhere' (No such file or directory)"),
    ],
)
def test_mistakes_are_named(text: str, says: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        make_manifest("--source", parsed(text), 64)
    assert str(caught.value).startswith("--source: ")
    assert says in str(caught.value)


def test_a_process_without_room_for_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refused)
    with pytest.raises(ConfigError, match="--sink: .* 4096 tokens, .*; give fewer --tokens"):
        make_manifest("--sink", parsed("layers=2,head_dim=8"), 4096)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "llama"}, "expected the config of a decoder, got KeyError"),
        ([], "expected the config of a decoder, got"),
        ({**LLAMA, "sliding_window": 100}, "layer_types: expected it beside sliding_window 100"),
        ({**LLAMA, "num_hidden_layers": "many"}, "layers: expected a whole number, got 'many'"),
        ({**LLAMA, "dtype": "int4"}, "dtype: expected one of float32, bfloat16, float16"),
    ],
)
def test_configs_that_say_too_little_are_named(saved: Any, config: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(saved(config))
    assert str(caught.value).startswith("--source: ")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            {"layer_types": ["linear_attention"] * 32},
            "got MambaSpec: it keeps a state, whose shape",
        ),
        ({"layer_types": ["ring_attention"] * 32}, "got ring_attention: what it keeps has no desc"),
        ({"index_topk": 2048}, "index_topk: expected one kind of K and V in all layers, got 2048"),
        ({"compress_ratios": [0, 4, 128]}, "compress_ratios: expected one kind of K and V in all"),
        (
            {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_topk_freq": 4},
            "index_topk_freq: expected one kind of K and V in all layers, got 4",
        ),
    ],
)
def test_layers_that_do_not_move_are_refused(saved: Any, more: dict[str, Any], says: str) -> None:
    with pytest.raises(IncompatiblePeer) as caught:
        parsed(saved(LLAMA | more))
    assert says in str(caught.value)
    assert str(caught.value).endswith("serve this model without disaggregation")


def test_a_text_that_is_no_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("weights")
    with pytest.raises(ConfigError, match="expected the config of a decoder, got JSONDecodeError"):
        parsed(str(tmp_path))


def test_a_config_that_is_nested_too_deep_is_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="expected the config of a decoder, got RecursionError"):
        parsed(str(tmp_path))


@pytest.mark.parametrize("tp_rank", [0, 1])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        (None, "layers=4"),
        ("hybrid", "layers=4,windows=48/full"),
        ("chunked", "layers=4,windows=chunk48/full"),
        ("kv-sharing", "layers=6,windows=48/full,shared_layers=2"),
    ],
)
def test_regions_are_the_reference_engine_s(
    name: str | None, text: str, layout: str, tp_rank: int
) -> None:
    """To the byte, in a real cache."""
    text = (
        f"{text},kv_heads=4,head_dim=64,dtype=float32,engine=kvxfer,layout={layout},block=24,tp=2"
    )
    planned = make_manifest("--source", parsed(text), 100).rank(RankId(0, tp_rank))
    config = EngineConfig(
        role=Role.ALONE,
        engine_id="e",
        tp_size=2,
        block_size=24,
        layout=layout,
        num_blocks=planned.regions[0].num_blocks,
    )
    model = load_model_config(name, num_kv_heads=4)
    cache = RankCache(config, model, shard_for(model, tp_rank, 2), attention_backend(layout))
    assert planned.regions == cache.regions
    cache.close()


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("is_latent", [False, True])
def test_planes_are_those_of_vllm_s_cells(layout: str, is_latent: bool) -> None:
    """As the connector reads them from a view [blocks, heads, tokens, cells]."""
    heads = "head_dim=96,mla=true" if is_latent else "kv_heads=4,head_dim=64"
    geometry = parsed(f"layers=2,{heads},block=32,layout={layout},kernel_block=16")
    regions = make_manifest("--source", geometry, 100).ranks[0].regions[: 1 if is_latent else 2]
    spec = LayerSpec(
        block_tokens=32,
        num_kv_heads=geometry.kv_heads,
        head_size=geometry.head_dim,
        head_size_v=0 if is_latent else 64,
        dtype=torch.bfloat16,
        is_latent=is_latent,
    )
    cell_nbytes = spec.dense_nbytes
    is_hnd = layout == "HND"
    cells = Cells(
        num_slots=geometry.kv_heads,
        num_tokens=16,
        cell_nbytes=cell_nbytes,
        stride_slot=16 * cell_nbytes if is_hnd else cell_nbytes,
        stride_token=cell_nbytes if is_hnd else geometry.kv_heads * cell_nbytes,
    )
    inside = look_inside("layer", spec, cells)
    assert isinstance(inside, Named)
    for region, plane in zip(regions, inside.planes, strict=True):
        assert (region.plane, region.offset) == (plane.plane, plane.offset)
        assert (region.inner_nbytes, region.stride_token) == (
            plane.inner_nbytes,
            plane.stride_token,
        )
        assert region.stride_block == cells.block_nbytes
        assert region.kernel_blocks == 2
        assert region.stride_head == cells.stride_slot or geometry.kv_heads == 1


def test_ranks_share_tokens_as_vllm_deals_them_out() -> None:
    geometry = parsed("layers=2,kv_heads=2,head_dim=8,tp=8,dcp=2,dcp_interleave=4,block=8")
    assert str(geometry).startswith("TP 8 DCP 2 by 4, blocks of 8")
    manifest = make_manifest("--source", geometry, 41)
    assert (manifest.facts.dcp_size, manifest.block_tokens) == (2, 16)
    for entry in manifest.ranks:
        (region, *_) = entry.regions
        assert region.interleave == Interleave(2, entry.rank.tp % 2, 4)
        assert (region.head_lo, region.num_blocks) == (entry.rank.tp // 4, 1 + 3)


@pytest.mark.parametrize("num_layers", [4, 7, 32, 61])
@pytest.mark.parametrize("pp_size", [1, 2, 3, 4])
def test_stages_have_all_layers_in_order(num_layers: int, pp_size: int) -> None:
    stages = [range(num_layers)[each] for each in stage_layers(num_layers, pp_size)]
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    sizes = [len(stage) for stage in stages]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == num_layers // pp_size, "the last one has the output beside its layers"
