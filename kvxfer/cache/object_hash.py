"""Hash functions of objects, which give blocks the names that vLLM 0.32 gives them.

There a block's name is the hash of the tuple ``(parent's name, token ids, extra keys or None)``,
and the root of a chain is the hash of a seed. Four algorithms differ in how the tuple becomes bytes
(pickle or canonical CBOR) and which digest follows.

Pickled names depend on the Python version's newest pickle protocol, and on whether equal strings of
the extra keys are one object; names from CBOR depend on neither.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, TypeAlias

from kvxfer.cache.extra_keys import ExtraKey

_DEFAULT_SEED = "vllm-none-hash"
"""Seed of the algorithms that resist collisions, where none is chosen."""

_Bytes: TypeAlias = Callable[[Any], bytes]


@dataclass(frozen=True, slots=True)
class ObjectHash:
    """One algorithm: ``encode`` makes bytes of an object, ``digest`` makes ``nbytes`` of these."""

    name: str
    encode: _Bytes
    digest: _Bytes
    nbytes: int
    resists_collisions: bool

    def __call__(self, value: object) -> bytes:
        """The hash of anything that ``encode`` takes."""
        return self.digest(self.encode(value))

    def block(
        self, parent: bytes, token_ids: Sequence[int], extra_keys: tuple[ExtraKey, ...] | None
    ) -> bytes:
        """The name of a block after ``parent``."""
        return self.digest(self.encode((parent, tuple(token_ids), extra_keys or None)))

    def none_hash(self, seed: str | None) -> bytes:
        """The root of a chain. Without a seed it is vLLM's default, and random where names that
        can be foreseen could be made to collide.
        """
        if seed is None:
            seed = _DEFAULT_SEED if self.resists_collisions else os.urandom(32).hex()
        return self(seed)


def get_hash_fn_by_name(name: str) -> ObjectHash:
    """The algorithm of this name in ``--prefix-caching-hash-algo``: ``sha256``, ``sha256_cbor``,
    ``xxhash`` or ``xxhash_cbor``.

    Raises:
        ValueError: another name.
        ModuleNotFoundError: the package that it needs is not installed.
    """
    if name not in {"sha256", "sha256_cbor", "xxhash", "xxhash_cbor"}:
        raise ValueError(
            f"hash function: expected sha256, sha256_cbor, xxhash or xxhash_cbor, got {name!r}"
        )
    encode: _Bytes = partial(pickle.dumps, protocol=pickle.HIGHEST_PROTOCOL)
    if name.endswith("_cbor"):
        encode = partial(_needed("cbor2", name).dumps, canonical=True)
    if name.startswith("sha256"):
        return ObjectHash(name, encode, _sha256, 32, resists_collisions=True)
    digest = _needed("xxhash", name).xxh3_128_digest
    return ObjectHash(name, encode, digest, 16, resists_collisions=False)


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _needed(package: str, name: str) -> Any:  # noqa: ANN401 - a module
    try:
        return import_module(package)
    except ModuleNotFoundError as exc:
        raise ModuleNotFoundError(
            f"hash function {name}: expected the package {package}, got none; "
            "install kvxfer[vllm-names]"
        ) from exc
