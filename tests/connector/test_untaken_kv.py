"""What a source writes of KV that nobody could use, and how often. Times and lines by hand."""

from __future__ import annotations

import pytest

from kvxfer.connector.unused_kv import MAX_KINDS, UntakenKV, why_given_up
from kvxfer.transfer.wire import Reason


def test_the_first_is_told_at_once_and_the_others_once_a_minute() -> None:
    untaken = UntakenKV()
    assert untaken.note(10.0, "r0", "lapsed") == "request r0: KV not taken: lapsed"
    assert untaken.note(11.0, "r1", "lapsed") is None
    assert untaken.note(11.0, "r2", "other") == "request r2: KV not taken: other"
    assert untaken.note(69.9, "r3", "lapsed") is None
    assert untaken.note(70.0, "r4", "lapsed") == (
        "request r4: KV not taken: lapsed (2 more like this)"
    )


def test_a_client_can_neither_make_lines_nor_fill_the_memory() -> None:
    untaken = UntakenKV()
    line = untaken.note(0.0, "r\n0", "why\nERROR forged " + "x" * 9999)
    assert line is not None
    assert line.isprintable()
    assert len(line) < 2100
    for number in range(MAX_KINDS + 10):
        untaken.note(0.0, "r", f"{number}")
    assert untaken.note(0.0, "r", "one more") is None


@pytest.mark.parametrize(("address", "where"), [("10.0.0.2", "at 10.0.0.2"), ("", "on this host")])
def test_who_gave_it_up(address: str, where: str) -> None:
    assert why_given_up(address, Reason.TRANSPORT) == (
        f"the decode engine {where} cannot use it: transport; its log says what to set"
    )
    assert why_given_up(address, Reason.CANCELLED) is None
