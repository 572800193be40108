"""Where the bytes of a KV cache lie: one record for every plane of every layer of a rank.

A :class:`Region` is one plane (K, V, both packed, or a latent) of one layer on one rank. The bytes
of (block ``b``, global head ``h``, token ``t`` of the block) are the ``inner_nbytes`` bytes from

    offset + (b * kernel_blocks + t // kernel_tokens) * stride_block
           + (h - head_lo) * stride_head
           + (t % kernel_tokens) * stride_token

in the rank's memory number ``memory``, with ``kernel_tokens = block_tokens // kernel_blocks``. HND,
NHD, K/V outermost, blocks outermost, blocks across layers and packed K and V are all just strides.

In a *compressed* region ``cell_tokens`` tokens share one cell, which is there once the last of them
is computed. Then ``stride_token`` leads from cell to cell, and "token t" above is cell number t.

Where the *channels* of one head and one token lie apart, as in a K plane stored
``[head][channel][token]``, the inner bytes are elements of ``channel_nbytes``, each
``stride_channel`` bytes behind the one before.

A *state* region is one plane of what a recurrent layer keeps of a request: the recurrence, or one
projection's part of the convolution. Its unit is the request. The state after n tokens is in one
block, number ``(n - 1) // state_tokens`` of the request's table, and a "token" of that block is a
step of the convolution, oldest first; a recurrence has one. "Heads" are its heads or groups of
channels, counted over all ranks, so each projection is sharded by itself.

Where context parallelism spreads tokens over ranks (``interleave``), "tokens" above are the rank's
own, in order: see :mod:`kvxfer.transfer.interleave`.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
from msgspec.structs import replace

from kvxfer.transfer.interleave import WHOLE, Interleave

MAX_NBYTES = 1 << 62
"""No address reaches it, so sums of addresses fit 64 bits in the kernels."""
ITEM_NBYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""The types of elements that can be cast, by PyTorch's names."""
SCALE_NBYTES = 4
"""A scale in the cache is a float32."""

_SCALES = 2.0**-64, 2.0**64
"""So that neither a scale nor its reciprocal leaves the normal range of float32."""
Scale = Annotated[float, msgspec.Meta(ge=_SCALES[0], le=_SCALES[1])]


def is_scale(number: float) -> bool:
    """Can it be stated?"""
    return _SCALES[0] <= number <= _SCALES[1]


class Interior(enum.StrEnum):
    """What lies inside the ``inner_nbytes`` of one head and one token.

    Heads and tokens are split only for a named interior. ``opaque`` blocks move whole, between
    equal sides.
    """

    PLAIN = "plain"
    OPAQUE = "opaque"


