"""Requests that both engines hear of at once: KV moves while prefill computes. The same tokens and
the same KV. Whatever prefill or decode does in mid-growth: no wrong token, no lost block, a named
reason.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvxfer.connector.params import early_params, mint_request
from kvxfer.engine.config import Role
from kvxfer.engine.digest import KVDigest, compare
from kvxfer.engine.engine import Result
from tests.end_to_end.harness import DECODE, PREFILL, Pair, engine_config, pair, prompt, tiny_model
from tests.helpers import free_port

CHUNK = 48
"""Tokens of a step of prefill: no multiple of decode's blocks."""
REASONS = {
    *("aborted", "cancelled", "deadline", "ended", "incarnation", "peer_lost", "preempted"),
    *("prefill_lost", "unknown", "read_failed"),
}


@dataclass(frozen=True)
class Both:
    """A request at both engines. ``prefill``, ``decode``: its ids there."""

    tokens: tuple[int, ...]
    prefill: str
    decode: str


class Router:
    """Asks both at once, once the first answer has taught how."""

    def __init__(self, engines: Pair) -> None:
        self.engines = engines
        self.learn()

    def learn(self) -> None:
        self.learned = self.engines.prefilled(prompt(20, seed=999)).kv_transfer_params
        assert self.learned is not None
        assert self.engines.decoded(prompt(20, seed=999), self.learned).done.failure is None

    def ask(self, tokens: tuple[int, ...], num_new: int = 4) -> Both:
        name = mint_request()
        early = early_params(self.learned, name)
        assert early is not None
        offer: dict[str, Any] = {"do_remote_decode": True, "kvxfer": {"request": name}}
        at_decode = self.engines.decode.submit(tokens, num_new, early)
        return Both(tokens, self.engines.prefill.submit(tokens, 1, offer), at_decode)

    def answer(self, both: Both) -> tuple[Result, Result]:
        first = self.engines.prefill.result(both.prefill)
        return first, self.engines.decode.result(both.decode)


def chunked(role: Role, model: str, **changes: Any) -> Any:
    sizes = PREFILL if role is Role.PREFILL else DECODE
    return engine_config(
        role, model, max_num_batched_tokens=CHUNK, num_blocks=400, **{**sizes, **changes}
    )


def beginning(digest: KVDigest, num_tokens: int) -> KVDigest:
    planes = tuple(plane.between(0, num_tokens) for plane in digest.planes)
    return KVDigest(num_tokens=num_tokens, planes=planes)


@pytest.mark.parametrize(
    ("transport", "prefill_tp", "decode_tp"), [("shm", 1, 2), ("shm", 2, 1), ("zmq", 2, 1)]
)
def test_tokens_and_kv_are_those_of_one_engine(
    transport: str, prefill_tp: int, decode_tp: int, tmp_path: Path
) -> None:
    model, kv = tiny_model(tmp_path), {"transport": transport, "staging_nbytes": 256 << 10}
    with pair(
        chunked(Role.PREFILL, model, tp_size=prefill_tp, digests=True, kv=kv),
        chunked(Role.DECODE, model, tp_size=decode_tp, digests=True, kv=kv),
    ) as engines:
        router = Router(engines)
        for lengths in ((1, 47, 48, 49), (300,), (700, 31, 500)):
            asked = [router.ask(prompt(number, seed=number)) for number in lengths]
            for both in asked:
                first, answer = router.answer(both)
                tokens, done = both.tokens, answer.done
                assert done.failure is None
                assert done.num_external_tokens == len(tokens) - 1
                assert answer.token_ids == engines.prefill.generate(tokens, 4).token_ids
                if len(tokens) > 1:
                    moved = [beginning(digest, len(tokens) - 1) for digest in first.done.digests]
                    assert compare(moved, done.digests) == []
        counts = engines.decode.info().counts
        assert counts["requests.loaded"] == 8  # all but the prompt of one token, and the first
        engines.prefill.wait_for_info(lambda info: info.num_free_blocks == info.num_blocks - 1, 28)
        engines.decode.wait_for_info(lambda info: info.num_free_blocks == info.num_blocks - 1, 28)


