"""Which engines this engine connects to, and which of their statements it believes.

Who may connect to this engine is decided in :mod:`kvxfer.transports.guard`.

Other requests find accepted KV through the prefix cache. So KV is taken only from a source with a
known owner: one whose host ``allowed_peers`` names, whose CURVE key is pinned, whose params are
signed, or that is a process of this user on this host.

A manifest comes from the network: every endpoint in it is a claim. This engine connects to and maps
nothing in a manifest before it has checked all of it, and reads nothing from a rank that has not
confirmed what the manifest says of it.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import struct
from collections.abc import Iterable
from pathlib import Path

import msgspec

from kvxfer.config import Config, not_admitted
from kvxfer.connector.unused_kv import Line
from kvxfer.errors import IncompatiblePeer, UnknownEngine
from kvxfer.transfer.compatibility import check_compatible
from kvxfer.transfer.manifest import (
    EngineManifest,
    RankManifest,
    parse_endpoint,
    validate_manifest,
)
from kvxfer.transfer.plan import Plan
from kvxfer.transfer.wire import BIND_TOKENS
from kvxfer.transports.guard import pinned_keys
from kvxfer.transports.key_folder import short
from kvxfer.transports.registry import PIPES

NOBODY_KNOWN = frozenset({-1})
"""Where it cannot be looked up: names but ``localhost``, and where there is no ``/proc``."""

_PATHS = {4: Path("/proc/net/tcp"), 6: Path("/proc/net/tcp6")}
_LISTEN = b"0A"
Table = dict[bytes, frozenset[int]]
"""Users by local address, written as in the table."""


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
    """Raises PermissionError unless a source that listens at these endpoints has a known owner.

    Called before the first connection (``are_up`` False: perhaps nobody listens yet), and again
    when the source has said where it listens: a process that gave a port up in between may still
    hold a connection.
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


def server_key_of(config: Config, engine_id: str, stated: str | None = None) -> str | None:
    """The CURVE public key that an engine must have. Without a table all engines share this
    engine's key pair, or those of a folder: then it is the ``stated`` one, if that is among them.

    None: CURVE is off. Raises PermissionError for an engine that the table does not name.
    """
    if config.curve_public_key is None:
        return None
    if config.curve_server_keys is None:
        is_known = stated is not None and stated in pinned_keys(config)
        # With the wrong one the handshake fails, and both sides say why
        return stated if is_known else config.curve_public_key
    if engine_id not in config.curve_server_keys:
        raise PermissionError(f"curve_server_keys: expected a key of engine {engine_id}, got none")
    return config.curve_server_keys[engine_id]


# ------------------------------------------------------------------ what an engine says of itself


def check_introduction(
    config: Config, engine_id: str, endpoint: str, manifest: EngineManifest
) -> None:
    """Check that this manifest can be that of ``engine_id``, whose front door is ``endpoint``.

    Raises IncompatiblePeer for one that makes no sense, UnknownEngine for another engine's,
    PermissionError for one that names places that this engine must not connect to.
    """
    validate_manifest(manifest)
    if manifest.engine_id != engine_id:
        raise UnknownEngine(
            f"engine_id: expected {engine_id} at {endpoint}, got {manifest.engine_id}, which was "
            "started there since; params of the one before are of no use any more"
        )
    stated = [endpoint]
    for entry in manifest.ranks:
        named = {"control": entry.control_endpoint, **entry.data_endpoints}
        for use, named_endpoint in named.items():
            try:
                check_host(config, named_endpoint)
            except PermissionError as e:
                raise PermissionError(f"rank {entry.rank} of {engine_id} ({use}): {e}") from e
            stated.append(named_endpoint)
    check_owners(config, stated, are_up=True)


def check_rank(manifest: EngineManifest, entry: RankManifest, said: EngineManifest) -> None:
    """Check that a rank confirms what the front door's manifest says of it. ``said`` came from the
    rank's own control endpoint. Raises PermissionError where they differ: the rank may be another
    engine's.
    """
    where = f"rank {entry.rank} of {manifest.engine_id}"
    if said.engine_id != manifest.engine_id:
        raise PermissionError(
            f"{where}: expected a control endpoint of its own, got {entry.control_endpoint}, "
            f"which is engine {said.engine_id}'s"
        )
    of_engine = msgspec.structs.replace(manifest, ranks=())
    if msgspec.structs.replace(said, ranks=()) != of_engine or entry not in said.ranks:
        raise PermissionError(
            f"{where}: expected {entry.control_endpoint} to say the same of itself as the front "
            "door, got something else"
        )


