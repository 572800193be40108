"""Received blocks, put into the local order in place: smaller blocks joined to larger ones, heads
and tokens swapped, or both; and what was not received, zeroed.

A source's blocks were written one behind the other over a local block, in the source's order. All
functions take ``cache``, a 4-D view of one plane of one layer: dimension 0 counts blocks, the last
one is what one head keeps of one token (D), and heads (H) and tokens (N) lie between, either way
round. Which of them is which follows from the strides, because each function says in what order a
*local* block lies. Only the blocks ``indices`` change.

:class:`Postprocessor` does the same, and what these cannot say, to all layers at once: on a GPU it
is one launch for all layers of one geometry.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvxfer.kernels.block_rewrite import BlockOrder, BlockRewrite, rewrite_blocks_ref
from kvxfer.tensors.block_ids import BlockIds, as_integers, check_ids, id_tensor

if TYPE_CHECKING:
    from kvxfer.kernels.rewrite_kernel import PlaneTable


def kv_postprocess_blksize_on_receive(
    cache: Tensor, indices: BlockIds, block_size_ratio: int
) -> None:
    """Join received blocks to larger ones; head-major (HND) on both sides.

    A local block holds ``r`` received ones, [r, H, N / r, D]; it becomes [H, N, D]. With one head
    nothing moves.

    Args:
        cache: [num_blocks, H, N, D] or [num_blocks, N, H, D], blocks head-major in memory.
        indices: the received blocks' local ids, each once; 1-D integers.
        block_size_ratio: r, received blocks in a local one; it divides N.

    Raises:
        TypeError: ``indices`` or the ratio are no integers.
        ValueError: another number of dimensions, blocks with gaps, a ratio below 1 or that does not
            divide N, an id out of range or given twice. Nothing has changed then.
    """
    _join([cache], indices, block_size_ratio, to_heads=True)


def kv_postprocess_layout_on_receive(cache: Tensor, indices: BlockIds) -> None:
    """Turn received head-major blocks (HND) into local token-major ones (NHD).

    A local block holds [H, N, D]; it becomes [N, H, D]. With one head nothing moves. ``cache``:
    [num_blocks, N, H, D] or [num_blocks, H, N, D], blocks token-major in memory; or
    [num_blocks, planes, ...], each plane (K, V) so. The rest is as in
    :func:`kv_postprocess_blksize_on_receive`.
    """
    # Blocks of several planes are received plane behind plane, which larger blocks would not be.
    _join([cache] if cache.ndim != 5 else cache.unbind(1), indices, 1, to_heads=False)


def kv_postprocess_blksize_and_layout_on_receive(
    cache: Tensor, indices: BlockIds, block_size_ratio: int
) -> None:
    """Join received head-major blocks (HND) to larger, token-major ones (NHD).

    As :func:`kv_postprocess_blksize_on_receive`, but the local block becomes [N, H, D], and the
    cache's blocks are token-major in memory.
    """
    _join([cache], indices, block_size_ratio, to_heads=False)


def zero_uncovered_tokens(
    cache: Tensor, indices: BlockIds, num_covered_tokens: int, *, token_dim: int = 2
) -> None:
    """Zero what a source had nothing for: the rest of a block that it filled in part, and every
    later block.

    Call it after the blocks are in local order: before, a block's last tokens are not its end.
    ``indices``: blocks of the request, in the order of its tokens, each once.
    ``num_covered_tokens``: received, from the first token of the first block on; with ``n`` blocks
    of ``N / r`` tokens it is ``n * N // r``. ``token_dim``: the dimension of N. Raises TypeError
    and ValueError as :func:`kv_postprocess_blksize_on_receive`.
    """
    if not 0 < token_dim < cache.ndim:
        raise ValueError(f"token_dim: expected one of [1, {cache.ndim}), got {token_dim}")
    check_ids("indices", indices, cache.shape[0], unique=True)
    _check_covered(num_covered_tokens, len(indices), cache.shape[token_dim])
    _zero_tail(cache, indices, num_covered_tokens, token_dim)


class Postprocessor:
    """Puts received blocks of many layers into the local order, whatever both sizes and orders.

    A received block may be smaller or larger than a local one, or neither divide the other; where
    it is larger it was written over several local blocks. Equal views, as layers that share a cache
    have, are rewritten once; others must not overlap.
    """

    def __init__(
        self, caches: Iterable[Tensor], received: BlockOrder, *, token_dim: int = 2
    ) -> None:
        """Learn where the blocks lie, once.

        Args:
            caches: planes of layers, [num_blocks, H, N, D] each, or [num_blocks, N, H, D] with
                ``token_dim`` 1. In which order a local block lies follows from the strides. On one
                device; layers may differ in everything else.
            token_dim: the dimension of N, 1 or 2.

        Raises:
            ValueError: no such dimension, another number of dimensions, blocks with gaps between
                heads and tokens, or caches on several devices.
        """
        if token_dim not in (1, 2):
            raise ValueError(f"token_dim: expected 1 or 2, got {token_dim}")
        distinct = {
            (cache.data_ptr(), cache.shape, cache.stride(), cache.dtype): cache for cache in caches
        }
        self._caches, self._token_dim = tuple(distinct.values()), token_dim
        self._planes = [_plane_of(cache, received, token_dim) for cache in self._caches]
        devices = {cache.device for cache in self._caches}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise ValueError(f"caches: expected all on one device, got {names}")
        self._on_gpu = any(device.type == "cuda" for device in devices)
        self._launches = _launches_of(self._planes) if self._on_gpu else ()

    def run(self, indices: BlockIds, num_covered_tokens: int | None = None) -> None:
        """Rewrite these blocks of every layer; nothing else changes.

        On a GPU in the current stream, without waiting for what runs there if the ids are in host
        memory. ``indices``: local ids, each once, in the order of the request's tokens.
        ``num_covered_tokens``: received, from the first of the first block on; later ones become
        zero. None: all. Raises, with nothing changed, TypeError for ids that are no integers,
        ValueError for ids out of range or given twice, blocks that received ones do not fill
        exactly, and more tokens than the blocks hold.
        """
        if not self._planes:
            return
        num_blocks = min(cache.shape[0] for cache in self._caches)
        check_ids("indices", indices, num_blocks, unique=True)
        rewrites = {rewrite for rewrite, _ in self._planes}
        for rewrite in rewrites:
            rewrite.check_blocks(len(indices))
            if num_covered_tokens is not None:
                _check_covered(num_covered_tokens, len(indices), rewrite.local.block_tokens)
        device = self._caches[0].device
        if self._on_gpu and not (isinstance(indices, Tensor) and indices.is_cuda):
            ids = id_tensor("indices", indices, "cpu").pin_memory().to(device, non_blocking=True)
        else:
            ids = id_tensor("indices", indices, device).contiguous()
        for rewrite in rewrites - {rewrite for rewrite, _ in self._launches}:
            for view in (view for each, view in self._planes if each == rewrite):
                rewrite_blocks_ref(view, ids, rewrite)
        if self._launches:
            # Triton is optional, and slow to import: only where there is a GPU.
            from kvxfer.kernels.rewrite_kernel import rewrite_blocks

            for rewrite, table in self._launches:
                rewrite_blocks(table, ids, rewrite)
        if num_covered_tokens is not None:
            for cache in self._caches:
                _zero_tail(cache, ids, num_covered_tokens, self._token_dim)


def _check_covered(num_covered_tokens: int, num_blocks: int, block_tokens: int) -> None:
    num_tokens = num_blocks * block_tokens
    if not 0 <= num_covered_tokens <= num_tokens:
        raise ValueError(
            f"num_covered_tokens: expected at most the {num_tokens} tokens of {num_blocks} blocks, "
            f"got {num_covered_tokens}"
        )


def _zero_tail(cache: Tensor, indices: BlockIds, num_covered_tokens: int, token_dim: int) -> None:
    """Zero all behind the first tokens of these blocks, which are in local order."""
    values, num_tokens = as_integers(cache), cache.shape[token_dim]
    num_whole, num_kept = divmod(num_covered_tokens, num_tokens)
    ids = id_tensor("indices", indices, cache.device)
    if num_kept:
        tail = values.narrow(token_dim, num_kept, num_tokens - num_kept)
        tail.index_fill_(0, ids[num_whole : num_whole + 1], 0)
    values.index_fill_(0, ids[num_whole + (num_kept > 0) :], 0)


def _plane_of(cache: Tensor, received: BlockOrder, token_dim: int) -> tuple[BlockRewrite, Tensor]:
    """And [num_blocks, outer, inner, D], heads and tokens as they lie in memory, as integers."""
    outer_dim = _outer_dim(cache)
    local = BlockOrder(cache.shape[token_dim], by_head=outer_dim != token_dim)
    view = as_integers(cache)
    rewrite = BlockRewrite(cache.shape[3 - token_dim], received, local)
    return rewrite, view if outer_dim == 1 else view.transpose(1, 2)


def _launches_of(
    planes: Iterable[tuple[BlockRewrite, Tensor]],
) -> tuple[tuple[BlockRewrite, PlaneTable], ...]:
    """Planes on a GPU by geometry, less those of which no program holds a set."""
    from kvxfer.kernels.rewrite_kernel import fits, plane_table

    views: dict[tuple[BlockRewrite, torch.Size, int], list[Tensor]] = {}
    for rewrite, plane in planes:
        if fits(rewrite):
            for view in _whole_rows(plane):
                key = (rewrite, view.shape[1:], view.element_size())
                views.setdefault(key, []).append(view)
    return tuple((key[0], plane_table(alike)) for key, alike in views.items())


def _whole_rows(view: Tensor) -> list[Tensor]:
    """The view, or each of its channels where these lie apart: rows of one element."""
    if view.stride(3) == 1:
        return [view]
    return [view.narrow(3, channel, 1) for channel in range(view.shape[3])]


def _outer_dim(cache: Tensor) -> int:
    """The dimension of heads and tokens that is the outer one in memory, 1 or 2."""
    if cache.ndim != 4:
        raise ValueError(
            "cache: expected 4 dimensions, blocks first, heads and tokens, then elements, got "
            f"shape {tuple(cache.shape)}; pass K and V as views of their own"
        )
    (_, size_1, size_2, _), (_, stride_1, stride_2, _) = cache.shape, cache.stride()
    # A dimension of size 1 has any stride, so the larger stride alone does not say which is outer.
    if stride_1 == size_2 * stride_2:
        return 1
    if stride_2 == size_1 * stride_1:
        return 2
    if 1 in (size_1, size_2):
        return 1
    raise ValueError(
        "cache: expected blocks without gaps between heads and tokens, got shape "
        f"{tuple(cache.shape)} with strides {cache.stride()}; blocks received into such a view "
        "are not one piece"
    )


def _join(
    caches: Sequence[Tensor], indices: BlockIds, block_size_ratio: int, *, to_heads: bool
) -> None:
    """Received head-major blocks become local ones, head-major or token-major; caches alike."""
    first = caches[0]
    outer_dim = _outer_dim(first)
    if 1 in first.shape[1:3]:
        # Strides do not say which of the two is the heads. It does not matter: one head, or one
        # token and so one received block, are in order already.
        _received_tokens(max(first.shape[1:3]), block_size_ratio)
        check_ids("indices", indices, first.shape[0], unique=True)
        return
    token_dim = 3 - outer_dim if to_heads else outer_dim
    small = _received_tokens(first.shape[token_dim], block_size_ratio)
    Postprocessor(caches, BlockOrder(small, by_head=True), token_dim=token_dim).run(indices)


def _received_tokens(num_tokens: int, block_size_ratio: int) -> int:
    if not isinstance(block_size_ratio, Integral):
        raise TypeError(
            f"block_size_ratio: expected an integer, got {block_size_ratio!r}; divide with //"
        )
    if block_size_ratio < 1 or num_tokens % block_size_ratio:
        raise ValueError(
            f"block_size_ratio: expected a divisor of the {num_tokens} tokens of a local block, "
            f"got {block_size_ratio}"
        )
    return num_tokens // block_size_ratio
