"""Models that keep a state, on real engines: Mamba2 of Granite 4, the short convolution of LFM2 and
the gated delta net of Qwen3-Next, beside attention. (vLLM's CPU build has no kernel for Mamba1, nor
for the delta net of Kimi Linear, and that of Qwen3-Next is for bfloat16 alone.)
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


@pytest.mark.parametrize("cached", [False, True])
def test_a_short_convolution(fleet: Fleet, cached: bool) -> None:
    """One request at a time, of lengths that one engine computes in the same pieces: of another
    batch, or of other pieces of a prompt, vLLM 0.32's CPU build says other tokens by itself.
    """
    steps = {"max_num_batched_tokens": 64}
    config = replace(side(128), model="short-conv", more=NO_CACHE | steps)
    decode = replace(config, more=steps if cached else config.more)
    pair = Pair(*fleet.engines(replace(config, label="prefill"), decode))
    (alone,) = fleet.engines(replace(config, connector=None, label="alone"))
    lengths = (65, 129, 193, 257)
    for num_tokens in lengths:
        tokens = prompt(num_tokens)
        (answer,) = alone.generate_all([tokens], 16)
        assert pair.run(tokens).token_ids == answer.token_ids
    assert Sources.of(pair.decode).external == sum(lengths) - len(lengths)
    pair.assert_at_rest()


def test_a_gated_delta_net(fleet: Fleet) -> None:
    """In bfloat16: what was a state's in a block before is no number there, and the load fills the
    last block only in part. One request at a time, for batches of other shapes round otherwise; and
    every engine computes the last token of a prompt alone, as one does that has loaded the others.
    """
    more = NO_CACHE | {"dtype": "bfloat16", "max_num_batched_tokens": 64, "max_num_seqs": 4}
    config = EngineConfig(Connector(policy="fail"), model="delta-net", block_tokens=128, more=more)
    pair = Pair(*fleet.engines(replace(config, label="prefill"), config))
    (alone,) = fleet.engines(EngineConfig(model="delta-net", more=more, label="alone"))
    lengths = (65, 129, 193, 321)
    for num_tokens in lengths:
        tokens = prompt(num_tokens)
        (answer,) = alone.generate_all([tokens], 16)
        assert pair.run(tokens).token_ids == answer.token_ids
    assert Sources.of(pair.decode) == Sources(sum(lengths) - 4, 0, 4)
    pair.assert_at_rest()
