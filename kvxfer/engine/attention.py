"""Attention over a paged KV pool, in two physical layouts.

A backend owns the order of the bytes of a layer's view and nothing else: which blocks a request has
comes in as :class:`AttentionMetadata`, in block ids of the engine, never in kernel blocks.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvxfer.engine.model_config import ModelConfig, TpShard, layer_names
from kvxfer.errors import ModelError
from kvxfer.tensors.allocate import KVPoolSpec, PoolLayout, plane_of


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step of R requests with T new tokens in all.

    ``query_start_loc`` [R + 1] and ``seq_lens`` [R] (context with the new tokens) live on the CPU,
    as they steer the loop; ``block_tables`` [R, most blocks] (filled up with 0) and
    ``slot_mapping`` [T] (block id * block_tokens + offset) live on the model's device. All int64.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    block_tokens: int


def build_attn_metadata(
    requests: Sequence[tuple[Sequence[int], int, int]],
    block_size: int,
    device: torch.device | str = "cpu",
) -> AttentionMetadata:
    """Metadata of a step; a request is (block ids, tokens already computed, new tokens).

    Raises ValueError for a request without new tokens or with too few blocks for its tokens.
    """
    starts: list[int] = [0]
    seq_lens: list[int] = []
    slots: list[int] = []
    for index, (block_ids, num_computed_tokens, num_new_tokens) in enumerate(requests):
        seq_len = num_computed_tokens + num_new_tokens
        if num_new_tokens < 1 or num_computed_tokens < 0:
            raise ValueError(
                f"request {index}: expected new tokens after 0 or more computed ones, "
                f"got {num_new_tokens} after {num_computed_tokens}"
            )
        if seq_len > len(block_ids) * block_size:
            raise ValueError(
                f"request {index}: expected blocks for {seq_len} tokens, "
                f"got {len(block_ids)} of {block_size} tokens"
            )
        slots.extend(
            block_ids[token // block_size] * block_size + token % block_size
            for token in range(num_computed_tokens, seq_len)
        )
        starts.append(starts[-1] + num_new_tokens)
        seq_lens.append(seq_len)
    most = max((len(block_ids) for block_ids, _, _ in requests), default=0)
    tables = [
        [*block_ids, *itertools.repeat(0, most - len(block_ids))] for block_ids, _, _ in requests
    ]
    return AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int64),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int64),
        block_tables=torch.tensor(tables, dtype=torch.int64, device=device).reshape(
            len(requests), most
        ),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        block_tokens=block_size,
    )


class AttentionBackend(abc.ABC):
    """Writes and reads one layer's KV.

    A backend is a value without state: two engines with different backends differ only in where the
    bytes lie. ``write`` touches exactly the slots of ``slot_mapping``. ``attend`` reads exactly the
    first ``seq_lens[i]`` slots of each request's blocks; what lies behind them (other requests'
    leftovers) never reaches the answer.
    """

    layout: PoolLayout

    def pool_spec(
        self, config: ModelConfig, shard: TpShard, *, num_blocks: int, block_tokens: int
    ) -> KVPoolSpec:
        """The pool that a rank needs for this backend. Raises ValueError for a block size that it
        cannot serve.
        """
        return KVPoolSpec(
            layout=self.layout,
            layer_names=layer_names(config),
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            head_lo=shard.kv_lo,
            head_hi=shard.kv_hi,
            head_size=config.head_size,
            dtype=getattr(torch, config.dtype),
        )

    def write(self, kv_cache: Tensor, key: Tensor, value: Tensor, meta: AttentionMetadata) -> None:
        """Store ``key`` and ``value`` [T, kv heads, head_size] in the slots of the new tokens."""
        kernel_tokens = self._kernel_tokens(kv_cache)
        # A kernel block's slots follow its predecessor's, so slot arithmetic is the same for blocks
        # and kernel blocks.
        block = meta.slot_mapping // kernel_tokens
        slot = meta.slot_mapping % kernel_tokens
        plane_of(kv_cache, 0, self.layout)[block, slot] = key
        plane_of(kv_cache, 1, self.layout)[block, slot] = value

    def attend(self, query: Tensor, kv_cache: Tensor, meta: AttentionMetadata) -> Tensor:
        """Causal attention of ``query`` [T, query heads, head_size] over what the pool holds; same
        shape.
        """
        output = torch.empty_like(query)
        ratio = meta.block_tokens // self._kernel_tokens(kv_cache)
        starts = meta.query_start_loc.tolist()
        for index, seq_len in enumerate(meta.seq_lens.tolist()):
            begin, end = starts[index], starts[index + 1]
            num_blocks = -(-seq_len // meta.block_tokens)
            ids = meta.block_tables[index, :num_blocks]
            if ratio > 1:
                ids = (ids[:, None] * ratio + torch.arange(ratio, device=ids.device)).flatten()
            key, value = self._gather(kv_cache, ids)
            output[begin:end] = _attend_one(query[begin:end], key[:, :seq_len], value[:, :seq_len])
        return output

    @abc.abstractmethod
    def _kernel_tokens(self, kv_cache: Tensor) -> int:
        """Tokens of one kernel block of the view."""

    @abc.abstractmethod
    def _gather(self, kv_cache: Tensor, kernel_block_ids: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of the kernel blocks, in order, each as [kv heads, tokens, head_size]."""


