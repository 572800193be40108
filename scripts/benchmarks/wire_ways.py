"""A wire of kvxfer through its contract: one process gives, the other takes. No connector: a read
is submitted, and done when the wire says so.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from kvxfer.config import Config, load_config
from kvxfer.testing.peers import Context
from kvxfer.transfer.manifest import RankId, RankManifest
from kvxfer.transfer.plan import CopyClass, PullClass
from kvxfer.transports.base import (
    PeerGone,
    ReadBroke,
    ReadDone,
    ReadRequest,
    SinkTransport,
    SourceTransport,
    TransferKey,
)
from kvxfer.transports.copy_thread import CopyThread
from kvxfer.transports.guard import Guard
from kvxfer.transports.registry import data_endpoints, make_sinks, make_sources, published_infos
from kvxfer.transports.wake_up import WakeUp
from scripts.benchmarks.devices import Devices, MatrixLoop, finish
from scripts.benchmarks.members import SINK, SOURCE, Member, Timing, timed
from scripts.benchmarks.pools import Request

READ_S = 30.0
LONGEST_WAIT_MS = 100  # a wire wakes us; this is for one that forgot
MATRIX_COLUMNS = {"cuda": 8192, "cpu": 256}


def poller_of(*watched: int | SourceTransport | SinkTransport) -> zmq.Poller:
    """For reading, of descriptors and of all sockets that these transports have now."""
    poller = zmq.Poller()
    for entry in watched:
        for target in (entry,) if isinstance(entry, int) else entry.pollables():
            poller.register(target, zmq.POLLIN)
    return poller


def wire_config(wire: str, **settings: object) -> Config:
    """The settings of a benchmark's wire."""
    chosen = {"transport": wire, "port": 0, "trust_network": True, **settings}
    return load_config(chosen, environ={}).config


def until_read(sink: SinkTransport, sleep: Callable[[], object]) -> None:
    """Until the wire says that its read is done. Raises RuntimeError where it breaks, TimeoutError.

    ``sleep`` waits for the wire, as an IO thread does.
    """
    deadline_s = time.monotonic() + READ_S
    while True:
        for completion in sink.poll():
            match completion:
                case ReadDone():
                    return
                case ReadBroke() | PeerGone():
                    raise RuntimeError(f"{sink.name}: {completion}")
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{sink.name}: expected the read done in {READ_S:g} s")
        sleep()


@dataclass(frozen=True, slots=True)
class Hands:
    """What a wire needs beside its memory."""

    copy_thread: CopyThread
    wake: WakeUp
    context: Context

    def close(self) -> None:
        """After the wire."""
        self.copy_thread.close()
        self.context.term()
        self.wake.close()


def new_hands() -> Hands:
    """For one wire."""
    hands = Hands(CopyThread(), WakeUp(), zmq.Context[zmq.Socket[bytes]]())
    Guard(hands.context, Config())
    return hands


class Giving(Member):
    """The source: its memory can be read, and it has nothing else to do."""

    def __init__(self, devices: Devices, nbytes: int) -> None:
        super().__init__({SOURCE: devices.source}, nbytes)
        memory = self.memories[SOURCE].local
        self._hands = new_hands()
        arguments = (self._hands.copy_thread, self._hands.wake, self._hands.context)
        self._sources = make_sources(memory, wire_config(devices.wire), *arguments)
        self.given = RankManifest(
            rank=RankId(0, 0),
            control_endpoint="tcp://127.0.0.1:1",
            data_endpoints=data_endpoints(self._sources),
            memories=published_infos(self._sources, memory),
            regions=(),
        )

    def manifest(self) -> RankManifest:
        """What a sink attaches to."""
        return self.given

    def run(self, way: str, request: Request) -> Timing:
        """Never: the sink reads."""
        raise NotImplementedError(f"{way}: the sink reads by itself")

    def close(self) -> None:
        """Give everything back."""
        for source in self._sources.values():
            source.close()
        self._hands.close()
        super().close()


