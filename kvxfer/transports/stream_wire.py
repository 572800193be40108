"""The stream wire: its messages and its sockets, whatever pipe carries the payload.

``stream_source`` and ``stream_sink`` are its two ends. Messages go over ZeroMQ, on TCP or a Unix
socket (credits and announcements over the pipe, where it carries them): one DEALER of the sink is
connected to one ROUTER of each source rank, or several where there are several *streams*: the first
carries all messages, and chunks come over whichever has the fewest on their way. Sink to source,
one frame each:

``Attach``    once, and first: how many slots the sink has, and how its end of the pipe is reached.
              All slots are granted with it
``Join``      first on a further stream
``Expect``    send the chunks of this read here; naming its nonce shows that the sink may have them
``Credit``    slots whose chunks it has dealt with
``AskTrial``  send that many bytes, to time the wire

Source to sink: ``Streams``: how many streams it may have; ``Attached``, before the first chunk: how
the source's end of the pipe is reached; a ``ChunkHeader`` (or ``TrialHeader``), which announces the
chunk that a slot holds, and the frames that the pipe sends along; ``Refused``, after which the sink
drops the connection; or, of earlier sources, an empty frame, answered with an empty Credit.

Slots belong to the connection: when it ends, what they hold is worth nothing any more.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar
from urllib.parse import urlsplit

import msgspec
import zmq

from kvxfer.config import Config
from kvxfer.errors import ProtocolError, TransportUnavailable
from kvxfer.transfer.costs import MOST_SLOTS
from kvxfer.transfer.manifest import RankManifest
from kvxfer.transports.base import Readable, TransferKey

STREAM_VERSION = 4
"""2 had all messages on ZeroMQ, 3 at most 512 tokens in a chunk."""
MAX_ADDRESS_NBYTES = 16 << 10
"""Of one end of a pipe: a few hundred bytes of UCX, a few thousand of NIXL."""
CONTROL_MAX_NBYTES = 20 << 10
"""The longest frame from a sink: an Attach with such an address; an Expect is about 80 bytes, a
Credit at most 3 for each slot.
"""
FRAME_MAX_NBYTES = 64 << 20
"""ZeroMQ closes a connection to a source that announces a larger frame, before it allocates it."""
MAX_SLOTS = 1024

T = TypeVar("T")

_Id = Annotated[bytes, msgspec.Meta(min_length=1, max_length=64)]
_RankText = Annotated[str, msgspec.Meta(max_length=32)]
_PipeName = Annotated[str, msgspec.Meta(max_length=32)]
_Address = Annotated[bytes, msgspec.Meta(max_length=MAX_ADDRESS_NBYTES)]


def _check_address(message: Attach | Attached) -> None:
    """Fill in the sum, or compare it: libraries take addresses unchecked. UCX may end the process
    at one that is damaged, and NIXL 1.5 keeps half of it, and takes no other of that agent.
    """
    crc32 = zlib.crc32(message.address)
    if message.address_crc32 is None:  # earlier peers say none
        msgspec.structs.force_setattr(message, "address_crc32", crc32)
    elif message.address_crc32 != crc32:
        raise ValueError(
            f"address: expected bytes with the CRC-32 {message.address_crc32:#x}, got {crc32:#x}; "
            "they were damaged on their way"
        )


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """First on a connection, and only once. Version 1 had the first two fields."""

    version: int
    num_slots: int
    slot_nbytes: int = 0
    pipe: _PipeName = ""
    address: _Address = b""
    is_trial: bool = False
    """The connection is there to be measured, with slots of its own size, and carries no chunks."""
    num_streams: int = 1
    """Over so many of them the sink would take chunks, itself included; see ``Streams``."""
    address_crc32: int | None = None

    def __post_init__(self) -> None:
        _check_address(self)


class Join(msgspec.Struct, frozen=True, tag="join"):
    """First on a further stream of an attached connection, which its token names."""

    token: _Id


class Expect(msgspec.Struct, frozen=True, tag="expect"):
    """The chunks of (nonce, incarnation, rank) are wanted over this connection."""

    nonce: _Id
    incarnation: _Id
    rank: _RankText


class Credit(msgspec.Struct, frozen=True, tag="credit"):
    """Slots whose announced chunks lie in place or were dropped: they are the source's again."""

    slots: tuple[int, ...]


