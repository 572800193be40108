"""The short CUDA driver calls of a launch, made without releasing the GIL.

PyTorch, Triton and cuda-bindings release the GIL in every call. None of these calls waits, so no
thread gains by the release. Beside a thread that computes in Python, the caller then waits a switch
interval to get the GIL back: a copy of 0.06 ms was seen complete after 2.1 ms, ten such waits of
0.2 ms. Only :meth:`DriverEvent.synchronize` waits, and releases the GIL.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from contextlib import suppress
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from types import TracebackType
from typing import Any, Protocol, Self

import torch

_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_MEMORY_TYPE, _HOST = 2, 1  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_MEMORYTYPE_HOST
_BLOCKING_SYNC, _DISABLE_TIMING = 0x1, 0x2  # of events; without the first a core spins
_NON_BLOCKING = 0x1  # of streams: waits for no other one, nor lets the default one wait
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDeviceGet": (c_void_p, c_int),
    "cuDevicePrimaryCtxRetain": (c_void_p, c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (c_void_p,),
    "cuStreamCreate": (c_void_p, c_uint),
    "cuEventCreate": (c_void_p, c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventSynchronize": (c_void_p,),
    "cuEventElapsedTime": (c_void_p, c_void_p, c_void_p),
    "cuEventDestroy_v2": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuMemcpyHtoDAsync_v2": (c_void_p, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_void_p, c_size_t, c_void_p),
    "cuLaunchKernel": (c_void_p, *(c_uint,) * 7, c_void_p, c_void_p, c_void_p),
    "cuMemGetAddressRange_v2": (c_void_p, c_void_p, c_uint64),
    "cuPointerGetAttribute": (c_void_p, c_int, c_uint64),
    "cuGetErrorString": (c_int, c_void_p),
}


class CudaError(RuntimeError):
    """A call of the driver has failed, or there is no driver."""


class StreamEvent(Protocol):
    """Something on a stream that others are to run behind: of PyTorch, or of the driver."""

    @property
    def cuda_event(self) -> int:
        """The driver's."""

    def query(self) -> bool:
        """Whether all work that was on the stream before the event has run."""

    def synchronize(self) -> None:
        """Block until all work before the event has run."""

    def wait(self, stream: torch.cuda.Stream) -> None:
        """What is put on the stream from now on runs behind the event."""


class CurrentContext:
    """A GPU's context, current on this thread within a ``with``, whatever was before.

    PyTorch passes over what it takes for no change, and a thread starts without any. One within
    another of the same GPU costs no call of the driver: each is 1 us of a warm processor, and 7 of
    a cold one, and a launch with all that belongs to it would need ten.
    """

    __slots__ = ("_context", "_driver")

    def __init__(self, driver: Driver, context: int) -> None:
        self._driver, self._context = driver, context

    def __enter__(self) -> None:
        entered = _thread.entered
        if not entered or entered[-1] is not self:
            self._driver.call("cuCtxPushCurrent_v2", self._context)
        entered.append(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        entered = _thread.entered
        entered.pop()
        if not entered or entered[-1] is not self:
            popped = c_void_p()
            self._driver.call("cuCtxPopCurrent_v2", byref(popped))


class _Thread(threading.local):
    """``entered``: the contexts of the ``with`` that this thread is in, the innermost last."""

    def __init__(self) -> None:
        self.entered: list[CurrentContext] = []


_thread = _Thread()


class Driver:
    """libcuda, loaded once. Raises CudaError where there is none."""

    def __init__(self) -> None:
        try:
            short, waiting = ctypes.PyDLL("libcuda.so.1"), ctypes.CDLL("libcuda.so.1")
        except OSError as exc:
            raise CudaError(f"the CUDA driver: expected libcuda.so.1, got {exc}") from exc
        self._functions: dict[str, Any] = {}
        for name, arguments in _ARGUMENTS.items():
            function = getattr(waiting if name == "cuEventSynchronize" else short, name)
            function.argtypes, function.restype = arguments, c_int
            self._functions[name] = function
        self._contexts: dict[int, CurrentContext] = {}
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: object) -> None:
        """Raises CudaError with the driver's reason."""
        error = self._functions[name](*arguments)
        if error:
            raise CudaError(f"{name}: {self._reason(error)}")

    def is_over(self, event: int | None) -> bool:
        """Whether all before the event has run. Raises CudaError when the GPU has failed."""
        error: int = self._functions["cuEventQuery"](event)
        if error and error != _NOT_READY:
            raise CudaError(f"cuEventQuery: {self._reason(error)}")
        return not error

    def address_range(self, address: int) -> tuple[int, int]:
        """Where the allocation of an address begins, and its bytes. Raises CudaError."""
        base, nbytes = c_uint64(), c_size_t()
        self.call("cuMemGetAddressRange_v2", byref(base), byref(nbytes), address)
        return base.value, nbytes.value

    def is_pinned(self, address: int) -> bool:
        """Whether it is one of the host's memory that the driver knows; no other has a type."""
        kind = c_uint()
        error = self._functions["cuPointerGetAttribute"](byref(kind), _MEMORY_TYPE, address)
        return not error and kind.value == _HOST

    def current(self, device: torch.device) -> CurrentContext:
        """The context of PyTorch's and everybody's memory on this GPU. It is kept for as long as
        the process lives: mappings end with the context that they are in.
        """
        number = device.index or 0
        known = self._contexts.get(number)
        if known is None:
            ordinal, context = c_int(), c_void_p()
            self.call("cuDeviceGet", byref(ordinal), number)
            self.call("cuDevicePrimaryCtxRetain", byref(context), ordinal)
            known = self._contexts[number] = CurrentContext(self, context.value or 0)
        return known

    def make_stream(self, device: torch.device) -> int:
        """By its handle; nobody else has it, and nobody destroys it. Raises CudaError."""
        handle = c_void_p()
        with self.current(device):
            self.call("cuStreamCreate", byref(handle), _NON_BLOCKING)
        return handle.value or 0

    def _reason(self, error: int) -> str:
        text = c_char_p()
        self._functions["cuGetErrorString"](error, byref(text))
        return text.value.decode() if text.value else f"error {error}"


