"""One latent for all heads (DeepSeek V3), on real engines with and without tensor parallelism.

vLLM's CPU build computes it in blocks of 16 tokens, whole prompts at a time and without prefix
caching; other block sizes are in test_latent_regions.py. Its operator for rotary embeddings takes
what is a part of each head for all of it: the same token gets another value in another batch. So
these engines use PyTorch's.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.vllm.cases import PROMPT_TOKENS, Pair, Sources, concurrent_prompts, prompt, token_ids
from tests.vllm.engines import Connector, EngineConfig, Fleet

ALONE = EngineConfig(
    model="latent",
    block_tokens=16,
    more={"compilation_config": {"mode": 0, "custom_ops": ["all", "-rotary_embedding"]}},
    label="alone",
)


def side(tp_size: int) -> EngineConfig:
    return replace(ALONE, connector=Connector(policy="fail"), tp_size=tp_size, label="")


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 2), (2, 1)])
def test_latents_move_whole(fleet: Fleet, prefill_tp: int, decode_tp: int) -> None:
    """Each rank has all of them: one that nobody reads lets go, and two may read one."""
    pair = Pair(*fleet.engines(replace(side(prefill_tp), label="prefill"), side(decode_tp)))
    assert pair.decode.groups() == ["MLAAttentionSpec"]
    prompts = [prompt(num_tokens) for num_tokens in PROMPT_TOKENS]
    before = Sources.of(pair.decode)
    answers = [pair.run(each) for each in prompts]
    (alone,) = fleet.engines(ALONE)
    assert token_ids(answers) == token_ids(alone.generate_all(prompts, 16))
    moved = Sources.of(pair.decode) - before
    assert moved == Sources(sum(PROMPT_TOKENS) - len(prompts), 0, len(prompts))
    at_once = list(concurrent_prompts(16))
    assert token_ids(pair.run_all(at_once)) == token_ids(alone.generate_all(at_once, 16))
    pair.assert_at_rest()
