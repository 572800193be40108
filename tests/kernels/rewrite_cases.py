"""Rewrites, where each row goes, one row after the other, and what kernels make of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from kvxfer.kernels.block_rewrite import BlockOrder, BlockRewrite, rewrite_blocks_ref
from kvxfer.kernels.rewrite_kernel import plane_table, rewrite_blocks
from tests.helpers import assert_same_bytes, poisoned


def order(text: str) -> BlockOrder:
    """Of "HND 16" or "NHD 16"."""
    layout, tokens = text.split()
    return BlockOrder(int(tokens), by_head=layout == "HND")


def place(of: BlockOrder, num_heads: int, token: int, head: int) -> int:
    """The row of a token's head in blocks that lie one behind the other."""
    block, slot = divmod(token, of.block_tokens)
    inside = head * of.block_tokens + slot if of.by_head else slot * num_heads + head
    return block * num_heads * of.block_tokens + inside


def sources_of_rows(rewrite: BlockRewrite) -> dict[int, int]:
    """Of each row of a set, the row that it comes from."""
    return {
        place(rewrite.local, rewrite.num_heads, token, head): place(
            rewrite.received, rewrite.num_heads, token, head
        )
        for token in range(rewrite.set_tokens)
        for head in range(rewrite.num_heads)
    }


@dataclass(frozen=True)
class Case:
    """Blocks of ``width`` bytes a row; ``gap`` bytes of poison behind every row."""

    received: BlockOrder
    local: BlockOrder
    num_heads: int = 3
    width: int = 16
    gap: int = 0
    num_sets: int = 2
    num_planes: int = 1
    tile_nbytes: int = 64

    @property
    def rewrite(self) -> BlockRewrite:
        return BlockRewrite(self.num_heads, self.received, self.local)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Two blocks more than are rewritten."""
        middle = (self.num_heads, self.local.block_tokens)
        outer, inner = middle if self.local.by_head else middle[::-1]
        return (
            self.num_sets * self.rewrite.set_blocks + 2,
            outer,
            inner,
            self.width + self.gap,
        )

    @property
    def block_ids(self) -> list[int]:
        """Neither in order nor side by side."""
        num_blocks = self.shape[0]
        step = next(n for n in (7, 5, 3, 2, 1) if math.gcd(n, num_blocks) == 1)
        return [(4 + step * number) % num_blocks for number in range(num_blocks - 2)]


def moved(rewrite: BlockRewrite, blocks: Tensor) -> Tensor:
    """Blocks [n, rows, width] afterwards, which lie set behind set: one row after the other."""
    before, after = blocks.flatten(0, 1), torch.empty_like(blocks).flatten(0, 1)
    num_tokens = len(after) // rewrite.num_heads
    for token, head in product(range(num_tokens), range(rewrite.num_heads)):
        target = place(rewrite.local, rewrite.num_heads, token, head)
        after[target] = before[place(rewrite.received, rewrite.num_heads, token, head)]
    return after.view(blocks.shape)


def naive(case: Case, memory: Tensor) -> Tensor:
    """The same memory afterwards."""
    after = (
        memory.cpu().reshape(case.shape[0], case.num_heads * case.local.block_tokens, -1).clone()
    )
    after[case.block_ids, :, : case.width] = moved(
        case.rewrite, after[case.block_ids, :, : case.width]
    )
    return after.reshape(memory.shape)


def received(case: Case, device: torch.device) -> Tensor:
    """Random bytes, so with NaNs of every kind; poison where nothing was sent."""
    memory = poisoned(case.shape, device)
    ids = torch.tensor(case.block_ids, dtype=torch.int64, device=device)
    sent = torch.randint(0, 256, (len(ids), *case.shape[1:3], case.width)).to(torch.uint8)
    memory[ids, :, :, : case.width] = sent.to(device)
    return memory


def check(case: Case, device: torch.device) -> None:
    """In programs of the case's size, and in plain torch."""
    pools = [received(case, device) for _ in range(case.num_planes)]
    wants = [naive(case, pool).to(device) for pool in pools]
    ids = torch.tensor(case.block_ids, dtype=torch.int64, device=device)

    def views(of: list[Tensor]) -> list[Tensor]:
        return [pool[..., : case.width] for pool in of]

    got = [pool.clone() for pool in pools]
    planes = plane_table(views(got))
    rewrite_blocks(planes, ids, case.rewrite, tile_nbytes=case.tile_nbytes)
    for pool, want in zip(got, wants, strict=True):
        assert_same_bytes(pool, want)
    for view in views(pools):
        rewrite_blocks_ref(view, ids, case.rewrite)
    for pool, want in zip(pools, wants, strict=True):
        assert_same_bytes(pool, want)
