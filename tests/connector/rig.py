"""Engines without a model: pools of known bytes, a WorkerConnector for each rank, steps by hand."""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from kvxfer.config import Config
from kvxfer.connector.control import ControlClient
from kvxfer.connector.given_offer import GivenOffer
from kvxfer.connector.io_thread import IoThread
from kvxfer.connector.peer import Peer
from kvxfer.connector.rank_service import RankService
from kvxfer.connector.records import (
    AbortLoad,
    ConnectorMetadata,
    EndOffer,
    Hold,
    KVConnectorStats,
    LoadReport,
    NewLoad,
    NewOffer,
    OfferBlocks,
    SourceRef,
    Unhold,
)
from kvxfer.connector.source import IsReady
from kvxfer.connector.worker_side import WorkerConnector
from kvxfer.tensors.shared_memory import PlainPool, SharedPool, make_pool
from kvxfer.testing.faults import injected
from kvxfer.transfer.manifest import EngineManifest, RankId
from kvxfer.transfer.windows import group_keepings, held_ids
from kvxfer.transfer.wire import BIND_TOKENS, CAPABILITIES, OfferRef, Reason
from kvxfer.transports.base import LocalMemory, SinkTransport
from kvxfer.transports.visitors import LOOK_S
from tests.builders import EngineShape, build_manifest, identity_of
from tests.conftest import HAS_CUDA
from tests.connector.inside import service_behind
from tests.helpers import needs_nixl, needs_ucxx
from tests.oracle import oracle_copy

STREAMS = {"zmq", "ucx", "nixl"}
UCX = pytest.param("ucx", marks=needs_ucxx)
NIXL = pytest.param("nixl", marks=needs_nixl)
WIRES = ["shm", "zmq", "cuda_ipc"]
"""One of each kind. The other pipes of streams have the same engine above them: they take the tests
of HOST_WIRES, which are about faults, and the conformance test (all of them: 2 minutes more)."""
HOST_WIRES = ["shm", "zmq", UCX, NIXL]
"""Those whose copies take faults."""
PATIENT: dict[str, Any] = dict.fromkeys(
    ("connect_timeout_s", "peer_silent_s", "pull_timeout_s", "early_wait_s", "lease_s"), 300.0
)
"""Of every engine here, but for what its test is about: a machine that stands still for seconds
loses no peer, and whose kernels are interpreted beside 20 others is waited for. All are longer than
``until`` waits, which so tells what comes by itself from what a time-out brings.
"""
STUCK_S = 60.0
"""After which an IO thread goes on that nobody has let go."""
POISON = 0xEE
DIGEST = b"d" * 32

Table = tuple[tuple[int, ...], ...]


def until(condition: Callable[[], object], timeout_s: float = 240.0) -> None:
    """Wait for something that the other threads will do."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


def awaited_loads() -> set[str]:
    """What the main thread waits for as an engine's, now."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    while frame.f_back is not None:
        if frame.f_code.co_name == "wait_for_loads":
            return set(frame.f_locals["request_ids"])
        frame = frame.f_back
    return set()


@dataclass(slots=True)
class Results:
    """What one rank has reported so far."""

    sent: list[str] = field(default_factory=list)
    received: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    incomplete: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)


