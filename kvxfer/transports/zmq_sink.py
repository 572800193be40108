"""The taking end of the ZeroMQ wire: checks each chunk, and scatters it out of its frame.

A chunk is taken if its transfer is expected from that source, its sequence has not come before and
its size is the one that both sides derived. Everything else is dropped and counted; its credit goes
back all the same.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import zmq
from numpy.typing import NDArray

from kvxfer.config import Config
from kvxfer.errors import ProtocolError, TransportUnavailable
from kvxfer.tensors.strided_copy import scatter
from kvxfer.transfer.manifest import RankManifest
from kvxfer.transfer.plan import Chunk
from kvxfer.transfer.pull import chunk_list
from kvxfer.transfer.wire import Reason
from kvxfer.transports.base import (
    TRIAL_NBYTES,
    LocalMemory,
    PeerGone,
    Progress,
    ReadBroke,
    ReadDone,
    ReadRequest,
    ReadStopped,
    SinkCompletion,
    SinkTransport,
    TransferKey,
    Trial,
    Wake,
)
from kvxfer.transports.copy_thread import Copier, CopyEnd, CopyJob, Mailbox
from kvxfer.transports.zmq_same_host import nearest_endpoint
from kvxfer.transports.zmq_stream import (
    MAX_SLOTS,
    STREAM_VERSION,
    AskTrial,
    Attach,
    ChunkHeader,
    Context,
    Credit,
    Expect,
    Refused,
    Socket,
    ToSink,
    data_endpoint_of,
    decode_to_sink,
    encode,
    make_dealer,
    make_poller,
    readable,
    receive,
    trial_pattern,
)

_log = logging.getLogger("kvxfer.transports")

_MAX_DETAIL = 300
_MALLOC_LESSON_NBYTES = 31 << 20

# Every way in which a connection that never reconnects can end, or fail to begin.
_GONE_EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


@dataclass(slots=True, eq=False)
class _Link:
    """The connection to one source rank. ``num_chunks`` numbers its messages as the source does."""

    control_endpoint: str
    endpoint: str
    socket: Socket
    monitor: Socket
    num_chunks: int = 0
    num_scattering: int = 0
    credits: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Read:
    """One read. ``arrived`` and ``placed`` are bitmaps over the chunk list."""

    request: ReadRequest
    link: _Link
    chunks: tuple[Chunk, ...]
    sink_ids: list[NDArray[np.int64]]
    arrived: bytearray
    placed: bytearray
    nbytes: int = 0
    jobs: dict[int, CopyJob] = field(default_factory=dict)
    stopped: bool = False
    broke: ReadBroke | None = None


class _ScatterJob(CopyJob):
    """Puts one chunk in place, in one piece."""

    __slots__ = ("_owner", "chunk", "link", "number", "payload", "read")

    def __init__(
        self, owner: ZmqSink, read: _Read, number: int, chunk: Chunk, payload: zmq.Frame
    ) -> None:
        super().__init__(read.request.key)
        self._owner = owner
        self.read = read
        self.link = read.link
        self.number = number
        self.chunk = chunk
        self.payload: zmq.Frame | None = payload

    def run(self) -> bool:
        if self.payload is not None:
            self._owner.scatter(self.read, self.chunk, self.payload)
        return False

    def on_end(self) -> None:
        self.payload = None  # the frame is freed here and not on the IO thread
        self._owner.mailbox.put(self, more_follows=self.has_successor)


class ZmqSink(SinkTransport):
    """Takes chunks from the sources that it is attached to."""

    name = "zmq"
    is_stream = True
    uses_unix_sockets = True
    """Whether it takes a source's Unix socket where there is one; False to measure or test TCP."""

    def __init__(
        self,
        memory: LocalMemory,
        config: Config,
        copy_thread: Copier,
        wake: Wake,
        context: Context,
    ) -> None:
        memory.require(self.name, "cpu")
        self.counts: Counter[str] = Counter()
        self._memory = memory
        self._config = config
        self._num_slots = min(config.staging_slots, MAX_SLOTS)
        self._copy_thread = copy_thread
        self._wake = wake
        self._context = context
        self.mailbox: Mailbox[_ScatterJob] = Mailbox(wake)
        self._ready: list[SinkCompletion] = []
        self._links: dict[str, _Link] = {}
        self._by_socket: dict[Socket, _Link] = {}
        self._poller = make_poller(())
        _keep_freed_frames()
        self._reads: dict[TransferKey, _Read] = {}

    def trial(self, source: RankManifest, timeout_s: float) -> Trial:
        """Ask for 4 MiB over a connection of its own.

        The second answer is timed: the first one opens TCP's window.
        """
        endpoint = data_endpoint_of(source, self._config)
        expected = trial_pattern()
        deadline_s = time.monotonic() + timeout_s
        duration_s = 0.0
        nearest = self._nearest(endpoint)
        with make_dealer(self._context, self._config) as socket:
            socket.connect(nearest)
            for _ in range(2):
                started_s = time.perf_counter()
                socket.send(encode(AskTrial(TRIAL_NBYTES)))
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not socket.poll(round(left_s * 1000)):
                    raise TransportUnavailable(
                        f"zmq: expected {TRIAL_NBYTES} bytes from {endpoint} within "
                        f"{timeout_s} s, got no answer"
                    )
                frames = socket.recv_multipart(copy=False)
                duration_s = time.perf_counter() - started_s
                refused = _refusal(frames)
                if refused is not None:
                    raise TransportUnavailable(f"zmq: {endpoint} refuses: {refused}")
                if len(frames) != 2 or frames[1].buffer != expected:
                    raise TransportUnavailable(
                        f"zmq: the trial bytes from {endpoint} differ from what was asked for"
                    )
        path = "TCP" if nearest == endpoint else "a Unix socket"
        return Trial(TRIAL_NBYTES, duration_s, path)

    def attach(self, source: RankManifest) -> None:
        """Connect to the rank; the connection is made in the background.

        Another data endpoint under the same control endpoint takes the place of the one that is
        connected, whose reads break: a control endpoint is what a peer says of itself, so reads
        look at the data endpoint too.
        """
        endpoint = data_endpoint_of(source, self._config)
        known = self._links.get(source.control_endpoint)
        if known is not None and known.endpoint == endpoint:
            return
        self.detach(source.control_endpoint)
        socket = make_dealer(self._context, self._config)
        monitor = socket.get_monitor_socket(_GONE_EVENTS)
        try:
            socket.connect(self._nearest(endpoint))
        except zmq.ZMQError as exc:
            _close(socket, monitor)
            raise TransportUnavailable(
                f"zmq: {endpoint} cannot be connected to: {exc.strerror}"
            ) from exc
        link = _Link(source.control_endpoint, endpoint, socket, monitor)
        self._links[source.control_endpoint] = link
        self._watch()
        self._transmit(link, encode(Attach(STREAM_VERSION, self._num_slots)))

    def detach(self, control_endpoint: str) -> None:
        """Close the connection; its unfinished reads break."""
        link = self._links.get(control_endpoint)
        if link is not None:
            self._drop_link(link, "the source rank was detached")

    def submit_expect(self, request: ReadRequest) -> None:
        """Chunks of this transfer are taken from now on."""
        key = request.key
        if key in self._reads:
            raise ValueError(f"read: expected a key that is not in use, got {key} twice")
        link = self._links.get(request.source.control_endpoint)
        if link is None or link.endpoint != request.source.data_endpoints.get("zmq"):
            self._tell(ReadBroke(key, Reason.PEER_LOST, "the source rank is not attached"))
            return
        chunks = tuple(chunk_list(request.pull_classes, request.chunk_nbytes))
        if not chunks:
            self._tell(ReadDone(key, 0, certified=True))
            return
        ids = [np.asarray(ids, dtype=np.int64) for ids in request.sink_ids]
        size = len(chunks)
        self._reads[key] = _Read(request, link, chunks, ids, bytearray(size), bytearray(size))
        self._transmit(link, encode(Expect(key.nonce, key.incarnation, key.sink_rank)))

    def submit_read(self, request: ReadRequest) -> None:
        """Nothing: the source sends by itself."""

    def stop_read(self, key: TransferKey) -> None:
        """No more chunks are taken; the scatter that runs is the last one."""
        read = self._reads.get(key)
        if read is None:
            self._tell(ReadStopped(key))
            return
        read.stopped = True
        self._cancel(read)

    def pollables(self) -> Sequence[Socket]:
        """A DEALER and its monitor for each source rank."""
        return [socket for link in self._links.values() for socket in (link.socket, link.monitor)]

    def poll(self) -> list[SinkCompletion]:
        """Chunks that came, scatters that ended, connections that broke."""
        for job in self.mailbox.drain():
            self._on_scatter_ended(job)
        for socket in readable(self._poller):
            link = self._by_socket.get(socket)
            if link is None:  # dropped in this very poll
                continue
            for frames in receive(socket):
                if socket is link.socket:
                    self._on_message(link, frames)
                else:
                    self._lose_link(link, "the connection to the source rank ended")
                    break
        for link in self._links.values():
            # In batches, because each credit wakes the source; but never the last ones late.
            if link.credits and (
                len(link.credits) >= max(1, self._num_slots // 4) or not link.num_scattering
            ):
                self._transmit(link, encode(Credit(tuple(link.credits))))
                link.credits.clear()
        done, self._ready = self._ready, []
        return done

    def close(self) -> None:
        """Stop all reads, wait for the running job, close the connections."""
        for read in list(self._reads.values()):
            read.stopped = True
            self._cancel(read)
        while self._reads:
            self._on_scatter_ended(self.mailbox.take())
        for link in list(self._links.values()):
            self._drop_link(link, "closed")

    def _tell(self, completion: SinkCompletion) -> None:
        self._ready.append(completion)
        self._wake()

    def _nearest(self, endpoint: str) -> str:
        nearest = nearest_endpoint(endpoint) if self.uses_unix_sockets else endpoint
        _log.debug("zmq: %s is reached by %s", endpoint, nearest)
        return nearest

    def _watch(self) -> None:
        """The links have changed."""
        self._by_socket = {
            socket: link for link in self._links.values() for socket in (link.socket, link.monitor)
        }
        self._poller = make_poller(tuple(self._by_socket))

    def _transmit(self, link: _Link, frame: bytes) -> None:
        try:
            link.socket.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError as exc:  # the monitor tells the rest
            self.counts["send_failed"] += 1
            _log.debug("data connection to %s takes nothing: %s", link.endpoint, exc)

    # -- chunks

    def _on_message(self, link: _Link, frames: list[zmq.Frame]) -> None:
        if len(frames) == 1 and not len(frames[0]):
            self._transmit(link, encode(Credit(())))  # the source looks whether we are here
            return
        refused = _refusal(frames)
        if refused is not None:
            self.counts["refused"] += 1
            self._lose_link(link, f"the source rank refuses the connection: {refused}")
            return
        number, link.num_chunks = link.num_chunks, link.num_chunks + 1
        taken = False
        try:
            header, payload = _two_frames(frames)
            taken = self._take(link, number, decode_to_sink(header.buffer), payload)
        except ProtocolError as exc:
            self.counts["malformed"] += 1
            _log.debug("dropped: %s", exc)
        if not taken:
            link.credits.append(number)

    def _take(self, link: _Link, number: int, header: ToSink, payload: zmq.Frame) -> bool:
        """Scatter the chunk if it is wanted."""
        if not isinstance(header, ChunkHeader):
            self.counts["unknown_key"] += 1
            return False
        read = self._reads.get(header.key)
        if read is None or read.stopped or read.broke is not None:
            self.counts["unknown_key"] += 1
        elif read.link is not link:
            self.counts["foreign_source"] += 1
        elif not 0 <= header.sequence < len(read.chunks):
            self.counts["unknown_sequence"] += 1
        elif read.arrived[header.sequence]:
            self.counts["duplicate"] += 1
        elif not header.nbytes == read.chunks[header.sequence].nbytes == len(payload):
            self.counts["wrong_nbytes"] += 1
        else:
            self._scatter(read, number, header.sequence, payload)
            return True
        return False

    def _scatter(self, read: _Read, number: int, sequence: int, payload: zmq.Frame) -> None:
        read.arrived[sequence] = 1
        job = _ScatterJob(self, read, number, read.chunks[sequence], payload)
        read.jobs[sequence] = job
        read.link.num_scattering += 1
        self._copy_thread.submit(job)

    def scatter(self, read: _Read, chunk: Chunk, payload: zmq.Frame) -> None:
        """On the copy thread: put the chunk in place straight out of its frame."""
        side = read.request.classes[chunk.class_index].sink
        scatter(
            self._memory.tensors,
            side,
            read.sink_ids[side.group],
            chunk.region_lo,
            chunk.region_hi,
            chunk.token_lo,
            chunk.token_hi,
            torch.frombuffer(payload.buffer, dtype=torch.uint8),
        )

    def _on_scatter_ended(self, job: _ScatterJob) -> None:
        read, link, sequence = job.read, job.link, job.chunk.sequence
        del read.jobs[sequence]
        link.num_scattering -= 1
        link.credits.append(job.number)
        if job.end is CopyEnd.DONE:
            read.placed[sequence] = 1
            read.nbytes += job.chunk.nbytes
        elif job.end is CopyEnd.FAILED and not read.stopped and read.broke is None:
            self._break(read, Reason.READ_FAILED, f"scatter failed: {job.error}")
        self._settle(read)

    # -- ends

    def _settle(self, read: _Read) -> None:
        """Say what has become of a read: progress, or its one end once no job of it is left."""
        key = read.request.key
        if read.stopped or read.broke is not None:
            if not read.jobs and self._reads.pop(key, None) is not None:
                self._tell(read.broke if read.broke and not read.stopped else ReadStopped(key))
        elif all(read.placed):
            del self._reads[key]
            self._tell(ReadDone(key, read.nbytes, certified=True))
        else:
            self._ready.append(Progress(key, read.nbytes))

    def _cancel(self, read: _Read) -> None:
        for job in list(read.jobs.values()):
            self._copy_thread.cancel(job)
        self._settle(read)

    def _break(self, read: _Read, reason: Reason, detail: str) -> None:
        read.broke = ReadBroke(read.request.key, reason, detail)
        for job in list(read.jobs.values()):
            self._copy_thread.cancel(job)

    def _lose_link(self, link: _Link, detail: str) -> None:
        self._drop_link(link, detail)
        self._ready.append(PeerGone(link.control_endpoint))

    def _drop_link(self, link: _Link, detail: str) -> None:
        del self._links[link.control_endpoint]
        self._watch()
        _close(link.socket, link.monitor)
        for read in [read for read in self._reads.values() if read.link is link]:
            if not all(read.arrived):  # else everything is here and only has to be put in place
                self._break(read, Reason.PEER_LOST, detail)
                self._settle(read)


def _refusal(frames: list[zmq.Frame]) -> str | None:
    """Why the source wants no more of this connection, if that is what it says."""
    if len(frames) != 1:
        return None
    try:
        message = decode_to_sink(frames[0].buffer)
    except ProtocolError:
        return None
    return message.detail[:_MAX_DETAIL] if isinstance(message, Refused) else None


def _two_frames(frames: list[zmq.Frame]) -> tuple[zmq.Frame, zmq.Frame]:
    if len(frames) != 2:
        raise ProtocolError(f"chunk: expected 2 frames, got {len(frames)}")
    return frames[0], frames[1]


def _keep_freed_frames() -> None:
    """Teach glibc's malloc to keep the memory of received frames: the kernel need not clear it.

    It learns from the largest block that is freed (up to 32 MiB). Untaught, every frame of 1 MiB is
    paid for with 256 page faults: a third of the receiving thread's time. Memory that is not
    touched costs nothing.
    """
    np.empty(_MALLOC_LESSON_NBYTES, dtype=np.uint8)


def _close(socket: Socket, monitor: Socket) -> None:
    socket.disable_monitor()
    monitor.close(linger=0)
    socket.close(linger=0)
