"""Layers whose blocks have easily counted bytes, and settings as an engine has them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from kvxfer.cache.specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)


def config(
    max_model_len: int = 1000,
    max_num_batched_tokens: int = 64,
    num_gpu_blocks_override: int | None = None,
    disable_hybrid_kv_cache_manager: bool | None = False,
) -> Any:
    """A stand-in with the sections of a serving engine's settings."""
    return SimpleNamespace(
        cache_config=SimpleNamespace(
            block_size=16, num_gpu_blocks_override=num_gpu_blocks_override
        ),
        model_config=SimpleNamespace(max_model_len=max_model_len),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=max_num_batched_tokens,
            disable_hybrid_kv_cache_manager=disable_hybrid_kv_cache_manager,
        ),
    )


def full(num_kv_heads: int = 1, block_size: int = 16, **more: Any) -> FullAttentionSpec:
    """2 * 16 tokens * 1 head * 4 * 2 bytes = 256 bytes a block for each head."""
    return FullAttentionSpec(
        block_size=block_size, num_kv_heads=num_kv_heads, head_size=4, dtype="float16", **more
    )


def window(
    sliding_window: int = 48, num_kv_heads: int = 1, block_size: int = 16, **more: Any
) -> SlidingWindowSpec:
    """256 bytes a block for each head."""
    return SlidingWindowSpec(
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_size=4,
        dtype="float16",
        sliding_window=sliding_window,
        **more,
    )


def chunked(attention_chunk_size: int = 64, num_kv_heads: int = 1) -> ChunkedLocalAttentionSpec:
    """256 bytes a block for each head."""
    return ChunkedLocalAttentionSpec(
        block_size=16,
        num_kv_heads=num_kv_heads,
        head_size=4,
        dtype="float16",
        attention_chunk_size=attention_chunk_size,
    )


def latent(head_size: int = 8, **more: Any) -> MLAAttentionSpec:
    """16 tokens * 8 * 2 bytes = 256 bytes a block."""
    return MLAAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=head_size, dtype="float16", **more
    )


def state(num_elements: int = 128, block_size: int = 1000, **more: Any) -> MambaSpec:
    """128 * 2 bytes = 256 bytes a block."""
    return MambaSpec(block_size=block_size, shapes=((num_elements,),), dtypes=("float16",), **more)


def layers(*counted: tuple[int, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """So many layers of each spec, named "0", "1", ..."""
    specs = [spec for num_layers, spec in counted for _ in range(num_layers)]
    return {str(at): spec for at, spec in enumerate(specs)}


def alternating(num_each: int, *specs: KVCacheSpec) -> dict[str, KVCacheSpec]:
    """One layer of each spec in turn, named "0", "1", ..."""
    return {str(at): spec for at, spec in enumerate(specs * num_each)}


class Unchanged:
    """A with-block that must leave all these values as they are."""

    def __init__(self, *values: Any) -> None:
        self._values = values

    def __enter__(self) -> None:
        self._before = copy.deepcopy(self._values)

    def __exit__(self, *_: object) -> None:
        assert self._values == self._before
        for value, before in zip(self._values, self._before, strict=True):
            if isinstance(value, Mapping):
                assert list(value) == list(before)
