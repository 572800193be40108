"""A rank's KV cache: buffers of bytes, and views in each backend's own order, bound to the layers.

A buffer may back several layers: of different groups (a block belongs to one group at a time), or
layers that share their KV. Block b of all of them lies in the same bytes, or the config is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from kvxfer.cache.specs import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
)
from kvxfer.tensors.attention import AttentionBackend, kernel_block_size
from kvxfer.tensors.cache_views import (
    LayerCache,
    Place,
    attention_view,
    cache_shape,
    place_of,
    state_views,
)
from kvxfer.tensors.strided_index import check_flat

_BUFFER_ALIGNMENT_NBYTES = 4096
"""Every buffer of one allocation begins at a multiple of it, counted from the allocation's start:
a memory page of the host, and more than any kernel wants."""

# What torch itself gives on a CPU; any element type fits.
_BASE_ALIGNMENT_NBYTES = 64


_Cache = TypeVar("_Cache")


class CacheHolder(Protocol):
    """A layer of the forward context, as far as binding goes."""

    kv_cache: Any


def allocate_kv_cache(
    kv_cache_config: KVCacheConfig,
    device: torch.device | str,
    *,
    allocator: Callable[[int], Tensor] | None = None,
) -> dict[str, Tensor]:
    """One flat int8 buffer for each KVCacheTensor, the same tensor for all its layers.

    Args:
        device: where the buffers are, zeroed, unless an allocator brings them.
        allocator: ``nbytes -> tensor``: contiguous, one-dimensional, uint8, of at least ``nbytes``
            (shared memory, say). Called once; all buffers are carved from it, each at a multiple of
            4096 bytes (so it is up to 4095 bytes larger for each but the last than the plan says),
            and keep the content it has.

    Raises:
        ValueError: a layer in two buffers, a size below 1, or an allocation that does not fit.
    """
    tensors = kv_cache_config.kv_cache_tensors
    buffer_of: dict[str, int] = {}
    for index, tensor in enumerate(tensors):
        if tensor.size < 1:
            raise ValueError(
                f"buffer of {', '.join(tensor.shared_by)}: expected at least 1 byte, "
                f"got {tensor.size}"
            )
        for layer in tensor.shared_by:
            if buffer_of.setdefault(layer, index) != index:
                raise ValueError(f"{layer}: expected one buffer for it, got two")
    sizes = [tensor.size for tensor in tensors]
    if allocator is None:
        buffers = [torch.zeros(size, dtype=torch.int8, device=device) for size in sizes]
    else:
        buffers = _carve(allocator, torch.device(device), sizes)
    return {layer: buffers[index] for layer, index in buffer_of.items()}


def reshape_kv_cache(
    kv_cache_config: KVCacheConfig,
    raw_tensors: Mapping[str, Tensor],
    attn_backends: Mapping[str, type[AttentionBackend]],
    *,
    kernel_block_sizes: Sequence[int] | None = None,
) -> dict[str, LayerCache]:
    """Each layer's view of its buffer, in the backend's logical shape over its physical order.

    A padded block is divided equally among its pieces (kernel blocks, K and V where they are
    outermost), so that every dimension has one stride. A state layer gets a list of views, one for
    each state, ``[num_blocks, *shape]``.

    Args:
        raw_tensors: flat int8 buffer of every layer of the groups.
        kernel_block_sizes: tokens of a kernel block for each group, as of
            :func:`~kvxfer.tensors.attention.prepare_kernel_block_sizes`; None: found from
            ``attn_backends``.

    Raises:
        KeyError: a layer without buffer or backend, or a buffer of an unknown layer.
        ValueError: a view that cannot be made, or layers that share a buffer but put the same block
            in different bytes of it.
        NotImplementedError: a spec of a kind that is not known here.
    """
    return _reshape(kv_cache_config, raw_tensors, attn_backends, kernel_block_sizes, ())


def init_kv_cache(
    runner_kv_caches: list[Any],
    forward_context: Mapping[str, CacheHolder],
    kv_cache_config: KVCacheConfig,
    attn_backends: Mapping[str, type[AttentionBackend]],
    device: torch.device | str,
    *,
    allocator: Callable[[int], Tensor] | None = None,
    kernel_block_sizes: Sequence[int] | None = None,
    shared_kv_cache_layers: Mapping[str, str] | None = None,
) -> dict[str, LayerCache]:
    """Allocate, reshape, let layers share and bind; returns each layer's cache.

    ``shared_kv_cache_layers`` (layer -> target): these get their target's cache and join its group,
    whether the config names them or not. One with a backend that states another shape or order than
    its target's is a ValueError. The rest is as in :func:`allocate_kv_cache`,
    :func:`reshape_kv_cache` and :func:`bind_kv_cache`.
    """
    shared = shared_kv_cache_layers or {}
    _check_sharers(shared, kv_cache_config, attn_backends)
    raw_tensors = allocate_kv_cache(kv_cache_config, device, allocator=allocator)
    kv_caches = _reshape(kv_cache_config, raw_tensors, attn_backends, kernel_block_sizes, shared)
    initialize_kv_cache_for_kv_sharing(shared, kv_cache_config.kv_cache_groups, kv_caches)
    bind_kv_cache(kv_caches, forward_context, runner_kv_caches)
    return kv_caches


def bind_kv_cache(
    kv_caches: Mapping[str, _Cache],
    forward_context: Mapping[str, CacheHolder],
    runner_kv_caches: list[_Cache],
    num_attn_module: int = 1,
) -> None:
    """Fill the runner's list in the order of the layers, and set each layer's ``kv_cache``.

    A layer's index is the number in its name ("model.layers.3.self_attn"). With ``num_attn_module``
    above 1 a second number may follow, which orders the layers of one index. Otherwise several
    layers with one index (self and cross attention; a draft model beside the model) come in the
    order of ``kv_caches``.

    Raises ValueError, before anything is changed, for a list that is not empty and a name without
    or with too many numbers; KeyError for a layer that the forward context does not have.
    """
    if runner_kv_caches:
        raise ValueError(
            f"runner_kv_caches: expected an empty list, got {len(runner_kv_caches)} entries; "
            "bind once"
        )
    if num_attn_module < 1:
        raise ValueError(f"num_attn_module: expected at least 1, got {num_attn_module}")
    order = {name: _layer_index(name, num_attn_module) for name in kv_caches}
    if unknown := [name for name in kv_caches if name not in forward_context]:
        raise KeyError(
            f"forward_context: expected a layer for every cache, got none for {', '.join(unknown)}"
            "; bind the caches of this model's layers only"
        )
    runner_kv_caches.extend(kv_caches[name] for name in sorted(kv_caches, key=order.__getitem__))
    for name, cache in kv_caches.items():
        forward_context[name].kv_cache = cache


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


def _carve(
    allocator: Callable[[int], Tensor], device: torch.device, sizes: Sequence[int]
) -> list[Tensor]:
    """One ``allocator(nbytes)`` for all. ValueError if not flat uint8, fitting, aligned."""
    starts, nbytes = [], 0
    for size in sizes:
        start = -(-nbytes // _BUFFER_ALIGNMENT_NBYTES) * _BUFFER_ALIGNMENT_NBYTES
        starts.append(start)
        nbytes = start + size
    if not nbytes:
        return []
    memory = allocator(nbytes)
    check_flat(memory, "allocator")
    if memory.numel() < nbytes:
        raise ValueError(f"allocator: expected at least {nbytes} bytes, got {memory.numel()}")
    if memory.device.type != device.type:
        raise ValueError(f"allocator: expected memory on {device}, got {memory.device}")
    if memory.data_ptr() % _BASE_ALIGNMENT_NBYTES:
        raise ValueError(
            f"allocator: expected memory aligned to {_BASE_ALIGNMENT_NBYTES} bytes, got "
            f"{memory.data_ptr():#x}"
        )
    memory = memory.view(torch.int8)
    return [memory[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def _reshape(
    config: KVCacheConfig,
    raw_tensors: Mapping[str, Tensor],
    attn_backends: Mapping[str, type[AttentionBackend]],
    kernel_block_sizes: Sequence[int] | None,
    without: Collection[str],
) -> dict[str, LayerCache]:
    if config.num_blocks < 1:
        raise ValueError(f"num_blocks: expected at least 1, got {config.num_blocks}")
    specs = {
        layer: group.spec_of(layer)
        for group in config.kv_cache_groups
        for layer in group.layer_names
        if layer not in without
    }
    _check_layers(specs, raw_tensors, attn_backends, without)
    kernel_tokens = _kernel_tokens(config, attn_backends, kernel_block_sizes)
    caches: dict[str, LayerCache] = {}
    places: dict[str, Place] = {}
    for layer, spec in specs.items():
        raw = raw_tensors[layer]
        if isinstance(spec, MambaSpec):
            caches[layer] = state_views(layer, raw, spec, config.num_blocks)
            places[layer] = Place(spec.page_size_bytes, num_pieces=1)
        elif isinstance(spec, AttentionSpec):
            tokens, backend = kernel_tokens[layer], attn_backends[layer]
            caches[layer] = attention_view(layer, raw, spec, config.num_blocks, tokens, backend)
            places[layer] = place_of(spec, tokens, backend)
        else:
            raise NotImplementedError(
                f"{layer}: expected an attention or a state spec, got {type(spec).__name__}"
            )
    _check_places(config, places)
    return caches


def _kernel_tokens(
    config: KVCacheConfig,
    attn_backends: Mapping[str, type[AttentionBackend]],
    kernel_block_sizes: Sequence[int] | None,
) -> dict[str, int]:
    groups = config.kv_cache_groups
    if kernel_block_sizes is None:
        kernel_block_sizes = [
            kernel_block_size(
                group.kv_cache_spec,
                dict.fromkeys(
                    attn_backends[layer] for layer in group.layer_names if layer in attn_backends
                ),
            )
            for group in groups
        ]
    if len(kernel_block_sizes) != len(groups):
        raise ValueError(
            f"kernel_block_sizes: expected one for each of {len(groups)} groups, "
            f"got {len(kernel_block_sizes)}"
        )
    return {
        layer: tokens
        for group, tokens in zip(groups, kernel_block_sizes, strict=True)
        for layer in group.layer_names
    }


def _check_layers(
    specs: Mapping[str, KVCacheSpec],
    raw_tensors: Mapping[str, Tensor],
    attn_backends: Mapping[str, type[AttentionBackend]],
    without: Collection[str],
) -> None:
    for layer, spec in specs.items():
        if layer not in raw_tensors:
            raise KeyError(
                f"{layer}: expected a buffer for it, got none; name it in shared_by of one of "
                "kv_cache_tensors, or as a layer that shares another one's cache"
            )
        if isinstance(spec, AttentionSpec) and layer not in attn_backends:
            raise KeyError(f"{layer}: expected an attention backend for it, got none")
    if unknown := [layer for layer in raw_tensors if layer not in specs and layer not in without]:
        raise KeyError(
            f"raw_tensors: expected layers of the groups, got {', '.join(unknown)} beside them"
        )


def _check_sharers(
    shared: Mapping[str, str],
    config: KVCacheConfig,
    attn_backends: Mapping[str, type[AttentionBackend]],
) -> None:
    """A layer reads its target's view as it is: both backends must state the same."""
    specs = {
        layer: group.spec_of(layer)
        for group in config.kv_cache_groups
        for layer in group.layer_names
    }
    for layer, target in shared.items():
        spec = specs.get(target)
        known = layer in attn_backends and target in attn_backends
        if not isinstance(spec, AttentionSpec) or not known:
            continue
        own, targets = attn_backends[layer], attn_backends[target]
        if cache_shape(own, 1, spec.block_size, spec) != cache_shape(
            targets, 1, spec.block_size, spec
        ):
            raise ValueError(
                f"{layer} shares the cache of {target}: expected a backend with the same shape and "
                f"stride order, got {own.get_name()} and {targets.get_name()}"
            )


def _check_places(config: KVCacheConfig, places: Mapping[str, Place]) -> None:
    """A block of one layer must not lie in another block of a layer of the same buffer."""
    for tensor in config.kv_cache_tensors:
        layers = [layer for layer in tensor.shared_by if layer in places]
        for layer in layers[1:]:
            if places[layer] != places[layers[0]]:
                raise ValueError(
                    f"{layers[0]} and {layer} share a buffer: expected each block of both in the "
                    f"same bytes, got {places[layers[0]]} and {places[layer]}; give them equal "
                    "blocks and backends with the same outermost dimensions, or buffers of their "
                    "own"
                )


def _layer_index(name: str, num_attn_module: int) -> tuple[int, int]:
    """The number of the layer, and of the attention in it, from the dotted parts of its name."""
    numbers = [int(part) for part in name.split(".") if re.fullmatch(r"\d+", part, re.ASCII)]
    most = 1 if num_attn_module == 1 else 2
    if not 1 <= len(numbers) <= most:
        raise ValueError(
            f"layer name {name!r}: expected {'one number' if most == 1 else 'one or two numbers'} "
            f"between its dots, got {len(numbers)}"
        )
    return numbers[0], numbers[1] if len(numbers) == 2 else 0
