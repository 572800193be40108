"""The control messages, versions 1 to 3: msgspec tagged structs in msgpack. Never pickle.

Unknown fields are ignored, unknown tags refused. A golden file beside the tests guards the
encoding. ``docs/protocol.md`` explains who sends what when.

Identifiers and lists are bounded here, before they are built: a claim of 4 MiB took 0.25 s. Frames
are bounded by ``control_max_nbytes`` before they are decoded. Both sides look an offer up by its
whole :class:`OfferRef` (this offer in this life of the source). A sink takes only what
:func:`is_addressed_to` it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from functools import partial
from typing import Annotated, Final, TypeVar

import msgspec

from kvxfer.errors import ProtocolError
from kvxfer.transfer.chunks import CHUNK_TOKENS
from kvxfer.transfer.layout import Region
from kvxfer.transfer.manifest import MAX_RANKS, EngineManifest, RankId
from kvxfer.transfer.plan import PullClass

PROTOCOL_MIN: Final = 1
PROTOCOL_MAX: Final = 3
GROWING: Final = 2
"""The first version in which offers grow, and are found by their requests' ids."""
STATES: Final = 2
"""The first version in which regions may be states: an engine that has some speaks no earlier one.
"""
INTERLEAVES: Final = 3
"""The first version in which ranks may keep only some tokens: an engine where they do speaks no
earlier one.
"""
CELLS: Final = 3
"""The first version in which tokens may share a cell, likewise."""
BIND_TOKENS: Final = "bind_tokens"
"""The capability of an engine that compares digests of the token ids before it gives any KV."""
VERIFY: Final = "verify"
"""The capability of an engine that makes digests of the KV that it gives, for sinks that ask."""
PARTS: Final = "parts"
"""The capability of an engine that cuts streams as ``part_tokens`` of a Pull says."""
CAPABILITIES: Final = (VERIFY, PARTS)
"""Of every engine of this version; ``bind_tokens`` is a setting."""

# Incarnations and nonces are 16 random bytes. Up to 64 are taken, so that a later version can grow.
Id = Annotated[bytes, msgspec.Meta(min_length=1, max_length=64)]
Digest = Annotated[bytes, msgspec.Meta(max_length=64)]
Text = Annotated[str, msgspec.Meta(max_length=1024)]
MAX_EARLY: Final = 512
"""Messages of one connection that wait at a source for what they are about: as many requests wait
at a large decode engine.
"""
MAX_KEPT: Final = 4096
"""Offers in one Keep: about 360 KB."""
MAX_CLASSES: Final = 1024
"""In one Pull: each region of a model of 250 layers could be one of its own. Real ones are joined
to a few, one for each geometry and group; some took 3 ms each to be checked.
"""
Classes = Annotated[tuple[PullClass, ...], msgspec.Meta(max_length=MAX_CLASSES)]
Size = Annotated[int, msgspec.Meta(ge=0)]
PartTokens = Annotated[int, msgspec.Meta(ge=1, le=CHUNK_TOKENS)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86400)]


def first_protocol(regions: Iterable[Region]) -> int:
    """The first version that an engine with these regions speaks."""
    return max(map(_first_protocol, regions), default=PROTOCOL_MIN)


def _first_protocol(region: Region) -> int:
    if region.interleave:
        return INTERLEAVES
    if region.cell_tokens:
        return CELLS
    return STATES if region.is_state else PROTOCOL_MIN


class Reason(enum.StrEnum):
    """Why KV was not, or is no longer, given. Every one is counted under this name."""

    UNKNOWN = "unknown"  # this rank never heard of the nonce
    ENDED = "ended"  # the offer is over
    TOKENS = "tokens"  # the sink's tokens are not the offered ones
    INCARNATION = "incarnation"  # meant for another life of this engine
    PLAN = "plan"  # the sink asks for regions, heads or tokens that are not there
    TRANSPORT = "transport"  # the wire asked for is not served here
    EXPIRED = "expired"  # the lease ran out
    CANCELLED = "cancelled"  # the sink gave the request up
    PREEMPTED = "preempted"  # the source took the blocks back
    ABORTED = "aborted"  # the request was aborted at the source
    RESET = "reset"  # the source's cache was reset
    SHUTDOWN = "shutdown"  # the source is going away
    INCOMPATIBLE = "incompatible"  # the two engines cannot exchange KV
    PEER_LOST = "peer_lost"  # nothing heard any more
    DEADLINE = "deadline"  # no answer within pull_timeout_s
    READ_FAILED = "read_failed"  # the copy itself failed
    CORRUPT = "corrupt"  # the bytes that lie at the sink are not the source's
    NOT_ALLOWED = "not_allowed"  # the endpoint is not among allowed_peers
    BAD_PARAMS = "bad_params"  # kv_transfer_params could not be understood
    LOCAL_HIT = "local_hit"  # the sink needs nothing: all of it is cached


