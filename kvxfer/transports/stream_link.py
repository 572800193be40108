"""A sink's connection to one source rank: its sockets, its end of the pipe, and its slots."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import zmq

from kvxfer.config import Config
from kvxfer.errors import ProtocolError, TransportUnavailable
from kvxfer.transfer.manifest import RankManifest
from kvxfer.transports.channel import MANY_PARTS, Bounds, Context, Dealer
from kvxfer.transports.guard import nearest_endpoint
from kvxfer.transports.native_peers import is_own_user, needs_own_user, refusal
from kvxfer.transports.pipe import Pipe, PipeBroken, SinkLane, Slots
from kvxfer.transports.stream_machine import Reads, SinkSlot, SinkSlots
from kvxfer.transports.stream_packing import ChunkJob
from kvxfer.transports.stream_wire import (
    FRAME_MAX_NBYTES,
    STREAM_VERSION,
    Attach,
    Attached,
    Credit,
    Header,
    Join,
    Streams,
    ToSource,
    data_endpoint_of,
    encode,
    num_queued,
)

BEYOND_NBYTES = 1 << 20
"""What a source may have sent beyond its chunks: announcements have 100 bytes each."""

_log = logging.getLogger("kvxfer.transports")


@dataclass(slots=True, eq=False)
class Link:
    """One connection. ``control_endpoint``: of the source rank; ``endpoint``: its data endpoint;
    ``path``: what carries the announcements. ``jobs``: what unpacks a slot, by slot.
    ``only_own_user``: see ``native_peers``. ``dealer`` carries all messages, and chunks like the
    ``further`` ones, which ``connect_stream`` makes; ``num_streams`` were asked for.
    """

    control_endpoint: str
    endpoint: str
    path: str
    slots: Slots
    dealer: Dealer
    lane: SinkLane
    only_own_user: bool
    connect_stream: Callable[[], Dealer]
    num_streams: int = 1
    further: list[Dealer] = field(default_factory=list)
    latest: Dealer = field(init=False)
    jobs: dict[int, ChunkJob] = field(default_factory=dict)
    num_unreadable: int = 0
    is_connected: bool = False
    is_lost: bool = False
    table: SinkSlots = field(init=False)
    reads: Reads = field(init=False)

    def __post_init__(self) -> None:
        self.table = SinkSlots(self.slots.num_slots, self.slots.slot_nbytes)
        self.reads = Reads(self.table)
        self.latest = self.dealer

    @property
    def dealers(self) -> tuple[Dealer, ...]:
        return (self.dealer, *self.further)

    def add_streams(self, message: Streams) -> None:
        """Join with further streams. Raises ProtocolError."""
        if self.further:
            raise ProtocolError("streams: expected them once on a connection, got them again")
        try:
            for _ in range(1, min(message.num_streams, self.num_streams)):
                self.further.append(self.connect_stream())
                self.further[-1].send(encode(Join(message.token)))
        except (zmq.ZMQError, TransportUnavailable) as exc:  # out of descriptors, say
            _log.debug("%s: no further stream: %s", self.endpoint, exc)
        _log.debug("%s: chunks come over %d streams", self.endpoint, len(self.dealers))

    def drop_stream(self, dealer: Dealer) -> bool:
        """A stream has ended. False if chunks may have been on their way over it."""
        if dealer is self.dealer or dealer.has_stood:
            return False
        self.further.remove(dealer)
        dealer.close()
        return True

    def receive(self, dealer: Dealer) -> Iterator[list[zmq.Frame]]:
        """Messages of the source over one stream: each an announcement and the frames that its pipe
        sends along.

        Raises ProtocolError for one of many parts: the connection is of no use any more.
        """
        for frames in dealer.receive():
            self.latest = dealer
            if frames[-1].more:
                raise ProtocolError(MANY_PARTS)
            yield frames

    @property
    def is_spent(self) -> bool:
        """Whether so many announcements were unreadable that no slot may be left."""
        return self.num_unreadable >= self.slots.num_slots

    @property
    def is_awaiting(self) -> bool:
        return self.table.num[SinkSlot.AWAITED] > 0

    def connect(self, message: Attached, frame: zmq.Frame | None) -> None:
        """``frame``: what ZeroMQ brought it in. Raises ProtocolError, PipeBroken."""
        if self.is_connected and self.further:
            return  # another stream was sooner
        if self.is_connected:
            raise ProtocolError("attached: expected one on a connection, got another")
        # Who listens may be another by now than who was looked for
        if self.only_own_user and not is_own_user(frame):
            raise PipeBroken(refusal("attached"))
        self.lane.connected(message.address)
        self.is_connected = True

    def announce(self, header: Header, parts: Sequence[zmq.Frame]) -> None:
        """The pipe hears of it before the slots do. Raises ProtocolError, PipeBroken."""
        if not self.is_connected:
            raise ProtocolError("chunk: expected attached first")
        self.table.check(header)
        self.lane.announced(header.slot, header.generation, header.nbytes, parts)

    def give_back(self, slots: Sequence[int]) -> bool:
        """Credits, by the pipe if it carries messages; else over the stream that brought something
        last: a listener that is full ends the connection that was silent longest. Raises
        PipeBroken.
        """
        credit = encode(Credit(tuple(slots)))
        return self.lane.tell(credit) or self.latest.send(credit)

    def send(self, message: ToSource) -> bool:
        return self.dealer.send(encode(message))

    def close(self) -> None:
        if not self.is_lost:
            self.is_lost = True
            for dealer in self.dealers:
                dealer.close()
            self.close_lane()

    def close_lane(self) -> None:
        if self.is_lost and not self.jobs:
            self.lane.close()


@dataclass(frozen=True, slots=True)
class Terms:
    """What a sink asks for when it attaches. ``way``: of the pipe's."""

    slots: Slots
    way: str
    num_streams: int = 1
    is_trial: bool = False