@cache
def driver() -> Driver:
    """The one of this process. Raises CudaError."""
    return Driver()


class DriverEvents:
    """Events of one GPU's context. Those that nobody asks any more are recorded again: to create
    and destroy one takes 15 us of a cold processor. ``are_timed``: the GPU notes when it reaches
    them.
    """

    __slots__ = ("_flags", "current", "driver", "free")

    def __init__(self, driver: Driver, current: CurrentContext, *, are_timed: bool = False) -> None:
        self.driver, self.current = driver, current
        self.free: list[int] = []  # any thread gives back
        self._flags = _BLOCKING_SYNC | (0 if are_timed else _DISABLE_TIMING)

    def record(self, stream: int) -> DriverEvent:
        """On the stream, by its handle. For one thread. Raises CudaError."""
        with self.current:
            event = DriverEvent(self, self._take())
            self.driver.call("cuEventRecord", event.cuda_event, stream)
        return event

    def wait(self, stream: int, event: StreamEvent) -> None:
        """What is put on the stream from now on, by its handle, runs behind the event. Raises
        CudaError.
        """
        with self.current:
            self.driver.call("cuStreamWaitEvent", stream, event.cuda_event, 0)

    def _take(self) -> int:
        if self.free:
            return self.free.pop()
        handle = c_void_p()
        self.driver.call("cuEventCreate", byref(handle), self._flags)
        return handle.value or 0

    def __del__(self) -> None:
        with suppress(CudaError), self.current:  # where the GPU has failed, nobody need be told
            for handle in self.free:
                self.driver.call("cuEventDestroy_v2", handle)


class DriverEvent:
    """An event on a stream, recorded once. Who waits for it sleeps. For any thread. All calls raise
    CudaError.
    """

    __slots__ = ("_events", "cuda_event")

    def __init__(self, events: DriverEvents, handle: int) -> None:
        self._events, self.cuda_event = events, handle

    def query(self) -> bool:
        """Whether all work that was on the stream before the event has run."""
        with self._events.current:
            return self._events.driver.is_over(self.cuda_event)

    def synchronize(self) -> None:
        """Block until all work before the event has run; lets go of the GIL."""
        with self._events.current:
            self._events.driver.call("cuEventSynchronize", self.cuda_event)

    def wait(self, stream: torch.cuda.Stream) -> None:
        """What ``Stream.wait_event`` of PyTorch calls."""
        self._events.wait(stream.cuda_stream, self)

    def since_s(self, first: Self) -> float:
        """On the GPU's clock, after another of the same timed ones; both are over."""
        elapsed_ms = c_float()
        with self._events.current:
            self._events.driver.call(
                "cuEventElapsedTime", byref(elapsed_ms), first.cuda_event, self.cuda_event
            )
        return elapsed_ms.value / 1e3

    def __del__(self) -> None:
        self._events.free.append(self.cuda_event)


class CurrentStream:
    """Where PyTorch puts the work of the calling thread, on one GPU. For one thread; raises
    CudaError. PyTorch's own events and streams take 100 us of a cold processor for a load that is
    part of a step.
    """

    def __init__(self, device: torch.device) -> None:
        self._events = DriverEvents(driver(), driver().current(device))
        self._number = device.index or 0

    def record(self) -> DriverEvent:
        """Behind all that was put there."""
        return self._events.record(self._handle())

    def wait(self, event: StreamEvent) -> None:
        """What is put there from now on runs behind the event."""
        self._events.wait(self._handle(), event)

    def _handle(self) -> int:
        """As Triton asks for it at each launch."""
        return torch._C._cuda_getCurrentRawStream(self._number)


class PointerArguments:
    """What a kernel is given whose arguments are addresses. For one thread.

    Triton's kernels have arguments of their own behind these, one to three by its version: scratch
    memory, which is null where the kernel needs none. The driver reads as many as the kernel has.
    """

    _NUM_HIDDEN = 8

    def __init__(self, num: int) -> None:
        size = num + self._NUM_HIDDEN
        self._values = (c_void_p * size)()
        step, first = ctypes.sizeof(c_void_p), ctypes.addressof(self._values)
        self._where = (c_void_p * size)(*(first + number * step for number in range(size)))

    def set(self, addresses: Sequence[int]) -> ctypes.Array[c_void_p]:
        """What ``cuLaunchKernel`` takes, good until the next call: it copies them."""
        self._values[: len(addresses)] = list(addresses)
        return self._where
