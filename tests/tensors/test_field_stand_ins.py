"""A serving engine's configuration, layers and backends as they are: from the layers to a cache of
which blocks are zeroed.

The stand-ins have the field's attributes and parameters, and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvxfer.cache import (
    check_enough_kv_cache_memory,
    estimate_max_model_len,
    get_kv_cache_config,
)
from kvxfer.connector.utils import (
    get_current_attn_backend,
    get_kv_connector_cache_layout,
    set_current_config,
)
from kvxfer.tensors.attention import (
    AttentionGroup,
    build_attn_metadata,
    get_kv_cache_spec,
    init_attn_backend,
    prepare_kernel_block_sizes,
)
from kvxfer.tensors.block_zeroer import KVBlockZeroer
from kvxfer.tensors.kv_cache import add_kv_sharing_layers_to_kv_cache_groups, init_kv_cache

AVAILABLE_NBYTES = 400_000
POISON = 0xA5


class FieldMultipleOf:
    """The field's own class, not ours."""

    def __init__(self, base: int) -> None:
        self.base = base


class FieldBuilder:
    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any
    ) -> None:
        self.layer_names = list(layer_names)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> FieldBuilder:
        return self


class FieldBackend:
    order: tuple[int, ...]
    sizes: list[Any]

    @classmethod
    def get_name(cls) -> str:
        return cls.__name__

    @classmethod
    def get_kv_cache_stride_order(
        cls, include_num_layers_dimension: bool = False
    ) -> tuple[int, ...]:
        return cls.order

    @classmethod
    def get_supported_kernel_block_sizes(cls) -> list[Any]:
        return cls.sizes

    @staticmethod
    def get_builder_cls() -> type[FieldBuilder]:
        return FieldBuilder


class PlanesFirst(FieldBackend):
    order = (0, 1, 3, 2, 4)
    sizes = [FieldMultipleOf(16)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, heads: int, size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        if block_size % 16:
            raise ValueError("Block size must be a multiple of 16.")
        return (2, num_blocks, block_size, heads, size)


class BlocksFirst(FieldBackend):
    order = (0, 1, 3, 2, 4)
    sizes = [16, 32, 64]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, heads: int, size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return (num_blocks, 2, block_size, heads, size)


class Unordered(FieldBackend):
    """Says that its order is the logical one by not saying any."""

    sizes = [FieldMultipleOf(16)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, heads: int, size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return (2, num_blocks, heads, block_size, size)

    @classmethod
    def get_kv_cache_stride_order(
        cls, include_num_layers_dimension: bool = False
    ) -> tuple[int, ...]:
        raise NotImplementedError


class Latent(FieldBackend):
    order = (0, 1, 2)
    sizes = [64]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, heads: int, size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return (num_blocks, block_size, size)


class FieldLayer:
    attn_type = "decoder"

    def __init__(
        self, backend: Any, heads: int, window: int | None = None, target: str | None = None
    ) -> None:
        self.num_kv_heads, self.head_size = heads, 8
        self.sliding_window, self.kv_sharing_target_layer_name = window, target
        self.get_attn_backend: Callable[[], Any] = lambda: backend
        self.kv_cache: Any = [torch.tensor([])]  # as unbound ones are there


def field_config(layers: Mapping[str, Any], block_size: int, use_mla: bool) -> Any:
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        cache_config=SimpleNamespace(
            block_size=block_size, num_gpu_blocks_override=None, cache_dtype="auto"
        ),
        model_config=SimpleNamespace(dtype=torch.bfloat16, use_mla=use_mla, max_model_len=256),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=64, disable_hybrid_kv_cache_manager=None
        ),
        kv_transfer_config=SimpleNamespace(kv_connector="any"),
    )


def field_layers(backend: Any, heads: int) -> dict[str, FieldLayer]:
    """Windows and full attention in turn, the last two without a cache; latent ones all full."""
    name = "model.layers.{}.self_attn.attn".format
    return {
        name(at): FieldLayer(
            backend,
            heads,
            window=32 if at % 2 == 0 and backend is not Latent else None,
            target=name(at - 2) if at >= 4 else None,
        )
        for at in range(6)
    }


