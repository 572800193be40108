"""Names for the content of full blocks: equal names mean equal tokens after an equal prefix.

The name of a block is the 32-byte

    sha256(parent | token ids, uint32 little-endian | msgpack(extra keys), only when there are any)

where ``parent`` is the name of the block before it, or the root of the chain for the first block.
Extra keys are whatever besides tokens decides the KV: a LoRA adapter, the multimodal items in the
block, the request's cache salt, embeddings given instead of tokens. The root is
``none_hash(seed)``: processes with one seed agree on every name, processes without a seed share
none. All chains that meet in one table are cut into blocks of as many tokens. ``NONE_HASH`` is the
root of this process: see :func:`init_none_hash`.

The bytes under the hash are the same on every machine. With an :class:`ObjectHash` the names are
those of vLLM 0.32 instead: hashes of the tuple ``(parent's name, token ids, extra keys or None)``
and a root that is the hash of a seed. Its four algorithms differ in how the tuple becomes bytes
(pickle or canonical CBOR) and which digest follows. Pickled names depend on the Python version's
newest pickle protocol, and on whether equal strings of the extra keys are one object; names from
CBOR depend on neither.
"""

from __future__ import annotations

import array
import ctypes
import hashlib
import os
import pickle
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec

from kvxfer.cache.specs import check_positive
from kvxfer.config import load_config
from kvxfer.extras import install

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
        or _num_embedded_tokens(request)
    )


def generate_block_hash_extra_keys(
    request: HashableRequest, start_token_idx: int, end_token_idx: int, start_mm_idx: int
) -> tuple[tuple[ExtraKey, ...] | None, int]:
    """The extra keys of the tokens ``[start_token_idx, end_token_idx)``, and where to look for the
    next block's.

    Order: LoRA, multimodal items by position, cache salt, prompt embeddings. The salt is in the
    first block only: the chain carries it on. Without keys they are None.

    ``start_mm_idx`` is the first multimodal item that can matter: 0, or what the call for the block
    before returned; negative counts from the end. ValueError when it is before the first item,
    TypeError for ``prompt_embeds`` that are neither a tensor nor an array.
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
    if start_token_idx >= _num_embedded_tokens(request):
        return []
    embeds: Any = getattr(request, "prompt_embeds", None)
    content = _element_bytes(embeds[start_token_idx:end_token_idx])
    return [("prompt_embeds", hashlib.sha256(content).digest())]


def _num_embedded_tokens(request: object) -> int:
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


_DEFAULT_SEED = "vllm-none-hash"
"""Seed of the algorithms that resist collisions, where none is chosen."""


@dataclass(frozen=True, slots=True)
class ObjectHash:
    """One algorithm: ``encode`` makes bytes of an object, ``digest`` makes ``nbytes`` of these."""

    name: str
    encode: Callable[[Any], bytes]
    digest: Callable[[Any], bytes]
    nbytes: int
    resists_collisions: bool

    def __call__(self, value: object) -> bytes:
        return self.digest(self.encode(value))

    def block(
        self, parent: bytes, token_ids: Sequence[int], extra_keys: tuple[ExtraKey, ...] | None
    ) -> bytes:
        return self.digest(self.encode((parent, tuple(token_ids), extra_keys or None)))

    def none_hash(self, seed: str | None) -> bytes:
        """The root of a chain. Without a seed it is vLLM's default, and random where names that
        can be foreseen could be made to collide.
        """
        if seed is None:
            seed = _DEFAULT_SEED if self.resists_collisions else os.urandom(32).hex()
        return self(seed)


def get_hash_fn_by_name(name: str) -> ObjectHash:
    """``sha256``, ``sha256_cbor``, ``xxhash`` or ``xxhash_cbor``, as of
    ``--prefix-caching-hash-algo``. Raises ValueError for another name, ModuleNotFoundError where
    its package is not installed.
    """
    if name not in {"sha256", "sha256_cbor", "xxhash", "xxhash_cbor"}:
        raise ValueError(
            f"hash function: expected sha256, sha256_cbor, xxhash or xxhash_cbor, got {name!r}"
        )
    encode: Callable[[Any], bytes] = partial(pickle.dumps, protocol=pickle.HIGHEST_PROTOCOL)
    if name.endswith("_cbor"):
        encode = partial(_needed("cbor2", name).dumps, canonical=True)
    if name.startswith("sha256"):
        return ObjectHash(name, encode, sha256, 32, resists_collisions=True)
    digest = _needed("xxhash", name).xxh3_128_digest
    return ObjectHash(name, encode, digest, 16, resists_collisions=False)


def _needed(package: str, name: str) -> Any:  # noqa: ANN401 - a module
    try:
        return import_module(package)
    except ModuleNotFoundError as exc:
        raise ModuleNotFoundError(
            f"hash function {name}: expected the package {package}, got none; "
            + install("vllm-names")
        ) from exc


BlockHashType: TypeAlias = bytes
"""The name of a full block: 32 bytes, 16 of vLLM's xxhash."""

