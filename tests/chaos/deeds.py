"""What the processes of a storm say that they have done: what was asked may have met nobody.

One line each, into a file of the storm's folder, at once: they may be killed next.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

DEEDS = "deeds.jsonl"
"""The file."""
NOBODYS = -1
HELD = "held"
"""So many requests at once, the most until then."""
HELD_STEP = 10


class Deed(msgspec.Struct, frozen=True, array_like=True):
    """``order``: the number of the injection that asked for it, NOBODYS if none has. ``of``: the
    engine, and ``number``: how many, where that counts.
    """

    order: int
    what: str
    of: str = ""
    number: int = 0


class Lines:
    """A file that several processes add to."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def add(self, value: object) -> None:
        """One line of JSON; from any thread."""
        os.write(self._fd, msgspec.json.encode(value) + b"\n")


def deeds_in(folder: Path) -> list[Deed]:
    """All that was said, in its order."""
    path = folder / DEEDS
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [msgspec.json.decode(line, type=Deed) for line in lines]
