"""What the conformance check moves: geometries, ids, and a copy that is too simple to be wrong."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

from kvxfer.transfer.layout import Interior
from kvxfer.transfer.plan import Base, CopyClass, DenseOrder, PullClass, RegionName, Side, Tile

POISON = 0xEE
POOL_NBYTES = 4 << 20
NUM_BLOCKS = 40
"""Blocks of every made-up pool; requests use some of them, in no order."""


_CACHE = re.compile(r"(\w{3}) (\d+)(?:/(\d+))? x(\d+)(?: \+(\d+))?")


@dataclass(frozen=True, slots=True)
class Cache:
    """How one side stores its regions: NHD, HND, or HDN, [head][channel][token] in channels of the
    case's size. ``pad_nbytes`` lies behind each kernel block.
    """

    order: str
    block_tokens: int
    kernel_tokens: int
    num_heads: int
    pad_nbytes: int

    @classmethod
    def parse(cls, text: str) -> Cache:
        """``NHD 24/8 x4 +5``: blocks of 24 tokens in kernel blocks of 8, 4 heads, 5 bytes behind.
        Raises ValueError.
        """
        found = _CACHE.fullmatch(text)
        if found is None:
            raise ValueError(f"cache: expected one like NHD 24/8 x4 +5, got {text!r}")
        order, block, kernel, heads, pad = found.groups()
        return cls(order, int(block), int(kernel or block), int(heads), int(pad or 0))


@dataclass(frozen=True, slots=True)
class Case:
    """One transfer.

    The source's heads from ``head_lo`` on become all heads of the sink. ``channel_nbytes``: of what
    either side has apart, else 0.
    """

    name: str
    source: Cache
    sink: Cache
    num_regions: int
    inner_nbytes: int
    head_lo: int
    token_lo: int
    token_hi: int
    chunk_nbytes: int
    channel_nbytes: int = 0
    interior: Interior = field(default=Interior.PLAIN, kw_only=True)


def _case(
    name: str, source: str, sink: str, *numbers: int, interior: Interior = Interior.PLAIN
) -> Case:
    return Case(name, Cache.parse(source), Cache.parse(sink), *numbers, interior=interior)


CASES = (
    _case("equal", "HND 16 x2", "HND 16 x2", 4, 16, 0, 0, 130, 2048),
    _case("HND 16 to NHD 32", "HND 16 x2", "NHD 32 x2", 4, 8, 0, 0, 200, 4096),
    _case("NHD 24 in 8 to HND 16", "NHD 24/8 x4", "HND 16 x2", 3, 8, 1, 0, 97, 600),
    _case("prefix, odd rows, padding", "HND 8 x3 +5", "NHD 24/8 x1 +3", 5, 7, 2, 29, 121, 512),
    _case("the window of a long prompt", "HND 16 x2", "NHD 24/8 x2 +3", 4, 8, 0, 464, 515, 1024),
    _case("one token", "NHD 16 x1", "HND 8 x1", 2, 32, 0, 3, 4, 1 << 20),
    _case("nothing", "NHD 16 x1", "HND 8 x1", 2, 32, 0, 5, 5, 1 << 20),
    _case("one chunk larger than asked", "NHD 32 x2", "NHD 64 x2", 1, 64, 0, 0, 256, 100),
    _case("channels apart at the source", "HDN 16 x4", "NHD 24/8 x2", 3, 8, 1, 5, 130, 1024, 2),
    _case("channels apart at the sink", "NHD 24/8 x3", "HDN 32 x2", 3, 12, 1, 45, 170, 2048, 4),
    _case("channels apart on both", "HDN 32 x2 +5", "HDN 24 x2 +3", 3, 12, 0, 24, 163, 1500, 4),
    _case(
        *("opaque blocks", "HND 16/8 x2", "HND 16/8 x2 +5"),
        *(4, 9, 0, 32, 144, 600),
        interior=Interior.OPAQUE,
    ),
)
"""Numbers: regions, bytes of a head's token, first head, tokens from and to, bytes of a chunk and
of a channel."""


@dataclass(frozen=True, slots=True)
class Move:
    """A case with its ids. ``slot`` keeps the regions of moves apart."""

    case: Case
    copy_class: CopyClass
    pull: PullClass
    source_ids: tuple[int, ...]
    sink_ids: tuple[int, ...]


def make_move(case: Case, seed: int, slot: int = 0, num_slots: int = 1) -> Move:
    """Scattered ids; the regions lie in part ``slot`` of ``num_slots`` of both pools."""
    shuffled = random.Random(seed)
    num_heads = case.sink.num_heads
    lo = POOL_NBYTES * slot // num_slots + 64
    source = _side(case.source, case, case.head_lo, num_heads, lo)
    sink = _side(case.sink, case, 0, num_heads, lo + 24)
    if (
        max(_end(case.source, case, lo), _end(case.sink, case, lo + 24))
        > POOL_NBYTES * (slot + 1) // num_slots
    ):
        raise ValueError(f"{case.name}: expected to fit into 1/{num_slots} of {POOL_NBYTES} bytes")
    names = tuple(RegionName(f"layer{index}", ("k",)) for index in range(case.num_regions))
    return Move(
        case,
        CopyClass(names, case.head_lo, case.head_lo + num_heads, source, sink, case.interior),
        PullClass(
            regions=names,
            head_lo=case.head_lo,
            head_hi=case.head_lo + num_heads,
            inner_nbytes=case.inner_nbytes,
            order=DenseOrder(
                case.sink.kernel_tokens,
                case.sink.order == "NHD",
                case.channel_nbytes if case.sink.order == "HDN" else 0,
            ),
            token_lo=case.token_lo,
            token_hi=case.token_hi,
        ),
        _ids(shuffled, case, case.source.block_tokens),
        _ids(shuffled, case, case.sink.block_tokens),
    )


def move_nbytes(move: Move) -> int:
    case = move.case
    return (
        case.num_regions * (case.token_hi - case.token_lo) * case.sink.num_heads * case.inner_nbytes
    )


def naive_copy(move: Move, source: bytes, sink: bytearray) -> None:
    """Byte ranges one by one: the truth."""
    case = move.case
    piece = case.channel_nbytes or case.inner_nbytes
    for region in range(case.num_regions):
        for token in range(case.token_lo, case.token_hi):
            for head in range(case.sink.num_heads):
                given = _address(move.copy_class.source, region, move.source_ids, token, head)
                taken = _address(move.copy_class.sink, region, move.sink_ids, token, head)
                for channel in range(case.inner_nbytes // piece):
                    here = given + channel * _stride_channel(case.source, case)
                    there = taken + channel * _stride_channel(case.sink, case)
                    sink[there : there + piece] = source[here : here + piece]


def source_bytes(seed: int) -> bytes:
    """The content of a source's pool; without the poison, so that an unwritten byte shows."""
    return random.Random(seed).randbytes(POOL_NBYTES).replace(bytes([POISON]), b"\x11")