class Engine:
    """All ranks of one engine in this process."""

    def __init__(
        self,
        shape: EngineShape,
        engine_id: str,
        *,
        fill: int | None,
        incarnation: bytes | None = None,
        facts: dict[str, Any] | None = None,
        ready_event: Callable[[], IsReady] | None = None,
        announce: bool = True,
        can_leave_unhashed: bool = True,
        faults: str = "",
        base: EngineManifest | None = None,
        before: Callable[[RankId], object] = lambda rank: None,
        launches_on: torch.device | None = None,
        **settings: Any,
    ) -> None:
        """``faults``: what its wires do wrong, see kvxfer.testing.faults. ``base``: other regions
        than those of the shape. ``before``: called before each rank starts. ``launches_on``: where
        its steps run, if not where the pools are.
        """
        self.config = Config(**{"port": 0, **PATIENT, **settings})
        self.shape = shape
        self.engine_id = engine_id
        self.incarnation = incarnation or secrets.token_bytes(16)
        base = base or build_manifest(shape, engine_id)
        self.facts = msgspec.structs.replace(base.facts, **(facts or {}))
        self.workers: list[WorkerConnector] = []
        self.pools: list[SharedPool | PlainPool] = []
        on_gpu = HAS_CUDA and self.config.transport == "cuda_ipc"
        device = torch.device("cuda:0" if on_gpu else "cpu")
        self.results: list[Results] = []
        self.stats = KVConnectorStats()
        self.expected_io_errors = 0
        self.nonces: dict[str, bytes] = {}
        self.num_offered: dict[str, int] = {}
        rng = np.random.default_rng(7)
        engine = identity_of(base, incarnation=self.incarnation, facts=self.facts)
        for entry in base.ranks:
            before(entry.rank)
            regions, nbytes = entry.regions, entry.memories[0].nbytes
            pool = make_pool(device, nbytes)
            if fill is None:
                content = rng.integers(0, 256, nbytes, dtype=np.uint8)
                pool.tensor.copy_(torch.from_numpy(content))
            else:
                pool.tensor.fill_(fill)
            worker = WorkerConnector(
                self.config,
                engine,
                entry.rank,
                can_leave_unhashed=can_leave_unhashed,
                ready_event=ready_event,
                device=launches_on or device,
            )
            with injected(faults):
                worker.register_kv_caches(regions, LocalMemory((pool.tensor,), (pool.info,)))
            self.workers.append(worker)
            self.pools.append(pool)
            self.results.append(Results())
        self.manifest: EngineManifest = msgspec.structs.replace(
            base,
            incarnation=self.incarnation,
            capabilities=(*((BIND_TOKENS,) if self.config.bind_tokens else ()), *CAPABILITIES),
            facts=self.facts,
            ranks=tuple(worker.get_handshake_metadata() for worker in self.workers),
        )
        if announce:
            self.step(ConnectorMetadata(manifest=self.manifest))

    @property
    def endpoint(self) -> str:
        return self.manifest.ranks[0].control_endpoint

    def step(self, metadata: ConnectorMetadata) -> None:
        """One step of every rank, without looking at results."""
        for worker in self.workers:
            worker.handle_preemptions(metadata)
            worker.bind_connector_metadata(metadata)
            worker.start_load_kv()
            worker.wait_for_save()
            worker.clear_connector_metadata()

    def collect(self) -> None:
        for worker, results in zip(self.workers, self.results, strict=True):
            finished = worker.collect()
            results.sent += sorted(finished.sent)
            for report in sorted(finished.loads, key=attrgetter("request_id")):
                results.received.append(report.request_id)
                if report.reason is not None:
                    results.failed[report.request_id] = report.reason
                elif report.incomplete_blocks:
                    results.incomplete[report.request_id] = report.incomplete_blocks

    def take_stats(self) -> KVConnectorStats:
        """All ranks', since the start."""
        for worker in self.workers:
            more = worker.get_kv_connector_stats()
            if more is not None:
                self.stats = self.stats.aggregate(more)
        return self.stats

    def count(self, name: str) -> int:
        return self.take_stats().counts.get(name, 0)

    def reports(self, request_id: str) -> list[LoadReport]:
        return [r for r in self.take_stats().loads if r.request_id == request_id]

    # ---- as a source

    def offer(
        self, request_id: str, num_tokens: int, ids: Iterable[int], digest: bytes = DIGEST
    ) -> SourceRef:
        """Mint an offer; not open yet."""
        return self.offer_groups(request_id, num_tokens, (tuple(ids),), digest)

    def offer_groups(
        self, request_id: str, num_tokens: int, table: Table, digest: bytes = DIGEST
    ) -> SourceRef:
        """The same with a block table of several groups, of which the scheduler side lets out what
        windows hold.
        """
        return self.begin(request_id, num_tokens, table, digest)

    def begin(
        self,
        request_id: str,
        num_tokens: int,
        table: Table,
        digest: bytes = DIGEST,
        *,
        cached: int = 0,
        name: bytes = b"",
    ) -> SourceRef:
        """The first step of a prompt that is computed in several; ``table``: the blocks that it has
        by then. ``cached``: tokens that are there before it.
        """
        order = NewOffer(
            request_id=request_id,
            nonce=secrets.token_bytes(16),
            num_tokens=num_tokens,
            digest=digest,
            open_tokens=cached,
            name=name,
        )
        self.last_offer = order
        self.nonces[request_id] = order.nonce
        self.num_offered[request_id] = num_tokens
        blocks = self.blocks_of(request_id, table)
        self.step(ConnectorMetadata(offers=(order,), blocks=(blocks,)))
        return SourceRef(
            engine_id=self.engine_id,
            endpoint=self.endpoint,
            offer=OfferRef(order.nonce, self.incarnation),
            num_tokens=num_tokens,
            digest=digest,
            curve_public_key=self.manifest.ranks[0].curve_public_key,
        )

    def blocks_of(self, request_id: str, table: Table) -> OfferBlocks:
        keepings = group_keepings(r for rank in self.manifest.ranks for r in rank.regions)
        return OfferBlocks(request_id, held_ids(table, keepings, self.num_offered[request_id]))

    def grow(self, request_id: str, num_tokens: int, table: Table) -> None:
        """A step after which the first tokens are computed; ``table``: the blocks by then."""
        blocks = self.blocks_of(request_id, table)
        self.step(ConnectorMetadata(blocks=(blocks,), grown=((request_id, num_tokens),)))

    def compute(self, *request_ids: str) -> None:
        """The step that computes the last token, and the one after it: the blocks are kept."""
        self.step(ConnectorMetadata(computed=request_ids))
        self.step(ConnectorMetadata(delayed=request_ids))

    def end(self, request_id: str, reason: Reason = Reason.ABORTED) -> None:
        self.step(ConnectorMetadata(ended=(self.end_of(request_id, reason),)))

    def end_of(self, request_id: str, reason: Reason = Reason.ABORTED) -> EndOffer:
        """The order that ends the request's last offer."""
        return EndOffer(request_id, self.nonces[request_id], reason)

    def sent(self, request_id: str) -> bool:
        """Every rank has said so, once."""
        self.collect()
        counts = [results.sent.count(request_id) for results in self.results]
        assert max(counts) <= 1
        return min(counts) == 1

    # ---- as a sink

    def load(
        self,
        request_id: str,
        source: SourceRef,
        ids: Iterable[int],
        span: tuple[int, int],
        digest: bytes = DIGEST,
        *,
        hold: bool = False,
        grows: bool = False,
    ) -> None:
        table = (tuple(ids),)
        self.load_groups(request_id, source, table, span, digest, hold=hold, grows=grows)

    def load_groups(
        self,
        request_id: str,
        source: SourceRef,
        table: Table,
        span: tuple[int, int],
        digest: bytes = DIGEST,
        *,
        hold: bool = False,
        grows: bool = False,
    ) -> None:
        """The same with a block table of several groups."""
        order = NewLoad(
            request_id=request_id,
            source=msgspec.structs.replace(source, digest=digest),
            token_lo=span[0],
            token_hi=span[1],
            block_ids=table,
            grows=grows,
        )
        holds = (Hold(request_id, source),) if hold else ()
        self.step(ConnectorMetadata(loads=(order,), holds=holds))

    def abort(self, request_id: str, reason: Reason = Reason.CANCELLED) -> None:
        self.step(ConnectorMetadata(aborts=(AbortLoad(request_id, reason),)))

    def hold(self, request_id: str, source: SourceRef) -> None:
        self.step(ConnectorMetadata(holds=(Hold(request_id, source),)))

    def unhold(self, request_id: str, source: SourceRef) -> None:
        self.step(ConnectorMetadata(unholds=(Unhold(request_id, source, Reason.CANCELLED),)))

    def received(self, request_id: str) -> bool:
        """Every rank has reported the load, once."""
        self.collect()
        counts = [results.received.count(request_id) for results in self.results]
        assert max(counts) <= 1
        return min(counts) == 1

    def reasons(self, request_id: str) -> set[str | None]:
        """Why it failed, over all ranks; {None} if it was accepted everywhere."""
        assert self.received(request_id)
        return {results.failed.get(request_id) for results in self.results}

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        assert self.count("io.errors") == self.expected_io_errors
        for pool in self.pools:
            pool.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()


