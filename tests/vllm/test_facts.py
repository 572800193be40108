"""What an engine says of its cache: the same for the same KV, however the engine is set up."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec import UNSET, UnsetType

from kvxfer.errors import ConfigError
from kvxfer.integrations.vllm.facts import (
    CacheModel,
    attention_text,
    cache_facts,
    cache_model,
    num_own_tokens,
    rope_text,
)
from kvxfer.transfer.interleave import Interleave
from kvxfer.transfer.manifest import CacheFacts

# vLLM loads parts of torch that other parts of torch call deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


def text(**fields: Any) -> SimpleNamespace:
    """A Hugging Face text config."""
    return SimpleNamespace(**fields)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (text(), "none"),
        (text(rope_theta=10000.0, rope_scaling=None), "default rope_theta=10000"),
        (
            text(rope_parameters={"rope_type": "default", "rope_theta": 10000}),
            "default rope_theta=10000",
        ),
        (
            text(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0}),
            "linear factor=2 rope_theta=500000",
        ),
        (
            text(rope_parameters={"rope_type": "linear", "factor": 2, "rope_theta": 500000.0}),
            "linear factor=2 rope_theta=500000",
        ),
        (text(rope_theta=1e4, partial_rotary_factor=1.0), "default rope_theta=10000"),
        (
            text(rope_theta=1e4, partial_rotary_factor=0.5),
            "default partial_rotary_factor=0.5 rope_theta=10000",
        ),
        (
            text(
                rope_parameters={
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8},
                }
            ),
            "full_attention(linear factor=8 rope_theta=1000000) "
            "sliding_attention(default rope_theta=10000)",
        ),
    ],
)
def test_rope_has_one_spelling(config: SimpleNamespace, expected: str) -> None:
    assert rope_text(config, 4096) == expected


@pytest.mark.parametrize("name", ["longrope", "su"])
def test_long_requests_choose_other_factors(name: str) -> None:
    config = text(
        rope_theta=1e4,
        rope_scaling={"type": name, "long_factor": [2.0], "short_factor": [1.0]},
        original_max_position_embeddings=4096,
    )
    short, long = rope_text(config, 4096), rope_text(config, 8192)
    assert short == "longrope long_factor=[2.0] rope_theta=10000 short_factor=[1.0] short"
    assert long == short.removesuffix("short") + "long"


def test_a_long_text_ends_in_a_digest() -> None:
    def rope(last: float) -> str:
        factors = [1.0] * 60 + [last]
        return rope_text(text(rope_theta=1e4, rope_scaling={"type": "x", "f": factors}), 1)

    assert rope(1.0) == rope(1.0) != rope(2.0)
    assert len(rope(1.0)) < 190


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (text(), "full"),
        (text(sliding_window=None), "full"),
        (text(sliding_window=4096), "window 4096"),
        (text(sliding_window=4096, layer_types=[FULL, FULL]), "full"),
        (
            text(sliding_window=64, layer_types=[SLIDING, SLIDING, FULL, SLIDING]),
            "window 64, layers 2sFs (s=sliding_attention)",
        ),
        (text(sliding_window=64, sliding_window_pattern=6), "window 64, sliding_window_pattern 6"),
        (text(num_kv_shared_layers=2), "last 2 layers share KV"),
        (text(attention_chunk_size=8192), "chunk 8192"),
    ],
)
def test_what_layers_look_at(config: SimpleNamespace, expected: str) -> None:
    assert attention_text(config) == expected


class Model:
    """A ``ModelConfig``, as far as it is read."""

    def __init__(self, folder: Path, **fields: Any) -> None:
        self.model = str(folder)
        self.dtype = torch.float32
        self.max_model_len = 512
        self.use_mla = False
        self.num_kv_heads = 4
        config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rope_theta": 1e4}
        self.hf_config = self.hf_text_config = text(**config)
        self.__dict__.update(fields)

    def get_total_num_kv_heads(self) -> int:
        return self.num_kv_heads

    def get_head_size(self) -> int:
        return 32

    def get_total_num_hidden_layers(self) -> int:
        return 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def engine(model: Any, *, extra: dict[str, Any] | None = None, **others: Any) -> SimpleNamespace:
    parallel = SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1)
    transfer = SimpleNamespace(kv_connector_extra_config=extra or {})
    defaults = {
        "model_config": model,
        "parallel_config": parallel,
        "cache_config": SimpleNamespace(cache_dtype="auto"),
        "load_config": SimpleNamespace(load_format="auto"),
        "kv_transfer_config": transfer,
        "speculative_config": None,
    }
    return SimpleNamespace(**(defaults | others))


def eagle(folder: Path, **fields: Any) -> SimpleNamespace:
    return SimpleNamespace(
        method="eagle3", draft_model_config=Model(folder, **fields), use_eagle=lambda: True
    )


def test_the_counts_of_heads_that_layers_have(folder: Path) -> None:
    assert cache_model(engine(Model(folder))) == CacheModel(
        dtype=torch.float32, num_kv_heads=4, head_counts=frozenset({4}), num_layers=2
    )
    per_layer = SimpleNamespace(per_layer_overrides=[{}, {"total_num_kv_heads": 2}])
    unlike = Model(folder, model_arch_config=per_layer)
    assert cache_model(engine(unlike)).head_counts == frozenset({2, 4})
    draft = cache_model(engine(Model(folder), speculative_config=eagle(folder, num_kv_heads=8)))
    assert (draft.num_kv_heads, draft.head_counts) == (8, frozenset({4}))
    assert draft.draft_counts == frozenset({8})


@pytest.mark.parametrize(
    ("layer", "is_drafts"),
    [
        ("model.layers.1.self_attn.attn", False),
        ("language_model.model.layers.1.self_attn.attn", False),
        ("model.layers.2.self_attn.attn", True),  # EAGLE
        ("model.layers.12.mtp_block.self_attn.attn", True),
        ("model.mtp.layers.0.self_attn.attn", True),
        ("mtp.layers.0.self_attn.attn", True),
        ("model.eagle_layers.1.self_attn.attn", True),
        ("draft_model.model.layers.0.self_attn.attn", True),
        ("encoder.attn", False),
    ],
)
def test_a_drafts_layers_are_known_by_name(folder: Path, layer: str, is_drafts: bool) -> None:
    """As vLLM 0.32 names them, behind the model's two."""
    config = engine(Model(folder), speculative_config=eagle(folder))
    assert cache_model(config).is_draft(layer) == is_drafts
    assert not cache_model(engine(Model(folder))).is_draft(layer)


