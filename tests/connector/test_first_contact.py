"""Every order in which the messages of two first contacts can come, where one engine states what is
the other's. The sink's own code decides (Peers, Peer); connections, trials and wires are made up
here.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from kvxfer.config import Config
from kvxfer.connector import peer as peer_module
from kvxfer.connector import peers as peers_module
from kvxfer.connector.control import LastWords
from kvxfer.connector.ledger import Ledger
from kvxfer.connector.peer import HELLO_AGAIN_S, Peer, Surroundings
from kvxfer.connector.peer_session import Failure, PeerState
from kvxfer.connector.peers import Peers
from kvxfer.connector.records import Identity, SourceRef
from kvxfer.transfer.manifest import EngineManifest, RankId, RankManifest
from kvxfer.transfer.wire import BIND_TOKENS, Hello, Manifest, NotReady, OfferRef, Reason
from tests.builders import EngineShape, build_manifest

Call = Callable[[], object]
CONFIG = Config(allowed_peers=("127.0.0.1",), offer_board=False)
LIFE, NEXT_LIFE, LIARS_LIFE = b"1" * 16, b"2" * 16, b"L" * 16


def engine(engine_id: str, life: bytes, port: int, device: str) -> EngineManifest:
    """Two ranks, listening at ``port`` and the next one, with a memory of that name."""
    manifest = build_manifest(EngineShape(tp_size=2), engine_id)
    ranks = tuple(
        replace(
            entry,
            control_endpoint=f"tcp://127.0.0.1:{port + number}",
            memories=tuple(replace(memory, device=device) for memory in entry.memories),
        )
        for number, entry in enumerate(manifest.ranks)
    )
    return replace(manifest, incarnation=life, capabilities=(BIND_TOKENS,), ranks=ranks)


HONEST = engine("honest", LIFE, 1000, "honest")
LIAR = engine("liar", LIARS_LIFE, 2000, "liar")
OWN = replace(build_manifest(EngineShape(), "decode"), capabilities=(BIND_TOKENS,))


def with_stolen(manifest: EngineManifest, number: int, **more: Any) -> EngineManifest:
    """That rank states where the honest engine's listens, and otherwise what it likes."""
    ranks = list(manifest.ranks)
    ranks[number] = replace(
        ranks[number], control_endpoint=HONEST.ranks[number].control_endpoint, **more
    )
    return replace(manifest, ranks=tuple(ranks))


LIES = {
    "rank 1 is mine": with_stolen(LIAR, 1),
    "rank 0 is mine": with_stolen(LIAR, 0),
    "rank 1 is mine, with its memory": with_stolen(LIAR, 1, memories=HONEST.ranks[1].memories),
    "I am the honest one": replace(
        with_stolen(LIAR, 1), engine_id="honest", incarnation=HONEST.incarnation
    ),
    "I am the honest one, and it has another size of blocks": replace(
        HONEST, block_tokens=8, ranks=(LIAR.ranks[0], HONEST.ranks[1])
    ),
}
DOOR = "tcp://127.0.0.1:2000"
"""Where the liar answers, whatever it says of itself."""


