"""The slow link: how long frames take, what is dropped, and that nothing of it is left."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvxfer.bench.slow_link import (
    QUEUE_S,
    LinkUnavailable,
    Queue,
    SlowLink,
    Speed,
    round_trip_ms,
    wire_nbytes,
)
from tests.bench.link_marks import needs_link

ROOT = Path(__file__).resolve().parents[2]
SLOW = Speed(bits_per_s=8e6, delay_s=0.005)  # a microsecond for each byte


def frame(nbytes: int, *, kind: int = 0, header: int = 0, segment: int = 0) -> bytes:
    """As a device gives it: ten bytes of its own before the Ethernet frame."""
    return struct.pack("<BBHHHH", 0, kind, header, segment, 0, 0) + bytes(nbytes)


def test_what_a_frame_takes_of_the_wire() -> None:
    assert wire_nbytes(frame(60)) == 60 + 24
    # ten segments of 1448 bytes after 66 of headers, which each of them needs
    assert wire_nbytes(frame(66 + 14480, kind=1, header=66, segment=1448)) == 10 * (1448 + 66 + 24)
    assert wire_nbytes(frame(66 + 14481, kind=1, header=66, segment=1448)) == (
        11 * (66 + 24) + 14481
    )


def test_frames_come_one_after_the_other_and_late() -> None:
    read, write = os.pipe()
    queue = Queue(SLOW, write)
    first, second = frame(976), frame(476)  # with what is around them 1000 and 500 us
    queue.take(first, 10.0)
    queue.take(second, 10.0)
    assert queue.due_s == pytest.approx(10.006)
    queue.deliver(10.0059)
    assert queue.num_carried == 0
    queue.deliver(10.0061)
    assert os.read(read, 4096) == first
    assert queue.due_s == pytest.approx(10.0065)
    queue.deliver(10.0075)
    assert os.read(read, 4096) == second
    assert (queue.num_carried, queue.num_dropped, queue.due_s) == (2, 0, None)
    assert queue.latest_s == pytest.approx(0.001)
    os.close(read)
    os.close(write)


def test_a_full_queue_drops() -> None:
    read, write = os.pipe()
    queue = Queue(SLOW, write)
    num_room = round(QUEUE_S / 0.001)
    for _ in range(num_room + 3):
        queue.take(frame(976), 1.0)
    assert queue.num_dropped == 2  # one more than there is room for is being sent
    queue.take(frame(976), 1.0 + QUEUE_S)
    assert queue.num_dropped == 2
    os.close(read)
    os.close(write)


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LinkUnavailable, match="expected root.*got user 1000"):
        SlowLink(SLOW)


@needs_link
def test_two_namespaces_see_each_other_late() -> None:
    link = SlowLink(Speed(bits_per_s=1e9, delay_s=0.005))
    try:
        assert 10 < round_trip_ms(link) < 200
        relayed = link.relayed()
        assert relayed.num_carried > 100
        assert relayed.num_dropped == 0
    finally:
        link.close()


HOLD = """
import time
from kvxfer.bench.slow_link import SlowLink, Speed
if __name__ == "__main__":
    link = SlowLink(Speed(1e9, 0.001))
    print(link.pid, flush=True)
    time.sleep(60)
"""


@needs_link
def test_nothing_is_left_of_a_script_that_was_killed(tmp_path: Path) -> None:
    script = tmp_path / "hold.py"
    script.write_text(HOLD)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert (pid := process.stdout.readline().strip())
        relay = Path("/proc", pid)
        assert relay.exists()
        process.send_signal(signal.SIGKILL)
    deadline_s = time.monotonic() + 240.0
    while is_running(relay):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def is_running(process: Path) -> bool:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
