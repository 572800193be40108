"""What a sink asks one source rank for, and what that gives. Pure.

A source takes nothing in a Pull on trust: :class:`PullResolver` looks every name, head range, size
and token range up in its own regions, and bounds everything that is later counted over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from msgspec import UNSET
from msgspec.structs import replace

from kvxfer.errors import ProtocolError
from kvxfer.transfer.casts import cast_nbytes, elements_problem, scale_problem
from kvxfer.transfer.interleave import WHOLE
from kvxfer.transfer.layout import Interior, Region, join_planes
from kvxfer.transfer.manifest import RankManifest
from kvxfer.transfer.plan import (
    ALL,
    CopyClass,
    PullClass,
    RegionName,
    Side,
    cast_order,
    cast_side,
    geometry_of,
    join_sides,
    plain_side,
    shared_by,
)

MAX_CHUNK_NBYTES = 64 << 20
_MAX_TOKENS = 1 << 31
_MAX_KNOWN = 64
"""Sinks that ask for different things of one source rank, before it forgets what was found."""
_MAX_BLOCK_CHANNELS = 1 << 22
"""Channels of all heads and tokens of one kernel block, where they are apart. 128 tokens of 8 heads
of 128 channels are 2^17.
"""


class BlockIdsError(ProtocolError, ValueError):
    """Too few, absent (-1) or not in the pool. From a Grant or a caller, hence both bases."""


class PullResolver:
    """What one source rank gives for the classes of a Pull.

    A sink asks for the same regions, heads and order in every Pull; only the tokens differ. So what
    was found for the last sinks is kept: for the 32 layers of an 8B model it takes 0.3 ms.
    """

    def __init__(self, manifest: RankManifest) -> None:
        self.manifest = manifest
        self._regions = {(region.layer, region.plane): region for region in manifest.regions}
        self._found = lru_cache(maxsize=_MAX_KNOWN)(self._find)

    def resolve(self, classes: Sequence[PullClass]) -> tuple[Side, ...]:
        """This rank's side of each. Raises ProtocolError for what it does not give."""
        like: list[PullClass] = []
        for index, wanted in enumerate(classes):
            problem = _sizes_problem(wanted)
            if problem is not None:
                raise ProtocolError(f"class {index}: {problem}")
            state_of = UNSET if wanted.state_of is UNSET else 0
            like.append(replace(wanted, token_lo=0, token_hi=0, state_of=state_of))
        found = self._found(tuple(like))
        for index, ((_, first), wanted) in enumerate(zip(found, classes, strict=True)):
            problem = _tokens_problem(first, wanted)
            if problem is not None:
                raise ProtocolError(f"{_name(f'class {index}', wanted.regions[0])}: {problem}")
        return tuple(side for side, _ in found)

    def _find(self, classes: tuple[PullClass, ...]) -> tuple[tuple[Side, Region], ...]:
        asked: set[tuple[str, str]] = set()
        return tuple(
            _resolve(f"class {index}", self._regions, asked, wanted)
            for index, wanted in enumerate(classes)
        )


def route_nbytes(classes: Sequence[PullClass]) -> int:
    return sum(
        len(wanted.regions) * (wanted.token_hi - wanted.token_lo) * token_nbytes(wanted)
        for wanted in classes
    )


def block_chunk_nbytes(classes: Sequence[PullClass]) -> int:
    """The largest chunk that cannot be cut: a kernel block of the sink, of one region."""
    return max((each.order.kernel_tokens * token_nbytes(each) for each in classes), default=0)


def check_ids(side: Side, block_ids: Sequence[int], token_lo: int, token_hi: int) -> None:
    """Is there a block of the pool for every token of ``[token_lo, token_hi)``?

    ``block_ids``: of the side's group, positional from the request's first token, -1 for none.
    Raises BlockIdsError (a ProtocolError and a ValueError) that names the position.
    """
    if not 0 <= token_lo <= token_hi:
        raise BlockIdsError(f"span: expected 0 <= lo <= hi, got [{token_lo}, {token_hi})")
    if token_lo == token_hi:
        return
    pool = side.stripe or side.tile
    first, end = token_lo // pool.block_tokens, -(-token_hi // pool.block_tokens)
    if side.stripe:
        first, end = side.stripe.blocks(token_lo, token_hi)
    if end > len(block_ids):
        raise BlockIdsError(
            f"block ids of group {side.group}: expected at least {end} for {token_hi} tokens in "
            f"blocks of {pool.block_tokens}, got {len(block_ids)}"
        )
    needed = block_ids[first:end]
    if min(needed) >= 0 and max(needed) < pool.num_blocks:
        return
    position = next(
        index for index, block in enumerate(needed, first) if not 0 <= block < pool.num_blocks
    )
    raise BlockIdsError(
        f"block ids of group {side.group}: position {position}: "
        f"expected 0 to {pool.num_blocks - 1}, got {block_ids[position]}"
        + (", no block" if block_ids[position] == -1 else "")
    )