@pytest.mark.parametrize(
    ("backend", "heads", "block_size", "kernel_tokens"),
    [
        (PlanesFirst, 2, 48, 48),
        (PlanesFirst, 1, 16, 16),
        (BlocksFirst, 2, 64, 64),
        (BlocksFirst, 2, 48, 16),
        (BlocksFirst, 1, 128, 64),
        (Unordered, 2, 16, 16),
        (Latent, 1, 128, 64),
    ],
)
def test_from_layers_to_zeroed_blocks(
    backend: Any, heads: int, block_size: int, kernel_tokens: int
) -> None:
    layers: dict[str, Any] = dict(field_layers(backend, heads))
    config = field_config(layers, block_size, use_mla=backend is Latent)
    specs = get_kv_cache_spec(config, "auto")
    check_enough_kv_cache_memory(config, specs, AVAILABLE_NBYTES)
    assert estimate_max_model_len(config, specs, AVAILABLE_NBYTES) == 256
    plan = get_kv_cache_config(config, specs, AVAILABLE_NBYTES)
    # One latent, or K and V, of 8 bfloat16 for each token; 4 buffers of one layer each for latent
    # layers, else 2 that two layers share.
    block_nbytes = block_size * 8 * 2 * (4 if backend is Latent else 2 * heads * 2)
    assert plan.num_blocks == AVAILABLE_NBYTES // block_nbytes

    shared = {
        name: layer.kv_sharing_target_layer_name
        for name, layer in layers.items()
        if layer.kv_sharing_target_layer_name
    }
    add_kv_sharing_layers_to_kv_cache_groups(shared, plan.kv_cache_groups)
    backends, builders = init_attn_backend(plan, config, "cpu")
    # Room for the beginnings at multiples of 4096.
    memory = torch.full((AVAILABLE_NBYTES + 4 * 4096,), POISON, dtype=torch.uint8)
    caches = init_kv_cache(
        [],
        layers,
        plan,
        backends,
        "cpu",
        allocator=lambda nbytes: memory[:nbytes],
        shared_kv_cache_layers=shared,
    )
    groups = [
        [AttentionGroup(backend, group.layer_names, group.kv_cache_spec, at)]
        for at, group in enumerate(plan.kv_cache_groups)
    ]
    sizes = prepare_kernel_block_sizes(plan, groups)
    assert sizes == [kernel_tokens] * len(groups)

    zeroer = KVBlockZeroer("cpu", pin_memory=False)
    parts = [part for of_group in groups for part in of_group]
    zeroer.init_meta(parts, sizes, "auto", set(shared), layers)
    zeroed = {1, plan.num_blocks - 1}
    zeroer.zero_block_ids(list(zeroed))
    per_block = block_size // kernel_tokens
    for name, cache in caches.items():
        assert isinstance(cache, Tensor)
        assert layers[name].kv_cache is cache
        dim = tuple(cache.shape).index(plan.num_blocks * per_block)
        for block in range(plan.num_blocks):
            kernel_blocks = cache.narrow(dim, block * per_block, per_block)
            found = kernel_blocks.contiguous().view(torch.uint8).unique().tolist()
            assert found == ([0] if block in zeroed else [POISON]), (name, block)

    metadata = build_attn_metadata(
        builders,
        1,
        2,
        torch.tensor([0, 2]),
        torch.tensor([5]),
        torch.tensor([3]),
        [torch.zeros(1, 2, dtype=torch.int64)] * len(builders),
        torch.zeros(len(builders), 2, dtype=torch.int64),
        plan,
    )
    assert all(name in built.layer_names for name, built in metadata.items())
    assert sorted(metadata) == sorted(layers)
    assert get_current_attn_backend(config) is backend
    with set_current_config(config):
        assert get_kv_connector_cache_layout() == ("NHD" if backend is Latent else "HND")
