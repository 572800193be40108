"""Models that keep a state, with speculative decoding: several states of a request, of which one
counts. Real engines.

Granite 4 with an EAGLE head and with ngram runs in float32, where vLLM's CPU build gets what it
lacks from tests.vllm.rejected_tokens. Qwen3-Next with its module for multi-token prediction runs as
it is, in bfloat16 alone, and with drafts of one length: of another the CPU build keeps the wrong
inputs of the convolution by itself.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from scripts.benchmarks.load_stats import NEAR
from tests.vllm import models
from tests.vllm.cases import (
    PROMPT_TOKENS,
    Pair,
    Sources,
    Tokens,
    concurrent_prompts,
    gap,
    prompt,
    token_ids,
)
from tests.vllm.engines import ROOT, Connector, EngineConfig, Fleet
from tests.vllm.interpreted import HAS_TRITON, TRITON_FOLDER
from tests.vllm.test_drafts import (
    NEW_TOKENS,
    Drafting,
    Guessed,
    assert_all_is_equal,
    drafting,
    speculative,
)

EAGLE = speculative("eagle", model=str(models.make("state-eagle")))
NGRAM = speculative("ngram", 2, prompt_lookup_max=2, prompt_lookup_min=1)
MTP = speculative("mtp", 2)
PATCHED = {"worker_extension_cls": "tests.vllm.rejected_tokens.Extension"}
NO_CACHE = {"enable_prefix_caching": False}


def side(
    draft: dict[str, Any], *, tp_size: int = 1, block_tokens: int = 128, **more: Any
) -> EngineConfig:
    """Without prefix caching, unless ``more`` says so: a state is in the first of its blocks."""
    return EngineConfig(
        Connector(policy="fail"),
        model="drafted-state",
        tp_size=tp_size,
        block_tokens=block_tokens,
        more=NO_CACHE | PATCHED | draft | more,
    )


ALIGNED = {"enable_prefix_caching": True}
"""A state in each block, the last one followed by those that may be rejected."""


@pytest.mark.slow
def test_as_much_is_accepted_as_in_one_engine(fleet: Fleet) -> None:
    """What the head keeps of the last token that prefill computes was made with the token after it,
    which only decode computes.
    """
    config = side(EAGLE, max_num_batched_tokens=4096)
    assert_all_is_equal(drafting(fleet, config, config), is_chunked=False)


def assert_tokens_are_equal(
    engines: Drafting, prompts: list[Tokens], num_new_tokens: int = 32
) -> Guessed:
    """Tokens and where they came from; what decode's draft has guessed."""
    pair = engines.pair
    before, guessed = Sources.of(pair.decode), Guessed.of(pair.decode)
    answers = [pair.run(each, num_new_tokens) for each in prompts]
    guessed = Guessed.of(pair.decode) - guessed
    alone = [engines.alone.generate(each, num_new_tokens) for each in prompts]
    assert token_ids(answers) == token_ids(alone)
    moved = Sources.of(pair.decode) - before
    assert moved == Sources(sum(map(len, prompts)) - len(prompts), 0, len(prompts))
    return guessed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        pytest.param(side(EAGLE), side({}), id="at-prefill-alone"),
        pytest.param(side({}, max_num_batched_tokens=64), side(EAGLE), id="at-decode-alone"),
        pytest.param(side(NGRAM), side(NGRAM), id="ngram"),
        pytest.param(side({}), side(NGRAM), id="ngram-at-decode"),
        pytest.param(side(EAGLE), side(NGRAM), id="eagle-to-ngram"),
        pytest.param(side(EAGLE, tp_size=2), side(EAGLE, block_tokens=256), id="tp2-to-tp1"),
        pytest.param(side(EAGLE), side(EAGLE, tp_size=2), id="tp1-to-tp2"),
        pytest.param(side(EAGLE), side(EAGLE, **ALIGNED), id="none-to-align"),
    ],
)
def test_either_side_may_speculate(
    fleet: Fleet, prefill: EngineConfig, decode: EngineConfig
) -> None:
    """Tokens of one engine that does not; as many guesses are accepted where both have the head."""
    pair = Pair(*fleet.engines(replace(prefill, label="prefill"), decode))
    (alone,) = fleet.engines(replace(side({}), connector=None, label="alone"))
    engines = Drafting(pair, alone)
    is_eagle = EAGLE.items() <= decode.more.items()
    prompts = [prompt(num_tokens) for num_tokens in PROMPT_TOKENS[1 if is_eagle else 4 :]]
    guessed = assert_tokens_are_equal(engines, prompts, 32 if is_eagle else 8)
    assert bool(guessed.num_drafts) == ("speculative_config" in decode.more)
    if is_eagle:
        has_head = EAGLE.items() <= prefill.more.items()
        assert (guessed.acceptance_length > 1.8) == has_head
    at_once = list(concurrent_prompts(16))
    expected = token_ids(alone.generate_all(at_once, 8))
    assert token_ids(pair.run_all(at_once, 8)) == expected
    pair.assert_at_rest()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draft", "hits"),
    [
        pytest.param(NGRAM, {257: 256, 385: 384}, id="ngram"),
        # With a head vLLM looks for a state one block before the last, where no load ended.
        pytest.param(EAGLE, {}, id="eagle"),
    ],
)
def test_a_prefix_that_decode_has(
    fleet: Fleet, draft: dict[str, Any], hits: dict[int, int]
) -> None:
    """With the state after it, where a load ended at the end of a block. Decode then goes on from
    block to block; prefill computes in chunks.
    """
    chunked = replace(side(draft, max_num_batched_tokens=64), label="prefill")
    pair = Pair(*fleet.engines(chunked, side(draft, **ALIGNED)))
    (alone,) = fleet.engines(replace(side({}), connector=None, label="alone"))
    for num_tokens in (255, 256, 257, 385):
        first = prompt(num_tokens, seed=num_tokens)
        answer = pair.run(first, 140)
        assert answer.token_ids == alone.generate(first, 140).token_ids
        before = Sources.of(pair.decode)
        second = first + tuple(answer.token_ids) + prompt(200, seed=1)
        assert pair.run(second).token_ids == alone.generate(second).token_ids
        hit = hits.get(num_tokens, 0)
        moved = Sources.of(pair.decode) - before
        assert moved == Sources(len(second) - hit - 1, hit, 1)
    pair.assert_at_rest()


