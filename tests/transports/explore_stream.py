"""Explore every order of events on one connection of a stream wire, both of its machines together.

What is real: ``Sends`` and ``Reads`` with their slots. What is modelled, each as an explicit move:
jobs that pack and unpack, the pipe, the two queues of messages, the offer that sends or drops what
is packed, stops, failures, and each side's look at the end of the connection.

A payload is what lies in the source's slot when the pipe takes it, not when it was sent: so a slot
that is written too early is seen by its bytes.
"""

from __future__ import annotations

import itertools
import pickle
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from kvxfer.errors import ProtocolError
from kvxfer.transfer.plan import ALL, Chunk
from kvxfer.transports.base import (
    Packed,
    Progress,
    ReadDone,
    SendStopped,
    Sent,
    TransferKey,
)
from kvxfer.transports.stream_machine import (
    Cancel,
    Free,
    Read,
    Reads,
    Send,
    Sends,
    SinkAction,
    SinkSlot,
    SinkSlots,
    SlotEvent,
    SourceAction,
    SourceSlot,
    SourceSlots,
    Unpack,
)
from kvxfer.transports.stream_wire import ChunkHeader
from tests.worlds import trace_to, without_exit

NBYTES = 8
_ANNOUNCED = SlotEvent.ANNOUNCED


@dataclass(frozen=True)
class Scenario:
    """``chunks``: of each read. ``num_streams``: that there may be. ``is_write``: an announcement
    follows its payload. The rest: what may happen, how often in all; and which machines are used
    (faults are planted there).
    """

    num_slots: int
    chunks: tuple[int, ...]
    num_streams: int = 1
    is_write: bool = False
    stops: int = 0
    drops: int = 0
    failures: int = 0
    may_end: bool = False
    grows: bool = False  # the tokens of the last chunk open first
    sends: type[Sends] = Sends
    reads: type[Reads] = Reads
    source_slots: type[SourceSlots] = SourceSlots
    sink_slots: type[SinkSlots] = SinkSlots
    max_worlds: int = 60_000


class Violation(Exception):
    """A promise is broken."""


def key_of(number: int) -> TransferKey:
    return TransferKey(b"n%d" % number, b"i", "k", "s")


def chunks_of(count: int, *, is_reversed: bool = False) -> tuple[Chunk, ...]:
    tokens = range(count)[::-1] if is_reversed else range(count)
    return tuple(
        Chunk(
            sequence=n,
            class_index=0,
            region_lo=0,
            region_hi=1,
            token_lo=token,
            token_hi=token + 1,
            opens_at=token + 1,
            nbytes=NBYTES,
        )
        for n, token in enumerate(tokens)
    )


Name = tuple[TransferKey, int]
"""Of a chunk."""


@dataclass
class World:
    """``packing``, ``unpacking``: jobs, by slot. ``moving``: slots whose payload the pipe has,
    ``there``: those whose payload lies at the sink. ``to_sink``, by stream, and
    ``to_source``: messages under way.
    """

    sends: Sends
    reads: Reads
    num_chunks: dict[TransferKey, int]
    source_bytes: list[Name | None]
    sink_bytes: list[Name | None]
    stops: int
    drops: int
    failures: int
    packing: dict[int, Name] = field(default_factory=dict)
    unpacking: dict[int, Name] = field(default_factory=dict)
    packed: list[Name] = field(default_factory=list)
    leaving: dict[int, ChunkHeader] = field(default_factory=dict)
    moving: list[int] = field(default_factory=list)
    there: list[int] = field(default_factory=list)
    to_sink: list[list[ChunkHeader]] = field(default_factory=lambda: [[]])
    to_source: list[tuple[int, ...]] = field(default_factory=list)
    placed: set[Name] = field(default_factory=set)
    send_ends: dict[TransferKey, str] = field(default_factory=dict)
    read_ends: dict[TransferKey, str] = field(default_factory=dict)
    dropped: set[TransferKey] = field(default_factory=set)
    num_open: dict[TransferKey, int] = field(default_factory=dict)
    is_source_lost: bool = False
    is_sink_lost: bool = False

    @property
    def is_over(self) -> bool:
        """Every end was told, nothing runs, and every slot is the source's, or nobody's."""
        told = len(self.send_ends) == len(self.read_ends) == len(self.num_chunks)
        if not told or self.packing or self.unpacking:
            return False
        num_free = self.sends.slots.num[SourceSlot.FREE]
        at_rest = num_free == self.reads.slots.num[SinkSlot.GRANTED] == len(self.source_bytes)
        return at_rest or self.is_source_lost or self.is_sink_lost


