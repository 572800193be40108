"""The reference engine's request channel: Generate and Abort in, tokens and results out. Apart from
the KV protocol.

msgspec tagged structs in msgpack over ZMQ ROUTER (engine) and DEALER (client). A frame that cannot
be understood is refused and counted, and the engine goes on.
"""

from __future__ import annotations

import errno
import logging
import math
import time
from collections.abc import Iterable
from typing import Any

import msgspec
import zmq

from kvxfer.config import Config
from kvxfer.connector.records import LoadReport
from kvxfer.engine.digest import KVDigest
from kvxfer.errors import ConfigError, PeerLost, ProtocolError
from kvxfer.transfer import wire
from kvxfer.transports.channel import ask_guard, set_keys
from kvxfer.transports.guard import Guard, pinned_keys
from kvxfer.transports.key_folder import with_folder_keys
from kvxfer.transports.visitors import EVENT, Inbox, Visitors

log = logging.getLogger("kvxfer.engine")

_MAX_FRAME_NBYTES = 64 << 20
"""A million token ids are 5 MB; digests of a 10,000-token prompt on 8 ranks about 10 MB."""
_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_BEYOND_NBYTES = 1 << 20
"""What a client may have sent beside one message that was not read."""
_MOST_UNREAD = 10_000
"""Answers that wait for one client. A token's are 60 bytes; and TCP holds some 50,000 more."""
_LAST_WORDS_MS = 1000
HEARTBEAT_S = 1.0
"""ZMQ's own heartbeats: a peer whose process or host is gone is noticed without traffic."""


class Generate(msgspec.Struct, frozen=True, tag="generate"):
    """Ids are unique per engine. ``trace_headers``: its ``traceparent`` and ``tracestate``."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_new_tokens: int
    kv_transfer_params: dict[str, Any] | None = None
    trace_headers: dict[str, str] | None = None


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End a request now; its Done follows, unless it had ended: then its offer is withdrawn.
    ``why``: for the log, where the KV could not be used elsewhere.
    """

    request_id: str
    why: str = ""


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Answered by Info, at once."""


class Token(msgspec.Struct, frozen=True, tag="token"):
    """One more token. ``logit_gap``: how far its logit was ahead of the second."""

    request_id: str
    token_id: int
    logit_gap: float


class Done(msgspec.Struct, frozen=True, tag="done", kw_only=True):
    """A request ended. ``loads``: one report per rank that loaded KV; ``failure``: why KV was
    not used, if so; ``detail``: the same in words, where no load says it.
    """

    request_id: str
    status: str
    kv_transfer_params: dict[str, Any] | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_external_tokens: int
    failure: str | None
    loads: tuple[LoadReport, ...]
    digests: tuple[KVDigest, ...]
    detail: str = ""


class RequestRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The request was not started, or the frame not understood (then ``request_id`` is empty).
    ``is_draining``: because the engine is going to end; another one may take it.
    """

    request_id: str
    error: str
    is_draining: bool = False


class Info(msgspec.Struct, frozen=True, tag="info", kw_only=True):
    """The engine as it stands. ``prefix_hit_rate``: share of the prompt tokens of its most recent
    1000 requests that it had cached.
    """

    engine_id: str
    vocab_size: int
    max_model_len: int
    num_blocks: int
    num_free_blocks: int
    prefix_hit_rate: float
    pids: tuple[int, ...]
    counts: dict[str, int]
    is_draining: bool = False


ToEngine = Generate | Abort | Ask
ToClient = Token | Done | RequestRefused | Info

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_to_client = msgspec.msgpack.Decoder(ToClient)


def _tune(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_NBYTES)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(HEARTBEAT_S * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(HEARTBEAT_S * 5000))


