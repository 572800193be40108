"""The giving side of one rank: its offers, and what it answers to sinks. Runs on the IO thread.

Every change of an offer is an event: of the engine, a message, a wire, or a clock.
:meth:`Source._step` gives it to the table of the offer's session
(:mod:`kvxfer.transfer.source_session`) and performs the actions that come back; the outcome of an
action is the next event. An offer that is over is remembered, so that a repeated question gets its
first answer, until :data:`REMEMBERED` others have ended.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

from msgspec import UNSET, UnsetType

from kvxfer.config import Config
from kvxfer.connector.board import Ends, Posted
from kvxfer.connector.control import ControlServer
from kvxfer.connector.foresight import Foreseen, Foresight
from kvxfer.connector.given_offer import (
    Asked,
    Check,
    Early,
    GivenOffer,
    Parked,
    PullRefused,
    asked_of,
    check_open,
    given_cells,
    own_ids,
    read_pull,
)
from kvxfer.connector.io_thread import IoThread
from kvxfer.connector.ledger import Ledger
from kvxfer.connector.records import EndOffer, GroupBlockIds, NewOffer, OfferBlocks
from kvxfer.connector.unused_kv import UntakenKV, why_given_up, why_lapsed
from kvxfer.connector.verifier import Digests, Verifier
from kvxfer.errors import KvxferError
from kvxfer.tensors.kv_digest import seed_of
from kvxfer.transfer.manifest import RankId, RankManifest
from kvxfer.transfer.plan import ALL
from kvxfer.transfer.pull import PullResolver
from kvxfer.transfer.session import (
    Break,
    CancelArrived,
    ChunkPacked,
    ClaimantLost,
    DropChunk,
    FinishedSending,
    Grown,
    GrowStream,
    OfferState,
    PullArrived,
    ReadyCompleted,
    ReleaseArrived,
    SendBroken,
    SendChunk,
    SendGrant,
    SendRefuse,
    SendVerdict,
    SourceAction,
    SourceEvent,
    StartStream,
    StopStream,
    StreamDrained,
    StreamSent,
    Wire,
)
from kvxfer.transfer.source_session import (
    MAX_LIVES,
    OfferSession,
    StreamState,
    events_due,
    knows_tokens,
)
from kvxfer.transfer.windows import group_keepings
from kvxfer.transfer.wire import (
    Broken,
    Cancel,
    Consumer,
    Find,
    Found,
    Grant,
    Keep,
    OfferRef,
    Pull,
    Reason,
    Refuse,
    Release,
    ToSink,
    Verdict,
    Verify,
)
from kvxfer.transports.base import (
    Packed,
    SendingSource,
    SendRequest,
    Sent,
    SourceCompletion,
    SourceTransport,
    TransferKey,
)

REMEMBERED = 4096
"""Offers that are over and still answer; about 1 KiB each."""

READY_POLL_S = 0.001
"""How often events that have not completed are asked again; only where work is asynchronous."""

IsReady = Callable[[], bool]
"""Whether the step that computes an offer's last token has completed."""

_log = logging.getLogger("kvxfer.connector")


@dataclass(frozen=True, slots=True)
class _Stream:
    """A stream that has begun and not ended: its offer and consumer, and its wire."""

    offer: GivenOffer
    consumer: Consumer
    transport: SendingSource


@dataclass(frozen=True, slots=True)
class Served:
    """What a rank gives: as its manifest says, which Pulls are checked against; by these wires."""

    incarnation: bytes
    manifest: RankManifest
    transports: Mapping[str, SourceTransport]


