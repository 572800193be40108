"""Short storms: whatever befalls four engines, each request ends once, with the right KV, and
nothing is left. ``scripts/chaos.py`` has the long ones.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvxfer.transfer.manifest import RankId
from tests.builders import EngineShape, build_regions
from tests.chaos.content import answer_of, kv_of, names_of
from tests.chaos.finding import look_for
from tests.chaos.planted import PLANTED, Planted
from tests.chaos.running import weather
from tests.chaos.storm import Kind, Twist, make_plan
from tests.connector.rig import NIXL, UCX

FEW = 160
SHORT = 1.2
"""Stops of a second: as long as the shortest time-outs. Longer ones are in the long storms."""


@pytest.mark.parametrize("wire", ["shm", "zmq"])
def test_a_storm_leaves_nothing_behind(wire: str, tmp_path: Path) -> None:
    plan = make_plan(5, FEW, every=FEW, longest_stop_s=SHORT)
    summary = weather(plan, tmp_path / "storm", wire)
    assert summary.problems() == []
    assert sum(summary.injections.values()) == len(Kind)
    assert summary.ends["loaded"] > FEW / 5
    assert max(summary.lives.values()) > 1


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["shm", "zmq", UCX, NIXL])
def test_a_long_storm_leaves_nothing_behind(wire: str, tmp_path: Path) -> None:
    summary = weather(make_plan(3, 1500), tmp_path / "storm", wire)
    assert summary.problems() == []
    assert summary.ends["loaded"] > 300


@pytest.mark.slow
@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_a_planted_fault_is_found(planted: Planted, tmp_path: Path) -> None:
    found = look_for(planted, tmp_path)
    assert found.by, planted.plant.__doc__


def test_a_seed_is_the_whole_plan() -> None:
    assert make_plan(7, 300) == make_plan(7, 300)
    assert make_plan(7, 300) != make_plan(8, 300)
    plan = make_plan(7, 3000)
    assert {ask.twist for ask in plan.asks} == set(Twist)
    assert {each.kind for each in plan.injections} == set(Kind)


def test_kv_says_whose_it_is() -> None:
    """Another token before, another place: other bytes; the same prefix: the same."""
    first, second = names_of((1, 2, 3, 4)), names_of((1, 2, 3, 5))
    assert first[:3].tolist() == second[:3].tolist()
    assert first[3] != second[3]
    assert len({*names_of((1, 1, 1, 1)).tolist()}) == 4
    assert answer_of((1, 2, 3), 2) != answer_of((1, 2, 4), 2)


def test_kv_differs_by_layer_plane_head_and_token() -> None:
    regions, _ = build_regions(EngineShape(num_kv_heads=3, inner_nbytes=16), RankId(0, 0))
    names = names_of(range(1, 40))
    rows = {bytes(row.numpy()) for region in regions for row in kv_of(names, region).flatten(0, 1)}
    assert len(rows) == len(regions) * 3 * len(names)