class Elements(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the elements of a plane stand for: an element times its scale, in float32.

    ``scales``: one for each head of the region, or one for all; none: 1. ``scale_plane``: the plane
    of the same layer that has a float32 scale of each head and token instead.
    """

    dtype: str
    scales: tuple[Scale, ...] = ()
    scale_plane: str = ""


class Region(msgspec.Struct, frozen=True, kw_only=True):
    """One plane of one layer on one rank; strides and offset in bytes.

    ``stride_channel`` 0: the inner bytes of one head and one token are contiguous, and
    ``channel_nbytes`` says nothing. Else they are ``inner_nbytes // channel_nbytes`` elements.

    ``window`` is what the group keeps of a request, in tokens: None everything; W lets go of a
    block once none of its tokens is among the W that the next token looks at, itself included.
    ``is_chunk``: the next token looks at its own chunk of W tokens instead, up to itself. That is
    never more than the window, so a peer that does not know the field takes it for a window, and is
    refused where it would need more.

    ``elements``: of an engine that allows casts, where it knows them.

    ``state_tokens``: of a state region, how many tokens lie between two blocks of its table.

    ``is_draft``: of a draft's layer, which only says what the model may say. It stays empty where
    the source has no draft.

    ``cell_tokens``: of a compressed region, how many tokens share one cell.
    ``interleave``: which tokens the rank keeps, where it does not keep all.
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
    channel_nbytes: int = 0
    stride_channel: int = 0
    elements: Elements | msgspec.UnsetType = msgspec.UNSET
    state_tokens: int | msgspec.UnsetType = msgspec.UNSET
    is_draft: bool | msgspec.UnsetType = msgspec.UNSET
    cell_tokens: int | msgspec.UnsetType = msgspec.UNSET
    is_chunk: bool | msgspec.UnsetType = msgspec.UNSET
    interleave: Interleave | msgspec.UnsetType = msgspec.UNSET

    @property
    def kept(self) -> Interleave:
        """Which tokens of a request the rank keeps."""
        return self.interleave or WHOLE

    @property
    def table_tokens(self) -> int:
        """Tokens of a request for which a block stands in its table."""
        return self.block_tokens * self.kept.size

    @property
    def is_state(self) -> bool:
        return self.state_tokens is not msgspec.UNSET

    @property
    def block_cells(self) -> int:
        """Cells of one head: as many as tokens, but of a compressed region."""
        return self.block_tokens // (self.cell_tokens or 1)

    @property
    def kernel_cells(self) -> int:
        return self.block_cells // self.kernel_blocks

    @property
    def num_heads(self) -> int:
        return self.head_hi - self.head_lo

    @property
    def has_channels_apart(self) -> bool:
        """Do other bytes lie between the inner bytes of one head and one token?"""
        return (
            0 < self.channel_nbytes < self.inner_nbytes
            and self.stride_channel != self.channel_nbytes
            and self.stride_channel != 0
        )

    @property
    def num_channels(self) -> int:
        """How many pieces the inner bytes of one head and one token are in."""
        return self.inner_nbytes // self.channel_nbytes if self.has_channels_apart else 1

    @property
    def end(self) -> int:
        """The first byte of the memory behind the region's last one."""
        piece_nbytes = self.inner_nbytes // self.num_channels
        return (
            self.offset
            + (self.num_blocks * self.kernel_blocks - 1) * self.stride_block
            + (self.num_heads - 1) * self.stride_head
            + (self.kernel_cells - 1) * self.stride_token
            + (self.num_channels - 1) * self.stride_channel
            + piece_nbytes
        )

    @property
    def is_dense(self) -> bool:
        """Do the bytes of one kernel block follow each other without a gap?"""
        covered = self.inner_nbytes // self.num_channels
        for stride, count, _ in _block_dimensions(self):
            if count > 1 and stride != covered:
                return False
            covered *= count
        return True

    def address(self, block_id: int, head: int, token: int) -> int:
        """Byte offset in ``memory`` of the cell of (block, global head, token of the block): of
        its first channel where channels lie apart.

        Raises IndexError for what the region does not hold.
        """
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(f"block: expected 0 to {self.num_blocks - 1}, got {block_id}")
        if not self.head_lo <= head < self.head_hi:
            raise IndexError(f"head: expected {self.head_lo} to {self.head_hi - 1}, got {head}")
        if not 0 <= token < self.block_tokens:
            raise IndexError(f"token: expected 0 to {self.block_tokens - 1}, got {token}")
        cell = token // (self.cell_tokens or 1)
        kernel_block, kernel_cell = divmod(cell, self.kernel_cells)
        return (
            self.offset
            + (block_id * self.kernel_blocks + kernel_block) * self.stride_block
            + (head - self.head_lo) * self.stride_head
            + kernel_cell * self.stride_token
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
    if region.is_chunk and region.window is None:
        raise ValueError(f"{name}: window: expected the tokens of a chunk, got none")
    if region.block_tokens % region.kernel_blocks:
        raise ValueError(
            f"{name}: block_tokens: expected a multiple of {region.kernel_blocks} kernel blocks, "
            f"got {region.block_tokens}"
        )
    if region.head_hi <= region.head_lo:
        raise ValueError(
            f"{name}: heads: expected head_lo < head_hi, got [{region.head_lo}, {region.head_hi})"
        )
    _check_channels(region, name)
    if not isinstance(region.state_tokens, msgspec.UnsetType):
        _check_state(region, region.state_tokens, name)
    if not isinstance(region.cell_tokens, msgspec.UnsetType):
        _check_cells(region, region.cell_tokens, name)
    if region.interleave:
        _check_interleave(region, region.interleave, name)
    if region.elements and len(region.elements.scales) not in (0, 1, region.num_heads):
        raise ValueError(
            f"{name}: scales: expected none, one or one for each of {region.num_heads} heads, got "
            f"{len(region.elements.scales)}"
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
    side). None if they are not adjacent, have channels apart, or are of an interior that must not
    be looked into.
    """
    if first.has_channels_apart or second.has_channels_apart:
        return None
    first, second = _contiguous(first), _contiguous(second)
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
    ours, theirs = _contiguous(first), _contiguous(second)
    return replace(ours, layer=theirs.layer, plane=theirs.plane) == theirs


def _contiguous(region: Region) -> Region:
    """The region as bytes, in the one spelling that those without channels apart have."""
    region = replace(region, elements=msgspec.UNSET, is_draft=msgspec.UNSET)
    if region.has_channels_apart:
        return region
    return replace(region, channel_nbytes=0, stride_channel=0)


def _block_dimensions(region: Region) -> list[tuple[int, int, str]]:
    """(stride, count, field) within one kernel block, from the smallest stride up."""
    return sorted(
        (
            (region.stride_channel, region.num_channels, "stride_channel"),
            (region.stride_token, region.kernel_cells, "stride_token"),
            (region.stride_head, region.num_heads, "stride_head"),
        )
    )


def _check_state(region: Region, state_tokens: int, name: str) -> None:
    if state_tokens < 1:
        raise ValueError(f"{name}: state_tokens: expected 1 or more, got {state_tokens}")
    if region.window is not None or region.kernel_blocks != 1:
        raise ValueError(
            f"{name}: expected a state without a window, in one kernel block, got a window of "
            f"{region.window} in {region.kernel_blocks}"
        )
    if region.interior is not Interior.PLAIN or region.elements:
        raise ValueError(
            f"{name}: expected a state with interior plain and no elements to cast, got interior "
            f"{region.interior.value} and {region.elements}"
        )


def _check_interleave(region: Region, interleave: Interleave, name: str) -> None:
    if interleave.index >= interleave.size or region.block_tokens % interleave.run:
        raise ValueError(
            f"{name}: interleave: expected an index below its size, and runs that fill blocks of "
            f"{region.block_tokens} tokens, got {interleave}"
        )
    if region.window is not None or region.is_state or region.cell_tokens:
        kept = "a state" if region.is_state else f"a window of {region.window} tokens"
        if region.cell_tokens:
            kept = f"cells of {region.cell_tokens} tokens"
        raise ValueError(
            f"{name}: interleave: expected none where a layer keeps {kept}, got {interleave}"
        )


def _check_cells(region: Region, cell_tokens: int, name: str) -> None:
    if cell_tokens < 2 or region.block_tokens % (region.kernel_blocks * cell_tokens):
        raise ValueError(
            f"{name}: cell_tokens: expected 2 or more that divide the "
            f"{region.block_tokens // region.kernel_blocks} tokens of a kernel block, got "
            f"{cell_tokens}"
        )
    if region.is_state or region.interior is not Interior.PLAIN:
        raise ValueError(
            f"{name}: cell_tokens: expected none of a state or an interior that is "
            f"{Interior.OPAQUE.value}, got {cell_tokens}"
        )


def _check_channels(region: Region, name: str) -> None:
    for field in ("channel_nbytes", "stride_channel"):
        if getattr(region, field) < 0:
            raise ValueError(f"{name}: {field}: expected 0 or more, got {getattr(region, field)}")
    if region.stride_channel == 0 and region.channel_nbytes == 0:
        return
    if region.interior is not Interior.PLAIN:
        raise ValueError(
            f"{name}: stride_channel: expected 0 where the interior is {region.interior.value}, "
            f"got {region.stride_channel} for channels of {region.channel_nbytes} bytes"
        )
    if region.channel_nbytes == 0 or region.inner_nbytes % region.channel_nbytes:
        raise ValueError(
            f"{name}: channel_nbytes: expected a divisor of the {region.inner_nbytes} inner bytes, "
            f"got {region.channel_nbytes}"
        )


def _check_strides(region: Region, name: str) -> None:
    """Walk from the smallest stride up: each must step over everything below it."""
    covered = region.inner_nbytes // region.num_channels
    blocks = (region.stride_block, region.num_blocks * region.kernel_blocks, "stride_block")
    for stride, count, field in sorted((*_block_dimensions(region), blocks)):
        if count == 1:
            continue  # never stepped
        if stride < covered:
            raise ValueError(
                f"{name}: {field}: expected at least the {covered} bytes it steps over, "
                f"got {stride}"
            )
        covered += (count - 1) * stride
