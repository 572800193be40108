"""What the attention of a step needs to know of its requests, by cache group."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvxfer.cache.manager import NO_BLOCK
from kvxfer.cache.specs import KVCacheGroupSpec, KVCacheSpec, SlidingWindowSpec


@dataclass(frozen=True, slots=True)
class RequestStep:
    """One request's part of a step. ``block_ids``: for each group its table, by position."""

    block_ids: Sequence[Sequence[int]]
    num_computed_tokens: int
    num_new_tokens: int

    @property
    def seq_len(self) -> int:
        """Tokens with the new ones."""
        return self.num_computed_tokens + self.num_new_tokens


@dataclass(frozen=True, slots=True)
class StepTables:
    """The arguments of ``build_attn_metadata``; ``block_tables`` (0 where there is no block) and
    ``slot_mappings`` by group. All int64.
    """

    num_reqs: int
    num_tokens: int
    query_start_loc: Tensor
    seq_lens: Tensor
    num_computed_tokens: Tensor
    block_tables: tuple[Tensor, ...]
    slot_mappings: tuple[Tensor, ...]


def step_tables(
    requests: Sequence[RequestStep],
    groups: Sequence[KVCacheGroupSpec],
    device: torch.device | str = "cpu",
) -> StepTables:
    """Tables of a step. Raises ValueError for a request without new tokens, with another number of
    tables than groups, with too few blocks for its tokens, or without one that a new token sees.
    """
    for index, request in enumerate(requests):
        _check(index, request, groups)
    starts = itertools.accumulate((request.num_new_tokens for request in requests), initial=0)
    query_start_loc = list(starts)
    block_tables: list[Tensor] = []
    slot_mappings: list[Tensor] = []
    for number, group in enumerate(groups):
        tables = [request.block_ids[number] for request in requests]
        most = max(map(len, tables), default=0)
        rows = [[*table, *itertools.repeat(0, most - len(table))] for table in tables]
        table = torch.tensor(rows, dtype=torch.int64, device=device).reshape(len(rows), most)
        block_tables.append(table.clamp_(min=0))
        slots = [
            slot
            for request, blocks in zip(requests, tables, strict=True)
            for slot in _new_slots(request, blocks, group.kv_cache_spec.block_size)
        ]
        slot_mappings.append(torch.tensor(slots, dtype=torch.int64, device=device))
    return StepTables(
        num_reqs=len(requests),
        num_tokens=query_start_loc[-1],
        query_start_loc=torch.tensor(query_start_loc, dtype=torch.int64),
        seq_lens=torch.tensor([request.seq_len for request in requests], dtype=torch.int64),
        num_computed_tokens=torch.tensor(
            [request.num_computed_tokens for request in requests], dtype=torch.int64
        ),
        block_tables=tuple(block_tables),
        slot_mappings=tuple(slot_mappings),
    )


def _new_slots(request: RequestStep, blocks: Sequence[int], block_size: int) -> list[int]:
    """Slots of the new tokens, in order."""
    slots: list[int] = []
    token = request.num_computed_tokens
    while token < request.seq_len:
        position, offset = divmod(token, block_size)
        count = min(block_size - offset, request.seq_len - token)
        first = blocks[position] * block_size + offset
        slots += range(first, first + count)
        token += count
    return slots


def _check(index: int, request: RequestStep, groups: Sequence[KVCacheGroupSpec]) -> None:
    if request.num_new_tokens < 1 or request.num_computed_tokens < 0:
        raise ValueError(
            f"request {index}: expected new tokens after 0 or more computed ones, "
            f"got {request.num_new_tokens} after {request.num_computed_tokens}"
        )
    if len(request.block_ids) != len(groups):
        raise ValueError(
            f"request {index}: expected one block table for each of {len(groups)} groups, got "
            f"{len(request.block_ids)}"
        )
    for number, (blocks, group) in enumerate(zip(request.block_ids, groups, strict=True)):
        block_size = group.kv_cache_spec.block_size
        if request.seq_len > len(blocks) * block_size:
            raise ValueError(
                f"request {index}: expected blocks for {request.seq_len} tokens in group {number}, "
                f"got {len(blocks)} of {block_size} tokens"
            )
        first_seen = _first_seen(request.num_computed_tokens, group.kv_cache_spec) // block_size
        seen = blocks[first_seen : -(-request.seq_len // block_size)]
        if NO_BLOCK in seen:
            position = first_seen + seen.index(NO_BLOCK)
            raise ValueError(
                f"request {index}: expected a block at position {position} of group {number}, "
                "which a new token sees, got none"
            )


def _first_seen(num_computed_tokens: int, spec: KVCacheSpec) -> int:
    """The first position that the next token sees, of a layer that keeps what ``spec`` says."""
    if isinstance(spec, SlidingWindowSpec):
        return max(0, num_computed_tokens - spec.sliding_window + 1)
    return 0