@pytest.mark.parametrize(
    ("lookahead", "window", "expected"), [(None, None, 1), (0, None, 1), (3, None, 3), (3, 64, 1)]
)
def test_how_much_of_a_prompt_decode_computes(
    folder: Path, lookahead: int | None, window: int | None, expected: int
) -> None:
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    more: dict[str, Any] = {}
    if lookahead is not None:
        more["num_prefill_lookahead_tokens"] = lookahead
    spec = full_spec()
    if window is not None:
        shape = {"block_size": 64, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
        spec = interface.SlidingWindowSpec(**shape, sliding_window=window)
    config = engine(Model(folder), **more)
    assert num_own_tokens(config, cache(group(spec, "a"))) == expected


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"decode_context_parallel_size": 1, "cp_kv_cache_interleave_size": 8}, UNSET),
        ({"decode_context_parallel_size": 2}, Interleave(2, 1, 1)),
        (
            {"decode_context_parallel_size": 4, "cp_kv_cache_interleave_size": 8},
            Interleave(4, 1, 8),
        ),
        (
            {
                "decode_context_parallel_size": 2,
                "cp_kv_cache_interleave_size": 1,
                "dcp_kv_cache_interleave_size": 16,
            },
            Interleave(2, 1, 16),
        ),
    ],
)
def test_which_tokens_a_rank_keeps(
    folder: Path, sizes: dict[str, int], expected: Interleave | UnsetType
) -> None:
    config = engine(Model(folder), parallel_config=SimpleNamespace(**sizes))
    assert cache_model(config, cp_rank=1).interleave == expected


def group(spec: Any, *layers: str) -> SimpleNamespace:
    return SimpleNamespace(kv_cache_spec=spec, layer_names=list(layers))


