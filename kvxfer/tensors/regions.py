"""Where the bytes of a bound cache lie: the regions of its layers' views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from msgspec import UNSET
from torch import Tensor

from kvxfer.cache.specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from kvxfer.tensors.attention import AttentionBackend
from kvxfer.tensors.cache_views import CacheDims, LayerCache, cache_shape, find_dims
from kvxfer.transfer.layout import Region, check_region

_K_AND_V = ("k", "v")
LATENT = "latent"

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Plane:
    name: str
    first: int
    """Elements from the view's first one."""


def kv_regions(
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, LayerCache],
    attn_backends: Mapping[str, type[AttentionBackend]],
    memories: Sequence[Tensor],
    head_lo: int,
    head_hi: int,
) -> tuple[Region, ...]:
    """One region for every plane of every layer, in the order of the groups and their layers.

    Strides are the views' own. Planes are "k" and "v", of a latent cache "latent"; where K and V
    lie side by side in one dimension they are two regions all the same. Layers that share another's
    cache are in the groups too. ``memories``: the allocations that the views lie in, flat, of
    one-byte elements; a region names its own by position. ``head_lo``, ``head_hi``: the model's KV
    heads of this rank (0 and 1 for a latent).

    Raises:
        ValueError: a layer that keeps no tokens, a view that is not what its backend states, lies
            in no memory or has gaps within a head, other heads.
        KeyError: a layer without view or backend.
        TypeError: an attention layer with a list of views.
    """
    return tuple(
        region
        for number, group in enumerate(kv_cache_config.kv_cache_groups)
        for layer in group.layer_names
        for region in _layer_regions(
            layer,
            _movable(layer, group.spec_of(layer)),
            _of(layer, "view", kv_caches),
            _of(layer, "attention backend", attn_backends),
            memories,
            num_blocks=kv_cache_config.num_blocks,
            group=number,
            heads=(head_lo, head_hi),
        )
    )


def _layer_regions(
    layer: str,
    spec: AttentionSpec,
    view: LayerCache,
    backend: type[AttentionBackend],
    memories: Sequence[Tensor],
    *,
    num_blocks: int,
    group: int,
    heads: tuple[int, int],
) -> list[Region]:
    if not isinstance(view, Tensor):
        raise TypeError(f"{layer}: expected one view, got a list of states")
    dims = find_dims(backend, spec.block_size, spec)
    _check_view(layer, view, spec, backend, dims, num_blocks)
    head_lo, head_hi = heads
    if head_hi - head_lo != spec.num_kv_heads:
        raise ValueError(
            f"{layer}: heads: expected {spec.num_kv_heads}, got [{head_lo}, {head_hi})"
        )
    itemsize = view.element_size()
    memory, offset = _find(layer, view, memories)
    inner_nbytes = spec.head_size * itemsize
    regions = [
        Region(
            layer=layer,
            plane=plane.name,
            group=group,
            memory=memory,
            offset=offset + plane.first * itemsize,
            num_blocks=num_blocks,
            block_tokens=spec.block_size,
            head_lo=head_lo,
            head_hi=head_hi,
            inner_nbytes=inner_nbytes,
            stride_block=view.stride(dims.block) * itemsize,
            stride_head=inner_nbytes if dims.head is None else view.stride(dims.head) * itemsize,
            stride_token=view.stride(dims.token) * itemsize,
            kernel_blocks=spec.block_size // view.shape[dims.token],
            window=_window(spec),
            is_chunk=isinstance(spec, ChunkedLocalAttentionSpec) or UNSET,
        )
        for plane in _planes(layer, view, spec, backend, dims)
    ]
    for region in regions:
        check_region(region, memories[memory].numel())
    return regions


