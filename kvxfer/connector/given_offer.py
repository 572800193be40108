"""One offer of a source rank: its session, what its actions need, its clocks, and the checks of
what a sink asks for.

A lease begins when the offer opens. ``Keep`` extends it to one lease from now, never beyond
``max_hold_s`` after its beginning. A claim has a lease of its own, extended by every message of its
sink engine. The claim of a silent engine is dropped; the offer stays for others until its own lease
ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import msgspec

from kvxfer.connector.foresight import Foreseen
from kvxfer.connector.io_thread import IoThread, Timer
from kvxfer.connector.records import GroupBlockIds
from kvxfer.connector.verifier import Digests
from kvxfer.errors import ProtocolError
from kvxfer.tensors.kv_digest import Cells, cells_of, seed_of
from kvxfer.transfer.chunks import check_chunks
from kvxfer.transfer.manifest import RankManifest
from kvxfer.transfer.plan import ALL, PullClass, Side
from kvxfer.transfer.pull import PullResolver, check_table, open_to
from kvxfer.transfer.session import (
    Break,
    ClaimantLost,
    OfferState,
    ReleaseArrived,
    StreamSent,
)
from kvxfer.transfer.source_session import OfferSession
from kvxfer.transfer.windows import Keeping
from kvxfer.transfer.wire import (
    MAX_EARLY,
    Cancel,
    Consumer,
    Find,
    Pull,
    Reason,
    Verify,
    decode_to_source,
    encode,
)
from kvxfer.transports.base import SendingSource, SourceTransport, TransferKey


@dataclass(frozen=True, slots=True)
class Asked:
    """What a consumer asks for of an offer, worked out once from its first Pull. ``stream``: the
    wire that it is sent over; None: the consumer reads by itself. ``sides``: of a stream, this
    rank's side of each class.
    """

    pull: Pull
    key: TransferKey
    stream: SendingSource | None
    sides: tuple[Side, ...] = ()

    @property
    def grows(self) -> bool:
        """Can it be given what is open while the rest is computed?"""
        return self.pull.grows is True and (self.stream is None or self.stream.can_grow)


@dataclass(slots=True)
class Check:
    """The digests for one consumer, begun once the offer is complete. ``waiting``: what would
    complete its part in the offer, kept back until they are made, for only an open offer's bytes
    are whole.
    """

    is_begun: bool = False
    digests: Digests | None = None
    is_made: bool = False
    waiting: list[StreamSent | ReleaseArrived] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class GivenOffer:
    """One offer of this rank. Times are the IO thread's.

    ``block_ids``: once the offer has opened, the blocks of this rank that hold the offered tokens;
    before that, all that the engine has told. ``name``: the router's, empty where there is none;
    ``finders``: the connections that have asked by it, and are to hear that the offer is complete.
    ``heard_s``: when each sink engine last sent a message about the offer. ``identities``: the
    connection of each consumer. ``speakers``: the last connection of each sink engine that was
    granted the offer, or knows its tokens. ``asked``: by consumer, while the offer lives.
    ``checks``: of those that verify what they read; ``foreseen``: digests that they will ask for.
    """

    request_id: str
    nonce: bytes
    num_tokens: int
    session: OfferSession
    block_ids: GroupBlockIds = ()
    is_delayed: bool = False
    num_held_blocks: int = 0
    opened_s: float = 0.0
    lease_until_s: float = 0.0
    timer: Timer | None = None
    heard_s: dict[bytes, float] = field(default_factory=dict)
    identities: dict[Consumer, bytes] = field(default_factory=dict)
    speakers: dict[bytes, bytes] = field(default_factory=dict)
    asked: dict[Consumer, Asked] = field(default_factory=dict)
    checks: dict[Consumer, Check] = field(default_factory=dict)
    foreseen: list[Foreseen] = field(default_factory=list)
    name: bytes = b""
    finders: dict[bytes, Find] = field(default_factory=dict)

    @property
    def state(self) -> OfferState:
        return self.session.snapshot.state

    @property
    def open_tokens(self) -> int:
        """Those before it can be read; ALL once they are complete."""
        offer = self.session.snapshot
        return offer.open_tokens if offer.state is OfferState.PENDING else ALL

    @property
    def will_come_again(self) -> bool:
        """Its prefill was preempted: the request gets another nonce when it goes on."""
        return self.session.snapshot.reason is Reason.PREEMPTED

    def refuses(self, pull: Pull) -> bool:
        """Whether the session refuses this Pull, whatever it asks for: no check is worth it."""
        offer = self.session.snapshot
        return (
            offer.state not in (OfferState.PENDING, OfferState.OPEN)
            or offer.digest not in (None, pull.digest)
            or pull.consumer.incarnation in offer.gone
        )

    def heard(self, incarnation: bytes, now_s: float) -> None:
        """A sink engine sent a message about the offer. For one without a claim nothing is kept."""
        if incarnation in self.session.snapshot.claims:
            self.heard_s[incarnation] = now_s

    def extend(self, now_s: float, lease_s: float, max_hold_s: float) -> None:
        if self.opened_s:
            until_s = min(now_s + lease_s, self.opened_s + max_hold_s)
            self.lease_until_s = max(self.lease_until_s, until_s)

    def due(self, now_s: float, lease_s: float) -> list[ClaimantLost | Break]:
        if self.lease_until_s <= now_s:
            return [Break(Reason.EXPIRED)]
        return [
            ClaimantLost(incarnation)
            for incarnation in self.session.claimants
            if self.heard_s.setdefault(incarnation, now_s) + lease_s <= now_s
        ]

    def next_due_s(self, now_s: float, lease_s: float) -> float:
        """When :meth:`due` has the next event, if no message comes until then."""
        ends_s = [self.heard_s[i] + lease_s for i in self.session.claimants]
        return min([self.lease_until_s, *(end_s for end_s in ends_s if end_s > now_s)])


# ------------------------------------------------------------------ what a sink asks


class PullRefused(Exception):
    """Answer this Pull with Refuse, whatever the state of its offer."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def asked_of(pull: Pull, rank: str, transports: Mapping[str, SourceTransport]) -> Asked:
    """Unread: of a Pull that will be refused the wire need not be one of ours. ``rank``: of this
    source.
    """
    wire = None if pull.is_null else transports.get(pull.transport)
    consumer = pull.consumer
    key = TransferKey(pull.offer.nonce, consumer.incarnation, str(consumer.rank), rank)
    return Asked(pull, key, wire if isinstance(wire, SendingSource) else None)