def first_world(scenario: Scenario) -> World:
    num_slots = scenario.num_slots
    world = World(
        scenario.sends(scenario.source_slots(num_slots)),
        scenario.reads(scenario.sink_slots(num_slots, NBYTES)),
        {key_of(n): count for n, count in enumerate(scenario.chunks)},
        [None] * num_slots,
        [None] * num_slots,
        scenario.stops,
        scenario.drops,
        scenario.failures,
    )
    for key, count in world.num_chunks.items():
        chunks = chunks_of(count, is_reversed=scenario.grows)
        world.reads.begin(key, chunks)
        if scenario.grows:
            world.num_open[key] = 0
            world.sends.begin(key, chunks, 0)
        else:
            world.sends.begin(key, chunks)
    return world


Move = tuple[str, object]


def local_moves(world: World, scenario: Scenario) -> Iterator[Move]:
    """What happens by itself sooner or later."""
    for slot in world.packing:
        yield "pack ends", slot
    for slot in world.unpacking:
        yield "unpack ends", slot
    if not world.is_source_lost:
        for key, num_open in world.num_open.items():
            if num_open < world.num_chunks[key] and key not in world.send_ends:
                yield "grow", key
        if world.sends.has_more:
            yield "pack", None
        for name in world.packed:
            yield "send", name
        for slot in list(world.leaving)[:1]:  # in the order of ``send``
            if not scenario.is_write or slot not in world.moving:
                yield "announce", slot
        if world.to_source:
            yield "credit comes", None
        if len(world.to_sink) < scenario.num_streams:
            yield "stream joins", None
    if not world.is_sink_lost:
        for slot in world.moving:
            yield "payload comes", slot
        for stream, headers in enumerate(world.to_sink):
            if headers:  # streams overtake each other
                yield "announcement comes", stream
        announced = [n for n, s in enumerate(world.reads.slots.states) if s is SinkSlot.AWAITED]
        for slot in world.there:
            if slot in announced:
                yield "payload is seen", slot
        if world.reads.slots.num[SinkSlot.PLACED]:
            yield "free placed", None
        if world.reads.slots.num[SinkSlot.DUE]:
            yield "tell credits", None
    if world.is_source_lost != world.is_sink_lost:
        yield ("sink loses" if world.is_source_lost else "source loses"), None
    for key in world.num_chunks:
        has_ended = world.send_ends.get(key) == "SendStopped"
        if key in world.dropped and key not in world.send_ends:
            yield "stop send", key
        if has_ended and key not in world.read_ends and not world.is_sink_lost:
            yield "stop read", key  # the source's word, or a deadline


def chance_moves(world: World, scenario: Scenario) -> Iterator[Move]:
    """What may happen beside that, as often as the scenario says."""
    for key in world.num_chunks if world.stops else ():
        if key not in world.send_ends:
            yield "stop send", key
        if key not in world.read_ends:
            yield "stop read", key
    if world.drops and not world.is_source_lost:
        for name in world.packed:
            yield "drop", name
    if world.failures:
        for slot in world.packing:
            yield "pack fails", slot
        for slot in world.unpacking:
            yield "unpack fails", slot
    if scenario.may_end and not (world.is_source_lost or world.is_sink_lost):
        yield "source loses", None
        yield "sink loses", None