@dataclass(eq=False)
class World:
    """What is there, and what can happen next: ``events`` by whom they belong to, in order.
    ``said``: what ranks have said of themselves.

    ``trials_take_time``: they end at any time; else at once, and there is a tenth of the orders.
    """

    answers: dict[str, EngineManifest]
    doors: set[str]
    unready: set[str] = field(default_factory=set)
    trials_take_time: bool = True
    attached: dict[str, RankManifest] = field(default_factory=dict)
    said: list[RankManifest] = field(default_factory=list)
    events: dict[object, deque[Call]] = field(default_factory=dict)
    links: list[Link] = field(default_factory=list)
    keys: Iterator[int] = field(default_factory=itertools.count)

    # ---- the part of an IoThread that a peer uses

    is_lent = False

    def now(self) -> float:
        return 0.0

    def guard(self, call: Callable[..., object], *args: object) -> None:
        call(*args)

    defer = guard

    def run_deferred(self) -> None:
        """Nothing is ever deferred."""

    def after(self, delay_s: float, call: Callable[..., object], *args: object) -> Any:
        if delay_s == HELLO_AGAIN_S:  # deadlines do not come
            self.may_happen(next(self.keys), partial(call, *args))
        return SimpleNamespace(cancel=lambda: None)

    # ---- the part of a transport

    def attach(self, source: RankManifest, staging: object) -> None:
        assert self.attached.get(source.control_endpoint) in (None, source)
        assert source in self.said, "attached to what nobody has said of itself"
        self.attached[source.control_endpoint] = source

    def detach(self, endpoint: str) -> None:
        del self.attached[endpoint]

    # ---- events

    def may_happen(self, key: object, call: Call) -> None:
        self.events.setdefault(key, deque()).append(call)

    def enabled(self) -> list[object]:
        return [key for key, calls in self.events.items() if calls]

    def restart(self, manifest: EngineManifest) -> None:
        """Another life where this engine listens; its connections end."""
        for entry in manifest.ranks:
            self.answers[entry.control_endpoint] = manifest
        for link in self.links:
            link.lose({entry.control_endpoint for entry in manifest.ranks})


class Link:
    """A connection: what is said over it is answered in order."""

    unanswered_s, heard_s = None, 0.0

    def __init__(
        self,
        io: World,
        context: object,
        config: Config,
        ledger: Ledger,
        last_words: LastWords,
        endpoint: str,
        server_key: str | None,
        on_message: Callable[[str, Any], None],
        on_gone: Callable[[str, str], None],
    ) -> None:
        self.dealer = SimpleNamespace(problem="", is_refused=False)
        self.world = io
        self.world.links.append(self)
        self.endpoint = endpoint
        self.on_message, self.on_gone = on_message, on_gone
        self.is_closed = False

    def send(self, message: object) -> None:
        if isinstance(message, Hello):
            self.world.may_happen(self, self._answer)

    def lose(self, endpoints: set[str]) -> None:
        if self.endpoint in endpoints:
            self.world.events.pop(self, None)  # what was not answered before is not any more
            self.world.may_happen(self, self._lose)

    def close(self) -> None:
        self.is_closed = True

    def _lose(self) -> None:
        if not self.is_closed:
            self.on_gone(self.endpoint, "")

    def _answer(self) -> None:
        if self.is_closed:
            return
        if self.endpoint in self.world.unready:
            self.world.unready.remove(self.endpoint)
            self.on_message(self.endpoint, NotReady())
            return
        manifest = self.world.answers[self.endpoint]
        own = tuple(e for e in manifest.ranks if e.control_endpoint == self.endpoint)
        self.world.said += own
        if self.endpoint not in self.world.doors:
            manifest = replace(manifest, ranks=own)
        self.on_message(self.endpoint, Manifest(manifest))


def trial(around: Surroundings, peer: Peer, done: Callable[[Peer, Any], object]) -> None:
    """Every wire works, at some later time."""
    choice = SimpleNamespace(
        transport="made up",
        staging=None,
        trial=SimpleNamespace(held=()),
        duration_s=0.0,
        reasons={},
    )
    world = cast(World, around.io)
    choices = {route.source_rank: choice for route in peer.routes if not route.is_null}
    if world.trials_take_time:
        world.may_happen(next(world.keys), partial(done, peer, choices))
    else:
        done(peer, choices)


class Contact:
    """One load's wish for its peer, and what came of it."""

    def __init__(self, peers: Peers, manifest: EngineManifest, endpoint: str) -> None:
        self.peers = peers
        self.outcomes: list[Peer | Failure] = []
        self.source = SourceRef(
            engine_id=manifest.engine_id,
            endpoint=endpoint,
            offer=OfferRef(b"n" * 16, manifest.incarnation),
            num_tokens=1,
        )

    def want(self) -> None:
        self.peers.want(self.source, self.outcomes.append, needs_wire=True)

    @property
    def is_ready(self) -> bool:
        (outcome,) = self.outcomes
        return isinstance(outcome, Peer) and outcome.state is PeerState.READY


