"""Views of one layer over a buffer of bytes: block after block, padding included."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvxfer.cache.specs import DTYPE_NBYTES, AttentionSpec, MambaSpec
from kvxfer.tensors.attention_contract import AttentionBackend
from kvxfer.tensors.cache_shape import cache_shape

LayerCache = Tensor | list[Tensor]
"""What a layer has: a view, or one view for each state."""


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
    """Where the backend puts the blocks of a layer."""
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
    """The bytes of all blocks as elements."""
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