def apply(world: World, label: str, what: object) -> None:  # one case for each move
    """Raises Violation."""
    sends, reads = world.sends, world.reads
    match label, what:
        case "pack", None:
            fill = sends.next_fill()
            if fill is not None:
                _check(fill.slot not in world.packing, "two jobs write one slot")
                _check(fill.key not in world.dropped, "more is packed beside a dropped chunk")
                num_open = world.num_open.get(fill.key, fill.chunk.token_hi)
                _check(fill.chunk.token_hi <= num_open, "a chunk is packed before it is open")
                world.packing[fill.slot] = (fill.key, fill.chunk.sequence)
                world.source_bytes[fill.slot] = None  # it is being written
        case (("pack ends" | "pack fails"), int(slot)):
            key, sequence = world.packing.pop(slot)
            world.source_bytes[slot] = (key, sequence)
            world.failures -= label == "pack fails"
            actions = sends.filled(key, sequence, is_packed=label == "pack ends")
            _on_source(world, actions)
        case "send", (key, sequence):
            world.packed.remove((key, sequence))
            least = min(sends.slots.owed)
            header = sends.leave(key, sequence)
            if header is not None:
                stream = sends.slots.stream_of[header.slot]
                is_least = sends.slots.owed[stream] == least + 1
                _check(is_least, "a chunk waits behind those of a slower stream")
                world.moving.append(header.slot)
                world.leaving[header.slot] = header
                _on_source(world, sends.left(key, sequence))
        case "drop", (key, sequence):
            world.packed.remove((key, sequence))
            world.drops -= 1
            world.dropped.add(key)
            sends.drop(key, sequence)
        case "announce", int(slot):
            world.to_sink[sends.slots.stream_of[slot]].append(world.leaving.pop(slot))
            sends.slots.move(slot, _ANNOUNCED)
        case "payload comes", int(slot):
            world.moving.remove(slot)
            _check(slot not in world.unpacking, "a slot is written while it is read")
            world.sink_bytes[slot] = world.source_bytes[slot]
            world.there.append(slot)
        case "announcement comes", int(stream):
            header = world.to_sink[stream].pop(0)
            _check(not reads.slots.is_repeated(header), "a chunk is taken for a repeated one")
            reads.slots.check(header)
            reads.announced(header)
        case "payload is seen", int(slot):
            world.there.remove(slot)
            _on_sink(world, [reads.came(slot)])
        case (("unpack ends" | "unpack fails"), int(slot)):
            key, sequence = world.unpacking.pop(slot)
            _check(key not in world.read_ends, "the pool is written after the read's end")
            is_good = world.sink_bytes[slot] == (key, sequence)
            _check(is_good, "another chunk's bytes are put in place")
            is_placed = label == "unpack ends"
            if is_placed:
                world.placed.add((key, sequence))
            else:
                world.failures -= 1
            error = None if is_placed else "broken"
            _on_sink(world, reads.unpacked(slot, is_placed=is_placed, error=error))
        case "free placed", None:
            _on_sink(world, reads.free_placed())
        case "tell credits", None:
            if slots := reads.take_credits():
                world.to_source.append(slots)
        case "credit comes", None:
            _check(not sends.slots.credited(world.to_source.pop(0)), "a credit of nobody")
            num = sends.slots.num
            num_owed = num[SourceSlot.LEAVING] + num[SourceSlot.IN_FLIGHT]
            _check(sum(sends.slots.owed) == num_owed, "a stream owes what was credited")
        case "grow", TransferKey() as key:
            world.num_open[key] += 1
            is_all = world.num_open[key] == world.num_chunks[key]
            sends.grow(key, ALL if is_all else world.num_open[key])
        case "stream joins", None:
            sends.slots.owed.append(0)
            world.to_sink.append([])
        case "stop send", TransferKey() as key:
            world.stops = max(world.stops - 1, 0)
            _on_source(world, sends.stop(key, None))
        case "stop read", TransferKey() as key:
            world.stops = max(world.stops - 1, 0)
            _on_sink(world, reads.stop(key))
        case "source loses", None:
            world.is_source_lost = True
            world.packed.clear()
            world.leaving.clear()
            _on_source(world, sends.lose())
        case "sink loses", None:
            world.is_sink_lost = True
            _on_sink(world, reads.lose("gone"))


def _on_source(world: World, actions: list[SourceAction]) -> None:
    for action in actions:
        match action:
            case Packed(key, sequence):
                world.packed.append((key, sequence))
            case Sent(key) | SendStopped(key):
                _check(key not in world.send_ends, "a transfer ends twice")
                is_read = any(name[0] == key for name in world.packing.values())
                _check(not is_read, "a transfer that has ended reads the pool")
                world.send_ends[key] = type(action).__name__
                world.packed = [name for name in world.packed if name[0] != key]
            case Cancel(slot):
                _check(slot in world.packing, "nothing is there to cancel")


