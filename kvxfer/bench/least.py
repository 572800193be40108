"""A load without its connector: the same launches and messages, by loops that know beforehand what
comes. It takes as long as the calls of CUDA and UCX do from Python, which is the limit of a wire
whose IO thread is Python. Of ``cuda_ipc`` it is one copy's launches; of ``ucx`` see ``ucx_loop``.

No thread sleeps or is woken: all look on without a pause, though on processors that did something
else since the last run, as before a load.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvxfer.bench.core import Timing, timed
from kvxfer.bench.members import Devices, Memory
from kvxfer.bench.plain_ways import PlainWays
from kvxfer.bench.pools import Ids, Pool, Request
from kvxfer.tensors.device_copy import DeviceCopier, bind_copy, bind_side
from kvxfer.tensors.device_launch import Event, Stream
from kvxfer.tensors.device_memory import DeviceMemory
from kvxfer.transfer.plan import Chunk, DenseOrder

LEAST = "least"


class LaunchWays(PlainWays):
    """The plain ways and a copy by the kernel, LEAST."""

    def __init__(self, devices: Devices, nbytes: int) -> None:
        super().__init__(devices, nbytes)
        self._copier = DeviceCopier(self._sink.device)
        self._stream = stream_on(self._sink.device)
        self._launches: dict[Request, Callable[[], Event | None]] = {}
        self._event: Event | None = None

    def run(self, way: str, request: Request) -> Timing:
        if way != LEAST:
            return super().run(way, request)
        if request not in self._launches:
            self._launches[request] = self._launch_of(request)
        launch = self._launches[request]
        self.flush()
        return timed(lambda: self._begin(launch), self._look_on)

    def _launch_of(self, request: Request) -> Callable[[], Event | None]:
        copy_class, _ = request.copy_class()
        bound = bind_copy(copy_class, [addressed(self._source)], [addressed(self._sink)])
        source_ids, sink_ids = request.source_ids, request.sink_ids
        span = (0, request.num_tokens)
        return lambda: (
            self._copier.copy(bound, source_ids, sink_ids, span, stream=self._stream).event
        )

    def _begin(self, launch: Callable[[], Event | None]) -> None:
        self._event = launch()

    def _look_on(self) -> None:
        while self._event is not None and not self._event.query():
            pass


def stream_on(device: torch.device) -> Stream:
    """A new one; on a CPU none is needed."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def addressed(memory: Memory) -> DeviceMemory:
    """As a kernel is told of it."""
    return DeviceMemory(memory.tensor.data_ptr(), memory.tensor.numel())


class Packer:
    """Chunks of a side's pool, by the kernel."""

    def __init__(self, memory: Memory, pool: Pool) -> None:
        self._bound = bind_side(pool.side(), [addressed(memory)])
        self._copier = DeviceCopier(memory.device)
        self._stream = stream_on(memory.device)

    def pack(self, ids: Ids, order: DenseOrder, chunk: Chunk, out: Tensor) -> Event | None:
        """Pool to chunk; the event that it is done."""
        arguments = (self._bound, ids, order, *_span(chunk), out)
        return self._copier.pack(*arguments, stream=self._stream).event

    def unpack(self, ids: Ids, chunk: Chunk, dense: Tensor) -> Event | None:
        """Chunk to pool; the event that it is done."""
        arguments = (self._bound, ids, *_span(chunk), dense)
        return self._copier.unpack(*arguments, stream=self._stream).event


def _span(chunk: Chunk) -> tuple[tuple[int, int], tuple[int, int]]:
    return (chunk.region_lo, chunk.region_hi), (chunk.token_lo, chunk.token_hi)
