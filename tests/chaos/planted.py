"""Faults that somebody could make in protocol, board, plan, credits and ids, one function each: it
changes the code of the process that calls it. Each must be found: by a storm, or by the suite where
what it needs is too rare for one.
"""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import msgspec

from tests.chaos.storm import FLEET, SLOW_FLEET, Kind, Shape


def _room(name: str) -> Any:
    """A module whose insides are changed, which its types forbid."""
    return importlib.import_module(f"kvxfer.{name}")


aggregator, board, given_offer, load_routes, sink, source = (
    _room(f"connector.{name}")
    for name in ("aggregator", "board", "given_offer", "load_routes", "sink", "source")
)
plan, session, sink_session, source_session = (
    _room(f"transfer.{name}") for name in ("plan", "session", "sink_session", "source_session")
)
shm_direct, stream_machine, tcp_pipe = (
    _room(f"transports.{name}") for name in ("shm_direct", "stream_machine", "tcp_pipe")
)
shared_memory = _room("tensors.shared_memory")
scheduler, engine_request = (_room(f"engine.{name}") for name in ("scheduler", "request"))


@dataclass(frozen=True, slots=True)
class Planted:
    """One fault. ``room``: where it is; ``wire``, ``kinds``, ``settings``, ``fleet``, ``victims``:
    of the storm.

    ``test``: what finds it instead of a storm, as pytest names it.
    """

    plant: Callable[[], None]
    room: str
    wire: str = "shm"
    kinds: tuple[Kind, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    fleet: tuple[Shape, ...] = FLEET
    test: str = ""
    victims: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.plant.__name__


NO_BOARD: Mapping[str, Any] = {"offer_board": False}
BEFORE_THE_LAST_KILLS = 200
"""Of the requests of a storm, 300: its kills go on until the last ones."""


# ------------------------------------------------------------------ protocol


def a_late_release_is_valid() -> None:
    """The source certifies a read of an offer that is over."""
    _swap(
        source_session.OfferSession,
        source_session._release_late,
        lambda offer, event: (offer, [session.SendVerdict(event.consumer, True, None)]),
    )


def a_read_needs_no_verdict() -> None:
    """The sink takes what it has read, and tells the source."""

    def complete(load: Any, route: Any, _: object) -> Any:
        load = load.with_route(msgspec.structs.replace(route, state=session.RouteState.VALID))
        return load, [session.SendRelease(route.source)]

    _swap(sink_session.LoadSession, sink_session._complete, complete)


def an_abort_does_not_wait_for_the_copy() -> None:
    """The load is reported, and its blocks are free, while the copy goes on."""
    fail = sink_session._fail

    def at_once(load: Any, reason: Any) -> Any:
        load, actions = fail(load, reason)
        for route in load.routes:
            if route.state is session.RouteState.DRAINING:
                load = load.with_route(
                    msgspec.structs.replace(route, state=session.RouteState.FAILED)
                )
        return load, [a for a in actions if not isinstance(a, session.StopRead)]

    sink_session._fail = at_once


def a_stopped_read_is_drained_at_once() -> None:
    """The wire says that nothing writes any more while a piece is copied."""

    def stop(self: Any, key: Any) -> None:
        read = self._reads.pop(key, None)
        if read is not None:
            read.stopped = True
            self._copy_thread.cancel(read)
        self._completions.tell(shm_direct.ReadStopped(key))

    shm_direct.ShmSink.stop_read = stop


def tokens_are_not_compared() -> None:
    """The source grants whatever tokens the sink has."""
    make = source_session.OfferSession
    source.OfferSession = lambda nonce, _: make(nonce, None)


def answers_to_others_are_taken() -> None:
    """A sink rank takes what is meant for another life or rank."""
    sink.is_addressed_to = lambda *_: True


def an_offer_that_nobody_takes_is_kept() -> None:
    """A lease never ends."""
    given_offer.GivenOffer.due = lambda *_: []


def a_packed_chunk_leaves_whatever_happened() -> None:
    """The source sends what it has packed of an offer that the engine has taken back meanwhile."""
    source.events_due = lambda _snapshot, _ended, event: [event]


def nobody_is_told_of_an_offer() -> None:
    """A source gives no answer to who asks for an offer by the router's id."""
    source.Source._on_find = lambda *_: None


# ------------------------------------------------------------------ board


def an_end_stays_on_the_board() -> None:
    """An offer that is over is still shown as open."""
    board.Board.end = lambda self, nonce: self._posted.pop(nonce, None)


def an_entry_opens_before_it_is_whole() -> None:
    """The state is written first, then the entry."""
    post = board.Board.post

    def early(self: Any, nonce: bytes, offer: Any) -> bool:
        first, second = board._NONCE.unpack(nonce)
        words = self._words
        slot = next((slot for slot in board._slots(first) if words[slot] == board._OVER), None)
        if slot is None:
            return False
        words[slot + 1], words[slot + 2] = first, second
        words[slot] = board._OPEN
        frame = board._encoder.encode(offer)
        if len(frame) > board.SLOT_NBYTES - board._HEADER_NBYTES:
            words[slot] = board._OVER
            return bool(post(self, nonce, offer))
        begin = slot * 8 + board._HEADER_NBYTES
        self._bytes[begin : begin + len(frame)] = frame
        words[slot + 3] = len(frame)
        self._posted[nonce] = slot
        return True

    board.Board.post = early


def an_entry_is_looked_at_once() -> None:
    """The offer may have ended, and another have its slot, while it was copied."""

    def find(self: Any, nonce: bytes) -> Any:
        slot = self._find(nonce)
        if slot is None:
            return None
        nbytes, begin = self._words[slot + 3], slot * 8 + board._HEADER_NBYTES
        try:
            return board._decoder.decode(bytes(self._bytes[begin : begin + nbytes]))
        except msgspec.MsgspecError:
            return None

    board.BoardView.find = find


def half_a_nonce_is_enough() -> None:
    """The second word of a nonce is not looked at."""

    def is_at(self: Any, slot: int, first: int, _: int) -> bool:
        return bool(self._words[slot + 1] == first and self._words[slot] == board._OPEN)

    board.BoardView._is_at = is_at


# ------------------------------------------------------------------ memory


def a_mapping_is_never_closed() -> None:
    """The pools of engines that have gone stay mapped."""
    kept: list[Any] = []
    shared_memory.MappedPool.close = lambda self: kept.append(self._tensor)


def a_process_leaves_shared_memory() -> None:
    """Each one a file, which nobody removes."""
    begin = source.Source.__init__

    def leave(self: Any, *args: Any, **kwargs: Any) -> None:
        Path(f"/dev/shm/kvxfer-left-{os.getpid()}").write_bytes(bytes(64))
        begin(self, *args, **kwargs)

    source.Source.__init__ = leave


# ------------------------------------------------------------------ plan


def a_token_is_left_out() -> None:
    """The last token of each load does not move."""
    pull_class = load_routes.pull_class

    def short(copied: Any, lo: int, hi: int) -> Any:
        return pull_class(copied, lo, max(lo + 1, hi - 1))

    load_routes.pull_class = short


def heads_begin_at_the_first() -> None:
    """The plan reads a rank's first heads where others are wanted."""
    base = plan.side_base
    plan.side_base = lambda region, _: base(region, region.head_lo)


# ------------------------------------------------------------------ credits


def a_slot_is_credited_before_it_was_read() -> None:
    """The source may write what the sink still reads."""
    came = stream_machine.Reads.came

    def early(self: Any, slot: int) -> Any:
        action = came(self, slot)
        if isinstance(action, stream_machine.Unpack):
            self.slots._due.append(slot)
        return action

    stream_machine.Reads.came = early


def a_slot_is_filled_before_its_credit() -> None:
    """The source writes the next chunk into what the sink has not read yet."""

    def early(self: Any, slot: int, event: Any) -> None:
        stream_machine.SlotTable.move(self, slot, event)
        if event is stream_machine.SlotEvent.ANNOUNCED:
            self.credited((slot,))

    stream_machine.SourceSlots.move = early


def credits_are_lost() -> None:
    """A slot never comes back to the source."""
    take = stream_machine.SinkSlots.take_credits

    def some(self: Any, *, least: int = 1) -> tuple[int, ...]:
        return tuple(take(self, least=least)[1:])

    stream_machine.SinkSlots.take_credits = some


def a_read_ends_with_its_last_announcement() -> None:
    """A load is complete when its chunks have come, before they lie in place."""

    def settle(self: Any, read: Any) -> Any:
        if read.end is None and read.num_arrived < len(read.chunks):
            return [stream_machine.Progress(read.key, read.nbytes)]
        if self._reads.pop(read.key, None) is None:
            return []
        return [read.end or stream_machine.ReadDone(read.key, read.nbytes, certified=True)]

    stream_machine.Reads._settle = settle


# ------------------------------------------------------------------ chunks


def chunks_are_taken_in_the_order_in_which_they_come() -> None:
    """The sink does not look which chunk of a read it is that has come."""
    announced = stream_machine.Reads.announced

    def next_one(self: Any, header: Any) -> Any:
        is_chunk = isinstance(header, stream_machine.ChunkHeader)
        read = self._reads.get(header.key) if is_chunk else None
        if read is not None:
            header = msgspec.structs.replace(header, sequence=read.num_arrived)
        return announced(self, header)

    stream_machine.Reads.announced = next_one


def a_part_that_was_cut_off_counts() -> None:
    """Where the connection ends in the middle of a payload, the sink takes it for whole."""
    receive = tcp_pipe._receive

    def some(sock: Any, into: memoryview) -> None:
        try:
            receive(sock, into)
        except OSError:
            if into.nbytes == tcp_pipe.PART.size:
                raise

    tcp_pipe._receive = some


# ------------------------------------------------------------------ ids


def block_ids_are_turned() -> None:
    """The source grants its blocks in another order."""
    own_ids = source.own_ids

    def turned(*args: Any) -> Any:
        return tuple((*ids[1:], *ids[:1]) for ids in own_ids(*args))

    source.own_ids = turned


def one_rank_speaks_for_all() -> None:
    """The engine takes a load as complete when the first rank has reported it."""
    make = aggregator.KVOutputAggregator.__init__

    def init(self: Any, expected_finished_count: int) -> None:
        make(self, 1)

    aggregator.KVOutputAggregator.__init__ = init


def a_failed_load_counts() -> None:
    """The engine is not told which loads failed."""
    aggregator.KVOutputAggregator._note_failures = lambda *_: None


# ------------------------------------------------------------------ engine


def a_failed_load_ends_the_engine() -> None:
    """Its processes end by themselves; a client notices a second before it can be seen."""

    def fail(*_: object) -> None:
        Finalize(None, time.sleep, args=(1.0,), exitpriority=0)
        raise RuntimeError("a load has failed")

    scheduler.Scheduler._load_failed = fail


def a_failed_load_ends_its_request() -> None:
    """It is thrown away, as if its client had aborted it."""

    def fail(self: Any, request: Any, _: str, events: Any) -> None:
        self._finish(request, engine_request.Status.FINISHED_ABORTED, events)

    scheduler.Scheduler._load_failed = fail


def an_engine_that_is_killed_later_errs() -> None:
    """A handler fails while the storm goes on: the counters of those lives are never asked for."""
    add = source.Source.add

    def err(self: Any, order: Any) -> None:
        add(self, order)
        found = re.match(r"r(\d+)\b", order.request_id)
        if found and int(found[1]) < BEFORE_THE_LAST_KILLS:
            raise RuntimeError("an offer has come")

    source.Source.add = err


def a_prefill_engine_offers_nothing() -> None:
    """One of two: it computes its requests, and gives their KV to nobody."""
    add = scheduler.Scheduler.add

    def plain(self: Any, request: Any) -> None:
        if self._config.engine_id.startswith("p1"):
            request.kv_transfer_params = None
        add(self, request)

    scheduler.Scheduler.add = plain


def a_decode_engine_loads_nothing() -> None:
    """One of two: it computes every prompt itself, and says no word of it."""
    num_external = scheduler.Scheduler._num_external_tokens

    def none(self: Any, request: Any, num_hit: int) -> Any:
        if self._config.engine_id.startswith("d1"):
            return 0, False
        return num_external(self, request, num_hit)

    scheduler.Scheduler._num_external_tokens = none


def _swap(owner: Any, old: object, new: object) -> None:
    """In a table of states."""
    owner.table = {key: new if each is old else each for key, each in owner.table.items()}


_BOARD_TESTS = "tests/connector/test_board.py::"

PLANTED: Sequence[Planted] = (
    Planted(
        a_late_release_is_valid,
        "protocol",
        test="tests/transfer/test_session.py",
    ),
    Planted(a_read_needs_no_verdict, "protocol", test="tests/transfer/test_session.py"),
    Planted(an_abort_does_not_wait_for_the_copy, "protocol", fleet=SLOW_FLEET),
    Planted(a_stopped_read_is_drained_at_once, "protocol", fleet=SLOW_FLEET),
    Planted(tokens_are_not_compared, "protocol", wire="zmq"),
    Planted(an_offer_that_nobody_takes_is_kept, "protocol"),
    Planted(
        answers_to_others_are_taken,
        "protocol",
        test="tests/connector/test_late_messages.py"
        "::test_answers_to_another_life_or_rank_are_counted_and_change_nothing",
    ),
    Planted(
        a_packed_chunk_leaves_whatever_happened,
        "protocol",
        test="tests/connector/test_ends.py"
        "::test_a_chunk_that_was_packed_while_the_source_was_stuck_is_not_sent",
    ),
    Planted(nobody_is_told_of_an_offer, "protocol"),
    Planted(an_end_stays_on_the_board, "board", kinds=(Kind.RESET,)),
    Planted(
        an_entry_opens_before_it_is_whole,
        "board",
        test=f"{_BOARD_TESTS}test_an_entry_is_whole_whenever_it_is_open",
    ),
    Planted(
        an_entry_is_looked_at_once,
        "board",
        test=f"{_BOARD_TESTS}test_an_entry_that_changes_hands_while_it_is_copied_is_not_taken",
    ),
    Planted(
        half_a_nonce_is_enough, "board", test=f"{_BOARD_TESTS}test_both_words_of_a_nonce_count"
    ),
    Planted(
        a_mapping_is_never_closed,
        "memory",
        kinds=(Kind.KILL_SCHEDULER, Kind.OTHER_LIFE),
        victims=("p0", "p1"),  # where the sinks die, too, their mappings go with them
    ),
    Planted(a_process_leaves_shared_memory, "memory"),
    Planted(a_token_is_left_out, "plan"),
    Planted(heads_begin_at_the_first, "plan", wire="zmq"),
    Planted(a_slot_is_credited_before_it_was_read, "credits", wire="zmq"),
    Planted(a_slot_is_filled_before_its_credit, "credits", wire="zmq"),
    Planted(credits_are_lost, "credits", wire="zmq"),
    Planted(a_read_ends_with_its_last_announcement, "credits", wire="zmq"),
    Planted(
        chunks_are_taken_in_the_order_in_which_they_come,
        "chunks",
        wire="zmq",
        kinds=(Kind.MANGLE_CHUNKS,),
    ),
    Planted(
        a_part_that_was_cut_off_counts,
        "chunks",
        test="tests/transports/test_tcp_pipe.py::test_a_part_that_is_cut_off_brings_nothing",
    ),
    Planted(block_ids_are_turned, "ids"),
    Planted(one_rank_speaks_for_all, "ids", kinds=(Kind.STOP,)),
    Planted(a_failed_load_counts, "ids", kinds=(Kind.RESET,), settings=NO_BOARD),
    Planted(a_failed_load_ends_the_engine, "engine", kinds=(Kind.RESET,), settings=NO_BOARD),
    Planted(a_failed_load_ends_its_request, "engine", kinds=(Kind.RESET,), settings=NO_BOARD),
    Planted(
        an_engine_that_is_killed_later_errs,
        "engine",
        kinds=(Kind.KILL_SCHEDULER,),
        victims=("p0", "p1"),
    ),
    Planted(a_prefill_engine_offers_nothing, "engine"),
    Planted(a_decode_engine_loads_nothing, "engine"),
)
BY_NAME = {each.name: each for each in PLANTED}


def pytest_configure() -> None:
    """As a plugin of pytest: plants the fault that the environment names."""
    BY_NAME[os.environ["PLANTED_FAULT"]].plant()
