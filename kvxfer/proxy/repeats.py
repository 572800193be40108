"""What may happen with every request, for a log that says it once a minute. Pure."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

EVERY_S: Final = 60.0


class Repeats:
    """How often things happened since each was said last."""

    def __init__(self) -> None:
        self._said_s: dict[Hashable, float] = {}
        self._unsaid: dict[Hashable, int] = {}

    def note(self, what: Hashable, now_s: float) -> int:
        """It happened once more, at ``now_s`` of a clock that never goes back.

        Returns the number to say now, all times since it was said last; 0: it is too soon.
        """
        num = self._unsaid.get(what, 0) + 1
        if now_s - self._said_s.get(what, -EVERY_S) < EVERY_S:
            self._unsaid[what] = num
            return 0
        self._said_s[what], self._unsaid[what] = now_s, 0
        return num
