"""Zero cache blocks in every segment of a pool in one launch.

A segment is a run of equally spaced pieces, one per block: piece b starts at address + b *
stride_nbytes and has nbytes. Segments may lie in different allocations: the table holds absolute
addresses.

table [num_segments, 3] int64 (address, stride_nbytes, nbytes), block_ids [n] int64
"""

import torch
import triton
import triton.language as tl

WORD_NBYTES = 4
BLOCK_WORDS = 1024
# CUDA's limit for the second and third dimension of a grid
MAX_GRID = 65535


@triton.jit
def _zero_kernel(table, block_ids, BLOCK: tl.constexpr, WORD: tl.constexpr):
    segment = tl.program_id(1)
    address = tl.load(table + segment * 3)
    # int64 all the way: a pool is larger than 2 GiB
    stride_nbytes = tl.load(table + segment * 3 + 1)
    num_words = tl.load(table + segment * 3 + 2) // WORD
    block_id = tl.load(block_ids + tl.program_id(0))
    piece = address + block_id * stride_nbytes
    word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    if WORD == 4:
        words = piece.to(tl.pointer_type(tl.int32)) + word
        tl.store(words, tl.zeros([BLOCK], tl.int32), mask=word < num_words)
    elif WORD == 2:
        words = piece.to(tl.pointer_type(tl.int16)) + word
        tl.store(words, tl.zeros([BLOCK], tl.int16), mask=word < num_words)
    else:
        words = piece.to(tl.pointer_type(tl.int8)) + word
        tl.store(words, tl.zeros([BLOCK], tl.int8), mask=word < num_words)


def zero_blocks(
    table: torch.Tensor,
    block_ids: torch.Tensor,
    max_nbytes: int,
    word_nbytes: int = WORD_NBYTES,
) -> None:
    """Zero the pieces of ``block_ids`` in every segment; nothing else is written.

    Args:
        table: on the device of the memory it points to.
        block_ids: on the same device. Neither ids nor addresses are checked: the GPU cannot.
        max_nbytes: the largest piece of the table, known on the host.
        word_nbytes: 4, 2 or 1 bytes at a time; divides every address, stride and size.
    """
    _check(table, block_ids, max_nbytes, word_nbytes)
    if block_ids.numel() == 0 or table.shape[0] == 0:
        return
    num_chunks = triton.cdiv(max_nbytes // word_nbytes, BLOCK_WORDS)
    grid = (block_ids.numel(), table.shape[0], num_chunks)
    _zero_kernel[grid](table, block_ids, BLOCK=BLOCK_WORDS, WORD=word_nbytes)


def segment_table(pieces: torch.Tensor) -> torch.Tensor:
    """The table of ``pieces`` [num_segments, num_blocks, n]: views whose last dimension is
    contiguous.
    """
    if pieces.stride(-1) != 1:
        raise ValueError(f"pieces: expected a contiguous last dimension, got {pieces.stride()}")
    itemsize = pieces.element_size()
    rows = [
        (segment.data_ptr(), pieces.stride(1) * itemsize, pieces.shape[2] * itemsize)
        for segment in pieces
    ]
    return torch.tensor(rows, dtype=torch.int64, device=pieces.device).reshape(len(rows), 3)


def zero_blocks_ref(pieces: torch.Tensor, block_ids: torch.Tensor) -> None:
    """The same in plain torch on ``pieces`` [num_segments, num_blocks, n]."""
    pieces[:, block_ids] = 0


def _check(table: torch.Tensor, block_ids: torch.Tensor, max_nbytes: int, word_nbytes: int) -> None:
    if table.dim() != 2 or table.shape[1] != 3:
        raise ValueError(f"table: expected shape (num_segments, 3), got {tuple(table.shape)}")
    if table.dtype != torch.int64 or block_ids.dtype != torch.int64:
        raise TypeError(
            f"table and block_ids: expected int64, got {table.dtype} and {block_ids.dtype}"
        )
    if not (table.is_contiguous() and block_ids.is_contiguous()):
        raise ValueError("table and block_ids: expected contiguous; call .contiguous() first")
    if word_nbytes not in (1, 2, 4):
        raise ValueError(f"word_nbytes: expected 1, 2 or 4, got {word_nbytes}")
    if max_nbytes % word_nbytes:
        raise ValueError(f"max_nbytes: expected a multiple of {word_nbytes}, got {max_nbytes}")
    largest_nbytes = MAX_GRID * BLOCK_WORDS * word_nbytes
    if max_nbytes > largest_nbytes:
        raise ValueError(f"max_nbytes: expected at most {largest_nbytes}, got {max_nbytes}")
    if table.shape[0] > MAX_GRID:
        raise ValueError(f"table: expected at most {MAX_GRID} segments, got {table.shape[0]}")
