"""Whom this engine connects to: addresses, and CURVE keys pinned by engine id.

Who may connect to it is decided in :mod:`kvxfer.transports.zmq_listeners`.
"""

from __future__ import annotations

from kvxfer.config import Config
from kvxfer.transfer.manifest import parse_endpoint


def may_connect(config: Config, endpoint: str) -> bool:
    """Whether ``allowed_peers`` admits the host of ``tcp://host:port``. Names are compared, never
    looked up.
    """
    try:
        host, _ = parse_endpoint(endpoint)
    except ValueError:
        return False
    return config.peer_allowed(host)


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
