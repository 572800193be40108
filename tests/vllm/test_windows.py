"""A model of two KV cache groups: two layers with a window of 64 tokens, two without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.vllm.cases import (
    PROMPT_TOKENS,
    Pair,
    References,
    Sources,
    concurrent_prompts,
    prompt,
    token_ids,
)
from tests.vllm.engines import Connector, EngineConfig, Fleet

MODEL = "hybrid"
# Of 127, 159 and 191 tokens the next one's window begins with a block of 32, 64, 96 or 128: prefill
# drops the block before it, of which decode needs one token.
LENGTHS = (*PROMPT_TOKENS, 159, 190, 191, 192)
NO_CACHE = {"enable_prefix_caching": False}


def pair_of(fleet: Fleet, prefill: EngineConfig, decode: EngineConfig) -> Pair:
    return Pair(*fleet.engines(replace(prefill, label="prefill"), decode))


def side(
    block_tokens: int,
    *,
    tp_size: int = 1,
    cached: bool = True,
    chunked: bool = False,
    policy: str = "fail",
) -> EngineConfig:
    more: dict[str, Any] = {} if cached else NO_CACHE
    return EngineConfig(
        Connector(policy=policy),
        model=MODEL,
        tp_size=tp_size,
        block_tokens=block_tokens,
        more=more | ({"max_num_batched_tokens": 96} if chunked else {}),
    )


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        pytest.param(side(64), side(64), id="64-to-64"),
        pytest.param(side(16, chunked=True), side(16), id="16-to-16-in-chunks"),
        pytest.param(side(128), side(32, tp_size=2), id="128-to-tp2x32"),
        pytest.param(side(64, tp_size=2), side(32), id="tp2x64-to-tp1x32"),
        pytest.param(side(32), side(128, cached=False), id="32-to-128-no-prefix-cache"),
        pytest.param(side(96), side(64, cached=False), id="96-to-64-no-prefix-cache"),
    ],
)
def test_windows_move_with_the_rest(
    fleet: Fleet, references: References, prefill: EngineConfig, decode: EngineConfig
) -> None:
    pair = pair_of(fleet, prefill, decode)
    assert sorted(pair.decode.groups()) == ["FullAttentionSpec", "SlidingWindowSpec"]
    prompts = [prompt(num_tokens) for num_tokens in LENGTHS]
    before = Sources.of(pair.decode)
    answers = [pair.run(each) for each in prompts]
    assert token_ids(answers) == references.tokens(prompts, model=MODEL)
    moved = Sources.of(pair.decode) - before
    assert moved == Sources(sum(LENGTHS) - len(LENGTHS), 0, len(LENGTHS))
    first = prompt(300)
    second = first + tuple(answers[LENGTHS.index(300)].token_ids) + prompt(50, seed=2)
    before = Sources.of(pair.decode)
    assert [pair.run(second).token_ids] == references.tokens([second], model=MODEL)
    # The last token of an answer is not computed, and of the others vLLM finds whole blocks, of 16
    # tokens two together.
    unit, is_cached = max(32, decode.block_tokens), not NO_CACHE.items() <= decode.more.items()
    held = 315 // unit * unit * is_cached
    assert Sources.of(pair.decode) - before == Sources(len(second) - held - 1, held, 1)
    prompts = list(concurrent_prompts(16))
    assert token_ids(pair.run_all(prompts)) == references.tokens(prompts, model=MODEL)
    pair.assert_at_rest()


def test_a_pair_that_would_poison_the_prefix_cache_is_refused(
    fleet: Fleet, references: References
) -> None:
    """A sink's block of 128 tokens begins before the source's first block of 32 that the window
    still holds: it would be hashed with a part that nobody wrote.
    """
    pair = pair_of(fleet, side(32), side(128, policy="recompute"))
    tokens = prompt(700)
    before = Sources.of(pair.decode)
    answer = pair.run(tokens)
    assert [answer.token_ids] == references.tokens([tokens], model=MODEL)
    moved = Sources.of(pair.decode) - before
    assert moved.external == 0
    pair.assert_at_rest()
