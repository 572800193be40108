"""Cast elements of a cache on the CPU: from one type and scale to another, by way of float32.

    value = float32(element) * scale          element = round(value / scale)

Rounding is to nearest, ties to even. Types of 8 bits saturate at their largest number, infinities
too, as the engines' own quantisation does; NaN stays NaN. A scale of each token is made as vLLM
makes it: the largest value of the head and token over the type's largest number, at least 1e-6; it
divides by its reciprocal. The kernel (``kernels/strided_cast.py``) makes the same bits.

PyTorch shares tensors of more than ``PIECE_ELEMENTS`` with its other threads, which the engine has.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]

PIECE_ELEMENTS = 1 << 15
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
"""Of the types that saturate; the others are IEEE's, and overflow to infinity."""
LEAST_TOKEN_SCALE = 1e-6
_LARGEST_FLOAT = torch.finfo(torch.float32).max


def dequantised(raw: Bytes, dtype: str, scales: Tensor | None) -> Tensor:
    """The values [tokens, heads, channels], float32, of elements in bytes [tokens, heads, bytes].
    ``scales``: of each head, or [tokens, heads]; None: 1.
    """
    values = torch.from_numpy(raw).view(getattr(torch, dtype)).to(torch.float32, copy=True)
    return values if scales is None else values.mul_(scales.unsqueeze(-1))


def quantised(
    values: Tensor, dtype: str, scales: Tensor | None, *, by_token: bool = False
) -> Bytes:
    """The elements of such values in bytes; ``values`` are used up. ``by_token``: these are
    :func:`token_scales`.
    """
    if scales is not None:
        scales = scales.unsqueeze(-1)
        values = values.mul_(scales.reciprocal()) if by_token else values.div_(scales)
    if (largest := LARGEST.get(dtype)) is not None:
        values.clamp_(-largest, largest)
    elements: Bytes = values.to(getattr(torch, dtype)).view(torch.uint8).numpy()
    return elements


def token_scales(values: Tensor, dtype: str) -> Tensor:
    """[tokens, heads] of values [tokens, heads, channels]; NaN does not count."""
    most = values.abs().nan_to_num_(0.0, _LARGEST_FLOAT).amax(dim=-1)
    return most.div_(LARGEST.get(dtype, 1.0)).clamp_(min=LEAST_TOKEN_SCALE)
