"""Who sends what to whom, and the arithmetic that turns block ids into copies. Pure.

Records: a *route* is what one source rank sends to one sink rank. Its region pairs fall into
*geometry classes* (equal tile and strides), each of which is copied with one set of index
arithmetic. A *chunk* is a bounded piece of one class: a token range of some of its regions, dense
and in the sink's own physical order. ``pull.py`` says what travels and cuts it into chunks.

:func:`make_plan` knows no ratios. It works from the head ranges of regions with the same (layer,
plane), so TP in both directions, replicated heads, MLA and layers spread over PP stages are one
rule.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from kvxfer.errors import IncompatiblePeer, ProtocolError
from kvxfer.transfer.casts import Values, cast_problem, is_cast, scale_problem, scales_of
from kvxfer.transfer.interleave import WHOLE, Interleave, Shared, Stripe, shared, unit_tokens
from kvxfer.transfer.layout import Interior, Region, join_planes, same_bytes
from kvxfer.transfer.manifest import EngineManifest, RankId
from kvxfer.transfer.windows import Keeping

ALL = sys.maxsize
"""All tokens, of an offer or that a load wants: more than any request has."""
_SHOWN_PROBLEMS = 8


class DenseOrder(msgspec.Struct, frozen=True, omit_defaults=True):
    """The order of bytes in a chunk: the sink's own physical order.

    For every region of the chunk in turn, for every (kernel) block of ``kernel_tokens`` request
    tokens that the token range touches: ``[token][head][inner]`` if ``token_major`` (NHD), else
    ``[head][token][inner]`` (HND), clipped to the token range. Where the sink has channels apart,
    ``channel_nbytes`` is their size and the order ``[head][channel][token]``, never token-major.
    """

    kernel_tokens: int
    token_major: bool
    channel_nbytes: int = 0


class Tile(msgspec.Struct, frozen=True, kw_only=True):
    """How one geometry class lies on one side; strides in bytes. What the tokens are of a state or
    a compressed region, :class:`Side` says.

    Token t of logical block b is in kernel block ``b * (block_tokens // kernel_tokens) + t //
    kernel_tokens``, which starts at that number times ``stride_block``.

    In a class where either side has channels apart, both tiles say how large a channel is and how
    far the next one is; a side that has them contiguous has ``stride_channel == channel_nbytes``.
    In all others both fields are 0.
    """

    block_tokens: int
    kernel_tokens: int
    num_blocks: int
    num_heads: int
    inner_nbytes: int
    stride_block: int
    stride_head: int
    stride_token: int
    channel_nbytes: int = 0
    stride_channel: int = 0

    @property
    def has_channels_apart(self) -> bool:
        """Do other bytes lie between the inner bytes of one head and one token?"""
        return self.stride_channel != self.channel_nbytes

    @property
    def num_channels(self) -> int:
        """Elements that the inner bytes of one head and one token are described as."""
        return self.inner_nbytes // self.channel_nbytes if self.channel_nbytes else 1

    @property
    def order(self) -> DenseOrder:
        """The physical order of a kernel block; one head is token-major and head-major."""
        if self.has_channels_apart:
            return DenseOrder(self.kernel_tokens, False, self.channel_nbytes)
        return DenseOrder(self.kernel_tokens, self.stride_token > self.stride_head)


class Base(msgspec.Struct, frozen=True):
    """Where (block 0, first wanted head, token 0) of one region lies in the rank's memory."""

    memory: int
    offset: int


class AnySide(msgspec.Struct, frozen=True, kw_only=True):
    """How all regions of one side of a geometry class lie. Of a class that is cast, ``values`` says
    what lies in the pool, ``chunk`` what lies in a dense piece, and ``scale`` where each token has
    its scale.
    """

    tile: Tile
    values: Values | None = None
    chunk: Values | None = None
    scale: AnySide | None = None

    @property
    def is_cast(self) -> bool:
        """Are elements cast between the pool and a dense piece?"""
        return self.chunk != self.values or self.scale is not None

    @property
    def order(self) -> DenseOrder:
        """Of the dense pieces that this side, a sink's, takes."""
        return self.tile.order if self.chunk is None else cast_order(self.tile.order)

    @property
    def dense_inner_nbytes(self) -> int:
        """Bytes of one head and token in a dense piece."""
        inner_nbytes = self.tile.inner_nbytes
        if self.values is None or self.chunk is None:
            return inner_nbytes
        return inner_nbytes // self.values.item_nbytes * self.chunk.item_nbytes


class Side(AnySide, frozen=True, kw_only=True):
    """One side of a geometry class: one tile, many regions. ``window``, ``is_chunk``: what the
    group keeps; ``state_tokens``: as the regions have it, 0 where they keep tokens;
    ``cell_tokens``: how many tokens of the request each token of the tile stands for. ``stripe``:
    where the rank keeps tokens between those that move; then the tile's blocks are its units.
    """

    group: int
    bases: tuple[Base, ...]
    window: int | None = None
    state_tokens: int = 0
    cell_tokens: int = 1
    is_chunk: bool = False
    scale: Side | None = None
    stripe: Stripe | None = None

    @property
    def keeping(self) -> Keeping:
        if self.state_tokens:
            return Keeping(self.state_tokens, is_state=True)
        block_tokens = self.tile.block_tokens * self.cell_tokens
        if self.stripe:
            block_tokens = self.stripe.block_tokens * self.stripe.kept.size
        return Keeping(block_tokens, self.window, is_chunk=self.is_chunk)


class RegionName(msgspec.Struct, frozen=True, array_like=True):
    """A region by name; several planes when they lie side by side on both sides and move as one."""

    layer: str
    planes: tuple[str, ...]


class PullClass(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream source needs to pack chunks of one geometry class; travels in the Pull.
    ``cast``: to what the source casts its elements before they travel. ``state_of``: a state after
    so many tokens is asked for, and ``[token_lo, token_hi)`` are the steps of its one block.
    ``cell_tokens``: so many tokens share one cell, and ``[token_lo, token_hi)`` are cells.

    ``interleaves``: of source and sink, where either keeps only some tokens. Then tokens are
    counted as :class:`Shared` does.
    """

    regions: tuple[RegionName, ...]
    head_lo: int
    head_hi: int
    inner_nbytes: int
    order: DenseOrder
    token_lo: int
    token_hi: int
    cast: Values | msgspec.UnsetType = msgspec.UNSET
    state_of: int | msgspec.UnsetType = msgspec.UNSET
    cell_tokens: int | msgspec.UnsetType = msgspec.UNSET
    interleaves: tuple[Interleave, Interleave] | msgspec.UnsetType = msgspec.UNSET

    @property
    def is_state(self) -> bool:
        return self.state_of is not msgspec.UNSET

    def count(self, num_tokens: int) -> int:
        """How many of a request's first tokens count in this class; or cells that are full."""
        tokens = shared(*self.interleaves) if self.interleaves else None
        if tokens is None:
            return num_tokens // (self.cell_tokens or 1)
        return tokens.count(num_tokens)

    def token(self, number: int) -> int:
        """The request's token that is the ``number``-th of them; or the last of that cell."""
        tokens = shared(*self.interleaves) if self.interleaves else None
        if tokens is None:
            return (number + 1) * (self.cell_tokens or 1) - 1
        return tokens.token(number)


@dataclass(frozen=True, slots=True)
class CopyClass:
    """Both sides of one geometry class of a route: bases correspond one to one."""

    names: tuple[RegionName, ...]
    head_lo: int
    head_hi: int
    source: Side
    sink: Side
    interior: Interior = Interior.PLAIN
    interleaves: tuple[Interleave, Interleave] | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True, slots=True)
class Route:
    """From one source rank to one sink rank. Without classes it is null: Pull, Release, no read."""

    source_rank: RankId
    sink_rank: RankId
    classes: tuple[CopyClass, ...]

    @property
    def is_null(self) -> bool:
        """No bytes are wanted: the source rank is only told that it may let go."""
        return not self.classes


@dataclass(frozen=True, slots=True)
class Plan:
    """All routes between a source engine and a sink engine. ``empty_layers``: of the sink's draft,
    which the source does not have.
    """

    routes: tuple[Route, ...]
    empty_layers: tuple[str, ...] = ()

    def of_sink(self, rank: RankId) -> tuple[Route, ...]:
        """The routes that end at one sink rank, null routes too."""
        return tuple(route for route in self.routes if route.sink_rank == rank)

    def consumers(self, rank: RankId) -> tuple[RankId, ...]:
        """The sink ranks that read, or null-read, one source rank; never empty."""
        return tuple(sorted(route.sink_rank for route in self.routes if route.source_rank == rank))


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """One dense piece: a token range of regions ``[region_lo, region_hi)`` of one class.
    ``opens_at``: how many tokens of a growing offer have to be open; ALL: a state's, which has the
    offered tokens only when all are computed.
    """

    sequence: int
    class_index: int
    region_lo: int
    region_hi: int
    token_lo: int
    token_hi: int
    nbytes: int
    opens_at: int


@dataclass(frozen=True, slots=True)
class _Pair:
    """One plane that a source rank gives to a sink rank; several planes once they are joined. The
    scales are the planes of a cast's scales of each token.
    """

    planes: tuple[str, ...]
    head_lo: int
    head_hi: int
    source: Region
    sink: Region
    is_cast: bool = False
    source_scale: Region | None = None
    sink_scale: Region | None = None

    @property
    def interleaves(self) -> tuple[Interleave, Interleave] | msgspec.UnsetType:
        return interleaves_of(self.source, self.sink)


@dataclass(frozen=True, slots=True)
class _Holder:
    """A rank that holds a plane of a layer, and where."""

    rank: RankId
    region: Region


_Holders = dict[tuple[str, str], list[_Holder]]


def make_plan(source: EngineManifest, sink: EngineManifest) -> Plan:
    """Who sends what to whom between two compatible engines whose manifests are valid.

    Every head and token of every plane that a sink rank holds comes from exactly one source rank,
    once per set of layers that share their memory; but for a draft's where the source has none.
    Every source rank has at least one consumer, by a null route where nothing is wanted from it.

    Raises IncompatiblePeer that names the layers, planes and heads that the source does not have,
    and those whose bytes cannot be converted.
    """
    holders, takers = _holders(source), _holders(sink)
    made = _made_planes(holders, takers)
    is_one_type = _type_of(source) == _type_of(sink)
    pairs: dict[tuple[RankId, RankId], list[_Pair]] = {}
    problems: dict[str, None] = {}
    empty: dict[str, None] = {}
    for entry in sorted(sink.ranks, key=lambda entry: entry.rank):
        for aliases in _aliases(entry.regions):
            region = next((r for r in aliases if (r.layer, r.plane) in holders), aliases[0])
            name = (region.layer, region.plane)
            if name in made:
                continue
            if name not in holders and all(region.is_draft for region in aliases):
                empty[region.layer] = None
                continue
            taker = _Holder(entry.rank, region)
            for giver, lo, hi, tokens in _cover(taker, holders.get(name, []), takers[name]):
                if giver is None:
                    problems[f"{_heads(region, lo, hi)}: no source rank holds {tokens}"] = None
                    continue
                pair = _Pair((region.plane,), lo, hi, giver.region, region)
                if is_cast(giver.region, region, lo, hi):
                    pair = replace(
                        pair,
                        is_cast=True,
                        source_scale=_scale_region(giver, holders),
                        sink_scale=_scale_region(taker, takers),
                    )
                if problem := _inconvertible(pair, is_one_type=is_one_type):
                    problems[f"{_heads(region, lo, hi)}: {problem}"] = None
                else:
                    pairs.setdefault((giver.rank, entry.rank), []).append(pair)
    if problems:
        first = list(problems)[:_SHOWN_PROBLEMS]
        more = f"; and {len(problems) - len(first)} more" if len(problems) > len(first) else ""
        raise IncompatiblePeer(
            f"plan from engine {source.engine_id} to {sink.engine_id}: {'; '.join(first)}{more}"
        )
    routes = [Route(*ranks, _classes(_joined(members))) for ranks, members in pairs.items()]
    routes += _null_routes(source, sink, {source_rank for source_rank, _ in pairs})
    routes.sort(key=lambda route: (route.sink_rank, route.source_rank))
    return Plan(tuple(routes), tuple(empty))


def side_tile(region: Region, head_lo: int, head_hi: int, channel_nbytes: int = 0) -> Tile:
    """``channel_nbytes``: of the other side's channels where these are apart, else 0."""
    if region.has_channels_apart:
        channel_nbytes, stride_channel = region.channel_nbytes, region.stride_channel
    else:
        stride_channel = channel_nbytes
    return Tile(
        block_tokens=region.block_cells,
        kernel_tokens=region.kernel_cells,
        num_blocks=region.num_blocks,
        num_heads=head_hi - head_lo,
        inner_nbytes=region.inner_nbytes,
        stride_block=region.stride_block,
        stride_head=region.stride_head,
        stride_token=region.stride_token,
        channel_nbytes=channel_nbytes,
        stride_channel=stride_channel,
    )


def side_base(region: Region, head_lo: int) -> Base:
    return Base(region.memory, region.address(0, head_lo, 0))


def _holders(engine: EngineManifest) -> _Holders:
    found: _Holders = {}
    for entry in sorted(engine.ranks, key=lambda entry: entry.rank):
        for region in entry.regions:
            holder = _Holder(entry.rank, region)
            found.setdefault((region.layer, region.plane), []).append(holder)
    return found


def _aliases(regions: Sequence[Region]) -> list[list[Region]]:
    """Regions by the bytes they name: layers that share their KV are moved once per group."""
    found: dict[tuple[int, int, int], list[list[Region]]] = {}
    ordered: list[list[Region]] = []
    for region in regions:
        at_address = found.setdefault((region.group, region.memory, region.offset), [])
        for aliases in at_address:
            if same_bytes(aliases[0], region):
                aliases.append(region)
                break
        else:
            at_address.append([region])
            ordered.append(at_address[-1])
    return ordered


def _cover(
    taker: _Holder, givers: Sequence[_Holder], takers: Sequence[_Holder]
) -> Iterator[tuple[_Holder | None, int, int, str]]:
    """Split what the taker keeps into parts, by tokens and then by heads, and give each a source
    rank; None where there is none. In words: which tokens.
    """
    like = givers[0].region.kept if givers else WHOLE
    for index in range(like.size):
        kept = Interleave(like.size, index, like.run)
        if shared(kept, taker.region.kept) is None:
            continue
        holding = [h for h in givers if h.region.kept == kept]
        wanting = [h for h in takers if shared(kept, h.region.kept) is not None]
        tokens = "it" if kept == WHOLE else f"the tokens of {kept}"
        for giver, lo, hi in _cover_heads(taker, holding, wanting):
            yield giver, lo, hi, tokens


def _cover_heads(
    taker: _Holder, givers: Sequence[_Holder], takers: Sequence[_Holder]
) -> Iterator[tuple[_Holder | None, int, int]]:
    """Split the taker's heads into ranges and give each a source rank; None where there is none.

    Equal replicas are shared out in proportion among the sink ranks that want the head, in order:
    2 takers of 4 replicas read the first and the third, 4 takers of 2 read each twice.
    """
    head, end = taker.region.head_lo, taker.region.head_hi
    while head < end:
        replicas = [h for h in givers if h.region.head_lo <= head < h.region.head_hi]
        if not replicas:
            later = [h.region.head_lo for h in givers if head < h.region.head_lo < end]
            until = min(later, default=end)
            yield None, head, until
        else:
            wanting = [h.rank for h in takers if h.region.head_lo <= head < h.region.head_hi]
            share = wanting.index(taker.rank) * len(replicas) // len(wanting)
            until = min(replicas[share].region.head_hi, end)
            yield replicas[share], head, until
        head = until


def _heads(region: Region, head_lo: int, head_hi: int) -> str:
    return f"{region.layer}/{region.plane} heads [{head_lo}, {head_hi})"


def _type_of(engine: EngineManifest) -> tuple[str, str]:
    return engine.facts.dtype, engine.facts.quantisation


def _scale_region(holder: _Holder, holders: _Holders) -> Region | None:
    """Where the scales of this rank's tokens lie."""
    region = holder.region
    name = (region.layer, region.elements.scale_plane if region.elements else "")
    return next((h.region for h in holders.get(name, ()) if h.rank == holder.rank), None)


def _made_planes(holders: _Holders, takers: _Holders) -> set[tuple[str, str]]:
    """Planes of a sink's scales that its cast makes, for the source has none."""
    made: set[tuple[str, str]] = set()
    for name, found in takers.items():
        sink, givers = found[0].region, holders.get(name)
        if givers and is_cast(givers[0].region, sink, sink.head_lo, sink.head_hi):
            made.add((sink.layer, sink.elements.scale_plane if sink.elements else ""))
    return made


def _inconvertible(pair: _Pair, *, is_one_type: bool) -> str | None:
    """Why the values of one region cannot become those of the other; None if they can.
    ``is_one_type``: of what both engines say of all their planes.
    """
    source, sink = pair.source, pair.sink
    if source.is_state != sink.is_state:
        kept = ["a state" if region.is_state else "tokens" for region in (source, sink)]
        return f"source keeps {kept[0]}, sink {kept[1]}"
    if source.is_state and source.block_tokens != sink.block_tokens:
        return f"source has a state of {source.block_tokens} steps, sink of {sink.block_tokens}"
    if problem := _unspreadable(pair):
        return problem
    if source.cell_tokens != sink.cell_tokens:
        sizes = [region.cell_tokens or 1 for region in (source, sink)]
        return f"source has cells of {sizes[0]} tokens, sink of {sizes[1]}"
    if pair.is_cast:
        return cast_problem(source, sink) or next(
            (
                problem
                for side, region, scale in (
                    ("source", source, pair.source_scale),
                    ("sink", sink, pair.sink_scale),
                )
                if region.elements
                and region.elements.scale_plane
                and (problem := scale_problem(side, region, scale))
            ),
            None,
        )
    if not is_one_type and not (source.elements and sink.elements):
        return cast_problem(source, sink)
    if source.inner_nbytes != sink.inner_nbytes:
        return f"source has {source.inner_nbytes} bytes a head and token, sink {sink.inner_nbytes}"
    if source.interior is not sink.interior:
        return f"source has interior {source.interior.value}, sink {sink.interior.value}"
    ours, theirs = _channel_nbytes(source), _channel_nbytes(sink)
    if ours and theirs and ours != theirs:
        return f"source has channels of {ours} bytes apart, sink of {theirs}"
    if sink.interior is Interior.PLAIN:
        return None
    for field in ("block_tokens", "kernel_blocks", "head_lo", "head_hi"):
        ours, theirs = getattr(source, field), getattr(sink, field)
        if ours != theirs:
            return (
                f"opaque blocks move whole: {field} is {ours} at the source, {theirs} at the sink"
            )
    strides = [(region.stride_head, region.stride_token) for region in (source, sink)]
    if strides[0] != strides[1] or not (source.is_dense and sink.is_dense):
        return (
            "opaque blocks move whole: expected equal blocks without gaps, got strides of head and "
            f"token {strides[0]} at the source, {strides[1]} at the sink"
        )
    return None


def _unspreadable(pair: _Pair) -> str | None:
    """Why tokens cannot move between unequal interleaves."""
    source, sink = pair.source, pair.sink
    if source.kept == sink.kept:
        return None
    how = f"source keeps tokens of {source.kept}, sink of {sink.kept}"
    if sink.interior is not Interior.PLAIN:
        return f"opaque blocks move whole: {how}"
    if pair.source_scale or pair.sink_scale:
        return f"what has a scale of each token is cast between equal ranks only: {how}"
    return None


def _channel_nbytes(region: Region) -> int:
    return region.channel_nbytes if region.has_channels_apart else 0


def _joined(pairs: Sequence[_Pair]) -> list[_Pair]:
    """Planes of a layer that lie side by side on both sides become one."""
    by_layer: dict[str, list[_Pair]] = {}
    for pair in sorted(pairs, key=lambda pair: (pair.sink.memory, pair.sink.offset)):
        members = by_layer.setdefault(pair.sink.layer, [])
        joined = _join(members[-1], pair) if members else None
        if joined is None:
            members.append(pair)
        else:
            members[-1] = joined
    return [pair for members in by_layer.values() for pair in members]


def _join(first: _Pair, second: _Pair) -> _Pair | None:
    if first.is_cast or second.is_cast:
        return None
    if (first.head_lo, first.head_hi) != (second.head_lo, second.head_hi):
        return None
    source = join_planes(first.source, second.source)
    sink = join_planes(first.sink, second.sink)
    if source is None or sink is None:
        return None
    planes = (*first.planes, *second.planes)
    return _Pair(planes, first.head_lo, first.head_hi, source, sink)


def _classes(pairs: Sequence[_Pair]) -> tuple[CopyClass, ...]:
    """Pairs by geometry: all of a class differ in nothing but where they begin, and in scales."""
    found: dict[tuple[object, ...], list[tuple[_Pair, Side, Side]]] = {}
    for pair in pairs:
        source, sink = _sides(pair)
        key = (
            geometry_of(source),
            geometry_of(sink),
            pair.head_lo,
            pair.head_hi,
            pair.sink.interior,
            pair.interleaves,
        )
        found.setdefault(key, []).append((pair, source, sink))
    classes = [_class(members) for members in found.values()]
    return tuple(sorted(classes, key=lambda each: each.sink.state_tokens > 0))  # states come last


def geometry_of(side: Side) -> tuple[object, ...]:
    """What all regions of a class have in common at one side."""
    dtype = side.values.dtype if side.values else ""
    scale_tile = side.scale.tile if side.scale else None
    kept = side.group, side.keeping, side.cell_tokens, side.stripe
    return side.tile, *kept, dtype, scale_tile


def _sides(pair: _Pair) -> tuple[Side, Side]:
    heads, tokens = (pair.head_lo, pair.head_hi), shared_by(pair.interleaves)
    if pair.is_cast:
        return (
            cast_side(pair.source, *heads, pair.source_scale, tokens),
            cast_side(pair.sink, *heads, pair.sink_scale, tokens),
        )
    channel_nbytes = _channel_nbytes(pair.source) or _channel_nbytes(pair.sink)
    return (
        plain_side(pair.source, *heads, channel_nbytes, tokens),
        plain_side(pair.sink, *heads, channel_nbytes, tokens),
    )


def _class(members: Sequence[tuple[_Pair, Side, Side]]) -> CopyClass:
    first = members[0][0]
    source = join_sides([source for _, source, _ in members])
    sink = join_sides([sink for _, _, sink in members])
    if source.values and sink.values:
        # What travels has no scales of tokens, and else as few bytes as there are
        is_sinks = source.scale is not None or (
            sink.scale is None and sink.values.item_nbytes < source.values.item_nbytes
        )
        chunk = sink.values if is_sinks else source.values
        source, sink = (msgspec.structs.replace(side, chunk=chunk) for side in (source, sink))
    return CopyClass(
        names=tuple(RegionName(pair.sink.layer, pair.planes) for pair, _, _ in members),
        head_lo=first.head_lo,
        head_hi=first.head_hi,
        source=source,
        sink=sink,
        interior=first.sink.interior,
        interleaves=first.interleaves,
    )


def interleaves_of(
    source: Region, sink: Region
) -> tuple[Interleave, Interleave] | msgspec.UnsetType:
    """As a Pull says them."""
    return (source.kept, sink.kept) if source.interleave or sink.interleave else msgspec.UNSET


def shared_by(interleaves: tuple[Interleave, Interleave] | msgspec.UnsetType) -> Shared | None:
    """The tokens of a class; None: all. Raises ProtocolError for none."""
    if not interleaves:
        return None
    found = shared(*interleaves)
    if found is None:
        raise ProtocolError(f"interleave: expected tokens that both keep, got {interleaves}")
    return found


def plain_side(
    region: Region,
    head_lo: int,
    head_hi: int,
    channel_nbytes: int = 0,
    tokens: Shared | None = None,
) -> Side:
    """One region, of which bytes are moved. ``channel_nbytes``: as :func:`side_tile` has it;
    ``tokens``: those that move, if not all.
    """
    tile = side_tile(region, head_lo, head_hi, channel_nbytes)
    unit = unit_tokens(region.kept, tokens, tile.kernel_tokens) if tokens else None
    stripe = None
    if tokens and unit:
        tile, stripe = _striped(tile, region.kept, tokens, unit)
    return Side(
        group=region.group,
        tile=tile,
        bases=(side_base(region, head_lo),),
        window=region.window,
        state_tokens=region.state_tokens or 0,
        cell_tokens=region.cell_tokens or 1,
        is_chunk=region.is_chunk is True,
        stripe=stripe,
    )


def _striped(tile: Tile, kept: Interleave, tokens: Shared, unit: int) -> tuple[Tile, Stripe]:
    """The same bytes as blocks of one unit each; they end where the pool's blocks do."""
    num_kernel_blocks = tile.num_blocks * (tile.block_tokens // tile.kernel_tokens)
    granule, last_nbytes = tile.stride_block, 0
    if unit < tile.kernel_tokens:
        granule = math.gcd(granule, unit * tile.stride_token)
        last_nbytes = (tile.kernel_tokens - unit) * tile.stride_token
    stripe = Stripe(
        kept=kept,
        tokens=tokens,
        unit_tokens=unit,
        granule_nbytes=granule,
        block_tokens=tile.block_tokens,
        kernel_tokens=tile.kernel_tokens,
        num_blocks=tile.num_blocks,
        stride_block=tile.stride_block,
        stride_token=tile.stride_token,
    )
    last_unit = ((num_kernel_blocks - 1) * tile.stride_block + last_nbytes) // granule
    of_units = msgspec.structs.replace(
        tile,
        block_tokens=unit,
        kernel_tokens=unit,
        num_blocks=last_unit + 1,
        stride_block=granule,
    )
    return of_units, stripe


def cast_side(
    region: Region,
    head_lo: int,
    head_hi: int,
    scale: Region | None,
    tokens: Shared | None = None,
) -> Side:
    """One region whose elements are cast; ``scale``: the plane of its scales of each token."""
    elements = region.elements
    assert elements
    scales = (scales_of(region, elements, head_lo, head_hi),) if scale is None else ()
    return msgspec.structs.replace(
        plain_side(region, head_lo, head_hi, tokens=tokens),
        values=Values(elements.dtype, scales),
        scale=None if scale is None else plain_side(scale, head_lo, head_hi),
    )


def join_sides(sides: Sequence[Side]) -> Side:
    """Sides of one geometry as one, with all their regions."""
    first = sides[0]
    values, scale = first.values, first.scale
    if values is not None:
        scales = tuple(each for side in sides if side.values for each in side.values.scales)
        values = Values(values.dtype, () if all(each == (1.0,) for each in scales) else scales)
    if scale is not None:
        scale = join_sides([side.scale for side in sides if side.scale])
    return msgspec.structs.replace(
        first,
        bases=tuple(base for side in sides for base in side.bases),
        values=values,
        scale=scale,
    )


def cast_order(order: DenseOrder) -> DenseOrder:
    """Of the chunks of a class that is cast: token by token, whatever the sink's layout."""
    return DenseOrder(order.kernel_tokens, True)


def _null_routes(source: EngineManifest, sink: EngineManifest, used: set[RankId]) -> list[Route]:
    """One for every source rank that gives nothing, to the sink rank at the same relative place."""
    return [
        Route(
            entry.rank,
            RankId(
                entry.rank.pp * sink.pp_size // source.pp_size,
                entry.rank.tp * sink.tp_size // source.tp_size,
            ),
            (),
        )
        for entry in source.ranks
        if entry.rank not in used
    ]
