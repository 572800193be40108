"""Slots, chunks and their ends on both sides of a stream wire: no sockets, no clocks, no tensors.

Theory of operation
-------------------
A connection has as many slots on the source as on the sink. A chunk goes through one of the
source's and the sink's of the same number::

    source:  FREE --fill--> FILLING --filled--> FULL --leave--> LEAVING --announced--> IN_FLIGHT
             FREE <--empty-- FILLING, FULL                      FREE <--credited-- IN_FLIGHT
    sink:    GRANTED --announced--> AWAITED --unpack--> UNPACKING --placed--> PLACED --free--> DUE
             AWAITED, UNPACKING --free--> DUE           GRANTED <--credit-- DUE

1. A slot is the source's from the credit (at first: from the attach) until it is announced, and the
   sink's from then on. Each side counts how many chunks it has carried, its generation: so an
   announcement that comes twice is known.
2. A read takes each of its chunks once. It is done when all of them lie in place, and what is not
   wanted is dropped, and its slot credited all the same.
3. A read or transfer has one end, and it is told when nothing of it touches the pool any more: when
   it is stopped or fails, jobs that run are cancelled and waited for.
4. The end of the connection breaks a read unless all of its chunks are here already. Slots are
   nobody's then, and are neither freed nor credited; the lane closes when no job uses it.
5. Transfers of one connection are packed in turns, a chunk each. One that grows has a turn while it
   has chunks whose tokens are open.
6. A connection has one or more streams. Chunks leave over them in turn; one that owes many credits
   is passed over, so a slow stream holds up little more than its share of the slots. They are no
   part of a slot's state: chunks may overtake each other, and the sink does not ask over which one
   came.

A method is an event. It returns what is to be done about it, as data, and does nothing by itself.
Every slot goes from state to state through ``SOURCE_SLOT`` or ``SINK_SLOT``: a missing key is a
:class:`ProtocolError` that changes nothing.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, TypeVar

from kvxfer.errors import ProtocolError
from kvxfer.transfer.plan import ALL, Chunk
from kvxfer.transfer.wire import Reason
from kvxfer.transports.base import (
    Packed,
    Progress,
    ReadBroke,
    ReadDone,
    ReadStopped,
    SendStopped,
    Sent,
    TransferKey,
)
from kvxfer.transports.stream_wire import ChunkHeader, Header


class SourceSlot(enum.Enum):
    """A slot of the source's staging."""

    __hash__ = object.__hash__  # each is there once; Enum's own is written in Python

    FREE = "free"  # granted by the sink
    FILLING = "filling"  # being packed
    FULL = "full"  # packed; the offer decides whether it is sent
    LEAVING = "leaving"  # the pipe's
    IN_FLIGHT = "in flight"  # announced


class SinkSlot(enum.Enum):
    """A slot of the sink's staging."""

    __hash__ = object.__hash__

    GRANTED = "granted"  # the source's
    AWAITED = "awaited"  # announced; its payload is on the way
    UNPACKING = "unpacking"
    PLACED = "placed"  # unpacked, as the last of its read
    DUE = "due"  # dealt with; the source is to be told


class SlotEvent(enum.Enum):
    """What happens to a slot."""

    __hash__ = object.__hash__

    FILL = "fill"
    FILLED = "filled"
    EMPTY = "empty"  # what it holds is not sent
    LEAVE = "leave"
    ANNOUNCED = "announced"
    CREDITED = "credited"
    UNPACK = "unpack"
    PLACED = "placed"
    FREE = "free"
    CREDIT = "credit"


S = TypeVar("S", bound=enum.Enum)
_OPENS_AT = attrgetter("opens_at")

SOURCE_SLOT: Mapping[tuple[SourceSlot, SlotEvent], SourceSlot] = {
    (SourceSlot.FREE, SlotEvent.FILL): SourceSlot.FILLING,
    (SourceSlot.FILLING, SlotEvent.FILLED): SourceSlot.FULL,
    (SourceSlot.FILLING, SlotEvent.EMPTY): SourceSlot.FREE,
    (SourceSlot.FULL, SlotEvent.EMPTY): SourceSlot.FREE,
    (SourceSlot.FULL, SlotEvent.LEAVE): SourceSlot.LEAVING,
    (SourceSlot.LEAVING, SlotEvent.ANNOUNCED): SourceSlot.IN_FLIGHT,
    (SourceSlot.IN_FLIGHT, SlotEvent.CREDITED): SourceSlot.FREE,
}
SINK_SLOT: Mapping[tuple[SinkSlot, SlotEvent], SinkSlot] = {
    (SinkSlot.GRANTED, SlotEvent.ANNOUNCED): SinkSlot.AWAITED,
    (SinkSlot.AWAITED, SlotEvent.UNPACK): SinkSlot.UNPACKING,
    (SinkSlot.AWAITED, SlotEvent.FREE): SinkSlot.DUE,
    (SinkSlot.UNPACKING, SlotEvent.PLACED): SinkSlot.PLACED,
    (SinkSlot.UNPACKING, SlotEvent.FREE): SinkSlot.DUE,
    (SinkSlot.PLACED, SlotEvent.FREE): SinkSlot.DUE,
    (SinkSlot.DUE, SlotEvent.CREDIT): SinkSlot.GRANTED,
}


