"""How many tokens an attention backend's own blocks have, where it cannot take the cache's blocks
as they are.

A block of the cache is then made of several kernel blocks that follow each other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvxfer.cache.specs import AttentionSpec, KVCacheConfig, KVCacheSpec, MambaSpec
from kvxfer.tensors.attention_contract import AttentionBackend, AttentionGroup


def select_common_block_size(
    kv_manager_block_size: int, backends: Collection[type[AttentionBackend]]
) -> int:
    """Tokens of a kernel block that all of ``backends`` take.

    ``kv_manager_block_size`` itself if every backend takes it, else the largest size that divides
    it and that every backend takes. Raises ValueError if there is none.
    """
    if kv_manager_block_size < 1:
        raise ValueError(f"block_size: expected at least 1 token, got {kv_manager_block_size}")
    if all(_takes(backend, kv_manager_block_size) for backend in backends):
        return kv_manager_block_size
    # A multiple of m divides the block only if the block is one too, and then the block itself was
    # taken: only exact sizes are left.
    exact = {
        size
        for backend in backends
        for size in backend.get_supported_kernel_block_sizes()
        if isinstance(size, int) and size > 0 and kv_manager_block_size % size == 0
    }
    for size in sorted(exact, reverse=True):
        if all(_takes(backend, size) for backend in backends):
            return size
    wanted = "; ".join(f"{backend.get_name()} takes {_sizes_of(backend)}" for backend in backends)
    raise ValueError(
        f"block_size: expected one that splits into kernel blocks of every backend, got "
        f"{kv_manager_block_size} tokens; {wanted}"
    )


def prepare_kernel_block_sizes(
    kv_cache_config: KVCacheConfig, attn_groups: Sequence[Sequence[AttentionGroup]]
) -> list[int]:
    """Tokens of a kernel block for each cache group.

    Args:
        kv_cache_config: the groups.
        attn_groups: for each of them the layers by backend. A group without any (none of its layers
            is on this worker) and a group of states keep their own block size.

    Raises:
        ValueError: not one entry for each group, or no common size.
        NotImplementedError: layers of a kind that is not known here.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(attn_groups) != len(groups):
        raise ValueError(
            f"attn_groups: expected one list for each of {len(groups)} cache groups, "
            f"got {len(attn_groups)}"
        )
    return [
        kernel_block_size(group.kv_cache_spec, [part.backend for part in parts])
        for group, parts in zip(groups, attn_groups, strict=True)
    ]


def kernel_block_size(spec: KVCacheSpec, backends: Collection[type[AttentionBackend]]) -> int:
    """Tokens of a kernel block of one cache group, given the backends of its layers.

    Raises ValueError if they have no common size, NotImplementedError for an unknown kind of layer.
    """
    if isinstance(spec, MambaSpec):
        return spec.block_size
    if isinstance(spec, AttentionSpec):
        return select_common_block_size(spec.block_size, backends)
    raise NotImplementedError(
        f"kv_cache_spec: expected an attention or a state spec, got {type(spec).__name__}"
    )


def _takes(backend: type[AttentionBackend], size: int) -> bool:
    return any(
        size == supported if isinstance(supported, int) else size % supported.base == 0
        for supported in backend.get_supported_kernel_block_sizes()
    )


def _sizes_of(backend: type[AttentionBackend]) -> str:
    sizes = [
        str(size) if isinstance(size, int) else f"multiples of {size.base}"
        for size in backend.get_supported_kernel_block_sizes()
    ]
    return ", ".join(sizes) or "none"