class Source:
    """All offers of this rank, live ones and those that are over.

    Args:
        server: answers go over the connections of their messages.
        ends: the offers that the engine has ended, and the board that shows open offers to sinks on
            this host.
        verifier: makes the digests that sinks ask for.
    """

    def __init__(
        self,
        io: IoThread,
        config: Config,
        ledger: Ledger,
        served: Served,
        *,
        server: ControlServer,
        ends: Ends,
        verifier: Verifier,
    ) -> None:
        self._io = io
        self._config = config
        self._ledger = ledger
        self._ends = ends
        self._verifier = verifier
        self._incarnation = served.incarnation
        self._resolver, self._rank = PullResolver(served.manifest), str(served.manifest.rank)
        self._transports = served.transports
        self._server = server
        self._is_front_door = served.manifest.rank == RankId(0, 0)  # which writes for all ranks
        self._untaken, self._foresight = UntakenKV(), Foresight()
        self._keepings = group_keepings(served.manifest.regions)
        self._streams: dict[TransferKey, _Stream] = {}
        self._live: dict[bytes, GivenOffer] = {}
        self._over: OrderedDict[bytes, GivenOffer] = OrderedDict()
        self._by_request: dict[str, GivenOffer] = {}
        self._by_name: dict[bytes, GivenOffer] = {}
        self._parked = Parked(io, config.early_wait_s, self._not_found, server.refused)
        self._opening: list[tuple[GivenOffer, int, IsReady]] = []
        self._on_drained: Callable[[], object] | None = None
        self.num_held_blocks = 0
        """Of finished requests, kept for sinks."""

    @property
    def num_offers(self) -> int:
        return len(self._live)

    @property
    def num_readable(self) -> int:
        """Those that sinks can read, or are reading. May be called from any thread."""
        return sum(offer.state is OfferState.OPEN for offer in list(self._live.values()))

    def awaits(self, offers: Iterable[NewOffer]) -> bool:
        """Whether a sink waits for one of these that has tokens already. May be called from any
        thread.
        """
        return any(offer.open_tokens and offer.name in self._parked for offer in offers)

    # -------------------------------------------------- orders of the engine

    def add(self, order: NewOffer) -> None:
        """A request that will be offered was admitted; Pulls for it are parked until it opens."""
        if order.nonce in self._live or order.nonce in self._over:
            raise ValueError(
                f"offer {order.nonce.hex()}: expected a new nonce, got one that was used"
            )
        digest = order.digest if self._config.bind_tokens else None
        session = OfferSession(order.nonce, digest)
        offer = GivenOffer(order.request_id, order.nonce, order.num_tokens, session)
        self._live[order.nonce] = offer
        self._by_request[order.request_id] = offer
        self._ledger.count("offers.minted")
        self._name(offer, order.name)
        for key in (offer.name, offer.nonce):
            if key in self._parked:
                for identity, message in self._parked.take(key):
                    self._io.guard(self.handle, identity, message)

    def _name(self, offer: GivenOffer, name: bytes) -> None:
        """An offer under the id that a router gave its request; the first one has it."""
        named = self._by_name.get(name)
        if named is not None and named.state in (OfferState.PENDING, OfferState.OPEN):
            self._ledger.count("control.name_taken")
        elif name:
            offer.name = name
            self._by_name[name] = offer

    def set_blocks(self, order: OfferBlocks) -> None:
        """The block table of an offered request, as of this step; final once it has opened."""
        offer = self._by_request.get(order.request_id)
        if offer is not None and offer.state is OfferState.PENDING:
            offer.block_ids = order.block_ids

    def computed(self, open_tokens: Iterable[tuple[str, int]], is_ready: IsReady) -> None:
        """A step was launched that computes so many tokens of these requests, ALL: the last offered
        one, too; they are open when ``is_ready()``.
        """
        is_polling = bool(self._opening)
        found = ((self._by_request.get(name), num_tokens) for name, num_tokens in open_tokens)
        self._opening += [(offer, num, is_ready) for offer, num in found if offer is not None]
        if not is_polling:
            self._open_ready()

    def delay(self, request_ids: Sequence[str]) -> None:
        """Their blocks are kept until they are reported; at once if the offer is over."""
        for request_id in request_ids:
            offer = self._by_request.get(request_id)
            if offer is None:
                self._ledger.sent(request_id)
            else:
                offer.is_delayed = True
                offer.num_held_blocks = sum(len(ids) - ids.count(-1) for ids in offer.block_ids)
                self.num_held_blocks += offer.num_held_blocks
                self._extend(offer, self._config.lease_s)  # only now a sink can hear of it

    def end(self, orders: Sequence[EndOffer]) -> None:
        for order in orders:
            offer = self._live.get(order.nonce)
            if offer is not None:
                self._break(offer, order.reason)
            self._ends.forget(order.nonce)

    def shutdown(self, done: Callable[[], object]) -> None:
        """Break every offer, tell the consumers; ``done`` is called when all have drained."""
        for offer in list(self._live.values()):
            self._break(offer, Reason.SHUTDOWN)
        self._on_drained = done
        self._tell_drained()

    # -------------------------------------------------- messages and completions

    def handle(self, identity: bytes, message: Pull | Release | Cancel | Keep | Find) -> None:
        """Raises ProtocolError for a message that the offer's state does not allow."""
        match message:
            case Keep():
                for ref in message.offers:
                    self._on_keep(identity, ref, message)
            case Cancel():
                self._on_cancel(identity, message)
            case Release():
                self._on_release(identity, message)
            case Pull():
                self._on_pull(identity, message)
            case Find():
                self._on_find(identity, message)
            case _:
                assert_never(message)

    def gone(self, identity: bytes) -> None:
        """A connection has ended. The claims of its sink engines are dropped, and an open offer
        that no other engine wants is broken, unless the engine is heard again soon: it may have
        connected anew, and sends a Keep every ``keep_s`` for what it wants.
        """
        self._parked.gone(identity)
        for offer in self._live.values():
            offer.finders.pop(identity, None)
            for consumer in [c for c, last in offer.identities.items() if last == identity]:
                del offer.identities[consumer]
            for life in [life for life, last in offer.speakers.items() if last == identity]:
                del offer.speakers[life]
                grace_s = self._config.keep_s + self._config.peer_silent_s
                self._io.after(grace_s, self._left, offer, life)

    def _left(self, offer: GivenOffer, life: bytes) -> None:
        if life in offer.speakers or offer.state not in (OfferState.PENDING, OfferState.OPEN):
            return
        self._ledger.count("claims.left")
        self._step(offer, ClaimantLost(life))
        if offer.state is OfferState.OPEN and not (offer.speakers or offer.session.claimants):
            self._break(offer, Reason.PEER_LOST)

    def on_completion(self, transport: SendingSource, completion: SourceCompletion) -> None:
        stream = self._streams.get(completion.key)
        if isinstance(completion, Packed):
            if stream is None:
                transport.drop_packed(completion.key, completion.sequence)
            else:
                self._step(stream.offer, ChunkPacked(stream.consumer, completion.sequence))
            return
        if stream is None:
            return  # stopped after it was sent
        del self._streams[completion.key]
        if isinstance(completion, Sent):
            self._ledger.count(f"sent.nbytes.{transport.name}", completion.nbytes)
            self._complete(stream.offer, StreamSent(stream.consumer))
        else:
            if completion.reason is not None:
                self._ledger.count(f"send_stopped.{completion.reason.value}")
            self._step(stream.offer, StreamDrained(stream.consumer))

    def _find(self, ref: OfferRef) -> GivenOffer | Reason:
        if ref.incarnation != self._incarnation:
            return Reason.INCARNATION
        return self._live.get(ref.nonce) or self._over.get(ref.nonce) or Reason.UNKNOWN

    def _on_pull(self, identity: bytes, pull: Pull) -> None:
        offer = self._find(pull.offer)
        try:
            if isinstance(offer, Reason):
                is_early = offer is Reason.UNKNOWN and pull.grows is True
                if not (is_early and self._parked.park(pull.offer.nonce, identity, pull)):
                    self._refuse(identity, pull, offer, "")
                return
            asked = self._read(identity, offer, pull)
        except PullRefused as e:
            self._refuse(identity, pull, e.reason, str(e))
            return
        offer.identities[pull.consumer] = identity
        if offer.nonce in self._live:
            offer.asked[pull.consumer] = asked
        wire = Wire.DIRECT if asked.stream is None else Wire.STREAM
        claim = frozenset(pull.claim)
        self._step(offer, PullArrived(pull.consumer, claim, pull.digest, wire, asked.grows))
        if not self._hears(offer, pull.consumer, identity):
            # Only this Pull is refused: the next one of this rank may be another request's, and may
            # be right.
            offer.asked.pop(pull.consumer, None)

    def _read(self, identity: bytes, offer: GivenOffer, pull: Pull) -> Asked:
        """How a Pull will be served; worked out once for each consumer. Raises PullRefused."""
        consumer = pull.consumer
        if self._is_anothers(offer, consumer, identity):
            raise PullRefused(Reason.PLAN, "another connection reads in this name")
        first = offer.asked.get(consumer)
        if first is not None:
            if first.pull != pull:
                detail = "pull: expected the first one again, got another"
                raise PullRefused(Reason.PLAN, detail)
            return first
        asked = asked_of(pull, self._rank, self._transports)
        if offer.refuses(pull):
            return asked  # whatever it asks for
        return read_pull(asked, self._resolver, self._transports, offer.num_tokens)

    def _on_release(self, identity: bytes, release: Release) -> None:
        offer = self._find(release.offer)
        if isinstance(offer, Reason):
            self._ledger.count(f"verdict.{offer.value}")
            self._server.send(identity, Verdict(release.offer, release.consumer, False, offer))
            return
        if self._is_anothers(offer, release.consumer, identity):
            self._ledger.count("verdict.plan")
            verdict = Verdict(release.offer, release.consumer, False, Reason.PLAN)
            self._server.send(identity, verdict)
            return
        offer.identities[release.consumer] = identity
        self._complete(offer, ReleaseArrived(release.consumer))
        self._hears(offer, release.consumer, identity)

    def _is_anothers(self, offer: GivenOffer, consumer: Consumer, identity: bytes) -> bool:
        """Whether this consumer's Pull came over another connection, which stands. Else who has
        learnt the consumer's name could release the offer while it is read: blocks would be used
        again, and the reader's own Release be answered as valid.
        """
        return offer.nonce in self._live and offer.identities.get(consumer, identity) != identity

    def _hears(self, offer: GivenOffer, consumer: Consumer, identity: bytes) -> bool:
        """Note the time of a message of this consumer, if the offer serves it. Nothing is kept of
        other consumers: anybody who knows the nonce can invent them.
        """
        if offer.session.serves(consumer):
            offer.heard(consumer.incarnation, self._io.now())
            offer.speakers[consumer.incarnation] = identity
            return True
        del offer.identities[consumer]
        return False

    def _on_find(self, identity: bytes, find: Find) -> None:
        offer = self._by_name.get(find.request)
        if offer is None or offer.will_come_again:
            if not self._parked.park(find.request, identity, find):
                self._not_found(identity, find)
        elif offer.session.snapshot.digest not in (None, find.digest):
            self._answer(identity, find, Reason.TOKENS, "it has another prompt here")
        elif offer.nonce not in self._live:
            self._answer(
                identity, find, offer.session.snapshot.reason or Reason.ENDED, "it is over"
            )
        else:
            self._tell_found(identity, find, offer)
            if offer.state is OfferState.PENDING and len(offer.finders) < MAX_LIVES:
                offer.finders[identity] = find

    def _tell_found(self, identity: bytes, find: Find, offer: GivenOffer) -> None:
        ref, is_complete = OfferRef(offer.nonce, self._incarnation), offer.open_tokens == ALL
        found = Found(find.request, find.incarnation, ref, offer.num_tokens, is_complete)
        self._server.send(identity, found)

    def _answer(self, identity: bytes, find: Find, reason: Reason, detail: str) -> None:
        self._ledger.count(f"refused.{reason.value}")
        found = Found(find.request, find.incarnation, None, reason=reason, detail=detail)
        self._server.send(identity, found)

    def _not_found(self, identity: bytes, message: Early) -> None:
        """What an early message is about has not come in time, or there is no room to wait."""
        if isinstance(message, Find):
            wait_s = self._config.early_wait_s
            detail = f"expected its prefill request within {wait_s:g} s, got none"
            self._answer(identity, message, Reason.UNKNOWN, detail)
        elif isinstance(message, Pull):
            self._refuse(identity, message, Reason.UNKNOWN, "")

    def _on_cancel(self, identity: bytes, cancel: Cancel) -> None:
        offer = self._find(cancel.offer)
        if isinstance(offer, Reason):
            if offer is Reason.UNKNOWN and self._parked.forget_find(identity, cancel):
                return
            self._ledger.count(f"cancel.{offer.value}")
            if offer is Reason.UNKNOWN and cancel.offer.nonce in self._parked:
                self._parked.park(cancel.offer.nonce, identity, cancel)  # behind its Pull
            return
        if not knows_tokens(offer.session.snapshot, cancel.incarnation, cancel.digest):
            self._ledger.count("cancel.not_granted")
            return
        if offer.nonce in self._live:
            self._warn(offer, why_given_up(self._server.speaker(), cancel.reason))
        self._step(offer, CancelArrived(cancel.incarnation, cancel.reason, cancel.digest))

    def _on_keep(self, identity: bytes, ref: OfferRef, keep: Keep) -> None:
        offer = self._find(ref)
        if isinstance(offer, Reason):
            self._ledger.count(f"keep.{offer.value}")
        elif offer.nonce not in self._live:
            self._ledger.count("keep.ended")
        elif knows_tokens(
            offer.session.snapshot, keep.incarnation, keep.digests.get(ref.nonce, b"")
        ):
            offer.heard(keep.incarnation, self._io.now())
            before_s = offer.lease_until_s
            self._extend(offer, keep.lease_s)
            if offer.lease_until_s > before_s:
                self._ledger.count("leases.extended")
            if len(offer.speakers) < MAX_LIVES:
                offer.speakers[keep.incarnation] = identity
        else:
            self._ledger.count("keep.not_granted")

    def _refuse(self, identity: bytes, pull: Pull, reason: Reason, detail: str) -> None:
        self._ledger.count(f"refused.{reason.value}")
        self._server.send(identity, Refuse(pull.offer, pull.consumer, reason, detail))

    # -------------------------------------------------- event -> table -> actions -> perform

    def _step(self, offer: GivenOffer, event: SourceEvent) -> None:
        """Handle one event and its consequences. The outcome of an action goes through the table at
        once, and its actions come before those that are left, which may be void by then. An action
        that fails breaks the offer; the others are still performed.

        Raises ProtocolError for an event that the offer's state does not allow.
        """
        has_failed = False
        for due in events_due(offer.session.snapshot, event, self._ends.reason(offer.nonce)):
            todo = deque(self._actions(offer, due))
            while todo:
                action = todo.popleft()
                try:
                    outcome = self._perform(offer, action)
                    if outcome is not None:
                        todo.extendleft(reversed(self._actions(offer, outcome)))
                except Exception:  # noqa: BLE001  # the last action gives the blocks back
                    _log.exception("request %s: %s failed", offer.request_id, action)
                    self._ledger.count("offers.unforeseen")
                    has_failed = True
        if has_failed:
            self._break(offer, Reason.PLAN)

    def _actions(self, offer: GivenOffer, event: SourceEvent) -> list[SourceAction]:
        """The table's actions for an event. The board shows an open offer before any sink is told
        of it, and its end before any block of it is freed.
        """
        actions = offer.session.step(event)
        if offer.state is not OfferState.OPEN:
            self._ends.hide(offer.nonce)
        elif isinstance(event, ReadyCompleted):
            digest = offer.session.snapshot.digest
            posted = Posted(digest, offer.num_tokens, offer.block_ids)
            is_shown = self._ends.show(offer.nonce, posted)
            if is_shown is not None:
                self._ledger.count("board.posted" if is_shown else "board.full")
        return actions

    def _break(self, offer: GivenOffer, reason: Reason) -> None:
        """Break an offer in any state: no verdict on it is valid after this."""
        try:
            self._step(offer, Break(reason))
        except Exception:  # noqa: BLE001  # the others go on
            _log.exception("request %s: its offer cannot be broken", offer.request_id)
            self._ledger.count("offers.unforeseen")
            self._ends.hide(offer.nonce)
            if offer.state in (OfferState.PENDING, OfferState.OPEN):
                self._live.pop(offer.nonce, None)  # unknown from now on: no verdict is valid

    def _perform(self, offer: GivenOffer, action: SourceAction) -> SourceEvent | None:
        ref = OfferRef(offer.nonce, self._incarnation)
        match action:
            case SendGrant(consumer):
                asked = offer.asked.get(consumer)
                ids: GroupBlockIds = ()
                open_tokens = offer.open_tokens
                # Only consumers that read the pool themselves need ids
                if asked is not None and asked.stream is None and not asked.pull.is_null:
                    ids = self._open_ids(offer, open_tokens)
                told = UNSET if open_tokens == ALL else open_tokens
                self._tell(offer, consumer, Grant(ref, consumer, ids, offer.num_tokens, told))
                if asked is not None and not isinstance(asked.pull.verify, UnsetType):
                    self._check(offer, asked, asked.pull.verify)
            case SendRefuse(consumer, reason):
                self._ledger.count(f"refused.{reason.value}")
                detail = ""
                if reason is Reason.ENDED:
                    detail = f"the offer is over: {offer.session.snapshot.reason or 'read'}"
                self._tell(offer, consumer, Refuse(ref, consumer, reason, detail))
            case SendVerdict(consumer, valid, reason):
                self._ledger.count("verdict.valid" if reason is None else f"verdict.{reason.value}")
                check = offer.checks.get(consumer)
                digests = check.digests if valid and check is not None else None
                said = UNSET if digests is None else digests
                self._tell(offer, consumer, Verdict(ref, consumer, valid, reason, said))
            case SendBroken(consumer, reason):
                self._tell(offer, consumer, Broken(ref, reason, consumer))
            case StartStream(consumer):
                return self._start_stream(offer, consumer)
            case GrowStream(consumer):
                asked, open_tokens = offer.asked[consumer], offer.open_tokens
                if asked.key in self._streams:
                    ids = self._open_ids(offer, open_tokens)
                    check_open(asked, ids, open_tokens)
                    self._streams[asked.key].transport.grow_send(asked.key, ids, open_tokens)
            case StopStream(consumer):
                key = offer.asked[consumer].key
                if key not in self._streams:  # it has not started, and will not
                    return StreamDrained(consumer)
                self._streams[key].transport.stop_send(key)
            case SendChunk(consumer, sequence):
                key = offer.asked[consumer].key
                self._streams[key].transport.send_packed(key, sequence)
            case DropChunk(consumer, sequence):
                key = offer.asked[consumer].key
                self._streams[key].transport.drop_packed(key, sequence)
            case FinishedSending(reason):
                self._finish(offer, reason)
            case _:
                assert_never(action)
        return None

    def _tell(self, offer: GivenOffer, consumer: Consumer, message: ToSink) -> None:
        identity = offer.identities.get(consumer)
        if identity is not None:
            self._server.send(identity, message)

    def _start_stream(self, offer: GivenOffer, consumer: Consumer) -> SourceEvent | None:
        share = offer.session.snapshot.shares.get(consumer)
        if share is None or share.stream is not StreamState.RUNNING:
            return None  # an earlier stream of this claim failed to start, and took this one along
        asked = offer.asked[consumer]
        pull, key, transport = asked.pull, asked.key, asked.stream
        try:
            assert transport is not None
            open_tokens = offer.open_tokens
            block_ids = self._open_ids(offer, open_tokens)
            check_open(asked, block_ids, open_tokens)
            request = SendRequest(
                key=key,
                classes=pull.classes,
                sides=asked.sides,
                block_ids=block_ids,
                chunk_nbytes=pull.chunk_nbytes,
                open_tokens=open_tokens,
                part_tokens=pull.cut_tokens,
            )
            self._streams[key] = _Stream(offer, consumer, transport)
            transport.submit_send(request)
        except Exception as e:  # noqa: BLE001  # a stream that has not begun must be over
            if not isinstance(e, KvxferError | ValueError):
                _log.exception("request %s: a stream cannot start", offer.request_id)
            self._streams.pop(key, None)
            self._ledger.count("refused.plan")
            ref = OfferRef(offer.nonce, self._incarnation)
            self._tell(offer, consumer, Refuse(ref, consumer, Reason.PLAN, str(e)))
            return StreamDrained(consumer)
        return None

    # -------------------------------------------------- digests for sinks that verify

    def _check(self, offer: GivenOffer, asked: Asked, verify: Verify) -> None:
        """Begin to make the digests that a consumer's Pull asks for, beside its read, or the end of
        it: of what is complete.
        """
        consumer = asked.pull.consumer
        check = offer.checks.setdefault(consumer, Check())
        if check.is_begun or offer.state is OfferState.PENDING:
            return
        check.is_begun = True
        self._foresight.asked(verify, offer.num_tokens)
        foreseen = next((each for each in offer.foreseen if each.verify == verify), None)
        if foreseen is not None:
            foreseen.is_asked = True
            if foreseen.is_made:
                self._checked(offer, consumer, foreseen.digests)
            else:
                foreseen.waiting.append(consumer)
            return
        try:
            cells = given_cells(self._resolver, offer, verify)
        except (KvxferError, ValueError) as e:  # the sink gets no digests, and fails its load
            _log.error("request %s: its KV cannot be verified: %s", offer.request_id, e)
            self._checked(offer, consumer, None)
            return
        lane = ("digest", asked.key)
        self._verifier.submit(lane, cells, seed_of(offer.nonce), self._checked, offer, consumer)

    def _foresee(self, offer: GivenOffer) -> None:
        """Begin to make the digests of a complete offer that sinks will ask for."""
        if offer.asked:  # they have, and get them now
            return
        for number, verify in enumerate(self._foresight.expected(offer.num_tokens)):
            try:
                cells = given_cells(self._resolver, offer, verify)
            except (KvxferError, ValueError):  # not of this offer
                continue
            foreseen = Foreseen(verify)
            offer.foreseen.append(foreseen)
            lane, seed = ("digest", offer.nonce, number), seed_of(offer.nonce)
            self._verifier.submit(lane, cells, seed, self._on_foreseen, offer, foreseen)

    def _on_foreseen(self, offer: GivenOffer, foreseen: Foreseen, digests: Digests | None) -> None:
        if foreseen in offer.foreseen:
            if digests is not None:
                self._ends.show_digests(offer.nonce, foreseen.verify, digests)
            else:  # who asks later has them made anew
                offer.foreseen.remove(foreseen)
        foreseen.digests, foreseen.is_made = digests, True
        waiting, foreseen.waiting = foreseen.waiting, []
        for consumer in waiting:
            self._io.guard(self._checked, offer, consumer, digests)

    def _checked(self, offer: GivenOffer, consumer: Consumer, digests: Digests | None) -> None:
        check = offer.checks[consumer]
        check.digests, check.is_made = digests, True
        waiting, check.waiting = check.waiting, []
        for event in waiting:
            self._io.guard(self._complete, offer, event)

    def _complete(self, offer: GivenOffer, event: StreamSent | ReleaseArrived) -> None:
        """An event by which a consumer may be through: one that verifies is not before its digests
        are made, and its Release not before its stream.
        """
        check = offer.checks.get(event.consumer)
        if check is None:
            self._step(offer, event)
            return
        share = offer.session.snapshot.shares.get(event.consumer)
        is_sending = share is not None and share.stream is StreamState.RUNNING
        is_early = isinstance(event, ReleaseArrived) and is_sending
        if is_early or not check.is_made:
            if event not in check.waiting:
                check.waiting.append(event)
            check.waiting.sort(key=lambda each: isinstance(each, ReleaseArrived))
            return
        self._step(offer, event)
        if isinstance(event, StreamSent):
            waiting, check.waiting = check.waiting, []
            for each in waiting:
                self._complete(offer, each)

    # -------------------------------------------------- from opening to the end

    def _open_ready(self) -> None:
        """Open the offers whose events have completed; look at the others again soon."""
        waiting, self._opening = self._opening, []
        for each in waiting:
            self._io.guard(self._open_if_ready, *each)  # what fails must not stop the clock
        if self._opening:
            self._io.after(READY_POLL_S, self._open_ready)

    def _open_if_ready(self, offer: GivenOffer, open_tokens: int, is_ready: IsReady) -> None:
        try:
            if is_ready():
                self._open(offer, open_tokens)
            else:
                self._opening.append((offer, open_tokens, is_ready))
        except Exception:  # noqa: BLE001  # whatever an event raises is about this offer only
            self._break(offer, Reason.PLAN)
            _log.exception("request %s: its offer cannot open", offer.request_id)

    def _open(self, offer: GivenOffer, open_tokens: int) -> None:
        """Raises ValueError where blocks are missing."""
        if offer.state is not OfferState.PENDING:
            return
        if open_tokens < ALL:
            self._step(offer, Grown(open_tokens))
            return
        offer.block_ids = own_ids(offer.block_ids, self._keepings, offer.num_tokens)
        self._ledger.count("offers.opened")
        now_s = self._io.now()
        offer.opened_s, offer.lease_until_s = now_s, now_s + self._config.lease_s
        self._look_at(offer, offer.lease_until_s)  # from now on it ends, whatever fails
        self._foresee(offer)
        self._step(offer, ReadyCompleted())
        finders, offer.finders = offer.finders, {}
        for identity, find in finders.items():
            self._tell_found(identity, find, offer)
        self._look(offer)

    def _open_ids(self, offer: GivenOffer, open_tokens: int) -> GroupBlockIds:
        """The blocks of what is open. Raises ValueError where some are missing."""
        if open_tokens == ALL:
            return offer.block_ids
        return own_ids(offer.block_ids, self._keepings, open_tokens) if open_tokens else ()

    def _extend(self, offer: GivenOffer, lease_s: float) -> None:
        offer.extend(self._io.now(), min(lease_s, self._config.lease_s), self._config.max_hold_s)

    def _look_at(self, offer: GivenOffer, at_s: float) -> None:
        if offer.timer is not None:
            offer.timer.cancel()
        offer.timer = self._io.after(at_s - self._io.now(), self._look, offer)

    def _look(self, offer: GivenOffer) -> None:
        """Take what is due: claims of silent engines, a lease that is over."""
        now_s, lease_s = self._io.now(), self._config.lease_s
        self._look_at(offer, now_s + lease_s)  # first: a failure below must not stop the clock
        for event in offer.due(now_s, lease_s):
            is_claim = isinstance(event, ClaimantLost)
            self._ledger.count("claims.lost" if is_claim else "leases.lapsed")
            self._step(offer, event)
        if offer.state is OfferState.OPEN:
            self._look_at(offer, offer.next_due_s(now_s, lease_s))
        elif offer.timer is not None:
            offer.timer.cancel()

    def _finish(self, offer: GivenOffer, reason: Reason | None) -> None:
        """Report it if its blocks are kept; the session answers repeated messages."""
        if reason is Reason.EXPIRED:
            endpoint, lease_s = self._resolver.manifest.control_endpoint, self._config.lease_s
            was_wanted = bool(offer.identities or offer.speakers)
            self._warn(offer, why_lapsed(endpoint, lease_s, was_wanted=was_wanted))
        if offer.timer is not None:
            offer.timer.cancel()
        self._live.pop(offer.nonce, None)
        offer.block_ids = ()
        self.num_held_blocks -= offer.num_held_blocks
        offer.asked.clear()  # the session alone answers from now on
        foreseen, offer.foreseen = offer.foreseen, []
        for each in foreseen:
            self._ends.hide_digests(offer.nonce, each.verify)
            if not each.is_asked:
                self._foresight.missed(each.verify, offer.num_tokens)
        offer.speakers.clear()
        finders, offer.finders = offer.finders, {}
        self._over[offer.nonce] = offer
        while len(self._over) > REMEMBERED:
            _, forgotten = self._over.popitem(last=False)
            if self._by_name.get(forgotten.name) is forgotten:
                del self._by_name[forgotten.name]
        self._ledger.count("offers.done" if reason is None else "offers.broken")
        if reason is not None:
            self._ledger.reason(reason)
        if self._by_request.get(offer.request_id) is offer:
            del self._by_request[offer.request_id]
        for identity, find in finders.items():  # it has ended before it was complete
            self._io.guard(self._on_find, identity, find)
        try:
            if offer.is_delayed:
                self._ledger.sent(offer.request_id)
        finally:
            self._tell_drained()

    def _warn(self, offer: GivenOffer, why: str | None) -> None:
        if why is not None and self._is_front_door:
            line = self._untaken.note(self._io.now(), offer.request_id, why)
            if line is not None:
                _log.warning("%s", line)

    def _tell_drained(self) -> None:
        if self._on_drained is not None and not self._live:
            done, self._on_drained = self._on_drained, None
            done()
