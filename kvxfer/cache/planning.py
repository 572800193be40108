"""From a model's layers and the bytes for its cache to groups, buffers and a number of blocks.

Layer i of every group lies in buffer i: a block id belongs to one group at a time, so groups do not
meet in the same bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from kvxfer.cache.grouping import (
    GroupingConfig,
    create_kv_cache_group_specs,
    get_kv_cache_groups,
    is_kv_cache_type_uniform,
    uniform_type_group,
    unify_hybrid_kv_cache_specs,
    unify_kv_cache_spec_page_size,
)
from kvxfer.cache.memory import (
    PlanningConfig,
    check_enough_kv_cache_memory,
    check_groups_fit,
    estimate_max_model_len,
)
from kvxfer.cache.spec_base import KVCacheSpec
from kvxfer.cache.specs import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

__all__ = [
    "GroupingConfig",
    "PlanningConfig",
    "check_enough_kv_cache_memory",
    "create_kv_cache_group_specs",
    "estimate_max_model_len",
    "get_kv_cache_config",
    "get_kv_cache_config_uniform_type",
    "get_kv_cache_groups",
    "is_kv_cache_type_uniform",
    "unify_hybrid_kv_cache_specs",
    "unify_kv_cache_configs",
    "unify_kv_cache_spec_page_size",
]

logger = logging.getLogger("kvxfer.cache")


def get_kv_cache_config(
    config: PlanningConfig, kv_cache_spec: Mapping[str, KVCacheSpec], available_memory: int
) -> KVCacheConfig:
    """Plan the cache of one rank.

    Args:
        config: see :class:`~kvxfer.cache.memory.PlanningConfig`; it is only read.
        kv_cache_spec: what each layer keeps, by layer name. Layers that read another layer's cache
            are not in it. Without layers the pool is the null block alone.
        available_memory: bytes for the cache; the buffers take no more, unless
            ``num_gpu_blocks_override`` says how many blocks there are.

    Raises:
        ValueError: a request of ``max_model_len`` tokens does not fit, or layers cannot be grouped
            (:func:`~kvxfer.cache.grouping.get_kv_cache_groups`).
    """
    groups = get_kv_cache_groups(config, kv_cache_spec)
    kv_cache_config = _config_for(groups, check_groups_fit(config, groups, available_memory))
    _log_plan(kv_cache_config)
    return kv_cache_config


def get_kv_cache_config_uniform_type(
    config: PlanningConfig, kv_cache_spec: Mapping[str, KVCacheSpec], available_memory: int
) -> KVCacheConfig:
    """As :func:`get_kv_cache_config`, for layers of one type: one group, a buffer for each layer,
    and the memory shared out so that every layer has as many blocks.

    Raises:
        ValueError: no layers, layers that cannot share a block table
            (:func:`~kvxfer.cache.grouping.is_kv_cache_type_uniform`), or too little memory.
    """
    groups = [uniform_type_group(kv_cache_spec)]
    return _config_for(groups, check_groups_fit(config, groups, available_memory))


def unify_kv_cache_configs(kv_cache_configs: Sequence[KVCacheConfig]) -> None:
    """Give the caches of all workers the same number of blocks, the smallest of them, in place:
    block ids mean the same on every worker. Buffers shrink with it.

    Groups in another order are put in the order of the first worker's.

    Raises:
        ValueError: no configs, workers whose groups differ in a layer or a spec, or a buffer that
            does not have whole blocks. Nothing has changed then.
    """
    if not kv_cache_configs:
        raise ValueError("kv_cache_configs: expected one for each worker, got none")
    for worker, kv_cache_config in enumerate(kv_cache_configs):
        _check_whole_blocks(worker, kv_cache_config)
    first = kv_cache_configs[0]
    in_order = [
        _groups_in_order(worker, kv_cache_config, first)
        for worker, kv_cache_config in enumerate(kv_cache_configs)
    ]
    num_blocks = min(kv_cache_config.num_blocks for kv_cache_config in kv_cache_configs)
    for kv_cache_config, groups in zip(kv_cache_configs, in_order, strict=True):
        kv_cache_config.kv_cache_groups[:] = groups
        for tensor in kv_cache_config.kv_cache_tensors:
            tensor.size = tensor.size // kv_cache_config.num_blocks * num_blocks
        kv_cache_config.num_blocks = num_blocks


def _config_for(groups: list[KVCacheGroupSpec], num_blocks: int) -> KVCacheConfig:
    """Buffer i has layer i of every group; the layers of one group may differ in bytes, those of
    several never do.
    """
    num_buffers = max((len(group.layer_names) for group in groups), default=0)
    tensors: list[KVCacheTensor] = []
    for at in range(num_buffers):
        sharing = [group for group in groups if at < len(group.layer_names)]
        names = [group.layer_names[at] for group in sharing]
        block_nbytes = sharing[0].spec_of(names[0]).page_size_bytes
        tensors.append(KVCacheTensor(size=block_nbytes * num_blocks, shared_by=names))
    return KVCacheConfig(num_blocks, tensors, groups)


def _log_plan(kv_cache_config: KVCacheConfig) -> None:
    groups = kv_cache_config.kv_cache_groups
    num_places = len(kv_cache_config.kv_cache_tensors) * len(groups)
    num_empty = num_places - sum(len(group.layer_names) for group in groups)
    logger.debug(
        "KV cache: %d blocks, %d groups, %d bytes",
        kv_cache_config.num_blocks,
        len(groups),
        sum(tensor.size for tensor in kv_cache_config.kv_cache_tensors),
    )
    if num_empty:
        logger.warning(
            "KV cache: groups have %s layers, so %d of %d places in a block stay empty (%.1f %%)",
            ", ".join(str(len(group.layer_names)) for group in groups),
            num_empty,
            num_places,
            100 * num_empty / num_places,
        )


def _check_whole_blocks(worker: int, kv_cache_config: KVCacheConfig) -> None:
    num_blocks = kv_cache_config.num_blocks
    if num_blocks < 1:
        raise ValueError(f"worker {worker}: num_blocks: expected at least 1, got {num_blocks}")
    for tensor in kv_cache_config.kv_cache_tensors:
        if tensor.size % num_blocks:
            raise ValueError(
                f"worker {worker}: buffer of {', '.join(tensor.shared_by)}: expected a multiple of "
                f"its {num_blocks} blocks, got {tensor.size} bytes"
            )


def _groups_in_order(
    worker: int, kv_cache_config: KVCacheConfig, first: KVCacheConfig
) -> list[KVCacheGroupSpec]:
    """The worker's groups in the order of ``first``'s; ValueError when they are not the same."""
    own = {frozenset(group.layer_names): group for group in kv_cache_config.kv_cache_groups}
    expected = {frozenset(group.layer_names): group for group in first.kv_cache_groups}
    if own.keys() != expected.keys():
        raise ValueError(
            f"worker {worker}: expected the groups of layers of worker 0, "
            f"{_layers_words(expected.keys() - own.keys())}, got "
            f"{_layers_words(own.keys() - expected.keys())}; plan all workers with the same layers"
        )
    for names, group in own.items():
        for name in sorted(names):
            spec, wanted = group.spec_of(name), expected[names].spec_of(name)
            if spec != wanted:
                raise ValueError(
                    f"worker {worker}: layer {name}: expected worker 0's {wanted}, got {spec}"
                )
    return [own[names] for names in expected]


def _layers_words(groups: set[frozenset[str]]) -> str:
    return "; ".join(sorted(", ".join(sorted(names)) for names in groups)) or "no more"
