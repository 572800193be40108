"""Whether the memory of a cache holds one request of the longest length, and which length it holds.

One pool serves all groups, so a request needs the sum over the groups of the most blocks that it
holds in each at a time, each with the bytes of a block of the pool; beside them the pool has the
null block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvxfer.cache.grouping import get_kv_cache_groups
from kvxfer.cache.spec_base import KVCacheSpec, MemoryConfig, check_int, check_positive
from kvxfer.cache.specs import KVCacheGroupSpec

_NUM_NULL_BLOCKS = 1


class PlanningConfig(MemoryConfig, Protocol):
    """What a cache's size depends on: settings of an engine, in its sections.

    - ``model_config.max_model_len``: tokens of the longest request
    - ``scheduler_config.max_num_batched_tokens``: tokens of the largest step
    - ``scheduler_config.disable_hybrid_kv_cache_manager``: one group only (missing or None: False)
    - ``cache_config.num_gpu_blocks_override``: blocks of the pool whatever the memory is (missing
      or None: as many as fit)
    """

    @property
    def cache_config(self) -> object: ...


def check_enough_kv_cache_memory(
    config: PlanningConfig, kv_cache_spec: Mapping[str, KVCacheSpec], available_memory: int
) -> None:
    """Check that one request of ``max_model_len`` tokens fits, the null block counted.

    Args:
        config: see :class:`PlanningConfig`.
        kv_cache_spec: what each layer keeps, by layer name; without layers everything fits.
        available_memory: bytes for the cache on this rank; not looked at where
            ``num_gpu_blocks_override`` is set.

    Raises:
        TypeError: a setting or ``available_memory`` that is no int.
        ValueError: it does not fit; the message says what is needed and available, the longest
            request that fits, and the settings to change. Or layers that cannot be grouped.
    """
    check_groups_fit(config, get_kv_cache_groups(config, kv_cache_spec), available_memory)


def estimate_max_model_len(
    config: PlanningConfig, kv_cache_spec: Mapping[str, KVCacheSpec], available_memory: int
) -> int:
    """Tokens of the longest request, up to ``max_model_len``, with which
    :func:`check_enough_kv_cache_memory` passes; 0 when not even one token fits.

    Arguments and errors are those of :func:`check_enough_kv_cache_memory`. ``config`` is only read.
    """
    groups = get_kv_cache_groups(config, kv_cache_spec)
    _check_settings(config)
    return _longest_request(config, groups, num_blocks_for(config, groups, available_memory))


def pool_block_nbytes(groups: Sequence[KVCacheGroupSpec]) -> int:
    """Bytes of one block of the pool: of all layers of the largest group; 0 without groups."""
    of_groups = (
        sum(group.spec_of(name).page_size_bytes for name in group.layer_names) for group in groups
    )
    return max(of_groups, default=0)


def num_blocks_for(
    config: PlanningConfig, groups: Sequence[KVCacheGroupSpec], available_memory: int
) -> int:
    """Blocks of the pool, the null block among them: as many as fit, or the override.

    Without groups it is the null block alone.

    Raises:
        TypeError: memory or an override that is no int.
        ValueError: an override below 1.
    """
    check_int("available_memory", available_memory)
    if not groups:
        return _NUM_NULL_BLOCKS
    override: int | None = getattr(config.cache_config, "num_gpu_blocks_override", None)
    if override is not None:
        check_positive("num_gpu_blocks_override", override)
        return override
    return max(0, available_memory) // pool_block_nbytes(groups)


def num_blocks_needed(groups: Sequence[KVCacheGroupSpec], num_tokens: int, step_tokens: int) -> int:
    """Blocks of a pool in which one request of ``num_tokens`` tokens fits, computed in steps of up
    to ``step_tokens``; the null block is among them.
    """
    return _NUM_NULL_BLOCKS + sum(
        group.kv_cache_spec.max_blocks(num_tokens, step_tokens) for group in groups
    )


def check_groups_fit(
    config: PlanningConfig, groups: Sequence[KVCacheGroupSpec], available_memory: int
) -> int:
    """As :func:`check_enough_kv_cache_memory`; returns the pool's number of blocks."""
    max_model_len = config.model_config.max_model_len
    step_tokens = config.scheduler_config.max_num_batched_tokens
    _check_settings(config)
    num_blocks = num_blocks_for(config, groups, available_memory)
    num_needed = num_blocks_needed(groups, max_model_len, step_tokens)
    if not groups or num_needed <= num_blocks:
        return num_blocks
    block_nbytes = pool_block_nbytes(groups)
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


def _check_settings(config: MemoryConfig) -> None:
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
        if num_blocks_needed(groups, middle, step_tokens) <= num_blocks:
            fits = middle
        else:
            too_long = middle
    return fits
