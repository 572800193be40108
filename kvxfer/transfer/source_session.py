"""The life of one offer at one source rank: a table, no sockets, no clocks, no tensors.

Theory of operation
-------------------
An offer promises that a request's blocks stay whole and unchanged. It is PENDING until the ready
event of the step that computes the last offered token has completed, then OPEN; DONE and BROKEN are
final, nothing re-opens a nonce. While it is PENDING its ``open_tokens`` grow: consumers whose Pull
says that they grow read these, all others are parked until it is OPEN::

    PENDING --ReadyCompleted--> OPEN --last claim complete--> DONE
       \\--------------------------\\---Break, last claim cancelled--> BROKEN

1. *Valid* means that the consumer was granted and that the offer is not over when its Release is
   processed: it has read only what was open, and that is whole still, whatever is computed yet. The
   first verdict after the Grant is its verdict for ever; a repeated Release gets it
   again in every state. A valid one is kept; an invalid one follows from what is final: its engine
   is gone, or the offer is over.
   A Release without a Grant is invalid, and nothing of it is kept: whoever knows the nonce can
   invent consumers. No correct peer sends one. The Release leaves after the read, the read begins
   after the Grant, a Grant is never forgotten, and another life of the engine is another consumer.
   So a proper Pull, read and Release may still become valid after it: what was read between that
   Grant and that Release is whole, whatever came before.
2. A *claim* is the set of ranks of one sink engine life (incarnation) that read this source rank,
   named by its Pulls. Consumers are a set, never a count: a duplicated Release changes nothing. The
   offer is DONE when it is OPEN, every claim is complete and there is one.
3. An engine that cancels, is lost, or loses its wire is *gone* for this offer: its claim is
   dropped, its streams are stopped, its later Pulls are refused and its later Releases are invalid.
   A complete claim is not lost with its engine. The last claim that is cancelled breaks the offer;
   one that is lost leaves it to the lease. A Cancel without a claim counts where it has the offer's
   digest, as a Pull must have it. At most 64 engine lives claim or cancel one offer, for
   at most 4096 consumers; the Pulls beyond are refused.
4. On stream wires a chunk is packed when its tokens are open, and leaves only if the offer is not
   over and the claim lives when its pack has completed. So each sent chunk is valid, and
   ``StreamSent`` is a valid verdict without a Release.
5. ``FinishedSending`` comes once, in a final state, when no stream of this offer touches the pool.
   A direct read may still run then: it is harmless, because it cannot become valid any more.

What a peer can make an offer remember is bounded by ``MAX_LIVES`` and ``_MAX_CONSUMERS``, and
looked up by name: one hostile message costs no more than an honest one.

Everything that changes an offer's state is in this file, and every step goes through ``TABLE``: a
missing key is a :class:`ProtocolError` that changes nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import msgspec

from kvxfer.errors import ProtocolError
from kvxfer.transfer import session
from kvxfer.transfer.manifest import MAX_RANKS, RankId
from kvxfer.transfer.session import OfferState, SourceAction, SourceEvent, Wire
from kvxfer.transfer.wire import Consumer, Reason

MAX_LIVES = 64
"""Sink engine lives that one offer hears of: those that claimed it, and those that cancelled."""
_MAX_CONSUMERS = 4 * MAX_RANKS
"""Consumers that one offer serves: as many as four of the largest engines have ranks."""


class StreamState(enum.Enum):
    """What the transport does for one consumer. RUNNING and STOPPING may touch the pool."""

    NONE = "none"
    RUNNING = "running"
    STOPPING = "stopping"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class Share:
    """The part in an offer of one consumer whose Pull was granted.

    ``is_valid``: it has its valid verdict, for ever. Invalid ones follow from what is final (the
    offer's end, the engine's being gone), so they are not kept.
    """

    consumer: Consumer
    stream: StreamState = StreamState.NONE
    is_valid: bool = False


@dataclass(frozen=True, slots=True)
class Claim:
    """``waiting``: ranks without a valid verdict; none are left when the claim is complete."""

    ranks: frozenset[RankId]
    waiting: frozenset[RankId]

    @property
    def is_complete(self) -> bool:
        return not self.waiting


@dataclass(frozen=True, slots=True)
class OfferSnapshot:
    """Everything an :class:`OfferSession` knows; immutable and hashable. ``reason``: why it is
    BROKEN. ``open_tokens``: that can be read while it is PENDING. ``claims``: by sink engine life;
    ``gone``: why such a life may not read any more, because its claim was dropped, or it cancelled
    before it had one.

    The mappings are never changed, only replaced; what they hold is compared, and left out of the
    hash.
    """

    nonce: bytes
    digest: bytes | None
    state: OfferState = OfferState.PENDING
    reason: Reason | None = None
    parked: Mapping[Consumer, session.PullArrived] = field(default_factory=dict, hash=False)
    claims: Mapping[bytes, Claim] = field(default_factory=dict, hash=False)
    gone: Mapping[bytes, Reason] = field(default_factory=dict, hash=False)
    shares: Mapping[Consumer, Share] = field(default_factory=dict, hash=False)
    is_finished: bool = False
    open_tokens: int = 0

    def has_room_for(self, num_ranks: int) -> bool:
        """One more sink engine may claim with so many consumers, or cancel: 0. A claim that is
        dropped is gone, and still counts. A rank that was granted and whose claim lives is counted
        twice, which only makes the room smaller.
        """
        num_claimed = sum(len(claim.ranks) for claim in self.claims.values())
        has_room = len(self.shares) + num_claimed + num_ranks <= _MAX_CONSUMERS
        return len(self.claims) + len(self.gone) < MAX_LIVES and (has_room or not num_ranks)

    def with_share(self, share: Share) -> OfferSnapshot:
        return replace(self, shares={**self.shares, share.consumer: share})

    def with_valid(self, consumer: Consumer) -> OfferSnapshot:
        """A copy in which a consumer that has a share has its valid verdict."""
        offer = self.with_share(replace(self.shares[consumer], is_valid=True))
        claim = self.claims.get(consumer.incarnation)
        if claim is None:
            return offer
        claim = replace(claim, waiting=claim.waiting - {consumer.rank})
        return replace(offer, claims={**self.claims, consumer.incarnation: claim})


Step = tuple[OfferSnapshot, list[SourceAction]]
Handler = Callable[[OfferSnapshot, Any], Step]


# ------------------------------------------------------------------ pulls


def _refusal(offer: OfferSnapshot, pull: session.PullArrived) -> Reason | None:
    """Why this Pull cannot be served in PENDING or OPEN; None if it can."""
    consumer = pull.consumer
    if consumer.incarnation in offer.gone:
        return offer.gone[consumer.incarnation]
    if offer.digest is not None and pull.digest != offer.digest:
        return Reason.TOKENS
    if consumer.rank not in pull.claim:
        return Reason.PLAN
    claim = offer.claims.get(consumer.incarnation)
    if claim is not None:
        return None if claim.ranks == pull.claim else Reason.PLAN
    return None if offer.has_room_for(len(pull.claim)) else Reason.PLAN


def _with_claim(offer: OfferSnapshot, pull: session.PullArrived) -> OfferSnapshot:
    incarnation = pull.consumer.incarnation
    if incarnation in offer.claims:
        return offer
    claim = Claim(ranks=pull.claim, waiting=pull.claim)
    return replace(offer, claims={**offer.claims, incarnation: claim})


def _park(offer: OfferSnapshot, pull: session.PullArrived) -> Step:
    refusal = _refusal(offer, pull)
    if refusal is not None:
        return offer, [session.SendRefuse(pull.consumer, refusal)]
    if pull.grows:
        return _grant(offer, pull)
    if pull.consumer in offer.parked:
        return offer, []
    offer = _with_claim(offer, pull)
    # One set for all its ranks: 4096 sets of 4096 would be a gigabyte
    claim = offer.claims[pull.consumer.incarnation].ranks
    pull = msgspec.structs.replace(pull, claim=claim)
    return replace(offer, parked={**offer.parked, pull.consumer: pull}), []


def _grant(offer: OfferSnapshot, pull: session.PullArrived) -> Step:
    consumer = pull.consumer
    refusal = _refusal(offer, pull)
    if refusal is not None:
        return offer, [session.SendRefuse(consumer, refusal)]
    if consumer in offer.shares:
        return offer, [session.SendGrant(consumer)]
    offer = _with_claim(offer, pull)
    if pull.wire is Wire.DIRECT:
        return offer.with_share(Share(consumer)), [session.SendGrant(consumer)]
    share = Share(consumer, stream=StreamState.RUNNING)
    return offer.with_share(share), [session.SendGrant(consumer), session.StartStream(consumer)]


def _open(offer: OfferSnapshot, _: session.ReadyCompleted) -> Step:
    parked = offer.parked.values()
    offer = replace(offer, state=OfferState.OPEN, parked={})
    actions: list[SourceAction] = []
    for share in _reading(offer):
        actions.append(session.SendGrant(share.consumer))
        if share.stream is StreamState.RUNNING:
            actions.append(session.GrowStream(share.consumer))
    for pull in parked:
        offer, more = _grant(offer, pull)
        actions += more
    return _settle(offer), actions


def _grow(offer: OfferSnapshot, event: session.Grown) -> Step:
    if event.open_tokens <= offer.open_tokens:
        return offer, []
    offer = replace(offer, open_tokens=event.open_tokens)
    return offer, [
        session.GrowStream(share.consumer)
        if share.stream is StreamState.RUNNING
        else session.SendGrant(share.consumer)
        for share in _reading(offer)
    ]


def _reading(offer: OfferSnapshot) -> list[Share]:
    """Those that were granted and may need more of the offer than was open."""
    return [
        share
        for share in offer.shares.values()
        if not share.is_valid and share.consumer.incarnation not in offer.gone
    ]


def _pull_late(offer: OfferSnapshot, pull: session.PullArrived) -> Step:
    share = offer.shares.get(pull.consumer)
    if share is not None and share.stream is StreamState.OVER and share.is_valid:
        # Every chunk was sent, only the Grant was lost: a refusal would fail a read that is
        # complete.
        return offer, [session.SendGrant(pull.consumer)]
    # Who comes early comes again if the prefill was preempted
    reason = offer.reason if pull.grows else None
    return offer, [session.SendRefuse(pull.consumer, reason or Reason.ENDED)]


# ------------------------------------------------------------------ releases


def _invalid(offer: OfferSnapshot, consumer: Consumer, otherwise: Reason) -> Step:
    """Answer no, because its engine is gone, or for another reason. Nothing is recorded."""
    reason = offer.gone.get(consumer.incarnation, otherwise)
    return offer, [session.SendVerdict(consumer, False, reason)]


def _release(offer: OfferSnapshot, event: session.ReleaseArrived) -> Step:
    consumer = event.consumer
    share = offer.shares.get(consumer)
    if share is None:
        return _invalid(offer, consumer, Reason.PLAN)
    if share.is_valid:
        return offer, [session.SendVerdict(consumer, True, None)]
    if consumer.incarnation in offer.gone:
        return _invalid(offer, consumer, Reason.ENDED)
    if share.stream is StreamState.RUNNING:
        raise ProtocolError(
            f"offer {offer.nonce.hex()}: expected no Release from {consumer.rank} while its stream "
            "runs, got one"
        )
    return _settle(offer.with_valid(consumer)), [session.SendVerdict(consumer, True, None)]


def _release_late(offer: OfferSnapshot, event: session.ReleaseArrived) -> Step:
    share = offer.shares.get(event.consumer)
    if share is not None and share.is_valid:
        return offer, [session.SendVerdict(event.consumer, True, None)]
    return _invalid(offer, event.consumer, offer.reason or Reason.ENDED)


# ------------------------------------------------------------------ ends


def _settle(offer: OfferSnapshot) -> OfferSnapshot:
    """DONE when there is a claim and every claim is complete."""
    if offer.state is not OfferState.OPEN or not offer.claims:
        return offer
    is_done = all(claim.is_complete for claim in offer.claims.values())
    return replace(offer, state=OfferState.DONE) if is_done else offer


def _dismiss(offer: OfferSnapshot, incarnations: frozenset[bytes], reason: Reason) -> Step:
    """Stop their streams, forget their parked Pulls, and tell their consumers that wait."""
    actions: list[SourceAction] = []
    waiting = [consumer for consumer in offer.parked if consumer.incarnation in incarnations]
    stopped: dict[Consumer, Share] = {}
    for share in offer.shares.values():
        if share.consumer.incarnation not in incarnations:
            continue
        if not share.is_valid:
            waiting.append(share.consumer)
        if share.stream is StreamState.RUNNING:
            stopped[share.consumer] = replace(share, stream=StreamState.STOPPING)
            actions.append(session.StopStream(share.consumer))
    parked = {c: pull for c, pull in offer.parked.items() if c.incarnation not in incarnations}
    actions += [session.SendBroken(consumer, reason) for consumer in waiting]
    return replace(offer, parked=parked, shares={**offer.shares, **stopped}), actions


def _drop_claim(offer: OfferSnapshot, incarnation: bytes, reason: Reason) -> Step:
    if incarnation in offer.gone:
        return offer, []
    if incarnation not in offer.claims and not offer.has_room_for(0):
        # Nothing to drop, and no claim of it will be taken: there is no room for that either.
        return offer, []
    offer, actions = _dismiss(offer, frozenset({incarnation}), reason)
    claims = {life: claim for life, claim in offer.claims.items() if life != incarnation}
    return replace(offer, claims=claims, gone={**offer.gone, incarnation: reason}), actions


def knows_tokens(offer: OfferSnapshot, incarnation: bytes, digest: bytes) -> bool:
    """Whether a sink engine has been granted the offer, or would be: it has a claim, or says the
    offer's digest. The nonce alone proves nothing; routers and logs see it.
    """
    return incarnation in offer.claims or offer.digest in (None, digest)


def _cancel(offer: OfferSnapshot, event: session.CancelArrived) -> Step:
    if not knows_tokens(offer, event.incarnation, event.digest):
        return offer, []
    offer, actions = _drop_claim(offer, event.incarnation, event.reason)
    if not offer.claims:
        return replace(offer, state=OfferState.BROKEN, reason=event.reason), actions
    return _settle(offer), actions


def _lose(offer: OfferSnapshot, event: session.ClaimantLost) -> Step:
    claim = offer.claims.get(event.incarnation)
    if claim is None or claim.is_complete:
        return offer, []
    offer, actions = _drop_claim(offer, event.incarnation, Reason.PEER_LOST)
    return _settle(offer), actions


def _break(offer: OfferSnapshot, event: session.Break) -> Step:
    offer, actions = _dismiss(offer, frozenset(offer.claims), event.reason)
    return replace(offer, state=OfferState.BROKEN, reason=event.reason), actions


# ------------------------------------------------------------------ streams


def _streaming(offer: OfferSnapshot, consumer: Consumer) -> Share:
    share = offer.shares.get(consumer)
    if share is None or share.stream is StreamState.NONE:
        raise ProtocolError(f"offer {offer.nonce.hex()}: {consumer.rank} has no stream")
    return share


def _send_chunk(offer: OfferSnapshot, event: session.ChunkPacked) -> Step:
    share = offer.shares.get(event.consumer)
    # A stream of a dropped claim is STOPPING, so RUNNING implies that the claim lives.
    if share is not None and share.stream is StreamState.RUNNING:
        return offer, [session.SendChunk(event.consumer, event.sequence)]
    return _drop_chunk(offer, event)


def _drop_chunk(offer: OfferSnapshot, event: session.ChunkPacked) -> Step:
    return offer, [session.DropChunk(event.consumer, event.sequence)]


def _stream_sent(offer: OfferSnapshot, event: session.StreamSent) -> Step:
    share = _streaming(offer, event.consumer)
    offer = offer.with_share(replace(share, stream=StreamState.OVER))
    if share.stream is StreamState.RUNNING:
        offer = offer.with_valid(event.consumer)
    return _settle(offer), []


def _stream_drained(offer: OfferSnapshot, event: session.StreamDrained) -> Step:
    share = _streaming(offer, event.consumer)
    offer = offer.with_share(replace(share, stream=StreamState.OVER))
    if share.stream is not StreamState.RUNNING:
        return offer, []
    # Nobody asked it to stop: the wire failed, and this consumer can no longer succeed.
    offer, actions = _drop_claim(offer, event.consumer.incarnation, Reason.READ_FAILED)
    return _settle(offer), actions


def _stream_over(offer: OfferSnapshot, event: session.StreamSent | session.StreamDrained) -> Step:
    share = _streaming(offer, event.consumer)
    return offer.with_share(replace(share, stream=StreamState.OVER)), []


def _ignore(offer: OfferSnapshot, _: SourceEvent) -> Step:
    return offer, []


# ------------------------------------------------------------------ the table

_FINAL = (OfferState.DONE, OfferState.BROKEN)
_LATE: Mapping[type, Handler] = {
    session.PullArrived: _pull_late,
    session.ReleaseArrived: _release_late,
    session.CancelArrived: _ignore,
    session.ClaimantLost: _ignore,
    session.Break: _ignore,
    session.ChunkPacked: _drop_chunk,
    session.StreamSent: _stream_over,
    session.StreamDrained: _stream_over,
    session.Grown: _ignore,
}
"""What may still come to an offer that is over."""

TABLE: Mapping[tuple[OfferState, type], Handler] = {
    (OfferState.PENDING, session.ReadyCompleted): _open,
    (OfferState.PENDING, session.Grown): _grow,
    (OfferState.PENDING, session.PullArrived): _park,
    (OfferState.PENDING, session.ReleaseArrived): _release,
    (OfferState.PENDING, session.CancelArrived): _cancel,
    (OfferState.PENDING, session.ClaimantLost): _lose,
    (OfferState.PENDING, session.Break): _break,
    (OfferState.PENDING, session.ChunkPacked): _send_chunk,
    (OfferState.PENDING, session.StreamSent): _stream_sent,
    (OfferState.PENDING, session.StreamDrained): _stream_drained,
    (OfferState.OPEN, session.Grown): _ignore,
    (OfferState.OPEN, session.PullArrived): _grant,
    (OfferState.OPEN, session.ReleaseArrived): _release,
    (OfferState.OPEN, session.CancelArrived): _cancel,
    (OfferState.OPEN, session.ClaimantLost): _lose,
    (OfferState.OPEN, session.Break): _break,
    (OfferState.OPEN, session.ChunkPacked): _send_chunk,
    (OfferState.OPEN, session.StreamSent): _stream_sent,
    (OfferState.OPEN, session.StreamDrained): _stream_drained,
    # Broken before the step ended; the event still completes
    (OfferState.BROKEN, session.ReadyCompleted): _ignore,
    **{(state, event): handler for state in _FINAL for event, handler in _LATE.items()},
}

_BUSY = (StreamState.RUNNING, StreamState.STOPPING)


def events_due(
    offer: OfferSnapshot, event: SourceEvent, ended: Reason | None
) -> tuple[SourceEvent, ...]:
    """What a source takes in, in this order, where it has heard ``event``.

    ``ended``: why the engine has ended the offer, None if it has not; read after the event came.
    The engine lets blocks go as soon as it has written that, so its end comes before all else.
    """
    if ended is None or offer.state in _FINAL:
        return (event,)
    return (session.Break(ended), event)


class OfferSession:
    """One offer at one source rank. ``digest`` None: the tokens are not bound, any digest is
    served. ``snapshot`` is all of it, immutable and hashable.
    """

    table: ClassVar[Mapping[tuple[OfferState, type], Handler]] = TABLE

    def __init__(self, nonce: bytes, digest: bytes | None) -> None:
        self.snapshot = OfferSnapshot(nonce, digest)

    @property
    def claimants(self) -> tuple[bytes, ...]:
        """The sink engine lives with a live claim that is not complete: whose silence matters."""
        claims = self.snapshot.claims.items()
        return tuple(life for life, claim in claims if not claim.is_complete)

    def serves(self, consumer: Consumer) -> bool:
        """Its Pull was granted, or waits for the offer to open."""
        return consumer in self.snapshot.parked or consumer in self.snapshot.shares

    def step(self, event: SourceEvent) -> list[SourceAction]:
        """Take one event; return what to do, in order. Raises ProtocolError, changing nothing."""
        offer = self.snapshot
        handler = self.table.get((offer.state, type(event)))
        if handler is None:
            raise ProtocolError(
                f"offer {offer.nonce.hex()}: {type(event).__name__} is not allowed in "
                f"{offer.state.name}"
            )
        offer, actions = handler(offer, event)
        if offer.state in _FINAL and not offer.is_finished:
            is_busy = any(share.stream in _BUSY for share in offer.shares.values())
            if not is_busy:
                offer = replace(offer, is_finished=True)
                actions = [*actions, session.FinishedSending(offer.reason)]
        self.snapshot = offer
        return actions
