"""Tiny models with real, seeded float32 weights, made once and kept in a folder.

float32 because greedy tokens of bfloat16 flip with the shape of the batch; ``initializer_range``
0.08 because smaller weights soon repeat one token whatever the KV says.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCAB_SIZE = 1024
WINDOW_TOKENS = 64
_VERSION = 1  # of this recipe: another one makes other folders
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "hidden_size": 256,
    "intermediate_size": 688,
    "max_position_embeddings": 4096,
    "initializer_range": 0.08,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def _llama(num_kv_heads: int = 4) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = _SHAPE | {"num_key_value_heads": num_kv_heads}
    return LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=4, rms_norm_eps=1e-5))


def _one_head() -> Any:
    """With one head of KV, so that two ranks may share its tokens."""
    return _llama(1)


def _experts() -> Any:
    """Two of four experts for each token: data-parallel ranks of it compute in step."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        **_SHAPE, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2
    )
    return MixtralForCausalLM(config)


def _hybrid() -> Any:
    """Two layers with a window and two without, which become two KV cache groups."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(
        **_SHAPE,
        num_hidden_layers=len(kinds),
        layer_types=kinds,
        sliding_window=WINDOW_TOKENS,
        query_pre_attn_scalar=32,
    )
    return Gemma3ForCausalLM(config)


def _chunked() -> Any:
    """Llama 4: two layers that see chunks of 64 tokens, two that see everything."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(
        **_SHAPE,
        num_hidden_layers=4,
        intermediate_size_mlp=688,
        attention_chunk_size=WINDOW_TOKENS,
        no_rope_layers=[1, 0, 1, 0],  # those without rotary embedding see everything
        moe_layers=[],
        interleave_moe_layer_step=0,  # so vLLM says that no layer has experts
        attn_temperature_tuning=False,
    )
    return Llama4ForCausalLM(config)


def _short_conv() -> Any:
    """LFM2: two layers that keep the last two inputs of a convolution, two of attention."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    shape = {name: value for name, value in _SHAPE.items() if name != "head_dim"}
    shape |= {  # what vLLM asks for, under the names of the first release
        "conv_dim": 256,
        "block_dim": 256,
        "block_ff_dim": 688,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_norm_eps": 1e-5,
    }
    config = Lfm2Config(
        **shape,
        num_hidden_layers=4,
        layer_types=["conv", "full_attention"] * 2,
        conv_L_cache=3,
        block_auto_adjust_ff_dim=False,
    )
    return Lfm2ForCausalLM(config)


def _state() -> Any:
    """Two layers of Mamba2, whose heads share one group of B and C, and two of attention."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    shape = {name: value for name, value in _SHAPE.items() if name != "head_dim"}
    config = GraniteMoeHybridConfig(
        **shape,
        num_hidden_layers=4,
        layer_types=["mamba", "attention"] * 2,
        mamba_n_heads=8,
        mamba_d_head=64,
        mamba_n_groups=1,
        mamba_d_state=32,
        mamba_d_conv=4,
        mamba_expand=2,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=512,
        position_embedding_type="rope",
    )
    return GraniteMoeHybridForCausalLM(config)


