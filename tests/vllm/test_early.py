"""Requests that both engines hear of at once, with vLLM's own scheduler: what decode has read
before prefill's next step begins, what it holds meanwhile, and what it does when prefill is broken
off.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from kvxfer.connector.params import early_params, mint_request
from tests.vllm.cases import PREEMPTIONS, References, concurrent_prompts, prompt, token_ids
from tests.vllm.cases import Pair as EnginePair
from tests.vllm.engines import OFFER, Connector, EngineConfig, Fleet
from tests.vllm.scheduler_rig import BLOCK, OFFERED, Status
from tests.vllm.step_rig import ComputingEngine, expected_tokens

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

CHUNK = 32
NUM_NEW = 4
WAIT_S = 120.0
Make = Callable[..., ComputingEngine]


class Both:
    """A source that computes in chunks, a sink that has met it, and a router between them."""

    def __init__(self, make: Make, chunk: int = CHUNK, **settings: Any) -> None:
        leases = {k: v for k, v in settings.items() if k in ("lease_s", "keep_s")}
        self.source = make(role="kv_producer", max_batched_tokens=chunk, **leases)
        self.sink = make(role="kv_consumer", **settings)
        tokens = prompt_of(0, 40)
        self.source.request("first", tokens, OFFERED, max_tokens=1)
        self.drive(lambda: self.source.scheduler.requests.get("first") is None)
        self.learned = self.source.params_of("first")
        at_sink = self.sink.request("first", tokens, self.learned, max_tokens=NUM_NEW)
        self.drive(at_sink.is_finished)
        self.settle()

    def ask(self, name: str, tokens: list[int], **request: Any) -> tuple[Any, Any]:
        offer = mint_request()
        early = early_params(self.learned, offer)
        at_sink = self.sink.request(name, tokens, early, max_tokens=NUM_NEW, **request)
        params = {**OFFERED, "kvxfer": {"request": offer}}
        return self.source.request(name, tokens, params, max_tokens=1), at_sink

    def drive(self, holds: Callable[[], object], *, source: bool = True) -> None:
        """Step both, or the sink alone, until it holds."""
        deadline_s = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < deadline_s, "waited in vain"
            for engine in (self.sink, *([self.source] if source else ())):
                engine.run_if_any()
            time.sleep(0.0005)

    def settle(self) -> None:
        """Both sides are at rest, and every block is back."""
        self.drive(lambda: self.sink.is_quiet() and self.source.is_quiet())

    def has_read(self, name: str, num_tokens: int) -> bool:
        """The sink has what the source has of these tokens."""
        ours, theirs = self.sink.blocks_of(name), self.source.blocks_of(name)
        whole = num_tokens // BLOCK
        return len(ours) >= whole and all(
            self.sink.block(0, mine) == self.source.block(0, its)
            for mine, its in zip(ours[:whole], theirs[:whole], strict=True)
        )


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(900) for _ in range(num_tokens)]


def ended_all(requests: Sequence[Any]) -> bool:
    return all(request.is_finished() for request in requests)


def assert_right(request: Any) -> None:
    want = expected_tokens(request.prompt_token_ids, request.max_tokens)
    assert list(request.output_token_ids) == want


@pytest.mark.parametrize(("transport", "chunk", "behind"), [("shm", 32, 0), ("zmq", 128, 128)])
def test_decode_reads_chunks_while_others_are_computed(
    make: Make, transport: str, chunk: int, behind: int
) -> None:
    """A stream's least chunk, 4 KiB, has 128 tokens here, and need not end with a step's."""
    both = Both(make, chunk, transport=transport, chunk_nbytes=4096)
    for seed, num_tokens in ((1, 400), (2, 3 * chunk + 1)):
        name = f"r{seed}"
        _, at_sink = both.ask(name, prompt_of(seed, num_tokens))
        both.source.run()
        for at in range(chunk, num_tokens - 1, chunk):
            both.drive(
                lambda n=at - behind, of=name, its=at_sink: (  # type: ignore[misc]
                    its.status == Status.WAITING_FOR_REMOTE_KVS and both.has_read(of, n)
                ),
                source=False,
            )
            both.source.run()
        both.drive(at_sink.is_finished)
        assert_right(at_sink)
        assert both.sink.begun_at[name] == num_tokens - 1  # only the last token was computed
    both.settle()


def test_what_prefill_has_in_its_cache_leaves_before_its_first_step_ends(make: Make) -> None:
    both = Both(make)
    tokens = prompt_of(3, 200)
    both.source.request("before", tokens[:180], max_tokens=1)
    both.source.run_out()
    _, at_sink = both.ask("r", tokens)
    compute, num_cached = both.source.compute, 180 // BLOCK * BLOCK
    seen: list[int] = []

    def held(step: Any) -> None:
        """The forward pass takes as long as the sink needs."""
        if not seen:
            both.drive(lambda: both.has_read("r", num_cached), source=False)
            seen.append(num_cached)
        compute(step)

    both.source.compute = held  # type: ignore[method-assign]
    both.source.run()
    assert seen == [num_cached]
    both.drive(at_sink.is_finished)
    assert_right(at_sink)
    both.settle()


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_what_the_same_step_computes_for_another_request_is_not_there_yet(
    make: Make, transport: str
) -> None:
    """vLLM names the blocks of a step before it runs, and the next request of it hits them."""
    both = Both(make, 1024, transport=transport, chunk_nbytes=4096)
    tokens = prompt_of(3, 420)
    both.source.request("a", tokens[:400], max_tokens=1)
    _, at_sink = both.ask("b", tokens)
    schedule = both.source.schedule
    offers: list[Any] = []

    def recorded() -> Any:
        orders = schedule()
        offers.extend(orders.offers)
        return orders

    both.source.schedule = recorded  # type: ignore[method-assign]
    both.source.run()
    assert (both.source.begun_at["a"], both.source.begun_at["b"]) == (0, 400)
    assert [offer.open_tokens for offer in offers] == [0]
    both.drive(at_sink.is_finished)
    assert_right(at_sink)
    both.settle()


def test_blocks_of_early_requests_are_bounded(make: Make) -> None:
    """The second one looks on without a block until its prompt is computed, others pass it."""
    both = Both(make, early_share=0.25)  # of 63 blocks
    _, first = both.ask("first", prompt_of(4, 200))
    both.source.run()
    both.drive(lambda: both.has_read("first", CHUNK), source=False)
    _, second = both.ask("second", prompt_of(5, 200))
    plain = both.sink.request("plain", prompt_of(6, 300), max_tokens=NUM_NEW)
    both.drive(plain.is_finished, source=False)
    assert first.status == Status.WAITING_FOR_REMOTE_KVS
    assert second.status == Status.WAITING
    assert both.sink.blocks_of("second") == []
    both.drive(lambda: first.is_finished() and second.is_finished())
    for request in (first, second, plain):
        assert_right(request)
    assert both.sink.begun_at["second"] == 199
    both.settle()


def test_blocks_come_back_when_prefill_is_late(make: Make) -> None:
    both = Both(make, early_wait_s=10.0)
    _, at_sink = both.ask("r", prompt_of(7, 200))
    both.source.run()
    both.drive(lambda: both.has_read("r", CHUNK), source=False)
    both.drive(at_sink.is_finished, source=False)  # it computes by itself
    assert_right(at_sink)
    assert both.sink.stats["requests_failed"] == {"deadline": 1}
    both.settle()


BREAKS = ("nothing", "preempt", "abort at prefill", "abort at decode")


def histories(make: Make, num: int, *, seed: int, **settings: Any) -> Counter[str]:
    """Requests that are broken somewhere, each beside one that nobody touches."""
    # An offer whose decode has given its search up comes back by its lease.
    times: dict[str, Any] = {"early_wait_s": 2.0, "lease_s": 3.0, "keep_s": 1.0}
    both, rng = Both(make, **times, **settings), random.Random(seed)
    policy = settings.get("policy", "recompute")
    ended: Counter[str] = Counter()
    for number in range(num):
        what = rng.choice(BREAKS)
        one = both.ask(f"a{number}", prompt_of(2 * number, rng.randrange(40, 260)))
        other = both.ask(f"b{number}", prompt_of(2 * number + 1, rng.randrange(20, 200)))
        for _ in range(rng.randrange(12)):
            (both.source if rng.random() < 0.5 else both.sink).run_if_any()
            if rng.random() < 0.3:
                time.sleep(0.001)
        if what == "preempt":
            both.source.preempt()
        elif what == "abort at prefill":
            both.source.abort(f"a{number}")
        elif what == "abort at decode":
            both.sink.abort(f"a{number}")
        both.drive(partial(ended_all, (one[1], other[1])))
        for _, at_sink in (one, other):
            if at_sink.status == Status.FINISHED_LENGTH_CAPPED:
                assert_right(at_sink)
                continue
            assert what == "abort at decode" or policy == "fail", what
            assert at_sink is one[1] or what == "preempt"
        ended[what] += 1
    both.settle()
    for reason, count in both.sink.stats.get("requests_failed", {}).items():
        ended[reason] += int(count)
    return ended


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_what_is_broken_in_mid_growth_loses_nothing(make: Make, transport: str) -> None:
    found = histories(make, 24, seed=1, transport=transport, chunk_nbytes=4096)
    assert found["preempted"]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "zmq"])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("is_async", [False, True])
def test_two_hundred_are_broken_in_mid_growth(
    make: Make, transport: str, policy: str, is_async: bool
) -> None:
    kinds = {"policy": policy, "is_async": is_async, "transport": transport}
    found = histories(make, 200, seed=2, chunk_nbytes=4096, **kinds)
    assert found["preempted"] >= 10


# ------------------------------------------------------------------ real engines


def test_real_engines_hear_of_requests_at_once(fleet: Fleet, references: References) -> None:
    """Prompts in chunks, several at a time; prefill's pool is so small that it preempts."""
    chunks = {"max_num_batched_tokens": 64, "enable_chunked_prefill": True}
    pair = EnginePair(
        *fleet.engines(
            EngineConfig(Connector(), block_tokens=32, kv_nbytes=38 * 32 * 16384, more=chunks),
            EngineConfig(Connector(policy="recompute"), block_tokens=64),
        )
    )
    learned = pair.offered(prompt(40, seed=900))
    assert pair.decode.generate(prompt(40, seed=900), 4, learned).reason == "length"
    prompts = [*concurrent_prompts(6, seed=910), prompt(700, seed=920)]
    names = [mint_request() for _ in prompts]
    early = [early_params(learned, name) for name in names]
    offers = [{**OFFER, "kvxfer": {"request": name}} for name in names]
    # A request that only decodes grows beside them, and takes their blocks.
    busy = pair.prefill.submit(prompt(30, seed=930), 200)
    decoding = pair.decode.submit_all(prompts, 16, early)
    prefilling = pair.prefill.submit_all(prompts, 1, offers)
    answers = [pair.decode.result(each) for each in decoding]
    assert token_ids(answers) == references.tokens(prompts)
    for each in (*prefilling, busy):
        pair.prefill.result(each)
    moved = sum(each.num_cached_tokens for each in answers)
    assert moved == sum(len(each) - 1 for each in prompts), pair.prefill.metric(PREEMPTIONS)
    pair.assert_at_rest()
