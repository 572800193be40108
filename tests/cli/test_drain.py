"""An engine that is told to drain: by SIGTERM, by ``kvxfer drain``, by the process that owns it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from kvxfer.cli.drain import run_drain
from kvxfer.cli.options import DrainOptions
from kvxfer.config import Config
from kvxfer.engine.config import EngineConfig, Role
from kvxfer.engine.engine import Engine
from kvxfer.engine.rpc import Abort, Done, Generate, RequestRefused, RpcClient, Token
from kvxfer.errors import ConfigError, KvxferError, PeerLost
from tests.cli.test_app import assert_nothing_left, started
from tests.commands import small_model
from tests.connector.rig import until

OFFER = {"do_remote_decode": True, "do_remote_prefill": False}
PROMPT = tuple(range(50))
TIMEOUT_S = 60.0
Answer = TypeVar("Answer", Token, Done, RequestRefused)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    config = EngineConfig(
        role=Role.PREFILL,
        engine_id="p",
        model=small_model(tmp_path),
        tp_size=2,
        kv=Config(port=0, transport="shm", lease_s=300.0, log_level="ERROR"),
    )
    with Engine(config) as made:
        yield made


def answer(client: RpcClient, request_id: str, kind: type[Answer]) -> Answer:
    """The next one of this kind; the others are thrown away."""
    while True:
        for message in client.poll(TIMEOUT_S):
            if isinstance(message, kind) and message.request_id == request_id:
                return message


def test_an_engine_that_drains_refuses_and_finishes(engine: Engine) -> None:
    """By its owner's word: what runs and what is held is waited for, and the rest is refused."""
    engine.submit(PROMPT, 1, OFFER, "held")
    assert engine.result("held").kv_transfer_params is not None
    ended: list[bool] = []
    thread = threading.Thread(target=lambda: ended.append(engine.drain(TIMEOUT_S)))
    with RpcClient(engine.group.endpoint, connect_timeout_s=TIMEOUT_S) as other:
        other.send(Generate("running", PROMPT, 200))
        answer(other, "running", Token)
        assert not engine.drain(0.05)
        other.send(Generate("late", PROMPT, 1))
        assert answer(other, "late", RequestRefused).is_draining
        thread.start()
        assert answer(other, "running", Done).status == "FINISHED_LENGTH_CAPPED"
    assert engine.info().is_draining
    engine.abort("held")  # nobody will come for it
    thread.join()
    assert ended == [True]


def test_the_command_waits_until_nothing_is_open(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.submit(PROMPT, 1, OFFER, "held")
    assert engine.result("held").kv_transfer_params is not None
    where = engine.group.kv_endpoint.removeprefix("tcp://")
    assert run_drain(DrainOptions(endpoint=where))
    told = capsys.readouterr().out.splitlines()
    assert told[0] == f"drain: engine p at tcp://{where}, 2 ranks"
    assert re.fullmatch("drain: engine p takes nothing new; [12] open", told[1])
    assert not run_drain(DrainOptions(endpoint=where, wait=True, timeout_s=0.5))
    assert "expected it to be empty within 0.5 s" in capsys.readouterr().out
    with pytest.raises(KvxferError, match="drains"):
        engine.generate(PROMPT, 1)
    ended: list[bool] = []
    wait = DrainOptions(endpoint=where, wait=True, timeout_s=TIMEOUT_S)
    thread = threading.Thread(target=lambda: ended.append(run_drain(wait)))
    thread.start()
    engine.abort("held")
    thread.join()
    assert ended == [True]
    assert capsys.readouterr().out.endswith("drain: engine p is empty\n")


def test_who_is_not_there_cannot_be_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PeerLost, match="127.0.0.1:9: nobody listens there; start the engine, or"):
        run_drain(DrainOptions(endpoint="127.0.0.1:9"))
    monkeypatch.setenv("KVXFER_PORT", "5700-5710")
    with pytest.raises(ConfigError, match="ENDPOINT: expected HOST:PORT, got none"):
        run_drain(DrainOptions())
    monkeypatch.setenv("KVXFER_PORT", "all")
    with pytest.raises(ConfigError, match="^KVXFER_PORT: expected 0 .*got 'all'$"):
        run_drain(DrainOptions())


def test_sigterm_drains_and_a_second_one_does_not_wait(tmp_path: Path) -> None:
    """Two engines side by side: one is let to finish, one is told twice. Both are told as
    timeout(1) does: the command, and then its group with the ranks in it.
    """
    command = ("prefill", "--listen", "127.0.0.1:0", "--kv-port", "0", "--tp", "1", "--model")
    with ExitStack() as stack:
        processes = [
            stack.enter_context(started(tmp_path, *command, small_model(tmp_path)))
            for _ in range(2)
        ]
        clients = [stack.enter_context(_client(process)) for process in processes]
        for process, client in zip(processes, clients, strict=True):
            client.send(Generate("held", PROMPT, 1, OFFER))
            assert answer(client, "held", Done).kv_transfer_params is not None
            process.send_signal(signal.SIGTERM)
            os.killpg(process.pid, signal.SIGTERM)
            until(partial(_drains, client))
            assert process.poll() is None
        clients[0].send(Abort("held"))
        assert processes[0].wait(TIMEOUT_S) == 0
        assert processes[1].poll() is None
        processes[1].send_signal(signal.SIGTERM)
        assert processes[1].wait(TIMEOUT_S) == 128 + signal.SIGTERM
        for process in processes:
            assert_nothing_left(process.pid, tmp_path)


def _drains(client: RpcClient) -> bool:
    return client.ask(TIMEOUT_S).is_draining


def _client(process: subprocess.Popen[str]) -> RpcClient:
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"prefill: (tcp://\S+) serves", line)
    assert found is not None, line
    return RpcClient(found[1], connect_timeout_s=TIMEOUT_S)
