"""What post-processing does to received blocks, and the same in plain torch; needs no Triton.

A source's blocks were written one behind the other over local blocks, in the source's order. A set
is the smallest number of local blocks that received ones fill exactly: one where the local block is
a multiple of the received one, several where it is smaller or neither divides the other. No byte
leaves its set, so sets are rewritten in place, each by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockOrder:
    """How a block lies in memory: [H, block_tokens, D] by head, else [block_tokens, H, D]."""

    block_tokens: int
    by_head: bool

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ValueError(f"block_tokens: expected 1 or more, got {self.block_tokens}")


@dataclass(frozen=True, slots=True)
class BlockRewrite:
    """Blocks in the order ``received`` become blocks in the order ``local``.

    A row is what one head keeps of one token (D); rows are counted from the beginning of a set.
    """

    num_heads: int
    received: BlockOrder
    local: BlockOrder

    def __post_init__(self) -> None:
        if self.num_heads < 1:
            raise ValueError(f"num_heads: expected 1 or more, got {self.num_heads}")

    @property
    def received_by_head(self) -> bool:
        """False also where both orders are the same: one head, or one token a block."""
        return self.received.by_head and self.num_heads > 1 and self.received.block_tokens > 1

    @property
    def local_by_head(self) -> bool:
        """As :attr:`received_by_head`."""
        return self.local.by_head and self.num_heads > 1 and self.local.block_tokens > 1

    @property
    def moves_nothing(self) -> bool:
        """Received blocks are in local order already."""
        if self.received_by_head and self.local_by_head:
            return self.received.block_tokens == self.local.block_tokens
        return not self.received_by_head and not self.local_by_head

    @property
    def set_tokens(self) -> int:
        """Tokens of a set. Blocks by token need no end of a received block at the end of a set."""
        if self.received_by_head:
            return math.lcm(self.received.block_tokens, self.local.block_tokens)
        return self.local.block_tokens

    @property
    def set_blocks(self) -> int:
        """Local blocks of a set."""
        return self.set_tokens // self.local.block_tokens

    @property
    def run_tokens(self) -> int:
        """Tokens of one head that stay behind each other: what moves is such a run."""
        if self.received_by_head and self.local_by_head:
            return math.gcd(self.received.block_tokens, self.local.block_tokens)
        return 1

    @property
    def set_runs(self) -> int:
        """Runs of a set, of all heads."""
        return self.num_heads * self.set_tokens // self.run_tokens

    def check_blocks(self, num_blocks: int, num_covered_tokens: int | None) -> None:
        """Raise ValueError for blocks that are no whole sets, or hold fewer tokens than covered."""
        if num_blocks % self.set_blocks:
            raise ValueError(
                f"indices: expected a multiple of {self.set_blocks} blocks, because received "
                f"blocks of {self.received.block_tokens} tokens lie over that many local ones of "
                f"{self.local.block_tokens}, got {num_blocks}"
            )
        num_tokens = num_blocks * self.local.block_tokens
        if num_covered_tokens is not None and not 0 <= num_covered_tokens <= num_tokens:
            raise ValueError(
                f"num_covered_tokens: expected at most the {num_tokens} tokens of {num_blocks} "
                f"blocks, got {num_covered_tokens}"
            )


def rewrite_blocks_ref(
    view: Tensor, block_ids: Tensor, rewrite: BlockRewrite, num_covered_tokens: int | None = None
) -> None:
    """The rewrite in plain torch, in place.

    Args:
        view: [num_blocks, H, N, D] or [num_blocks, N, H, D] as ``rewrite.local`` says, any strides.
        block_ids: [n] int64 on the view's device, each once, set behind set.
        num_covered_tokens: tokens received, from the first of the first block on; all later ones
            become zero. None: all.
    """
    rewrite.check_blocks(block_ids.numel(), num_covered_tokens)
    if not block_ids.numel():
        return
    blocks = view.index_select(0, block_ids)
    if not rewrite.moves_nothing:
        sets = blocks.view(-1, rewrite.set_runs, rewrite.run_tokens * view.shape[3])
        blocks = sets.index_select(1, sources_of_runs(rewrite, view.device)).view(blocks.shape)
    if num_covered_tokens is not None:
        by_token = blocks.transpose(1, 2) if rewrite.local.by_head else blocks
        tokens = torch.arange(block_ids.numel() * rewrite.local.block_tokens, device=view.device)
        by_token[tokens.view(by_token.shape[:2]) >= num_covered_tokens] = 0
    view.index_copy_(0, block_ids, blocks)


def sources_of_runs(rewrite: BlockRewrite, device: torch.device) -> Tensor:
    """Where each run of a set comes from, both counted in runs."""
    rows = torch.arange(rewrite.num_heads * rewrite.set_tokens, device=device)
    if rewrite.received_by_head:
        shape = (-1, rewrite.num_heads, rewrite.received.block_tokens)
        rows = rows.view(shape).transpose(1, 2).reshape(-1)
    if rewrite.local_by_head:
        shape = (-1, rewrite.local.block_tokens, rewrite.num_heads)
        rows = rows.view(shape).transpose(1, 2).reshape(-1)
    return rows[:: rewrite.run_tokens] // rewrite.run_tokens
