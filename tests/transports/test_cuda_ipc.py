"""The wire between GPUs, on GPUs: what a source's death does, what waits for what, what cannot be
had. That it moves the right bytes is in ``test_conformance.py`` and ``tests/connector``.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, Self

import msgspec
import numpy as np
import pytest
import torch

from kvxfer.errors import TransportUnavailable
from kvxfer.tensors.device_copy import CopySettings, DeviceCopier, Launched, flat_copy
from kvxfer.tensors.device_memory import Gpu
from kvxfer.tensors.shared_memory import boot_id
from kvxfer.transfer.costs import fit_direct_costs
from kvxfer.transfer.manifest import CudaIpcHandle
from kvxfer.transports import cuda_ipc_trial
from kvxfer.transports.cuda_ipc_trial import Timing, costs_of
from tests.builders import EngineShape
from tests.connector.conftest import stand_in_for_gpus
from tests.connector.rig import POISON, Engine, until

__all__ = ["stand_in_for_gpus"]  # a fixture, for tests with both sides in this process

GIB = 1 << 30
PAIRS = [pytest.param((0, 0), id="one GPU"), pytest.param((0, 1), id="two GPUs")]


@pytest.mark.parametrize(
    ("durations_s", "num_timed", "least_s"),
    [
        ([0.0001] * 20, 4, 0.0001),
        # The first ones are slower, and one now and then
        ([0.0009, 0.0002, 0.0001, 0.0004, 0.0001, 0.000105, 0.0001], 6, 0.0001),
        # No two alike
        ([0.0001 * 0.8**number for number in range(20)], 16, 0.0001 * 0.8**15),
        # Others' turns of 2 ms; the GPU is free at the ninth
        ([0.002] * 8 + [0.0001] * 12, 11, 0.0001),
        # 32 MiB over a slow link: after the fourth 20 ms are over
        ([0.008, 0.006, 0.007, 0.006, 0.001], 4, 0.006),
        ([0.003] * 20, 7, 0.003),
    ],
)
def test_a_trial_times_a_copy_until_it_was_not_disturbed(
    durations_s: list[float], num_timed: int, least_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock_s = 50.0
    left = list(durations_s)

    slept_s: list[float] = []
    stamps: list[object] = []
    copied_s: list[float] = []

    class Ending:
        """A stamp: of each two the second is over when the copy is."""

        def __init__(self) -> None:
            stamps.append(self)
            self.over_s = clock_s + (0.0 if len(stamps) % 2 else left.pop(0))

        def since_s(self, first: Self) -> float:
            copied_s.append(0.25 * (self.over_s - first.over_s) + 1e-4 * (len(copied_s) > 2))
            return copied_s[-1]

        def query(self) -> bool:
            nonlocal clock_s
            clock_s += 1e-6
            return clock_s >= self.over_s

        def synchronize(self) -> None:
            nonlocal clock_s
            slept_s.append(self.over_s - clock_s)
            clock_s = max(clock_s, self.over_s)

    monkeypatch.setattr(cuda_ipc_trial, "time", SimpleNamespace(perf_counter=lambda: clock_s))
    timing = cuda_ipc_trial.time_copy(lambda: Launched(None, 4096), Ending)
    assert timing.nbytes == 4096
    assert timing.seen_s == pytest.approx(least_s, abs=2e-6)
    assert timing.copied_s == min(copied_s)
    assert len(durations_s) - len(left) == num_timed
    # Watched for a millisecond at most, and not at all once all have taken longer
    timed_s = durations_s[:num_timed]
    watched_s = sum(timed_s) - sum(slept_s)
    if max(timed_s) < 0.001:
        assert not slept_s
    elif min(timed_s) > 0.001:
        assert watched_s == pytest.approx(0.001, abs=2e-6)


def test_a_gpu_that_others_use_makes_a_link_late_and_not_slow() -> None:
    """Copies of 10 and 12 us, each after two milliseconds of others' turns."""
    large, small = (1 << 20, 12e-6), (1 << 16, 10e-6)
    timings = [Timing(nbytes, copied_s + 2e-3, copied_s) for nbytes, copied_s in (large, small)]
    costs = costs_of(*timings)
    assert costs.bytes_per_s == fit_direct_costs(small, large).bytes_per_s > 1e11
    assert costs.latency_s == pytest.approx(2e-3, rel=0.01)
    quick = costs_of(Timing(*large, 1e-6), Timing(1 << 16, 1e-9, 1e-6))
    assert quick.latency_s == 0


