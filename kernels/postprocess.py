"""Put received blocks into the local order, in place: every layer, K and V, in one launch.

table [num_segments, 3] int64 (address, stride_nbytes, row_nbytes), block_ids [n] int64

Segment s has the row r of block b at address + b * stride_nbytes + r * row_nbytes: what one head
keeps of one token. A rewrite moves whole runs of rows within a set of blocks, so the bytes of a run
at one offset depend on no other offset: a program owns some columns of all runs of a set, has them
in registers before it stores the first one, and shares no byte with another program. That needs no
scratch memory, and reads and writes every byte once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvxfer.kernels.block_rewrite import BlockRewrite

# What a program moves, and a thread of it
TILE_WORDS = 16384
THREAD_WORDS = 16
# 1024 threads; 128 KiB of 8-byte words, half of the registers of a multiprocessor
MAX_TILE_WORDS = 16384
# of GPU memory: a narrower column is fetched several times
SECTOR_NBYTES = 32
# CUDA's limit for the first dimension of a grid
MAX_GRID = 2**31 - 1
_WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64, 16: tl.int64}


@triton.jit
def _row(token, head, TOKENS: tl.constexpr, HEADS: tl.constexpr, BY_HEAD: tl.constexpr):
    """The row of a token and head in a set whose blocks have so many tokens."""
    if BY_HEAD:
        slot = token % TOKENS
        row = (token - slot) * HEADS + head * TOKENS + slot
    else:
        row = token * HEADS + head
    return row


@triton.jit
def _pointers(
    segment,
    block_ids,
    row,
    BLOCK_ROWS: tl.constexpr,
    SET_BLOCKS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    WORD: tl.constexpr,
):
    """Where rows of a set begin; ``block_ids`` is its first."""
    # int64 all the way: a cache is larger than 2 GiB
    address = tl.load(segment)
    stride_nbytes = tl.load(segment + 1)
    row_nbytes = tl.load(segment + 2)
    # A scalar where it can be: one address for all rows of the program.
    block_id = tl.load(block_ids if SET_BLOCKS == 1 else block_ids + row // BLOCK_ROWS)
    offset = block_id * stride_nbytes + (row % BLOCK_ROWS).to(tl.int64) * row_nbytes
    # The compiler cannot know the alignment of numbers from a table.
    return tl.multiple_of((address + offset).to(tl.pointer_type(WORD)), ALIGNMENT)


@triton.jit(do_not_specialize=["num_segments", "num_slices", "num_covered_tokens"])
def _rewrite_kernel(
    table,
    block_ids,
    num_segments,
    num_slices,
    num_covered_tokens,
    HEADS: tl.constexpr,
    RECEIVED_TOKENS: tl.constexpr,
    RECEIVED_BY_HEAD: tl.constexpr,
    LOCAL_TOKENS: tl.constexpr,
    LOCAL_BY_HEAD: tl.constexpr,
    SET_TOKENS: tl.constexpr,
    RUN_TOKENS: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    IS_DENSE: tl.constexpr,
    MOVES: tl.constexpr,
    COVERS: tl.constexpr,
    RUNS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    WORD: tl.constexpr,
):
    SET_BLOCKS: tl.constexpr = SET_TOKENS // LOCAL_TOKENS
    HEAD_RUNS: tl.constexpr = SET_TOKENS // RUN_TOKENS
    NUM_RUNS: tl.constexpr = HEADS * HEAD_RUNS
    NUM_COLUMNS: tl.constexpr = RUN_TOKENS * ROW_WORDS
    BLOCK_ROWS: tl.constexpr = HEADS * LOCAL_TOKENS
    # Slices of a set side by side: together they use the sectors that one of them touches in part.
    program = tl.program_id(0)
    piece = program // num_slices
    segment = table + (piece % num_segments) * 3
    first_set = (piece // num_segments).to(tl.int64)
    ids = block_ids + first_set * SET_BLOCKS

    lane = tl.arange(0, RUNS)
    run = tl.minimum(lane, NUM_RUNS - 1)  # RUNS is a power of two; no id behind the set is read
    head = run // HEAD_RUNS
    token = run % HEAD_RUNS * RUN_TOKENS
    column = (program % num_slices) * COLUMNS + tl.arange(0, COLUMNS)
    if IS_DENSE:
        offset = column.to(tl.int64)
    else:
        word_nbytes: tl.constexpr = WORD.primitive_bitwidth // 8
        row_words = tl.load(segment + 2) // word_nbytes
        row_words = tl.multiple_of(row_words, ALIGNMENT // word_nbytes)
        offset = (column // ROW_WORDS) * row_words + column % ROW_WORDS
    mask = (lane < NUM_RUNS)[:, None] & (column < NUM_COLUMNS)[None, :]

    row = _row(token, head, LOCAL_TOKENS, HEADS, LOCAL_BY_HEAD)
    target = _pointers(segment, ids, row, BLOCK_ROWS, SET_BLOCKS, ALIGNMENT, WORD)
    if MOVES:
        row = _row(token, head, RECEIVED_TOKENS, HEADS, RECEIVED_BY_HEAD)
        source = _pointers(segment, ids, row, BLOCK_ROWS, SET_BLOCKS, ALIGNMENT, WORD)
        words = tl.load(source[:, None] + offset[None, :], mask=mask)
        # One thread's target is another one's source.
        tl.debug_barrier()
    else:
        words = tl.zeros([RUNS, COLUMNS], WORD)
    if COVERS:
        position = token[:, None] + (column // ROW_WORDS)[None, :]
        is_covered = first_set * SET_TOKENS + position < num_covered_tokens
        if MOVES:
            words = tl.where(is_covered, words, 0)
        else:
            mask = mask & (is_covered == 0)
    tl.store(target[:, None] + offset[None, :], words, mask=mask)


@dataclass(frozen=True, slots=True)
class Segments:
    """Views of one geometry, as the kernel reads them; good while their memory lives.

    ``word_nbytes`` divides every address, stride and size. ``is_dense``: rows touch each other.
    """

    table: Tensor
    block_rows: int
    width_nbytes: int
    word_nbytes: int
    is_dense: bool


def segments_of(views: Sequence[Tensor]) -> Segments:
    """The segments of ``views`` [num_blocks, outer, inner, D], rows at equal distances.

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
    return Segments(
        table=table.to(first.device, non_blocking=True),
        block_rows=first.shape[1] * first.shape[2],
        width_nbytes=width_nbytes,
        word_nbytes=math.gcd(16, width_nbytes, *(number for row in rows for number in row)),
        is_dense=all(row[2] == width_nbytes for row in rows),
    )


