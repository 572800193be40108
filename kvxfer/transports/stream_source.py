"""The giving end of a stream wire: sinks attach to it, and its transfers go to them over a pipe.

slot:  free -> packing -> packed -> leaving (the pipe's) -> in flight (until the sink's credit)
       -> free
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack

import zmq

from kvxfer.config import Config
from kvxfer.errors import ConfigError, ProtocolError, TransportUnavailable
from kvxfer.transports.base import (
    LocalMemory,
    Readable,
    SendRequest,
    SourceCompletion,
    SourceTransport,
    TransferKey,
    Wake,
)
from kvxfer.transports.channel import Bounds, Context, Router
from kvxfer.transports.completions import Completions
from kvxfer.transports.copy_thread import Copier
from kvxfer.transports.native_peers import is_own_user, needs_own_user, refusal
from kvxfer.transports.pipe import MakePipe, Parts, PipeBroken
from kvxfer.transports.stream_admission import Admission
from kvxfer.transports.stream_connections import (
    MAX_CONNECTIONS,
    MAX_STAGING_NBYTES,
    MAX_TRIAL_NBYTES,
    TRIAL_S,
    Connection,
    Connections,
)
from kvxfer.transports.stream_departures import Departures
from kvxfer.transports.stream_packing import MakePacker, make_packer
from kvxfer.transports.stream_sends import PackJob
from kvxfer.transports.stream_transfers import Transfers
from kvxfer.transports.stream_trial import TrialGiver
from kvxfer.transports.stream_wire import (
    CONTROL_MAX_NBYTES,
    FRAME_MAX_NBYTES,
    AskTrial,
    Attach,
    Attached,
    Credit,
    Expect,
    Header,
    Refused,
    ToSource,
    decode_credit,
    decode_to_source,
    encode,
    num_queued,
)

_log = logging.getLogger("kvxfer.transports")

LARGE_CHUNK_NBYTES = 8 << 20
"""Chunks that any sink may ask for; larger ones only where no smaller ``chunk_nbytes`` is set."""
BEHIND_NBYTES = 1 << 20
"""What a sink may have sent that was not read: its longest message has 20 KB."""


class StreamSource(SourceTransport):
    """Sends chunks to the sinks that attach to its ROUTER socket."""

    is_stream = True

    def __init__(
        self,
        make_pipe: MakePipe,
        memory: LocalMemory,
        config: Config,
        copy_thread: Copier,
        wake: Wake,
        context: Context,
        make_packer: MakePacker[PackJob] = make_packer,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._config = config
        self._connections = Connections()
        self._completions: Completions[SourceCompletion] = Completions(wake)
        self._trials = TrialGiver(copy_thread, wake)
        with ExitStack() as undo:
            self._packer = make_packer(memory, config, copy_thread, wake)
            undo.callback(self._packer.close)
            self._pipe = make_pipe(memory, config, wake)
            undo.callback(self._pipe.close)
            self.name = self._pipe.name
            self._admission = Admission(self._pipe, config, memory.device.type)
            self._router = self._listen(config, context)
            undo.pop_all()
        self._departures = Departures(self._pipe, self._announce, self._lose, self._lose_pipe)
        self._transfers = Transfers(
            self._packer,
            self._connections,
            self._open_lane,
            self._departures.give,
            self._completions,
            wake,
            self.counts,
        )

    def _listen(self, config: Config, context: Context) -> Router:
        # Twice what we take, so that what is a little too long is counted before it ends a
        # connection
        bounds = Bounds(2 * CONTROL_MAX_NBYTES, BEHIND_NBYTES, num_queued(config))
        try:
            return Router(context, config, bounds, has_unix_socket=True)
        except (ConfigError, zmq.ZMQError) as exc:
            raise TransportUnavailable(
                f"{self.name}: {config.host} cannot be listened on: {exc}; "
                "set host to an address of this machine"
            ) from exc

    def data_endpoint(self) -> str | None:
        """``tcp://host:port`` of the ROUTER."""
        return self._router.endpoint

    def pollables(self) -> Sequence[Readable]:
        """The ROUTER and its monitor, and what the pipe has."""
        return (self._router.socket, self._router.monitor, *self._pipe.fds())

    @property
    def is_idle(self) -> bool:
        """No sink is attached, and none has left anything behind."""
        is_busy = self._transfers.is_busy or self._trials.is_busy
        has_work = len(self._connections) or self._completions or is_busy
        return not has_work and self._pipe.is_idle

    def submit_send(self, request: SendRequest) -> None:
        """Pack as soon as the sink is attached and has granted room."""
        own_nbytes = self._config.chunk_nbytes or FRAME_MAX_NBYTES
        most_nbytes = max(own_nbytes, LARGE_CHUNK_NBYTES)
        if request.chunk_nbytes > most_nbytes:
            raise ProtocolError(
                f"chunk_nbytes: expected at most {most_nbytes}, got {request.chunk_nbytes}; "
                "raise chunk_nbytes on this side too, or lower it on the other"
            )
        self._transfers.submit(request)

    def send_packed(self, key: TransferKey, sequence: int) -> None:
        """Send it. The whole transfer stops with PEER_LOST where the sink has gone."""
        self._transfers.send_packed(key, sequence)

    def drop_packed(self, key: TransferKey, sequence: int) -> None:
        """The slot is free again."""
        self._transfers.drop_packed(key, sequence)

    def stop_send(self, key: TransferKey) -> None:
        """Chunks that were sent stay sent; packing ends with the running job."""
        self._transfers.stop(key)

    def poll(self) -> list[SourceCompletion]:
        """Credits and attaches of the sinks, chunks that are packed now."""
        for frames in self._router.poll():
            self._on_message(frames)
        self._lose_gone()
        self._transfers.take_packed()
        for connection, header in self._trials.drain():
            self._on_trial_filled(connection, header)
        self._departures.progress()
        self._hear()
        self._transfers.pump_more()
        self._transfers.take_packed()  # what was packed at once leaves in this very round
        return self._completions.take()

    def inspect(self) -> None:
        """Close connections that send what is no message, and end trials that have no end."""
        self._router.inspect()
        ended_s = time.monotonic() - TRIAL_S
        for connection in self._connections.all():
            if connection.is_trial and connection.attached_s < ended_s:
                self._end(connection, f"expected a trial to end within {TRIAL_S} s")

    def close(self) -> None:
        """Stop all transfers, wait for what is being packed, close pipe and sockets."""
        self._transfers.close()
        for connection, header in self._trials.close():
            self._on_trial_filled(connection, header)
        for connection in self._connections.all():
            self._lose(connection)
        self._packer.close()
        self._pipe.close()
        self._router.close()

    # -- messages of the sinks

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        identity = bytes(frames[0].buffer)
        connection = self._connections.get(identity)
        try:
            match _decode(frames):
                case Attach() as message:
                    self._on_attach(identity, connection, message, frames[-1])
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

    def _hear(self) -> None:
        """Credits that the pipe has carried."""
        for connection in self._connections.all():
            if connection.lane is None:
                continue
            try:
                messages = connection.lane.heard()
            except PipeBroken as exc:
                self._lose_pipe(connection, exc)
                continue
            for message in messages:
                try:
                    self._on_credit(connection, decode_credit(memoryview(message)))
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
            slots = self._admission.admit(message)
        except ProtocolError as exc:
            self._refuse(identity, str(exc))
            raise
        if len(self._connections) >= MAX_CONNECTIONS and not self._make_room():
            self.counts["too_many_sinks"] += 1
            self._refuse(identity, f"expected at most {MAX_CONNECTIONS} sinks at once")
            return
        self._connections.add(identity, slots, message.address, is_trial=message.is_trial)

    def _make_room(self) -> bool:
        """Send the oldest sink away that has no transfer; it attaches anew when it has one."""
        busy = self._transfers.connections()
        for connection in self._connections.all():
            if connection not in busy and connection.is_idle:
                return self._end(connection, "idle, and too many others; attach anew")
        return False

    def _make_room_of_staging(self, nbytes: int, *, is_trial: bool) -> bool:
        """The same for as much staging: of idle sinks, and of those that owe credits for so long
        that they will not come. A trial takes that of trials only.
        """
        most_nbytes = MAX_TRIAL_NBYTES if is_trial else MAX_STAGING_NBYTES
        having = self._connections.with_staging(of_trials=is_trial)
        left_nbytes = most_nbytes - nbytes - sum(each.slots.nbytes for each in having)
        if left_nbytes >= 0:
            return True
        busy = self._transfers.connections()
        silent_s = time.monotonic() - self._config.pull_timeout_s
        for connection in having:
            is_idle = connection.is_idle and connection not in busy
            is_silent = connection.in_flight and connection.moved_s < silent_s
            if is_idle or is_silent or connection.is_trial:
                left_nbytes += connection.slots.nbytes
                self._end(connection, "idle or silent, and too many others; attach anew")
            if left_nbytes >= 0:
                return True
        return False

    def _end(self, connection: Connection, detail: str) -> bool:
        self.counts["sent_away"] += 1
        self._send_away(connection, detail)
        return True

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
        self._transfers.join(name, connection)

    def _on_credit(self, connection: Connection, message: Credit) -> None:
        for slot in message.slots:
            if slot in connection.in_flight:
                connection.moved_s = time.monotonic()
                connection.in_flight.remove(slot)
                connection.free.append(slot)
            else:
                self.counts["unknown_credit"] += 1
        self._transfers.pump(connection)

    def _on_trial(self, connection: Connection, message: AskTrial) -> None:
        if not connection.is_trial:
            raise ProtocolError("trial: expected a connection that is a trial's")
        slot = self._trials.check(connection, message)
        if slot is None:
            self.counts["too_many_trials"] += 1
        elif self._open_lane(connection):
            self._trials.fill(connection, slot, message.nbytes)

    def _on_trial_filled(self, connection: Connection, header: Header | None) -> None:
        connection.num_filling -= 1
        if connection.is_lost:
            connection.close_lane()
        elif header is None:
            self._send_away(connection, "the trial cannot be packed")
        else:
            self._departures.give(connection, header)

    def _tell(self, identity: bytes, *frames: bytes | zmq.Frame) -> bool:
        """One message to a sink; False if it has gone, or its queue is full."""
        is_sent = self._router.send(identity, *frames)
        if not is_sent:
            self.counts["send_failed"] += 1
        return is_sent

    def _refuse(self, identity: bytes, detail: str) -> None:
        """Tell a sink that it is not served, or not any more."""
        self._tell(identity, encode(Refused(detail)))

    # -- staging

    def _open_lane(self, connection: Connection) -> bool:
        """Staging is taken when it is needed first. False if there is none: the sink is refused."""
        if connection.lane is not None:
            return True
        if not self._make_room_of_staging(connection.slots.nbytes, is_trial=connection.is_trial):
            self.counts["too_much_staging"] += 1
            detail = f"expected staging of at most {MAX_STAGING_NBYTES} bytes for all sinks"
            self._send_away(connection, detail)
            return False
        try:
            lane = connection.lane = self._pipe.open_source(connection.address, connection.slots)
        except (TransportUnavailable, PipeBroken) as exc:
            self.counts["pipe_failed"] += 1
            _log.warning("%s: a sink cannot be reached: %s", self.name, exc)
            self._send_away(connection, str(exc))
            return False
        return self._tell(connection.identity, encode(Attached(lane.address)))

    def _announce(self, connection: Connection, header: Header, parts: Parts) -> bool:
        frame, lane = encode(header), connection.lane
        if not parts and lane is not None and lane.tell(frame):
            return True
        return self._tell(connection.identity, frame, *parts)

    # -- ends

    def _send_away(self, connection: Connection, detail: str) -> None:
        self._refuse(connection.identity, detail)
        self._lose(connection)

    def _lose_pipe(self, connection: Connection, error: PipeBroken) -> None:
        self.counts["pipe_broken"] += 1
        _log.debug("%s: %s", self.name, error)
        self._send_away(connection, str(error))

    def _lose(self, connection: Connection) -> None:
        """The connection has gone, and with it what its slots hold."""
        if connection.is_lost:
            return
        connection.is_lost = True
        self._departures.forget(connection)
        self._connections.remove(connection)
        self._transfers.forget(connection)
        connection.close_lane()

    def _lose_gone(self) -> None:
        for identity in self._router.take_gone():
            connection = self._connections.get(identity)
            if connection is not None:
                self._lose(connection)


def _decode(frames: list[zmq.Frame]) -> ToSource:
    if len(frames) != 2:
        raise ProtocolError(f"data message: expected 1 frame, got {len(frames) - 1}")
    return decode_to_source(frames[1].buffer)
