"""The KV pool of one rank: one buffer of bytes, carved into one view per layer in the attention's
physical order.

``HND``  [2, num_blocks, heads, block_tokens, head_size]: K and V outermost; a kernel block is
         a block.
``NHD``  [num_kernel_blocks, 2, kernel_tokens, heads, head_size]: blocks outermost; a block is
         ``kernel_blocks`` consecutive kernel blocks of the largest size of 8, 16, 32, 64 that
         divides it (24 is three of 8).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvxfer.transfer.layout import Region

NHD_KERNEL_TOKENS = (64, 32, 16, 8)
PLANES = ("k", "v")


class PoolLayout(enum.StrEnum):
    """Physical order of a layer's KV."""

    HND = "HND"
    NHD = "NHD"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPoolSpec:
    """The shape of a rank's pool. Heads are global: the rank stores ``[head_lo, head_hi)`` of the
    model's KV heads.
    """

    layout: PoolLayout
    layer_names: tuple[str, ...]
    num_blocks: int
    block_tokens: int
    head_lo: int
    head_hi: int
    head_size: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.block_tokens <= 0 or self.block_tokens % 8:
            raise ValueError(
                f"block_tokens: expected a positive multiple of 8, got {self.block_tokens}"
            )
        if self.num_blocks <= 0:
            raise ValueError(f"num_blocks: expected more than 0, got {self.num_blocks}")
        if not 0 <= self.head_lo < self.head_hi:
            raise ValueError(
                f"heads: expected 0 <= head_lo < head_hi, got [{self.head_lo}, {self.head_hi})"
            )
        if len(set(self.layer_names)) != len(self.layer_names):
            raise ValueError(f"layer_names: expected distinct names, got {self.layer_names}")

    @property
    def kernel_tokens(self) -> int:
        """Tokens of one kernel block."""
        if self.layout is PoolLayout.HND:
            return self.block_tokens
        return next(size for size in NHD_KERNEL_TOKENS if self.block_tokens % size == 0)

    @property
    def kernel_blocks(self) -> int:
        """Kernel blocks of one block."""
        return self.block_tokens // self.kernel_tokens

    @property
    def layer_shape(self) -> tuple[int, int, int, int, int]:
        """Physical shape of one layer's view."""
        num_heads = self.head_hi - self.head_lo
        if self.layout is PoolLayout.HND:
            return (2, self.num_blocks, num_heads, self.block_tokens, self.head_size)
        num_kernel_blocks = self.num_blocks * self.kernel_blocks
        return (num_kernel_blocks, 2, self.kernel_tokens, num_heads, self.head_size)

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block of one layer, K and V."""
        num_heads = self.head_hi - self.head_lo
        return 2 * self.block_tokens * num_heads * self.head_size * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class KVPool:
    """A rank's pool: the buffer, its layers as views of it, and where their bytes lie."""

    spec: KVPoolSpec
    buffer: Tensor
    layers: Mapping[str, Tensor]
    regions: tuple[Region, ...]


def kv_pool_nbytes(spec: KVPoolSpec) -> int:
    """Bytes of the whole pool, all layers."""
    return len(spec.layer_names) * spec.num_blocks * spec.block_nbytes


def allocate_kv_pool(
    spec: KVPoolSpec,
    allocator: Callable[[int], Tensor] | None = None,
    *,
    memory: int = 0,
) -> KVPool:
    """Take one buffer from ``allocator(nbytes)`` and carve it.

    The allocator returns a contiguous one-dimensional uint8 tensor of at least ``nbytes`` (a
    shared-memory pool, say); its content is left as it is. Default: zeroed memory of this process.
    ``memory`` is the number that the regions give to the buffer.
    """
    nbytes = kv_pool_nbytes(spec)
    buffer = (allocator or _zeroed)(nbytes)
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise ValueError(
            "allocator: expected a contiguous one-dimensional uint8 tensor, "
            f"got {buffer.dtype} of shape {tuple(buffer.shape)}"
        )
    if buffer.numel() < nbytes:
        raise ValueError(f"allocator: expected at least {nbytes} bytes, got {buffer.numel()}")
    if buffer.data_ptr() % spec.dtype.itemsize:
        raise ValueError(
            f"allocator: expected memory aligned to {spec.dtype.itemsize} bytes, got "
            f"{buffer.data_ptr():#x}"
        )
    layer_nbytes = spec.num_blocks * spec.block_nbytes
    layers = {
        name: buffer[index * layer_nbytes : (index + 1) * layer_nbytes]
        .view(spec.dtype)
        .view(spec.layer_shape)
        for index, name in enumerate(spec.layer_names)
    }
    return KVPool(spec, buffer, layers, regions_of(layers, spec, buffer, memory=memory))


def regions_of(
    layers: Mapping[str, Tensor], spec: KVPoolSpec, buffer: Tensor, *, memory: int = 0
) -> tuple[Region, ...]:
    """Two regions, K then V, per layer; strides are the view's own, offsets count from the buffer's
    first byte.
    """
    return tuple(
        _region(name, plane, view, spec, buffer, memory)
        for name, view in layers.items()
        for plane in range(len(PLANES))
    )


def plane_of(view: Tensor, plane: int, layout: PoolLayout) -> Tensor:
    """One plane (0: K, 1: V) of a layer as [kernel blocks, kernel_tokens, heads, head_size],
    whatever its layout.
    """
    return view[plane].transpose(1, 2) if layout is PoolLayout.HND else view[:, plane]


def _region(
    name: str, plane: int, view: Tensor, spec: KVPoolSpec, buffer: Tensor, memory: int
) -> Region:
    if tuple(view.shape) != spec.layer_shape or view.dtype != spec.dtype:
        raise ValueError(
            f"{name}: expected {spec.dtype} of shape {spec.layer_shape}, got {view.dtype} of "
            f"shape {tuple(view.shape)}"
        )
    if view.stride(-1) != 1:
        raise ValueError(
            f"{name}: expected contiguous values within a head, got stride {view.stride(-1)}"
        )
    tokens = plane_of(view, plane, spec.layout)
    itemsize = spec.dtype.itemsize
    stride_block, stride_token, stride_head = (tokens.stride(dim) * itemsize for dim in (0, 1, 2))
    offset = tokens.data_ptr() - buffer.data_ptr()
    last = sum((tokens.shape[dim] - 1) * tokens.stride(dim) for dim in range(4))
    if offset < 0 or offset + (last + 1) * itemsize > buffer.numel():
        raise ValueError(
            f"{name}: expected a view of the buffer of {buffer.numel()} bytes, got one that "
            "lies outside"
        )
    return Region(
        layer=name,
        plane=PLANES[plane],
        group=0,
        memory=memory,
        offset=offset,
        num_blocks=spec.num_blocks,
        block_tokens=spec.block_tokens,
        head_lo=spec.head_lo,
        head_hi=spec.head_hi,
        inner_nbytes=spec.head_size * itemsize,
        stride_block=stride_block,
        stride_head=stride_head,
        stride_token=stride_token,
        kernel_blocks=spec.kernel_blocks,
    )


def _zeroed(nbytes: int) -> Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)
