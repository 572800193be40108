"""Regions and manifests of made-up engines, and bytes for them. For tests only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from msgspec import UNSET
from msgspec.structs import replace
from numpy.typing import NDArray

from kvxfer.transfer.interleave import Interleave
from kvxfer.transfer.layout import Interior, Region
from kvxfer.transfer.manifest import (
    CacheFacts,
    EngineIdentity,
    EngineManifest,
    MemoryInfo,
    RankId,
    RankManifest,
)
from kvxfer.transfer.plan import PullClass, Route
from kvxfer.transfer.pull import pull_class
from kvxfer.transfer.states import StatePart, part_heads, state_regions

Bytes = NDArray[np.uint8]
LayoutName = Literal["HND", "NHD"]
Outermost = Literal["planes", "blocks", "inner"]

HEADER_NBYTES = 64  # nothing of a cache lies at offset 0, so a forgotten offset shows


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """Layers that keep a state, behind those of attention: in a block the last ``steps`` inputs of
    the convolution, [step][channel] ("SD") or [channel][step] ("DS"), in elements of 2 bytes, then
    the recurrence in elements of 4, then padding.
    """

    conv: tuple[StatePart, ...]
    recurrence: StatePart
    conv_layout: Literal["SD", "DS"] = "SD"
    steps: int = 3
    state_tokens: int = 16
    num_layers: int = 2
    padding_nbytes: int = 4

    def num_channels(self, tp_rank: int, tp_size: int) -> int:
        """Of the convolution, on a rank."""
        bounds = [(part, part_heads(part, tp_rank, tp_size)) for part in self.conv]
        return sum((hi - lo) * part.num_channels for part, (lo, hi) in bounds)

    def block_nbytes(self, tp_rank: int, tp_size: int) -> int:
        """Of one layer, with padding."""
        lo, hi = part_heads(self.recurrence, tp_rank, tp_size)
        recurrence = (hi - lo) * self.recurrence.num_channels * 4
        conv = self.num_channels(tp_rank, tp_size) * self.steps * 2
        return conv + recurrence + self.padding_nbytes


MAMBA1 = StateShape(conv=(StatePart("x", 8, 2),), recurrence=StatePart("ssm", 16, 3))
MAMBA2 = StateShape(
    conv=(StatePart("x", 8, 4), StatePart("B", 2, 6), StatePart("C", 2, 6)),
    recurrence=StatePart("ssm", 8, 24),
)
DELTA_NET = StateShape(
    conv=(StatePart("q", 4, 3), StatePart("k", 4, 3), StatePart("v", 8, 2)),
    recurrence=StatePart("ssm", 8, 6),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """A whole engine in a few numbers.

    ``layout``: order within a kernel block, HND ``[head][token]`` or NHD ``[token][head]``.
    ``outermost``: ``planes`` (all of K, then all of V), ``blocks`` (K and V within each kernel
    block) or ``inner`` (the K bytes and the V bytes of one head and token side by side).
    ``padding_nbytes`` lies behind every plane of a kernel block.
    ``turned`` planes are held [head][channel][token] in every kernel block, in channels of
    ``channel_nbytes``; with ``inner`` each head then has all of K before all of V.
    ``groups``: one number per layer, default all 0. ``windows``: by group, default none; they are
    chunks if ``has_chunks``.
    ``shares``: (layer, layer whose memory it uses). ``state``: layers that keep one, the last
    group. ``cell_tokens``: how many tokens share a cell. ``cp_size``: tensor-parallel ranks that
    hold the same heads take the tokens in turns, ``cp_run`` of them at a time; they are
    ``cp_stride`` ranks apart. ``block_tokens`` are a rank's own.
    """

    tp_size: int = 1
    pp_size: int = 1
    num_kv_heads: int = 2
    is_mla: bool = False
    num_layers: int = 2
    block_tokens: int = 16
    kernel_blocks: int = 1
    num_blocks: int = 8
    inner_nbytes: int = 8
    layout: LayoutName = "HND"
    outermost: Outermost = "planes"
    padding_nbytes: int = 0
    turned: tuple[str, ...] = ()
    channel_nbytes: int = 2
    groups: tuple[int, ...] = ()
    windows: tuple[int | None, ...] = ()
    has_chunks: bool = False
    shares: tuple[tuple[int, int], ...] = ()
    interior: Interior = Interior.PLAIN
    state: StateShape | None = None
    cell_tokens: int = 1
    cp_size: int = 1
    cp_run: int = 1
    cp_stride: int = 1
    protocol: tuple[int, int] = (1, 1)

    @property
    def table_tokens(self) -> int:
        """Tokens of a request that a block of its table stands for."""
        return self.block_tokens * self.cp_size

    @property
    def planes(self) -> tuple[str, ...]:
        """Names of a layer's planes."""
        return ("latent",) if self.is_mla else ("k", "v")

    @property
    def num_groups(self) -> int:
        """How many block tables a request has."""
        return max(self.groups, default=0) + 1 + (self.state is not None)

    def group_of(self, layer: int) -> int:
        """The group of a layer."""
        return self.groups[layer] if self.groups else 0

    def window_of(self, layer: int) -> int | None:
        """How many tokens a layer's group keeps; None: all."""
        return self.windows[self.group_of(layer)] if self.windows else None

    def heads_of(self, tp_rank: int) -> tuple[int, int]:
        """Global heads ``[lo, hi)`` of a rank: equal shares, or one replicated head each."""
        if self.is_mla:
            return 0, 1
        lo = tp_rank * self.num_kv_heads // self.tp_size
        return lo, max(lo + 1, (tp_rank + 1) * self.num_kv_heads // self.tp_size)

    def layers_of(self, pp_rank: int) -> range:
        """Layer numbers of a pipeline stage."""
        bounds = [stage * self.num_layers // self.pp_size for stage in (pp_rank, pp_rank + 1)]
        return range(*bounds)


def layer_name(index: int) -> str:
    """The name under which both engines know a layer."""
    return f"layers.{index}"


def build_regions(shape: EngineShape, rank: RankId) -> tuple[tuple[Region, ...], int]:
    """The regions of one rank in one memory (number 0), and the bytes that memory needs."""
    head_lo, head_hi = shape.heads_of(rank.tp)
    num_heads = head_hi - head_lo
    num_planes = len(shape.planes)
    kernel_tokens = shape.block_tokens // shape.kernel_blocks // shape.cell_tokens
    num_kernel_blocks = shape.num_blocks * shape.kernel_blocks
    unit_nbytes = shape.inner_nbytes * (num_planes if shape.outermost == "inner" else 1)
    plane_nbytes = num_heads * kernel_tokens * unit_nbytes + shape.padding_nbytes
    if shape.layout == "HND":
        stride_token, stride_head = unit_nbytes, kernel_tokens * unit_nbytes
    else:
        stride_token, stride_head = num_heads * unit_nbytes, unit_nbytes
    stride_block, stride_plane = {
        "planes": (plane_nbytes, num_kernel_blocks * plane_nbytes),
        "blocks": (num_planes * plane_nbytes, plane_nbytes),
        "inner": (plane_nbytes, shape.inner_nbytes),
    }[shape.outermost]
    if shape.turned and shape.outermost == "inner":
        stride_plane = kernel_tokens * shape.inner_nbytes
        stride_token, stride_head = shape.inner_nbytes, kernel_tokens * unit_nbytes
    turned_head = stride_head
    if shape.layout == "NHD" and shape.outermost != "inner":
        turned_head = kernel_tokens * shape.inner_nbytes
    layer_nbytes = num_kernel_blocks * plane_nbytes
    if shape.outermost != "inner":
        layer_nbytes *= num_planes
    owner = dict(shape.shares)
    layers = shape.layers_of(rank.pp)
    regions = tuple(
        Region(
            layer=layer_name(layer),
            plane=plane,
            group=shape.group_of(layer),
            memory=0,
            offset=HEADER_NBYTES
            + layers.index(owner.get(layer, layer)) * layer_nbytes
            + plane_index * stride_plane,
            num_blocks=shape.num_blocks,
            block_tokens=shape.block_tokens,
            head_lo=head_lo,
            head_hi=head_hi,
            inner_nbytes=shape.inner_nbytes,
            stride_block=stride_block,
            stride_head=turned_head if plane in shape.turned else stride_head,
            stride_token=shape.channel_nbytes if plane in shape.turned else stride_token,
            channel_nbytes=shape.channel_nbytes if plane in shape.turned else 0,
            stride_channel=kernel_tokens * shape.channel_nbytes if plane in shape.turned else 0,
            kernel_blocks=shape.kernel_blocks,
            interior=shape.interior,
            window=shape.window_of(layer),
            cell_tokens=UNSET if shape.cell_tokens == 1 else shape.cell_tokens,
            is_chunk=(shape.has_chunks and shape.window_of(layer) is not None) or UNSET,
            interleave=Interleave(
                shape.cp_size, rank.tp // shape.cp_stride % shape.cp_size, shape.cp_run
            )
            if shape.cp_size > 1
            else UNSET,
        )
        for layer in layers
        for plane_index, plane in enumerate(shape.planes)
    )
    nbytes = HEADER_NBYTES + len(layers) * layer_nbytes
    if shape.state is None:
        return regions, nbytes
    states = _state_regions(shape, shape.state, rank, nbytes)
    block_nbytes = shape.state.block_nbytes(rank.tp, shape.tp_size)
    return regions + states, nbytes + shape.state.num_layers * shape.num_blocks * block_nbytes


def _state_regions(
    shape: EngineShape, state: StateShape, rank: RankId, offset: int
) -> tuple[Region, ...]:
    """Of the layers behind those of attention; the first lies at ``offset``."""
    num_channels = state.num_channels(rank.tp, shape.tp_size)
    block_nbytes = state.block_nbytes(rank.tp, shape.tp_size)
    conv_nbytes = num_channels * state.steps * 2
    lo, hi = part_heads(state.recurrence, rank.tp, shape.tp_size)
    found: list[Region] = []
    for layer in range(state.num_layers):
        conv = Region(
            layer=layer_name(shape.num_layers + layer),
            plane="conv",
            group=shape.num_groups - 1,
            memory=0,
            offset=offset + layer * shape.num_blocks * block_nbytes,
            num_blocks=shape.num_blocks,
            block_tokens=state.steps,
            head_lo=0,
            head_hi=1,
            inner_nbytes=num_channels * 2,
            stride_block=block_nbytes,
            stride_head=1,
            stride_token=num_channels * 2 if state.conv_layout == "SD" else 2,
            channel_nbytes=2,
            stride_channel=2 if state.conv_layout == "SD" else state.steps * 2,
            state_tokens=state.state_tokens,
        )
        nbytes = (hi - lo) * state.recurrence.num_channels * 4
        recurrence = replace(
            conv,
            offset=conv.offset + conv_nbytes,
            block_tokens=1,
            inner_nbytes=nbytes,
            stride_token=nbytes,
            channel_nbytes=4,
            stride_channel=4,
        )
        found += state_regions(conv, state.conv, rank.tp, shape.tp_size)
        found += state_regions(recurrence, (state.recurrence,), rank.tp, shape.tp_size)
    return tuple(found)


def build_manifest(shape: EngineShape, engine_id: str = "engine") -> EngineManifest:
    """A complete manifest; ranks listen on ports from 5700 upwards of 127.0.0.1."""
    ranks: list[RankManifest] = []
    for pp in range(shape.pp_size):
        for tp in range(shape.tp_size):
            rank = RankId(pp, tp)
            regions, nbytes = build_regions(shape, rank)
            ranks.append(
                RankManifest(
                    rank=rank,
                    control_endpoint=f"tcp://127.0.0.1:{5700 + len(ranks)}",
                    data_endpoints={},
                    memories=(MemoryInfo(device="cpu", nbytes=nbytes),),
                    regions=regions,
                )
            )
    return EngineManifest(
        engine_id=engine_id,
        incarnation=engine_id.encode().ljust(16, b"\0")[:16],
        protocol=(3, 3) if shape.cp_size > 1 else shape.protocol,
        capabilities=(),
        facts=CacheFacts(
            model="llama-test",
            weights="0123abcd",
            rope="theta=10000",
            dtype="float32",
            quantisation="none",
            num_kv_heads=shape.num_kv_heads,
            head_size=shape.inner_nbytes // 4,
            num_layers=shape.num_layers,
            is_mla=shape.is_mla,
            dcp_size=shape.cp_size,
        ),
        tp_size=shape.tp_size,
        pp_size=shape.pp_size,
        block_tokens=shape.table_tokens,
        layout=shape.layout,
        ranks=tuple(ranks),
    )


def identity_of(manifest: EngineManifest, **changes: object) -> EngineIdentity:
    """What the engine of this manifest knows of itself, but for these fields."""
    fields = {name: getattr(manifest, name) for name in EngineIdentity.__struct_fields__}
    return EngineIdentity(**fields | changes)


def build_memories(rank: RankManifest, fill: int = 0xA5) -> list[Bytes]:
    """Memories of one rank, every byte poisoned with ``fill``."""
    return [np.full(info.nbytes, fill, dtype=np.uint8) for info in rank.memories]


def scattered_ids(
    num_tokens: int, block_tokens: int, num_blocks: int, seed: int
) -> tuple[int, ...]:
    """Distinct block ids for a request of ``num_tokens``, in no order."""
    order = np.random.default_rng(seed).permutation(num_blocks)
    return tuple(int(block) for block in order[: -(-num_tokens // block_tokens)])


def pull_classes(route: Route, span: Mapping[int, tuple[int, int]]) -> tuple[PullClass, ...]:
    """What is asked for of a route: request tokens ``[lo, hi)`` by sink group."""
    return tuple(pull_class(each, *span[each.sink.group]) for each in route.classes)
