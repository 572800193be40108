"""Engines as processes: equal tokens for every TP size, nothing left behind, deaths noticed."""

from __future__ import annotations

import multiprocessing.connection
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvxfer.engine import rpc
from kvxfer.engine.config import EngineConfig, Role
from kvxfer.engine.engine import Engine
from kvxfer.engine.group import EngineGroup
from kvxfer.engine.metrics_server import MetricsServer
from kvxfer.engine.rpc import Done, Generate, RequestRefused, RpcClient, Token
from kvxfer.errors import ConfigError, KvxferError, ModelError, PeerLost
from tests.helpers import stop_process

VOCAB = 256


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A model that starts and answers in a fraction of a second."""
    config = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    path = tmp_path / "config.json"
    path.write_bytes(msgspec.json.encode(config))
    return str(path)


def alone(path: str, **changes: object) -> EngineConfig:
    config = EngineConfig(
        role=Role.ALONE, engine_id="e", model=path, num_blocks=64, max_model_len=400
    )
    return msgspec.structs.replace(config, **changes)


def generate(client: RpcClient, prompts: list[tuple[int, ...]], max_new: int) -> list[list[int]]:
    tokens: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    for i, prompt in enumerate(prompts):
        client.send(Generate(str(i), prompt, max_new))
    left = len(prompts)
    while left:
        for message in client.poll(60):
            if isinstance(message, Token):
                tokens[message.request_id].append(message.token_id)
            else:
                assert isinstance(message, Done), message
                left -= 1
    return list(tokens.values())


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_every_tp_size_layout_and_block_size_gives_equal_tokens(model: str) -> None:
    rng = random.Random(3)
    prompts = [tuple(rng.randrange(VOCAB) for _ in range(n)) for n in (1, 7, 16, 130)]
    changes: list[dict[str, object]] = [
        {},
        {"tp_size": 2, "layout": "NHD", "block_size": 32},
        {"tp_size": 4, "block_size": 24, "max_num_batched_tokens": 48},  # TP > KV heads
    ]
    groups: list[EngineGroup] = []
    answers: list[list[list[int]]] = []
    try:
        groups += [EngineGroup(alone(model, **each)) for each in changes]
        for group in groups:
            with RpcClient(group.endpoint, connect_timeout_s=60) as client:
                answers.append(generate(client, prompts, 12))
                info = client.ask(10)
                assert info.num_free_blocks == 63
                assert set(info.pids) == set(group.pids)
    finally:
        for group in groups:
            group.close()
    assert answers[0] == answers[1] == answers[2]
    assert [len(tokens) for tokens in answers[0]] == [12, 12, 12, 12]


@pytest.fixture
def group(model: str) -> Iterator[EngineGroup]:
    with EngineGroup(alone(model, tp_size=2)) as group:
        group.ready()
        yield group


def test_close_ends_all_ranks_between_steps_and_leaves_nothing(
    model: str, made_folders: list[Path]
) -> None:
    for _ in range(3):
        with EngineGroup(alone(model, tp_size=2)) as group:
            folder = made_folders[-1]
            pids = group.pids
            with RpcClient(group.endpoint, connect_timeout_s=60) as client:
                client.send(Generate("a", tuple(range(100)), 50))
                client.poll(60)  # in the middle of it
            assert not folder.exists()  # what was killed from here on would leave nothing either
        # by themselves: ranks that wait for each other end with 1, or are killed
        assert group.dead() == ["e-1 (exit code 0)", "e-0 (exit code 0)"]
        assert not any(map(is_running, pids))
        assert not folder.exists()
        group.close()


def test_a_group_that_never_served_closes_at_once(model: str, made_folders: list[Path]) -> None:
    group = EngineGroup(alone(model, tp_size=2))
    pids = group.pids
    (folder,) = made_folders
    assert folder.exists()
    group.close()
    assert not folder.exists()
    assert not any(map(is_running, pids))


def test_a_killed_rank_is_noticed(group: EngineGroup) -> None:
    group.check()
    assert group.dead() == []
    os.kill(group.pids[0], signal.SIGKILL)  # rank 1
    assert multiprocessing.connection.wait(list(group.sentinels), timeout=120)
    with pytest.raises(
        KvxferError, match=r"engine e: died while serving: rank e-1 \(killed by SIGKILL"
    ):
        group.check()
    group.close()  # does not wait for the other, which may wait for it
    assert group.dead() == ["e-1 (killed by SIGKILL)", "e-0 (killed by SIGKILL)"]
    assert not any(map(is_running, group.pids))


def test_who_waits_for_a_result_hears_of_a_killed_rank(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although rank 0 is stopped and says nothing, and no heartbeat ends its connection."""
    monkeypatch.setattr(rpc, "HEARTBEAT_S", 1000.0)
    with Engine(alone(model, tp_size=2)) as engine:
        engine.generate([1, 2, 3], 1)
        rank1, rank0 = engine.group.pids
        stop_process(rank0)
        request_id = engine.submit([1, 2, 3], 4)
        killer = threading.Timer(0.2, os.kill, (rank1, signal.SIGKILL))
        started_s = time.monotonic()
        killer.start()
        with pytest.raises(PeerLost, match=r"died while serving: rank e-1 \(killed by SIGKILL\)"):
            engine.result(request_id, timeout_s=60)
        assert time.monotonic() - started_s < 30  # not after its own time
        killer.join()


