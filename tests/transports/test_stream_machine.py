"""Slots, chunks and their ends, explored in every order; a fault planted for each rule is found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvxfer.errors import ProtocolError
from kvxfer.transfer.plan import ALL
from kvxfer.transfer.wire import Reason
from kvxfer.transports.base import (
    Packed,
    Progress,
    ReadBroke,
    ReadDone,
    ReadStopped,
    SendStopped,
    Sent,
)
from kvxfer.transports.stream_machine import (
    SINK_SLOT,
    SOURCE_SLOT,
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
from kvxfer.transports.stream_wire import ChunkHeader, TrialHeader
from tests.transports.explore_stream import NBYTES, Scenario, chunks_of, explore, key_of

PLAIN = Scenario(2, (2, 1))
STOPPED = Scenario(2, (2,), stops=2)
DROPPED = Scenario(1, (2, 1), drops=1)
FAILING = Scenario(2, (2,), failures=1)
ENDING = Scenario(2, (2,), may_end=True)
STREAMS = Scenario(2, (2,), num_streams=2, may_end=True)
GROWING = Scenario(2, (2, 1), grows=True)

# Worlds of each, and those that are over with every read done. Another number of worlds is a change
# of the machine; few would mean that the exploration has gone blind.
SCENARIOS = {
    "two reads": (PLAIN, 771, 7),
    "two reads, one slot": (replace(PLAIN, num_slots=1), 39, 1),
    "the source sees the end of a payload's way": (replace(PLAIN, is_write=True), 547, 7),
    "stops": (STOPPED, 1013, 3),
    "a chunk is dropped": (DROPPED, 129, 1),
    "a job fails": (FAILING, 389, 3),
    "the connection ends": (ENDING, 886, 75),
    "the connection ends, and stops": (Scenario(1, (2,), stops=1, may_end=True), 456, 13),
    "two reads and a stop": (replace(PLAIN, stops=1), 4849, 7),
    "a second stream joins, the connection ends": (STREAMS, 2632, 287),
    "two reads that grow": (GROWING, 2580, 16),
    "one that grows, a stop, the connection ends": (
        Scenario(1, (2,), grows=True, stops=1, may_end=True),
        708,
        13,
    ),
    "one that grows, and a chunk is dropped": (Scenario(1, (2,), grows=True, drops=1), 53, 1),
    "everything once": (Scenario(2, (2,), stops=1, failures=1, may_end=True), 4532, 75),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_order_of_events_breaks_a_promise(name: str) -> None:
    scenario, num_worlds, num_done = SCENARIOS[name]
    result = explore(scenario)
    assert result.violation is None, f"{result.violation}: {'; '.join(result.trace)}"
    assert (result.num_worlds, result.num_done) == (num_worlds, num_done)


# ------------------------------------------------------------------ planted faults


class CreditsTwice(SinkSlots):
    def take_credits(self, *, least: int = 1) -> tuple[int, ...]:
        return super().take_credits(least=least) * 2


class CreditsBeforeUnpacking(SinkSlots):
    early: tuple[int, ...] = ()

    def take_credits(self, *, least: int = 1) -> tuple[int, ...]:
        taken = [n for n in super().take_credits(least=least) if n not in self.early]
        unpacking = [n for n, state in enumerate(self.states) if state is SinkSlot.UNPACKING]
        self.early = tuple(unpacking)
        return (*taken, *unpacking)


class CopiesForEndedReads(Reads):
    def came(self, slot: int) -> Unpack | Free:
        read, header = self._wanted.get(slot), self.slots.headers[slot]
        if read is None or not isinstance(header, ChunkHeader):
            return super().came(slot)
        self.slots.move(slot, SlotEvent.UNPACK)
        read.unpacking.add(slot)
        return Unpack(read.key, read.chunks[header.sequence], slot)


class IsDoneWhenAllIsAnnounced(Reads):
    def _settle(self, read: Read) -> list[SinkAction]:
        if read.end is None and read.num_arrived == len(read.chunks) and read.key in self._reads:
            del self._reads[read.key]
            return [ReadDone(read.key, read.nbytes, certified=True)]
        return super()._settle(read)


class StopsAtOnce(Reads):
    def stop(self, key: Any) -> list[SinkAction]:
        read = self._reads.pop(key)
        read.end = ReadStopped(key)
        return [read.end]


class LosesNoAwaited(Reads):
    def lose(self, detail: str) -> list[SinkAction]:
        came = {slot: read for slot, read in self._wanted.items() if slot in read.unpacking}
        self._wanted = came
        return super().lose(detail)


class FreesAfterTheEnd(Reads):
    def lose(self, detail: str) -> list[SinkAction]:
        actions = super().lose(detail)
        self.is_lost = False
        return actions


class ForgetsUnwantedSlots(Reads):
    def came(self, slot: int) -> Unpack | Free:
        action = super().came(slot)
        if isinstance(action, Free):
            self.slots._due.remove(slot)
        return action


class NeverFreesPlaced(Reads):
    def free_placed(self) -> list[SinkAction]:
        return []


class HoardsCredits(Reads):
    def take_credits(self, *, holds: bool = True) -> tuple[int, ...]:
        return self.slots.take_credits(least=2)


class FreeWhenAnnounced(SourceSlots):
    def move(self, slot: int, event: SlotEvent) -> None:
        super().move(slot, event)
        if event is SlotEvent.ANNOUNCED:
            self.credited([slot])


class SendsAllOverOne(SourceSlots):
    def leave(self, slot: int) -> int:
        owed, self.owed = self.owed, self.owed[:1]
        generation = super().leave(slot)
        self.owed = [*self.owed, *owed[1:]]
        return generation


class OwesForEver(SourceSlots):
    def credited(self, slots: Sequence[int]) -> int:
        owed = list(self.owed)
        num_unknown = super().credited(slots)
        self.owed = owed
        return num_unknown


class FreeWhenSent(Sends):
    """And announced when it is there; the sink would not see another chunk in it."""

    def left(self, key: Any, sequence: int) -> list[SourceAction]:
        for slot, state in enumerate(self.slots.states):
            if state is SourceSlot.LEAVING and slot not in self.slots.free:
                self.slots.free.append(slot)
        return super().left(key, sequence)

    def next_fill(self) -> Any:
        if self.slots.free:
            slot = self.slots.free[-1]
            if self.slots.states[slot] is SourceSlot.LEAVING:
                self.slots.states[slot] = SourceSlot.FREE
        return super().next_fill()


class CountsNoGenerations(SourceSlots):
    def leave(self, slot: int) -> int:
        return super().leave(slot) * 0


class StopsWithoutWaiting(Sends):
    def _stop(self, send: Send, reason: Reason | None) -> list[SourceAction]:
        super()._stop(send, reason)
        send.filling.clear()
        return [*super()._stop(send, reason)] if send.key in self._sends else []


class KeepsWhatIsPacked(Sends):
    def _stop(self, send: Send, reason: Reason | None) -> list[SourceAction]:
        send.packed.clear()
        return super()._stop(send, reason)


class PacksBesideTheDropped(Sends):
    def drop(self, key: Any, sequence: int) -> bool:
        num_started = self._sends[key].num_started
        is_known = super().drop(key, sequence)
        self._sends[key].num_started = num_started
        return is_known


class PacksForTheStopped(Sends):
    def filled(self, key: Any, sequence: int, *, is_packed: bool) -> list[SourceAction]:
        send = self._sends[key]
        if not is_packed or send.stopped is None:
            return super().filled(key, sequence, is_packed=is_packed)
        slot = send.filling.pop(sequence)
        self.slots.move(slot, SlotEvent.FILLED)
        send.packed[sequence] = slot
        return [Packed(key, sequence)]


class PacksWhatIsNotOpen(Sends):
    def begin(self, key: Any, chunks: Any, open_tokens: int = ALL) -> None:
        super().begin(key, chunks)


class PacksInTheOrderOfSequences(Sends):
    def begin(self, key: Any, chunks: Any, open_tokens: int = ALL) -> None:
        super().begin(key, chunks, open_tokens)
        self._sends[key].order = chunks


class ForgetsWhatHasGrown(Sends):
    def grow(self, key: Any, open_tokens: int) -> None:
        send = self._sends[key]
        if send in self._turns or not send.num_started:
            super().grow(key, open_tokens)


PLANTED: list[tuple[Scenario, str]] = [
    (replace(GROWING, sends=PacksWhatIsNotOpen), "a chunk is packed before it is open"),
    (replace(GROWING, sends=PacksInTheOrderOfSequences), "a chunk is packed before it is open"),
    (replace(GROWING, sends=ForgetsWhatHasGrown), "no end without help"),
    (replace(PLAIN, sink_slots=CreditsTwice), "a credit of nobody"),
    (replace(PLAIN, sink_slots=CreditsBeforeUnpacking), "a slot is written while it is read"),
    (replace(STOPPED, reads=CopiesForEndedReads), "of a read that has ended is copied"),
    (replace(PLAIN, reads=IsDoneWhenAllIsAnnounced), "done before its last chunk"),
    (replace(STOPPED, reads=StopsAtOnce), "told while the pool is written"),
    (replace(ENDING, reads=LosesNoAwaited), "no end without help"),
    (replace(ENDING, reads=FreesAfterTheEnd), "a slot of a lost connection is freed"),
    (replace(STOPPED, reads=ForgetsUnwantedSlots), "no end without help"),
    (replace(PLAIN, reads=NeverFreesPlaced), "no end without help"),
    (replace(PLAIN, reads=HoardsCredits), "no end without help"),
    (replace(PLAIN, source_slots=FreeWhenAnnounced), "another chunk's bytes are put in place"),
    (replace(STREAMS, source_slots=SendsAllOverOne), "behind those of a slower stream"),
    (replace(STREAMS, source_slots=OwesForEver), "owes what was credited"),
    (replace(PLAIN, sends=FreeWhenSent), "is not allowed in filling"),
    (replace(PLAIN, source_slots=CountsNoGenerations), "taken for a repeated one"),
    (replace(STOPPED, sends=StopsWithoutWaiting), "has ended reads the pool"),
    (replace(STOPPED, sends=KeepsWhatIsPacked), "no end without help"),
    (replace(DROPPED, sends=PacksBesideTheDropped), "beside a dropped chunk"),
    (replace(STOPPED, sends=PacksForTheStopped), "no end without help"),
]


@pytest.mark.parametrize(
    ("scenario", "sentence"),
    PLANTED,
    ids=[
        next(
            used.__name__
            for used in (each.sends, each.reads, each.source_slots, each.sink_slots)
            if used not in (Sends, Reads, SourceSlots, SinkSlots)
        )
        for each, _ in PLANTED
    ],
)
def test_a_planted_fault_is_found(scenario: Scenario, sentence: str) -> None:
    result = explore(scenario)
    assert result.violation is not None
    assert sentence in result.violation, result


def _without(table: Any, state: Any, event: SlotEvent) -> Any:
    return {key: value for key, value in table.items() if key != (state, event)}


@pytest.mark.parametrize(
    ("slots", "table", "state", "event"),
    [
        *((SourceSlots, SOURCE_SLOT, state, event) for state, event in SOURCE_SLOT),
        *((SinkSlots, SINK_SLOT, state, event) for state, event in SINK_SLOT),
    ],
)
def test_every_line_of_the_tables_is_needed(
    slots: Any, table: Any, state: Any, event: SlotEvent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "TABLE", _without(table, state, event))
    for scenario in (PLAIN, STOPPED, DROPPED, FAILING):
        if (violation := explore(scenario).violation) is not None:
            assert "is not allowed in" in violation
            return
    pytest.fail("nothing was found")


# ------------------------------------------------------------------ one event at a time


def _sends(num_slots: int, *counts: int) -> Sends:
    sends = Sends(SourceSlots(num_slots))
    for number, count in enumerate(counts):
        sends.begin(key_of(number), chunks_of(count))
    return sends


def _fills(sends: Sends) -> list[tuple[int, int, int]]:
    """(transfer, chunk, slot) of all that can be packed now."""
    found = []
    while (fill := sends.next_fill()) is not None:
        found.append((int(fill.key.nonce[1:]), fill.chunk.sequence, fill.slot))
    return found


def test_transfers_take_turns_as_far_as_slots_are_free() -> None:
    sends = _sends(4, 3, 1)
    assert sends.has_more
    assert _fills(sends) == [(0, 0, 3), (1, 0, 2), (0, 1, 1), (0, 2, 0)]
    assert not sends.has_more
    assert not sends.slots.is_idle


def test_a_transfer_goes_from_slot_to_slot() -> None:
    sends, key = _sends(1, 2), key_of(0)
    for sequence in (0, 1):
        assert _fills(sends) == [(0, sequence, 0)]
        assert sends.filled(key, sequence, is_packed=True) == [Packed(key, sequence)]
        header = sends.leave(key, sequence)
        assert header == ChunkHeader(b"n0", b"i", "k", "s", sequence, NBYTES, 0, sequence)
        assert sends.leave(key, sequence) is None
        assert sends.left(key, sequence) == ([Sent(key, 2 * NBYTES)] if sequence else [])
        assert sends.slots.credited([0]) == 1  # it was not announced
        sends.slots.move(0, SlotEvent.ANNOUNCED)
        assert sends.slots.credited([0, 0, 1, -1]) == 3
    assert not len(sends)
    assert sends.slots.is_idle


def test_a_transfer_that_fails_or_is_stopped_ends_when_nothing_is_packed_any_more() -> None:
    sends, key = _sends(2, 3), key_of(0)
    _fills(sends)
    assert sends.is_wanted(key)
    assert sends.filled(key, 1, is_packed=False) == [Cancel(1)]
    assert not sends.is_wanted(key)
    assert sends.stop(key, None) == []  # the first reason stays
    assert sends.filled(key, 0, is_packed=True) == [SendStopped(key, Reason.READ_FAILED)]
    assert sorted(sends.slots.free) == [0, 1]
    assert not sends.drop(key, 0)


def _reads(num_slots: int, count: int) -> Reads:
    reads = Reads(SinkSlots(num_slots, NBYTES))
    reads.begin(key_of(0), chunks_of(count))
    return reads


def _header(sequence: int, slot: int, generation: int = 0, **changes: Any) -> ChunkHeader:
    header = ChunkHeader(b"n0", b"i", "k", "s", sequence, NBYTES, slot, generation)
    return msgspec.structs.replace(header, **changes)


def test_a_read_takes_its_chunks_once_and_is_done_before_its_last_slot_is_free() -> None:
    reads, key = _reads(4, 2), key_of(0)
    assert reads.announced(_header(1, 3)) is None
    assert reads.announced(_header(1, 0)) == "duplicate"
    assert reads.announced(_header(0, 1)) is None
    assert reads.came(0) == Free(0)
    assert reads.came(3) == Unpack(key, chunks_of(2)[1], 3)
    assert reads.take_credits() == (0,)
    assert reads.came(1) == Unpack(key, chunks_of(2)[0], 1)
    assert reads.unpacked(3, is_placed=True) == [Progress(key, NBYTES), Free(3)]
    done = ReadDone(key, 2 * NBYTES, certified=True)
    assert reads.unpacked(1, is_placed=True) == [done]
    assert reads.free_placed() == [Free(1)]
    assert reads.take_credits() == (3, 1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"nonce": b"x"}, "unknown_key"),
        ({"sequence": 2}, "unknown_sequence"),
        ({"sequence": -1}, "unknown_sequence"),
        ({"nbytes": 1}, "wrong_nbytes"),
    ],
)
def test_what_nobody_asked_for_is_dropped_and_credited(
    changes: dict[str, Any], reason: str
) -> None:
    reads = _reads(1, 2)
    assert reads.announced(msgspec.structs.replace(_header(0, 0), **changes)) == reason
    assert reads.came(0) == Free(0)
    assert reads.take_credits() == (0,)
    assert reads.announced(TrialHeader(1, 0, 1)) == "unknown_key"


@pytest.mark.parametrize(
    "header",
    [
        *(_header(0, 2), _header(0, -1), _header(0, 0, 1), _header(0, 0, nbytes=-1)),
        *(_header(0, 0, nbytes=NBYTES + 1), _header(0, 1, 1)),
    ],
)
def test_what_cannot_be_announced(header: ChunkHeader) -> None:
    reads = _reads(2, 3)
    reads.announced(_header(0, 1))
    assert reads.slots.is_repeated(_header(0, 1))
    with pytest.raises(ProtocolError, match="chunk: expected"):
        reads.slots.check(header)
    reads.slots.check(_header(1, 0))


def test_a_slot_is_the_sources_again_when_its_credit_has_left() -> None:
    reads = _reads(1, 2)
    reads.announced(_header(0, 0, nonce=b"x"))
    reads.came(0)
    with pytest.raises(ProtocolError, match="after its credit"):
        reads.slots.check(_header(0, 0, 1))
    reads.take_credits()
    reads.slots.check(_header(0, 0, 1))


@pytest.mark.parametrize(
    ("num_chunks", "num_granted", "num_used", "expected"),
    [
        (5, 9, 9, [0, 0, 3, 0]),  # more of the read is to come: by a third of the slots
        (4, 9, 9, [0, 2, 0, 1]),  # all is here: by a quarter, while a copy runs
        (5, 5, 5, [1, 1, 1, 1]),  # of few slots the source needs each
        (5, 24, 9, [0, 0, 3, 0]),  # the source has room for fewer than it was granted
        (5, 24, 4, [1, 1, 1, 1]),
    ],
)
def test_credits_leave_in_batches_but_never_the_last_ones_late(
    num_chunks: int, num_granted: int, num_used: int, expected: list[int]
) -> None:
    sends, reads = _sends(num_used, 4), _reads(num_granted, num_chunks)
    slots = [slot for _, _, slot in _fills(sends)]
    for sequence, slot in enumerate(slots):
        reads.announced(_header(sequence, slot))
        reads.came(slot)
    taken: list[Sequence[int]] = []
    for slot in slots:
        reads.unpacked(slot, is_placed=True)
        taken.append(reads.take_credits())
    assert [len(each) for each in taken] == expected
    assert [slot for each in taken for slot in each] == slots[: sum(expected)]


def test_no_order_of_slots_makes_a_sink_hold_what_its_source_needs() -> None:
    """An earlier source, say, which uses its first slot first."""
    reads = _reads(24, 12)
    for sequence in range(8):
        slot, generation = sequence % 4, sequence // 4
        reads.announced(_header(sequence, slot, generation))
        reads.came(slot)
        reads.unpacked(slot, is_placed=True)
        assert reads.take_credits() == (slot,)


@pytest.mark.parametrize("is_stopped", [True, False])
def test_credits_are_held_no_longer_than_the_read(is_stopped: bool) -> None:
    reads = _reads(9, 2)
    reads.announced(_header(0, 8))
    reads.came(8)
    reads.unpacked(8, is_placed=True)
    assert reads.take_credits() == ()
    if is_stopped:
        reads.stop(key_of(0))
    assert reads.take_credits(holds=is_stopped) == (8,)


@pytest.mark.parametrize("has_come", [True, False])
def test_what_came_before_the_end_of_the_connection_counts(has_come: bool) -> None:
    reads, key = _reads(1, 1), key_of(0)
    reads.announced(_header(0, 0))
    if not has_come:
        assert reads.lose("gone") == [ReadBroke(key, Reason.PEER_LOST, "gone")]
        return
    reads.came(0)
    assert reads.lose("gone") == []
    assert reads.unpacked(0, is_placed=True) == [ReadDone(key, NBYTES, certified=True)]
    assert reads.free_placed() == []


def test_a_read_that_fails_or_is_stopped_ends_when_nothing_is_unpacked_any_more() -> None:
    reads, key = _reads(2, 3), key_of(0)
    for slot in (0, 1):
        reads.announced(_header(slot, slot))
        reads.came(slot)
    assert reads.unpacked(0, is_placed=False, error="full") == [Cancel(1), Free(0)]
    assert reads.stop(key) == [Cancel(1)]
    assert reads.unpacked(1, is_placed=True) == [ReadStopped(key), Free(1)]