def cache(*groups: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(num_blocks=8, kv_cache_groups=list(groups))


def full_spec(**fields: Any) -> Any:
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    defaults = {"block_size": 64, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    return interface.FullAttentionSpec(**(defaults | fields))


def test_all_facts_of_a_small_model(folder: Path) -> None:
    found = cache_facts(engine(Model(folder)), cache(group(full_spec(), "a", "b")))
    assert found == CacheFacts(
        model="llama LlamaForCausalLM",
        weights=found.weights,
        rope="default rope_theta=10000",
        dtype="float32",
        quantisation="none",
        num_kv_heads=4,
        head_size=32,
        num_layers=2,
    )
    assert found.weights.startswith("files-")


def test_facts_do_not_know_how_windows_are_kept(folder: Path) -> None:
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    window = interface.SlidingWindowSpec(
        block_size=32, num_kv_heads=4, head_size=32, dtype=torch.float32, sliding_window=48
    )
    kept_apart = cache(group(full_spec(), "a"), group(window, "b"))
    kept_alike = cache(group(full_spec(sliding_window=48), "a", "b"))
    windows = text(
        model_type="m", architectures=["M"], sliding_window=48, layer_types=[FULL, SLIDING]
    )
    model = Model(folder, hf_text_config=windows, hf_config=windows)
    facts = [cache_facts(engine(model), config) for config in (kept_apart, kept_alike)]
    assert facts[0] == facts[1]
    assert facts[0].attention == "window 48, layers Fs (s=sliding_attention)"


def test_quantised_caches(folder: Path) -> None:
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    mode = interface.KVQuantMode.FP8_PER_TENSOR
    config = cache(group(full_spec(dtype=torch.uint8, kv_quant_mode=mode), "a"))

    def facts(cache_dtype: str, **fields: Any) -> CacheFacts:
        settings = SimpleNamespace(cache_dtype=cache_dtype, **fields)
        return cache_facts(engine(Model(folder), cache_config=settings), config)

    assert facts("fp8") == facts("fp8_e4m3")
    assert facts("fp8").dtype == "uint8"
    assert facts("fp8").quantisation == "fp8_per_tensor float8_e4m3fn"
    assert facts("fp8_e5m2").quantisation == "fp8_per_tensor fp8_e5m2"
    assert facts("fp8", kv_cache_dtype_skip_layers=["1", "0"]).quantisation == (
        "fp8_per_tensor float8_e4m3fn without layers 0, 1"
    )
    with pytest.raises(ConfigError, match="calculate_kv_scales: expected scales that both"):
        facts("fp8", calculate_kv_scales=True)


def test_a_latent_has_one_head(folder: Path) -> None:
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    spec = interface.MLAAttentionSpec(
        block_size=64, num_kv_heads=1, head_size=32, dtype=torch.float32
    )
    found = cache_facts(engine(Model(folder, use_mla=True)), cache(group(spec, "a")))
    assert (found.is_mla, found.num_kv_heads) == (True, 1)


def test_the_users_name_for_the_weights_is_taken(folder: Path) -> None:
    config = engine(Model(folder), extra={"weights_identity": "mine"})
    assert cache_facts(config, cache(group(full_spec(), "a"))).weights == "mine"


def weights_with(
    folder: Path, overrides: Any, *, load_format: str = "auto", **extra: Any
) -> tuple[str, str]:
    """The fact of an engine with these overrides, and of one without any."""
    made = [Model(folder, hf_overrides=overrides), Model(folder)]
    load_config = SimpleNamespace(load_format=load_format)
    configs = [engine(model, load_config=load_config, extra=extra) for model in made]
    first, second = (cache_facts(each, cache(group(full_spec(), "a"))).weights for each in configs)
    return first, second


def test_what_is_put_over_the_models_config_is_a_fact(folder: Path) -> None:
    found, plain = weights_with(folder, {"b": {"y": [1], "x": 2}, "a": None})
    assert found == plain + ' with {"a":null,"b":{"x":2,"y":[1]}}'
    assert weights_with(folder, {}) == (plain, plain)
    long, _ = weights_with(folder, {"a": "x" * 1000})
    other, _ = weights_with(folder, {"a": "x" * 999 + "y"})
    assert long != other
    assert len(long) < 300


@pytest.mark.parametrize("overrides", [lambda config: config, {"a": {"b": object()}}])
def test_overrides_that_cannot_be_compared_are_refused(folder: Path, overrides: Any) -> None:
    with pytest.raises(ConfigError, match="hf_overrides: expected .* weights_identity"):
        weights_with(folder, overrides)
    named, _ = weights_with(folder, overrides, weights_identity="mine")
    assert named == "mine"


def test_the_overrides_that_vllm_was_told(folder: Path) -> None:
    """In a draft's config stands a function of vLLM's own."""
    pytest.importorskip("vllm")
    from vllm import EngineArgs
    from vllm.config import SpeculativeConfig

    llama = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 1024,
        "rms_norm_eps": 1e-5,
    }
    (folder / "config.json").write_text(json.dumps(llama))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    found = []
    for overrides in ({}, {"rms_norm_eps": 0.5}):
        config = EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            hf_overrides=overrides,
            kv_transfer_config={"kv_connector": "KvxferConnector", "kv_role": "kv_both"},
        ).create_engine_config()
        assert config.model_config.hf_text_config.rms_norm_eps == (0.5 if overrides else 1e-5)
        found.append(cache_facts(config, cache(group(full_spec(), "a"))))
    assert found[0].weights != found[1].weights
    assert found[1].weights.endswith(' with {"rms_norm_eps":0.5}')
    draft = eagle(folder, hf_overrides=SpeculativeConfig.hf_config_override)
    facts = cache_facts(engine(Model(folder), speculative_config=draft), cache(group(full_spec())))
    assert facts.draft_layers == (f"eagle3 of {found[0].weights}",)


