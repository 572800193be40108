"""The giving end of the ZeroMQ wire: packs chunks on the copy thread, sends them on the IO one.

transfer:  waiting for a connection that names its nonce -> packing, sending -> Sent | SendStopped
buffer:    free -> packing -> packed -> in flight (until the sink's credit) -> free
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import zmq
from numpy.typing import NDArray

from kvxfer.config import Config
from kvxfer.errors import ProtocolError
from kvxfer.tensors.strided_copy import gather
from kvxfer.transfer.plan import Chunk
from kvxfer.transfer.pull import chunk_list
from kvxfer.transfer.wire import Reason
from kvxfer.transports.base import (
    TRIAL_NBYTES,
    LocalMemory,
    Packed,
    SendRequest,
    SendStopped,
    Sent,
    SourceCompletion,
    SourceTransport,
    TransferKey,
    Wake,
)
from kvxfer.transports.copy_thread import Copier, CopyEnd, CopyJob, Mailbox
from kvxfer.transports.zmq_connections import (
    MAX_CONNECTIONS,
    MAX_PROBES,
    Buffer,
    Connection,
    Connections,
    ReadName,
    may_be_served,
)
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
    ToSource,
    TrialHeader,
    decode_to_source,
    encode,
    make_poller,
    make_router,
    readable,
    receive,
    send_message,
    trial_pattern,
)

_log = logging.getLogger("kvxfer.transports")

LARGE_CHUNK_NBYTES = 8 << 20
"""Chunks that any sink may ask for; larger ones only where this side is configured for them too."""


@dataclass(slots=True, eq=False)
class _Send:
    """One transfer."""

    request: SendRequest
    chunks: tuple[Chunk, ...]
    block_ids: list[NDArray[np.int64]]
    connection: Connection | None = None
    num_started: int = 0
    num_sent: int = 0
    nbytes: int = 0
    jobs: dict[int, CopyJob] = field(default_factory=dict)
    packed: dict[int, Buffer] = field(default_factory=dict)
    stopping: bool = False
    reason: Reason | None = None

    @property
    def name(self) -> ReadName:
        key = self.request.key
        return key.nonce, key.incarnation, key.sink_rank


class _PackJob(CopyJob):
    """Packs one chunk, in one piece."""

    __slots__ = ("_owner", "buffer", "chunk", "connection", "send")

    def __init__(
        self, owner: ZmqSource, send: _Send, connection: Connection, chunk: Chunk, buffer: Buffer
    ) -> None:
        super().__init__(send.request.key)
        self._owner = owner
        self.send = send
        self.connection = connection
        self.chunk = chunk
        self.buffer = buffer

    def run(self) -> bool:
        self._owner.pack(self.send, self.chunk, self.buffer)
        return False

    def on_end(self) -> None:
        self._owner.mailbox.put(self, more_follows=self.has_successor)


class ZmqSource(SourceTransport):
    """Sends chunks to the sinks that attach to its ROUTER socket."""

    name = "zmq"
    is_stream = True

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
        self.mailbox: Mailbox[_PackJob] = Mailbox(wake)
        self._ready: list[SourceCompletion] = []
        self._sends: dict[TransferKey, _Send] = {}
        self._connections = Connections()
        self._trial: zmq.Frame | None = None
        self._socket, self._endpoint = make_router(context, config)
        self._monitor: Socket = self._socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )
        self._num_strangers = 0
        self._poller = make_poller((self._socket, self._monitor))

    def data_endpoint(self) -> str | None:
        """``tcp://host:port`` of the ROUTER."""
        return self._endpoint

    def pollables(self) -> Sequence[Socket]:
        """The ROUTER and its monitor."""
        return (self._socket, self._monitor)

    def submit_send(self, request: SendRequest) -> None:
        """Pack as soon as the sink is attached and has granted room."""
        if request.key in self._sends:
            raise ValueError(f"send: expected a key that is not in use, got {request.key} twice")
        most_nbytes = max(self._config.chunk_nbytes, LARGE_CHUNK_NBYTES)
        if request.chunk_nbytes > most_nbytes:
            raise ProtocolError(
                f"chunk_nbytes: expected at most {most_nbytes}, got {request.chunk_nbytes}; "
                "raise chunk_nbytes on this side too, or lower it on the other"
            )
        send = _Send(
            request,
            tuple(chunk_list(request.classes, request.chunk_nbytes)),
            [np.asarray(ids, dtype=np.int64) for ids in request.block_ids],
        )
        if not send.chunks:
            self._tell(Sent(request.key, 0))
            return
        self._sends[request.key] = send
        connection = self._connections.of_read(send.name)
        if connection is not None:
            self._join(send, connection)
            self._pump(connection)

    def send_packed(self, key: TransferKey, sequence: int) -> None:
        """Send it. The whole transfer stops with PEER_LOST where the sink has gone."""
        send = self._sends.get(key)
        buffer = None if send is None else send.packed.pop(sequence, None)
        if send is None or buffer is None or send.connection is None:
            self.counts["unknown_packed"] += 1
            return
        connection, frame, chunk = send.connection, buffer.frame, send.chunks[sequence]
        header = ChunkHeader(
            key.nonce, key.incarnation, key.sink_rank, key.source_rank, sequence, chunk.nbytes
        )
        assert frame is not None
        if not self._transmit(connection, [encode(header), frame]):
            # Gone; or its queue is full, which credits rule out for a sink that counts its slots.
            self._lose(connection)
            return
        connection.in_flight[connection.next_number] = buffer
        connection.next_number += 1
        send.num_sent += 1
        send.nbytes += chunk.nbytes
        if send.num_sent == len(send.chunks):
            del self._sends[key]
            self._connections.forget(send.name)
            self._tell(Sent(key, send.nbytes))

    def drop_packed(self, key: TransferKey, sequence: int) -> None:
        """The buffer is free again.

        Nothing more of this transfer is packed: without this chunk it cannot complete.
        """
        send = self._sends.get(key)
        buffer = None if send is None else send.packed.pop(sequence, None)
        if send is None or buffer is None or send.connection is None:
            self.counts["unknown_packed"] += 1
            return
        self.counts["dropped_packed"] += 1
        send.num_started = len(send.chunks)
        send.connection.free.append(buffer)
        self._pump(send.connection)

    def stop_send(self, key: TransferKey) -> None:
        """Chunks that were sent stay sent; packing ends with the running job."""
        send = self._sends.get(key)
        if send is None:
            self._tell(SendStopped(key, None))
        else:
            self._stop(send, None)

    def poll(self) -> list[SourceCompletion]:
        """Credits and attaches of the sinks, chunks that are packed now."""
        disconnected = False
        for socket in readable(self._poller):
            for frames in receive(socket):
                if socket is self._socket:
                    self._on_message(frames)
                else:
                    disconnected |= self._was_connected(frames[0])
        if disconnected:  # the monitor does not say whose
            for connection in self._connections.all():
                self._probe(connection)
        for job in self.mailbox.drain():
            self._on_pack_ended(job)
        done, self._ready = self._ready, []
        return done

    def close(self) -> None:
        """Stop all transfers, wait for the running job, close the sockets."""
        for send in list(self._sends.values()):
            self._stop(send, None)
        while self._sends:
            self._on_pack_ended(self.mailbox.take())
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=0)
        self._connections = Connections()

    def _was_connected(self, event: zmq.Frame) -> bool:
        """Whether an event of the monitor means that a sink has gone.

        Of who left before the handshake, as a sink does that looks for the Unix socket, ZeroMQ says
        both that the handshake failed and that he is disconnected.
        """
        if int.from_bytes(event.buffer[:2], sys.byteorder) != zmq.EVENT_DISCONNECTED:
            self._num_strangers += 1
        elif self._num_strangers:
            self._num_strangers -= 1
        else:
            return True
        return False

    def _tell(self, completion: SourceCompletion) -> None:
        self._ready.append(completion)
        self._wake()

    def _transmit(self, connection: Connection, frames: list[bytes | zmq.Frame]) -> bool:
        """One message to a sink; False if it has gone (and is marked) or its queue is full."""
        try:
            send_message(self._socket, connection.identity, *frames)
        except zmq.ZMQError as exc:
            self.counts["send_failed"] += 1
            connection.is_gone = exc.errno != zmq.EAGAIN
            _log.debug("data connection takes nothing: %s", exc)
            return False
        return True

    # -- messages of the sinks

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        identity = bytes(frames[0].buffer)
        connection = self._connections.get(identity)
        if connection is not None:
            connection.num_probes = 0
        elif not self._is_served(frames[-1]):
            self.counts["not_served"] += 1
            self._refuse(identity, "expected a peer on this host; name it in allowed_peers")
            return
        try:
            match _decode(frames):
                case Attach() as message:
                    self._on_attach(identity, connection, message)
                case AskTrial() as message:
                    self._on_trial(identity, message)
                case message if connection is None:
                    self.counts["not_attached"] += 1
                    self._refuse(identity, "expected an attach first; attach anew")
                case Expect() as message:
                    self._on_expect(connection, message)
                case Credit() as message:
                    self._on_credit(connection, message)
        except ProtocolError as exc:
            self.counts["malformed"] += 1
            _log.debug("dropped: %s", exc)

    def _is_served(self, frame: zmq.Frame) -> bool:
        try:
            address = str(frame.get("Peer-Address"))
        except zmq.ZMQError:
            return False
        return may_be_served(self._config, address)

    def _refuse(self, identity: bytes, detail: str) -> None:
        self._transmit(Connection(identity), [encode(Refused(detail))])

    def _on_attach(self, identity: bytes, known: Connection | None, message: Attach) -> None:
        if message.version != STREAM_VERSION or not 0 < message.num_slots <= MAX_SLOTS:
            raise ProtocolError(
                f"attach: expected version {STREAM_VERSION} and 1 to {MAX_SLOTS} slots, "
                f"got {message}"
            )
        if known is not None:
            raise ProtocolError("attach: expected one on a connection, got another")
        if len(self._connections) >= MAX_CONNECTIONS and not self._make_room():
            self.counts["too_many_sinks"] += 1
            self._refuse(identity, f"expected at most {MAX_CONNECTIONS} sinks at once")
            return
        self._connections.add(identity, min(message.num_slots, self._num_slots))

    def _make_room(self) -> bool:
        """Send the oldest sink away that has no transfer; it attaches anew when it has one."""
        busy = {send.connection for send in self._sends.values()}
        for connection in self._connections.all():
            if connection not in busy and not connection.in_flight:
                self.counts["sent_away"] += 1
                self._refuse(connection.identity, "idle, and too many others; attach anew")
                self._lose(connection)
                return True
        return False

    def _on_expect(self, connection: Connection, message: Expect) -> None:
        name = (message.nonce, message.incarnation, message.rank)
        owner = self._connections.of_read(name)
        if owner is not None and owner is not connection and self._probe(owner):
            self.counts["expected_twice"] += 1
            return
        if not self._connections.expect(connection, name):
            self.counts["expected_too_much"] += 1
        for send in list(self._sends.values()):
            if send.name == name and send.connection is None and not send.stopping:
                self._join(send, connection)
        self._pump(connection)

    def _on_credit(self, connection: Connection, message: Credit) -> None:
        for number in message.numbers:
            buffer = connection.in_flight.pop(number, None)
            if buffer is None:
                self.counts["unknown_credit"] += 1
            else:
                connection.free.append(buffer)
        self._pump(connection)

    def _on_trial(self, identity: bytes, message: AskTrial) -> None:
        if message.nbytes != TRIAL_NBYTES:
            raise ProtocolError(f"trial: expected {TRIAL_NBYTES} bytes, got {message.nbytes}")
        if not self._connections.may_try(identity):
            self.counts["too_many_trials"] += 1
            return
        if self._trial is None:  # one for all: ZeroMQ's queues hold references to it
            self._trial = zmq.Frame(trial_pattern(), copy=True)
        self._transmit(Connection(identity), [encode(TrialHeader(TRIAL_NBYTES)), self._trial])

    # -- packing

    def _join(self, send: _Send, connection: Connection) -> None:
        send.connection = connection
        connection.turns.append(send.request.key)

    def _pump(self, connection: Connection) -> None:
        """Give free buffers to the connection's transfers in turn."""
        while connection.free and connection.turns:
            key = connection.turns.popleft()
            send = self._sends.get(key)
            if send is None or send.stopping or send.num_started >= len(send.chunks):
                continue
            self._pack(send, connection, send.chunks[send.num_started], connection.free.pop())
            send.num_started += 1
            if send.num_started < len(send.chunks):
                connection.turns.append(key)

    def _pack(self, send: _Send, connection: Connection, chunk: Chunk, buffer: Buffer) -> None:
        job = _PackJob(self, send, connection, chunk, buffer)
        send.jobs[chunk.sequence] = job
        self._copy_thread.submit(job)

    def pack(self, send: _Send, chunk: Chunk, buffer: Buffer) -> None:
        """On the copy thread: gather the chunk into the buffer."""
        side = send.request.sides[chunk.class_index]
        gather(
            self._memory.tensors,
            side,
            send.block_ids[side.group],
            send.request.classes[chunk.class_index].order,
            chunk.region_lo,
            chunk.region_hi,
            chunk.token_lo,
            chunk.token_hi,
            torch.frombuffer(buffer.sized(chunk.nbytes).buffer, dtype=torch.uint8),
        )

    def _on_pack_ended(self, job: _PackJob) -> None:
        send, sequence = job.send, job.chunk.sequence
        del send.jobs[sequence]
        if job.end is CopyEnd.DONE and not send.stopping:
            send.packed[sequence] = job.buffer
            self._ready.append(Packed(send.request.key, sequence))
            return
        job.connection.free.append(job.buffer)
        if send.stopping:
            self._stop_if_drained(send)
        else:
            self.counts["pack_failed"] += 1
            _log.warning("packing chunk %d failed: %s", sequence, job.error)
            self._stop(send, Reason.READ_FAILED)
        self._pump(job.connection)

    # -- ends

    def _stop(self, send: _Send, reason: Reason | None) -> None:
        if not send.stopping:
            send.stopping, send.reason = True, reason
            for job in list(send.jobs.values()):
                self._copy_thread.cancel(job)
            if send.connection is not None:
                send.connection.free.extend(send.packed.values())
            send.packed.clear()
        self._stop_if_drained(send)

    def _stop_if_drained(self, send: _Send) -> None:
        if not send.jobs and self._sends.pop(send.request.key, None) is not None:
            self._connections.forget(send.name)
            self._tell(SendStopped(send.request.key, send.reason))
            if send.connection is not None:
                self._pump(send.connection)

    def _lose(self, connection: Connection) -> None:
        """The connection has gone, and its buffers with it."""
        self._connections.remove(connection)
        for send in [send for send in self._sends.values() if send.connection is connection]:
            self._stop(send, Reason.PEER_LOST)

    def _probe(self, connection: Connection) -> bool:
        """Is it still there? An empty frame finds out; a full queue does not mean that it is gone.

        A sink answers. One that does not is not asked again, so that its queue keeps room for its
        chunks; the next of these finds out.
        """
        if connection.num_probes < MAX_PROBES:
            connection.num_probes += 1
            if not self._transmit(connection, [b""]) and connection.is_gone:
                self._lose(connection)
                return False
        return True


def _decode(frames: list[zmq.Frame]) -> ToSource:
    if len(frames) != 2:
        raise ProtocolError(f"data message: expected 1 frame, got {len(frames) - 1}")
    return decode_to_source(frames[1].buffer)
