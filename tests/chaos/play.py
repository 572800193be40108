"""Plays a storm: sends its requests as a router would, lets everything befall the engines, and
judges what becomes of each request.

What must hold: a request ends once, in one state. What it answers is right, and so is the KV that
it computed with. When the storm is over nothing is left of it, and everything works again.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq

from kvxfer.connector.params import early_params, mint_request, prefill_params
from kvxfer.engine.rpc import (
    Abort,
    Done,
    Generate,
    RequestRefused,
    ToClient,
    ToEngine,
    Token,
)
from kvxfer.errors import KvxferError, PeerLost
from kvxfer.transfer.wire import Reason
from tests.chaos.attackers import Siege
from tests.chaos.child import FLIPS, WRONGS, Order
from tests.chaos.deeds import HELD, NOBODYS, deeds_in
from tests.chaos.fleet import IMPATIENT, Fleet, Member, Usage, left_behind, wait_for_end
from tests.chaos.mangling import CHUNK, MESSAGE
from tests.chaos.storm import STEP_TOKENS, STOPS, THREAD_STOPS, Ask, Injection, Kind, Plan, Twist
from tests.hostile.cases import Target

OFFER: dict[str, Any] = {"do_remote_decode": True}
IN_FLIGHT = 120
"""Requests at once, at engines of which each computes 64."""
HUNG_S = 60.0
"""A request that has not ended after this, at an engine that runs: 300 in flight wait for 10 s,
stops are 10 s at most, and time-outs 6.
"""
ANSWER_S = 10.0
"""In which an engine without requests says how it stands."""
REST_S = 30.0
"""In which everything comes back after a storm: three times the longest stop."""
NUM_CALM = {Twist.PLAIN: 6, Twist.TOGETHER: 2}
"""Requests from each prefill to each decode engine, before and after the storm. Who is asked early
must have answered before: these come last.
"""
REMEMBERED_S = 3.0
"""A contact that begins in the storm's last moment fails after its time-out of 1.5 s, and that is
remembered for a second: until then what failed in the storm fails in the calm.
"""
NUM_STALE = 64
PLAIN_EVERY = 10
"""When all requests went to decode alone until an engine was back, one storm of 1,250 over NIXL
loaded a single one, and was as green as the others.
"""
BACK_OFF_S = 2.0
"""In which clients whose requests were lost with an engine send no others: 300 of them would be
sent to the engines that are left within a second, with all that befalls those meanwhile.
"""
LEAST_LOADED_SHARE = 0.1
"""Of a storm's requests. The wildest ones, between hosts whose network is cut, have twice that."""
COUNTED = (
    *("requests.loaded", "requests.in_step", "verify.equal", "verify.differing"),
    "preemptions",
)
"""Counters of engines: what a setting was for has happened."""
INTERNAL = ("io.errors", "loads.unforeseen", "offers.unforeseen")
"""What must not be counted, whatever happens; the file PID.errors of the storm's folder has it, and
outlives a kill.
"""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the log. ``at_s``: since the storm began."""

    at_s: float
    what: str
    of: str = ""
    detail: str = ""


class Summary(msgspec.Struct, kw_only=True):
    """What came of a storm. ``in_flight``: the most requests that had no answer yet, and ``held``:
    the most that an engine had. ``injections``: what has befallen the engines, and ``missed``: what
    was to, and met nobody; ``mangled``: messages and chunks, by what was done to them; ``attacks``:
    of hostile peers, by case. ``flipped``: how requests ended of whose KV a bit was flipped;
    ``counts``: of the lives that are there at the end; ``wrong``, ``lost``, ``hung``, ``leaked``:
    one line each; ``stood``: files that say where the threads of engines that hung stood.
    """

    seed: int
    wire: str
    num_requests: int
    duration_s: float = 0.0
    in_flight: int = 0
    held: dict[str, int] = {}
    injections: dict[str, int] = {}
    missed: dict[str, int] = {}
    mangled: dict[str, int] = {}
    attacks: dict[str, int] = {}
    prefills: dict[str, int] = {}
    ends: dict[str, int] = {}
    flipped: dict[str, int] = {}
    counts: dict[str, int] = {}
    lives: dict[str, int] = {}
    wrong: list[str] = []
    lost: list[str] = []
    hung: list[str] = []
    leaked: list[str] = []
    stood: list[str] = []

    def faults(self) -> list[str]:
        """What must not happen and has, all of it, named."""
        return [
            f"{kind}: {line}"
            for kind in ("wrong", "lost", "hung", "leaked")
            for line in getattr(self, kind)
        ]

    def problems(self) -> list[str]:
        """None: the storm was clean, and shows something."""
        least = math.ceil(LEAST_LOADED_SHARE * self.num_requests)
        if (faults := self.faults()) or (loaded := self.ends.get("loaded", 0)) >= least:
            return faults
        return [f"shows little: expected {least} requests to load KV, got {loaded}"]


@dataclass(slots=True)
class Sent:
    """A request at one engine. ``end``: how it has ended there, "" while it has not; ``load``: the
    nonce of the offer that it loads, if any, and the engine's incarnation. ``was_aborted``: its
    engine was told to abort it. ``detail``: why it loaded nothing, in words.
    """

    ask: Ask
    request_id: str
    engine: str
    life: int
    is_prefill: bool
    prompt: tuple[int, ...]
    num_new: int
    has_params: bool
    is_foreign: bool
    sent_s: float
    load: tuple[str, str]
    tokens: list[int] = field(default_factory=list)
    end: str = ""
    was_aborted: bool = False
    detail: str = ""


class Play:
    """One storm over one fleet. ``in_flight``: requests that are sent without an answer."""

    def __init__(
        self, plan: Plan, fleet: Fleet, folder: Path, wire: str, *, in_flight: int = IN_FLIGHT
    ) -> None:
        self._plan, self._fleet, self._folder = plan, fleet, folder
        self._in_flight = in_flight
        self.summary = Summary(seed=plan.seed, wire=wire, num_requests=len(plan.asks))
        self._sent: dict[str, Sent] = {}
        self._open: dict[str, Sent] = {}
        self._num_lost = 0
        """Requests lost with an engine, whose clients back off."""
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._stale: list[tuple[tuple[int, ...], dict[str, Any]]] = []
        self._ends: Counter[str] = Counter()
        self._prefills: Counter[str] = Counter()
        self._befallen: set[int] = set()
        """Numbers of the injections that have befallen an engine, as far as this process knows."""
        self._log = (folder / "storm.jsonl").open("w", encoding="utf-8")
        self._started_s = time.monotonic()
        self._wrong_seen = 0
        self._siege: Siege | None = None
        self._last_params: dict[str, dict[str, Any]] = {}
        self._early: dict[int, Sent | None] = {}
        self._looked_at: set[tuple[str, int]] = set()

    # ------------------------------------------------------------------ the whole

    def run(self) -> Summary:
        """Calm, storm, calm; then everything is looked at, and ended."""
        for member in self._fleet:
            self._fleet.connect(member)
        self._calm("before")
        self._come_to_rest()
        if self.summary.hung:  # a look at its threads may have ended a process: see ``standing``
            return self._close()
        usages = self._fleet.usages()
        self._fleet.write_descriptors("before")
        self._say("begin", detail=f"{len(self._plan.asks)} requests")
        begun_s = time.monotonic()
        with self._besieged():
            self._storm()
        self.summary.duration_s = round(time.monotonic() - begun_s, 1)
        self._say("end")
        self._come_to_rest()
        if not self.summary.hung:
            self._count()
            time.sleep(REMEMBERED_S)
            self._calm("after")
            self._come_to_rest()
            self._compare(usages)
        return self._close()

    def _count(self) -> None:
        counts: Counter[str] = Counter()
        for member in self._fleet:
            if member.client is not None:
                counts.update(member.client.ask(ANSWER_S).counts)
        self.summary.counts = {name: counts[name] for name in COUNTED if counts[name]}
        self.summary.lost += [f"{counts[name]} {name}" for name in INTERNAL if counts[name]]

    def _close(self) -> Summary:
        summary = self.summary
        summary.prefills = dict(sorted(self._prefills.items()))
        summary.ends = dict(sorted(self._ends.items()))
        summary.lives = {member.name: member.lives for member in self._fleet}
        self._fleet.close()
        wait_for_end(self._fleet.had_pids)
        summary.leaked += left_behind(self._fleet.had_pids, self._fleet.names)
        summary.lost += _errors_in(self._folder)
        self._take_deeds()
        self._look_for_wrong()
        self._look_at_flips()
        for kind in ("wrong", "lost", "hung", "leaked"):
            for line in getattr(summary, kind):
                self._say(kind, detail=line)
        self._log.close()
        return summary

    def _take_deeds(self) -> None:
        """What has been done, as who did it says."""
        deeds, injections = deeds_in(self._folder), self._plan.injections
        done = self._befallen.union(deed.order for deed in deeds) - {NOBODYS}
        self.summary.injections = _counted(injections[number].name for number in done)
        self.summary.missed = _counted(
            each.name for number, each in enumerate(injections) if number not in done
        )
        self.summary.mangled = _counted(
            deed.what for deed in deeds if deed.order >= 0 and injections[deed.order].messages
        )
        for deed in deeds:
            if deed.what == HELD:
                held = self.summary.held
                held[deed.of] = max(held.get(deed.of, 0), deed.number)

    @contextmanager
    def _besieged(self) -> Iterator[None]:
        """By hostile peers meanwhile, if the plan has any."""
        if not self._plan.siege_s:
            yield
            return
        siege = self._siege = Siege(
            self._plan.seed, self._plan.siege_s, self._fleet.prefill_network
        )
        try:
            yield
        finally:
            self._siege = None
            siege.close()
            self.summary.attacks = dict(sorted(siege.counts.items()))

    def _storm(self) -> None:
        asks, injections = list(self._plan.asks), list(enumerate(self._plan.injections))
        num_sent = 0
        while num_sent < len(asks) or self._open or self._due:
            while injections and injections[0][1].at <= num_sent:
                self._befall(*injections.pop(0))
            while num_sent < len(asks) and len(self._open) + self._num_lost < self._in_flight:
                if injections and injections[0][1].at <= num_sent:
                    break
                if not self._begin(asks[num_sent]):
                    break
                num_sent += 1
            self._go_round()

    def _go_round(self) -> None:
        """Hear what has come, do what is due, look after engines that have gone."""
        now_s = time.monotonic()
        self.summary.in_flight = max(self.summary.in_flight, len(self._open))
        if self._siege is not None:
            self._siege.go_on(self._targets)
        while self._due and self._due[0][0] <= now_s:
            heapq.heappop(self._due)[2]()
        self._tend()
        self._hear(min(0.02, max(0.0, self._due[0][0] - now_s)) if self._due else 0.02)
        for sent in [s for s in self._open.values() if now_s - s.sent_s > HUNG_S]:
            self._look_at(self._fleet[sent.engine])
            self.summary.hung.append(f"{sent.request_id} at {sent.engine} ({sent.ask.twist})")
            self._end(sent, "hung")

    def _look_at(self, member: Member) -> None:
        """Where an engine stands that hangs or moves no KV, once in each of its lives."""
        life = member.name, member.lives
        if life in self._looked_at:
            return
        self._looked_at.add(life)
        self.summary.stood += [
            f"{self._folder.name}/{name}" for name in self._fleet.look_at(member)
        ]
        self._say("hangs", member.name, f"life {member.lives}, it says: {self._fleet.says(member)}")

    def _calm(self, when: str) -> None:
        """Every prefill engine serves every decode engine, or that is a fault."""
        expected, prefills = Counter(self._ends), Counter(self._prefills)
        numbers = itertools.count(len(self._plan.asks) if when == "before" else 10_000_000)
        asks: list[Ask] = []
        for twist in NUM_CALM:
            asks += (some := self._asks_of_calm(twist, numbers))
            for ask in some:
                self._begin(ask)
            while self._open or self._due:
                self._go_round()
        moved = self._ends - expected
        given = self._prefills - prefills
        if set(given) != {"prefilled"}:
            self.summary.lost.append(
                f"calm {when} the storm: expected all prefilled, got {dict(given)}"
            )
        allowed = {"loaded", "cached"}
        if self._fleet.faults:  # of two ranks the one that finds a flip ends the offer of both
            allowed |= {f"computed: {reason}" for reason in (Reason.CORRUPT, Reason.ENDED)}
        if set(moved) - allowed:
            for member in self._fleet:
                self._look_at(member)
            why = sorted({sent.detail for sent in self._sent.values() if sent.ask in asks} - {""})
            self.summary.lost.append(
                f"calm {when} the storm: expected all loaded, got {dict(moved)}: {why}"
            )
        self._expect_pairs(when, asks)
        self._ends, self._prefills = expected, prefills
        for request_id in [r for r, s in self._sent.items() if s.ask in asks]:
            del self._sent[request_id]

    def _asks_of_calm(self, twist: Twist, numbers: Iterator[int]) -> list[Ask]:
        shortest = STEP_TOKENS + 1 if twist is Twist.TOGETHER else 20
        return [
            Ask(
                number=(number := next(numbers)),
                seed=number * 7919 + self._plan.seed,
                num_tokens=shortest + 37 * i,
                num_new=2,
                prefill=prefill.name,
                decode=decode.name,
                twist=twist,
                wait_s=0.0,
            )
            for i in range(NUM_CALM[twist])
            for prefill in self._fleet
            for decode in self._fleet
            if prefill.shape.is_prefill and not decode.shape.is_prefill
        ]

    def _expect_pairs(self, when: str, asks: list[Ask]) -> None:
        """KV has moved from each prefill engine to each decode engine, with a flip or without,
        whichever way it was asked for.
        """
        pairs: dict[tuple[str, str, str], set[str]] = {
            (ask.prefill, ask.decode, ask.twist): set() for ask in asks
        }
        for sent in self._sent.values():
            if (ask := sent.ask) in asks and not sent.is_prefill:
                pairs[ask.prefill, ask.decode, ask.twist].add(sent.end)
        moving = {"loaded", f"computed: {Reason.CORRUPT}"} if self._fleet.faults else {"loaded"}
        self.summary.lost += [
            f"calm {when} the storm: {prefill} to {decode} ({twist}): expected KV to move, "
            f"got {sorted(ends)}"
            for (prefill, decode, twist), ends in pairs.items()
            if not ends & moving
        ]

    # ------------------------------------------------------------------ requests

    def _begin(self, ask: Ask) -> bool:
        """At prefill. False: none serves, and it waits as it does at a router; one in PLAIN_EVERY
        goes to decode alone.
        """
        prompt = ask.prompt()
        prefill = self._serving(ask.prefill)
        if prefill is None:
            if ask.number % PLAIN_EVERY or self._serving(ask.decode) is None:
                return False
            self._decode(ask, None, prompt, ask.decode)
            return True
        if ask.twist is Twist.TOGETHER and self._begin_together(ask, prefill, prompt):
            return True
        sent = self._send(prefill, ask, f"r{ask.number}", prompt, 1, OFFER)
        if sent is not None and ask.twist is Twist.ABORT_PREFILL:
            self._later(ask.wait_s, lambda: self._abort(sent))
        return True

    def _begin_together(self, ask: Ask, prefill: Member, prompt: tuple[int, ...]) -> bool:
        """At both, as a router does that knows an answer of prefill; it may be of a life that has
        ended. False: it knows none.
        """
        request = mint_request()
        early = early_params(self._last_params.get(prefill.name), request)
        if early is None:
            return False
        self._send(prefill, ask, f"r{ask.number}", prompt, 1, prefill_params(request))
        self._early[ask.number] = self._decode(ask, early, prompt)
        return True

    def _prefilled(self, sent: Sent, params: dict[str, Any]) -> None:
        ask, prompt = sent.ask, sent.prompt
        self._last_params[sent.engine] = params
        match ask.twist:
            case Twist.TOGETHER if ask.number in self._early:
                loading = self._early[ask.number]
                if loading is not None:
                    loading.load = params["kvxfer"]["nonce"], loading.load[1]
                return
            case Twist.UNTAKEN:
                return
            case Twist.LATE:
                self._later(IMPATIENT["lease_s"] + 0.7, lambda: self._decode(ask, params, prompt))
                return
            case Twist.OTHER_PROMPT:
                other = tuple(reversed(prompt))
                self._decode(ask, params, other, is_foreign=other != prompt)
                return
            case Twist.STALE if self._stale:
                old_prompt, old = self._stale[ask.seed % len(self._stale)]
                self._decode(ask, old, old_prompt)
                self._later(0.0, lambda: self._decode(ask, params, prompt, suffix="-own"))
                return
        self._stale = [*self._stale[-NUM_STALE:], (prompt, params)]
        first = self._decode(ask, params, prompt)
        if ask.twist is Twist.ABORT_OFFER:
            self._later(ask.wait_s, lambda: self._abort(sent))
        elif ask.twist is Twist.ABORT_DECODE and first is not None:
            self._later(ask.wait_s, lambda: self._abort(first))
        elif ask.twist is Twist.TWICE:
            self._later(ask.wait_s, lambda: self._decode(ask, params, prompt, suffix="-again"))
        elif ask.twist is Twist.TWICE_APART:
            others = [
                m.name for m in self._fleet if not m.shape.is_prefill and m.name != ask.decode
            ]
            name = others[0] if others else ask.decode
            self._later(
                ask.wait_s, lambda: self._decode(ask, params, prompt, name, suffix="-apart")
            )

    def _decode(
        self,
        ask: Ask,
        params: dict[str, Any] | None,
        prompt: tuple[int, ...],
        name: str = "",
        *,
        suffix: str = "",
        is_foreign: bool = False,
    ) -> Sent | None:
        decode = self._serving(name or ask.decode)
        if decode is None:
            self._later(
                0.1,
                lambda: self._decode(
                    ask, params, prompt, name, suffix=suffix, is_foreign=is_foreign
                ),
            )
            return None
        request_id = f"r{ask.number}{suffix}"
        return self._send(decode, ask, request_id, prompt, ask.num_new, params, is_foreign)

    def _serving(self, name: str) -> Member | None:
        """This engine, or another one of its side, as a router chooses."""
        wanted = self._fleet[name]
        alike = [m for m in self._fleet if m.shape.is_prefill == wanted.shape.is_prefill]
        for member in (wanted, *alike):
            if member.client is not None:
                return member
        return None

    def _send(
        self,
        member: Member,
        ask: Ask,
        request_id: str,
        prompt: tuple[int, ...],
        num_new: int,
        params: dict[str, Any] | None,
        is_foreign: bool = False,
    ) -> Sent | None:
        sent = Sent(
            ask=ask,
            request_id=request_id,
            engine=member.name,
            life=member.lives,
            is_prefill=member.shape.is_prefill,
            prompt=prompt,
            num_new=num_new,
            has_params=params is not None,
            is_foreign=is_foreign,
            sent_s=time.monotonic(),
            load=(
                (params or {}).get("kvxfer", {}).get("nonce", ""),
                member.facts[0].incarnation.hex(),
            ),
        )
        key = _key(member, request_id)
        self._sent[key] = self._open[key] = sent
        self._say_to(member, Generate(request_id, prompt, num_new, params))
        return sent

    def _abort(self, sent: Sent) -> None:
        member = self._fleet[sent.engine]
        if member.lives == sent.life and member.client is not None:
            sent.was_aborted = True
            self._say_to(member, Abort(sent.request_id))

    def _say_to(self, member: Member, message: ToEngine) -> None:
        assert member.client is not None
        member.client.send(message)

    # ------------------------------------------------------------------ answers

    def _hear(self, timeout_s: float) -> None:
        poller = zmq.Poller()
        for member in self._fleet:
            for socket in member.client.sockets if member.client else ():
                poller.register(socket, zmq.POLLIN)
        poller.poll(max(0, int(timeout_s * 1000)))
        for member in self._fleet:
            if member.client is None:
                continue
            try:
                messages = member.client.poll(0)
            except PeerLost:
                self._lose(member, "client lost")
                continue
            for message in messages:
                self._take(member, message)

    def _lose(self, member: Member, end: str) -> None:
        """Its client has gone, and with it the answers to all that it was asked."""
        unanswered = [sent for sent in self._open.values() if sent.engine == member.name]
        if member.client is not None:
            self._say(end, member.name, f"life {member.lives}, {len(unanswered)} requests")
        self._fleet.forget_client(member)
        for sent in unanswered:
            self._end(sent, end)
        self._back_off(len(unanswered))
        if end == "client lost" and member.back_at_s is None:
            self._later(0.3, lambda: self._reconnect(member, member.lives))

    def _back_off(self, number: int) -> None:
        def come_again() -> None:
            self._num_lost -= number

        self._num_lost += number
        self._later(BACK_OFF_S, come_again)

    def _reconnect(self, member: Member, life: int) -> None:
        if member.lives != life or member.back_at_s is not None or member.group.dead():
            return
        if (wait_s := member.stands_until_s - time.monotonic()) > 0:
            self._later(wait_s, lambda: self._reconnect(member, life))
            return
        try:
            self._fleet.connect(member)
            self._say("connected again", member.name, f"life {life}")
        except KvxferError as e:
            self._say("no connection", member.name, str(e))
            self._later(1.0, lambda: self._reconnect(member, life))

    def _take(self, member: Member, message: ToClient) -> None:
        if isinstance(message, (Token, Done, RequestRefused)):
            sent = self._sent.get(_key(member, message.request_id))
            if sent is None:
                return  # of the calm, or of a client before this one
            if sent.end:
                self.summary.lost.append(f"{_who(sent)}: {type(message).__name__} after {sent.end}")
            elif isinstance(message, Token):
                sent.tokens.append(message.token_id)
            elif isinstance(message, RequestRefused):
                self._end(sent, "refused")
                self.summary.lost.append(f"{_who(sent)}: refused, {message.error}")
            else:
                self._done(sent, message)

    def _done(self, sent: Sent, done: Done) -> None:
        is_whole = done.status == "FINISHED_LENGTH_CAPPED"
        expected = self._fleet.answer(sent.prompt, sent.num_new if is_whole else len(sent.tokens))
        if tuple(sent.tokens) != expected:
            self.summary.wrong.append(f"{_who(sent)}: answered {sent.tokens}, expected {expected}")
        if not is_whole and not (done.status == "FINISHED_ABORTED" and sent.was_aborted):
            self.summary.lost.append(f"{_who(sent)}: {done.status}, and nobody asked for that")
        if sent.is_prefill:
            self._end(sent, "prefilled" if done.kv_transfer_params else done.status)
            if done.kv_transfer_params:
                self._prefilled(sent, done.kv_transfer_params)
            return
        if not is_whole:
            end = "aborted" if done.status == "FINISHED_ABORTED" else done.status
        elif done.failure is not None:
            end = f"computed: {done.failure}"
            sent.detail = done.detail or next((e.detail for e in done.loads if e.detail), "")
        elif done.num_external_tokens:
            end = "loaded"
            if sent.is_foreign:
                self.summary.wrong.append(f"{_who(sent)}: loaded the KV of another prompt")
        else:
            end = self._without_load(sent, done) if sent.has_params else "plain"
        self._end(sent, end)

    def _without_load(self, sent: Sent, done: Done) -> str:
        """It had params, and nothing is said to have failed: its KV was here, or a part of it and
        another request has read the rest. vLLM's engines do not count its tokens here.
        """
        num_computed = done.num_prompt_tokens - done.num_cached_tokens
        if num_computed <= self._fleet[sent.engine].shape.block_size:
            return "cached"
        if not done.num_cached_tokens:
            self.summary.lost.append(f"{_who(sent)}: computed all of its KV, and none has failed")
        return "cached in part"

    def _end(self, sent: Sent, end: str) -> None:
        sent.end = end
        (self._prefills if sent.is_prefill else self._ends)[end] += 1
        self._open = {key: each for key, each in self._open.items() if each is not sent}

    def _look_for_wrong(self) -> None:
        path = self._folder / WRONGS
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines()
            self.summary.wrong += lines[self._wrong_seen :]
            self._wrong_seen = len(lines)

    def _look_at_flips(self) -> None:
        """KV of which a bit was flipped is never taken, and no other is refused for that."""
        path = self._folder / FLIPS
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        flipped = {tuple(json.loads(line)) for line in lines}
        loading = [sent for sent in self._sent.values() if sent.load[0] and not sent.is_prefill]
        num_of = Counter(sent.load for sent in loading)
        ends: Counter[str] = Counter()
        for sent in loading:
            is_flipped = sent.load in flipped
            ends[sent.end] += is_flipped
            # Of two requests with one offer at one engine only one may be the flipped one
            if sent.end == "loaded" and is_flipped and num_of[sent.load] == 1:
                self.summary.wrong.append(f"{_who(sent)}: loaded KV of which a bit was flipped")
            if sent.end == f"computed: {Reason.CORRUPT}" and not is_flipped:
                self.summary.wrong.append(f"{_who(sent)}: right KV was taken for corrupt")
        self.summary.flipped = {end: ends[end] for end in sorted(+ends)}

    # ------------------------------------------------------------------ what befalls engines

    def _befall(self, number: int, injection: Injection) -> None:
        member = self._fleet[injection.engine]
        self._say(
            injection.kind.value,
            f"{member.name} rank {injection.rank}",
            msgspec.json.encode(injection).decode(),
        )
        match injection.kind:
            case Kind.KILL_RANK | Kind.KILL_SCHEDULER | Kind.OTHER_LIFE:
                is_done = self._kill(member, injection)
            case Kind.STOP | Kind.STOP_ENGINE:
                every = tuple(range(member.shape.tp_size))
                ranks = every if injection.kind is Kind.STOP_ENGINE else (injection.rank,)
                is_done = self._fleet.stop(member, ranks)
                self._later(injection.duration_s, lambda: self._fleet.go_on(member))
            case Kind.STOP_IO | Kind.STOP_COPY | Kind.STOP_MAIN | Kind.STOP_ZMQ:
                which = _THREADS[injection.kind]
                stood = self._fleet.stop_thread(member, injection.rank, which, injection.duration_s)
                self._say("stands" if stood else "nothing to stop", member.name, stood)
                is_done = bool(stood)
            case Kind.CUT_WHOLE | Kind.CUT_PREFILL | Kind.CUT_DECODE | Kind.UNPLUG:
                self._fleet.cut(injection.kind)
                self._later(injection.duration_s, self._fleet.heal)
                is_done = True
            case _:  # the processes themselves say what they have done
                is_of_all = injection.kind in (Kind.MANGLE, Kind.MANGLE_CHUNKS)
                for rank in range(member.shape.tp_size) if is_of_all else (injection.rank,):
                    self._fleet.tell(member, rank, _order(number, injection))
                is_done = False
        if is_done:
            self._befallen.add(number)
        lasts_s = injection.duration_s
        if injection.kind in STOPS and is_done:
            lasts_s = member.stands_for(lasts_s, is_thread=injection.kind in THREAD_STOPS)
        if injection.kind not in (Kind.CLOCK, Kind.WALL_CLOCK):
            self._later(lasts_s + 1.0, lambda: None)  # rest comes after its end

    def _kill(self, member: Member, injection: Injection) -> bool:
        if member.back_at_s is not None or member.client is None:
            return False  # it is dead already
        if injection.kind is Kind.OTHER_LIFE:
            member.is_usurper = not member.is_usurper
        is_done = self._fleet.kill(member, injection.rank)
        member.back_at_s = time.monotonic() + injection.gap_s
        return is_done

    def _tend(self) -> None:
        """Engines that died are started anew; those that have started are connected to."""
        now_s = time.monotonic()
        for member in self._fleet:
            if member.back_at_s is not None:
                if now_s >= member.back_at_s:
                    self._lose(member, "engine lost")
                    self._fleet.bury(member)
                    self._fleet.restart(member)
                    self._say("restarted", member.name, f"life {member.lives}")
            elif member.last_served == member.lives and (dead := member.group.dead()):
                # Also without a client: it may be the first to notice, and is gone then
                self.summary.lost.append(f"{member.name}: {dead} died by itself")
                member.back_at_s = now_s
            elif member.client is not None or now_s < member.stands_until_s:
                continue
            elif self._fleet.serves(member):
                self._meet(member)

    def _meet(self, member: Member) -> None:
        """A new life has reported. One that has died instead was not killed: that waits for it. One
        that finds no network may say so and end; its supervisor starts it again.
        """
        try:
            self._fleet.connect(member)
            self._say("serves", member.name, f"life {member.lives}")
        except KvxferError as e:
            self._say("does not start", member.name, str(e))
            if member.group.dead() and self._fleet.had_network(member):
                self.summary.lost.append(f"{member.name}: did not start: {e}")
            member.back_at_s = time.monotonic() + 0.2

    def _targets(self) -> list[Target]:
        """Ranks that serve and give KV, and an offer of each: what a hostile peer may know."""
        sinks = [m for m in self._fleet if not m.shape.is_prefill and 0 in m.facts]
        return [
            Target(
                control=facts.control,
                data=facts.data.get("zmq") or next(iter(facts.data.values()), ""),
                nonce=bytes.fromhex(params["kvxfer"]["nonce"]),
                incarnation=bytes.fromhex(params["kvxfer"]["incarnation"]),
                sink_life=sinks[0].facts[0].incarnation if sinks else bytes(16),
            )
            for member in self._fleet
            if (params := self._last_params.get(member.name)) and member.client is not None
            for facts in member.facts.values()
        ]

    def _later(self, wait_s: float, act: Callable[[], object]) -> None:
        due_s = time.monotonic() + wait_s
        heapq.heappush(self._due, (due_s, next(self._serial), lambda: (act(), None)[1]))

    # ------------------------------------------------------------------ afterwards

    def _num_used(self, member: Member) -> int:
        """Blocks that are not free; block 0 is nobody's."""
        assert member.client is not None
        info = member.client.ask(ANSWER_S)
        return info.num_blocks - 1 - info.num_free_blocks

    def _come_to_rest(self) -> None:
        """All engines serve, and have all their blocks."""
        deadline_s = time.monotonic() + REST_S
        for member in self._fleet:
            for rank in member.facts:
                self._fleet.tell(member, rank, Order(rest=True))
        while any(member.client is None for member in self._fleet) or self._due:
            self._go_round()
            if time.monotonic() > deadline_s:
                gone = [member.name for member in self._fleet if member.client is None]
                self.summary.hung.append(f"{gone}: expected all to serve within {REST_S:g} s")
                return
        for member in self._fleet:
            try:
                self._wait_for_blocks(member, deadline_s)
            except PeerLost as e:
                self.summary.hung.append(f"{member.name}: {e}")
                self._look_at(member)
                self._fleet.kill(member, 0)  # told to end, it would not

    def _wait_for_blocks(self, member: Member, deadline_s: float) -> None:
        while num_used := self._num_used(member):
            if time.monotonic() > deadline_s:
                self.summary.leaked.append(f"{member.name}: {num_used} blocks")
                return
            time.sleep(0.05)

    def _compare(self, before: dict[tuple[str, int], Usage]) -> None:
        """Threads, descriptors, mappings and memory, with those before the storm."""
        deadline_s = time.monotonic() + REST_S
        while leaks := self._leaks(before):
            for member in self._fleet:
                for rank in member.facts:
                    self._fleet.tell(member, rank, Order(trim=True))
            if time.monotonic() > deadline_s:
                self.summary.leaked += leaks
                self._fleet.write_descriptors("after")
                return
            time.sleep(0.2)

    def _leaks(self, before: dict[tuple[str, int], Usage]) -> list[str]:
        found: list[str] = []
        try:
            usages = self._fleet.usages()
        except FileNotFoundError as e:  # of a folder of /proc
            return [f"{e.filename}: the process has ended by itself"]
        for (name, rank), now in usages.items():
            was = before[name, rank]
            for what in ("threads", "descriptors", "mappings"):
                most = getattr(was, what)
                if what == "descriptors" and self.summary.wire == "nixl":
                    most += max(0, now.lost - was.lost)
                if getattr(now, what) > most:
                    words = f"{getattr(was, what)} {what} became {getattr(now, what)}"
                    if what == "descriptors":
                        words += f" {dict(now.kinds - was.kinds)}"
                    found.append(f"{name} rank {rank}: {words}")
            grown = now.resident_nbytes - was.resident_nbytes
            if grown > self._fleet.most_growth_nbytes:
                found.append(f"{name} rank {rank}: {grown >> 20} MB more")
        for (name, rank), number in self._fleet.pools_of_the_gone().items():
            found.append(f"{name} rank {rank}: maps {number} pools of engines that have gone")
        return found

    def _say(self, what: str, of: str = "", detail: str = "") -> None:
        at_s = round(time.monotonic() - self._started_s, 3)
        event = Event(at_s=at_s, what=what, of=of, detail=detail)
        self._log.write(json.dumps(msgspec.to_builtins(event)) + "\n")
        self._log.flush()


