"""Cast tokens of many regions from one layout, type and scale to another, in one launch.

Tables and ids are those of :mod:`.strided_copy`; behind the addresses of a table come the scales of
its pairs, float32 in the low half of each word, or the addresses of its regions' scales
(``cast_work``). ``kvxfer/tensors/element_cast.py`` says the arithmetic; the bits are the same, NaN
aside. Where ``NATIVE`` is off, conversions are integer arithmetic: for GPUs without instructions
for e4m3 (before compute capability 8.9), and for Triton's interpreter, which truncates.
"""

import torch
import triton
import triton.language as tl

from kvxfer.kernels import cast_work
from kvxfer.kernels.cast_work import HEAD_PARAMS, NUM_PARAMS, CastLaunch
from kvxfer.kernels.strided_copy import _divide, _token_offset, check_arrays
from kvxfer.kernels.strided_work import SIDE_PARAMS

_SOURCE = tl.constexpr(HEAD_PARAMS)
_SINK = tl.constexpr(HEAD_PARAMS + SIDE_PARAMS)
_SOURCE_SCALE = tl.constexpr(HEAD_PARAMS + 2 * SIDE_PARAMS)
_SINK_SCALE = tl.constexpr(HEAD_PARAMS + 3 * SIDE_PARAMS)
_ONE = tl.constexpr(cast_work.ONE)
_TOKENS = tl.constexpr(cast_work.TOKENS)
_INVERSE = tl.constexpr(cast_work.INVERSE)
_LARGEST_FLOAT = tl.constexpr(torch.finfo(torch.float32).max)
_LEAST_TOKEN_SCALE = tl.constexpr(1e-6)
# Elements are loaded and stored as integers
_WORDS = {
    "float32": tl.int32,
    "bfloat16": tl.int16,
    "float16": tl.int16,
    "float8_e4m3fn": tl.int8,
    "float8_e5m2": tl.int8,
}


