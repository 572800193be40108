"""The benchmarks of host memory: what they compare, what they say of it, and what they stop."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import closing
from pathlib import Path

import pytest
import torch

from kvxfer.bench import soak
from kvxfer.bench.connector import aim_of
from kvxfer.bench.core import CELL, Report, Timing, cell_of, cells_of
from kvxfer.bench.members import SINK, SOURCE, Devices, Usage, devices_for, usage_now
from kvxfer.bench.pools import LLAMA_8B, POISON, TINY, request_of
from kvxfer.bench.soak import MOST_GROWTH_NBYTES, Held
from kvxfer.bench.sockets import SOCKETS, SocketSource, hear, receive_pieces, say, send_pieces
from kvxfer.bench.streams import PlainSink, plain
from kvxfer.bench.transfer import HOST_AIMS, host_aim
from kvxfer.bench.transfer_report import case_of, speed_tables
from kvxfer.bench.workers import Worker
from tests.connector.rig import until


def timings(*durations_s: float) -> list[Timing]:
    return [Timing(duration_s, 0.0, 0.001) for duration_s in durations_s]


def test_a_raw_request_has_as_many_bytes_and_the_sources_layout() -> None:
    request = request_of(TINY, "HND16->NHD64", 80, 128)
    raw = request.raw()
    assert raw.layouts == "HND16->HND16"
    assert raw.nbytes == request.nbytes
    assert raw.sink.nbytes <= max(request.source.nbytes, request.sink.nbytes)


def test_ratios_are_to_the_socket_of_the_same_round() -> None:
    request = request_of(LLAMA_8B, "HND16->NHD64", 512, 512)
    taken = {"sockets": timings(0.02, 0.04, 0.08), "kvxfer zmq": timings(0.04, 0.05, 0.16)}
    aim_of = {"kvxfer zmq": host_aim(request, "kvxfer zmq")}.get
    cells = {
        cell.way: cell for cell in cells_of(case_of(request), taken, lambda _: SOCKETS, aim_of)
    }
    ours = cells["kvxfer zmq"]
    assert ours.gbps[1] == pytest.approx(0.064 * 1.048576 / 0.05)
    assert ours.ratio == pytest.approx(0.5)
    assert ours.aim == "0.6 MISSED"
    assert (cells["sockets"].ratios, cells["sockets"].aim) == ((1.0, 1.0, 1.0), "")


def test_aims_are_those_of_2048_blocks() -> None:
    for way, aim in HOST_AIMS.items():
        assert host_aim(request_of(LLAMA_8B, "HND16->HND16", 512, 512), way) == aim
        assert host_aim(request_of(LLAMA_8B, "HND16->HND16", 128, 512), way) is None
        assert host_aim(request_of(TINY, "HND16->HND16", 512, 512), way) is None


CPU, PEER = ("cpu", "cpu"), ("cuda:1", "cuda:0")


@pytest.mark.parametrize(
    ("where", "wire", "num_tokens", "total_ms", "said"),
    [
        (CPU, "zmq", 128, 1.9, "2.0 ms met"),
        (CPU, "zmq", 128, 2.1, "2.0 ms MISSED"),
        (CPU, "ucx", 128, 0.1, ""),
        (CPU, "shm", 128, 0.1, ""),
        (PEER, "ucx", 128, 0.39, "0.4 ms met"),
        (PEER, "zmq", 128, 0.39, ""),
        (PEER, "cuda_ipc", 128, 0.31, "0.3 ms MISSED"),
        (PEER, "ucx", 8192, 4.2, "250 GB/s met"),
        (PEER, "ucx", 8192, 4.4, "250 GB/s MISSED"),
        (PEER, "ucx", 1024, 4.2, ""),
        (PEER, "nixl", 8192, 4.2, ""),
        (PEER, "cuda_ipc", 32768, 10.0, "0.87 of memcpy met"),
        (PEER, "cuda_ipc", 32768, 12.0, "0.87 of memcpy MISSED"),
    ],
)
def test_aims_of_loads(
    where: tuple[str, str], wire: str, num_tokens: int, total_ms: float, said: str
) -> None:
    request = request_of(LLAMA_8B, "HND16->HND16", num_tokens, num_tokens)
    cell = cell_of(case_of(request), "idle", timings(total_ms / 1e3), timings(0.01))
    assert aim_of(Devices(*where, wire), "idle", cell) == said


def test_another_wire_on_the_same_devices() -> None:
    assert devices_for("cpu", "zmq") == Devices("cpu", "cpu", "zmq")


def test_a_report_is_written_case_by_case(tmp_path: Path) -> None:
    tables = speed_tables("speed", "Text.")
    report = Report(tmp_path, "speed", "Speed", {"command": "do"}, tables)
    request = request_of(TINY, "HND16->NHD64", 64, 64)
    report.lost["kvxfer ucx"] = "not installed"
    report.begin(request.name)
    for cell in cells_of(case_of(request), {"sockets": timings(0.1, 0.2)}):
        report.add(CELL, cell)
    report.write()
    text = next(tmp_path.glob("speed_*.md")).read_text()
    assert "tiny HND16->NHD64 64 tokens | sockets" in text
    assert "| kvxfer ucx | not installed |" in text


# ------------------------------------------------------------------ what processes hold


def usage(rss_nbytes: int, num_threads: int = 3, num_descriptors: int = 9) -> Usage:
    return Usage(rss_nbytes, num_threads, num_descriptors)


def held(side: str, first: Usage, last: Usage) -> Held:
    """It changes in the last quarter."""
    return Held("zmq", 10, 100, 1.0, side, (first, first, first, first, last))


def test_what_has_grown_is_named(tmp_path: Path) -> None:
    steady = held("source", usage(1 << 20), usage(1 << 20))
    grown = held("sink", usage(0), usage(MOST_GROWTH_NBYTES + 1, 4, 10))
    assert steady.leaks() == []
    assert grown.leaks() == [
        f"sink: resident memory grew by {MOST_GROWTH_NBYTES + 1} bytes",
        "sink: 3 threads became 4",
        "sink: 9 descriptors became 10",
    ]
    report = Report(tmp_path, "soak_cpu", "Soak", {"command": "do"}, soak.tables)
    report.records["soaked"] = [steady, grown]
    report.write()
    text = next(tmp_path.glob("soak_cpu_*.md")).read_text()
    assert (
        "| zmq | source | 10 | 100 | 100.000 | 1024 | +0 | +0 | +0 | +0 | 3 -> 3 | 9 -> 9 | none |"
        in text
    )
    assert "| 0 | +0 | +0 | +0 | +256.001 | 3 -> 4 | 9 -> 10 | sink: resident" in text


def test_usage_sees_memory_threads_and_descriptors() -> None:
    before = usage_now()
    read, write = os.pipe()
    kept = bytearray(os.urandom(32 << 20))
    after = usage_now()
    assert after.num_descriptors == before.num_descriptors + 2
    assert after.rss_nbytes - before.rss_nbytes > 24 << 20
    assert after.num_threads == before.num_threads
    os.close(read)
    os.close(write)
    del kept


class Named:
    """In another process. ``closed``: a file that is there when this was closed."""

    def __init__(self, closed: Path | None = None) -> None:
        self._closed = closed

    def pid(self) -> int:
        return os.getpid()

    def close(self) -> None:
        if self._closed is not None:
            self._closed.touch()


def state_of(pid: int) -> str:
    """As in ps(1)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_ctrl_c_is_the_parents(capfd: pytest.CaptureFixture[str]) -> None:
    worker = Worker("named", Named)
    try:
        pid = worker.call(int, "pid")
        os.kill(pid, signal.SIGINT)
        assert worker.call(int, "pid") == pid
    finally:
        worker.close()
    assert "Traceback" not in capfd.readouterr().err


