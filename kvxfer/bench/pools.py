"""The pools that benchmarks copy between, requests on them, and a check of what was copied that
shares nothing with the code under test: it looks through plain views, token by token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvxfer.transfer.layout import Region
from kvxfer.transfer.plan import Base, CopyClass, PullClass, RegionName, Side, Tile

POISON = 0xEE
PLANES = ("k", "v")

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Shape:
    """What one token is: regions (K and V of each layer), heads, bytes of one head."""

    name: str
    regions: int
    heads: int
    inner_nbytes: int

    @property
    def token_nbytes(self) -> int:
        """Of one token in one region."""
        return self.heads * self.inner_nbytes


LLAMA_8B = Shape("8B", 64, 8, 256)
LLAMA_70B_TP8 = Shape("70B-TP8", 160, 1, 256)
TINY = Shape("tiny", 4, 2, 64)
SHAPES = {shape.name: shape for shape in (LLAMA_8B, LLAMA_70B_TP8, TINY)}


@dataclass(frozen=True, slots=True)
class Pool:
    """Blocks of all regions in the first bytes of one memory, region after region.

    ``layout``: HND ``[heads, tokens]`` or NHD ``[tokens, heads]`` within a block.
    """

    layout: str
    block_tokens: int
    num_blocks: int
    shape: Shape

    @property
    def block_nbytes(self) -> int:
        """Of one block in one region."""
        return self.block_tokens * self.shape.token_nbytes

    @property
    def nbytes(self) -> int:
        """Of all blocks in all regions."""
        return self.shape.regions * self.num_blocks * self.block_nbytes

    @property
    def name(self) -> str:
        return f"{self.layout}{self.block_tokens}"

    def side(self) -> Side:
        """What the code under test is told."""
        inner, is_hnd = self.shape.inner_nbytes, self.layout == "HND"
        tile = Tile(
            block_tokens=self.block_tokens,
            kernel_tokens=self.block_tokens,
            num_blocks=self.num_blocks,
            num_heads=self.shape.heads,
            inner_nbytes=inner,
            stride_block=self.block_nbytes,
            stride_head=self.block_tokens * inner if is_hnd else inner,
            stride_token=inner if is_hnd else self.shape.token_nbytes,
        )
        region_nbytes = self.num_blocks * self.block_nbytes
        bases = tuple(Base(0, region * region_nbytes) for region in range(self.shape.regions))
        return Side(group=0, tile=tile, bases=bases)

    def kv_regions(self) -> tuple[Region, ...]:
        """The same for a connector's manifest."""
        side = self.side()
        return tuple(
            Region(
                layer=f"layers.{index // len(PLANES)}",
                plane=PLANES[index % len(PLANES)],
                group=0,
                memory=0,
                offset=base.offset,
                num_blocks=self.num_blocks,
                block_tokens=self.block_tokens,
                head_lo=0,
                head_hi=self.shape.heads,
                inner_nbytes=self.shape.inner_nbytes,
                stride_block=side.tile.stride_block,
                stride_head=side.tile.stride_head,
                stride_token=side.tile.stride_token,
            )
            for index, base in enumerate(side.bases)
        )

    def blocks(self, memory: Tensor) -> Tensor:
        """[regions, blocks, tokens, heads, inner], a view of a memory [nbytes or more]."""
        within = (self.block_tokens, self.shape.heads)
        within = within[::-1] if self.layout == "HND" else within
        view = memory[: self.nbytes].view(
            self.shape.regions, self.num_blocks, *within, self.shape.inner_nbytes
        )
        return view.transpose(2, 3) if self.layout == "HND" else view

    def ids(self, num_tokens: int, seed: int) -> Ids:
        """Blocks for a request, from anywhere in the pool, in no order."""
        order = np.random.default_rng(seed).permutation(self.num_blocks)
        return order[: -(-num_tokens // self.block_tokens)].astype(np.int64)

    def token_digests(self, memory: Tensor, ids: Ids, tokens: Iterable[int]) -> list[bytes]:
        """A digest of each of these tokens of a request: all its regions and heads."""
        blocks = self.blocks(memory)
        digests: list[bytes] = []
        for token in tokens:
            at, inside = divmod(token, self.block_tokens)
            content = blocks[:, int(ids[at]), inside].contiguous().cpu()
            digests.append(hashlib.blake2b(content.numpy().tobytes(), digest_size=16).digest())
        return digests

    def is_untouched_beside(self, memory: Tensor, ids: Ids) -> bool:
        """Whether all blocks but these are poison."""
        others = torch.ones(self.num_blocks, dtype=torch.bool)
        others[torch.from_numpy(ids)] = False
        where = others.nonzero().flatten().to(memory.device)
        return all(
            bool((region.index_select(0, where) == POISON).all()) for region in self.blocks(memory)
        )


@dataclass(frozen=True, slots=True)
class Request:
    """A copy between two pools: the tokens of one request, from its first."""

    source: Pool
    sink: Pool
    num_tokens: int

    @property
    def shape(self) -> Shape:
        return self.sink.shape

    @property
    def nbytes(self) -> int:
        return self.num_tokens * self.shape.regions * self.shape.token_nbytes

    def side(self, is_source: bool) -> tuple[Pool, Ids]:
        """A side's pool, and the request's blocks in it."""
        return (self.source, self.source_ids) if is_source else (self.sink, self.sink_ids)

    @property
    def name(self) -> str:
        return f"{self.shape.name} {self.layouts} {self.num_tokens} tokens"

    @property
    def layouts(self) -> str:
        return f"{self.source.name}->{self.sink.name}"

    @property
    def is_equal(self) -> bool:
        """Blocks can be copied as they are."""
        return (self.source.layout, self.source.block_tokens) == (
            self.sink.layout,
            self.sink.block_tokens,
        )

    def raw(self) -> Request:
        """As many bytes without a change of layout: into blocks like the source's."""
        return replace(self, sink=self.source)

    @property
    def source_ids(self) -> Ids:
        return self.source.ids(self.num_tokens, seed=1)

    @property
    def sink_ids(self) -> Ids:
        return self.sink.ids(self.num_tokens, seed=2)

    def copy_class(self) -> tuple[CopyClass, PullClass]:
        names = tuple(RegionName(str(index), ("kv",)) for index in range(self.shape.regions))
        sink = self.sink.side()
        pull = PullClass(
            regions=names,
            head_lo=0,
            head_hi=self.shape.heads,
            inner_nbytes=self.shape.inner_nbytes,
            order=sink.tile.order,
            token_lo=0,
            token_hi=self.num_tokens,
        )
        return CopyClass(names, 0, self.shape.heads, self.source.side(), sink), pull

    def pieces(self) -> tuple[Ids, Ids]:
        """Byte offsets of the request's blocks in both memories, region by region, for copies of
        blocks as they are: equal layouts only.
        """
        offsets = []
        for pool, ids in (self.side(True), self.side(False)):
            regions = np.arange(self.shape.regions, dtype=np.int64)[:, None] * pool.num_blocks
            offsets.append(((regions + ids) * pool.block_nbytes).ravel())
        return offsets[0], offsets[1]

    def sampled_tokens(self, most: int) -> list[int]:
        """Which tokens to check: all, or ``most`` with the first and the last among them."""
        if self.num_tokens <= most:
            return list(range(self.num_tokens))
        inner = np.random.default_rng(3).choice(self.num_tokens - 2, most - 2, replace=False) + 1
        return [0, *sorted(int(token) for token in inner), self.num_tokens - 1]


def layout_of(text: str) -> tuple[str, int]:
    """Layout and tokens of a block from, say, HND16. Raises ValueError."""
    layout, tokens = text[:3], text[3:]
    if layout not in ("HND", "NHD") or not tokens.isdigit() or int(tokens) < 1:
        raise ValueError(f"layout: expected HND or NHD and the tokens of a block, got {text!r}")
    return layout, int(tokens)


def request_of(shape: Shape, layouts: str, num_tokens: int, pool_tokens: int) -> Request:
    """A request between pools of at least ``pool_tokens`` tokens; ``layouts``: HND16->NHD64."""
    pools = []
    for text in layouts.split("->"):
        layout, block_tokens = layout_of(text)
        pools.append(Pool(layout, block_tokens, -(-pool_tokens // block_tokens), shape))
    if len(pools) != 2:
        raise ValueError(f"layouts: expected two with -> between them, got {layouts!r}")
    return Request(pools[0], pools[1], num_tokens)
