"""Put received blocks into the local order, in place: every layer, K and V, in one launch.

A rewrite moves whole runs of rows within a set of blocks, along the cycles of a permutation: a
program owns some whole cycles, has them in registers before it stores the first run, and shares no
byte with another program (cycles.py). That needs no scratch memory, and reads and writes every byte
that moves once. Blocks with rows of narrow units are moved as a whole instead (rewrite_gather.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kvxfer.kernels.block_rewrite import BlockRewrite
from kvxfer.kernels.cycles import (
    MAX_TILE_NBYTES,
    MAX_TILE_UNITS,
    RunTable,
    longest_cycle,
    plan_of,
)
from kvxfer.kernels.elements import ELEMENTS
from kvxfer.kernels.rewrite_gather import gather_blocks, gathers
from kvxfer.kernels.rewrite_kernel import rewrite_kernel
from kvxfer.kernels.segments import Segments, on_device

# CUDA's limit for the first dimension of a grid
MAX_GRID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class CyclePrograms:
    """What a program moves at most, a power of two, more where a cycle is longer; and about how
    many units of up to 16 bytes a thread of it moves.
    """

    tile_nbytes: int = 32 << 10
    thread_units: int = 8

    def __post_init__(self) -> None:
        nbytes = self.tile_nbytes
        if not 0 < nbytes <= MAX_TILE_NBYTES or nbytes & (nbytes - 1):
            raise ValueError(
                f"tile_nbytes: expected a power of two up to {MAX_TILE_NBYTES}, got {nbytes}"
            )
        if self.thread_units < 1:
            raise ValueError(f"thread_units: expected 1 or more, got {self.thread_units}")


CYCLE_PROGRAMS = CyclePrograms()


def rewrite_blocks(
    segments: Segments,
    block_ids: Tensor,
    rewrite: BlockRewrite,
    num_covered_tokens: int | None = None,
    *,
    programs: CyclePrograms | None = None,
) -> None:
    """Rewrite the blocks ``block_ids`` of every segment in place; nothing else is written.

    Args:
        segments: see :func:`kvxfer.kernels.segments.segments_of`.
        block_ids: on the segments' device, each once, set behind set. They are not checked: the
            GPU cannot.
        rewrite: its local blocks have as many rows as the segments' blocks.
        num_covered_tokens: tokens received, from the first of the first block on; all later ones
            become zero. None: all.
        programs: by cycles, with these. None: as is fastest, see :func:`gathers`.

    Raises:
        TypeError: ids that are not int64.
        ValueError: ids that are no whole sets, and what else one launch does not do.
    """
    _check(segments, block_ids, rewrite)
    rewrite.check_blocks(block_ids.numel(), num_covered_tokens)
    if not block_ids.numel() or (rewrite.moves_nothing and num_covered_tokens is None):
        return
    with torch.cuda.device(block_ids.get_device()):
        if programs is None and gathers(segments, rewrite):
            gather_blocks(segments, block_ids, rewrite, num_covered_tokens)
        else:
            _move_cycles(
                segments, block_ids, rewrite, num_covered_tokens, programs or CYCLE_PROGRAMS
            )


def _move_cycles(
    segments: Segments,
    block_ids: Tensor,
    rewrite: BlockRewrite,
    num_covered_tokens: int | None,
    programs: CyclePrograms,
) -> None:
    covers = num_covered_tokens is not None
    # A very long cycle needs narrow units: a program has one of each run at least
    unit_nbytes = segments.unit_nbytes
    if longest_cycle(rewrite) > MAX_TILE_NBYTES // unit_nbytes:
        unit_nbytes //= 2
    row_units = segments.width_nbytes // unit_nbytes
    run_units = rewrite.run_tokens * row_units
    plan = plan_of(rewrite, run_units, unit_nbytes, programs.tile_nbytes, covers)
    num_programs = block_ids.numel() // rewrite.set_blocks * plan.num_programs
    if num_programs > MAX_GRID:
        raise ValueError(f"block_ids: expected at most {MAX_GRID} programs, got {num_programs}")
    pairs = _pairs_on(plan.table, block_ids.device)
    for table in segments.tables:
        rewrite_kernel[(num_programs, table.shape[0])](
            table,
            block_ids,
            pairs,
            num_covered_tokens or 0,
            HEADS=rewrite.num_heads,
            BLOCK_TOKENS=rewrite.local.block_tokens,
            BY_HEAD=rewrite.local_by_head,
            SET_BLOCKS=rewrite.set_blocks,
            RUN_TOKENS=rewrite.run_tokens,
            ROW_UNITS=row_units,
            IS_DENSE=segments.is_dense,
            IS_WIDE=segments.is_wide,
            MOVES=not rewrite.moves_nothing,
            COVERS=covers,
            NUM_BINS=plan.table.num_bins,
            BIN_RUNS=plan.table.bin_runs,
            NUM_SLICES=plan.tile.num_slices,
            COLUMNS=plan.tile.columns,
            MAGIC=plan.tile.magic,
            SHIFT=plan.tile.shift,
            UNITS=plan.lanes,
            BUSY_UNITS=plan.busy_units,
            WORD=ELEMENTS[unit_nbytes],
            VEC=2 if unit_nbytes == 16 else 1,
            num_warps=_num_warps(plan.busy_units, programs.thread_units),
        )


def _num_warps(num_units: int, thread_units: int) -> int:
    """A power of two; up to 1024 threads have a quarter more than ``thread_units`` at most."""
    wanted = 4 * num_units / (5 * 32 * thread_units)
    return min(32, 1 << max(0, math.ceil(math.log2(wanted))))


def fits(rewrite: BlockRewrite) -> bool:
    """Does a program hold a unit of each run of the longest cycle?"""
    return longest_cycle(rewrite) <= MAX_TILE_UNITS


@cache
def _pairs_on(table: RunTable, device: torch.device) -> Tensor:
    """[num_bins, bin_runs] int64 there, source and target in one word.

    Kept: launches that read them may still be on their way.
    """
    return on_device(table.runs.view(torch.int64).squeeze(2), device)


def _check(segments: Segments, block_ids: Tensor, rewrite: BlockRewrite) -> None:
    if block_ids.dtype != torch.int64:
        raise TypeError(f"block_ids: expected int64, got {block_ids.dtype}")
    if block_ids.dim() != 1 or not block_ids.is_contiguous():
        raise ValueError(
            f"block_ids: expected a contiguous dimension, got shape {tuple(block_ids.shape)} with "
            f"strides {block_ids.stride()}"
        )
    local_rows = rewrite.num_heads * rewrite.local.block_tokens
    if segments.block_rows != local_rows:
        raise ValueError(
            f"rewrite: expected blocks of {segments.block_rows} rows, as the segments have, got "
            f"{rewrite.num_heads} heads of {rewrite.local.block_tokens} tokens"
        )
    if not fits(rewrite):
        raise ValueError(
            f"rewrite: expected cycles of at most {MAX_TILE_UNITS} runs, got one of "
            f"{longest_cycle(rewrite)}"
        )
