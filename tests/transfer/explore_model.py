"""What may happen next in a world of one source rank and its sink ranks: see
:mod:`tests.transfer.explore`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvxfer.transfer.plan import ALL
from kvxfer.transfer.session import (
    Abort,
    Break,
    ChunkPacked,
    ClaimantLost,
    DeadlinePassed,
    GrantArrived,
    Grown,
    OfferState,
    ReadCompleted,
    ReadDrained,
    ReadFailed,
    ReadyCompleted,
    ReleaseArrived,
    RetryDue,
    RouteState,
    SinkEvent,
    SourceEvent,
    Start,
    StreamDrained,
    StreamSent,
    VerdictArrived,
    Wire,
)
from kvxfer.transfer.wire import Consumer, Release, Verdict
from tests.transfer.explore_sessions import (
    NUM_CHUNKS,
    REASON,
    SOURCE,
    TOKENS,
    Scenario,
    Sessions,
    SourceStep,
)

UNBORN, DEAD = -1, -2
GOOD, BAD = 1, 2
BAD_BITS = 8
OFF, RUNNING, STOPPING, OVER = range(4)


class SinkWorld(NamedTuple):
    """One sink rank and, on stream wires, its stream at the source."""

    load: int = UNBORN
    # in flight: quality at the begin, and 4 times the sequence, or direct 4 * (8 * from + to) spans
    reads: tuple[int, ...] = ()
    # bitmap of spans, or of chunks on streams, that lie here, and BAD_BITS up of those that are bad
    dest: int = 0
    has_reported: bool = False
    stream: int = OFF
    stream_open: int = 0  # spans that the stream was told to be open
    sequence: int = 0
    pack: int = 0  # quality at the begin of the running pack


class World(NamedTuple):
    generation: int
    ready: tuple[int, ...]  # of offer k: how many spans' events have fired
    offers: tuple[int, ...]
    net: int
    sinks: tuple[SinkWorld, ...]
    shown: int = 0  # bit k: the board says that offer k is open (with is_board_late)
    ended: int = 0  # bit k: the engine has ended offer k in memory


class Move(NamedTuple):
    """``is_local``: needs neither a message nor luck: timers and the ends of what is running."""

    label: str
    world: World
    violation: str | None = None
    is_local: bool = False


class Model:
    """The moves of one scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.sessions = Sessions(scenario)
        # Between correct peers no event may meet a state that does not know it.
        self._not_allowed = None if scenario.allows_protocol_errors else "protocol error"
        of = self.sessions.event_id
        self._ready = [of(Grown(n)) for n in range(1, scenario.num_spans)] + [of(ReadyCompleted())]
        self._break = of(Break(REASON))
        self._deadline, self._abort = of(DeadlinePassed(SOURCE)), of(Abort(REASON))
        refs, bit = self.sessions.refs, self.sessions.bit
        self._both_verdicts = [
            bit(Verdict(refs[spec.offer], consumer, True))
            | bit(Verdict(refs[spec.offer], consumer, False, REASON))
            for spec in scenario.sinks
            for consumer in [Consumer(spec.incarnation, spec.rank)]
        ]
        self._retry, self._drained = of(RetryDue(SOURCE)), of(ReadDrained(SOURCE))
        self._seen_open = of(GrantArrived(SOURCE)), of(VerdictArrived(SOURCE, True, None))

    # Chunks are not control messages: bit by (sink, sequence, quality), above all message bits.

    def _chunk_bit(self, sink: int, sequence: int, quality: int) -> int:
        return 1 << (self.sessions.chunk_base + (sink * NUM_CHUNKS + sequence) * 2 + quality - 1)

    def _chunk_mask(self, sink: int) -> int:
        num_bits = NUM_CHUNKS * 2
        return ((1 << num_bits) - 1) << (self.sessions.chunk_base + sink * num_bits)

    # -------------------------------------------------------------- applying steps

    def _at_source(self, world: World, k: int, event: int) -> tuple[World, str | None]:
        if k >= len(world.offers):
            return world, None
        before = world.offers[k]
        if self.scenario.keeps_releases and self._is_kept_back(world, event):
            return world, None
        step = self.sessions.source_step(before, event, is_ended=bool(world.ended & 1 << k))
        if step is None:
            return world, self._not_allowed
        if step.is_quiet(before, world.net):
            return world, None
        offers, sinks = world.offers, world.sinks
        if step.offer != before:
            offers = (*offers[:k], step.offer, *offers[k + 1 :])
        for i in step.starts:
            if sinks[i].stream != OFF:
                return world, "a second stream was started for one consumer"
            sinks = _with(sinks, i, sinks[i]._replace(stream=RUNNING))
        for i in step.grows:
            num_open = self._num_open(step.offer)
            sinks = _with(sinks, i, sinks[i]._replace(stream_open=num_open))
        for i in step.stops:
            if sinks[i].stream == RUNNING:  # it may have ended just before
                sinks = _with(sinks, i, sinks[i]._replace(stream=STOPPING))
        net = world.net | step.sent
        shown = world.shown
        if self.scenario.is_board_late and self._is_open(step.offer):
            shown |= 1 << k
        # Not by _replace, which takes four times as long, and millions of worlds are made here
        world = World(world.generation, world.ready, offers, net, sinks, shown, world.ended)
        for both in self._both_verdicts:
            if net & both == both:
                return world, "two different verdicts for one consumer"
        return world, self._check_sent(world, k, before, step) if step.num_finished else None

    def _is_kept_back(self, world: World, event: int) -> bool:
        """The connector keeps a Release back until the stream of its consumer is over; the network
        brings it again.
        """
        what = self.sessions.event(event)
        return isinstance(what, ReleaseArrived) and any(
            sink.stream == RUNNING and consumer == what.consumer
            for sink, consumer in zip(world.sinks, self.sessions.consumers, strict=True)
        )

    def _tell_source(self, world: World, k: int, event: SourceEvent) -> tuple[World, str | None]:
        return self._at_source(world, k, self.sessions.event_id(event))

    def _tell_sink(self, world: World, i: int, event: SinkEvent) -> tuple[World, str | None]:
        return self._at_sink(world, i, self.sessions.event_id(event))

    def _check_sent(self, world: World, k: int, before: int, step: SourceStep) -> str | None:
        if step.num_finished > 1 or self.sessions.snapshots[before].is_finished:
            return "finished_sending was reported twice"
        mine = [i for i, s in enumerate(self.scenario.sinks) if s.offer == k]
        if any(world.sinks[i].stream in (RUNNING, STOPPING) for i in mine):
            return "finished_sending while a pack still reads the blocks"
        if not step.is_done:
            return None
        if world.ready[k] < self.scenario.num_spans:
            return "the offer is done while it is computed"
        for engine in {self.scenario.sinks[i].incarnation for i in mine}:
            ranks = [i for i in mine if self.scenario.sinks[i].incarnation == engine]
            if all(self._has_taken(world, i) for i in ranks):
                return None
        return "the offer is done although no engine has all of its ranks"

    def _has_taken(self, world: World, i: int) -> bool:
        spec = self.scenario.sinks[i]
        if self.scenario.wire is Wire.STREAM:
            return world.sinks[i].stream == OVER and world.sinks[i].sequence == self._num_chunks(i)
        release = Release(self.sessions.refs[spec.offer], Consumer(spec.incarnation, spec.rank))
        return bool(world.net & self.sessions.bit(release))

    def _at_sink(self, world: World, i: int, event: int) -> tuple[World, str | None]:
        sink = world.sinks[i]
        if sink.load < 0:
            return world, None
        step = self.sessions.sink_step(i, sink.load, event)
        if step is None:
            return world, self._not_allowed
        if step.is_quiet(sink.load, world.net):
            return world, None
        before, reads = sink.has_reported, sink.reads
        if step.reads and self.scenario.wire is Wire.DIRECT:
            begun = [4 * (8 * lo + hi) + self._quality(world, i, hi) for lo, hi in step.reads]
            reads = tuple(sorted((*reads, *begun)))
        sink = SinkWorld(
            step.load,
            reads,
            sink.dest,
            before or step.num_finished > 0,
            sink.stream,
            sink.stream_open,
            sink.sequence,
            sink.pack,
        )
        violation = None
        if step.num_finished > 1 or (step.num_finished and before):
            violation = "finished_recving was reported twice"
        elif reads and sink.has_reported:
            violation = "finished_recving while a read still writes the destination blocks"
        elif step.num_finished and step.is_valid and not self._is_whole(i, sink):
            violation = "accepted KV that is stale, torn or partial"
        net = world.net | step.sent
        if self.scenario.wire is Wire.STREAM and not self.sessions.is_reading[step.load]:
            # Chunks of a read that is over are never looked at: worlds that differ in them are one.
            net &= ~self._chunk_mask(i)
            if not self.sessions.is_releasing[step.load]:
                sink = sink._replace(dest=0)
        return _with_sink(world, i, sink, net), violation

    def _is_whole(self, i: int, sink: SinkWorld) -> bool:
        is_direct = self.scenario.wire is Wire.DIRECT
        num = self.sessions.num_wanted(i) if is_direct else self._num_chunks(i)
        return sink.dest == (1 << num) - 1

    def _quality(self, world: World, i: int, num_spans: int) -> int:
        """Of the blocks with the first spans of what this sink wants."""
        spec = self.scenario.sinks[i]
        k = spec.offer
        is_whole = world.generation in (2 * k, 2 * k + 1) and world.ready[k] >= num_spans
        return GOOD if is_whole and spec.digest == TOKENS else BAD

    def _num_chunks(self, i: int) -> int:
        return NUM_CHUNKS * self.sessions.num_wanted(i) // self.scenario.num_spans

    def _spans_to(self, sequence: int) -> int:
        """How many spans have to be open for this chunk."""
        return sequence * self.scenario.num_spans // NUM_CHUNKS + 1

    def _num_open(self, offer: int) -> int:
        snapshot = self.sessions.snapshots[offer]
        is_growing = snapshot.state is OfferState.PENDING
        return snapshot.open_tokens if is_growing else self.scenario.num_spans

    # -------------------------------------------------------------- moves

    def initial(self) -> World:
        """Offer 0 is pending; every sink that follows nobody has sent its Pull."""
        scenario = self.scenario
        offer = self.sessions.new_offer(0)
        sinks = tuple(SinkWorld() for _ in scenario.sinks)
        world = World(0, (0,) * scenario.num_offers, (offer,), 0, sinks)
        for i, spec in enumerate(scenario.sinks):
            if spec.follows is None and spec.offer == 0:
                world = self._start(world, i)
        return world

    def _start(self, world: World, i: int) -> World:
        sink = world.sinks[i]._replace(load=self.sessions.initial_load)
        return self._tell_sink(_with_sink(world, i, sink), i, Start())[0]

    def moves(self, world: World) -> Iterator[Move]:
        """Everything that may happen next. Local moves come first, those that end something before
        timers.
        """
        for i, sink in enumerate(world.sinks):
            if sink.stream in (RUNNING, STOPPING):
                yield from self._stream_moves(world, i, sink)
            if sink.load >= 0:
                yield from self._read_moves(world, i, sink)
            if sink.load >= 0 and self.scenario.has_board:
                yield from self._looks(world, i, sink)
        yield from self._timers(world)
        yield from self._engine_moves(world)
        net = world.net & ((1 << self.sessions.chunk_base) - 1)
        while net:
            lowest = net & -net
            label, receivers = self.sessions.deliveries[lowest.bit_length() - 1]
            for to_sink, index, event in receivers:
                step = self._at_sink if to_sink else self._at_source
                after, violation = step(world, index, event)
                if after is not world or violation is not None:
                    yield Move(label, after, violation)
            net ^= lowest

    def _timers(self, world: World) -> Iterator[Move]:
        for k, offer in enumerate(world.offers):
            after, violation = self._at_source(world, k, self._break)
            if after is not world or violation is not None:
                is_local = not self.sessions.snapshots[offer].is_finished
                yield Move(f"break offer {k}", after, violation, is_local)
        for i, sink in enumerate(world.sinks):
            if sink.load >= 0 and not sink.has_reported:
                after, violation = self._at_sink(world, i, self._deadline)
                yield Move(f"deadline at sink {i}", after, violation, True)
                same, violation = self._at_sink(world, i, self._abort)
                if violation is not None or same != after:
                    yield Move(f"abort at sink {i}", same, violation)
                after, violation = self._at_sink(world, i, self._retry)
                if after is not world or violation is not None:
                    yield Move(f"retry at sink {i}", after, violation)

    def _engine_moves(self, world: World) -> Iterator[Move]:
        for k, number in enumerate(world.offers):
            offer = self.sessions.snapshots[number]
            if (span := world.ready[k]) < self.scenario.num_spans:
                is_last = span + 1 == self.scenario.num_spans
                generation = world.generation + (is_last and world.generation == 2 * k)
                ready = (*world.ready[:k], span + 1, *world.ready[k + 1 :])
                after = world._replace(generation=generation, ready=ready)
                after, violation = self._at_source(after, k, self._ready[span])
                yield Move(f"span {span} of offer {k} is ready", after, violation)
            if self.scenario.may_end_first and not (world.ended & 1 << k or offer.is_finished):
                yield Move(f"the engine ends offer {k}", world._replace(ended=world.ended | 1 << k))
            is_free = offer.is_finished or offer.state is OfferState.BROKEN
            is_free |= bool(world.ended & 1 << k)
            if is_free and world.generation in (2 * k, 2 * k + 1):
                yield Move(f"blocks of offer {k} are reused", self._reuse(world, k))
            if self.scenario.may_lose_claimants:
                for life in sorted(offer.claims):
                    after, violation = self._tell_source(world, k, ClaimantLost(life))
                    yield Move(f"claimant {life!r} is lost", after, violation)
            if self.scenario.may_forge_releases:
                for i, consumer in enumerate(self.sessions.consumers):
                    if self.scenario.sinks[i].offer == k and consumer not in offer.shares:
                        after, violation = self._tell_source(world, k, ReleaseArrived(consumer))
                        yield Move(f"a Release of sink {i} is forged", after, violation)
        for i, spec in enumerate(self.scenario.sinks):
            before = spec.follows
            if before is None or world.sinks[i].load != UNBORN:
                continue
            if world.sinks[before].load >= 0:
                # Its stream goes on at the source.
                dead = world.sinks[before]._replace(load=DEAD, reads=(), dest=0, has_reported=True)
                after = world._replace(sinks=_with(world.sinks, before, dead))
                yield Move(f"sink {before} is killed, {i} begins", self._start(after, i))

    def _reuse(self, world: World, k: int) -> World:
        world = world._replace(generation=2 * k + 2)
        if k + 1 < self.scenario.num_offers and len(world.offers) == k + 1:
            fresh = self.sessions.new_offer(k + 1)
            world = world._replace(offers=(*world.offers, fresh))
            for i, spec in enumerate(self.scenario.sinks):
                if spec.offer == k + 1 and spec.follows is None:
                    world = self._start(world, i)
        return world

    def _stream_moves(self, world: World, i: int, sink: SinkWorld) -> Iterator[Move]:
        k, consumer = self.scenario.sinks[i].offer, self.sessions.consumers[i]
        if sink.pack:
            num_spans = self._spans_to(sink.sequence)
            is_good = sink.pack == GOOD and self._quality(world, i, num_spans) == GOOD
            rest = sink._replace(pack=0, sequence=sink.sequence + 1)
            after = _with_sink(world, i, rest)
            event = self.sessions.event_id(ChunkPacked(consumer, sink.sequence))
            step = self.sessions.source_step(
                world.offers[k], event, is_ended=bool(world.ended & 1 << k)
            )
            after, violation = self._at_source(after, k, event)  # it may take in the engine's end
            is_wanted = sink.load >= 0 and self.sessions.is_reading[sink.load]
            if step is not None and step.sends_chunk and is_wanted:
                bit = self._chunk_bit(i, sink.sequence, GOOD if is_good else BAD)
                after = after._replace(net=after.net | bit)
            yield Move(f"chunk {sink.sequence} for sink {i} is packed", after, violation, True)
            return
        over = _with_sink(world, i, sink._replace(stream=OVER))
        if sink.stream == STOPPING:
            after, violation = self._tell_source(over, k, StreamDrained(consumer))
            yield Move(f"stream of sink {i} is drained", after, violation, True)
        if sink.sequence == self._num_chunks(i):
            after, violation = self._tell_source(over, k, StreamSent(consumer))
            yield Move(f"stream of sink {i} is sent", after, violation, True)
        elif sink.stream == RUNNING and self._may_pack(sink):
            busy = sink._replace(pack=self._quality(world, i, self._spans_to(sink.sequence)))
            after = _with_sink(world, i, busy)
            yield Move(f"chunk {sink.sequence} for sink {i}: the pack begins", after)
        if sink.stream == RUNNING and self.scenario.may_fail_reads:
            after, violation = self._tell_source(over, k, StreamDrained(consumer))
            yield Move(f"wire of sink {i} fails at the source", after, violation)

    def _may_pack(self, sink: SinkWorld) -> bool:
        is_open = self._spans_to(sink.sequence) <= sink.stream_open
        return is_open or not self.scenario.heeds_open

    def _read_moves(self, world: World, i: int, sink: SinkWorld) -> Iterator[Move]:
        state = self.sessions.loads[sink.load].routes[0].state
        for position, read in enumerate(sink.reads):
            reads = sink.reads[:position] + sink.reads[position + 1 :]
            yield self._end_read(world, i, sink._replace(reads=reads), read, state)
        if state is RouteState.DRAINING and not sink.reads:
            after, violation = self._at_sink(world, i, self._drained)
            yield Move(f"read of sink {i} is drained", after, violation, True)
        is_reading = state in (RouteState.ASKED, RouteState.READING)
        if is_reading and self.scenario.may_fail_reads and not sink.reads:
            after, violation = self._tell_sink(world, i, ReadFailed(SOURCE, REASON))
            yield Move(f"read of sink {i} fails", after, violation)
        if is_reading and not sink.reads and self.scenario.wire is Wire.STREAM:
            for sequence in range(self._num_chunks(i)):
                for quality in (GOOD, BAD):
                    has_come = world.net & self._chunk_bit(i, sequence, quality)
                    if has_come and not sink.dest & 1 << sequence:
                        yield self._begin_scatter(world, i, 4 * sequence + quality, state)

    def _is_open(self, offer: int) -> bool:
        return self.sessions.snapshots[offer].state is OfferState.OPEN

    def _is_shown(self, world: World, k: int) -> bool:
        if world.ended & 1 << k and not self.scenario.shows_ended:
            return False
        return self.sessions.snapshots[world.offers[k]].state in self.scenario.board_states

    def _looks(self, world: World, i: int, sink: SinkWorld) -> Iterator[Move]:
        """What a look at the board tells a sink: it may look at any time, or never."""
        spec = self.scenario.sinks[i]
        k = spec.offer
        if k >= len(world.offers):
            return
        is_late = self.scenario.is_board_late and world.shown & 1 << k
        if is_late and not self._is_shown(world, k):
            yield Move(
                f"the board forgets offer {k}", world._replace(shown=world.shown & ~(1 << k))
            )
        elif not self._is_shown(world, k):
            return
        route = self.sessions.loads[sink.load].routes[0]
        state = route.state
        grant, verdict = self._seen_open
        asks = state is RouteState.ASKED or (
            state is RouteState.READING and route.open_tokens < ALL
        )
        digest = self.sessions.snapshots[world.offers[k]].digest
        if asks and digest in (None, spec.digest):
            after, violation = self._at_sink(world, i, grant)
            yield Move(f"sink {i} sees offer {k} and reads", after, violation)
        if state is RouteState.RELEASING:
            after, violation = self._at_sink(world, i, verdict)
            yield Move(f"sink {i} sees offer {k} open still", after, violation)

    def _begin_scatter(self, world: World, i: int, chunk: int, state: RouteState) -> Move:
        sink = world.sinks[i]
        if not self.scenario.two_step_scatter:
            return self._end_read(world, i, sink, chunk, state)._replace(is_local=False)
        sink = sink._replace(reads=(chunk,))
        after = _with_sink(world, i, sink)
        return Move(f"chunk {chunk // 4} reaches sink {i}", after)

    def _end_read(
        self, world: World, i: int, sink: SinkWorld, read: int, state: RouteState
    ) -> Move:
        """One read, or the scatter of one chunk, ends; ``sink`` is without it already."""
        if self.scenario.wire is Wire.DIRECT:
            lo, hi = divmod(read // 4, 8)
            is_good = read % 4 == GOOD and self._quality(world, i, hi) == GOOD
            here = (1 << hi) - (1 << lo)
            bits = here if is_good else here << BAD_BITS
            sink = sink._replace(dest=sink.dest & ~(here | here << BAD_BITS) | bits)
            is_complete = True
            label = f"read of sink {i} ends"
        else:
            # The bitmap makes a second copy of a chunk invisible.
            pair = self._chunk_bit(i, read // 4, GOOD) | self._chunk_bit(i, read // 4, BAD)
            world = world._replace(net=world.net & ~pair)
            bad = 0 if read % 4 == GOOD else 1 << BAD_BITS
            label = f"chunk {read // 4} is in place at sink {i}"
            sink = sink._replace(dest=sink.dest | 1 << read // 4 | bad)
            every = (1 << self._num_chunks(i)) - 1
            is_complete = sink.dest & every == every
        after = _with_sink(world, i, sink)
        if state is RouteState.DRAINING:
            # Either order of the transport's two answers; both end the drain.
            event = self._drained
        elif is_complete:
            is_certified = self.scenario.wire is Wire.STREAM
            done = ReadCompleted(SOURCE, is_certified, self.scenario.verifies)
            event = self.sessions.event_id(done)
        else:
            return Move(label, after, None, True)
        after, violation = self._at_sink(after, i, event)
        return Move(label, after, violation, True)

    # -------------------------------------------------------------- ends

    def is_over(self, world: World) -> bool:
        """Every offer and every load has been reported."""
        return all(self.sessions.snapshots[offer].is_finished for offer in world.offers) and all(
            sink.has_reported or sink.load < 0 for sink in world.sinks
        )

    def is_accepted(self, world: World) -> bool:
        """Some engine has accepted with all its ranks."""
        engines: dict[bytes, bool] = {}
        for spec, sink in zip(self.scenario.sinks, world.sinks, strict=True):
            load = self.sessions.loads[sink.load] if sink.load >= 0 else None
            is_valid = load is not None and load.is_finished and load.failure is None
            engines[spec.incarnation] = engines.get(spec.incarnation, True) and is_valid
        return any(engines.values())


def _with(sinks: tuple[SinkWorld, ...], i: int, sink: SinkWorld) -> tuple[SinkWorld, ...]:
    return (*sinks[:i], sink, *sinks[i + 1 :])


def _with_sink(world: World, i: int, sink: SinkWorld, net: int | None = None) -> World:
    """``net``: None: as it is."""
    return World(
        world.generation,
        world.ready,
        world.offers,
        world.net if net is None else net,
        _with(world.sinks, i, sink),
        world.shown,
        world.ended,
    )
