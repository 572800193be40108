"""Which calls a process makes, and when: every function of some packages is wrapped.

A wrapped call costs 0.5 us more, ten times that on a cold processor. Only calls that took long are
kept. Properties are not wrapped, and of a generator only the call that makes it is.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType, ModuleType

LEAST_S = 3e-6
"""Shorter calls are not kept."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call. Times are of the clock that all processes of a host share; ``depth``: how many
    wrapped calls of its thread it is within.
    """

    thread: str
    depth: int
    name: str
    started_s: float
    ended_s: float

    @property
    def took_s(self) -> float:
        return self.ended_s - self.started_s

    def line(self, origin_s: float) -> str:
        """Start and duration in microseconds, thread, name."""
        start_us, took_us = (self.started_s - origin_s) * 1e6, self.took_s * 1e6
        indent = "  " * min(self.depth, 14)
        return f"{start_us:9.0f} {took_us:8.0f}  {self.thread[:14]:14s} {indent}{self.name}"


class CallTrace:
    """The calls of this process. Wrap before objects are made that keep bound methods."""

    def __init__(self) -> None:
        self._is_on = False
        self._calls: list[Call] = []
        self._local = threading.local()

    def start(self) -> None:
        """Forget what was kept, and keep calls from now on."""
        self._calls.clear()
        self._is_on = True

    def stop(self) -> list[Call]:
        """What was kept, by start."""
        self._is_on = False
        return sorted(self._calls, key=lambda call: (call.started_s, call.depth))

    def wrap_packages(self, names: Iterable[str]) -> None:
        """Every function and method of these packages, wherever it was imported to."""
        wrapped: dict[FunctionType, Callable[..., object]] = {}
        for module in _modules(names):
            for name, value in list(vars(module).items()):
                if getattr(value, "__module__", None) != module.__name__:
                    continue
                if isinstance(value, type):
                    self._wrap_methods(value)
                elif isinstance(value, FunctionType):
                    wrapped[value] = self._wrapped(value, name)
        for module in filter(lambda each: isinstance(each, ModuleType), list(sys.modules.values())):
            for name, value in list(vars(module).items()):
                if type(value) is FunctionType and value in wrapped:  # isinstance may run code
                    setattr(module, name, wrapped[value])

    def _wrap_methods(self, kind: type) -> None:
        for name, value in list(vars(kind).items()):
            if isinstance(value, FunctionType) and (
                name == "__init__" or not name.startswith("__")
            ):
                try:
                    setattr(kind, name, self._wrapped(value, f"{kind.__name__}.{name}"))
                except (AttributeError, TypeError):  # a class that is closed
                    return

    def _wrapped(self, function: Callable[..., object], name: str) -> Callable[..., object]:
        local, calls, clock = self._local, self._calls, time.perf_counter

        @functools.wraps(function)
        def call(*args: object, **kwargs: object) -> object:
            if not self._is_on:
                return function(*args, **kwargs)
            depth: int = getattr(local, "depth", 0)
            local.depth = depth + 1
            started_s = clock()
            try:
                return function(*args, **kwargs)
            finally:
                ended_s = clock()
                local.depth = depth
                if ended_s - started_s >= LEAST_S:
                    thread = threading.current_thread().name
                    calls.append(Call(thread, depth, name, started_s, ended_s))

        return call


def _modules(names: Iterable[str]) -> list[ModuleType]:
    modules = []
    for name in names:
        package = importlib.import_module(name)
        modules.append(package)
        for found in pkgutil.iter_modules(package.__path__, f"{name}."):
            try:
                modules.append(importlib.import_module(found.name))
            except ImportError:  # of what need not be installed
                continue
    return modules
