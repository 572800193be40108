"""The decoder against transformers' LlamaForCausalLM on the same weights, read through our loader.

Tensor-parallel ranks run as threads of this process; their sum meets at a barrier.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from kvxfer.engine.attention import attention_backend, build_attn_metadata
from kvxfer.engine.digest import compare, kv_digests
from kvxfer.engine.model import LlamaModel
from kvxfer.engine.model_config import ModelConfig, load_model_config, shard_for
from kvxfer.engine.weights import load_weights
from kvxfer.errors import ModelError
from kvxfer.tensors.allocate import KVPool, allocate_kv_pool

TOLERANCE = 1e-4
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# one request of 70 tokens: at once, and in chunks that end within, at and after blocks
ONE_GO = (70,)
CHUNKED = (5, 11, 1, 23, 30)


@dataclass(frozen=True)
class Reference:
    """A Hugging Face model on disk, and its logits [tokens, vocab] of one prompt."""

    folder: Path
    prompt: list[int]
    logits: Tensor


def make_reference(folder: Path, *, num_kv_heads: int, tied: bool, llama3: bool) -> Reference:
    rope: dict[str, Any] = LLAMA3_ROPE if llama3 else {"rope_type": "default", "rope_theta": 5e3}
    torch.manual_seed(11)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=131,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=8,
            num_key_value_heads=num_kv_heads,
            head_dim=16,
            max_position_embeddings=512,
            rms_norm_eps=1e-5,
            tie_word_embeddings=tied,
            rope_parameters=rope,
            initializer_range=0.08,
        )
    )
    model.train(False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # norms of one would hide a missing multiplication
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    prompt = torch.randint(0, 131, (70,))
    with torch.no_grad():
        logits: Tensor = model(prompt[None]).logits[0]
    return Reference(folder, prompt.tolist(), logits)


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


class Ranks:
    """All ranks of one engine in threads; ``step`` returns rank 0's logits of every new token."""

    def __init__(
        self,
        config: ModelConfig,
        tp_size: int,
        layout: str,
        block_tokens: int,
        num_blocks: int = 32,
    ) -> None:
        self.block_tokens = block_tokens
        self._tp_size = tp_size
        self._barrier = threading.Barrier(tp_size, timeout=20)
        self._partials: list[Tensor] = [torch.empty(0)] * tp_size
        self.pools: list[KVPool] = []
        self._models: list[LlamaModel] = []
        backend = attention_backend(layout)
        for rank in range(tp_size):
            shard = shard_for(config, rank, tp_size)
            spec = backend.pool_spec(
                config, shard, num_blocks=num_blocks, block_tokens=block_tokens
            )
            pool = allocate_kv_pool(spec)
            for view in pool.layers.values():
                view.fill_(float("nan"))
            self.pools.append(pool)
            self._models.append(
                LlamaModel(
                    config,
                    load_weights(config, shard),
                    tp_rank=rank,
                    tp_size=tp_size,
                    backend=backend,
                    all_reduce=self._all_reduce(rank) if tp_size > 1 else None,
                )
            )

    def step(self, requests: Sequence[tuple[Sequence[int], int, Sequence[int]]]) -> Tensor:
        """A request is (block ids, tokens already computed, new token ids)."""
        meta = build_attn_metadata(
            [(ids, done, len(tokens)) for ids, done, tokens in requests], self.block_tokens
        )
        token_ids = torch.tensor([token for _, _, tokens in requests for token in tokens])
        positions = torch.cat([torch.arange(done, done + len(new)) for _, done, new in requests])

        def run(rank: int) -> Tensor:
            caches = list(self.pools[rank].layers.values())
            model = self._models[rank]
            return model.logits(model.forward(token_ids, positions, caches, meta))

        with ThreadPoolExecutor(self._tp_size) as threads:
            outputs = list(threads.map(run, range(self._tp_size)))
        for other in outputs[1:]:
            assert torch.equal(outputs[0], other)
        return outputs[0]

    def _all_reduce(self, rank: int) -> Callable[[Tensor], Tensor]:
        def all_reduce(partial: Tensor) -> Tensor:
            self._partials[rank] = partial
            self._barrier.wait()
            total = torch.stack(self._partials).sum(0)
            self._barrier.wait()
            return total

        return all_reduce


def blocks_for(num_tokens: int, block_tokens: int) -> list[int]:
    """Scattered block ids: 31, 26, 21, ... (32 blocks, step of 5 is coprime)."""
    return [(31 - 5 * index) % 32 for index in range(-(-num_tokens // block_tokens))]


def run_chunks(ranks: Ranks, prompt: list[int], chunks: Sequence[int]) -> Tensor:
    ids = blocks_for(len(prompt), ranks.block_tokens)
    logits, done = [], 0
    for chunk in chunks:
        logits.append(ranks.step([(ids, done, prompt[done : done + chunk])]))
        done += chunk
    return torch.cat(logits)


def assert_logits(got: Tensor, want: Tensor) -> None:
    assert got.dtype == torch.float32
    assert want.abs().max() > 1.0  # or the tolerance would say nothing
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


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
    first, second, third = [3, 9], [30, 2, 11], [7]
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
        ids = blocks_for(70, block_tokens)
        sides.append([kv_digests(p.regions[:2], p.buffer, ids, 70) for p in ranks.pools])
    assert compare(*sides) == []


def greedy(ranks: Ranks, prompt: list[int], *, forget: bool = False) -> list[int]:
    """32 greedy tokens; ``forget`` zeroes the prompt's KV before the first decode step."""
    ids = blocks_for(len(prompt) + 32, ranks.block_tokens)
    output = [int(ranks.step([(ids, 0, prompt)])[-1].argmax())]
    if forget:
        for pool in ranks.pools:
            pool.buffer.zero_()
    while len(output) < 32:
        done = len(prompt) + len(output) - 1
        output.append(int(ranks.step([(ids, done, output[-1:])])[-1].argmax()))
    return output


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
    weights = load_weights(config, shard_for(config, 0, 1))
    backend = attention_backend("HND")
    with pytest.raises(ModelError, match="all_reduce: expected a callable for 2 ranks, got None"):
        LlamaModel(config, weights, tp_rank=0, tp_size=2, backend=backend)
    model = LlamaModel(config, weights, tp_rank=0, tp_size=1, backend=backend)
    meta = build_attn_metadata([([0], 0, 1)], 16)
    with pytest.raises(ValueError, match=r"kv_caches: expected one per layer \(3\), got 0"):
        model.forward(torch.tensor([1]), torch.tensor([0]), [], meta)
