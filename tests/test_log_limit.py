"""Which of many like events are worth a line. Times and numbers by hand."""

from __future__ import annotations

import math

from kvxfer.log_limit import LogLimit


def test_events_are_said_once_a_minute_with_their_number() -> None:
    limit: LogLimit[str] = LogLimit()
    said = [limit.note("a", now_s) for now_s in (5.0, 5.0, 64.9, 65.0, 66.0, 1000.0)]
    assert said == [1, 0, 0, 3, 0, 2]
    assert limit.note("b", 1000.0) == 1


def test_what_was_left_out_is_due_after_a_minute_and_then_forgotten() -> None:
    limit: LogLimit[str] = LogLimit()
    for now_s in (0.0, 1.0, 2.0):
        limit.note("a", now_s)
    limit.note("b", 2.0)
    assert limit.due(59.9) == []
    assert limit.due(60.0) == [("a", 2)]
    assert limit.due(62.0) == []
    assert ("a" in limit, "b" in limit) == (True, False)
    assert limit.due(math.inf) == []
    assert len(limit) == 0


def test_of_too_many_kinds_the_others_are_not_said_until_a_minute_later() -> None:
    limit: LogLimit[int] = LogLimit(most_kinds=2)
    assert [limit.note(kind, 0.0) for kind in (1, 2, 3, 1)] == [1, 1, 0, 0]
    assert len(limit) == 2
    assert limit.note(3, 59.9) == 0
    assert limit.note(3, 60.0) == 1
