"""What moves, what does not, and that the tokens depend on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvxfer.engine.config import Role
from tests.end_to_end.harness import (
    DECODE,
    OFFER,
    PREFILL,
    Pair,
    engine_config,
    pair,
    prompt,
    tiny_model,
)

AT_ONCE_S, LEASE_S = 120.0, 300.0
TOKEN_NBYTES = 2 * 2 * 4 * 16 * 4  # K and V, 2 layers, 4 heads, 16 floats of 4 bytes


@pytest.fixture(scope="module", params=["shm", "zmq"])
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    model = tiny_model(tmp_path_factory.mktemp("model"))
    kv = {"transport": request.param, "lease_s": LEASE_S}
    with pair(
        engine_config(Role.PREFILL, model, kv=kv, tp_size=2, **PREFILL),
        engine_config(Role.DECODE, model, kv=kv, **DECODE),
    ) as engines:
        yield engines


@pytest.mark.parametrize("num_tokens", [2, 15, 16, 17, 32, 33, 100, 700])
def test_all_but_the_last_token_moves(engines: Pair, num_tokens: int) -> None:
    answer = engines.run(prompt(num_tokens, seed=1))
    assert answer.done.status == "FINISHED_LENGTH_CAPPED"
    assert answer.done.failure is None
    assert answer.done.num_external_tokens == num_tokens - 1
    assert answer.kv_nbytes == (num_tokens - 1) * TOKEN_NBYTES
    alone = engines.decoded(prompt(num_tokens, seed=1), None)
    assert answer.token_ids == alone.token_ids


def test_a_prompt_of_one_token_moves_nothing(engines: Pair) -> None:
    answer = engines.run(prompt(1))
    assert (answer.done.num_external_tokens, answer.kv_nbytes) == (0, 0)


def test_a_prefix_hit_moves_only_the_missing_tokens(engines: Pair) -> None:
    first = prompt(96, seed=2)
    longer = first + prompt(44, seed=3)
    engines.run(first)
    answer = engines.run(longer)
    # All 96 tokens are known on the decode side: 95 were moved and cached as two full blocks of 32,
    # the
    # third block became full with the first new token.
    assert answer.done.num_cached_tokens == 96
    assert answer.done.num_external_tokens == 140 - 1 - 96
    assert answer.kv_nbytes == (140 - 1 - 96) * TOKEN_NBYTES


def test_a_fully_cached_prompt_moves_nothing_and_frees_the_source(engines: Pair) -> None:
    tokens = prompt(128, seed=4)
    num_free = engines.prefill.config.num_blocks - 1
    # The request of another test may not have given back all of them
    engines.prefill.wait_for_info(lambda info: info.num_free_blocks == num_free, AT_ONCE_S)
    engines.run(tokens)
    again = engines.run(tokens)
    assert (again.done.num_external_tokens, again.kv_nbytes) == (0, 0)
    # At once, not when the lease ends.
    engines.prefill.wait_for_info(
        lambda info: info.num_free_blocks == num_free, timeout_s=AT_ONCE_S
    )


def test_params_of_another_prompt_are_refused_and_leave_the_offer_alone(engines: Pair) -> None:
    right, wrong = prompt(60, seed=5), prompt(60, seed=6)
    params = engines.prefilled(right).kv_transfer_params
    refused = engines.decoded(wrong, params)
    assert refused.done.failure == "tokens"
    assert refused.token_ids == engines.decoded(wrong, None).token_ids  # recomputed
    accepted = engines.decoded(right, params)
    assert accepted.done.failure is None
    assert accepted.done.num_external_tokens == 59


def test_params_are_good_for_one_load(engines: Pair) -> None:
    tokens = prompt(50, seed=7)
    params = engines.prefilled(tokens).kv_transfer_params
    assert engines.decoded(tokens, params).done.failure is None
    other = prompt(50, seed=8)
    assert engines.decoded(other, params).done.failure in {"ended", "tokens"}


def test_an_id_may_be_used_again(engines: Pair) -> None:
    for seed in range(3):
        tokens = prompt(70, seed=100 + seed)
        engines.prefill.submit(tokens, 1, OFFER, "same")
        params = engines.prefill.result("same").kv_transfer_params
        engines.decode.submit(tokens, 1, params, "same")
        assert engines.decode.result("same").done.num_external_tokens == 69


def test_more_heads_than_ranks_and_ranks_that_nobody_reads(tmp_path: Path) -> None:
    """Prefill TP 4 with 2 KV heads: two of the four ranks hold replicas that nobody reads."""
    model = tiny_model(tmp_path, num_kv_heads=2)
    with pair(
        engine_config(Role.PREFILL, model, kv={"lease_s": LEASE_S}, tp_size=4, **PREFILL),
        engine_config(Role.DECODE, model, **DECODE),
    ) as engines:
        num_free = engines.prefill.info().num_free_blocks
        for seed in range(3):
            assert engines.run(prompt(80, seed=seed)).done.failure is None
        engines.prefill.wait_for_info(
            lambda info: info.num_free_blocks == num_free, timeout_s=AT_ONCE_S
        )