class SlotTable(Generic[S]):
    """The slots of one side. ``num``: how many are in each state; ``generations``: how many chunks
    each has carried.
    """

    TABLE: Mapping[tuple[S, SlotEvent], S]

    def __init__(self, num_slots: int, first: S) -> None:
        self.states = [first] * num_slots
        self.num = dict.fromkeys(type(first), 0)
        self.num[first] = num_slots
        self.generations = [0] * num_slots

    def move(self, slot: int, event: SlotEvent) -> None:
        """Raises ProtocolError where this cannot happen."""
        state = self.states[slot]
        following = self.TABLE.get((state, event))
        if following is None:
            raise ProtocolError(f"slot {slot}: {event.value} is not allowed in {state.value}")
        self.states[slot] = following
        self.num[state] -= 1
        self.num[following] += 1


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel the job that packs or unpacks this slot; its end is still waited for."""

    slot: int


# ------------------------------------------------------------------ the source's side


MOST_AHEAD = 2
"""Chunks. A sink credits in batches, so a stream may look that much worse than it is: eight streams
of which the one that owed least was taken had one to three of 16 chunks, and 128 MiB between GPUs
took 1.08 times as long as with two each.
"""


class SourceSlots(SlotTable[SourceSlot]):
    """``free``: granted slots, the next one last. ``owed``: by stream, how many chunks have left
    over it and are not credited; ``stream_of``: over which the chunk of a slot has left.
    """

    TABLE = SOURCE_SLOT

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots, SourceSlot.FREE)
        # The last one is filled first: by its number the sink learns how many there are
        self.free = list(range(num_slots))
        self.owed = [0]
        self.stream_of = [0] * num_slots
        self._latest_stream = -1

    @property
    def num_busy(self) -> int:
        """A job, the pipe or the sink has so many of them."""
        return len(self.states) - self.num[SourceSlot.FREE] - self.num[SourceSlot.FULL]

    @property
    def is_idle(self) -> bool:
        return not self.num_busy

    def fill(self, slot: int) -> None:
        """A job will write a free one."""
        self.move(slot, SlotEvent.FILL)
        self.free.remove(slot)

    def empty(self, slot: int) -> None:
        """What it holds, or was to hold, is not sent."""
        self.move(slot, SlotEvent.EMPTY)
        self.free.append(slot)

    def leave(self, slot: int) -> int:
        """It is given to the pipe, for the next stream. Returns its generation."""
        self.move(slot, SlotEvent.LEAVE)
        self.stream_of[slot] = stream = self._next_stream()
        self.owed[stream] += 1
        self.generations[slot] += 1
        return self.generations[slot] - 1

    def _next_stream(self) -> int:
        """In turn, but for those that owe more than ``MOST_AHEAD`` beyond what the least owes."""
        number, most = len(self.owed), min(self.owed) + MOST_AHEAD
        turns = ((self._latest_stream + each) % number for each in range(1, number + 1))
        self._latest_stream = next(each for each in turns if self.owed[each] <= most)
        return self._latest_stream

    def credited(self, slots: Sequence[int]) -> int:
        """The sink has dealt with these; how many of them it did not have."""
        num_unknown = 0
        for slot in slots:
            if 0 <= slot < len(self.states) and self.states[slot] is SourceSlot.IN_FLIGHT:
                self.move(slot, SlotEvent.CREDITED)
                self.owed[self.stream_of[slot]] -= 1
                self.free.append(slot)
            else:
                num_unknown += 1
        return num_unknown


@dataclass(frozen=True, slots=True)
class Fill:
    """Pack this chunk into the slot."""

    key: TransferKey
    chunk: Chunk
    slot: int


SourceAction = Cancel | Packed | Sent | SendStopped


@dataclass(slots=True, eq=False)
class Send:
    """One transfer. ``filling`` and ``packed``: slots, by sequence. ``stopped``: how it ends as
    soon as nothing is being filled. Chunks start in the ``order`` in which their tokens open, and
    the first ``num_open`` of them are.
    """

    key: TransferKey
    chunks: Sequence[Chunk]
    order: Sequence[Chunk]
    num_open: int
    num_started: int = 0
    num_sent: int = 0
    nbytes: int = 0
    filling: dict[int, int] = field(default_factory=dict)
    packed: dict[int, int] = field(default_factory=dict)
    stopped: SendStopped | None = None


class Sends:
    """The transfers of one connection."""

    def __init__(self, slots: SourceSlots) -> None:
        self.slots = slots
        self._sends: dict[TransferKey, Send] = {}
        self._turns: deque[Send] = deque()
        """Those that have chunks left to pack, next one first."""

    def __len__(self) -> int:
        return len(self._sends)

    def begin(self, key: TransferKey, chunks: Sequence[Chunk], open_tokens: int = ALL) -> None:
        """The sink expects this one. Chunks of tokens from ``open_tokens`` on have to wait."""
        order, num_open = chunks, len(chunks)
        if open_tokens < ALL:
            order = sorted(chunks, key=_OPENS_AT)
            num_open = bisect_right(order, open_tokens, key=_OPENS_AT)
        send = self._sends[key] = Send(key, chunks, order, num_open)
        self._turns.append(send)

    def grow(self, key: TransferKey, open_tokens: int) -> None:
        """More tokens are open to one that is known."""
        send = self._sends[key]
        send.num_open = max(send.num_open, bisect_right(send.order, open_tokens, key=_OPENS_AT))
        if send.num_started < send.num_open and send not in self._turns:
            self._turns.append(send)

    @property
    def has_more(self) -> bool:
        """Whether a slot is free and a transfer may have a chunk for it."""
        return bool(self.slots.free and self._turns)

    def next_fill(self) -> Fill | None:
        """The next chunk to pack, and the slot that it has from now on."""
        while self.slots.free and self._turns:
            send = self._turns.popleft()
            if send.stopped is not None or send.num_started == send.num_open:
                continue
            chunk, slot = send.order[send.num_started], self.slots.free[-1]
            self.slots.fill(slot)
            send.filling[chunk.sequence] = slot
            send.num_started += 1
            if send.num_started < send.num_open:
                self._turns.append(send)
            return Fill(send.key, chunk, slot)
        return None

    def filled(self, key: TransferKey, sequence: int, *, is_packed: bool) -> list[SourceAction]:
        """The job that packed this chunk has ended; ``is_packed``: it succeeded."""
        send = self._sends[key]
        slot = send.filling.pop(sequence)
        if is_packed and send.stopped is None:
            self.slots.move(slot, SlotEvent.FILLED)
            send.packed[sequence] = slot
            return [Packed(key, sequence)]
        self.slots.empty(slot)
        return self._stop(send, Reason.READ_FAILED)

    def is_wanted(self, key: TransferKey) -> bool:
        send = self._sends.get(key)
        return send is not None and send.stopped is None

    def leave(self, key: TransferKey, sequence: int) -> ChunkHeader | None:
        """The offer is open: a packed chunk is the pipe's. None if there is no such chunk."""
        send = self._sends.get(key)
        slot = None if send is None else send.packed.pop(sequence, None)
        if send is None or slot is None:
            return None
        return ChunkHeader(
            *(key.nonce, key.incarnation, key.sink_rank, key.source_rank),
            *(sequence, send.chunks[sequence].nbytes, slot, self.slots.leave(slot)),
        )

    def left(self, key: TransferKey, sequence: int) -> list[SourceAction]:
        """The pipe has it. With the last chunk the transfer has ended."""
        send = self._sends[key]
        send.num_sent += 1
        send.nbytes += send.chunks[sequence].nbytes
        if send.num_sent < len(send.chunks):
            return []
        del self._sends[key]
        return [Sent(key, send.nbytes)]

    def drop(self, key: TransferKey, sequence: int) -> bool:
        """The offer is over, so the chunk is not sent, and nothing more of this transfer is packed:
        it cannot complete. False if there is no such chunk.
        """
        send = self._sends.get(key)
        slot = None if send is None else send.packed.pop(sequence, None)
        if send is None or slot is None:
            return False
        self.slots.empty(slot)
        send.num_started = send.num_open = len(send.chunks)
        return True

    def stop(self, key: TransferKey, reason: Reason | None) -> list[SourceAction]:
        return self._stop(self._sends[key], reason)

    def lose(self) -> list[SourceAction]:
        """The connection has ended, and with it what its slots hold."""
        actions: list[SourceAction] = []
        for send in list(self._sends.values()):
            actions += self._stop(send, Reason.PEER_LOST)
        return actions

    def _stop(self, send: Send, reason: Reason | None) -> list[SourceAction]:
        actions: list[SourceAction] = []
        if send.stopped is None:
            send.stopped = SendStopped(send.key, reason)
            actions += [Cancel(slot) for slot in send.filling.values()]
            for slot in send.packed.values():
                self.slots.empty(slot)
            send.packed.clear()
        if not send.filling:
            del self._sends[send.key]
            actions.append(send.stopped)
        return actions


