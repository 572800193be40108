"""Loads that are part of a step of real vLLM engines: the tokens of one engine, and none of a load
that failed.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest

from tests.vllm.cases import Pair, References, prompt
from tests.vllm.engines import Connector, EngineConfig, Fleet

IN_STEP = "vllm:kvxfer_requests_in_step_total"
FAILED = "vllm:kvxfer_requests_failed_total{reason=read_failed}"
PATIENCE_S = 180.0
"""Until so many loads as a test wants were part of a step. The first load meets the source, one
whose offer is not on the board by the time it is asked for is asynchronous, and so is each one in
the minute after a step has waited in vain: a busy machine has all three.
"""


def connector(role: str, policy: str = "fail", faults: str = "") -> Connector:
    return Connector(
        name="SharedConnector",
        module="tests.vllm.shared_connector",
        role=role,
        extra={"load_in_step_s": 1.0} if role == "kv_consumer" else {},
        policy=policy,
        faults=faults,
    )


def pair_of(fleet: Fleet, tp_size: int = 1, policy: str = "fail", faults: str = "") -> Pair:
    return Pair(
        *fleet.engines(
            EngineConfig(connector("kv_producer"), block_tokens=32),
            EngineConfig(
                connector("kv_consumer", policy, faults), block_tokens=64, tp_size=tp_size
            ),
        )
    )


def until_in_step(pair: Pair, num_loads: int) -> Iterator[int]:
    """0, 1, 2 and so on until so many more loads of decode were part of a step."""
    enough = pair.decode.metric(IN_STEP) + num_loads
    ends_s = time.monotonic() + PATIENCE_S + num_loads
    for number in itertools.count():
        if pair.decode.metric(IN_STEP) >= enough:
            return
        assert time.monotonic() < ends_s
        yield number


@pytest.mark.parametrize("tp_size", [1, 2])
def test_tokens_are_those_of_one_engine(fleet: Fleet, references: References, tp_size: int) -> None:
    pair = pair_of(fleet, tp_size)
    for number in until_in_step(pair, 3):
        seed = 900 + 1_000 * number
        prompts = [prompt(num_tokens, seed + num_tokens) for num_tokens in (33, 64, 65, 129, 300)]
        for tokens, want in zip(prompts, references.tokens(prompts), strict=True):
            assert pair.run(tokens).token_ids == want
    tokens = prompt(200, seed=901)  # beside each other, and found by prefix afterwards
    (want,) = references.tokens([tokens])
    answers = [*pair.run_all([tokens] * 3), pair.decode.generate(tokens)]
    assert [answer.token_ids for answer in answers] == [want] * 4
    assert answers[-1].num_cached_tokens == 192
    pair.assert_at_rest()


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize(
    "num_in_step",
    [4, pytest.param(1000, marks=pytest.mark.slow)],
    ids=["few", "many"],
)
def test_no_token_comes_of_a_load_that_failed(
    fleet: Fleet, references: References, policy: str, num_in_step: int
) -> None:
    """On a CPU vLLM schedules no step ahead; tests/vllm/test_step_loads.py has that, too."""
    pair = pair_of(fleet, policy=policy, faults="read:fail")
    failed_before = pair.decode.metric(FAILED)
    for number in until_in_step(pair, num_in_step):
        tokens = prompt(70 + number % 60, seed=1_000 * num_in_step + number)
        answer = pair.run(tokens, 3)
        if policy == "fail":
            assert (answer.reason, answer.token_ids) == ("error", [])
        if number % 25 < 4:  # one engine takes its time, too
            (want,) = references.tokens([tokens], max_tokens=3)
            assert answer.token_ids in ([], want)
            assert pair.decode.generate(tokens, 3).token_ids == want
        if policy == "recompute":
            assert len(answer.token_ids) == 3
        assert pair.decode.metric(FAILED) == failed_before + number + 1
    pair.assert_at_rest()
