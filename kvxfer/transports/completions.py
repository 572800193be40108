"""What a wire has to tell when it is polled next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from kvxfer.transports.base import Wake

T = TypeVar("T")


class Completions(Generic[T]):
    """Those of one wire, in their order. For the IO thread."""

    def __init__(self, wake: Wake) -> None:
        self._wake = wake
        self._ready: list[T] = []

    def __len__(self) -> int:
        return len(self._ready)

    def tell(self, completion: T) -> None:
        """The next poll has this, and is to come."""
        self._ready.append(completion)
        self._wake()

    def note(self, completion: T) -> None:
        """The same, where a poll is under way, or comes anyway."""
        self._ready.append(completion)

    def since(self, number: int) -> Sequence[T]:
        """Those behind the first so many."""
        return self._ready[number:]

    def take(self) -> list[T]:
        """All that was not taken yet."""
        taken, self._ready = self._ready, []
        return taken
