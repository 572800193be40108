"""What a benchmark does alike on a GPU and on a CPU: memory, waiting, clearing caches, timing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvxfer.tensors.shared_memory import SharedPool, plain_info
from kvxfer.transports.base import LocalMemory

FLUSH_NBYTES = 256 << 20  # more than the caches of a GPU hold
CPU_FLUSH_NBYTES = 8 << 20
AHEAD_CYCLES = 1_000_000


@dataclass(frozen=True, slots=True)
class Devices:
    """Where both sides lie, and the wire that reads between them."""

    source: str
    sink: str
    wire: str

    @property
    def where(self) -> str:
        """In a word."""
        if self.sink == "cpu":
            return "cpu"
        return "local" if self.source == self.sink else "peer"


def devices_for(kind: str, wire: str | None = None) -> Devices:
    """``cuda``: one GPU for each side, the same where there is only one; or ``cpu``.
    ``wire``: where it is not the direct one.

    Raises SystemExit without a GPU.
    """
    if kind == "cpu":
        return Devices("cpu", "cpu", wire or "shm")
    if not torch.cuda.is_available():
        raise SystemExit("benchmark: expected a CUDA device, found none; --device cpu needs none")
    source = "cuda:1" if torch.cuda.device_count() > 1 else "cuda:0"
    return Devices(source, "cuda:0", wire or "cuda_ipc")


class Memory:
    """``nbytes`` on a device, that another process can map."""

    def __init__(self, device: str, nbytes: int) -> None:
        self.device = torch.device(device)
        self._pool: SharedPool | None = None
        if self.device.type == "cpu":
            self._pool = SharedPool.create(nbytes)
            self.tensor = self._pool.tensor
            info = self._pool.info
        else:
            torch.cuda.set_device(self.device)
            self.tensor = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            info = plain_info(self.tensor)
        self.local = LocalMemory((self.tensor,), (info,))

    def fill_random(self, seed: int) -> None:
        """With bytes that differ between any two tokens."""
        if self.device.type == "cpu":
            rng = np.random.default_rng(seed)
            self.tensor.numpy()[:] = rng.integers(0, 256, self.tensor.numel(), dtype=np.uint8)
            return
        generator = torch.Generator(self.device).manual_seed(seed)
        for part in self.tensor.split(1 << 28):
            part.random_(0, 256, generator=generator)
        finish(self.device)

    def close(self) -> None:
        """Give it back; views must be gone."""
        del self.tensor, self.local
        if self._pool is not None:
            self._pool.close()


def finish(*devices: torch.device) -> None:
    """Wait for all that these devices have to do."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


class Flush:
    """Clears a device's caches, and wakes it up, before something is timed."""

    def __init__(self, device: torch.device) -> None:
        nbytes = CPU_FLUSH_NBYTES if device.type == "cpu" else FLUSH_NBYTES
        self._scratch = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def __call__(self) -> None:
        self._scratch.zero_()
        finish(self._scratch.device)


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


def stream_ms(stream: torch.cuda.Stream, flush: Tensor, work: Callable[[], None]) -> float:
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
        """Once through."""
        clock = StreamClock(self._matrix.device)
        clock.mark()
        for _ in range(self.repeats):
            torch.mm(self._batch, self._matrix)
        clock.mark()
        return clock.elapsed_ms()
