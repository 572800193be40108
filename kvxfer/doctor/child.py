"""A process of its own for what may crash or hang: native libraries, drivers, peers."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

from kvxfer.config import Config
from kvxfer.connector.peer_session import Failure
from kvxfer.engine.group import forkserver
from kvxfer.errors import IncompatiblePeer, KvxferError
from kvxfer.transfer.wire import Reason

START_S = 60.0
"""Until it works: the first one imports PyTorch."""
END_S = 5.0
_REASONS: dict[type, Reason] = {
    PermissionError: Reason.NOT_ALLOWED,
    IncompatiblePeer: Reason.INCOMPATIBLE,
}

T = TypeVar("T")
Work = Callable[..., AbstractContextManager[T]]


class Child(Generic[T]):
    """Enters ``work(*arguments)``, answers with what it yields, and leaves it at the end.

    It is silent, native libraries too, unless it ``is_loud`` or the log level is DEBUG.
    """

    def __init__(
        self, config: Config, work: Work[T], *arguments: object, is_loud: bool = False
    ) -> None:
        context = forkserver()
        self._pipe, theirs = context.Pipe()
        log_level = config.log_level if is_loud or config.log_level == "DEBUG" else None
        given = (theirs, log_level, work, arguments)
        self._process = context.Process(target=_serve, args=given, daemon=True)
        self._is_killed = False
        self._process.start()
        theirs.close()

    def answer(self, timeout_s: float | None) -> T | Failure:
        """What ``work`` yields, or its error, crash or silence (None: it is waited for)."""
        found: T | Failure
        try:
            if self._pipe.poll(None if timeout_s is None else START_S + timeout_s):
                found = self._pipe.recv()
            else:
                found = Failure(Reason.DEADLINE, f"its process hangs for {timeout_s:g} s")
        except (EOFError, OSError):
            self._process.join(END_S)
            found = self.crash() or Failure(Reason.TRANSPORT, "its process ended without a word")
        return found

    def crash(self) -> Failure | None:
        code = self._process.exitcode
        if code is None or code >= 0 or self._is_killed:
            return None
        what = f"the library crashes: {signal.Signals(-code).name} ended its process"
        return Failure(Reason.TRANSPORT, f"{what}; set transport to another wire, or uninstall it")

    def __enter__(self) -> Child[T]:
        return self

    def __exit__(self, raised: type[BaseException] | None, *_: object) -> None:
        self._pipe.close()  # tells it to end
        self._process.join(END_S if raised is None else 0)
        if self._process.is_alive():
            self._is_killed = True
            self._process.kill()
            self._process.join()


def call(config: Config, timeout_s: float, work: Work[T], *arguments: object) -> T | Failure:
    """What ``work`` yields in a process of its own, or why there is nothing."""
    with Child(config, work, *arguments) as child:
        found = child.answer(timeout_s)
    return found if isinstance(found, Failure) else child.crash() or found


def _serve(
    pipe: Connection, log_level: str | None, work: Work[T], arguments: tuple[object, ...]
) -> None:
    if log_level is None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    else:
        logging.basicConfig(level=log_level, format="kvxfer: %(message)s")
    try:
        with work(*arguments) as answer:
            pipe.send(answer)
            with contextlib.suppress(EOFError, OSError):
                pipe.recv()
    except Exception as exc:  # noqa: BLE001  # whatever it is, it is a row
        is_ours = isinstance(exc, KvxferError | PermissionError)
        detail = f"{exc}" if is_ours else f"{type(exc).__name__}: {exc}"
        with contextlib.suppress(OSError):  # told to end meanwhile
            pipe.send(Failure(_REASONS.get(type(exc), Reason.TRANSPORT), detail))
