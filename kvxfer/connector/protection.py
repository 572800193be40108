"""What a stranger on the network could read of an engine, in the one line that its start logs."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Iterable
from dataclasses import dataclass

from kvxfer.config import Config
from kvxfer.transfer.manifest import parse_endpoint
from kvxfer.transports.guard import pinned_keys
from kvxfer.transports.key_folder import short
from kvxfer.transports.registry import PIPES


@dataclass(frozen=True, slots=True)
class Protection:
    """``level``: of ``logging``."""

    level: int
    text: str


def protection(config: Config, endpoint: str, wires: Iterable[str]) -> Protection:
    """Of an engine that listens at ``endpoint`` and gives KV by these wires."""
    if config.curve_public_key is not None:
        return Protection(logging.INFO, _with_keys(config, [w for w in wires if w in PIPES]))
    if ipaddress.ip_address(parse_endpoint(endpoint)[0].partition("%")[0]).is_loopback:
        text = "no CURVE keys: control and data travel in clear, on this host's loopback only"
        return Protection(logging.DEBUG, text)
    text = (
        f"host: {config.host} can be reached from other hosts, and there are no CURVE keys: who is "
        "on the network can read KV and change it; make keys with kvxfer keys make DIR, and set "
        "curve_keys_dir on every engine"
    )
    return Protection(logging.WARNING, text)


def _with_keys(config: Config, streams: list[str]) -> str:
    own = config.curve_public_key
    others = sorted(short(key) for key in pinned_keys(config) - {own})
    encrypted = ["control", *(f"{w}'s {'data' if w == 'zmq' else 'messages'}" for w in streams)]
    where = "on the network (trust_network)" if config.trust_network else "on this host's loopback"
    in_clear = [f"{w}'s payloads {where}" for w in streams if w != "zmq"]
    in_clear.append("what this user's processes on this host exchange")
    return (
        f"CURVE encrypts {', '.join(encrypted)}; key of this engine: {short(own)}, accepted too: "
        f"{', '.join(others) or 'none'}; in clear: {', '.join(in_clear)}"
    )
