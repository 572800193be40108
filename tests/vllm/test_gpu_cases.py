"""The comparison on GPUs (scripts/vllm_gpu), as far as it needs none: checksums, times, tables."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvxfer.bench.core import Report
from scripts.benchmarks.vllm_cases import Equality, Sample, leading, own_numbers, prompt
from scripts.benchmarks.vllm_engine import ConnectorTimes, MeasuredWorker
from scripts.benchmarks.vllm_report import goals_of, tables

HEADS, CHANNELS, TOKENS = 2, 6, 70


class Pool(MeasuredWorker):
    """An engine of which only the pools are there."""

    def __init__(self, views: list[Tensor], num_blocks: int) -> None:
        self._pools = views
        pool = SimpleNamespace(num_gpu_blocks=num_blocks)
        manager = SimpleNamespace(block_pool=pool)
        self._core = SimpleNamespace(scheduler=SimpleNamespace(kv_cache_manager=manager))

    def _views(self) -> list[Tensor]:
        return self._pools

    def of(self, block_ids: list[int], num_tokens: int) -> str:
        return self._checksum(block_ids, num_tokens)


def filled(
    kv: Tensor, block_tokens: int, ids: list[int], *, token_major: bool, split: int = 1
) -> Pool:
    """``kv`` [layer, token, head, channel] in the blocks ``ids``, noise in all others."""
    views = []
    num_blocks = max(ids) + 3
    for layer in kv:
        pool = torch.randn(num_blocks, HEADS, block_tokens, CHANNELS).to(kv.dtype)
        for token, cells in enumerate(layer):
            pool[ids[token // block_tokens], :, token % block_tokens] = cells
        if split > 1:  # a block is several kernel blocks
            parts = pool.reshape(num_blocks, HEADS, split, -1, CHANNELS).transpose(1, 2)
            pool = parts.flatten(0, 1).contiguous()
        if token_major:
            pool = pool.transpose(1, 2).contiguous().transpose(1, 2)
        views.append(pool)
    return Pool(views, num_blocks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_checksum_is_of_the_kv_and_not_of_its_place(dtype: torch.dtype) -> None:
    kv = torch.randn(3, TOKENS, HEADS, CHANNELS).to(dtype)
    first = filled(kv, 16, [4, 9, 2, 7, 1], token_major=False).of([4, 9, 2, 7, 1], TOKENS)
    assert filled(kv, 64, [3, 1], token_major=True).of([3, 1], TOKENS) == first
    ids = [5, 0, 2]
    assert filled(kv, 32, ids, token_major=False, split=2).of(ids, TOKENS) == first
    changed = kv.clone()
    changed[2, 69, 1, 5] += 1
    assert filled(changed, 64, [3, 1], token_major=True).of([3, 1], TOKENS) != first
    for swapped in (kv[[1, 0, 2]], kv[:, torch.arange(TOKENS) ^ 1], kv[:, :, [1, 0]], kv.flip(3)):
        assert filled(swapped, 64, [3, 1], token_major=True).of([3, 1], TOKENS) != first
    beyond = torch.cat((kv, torch.zeros(3, 5, HEADS, CHANNELS).to(dtype)), dim=1)
    assert filled(beyond, 64, [3, 1], token_major=True).of([3, 1], TOKENS) == first


def test_weights_follow_from_their_names() -> None:
    def made() -> nn.Module:
        model = nn.ModuleDict({"qkv": nn.Linear(64, 64, bias=False), "norm": nn.LayerNorm(4)})
        worker: Any = Pool([], 1)
        worker._model = lambda: model
        assert worker.do_seed_weights() == 64 * 64 + 8
        return model

    first, second = made().state_dict(), made().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert float(first["qkv.weight"].std()) == pytest.approx(0.03, rel=0.1)
    assert set(first["norm.weight"].tolist()) == {1.0}


class Slow:
    """A connector. It keeps no metadata, as kvxfer's."""

    def bind_connector_metadata(self, metadata: Any) -> str:
        return "bound"

    def start_load_kv(self) -> str:
        return "started"

    def get_finished(self, finished: set[str]) -> tuple[None, set[str]]:
        return None, {"a"}

    def get_kv_connector_stats(self) -> Any:
        return SimpleNamespace(data={"transfer_duration": [0.002]})


def test_loads_are_timed_from_order_to_report() -> None:
    times, connector = ConnectorTimes(), Slow()
    times.watch(connector)
    nixl = SimpleNamespace(reqs_to_recv={"a": 1, "b": 2})
    assert (connector.bind_connector_metadata(nixl), connector.start_load_kv()) == (
        "bound",
        "started",
    )
    connector.bind_connector_metadata(SimpleNamespace(orders=SimpleNamespace(loads=())))
    connector.start_load_kv()
    assert connector.get_finished(set()) == connector.get_finished(set()) == (None, {"a"})
    connector.get_kv_connector_stats()
    taken = times.take()
    assert [0 < seconds < 1 for seconds in taken["loads_s"]] == [True]
    assert taken["stats"] == [{"transfer_duration": [0.002]}]
    assert times.take() == {"loads_s": [], "stats": []}
    load = SimpleNamespace(request_id="a")
    connector.bind_connector_metadata(SimpleNamespace(orders=SimpleNamespace(loads=(load,))))
    assert connector.start_load_kv() == "started"
    connector.start_load_kv()  # a step that was told of no loads begins none
    connector.get_finished(set())
    assert len(times.take()["loads_s"]) == 1


