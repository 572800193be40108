"""Who may speak to whom: addresses, users, and CURVE keys pinned by engine id.

With CURVE a connection is encrypted and each side knows the other's key; a listener asks for no
address then. Without it a listener serves this host only, unless ``allowed_peers`` was set and
admits the address.

KV that was accepted is found by other requests too, so it is taken only from a source that somebody
answers for: one whose host ``allowed_peers`` names, whose CURVE key is pinned, whose params are
signed, or that is a process of this user on this host.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import zmq
from zmq.utils import z85

from kvxfer.config import Config, not_admitted
from kvxfer.connector.io_thread import ZmqSocket
from kvxfer.connector.listeners import Listeners
from kvxfer.transfer.manifest import parse_endpoint

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # fixed by ZeroMQ RFC 27


def check_host(config: Config, endpoint: str) -> None:
    """Raises PermissionError unless ``allowed_peers`` admits the host of ``tcp://host:port``. Names
    are compared, never looked up.
    """
    try:
        host, _ = parse_endpoint(endpoint)
    except ValueError as e:
        raise PermissionError(str(e)) from e
    if not config.peer_allowed(host):
        raise PermissionError(not_admitted(endpoint))


def check_owners(config: Config, endpoints: Iterable[str], *, are_up: bool) -> None:
    """Raises PermissionError unless somebody answers for a source that listens at these.

    Called before it is connected to (not ``are_up``: perhaps nobody listens yet) and again when it
    has said where it listens: whoever let go of a port in between may hold a connection still.
    """
    if config.curve_public_key is not None or config.params_key is not None:
        return
    listeners, ours = Listeners(), frozenset({os.geteuid()})
    for endpoint in endpoints:
        if config.peer_named(parse_endpoint(endpoint)[0]):
            continue
        users = listeners.users(endpoint)
        if users != ours and (users or are_up):
            raise PermissionError(
                f"{endpoint}: expected a process of this user (uid {os.geteuid()}), got another's "
                "or none; run both engines as one user, name the host in allowed_peers, or set "
                "params_key"
            )


def server_key_of(config: Config, engine_id: str) -> str | None:
    """The public key that an engine must have. Without a table all engines share this one's key
    pair.

    Raises KeyError for an engine that the table does not name. None: CURVE is off.
    """
    if config.curve_public_key is None:
        return None
    if config.curve_server_keys is None:
        return config.curve_public_key
    return config.curve_server_keys[engine_id]


def secure_server(socket: ZmqSocket, config: Config) -> None:
    """Before bind: this engine's key pair, if it has one."""
    if config.curve_public_key is not None and config.curve_secret_key is not None:
        socket.curve_publickey = config.curve_public_key.encode()
        socket.curve_secretkey = config.curve_secret_key.encode()
        socket.curve_server = True


def secure_client(socket: ZmqSocket, config: Config, server_key: str | None) -> None:
    """Before connect: this engine's key pair and the key that the other side must have."""
    if (
        server_key is not None
        and config.curve_public_key is not None
        and config.curve_secret_key is not None
    ):
        socket.curve_publickey = config.curve_public_key.encode()
        socket.curve_secretkey = config.curve_secret_key.encode()
        socket.curve_serverkey = server_key.encode()


class KeyGuard:
    """Answers ZeroMQ's question whether a CURVE client may come in: only with a key that was
    pinned.

    One for each ZeroMQ context, made before any listener binds. ``answer`` is called when
    ``socket`` can be read.
    """

    def __init__(self, context: zmq.Context[ZmqSocket], config: Config) -> None:
        known = set((config.curve_server_keys or {}).values())
        if config.curve_public_key is not None:
            known.add(config.curve_public_key)
        self._keys = frozenset(z85.decode(key) for key in known)
        self.socket: ZmqSocket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ZAP_ENDPOINT)

    def answer(self) -> None:
        """Read every question that lies there."""
        while self.socket.poll(0):
            frames = self.socket.recv_multipart()
            request_id = frames[1] if len(frames) > 1 else b""
            mechanism = frames[5] if len(frames) > 5 else b""
            key = frames[6] if len(frames) > 6 else b""
            is_known = mechanism == b"CURVE" and key in self._keys
            status, text = (b"200", b"OK") if is_known else (b"400", b"key is not pinned")
            self.socket.send_multipart([b"1.0", request_id, status, text, b"", b""])

    def close(self) -> None:
        """End the service."""
        self.socket.close()
