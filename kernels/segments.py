"""Where the blocks of many layers lie, as the kernels that rewrite them read it.

table [num_segments, 3] int64 (address, stride_nbytes, row_nbytes)

Segment s has the row r of block b at address + b * stride_nbytes + r * row_nbytes: what one head
keeps of one token. Needs no Triton.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# CUDA's limit for the second dimension of a grid
MAX_SEGMENTS = 65535


@dataclass(frozen=True, slots=True)
class Segments:
    """Views of one geometry, as the kernels read them; good while their memory lives.

    ``unit_nbytes``, up to 16, divides every address, stride and size; ``alignment_nbytes``, a
    multiple of it up to 16, the address of every block. ``is_dense``: rows touch each other.
    ``is_wide``: a block reaches farther than int32 counts.
    """

    table: Tensor
    block_rows: int
    width_nbytes: int
    unit_nbytes: int
    alignment_nbytes: int
    is_dense: bool
    is_wide: bool

    @property
    def block_nbytes(self) -> int:
        """Of a block's rows, without what lies between them."""
        return self.block_rows * self.width_nbytes

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """The table, a launch each."""
        return torch.split(self.table, MAX_SEGMENTS)


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
    block_rows = first.shape[1] * first.shape[2]
    alignment_nbytes = math.gcd(16, *(number for row in rows for number in row[:2]))
    return Segments(
        table=table.to(first.device, non_blocking=True),
        block_rows=block_rows,
        width_nbytes=width_nbytes,
        unit_nbytes=math.gcd(alignment_nbytes, width_nbytes, *(row[2] for row in rows)),
        alignment_nbytes=alignment_nbytes,
        is_dense=all(row[2] == width_nbytes for row in rows),
        is_wide=max(row[2] for row in rows) * block_rows >= 2**31,
    )


def on_device(table: Tensor, device: torch.device) -> Tensor:
    """A table that is kept: copied without waiting for what runs in the current stream."""
    if device.type != "cuda":
        return table
    # A stream of its own: the copy waits until it is over, and not for what else runs there
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        return table.to(device)
