"""Received blocks, put into the local order in place: smaller blocks joined to larger ones, heads
and tokens swapped, or both; and what was not received, zeroed.

A source's blocks were written one behind the other over a local block, in the source's order. All
functions take ``cache``, a 4-D view of one plane of one layer: dimension 0 counts blocks, the last
one is what one head keeps of one token (D), and heads (H) and tokens (N) lie between, either way
round. Which of them is which follows from the strides, because each function says in what order a
*local* block lies. Only the blocks ``indices`` change.
"""

from __future__ import annotations

from torch import Tensor

from kvxfer.tensors.block_ids import BlockIds, as_integers, check_ids, id_tensor


def kv_postprocess_blksize_on_receive(
    cache: Tensor, indices: BlockIds, block_size_ratio: int
) -> None:
    """Join received blocks to larger ones; head-major (HND) on both sides.

    A local block holds ``r`` received ones, [r, H, N / r, D]; it becomes [H, N, D].

    Args:
        cache: [num_blocks, H, N, D] or [num_blocks, N, H, D], blocks head-major in memory.
        indices: the received blocks' local ids, each once; 1-D integers.
        block_size_ratio: r, received blocks in a local one; it divides N.

    Raises:
        TypeError: ``indices`` are no integers.
        ValueError: another number of dimensions, blocks with gaps, a ratio below 1 or that does not
            divide N, an id out of range or given twice. Nothing has changed then.
    """
    view = _outer_first(cache)
    num_heads, num_tokens = view.shape[1:3]
    small = _received_tokens(num_tokens, block_size_ratio)
    received = (block_size_ratio, num_heads, small, view.shape[3])
    _rewrite(view, indices, received, (0, 2, 1, 3, 4))


def kv_postprocess_layout_on_receive(cache: Tensor, indices: BlockIds) -> None:
    """Turn received head-major blocks (HND) into local token-major ones (NHD).

    A local block holds [H, N, D]; it becomes [N, H, D].

    Args:
        cache: [num_blocks, N, H, D] or [num_blocks, H, N, D], blocks token-major in memory.
        indices: the received blocks' ids, each once; 1-D integers.

    Raises:
        TypeError, ValueError: as :func:`kv_postprocess_blksize_on_receive`.
    """
    kv_postprocess_blksize_and_layout_on_receive(cache, indices, 1)


def kv_postprocess_blksize_and_layout_on_receive(
    cache: Tensor, indices: BlockIds, block_size_ratio: int
) -> None:
    """Join received head-major blocks (HND) to larger, token-major ones (NHD).

    A local block holds ``r`` received ones, [r, H, N / r, D]; it becomes [N, H, D].

    Args:
        cache: [num_blocks, N, H, D] or [num_blocks, H, N, D], blocks token-major in memory.
        indices: the received blocks' local ids, each once; 1-D integers.
        block_size_ratio: r, received blocks in a local one; it divides N.

    Raises:
        TypeError, ValueError: as :func:`kv_postprocess_blksize_on_receive`.
    """
    view = _outer_first(cache)
    num_tokens, num_heads = view.shape[1:3]
    small = _received_tokens(num_tokens, block_size_ratio)
    received = (block_size_ratio, num_heads, small, view.shape[3])
    _rewrite(view, indices, received, (0, 1, 3, 2, 4))


def zero_uncovered_tokens(
    cache: Tensor, indices: BlockIds, num_covered_tokens: int, *, token_dim: int = 2
) -> None:
    """Zero what a source had nothing for: the rest of a block that it filled in part, and every
    later block.

    Call it after the blocks are in local order: before, a block's last tokens are not its end.

    Args:
        cache: [num_blocks, H, N, D], or any view with blocks in dimension 0.
        indices: blocks of the request, in the order of its tokens, each once.
        num_covered_tokens: tokens received, from the first one of the first block on. With ``n``
            blocks of ``N / r`` tokens received it is ``n * N // r``.
        token_dim: the dimension of N; 1 for a view [num_blocks, N, H, D].

    Raises:
        TypeError: ``indices`` are no integers.
        ValueError: ``token_dim`` is no dimension behind the first, more tokens than the blocks
            hold, fewer than 0, an id out of range or given twice. Nothing has changed then.
    """
    if not 0 < token_dim < cache.ndim:
        raise ValueError(f"token_dim: expected one of [1, {cache.ndim}), got {token_dim}")
    check_ids("indices", indices, cache.shape[0], unique=True)
    num_tokens = cache.shape[token_dim]
    if not 0 <= num_covered_tokens <= len(indices) * num_tokens:
        raise ValueError(
            f"num_covered_tokens: expected at most the {len(indices) * num_tokens} tokens of "
            f"{len(indices)} blocks, got {num_covered_tokens}"
        )
    num_whole, num_kept = divmod(num_covered_tokens, num_tokens)
    values = as_integers(cache)
    if num_kept:
        partly = values[int(indices[num_whole])]
        partly.narrow(token_dim - 1, num_kept, num_tokens - num_kept).zero_()
    later = indices[num_whole + (num_kept > 0) :]
    values.index_fill_(0, id_tensor("indices", later, cache.device), 0)


def _outer_first(cache: Tensor) -> Tensor:
    """[num_blocks, outer, inner, D]: heads and tokens as they lie in memory, as integers."""
    if cache.ndim != 4:
        raise ValueError(
            "cache: expected 4 dimensions, blocks first, heads and tokens, then elements, got "
            f"shape {tuple(cache.shape)}; pass K and V as views of their own"
        )
    (_, size_1, size_2, _), (_, stride_1, stride_2, _) = cache.shape, cache.stride()
    # A dimension of size 1 has any stride, so the larger stride alone does not say which is outer.
    if stride_1 == size_2 * stride_2 or size_1 == size_2 == 1:
        return as_integers(cache)
    if stride_2 == size_1 * stride_1:
        return as_integers(cache).transpose(1, 2)
    raise ValueError(
        "cache: expected blocks without gaps between heads and tokens, got shape "
        f"{tuple(cache.shape)} with strides {cache.stride()}; blocks received into such a view "
        "are not one piece"
    )


def _received_tokens(num_tokens: int, block_size_ratio: int) -> int:
    """Tokens of a received block."""
    if block_size_ratio < 1 or num_tokens % block_size_ratio:
        raise ValueError(
            f"block_size_ratio: expected a divisor of the {num_tokens} tokens of a local block, "
            f"got {block_size_ratio}"
        )
    return num_tokens // block_size_ratio


def _rewrite(
    view: Tensor, indices: BlockIds, received: tuple[int, ...], order: tuple[int, ...]
) -> None:
    """Read the blocks as [n, *received] and write them back with these dimensions in ``order``."""
    check_ids("indices", indices, view.shape[0], unique=True)
    ids = id_tensor("indices", indices, view.device)
    blocks = view.index_select(0, ids)
    view.index_copy_(0, ids, blocks.view(-1, *received).permute(order).reshape(blocks.shape))
