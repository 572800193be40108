"""The decoder against transformers' LlamaForCausalLM on the same weights, through our loader."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvxfer.engine.attention import attention_backend, paged_layers
from kvxfer.engine.digest import compare, kv_digests
from kvxfer.engine.model import LlamaModel
from kvxfer.engine.model_config import load_model_config, shard_for
from kvxfer.engine.weights import load_weights
from tests.engine.model_rig import (
    CHUNKED,
    ONE_GO,
    SIZES,
    Ranks,
    Reference,
    assert_logits,
    greedy,
    run_chunks,
    saved,
)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def make_reference(folder: Path, *, num_kv_heads: int, tied: bool, llama3: bool) -> Reference:
    rope: dict[str, Any] = LLAMA3_ROPE if llama3 else {"rope_type": "default", "rope_theta": 5e3}
    config = LlamaConfig(
        **SIZES, num_key_value_heads=num_kv_heads, tie_word_embeddings=tied, rope_parameters=rope
    )
    torch.manual_seed(11)
    return saved(folder, LlamaForCausalLM(config))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Reference]:
    """Models by their facts, each made once."""
    made: dict[tuple[int, bool, bool], Reference] = {}

    def get(num_kv_heads: int = 2, *, tied: bool = False, llama3: bool = False) -> Reference:
        key = (num_kv_heads, tied, llama3)
        if key not in made:
            folder = tmp_path_factory.mktemp("model")
            made[key] = make_reference(folder, num_kv_heads=num_kv_heads, tied=tied, llama3=llama3)
        return made[key]

    return get


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize(
    "chunks", [ONE_GO, CHUNKED, (40, *[1] * 30)], ids=["one", "chunks", "decode"]
)
@pytest.mark.parametrize("block_tokens", [16, 24])
def test_logits_equal_transformers(
    reference: Callable[..., Reference], layout: str, chunks: tuple[int, ...], block_tokens: int
) -> None:
    ref = reference()
    ranks = Ranks(load_model_config(ref.folder), 1, layout, block_tokens)
    assert_logits(run_chunks(ranks, ref.prompt, chunks), ref.logits)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_any_tp_size_and_head_count(
    reference: Callable[..., Reference], num_kv_heads: int, tp_size: int
) -> None:
    """Also more ranks than KV heads, where a head is stored by several ranks."""
    ref = reference(num_kv_heads)
    ranks = Ranks(load_model_config(ref.folder), tp_size, "NHD", 32)
    assert_logits(run_chunks(ranks, ref.prompt, CHUNKED), ref.logits)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("llama3", [False, True])
def test_tied_embeddings_and_rope_scaling(
    reference: Callable[..., Reference], tied: bool, llama3: bool
) -> None:
    ref = reference(4, tied=tied, llama3=llama3)
    config = load_model_config(ref.folder)
    assert (config.tie_word_embeddings, config.rope_scaling is not None) == (tied, llama3)
    assert_logits(run_chunks(Ranks(config, 2, "HND", 8), ref.prompt, CHUNKED), ref.logits)


def test_requests_of_one_batch_do_not_mix(reference: Callable[..., Reference]) -> None:
    """Prefill, chunk and decode in one step; each must equal the request alone."""
    ref = reference()
    ranks = Ranks(load_model_config(ref.folder), 1, "HND", 16)
    prompt = ref.prompt
    first, second, third = [[3, 9]], [[30, 2, 11]], [[7]]
    ranks.step([(first, 0, prompt[:20]), (second, 0, prompt[:33])])
    got = ranks.step(
        [(first, 20, prompt[20:21]), (second, 33, prompt[33:40]), (third, 0, prompt[:9])]
    )
    assert_logits(got[:1], ref.logits[20:21])
    assert_logits(got[1:8], ref.logits[33:40])
    assert_logits(got[8:], ref.logits[:9])


def test_kv_is_the_same_on_any_tp_size_layout_and_block_size(
    reference: Callable[..., Reference],
) -> None:
    """Layer 0's K and V depend on no sum over ranks, so they are equal to the last bit."""
    ref = reference(2)
    config = load_model_config(ref.folder)
    sides = []
    for tp_size, layout, block_tokens in ((1, "HND", 16), (4, "NHD", 24)):
        ranks = Ranks(config, tp_size, layout, block_tokens)
        run_chunks(ranks, ref.prompt, ONE_GO)
        ids = ranks.tables(70)
        sides.append([kv_digests(c.regions[:2], c.buffer, ids, 70) for c in ranks.caches])
    assert compare(*sides) == []


@pytest.mark.parametrize("num_kv_heads", [1, 8])
def test_seeded_model_varies_and_depends_on_its_context(num_kv_heads: int) -> None:
    config = load_model_config(None, num_kv_heads=num_kv_heads)
    one, two = Ranks(config, 1, "HND", 16), Ranks(config, 2, "NHD", 32)
    generator = torch.Generator().manual_seed(5)
    for num_tokens in (5, 16, 17, 100):
        prompt = torch.randint(0, 2048, (num_tokens,), generator=generator).tolist()
        output = greedy(one, prompt)
        assert len(set(output)) >= 16
        assert greedy(two, prompt) == output
        assert (
            sum(a != b for a, b in zip(output, greedy(one, prompt, forget=True), strict=True)) > 24
        )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_smaller_dtypes_stay_near(reference: Callable[..., Reference], dtype: str) -> None:
    ref = reference()
    config = load_model_config(ref.folder, dtype=dtype)
    got = run_chunks(Ranks(config, 2, "HND", 16), ref.prompt, CHUNKED)
    assert got.dtype == torch.float32
    assert (got - ref.logits).abs().mean() < 0.02 * ref.logits.abs().max()


def test_refusals(reference: Callable[..., Reference]) -> None:
    config = load_model_config(reference().folder)
    shard = shard_for(config, 0, 1)
    weights = load_weights(config, shard)
    layers = paged_layers(config, shard, attention_backend("HND"))
    model = LlamaModel(config, weights, tp_rank=0, tp_size=1, layers=layers)
    with pytest.raises(KeyError, match=r"model\.layers\.0\.self_attn"):
        model.forward(torch.tensor([1]), torch.tensor([0]), {})
