"""Tiny models of which vLLM has kernels for GPUs alone, with weights that follow from their names.

Nothing is read but a config.json: vLLM's dummy weights are all of one tiny size, and such a model
soon repeats one token whatever the KV says. Here each parameter gets its values while the model is
loaded, before vLLM derives others from it (as it does of MLA's projections).
"""

from __future__ import annotations

import json
import socket
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from scripts.benchmarks.load_host import do_without_cutlass
from tests.vllm import engine_worker
from tests.vllm.cases import Tokens, concurrent_prompts
from tests.vllm.engines import Engine, EngineConfig, Finished
from tests.vllm.models import VOCAB_SIZE, cache_folder, make
from tests.vllm.processes import Process

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Sizes of heads that FlashAttention 3 and FlashMLA have, those of DeepSeek V3.
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_DELTA_NET: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "num_key_value_heads": 8,  # so that 128 tokens are as many bytes as a state
    "head_dim": 64,
    "partial_rotary_factor": 0.5,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}
_DEEPSEEK: dict[str, Any] = {
    **_SHAPE,
    **_LATENT,
    "num_hidden_layers": 3,
    "q_lora_rank": 256,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        **_SHAPE,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": 64,
    },
    "llama-layer": {  # of which no KV depends on other KV
        **_SHAPE,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": 64,
        "num_hidden_layers": 1,
    },
    "jamba": {  # Mamba1
        **_SHAPE,
        "architectures": ["JambaForCausalLM"],
        "model_type": "jamba",
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": 32,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "use_mamba_kernels": False,
    },
    "granite": {  # Mamba2
        **_SHAPE,
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "layer_types": ["mamba", "attention"] * 2,
        "mamba_n_heads": 16,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 32,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 1024,
        "position_embedding_type": "rope",
        "attention_multiplier": 0.125,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
    "nemotron-h": {  # Mamba2 in two groups of heads, and layers without any cache
        **_SHAPE,
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M*-M*-",
        "num_hidden_layers": 6,
        "head_dim": 64,
        "mamba_num_heads": 16,
        "mamba_head_dim": 64,
        "n_groups": 2,
        "ssm_state_size": 32,
        "conv_kernel": 4,
    },
    "qwen3-next": {  # gated delta net
        **_SHAPE,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        **_DELTA_NET,
        # vLLM has no such model without experts. A token sees all of them: which ones it sees would
        # depend on rounding.
        "num_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
    "qwen3.5": {  # the same, dense
        **_SHAPE,
        **_DELTA_NET,
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
    },
    "kimi-linear": {  # Kimi's delta attention, with a gate for each channel, beside latents
        **_SHAPE,
        **_LATENT,
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "mla_use_nope": True,
        "linear_attn_config": {
            "kda_layers": [1, 3],
            "full_attn_layers": [2, 4],
            "head_dim": 128,
            "num_heads": 2,
            "short_conv_kernel_size": 4,
        },
    },
    "ling": {  # linear attention, beside latents
        **_SHAPE,
        **_LATENT,
        "architectures": ["BailingMoeV2_5ForCausalLM"],
        "model_type": "bailing_hybrid",
        "head_dim": 64,
        "q_lora_rank": None,
        "layer_group_size": 2,
        "group_norm_size": 4,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
        "use_bias": False,
        "use_qkv_bias": False,
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "num_shared_experts": 0,
        "moe_intermediate_size": 64,
    },
    "deepseek-v3": {
        **_DEEPSEEK,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
    },
    "deepseek-v3.2": {  # an indexer beside each latent
        **_DEEPSEEK,
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "index_head_dim": 128,
        "index_n_heads": 64,
        "index_topk": 512,  # of longer prompts it chooses
    },
}
ON_GPU = (
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="no Triton"),
)
"""Marks of what runs such engines."""
START_TIMEOUT_S = 200.0  # with what Triton and DeepGEMM compile at the first start
FIRST_TIMEOUT_S = 240.0  # while kernels are compiled
NEW_TOKENS = 12
ENVIRONMENT = {
    **{"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_DEEP_GEMM_WARMUP": "skip"},
    "VLLM_KIMI_K3_GEMM_AR": "0",  # which wants CUTLASS for Python
}