class RpcServer:
    """The engine's end; used by one thread."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
        port: int,
        kv: Config | None = None,
    ) -> None:
        """Listen on ``host:port`` (port 0: any). ConfigError when that cannot be had. ``kv``: its
        CURVE keys, if it has any, are those of this channel, too.
        """
        self.num_malformed = 0
        self.socket = context.socket(zmq.ROUTER)
        # They write who is refused to the log
        unread_nbytes = _MAX_FRAME_NBYTES + _BEYOND_NBYTES
        self._visitors = Visitors(context, self.socket, unread_nbytes)
        self._inbox = Inbox(self.socket, self._visitors)
        self._next_look_s = 0.0
        self.monitor = self._visitors.monitor
        _tune(self.socket)
        self.socket.setsockopt(zmq.SNDHWM, _MOST_UNREAD)
        # Otherwise an answer that a client has no room for is dropped without an error
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if kv is not None and (kv := with_folder_keys(kv)).curve_secret_key is not None:
            Guard(context, kv)
            ask_guard(self.socket, kv)
            self._visitors.key = kv.curve_public_key
        try:
            self.socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as e:
            self.close()
            what = "address of this machine" if e.errno == errno.EADDRNOTAVAIL else "port"
            raise ConfigError(
                f"listen: cannot bind {host}:{port}: {e}; choose another {what}"
            ) from e
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._visitors.endpoint = self.endpoint

    @property
    def wait_ms(self) -> int | None:
        """After which :meth:`receive` is to be called though nothing can be read; None: never."""
        has_to_look = len(self._visitors) or self._visitors.keeps_out
        return math.ceil(self._visitors.look_s * 1000) if has_to_look else None

    def receive(self) -> list[tuple[bytes, ToEngine]]:
        """Never blocks; to be called when the socket or ``monitor`` can be read, and after
        ``wait_ms``. For one turn: who sends without an end does not hold up the engine's steps.
        """
        self._visitors.meet()
        messages: list[tuple[bytes, ToEngine]] = []
        for name, *frames in self._inbox.receive():
            client = name.bytes
            try:
                if len(frames) != 1:
                    raise msgspec.ValidationError(f"expected 1 frame, got {len(frames)}")
                messages.append((client, _to_engine.decode(frames[0].buffer)))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
                self.num_malformed += 1
                self.send(client, RequestRefused("", f"request frame: {e}"))
        self._look()
        return messages

    def _look(self) -> None:
        self._visitors.take_gone()  # their requests go on
        if (now_s := time.monotonic()) >= self._next_look_s:
            self._visitors.look(self._inbox.take_empty)
            self._next_look_s = now_s + self._visitors.look_s

    def send(self, client: bytes, message: ToClient) -> None:
        """Answer. Nobody hears it where the client has gone; one that does not read what it asks
        for is sent away at once, because of a request's tokens none may be left out.
        """
        try:
            self.socket.send_multipart([client, _encoder.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as e:
            if e.errno == errno.EAGAIN:
                self._visitors.unread(client, most=1)
            elif e.errno != errno.EHOSTUNREACH:
                raise

    def flush(self) -> None:
        """What was sent may still leave after :meth:`close`, for a second."""
        self.socket.setsockopt(zmq.LINGER, _LAST_WORDS_MS)

    def close(self) -> None:
        self._visitors.close()
        self.socket.close()


def wait_for(
    sources: Iterable[zmq.Socket[bytes] | int], timeout_s: float
) -> set[zmq.Socket[bytes] | int]:
    """Sleep until a socket or a file descriptor is readable: those that are, none in time."""
    poller = zmq.Poller()
    for source in sources:
        poller.register(source, zmq.POLLIN)
    return {source for source, _ in poller.poll(math.ceil(timeout_s * 1000))}


def decode_to_client(frame: bytes, endpoint: str) -> ToClient:
    """What the engine at ``endpoint`` says. Raises ProtocolError."""
    try:
        message: ToClient = _to_client.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        if _is_of_kv(frame):
            raise ProtocolError(
                f"engine at {endpoint}: expected the port where it takes requests, got that of its "
                "KV; name the one that it has from --listen"
            ) from e
        raise ProtocolError(f"engine at {endpoint}: {e}; is it a kvxfer engine?") from e
    return message


def _is_of_kv(frame: bytes) -> bool:
    """Whether a KV front door says that it does not understand."""
    try:
        return isinstance(wire.decode_to_sink(frame), wire.Malformed)
    except ProtocolError:
        return False


class RpcClient:
    """The other end; used by one thread. Works as a context manager."""

    def __init__(
        self,
        endpoint: str,
        *,
        connect_timeout_s: float,
        kv: Config | None = None,
        engine_id: str = "",
    ) -> None:
        """Connect to ``tcp://host:port`` and wait for its Info; PeerLost without it in time.
        ``kv``: of the engine, or with the same CURVE keys; None: it has none. ``engine_id``: which
        of ``curve_server_keys`` it is to have, if it is among them.
        """
        self.endpoint, self.kv = endpoint, kv
        own = with_folder_keys(kv or Config())
        # Which of the keys it has is found out by trying, the likely one first: the engine writes
        # each failure to its log
        likely = (own.curve_server_keys or {}).get(engine_id, own.curve_public_key)
        keys = sorted(pinned_keys(own), key=lambda key: key != likely) or [""]
        for key in keys:
            try:
                self._connect(own, key, connect_timeout_s)
            except PeerLost:
                if not self._is_refused or key == keys[-1]:
                    raise
            else:
                return

    def _connect(self, own: Config, server_key: str, timeout_s: float) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _tune(self._socket)
        if set_keys(self._socket, own):
            self._socket.curve_serverkey = server_key.encode()
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | _FAILED)
        self._is_lost = self._is_refused = False
        try:
            self._socket.connect(self.endpoint)
            self.info = self.ask(timeout_s)
        except zmq.ZMQError as e:
            self.close()
            raise ConfigError(
                f"endpoint: expected tcp://host:port, got {self.endpoint!r} ({e})"
            ) from e
        except (PeerLost, ProtocolError):
            self.close()
            raise

    def send(self, message: ToEngine) -> None:
        self._socket.send(_encoder.encode(message))

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        """For a poller that waits for several engines: when one is readable, ``poll(0)``."""
        return self._socket, self._monitor

    def poll(self, timeout_s: float) -> list[ToClient]:
        """Raises PeerLost when the engine has gone, ProtocolError if it is none."""
        ready = wait_for(self.sockets, timeout_s)
        messages: list[ToClient] = []
        while int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            messages.append(decode_to_client(self._socket.recv(zmq.NOBLOCK), self.endpoint))
        self._is_lost = self._is_lost or self._monitor in ready
        if self._is_lost and not messages:
            if self._monitor in ready:
                kind, _ = EVENT.unpack(self._monitor.recv_multipart()[0])
                self._is_refused = bool(kind & _FAILED)
            if self._is_refused:
                raise PeerLost(
                    f"engine at {self.endpoint}: the handshake failed; is it a kvxfer engine, with "
                    "the CURVE keys of this side? Set the same curve_keys_dir on both, or none"
                )
            raise PeerLost(f"engine at {self.endpoint}: the connection ended; is it still running?")
        return messages

    def ask(self, timeout_s: float) -> Info:
        """The engine as it stands, while no request is in flight; PeerLost without an answer."""
        deadline_s = time.monotonic() + timeout_s
        self.send(Ask())
        while (left_s := deadline_s - time.monotonic()) > 0:
            for message in self.poll(left_s):
                if isinstance(message, Info):
                    return message
        raise PeerLost(
            f"engine at {self.endpoint}: no answer within {timeout_s:g} s; is it running, and can "
            "its port be reached from here?"
        )

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close()
            self._context.term()

    def __enter__(self) -> RpcClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
