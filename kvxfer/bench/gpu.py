"""What benchmarks time on a GPU and do on it beside kvxfer's own: a clock of its streams, a decode
step's stand-in, and cudaMemcpyBatchAsync.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

AHEAD_CYCLES = 1_000_000
_SOURCE_IN_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream

_Int64 = NDArray[np.int64]


class StreamClock:
    """ms on a GPU between two points of its current stream; on a CPU the wall clock's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._moments_s: list[float] = []

    def mark(self) -> None:
        """Behind everything launched so far; called twice."""
        if self._device.type == "cpu":
            self._moments_s.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def elapsed_ms(self) -> float:
        """Waits for the second point."""
        if self._device.type == "cpu":
            first_s, last_s = self._moments_s
            return (last_s - first_s) * 1e3
        first, last = self._events
        last.synchronize()
        return float(first.elapsed_time(last))


def stream_ms(stream: torch.cuda.Stream, flush: Tensor, work: Callable[[], object]) -> float:
    """ms of what ``work`` launches on the stream. The host is ahead of it, with all launches made
    before the first runs, unless they are hundreds.
    """
    with torch.cuda.stream(stream):
        flush.zero_()
        torch.cuda._sleep(AHEAD_CYCLES)
        clock = StreamClock(flush.device)
        clock.mark()
        work()
        clock.mark()
        return clock.elapsed_ms()


class MatrixLoop:
    """A decode step's stand-in on the current stream: a batch of rows times a matrix, repeatedly.

    Few rows read the matrix from memory, many rows compute.
    """

    def __init__(self, device: torch.device, rows: int, columns: int = 8192) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._matrix = torch.randn(columns, columns, device=device, dtype=dtype)
        self._batch = torch.randn(rows, columns, device=device, dtype=dtype)
        # About 40 ms on an H200: 40 us to read the matrix, 700 to compute with 4096 rows
        self.repeats = (1000 if rows < 1024 else 60) if device.type == "cuda" else 2
        kind = str(dtype).removeprefix("torch.")
        self.name = f"[{rows}, {columns}] x [{columns}, {columns}] {kind}, {self.repeats} times"

    def run_ms(self) -> float:
        clock = StreamClock(self._matrix.device)
        clock.mark()
        for _ in range(self.repeats):
            torch.mm(self._batch, self._matrix)
        clock.mark()
        return clock.elapsed_ms()


# ------------------------------------------------------------------ cudaMemcpyBatchAsync


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
    """What copies all pieces, on that stream or a new one, in one call, its arrays made here, as a
    program in C would do it. Raises BatchCopyUnavailable.

    cuda-bindings has the call too, but turns lists of Python's numbers into arrays every time,
    which for the 131,072 pieces of 32k tokens takes longer than the copy. This symbol is that of
    the runtime which torch has loaded; CUDA 13's signature, without the index of what failed.
    """
    call = _symbol()
    stream = stream or torch.cuda.Stream()
    count = source_addresses.size
    sources = np.ascontiguousarray(source_addresses, np.uint64)
    sinks = np.ascontiguousarray(sink_addresses, np.uint64)
    sizes = np.full(count, piece_nbytes, np.uint64)
    attributes = (_Attributes * 1)(_Attributes(source_access_order=_SOURCE_IN_STREAM_ORDER))
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
