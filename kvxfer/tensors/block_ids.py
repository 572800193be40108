"""Block ids as index tensors, checked on the host before anything is read or written; and caches as
integers, so that elements are moved as bits whatever their dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BlockIds = Sequence[int] | Tensor

_INTEGER_OF_NBYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(cache: Tensor) -> Tensor:
    """The same memory as integers of the element's width: NaN patterns stay as they are, and torch
    has every operation for them (not so for float8).
    """
    return cache.view(_INTEGER_OF_NBYTES[cache.dtype.itemsize])


def id_tensor(name: str, block_ids: BlockIds, device: torch.device | str) -> Tensor:
    """1-D int64 ids on ``device``.

    Raises:
        TypeError: a tensor of another kind than integers.
        ValueError: a tensor that is not 1-D.
    """
    if isinstance(block_ids, Tensor):
        if block_ids.is_floating_point() or block_ids.is_complex() or block_ids.dtype == torch.bool:
            raise TypeError(f"{name}: expected an integer dtype, got {block_ids.dtype}")
        if block_ids.ndim != 1:
            raise ValueError(f"{name}: expected 1 dimension, got shape {tuple(block_ids.shape)}")
        return block_ids.to(device=device, dtype=torch.int64)
    return torch.tensor(list(block_ids), dtype=torch.int64, device=device)


def check_ids(name: str, block_ids: BlockIds, num_blocks: int, *, unique: bool) -> None:
    """Raise ValueError for an id outside [0, num_blocks) or, where asked, one that comes twice.

    Ids in GPU memory are read back for it, which waits for the device; ids in a list are not.
    """
    ids = id_tensor(name, block_ids, "cpu")
    outside = ids[(ids < 0) | (ids >= num_blocks)]
    if outside.numel():
        raise ValueError(f"{name}: expected ids in [0, {num_blocks}), got {int(outside[0])}")
    if unique and ids.numel() > 1:
        ordered = ids.sort().values
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if twice.numel():
            raise ValueError(f"{name}: expected every block once, got {int(twice[0])} twice")
