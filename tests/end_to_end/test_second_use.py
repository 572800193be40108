"""The same params at one decode engine more than once, through real engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvxfer.engine.config import Role
from tests.end_to_end.harness import (
    DECODE,
    ON_FAILURE_FAIL,
    PREFILL,
    Pair,
    engine_config,
    pair,
    prompt,
    tiny_model,
)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A decode engine that ends a request whose load fails, and whose reads take 0.2 s and more."""
    model = tiny_model(tmp_path_factory.mktemp("model"))
    with pair(
        engine_config(Role.PREFILL, model, **PREFILL),
        engine_config(Role.DECODE, model, **DECODE, **ON_FAILURE_FAIL),
        decode_faults="read:slow=200ms",
    ) as engines:
        yield engines


def test_both_of_two_requests_with_one_offer_are_served(engines: Pair) -> None:
    tokens = prompt(100, seed=1)
    params = engines.prefilled(tokens).kv_transfer_params
    ids = [engines.decode.submit(tokens, 8, params) for _ in range(3)]
    answers = [engines.decode.result(request_id) for request_id in ids]
    alone = engines.decoded(tokens, None)
    for answer in answers:
        assert answer.done.status == "FINISHED_LENGTH_CAPPED"
        assert answer.token_ids == alone.token_ids
    assert [len(answer.done.loads) for answer in answers] == [1, 0, 0]
    assert [answer.done.num_external_tokens for answer in answers] == [99, 0, 0]
    engines.prefill.wait_for_info(lambda info: info.num_free_blocks == info.num_blocks - 1, 20)


def test_params_that_come_again_later_are_served_from_the_cache(engines: Pair) -> None:
    tokens = prompt(100, seed=2)
    params = engines.prefilled(tokens).kv_transfer_params
    answers = [engines.decoded(tokens, params) for _ in range(2)]
    assert answers[0].token_ids == answers[1].token_ids
    assert [answer.done.status for answer in answers] == ["FINISHED_LENGTH_CAPPED"] * 2


def test_another_prompt_with_the_same_params_harms_only_itself(engines: Pair) -> None:
    for is_right_first in (True, False):
        right, wrong = (prompt(100, seed=seed + 2 * is_right_first) for seed in (3, 4))
        order = (right, wrong) if is_right_first else (wrong, right)
        params = engines.prefilled(right).kv_transfer_params
        ids = [engines.decode.submit(tokens, 8, params) for tokens in order]
        answers = dict(zip(order, [engines.decode.result(each) for each in ids], strict=True))
        assert answers[right].done.failure is None
        assert answers[right].token_ids == engines.decoded(right, None).token_ids
        if answers[wrong].done.status == "FINISHED_LENGTH_CAPPED":
            assert answers[wrong].token_ids == engines.decoded(wrong, None).token_ids
        else:
            assert answers[wrong].done.failure == "tokens"


def test_the_end_of_the_first_leaves_the_offer_to_the_second(engines: Pair) -> None:
    """The first one is aborted while it waits behind a long prompt, before its load."""
    tokens = prompt(100, seed=5)
    params = engines.prefilled(tokens).kv_transfer_params
    first = engines.decode.submit(tokens, 8, params)
    second = engines.decode.submit(tokens, 8, params)
    engines.decode.abort(first)
    answer = engines.decode.result(second)
    assert answer.done.status == "FINISHED_LENGTH_CAPPED"
    assert answer.token_ids == engines.decoded(tokens, None).token_ids
