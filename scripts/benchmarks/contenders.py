"""The contenders of a transfer benchmark: processes, started together, and what became of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec

from kvxfer.transfer.manifest import RankManifest
from scripts.benchmarks.devices import Devices
from scripts.benchmarks.members import SINK, SOURCE, Timing
from scripts.benchmarks.nixl_ways import SETTINGS, Card, NixlMember, Setting
from scripts.benchmarks.plain_ways import BATCH, LOCAL_MEMCPY, MEMCPY, MEMSET, TORCH, PlainWays
from scripts.benchmarks.pools import Request
from scripts.benchmarks.wire_ways import Giving, Taking
from scripts.benchmarks.workers import SPAWN, ContenderLost, Worker, close_all

NUM_CHECKED = 96
"""Tokens compared of a request; all of them where it has no more than half as many again."""

BUDGET_S = 3.0
"""Of one contender in one case, after its least rounds: some take a second a time."""
LEAST_ROUNDS, WARM_ROUNDS = 3, 2

LIMITS = (MEMCPY, LOCAL_MEMCPY, MEMSET)


class WrongBytes(ContenderLost):
    """A contender copied something else than it was asked to."""


@dataclass(slots=True, eq=False)
class Way:
    """One way of moving a request: who begins it, and where both sides are.

    ``needs_equal``: it moves blocks as they are, and no request that asks for more; ``is_raw``: it
    moves them as they are whatever is asked. ``is_restless``: its processes take processor time
    even when idle, so they are stopped between its turns. ``is_over``: its processes have ended in
    order. ``why``: it is out, and why.
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
        """Around everything that its processes are asked."""
        if not self.is_restless:
            yield
            return
        for worker in (self.source, self.sink):
            worker.resume()
        try:
            yield
        finally:
            for worker in (self.source, self.sink):
                worker.pause()

    def check(self, request: Request) -> None:
        """Poison, move, compare tokens by digests made on both sides. Raises ContenderLost."""
        if self.is_limit:
            return
        with self.awake():
            self._check(self._asked(request))

    def _check(self, request: Request) -> None:
        self.sink.call(object, "poison")
        self._run(request)
        most = NUM_CHECKED if request.num_tokens > NUM_CHECKED * 3 // 2 else request.num_tokens
        tokens = request.sampled_tokens(most)
        given = self.source.call(list, "digests", SOURCE, request, tokens)
        taken = self.sink.call(list, "digests", SINK, request, tokens)
        wrong = [
            token
            for token, ours, theirs in zip(tokens, taken, given, strict=True)
            if ours != theirs
        ]
        if wrong:
            raise WrongBytes(f"{request.name}: wrong bytes in tokens {wrong[:8]} of {len(tokens)}")
        if not self.sink.call(bool, "is_untouched_beside", request):
            raise WrongBytes(f"{request.name}: wrote beside the request")

    def lose(self, why: ContenderLost) -> None:
        """It is out."""
        self.why = str(why)
        self.has_wrong_bytes = isinstance(why, WrongBytes)
        print(f"lost: {self.name}: {self.why}")


def measure(
    ways: list[Way], request: Request, rounds: int, budget_s: float
) -> dict[str, list[Timing]]:
    """The ways in turns, each starting as often as the others; slow ones fewer times."""
    taken: dict[str, list[Timing]] = {way.name: [] for way in ways}
    spent_s = dict.fromkeys(taken, 0.0)
    for number in range(rounds + WARM_ROUNDS):
        turn = number % len(ways)
        for way in ways[turn:] + ways[:turn]:
            timings = taken[way.name]
            is_over = spent_s[way.name] > budget_s and len(timings) >= LEAST_ROUNDS
            if way.why is not None or is_over:
                continue
            try:
                timing = way.run(request)
            except ContenderLost as exc:
                way.lose(exc)
                continue
            spent_s[way.name] += timing.total_s
            if number >= WARM_ROUNDS:
                timings.append(timing)
    return {name: timings for name, timings in taken.items() if timings}


@dataclass(slots=True)
class Contenders:
    """All ways, and the processes behind them.

    ``settings``: of the wire, beside its name. ``absent``: what was not even started, and why.
    """

    devices: Devices
    nbytes: int
    settings: dict[str, object]
    ways: list[Way] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)
    taking: Worker | None = None
    absent: list[tuple[str, str]] = field(default_factory=list)
    start_method: str = SPAWN
    _joins: list[tuple[Sequence[Way], Callable[[], None]]] = field(default_factory=list)

    def start(self) -> None:
        """All at once; those that do not start are out."""
        self._start_plain()
        self._start_wire()
        for setting in SETTINGS:
            self._start_nixl(setting)
        for ways, join in self._joins:
            try:
                join()
            except ContenderLost as exc:
                for way in ways:
                    way.lose(exc)

    def _worker(
        self,
        name: str,
        make: Callable[..., object],
        *arguments: object,
        environment: Mapping[str, str] | None = None,
    ) -> Worker:
        worker = Worker(name, make, *arguments, environment=environment, method=self.start_method)
        self.workers.append(worker)
        return worker

    def _start_plain(self) -> None:
        plain = self._worker("plain ways", PlainWays, self.devices, self.nbytes)
        names = [MEMCPY, TORCH, BATCH, MEMSET]
        if self.devices.where == "peer":
            names.append(LOCAL_MEMCPY)
        ways = [
            Way(name, plain, plain, is_limit=name in LIMITS, needs_equal=name == BATCH)
            for name in names
        ]
        self._add(ways, plain.ready)

    def _start_wire(self) -> None:
        giving = self._worker("kvxfer source", Giving, self.devices, self.nbytes)
        taking = self._worker("kvxfer sink", Taking, self.devices, self.nbytes, self.settings)
        self.taking = taking

        def join() -> None:
            taking.call(object, "attach", giving.call(RankManifest, "manifest"))

        self._add([Way(f"kvxfer {self.devices.wire}", giving, taking)], join)

    def _start_nixl(self, setting: Setting) -> None:
        if find_spec("nixl") is None:
            print(f"lost: {setting.name}: not importable")
            self.absent.append((setting.name, "not importable"))
            return
        members = {
            side: self._worker(
                f"{setting.name}, {side}",
                *(NixlMember, side, setting, self.devices, self.nbytes),
                environment=dict(setting.environment),
            )
            for side in (SOURCE, SINK)
        }

        def join() -> None:
            cards = {side: member.call(Card, "card") for side, member in members.items()}
            members[SOURCE].call(object, "meet", cards[SINK])
            members[SINK].call(object, "meet", cards[SOURCE])

        way = Way(
            setting.name,
            members[SOURCE],
            members[SINK],
            begins=setting.initiator,
            needs_equal=True,
        )
        self._add([way], join)

    def check(self, request: Request) -> None:
        """Everybody who can move it; who moves wrong bytes is out."""
        for way in self.ways:
            if not way.can(request):
                continue
            try:
                way.check(request)
            except ContenderLost as exc:
                way.lose(exc)

    def _add(self, ways: Sequence[Way], join: Callable[[], None]) -> None:
        self.ways += ways
        self._joins.append((ways, join))

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

    def lost(self) -> list[tuple[str, str]]:
        """Who is out, and why."""
        return self.absent + [(way.name, way.why) for way in self.ways if way.why is not None]

    def close(self) -> None:
        """End all processes."""
        close_all(self.workers)