def test_what_connectors_count() -> None:
    kvxfer: list[dict[str, Any]] = [
        {"counts": {"loads.nbytes": 4e6}, "times.total": {"9": 1}, "seconds": {"read": 0.004}},
        {
            "counts": {"loads.nbytes": 2e6},
            "times.total": {"7": 1},
            "seconds": {"read": 0.002, "verdict": 0.001, "queue": 0.001, "pickup": 0.003},
        },
        {"busy_s": {"0": 1.0}},
    ]
    found = own_numbers("kvxfer", kvxfer)
    assert found == pytest.approx(
        {
            **{"accepted_ms": 4.0, "queue_ms": 0.5, "read_ms": 3.0, "verdict_ms": 0.5},
            **{"pickup_ms": 1.5, "MB": 3.0, "loads": 2},
        }
    )
    lists = {"transfer_duration": [0.01, 0.03], "post_duration": [0.0, 0.01]}
    nixl = own_numbers("nixl", [{**lists, "num_descriptors": [4, 8], "bytes_transferred": [1, 3]}])
    expected = {"transfer_ms": 20.0, "post_ms": 5.0, "descriptors": 6, "MB": 2e-6, "loads": 2}
    assert nixl == pytest.approx(expected)
    assert own_numbers("kvxfer", []) == own_numbers("nixl", []) == {}


def test_tokens_up_to_the_first_that_differs() -> None:
    assert [leading(*pair) for pair in (([1, 2], [1, 2]), ([1, 2], [1, 3]), ([], [1]))] == [2, 1, 0]
    assert prompt(5, 1, 100) == prompt(5, 1, 100) != prompt(5, 2, 100)


def equality(**fields: Any) -> Equality:
    defaults: dict[str, Any] = {
        **{"connector": "kvxfer", "setups": "a to b", "tokens": 8, "kv_equal": True},
        **{"loaded_tokens": 8, "new_tokens": 4, "equal_to_decode": 4, "equal_to_prefill": 0},
        **{"equal_to_cold": 0, "distinct": 3},
    }
    return Equality(**(defaults | fields))


@pytest.mark.parametrize(
    ("fields", "is_like", "problem"),
    [
        ({}, True, None),
        ({"equal_to_decode": 3}, True, "tokens are equal up to number 3"),
        ({"equal_to_decode": 3}, False, None),
        ({"equal_to_decode": 0}, False, "tokens are equal up to number 0"),
        ({"equal_to_decode": 0, "equal_to_prefill": 4}, True, None),
        ({"kv_equal": False}, False, "the KV differs"),
        ({"kv_equal": None}, False, None),
        ({"loaded_tokens": 7}, True, "7 of 8 tokens were loaded"),
    ],
)
def test_what_must_be_equal(fields: dict[str, Any], is_like: bool, problem: str | None) -> None:
    assert equality(**fields).problem(is_like) == problem


def sample(connector: str, accepted_ms: float, **fields: Any) -> Sample:
    defaults: dict[str, Any] = {
        **{"pool": "fresh", "tokens": 8192, "together": 1, "is_first": False},
        **{"loads_s": (0.004,), "first_token_s": (0.03,), "step_s": 0.02, "local_s": 0.025},
    }
    own = {"accepted_ms": accepted_ms} if connector == "kvxfer" else {"transfer_ms": 70.0}
    return Sample(connector=connector, own=own, **(defaults | fields))


def test_goals_and_the_report(tmp_path: Path) -> None:
    samples = [
        sample("kvxfer", 20.0, is_first=True, loads_s=(0.04,)),
        sample("kvxfer", 4.0),
        sample("kvxfer", 6.0),
        sample("kvxfer", 6.5),
        sample("nixl", 0.0, loads_s=(0.08,), first_token_s=(0.1,)),
    ]
    goals = {goal.what: goal for goal in goals_of(samples)}
    assert [(goal.got_ms, goal.is_met) for goal in goals.values()] == [
        *[(6.0, False), (30.0, False), (40.0, False)],
    ]
    assert goals["first load of the pair"].bound_ms == pytest.approx(34.0)
    report = Report(tmp_path, "r", "T", {"command": "do"}, tables)
    report.records = {
        "engines": {},
        "samples": samples,
        "equalities": [equality()],
        "problems": ["it broke"],
    }
    report.write()
    text = next(tmp_path.glob("r_*.md")).read_text()
    assert "| fresh | 1 | 8,192 | 80.0 | 4.0 | 100.0 | 30.0 | 25.0 | 20.0 | 20.0 |" in text
    assert "| it broke |" in text
    assert "| kvxfer | a to b | 8 | equal | 4 of 4 | 0 of 4 | 0 of 4 | 3 |" in text
