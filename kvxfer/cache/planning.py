"""From a model's layers and the bytes for its cache to groups, buffers and a number of blocks.

Layer i of every group lies in buffer i: a block id belongs to one group at a time, so groups do not
meet in the same bytes. One pool serves all groups: a request needs the sum over the groups of the
most blocks that it holds in each at a time, and the pool has the null block beside them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence

from kvxfer.cache.grouping import get_kv_cache_groups, table_key, table_words, uniform_type_group
from kvxfer.cache.specs import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    PlanningConfig,
    check_int,
    check_positive,
)

_NUM_NULL_BLOCKS = 1


def check_enough_kv_cache_memory(
    config: PlanningConfig, kv_cache_spec: Mapping[str, KVCacheSpec], available_memory: int
) -> None:
    """Check that one request of ``max_model_len`` tokens fits, the null block counted.
    ``available_memory``: bytes for the cache on this rank; not looked at where
    ``num_gpu_blocks_override`` is set. Raises TypeError for a setting or ``available_memory`` that
    is no int; ValueError for layers that cannot be grouped, and where it does not fit: with what is
    needed and available, the longest request that fits, and the settings to change.
    """
    _check_groups_fit(config, get_kv_cache_groups(config, kv_cache_spec), available_memory)


def estimate_max_model_len(
    config: PlanningConfig, kv_cache_spec: Mapping[str, KVCacheSpec], available_memory: int
) -> int:
    """Tokens of the longest request, up to ``max_model_len``, with which
    :func:`check_enough_kv_cache_memory` passes; 0 when not even one token fits.

    Arguments and errors are those of :func:`check_enough_kv_cache_memory`. ``config`` is only read.
    """
    groups = get_kv_cache_groups(config, kv_cache_spec)
    _check_settings(config)
    return _longest_request(config, groups, _num_blocks_for(config, groups, available_memory))


def _pool_block_nbytes(groups: Sequence[KVCacheGroupSpec]) -> int:
    of_groups = (
        sum(group.spec_of(name).page_size_bytes for name in group.layer_names) for group in groups
    )
    return max(of_groups, default=0)


def _num_blocks_for(
    config: PlanningConfig, groups: Sequence[KVCacheGroupSpec], available_memory: int
) -> int:
    """Blocks of the pool, the null block among them: as many as fit, or the override. Raises
    TypeError for what is no int, ValueError for an override below 1.
    """
    check_int("available_memory", available_memory)
    if not groups:
        return _NUM_NULL_BLOCKS
    override: int | None = getattr(config.cache_config, "num_gpu_blocks_override", None)
    if override is not None:
        check_positive("num_gpu_blocks_override", override)
        return override
    return max(0, available_memory) // _pool_block_nbytes(groups)


def _num_blocks_needed(
    groups: Sequence[KVCacheGroupSpec], num_tokens: int, step_tokens: int
) -> int:
    """The null block among them; computed in steps of up to ``step_tokens``."""
    return _NUM_NULL_BLOCKS + sum(
        group.kv_cache_spec.max_blocks(num_tokens, step_tokens) for group in groups
    )


def _check_groups_fit(
    config: PlanningConfig, groups: Sequence[KVCacheGroupSpec], available_memory: int
) -> int:
    """As :func:`check_enough_kv_cache_memory`; returns the pool's number of blocks."""
    max_model_len = config.model_config.max_model_len
    step_tokens = config.scheduler_config.max_num_batched_tokens
    _check_settings(config)
    num_blocks = _num_blocks_for(config, groups, available_memory)
    num_needed = _num_blocks_needed(groups, max_model_len, step_tokens)
    if not groups or num_needed <= num_blocks:
        return num_blocks
    block_nbytes = _pool_block_nbytes(groups)
    longest = _longest_request(config, groups, num_blocks)
    shorter = f"lower max_model_len to {longest} or less, or " if longest else ""
    if getattr(config.cache_config, "num_gpu_blocks_override", None) is not None:
        raise ValueError(
            f"num_gpu_blocks_override: expected at least {num_needed} blocks for one request of "
            f"max_model_len {max_model_len} tokens, the null block included, got {num_blocks}; "
            f"{shorter}raise num_gpu_blocks_override"
        )
    raise ValueError(
        f"memory for the KV cache: expected at least {num_needed * block_nbytes} bytes for one "
        f"request of max_model_len {max_model_len} tokens ({num_needed} blocks of {block_nbytes} "
        f"bytes, the null block included), got {available_memory}; {shorter}give the cache more "
        "memory (kv_cache_memory_nbytes, or gpu_memory_utilization where it is a share)"
    )