def _grouped_state() -> Any:
    """Mamba2 whose heads have two groups of B and C, attention, and layers without any cache."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    config = NemotronHConfig(
        **_SHAPE,
        layers_block_type=["linear_attention", "full_attention", "mlp"] * 2,
        mamba_num_heads=8,
        mamba_head_dim=64,
        n_groups=2,
        ssm_state_size=32,
        conv_kernel=4,
    )
    return NemotronHForCausalLM(config)


_DELTA_NET: dict[str, Any] = _SHAPE | {
    "num_hidden_layers": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,  # vLLM's kernel for CPUs has no smaller ones
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}


def _even_delta_net() -> Any:
    """Two layers with a gated delta net and two of attention. All experts of each are chosen: of
    some others would be where ranks add up otherwise, in bfloat16.
    """
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    types = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
    config = Qwen3NextConfig(**_DELTA_NET | types | {"num_experts_per_tok": 4})
    return Qwen3NextForCausalLM(config)


def _delta_net_mtp() -> _Checkpoint:
    """A gated delta net, which says a little of what is said, a layer of attention, and a module
    for multi-token prediction that has the latter.
    """
    import tempfile

    import torch
    from safetensors.torch import load_file
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(**_DELTA_NET | {"layer_types": ["linear_attention", "full_attention"]})
    model = _with_equal_embeddings(Qwen3NextForCausalLM(config))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # which gives each expert its own names
        weights = load_file(Path(folder) / "model.safetensors")
    for name in weights:
        if name.startswith("model.layers.0.") and ("out_proj" in name or "down_proj" in name):
            weights[name] *= 0.1
    size, own = _SHAPE["hidden_size"], "model.layers.1."
    module = {
        name.replace(own, "mtp.layers.0."): weight.clone()
        for name, weight in weights.items()
        if name.startswith(own)
    }
    for norm in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        module[f"mtp.{norm}.weight"] = torch.zeros(size)  # one is added to it
    module["mtp.fc.weight"] = torch.cat([torch.eye(size), torch.zeros(size, size)], 1)
    fields = config.to_dict() | {"architectures": ["Qwen3NextForCausalLM"]}
    return _Checkpoint(fields, weights | module)


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """What only vLLM has a class for: the fields of config.json, and weights by name."""

    config: dict[str, Any]
    weights: dict[str, Any]

    def save_pretrained(self, folder: Path) -> None:
        from safetensors.torch import save_file

        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(self.config))
        weights = {name: weight.contiguous() for name, weight in self.weights.items()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _with_equal_embeddings(model: Any) -> Any:
    """Embeddings of a root mean square of 1, which a layer's norm leaves as they are: a draft that
    has none before its first layer computes the same.
    """
    weight = model.model.embed_tokens.weight.data
    weight[0] = weight[1]  # that of padding is 0
    weight /= weight.pow(2).mean(-1, keepdim=True).sqrt()
    return model


def _drafted() -> Any:
    """A model that :func:`_eagle` guesses well."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**_SHAPE, num_hidden_layers=2, rms_norm_eps=1e-5)
    return _with_equal_embeddings(LlamaForCausalLM(config))


