"""A load without its connector: the same launches and messages, by loops that know beforehand what
comes. It takes as long as the calls of CUDA and UCX do from Python, which is the limit of a wire
whose IO thread is Python. Of ``cuda_ipc`` it is one copy's launches; of ``ucx`` see ``least_ucx``.

No thread sleeps or is woken: all look on without a pause, though on processors that did something
else since the last run, as before a load.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kvxfer.tensors.device_copy import DeviceCopier, bind_copy
from kvxfer.tensors.device_launch import Event, Stream
from kvxfer.tensors.device_memory import DeviceMemory
from scripts.benchmarks.devices import Devices, Memory
from scripts.benchmarks.members import Timing, timed
from scripts.benchmarks.plain_ways import PlainWays
from scripts.benchmarks.pools import Request
from scripts.benchmarks.workers import Worker

LAUNCH = "launch"


class LeastLaunch:
    """Of ``cuda_ipc``, by a process with :class:`LaunchWays`."""

    def __init__(self, worker: Worker) -> None:
        self.members = (worker, worker)

    def run(self, request: Request) -> Timing:
        """One copy."""
        return self.members[0].call(Timing, "run", LAUNCH, request)

    def close(self) -> None:
        """Nothing: the process is another's."""


class LaunchWays(PlainWays):
    """The plain ways and a copy by the kernel, in a process that sees both GPUs."""

    def __init__(self, devices: Devices, nbytes: int) -> None:
        super().__init__(devices, nbytes)
        self._copier = DeviceCopier(self._sink.device)
        self._stream = stream_on(self._sink.device)
        self._launches: dict[Request, Callable[[], Event | None]] = {}
        self._event: Event | None = None

    def run(self, way: str, request: Request) -> Timing:
        """LAUNCH, or a plain one."""
        if way != LAUNCH:
            return super().run(way, request)
        launch = self._launches.get(request)
        if launch is None:
            launch = self._launches[request] = self._launch_of(request)
        self.flush()
        return timed(partial(self._begin, launch), self._look_on)

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