class HndBackend(AttentionBackend):
    """View [2, num_blocks, heads, block_tokens, head_size]."""

    layout = PoolLayout.HND

    def _kernel_tokens(self, kv_cache: Tensor) -> int:
        return kv_cache.shape[3]

    def _gather(self, kv_cache: Tensor, kernel_block_ids: Tensor) -> tuple[Tensor, Tensor]:
        planes, num_blocks, num_heads, tokens, head_size = kv_cache.shape
        # One row per (plane, block, head), so that one copy also brings the heads to the front:
        # against gathering blocks and then permuting them, 130 us to 180 for 32 blocks of 16
        # tokens,
        # 63 to 63 for 8, and 50 to 36 for 2 (8 heads of 64 float32, one CPU thread).
        device = kv_cache.device
        plane_rows = torch.arange(planes, device=device)[:, None, None] * (num_blocks * num_heads)
        head_rows = torch.arange(num_heads, device=device)[:, None]
        rows = plane_rows + head_rows + kernel_block_ids * num_heads
        gathered = kv_cache.view(-1, tokens * head_size).index_select(0, rows.flatten())
        key, value = gathered.view(planes, num_heads, -1, head_size).unbind()
        return key, value


class NhdBackend(AttentionBackend):
    """View [num_kernel_blocks, 2, kernel_tokens, heads, head_size]."""

    layout = PoolLayout.NHD

    def _kernel_tokens(self, kv_cache: Tensor) -> int:
        return kv_cache.shape[2]

    def _gather(self, kv_cache: Tensor, kernel_block_ids: Tensor) -> tuple[Tensor, Tensor]:
        key, value = (
            plane.index_select(0, kernel_block_ids).flatten(0, 1).transpose(0, 1)
            for plane in kv_cache.unbind(1)
        )
        return key, value


_BACKENDS: dict[str, type[AttentionBackend]] = {"HND": HndBackend, "NHD": NhdBackend}


def attention_backend(name: str) -> AttentionBackend:
    """The backend of a layout, "HND" or "NHD"; raises ModelError for another name."""
    if name not in _BACKENDS:
        raise ModelError(f"layout: expected {' or '.join(_BACKENDS)}, got {name!r}")
    return _BACKENDS[name]()


def _attend_one(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One request: query [new, query heads, D], key and value [kv heads, context, D] -> [new, query
    heads, D].
    """
    num_new, num_query_heads, head_size = query.shape
    num_kv_heads, context, _ = key.shape
    group = num_query_heads // num_kv_heads
    if num_new == 1:
        # The query heads of one KV head are rows of one matrix: K and V are read once for the whole
        # group.
        rows = query.view(num_kv_heads, group, head_size)
        attended = scaled_dot_product_attention(rows[None], key[None], value[None])
        return attended.reshape(1, num_query_heads, head_size)
    heads = query.transpose(0, 1).reshape(num_kv_heads, group, num_new, head_size)
    key, value = (plane[:, None].expand(-1, group, -1, -1) for plane in (key, value))
    # Row i sees the context before the step and the new tokens up to itself.
    mask = None
    if num_new != context:
        mask = torch.ones(num_new, context, dtype=torch.bool, device=query.device)
        mask = mask.tril(diagonal=context - num_new)
    attended = scaled_dot_product_attention(
        heads, key, value, attn_mask=mask, is_causal=mask is None
    )
    return attended.flatten(0, 1).transpose(0, 1)
