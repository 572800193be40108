"""Models of which vLLM has kernels for GPUs alone, on two real engines that share one GPU: those
that keep a state beside attention or latents, DeepSeek's latents with and without an indexer, fp8
with a scale for each token, and, on two GPUs, latents whose tokens two ranks share and states of
which each rank has a part.

Prefill computes in chunks, and its blocks have another size than decode's. In float32 where the
kernels have it. In bfloat16 a decode step rounds otherwise than a step of prefill, so that a token
may be another one where two are nearly as likely: one engine's own probabilities say where.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from scripts.benchmarks.load_stats import NEAR
from tests.vllm.cases import Pair, Sources, assert_as_alone, concurrent_prompts, prompt
from tests.vllm.engines import OFFER, Connector
from tests.vllm.gpu_models import (
    FIRST_TIMEOUT_S,
    NEW_TOKENS,
    ON_GPU,
    GpuConfig,
    alone,
    skip_if_refused,
    warm_engines,
)

pytestmark = list(ON_GPU)

PROMPT_TOKENS = (3, 5, 63, 64, 130, 300, 1100)
TOLD_AS = {"UniformTypeKVCacheSpecs": "MLAAttentionSpec"}
"""Of a group of unlike specs vLLM 0.26 tells the scheduler the first one, 0.32 all."""
NO_CACHE = {"enable_prefix_caching": False}
PRECISE, ROUNDED = ({"dtype": dtype} for dtype in NEAR)
DELTA_NET = ROUNDED | {"gdn_prefill_backend": "triton"}
CHUNKS = {"max_num_batched_tokens": 192}
EACH_BLOCK = {"block_size": 256, "mamba_cache_mode": "all"}
"""A state at the end of each block, and of each step."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model, and arguments of both engines, of prefill's and of decode's."""

    model: str
    groups: set[str]
    both: dict[str, Any]
    prefill: dict[str, Any]
    decode: dict[str, Any]

    @property
    def tie(self) -> float:
        return NEAR[self.both["dtype"]]

    def config(self, side: str) -> GpuConfig:
        more = self.both | (self.prefill if side == "prefill" else self.decode)
        connector = Connector(policy="fail", extra={"verify": "all"})
        return GpuConfig(connector, model=self.model, label=side, more=more)


def state(model: str, numbers: dict[str, Any], attention: str = "FullAttentionSpec") -> Case:
    """One state of a request at prefill, one in each block at decode."""
    prefill = {"block_size": 128} | CHUNKS | NO_CACHE
    return Case(model, {"MambaSpec", attention}, numbers, prefill, {"block_size": 256})


def latent(model: str, groups: str, **both: str) -> Case:
    return Case(model, {groups}, ROUNDED | both, {"block_size": 64} | CHUNKS, {"block_size": 128})


