"""From a model's attention layers to cache specs, backends, and the metadata of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from kvxfer.cache.specs import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, attention_layer_spec
from kvxfer.tensors.attention_contract import (
    AttentionBackend,
    AttentionLayer,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    CpuGpuBuffer,
    ForwardConfig,
    SharesWorkspace,
)

# Of the field's kinds of attention, those whose K and V are gone after the step.
_KEEPS_NOTHING = {"encoder", "encoder_only"}


class _CacheSettings(Protocol):
    @property
    def block_size(self) -> int: ...


class _ModelSettings(Protocol):
    @property
    def dtype(self) -> str | torch.dtype: ...


class SpecConfig(ForwardConfig, Protocol):
    """What the specs of a model's layers depend on."""

    @property
    def cache_config(self) -> _CacheSettings: ...
    @property
    def model_config(self) -> _ModelSettings: ...


def attention_layers(vllm_config: ForwardConfig) -> dict[str, AttentionLayer]:
    """The attention layers of ``vllm_config.compilation_config.static_forward_context``, in its
    order; what else is in there (experts, states) is left out.
    """
    context = vllm_config.compilation_config.static_forward_context
    wanted = ("get_attn_backend", "num_kv_heads", "head_size")
    return {
        name: cast(AttentionLayer, layer)
        for name, layer in context.items()
        if all(hasattr(layer, attribute) for attribute in wanted)
    }


def get_kv_cache_spec(
    vllm_config: SpecConfig, kv_cache_dtype: str | torch.dtype = "auto"
) -> dict[str, KVCacheSpec]:
    """What each attention layer of a model keeps, by layer name.

    :func:`~kvxfer.cache.specs.attention_layer_spec` says what that is; layers that read
    another layer's cache, and encoder layers, have no spec.

    Args:
        vllm_config: read are ``compilation_config.static_forward_context`` (layer name to
            :class:`~kvxfer.tensors.attention_contract.AttentionLayer`), ``cache_config.block_size``
            and, of ``model_config``, ``dtype`` and ``use_mla`` (missing: False).
        kv_cache_dtype: a dtype or its name without ``torch.``; "auto" for the model's.

    Raises:
        ValueError: a layer that shares with one that has no cache of its own, a window in latent
            attention, a kind of attention, dtype or size that has no spec. The message names the
            layer.
        TypeError: a size that is not an int; the message names the layer.
    """
    layers = attention_layers(vllm_config)
    model_config = vllm_config.model_config
    dtype = model_config.dtype if kv_cache_dtype == "auto" else kv_cache_dtype
    use_mla = bool(getattr(model_config, "use_mla", False))
    own = {name: layer for name, layer in layers.items() if _has_own_cache(name, layer)}
    for name, layer in layers.items():
        target = _target_of(layer)
        if target is not None and target not in own:
            raise ValueError(
                f"layer {name}: expected kv_sharing_target_layer_name to be a layer with a cache "
                f"of its own, got {target!r}; name one of {', '.join(own) or 'none'}"
            )
    block_size = vllm_config.cache_config.block_size
    return {
        name: attention_layer_spec(
            name,
            block_size=block_size,
            num_kv_heads=layer.num_kv_heads,
            head_size=layer.head_size,
            dtype=str(dtype).removeprefix("torch."),
            # The field's latent attention does not have the attribute.
            sliding_window=getattr(layer, "sliding_window", None),
            use_mla=use_mla,
        )
        for name, layer in own.items()
    }


def init_attn_backend(
    kv_cache_config: KVCacheConfig, vllm_config: ForwardConfig, device: torch.device | str
) -> tuple[dict[str, type[AttentionBackend]], list[AttentionMetadataBuilder]]:
    """The backend of every layer, and one metadata builder for each cache group, in their order.

    Builders of one backend that have a workspace
    (:class:`~kvxfer.tensors.attention_contract.SharesWorkspace`) share the first one's.

    Args:
        kv_cache_config: the groups, KV sharing layers included.
        vllm_config: ``compilation_config.static_forward_context`` is read; builders get all of it.
        device: where builders keep their buffers.

    Raises:
        ValueError: a group without layers, a layer that the model does not have, or layers of one
            group with different backends.
    """
    layers = attention_layers(vllm_config)
    backends: dict[str, type[AttentionBackend]] = {}
    builders: list[AttentionMetadataBuilder] = []
    workspaces: dict[type[AttentionBackend], Tensor] = {}
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        backend = _group_backend(group_id, group, layers)
        backends |= dict.fromkeys(group.layer_names, backend)
        builder = backend.get_builder_cls()(
            group.kv_cache_spec, group.layer_names, vllm_config, device
        )
        if isinstance(builder, SharesWorkspace):
            if backend in workspaces:
                builder.set_workspace_buffer(workspaces[backend])
            else:
                workspaces[backend] = builder.get_workspace_buffer()
        builders.append(builder)
    return backends, builders


