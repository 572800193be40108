"""Zero whole blocks in every layer of a cache, so that a new owner never sees what another request
left.

Where the pieces of a block lie is told by segments: piece b of a segment has ``nbytes`` at
``address + b * stride_nbytes``. A view whose blocks are outermost is one segment, one with K and V
outside the blocks two; in general there is one for every index outside a block's contiguous bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvxfer.cache.specs import DTYPE_NBYTES, AttentionSpec
from kvxfer.tensors.attention import AttentionGroup
from kvxfer.tensors.block_ids import BlockIds, id_array
from kvxfer.tensors.cache_views import find_block_dim
from kvxfer.tensors.kv_cache import CacheHolder


class KVBlockZeroer:
    """Writes zeros to the K and V of given blocks, in all layers; nothing else changes.

    The layers may lie in different allocations, put their blocks where they like and share their
    bytes. :meth:`init_meta` looks at them once; :meth:`zero_block_ids` is then one launch a step on
    a GPU, and one assignment for each segment on a CPU.
    """

    def __init__(self, device: torch.device | str, pin_memory: bool) -> None:
        """``pin_memory``: the ids of a step go to a GPU from pinned memory, without waiting."""
        self._device = torch.device(device)
        self._pin_memory = pin_memory and self._device.type != "cpu"
        self._filler: _RowFiller | TableFiller | None = None
        self._num_blocks = 0

    def init_meta(
        self,
        attn_groups_iter: Iterable[AttentionGroup],
        kernel_block_sizes: Sequence[int],
        cache_dtype: torch.dtype | str,
        runner_only_attn_layers: Collection[str],
        static_forward_context: Mapping[str, CacheHolder],
    ) -> None:
        """Learn where the blocks lie, once.

        Args:
            attn_groups_iter: all layers, by backend; those of states are passed over.
            kernel_block_sizes: tokens of a kernel block, by cache group.
            cache_dtype: the caches' element type, or its name; the caches must have elements of as
                many bytes. Names that kvxfer does not know ("auto") are not held against them.
            static_forward_context: every other layer, with ``kv_cache`` bound.

        Raises:
            RuntimeError: called before.
            KeyError: a layer that the context does not have.
            TypeError: a layer without a bound cache.
            ValueError: a view that does not fit its group, other numbers of blocks in two layers,
                or layers that put the same block in different bytes of one buffer.
        """
        if self._filler is not None:
            raise RuntimeError("init_meta: expected one call, got another")
        views = list(
            _views(
                attn_groups_iter,
                kernel_block_sizes,
                _itemsize(cache_dtype),
                runner_only_attn_layers,
                static_forward_context,
            )
        )
        self._num_blocks = _common_num_blocks(views, self._device)
        found = (
            segment
            for cache in views
            for segment in segments_of(
                cache.layer, cache.view, cache.block_dim, cache.kernel_blocks
            )
        )
        segments = distinct(found, self._num_blocks)
        tensors = {cache.layer: cache.view for cache in views}
        if self._device.type == "cpu":
            self._filler = _RowFiller(segments, tensors, self._num_blocks)
        else:
            self._filler = TableFiller(segments, tensors, self._device, pin_memory=self._pin_memory)

    def zero_block_ids(self, block_ids: BlockIds) -> None:
        """Zero these blocks; ids may repeat. On a GPU in the current stream, without waiting unless
        the ids lie on it.

        Raises, before anything is written, RuntimeError before :meth:`init_meta`, ValueError for an
        id that is no block, and TypeError for one that is no integer.
        """
        if self._filler is None:
            raise RuntimeError("zero_block_ids: expected init_meta to be called before, got none")
        ids = id_array("block_ids", block_ids)
        if not ids.size:
            return
        lowest, highest = int(ids.min()), int(ids.max())
        # Without a layer there is nothing to zero, and no id is out of range
        if lowest < 0 or (self._num_blocks and highest >= self._num_blocks):
            wrong = lowest if lowest < 0 else highest
            known = f"[0, {self._num_blocks})" if self._num_blocks else "0 or more"
            raise ValueError(
                f"block_ids: expected ids in {known}, got {wrong}; pass ids of this cache's pool"
            )
        self._filler.zero(ids)


@dataclass(frozen=True, slots=True)
class Segment:
    """One piece of every block of a layer; ``address`` is absolute."""

    layer: str
    address: int
    stride_nbytes: int
    nbytes: int

    def end(self, num_blocks: int) -> int:
        return self.address + (num_blocks - 1) * self.stride_nbytes + self.nbytes


class _RowFiller:
    """Host memory: one assignment for each segment.

    Rows are elements of a void dtype, one memmove each, whatever their length and alignment: 22
    GB/s at pieces of 4 KiB and 16 at 32 KiB on one thread, where ``index_fill_`` on 64-bit words
    reaches 4.5 and 3.6, and on bytes 0.4.
    """

    def __init__(
        self, segments: Sequence[Segment], tensors: Mapping[str, Tensor], num_blocks: int
    ) -> None:
        self._rows = []
        for segment in segments:
            storage = tensors[segment.layer].untyped_storage()
            # The array keeps the storage.
            whole = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            rows = np.ndarray(
                (num_blocks,),
                dtype=f"V{segment.nbytes}",
                buffer=whole,
                offset=segment.address - storage.data_ptr(),
                strides=(segment.stride_nbytes,),
            )
            self._rows.append((rows, np.zeros(1, rows.dtype)))

    def zero(self, block_ids: NDArray[np.int64]) -> None:
        for rows, zero in self._rows:
            rows[block_ids] = zero


class TableFiller:
    """All segments in one table, all of a step in one launch. ValueError for too large a table."""

    def __init__(
        self,
        segments: Sequence[Segment],
        tensors: Mapping[str, Tensor],
        device: torch.device,
        *,
        pin_memory: bool,
    ) -> None:
        rows = [(segment.address, segment.stride_nbytes, segment.nbytes) for segment in segments]
        self._table = torch.tensor(rows, dtype=torch.int64, device=device).reshape(len(rows), 3)
        self._max_nbytes = max((segment.nbytes for segment in segments), default=0)
        # The widest word that fits all of them: 4 bytes unless the elements are odd ones.
        self._word_nbytes = math.gcd(4, *(number for row in rows for number in row))
        self._device = device
        self._pin_memory = pin_memory
        self._owners = tuple(tensors.values())  # the addresses are good while these live

    def zero(self, block_ids: NDArray[np.int64]) -> None:
        # Triton is optional, and slow to import: only where there is a GPU.
        from kvxfer.kernels.zero_blocks import zero_blocks

        ids = torch.from_numpy(block_ids)
        if self._pin_memory:
            ids = ids.pin_memory()
        ids = ids.to(self._device, non_blocking=self._pin_memory)
        zero_blocks(self._table, ids, self._max_nbytes, self._word_nbytes)


def segments_of(layer: str, view: Tensor, block_dim: int, kernel_blocks: int) -> list[Segment]:
    """The segments of a view: exactly its bytes, none of the gaps between them.

    ``block_dim`` counts kernel blocks; ``kernel_blocks`` of them in a row are a block.
    """
    itemsize = view.element_size()
    inner_first = sorted(
        (view.stride(dim) * itemsize, size)
        for dim, size in enumerate(view.shape)
        if dim != block_dim and size > 1
    )
    nbytes = itemsize
    outside: list[range] = []
    for stride_nbytes, size in inner_first:
        if not outside and stride_nbytes == nbytes:
            nbytes *= size
        else:
            outside.append(range(0, stride_nbytes * size, stride_nbytes))
    stride_nbytes = view.stride(block_dim) * itemsize
    if stride_nbytes == nbytes:
        nbytes *= kernel_blocks  # the kernel blocks of a block touch each other
    else:
        outside.append(range(0, stride_nbytes * kernel_blocks, stride_nbytes))
    return [
        Segment(layer, view.data_ptr() + sum(offsets), stride_nbytes * kernel_blocks, nbytes)
        for offsets in itertools.product(*outside)
    ]


def distinct(segments: Iterable[Segment], num_blocks: int) -> tuple[Segment, ...]:
    """Segments in order of address, bytes that several layers have once.

    Raises ValueError that names two layers if a block of one lies in another block of the other.
    """
    largest: dict[tuple[int, int], Segment] = {}
    for segment in segments:
        known = largest.get((segment.address, segment.stride_nbytes))
        if known is None or known.nbytes < segment.nbytes:
            largest[segment.address, segment.stride_nbytes] = segment
    ordered = sorted(largest.values(), key=lambda segment: segment.address)
    if num_blocks > 1:
        _check_blocks(ordered, num_blocks)
    return tuple(ordered)


def _check_blocks(ordered: list[Segment], num_blocks: int) -> None:
    """Segments that reach into each other must step alike and stay within one step: then piece b
    of one never touches another piece than b of the other.
    """
    end = 0
    first: Segment | None = None
    for segment in ordered:
        if first is None or segment.address >= end:
            first, end = segment, segment.end(num_blocks)
        within = segment.address - first.address + segment.nbytes <= first.stride_nbytes
        if segment.stride_nbytes != first.stride_nbytes or not within:
            raise ValueError(
                f"{first.layer} and {segment.layer}: expected each block of both in the same "
                f"bytes, got {first.nbytes} bytes every {first.stride_nbytes} and "
                f"{segment.nbytes} every {segment.stride_nbytes} in one buffer"
            )
        end = max(end, segment.end(num_blocks))


@dataclass(frozen=True, slots=True)
class _CacheView:
    layer: str
    view: Tensor
    block_dim: int
    kernel_blocks: int

    @property
    def num_blocks(self) -> int:
        return int(self.view.shape[self.block_dim]) // self.kernel_blocks


def _common_num_blocks(caches: Sequence[_CacheView], device: torch.device) -> int:
    """The blocks that every cache on ``device`` has; 0 where there is no cache."""
    for cache in caches:
        if cache.view.device.type != device.type:
            raise ValueError(
                f"{cache.layer}: expected a cache on {device}, got {cache.view.device}"
            )
        if cache.num_blocks != caches[0].num_blocks:
            raise ValueError(
                f"{cache.layer}: expected {caches[0].num_blocks} blocks, as {caches[0].layer} "
                f"has, got {cache.num_blocks}"
            )
    return caches[0].num_blocks if caches else 0


def _views(
    groups: Iterable[AttentionGroup],
    kernel_block_sizes: Sequence[int],
    itemsize: int | None,
    runner_only: Collection[str],
    context: Mapping[str, CacheHolder],
) -> Iterator[_CacheView]:
    for group in groups:
        spec, number = group.kv_cache_spec, group.kv_cache_group_id
        if not isinstance(spec, AttentionSpec):
            continue
        if not 0 <= number < len(kernel_block_sizes):
            raise ValueError(
                f"kernel_block_sizes: expected one for group {number} of "
                f"{', '.join(group.layer_names)}, got {len(kernel_block_sizes)}"
            )
        kernel_tokens = kernel_block_sizes[number]
        if kernel_tokens < 1 or spec.block_size % kernel_tokens:
            raise ValueError(
                f"kernel_block_sizes: group {number}: expected tokens that divide the block of "
                f"{spec.block_size}, got {kernel_tokens}"
            )
        block_dim = find_block_dim(group.backend, kernel_tokens, spec)
        for layer in group.layer_names:
            if layer in runner_only:
                continue
            if layer not in context:
                raise KeyError(
                    f"{layer}: expected it in the forward context, got no such layer; name it in "
                    "runner_only_attn_layers if it owns no bytes"
                )
            view = context[layer].kv_cache
            kernel_blocks = spec.block_size // kernel_tokens
            _check_view(layer, view, group, kernel_tokens, block_dim, itemsize)
            yield _CacheView(layer, view, block_dim, kernel_blocks)


def _check_view(
    layer: str,
    view: object,
    group: AttentionGroup,
    kernel_tokens: int,
    block_dim: int,
    itemsize: int | None,
) -> None:
    """Is the view what the backend states for some number of blocks?"""
    if not isinstance(view, Tensor):
        raise TypeError(f"{layer}: expected a bound cache, got {type(view).__name__}")
    spec = group.kv_cache_spec
    assert isinstance(spec, AttentionSpec)
    num_kernel_blocks = view.shape[block_dim] if view.dim() > block_dim else 0
    stated = tuple(
        group.backend.get_kv_cache_shape(
            num_kernel_blocks, kernel_tokens, spec.num_kv_heads, spec.head_size
        )
    )
    whole = num_kernel_blocks > 0 and num_kernel_blocks * kernel_tokens % spec.block_size == 0
    if tuple(view.shape) != stated or not whole:
        raise ValueError(
            f"{layer}: expected whole blocks of {spec.block_size} tokens in kernel blocks of "
            f"{kernel_tokens}, in the shape of {group.backend.get_name()}, got {tuple(view.shape)}"
        )
    if itemsize is not None and view.element_size() != itemsize:
        raise ValueError(
            f"{layer}: expected elements of {itemsize} bytes, got {view.element_size()} "
            f"({view.dtype})"
        )


def _itemsize(cache_dtype: torch.dtype | str) -> int | None:
    if isinstance(cache_dtype, torch.dtype):
        return cache_dtype.itemsize
    return DTYPE_NBYTES.get(cache_dtype.removeprefix("torch."))
