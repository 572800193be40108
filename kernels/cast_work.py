"""What one launch of a strided cast does, as numbers. Pure, as :mod:`.strided_work` is.

A *cell* is the elements of one head and one token; a *pair* is one region and one head. Programs
take tiles of cells of one pair.
"""

import math
from dataclasses import dataclass

from kvxfer.kernels.strided_work import MANY, SIDE_PARAMS, WHOLE_GPU, CopySide, divisor, side_params

# 64 KiB of bfloat16 at a time, as a copy of 24 programs has; with a whole GPU more programs of less
_TILE_ELEMENTS = 1 << 15
_SMALL_TILE_ELEMENTS = 1 << 13
_WARPS = 8
_ALIGN_NBYTES = 16
SCALE_NBYTES = 4
HEAD_PARAMS = 7
NUM_PARAMS = HEAD_PARAMS + 4 * SIDE_PARAMS

# How a side's scales are given
ONE = 0  # all are 1
TABLE = 1  # of each pair, behind the addresses
TOKENS = 2  # of each cell, in memory: the addresses of the regions lie behind those of the cells
INVERSE = 3  # as TABLE, of a sink whose scales have exact reciprocals: these


@dataclass(frozen=True, slots=True, kw_only=True)
class CastEnd:
    """One side: where its cells lie, and where their scales do (``scales`` TOKENS, else anything).

    ``align_nbytes`` divides every address. ``dtype``: PyTorch's name; ``item_nbytes``: its size.
    """

    cells: CopySide
    dtype: str
    item_nbytes: int
    scales: int = ONE
    scale_cells: CopySide | None = None
    align_nbytes: int = _ALIGN_NBYTES

    @property
    def has_channels_apart(self) -> bool:
        return self.cells.stride_channel not in (0, self.item_nbytes)

    def vec(self, num_elements: int) -> int:
        """How many elements one access can have: a power of two that divides a cell's."""
        if self.has_channels_apart:
            return 1
        side = self.cells
        strides = (side.stride_block, side.stride_head, side.stride_token)
        nbytes = num_elements * self.item_nbytes
        return math.gcd(_ALIGN_NBYTES, self.align_nbytes, nbytes, *strides) // self.item_nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CastLaunch:
    """A launch: what is compiled in, and ``params``, which the kernel reads from memory."""

    params: tuple[int, ...]
    types: tuple[str, str]
    scales: tuple[int, int]
    vec: int
    apart: tuple[bool, bool]
    rows: int
    channels: int
    num_programs: int
    is_native: bool

    warps = _WARPS

    @property
    def binary(self) -> tuple[object, ...]:
        """Everything that is compiled in: launches with equal values share one binary."""
        how = (self.rows, self.channels, self.is_native)
        return "cast", self.types, self.scales, self.vec, self.apart, *how


def plan_cast(
    source: CastEnd,
    sink: CastEnd,
    *,
    num_tokens: int,
    num_heads: int,
    num_elements: int,
    num_regions: int,
    num_programs: int,
    is_native: bool,
) -> CastLaunch:
    """The launch for ``num_regions`` regions of one geometry. ``num_programs``: at most, or
    WHOLE_GPU. ``is_native``: the GPU has instructions for types of 8 bits.
    """
    if sink.scales in (TABLE, TOKENS):
        # Divisions: on an H100 24 programs make 58 GB/s of bfloat16, all of them 490. Of a link
        # between two, 24 carry 0.10 where each token has a scale, all of them 0.91 to 0.93. Where
        # nothing is divided 24 make 850 GB/s, which no link between GPUs carries.
        num_programs = WHOLE_GPU
    channels = 1 << (num_elements - 1).bit_length()
    elements = _SMALL_TILE_ELEMENTS if num_programs == WHOLE_GPU else _TILE_ELEMENTS
    rows = max(1, elements // channels)
    num_pairs = num_regions * num_heads
    num_units = -(-num_tokens // rows) * num_pairs
    return CastLaunch(
        params=(
            *(num_tokens, num_pairs, num_regions),
            *divisor(num_heads),
            num_elements,
            *side_params(source.cells),
            *side_params(sink.cells),
            *side_params(source.scale_cells or source.cells),
            *side_params(sink.scale_cells or sink.cells),
        ),
        types=(source.dtype, sink.dtype),
        scales=(source.scales, sink.scales),
        vec=min(source.vec(num_elements), sink.vec(num_elements)),
        apart=(source.has_channels_apart, sink.has_channels_apart),
        rows=rows,
        channels=channels,
        num_programs=max(1, min(num_programs or 4 * MANY, num_units)),
        is_native=is_native,
    )