def _on_sink(world: World, actions: list[SinkAction]) -> None:
    for action in actions:
        match action:
            case Unpack(key, chunk, slot):
                _check(key not in world.read_ends, "a chunk of a read that has ended is copied")
                world.unpacking[slot] = (key, chunk.sequence)
            case Free(slot):
                _check(slot not in world.unpacking, "a slot is freed while it is read")
                _check(not world.is_sink_lost, "a slot of a lost connection is freed")
            case Cancel(slot):
                _check(slot in world.unpacking, "nothing is there to cancel")
            case Progress():
                pass
            case end:
                _check(end.key not in world.read_ends, "a read ends twice")
                is_written = any(name[0] == end.key for name in world.unpacking.values())
                _check(not is_written, "a read's end is told while the pool is written")
                num_placed = sum(name[0] == end.key for name in world.placed)
                if isinstance(end, ReadDone):
                    is_whole = num_placed == world.num_chunks[end.key]
                    _check(is_whole, "a read is done before its last chunk")
                world.read_ends[end.key] = type(end).__name__


def _check(is_good: bool, sentence: str) -> None:
    if not is_good:
        raise Violation(sentence)


# ------------------------------------------------------------------ the search


@dataclass
class Result:
    """``trace``: the moves from the first world to the violation; empty if there is none."""

    num_worlds: int
    num_done: int
    violation: str | None = None
    trace: list[str] = field(default_factory=list)


def explore(scenario: Scenario) -> Result:
    """Breadth first: the shortest trace to a violation, or all worlds.

    ``num_done``: worlds that are over and in which every read is done.
    """
    first = first_world(scenario)
    # By key, which takes long to hash
    numbers: defaultdict[object, int] = defaultdict(itertools.count().__next__)
    start = numbers[_key_of(first)]
    parents: dict[int, tuple[int, str] | None] = {start: None}
    exits: dict[int, int] = {}
    over: set[int] = set()
    num_done = 0
    queue = deque([(start, pickle.dumps(first))])
    while queue:
        here, packed = queue.popleft()
        world = pickle.loads(packed)
        if world.is_over:
            over.add(here)
            num_done += list(world.read_ends.values()) == ["ReadDone"] * len(world.num_chunks)
        local = list(local_moves(world, scenario))
        moves = [*local, *chance_moves(world, scenario)]
        for number, move in enumerate(moves):
            # The last one needs no copy: nobody looks at the world before it any more
            after = world if number == len(moves) - 1 else pickle.loads(packed)
            label = f"{move[0]} {_text(move[1])}"
            try:
                apply(after, *move)
            except (Violation, ProtocolError, KeyError) as exc:
                trace = [*trace_to(here, parents), label]
                return Result(len(parents), 0, f"{type(exc).__name__}: {exc}", trace)
            there = numbers[_key_of(after)]
            if there == here:
                continue
            if number < len(local):
                exits.setdefault(here, there)
            if there not in parents:
                parents[there] = (here, label)
                queue.append((there, pickle.dumps(after)))
        assert len(parents) <= scenario.max_worlds, "the scenario is larger than its bound"
    stuck = without_exit(parents, exits, over)
    if stuck is not None:
        return Result(len(parents), 0, "no end without help", trace_to(stuck, parents))
    return Result(len(parents), num_done)


def _text(what: object) -> str:
    match what:
        case TransferKey():
            return what.nonce.decode()
        case (TransferKey() as key, number):
            return f"{key.nonce.decode()}.{number}"
        case _:
            return "" if what is None else str(what)


def _key_of(world: World) -> object:
    """What makes two worlds the same: all they hold, in an order that does not depend on how it
    came.
    """
    return _frozen(vars(world))


def _frozen(value: object) -> object:
    kind: Any = type(value)
    freeze = _freezer(kind)
    return value if freeze is None else freeze(value)


@cache
def _freezer(kind: type) -> Callable[[Any], object] | None:
    """None: such a value is hashed as it is."""
    if issubclass(kind, dict):
        return lambda value: frozenset([(key, _frozen(each)) for key, each in value.items()])
    if issubclass(kind, set):
        return lambda value: frozenset(value)
    if issubclass(kind, list | deque | bytearray):
        return lambda value: tuple([_frozen(each) for each in value])
    if issubclass(kind, Sends | Reads | SourceSlots | SinkSlots):
        return lambda value: _frozen(vars(value))
    if issubclass(kind, Send | Read):
        return lambda value: tuple([_frozen(getattr(value, name)) for name in kind.__slots__])
    return None
