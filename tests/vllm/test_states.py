"""Models that keep a state, on real engines: Mamba2 of Granite 4 beside attention. (vLLM's CPU
build has no kernel for Mamba1, and that of a gated delta net is for bfloat16 alone.)
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.vllm.cases import (
    PROMPT_TOKENS,
    Pair,
    Sources,
    Tokens,
    concurrent_prompts,
    prompt,
    token_ids,
)
from tests.vllm.engines import Connector, EngineConfig, Fleet

MODEL = "state"
NO_CACHE = {"enable_prefix_caching": False}


def side(block_tokens: int, *, tp_size: int = 1, cached: bool = False) -> EngineConfig:
    """Without prefix caching a state is one block (mode "none"), else one in each
    ``block_tokens`` (mode "align").
    """
    return EngineConfig(
        Connector(policy="fail"),
        model=MODEL,
        tp_size=tp_size,
        block_tokens=block_tokens,
        more={} if cached else NO_CACHE,
    )


def expected(fleet: Fleet, prompts: list[Tokens]) -> list[list[int]]:
    """Of one engine, without prefix caching: with it vLLM's CPU build fails on long prompts."""
    (engine,) = fleet.engines(EngineConfig(model=MODEL, more=NO_CACHE, label="alone"))
    return [answer.token_ids for answer in engine.generate_all(prompts, 16)]


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        pytest.param(side(128), side(128), id="none-to-none"),
        pytest.param(side(128, tp_size=2), side(256), id="tp2-to-tp1"),
        pytest.param(side(128), side(128, tp_size=2), id="tp1-to-tp2"),
        pytest.param(side(128), side(128, cached=True), id="none-to-align"),
    ],
)
def test_states_move_with_the_rest(
    fleet: Fleet, prefill: EngineConfig, decode: EngineConfig
) -> None:
    pair = Pair(*fleet.engines(replace(prefill, label="prefill"), decode))
    assert sorted(pair.decode.groups()) == ["FullAttentionSpec", "MambaSpec"]
    prompts = [prompt(num_tokens) for num_tokens in PROMPT_TOKENS]
    before = Sources.of(pair.decode)
    answers = [pair.run(each) for each in prompts]
    assert token_ids(answers) == expected(fleet, prompts)
    moved = Sources.of(pair.decode) - before
    assert moved == Sources(sum(PROMPT_TOKENS) - len(prompts), 0, len(prompts))
    prompts = list(concurrent_prompts(16))
    assert token_ids(pair.run_all(prompts)) == expected(fleet, prompts)
    pair.assert_at_rest()
