"""The plan of a storm: requests with their twists, and what befalls the engines. Of a seed alone.

Moments are numbers of requests: "when the 120th is sent". So a slower machine has the same storm.
A seed of a record up to 2026-11-26 has another plan here: there no request goes to both engines at
once, hostile peers come now and then, no stop is longer than 5 s, and chunks alone are not mangled.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator, Sequence

import msgspec

from tests.chaos.content import VOCAB_SIZE
from tests.chaos.mangling import KINDS as MESSAGE_KINDS


class Twist(enum.StrEnum):
    """What its client does with a request."""

    PLAIN = "plain"
    ABORT_PREFILL = "abort at prefill"
    ABORT_OFFER = "abort after prefill"  # the offer is withdrawn
    ABORT_DECODE = "abort at decode"
    TWICE = "params twice at one engine"
    TWICE_APART = "params at two engines"
    OTHER_PROMPT = "params with another prompt"
    STALE = "params of an earlier request"
    LATE = "params after the lease"
    UNTAKEN = "never sent to decode"
    TOGETHER = "sent to both at once"  # by the router's id; the offer grows


WEIGHTS = {
    Twist.PLAIN: 55,
    Twist.ABORT_PREFILL: 5,
    Twist.ABORT_OFFER: 5,
    Twist.ABORT_DECODE: 14,
    Twist.TWICE: 5,
    Twist.TWICE_APART: 5,
    Twist.OTHER_PROMPT: 3,
    Twist.STALE: 4,
    Twist.LATE: 2,
    Twist.UNTAKEN: 2,
}
TOGETHER_SHARE = 0.1
"""Of all requests, whatever else they would be."""


class Kind(enum.StrEnum):
    """What befalls an engine."""

    KILL_RANK = "kill -9 of a rank"
    KILL_SCHEDULER = "kill -9 of the scheduler"
    OTHER_LIFE = "another engine on its port"
    STOP = "SIGSTOP of a process"
    STOP_ENGINE = "SIGSTOP of all ranks"
    STOP_IO = "stop of the IO thread"
    STOP_COPY = "stop of the copy thread"
    STOP_MAIN = "stop of the engine thread"
    STOP_ZMQ = "stop of a thread of ZeroMQ"
    MANGLE = "messages mangled"
    MANGLE_CHUNKS = "chunks mangled"
    CLOCK = "clock jumps ahead"
    WALL_CLOCK = "wall clock jumps"
    RESET = "cache reset"
    CUT_WHOLE = "network cut both ways"
    CUT_PREFILL = "network cut from prefill to decode"
    CUT_DECODE = "network cut from decode to prefill"
    UNPLUG = "network cable pulled"


CUTS = (Kind.CUT_WHOLE, Kind.CUT_PREFILL, Kind.CUT_DECODE, Kind.UNPLUG)
"""What befalls the network between the sides, where they have hosts of their own."""
ON_ONE_HOST = tuple(kind for kind in Kind if kind not in CUTS)
BETWEEN_HOSTS = (
    *(*CUTS, *CUTS),
    *(Kind.KILL_RANK, Kind.KILL_SCHEDULER, Kind.STOP_ENGINE, Kind.STOP_IO, Kind.STOP_ZMQ),
    *(Kind.MANGLE, Kind.MANGLE_CHUNKS, Kind.CLOCK, Kind.RESET),
)
CHUNKLESS = ("shm", "cuda_ipc")
"""Wires that have no chunks: a sink reads its source's memory."""


def kinds_for(wire: str, kinds: Sequence[Kind] = ON_ONE_HOST) -> tuple[Kind, ...]:
    """Of these, what can befall engines with that wire."""
    return tuple(k for k in kinds if k is not Kind.MANGLE_CHUNKS or wire not in CHUNKLESS)


class Shape(msgspec.Struct, frozen=True):
    """An engine of the fleet, with blocks for so many tokens. ``slow_s``: as
    :class:`tests.chaos.child.Spec` has it. ``presumes``: it asks for an offer before it is found.
    """

    name: str
    is_prefill: bool
    tp_size: int
    block_size: int
    layout: str
    slow_s: float = 0.0
    num_tokens: int = 3840
    presumes: bool = True


