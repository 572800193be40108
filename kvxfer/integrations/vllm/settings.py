"""What the plugin is told by vLLM's configs, read once and refused at once where it cannot work.

``kv_connector_extra_config`` has the fields of :class:`kvxfer.config.Config` for keys, and those of
:class:`PluginSettings`; ``KVXFER_<NAME>`` sets what it leaves out. Settings of vLLM's NixlConnector
are ignored, so that a config that was carried over starts: the log says what to set instead.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from kvxfer.config import ENV_PREFIX, Config, LoadedConfig, load_config, unknown_name, variables_of
from kvxfer.errors import ConfigError
from kvxfer.transfer.manifest import CacheFacts, EngineIdentity

_NIXL_KEYS: Final[Mapping[str, str]] = {
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

LAYOUT = "vllm"
"""What the manifest calls the layout; the regions say it exactly."""
_SIDE_CHANNEL = "VLLM_NIXL_SIDE_CHANNEL_"  # followed by HOST or PORT

_log = logging.getLogger("kvxfer.integrations")


def _without_nixl_keys(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The extra config without NIXL's keys, each of which is a warning."""
    for key in extra.keys() & _NIXL_KEYS.keys():
        _log.warning(
            "kv_connector_extra_config: %s is a setting of NixlConnector, ignored: %s",
            key,
            _NIXL_KEYS[key],
        )
    return {key: value for key, value in extra.items() if key not in _NIXL_KEYS}


def _mention_nixl_variables(loaded: LoadedConfig) -> None:
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


_SENDERS = ("kv_producer", "kv_both")
_RECEIVERS = ("kv_consumer", "kv_both")


class PluginSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of the extra config that only the plugin has."""

    weights_identity: str | None = None
    """A name for the weights, the same on both sides. Not set: what vLLM says of them. Change it
    where one side loads them from a hub and the other from a directory."""
    switch_interval_s: float | None = None
    """What ``sys.setswitchinterval`` is set to in the workers: how soon a thread of ours gets its
    turn while Python runs in the engine's. Not set: as it is (0.005). Change it to 0.0002 where
    peers have to be answered soonest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What both sides of the plugin need to know of their engine.

    Attributes:
        can_send, can_receive: may requests offer KV, may they load it.
        is_lockstep: data-parallel ranks, those of a mixture of experts, compute all steps together.
        names_media: vLLM names an image, a sound or a video by what is in it.
        switch_interval_s: see :class:`PluginSettings`.
    """

    config: Config
    engine_id: str
    can_send: bool
    can_receive: bool
    tp_size: int
    pp_size: int
    prefix_caching: bool
    block_tokens: int
    is_lockstep: bool = False
    names_media: bool = True
    switch_interval_s: float | None = None

    def engine(self, incarnation: bytes, facts: CacheFacts) -> EngineIdentity:
        return EngineIdentity(
            engine_id=self.engine_id,
            incarnation=incarnation,
            facts=facts,
            tp_size=self.tp_size,
            pp_size=self.pp_size,
            block_tokens=self.block_tokens,
            layout=LAYOUT,
        )


def read_settings(vllm_config: Any) -> Settings:
    """The settings of an engine with this ``VllmConfig``. Raises ConfigError for settings that are
    unknown or cannot work, or a kind of engine whose KV cannot be moved; the message says what to
    change.
    """
    transfer = _transfer_config(vllm_config)
    for refuse in (_refuse_model, _refuse_parallel):
        refuse(vllm_config)
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    plugin, extra = split_settings(_extra_config(transfer))
    loaded = load_config({}, _without_nixl_keys(extra))
    _mention_nixl_variables(loaded)
    can_send = transfer.kv_role in _SENDERS
    config = loaded.config.for_engine(
        gives_kv=can_send,
        num_ranks=_stage_ranks(parallel) * parallel.pipeline_parallel_size,
        replica=_replica(parallel),
    )
    if getattr(transfer, "kv_load_failure_policy", "fail") != "recompute":
        # A request that presumes the offer of a prefill that was preempted would fail for it
        config = msgspec.structs.replace(config, early_ahead=0.0)
    return Settings(
        config=config,
        engine_id=transfer.engine_id,
        can_send=can_send,
        can_receive=transfer.kv_role in _RECEIVERS,
        tp_size=_stage_ranks(parallel),
        pp_size=parallel.pipeline_parallel_size,
        prefix_caching=bool(cache.enable_prefix_caching),
        # A block id stands for a block on each rank that shares the tokens
        block_tokens=cache.block_size * getattr(parallel, "decode_context_parallel_size", 1),
        # Ranks that are independent engines see a size of 1 here, whatever their number.
        is_lockstep=getattr(parallel, "data_parallel_size", 1) > 1,
        names_media=_names_media(vllm_config),
        switch_interval_s=plugin.switch_interval_s,
    )


def plugin_settings(vllm_config: Any) -> PluginSettings:
    """The keys of the extra config that are not kvxfer's. Raises ConfigError for other types."""
    return split_settings(_extra_config(vllm_config.kv_transfer_config))[0]


