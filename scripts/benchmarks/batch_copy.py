"""cudaMemcpyBatchAsync with its arrays made beforehand, as a program in C would call it.

cuda-bindings has it, too, but turns lists of Python's numbers into arrays in every call, which for
the 131,072 pieces of 32k tokens takes longer than the copy. The symbol is that of the runtime which
torch has loaded; CUDA 13's signature, without the index of what failed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

SOURCE_IN_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream

_Int64 = NDArray[np.int64]


class BatchCopyUnavailable(RuntimeError):
    """This machine does not have the call; the message says why."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """cudaMemcpyAttributes. The hints are for managed memory only."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", _Location),
        ("sink_hint", _Location),
        ("flags", ctypes.c_uint),
    )


def batch_copy(
    source_addresses: _Int64,
    sink_addresses: _Int64,
    piece_nbytes: int,
    stream: torch.cuda.Stream | None = None,
) -> Callable[[], None]:
    """What copies all pieces, on that stream or a new one, in one call. Raises
    BatchCopyUnavailable.
    """
    call = _symbol()
    stream = stream or torch.cuda.Stream()
    count = source_addresses.size
    sources = np.ascontiguousarray(source_addresses, np.uint64)
    sinks = np.ascontiguousarray(sink_addresses, np.uint64)
    sizes = np.full(count, piece_nbytes, np.uint64)
    attributes = (_Attributes * 1)(_Attributes(source_access_order=SOURCE_IN_STREAM_ORDER))
    first_of_attributes = (ctypes.c_size_t * 1)(0)
    arguments = (
        *(array.ctypes.data_as(ctypes.c_void_p) for array in (sinks, sources, sizes)),
        ctypes.c_size_t(count),
        attributes,
        first_of_attributes,
        ctypes.c_size_t(1),
        ctypes.c_void_p(stream.cuda_stream),
    )
    kept = (sources, sinks, sizes, stream)  # the arguments point into them

    def run() -> None:
        code = call(*arguments)
        if code:
            raise BatchCopyUnavailable(
                f"cudaMemcpyBatchAsync: expected 0 for {kept[0].size} pieces, got error {code}"
            )

    return run


def _symbol() -> ctypes._NamedFuncPointer:
    major = (torch.version.cuda or "").partition(".")[0]
    if major != "13":
        raise BatchCopyUnavailable(
            f"cudaMemcpyBatchAsync: expected CUDA 13, got {torch.version.cuda or 'none'}"
        )
    try:
        call = ctypes.CDLL("libcudart.so.13").cudaMemcpyBatchAsync
    except (OSError, AttributeError) as exc:
        raise BatchCopyUnavailable(f"cudaMemcpyBatchAsync: {exc}") from exc
    call.restype = ctypes.c_int
    return call
