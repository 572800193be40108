"""Where vLLM's cache lies: the views that it registers, as regions.

Addresses come from each view's shape, strides and storage, and from nothing else: layers may share
one allocation, groups may lie over each other, and a block of the cache manager may be several
kernel blocks. What lies inside a block is the business of :mod:`.interior`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from kvxfer.errors import ConfigError
from kvxfer.integrations.vllm.facts import CacheModel, element_type
from kvxfer.integrations.vllm.interior import (
    FP8_PER_TOKEN_HEAD,
    SCALE_SUFFIX,
    Cells,
    Named,
    Opaque,
    Rows,
    Trace,
    look_inside,
    packed_planes,
)
from kvxfer.integrations.vllm.probes import trace_cpu, trace_layer, trace_packed
from kvxfer.integrations.vllm.specs import LayerSpec, StateSpec, layer_specs
from kvxfer.integrations.vllm.states import Rank, regions_of_state
from kvxfer.tensors.shared_memory import plain_info
from kvxfer.transfer.interleave import Interleave
from kvxfer.transfer.layout import Elements, Interior, Region, check_region, is_scale
from kvxfer.transports.base import LocalMemory

READABLE_DEVICES = frozenset({"cpu", "cuda"})
"""Kinds of devices whose memory a wire can read."""


@dataclass(frozen=True, slots=True)
class Located:
    """A rank's cache: every plane of every layer, and the allocations that they lie in."""

    regions: tuple[Region, ...]
    memory: LocalMemory
    cleared: tuple[ClearedGroup, ...] = ()
    drafts: tuple[ClearedGroup, ...] = ()


@dataclass(frozen=True, slots=True)
class ClearedGroup:
    """Attention layers beside layers that keep a state, of a draft, or in groups of several types.
    A block may have been another group's before, and as KV those bytes may be no numbers: an
    attention that multiplies them by 0 gives none either. vLLM clears the blocks that it gives out,
    but not those of a load. ``table_tokens``: for which a block stands in a request's table.
    """

    group: int
    table_tokens: int
    num_blocks: int
    views: tuple[Tensor, ...]

    def clear(self, block_ids: Sequence[Sequence[int]], token_hi: int) -> None:
        """The block that a load up to this token fills only in part, before it is filled."""
        position, is_part = divmod(token_hi, self.table_tokens)
        ids = block_ids[self.group]
        if is_part and position < len(ids) and ids[position] >= 0:
            for view in self.views:
                kernel_blocks = view.shape[0] // self.num_blocks
                view[ids[position] * kernel_blocks : (ids[position] + 1) * kernel_blocks].zero_()

    def clear_all(self, block_ids: Sequence[Sequence[int]], token_lo: int, token_hi: int) -> None:
        """Every block with one of these tokens, in one launch for each layer."""
        first, end = token_lo // self.table_tokens, -(-token_hi // self.table_tokens)
        found = [i for i in block_ids[self.group][first:end] if i >= 0]
        ids = torch.tensor(found, dtype=torch.int64)  # of none it would be float32
        for view in self.views:
            raw = view.view(torch.uint8)
            blocks = raw.view(self.num_blocks, -1, *raw.shape[1:])
            blocks.index_fill_(0, ids.to(view.device), 0)


def locate(
    kv_caches: Mapping[str, Tensor],
    kv_cache_config: Any,
    *,
    tp_rank: int,
    tp_size: int,
    model: CacheModel,
) -> Located:
    """Regions and memory of the views that vLLM registers with a connector. ``kv_caches``: each
    layer's view ``[B, H, N, C]``, or ``[B, N, C]`` of a latent up to vLLM 0.28, with those layers
    that use another one's KV. Returns one region for every plane, layer by layer in the groups'
    order: "k" and "v", "k_scale" and "v_scale" where each token has scales, "latent", or one
    "page:" with a fingerprint for blocks that can only move whole. Raises ConfigError for a layer
    whose cache cannot be moved, with the reason.
    """
    specs = layer_specs(kv_cache_config)
    for layer in specs:
        if layer not in kv_caches:
            raise ConfigError(
                f"{layer}: expected a registered KV cache for every layer of the groups, got none; "
                "serve this model without disaggregation"
            )
    views = _views(
        {layer: _with_heads(kv_caches[layer], specs.get(layer)) for layer in kv_caches}, specs
    )
    _check_devices(views)
    memory = _Memory(view.tensor for view in views)
    rank = Rank(tp_rank, tp_size)
    num_blocks = kv_cache_config.num_blocks
    regions = tuple(
        region for view in views for region in _regions(view, memory, num_blocks, rank, model)
    )
    for region in regions:
        _check(region, memory)
    drafts = [view for view in views if model.is_draft(view.layer)]
    return Located(
        regions,
        memory.local,
        cleared=_cleared(views, num_blocks, model) if _are_mixed(views) else (),
        drafts=_cleared(drafts, num_blocks, model),
    )


