"""Aborts at random times give every block back, on both sides."""

from __future__ import annotations

import random
import time

from tests.vllm.cases import Pair, References, prompt
from tests.vllm.engines import OFFER, Connector, EngineConfig, Fleet

NUM_ABORTS = 50


def test_fifty_aborts_at_random_times(fleet: Fleet, references: References) -> None:
    settings = {"chunk_nbytes": 65536}
    pair = Pair(
        *fleet.fresh(
            EngineConfig(
                Connector(extra={**settings, "lease_s": 3.0, "keep_s": 1.0}),
                block_tokens=32,
                more={"max_num_batched_tokens": 64, "enable_chunked_prefill": True},
            ),
            EngineConfig(Connector(extra=settings, faults="read:slow=5ms"), block_tokens=128),
        )
    )
    before = pair.prefill.blocks().num_free, pair.decode.blocks().num_free
    rng = random.Random(0)
    num_ended = 0
    for number in range(NUM_ABORTS):
        tokens = prompt(rng.randrange(2, 500), seed=1000 + number)
        if number % 4 == 0:  # aborted on the prefill side, somewhere before its end
            request_id = pair.prefill.submit(tokens, 1, OFFER)
            time.sleep(rng.random() * 0.05)
            num_ended += not pair.prefill.abort(request_id)
            continue
        params = pair.offered(tokens)
        request_id = pair.decode.submit(tokens, 64, params)
        time.sleep(rng.random() ** 2 * 0.4)
        num_ended += not pair.decode.abort(request_id)
    assert num_ended < NUM_ABORTS / 2
    pair.assert_at_rest(timeout_s=120)
    assert (pair.prefill.blocks().num_free, pair.decode.blocks().num_free) == before
    tokens = prompt(300, seed=1)
    assert [pair.run(tokens).token_ids] == references.tokens([tokens])


def test_an_abort_before_admission_releases_the_offer(fleet: Fleet) -> None:
    """The request waits behind others that take all of decode's blocks."""
    pair = Pair(
        *fleet.engines(
            EngineConfig(Connector(), block_tokens=32),
            EngineConfig(Connector(), block_tokens=64, more={"max_num_seqs": 1}),
        )
    )
    running = pair.decode.submit(prompt(100, seed=50), 400)
    waiting = [
        pair.decode.submit(tokens, 16, pair.offered(tokens))
        for tokens in (prompt(150, seed=51), prompt(250, seed=52))
    ]
    for request_id in [*waiting, running]:
        assert pair.decode.abort(request_id)
    pair.assert_at_rest()