def _check_settings(config: PlanningConfig) -> None:
    check_positive("max_model_len", config.model_config.max_model_len)
    check_positive("max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)


def _longest_request(
    config: PlanningConfig, groups: Sequence[KVCacheGroupSpec], num_blocks: int
) -> int:
    """Binary search for the most tokens, up to ``max_model_len``, that ``num_blocks`` hold."""
    step_tokens = config.scheduler_config.max_num_batched_tokens
    fits, too_long = 0, config.model_config.max_model_len + 1
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if _num_blocks_needed(groups, middle, step_tokens) <= num_blocks:
            fits = middle
        else:
            too_long = middle
    return fits


logger = logging.getLogger("kvxfer.cache")


def get_kv_cache_config(
    config: PlanningConfig, kv_cache_spec: Mapping[str, KVCacheSpec], available_memory: int
) -> KVCacheConfig:
    """Plan the cache of one rank.

    Args:
        kv_cache_spec: what each layer keeps, by layer name. Layers that read another layer's cache
            are not in it. Without layers the pool is the null block alone.
        available_memory: bytes for the cache; the buffers take no more, unless
            ``num_gpu_blocks_override`` says how many blocks there are.

    Raises:
        ValueError: a request of ``max_model_len`` tokens does not fit, or layers cannot be grouped
            (:func:`~kvxfer.cache.grouping.get_kv_cache_groups`).
    """
    groups = get_kv_cache_groups(config, kv_cache_spec)
    kv_cache_config = _config_for(groups, _check_groups_fit(config, groups, available_memory))
    _log_plan(kv_cache_config)
    return kv_cache_config


def get_kv_cache_config_uniform_type(
    config: PlanningConfig, kv_cache_spec: Mapping[str, KVCacheSpec], available_memory: int
) -> KVCacheConfig:
    """As :func:`get_kv_cache_config`, for layers of one type: one group, a buffer for each layer,
    and the memory shared out so that every layer has as many blocks. Raises ValueError for no
    layers, layers that cannot share a block table
    (:func:`~kvxfer.cache.grouping.is_kv_cache_type_uniform`), or too little memory.
    """
    groups = [uniform_type_group(kv_cache_spec)]
    return _config_for(groups, _check_groups_fit(config, groups, available_memory))


def get_kv_cache_configs(
    config: PlanningConfig,
    kv_cache_specs: Sequence[Mapping[str, KVCacheSpec]],
    available_memory: Sequence[int],
) -> list[KVCacheConfig]:
    """Plan the caches of all workers together: the same groups everywhere, each with the worker's
    own layers of it (maybe none), and the number of blocks that fits on all.

    A pipeline's stages may so have kinds of layers in any proportion. Specs and bytes are by
    worker. Raises ValueError for a layer with several specs, and as :func:`get_kv_cache_config`.
    """
    merged: dict[str, KVCacheSpec] = {}
    for worker, specs in enumerate(kv_cache_specs):
        for name, spec in specs.items():
            if merged.setdefault(name, spec) != spec:
                raise ValueError(
                    f"worker {worker}: layer {name}: expected the {merged[name]} of an earlier "
                    f"worker, got {spec}; give a layer one spec on all workers"
                )
    groups = get_kv_cache_groups(config, merged)
    of_workers = [[_part(group, specs) for group in groups] for specs in kv_cache_specs]
    num_blocks = [
        _check_groups_fit(config, own, nbytes)
        for own, nbytes in zip(of_workers, available_memory, strict=True)
        if any(group.layer_names for group in own)
    ]
    plans = [_config_for(own, min(num_blocks, default=1)) for own in of_workers]
    for plan in plans:
        _log_plan(plan)
    return plans


def unify_kv_cache_configs(kv_cache_configs: Sequence[KVCacheConfig]) -> None:
    """Give the caches of all workers the same number of blocks, the smallest of them, in place:
    block ids mean the same on every worker. Buffers shrink with it.

    Workers with the same layers (tensor parallelism) must have the same groups. Those with other
    layers (stages of a pipeline) must have as many groups of each kind: the same tokens kept, in
    blocks of as many tokens. Groups in another order are put in the order of the first worker's.
    Where stages have kinds in other proportions, :func:`get_kv_cache_configs` plans them together.

    Raises:
        ValueError: no configs, workers whose groups do not agree, or a buffer that does not have
            whole blocks. Nothing has changed then.
    """
    if not kv_cache_configs:
        raise ValueError("kv_cache_configs: expected one for each worker, got none")
    in_order: list[list[KVCacheGroupSpec]] = []
    for worker, kv_cache_config in enumerate(kv_cache_configs):
        _check_whole_blocks(worker, kv_cache_config)
        in_order.append(_groups_in_order(worker, kv_cache_config.kv_cache_groups, in_order))
    num_blocks = min(kv_cache_config.num_blocks for kv_cache_config in kv_cache_configs)
    for kv_cache_config, groups in zip(kv_cache_configs, in_order, strict=True):
        kv_cache_config.kv_cache_groups[:] = groups
        for tensor in kv_cache_config.kv_cache_tensors:
            tensor.size = tensor.size // kv_cache_config.num_blocks * num_blocks
        kv_cache_config.num_blocks = num_blocks


def _part(group: KVCacheGroupSpec, layers: Mapping[str, KVCacheSpec]) -> KVCacheGroupSpec:
    return KVCacheGroupSpec(
        [name for name in group.layer_names if name in layers],
        group.kv_cache_spec,
        {name: spec for name, spec in group.layer_specs.items() if name in layers},
    )


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
    worker: int, own: list[KVCacheGroupSpec], earlier: list[list[KVCacheGroupSpec]]
) -> list[KVCacheGroupSpec]:
    """The groups in the order of the workers before; ValueError when they do not agree."""
    layers = {name for group in own for name in group.layer_names}
    for of, groups in enumerate(earlier):
        if any(name in layers for group in groups for name in group.layer_names):
            return _same_groups(worker, own, of, groups)
    return _groups_of_other_layers(worker, own, earlier[0]) if earlier else list(own)


