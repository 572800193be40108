"""Control messages over ZeroMQ, the side that speaks first: a DEALER for each source rank."""

from __future__ import annotations

from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvxfer.config import Config
from kvxfer.connector.control import BEYOND_NBYTES, MAX_DETAIL, common_options
from kvxfer.connector.io_thread import IoThread, ZmqSocket
from kvxfer.connector.ledger import Ledger
from kvxfer.errors import ProtocolError
from kvxfer.transfer.wire import Ping, ToSink, ToSource, decode_to_sink, encode
from kvxfer.transports.backlog import LOOK_S, WORD_S, Backlog
from kvxfer.transports.zmq_inbox import Inbox
from kvxfer.transports.zmq_listeners import secure_client

_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_OTHER_MECHANISM = zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
"""One side has CURVE on, the other has not."""


class ControlClient:
    """The connection to one source rank.

    ``on_message(message)`` gets every message that could be understood; ``on_gone(detail)`` is
    called at most once, when a connection that stood has ended, or the other side has said that it
    does not let this engine in. One that never stood is tried again until it is closed; ``problem``
    says why, and ``is_refused`` whether it is a matter of who may come in.

    Raises zmq.ZMQError where no socket can be had.
    """

    def __init__(
        self,
        io: IoThread,
        context: zmq.Context[ZmqSocket],
        config: Config,
        ledger: Ledger,
        endpoint: str,
        server_key: str | None,
        on_message: Callable[[ToSink], None],
        on_gone: Callable[[str], None],
    ) -> None:
        self.endpoint = endpoint
        self.problem = ""
        self.is_refused = False
        self.heard_s = self._said_s = io.now()
        self.unanswered_s: float | None = None
        self._io = io
        self._config = config
        self._ledger = ledger
        self._on_message = on_message
        self._on_gone = on_gone
        self._stood = False
        self._closed = False
        self._socket: ZmqSocket = context.socket(zmq.DEALER)
        try:
            common_options(self._socket, config)
            self._socket.setsockopt(zmq.IPV6, int("[" in endpoint))
            self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
            self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
            secure_client(self._socket, config, server_key)
            self._monitor: ZmqSocket = self._socket.get_monitor_socket(
                _EVENTS | zmq.EVENT_HANDSHAKE_SUCCEEDED
            )
            self._socket.connect(endpoint)
        except BaseException:
            monitor = self._socket._monitor_socket
            if monitor is not None:
                monitor.close()
            self._socket.close(linger=0)
            raise
        self._inbox, self._backlog = Inbox(self._socket), Backlog(-1)
        self._inspecting = io.after(LOOK_S, self._inspect)
        io.watch(self._socket, self._read)
        io.watch(self._monitor, self._look)

    def send(self, message: ToSource) -> None:
        """Queue a message; it leaves when the connection stands, after what was deferred before.

        Raises ProtocolError for one that the other side would refuse unread.
        """
        self._io.run_deferred()
        if self._closed:
            return
        frame, limit_nbytes = encode(message), self._config.control_max_nbytes
        if len(frame) > limit_nbytes:
            raise ProtocolError(
                f"{type(message).__name__}: expected at most {limit_nbytes} bytes, "
                f"got {len(frame)}; raise control_max_nbytes on both sides"
            )
        self._said_s = self._io.now()
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError:
            self._ledger.count("control.dropped")

    def close(self) -> None:
        """End the connection; what was sent may still leave. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._inspecting.cancel()
        self._io.unwatch(self._socket)
        self._io.unwatch(self._monitor)
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()

    def _read(self) -> None:
        for frames in self._inbox.receive():
            self.heard_s, self.unanswered_s = self._io.now(), None
            self._backlog.note(frames)
            if frames[-1].more:
                self._on_gone("it sent a message of many parts")
                return
            try:
                message = self._decode(frames)
            except ProtocolError as e:
                self._ledger.count("control.malformed")
                self.problem = str(e)[:MAX_DETAIL]
                continue
            self._on_message(message)
            if self._closed:
                return

    def _inspect(self) -> None:
        """A source that sends more than anybody reads is none."""
        self._inspecting = self._io.after(LOOK_S, self._inspect)
        if self._io.now() - self._said_s >= WORD_S:
            self.send(Ping())
        nbytes = self._backlog.look(was_empty=self._inbox.take_empty())
        if nbytes > self._config.control_max_nbytes + BEYOND_NBYTES:
            self._on_gone(f"it has sent {nbytes} bytes that are no messages, or too many")

    def _decode(self, frames: list[zmq.Frame]) -> ToSink:
        limit_nbytes = self._config.control_max_nbytes
        if len(frames) != 1:
            raise ProtocolError(f"control frame: expected one part, got {len(frames)}")
        if len(frames[0]) > limit_nbytes:
            raise ProtocolError(
                f"control frame: expected at most {limit_nbytes} bytes, got {len(frames[0])}; "
                "raise control_max_nbytes on both sides if this is right"
            )
        return decode_to_sink(frames[0].buffer)

    def _look(self) -> None:
        """What the monitor has seen."""
        while not self._closed and self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            kind = int(event["event"])
            if kind == zmq.EVENT_CONNECTED:
                self._backlog = Backlog(int(event["value"]))
            elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._stood, self.is_refused = True, False
            elif kind != zmq.EVENT_DISCONNECTED:
                if self._is_refused_for_good(kind, int(event["value"])):
                    self._on_gone(self.problem)
                    return
            elif self._stood:
                self._read()  # what it said before it went still counts
                if not self._closed:
                    self._on_gone("the connection ended")
                return

    def _is_refused_for_good(self, kind: int, value: int) -> bool:
        """Note why a handshake failed. False: the next one may go better."""
        has_curve = self._config.curve_public_key is not None
        is_answer = kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        is_other = kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == _OTHER_MECHANISM
        self.is_refused = has_curve or is_answer or is_other
        if is_answer:
            what = "CURVE key; name it in curve_server_keys there"
            if not has_curve:
                what = "address; name it in allowed_peers there, or set CURVE keys on both sides"
            self.problem = f"it does not admit this engine's {what}"
        elif has_curve:
            self.problem = (
                "the handshake failed; it has no CURVE keys, or another one than "
                "curve_server_keys of this engine says"
            )
        elif is_other:
            self.problem = "it has CURVE keys, and this engine has none; set them on both sides"
        else:
            self.problem = "the handshake failed; is it a kvxfer engine?"
        return is_answer or is_other