def check_partner(
    config: Config, manifest: EngineManifest, own: EngineManifest, *, can_leave_unhashed: bool
) -> None:
    """Check that KV of that engine may be used here. Raises IncompatiblePeer."""
    if config.bind_tokens and BIND_TOKENS not in manifest.capabilities:
        raise IncompatiblePeer(
            f"bind_tokens: engine {manifest.engine_id} has it off, this engine has it on; "
            "configure it alike on both sides"
        )
    check_compatible(manifest, own, can_leave_unhashed=can_leave_unhashed)


def check_verifiable(config: Config, plan: Plan, manifest: EngineManifest) -> None:
    """Raises IncompatiblePeer where KV that is cast were verified: digests are of bytes."""
    casts = [c for route in plan.routes for c in route.classes if c.source.values is not None]
    if config.verify != "off" and casts:
        source, sink = casts[0].source.values, casts[0].sink.values
        raise IncompatiblePeer(
            f"verify: expected off with KV that is cast, got {config.verify}: engine "
            f"{manifest.engine_id} has {source and source.dtype}, this engine "
            f"{sink and sink.dtype}; set verify to off, or use one KV cache type on both sides"
        )


# ------------------------------------------------------------------ who listens on this host


class Listeners:
    """Which users listen at an address of this host at one moment, as Linux tells it.

    Every user of a host can listen on its loopback, so a loopback address does not tell who
    answers. Linux shows the owner of each TCP socket of this network namespace in ``/proc/net/tcp``
    and ``tcp6``; each table is read when it is first asked for.
    """

    def __init__(self) -> None:
        self._tables: dict[int, Table] = {}

    def users(self, endpoint: str) -> frozenset[int]:
        """The ids of the users that listen at exactly this ``tcp://host:port``."""
        try:
            host, port = parse_endpoint(endpoint)
            address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
            if address.version not in self._tables:
                self._tables[address.version] = _read_table(_PATHS[address.version])
        except (ValueError, OSError):
            return NOBODY_KNOWN
        words = struct.unpack(f"={len(address.packed) // 4}I", address.packed)
        local = b"".join(b"%08X" % word for word in words) + b":%04X" % port
        return self._tables[address.version].get(local, frozenset())


def _read_table(path: Path) -> Table:
    """Read the listeners only. The kernel lists them first; to find the connections behind them
    takes it milliseconds, however few there are.
    """
    table: Table = {}
    with path.open("rb", buffering=0) as file:
        while rows := file.read(4096):  # whole ones
            for row in rows.splitlines():
                # Number, local and remote address, state, queues, timer, retransmits, user, ...
                _, local, _, state, _, _, _, user, *_ = row.split()
                if state == _LISTEN:
                    table[local] = table.get(local, frozenset()) | {int(user)}
            if state not in (_LISTEN, b"st"):  # the table's head has st there
                break
    return table


# ------------------------------------------------------------------ what strangers could read


def protection(config: Config, endpoint: str, wires: Iterable[str]) -> Line:
    """What a stranger on the network could read of an engine that listens at ``endpoint`` and gives
    KV by these wires, in the one line that its start logs.
    """
    if config.curve_public_key is not None:
        return Line(logging.INFO, _with_keys(config, [w for w in wires if w in PIPES]))
    if ipaddress.ip_address(parse_endpoint(endpoint)[0].partition("%")[0]).is_loopback:
        text = "no CURVE keys: control and data travel in clear, on this host's loopback only"
        return Line(logging.DEBUG, text)
    text = (
        f"host: {config.host} can be reached from other hosts, and there are no CURVE keys: who is "
        "on the network can read KV and change it; make keys with kvxfer keys make DIR, and set "
        "curve_keys_dir on every engine"
    )
    return Line(logging.WARNING, text)


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