@pytest.fixture
def gpus(request: pytest.FixtureRequest) -> tuple[torch.device, torch.device]:
    source, sink = request.param
    if max(source, sink) >= torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    return torch.device("cuda", source), torch.device("cuda", sink)


def _give(end: Connection, device: torch.device, nbytes: int) -> None:
    tensor = torch.full((nbytes,), 0x5A, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    end.send(Gpu(device).export(tensor))
    end.recv()


@contextmanager
def giver(device: torch.device, nbytes: int) -> Iterator[tuple[Any, CudaIpcHandle]]:
    """A process with memory full of 0x5A, and the handle of it."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_give, args=(theirs, device, nbytes), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours.recv()
    finally:
        process.kill()
        process.join()
        ours.close()


@pytest.mark.gpu
@pytest.mark.parametrize("gpus", PAIRS, indirect=True)
def test_a_killed_source_harms_no_copy_that_runs(gpus: tuple[torch.device, torch.device]) -> None:
    source, sink = gpus
    with giver(source, 4 * GIB) as (process, handle):
        mapped = Gpu(sink).map(handle)
        landing = torch.zeros(4 * GIB, dtype=torch.uint8, device=sink)
        torch.cuda.synchronize(sink)
        # One program: half a second for 4 GiB; six times, because on a busy host processes end late
        copier = DeviceCopier(sink, CopySettings(launch_programs=1))
        bound = flat_copy(mapped.memory.address, landing.data_ptr(), 4 * GIB)
        ids, num_tokens = np.zeros(1, np.int64), bound.sink.tile.block_tokens
        stream = Gpu(sink).make_stream()
        copier.warm(bound, stream).synchronize()
        for _ in range(6):
            event = copier.copy(bound, ids, ids, (0, num_tokens), stream=stream).event
        assert event is not None
        time.sleep(0.02)
        assert not event.query()
        process.kill()
        process.join()
        assert not event.query()  # else it was over before the source was
        event.synchronize()
        # The driver keeps the memory of a dead process as long as it is mapped
        num_right = int((landing == 0x5A).sum())
        assert num_right == 4 * GIB
        mapped.close()
        with pytest.raises(TransportUnavailable, match="cuIpcOpenMemHandle"):
            Gpu(sink).map(handle)
    ones = torch.ones(1024, 1024, device=sink)
    assert float((ones @ ones).sum()) == 1024.0**3


BIG = EngineShape(num_kv_heads=8, num_layers=8, inner_nbytes=256, num_blocks=2048)  # 1 GiB
TOKENS = 2000 * 16


def _serve(end: Connection) -> None:
    with Engine(BIG, "prefill", fill=1, transport="cuda_ipc") as engine:
        for num_blocks in (4, 2000):
            name = end.recv()
            ref = engine.offer(name, num_blocks * 16, range(num_blocks))
            engine.compute(name)
            end.send(ref)
        end.recv()


@pytest.mark.gpu
def test_a_load_from_a_killed_source_fails_by_name_and_the_sink_goes_on() -> None:
    """The copy stands behind what the sink's engine computes, so it cannot end before the news."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    with Engine(BIG, "decode", fill=POISON, transport="cuda_ipc") as sink:
        process = context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        ours.send("first")
        sink.load("d0", ours.recv(), range(4), (0, 64))
        until(lambda: sink.received("d0"), 20)
        ours.send("p")
        ref = ours.recv()
        with torch.cuda.device(sink.pools[0].tensor.device):
            delay(10)  # two seconds: the system takes its time to close a dead process's sockets
            sink.load("d", ref, range(2000), (0, TOKENS))
        time.sleep(0.03)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        until(lambda: sink.received("d"), 10)
        assert sink.reasons("d") == {"peer_lost"}
        process.join()
        ours.close()
    with (
        Engine(BIG, "prefill", fill=2, transport="cuda_ipc") as source,
        Engine(BIG, "decode", fill=POISON, transport="cuda_ipc") as sink,
    ):
        ref = source.offer("p", 64, range(4))
        source.compute("p")
        sink.load("d", ref, range(4), (0, 64))
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {None}


def delay(times: int = 1) -> None:
    """A kernel on the current stream that takes a fifth of a second at 2 GHz, so many times."""
    torch.cuda._sleep(times * 400_000_000)  # type: ignore[no-untyped-call]


@pytest.mark.gpu
def test_a_pull_waits_for_the_step_that_computes_the_offered_tokens() -> None:
    with (
        Engine(BIG, "prefill", fill=1, transport="cuda_ipc") as source,
        Engine(BIG, "decode", fill=POISON, transport="cuda_ipc") as sink,
    ):
        first = source.offer("p0", 64, range(4))
        source.compute("p0")
        sink.load("d0", first, range(4), (0, 64))
        until(lambda: sink.received("d0"), 20)
        ref = source.offer("p", 64, range(4))
        delay()
        source.pools[0].tensor.fill_(7)  # what the step computes, behind the delay
        source.compute("p")
        started_s = time.perf_counter()
        sink.load("d", ref, range(4, 8), (0, 64))
        until(lambda: sink.received("d"))
        assert time.perf_counter() - started_s > 0.05
        assert sink.reasons("d") == {None}
        moved = sink.pools[0].tensor
        assert int((moved == 7).sum()) == 64 * 8 * 256 * 2 * 8
        assert int((moved == 1).sum()) == 64 * 8 * 256 * 2 * 8


@pytest.mark.gpu
def test_a_pull_waits_for_the_last_step_that_writes_its_blocks() -> None:
    with (
        Engine(BIG, "prefill", fill=1, transport="cuda_ipc") as source,
        Engine(BIG, "decode", fill=POISON, transport="cuda_ipc") as sink,
    ):
        ref = source.offer("p", 64, range(4))
        source.compute("p")
        delay()
        sink.pools[0].tensor.fill_(9)  # a step that has been launched still writes everywhere
        sink.load("d", ref, range(4), (0, 64))
        until(lambda: sink.received("d"), 20)
        assert sink.reasons("d") == {None}
        torch.cuda.synchronize()
        moved = sink.pools[0].tensor
        assert int((moved == 1).sum()) == 64 * 8 * 256 * 2 * 8
        assert int((moved == 9).sum()) == moved.numel() - 64 * 8 * 256 * 2 * 8


@pytest.mark.gpu
def test_a_busy_compute_stream_of_the_sink_holds_no_pull_up() -> None:
    with (
        Engine(BIG, "prefill", fill=1, transport="cuda_ipc") as source,
        Engine(BIG, "decode", fill=POISON, transport="cuda_ipc") as sink,
    ):
        first, ref = (source.offer(name, 64, range(4)) for name in ("p0", "p"))
        source.compute("p0", "p")
        sink.load("d0", first, range(4), (0, 64))
        until(lambda: sink.received("d0"), 20)
        sink.load("d", ref, range(4), (0, 64))
        delay(10)  # the step in which the load is ordered
        started_s = time.perf_counter()
        until(lambda: sink.received("d"))
        assert time.perf_counter() - started_s < 0.5
        torch.cuda.synchronize()


@pytest.mark.gpu
def test_memory_without_a_handle_is_refused_by_name() -> None:
    script = (
        "import torch\n"
        "from kvxfer.tensors.device_memory import Gpu\n"
        "from kvxfer.errors import TransportUnavailable\n"
        "tensor = torch.zeros(64 << 20, dtype=torch.uint8, device='cuda:0')\n"
        "try:\n"
        "    Gpu(tensor.device).export(tensor)\n"
        "except TransportUnavailable as e:\n"
        "    print(e)\n"
    )
    environ = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "expandable segments" in done.stdout, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"boot_id": "elsewhere"}, "expected a peer on this host"),
        ({"handle": b"x" * 63}, "expected a handle of 64 bytes, got 63"),
        ({"nbytes": 1 << 40}, "got a mapping of"),
        ({"offset": -1}, "got a mapping of"),
        ({"offset": 1 << 40}, "got a mapping of"),
    ],
)
def test_a_handle_that_lies_is_refused(change: dict[str, Any], sentence: str) -> None:
    device = torch.device("cuda", 0)
    with giver(device, 64 << 20) as (_, handle):
        assert handle.boot_id == boot_id()
        with pytest.raises(TransportUnavailable, match=sentence):
            Gpu(device).map(msgspec.structs.replace(handle, **change))
        mapped = Gpu(device).map(handle)
        mapped.close()
        mapped.close()
