"""Engines of vLLM whose caches have other types: float32 beside fp8, as its CPU backend keeps them.

vLLM's writer on a CPU rounds towards zero, kvxfer's cast to the nearest, as the writers on GPUs do.
So what an fp8 engine would have kept itself cannot be compared there; what comes back can.
"""

from __future__ import annotations

from itertools import repeat
from typing import Any

import pytest

from tests.vllm.cases import NEEDS_AVX512, Pair, Sources, prompt, token_ids
from tests.vllm.engines import Connector, EngineConfig, Fleet

pytestmark = NEEDS_AVX512

BLOCK_TOKENS = 64
# One token more than whole blocks: an engine that has loaded them computes nothing else
PROMPTS = [prompt(blocks * BLOCK_TOKENS + 1, seed=blocks) for blocks in (1, 2, 5)]
NUM_LOADED = sum(map(len, PROMPTS)) - len(PROMPTS)
ALLOWED: dict[str, Any] = {"allow_cast": True}


def config(cache_dtype: str = "auto", **extra: Any) -> EngineConfig:
    return EngineConfig(
        Connector(extra=extra),
        block_tokens=BLOCK_TOKENS,
        more={"kv_cache_dtype": cache_dtype},
    )


@pytest.mark.parametrize("cache_dtype", ["fp8", pytest.param("fp8_e5m2", marks=pytest.mark.slow)])
def test_fp8_that_was_float32_meanwhile_is_the_same(cache_dtype: str, fleet: Fleet) -> None:
    """From fp8 to float32 and back: every byte comes back, so the tokens are those of the engine
    that had it all the time.
    """
    small, wide = fleet.engines(config(cache_dtype, **ALLOWED), config(**ALLOWED))
    want = [small.generate(each) for each in PROMPTS]
    small.reset()
    before = Sources.of(wide)
    for each in PROMPTS:
        Pair(small, wide).run(each, 4)
    assert Sources.of(wide) - before == Sources(NUM_LOADED, 0, len(PROMPTS))
    back = [wide.prefill(each).params for each in PROMPTS]  # from the blocks that came
    small.reset()
    before = Sources.of(small)
    got = [small.generate(*each) for each in zip(PROMPTS, repeat(16), back, strict=False)]
    assert Sources.of(small) - before == Sources(NUM_LOADED, 0, len(PROMPTS))
    assert token_ids(got) == token_ids(want)


def test_float32_is_prefilled_for_fp8(fleet: Fleet) -> None:
    small, wide = fleet.engines(config("fp8", **ALLOWED), config(**ALLOWED))
    before = Sources.of(small)
    answers = Pair(wide, small).run_all(PROMPTS)
    assert Sources.of(small) - before == Sources(NUM_LOADED, 0, len(PROMPTS))
    assert [len(answer.token_ids) for answer in answers] == [16] * len(PROMPTS)
    Pair(wide, small).assert_at_rest()


@pytest.mark.slow
def test_without_allow_cast_on_both_sides_nothing_is_loaded(fleet: Fleet) -> None:
    small, wide = fleet.engines(config("fp8"), config(**ALLOWED))
    before = Sources.of(small)
    assert Pair(wide, small).run(PROMPTS[0]).reason == "error"
    assert (Sources.of(small) - before).external == 0
