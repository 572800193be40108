"""What a step's attention is told of its requests, by group, written out by hand."""

from __future__ import annotations

import pytest
import torch

from kvxfer.cache.specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from kvxfer.engine.rank_cache import RequestStep, step_tables

FULL = KVCacheGroupSpec(
    ["full"], FullAttentionSpec(block_size=8, num_kv_heads=1, head_size=4, dtype="float32")
)
WINDOW = KVCacheGroupSpec(
    ["window"],
    SlidingWindowSpec(block_size=8, num_kv_heads=1, head_size=4, dtype="float32", sliding_window=6),
)
CHUNK = KVCacheGroupSpec(
    ["chunk"],
    ChunkedLocalAttentionSpec(
        block_size=8, num_kv_heads=1, head_size=4, dtype="float32", attention_chunk_size=12
    ),
)


def test_tables_of_two_groups_by_hand() -> None:
    requests = [
        RequestStep(([5, 2, 7], [-1, 9, 1]), 15, 3),
        RequestStep(([4], [6]), 0, 2),
    ]
    tables = step_tables(requests, [FULL, WINDOW])
    assert (tables["num_reqs"], tables["num_tokens"]) == (2, 5)
    assert tables["query_start_loc"].tolist() == [0, 3, 5]
    assert tables["seq_lens"].tolist() == [18, 2]
    assert tables["num_computed_tokens_cpu"].tolist() == [15, 0]
    assert [table.tolist() for table in tables["block_tables"]] == [
        [[5, 2, 7], [4, 0, 0]],
        [[0, 9, 1], [6, 0, 0]],
    ]
    assert [slots.tolist() for slots in tables["slot_mappings"]] == [
        [2 * 8 + 7, 7 * 8, 7 * 8 + 1, 4 * 8, 4 * 8 + 1],
        [9 * 8 + 7, 1 * 8, 1 * 8 + 1, 6 * 8, 6 * 8 + 1],
    ]
    everything = (
        *(tables["query_start_loc"], tables["seq_lens"], tables["num_computed_tokens_cpu"]),
        *(*tables["block_tables"], *tables["slot_mappings"]),
    )
    assert {tensor.dtype for tensor in everything} == {torch.int64}


def test_tables_longer_than_needed_and_a_long_chunk() -> None:
    tables = step_tables([RequestStep(([3, 0, 2, 8],), 4, 15)], [FULL])
    assert tables["slot_mappings"][0].tolist() == [*range(28, 32), *range(8), *range(16, 19)]
    assert tables["block_tables"][0].tolist() == [[3, 0, 2, 8]]


def test_a_step_without_requests() -> None:
    tables = step_tables([], [FULL, WINDOW])
    assert (tables["num_reqs"], tables["num_tokens"]) == (0, 0)
    assert [tuple(table.shape) for table in tables["block_tables"]] == [(0, 0), (0, 0)]


@pytest.mark.parametrize(
    ("group", "num_computed", "needs"),
    [
        *((WINDOW, n, needs) for n, needs in [(12, 0), (13, 1), (20, 1), (21, 2)]),
        *((CHUNK, n, needs) for n, needs in [(11, 0), (12, 1), (23, 1), (24, 3)]),
    ],
)
def test_the_first_block_that_a_group_needs(
    group: KVCacheGroupSpec, num_computed: int, needs: int
) -> None:
    """Of the next token at position n a window of 6 begins at n - 5, a chunk of 12 at its start."""
    table = [4, 5, 6, 7]
    table[:needs] = [-1] * needs
    step_tables([RequestStep((table,), num_computed, 1)], [group])
    table[needs] = -1
    message = f"request 0: expected a block at position {needs} of group 0, which a new token sees"
    with pytest.raises(ValueError, match=message):
        step_tables([RequestStep((table,), num_computed, 1)], [group])


def test_refusals() -> None:
    with pytest.raises(ValueError, match="request 1: expected blocks for 9 tokens in group 0, got"):
        step_tables([RequestStep(([0],), 0, 1), RequestStep(([1],), 4, 5)], [FULL])
    with pytest.raises(ValueError, match="longer than"):
        step_tables([RequestStep(([0],), 0, 1)], [FULL, WINDOW])
    with pytest.raises(ValueError, match="expected a block at position 0 of group 0"):
        step_tables([RequestStep(([-1, 3],), 9, 1)], [FULL])
