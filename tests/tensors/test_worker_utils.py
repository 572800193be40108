"""The engine's memory, and when a step's residual is scattered."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.tensors.worker_utils import is_residual_scattered_for_sp, request_memory

GIB = 1 << 30


@dataclass
class Snapshot:
    total_memory: int
    free_memory: int


@dataclass
class Cache:
    gpu_memory_utilization: float


@pytest.mark.parametrize(
    ("total", "free", "share", "want"),
    [
        (80 * GIB, 79 * GIB, 0.5, 40 * GIB),
        (80 * GIB, 40 * GIB, 0.5, 40 * GIB),  # just enough
        (100, 100, 1.0, 100),
        (101, 100, 0.5, 51),  # 50.5
        (3, 1, 0.1, 1),
    ],
)
def test_request_memory(total: int, free: int, share: float, want: int) -> None:
    got = request_memory(Snapshot(total, free), Cache(share))
    assert (got, type(got)) == (want, int)


def test_too_little_free_memory_says_what_to_do() -> None:
    message = (
        "free memory: expected 72.00 GiB (gpu_memory_utilization 0.9 of 80.00 GiB), got 10.50 GiB; "
        "lower gpu_memory_utilization or end what else uses the device"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        request_memory(Snapshot(80 * GIB, 21 * GIB // 2), Cache(0.9))
    with pytest.raises(ValueError, match="free memory"):
        request_memory(Snapshot(101, 50), Cache(0.5))  # one byte short


@pytest.mark.parametrize("share", [0.0, -0.5, 1.01, float("nan")])
def test_a_share_is_a_share(share: float) -> None:
    message = re.escape(f"gpu_memory_utilization: expected a share in (0, 1], got {share}")
    with pytest.raises(ValueError, match=message):
        request_memory(Snapshot(GIB, GIB), Cache(share))


def settings(
    *,
    passes: dict[str, bool] | None = None,
    tp: int = 2,
    splitting_ops: list[str] | None = None,
    inductor: bool = False,
    sizes: list[int] | None = None,
) -> Any:
    passes = {"enable_sequence_parallelism": True} if passes is None else passes
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=tp),
        compilation_config=SimpleNamespace(
            pass_config=SimpleNamespace(**passes),
            splitting_ops=splitting_ops,
            use_inductor_graph_partition=inductor,
            compile_sizes=sizes,
        ),
    )


OPS = ["attention"]
OFF = {"enable_sequence_parallelism": False}


@pytest.mark.parametrize(
    ("config", "num_tokens", "want"),
    [
        (settings(passes=OFF), 8, False),
        (settings(passes=OFF), 7, False),  # nothing to divide
        (settings(passes={"enable_sp": False}), 8, False),
        (settings(tp=1), 7, False),
        (settings(), 8, True),  # full graph: no splitting operations
        (settings(splitting_ops=[]), 8, True),
        (settings(passes={"enable_sp": True}), 8, True),
        (settings(splitting_ops=OPS, inductor=True), 8, True),
        (settings(splitting_ops=OPS, inductor=True, sizes=[4]), 8, True),
        (settings(splitting_ops=OPS, sizes=[4, 8]), 8, True),
        (settings(splitting_ops=OPS, sizes=[4, 16]), 8, False),
        (settings(splitting_ops=OPS, sizes=[]), 8, False),
        (settings(splitting_ops=OPS), 8, False),
    ],
)
def test_residual_scattered(config: Any, num_tokens: int, want: bool) -> None:
    assert is_residual_scattered_for_sp(config, num_tokens) is want


@pytest.mark.parametrize("config", [settings(tp=4), settings(tp=4, splitting_ops=OPS, sizes=[6])])
def test_tokens_are_divided_among_the_ranks(config: Any) -> None:
    message = "num_input_tokens: expected a multiple of tensor_parallel_size 4 .*, got 6; pad the"
    with pytest.raises(ValueError, match=message):
        is_residual_scattered_for_sp(config, 6)


def test_a_pass_config_of_another_kind() -> None:
    with pytest.raises(
        ValueError, match="pass_config: expected enable_sp or enable_sequence_paral"
    ):
        is_residual_scattered_for_sp(settings(passes={}), 8)
