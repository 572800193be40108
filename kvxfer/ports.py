"""Which ports the ranks of an engine listen on: what the settings ``port`` and ``data_port`` say.

``0``: any free one. ``5700``: this one. ``5700-5710``: each listener takes the first of these that
is free. ``5700+rank``: rank *i* takes 5700 + *i*; *i* counts tensor-parallel ranks first, then
pipeline stages, then data-parallel replicas.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from kvxfer.errors import ConfigError

_MAX_PORT = 65535
_FORM = re.compile(r"(\d{1,5})(?:-(\d{1,5})|(\+rank))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Ports:
    """From ``first`` to ``last``; with ``adds_rank`` each rank counts on from ``first``."""

    name: str
    first: int
    last: int
    adds_rank: bool = False

    def __str__(self) -> str:
        if self.adds_rank:
            return f"{self.first}+rank"
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"

    @property
    def setting(self) -> int | str:
        return int(str(self)) if str(self).isdecimal() else str(self)

    @property
    def is_one(self) -> bool:
        """One port that somebody chose: two listeners cannot have it."""
        return self.first == self.last != 0 and not self.adds_rank

    @property
    def in_order(self) -> range:
        return range(self.first, self.last + 1)

    def moved(self, by: int) -> Ports:
        """A range serves all ranks, and any free port stays so. Raises ConfigError."""
        if self.first == 0 or self.first != self.last:
            return self
        if self.first + by > _MAX_PORT:
            raise ConfigError(
                f"{self.name}: expected at most {_MAX_PORT - by}, because rank {by} counts on from "
                f"it, got {self}; choose a smaller one"
            )
        return replace(self, first=self.first + by, last=self.last + by)

    def of_rank(self, rank: int) -> Ports:
        return replace(self.moved(rank), adds_rank=False) if self.adds_rank else self


def parse_ports(name: str, value: int | str) -> Ports:
    """Raises ConfigError for anything but the forms above; ``name``: of the setting."""
    form = _FORM.fullmatch(str(value).replace(" ", ""))
    if form is not None:
        first, adds_rank = int(form[1]), form[3] is not None
        last = int(form[2] or first)
        is_plain = form[2] is None and not adds_rank
        if (first > 0 or is_plain) and first <= last <= _MAX_PORT:
            return Ports(name, first, last, adds_rank)
    raise ConfigError(
        f"{name}: expected 0 (any free port) to {_MAX_PORT}, a range as in 5700-5710, or "
        f"5700+rank, got {value!r}"
    )