def watch_reports(patch: pytest.MonkeyPatch, engine: Engine, look: Callable[[], object]) -> None:
    """``look`` each time that a rank reports something, a load or an offer that is over, before the
    engine's thread can see it.
    """
    signals, write = {worker.activity_fileno() for worker in engine.workers}, os.eventfd_write

    def seen(fd: int, value: int) -> None:
        if fd in signals:
            look()
        write(fd, value)

    patch.setattr(os, "eventfd_write", seen)


def expect_copied(
    source: Engine,
    sink: Engine,
    source_ids: Iterable[int],
    sink_ids: Iterable[int],
    span: tuple[int, int],
) -> None:
    """The sink's pools are poison, but for the span, which has the source's bytes."""
    expect_moved(source, sink, (tuple(source_ids),), (tuple(sink_ids),), {0: span})


def expect_moved(
    source: Engine,
    sink: Engine,
    source_table: Table,
    sink_table: Table,
    spans: dict[int, tuple[int, int]],
) -> None:
    """The same for several groups; ``spans`` by sink group."""
    for number, entry in enumerate(sink.manifest.ranks):
        expected = [np.full(info.nbytes, POISON, dtype=np.uint8) for info in entry.memories]
        for other, given in enumerate(source.manifest.ranks):
            oracle_copy(
                given.regions,
                [source.pools[other].tensor.cpu().numpy()],
                entry.regions,
                expected,
                source_ids=source_table,
                sink_ids=sink_table,
                spans=spans,
            )
        np.testing.assert_array_equal(sink.pools[number].tensor.cpu().numpy(), expected[0])


# ------------------------------------------------------------------ inside an engine
#
# All that these tests touch behind an engine's public face. They post to its IO thread, hold it up,
# hand it messages, and look at what it keeps where nothing outside would show it.


