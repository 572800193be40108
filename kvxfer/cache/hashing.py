"""Names for the content of full blocks: equal names mean equal tokens after an equal prefix.

The name of a block is the 32-byte

    sha256(parent | token ids, uint32 little-endian | msgpack(extra keys), only when there are any)

where ``parent`` is the name of the block before it, or the root of the chain for the first block.
Extra keys are whatever besides tokens decides the KV: a LoRA adapter, the multimodal items in the
block, the request's cache salt. The root is ``none_hash(seed)``: processes with one seed agree on
every name, processes without a seed share none. All chains that meet in one table have one block
size.

Nothing here reads the environment, and nothing is pickled: the bytes under the hash are the same on
every machine.
"""

from __future__ import annotations

import array
import hashlib
import os
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import msgspec

BlockHashType: TypeAlias = bytes
"""The name of a full block: 32 bytes."""

HashFunction: TypeAlias = Callable[[bytes], bytes]
"""Any bytes to 32 bytes."""

ExtraKey: TypeAlias = tuple[str | int, ...]
"""One fact besides the tokens, its kind first: ("lora", name, path), ("mm", identifier, offset),
("cache_salt", salt).
"""

HASH_NBYTES = 32
TOKEN_NBYTES = 4
MAX_TOKEN_ID = (1 << 32) - 1


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


def sha256(data: bytes) -> bytes:
    """The hash function of every chain whose names leave the process."""
    return hashlib.sha256(data).digest()


def none_hash(seed: bytes | None) -> BlockHashType:
    """The root of a chain: sha256 of ``seed``, or of 32 random bytes when there is no seed."""
    return sha256(os.urandom(HASH_NBYTES) if seed is None else seed)


NONE_HASH: BlockHashType = none_hash(None)
"""The root for callers that name none: random, so its chains mean nothing to another process."""


def pack_token_ids(token_ids: Sequence[int], first_position: int = 0) -> bytes:
    """Token ids as uint32 little-endian, 4 bytes each.

    Args:
        token_ids: a list converts fastest.
        first_position: position of the first one in its request, for the message only.

    Raises:
        ValueError: an id is no integer from 0 to 2**32 - 1; the message names its position.
    """
    if isinstance(token_ids, (bytes, bytearray)):
        # array() would take them for ready-made words.
        raise ValueError(  # noqa: TRY004 - one exception for every bad token id
            "token_ids: expected a sequence of integers, got bytes; decode them first"
        )
    try:
        # array("I") converts a list in 7 ns a token; numpy.array takes 22 and struct.pack 17 (128k
        # ids, Python 3.11).
        words = array.array("I", token_ids)
    except (OverflowError, TypeError) as exc:
        raise ValueError(_first_bad_token(token_ids, first_position)) from exc
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _first_bad_token(token_ids: Sequence[int], first_position: int) -> str:
    for position, token in enumerate(token_ids, start=first_position):
        try:
            array.array("I", [token])
        except (OverflowError, TypeError):
            return (
                f"token_ids[{position}]: expected an integer from 0 to {MAX_TOKEN_ID}, "
                f"got {token!r}"
            )
    return f"token_ids: expected a sequence of integers, got {type(token_ids).__name__}"


def hash_block_tokens(
    hash_function: HashFunction,
    parent_block_hash: BlockHashType | None,
    curr_block_token_ids: Sequence[int],
    extra_keys: tuple[ExtraKey, ...] | None = None,
) -> BlockHashType:
    """The name of one block.

    Args:
        hash_function: normally :func:`sha256`.
        parent_block_hash: name of the block before, the root of the chain, or None for
            :data:`NONE_HASH`.
        curr_block_token_ids: every token id of the block.
        extra_keys: from :func:`generate_block_hash_extra_keys`; None and () are the same.

    Raises:
        ValueError: a parent that is not 32 bytes long, or a token id outside uint32.
    """
    parent = NONE_HASH if parent_block_hash is None else parent_block_hash
    _check_hash("parent_block_hash", parent)
    extra = msgspec.msgpack.encode(extra_keys) if extra_keys else b""
    return hash_function(parent + pack_token_ids(curr_block_token_ids) + extra)


def hash_request_tokens(
    hash_function: HashFunction,
    block_size: int,
    request: HashableRequest,
    *,
    root: BlockHashType | None = None,
    known: Sequence[BlockHashType] = (),
) -> list[BlockHashType]:
    """The names of a request's full blocks, in order; a partial last block has none.

    Equal to a chain of :func:`hash_block_tokens`, with one conversion for all tokens.

    Args:
        hash_function: normally :func:`sha256`.
        block_size: tokens of a block.
        request: see :class:`HashableRequest`.
        root: the root of the chain, None for :data:`NONE_HASH`.
        known: names that an earlier call gave to the first blocks. Only the blocks after them are
            hashed and returned, so ``known.extend(hash_request_tokens(..., known=known))`` follows
            a growing request at constant cost per token.

    Raises:
        ValueError: block size below 1, root or known name not 32 bytes, more known names than full
            blocks, or a token id outside uint32; the message names its position.
    """
    if block_size < 1:
        raise ValueError(f"block_size: expected at least 1 token, got {block_size}")
    token_ids = request.all_token_ids
    num_blocks = len(token_ids) // block_size
    if len(known) > num_blocks:
        raise ValueError(
            f"known: expected at most {num_blocks} block hashes for {len(token_ids)} tokens in "
            f"blocks of {block_size}, got {len(known)}"
        )
    parent = known[-1] if known else NONE_HASH if root is None else root
    _check_hash("known[-1]" if known else "root", parent)

    start = len(known) * block_size
    # A new request's list is not copied first: for 128k ids that is 0.24 ms of 6.
    packed = pack_token_ids(token_ids[start:] if start else token_ids, start)
    packed = packed[: (num_blocks * block_size - start) * TOKEN_NBYTES]
    # iter_unpack cuts the pieces in C: slicing in the loop costs 90 ns more of 640 per 16-token
    # block.
    pieces = struct.iter_unpack(f"{block_size * TOKEN_NBYTES}s", packed)
    if need_extra_keys(request):
        return _hash_with_extra_keys(hash_function, block_size, request, parent, len(known), pieces)
    if hash_function is sha256:
        # Without the call of a Python function per block: 50 ns of 640.
        raw_sha256 = hashlib.sha256
        return [parent := raw_sha256(parent + piece).digest() for (piece,) in pieces]
    return [parent := hash_function(parent + piece) for (piece,) in pieces]


def _hash_with_extra_keys(
    hash_function: HashFunction,
    block_size: int,
    request: HashableRequest,
    parent: BlockHashType,
    first_block: int,
    pieces: Any,  # noqa: ANN401 - the iterator of struct.iter_unpack
) -> list[BlockHashType]:
    hashes = []
    mm_idx = 0
    encode = msgspec.msgpack.encode
    for block, (piece,) in enumerate(pieces, start=first_block):
        start = block * block_size
        keys, mm_idx = generate_block_hash_extra_keys(request, start, start + block_size, mm_idx)
        parent = hash_function(parent + piece + (encode(keys) if keys else b""))
        hashes.append(parent)
    return hashes


def _check_hash(name: str, block_hash: bytes) -> None:
    if len(block_hash) != HASH_NBYTES:
        raise ValueError(f"{name}: expected {HASH_NBYTES} bytes, got {len(block_hash)}")


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
