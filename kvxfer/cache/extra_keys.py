"""What besides its tokens decides the KV of a block: the extra keys under its hash.

Three facts add keys: the request's LoRA adapter (every block), multimodal items (the blocks that
hold their tokens) and the cache salt (the first block: the chain of names carries it on).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

ExtraKey: TypeAlias = tuple[str | int, ...]
"""One fact besides the tokens, its kind first: ("lora", name, path), ("mm", identifier, offset),
("cache_salt", salt).
"""


class HashableRequest(Protocol):
    """What hashing reads of a request.

    Three more attributes are read where a request has them; one that is missing, None or empty adds
    no key:
    ``lora_request`` (with ``lora_name`` and ``lora_path``), ``mm_features`` (in token order, each
    with ``identifier`` and ``mm_position.offset``, ``mm_position.length``, both in tokens) and
    ``cache_salt`` (a string).
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
    )


def generate_block_hash_extra_keys(
    request: HashableRequest, start_token_idx: int, end_token_idx: int, start_mm_idx: int
) -> tuple[tuple[ExtraKey, ...] | None, int]:
    """The extra keys of the tokens ``[start_token_idx, end_token_idx)``, and where to look for the
    next block's.

    Order: LoRA, multimodal items by position, cache salt. The salt is in the first block only: the
    chain carries it on.

    Args:
        request: see :class:`HashableRequest`.
        start_token_idx: first token of the block.
        end_token_idx: the token after its last.
        start_mm_idx: first multimodal item that can matter: 0, or what the call for the block
            before returned. Negative counts from the end.

    Returns:
        The keys, None when there are none, and the ``start_mm_idx`` of the block that follows.
    """
    mm_keys, next_mm_idx = gen_mm_extra_hash_keys(
        request, start_token_idx, end_token_idx, start_mm_idx
    )
    keys = gen_lora_extra_hash_keys(request) + mm_keys
    cache_salt = getattr(request, "cache_salt", None)
    if cache_salt and start_token_idx == 0:
        keys.append(("cache_salt", cache_salt))
    return (tuple(keys) or None), next_mm_idx


def gen_lora_extra_hash_keys(request: HashableRequest) -> list[ExtraKey]:
    """``[("lora", name, path)]`` for a request with an adapter, else ``[]``."""
    lora = getattr(request, "lora_request", None)
    return [] if lora is None else [("lora", lora.lora_name, lora.lora_path)]


def gen_mm_extra_hash_keys(
    request: HashableRequest, start_token_idx: int, end_token_idx: int, start_mm_idx: int
) -> tuple[list[ExtraKey], int]:
    """``("mm", identifier, item's offset - start_token_idx)`` for every multimodal item with a
    token in the block.

    The offset is negative for an item that began in an earlier block: two blocks in the middle of
    one item differ. Returns the keys and the index of the first item that reaches past this block
    (``start_mm_idx`` of the next).
    """
    features: Sequence[Any] = getattr(request, "mm_features", None) or ()
    mm_idx = start_mm_idx + len(features) if start_mm_idx < 0 else start_mm_idx
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
