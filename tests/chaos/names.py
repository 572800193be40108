"""Names of what outlives a process: files of shared memory, folders, abstract sockets.

Other storms and tests run at the same time. So a name is a storm's only if one of its processes was
seen with it, or stands in it by its number. A socket with the name of a port is known by its inode:
ports are taken again, and a listener's is one of some 7000. Shared pools have no names.
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

Named = tuple[str, str]
"""A name, and the inode of a socket."""


class Names:
    """Those of one storm. Made before its processes."""

    def __init__(self) -> None:
        self._before = frozenset(_all())
        self._seen: set[Named] = set()

    def made(self, name: str) -> None:
        """By this storm."""
        self._seen.add((name, ""))

    def look_at(self, pid: int) -> None:
        """What a process that runs holds open or maps."""
        inodes: set[str] = set()
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                kind, _, inode = os.readlink(path).partition(":[")
                inodes |= {inode.rstrip("]")} if kind == "socket" else set()
                self.made(kind)
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
        for line in maps.splitlines():
            if "/" in line:
                self.made(line.split(maxsplit=5)[5])
        self._seen.update((name, inode) for name, inode in _sockets() if inode in inodes)

    def left(self, pids: set[int]) -> list[str]:
        """What is there of this storm, whose processes were these. Shared memory is given back: it
        would stay until the machine starts anew.
        """
        new = set(_all()) - self._before
        found = sorted({each[0] for each in new if each in self._seen or _has_one(each[0], pids)})
        for name in found:
            if Path(name).parent == SHARED_MEMORY:
                Path(name).unlink(missing_ok=True)
        return found


def _has_one(name: str, pids: set[int]) -> bool:
    """A number behind a colon is a port's."""
    numbers = re.findall(r"\b\d+\b", name) if ":" not in name else ()
    return not pids.isdisjoint(map(int, numbers))


def _all() -> Iterator[Named]:
    """All of kvxfer on this machine."""
    for path in (*SHARED_MEMORY.glob("kvxfer*"), *Path(tempfile.gettempdir()).glob("kvxfer-*")):
        yield str(path), ""
    yield from (each for each in _sockets() if not each[0].startswith(CLAIM))


def _sockets() -> Iterator[Named]:
    """The abstract ones."""
    lines = Path("/proc/net/unix").read_text(encoding="ascii", errors="replace").splitlines()
    for *_, inode, name in (line.split() for line in lines if "@kvxfer-" in line):
        yield name, inode
