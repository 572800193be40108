"""Models with sliding windows and with shared KV, over several turns: each group moves its own
blocks, only those that its window needs, and tokens and KV come out the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from kvxfer.cli.outcome import Answers, judge
from kvxfer.engine.config import Role
from tests.end_to_end.harness import LiveEngine, Pair, engine_config, pair, prompt

LAYER_TOKEN_NBYTES = 2 * 8 * 64 * 4  # K and V, 8 heads of 64 floats of 4 bytes
QUIET: dict[str, Any] = {"log_level": "WARNING"}


@dataclass(frozen=True)
class Engines:
    """A pair, and the engine that runs alone."""

    pair: Pair
    single: LiveEngine
    decode_block: int


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "hybrid": (
        "hybrid",
        {"tp_size": 2, "block_size": 16, "layout": "HND"},
        {"block_size": 32, "layout": "NHD"},
    ),
    "kv-sharing": (
        "kv-sharing",
        {"block_size": 24, "layout": "NHD"},
        {"tp_size": 2, "block_size": 16, "layout": "HND"},
    ),
}


@pytest.fixture(scope="module", params=CASES)
def engines(request: pytest.FixtureRequest) -> Iterator[Engines]:
    model, prefill, decode = CASES[request.param]
    alone = engine_config(Role.ALONE, model, kv=QUIET, enable_prefix_caching=False)
    single = LiveEngine(alone)
    try:
        with pair(
            engine_config(Role.PREFILL, model, kv=QUIET, digests=True, **prefill),
            engine_config(Role.DECODE, model, kv=QUIET, digests=True, **decode),
        ) as both:
            yield Engines(both, single, decode["block_size"])
    finally:
        single.close()


def check(engines: Engines, tokens: tuple[int, ...], max_new_tokens: int = 12) -> Answers:
    """Through both engines; equal to the engine that runs alone in every token, and the KV of all
    that moved equal to the source's.
    """
    prefilled = engines.pair.prefilled(tokens)
    decoded = engines.pair.decoded(tokens, prefilled.kv_transfer_params, max_new_tokens)
    alone = engines.single.generate(tokens, max_new_tokens)
    assert decoded.token_ids == alone.token_ids
    assert prefilled.token_ids == alone.token_ids[:1]
    answers = Answers(prefill=prefilled.done, decode=decoded.done)
    result = judge("r", len(tokens), answers)
    assert result.failure is None
    if decoded.done.num_external_tokens:
        assert result.kv is not None
        assert result.kv.differences == ()
    return answers


def done_tokens(answers: Answers) -> tuple[int, int]:
    """Tokens found by prefix at decode, and tokens that were to move."""
    assert answers.decode is not None
    return answers.decode.num_cached_tokens, answers.decode.num_external_tokens


def nbytes(answers: Answers) -> int:
    assert answers.decode is not None
    return sum(load.nbytes for load in answers.decode.loads)


def test_windows_move_only_what_is_needed(engines: Engines) -> None:
    """301 tokens; 300 move. The window of 48 of token 300 begins at 253. Blocks of 16 at the source
    begin at 240 and those of 24 too; the sink keeps from 224 in blocks of 32, and has to do with
    what the source holds; from 240 in blocks of 16.
    """
    answers = check(engines, prompt(301, seed=20))
    assert done_tokens(answers) == (0, 300)
    # Two layers with a window, two without; what shares KV moves nothing of its own.
    assert nbytes(answers) == (2 * 300 + 2 * (300 - 240)) * LAYER_TOKEN_NBYTES


def test_a_prompt_shorter_than_the_window_moves_as_a_whole(engines: Engines) -> None:
    answers = check(engines, prompt(40, seed=21))
    assert done_tokens(answers) == (0, 39)
    assert nbytes(answers) == 4 * 39 * LAYER_TOKEN_NBYTES


@pytest.mark.parametrize("start", [20, 50, 150])
def test_turns_find_what_the_turns_before_left(engines: Engines, start: int) -> None:
    """Every turn's prompt begins with the one before. Where a hit is too long for the window's
    blocks that are still there, a shorter one is taken, or none.
    """
    tokens = prompt(start, seed=22)
    hits = []
    for turn, more in enumerate((17, 64, 90, 33, 5)):
        cached, external = done_tokens(check(engines, tokens))
        assert cached % engines.decode_block == 0
        assert cached + external == len(tokens) - 1
        hits.append(cached)
        tokens += prompt(more, seed=100 + turn)
    assert max(hits) > 0
    assert hits[0] == 0


def test_the_same_prompt_again(engines: Engines) -> None:
    tokens = prompt(200, seed=23)
    for _ in range(3):
        check(engines, tokens)


def test_a_failed_load_is_computed_from_the_start(engines: Engines) -> None:
    """The tables of the load began at its windows; those of the recomputation do not."""
    right, wrong = prompt(260, seed=24), prompt(260, seed=25)
    params = engines.pair.prefilled(right).kv_transfer_params
    refused = engines.pair.decoded(wrong, params)
    assert refused.done.failure == "tokens"
    assert refused.token_ids == engines.single.generate(wrong, 8).token_ids
    check(engines, wrong[:220])
    # The offer was left alone.
    accepted = engines.pair.decoded(right, params)
    assert accepted.done.failure is None
    assert accepted.token_ids == engines.single.generate(right, 8).token_ids


def test_everything_is_given_back(engines: Engines) -> None:
    both = engines.pair
    for engine in (both.prefill, both.decode):
        engine.wait_for_info(lambda info: info.num_free_blocks == info.num_blocks - 1, timeout_s=5)


def test_a_model_with_other_windows_is_refused() -> None:
    """The weights have another name as well; what layers see is said by its own."""
    with pair(
        engine_config(Role.PREFILL, None, kv=QUIET),
        engine_config(Role.DECODE, "hybrid", kv=QUIET),
    ) as both:
        answer = both.run(prompt(60, seed=26))
        assert answer.done.failure is not None
        details = " ".join(load.detail for load in answer.done.loads)
        assert "attention" in details
