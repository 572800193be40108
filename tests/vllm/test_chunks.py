"""Llama 4's chunked-local attention on real engines: two layers that see their own chunk of 64
tokens, two that see everything. What moves of the first is the chunk of decode's first token.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.vllm.cases import Pair, Sources, concurrent_prompts, prompt, token_ids
from tests.vllm.engines import Connector, EngineConfig, Fleet

MODEL = "chunked"
# Of 64, 128 and 256 tokens vLLM lets go of the whole chunk that decode needs for the last of them;
# of 65 and 129 decode's first token begins a chunk.
LENGTHS = (2, 63, 64, 65, 66, 100, 127, 128, 129, 256, 300)


def side(block_tokens: int, *, tp_size: int = 1, chunked: bool = False) -> EngineConfig:
    return EngineConfig(
        Connector(policy="fail"),
        model=MODEL,
        tp_size=tp_size,
        block_tokens=block_tokens,
        more={"max_num_batched_tokens": 96} if chunked else {},
    )


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        pytest.param(side(32), side(32), id="32-to-32"),
        pytest.param(side(64, tp_size=2), side(32), id="tp2x64-to-tp1x32", marks=pytest.mark.slow),
        pytest.param(
            side(32, chunked=True), side(64, tp_size=2), id="32-to-tp2x64", marks=pytest.mark.slow
        ),
    ],
)
def test_the_last_chunk_moves(fleet: Fleet, prefill: EngineConfig, decode: EngineConfig) -> None:
    (alone,) = fleet.engines(EngineConfig(model=MODEL, block_tokens=32, label="alone"))
    pair = Pair(*fleet.engines(replace(prefill, label="prefill"), decode))
    assert sorted(pair.decode.groups()) == ["ChunkedLocalAttentionSpec", "FullAttentionSpec"]
    prompts = [prompt(num_tokens) for num_tokens in LENGTHS]
    before = Sources.of(pair.decode)
    answers = [pair.run(each) for each in prompts]
    assert token_ids(answers) == token_ids(alone.generate_all(prompts, 16))
    moved = Sources.of(pair.decode) - before
    assert moved == Sources(sum(LENGTHS) - len(LENGTHS), 0, len(LENGTHS))
    # A second turn finds the first in decode's cache: whole blocks of its last chunk among them.
    second = prompt(300) + tuple(answers[-1].token_ids) + prompt(50, seed=2)
    before = Sources.of(pair.decode)
    assert [pair.run(second).token_ids] == token_ids(alone.generate_all([second], 16))
    assert (Sources.of(pair.decode) - before).local_hits >= 256
    prompts = list(concurrent_prompts(16))
    assert token_ids(pair.run_all(prompts)) == token_ids(alone.generate_all(prompts, 16))
    pair.assert_at_rest()
