"""What besides its tokens decides the KV of a block: the extra keys under its hash.

Four facts add keys: the request's LoRA adapter (every block), multimodal items (the blocks that
hold their tokens), the cache salt (the first block: the chain of names carries it on) and prompt
embeddings that were given instead of token ids (the blocks that hold them).
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

ExtraKey: TypeAlias = tuple[str | int | bytes, ...]
"""One fact besides the tokens, its kind first: ("lora", name, path), ("mm", identifier, offset),
("cache_salt", salt), ("prompt_embeds", sha256 of the block's rows).
"""


class HashableRequest(Protocol):
    """What hashing reads of a request.

    Four more attributes are read where a request has them; one that is missing, None or empty adds
    no key:
    ``lora_request`` (with ``lora_name`` and ``lora_path``), ``mm_features`` (in token order, each
    with ``identifier`` and ``mm_position.offset``, ``mm_position.length``, both in tokens),
    ``cache_salt`` (a string) and ``prompt_embeds`` (a tensor or array, one row for each token from
    the first one on; the ids of these tokens say nothing).
    """

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt and output token ids so far."""


def need_extra_keys(request: HashableRequest) -> bool:
    """Whether anything besides the tokens decides the KV of this request."""
    return bool(
        getattr(request, "mm_features", None)
        or getattr(request, "lora_request", None) is not None
        or getattr(request, "cache_salt", None)
        or num_embedded_tokens(request)
    )


def generate_block_hash_extra_keys(
    request: HashableRequest, start_token_idx: int, end_token_idx: int, start_mm_idx: int
) -> tuple[tuple[ExtraKey, ...] | None, int]:
    """The extra keys of the tokens ``[start_token_idx, end_token_idx)``, and where to look for the
    next block's.

    Order: LoRA, multimodal items by position, cache salt, prompt embeddings. The salt is in the
    first block only: the chain carries it on.

    Args:
        request: see :class:`HashableRequest`.
        start_token_idx: first token of the block.
        end_token_idx: the token after its last.
        start_mm_idx: first multimodal item that can matter: 0, or what the call for the block
            before returned. Negative counts from the end.

    Returns:
        The keys, None when there are none, and the ``start_mm_idx`` of the block that follows.

    Raises:
        ValueError: ``start_mm_idx`` before the first item.
        TypeError: ``prompt_embeds`` that are neither a tensor nor an array.
    """
    mm_keys, next_mm_idx = gen_mm_extra_hash_keys(
        request, start_token_idx, end_token_idx, start_mm_idx
    )
    keys = gen_lora_extra_hash_keys(request) + mm_keys
    cache_salt = getattr(request, "cache_salt", None)
    if cache_salt and start_token_idx == 0:
        keys.append(("cache_salt", cache_salt))
    keys += gen_prompt_embeds_extra_hash_keys(request, start_token_idx, end_token_idx)
    return (tuple(keys) or None), next_mm_idx


def gen_lora_extra_hash_keys(request: object) -> list[ExtraKey]:
    """``[("lora", name, path)]`` for a request with an adapter, else ``[]``."""
    lora: Any = getattr(request, "lora_request", None)
    return [] if lora is None else [("lora", lora.lora_name, lora.lora_path)]


def gen_mm_extra_hash_keys(
    request: object, start_token_idx: int, end_token_idx: int, start_mm_idx: int
) -> tuple[list[ExtraKey], int]:
    """``("mm", identifier, item's offset - start_token_idx)`` for every multimodal item with a
    token in the block.

    The offset is negative for an item that began in an earlier block: two blocks in the middle of
    one item differ. Returns the keys and the index of the first item that reaches past this block
    (``start_mm_idx`` of the next). ValueError when ``start_mm_idx`` is before the first item.
    """
    features: Sequence[Any] = getattr(request, "mm_features", None) or ()
    mm_idx = start_mm_idx + len(features) if start_mm_idx < 0 else start_mm_idx
    if mm_idx < 0:
        raise ValueError(
            f"start_mm_idx: expected at least {-len(features)}, the first of {len(features)} items "
            f"counted from the end, got {start_mm_idx}; pass 0 or what the last call returned"
        )
    keys: list[ExtraKey] = []
    while mm_idx < len(features):
        position = features[mm_idx].mm_position
        item_end = position.offset + position.length
        if position.offset >= end_token_idx:
            break
        if item_end > start_token_idx and position.length:
            keys.append(("mm", features[mm_idx].identifier, position.offset - start_token_idx))
        if item_end > end_token_idx:
            break
        mm_idx += 1
    return keys, mm_idx


def gen_prompt_embeds_extra_hash_keys(
    request: object, start_token_idx: int, end_token_idx: int
) -> list[ExtraKey]:
    """``[("prompt_embeds", sha256 of the rows' bytes)]`` for a block with a token whose embedding
    was given, else ``[]``. TypeError when they are neither a tensor nor an array.

    The bytes are those of the elements, row after row, as they lie in memory: equal numbers of
    another element type are another name.
    """
    if start_token_idx >= num_embedded_tokens(request):
        return []
    embeds: Any = getattr(request, "prompt_embeds", None)
    content = _element_bytes(embeds[start_token_idx:end_token_idx])
    return [("prompt_embeds", hashlib.sha256(content).digest())]


def num_embedded_tokens(request: object) -> int:
    """Tokens from the first one on whose embedding was given."""
    embeds: Any = getattr(request, "prompt_embeds", None)
    return 0 if embeds is None else len(embeds)


def _element_bytes(rows: object) -> bytes:
    if hasattr(rows, "tobytes"):  # a NumPy array
        return bytes(rows.tobytes())
    tensor: Any = rows
    if not hasattr(tensor, "data_ptr"):
        raise TypeError(
            f"prompt_embeds: expected a tensor or an array [tokens, D], got {type(rows).__name__}; "
            "stack the rows"
        )
    # Without importing torch: its own way to bytes, numpy(), knows no bfloat16.
    host = tensor.detach().cpu().contiguous()
    return ctypes.string_at(host.data_ptr(), host.nbytes)
