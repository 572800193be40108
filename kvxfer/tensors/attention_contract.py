"""What the utilities of this room ask of an attention backend and of a model's layers.

Names and meanings are the field's, so that a serving engine's own classes fit as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

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


@dataclass(frozen=True, slots=True)
class CommonAttentionMetadata:
    """One step of ``num_reqs`` requests with ``num_tokens`` new tokens, for one cache group.

    ``query_start_loc`` [num_reqs + 1], ``seq_lens`` [num_reqs] (context with the new tokens) and
    ``num_computed_tokens_cpu`` [num_reqs] steer the loop and live on the CPU; ``block_table``
    [num_reqs, most blocks] (block ids of the engine, 0 where there is none) and ``slot_mapping``
    [num_tokens] (block id * block_size + offset) live on the model's device. All int64.
    """

    num_reqs: int
    num_tokens: int
    query_start_loc: Tensor
    seq_lens: Tensor
    num_computed_tokens_cpu: Tensor
    block_table: Tensor
    slot_mapping: Tensor


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