def build_attn_metadata(
    attn_metadata_builders: Sequence[AttentionMetadataBuilder],
    num_reqs: int,
    num_tokens: int,
    query_start_loc: Tensor | CpuGpuBuffer,
    seq_lens: Tensor | CpuGpuBuffer,
    num_computed_tokens_cpu: Tensor | CpuGpuBuffer,
    block_tables: Sequence[Tensor | CpuGpuBuffer],
    slot_mappings: Sequence[Tensor | CpuGpuBuffer] | Tensor,
    kv_cache_config: KVCacheConfig,
) -> dict[str, Any]:
    """The metadata of one step, by layer name; layers of one group get the same object.

    Buffers may be longer than the step, as those that are kept between steps are: the builders see
    their beginnings. Each may be a tensor or a
    :class:`~kvxfer.tensors.attention_contract.CpuGpuBuffer` with both sides filled. A tensor stands
    for both sides. Nothing is copied to a device: where builders read ``query_start_loc`` and
    ``seq_lens`` on one, do not pass CPU tensors. A tensor on a device is read back, which waits.

    Args:
        attn_metadata_builders: one for each cache group (:func:`init_attn_backend`).
        num_reqs: requests of the step.
        num_tokens: their new tokens.
        query_start_loc: [num_reqs + 1 or more], where each request's new tokens begin.
        seq_lens: [num_reqs or more], tokens of each request with the new ones.
        num_computed_tokens_cpu: [num_reqs or more], tokens computed before the step.
        block_tables: for each group [num_reqs or more, most blocks].
        slot_mappings: for each group [num_tokens or more].
        kv_cache_config: the groups.

    Raises:
        ValueError: another number of builders, block tables or slot mappings than groups; a buffer
            shorter than the step or with another number of dimensions; a negative count;
            ``query_start_loc`` that does not run from 0 to ``num_tokens``, or goes back.
    """
    groups = kv_cache_config.kv_cache_groups
    _check_counts(
        len(groups),
        attn_metadata_builders=len(attn_metadata_builders),
        block_tables=len(block_tables),
        slot_mappings=len(slot_mappings),
    )
    shared = _shared_by_groups(
        num_reqs, num_tokens, query_start_loc, seq_lens, num_computed_tokens_cpu
    )
    parts = zip(groups, attn_metadata_builders, block_tables, slot_mappings, strict=True)
    metadata: dict[str, Any] = {}
    for group_id, (group, builder, block_table, slot_mapping) in enumerate(parts):
        table, slots = _on_device(block_table), _on_device(slot_mapping)
        common = CommonAttentionMetadata(
            **shared,
            block_table_tensor=_head(f"block_tables[{group_id}]", table, num_reqs, ndim=2),
            slot_mapping=_head(f"slot_mappings[{group_id}]", slots, num_tokens),
        )
        built = builder.build(common_prefix_len=0, common_attn_metadata=common)
        metadata |= dict.fromkeys(group.layer_names, built)
    return metadata


