"""The kernel that puts received blocks into the local order; launched by postprocess.py.

table [num_segments, 3] int64 (address, stride_nbytes, row_nbytes), block_ids [n] int64, pairs
[num_bins, bin_runs] int64 (source run, and target run * 2**32; negative: no run)

A program has all units of its bin in registers before it stores the first one. Units lie flat on
the threads, run behind run, so no width of a row leaves lanes idle. A unit of 16 bytes is two int64
side by side in one thread. That the compiler sees it shows in the PTX: ld.global.v2.b64.
"""

import triton
import triton.language as tl


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
def _token_of(
    run,
    column,
    HEADS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BY_HEAD: tl.constexpr,
    SET_BLOCKS: tl.constexpr,
    RUN_TOKENS: tl.constexpr,
    ROW_UNITS: tl.constexpr,
):
    """The token of a set whose unit is the run's ``column``, in local order."""
    if BY_HEAD:
        head_runs: tl.constexpr = BLOCK_TOKENS // RUN_TOKENS
        token = run % head_runs * RUN_TOKENS
        if SET_BLOCKS > 1:
            token += run // (HEADS * head_runs) * BLOCK_TOKENS
        if RUN_TOKENS > 1:
            token += column // ROW_UNITS
    else:
        token = run // HEADS
    return token


@triton.jit(do_not_specialize=["num_covered_tokens"])
def rewrite_kernel(
    table,
    block_ids,
    pairs,
    num_covered_tokens,
    HEADS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BY_HEAD: tl.constexpr,
    SET_BLOCKS: tl.constexpr,
    RUN_TOKENS: tl.constexpr,
    ROW_UNITS: tl.constexpr,
    IS_DENSE: tl.constexpr,
    IS_WIDE: tl.constexpr,
    MOVES: tl.constexpr,
    COVERS: tl.constexpr,
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
    BLOCK_RUNS: tl.constexpr = HEADS * BLOCK_TOKENS // RUN_TOKENS
    # Slices of a set side by side: together they use the sectors that one of them touches in part.
    program = tl.program_id(0)
    slot = program // NUM_SLICES % NUM_BINS
    first_set = (program // (NUM_BINS * NUM_SLICES)).to(tl.int64)
    segment = table + tl.program_id(1) * 3
    ids = block_ids + first_set * SET_BLOCKS
    # int64: a cache is larger than 2 GiB
    base = tl.load(segment)
    stride_nbytes = tl.load(segment + 1)
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
        row_words = tl.load(segment + 2) // (WORD.primitive_bitwidth // 8)
        if not IS_WIDE:
            row_words = row_words.to(tl.int32)
        run_words = RUN_TOKENS * row_words
    if IS_DENSE or RUN_TOKENS == 1:
        inside = column * VEC
    else:
        inside = column // ROW_UNITS * row_words + column % ROW_UNITS * VEC

    loads = mask
    stores = mask
    if COVERS:
        SET_TOKENS: tl.constexpr = SET_BLOCKS * BLOCK_TOKENS
        # int32 from here on, so no more than a set's
        covered = tl.minimum(num_covered_tokens - first_set * SET_TOKENS, SET_TOKENS)
        covered = tl.maximum(covered, 0).to(tl.int32)
        is_covered = covered > _token_of(
            target, column, HEADS, BLOCK_TOKENS, BY_HEAD, SET_BLOCKS, RUN_TOKENS, ROW_UNITS
        )
        moves = source != target
        loads = mask & is_covered & moves
        stores = mask & ((is_covered == 0) | moves)
    if MOVES:
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
        words = tl.load(given, mask=loads[:, None], other=0)  # zero where nothing was received
        # One thread's target is another one's source.
        tl.debug_barrier()
    else:
        words = tl.zeros([UNITS, VEC], WORD)
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
    tl.store(taken, words, mask=stores[:, None])