@triton.jit
def _widened(words, TYPE: tl.constexpr, NATIVE: tl.constexpr):
    """Elements as float32."""
    if TYPE == "float32":
        values = words.to(tl.float32, bitcast=True)
    elif TYPE == "bfloat16":
        values = (words.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif TYPE == "float16":
        values = words.to(tl.float16, bitcast=True).to(tl.float32)
    elif TYPE == "float8_e5m2":  # the upper half of a float16
        halves = (words.to(tl.int16) << 8).to(tl.float16, bitcast=True)
        values = halves.to(tl.float32)
    elif NATIVE:
        values = words.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:  # a float16 whose exponent counts from 7 and not from 15
        size = words.to(tl.int16) & 0x7F
        halves = ((size << 7) | (words.to(tl.int16) & -32768)).to(tl.float16, bitcast=True)
        values = tl.where(size == 0x7F, float("nan"), halves.to(tl.float32) * 256.0)
    return values


@triton.jit
def _rounded(
    values,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST_NORMAL: tl.constexpr,
    ROUNDER: tl.constexpr,
):
    """The nearest element of 8 bits, ties to even, by the bits of float32. A number below the least
    normal one loses what is finer than the type's smallest step when ROUNDER is added.
    """
    SHIFT: tl.constexpr = 23 - MANTISSA
    size = tl.minimum(tl.abs(values), LARGEST)
    bits = size.to(tl.int32, bitcast=True)
    half = (1 << (SHIFT - 1)) - 1 + ((bits >> SHIFT) & 1)
    normal = ((bits + half) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    rounder = tl.full(size.shape, ROUNDER, tl.float32)
    least = (size + rounder).to(tl.int32, bitcast=True) - rounder.to(tl.int32, bitcast=True)
    found = tl.where(size < LEAST_NORMAL, least, normal)
    sign = (values.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(values != values, 0x7F, found | sign).to(tl.int8)


@triton.jit
def _narrowed(values, TYPE: tl.constexpr, NATIVE: tl.constexpr):
    """float32 as elements; those of 8 bits saturate."""
    if TYPE == "float32":
        words = values.to(tl.int32, bitcast=True)
    elif TYPE == "float16":
        words = values.to(tl.float16).to(tl.int16, bitcast=True)
    elif TYPE == "bfloat16":
        if NATIVE:
            words = values.to(tl.bfloat16).to(tl.int16, bitcast=True)
        else:
            bits = values.to(tl.int32, bitcast=True)
            nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            words = tl.where(values != values, 0x7FC0, nearest).to(tl.int16)
    elif TYPE == "float8_e4m3fn":
        if NATIVE:  # cvt.rn.satfinite
            words = values.to(tl.float8e4nv).to(tl.int8, bitcast=True)
        else:
            words = _rounded(values, 3, 7, 448.0, 0.015625, 16384.0)
    elif NATIVE:
        words = values.to(tl.float8e5).to(tl.int8, bitcast=True)
    else:
        words = _rounded(values, 2, 15, 57344.0, 0.00006103515625, 128.0)
    return words


@triton.jit
def _places(cells, side, channel, VEC: tl.constexpr, APART: tl.constexpr, ELEMENT: tl.constexpr):
    """Pointers [rows, channels] to the elements of cells, of which [rows, 1] are the addresses."""
    if APART:
        places = (cells + channel * tl.load(side + 10)).to(tl.pointer_type(ELEMENT))
    else:
        nbytes: tl.constexpr = VEC * ELEMENT.primitive_bitwidth // 8
        places = cells.to(tl.pointer_type(ELEMENT)) + channel
        places = tl.max_contiguous(tl.multiple_of(places, [1, nbytes]), [1, VEC])
    return places


@triton.jit
def _scale_places(table, num_regions, region, head, offsets, side):
    """Pointers to the scales of each cell."""
    first = tl.load(table + num_regions + region) + head * tl.load(side + 11)
    return (first + offsets).to(tl.pointer_type(tl.float32))  # [rows, 1]


@triton.jit
def _pair_scale(table, num_regions, pair):
    return tl.load(table + num_regions + pair).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _cast_tile(
    numbers,
    tables,
    offsets,
    scale_offsets,
    row,
    pair,
    SOURCE: tl.constexpr,
    SINK: tl.constexpr,
    SOURCE_ELEMENT: tl.constexpr,
    SINK_ELEMENT: tl.constexpr,
    SOURCE_SCALES: tl.constexpr,
    SINK_SCALES: tl.constexpr,
    VEC: tl.constexpr,
    SOURCE_APART: tl.constexpr,
    SINK_APART: tl.constexpr,
    CHANNELS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Tokens ``row`` of one pair. Tables and offsets are those of the source and the sink."""
    num_tokens, num_regions = tl.load(numbers), tl.load(numbers + 2)
    pair = tl.minimum(pair, tl.load(numbers + 1) - 1)  # in the interpreter a loop counts in Python
    region, head = _divide(pair, tl.load(numbers + 3), tl.load(numbers + 4), tl.load(numbers + 5))
    channel = tl.arange(0, CHANNELS)[None, :]
    wanted = (row < num_tokens)[:, None]
    # The host chose VEC so that it divides a cell's elements
    mask = tl.max_constancy(wanted & (channel < tl.load(numbers + 6)), [1, VEC])
    given = tl.load(tables[0] + region) + head * tl.load(numbers + _SOURCE + 11) + offsets[0]
    taken = tl.load(tables[1] + region) + head * tl.load(numbers + _SINK + 11) + offsets[1]
    places = _places(given, numbers + _SOURCE, channel, VEC, SOURCE_APART, SOURCE_ELEMENT)
    values = _widened(tl.load(places, mask=mask, other=0), SOURCE, NATIVE)
    if SOURCE_SCALES == _TOKENS:
        side = numbers + _SOURCE_SCALE
        scale_places = _scale_places(tables[0], num_regions, region, head, scale_offsets[0], side)
        values = values * tl.load(scale_places, mask=wanted, other=1.0)
    elif SOURCE_SCALES != _ONE:
        values = values * _pair_scale(tables[0], num_regions, pair)
    if SINK_SCALES == _TOKENS:
        sizes = tl.where(values != values, 0.0, tl.minimum(tl.abs(values), _LARGEST_FLOAT))
        most = tl.max(tl.where(mask, sizes, 0.0), axis=1)[:, None]
        if SINK == "float8_e4m3fn":
            most = tl.div_rn(most, tl.full(most.shape, 448.0, tl.float32))
        elif SINK == "float8_e5m2":
            most = tl.div_rn(most, tl.full(most.shape, 57344.0, tl.float32))
        scale = tl.maximum(most, _LEAST_TOKEN_SCALE)
        side = numbers + _SINK_SCALE
        scale_places = _scale_places(tables[1], num_regions, region, head, scale_offsets[1], side)
        tl.store(scale_places, scale, mask=wanted)
        values = values * tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    elif SINK_SCALES == _INVERSE:
        values = values * _pair_scale(tables[1], num_regions, pair)
    elif SINK_SCALES != _ONE:
        scale = _pair_scale(tables[1], num_regions, pair)
        values = tl.div_rn(values, tl.zeros_like(values) + scale)
    places = _places(taken, numbers + _SINK, channel, VEC, SINK_APART, SINK_ELEMENT)
    tl.store(places, _narrowed(values, SINK, NATIVE), mask=mask)


@triton.jit(
    do_not_specialize_on_alignment=[
        "numbers",
        "source_table",
        "sink_table",
        "source_ids",
        "sink_ids",
    ]
)
def _cast_kernel(
    numbers,
    source_table,
    sink_table,
    source_ids,
    sink_ids,
    SOURCE: tl.constexpr,
    SINK: tl.constexpr,
    SOURCE_ELEMENT: tl.constexpr,
    SINK_ELEMENT: tl.constexpr,
    SOURCE_SCALES: tl.constexpr,
    SINK_SCALES: tl.constexpr,
    VEC: tl.constexpr,
    SOURCE_APART: tl.constexpr,
    SINK_APART: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    num_tokens, num_pairs = tl.load(numbers), tl.load(numbers + 1)
    num_units = tl.cdiv(num_tokens, ROWS) * num_pairs
    first_unit = num_units * tl.program_id(0) // tl.num_programs(0)
    end_unit = num_units * (tl.program_id(0) + 1) // tl.num_programs(0)
    for tile in range(first_unit // num_pairs, tl.cdiv(end_unit, num_pairs)):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int32)
        wanted = row < num_tokens
        # [rows, 1] from here on: what is done once for a tile is not done for each pair
        offsets = (
            _token_offset(numbers + _SOURCE, source_ids, row, wanted)[:, None],
            _token_offset(numbers + _SINK, sink_ids, row, wanted)[:, None],
        )
        scale_offsets = offsets
        if SOURCE_SCALES == _TOKENS:
            side = numbers + _SOURCE_SCALE
            scale_offset = _token_offset(side, source_ids, row, wanted)[:, None]
            scale_offsets = (scale_offset, scale_offsets[1])
        if SINK_SCALES == _TOKENS:
            side = numbers + _SINK_SCALE
            scale_offset = _token_offset(side, sink_ids, row, wanted)[:, None]
            scale_offsets = (scale_offsets[0], scale_offset)
        first_pair = tl.maximum(first_unit - tile * num_pairs, 0)
        end_pair = tl.minimum(end_unit - tile * num_pairs, num_pairs)
        for pair in range(first_pair, end_pair):
            _cast_tile(
                numbers,
                (source_table, sink_table),
                offsets,
                scale_offsets,
                row,
                pair,
                SOURCE,
                SINK,
                SOURCE_ELEMENT,
                SINK_ELEMENT,
                SOURCE_SCALES,
                SINK_SCALES,
                VEC,
                SOURCE_APART,
                SINK_APART,
                CHANNELS,
                NATIVE,
            )


def launch_cast(
    params: torch.Tensor,
    source_table: torch.Tensor,
    sink_table: torch.Tensor,
    source_ids: torch.Tensor,
    sink_ids: torch.Tensor,
    launch: CastLaunch,
) -> object:
    """Cast for all regions on the current stream; nothing else is written. Tensors are those of
    ``launch_copy``. Returns the compiled kernel.
    """
    check_arrays(NUM_PARAMS, params, source_table, sink_table, source_ids, sink_ids)
    words = [_WORDS[dtype] for dtype in launch.types]
    # Triton launches on the current device, whatever its tensors are on
    with torch.cuda.device_of(params):  # type: ignore[no-untyped-call]
        compiled: object = _cast_kernel[(launch.num_programs,)](
            params,
            source_table,
            sink_table,
            source_ids,
            sink_ids,
            SOURCE=launch.types[0],
            SINK=launch.types[1],
            SOURCE_ELEMENT=words[0],
            SINK_ELEMENT=words[1],
            SOURCE_SCALES=launch.scales[0],
            SINK_SCALES=launch.scales[1],
            VEC=launch.vec,
            SOURCE_APART=launch.apart[0],
            SINK_APART=launch.apart[1],
            ROWS=launch.rows,
            CHANNELS=launch.channels,
            NATIVE=launch.is_native,
            num_warps=launch.warps,
            num_stages=1,
        )
    return compiled
