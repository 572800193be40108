"""What has ended between two steps of an engine is known when the next one is planned."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from kvxfer.connector.records import NO_ORDERS
from kvxfer.engine.config import Role
from kvxfer.engine.engine import Engine
from kvxfer.engine.runner import Runner
from kvxfer.engine.steps import SchedulerOutput, StepOutput
from tests.end_to_end.harness import OFFER, engine_config, prompt

NUM_REQUESTS, NEW_TOKENS = 3, 4


def note_steps(path: str) -> None:
    """Have a rank write of each step whether it has anything to do."""
    execute = Runner.execute

    def noted(self: Runner, step: SchedulerOutput) -> StepOutput:
        is_empty = not step.num_scheduled_tokens and not step.finished_req_ids
        has_orders = step.kv_connector_metadata not in (None, NO_ORDERS)
        with open(path, "a") as log:
            log.write("empty\n" if is_empty and not has_orders else "step\n")
        return execute(self, step)

    Runner.execute = noted  # type: ignore[method-assign]


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_a_load_that_has_ended_costs_no_empty_step(transport: str, tmp_path: Path) -> None:
    kv = {"transport": transport, "load_in_step_s": 0.0}
    steps = tmp_path / "steps"
    with (
        Engine(engine_config(Role.PREFILL, None, kv=kv)) as prefill,
        Engine(
            engine_config(Role.DECODE, None, kv=kv), set_up=partial(note_steps, str(steps))
        ) as decode,
    ):
        for number in range(NUM_REQUESTS):
            tokens = prompt(300, number)
            params = prefill.generate(tokens, 1, OFFER).kv_transfer_params
            answer = decode.generate(tokens, NEW_TOKENS, params)
            assert answer.done.num_external_tokens
    found = steps.read_text().split()
    assert len(found) >= NUM_REQUESTS * (1 + NEW_TOKENS)  # a load, and its tokens
    assert "empty" not in found
