"""The faults do what their specification says, and nothing else."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context

import msgspec
import pytest

from kvxfer.config import Config, load_config
from kvxfer.engine.config import EngineConfig
from kvxfer.errors import ConfigError
from kvxfer.testing.faults import Fault, injected, parse_faults
from kvxfer.transfer.wire import Reason
from kvxfer.transports.base import Progress, ReadBroke, ReadDone, ReadStopped
from tests.transports.pair import CONFIG, Pair, a_move, key_of


@contextmanager
def _pair(wire: str, *, source: str = "", sink: str = "") -> Iterator[Pair]:
    with injected(",".join(filter(None, (source, sink)))):
        pair = Pair(msgspec.structs.replace(CONFIG, transport=wire))
    try:
        pair.sink.attach(pair.manifest)
        yield pair
    finally:
        pair.close()


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("", ()),
        ("read:stall=5s;nth=2", (Fault("read:stall", 5.0, nth=2),)),
        ("read:stall=0.5s", (Fault("read:stall", 0.5),)),
        ("read:hold;nth=2", (Fault("read:hold", 0.0, nth=2),)),
        ("read:fail", (Fault("read:fail", 0.0),)),
        ("read:fail;nth=1", (Fault("read:fail", 0.0, nth=1),)),
        ("read:slow=50ms", (Fault("read:slow", 0.05),)),
        ("read:blank", (Fault("read:blank", 0.0),)),
        ("chunk:drop=0.1;seed=3", (Fault("chunk:drop", 0.1, seed=3),)),
        ("chunk:corrupt_header", (Fault("chunk:corrupt_header", 1.0),)),
        ("chunk:flip=0.1;seed=3", (Fault("chunk:flip", 0.1, seed=3),)),
        ("read:flip", (Fault("read:flip", 1.0),)),
        ("send:die_after=3", (Fault("send:die_after", 3.0),)),
        (
            "read:slow=1ms, chunk:duplicate=0.5",
            (Fault("read:slow", 0.001), Fault("chunk:duplicate", 0.5)),
        ),
    ],
)
def test_parses(text: str, faults: tuple[Fault, ...]) -> None:
    assert parse_faults(text) == faults


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("read", "expected one of read:stall, .*, got 'read'"),
        ("read:fail,", "expected one of .*, got ''"),
        ("read:stall", "read:stall: expected a duration"),
        ("read:stall=5", "read:stall: expected a duration such as 5s or 50ms, got '5'"),
        ("read:fail=1", "read:fail: expected no value, got '1'"),
        ("read:blank;nth=1", r"read:blank: expected options \[\] with whole numbers"),
        ("chunk:drop=2", "chunk:drop: expected a probability from 0 to 1, got '2'"),
        ("chunk:drop=nan", "chunk:drop: expected a probability"),
        ("send:die_after", "send:die_after: expected a whole number above 0"),
        ("send:die_after=0", "send:die_after: expected a whole number above 0, got '0'"),
        ("read:stall=5s;seed=1", r"expected options \['nth'\] with whole numbers, got 'seed=1'"),
        ("read:stall=5s;nth=1;nth=2", "expected options"),
        ("read:stall=5s;nth=0", "expected nth from 1, got 0"),
        ("chunk:drop;seed=x", "expected options"),
    ],
)
def test_refuses_what_it_does_not_understand(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"^faults: .*{sentence}"):
        parse_faults(text)


def test_no_setting_and_no_variable_injects_a_fault(caplog: pytest.LogCaptureFixture) -> None:
    for arguments, extra in (({"faults": "read:fail"}, {}), ({}, {"faults": "read:fail"})):
        with pytest.raises(ConfigError, match="^faults: expected a setting of kvxfer"):
            load_config(arguments, extra)
    assert load_config({}, {}, {"KVXFER_FAULTS": "send:die_after=1"}).config == Config()
    assert "KVXFER_FAULTS" in caplog.text
    assert not [name for name in EngineConfig.__struct_fields__ if "fault" in name]


def test_wires_are_whole_again_afterwards() -> None:
    with injected("read:fail"):
        pass
    with _pair("shm") as pair:
        pair.start(key_of(1), a_move())
        assert isinstance(pair.end(key_of(1)), ReadDone)


@pytest.mark.parametrize("wire", ["zmq", "shm"])
def test_nth_read_fails(wire: str) -> None:
    with _pair(wire, sink="read:fail;nth=2") as pair:
        for number in (1, 2, 3):
            pair.start(key_of(number), a_move())
            end = pair.end(key_of(number))
            if number == 2:
                assert end == ReadBroke(key_of(2), Reason.READ_FAILED, "fault: read:fail")
            else:
                assert isinstance(end, ReadDone)


@pytest.mark.parametrize("wire", ["zmq", "shm"])
def test_read_stalls_and_goes_on(wire: str) -> None:
    with _pair(wire, sink="read:stall=300ms") as pair:
        started_s = time.monotonic()
        pair.start(key_of(1), a_move())
        assert isinstance(pair.end(key_of(1)), ReadDone)
        assert time.monotonic() - started_s >= 0.3
        assert pair.content() == pair.expected(a_move())


@pytest.mark.parametrize("wire", ["zmq", "shm"])
def test_stalled_read_can_be_stopped(wire: str) -> None:
    with _pair(wire, sink="read:stall=60s") as pair:
        pair.start(key_of(1), a_move())
        time.sleep(0.05)
        pair.turn()
        assert pair.seen == []
        pair.sink.stop_read(key_of(1))
        assert isinstance(pair.end(key_of(1)), ReadStopped)


@pytest.mark.parametrize("wire", ["zmq", "shm"])
def test_held_reads_end_when_they_are_let_go(wire: str) -> None:
    with injected("read:hold;nth=2") as holds, _pair(wire) as pair:
        pair.start(key_of(1), a_move())
        assert isinstance(pair.end(key_of(1)), ReadDone)
        seen = list(pair.seen)
        pair.start(key_of(2), a_move())
        time.sleep(0.05)
        pair.turn()
        assert (pair.seen, len(holds)) == (seen, 1)
        holds.let_go()
        assert isinstance(pair.end(key_of(2)), ReadDone)
        assert len(holds) == 0
        assert pair.content() == pair.expected(a_move())


@pytest.mark.parametrize("wire", ["zmq", "shm"])
def test_held_read_can_be_stopped(wire: str) -> None:
    with injected("read:hold") as holds, _pair(wire) as pair:
        pair.start(key_of(1), a_move())
        pair.turn()
        assert len(holds) == 1
        pair.sink.stop_read(key_of(1))
        assert isinstance(pair.end(key_of(1)), ReadStopped)
        assert len(holds) == 0


@pytest.mark.parametrize(("wire", "num_pieces"), [("zmq", 9), ("shm", 1)])
def test_pieces_are_slow(wire: str, num_pieces: int) -> None:
    with _pair(wire, sink="read:slow=20ms") as pair:
        started_s = time.monotonic()
        pair.start(key_of(1), a_move())
        assert isinstance(pair.end(key_of(1)), ReadDone)
        assert time.monotonic() - started_s >= 0.02 * num_pieces
        assert pair.content() == pair.expected(a_move())


@pytest.mark.parametrize("wire", ["zmq", "shm"])
def test_blank_reads_end_well_and_write_nothing(wire: str) -> None:
    with _pair(wire, sink="read:blank") as pair:
        before = pair.content()
        pair.start(key_of(1), a_move())
        assert isinstance(pair.end(key_of(1)), ReadDone)
        assert pair.content() == before
        assert before != pair.expected(a_move())


@pytest.mark.parametrize(
    ("wire", "side", "fault", "num_flips"),
    [
        ("zmq", "source", "chunk:flip", 9),
        ("zmq", "sink", "read:flip", 9),
        ("tcp", "source", "chunk:flip", 9),
        ("shm", "sink", "read:flip", 1),
    ],
)
def test_a_flip_changes_one_bit_of_a_piece_and_is_logged_before_it_is_seen(
    wire: str, side: str, fault: str, num_flips: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvxfer.testing")
    with _pair(wire, **{side: f"{fault};seed=5"}) as pair:
        pair.start(key_of(1), a_move())
        assert isinstance(pair.end(key_of(1)), ReadDone)
        got, want = pair.content(), pair.expected(a_move())
    flips = [a ^ b for a, b in zip(got, want, strict=True) if a != b]
    assert len(flips) == num_flips
    assert all(flip.bit_count() == 1 for flip in flips)
    key = key_of(1)
    assert [each.args for each in caplog.records] == [
        (key.nonce.hex(), key.incarnation.hex())
    ] * num_flips


@pytest.mark.parametrize("wire", ["zmq", "shm"])
def test_a_rare_flip_leaves_most_pieces_alone(wire: str) -> None:
    with _pair(wire, source="chunk:flip=0", sink="read:flip=0") as pair:
        pair.start(key_of(1), a_move())
        assert isinstance(pair.end(key_of(1)), ReadDone)
        assert pair.content() == pair.expected(a_move())


@pytest.mark.parametrize("wire", ["zmq", "tcp"])
@pytest.mark.parametrize(
    ("fault", "reason"), [("drop", "unknown_key"), ("corrupt_header", "malformed")]
)
def test_lost_chunks_leave_the_read_open_and_the_next_one_whole(
    fault: str, reason: str, wire: str
) -> None:
    with _pair(wire, source=f"chunk:{fault}=0.1;seed=3") as pair:
        pair.start(key_of(1), a_move())
        pair.until(lambda: type(pair.said[-1]).__name__ == "Sent" if pair.said else False)
        pair.until(lambda: pair.sink.counts[reason] > 0)
        assert not any(isinstance(c, ReadDone) for c in pair.seen)
        assert any(isinstance(c, Progress) for c in pair.seen)
        pair.sink.stop_read(key_of(1))
        assert isinstance(pair.end(key_of(1)), ReadStopped)


@pytest.mark.parametrize("wire", ["zmq", "tcp"])
def test_duplicates_change_nothing(wire: str) -> None:
    with _pair(wire, source="chunk:duplicate") as pair:
        for number in range(1, 4):
            pair.start(key_of(number), a_move())
            assert isinstance(pair.end(key_of(number)), ReadDone)
            assert pair.content() == pair.expected(a_move())
        assert pair.sink.counts["duplicate"] + pair.sink.counts["unknown_key"] >= 27


def _send_until_dead() -> None:
    with _pair("zmq", source="send:die_after=3") as pair:
        pair.start(key_of(1), a_move())
        pair.end(key_of(1))


def test_source_kills_itself_in_mid_transfer() -> None:
    process = get_context("forkserver").Process(target=_send_until_dead)
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    process.close()