def make_peers(
    world: World,
    on_over: Callable[[Peer, Failure], None] = lambda peer, failure: None,
    ledger: Ledger | None = None,
) -> Peers:
    peers = Peers(
        Surroundings(
            io=cast(Any, world),
            context=cast(Any, None),
            config=CONFIG,
            ledger=ledger or Ledger(),
            last_words=LastWords(cast(Any, world)),
            identity=Identity("decode", b"d" * 16, RankId(0, 0)),
            transports=cast(Any, {"made up": world}),
            can_leave_unhashed=True,
            on_message=lambda peer, rank, message: None,
            on_over=on_over,
        )
    )
    peers.set_own(OWN)
    return peers


def every_order(run: Callable[[Callable[[list[object]], object]], None]) -> int:
    """Call ``run`` with each way to choose among what is enabled; how many ways there are."""
    path: list[int] = []
    for number in itertools.count(1):
        widths: list[int] = []

        def choose(enabled: list[object], widths: list[int] = widths) -> object:
            if len(widths) == len(path):
                path.append(0)
            widths.append(len(enabled))
            return enabled[path[len(widths) - 1]]

        run(choose)
        while path and path[-1] + 1 == widths[len(path) - 1]:
            path.pop()
        if not path:
            return number
        path[-1] += 1
    raise AssertionError


def play(world: World, choose: Callable[[list[object]], object]) -> None:
    """Until nothing can happen any more."""
    while enabled := world.enabled():
        world.events[choose(enabled)].popleft()()


@pytest.fixture(autouse=True)
def _made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_module, "ControlClient", Link)
    monkeypatch.setattr(peers_module, "start_trial", trial)


def world_of(lie: EngineManifest) -> World:
    honest = {e.control_endpoint: HONEST for e in HONEST.ranks}
    lying = {e.control_endpoint: lie for e in LIAR.ranks}
    return World(honest | lying, {HONEST.ranks[0].control_endpoint, DOOR})


@pytest.mark.parametrize(
    ("lie", "is_slow"), [*((lie, False) for lie in LIES), ("rank 1 is mine", True)]
)
def test_no_order_lets_a_stolen_rank_be_read_or_keeps_its_owner_out(
    lie: str, is_slow: bool
) -> None:
    """``is_slow``: rank 1 does not know its engine yet when it is asked first."""

    def run(choose: Callable[[list[object]], object]) -> None:
        world = world_of(LIES[lie])
        if is_slow:
            world.trials_take_time = False
            world.unready.add(HONEST.ranks[1].control_endpoint)
        peers = make_peers(world)
        honest = Contact(peers, HONEST, HONEST.ranks[0].control_endpoint)
        liar = Contact(peers, LIES[lie], DOOR)
        world.may_happen("honest", honest.want)
        world.may_happen("liar", liar.want)
        play(world, choose)
        assert honest.is_ready
        assert world.attached == {e.control_endpoint: e for e in HONEST.ranks}
        (failure,) = liar.outcomes
        assert isinstance(failure, Failure)
        assert failure.reason is Reason.NOT_ALLOWED

    assert every_order(run) >= 30


