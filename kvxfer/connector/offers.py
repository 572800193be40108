"""The requests that the scheduler side offers to other engines.

Life: wanted -> minted (first step, nonce) -> computed -> finished (blocks kept) -> sent. An engine
may forget a finished request before that, and keep its blocks. A preemption goes back to wanted:
the old nonce is never valid again, and the next step mints another.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvxfer.bounded import Bounded
from kvxfer.connector.contract import RequestLike, SchedulerOutputLike, status_name
from kvxfer.connector.records import (
    NO_ORDERS,
    ConnectorMetadata,
    EndOffer,
    GroupBlockIds,
    NewOffer,
    OfferBlocks,
)
from kvxfer.transfer.tokens import NONCE_NBYTES, digest_keys, named_nonce, token_digest
from kvxfer.transfer.windows import Keeping, edge_ids, held_ids
from kvxfer.transfer.wire import Reason

FINISHED_WELL = {"FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"}
"""Statuses after which a prefilled request's KV is offered; every other end takes the offer back.
"""

WINDOW_GONE = "window"
"""Why a request that ended well is not offered: its engine has let go of a block that the window of
the offer's end needs.
"""
STATE_PASSED = "state"
"""Why a request that ended well is not offered: its engine has computed more tokens than the offer
has, so it holds the state after those.
"""


REMEMBERED = 1 << 16
"""Nonces that are made of a router's id and are not used again; about 100 bytes each."""


@dataclass(slots=True)
class Offer:
    """One offered request; ``nonce`` is empty until it is minted. ``name``: the router's id of it,
    or empty. ``num_cached_tokens``: that are there before its first step. ``is_passed``: the
    engine goes on beyond its tokens, and keeps a state. ``is_another``: a preemption has ended one
    before it.
    """

    num_tokens: int
    digest: bytes
    name: bytes = b""
    num_cached_tokens: int = 0
    nonce: bytes = b""
    number: int = 0
    block_ids: list[list[int]] = field(default_factory=list)
    is_computed: bool = False
    is_reset: bool = False
    is_passed: bool = False
    is_another: bool = False


@dataclass(frozen=True, slots=True)
class Finish:
    """What the end of a request means for its blocks.

    ``keep_blocks``: the engine keeps them until finished_sending. ``offer``: the offer that is
    still valid. ``reason``: why there is none although the request ended well; counted.
    """

    keep_blocks: bool
    offer: Offer | None = None
    reason: str | None = None


