"""The requests whose KV the scheduler side wants from another engine.

Life: wanted (the offer is held at its source) -> handed to the workers -> ended; or wanted -> given
up. A request asks for its offer once. After an accept, a failure or a preemption it computes its KV
here; otherwise it could wait for ever.

A request that came early, when its prompt is not computed yet, is *finding* first: it has no blocks
here while the source looks for the offer by the router's id. Once found, it is wanted. It may load
what is open while the rest is computed, as long as such loads hold no more than a share of the
blocks. Where the prefill was preempted it is finding again.

The first offer of a router's id has a nonce that can be known before it is told. So such a load may
*presume* that it is this one, and ask for it at once, with blocks of a smaller share. What is found
then confirms that, or ends the load as if the prefill had been preempted.

Requests may have the same offer: an HTTP request that was sent again, several samples of one
prompt. The oldest of them loads; the others wait for its end. When it has loaded, the others find
its KV in the prefix cache. When its tokens were not the offered ones, the next request tries. The
source is told to drop the offer when no request wants it any more.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import msgspec

from kvxfer.bounded import Bounded
from kvxfer.connector.board import BoardView
from kvxfer.connector.contract import RequestLike
from kvxfer.connector.params import Plain
from kvxfer.connector.records import (
    NO_ORDERS,
    AbortLoad,
    ConnectorMetadata,
    FindOffer,
    FoundOffer,
    Hold,
    NearSource,
    NearSources,
    NewLoad,
    SourceRef,
    TraceHeaders,
    Unhold,
)
from kvxfer.connector.tracing import trace_of
from kvxfer.transfer.manifest import MemfdHandle
from kvxfer.transfer.tokens import digest_keys, named_nonce, token_digest
from kvxfer.transfer.wire import MAX_EARLY, OfferRef, Reason

READ_BEFORE = "another request of this engine has read the offer"
REMEMBERED = 1 << 16
"""Offers that were asked for and are not asked for again; about 200 bytes each."""


class LoadState(enum.Enum):
    """The state of a wanted load."""

    FINDING = "finding"  # the source is asked which offer it is
    WANTED = "wanted"  # held at the source, no blocks here yet; may wait for another request's load
    HANDED = "handed"  # given to the workers; they report it once
    ABORTED = "aborted"  # given to the workers, and its request has ended meanwhile
    ENDED = "ended"  # accepted, failed or given up


_ENDS_OF_OFFERS = (Reason.ENDED, Reason.ABORTED, Reason.EXPIRED, Reason.RESET)
"""How a load fails that has presumed an offer which was over before. What is found says whether
there is another.
"""
MAX_PRESUMED = MAX_EARLY // 8
"""Offers that are asked for before they were found. A source has room for MAX_EARLY of what comes
early over one connection: of each of these a Pull and a Cancel, and the questions have the rest.
"""
_OVER = (LoadState.ABORTED, LoadState.ENDED)
"""Their requests want no offer any more."""


@dataclass(slots=True)
class Load:
    """One wanted load; ``num_local_tokens``: how many tokens the engine has cached, by its last
    call. ``is_spent``: another request has read the offer. ``in_step_s``: how long it will take, if
    the engine was last told that it is part of the step; ``wait_s``: if not, how long the step may
    wait for its end. ``early``: where to find the offer, of a request that came early;
    ``is_growing``: it is not complete yet. ``may_presume``: its nonce is known before;
    ``is_presumed``: ``source`` is that, and was not found yet; ``is_held_late``: it was found, and
    is held since, when the load had begun.
    """

    source: SourceRef
    num_usable_tokens: int
    state: LoadState = LoadState.WANTED
    num_local_tokens: int = 0
    is_spent: bool = False
    in_step_s: float | None = None
    wait_s: float = 0.0
    trace: TraceHeaders = ()
    early: SourceRef | None = None
    is_growing: bool = False
    may_presume: bool = False
    is_presumed: bool = False
    is_held_late: bool = False

    @property
    def is_in_step(self) -> bool:
        return self.in_step_s is not None

    def needs_another(self, source: SourceRef | None) -> bool:
        """Whether what has become of its search changes where it is to come from: its own offer has
        ended before it was complete, if that was not this one.
        """
        if self.state is LoadState.WANTED and self.is_growing:
            return source is None or source.offer != self.source.offer
        return self.state is LoadState.FINDING


def asked_offers() -> Bounded[OfferRef, None]:
    """The offers that were asked for, as many as are remembered."""
    return Bounded(REMEMBERED)


class LoadBook:
    """All wanted loads of an engine, in the scheduler's process."""

    def __init__(self) -> None:
        self._by_id: dict[str, Load] = {}
        self._users: dict[OfferRef, list[str]] = {}
        self._asked = asked_offers()
        self._loads: list[NewLoad] = []
        self._aborts: list[AbortLoad] = []
        self._holds: list[Hold] = []
        self._unholds: list[Unhold] = []
        self._finds: list[FindOffer] = []
        self._by_name: dict[str, list[str]] = {}
        """The requests that came early, by the name of what they look for."""
        self._presumed: dict[str, int] = {}
        """Likewise, of offers that were not found yet."""
        self._parked: set[str] = set()
        """The names of those, also if their loads have ended: their Pulls may wait at the source.
        """
        self._growing: dict[str, int] = {}
        """Tokens of the loads that have blocks here, of offers that are not complete."""
        self.most_growing_tokens = 0.0
        self.most_presumed_tokens = 0.0
        self.has_states = False
        """Layers keep a state, which moves only of the offered tokens, all of them."""
        self.num_own_tokens = 1
        """Tokens at the end of a prompt that are always computed here: the last one, to sample from
        it, and those before it whose draft looks at tokens behind the prompt."""

    def find(
        self, request: RequestLike, source: SourceRef, *, has_named_nonce: bool = False
    ) -> None:
        source = self._early(request, source)
        self._by_id[request.request_id] = Load(
            source=source,
            num_usable_tokens=max(0, request.num_prompt_tokens - self.num_own_tokens),
            state=LoadState.FINDING,
            trace=trace_of(request),
            early=source,
            may_presume=has_named_nonce,
        )
        self._find(request.request_id, source)

    def _early(self, request: RequestLike, source: SourceRef) -> SourceRef:
        """With what will be offered to it: so many tokens, and their digest."""
        num_tokens = request.num_prompt_tokens - self.has_states
        return _with_digest(request, msgspec.structs.replace(source, num_tokens=num_tokens))

    def _find(self, request_id: str, early: SourceRef) -> None:
        find = FindOffer(early)
        users = self._by_name.setdefault(find.name, [])
        if request_id not in users:
            users.append(request_id)
        self._finds.append(find)

    def found(self, name: str, found: FoundOffer) -> list[tuple[str, SourceRef, Plain]]:
        """What has become of a search, by its name. Returns the requests that will have to
        compute their KV here, where it was to come from, and why it does not.
        """
        self._parked.discard(name)
        users, source = self._by_name.get(name, ()), found.source
        for request_id in users:
            self._confirm(request_id, self._by_id[request_id], found)
        waiting = [i for i in users if self._by_id[i].needs_another(source)]
        if source is None:
            return self._not_found(waiting, found.reason or Reason.UNKNOWN, found.detail)
        expected = self._by_id[users[0]].early if users else None
        if expected is not None and source.num_tokens != expected.num_tokens:
            detail = f"{source.num_tokens} offered, the prompt has {expected.num_tokens}"
            return self._not_found(waiting, Reason.TOKENS, detail)
        if all(self._by_id[i].state in _OVER for i in users):
            if source.offer not in self._users and source.offer not in self._asked:
                self._unholds.append(Unhold(name, source, Reason.CANCELLED))
            return []
        if source.offer in self._asked and source.offer not in self._users:
            return self._not_found(waiting, Reason.ENDED, READ_BEFORE)
        for request_id in users:
            load = self._by_id[request_id]
            if request_id in waiting:
                self._leave(request_id, load)
                load.source, load.state = source, LoadState.WANTED
                self._users.setdefault(source.offer, []).append(request_id)
                self._holds.append(Hold(request_id, source))
            if load.source.offer == source.offer:
                load.is_growing = not found.is_complete
                if found.is_complete:
                    self._growing.pop(request_id, None)
        return []

    def _confirm(self, request_id: str, load: Load, found: FoundOffer) -> None:
        """It is known now whether a load has presumed right; if not, a begun one ends."""
        if not load.is_presumed:
            return
        is_that_one = found.source is not None and found.source.offer == load.source.offer
        is_begun = load.state is LoadState.HANDED
        if is_begun and not is_that_one:  # it is looked for again, if there is another one
            load.is_presumed = found.source is not None
            reason = Reason.PREEMPTED if load.is_presumed else found.reason or Reason.UNKNOWN
            self._aborts.append(AbortLoad(request_id, reason))
            return
        load.is_presumed = False
        self._presumed.pop(request_id, None)
        if is_that_one and load.state not in _OVER:
            self._holds.append(Hold(request_id, load.source))
            load.is_held_late = is_begun

    def _not_found(
        self, request_ids: Sequence[str], reason: Reason, detail: str
    ) -> list[tuple[str, SourceRef, Plain]]:
        for request_id in request_ids:
            load = self._by_id[request_id]
            if load.state is LoadState.WANTED:
                self._give_up(request_id, load, reason)
            load.state = LoadState.ENDED
        return [(i, self._by_id[i].source, Plain(reason, detail)) for i in request_ids]

    def want(self, request: RequestLike, source: SourceRef) -> Reason | None:
        """Hold the offer; else return why the offer cannot serve this prompt, or not any more.

        If it cannot, the source is told nothing: the offer belongs to another request, which may
        still come.
        """
        if source.num_tokens > request.num_prompt_tokens - self.has_states:
            return Reason.TOKENS
        if source.offer in self._asked and source.offer not in self._users:
            return Reason.ENDED
        source = _with_digest(request, source)
        self._by_id[request.request_id] = Load(
            source=source,
            num_usable_tokens=min(
                source.num_tokens, max(0, request.num_prompt_tokens - self.num_own_tokens)
            ),
            trace=trace_of(request),
        )
        self._users.setdefault(source.offer, []).append(request.request_id)
        self._holds.append(Hold(request.request_id, source))
        return None

    def reject_early(self, request: RequestLike, source: SourceRef) -> None:
        """As :meth:`reject`, of a request that came early: its offer is found first."""
        find = FindOffer(self._early(request, source))
        self._finds.append(find)
        if find.name not in self._by_name:
            self._finds.append(msgspec.structs.replace(find, is_wanted=False))

    def reject(self, request_id: str, source: SourceRef) -> None:
        """Its request will never run here."""
        if source.offer not in self._users and source.offer not in self._asked:
            self._unholds.append(Unhold(request_id, source, Reason.CANCELLED))

    def num_more_tokens(self, request_id: str, num_local_tokens: int) -> int | None:
        """How many tokens beyond the local ones can be loaded; None: another request loads them, or
        they are looked for. May be asked any number of times.
        """
        load = self._by_id.get(request_id)
        if load is None or load.state not in (LoadState.FINDING, LoadState.WANTED):
            return 0
        load.num_local_tokens = num_local_tokens
        if load.is_spent or num_local_tokens >= load.num_usable_tokens:
            return 0
        if load.state is LoadState.FINDING and not self._presume(request_id, load):
            return None
        if self._users[load.source.offer][0] != request_id:
            return None
        if load.is_growing and not self._has_room(load):
            return None
        return load.num_usable_tokens - num_local_tokens

    def _presume(self, request_id: str, load: Load) -> bool:
        """Take the offer to be the first one that its source makes, if nobody else wants it and
        there is room.
        """
        early = load.early
        if early is None or not (load.may_presume and self._has_room(load, is_presumed=True)):
            return False
        nonce = named_nonce(early.offer.nonce, early.digest, early.offer.incarnation)
        offer = OfferRef(nonce, early.offer.incarnation)
        if offer in self._users or offer in self._asked:
            return False
        load.source, load.state = msgspec.structs.replace(early, offer=offer), LoadState.WANTED
        load.is_growing = load.is_presumed = True
        self._users[offer] = [request_id]
        return True

    def _has_room(self, load: Load, *, is_presumed: bool = False) -> bool:
        num_tokens = load.source.num_tokens
        if is_presumed or load.is_presumed:
            num_presumed = sum(self._presumed.values()) + num_tokens
            if num_presumed > self.most_presumed_tokens or len(self._parked) >= MAX_PRESUMED:
                return False
        return sum(self._growing.values()) + num_tokens <= self.most_growing_tokens

    def allocated(
        self, request_id: str, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> Reason | None:
        """Hand the load to the workers; without tokens give the offer up: the reason."""
        load = self.wanted(request_id)
        if load is None:
            return None
        if num_external_tokens == 0 and load.is_presumed:
            return self._runs(request_id, load)
        if num_external_tokens == 0:
            has_missed = load.is_spent and not load.num_local_tokens
            return self._give_up(request_id, load, Reason.ENDED if has_missed else Reason.LOCAL_HIT)
        load.state = LoadState.HANDED
        if load.is_growing:
            self._growing[request_id] = load.source.num_tokens
        if load.is_presumed and load.early is not None:
            self._presumed[request_id] = load.source.num_tokens
            self._parked.add(FindOffer(load.early).name)
        self._asked[load.source.offer] = None
        self._loads.append(
            NewLoad(
                request_id=request_id,
                source=load.source,
                token_lo=load.num_local_tokens,
                token_hi=load.num_local_tokens + num_external_tokens,
                block_ids=tuple(tuple(group) for group in block_ids),
                trace=load.trace,
                in_step=load.is_in_step,
                wait_s=load.wait_s,
                grows=load.is_growing,
            )
        )
        return None

    def runs(self, request_id: str) -> Reason | None:
        """It has blocks and needs nothing that is looked for: what is found is given up."""
        load = self._by_id.get(request_id)
        if load is None or load.state is not LoadState.FINDING:
            return None
        return self._runs(request_id, load)

    def _runs(self, request_id: str, load: Load) -> Reason:
        if load.is_presumed:
            self._leave(request_id, load)
        load.state = LoadState.ENDED
        return Reason.LOCAL_HIT

    def wanted(self, request_id: str) -> Load | None:
        """The load of this request, held at the source and not yet allocated here."""
        load = self._by_id.get(request_id)
        return load if load is not None and load.state is LoadState.WANTED else None

    def handed(self, request_id: str) -> Load | None:
        """The load of this request that the workers have, even if the request has ended."""
        load = self._by_id.get(request_id)
        is_handed = load is not None and load.state in (LoadState.HANDED, LoadState.ABORTED)
        return load if is_handed else None

    def ended(self, request_id: str, failure: str | None = None) -> bool:
        """Every rank has reported the load; ``failure`` names what failed it. False if there was no
        such load.

        A rank that failed before its Pull has sent no Cancel, and the claim of its engine would
        hold the source's blocks for a lease. So rank 0 cancels at every source rank, except for
        refused tokens: that offer belongs to another request.
        """
        load = self.handed(request_id)
        if load is None:
            return False
        self._growing.pop(request_id, None)
        self._presumed.pop(request_id, None)
        is_another = load.is_presumed and failure in _ENDS_OF_OFFERS
        if load.state is LoadState.ABORTED:
            if load.is_presumed:  # to be given up again once it is found
                self._asked.pop(load.source.offer, None)
            self._forget(request_id, load)
        load.state, source = LoadState.ENDED, load.source
        if failure == Reason.TOKENS:
            self._asked.pop(load.source.offer, None)
            self._leave(request_id, load)
            return True
        others = [i for i in self._users.pop(load.source.offer, ()) if i != request_id]
        for user in (request_id, *others) if failure == Reason.PREEMPTED or is_another else ():
            self._find_again(user)
        for other in others:
            self._by_id[other].is_spent = self._by_id[other].state is LoadState.WANTED
        if failure is not None:
            reason = Reason(failure) if failure in set(Reason) else Reason.CANCELLED
            self._unholds.append(Unhold(request_id, source, reason))
        elif load.is_held_late:  # perhaps after its ranks had reported it
            self._unholds.append(Unhold(request_id, source))
        return True

    def _find_again(self, request_id: str) -> None:
        """The prefill that came early with it gets another offer; that of one in turn is over."""
        load = self._by_id.get(request_id)
        if load is None or load.early is None:
            return
        if load.state is LoadState.WANTED:
            self._unholds.append(Unhold(request_id, load.source))
        load.state, load.source, load.is_growing = LoadState.FINDING, load.early, False
        load.may_presume = load.is_presumed = False
        self._find(request_id, load.early)

    def finish(self, request_id: str) -> Reason | None:
        """The request ended. A wanted load is given up, and the reason returned. A load in flight
        is aborted; its report still counts.

        An engine that fails a request for its load ends it before it passes the report on.
        """
        load = self._by_id.get(request_id)
        if load is None or load.state is LoadState.ABORTED:
            return None
        if load.state is LoadState.HANDED:
            load.state = LoadState.ABORTED
            self._aborts.append(AbortLoad(request_id, Reason.CANCELLED))
            return None
        self._forget(request_id, load)
        if load.state is LoadState.WANTED and not load.is_presumed:
            return self._give_up(request_id, load, Reason.CANCELLED)
        if load.is_presumed:
            self._leave(request_id, load)
        is_wanted = load.state in (LoadState.FINDING, LoadState.WANTED)
        return Reason.CANCELLED if is_wanted else None

    def _forget(self, request_id: str, load: Load) -> None:
        """A search goes on without its request, so that what it finds is given up."""
        del self._by_id[request_id]
        if load.early is not None:
            find = FindOffer(load.early, is_wanted=False)
            users = self._by_name.get(find.name, [])
            if request_id in users:
                users.remove(request_id)
            if not users:
                self._by_name.pop(find.name, None)
                if load.state is LoadState.FINDING or load.is_presumed:
                    self._finds.append(find)

    @property
    def num_open(self) -> int:
        return sum(load.state is not LoadState.ENDED for load in self._by_id.values())

    def has_orders(self) -> bool:
        return bool(self._loads or self._aborts or self._holds or self._unholds or self._finds)

    def step(self, orders: ConnectorMetadata = NO_ORDERS) -> ConnectorMetadata:
        if not self.has_orders():
            return orders
        orders = msgspec.structs.replace(
            orders,
            loads=tuple(self._loads),
            aborts=tuple(self._aborts),
            holds=tuple(self._holds),
            unholds=tuple(self._unholds),
            finds=tuple(self._finds),
        )
        for queue in (self._loads, self._aborts, self._holds, self._unholds, self._finds):
            queue.clear()
        return orders

    def step_ahead(self, block_tokens: int) -> ConnectorMetadata | None:
        """:meth:`step` before the step; None where a load begins within a block."""
        begin_at_edges = all(load.token_lo % block_tokens == 0 for load in self._loads)
        return self.step() if begin_at_edges else None

    def _give_up(self, request_id: str, load: Load, reason: Reason) -> Reason:
        load.state = LoadState.ENDED
        is_last = self._leave(request_id, load) and load.source.offer not in self._asked
        self._unholds.append(Unhold(request_id, load.source, reason if is_last else None))
        return reason

    def _leave(self, request_id: str, load: Load) -> bool:
        users = self._users.get(load.source.offer, [])
        if request_id in users:
            users.remove(request_id)
        if not users:
            self._users.pop(load.source.offer, None)
        return not users


def _with_digest(request: RequestLike, source: SourceRef) -> SourceRef:
    digest = token_digest(
        request.prompt_token_ids[: source.num_tokens], digest_keys(request, source.num_tokens)
    )
    return msgspec.structs.replace(source, digest=digest)


# ------------------------------------------------------------------ loads within a step


STEP_SHARE = 1 / 3
"""Of a decode step, so much longer may loads make one for the requests that run."""
AHEAD_S = 0.001
"""A load that begins while its step is scheduled has so long until the step looks whether it has
ended, on two H200s.
"""
ALONE_S = 0.01
"""So long loads are part of a step before which no request ran: nobody waits for them but each
other. An asynchronous one of 4,000 tokens is seen that much later, on two H100s.
"""
MOST_DECODED_TOKENS = 16
"""Of a request in a decode step: one, and those that a draft has guessed."""
NUM_STEPS = 15
"""Decode steps of which the median counts: few of them are longer, by a load or by a prompt that
came in.
"""
DISTRUST_S = 60.0
"""After a step has waited in vain, loads from that source are asynchronous for so long: the step
has held up every request of its engine.
"""


def predicted_s(near: Iterable[NearSource], num_tokens: int) -> float:
    """How long a load takes on the slowest of the ranks, which load side by side."""
    return max(each.latency_s + num_tokens * each.token_s for each in near)


class DecodeSteps:
    """How long the decode steps of an engine take."""

    def __init__(self) -> None:
        self._requests: frozenset[str] = frozenset()
        self._ordered_s = 0.0
        self._lasted_s: deque[float] = deque(maxlen=NUM_STEPS)

    def order(self, requests: frozenset[str], most_tokens: int, now_s: float) -> None:
        """The next step, of these requests, with so many tokens of one at most. The one before has
        lasted until now if both are decode steps of the same requests; else the engine may have
        idled.
        """
        if most_tokens > MOST_DECODED_TOKENS:
            requests = frozenset()
        if requests and requests == self._requests:
            self._lasted_s.append(now_s - self._ordered_s)
        self._requests, self._ordered_s = requests, now_s

    @property
    def median_s(self) -> float:
        """Of the last NUM_STEPS; 0 before the first."""
        return median(self._lasted_s) if self._lasted_s else 0.0


class StepLoads:
    """What the ranks have said of their sources, and how much of a step is promised.

    A request whose load is part of the step computes in this very step, with KV whose verdict is
    looked at before the step's result leaves its rank. A load that fails then fails its request, or
    has it computed again. So one is promised only where all that it needs is there: every rank has
    met the source, its wires are direct, the boards show the offer with the request's own tokens,
    and the copies are short. Any other load is asynchronous: its request waits, and others compute
    meanwhile. If it will have ended by the time when the step has been launched, or soon after, the
    step waits for that: else its end would be seen a step later.

    Args:
        limit_s: of all loads of one step together, by prediction, where requests run that wait for
            it; ALONE_S, if that is more, where none do. None: STEP_SHARE of a decode step. 0: no
            load is promised.
        begins_ahead: loads begin while their step is scheduled.
    """

    def __init__(self, limit_s: float | None, *, begins_ahead: bool = False) -> None:
        self._limit_s = limit_s
        self._ahead_s = AHEAD_S if begins_ahead else 0.0
        self._steps = DecodeSteps()
        self._running: frozenset[str] = frozenset()
        self._near: dict[str, NearSources] = {}
        self._boards: dict[MemfdHandle, BoardView | None] = {}
        self._until_s: dict[bytes, float] = {}
        self._promised_s = 0.0

    def learn(self, near: Mapping[str, NearSources]) -> None:
        """Take the tables of the ranks whose sources have changed, and map their boards."""
        if self._limit_s == 0:
            return
        self._near.update(near)
        sources = [source for table in self._near.values() for source in table.values()]
        wanted = {handle for source in sources for handle in source.boards}
        for handle in self._boards.keys() - wanted:
            self._close(handle)
        for handle in wanted - self._boards.keys():
            self._boards[handle] = BoardView.open(handle)

    def time_s(
        self, source: SourceRef, num_tokens: int, ranks: Collection[str], now_s: float
    ) -> float:
        """How long these ranks will take for a load; infinite where something that it needs is not
        there.
        """
        life = source.offer.incarnation
        if self._near.keys() != set(ranks) or now_s < self._until_s.get(life, now_s):
            return math.inf
        near = [table[life] for table in self._near.values() if life in table]
        if len(near) < len(ranks):
            return math.inf
        boards = {handle for each in near for handle in each.boards}
        is_shown = all(self._shows(handle, source) for handle in boards)
        return predicted_s(near, num_tokens) if is_shown else math.inf

    def can_promise(self, time_s: float) -> bool:
        """Whether a load that takes so long can be part of the step."""
        return self._promised_s + time_s <= self._most_s()

    def wait_s(self, time_s: float) -> float:
        """How long the step in which such a load begins may wait for its end, if it is not part of
        it; 0 where that would be in vain.
        """
        left_s = max(0.0, self._most_s() - self._promised_s)
        return left_s if self._running and time_s <= left_s + self._ahead_s else 0.0

    def promise(self, time_s: float) -> None:
        self._promised_s += time_s

    def begin_step(self, num_tokens: Mapping[str, int], now_s: float) -> None:
        """``num_tokens``: of each request of the step that is ordered now."""
        self._promised_s = 0.0
        if self._limit_s != 0:
            self._running = frozenset(num_tokens)
        if self._limit_s is None:
            self._steps.order(self._running, max(num_tokens.values(), default=0), now_s)

    def ended(self, request_id: str) -> None:
        self._running -= {request_id}

    def was_late(self, source: SourceRef, now_s: float) -> None:
        self._until_s = {life: s for life, s in self._until_s.items() if s > now_s}
        self._until_s[source.offer.incarnation] = now_s + DISTRUST_S

    def close(self) -> None:
        for handle in list(self._boards):
            self._close(handle)
        self._near = {}

    def _most_s(self) -> float:
        limit_s = self._limit_s
        if limit_s is None:
            limit_s = STEP_SHARE * self._steps.median_s
        return limit_s if self._running else max(limit_s, ALONE_S)

    def _shows(self, handle: MemfdHandle, source: SourceRef) -> bool:
        board = self._boards.get(handle)
        posted = board.find(source.offer.nonce) if board is not None else None
        return posted is not None and posted.digest in (None, source.digest)

    def _close(self, handle: MemfdHandle) -> None:
        board = self._boards.pop(handle)
        if board is not None:
            board.close()
