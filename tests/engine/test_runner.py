"""One rank's half of a step, driven by steps written out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.engine.config import EngineConfig, Role
from kvxfer.engine.digest import compare
from kvxfer.engine.model_config import load_model_config
from kvxfer.engine.runner import Runner, cache_facts
from kvxfer.engine.steps import (
    CachedRequestData,
    DigestOrder,
    GroupIds,
    NewRequestData,
    SchedulerOutput,
    StepOutput,
)

PROMPT = tuple(range(7, 90, 2))  # 42 tokens
NUM_NEW = 20


def make(name: str | None, **settings: Any) -> Runner:
    values: dict[str, Any] = {"role": Role.ALONE, "engine_id": "e", "num_blocks": 40} | settings
    return Runner(
        EngineConfig(model=name, num_kv_heads=2, **values),
        tp_rank=0,
        incarnation=bytes(16),
        all_reduce=None,
    )


def new_request(table: GroupIds, num_tokens: int, **more: Any) -> SchedulerOutput:
    new = NewRequestData(
        req_id="r", prompt_token_ids=PROMPT, block_ids=table, num_computed_tokens=0
    )
    return SchedulerOutput(
        scheduled_new_reqs=(new,), num_scheduled_tokens={"r": num_tokens}, **more
    )


def next_step(
    num_computed: int, num_new: int, tokens: tuple[int, ...], ids: GroupIds | None, **more: Any
) -> SchedulerOutput:
    cached = CachedRequestData(
        req_ids=("r",),
        new_block_ids=(ids,),
        num_computed_tokens=(num_computed,),
        new_token_ids=(tokens,),
        **more,
    )
    return SchedulerOutput(scheduled_cached_reqs=cached, num_scheduled_tokens={"r": num_new})


def token(output: StepOutput) -> int:
    (sample,) = output.samples
    assert sample.req_id == "r"
    return sample.token_id


def greedy(runner: Runner, table: GroupIds) -> list[int]:
    """All blocks from the start, the prompt at once."""
    out = [token(runner.execute(new_request(table, len(PROMPT))))]
    while len(out) < NUM_NEW:
        done = len(PROMPT) + len(out) - 1
        out.append(token(runner.execute(next_step(done, 1, (out[-1],), None))))
    return out


@pytest.mark.parametrize("name", [None, "hybrid", "kv-sharing"])
def test_appended_blocks_and_chunks_give_the_same_tokens(name: str | None) -> None:
    """Blocks of 8, appended to every group's table when a step needs them."""
    num_groups = 1 if name is None else 2
    whole = tuple(tuple(range(1 + 10 * g, 9 + 10 * g)) for g in range(num_groups))
    expected = greedy(make(name, block_size=8), whole)
    assert len(set(expected)) > 10
    runner = make(name, block_size=8)
    output = runner.execute(new_request(tuple(ids[:2] for ids in whole), 16))
    assert output.samples == ()  # the prompt has not ended
    appended = tuple(ids[2:6] for ids in whole)
    out = [token(runner.execute(next_step(16, 26, (), appended)))]
    while len(out) < NUM_NEW:
        done = len(PROMPT) + len(out) - 1
        ids = tuple(table[done // 8 : done // 8 + 1] for table in whole) if done % 8 == 0 else None
        out.append(token(runner.execute(next_step(done, 1, (out[-1],), ids))))
    assert out == expected


def test_each_request_is_sampled_from_its_last_token() -> None:
    """The prompt at once, beside another request, and its last token in a step of its own."""
    alone = make(None, block_size=16)
    assert alone.execute(new_request(((1, 2, 3),), len(PROMPT) - 1)).samples == ()
    expected = token(alone.execute(next_step(len(PROMPT) - 1, 1, (), None)))
    both = make(None, block_size=16)
    requests = tuple(
        NewRequestData(req_id=name, prompt_token_ids=ids, block_ids=table, num_computed_tokens=0)
        for name, ids, table in (
            ("part", PROMPT[::-1], ((4, 5, 6),)),
            ("r", PROMPT, ((1, 2, 3),)),
            ("other", PROMPT[:9], ((7,),)),
        )
    )
    output = both.execute(
        SchedulerOutput(
            scheduled_new_reqs=requests, num_scheduled_tokens={"part": 20, "r": 42, "other": 9}
        )
    )
    assert [sample.req_id for sample in output.samples] == ["r", "other"]
    assert output.samples[0].token_id == expected


def test_a_resumed_request_gets_new_tables() -> None:
    runner = make(None, block_size=16)
    first = token(runner.execute(new_request(((1, 2, 3),), len(PROMPT))))
    again = next_step(0, len(PROMPT), (), ((7, 5, 9),), resumed_req_ids=frozenset({"r"}))
    assert token(runner.execute(again)) == first
    found = runner.execute(
        SchedulerOutput(
            digests=(DigestOrder("a", ((1, 2, 3),), 42), DigestOrder("b", ((7, 5, 9),), 42))
        )
    ).digests
    assert compare([found["a"]], [found["b"]]) == []


def test_digests_come_before_the_step_and_after_zeroing() -> None:
    runner = make("hybrid", block_size=16)
    runner.execute(new_request(((1, 2, 3), (4, 5, 6)), len(PROMPT)))
    order = DigestOrder("r", ((-1, 2, 3), (4, 5, 6)), 42)
    before = runner.execute(SchedulerOutput(digests=(order,))).digests["r"]
    first = {plane.layer.split(".")[2]: plane.first_token for plane in before.planes}
    assert first == {"0": 16, "1": 0, "2": 16, "3": 0}
    after = runner.execute(SchedulerOutput(digests=(order,), zero_block_ids=(5,))).digests["r"]
    differences = compare([before], [after])
    assert {d.layer.split(".")[2] for d in differences} == {"1", "3"}
    assert {d.first_token for d in differences} == {16}


def test_a_step_without_the_blocks_it_needs_is_refused() -> None:
    runner = make(None, block_size=16)
    with pytest.raises(ValueError, match="request 0: expected blocks for 42 tokens in group 0"):
        runner.execute(new_request(((1, 2),), len(PROMPT)))


def test_facts_say_what_layers_see_and_share() -> None:
    config = EngineConfig(role=Role.ALONE, engine_id="e")
    facts = [
        cache_facts(config, load_model_config(name)) for name in (None, "hybrid", "kv-sharing")
    ]
    assert [each.attention for each in facts] == [
        "full",
        "48, full, 48, full",
        "48, full, 48, full, 48=2, full=3",
    ]
    assert len({each.weights for each in facts}) == 3
