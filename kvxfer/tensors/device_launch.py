"""Putting one launch on a stream: its numbers go there, the kernel, and an event behind them.

A binary is compiled, loaded and launched by Triton the first time. From then on the driver launches
it: Triton binds arguments anew at each launch, which takes 40 us of a warm processor and 100 of a
cold one where the driver takes 5, and lets go of the GIL (see :mod:`~kvxfer.tensors.cuda_driver`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch

from kvxfer.kernels.strided_copy import launch_copy
from kvxfer.kernels.strided_work import Launch
from kvxfer.tensors.cuda_driver import DriverEvents, PointerArguments, driver
from kvxfer.tensors.job_ring import WORD_NBYTES, Event, HostEvent, Slot

Stream = torch.cuda.Stream | None


class Stamp(Event, Protocol):
    """An event whose moment is known, once it is over."""

    def since_s(self, first: Self) -> float:
        """After another stamp of the same launcher, by the device's clock."""


class HostStamp(HostEvent):
    """Of work that the host itself has done."""

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def since_s(self, first: Self) -> float:
        """After another one."""
        return self._at_s - first._at_s


class Launcher(Protocol):
    """Of one device, for one thread. Raises RuntimeError where the device has failed."""

    def launch(self, slot: Slot, sizes: Sequence[int], launch: Launch, stream: Stream) -> None:
        """Send the slot, which has the kernel's five arrays one behind the other (``sizes`` in
        words), and launch behind it.
        """

    def record(self, stream: Stream) -> Event:
        """An event behind all that was put on the stream."""

    def stamp(self, stream: Stream) -> Stamp:
        """The same, and the device notes when it comes there."""

    def wait(self, stream: Stream, event: torch.cuda.Event) -> None:
        """What is put on the stream from now on runs after PyTorch's event."""


def launcher_of(device: torch.device) -> Launcher:
    """Where there is no GPU: on the host, by Triton's interpreter."""
    return HostLauncher() if device.type == "cpu" else GpuLauncher(device)


class HostLauncher:
    """Triton's interpreter (TRITON_INTERPRET=1): all is over when a call returns."""

    def launch(self, slot: Slot, sizes: Sequence[int], launch: Launch, stream: Stream) -> None:
        _launch_by_triton(slot, sizes, launch)

    def record(self, stream: Stream) -> Event:
        return HostEvent()

    def stamp(self, stream: Stream) -> Stamp:
        return HostStamp()

    def wait(self, stream: Stream, event: torch.cuda.Event) -> None:
        event.synchronize()


@dataclass(frozen=True, slots=True)
class _Binary:
    """A compiled kernel that the driver can launch. ``compiled`` keeps it loaded."""

    compiled: object
    function: int
    num_threads: int
    shared_nbytes: int


_binaries: dict[tuple[int, tuple[object, ...]], _Binary | None] = {}
"""By GPU and binary, of this process; None: Triton has to launch it."""


class GpuLauncher:
    """One GPU's."""

    def __init__(self, device: torch.device) -> None:
        """Raises RuntimeError where there is no CUDA driver."""
        self._device = device
        self._driver = driver()
        self._current = self._driver.current(device)
        self._arguments = PointerArguments(5)
        self._events = DriverEvents(self._driver, self._current)
        self._stamps = DriverEvents(self._driver, self._current, are_timed=True)
        self._stream: tuple[Stream, int] | None = None

    def launch(self, slot: Slot, sizes: Sequence[int], launch: Launch, stream: Stream) -> None:
        """One copy of a few KiB, one launch."""
        key = (self._device.index or 0, launch.binary)
        binary = _binaries.get(key)
        if binary is None:
            with torch.cuda.stream(stream):
                compiled = _launch_by_triton(slot, sizes, launch)
            if key not in _binaries:
                _binaries[key] = _binary_of(compiled)
            return
        call, handle, address = self._driver.call, self._handle(stream), slot.device_address
        addresses = [address]
        for size in sizes[:-1]:
            address += size * WORD_NBYTES
            addresses.append(address)
        with self._current:
            call(
                "cuMemcpyHtoDAsync_v2",
                *(slot.device_address, slot.host_address, sum(sizes) * WORD_NBYTES, handle),
            )
            call(
                "cuLaunchKernel",
                *(binary.function, launch.num_programs, 1, 1),
                *(binary.num_threads, 1, 1, binary.shared_nbytes),
                *(handle, self._arguments.set(addresses), None),
            )

    def record(self, stream: Stream) -> Event:
        """Also of a stream on which nothing was put."""
        return self._events.record(self._handle(stream))

    def stamp(self, stream: Stream) -> Stamp:
        """On its stream, like any event."""
        return self._stamps.record(self._handle(stream))

    def wait(self, stream: Stream, event: torch.cuda.Event) -> None:
        waited: int = event.cuda_event
        if waited:  # else it was never recorded, and there is nothing to wait for
            with self._current:
                self._driver.call("cuStreamWaitEvent", self._handle(stream), waited, 0)

    def _handle(self, stream: Stream) -> int:
        """The driver's. PyTorch takes 5 us of a cold processor to say, and most have one stream."""
        known = self._stream
        if known is None or known[0] is not stream:
            assert stream is not None
            known = self._stream = (stream, stream.cuda_stream)
        return known[1]


def _launch_by_triton(slot: Slot, sizes: Sequence[int], launch: Launch) -> object:
    """On PyTorch's current stream. Returns what Triton has compiled."""
    slot.device.copy_(slot.pinned, non_blocking=True)
    numbers, source_table, sink_table, given_ids, taken_ids = torch.split(slot.device, list(sizes))
    return launch_copy(numbers, source_table, sink_table, given_ids, taken_ids, launch)


def _binary_of(compiled: object) -> _Binary | None:
    """None for what needs more than a plain launch, in whatever version of Triton."""
    function, metadata = (getattr(compiled, name) for name in ("function", "metadata"))
    plain = {
        "num_ctas": 1,
        "global_scratch_size": 0,
        "profile_scratch_size": 0,
        "launch_cooperative_grid": False,
        "launch_pdl": False,
    }
    has_more = any(getattr(metadata, name, value) != value for name, value in plain.items())
    if has_more or not isinstance(function, int):
        return None
    num_threads = metadata.num_warps * metadata.target.warp_size
    return _Binary(compiled, function, num_threads, metadata.shared)
