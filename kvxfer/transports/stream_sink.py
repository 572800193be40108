"""The taking end of a stream wire: checks each chunk that is announced, and unpacks it.

A chunk is taken if its transfer is expected from that source, its sequence has not come before and
its size is the one that both sides derived. Everything else is dropped and counted; the credit of
its slot goes back all the same.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import zmq

from kvxfer.config import Config
from kvxfer.errors import ProtocolError, TransportUnavailable
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
    SinkCompletion,
    SinkTransport,
    TransferKey,
    Trial,
    Wake,
)
from kvxfer.transports.channel import Context
from kvxfer.transports.completions import Completions
from kvxfer.transports.copy_thread import Copier
from kvxfer.transports.guard import nearest_endpoint
from kvxfer.transports.native_peers import needs_own_user, refusal
from kvxfer.transports.pipe import MakePipe, PipeBroken, Slots
from kvxfer.transports.stream_contact import Contact
from kvxfer.transports.stream_link import open_link
from kvxfer.transports.stream_links import Links
from kvxfer.transports.stream_packing import MakePacker, make_packer
from kvxfer.transports.stream_reads import Read, ReadLink, UnpackJob, why_not
from kvxfer.transports.stream_unpacking import Unpacking
from kvxfer.transports.stream_wire import (
    Attached,
    ChunkHeader,
    Credit,
    Expect,
    Header,
    Refused,
    data_endpoint_of,
    decode_to_sink,
)

_log = logging.getLogger("kvxfer.transports")

USUAL_SLOTS = Slots(8, 4 << 20)
"""Of a connection whose wire nobody has measured."""
TURN_S = 500e-6
"""As long as chunks follow each other the IO thread looks at its other work only so often: to come
round takes 0.1 ms, and a chunk of 64 MiB between two GPUs 0.2.
"""
_MAX_DETAIL = 300


class StreamSink(SinkTransport):
    """Takes chunks from the sources that it is attached to."""

    is_stream = True
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
        make_packer: MakePacker[UnpackJob] = make_packer,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._config = config
        self._context = context
        self._links = Links()
        self._contact = Contact(make_pipe, memory, config, context)
        with ExitStack() as undo:
            self._packer = make_packer(memory, config, copy_thread, wake)
            undo.callback(self._packer.close)
            self._pipe = make_pipe(memory, config, wake)
            undo.pop_all()
        self._completions: Completions[SinkCompletion] = Completions(wake)
        self._reads = Unpacking(self._packer, self._free, self._completions, wake)
        self.name, self.is_dear = self._pipe.name, self._pipe.is_dear

    def trial(self, source: RankManifest, timeout_s: float) -> Trial:
        """Ask for a few messages over a pipe of its own, in each of its ways."""
        self._check_may_meet(data_endpoint_of(source, self._config, self.name))  # before a pipe
        return self._contact.trial(source, timeout_s, uses_unix_sockets=self.uses_unix_sockets)

    def prepare(self, classes: Sequence[CopyClass]) -> None:
        """What unpacks them."""
        self._packer.prepare(classes)

    def staging_bounds(self, source: RankManifest) -> StagingBounds:
        """Settings, and what is usual for the memory of both sides."""
        return self._contact.staging_bounds(source, self._pipe)

    def attach(
        self, source: RankManifest, staging: Staging | None = None, trial: Trial | None = None
    ) -> None:
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
        self._links.add(
            open_link(
                self._pipe,
                Slots(staging.num_slots, staging.slot_nbytes),
                source,
                self._config,
                self._context,
                uses_unix_sockets=self.uses_unix_sockets,
                way=staging.way,
            )
        )
        self._pipe.progress()

    def _check_may_meet(self, endpoint: str) -> None:
        """Raises TransportUnavailable for a source that the pipe's library may not read."""
        if not needs_own_user(self._pipe, self._config):
            return
        if not self.uses_unix_sockets or nearest_endpoint(endpoint) == endpoint:
            raise TransportUnavailable(refusal(self.name))

    def detach(self, control_endpoint: str) -> None:
        """Close the connection; its unfinished reads break."""
        link = self._links.get(control_endpoint)
        if link is not None:
            self._drop_link(link, "the source rank was detached")

    def submit_expect(self, request: ReadRequest) -> None:
        """Chunks of this transfer are taken from now on."""
        key = request.key
        if self._reads.find(key) is not None:
            raise ValueError(f"read: expected a key that is not in use, got {key} twice")
        link = self._links.get(request.source.control_endpoint)
        if link is None or link.endpoint != request.source.data_endpoints.get(self.name):
            self._completions.tell(
                ReadBroke(key, Reason.PEER_LOST, "the source rank is not attached")
            )
            return
        chunks = tuple(chunk_list(request.pull_classes, request.chunk_nbytes))
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
        ids = [np.asarray(ids, dtype=np.int64) for ids in request.sink_ids]
        size = len(chunks)
        self._reads.begin(Read(request, link, chunks, ids, bytearray(size), bytearray(size)))
        self._say(link, Expect(key.nonce, key.incarnation, key.sink_rank))

    def submit_read(self, request: ReadRequest) -> None:
        """Nothing: the source sends by itself."""

    def stop_read(self, key: TransferKey) -> None:
        """No more chunks are taken; what is being unpacked is the last of it."""
        self._reads.stop(key)

    def pollables(self) -> Sequence[Readable]:
        """A DEALER and its monitor for each source rank, and what the pipe has."""
        return (*self._links.sockets(), *self._pipe.fds())

    @property
    def is_idle(self) -> bool:
        """Nothing is attached, and nothing has been left behind."""
        has_work = self._links or self._completions or not self._reads.is_idle
        return not has_work and self._pipe.is_idle

    def poll(self) -> list[SinkCompletion]:
        """Chunks that came and were unpacked, connections that broke."""
        self._reads.free_told()  # of the poll before: what ends a read now has to be told first
        self._reads.take_unpacked()
        self._send_credits()
        for socket, link in self._links.readable():
            if socket is link.dealer.socket:
                self._receive(link)
            elif link.dealer.why_ended() is not None:
                self._lose_link(link, "the connection to the source rank ended")
        until_s = time.perf_counter() + TURN_S
        while self._turn() and time.perf_counter() < until_s:
            pass
        return self._completions.take()

    def _turn(self) -> bool:
        """What the pipe has brought, and what was unpacked meanwhile. True if it was some of a read
        and not the end of any: then more of it follows soon.
        """
        num_before = len(self._completions)
        self._progress()
        self._reads.take_unpacked()
        self._send_credits()
        told = self._completions.since(num_before)
        return bool(told) and all(isinstance(each, Progress) for each in told)

    def inspect(self) -> None:
        """Drop connections whose source sends more than it was granted."""
        for link in self._links.all():
            try:
                link.dealer.inspect()
            except ProtocolError as exc:
                self._lose_link(link, str(exc))

    def close(self) -> None:
        """Stop all reads, wait for what is being unpacked, close connections and pipe."""
        self._reads.close()
        for link in self._links.all():
            self._drop_link(link, "closed")
        self._packer.close()
        self._pipe.close()

    def _say(self, link: ReadLink, message: Expect | Credit) -> None:
        if not link.send(message):
            self.counts["send_failed"] += 1

    def _send_credits(self) -> None:
        for link in self._links.all():
            credit = link.take_credits()
            try:
                if credit is not None and not link.give_back(credit):
                    self.counts["send_failed"] += 1
            except PipeBroken as exc:
                self._lose_pipe(link, exc)

    # -- chunks

    def _receive(self, link: ReadLink) -> None:
        try:
            for first, *parts in link.receive():
                self._on_message(link, first.buffer, parts, first)
        except ProtocolError as exc:
            self.counts["malformed"] += 1
            self._lose_link(link, f"the source rank makes no sense: {exc}")

    def _on_message(
        self,
        link: ReadLink,
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

    def _on_announced(self, link: ReadLink, header: Header, parts: Sequence[zmq.Frame]) -> None:
        if link.is_repeated(header):
            self.counts["duplicate"] += 1
            return
        read = self._reads.find(header.key) if isinstance(header, ChunkHeader) else None
        reason = why_not(link, read, header)
        wanted = None
        if read is not None and reason is None and isinstance(header, ChunkHeader):
            wanted = (read, header.sequence)
        link.announce(header, parts, wanted)
        if wanted is not None:
            wanted[0].arrived[wanted[1]] = 1
        elif reason is not None:
            self.counts[reason] += 1

    def _progress(self) -> None:
        """Let the pipe go on, and unpack what it has brought."""
        has_freed = True
        while has_freed:  # what is freed is posted again, which is progress, too
            self._pipe.progress()
            has_freed = False
            for link in self._links.all():
                self._hear(link)
                if link.awaited:
                    has_freed |= self._collect(link)

    def _hear(self, link: ReadLink) -> None:
        """What the pipe has carried of a connection's messages."""
        try:
            for message in link.lane.heard():
                if not link.is_lost:
                    self._on_message(link, memoryview(message), ())
        except PipeBroken as exc:
            self._lose_pipe(link, exc)

    def _collect(self, link: ReadLink) -> bool:
        """Take what lies in staging now; True if slots were given back."""
        has_freed = False
        try:
            for slot in link.lane.poll():
                wanted = link.awaited.pop(slot)
                if wanted is not None and not wanted[0].is_over:
                    self._reads.unpack(*wanted, slot)
                else:
                    self.counts["unwanted"] += wanted is not None
                    link.free(slot)
                    has_freed = True
        except PipeBroken as exc:
            self._lose_pipe(link, exc)
        return has_freed

    def _free(self, job: UnpackJob) -> None:
        try:
            job.link.free(job.slot)
        except PipeBroken as exc:
            self._lose_pipe(job.link, exc)

    # -- ends

    def _lose_pipe(self, link: ReadLink, error: PipeBroken) -> None:
        if not link.is_lost:
            self.counts["pipe_broken"] += 1
            link.awaited.clear()
            self._end_link(link, str(error))

    def _lose_link(self, link: ReadLink, detail: str) -> None:
        if link.is_lost:
            return
        self._pipe.progress()  # what has come before the end still counts
        self._hear(link)
        if link.awaited:
            self._collect(link)
        self._end_link(link, detail)

    def _end_link(self, link: ReadLink, detail: str) -> None:
        if not link.is_lost:
            self._drop_link(link, detail)
            self._completions.note(PeerGone(link.control_endpoint))

    def _drop_link(self, link: ReadLink, detail: str) -> None:
        self._links.drop(link)
        awaited = {wanted[0] for wanted in link.awaited.values() if wanted is not None}
        link.close()
        self._reads.lose(link, awaited, detail)