def _same_groups(
    worker: int, own: list[KVCacheGroupSpec], of: int, groups: list[KVCacheGroupSpec]
) -> list[KVCacheGroupSpec]:
    in_order = _in_order(own, groups, lambda group: frozenset(group.layer_names))
    if in_order is None:
        raise ValueError(
            f"worker {worker}: expected the groups of layers of worker {of}, "
            f"{_layers_words(groups, own)}, got {_layers_words(own, groups)}; plan all workers "
            "with the same layers"
        )
    for group, wanted in zip(in_order, groups, strict=True):
        for name in sorted(group.layer_names):
            spec, expected = group.spec_of(name), wanted.spec_of(name)
            if spec != expected:
                raise ValueError(
                    f"worker {worker}: layer {name}: expected worker {of}'s {expected}, got {spec}"
                )
    return in_order


def _groups_of_other_layers(
    worker: int, own: list[KVCacheGroupSpec], first: list[KVCacheGroupSpec]
) -> list[KVCacheGroupSpec]:
    """``own`` in the order of worker 0's groups, none of whose layers it has."""
    in_order = _in_order(own, first, lambda group: table_key(group.kv_cache_spec))
    if in_order is None:
        raise ValueError(
            f"worker {worker}: expected groups that keep what worker 0's do, "
            f"{_kept_words(first)}, got {_kept_words(own)}; plan stages with other proportions "
            "together (get_kv_cache_configs)"
        )
    return in_order


def _in_order(
    own: list[KVCacheGroupSpec],
    wanted: list[KVCacheGroupSpec],
    key: Callable[[KVCacheGroupSpec], Hashable],
) -> list[KVCacheGroupSpec] | None:
    left, in_order = list(own), []
    for group in wanted:
        at = next((at for at, other in enumerate(left) if key(other) == key(group)), None)
        if at is None:
            return None
        in_order.append(left.pop(at))
    return None if left else in_order


def _layers_words(groups: list[KVCacheGroupSpec], others: list[KVCacheGroupSpec]) -> str:
    """The groups whose layers none of ``others`` has."""
    known = [set(other.layer_names) for other in others]
    new = [group.layer_names for group in groups if set(group.layer_names) not in known]
    return "; ".join(sorted(", ".join(sorted(names)) for names in new)) or "no more"


def _kept_words(groups: list[KVCacheGroupSpec]) -> str:
    return "; ".join(table_words(group.kv_cache_spec) for group in groups) or "none"
