"""One life of an engine after the other in the same processes, and the end of every one."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvxfer.config import load_config
from kvxfer.engine import rank
from kvxfer.engine.config import EngineConfig, Role
from kvxfer.engine.engine import Engine
from kvxfer.engine.group import EngineGroup
from kvxfer.engine.links import DRAIN, STOP, Life
from kvxfer.engine.rpc import Done, Generate, RpcClient
from kvxfer.errors import ConfigError, KvxferError, ModelError
from tests.helpers import free_port, stop_process

ROOT = Path(__file__).parents[2]
PROMPT = tuple(range(100))
NUM_LIVES = 50
WAIT_S = 120.0
NUMBERS = itertools.count()  # of requests: an engine wants each id once
KV = {"port": 0, "transport": "shm", "log_level": "WARNING", "connect_timeout_s": 1.0}


def config(role: Role, kv: dict[str, Any] | None = None, **kwargs: Any) -> EngineConfig:
    settings = {"num_blocks": 32, "max_model_len": 256, **kwargs}
    loaded = load_config({**KV, **(kv or {})}).config
    return EngineConfig(role=role, engine_id=str(role), kv=loaded, **settings)


def is_running(pid: int) -> bool:
    """Zombies do not count: whoever should have waited for them may be gone."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for_end(pids: tuple[int, ...], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while running := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline_s, f"still running after {timeout_s:g} s: {running}"
        time.sleep(0.02)


def belongings(pid: int) -> dict[str, int]:
    """What a process holds, counted."""
    proc = Path(f"/proc/{pid}")
    maps = (proc / "maps").read_text().splitlines()
    return {
        "fds": len(os.listdir(proc / "fd")),
        "threads": len(os.listdir(proc / "task")),
        "pools": sum("/memfd:kvxfer-pool" in line for line in maps),
    }


def settled(pids: tuple[int, ...]) -> list[dict[str, int]]:
    """The same, when nothing of the last request (its client's connection) goes any more."""
    found: list[dict[str, int]] = []
    for _ in range(20):
        before, found = found, [belongings(pid) for pid in pids]
        if found == before:
            break
        time.sleep(0.2)
    return found


def answered(group: EngineGroup, params: dict[str, Any] | None = None) -> Done:
    """The end of one request, sent through a client of its own."""
    with RpcClient(group.endpoint, connect_timeout_s=WAIT_S) as client:
        request_id = f"r{next(NUMBERS)}"
        client.send(Generate(request_id, PROMPT, max_new_tokens=2, kv_transfer_params=params))
        deadline_s = time.monotonic() + WAIT_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            for message in client.poll(left_s):
                if isinstance(message, Done):
                    return message
    raise AssertionError(f"no answer within {WAIT_S:g} s")


def num_moved(prefill: EngineGroup, decode: EngineGroup) -> int:
    """Tokens of KV that the decode side took over for a prompt."""
    params = answered(prefill, {"do_remote_decode": True}).kv_transfer_params
    done = answered(decode, params)
    assert done.failure is None
    return done.num_external_tokens


def reconfigured(group: EngineGroup, **changes: Any) -> None:
    group.reconfigure(msgspec.structs.replace(group.config, **changes))
    group.ready()


@pytest.fixture
def groups() -> Iterator[tuple[EngineGroup, EngineGroup]]:
    with (
        EngineGroup(config(Role.PREFILL, {"transport": "auto"}, tp_size=2)) as prefill,
        EngineGroup(config(Role.DECODE)) as decode,
    ):
        yield prefill, decode


