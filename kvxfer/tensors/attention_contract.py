"""What the utilities of this room ask of an attention backend and of a model's layers.

Names and meanings are the field's, so that a serving engine's own classes fit as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from kvxfer.cache.specs import KVCacheSpec


class CompilationSettings(Protocol):
    """Where the field keeps a model's layers: ``{layer name: layer}``, in the model's order."""

    @property
    def static_forward_context(self) -> Mapping[str, object]: ...


class ForwardConfig(Protocol):
    """The part of an engine's configuration that leads to the model's layers."""

    @property
    def compilation_config(self) -> CompilationSettings: ...


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
    def get_name() -> str:
        """Name of the backend."""

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
        """The requests."""
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
        """A copy with other values."""
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
    ) -> object:
        """This backend's metadata of one step."""


@runtime_checkable
class SharesWorkspace(Protocol):
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

    ``sliding_window``: tokens that a token sees, itself among them, None for all.
    ``kv_sharing_target_layer_name``: the layer whose cache this one reads instead of having its
    own. Latent attention may lack both, which is as None. ``kv_cache``: the layer's view, set by
    ``bind_kv_cache``. A layer may also have an ``attn_type``, "decoder" where it is missing;
    encoder layers keep no KV.
    """

    num_kv_heads: int
    head_size: int
    sliding_window: int | None
    kv_sharing_target_layer_name: str | None
    kv_cache: Tensor

    def get_attn_backend(self) -> type[AttentionBackend]:
        """The backend that reads and writes this layer's cache."""


@dataclass(slots=True)
class AttentionGroup:
    """Layers of one cache group that use one backend.

    ``kv_cache_group_id``: the position of the group in ``KVCacheConfig.kv_cache_groups``.
    """

    backend: type[AttentionBackend]
    layer_names: list[str]
    kv_cache_spec: KVCacheSpec
    kv_cache_group_id: int