def read_pull(
    asked: Asked, resolver: PullResolver, transports: Mapping[str, SourceTransport], num_tokens: int
) -> Asked:
    """With its sides, if an offer of ``num_tokens`` can serve it. Raises PullRefused."""
    pull = asked.pull
    if not pull.is_null and pull.transport not in transports:
        raise PullRefused(
            Reason.TRANSPORT,
            f"transport: expected one of {sorted(transports)}, got {pull.transport}",
        )
    where = "verify: "
    try:
        if not isinstance(pull.verify, msgspec.UnsetType):
            _check_classes(pull.verify.classes, resolver, num_tokens, is_verified=True)
        where = ""
        if asked.stream is None:
            return asked
        sides = _check_classes(pull.classes, resolver, num_tokens, is_verified=False)
        if not check_chunks(pull.classes, pull.chunk_nbytes, pull.cut_tokens):
            raise PullRefused(Reason.PLAN, "classes: expected something to send, got nothing")
    except ProtocolError as e:
        raise PullRefused(Reason.PLAN, f"{where}{e}") from e
    return replace(asked, sides=sides)


def _check_classes(
    classes: Sequence[PullClass], resolver: PullResolver, num_tokens: int, *, is_verified: bool
) -> tuple[Side, ...]:
    """This rank's side of each class. Raises ProtocolError for what it does not give, PullRefused
    for what it gives, but not of this offer.
    """
    sides = resolver.resolve(classes)  # first: it refuses what would take long to count
    for wanted in classes:
        most = wanted.count(num_tokens)
        if wanted.is_state or wanted.token_hi <= most:
            continue
        last = wanted.token(wanted.token_hi - 1) + 1
        if is_verified:
            problem = f"verify: expected at most the offered {num_tokens} tokens, got {last}"
            raise PullRefused(Reason.PLAN, problem)
        if not _fills_up(resolver.manifest, wanted, most):
            problem = f"tokens: expected at most the offered {num_tokens}, got {last}"
            raise PullRefused(Reason.PLAN, problem)
    for side, wanted in zip(sides, classes, strict=True):
        lacking = _problem(side, wanted, num_tokens)
        if lacking is not None:
            raise PullRefused(Reason.PLAN, lacking)
    return sides


