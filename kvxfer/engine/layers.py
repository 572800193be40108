"""A model's attention layers as objects: what the utilities of the cache room ask a model for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvxfer.engine.attention import AttentionMetadata, PagedBackend
from kvxfer.engine.config import EngineConfig
from kvxfer.engine.model_config import ModelConfig, TpShard, attention_layers


@dataclass(slots=True, eq=False)
class PagedAttention:
    """One attention layer on one rank.

    ``num_kv_heads``: of this rank. ``sliding_window``: tokens that a token sees, itself among them;
    None for all. ``kv_sharing_target_layer_name``: the layer whose cache it reads instead of having
    its own. ``kv_cache``: empty until ``bind_kv_cache`` sets it, in the backend's logical shape.
    """

    num_kv_heads: int
    head_size: int
    backend: type[PagedBackend]
    sliding_window: int | None = None
    kv_sharing_target_layer_name: str | None = None
    kv_cache: Tensor = field(default_factory=lambda: torch.empty(0))

    def get_attn_backend(self) -> type[PagedBackend]:
        """The backend that reads and writes this layer's cache."""
        return self.backend

    def write(self, key: Tensor, value: Tensor, meta: AttentionMetadata) -> None:
        """Keep the new tokens' K and V [T, num_kv_heads, head_size]."""
        self.backend.write(self.kv_cache, key, value, meta)

    def attend(self, query: Tensor, meta: AttentionMetadata) -> Tensor:
        """Attention of the new tokens' ``query`` [T, query heads, head_size] over what is kept."""
        return self.backend.attend(query, self.kv_cache, meta, self.sliding_window)


def paged_layers(
    model: ModelConfig, shard: TpShard, backend: type[PagedBackend]
) -> dict[str, PagedAttention]:
    """The layers of one rank by name, in order of depth, not bound to a cache yet."""
    return {
        layer.name: PagedAttention(
            num_kv_heads=shard.kv_hi - shard.kv_lo,
            head_size=model.head_size,
            backend=backend,
            sliding_window=layer.window,
            kv_sharing_target_layer_name=layer.target,
        )
        for layer in attention_layers(model)
    }


def sharing_layers(layers: Mapping[str, PagedAttention]) -> dict[str, str]:
    """Layers without a cache of their own, and whose they read."""
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
    static_forward_context: dict[str, PagedAttention]

    @property
    def compilation_config(self) -> ForwardContext:
        """Itself."""
        return self
