"""What post-processing does to received blocks, how programs of a GPU share it, and the same in
plain torch; needs no Triton.

A source's blocks were written one behind the other over local blocks, in the source's order. A set
is the smallest number of local blocks that received ones fill exactly: one where the local block is
a multiple of the received one, several where it is smaller or neither divides the other. No byte
leaves its set, so sets are rewritten in place, each by itself.

Where each run of rows of a set goes is the same for every set: a permutation. Runs that follow each
other around one of its cycles only take each other's places, so a program that has all of them in
registers before it stores the first one needs no scratch memory and waits for nobody.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

# 1024 threads with half of the registers of a multiprocessor
MAX_TILE_NBYTES = 128 << 10
# 16 for each of 1024 threads
MAX_TILE_UNITS = 16384
# Programs become larger before columns become narrower: one of 128 bytes moved 1.5 times as fast as
# one of 64 (scripts/results/postprocess_2026-11-22.md)
_WIDE_NBYTES = 512
# of GPU memory: a narrower column is fetched several times
_SECTOR_NBYTES = 32
# Of a warp
_MIN_LANES = 32
# Programs of an eighth of a tile at least: some are fuller of whole cycles
_MIN_TILE_SHARE = 8


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
        """False also where both orders are the same, as in :attr:`received_by_head`."""
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
        return self.set_tokens // self.local.block_tokens

    @property
    def run_tokens(self) -> int:
        """Tokens of one head that stay behind each other: what moves is such a run."""
        if self.received_by_head and self.local_by_head:
            return math.gcd(self.received.block_tokens, self.local.block_tokens)
        return 1

    @property
    def set_runs(self) -> int:
        return self.num_heads * self.set_tokens // self.run_tokens

    def check_blocks(self, num_blocks: int) -> None:
        """Raise ValueError for blocks that are no whole sets."""
        if num_blocks % self.set_blocks:
            raise ValueError(
                f"indices: expected a multiple of {self.set_blocks} blocks, because received "
                f"blocks of {self.received.block_tokens} tokens lie over that many local ones of "
                f"{self.local.block_tokens}, got {num_blocks}"
            )


def rewrite_blocks_ref(view: Tensor, block_ids: Tensor, rewrite: BlockRewrite) -> None:
    """The rewrite in plain torch, in place.

    Args:
        view: [num_blocks, H, N, D] or [num_blocks, N, H, D] as ``rewrite.local`` says, any strides.
        block_ids: [n] int64 on the view's device, each once, set behind set.
    """
    rewrite.check_blocks(block_ids.numel())
    if not block_ids.numel() or rewrite.moves_nothing:
        return
    blocks = view.index_select(0, block_ids)
    sets = blocks.view(-1, rewrite.set_runs, rewrite.run_tokens * view.shape[3])
    moved = sets.index_select(1, sources_of_runs(rewrite, view.device)).view(blocks.shape)
    view.index_copy_(0, block_ids, moved)


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


@cache
def cycles_of(rewrite: BlockRewrite) -> tuple[tuple[int, ...], ...]:
    """Runs in the order of a cycle, each run behind its source; by first run. Fixed points too."""
    sources: list[int] = sources_of_runs(rewrite, torch.device("cpu")).tolist()
    cycles = []
    seen = [False] * len(sources)
    for first in range(len(sources)):
        if seen[first]:
            continue
        cycle = []
        run = first
        while not seen[run]:
            seen[run] = True
            cycle.append(run)
            run = sources[run]
        cycles.append(tuple(reversed(cycle)))
    return tuple(cycles)


@cache
def longest_cycle(rewrite: BlockRewrite) -> int:
    """Its runs; a program holds a unit of each of them at least."""
    return max(map(len, cycles_of(rewrite)))


@dataclass(frozen=True, slots=True, eq=False)
class ProgramPlan:
    """How programs share a set: bins of whole cycles, and of each run of a bin ``columns`` units.
    Equal only to itself.

    ``runs`` [num_bins, most_runs, 2] int32: source and target, counted from the beginning of a set;
    -1 where a bin has no more. All bins together: every run that moves, once. ``num_slices``:
    programs that share the columns of a bin.
    """

    runs: Tensor
    columns: int
    num_slices: int

    @property
    def num_programs(self) -> int:
        """Programs that rewrite one set: every slice of every bin."""
        return self.runs.shape[0] * self.num_slices

    @property
    def busy_units(self) -> int:
        """Units that the fullest program holds: its runs times its columns."""
        return self.runs.shape[1] * self.columns

    @property
    def lanes(self) -> int:
        """A power of two, of which the busy units are more than half: the compiler would drop the
        others of the tile, but only after it has unrolled them. A minute for a program of 24 units
        of 2 bytes in a tile of 16384.
        """
        return max(_MIN_LANES, 1 << (self.busy_units - 1).bit_length())

    @property
    def shift(self) -> int:
        """For every lane, lane // columns is lane * magic >> shift, in 31 bits.

        Exact: magic exceeds 2**shift / columns by less than 1, so the quotient is off by less than
        lanes / 2**shift, which is at most 1 / columns.
        """
        return (self.lanes * self.columns - 1).bit_length()

    @property
    def magic(self) -> int:
        """The multiplier that stands for a division by ``columns``; see :attr:`shift`."""
        return -(-(1 << self.shift) // self.columns)


def bins_of(rewrite: BlockRewrite, capacity: int) -> Tensor:
    """``runs`` of a plan: whole cycles, at most ``capacity`` runs a bin, which is at least the
    longest cycle. By their first run, so that programs side by side move rows side by side.
    """
    bins: list[list[tuple[int, int]]] = [[]]
    for cycle in cycles_of(rewrite):
        if len(cycle) == 1:
            continue
        if len(bins[-1]) + len(cycle) > capacity:
            bins.append([])
        # Python's -1 is the last one: the first run's source
        bins[-1] += [(cycle[at - 1], run) for at, run in enumerate(cycle)]
    most_runs = max(map(len, bins))
    padded = [sorted(pairs) + [(-1, -1)] * (most_runs - len(pairs)) for pairs in bins]
    return torch.tensor(padded, dtype=torch.int32)


def tile_of(num_longest: int, run_units: int, unit_nbytes: int, max_units: int) -> tuple[int, int]:
    """Units of a program and columns of its runs: ``max_units`` that hold a cycle of
    ``num_longest`` runs, more if they must.

    Columns of the runs are cut where whole runs do not fit.
    """
    largest = min(MAX_TILE_NBYTES // unit_nbytes, MAX_TILE_UNITS)
    wanted = min(run_units, _WIDE_NBYTES // unit_nbytes)
    units = max_units
    while units < largest and num_longest * wanted > units:
        units *= 2
    columns = min(run_units, units // num_longest)
    num_slices = -(-run_units // columns)
    # As wide as each other, and whole sectors, if that makes them no wider
    sector = max(1, _SECTOR_NBYTES // unit_nbytes)
    even = -(-run_units // (num_slices * sector)) * sector
    return units, min(columns, even)


@cache
def plan_of(
    rewrite: BlockRewrite, run_units: int, unit_nbytes: int, tile_nbytes: int
) -> ProgramPlan:
    """About ``tile_nbytes`` a program; smaller ones where those are fuller, by an eighth."""
    num_longest = longest_cycle(rewrite)
    most = min(max(1, tile_nbytes // unit_nbytes), MAX_TILE_UNITS)
    least = max(1, most // _MIN_TILE_SHARE)
    plans = []
    while most >= least:
        units, columns = tile_of(num_longest, run_units, unit_nbytes, most)
        runs = bins_of(rewrite, units // columns)
        plans.append(ProgramPlan(runs, columns, num_slices=-(-run_units // columns)))
        most //= 2
    fewest = min(plan.num_programs * plan.busy_units for plan in plans)
    return next(plan for plan in plans if plan.num_programs * plan.busy_units * 8 <= fewest * 9)
