"""What a source engine says of itself, looked at before anything is done with it.

A manifest comes from the network: every endpoint in it is a claim. Nothing in it is connected to
or mapped before all of it was looked at, and nothing is read from a rank that has not said the same
of itself.
"""

from __future__ import annotations

import msgspec

from kvxfer.config import Config
from kvxfer.connector.access import check_host, check_owners
from kvxfer.errors import IncompatiblePeer, UnknownEngine
from kvxfer.transfer.compatibility import check_compatible
from kvxfer.transfer.manifest import EngineManifest, RankManifest, validate_manifest
from kvxfer.transfer.wire import BIND_TOKENS


def check_introduction(
    config: Config, engine_id: str, endpoint: str, manifest: EngineManifest
) -> None:
    """Whether this manifest can be the one of ``engine_id``, whose front door is ``endpoint``.

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
    """Whether a rank itself says what the front door's manifest has of it: ``said`` came from its
    control endpoint. Raises PermissionError: it may be another engine's.
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
    config: Config,
    manifest: EngineManifest,
    own: EngineManifest | None,
    *,
    can_leave_unhashed: bool,
) -> None:
    """Whether KV of that engine may be used here. Raises IncompatiblePeer."""
    if own is None:
        raise IncompatiblePeer("this engine does not know its own ranks yet")
    if config.bind_tokens and BIND_TOKENS not in manifest.capabilities:
        raise IncompatiblePeer(
            f"bind_tokens: engine {manifest.engine_id} has it off, this engine has it on; "
            "configure it alike on both sides"
        )
    check_compatible(manifest, own, can_leave_unhashed=can_leave_unhashed)