def _are_mixed(views: Sequence[_View]) -> bool:
    """Can a block have been something else than one type of KV?"""
    kinds, groups = set[object](), set[object]()
    for view in views:
        if isinstance(view.spec, StateSpec):
            return True
        kinds.add((view.spec.dtype, view.spec.quantisation))
        groups.add((view.group, view.spec.block_tokens))
    return len(kinds) > 1 and len(groups) > 1


def _cleared(
    views: Iterable[_View], num_blocks: int, model: CacheModel
) -> tuple[ClearedGroup, ...]:
    found: dict[tuple[int, int], list[Tensor]] = {}
    for view in views:
        if isinstance(view.spec, LayerSpec):
            interleave = _interleave(view.spec, model)
            table_tokens = view.spec.block_tokens * (interleave.size if interleave else 1)
            found.setdefault((view.group, table_tokens), []).append(view.tensor)
    return tuple(ClearedGroup(*of, num_blocks, tuple(tensors)) for of, tensors in found.items())


@dataclass(frozen=True, slots=True)
class _View:
    """A layer, its tensor, and what its group says of it."""

    layer: str
    tensor: Tensor
    group: int
    spec: LayerSpec | StateSpec


def _views(
    kv_caches: Mapping[str, Tensor], specs: Mapping[str, tuple[int, LayerSpec | StateSpec]]
) -> list[_View]:
    """Every registered layer; one that no group names reads the KV of one that a group does."""
    found = [_View(layer, kv_caches[layer], *of) for layer, of in specs.items()]
    by_place = {_place(view.tensor): view for view in reversed(found)}
    for layer, tensor in kv_caches.items():
        if layer in specs:
            continue
        owner = by_place.get(_place(tensor))
        if owner is None:
            raise ConfigError(
                f"{layer}: expected a layer of a KV cache group, or one that shares such a layer's "
                "cache, got neither; serve this model without disaggregation"
            )
        found.append(_View(layer, tensor, owner.group, owner.spec))
    return found


def _with_heads(view: Tensor, of: tuple[int, LayerSpec | StateSpec] | None) -> Tensor:
    is_latent = of is None or getattr(of[1], "is_latent", False)
    return view.unsqueeze(1) if is_latent and view.dim() == 3 else view


def _place(tensor: Tensor) -> tuple[object, ...]:
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def _check_devices(views: Iterable[_View]) -> None:
    first: _View | None = None
    for view in views:
        device = view.tensor.device
        if device.type not in READABLE_DEVICES:
            raise ConfigError(
                f"device: expected {' or '.join(sorted(READABLE_DEVICES))}, got {device.type} "
                f"({view.layer}); there is no wire for its memory"
            )
        first = first or view
        if device != first.tensor.device:
            raise ConfigError(
                f"device: expected all of a rank's cache on {first.tensor.device} "
                f"({first.layer}), got {device} ({view.layer}); serve this model without "
                "disaggregation"
            )


