"""The sink end of a stream wire: checks each announced chunk, and unpacks it.

A chunk is taken if its transfer is expected from that source, its sequence has not come before and
its size is the one that both sides derived. Everything else is dropped and counted; the credit of
its slot goes back all the same.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from operator import attrgetter

import zmq

from kvxfer.config import Config
from kvxfer.errors import ProtocolError, TransportUnavailable
from kvxfer.tensors.strided_index import all_side_ids
from kvxfer.transfer.chunks import chunk_list
from kvxfer.transfer.costs import Staging, StagingBounds
from kvxfer.transfer.manifest import RankManifest
from kvxfer.transfer.plan import CopyClass
from kvxfer.transfer.wire import Reason
from kvxfer.transports.base import (
    LocalMemory,
    PeerGone,
    Progress,
    Readable,
    ReadBroke,
    ReadDone,
    ReadRequest,
    ReadStopped,
    ReceivingSink,
    SinkCompletion,
    TransferKey,
    Trial,
    Wake,
    kind_of,
)
from kvxfer.transports.channel import Context, Dealer, Socket
from kvxfer.transports.copy_thread import Copier, CopyEnd
from kvxfer.transports.guard import nearest_endpoint
from kvxfer.transports.native_peers import check_own_devices, needs_own_user, refusal
from kvxfer.transports.parallel import most_further, num_streams
from kvxfer.transports.pipe import MakePipe, PipeBroken, Slots, staging_bounds
from kvxfer.transports.stream_link import Link, Terms
from kvxfer.transports.stream_machine import Cancel, Free, SinkAction, SinkSlot, Unpack
from kvxfer.transports.stream_packing import ChunkJob, Ids, Packer, make_packer
from kvxfer.transports.stream_trial import take_trial
from kvxfer.transports.stream_wire import (
    Attached,
    ChunkHeader,
    Credit,
    Expect,
    Header,
    Refused,
    Streams,
    data_endpoint_of,
    decode_to_sink,
    make_poller,
)
from kvxfer.transports.wake_up import Completions, WakeUp

_log = logging.getLogger("kvxfer.transports")

USUAL_SLOTS = Slots(8, 4 << 20)
"""Of a connection whose wire nobody has measured."""
TURN_S = 500e-6
"""As long as chunks follow each other the IO thread looks at its other work only so often: to come
round takes 0.1 ms, and a chunk of 64 MiB between two GPUs 0.2.
"""
_MAX_DETAIL = 300


@dataclass(frozen=True, slots=True)
class _Reading:
    """A read that has not ended. ``sink_ids``: of each class."""

    request: ReadRequest
    link: Link
    sink_ids: Sequence[Ids]


class StreamSink(ReceivingSink):
    """Takes chunks from the sources that it is attached to. ``packer``: replaces the packer that
    suits the memory.
    """

    uses_unix_sockets = True
    """Whether it takes a source's Unix socket where there is one; False to measure or test TCP."""

    def __init__(
        self,
        make_pipe: MakePipe,
        memory: LocalMemory,
        config: Config,
        copy_thread: Copier,
        wake: Wake,
        context: Context,
        packer: Packer | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._make_pipe, self._memory, self._config = make_pipe, memory, config
        self._context, self._wake = context, wake
        self._links: dict[str, Link] = {}
        self._watch()
        with ExitStack() as undo:
            self._packer = packer or make_packer(memory, config, copy_thread, wake)
            undo.callback(self._packer.close)
            self._pipe = make_pipe(memory, config, wake)
            undo.pop_all()
        self._completions: Completions[SinkCompletion] = Completions(wake)
        self._reading: dict[TransferKey, _Reading] = {}
        self._unfreed: set[Link] = set()
        """Those that have slots of reads whose ends are told now."""
        self._owing: dict[Link, None] = {}
        """Those that have freed slots since credits were sent."""
        self._num_jobs = 0
        self.name = self._pipe.name
        self._num_streams = num_streams(config) if self._pipe.has_streams else 1

    # -- meeting a source rank

    def trial(
        self, source: RankManifest, timeout_s: float, classes: Sequence[CopyClass] = ()
    ) -> Trial:
        """Ask for a few messages over a pipe of its own, in each of its ways."""
        self._check_may_meet(data_endpoint_of(source, self._config, self.name))  # before a pipe
        with (
            closing(WakeUp()) as wake,
            closing(self._make_pipe(self._memory, self._config, wake)) as pipe,
        ):
            trial = take_trial(
                pipe,
                source,
                self._device_types(source),
                self._config,
                self._context,
                wake,
                timeout_s,
                uses_unix_sockets=self.uses_unix_sockets,
            )
        self._packer.prepare(classes)
        return trial

    def staging_bounds(self, source: RankManifest) -> StagingBounds:
        number = max(self._num_streams, self._pipe.num_sockets)
        bounds = staging_bounds(self._config, self._pipe, self._device_types(source), number)
        return replace(bounds, num_streams=self._num_streams)

    def _device_types(self, source: RankManifest) -> set[str]:
        return {self._memory.device.type, *(kind_of(each.device) for each in source.memories)}

    def attach(self, source: RankManifest, staging: Staging | None = None) -> None:
        """Connect to the rank; the connection is made in the background.

        Another data endpoint under the same control endpoint takes the place of the one that is
        connected, whose reads break: a control endpoint is what a peer says of itself, so reads
        look at the data endpoint too.
        """
        endpoint = data_endpoint_of(source, self._config, self.name)
        known = self._links.get(source.control_endpoint)
        if known is not None and known.endpoint == endpoint:
            return
        self._check_may_meet(endpoint)
        self.detach(source.control_endpoint)
        config = self._config
        staging = staging or Staging(
            config.staging_slots or USUAL_SLOTS.num_slots,
            config.chunk_nbytes or USUAL_SLOTS.slot_nbytes,
            config.chunk_nbytes,
        )
        slots = Slots(staging.num_slots, staging.slot_nbytes)
        num_before = sum(link.num_streams for link in self._links.values())
        room = max(0, most_further() - (num_before - len(self._links)))
        link = Link(
            self._pipe,
            Terms(slots, staging.way, min(self._num_streams, 1 + room)),
            source,
            config,
            self._context,
            uses_unix_sockets=self.uses_unix_sockets,
            num_before=num_before,
        )
        self._links[link.control_endpoint] = link
        self._watch()
        self._pipe.progress()

    def _check_may_meet(self, endpoint: str) -> None:
        """Raises TransportUnavailable for a source that the pipe's library may not read."""
        if not needs_own_user(self._pipe, self._config):
            if self._pipe.reads_peers:
                check_own_devices(self.name, self._config, endpoint)
            return
        if not self.uses_unix_sockets or nearest_endpoint(endpoint) == endpoint:
            raise TransportUnavailable(refusal(self.name))

    def detach(self, control_endpoint: str) -> None:
        link = self._links.get(control_endpoint)
        if link is not None:
            self._drop_link(link, "the source rank was detached")

    # -- reads

    def submit_expect(self, request: ReadRequest) -> None:
        key = request.key
        if key in self._reading:
            raise ValueError(f"read: expected a key that is not in use, got {key} twice")
        link = self._links.get(request.source.control_endpoint)
        if link is None or link.endpoint != request.source.data_endpoints.get(self.name):
            self._completions.tell(
                ReadBroke(key, Reason.PEER_LOST, "the source rank is not attached")
            )
            return
        chunks = chunk_list(request.pull_classes, request.chunk_nbytes, request.part_tokens)
        if not chunks:
            self._completions.tell(ReadDone(key, 0, certified=True))
            return
        largest_nbytes = max(chunk.nbytes for chunk in chunks)
        if largest_nbytes > link.slots.slot_nbytes:
            detail = (
                f"chunk: expected at most {link.slots.slot_nbytes} bytes, got {largest_nbytes}; "
                "raise chunk_nbytes"
            )
            self._completions.tell(ReadBroke(key, Reason.PLAN, detail))
            return
        ids = all_side_ids(map(attrgetter("sink"), request.classes), request.sink_ids)
        self._reading[key] = _Reading(request, link, ids)
        link.reads.begin(key, chunks)
        self._say(link, Expect(key.nonce, key.incarnation, key.sink_rank))

    def stop_read(self, key: TransferKey) -> None:
        """No more chunks are taken; what is being unpacked is the last of it."""
        reading = self._reading.get(key)
        if reading is None:
            self._completions.tell(ReadStopped(key))
        else:
            self._perform(reading.link, reading.link.reads.stop(key))
            self._wake()

    # -- the IO thread's turn

    def pollables(self) -> Sequence[Readable]:
        return (*self._sockets, *self._pipe.fds()) if self._pipe.is_driven else self._sockets

    @property
    def is_idle(self) -> bool:
        if self._num_jobs or self._completions or self._unfreed or self._owing:
            return False
        is_met = self._links or self._reading
        return not self._pipe.is_driven or (not is_met and self._pipe.is_idle)

    def poll(self) -> list[SinkCompletion]:
        unfreed, self._unfreed = self._unfreed, set()
        for link in unfreed:  # of the poll before: what ends a read now has to be told first
            self._perform(link, link.reads.free_placed())
        if not self._packer.copies_frames:  # else it gets first what it can copy meanwhile
            self._take_unpacked()
        for socket, _ in self._poller.poll(0):
            found = self._by_socket.get(socket)
            if found is None:  # dropped on the way
                continue
            link, dealer = found
            if socket is dealer.socket:
                self._receive(link, dealer)
            elif dealer.why_ended() is not None:
                if link.drop_stream(dealer):
                    self._watch()
                else:
                    self._lose_link(link, "the connection to the source rank ended")
            elif link.join_next():
                self._watch()
        until_s = time.perf_counter() + TURN_S
        while self._turn() and time.perf_counter() < until_s:
            pass
        return self._completions.take()

    def _turn(self) -> bool:
        """What the pipe has brought, and what was unpacked meanwhile. True if it was some of a read
        and not the end of any: then more of it follows soon.
        """
        num_before, has_freed, is_driven = len(self._completions), True, self._pipe.is_driven
        while has_freed:  # what is freed is posted again, which is progress, too
            if is_driven:
                self._pipe.progress()
            has_freed = False
            for link in list(self._links.values()):
                if is_driven:
                    self._hear(link)
                if link.table.num[SinkSlot.AWAITED]:
                    has_freed |= self._collect(link)
        self._take_unpacked()
        return {*map(type, self._completions[num_before:])} == {Progress}

    def inspect(self) -> None:
        for link in list(self._links.values()):
            try:
                for dealer in link.dealers:
                    dealer.inspect()
            except ProtocolError as exc:
                self._lose_link(link, str(exc))
        self._owing = dict.fromkeys(self._links.values())
        self._send_credits(holds=False)  # also while an offer that grows stands still
        self.staging_nbytes = sum(link.slots.nbytes for link in self._links.values())

    def close(self) -> None:
        for key in list(self._reading):
            self.stop_read(key)
        while self._reading:
            self._on_unpacked(self._packer.take())
        for link in list(self._links.values()):
            self._drop_link(link, "closed")
        self._packer.close()
        self._pipe.close()

    def _watch(self) -> None:
        """The sockets of all connections, from now on."""
        self._by_socket: dict[Socket, tuple[Link, Dealer]] = {
            socket: (link, dealer)
            for link in self._links.values()
            for dealer in link.dealers
            for socket in (dealer.socket, dealer.monitor)
        }
        self._sockets = tuple(self._by_socket)
        self._poller = make_poller(self._sockets)

    # -- messages

    def _say(self, link: Link, message: Expect | Credit) -> None:
        if not link.send(message):
            self.counts["send_failed"] += 1

    def _send_credits(self, *, holds: bool = True) -> None:
        owing, self._owing = self._owing, {}
        for link in owing:
            slots = () if link.is_lost else link.reads.take_credits(holds=holds)
            try:
                if (slots or link.untold) and not link.give_back(slots):
                    self.counts["send_failed"] += 1
            except PipeBroken as exc:
                self._lose_pipe(link, exc)

    def _receive(self, link: Link, dealer: Dealer) -> None:
        try:
            for first, *parts in dealer.receive():
                link.latest = dealer
                self._on_message(link, first.buffer, parts, first)
        except ProtocolError as exc:
            self.counts["malformed"] += 1
            self._lose_link(link, f"the source rank makes no sense: {exc}")

    def _on_message(
        self,
        link: Link,
        message: memoryview,
        parts: Sequence[zmq.Frame],
        frame: zmq.Frame | None = None,
    ) -> None:
        if not (message.nbytes or parts):
            self._say(link, Credit(()))  # the source looks whether we are here
            return
        try:
            match decode_to_sink(message):
                case Refused(detail):
                    self.counts["refused"] += 1
                    detail = f"the source rank refuses the connection: {detail[:_MAX_DETAIL]}"
                    self._lose_link(link, detail)
                case Streams() as streams:
                    link.add_streams(streams)
                    self._watch()
                case Attached() as attached:
                    link.connect(attached, frame)
                case header:
                    self._on_announced(link, header, parts)
        except ProtocolError as exc:
            self.counts["malformed"] += 1
            _log.debug("dropped: %s", exc)
            link.num_unreadable += 1
            if link.is_spent:
                self._lose_link(link, f"the source rank makes no sense: {exc}")
        except PipeBroken as exc:
            self._lose_pipe(link, exc)

    def _on_announced(self, link: Link, header: Header, parts: Sequence[zmq.Frame]) -> None:
        if link.table.is_repeated(header):
            self.counts["duplicate"] += 1
            return
        link.announce(header, parts)
        unwanted = link.reads.announced(header)
        if unwanted is not None:
            owner = self._reading.get(header.key) if isinstance(header, ChunkHeader) else None
            is_foreign = owner is not None and owner.link is not link
            self.counts["foreign_source" if is_foreign else unwanted] += 1

    # -- payloads

    def _hear(self, link: Link) -> None:
        try:
            for message in link.lane.heard():
                if not link.is_lost:
                    self._on_message(link, memoryview(message), ())
        except PipeBroken as exc:
            self._lose_pipe(link, exc)

    def _collect(self, link: Link) -> bool:
        """Take what lies in staging now; True if slots were given back."""
        has_freed = False
        try:
            came = () if link.is_lost else link.lane.poll()
        except PipeBroken as exc:
            self._lose_pipe(link, exc)
            return False
        for slot in came:
            if not link.is_lost:
                action = link.reads.came(slot)
                has_freed |= isinstance(action, Free)
                self._perform(link, (action,))
        return has_freed

    def _take_unpacked(self) -> None:
        """And send the credits that are due."""
        if self._num_jobs:
            for job in self._packer.drain():
                self._on_unpacked(job)
        if self._owing:
            self._send_credits()

    def _on_unpacked(self, job: ChunkJob) -> None:
        link = job.owner
        assert isinstance(link, Link)
        del link.jobs[job.slot]
        self._num_jobs -= 1
        if link.is_lost:
            link.close_lane()
        error = str(job.error) if job.end is CopyEnd.FAILED else None
        is_placed = job.end is CopyEnd.DONE
        self._perform(link, link.reads.unpacked(job.slot, is_placed=is_placed, error=error))
        if (
            link.table.num[SinkSlot.PLACED] and link not in self._unfreed
        ):  # to post another receive takes 0.1 ms
            self._unfreed.add(link)
            self._wake()

    def _perform(self, link: Link, actions: Sequence[SinkAction]) -> None:
        for action in actions:
            match action:
                case Unpack():
                    self._unpack(link, action)
                case Free(slot, is_late):
                    if is_late:
                        self.counts["unwanted"] += 1
                    self._owing[link] = None
                    self._free(link, slot)
                case Cancel(slot):
                    self._packer.cancel(link.jobs[slot])
                case end:
                    if not isinstance(end, Progress):
                        del self._reading[end.key]
                    if isinstance(end, ReadStopped | ReadBroke):
                        self._owing[link] = None  # what was held for more of it
                    self._completions.append(end)

    def _unpack(self, link: Link, action: Unpack) -> None:
        reading, slot = self._reading[action.key], action.slot
        number = action.chunk.class_index
        side, ids = reading.request.classes[number].sink, reading.sink_ids[number]
        job = link.jobs[slot] = ChunkJob(
            *(link, action.key, action.chunk, slot, side, ids),
            dense=link.lane.payload(slot),
            after=reading.request.after,
        )
        self._num_jobs += 1
        self._packer.submit(job)

    def _free(self, link: Link, slot: int) -> None:
        if link.is_lost:
            return
        try:
            link.lane.free(slot)
        except PipeBroken as exc:
            self._lose_pipe(link, exc)

    # -- ends

    def _lose_pipe(self, link: Link, error: PipeBroken) -> None:
        if not link.is_lost:
            self.counts["pipe_broken"] += 1
            self._end_link(link, str(error))

    def _lose_link(self, link: Link, detail: str) -> None:
        if link.is_lost:
            return
        self._pipe.progress()  # what has come before the end still counts
        self._hear(link)
        if link.table.num[SinkSlot.AWAITED]:
            self._collect(link)
        self._end_link(link, detail)

    def _end_link(self, link: Link, detail: str) -> None:
        if not link.is_lost:
            self._drop_link(link, detail)
            self._completions.append(PeerGone(link.control_endpoint))

    def _drop_link(self, link: Link, detail: str) -> None:
        del self._links[link.control_endpoint]
        self._watch()
        link.close()
        self._perform(link, link.reads.lose(detail))
        self._wake()
