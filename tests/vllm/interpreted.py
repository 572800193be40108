"""DeepSeek V4 on vLLM's CPU build, with tiny random weights.

Of that model vLLM 0.32 has all attention kernels for CPUs, and makes its metadata with Triton, for
which it wants a build with a CPU backend that no package index has. Here Triton's interpreter makes
them: in a process that imports it before vLLM's modules do. Three more things are put right there.
A table of vLLM's CPU backend lacks the kinds of layers that came with V4.1, prefix caching is off
without AMX, and random weights of 0.001 would let no token depend on any KV.
"""

from __future__ import annotations

import collections
import json
import os
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.vllm import engine_worker
from tests.vllm.engines import Engine
from tests.vllm.models import VOCAB_SIZE, cache_folder
from tests.vllm.processes import Process

TRITON_FOLDER = Path(os.environ.get("TRITON_DIR", Path(sys.prefix) / "triton"))
"""Where scripts/test_vllm puts Triton: not among the packages, where vLLM would see it."""
HAS_TRITON = (TRITON_FOLDER / "triton").is_dir()
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 512,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "o_groups": 2,
    "o_lora_rank": 64,
    "n_routed_experts": 256,  # the least that the kernel for CPUs knows, 6 for each token
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "norm_topk_prob": True,
    "scoring_func": "sqrtsoftplus",
    "routed_scaling_factor": 1.5,
    "topk_method": "noaux_tc",
    "num_hash_layers": 0,
    "sliding_window": 128,
    "compress_ratios": [0, 4, 128],  # a layer with a window only, and one of each compression
    "compress_rope_theta": 160000,
    "index_head_dim": 128,
    "index_n_heads": 4,
    "index_topk": 512,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 4,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "swiglu_limit": 10.0,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 1.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "num_nextn_predict_layers": 0,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


def model_folder() -> Path:
    folder = cache_folder() / "compressed-1"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


class InterpretedEngine(Engine):
    """An engine in a process that begins with nothing imported."""

    def _launch(self, theirs: socket.socket) -> Process:
        environment = self.config.environment(self.port) | {"TRITON_INTERPRET": "1"}
        arguments = (theirs, self.config.engine_args(self.port), self.config.idle_step_s)
        return Process.spawn(serve, arguments, environment)


def serve(sock: socket.socket, engine_args: dict[str, Any], idle_step_s: float) -> None:
    """As ``engine_worker.serve``, in a process that has not imported vLLM yet."""
    assert find_spec("triton") is None
    from vllm import triton_utils  # without Triton it has a stand-in

    sys.path.append(str(TRITON_FOLDER))
    import triton

    triton_utils.triton, triton_utils.tl = triton, triton.language
    from vllm.model_executor.model_loader import dummy_loader
    from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUSparseSWAMetadataBuilder

    DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler = lambda self, num_decode_tokens: (
        collections.defaultdict(lambda: None)
    )
    dummy_loader.initialize_single_dummy_weight = _random
    _allow_prefix_caching()
    engine_worker.serve(sock, engine_args, idle_step_s)


def _allow_prefix_caching() -> None:
    """And chunks of prompts: vLLM has both of this model on CPUs with AMX, where its kernels are
    faster, and these take what other CPUs have.
    """
    import torch
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def checked(vllm_config: Any) -> None:
        asked = torch.cpu._is_amx_tile_supported
        torch.cpu._is_amx_tile_supported = lambda: True
        try:
            check(vllm_config)
        finally:
            torch.cpu._is_amx_tile_supported = asked

    CpuPlatform.check_and_update_config = staticmethod(checked)


def _random(tensor: Any) -> None:
    import torch

    generator = torch.Generator().manual_seed(tensor.numel())
    if tensor.is_floating_point() and tensor.dim() > 1:
        values = torch.empty(tensor.shape, dtype=torch.float32).normal_(
            0, 0.08, generator=generator
        )
        tensor.data.copy_(values)
    elif tensor.is_floating_point():
        tensor.data.fill_(1.0)
