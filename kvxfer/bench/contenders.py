"""The contenders of a transfer: processes, started together, and what became of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec

from kvxfer.bench.core import ContenderLost, Timing, WrongBytes, measure, tell_lost
from kvxfer.bench.members import SIDES, SINK, SOURCE, Devices
from kvxfer.bench.nixl_ways import HOST_SETTINGS, SETTINGS, Card, NixlMember, Setting
from kvxfer.bench.plain_ways import MEMCPY, PlainCopy
from kvxfer.bench.pools import Request
from kvxfer.bench.sockets import SOCKETS, SocketSink, SocketSource
from kvxfer.bench.wires import Giving, Taking, wire_config
from kvxfer.bench.workers import SPAWN, Worker, close_all
from kvxfer.config import Config
from kvxfer.transfer.manifest import RankManifest

QUIET = "FATAL"
"""Of NIXL: what it fails at is a lost contender, with a reason."""
LIBRARIES = {"ucx": "ucxx", "nixl": "nixl"}
"""What a wire needs beside kvxfer's own dependencies."""
NUM_CHECKED = 96
"""Tokens compared of a request; all of them where it has no more than half as many again."""
Make = Callable[..., object]


def kvxfer(wire: str) -> str:
    """How a wire is called among the ways."""
    return f"kvxfer {wire}"


def is_installed(wire: str) -> bool:
    """Whether what the wire needs can be imported."""
    return find_spec(LIBRARIES.get(wire, "kvxfer")) is not None


@dataclass(slots=True, eq=False)
class Way:
    """One way of moving a request: who begins it, and where both sides are.

    ``is_raw``: it moves blocks as they are whatever is asked. ``is_limit``: what it moves is not
    the request. ``is_restless``: its processes take processor time even when idle, so they are
    stopped between its turns. ``why``: it is out, and why.
    """

    name: str
    source: Worker
    sink: Worker
    begins: str = SINK
    is_limit: bool = False
    is_raw: bool = False
    is_restless: bool = False
    why: str | None = None
    has_wrong_bytes: bool = False

    def run(self, request: Request) -> Timing:
        """Once. Raises ContenderLost."""
        with self.awake():
            return self._run(self._asked(request))

    def _run(self, request: Request) -> Timing:
        worker = self.sink if self.begins == SINK else self.source
        return worker.call(Timing, "run", self.name, request)

    def _asked(self, request: Request) -> Request:
        return request.raw() if self.is_raw else request

    @contextmanager
    def awake(self) -> Iterator[None]:
        restless = (self.source, self.sink) if self.is_restless else ()
        for worker in restless:
            worker.resume()
        try:
            yield
        finally:
            for worker in restless:
                worker.pause()

    def check(self, request: Request) -> None:
        """Poison, move, compare tokens by digests made on both sides. Raises ContenderLost."""
        if not self.is_limit:
            with self.awake():
                asked = self._asked(request)
                check_bytes(self.source, self.sink, asked, partial(self._run, asked))

    def lose(self, why: ContenderLost) -> None:
        self.why = str(why)
        self.has_wrong_bytes = isinstance(why, WrongBytes)
        tell_lost(self.name, why)


def check_bytes(source: Worker, sink: Worker, request: Request, move: Callable[[], object]) -> None:
    """Of what a move has left at the sink. Raises ContenderLost."""
    sink.call(object, "poison")
    move()
    most = NUM_CHECKED if request.num_tokens > NUM_CHECKED * 3 // 2 else request.num_tokens
    tokens = request.sampled_tokens(most)
    given = source.call(list, "digests", SOURCE, request, tokens)
    taken = sink.call(list, "digests", SINK, request, tokens)
    pairs = zip(tokens, taken, given, strict=True)
    if wrong := [token for token, ours, theirs in pairs if ours != theirs]:
        raise WrongBytes(f"{request.name}: wrong bytes in tokens {wrong[:8]} of {len(tokens)}")
    if not sink.call(bool, "is_untouched_beside", request):
        raise WrongBytes(f"{request.name}: wrote beside the request")


def anywhere(side: str, make: Make) -> Make:
    return make


