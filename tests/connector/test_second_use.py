"""Several requests of one engine with the same offer: one loads, the others wait, and nobody's end
costs another its KV. Every order of what can happen is tried.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec
import pytest

from kvxfer.connector.loads import REMEMBERED, LoadBook, asked_offers
from kvxfer.connector.records import FoundOffer, SourceRef
from kvxfer.transfer.wire import OfferRef, Reason

TOKENS = tuple(range(40))
OTHER = tuple(range(1, 41))
SOURCE = SourceRef(
    engine_id="p",
    endpoint="tcp://127.0.0.1:5700",
    offer=OfferRef(b"n" * 16, b"s" * 16),
    num_tokens=40,
)
IDS = ((1, 2, 3),)


@dataclass
class Request:
    request_id: str
    prompt_token_ids: tuple[int, ...] = TOKENS
    kv_transfer_params: None = None
    lora_request: None = None
    status: str = "RUNNING"

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


# ------------------------------------------------------------------ every order

NEW, WANTS, LOADS, ABORTED, RUNS, GONE = ["new", "wants", "loads", "aborted", "runs", "gone"]


@dataclass(frozen=True)
class World:
    """What an engine has done so far. ``phases``: of each request. ``num_reads``: loads that may
    have reached the source; ``cancels``: told to the source.
    """

    phases: tuple[str, ...]
    num_reads: int = 0
    num_cancels: int = 0

    def now(self, i: int, phase: str, **changes: int) -> World:
        phases = (*self.phases[:i], phase, *self.phases[i + 1 :])
        return replace(self, phases=phases, **changes)


Step = tuple[str, World, LoadBook]


class Explorer:
    """Drives a book as an engine does, and checks each step against plain rules."""

    def __init__(self, prompts: tuple[tuple[int, ...], ...]) -> None:
        self.requests = [Request(f"r{i}", prompt) for i, prompt in enumerate(prompts)]

    def explore(self) -> int:
        first = World((NEW,) * len(self.requests))
        book = LoadBook()
        seen = {(first, self._inside(book))}
        queue = deque([(first, book)])
        while queue:
            world, book = queue.popleft()
            self._check_somebody_can_go_on(world, book)
            for label, after, changed in self._steps(world, book):
                self._check(label, world, after)
                key = (after, self._inside(changed))
                if key not in seen:
                    seen.add(key)
                    queue.append((after, changed))
        return len(seen)

    def _inside(self, book: LoadBook) -> str:
        loads = {i: (load.state, load.is_spent) for i, load in book._by_id.items()}
        return repr((sorted(loads.items()), book._users, SOURCE.offer in book._asked))

    def _steps(self, world: World, book: LoadBook) -> Iterator[Step]:
        for i, request in enumerate(self.requests):
            name, phase = request.request_id, world.phases[i]
            if phase == NEW:
                changed = copy.deepcopy(book)
                held = changed.want(request, SOURCE) is None
                yield from self._told(f"{name} wants", world, i, WANTS if held else RUNS, changed)
            if phase == WANTS:
                for num_local in (0, 39):
                    yield from self._admitted(world, book, i, num_local)
            if phase in (LOADS, ABORTED):
                is_right = request.prompt_token_ids == TOKENS
                for failure in (None, Reason.PEER_LOST) if is_right else (Reason.TOKENS,):
                    changed = copy.deepcopy(book)
                    assert changed.ended(name, failure)
                    phase_now = GONE if phase == ABORTED else RUNS
                    label = f"{name} loaded: {failure}"
                    yield from self._told(label, world, i, phase_now, changed)
            if phase in (WANTS, LOADS, RUNS):
                changed = copy.deepcopy(book)
                changed.finish(name)
                gone = ABORTED if phase == LOADS else GONE
                yield from self._told(f"{name} ends", world, i, gone, changed)

    def _admitted(self, world: World, book: LoadBook, i: int, num_local: int) -> Iterator[Step]:
        name, changed = self.requests[i].request_id, copy.deepcopy(book)
        num_more = changed.num_more_tokens(name, num_local)
        if num_more is None:
            assert LOADS in world.phases or ABORTED in world.phases or world.phases.count(WANTS) > 1
            return
        changed.allocated(name, IDS, num_more)
        phase = LOADS if num_more else RUNS
        yield from self._told(f"{name} is admitted", world, i, phase, changed)

    def _told(self, label: str, world: World, i: int, phase: str, book: LoadBook) -> Iterator[Step]:
        orders = book.step()
        cancels = [unhold for unhold in orders.unholds if unhold.reason is not None]
        after = world.now(
            i,
            phase,
            num_reads=world.num_reads + len(orders.loads),
            num_cancels=world.num_cancels + len(cancels),
        )
        if label.endswith("loaded: tokens"):
            after = replace(after, num_reads=after.num_reads - 1)  # the source gave nothing
        yield label, after, book

    def _check(self, label: str, before: World, after: World) -> None:
        loading = [phase for phase in after.phases if phase in (LOADS, ABORTED)]
        assert len(loading) <= 1, f"{label}: two loads of one offer"
        assert after.num_reads <= 1, f"{label}: the offer is read again"
        if after.num_cancels > before.num_cancels and "loaded" not in label:
            users = [phase for phase in after.phases if phase in (WANTS, LOADS, ABORTED)]
            assert not users, f"{label}: the offer is cancelled and still used"
            assert not after.num_reads, f"{label}: an offer that was read is cancelled"
        if after.num_cancels == after.num_reads == 0 and GONE in after.phases:
            wants = {NEW, WANTS, LOADS, ABORTED} & set(after.phases)
            right = all(r.prompt_token_ids == TOKENS for r in self.requests)
            assert wants or not right, f"{label}: the source was not told that nobody comes"

    def _check_somebody_can_go_on(self, world: World, book: LoadBook) -> None:
        waiting = [i for i, phase in enumerate(world.phases) if phase == WANTS]
        if waiting and not {LOADS, ABORTED} & set(world.phases):
            asked = [
                copy.deepcopy(book).num_more_tokens(self.requests[i].request_id, 0) for i in waiting
            ]
            assert any(num is not None for num in asked), "everybody waits for somebody"


@pytest.mark.parametrize(
    ("prompts", "num_worlds"),
    [((TOKENS, TOKENS), 93), ((TOKENS, TOKENS, TOKENS), 720), ((OTHER, TOKENS, TOKENS), 674)],
    ids=["twice", "three times", "another prompt too"],
)
def test_no_order_of_events_reads_twice_or_takes_from_another(
    prompts: tuple[tuple[int, ...], ...], num_worlds: int
) -> None:
    assert Explorer(prompts).explore() == num_worlds


# ------------------------------------------------------------------ what is told


def test_the_second_waits_and_finds_what_the_first_has_brought() -> None:
    book = LoadBook()
    for name in ("a", "b"):
        assert book.want(Request(name), SOURCE) is None
    assert book.num_more_tokens("a", 0) == 39
    assert book.num_more_tokens("b", 0) is None
    book.allocated("a", IDS, 39)
    assert book.num_more_tokens("b", 0) is None
    assert [load.request_id for load in book.step().loads] == ["a"]
    assert book.ended("a")
    assert book.num_more_tokens("b", 32) == 0  # two blocks of 16 are in the cache
    assert book.allocated("b", IDS, 0) is Reason.LOCAL_HIT
    (unhold,) = book.step().unholds
    assert (unhold.request_id, unhold.reason) == ("b", None)


def test_without_a_prefix_cache_the_second_computes_and_says_so() -> None:
    book = LoadBook()
    for name in ("a", "b"):
        book.want(Request(name), SOURCE)
    book.num_more_tokens("a", 0)
    book.allocated("a", IDS, 39)
    book.ended("a")
    assert book.num_more_tokens("b", 0) == 0
    assert book.allocated("b", IDS, 0) is Reason.ENDED


def test_params_that_come_again_after_the_load_are_not_asked_for() -> None:
    book = LoadBook()
    book.want(Request("a"), SOURCE)
    book.num_more_tokens("a", 0)
    book.allocated("a", IDS, 39)
    book.ended("a")
    book.step()
    assert book.want(Request("again"), SOURCE) is Reason.ENDED
    assert book.num_more_tokens("again", 0) == 0
    book.reject("turned away", SOURCE)
    assert not book.has_orders()


def test_a_request_that_is_turned_away_leaves_the_offer_to_the_others() -> None:
    book = LoadBook()
    book.want(Request("a"), SOURCE)
    book.step()
    book.reject("b", SOURCE)
    assert not book.has_orders()


@pytest.mark.parametrize("is_aborted", [False, True])
def test_of_those_that_shared_a_preempted_offer_only_early_ones_are_looked_for(
    is_aborted: bool,
) -> None:
    """A request in turn has no name to be found by."""
    book = LoadBook()
    named = msgspec.structs.replace(SOURCE, offer=OfferRef(b"x" * 16, b"s" * 16), num_tokens=0)
    for request_id in ("a", "b"):
        book.find(Request(request_id), named)
    find, _ = book.step().finds
    found = FoundOffer(msgspec.structs.replace(find.source, offer=SOURCE.offer), is_complete=True)
    assert book.found(find.name, found) == []
    book.want(Request("in turn"), SOURCE)
    assert book.num_more_tokens("a", 0) == 39
    book.allocated("a", IDS, 39)
    if is_aborted:
        book.finish("a")
    book.step()
    book.ended("a", Reason.PREEMPTED)
    assert book.num_more_tokens("b", 0) is None
    assert book.num_more_tokens("in turn", 0) == 0
    orders = book.step()
    assert orders.finds == (find,) * (1 if is_aborted else 2)
    assert {each.request_id for each in orders.unholds} == {"a", "b"}
    book.finish("in turn")
    lost = book.found(find.name, FoundOffer(None, reason=Reason.ABORTED))
    assert [request_id for request_id, _, _ in lost] == (["b"] if is_aborted else ["a", "b"])
    assert book.num_open == 0


def test_the_offers_that_were_asked_for_are_forgotten_in_the_end() -> None:
    asked = asked_offers()
    refs = [OfferRef(i.to_bytes(16, "big"), b"s" * 16) for i in range(REMEMBERED + 1)]
    for ref in refs:
        asked[ref] = None
    assert refs[0] not in asked
    assert refs[1] in asked
    asked.pop(refs[1])
    assert refs[1] not in asked
