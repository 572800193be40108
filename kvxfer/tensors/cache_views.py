"""What a backend states for a layer's cache, and views in that shape over a buffer of bytes: block
after block, padding included.

Backends say shape and order and nothing else, so the meaning of a dimension is found by asking for
two shapes that differ in one size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvxfer.cache.specs import DTYPE_NBYTES, AttentionSpec, MambaSpec
from kvxfer.tensors.attention import AttentionBackend

LayerCache = Tensor | list[Tensor]
"""What a layer has: a view, or one view for each state."""

# A prime that no cache has as one of its other sizes: the dimension that has it counts the blocks.
_MANY_BLOCKS = 1_234_577


@dataclass(frozen=True, slots=True)
class _CacheShape:
    """A layer's cache as its backend states it.

    ``shape`` is logical, ``stride_order`` its dimensions from the outermost in memory to the
    innermost, ``block_dim`` the one that counts kernel blocks.
    """

    shape: tuple[int, ...]
    stride_order: tuple[int, ...]
    block_dim: int

    @property
    def num_outer(self) -> int:
        """In how many pieces a block lies because of dimensions outside the blocks (K and V: 2)."""
        outside = self.stride_order[: self.stride_order.index(self.block_dim)]
        return math.prod(self.shape[dim] for dim in outside)

    @property
    def piece_numel(self) -> int:
        return math.prod(self.shape) // self.shape[self.block_dim] // self.num_outer

    def strides(self, piece_stride: int) -> tuple[int, ...]:
        """Elements from one index to the next, by logical dimension, where a piece begins
        ``piece_stride`` elements behind the one of the kernel block before.
        """
        strides = [0] * len(self.shape)
        step = 1
        for dim in reversed(self.stride_order):
            if dim == self.block_dim:
                step = piece_stride
            strides[dim] = step
            step *= self.shape[dim]
        return tuple(strides)


@dataclass(frozen=True, slots=True)
class CacheDims:
    """None where there is none; ``plane`` counts K and V."""

    block: int
    token: int
    head: int | None
    channel: int
    plane: int | None


def cache_shape(
    backend: type[AttentionBackend], num_kernel_blocks: int, kernel_tokens: int, spec: AttentionSpec
) -> _CacheShape:
    """What the backend states for ``num_kernel_blocks`` blocks of ``kernel_tokens`` tokens.

    Raises ValueError that names the backend if it has no dimension of blocks, or an order that is
    none of its dimensions.
    """
    block_dim = find_block_dim(backend, kernel_tokens, spec)
    shape = _shape(backend, num_kernel_blocks, kernel_tokens, spec.num_kv_heads, spec.head_size)
    return _CacheShape(shape, _stride_order(backend, len(shape)), block_dim)


def find_block_dim(backend: type[AttentionBackend], kernel_tokens: int, spec: AttentionSpec) -> int:
    """The logical dimension that counts kernel blocks; ValueError if there is not exactly one."""
    shape = _shape(backend, _MANY_BLOCKS, kernel_tokens, spec.num_kv_heads, spec.head_size)
    if shape.count(_MANY_BLOCKS) != 1:
        raise ValueError(
            f"{backend.get_name()}: expected one dimension that counts blocks, got shape {shape} "
            f"for {_MANY_BLOCKS} blocks"
        )
    return shape.index(_MANY_BLOCKS)


def find_dims(
    backend: type[AttentionBackend], kernel_tokens: int, spec: AttentionSpec
) -> CacheDims:
    """What each logical dimension means.

    Raises ValueError that names the backend where tokens, heads and head sizes do not have
    dimensions of their own.
    """
    block = find_block_dim(backend, kernel_tokens, spec)
    token = _grown_dim(backend, kernel_tokens, spec, "block_size")
    head = _grown_dim(backend, kernel_tokens, spec, "num_kv_heads")
    channel = _grown_dim(backend, kernel_tokens, spec, "head_size")
    named = [dim for dim in (block, token, head, channel) if dim is not None]
    shape = _shape(backend, 1, kernel_tokens, spec.num_kv_heads, spec.head_size)
    others = [dim for dim in range(len(shape)) if dim not in named]
    if token is None or channel is None or len(set(named)) != len(named) or len(others) > 1:
        raise ValueError(
            f"{backend.get_name()}: expected separate dimensions of blocks, tokens, heads and "
            f"head size, and at most one more (K and V), got shape {shape} for 1 block of "
            f"{kernel_tokens} tokens, {spec.num_kv_heads} heads of {spec.head_size}"
        )
    return CacheDims(block, token, head, channel, others[0] if others else None)


def _grown_dim(
    backend: type[AttentionBackend], kernel_tokens: int, spec: AttentionSpec, size: str
) -> int | None:
    """The dimension that doubles with ``size``; None if nothing changes."""
    sizes = {
        "block_size": kernel_tokens,
        "num_kv_heads": spec.num_kv_heads,
        "head_size": spec.head_size,
    }
    before = _shape(backend, 1, *sizes.values())
    sizes[size] *= 2
    after = _shape(backend, 1, *sizes.values())
    if before == after:
        return None
    changed = [dim for dim in range(len(before)) if before[dim] != after[dim]]
    if len(changed) != 1 or after[changed[0]] != 2 * before[changed[0]]:
        raise ValueError(
            f"{backend.get_name()}: expected one dimension to double with {size}, got shapes "
            f"{before} and {after}"
        )
    return changed[0]


def _shape(
    backend: type[AttentionBackend],
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
) -> tuple[int, ...]:
    return tuple(backend.get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size))


def _stride_order(backend: type[AttentionBackend], num_dims: int) -> tuple[int, ...]:
    try:
        order = tuple(backend.get_kv_cache_stride_order())
    except (AttributeError, NotImplementedError):
        return tuple(range(num_dims))  # how the field's backends say that it is the logical one
    if sorted(order) != list(range(num_dims)):
        raise ValueError(
            f"{backend.get_name()}: expected a stride order of the dimensions 0 to "
            f"{num_dims - 1}, got {order}"
        )
    return order


@dataclass(frozen=True, slots=True)
class Place:
    """Where a layer puts its blocks: ``num_pieces`` runs over all blocks, one behind the other,
    each with an equal share of every block.
    """

    block_nbytes: int
    num_pieces: int

    def __str__(self) -> str:
        return f"blocks of {self.block_nbytes} bytes in {self.num_pieces} piece(s)"


def place_of(spec: AttentionSpec, kernel_tokens: int, backend: type[AttentionBackend]) -> Place:
    return Place(spec.page_size_bytes, cache_shape(backend, 1, kernel_tokens, spec).num_outer)


def attention_view(
    layer: str,
    raw: Tensor,
    spec: AttentionSpec,
    num_blocks: int,
    kernel_tokens: int,
    backend: type[AttentionBackend],
) -> Tensor:
    """A layer's cache in the backend's logical shape over its physical order.

    Raises ValueError that names the layer for kernel blocks that do not divide the block, a backend
    whose blocks have other bytes than the spec's, padding that cannot be divided among the pieces
    of a block, and a buffer that is too small.
    """
    if kernel_tokens < 1 or spec.block_size % kernel_tokens:
        raise ValueError(
            f"{layer}: kernel block: expected tokens that divide the block of {spec.block_size}, "
            f"got {kernel_tokens}"
        )
    kernel_blocks = spec.block_size // kernel_tokens
    stated = cache_shape(backend, num_blocks * kernel_blocks, kernel_tokens, spec)
    itemsize = DTYPE_NBYTES[spec.dtype]
    num_pieces = stated.num_outer * kernel_blocks
    content_nbytes = stated.piece_numel * itemsize * num_pieces
    if content_nbytes != spec.unpadded_page_size_bytes:
        raise ValueError(
            f"{layer}: expected {spec.unpadded_page_size_bytes} bytes in a block, as its spec "
            f"says, got {content_nbytes} in shape {stated.shape} of {backend.get_name()}"
        )
    piece_nbytes, rest = divmod(spec.page_size_bytes, num_pieces)
    if rest or piece_nbytes % itemsize:
        raise ValueError(
            f"{layer}: page_size_padded: expected bytes that {num_pieces} pieces of a block "
            f"({stated.num_outer} planes outside the blocks, {kernel_blocks} kernel blocks) share "
            f"equally in whole elements of {itemsize} bytes, got {spec.page_size_bytes}; pad to a "
            f"multiple of {num_pieces * itemsize}"
        )
    flat = _elements(layer, raw, spec.page_size_bytes, num_blocks, spec.dtype)
    return flat.as_strided(
        stated.shape, stated.strides(piece_nbytes // itemsize), flat.storage_offset()
    )


def state_views(layer: str, raw: Tensor, spec: MambaSpec, num_blocks: int) -> list[Tensor]:
    """One view ``[num_blocks, *shape]`` for each state; in a block they follow each other.

    Raises ValueError that names the layer where a state would not begin at a whole element, and for
    a buffer that is too small.
    """
    views: list[Tensor] = []
    offset_nbytes = 0
    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        itemsize = DTYPE_NBYTES[dtype]
        if offset_nbytes % itemsize or spec.page_size_bytes % itemsize:
            raise ValueError(
                f"{layer}: state {len(views)}: expected blocks and the states before it to be "
                f"multiples of {itemsize} bytes, got {spec.page_size_bytes} and {offset_nbytes}; "
                "order the states by the size of their elements, and pad"
            )
        flat = _elements(layer, raw, spec.page_size_bytes, num_blocks, dtype)
        strides = (spec.page_size_bytes // itemsize, *torch.empty(shape, device="meta").stride())
        views.append(
            flat.as_strided(
                (num_blocks, *shape), strides, flat.storage_offset() + offset_nbytes // itemsize
            )
        )
        offset_nbytes += math.prod(shape) * itemsize
    return views


def _elements(layer: str, raw: Tensor, block_nbytes: int, num_blocks: int, dtype: str) -> Tensor:
    if raw.dim() != 1 or raw.element_size() != 1 or not raw.is_contiguous():
        raise ValueError(
            f"{layer}: expected a flat buffer of bytes, got {raw.dtype} of shape {tuple(raw.shape)}"
        )
    nbytes = num_blocks * block_nbytes
    if raw.numel() < nbytes:
        raise ValueError(
            f"{layer}: expected a buffer of {nbytes} bytes for {num_blocks} blocks of "
            f"{block_nbytes}, got {raw.numel()}"
        )
    return raw[:nbytes].view(getattr(torch, dtype))
