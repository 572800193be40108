"""Attention over a paged KV cache, in two physical layouts.

A backend owns the order of the bytes of a layer's cache and nothing else: both state the logical
shape ``[2, kernel blocks, kernel tokens, KV heads, head size]``, K then V. Which blocks a request
has comes in as :class:`AttentionMetadata`, in block ids of the engine, never in kernel blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvxfer.cache.specs import KVCacheSpec
from kvxfer.engine.config import EngineConfig
from kvxfer.engine.model_config import ModelConfig, TpShard, attention_layers
from kvxfer.errors import ModelError
from kvxfer.tensors.attention import CommonAttentionMetadata, ForwardConfig, MultipleOf


@dataclass(frozen=True, slots=True)
class Sight:
    """What a token at position p sees: positions (p - window, p], those of its own chunk of so many
    tokens up to p, or all up to p.
    """

    window: int | None = None
    chunk: int | None = None

    def first_seen(self, position: int) -> int:
        if self.chunk is not None:
            return position // self.chunk * self.chunk
        return 0 if self.window is None else max(0, position - self.window + 1)


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step of R requests with T new tokens in all, for one cache group.

    ``query_starts`` (R + 1 numbers: where each request's new tokens begin) and ``seq_lens``
    (context with the new tokens) steer the loop over requests. ``block_table`` [R, most blocks] and
    ``slot_mapping`` [T] (block id * block_tokens + offset) are int64 on the model's device.
    """

    query_starts: tuple[int, ...]
    seq_lens: tuple[int, ...]
    block_table: Tensor
    slot_mapping: Tensor
    block_tokens: int


class PagedMetadataBuilder:
    """Metadata of a step for the layers of one cache group, from what all backends get."""

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        config: ForwardConfig,
        device: torch.device | str,
    ) -> None:
        self._block_tokens = kv_cache_spec.block_size

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata
    ) -> AttentionMetadata:
        """The step; a prefix that all requests have in common is not treated apart."""
        common = common_attn_metadata
        return AttentionMetadata(
            query_starts=tuple(common.query_start_loc_cpu.tolist()),
            seq_lens=tuple(common.seq_lens_cpu.tolist()),
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            block_tokens=self._block_tokens,
        )


