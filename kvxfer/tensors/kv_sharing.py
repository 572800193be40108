"""Layers without a cache of their own, which read the cache of an earlier layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from kvxfer.cache.specs import KVCacheGroupSpec

_Cache = TypeVar("_Cache")


def initialize_kv_cache_for_kv_sharing(
    shared_kv_cache_layers: Mapping[str, str],
    kv_cache_groups: Sequence[KVCacheGroupSpec],
    kv_caches: dict[str, _Cache],
) -> None:
    """Give every layer of ``shared_kv_cache_layers`` (layer -> target) its target's cache and its
    target's group; a layer that is in the group already is not added again.

    Raises KeyError, before anything is changed, for a target without a cache, and whatever
    :func:`add_kv_sharing_layers_to_kv_cache_groups` raises.
    """
    for layer, target in shared_kv_cache_layers.items():
        if target not in kv_caches:
            raise _unknown_target(layer, target, kv_caches)
    add_kv_sharing_layers_to_kv_cache_groups(shared_kv_cache_layers, kv_cache_groups)
    for layer, target in shared_kv_cache_layers.items():
        kv_caches[layer] = kv_caches[target]


def add_kv_sharing_layers_to_kv_cache_groups(
    shared_kv_cache_layers: Mapping[str, str],
    kv_cache_groups: Sequence[KVCacheGroupSpec],
    runner_only_attn_layers: set[str] | None = None,
) -> None:
    """Add every layer of ``shared_kv_cache_layers`` (layer -> target) to its target's group.

    ``runner_only_attn_layers`` gets them too: layers that the model runner knows and that own no
    bytes. Raises, before anything is changed, KeyError for a target that is in no group, and
    ValueError for a target that has no cache of its own or is of another group than the layer.
    """
    by_layer = {name: group for group in kv_cache_groups for name in group.layer_names}
    for layer, target in shared_kv_cache_layers.items():
        if target in shared_kv_cache_layers:
            raise ValueError(
                f"{layer}: expected a target with a cache of its own, got {target}, which shares "
                f"that of {shared_kv_cache_layers[target]}"
            )
        if target not in by_layer:
            raise _unknown_target(layer, target, by_layer)
        if by_layer.get(layer, by_layer[target]) is not by_layer[target]:
            raise ValueError(
                f"{layer}: expected the group of its target {target}, got another one; leave it "
                "out of the groups, or put it beside its target"
            )
    for layer, target in shared_kv_cache_layers.items():
        group = by_layer[target]
        if layer not in by_layer:
            group.layer_names.append(layer)
        if target in group.layer_specs:
            group.layer_specs[layer] = group.layer_specs[target]
    if runner_only_attn_layers is not None:
        runner_only_attn_layers.update(shared_kv_cache_layers)


def _unknown_target(layer: str, target: str, known: Mapping[str, object]) -> KeyError:
    return KeyError(
        f"{layer} shares the cache of {target}: expected one of {', '.join(known) or 'none'}"
    )
