"""What a source engine says of itself, looked at before anything is done with it. Pure.

A manifest comes from the network: every endpoint in it is a claim. Nothing in it is connected to
or mapped before all of it was looked at.
"""

from __future__ import annotations

from kvxfer.config import Config
from kvxfer.connector.access import may_connect
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
    for entry in manifest.ranks:
        named = {"control": entry.control_endpoint, **entry.data_endpoints}
        for use, named_endpoint in named.items():
            if not may_connect(config, named_endpoint):
                raise PermissionError(
                    f"rank {entry.rank} of {engine_id} listens on {named_endpoint} ({use}), "
                    "which is not in allowed_peers"
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


def contested(manifest: EngineManifest, other: EngineManifest) -> RankManifest | None:
    """The first rank whose control endpoint the other engine states too, while saying something
    else of it; None if the two can be used side by side.

    Wires know a source rank by its control endpoint, so one endpoint must have one meaning. An
    engine that is met under two names of its host says the same both times.
    """
    is_same_life = manifest.incarnation == other.incarnation
    theirs = {entry.control_endpoint: entry for entry in other.ranks}
    for entry in manifest.ranks:
        known = theirs.get(entry.control_endpoint)
        if known is not None and not (is_same_life and known == entry):
            return entry
    return None
