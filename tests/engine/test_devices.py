"""Where ranks compute: decided by name and number, claimed by the rank, and kept to."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from kvxfer.engine.collectives import claim_device
from kvxfer.engine.config import EngineConfig, Role, place_ranks
from kvxfer.engine.group import EngineGroup
from kvxfer.engine.runner import Runner
from kvxfer.engine.steps import (
    CachedRequestData,
    DigestOrder,
    NewRequestData,
    SchedulerOutput,
)
from kvxfer.errors import ConfigError

ROOT = Path(__file__).parents[2]


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(role=Role.ALONE, engine_id="e", **settings)


# ------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("settings", "devices", "collectives"),
    [
        ({}, ("cpu",), "gloo"),
        ({"tp_size": 2}, ("cpu", "cpu"), "gloo"),
        ({"device": "cuda"}, ("cuda:0",), "gloo"),
        ({"device": "cuda", "tp_size": 2}, ("cuda:0", "cuda:1"), "nccl"),
        ({"device": "cuda:3"}, ("cuda:3",), "gloo"),
        # nccl refuses two ranks on one GPU.
        ({"device": "cuda:3", "tp_size": 2}, ("cuda:3", "cuda:3"), "gloo"),
        ({"device": "cuda", "devices": (5,)}, ("cuda:5",), "gloo"),
        ({"device": "cuda", "tp_size": 2, "devices": (1, 0)}, ("cuda:1", "cuda:0"), "nccl"),
        ({"device": "cuda", "tp_size": 2, "devices": (1, 1)}, ("cuda:1", "cuda:1"), "gloo"),
    ],
)
def test_every_rank_has_a_device(
    settings: dict[str, Any], devices: tuple[str, ...], collectives: str
) -> None:
    made = config(**settings)
    assert made.rank_devices == devices
    assert made.collectives == collectives


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"device": "gpu"}, "device: expected cpu, cuda or cuda:N, got 'gpu'"),
        ({"device": "cuda:"}, "device: expected cpu, cuda or cuda:N, got 'cuda:'"),
        ({"device": "cuda:-1"}, "device: expected cpu, cuda or cuda:N, got 'cuda:-1'"),
        ({"device": "cpu:0"}, "device: expected cpu, cuda or cuda:N, got 'cpu:0'"),
        ({"devices": (0,)}, "devices: expected none with device cpu, got 0; say device cuda"),
        (
            {"device": "cuda:0", "devices": (0,)},
            "devices: expected none with device cuda:0, got 0; say device cuda",
        ),
        (
            {"device": "cuda", "tp_size": 2, "devices": (0, 1, 2)},
            "devices: expected one for each of 2 ranks, got 0,1,2",
        ),
        ({"device": "cuda", "devices": (-1,)}, "devices: expected numbers from 0 on, got -1"),
    ],
)
def test_what_cannot_be_meant_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**settings)
    assert str(caught.value) == sentence


# ------------------------------------------------------------------ placement


@pytest.mark.parametrize(
    ("num_ranks", "num_devices", "taken", "placed"),
    [
        (1, 1, (), (0,)),
        (1, 1, (0,), (0,)),
        (2, 1, (0,), (0, 0)),
        (2, 4, (), (0, 1)),
        (2, 4, (0, 1), (2, 3)),
        (2, 3, (0, 1), (2, 0)),
        (2, 2, (0,), (1, 0)),
        (3, 2, (), (0, 1, 0)),
        (1, 4, (0, 2), (1,)),
        (1, 2, (7,), (0,)),  # taken by who will be told that it is not there
    ],
)
def test_placement_by_hand(
    num_ranks: int, num_devices: int, taken: tuple[int, ...], placed: tuple[int, ...]
) -> None:
    assert place_ranks(num_ranks, num_devices, taken) == placed


@given(st.integers(1, 16), st.integers(1, 8), st.sets(st.integers(0, 7)))
def test_placement_uses_free_devices_first_and_all_alike(
    num_ranks: int, num_devices: int, taken: set[int]
) -> None:
    placed = place_ranks(num_ranks, num_devices, taken)
    assert len(placed) == num_ranks
    assert set(placed) <= set(range(num_devices))
    free = set(range(num_devices)) - taken
    assert set(placed) >= free if num_ranks >= len(free) else set(placed) <= free
    counts = Counter({number: 0 for number in range(num_devices)}) + Counter(placed)
    assert max(counts.values()) - min(counts[number] for number in range(num_devices)) <= 1


def test_no_device_is_an_error() -> None:
    with pytest.raises(ConfigError, match="expected at least one CUDA device, got none"):
        place_ranks(1, 0)


# ------------------------------------------------------------------ ranks


def test_a_rank_refuses_a_device_that_is_not_there() -> None:
    there = torch.cuda.device_count()
    with pytest.raises(
        ConfigError, match=rf"^device: expected one of {there} CUDA devices, got cuda:{there + 5}$"
    ):
        claim_device(f"cuda:{there + 5}")


def test_the_cpu_is_always_there() -> None:
    assert claim_device("cpu") == torch.device("cpu")


def test_an_engine_without_its_devices_says_so_and_leaves_nothing(made_folders: list[Path]) -> None:
    with (
        EngineGroup(config(device="cuda", tp_size=2, devices=(90, 91))) as group,
        pytest.raises(ConfigError, match=r"engine e: device: expected one of \d+ CUDA devices, "),
    ):
        group.ready()
    (folder,) = made_folders
    assert not folder.exists()


def test_other_devices_take_other_processes() -> None:
    with EngineGroup(config()) as group:
        with pytest.raises(ValueError, match="device: expected cpu, which .* got cuda:1; start"):
            group.reconfigure(config(device="cuda:1"))
        assert group.ready().endpoint  # as it was


WATCHER = """
import time
from subprocess import DEVNULL, PIPE, Popen
from kvxfer.engine import collectives
collectives._PEER_GRACE_S = 0.2
# Each ends with this process at the latest, and has none of its pipes.
peers = [Popen(["cat"], stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL) for _ in range(2)]
collectives.end_with_peers([peer.pid for peer in peers], lambda: {is_ending})
time.sleep(0.1)
peers[1].kill()
time.sleep(2 if {is_ending} else 60)
"""


@pytest.mark.parametrize(("is_ending", "code"), [(False, 1), (True, 0)])
def test_a_rank_ends_soon_after_its_peer_unless_all_do(is_ending: bool, code: int) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WATCHER.format(is_ending=is_ending)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ran.returncode == code, ran.stderr
    assert ("another rank of this engine, has gone" in ran.stderr) is not is_ending


def test_a_peer_that_has_gone_before_is_noticed_too() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    code = (
        "import time\nfrom kvxfer.engine import collectives\ncollectives._PEER_GRACE_S = 0.2\n"
        f"collectives.end_with_peers([{gone.pid}], lambda: False)\ntime.sleep(60)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=200, check=False)
    assert ran.returncode == 1


# ------------------------------------------------------------------ what a step makes


class Factories(TorchFunctionMode):
    """Notes who makes a tensor out of nothing, without saying where."""

    MAKERS = frozenset(
        {torch.tensor, torch.empty, torch.zeros, torch.ones, torch.full, torch.arange}
    )

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in self.MAKERS and "device" not in (kwargs or {}):
            self.found.add(_caller(sys._getframe(1)))
        return func(*args, **(kwargs or {}))


def _caller(frame: FrameType | None) -> str:
    while frame is not None and "/kvxfer/" not in frame.f_code.co_filename:
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_a_step_makes_nothing_without_a_device(layout: str) -> None:
    """On a GPU it would be on the host. Step tables have some of theirs there, by contract."""
    runner = Runner(
        config(model="hybrid", layout=layout, block_size=24, num_blocks=20),
        tp_rank=0,
        incarnation=bytes(16),
        all_reduce=None,
    )
    tables = ((1, 2, 3, 4), (5, 6, 7, 8))
    new = NewRequestData(
        req_id="r", prompt_token_ids=tuple(range(90)), block_ids=tables, num_computed_tokens=0
    )
    cached = CachedRequestData(
        req_ids=("r",), new_block_ids=(None,), num_computed_tokens=(60,), new_token_ids=((),)
    )
    steps = (
        SchedulerOutput(scheduled_new_reqs=(new,), num_scheduled_tokens={"r": 60}),
        SchedulerOutput(
            scheduled_cached_reqs=cached,
            num_scheduled_tokens={"r": 30},
            zero_block_ids=(9, 10),
            digests=(DigestOrder("r", tables, 60),),
        ),
    )
    with Factories() as factories:
        torch.ones(1)
        outputs = [runner.execute(step) for step in steps]
    assert [len(output.samples) for output in outputs] == [0, 1]
    assert factories.found == {"", "rank_cache.py:step_tables"}