@dataclass(frozen=True, slots=True)
class GpuConfig(EngineConfig):
    """Several engines share the GPU, each with a small pool."""

    kv_nbytes: int = 256 << 20
    variables: dict[str, str] = field(default_factory=lambda: dict(ENVIRONMENT))

    def folder(self) -> Path:
        if self.model not in CONFIGS:  # one with weights: of several ranks each reads its part
            return make(self.model)
        found = cache_folder() / f"gpu-{self.model}-1"
        found.mkdir(parents=True, exist_ok=True)
        (found / "config.json").write_text(json.dumps(CONFIGS[self.model]))
        return found

    def engine_args(self, port: int) -> dict[str, Any]:
        weights = "dummy" if self.model in CONFIGS else "auto"
        small = {"gpu_memory_utilization": 0.02, "max_model_len": 2048, "load_format": weights}
        return EngineConfig.engine_args(self, port) | small | self.more


class GpuEngine(Engine):
    """An engine in a new interpreter: modules of vLLM begin with CUDA when they are imported."""

    def _launch(self, theirs: socket.socket) -> Process:
        arguments = (theirs, self.config.engine_args(self.port), self.config.idle_step_s)
        return Process.spawn(serve, arguments, self.config.environment(self.port))


def skip_if_refused(*arguments: dict[str, Any]) -> None:
    """``arguments``: of engines. Scales of tokens lie in the cells as kvxfer knows them from vLLM
    0.32 on, which has no mode with a state at the end of each block any more.
    """
    is_older = Version(version("vllm")) < Version("0.32")
    if is_older and any(each.get("kv_cache_dtype") == "fp8_per_token_head" for each in arguments):
        pytest.skip("kvxfer refuses the cells of this vLLM by name")
    if not is_older and any(each.get("mamba_cache_mode") == "all" for each in arguments):
        pytest.skip("this vLLM has no mamba_cache_mode 'all'")


@contextmanager
def warm_engines(*configs: GpuConfig) -> Iterator[list[Engine]]:
    """Started side by side, with what their first steps compile."""
    with ExitStack() as stack:
        engines: list[Engine] = []
        for config in configs:
            engines.append(GpuEngine(config))
            stack.callback(engines[-1].close)
        engines = [engine.wait_ready(START_TIMEOUT_S) for engine in engines]
        warm = [engine.submit_all(list(concurrent_prompts(3)), 2) for engine in engines]
        for engine, request_ids in zip(engines, warm, strict=True):
            for request_id in request_ids:
                engine.result(request_id, FIRST_TIMEOUT_S)
        yield engines


def alone(engine: Engine, prompts: Sequence[Tokens]) -> list[Finished]:
    """What it answers by itself, with nothing cached before or after."""
    engine.reset()
    ids = engine.submit_all(prompts, NEW_TOKENS, logprobs=20)
    answers = [engine.result(each, FIRST_TIMEOUT_S) for each in ids]
    engine.reset()
    return answers


def serve(sock: socket.socket, engine_args: dict[str, Any], idle_step_s: float) -> None:
    """As ``engine_worker.serve``, with weights by name."""
    from transformers import AutoConfig, PretrainedConfig
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    class BailingHybridConfig(PretrainedConfig):  # type: ignore[no-untyped-call]  # a repository's
        model_type = "bailing_hybrid"

    AutoConfig.register("bailing_hybrid", BailingHybridConfig)
    do_without_cutlass()
    DummyModelLoader.load_weights = _load_weights
    engine_worker.serve(sock, engine_args, idle_step_s)


def _load_weights(loader: object, model: Any, model_config: object) -> None:
    import torch

    for name, parameter in model.named_parameters():
        generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
        values = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
        _fill(name, values, generator)
        parameter.data.copy_(values)


def _fill(name: str, values: Any, generator: Any) -> None:
    *_, module, last = ("", *name.split("."))
    if last in {"A_log", "A"}:  # a state forgets within some dozens of tokens
        values.uniform_(0.5, 2.0, generator=generator)
        if last == "A":  # as Mamba's loader leaves it
            values.neg_()
    elif last == "dt_bias" or (module == "dt_proj" and last == "bias"):
        values.uniform_(-4.0, -1.0, generator=generator)
    elif "norm" in name or last == "D":
        values.fill_(0.0 if last == "bias" else 1.0)
    elif last == "bias" or "bias" in last:
        values.zero_()
    elif "embed" in name:
        values.normal_(0, 1.0, generator=generator)
    else:  # a matrix [out, in], or a convolution [channels, 1, width]
        values.normal_(0, 1.28 / values.shape[-1] ** 0.5, generator=generator)
