"""A dict for what others can make us remember. Pure."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Bounded(dict[K, V]):
    """Of at most so many entries: the one that came first goes for a new one."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self._most and key not in self:
            del self[next(iter(self))]
        super().__setitem__(key, value)
