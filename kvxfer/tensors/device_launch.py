"""Putting one launch on a stream: its numbers go there, the kernel, and an event behind them.

The numbers are written in a ring of pinned memory, and not touched before the work that reads them
is over.

A binary is compiled, loaded and launched by Triton the first time. From then on the driver launches
it: Triton binds arguments anew at each launch, which takes 40 us of a warm processor and 100 of a
cold one where the driver takes 5, and lets go of the GIL (see :mod:`~kvxfer.tensors.cuda_driver`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, Self

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvxfer.kernels.cast_work import CastLaunch
from kvxfer.kernels.kv_digest import DigestLaunch, launch_digest
from kvxfer.kernels.strided_cast import launch_cast
from kvxfer.kernels.strided_copy import launch_copy
from kvxfer.kernels.strided_work import Launch
from kvxfer.tensors.cuda_driver import DriverEvents, PointerArguments, StreamEvent, driver
from kvxfer.tensors.device_memory import make_scratch
from kvxfer.tensors.strided_index import WORD_NBYTES

Stream = torch.cuda.Stream | None
AnyLaunch = Launch | CastLaunch | DigestLaunch


class Stamp(StreamEvent, Protocol):
    """An event whose moment is known, once it is over."""

    def since_s(self, first: Self) -> float:
        """After another stamp of the same launcher, by the device's clock."""


class HostEvent:
    """Of work that the host itself has done: over from the beginning."""

    cuda_event = 0

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return

    def wait(self, stream: torch.cuda.Stream) -> None:
        return

    def since_s(self, first: Self) -> float:
        return self._at_s - first._at_s


class Slot(msgspec.Struct, frozen=True):
    """``host`` is written, and all of it copied to the GPU; where both are, as words, tensors and
    addresses.
    """

    at: int
    host: NDArray[np.int64]
    host_address: int
    device_address: int
    _ring: JobRing
    _num_used: int

    @property
    def pinned(self) -> Tensor:
        """``host`` as PyTorch sees it."""
        return self._ring.pinned[self.at : self.at + self.host.size]

    @property
    def device(self) -> Tensor:
        """Its twin on the GPU."""
        return self._ring.device[self.at : self.at + self.host.size]


