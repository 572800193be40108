"""A sink's connection to one source rank: its sockets, its end of the pipe, and its slots."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import zmq

from kvxfer.config import Config
from kvxfer.errors import ProtocolError, TransportUnavailable
from kvxfer.transfer.manifest import RankManifest
from kvxfer.transports.channel import Bounds, Context, Dealer
from kvxfer.transports.guard import nearest_endpoint
from kvxfer.transports.native_peers import check_way, is_own_user, needs_own_user, refusal
from kvxfer.transports.parallel import thread_of_stream
from kvxfer.transports.pipe import Pipe, PipeBroken, Slots
from kvxfer.transports.stream_machine import Reads, SinkSlots
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
from kvxfer.transports.visitors import has_other_side

BEYOND_NBYTES = 1 << 20
"""What a source may have sent beyond its chunks: announcements have 100 bytes each."""

_log = logging.getLogger("kvxfer.transports")


@dataclass(frozen=True, slots=True)
class Terms:
    """What a sink asks for when it attaches. ``way``: of the pipe's."""

    slots: Slots
    way: str
    num_streams: int = 1
    is_trial: bool = False


class Link:
    """One connection, made in the background.

    ``control_endpoint``: of the source rank; ``endpoint``: its data endpoint; ``path``: what
    carries the announcements. ``dealers``: the first carries all messages, and chunks like the
    further ones; ``latest``: which has brought something last. ``jobs``: what unpacks a slot, by
    slot. ``num_unreadable``: messages; each may have cost a slot. ``untold``: slots whose
    credit was not taken: a source that stands still has a full queue, and may go on.

    Args:
        num_before: streams of the sink's other connections, so that these have other threads.

    Raises TransportUnavailable, and ValueError for a way that the pipe does not have.
    """

    def __init__(
        self,
        pipe: Pipe,
        terms: Terms,
        source: RankManifest,
        config: Config,
        context: Context,
        *,
        uses_unix_sockets: bool,
        num_before: int = 0,
    ) -> None:
        self.control_endpoint = source.control_endpoint
        self.endpoint = endpoint = data_endpoint_of(source, config, pipe.name)
        self.num_streams = terms.num_streams
        self._num_before = num_before
        self._further: Streams | None = None
        self.slots = slots = terms.slots
        self._pipe, self._only_own_user = pipe, needs_own_user(pipe, config)
        nearest = nearest_endpoint(endpoint) if uses_unix_sockets else endpoint
        _log.debug("%s: %s is reached by %s", pipe.name, endpoint, nearest)
        bounds = Bounds(FRAME_MAX_NBYTES, slots.nbytes + BEYOND_NBYTES, num_queued(config))
        self._connect_to = (context, config, bounds, nearest, source.curve_public_key)
        self.dealers: list[Dealer] = []
        try:
            self.latest = self.connect_stream()
        except zmq.ContextTerminated:  # the engine ends while a trial begins
            raise
        except zmq.ZMQError as exc:
            raise TransportUnavailable(
                f"{pipe.name}: {endpoint} cannot be connected to: {exc.strerror}"
            ) from exc
        self.dealers.append(self.latest)
        try:
            self.lane = pipe.open_sink(slots, terms.way)
        except BaseException:
            self.latest.close()
            raise
        self.path = self.lane.path("TCP" if nearest == endpoint else "a Unix socket")
        self.table = SinkSlots(slots.num_slots, slots.slot_nbytes)
        self.reads = Reads(self.table)
        self.jobs: dict[int, ChunkJob] = {}
        self.num_unreadable = 0
        self.untold: list[int] = []
        self.is_connected = self.is_lost = False
        sizes = (STREAM_VERSION, slots.num_slots, slots.slot_nbytes)
        self.send(Attach(*sizes, pipe.name, self.lane.address, terms.is_trial, terms.num_streams))

    def connect_stream(self) -> Dealer:
        """Never connected again by itself: a new connection is a new attach."""
        context, number = self._connect_to[0], self._num_before + len(self.dealers)
        thread = thread_of_stream(context, number) if self.num_streams > 1 else 0
        return Dealer(*self._connect_to, word=encode(Credit(())), reconnects=False, threads=thread)

    def add_streams(self, message: Streams) -> None:
        """Begin to join with further streams. Raises ProtocolError."""
        if self._further is not None:
            raise ProtocolError("streams: expected them once on a connection, got them again")
        self._further = message
        self.num_streams = max(1, min(message.num_streams, self.num_streams))
        self._join()

    def join_next(self) -> bool:
        """Join with the next stream, if there is to be one, once the latest stands: the source's
        ZeroMQ gives it a thread by how many connections each has, and has to know of that one.
        """
        if self._further is None or not self.dealers[-1].has_stood:
            return False
        return self._join()

    def _join(self) -> bool:
        if self._further is None or len(self.dealers) >= self.num_streams:
            return False
        try:
            self.dealers.append(self.connect_stream())
        except (zmq.ZMQError, TransportUnavailable) as exc:  # out of descriptors, say
            _log.debug("%s: no further stream: %s", self.endpoint, exc)
            self.num_streams = len(self.dealers)
            return False
        self.dealers[-1].send(encode(Join(self._further.token)))
        if len(self.dealers) == self.num_streams:
            _log.debug("%s: chunks come over %d streams", self.endpoint, self.num_streams)
        return True

    def drop_stream(self, dealer: Dealer) -> bool:
        """A stream has ended. False if chunks may have been on their way over it; else the
        connection goes on with those that it has.
        """
        if dealer is self.dealers[0] or dealer.has_stood:
            return False
        self.dealers.remove(dealer)
        dealer.close()
        self.num_streams = len(self.dealers)
        return True

    @property
    def is_spent(self) -> bool:
        """Whether so much was unreadable that no slot may be left; or anything, while ``attached``
        has not come: it may have been that, and then the source waits for an end that is not there.
        """
        return self.num_unreadable >= (self.slots.num_slots if self.is_connected else 1)

    def connect(self, message: Attached, frame: zmq.Frame | None) -> None:
        """``frame``: what ZeroMQ brought it in. Raises ProtocolError, PipeBroken: also where its
        sender has gone since, for who connects to a process that has died may leave a socket
        behind, as NIXL does.
        """
        if self.is_connected and len(self.dealers) > 1:
            return  # another stream was sooner
        if self.is_connected:
            raise ProtocolError("attached: expected one on a connection, got another")
        # Who listens may be another by now than who was looked for
        if self._only_own_user and not is_own_user(frame):
            raise PipeBroken(refusal("attached"))
        if frame is not None:
            fd = int(frame.get(zmq.SRCFD))
            if not has_other_side(fd):
                raise PipeBroken("attached: expected its sender, got the connection's end")
            if self._pipe.reads_peers:
                check_way(self._pipe.name, fd)
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
        last: a listener that is full ends the connection that was silent longest. False if they are
        not taken; they go along with the next. Raises PipeBroken.
        """
        self.untold += slots
        credit = encode(Credit(tuple(self.untold)))
        is_told = self.lane.tell(credit) or self.latest.send(credit)
        if is_told:
            self.untold.clear()
        return is_told

    def send(self, message: ToSource) -> bool:
        return self.dealers[0].send(encode(message))

    def close(self) -> None:
        if not self.is_lost:
            self.is_lost = True
            for dealer in self.dealers:
                dealer.close()
            self.close_lane()

    def close_lane(self) -> None:
        """Once nothing is unpacked from it any more."""
        if not self.jobs:
            self.lane.close()
