"""DeepSeek V4 on real engines: pages of states that 4 and 128 tokens share, an indexer's pages,
windows of latents, and the compressors' windows from which the next state is made.

Prefill computes in chunks of 128 tokens. vLLM's CPU build has blocks of 256 tokens for it; other
sizes are in test_latent_regions.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from scripts.benchmarks.load_stats import NEAR
from tests.vllm.cases import (
    NEEDS_AVX512_BF16,
    Pair,
    Sources,
    Tokens,
    assert_as_alone,
    concurrent_prompts,
    prompt,
    token_ids,
)
from tests.vllm.engines import Connector, Engine, EngineConfig, Finished
from tests.vllm.interpreted import HAS_TRITON, TRITON_FOLDER, InterpretedEngine, model_folder

pytestmark = [
    NEEDS_AVX512_BF16,
    pytest.mark.skipif(not HAS_TRITON, reason=f"no Triton in {TRITON_FOLDER}"),
]

SIDE = EngineConfig(
    Connector(policy="fail"),
    model="latent",  # another is named below
    block_tokens=256,
    kv_nbytes=256 << 20,
    more={"load_format": "dummy", "dtype": "bfloat16"},
)
# Below, at and above a state of 4 and of 128 tokens, and a block of 256.
PROMPT_TOKENS = (3, 4, 5, 127, 129, 256, 263, 515)
NEW_TOKENS = 8
START_TIMEOUT_S = 400.0  # of an engine that imports all of vLLM and Triton, beside another one


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    more = SIDE.more | {"model": str(model_folder())}
    with ExitStack() as stack:
        engines: list[Engine] = []
        for own in ({"max_num_batched_tokens": 128}, {}):
            engines.append(InterpretedEngine(replace(SIDE, more=more | own)))
            stack.callback(engines[-1].close)
        yield Pair(*(engine.wait_ready(START_TIMEOUT_S) for engine in engines))


def alone(pair: Pair, tokens: Tokens) -> Finished:
    """What decode answers by itself, of whose cache nothing is left then."""
    pair.decode.reset()
    answer = pair.decode.generate(tokens, NEW_TOKENS, logprobs=20)
    pair.decode.reset()
    return answer


def test_compressed_pages_move_with_what_the_next_state_is_made_of(pair: Pair) -> None:
    assert {"UniformTypeKVCacheSpecs", "SlidingWindowMLASpec"} & set(pair.decode.groups())
    prompts = [prompt(num_tokens) for num_tokens in PROMPT_TOKENS]
    expected = token_ids([alone(pair, each) for each in prompts])
    assert len({tuple(each) for each in expected}) == len(prompts)
    before = Sources.of(pair.decode)
    assert token_ids([pair.run(each, NEW_TOKENS) for each in prompts]) == expected
    moved = Sources.of(pair.decode) - before
    assert moved == Sources(sum(PROMPT_TOKENS) - len(prompts), 0, len(prompts))
    pair.assert_at_rest()


def test_a_prefix_that_decode_has(pair: Pair) -> None:
    """Two blocks of 256, which a load brought."""
    first = prompt(515)
    second = first + prompt(60, seed=1)
    expected = alone(pair, second).token_ids
    pair.run(first, NEW_TOKENS)
    before = Sources.of(pair.decode)
    assert pair.run(second, NEW_TOKENS).token_ids == expected
    moved = Sources.of(pair.decode) - before
    assert moved == Sources(len(second) - 512 - 1, 512, 1)
    pair.assert_at_rest()


def test_sixteen_requests_in_flight(pair: Pair) -> None:
    """Steps of several requests round otherwise than those of one: in one engine, too, some of
    these answers part from their own ones then, at tokens that are up to 0.38 less likely.
    """
    prompts = concurrent_prompts(16)
    own = [alone(pair, each) for each in prompts]
    pair.prefill.reset()
    before = Sources.of(pair.decode)
    answers = pair.run_all(prompts, NEW_TOKENS)
    moved = Sources.of(pair.decode) - before
    assert moved == Sources(sum(map(len, prompts)) - len(prompts), 0, len(prompts))
    assert_as_alone(answers, own, 2 * NEAR["bfloat16"])
    pair.assert_at_rest()
