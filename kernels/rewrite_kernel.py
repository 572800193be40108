"""Put received blocks into the local order, in place: every layer, K and V, in one launch.

table [num_planes, 3] int64 (address, stride_nbytes, row_nbytes), block_ids [n] int64, pairs
[num_bins, most_runs] int64 (source run, and target run * 2**32; negative: no run)

Plane p has the row r of block b at address + b * stride_nbytes + r * row_nbytes: what one head
keeps of one token. A program has all units of its bin (block_rewrite.py) in registers before it
stores the first one, and shares no byte with another program: every byte that moves is read and
written once. Units lie flat on the threads, run behind run, so no width of a row leaves lanes idle.
A unit of 16 bytes is two int64 side by side in one thread. That the compiler sees it shows in the
PTX: ld.global.v2.b64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvxfer.kernels.block_rewrite import (
    MAX_TILE_NBYTES,
    MAX_TILE_UNITS,
    BlockRewrite,
    ProgramPlan,
    longest_cycle,
    plan_of,
)
from kvxfer.kernels.strided_copy import ELEMENTS

# CUDA's limits for the first and the second dimension of a grid
MAX_GRID = 2**31 - 1
MAX_PLANES = 65535
TILE_NBYTES = 32 << 10
"""What a program moves, more where a cycle is longer."""
# Units of a thread, about: of 16 bytes, and of fewer. Rows of 132 bytes, in units of 4, made 0.742
# of a copy with 16 units and 0.686 with 8; rows of 256 bytes lost as much with 16
# (scripts/results/postprocess_2026-11-22.md)
_THREAD_UNITS = 8
_NARROW_THREAD_UNITS = 16


@dataclass(frozen=True, slots=True)
class PlaneTable:
    """Views of one geometry, as the kernels read them; good while their memory lives.

    ``unit_nbytes``, up to 16, divides every address, stride and size. ``is_dense``: rows touch each
    other. ``is_wide``: a block reaches farther than int32 counts.
    """

    table: Tensor
    block_rows: int
    width_nbytes: int
    unit_nbytes: int
    is_dense: bool
    is_wide: bool


def plane_table(views: Sequence[Tensor]) -> PlaneTable:
    """The table of ``views`` [num_blocks, outer, inner, D], rows at equal distances.

    Raises:
        ValueError: no view, views of other shapes or element sizes (the number of blocks may
            differ), elements of a row apart, or an outer dimension that does not step over the
            inner one.
    """
    if not views:
        raise ValueError("views: expected at least one, got none")
    first = views[0]
    width_nbytes = first.shape[3] * first.element_size()
    rows = []
    for view in views:
        if view.shape[1:] != first.shape[1:] or view.element_size() != first.element_size():
            raise ValueError(
                f"views: expected blocks of {tuple(first.shape[1:])} elements of "
                f"{first.element_size()} bytes, got {tuple(view.shape[1:])} of "
                f"{view.element_size()}"
            )
        _, outer, inner, width = view.shape
        stride = view.stride()
        row_stride = stride[2] if inner > 1 else stride[1]
        is_even = inner == 1 or outer == 1 or stride[1] == inner * row_stride
        if not is_even or (width > 1 and stride[3] != 1):
            raise ValueError(
                f"views: expected rows at equal distances, each contiguous, got shape "
                f"{tuple(view.shape)} with strides {stride}"
            )
        itemsize = view.element_size()
        rows.append((view.data_ptr(), stride[0] * itemsize, row_stride * itemsize))
    table = torch.tensor(rows, dtype=torch.int64)
    if first.is_cuda:
        table = table.pin_memory()
    block_rows = first.shape[1] * first.shape[2]
    return PlaneTable(
        table=table.to(first.device, non_blocking=True),
        block_rows=block_rows,
        width_nbytes=width_nbytes,
        unit_nbytes=math.gcd(16, width_nbytes, *(number for row in rows for number in row)),
        is_dense=all(row[2] == width_nbytes for row in rows),
        is_wide=max(row[2] for row in rows) * block_rows >= 2**31,
    )


@triton.jit
def _words_of(
    base,
    ids,
    stride_nbytes,
    run,
    inside,
    wanted,
    run_words,
    BLOCK_RUNS: tl.constexpr,
    SET_BLOCKS: tl.constexpr,
    IS_WIDE: tl.constexpr,
    WORD: tl.constexpr,
    VEC: tl.constexpr,
):
    """Pointers [units, VEC] to the words of each unit: ``inside`` words behind its run's first."""
    if SET_BLOCKS > 1:
        block = run // BLOCK_RUNS
        run -= block * BLOCK_RUNS
        # int64 before the multiply: a cache is larger than 2 GiB
        base += tl.load(ids + block, mask=wanted, other=0) * stride_nbytes
    offset = (run.to(tl.int64) if IS_WIDE else run) * run_words + inside
    words = (base.to(tl.pointer_type(WORD)) + offset)[:, None] + tl.arange(0, VEC)[None, :]
    # The compiler cannot know the alignment of numbers from a table.
    nbytes: tl.constexpr = VEC * WORD.primitive_bitwidth // 8
    return tl.max_contiguous(tl.multiple_of(words, [1, nbytes]), [1, VEC])


