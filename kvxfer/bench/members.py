"""What every process of a transfer benchmark has and can do: hold the memory of its sides, poison
it, say what is in it, and run a way of moving a request.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from kvxfer.bench.core import Timing
from kvxfer.bench.frame import option
from kvxfer.bench.pools import POISON, Request
from kvxfer.tensors.shared_memory import make_pool
from kvxfer.transports.base import LocalMemory

SOURCE, SINK = SIDES = ("source", "sink")
FLUSH_NBYTES = 256 << 20  # more than the caches of a GPU hold
_FLUSH_NBYTES = {"cpu": 8 << 20, "cuda": FLUSH_NBYTES}
_libc = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class Devices:
    """Where both sides lie, and the wire that reads between them."""

    source: str
    sink: str
    wire: str

    @property
    def by_side(self) -> dict[str, str]:
        return {SOURCE: self.source, SINK: self.sink}

    @property
    def where(self) -> str:
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
        raise SystemExit("bench: expected a CUDA device, found none; --device cpu needs none")
    source = "cuda:1" if torch.cuda.device_count() > 1 else "cuda:0"
    return Devices(source, "cuda:0", wire or "cuda_ipc")


GPU_OPTIONS = (
    option("--device", "cuda", choices=("cuda", "cpu"), help="where KV lies (default cuda)"),
    option("--launch-programs", type=int, help="thread blocks of a pull; else the default"),
)


def gpu_missing(options: argparse.Namespace) -> str:
    """Why a benchmark of GPUs cannot run, or nothing."""
    if getattr(options, "device", "cuda") == "cpu" or torch.cuda.is_available():
        return ""
    return "expected a CUDA device, found none"


class Memory:
    """``nbytes`` on a device, that another process can map."""

    def __init__(self, device: str, nbytes: int) -> None:
        self.device = torch.device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._pool = make_pool(self.device, nbytes)
        self.tensor = self._pool.tensor
        self.local = LocalMemory((self.tensor,), (self._pool.info,))

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
        self._pool.close()
        del self._pool


def finish(*devices: torch.device) -> None:
    """Wait for all that these devices have to do."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


@dataclass(frozen=True, slots=True)
class Usage:
    """``rss_nbytes``: resident memory, all of it."""

    rss_nbytes: int
    num_threads: int
    num_descriptors: int


def usage_now() -> Usage:
    """Of this process, after everything that can be given back was."""
    gc.collect()
    if hasattr(_libc, "malloc_trim"):  # glibc keeps what was freed, more or less of it by chance
        _libc.malloc_trim(0)
    with open("/proc/self/statm", "rb") as file:
        num_resident = int(file.read().split()[1])
    return Usage(
        rss_nbytes=num_resident * os.sysconf("SC_PAGE_SIZE"),
        num_threads=len(os.listdir("/proc/self/task")),
        num_descriptors=len(os.listdir("/proc/self/fd")) - 1,  # one is the listing's
    )


class Member:
    """``nbytes`` of memory for each of this process's sides."""

    def __init__(self, sides: Mapping[str, str], nbytes: int) -> None:
        torch.set_num_threads(1)
        self.memories = {side: Memory(device, nbytes) for side, device in sides.items()}
        if SOURCE in self.memories:
            self.memories[SOURCE].fill_random(seed=5)
        self._scratches = [
            torch.empty(_FLUSH_NBYTES[memory.device.type], dtype=torch.uint8, device=memory.device)
            for memory in self.memories.values()
        ]

    def poison(self) -> None:
        sink = self.memories[SINK]
        sink.tensor.fill_(POISON)
        finish(sink.device)

    def digests(self, side: str, request: Request, tokens: list[int]) -> list[bytes]:
        """Of these tokens, on that side."""
        pool, ids = request.side(side == SOURCE)
        return pool.token_digests(self.memories[side].tensor, ids, tokens)

    def is_untouched_beside(self, request: Request) -> bool:
        """Whether the sink holds nothing but the request."""
        return request.sink.is_untouched_beside(self.memories[SINK].tensor, request.sink_ids)

    def usage(self) -> Usage:
        return usage_now()

    def flush(self) -> None:
        """Clear the caches of the devices, and wake them up, before something is timed."""
        for scratch in self._scratches:
            scratch.zero_()
            finish(scratch.device)

    def run(self, way: str, request: Request) -> Timing:
        """Move the request once; only those whose turn it can be do."""
        raise NotImplementedError(f"{way}: the other side begins")

    def close(self) -> None:
        for memory in self.memories.values():
            memory.close()
