"""Made-up pools and copies for the tests of the strided copy, and what the oracle says of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from kvxfer.transfer.layout import Region
from kvxfer.transfer.manifest import RankId
from kvxfer.transfer.plan import Base, CopyClass, RegionName, Side, Tile
from tests.builders import HEADER_NBYTES, EngineShape, LayoutName, Outermost, build_regions
from tests.oracle import oracle_bytes, oracle_copy, oracle_order

Bytes = NDArray[np.uint8]

POISON = 0xEE
NUM_LAYERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One side: how its regions lie in its memory.

    ``is_turned``: its K planes are [head][channel][token] in each kernel block.
    """

    block_tokens: int
    kernel_blocks: int
    layout: LayoutName
    outermost: Outermost
    head_lo: int
    num_heads: int
    padding_nbytes: int
    lead_nbytes: int
    is_turned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A copy: two sides, heads, tokens."""

    source: Shape
    sink: Shape
    inner_nbytes: int
    head_lo: int
    head_hi: int
    token_lo: int
    token_hi: int
    in_order: bool
    seed: int
    channel_nbytes: int = 1


@dataclass(frozen=True, slots=True)
class Pool:
    """One side: regions (two planes per layer, two memories), their bytes, a request's ids."""

    regions: tuple[Region, ...]
    memories: list[Bytes]
    ids: NDArray[np.int64]

    @property
    def tensors(self) -> list[Tensor]:
        return [torch.from_numpy(memory) for memory in self.memories]

    def side(self, case: Case, planes: str, channel_nbytes: int) -> Side:
        """``channel_nbytes``: of these planes where either side has them apart, else 0."""
        regions = [region for region in self.regions if region.plane in planes]
        first = regions[0]
        is_apart = first.stride_channel and case.channel_nbytes < case.inner_nbytes
        return Side(
            group=0,
            tile=Tile(
                block_tokens=first.block_tokens,
                kernel_tokens=first.block_tokens // first.kernel_blocks,
                num_blocks=first.num_blocks,
                num_heads=case.head_hi - case.head_lo,
                inner_nbytes=first.inner_nbytes,
                stride_block=first.stride_block,
                stride_head=first.stride_head,
                stride_token=first.stride_token,
                channel_nbytes=channel_nbytes,
                stride_channel=first.stride_channel if is_apart else channel_nbytes,
            ),
            bases=tuple(
                Base(
                    region.memory,
                    region.offset + (case.head_lo - region.head_lo) * region.stride_head,
                )
                for region in regions
            ),
        )