def _eagle(num_kv_heads: int = 4) -> _Checkpoint:
    """An EAGLE head with the layers of :func:`_drafted`, which it feeds with the next token alone:
    it says what the model says, but for not seeing the first token of a prompt. ``num_kv_heads``:
    a multiple of the model's 4, each of which is there several times.
    """
    import torch

    model = _drafted()
    weights = {}
    for name, weight in model.state_dict().items():
        if not name.startswith("model.layers.") or name.endswith("0.input_layernorm.weight"):
            continue
        heads = weight.view(4, 32, -1) if "k_proj" in name or "v_proj" in name else weight
        if heads is not weight:
            heads = heads.repeat_interleave(num_kv_heads // 4, 0).flatten(0, 1)
        weights[name.removeprefix("model.")] = heads
    size = _SHAPE["hidden_size"]
    weights["fc.weight"] = torch.cat([torch.eye(size), torch.zeros(size, size)], 1)
    config = model.config.to_dict() | {
        "architectures": ["LlamaForCausalLM"],
        "num_key_value_heads": num_kv_heads,
    }
    return _Checkpoint(config, weights)


def _drafted_state() -> Any:
    """A model with a state that :func:`_state_eagle` guesses well: one layer of Mamba2, which says
    a little of what is said, and one of attention.
    """
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    shape = {name: value for name, value in _SHAPE.items() if name != "head_dim"}
    config = GraniteMoeHybridConfig(
        **shape,
        num_hidden_layers=2,
        layer_types=["mamba", "attention"],
        mamba_n_heads=8,
        mamba_d_head=64,
        mamba_n_groups=1,
        mamba_d_state=32,
        mamba_d_conv=4,
        mamba_expand=2,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=688,
        position_embedding_type="rope",
        attention_multiplier=32**-0.5,
        rms_norm_eps=1e-5,
    )
    model = _with_equal_embeddings(GraniteMoeHybridForCausalLM(config))
    state = model.model.layers[0]
    state.mamba.out_proj.weight.data *= 0.08
    state.shared_mlp.output_linear.weight.data *= 0
    return model


def _state_eagle() -> _Checkpoint:
    """An EAGLE head with the layer of attention of :func:`_drafted_state`, which it feeds with the
    next token alone.
    """
    import torch

    weights, size = {}, _SHAPE["hidden_size"]
    prefix = "model.layers.1."
    for name, weight in _drafted_state().state_dict().items():
        if not name.startswith(prefix) or "input_layernorm" in name:
            continue
        own = name.replace(prefix, "layers.0.")
        if own.endswith("input_linear.weight"):
            for part, half in zip(("gate", "up"), weight.chunk(2), strict=True):
                weights[f"layers.0.mlp.{part}_proj.weight"] = half
        else:
            own = own.replace("shared_mlp.output_linear", "mlp.down_proj")
            weights[own] = weight
    weights["fc.weight"] = torch.cat([torch.eye(size), torch.zeros(size, size)], 1)
    config = _drafted().config.to_dict() | {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
    }
    return _Checkpoint(config, weights)


def _wide_eagle() -> _Checkpoint:
    """With twice the model's KV heads: its blocks are twice as large."""
    return _eagle(8)


def _mtp(num_modules: int = 1) -> _Checkpoint:
    """A model with modules for multi-token prediction that have its first layer: one says what a
    model of one layer says. With several the model has as many layers, as vLLM's loader wants.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = {name: value for name, value in _SHAPE.items() if name != "head_dim"}
    config = Qwen2Config(**shape, num_hidden_layers=num_modules, architectures=["MiMoForCausalLM"])
    model = _with_equal_embeddings(Qwen2ForCausalLM(config))
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    size = _SHAPE["hidden_size"]
    for module in range(num_modules):
        prefix = f"model.mtp_layers.{module}."
        weights |= {
            prefix + name.removeprefix("model.layers.0."): weight.clone()
            for name, weight in model.state_dict().items()
            if name.startswith("model.layers.0.")
        }
        for norm in ("token", "hidden", "final"):
            weights[f"{prefix}{norm}_layernorm.weight"] = torch.ones(size)
        weights[prefix + "input_proj.weight"] = torch.cat(
            [torch.zeros(size, size), torch.eye(size)], 1
        )
    fields = config.to_dict() | {"num_nextn_predict_layers": num_modules}
    return _Checkpoint(fields, weights)


def _modules() -> _Checkpoint:
    """With two modules, of which vLLM's V1 runner uses the first."""
    return _mtp(2)


def _latent(head_size: int = 32) -> Any:
    """DeepSeek V3 without experts: one latent of 576 elements for all heads in each of 4 layers,
    which is the one size that vLLM's kernel for CPUs has.
    """
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    shape = {name: value for name, value in _SHAPE.items() if name != "head_dim"}
    config = DeepseekV3Config(
        **shape | {"num_key_value_heads": 8},
        num_hidden_layers=4,
        first_k_dense_replace=4,
        q_lora_rank=64,
        kv_lora_rank=512,
        qk_nope_head_dim=head_size,
        qk_rope_head_dim=64,
        v_head_dim=head_size,
        n_routed_experts=8,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
    )
    return DeepseekV3ForCausalLM(config)


def _deep_latent() -> Any:
    """With heads of DeepSeek's own size, which kernels for GPUs have."""
    return _latent(128)


_MAKERS: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "one-head": _one_head,
    "hybrid": _hybrid,
    "experts": _experts,
    "chunked": _chunked,
    "short-conv": _short_conv,
    "state": _state,
    "grouped-state": _grouped_state,
    "even-delta-net": _even_delta_net,
    "delta-net-mtp": _delta_net_mtp,
    "drafted": _drafted,
    "eagle": _eagle,
    "wide-eagle": _wide_eagle,
    "drafted-state": _drafted_state,
    "state-eagle": _state_eagle,
    "mtp": _mtp,
    "modules": _modules,
    "latent": _latent,
    "deep-latent": _deep_latent,
}
NAMES = tuple(_MAKERS)


def cache_folder() -> Path:
    """Where models are kept: ``TINY_MODELS_DIR``, else a folder of the user's cache.

    (Not KVXFER_..., which are kvxfer's settings: every engine warns of an unknown one.)
    """
    chosen = os.environ.get("TINY_MODELS_DIR")
    return Path(chosen) if chosen else Path.home() / ".cache" / "kvxfer-tests"


def make(name: str) -> Path:
    """The folder of a model, which is made if it is not there."""
    final = cache_folder() / f"{name}-{_VERSION}"
    if final.exists():
        return final
    import torch

    torch.manual_seed(1234)
    model = _MAKERS[name]()
    if not isinstance(model, _Checkpoint):
        model = model.to(torch.float32)
        model.generation_config.eos_token_id = None
    draft = final.with_name(f".{final.name}.{os.getpid()}")
    model.save_pretrained(draft)
    try:
        draft.rename(final)  # last: a folder that is there is complete
    except OSError:
        if not final.exists():  # else somebody else was faster
            raise
    return final


if __name__ == "__main__":
    for each in NAMES:
        make(each)