class OfferRef(msgspec.Struct, frozen=True, array_like=True):
    """Which offer: its nonce (16 bytes) and the source's incarnation."""

    nonce: Id
    incarnation: Id


class Consumer(msgspec.Struct, frozen=True, array_like=True):
    """Which sink rank, in which life of its engine."""

    incarnation: Id
    rank: RankId


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Sink to the source's front door, then to each rank that it will read."""

    protocol: tuple[int, int]
    capabilities: Annotated[tuple[Text, ...], msgspec.Meta(max_length=64)]
    engine_id: Text
    incarnation: Id


class Manifest(msgspec.Struct, frozen=True, tag="manifest"):
    """The answer to Hello. Of the front door: all ranks at once. Of another rank: that one alone,
    which confirms what the front door says of it.
    """

    manifest: EngineManifest


class NotReady(msgspec.Struct, frozen=True, tag="not_ready"):
    """The answer to Hello while the engine does not know all its ranks yet; ask again."""


class Verify(msgspec.Struct, frozen=True):
    """Make a digest of each region of these classes, over one token in ``every`` (see
    :mod:`kvxfer.tensors.kv_digest`). ``classes``: those of the Pull, on direct wires too.
    """

    every: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    classes: Classes


class Pull(msgspec.Struct, frozen=True, tag="pull", kw_only=True):
    """A sink rank asks one source rank for its share of an offer.

    ``claim``: every sink rank that will ask this source rank; the offer is done when all have
    released. ``digest``: over the offered tokens as the sink knows them. ``classes``: empty on
    direct wires and null routes. A repeated Pull is the same message and gets the same answer.
    ``part_tokens``: chunks are cut at so many tokens; unset: at CHUNK_TOKENS.
    ``verify``: the Verdict is to bring digests of the source's bytes; it is waited for on stream
    wires, too. ``grows`` (version 2): read what is open while the rest is computed; a nonce that is
    not known yet is waited for.
    """

    offer: OfferRef
    consumer: Consumer
    claim: Annotated[tuple[RankId, ...], msgspec.Meta(max_length=MAX_RANKS)]
    digest: Digest
    transport: Text
    is_null: bool = False
    classes: Classes = ()
    chunk_nbytes: Size = 0
    verify: Verify | msgspec.UnsetType = msgspec.UNSET
    grows: bool | msgspec.UnsetType = msgspec.UNSET
    part_tokens: PartTokens | msgspec.UnsetType = msgspec.UNSET

    @property
    def cut_tokens(self) -> int:
        given = self.part_tokens
        return CHUNK_TOKENS if isinstance(given, msgspec.UnsetType) else given


class Grant(msgspec.Struct, frozen=True, tag="grant"):
    """Go. ``block_ids`` by source group, positional, -1 where there is none; empty for streams.

    ``num_tokens``: how many were offered, whatever the sink was told; 0: not said. ``open_tokens``
    (version 2): those before it can be read, and the block ids are theirs. Another Grant says more,
    of all from the first token on. Unset: all that are offered.
    """

    offer: OfferRef
    consumer: Consumer
    block_ids: tuple[tuple[int, ...], ...]
    num_tokens: Size = 0
    open_tokens: Size | msgspec.UnsetType = msgspec.UNSET


class Refuse(msgspec.Struct, frozen=True, tag="refuse"):
    """No. Final for this consumer and offer."""

    offer: OfferRef
    consumer: Consumer
    reason: Reason
    detail: str = ""


class Release(msgspec.Struct, frozen=True, tag="release"):
    """The read is complete on the sink (direct wires, null routes, reads that are verified).
    Answered by a Verdict.

    A repeated Release is the same message and gets the same Verdict.
    """

    offer: OfferRef
    consumer: Consumer


