"""The contenders of a transfer: processes, started together, and what became of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec

from kvxfer.bench.core import ContenderLost, Timing, WrongBytes, measure, tell_lost
from kvxfer.bench.members import SIDES, SINK, SOURCE, Devices
from kvxfer.bench.nixl_ways import HOST_SETTINGS, Card, NixlMember, Setting
from kvxfer.bench.plain_ways import BATCH, LIMITS, MEMCPY, PlainWays
from kvxfer.bench.pools import Request
from kvxfer.bench.sockets import SOCKETS, UNIX_SOCKETS, SocketSink, SocketSource
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

    ``needs_equal``: it moves blocks as they are, and no request that asks for more; ``is_raw``: it
    moves them as they are whatever is asked. ``is_limit``: what it moves is not the request.
    ``is_restless``: its processes take processor time even when idle, so they are stopped between
    its turns. ``is_over``: its processes have ended in order. ``why``: it is out, and why.
    """

    name: str
    source: Worker
    sink: Worker
    begins: str = SINK
    needs_equal: bool = False
    is_limit: bool = False
    is_raw: bool = False
    is_restless: bool = False
    is_over: bool = False
    why: str | None = None
    has_wrong_bytes: bool = False

    def can(self, request: Request) -> bool:
        """Whether it is there, and moves such a request."""
        is_there = self.why is None and not self.is_over
        return is_there and (request.is_equal or not self.needs_equal)

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
    started, and why. ``choices``: what a trial of each wire has said; ``takings``: the process
    of each wire's sink, and the source that it reads from.
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
    takings: dict[str, tuple[Worker, RankManifest]] = field(default_factory=dict)
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

    def start_plain(self, names: Sequence[str]) -> None:
        """What one process that sees both sides can do."""
        given = (self.devices, self.nbytes)
        plain = self.worker("plain ways", PlainWays, *given, environment=self.environment)
        ways = [
            Way(name, plain, plain, is_limit=name in LIMITS, needs_equal=name == BATCH)
            for name in names
        ]
        self.add(ways, plain.ready)

    def start_sockets(self, *, is_one_host: bool) -> None:
        """Plain sockets; on one host Unix sockets, too."""
        given = (self.devices, self.nbytes)
        arguments = (given, (*given, self.hosts[1], is_one_host))
        source, sink = self.pair(SOCKETS, (SocketSource, SocketSink), arguments)

        def join() -> None:
            source.call(object, "connect", sink.call(list, "addresses"))
            sink.call(object, "accept")

        names = (SOCKETS, UNIX_SOCKETS) if is_one_host else (SOCKETS,)
        self.add([Way(name, source, sink, is_raw=True) for name in names], join)

    def configs(self, wire: str, **more: object) -> tuple[Config, Config]:
        """What a wire is told, of each side. ``more``: settings, beside those of all wires."""
        settings = self.settings | more
        source, sink = (wire_config(wire, host=host, **settings) for host in self.hosts)
        return source, sink

    def start_wire(
        self, wire: str, request: Request | None = None, mark: str = "", **more: object
    ) -> None:
        """One of kvxfer's. ``request``: a trial is made for such, and the sink asks for each; None:
        it reads by itself. ``mark``: behind its name, where it is there with several settings.
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
            if request is None:
                taking.call(object, "attach", manifest)
            else:
                told = (manifest, giving.call(tuple, "address"), request)
                self.choices[name] = taking.call(str, "meet", *told)
            self.takings[wire] = (taking, manifest)

        self.add([Way(name, giving, taking)], join)

    def start_nixl(self, setting: Setting, *, is_raw: bool) -> None:
        """NIXL's own transfer, which moves blocks as they are."""
        if not is_installed("nixl"):
            self.absent[setting.name] = "nixl is not installed"
            return
        source, sink = self.pair(
            setting.name,
            (NixlMember, NixlMember),
            (
                (SOURCE, setting, self.devices, self.nbytes),
                (SINK, setting, self.devices, self.nbytes),
            ),
            setting.environment,
        )
        is_restless = is_raw and setting.has_progress_thread
        way = Way(
            *(setting.name, source, sink, setting.initiator),
            needs_equal=not is_raw,
            is_raw=is_raw,
            is_restless=is_restless,
        )

        def join() -> None:
            with way.awake():
                cards = [worker.call(Card, "card") for worker in (source, sink)]
                source.call(object, "meet", cards[1])
                sink.call(object, "meet", cards[0])

        self.add([way], join)

    def measure(self, request: Request, rounds: int, budget_s: float) -> dict[str, list[Timing]]:
        """Check everybody who can move it, then take turns; who moves wrong bytes is out."""
        for way in [way for way in self.ways if way.can(request)]:
            try:
                way.check(request)
            except ContenderLost as exc:
                way.lose(exc)
        ways = [way for way in self.ways if way.can(request)]
        runs = {way.name: partial(way.run, request) for way in ways}

        def lose(name: str, why: ContenderLost) -> None:
            next(way for way in ways if way.name == name).lose(why)

        return measure(runs, rounds, budget_s=budget_s, lose=lose)

    def retire(self) -> None:
        """End the processes of those that move blocks as they are, and nothing else: even idle ones
        take processor time.
        """
        retired: list[Worker] = []
        for way in self.ways:
            if way.needs_equal and not way.is_over and way.source is not way.sink:
                way.is_over = True
                retired += (way.source, way.sink)
        close_all(retired)
        self.workers = [worker for worker in self.workers if worker not in retired]

    def lost(self) -> dict[str, str]:
        return self.absent | {way.name: way.why for way in self.ways if way.why is not None}

    @property
    def has_wrong_bytes(self) -> bool:
        """Somebody has moved others than were asked for."""
        return any(way.has_wrong_bytes for way in self.ways)

    def close(self) -> None:
        close_all(self.workers)


def start_host(
    contenders: Contenders, wires: Sequence[str], requests: Sequence[Request], *, is_one_host: bool
) -> None:
    """Those of host memory, one after the other, so that not all of them fill memory at once."""
    contenders.start_sockets(is_one_host=is_one_host)
    contenders.join()
    if is_one_host:
        contenders.start_plain([MEMCPY])
        contenders.join()
    for wire in wires:
        contenders.start_wire(wire, requests[0])
        contenders.join()
    for setting in HOST_SETTINGS:
        contenders.start_nixl(setting, is_raw=True)
        contenders.join()
