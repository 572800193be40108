"""A sink's connection to one source rank: its sockets, and what each slot of its staging holds."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import zmq

from kvxfer.config import Config
from kvxfer.errors import ProtocolError, TransportUnavailable
from kvxfer.transfer.manifest import RankManifest
from kvxfer.transports.channel import MANY_PARTS, Bounds, Context, Dealer
from kvxfer.transports.guard import nearest_endpoint
from kvxfer.transports.native_peers import is_own_user, needs_own_user, refusal
from kvxfer.transports.pipe import Pipe, PipeBroken, SinkLane, Slots
from kvxfer.transports.stream_wire import (
    FRAME_MAX_NBYTES,
    STREAM_VERSION,
    Attach,
    Attached,
    Credit,
    Header,
    ToSource,
    data_endpoint_of,
    encode,
    num_queued,
)

BEYOND_NBYTES = 1 << 20
"""What a source may have sent beyond its chunks: announcements have 100 bytes each."""

T = TypeVar("T")
_log = logging.getLogger("kvxfer.transports")


@dataclass(slots=True, eq=False)
class Link(Generic[T]):
    """One connection. ``control_endpoint``: of the source rank; ``endpoint``: its data endpoint;
    ``path``: what carries the announcements.

    A slot is the source's, or announced (``awaited``: its payload is on the way, for whom), or
    being unpacked (``num_unpacking`` are), or dealt with: then its number is in ``credits`` until
    the source is told. ``generations``: how many chunks were announced in each slot.
    ``only_own_user``: see ``native_peers``.
    """

    control_endpoint: str
    endpoint: str
    path: str
    slots: Slots
    dealer: Dealer
    lane: SinkLane
    generations: list[int]
    only_own_user: bool
    held: set[int] = field(default_factory=set)
    awaited: dict[int, T] = field(default_factory=dict)
    credits: list[int] = field(default_factory=list)
    num_unpacking: int = 0
    num_unreadable: int = 0
    is_connected: bool = False
    is_lost: bool = False

    def receive(self) -> Iterator[list[zmq.Frame]]:
        """Messages of the source: an announcement, and what a pipe sends along.

        Raises ProtocolError for one of many parts: the connection is of no use any more.
        """
        for frames in self.dealer.receive():
            if frames[-1].more:
                raise ProtocolError(MANY_PARTS)
            yield frames

    @property
    def is_spent(self) -> bool:
        """Whether so many announcements could not be read that no slot may be left."""
        return self.num_unreadable >= self.slots.num_slots

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

    def is_repeated(self, header: Header) -> bool:
        """Whether this chunk was announced before."""
        in_range = 0 <= header.slot < self.slots.num_slots
        return in_range and 0 <= header.generation < self.generations[header.slot]

    def announce(self, header: Header, parts: Sequence[zmq.Frame], wanted: T) -> None:
        """The payload of a slot will come. Raises ProtocolError, PipeBroken."""
        slot, nbytes = header.slot, header.nbytes
        if not self.is_connected:
            raise ProtocolError("chunk: expected attached first")
        if not 0 <= slot < self.slots.num_slots or not 0 <= nbytes <= self.slots.slot_nbytes:
            raise ProtocolError(f"chunk: expected one that fits {self.slots}, got {header}")
        if slot in self.held or header.generation != self.generations[slot]:
            raise ProtocolError(
                f"chunk: expected generation {self.generations[slot]} of slot {slot} after its "
                f"credit, got {header.generation}"
            )
        self.lane.announced(slot, header.generation, nbytes, parts)
        self.generations[slot] += 1
        self.held.add(slot)
        self.awaited[slot] = wanted

    def free(self, slot: int) -> None:
        """A slot whose payload was there is the source's again. Raises PipeBroken."""
        if self.is_lost:
            return
        self.lane.free(slot)
        self.held.discard(slot)
        self.credits.append(slot)

    def take_credits(self) -> Credit | None:
        """In batches, because each credit wakes the source; but never the last ones late."""
        if not self.credits:
            return None
        if self.num_unpacking and len(self.credits) < max(1, self.slots.num_slots // 4):
            return None
        taken, self.credits = self.credits, []
        return Credit(tuple(taken))

    def give_back(self, credit: Credit) -> bool:
        """By the pipe, if it carries messages. Raises PipeBroken."""
        return self.lane.tell(encode(credit)) or self.send(credit)

    def send(self, message: ToSource) -> bool:
        """By ZeroMQ. False if it does not take it; the monitor tells the rest."""
        return self.dealer.send(encode(message))

    def close(self) -> None:
        """The connection ends now, the lane when nobody reads its slots any more."""
        if not self.is_lost:
            self.is_lost = True
            self.awaited.clear()
            self.dealer.close()
            self.close_lane()

    def close_lane(self) -> None:
        """Once the link is lost and nobody reads its slots any more."""
        if self.is_lost and not self.num_unpacking:
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
) -> Link[T]:
    """Attach; the connection is made in the background. ``way``: of the pipe's.

    Raises TransportUnavailable, and ValueError for a way that the pipe does not have.
    """
    endpoint = data_endpoint_of(source, config, pipe.name)
    nearest = nearest_endpoint(endpoint) if uses_unix_sockets else endpoint
    _log.debug("%s: %s is reached by %s", pipe.name, endpoint, nearest)
    bounds = Bounds(FRAME_MAX_NBYTES, slots.nbytes + BEYOND_NBYTES, num_queued(config))
    try:
        # Never connected again by itself: a new connection is a new attach
        dealer = Dealer(
            context,
            config,
            bounds,
            nearest,
            source.curve_public_key,
            word=encode(Credit(())),
            reconnects=False,
        )
    except zmq.ContextTerminated:  # the engine ends while a trial begins
        raise
    except zmq.ZMQError as exc:
        raise TransportUnavailable(
            f"{pipe.name}: {endpoint} cannot be connected to: {exc.strerror}"
        ) from exc
    try:
        lane = pipe.open_sink(slots, way)
    except BaseException:
        dealer.close()
        raise
    path = lane.path("TCP" if nearest == endpoint else "a Unix socket")
    generations = [0] * slots.num_slots
    link: Link[T] = Link(
        source.control_endpoint,
        endpoint,
        path,
        slots,
        dealer,
        lane,
        generations,
        only_own_user=needs_own_user(pipe, config),
    )
    sizes = (slots.num_slots, slots.slot_nbytes)
    link.send(Attach(STREAM_VERSION, *sizes, pipe.name, lane.address, is_trial))
    return link
