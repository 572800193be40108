"""Sockets that others connect to: where they stand, and who may come in.

ZeroMQ asks a :class:`Guard` about each connection during the handshake (ZAP, ZeroMQ RFC 27). Who is
refused there sends no message, holds no memory beyond the handshake, and is told that he was
refused. Addresses decide; where CURVE keys are configured, keys do, and addresses do not matter. A
Unix socket is for processes of this user, with keys as well as without.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket as sockets
import threading
import time
from collections import Counter
from collections.abc import Callable

import zmq
from zmq.utils import z85

from kvxfer.config import Config
from kvxfer.errors import ConfigError, TransportUnavailable
from kvxfer.transports.zmq_same_host import user_of

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # fixed by ZeroMQ RFC 27
_ZAP_DOMAIN = b"kvxfer"
"""Any name: without one ZeroMQ asks nobody about a connection without CURVE."""
WARN_S = 60.0
MAX_WARNED = 16
"""Warnings of one kind within WARN_S: one for each address, and not more in all."""

_log = logging.getLogger("kvxfer.transports")


def bind_address(host: str) -> str:
    """The address that a listener binds and announces. Raises ConfigError for one that peers cannot
    use.
    """
    try:
        found = sockets.getaddrinfo(host, None, type=sockets.SOCK_STREAM)
    except OSError as e:
        raise ConfigError(
            f"host: expected a name or an address of this machine, got {host!r}: {e}"
        ) from e
    # IPv4 first: "localhost" is both, and most configurations name 127.0.0.1.
    address = str(min(found, key=lambda entry: entry[0] != sockets.AF_INET)[4][0])
    if ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
        raise ConfigError(
            f"host: expected an address that peers can connect to, got {host}; "
            "name the address of one interface"
        )
    return address


def bind_tcp(socket: zmq.Socket[bytes], config: Config, port: int) -> str:
    """Listen on ``host`` with the guard at the door; port 0 takes a free one. Returns the endpoint.

    Raises ConfigError for a host that cannot be used, zmq.ZMQError where the port cannot be had.
    """
    address = bind_address(config.host)
    host = f"[{address}]" if ":" in address else address
    socket.setsockopt(zmq.IPV6, int(":" in address))
    socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a guard nobody comes in
    if config.curve_public_key is not None and config.curve_secret_key is not None:
        socket.curve_publickey = config.curve_public_key.encode()
        socket.curve_secretkey = config.curve_secret_key.encode()
        socket.curve_server = True
    socket.bind(f"tcp://{host}:{port or '*'}")
    return bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()


def secure_client(socket: zmq.Socket[bytes], config: Config, server_key: str | None) -> None:
    """Before connect: this engine's key pair, and the key that the other side must have.

    Raises TransportUnavailable where keys are configured and the other side's is not pinned.
    """
    if config.curve_public_key is None or config.curve_secret_key is None:
        return
    if server_key not in pinned_keys(config):
        raise TransportUnavailable(
            "CURVE: expected a peer whose key is pinned, got another; see curve_server_keys"
        )
    socket.curve_publickey = config.curve_public_key.encode()
    socket.curve_secretkey = config.curve_secret_key.encode()
    socket.curve_serverkey = server_key.encode()


def pinned_keys(config: Config) -> frozenset[str]:
    """The public keys of all engines that this one knows, its own included."""
    keys = set((config.curve_server_keys or {}).values())
    if config.curve_public_key is not None:
        keys.add(config.curve_public_key)
    return frozenset(keys)


def why_refused(config: Config, address: str, key: str | None) -> str | None:
    """Why a listener does not admit this address with this CURVE key; None if it does.

    Without keys loopback is admitted, and others only where ``allowed_peers`` was set and names
    them.
    """
    user = user_of(address)
    if user is not None:
        mine = os.geteuid()
        return None if user == mine else f"expected a process of user {mine}, got user {user}"
    if config.curve_secret_key is not None:
        if key is not None and key in pinned_keys(config):
            return None
        return "expected a CURVE key that is pinned, got another; name it in curve_server_keys"
    try:
        if ipaddress.ip_address(address).is_loopback:
            return None
    except ValueError:
        return "expected an address, got none"
    if config.peer_allowed(address):
        return None
    return "expected a peer on this host, got another; name it in allowed_peers, or configure CURVE"


class Rarely:
    """Which of many like events are worth a line in the log: the first of each key and minute."""

    def __init__(self) -> None:
        self._until_s = 0.0
        self._seen: Counter[str] = Counter()

    def take(self, key: str) -> bool:
        """Whether to write it down. At most MAX_WARNED keys within WARN_S are."""
        now_s = time.monotonic()
        if now_s >= self._until_s:
            self._until_s = now_s + WARN_S
            self._seen.clear()
        if key not in self._seen and len(self._seen) >= MAX_WARNED:
            return False
        self._seen[key] += 1
        return self._seen[key] == 1


class Guard:
    """Decides about every connection to the listeners of one context, on a thread of its own: an IO
    thread that is held up keeps nobody waiting. Make it before they bind; it ends with the context.

    ``on_refused`` is called on that thread for each connection that was refused.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        config: Config,
        on_refused: Callable[[], object] = lambda: None,
    ) -> None:
        self._config = config
        self._on_refused = on_refused
        self._rarely = Rarely()
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(_ZAP_ENDPOINT)
        self._thread = threading.Thread(target=self._main, name="kvxfer-guard", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """After the context was ended: nothing of it is left when this returns."""
        self._thread.join()

    def _main(self) -> None:
        try:
            while True:
                self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close()

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        """Frames: version, request id, domain, address, routing id, mechanism, CURVE key."""
        _, request_id, _, raw_address, _, mechanism, *credentials = frames
        address = raw_address.decode(errors="replace")
        key = z85.encode(credentials[0]).decode() if mechanism == b"CURVE" else None
        why = why_refused(self._config, address, key)
        if why is not None:
            self._on_refused()
            if self._rarely.take(address if user_of(address) is None else "another user"):
                _log.warning("a connection from %s was refused: %s", address or "nowhere", why)
        status, text = (b"200", b"OK") if why is None else (b"400", why.encode())
        return [b"1.0", request_id, status, text, b"", b""]