def test_a_paused_process_stands_still_and_ends_in_order(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    worker = Worker("named", Named, closed)
    try:
        worker.ready()
        pid = worker.call(int, "pid")
        worker.pause()
        until(lambda: state_of(pid) == "T")  # a signal takes a moment
        worker.resume()
        assert worker.call(int, "pid") == pid
        worker.pause()
    finally:
        worker.close()
    assert closed.exists()  # not where it was killed as it stood


# ------------------------------------------------------------------ sockets


def test_pieces_come_to_their_places() -> None:
    ours, theirs = socket.socketpair()
    given, taken = bytearray(range(200)), bytearray(200)
    with ours, theirs:
        say(ours, b"question")
        assert hear(theirs) == b"question"
        send_pieces(ours, memoryview(given), [30, 0, 170], 30)
        receive_pieces(theirs, memoryview(taken), [0, 100, 60], 30)
        ours.close()
        with pytest.raises(ConnectionError, match="end of the stream"):
            receive_pieces(theirs, memoryview(taken), [0], 30)
    assert taken[0:30] == given[30:60]
    assert taken[100:130] == given[0:30]
    assert taken[60:90] == given[170:200]
    assert not any(taken[30:60])
    assert not any(taken[130:])


def test_plain_sockets_share_the_bytes_of_a_request() -> None:
    request = request_of(TINY, "HND16->HND16", 96, 128)
    nbytes = request.nbytes + 1000
    host = Devices("cpu", "cpu", "")
    with closing(SocketSource(host, nbytes)) as source, closing(PlainSink(nbytes)) as sink:
        source.connect([sink.address()] * 4)
        sink.accept(4)
        for number in (1, 3, 4):
            sink.poison()
            assert sink.run(plain(number), request).total_s > 0
            given, taken = source.memories[SOURCE].tensor, sink.memories[SINK].tensor
            assert torch.equal(taken[: request.nbytes], given[: request.nbytes])
            assert (taken[request.nbytes :] == POISON).all()
            del given, taken