def rewrite_blocks(
    segments: Segments,
    block_ids: Tensor,
    rewrite: BlockRewrite,
    num_covered_tokens: int | None = None,
    *,
    tile_words: int = TILE_WORDS,
) -> None:
    """Rewrite the blocks ``block_ids`` of every segment in place; nothing else is written.

    Args:
        segments: see :func:`segments_of`.
        block_ids: on the segments' device, each once, set behind set. They are not checked: the
            GPU cannot.
        rewrite: its local blocks have as many rows as the segments' blocks.
        num_covered_tokens: tokens received, from the first of the first block on; all later ones
            become zero. None: all.
        tile_words: what a program moves, a power of two; more where a set has more runs.

    Raises:
        TypeError: ids that are not int64.
        ValueError: ids that are no whole sets, and what else one launch does not do.
    """
    _check(segments, block_ids, rewrite, tile_words)
    rewrite.check_blocks(block_ids.numel(), num_covered_tokens)
    covers = num_covered_tokens is not None
    if not block_ids.numel() or (rewrite.moves_nothing and not covers):
        return
    word_nbytes = min(segments.word_nbytes, 8)  # a vector of 16 bytes is two words
    row_words = segments.width_nbytes // word_nbytes
    num_columns = rewrite.run_tokens * row_words
    runs, columns = _tile(rewrite.set_runs, num_columns, word_nbytes, tile_words)
    num_slices = triton.cdiv(num_columns, columns)
    num_segments = segments.table.shape[0]
    num_programs = block_ids.numel() // rewrite.set_blocks * num_segments * num_slices
    if num_programs > MAX_GRID:
        raise ValueError(f"block_ids: expected at most {MAX_GRID} programs, got {num_programs}")
    with torch.cuda.device(block_ids.get_device()):
        _rewrite_kernel[(num_programs,)](
            segments.table,
            block_ids,
            num_segments,
            num_slices,
            num_covered_tokens or 0,
            HEADS=rewrite.num_heads,
            RECEIVED_TOKENS=rewrite.received.block_tokens,
            RECEIVED_BY_HEAD=rewrite.received_by_head,
            LOCAL_TOKENS=rewrite.local.block_tokens,
            LOCAL_BY_HEAD=rewrite.local_by_head,
            SET_TOKENS=rewrite.set_tokens,
            RUN_TOKENS=rewrite.run_tokens,
            ROW_WORDS=row_words,
            IS_DENSE=segments.is_dense,
            MOVES=not rewrite.moves_nothing,
            COVERS=covers,
            RUNS=runs,
            COLUMNS=columns,
            ALIGNMENT=segments.word_nbytes,
            WORD=_WORDS[word_nbytes],
            num_warps=min(32, max(1, runs * columns // (32 * THREAD_WORDS))),
        )


def fits(rewrite: BlockRewrite) -> bool:
    """Does a program hold a column of all runs of a set? 128 heads of 128 tokens just do."""
    return rewrite.set_runs <= MAX_TILE_WORDS


def _tile(num_runs: int, num_columns: int, word_nbytes: int, tile_words: int) -> tuple[int, int]:
    """Runs and columns of a program, powers of two."""
    runs = triton.next_power_of_2(num_runs)
    columns = max(tile_words // runs, SECTOR_NBYTES // word_nbytes)
    columns = min(columns, MAX_TILE_WORDS // runs, triton.next_power_of_2(num_columns))
    return runs, columns


def _check(segments: Segments, block_ids: Tensor, rewrite: BlockRewrite, tile_words: int) -> None:
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
            f"rewrite: expected at most {MAX_TILE_WORDS} runs in a set of {rewrite.set_blocks} "
            f"blocks, got {rewrite.set_runs}"
        )
    if not 0 < tile_words <= MAX_TILE_WORDS or tile_words & (tile_words - 1):
        raise ValueError(
            f"tile_words: expected a power of two up to {MAX_TILE_WORDS}, got {tile_words}"
        )
