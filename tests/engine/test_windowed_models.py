"""Sliding windows against transformers' Mistral and Ministral on the same weights, shared KV
against a naive recomputation without any cache. What falls out of a window is poisoned between the
steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import (
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from kvxfer.engine.model_config import ModelConfig, load_model_config
from kvxfer.engine.weights import Part, RandomWeights
from tests.engine.model_rig import (
    CHUNKED,
    ONE_GO,
    SIZES,
    Ranks,
    Reference,
    assert_logits,
    greedy,
    run_chunks,
    saved,
)

WINDOW_MODELS: dict[str, Callable[[], Any]] = {
    "mistral, all see everything": lambda: MistralForCausalLM(
        MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=None)
    ),
    "mistral, a window everywhere": lambda: MistralForCausalLM(
        MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=13)
    ),
    "ministral, a window everywhere": lambda: MinistralForCausalLM(
        MinistralConfig(**SIZES, num_key_value_heads=2, sliding_window=16)
    ),
    "ministral, in turn": lambda: MinistralForCausalLM(
        MinistralConfig(
            **SIZES,
            num_key_value_heads=2,
            sliding_window=21,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )
    ),
}


@pytest.fixture(scope="module")
def window_reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """Models of :data:`WINDOW_MODELS`, each made once."""
    made: dict[str, Reference] = {}

    def get(name: str) -> Reference:
        if name not in made:
            torch.manual_seed(11)
            made[name] = saved(tmp_path_factory.mktemp("model"), WINDOW_MODELS[name]())
        return made[name]

    return get


@pytest.mark.parametrize("name", WINDOW_MODELS)
@pytest.mark.parametrize(
    "chunks", [ONE_GO, CHUNKED, (40, *[1] * 30)], ids=["one", "chunks", "decode"]
)
@pytest.mark.parametrize(
    ("layout", "block_tokens", "tp_size"), [("HND", 8, 1), ("NHD", 24, 2), ("HND", 16, 4)]
)
def test_logits_with_windows_equal_transformers(
    window_reference: Callable[[str], Reference],
    name: str,
    chunks: tuple[int, ...],
    layout: str,
    block_tokens: int,
    tp_size: int,
) -> None:
    ref = window_reference(name)
    ranks = Ranks(load_model_config(ref.folder), tp_size, layout, block_tokens, num_blocks=31)
    assert_logits(run_chunks(ranks, ref.prompt, chunks), ref.logits)


def test_one_table_for_all_layers_computes_the_same(
    window_reference: Callable[[str], Reference],
) -> None:
    """Without the hybrid manager layers with a window keep everything, and still see only it."""
    ref = window_reference("ministral, in turn")
    config = load_model_config(ref.folder)
    ranks = Ranks(config, 1, "NHD", 8, disable_hybrid_kv_cache_manager=True)
    (group,) = ranks.caches[0].config.kv_cache_groups
    assert len(group.layer_names) == 3
    tables, logits = ranks.tables(70), []
    for lo, hi in ((0, 33), (33, 69), (69, 70)):
        logits.append(ranks.step([(tables, lo, ref.prompt[lo:hi])]))
    assert_logits(torch.cat(logits), ref.logits)


def naive_logits(config: ModelConfig, prompt: list[int]) -> Tensor:
    """All logits from the full weights, without a cache, token and layer after layer: an
    independent reading of what windows and shared KV mean.
    """
    source = RandomWeights(0)
    hidden_size, size = config.hidden_size, config.head_size

    def weight(name: str, rows: int, columns: int) -> Tensor:
        return source.read(Part(f"{name}.weight", (rows, columns)))

    def norm(x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()

    def rope(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        for position in range(len(x)):
            for pair in range(size // 2):
                angle = position / config.rope_theta ** (2 * pair / size)
                cos, sin = math.cos(angle), math.sin(angle)
                first, second = x[position, :, pair], x[position, :, pair + size // 2]
                out[position, :, pair] = first * cos - second * sin
                out[position, :, pair + size // 2] = second * cos + first * sin
        return out

    windows = {"model.layers.0": 48, "model.layers.2": 48, "model.layers.4": 48}
    targets = {"model.layers.4": "model.layers.2", "model.layers.5": "model.layers.3"}
    targets = targets if config.num_kv_shared_layers else {}
    kept: dict[str, tuple[Tensor, Tensor]] = {}
    x = weight("model.embed_tokens", config.vocab_size, hidden_size)[prompt]
    for layer in range(config.num_layers):
        name = f"model.layers.{layer}"
        normed = norm(x)
        num_q, num_kv = config.num_heads, config.num_kv_heads
        q = normed @ weight(f"{name}.self_attn.q_proj", num_q * size, hidden_size).T
        q = rope(q.view(-1, num_q, size))
        if name not in targets:
            k, v = (
                (normed @ weight(f"{name}.self_attn.{n}_proj", num_kv * size, hidden_size).T).view(
                    -1, num_kv, size
                )
                for n in "kv"
            )
            kept[name] = rope(k), v
        k, v = kept[targets.get(name, name)]
        attended = torch.empty_like(q)
        for position in range(len(prompt)):
            window = windows.get(name, len(prompt))
            first = max(0, position + 1 - window)
            if config.has_chunks:
                first = position - position % window
            for head in range(num_q):
                at = head // (num_q // num_kv)
                scores = k[first : position + 1, at] @ q[position, head] / size**0.5
                attended[position, head] = scores.softmax(0) @ v[first : position + 1, at]
        x = (
            x
            + attended.flatten(1) @ weight(f"{name}.self_attn.o_proj", hidden_size, num_q * size).T
        )
        normed, mlp = norm(x), config.intermediate_size
        gate = normed @ weight(f"{name}.mlp.gate_proj", mlp, hidden_size).T
        up = normed @ weight(f"{name}.mlp.up_proj", mlp, hidden_size).T
        down = weight(f"{name}.mlp.down_proj", hidden_size, mlp)
        x = x + (gate * gate.sigmoid() * up) @ down.T
    return norm(x) @ weight("lm_head", config.vocab_size, hidden_size).T


def small(name: str) -> tuple[ModelConfig, list[int], Tensor]:
    """A built-in model with fewer numbers, a prompt longer than two windows, its logits."""
    config = msgspec.structs.replace(
        load_model_config(name, num_kv_heads=2),
        vocab_size=97,
        hidden_size=48,
        intermediate_size=64,
        num_heads=4,
        head_size=12,
    )
    prompt = torch.randint(0, 97, (110,), generator=torch.Generator().manual_seed(2)).tolist()
    return config, prompt, naive_logits(config, prompt)


@pytest.fixture(scope="module")
def kv_sharing() -> tuple[ModelConfig, list[int], Tensor]:
    return small("kv-sharing")


@pytest.fixture(scope="module")
def chunked() -> tuple[ModelConfig, list[int], Tensor]:
    return small("chunked")


@pytest.mark.parametrize("chunks", [(110,), (5, 43, 1, 30, 31), (80, *[1] * 30)])
@pytest.mark.parametrize(
    ("layout", "block_tokens", "tp_size"), [("HND", 16, 1), ("NHD", 24, 2), ("NHD", 8, 4)]
)
def test_shared_kv_equals_a_naive_recomputation(
    kv_sharing: tuple[ModelConfig, list[int], Tensor],
    chunks: tuple[int, ...],
    layout: str,
    block_tokens: int,
    tp_size: int,
) -> None:
    config, prompt, logits = kv_sharing
    ranks = Ranks(config, tp_size, layout, block_tokens, num_blocks=63)
    layers = ranks.caches[0].layers
    for sharer, target in ((4, 2), (5, 3)):
        mine, own = (layers[f"model.layers.{n}.self_attn"].kv_cache for n in (sharer, target))
        assert isinstance(mine, Tensor)
        assert isinstance(own, Tensor)
        assert mine.data_ptr() == own.data_ptr()
    assert_logits(run_chunks(ranks, prompt, chunks), logits)


@pytest.mark.parametrize("chunks", [(110,), (5, 43, 1, 30, 31)])
@pytest.mark.parametrize(
    ("layout", "block_tokens", "tp_size"), [("HND", 16, 1), ("NHD", 32, 2), ("NHD", 8, 4)]
)
def test_chunks_equal_a_naive_recomputation(
    chunked: tuple[ModelConfig, list[int], Tensor],
    chunks: tuple[int, ...],
    layout: str,
    block_tokens: int,
    tp_size: int,
) -> None:
    config, prompt, logits = chunked
    ranks = Ranks(config, tp_size, layout, block_tokens, num_blocks=63)
    assert_logits(run_chunks(ranks, prompt, chunks), logits)


@pytest.mark.parametrize("name", ["hybrid", "kv-sharing"])
def test_built_in_models_vary_and_depend_on_their_context(name: str) -> None:
    config = load_model_config(name)
    one = Ranks(config, 1, "HND", 16, num_blocks=63)
    two = Ranks(config, 2, "NHD", 24, num_blocks=63)
    generator = torch.Generator().manual_seed(5)
    for num_tokens in (5, 48, 150):
        prompt = torch.randint(0, 2048, (num_tokens,), generator=generator).tolist()
        output = greedy(one, prompt)
        assert len(set(output)) >= 16
        assert greedy(two, prompt) == output