@dataclass(slots=True)
class Contenders:
    """All ways, and the processes behind them.

    ``settings``: of the wire, beside its name. ``hosts``: of the source and of the sink;
    ``inside``: has a side's process made where that side is. ``absent``: what was not even
    started, and why. ``choices``: what a trial of each wire has said.
    """

    devices: Devices
    nbytes: int
    settings: dict[str, object] = field(default_factory=dict)
    start_method: str = SPAWN
    hosts: tuple[str, str] = ("127.0.0.1", "127.0.0.1")
    inside: Callable[[str, Make], Make] = anywhere
    environment: Mapping[str, str] = field(default_factory=dict)
    ways: list[Way] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    choices: dict[str, str] = field(default_factory=dict)
    _joins: list[tuple[Sequence[Way], Callable[[], object]]] = field(default_factory=list)

    def worker(
        self, name: str, make: Make, *arguments: object, environment: Mapping[str, str]
    ) -> Worker:
        worker = Worker(name, make, *arguments, environment=environment, method=self.start_method)
        self.workers.append(worker)
        return worker

    def pair(
        self,
        name: str,
        makes: tuple[Make, Make],
        arguments: tuple[tuple[object, ...], tuple[object, ...]],
        environment: tuple[tuple[str, str], ...] = (),
    ) -> tuple[Worker, Worker]:
        """A process for each side: source, sink."""
        known = {"NIXL_LOG_LEVEL": QUIET, **self.environment, **dict(environment)}
        source, sink = (
            self.worker(f"{name}, {side}", self.inside(side, make), *given, environment=known)
            for side, make, given in zip(SIDES, makes, arguments, strict=True)
        )
        return source, sink

    def add(self, ways: Sequence[Way], join: Callable[[], object]) -> None:
        """``join`` makes their processes know each other. Raises ContenderLost."""
        self.ways += ways
        self._joins.append((ways, join))

    def join(self) -> None:
        """All that were added; those that do not start are out."""
        for ways, join in self._joins:
            try:
                join()
            except ContenderLost as exc:
                for way in ways:
                    way.lose(exc)
        self._joins.clear()

    def start_copy(self) -> None:
        """One contiguous copy of as many bytes."""
        given = (self.devices, self.nbytes)
        plain = self.worker(MEMCPY, PlainCopy, *given, environment=self.environment)
        self.add([Way(MEMCPY, plain, plain, is_limit=True)], plain.ready)

    def start_sockets(self) -> None:
        given = (self.devices, self.nbytes)
        arguments = (given, (*given, self.hosts[1]))
        source, sink = self.pair(SOCKETS, (SocketSource, SocketSink), arguments)

        def join() -> None:
            source.call(object, "connect", [sink.call(tuple, "address")])
            sink.call(object, "accept")

        self.add([Way(SOCKETS, source, sink, is_raw=True)], join)

    def configs(self, wire: str, **more: object) -> tuple[Config, Config]:
        """What a wire is told, of each side. ``more``: settings, beside those of all wires."""
        settings = self.settings | more
        source, sink = (wire_config(wire, host=host, **settings) for host in self.hosts)
        return source, sink

    def start_wire(self, wire: str, request: Request, mark: str = "", **more: object) -> None:
        """One of kvxfer's; a trial is made for such requests. ``mark``: behind its name, where it
        is there with several settings.
        """
        name = kvxfer(wire) + mark
        if not is_installed(wire):
            self.absent[name] = f"{LIBRARIES[wire]} is not installed"
            return
        devices = Devices(self.devices.source, self.devices.sink, wire)
        arguments = tuple((devices, self.nbytes, config) for config in self.configs(wire, **more))
        giving, taking = self.pair(name, (Giving, Taking), (arguments[0], arguments[1]))

        def join() -> None:
            manifest = giving.call(RankManifest, "manifest")
            address = None if wire == "cuda_ipc" else giving.call(tuple, "address")
            self.choices[name] = taking.call(str, "meet", manifest, address, request)

        self.add([Way(name, giving, taking)], join)

    def start_nixl(self, setting: Setting) -> None:
        """NIXL's own transfer, which moves blocks as they are."""
        if not is_installed("nixl"):
            self.absent[setting.name] = "nixl is not installed"
            return
        given = (setting, self.devices, self.nbytes)
        arguments = ((SOURCE, *given), (SINK, *given))
        makes = (NixlMember, NixlMember)
        source, sink = self.pair(setting.name, makes, arguments, setting.environment)
        way = Way(
            *(setting.name, source, sink, setting.initiator),
            is_raw=True,
            is_restless=setting.has_progress_thread,
        )

        def join() -> None:
            with way.awake():
                cards = [worker.call(Card, "card") for worker in (source, sink)]
                source.call(object, "meet", cards[1])
                sink.call(object, "meet", cards[0])

        self.add([way], join)

    def measure(self, request: Request, rounds: int, budget_s: float) -> dict[str, list[Timing]]:
        """Check everybody, then take turns; who moves wrong bytes is out."""
        for way in [way for way in self.ways if way.why is None]:
            try:
                way.check(request)
            except ContenderLost as exc:
                way.lose(exc)
        ways = {way.name: way for way in self.ways if way.why is None}
        runs = {name: partial(way.run, request) for name, way in ways.items()}

        def lose(name: str, why: ContenderLost) -> None:
            ways[name].lose(why)

        return measure(runs, rounds, budget_s=budget_s, lose=lose)

    def lost(self) -> dict[str, str]:
        return self.absent | {way.name: way.why for way in self.ways if way.why is not None}

    @property
    def has_wrong_bytes(self) -> bool:
        """Somebody has moved others than were asked for."""
        return any(way.has_wrong_bytes for way in self.ways)

    def close(self) -> None:
        close_all(self.workers)


def start_all(
    contenders: Contenders, wires: Sequence[str], request: Request, *, is_one_host: bool
) -> None:
    """Sockets, a plain copy, wires and NIXL, one after the other, so that not all of them fill
    memory at once. Sockets are of host memory, a plain copy is of one host.
    """
    is_on_cpu = contenders.devices.sink == "cpu"
    starts: list[Callable[[], object]] = [contenders.start_sockets] if is_on_cpu else []
    starts += [contenders.start_copy] if is_one_host else []
    starts += [partial(contenders.start_wire, wire, request) for wire in wires]
    starts += [
        partial(contenders.start_nixl, setting)
        for setting in (HOST_SETTINGS if is_on_cpu else SETTINGS)
    ]
    for start in starts:
        start()
        contenders.join()
