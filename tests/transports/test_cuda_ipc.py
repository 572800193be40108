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
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from kvxfer.errors import TransportUnavailable
from kvxfer.tensors.device_copy import (
    BoundCopy,
    CopySettings,
    DeviceCopier,
    Launched,
    flat_copy,
)
from kvxfer.tensors.device_memory import DeviceMemory, Gpu
from kvxfer.tensors.shared_memory import boot_id
from kvxfer.transfer.manifest import CudaIpcHandle
from kvxfer.transports import cuda_ipc_direct
from kvxfer.transports.cuda_ipc_direct import measure_copies
from tests.builders import EngineShape
from tests.connector.conftest import stand_in_for_gpus
from tests.connector.rig import POISON, Engine, until

__all__ = ["stand_in_for_gpus"]  # a fixture, for tests with both sides in this process

GIB = 1 << 30
PAIRS = [pytest.param((0, 0), id="one GPU"), pytest.param((0, 1), id="two GPUs")]


class Clocked:
    """A copier whose copies take so long on the GPU, in turn; the host sees each 2 ms later."""

    def __init__(self, durations_s: list[float]) -> None:
        self.gpu_s, self.host_s = 0.0, 50.0
        self._left = list(durations_s)
        self.num_waits = 0

    def copy(self, bound: BoundCopy, *_: object, **__: object) -> Launched:
        self.gpu_s += self._left.pop(0)
        side = bound.sink
        return Launched(None, side.addresses.size * side.tile.stride_block)

    def stamp(self, stream: object) -> Any:
        at_s = self.gpu_s
        return SimpleNamespace(
            at_s=at_s, since_s=lambda first: at_s - first.at_s, synchronize=self._synchronize
        )

    mark = stamp

    def _synchronize(self) -> None:
        self.num_waits += 1
        self.host_s += 0.002


@pytest.mark.parametrize(("nbytes", "copied_nbytes"), [(64 << 20, 32 << 20), (1 << 20, 1 << 20)])
def test_a_gpu_that_others_use_makes_a_link_late_and_not_slow(
    nbytes: int, copied_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rate is by the GPU's clock, of the copy that was least disturbed."""
    copier = Clocked([0.009, 1e-4, 0.002, 2e-4, 1e-5])
    monkeypatch.setattr(cuda_ipc_direct, "DeviceCopier", lambda *_: copier)
    clock = SimpleNamespace(perf_counter=lambda: copier.host_s)
    monkeypatch.setattr(cuda_ipc_direct, "time", clock)
    gpu: Any = SimpleNamespace(device=torch.device("cpu"), make_stream=lambda: None)
    costs = measure_copies(gpu, DeviceMemory(0, nbytes))
    assert costs.bytes_per_s == pytest.approx(copied_nbytes / 1e-4)
    assert costs.latency_s == pytest.approx(0.002)
    assert costs.message_s == 0
    assert copier.num_waits == 2  # each may take milliseconds beside a busy thread


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
        until(lambda: sink.received("d0"))
        ours.send("p")
        ref = ours.recv()
        with torch.cuda.device(sink.pools[0].tensor.device):
            delay(10)  # two seconds: the system takes its time to close a dead process's sockets
            sink.load("d", ref, range(2000), (0, TOKENS))
        time.sleep(0.03)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        until(lambda: sink.received("d"))
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
        until(lambda: sink.received("d0"))
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
        until(lambda: sink.received("d"))
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
        until(lambda: sink.received("d0"))
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