def _planes(
    layer: str,
    view: Tensor,
    spec: AttentionSpec,
    backend: type[AttentionBackend],
    dims: CacheDims,
) -> list[_Plane]:
    num_planes = 1 if dims.plane is None else view.shape[dims.plane]
    width = view.shape[dims.channel]
    is_latent = isinstance(spec, MLAAttentionSpec)
    if (num_planes, width) == (1, spec.head_size) and is_latent:
        return [_Plane(LATENT, 0)]
    if not is_latent and dims.plane is not None and (num_planes, width) == (2, spec.head_size):
        return [_Plane(name, view.stride(dims.plane) * i) for i, name in enumerate(_K_AND_V)]
    if not is_latent and (num_planes, width) == (1, 2 * spec.head_size):
        return [_Plane(name, spec.head_size * i) for i, name in enumerate(_K_AND_V)]
    raise ValueError(
        f"{layer}: expected {'one latent' if is_latent else 'K and V'} of {spec.head_size} "
        f"elements for each head and token, got shape {tuple(view.shape)} of {backend.get_name()}"
    )


def _check_view(
    layer: str,
    view: Tensor,
    spec: AttentionSpec,
    backend: type[AttentionBackend],
    dims: CacheDims,
    num_blocks: int,
) -> None:
    kernel_tokens = view.shape[dims.token] if view.dim() > dims.token else 0
    if not kernel_tokens or spec.block_size % kernel_tokens:
        raise ValueError(
            f"{layer}: expected kernel blocks that divide a block of {spec.block_size} tokens, got "
            f"a view of shape {tuple(view.shape)} of {backend.get_name()}"
        )
    kernel_blocks = spec.block_size // kernel_tokens
    stated = cache_shape(backend, num_blocks * kernel_blocks, kernel_tokens, spec)
    if tuple(view.shape) != stated.shape or str(view.dtype) != f"torch.{spec.dtype}":
        raise ValueError(
            f"{layer}: expected {spec.dtype} of shape {stated.shape}, as {backend.get_name()} "
            f"states it, got {str(view.dtype).removeprefix('torch.')} of {tuple(view.shape)}"
        )
    if view.stride(dims.channel) != 1:
        raise ValueError(
            f"{layer}: expected contiguous elements within a head, got stride "
            f"{view.stride(dims.channel)}"
        )


def _find(layer: str, view: Tensor, memories: Sequence[Tensor]) -> tuple[int, int]:
    """Which memory a view lies in, and how many bytes behind its start."""
    last = sum((size - 1) * view.stride(dim) for dim, size in enumerate(view.shape))
    nbytes = (last + 1) * view.element_size()
    for number, memory in enumerate(memories):
        if memory.dim() != 1 or memory.element_size() != 1:
            raise ValueError(
                f"memory {number}: expected a flat tensor of one-byte elements, got "
                f"{memory.dtype} of shape {tuple(memory.shape)}"
            )
        offset = view.data_ptr() - memory.data_ptr()
        if memory.device == view.device and 0 <= offset <= memory.numel() - nbytes:
            return number, offset
    raise ValueError(
        f"{layer}: expected a view of one of the {len(memories)} memories, got one that lies in "
        "none of them as a whole"
    )


def _window(spec: AttentionSpec) -> int | None:
    """What the group keeps, as a region says it: tokens of a window or a chunk."""
    match spec:
        case SlidingWindowSpec():
            return spec.sliding_window
        case ChunkedLocalAttentionSpec():
            return spec.attention_chunk_size
    return None


def _movable(layer: str, spec: KVCacheSpec) -> AttentionSpec:
    if isinstance(spec, FullAttentionSpec | SlidingWindowSpec | ChunkedLocalAttentionSpec):
        return spec
    raise ValueError(
        f"{layer}: expected full, sliding-window or chunked attention, got {type(spec).__name__}, "
        "which keeps no tokens"
    )


def _of(layer: str, what: str, found: Mapping[str, _T]) -> _T:
    if layer not in found:
        raise KeyError(f"{layer}: expected its {what}, got none")
    return found[layer]