class Reader:
    """One sink's end of the wire; for one thread."""

    def __init__(self, memory: Member, config: Config, source: RankManifest) -> None:
        self._hands = new_hands()
        arguments = (self._hands.copy_thread, self._hands.wake, self._hands.context)
        sinks = make_sinks(memory.memories[SINK].local, config, *arguments)
        self._sink = sinks[config.transport]
        self._sink.attach(source)
        self._source = source
        self._poller = poller_of(self._hands.wake.fd, self._sink)
        self._num_reads = 0
        # A connector has its classes from a plan, so a wire knows them again
        self._classes: dict[Request, tuple[CopyClass, PullClass]] = {}

    def read_request(self, request: Request) -> ReadRequest:
        """A new read of it; kernels that it needs are compiled."""
        self._num_reads += 1
        if request not in self._classes:
            self._classes[request] = request.copy_class()
            self._sink.prepare(self._classes[request][:1])
        copy_class, pull = self._classes[request]
        return ReadRequest(
            key=TransferKey(self._num_reads.to_bytes(16), b"bench-sink-bench", "pp0tp0", "pp0tp0"),
            source=self._source,
            classes=(copy_class,),
            pull_classes=(pull,),
            source_ids=(tuple(request.source_ids.tolist()),),
            sink_ids=(tuple(request.sink_ids.tolist()),),
            chunk_nbytes=0,
        )

    def submit(self, asked: ReadRequest) -> None:
        """Begin."""
        self._sink.submit_read(asked)

    def wait(self) -> None:
        """Until the wire says that the read is done, as an IO thread waits: asleep."""
        until_read(self._sink, self._sleep)

    def _sleep(self) -> None:
        if self._hands.wake.fd in dict(self._poller.poll(LONGEST_WAIT_MS)):
            self._hands.wake.clear()

    def close(self) -> None:
        """Unmap, and end its threads."""
        self._sink.close()
        self._hands.close()


@dataclass(frozen=True, slots=True)
class Disturbed:
    """A matrix loop while pulls follow each other: its time, that of it alone, and the pulls' GB/s.

    ``programs`` 0: no pulls.
    """

    loop: str
    programs: int
    taken_ms: tuple[float, ...]
    alone_ms: float
    gbps: float


class Taking(Member):
    """The sink."""

    def __init__(self, devices: Devices, nbytes: int, settings: dict[str, object]) -> None:
        super().__init__({SINK: devices.sink}, nbytes)
        self._wire = devices.wire
        self._settings = settings
        self._source: RankManifest | None = None
        self._reader: Reader | None = None

    def attach(self, source: RankManifest) -> None:
        """Map the source's memory."""
        self._source = source
        self._reader = Reader(self, wire_config(self._wire, **self._settings), source)

    def run(self, way: str, request: Request) -> Timing:
        """From the submitted read to ReadDone."""
        reader = self._attached()
        asked = reader.read_request(request)
        self.flush()
        return timed(lambda: reader.submit(asked), reader.wait)

    def disturb(
        self, request: Request, rows: int, widths: list[int], rounds: int
    ) -> list[Disturbed]:
        """A matrix loop on this process's GPU, alone and beside pulls of several widths."""
        device = self.memories[SINK].device
        loop = MatrixLoop(device, rows, MATRIX_COLUMNS[device.type])
        loop.run_ms()
        alone_ms = statistics.median(loop.run_ms() for _ in range(rounds))
        found: list[Disturbed] = []
        for programs in widths:
            if not programs:
                taken = tuple(loop.run_ms() for _ in range(rounds))
                found.append(Disturbed(loop.name, 0, taken, alone_ms, 0.0))
                continue
            settings = self._settings
            if self._wire == "cuda_ipc":
                settings = {**settings, "launch_programs": programs}
            reader = Reader(self, wire_config(self._wire, **settings), self._attached_source())
            try:
                taken, gbps = _beside_pulls(loop, reader, request, rounds)
            finally:
                reader.close()
                finish(device)
            found.append(Disturbed(loop.name, programs, taken, alone_ms, gbps))
        return found

    def _attached(self) -> Reader:
        if self._reader is None:
            raise RuntimeError("sink: expected attach before run")
        return self._reader

    def _attached_source(self) -> RankManifest:
        if self._source is None:
            raise RuntimeError("sink: expected attach before disturb")
        return self._source

    def close(self) -> None:
        """Give everything back."""
        if self._reader is not None:
            self._reader.close()
        super().close()


def _beside_pulls(
    loop: MatrixLoop, reader: Reader, request: Request, rounds: int
) -> tuple[tuple[float, ...], float]:
    """The loop's times while another thread pulls without a pause, and the pulls' GB/s."""
    pulling, over = threading.Event(), threading.Event()
    speeds: list[float] = []

    def pull() -> None:
        num_done, started_s = 0, time.perf_counter()
        while not over.is_set():
            asked = reader.read_request(request)
            reader.submit(asked)
            pulling.set()
            reader.wait()
            num_done += 1
        speeds.append(num_done * request.nbytes / (time.perf_counter() - started_s) / 1e9)

    reader.submit(reader.read_request(request))
    reader.wait()  # the first one may compile
    thread = threading.Thread(target=pull)
    thread.start()
    try:
        pulling.wait(READ_S)
        taken = tuple(loop.run_ms() for _ in range(rounds))
    finally:
        over.set()
        thread.join()
    if not speeds:
        raise RuntimeError("pulls: expected some beside the matrix loop, they broke")
    return taken, speeds[0]
