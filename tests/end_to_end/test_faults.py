"""Every way a transfer can go wrong ends in a named reason, in time, with all blocks back."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvxfer.engine.config import OnLoadFailure, Role
from tests.end_to_end.harness import DECODE, OFFER, PREFILL, engine_config, pair, prompt, tiny_model
from tests.helpers import free_port, stop_process

SLOW = {"shm": "read:slow=2s", "zmq": "read:slow=1s"}
"""A load takes seconds: over shm it has few pieces, over zmq many."""


@pytest.mark.parametrize("transport", ["shm", "zmq"])
@pytest.mark.parametrize("policy", list(OnLoadFailure))
def test_a_killed_prefill_fails_its_loads_and_a_restarted_one_serves(
    transport: str, policy: OnLoadFailure, tmp_path: Path
) -> None:
    model = tiny_model(tmp_path)
    # Small chunks, so that the wire is in the middle of the transfer when the process dies.
    kv = {"transport": transport, "chunk_nbytes": 32768, "staging_slots": 4}
    prefill = engine_config(Role.PREFILL, model, kv=kv | {"port": free_port()}, **PREFILL)
    decode = engine_config(
        Role.DECODE,
        model,
        kv=kv | {"pull_timeout_s": 60.0},
        on_load_failure=policy,
        **DECODE,
    )
    with pair(prefill, decode, decode_faults=SLOW[transport]) as engines:
        tokens = prompt(1000)
        params = engines.prefilled(tokens).kv_transfer_params
        request_id = engines.decode.submit(tokens, 8, params)
        time.sleep(0.3)
        engines.prefill.group.kill()
        answer = engines.decode.result(request_id, timeout_s=240)
        assert answer.done.failure in {"peer_lost", "deadline"}
        if policy is OnLoadFailure.FAIL:
            assert (answer.done.status, answer.token_ids) == ("FINISHED_ERROR", ())
        else:
            assert answer.token_ids == engines.decoded(tokens, None).token_ids
        engines.prefill.restart()
        other = prompt(300, seed=1)
        again = engines.run(other)
        assert (again.done.failure, again.done.num_external_tokens) == (None, 299)


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_a_lease_that_ends_before_the_release_discards_the_kv(
    transport: str, tmp_path: Path
) -> None:
    model = tiny_model(tmp_path)
    # Few and small chunks in flight: what was sent while the offer was open is valid for ever.
    chunks = {"chunk_nbytes": 32768, "staging_slots": 4}
    kv = {"transport": transport, "lease_s": 1.0, "keep_s": 0.3, **chunks}
    with pair(
        engine_config(Role.PREFILL, model, kv=kv, **PREFILL),
        engine_config(Role.DECODE, model, kv=kv, **DECODE),
        decode_faults=SLOW[transport],
    ) as engines:
        num_free = engines.prefill.info().num_free_blocks
        tokens = prompt(1000)
        params = engines.prefilled(tokens).kv_transfer_params
        request_id = engines.decode.submit(tokens, 8, params)
        time.sleep(0.3)
        pids = engines.decode.group.pids
        for pid in pids:
            stop_process(pid)
        try:
            # While the sink stands still the lease ends and the source takes its blocks back.
            engines.prefill.wait_for_info(lambda info: info.num_free_blocks == num_free, 120)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        answer = engines.decode.result(request_id, timeout_s=240)
        assert answer.done.failure == "expired"
        assert answer.token_ids == engines.decoded(tokens, None).token_ids


def test_a_storm_of_aborts_gives_every_block_back(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    kv = {"chunk_nbytes": 32768}
    with pair(
        engine_config(
            Role.PREFILL, model, kv=kv, num_blocks=600, max_num_batched_tokens=16, **PREFILL
        ),
        engine_config(Role.DECODE, model, kv=kv, num_blocks=300, **DECODE),
        decode_faults="read:slow=2ms",
    ) as engines:
        before = (engines.prefill.info().num_free_blocks, engines.decode.info().num_free_blocks)
        rng = random.Random(0)
        decoding: list[str] = []
        num_aborted_prefills = 0
        for number in range(200):
            tokens = prompt(rng.randrange(2, 300), seed=number)
            if number % 4 == 0:  # aborted on the prefill side, somewhere before its end
                request_id = engines.prefill.submit(tokens, 1, OFFER)
                time.sleep(rng.random() * 0.01)
                engines.prefill.abort(request_id)
                params = engines.prefill.result(request_id).kv_transfer_params
                if params is None:
                    num_aborted_prefills += 1
                    continue
            else:
                params = engines.prefilled(tokens).kv_transfer_params
            decoding.append(engines.decode.submit(tokens, 64, params))
            time.sleep(rng.random() * 0.02)
            engines.decode.abort(decoding[-1])
        for request_id in decoding:
            engines.decode.result(request_id)
        assert num_aborted_prefills > 5
        engines.prefill.wait_for_info(lambda info: info.num_free_blocks == before[0], 28)
        engines.decode.wait_for_info(lambda info: info.num_free_blocks == before[1], 28)
        assert engines.run(prompt(200, seed=-1)).done.failure is None


@pytest.mark.parametrize("has_board", [True, False])
def test_a_source_that_does_not_answer(tmp_path: Path, has_board: bool) -> None:
    """Its open offers are read from its board all the same; without one the load ends by its
    deadline.
    """
    model = tiny_model(tmp_path)
    kv: dict[str, Any] = {"peer_silent_s": 300.0, "connect_timeout_s": 300.0}
    kv["pull_timeout_s"] = 300.0 if has_board else 10.0
    with pair(
        engine_config(Role.PREFILL, model, **PREFILL),
        engine_config(Role.DECODE, model, kv=kv | {"offer_board": has_board}, **DECODE),
    ) as engines:
        assert engines.run(prompt(40)).done.failure is None
        tokens = prompt(200, seed=1)
        expected = engines.run(tokens).token_ids
        params = engines.prefilled(tokens).kv_transfer_params
        # The answer may come before its rank shows the offer, and what ranks count comes with steps
        deadline_s = time.monotonic() + 120
        while engines.prefill.info().counts.get("board.posted") != 3:
            assert time.monotonic() < deadline_s
            engines.prefill.generate(prompt(20, seed=2), 1)
        pids = engines.prefill.group.pids
        for pid in pids:
            stop_process(pid)
        try:
            started_s = time.monotonic()
            answer = engines.decoded(tokens, params)
            if has_board:
                assert answer.done.failure is None
            else:
                assert answer.done.failure in {"deadline", "peer_lost"}
            assert answer.token_ids == expected
            assert time.monotonic() - started_s < 200
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)


def test_incompatible_engines_say_every_difference(tmp_path: Path) -> None:
    """A pair is counted once, whatever the number of its ranks and of its requests."""
    with pair(
        engine_config(Role.PREFILL, tiny_model(tmp_path, num_kv_heads=4), seed=1, **PREFILL),
        engine_config(
            Role.DECODE, tiny_model(tmp_path, num_kv_heads=2), seed=2, tp_size=2, **DECODE
        ),
    ) as engines:
        answers = [engines.run(prompt(40 + i)).done for i in range(2)]
        assert engines.decode.info().counts["pairs.unusable"] == 1
    for done in answers:
        assert done.failure == "incompatible"
        assert len(done.loads) == 2
        for load in done.loads:
            assert "num_kv_heads: source has 4, sink has 2" in load.detail
            assert "weights: source has" in load.detail


def test_an_abort_after_prefill_has_finished_gives_the_blocks_back(tmp_path: Path) -> None:
    """At once: the lease of 400 s does not end in this test."""
    model = tiny_model(tmp_path)
    kv = {"lease_s": 400.0}
    with pair(
        engine_config(Role.PREFILL, model, tp_size=2, kv=kv, **PREFILL),
        engine_config(Role.DECODE, model, **DECODE),
    ) as engines:
        free = engines.prefill.info().num_free_blocks
        tokens = prompt(100)
        request_id = engines.prefill.submit(tokens, 1, OFFER)
        params = engines.prefill.result(request_id).kv_transfer_params
        assert params is not None
        assert engines.prefill.info().num_free_blocks < free
        engines.prefill.abort(request_id)
        engines.prefill.wait_for_info(lambda info: info.num_free_blocks == free, 120)
        answer = engines.decoded(tokens, params)
        assert answer.done.failure == "ended"
        engines.prefill.abort(request_id)  # nothing is left of it
        other = engines.run(prompt(200, seed=1))
        assert (other.done.failure, other.done.num_external_tokens) == (None, 199)


def test_params_of_a_prefill_engine_that_was_started_anew_are_of_another_life(
    tmp_path: Path,
) -> None:
    """Also under another engine id, and with a model that the sink could not take KV from."""
    model = tiny_model(tmp_path)
    prefill = engine_config(Role.PREFILL, model, kv={"port": free_port()}, **PREFILL)
    others: tuple[dict[str, str], ...] = (
        {},
        {"engine_id": "prefill-2"},
        {"engine_id": "prefill-3", "model": tiny_model(tmp_path, num_kv_heads=2)},
    )
    with pair(prefill, engine_config(Role.DECODE, model, **DECODE)) as engines:
        for seed, changes in enumerate(others):
            tokens = prompt(60, seed)
            params = engines.prefilled(tokens).kv_transfer_params
            engines.prefill.reconfigure(msgspec.structs.replace(prefill, **changes))
            engines.prefill.group.ready()
            assert engines.decoded(tokens, params).done.failure == "incarnation", changes
