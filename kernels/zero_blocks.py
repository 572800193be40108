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
# A program of 128 threads: sixteen stores of 16 bytes each
TILE_NBYTES = 32768
_LOOP_WORDS: tl.constexpr = tl.constexpr(1024)
# CUDA's limit for the second and third dimension of a grid
MAX_GRID = 65535
_MAX_PIECE_WORDS = 1024 * MAX_GRID
_WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32}


@triton.jit
def _zero_words(
    piece, first_nbytes, nbytes, COUNT: tl.constexpr, WORD: tl.constexpr, ALIGNMENT: tl.constexpr
):
    """Zero COUNT words from ``first_nbytes`` on, no byte behind ``nbytes``."""
    word_nbytes: tl.constexpr = WORD.primitive_bitwidth // 8
    # The compiler cannot know the alignment of numbers from a table.
    words = tl.multiple_of(piece.to(tl.pointer_type(WORD)), ALIGNMENT)
    num_words = tl.multiple_of(nbytes // word_nbytes, ALIGNMENT // word_nbytes)
    word = first_nbytes // word_nbytes + tl.arange(0, COUNT)
    tl.store(words + word, tl.zeros([COUNT], WORD), mask=word < num_words)


@triton.jit
def _zero_kernel(table, block_ids, TILE: tl.constexpr, WORD: tl.constexpr):
    segment = tl.program_id(1)
    address = tl.load(table + segment * 3)
    # int64 all the way: a pool is larger than 2 GiB
    stride_nbytes = tl.load(table + segment * 3 + 1)
    nbytes = tl.load(table + segment * 3 + 2)
    block_id = tl.load(block_ids + tl.program_id(0))
    piece = address + block_id * stride_nbytes
    first_nbytes = tl.program_id(2).to(tl.int64) * TILE
    if first_nbytes < nbytes:
        if (piece | nbytes) % 16 == 0:
            _zero_words(piece, first_nbytes, nbytes, TILE // 8, tl.int64, 16)
        else:
            # A loop, so that this way does not cost the other one its registers.
            word_nbytes: tl.constexpr = WORD.primitive_bitwidth // 8
            for offset in range(0, TILE, _LOOP_WORDS * word_nbytes):
                first = first_nbytes + offset
                _zero_words(piece, first, nbytes, _LOOP_WORDS, WORD, word_nbytes)


def zero_blocks(
    table: torch.Tensor,
    block_ids: torch.Tensor,
    max_nbytes: int,
    word_nbytes: int = WORD_NBYTES,
    *,
    tile_nbytes: int = TILE_NBYTES,
) -> None:
    """Zero the pieces of ``block_ids`` in every segment; nothing else is written.

    Args:
        table: on the device of the memory it points to.
        block_ids: on the same device. Neither ids nor addresses are checked: the GPU cannot.
        max_nbytes: the largest piece of the table, known on the host.
        word_nbytes: 4, 2 or 1; divides every address, stride and size. A piece of which 16 divides
            address and size is written 16 bytes at a time all the same.
        tile_nbytes: what a program zeroes, a power of two from 4096 on.
    """
    _check(table, block_ids, max_nbytes, word_nbytes)
    if tile_nbytes < 4096 or tile_nbytes & (tile_nbytes - 1):
        raise ValueError(f"tile_nbytes: expected a power of two from 4096 on, got {tile_nbytes}")
    if block_ids.numel() == 0 or table.shape[0] == 0:
        return
    num_tiles = triton.cdiv(max_nbytes, tile_nbytes)
    grid = (block_ids.numel(), table.shape[0], num_tiles)
    with torch.cuda.device(block_ids.get_device()):
        _zero_kernel[grid](table, block_ids, TILE=tile_nbytes, WORD=_WORDS[word_nbytes])


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
    largest_nbytes = _MAX_PIECE_WORDS * word_nbytes
    if max_nbytes > largest_nbytes:
        raise ValueError(f"max_nbytes: expected at most {largest_nbytes}, got {max_nbytes}")
    if table.shape[0] > MAX_GRID:
        raise ValueError(f"table: expected at most {MAX_GRID} segments, got {table.shape[0]}")
