"""How often the log says what may happen again and again. Pure: the time is an argument."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

_EVERY_S = 60.0
"""How long the events of one kind are counted instead of written."""


K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Told:
    """A kind that has a line already. Until ``until_s`` others are only counted."""

    until_s: float
    num_left_out: int = 0


class LogLimit(Generic[K]):
    """The first event of a kind is worth a line at once, those that follow one a minute.

    ``now_s`` is any clock that does not go back, always the same one. Of more than ``most_kinds``
    within a minute the others are worth no line.
    """

    def __init__(self, most_kinds: float = math.inf) -> None:
        self._most_kinds = most_kinds
        self._told: dict[K, _Told] = {}
        self._next_s = math.inf

    def __len__(self) -> int:
        return len(self._told)

    def __contains__(self, kind: K) -> bool:
        return kind in self._told

    def note(self, kind: K, now_s: float) -> int:
        """It happened once more. Returns for how many a line is to stand; 0: write none."""
        told = self._told.get(kind)
        if told is None:
            if len(self._told) >= self._most_kinds:
                self._told = {k: told for k, told in self._told.items() if now_s < told.until_s}
                if len(self._told) >= self._most_kinds:
                    return 0
            num = 1
        elif now_s < told.until_s:
            told.num_left_out += 1
            return 0
        else:
            num = told.num_left_out + 1
        self._tell(kind, now_s)
        return num

    def due(self, now_s: float) -> list[tuple[K, int]]:
        """Kinds of which some were left out for a minute, and how many; almost always none, which
        costs one comparison. A kind of which none was left out is forgotten.
        """
        return [] if now_s < self._next_s else self._due(now_s)

    def _due(self, now_s: float) -> list[tuple[K, int]]:
        over = [(kind, told) for kind, told in self._told.items() if now_s >= told.until_s]
        for kind, told in over:
            if told.num_left_out:
                self._tell(kind, now_s)
            else:
                del self._told[kind]
        self._next_s = min((told.until_s for told in self._told.values()), default=math.inf)
        return [(kind, told.num_left_out) for kind, told in over if told.num_left_out]

    def _tell(self, kind: K, now_s: float) -> None:
        self._told[kind] = _Told(now_s + _EVERY_S)
        self._next_s = min(self._next_s, now_s + _EVERY_S)
