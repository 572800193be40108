"""Storms at real engines of vLLM: whatever befalls them, each request ends once, with the tokens of
one engine, and nothing is left. ``scripts/chaos.py --vllm`` has the long ones.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.storm import SIEGE_S, kinds_for, make_plan
from tests.helpers import needs_nixl
from tests.vllm.storm_fleet import KINDS, SHAPES, weather


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["shm", "zmq", pytest.param("nixl", marks=needs_nixl)])
def test_a_storm_leaves_nothing_behind(wire: str, tmp_path: Path) -> None:
    kinds = kinds_for(wire, KINDS)
    plan = make_plan(5, 300, fleet=SHAPES, kinds=kinds, every=15, siege_s=SIEGE_S)
    summary = weather(plan, tmp_path / "storm", wire)
    assert summary.problems() == []
    planned = {each.name for each in plan.injections}
    assert summary.injections.keys() | summary.missed.keys() == planned
    assert sum(summary.attacks.values()) > 0
    assert summary.ends["loaded"] > 50
    assert max(summary.lives.values()) > 1


def test_a_calm_day_brings_the_tokens_of_one_engine(tmp_path: Path) -> None:
    """Aborts in every state, parameters twice, late, and with other prompts; blocks run out."""
    plan = make_plan(5, 60, fleet=SHAPES, kinds=())
    summary = weather(plan, tmp_path / "storm", "zmq")
    assert summary.problems() == []
    assert summary.ends["loaded"] > 20


@pytest.mark.slow
def test_kv_with_a_flipped_bit_is_corrupt_and_never_taken(tmp_path: Path) -> None:
    plan = make_plan(6, 200, fleet=SHAPES, kinds=())
    settings, flips = {"verify": "all"}, "chunk:flip=0.05"
    summary = weather(plan, tmp_path / "storm", "zmq", settings=settings, faults=flips)
    assert summary.problems() == []
    assert summary.flipped["computed: corrupt"] > 10