def open_link(
    pipe: Pipe,
    terms: Terms,
    source: RankManifest,
    config: Config,
    context: Context,
    *,
    uses_unix_sockets: bool,
) -> Link:
    """Attach; the connection is made in the background.

    Raises TransportUnavailable, and ValueError for a way that the pipe does not have.
    """
    endpoint = data_endpoint_of(source, config, pipe.name)
    slots, num_streams = terms.slots, terms.num_streams
    nearest = nearest_endpoint(endpoint) if uses_unix_sockets else endpoint
    _log.debug("%s: %s is reached by %s", pipe.name, endpoint, nearest)
    bounds = Bounds(FRAME_MAX_NBYTES, slots.nbytes + BEYOND_NBYTES, num_queued(config))
    # Never connected again by itself: a new connection is a new attach
    connect = partial(
        Dealer,
        context,
        config,
        bounds,
        nearest,
        source.curve_public_key,
        word=encode(Credit(())),
        reconnects=False,
    )
    try:
        dealer = connect()
    except zmq.ContextTerminated:  # the engine ends while a trial begins
        raise
    except zmq.ZMQError as exc:
        raise TransportUnavailable(
            f"{pipe.name}: {endpoint} cannot be connected to: {exc.strerror}"
        ) from exc
    try:
        lane = pipe.open_sink(slots, terms.way)
    except BaseException:
        dealer.close()
        raise
    link = Link(
        source.control_endpoint,
        endpoint,
        lane.path("TCP" if nearest == endpoint else "a Unix socket"),
        slots,
        dealer,
        lane,
        only_own_user=needs_own_user(pipe, config),
        connect_stream=connect,
        num_streams=num_streams,
    )
    sizes = (slots.num_slots, slots.slot_nbytes)
    link.send(Attach(STREAM_VERSION, *sizes, pipe.name, lane.address, terms.is_trial, num_streams))
    return link