HashFunction: TypeAlias = Callable[[bytes], bytes] | ObjectHash
"""Any bytes to 32 bytes, or one of vLLM's algorithms."""

_HASH_NBYTES = 32
TOKEN_NBYTES = 4
_MAX_TOKEN_ID = (1 << 32) - 1


def sha256(data: bytes) -> bytes:
    """The hash function of every chain whose names leave the process."""
    return hashlib.sha256(data).digest()


def none_hash(seed: bytes | None) -> BlockHashType:
    """The root of a chain: sha256 of ``seed``, or of 32 random bytes when there is no seed."""
    return sha256(os.urandom(_HASH_NBYTES) if seed is None else seed)


NONE_HASH: BlockHashType
"""The root of this process, for callers that name none. It is made when it is first used; until
then :func:`init_none_hash` can choose it."""


def init_none_hash(seed: bytes | None) -> BlockHashType:
    """Choose :data:`NONE_HASH`, normally with ``Config.hash_seed_bytes``; returns it.

    Without this call the first use takes the seed that ``config.py`` reads from the environment:
    ``KVXFER_HASH_SEED``, else ``PYTHONHASHSEED``, else none. None chooses nothing: the root that
    there is stays, else it is random. ValueError where another root was chosen or used before.
    """
    # setdefault is one step for all threads.
    root: BlockHashType = globals().setdefault("NONE_HASH", none_hash(seed))
    if seed is not None and root != none_hash(seed):
        raise ValueError(
            f"NONE_HASH: expected to be chosen before it is used, got another seed when it was "
            f"{root.hex()[:16]}; call init_none_hash first, or pass root= to hash_request_tokens"
        )
    return root


def _process_root() -> BlockHashType:
    root: BlockHashType | None = globals().get("NONE_HASH")
    return init_none_hash(load_config({}).config.hash_seed_bytes) if root is None else root


_object_roots: dict[str, BlockHashType] = {}


def _root_for(hash_function: HashFunction) -> BlockHashType:
    if not isinstance(hash_function, ObjectHash):
        return _process_root()
    root = _object_roots.get(hash_function.name)
    if root is None:
        made = hash_function.none_hash(load_config({}).config.hash_seed)
        root = _object_roots.setdefault(hash_function.name, made)  # one step for all threads
    return root


if not TYPE_CHECKING:  # or a type checker would find every name in this module

    def __getattr__(name: str) -> BlockHashType:
        # Only a name that is not there comes here: NONE_HASH before its first use.
        if name != "NONE_HASH":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return _process_root()


