"""The state of a recurrent layer as regions. Pure.

A convolution keeps the last inputs of several projections side by side (x, B and C of Mamba2; q, k
and v of a gated delta net), and tensor parallelism shards each of them by itself. So the channels
of a rank are several ranges of the model's, which are others for each number of ranks. Each
projection is a plane of its own, whose heads are one range on every rank; then a plan finds who
holds what as it does for heads of attention, replicas too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from kvxfer.transfer.layout import Region


@dataclass(frozen=True, slots=True)
class StatePart:
    """One plane of a state: ``num_heads`` of all ranks, with so many channels each. A group that
    several ranks need is one head, which all of them hold.
    """

    plane: str
    num_heads: int
    num_channels: int


def part_heads(part: StatePart, tp_rank: int, tp_size: int) -> tuple[int, int]:
    """The heads ``[lo, hi)`` of a rank: an equal share, or one that several ranks in a row hold.

    Raises ValueError where they cannot be shared so.
    """
    ends = sorted((part.num_heads, tp_size))
    if ends[0] < 1 or ends[1] % ends[0]:
        raise ValueError(
            f"{part.plane}: expected a number of heads that {tp_size} ranks share equally, got "
            f"{part.num_heads}"
        )
    lo = tp_rank * part.num_heads // tp_size
    return lo, lo + max(1, part.num_heads // tp_size)


def state_regions(
    whole: Region, parts: Sequence[StatePart], tp_rank: int, tp_size: int
) -> tuple[Region, ...]:
    """A region for each part, one behind the other along the channels of ``whole``: of all of a
    rank's channels, ``channel_nbytes`` each, with any stride.

    Raises ValueError for heads that cannot be shared, and for other channels than ``whole`` has.
    """
    found: list[Region] = []
    offset, stride = whole.offset, whole.stride_channel
    for part in parts:
        lo, hi = part_heads(part, tp_rank, tp_size)
        found.append(
            replace(
                whole,
                plane=part.plane,
                offset=offset,
                head_lo=lo,
                head_hi=hi,
                inner_nbytes=part.num_channels * whole.channel_nbytes,
                stride_head=part.num_channels * stride,
            )
        )
        offset += (hi - lo) * part.num_channels * stride
    num_channels = (offset - whole.offset) // stride
    if num_channels * whole.channel_nbytes != whole.inner_nbytes:
        planes = " and ".join(part.plane for part in parts)
        raise ValueError(
            f"{whole.layer}: expected {num_channels} channels of {planes} on each of "
            f"{tp_size} ranks, got {whole.inner_nbytes // whole.channel_nbytes}"
        )
    return tuple(found)