def test_an_id_in_use_is_refused_and_its_request_goes_on(model: str) -> None:
    with Engine(alone(model)) as engine:
        engine.submit([1, 2, 3], 20, request_id="a")
        for _ in range(2):  # while it runs, and when its result has come
            with pytest.raises(ValueError, match="request a: expected a new id, got one in use"):
                engine.submit([1, 2, 3], 4, request_id="a")
            engine.generate([1, 2, 3], 30)
        assert len(engine.result("a").token_ids) == 20
        engine.submit([1, 2, 3], 4, request_id="a")
        assert len(engine.result("a").token_ids) == 4


def test_a_scrape_that_comes_late_writes_to_nobody_else() -> None:
    """Its connection was accepted before the server was closed."""
    server = MetricsServer("127.0.0.1:0")
    fileno = server.fileno
    server.close()
    other = os.eventfd(0, os.EFD_NONBLOCK)
    os.dup2(other, fileno)
    assert server.collect() == []
    with pytest.raises(BlockingIOError):
        os.eventfd_read(fileno)
    os.close(fileno)
    if other != fileno:
        os.close(other)


def test_an_idle_engine_ends_when_a_rank_is_killed(group: EngineGroup) -> None:
    """Its clients, and who loads from it, then hear of it by their connections."""
    rank1, rank0 = group.pids
    with RpcClient(group.endpoint, connect_timeout_s=60) as client:
        os.kill(rank1, signal.SIGKILL)
        with pytest.raises(PeerLost, match="the connection ended"):
            client.poll(60)
    assert multiprocessing.connection.wait([group.sentinels[-1]], timeout=120)
    assert not is_running(rank0)


def test_clients_notice_a_killed_engine(group: EngineGroup) -> None:
    with RpcClient(group.endpoint, connect_timeout_s=60) as client:
        group.kill()
        with pytest.raises(PeerLost, match="the connection ended"):
            client.poll(60)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_the_whole_group_is_sent_does_not_end_the_ranks(
    group: EngineGroup, number: signal.Signals
) -> None:
    for pid in group.pids:
        os.kill(pid, number)
    with RpcClient(group.endpoint, connect_timeout_s=60) as client:
        assert len(generate(client, [(1, 2, 3)], 4)[0]) == 4
    assert group.dead() == []


def test_what_keeps_a_rank_from_starting_is_raised_under_its_own_class(model: str) -> None:
    for changes, kind, sentence in (
        ({"tp_size": 3}, ModelError, "engine e: tp_size: expected a divisor or a multiple of 2"),
        ({"model": "/nowhere"}, ModelError, "engine e: /nowhere: cannot be read"),
    ):
        with (
            EngineGroup(alone(model, **changes)) as group,
            pytest.raises(kind, match=sentence),
        ):
            group.ready()
        assert not any(map(is_running, group.pids))


def test_a_port_in_use_is_raised_soon_also_with_several_ranks(group: EngineGroup) -> None:
    port = int(group.endpoint.rpartition(":")[2])
    config = msgspec.structs.replace(group.config, engine_id="second")
    started_s = time.monotonic()
    with (
        EngineGroup(config, port=port) as second,
        pytest.raises(ConfigError, match=f"engine second: listen: cannot bind 127.0.0.1:{port}"),
    ):
        second.ready()
    assert time.monotonic() - started_s < 100


def test_engines_that_only_take_kv_start_on_one_host(model: str) -> None:
    """Nobody has chosen a port for them: were it 5700 for all, only one would start."""
    config = alone(model, role=Role.DECODE)
    with EngineGroup(config) as one, EngineGroup(config) as other:
        assert one.kv_endpoint != other.kv_endpoint


def test_requests_that_cannot_be_run_are_refused(group: EngineGroup) -> None:
    cases = (
        (Generate("none", (), 1), "expected at least one prompt token"),
        (Generate("new", (1,), 0), "and one new token, got 1 and 0"),
        (Generate("vocabulary", (VOCAB,), 1), r"expected token ids in [0, 256), got 256 to 256"),
        (Generate("negative", (-1,), 1), "got -1 to -1"),
        (Generate("long", (1,) * 400, 1), "requests may have 400 tokens"),
    )
    with RpcClient(group.endpoint, connect_timeout_s=60) as client:
        for message, sentence in cases:
            client.send(message)
            (answer,) = client.poll(60)
            assert isinstance(answer, RequestRefused)
            assert answer.request_id == message.request_id
            assert sentence in answer.error
        assert client.ask(10).num_free_blocks == 63
