"""Short storms: whatever befalls four engines, each request ends once, with the right KV, and
nothing is left. ``scripts/chaos.py`` has the long ones.
"""

from __future__ import annotations

from collections import Counter
from copy import copy
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from kvxfer.engine.rpc import HEARTBEAT_S
from kvxfer.transfer.manifest import RankId
from tests.builders import EngineShape, build_regions
from tests.chaos import planted as planted_faults
from tests.chaos.content import answer_of, kv_of, names_of
from tests.chaos.finding import look_for
from tests.chaos.fleet import IMPATIENT, Networks
from tests.chaos.planted import PLANTED, Planted
from tests.chaos.play import Summary
from tests.chaos.running import weather
from tests.chaos.storm import (
    BETWEEN_HOSTS,
    CUTS,
    ON_ONE_HOST,
    SIEGE_S,
    STOPS,
    Injection,
    Kind,
    Plan,
    Twist,
    kinds_for,
    make_plan,
)
from tests.connector.rig import NIXL, UCX
from tests.helpers import needs_ucxx
from tests.two_hosts import two_networks_or_skip


def slow(wire: Any) -> Any:
    """A wire, or a parameter with its marks, as one that only long runs take."""
    values, marks = (wire.values, wire.marks) if hasattr(wire, "marks") else ((wire,), ())
    return pytest.param(*values, marks=(*marks, pytest.mark.slow))


_NOTHING = object()
FEW, MANY = 160, 300
"""Requests of a short storm, and those of a long one that are in flight at once."""
SHORT, USUAL = 1.2, 5.0
"""Stops of a second: as long as the shortest time-outs. Longer ones are in the long storms, and the
longest where nothing is asked but that nothing is left.
"""


@pytest.mark.parametrize("wire", ["shm", "zmq"])
def test_a_storm_leaves_nothing_behind(wire: str, tmp_path: Path) -> None:
    kinds = kinds_for(wire)
    plan = make_plan(7, FEW, kinds=kinds, every=FEW, longest_stop_s=SHORT, siege_s=SIEGE_S)
    summary = weather(plan, tmp_path / "storm", wire, in_flight=60)  # so that it lasts a while
    assert summary.problems() == []
    befallen = Counter(summary.injections) + Counter(summary.missed)
    assert befallen == Counter(kind.value for kind in kinds)
    assert summary.injections.keys() & {Kind.KILL_SCHEDULER, Kind.KILL_RANK, Kind.OTHER_LIFE}
    assert sum(summary.attacks.values()) > 0
    assert summary.ends["loaded"] > FEW / 10
    assert max(summary.lives.values()) > 1


def test_a_storm_in_which_next_to_nothing_moves_is_not_green() -> None:
    def problems(loaded: int, **faults: list[str]) -> list[str]:
        ends = {"loaded": loaded, "plain": FEW - loaded}
        summary = Summary(seed=1, wire="zmq", num_requests=FEW, ends=ends, **faults)  # type: ignore[arg-type]
        return summary.problems()

    assert problems(FEW // 10) == []
    (problem,) = problems(FEW // 10 - 1)
    assert problem == "shows little: expected 16 requests to load KV, got 15"
    assert problems(0, hung=["r1 at d0"]) == ["hung: r1 at d0"]


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["shm", "zmq", UCX, NIXL])
def test_a_long_storm_leaves_nothing_behind(wire: str, tmp_path: Path) -> None:
    plan = make_plan(3, 1500, kinds=kinds_for(wire), siege_s=SIEGE_S)
    summary = weather(plan, tmp_path / "storm", wire, in_flight=MANY)
    assert summary.problems() == []
    assert summary.ends["loaded"] > MANY / 3
    assert summary.in_flight >= MANY
    assert max(summary.held.values()) > MANY / 10
    assert sum(summary.mangled.values()) > 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wire", "settings", "counter"),
    [
        ("shm", {"load_in_step_s": 1.0}, "requests.in_step"),
        ("shm", {"verify": "sample"}, "verify.equal"),
        ("zmq", {"zmq_streams": 4}, "requests.loaded"),
        ("zmq", {"zmq_streams": 4, "verify": "all"}, "verify.equal"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else value,
)
def test_a_storm_with_settings_leaves_nothing_behind(
    wire: str, settings: dict[str, Any], counter: str, tmp_path: Path
) -> None:
    plan = make_plan(6, 800, kinds=kinds_for(wire), longest_stop_s=USUAL)
    summary = weather(plan, tmp_path / "storm", wire, settings=settings)
    assert summary.problems() == []
    assert summary.counts[counter] > 10


# ------------------------------------------------------------------ partitions


networks = pytest.fixture(two_networks_or_skip)


def test_engines_serve_again_when_the_network_is_whole(networks: Networks, tmp_path: Path) -> None:
    """Cut both ways, one way, the other way, and unplugged: longer than some time-outs."""
    plan = make_plan(12, FEW, kinds=CUTS, every=FEW, longest_stop_s=SHORT)
    summary = weather(plan, tmp_path / "storm", "zmq", networks=networks)
    assert summary.problems() == []
    assert summary.injections.keys() == {kind.value for kind in CUTS}


@pytest.mark.slow
@needs_ucxx
def test_an_engine_that_finds_no_network_to_start_with_is_started_again(
    networks: Networks, tmp_path: Path
) -> None:
    """UCX needs the device of ``host``, which has no cable when the engine is started."""
    plan = make_plan(13, 20, kinds=())
    unplugged = Injection(at=2, kind=Kind.UNPLUG, engine="p1", rank=0, duration_s=12.0)
    killed = Injection(at=2, kind=Kind.KILL_SCHEDULER, engine="p1", rank=0)
    plan = msgspec.structs.replace(plan, injections=(unplugged, killed))
    summary = weather(plan, tmp_path / "storm", "ucx", networks=networks)
    assert summary.problems() == []
    assert summary.lives["p1"] > 2


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["zmq", UCX])
def test_a_storm_between_hosts_leaves_nothing_behind(
    wire: str, networks: Networks, tmp_path: Path
) -> None:
    """The network between prefill and decode is cut, one way or both, and heals."""
    plan = make_plan(11, 600, kinds=BETWEEN_HOSTS, every=30, siege_s=SIEGE_S)
    summary = weather(plan, tmp_path / "storm", wire, networks=networks)
    assert summary.problems() == []
    cuts = [name for name in summary.injections if name.startswith("network")]
    assert len(cuts) >= len(CUTS)
    assert sum(summary.attacks.values()) > 0
    assert summary.ends["loaded"] > 30


# ------------------------------------------------------------------ flipped bits of KV

FLIPS = {"shm": "read:flip=0.1", "zmq": "chunk:flip=0.02"}
"""A chunk of a storm is 8 KiB, a load has many. The other streams are as ZeroMQ's."""


def flipped(wire: str, plan: Plan, folder: Path, verify: str) -> Summary:
    fault = FLIPS.get(wire, FLIPS["zmq"])
    return weather(plan, folder / "storm", wire, settings={"verify": verify}, faults=fault)


@pytest.mark.parametrize("wire", ["zmq", *(slow(each) for each in ("shm", UCX, NIXL))])
def test_kv_with_a_flipped_bit_is_corrupt_and_never_taken(wire: str, tmp_path: Path) -> None:
    """Nothing else befalls the engines."""
    summary = flipped(wire, make_plan(8, FEW, kinds=()), tmp_path, "all")
    assert summary.problems() == []
    assert summary.flipped["computed: corrupt"] > 5
    assert summary.ends["loaded"] > 20


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["shm", "zmq", UCX, NIXL])
def test_a_storm_with_flipped_bits_leaves_nothing_behind(wire: str, tmp_path: Path) -> None:
    plan = make_plan(9, 800, kinds=kinds_for(wire), longest_stop_s=USUAL)
    summary = flipped(wire, plan, tmp_path, "all")
    assert summary.problems() == []
    assert summary.flipped["computed: corrupt"] > 10


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["shm", "zmq"])
def test_without_digests_a_flipped_bit_is_not_found(wire: str, tmp_path: Path) -> None:
    """So it is said of it. The oracle sees each of them."""
    summary = flipped(wire, make_plan(8, FEW, kinds=()), tmp_path, "off")
    assert "computed: corrupt" not in summary.ends
    assert len([line for line in summary.wrong if "of which a bit was flipped" in line]) > 5