def pack_token_ids(token_ids: Sequence[int], first_position: int = 0) -> bytes:
    """Token ids as uint32 little-endian, 4 bytes each.

    A list converts fastest. Raises TypeError for an id that is no integer and ValueError for one
    outside 0 to 2**32 - 1; the message counts from ``first_position``.
    """
    if isinstance(token_ids, (bytes, bytearray)):
        # array() would take them for ready-made words.
        raise TypeError("token_ids: expected a sequence of integers, got bytes; decode them first")
    try:
        # array("I") converts a list in 7 ns a token; numpy.array takes 22 and struct.pack 17 (128k
        # ids, Python 3.11).
        words = array.array("I", token_ids)
    except OverflowError as exc:
        raise ValueError(_first_bad_token(token_ids, first_position)) from exc
    except TypeError as exc:
        raise TypeError(_first_bad_token(token_ids, first_position)) from exc
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _first_bad_token(token_ids: Sequence[int], first_position: int) -> str:
    for position, token in enumerate(token_ids, start=first_position):
        try:
            array.array("I", [token])
        except (OverflowError, TypeError):
            return (
                f"token_ids[{position}]: expected an integer from 0 to {_MAX_TOKEN_ID}, "
                f"got {token!r}; pass the tokenizer's ids, without padding"
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
        hash_function: normally :func:`sha256`; for vLLM's names one of
            :func:`~kvxfer.cache.hashing.get_hash_fn_by_name`.
        parent_block_hash: name of the block before, the root of the chain, or None for the root of
            this process (:data:`NONE_HASH`, or vLLM's).
        extra_keys: from :func:`generate_block_hash_extra_keys`; None and () are the same.

    Raises:
        TypeError: a token id that is no integer.
        ValueError: a parent that is not as long as a name, or a token id outside uint32.
    """
    parent = _root_for(hash_function) if parent_block_hash is None else parent_block_hash
    _check_hash("parent_block_hash", parent, hash_function)
    packed = pack_token_ids(curr_block_token_ids)
    if isinstance(hash_function, ObjectHash):
        return hash_function.block(parent, curr_block_token_ids, extra_keys)
    return hash_function(parent + packed + _pack_keys(extra_keys))


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
        known: names that an earlier call gave to the first blocks. Only the blocks after them are
            hashed and returned, so ``known.extend(hash_request_tokens(..., known=known))`` follows
            a growing request at constant cost per token.

    Raises:
        TypeError: a token id that is no integer; the message names its position.
        ValueError: block size below 1, root or known name of another length, more known names than
            full blocks, or a token id outside uint32; the message names its position.
    """
    check_positive("block_size", block_size, "pass the tokens of a block of the cache")
    token_ids = request.all_token_ids
    num_blocks = len(token_ids) // block_size
    if len(known) > num_blocks:
        raise ValueError(
            f"known: expected at most {num_blocks} block hashes for {len(token_ids)} tokens in "
            f"blocks of {block_size}, got {len(known)}"
        )
    if known:
        parent = known[-1]
        _check_hash("known[-1]", parent, hash_function)
    else:
        parent = _root_for(hash_function) if root is None else root
        _check_hash("root", parent, hash_function)

    start = len(known) * block_size
    # A new request's list is not copied first: for 128k ids that is 0.24 ms of 5.
    packed = pack_token_ids(token_ids[start:] if start else token_ids, start)
    if isinstance(hash_function, ObjectHash):
        return _hash_objects(
            hash_function, block_size, request, parent, range(len(known), num_blocks)
        )
    pieces = _cut(packed, block_size * TOKEN_NBYTES)
    if need_extra_keys(request):
        return _hash_with_extra_keys(hash_function, block_size, request, parent, len(known), pieces)
    return _chain(hash_function, parent, pieces)


def _cut(packed: bytes, piece_nbytes: int) -> Iterator[bytes]:
    """``packed`` in pieces; a shorter rest is left out.

    Each step of the iterator makes 64 pieces in C: 22 ns a piece of 64 bytes, against 42 with one
    by one and 90 for a slice. All at once is slower again: the pieces would leave the cache before
    they are hashed.
    """
    num_pieces = len(packed) // piece_nbytes
    view, many = memoryview(packed), 64 * piece_nbytes
    middle = num_pieces // 64 * many
    rest = view[middle : num_pieces * piece_nbytes]
    return chain(
        chain.from_iterable(struct.iter_unpack(f"{piece_nbytes}s" * 64, view[:middle])),
        struct.unpack(f"{piece_nbytes}s" * (num_pieces % 64), rest),
    )


def _hash_objects(
    hash_function: ObjectHash,
    block_size: int,
    request: HashableRequest,
    parent: BlockHashType,
    blocks: range,
) -> list[BlockHashType]:
    """The names of ``blocks`` (positions in the request), of their token ids themselves."""
    token_ids, mm_idx = request.all_token_ids, 0
    has_keys, hashes = need_extra_keys(request), []
    for start in range(blocks.start * block_size, blocks.stop * block_size, block_size):
        keys, end = None, start + block_size
        if has_keys:
            keys, mm_idx = generate_block_hash_extra_keys(request, start, end, mm_idx)
        parent = hash_function.block(parent, token_ids[start:end], keys)
        hashes.append(parent)
    return hashes


def _chain(
    hash_function: Callable[[bytes], bytes], parent: BlockHashType, pieces: Iterator[bytes]
) -> list[BlockHashType]:
    if hash_function is not sha256:
        return [parent := hash_function(parent + piece) for piece in pieces]
    # A copy of an empty state, fed twice, instead of hashlib.sha256(parent + piece): it looks no
    # algorithm up and joins nothing, 40 ns of 620 for a block of 16 tokens.
    fresh = hashlib.sha256().copy
    hashes = []
    for piece in pieces:
        state = fresh()
        state.update(parent)
        state.update(piece)
        parent = state.digest()
        hashes.append(parent)
    return hashes


def _hash_with_extra_keys(
    hash_function: Callable[[bytes], bytes],
    block_size: int,
    request: HashableRequest,
    parent: BlockHashType,
    first_block: int,
    pieces: Iterator[bytes],
) -> list[BlockHashType]:
    hashes: list[BlockHashType] = []
    mm_idx, num_mm = 0, len(getattr(request, "mm_features", None) or ())
    num_embedded = _num_embedded_tokens(request)
    for block, piece in enumerate(pieces, start=first_block):
        start, end = block * block_size, (block + 1) * block_size
        keys, mm_idx = generate_block_hash_extra_keys(request, start, end, mm_idx)
        parent = hash_function(parent + piece + _pack_keys(keys))
        hashes.append(parent)
        if mm_idx == num_mm and end >= num_embedded:
            break
    # After the first block, the last item and the last given row the keys stay the same.
    same = _pack_keys(gen_lora_extra_hash_keys(request))
    rest = (piece + same for piece in pieces) if same else pieces
    return hashes + _chain(hash_function, parent, rest)


def _pack_keys(keys: Sequence[ExtraKey] | None) -> bytes:
    return msgspec.msgpack.encode(keys) if keys else b""


def _check_hash(name: str, block_hash: bytes, hash_function: HashFunction) -> None:
    expected = hash_function.nbytes if isinstance(hash_function, ObjectHash) else _HASH_NBYTES
    if len(block_hash) != expected:
        raise ValueError(f"{name}: expected {expected} bytes, got {len(block_hash)}")
