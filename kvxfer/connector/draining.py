"""Those who may go on when offers are over and nothing of them touches the pool any more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class _Waiter:
    nonces: set[bytes]
    done: Callable[[], object]


class Draining:
    """Calls each of them once, on the IO thread."""

    def __init__(self) -> None:
        self._waiters: list[_Waiter] = []

    def wait(self, nonces: set[bytes], done: Callable[[], object]) -> None:
        """Call ``done`` when all these offers have drained; at once if there is none."""
        if nonces:
            self._waiters.append(_Waiter(nonces, done))
        else:
            done()

    def drained(self, nonce: bytes) -> None:
        """One has."""
        for waiter in list(self._waiters):
            waiter.nonces.discard(nonce)
            if not waiter.nonces:
                self._waiters.remove(waiter)
                waiter.done()
