"""What is written of KV that was not used, and how often. Times and lines by hand."""

from __future__ import annotations

import logging

import pytest

from kvxfer.connector.records import SourceRef
from kvxfer.connector.unused_kv import MAX_CHARS, MAX_KINDS, Line, UnusedKV
from kvxfer.transfer.wire import OfferRef

WARNING, ERROR = logging.WARNING, logging.ERROR


def source(engine_id: str = "p", endpoint: str = "tcp://10.0.0.1:5700") -> SourceRef:
    offer = OfferRef(b"n" * 16, b"s" * 16)
    return SourceRef(engine_id=engine_id, endpoint=endpoint, offer=offer, num_tokens=40)


def test_the_first_is_told_at_once_and_the_others_once_a_minute() -> None:
    unused = UnusedKV()
    first = unused.note(100.0, "r0", "peer_lost", "no word for 3 s", source())
    at = "(engine p at tcp://10.0.0.1:5700)"
    assert first == [
        Line(WARNING, f"request r0: KV not used: peer_lost: no word for 3 s {at}"),
    ]
    for second in range(1, 60):
        assert unused.note(100.0 + second, f"r{second}", "peer_lost", "x", source()) == []
        assert unused.due(100.5 + second) == []
    summary = Line(WARNING, f"KV not used: peer_lost: 59 more like this {at}")
    assert unused.due(160.0) == [summary]
    assert unused.due(160.0) == []
    # Within the next minute the others are counted again.
    assert unused.note(161.0, "r61", "peer_lost", "x", source()) == []
    assert unused.due(219.9) == []
    assert unused.due(220.0) == [
        Line(WARNING, f"KV not used: peer_lost: 1 more like this {at}"),
    ]
    # A minute without any, and the next one is told at length.
    assert unused.due(280.0) == []
    (again,) = unused.note(281.0, "r81", "peer_lost", "gone", source())
    assert again.text == f"request r81: KV not used: peer_lost: gone {at}"


def test_what_was_counted_comes_before_the_next_of_its_kind_when_nobody_asked() -> None:
    unused = UnusedKV()
    unused.note(0.0, "r0", "expired", "", source())
    unused.note(1.0, "r1", "expired", "", source())
    assert [line.text for line in unused.note(500.0, "r2", "expired", "", source())] == [
        "KV not used: expired: 1 more like this (engine p at tcp://10.0.0.1:5700)"
    ]


def test_reasons_and_peers_are_kinds_of_their_own() -> None:
    unused = UnusedKV()
    kinds = [
        ("peer_lost", source()),
        ("expired", source()),
        ("peer_lost", source("q")),
        ("peer_lost", source("p", "tcp://10.0.0.2:5700")),
        ("bad_params", None),
    ]
    for _ in range(2):
        told = [unused.note(0.0, "r", reason, "why", peer) for reason, peer in kinds]
    assert told == [[]] * 5
    assert len(unused.rest()) == 5
    assert unused.rest() == []
    offered = unused.note(0.0, "r", "role", "why", what="KV not offered")
    assert offered == [Line(WARNING, "request r: KV not offered: role: why")]


@pytest.mark.parametrize("reason", ["incompatible", "not_allowed", "transport"])
def test_a_pair_that_can_never_work_is_one_error(reason: str) -> None:
    unused = UnusedKV()
    (line,) = unused.note(0.0, "r0", reason, "dtype: source has x, sink has y", source())
    assert line.level == ERROR
    assert "r0: KV not used: " + reason + ": dtype: source has x, sink has y" in line.text
    assert ("later requests try again" in line.text) == (reason == "transport")
    assert unused.take_new_pairs() == 1
    assert unused.note(1.0, "r1", reason, "the same", source()) == []
    lines = unused.note(1000.0, "r2", reason, "the same", source())
    lines += unused.note(2000.0, "r3", reason, "the same", source())
    assert {line.level for line in lines} == {WARNING}
    assert unused.take_new_pairs() == 0
    # The other engine was configured anew, worked, and does not any more.
    unused.works(source())
    *_, line = unused.note(3000.0, "r4", reason, "dtype", source())
    assert line.level == ERROR
    assert unused.take_new_pairs() == 1


def test_pairs_are_errors_each() -> None:
    unused = UnusedKV()
    lines = [unused.note(0.0, "r", "incompatible", "x", source(f"p{i}")) for i in range(3)]
    assert [line.level for (line,) in lines] == [ERROR] * 3
    assert unused.take_new_pairs() == 3


def test_a_client_that_makes_engines_up_fills_neither_the_log_nor_the_memory() -> None:
    unused = UnusedKV()
    lines = [
        line
        for i in range(10 * MAX_KINDS)
        for reason in ("peer_lost", "not_allowed")
        for line in unused.note(0.0, "r", reason, "x", source(f"p{i}"))
    ]
    assert len(lines) <= 3 * MAX_KINDS
    assert sum(line.level == ERROR for line in lines) <= MAX_KINDS
    left_out = [line.text for line in unused.rest()]
    assert sum(int(text.split(": ")[2].split()[0]) for text in left_out) == 20 * MAX_KINDS - len(
        lines
    )


def test_a_line_is_one_line_whoever_wrote_its_parts() -> None:
    unused = UnusedKV()
    (line,) = unused.note(0.0, "r\nERROR all is lost", "plan", "\x1b[2J\u2028" + "y" * 9999, None)
    assert line.text.startswith(r"request r\nERROR all is lost: KV not used: plan: \x1b[2J\u2028yy")
    assert len(line.text) < MAX_CHARS + 20
