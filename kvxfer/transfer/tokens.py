"""What binds an offer to its tokens: one digest of a whole span, computed alike on both sides.

    sha256("kvxfer.tokens.v1\\0" | number of tokens, uint64 little-endian
           | token ids, uint32 little-endian | msgpack(extra keys), only when there are any)

The source puts it into the offer, the sink into the Pull, and unequal digests are refused. It
depends on no block size and no hash seed, which may differ between two engines, and its tag keeps
it apart from every block hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from kvxfer.cache.hashing import (
    ExtraKey,
    gen_mm_extra_hash_keys,
    gen_prompt_embeds_extra_hash_keys,
    pack_token_ids,
)

DIGEST_NBYTES = 32
NONCE_NBYTES = 16
_DOMAIN = b"kvxfer.tokens.v1\0"


def token_digest(token_ids: Sequence[int], extra_keys: tuple[ExtraKey, ...] = ()) -> bytes:
    """Of all tokens of a span from the first of the request, and of what else decides their KV, as
    :func:`digest_keys` has it. Raises TypeError or ValueError that names the position of a token id
    that is no integer or outside uint32.
    """
    hasher = hashlib.sha256(_DOMAIN)
    # The length fixes where the tokens end, so no token can pass for a byte of the extra keys.
    hasher.update(len(token_ids).to_bytes(8, "little"))
    hasher.update(pack_token_ids(token_ids))
    if extra_keys:
        hasher.update(msgspec.msgpack.encode(extra_keys))
    return hasher.digest()


def named_nonce(name: bytes, digest: bytes, incarnation: bytes) -> bytes:
    """The nonce of the first offer that a source makes in this life of a request to which a router
    gave this id: known to who knows the id and the prompt, and to nobody else.
    """
    return hashlib.blake2b(name + digest, digest_size=NONCE_NBYTES, key=incarnation).digest()


def digest_keys(request: object, num_tokens: int) -> tuple[ExtraKey, ...]:
    """What besides its first ``num_tokens`` tokens decides the KV of a request: its LoRA adapter,
    the multimodal items that begin in the span, embeddings given instead of tokens.

    The attributes are those of :class:`~kvxfer.cache.hashing.HashableRequest`. Only facts that
    both engines spell alike count: an adapter's name, not the path where one host keeps it. The
    cache salt is no such fact: it keeps users apart within one engine, and the offer's nonce does
    that between two.

    Raises:
        TypeError: ``prompt_embeds`` that are neither a tensor nor an array.
    """
    lora: Any = getattr(request, "lora_request", None)
    named: list[ExtraKey] = [] if lora is None else [("lora", lora.lora_name)]
    items, _ = gen_mm_extra_hash_keys(request, 0, num_tokens, 0)
    return (*named, *items, *gen_prompt_embeds_extra_hash_keys(request, 0, num_tokens))
