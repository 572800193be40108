"""Models that keep a state, on real engines: Mamba2 of Granite 4 and of Nemotron-H, the short
convolution of LFM2 and the gated delta net of Qwen3-Next, beside attention. (vLLM's CPU build has
no kernel for Mamba1, nor for the delta net of Kimi Linear, and that of Qwen3-Next is for bfloat16
alone.)

A convolution's inputs lie step by step ("SD") or channel by channel ("DS").
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from scripts.benchmarks.load_stats import NEAR
from tests.vllm.cases import (
    PROMPT_TOKENS,
    Pair,
    Sources,
    Tokens,
    assert_as_alone,
    concurrent_prompts,
    prompt,
    token_ids,
)
from tests.vllm.engines import Connector, Engine, EngineConfig, EngineDied, Fleet

MODEL, GROUPED = "state", "grouped-state"
NO_CACHE = {"enable_prefix_caching": False}


def layout(name: str) -> dict[str, str]:
    return {"VLLM_SSM_CONV_STATE_LAYOUT": name}


def side(
    block_tokens: int,
    *,
    model: str = MODEL,
    tp_size: int = 1,
    cached: bool = False,
    conv: str = "SD",
) -> EngineConfig:
    """Without prefix caching a state is one block (mode "none"), else one in each
    ``block_tokens`` (mode "align").
    """
    return EngineConfig(
        Connector(policy="fail"),
        model=model,
        tp_size=tp_size,
        block_tokens=block_tokens,
        more={} if cached else NO_CACHE,
        variables=layout(conv),
    )


def assert_layout(engine: Engine) -> None:
    """That of its config, by vLLM's own word."""
    said = (
        f"Setting SSM conv state layout to {engine.config.variables['VLLM_SSM_CONV_STATE_LAYOUT']}"
    )
    assert said in engine.process.log()


def expected(fleet: Fleet, prompts: list[Tokens], model: str = MODEL) -> list[list[int]]:
    """Of one engine, without prefix caching: with it vLLM's CPU build fails on long prompts."""
    (engine,) = fleet.engines(EngineConfig(model=model, more=NO_CACHE, label="alone"))
    return [answer.token_ids for answer in engine.generate_all(prompts, 16)]


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        pytest.param(side(128), side(128), id="none-to-none"),
        pytest.param(
            side(128, tp_size=2, conv="DS"), side(256, conv="DS"), id="tp2-to-tp1-ds-to-ds"
        ),
        pytest.param(side(128, conv="DS"), side(128, tp_size=2), id="tp1-to-tp2-ds-to-sd"),
        pytest.param(side(128), side(128, cached=True, conv="DS"), id="none-to-align-sd-to-ds"),
        pytest.param(
            side(128, model=GROUPED, tp_size=2), side(256, model=GROUPED), id="groups-tp2-to-tp1"
        ),
        pytest.param(
            side(128, model=GROUPED), side(128, model=GROUPED, tp_size=2), id="groups-tp1-to-tp2"
        ),
    ],
)
def test_states_move_with_the_rest(
    fleet: Fleet, prefill: EngineConfig, decode: EngineConfig
) -> None:
    pair = Pair(*fleet.engines(replace(prefill, label="prefill"), decode))
    assert sorted(pair.decode.groups()) == ["FullAttentionSpec", "MambaSpec"]
    for engine in (pair.prefill, pair.decode):
        assert_layout(engine)
    prompts = [prompt(num_tokens) for num_tokens in PROMPT_TOKENS]
    before = Sources.of(pair.decode)
    answers = [pair.run(each) for each in prompts]
    assert token_ids(answers) == expected(fleet, prompts, decode.model)
    moved = Sources.of(pair.decode) - before
    assert moved == Sources(sum(PROMPT_TOKENS) - len(prompts), 0, len(prompts))
    prompts = list(concurrent_prompts(16))
    assert token_ids(pair.run_all(prompts)) == expected(fleet, prompts, decode.model)
    pair.assert_at_rest()


def test_a_prefix_that_decode_has(fleet: Fleet) -> None:
    """In its own cache, with the state after it; prefill computes in chunks of 64 tokens."""
    prefill = side(128)
    chunked = replace(prefill, label="prefill", more=NO_CACHE | {"max_num_batched_tokens": 64})
    pair = Pair(*fleet.engines(chunked, side(128, cached=True)))
    for num_tokens in (255, 256, 257, 385):
        first = prompt(num_tokens, seed=num_tokens)
        answer = pair.run(first)
        before = Sources.of(pair.decode)
        second = first + tuple(answer.token_ids) + prompt(200, seed=1)
        assert [pair.run(second).token_ids] == expected(fleet, [second])
        # A state is cached where a step or a load ended at the end of a block.
        hit = {257: 256, 385: 384}.get(num_tokens, 0)
        moved = Sources.of(pair.decode) - before
        assert moved == Sources(len(second) - hit - 1, hit, 1)
    pair.assert_at_rest()


def test_prefill_with_a_prefix_cache(fleet: Fleet) -> None:
    """A state in each block at both sides. A prompt of one or two tokens is not offered."""
    both = side(128, cached=True)
    pair = Pair(*fleet.engines(replace(both, label="prefill"), both))
    for num_tokens in (3, 100, 128):
        tokens = prompt(num_tokens)
        before = Sources.of(pair.decode)
        assert [pair.run(tokens).token_ids] == expected(fleet, [tokens])
        assert Sources.of(pair.decode) - before == Sources(num_tokens - 1, 0, 1)
    for short in (prompt(1), prompt(2)):
        assert pair.prefill.prefill(short).params is None
        assert [pair.run(short).token_ids] == expected(fleet, [short])
    pair.assert_at_rest()


