"""One offer of a source rank: its session, what performing needs, its clocks, and a look at what a
sink asks of it before anything is done about that.

A lease begins when the offer opens. ``Keep`` extends it to one lease from now, never beyond
``max_hold_s`` after its beginning. A claim has a lease of its own, extended by whatever its sink
engine says: the claim of an engine that fell silent is dropped, and the offer stays for others
until its own lease ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvxfer.connector.io_thread import Timer
from kvxfer.connector.records import GroupBlockIds
from kvxfer.errors import ProtocolError
from kvxfer.transfer.chunks import check_chunks
from kvxfer.transfer.manifest import RankManifest
from kvxfer.transfer.plan import Side
from kvxfer.transfer.pull import PullResolver, check_table
from kvxfer.transfer.session import Break, ClaimantLost, OfferState, Wire
from kvxfer.transfer.source_session import OfferSession
from kvxfer.transfer.windows import Keeping
from kvxfer.transfer.wire import Consumer, Pull, Reason
from kvxfer.transports.base import SendingSource, SourceTransport


@dataclass(slots=True, eq=False)
class GivenOffer:
    """One offer of this rank. Times are the IO thread's.

    ``block_ids``: once it has opened, those of this rank that hold the offered tokens. ``heard_s``:
    when each sink engine that speaks of it was heard last. ``identities``: over which connection
    each consumer was. ``speakers``: over which connection each sink engine that was granted it, or
    knows its tokens, was heard last. ``pulls``: what each consumer asked for, while the offer
    lives.
    """

    request_id: str
    nonce: bytes
    num_tokens: int
    session: OfferSession
    block_ids: GroupBlockIds = ()
    is_delayed: bool = False
    opened_s: float = 0.0
    lease_until_s: float = 0.0
    timer: Timer | None = None
    heard_s: dict[bytes, float] = field(default_factory=dict)
    identities: dict[Consumer, bytes] = field(default_factory=dict)
    speakers: dict[bytes, bytes] = field(default_factory=dict)
    pulls: dict[Consumer, Pull] = field(default_factory=dict)

    @property
    def state(self) -> OfferState:
        """The session's state: PENDING, OPEN, DONE or BROKEN."""
        return self.session.snapshot.state

    def refuses(self, pull: Pull) -> bool:
        """The session will refuse this Pull, or answer it as before, whatever it asks for: a look
        at what it asks for would be wasted work.
        """
        offer = self.session.snapshot
        return (
            offer.state not in (OfferState.PENDING, OfferState.OPEN)
            or offer.digest not in (None, pull.digest)
            or offer.gone_reason(pull.consumer.incarnation) is not None
        )

    def heard(self, incarnation: bytes, now_s: float) -> None:
        """A sink engine said something about the offer. Of one without a claim nothing is kept."""
        if self.session.snapshot.claim(incarnation) is not None:
            self.heard_s[incarnation] = now_s

    def extend(self, now_s: float, lease_s: float, max_hold_s: float) -> None:
        """Before the offer opens there is no lease to extend."""
        if self.opened_s:
            until_s = min(now_s + lease_s, self.opened_s + max_hold_s)
            self.lease_until_s = max(self.lease_until_s, until_s)

    def due(self, now_s: float, lease_s: float) -> list[ClaimantLost | Break]:
        """What the clocks say now."""
        if self.lease_until_s <= now_s:
            return [Break(Reason.EXPIRED)]
        return [
            ClaimantLost(incarnation)
            for incarnation in self.session.claimants
            if self.heard_s.setdefault(incarnation, now_s) + lease_s <= now_s
        ]

    def next_due_s(self, now_s: float, lease_s: float) -> float:
        """When they have something to say, if nothing is heard until then."""
        ends_s = [self.heard_s[i] + lease_s for i in self.session.claimants]
        return min([self.lease_until_s, *(end_s for end_s in ends_s if end_s > now_s)])


# ------------------------------------------------------------------ what a sink asks


