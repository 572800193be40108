"""The source end of a stream wire: sinks attach to it, and it sends transfers to them over a pipe.

A transfer waits until a connection names its nonce; from then on it belongs to that connection.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

import zmq

from kvxfer.config import Config
from kvxfer.errors import ConfigError, ProtocolError, TransportUnavailable
from kvxfer.tensors.strided_index import all_side_ids
from kvxfer.transfer.chunks import chunk_list
from kvxfer.transfer.plan import Chunk
from kvxfer.transfer.wire import Reason
from kvxfer.transports.base import (
    LocalMemory,
    Packed,
    Readable,
    SendingSource,
    SendRequest,
    SendStopped,
    Sent,
    SourceCompletion,
    TransferKey,
    Wake,
)
from kvxfer.transports.channel import Bounds, Context, Router, why_not_listening
from kvxfer.transports.copy_thread import Copier, CopyEnd, Mailbox
from kvxfer.transports.native_peers import is_own_user, needs_own_user, refusal
from kvxfer.transports.parallel import stream_threads
from kvxfer.transports.pipe import MakePipe, Parts, PipeBroken
from kvxfer.transports.stream_connections import (
    MAX_CONNECTIONS,
    MAX_STAGING_NBYTES,
    MAX_TRIAL_NBYTES,
    TRIAL_S,
    Admission,
    Connection,
    Connections,
    ReadName,
)
from kvxfer.transports.stream_machine import Cancel, Fill, SlotEvent, SourceAction, SourceSlot
from kvxfer.transports.stream_packing import ChunkJob, Ids, Packer, make_packer
from kvxfer.transports.stream_trial import TrialFill, trial_slot
from kvxfer.transports.stream_wire import (
    CONTROL_MAX_NBYTES,
    FRAME_MAX_NBYTES,
    AskTrial,
    Attach,
    Attached,
    Credit,
    Expect,
    Header,
    Join,
    Refused,
    Streams,
    TrialHeader,
    decode_credit,
    decode_to_source,
    encode,
    num_queued,
)
from kvxfer.transports.wake_up import Completions

_log = logging.getLogger("kvxfer.transports")

LARGE_CHUNK_NBYTES = 8 << 20
"""Chunks that any sink may ask for; larger ones only where no smaller ``chunk_nbytes`` is set."""
_NBYTES = attrgetter("nbytes")
BEHIND_NBYTES = 1 << 20
"""What a sink may have sent that was not read: its longest message has 20 KB."""


@dataclass(slots=True, eq=False)
class _Transfer:
    """One that has not ended. ``connection``: whose sink has named it. ``block_ids``: of each
    class, those of the tokens before ``open_tokens``.
    """

    name: ReadName
    request: SendRequest
    chunks: Sequence[Chunk]
    block_ids: Sequence[Ids]
    open_tokens: int
    connection: Connection | None = None


class StreamSource(SendingSource):
    """Sends chunks to the sinks that attach to its ROUTER socket. ``packer``: replaces the packer
    that suits the memory.
    """

    can_grow = True

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
        self._config, self._wake = config, wake
        self._connections = Connections()
        self._completions: Completions[SourceCompletion] = Completions(wake)
        self._copy_thread = copy_thread
        self._filled: Mailbox[TrialFill] = Mailbox(wake)
        self._num_filling = 0
        with ExitStack() as undo:
            self._packer = packer or make_packer(memory, config, copy_thread, wake)
            undo.callback(self._packer.close)
            self._pipe = make_pipe(memory, config, wake)
            undo.callback(self._pipe.close)
            self.name = self._pipe.name
            self._admission = Admission(self._pipe, config, memory.device.type)
            self._router = self._listen(config, context)
            undo.callback(self._router.close)
            self._pipe.listen()
            undo.pop_all()
        self._transfers: dict[TransferKey, _Transfer] = {}
        self._leaving: dict[Connection, None] = {}
        """Those that have slots which the pipe still sends."""
        self._unpumped: dict[Connection, None] = {}
        """Those that may have room for more than was begun in this turn, in their order."""
        self._num_jobs = 0
        self._sockets = (self._router.socket, self._router.monitor)

    def _listen(self, config: Config, context: Context) -> Router:
        # Twice the longest valid message: a message that is a little too long is counted before one
        # ends a connection
        bounds = Bounds(2 * CONTROL_MAX_NBYTES, BEHIND_NBYTES, num_queued(config))
        try:
            return Router(
                *(context, config, bounds, config.data_ports),
                has_unix_socket=True,
                threads=sum(stream_threads(context)) if self._pipe.has_streams else 0,
            )
        except (ConfigError, zmq.ZMQError) as exc:
            raise why_not_listening(self.name, config, exc) from exc

    def data_endpoint(self) -> str:
        return self._router.endpoint

    def pollables(self) -> Sequence[Readable]:
        return (*self._sockets, *self._pipe.fds()) if self._pipe.is_driven else self._sockets

    @property
    def is_idle(self) -> bool:
        if self._num_jobs or self._completions or self._unpumped or self._num_filling:
            return False
        if not self._pipe.is_driven:
            return True
        return not (self._transfers or len(self._connections)) and self._pipe.is_idle

    @property
    def has_more(self) -> bool:  # type: ignore[override]  # others have an attribute
        return self._packer.is_at_once and bool(self._unpumped)

    @property
    def look_s(self) -> float:  # type: ignore[override]  # others have an attribute
        return self._router.visitors.look_s

    @property
    def is_settled(self) -> bool:  # type: ignore[override]  # others have an attribute
        """Every slot was credited: a sink has placed what was in it."""
        return all(connection.is_idle for connection in self._connections.all())

    # -- transfers

    def submit_send(self, request: SendRequest) -> None:
        own_nbytes = self._config.chunk_nbytes or FRAME_MAX_NBYTES
        most_nbytes = max(own_nbytes, LARGE_CHUNK_NBYTES)
        if request.chunk_nbytes > most_nbytes:
            raise ProtocolError(
                f"chunk_nbytes: expected at most {most_nbytes}, got {request.chunk_nbytes}; "
                "raise chunk_nbytes on this side too, or lower it on the other"
            )
        if request.key in self._transfers:
            raise ValueError(f"send: expected a key that is not in use, got {request.key} twice")
        chunks = chunk_list(request.classes, request.chunk_nbytes, request.part_tokens)
        if not chunks:
            self._completions.tell(Sent(request.key, 0))
            return
        ids = all_side_ids(request.sides, request.block_ids)
        key = request.key
        name = (key.nonce, key.incarnation, key.sink_rank)
        transfer = _Transfer(name, request, chunks, ids, request.open_tokens)
        self._transfers[key] = transfer
        connection = self._connections.of_read(name)
        if connection is not None:
            self._join(transfer, connection)
            self._pump(connection)

    def grow_send(
        self, key: TransferKey, block_ids: tuple[tuple[int, ...], ...], open_tokens: int
    ) -> None:
        transfer = self._transfers.get(key)
        if transfer is None:
            return
        transfer.block_ids = all_side_ids(transfer.request.sides, block_ids)
        transfer.open_tokens = open_tokens
        if transfer.connection is not None:
            transfer.connection.sends.grow(key, open_tokens)
            self._pump(transfer.connection)

    def send_packed(self, key: TransferKey, sequence: int) -> None:
        """Send it. The whole transfer stops with PEER_LOST where the sink has gone."""
        connection = self._connection_of(key)
        header = None if connection is None else connection.sends.leave(key, sequence)
        if connection is None or header is None:
            self.counts["unknown_packed"] += 1
            return
        self._give(connection, header)
        if not connection.is_lost:
            self._perform(connection, connection.sends.left(key, sequence))

    def drop_packed(self, key: TransferKey, sequence: int) -> None:
        connection = self._connection_of(key)
        if connection is None or not connection.sends.drop(key, sequence):
            self.counts["unknown_packed"] += 1
            return
        self.counts["dropped_packed"] += 1
        self._pump(connection)

    def stop_send(self, key: TransferKey) -> None:
        """Chunks that were sent stay sent; packing ends with the running job."""
        self._stop(key, None)

    def _connection_of(self, key: TransferKey) -> Connection | None:
        transfer = self._transfers.get(key)
        return None if transfer is None else transfer.connection

    def _join(self, transfer: _Transfer, connection: Connection) -> None:
        transfer.connection = connection
        connection.sends.begin(transfer.request.key, transfer.chunks, transfer.open_tokens)
        if not self._open_lane(connection):
            return  # it has stopped with the connection
        if max(map(_NBYTES, transfer.chunks)) > connection.slots.slot_nbytes:
            self.counts["too_large"] += 1
            self._stop(transfer.request.key, Reason.PLAN)

    def _stop(self, key: TransferKey, reason: Reason | None) -> None:
        connection = self._connection_of(key)
        if connection is not None:
            self._perform(connection, connection.sends.stop(key, reason))
            self._pump(connection)
            return
        transfer = self._transfers.pop(key, None)
        if transfer is not None:
            self._connections.forget(transfer.name)
        self._completions.tell(SendStopped(key, reason))

    def _perform(self, connection: Connection, actions: Sequence[SourceAction]) -> None:
        for action in actions:
            match action:
                case Cancel(slot):
                    self._packer.cancel(connection.jobs[slot])
                case Packed():
                    self._completions.append(action)
                case _:
                    self._connections.forget(self._transfers.pop(action.key).name)
                    self._completions.tell(action)

    # -- packing

    def _pump_more(self) -> None:
        """A new turn, unless what is packed now leaves first."""
        if self._completions:
            if self._unpumped:
                self._wake()
            return
        self._packer.begin_turn()
        unpumped, self._unpumped = self._unpumped, {}
        for connection in unpumped:
            self._pump(connection)

    def _pump(self, connection: Connection) -> None:
        """Give free slots to the connection's transfers in turn, as many as the packer takes."""
        while not connection.is_lost and self._packer.takes_more:
            fill = connection.sends.next_fill()
            if fill is None:
                break
            self._pack(connection, fill)
        if not (connection.is_lost or self._packer.takes_more) and connection.sends.has_more:
            self._unpumped[connection] = None
            self._wake()
        self._packer.launch()

    def _pack(self, connection: Connection, fill: Fill) -> None:
        transfer, chunk = self._transfers[fill.key], fill.chunk
        number = chunk.class_index
        side, ids = transfer.request.sides[number], transfer.block_ids[number]
        connection.trial_slots.pop(fill.slot, None)
        job = connection.jobs[fill.slot] = ChunkJob(
            *(connection, fill.key, chunk, fill.slot, side, ids),
            dense=connection.lane,
            order=transfer.request.classes[number].order,
        )
        job.is_awaited = connection.table.num_busy == 1
        self._num_jobs += 1
        self._packer.submit(job)

    def _on_packed(self, job: ChunkJob) -> None:
        connection, sequence, is_packed = job.owner, job.chunk.sequence, job.end is CopyEnd.DONE
        assert isinstance(connection, Connection)
        del connection.jobs[job.slot]
        self._num_jobs -= 1
        if not is_packed and connection.sends.is_wanted(job.key):
            self.counts["pack_failed"] += 1
            _log.warning("packing chunk %d failed: %s", sequence, job.error)
        actions = connection.sends.filled(job.key, sequence, is_packed=is_packed)
        if connection.is_lost:
            connection.close_lane()
        self._perform(connection, actions)
        if connection.table.states[job.slot] is SourceSlot.FREE:
            self._pump(connection)

    # -- sending

    def _give(self, connection: Connection, header: Header) -> None:
        """The slot of this header is full: the pipe sends it, and then it is announced."""
        assert connection.lane is not None
        try:
            parts = connection.lane.send(header.slot, header.generation, header.nbytes)
        except PipeBroken as exc:
            self._lose_pipe(connection, exc)
            return
        connection.leaving[header.slot] = (header, parts)
        self._leaving[connection] = None
        self._announce_sent(connection)  # most pipes need not go on for that
        if connection.leaving:
            self._progress()

    def _progress(self) -> None:
        self._pipe.progress()
        for connection in list(self._leaving):
            self._announce_sent(connection)

    def _hear(self) -> None:
        for connection in self._connections.all():
            try:
                messages = () if connection.lane is None else connection.lane.heard()
            except PipeBroken as exc:
                self._lose_pipe(connection, exc)
                continue
            for message in messages:
                try:
                    self._on_credit(connection, decode_credit(memoryview(message)))
                except ProtocolError as exc:
                    self._drop(exc)

    def _announce_sent(self, connection: Connection) -> None:
        if connection.lane is None or connection.is_lost:
            return
        try:
            for slot in connection.lane.poll():
                if not self._announce(connection, *connection.leaving.pop(slot)):
                    # Gone; or its queue is full, which credits rule out for who counts slots.
                    self._lose(connection)
                    return
                if not connection.table.num[SourceSlot.IN_FLIGHT]:
                    connection.moved_s = time.monotonic()
                connection.table.move(slot, SlotEvent.ANNOUNCED)
        except PipeBroken as exc:
            self._lose_pipe(connection, exc)
        if not connection.leaving:
            self._leaving.pop(connection, None)

    def _announce(self, connection: Connection, header: Header, parts: Parts) -> bool:
        """Tell a sink what its slot holds; False if it takes nothing. Raises PipeBroken."""
        return self._carry(connection, header.slot, encode(header), parts)

    def _carry(self, connection: Connection, slot: int, frame: bytes, parts: Parts) -> bool:
        lane = connection.lane
        if not parts and lane is not None and lane.tell(frame):
            return True
        return self._tell(connection.identity_for(slot), frame, *parts)

    # -- the IO thread's turn

    def poll(self) -> list[SourceCompletion]:
        if not (self._num_jobs or self._unpumped):
            self._packer.begin_turn()  # nobody waits for it
        for frames in self._router.poll():
            self._on_message(bytes(frames[0].buffer), frames)
        self._lose_gone()
        self._take_packed()
        if self._num_filling:
            for fill in self._filled.drain():
                self._on_trial_filled(fill)
        if self._pipe.is_driven:
            self._progress()
            self._hear()
        self._pump_more()
        self._take_packed()  # what was packed at once leaves in this very round
        return self._completions.take()

    def _take_packed(self) -> None:
        if self._num_jobs:
            for job in self._packer.drain():
                self._on_packed(job)

    def inspect(self) -> None:
        num_failed = self._router.inspect()
        if num_failed:
            self.counts["refused.handshake"] += num_failed
        self.counts.update(self._pipe.take_counts())
        ended_s = time.monotonic() - TRIAL_S
        for connection in self._connections.all():
            if connection.is_trial and connection.attached_s < ended_s:
                self._end(connection, f"expected a trial to end within {TRIAL_S} s")
        having = self._connections.with_staging()
        self.staging_nbytes = sum(connection.slots.nbytes for connection in having)

    def close(self) -> None:
        for key in list(self._transfers):
            self._stop(key, None)
        while self._transfers:
            self._on_packed(self._packer.take())
        while self._num_filling:
            self._on_trial_filled(self._filled.take())
        for connection in self._connections.all():
            self._lose(connection)
        self._packer.close()
        self._pipe.close()
        self._router.close()

    # -- messages of the sinks

    def _on_message(self, identity: bytes, frames: list[zmq.Frame]) -> None:
        connection = self._connections.get(identity)
        try:
            if len(frames) != 2:
                raise ProtocolError(f"data message: expected 1 frame, got {len(frames) - 1}")  # noqa: TRY301
            decoded = decode_to_source(frames[1].buffer)
        except ProtocolError as exc:
            self._drop(exc)
            if connection is not None:  # perhaps a credit, without which a slot never comes back
                self._send_away(connection, f"a message makes no sense: {exc}; attach anew")
            return
        try:
            match decoded:
                case Attach() as message:
                    self._on_attach(identity, connection, message, frames[-1])
                case Join() as message:
                    self._on_join(identity, connection, message)
                case message if connection is None:
                    self.counts["not_attached"] += 1
                    self._refuse(identity, "expected an attach first; attach anew")
                case AskTrial() as message:
                    self._on_trial(connection, message)
                case Expect() as message:
                    self._on_expect(connection, message)
                case Credit() as message:
                    self._on_credit(connection, message)
        except ProtocolError as exc:
            self._drop(exc)

    def _drop(self, error: ProtocolError) -> None:
        self.counts["malformed"] += 1
        _log.debug("dropped: %s", error)

    def _on_attach(
        self, identity: bytes, known: Connection | None, message: Attach, frame: zmq.Frame
    ) -> None:
        if known is not None:
            raise ProtocolError("attach: expected one on a connection, got another")
        if needs_own_user(self._pipe, self._config) and not is_own_user(frame):
            self.counts["not_trusted"] += 1
            self._refuse(identity, refusal(self.name))
            return
        try:
            num_streams = self._admission.num_streams(message, self._connections.num_further)
            slots = self._admission.admit(message, num_streams)
        except ProtocolError as exc:
            self._refuse(identity, str(exc))
            raise
        if len(self._connections) >= MAX_CONNECTIONS and not self._make_room():
            self.counts["too_many_sinks"] += 1
            self._refuse(identity, f"expected at most {MAX_CONNECTIONS} sinks at once")
            return
        connection = self._connections.add(
            identity, slots, message.address, is_trial=message.is_trial
        )
        if num_streams > 1:
            token = self._connections.admit_streams(connection, num_streams)
            self._tell(identity, encode(Streams(token, num_streams)))

    def _on_join(self, identity: bytes, known: Connection | None, message: Join) -> None:
        if known is not None:
            raise ProtocolError("join: expected a connection of its own, got one that is known")
        connection = self._connections.join(identity, message.token)
        if connection is None:
            self.counts["not_attached"] += 1
            self._refuse(identity, "expected the token of a connection that has room for a stream")
        elif connection.lane is not None:
            self._tell(identity, encode(Attached(connection.lane.address)))

    def _make_room(self) -> bool:
        """Disconnect the oldest sink without a transfer, first of those that never had a chunk:
        anybody can attach. It attaches anew when it has a transfer.
        """
        # One by one, and the first will often do: a look at all of 512 takes longer than an attach
        idle = (each for each in self._connections.all() if each.is_idle)
        oldest = next(idle, None)
        if oldest is None:
            return False
        unused = (
            each
            for each in chain((oldest,), idle)
            if each.is_trial or not any(each.table.generations)
        )
        self._end(next(unused, oldest), "idle, and too many others; attach anew")
        return True

    def _make_room_of_staging(self, nbytes: int, *, is_trial: bool) -> bool:
        """The same for as much staging: of idle sinks, and of those that owe credits for so long
        that they will not come. A trial takes that of trials only.
        """
        most_nbytes = MAX_TRIAL_NBYTES if is_trial else MAX_STAGING_NBYTES
        having = self._connections.with_staging(of_trials=is_trial)
        left_nbytes = most_nbytes - nbytes - sum(each.slots.nbytes for each in having)
        if left_nbytes >= 0:
            return True
        silent_s = time.monotonic() - self._config.pull_timeout_s
        for connection in having:
            num_owed = connection.table.num[SourceSlot.IN_FLIGHT]
            is_silent = num_owed and connection.moved_s < silent_s
            if connection.is_idle or is_silent or connection.is_trial:
                left_nbytes += connection.slots.nbytes
                self._end(connection, "idle or silent, and too many others; attach anew")
            if left_nbytes >= 0:
                return True
        return False

    def _end(self, connection: Connection, detail: str) -> None:
        self.counts["sent_away"] += 1
        self._send_away(connection, detail)

    def _on_expect(self, connection: Connection, message: Expect) -> None:
        if connection.is_trial:
            raise ProtocolError("expect: expected a connection that is not a trial's")
        name = (message.nonce, message.incarnation, message.rank)
        owner = self._connections.of_read(name)
        if owner is not None and owner is not connection:
            self._lose_gone()  # perhaps it has ended: that is told before another can have come
            owner = self._connections.of_read(name)
        if owner is not None and owner is not connection:
            self.counts["expected_twice"] += 1
            return
        if not self._connections.expect(connection, name):
            self.counts["expected_too_much"] += 1
        for transfer in list(self._transfers.values()):
            if transfer.name == name and transfer.connection is None and not connection.is_lost:
                self._join(transfer, connection)
        self._pump(connection)

    def _on_credit(self, connection: Connection, message: Credit) -> None:
        num_unknown = connection.table.credited(message.slots)
        if num_unknown < len(message.slots):
            connection.moved_s = time.monotonic()
        if num_unknown:
            self.counts["unknown_credit"] += num_unknown
        self._pump(connection)

    def _on_trial(self, connection: Connection, message: AskTrial) -> None:
        if not connection.is_trial:
            raise ProtocolError("trial: expected a connection that is a trial's")
        slot = trial_slot(connection, message.nbytes)
        if slot is None:
            self.counts["too_many_trials"] += 1
        elif self._open_lane(connection):
            self._fill_trial(connection, slot, message.nbytes)

    def _fill_trial(self, connection: Connection, slot: int, nbytes: int) -> None:
        """On the copy thread, unless the slot still has what is asked for."""
        connection.num_trials += 1
        connection.table.fill(slot)
        header = TrialHeader(nbytes, slot, connection.table.generations[slot])
        fill = TrialFill(connection, header, self._filled)
        self._num_filling += 1
        if connection.trial_slots.get(slot) == nbytes:
            fill.end = CopyEnd.DONE
            fill.on_end()
        else:
            connection.trial_slots[slot] = nbytes
            self._copy_thread.submit(fill)

    def _on_trial_filled(self, fill: TrialFill) -> None:
        self._num_filling -= 1
        connection, header = fill.connection, fill.header
        is_filled = fill.end is CopyEnd.DONE
        if is_filled:
            connection.table.move(header.slot, SlotEvent.FILLED)
        else:
            connection.table.empty(header.slot)
        if connection.is_lost:
            connection.close_lane()
        elif is_filled:
            connection.table.leave(header.slot)
            self._give(connection, header)
        else:
            self._send_away(connection, "the trial cannot be packed")

    def _tell(self, identity: bytes, *frames: bytes | zmq.Frame) -> bool:
        is_sent = self._router.send(identity, *frames)
        if not is_sent:
            self.counts["send_failed"] += 1
        return is_sent

    def _refuse(self, identity: bytes, detail: str) -> None:
        self._tell(identity, encode(Refused(detail)))

    # -- staging

    def _open_lane(self, connection: Connection) -> bool:
        """Staging is taken when it is needed first. False if there is none: the sink is refused; or
        if the sink has gone: who connects to a process that has died may leave a socket behind, as
        NIXL does.
        """
        if connection.lane is not None:
            return True
        if not self._router.visitors.stands(connection.identity):
            self._lose_ended(connection)
            return False
        if not self._make_room_of_staging(connection.slots.nbytes, is_trial=connection.is_trial):
            self.counts["too_much_staging"] += 1
            detail = f"expected staging of at most {MAX_STAGING_NBYTES} bytes for all sinks"
            self._send_away(connection, detail)
            return False
        try:
            fd = self._router.visitors.descriptor_of(connection.identity)
            lane = self._pipe.open_source(connection.address, connection.slots, fd=fd)
            connection.lane = lane
        except (TransportUnavailable, PipeBroken) as exc:
            self.counts["pipe_failed"] += 1
            _log.warning("%s: a sink cannot be reached: %s", self.name, exc)
            self._send_away(connection, str(exc))
            return False
        attached = encode(Attached(lane.address))
        return all([self._tell(identity, attached) for identity in connection.streams])

    # -- ends

    def _send_away(self, connection: Connection, detail: str) -> None:
        self._refuse(connection.identity, detail)
        self._lose(connection)

    def _lose_pipe(self, connection: Connection, error: PipeBroken) -> None:
        self.counts["pipe_broken"] += 1
        _log.debug("%s: %s", self.name, error)
        self._send_away(connection, str(error))

    def _lose(self, connection: Connection) -> None:
        if connection.is_lost:
            return
        connection.is_lost = True
        connection.leaving.clear()
        self._leaving.pop(connection, None)
        self._unpumped.pop(connection, None)
        self._connections.remove(connection)
        self._perform(connection, connection.sends.lose())
        connection.close_lane()

    def _lose_gone(self) -> None:
        for identity in self._router.visitors.take_gone():
            connection = self._connections.get(identity)
            if connection is not None:
                self._lose_ended(connection)

    def _lose_ended(self, connection: Connection) -> None:
        """It, or one of its streams, has ended. A sink of which only that is taken for true hears
        of it: otherwise it would wait for an answer until its own time is over. Most have ended,
        so that nothing leaves is not counted.
        """
        said = Refused("this connection has ended, or one of its streams; attach anew")
        self._router.send(connection.identity, encode(said))
        self._lose(connection)
