"""Where the pieces of a block lie in the views of many layers, for whoever writes whole blocks.

Piece b of a segment has ``nbytes`` at ``address + b * stride_nbytes``. A view whose blocks are
outermost is one segment, one with K and V outside the blocks two; in general there is one for every
index outside a block's contiguous bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """One piece of every block of a layer; ``address`` is absolute."""

    layer: str
    address: int
    stride_nbytes: int
    nbytes: int

    def end(self, num_blocks: int) -> int:
        """The first address behind its last piece."""
        return self.address + (num_blocks - 1) * self.stride_nbytes + self.nbytes


def segments_of(layer: str, view: Tensor, block_dim: int, kernel_blocks: int) -> list[Segment]:
    """The segments of a view: exactly its bytes, none of the gaps between them.

    ``block_dim`` counts kernel blocks; ``kernel_blocks`` of them in a row are a block.
    """
    itemsize = view.element_size()
    inner_first = sorted(
        (view.stride(dim) * itemsize, size)
        for dim, size in enumerate(view.shape)
        if dim != block_dim and size > 1
    )
    nbytes = itemsize
    outside: list[range] = []
    for stride_nbytes, size in inner_first:
        if not outside and stride_nbytes == nbytes:
            nbytes *= size
        else:
            outside.append(range(0, stride_nbytes * size, stride_nbytes))
    stride_nbytes = view.stride(block_dim) * itemsize
    if stride_nbytes == nbytes:
        nbytes *= kernel_blocks  # the kernel blocks of a block touch each other
    else:
        outside.append(range(0, stride_nbytes * kernel_blocks, stride_nbytes))
    return [
        Segment(layer, view.data_ptr() + sum(offsets), stride_nbytes * kernel_blocks, nbytes)
        for offsets in itertools.product(*outside)
    ]


def distinct(segments: Iterable[Segment], num_blocks: int) -> tuple[Segment, ...]:
    """Segments in order of address, bytes that several layers have once.

    Raises ValueError that names two layers if a block of one lies in another block of the other.
    """
    largest: dict[tuple[int, int], Segment] = {}
    for segment in segments:
        known = largest.get((segment.address, segment.stride_nbytes))
        if known is None or known.nbytes < segment.nbytes:
            largest[segment.address, segment.stride_nbytes] = segment
    ordered = sorted(largest.values(), key=lambda segment: segment.address)
    if num_blocks > 1:
        _check_blocks(ordered, num_blocks)
    return tuple(ordered)


def _check_blocks(ordered: list[Segment], num_blocks: int) -> None:
    """Segments that reach into each other must step alike and stay within one step: then piece b
    of one never touches another piece than b of the other.
    """
    end = 0
    first: Segment | None = None
    for segment in ordered:
        if first is None or segment.address >= end:
            first, end = segment, segment.end(num_blocks)
        within = segment.address - first.address + segment.nbytes <= first.stride_nbytes
        if segment.stride_nbytes != first.stride_nbytes or not within:
            raise ValueError(
                f"{first.layer} and {segment.layer}: expected each block of both in the same "
                f"bytes, got {first.nbytes} bytes every {first.stride_nbytes} and "
                f"{segment.nbytes} every {segment.stride_nbytes} in one buffer"
            )
        end = max(end, segment.end(num_blocks))
