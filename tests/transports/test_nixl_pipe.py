"""NIXL as a pipe: the contract between two processes, and what is its own in one."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest
import torch
import zmq

from kvxfer.config import Config
from kvxfer.errors import ProtocolError, TransportUnavailable
from kvxfer.transports import nixl_pipe
from kvxfer.transports.base import Wake
from kvxfer.transports.native_peers import LOOPBACK
from kvxfer.transports.nixl_agent import NixlAgent, Operation
from kvxfer.transports.nixl_pipe import GO, NixlPipe
from kvxfer.transports.pipe import PipeBroken, SinkLane, Slots, SourceLane
from tests.helpers import needs_nixl, run_pair, stop_process
from tests.transports.pipe_contract import (
    NUM_OPENS_ON_GPU,
    PipeCase,
    check_pipe,
    scenario_names,
    scenario_params,
)

SLOTS = Slots(num_slots=4, slot_nbytes=64 << 10)
OPERATIONS: list[Operation] = ["READ", "WRITE"]
CPU = torch.device("cpu")
KILLED = [name for name in scenario_names() if name.startswith("killed")]


# ------------------------------------------------------------------ the contract


def make_pipe(device: torch.device, wake: Wake, tls: str) -> NixlPipe:
    """``tls``: what UCX may take. "all" copies by itself on one host, "tcp" goes as between two."""
    os.environ["UCX_TLS"] = tls
    return NixlPipe(device, Config())


@needs_nixl
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    "scenario", [each for each in scenario_params() if each.values[0] not in KILLED]
)
def test_contract(scenario: str, operation: Operation) -> None:
    check_pipe(PipeCase(partial(make_pipe, tls="all"), way=operation), scenario)


@needs_nixl
@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["connections do not mix", "closed in the middle"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_contract_over_tcp(scenario: str, operation: Operation) -> None:
    check_pipe(PipeCase(partial(make_pipe, tls="tcp"), way=operation), scenario)


@needs_nixl
@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "operation", "tls"),
    [
        ("killed while receiving", "WRITE", "all"),
        ("killed while receiving", "READ", "tcp"),  # which the source answers by messages
        ("killed while sending", "WRITE", "tcp"),
        ("killed while sending", "READ", "all"),
    ],
)
def test_contract_when_peers_are_killed(scenario: str, operation: Operation, tls: str) -> None:
    check_pipe(PipeCase(partial(make_pipe, tls=tls), way=operation), scenario)


@needs_nixl
@pytest.mark.gpu
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("scenario", scenario_names())
def test_contract_on_a_gpu(scenario: str, operation: Operation) -> None:
    if (scenario, operation) == ("killed while receiving", "READ"):
        pytest.skip("UCX ends the source's process; no sink reads where a GPU is")
    case = PipeCase(
        partial(make_pipe, tls="all"), device="cuda:0", way=operation, num_opens=NUM_OPENS_ON_GPU
    )
    check_pipe(case, scenario)


# ------------------------------------------------------------------ two pipes in one process


class Two:
    """A source's pipe and a sink's, driven by hand."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self.source = NixlPipe(CPU, Config())
        self.sink = NixlPipe(CPU, Config())

    def open(self, slots: Slots = SLOTS, *, connect: bool = True) -> tuple[SourceLane, SinkLane]:
        taker = self.sink.open_sink(slots, self.operation)
        giver = self.source.open_source(taker.address, slots)
        if connect:
            taker.connected(giver.address)
        return giver, taker

    def progress(self) -> None:
        self.source.progress()
        self.sink.progress()

    def until(self, wanted: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + 240.0
        while not wanted():
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
            self.progress()

    def named(self, lane: SourceLane | SinkLane) -> list[int]:
        """What the next poll that names something names."""
        found: Sequence[int] = ()

        def poll() -> bool:
            nonlocal found
            found = lane.poll()
            return bool(found)

        self.until(poll)
        return list(found)

    def move(self, giver: SourceLane, taker: SinkLane, slot: int, nbytes: int, value: int) -> None:
        """One chunk, compared."""
        giver.staging(slot, nbytes).fill_(value)
        assert giver.send(slot, 0, nbytes) == ()
        assert self.named(giver) == [slot]
        taker.announced(slot, 0, nbytes, [])
        assert self.named(taker) == [slot]
        assert taker.payload(slot).tolist() == [value] * nbytes
        taker.free(slot)

    @property
    def in_order(self) -> tuple[NixlPipe, NixlPipe]:
        """First the one that reads or writes, which says that it is over."""
        is_read = self.operation == "READ"
        return (self.sink, self.source) if is_read else (self.source, self.sink)

    # What a pipe keeps to itself is read here and nowhere else

    @staticmethod
    def is_closing(pipe: NixlPipe) -> bool:
        """Whether ends that were closed go on, beside those that are open."""
        return bool(pipe._closing)

    @staticmethod
    def num_kept(pipe: NixlPipe) -> int:
        """How many stagings it has for the next connections."""
        return len(pipe._host._kept)

    @staticmethod
    def kept_nbytes(pipe: NixlPipe) -> int:
        return sum(each.memory.numel() for each in pipe._host._kept)

    def close(self) -> None:
        for pipe in self.in_order:
            pipe.close()


@pytest.fixture(params=OPERATIONS)
def two(request: pytest.FixtureRequest) -> Iterator[Two]:
    pytest.importorskip("nixl", reason="needs kvxfer[nixl]")
    pair = Two(request.param)
    yield pair
    pair.close()


def test_sizes_may_change_in_a_slot(two: Two) -> None:
    giver, taker = two.open()
    for value, nbytes in enumerate([65536, 65536, 1, 4097, 65536]):
        two.move(giver, taker, 1, nbytes, value)


def test_source_names_slots_in_the_order_of_send(two: Two) -> None:
    giver, _ = two.open()
    order = [2, 0, 3, 1]
    for slot in order:
        giver.send(slot, 0, 1 if slot else SLOTS.slot_nbytes)
    named: list[int] = []
    while len(named) < len(order):
        named += two.named(giver)
    assert named == order


@needs_nixl
def test_nothing_is_written_before_the_sink_knows_the_source() -> None:
    two = Two("WRITE")
    giver, taker = two.open(connect=False)
    giver.staging(0, 8).fill_(7)
    giver.send(0, 0, 8)
    for _ in range(20):
        two.progress()
        assert not giver.poll()
        time.sleep(0.001)
    taker.connected(giver.address)
    assert two.named(giver) == [0]
    two.close()


@needs_nixl
def test_staging_that_is_written_is_kept_until_the_source_has_closed() -> None:
    two = Two("WRITE")
    giver, taker = two.open()
    two.move(giver, taker, 0, 8, 1)
    taker.close()
    for _ in range(20):
        time.sleep(0.001)
        two.progress()
    assert not two.sink.is_idle  # the source lives and may still write
    giver.close()
    two.until(lambda: two.sink.is_idle)
    assert two.num_kept(two.sink) > 0
    assert two.sink.quarantined_nbytes == 0
    two.close()


@needs_nixl
def test_staging_that_a_sink_may_read_keeps_its_bytes() -> None:
    """A sink that stood still has an announcement in its hand when the source has given it up and
    serves others: what it reads then must not be theirs.
    """
    two = Two("READ")
    giver, taker = two.open()
    giver.staging(0, 4096).fill_(1)
    giver.send(0, 0, 4096)
    assert two.named(giver) == [0]
    giver.close()
    for value in (2, 3):
        two.move(*two.open(), 0, 4096, value)
    taker.announced(0, 0, 4096, [])
    assert two.named(taker) == [0]
    assert taker.payload(0).tolist() == [1] * 4096
    assert two.is_closing(two.source)
    taker.close()
    two.until(lambda: not two.is_closing(two.source))
    two.close()


@needs_nixl
def test_staging_that_nobody_may_have_written_is_given_back_at_once() -> None:
    two = Two("WRITE")
    _, taker = two.open(connect=False)
    taker.close()
    assert two.sink.is_idle
    two.close()


def test_peer_can_be_met_again_and_again(two: Two) -> None:
    for value in range(5):
        giver, taker = two.open()
        two.move(giver, taker, 0, 4096, value)
        taker.close()
        giver.close()
        two.until(lambda: two.sink.is_idle and two.source.is_idle)
    reached = two.sink if two.operation == "WRITE" else two.source
    assert two.num_kept(reached) == 1  # used again each time


def test_what_is_kept_serves_connections_of_other_sizes(two: Two) -> None:
    """Each trial chooses slots of its own."""
    reached = two.sink if two.operation == "WRITE" else two.source
    for num_slots in (33, 1, 40, 7, 64, 2, 63):
        slots = Slots(num_slots, 16 << 10)
        giver, taker = two.open(slots)
        for slot in {0, num_slots - 1}:
            two.move(giver, taker, slot, 4096, num_slots)
        taker.close()
        giver.close()
        two.until(lambda: two.sink.is_idle and two.source.is_idle)
        assert (two.num_kept(reached), two.kept_nbytes(reached)) == (1, 1 << 20)


@needs_nixl
def test_what_is_kept_is_no_more_than_a_connection_may_have() -> None:
    """A power of two, unless the setting says less."""
    pipe = NixlPipe(CPU, Config(staging_nbytes=3 << 20))
    for num_slots in (33, 130, 192):
        pipe.open_sink(Slots(num_slots, 16 << 10)).close()
        pipe.progress()
    assert Two.kept_nbytes(pipe) == (1 << 20) + (3 << 20)
    pipe.open_sink(Slots(2, 3 << 20)).close()  # where the other side has asked for it
    assert Two.kept_nbytes(pipe) == (1 << 20) + (3 << 20) + (8 << 20)
    pipe.close()


def test_close_of_a_pipe_closes_its_lanes(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    giver, taker = two.open()
    two.move(giver, taker, 0, 4096, 3)
    num_kept = len(nixl_pipe._quarantine)
    # A clock that stands: it is waited for as long as it takes
    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=time.sleep)
    monkeypatch.setattr(nixl_pipe, "time", clock)
    two.close()
    two.close()
    assert len(nixl_pipe._quarantine) == num_kept


@needs_nixl
def test_staging_that_a_living_source_may_write_outlives_the_pipe() -> None:
    num_kept = len(nixl_pipe._quarantine)
    two = Two("WRITE")
    giver, taker = two.open()
    two.move(giver, taker, 0, 8, 1)
    num_threads = len(os.listdir("/proc/self/task"))
    two.sink.close()
    assert [end.staging.slots for end in nixl_pipe._quarantine[num_kept:]] == [SLOTS]
    del nixl_pipe._quarantine[num_kept:]
    two.until(lambda: len(os.listdir("/proc/self/task")) < num_threads)  # but no agent does
    giver.close()
    two.source.close()


@needs_nixl
@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_goes_on_is_looked_at_until_it_is_over(
    monkeypatch: pytest.MonkeyPatch, operation: Operation
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    two = Two(operation)
    mover = two.source if operation == "WRITE" else two.sink

    def num_looks() -> int:
        slots = Slots(1, 16 << 20)
        taker = two.sink.open_sink(slots, operation)
        giver = two.source.open_source(taker.address, slots)
        taker.connected(giver.address)
        giver.send(0, 0, slots.slot_nbytes)
        if operation == "READ":
            taker.announced(0, 0, slots.slot_nbytes, [])
        lane = giver if operation == "WRITE" else taker
        looks = 0
        while True:
            two.progress()
            if lane.poll():
                return looks
            assert select.select(mover.fds(), [], [], 30.0)[0], f"{looks} looks, and no more"
            looks += 1

    # On a busy machine one may be over before it is looked at
    assert any(num_looks() for _ in range(5))
    two.close()


def test_parts_of_an_announcement_are_refused(two: Two) -> None:
    _, taker = two.open()
    with pytest.raises(ProtocolError, match="expected nothing beside its header, got 1"):
        taker.announced(0, 0, 8, [zmq.Frame(b"x")])


def test_a_source_connects_to_no_sink_that_has_no_way(two: Two) -> None:
    address = two.sink.open_sink(SLOTS, two.operation).address
    with socket.socket() as alone:
        with pytest.raises(TransportUnavailable, match="nixl: expected a way to the other side"):
            two.source.open_source(address, SLOTS, fd=alone.fileno())
        assert two.source.is_idle
    here, there = socket.socketpair()
    with here, there:
        two.source.open_source(address, SLOTS, fd=here.fileno())
    assert not two.source.is_idle


def test_addresses_that_are_none_are_refused(two: Two) -> None:
    with pytest.raises(TransportUnavailable, match="expected the address of another end"):
        two.source.open_source(b"\x93no", SLOTS)
    taker = two.sink.open_sink(SLOTS, two.operation)
    with pytest.raises(PipeBroken, match="expected the address of another end"):
        taker.connected(b"")


@needs_nixl
def test_a_note_whose_sender_is_no_text_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    agent = NixlAgent(LOOPBACK)
    bindings = agent._nixl.bindings
    settings = bindings.nixlAgentConfig()
    settings.useProgThread = True
    rogue = bindings.nixlAgent(b"kvxfer-\xff\xfe", settings)
    rogue.createBackend("UCX", {})
    rogue.genNotif(rogue.loadRemoteMD(agent.metadata()), GO)
    deadline_s = time.monotonic() + 120.0
    while "notes were lost" not in caplog.text:
        assert time.monotonic() < deadline_s
        assert agent.notes() == []
        time.sleep(0.001)
    agent.close()


def test_an_end_of_another_connection_is_refused(two: Two) -> None:
    giver, _ = two.open()
    other = two.sink.open_sink(SLOTS, two.operation)
    with pytest.raises(PipeBroken, match="expected a source that serves"):
        other.connected(giver.address)


def test_other_staging_is_refused(two: Two) -> None:
    taker = two.sink.open_sink(SLOTS, two.operation)
    smaller = Slots(SLOTS.num_slots, SLOTS.slot_nbytes // 2)
    with pytest.raises((PipeBroken, TransportUnavailable), match="expected staging of"):
        taker.connected(two.source.open_source(taker.address, smaller).address)


def test_path_names_the_operation(two: Two) -> None:
    assert two.sink.open_sink(SLOTS, two.operation).path("TCP") == two.operation


def test_without_nixl_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.setitem(sys.modules, "nixl._bindings", None)
    with pytest.raises(TransportUnavailable, match=r"pip install .nixl>="):
        NixlPipe(CPU, Config())


# ------------------------------------------------------------------ a peer that stands still


def _stopped_source(channel: Connection) -> None:
    pipe = make_pipe(CPU, lambda: None, "tcp")
    lane = pipe.open_source(channel.recv(), SLOTS)
    lane.staging(0, SLOTS.slot_nbytes).fill_(9)
    lane.send(0, 0, SLOTS.slot_nbytes)
    assert lane.poll() == [0]
    channel.send((lane.address, os.getpid()))
    channel.recv()
    lane.close()
    pipe.close()


def _sink_of_a_stopped_source(channel: Connection) -> None:
    pipe = make_pipe(CPU, lambda: None, "tcp")
    lane = pipe.open_sink(SLOTS, "READ")
    channel.send(lane.address)
    address, source = channel.recv()
    lane.connected(address)
    stop_process(source)  # also the thread of NIXL that would serve a READ meanwhile
    lane.announced(0, 0, SLOTS.slot_nbytes, [])
    begin_s = time.monotonic()
    while time.monotonic() < begin_s + 0.2:
        pipe.progress()
        assert not lane.poll()
        time.sleep(0.01)
    nixl_pipe.KEPT_S = 300.0
    lane.close()
    assert pipe.quarantined_nbytes == 0
    nixl_pipe.KEPT_S = 0.0
    pipe.progress()
    assert pipe.quarantined_nbytes == SLOTS.nbytes
    os.kill(source, signal.SIGCONT)
    begin_s = time.monotonic()
    while pipe.quarantined_nbytes:
        assert time.monotonic() < begin_s + 100.0
        pipe.progress()
        time.sleep(0.01)
    channel.send("done")
    pipe.close()


@needs_nixl
def test_a_read_without_an_end_keeps_its_staging_until_it_has_one() -> None:
    run_pair(_stopped_source, _sink_of_a_stopped_source, timeout_s=240.0)


@needs_nixl
def test_what_ucx_below_finds_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[str | None, dict[str, str]]] = []

    class Recorder:
        def __init__(self, *_settings: object) -> None:
            pass

        def createBackend(self, _name: str, chosen: dict[str, str]) -> None:  # noqa: N802
            found.append((os.environ.get("UCX_NET_DEVICES"), chosen))

    monkeypatch.setattr(import_module("nixl._bindings"), "nixlAgent", Recorder)
    before = dict(os.environ)
    devices: Sequence[str]
    for devices in ((), ("lo",), ("eth0", "mlx5_0:1")):
        NixlAgent(devices)
    assert os.environ == before
    monkeypatch.setenv("UCX_TCP_CONN_NB", "n")
    NixlAgent(())
    assert found == [
        (None, {"engine_config": "TCP_CONN_NB=y"}),
        (None, {"engine_config": "TCP_CONN_NB=y,NET_DEVICES=lo"}),
        # A comma ends a setting of that list
        ("eth0,mlx5_0:1", {"engine_config": "TCP_CONN_NB=y"}),
        (None, {}),
    ]
