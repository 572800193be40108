"""Layers that keep a state, against a naive reading of them: whole numbers of Python, token after
token, over all heads, from the full weights.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from kvxfer.engine.config import EngineConfig, Role
from kvxfer.engine.kv_plan import plan_kv_caches
from kvxfer.engine.model_config import ModelConfig, attention_pattern, load_model_config
from kvxfer.engine.weights import Part, RandomWeights
from kvxfer.errors import ConfigError, ModelError
from tests.engine.model_rig import Ranks, assert_logits, run_chunks

NUM_TOKENS = 70


def small() -> ModelConfig:
    return msgspec.structs.replace(
        load_model_config("states", num_kv_heads=2),
        vocab_size=97,
        hidden_size=48,
        intermediate_size=64,
        num_heads=4,
        head_size=12,
        state_head_size=6,
    )


def naive_states(config: ModelConfig, prefix: str, prompt: list[int]) -> list[list[list[int]]]:
    """The state of each head after each token."""
    source, size = RandomWeights(0), config.state_head_size
    heads, per_group = config.num_state_heads, config.num_state_heads // config.num_state_groups

    def whole(name: str, rows: int, columns: int, most: int) -> list[list[int]]:
        values = source.read(Part(f"{prefix}.mixer.{name}", (rows, columns))).tolist()
        return [
            [max(-most, min(most, round(v * (most / 0.08 / 2)))) for v in row] for row in values
        ]

    inputs, taps = {}, {}
    for part, count in (("x", heads), ("g", config.num_state_groups)):
        inputs[part] = whole(f"{part}_table", config.vocab_size, count * size, 8)
        taps[part] = whole(f"{part}_taps", count * size, 4, 3)
    decay = [2 * row[0] + 1 for row in whole("x_decay", heads, 1, 30)]

    def convolved(part: str, at: int, channel: int) -> int:
        return sum(
            taps[part][channel][3 - back] * inputs[part][prompt[at - back]][channel]
            for back in range(min(4, at + 1))
        )

    state = [[0] * size for _ in range(heads)]
    found = []
    for at in range(len(prompt)):
        state = [
            [
                (
                    decay[head] * state[head][element]
                    + convolved("x", at, head * size + element)
                    * convolved("g", at, head // per_group * size + element)
                )
                % 4096
                for element in range(size)
            ]
            for head in range(heads)
        ]
        found.append(state)
    return found


def naive_logits(config: ModelConfig, prompt: list[int]) -> Tensor:
    """Layers of states before layers of attention, from the full weights, without a cache."""
    source, hidden_size, size = RandomWeights(0), config.hidden_size, config.head_size

    def weight(name: str, rows: int, columns: int) -> Tensor:
        return source.read(Part(f"{name}.weight", (rows, columns)))

    def norm(x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()

    def rope(x: Tensor) -> Tensor:
        pairs = config.rope_theta ** -(torch.arange(0, size, 2) / size)
        angles = torch.arange(len(x))[:, None] * pairs
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    x = weight("model.embed_tokens", config.vocab_size, hidden_size)[prompt]
    for layer in range(config.num_layers):
        name = f"model.layers.{layer}"
        normed = norm(x)
        if layer in config.state_layers:
            width = config.num_state_heads * config.state_head_size
            states = torch.tensor(naive_states(config, name, prompt)).flatten(1) / 2048 - 1
            gate = normed @ weight(f"{name}.mixer.gate", width, hidden_size).T
            mixed = states * gate * gate.sigmoid()
            x = x + mixed @ weight(f"{name}.mixer.o_proj", hidden_size, width).T
        else:
            num_q, num_kv = config.num_heads, config.num_kv_heads
            q, k, v = (
                (normed @ weight(f"{name}.self_attn.{n}_proj", count * size, hidden_size).T).view(
                    -1, count, size
                )
                for n, count in (("q", num_q), ("k", num_kv), ("v", num_kv))
            )
            k, v = (each.repeat_interleave(num_q // num_kv, 1) for each in (rope(k), v))
            scores = torch.einsum("qhd,khd->hqk", rope(q), k) / size**0.5
            later = torch.ones(len(prompt), len(prompt)).triu(1).bool()
            seen = scores.masked_fill(later, float("-inf")).softmax(-1)
            mixed = torch.einsum("hqk,khd->qhd", seen, v).flatten(1)
            x = x + mixed @ weight(f"{name}.self_attn.o_proj", hidden_size, num_q * size).T
        normed, mlp = norm(x), config.intermediate_size
        gate = normed @ weight(f"{name}.mlp.gate_proj", mlp, hidden_size).T
        up = normed @ weight(f"{name}.mlp.up_proj", mlp, hidden_size).T
        x = x + (gate * gate.sigmoid() * up) @ weight(f"{name}.mlp.down_proj", hidden_size, mlp).T
    return norm(x) @ weight("lm_head", config.vocab_size, hidden_size).T


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"windows": (48, None, None, None)}, "state_layers: expected neither windows nor"),
        ({"num_state_heads": 6, "num_state_groups": 6}, "tp_size: x: expected a number of heads"),
    ],
)
def test_models_that_cannot_be_are_refused(changes: dict[str, Any], says: str) -> None:
    config = msgspec.structs.replace(load_model_config("states"), **changes)
    engine = EngineConfig(role=Role.ALONE, engine_id="e", tp_size=4)
    with pytest.raises(ModelError, match=says):
        plan_kv_caches(engine, config)


def test_a_state_needs_a_group_of_its_own() -> None:
    config = load_model_config("states")
    assert attention_pattern(config) == "state, full, state, full"
    engine = EngineConfig(role=Role.ALONE, engine_id="e", disable_hybrid_kv_cache_manager=True)
    with pytest.raises(ConfigError, match="expected attention, which can keep all tokens, got Mam"):
        plan_kv_caches(engine, config)


@cache
def case() -> tuple[ModelConfig, list[int], Tensor]:
    config = small()
    prompt = torch.randint(0, 97, (NUM_TOKENS,), generator=torch.Generator().manual_seed(2))
    return config, prompt.tolist(), naive_logits(config, prompt.tolist())


@pytest.mark.parametrize("chunks", [(NUM_TOKENS,), (2, 1, 29, 16, 20, 1, 1)])
@pytest.mark.parametrize(
    ("layout", "block_tokens", "tp_size"), [("HND", 16, 1), ("NHD", 24, 2), ("HND", 8, 4)]
)
@pytest.mark.parametrize("cached", [True, False])
def test_logits_and_states_are_the_naive_ones(
    chunks: tuple[int, ...], layout: str, block_tokens: int, tp_size: int, cached: bool
) -> None:
    """A state in each block, or one for a request; pools full of another one's."""
    config, prompt, logits = case()
    ranks = Ranks(config, tp_size, layout, block_tokens, enable_prefix_caching=cached)
    for rank in ranks.caches:
        for layer in config.state_layers:
            for view in rank.layers[f"model.layers.{layer}.mixer"].kv_cache:
                view.fill_(7)
    assert_logits(run_chunks(ranks, prompt, chunks), logits)
    (state_group,) = (
        number
        for number, group in enumerate(ranks.caches[0].config.kv_cache_groups)
        if group.kv_cache_spec.kind == "mamba"
    )
    block = ranks.tables(NUM_TOKENS)[state_group][(NUM_TOKENS - 1) // block_tokens if cached else 0]
    for layer in config.state_layers:
        prefix = f"model.layers.{layer}"
        views = [cache.layers[f"{prefix}.mixer"].kv_cache[1][block] for cache in ranks.caches]
        assert torch.cat(views).tolist() == naive_states(config, prefix, prompt)[-1]
