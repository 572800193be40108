"""Disaggregated greedy tokens equal those of one engine, for any pair of engines, and the KV has
travelled: vLLM's own counters say so.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Shape:
    """Ranks and tokens of a block, on either side."""

    prefill: tuple[int, int]
    decode: tuple[int, int]

    def __str__(self) -> str:
        (p_tp, p_block), (d_tp, d_block) = self.prefill, self.decode
        return f"tp{p_tp}x{p_block}-to-tp{d_tp}x{d_block}"


SHAPES = (
    Shape((1, 64), (1, 64)),
    Shape((1, 32), (1, 128)),
    Shape((1, 128), (1, 32)),
    Shape((1, 96), (1, 64)),
    Shape((2, 64), (1, 64)),
    Shape((1, 64), (2, 64)),
    Shape((2, 64), (2, 64)),
    Shape((2, 32), (1, 128)),
    Shape((1, 128), (2, 32)),
)
PRODUCER = Connector(role="kv_producer")
CONSUMER = Connector(role="kv_consumer")


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def pair(request: pytest.FixtureRequest, fleet: Fleet) -> Pair:
    shape: Shape = request.param
    prefill, decode = fleet.engines(
        EngineConfig(PRODUCER, tp_size=shape.prefill[0], block_tokens=shape.prefill[1]),
        EngineConfig(CONSUMER, tp_size=shape.decode[0], block_tokens=shape.decode[1]),
    )
    return Pair(prefill, decode)


def test_tokens_are_those_of_one_engine_and_only_the_last_is_computed(
    pair: Pair, references: References
) -> None:
    pair.prefill.reset()
    pair.decode.reset()
    prompts = [prompt(num_tokens) for num_tokens in PROMPT_TOKENS]
    before = Sources.of(pair.decode)
    answers = [pair.run(each) for each in prompts]
    after = Sources.of(pair.decode)
    assert token_ids(answers) == references.tokens(prompts)
    # Every token but the last of each prompt came from the prefill engine.
    num_external = sum(PROMPT_TOKENS) - len(PROMPT_TOKENS)
    assert after - before == Sources(num_external, 0, len(PROMPT_TOKENS))
    pair.assert_at_rest()


def test_second_turns_move_only_what_decode_lacks(pair: Pair, references: References) -> None:
    first = prompt(300, seed=1)
    (answer,) = references.tokens([first])
    second = first + tuple(answer) + prompt(50, seed=2)
    assert pair.run(first).token_ids == answer
    before = Sources.of(pair.decode), Sources.of(pair.prefill)
    assert [pair.run(second).token_ids] == references.tokens([second])
    decode, prefill = Sources.of(pair.decode) - before[0], Sources.of(pair.prefill) - before[1]
    blocks = pair.prefill.config.block_tokens, pair.decode.config.block_tokens
    # Decode has KV for all of the first turn but its last token, prefill for the prompt alone.
    held = (len(first) + len(answer) - 1) // blocks[1] * blocks[1]
    assert decode == Sources(len(second) - 1 - held, held, 1)
    assert prefill.local_hits == len(first) // blocks[0] * blocks[0]


def test_prefix_hits_on_one_side_only(pair: Pair, references: References) -> None:
    tokens = prompt(300, seed=3)
    want = references.tokens([tokens])
    assert [pair.run(tokens).token_ids] == want
    pair.decode.reset()
    assert [pair.run(tokens).token_ids] == want  # a hit at prefill
    pair.prefill.reset()
    assert [pair.run(tokens).token_ids] == want  # a hit at decode
    pair.assert_at_rest()


def test_sixteen_requests_at_the_same_time(pair: Pair, references: References) -> None:
    prompts = concurrent_prompts(16)
    assert token_ids(pair.run_all(prompts)) == references.tokens(prompts)
    pair.assert_at_rest()