class _Memory:
    """The distinct allocations behind the views, as flat bytes: vLLM makes one for each layer, or
    one in which all of them lie. What a wire exports of each is found by its address.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        flat = tuple(
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            for storage in storages.values()
        )
        self._number = {start: number for number, start in enumerate(storages)}
        self.local = LocalMemory(flat, tuple(plain_info(tensor) for tensor in flat))

    def find(self, tensor: Tensor) -> tuple[int, int]:
        """Which allocation a view lies in, and how many bytes behind its start."""
        start = tensor.untyped_storage().data_ptr()
        return self._number[start], tensor.data_ptr() - start


def _regions(
    view: _View, memory: _Memory, num_blocks: int, rank: Rank, model: CacheModel
) -> Iterable[Region]:
    layer, tensor, spec = view.layer, view.tensor, view.spec
    if isinstance(spec, StateSpec):
        number, start = memory.find(tensor)
        return regions_of_state(
            layer, tensor, spec, rank, model, group=view.group, memory=number, offset=start
        )
    interleave = _interleave(spec, model)
    if interleave and (spec.window is not None or spec.cell_tokens > 1):
        kept = "compressed" if spec.window is None else f"of a window of {spec.window}"
        raise ConfigError(
            f"{layer}: expected all tokens where decode_context_parallel_size is "
            f"{interleave.size}, got a cache {kept} tokens that ranks share; set it to 1"
        )
    cells, kernel_blocks = _cells(layer, tensor, spec, num_blocks)
    head_lo, head_hi = heads_of(layer, spec, rank, model)
    number, start = memory.find(tensor)
    inside = look_inside(layer, spec, cells, trace=_trace(view, spec, cells, model))
    common = Region(
        layer=layer,
        plane="",
        group=view.group,
        memory=number,
        offset=start,
        num_blocks=num_blocks,
        block_tokens=spec.block_tokens,
        head_lo=head_lo,
        head_hi=head_hi,
        inner_nbytes=cells.cell_nbytes,
        stride_block=tensor.stride(0) * tensor.element_size(),
        stride_head=cells.stride_slot,
        stride_token=cells.stride_token,
        kernel_blocks=kernel_blocks,
        window=spec.window,
        is_chunk=spec.is_chunk or msgspec.UNSET,
        interleave=interleave,
        is_draft=model.is_draft(layer) or msgspec.UNSET,
        cell_tokens=spec.cell_tokens if spec.cell_tokens > 1 else msgspec.UNSET,
    )
    match inside:
        case Opaque(fingerprint):
            return (_whole_region(common, cells, fingerprint),)
        case Named(planes):
            return tuple(
                replace(
                    common,
                    **asdict(plane) | {"offset": start + plane.offset},
                    elements=_elements(view, spec, plane.plane, common.num_heads, model),
                )
                for plane in planes
            )


def _interleave(spec: LayerSpec, model: CacheModel) -> Interleave | msgspec.UnsetType:
    """Unset where each rank keeps every token."""
    return model.interleave if spec.is_context_sharded else msgspec.UNSET


def _elements(
    view: _View, spec: LayerSpec, plane: str, num_heads: int, model: CacheModel
) -> Elements | msgspec.UnsetType:
    """What vLLM says of a plane's elements; a layer's scales stand in its module. Unset where there
    is no module, or its scales are not those of these heads.
    """
    if plane.endswith(SCALE_SUFFIX):
        return Elements("float32")
    if spec.quantisation.endswith("_ds_mla"):
        return Elements(spec.quantisation)
    dtype = element_type(spec.dtype, spec.quantisation, model.cache_dtype)
    if spec.quantisation == "none":
        return Elements(dtype)
    if spec.quantisation == FP8_PER_TOKEN_HEAD:
        return Elements(dtype, scale_plane=plane + SCALE_SUFFIX)
    module = model.layers.get(view.layer)
    module = model.layers.get(getattr(module, "kv_sharing_target_layer_name", None) or view.layer)
    found = getattr(module, "_v_scale" if plane == "v" else "_k_scale", None)
    if found is None:
        return msgspec.UNSET
    scales = tuple(map(float, found.flatten().tolist()))
    if len(scales) not in (1, num_heads) or not all(map(is_scale, scales)):
        return msgspec.UNSET
    return Elements(dtype, scales)


def _trace(view: _View, spec: LayerSpec, cells: Cells, model: CacheModel) -> Trace | Rows | None:
    """What the writer of the platform says of these cells; None where it cannot be asked."""
    if packed_planes(spec, cells):
        kind = (spec.quantisation, cells.num_tokens, cells.cell_nbytes)
        return trace_packed(*kind, view.tensor.device)
    if view.tensor.device.type != "cpu":
        return trace_layer(view.layer, spec, view.tensor, model.layers, dtype=model.dtype)
    return trace_cpu(
        view.layer,
        spec,
        num_tokens=cells.num_tokens,
        dtype=model.dtype,
        cache_dtype=model.cache_dtype,
    )


def _whole_region(common: Region, cells: Cells, fingerprint: str) -> Region:
    """A block as equal shares of its heads and tokens; only the sum of them means something."""
    shares = common.num_heads * cells.num_tokens
    if cells.block_nbytes % shares:
        raise ConfigError(
            f"{common.layer}: expected blocks of equal shares for {common.num_heads} heads and "
            f"{cells.num_tokens} tokens, got {cells.block_nbytes} bytes; choose another attention "
            "backend"
        )
    inner_nbytes = cells.block_nbytes // shares
    return replace(
        common,
        plane=f"page:{fingerprint}",
        inner_nbytes=inner_nbytes,
        stride_head=cells.num_tokens * inner_nbytes,
        stride_token=inner_nbytes,
        interior=Interior.OPAQUE,
    )


def _cells(layer: str, tensor: Tensor, spec: LayerSpec, num_blocks: int) -> tuple[Cells, int]:
    """The geometry of a view, and how many kernel blocks make one block."""
    shape = tuple(tensor.shape)
    if tensor.dim() != 4 or shape[0] % num_blocks or not all(shape):
        raise ConfigError(
            f"{layer}: expected a view [B, H, N, C] with a multiple of {num_blocks} blocks, got "
            f"shape {shape}; use a version of vLLM from 0.26 to 0.33"
        )
    kernel_blocks = shape[0] // num_blocks
    if (kernel_blocks * shape[2] * spec.cell_tokens, tensor.dtype) != (
        spec.block_tokens,
        spec.dtype,
    ):
        raise ConfigError(
            f"{layer}: expected {kernel_blocks} kernel blocks to hold {spec.block_tokens} tokens "
            f"of {spec.dtype}, got {shape[2]} tokens each, of {tensor.dtype}; serve this model "
            "without disaggregation"
        )
    if tensor.stride(3) != 1:
        raise ConfigError(
            f"{layer}: expected contiguous cells, got a stride of {tensor.stride(3)} elements; "
            "choose another KV cache layout"
        )
    itemsize = tensor.element_size()
    cells = Cells(
        num_slots=shape[1],
        num_tokens=shape[2],
        cell_nbytes=shape[3] * itemsize,
        stride_slot=tensor.stride(1) * itemsize,
        stride_token=tensor.stride(2) * itemsize,
    )
    return cells, kernel_blocks


def heads_of(layer: str, spec: LayerSpec, rank: Rank, model: CacheModel) -> tuple[int, int]:
    """The layer's KV heads ``[lo, hi)`` that this rank holds, of all that it has.

    vLLM gives each rank an equal share, or one head to several ranks in a row where there are more
    ranks than heads; a draft that is not parallel has all heads on each. The spec says the share;
    the total is what makes it. Raises ConfigError for a single head on each of several ranks, of a
    layer of unknown total.
    """
    if spec.is_latent:
        return 0, 1
    share, is_draft = spec.num_kv_heads, model.is_draft(layer)
    head_counts = model.draft_counts if is_draft else model.head_counts
    if is_draft and head_counts == {share}:
        return 0, share
    if spec.num_shards is not None:
        total = share * min(spec.num_shards, rank.tp_size)
    elif share > 1 or rank.tp_size == 1:
        total = share * rank.tp_size
    elif len(head_counts) == 1:
        (total,) = head_counts
    else:
        counts = " or ".join(map(str, sorted(head_counts)))
        raise ConfigError(
            f"{layer}: KV heads: expected one number of them in all layers when {rank.tp_size} "
            f"ranks hold one each, got {counts}; choose a smaller tensor parallel size"
        )
    ends = (min(total, rank.tp_size), max(total, rank.tp_size))
    if share != max(1, total // rank.tp_size) or ends[1] % ends[0] or total > model.num_kv_heads:
        raise ConfigError(
            f"{layer}: KV heads: expected an equal share of {total}, at most the model's "
            f"{model.num_kv_heads}, on each of {rank.tp_size} ranks, got {share}; choose a tensor "
            "parallel size that divides them"
        )
    lo = rank.tp_rank * total // rank.tp_size
    return lo, lo + share


def _check(region: Region, memory: _Memory) -> None:
    try:
        check_region(region, memory.local.infos[region.memory].nbytes)
    except ValueError as exc:
        raise ConfigError(
            f"{region.layer}: expected a KV cache whose blocks lie apart in one allocation, got "
            f"{exc}; choose another KV cache layout"
        ) from exc
