"""The sinks that are connected to a source, and what each may ask of it.

Anybody can connect, so everything here is bounded. A connection gets the chunks of a transfer only
if it has named the nonce, which goes over the control channel, to sinks that may read the offer.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from operator import attrgetter

from kvxfer.config import Config
from kvxfer.errors import ProtocolError
from kvxfer.transfer.costs import LEAST_SLOTS, MOST_SLOTS
from kvxfer.transports.parallel import most_further, num_streams
from kvxfer.transports.pipe import MOST_TRIAL_SLOTS, Parts, Pipe, Slots, SourceLane, trial_slots
from kvxfer.transports.stream_machine import Sends, SourceSlot, SourceSlots
from kvxfer.transports.stream_packing import ChunkJob
from kvxfer.transports.stream_wire import (
    FRAME_MAX_NBYTES,
    MAX_SLOTS,
    STREAM_VERSION,
    Attach,
    Header,
)

MAX_CONNECTIONS = 1024
"""Sinks attached at once; one more takes the place of the oldest that has no transfer."""
MAX_STAGING_NBYTES = 4 << 30
"""Staging for all of them; it is taken when a connection has its first transfer or trial. One that
needs more takes the places of others as above.
"""
MAX_TRIAL_NBYTES = 512 << 20
"""Staging for trials, of that: one has 8 MiB (64 between GPUs), and takes milliseconds. One that
needs more takes the place of the trial that has waited longest for a credit.
"""
TRIAL_S = 30.0
"""After which a trial is over: a sink gives one up after 7 s at most."""
MAX_EXPECTED = 512
"""Reads that one connection has announced and that have not ended; about 0.5 KB each."""
MAX_TRIALS = 32
"""Messages of a trial for one connection: a sink makes one of its own for each trial, which takes
at most 12.
"""
TOKEN_NBYTES = 16

ReadName = tuple[bytes, bytes, str]
"""(nonce, incarnation, rank): which read, of whom."""


@dataclass(slots=True, eq=False)
class Connection:
    """One DEALER of a sink, and the slots of its staging. ``is_trial``: it carries no transfers.

    ``leaving``: what the pipe still sends, by slot; ``jobs``: what packs a slot. ``trial_slots``:
    bytes of the trial's pattern that a slot still holds. ``is_lost``: nothing more is sent to it.
    ``streams``: its identity, and those of the further streams that have joined by its ``token``,
    ``num_streams`` in all at most.
    ``attached_s``, ``moved_s``: when it attached, and since when it owes a credit (monotonic).
    """

    identity: bytes
    slots: Slots
    address: bytes = b""
    is_trial: bool = False
    num_streams: int = 1
    token: bytes = b""
    streams: list[bytes] = field(default_factory=list)
    lane: SourceLane | None = None
    table: SourceSlots = field(init=False)
    sends: Sends = field(init=False)
    jobs: dict[int, ChunkJob] = field(default_factory=dict)
    leaving: dict[int, tuple[Header, Parts]] = field(default_factory=dict)
    expected: dict[ReadName, None] = field(default_factory=dict)
    trial_slots: dict[int, int] = field(default_factory=dict)
    num_trials: int = 0
    is_lost: bool = False
    attached_s: float = field(default_factory=time.monotonic)
    moved_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.table = SourceSlots(self.slots.num_slots)
        self.sends = Sends(self.table)
        self.streams.append(self.identity)

    def identity_for(self, slot: int) -> bytes:
        return self.streams[self.table.stream_of[slot]]

    @property
    def is_idle(self) -> bool:
        return self.table.is_idle and not len(self.sends)

    def close_lane(self) -> None:
        """Once nothing is packed into it any more."""
        if self.lane is not None and not self.table.num[SourceSlot.FILLING]:
            self.lane.close()
            self.lane = None


class Connections:
    """The attached connections, and the reads of each: a read belongs to the connection that named
    it.
    """

    def __init__(self) -> None:
        self._all: dict[Connection, None] = {}
        self._by_stream: dict[bytes, Connection] = {}
        """By the identity of each stream that has joined, the first included."""
        self._by_token: dict[bytes, Connection] = {}
        self._by_read: dict[ReadName, Connection] = {}

    def __len__(self) -> int:
        return len(self._all)

    def all(self) -> list[Connection]:
        """Every attached connection, the oldest first."""
        return list(self._all)

    def get(self, identity: bytes) -> Connection | None:
        """The attached connection of which a stream has that name."""
        return self._by_stream.get(identity)

    def of_read(self, name: ReadName) -> Connection | None:
        return self._by_read.get(name)

    def with_staging(self, *, of_trials: bool = False) -> list[Connection]:
        """The longest-waiting first; ``of_trials``: those of trials only."""
        having = [each for each in self._all if each.lane is not None]
        found = [each for each in having if each.is_trial] if of_trials else having
        return sorted(found, key=attrgetter("moved_s"))

    def add(
        self, identity: bytes, slots: Slots, address: bytes, *, is_trial: bool = False
    ) -> Connection:
        connection = Connection(identity, slots, address, is_trial)
        self._all[connection], self._by_stream[identity] = None, connection
        return connection

    @property
    def num_further(self) -> int:
        return sum(each.num_streams - 1 for each in self._by_token.values())

    def admit_streams(self, connection: Connection, num_streams: int) -> bytes:
        """Let so many streams, the first included, join by the token that is returned."""
        connection.num_streams, connection.token = num_streams, os.urandom(TOKEN_NBYTES)
        self._by_token[connection.token] = connection
        return connection.token

    def join(self, identity: bytes, token: bytes) -> Connection | None:
        """A further stream joins the connection that it names; None if it has none, or no room."""
        connection = self._by_token.get(token)
        if connection is None or len(connection.streams) >= connection.num_streams:
            return None
        self._by_stream[identity] = connection
        connection.streams.append(identity)
        connection.table.owed.append(0)
        return connection

    def remove(self, connection: Connection) -> None:
        self._all.pop(connection, None)
        self._by_token.pop(connection.token, None)
        for identity in connection.streams:
            self._by_stream.pop(identity, None)
        for name in list(connection.expected):
            self.forget(name)

    def expect(self, connection: Connection, name: ReadName) -> bool:
        """It has named the read. False if its oldest one was forgotten to make room."""
        had_room = name in connection.expected or len(connection.expected) < MAX_EXPECTED
        if not had_room:
            self.forget(next(iter(connection.expected)))
        self._by_read[name] = connection
        connection.expected[name] = None
        return had_room

    def forget(self, name: ReadName) -> None:
        connection = self._by_read.pop(name, None)
        if connection is not None:
            connection.expected.pop(name, None)


class Admission:
    """The rules of one source: its settings, and what is usual for its pipe and memory."""

    def __init__(self, pipe: Pipe, config: Config, device_type: str) -> None:
        self._pipe = pipe
        self._config = config
        self._num_slots = config.staging_slots or MOST_SLOTS
        self._num_streams = num_streams(config)
        self._device_type = device_type

    def num_streams(self, message: Attach, num_further: int) -> int:
        """How many streams the sink may have, where all sinks have so many further ones."""
        if message.is_trial or not self._pipe.has_streams:
            return 1
        room = most_further() - num_further
        return max(1, min(message.num_streams, self._num_streams, 1 + room))

    def admit(self, message: Attach, num_streams: int) -> Slots:
        """Raises ProtocolError for what does not go together, field by field."""
        own_name = self._pipe.name
        is_some, fits = (
            0 < message.num_slots <= MAX_SLOTS,
            0 < message.slot_nbytes <= FRAME_MAX_NBYTES,
        )
        for what, is_good, expected, got in (
            ("version", message.version == STREAM_VERSION, STREAM_VERSION, message.version),
            ("pipe", message.pipe == own_name, own_name, message.pipe),
            ("num_slots", is_some, f"1 to {MAX_SLOTS}", message.num_slots),
            ("slot_nbytes", fits, f"1 to {FRAME_MAX_NBYTES}", message.slot_nbytes),
        ):
            if not is_good:
                raise ProtocolError(f"attach: {what}: expected {expected}, got {got}")
        slots = Slots(message.num_slots, message.slot_nbytes)
        if not message.is_trial:
            return self._own_share(slots, num_streams)
        most = Slots(MOST_TRIAL_SLOTS, trial_slots(self._device_type).slot_nbytes)
        if slots.num_slots > most.num_slots or slots.slot_nbytes > most.slot_nbytes:
            raise ProtocolError(f"attach: expected at most {most} of a trial, got {slots}")
        return slots

    def _own_share(self, asked: Slots, num_streams: int) -> Slots:
        """As many of these slots as this side allows. Raises ProtocolError if not even two."""
        most_nbytes = self._config.staging_nbytes
        if most_nbytes is None:
            number = max(num_streams, self._pipe.num_sockets)
            usual_nbytes = self._pipe.staging_size(self._device_type).over(number).nbytes
            own_nbytes = self._num_slots * (self._config.chunk_nbytes or 0)
            most_nbytes = max(usual_nbytes, own_nbytes, LEAST_SLOTS * asked.slot_nbytes)
        if asked.slot_nbytes * LEAST_SLOTS > most_nbytes:
            raise ProtocolError(
                f"attach: slot_nbytes: expected 1 to {most_nbytes // LEAST_SLOTS}, because "
                f"staging_nbytes is {most_nbytes} here, got {asked.slot_nbytes}; set it on the "
                "other side, too"
            )
        most_slots = min(self._num_slots, most_nbytes // asked.slot_nbytes)
        return Slots(min(asked.num_slots, most_slots), asked.slot_nbytes)
