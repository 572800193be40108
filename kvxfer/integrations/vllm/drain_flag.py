"""Whether a rank was told to drain, where the scheduler's process sees it at once.

A rank reports in steps, and a vLLM that sleeps makes none until the next request has come, which
would still be offered. A byte of memory that both processes map needs no step.
"""

from __future__ import annotations

import logging

from kvxfer.errors import TransportUnavailable
from kvxfer.tensors.shared_memory import MappedPool, SharedPool, open_shared
from kvxfer.transfer.manifest import MemfdHandle

_log = logging.getLogger("kvxfer.integrations")


class DrainFlag:
    """The rank's end. ``handle`` None: there is no such memory here."""

    def __init__(self) -> None:
        self._pool: SharedPool | None = None
        self.handle: MemfdHandle | None = None
        try:
            self._pool = SharedPool.create(1)
        except OSError as exc:
            _log.debug("no memory to show that this rank drains: %s", exc)
            return
        handle = self._pool.info.handle
        assert isinstance(handle, MemfdHandle)
        self.handle = handle

    def set(self) -> None:
        """For ever. From any thread."""
        if self._pool is not None:
            self._pool.tensor[0] = 1

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = self.handle = None


class DrainFlagView:
    """The scheduler's end."""

    def __init__(self, pool: MappedPool) -> None:
        self._pool = pool

    @classmethod
    def open(cls, handle: MemfdHandle | None) -> DrainFlagView | None:
        """None for a rank without a flag, or on another host: its next step tells."""
        try:
            return None if handle is None else cls(open_shared(handle))
        except TransportUnavailable as exc:
            _log.debug("a rank that is told to drain says so with its next step only: %s", exc)
            return None

    @property
    def is_set(self) -> bool:
        return bool(self._pool.tensor[0])

    def close(self) -> None:
        self._pool.close()
