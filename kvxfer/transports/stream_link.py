"""A sink's connection to one source rank: its sockets, its end of the pipe, and its slots."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import zmq

from kvxfer.config import Config
from kvxfer.errors import ProtocolError, TransportUnavailable
from kvxfer.transfer.manifest import RankManifest
from kvxfer.transports.backlog import EVENT, WORD_S, Backlog
from kvxfer.transports.native_peers import is_own_user, needs_own_user, refusal
from kvxfer.transports.pipe import Pipe, PipeBroken, SinkLane, Slots
from kvxfer.transports.stream_machine import Reads, SinkSlot, SinkSlots
from kvxfer.transports.stream_packing import ChunkJob
from kvxfer.transports.stream_wire import (
    STREAM_VERSION,
    Attach,
    Attached,
    Context,
    Credit,
    Header,
    Socket,
    ToSource,
    data_endpoint_of,
    encode,
    make_dealer,
)
from kvxfer.transports.zmq_inbox import Inbox
from kvxfer.transports.zmq_listeners import secure_client
from kvxfer.transports.zmq_same_host import nearest_endpoint

# That it stands, and every way in which one that never reconnects can end, or fail to begin.
_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

BEYOND_NBYTES = 1 << 20
"""What a source may have sent beyond its chunks: announcements have 100 bytes each."""

_log = logging.getLogger("kvxfer.transports")


@dataclass(slots=True, eq=False)
class Link:
    """One connection. ``control_endpoint``: of the source rank; ``endpoint``: its data endpoint;
    ``path``: what carries the announcements. ``jobs``: what unpacks a slot, by slot.
    ``only_own_user``: see ``native_peers``.
    """

    control_endpoint: str
    endpoint: str
    path: str
    slots: Slots
    socket: Socket
    monitor: Socket
    lane: SinkLane
    only_own_user: bool
    jobs: dict[int, ChunkJob] = field(default_factory=dict)
    num_unreadable: int = 0
    is_connected: bool = False
    is_lost: bool = False
    table: SinkSlots = field(init=False)
    reads: Reads = field(init=False)
    _inbox: Inbox = field(init=False)
    _said_s: float = field(default_factory=time.monotonic)
    _backlog: Backlog = field(default_factory=lambda: Backlog(-1))

    def __post_init__(self) -> None:
        self.table = SinkSlots(self.slots.num_slots, self.slots.slot_nbytes)
        self.reads = Reads(self.table)
        self._inbox = Inbox(self.socket)

    def receive(self) -> Iterator[list[zmq.Frame]]:
        """Messages of the source: an announcement, and what a pipe sends along.

        Raises ProtocolError for one of many parts: the connection is of no use any more.
        """
        for frames in self._inbox.receive():
            self._backlog.note(frames)
            if frames[-1].more:
                raise ProtocolError("message: expected a few parts, got many")
            yield frames

    def has_ended(self) -> bool:
        """What the monitor has to say: that the connection stands, or that it has ended."""
        while self.monitor.poll(0):
            kind, value = EVENT.unpack(self.monitor.recv_multipart()[0])
            if kind != zmq.EVENT_CONNECTED:
                return True
            self._backlog = Backlog(value)
        return False

    def inspect(self) -> None:
        """Raises ProtocolError if more has come than the slots hold that was not read."""
        if time.monotonic() - self._said_s >= WORD_S:
            self.send(Credit(()))
        nbytes = self._backlog.look(was_empty=self._inbox.take_empty())
        if nbytes > self.slots.nbytes + BEYOND_NBYTES:
            raise ProtocolError(
                f"messages: expected at most {self.slots.nbytes} bytes of chunks, got {nbytes}"
            )

    @property
    def is_spent(self) -> bool:
        """Whether so many announcements could not be read that no slot may be left."""
        return self.num_unreadable >= self.slots.num_slots

    @property
    def is_awaiting(self) -> bool:
        """Whether a payload was announced and is not there yet."""
        return self.table.num[SinkSlot.AWAITED] > 0

    def connect(self, message: Attached, frame: zmq.Frame | None) -> None:
        """The source's end is open. ``frame``: what ZeroMQ brought it in. Raises ProtocolError,
        PipeBroken.
        """
        if self.is_connected:
            raise ProtocolError("attached: expected one on a connection, got another")
        # Who listens may be another by now than who was looked for
        if self.only_own_user and not is_own_user(frame):
            raise PipeBroken(refusal("attached"))
        self.lane.connected(message.address)
        self.is_connected = True

    def announce(self, header: Header, parts: Sequence[zmq.Frame]) -> None:
        """The pipe is told of a payload that will come, before the slots are. Raises ProtocolError,
        PipeBroken.
        """
        if not self.is_connected:
            raise ProtocolError("chunk: expected attached first")
        self.table.check(header)
        self.lane.announced(header.slot, header.generation, header.nbytes, parts)

    def give_back(self, slots: Sequence[int]) -> bool:
        """Credits, by the pipe if it carries messages. Raises PipeBroken."""
        credit = Credit(tuple(slots))
        return self.lane.tell(encode(credit)) or self.send(credit)

    def send(self, message: ToSource) -> bool:
        """By ZeroMQ. False if it does not take it; the monitor tells the rest."""
        self._said_s = time.monotonic()
        try:
            self.socket.send(encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as exc:
            _log.debug("data connection to %s takes nothing: %s", self.endpoint, exc)
            return False
        return True

    def close(self) -> None:
        """The connection ends now, the lane when nobody reads its slots any more."""
        if not self.is_lost:
            self.is_lost = True
            _close(self.socket, self.monitor)
            self.close_lane()

    def close_lane(self) -> None:
        """Once the link is lost and nobody reads its slots any more."""
        if self.is_lost and not self.jobs:
            self.lane.close()


def open_link(
    pipe: Pipe,
    slots: Slots,
    source: RankManifest,
    config: Config,
    context: Context,
    *,
    uses_unix_sockets: bool,
    is_trial: bool = False,
    way: str = "",
) -> Link:
    """Attach; the connection is made in the background. ``way``: of the pipe's.

    Raises TransportUnavailable, and ValueError for a way that the pipe does not have.
    """
    endpoint = data_endpoint_of(source, config, pipe.name)
    nearest = nearest_endpoint(endpoint) if uses_unix_sockets else endpoint
    _log.debug("%s: %s is reached by %s", pipe.name, endpoint, nearest)
    socket = make_dealer(context, config)
    try:
        socket.setsockopt(zmq.IPV6, int("[" in nearest))
        if nearest == endpoint:  # a Unix socket's ends know each other's user
            secure_client(socket, config, source.curve_public_key)
        monitor: Socket = socket.get_monitor_socket(_EVENTS)
    except BaseException:  # the engine ends while a trial begins
        socket.close(linger=0)
        raise
    try:
        socket.connect(nearest)
        lane = pipe.open_sink(slots, way)
    except zmq.ZMQError as exc:
        _close(socket, monitor)
        raise TransportUnavailable(
            f"{pipe.name}: {endpoint} cannot be connected to: {exc.strerror}"
        ) from exc
    except BaseException:
        _close(socket, monitor)
        raise
    link = Link(
        source.control_endpoint,
        endpoint,
        lane.path("TCP" if nearest == endpoint else "a Unix socket"),
        slots,
        socket,
        monitor,
        lane,
        only_own_user=needs_own_user(pipe, config),
    )
    sizes = (slots.num_slots, slots.slot_nbytes)
    link.send(Attach(STREAM_VERSION, *sizes, pipe.name, lane.address, is_trial))
    return link


def _close(socket: Socket, monitor: Socket) -> None:
    with contextlib.suppress(zmq.ZMQError):  # refused when the engine ends while a trial runs
        socket.disable_monitor()
    monitor.close(linger=0)
    socket.close(linger=0)
