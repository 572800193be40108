"""Whom this engine connects to: addresses, users, and CURVE keys pinned by engine id.

Who may connect to it is decided in :mod:`kvxfer.transports.guard`.

KV that was accepted is found by other requests too, so it is taken only from a source that somebody
answers for: one whose host ``allowed_peers`` names, whose CURVE key is pinned, whose params are
signed, or that is a process of this user on this host.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from kvxfer.config import Config, not_admitted
from kvxfer.connector.listeners import Listeners
from kvxfer.transfer.manifest import parse_endpoint


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
