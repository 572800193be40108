"""Measures what the connector costs: time of a core while engines only hold blocks, and time of the
engine thread in each step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from tests.vllm.cases import Pair, prompt
from tests.vllm.engines import OFFER, Connector, Engine, EngineConfig, Fleet

WATCHED_S = 3.0
SETTLED_S = 1.5
"""Until then the blocks are pinned (0.1 s), vLLM's processes have stopped to spin (1 s more)."""
STALLED: dict[str, Any] = {
    "faults": "read:stall=60s",
    "extra": {"pull_timeout_s": 120.0, "peer_silent_s": 60.0},
}
"""Of a connector whose loads stand still."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Time in the connector, scheduler and worker side together, of steps with a forward pass.

    ``cpu_p50_us`` is CPU time of the engine thread with that of the clock itself (about 40 us):
    other work on the machine changes it less than wall time.
    """

    num_steps: int
    p50_us: float
    p90_us: float
    cpu_p50_us: float


def idle_shares(fleet: Fleet, connector: Connector, *, in_process: bool) -> tuple[float, float]:
    """The share of one core that all processes of an engine use while it only holds blocks: offers
    that nobody takes at prefill, and (with kvxfer) a load that stands still at decode.

    ``in_process``: scheduler and worker in one process, as on a GPU with TP 1; else vLLM for CPUs
    has a process for each, and both spin on the queue between them while an engine steps. It steps
    for a request that waits for its load, however long that takes.
    """
    base = EngineConfig(connector, block_tokens=32, in_process=in_process, idle_step_s=0.0)
    can_stall = connector.name == "KvxferConnector"
    stalled = replace(connector, **STALLED) if can_stall else connector
    pair = Pair(
        *fleet.fresh(
            replace(base, label="prefill"), replace(base, connector=stalled, label="decode")
        )
    )
    for number in range(3):
        pair.prefill.prefill(prompt(200, seed=60 + number))
    tokens = prompt(300, seed=63)
    request_id = pair.decode.submit(tokens, 16, pair.offered(tokens)) if can_stall else None
    time.sleep(SETTLED_S)
    shares = share(pair.prefill), share(pair.decode)
    if request_id is not None:
        assert pair.decode.abort(request_id)  # it stood still all the time
    return shares


def share(engine: Engine) -> float:
    """Of one core, by all processes of an engine from now on."""
    before_s, started_s = engine.process.cpu_s(), time.monotonic()
    time.sleep(WATCHED_S)
    return (engine.process.cpu_s() - before_s) / (time.monotonic() - started_s)


def step_times(fleet: Fleet, num_in_flight: int) -> dict[str, Steps]:
    """Of 100 steps that decode one more request, while prefill holds so many offers that nobody
    takes, and decode as many loads that stand still. By side.
    """
    prefill, decode = fleet.fresh(_timed({}, 32), _timed(STALLED, 64))
    prompts = [prompt(64, seed=700 + number) for number in range(num_in_flight)]
    offered = prefill.generate_all(prompts, 1, [OFFER] * num_in_flight)
    decode.submit_all(prompts, 4, [answer.params for answer in offered])
    decode.wait_for_blocks(lambda blocks: blocks.num_requests == num_in_flight)
    return {"prefill": _steps(prefill), "decode": _steps(decode)}


def _timed(settings: dict[str, Any], block_tokens: int) -> EngineConfig:
    connector = Connector(name="TimedConnector", module="tests.vllm.timed_connector", **settings)
    return EngineConfig(connector, block_tokens=block_tokens, more={"max_num_seqs": 96})


def _steps(engine: Engine) -> Steps:
    """The best of three: other work on the machine only adds."""
    found = []
    for _ in range(3):
        engine.call("call_connector", path="forget_times")
        engine.generate(prompt(40, seed=800), 100)
        found.append(Steps(**engine.call("call_connector", path="times")))
    return min(found, key=lambda steps: steps.p50_us)
