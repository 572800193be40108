"""kvxfer doctor between two hosts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from kvxfer.doctor.rows import Row, State
from tests.two_hosts import ADDRESSES, Host, interrupt, two_hosts_or_skip

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
HERE, THERE = ADDRESSES
BOTH = "10.98.0.0/24"
NOBODY = "10.98.0.9"
DOCTOR = (sys.executable, "-m", "kvxfer", "doctor")

hosts = pytest.fixture(scope="module")(two_hosts_or_skip)


def environment(host: Host, allowed_peers: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("KVXFER_")}
    settings = {
        "HOST": host.address,
        "ALLOWED_PEERS": allowed_peers,
        "CONNECT_TIMEOUT_S": "2",
    }
    return {**kept, "PYTHONPATH": str(ROOT), **{f"KVXFER_{k}": v for k, v in settings.items()}}


@contextmanager
def waiting(hosts: tuple[Host, Host], allowed_peers: str) -> Iterator[subprocess.Popen[str]]:
    here, env = hosts[0], environment(hosts[0], allowed_peers)
    with here.started(*DOCTOR, "--listen", env=env, cwd=ROOT) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith(f"doctor: waits at tcp://{HERE}:5700"), said
        yield process
        if process.poll() is None:
            interrupt(process)


def look(
    hosts: tuple[Host, Host], allowed_peers: str, *arguments: str
) -> tuple[int, dict[str, Row]]:
    there, env = hosts[1], environment(hosts[1], allowed_peers)
    asked = (*DOCTOR, "--peer", f"{HERE}:5700", "--json", *arguments)
    done = there.run(*asked, env=env, cwd=ROOT)
    facts = msgspec.json.decode(done.stdout)
    rows = msgspec.convert(facts["rows"], list[Row])
    return done.returncode, {row.thing: row for row in rows}


def test_two_hosts(hosts: tuple[Host, Host]) -> None:
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


def test_refused_there(hosts: tuple[Host, Host]) -> None:
    with waiting(hosts, NOBODY) as process:
        code, rows = look(hosts, BOTH)
        assert code == 1
        row = rows["peer engine"]
        assert "it does not admit this engine's address" in row.seen
        assert "allowed_peers there" in row.remedy
        assert "choice" not in rows
        _, _, log = interrupt(process)
        assert f"a connection from {THERE} was refused" in log


def test_refused_here(hosts: tuple[Host, Host]) -> None:
    with waiting(hosts, BOTH):
        code, rows = look(hosts, NOBODY)
    assert code == 1
    assert f"allowed_peers of this engine does not admit tcp://{HERE}" in rows["peer engine"].seen


def test_a_closed_port(hosts: tuple[Host, Host]) -> None:
    code, rows = look(hosts, BOTH)
    assert code == 1
    assert rows["peer address"].seen == f"tcp://{HERE}:5700: nobody listens there"
