"""What the scheduler side knows of the requests that it offers.

Life: wanted -> minted (first step, nonce) -> computed -> finished (blocks kept) -> sent. A
preemption goes back to wanted: the old nonce is dead for ever, the next step mints another.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvxfer.connector.contract import RequestLike, SchedulerOutputLike, status_name
from kvxfer.connector.params import NONCE_NBYTES
from kvxfer.connector.records import EndOffer, GroupBlockIds, NewOffer, OfferBlocks
from kvxfer.transfer.tokens import digest_keys, token_digest
from kvxfer.transfer.windows import Keeping, held_ids
from kvxfer.transfer.wire import Reason

FINISHED_WELL = {"FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"}
"""Statuses after which a prefilled request's KV is offered; every other end takes the offer back.
"""


@dataclass(slots=True)
class Offer:
    """One offered request; ``nonce`` is empty until it is minted."""

    num_tokens: int
    digest: bytes
    nonce: bytes = b""
    number: int = 0
    block_ids: list[list[int]] = field(default_factory=list)
    is_computed: bool = False


@dataclass(frozen=True, slots=True)
class StepOffers:
    """What one step's metadata says of offers."""

    offers: tuple[NewOffer, ...]
    blocks: tuple[OfferBlocks, ...]
    computed: tuple[str, ...]
    ended: tuple[EndOffer, ...]
    delayed: tuple[str, ...]


class OfferBook:
    """All offered requests of an engine, in the scheduler's process."""

    def __init__(self, random_bytes: Callable[[int], bytes] = secrets.token_bytes) -> None:
        self._random_bytes = random_bytes
        self._num_minted = 0
        self._keepings: Mapping[int, Keeping] = {}
        self._offers: dict[str, Offer] = {}
        self._ended: list[EndOffer] = []
        self._delayed: list[str] = []

    def keep(self, keepings: Mapping[int, Keeping]) -> None:
        """What each group keeps: the tables that leave have no block that its window has left."""
        self._keepings = keepings

    def want(self, request: RequestLike) -> None:
        """This request is to be offered: its whole prompt, once it is computed."""
        tokens = request.prompt_token_ids
        self._offers[request.request_id] = Offer(
            len(tokens), token_digest(tokens, digest_keys(request, len(tokens)))
        )

    def finish(self, request: RequestLike) -> tuple[bool, Offer | None]:
        """The request ended. Returns whether its blocks must be kept until finished_sending, and
        the offer if it stands.
        """
        offer = self._offers.get(request.request_id)
        if offer is None or not offer.nonce:
            self._offers.pop(request.request_id, None)
            return False, None  # no worker has heard of it
        self._delayed.append(request.request_id)
        if offer.is_computed and status_name(request) in FINISHED_WELL:
            return True, offer
        # The workers may hold pulls on it: they end it first, then report finished_sending.
        self._ended.append(EndOffer(request.request_id, Reason.ABORTED))
        return True, None

    def sent(self, request_id: str) -> None:
        """Every rank has reported finished_sending."""
        self._offers.pop(request_id, None)

    def reset(self) -> None:
        """Break every offer; kept blocks come back through finished_sending."""
        self._ended += [
            EndOffer(i, Reason.RESET) for i, offer in self._offers.items() if offer.nonce
        ]

    def has_orders(self) -> bool:
        """Something waits for the next step's metadata."""
        return bool(self._ended or self._delayed)

    def step(self, scheduler_output: SchedulerOutputLike) -> StepOffers:
        """What this step changes. Reads ``scheduler_output``, changes nothing in it."""
        self._preempt(scheduler_output)
        cached = scheduler_output.scheduled_cached_reqs
        started = [new.req_id for new in scheduler_output.scheduled_new_reqs]
        started += [i for i in cached.req_ids if i in cached.resumed_req_ids]
        offers = tuple(self._mint(i) for i in started if i in self._offers)
        blocks = self._tables(scheduler_output)
        computed = self._computed(scheduler_output)
        ended, self._ended = self._ended, []
        delayed, self._delayed = self._delayed, []
        return StepOffers(offers, blocks, computed, tuple(ended), tuple(delayed))

    def _preempt(self, scheduler_output: SchedulerOutputLike) -> None:
        for request_id in scheduler_output.preempted_req_ids or ():
            offer = self._offers.get(request_id)
            if offer is not None and offer.nonce:
                self._ended.append(EndOffer(request_id, Reason.PREEMPTED))
                self._offers[request_id] = Offer(offer.num_tokens, offer.digest)

    def _mint(self, request_id: str) -> NewOffer:
        self._num_minted += 1
        offer = self._offers[request_id]
        offer.nonce = self._random_bytes(NONCE_NBYTES)
        offer.number = self._num_minted
        return NewOffer(
            request_id=request_id,
            nonce=offer.nonce,
            num_tokens=offer.num_tokens,
            digest=offer.digest,
        )

    def _tables(self, scheduler_output: SchedulerOutputLike) -> tuple[OfferBlocks, ...]:
        changed: list[str] = []
        for new in scheduler_output.scheduled_new_reqs:
            offer = self._offers.get(new.req_id)
            if offer is not None:
                offer.block_ids = [list(group) for group in new.block_ids]
                changed.append(new.req_id)
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, more in zip(cached.req_ids, cached.new_block_ids, strict=True):
            offer = self._offers.get(request_id)
            if offer is None or not more or offer.is_computed:
                continue
            if not offer.block_ids or request_id in cached.resumed_req_ids:
                offer.block_ids = [[] for _ in more]
            for group, ids in zip(offer.block_ids, more, strict=True):
                group.extend(ids)
            changed.append(request_id)
        return tuple(OfferBlocks(i, self._table(self._offers[i])) for i in changed)

    def _table(self, offer: Offer) -> GroupBlockIds:
        # The engine tells what it appends, never what it drops. The window of the offer's end is
        # known from the start, so a block before it never leaves, dropped already or not.
        return held_ids(offer.block_ids, self._keepings, offer.num_tokens)

    def _computed(self, scheduler_output: SchedulerOutputLike) -> tuple[str, ...]:
        cached = scheduler_output.scheduled_cached_reqs
        before = {
            new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs
        }
        before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        done: list[str] = []
        for request_id, num_computed in before.items():
            offer = self._offers.get(request_id)
            num_now = num_computed + scheduler_output.num_scheduled_tokens.get(request_id, 0)
            if offer is not None and not offer.is_computed and num_now >= offer.num_tokens:
                offer.is_computed = True
                done.append(request_id)
        return tuple(done)


def frozen_ids(block_ids: Sequence[Sequence[int]]) -> GroupBlockIds:
    """Block ids by group as they travel."""
    return tuple(tuple(group) for group in block_ids)