class Verdict(msgspec.Struct, frozen=True, tag="verdict"):
    """Valid: the offer was open when the Release was processed; what was read is whole, fresh.

    ``digests``: where the Pull asked for them, of each region, the classes one after the other.
    """

    offer: OfferRef
    consumer: Consumer
    valid: bool
    reason: Reason | None = None
    digests: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET


class Cancel(msgspec.Struct, frozen=True, tag="cancel", omit_defaults=True):
    """A sink engine gives an offer up: aborted, failed, or nothing needed.

    Ends its claim, and the offer with the last claim. ``digest``: as in a Pull; without a claim a
    Cancel counts only with it.
    """

    offer: OfferRef
    incarnation: Id
    reason: Reason
    digest: Digest = b""


class Keep(msgspec.Struct, frozen=True, tag="keep", omit_defaults=True):
    """Extend the leases of these offers by a duration from now; a sign of life of the sink engine.

    One names many offers of a source rank, perhaps of more than one life of it: the receiver looks
    each one up by its whole reference. ``digests``: by nonce, as in a Pull; without
    a claim a Keep counts only with it.
    """

    offers: Annotated[tuple[OfferRef, ...], msgspec.Meta(max_length=MAX_KEPT)]
    incarnation: Id
    lease_s: Seconds
    digests: Annotated[dict[Id, Digest], msgspec.Meta(max_length=MAX_KEPT)] = {}


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """The source ended an offer, or this consumer's claim on it.

    ``consumer`` None: whoever of the receiving rank reads this offer.
    """

    offer: OfferRef
    reason: Reason
    consumer: Consumer | None = None


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Are you there? Sent when a peer that something waits for has been silent."""


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """Yes. ``incarnation``: whose life this is."""

    incarnation: Id


class Malformed(msgspec.Struct, frozen=True, tag="malformed"):
    """The answer to a frame that could not be understood; the connection stays up."""

    detail: str


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """From an operator to each rank: offer and load nothing new, serve what is open. Taken from a
    process of the rank's own user on its host, or with the rank's own CURVE key. Answered with
    Draining, however often it comes.
    """


class Draining(msgspec.Struct, frozen=True, tag="draining"):
    """The answer to Drain. ``num_open``: offers and loads that are not over. ``is_heard``: the
    scheduler knows, and its waiting requests are counted; it knows with the engine's next step.
    """

    num_open: Size
    is_heard: bool


class Find(msgspec.Struct, frozen=True, tag="find"):
    """From the front door of a sink to that of a source (version 2): which offer is the request's
    to which a router gave this id (16 random bytes)? ``digest``: of the whole prompt, as in a Pull.
    Answered with Found when the offer has its nonce, and again when it is complete.
    """

    request: Id
    incarnation: Id
    digest: Digest


class Found(msgspec.Struct, frozen=True, tag="found"):
    """The answer to Find. ``offer`` None: there is none, for this reason. ``is_complete``: all its
    tokens are open.
    """

    request: Id
    incarnation: Id
    offer: OfferRef | None
    num_tokens: Size = 0
    is_complete: bool = False
    reason: Reason | None = None
    detail: str = ""


ToSource = Hello | Pull | Release | Cancel | Keep | Ping | Drain | Find
ToSink = (
    Manifest | NotReady | Grant | Refuse | Verdict | Broken | Pong | Malformed | Draining | Found
)
_Union = TypeVar("_Union")

_encoder = msgspec.msgpack.Encoder()
_to_source: msgspec.msgpack.Decoder[ToSource] = msgspec.msgpack.Decoder(ToSource)
_to_sink: msgspec.msgpack.Decoder[ToSink] = msgspec.msgpack.Decoder(ToSink)


def encode(message: ToSource | ToSink) -> bytes:
    return _encoder.encode(message)


def _decode(decoder: msgspec.msgpack.Decoder[_Union], frame: bytes | memoryview) -> _Union:
    """Parse a frame. Raises ProtocolError with the path of what is wrong."""
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise ProtocolError(f"control frame: {e}") from e


decode_to_source = partial(_decode, _to_source)
decode_to_sink = partial(_decode, _to_sink)


def is_addressed_to(message: Grant | Refuse | Verdict | Broken, consumer: Consumer) -> bool:
    """Whether a source says this to this sink rank in this life of its engine.

    What was meant for an earlier life must not count for the one that follows: a late Verdict would
    be taken for the answer to another read. A Broken without a consumer is for everybody.
    """
    return message.consumer == consumer or (
        isinstance(message, Broken) and message.consumer is None
    )
