"""Engines that only hold blocks sleep, and lose nothing by it."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from tests.vllm.cases import NEW_TOKENS, Pair, References, Sources, prompt, token_ids
from tests.vllm.costs import SETTLED_S, share
from tests.vllm.engines import Connector, EngineConfig, Fleet

MAX_SHARE = 0.3
"""Of one core, by all processes of an engine. It would be one whole core or more if it stepped. The
rest (0.02 to 0.11, of a machine that does other work) is the harness, which looks for outputs 500
times a second, and threads that wait for sockets, in each process.
"""
PINNED = "vllm:kvxfer_offers_pinned_total"
PROMPTS = [prompt(num_tokens, seed=900) for num_tokens in (33, 200, 700)]


@pytest.mark.parametrize(
    ("tp_size", "in_process"),
    [(1, False), (2, False), (1, True)],
    ids=["two_processes", "tp2", "one_process"],
)
def test_held_blocks_cost_nothing(
    fleet: Fleet,
    references: References,
    measured: dict[str, object],
    tp_size: int,
    in_process: bool,
) -> None:
    """Prefill holds three offers that nobody takes for 5 s; then they are taken."""
    base = EngineConfig(Connector(), in_process=in_process, idle_step_s=0.0, label="idle")
    pair = Pair(
        *fleet.fresh(
            replace(base, block_tokens=32, tp_size=tp_size),
            replace(base, block_tokens=64),
        )
    )
    want = references.tokens(PROMPTS)
    params = [pair.offered(tokens) for tokens in PROMPTS]
    time.sleep(SETTLED_S)
    shares = share(pair.prefill), share(pair.decode)
    measured[f"shares of a core, idle with held blocks, TP {tp_size}, {in_process=}"] = shares
    assert max(shares) < MAX_SHARE
    assert not pair.prefill.call("reset_prefix_cache")  # they are held all the same
    before = Sources.of(pair.decode)
    assert token_ids(pair.decode.generate_all(PROMPTS, NEW_TOKENS, params)) == want
    assert (Sources.of(pair.decode) - before).external == sum(len(each) - 1 for each in PROMPTS)
    for engine in (pair.prefill, pair.decode):
        engine.reset()  # vLLM does this only when every block is free
    assert pair.prefill.metric(PINNED) == len(PROMPTS)


def test_held_blocks_come_back_after_a_sleep(fleet: Fleet, references: References) -> None:
    """Taken, and given up, while the engine sleeps; and by a request that needs the room."""
    settings = {"lease_s": 10.0, "keep_s": 0.5}
    pair = Pair(
        *fleet.fresh(
            EngineConfig(Connector(extra=settings), block_tokens=32),
            EngineConfig(Connector(), block_tokens=64),
        )
    )
    before = pair.prefill.blocks()
    taken, given_up = PROMPTS[1:]
    params = pair.offered(taken)
    pair.offered(given_up)
    time.sleep(0.5)
    held = pair.prefill.blocks()
    assert held.num_requests == 0
    assert held.num_free == before.num_free - 7 - 22
    assert (
        pair.decode.generate(taken, NEW_TOKENS, params).token_ids == (references.tokens([taken])[0])
    )
    time.sleep(2.0)
    pair.prefill.wait_for_blocks(lambda blocks: blocks == before)
    pair.assert_at_rest()
    assert pair.run(given_up).token_ids == references.tokens([given_up])[0]


def test_a_full_pool_waits_for_pins(fleet: Fleet, references: References) -> None:
    """A request that needs their room runs when they are given up."""
    config = EngineConfig(
        Connector(extra={"lease_s": 10.0, "keep_s": 0.5}),
        block_tokens=32,
        in_process=False,
        label="full",
    )
    (roomy,) = fleet.engines(replace(config, in_process=True))
    per_block = config.kv_nbytes // roomy.blocks().num_total
    (prefill,) = fleet.fresh(replace(config, kv_nbytes=40 * per_block))
    prefill.prefill(PROMPTS[2])  # 22 of 39 blocks
    time.sleep(SETTLED_S / 3)
    started_s = time.monotonic()
    other = prompt(700, seed=901)
    answer = prefill.generate(other, NEW_TOKENS)
    assert answer.token_ids == references.tokens([other])[0]
    assert time.monotonic() - started_s > 0.5  # it has waited
    prefill.reset()