MAMBA2 = state("granite", PRECISE)
# Of which each rank reads its part of the weights
PARTED, PARTED_GROUPS = (state(name, PRECISE) for name in ("state", "grouped-state"))
PARTED_NET = state("even-delta-net", DELTA_NET)
WHOLE = latent("deep-latent", "MLAAttentionSpec")
SPLIT = {"tensor_parallel_size": 2}
SHARED = SPLIT | {"decode_context_parallel_size": 2}
CASES = {
    "mamba1": state("jamba", PRECISE),
    "mamba2": MAMBA2,
    "mamba2-cached": replace(
        MAMBA2, prefill={"block_size": 256}, decode={"block_size": 128} | NO_CACHE
    ),
    "each-block-to-each-block": replace(MAMBA2, prefill=EACH_BLOCK, decode=EACH_BLOCK),
    "each-block-to-one": replace(
        MAMBA2, prefill=EACH_BLOCK | CHUNKS, decode={"block_size": 128} | NO_CACHE
    ),
    "one-to-each-block": replace(MAMBA2, decode=EACH_BLOCK),
    "mamba2-in-groups": state("nemotron-h", PRECISE),
    "gated-delta-net": state("qwen3-next", DELTA_NET),
    "gated-delta-net-dense": state("qwen3.5", DELTA_NET),
    "kimi-delta-attention": state("kimi-linear", ROUNDED, "MLAAttentionSpec"),
    "parted-mamba2-to-whole": replace(PARTED, prefill=PARTED.prefill | SPLIT),
    "whole-mamba2-to-parted": replace(PARTED, decode=PARTED.decode | SPLIT),
    "parted-groups-to-whole": replace(PARTED_GROUPS, prefill=PARTED_GROUPS.prefill | SPLIT),
    "whole-delta-net-to-parted": replace(PARTED_NET, decode=PARTED_NET.decode | SPLIT),
    "linear-attention": state("ling", ROUNDED, "MLAAttentionSpec"),
    "latents": latent("deepseek-v3", "MLAAttentionSpec"),
    "sparse-latents": latent("deepseek-v3.2", "UniformTypeKVCacheSpecs"),
    "scales-of-tokens": Case(
        "llama",
        {"FullAttentionSpec"},
        ROUNDED | {"kv_cache_dtype": "fp8_per_token_head"},
        {"block_size": 32} | CHUNKS,
        {"block_size": 64},
    ),
    "packed-latents": latent("deepseek-v3.2", "UniformTypeKVCacheSpecs", kv_cache_dtype="fp8"),
    "shared-to-whole": replace(WHOLE, prefill=WHOLE.prefill | SHARED),
    "whole-to-shared": replace(WHOLE, decode=WHOLE.decode | SHARED),
    "shared-to-shared": replace(
        WHOLE, prefill=WHOLE.prefill | SHARED, decode=WHOLE.decode | SHARED
    ),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    found = CASES[request.param]
    if "tensor_parallel_size" in found.prefill | found.decode and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    skip_if_refused(found.both, found.prefill, found.decode)
    return found


@pytest.fixture(scope="module")
def pair(case: Case) -> Iterator[Pair]:
    sides = [case.config(side) for side in ("prefill", "decode")]
    with warm_engines(*sides) as engines:
        yield Pair(*engines)


def test_prompts_of_all_lengths(case: Case, pair: Pair) -> None:
    told = {TOLD_AS.get(group, group) for group in case.groups}
    assert set(pair.decode.groups()) in (case.groups, told)
    prompts = [prompt(num_tokens) for num_tokens in PROMPT_TOKENS]
    own = [alone(pair.decode, [each])[0] for each in prompts]
    before = Sources.of(pair.decode)
    assert_as_alone([pair.run(each, NEW_TOKENS) for each in prompts], own, case.tie)
    moved = Sources.of(pair.decode) - before
    assert moved == Sources(sum(PROMPT_TOKENS) - len(prompts), 0, len(prompts))
    pair.assert_at_rest()


def test_sixteen_at_once(case: Case, pair: Pair) -> None:
    prompts = list(concurrent_prompts(16))
    own = alone(pair.decode, prompts)
    before = Sources.of(pair.decode)
    assert_as_alone(pair.run_all(prompts, NEW_TOKENS), own, case.tie)
    moved = Sources.of(pair.decode) - before
    assert moved == Sources(sum(map(len, prompts)) - len(prompts), 0, len(prompts))
    pair.assert_at_rest()


def test_a_prefix_that_ends_before_what_was_loaded(case: Case, pair: Pair) -> None:
    """Of a state only the one after all tokens was loaded; none may be found after fewer."""
    block_tokens = int(case.decode["block_size"])
    first = prompt(2 * block_tokens + 70, seed=9)
    second = first[: block_tokens + 20] + prompt(50, seed=10)
    (own,) = alone(pair.decode, [second])
    pair.run(first, NEW_TOKENS)
    assert_as_alone([pair.decode.generate(second, NEW_TOKENS)], [own], case.tie)
    pair.assert_at_rest()


def test_a_prefix_that_decode_has(case: Case, pair: Pair) -> None:
    """A state is cached where a step or a load ended at the end of a block: here at one."""
    num_tokens = 2 * int(case.decode["block_size"]) + 1
    first = prompt(num_tokens, seed=7)
    second = first + prompt(200, seed=8)
    (own,) = alone(pair.decode, [second])
    pair.run(first, NEW_TOKENS)
    before = Sources.of(pair.decode)
    params = pair.prefill.result(pair.prefill.submit(second, 1, OFFER), FIRST_TIMEOUT_S).params
    assert_as_alone([pair.decode.generate(second, NEW_TOKENS, params)], [own], case.tie)
    hit = num_tokens - 1 if case.decode.get("enable_prefix_caching", True) else 0
    moved = Sources.of(pair.decode) - before
    assert moved == Sources(len(second) - hit - 1, hit, 1)
    pair.assert_at_rest()
