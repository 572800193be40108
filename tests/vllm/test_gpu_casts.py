"""Engines of vLLM on a GPU whose caches have other types: bfloat16 beside each fp8 that is cast.

Writers on a GPU round to the nearest, as kvxfer's cast does, and the KV of a model's first layer
does not depend on attention. So the engine of one layer whose KV was cast has the KV that it would
have kept itself, and gives the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from scripts.benchmarks.load_stats import NEAR
from tests.vllm.cases import (
    Pair,
    Sources,
    Tokens,
    assert_as_alone,
    concurrent_prompts,
    gaps,
    prompt,
)
from tests.vllm.engines import Connector, Engine
from tests.vllm.gpu_models import (
    NEW_TOKENS,
    ON_GPU,
    GpuConfig,
    alone,
    skip_if_refused,
    warm_engines,
)

pytestmark = list(ON_GPU)

TIE = NEAR["bfloat16"]
PROMPTS = [prompt(num_tokens) for num_tokens in (3, 32, 33, 65, 300, 1100)]


@dataclass(frozen=True, slots=True)
class Cast:
    """A type of decode's cache. ``is_exact``: what was cast to bfloat16 and back is the same."""

    cache_dtype: str
    is_exact: bool = True

    def config(self, side: str) -> GpuConfig:
        own: dict[str, Any] = {"block_size": 32, "max_num_batched_tokens": 192}
        if side == "decode":
            own = {"block_size": 64, "kv_cache_dtype": self.cache_dtype}
        connector = Connector(policy="fail", extra={"allow_cast": True})
        more = {"dtype": "bfloat16"} | own
        return GpuConfig(connector, model="llama-layer", label=side, more=more)


CASTS = {
    "e4m3": Cast("fp8"),
    # A scale is the largest of a head's elements, which bfloat16 has rounded meanwhile
    "e4m3-scales-of-tokens": Cast("fp8_per_token_head", is_exact=False),
}


@pytest.fixture(scope="module", params=CASTS)
def cast(request: pytest.FixtureRequest) -> Cast:
    found = CASTS[request.param]
    skip_if_refused({"kv_cache_dtype": found.cache_dtype})
    return found


@pytest.fixture(scope="module")
def engines(cast: Cast) -> Iterator[tuple[Engine, Engine]]:
    """The one that keeps bfloat16, and the one that keeps fp8."""
    sides = [cast.config(side) for side in ("prefill", "decode")]
    with warm_engines(*sides) as (wide, small):
        yield wide, small


def num_loaded(prompts: list[Tokens]) -> Sources:
    return Sources(sum(map(len, prompts)) - len(prompts), 0, len(prompts))


def test_bfloat16_is_prefilled_for_fp8(engines: tuple[Engine, Engine]) -> None:
    wide, small = engines
    own = alone(small, PROMPTS)
    before = Sources.of(small)
    got = [Pair(wide, small).run(each, NEW_TOKENS) for each in PROMPTS]
    assert Sources.of(small) - before == num_loaded(PROMPTS)
    assert_as_alone(got, own, TIE)
    Pair(wide, small).assert_at_rest()


def test_sixteen_at_once(engines: tuple[Engine, Engine]) -> None:
    wide, small = engines
    prompts = list(concurrent_prompts(16))
    own = alone(small, prompts)
    before = Sources.of(small)
    got = Pair(wide, small).run_all(prompts, NEW_TOKENS)
    assert Sources.of(small) - before == num_loaded(prompts)
    assert_as_alone(got, own, TIE)
    Pair(wide, small).assert_at_rest()


def test_fp8_that_was_bfloat16_meanwhile(cast: Cast, engines: tuple[Engine, Engine]) -> None:
    """Prefilled as fp8, loaded as bfloat16, and loaded again as fp8: no byte has changed, where a
    scale is not chosen anew.
    """
    wide, small = engines
    prompts = [prompt(64 * blocks + 1, seed=blocks) for blocks in (1, 2, 5)]
    wide.reset()
    want = alone(small, prompts)
    before = Sources.of(wide)
    for each in prompts:
        Pair(small, wide).run(each, 4)
    assert Sources.of(wide) - before == num_loaded(prompts)
    back = [wide.prefill(each).params for each in prompts]  # from the blocks that came
    small.reset()
    before = Sources.of(small)
    got = [
        small.generate(each, NEW_TOKENS, params) for each, params in zip(prompts, back, strict=True)
    ]
    assert Sources.of(small) - before == num_loaded(prompts)
    if cast.is_exact:
        assert_as_alone(got, want, TIE)
    else:
        assert [len(answer.token_ids) for answer in got] == [NEW_TOKENS] * len(prompts)
        assert max(gaps(got, want)) <= 4 * TIE