def make_pool(shape: Shape, case: Case, *, poison: bool, seed: int) -> Pool:
    """Layers alternate between two memories; ``lead_nbytes`` make the bases crooked."""
    rng = np.random.default_rng(seed)
    num_needed = -(-case.token_hi // shape.block_tokens)
    num_blocks = num_needed + 3
    engine = EngineShape(
        num_kv_heads=shape.num_heads,
        num_layers=NUM_LAYERS,
        block_tokens=shape.block_tokens,
        kernel_blocks=shape.kernel_blocks,
        num_blocks=num_blocks,
        inner_nbytes=case.inner_nbytes,
        layout=shape.layout,
        outermost=shape.outermost,
        padding_nbytes=shape.padding_nbytes,
        turned=("k",) if shape.is_turned else (),
        channel_nbytes=case.channel_nbytes,
    )
    built, nbytes = build_regions(engine, RankId(0, 0))
    layer_nbytes = (nbytes - HEADER_NBYTES) // NUM_LAYERS
    regions = []
    for region in built:
        layer, within = divmod(region.offset - HEADER_NBYTES, layer_nbytes)
        moved = msgspec.structs.replace(
            region,
            memory=layer % 2,
            offset=shape.lead_nbytes + layer // 2 * layer_nbytes + within,
            head_lo=shape.head_lo,
            head_hi=shape.head_lo + shape.num_heads,
        )
        regions.append(moved)
    # Exactly as long as the regions: a row too far is an error and not a neighbour.
    sizes = [shape.lead_nbytes + layers * layer_nbytes for layers in (2, 1)]
    memories = [
        np.full(size, POISON, np.uint8) if poison else rng.integers(0, 256, size, np.uint8)
        for size in sizes
    ]
    ids = np.arange(num_blocks) if case.in_order else rng.permutation(num_blocks)
    return Pool(tuple(regions), memories, ids[:num_needed].astype(np.int64))


def copy_class_of(case: Case, source: Pool, sink: Pool, planes: str = "kv") -> CopyClass:
    """The regions of these planes, all of one geometry."""
    is_turned = "k" in planes and (case.source.is_turned or case.sink.is_turned)
    is_by_channel = is_turned and case.channel_nbytes < case.inner_nbytes
    channel_nbytes = case.channel_nbytes if is_by_channel else 0
    return CopyClass(
        names=tuple(RegionName(r.layer, (r.plane,)) for r in sink.regions if r.plane in planes),
        head_lo=case.head_lo,
        head_hi=case.head_hi,
        source=source.side(case, planes, channel_nbytes),
        sink=sink.side(case, planes, channel_nbytes),
    )


def copy_classes_of(case: Case, source: Pool, sink: Pool) -> dict[str, CopyClass]:
    """By planes: K apart from V where a side has it turned."""
    is_turned = case.source.is_turned or case.sink.is_turned
    return {
        planes: copy_class_of(case, source, sink, planes)
        for planes in (("k", "v") if is_turned else ("kv",))
    }


def expected(case: Case, source: Pool, sink: Pool) -> list[Bytes]:
    """The sink's memories after the copy, by the oracle. Heads outside the wanted range stay."""
    memories = [memory.copy() for memory in sink.memories]
    wanted = [
        msgspec.structs.replace(
            region,
            head_lo=case.head_lo,
            head_hi=case.head_hi,
            offset=region.offset + (case.head_lo - region.head_lo) * region.stride_head,
        )
        for region in sink.regions
    ]
    oracle_copy(
        source.regions,
        source.memories,
        wanted,
        memories,
        source_ids=[source.ids.tolist()],
        sink_ids=[sink.ids.tolist()],
        spans={0: (case.token_lo, case.token_hi)},
    )
    return memories


def assert_same_bytes(got: Sequence[Bytes], want: Sequence[Bytes]) -> None:
    for number, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        wrong = np.flatnonzero(ours != theirs)
        assert not wrong.size, (
            f"memory {number}: {wrong.size} of {ours.size} bytes differ; first at {wrong[0]}: "
            f"got {ours[wrong[0]]}, want {theirs[wrong[0]]}"
        )


def naive_dense(
    case: Case, source: Pool, planes: str, region_lo: int, region_hi: int, lo: int, hi: int
) -> Bytes:
    """A chunk by its definition."""
    regions = [region for region in source.regions if region.plane in planes]
    element = case.inner_nbytes
    if case.sink.is_turned and planes == "k" and case.channel_nbytes < case.inner_nbytes:
        element = case.channel_nbytes
    order = oracle_order(
        case.sink.block_tokens // case.sink.kernel_blocks,
        (lo, hi),
        case.head_hi - case.head_lo,
        is_token_major=_is_token_major(case.sink, planes),
        num_channels=case.inner_nbytes // element if element < case.inner_nbytes else 0,
    )
    ids = source.ids.tolist()
    parts: list[Bytes] = []
    for region in regions[region_lo:region_hi]:
        # Made once for all channels of a (token, head): made for each, the test took 276 s, not 10.
        values = {
            (token, head): oracle_bytes(region, source.memories, ids, token, case.head_lo + head)
            for token, head in {(token, head) for token, head, _ in order}
        }
        for token, head, channel in order:
            at = max(channel, 0) * element
            parts.append(values[token, head][at : at + element])
    return np.concatenate(parts)


def _is_token_major(shape: Shape, planes: str) -> bool:
    """Of planes that are not turned. V behind a turned K in each head is head-major."""
    if shape.is_turned and (shape.outermost == "inner" or planes == "k"):
        return False
    return shape.layout == "NHD"


@st.composite
def shapes(draw: st.DrawFn, head_lo: int, head_hi: int) -> Shape:
    block_tokens = draw(st.sampled_from((8, 16, 24, 32, 64)))
    before, behind = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    before = min(before, head_lo)
    return Shape(
        block_tokens=block_tokens,
        kernel_blocks=draw(st.sampled_from([n for n in (1, 2, 3, 4) if block_tokens % n == 0])),
        layout=draw(st.sampled_from(("HND", "NHD"))),
        outermost=draw(st.sampled_from(("planes", "blocks", "inner"))),
        head_lo=head_lo - before,
        num_heads=before + head_hi - head_lo + behind,
        padding_nbytes=draw(st.sampled_from((0, 0, 1, 64, 100))),
        lead_nbytes=draw(st.sampled_from((0, 1, 7, 64, 4096))),
        is_turned=draw(st.booleans()),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    head_lo = draw(st.integers(0, 2))
    head_hi = head_lo + draw(st.integers(1, 4))
    token_lo = draw(st.sampled_from((0, 0, 1, 8, 15, 16, 31, 64)))
    inner_nbytes = draw(st.sampled_from((1, 6, 8, 132, 256, 1152)))
    return Case(
        source=draw(shapes(head_lo, head_hi)),
        sink=draw(shapes(head_lo, head_hi)),
        inner_nbytes=inner_nbytes,
        head_lo=head_lo,
        head_hi=head_hi,
        token_lo=token_lo,
        token_hi=token_lo + draw(st.sampled_from((0, 1, 5, 16, 31, 32, 64, 77, 128))),
        in_order=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
        channel_nbytes=draw(st.sampled_from([n for n in (1, 2, 3, 4, 6) if inner_nbytes % n == 0])),
    )


def plain(
    layout: LayoutName,
    block_tokens: int,
    *,
    num_heads: int,
    outermost: Outermost = "planes",
    is_turned: bool = False,
) -> Shape:
    return Shape(
        block_tokens=block_tokens,
        kernel_blocks=1,
        layout=layout,
        outermost=outermost,
        head_lo=0,
        num_heads=num_heads,
        padding_nbytes=0,
        lead_nbytes=64,
        is_turned=is_turned,
    )


def one_case(
    source: str = "HND 16",
    sink: str = "NHD 32",
    *,
    span: tuple[int, int] = (0, 70),
    inner: int = 8,
    channel: int = 0,
    num_heads: int = 2,
) -> Case:
    """Sides as "HND 16", or "HND 16 turned", then maybe what is outermost."""
    shapes = []
    for name in (source, sink):
        layout, tokens, *more = name.split()
        shapes.append(
            plain(
                "HND" if layout == "HND" else "NHD",
                int(tokens),
                num_heads=num_heads,
                outermost="inner" if "inner" in more else "planes",
                is_turned="turned" in more,
            )
        )
    return Case(
        source=shapes[0],
        sink=shapes[1],
        inner_nbytes=inner,
        head_lo=0,
        head_hi=num_heads,
        token_lo=span[0],
        token_hi=span[1],
        in_order=False,
        seed=7,
        channel_nbytes=channel or 1,
    )


def tile(layout: str, block_tokens: int, kernel_tokens: int, num_heads: int, inner: int) -> Tile:
    hnd = layout == "HND"
    return Tile(
        block_tokens=block_tokens,
        kernel_tokens=kernel_tokens,
        num_blocks=100,
        num_heads=num_heads,
        inner_nbytes=inner,
        stride_block=kernel_tokens * num_heads * inner,
        stride_head=kernel_tokens * inner if hnd else inner,
        stride_token=inner if hnd else num_heads * inner,
    )
