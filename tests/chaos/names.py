"""Names of what outlives a process: files of shared memory, folders, abstract sockets.

Other storms and tests run at the same time. So a name is a storm's only if one of its processes was
seen with it, or stands in it by its number. Shared pools have no names.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
CLAIM = "@kvxfer-stormport-"
"""Of a port, by the process that plays a storm: its number is no process's."""


class Names:
    """Those of one storm. Made before its processes."""

    def __init__(self) -> None:
        self._before = frozenset(_all())
        self._seen: set[str] = set()

    def made(self, name: str) -> None:
        """By this storm."""
        self._seen.add(name)

    def look_at(self, pid: int) -> None:
        """What a process that runs holds open or maps."""
        inodes: set[str] = set()
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                kind, _, inode = os.readlink(path).partition(":[")
                inodes |= {inode.rstrip("]")} if kind == "socket" else set()
                self._seen.add(kind)
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
        self._seen.update(line.split(maxsplit=5)[5] for line in maps.splitlines() if "/" in line)
        self._seen.update(name for name, inode in _sockets() if inode in inodes)

    def left(self, pids: set[int]) -> list[str]:
        """What is there of this storm, whose processes were these. Shared memory is given back: it
        would stay until the machine starts anew.
        """
        found = sorted(
            name
            for name in set(_all()) - self._before
            if name in self._seen or pids.intersection(map(int, re.findall(r"\b\d+\b", name)))
        )
        for name in found:
            if Path(name).parent == SHARED_MEMORY:
                Path(name).unlink(missing_ok=True)
        return found


def _all() -> Iterator[str]:
    """All of kvxfer on this machine."""
    yield from map(str, SHARED_MEMORY.glob("kvxfer*"))
    yield from map(str, Path(tempfile.gettempdir()).glob("kvxfer-*"))
    yield from (name for name, _ in _sockets() if not name.startswith(CLAIM))


def _sockets() -> Iterator[tuple[str, str]]:
    """Name and inode of each abstract one."""
    lines = Path("/proc/net/unix").read_text(encoding="ascii", errors="replace").splitlines()
    for *_, inode, name in (line.split() for line in lines if "@kvxfer-" in line):
        yield name, inode
