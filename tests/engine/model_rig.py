"""Models for tests: Hugging Face ones on disk with their answers, and all ranks of one engine in
threads of this process, whose sum meets at a barrier.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvxfer.engine.attention import PagedAttention, Sight, attention_backend
from kvxfer.engine.config import EngineConfig, Role
from kvxfer.engine.model import LlamaModel
from kvxfer.engine.model_config import ModelConfig, shard_for
from kvxfer.engine.rank_cache import RankCache, RequestStep
from kvxfer.engine.weights import load_weights

TOLERANCE = 1e-4
SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.08,
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


def saved(folder: Path, model: Any) -> Reference:
    """The model in a folder, with norms that are not one, and what it answers."""
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


Tables = list[list[int]]


class Ranks:
    """All ranks of one engine in threads; ``step`` returns rank 0's logits of every new token."""

    def __init__(
        self,
        config: ModelConfig,
        tp_size: int,
        layout: str,
        block_tokens: int,
        num_blocks: int = 32,
        **settings: Any,
    ) -> None:
        self.block_tokens = block_tokens
        self._tp_size = tp_size
        self._barrier = threading.Barrier(tp_size, timeout=120)
        self._partials: list[Tensor] = [torch.empty(0)] * tp_size
        self.caches: list[RankCache] = []
        self._models: list[LlamaModel] = []
        engine = EngineConfig(
            role=Role.ALONE,
            engine_id="test",
            tp_size=tp_size,
            layout=layout,
            block_size=block_tokens,
            num_blocks=num_blocks,
            **settings,
        )
        for rank in range(tp_size):
            shard = shard_for(config, rank, tp_size)
            cache = RankCache(engine, config, shard, attention_backend(layout))
            cache.buffer.fill_(0xFF)  # NaN in each type
            self.caches.append(cache)
            self._models.append(
                LlamaModel(
                    config,
                    load_weights(config, shard),
                    tp_rank=rank,
                    tp_size=tp_size,
                    layers=cache.layers,
                    all_reduce=self._all_reduce(rank) if tp_size > 1 else None,
                )
            )

    @property
    def sights(self) -> list[Sight]:
        """What the next token looks at, by group; the rig keeps all of a state's blocks."""
        groups = self.caches[0].config.kv_cache_groups
        layers = [self.caches[0].layers[group.layer_names[0]] for group in groups]
        return [layer.sight if isinstance(layer, PagedAttention) else Sight() for layer in layers]

    def tables(self, num_tokens: int) -> Tables:
        """Scattered block ids for every group: 31, 26, 21, ... (32 blocks, step of 5 is coprime);
        a block belongs to one group.
        """
        num_blocks = self.caches[0].config.num_blocks
        ids = iter((num_blocks - 1 - 5 * index) % num_blocks for index in range(num_blocks))
        needed = range(-(-num_tokens // self.block_tokens))
        return [[next(ids) for _ in needed] for _ in self.caches[0].config.kv_cache_groups]

    def drop(self, tables: Tables, num_computed_tokens: int) -> None:
        """Poison the blocks that no later token sees, in all layers, and forget them."""
        for table, sight in zip(tables, self.sights, strict=True):
            for position in range(sight.first_seen(num_computed_tokens) // self.block_tokens):
                if table[position] >= 0:
                    for cache in self.caches:
                        fill_block(cache, table[position], self.block_tokens)
                    table[position] = -1

    def step(self, requests: Sequence[tuple[Tables, int, Sequence[int]]]) -> Tensor:
        """A request is (block ids by group, tokens already computed, new token ids)."""
        steps = [RequestStep(ids, done, len(tokens)) for ids, done, tokens in requests]
        token_ids = torch.tensor([token for _, _, tokens in requests for token in tokens])
        positions = torch.cat([torch.arange(done, done + len(new)) for _, done, new in requests])

        def run(rank: int) -> Tensor:
            metadata = self.caches[rank].metadata(steps)
            model = self._models[rank]
            return model.logits(model.forward(token_ids, positions, metadata))

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


def fill_block(cache: RankCache, block: int, block_tokens: int) -> None:
    """NaN in one block of every layer."""
    for layer in cache.layers.values():
        assert isinstance(layer, PagedAttention)
        ratio = block_tokens // layer.kv_cache.shape[2]
        layer.kv_cache[:, block * ratio : (block + 1) * ratio] = float("nan")


def run_chunks(ranks: Ranks, prompt: list[int], chunks: Sequence[int]) -> Tensor:
    tables = ranks.tables(len(prompt))
    logits, done = [], 0
    for chunk in chunks:
        ranks.drop(tables, done)
        logits.append(ranks.step([(tables, done, prompt[done : done + chunk])]))
        done += chunk
    return torch.cat(logits)


def assert_logits(got: Tensor, want: Tensor) -> None:
    assert got.dtype == torch.float32
    assert want.abs().max() > 1.0  # or the tolerance would say nothing
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


def greedy(ranks: Ranks, prompt: list[int], *, forget: bool = False) -> list[int]:
    """32 greedy tokens; ``forget`` zeroes the prompt's KV before the first decode step."""
    ids = ranks.tables(len(prompt) + 32)
    output = [int(ranks.step([(ids, 0, prompt)])[-1].argmax())]
    if forget:
        for cache in ranks.caches:
            cache.buffer.zero_()
    while len(output) < 32:
        done = len(prompt) + len(output) - 1
        ranks.drop(ids, done)
        output.append(int(ranks.step([(ids, done, output[-1:])])[-1].argmax()))
    return output