class PullRefused(Exception):
    """A Pull that is answered with Refuse, whatever the state of its offer."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def wire_of(pull: Pull, transports: Mapping[str, SourceTransport]) -> Wire:
    """How its consumer reads, on a wire that is served."""
    is_sent = not pull.is_null and isinstance(transports[pull.transport], SendingSource)
    return Wire.STREAM if is_sent else Wire.DIRECT


def read_pull(
    pull: Pull, resolver: PullResolver, transports: Mapping[str, SourceTransport], num_tokens: int
) -> Wire:
    """How this Pull will be served by an offer of ``num_tokens``. Raises PullRefused."""
    if not pull.is_null and pull.transport not in transports:
        raise PullRefused(
            Reason.TRANSPORT,
            f"transport: expected one of {sorted(transports)}, got {pull.transport}",
        )
    if wire_of(pull, transports) is Wire.DIRECT:
        return Wire.DIRECT
    beyond = [wanted.token_hi for wanted in pull.classes if wanted.token_hi > num_tokens]
    if beyond and not _is_padding(resolver.manifest, pull, num_tokens):
        raise PullRefused(
            Reason.PLAN, f"tokens: expected at most the offered {num_tokens}, got {max(beyond)}"
        )
    try:
        _check_held(resolver.resolve(pull.classes), pull, num_tokens)
        if not check_chunks(pull.classes, pull.chunk_nbytes):
            raise PullRefused(Reason.PLAN, "classes: expected something to send, got nothing")
    except ProtocolError as e:
        raise PullRefused(Reason.PLAN, str(e)) from e
    return Wire.STREAM


def _check_held(sides: Sequence[Side], pull: Pull, num_tokens: int) -> None:
    """Raises PullRefused for tokens that this source has let go of by the offer's end."""
    for side, wanted in zip(sides, pull.classes, strict=True):
        held_start = side.keeping.held_start(num_tokens)
        if wanted.token_lo < min(held_start, wanted.token_hi):
            raise PullRefused(
                Reason.PLAN,
                f"{wanted.regions[0].layer}: tokens: expected from {held_start} on, got "
                f"{wanted.token_lo}; of {num_tokens} offered tokens this source keeps "
                f"{side.keeping}",
            )


def check_same(first: Pull, pull: Pull) -> None:
    """A consumer asks for one thing of an offer, however often. Raises PullRefused."""
    if first != pull:
        raise PullRefused(Reason.PLAN, "pull: expected the first one again, got another")


def _is_padding(manifest: RankManifest, pull: Pull, num_tokens: int) -> bool:
    """Whether the tokens beyond the offer only fill its last block up, as opaque blocks need."""
    blocks = {
        (region.layer, region.plane): region.block_tokens
        for region in manifest.regions
        if region.interior != "plain"
    }
    for wanted in pull.classes:
        if wanted.token_hi <= num_tokens:
            continue
        for name in wanted.regions:
            sizes = {blocks.get((name.layer, plane), 1) for plane in name.planes}
            if any(wanted.token_hi > -(-num_tokens // size) * size for size in sizes):
                return False
    return True


def checked_sides(resolver: PullResolver, pull: Pull, block_ids: GroupBlockIds) -> tuple[Side, ...]:
    """This rank's side of every class, once each block that it will read is known to be there.

    Raises ProtocolError.
    """
    sides = resolver.resolve(pull.classes)
    for side, wanted in zip(sides, pull.classes, strict=True):
        check_table(side, block_ids, wanted.token_lo, wanted.token_hi)
    return sides


def own_ids(
    block_ids: GroupBlockIds, keepings: Mapping[int, Keeping], num_tokens: int
) -> GroupBlockIds:
    """Of a table that leaves out what windows let go of, the blocks of the first ``num_tokens`` in
    the groups of one rank, whose ``keepings`` these are. Nothing is told of other groups.

    Raises ValueError if some are missing.
    """
    own: list[tuple[int, ...]] = [()] * len(block_ids)
    for group, keeping in keepings.items():
        num_blocks = -(-num_tokens // keeping.block_tokens)
        if group >= len(block_ids) or len(block_ids[group]) < num_blocks:
            got = len(block_ids[group]) if group < len(block_ids) else "no such group"
            raise ValueError(
                f"block ids of group {group}: expected {num_blocks} for {num_tokens} tokens, "
                f"got {got}"
            )
        own[group] = block_ids[group][:num_blocks]
    return tuple(own)
