"""The completions that a wire returns from its next poll."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from kvxfer.transports.base import Wake

T = TypeVar("T")


class Completions(Generic[T]):
    """The completions of one wire, in order. For the IO thread."""

    def __init__(self, wake: Wake) -> None:
        self._wake = wake
        self._ready: list[T] = []

    def __len__(self) -> int:
        return len(self._ready)

    def tell(self, completion: T) -> None:
        """Add a completion and wake the IO thread, so that it polls."""
        self._ready.append(completion)
        self._wake()

    def note(self, completion: T) -> None:
        """Add a completion without a wake, where a poll is under way or comes anyway."""
        self._ready.append(completion)

    def since(self, number: int) -> Sequence[T]:
        """The completions behind the first so many."""
        return self._ready[number:]

    def take(self) -> list[T]:
        """All completions that were not taken yet."""
        taken, self._ready = self._ready, []
        return taken
