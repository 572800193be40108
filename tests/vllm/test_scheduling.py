"""Prefill in chunks, and pools that are too small for what is asked of them."""

from __future__ import annotations

from tests.vllm.cases import (
    PREEMPTIONS,
    Pair,
    References,
    Sources,
    concurrent_prompts,
    prompt,
    token_ids,
)
from tests.vllm.engines import Connector, EngineConfig, Fleet

# 4 layers, 4 heads, K and V of 32 float32 each: 4096 bytes for a token.
TOKEN_NBYTES = 4 * 4 * 2 * 32 * 4
CHUNKED = {"max_num_batched_tokens": 48, "enable_chunked_prefill": True}


def test_prefill_in_chunks(fleet: Fleet, references: References) -> None:
    """Chunks of 48 tokens, which no block size divides; both sides."""
    pair = Pair(
        *fleet.engines(
            EngineConfig(Connector(), block_tokens=32, more=CHUNKED),
            EngineConfig(Connector(), block_tokens=128, more=CHUNKED),
        )
    )
    prompts = [*concurrent_prompts(8, seed=200), prompt(700)]
    before = Sources.of(pair.decode)
    assert token_ids(pair.run_all(prompts)) == references.tokens(prompts)
    moved = Sources.of(pair.decode) - before
    assert (moved.external, moved.computed) == (
        sum(len(each) - 1 for each in prompts),
        len(prompts),
    )
    pair.assert_at_rest()


def test_decode_preempts(fleet: Fleet, references: References) -> None:
    """8 requests of 200 + 100 tokens in a pool of 1216: what was preempted is computed again."""
    pair = Pair(
        *fleet.engines(
            EngineConfig(Connector(), block_tokens=64),
            EngineConfig(Connector(), block_tokens=32, kv_nbytes=38 * 32 * TOKEN_NBYTES),
        )
    )
    prompts = [prompt(200, seed=300 + number) for number in range(8)]
    before = pair.decode.metric(PREEMPTIONS)
    answers = pair.run_all(prompts, 100)
    assert token_ids(answers) == references.tokens(prompts, max_tokens=100)
    assert pair.decode.metric(PREEMPTIONS) > before
    pair.assert_at_rest()


def test_prefill_waits_for_blocks_that_it_offers(fleet: Fleet, references: References) -> None:
    """12 prompts of 200 tokens for a pool of 1216, whose blocks decode gives back one by one."""
    pair = Pair(
        *fleet.engines(
            EngineConfig(Connector(), block_tokens=32, kv_nbytes=38 * 32 * TOKEN_NBYTES),
            EngineConfig(Connector(), block_tokens=64),
        )
    )
    prompts = [prompt(200, seed=400 + number) for number in range(12)]
    assert token_ids(pair.run_all(prompts)) == references.tokens(prompts)
    pair.assert_at_rest()
