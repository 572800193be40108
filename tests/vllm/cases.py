"""Prompts, what one engine says to them, and pairs of engines with a client between them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from scripts.benchmarks.load_stats import less_likely
from tests.vllm.engines import Engine, EngineConfig, Finished, Fleet
from tests.vllm.models import VOCAB_SIZE

# Below, at and above a block of 32 and of 128; chunks of prefill; several blocks of any size.
PROMPT_TOKENS = (1, 31, 32, 33, 127, 128, 300, 700)
NEW_TOKENS = 16
EXTERNAL = "vllm:prompt_tokens_by_source_total{source=external_kv_transfer}"
LOCAL_HITS = "vllm:prompt_tokens_by_source_total{source=local_cache_hit}"
COMPUTED = "vllm:prompt_tokens_by_source_total{source=local_compute}"
PREEMPTIONS = "vllm:num_preemptions_total"

# With these instructions alone vLLM's CPU backend has a cache of fp8, and with those of bfloat16
# DeepSeek V4.
NEEDS_AVX512 = pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM has no such kernel without AVX-512"
)
NEEDS_AVX512_BF16 = pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="vLLM has no such kernel without AVX512_BF16"
)

Tokens = tuple[int, ...]


@cache
def prompt(num_tokens: int, seed: int = 0) -> Tokens:
    """Random tokens, none of them a special one."""
    rng = random.Random(f"{seed}/{num_tokens}")
    return tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(num_tokens))


@cache
def concurrent_prompts(num: int = 16, seed: int = 100) -> tuple[Tokens, ...]:
    """Prompts of 5 to 320 tokens."""
    rng = random.Random(seed)
    return tuple(prompt(rng.randrange(5, 320), seed + number) for number in range(num))


class References:
    """Tokens of one engine without disaggregation, computed once for each prompt."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._known: dict[tuple[str, Tokens, int], list[int]] = {}

    def tokens(
        self, prompts: Sequence[Tokens], *, model: str = "llama", max_tokens: int = NEW_TOKENS
    ) -> list[list[int]]:
        """The answer to each prompt."""
        missing = [each for each in prompts if (model, each, max_tokens) not in self._known]
        if missing:
            (engine,) = self._fleet.engines(EngineConfig(model=model))
            for each, answer in zip(missing, engine.generate_all(missing, max_tokens), strict=True):
                assert answer.reason == "length"
                self._known[model, each, max_tokens] = answer.token_ids
        return [self._known[model, each, max_tokens] for each in prompts]


@dataclass(frozen=True, slots=True)
class Sources:
    """Prompt tokens of an engine by where their KV came from (vLLM's own counters)."""

    external: int
    local_hits: int
    computed: int

    @classmethod
    def of(cls, engine: Engine) -> Sources:
        metrics = engine.metrics()
        return cls(*(int(metrics.get(name, 0)) for name in (EXTERNAL, LOCAL_HITS, COMPUTED)))

    def __sub__(self, other: Sources) -> Sources:
        return Sources(
            self.external - other.external,
            self.local_hits - other.local_hits,
            self.computed - other.computed,
        )


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill engine, a decode engine, and the router between them."""

    prefill: Engine
    decode: Engine

    def run(self, tokens: Tokens, max_tokens: int = NEW_TOKENS) -> Finished:
        """One prompt through both; without KV where prefill offers none."""
        return self.decode.generate(tokens, max_tokens, self.prefill.prefill(tokens).params)

    def offered(self, tokens: Tokens) -> dict[str, Any]:
        """Prefill; the params that go to the decode engine."""
        params = self.prefill.prefill(tokens).params
        assert params is not None
        return params

    def run_all(self, prompts: Sequence[Tokens], max_tokens: int = NEW_TOKENS) -> list[Finished]:
        """All prompts at the same time; each goes on to decode as soon as it is prefilled."""
        from tests.vllm.engines import OFFER

        prefilling = self.prefill.submit_all(prompts, 1, [OFFER] * len(prompts))
        decoding = []
        for tokens, request_id in zip(prompts, prefilling, strict=True):
            params = self.prefill.result(request_id).params
            decoding.append(self.decode.submit(tokens, max_tokens, params))
        return [self.decode.result(request_id) for request_id in decoding]

    def assert_at_rest(self, timeout_s: float = 25.0) -> None:
        """All blocks of both engines come back, before a lease of 30 s has ended."""
        for engine in (self.prefill, self.decode):
            engine.wait_for_blocks(
                lambda blocks: blocks.num_free == blocks.num_total - 1 and not blocks.num_requests,
                timeout_s,
            )  # block 0 is the null block, which nobody gets


def token_ids(answers: Sequence[Finished]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


def gaps(got: Sequence[Finished], alone: Sequence[Finished]) -> list[float]:
    """The gap of each prompt."""
    return [gap(*both) for both in zip(token_ids(got), alone, strict=True)]


def gap(tokens: list[int], own: Finished) -> float:
    """Where tokens first are not one engine's: how much less likely the token is to that engine
    than its own.
    """
    assert len(tokens) == len(own.token_ids)
    likely = [{int(token): each for token, each in step.items()} for step in own.logprobs]
    return less_likely(tokens, own.token_ids, likely)


def assert_as_alone(got: Sequence[Finished], own: Sequence[Finished], tie: float) -> None:
    """The same tokens, but for those that are nearly as likely."""
    found = gaps(got, own)
    assert max(found) <= tie, found
    assert found.count(0) >= len(found) // 3, found
    # The comparison can fail: other prompts' answers are told apart.
    others = gaps(got, [*own[1:], own[0]])
    assert len(own) == 1 or sum(gap > tie for gap in others) > 0.8 * len(got), others