def test_many_lives_leave_nothing_behind(groups: tuple[EngineGroup, EngineGroup]) -> None:
    prefill, decode = groups
    pids = (*prefill.pids, *decode.pids)
    wires = [load_config({**KV, "transport": wire}).config for wire in ("shm", "zmq")]
    seen: list[list[dict[str, int]]] = []
    for number in range(1, NUM_LIVES + 1):
        block_size = (8, 16, 24)[number % 3]
        if number % 5 == 0:
            reconfigured(prefill, block_size=block_size)
            reconfigured(decode, block_size=block_size, kv=wires[0])
        else:
            reconfigured(decode, block_size=block_size, kv=wires[number % 2])
        if number % 5 in {0, 2}:
            assert num_moved(prefill, decode) == len(PROMPT) - 1
        if number % 10 == 0:  # over the same wire, and all that a life makes lazily is there
            seen.append(settled(pids))
    assert (*prefill.pids, *decode.pids) == pids
    assert seen[1:] == seen[:1] * (len(seen) - 1)
    # Its own memory and its board; on the decode side those of the two ranks that it has read, too,
    # whose boards its scheduler looks at as well.
    assert [of_rank["pools"] for of_rank in seen[0]] == [2, 2, 8]


def test_a_new_life_breaks_what_the_old_one_offered(
    groups: tuple[EngineGroup, EngineGroup],
) -> None:
    prefill, decode = groups
    params = answered(prefill, {"do_remote_decode": True}).kv_transfer_params
    reconfigured(prefill, layout="NHD")
    late = answered(decode, params)
    assert (late.failure, late.status) == ("peer_lost", "FINISHED_LENGTH_CAPPED")  # recomputed
    assert num_moved(prefill, decode) == 3  # six blocks of 16 are cached, the last token is its own
    reconfigured(decode, layout="NHD", block_size=64)
    assert num_moved(prefill, decode) == len(PROMPT) - 1


def test_an_offer_of_an_old_life_is_refused_on_the_same_port() -> None:
    port = free_port()
    with (
        EngineGroup(config(Role.PREFILL, {"port": port})) as prefill,
        EngineGroup(config(Role.DECODE)) as decode,
    ):
        params = answered(prefill, {"do_remote_decode": True}).kv_transfer_params
        reconfigured(prefill)
        assert answered(decode, params).failure == "incarnation"
        reconfigured(decode)
        assert num_moved(prefill, decode) == len(PROMPT) - 1


def test_endpoints_are_those_of_the_new_life() -> None:
    kv_port, port = free_port(), free_port()
    with EngineGroup(config(Role.PREFILL, {"port": kv_port}), port=port) as group:
        for block_size in (8, 24):
            assert group.endpoint == f"tcp://127.0.0.1:{port}"
            assert group.kv_endpoint == f"tcp://127.0.0.1:{kv_port}"
            assert answered(group).status == "FINISHED_LENGTH_CAPPED"
            reconfigured(group, block_size=block_size)
        reconfigured(group, role=Role.ALONE)
        assert group.kv_endpoint == ""
        assert answered(group).status == "FINISHED_LENGTH_CAPPED"


def test_another_tp_size_is_refused_and_changes_nothing() -> None:
    with EngineGroup(config(Role.ALONE)) as group:
        before = (group.endpoint, group.pids)
        with pytest.raises(ValueError, match=r"tp_size: expected 1, .* got 2; start another group"):
            group.reconfigure(config(Role.ALONE, tp_size=2))
        assert (group.endpoint, group.pids) == before
        assert answered(group).status == "FINISHED_LENGTH_CAPPED"


def test_what_keeps_a_life_from_beginning_is_raised_under_its_own_class(tmp_path: Path) -> None:
    with EngineGroup(config(Role.ALONE, tp_size=2)) as group:
        group.ready()
        pids = group.pids
        missing = str(tmp_path / "nothing.json")
        group.reconfigure(msgspec.structs.replace(group.config, model=missing))
        with pytest.raises(ModelError, match=r"nothing\.json"):
            group.ready()
        wait_for_end(pids, WAIT_S)  # closed, as after a start that failed


def test_a_port_that_is_taken_is_a_config_error() -> None:
    port = free_port()
    with (
        EngineGroup(config(Role.PREFILL, {"port": port})) as holder,
        EngineGroup(config(Role.DECODE)) as group,
    ):
        holder.ready()
        taken = load_config({**KV, "port": port}).config
        group.reconfigure(msgspec.structs.replace(group.config, kv=taken))
        with pytest.raises(ConfigError, match=str(port)):
            group.ready()