class OfferBook:
    """All offered requests of an engine, in the scheduler's process. ``grows``: the workers hear of
    each step that computes a part of an offer, not only of the last one. ``incarnation``: the
    engine's.
    """

    def __init__(self, incarnation: bytes, *, grows: bool = True) -> None:
        self._incarnation, self._grows = incarnation, grows
        self._named: Bounded[bytes, None] = Bounded(REMEMBERED)
        self._num_minted = 0
        self._keepings: Mapping[int, Keeping] = {}
        self._has_states = False
        self._offers: dict[str, Offer] = {}
        self._forgotten: dict[str, Offer] = {}
        # Only these offers change from step to step; the others wait for their end.
        self._computing: set[str] = set()
        self._ended: list[EndOffer] = []
        self._delayed: list[str] = []

    def keep(self, keepings: Mapping[int, Keeping]) -> None:
        """What each group keeps: workers get no blocks that a window has dropped."""
        self._keepings = keepings
        self._has_states = any(keeping.is_state for keeping in keepings.values())

    def want(self, request: RequestLike, name: bytes = b"") -> bool:
        """Offer the whole prompt of this request, once it is computed. False: the request is not
        offered, because an offer of that id is not over (:meth:`forget`), and workers know offers
        by id.
        """
        if request.request_id in self._forgotten:
            return False
        tokens = request.prompt_token_ids
        self._offers[request.request_id] = Offer(
            len(tokens), token_digest(tokens, digest_keys(request, len(tokens))), name
        )
        self._computing.add(request.request_id)
        return True

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._offers

    def cached(self, request_id: str, num_tokens: int) -> None:
        offer = self._offers.get(request_id)
        if offer is not None:
            offer.num_cached_tokens = num_tokens

    def finish(self, request: RequestLike, block_ids: Sequence[Sequence[int]]) -> Finish:
        """The request ended. ``block_ids``: its tables as they are now, by group, -1 for a block
        that was dropped and is not kept in another way.
        """
        request_id = request.request_id
        self._computing.discard(request_id)
        offer = self._offers.get(request_id)
        if offer is None or not offer.nonce:
            self._offers.pop(request_id, None)
            return Finish(keep_blocks=False)  # the workers do not know the offer
        self._delayed.append(request_id)
        if offer.is_reset:
            return Finish(keep_blocks=True, reason=STATE_PASSED if offer.is_passed else None)
        reason: str | None = None
        if offer.is_computed and status_name(request) in FINISHED_WELL:
            if self._holds(offer, block_ids):
                return Finish(keep_blocks=True, offer=offer)
            reason = WINDOW_GONE
        # The workers may hold pulls on it: they end it first, then report finished_sending.
        self._ended.append(EndOffer(request_id, offer.nonce, Reason.ABORTED))
        return Finish(keep_blocks=True, reason=reason)

    def _holds(self, offer: Offer, block_ids: Sequence[Sequence[int]]) -> bool:
        table = self._table(offer)
        block_ids = held_ids(block_ids, self._keepings, offer.num_tokens)
        return all(
            has == told
            for told_ids, has_ids in zip(table, block_ids, strict=False)
            for told, has in zip(told_ids, has_ids, strict=False)
            if told >= 0
        )

    def edge(self, request_id: str) -> GroupBlockIds:
        """Blocks that the offer needs although its engine frees them once the offer's tokens are
        computed. By group and position; -1 for every other block.

        A sink computes the last offered token again. The window of that token begins one token
        before the window of the next token, by which engines free blocks. A block that ends between
        the two starts must be kept from the step on that computes the last offered token.
        """
        offer = self._offers[request_id]
        return edge_ids(offer.block_ids, self._keepings, offer.num_tokens)

    def withdraw(self, request_id: str) -> None:
        """No sink will read it: its blocks come back through finished_sending."""
        offer = self._offers.get(request_id) or self._forgotten.get(request_id)
        if offer is not None and offer.nonce and not offer.is_reset:
            offer.is_reset = True
            self._ended.append(EndOffer(request_id, offer.nonce, Reason.ABORTED))

    def forget(self, request_id: str) -> None:
        """The engine has forgotten a finished request but keeps its blocks. Another request may
        come under its id before finished_sending.
        """
        self._forgotten[request_id] = self._offers.pop(request_id)

    def sent(self, request_id: str) -> None:
        if self._forgotten.pop(request_id, None) is None:
            self._offers.pop(request_id, None)

    def reset(self) -> None:
        for request_id, offer in (*self._offers.items(), *self._forgotten.items()):
            if offer.nonce and not offer.is_reset:
                offer.is_reset = True
                self._ended.append(EndOffer(request_id, offer.nonce, Reason.RESET))

    @property
    def num_open(self) -> int:
        return len(self._offers) + len(self._forgotten)

    def has_orders(self) -> bool:
        return bool(self._ended or self._delayed)

    def step(self, scheduler_output: SchedulerOutputLike) -> ConnectorMetadata:
        """NO_ORDERS itself where there are none. ``scheduler_output`` is only read."""
        if self._offers:
            self._preempt(scheduler_output)
            if self._has_states:
                self._pass(scheduler_output)
        if not self._computing and not self.has_orders():
            return NO_ORDERS
        offers: tuple[NewOffer, ...] = ()
        blocks: tuple[OfferBlocks, ...] = ()
        computed: tuple[str, ...] = ()
        grown: tuple[tuple[str, int], ...] = ()
        if self._computing:
            cached = scheduler_output.scheduled_cached_reqs
            before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            started = {
                new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs
            }
            started |= {i: n for i, n in before.items() if i in cached.resumed_req_ids}
            num_scheduled = scheduler_output.num_scheduled_tokens
            offers = tuple(
                self._mint(i, self._num_there(i, started, num_scheduled))
                for i in started
                if i in self._computing
            )
            blocks = self._tables(scheduler_output)
            computed, grown = self._computed(before | started, scheduler_output)
        ended, self._ended = self._ended, []
        delayed, self._delayed = self._delayed, []
        return ConnectorMetadata(
            offers=offers,
            blocks=blocks,
            computed=computed,
            grown=grown,
            ended=tuple(ended),
            delayed=tuple(delayed),
        )

    def _preempt(self, scheduler_output: SchedulerOutputLike) -> None:
        # An engine may tell of a preemption only when the request comes back. One that has ended
        # since is over: it never comes back, and its end is told.
        resumed = scheduler_output.scheduled_cached_reqs.resumed_req_ids
        for request_id in (*(scheduler_output.preempted_req_ids or ()), *resumed):
            offer = self._offers.get(request_id)
            if offer is not None and offer.nonce and request_id not in self._delayed:
                self._ended.append(EndOffer(request_id, offer.nonce, Reason.PREEMPTED))
                self._offers[request_id] = Offer(
                    num_tokens=offer.num_tokens,
                    digest=offer.digest,
                    name=offer.name,
                    num_cached_tokens=offer.num_cached_tokens,
                    is_another=True,
                )
                self._computing.add(request_id)

    def _pass(self, scheduler_output: SchedulerOutputLike) -> None:
        # The step writes the state of later tokens over that of the offered ones.
        for request_id in scheduler_output.num_scheduled_tokens:
            offer = self._offers.get(request_id)
            if offer is not None and offer.is_computed and not offer.is_reset:
                offer.is_reset = offer.is_passed = True
                self._ended.append(EndOffer(request_id, offer.nonce, Reason.ABORTED))

    def _num_there(
        self, request_id: str, started: Mapping[str, int], num_scheduled: Mapping[str, int]
    ) -> int:
        """Of the tokens that were found in the engine's cache: how many are there before the step.

        Engines name a block when they schedule it. So the last ones that were found may be of this
        very step: computed, or loaded by another connector, for requests that it took up before. As
        many are left out as there are tokens of all others.
        """
        if not self._grows:
            return 0
        num_found = min(self._offers[request_id].num_cached_tokens, started[request_id])
        scheduled = sum(n for i, n in num_scheduled.items() if i != request_id)
        return max(0, num_found - scheduled - sum(n for i, n in started.items() if i != request_id))

    def _mint(self, request_id: str, open_tokens: int) -> NewOffer:
        self._num_minted += 1
        offer = self._offers[request_id]
        offer.nonce = self._nonce(offer)
        offer.number = self._num_minted
        return NewOffer(
            request_id=request_id,
            nonce=offer.nonce,
            num_tokens=offer.num_tokens,
            digest=offer.digest,
            open_tokens=open_tokens,
            name=offer.name,
        )

    def _nonce(self, offer: Offer) -> bytes:
        """The first of a router's id can be known before it is told; no other is, or used twice."""
        if offer.name and not offer.is_another:
            nonce = named_nonce(offer.name, offer.digest, self._incarnation)
            if nonce not in self._named:
                self._named[nonce] = None
                return nonce
        return secrets.token_bytes(NONCE_NBYTES)

    def _tables(self, scheduler_output: SchedulerOutputLike) -> tuple[OfferBlocks, ...]:
        changed: list[str] = []
        for new in scheduler_output.scheduled_new_reqs:
            if new.req_id in self._computing:
                self._offers[new.req_id].block_ids = [list(group) for group in new.block_ids]
                changed.append(new.req_id)
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, more in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if not more or request_id not in self._computing:
                continue
            offer = self._offers[request_id]
            if not offer.block_ids or request_id in cached.resumed_req_ids:
                offer.block_ids = [[] for _ in more]
            for group, ids in zip(offer.block_ids, more, strict=True):
                group.extend(ids)
            changed.append(request_id)
        return tuple(OfferBlocks(i, self._table(self._offers[i])) for i in changed)

    def _table(self, offer: Offer) -> GroupBlockIds:
        # The engine reports the blocks that it appends, never those that it drops. The window at
        # the offer's end is known from the start, so no block before it is sent, dropped already or
        # not.
        return held_ids(offer.block_ids, self._keepings, offer.num_tokens)

    def _computed(
        self, before: Mapping[str, int], scheduler_output: SchedulerOutputLike
    ) -> tuple[tuple[str, ...], tuple[tuple[str, int], ...]]:
        """The offers that are complete after this step, and those that have grown. ``before``: how
        many tokens of each request are computed.
        """
        done: list[str] = []
        grown: list[tuple[str, int]] = []
        for request_id, num_computed in before.items():
            if request_id not in self._computing:
                continue
            offer = self._offers[request_id]
            num_now = num_computed + scheduler_output.num_scheduled_tokens.get(request_id, 0)
            if num_now >= offer.num_tokens:
                offer.is_computed = True
                done.append(request_id)
            elif self._grows:
                grown.append((request_id, num_now))
        self._computing.difference_update(done)
        return tuple(done), tuple(grown)