class PagedBackend:
    """Writes and reads one layer's KV; called on the class, without state.

    Two engines with different backends differ only in where the bytes lie. ``write`` touches
    exactly the slots of ``slot_mapping``. ``attend`` reads only blocks that hold a token which a
    new token sees; what else lies in them (older tokens, other requests' leftovers) never reaches
    the answer.
    """

    name: ClassVar[str]
    stride_order: ClassVar[tuple[int, ...]]
    kernel_block_sizes: ClassVar[tuple[int | MultipleOf, ...]]

    @classmethod
    def _gather(
        cls, kv_cache: Tensor, kernel_block_ids: Tensor, heads: range
    ) -> tuple[Tensor, Tensor]:
        """K and V of these KV heads in the kernel blocks, in order, each as [heads, tokens,
        head_size].
        """
        raise NotImplementedError

    @classmethod
    def get_name(cls) -> str:
        return cls.name

    @classmethod
    def get_kv_cache_stride_order(cls) -> tuple[int, ...]:
        return cls.stride_order

    @classmethod
    def get_supported_kernel_block_sizes(cls) -> Sequence[int | MultipleOf]:
        return cls.kernel_block_sizes

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """Logical shape: K and V, kernel blocks, their tokens, heads, elements."""
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_builder_cls() -> type[PagedMetadataBuilder]:
        return PagedMetadataBuilder

    @classmethod
    def write(cls, kv_cache: Tensor, key: Tensor, value: Tensor, meta: AttentionMetadata) -> None:
        """Store ``key`` and ``value`` [T, kv heads, head_size] in the slots of the new tokens."""
        kernel_tokens = kv_cache.shape[2]
        # A kernel block's slots follow its predecessor's, so slot arithmetic is the same for blocks
        # and kernel blocks.
        block = meta.slot_mapping // kernel_tokens
        slot = meta.slot_mapping % kernel_tokens
        kv_cache[0][block, slot] = key
        kv_cache[1][block, slot] = value

    @classmethod
    def attend(
        cls, query: Tensor, kv_cache: Tensor, meta: AttentionMetadata, sight: Sight
    ) -> Tensor:
        """Causal attention of ``query`` [T, query heads, head_size] over what the cache holds; same
        shape.
        """
        output = torch.empty_like(query)
        ratio = meta.block_tokens // kv_cache.shape[2]
        for index, seq_len in enumerate(meta.seq_lens):
            begin, end = meta.query_starts[index], meta.query_starts[index + 1]
            num_new = end - begin
            first_seen = sight.first_seen(seq_len - num_new)
            first_block = first_seen // meta.block_tokens
            ids = meta.block_table[index, first_block : -(-seq_len // meta.block_tokens)]
            if ratio > 1:
                ids = (ids[:, None] * ratio + torch.arange(ratio, device=ids.device)).flatten()
            base = first_block * meta.block_tokens
            context = seq_len - first_seen
            mask = _mask(num_new, context, sight, query.device)
            for heads in _pieces(kv_cache, context):
                key, value = (
                    plane[:, first_seen - base : seq_len - base]
                    for plane in cls._gather(kv_cache, ids, heads)
                )
                group = query.shape[1] // kv_cache.shape[3]
                own = slice(heads.start * group, heads.stop * group)
                output[begin:end, own] = _attend_one(query[begin:end, own], key, value, mask)
        return output


class _HndBackend(PagedBackend):
    """Physical order [2, blocks, heads, block tokens, head_size]; a kernel block is a block."""

    name = "HND"
    stride_order = (0, 1, 3, 2, 4)
    kernel_block_sizes = (MultipleOf(8),)

    @classmethod
    def _gather(
        cls, kv_cache: Tensor, kernel_block_ids: Tensor, heads: range
    ) -> tuple[Tensor, Tensor]:
        planes, num_blocks, tokens, num_heads, head_size = kv_cache.shape
        # One row per (plane, block, head), so that one copy also brings the heads to the front:
        # against gathering blocks and then permuting them, 130 us to 180 for 32 blocks of 16
        # tokens, 63 to 63 for 8, and 50 to 36 for 2 (8 heads of 64 float32, one CPU thread).
        device = kv_cache.device
        plane_rows = torch.arange(planes, device=device)[:, None, None] * (num_blocks * num_heads)
        head_rows = torch.arange(heads.start, heads.stop, device=device)[:, None]
        rows = plane_rows + head_rows + kernel_block_ids * num_heads
        physical = kv_cache.transpose(2, 3).view(-1, tokens * head_size)
        gathered = physical.index_select(0, rows.flatten())
        key, value = gathered.view(planes, len(heads), -1, head_size).unbind()
        return key, value


class _NhdBackend(PagedBackend):
    """Physical order [kernel blocks, 2, kernel tokens, heads, head_size]; a block is consecutive
    kernel blocks of the largest size that divides it (24 is three of 8).
    """

    name = "NHD"
    stride_order = (1, 0, 2, 3, 4)
    kernel_block_sizes: ClassVar[tuple[int | MultipleOf, ...]] = (8, 16, 32, 64)

    @classmethod
    def _gather(
        cls, kv_cache: Tensor, kernel_block_ids: Tensor, heads: range
    ) -> tuple[Tensor, Tensor]:
        key, value = (
            plane.index_select(0, kernel_block_ids).flatten(0, 1).transpose(0, 1)
            for plane in kv_cache[:, :, :, heads.start : heads.stop].unbind()
        )
        return key, value


class _HndPagesBackend(_NhdBackend):
    """HND with all of a block in one place, [blocks, 2, heads, block tokens, head_size]: so that a
    block of the same buffer can be a state's.
    """

    name = "HND"
    stride_order = (1, 0, 3, 2, 4)
    kernel_block_sizes = (MultipleOf(8),)


_BACKENDS: dict[str, type[PagedBackend]] = {"HND": _HndBackend, "NHD": _NhdBackend}


def attention_backend(name: str) -> type[PagedBackend]:
    if name not in _BACKENDS:
        raise ModelError(f"layout: expected {' or '.join(_BACKENDS)}, got {name!r}")
    return _BACKENDS[name]


def beside_states(backend: type[PagedBackend]) -> type[PagedBackend]:
    return _HndPagesBackend if backend is _HndBackend else backend


_GATHERED_NBYTES = 2 << 20
"""Heads are gathered together while they are no more than this, which a core's cache holds. A token
that sees 64 MiB of KV in four layers took 10 ms (one CPU thread), and 16 to 38 with all heads of a
layer at once: these 16 MiB are memory that is fresh each time.
"""


def _pieces(kv_cache: Tensor, context: int) -> list[range]:
    """The KV heads that are gathered together for a request that sees so many tokens."""
    *_, num_heads, head_size = kv_cache.shape
    num = max(1, _GATHERED_NBYTES // (2 * context * head_size * kv_cache.element_size()))
    return [range(lo, min(lo + num, num_heads)) for lo in range(0, num_heads, num)]


def _attend_one(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """One request: query [new, query heads, D], key and value [kv heads, context, D], which begin
    at the first position that the first query sees -> [new, query heads, D]. ``mask``: None for
    plain causal order.
    """
    num_new, num_query_heads, head_size = query.shape
    num_kv_heads = len(key)
    group = num_query_heads // num_kv_heads
    if num_new == 1:
        # The query heads of one KV head are rows of one matrix: K and V are read once for the whole
        # group.
        rows = query.reshape(num_kv_heads, group, head_size)
        attended = scaled_dot_product_attention(rows[None], key[None], value[None])
        return attended.reshape(1, num_query_heads, head_size)
    heads = query.transpose(0, 1).reshape(num_kv_heads, group, num_new, head_size)
    key, value = (plane[:, None].expand(-1, group, -1, -1) for plane in (key, value))
    attended = scaled_dot_product_attention(
        heads, key, value, attn_mask=mask, is_causal=mask is None
    )
    return attended.flatten(0, 1).transpose(0, 1)


def _mask(num_new: int, context: int, sight: Sight, device: torch.device) -> Tensor | None:
    """Which of the context each new token sees, [new, context]; None: plain causal order."""
    if num_new == 1:
        return None  # all of it
    # A context begins at the first token that the first new one sees: with a chunk.
    is_narrow = (sight.window or sight.chunk or context) < context
    if num_new == context and not is_narrow:
        return None
    # Row i sees the context before the step and the new tokens up to itself, which is column
    # (context - new + i), and of these the last `window`, or those of its chunk.
    own = context - num_new
    mask = torch.ones(num_new, context, dtype=torch.bool, device=device).tril(own)
    if is_narrow and sight.window is not None:
        return mask.triu(own - sight.window + 1)
    if is_narrow and sight.chunk is not None:
        chunk_of = torch.arange(context, device=device) // sight.chunk
        return mask & (chunk_of[own:, None] == chunk_of)
    return mask


@dataclass(slots=True, eq=False)
class PagedAttention:
    """One attention layer on one rank.

    ``num_kv_heads``: of this rank. ``sliding_window``: tokens that a token sees, itself among them;
    ``attention_chunk_size``: of its own chunk of so many tokens; None for all.
    ``kv_sharing_target_layer_name``: the layer whose cache it reads instead of having its own.
    ``kv_cache``: empty until ``bind_kv_cache`` sets it, in the backend's logical shape.
    """

    num_kv_heads: int
    head_size: int
    backend: type[PagedBackend]
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    kv_sharing_target_layer_name: str | None = None
    kv_cache: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def sight(self) -> Sight:
        return Sight(self.sliding_window, self.attention_chunk_size)

    def get_attn_backend(self) -> type[PagedBackend]:
        return self.backend

    def write(self, key: Tensor, value: Tensor, meta: AttentionMetadata) -> None:
        self.backend.write(self.kv_cache, key, value, meta)

    def attend(self, query: Tensor, meta: AttentionMetadata) -> Tensor:
        return self.backend.attend(query, self.kv_cache, meta, self.sight)


def paged_layers(
    model: ModelConfig, shard: TpShard, backend: type[PagedBackend]
) -> dict[str, PagedAttention]:
    """The layers of attention, by name."""
    backend = beside_states(backend) if model.state_layers else backend
    return {
        layer.name: PagedAttention(
            num_kv_heads=shard.kv_hi - shard.kv_lo,
            head_size=model.head_size,
            backend=backend,
            sliding_window=layer.window,
            attention_chunk_size=layer.chunk,
            kv_sharing_target_layer_name=layer.target,
        )
        for layer in attention_layers(model)
        if not layer.is_state
    }


def sharing_layers(layers: Mapping[str, PagedAttention]) -> dict[str, str]:
    return {
        name: layer.kv_sharing_target_layer_name
        for name, layer in layers.items()
        if layer.kv_sharing_target_layer_name is not None
    }


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """An engine's settings together with its model and layers, in the shape that the utilities
    read: ``cache_config``, ``model_config``, ``compilation_config.static_forward_context``.
    """

    cache_config: EngineConfig
    model_config: ModelConfig
    static_forward_context: Mapping[str, object]

    @property
    def compilation_config(self) -> ForwardContext:
        return self
