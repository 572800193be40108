import os
import signal
import time
from multiprocessing.connection import Connection

import pytest
import torch

from tests.helpers import assert_same_bytes, free_port, poisoned, run_pair


def say(conn: Connection) -> None:
    conn.send(b"hi")


def hear(conn: Connection) -> None:
    assert conn.recv() == b"hi"


def hear_the_end(conn: Connection) -> None:
    with pytest.raises(EOFError):
        conn.recv()


def leave(conn: Connection) -> None:
    conn.recv()  # or the other side could write into a closed pipe
    raise SystemExit(3)


def die(conn: Connection) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang(conn: Connection) -> None:
    time.sleep(600)


def test_run_pair() -> None:
    run_pair(say, hear)


def test_run_pair_by_spawn() -> None:
    run_pair(say, hear, method="spawn")


def test_run_pair_reports_the_side_that_failed() -> None:
    with pytest.raises(AssertionError, match=r"\(0, 3\)"):
        run_pair(say, leave)


def test_run_pair_expects_a_killed_side_and_the_other_sees_the_end() -> None:
    run_pair(die, hear_the_end, exit_codes=(-9, 0))


def test_run_pair_ends_a_side_that_hangs() -> None:
    start_s = time.monotonic()
    with pytest.raises(AssertionError, match=r"\(0, None\)"):
        run_pair(say, hang, timeout_s=15)
    assert time.monotonic() - start_s < 300


def test_poisoned() -> None:
    buffer = poisoned((2, 3), dtype=torch.float32)
    assert buffer.shape == (2, 3)
    assert bytes(buffer.numpy().tobytes()) == b"\xee" * 24


def test_assert_same_bytes() -> None:
    want = torch.zeros(2, 4, dtype=torch.uint8)
    got = want.clone()
    assert_same_bytes(got, want)
    got[1, 1], got[1, 3] = 7, 9
    with pytest.raises(AssertionError, match="2 of 8 bytes differ; first at 5: got 7, want 0"):
        assert_same_bytes(got, want)
    with pytest.raises(AssertionError, match=r"shape: got \(2, 4\), want \(8,\)"):
        assert_same_bytes(got, want.view(8))
    with pytest.raises(AssertionError, match=r"dtype: got torch.uint8, want torch.int8"):
        assert_same_bytes(got, want.view(torch.int8))


def test_assert_same_bytes_looks_at_bytes() -> None:
    nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
    assert_same_bytes(nan, nan.clone())
    with pytest.raises(AssertionError, match="1 of 4 bytes differ; first at 3: got 128, want 0"):
        assert_same_bytes(-zero, zero)


def test_free_port() -> None:
    assert 20_000 <= free_port() < 32_000
