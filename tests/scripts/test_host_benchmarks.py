"""The benchmarks of host memory: what they compare, what they say of it, and what they stop."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvxfer.bench import soak
from kvxfer.bench.connector import aim_of
from kvxfer.bench.core import Report, Timing
from kvxfer.bench.members import SINK, SOURCE, Devices, Usage, devices_for, usage_now
from kvxfer.bench.pools import LLAMA_8B, POISON, TINY, request_of
from kvxfer.bench.soak import MOST_GROWTH_NBYTES, Held, Soaked
from kvxfer.bench.sockets import SOCKETS, SocketSource, hear, receive_pieces, say, send_pieces
from kvxfer.bench.streams import PlainSink, plain
from kvxfer.bench.transfer import HOST_AIMS, host_aim
from kvxfer.bench.transfer_report import NIXL_DEFAULT, SHOWN, WATCHED, cells_of, speed_tables
from kvxfer.bench.workers import Worker


def timings(*durations_s: float) -> list[Timing]:
    return [Timing(duration_s, 0.0, 0.001) for duration_s in durations_s]


def test_a_raw_request_has_as_many_bytes_and_the_sources_layout() -> None:
    request = request_of(TINY, "HND16->NHD64", 80, 128)
    raw = request.raw()
    assert raw.layouts == "HND16->HND16"
    assert raw.nbytes == request.nbytes
    assert raw.sink.nbytes <= max(request.source.nbytes, request.sink.nbytes)


def test_ratios_are_to_the_same_quantile_of_the_socket() -> None:
    request = request_of(LLAMA_8B, "HND16->NHD64", 512, 512)
    taken = {
        "sockets": timings(0.02, 0.04, 0.08),
        "kvxfer zmq": timings(0.04, 0.05, 0.16),
        NIXL_DEFAULT: timings(0.1, 0.1, 0.1),
    }
    cells = {cell.way: cell for cell in cells_of(request, taken, lambda _: SOCKETS, host_aim)}
    ours = cells["kvxfer zmq"]
    assert ours.speed.gbps[1] == pytest.approx(0.064 * 1.048576 / 0.05)
    assert ours.ratios is not None
    assert ours.ratios[1] == pytest.approx(0.8)
    assert ours.beside_nixl == pytest.approx(2.0)
    assert ours.verdict == "0.6 met, NIXL's default met"
    slower = replace(ours, ratios=(0.5, 0.5, 0.5), beside_nixl=0.9)
    assert slower.verdict == "0.6 MISSED, NIXL's default MISSED"
    assert cells["sockets"].verdict == ""
    assert cells["sockets"].ratios == (1.0, 1.0, 1.0)


def test_aims_are_those_of_2048_blocks() -> None:
    for way, aim in HOST_AIMS.items():
        assert host_aim(request_of(LLAMA_8B, "HND16->HND16", 512, 512), way) == aim
        assert host_aim(request_of(LLAMA_8B, "HND16->HND16", 128, 512), way) is None
        assert host_aim(request_of(TINY, "HND16->HND16", 512, 512), way) is None


@pytest.mark.parametrize(
    ("devices", "total_ms", "said"),
    [
        (Devices("cpu", "cpu", "zmq"), 1.9, "2.0 ms met"),
        (Devices("cpu", "cpu", "zmq"), 2.1, "2.0 ms MISSED"),
        (Devices("cpu", "cpu", "ucx"), 0.1, ""),
        (Devices("cpu", "cpu", "shm"), 0.1, ""),
        (Devices("cuda:1", "cuda:0", "ucx"), 0.39, "0.4 ms met"),
        (Devices("cuda:1", "cuda:0", "zmq"), 0.39, ""),
        (Devices("cuda:1", "cuda:0", "cuda_ipc"), 0.31, "0.3 ms MISSED"),
    ],
)
def test_aims_of_short_requests(devices: Devices, total_ms: float, said: str) -> None:
    assert aim_of(devices, 128, "idle", total_ms=total_ms, ratio=1.0, gbps=1.0) == said


@pytest.mark.parametrize(
    ("wire", "num_tokens", "gbps", "said"),
    [
        ("ucx", 8192, 251.0, "250 GB/s met"),
        ("ucx", 8192, 249.0, "250 GB/s MISSED"),
        ("ucx", 1024, 249.0, ""),
        ("nixl", 8192, 251.0, ""),
    ],
)
def test_aims_of_long_requests_by_rate(wire: str, num_tokens: int, gbps: float, said: str) -> None:
    devices = Devices("cuda:1", "cuda:0", wire)
    assert aim_of(devices, num_tokens, "idle", total_ms=1.0, ratio=1.0, gbps=gbps) == said


def test_another_wire_on_the_same_devices() -> None:
    assert devices_for("cpu", "zmq") == Devices("cpu", "cpu", "zmq")


def test_a_report_is_written_case_by_case(tmp_path: Path) -> None:
    tables = speed_tables("speed", "Text.")
    report = Report(tmp_path, "speed", "Speed", {"command": "do"}, tables)
    request = request_of(TINY, "HND16->NHD64", 64, 64)
    report.lost["kvxfer ucx"] = "not installed"
    report.begin(request.name, SHOWN)
    for cell in cells_of(request, {"sockets": timings(0.1, 0.2)}, lambda _: SOCKETS, host_aim):
        report.add(WATCHED, cell)
    report.write()
    text = next(tmp_path.glob("speed_*.md")).read_text()
    assert "tiny HND16->NHD64 64 tokens | sockets" in text
    assert "| kvxfer ucx | not installed |" in text


# ------------------------------------------------------------------ what processes hold


def usage(rss_nbytes: int, num_threads: int = 3, num_descriptors: int = 9) -> Usage:
    return Usage(rss_nbytes, num_threads, num_descriptors)


def quarters(held: Held) -> Held:
    """With a look after each."""
    first, last = held.usages
    return replace(held, usages=(first, first, first, first, last))


def test_what_has_grown_is_named(tmp_path: Path) -> None:
    steady = Held("source", (usage(1 << 20), usage(1 << 20)))
    grown = Held("sink", (usage(0), usage(MOST_GROWTH_NBYTES + 1, 4, 10)))
    soaked = Soaked("zmq", 10, 100, 1.0, (steady, grown))
    assert soaked.leaks() == [
        f"sink: resident memory grew by {MOST_GROWTH_NBYTES + 1} bytes",
        "sink: 3 threads became 4",
        "sink: 9 descriptors became 10",
    ]
    report = Report(tmp_path, "soak_cpu", "Soak", {"command": "do"}, soak.tables)
    report.records["soaked"] = [replace(soaked, held=(quarters(steady), quarters(grown)))]
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
    """In another process."""

    def pid(self) -> int:
        return os.getpid()


def state_of(pid: int) -> str:
    """As in ps(1); a moment later, because a signal takes one."""
    time.sleep(0.05)
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


def test_a_paused_process_stands_still_and_ends_in_order() -> None:
    worker = Worker("named", Named)
    try:
        worker.ready()
        pid = worker.call(int, "pid")
        worker.pause()
        assert state_of(pid) == "T"
        worker.resume()
        assert worker.call(int, "pid") == pid
        worker.pause()
    finally:
        started_s = time.monotonic()
        worker.close()
    assert time.monotonic() - started_s < 5.0


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