# ------------------------------------------------------------------ the sink's side


class SinkSlots(SlotTable[SinkSlot]):
    """``headers``: what each slot was last announced to hold. ``num_used``: the source has so many
    slots at least. It may have room for fewer than it was granted, and its chunks alone say so.
    """

    TABLE = SINK_SLOT

    def __init__(self, num_slots: int, slot_nbytes: int) -> None:
        super().__init__(num_slots, SinkSlot.GRANTED)
        self.slot_nbytes = slot_nbytes
        self.headers: list[Header | None] = [None] * num_slots
        self.num_used = 0
        self._due: list[int] = []

    def is_repeated(self, header: Header) -> bool:
        in_range = 0 <= header.slot < len(self.states)
        return in_range and 0 <= header.generation < self.generations[header.slot]

    def check(self, header: Header) -> None:
        """Raises ProtocolError for what cannot be announced now."""
        slot, nbytes = header.slot, header.nbytes
        if not 0 <= slot < len(self.states) or not 0 <= nbytes <= self.slot_nbytes:
            raise ProtocolError(
                f"chunk: expected one that fits {len(self.states)} slots of {self.slot_nbytes} "
                f"bytes, got {header}"
            )
        is_granted = self.states[slot] is SinkSlot.GRANTED
        if not is_granted or header.generation != self.generations[slot]:
            raise ProtocolError(
                f"chunk: expected generation {self.generations[slot]} of slot {slot} after its "
                f"credit, got {header.generation}"
            )

    def announced(self, header: Header) -> None:
        """The payload of a slot will come; it was checked."""
        self.move(header.slot, SlotEvent.ANNOUNCED)
        self.generations[header.slot] += 1
        self.headers[header.slot] = header
        self.num_used = max(self.num_used, header.slot + 1)

    def free(self, slot: int) -> None:
        self.move(slot, SlotEvent.FREE)
        self._due.append(slot)

    def take_credits(self, *, least: int = 1) -> tuple[int, ...]:
        """Slots that are the source's again, once it is told; none if they are fewer than that."""
        if len(self._due) < least:
            return ()
        taken, self._due = tuple(self._due), []
        for slot in taken:
            self.move(slot, SlotEvent.CREDIT)
        return taken


