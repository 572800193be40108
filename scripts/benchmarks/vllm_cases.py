"""What is measured on a pair of vLLM engines, and what must be equal: one record for each case."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.benchmarks.vllm_pairs import EnginePair
from tests.vllm.cases import EXTERNAL
from tests.vllm.engines import OFFER

NEW_TOKENS = 16
_LOCAL_TOKENS = 4
_SHUFFLE_SEED = 11
POOLS = ("fresh", "fragmented")
"""Free blocks in the order of their ids, so that a request's are neighbours; and shuffled."""
_FIRST_TOKEN_ID = 3


class OutOfTime(RuntimeError):
    """The time of the whole run is used up."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """When the run has to end, by time.monotonic()."""

    ends_s: float

    @classmethod
    def after(cls, limit_s: float) -> Deadline:
        """So many seconds from now."""
        return cls(time.monotonic() + limit_s)

    def check(self, what: str) -> None:
        """Raises OutOfTime, naming what is left out."""
        if time.monotonic() > self.ends_s:
            raise OutOfTime(f"no time left for {what}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One or several requests at once, from the offers of prefill to decode's tokens. Seconds.

    Attributes:
        is_first: the pair had transferred nothing before.
        loads_s: from the call that hands a load to the connector to the call that reports it.
        first_token_s: decode's time to first token of each request, from its submission.
        step_s: mean time between the tokens of one of them.
        local_s: time to first token of the same prompt when decode has its KV; 0: not measured.
        own: what the connector counts of these loads itself, milliseconds where it says ms.
    """

    connector: str
    pool: str
    tokens: int
    together: int
    is_first: bool
    loads_s: tuple[float, ...]
    first_token_s: tuple[float, ...]
    step_s: float
    local_s: float
    own: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Equality:
    """One prompt through both engines, compared.

    Attributes:
        kv_equal: checksums of K and V, all layers, of prefill's blocks and of decode's; None where
            the two sides' blocks cannot be compared as they are (CPU backends that differ).
        loaded_tokens: that decode did not compute.
        equal_to_decode: leading tokens that the decode engine gives for the prompt on its own, with
            the prompt's KV found in its prefix cache so that its steps have the same shapes.
        equal_to_prefill: the same of the prefill engine.
        equal_to_cold: the same of the decode engine without anything cached.
        distinct: different tokens among those that decode gave.
    """

    connector: str
    setups: str
    tokens: int
    kv_equal: bool | None
    loaded_tokens: int
    new_tokens: int
    equal_to_decode: int
    equal_to_prefill: int
    equal_to_cold: int
    distinct: int

    def problem(self, is_like: bool) -> str | None:
        """Why this is not as it must be. Engines set up alike give equal tokens. Unlike ones use
        attention kernels of other shapes, whose rounding may turn a near tie: their KV must be
        equal, and the first token.
        """
        if self.kv_equal is False:
            return "the KV differs"
        if self.loaded_tokens < self.tokens:
            return f"{self.loaded_tokens} of {self.tokens} tokens were loaded"
        best = max(self.equal_to_decode, self.equal_to_prefill)
        if best < (self.new_tokens if is_like else 1):
            return f"tokens are equal up to number {best}"
        return None


def prompt(num_tokens: int, seed: int, vocab_size: int) -> list[int]:
    """Random tokens; no two prompts share a first block."""
    rng = random.Random(f"{seed}/{num_tokens}")
    return [rng.randrange(_FIRST_TOKEN_ID, vocab_size) for _ in range(num_tokens)]