def test_a_rank_that_is_gone_is_named() -> None:
    with EngineGroup(config(Role.ALONE, tp_size=2)) as group:
        reconfigured(group, block_size=8)
        os.kill(group.pids[0], signal.SIGKILL)
        with pytest.raises(KvxferError, match="alone-1"):
            reconfigured(group, block_size=16)


def test_a_client_of_the_old_life_is_told() -> None:
    with Engine(config(Role.ALONE)) as engine:
        engine.generate(PROMPT, 2)
        reconfigured(engine.group, block_size=8)
        with pytest.raises(KvxferError, match="the connection ended"):
            engine.generate(PROMPT, 2)


def test_stop_ends_every_rank_of_a_new_life() -> None:
    with EngineGroup(config(Role.DECODE, tp_size=2)) as group:
        reconfigured(group, block_size=8)
        pids = group.pids
        group.close()
        assert all("exit code 0" in each for each in group.dead())  # not 1, after the grace
        assert not any(map(is_running, pids))


def test_an_order_to_drain_ends_with_its_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the driver has heard of the next life before it looked."""
    has_ended = threading.Event()
    monkeypatch.setattr(rank, "_end_late", has_ended.set)
    ours, theirs = multiprocessing.Pipe()
    orders = rank._Orders(theirs)
    life = Life(config=config(Role.ALONE), incarnation=bytes(16), token="t")
    ours.send_bytes(DRAIN)
    ours.send_bytes(msgspec.msgpack.encode(life))
    assert orders.next() == life
    with pytest.raises(BlockingIOError):
        os.eventfd_read(orders.drain_fileno)
    ours.send_bytes(STOP)
    assert orders.next() is None
    assert has_ended.wait(120)
    for pipe in (ours, theirs):
        pipe.close()
    for fileno in (orders.fileno, orders.drain_fileno):
        os.close(fileno)


def test_the_end_of_a_drain_that_took_too_long_is_no_death() -> None:
    """It lies in the pipe when the next life begins."""
    with Engine(config(Role.ALONE)) as engine:
        engine.group.ready()
        request_id = engine.submit(PROMPT, 100)
        engine.first_token(request_id)
        for _ in range(2):
            engine.drain(0.0)
        engine.result(request_id)
        assert wait([engine.group._pipes[-1]], 30)
        engine.reconfigure(config(Role.ALONE))
        assert len(engine.generate(PROMPT, 2).token_ids) == 2


PARENT = """
    import time, msgspec
    from functools import partial
    from kvxfer.engine.config import EngineConfig, Role
    from kvxfer.engine.group import EngineGroup

    config = EngineConfig(role=Role.ALONE, engine_id="alone", tp_size=2, num_blocks=32)
    if __name__ == "__main__":
        hurry = partial(exec, "import kvxfer.engine.rank as rank; rank._LAST_GRACE_S = 2.0")
        group = EngineGroup(config, set_up=hurry)
        group.reconfigure(msgspec.structs.replace(config, block_size=8))
        print(group.endpoint, *group.pids, flush=True)
        time.sleep(60)
"""


@pytest.mark.parametrize("is_stuck", [False, True])
def test_ranks_end_when_their_parent_is_killed(is_stuck: bool) -> None:
    """Also one that waits in a step for a rank that stands still: after its grace, here of 2 s."""
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
    ) as parent:
        assert parent.stdout is not None
        endpoint, *words = parent.stdout.readline().split()
        follower, driver = map(int, words)
        with RpcClient(endpoint, connect_timeout_s=WAIT_S) as client:
            try:
                if is_stuck:
                    stop_process(follower)
                    client.send(Generate("r", PROMPT, max_new_tokens=8))
                    time.sleep(0.2)
                parent.kill()
                parent.wait()
                wait_for_end((driver,), 60.0)
            finally:
                with suppress(ProcessLookupError):
                    os.kill(follower, signal.SIGCONT)
            wait_for_end((follower,), 60.0)