_THREADS = {
    Kind.STOP_IO: "io",
    Kind.STOP_COPY: "copy",
    Kind.STOP_MAIN: "main",
    Kind.STOP_ZMQ: "zmq",
}


def _counted(names: Iterable[str]) -> dict[str, int]:
    """In the order of their names."""
    return dict(sorted(Counter(names).items()))


def _order(number: int, injection: Injection) -> Order:
    match injection.kind:
        case Kind.MANGLE | Kind.MANGLE_CHUNKS:
            return Order(
                number=number,
                mangle=injection.messages,
                mangles=CHUNK if injection.kind is Kind.MANGLE_CHUNKS else MESSAGE,
                share=injection.share,
                duration_s=injection.duration_s,
            )
        case Kind.CLOCK:
            return Order(number=number, clock_s=injection.duration_s)
        case Kind.WALL_CLOCK:
            return Order(number=number, wall_s=injection.duration_s)
        case _:
            return Order(number=number, reset=True)


def _errors_in(folder: Path) -> list[str]:
    """The last line of what each process has written of its errors."""
    said = {path: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.errors"))}
    return [f"{path.name}: {text.splitlines()[-1]}" for path, text in said.items() if text.strip()]


def _key(member: Member, request_id: str) -> str:
    return f"{member.name}.{member.lives}.{request_id}"


def _who(sent: Sent) -> str:
    return f"{sent.request_id} at {sent.engine} ({sent.ask.twist})"
