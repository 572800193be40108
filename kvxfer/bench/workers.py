"""Processes of a benchmark, each with one object whose methods the parent calls in turn.

What is timed happens inside a call, so the pipe between is in no time. A process that dies or does
not answer is a :class:`ContenderLost` for its contender, not the end of the run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import TypeVar

from kvxfer.bench.core import ContenderLost

SPAWN, FORK_SERVER = "spawn", "forkserver"
"""How processes start: anew, because a forked one cannot use a GPU, or as copies of one that has
imported everything, which takes 0.1 s instead of 3."""
IMPORTED_BEFORE = ("torch", "zmq", "kvxfer.transports.registry", "kvxfer.bench.wires")
START_S = 120.0
CALL_S = 60.0
END_S = 10.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Call:
    method: str
    arguments: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Answer:
    value: object = None
    error: str | None = None


def _serve(
    pipe: Connection,
    environment: Mapping[str, str],
    make: Callable[..., object],
    arguments: tuple[object, ...],
) -> None:
    os.environ.update(environment)  # before anything reads it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the parent ends this in order
    try:
        made = make(*arguments)
        pipe.send(_Answer())
    except Exception as exc:  # noqa: BLE001  # told to the parent, whatever it is
        pipe.send(_Answer(error=_sentence(exc)))
        return
    while True:
        try:
            call: _Call | None = pipe.recv()
        except EOFError:
            call = None
        if call is None:
            close = getattr(made, "close", None)
            if close is not None:
                close()
            return
        try:
            pipe.send(_Answer(getattr(made, call.method)(*call.arguments)))
        except Exception as exc:  # noqa: BLE001  # told to the parent, whatever it is
            pipe.send(_Answer(error=_sentence(exc)))


def _sentence(exc: Exception) -> str:
    frame = traceback.extract_tb(exc.__traceback__)[-1]
    return f"{type(exc).__name__}: {exc} ({os.path.basename(frame.filename)}:{frame.lineno})"


class Worker:
    """One process; starts at once, :meth:`ready` waits for it. ``is_daemon``: starts no others."""

    def __init__(
        self,
        name: str,
        make: Callable[..., object],
        *arguments: object,
        environment: Mapping[str, str] | None = None,
        method: str = SPAWN,
        is_daemon: bool = True,
    ) -> None:
        self.name = name
        self._why: str | None = None
        self._is_ready = False
        context: SpawnContext | ForkServerContext = (
            get_context("spawn") if method == SPAWN else get_context("forkserver")
        )
        context.set_forkserver_preload(list(IMPORTED_BEFORE))
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve,
            args=(theirs, dict(environment or {}), make, arguments),
            daemon=is_daemon,
        )
        self._process.start()
        self.pid = self._process.pid
        theirs.close()

    def ready(self, timeout_s: float = START_S) -> None:
        """Raises ContenderLost if it did not start."""
        if self._is_ready:
            return
        try:
            self._answer("start", timeout_s)
        except ContenderLost as exc:
            self._why = str(exc)  # nothing was made whose methods could be called
            raise
        self._is_ready = True

    def call(self, kind: type[T], method: str, *arguments: object, timeout_s: float = CALL_S) -> T:
        """What the method returns, which is of that kind. Raises ContenderLost."""
        self.ready()
        if self._why is not None:
            raise ContenderLost(self._why)
        with contextlib.suppress(OSError):  # it ended: the missing answer tells
            self._pipe.send(_Call(method, arguments))
        value = self._answer(method, timeout_s)
        if not isinstance(value, kind):
            raise self._lost(f"{method}: expected {kind.__name__}, got {type(value).__name__}")
        return value

    def _answer(self, method: str, timeout_s: float) -> object:
        if self._why is not None:
            raise ContenderLost(self._why)
        try:
            if not self._pipe.poll(timeout_s):
                raise self._lost(f"{method}: expected an answer within {timeout_s:g} s, got none")
            answer: _Answer = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(5)
            raise self._lost(f"{method}: the process ended with {self._process.exitcode}") from None
        if answer.error is not None:  # the process lives on
            raise ContenderLost(f"{self.name}: {method}: {answer.error}")
        return answer.value

    def _lost(self, why: str) -> ContenderLost:
        self._why = f"{self.name}: {why}"
        self._process.kill()
        return ContenderLost(self._why)

    def pause(self) -> None:
        """Stop it where it is: for one that takes processor time even when it is asked nothing."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.pid is not None and self._process.is_alive():
            with contextlib.suppress(ProcessLookupError):  # it ended since
                os.kill(self._process.pid, number)

    def close(self) -> None:
        """End it, in order if it can."""
        self._tell_to_end()
        self._process.join(END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(5)
        self._pipe.close()

    def _tell_to_end(self) -> None:
        self.resume()
        with contextlib.suppress(OSError):
            self._pipe.send(None)


def method_for(device: str) -> str:
    """How processes for a side on that device start."""
    return FORK_SERVER if device == "cpu" else SPAWN


def close_all(workers: Iterable[Worker]) -> None:
    ending = list(workers)
    for worker in ending:
        worker._tell_to_end()
    for worker in ending:
        worker.close()