def check_table(
    side: Side, block_ids: Sequence[Sequence[int]], token_lo: int, token_hi: int
) -> None:
    """The same for a block table, of which the side's group is looked at. Raises ProtocolError."""
    if not 0 <= side.group < len(block_ids):
        raise ProtocolError(
            f"block ids: expected {side.group + 1} groups or more, got {len(block_ids)}"
        )
    check_ids(side, block_ids[side.group], token_lo, token_hi)


def pull_class(copy_class: CopyClass, lo: int, hi: int) -> PullClass:
    """What to ask for of one class: request tokens ``[lo, hi)``, perhaps none. An opaque class
    moves whole blocks: its last one is rounded up, its first must begin at a block. A state moves
    whole, that after the span's last token. Of a compressed class the cells move whose last token
    is in the span. Raises ValueError that names the group.
    """
    tile, group = copy_class.sink.tile, copy_class.sink.group
    if not 0 <= lo <= hi <= _MAX_TOKENS:
        raise ValueError(f"span of group {group}: expected 0 <= lo <= hi, got [{lo}, {hi})")
    state_of = hi if copy_class.sink.state_tokens else UNSET
    if copy_class.sink.state_tokens:
        lo, hi = 0, tile.block_tokens if lo < hi else 0
    # A cell that begins before the span has no last token there, so the sink has not made it.
    cell_tokens = copy_class.sink.cell_tokens
    lo, hi = lo // cell_tokens, hi // cell_tokens
    if tokens := shared_by(copy_class.interleaves):
        lo, hi = tokens.count(lo), tokens.count(hi)
    if copy_class.interior is Interior.OPAQUE and lo < hi:
        if lo % tile.block_tokens:
            raise ValueError(
                f"span of group {group}: opaque blocks move whole: expected a start at a multiple "
                f"of {tile.block_tokens} tokens, got {lo}"
            )
        hi = -(-hi // tile.block_tokens) * tile.block_tokens
    chunk = copy_class.source.chunk
    return PullClass(
        regions=copy_class.names,
        head_lo=copy_class.head_lo,
        head_hi=copy_class.head_hi,
        inner_nbytes=copy_class.sink.dense_inner_nbytes,
        order=copy_class.sink.order,
        token_lo=lo,
        token_hi=hi,
        cast=chunk if chunk is not None and copy_class.source.is_cast else UNSET,
        state_of=state_of,
        cell_tokens=cell_tokens if cell_tokens > 1 else UNSET,
        interleaves=copy_class.interleaves,
    )


def open_to(asked: PullClass, open_tokens: int, whole: int = 1) -> int:
    """Where the part of a class ends that is there with so many tokens of an offer, ALL: with all
    of them. A state is there with the last one, and a block that moves ``whole`` when it is full.
    """
    if asked.is_state and open_tokens < ALL:
        return asked.token_lo
    if open_tokens < ALL:
        open_tokens = asked.count(open_tokens) // whole * whole
    return max(asked.token_lo, min(asked.token_hi, open_tokens))


def _resolve(
    where: str,
    regions: Mapping[tuple[str, str], Region],
    asked: set[tuple[str, str]],
    wanted: PullClass,
) -> tuple[Side, Region]:
    joined = [_joined(where, regions, asked, name) for name in wanted.regions]
    sides: list[Side] = []
    for name, region in zip(wanted.regions, joined, strict=True):
        problem = _region_problem(region, wanted)
        if problem is not None:
            raise ProtocolError(f"{_name(where, name)}: {problem}")
        if wanted.cast:
            sides.append(_cast_side(_name(where, name), regions, region, wanted))
        else:
            channel_nbytes = wanted.order.channel_nbytes
            tokens = shared_by(wanted.interleaves)
            sides.append(plain_side(region, wanted.head_lo, wanted.head_hi, channel_nbytes, tokens))
        if geometry_of(sides[-1]) != geometry_of(sides[0]):
            raise ProtocolError(
                f"{where}: expected regions of one geometry and group, "
                f"got {wanted.regions[0].layer} and {name.layer}"
            )
    side = join_sides(sides)
    return (replace(side, chunk=wanted.cast) if wanted.cast else side), joined[0]


def _cast_side(
    where: str, regions: Mapping[tuple[str, str], Region], region: Region, wanted: PullClass
) -> Side:
    """Of a region that is cast here, before it travels."""
    elements, cast = region.elements, wanted.cast
    assert cast
    if not elements:
        raise ProtocolError(
            f"{where}: cast: expected none, for allow_cast is off, got {cast.dtype}"
        )
    scale = regions.get((region.layer, elements.scale_plane))
    problem = elements_problem("source", region)
    if elements.scale_plane:
        problem = problem or scale_problem("source", region, scale)
        if wanted.interleaves and wanted.interleaves[0] != wanted.interleaves[1]:
            problem = "expected equal interleaves of what has a scale of each token"
    num_heads, num_scales = wanted.head_hi - wanted.head_lo, {len(each) for each in cast.scales}
    if cast.scales and (
        len(cast.scales) != len(wanted.regions) or not num_scales <= {1, num_heads}
    ):
        problem = (
            f"expected a scale, or one for each of {num_heads} heads, of {len(wanted.regions)} "
            f"regions, got {sorted(num_scales)} of {len(cast.scales)}"
        )
    if wanted.order != cast_order(wanted.order):
        problem = f"expected a chunk token by token, got {wanted.order}"
    if problem:
        raise ProtocolError(f"{where}: cast: {problem}")
    tokens = shared_by(wanted.interleaves)
    return cast_side(region, wanted.head_lo, wanted.head_hi, scale, tokens)


def _name(where: str, name: RegionName) -> str:
    return f"{where}: {name.layer}/{'+'.join(name.planes)}"


def _joined(
    where: str,
    regions: Mapping[tuple[str, str], Region],
    asked: set[tuple[str, str]],
    name: RegionName,
) -> Region:
    """The region of that name, its planes joined; each plane may be asked for once in a Pull."""
    if not name.planes:
        raise ProtocolError(f"{where}: {name.layer}: expected at least one plane, got none")
    for plane in name.planes:
        if (name.layer, plane) not in regions:
            raise ProtocolError(f"{where}: no region {name.layer}/{plane} on this rank")
        if (name.layer, plane) in asked:
            raise ProtocolError(f"{where}: {name.layer}/{plane}: expected once, got it again")
        asked.add((name.layer, plane))
    joined = regions[name.layer, name.planes[0]]
    for plane in name.planes[1:]:
        wider = join_planes(joined, regions[name.layer, plane])
        if wider is None:
            raise ProtocolError(
                f"{where}: {name.layer}: expected planes that lie side by side, got {name.planes}"
            )
        joined = wider
    return joined


def _sizes_problem(wanted: PullClass) -> str | None:
    """Bounds on everything that is looped over or multiplied, before it is."""
    if not wanted.regions:
        return "expected at least one region, got none"
    if not 0 <= wanted.token_lo <= wanted.token_hi <= _MAX_TOKENS:
        span = f"[{wanted.token_lo}, {wanted.token_hi})"
        return f"tokens: expected 0 <= lo <= hi <= {_MAX_TOKENS}, got {span}"
    if wanted.head_lo >= wanted.head_hi or wanted.head_lo < 0:
        return f"heads: expected 0 <= lo < hi, got [{wanted.head_lo}, {wanted.head_hi})"
    if wanted.inner_nbytes < 1:
        return f"inner_nbytes: expected 1 or more, got {wanted.inner_nbytes}"
    kernel_tokens, one_nbytes = wanted.order.kernel_tokens, token_nbytes(wanted)
    if kernel_tokens < 1 or kernel_tokens * one_nbytes > MAX_CHUNK_NBYTES:
        return (
            f"kernel_tokens: expected 1 or more, of at most {MAX_CHUNK_NBYTES} bytes together, got "
            f"{kernel_tokens} of {one_nbytes} bytes"
        )
    channel_nbytes = wanted.order.channel_nbytes
    if channel_nbytes == 0:
        return None
    if not 0 < channel_nbytes < wanted.inner_nbytes or wanted.inner_nbytes % channel_nbytes:
        return (
            f"channel_nbytes: expected 0 or a divisor of the {wanted.inner_nbytes} inner bytes "
            f"below them, got {channel_nbytes}"
        )
    if wanted.order.token_major:
        return f"token_major: expected false for channels of {channel_nbytes} bytes, got true"
    num_channels = kernel_tokens * one_nbytes // channel_nbytes
    if num_channels > _MAX_BLOCK_CHANNELS:
        return (
            f"channel_nbytes: expected at most {_MAX_BLOCK_CHANNELS} channels in a kernel block, "
            f"got {num_channels} of {channel_nbytes} bytes"
        )
    return None


def _region_problem(region: Region, wanted: PullClass) -> str | None:
    """Why a region cannot be given as it is wanted."""
    kept = wanted.interleaves[0] if wanted.interleaves else WHOLE
    if kept != region.kept:
        return f"interleaves: expected {region.kept} of the source, got {kept}"
    heads, held = (wanted.head_lo, wanted.head_hi), (region.head_lo, region.head_hi)
    if heads[0] < held[0] or heads[1] > held[1]:
        return f"heads: expected within [{held[0]}, {held[1]}), got [{heads[0]}, {heads[1]})"
    inner_nbytes = region.inner_nbytes
    if wanted.cast and region.elements:
        inner_nbytes = cast_nbytes(region.elements, inner_nbytes, wanted.cast.dtype)
    if wanted.inner_nbytes != inner_nbytes:
        return f"inner_nbytes: expected {inner_nbytes}, got {wanted.inner_nbytes}"
    channel_nbytes, whole = wanted.order.channel_nbytes, "opaque blocks move whole: expected"
    if channel_nbytes and region.interior is not Interior.PLAIN:
        return f"{whole} no channels, got some of {channel_nbytes} bytes"
    if channel_nbytes and region.has_channels_apart and channel_nbytes != region.channel_nbytes:
        return f"channel_nbytes: expected {region.channel_nbytes}, got {channel_nbytes}"
    if region.interior is Interior.PLAIN:
        return None
    if wanted.interleaves and wanted.interleaves[1] != region.kept:
        return f"{whole} {region.kept} of the sink, got {wanted.interleaves[1]}"
    if heads != held:
        return f"{whole} all heads, got {heads}"
    if wanted.order.kernel_tokens != region.kernel_cells:
        got = wanted.order.kernel_tokens
        return f"{whole} kernel blocks of {region.kernel_cells} tokens, got {got}"
    return None


def _tokens_problem(region: Region, wanted: PullClass) -> str | None:
    """What is wrong with the tokens that a class asks for, by one of its regions: all have blocks
    of one size, and as many.
    """
    block_tokens, is_state = region.block_tokens, region.is_state
    span, steps = f"[{wanted.token_lo}, {wanted.token_hi})", (wanted.token_lo, wanted.token_hi)
    if is_state != (wanted.state_of is not UNSET):
        kept = ("tokens", "a state") if wanted.is_state else ("a state", "tokens")
        return f"expected to be asked for {kept[0]}, got {kept[1]}"
    if is_state and steps not in ((0, 0), (0, block_tokens)):
        return f"states move whole: expected steps [0, {block_tokens}), got {span}"
    if region.cell_tokens != wanted.cell_tokens:
        cells = [each.cell_tokens or 1 for each in (region, wanted)]
        return f"cell_tokens: expected {cells[0]} tokens to share a cell, got {cells[1]}"
    pool_tokens = region.num_blocks * region.block_cells
    if wanted.token_hi - wanted.token_lo > pool_tokens:
        got = wanted.token_hi - wanted.token_lo
        return f"tokens: expected at most the pool's {pool_tokens}, got {got}"
    is_cut = wanted.token_lo % block_tokens or wanted.token_hi % block_tokens
    if region.interior is not Interior.PLAIN and is_cut:
        return f"opaque blocks move whole: expected multiples of {block_tokens} tokens, got {span}"
    return None


def token_nbytes(wanted: PullClass) -> int:
    """Bytes of one token of one region: all wanted heads."""
    return (wanted.head_hi - wanted.head_lo) * wanted.inner_nbytes