SHORT_CONV = EngineConfig(
    model="short-conv",
    block_tokens=128,
    more=NO_CACHE | {"compilation_config": {"mode": 0, "custom_ops": ["all", "-rotary_embedding"]}},
    variables=layout("SD"),
    label="alone",
)
"""vLLM's operator for rotary embeddings takes what is a head of several for all of it, and the same
token gets another value in another batch: PyTorch's does not.
"""
CHUNKS = {"max_num_batched_tokens": 96}


def serving(alone: EngineConfig, label: str, **fields: Any) -> EngineConfig:
    more = alone.more | fields.pop("more", {})
    return replace(alone, connector=Connector(policy="fail"), label=label, more=more, **fields)


def both_ways(fleet: Fleet, *configs: EngineConfig) -> list[Pair]:
    first, second = fleet.engines(*configs)
    for engine in (first, second):
        assert_layout(engine)
    return [Pair(first, second), Pair(second, first)]


def loaded(prompts: list[Tokens]) -> Sources:
    """All but the last token of each."""
    return Sources(sum(map(len, prompts)) - len(prompts), 0, len(prompts))


def test_a_short_convolution(fleet: Fleet) -> None:
    """Between one rank and two in both directions, with other blocks and layouts on each side, of
    which one computes prompts in chunks.
    """
    one = serving(SHORT_CONV, "one", more=CHUNKS)
    two = serving(SHORT_CONV, "two", tp_size=2, block_tokens=256, variables=layout("DS"))
    (alone,) = fleet.engines(SHORT_CONV)
    prompts = [prompt(num_tokens) for num_tokens in PROMPT_TOKENS]
    at_once = list(concurrent_prompts(16))
    want = token_ids(alone.generate_all([*prompts, *at_once], 16))
    for pair in both_ways(fleet, one, two):
        before = Sources.of(pair.decode)
        answers = [pair.run(each) for each in prompts]
        assert Sources.of(pair.decode) - before == loaded(prompts)
        assert token_ids(answers + pair.run_all(at_once)) == want
        pair.assert_at_rest()


DELTA_NET = EngineConfig(
    model="even-delta-net",
    block_tokens=128,
    more=NO_CACHE | {"dtype": "bfloat16", "max_num_batched_tokens": 64, "max_num_seqs": 1},
    variables=layout("SD"),
    label="alone",
)
"""In bfloat16, where batches of other shapes round otherwise: so one request is computed at a time,
however many there are, and prompts are as long as that every engine computes the last token alone,
as one does that has loaded the others.
"""
WHOLE_STEPS = [prompt(num_tokens) for num_tokens in (65, 129, 193, 321)]


def test_a_gated_delta_net(fleet: Fleet) -> None:
    """Between one rank and two in both directions, which add up otherwise: where tokens part, both
    are nearly as likely. What was a state's in a block before is no number there, and a load fills
    the last block only in part.
    """
    one = serving(DELTA_NET, "one")
    two = serving(DELTA_NET, "two", tp_size=2, block_tokens=256, variables=layout("DS"))
    (alone,) = fleet.engines(DELTA_NET)
    at_once = [prompt(64 * (1 + seed % 5) + 1, seed) for seed in range(1, 17)]
    ids = alone.submit_all([*WHOLE_STEPS, *at_once], 8, logprobs=20)
    want = [alone.result(each) for each in ids]
    for pair in both_ways(fleet, one, two):
        before = Sources.of(pair.decode)
        answers = [pair.run(each, 8) for each in WHOLE_STEPS]
        assert Sources.of(pair.decode) - before == loaded(WHOLE_STEPS)
        answers += pair.run_all(at_once, 8)
        assert_as_alone(answers, want, NEAR["bfloat16"])
        pair.assert_at_rest()


@pytest.mark.parametrize(
    "alone", [pytest.param(SHORT_CONV, id="short-conv"), pytest.param(DELTA_NET, id="delta-net")]
)
def test_a_state_at_the_end_of_each_block(fleet: Fleet, alone: EngineConfig) -> None:
    """Mode "align" on both sides: decode finds a prefix with the state behind it, where a load has
    ended at the end of a block. A block of the delta net has 384 tokens, or 640 on CPUs where vLLM
    keeps its state in float32.
    """
    cached = serving(alone, "prefill", more={"enable_prefix_caching": True})
    pair = Pair(*fleet.engines(cached, replace(cached, label="decode", variables=layout("DS"))))
    (one,) = fleet.engines(alone)
    (block_tokens,) = set(pair.decode.block_tokens())
    end = -(-384 // block_tokens) * block_tokens
    for num_tokens, hit in ((193, 0), (end + 1, end)):
        first = prompt(num_tokens, seed=num_tokens)
        before = Sources.of(pair.decode)
        answer = pair.run(first)
        assert answer.token_ids == one.generate(first).token_ids
        assert Sources.of(pair.decode) - before == Sources(num_tokens - 1, 0, 1)
        second = first + tuple(answer.token_ids) + prompt(112, seed=1)  # 128 tokens more
        before = Sources.of(pair.decode)
        assert pair.run(second).token_ids == one.generate(second).token_ids
        assert Sources.of(pair.decode) - before == Sources(len(second) - hit - 1, hit, 1)
    pair.assert_at_rest()


@pytest.mark.parametrize("model", [MODEL, SHORT_CONV.model, DELTA_NET.model])
def test_vllm_has_no_third_mode(model: str) -> None:
    """That of older versions, a state at the end of each block whatever the steps were."""
    config = EngineConfig(model=model, more={"mamba_cache_mode": "all"})
    with (
        closing(Engine(config)) as engine,
        pytest.raises(EngineDied, match="Input should be 'align' or 'none'"),
    ):
        engine.wait_ready()
