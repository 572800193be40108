"""Block ids as index tensors, checked on the host before anything is read or written; and caches as
integers, so that elements are moved as bits whatever their dtype.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BlockIds = Sequence[int] | NDArray[np.integer] | Tensor

_INTEGER_OF_NBYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(cache: Tensor) -> Tensor:
    """The same memory as integers of the element's width: NaN patterns stay as they are, and torch
    has every operation for them (not so for float8).
    """
    return cache.view(_INTEGER_OF_NBYTES[cache.dtype.itemsize])


def id_tensor(name: str, block_ids: BlockIds, device: torch.device | str) -> Tensor:
    """1-D int64 ids on ``device``. Raises TypeError for ids that are no integers (floats,
    booleans), ValueError for other dimensions or an id that int64 does not hold.
    """
    if not isinstance(block_ids, Tensor):
        return torch.from_numpy(id_array(name, block_ids)).to(device)
    if block_ids.is_floating_point() or block_ids.is_complex() or block_ids.dtype == torch.bool:
        raise TypeError(f"{name}: expected an integer dtype, got {block_ids.dtype}")
    _check_shape(name, block_ids)
    if block_ids.dtype == torch.uint64:
        return id_tensor(name, block_ids.tolist(), device)  # may be too large for int64
    return block_ids.to(device=device, dtype=torch.int64)


def id_array(name: str, block_ids: BlockIds) -> NDArray[np.int64]:
    """1-D int64 ids on the host. Raises as :func:`id_tensor`."""
    if isinstance(block_ids, Tensor):
        ids: NDArray[np.int64] = id_tensor(name, block_ids, "cpu").numpy()
        return ids
    if isinstance(block_ids, np.ndarray):
        _check_shape(name, block_ids)
    given = list(block_ids)
    if bool not in map(type, given):
        try:
            return np.array(array("q", given), dtype=np.int64)
        except OverflowError as error:
            raise ValueError(f"{name}: expected ids below 2**63, got {given!r:.80}") from error
        except TypeError:
            pass  # said below
    raise TypeError(f"{name}: expected integers, got {given!r:.80}; pass block ids")


def _check_shape(name: str, block_ids: Tensor | NDArray[np.integer]) -> None:
    if block_ids.ndim != 1:
        raise ValueError(f"{name}: expected 1 dimension, got shape {tuple(block_ids.shape)}")


def check_ids(name: str, block_ids: BlockIds, num_blocks: int, *, unique: bool) -> None:
    """Raise ValueError for an id outside [0, num_blocks) or, where asked, one that comes twice;
    and as :func:`id_tensor`.

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
