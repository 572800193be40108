"""Loads that are part of a step, of real engines: the same tokens and the same KV, and none of a
load that fails.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvxfer.engine.config import OnLoadFailure, Role
from kvxfer.engine.digest import KVDigest, compare
from kvxfer.engine.engine import Result
from tests.end_to_end.harness import DECODE, PREFILL, Pair, engine_config, pair, prompt, tiny_model

PATIENCE_S = 180.0
"""Until so many loads as a test wants were part of a step. What a rank tells of its sources comes
with a step, and in the minute after a step has waited in vain no load is part of one.
"""
WIDE = {"load_in_step_s": 1.0}
"""A machine that is busy while wires are tried seems to have slow ones."""


def run_shown(engines: Pair, tokens: tuple[int, ...]) -> tuple[Result, Result]:
    """Through both engines, with an offer that every rank shows on its board by now."""
    num_ranks = engines.prefill.config.tp_size
    posted = engines.prefill.info().counts.get("board.posted", 0)
    first = engines.prefilled(tokens)
    deadline_s = time.monotonic() + 120
    while engines.prefill.info().counts.get("board.posted", 0) < posted + num_ranks:
        assert time.monotonic() < deadline_s
        engines.prefill.generate(prompt(20), 1)  # what ranks count comes with steps
    return first, engines.decoded(tokens, first.kv_transfer_params)


def until_in_step(engines: Pair, num_loads: int) -> Iterator[int]:
    """0, 1, 2 and so on until so many loads of decode were part of a step."""
    ends_s = time.monotonic() + PATIENCE_S
    for number in itertools.count():
        if engines.decode.info().counts.get("requests.in_step", 0) >= num_loads:
            return
        assert time.monotonic() < ends_s
        yield number


def beginning(digest: KVDigest, num_tokens: int) -> KVDigest:
    """Of the first tokens only."""
    planes = tuple(plane.between(0, num_tokens) for plane in digest.planes)
    return KVDigest(num_tokens=num_tokens, planes=planes)


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 2), (2, 1)])
def test_tokens_and_kv_are_those_of_one_engine(
    tmp_path: Path, prefill_tp: int, decode_tp: int
) -> None:
    model = tiny_model(tmp_path)
    with pair(
        engine_config(Role.PREFILL, model, tp_size=prefill_tp, digests=True, **PREFILL),
        engine_config(Role.DECODE, model, tp_size=decode_tp, digests=True, kv=WIDE, **DECODE),
    ) as engines:
        for number in until_in_step(engines, 4):
            tokens = prompt(30 + 50 * (number % 6), seed=number)
            first, answer = run_shown(engines, tokens)
            assert answer.done.failure is None
            assert answer.done.num_external_tokens == len(tokens) - 1
            assert answer.token_ids == engines.prefill.generate(tokens, 8).token_ids
            moved = [beginning(digest, len(tokens) - 1) for digest in first.done.digests]
            assert compare(moved, answer.done.digests) == []
            assert {digest.num_tokens for digest in answer.done.digests} == {len(tokens) - 1}
        counts = engines.decode.info().counts
        # The first one meets the source; what it knows of it then counts from the next step on
        assert counts["requests.in_step"] < counts["requests.loaded"]


@pytest.mark.parametrize("policy", list(OnLoadFailure))
def test_no_token_comes_of_a_load_that_failed(tmp_path: Path, policy: OnLoadFailure) -> None:
    model = tiny_model(tmp_path)
    with pair(
        engine_config(Role.PREFILL, model, **PREFILL),
        engine_config(Role.DECODE, model, on_load_failure=policy, kv=WIDE, **DECODE),
        decode_faults="read:fail;nth=4",
    ) as engines:
        for number in until_in_step(engines, 4):
            tokens = prompt(200, seed=number)
            _, answer = run_shown(engines, tokens)
            failed = number == 3
            assert (answer.done.failure == "read_failed") == failed
            if failed and policy is OnLoadFailure.FAIL:
                assert (answer.done.status, answer.token_ids) == ("FINISHED_ERROR", ())
            else:
                assert answer.token_ids == engines.prefill.generate(tokens, 8).token_ids
        engines.decode.wait_for_info(lambda info: info.num_free_blocks == info.num_blocks - 1, 15)