class JobRing:
    """A ring of int64 words in pinned memory and its twin on the GPU. For one thread.

    A slot is used again only after the event that was recorded behind its work. The host waits for
    one only where the whole ring is in use; ``num_waits`` counts that.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        # Of each slot, the oldest first: its words and the event behind its work
        self._in_use: deque[tuple[int, StreamEvent]] = deque()
        self.num_words = nbytes // WORD_NBYTES
        self.num_waits = 0
        on_gpu = device.type == "cuda"
        self.pinned = torch.empty(self.num_words, dtype=torch.int64, pin_memory=on_gpu)
        self.device = make_scratch(self.num_words * WORD_NBYTES, device).view(torch.int64)
        self._host = self.pinned.numpy()
        self._addresses = self.pinned.data_ptr(), self.device.data_ptr()
        self._head = 0
        self._num_used = 0

    def take(self, num_words: int) -> Slot:
        """:meth:`close` it before the next is taken. ValueError for more words than there are."""
        if not 0 < num_words <= self.num_words:
            raise ValueError(f"slot: expected 1 to {self.num_words} words, got {num_words}")
        left = self.num_words - self._head
        # The words at the ring's end are used up, too, where they are too few
        at, used = (self._head, num_words) if num_words <= left else (0, left + num_words)
        while self._num_used and self._num_used + used > self.num_words:
            _, event = self._in_use[0]
            if not event.query():
                self.num_waits += 1
                event.synchronize()
            self._free_oldest()
        if not self._num_used:  # as good as new
            at, used = 0, num_words
        host_address, device_address = (each + at * WORD_NBYTES for each in self._addresses)
        words = self._host[at : at + num_words]
        return Slot(at, words, host_address, device_address, self, used)

    def has_room(self) -> bool:
        """Whether a slot of a quarter of the ring can be taken without waiting."""
        while self._num_used > self.num_words // 2 and self._in_use[0][1].query():
            self._free_oldest()
        return self._num_used <= self.num_words // 2

    def _free_oldest(self) -> None:
        num_used, _ = self._in_use.popleft()
        self._num_used -= num_used

    def close(self, slot: Slot, event: StreamEvent) -> None:
        """All work with the slot is on a stream, and the event behind it."""
        self._in_use.append((slot._num_used, event))
        self._num_used += slot._num_used
        self._head = (slot.at + slot.host.size) % self.num_words

    def __del__(self) -> None:
        """Others get the memory of both: no work may use it any more."""
        for _, event in self._in_use:
            with suppress(RuntimeError):  # on a GPU that has failed nothing runs
                event.synchronize()


class HostLauncher:
    """Triton's interpreter (TRITON_INTERPRET=1): all is over when a call returns."""

    def launch(self, slot: Slot, sizes: Sequence[int], launch: AnyLaunch, stream: Stream) -> None:
        _launch_by_triton(slot, sizes, launch)

    def read_back(self, slot: Slot, word_lo: int, stream: Stream) -> None:
        slot.pinned[word_lo:] = slot.device[word_lo:]

    def record(self, stream: Stream) -> StreamEvent:
        return HostEvent()

    def stamp(self, stream: Stream) -> Stamp:
        return HostEvent()

    def wait(self, stream: Stream, event: StreamEvent) -> None:
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
    """Of one GPU, for one thread. All calls raise RuntimeError where it has failed. ``num_arrays``:
    of each kernel that it launches.
    """

    def __init__(self, device: torch.device, num_arrays: int = 5) -> None:
        """Raises RuntimeError where there is no CUDA driver."""
        self._device = device
        self._driver = driver()
        self._current = self._driver.current(device)
        self._arguments = PointerArguments(num_arrays)
        self._events = DriverEvents(self._driver, self._current)
        self._stamps = DriverEvents(self._driver, self._current, are_timed=True)
        self._stream: tuple[Stream, int] | None = None

    def launch(self, slot: Slot, sizes: Sequence[int], launch: AnyLaunch, stream: Stream) -> None:
        """Send the slot, which has the kernel's arrays one behind the other (``sizes`` in words),
        and launch behind it: one copy of a few KiB, one launch.
        """
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

    def read_back(self, slot: Slot, word_lo: int, stream: Stream) -> None:
        """The slot's words from there on as the work on the stream leaves them, once it is over."""
        offset = word_lo * WORD_NBYTES
        nbytes = slot.host.size * WORD_NBYTES - offset
        with self._current:
            self._driver.call(
                "cuMemcpyDtoHAsync_v2",
                *(slot.host_address + offset, slot.device_address + offset, nbytes),
                self._handle(stream),
            )

    def record(self, stream: Stream) -> StreamEvent:
        return self._events.record(self._handle(stream))

    def stamp(self, stream: Stream) -> Stamp:
        return self._stamps.record(self._handle(stream))

    def wait(self, stream: Stream, event: StreamEvent) -> None:
        self._events.wait(self._handle(stream), event)

    def _handle(self, stream: Stream) -> int:
        """The driver's. PyTorch takes 5 us of a cold processor to say, and most have one stream."""
        known = self._stream
        if known is None or known[0] is not stream:
            assert stream is not None
            known = self._stream = (stream, stream.cuda_stream)
        return known[1]


def _launch_by_triton(slot: Slot, sizes: Sequence[int], launch: AnyLaunch) -> object:
    """On PyTorch's current stream. Returns what Triton has compiled."""
    slot.device.copy_(slot.pinned, non_blocking=True)
    arrays = torch.split(slot.device, list(sizes))
    if isinstance(launch, DigestLaunch):
        return launch_digest(arrays, launch)
    numbers, source_table, sink_table, given_ids, taken_ids = arrays
    if isinstance(launch, CastLaunch):
        return launch_cast(numbers, source_table, sink_table, given_ids, taken_ids, launch)
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