def _extra_config(transfer: Any) -> Mapping[str, Any]:
    return getattr(transfer, "kv_connector_extra_config", None) or {}


def check_names(extra: Mapping[str, Any]) -> None:
    """Raises ConfigError for a key that neither kvxfer nor NixlConnector has."""
    known = (*Config.__struct_fields__, *PluginSettings.__struct_fields__)
    for name in extra.keys() - _NIXL_KEYS.keys() - set(known):
        raise ConfigError(unknown_name(name, known, "kv_connector_extra_config"))


def split_settings(extra: Mapping[str, Any]) -> tuple[PluginSettings, dict[str, Any]]:
    """The plugin's own keys, and the rest. Raises ConfigError for other names and types."""
    check_names(extra)
    ours = PluginSettings.__struct_fields__
    given = {name: value for name, value in extra.items() if name in ours}
    try:
        plugin = msgspec.convert(given, PluginSettings, strict=False)
    except (msgspec.ValidationError, UnicodeEncodeError) as exc:  # half of a surrogate pair
        raise ConfigError(f"kv_connector_extra_config: {exc}; correct this key") from exc
    interval_s = plugin.switch_interval_s
    if interval_s is not None and not 0 < interval_s <= 1:
        raise ConfigError(
            f"switch_interval_s: expected above 0 and at most 1 second, got {interval_s}; 0.0002 "
            "answers peers soonest"
        )
    return plugin, {name: value for name, value in extra.items() if name not in ours}


def _transfer_config(vllm_config: Any) -> Any:
    transfer = vllm_config.kv_transfer_config
    role = getattr(transfer, "kv_role", None)
    if role not in {*_SENDERS, *_RECEIVERS}:
        raise ConfigError(
            f"kv_role: expected kv_producer, kv_consumer or kv_both, got {role}; set it in "
            "--kv-transfer-config"
        )
    if not transfer.engine_id:
        raise ConfigError(
            "engine_id: expected a name of this engine, got none; set it in --kv-transfer-config"
        )
    return transfer


def _refuse_model(vllm_config: Any) -> None:
    model = vllm_config.model_config
    for field, kind in (
        ("is_encoder_decoder", "an encoder-decoder, whose encoder's states no prompt token names"),
        ("is_attention_free", "one without attention, which keeps no KV"),
    ):
        if getattr(model, field, False):
            raise ConfigError(
                f"model: expected a decoder with attention, got {kind}; serve it without this "
                "connector"
            )
    if getattr(model, "enable_sleep_mode", False):
        # Before 0.33 vLLM does not ask supports_sleep_mode of the connector's class.
        raise ConfigError(
            "enable_sleep_mode: expected False, got True; peers may be reading the memory that "
            "sleeping gives back: start without --enable-sleep-mode"
        )


def _refuse_parallel(vllm_config: Any) -> None:
    """Ranks of prefill context parallelism hold all tokens, or what decode context parallelism
    leaves them. Only in the second case vLLM's handshake tells them apart.
    """
    parallel, role = vllm_config.parallel_config, vllm_config.kv_transfer_config.kv_role
    size = getattr(parallel, "prefill_context_parallel_size", 1)
    shared = getattr(parallel, "decode_context_parallel_size", 1)
    if size > 1 and (shared == 1 or role != "kv_producer"):
        raise ConfigError(
            f"prefill_context_parallel_size: expected 1, or a kv_producer that sets "
            f"decode_context_parallel_size too, got {size} and {shared} in a {role}; without the "
            "second vLLM has one name for ranks that all hold the same KV"
        )


def _names_media(vllm_config: Any) -> bool:
    """Not where vLLM reuses nothing of them, neither what its processor made nor blocks. A counter
    of the process names them there, and two engines have one name for unlike images.
    """
    media = getattr(vllm_config.model_config, "multimodal_config", None)
    has_cache = getattr(media, "mm_processor_cache_gb", None) != 0
    return has_cache or bool(vllm_config.cache_config.enable_prefix_caching)


def _stage_ranks(parallel: Any) -> int:
    """Ranks of a pipeline stage. Those of prefill context parallelism count as more of tensor
    parallelism, in the order of vLLM's handshake.
    """
    pcp_size = getattr(parallel, "prefill_context_parallel_size", 1)
    return int(parallel.tensor_parallel_size * pcp_size)


def _replica(parallel: Any) -> int:
    """Each data parallel rank is an engine of its own, and has its own ports."""
    return int(getattr(parallel, "data_parallel_index", getattr(parallel, "data_parallel_rank", 0)))