@pytest.mark.slow
def test_prefill_with_a_prefix_cache(fleet: Fleet) -> None:
    """Whose last step is computed in the blocks that follow the cached ones."""
    both = side(EAGLE, **ALIGNED)
    pair = Pair(*fleet.engines(replace(both, label="prefill"), both))
    (alone,) = fleet.engines(replace(side({}), connector=None, label="alone"))
    engines = Drafting(pair, alone)
    assert_tokens_are_equal(engines, [prompt(num_tokens) for num_tokens in (3, 100, 128)])
    for short in (prompt(1), prompt(2)):
        assert pair.prefill.prefill(short).params is None
        assert pair.run(short).token_ids == alone.generate(short).token_ids
    pair.assert_at_rest()


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_prefill_answers_with_the_token_that_it_dropped() -> None:
    """Where there is a draft to use it, and nothing else says what the answer may be."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.request import Request

    from kvxfer.integrations.vllm.views import drop_last_token

    def dropped(sampling: SamplingParams, *, has_draft: bool = True) -> Request:
        request = Request("r", [5, 6, 7], sampling, None)
        drop_last_token(request, has_draft=has_draft)
        assert (request.prompt_token_ids, list(request.all_token_ids)) == ([5, 6], [5, 6])
        assert (request.num_prompt_tokens, request.max_tokens) == (2, 1)
        return request

    asked = SamplingParams(temperature=0.7, min_tokens=3, max_tokens=9, logprobs=2)
    given = dropped(asked).sampling_params
    assert given is not None
    assert (given.allowed_token_ids, given.temperature, given.min_tokens) == ([7], 0, 0)
    assert given.logprobs == 2
    assert (asked.allowed_token_ids, asked.temperature, asked.min_tokens) == (None, 0.7, 3)
    assert dropped(asked, has_draft=False).sampling_params is asked
    bound = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
    assert dropped(bound).sampling_params is bound


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_what_vllm_lacks_for_cpus() -> None:
    """Two requests with one token each, of which one was accepted before."""
    from vllm.model_executor.layers.mamba.ops.cpu.mamba_ssm import selective_state_update

    from tests.vllm.rejected_tokens import recurrence

    found = []
    for update in (selective_state_update, recurrence):
        torch.manual_seed(0)
        state, x, B, C = torch.rand(9, 2, 4, 8), torch.rand(2, 2, 4), *torch.rand(2, 2, 1, 8)
        dt, D = torch.rand(2, 2, 1).expand(2, 2, 4), torch.rand(2, 1).expand(2, 4)
        A = -torch.rand(2, 1, 1).expand(2, 4, 8)
        blocks, out = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32), torch.empty_like(x)
        update(
            *(state, x, dt, A, B, C),
            D=D,
            dt_bias=D,
            dt_softplus=True,
            state_batch_indices=blocks,
            dst_state_batch_indices=blocks,
            out=out,
            num_accepted_tokens=torch.ones(2, dtype=torch.int32),
            cu_seqlens=torch.arange(3, dtype=torch.int32),
        )
        found.append(out)
    assert torch.allclose(found[0][0], found[1][0], atol=1e-5)
    assert not torch.allclose(found[0][1], found[1][1], atol=0.01)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason=f"no Triton in {TRITON_FOLDER}")
def test_what_is_put_in_does_as_vllms_kernels() -> None:
    """Those for GPUs, in Triton's interpreter. They look at the first steps of a convolution."""
    subprocess.run([sys.executable, "-m", "tests.vllm.state_kernels"], cwd=ROOT, check=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefill", "decode"), [(MTP, MTP), ({}, MTP), (MTP, {})], ids=["both", "decode", "prefill"]
)
def test_multi_token_prediction_of_a_gated_delta_net(
    fleet: Fleet, prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    """One request at a time, for batches of other shapes round otherwise in bfloat16. So does the
    last token of a prompt where it is computed alone, on some CPUs: where tokens part, both are
    nearly as likely.
    """

    def config(draft: dict[str, Any]) -> EngineConfig:
        more = NO_CACHE | {"dtype": "bfloat16"} | draft
        connector = Connector(policy="fail")
        return EngineConfig(connector, model="delta-net-mtp", block_tokens=128, more=more)

    engines = drafting(fleet, config(prefill), config(decode))
    before = Sources.of(engines.pair.decode)
    prompts = [prompt(num_tokens) for num_tokens in (5, 64, 127, 130, 700)]
    answers, guessed = engines.moved(prompts)
    expected, guessed_alone = engines.expected(prompts)
    ids = [engines.alone.submit(each, NEW_TOKENS, logprobs=20) for each in prompts]
    own = [engines.alone.result(each) for each in ids]
    found = [gap(*both) for both in zip(answers, own, strict=True)]
    assert max(found) <= NEAR["bfloat16"], found
    assert found.count(0) >= 3, found
    # Other prompts' answers are told apart.
    assert min(map(gap, answers, [*own[1:], own[0]])) > NEAR["bfloat16"]
    moved = Sources.of(engines.pair.decode) - before
    assert moved == Sources(5 + 64 + 127 + 130 + 700 - 5, 0, 5)
    if prefill == decode:
        assert guessed == guessed_alone or answers != expected
        assert guessed.acceptance_length > 2
    engines.pair.assert_at_rest()