@dataclass(frozen=True, slots=True)
class Unpack:
    """The payload in this slot is this chunk: put it in place."""

    key: TransferKey
    chunk: Chunk
    slot: int


@dataclass(frozen=True, slots=True)
class Free:
    """The slot is not read any more: the pipe may get it ready for the next chunk, whose credit
    leaves after that. ``is_late``: its read ended while the payload was on its way.
    """

    slot: int
    is_late: bool = False


ReadEnd = ReadDone | ReadBroke | ReadStopped
SinkAction = Unpack | Cancel | Free | Progress | ReadEnd


@dataclass(slots=True, eq=False)
class Read:
    """One read. ``arrived``: which chunks were announced; ``unpacking``: slots. ``end``: how it
    ends as soon as nothing is being unpacked.
    """

    key: TransferKey
    chunks: Sequence[Chunk]
    arrived: bytearray
    num_arrived: int = 0
    num_placed: int = 0
    nbytes: int = 0
    unpacking: set[int] = field(default_factory=set)
    end: ReadBroke | ReadStopped | None = None


class Reads:
    """The reads of one connection."""

    def __init__(self, slots: SinkSlots) -> None:
        self.slots = slots
        self.is_lost = False
        self._reads: dict[TransferKey, Read] = {}
        self._wanted: dict[int, Read] = {}
        """By slot: whose chunk was announced there."""

    def begin(self, key: TransferKey, chunks: Sequence[Chunk]) -> None:
        self._reads[key] = Read(key, chunks, bytearray(len(chunks)))

    def announced(self, header: Header) -> str | None:
        """The payload of a slot will come. Why nobody wants it; None if somebody does."""
        self.slots.announced(header)
        read = self._reads.get(header.key) if isinstance(header, ChunkHeader) else None
        if read is None or read.end is not None or not isinstance(header, ChunkHeader):
            return "unknown_key"
        if not 0 <= header.sequence < len(read.chunks):
            return "unknown_sequence"
        if read.arrived[header.sequence]:
            return "duplicate"
        if header.nbytes != read.chunks[header.sequence].nbytes:
            return "wrong_nbytes"
        read.arrived[header.sequence] = 1
        read.num_arrived += 1
        self._wanted[header.slot] = read
        return None

    def came(self, slot: int) -> Unpack | Free:
        """The payload of an announced slot lies there."""
        read, header = self._wanted.get(slot), self.slots.headers[slot]
        if read is None or read.end is not None or not isinstance(header, ChunkHeader):
            self._wanted.pop(slot, None)
            self.slots.free(slot)
            return Free(slot, is_late=read is not None)
        self.slots.move(slot, SlotEvent.UNPACK)
        read.unpacking.add(slot)
        return Unpack(read.key, read.chunks[header.sequence], slot)

    def unpacked(self, slot: int, *, is_placed: bool, error: str | None = None) -> list[SinkAction]:
        """The job has ended: the chunk lies in place, or it was cancelled or failed."""
        read, header = self._wanted.pop(slot), self.slots.headers[slot]
        assert header is not None
        read.unpacking.remove(slot)
        if is_placed:
            read.num_placed += 1
            read.nbytes += header.nbytes
        if error is not None and read.end is None:
            failed = ReadBroke(read.key, Reason.READ_FAILED, f"unpacking failed: {error}")
            actions = self._end(read, failed)
        else:
            actions = self._settle(read)
        if read.num_placed == len(read.chunks):
            self.slots.move(slot, SlotEvent.PLACED)  # credited after the end: a load waits for that
        else:
            self.slots.free(slot)
            actions += () if self.is_lost else (Free(slot),)
        return actions

    def free_placed(self) -> list[SinkAction]:
        """The ends of reads were told: their last slots are free, too."""
        placed = [n for n, state in enumerate(self.slots.states) if state is SinkSlot.PLACED]
        for slot in placed:
            self.slots.free(slot)
        return [] if self.is_lost else [Free(slot) for slot in placed]

    def take_credits(self, *, holds: bool = True) -> tuple[int, ...]:
        """In batches, because each credit wakes the source: as long as more of a read is to come,
        for which it has the other slots, or something is being unpacked; but never the last ones
        late. ``holds`` False: all that are due.

        They are counted by the slots that the source has used: it goes on whichever it uses first,
        because two thirds of those that it has are never held.
        """
        num_slots, least = self.slots.num_used, 1
        if holds and any(read.num_arrived < len(read.chunks) for read in self._reads.values()):
            least = num_slots // 3
        elif holds and self.slots.num[SinkSlot.UNPACKING]:
            least = num_slots // 4
        return self.slots.take_credits(least=max(1, least))

    def stop(self, key: TransferKey) -> list[SinkAction]:
        return self._end(self._reads[key], ReadStopped(key))

    def lose(self, detail: str) -> list[SinkAction]:
        """The connection has ended, and with it what did not come before."""
        self.is_lost = True
        awaited = {read for slot, read in self._wanted.items() if slot not in read.unpacking}
        actions: list[SinkAction] = []
        for read in list(self._reads.values()):
            if read in awaited or read.num_arrived < len(read.chunks):
                actions += self._end(
                    read, read.end or ReadBroke(read.key, Reason.PEER_LOST, detail)
                )
            # else everything is here and only has to be put in place
        return actions

    def _end(self, read: Read, end: ReadBroke | ReadStopped) -> list[SinkAction]:
        read.end = end
        return [*(Cancel(slot) for slot in read.unpacking), *self._settle(read)]

    def _settle(self, read: Read) -> list[SinkAction]:
        """What has become of a read: progress, or its one end once no job of it is left."""
        if read.end is None and read.num_placed < len(read.chunks):
            return [Progress(read.key, read.nbytes)]
        if read.unpacking:
            return []
        del self._reads[read.key]
        return [read.end or ReadDone(read.key, read.nbytes, certified=True)]
