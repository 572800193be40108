"""The contenders of a benchmark in host memory: sockets, the wires of kvxfer that this machine has,
what UCX makes of their chunks, NIXL, and memcpy. Two processes for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec

from kvxfer.config import Config
from kvxfer.transfer.manifest import RankManifest
from scripts.benchmarks.contenders import Contenders, Way
from scripts.benchmarks.devices import Devices
from scripts.benchmarks.host_ways import ZMQ_TCP, Cut, HostGiving, HostTaking
from scripts.benchmarks.members import SINK, SOURCE
from scripts.benchmarks.nixl_ways import HOST_SETTINGS, Card, NixlMember, Setting
from scripts.benchmarks.plain_ways import MEMCPY, PlainWays
from scripts.benchmarks.pools import Request
from scripts.benchmarks.raw_sockets import SOCKETS, UNIX_SOCKETS, SocketSink, SocketSource
from scripts.benchmarks.raw_ucx import RAW_UCX, UcxSink, UcxSource
from scripts.benchmarks.wire_ways import wire_config
from scripts.benchmarks.workers import FORK_SERVER, ContenderLost, Worker

WIRES = ("shm", "zmq", ZMQ_TCP, "ucx", "nixl")
LIBRARIES = {"ucx": "ucxx", "nixl": "nixl"}
"""What a wire needs beside kvxfer's own dependencies."""
HOST = Devices("cpu", "cpu", "shm")
SIDES = (SOURCE, SINK)

MakeInside = Callable[[str, Callable[..., object]], Callable[..., object]]
"""Has a side's process made where that side is."""


def anywhere(side: str, make: Callable[..., object]) -> Callable[..., object]:
    """Both sides here."""
    return make


def kvxfer(wire: str) -> str:
    """How a wire is called among the ways."""
    return f"kvxfer {wire}"


def is_installed(wire: str) -> bool:
    """Whether what the wire needs can be imported."""
    return find_spec(LIBRARIES.get(wire, "kvxfer")) is not None


@dataclass(slots=True)
class HostContenders(Contenders):
    """``hosts``: of the source and of the sink. ``settings``: of all wires. ``requests``: those to
    be measured, the one that trials are made for first. ``environment``: of all processes.
    ``is_one_host``: what only goes within one is among them. ``choices``: what a trial of each wire
    has said; ``takings``: their sinks.
    """

    requests: tuple[Request, ...] = ()
    wires: tuple[str, ...] = WIRES
    hosts: tuple[str, str] = ("127.0.0.1", "127.0.0.1")
    inside: MakeInside = anywhere
    environment: Mapping[str, str] = field(default_factory=dict)
    is_one_host: bool = True
    nixl_settings: tuple[Setting, ...] = HOST_SETTINGS
    start_method: str = FORK_SERVER
    choices: dict[str, str] = field(default_factory=dict)
    takings: dict[str, Worker] = field(default_factory=dict)

    def start(self) -> None:
        """One after the other, so that not all of them fill memory at once; those that do not start
        are out.
        """
        self._start_sockets()
        if self.is_one_host:
            plain = self._worker("plain ways", PlainWays, self.devices, self.nbytes)
            self._add([Way(MEMCPY, plain, plain, is_limit=True)], plain.ready)
        for wire in self.wires:
            if is_installed(wire):
                self._start_host_wire(wire)
            else:
                self.absent.append((kvxfer(wire), f"{LIBRARIES[wire]} is not installed"))
        if "ucx" in self.wires and is_installed("ucx"):
            self._start_raw_ucx()
        for setting in self.nixl_settings:
            self._start_host_nixl(setting)

    def _pair(
        self, name: str, *makes: tuple[Callable[..., object], *tuple[object, ...]]
    ) -> tuple[Worker, Worker]:
        source, sink = (
            self._worker(
                f"{name}, {side}",
                self.inside(side, make),
                *arguments,
                environment=self.environment,
            )
            for side, (make, *arguments) in zip(SIDES, makes, strict=True)
        )
        return source, sink

    def _join(self, ways: list[Way], join: Callable[[], None]) -> None:
        self.ways += ways
        try:
            join()
        except ContenderLost as exc:
            for way in ways:
                way.lose(exc)

    def _start_sockets(self) -> None:
        source, sink = self._pair(
            SOCKETS,
            (SocketSource, self.devices, self.nbytes),
            (SocketSink, self.devices, self.nbytes, self.hosts[1], self.is_one_host),
        )

        def join() -> None:
            source.call(object, "connect", sink.call(dict, "addresses"))
            sink.call(object, "accept")

        names = (SOCKETS, UNIX_SOCKETS) if self.is_one_host else (SOCKETS,)
        self._join([Way(name, source, sink, is_raw=True) for name in names], join)

    def config(self, wire: str, side: str) -> Config:
        """What a wire of that side is told."""
        name = "zmq" if wire == ZMQ_TCP else wire
        return wire_config(name, host=self.hosts[SIDES.index(side)], **self.settings)

    def _start_host_wire(self, wire: str) -> None:
        devices = Devices("cpu", "cpu", wire)
        giving, taking = self._pair(
            kvxfer(wire),
            (HostGiving, devices, self.nbytes, self.config(wire, SOURCE)),
            (HostTaking, devices, self.nbytes, self.config(wire, SINK)),
        )

        def join() -> None:
            manifest = giving.call(RankManifest, "manifest")
            address = giving.call(tuple, "address")
            arguments = (manifest, address, self.requests[0])
            self.choices[kvxfer(wire)] = taking.call(str, "attach", *arguments)
            self.takings[wire] = taking

        self._join([Way(kvxfer(wire), giving, taking)], join)

    def _start_raw_ucx(self) -> None:
        source, sink = self._pair(
            RAW_UCX,
            (UcxSource, self.config("ucx", SOURCE)),
            (UcxSink, self.config("ucx", SINK)),
        )

        def join() -> None:
            card, address = source.call(tuple, "card"), sink.call(bytes, "worker_address")
            sink.call(object, "meet", card)
            source.call(object, "meet", address)
            sink.call(object, "check")
            for request in self.requests if "ucx" in self.takings else ():
                cut = self.takings["ucx"].call(Cut, "cut", request)
                sink.call(object, "use", request, cut)

        self._join([Way(RAW_UCX, source, sink, is_limit=True)], join)

    def _start_host_nixl(self, setting: Setting) -> None:
        if not is_installed("nixl"):
            self.absent.append((setting.name, "nixl is not installed"))
            return
        source, sink = self._pair(
            setting.name,
            *((NixlMember, side, setting, self.devices, self.nbytes) for side in SIDES),
        )
        way = Way(
            *(setting.name, source, sink),
            begins=setting.initiator,
            is_raw=True,
            is_restless=setting.has_progress_thread,
        )

        def join() -> None:
            with way.awake():
                cards = [worker.call(Card, "card") for worker in (source, sink)]
                source.call(object, "meet", cards[1])
                sink.call(object, "meet", cards[0])

        self._join([way], join)
