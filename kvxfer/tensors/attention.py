"""Attention layers and their backends: what is asked of them, and what follows from them, cache
specs, kernel blocks, builders and the metadata of a step.

Names and meanings are the field's, so that a serving engine's own classes fit as they are. Where a
backend cannot take the cache's blocks as they are, a block is made of several *kernel blocks* that
follow each other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

import torch
from torch import Tensor

from kvxfer.cache.specs import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    attention_layer_spec,
)

# Of the field's kinds of attention, those whose K and V are gone after the step.
_KEEPS_NOTHING = {"encoder", "encoder_only"}


ForwardConfig: TypeAlias = Any
"""The configuration of whatever engine. ``compilation_config.static_forward_context``: the model's
layers by name, in its order.
"""


@dataclass(frozen=True, slots=True)
class MultipleOf:
    """A backend whose kernel blocks may have any multiple of ``base`` tokens."""

    base: int

    def __post_init__(self) -> None:
        if self.base < 1:
            raise ValueError(f"base: expected at least 1 token, got {self.base}")


class AttentionBackend(Protocol):
    """Where a layer's K and V lie. Called on the class; a backend has no state."""

    @staticmethod
    def get_name() -> str: ...

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """Logical shape of a layer's cache in elements; ``num_blocks`` kernel blocks of
        ``block_size`` tokens.
        """

    @staticmethod
    def get_kv_cache_stride_order() -> tuple[int, ...]:
        """The logical dimensions in physical order, outermost first."""

    @staticmethod
    def get_supported_kernel_block_sizes() -> Sequence[int | MultipleOf]:
        """Tokens of a kernel block: exact sizes, or multiples."""

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        """What builds this backend's metadata of a step."""


class CpuGpuBuffer(Protocol):
    """A tensor that is kept twice with the same content: the field's buffers of a step."""

    @property
    def cpu(self) -> Tensor: ...
    @property
    def gpu(self) -> Tensor: ...


@dataclass(slots=True, kw_only=True)
class CommonAttentionMetadata:
    """One step of ``num_reqs`` requests with ``num_actual_tokens`` new tokens, for one cache group.

    Attributes, order and methods are the field's. It is not frozen, because the field's builders
    copy it and set attributes of the copy.

    Attributes:
        query_start_loc, query_start_loc_cpu: [num_reqs + 1], where each request's new tokens begin.
        seq_lens, seq_lens_cpu: [num_reqs], tokens of each request with the new ones.
        num_computed_tokens_cpu: [num_reqs], tokens computed before the step.
        max_query_len, max_seq_len: the largest number of new tokens, and of all tokens, of a
            request; 0 without requests.
        block_table_tensor: [num_reqs, most blocks], block ids of the engine, 0 where there is none.
        slot_mapping: [num_actual_tokens], block id * block_size + offset.
        causal: a token sees no later one.
        seq_lens_cpu_upper_bound: no less than ``seq_lens_cpu``; here the same.

    The others are for models and modes that the engine does not have: None, unless the caller of a
    builder sets them. Names ending in ``_cpu`` live on the CPU, other tensors where the caller has
    them.
    """

    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    seq_lens_cpu: Tensor
    num_computed_tokens_cpu: Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Tensor
    slot_mapping: Tensor
    causal: bool | Tensor = True
    seq_lens_cpu_upper_bound: Tensor | None = None
    logits_indices_padded: Tensor | None = None
    num_logits_indices: int | None = None
    max_logits_per_req: int | None = None
    encoder_seq_lens: Tensor | None = None
    encoder_seq_lens_cpu: Any = None
    dcp_local_seq_lens: Tensor | None = None
    dcp_local_seq_lens_cpu: Tensor | None = None
    dcp_local_seq_lens_cpu_upper_bound: Tensor | None = None
    positions: Tensor | None = None
    is_prefilling: Tensor | None = None
    req_idx: Any = None
    mm_req_doc_ranges: dict[int, list[tuple[int, int]]] | None = None
    rswa_prefix_lens: Tensor | None = None
    replayssm_decode_base_cpu: Tensor | None = None

    def batch_size(self) -> int:
        return self.num_reqs

    def naive_query_lens(self) -> Tensor:
        """[num_reqs], new tokens of each request; on the device."""
        return self.query_start_loc[1:] - self.query_start_loc[:-1]

    def compute_num_computed_tokens(self) -> Tensor:
        """[num_reqs], tokens computed before the step; on the device."""
        return self.seq_lens - self.naive_query_lens()

    def token_to_req_indices(self, buffer: Tensor) -> Tensor:
        """[num_actual_tokens], the request of each token: the beginning of ``buffer``, filled."""
        device = self.query_start_loc.device
        indices = buffer[: self.num_actual_tokens]
        requests = torch.arange(self.num_reqs, device=device)
        return indices.copy_(requests.repeat_interleave(self.naive_query_lens()))

    def replace(self, **changes: object) -> CommonAttentionMetadata:
        return replace(self, **changes)  # type: ignore[arg-type]


class AttentionMetadataBuilder(Protocol):
    """Turns the common metadata into what one backend's kernels want."""

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        config: ForwardConfig,
        device: torch.device | str,
    ) -> None: ...

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata
    ) -> object: ...