def test_no_order_keeps_an_engine_out_that_was_started_anew() -> None:
    """Its earlier life was met or is being met, and somebody else states its rank."""
    anew = replace(HONEST, incarnation=NEXT_LIFE)

    def run(choose: Callable[[list[object]], object]) -> None:
        world = world_of(with_stolen(LIAR, 1))
        world.trials_take_time = False
        peers = make_peers(world)
        before = Contact(peers, HONEST, HONEST.ranks[0].control_endpoint)
        liar = Contact(peers, LIAR, DOOR)
        after = Contact(peers, anew, HONEST.ranks[0].control_endpoint)
        before.want()
        world.may_happen("restart", partial(world.restart, anew))
        world.may_happen("restart", liar.want)
        play(world, choose)
        after.want()
        play(world, choose)
        assert after.is_ready
        assert world.attached == {e.control_endpoint: e for e in anew.ranks}
        assert len(before.outcomes) == 1
        assert not isinstance(liar.outcomes[0], Peer)

    assert every_order(run) >= 30


def test_no_order_leaves_two_engines_known_at_one_endpoint() -> None:
    """Another engine has come in the place of one whose end was not noticed yet."""
    other = engine("other", NEXT_LIFE, 1000, "other")

    def run(choose: Callable[[list[object]], object]) -> None:
        world = world_of(LIAR)
        peers = make_peers(world)
        before = Contact(peers, HONEST, HONEST.ranks[0].control_endpoint)
        after = Contact(peers, other, HONEST.ranks[0].control_endpoint)
        before.want()
        answers = {entry.control_endpoint: other for entry in other.ranks}
        world.may_happen("other", partial(world.answers.update, answers))
        world.may_happen("other", after.want)
        play(world, choose)
        assert after.is_ready
        assert world.attached == {e.control_endpoint: e for e in other.ranks}
        assert not before.is_ready

    assert every_order(run) >= 5


def test_one_engine_under_two_names_is_met_twice_and_read_once() -> None:
    alias = "tcp://127.0.0.1:3000"

    def run(choose: Callable[[list[object]], object]) -> None:
        names = [HONEST.ranks[0].control_endpoint, alias]
        answers = {e.control_endpoint: HONEST for e in HONEST.ranks} | {alias: HONEST}
        world = World(answers, set(names), trials_take_time=False)
        peers = make_peers(world)
        contacts = [Contact(peers, HONEST, name) for name in names]
        for number, contact in enumerate(contacts):
            world.may_happen(number, contact.want)
        play(world, choose)
        assert all(contact.is_ready for contact in contacts)

    assert every_order(run) >= 30


def test_who_wants_the_next_life_of_an_engine_meets_it() -> None:
    """Though nothing has told of the end of the last one."""
    anew = replace(HONEST, incarnation=NEXT_LIFE)

    def run(choose: Callable[[list[object]], object]) -> None:
        world = world_of(LIAR)
        peers = make_peers(world)
        before = Contact(peers, HONEST, HONEST.ranks[0].control_endpoint)
        after = [Contact(peers, anew, HONEST.ranks[0].control_endpoint) for _ in range(2)]
        before.want()
        play(world, choose)
        world.answers.update({entry.control_endpoint: anew for entry in anew.ranks})
        for contact in after:
            contact.want()
        play(world, choose)
        assert all(contact.is_ready for contact in after)
        assert not before.is_ready
        assert world.attached == {e.control_endpoint: e for e in anew.ranks}

    every_order(run)


def test_a_peer_that_is_over_is_attached_to_nothing() -> None:
    """Who hears of the end of one in whose place it answers ends all others, too."""
    other = with_stolen(LIAR, 1)  # it is its own by now

    def run(choose: Callable[[list[object]], object]) -> None:
        world = world_of(other)
        ledger = Ledger()
        peers = make_peers(world, lambda peer, failure: peers.set_own(HONEST), ledger)
        before = Contact(peers, HONEST, HONEST.ranks[0].control_endpoint)
        after = Contact(peers, other, DOOR)
        before.want()
        play(world, choose)
        world.answers[HONEST.ranks[1].control_endpoint] = other
        after.want()
        play(world, choose)
        assert isinstance(after.outcomes[0], Failure)
        assert world.attached == {}
        stats = ledger.take_stats()
        assert stats is not None
        assert stats.counts["peers.ready"] == 1  # the one before

    every_order(run)
