"""Regions and manifests of made-up engines, and bytes for them. For tests only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvxfer.transfer.layout import Interior, Region
from kvxfer.transfer.manifest import (
    CacheFacts,
    EngineIdentity,
    EngineManifest,
    MemoryInfo,
    RankId,
    RankManifest,
)

Bytes = NDArray[np.uint8]
LayoutName = Literal["HND", "NHD"]
Outermost = Literal["planes", "blocks", "inner"]

HEADER_NBYTES = 64  # nothing of a cache lies at offset 0, so a forgotten offset shows


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """A whole engine in a few numbers.

    ``layout``: order within a kernel block, HND ``[head][token]`` or NHD ``[token][head]``.
    ``outermost``: ``planes`` (all of K, then all of V), ``blocks`` (K and V within each kernel
    block) or ``inner`` (the K bytes and the V bytes of one head and token side by side).
    ``padding_nbytes`` lies behind every plane of a kernel block.
    ``turned`` planes are held [head][channel][token] in every kernel block, in channels of
    ``channel_nbytes``; with ``inner`` each head then has all of K before all of V.
    ``groups``: one number per layer, default all 0. ``windows``: by group, default none.
    ``shares``: (layer, layer whose memory it uses).
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
    shares: tuple[tuple[int, int], ...] = ()
    interior: Interior = Interior.PLAIN

    @property
    def planes(self) -> tuple[str, ...]:
        """Names of a layer's planes."""
        return ("latent",) if self.is_mla else ("k", "v")

    @property
    def num_groups(self) -> int:
        """How many block tables a request has."""
        return max(self.groups, default=0) + 1

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
    kernel_tokens = shape.block_tokens // shape.kernel_blocks
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
        )
        for layer in layers
        for plane_index, plane in enumerate(shape.planes)
    )
    return regions, HEADER_NBYTES + len(layers) * layer_nbytes


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
        protocol=(1, 1),
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
        ),
        tp_size=shape.tp_size,
        pp_size=shape.pp_size,
        block_tokens=shape.block_tokens,
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
