"""DeepSeek V4 on real engines: pages of states that 4 and 128 tokens share, an indexer's pages,
windows of latents, and the compressors' windows from which the next state is made.

vLLM's CPU build computes it in blocks of 256 tokens, whole prompts at a time and without prefix
caching; other block sizes are in test_latent_regions.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from tests.vllm.cases import Pair, Sources, prompt, token_ids
from tests.vllm.engines import Connector, Engine, EngineConfig
from tests.vllm.interpreted import HAS_TRITON, TRITON_FOLDER, InterpretedEngine, model_folder

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason=f"no Triton in {TRITON_FOLDER}")

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
        for _ in ("prefill", "decode"):
            engines.append(InterpretedEngine(replace(SIDE, more=more)))
            stack.callback(engines[-1].close)
        yield Pair(*(engine.wait_ready(START_TIMEOUT_S) for engine in engines))


def test_compressed_pages_move_with_what_the_next_state_is_made_of(pair: Pair) -> None:
    """As decode answers by itself, which keeps nothing of one request for the next."""
    assert {"UniformTypeKVCacheSpecs", "SlidingWindowMLASpec"} & set(pair.decode.groups())
    prompts = [prompt(num_tokens) for num_tokens in PROMPT_TOKENS]
    answers = [pair.run(each, NEW_TOKENS) for each in prompts]
    expected = [pair.decode.generate(each, NEW_TOKENS).token_ids for each in prompts]
    assert len({tuple(each) for each in expected}) == len(prompts)
    assert token_ids(answers) == expected
    num_tokens = sum(PROMPT_TOKENS)
    assert Sources.of(pair.decode) == Sources(
        num_tokens - len(prompts), 0, len(prompts) + num_tokens
    )
    pair.assert_at_rest()