def test_draft_layers_are_named_by_method_and_weights(folder: Path) -> None:
    config = engine(Model(folder), speculative_config=eagle(folder))
    found = cache_facts(config, cache(group(full_spec(), "a")))
    assert found.draft_layers == (f"eagle3 of {found.weights}",)
    ngram = SimpleNamespace(method="ngram", draft_model_config=Model(folder), use_eagle=lambda: 0)
    config = engine(Model(folder), speculative_config=ngram)
    assert cache_facts(config, cache(group(full_spec(), "a"))).draft_layers == ()


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("CrossAttentionSpec", {}, "what an encoder made"),
        ("EncoderOnlyAttentionSpec", {}, "keeps nothing"),
        ("RSWASpec", {"rswa_window": 64}, "not one window"),
        ("SinkFullAttentionSpec", {"sink_len": 4}, "not the request's"),
        ("HiddenStateCacheSpec", {}, "hidden states"),
        ("SlidingWindowMLASpec", {"sliding_window": 64, "bounded_replay": True}, "bounded replay"),
        ("CircularBufferSpec", {}, "a ring"),
        ("HiSparseHotSpec", {"page_size": 64, "blocks_per_request": 2}, "a copy that only this"),
        ("HiSparseResidentSpec", {"page_size": 64}, "a copy that only this"),
    ],
)
def test_caches_that_cannot_move(
    folder: Path, kind: str, fields: dict[str, Any], reason: str
) -> None:
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    defaults = {"block_size": 64, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    if kind.startswith("HiSparse"):
        defaults = {"block_size": 64}
    spec = getattr(interface, kind)(**(defaults | fields))
    with pytest.raises(ConfigError, match=f"a: expected full, .* got {kind}: .*{reason}"):
        cache_facts(engine(Model(folder)), cache(group(spec, "a")))


def test_a_states_types_are_a_fact(folder: Path) -> None:
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    shape: dict[str, Any] = {"block_size": 64, "shapes": ((3, 4), (2, 2, 2))}
    state = interface.MambaSpec(**shape, dtypes=(torch.bfloat16, torch.float32))
    groups = (group(full_spec(), "a"), group(state, "b"))
    found = cache_facts(engine(Model(folder)), cache(*groups))
    assert found.dtype == "float32, state bfloat16 float32"
    drafted = interface.MambaSpec(**shape, dtypes=state.dtypes, num_speculative_blocks=2)
    groups = (group(full_spec(), "a"), group(drafted, "b"))
    assert cache_facts(engine(Model(folder)), cache(*groups)) == found  # with or without drafts


def test_a_group_of_its_own_is_refused(folder: Path) -> None:
    hidden = group(full_spec(), "a")
    hidden.enable_kv_transfer = False
    with pytest.raises(ConfigError, match="KV cache group 0: .*not transferable"):
        cache_facts(engine(Model(folder)), cache(hidden))


def test_a_group_of_unlike_layers(folder: Path) -> None:
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    layers = {"a": full_spec(), "b": full_spec(dtype=torch.bfloat16)}
    spec = interface.UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs=layers)
    found = cache_facts(engine(Model(folder)), cache(group(spec, "a", "b")))
    assert found.dtype == "bfloat16, float32"


class _Greedy(ModuleType):
    """Fails on every name that is looked for in it, as lazy packages do."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError(f"{name} needs what is not installed")


def test_what_is_pickled_looks_into_no_other_module(monkeypatch: pytest.MonkeyPatch) -> None:
    compat = pytest.importorskip("kvxfer.integrations.vllm.compat")

    modules = {"a_lazy_package": _Greedy("a_lazy_package"), **sys.modules}
    monkeypatch.setattr(sys, "modules", modules)  # it comes first
    assert compat.msgspec.UNSET is pickle.loads(pickle.dumps(compat.msgspec.UNSET))
