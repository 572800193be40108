"""Settings of vLLM's NixlConnector that stand where ours are looked for: a config that was carried
over starts, and the log says which of our settings to use instead.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from kvxfer.config import ENV_PREFIX, LoadedConfig, variables_of

NIXL_KEYS: Final[Mapping[str, str]] = {
    "backends": "set transport",
    "num_threads": "there is nothing to set",
    "kv_lease_duration": "set lease_s",
    "engine_ttl": "a peer is forgotten when it is gone",
    "enforce_handshake_compat": "two engines are always compared, field by field",
    "enable_cross_layers_blocks": "any layout is moved as it is",
    "kv_recompute_threshold": "what can be loaded is loaded",
    "bidirectional_kv_xfer": "a request offers its KV or loads it, not both",
    "decoder_kv_blocks_ttl": "a request offers its KV or loads it, not both",
    "push_registration_timeout": "KV is pulled, and pull_timeout_s bounds a load",
}
"""Keys of its kv_connector_extra_config, in vLLM 0.26 to 0.33, and what to do here."""

_SIDE_CHANNEL = "VLLM_NIXL_SIDE_CHANNEL_"  # followed by HOST or PORT

_log = logging.getLogger("kvxfer.integrations")


def without_nixl_keys(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The extra config without NIXL's keys, each of which is a warning."""
    for key in extra.keys() & NIXL_KEYS.keys():
        _log.warning(
            "kv_connector_extra_config: %s is a setting of NixlConnector, ignored: %s",
            key,
            NIXL_KEYS[key],
        )
    return {key: value for key, value in extra.items() if key not in NIXL_KEYS}


def mention_nixl_variables(loaded: LoadedConfig) -> None:
    """Warn of NIXL's side channel where ours has its default: its values are not taken over."""
    unread = {
        variable: name
        for variable in sorted(variables_of(_SIDE_CHANNEL))
        if loaded.origins.get(name := variable.removeprefix(_SIDE_CHANNEL).lower()) == "default"
    }
    if unread:
        _log.warning(
            "%s: of NixlConnector, ignored; set %s in kv_connector_extra_config, or %s",
            ", ".join(unread),
            ", ".join(unread.values()),
            ", ".join(ENV_PREFIX + name.upper() for name in unread.values()),
        )
