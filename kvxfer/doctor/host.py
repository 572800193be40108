"""What this host has: limits, ports, libraries."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import socket
from collections.abc import Iterator
from importlib import metadata
from itertools import accumulate
from pathlib import Path

import zmq

from kvxfer.doctor.rows import Row, limit_row
from kvxfer.transports.native_peers import RDMA_DEVICES

LIBRARIES = {
    "shm": ("torch",),
    "zmq": ("pyzmq",),
    "tcp": ("pyzmq",),
    "cuda_ipc": ("triton", "cuda-bindings"),
    "ucx": ("ucxx-cu13", "libucx-cu13"),
    "nixl": ("nixl",),
}
"""The packages of each wire."""
EXTRAS = {"cuda_ipc": "cuda"}
"""Of kvxfer's, where it is not called as the wire."""
_MAY_BE_OF_THE_SYSTEM = ("libucx-cu13",)
_MIB = 1 << 20
_LISTEN = "0A"
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")
"""Files of a control group; and in memory.stat, what of the use is cache that the kernel gives
back."""


def versions(wire: str) -> dict[str, str]:
    found = {"libzmq": zmq.zmq_version()} if wire == "zmq" else {}
    for name in LIBRARIES[wire]:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "of the system" if name in _MAY_BE_OF_THE_SYSTEM else ""
    return found


def limits() -> Iterator[Row]:
    """What engines here meet, the least that is enough, and how to raise it."""
    has_rdma = RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir())
    # RDMA pins the staging of a connection, 32 MiB each way
    remedy = "ulimit -l unlimited; in a container --ulimit memlock=-1"
    yield limit_row("memlock", _hard(resource.RLIMIT_MEMLOCK), has_rdma * 64 * _MIB, remedy)
    # A source rank takes about 15, and each peer some; a rank raises its soft limit to the hard one
    remedy = "ulimit -Hn 65536; in a container --ulimit nofile=65536"
    yield limit_row("open files", _hard(resource.RLIMIT_NOFILE), 4096, remedy, is_nbytes=False)
    # Docker gives 64 MiB, which serving frameworks with several ranks fill
    remedy = "in a container --shm-size=8g, --ipc=host, or an emptyDir in memory"
    shm = Path("/dev/shm")
    yield limit_row(
        "/dev/shm", shutil.disk_usage(shm).free if shm.is_dir() else 0, 128 * _MIB, remedy
    )
    # Two processes with PyTorch, a pool each, and their staging
    remedy = "raise the container's memory limit, which pools of host memory count to"
    yield limit_row("memory", free_host_nbytes(), 1024 * _MIB, remedy)


def _hard(kind: int) -> int | None:
    _, hard = resource.getrlimit(kind)
    return None if hard == resource.RLIM_INFINITY else hard


def free_host_nbytes(root: Path = Path("/")) -> int | None:
    """Memory that this process may still take: of the machine, and of the control groups that it is
    in. None where the system does not tell. ``root``: of the file system, for tests.
    """
    bounds = [
        int(line.split()[1]) << 10
        for line in _lines(root / "proc/meminfo")
        if line.startswith("MemAvailable:")
    ]
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            base = root / "sys/fs/cgroup" / controllers
            # The mount's own root as well: in a container it is its group, whatever the path says
            folders = accumulate(path.strip("/").split("/"), Path.joinpath, initial=base)
            bounds += [
                b for each in folders if (b := _left(each, _V1 if controllers else _V2)) is not None
            ]
    return max(0, min(bounds)) if bounds else None


def _left(group: Path, names: tuple[str, str, str]) -> int | None:
    """What a control group may still take; None without a limit."""
    limit, used = (next(iter(_lines(group / name)), "") for name in names[:2])
    if not limit.isdecimal() or int(limit) >> 60:  # the first version has no word for "none"
        return None
    stat = dict(line.split(" ", 1) for line in _lines(group / "memory.stat"))
    return int(limit) - int(used or 0) + int(stat.get(names[2], 0))


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def is_of_this_machine(address: str) -> bool:
    exc = _try_to_listen(address, 0)
    return exc is None or exc.errno != errno.EADDRNOTAVAIL


def why_not_free(address: str, port: int) -> str:
    """Why nobody can listen there now; "" if one can."""
    exc = _try_to_listen(address, port)
    return "" if exc is None else os.strerror(exc.errno or errno.EINVAL)


def _try_to_listen(address: str, port: int) -> OSError | None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as ZeroMQ does
        try:
            tried.bind((address, port))
            tried.listen()
        except OSError as exc:
            return exc
    return None


def listener_on(port: int) -> str:
    """Who listens on a TCP port of this host, as far as this user may know: process and command,
    else the user; "" if nobody is found.
    """
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        rows = Path(table).read_text().splitlines()[1:] if Path(table).exists() else ()
        for row in rows:
            _, local, _, state, _, _, _, user, _, inode, *_ = row.split()
            if state == _LISTEN and int(local.rpartition(":")[2], 16) == port:
                return _holder(f"socket:[{inode}]") or f"a process of user {user}"
    return ""


def _holder(link: str) -> str:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(each) == link for each in (process / "fd").iterdir()):
                command = (process / "cmdline").read_text(errors="replace").replace("\0", " ")
                return f"process {process.name} ({command.strip()[:60]})"
        except OSError:  # another user's, or it has ended
            continue
    return ""


def why_unreachable(host: str, port: int, timeout_s: float) -> str:
    """Why no TCP connection begins within the time, and what to do; "" if one does."""
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except TimeoutError:
        return f"no answer within {timeout_s:g} s; let firewalls between the hosts pass this port"
    except ConnectionRefusedError:
        return "nobody listens there; start the engine, or name its port"
    except socket.gaierror as exc:
        return f"the name is not known here: {exc.strerror}; name an address"
    except OSError as exc:
        return f"{exc.strerror or exc}; see the routes between the hosts"
    return ""
