"""Several buffers out of one allocation: peers map the cache of a rank with one handle."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

BUFFER_ALIGNMENT_NBYTES = 4096
"""Every buffer of one allocation begins at a multiple of it, counted from the allocation's start:
a memory page of the host, and more than any kernel wants."""

# What torch itself gives on a CPU; any element type fits.
_BASE_ALIGNMENT_NBYTES = 64


def carve(
    allocator: Callable[[int], Tensor], device: torch.device, sizes: Sequence[int]
) -> list[Tensor]:
    """Flat int8 buffers of ``sizes`` bytes out of one ``allocator(nbytes)``.

    Raises ValueError for an allocation that is not flat uint8 on ``device``, too small or not
    aligned.
    """
    starts, nbytes = [], 0
    for size in sizes:
        start = -(-nbytes // BUFFER_ALIGNMENT_NBYTES) * BUFFER_ALIGNMENT_NBYTES
        starts.append(start)
        nbytes = start + size
    if not nbytes:
        return []
    memory = allocator(nbytes)
    if memory.dtype != torch.uint8 or memory.dim() != 1 or not memory.is_contiguous():
        raise ValueError(
            "allocator: expected a contiguous one-dimensional uint8 tensor, "
            f"got {memory.dtype} of shape {tuple(memory.shape)}"
        )
    if memory.numel() < nbytes:
        raise ValueError(f"allocator: expected at least {nbytes} bytes, got {memory.numel()}")
    if memory.device.type != device.type:
        raise ValueError(f"allocator: expected memory on {device}, got {memory.device}")
    if memory.data_ptr() % _BASE_ALIGNMENT_NBYTES:
        raise ValueError(
            f"allocator: expected memory aligned to {_BASE_ALIGNMENT_NBYTES} bytes, got "
            f"{memory.data_ptr():#x}"
        )
    memory = memory.view(torch.int8)
    return [memory[start : start + size] for start, size in zip(starts, sizes, strict=True)]
