"""A block rewritten by one program that has all of it, for rows of narrow units; launched by
postprocess.py.

table [num_segments, 3] int64 (address, stride_nbytes, row_nbytes), block_ids [n] int64, sources
[lanes] int32 (of each word of a block, the word that it comes from)

Whole cycles move in units that divide a row: 4 bytes where a row has 132. A whole block has no rows
to respect: it is read and written in its order in memory, in accesses as wide as its address
allows, and the words change places in shared memory.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvxfer.kernels.block_rewrite import BlockRewrite, sources_of_runs
from kvxfer.kernels.elements import ELEMENTS
from kvxfer.kernels.segments import Segments, on_device

# of shared memory: three programs on a multiprocessor
MAX_BLOCK_NBYTES = 64 << 10
# Beyond these, units are as wide as an access: rows lose nothing by cycles
MAX_WORD_NBYTES = 8
THREAD_NBYTES = 64


@triton.jit(do_not_specialize=["num_covered_tokens"])
def gather_kernel(
    table,
    block_ids,
    sources,
    num_covered_tokens,
    NUM_WORDS: tl.constexpr,
    LANES: tl.constexpr,
    TOKEN_WORDS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    COVERS: tl.constexpr,
    WORD: tl.constexpr,
    ALIGNMENT: tl.constexpr,
) -> None:
    # int64: a cache is larger than 2 GiB
    number = tl.program_id(0).to(tl.int64)
    segment = table + tl.program_id(1) * 3
    address = tl.load(segment) + tl.load(block_ids + number) * tl.load(segment + 1)
    # The compiler cannot know the alignment of numbers from a table.
    block = tl.multiple_of(address.to(tl.pointer_type(WORD)), ALIGNMENT)
    lane = tl.arange(0, LANES)
    mask = lane < NUM_WORDS
    # Lanes behind the last word have a source too: a gather has no mask
    source = tl.load(sources + lane)
    words = tl.gather(tl.load(block + lane, mask=mask), source, 0)
    if COVERS:
        token = lane // TOKEN_WORDS % BLOCK_TOKENS
        words = tl.where(token < num_covered_tokens - number * BLOCK_TOKENS, words, 0)
    # The thread that loaded a word stores it: none stores what another one has yet to load.
    tl.store(block + lane, words, mask=mask)


def gathers(segments: Segments, rewrite: BlockRewrite) -> bool:
    """Is a block moved as a whole (:func:`gather_blocks`), and not by cycles?

    Only where that is possible: sets of one block, of at most 64 KiB, whose rows touch each other;
    only where something moves, because else the cycles just write zeros; and only in units narrower
    than 16 bytes. On an H200, at 8192 tokens, as ratios to a device-to-device copy, received blocks
    of 4 tokens by head in local ones of 16 by token (scripts/results/postprocess_2026-11-22.md):

    ==============  ==========  ============  =========
    bytes of a row  of a unit   whole blocks  by cycles
    ==============  ==========  ============  =========
    132             4           0.935         0.686
    656             16          0.65 to 0.79  1.035
    1152            16          0.65 to 0.79  1.121
    ==============  ==========  ============  =========

    Rows of 256 bytes gain a little (16 tokens by head to by token: 0.92 beside 0.868), which is not
    worth a bound of its own.
    """
    return (
        segments.is_dense
        and segments.unit_nbytes <= MAX_WORD_NBYTES
        and segments.block_nbytes <= MAX_BLOCK_NBYTES
        and rewrite.set_blocks == 1
        and not rewrite.moves_nothing
    )


def gather_blocks(
    segments: Segments, block_ids: Tensor, rewrite: BlockRewrite, num_covered_tokens: int | None
) -> None:
    """``rewrite_blocks`` of postprocess.py where :func:`gathers` says so; checks nothing."""
    word_nbytes = segments.unit_nbytes
    num_words = segments.block_nbytes // word_nbytes
    lanes = triton.next_power_of_2(num_words)
    # By head, a head's tokens come one after the other and the next head's begin anew
    token_rows = 1 if rewrite.local_by_head else rewrite.num_heads
    sources = _sources_on(rewrite, num_words, lanes, block_ids.device)
    for table in segments.tables:
        gather_kernel[(block_ids.numel(), table.shape[0])](
            table,
            block_ids,
            sources,
            num_covered_tokens or 0,
            NUM_WORDS=num_words,
            LANES=lanes,
            TOKEN_WORDS=token_rows * segments.width_nbytes // word_nbytes,
            BLOCK_TOKENS=rewrite.local.block_tokens,
            COVERS=num_covered_tokens is not None,
            WORD=ELEMENTS[word_nbytes],
            ALIGNMENT=segments.alignment_nbytes,
            num_warps=min(32, max(1, lanes * word_nbytes // (32 * THREAD_NBYTES))),
        )


def sources_of_words(rewrite: BlockRewrite, num_words: int, lanes: int) -> Tensor:
    """[lanes] int32: of each word of a block the word that it comes from; 0 behind the last."""
    runs = sources_of_runs(rewrite, torch.device("cpu"))
    run_words = num_words // rewrite.set_runs
    sources = torch.zeros(lanes, dtype=torch.int32)
    sources[:num_words] = (runs[:, None] * run_words + torch.arange(run_words)).view(-1)
    return sources


@cache
def _sources_on(rewrite: BlockRewrite, num_words: int, lanes: int, device: torch.device) -> Tensor:
    """There. Kept: launches that read them may still be on their way."""
    return on_device(sources_of_words(rewrite, num_words, lanes), device)