def test_a_request_that_prefill_never_gets_is_computed_and_lets_others_pass(tmp_path: Path) -> None:
    """It looks for its offer, holds no block, and is given up in time, by name."""
    model = tiny_model(tmp_path)
    kv = {"early_wait_s": 10.0}
    with pair(chunked(Role.PREFILL, model, kv=kv), chunked(Role.DECODE, model, kv=kv)) as engines:
        router = Router(engines)
        early = early_params(router.learned, mint_request())
        lost = engines.decode.submit(prompt(100), 4, early)
        other = router.ask(prompt(200))
        assert router.answer(other)[1].done.failure is None
        answer = engines.decode.result(lost)
        assert answer.done.failure == "unknown"
        assert answer.token_ids == engines.prefill.generate(prompt(100), 4).token_ids


def growth_s_per_token(router: Router) -> float:
    """What prefill takes here and now, alone."""
    taken_s = []
    for number in range(5):
        began_s = time.perf_counter()
        both = router.ask(prompt(400, seed=1000 + number))
        router.engines.prefill.result(both.prefill)
        taken_s.append(time.perf_counter() - began_s)
        assert router.engines.decode.result(both.decode).done.failure is None
    return statistics.median(taken_s) / 400


def break_in_growth(
    router: Router, rng: random.Random, number: int, what: str, s_per_token: float
) -> str | None:
    """One request, beside another that nobody touches; ``what`` is done somewhere in the time that
    prefill takes for it alone. Returns why its KV was not used.
    """
    engines = router.engines
    both = router.ask(prompt(rng.randrange(200, 600), seed=number))
    other = router.ask(prompt(rng.randrange(100, 400), seed=-number - 1))
    time.sleep(rng.random() * len(both.tokens) * s_per_token)
    if what == "kill":
        engines.prefill.group.kill()
        engines.prefill.restart()
    elif what == "abort":
        engines.prefill.abort(both.prefill)
    else:
        engines.decode.abort(both.decode)
    want: dict[Both, str | None] = {}
    for each in (both, other):
        answer = engines.decode.result(each.decode, timeout_s=240)
        if what != "kill":
            engines.prefill.result(each.prefill, timeout_s=240)
        if each is both and what == "abort at decode":
            want[each] = None
            continue
        alone = engines.prefill.generate(each.tokens, 4).token_ids
        assert answer.token_ids == alone, (what, answer.done.failure)
        want[each] = answer.done.failure
    if what != "kill":
        assert want[other] is None
    else:
        router.learn()
    return want[both]


def at_rest(engines: Pair) -> None:
    for engine in (engines.prefill, engines.decode):
        engine.wait_for_info(lambda info: info.num_free_blocks == info.num_blocks - 1, 120)


def broken(tmp_path: Path, transport: str, breaks: list[str]) -> Counter[str | None]:
    model = tiny_model(tmp_path)
    kv = {
        **{"transport": transport, "staging_nbytes": 256 << 10, "early_wait_s": 20.0},
        **{"lease_s": 30.0, "keep_s": 1.0, "peer_silent_s": 60.0},
    }
    rng = random.Random(f"{transport} {breaks}")
    with pair(
        chunked(Role.PREFILL, model, kv=kv | {"port": free_port()}),
        chunked(Role.DECODE, model, kv=kv),
    ) as engines:
        router = Router(engines)
        s_per_token = growth_s_per_token(router)
        found: Counter[str | None] = Counter()
        for number, what in enumerate(breaks):
            found[break_in_growth(router, rng, number, what, s_per_token)] += 1
        at_rest(engines)
        assert set(found) - {None} <= REASONS
        assert engines.decode.info().counts.get("requests.loaded", 0) > 0
    return found


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_what_is_broken_in_mid_growth_loses_nothing(transport: str, tmp_path: Path) -> None:
    breaks = ["abort", "abort at decode"] * 4 + ["kill"]
    found = broken(tmp_path, transport, breaks)
    assert found.total() > found[None]  # something was hit in the middle


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_two_hundred_are_broken_in_mid_growth(transport: str, tmp_path: Path) -> None:
    rng = random.Random(transport)
    breaks = [rng.choice(["abort"] * 5 + ["abort at decode"] * 3 + ["kill"]) for _ in range(200)]
    found = broken(tmp_path, transport, breaks)
    assert found.total() - found[None] >= 40
