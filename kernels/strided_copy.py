"""Copy tokens of many regions between two layouts, any block sizes and strides, in one launch.

A region is an address in source_table and one in sink_table: of (block 0, first head, token 0), on
this GPU, or a peer's that is mapped here. Bytes move, whatever their type.

source_table, sink_table [num_regions] int64 (absolute byte addresses); source_ids, sink_ids [n]
int64 (block ids, see ``CopySide``); params [NUM_PARAMS] int64 (``Launch.params``)

A unit is one tile of tokens x words for a few pairs. Few programs share the units evenly: each
takes a run of them, and offsets of a tile are worked out once and serve all its pairs. Or each unit
has a program of its own (``WHOLE_GPU``).

Lanes run along the words of a token; or along some tokens of a word, where a side has those
together. An access of 16 bytes is two int64 side by side in one thread. That the compiler sees it
shows in ``launch_copy(...).asm["ptx"]``: ld.global.v2.b64 and st.global.v2.b64. A run is narrow
words that lie side by side at the source and apart at the sink: it is loaded at once.
"""

import torch
import triton
import triton.language as tl

from kvxfer.kernels.strided_work import (
    HEAD_PARAMS,
    NUM_PARAMS,
    SIDE_PARAMS,
    Launch,
)

# What is loaded and stored at once, by its bytes; 16 are two elements side by side
ELEMENTS = {16: tl.int64, 8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}

_SOURCE = tl.constexpr(HEAD_PARAMS)
_SINK = tl.constexpr(HEAD_PARAMS + SIDE_PARAMS)


@triton.jit
def _divide(number, divisor, magic, shift):
    """Quotient and remainder, both int32, by a multiplication and a shift."""
    quotient = (number.to(tl.int64) * magic >> shift).to(tl.int32)
    return quotient, number - quotient * divisor.to(tl.int32)


@triton.jit
def _divide_by(number, params):
    """By three params: the divisor, its magic number, its shift."""
    return _divide(number, tl.load(params), tl.load(params + 1), tl.load(params + 2))


@triton.jit
def _token_offset(side, ids, token, wanted):
    """Byte offset of each token from its region's address."""
    block, slot = _divide_by(token + tl.load(side + 7).to(tl.int32), side)
    kernel_block, kernel_slot = _divide_by(slot, side + 3)
    # int64 before the multiply: a pool is larger than 2 GiB
    block_id = tl.load(ids + block, mask=wanted, other=0) * tl.load(side + 6) + kernel_block
    return block_id * tl.load(side + 8) + kernel_slot.to(tl.int64) * tl.load(side + 9)


@triton.jit
def _words_at(address, offsets, ELEMENT: tl.constexpr, VEC: tl.constexpr):
    words = (address + offsets)[:, None].to(tl.pointer_type(ELEMENT)) + tl.arange(0, VEC)[None, :]
    # The host chose the word so that this holds. The hint must sit on this pointer: the compiler
    # forgets what it knew of an integer that becomes one.
    nbytes: tl.constexpr = VEC * ELEMENT.primitive_bitwidth // 8
    return tl.max_contiguous(tl.multiple_of(words, [1, nbytes]), [1, VEC])


