"""Two hosts on one machine: network, mount, process, IPC and host-name namespaces of their own,
each with an address, joined by a virtual cable (veth).

A process of one sees no process, no port, no Unix socket and no shared memory of the other. They
share the files, the user, and the kernel with its boot id. Who is not root gets them inside a user
namespace, where the machine allows that.

The first process of a host reads a pipe of this process, so it ends with this one, however that
ends. The kernel then kills all others of the host, and the namespaces go with them.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from tests.helpers import group_members

ADDRESSES = ("10.98.0.1", "10.98.0.2")
NAMES = ("prefill-host", "decode-host")
DEVICE = "eth0"
TIMEOUT_S = 90.0
_END_S = 30.0

_TOOLS = ("unshare", "nsenter", "ip", "mount", "hostname")
_HOST = ("unshare", "--net", "--mount", "--pid", "--ipc", "--uts", "--fork", "--mount-proc")
# UCX looks for devices in /sys, which shows those of the network that it was mounted in.
_BEGIN_HOST = (
    'mount -t sysfs sysfs /sys && mount -t tmpfs tmpfs /dev/shm && hostname "$0" && '
    'printf "$1" >/dev/shm/hosts && mount --bind /dev/shm/hosts /etc/hosts && rm /dev/shm/hosts && '
    "ip link set lo up && echo up && exec cat"
)
_HOSTS = "127.0.0.1 localhost\\n" + "".join(
    f"{address} {name}\\n" for name, address in zip(NAMES, ADDRESSES, strict=True)
)
_NETWORK = ("unshare", "--net", "--mount")
_BEGIN_NETWORK = "mount -t sysfs sysfs /sys && ip link set lo up && echo up && exec cat"
_BEGIN_USERS = "echo up && exec cat"


T = TypeVar("T")


class HostsUnavailable(RuntimeError):
    """This machine cannot have such hosts; the message says why."""


@dataclass(frozen=True, slots=True)
class Host:
    """``enter``: stands before a command that is to run there."""

    name: str
    address: str
    enter: tuple[str, ...]

    @contextmanager
    def started(
        self, *command: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> Iterator[subprocess.Popen[str]]:
        """A command in a process group of its own; killed in the end if it still runs."""
        with subprocess.Popen(
            self.inside(command, cwd),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                yield process
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def run(
        self, *command: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """A command to its end."""
        with self.started(*command, env=env, cwd=cwd) as process:
            out, err = process.communicate(timeout=TIMEOUT_S)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def inside(self, command: tuple[str, ...], cwd: Path | None = None) -> list[str]:
        """The command as it is started from here."""
        return [*self.enter, f"--wdns={cwd or Path.cwd()}", *command]


def interrupt(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Ctrl-C, as a terminal sends it: exit status, output and errors."""
    for pid in group_members(process.pid):
        if pid != process.pid:  # nsenter itself: it tells how the command has ended
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)
    out, err = process.communicate(timeout=_END_S)
    return process.returncode, out, err


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Both, until the end of the block. Raises HostsUnavailable."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        raise HostsUnavailable(f"two hosts: need the commands {', '.join(missing)}")
    with ExitStack() as stack:
        users: tuple[str, ...] = ()
        if os.geteuid() != 0:
            command = ("unshare", "--user", "--map-root-user")
            pid = _begin(stack, command, _BEGIN_USERS, "users")
            users = ("nsenter", "--preserve-credentials", f"--user=/proc/{pid}/ns/user")
        pids = [_begin(stack, (*users, *_HOST), _BEGIN_HOST, name) for name in NAMES]
        enters = [(*(users or ("nsenter",)), *_namespaces(pid)) for pid in pids]
        _join(users or ("nsenter",), pids)
        first, second = map(Host, NAMES, ADDRESSES, enters)
        yield first, second


@dataclass(frozen=True, slots=True)
class Network:
    """The network of a host alone, with its devices in /sys. ``pid``: whose it is."""

    pid: int
    address: str

    def ip(self, arguments: str) -> None:
        """Runs ``ip`` there. Raises HostsUnavailable."""
        _ip(("nsenter",), self.pid, arguments)


@contextmanager
def two_networks() -> Iterator[tuple[Network, Network]]:
    """Both, joined by a cable, until the end of the block; for threads that enter them with setns.
    Raises HostsUnavailable.
    """
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        why = f"the commands {', '.join(missing)}" if missing else "to be root"
        raise HostsUnavailable(f"two networks: need {why}")
    with ExitStack() as stack:
        pids = [_begin(stack, _NETWORK, _BEGIN_NETWORK, name) for name in NAMES]
        _join(("nsenter",), pids)
        first, second = map(Network, pids, ADDRESSES)
        yield first, second


def two_hosts_or_skip() -> Iterator[tuple[Host, Host]]:
    """The body of a fixture."""
    yield from _or_skip(two_hosts())


def two_networks_or_skip() -> Iterator[tuple[Network, Network]]:
    """The body of a fixture."""
    yield from _or_skip(two_networks())


def _or_skip(both: AbstractContextManager[tuple[T, T]]) -> Iterator[tuple[T, T]]:
    with ExitStack() as stack:
        try:
            entered = stack.enter_context(both)
        except HostsUnavailable as e:
            pytest.skip(str(e))
        yield entered


def _begin(stack: ExitStack, command: tuple[str, ...], script: str, name: str) -> int:
    """Start the process that holds namespaces; its id here. It ends with the stack."""
    process = subprocess.Popen(
        [*command, "sh", "-c", script, name, _HOSTS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stack.callback(_end, process)
    if process.stdout.readline() != "up\n":
        process.stdin.close()
        _, err = process.communicate(timeout=_END_S)
        raise HostsUnavailable(f"two hosts: no namespaces for {name}: {err.strip()}")
    return process.pid


def _end(process: subprocess.Popen[str]) -> None:
    process.communicate(timeout=_END_S)  # closes what it reads


def _namespaces(pid: int) -> tuple[str, ...]:
    # unshare itself has stayed in the process namespace where it was started
    folder = f"/proc/{pid}/ns"
    names = [f"--{option}={folder}/{file}" for option, file in _FILES.items()]
    return tuple(names)


_FILES = {"net": "net", "mount": "mnt", "ipc": "ipc", "uts": "uts", "pid": "pid_for_children"}


def _join(nsenter: tuple[str, ...], pids: list[int]) -> None:
    """The cable, and an address at each end of it."""
    first, second = pids
    cable = f"link add {DEVICE} type veth peer name {DEVICE} netns {second}"
    _ip(nsenter, first, cable)
    for pid, address in zip(pids, ADDRESSES, strict=True):
        _ip(nsenter, pid, f"addr add {address}/24 dev {DEVICE}")
        _ip(nsenter, pid, f"link set {DEVICE} up")


def _ip(nsenter: tuple[str, ...], pid: int, arguments: str) -> None:
    command = [*nsenter, f"--net=/proc/{pid}/ns/net", "ip", *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_END_S, check=False)
    if done.returncode:
        raise HostsUnavailable(f"two hosts: ip {arguments}: {done.stderr.strip()}")
