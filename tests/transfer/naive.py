"""Planned copies carried out one slice at a time, where :mod:`tests.oracle` says that it lies.

This shows that a plan says the right thing, without any copy code. Fills, moves and compares whole
engines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvxfer.tensors.strided_index import side_ids
from kvxfer.transfer.chunks import chunk_list
from kvxfer.transfer.manifest import RankId
from kvxfer.transfer.plan import Chunk, Plan, PullClass, Side, Tile
from kvxfer.transfer.pull import PullResolver, pull_class
from tests.builders import EngineShape, build_manifest, build_memories, pull_classes, scattered_ids
from tests.oracle import oracle_copy, oracle_fill, oracle_offset, oracle_order

Bytes = NDArray[np.uint8]
Memories = dict[RankId, list[Bytes]]
Ids = tuple[tuple[int, ...], ...]
Spans = Mapping[int, tuple[int, int]]


class Case:
    """A request of ``num_tokens`` at a source, and a sink with poisoned pools."""

    def __init__(self, source: EngineShape, sink: EngineShape, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.source, self.sink = build_manifest(source, "source"), build_manifest(sink, "sink")
        self.source_ids = _ids(source, num_tokens, seed=1)
        self.sink_ids = _ids(sink, num_tokens, seed=2)
        self.source_memories = {r.rank: build_memories(r) for r in self.source.ranks}
        for entry in self.source.ranks:
            memories = self.source_memories[entry.rank]
            oracle_fill(entry.regions, memories, ids=self.source_ids, num_tokens=num_tokens)

    def poisoned(self) -> Memories:
        """Fresh memories of all sink ranks."""
        return {entry.rank: build_memories(entry, fill=0x5A) for entry in self.sink.ranks}

    def expected(self, spans: Spans) -> Memories:
        """What the sink's memories must be after the spans have moved: the oracle's word."""
        memories = self.poisoned()
        for taker in self.sink.ranks:
            for giver in self.source.ranks:
                oracle_copy(
                    giver.regions,
                    self.source_memories[giver.rank],
                    taker.regions,
                    memories[taker.rank],
                    source_ids=self.source_ids,
                    sink_ids=self.sink_ids,
                    spans=spans,
                )
        return memories

    def copied(self, plan: Plan, spans: Spans) -> Memories:
        """The sink's memories after every route's classes were copied as on a direct wire."""
        memories = self.poisoned()
        for route in plan.routes:
            given, taken = self.source_memories[route.source_rank], memories[route.sink_rank]
            for copy_class in route.classes:
                asked = pull_class(copy_class, *spans[copy_class.sink.group])
                span = asked.token_lo, asked.token_hi
                addresses = zip(
                    side_addresses(copy_class.source, self.source_ids, span),
                    side_addresses(copy_class.sink, self.sink_ids, span),
                    strict=True,
                )
                nbytes = piece_nbytes(copy_class.sink.tile)
                assert nbytes == piece_nbytes(copy_class.source.tile)
                for (number, address), (sink_number, sink_address) in addresses:
                    piece = given[number][address : address + nbytes]
                    taken[sink_number][sink_address : sink_address + nbytes] = piece
        return memories

    def streamed(self, plan: Plan, spans: Spans, chunk_nbytes: int) -> Memories:
        """The same as on a stream wire: each side sees its own regions and the Pull only."""
        memories = self.poisoned()
        for route in plan.routes:
            classes = pull_classes(route, spans)
            sides = PullResolver(self.source.rank(route.source_rank)).resolve(classes)
            given, taken = self.source_memories[route.source_rank], memories[route.sink_rank]
            for chunk in chunk_list(classes, chunk_nbytes):
                wanted, side = classes[chunk.class_index], sides[chunk.class_index]
                dense = pack(side, wanted, chunk, self.source_ids, given)
                assert len(dense) == chunk.nbytes
                sink = route.classes[chunk.class_index].sink
                unpack(sink, wanted, chunk, self.sink_ids, taken, dense)
        return memories

    def differing(self, plan: Plan, spans: Spans, chunk_nbytes: int) -> list[str]:
        """The kinds of wires whose copies are not the oracle's."""
        expected = self.expected(spans)
        found = {
            "direct": self.copied(plan, spans),
            "stream": self.streamed(plan, spans, chunk_nbytes),
        }
        return [wire for wire, memories in found.items() if not same(memories, expected)]


