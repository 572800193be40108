"""Pairs of engines on GPUs: on one that both share, on one each, and with several ranks a side.

Tokens are the single engine's and KV is the source's, for each request, and moves by cuda_ipc.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path

import msgspec
import pytest
import torch

from kvxfer.engine.config import Role
from kvxfer.engine.group import EngineGroup
from kvxfer.engine.rpc import Generate, RpcClient, Token
from kvxfer.errors import ConfigError, KvxferError, PeerLost, TransportUnavailable
from tests.end_to_end.harness import engine_config, prompt
from tests.end_to_end.hybrid import Bench, Fleet, Shape, Side

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
STEPS = {"max_num_batched_tokens": 64}  # longer prompts take several steps

SHAPES = (
    Shape(None, Side(1, 16, "HND", (0,)), Side(1, 64, "NHD", (0,)), "auto"),
    Shape("hybrid", Side(1, 16, "HND", (0,)), Side(1, 24, "NHD", (0,)), "auto"),
    # Ranks that share a GPU: sums go over the host.
    Shape(None, Side(2, 64, "NHD", (0, 0)), Side(1, 16, "HND", (0,)), "cuda_ipc"),
    Shape(None, Side(1, 16, "HND", (0,)), Side(1, 64, "NHD", (1,)), "auto"),
    Shape(None, Side(1, 16, "NHD", (1,)), Side(1, 16, "NHD", (0,)), "cuda_ipc"),
    Shape("kv-sharing", Side(1, 24, "NHD", (0,)), Side(1, 16, "HND", (1,)), "auto", kv_heads=1),
    # Sums by nccl.
    Shape(None, Side(2, 16, "HND", (0, 1)), Side(1, 64, "NHD", (1,)), "auto"),
    Shape(None, Side(1, 32, "NHD", (0,)), Side(2, 16, "HND", (1, 0)), "auto"),
    Shape("hybrid", Side(2, 16, "HND", (0, 1)), Side(2, 32, "NHD", (1, 0)), "auto", kv_heads=1),
)


def need(num_devices: int) -> None:
    if torch.cuda.device_count() < num_devices:
        pytest.skip(f"needs {num_devices} CUDA devices")


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet() as fleet:
        yield fleet


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tokens_and_kv_are_equal(fleet: Fleet, shape: Shape) -> None:
    need(1 + max(shape.prefill.devices + shape.decode.devices))
    bench = Bench(fleet, shape, fleet.pair(shape, prefill=STEPS, decode=STEPS))
    prompts = [prompt(num_tokens) for num_tokens in (2, 17, 64, 175, 301)]
    for answer in bench.decode_all(bench.prefill_all(prompts)):
        done = answer.decode.done
        assert done.num_external_tokens == done.num_prompt_tokens - 1
        assert {wire for load in done.loads for wire in load.transports} == {"cuda_ipc"}
    # Blocks that were in use before are zeroed, computed and loaded into anew.
    bench.check_all_free()
    answer = bench.run(prompt(175) + prompt(60, seed=1), 20)
    assert answer.decode.done.num_external_tokens > 0
    bench.check_all_free()


# ------------------------------------------------------------------ errors by name


def poll_for_ever(client: RpcClient) -> None:
    while True:
        client.poll(10)


def test_a_device_that_is_not_there_is_named() -> None:
    there = torch.cuda.device_count()
    config = engine_config(Role.ALONE, None, device=f"cuda:{there}")
    sentence = f"engine alone: device: expected one of {there} CUDA devices, got cuda:{there}"
    with EngineGroup(config) as group, pytest.raises(ConfigError, match=sentence):
        group.ready()


def test_a_wire_for_host_memory_is_refused() -> None:
    config = engine_config(Role.PREFILL, None, device="cuda", kv={"transport": "shm"})
    with EngineGroup(config) as group, pytest.raises(TransportUnavailable, match="shm: "):
        group.ready()


def test_ranks_end_when_one_of_them_dies_in_a_sum() -> None:
    """nccl itself notices nothing before its timeout of a minute."""
    need(2)
    config = engine_config(Role.ALONE, None, device="cuda", tp_size=2, num_blocks=200)
    assert config.collectives == "nccl"
    with EngineGroup(config) as group:
        with RpcClient(group.endpoint, connect_timeout_s=10) as client:
            client.send(Generate("r", prompt(100), 1500))
            while not any(isinstance(message, Token) for message in client.poll(60)):
                pass
            os.kill(group.pids[0], signal.SIGKILL)  # rank 1
            started_s = time.monotonic()
            with pytest.raises(PeerLost, match="the connection ended"):
                poll_for_ever(client)
        assert time.monotonic() - started_s < 8
        wait(list(group.sentinels), timeout=10)
        with pytest.raises(KvxferError, match=r"rank alone-1 \(killed by SIGKILL"):
            group.check()


def test_ranks_that_sum_by_nccl_end_in_order(made_folders: list[Path]) -> None:
    need(2)
    for _ in range(2):
        with EngineGroup(engine_config(Role.ALONE, None, device="cuda", tp_size=2)) as group:
            folder = made_folders[-1]
            with RpcClient(group.endpoint, connect_timeout_s=10) as client:
                client.send(Generate("r", prompt(100), 50))
                assert client.poll(60)  # in the middle of it
            started_s = time.monotonic()
        # Below the time after which a rank that hangs ends itself.
        assert time.monotonic() - started_s < 7
        assert not folder.exists()


# ------------------------------------------------------------------ the command


@pytest.mark.parametrize(
    ("num_devices", "arguments", "places"),
    [
        (1, ["--device", "cuda:0", "--prefill-tp", "1"], ("cuda:0", "cuda:0")),
        (
            2,
            ["--device", "cuda", "--prefill-devices", "1,0", "--decode-devices", "1"],
            ("cuda:1, cuda:0", "cuda:1"),
        ),
    ],
)
def test_pair(
    tmp_path: Path, num_devices: int, arguments: list[str], places: tuple[str, str]
) -> None:
    need(num_devices)
    facts = tmp_path / "facts.json"
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    ran = subprocess.run(
        [sys.executable, "-m", "kvxfer", "pair", *arguments, "--json", str(facts)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    first, *_, last = ran.stdout.splitlines()
    prefill, decode = places
    assert f" HND on {prefill}; " in first
    assert f" NHD on {decode}; " in first
    assert last.startswith("tokens equal to the single engine's: 10 of 10; KV equal")
    summary = msgspec.json.decode(facts.read_bytes())["summary"]
    assert summary["is_good"] is True
    assert summary["wires"] == ["cuda_ipc"]
