"""The same params more than once at one decode engine: a request that was sent again, and several
samples of one prompt.
"""

from __future__ import annotations

import pytest

from tests.vllm.cases import Pair, References, Sources, prompt
from tests.vllm.engines import Connector, EngineConfig, Fleet


@pytest.fixture
def pair(fleet: Fleet) -> Pair:
    """A decode engine whose loads take a while, and which ends a request whose load fails."""
    decode = Connector(faults="read:slow=200ms")
    return Pair(*fleet.engines(EngineConfig(Connector(), block_tokens=32), EngineConfig(decode)))


def test_a_request_that_is_sent_again_is_served(pair: Pair, references: References) -> None:
    tokens = prompt(300, seed=70)
    params = pair.offered(tokens)
    before = Sources.of(pair.decode)
    answers = pair.decode.generate_all([tokens] * 3, 16, [params] * 3)
    assert [answer.token_ids for answer in answers] == references.tokens([tokens]) * 3
    assert (Sources.of(pair.decode) - before).external == 299  # by one of them
    again = pair.decode.generate(tokens, 16, params)
    assert again.token_ids == references.tokens([tokens])[0]
    pair.assert_at_rest()


def test_two_samples_of_one_prompt_are_served(pair: Pair, references: References) -> None:
    tokens = prompt(300, seed=71)
    likeliest = {"temperature": 1, "top_k": 1}  # vLLM refuses several greedy samples
    answer = pair.decode.generate(tokens, 16, pair.offered(tokens), n=2, **likeliest)
    assert answer.reason == "length"
    assert answer.token_ids == references.tokens([tokens])[0]
    pair.assert_at_rest()
