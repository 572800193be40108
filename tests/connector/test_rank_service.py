"""What the IO thread of a rank does in one round."""

from __future__ import annotations

from collections import Counter
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvxfer.connector import rank_service
from kvxfer.connector.rank_service import RankService
from kvxfer.transports.visitors import TURN_S


class AtOnce:
    """A source that packs one chunk in each look at it."""

    counts: Counter[str] = Counter()

    def __init__(self, num_chunks: int) -> None:
        self.num_chunks = num_chunks
        self.order: list[str] = []

    @property
    def has_more(self) -> bool:
        return self.num_chunks > 0

    def poll(self) -> list[str]:
        self.num_chunks -= 1
        self.order.append("packed")
        return ["packed"]

    def on_completion(self, transport: object, completion: str) -> None:
        assert transport is self
        assert completion == "packed"
        self.order.append("left")


def _round(source: AtOnce) -> None:
    io = SimpleNamespace(guard=lambda call, *args: call(*args))
    RankService._poll_source(
        cast("Any", SimpleNamespace(io=io, source=source)), cast("Any", source)
    )


def clock_of(step_s: float) -> Any:
    """It goes on by so much with each look at it."""
    return SimpleNamespace(perf_counter=count(0.0, step_s).__next__)


def test_chunks_that_are_packed_at_once_leave_in_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_service, "time", clock_of(0.0))
    source = AtOnce(3)
    _round(source)
    assert source.order == ["packed", "left"] * 3


def test_but_no_more_of_them_than_a_turn_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_service, "time", clock_of(TURN_S))
    source = AtOnce(3)
    _round(source)
    assert source.order == ["packed", "left"]