@pytest.mark.slow
@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_a_planted_fault_is_found(planted: Planted, tmp_path: Path) -> None:
    found = look_for(planted, tmp_path)
    assert found.by, planted.plant.__doc__


Owner = type | ModuleType


def insides() -> dict[tuple[Owner, str], object]:
    """Everything of the modules that planted faults change, and of their classes."""
    found = [room for room in vars(planted_faults).values() if isinstance(room, ModuleType)]
    rooms = [room for room in found if room.__name__.startswith("kvxfer.")]
    classes = {each for room in rooms for each in vars(room).values() if isinstance(each, type)}
    owners: list[Owner] = [*rooms]
    owners += [each for each in classes if each.__module__.startswith("kvxfer.")]
    return {
        (owner, name): copy(value) if isinstance(value, dict) else value
        for owner in owners
        for name, value in list(vars(owner).items())
    }


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_a_planted_fault_changes_what_is_there(planted: Planted) -> None:
    """What was renamed would be set beside it, and change nothing."""
    before = insides()
    planted.plant()
    try:
        changed = {
            (owner, name)
            for (owner, name), value in insides().items()
            if before.get((owner, name), _NOTHING) != value
        }
        assert changed, "it changes nothing"
        for owner, name in changed:
            bases = owner.__mro__[1:] if isinstance(owner, type) else ()
            known = (owner, name) in before or any(name in vars(base) for base in bases)
            assert known, f"{owner.__name__} has no {name}"
    finally:
        for owner, name in changed:
            if (owner, name) in before:
                setattr(owner, name, before[owner, name])
            else:
                delattr(owner, name)


def test_a_seed_is_the_whole_plan() -> None:
    assert make_plan(7, 300) == make_plan(7, 300)
    assert make_plan(7, 300) != make_plan(8, 300)
    plan = make_plan(7, 3000)
    assert {ask.twist for ask in plan.asks} == set(Twist)
    assert {each.kind for each in plan.injections} == set(ON_ONE_HOST)


def test_some_stops_are_longer_than_every_time_out_and_are_counted_apart() -> None:
    longest_s = max(*IMPATIENT.values(), 5 * HEARTBEAT_S)
    stops = [each for each in make_plan(7, 3000).injections if each.kind in STOPS]
    long = [each for each in stops if each.duration_s > longest_s]
    assert 0 < len(long) < len(stops) / 2
    assert all(each.name == f"{each.kind}, 10 s" for each in long)
    short = make_plan(7, 3000, longest_stop_s=SHORT).injections
    assert max(each.duration_s for each in short if each.kind in STOPS) <= SHORT


def test_only_who_gives_kv_in_chunks_has_some_mangled() -> None:
    plan = make_plan(7, 3000)
    mangled = [each for each in plan.injections if each.kind is Kind.MANGLE_CHUNKS]
    assert {each.engine for each in mangled} == {"p0", "p1"}
    assert Kind.MANGLE_CHUNKS in kinds_for("zmq")
    assert Kind.MANGLE_CHUNKS not in kinds_for("shm")


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