@dataclass
class Cases:
    """The cases of one pair, in order; every prompt is new."""

    pair: EnginePair
    connector: str
    deadline: Deadline
    seed: int = 0

    def _prompts(self, num_tokens: int, together: int = 1) -> list[list[int]]:
        self.seed += together
        vocab_size = self.pair.geometry.vocab_size
        return [prompt(num_tokens + 1, self.seed - i, vocab_size) for i in range(together)]

    def warm_up(self) -> None:
        """Requests without transfer, so that kernels are loaded and chosen."""
        for num_tokens in self.pair.geometry.lengths:
            self.pair.prefill.generate(self._prompts(num_tokens)[0], 1)
        for num_tokens in self.pair.geometry.lengths[:2]:
            self.pair.decode.generate(self._prompts(num_tokens)[0], NEW_TOKENS)
        for engine in self.pair.engines:
            engine.call("take_times")

    def measured(self) -> Iterator[Sample]:
        """Every length, alone and together, on both pools; the first transfer of the pair first."""
        geometry = self.pair.geometry
        longest_of_many = geometry.lengths[min(2, len(geometry.lengths) - 1)]
        yield self._sample("fresh", longest_of_many, 1, is_first=True)
        for pool in POOLS:
            for num_tokens, repeats in zip(geometry.lengths, geometry.repeats, strict=True):
                self.deadline.check(f"{self.connector}, {pool} pool, {num_tokens} tokens")
                self._order_blocks(pool)
                for _ in range(repeats):
                    yield self._sample(pool, num_tokens, 1)
                self._order_blocks(pool)
                yield self._sample(pool, num_tokens, geometry.together)

    def _order_blocks(self, pool: str) -> None:
        for side, engine in enumerate(self.pair.engines):
            engine.order_blocks(None if pool == "fresh" else _SHUFFLE_SEED + side)

    def _sample(
        self, pool: str, num_tokens: int, together: int, *, is_first: bool = False
    ) -> Sample:
        decode = self.pair.decode
        prompts = self._prompts(num_tokens, together)
        params = self.pair.offered(prompts)
        decode.call("take_times")
        answers = decode.generate_all(prompts, NEW_TOKENS, params)
        times = decode.call("take_times")
        reasons = {answer.reason for answer in answers}
        if len(times["loads_s"]) != together or reasons != {"length"}:
            raise RuntimeError(
                f"{self.connector}, {num_tokens} tokens: expected {together} loads and tokens to "
                f"the end, got {len(times['loads_s'])} loads and ends by {reasons}"
            )
        local_s = 0.0
        if together == 1 and not is_first:
            local_s = decode.generate(prompts[0], _LOCAL_TOKENS).first_token_s
        spans_s = [answer.total_s - answer.first_token_s for answer in answers]
        return Sample(
            connector=self.connector,
            pool=pool,
            tokens=num_tokens,
            together=together,
            is_first=is_first,
            loads_s=tuple(times["loads_s"]),
            first_token_s=tuple(answer.first_token_s for answer in answers),
            step_s=max(spans_s) / (NEW_TOKENS - 1),
            local_s=local_s,
            own=own_numbers(self.connector, times["stats"]),
        )

    def equalities(self, lengths: Iterable[int]) -> Iterator[Equality]:
        """Prompts of these lengths, compared in KV and tokens."""
        for num_tokens in lengths:
            self.deadline.check(f"{self.connector}, equality of {num_tokens} tokens")
            self._order_blocks("fragmented")
            yield self._equality(num_tokens)

    def _equality(self, num_tokens: int) -> Equality:
        pair = self.pair
        (tokens,) = self._prompts(num_tokens)
        cold = pair.decode.generate(tokens, NEW_TOKENS).token_ids
        alone = pair.decode.generate(tokens, NEW_TOKENS).token_ids
        self._order_blocks("fragmented")
        offered, of_prefill = pair.prefill.checked(tokens, num_tokens, 1, OFFER)
        before = pair.decode.metric(EXTERNAL)
        answer, of_decode = pair.decode.checked(tokens, num_tokens, NEW_TOKENS, offered.params)
        loaded_tokens = pair.decode.metric(EXTERNAL) - before
        by_prefill = pair.prefill.generate(tokens, NEW_TOKENS).token_ids
        is_comparable = pair.is_like or bool(pair.geometry.config)
        return Equality(
            connector=self.connector,
            setups=" to ".join(setup.text for setup in pair.setups),
            tokens=num_tokens,
            kv_equal=of_prefill == of_decode if is_comparable else None,
            loaded_tokens=int(loaded_tokens),
            new_tokens=NEW_TOKENS,
            equal_to_decode=leading(answer.token_ids, alone),
            equal_to_prefill=leading(answer.token_ids, by_prefill),
            equal_to_cold=leading(answer.token_ids, cold),
            distinct=len(set(answer.token_ids)),
        )


def leading(tokens: Sequence[int], others: Sequence[int]) -> int:
    """How many are equal before the first that is not."""
    pairs = zip(tokens, others, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(others)))


def own_numbers(connector: str, stats: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """A connector's own counts of the loads of one case, as means of one load."""
    steps = list(stats)
    return _OWN[connector](steps)


def _of_kvxfer(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    num_loads = sum(sum(step.get("times.total", {}).values()) for step in steps)
    if not num_loads:
        return {}
    mean_s = {
        phase: sum(step.get("seconds", {}).get(phase, 0.0) for step in steps) / num_loads
        for phase in ("queue", "read", "verdict", "pickup")
    }
    accepted_s = mean_s["queue"] + mean_s["read"] + mean_s["verdict"]
    nbytes = sum(step.get("counts", {}).get("loads.nbytes", 0) for step in steps)
    return {
        "accepted_ms": 1e3 * accepted_s,
        **{f"{phase}_ms": 1e3 * seconds for phase, seconds in mean_s.items()},
        "MB": nbytes / num_loads / 1e6,
        "loads": num_loads,
    }


def _of_nixl(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    lists: dict[str, list[float]] = {}
    for step in steps:
        for name, values in step.items():
            lists.setdefault(name, []).extend(values)
    num_loads = len(lists.get("transfer_duration", ()))
    if not num_loads:
        return {}

    def mean(name: str) -> float:
        return sum(lists[name]) / num_loads

    return {
        "transfer_ms": 1e3 * mean("transfer_duration"),
        "post_ms": 1e3 * mean("post_duration"),
        "descriptors": mean("num_descriptors"),
        "MB": mean("bytes_transferred") / 1e6,
        "loads": num_loads,
    }


_OWN: dict[str, Callable[[Sequence[Mapping[str, Any]]], dict[str, float]]] = {
    "kvxfer": _of_kvxfer,
    "nixl": _of_nixl,
}
