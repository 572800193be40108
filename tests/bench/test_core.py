"""Contenders in turns, and what is made of what they took."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvxfer.bench.core import (
    LEAST_ROUNDS,
    Case,
    Columns,
    ContenderLost,
    Timing,
    cell_of,
    cells_of,
    goal_text,
    line_of,
    measure,
    quantiles,
    table,
    timed,
)


def runs(log: list[str], name: str, *durations_s: float) -> tuple[str, Callable[[], Timing]]:
    """Takes these, one after the other, and the last for ever."""
    left = list(durations_s)

    def run() -> Timing:
        log.append(name)
        return Timing(left.pop(0) if len(left) > 1 else left[0])

    return name, run


def test_each_begins_as_often_as_the_others_and_the_warm_up_is_not_kept() -> None:
    log: list[str] = []
    taken = measure(
        dict([runs(log, "a", 9.0, 1.0), runs(log, "b", 9.0, 2.0), runs(log, "c", 9.0, 3.0)]),
        rounds=5,
        warm_rounds=1,
    )
    assert "".join(log) == "abcbcacababcbcacab"
    assert {name: [t.total_s for t in timings] for name, timings in taken.items()} == {
        "a": [1.0] * 5,
        "b": [2.0] * 5,
        "c": [3.0] * 5,
    }


def test_who_has_used_up_the_time_runs_no_more_after_the_least_rounds() -> None:
    log: list[str] = []
    taken = measure(dict([runs(log, "quick", 0.1), runs(log, "slow", 5.0)]), rounds=9, budget_s=4.0)
    assert len(taken["quick"]) == 9
    assert len(taken["slow"]) == LEAST_ROUNDS


def test_who_is_lost_is_out_and_the_others_go_on() -> None:
    log: list[str] = []

    def fail() -> Timing:
        raise ContenderLost("it ended")

    out: dict[str, str] = {}
    both = {"lost": fail, **dict([runs(log, "good", 1.0)])}
    taken = measure(both, rounds=4, lose=lambda name, why: out.update({name: str(why)}))
    assert out == {"lost": "it ended"}
    with pytest.raises(ContenderLost, match="it ended"):
        measure({"lost": fail}, rounds=4)
    assert list(taken) == ["good"]
    assert len(taken["good"]) == 4


def test_ratios_are_those_of_each_round() -> None:
    limit = [Timing(1.0), Timing(2.0), Timing(4.0)]
    ours = [Timing(2.0), Timing(2.0), Timing(16.0)]
    case = Case(name="a case", nbytes=8_000_000_000)
    found = {cell.way: cell for cell in cells_of(case, {"limit": limit, "ours": ours})}
    assert found["ours"].ratio == 0.5  # the median of 0.5, 1 and 0.25
    assert found["limit"].ratio == 1.0
    assert found["ours"].p50_ms == 2000.0
    assert found["ours"].gbps[1] == pytest.approx(4.0)
    assert found["ours"].num_rounds == 3
    assert cell_of(case, "ours", ours[:2], limit).ratio == 0.75  # a round that one left out: not
    assert cell_of(case, "ours", ours).ratio is None
    assert quantiles([1.0, 2.0, 3.0])[1] == 2.0


def test_each_way_has_its_limit_and_its_aim() -> None:
    taken = {"a": [Timing(1.0)], "b": [Timing(2.0)], "b of a": [Timing(4.0)]}
    limits = {"b of a": "b", "b": "b", "a": "none"}
    aims = {"b of a": 0.6, "a": 1.0}
    found = cells_of(Case(name="c", nbytes=1), taken, limits.__getitem__, aims.get)
    assert [(cell.ratio, cell.aim) for cell in found] == [
        *((None, ""), (1.0, ""), (0.5, "0.6 MISSED")),
    ]


def test_what_is_asked_and_what_is_waited_for_are_timed() -> None:
    done: list[str] = []
    timing = timed(lambda: done.append("post"), lambda: done.append("wait"))
    assert done == ["post", "wait"]
    assert 0 < timing.post_s <= timing.total_s
    alone = timed(lambda: None)
    assert alone.post_s == alone.total_s


@pytest.mark.parametrize(
    ("reached", "wanted", "said"),
    [(0.9, 0.9, "0.9 met"), (0.8, 0.9, "0.9 MISSED"), (None, 0.9, ""), (0.8, None, "")],
)
def test_goals(reached: float | None, wanted: float | None, said: str) -> None:
    assert goal_text(reached, wanted) == said


def test_a_column_says_what_it_has_of_a_record() -> None:
    columns: Columns[Timing] = {"name": lambda t: "x", "s": lambda t: f"{t.total_s:g}"}
    timings = [Timing(1.0), Timing(2.5)]
    found = table("times", "In seconds.", columns, timings)
    assert (found.header, found.rows) == (("name", "s"), (("x", "1"), ("x", "2.5")))
    assert line_of(columns, timings[1], ("name", "s")).split() == ["x", "2.5"]
