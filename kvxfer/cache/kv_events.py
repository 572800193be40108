"""What a router is told of a cache: which names came, which went, and that all are gone.

The records have the fields of vLLM's ``vllm.distributed.kv_events`` (0.32), in its order and with
its tags, so that whoever decodes vLLM's events decodes these. One that is not set is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, TypeAlias

import msgspec

from kvxfer.cache.free_queue import KVCacheBlock
from kvxfer.cache.hashing import (
    BlockHashType,
    ExtraKey,
    HashableRequest,
    generate_block_hash_extra_keys,
)
from kvxfer.cache.specs import KVCacheSpec, SlidingWindowSpec

_ExternalBlockHash: TypeAlias = bytes | int
"""A name as it leaves the process: whole, or its last 64 bits as an unsigned integer."""

_MEDIUM_GPU = "GPU"

_LAST_64_BITS = (1 << 64) - 1


class KVCacheEvent(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag=True):
    """One change of the names in a cache."""


class BlockStored(KVCacheEvent, frozen=True, kw_only=True):
    """Blocks of one request, next to each other, have got names.

    ``parent_block_hash``: the name of the block before the first, None for a request's first.
    ``token_ids``: ``block_size`` for each block. ``extra_keys``: for each block, what else is in
    its name, without the kinds: adapter name, (item, offset), salt, digest of embeddings.
    ``locality`` and ``ownership`` are not used here.
    """

    block_hashes: list[_ExternalBlockHash]
    parent_block_hash: _ExternalBlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(KVCacheEvent, frozen=True, kw_only=True):
    """Blocks of a group have lost these names. A name that two blocks had is removed twice."""

    block_hashes: list[_ExternalBlockHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KVCacheEvent, frozen=True):
    """No block has a name any more."""


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """Events with the time at which they were taken (seconds since 1970), as they are published."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class KVEventLog:
    """The events of one pool since they were last taken. ``int_block_hashes``: names are the last
    64 bits, as vLLM has it unless ``VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES`` is 0.
    """

    def __init__(self, medium: str = _MEDIUM_GPU, *, int_block_hashes: bool = True) -> None:
        self.medium = medium
        self.int_block_hashes = int_block_hashes
        self._events: list[KVCacheEvent] = []

    def take(self) -> list[KVCacheEvent]:
        """All events, oldest first; the log is empty afterwards."""
        events, self._events = self._events, []
        return events

    def stored(
        self,
        blocks: Sequence[KVCacheBlock],
        block_hashes: Sequence[BlockHashType],
        new: slice,
        group_id: int,
        request: HashableRequest,
        spec: KVCacheSpec,
    ) -> None:
        """One event for each run of ``blocks[new]`` without null blocks."""
        mm_idx, lora = 0, getattr(request, "lora_request", None)
        for start, end in _runs(blocks, new):
            keys: list[tuple[ExtraKey, ...] | None] = []
            for at in range(start, end):
                first, last = at * spec.block_size, (at + 1) * spec.block_size
                of_block, mm_idx = generate_block_hash_extra_keys(request, first, last, mm_idx)
                keys.append(of_block)
            event = BlockStored(
                block_hashes=[self._external(name) for name in block_hashes[start:end]],
                parent_block_hash=self._external(block_hashes[start - 1]) if start else None,
                token_ids=list(
                    request.all_token_ids[start * spec.block_size : end * spec.block_size]
                ),
                block_size=spec.block_size,
                lora_id=getattr(lora, "lora_int_id", None),
                medium=self.medium,
                lora_name=getattr(lora, "lora_name", None),
                extra_keys=[of_block and _untagged(of_block) for of_block in keys],
                group_idx=group_id,
                kv_cache_spec_kind=spec.kind,
                kv_cache_spec_sliding_window=(
                    spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
                ),
                session_id=getattr(request, "session_id", None),
            )
            self._events.append(event)

    def removed(self, block_hash: BlockHashType, group_id: int) -> None:
        names = [self._external(block_hash)]
        self._events.append(
            BlockRemoved(block_hashes=names, medium=self.medium, group_idx=group_id)
        )

    def cleared(self) -> None:
        self._events.append(AllBlocksCleared())

    def _external(self, block_hash: BlockHashType) -> _ExternalBlockHash:
        if self.int_block_hashes:
            return int.from_bytes(block_hash, "big") & _LAST_64_BITS
        return block_hash


def _runs(blocks: Sequence[KVCacheBlock], new: slice) -> Iterator[tuple[int, int]]:
    """[start, end) of the blocks of ``new`` that are next to each other and not null."""
    places = range(new.start, new.stop)
    for is_null, run in groupby(places, key=lambda at: blocks[at].is_null):
        if not is_null:
            found = list(run)
            yield found[0], found[-1] + 1


def _untagged(keys: tuple[ExtraKey, ...]) -> tuple[Any, ...]:
    """Keys as events have them: without kinds, of an adapter and a salt the word alone."""
    return tuple(key[1:] if key[0] == "mm" else key[1] for key in keys)