def _shared_by_groups(
    num_reqs: int,
    num_tokens: int,
    query_start_loc: Tensor | CpuGpuBuffer,
    seq_lens: Tensor | CpuGpuBuffer,
    num_computed_tokens_cpu: Tensor | CpuGpuBuffer,
) -> dict[str, Any]:
    """The fields of the common metadata that are the same for all groups."""
    for name, count in (("num_reqs", num_reqs), ("num_tokens", num_tokens)):
        if count < 0:
            raise ValueError(f"{name}: expected at least 0, got {count}")
    starts = _head("query_start_loc", _on_host(query_start_loc), num_reqs + 1)
    if (ends := (int(starts[0]), int(starts[-1]))) != (0, num_tokens):
        raise ValueError(
            f"query_start_loc: expected to run from 0 to num_tokens {num_tokens}, got {ends[0]} "
            f"to {ends[1]}"
        )
    query_lens = starts.diff().tolist()
    if min(query_lens, default=0) < 0:
        raise ValueError(
            f"query_start_loc: expected no number below its predecessor, got {starts.tolist()}"
        )
    lengths = _head("seq_lens", _on_host(seq_lens), num_reqs)
    computed = _on_host(num_computed_tokens_cpu)
    return {
        "query_start_loc": _head("query_start_loc", _on_device(query_start_loc), num_reqs + 1),
        "query_start_loc_cpu": starts,
        "seq_lens": _head("seq_lens", _on_device(seq_lens), num_reqs),
        "seq_lens_cpu": lengths,
        "seq_lens_cpu_upper_bound": lengths,
        "num_computed_tokens_cpu": _head("num_computed_tokens_cpu", computed, num_reqs),
        "num_reqs": num_reqs,
        "num_actual_tokens": num_tokens,
        "max_query_len": max(query_lens, default=0),
        "max_seq_len": max(lengths.tolist(), default=0),
    }


def _on_device(buffer: Tensor | CpuGpuBuffer) -> Tensor:
    return buffer if isinstance(buffer, Tensor) else buffer.gpu


def _on_host(buffer: Tensor | CpuGpuBuffer) -> Tensor:
    return buffer.cpu() if isinstance(buffer, Tensor) else buffer.cpu


def _has_own_cache(name: str, layer: AttentionLayer) -> bool:
    # The field's kinds are strings or an enum of strings.
    kind = getattr(layer, "attn_type", "decoder")
    kind = str(getattr(kind, "value", kind))
    if kind not in {"decoder", *_KEEPS_NOTHING}:
        raise ValueError(
            f"layer {name}: expected attn_type decoder or one of "
            f"{', '.join(sorted(_KEEPS_NOTHING))}, got {kind!r}; it has no cache spec"
        )
    return kind == "decoder" and _target_of(layer) is None


def _target_of(layer: AttentionLayer) -> str | None:
    # The field's latent attention has neither this attribute nor a window's.
    return getattr(layer, "kv_sharing_target_layer_name", None)


def _group_backend(
    group_id: int, group: KVCacheGroupSpec, layers: Mapping[str, AttentionLayer]
) -> type[AttentionBackend]:
    """The one backend of a group's layers."""
    if not group.layer_names:
        raise ValueError(f"group {group_id}: expected at least one layer, got none")
    _check_known(group_id, group.layer_names, layers)
    first, *others = group.layer_names
    backend = layers[first].get_attn_backend()
    for name in others:
        if (other := layers[name].get_attn_backend()) is not backend:
            raise ValueError(
                f"group {group_id}: expected one backend for its layers, got {backend.get_name()} "
                f"for {first} and {other.get_name()} for {name}; one of them needs a group of its "
                "own"
            )
    return backend


def _check_known(
    group_id: int, layer_names: Iterable[str], layers: Mapping[str, AttentionLayer]
) -> None:
    if unknown := [name for name in layer_names if name not in layers]:
        raise ValueError(
            f"group {group_id}: expected attention layers of the model, got {', '.join(unknown)}; "
            f"it has {', '.join(layers) or 'none'}"
        )


def _check_counts(num_groups: int, **counts: int) -> None:
    for name, count in counts.items():
        if count != num_groups:
            raise ValueError(f"{name}: expected one for each of {num_groups} groups, got {count}")


def _head(name: str, buffer: Tensor, length: int, *, ndim: int = 1) -> Tensor:
    """The first ``length`` rows."""
    if buffer.ndim != ndim or buffer.shape[0] < length:
        more = "" if ndim == 1 else f" and {ndim} dimensions"
        raise ValueError(
            f"{name}: expected at least {length} rows{more}, got shape {tuple(buffer.shape)}"
        )
    return buffer[:length]
