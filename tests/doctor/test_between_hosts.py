"""kvxfer doctor between two network, process and IPC namespaces: as between two hosts."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from kvxfer.doctor.rows import Row, State

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "nsenter", "ip"))),
        reason="needs root, unshare, nsenter and ip for namespaces",
    ),
]
ROOT = Path(__file__).parents[2]
HERE, THERE = "10.97.0.1", "10.97.0.2"
BOTH = "10.97.0.0/24"
_APART = ("unshare", "--net", "--ipc", "--pid", "--mount", "--fork", "--mount-proc")
_BEGIN = "ip link set lo up && echo up && exec cat"  # until its input ends
_FILES = {"net": "net", "ipc": "ipc", "mount": "mnt", "pid": "pid_for_children"}


@pytest.fixture(scope="module")
def hosts() -> Iterator[dict[str, list[str]]]:
    """What stands before a command to run it on either host, by address."""
    with ExitStack() as stack:
        pids = [stack.enter_context(_host()) for _ in range(2)]
        _ip(pids[0], f"link add k0 type veth peer name k0 netns {pids[1]}")
        for pid, address in zip(pids, (HERE, THERE), strict=True):
            _ip(pid, f"addr add {address}/24 dev k0")
            _ip(pid, "link set k0 up")
        yield {
            address: [
                "nsenter",
                *(f"--{name}=/proc/{pid}/ns/{file}" for name, file in _FILES.items()),
            ]
            for pid, address in zip(pids, (HERE, THERE), strict=True)
        }


@contextmanager
def _host() -> Iterator[int]:
    """The process that holds one host's namespaces; all of them go with it."""
    with subprocess.Popen(
        [*_APART, "sh", "-c", _BEGIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdout.readline() != "up\n":
            pytest.skip("this machine does not allow namespaces")
        yield process.pid
        process.stdin.close()


def _ip(pid: int, arguments: str) -> None:
    enter = ("nsenter", f"--net=/proc/{pid}/ns/net")
    subprocess.run([*enter, "ip", *arguments.split()], check=True, timeout=30)


def command(enter: list[str], *arguments: str) -> list[str]:
    return [*enter, f"--wdns={ROOT}", sys.executable, "-m", "kvxfer", "doctor", *arguments]


def environment(host: str, allowed_peers: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("KVXFER_")}
    settings = {"HOST": host, "ALLOWED_PEERS": allowed_peers, "CONNECT_TIMEOUT_S": "2"}
    return {**kept, "PYTHONPATH": str(ROOT), **{f"KVXFER_{k}": v for k, v in settings.items()}}


@contextmanager
def waiting(hosts: dict[str, list[str]], allowed_peers: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        command(hosts[HERE], "--listen"),
        env=environment(HERE, allowed_peers),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith(f"doctor: waits at tcp://{HERE}:5700"), said
        try:
            yield process
        finally:
            if process.poll() is None:
                end(process)


def end(process: subprocess.Popen[str]) -> str:
    """What it has said until ctrl-C. nsenter itself stays, to tell how the command has ended."""
    for pid in group_members(process.pid):
        if pid != process.pid:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)
    return process.communicate(timeout=60)[1]


def group_members(group: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            pid, _, rest = stat.read_text().partition(" (")
            if int(rest.rpartition(")")[2].split()[2]) == group:
                found.append(int(pid))
    return found


def look(
    hosts: dict[str, list[str]], allowed_peers: str, *arguments: str
) -> tuple[int, dict[str, Row]]:
    done = subprocess.run(
        command(hosts[THERE], "--peer", f"{HERE}:5700", "--json", *arguments),
        env=environment(THERE, allowed_peers),
        capture_output=True,
        text=True,
        timeout=120,
    )
    facts = msgspec.json.decode(done.stdout)
    rows = msgspec.convert(facts["rows"], list[Row])
    return done.returncode, {row.thing: row for row in rows}


def test_two_hosts(hosts: dict[str, list[str]]) -> None:
    with waiting(hosts, BOTH):
        code, rows = look(hosts, BOTH)
        assert code == 0, rows
        assert rows["choice"].seen.startswith("auto: zmq over TCP at ")
        assert "not shm: " in rows["choice"].seen
        assert rows["wire shm"].state is State.WARN  # the kernel is one, so it was tried
        assert (rows["wire zmq"].gb_per_s or 0) > 0
        code, rows = look(hosts, BOTH, "--min-gbps", "1000")
        assert code == 1
        assert rows["choice"].state is State.FAIL


def test_refused_there(hosts: dict[str, list[str]]) -> None:
    with waiting(hosts, "10.97.0.9") as process:
        code, rows = look(hosts, BOTH)
        assert code == 1
        row = rows["peer engine"]
        assert "it does not admit this engine's address" in row.seen
        assert "allowed_peers there" in row.remedy
        assert "choice" not in rows
        assert f"a connection from {THERE} was refused" in end(process)


def test_refused_here(hosts: dict[str, list[str]]) -> None:
    with waiting(hosts, BOTH):
        code, rows = look(hosts, "10.97.0.9")
    assert code == 1
    assert f"allowed_peers of this engine does not admit tcp://{HERE}" in rows["peer engine"].seen


def test_a_closed_port(hosts: dict[str, list[str]]) -> None:
    code, rows = look(hosts, BOTH)
    assert code == 1
    assert rows["peer address"].seen == f"tcp://{HERE}:5700: nobody listens there"
