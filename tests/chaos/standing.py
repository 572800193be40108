"""Where the threads of a process stand that answers no more: what was found out too late is lost,
for its storm ends it.

The process writes its Python stacks itself when it gets a signal, whoever has its interpreter. What
its threads wait for, those of libraries too, the kernel says.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

SIGNAL = signal.SIGURG
"""Nobody here uses it, and a process that does not know it yet ignores it."""
NUM_LOOKS, APART_S = 2, 0.5
"""What is the same in both looks stands; what is not goes round in circles."""
WRITTEN_S = 4.0
"""How long a process may take to write; one that is stopped writes nothing."""


def write_on_signal(folder: Path) -> None:
    """In a process: from now on the signal makes it add its stacks to a file of its own, and so
    does a signal that ends it, as that of a segmentation fault. The stack of a thread that runs
    changes under Python's reader, and that has ended a process; it hung, and its storm has ended.
    """
    file = _stacks(folder, os.getpid()).open("w", encoding="ascii")
    faulthandler.register(SIGNAL, file, all_threads=True)
    faulthandler.enable(file, all_threads=True)


def look_at(processes: Mapping[int, Mapping[int, str]], folder: Path) -> list[str]:
    """Write down where they stand. ``processes``: names of threads by their ids, by process id.
    Returns the names of the files.
    """
    for number in range(NUM_LOOKS):
        time.sleep(APART_S if number else 0.0)
        for pid, names in processes.items():
            lines = [f"look {number + 1}: id, name, CPU ticks, state, wchan, syscall"]
            with (folder / f"{pid}.threads").open("a", encoding="utf-8") as file:
                file.write("\n".join([*lines, *_threads(pid, names), ""]))
            with suppress(ProcessLookupError), more_of(_stacks(folder, pid)):
                os.kill(pid, SIGNAL)
    return [f"{pid}.{what}" for pid in processes for what in ("stacks", "threads")]


def descriptors_of(pid: int) -> list[str]:
    """What each is, a line for each: of a socket, what the kernel says of it; of an epoll
    descriptor, which others it watches.
    """
    known = _sockets_of(pid)
    found: list[str] = []
    for fd, what in _descriptors(pid):
        if what == "anon_inode:[eventpoll]":
            info = _read(Path(f"/proc/{pid}/fdinfo/{fd}")).splitlines()
            more = " ".join(["watches", *(line.split()[1] for line in info if "tfd:" in line)])
        else:
            more = known.get(what, "")
        found.append(f"{fd} {what} {more}".rstrip())
    return found


def num_in_no_state(pid: int) -> int:
    """How many sockets it has that the kernel keeps in no table: neither connected, nor connecting,
    nor listening.
    """
    known = _sockets_of(pid)
    return sum(what.startswith("socket:") and what not in known for _, what in _descriptors(pid))


def _descriptors(pid: int) -> Iterator[tuple[int, str]]:
    for fd in sorted(int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()):
        with suppress(FileNotFoundError):  # closed meanwhile
            yield fd, os.readlink(f"/proc/{pid}/fd/{fd}")


def _sockets_of(pid: int) -> dict[str, str]:
    """What the kernel says of each in the networks of this process: its threads may have others."""
    known: dict[str, str] = {}
    for net in {os.readlink(task / "ns/net"): task for task in _tasks(pid)}.values():
        for kind, at in _TABLES:
            for line in _read(net / "net" / kind).splitlines()[1:]:
                known[f"socket:[{line.split()[at]}]"] = f"{kind}: {line.strip()}"
    return known


_TABLES = (
    *((kind, 9) for kind in ("tcp", "tcp6", "udp", "udp6", "raw")),
    *(("unix", 6), ("netlink", 9)),
)
"""proc_pid_net(5): and which word of a line is the socket's number."""


def _tasks(pid: int) -> list[Path]:
    return sorted(Path(f"/proc/{pid}/task").iterdir())


def _stacks(folder: Path, pid: int) -> Path:
    return folder / f"{pid}.stacks"


@contextmanager
def more_of(path: Path) -> Iterator[None]:
    """Wait at the end until a process has added something to this file."""
    before = _nbytes(path)
    yield
    until_s = time.monotonic() + WRITTEN_S
    while _nbytes(path) == before and time.monotonic() < until_s:
        time.sleep(0.01)


def _nbytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _threads(pid: int, names: Mapping[int, str]) -> list[str]:
    """A line for each thread. ``names``: Python's, else the kernel's is said."""
    lines: list[str] = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*"), key=lambda each: int(each.name)):
        comm, _, rest = _read(task / "stat").partition("(")[2].rpartition(")")
        state, *numbers = rest.split() or ("gone",)
        ticks = sum(map(int, numbers[10:12]))  # utime and stime of proc(5)
        name = names.get(int(task.name), comm)
        lines.append(
            f"{task.name} {name}: {ticks}, {state}, {_read(task / 'wchan')}, "
            f"{_read(task / 'syscall')}"
        )
    return lines


def _read(path: Path) -> str:
    """What the kernel says, or why it does not."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError as e:
        return str(e.strerror)
