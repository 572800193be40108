"""An engine that hangs is looked at before it is ended."""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import threading
import time
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import msgspec
import pytest

from kvxfer.engine import rank
from kvxfer.errors import PeerLost
from tests.chaos import child, fleet, play
from tests.chaos.running import weather
from tests.chaos.standing import descriptors_of, num_in_no_state
from tests.chaos.storm import FLEET, Injection, Kind, make_plan

SMALL = (FLEET[0], FLEET[3])
"""A prefill and a decode engine of one rank."""
LAST = "r5."
"""In the calm before there are other requests."""


def stand_for_ever() -> None:
    threading.Event().wait()


def set_up(spec: child.Spec) -> None:
    """As in every storm; but the prefill engine's thread stands from that request on."""
    child.set_up(spec)
    if spec.engine_id != "p0":
        return
    runner: Any = vars(rank)["Runner"]
    execute = runner.execute

    def hang(self: Any, step: Any) -> Any:
        if any(new.req_id.startswith(LAST) for new in step.scheduled_new_reqs):
            stand_for_ever()
        return execute(self, step)

    runner.execute = hang


WITH_ZEROMQ = """
import sys, zmq
socket = zmq.Context().socket(zmq.PAIR)  # a thread comes with the first socket
print("ready", flush=True)
sys.stdin.read()
"""


def test_threads_of_zeromq_stand_and_go_on() -> None:
    """They block all signals."""
    with Popen([sys.executable, "-c", WITH_ZEROMQ], stdin=PIPE, stdout=PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        while not (found := fleet.threads_of_zmq(process.pid)):
            time.sleep(0.01)  # a thread gives itself its name when it runs
        for thread in found:
            if not child.trace_thread(thread, 2.0):
                pytest.skip("nobody may trace threads here")
            assert state_of(process.pid, thread) == "t"  # of proc(5): who traces it has stopped it
            while state_of(process.pid, thread) == "t":
                time.sleep(0.01)
        process.communicate()


def state_of(pid: int, thread: int) -> str:
    stat = Path(f"/proc/{pid}/task/{thread}/stat").read_text(encoding="ascii")
    return stat.rpartition(")")[2].split()[0]


def test_what_the_kernel_says_of_a_socket_stands_beside_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        lines = descriptors_of(os.getpid())
        (line,) = [each for each in lines if each.startswith(f"{listener.fileno()} socket:[")]
        assert f" 0100007F:{port:04X} 00000000:0000 0A " in line  # proc_pid_net(5): it listens
    assert any(each.startswith("0 ") for each in lines)


def test_what_an_epoll_descriptor_watches_stands_beside_it() -> None:
    with select.epoll() as watching, select.epoll() as idle, socket.socket() as watched:
        watching.register(watched.fileno())
        lines = descriptors_of(os.getpid())
        line = f"{watching.fileno()} anon_inode:[eventpoll] watches {watched.fileno()}"
        assert line in lines
        assert f"{idle.fileno()} anon_inode:[eventpoll] watches" in lines


def test_sockets_in_no_state_are_those_that_nobody_has_connected() -> None:
    before = num_in_no_state(os.getpid())
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as other:
        assert num_in_no_state(os.getpid()) == before + 1
        other.connect(listener.getsockname())
        assert num_in_no_state(os.getpid()) == before


def log_of(folder: Path) -> list[play.Event]:
    lines = (folder / "storm.jsonl").read_text(encoding="utf-8").splitlines()
    return [msgspec.json.decode(line, type=play.Event) for line in lines]


def test_an_engine_that_hangs_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "set_up", set_up)
    for room, name, seconds in (
        (play, "HUNG_S", 8.0),  # others take 0.1 s, and longer beside other tests
        (play, "ANSWER_S", 4.0),
        (fleet, "ASIDE_S", 0.5),
    ):
        monkeypatch.setattr(room, name, seconds)
    folder = tmp_path / "storm"
    summary = weather(make_plan(3, 20, fleet=SMALL, kinds=()), folder, "shm")

    assert any(line.startswith("r5 at p0 ") for line in summary.hung)
    files = [tmp_path / each for each in summary.stood if (tmp_path / each).stat().st_size]
    stacks, threads = (file for file in files if is_of(file, "p0"))
    for function in ("stand_for_ever", "_serve_door"):  # of the engine's thread, and of another
        assert stacks.read_text().count(f"in {function}") == 2
    assert threads.read_text().count(" MainThread: ") == 2
    assert threads.read_text().count(" kvxfer-io-") == 2
    assert json.loads(stacks.with_suffix(".state").read_bytes())["loads"] == 0
    said = [each.detail for each in log_of(folder) if (each.what, each.of) == ("hangs", "p0")]
    assert len(said) == 1
    assert "no answer within" in said[0]


def is_of(file: Path, engine: str) -> bool:
    facts = json.loads(file.with_suffix(".facts").read_bytes())
    return str(facts["door"]).startswith(f"kvxfer-storm-{engine}-")


def test_a_client_that_is_lost_is_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so is the next one."""

    def end(*_: object) -> None:
        raise PeerLost("the connection ended")

    def end_connection(_: fleet.Fleet, member: fleet.Member, *__: object) -> str:
        monkeypatch.setattr(member.client, "poll", end)
        return ""

    monkeypatch.setattr(fleet.Fleet, "stop_thread", end_connection)
    injection = Injection(at=4, kind=Kind.STOP_MAIN, engine="p0", rank=0)
    plan = make_plan(4, 8, fleet=SMALL, kinds=())
    weather(msgspec.structs.replace(plan, injections=(injection,)), tmp_path / "storm", "shm")
    said = [each.what for each in log_of(tmp_path / "storm") if each.of == "p0"]
    assert said[-2:] == ["client lost", "connected again"]
