"""What every process of a transfer benchmark can do: hold a side's pools, poison them, say what is
in them, and run a way of moving a request.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from scripts.benchmarks.devices import Devices, Flush, Memory, finish
from scripts.benchmarks.pools import POISON, Request

SOURCE, SINK = "source", "sink"


@dataclass(frozen=True, slots=True)
class Timing:
    """One run: until the last byte was in place, until the call that asked for it returned, and the
    processor time of the thread that asked and waited.
    """

    total_s: float
    post_s: float
    cpu_s: float


class Member(ABC):
    """``nbytes`` of memory for each of this process's sides."""

    def __init__(self, sides: Mapping[str, str], nbytes: int) -> None:
        torch.set_num_threads(1)
        self.memories = {side: Memory(device, nbytes) for side, device in sides.items()}
        if SOURCE in self.memories:
            self.memories[SOURCE].fill_random(seed=5)
        self._flushes = [Flush(memory.device) for memory in self.memories.values()]

    def poison(self) -> None:
        """Forget what the sink holds."""
        sink = self.memories[SINK]
        sink.tensor.fill_(POISON)
        finish(sink.device)

    def digests(self, side: str, request: Request, tokens: list[int]) -> list[bytes]:
        """Of these tokens, on that side."""
        pool, ids = (
            (request.source, request.source_ids)
            if side == SOURCE
            else (request.sink, request.sink_ids)
        )
        return pool.token_digests(self.memories[side].tensor, ids, tokens)

    def is_untouched_beside(self, request: Request) -> bool:
        """Whether the sink holds nothing but the request."""
        return request.sink.is_untouched_beside(self.memories[SINK].tensor, request.sink_ids)

    def flush(self) -> None:
        """Clear the caches of this process's devices."""
        for flush in self._flushes:
            flush()

    @abstractmethod
    def run(self, way: str, request: Request) -> Timing:
        """Move the request once."""

    def close(self) -> None:
        """Give the memory back."""
        for memory in self.memories.values():
            memory.close()


def timed(post: Callable[[], object], wait: Callable[[], object]) -> Timing:
    """``post`` asks for it, ``wait`` returns when the last byte is in place."""
    cpu_s, started_s = time.thread_time(), time.perf_counter()
    post()
    posted_s = time.perf_counter()
    wait()
    ended_s = time.perf_counter()
    return Timing(ended_s - started_s, posted_s - started_s, time.thread_time() - cpu_s)


def sides_of(devices: Devices) -> dict[str, str]:
    """Both, for a process that sees both GPUs."""
    return {SOURCE: devices.source, SINK: devices.sink}
