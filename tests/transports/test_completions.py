"""What a wire has to tell."""

from __future__ import annotations

from kvxfer.transports.completions import Completions


def test_what_is_told_is_taken_once_in_its_order_and_wakes() -> None:
    wakes: list[None] = []
    completions: Completions[int] = Completions(lambda: wakes.append(None))
    assert not completions
    completions.note(1)
    assert not wakes  # who notes is on his way to take it
    completions.tell(2)
    assert (len(completions), len(wakes)) == (2, 1)
    assert completions.since(1) == [2]
    taken = completions.take()
    completions.note(3)
    assert taken == [1, 2]
    assert completions.take() == [3]
    assert completions.take() == []
