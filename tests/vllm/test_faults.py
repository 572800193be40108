"""Peers that die, come back, or stand still."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.connector.rig import until
from tests.vllm.cases import NEW_TOKENS, Pair, References, Sources, prompt
from tests.vllm.engines import Connector, EngineConfig, Fleet

# Small pieces, each slow: a transfer of 700 tokens (2.9 MB) takes seconds. Few slots: what waits in
# one has left the source, which a transfer that fits into them outlives.
SLOW: dict[str, Any] = {"chunk_nbytes": 65536, "staging_slots": 4}
PIECES = "read:slow=200ms"
FAILED = "vllm:kvxfer_requests_failed_total"


def failures(pair: Pair) -> set[str]:
    """Reasons of failed loads so far, of this engine's life."""
    return {
        name.removeprefix(f"{FAILED}{{reason=").removesuffix("}")
        for name, value in pair.decode.metrics().items()
        if name.startswith(f"{FAILED}{{") and value > 0
    }


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_killed_prefill_fails_its_loads_and_a_restarted_one_serves(
    fleet: Fleet, references: References, policy: str
) -> None:
    settings = {**SLOW, "pull_timeout_s": 60.0}
    pair = Pair(
        *fleet.fresh(
            EngineConfig(Connector(extra={"chunk_nbytes": 65536}), block_tokens=32),
            EngineConfig(Connector(extra=settings, policy=policy, faults=PIECES), block_tokens=128),
        )
    )
    tokens, later = prompt(700, seed=30), prompt(100, seed=31)
    want, want_later = references.tokens([tokens, later])
    request_id = pair.decode.submit(tokens, NEW_TOKENS, pair.offered(tokens))
    time.sleep(0.7)
    pair.prefill.kill()
    answer = pair.decode.result(request_id, timeout_s=120)
    if policy == "fail":
        assert (answer.reason, answer.token_ids) == ("error", [])
    else:
        assert (answer.reason, answer.token_ids) == ("length", want)
    assert pair.decode.generate(later).token_ids == want_later  # the engine lives
    pair.decode.reset()
    pair.prefill.restart()  # on the port it had; decode is not told
    before = Sources.of(pair.decode)
    assert pair.run(later).token_ids == want_later
    assert (Sources.of(pair.decode) - before).external == len(later) - 1
    assert failures(pair) <= {"peer_lost", "deadline"}
    assert failures(pair)
    pair.assert_at_rest()


def test_a_lease_that_ends_before_the_release_discards_the_kv(
    fleet: Fleet, references: References
) -> None:
    settings = {"lease_s": 1.0, "keep_s": 0.3}
    pair = Pair(
        *fleet.fresh(
            EngineConfig(Connector(extra={**settings, "chunk_nbytes": 65536}), block_tokens=32),
            EngineConfig(
                Connector(extra=settings | SLOW, policy="recompute", faults=PIECES),
                block_tokens=128,
            ),
        )
    )
    tokens = prompt(700, seed=32)
    want = references.tokens([tokens])
    params = pair.offered(tokens)
    request_id = pair.decode.submit(tokens, NEW_TOKENS, params)
    time.sleep(0.5)
    with pair.decode.stopped():
        # While the sink stands still the lease ends and the source takes its blocks back.
        pair.prefill.wait_for_blocks(lambda blocks: blocks.num_free == blocks.num_total - 1)
    answer = pair.decode.result(request_id, timeout_s=120)
    assert [answer.token_ids] == want
    until(lambda: failures(pair) & {"expired", "ended", "broken", "peer_lost"})
    pair.assert_at_rest()


def test_an_offer_that_nobody_takes_is_given_up(fleet: Fleet) -> None:
    settings = {"lease_s": 0.5, "keep_s": 0.2}
    (prefill,) = fleet.engines(EngineConfig(Connector(extra=settings), block_tokens=32))
    for number in range(3):
        prefill.prefill(prompt(200, seed=40 + number))
    prefill.wait_for_blocks(
        lambda blocks: not blocks.num_requests and blocks.num_free == blocks.num_total - 1
    )


def test_a_prefill_that_never_answers_ends_in_a_deadline(
    fleet: Fleet, references: References
) -> None:
    settings = {"pull_timeout_s": 1.0, "peer_silent_s": 1.0, "connect_timeout_s": 1.0}
    pair = Pair(
        *fleet.fresh(
            EngineConfig(Connector(), block_tokens=32),
            EngineConfig(Connector(extra=settings, policy="recompute"), block_tokens=64),
        )
    )
    tokens = prompt(200, seed=33)
    want = references.tokens([tokens])
    params = pair.offered(tokens)
    with pair.prefill.stopped():
        started_s = time.monotonic()
        answer = pair.decode.generate(tokens, NEW_TOKENS, params)
        waited_s = time.monotonic() - started_s
    assert [answer.token_ids] == want
    assert waited_s < 60
    until(lambda: failures(pair))
    pair.assert_at_rest(timeout_s=120)  # the prefill engine's lease of 30 s


def test_models_that_differ_are_refused_by_name(fleet: Fleet) -> None:
    pair = Pair(
        *fleet.engines(
            EngineConfig(Connector(), model="hybrid"),
            EngineConfig(Connector(policy="fail")),
        )
    )
    tokens = prompt(100, seed=34)
    answer = pair.run(tokens)
    assert answer.reason == "error"
    assert "incompatible" in failures(pair)
    assert "num_layers" in pair.decode.process.log() or "layer" in pair.decode.process.log()
