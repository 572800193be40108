"""What vLLM's cache specs say of one layer, read once: one record for every kind that can move.

vLLM 0.26 to 0.33 differ in which fields a spec has; a missing one has the value that the older
version meant by not having it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvxfer.errors import ConfigError

_REFUSED = {
    "MambaSpec": "it keeps a state, whose shape only a running engine says",
    "CrossAttentionSpec": "it keeps what an encoder made, which no prompt token says",
    "EncoderOnlyAttentionSpec": "it keeps nothing that another engine could use",
    "RSWASpec": "what it keeps is not one window",
    "SinkFullAttentionSpec": "it keeps tokens that are not the request's",
    "HiddenStateCacheSpec": "it keeps hidden states, not KV",
    "CircularBufferSpec": "it keeps a ring, not the request's tokens",
    "SlidingWindowMLASpec": "with bounded replay it is computed again, not kept",
    "HiSparseHotSpec": "it is a copy that only this engine can address",
    "HiSparseResidentSpec": "it is a copy that only this engine can address",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer's cache as its spec states it; bytes of a *cell* are one head slot's of one token.

    Attributes:
        head_size, head_size_v: elements of K and of V; a latent has no V.
        is_latent: one latent for all heads (MLA), replicated on all ranks.
        window: tokens that the group keeps; None all. A layer that only *looks* at a window, while
            its blocks are kept (the hybrid cache manager is off), has None.
        is_chunk: the window is the chunk of the next token.
        quantisation: vLLM's mode by name, in small letters; "none". Of latents that are packed with
            their scales the name of the type, as "fp8_ds_mla".
        num_head_slots: slots of a block if they are not the heads; None: one for each head.
        cell_nbytes: bytes of a cell if they are packed in a backend's own way; None: K and V dense.
        cell_tokens: tokens that share one cell; 1 unless the cache is compressed.
        num_shards: how many ranks hold different heads, the others repeat them; None: not known.
    """

    block_tokens: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    dtype: torch.dtype
    is_latent: bool = False
    window: int | None = None
    is_chunk: bool = False
    quantisation: str = "none"
    num_head_slots: int | None = None
    cell_nbytes: int | None = None
    cell_tokens: int = 1
    is_context_sharded: bool = False
    num_shards: int | None = None

    @property
    def dense_nbytes(self) -> int:
        """Bytes of K and V (or the latent) of one head and token without anything else."""
        return (self.head_size + self.head_size_v) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """A layer that keeps a state: its tensors lie one behind the other in a block.

    Attributes:
        state_tokens: tokens from one block of the table to the next.
        kind: vLLM's ``mamba_type`` by name.
        shapes, dtypes: of each tensor, on this rank.
        is_replicated: each rank holds all of it.
        num_drafted_tokens: how many tokens of a step may be rejected. vLLM then has room for one
            more state each, in blocks of the table behind the one of the state that counts, and for
            one more step each of a convolution, behind those that count.
    """

    state_tokens: int
    kind: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    is_replicated: bool = False
    num_drafted_tokens: int = 0


def layer_specs(kv_cache_config: Any) -> dict[str, tuple[int, LayerSpec | StateSpec]]:
    """(group number, spec) of every layer in vLLM's ``KVCacheConfig``, in the groups' order.

    Raises ConfigError, naming the layer, for a cache that cannot move.
    """
    return {
        layer: (number, _read(layer, spec))
        for number, group in enumerate(kv_cache_config.kv_cache_groups)
        for layer, spec in _specs_of(group, number).items()
    }


def _specs_of(group: Any, number: int) -> dict[str, Any]:
    if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
        raise ConfigError(
            f"KV cache group {number}: expected a cache that this engine's peers can use, got one "
            "that is host-resident or not transferable; start vLLM without it"
        )
    members = getattr(group.kv_cache_spec, "kv_cache_specs", None)  # a group of unlike layers
    if members is None:
        return dict.fromkeys(group.layer_names, group.kv_cache_spec)
    return {layer: members[layer] for layer in group.layer_names}


