"""What a source sends: transfers of all connections, packed in turns, sent as the session allows.

transfer:  waiting for a connection that names its nonce -> packing, sending -> Sent | SendStopped
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

import numpy as np

from kvxfer.transfer.chunks import chunk_list
from kvxfer.transfer.plan import Chunk
from kvxfer.transfer.wire import Reason
from kvxfer.transports.base import (
    Packed,
    SendRequest,
    SendStopped,
    Sent,
    SourceCompletion,
    TransferKey,
    Wake,
)
from kvxfer.transports.completions import Completions
from kvxfer.transports.copy_thread import CopyEnd
from kvxfer.transports.stream_connections import Connection, Connections, ReadName
from kvxfer.transports.stream_packing import Packer
from kvxfer.transports.stream_sends import PackJob, Send
from kvxfer.transports.stream_wire import ChunkHeader, Header

_log = logging.getLogger("kvxfer.transports")


class Transfers:
    """Those of one source.

    Args:
        connections: who has named which read.
        open_lane: takes staging for a connection; False if it was refused, and is lost.
        give: has the pipe send a slot that is full.
        completions: what has become of transfers.
    """

    def __init__(
        self,
        packer: Packer[PackJob],
        connections: Connections,
        open_lane: Callable[[Connection], bool],
        give: Callable[[Connection, Header], None],
        completions: Completions[SourceCompletion],
        wake: Wake,
        counts: Counter[str],
    ) -> None:
        self._packer, self._connections = packer, connections
        self._open_lane, self._give, self._wake = open_lane, give, wake
        self.counts = counts
        self._sends: dict[TransferKey, Send] = {}
        self._completions = completions
        self._unpumped: dict[Connection, None] = {}
        """Those that may have room for more than was begun in this turn, in their order."""
        self._num_begun = 0

    @property
    def is_busy(self) -> bool:
        """Whether there is a transfer."""
        return bool(self._sends)

    def connections(self) -> set[Connection | None]:
        """Those that have transfers."""
        return {send.connection for send in self._sends.values()}

    def submit(self, request: SendRequest) -> None:
        """Pack as soon as a connection has named it. Raises ValueError for a key in use."""
        if request.key in self._sends:
            raise ValueError(f"send: expected a key that is not in use, got {request.key} twice")
        send = Send(
            request,
            tuple(chunk_list(request.classes, request.chunk_nbytes)),
            [np.asarray(ids, dtype=np.int64) for ids in request.block_ids],
        )
        if not send.chunks:
            self._completions.tell(Sent(request.key, 0))
            return
        self._sends[request.key] = send
        connection = self._connections.of_read(send.name)
        if connection is not None:
            self._join(send, connection)
            self.pump(connection)

    def join(self, name: ReadName, connection: Connection) -> None:
        """The connection has named this read: transfers that waited for it begin."""
        for send in list(self._sends.values()):
            if send.name == name and send.connection is None and not send.stopping:
                self._join(send, connection)
        self.pump(connection)

    def send_packed(self, key: TransferKey, sequence: int) -> None:
        """Send it. The whole transfer stops with PEER_LOST where the sink has gone."""
        send = self._sends.get(key)
        slot = None if send is None else send.packed.pop(sequence, None)
        if send is None or slot is None or send.connection is None:
            self.counts["unknown_packed"] += 1
            return
        connection, chunk = send.connection, send.chunks[sequence]
        header = ChunkHeader(
            *(key.nonce, key.incarnation, key.sink_rank, key.source_rank),
            *(sequence, chunk.nbytes, slot, connection.generations[slot]),
        )
        self._give(connection, header)
        if connection.is_lost:
            return
        send.num_sent += 1
        send.nbytes += chunk.nbytes
        if send.num_sent == len(send.chunks):
            del self._sends[key]
            self._connections.forget(send.name)
            self._completions.tell(Sent(key, send.nbytes))

    def drop_packed(self, key: TransferKey, sequence: int) -> None:
        """The slot is free again.

        Nothing more of this transfer is packed: without this chunk it cannot complete.
        """
        send = self._sends.get(key)
        slot = None if send is None else send.packed.pop(sequence, None)
        if send is None or slot is None or send.connection is None:
            self.counts["unknown_packed"] += 1
            return
        self.counts["dropped_packed"] += 1
        send.num_started = len(send.chunks)
        send.connection.free.append(slot)
        self.pump(send.connection)

    def stop(self, key: TransferKey) -> None:
        """Chunks that were sent stay sent; packing ends with the running job."""
        send = self._sends.get(key)
        if send is None:
            self._completions.tell(SendStopped(key, None))
        else:
            self._stop(send, None)

    def forget(self, connection: Connection) -> None:
        """It is lost, and with it what its slots hold."""
        self._unpumped.pop(connection, None)
        for send in [send for send in self._sends.values() if send.connection is connection]:
            self._stop(send, Reason.PEER_LOST)

    def close(self) -> None:
        """Stop all, and wait for what is being packed."""
        for send in list(self._sends.values()):
            self._stop(send, None)
        while self._sends:
            self._on_pack_ended(self._packer.take())

    # -- packing

    def _join(self, send: Send, connection: Connection) -> None:
        send.connection = connection
        if not self._open_lane(connection):
            return  # it stops with the connection
        largest_nbytes = max(chunk.nbytes for chunk in send.chunks)
        if largest_nbytes > connection.slots.slot_nbytes:
            self.counts["too_large"] += 1
            self._stop(send, Reason.PLAN)
            return
        connection.turns.append(send.request.key)

    def pump_more(self) -> None:
        """A new turn, unless what is packed now leaves first."""
        if self._completions:
            if self._unpumped:
                self._wake()
            return
        self._num_begun = 0
        unpumped, self._unpumped = self._unpumped, {}
        for connection in unpumped:
            self.pump(connection)

    def pump(self, connection: Connection) -> None:
        """Give free slots to the connection's transfers in turn, as many as the packer takes."""
        while connection.free and connection.turns and not connection.is_lost:
            if self._num_begun >= self._packer.num_at_once:
                self._unpumped[connection] = None
                self._wake()
                return
            key = connection.turns.popleft()
            send = self._sends.get(key)
            if send is None or send.stopping or send.num_started >= len(send.chunks):
                continue
            self._pack(send, connection, send.chunks[send.num_started], connection.free.pop())
            send.num_started += 1
            if send.num_started < len(send.chunks):
                connection.turns.append(key)

    def _pack(self, send: Send, connection: Connection, chunk: Chunk, slot: int) -> None:
        job = PackJob(send, connection, chunk, slot)
        send.jobs[chunk.sequence] = job
        connection.num_filling += 1
        connection.trial_slots.pop(slot, None)
        self._packer.submit(job)
        # What was packed at once leaves before the next one is begun.
        self._num_begun = self._packer.num_at_once if job.end else self._num_begun + 1

    def take_packed(self) -> None:
        for job in self._packer.drain():
            self._on_pack_ended(job)

    def _on_pack_ended(self, job: PackJob) -> None:
        send, connection, sequence = job.send, job.connection, job.chunk.sequence
        del send.jobs[sequence]
        connection.num_filling -= 1
        connection.close_lane()
        if job.end is CopyEnd.DONE and not send.stopping:
            send.packed[sequence] = job.slot
            self._completions.note(Packed(send.request.key, sequence))
            return
        connection.free.append(job.slot)
        if send.stopping:
            self._stop_if_drained(send)
        else:
            self.counts["pack_failed"] += 1
            _log.warning("packing chunk %d failed: %s", sequence, job.error)
            self._stop(send, Reason.READ_FAILED)
        self.pump(connection)

    # -- ends

    def _stop(self, send: Send, reason: Reason | None) -> None:
        if not send.stopping:
            send.stopping, send.reason = True, reason
            for job in list(send.jobs.values()):
                self._packer.cancel(job)
            if send.connection is not None:
                send.connection.free.extend(send.packed.values())
            send.packed.clear()
        self._stop_if_drained(send)

    def _stop_if_drained(self, send: Send) -> None:
        if not send.jobs and self._sends.pop(send.request.key, None) is not None:
            self._connections.forget(send.name)
            self._completions.tell(SendStopped(send.request.key, send.reason))
            if send.connection is not None:
                self.pump(send.connection)
