"""Where the bytes of a KV cache lie: one record for every plane of every layer of a rank.

A :class:`Region` is one plane (K, V, both packed, or a latent) of one layer on one rank. The bytes
of (block ``b``, global head ``h``, token ``t`` of the block) are the ``inner_nbytes`` bytes at

    offset + (b * kernel_blocks + t // kernel_tokens) * stride_block
           + (h - head_lo) * stride_head
           + (t % kernel_tokens) * stride_token

in the rank's memory number ``memory``, with ``kernel_tokens = block_tokens // kernel_blocks``. HND,
NHD, K/V outermost, blocks outermost, blocks across layers and packed K and V are all just strides.
"""

from __future__ import annotations

import enum

import msgspec
from msgspec.structs import replace

MAX_NBYTES = 1 << 62
"""No address reaches it, so sums of addresses fit 64 bits in the kernels."""


class Interior(enum.StrEnum):
    """What lies inside the ``inner_nbytes`` of one head and one token.

    Heads and tokens are split only for a named interior. ``opaque`` blocks move whole, between
    equal sides.
    """

    PLAIN = "plain"
    OPAQUE = "opaque"


class Region(msgspec.Struct, frozen=True, kw_only=True):
    """One plane of one layer on one rank; strides and offset in bytes.

    ``window`` is what the group keeps of a request, in tokens: None everything; W lets go of a
    block once none of its tokens is among the W that the next token looks at, itself included.
    """

    layer: str
    plane: str
    group: int
    memory: int
    offset: int
    num_blocks: int
    block_tokens: int
    head_lo: int
    head_hi: int
    inner_nbytes: int
    stride_block: int
    stride_head: int
    stride_token: int
    kernel_blocks: int = 1
    interior: Interior = Interior.PLAIN
    window: int | None = None

    @property
    def kernel_tokens(self) -> int:
        """Tokens of one kernel block."""
        return self.block_tokens // self.kernel_blocks

    @property
    def num_heads(self) -> int:
        """How many heads this rank holds."""
        return self.head_hi - self.head_lo

    @property
    def end(self) -> int:
        """The first byte of the memory behind the region's last one."""
        return (
            self.offset
            + (self.num_blocks * self.kernel_blocks - 1) * self.stride_block
            + (self.num_heads - 1) * self.stride_head
            + (self.kernel_tokens - 1) * self.stride_token
            + self.inner_nbytes
        )

    @property
    def is_dense(self) -> bool:
        """Do the bytes of one kernel block follow each other without a gap?"""
        across_heads = self.num_heads * self.inner_nbytes
        across_tokens = self.kernel_tokens * self.inner_nbytes
        token_major = (self.inner_nbytes, across_heads)
        head_major = (across_tokens, self.inner_nbytes)
        return (self.stride_head, self.stride_token) in (token_major, head_major)

    def address(self, block_id: int, head: int, token: int) -> int:
        """Byte offset in ``memory`` of (block, global head, token of the block).

        Raises IndexError for what the region does not hold.
        """
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(f"block: expected 0 to {self.num_blocks - 1}, got {block_id}")
        if not self.head_lo <= head < self.head_hi:
            raise IndexError(f"head: expected {self.head_lo} to {self.head_hi - 1}, got {head}")
        if not 0 <= token < self.block_tokens:
            raise IndexError(f"token: expected 0 to {self.block_tokens - 1}, got {token}")
        kernel_block, kernel_token = divmod(token, self.kernel_tokens)
        return (
            self.offset
            + (block_id * self.kernel_blocks + kernel_block) * self.stride_block
            + (head - self.head_lo) * self.stride_head
            + kernel_token * self.stride_token
        )


def check_region(region: Region, memory_nbytes: int) -> None:
    """Is this a region that lies in a memory of that size, no byte of it twice?

    Raises ValueError that names the field.
    """
    name = f"region {region.layer}/{region.plane}"
    if not region.layer or not region.plane:
        raise ValueError(f"{name}: expected names of layer and plane, got an empty one")
    for field in ("group", "memory", "offset", "head_lo"):
        if getattr(region, field) < 0:
            raise ValueError(f"{name}: {field}: expected 0 or more, got {getattr(region, field)}")
    for field in (
        *("num_blocks", "block_tokens", "kernel_blocks", "inner_nbytes"),
        *("stride_block", "stride_head", "stride_token"),
    ):
        if getattr(region, field) < 1:
            raise ValueError(f"{name}: {field}: expected 1 or more, got {getattr(region, field)}")
    if region.window is not None and region.window < 1:
        raise ValueError(f"{name}: window: expected 1 or more tokens, got {region.window}")
    if region.block_tokens % region.kernel_blocks:
        raise ValueError(
            f"{name}: block_tokens: expected a multiple of {region.kernel_blocks} kernel blocks, "
            f"got {region.block_tokens}"
        )
    if region.head_hi <= region.head_lo:
        raise ValueError(
            f"{name}: heads: expected head_lo < head_hi, got [{region.head_lo}, {region.head_hi})"
        )
    if region.end > min(memory_nbytes, MAX_NBYTES):
        raise ValueError(
            f"{name}: expected to end within the {memory_nbytes} bytes of memory {region.memory}, "
            f"got byte {region.end}"
        )
    _check_strides(region, name)


def join_planes(first: Region, second: Region) -> Region | None:
    """Both as one region of doubled inner bytes where ``second`` lies right behind ``first``.

    That is: in the same blocks, with the same strides, for every head and token (K then V side by
    side). None if they are not adjacent, or of an interior that must not be looked into.
    """
    adjacent = replace(
        first,
        plane=second.plane,
        offset=first.offset + first.inner_nbytes,
        inner_nbytes=second.inner_nbytes,
    )
    if adjacent != second or first.interior is not Interior.PLAIN:
        return None
    return replace(
        first,
        plane=f"{first.plane}+{second.plane}",
        inner_nbytes=first.inner_nbytes + second.inner_nbytes,
    )


def same_bytes(first: Region, second: Region) -> bool:
    """Are these two names for the same bytes of the same group (layers that share their KV)?"""
    return replace(first, layer=second.layer, plane=second.plane) == second


def _check_strides(region: Region, name: str) -> None:
    """Walk from the smallest stride up: each must step over everything below it."""
    covered = region.inner_nbytes
    dimensions = sorted(
        (
            (region.stride_token, region.kernel_tokens, "stride_token"),
            (region.stride_head, region.num_heads, "stride_head"),
            (region.stride_block, region.num_blocks * region.kernel_blocks, "stride_block"),
        )
    )
    for stride, count, field in dimensions:
        if count == 1:
            continue  # never stepped
        if stride < covered:
            raise ValueError(
                f"{name}: {field}: expected at least the {covered} bytes it steps over, "
                f"got {stride}"
            )
        covered += (count - 1) * stride
