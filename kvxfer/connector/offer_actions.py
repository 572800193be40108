"""Performing what the session of an offer says: answers, streams, reports. On the IO thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import assert_never

from kvxfer.connector.given_offer import GivenOffer, StepOffer
from kvxfer.connector.ledger import Ledger
from kvxfer.connector.records import GroupBlockIds
from kvxfer.connector.requests import checked_sides, clip_ids
from kvxfer.errors import KvxferError
from kvxfer.transfer.offer import StreamState
from kvxfer.transfer.pull import PullResolver
from kvxfer.transfer.session import (
    ChunkPacked,
    DropChunk,
    FinishedSending,
    SendBroken,
    SendChunk,
    SendGrant,
    SendRefuse,
    SendVerdict,
    SourceAction,
    StartStream,
    StopStream,
    StreamDrained,
    StreamSent,
)
from kvxfer.transfer.windows import group_keepings
from kvxfer.transfer.wire import (
    Broken,
    Consumer,
    Grant,
    OfferRef,
    Reason,
    Refuse,
    ToSink,
    Verdict,
)
from kvxfer.transports.base import (
    Packed,
    SendRequest,
    Sent,
    SourceCompletion,
    SourceTransport,
    TransferKey,
)

Reply = Callable[[bytes, ToSink], None]

_log = logging.getLogger("kvxfer.connector")


@dataclass(frozen=True, slots=True)
class _Send:
    """A stream that has begun and not ended: whose it is, and on which wire."""

    offer: GivenOffer
    consumer: Consumer
    transport: SourceTransport


class OfferActions:
    """Performs actions with the sockets and wires of one rank.

    Args:
        step: gives an event to an offer's session.
        finish: called when an offer is over and drained, with the reason if it was broken.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        incarnation: bytes,
        resolver: PullResolver,
        transports: Mapping[str, SourceTransport],
        reply: Reply,
        step: StepOffer,
        finish: Callable[[GivenOffer, Reason | None], None],
    ) -> None:
        self._ledger = ledger
        self._incarnation = incarnation
        self._resolver = resolver
        self._transports = transports
        self._reply = reply
        self._step = step
        self._finish = finish
        self._keepings = group_keepings(resolver.manifest.regions)
        self._sends: dict[TransferKey, _Send] = {}

    def perform(self, offer: GivenOffer, action: SourceAction) -> None:
        """One action."""
        ref = self._ref(offer)
        match action:
            case SendGrant(consumer):
                ids = self._granted_ids(offer, consumer)
                self._tell(offer, consumer, Grant(ref, consumer, ids, offer.num_tokens))
            case SendRefuse(consumer, reason):
                self._ledger.count(f"refused.{reason.value}")
                detail = ""
                if reason is Reason.ENDED:
                    detail = f"the offer is over: {offer.session.reason or 'read'}"
                self._tell(offer, consumer, Refuse(ref, consumer, reason, detail))
            case SendVerdict(consumer, valid, reason):
                self._ledger.count("verdict.valid" if reason is None else f"verdict.{reason.value}")
                self._tell(offer, consumer, Verdict(ref, consumer, valid, reason))
            case SendBroken(consumer, reason):
                self._tell(offer, consumer, Broken(ref, reason, consumer))
            case StartStream(consumer):
                self._start_stream(offer, consumer)
            case StopStream(consumer):
                self._stop_stream(offer, consumer)
            case SendChunk(consumer, sequence):
                key = self._key(offer, consumer)
                self._sends[key].transport.send_packed(key, sequence)
            case DropChunk(consumer, sequence):
                key = self._key(offer, consumer)
                self._sends[key].transport.drop_packed(key, sequence)
            case FinishedSending(reason):
                self._finish(offer, reason)
            case _:
                assert_never(action)

    def on_completion(self, transport: SourceTransport, completion: SourceCompletion) -> None:
        """A chunk was packed, a stream was sent or has stopped."""
        send = self._sends.get(completion.key)
        if isinstance(completion, Packed):
            if send is None:
                transport.drop_packed(completion.key, completion.sequence)
            else:
                self._step(send.offer, ChunkPacked(send.consumer, completion.sequence))
            return
        if send is None:
            return  # stopped after it was sent
        del self._sends[completion.key]
        if isinstance(completion, Sent):
            self._ledger.count("sent.nbytes", completion.nbytes)
            self._step(send.offer, StreamSent(send.consumer))
        else:
            if completion.reason is not None:
                self._ledger.count(f"send_stopped.{completion.reason.value}")
            self._step(send.offer, StreamDrained(send.consumer))

    def _ref(self, offer: GivenOffer) -> OfferRef:
        return OfferRef(offer.nonce, self._incarnation)

    def _tell(self, offer: GivenOffer, consumer: Consumer, message: ToSink) -> None:
        identity = offer.identities.get(consumer)
        if identity is not None:
            self._reply(identity, message)

    def _granted_ids(self, offer: GivenOffer, consumer: Consumer) -> GroupBlockIds:
        """Ids go to those who read the pool themselves: of the offered tokens, as far as they are
        kept.
        """
        asked = offer.pulls.get(consumer)
        if asked is None or asked.pull.is_null:
            return ()
        if self._transports[asked.pull.transport].is_stream:
            return ()
        return clip_ids(offer.block_ids, self._keepings, offer.num_tokens)

    def _start_stream(self, offer: GivenOffer, consumer: Consumer) -> None:
        share = offer.session.snapshot.shares.get(consumer)
        if share is None or share.stream is not StreamState.RUNNING:
            return  # an earlier stream of this claim failed to start, and took this one along
        key = self._key(offer, consumer)
        try:
            pull = offer.pulls[consumer].pull
            transport = self._transports[pull.transport]
            request = SendRequest(
                key=key,
                classes=pull.classes,
                sides=checked_sides(self._resolver, pull, offer.block_ids),
                block_ids=offer.block_ids,
                chunk_nbytes=pull.chunk_nbytes,
            )
            self._sends[key] = _Send(offer, consumer, transport)
            transport.submit_send(request)
        except Exception as e:  # noqa: BLE001  # a stream that has not begun must be over
            if not isinstance(e, KvxferError | ValueError):
                _log.exception("request %s: a stream cannot start", offer.request_id)
            self._sends.pop(key, None)
            self._ledger.count("refused.plan")
            refusal = Refuse(self._ref(offer), consumer, Reason.PLAN, str(e))
            self._tell(offer, consumer, refusal)
            self._step(offer, StreamDrained(consumer))

    def _stop_stream(self, offer: GivenOffer, consumer: Consumer) -> None:
        key = self._key(offer, consumer)
        send = self._sends.get(key)
        if send is None:  # it has not started, and will not
            self._step(offer, StreamDrained(consumer))
        else:
            send.transport.stop_send(key)

    def _key(self, offer: GivenOffer, consumer: Consumer) -> TransferKey:
        return TransferKey(
            offer.nonce, consumer.incarnation, str(consumer.rank), str(self._resolver.manifest.rank)
        )