@triton.jit
def rewrite_kernel(
    table,
    block_ids,
    pairs,
    BLOCK_RUNS: tl.constexpr,
    SET_BLOCKS: tl.constexpr,
    RUN_TOKENS: tl.constexpr,
    ROW_UNITS: tl.constexpr,
    IS_DENSE: tl.constexpr,
    IS_WIDE: tl.constexpr,
    NUM_BINS: tl.constexpr,
    BIN_RUNS: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    COLUMNS: tl.constexpr,
    MAGIC: tl.constexpr,
    SHIFT: tl.constexpr,
    UNITS: tl.constexpr,
    BUSY_UNITS: tl.constexpr,
    WORD: tl.constexpr,
    VEC: tl.constexpr,
) -> None:
    RUN_UNITS: tl.constexpr = RUN_TOKENS * ROW_UNITS
    # Slices of a set side by side: together they use the sectors that one of them touches in part.
    program = tl.program_id(0)
    slot = program // NUM_SLICES % NUM_BINS
    first_set = (program // (NUM_BINS * NUM_SLICES)).to(tl.int64)
    plane = table + tl.program_id(1) * 3
    ids = block_ids + first_set * SET_BLOCKS
    # int64: a cache is larger than 2 GiB
    base = tl.load(plane)
    stride_nbytes = tl.load(plane + 1)
    if SET_BLOCKS == 1:
        base += tl.load(ids) * stride_nbytes

    unit = tl.arange(0, UNITS)
    lane_run = unit * MAGIC >> SHIFT  # unit // COLUMNS; a division takes three times as many steps
    column = unit - lane_run * COLUMNS + program % NUM_SLICES * COLUMNS
    pair = tl.load(pairs + slot * BIN_RUNS + lane_run, mask=unit < BUSY_UNITS, other=-1)
    source = pair.to(tl.int32)
    target = (pair >> 32).to(tl.int32)
    mask = source >= 0
    if RUN_UNITS % COLUMNS:
        mask = mask & (column < RUN_UNITS)
    if IS_DENSE:
        run_words = RUN_UNITS * VEC
    else:
        row_words = tl.load(plane + 2) // (WORD.primitive_bitwidth // 8)
        if not IS_WIDE:
            row_words = row_words.to(tl.int32)
        run_words = RUN_TOKENS * row_words
    if IS_DENSE or RUN_TOKENS == 1:
        inside = column * VEC
    else:
        inside = column // ROW_UNITS * row_words + column % ROW_UNITS * VEC

    given = _words_of(
        base,
        ids,
        stride_nbytes,
        source,
        inside,
        mask,
        run_words,
        BLOCK_RUNS,
        SET_BLOCKS,
        IS_WIDE,
        WORD,
        VEC,
    )
    words = tl.load(given, mask=mask[:, None], other=0)
    # One thread's target is another one's source.
    tl.debug_barrier()
    taken = _words_of(
        base,
        ids,
        stride_nbytes,
        target,
        inside,
        mask,
        run_words,
        BLOCK_RUNS,
        SET_BLOCKS,
        IS_WIDE,
        WORD,
        VEC,
    )
    tl.store(taken, words, mask=mask[:, None])


def rewrite_blocks(
    planes: PlaneTable,
    block_ids: Tensor,
    rewrite: BlockRewrite,
    *,
    tile_nbytes: int = TILE_NBYTES,
) -> None:
    """Rewrite the blocks ``block_ids`` of every plane in place; nothing else is written.

    ``block_ids``: on the planes' device, each once, set behind set; the GPU cannot check them. The
    rewrite's local blocks have as many rows as the planes have. ``tile_nbytes``: what a program
    moves at most, a power of two; more where a cycle is longer. Raises TypeError for ids that are
    not int64, ValueError for no whole sets and what else one launch does not do.
    """
    _check(planes, block_ids, rewrite, tile_nbytes)
    rewrite.check_blocks(block_ids.numel())
    if not block_ids.numel() or rewrite.moves_nothing:
        return
    # A very long cycle needs narrow units: a program has one of each run at least
    unit_nbytes = planes.unit_nbytes
    if longest_cycle(rewrite) > MAX_TILE_NBYTES // unit_nbytes:
        unit_nbytes //= 2
    row_units = planes.width_nbytes // unit_nbytes
    run_units = rewrite.run_tokens * row_units
    plan = plan_of(rewrite, run_units, unit_nbytes, tile_nbytes)
    num_programs = block_ids.numel() // rewrite.set_blocks * plan.num_programs
    if num_programs > MAX_GRID:
        raise ValueError(f"block_ids: expected at most {MAX_GRID} programs, got {num_programs}")
    pairs = _pairs_on(plan, block_ids.device)
    with torch.cuda.device(block_ids.get_device()):
        for table in torch.split(planes.table, MAX_PLANES):
            rewrite_kernel[(num_programs, table.shape[0])](
                table,
                block_ids,
                pairs,
                BLOCK_RUNS=rewrite.set_runs // rewrite.set_blocks,
                SET_BLOCKS=rewrite.set_blocks,
                RUN_TOKENS=rewrite.run_tokens,
                ROW_UNITS=row_units,
                IS_DENSE=planes.is_dense,
                IS_WIDE=planes.is_wide,
                NUM_BINS=plan.runs.shape[0],
                BIN_RUNS=plan.runs.shape[1],
                NUM_SLICES=plan.num_slices,
                COLUMNS=plan.columns,
                MAGIC=plan.magic,
                SHIFT=plan.shift,
                UNITS=plan.lanes,
                BUSY_UNITS=plan.busy_units,
                WORD=ELEMENTS[unit_nbytes],
                VEC=2 if unit_nbytes == 16 else 1,
                num_warps=_num_warps(plan.busy_units, unit_nbytes),
            )


def _num_warps(num_units: int, unit_nbytes: int) -> int:
    """A power of two; up to 1024 threads have a quarter more units than they should at most."""
    thread_units = _THREAD_UNITS if unit_nbytes == 16 else _NARROW_THREAD_UNITS
    wanted = 4 * num_units / (5 * 32 * thread_units)
    return min(32, 1 << max(0, math.ceil(math.log2(wanted))))


def fits(rewrite: BlockRewrite) -> bool:
    return longest_cycle(rewrite) <= MAX_TILE_UNITS


@cache
def _pairs_on(plan: ProgramPlan, device: torch.device) -> Tensor:
    """[num_bins, most_runs] int64 there. Kept: launches may still read them."""
    pairs = plan.runs.view(torch.int64).squeeze(2)
    if device.type != "cuda":
        return pairs
    # A stream of its own: the copy waits until it is over, and not for what else runs there
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        return pairs.to(device)


def _check(planes: PlaneTable, block_ids: Tensor, rewrite: BlockRewrite, tile_nbytes: int) -> None:
    if not 0 < tile_nbytes <= MAX_TILE_NBYTES or tile_nbytes & (tile_nbytes - 1):
        raise ValueError(
            f"tile_nbytes: expected a power of two up to {MAX_TILE_NBYTES}, got {tile_nbytes}"
        )
    if block_ids.dtype != torch.int64:
        raise TypeError(f"block_ids: expected int64, got {block_ids.dtype}")
    if block_ids.dim() != 1 or not block_ids.is_contiguous():
        raise ValueError(
            f"block_ids: expected a contiguous dimension, got shape {tuple(block_ids.shape)} with "
            f"strides {block_ids.stride()}"
        )
    local_rows = rewrite.num_heads * rewrite.local.block_tokens
    if planes.block_rows != local_rows:
        raise ValueError(
            f"rewrite: expected blocks of {planes.block_rows} rows, as the planes have, got "
            f"{rewrite.num_heads} heads of {rewrite.local.block_tokens} tokens"
        )
    if not fits(rewrite):
        raise ValueError(
            f"rewrite: expected cycles of at most {MAX_TILE_UNITS} runs, got one of "
            f"{longest_cycle(rewrite)}"
        )