@triton.jit
def _copy_pairs(
    tables,
    heads,
    offsets,
    lane,
    num_lanes,
    pair,
    num_pairs,
    ELEMENT: tl.constexpr,
    VEC: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Copy PAIRS pairs from ``pair`` on. ``tables``, ``offsets``: of the source and of the sink;
    ``heads``: their number, its magic number and shift, and the strides of both sides. The sink's
    offsets are [lanes, words of a run] where there are runs, else [lanes].

    Calls itself between its load and its store, so that all loads come before the first store: the
    compiler could not move them there, since it cannot know that nothing overlaps.
    """
    region, head = _divide(tl.minimum(pair, num_pairs - 1), heads[0], heads[1], heads[2])
    given = tl.load(tables[0] + region) + head * heads[3]
    taken = tl.load(tables[1] + region) + head * heads[4]
    mask = (lane < tl.where(pair < num_pairs, num_lanes, 0))[:, None]
    words = tl.load(_words_at(given, offsets[0], ELEMENT, VEC), mask=mask)
    if PAIRS > 1:
        _copy_pairs(
            tables, heads, offsets, lane, num_lanes, pair + 1, num_pairs, ELEMENT, VEC, PAIRS - 1
        )
    if VEC > 1 and ELEMENT.primitive_bitwidth < 64:
        tl.store((taken + offsets[1]).to(tl.pointer_type(ELEMENT)), words, mask=mask)
    else:
        tl.store(_words_at(taken, offsets[1], ELEMENT, VEC), words, mask=mask)


@triton.jit
def _place(numbers, number, BY_CHANNEL: tl.constexpr, TOKENS_FIRST: tl.constexpr):
    """Token, channel and word of each number, by which the words of a pair are counted."""
    if TOKENS_FIRST:
        rest, slot = _divide_by(number, numbers + 6)
        chunk, word = _divide_by(rest, numbers + 9)
        token = chunk * tl.load(numbers + 6).to(tl.int32) + slot
    else:
        token, word = _divide_by(number, numbers + 9)
    channel = word
    if BY_CHANNEL:
        channel, word = _divide_by(word, numbers + 12)
    return token, channel, word


@triton.jit
def _offset(side, ids, place, wanted, WORD: tl.constexpr, BY_CHANNEL: tl.constexpr):
    """Byte offset of each place from the address of any pair."""
    offset = _token_offset(side, ids, place[0], wanted)
    if BY_CHANNEL:
        offset += place[1].to(tl.int64) * tl.load(side + 10)
    return offset + place[2] * WORD


@triton.jit
def _tile_offsets(
    numbers,
    source_ids,
    sink_ids,
    lane,
    num_lanes,
    WORD: tl.constexpr,
    RUN: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    TOKENS_FIRST: tl.constexpr,
):
    """Of the words of each lane, or the first of its run: at the source [lanes], at the sink
    [lanes] or [lanes, RUN].
    """
    wanted = lane < num_lanes
    place = _place(numbers, lane * RUN, BY_CHANNEL, TOKENS_FIRST)
    given = _offset(numbers + _SOURCE, source_ids, place, wanted, WORD, BY_CHANNEL)
    if RUN > 1 and TOKENS_FIRST:  # a run may end in another channel
        number = lane[:, None] * RUN + tl.arange(0, RUN)[None, :]
        place = _place(numbers, number, BY_CHANNEL, TOKENS_FIRST)
        wanted = number < num_lanes * RUN
    taken = _offset(numbers + _SINK, sink_ids, place, wanted, WORD, BY_CHANNEL)
    if RUN > 1 and not TOKENS_FIRST:
        taken = taken[:, None] + (tl.arange(0, RUN) * tl.load(numbers + _SINK + 10))[None, :]
    return given, taken


@triton.jit(
    do_not_specialize_on_alignment=[
        "numbers",
        "source_table",
        "sink_table",
        "source_ids",
        "sink_ids",
    ]
)
def _copy_kernel(
    numbers,  # not "params": Triton 3.6 has a variable of that name where it binds arguments
    source_table,
    sink_table,
    source_ids,
    sink_ids,
    ELEMENT: tl.constexpr,
    VEC: tl.constexpr,
    WORD: tl.constexpr,
    LANES: tl.constexpr,
    PAIRS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    TOKENS_FIRST: tl.constexpr,
    ALONE: tl.constexpr,
):
    RUN: tl.constexpr = VEC if ELEMENT.primitive_bitwidth < 64 else 1
    num_lanes = tl.load(numbers)
    num_groups = tl.load(numbers + 1)
    num_pairs = tl.load(numbers + 2)
    tables = (source_table, sink_table)
    heads = (
        tl.load(numbers + 3),
        tl.load(numbers + 4),
        tl.load(numbers + 5),
        tl.load(numbers + _SOURCE + 11),
        tl.load(numbers + _SINK + 11),
    )
    num_tiles = tl.cdiv(num_lanes, LANES)
    if ALONE:
        # What runs at one time lies close together: tiles of the same pairs follow each other.
        # Divided in 32 bits and written out, because a program does little else: loops of one turn
        # took 4 % more.
        tiles = tl.maximum(num_tiles, 1).to(tl.int32)
        group = tl.program_id(0) // tiles
        tile = tl.program_id(0) - group * tiles
        lane = tile * LANES + tl.arange(0, LANES)
        offsets = _tile_offsets(
            numbers, source_ids, sink_ids, lane, num_lanes, WORD, RUN, BY_CHANNEL, TOKENS_FIRST
        )
        _copy_pairs(
            tables, heads, offsets, lane, num_lanes, group * PAIRS, num_pairs, ELEMENT, VEC, PAIRS
        )
    else:
        num_units = num_tiles * num_groups
        first_unit = num_units * tl.program_id(0) // tl.num_programs(0)
        end_unit = num_units * (tl.program_id(0) + 1) // tl.num_programs(0)
        for tile in range(first_unit // num_groups, tl.cdiv(end_unit, num_groups)):
            lane = (tile * LANES + tl.arange(0, LANES)).to(tl.int32)
            offsets = _tile_offsets(
                numbers, source_ids, sink_ids, lane, num_lanes, WORD, RUN, BY_CHANNEL, TOKENS_FIRST
            )
            first_group = tl.maximum(first_unit - tile * num_groups, 0)
            end_group = tl.minimum(end_unit - tile * num_groups, num_groups)
            for group in range(first_group, end_group):
                _copy_pairs(
                    tables,
                    heads,
                    offsets,
                    lane,
                    num_lanes,
                    group * PAIRS,
                    num_pairs,
                    ELEMENT,
                    VEC,
                    PAIRS,
                )


def launch_copy(
    params: torch.Tensor,
    source_table: torch.Tensor,
    sink_table: torch.Tensor,
    source_ids: torch.Tensor,
    sink_ids: torch.Tensor,
    launch: Launch,
) -> object:
    """Copy for all regions on the current stream; nothing else is written.

    All tensors int64 on the GPU that copies; ``params``: ``launch.params`` there. Neither ids nor
    addresses are checked: the GPU cannot. Returns the compiled kernel. A launch without tokens
    copies nothing and compiles what others need.
    """
    if source_table.numel() != sink_table.numel():
        raise ValueError(
            f"sink_table: expected {source_table.numel()} regions like the source, "
            f"got {sink_table.numel()}"
        )
    check_arrays(NUM_PARAMS, params, source_table, sink_table, source_ids, sink_ids)
    grid = (launch.num_programs,)
    # Triton launches on the current device, whatever its tensors are on
    with torch.cuda.device_of(params):  # type: ignore[no-untyped-call]
        compiled: object = _copy_kernel[grid](
            params,
            source_table,
            sink_table,
            source_ids,
            sink_ids,
            ELEMENT=ELEMENTS[launch.word_nbytes],
            VEC=2 if launch.word_nbytes == 16 else launch.run_words,
            WORD=launch.word_nbytes,
            LANES=launch.lanes,
            PAIRS=launch.pairs,
            BY_CHANNEL=launch.by_channel,
            TOKENS_FIRST=launch.tokens_first,
            ALONE=launch.alone,
            num_warps=launch.warps,
            num_stages=1,  # the loop needs no shared memory: other warps load while one waits
        )
    return compiled


def check_arrays(num_params: int, params: torch.Tensor, *arrays: torch.Tensor) -> None:
    """Are these what a kernel reads? Raises ValueError and TypeError."""
    if params.numel() != num_params:
        raise ValueError(f"params: expected {num_params}, got {params.numel()}")
    for tensor in (params, *arrays):
        if tensor.dtype != torch.int64 or tensor.dim() != 1 or not tensor.is_contiguous():
            raise TypeError(
                f"params, tables and ids: expected contiguous 1-D int64, "
                f"got {tensor.dtype} of shape {tuple(tensor.shape)}"
            )