def _address(side: Side, region: int, ids: tuple[int, ...], token: int, head: int) -> int:
    tile = side.tile
    block, inside = ids[token // tile.block_tokens], token % tile.block_tokens
    kernel_block = block * (tile.block_tokens // tile.kernel_tokens) + inside // tile.kernel_tokens
    return (
        side.bases[region].offset
        + kernel_block * tile.stride_block
        + head * tile.stride_head
        + (inside % tile.kernel_tokens) * tile.stride_token
    )


def _stride_channel(cache: Cache, case: Case) -> int:
    return case.channel_nbytes * (cache.kernel_tokens if cache.order == "HDN" else 1)


def _side(cache: Cache, case: Case, head_lo: int, num_heads: int, lo: int) -> Side:
    inner = case.inner_nbytes
    stride_token, stride_head = {
        "HDN": (case.channel_nbytes, cache.kernel_tokens * inner),
        "NHD": (cache.num_heads * inner, inner),
        "HND": (inner, cache.kernel_tokens * inner),
    }[cache.order]
    return Side(
        group=0,
        tile=Tile(
            block_tokens=cache.block_tokens,
            kernel_tokens=cache.kernel_tokens,
            num_blocks=NUM_BLOCKS,
            num_heads=num_heads,
            inner_nbytes=inner,
            stride_block=_kernel_block_nbytes(cache, case),
            stride_head=stride_head,
            stride_token=stride_token,
            channel_nbytes=case.channel_nbytes,
            stride_channel=_stride_channel(cache, case),
        ),
        bases=tuple(
            Base(0, lo + region * _region_nbytes(cache, case) + head_lo * stride_head)
            for region in range(case.num_regions)
        ),
    )


def _kernel_block_nbytes(cache: Cache, case: Case) -> int:
    return cache.num_heads * cache.kernel_tokens * case.inner_nbytes + cache.pad_nbytes


def _region_nbytes(cache: Cache, case: Case) -> int:
    return (
        NUM_BLOCKS * cache.block_tokens // cache.kernel_tokens * _kernel_block_nbytes(cache, case)
    )


def _end(cache: Cache, case: Case, lo: int) -> int:
    return lo + case.num_regions * _region_nbytes(cache, case)


def _ids(shuffled: random.Random, case: Case, block_tokens: int) -> tuple[int, ...]:
    """Positional; -1 for the blocks before the span, as in a table that a window has gone over."""
    ids = shuffled.sample(range(NUM_BLOCKS), -(-case.token_hi // block_tokens))
    num_absent = case.token_lo // block_tokens
    return (*(-1,) * num_absent, *ids[num_absent:])