class AskTrial(msgspec.Struct, frozen=True, tag="trial"):
    """Answer with the bytes of ``trial_rows(nbytes)``: one of the sizes of a trial."""

    nbytes: int


class Streams(msgspec.Struct, frozen=True, tag="streams"):
    """The answer to an Attach that asks for several streams, if it may have more than one: chunks
    also come over further connections that join with the token.
    """

    token: _Id
    num_streams: int


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """The source's end of the pipe is open. First on each stream: they do not wait for another."""

    address: _Address
    address_crc32: int | None = None

    def __post_init__(self) -> None:
        _check_address(self)


class ChunkHeader(msgspec.Struct, frozen=True, tag="chunk"):
    """The ``generation``-th chunk of a slot is chunk ``sequence`` of a transfer."""

    nonce: bytes
    incarnation: bytes
    sink_rank: str
    source_rank: str
    sequence: int
    nbytes: int
    slot: int
    generation: int

    @property
    def key(self) -> TransferKey:
        return TransferKey(self.nonce, self.incarnation, self.sink_rank, self.source_rank)


class TrialHeader(msgspec.Struct, frozen=True, tag="trial"):
    """The ``generation``-th chunk of a slot is a trial's."""

    nbytes: int
    slot: int
    generation: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The source does not know this connection (any more), or does not serve it: drop it."""

    detail: str


ToSource = Attach | Join | Expect | Credit | AskTrial
Header = ChunkHeader | TrialHeader
ToSink = Streams | Attached | ChunkHeader | TrialHeader | Refused

encode: Callable[[ToSource | ToSink], bytes] = msgspec.msgpack.Encoder().encode


def _decoder(what: str, decoder: msgspec.msgpack.Decoder[T]) -> Callable[[memoryview], T]:
    def decode(frame: memoryview) -> T:
        if len(frame) > CONTROL_MAX_NBYTES:
            raise ProtocolError(
                f"{what}: expected at most {CONTROL_MAX_NBYTES} bytes, got {len(frame)}"
            )
        try:
            return decoder.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise ProtocolError(f"{what}: {exc}") from exc

    return decode


decode_to_source: Callable[[memoryview], ToSource]
decode_to_source = _decoder("data frame", msgspec.msgpack.Decoder(ToSource))
"""Parse a frame that a sink sent. Raises ProtocolError."""
decode_to_sink: Callable[[memoryview], ToSink]
decode_to_sink = _decoder("header", msgspec.msgpack.Decoder(ToSink))
"""Parse a header that a source sent. Raises ProtocolError."""


def decode_credit(frame: memoryview) -> Credit:
    """What a pipe carries to a source. Raises ProtocolError."""
    message = decode_to_source(frame)
    if not isinstance(message, Credit):
        raise ProtocolError(f"data frame: expected a credit, got {type(message).__name__}")
    return message


def make_poller(sockets: Sequence[Readable]) -> zmq.Poller:
    poller = zmq.Poller()
    for socket in sockets:
        poller.register(socket, zmq.POLLIN)
    return poller


def data_endpoint_of(source: RankManifest, config: Config, name: str) -> str:
    """Where to connect to for the wire of that name.

    Raises TransportUnavailable when there is nowhere, or the peer is not allowed.
    """
    endpoint = source.data_endpoints.get(name)
    if endpoint is None:
        others = " and ".join(sorted(source.data_endpoints)) or "no stream wire"
        ports = ", and give its data_port 0 or a range" if name == "tcp" else ""
        raise TransportUnavailable(
            f"{name}: expected a source that offers it, got {source.control_endpoint} with "
            f"{others}; to have it, set transport {name} there too{ports}"
        )
    url = urlsplit(endpoint)
    if url.scheme != "tcp" or not url.hostname or not config.peer_allowed(url.hostname):
        raise TransportUnavailable(
            f"{name}: expected tcp://HOST:PORT of an allowed peer, got {endpoint!r}; "
            "see allowed_peers"
        )
    return endpoint


def num_queued(config: Config) -> int:
    """Messages to one peer that may wait: room beyond every credit."""
    return 2 * (config.staging_slots or MOST_SLOTS) + 64