FLEET = (
    Shape("p0", True, 1, 16, "HND"),
    Shape("p1", True, 2, 32, "NHD"),
    Shape("d0", False, 2, 16, "NHD", slow_s=0.004),
    Shape("d1", False, 1, 32, "HND", presumes=False),
)
SLOW_FLEET = (FLEET[0], Shape("d0", False, 2, 16, "NHD", slow_s=0.05, num_tokens=640))
"""A copy takes as long as a step of the engine, and blocks that come back are used at once."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request. ``wait_s``: until the client does what its twist says."""

    number: int
    seed: int
    num_tokens: int
    num_new: int
    prefill: str
    decode: str
    twist: Twist
    wait_s: float

    def prompt(self) -> tuple[int, ...]:
        """Its tokens; a third of the requests begin as another one does."""
        shared = random.Random(self.seed % 7)
        own = random.Random(self.seed)
        num_shared = 32 if self.seed % 3 == 0 else 0
        num_shared = min(num_shared, self.num_tokens - 1)
        return (
            *(shared.randrange(1, VOCAB_SIZE) for _ in range(num_shared)),
            *(own.randrange(1, VOCAB_SIZE) for _ in range(self.num_tokens - num_shared)),
        )


class Injection(msgspec.Struct, frozen=True, kw_only=True):
    """``at``: when so many requests were sent. ``duration_s``: how long it stands, or how far a
    clock jumps. ``gap_s``: from a kill to the restart. ``messages``: how they, or chunks, are
    mangled, and ``share``: how many.
    """

    at: int
    kind: Kind
    engine: str
    rank: int
    duration_s: float = 0.0
    gap_s: float = 0.0
    messages: tuple[str, ...] = ()
    share: float = 0.0

    @property
    def name(self) -> str:
        """As it is counted."""
        is_stop = self.kind in (*STOPS, *CUTS)
        is_long = is_stop and self.duration_s >= LONG_STOP_S
        return f"{self.kind}, {self.duration_s:g} s" if is_long else self.kind.value


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All of a storm. ``siege_s``: all the while a hostile peer makes an attack that often; 0:
    there is none.
    """

    seed: int
    fleet: tuple[Shape, ...]
    asks: tuple[Ask, ...]
    injections: tuple[Injection, ...]
    siege_s: float = 0.0


LONGEST_PROMPT = 400
STEP_TOKENS = 192
"""What an engine computes in one step: the longer half of the prompts takes several."""
THREAD_STOPS = (Kind.STOP_IO, Kind.STOP_COPY, Kind.STOP_MAIN, Kind.STOP_ZMQ)
STOPS = (Kind.STOP, Kind.STOP_ENGINE, *THREAD_STOPS)
THREAD_STOPS_S = (1.0, 3.0, 5.0)
PROCESS_STOPS_S = (0.3, 1.2, 3.5)
MANGLED_S = (1.0, 4.0, 10.0)
LONG_STOP_S, LONG_STOP_SHARE = 10.0, 0.1
"""Longer than every time-out of the engines and of their request channel; and how many stops are,
and cuts of the network.
"""
SIEGE_S = 0.2


def make_plan(
    seed: int,
    num_requests: int,
    *,
    fleet: Sequence[Shape] = FLEET,
    kinds: Sequence[Kind] = ON_ONE_HOST,
    every: int = 40,
    longest_stop_s: float = LONG_STOP_S,
    victims: Sequence[str] = (),
    siege_s: float = 0.0,
) -> Plan:
    """``every``: a storm has one injection for so many requests, each kind in turn; ``victims``:
    the engines that they befall, all if there are none.
    """
    drawn = random.Random(seed)
    prefills = [each.name for each in fleet if each.is_prefill]
    decodes = [each.name for each in fleet if not each.is_prefill]
    twists, weights = list(WEIGHTS), list(WEIGHTS.values())
    asks = tuple(
        Ask(
            number=number,
            seed=drawn.getrandbits(32),
            num_tokens=drawn.choice((drawn.randrange(2, 40), drawn.randrange(20, LONGEST_PROMPT))),
            num_new=drawn.randrange(1, 5),
            prefill=drawn.choice(prefills),
            decode=drawn.choice(decodes),
            twist=drawn.choices(twists, weights)[0],
            wait_s=drawn.choice((0.0, drawn.random() * 0.02, drawn.random() * 0.3)),
        )
        for number in range(num_requests)
    )
    count = max(len(kinds), num_requests // every) if kinds else 0
    order = [
        kind for _ in range(-(-count // max(1, len(kinds)))) for kind in _shuffled(kinds, drawn)
    ]
    hit = [each for each in fleet if each.name in victims or not victims]
    injections = tuple(
        _injection(at, kind, drawn, hit, longest_stop_s)
        for at, kind in zip(_moments(count, num_requests, drawn), order, strict=False)
    )
    return Plan(
        seed=seed,
        fleet=tuple(fleet),
        asks=tuple(_together(asks, seed)),
        injections=injections,
        siege_s=siege_s,
    )


def _together(asks: Sequence[Ask], seed: int) -> Iterator[Ask]:
    """Some of them go to both engines at once, with prompts of several steps, so that their offers
    grow. Drawn apart: a seed keeps everything else that it had before there were such requests.
    """
    drawn = random.Random(f"together {seed}")
    for ask in asks:
        num_tokens = drawn.randrange(STEP_TOKENS + 1, LONGEST_PROMPT)
        if drawn.random() < TOGETHER_SHARE:
            yield msgspec.structs.replace(ask, twist=Twist.TOGETHER, num_tokens=num_tokens)
        else:
            yield ask


def _shuffled(kinds: Sequence[Kind], drawn: random.Random) -> list[Kind]:
    return drawn.sample(list(kinds), len(kinds))


def _moments(count: int, num_requests: int, drawn: random.Random) -> Iterator[int]:
    """Spread over the requests, the first tenth left out: by then engines have met."""
    first = num_requests // 10
    yield from sorted(drawn.randrange(first, max(first + 1, num_requests)) for _ in range(count))


def _injection(
    at: int, kind: Kind, drawn: random.Random, fleet: Sequence[Shape], longest_s: float
) -> Injection:
    # Only who gives KV has chunks
    able = [each for each in fleet if each.is_prefill or kind is not Kind.MANGLE_CHUNKS]
    shape = drawn.choice(able)
    if kind is Kind.KILL_RANK and any(each.tp_size > 1 for each in fleet):
        shape = drawn.choice([each for each in fleet if each.tp_size > 1])
    rank = drawn.randrange(shape.tp_size)
    if kind is Kind.KILL_RANK:
        rank = shape.tp_size - 1
    elif kind is Kind.KILL_SCHEDULER:
        rank = 0
    usual_s = THREAD_STOPS_S if kind in THREAD_STOPS else PROCESS_STOPS_S
    duration_s = drawn.choice([each_s for each_s in usual_s if each_s <= longest_s])
    if drawn.random() < LONG_STOP_SHARE and longest_s >= LONG_STOP_S:
        duration_s = LONG_STOP_S
    messages: tuple[str, ...] = ()
    share = 0.0
    if kind is Kind.CLOCK:
        duration_s = drawn.choice((0.5, 2.0, 60.0, 7200.0))
    elif kind is Kind.WALL_CLOCK:
        duration_s = drawn.choice((-86400.0, -5.0, 5.0, 86400.0))
    elif kind in (Kind.MANGLE, Kind.MANGLE_CHUNKS):
        duration_s = drawn.choice([each_s for each_s in MANGLED_S if each_s <= longest_s])
        messages = tuple(drawn.sample(MESSAGE_KINDS, drawn.randrange(1, len(MESSAGE_KINDS) + 1)))
        share = drawn.choice((0.1, 0.3, 0.6))
    return Injection(
        at=at,
        kind=kind,
        engine=shape.name,
        rank=rank,
        duration_s=duration_s,
        gap_s=drawn.choice((0.0, 0.3, 1.5)),
        messages=messages,
        share=share,
    )
