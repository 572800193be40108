"""Zero cache blocks in every segment of a pool in one launch.

A segment is a run of equally spaced pieces, one per block: piece b starts at address + b *
stride_nbytes and has nbytes.
Segments may lie in different allocations: the table holds absolute addresses.

table [num_segments, 3] int64 (address, stride_nbytes, nbytes), block_ids [n] int64
"""

import torch
import triton
import triton.language as tl

WORD_NBYTES = 4
BLOCK_WORDS = 1024


@triton.jit
def _zero_kernel(table, block_ids, BLOCK: tl.constexpr):
    segment = tl.program_id(1)
    address = tl.load(table + segment * 3)
    # int64 all the way: a pool is larger than 2 GiB
    stride_nbytes = tl.load(table + segment * 3 + 1)
    num_words = tl.load(table + segment * 3 + 2) // 4
    block_id = tl.load(block_ids + tl.program_id(0))
    piece = (address + block_id * stride_nbytes).to(tl.pointer_type(tl.int32))
    word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    tl.store(piece + word, tl.zeros([BLOCK], tl.int32), mask=word < num_words)


def zero_blocks(table: torch.Tensor, block_ids: torch.Tensor, max_nbytes: int) -> None:
    """Zero the pieces of ``block_ids`` in every segment; nothing else is written.

    Args:
        table: on the device of the memory it points to; strides and sizes are multiples of 4 bytes.
        block_ids: on the same device. Neither ids nor addresses are checked: the GPU cannot.
        max_nbytes: the largest piece of the table, known on the host.
    """
    _check(table, block_ids, max_nbytes)
    if block_ids.numel() == 0 or table.shape[0] == 0:
        return
    num_chunks = triton.cdiv(max_nbytes // WORD_NBYTES, BLOCK_WORDS)
    grid = (block_ids.numel(), table.shape[0], num_chunks)
    _zero_kernel[grid](table, block_ids, BLOCK=BLOCK_WORDS)


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


def _check(table: torch.Tensor, block_ids: torch.Tensor, max_nbytes: int) -> None:
    if table.dim() != 2 or table.shape[1] != 3:
        raise ValueError(f"table: expected shape (num_segments, 3), got {tuple(table.shape)}")
    if table.dtype != torch.int64 or block_ids.dtype != torch.int64:
        raise TypeError(
            f"table and block_ids: expected int64, got {table.dtype} and {block_ids.dtype}"
        )
    if not (table.is_contiguous() and block_ids.is_contiguous()):
        raise ValueError("table and block_ids: expected contiguous; call .contiguous() first")
    if max_nbytes % WORD_NBYTES:
        raise ValueError(f"max_nbytes: expected a multiple of {WORD_NBYTES}, got {max_nbytes}")