def _read(layer: str, spec: Any) -> LayerSpec | StateSpec:
    from vllm.v1 import kv_cache_interface as interface

    # Subclasses mean something else (a state, a ring, tokens that are not the request's), so kinds
    # are compared, not tested for inheritance.
    kind = type(spec)
    window_latent = getattr(interface, "SlidingWindowMLASpec", None)
    if kind is interface.FullAttentionSpec:
        return _record(layer, spec)
    if kind is interface.MLAAttentionSpec:
        return _record(layer, spec, is_latent=True)
    if kind is interface.MambaSpec:
        return _state(spec)
    if kind is interface.SlidingWindowSpec:
        return _record(layer, spec, window=_kept_tokens(spec))
    if kind is interface.ChunkedLocalAttentionSpec:
        return _record(layer, spec, window=spec.attention_chunk_size, is_chunk=True)
    if kind is window_latent and not getattr(spec, "bounded_replay", False):
        return _record(layer, spec, is_latent=True, window=_kept_tokens(spec))
    raise cannot_move(layer, kind.__name__)


def cannot_move(layer: str, kind: str) -> ConfigError:
    """Of a layer whose spec is of a kind that does not move, by the name of its class."""
    reason = _REFUSED.get(kind, "what it keeps has no description here")
    return ConfigError(
        f"{layer}: expected full, sliding-window, chunked or latent attention, or a state, got "
        f"{kind}: "
        f"{reason}; serve this model without disaggregation"
    )


def _state(spec: Any) -> StateSpec:
    return StateSpec(
        state_tokens=spec.block_size,
        kind=getattr(spec.mamba_type, "name", str(spec.mamba_type)).upper(),
        shapes=tuple(map(tuple, spec.shapes)),
        dtypes=tuple(spec.dtypes),
        is_replicated=getattr(spec, "tp_replicated", False),
        num_drafted_tokens=getattr(spec, "num_speculative_blocks", 0),
    )


def _kept_tokens(spec: Any) -> int:
    # Speculative decoding with several modules keeps some tokens before the window.
    return int(spec.sliding_window + getattr(spec, "extra_retained_tokens", 0))


def _record(
    layer: str,
    spec: Any,
    *,
    is_latent: bool = False,
    window: int | None = None,
    is_chunk: bool = False,
) -> LayerSpec:
    head_size_v = 0 if is_latent else getattr(spec, "head_size_v", None)
    return LayerSpec(
        block_tokens=spec.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        head_size_v=spec.head_size if head_size_v is None else head_size_v,
        dtype=spec.dtype,
        is_latent=is_latent,
        window=window,
        is_chunk=is_chunk,
        quantisation=_quantisation(spec),
        num_head_slots=getattr(spec, "num_head_slots", None),
        cell_nbytes=getattr(spec, "state_content_bytes", None),
        cell_tokens=_cell_tokens(layer, spec),
        is_context_sharded=getattr(spec, "dcp_sharded", True),
        num_shards=getattr(spec, "max_tp_shards", None),
    )


def _quantisation(spec: Any) -> str:
    # Of 0.26 to 0.33 the type's name alone tells packed latents from those with a scale for all.
    cache_dtype = getattr(spec, "cache_dtype_str", None) or ""
    if cache_dtype.endswith("_ds_mla"):
        return cache_dtype
    mode = getattr(spec, "kv_quant_mode", None)
    return "none" if mode is None else mode.name.lower()


def _cell_tokens(layer: str, spec: Any) -> int:
    found = getattr(spec, "tokens_per_state", getattr(spec, "compress_ratio", 1))
    if found < 1 or spec.block_size % found:
        raise ConfigError(
            f"{layer}: block_size: expected a multiple of the {found} tokens that share a state, "
            f"got {spec.block_size}; choose another block size"
        )
    return int(found)
