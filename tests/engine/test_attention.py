"""Paged attention against a naive one that loops over tokens and heads."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvxfer.engine.attention import AttentionBackend, attention_backend, build_attn_metadata
from kvxfer.engine.model_config import load_model_config, shard_for
from kvxfer.errors import ModelError
from kvxfer.tensors.allocate import KVPool, allocate_kv_pool

HEAD_SIZE = 4


def make_pool(
    layout: str, block_tokens: int, num_kv_heads: int, num_blocks: int = 12
) -> tuple[AttentionBackend, KVPool]:
    config = msgspec.structs.replace(
        load_model_config(None, num_kv_heads=num_kv_heads), num_layers=1, head_size=HEAD_SIZE
    )
    backend = attention_backend(layout)
    spec = backend.pool_spec(
        config, shard_for(config, 0, 1), num_blocks=num_blocks, block_tokens=block_tokens
    )
    pool = allocate_kv_pool(spec)
    for view in pool.layers.values():
        view.fill_(math.nan)  # what a request does not own must never reach its answer
    return backend, pool


def naive(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """query [new, Hq, D] is the end of the context; key and value [context, Hkv, D]."""
    new, num_query, _ = query.shape
    context, num_kv, _ = key.shape
    out = torch.empty_like(query)
    for row in range(new):
        for head in range(num_query):
            seen = context - new + row + 1
            kv_head = head // (num_query // num_kv)
            scores = key[:seen, kv_head] @ query[row, head] / math.sqrt(HEAD_SIZE)
            out[row, head] = torch.softmax(scores, 0) @ value[:seen, kv_head]
    return out


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    layout=st.sampled_from(["HND", "NHD"]),
    block_tokens=st.sampled_from([8, 16, 24, 32, 40, 64]),
    num_kv_heads=st.sampled_from([1, 2, 4]),
    steps=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
)
def test_equals_naive_over_chunks_and_batches(
    layout: str,
    block_tokens: int,
    num_kv_heads: int,
    steps: list[tuple[int, int]],
    seed: int,
) -> None:
    """Each request is computed in two chunks, together with the others, in scattered blocks."""
    backend, pool = make_pool(layout, block_tokens, num_kv_heads, num_blocks=36)
    (view,) = pool.layers.values()
    generator = torch.Generator().manual_seed(seed)
    free = torch.randperm(36, generator=generator).tolist()
    blocks = [[free.pop() for _ in range(-(-(a + b) // block_tokens))] for a, b in steps]
    qs = [torch.randn(a + b, 4, HEAD_SIZE, generator=generator) for a, b in steps]
    ks = [torch.randn(a + b, num_kv_heads, HEAD_SIZE, generator=generator) for a, b in steps]
    vs = [torch.randn(a + b, num_kv_heads, HEAD_SIZE, generator=generator) for a, b in steps]
    for spans in ([(0, a) for a, _ in steps], [(a, a + b) for a, b in steps]):
        meta = build_attn_metadata(
            [(ids, lo, hi - lo) for ids, (lo, hi) in zip(blocks, spans, strict=True)], block_tokens
        )
        q, k, v = (
            torch.cat([t[lo:hi] for t, (lo, hi) in zip(full, spans, strict=True)])
            for full in (qs, ks, vs)
        )
        backend.write(view, k, v, meta)
        got = backend.attend(q, view, meta)
        want = torch.cat(
            [
                naive(q_all[lo:hi], k_all[:hi], v_all[:hi])
                for q_all, k_all, v_all, (lo, hi) in zip(qs, ks, vs, spans, strict=True)
            ]
        )
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("layout", "block_tokens"), [("HND", 24), ("NHD", 24), ("NHD", 64)])
def test_write_touches_exactly_its_slots(layout: str, block_tokens: int) -> None:
    """Two tokens of block 3 and one of block 1, read back by an address written out by hand."""
    backend, pool = make_pool(layout, block_tokens, 2, num_blocks=4)
    (view,) = pool.layers.values()
    view.fill_(-1.0)
    meta = build_attn_metadata([([3], 10, 2), ([1], 0, 1)], block_tokens)
    key = torch.arange(3 * 2 * HEAD_SIZE).view(3, 2, HEAD_SIZE).float()
    backend.write(view, key, key + 100, meta)
    assert int((view != -1.0).sum()) == 2 * key.numel()
    for row, (block, slot) in enumerate([(3, 10), (3, 11), (1, 0)]):
        for head in range(2):
            if layout == "HND":
                k, v = view[0, block, head, slot], view[1, block, head, slot]
            else:
                kernel = 8 if block_tokens == 24 else 64
                at = block * (block_tokens // kernel) + slot // kernel
                k, v = view[at, 0, slot % kernel, head], view[at, 1, slot % kernel, head]
            assert torch.equal(k, key[row, head])
            assert torch.equal(v, key[row, head] + 100)


def test_metadata_by_hand() -> None:
    meta = build_attn_metadata([([5, 2, 7], 15, 3), ([4], 0, 2)], 8)
    assert meta.query_start_loc.tolist() == [0, 3, 5]
    assert meta.seq_lens.tolist() == [18, 2]
    assert meta.block_tables.tolist() == [[5, 2, 7], [4, 0, 0]]
    assert meta.slot_mapping.tolist() == [2 * 8 + 7, 7 * 8, 7 * 8 + 1, 32, 33]
    assert {t.dtype for t in (meta.query_start_loc, meta.seq_lens, meta.block_tables)} == {
        torch.int64
    }


def test_refusals() -> None:
    with pytest.raises(ValueError, match="request 1: expected blocks for 9 tokens, got 1 of 8"):
        build_attn_metadata([([0], 0, 1), ([1], 4, 5)], 8)
    with pytest.raises(ValueError, match="request 0: expected new tokens after 0 or more"):
        build_attn_metadata([([0], 3, 0)], 8)
    with pytest.raises(ModelError, match="layout: expected HND or NHD, got 'DNH'"):
        attention_backend("DNH")