def live_offers(source: Engine) -> list[GivenOffer]:
    """Of all ranks."""
    services = map(service_behind, source.workers)
    return [offer for each in services for offer in list(each.source._live.values())]


def has_foreseen(offer: GivenOffer) -> bool:
    """The digests that one sink will ask for are made."""
    return [each.is_made for each in offer.foreseen] == [True]


def service_of(engine: Engine, number: int = 0) -> RankService:
    return service_behind(engine.workers[number])


@contextmanager
def stuck(engine: Engine) -> Iterator[None]:
    """The engine's IO thread takes no step."""
    is_stuck, go_on = threading.Event(), threading.Event()

    def stand() -> None:
        is_stuck.set()
        go_on.wait(STUCK_S)

    service_of(engine).io.post(stand)
    assert is_stuck.wait(STUCK_S)
    try:
        yield
    finally:
        go_on.set()


def io_thread_of(engine: Engine) -> threading.Thread:
    """It says so itself, and has then done all that was posted to it before."""
    threads: list[threading.Thread] = []
    service_of(engine).io.post(lambda: threads.append(threading.current_thread()))
    until(lambda: threads)
    return threads[0]


def opened_offer(source: Engine, request_id: str = "p") -> tuple[SourceRef, GivenOffer]:
    """It can be read, its request has finished, and nothing that its engine did is on its way."""
    before = source.count("offers.opened")
    ref = source.offer(request_id, 16, [1])
    source.compute(request_id)
    until(lambda: source.count("offers.opened") > before)
    io_thread_of(source)
    offer = given_offer(source, ref.offer.nonce)
    assert offer is not None
    return ref, offer


def peers_of(sink: Engine) -> Mapping[tuple[str, str], Peer]:
    """Of now, by engine id and front door."""
    peers = service_of(sink)._peers._peers.values()
    return {(peer.engine_id, peer.endpoint): peer for peer in peers}


def only_peer_of(sink: Engine) -> Peer:
    (peer,) = peers_of(sink).values()
    return peer


def num_loads_at(peer: Peer) -> int:
    """Those that wait for its answers, and have its silence noticed."""
    return peer._num_loads


def links_of(peer: Peer) -> list[ControlClient]:
    return list(peer._clients.values())


def wires_of(sink: Engine) -> Mapping[str, SinkTransport]:
    return service_of(sink).sink._addressing.transports


def kept_by(sink: Engine) -> list[str]:
    """The requests whose offers it asks their sources to keep."""
    return list(service_of(sink).keeper._kept)


def owed_by(sink: Engine) -> list[SourceRef]:
    """The offers that it has given up, and whose sources it is still to tell so."""
    return [owed.source for owed in service_of(sink).keeper._owed]


def given_offer(source: Engine, nonce: bytes, number: int = 0) -> GivenOffer | None:
    """Also one that is over and remembered."""
    offers = service_of(source, number).source
    return offers._live.get(nonce) or offers._over.get(nonce)


def num_pulls(source: Engine, nonce: bytes) -> int:
    """Of this offer, which have come; nothing tells of those that are parked."""
    offer = given_offer(source, nonce)
    return len(offer.asked) if offer is not None else 0


def num_connections_of(engine: Engine) -> int:
    """At its control endpoint."""
    return len(service_of(engine)._server.router)


class Ahead:
    """A clock that was put forward."""

    def __init__(self) -> None:
        self.by_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.by_s


def pass_s(engine: Engine, duration_s: float) -> None:
    """So much time passes for each rank behind what was posted before, and what is due then is
    done.
    """

    def pass_on(io: IoThread, is_over: threading.Event) -> None:
        if not isinstance(io.now, Ahead):
            io.now = Ahead()
        io.now.by_s += duration_s
        io.after(0.0, is_over.set)  # behind all timers that are due

    for worker in engine.workers:
        io, is_over = service_behind(worker).io, threading.Event()
        io.post(pass_on, io, is_over)
        assert is_over.wait(STUCK_S)


def is_kept_off(sink: Engine) -> bool:
    """A source has refused a connection of it."""
    links = (link for peer in list(peers_of(sink).values()) for link in links_of(peer))
    return any(link.dealer.is_refused for link in links)


def was_granted(sink: Engine, request_id: str) -> bool:
    """It reads, or waits for what it is sent."""
    load = service_of(sink).sink._by_request.get(request_id)
    return load is not None and load.granted_s > 0


def let_look(engine: Engine) -> None:
    """Until it has looked at what its connections have sent."""
    io, has_looked = service_of(engine).io, threading.Event()
    io.post(lambda: io.after(LOOK_S, has_looked.set))
    assert has_looked.wait(STUCK_S)
