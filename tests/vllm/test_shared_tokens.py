"""Real engines whose ranks share the tokens of a request (decode context parallelism), to one that
has them all, back, and to one whose ranks share them otherwise. What vLLM's CPU build lacks for
that comes from tests.vllm.shared_tokens.

Latents are computed as in test_latents.py. Attention with heads also has chunks of prefill, prefix
caching and blocks of other sizes.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest

from tests.vllm.cases import PROMPT_TOKENS, Pair, Sources, concurrent_prompts, prompt, token_ids
from tests.vllm.engines import Connector, Engine, EngineConfig, EngineDied, Fleet
from tests.vllm.test_latents import ALONE as LATENTS

CHUNKS = {"max_num_batched_tokens": 96}
HEADS = EngineConfig(model="one-head", block_tokens=32, label="alone")


def shared(run: int) -> dict[str, Any]:
    """Two ranks keep runs of so many tokens in turn."""
    return {
        "decode_context_parallel_size": 2,
        "cp_kv_cache_interleave_size": run,
        "worker_extension_cls": "tests.vllm.shared_tokens.Extension",
    }


def side(alone: EngineConfig, label: str, more: dict[str, Any]) -> EngineConfig:
    connector = Connector(policy="fail", extra={"verify": "all"})
    more = alone.more | more
    tp_size = more.get("decode_context_parallel_size", 1)
    return replace(alone, connector=connector, label=label, more=more, tp_size=tp_size)


@pytest.mark.parametrize(
    ("alone", "prefill", "decode"),
    [
        pytest.param(LATENTS, shared(1), {}, id="latents-to-one"),
        pytest.param(LATENTS, {}, shared(4), id="latents-from-one"),
        pytest.param(
            LATENTS, shared(1), shared(16), id="latents-to-others", marks=pytest.mark.slow
        ),
        pytest.param(HEADS, shared(1) | CHUNKS, {"block_size": 64}, id="heads-to-one"),
        pytest.param(HEADS, {"block_size": 64} | CHUNKS, shared(16), id="heads-from-one"),
        pytest.param(
            HEADS,
            shared(32) | {"block_size": 64} | CHUNKS,
            shared(1),
            id="heads-to-others",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_tokens_of_ranks_that_share_them(
    fleet: Fleet, alone: EngineConfig, prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    sides = [side(alone, "prefill", prefill), side(alone, "decode", decode)]
    pair = Pair(*fleet.engines(*sides))
    prompts = [prompt(num_tokens) for num_tokens in PROMPT_TOKENS]
    before = Sources.of(pair.decode)
    answers = [pair.run(each) for each in prompts]
    moved = Sources.of(pair.decode) - before
    assert moved == Sources(sum(PROMPT_TOKENS) - len(prompts), 0, len(prompts))
    if alone is HEADS:
        # A second turn finds the first in both caches, in whole blocks of all ranks together; of
        # its answer the last token was not computed.
        prompts.append(prompts[-1] + tuple(answers[-1].token_ids) + prompt(150, seed=2))
        before = Sources.of(pair.decode)
        answers.append(pair.run(prompts[-1]))
        moved = Sources.of(pair.decode) - before
        assert (moved.local_hits, moved.computed) == ((PROMPT_TOKENS[-1] + 15) // 64 * 64, 1)
    at_once = list(concurrent_prompts(16))
    answers += pair.run_all(at_once)
    pair.assert_at_rest()
    (one,) = fleet.engines(alone)
    assert token_ids(answers) == token_ids(one.generate_all([*prompts, *at_once], 16))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_what_vllm_lacks_for_cpus() -> None:
    import torch
    from vllm.utils.cpu_triton_utils import _compute_slot_mapping_kernel_impl
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

    assert find_spec("triton") is None
    assert not CPUAttentionBackendImpl.can_return_lse_for_decode
    assert not CPUMLAImpl.can_return_lse_for_decode
    some = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(AssertionError, match="Context Parallelism is not supported on CPU"):
        _compute_slot_mapping_kernel_impl(1, 1, some, some, some, 1, some, 16, 2)


@pytest.mark.parametrize("dcp_size", [1, 2])
@pytest.mark.parametrize(
    ("runner", "reason"),
    [
        ("0", "Model Runner V1 does not support: prefill context parallel"),
        ("1", "Model Runner V2 requires Triton"),
    ],
)
def test_vllm_starts_no_prefill_context_parallelism_on_cpus(
    runner: str, reason: str, dcp_size: int
) -> None:
    """It says so before it makes a connector."""
    sizes = {"prefill_context_parallel_size": 2, "decode_context_parallel_size": dcp_size}
    config = replace(
        LATENTS,
        connector=Connector(role="kv_producer"),
        more=LATENTS.more | sizes,
        variables={"VLLM_USE_V2_MODEL_RUNNER": runner},
    )
    with closing(Engine(config)) as engine, pytest.raises(EngineDied, match=reason):
        engine.wait_ready()