@runtime_checkable
class _SharesWorkspace(Protocol):
    """A metadata builder that needs scratch memory for its kernels.

    Groups run one after the other, so the builders of one backend can use one buffer:
    ``init_attn_backend`` asks the first for it and gives it to the others.
    """

    def get_workspace_buffer(self) -> Tensor:
        """The builder's buffer; the first call allocates it."""

    def set_workspace_buffer(self, workspace: Tensor) -> None:
        """Use this buffer and allocate none."""


class AttentionLayer(Protocol):
    """One layer of a model, as the forward context holds it: ``{layer name: layer}``.

    ``sliding_window``: tokens that a token sees, itself among them, None for all; a layer may have
    an ``attention_chunk_size`` instead. ``kv_sharing_target_layer_name``: the layer whose cache
    this one reads instead of having its own. Latent attention may lack all, which is as None.
    ``kv_cache``: the layer's view, set by ``bind_kv_cache``. A layer may also have an
    ``attn_type``, "decoder" where it is missing; encoder layers keep no KV.
    """

    num_kv_heads: int
    head_size: int
    sliding_window: int | None
    kv_sharing_target_layer_name: str | None
    kv_cache: Tensor

    def get_attn_backend(self) -> type[AttentionBackend]: ...


@dataclass(slots=True)
class AttentionGroup:
    """``kv_cache_group_id``: the group's position in ``KVCacheConfig.kv_cache_groups``."""

    backend: type[AttentionBackend]
    layer_names: list[str]
    kv_cache_spec: KVCacheSpec
    kv_cache_group_id: int


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
    vllm_config: ForwardConfig, kv_cache_dtype: str | torch.dtype = "auto"
) -> dict[str, KVCacheSpec]:
    """What each attention layer of a model keeps, by layer name.

    :func:`~kvxfer.cache.specs.attention_layer_spec` says what that is; layers that read
    another layer's cache, and encoder layers, have no spec.

    Args:
        vllm_config: read are ``compilation_config.static_forward_context`` (layer name to
            :class:`AttentionLayer`), ``cache_config.block_size``
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
            attention_chunk_size=getattr(layer, "attention_chunk_size", None),
        )
        for name, layer in own.items()
    }


def init_attn_backend(
    kv_cache_config: KVCacheConfig, vllm_config: ForwardConfig, device: torch.device | str
) -> tuple[dict[str, type[AttentionBackend]], list[AttentionMetadataBuilder]]:
    """The backend of every layer, and one metadata builder for each cache group, in their order.

    Builders of one backend that have a workspace
    (:class:`_SharesWorkspace`) share the first one's.

    Args:
        kv_cache_config: the groups, KV sharing layers included.
        vllm_config: ``compilation_config.static_forward_context`` is read; builders get all of it.

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
        if isinstance(builder, _SharesWorkspace):
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
    :class:`CpuGpuBuffer` with both sides filled. A tensor stands
    for both sides. Nothing is copied to a device: where builders read ``query_start_loc`` and
    ``seq_lens`` on one, do not pass CPU tensors. A tensor on a device is read back, which waits.

    Args:
        query_start_loc: [num_reqs + 1 or more], where each request's new tokens begin.
        seq_lens: [num_reqs or more], tokens of each request with the new ones.
        num_computed_tokens_cpu: [num_reqs or more], tokens computed before the step.
        block_tables: for each group [num_reqs or more, most blocks].
        slot_mappings: for each group [num_tokens or more].

    Raises:
        ValueError: another number of builders, block tables or slot mappings than groups; a buffer
            shorter than the step or with another number of dimensions; a negative count;
            ``query_start_loc`` that does not run from 0 to ``num_tokens``, or goes back.
    """
    groups = kv_cache_config.kv_cache_groups
    for name, given in (
        ("attn_metadata_builders", attn_metadata_builders),
        ("block_tables", block_tables),
        ("slot_mappings", slot_mappings),
    ):
        if len(given) != len(groups):
            raise ValueError(
                f"{name}: expected one for each of {len(groups)} groups, got {len(given)}"
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
    if not group.layer_names:
        raise ValueError(f"group {group_id}: expected at least one layer, got none")
    if unknown := [name for name in group.layer_names if name not in layers]:
        raise ValueError(
            f"group {group_id}: expected attention layers of the model, got {', '.join(unknown)}; "
            f"it has {', '.join(layers) or 'none'}"
        )
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


def _head(name: str, buffer: Tensor, length: int, *, ndim: int = 1) -> Tensor:
    """The first ``length`` rows. Raises ValueError for fewer rows or other dimensions."""
    if buffer.ndim != ndim or buffer.shape[0] < length:
        more = "" if ndim == 1 else f" and {ndim} dimensions"
        raise ValueError(
            f"{name}: expected at least {length} rows{more}, got shape {tuple(buffer.shape)}"
        )
    return buffer[:length]


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
    """Tokens of a kernel block for each cache group. ``attn_groups``: for each of them the layers
    by backend. A group without any (none of its layers is on this worker) and a group of states
    keep their own block size. Raises ValueError for another number of entries, or no common
    size; NotImplementedError for layers of a kind that is not known here.
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
    """Raises ValueError without a common size, NotImplementedError for an unknown kind of layer."""
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