def same(first: Memories, second: Memories) -> bool:
    """Byte for byte, neighbours too."""
    return all(
        np.array_equal(mine, theirs)
        for rank in first
        for mine, theirs in zip(first[rank], second[rank], strict=True)
    )


def piece_nbytes(tile: Tile) -> int:
    """Bytes of one channel, or of all of one head and one token where nobody has them apart."""
    return tile.channel_nbytes or tile.inner_nbytes


def side_addresses(side: Side, ids: Ids, span: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """(memory, byte) of every region, token, head and channel of a class."""
    tile, found = side.tile, side_ids(side, ids).tolist()
    for base in side.bases:
        for position in range(*span):
            for head in range(tile.num_heads):
                for channel in range(tile.inner_nbytes // piece_nbytes(tile)):
                    offset = oracle_offset(tile, found, position, head, channel)
                    yield base.memory, base.offset + offset


def dense_order(wanted: PullClass, chunk: Chunk) -> list[tuple[int, int, int, int]]:
    """(region, token, head, channel) of every slice of a chunk in the order in which they travel;
    a channel number of -1 stands for all of them.
    """
    element = wanted.order.channel_nbytes
    order = oracle_order(
        wanted.order.kernel_tokens,
        (chunk.token_lo, chunk.token_hi),
        wanted.head_hi - wanted.head_lo,
        is_token_major=wanted.order.token_major,
        num_channels=wanted.inner_nbytes // element if element else 0,
    )
    return [
        (region, *place) for region in range(chunk.region_lo, chunk.region_hi) for place in order
    ]


def slice_nbytes(wanted: PullClass) -> int:
    """Bytes of one entry of the dense order."""
    return wanted.order.channel_nbytes or wanted.inner_nbytes


def slice_addresses(
    side: Side, ids: Sequence[int], wanted: PullClass, place: tuple[int, int, int, int]
) -> list[tuple[int, int]]:
    """(byte of the memory, how many there) of one entry of the dense order."""
    region, token, head, channel = place
    tile, base = side.tile, side.bases[region]
    nbytes = slice_nbytes(wanted)
    channels = [channel]
    if channel == -1:
        nbytes = piece_nbytes(tile)
        channels = list(range(tile.inner_nbytes // nbytes))
    return [
        (base.offset + oracle_offset(tile, ids, token, head, each), nbytes) for each in channels
    ]


def pack(side: Side, wanted: PullClass, chunk: Chunk, ids: Ids, memories: list[Bytes]) -> bytes:
    """The bytes of a chunk."""
    dense, found = bytearray(), side_ids(side, ids).tolist()
    for place in dense_order(wanted, chunk):
        memory = memories[side.bases[place[0]].memory]
        for address, nbytes in slice_addresses(side, found, wanted, place):
            dense += memory[address : address + nbytes].tobytes()
    return bytes(dense)


def unpack(
    side: Side, wanted: PullClass, chunk: Chunk, ids: Ids, memories: list[Bytes], dense: bytes
) -> None:
    """Put the bytes of a chunk into their places; within a kernel block these only go up."""
    previous: tuple[int, int, int] | None = None
    at, found = 0, side_ids(side, ids).tolist()
    for place in dense_order(wanted, chunk):
        region, token = place[:2]
        block = token // side.tile.kernel_tokens
        memory = memories[side.bases[region].memory]
        for address, nbytes in slice_addresses(side, found, wanted, place):
            if previous is not None and previous[:2] == (region, block):
                assert address > previous[2], "not the sink's own physical order"
            previous = (region, block, address)
            memory[address : address + nbytes] = np.frombuffer(dense[at : at + nbytes], np.uint8)
            at += nbytes
    assert at == len(dense)


def _ids(shape: EngineShape, num_tokens: int, seed: int) -> Ids:
    return tuple(
        scattered_ids(num_tokens, shape.table_tokens, shape.num_blocks, seed * 100 + group)
        for group in range(shape.num_groups)
    )
