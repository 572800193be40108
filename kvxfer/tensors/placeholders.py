"""Embeddings of multimodal items among text tokens: spread over placeholder rows, taken back, and
checked as they come from the encoder.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_METHOD = "embed_multimodal (formerly get_multimodal_embeddings)"


def scatter_mm_placeholders(embeds: Tensor, is_embed: Tensor | None) -> Tensor:
    """Spread the rows of ``embeds`` over the placeholders of an item.

    Args:
        embeds: [number of True in ``is_embed``, D], a floating dtype.
        is_embed: bool [number of placeholders], or None where every placeholder is an embedding.

    Returns:
        [number of placeholders, D]: the rows of ``embeds``, in order, where the mask is true and
        NaN elsewhere, so that a row read by mistake is noticed. Without a mask ``embeds`` itself.

    Raises:
        TypeError: a mask that is not bool, or embeddings that cannot hold NaN.
        ValueError: a mask that is not 1-D, embeddings that are not 2-D, or another number of rows
            than the mask asks for.
    """
    if is_embed is None:
        return embeds
    _check_mask(is_embed)
    if embeds.ndim != 2:
        raise ValueError(f"embeds: expected 2 dimensions [rows, D], got shape {_shape(embeds)}")
    if not embeds.is_floating_point():
        raise TypeError(f"embeds: expected a floating dtype (it must hold NaN), got {embeds.dtype}")
    num_wanted = int(is_embed.sum())
    if embeds.shape[0] != num_wanted:
        raise ValueError(
            f"embeds: expected {num_wanted} rows, one for each True of is_embed, got "
            f"{embeds.shape[0]}; pass mask and rows of the same item"
        )
    placeholders = embeds.new_full((is_embed.shape[0], embeds.shape[1]), torch.nan)
    placeholders[is_embed.to(embeds.device)] = embeds
    return placeholders


def gather_mm_placeholders(placeholders: Tensor, is_embed: Tensor | None) -> Tensor:
    """The inverse of :func:`scatter_mm_placeholders`. ``is_embed``: bool [number of placeholders],
    or None where every placeholder is an embedding. Returns [number of True in ``is_embed``, D];
    without a mask ``placeholders`` itself. Raises TypeError for a mask that is not bool; ValueError
    for a mask that is not 1-D or has another length than ``placeholders``.
    """
    if is_embed is None:
        return placeholders
    _check_mask(is_embed)
    if placeholders.shape[:1] != is_embed.shape:
        raise ValueError(
            f"placeholders: expected {is_embed.shape[0]} rows, one for each entry of is_embed, got "
            f"shape {_shape(placeholders)}; pass mask and rows of the same item"
        )
    return placeholders[is_embed.to(placeholders.device)]


def sanity_check_mm_encoder_outputs(
    mm_embeddings: Sequence[Tensor] | Tensor, expected_num_items: int
) -> None:
    """Check what a model's multimodal encoder returned, before it is cut up and cached.
    ``mm_embeddings``: a list or tuple of [rows of the item, D], one for each item, or one 3-D
    tensor [items, rows, D]. ``expected_num_items``: items that were given to the encoder. Raises
    TypeError for another container, or an item that is not a tensor; ValueError for another number
    of items, or an item that is not 2-D. The message names the method of the model to correct.
    """
    if not isinstance(mm_embeddings, (list, tuple, Tensor)):
        raise TypeError(
            "mm_embeddings: expected a list or tuple of 2-D tensors or one 3-D tensor, got "
            f"{type(mm_embeddings).__name__}; correct the model's {_METHOD}"
        )
    if isinstance(mm_embeddings, Tensor) and mm_embeddings.ndim != 3:
        raise ValueError(
            f"mm_embeddings: expected a 3-D tensor [items, rows, D], got shape "
            f"{_shape(mm_embeddings)}; correct the model's {_METHOD}"
        )
    if len(mm_embeddings) != expected_num_items:
        raise ValueError(
            f"mm_embeddings: expected {expected_num_items} items, one for each input, got "
            f"{len(mm_embeddings)}; correct the model's {_METHOD}"
        )
    for index, item in enumerate(mm_embeddings):
        if not isinstance(item, Tensor):
            raise TypeError(
                f"mm_embeddings[{index}]: expected a tensor, got {type(item).__name__}; correct "
                f"the model's {_METHOD}"
            )
        if item.ndim != 2:
            raise ValueError(
                f"mm_embeddings[{index}]: expected 2 dimensions [rows, D], got shape "
                f"{_shape(item)}; correct the model's {_METHOD}"
            )


def _check_mask(is_embed: Tensor) -> None:
    if not isinstance(is_embed, Tensor) or is_embed.dtype != torch.bool:
        got = is_embed.dtype if isinstance(is_embed, Tensor) else type(is_embed).__name__
        raise TypeError(
            f"is_embed: expected a tensor of dtype torch.bool, got {got}; convert it, or pass None "
            "where every placeholder is an embedding"
        )
    if is_embed.ndim != 1:
        raise ValueError(
            f"is_embed: expected 1 dimension, got shape {_shape(is_embed)}; pass the mask of one "
            "item"
        )


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