def _problem(side: Side, wanted: PullClass, num_tokens: int) -> str | None:
    """Asked for are the state of another number of tokens than are offered, or tokens that this
    source no longer keeps at the end of the offer.
    """
    layer = wanted.regions[0].layer
    if wanted.is_state and wanted.token_hi and wanted.state_of != num_tokens:
        return (
            f"{layer}: expected to be asked for the state of the offered {num_tokens} tokens, got "
            f"of {wanted.state_of}"
        )
    if side.window is None:
        return None
    held_start = wanted.count(side.keeping.held_start(num_tokens))
    if wanted.token_lo >= min(held_start, wanted.token_hi):
        return None
    return (
        f"{layer}: tokens: expected from {held_start} on, got {wanted.token_lo}; of {num_tokens} "
        f"offered tokens this source keeps {side.keeping}"
    )


def _fills_up(manifest: RankManifest, wanted: PullClass, most: int) -> bool:
    """Whether tokens beyond the offer only fill its last block up, as opaque blocks need."""
    asked = {(name.layer, plane) for name in wanted.regions for plane in name.planes}
    sizes = {
        1 if region.interior == "plain" else region.block_tokens
        for region in manifest.regions
        if (region.layer, region.plane) in asked
    }
    return all(wanted.token_hi <= -(-most // size) * size for size in sizes or {1})


def check_open(asked: Asked, block_ids: GroupBlockIds, open_tokens: int) -> None:
    """Check that each block is there that is open of a stream. Raises ProtocolError."""
    for side, wanted in zip(asked.sides, asked.pull.classes, strict=True):
        token_hi = open_to(wanted, open_tokens)
        if wanted.token_lo < token_hi:
            check_table(side, block_ids, wanted.token_lo, token_hi)


def given_cells(resolver: PullResolver, offer: GivenOffer, verify: Verify) -> list[Cells]:
    """Where what a sink verifies lies here. Raises ProtocolError or ValueError."""
    sides, seed = resolver.resolve(verify.classes), seed_of(offer.nonce)
    return [
        cells_of(side, wanted, offer.block_ids, verify.every, seed)
        for side, wanted in zip(sides, verify.classes, strict=True)
    ]


def own_ids(
    block_ids: GroupBlockIds, keepings: Mapping[int, Keeping], num_tokens: int
) -> GroupBlockIds:
    """The blocks of the first ``num_tokens`` in the groups of one rank. ``keepings`` are what these
    groups keep. The table leaves out blocks that windows have dropped, and has one block of a
    state, or none yet; other groups of the table are left out.

    Raises ValueError if some are missing.
    """
    own: list[tuple[int, ...]] = [()] * len(block_ids)
    for group, keeping in keepings.items():
        if keeping.is_state:
            own[group] = block_ids[group] if group < len(block_ids) else ()
            continue
        num_blocks = -(-num_tokens // keeping.block_tokens)
        if group >= len(block_ids) or len(block_ids[group]) < num_blocks:
            got = len(block_ids[group]) if group < len(block_ids) else "no such group"
            raise ValueError(
                f"block ids of group {group}: expected {num_blocks} for {num_tokens} tokens, "
                f"got {got}"
            )
        own[group] = block_ids[group][:num_blocks]
    return tuple(own)


# ------------------------------------------------------------------ what comes before its offer


MAX_PARKED, MAX_NBYTES = 4096, 64 << 20
"""Of all connections. A Find has 100 bytes, a Pull of a stream of 80 layers 5 KB."""
MAX_PEER_NBYTES = 8 << 20
"""Of one connection, and MAX_EARLY."""

Early = Find | Pull | Cancel
Item = tuple[bytes, bytes]
"""A connection and what it has said: encoded, which is smaller, and of a known size."""


@dataclass(slots=True)
class _Held:
    """What waits of one connection: for what, and as which item."""

    items: set[tuple[bytes, Item]] = field(default_factory=set)
    nbytes: int = 0


class Parked:
    """Messages by what they wait for: a Find for a request of that name to be scheduled here, a
    Pull until this rank, too, has heard of the nonce. Anybody who is admitted can ask for what
    never comes, so what waits is bounded for each connection and for all, in number, bytes and
    time.

    ``late``: gets each message that has waited for ``wait_s`` in vain, ``greedy`` each connection
    that has no room left of its own and sends one more. Ours send no more than that.
    """

    def __init__(
        self,
        io: IoThread,
        wait_s: float,
        late: Callable[[bytes, Early], None],
        greedy: Callable[[bytes], object],
    ) -> None:
        self._io, self._wait_s, self._late, self._greedy = io, wait_s, late, greedy
        self._waiting: dict[bytes, dict[Item, Timer]] = {}
        self._of_peer: dict[bytes, _Held] = {}
        self._num, self._nbytes = 0, 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._waiting

    def park(self, key: bytes, identity: bytes, message: Early) -> bool:
        """False if there is no room for it. One that is repeated waits no longer."""
        frame = encode(message)
        if (identity, frame) in self._waiting.get(key, ()):
            return True
        held = self._of_peer.get(identity) or _Held()
        if len(held.items) >= MAX_EARLY or held.nbytes + len(frame) > MAX_PEER_NBYTES:
            self._greedy(identity)
            return False
        if self._num >= MAX_PARKED or self._nbytes + len(frame) > MAX_NBYTES:
            return False
        item = identity, frame
        timer = self._io.after(self._wait_s, self._expire, key, item)
        self._waiting.setdefault(key, {})[item] = timer
        held.items.add((key, item))
        held.nbytes += len(frame)
        self._of_peer[identity] = held
        self._num += 1
        self._nbytes += len(frame)
        return True

    def take(self, key: bytes) -> list[tuple[bytes, Early]]:
        """What waited for this, in the order in which it came, with its connection."""
        items = list(self._waiting.get(key, ()))
        for item in items:
            self._drop(key, item)
        return [(identity, _decoded(frame)) for identity, frame in items]

    def forget_find(self, identity: bytes, cancel: Cancel) -> bool:
        """Whether this takes back what the same connection has asked: who gives up what is not
        found yet names it as its Find does.
        """
        request, life, digest = cancel.offer.nonce, cancel.incarnation, cancel.digest
        item = identity, encode(Find(request, life, digest))
        is_known = item in self._waiting.get(request, ())
        if is_known:
            self._drop(request, item)
        return is_known

    def gone(self, identity: bytes) -> None:
        held = self._of_peer.get(identity)
        for key, item in list(held.items) if held is not None else ():
            self._drop(key, item)

    def _expire(self, key: bytes, item: Item) -> None:
        self._drop(key, item)
        self._late(item[0], _decoded(item[1]))

    def _drop(self, key: bytes, item: Item) -> None:
        items, (identity, frame) = self._waiting[key], item
        items.pop(item).cancel()
        if not items:
            del self._waiting[key]
        held = self._of_peer[identity]
        held.items.remove((key, item))
        held.nbytes -= len(frame)
        self._num -= 1
        self._nbytes -= len(frame)
        if not held.items:
            del self._of_peer[identity]


def _decoded(frame: bytes) -> Early:
    return cast("Early", decode_to_source(frame))
