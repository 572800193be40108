"""Paged attention against a naive one that loops over tokens and heads."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvxfer.cache.specs import KVCacheConfig, KVCacheGroupSpec, attention_layer_spec
from kvxfer.engine.attention import (
    AttentionMetadata,
    PagedBackend,
    PagedMetadataBuilder,
    Sight,
    attention_backend,
)
from kvxfer.engine.rank_cache import RequestStep, step_tables
from kvxfer.errors import ModelError
from kvxfer.tensors.attention import MultipleOf, build_attn_metadata

HEAD_SIZE = 4
ALL = Sight()
SIGHTS = [
    ALL,
    *(Sight(window=tokens) for tokens in (1, 2, 7, 8, 17, 40, 100)),
    *(Sight(chunk=tokens) for tokens in (1, 7, 8, 16, 17, 40, 100)),
]


def make_cache(
    layout: str, block_tokens: int, num_kv_heads: int, num_blocks: int = 12
) -> tuple[type[PagedBackend], Tensor]:
    """A cache in its physical order, written out here, as its logical view; full of NaN: what a
    request does not see must never reach its answer.
    """
    if layout == "HND":
        shape: tuple[int, ...] = (2, num_blocks, num_kv_heads, block_tokens, HEAD_SIZE)
        view = torch.full(shape, math.nan).permute(0, 1, 3, 2, 4)
    else:
        kernel_tokens = next(n for n in (64, 32, 16, 8) if block_tokens % n == 0)
        num_kernel_blocks = num_blocks * block_tokens // kernel_tokens
        shape = (num_kernel_blocks, 2, kernel_tokens, num_kv_heads, HEAD_SIZE)
        view = torch.full(shape, math.nan).permute(1, 0, 2, 3, 4)
    return attention_backend(layout), view


def group(block_size: int, sight: Sight) -> KVCacheGroupSpec:
    spec = attention_layer_spec(
        "a",
        block_size=block_size,
        num_kv_heads=1,
        head_size=HEAD_SIZE,
        dtype="float32",
        sliding_window=sight.window,
        attention_chunk_size=sight.chunk,
    )
    return KVCacheGroupSpec(["a"], spec)


def metadata(
    requests: Sequence[tuple[Sequence[int], int, int]], block_size: int, sight: Sight = ALL
) -> AttentionMetadata:
    """A request is (block ids, tokens already computed, new tokens)."""
    one = group(block_size, sight)
    tables = step_tables([RequestStep([ids], done, new) for ids, done, new in requests], [one])
    built: dict[str, AttentionMetadata] = build_attn_metadata(
        [PagedMetadataBuilder(one.kv_cache_spec, ["a"], Forward(), "cpu")],
        kv_cache_config=KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[one]),
        **tables,
    )
    return built["a"]


class Forward:
    """A configuration without layers: this builder reads none."""

    compilation_config: Forward
    static_forward_context: dict[str, object] = {}


Forward.compilation_config = Forward()


def sees(position: int, token: int, sight: Sight) -> bool:
    if sight.chunk is not None and token // sight.chunk != position // sight.chunk:
        return False
    return token <= position and (sight.window is None or token > position - sight.window)


def naive(query: Tensor, key: Tensor, value: Tensor, sight: Sight) -> Tensor:
    """query [new, Hq, D] is the end of the context; key and value [context, Hkv, D]."""
    new, num_query, _ = query.shape
    context, num_kv, _ = key.shape
    out = torch.empty_like(query)
    for row in range(new):
        for head in range(num_query):
            seen = [t for t in range(context) if sees(context - new + row, t, sight)]
            kv_head = head // (num_query // num_kv)
            scores = key[seen, kv_head] @ query[row, head] / math.sqrt(HEAD_SIZE)
            out[row, head] = torch.softmax(scores, 0) @ value[seen, kv_head]
    return out


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    layout=st.sampled_from(["HND", "NHD"]),
    block_tokens=st.sampled_from([8, 16, 24, 32, 40, 64]),
    num_kv_heads=st.sampled_from([1, 2, 4]),
    sight=st.sampled_from(SIGHTS),
    steps=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
)
def test_equals_naive_over_chunks_and_batches(
    layout: str,
    block_tokens: int,
    num_kv_heads: int,
    sight: Sight,
    steps: list[tuple[int, int]],
    seed: int,
) -> None:
    """Each request is computed in two chunks, together with the others, in scattered blocks. Blocks
    that the second chunk's window does not reach are dropped and overwritten before it.
    """
    backend, view = make_cache(layout, block_tokens, num_kv_heads, num_blocks=36)
    generator = torch.Generator().manual_seed(seed)
    free = torch.randperm(36, generator=generator).tolist()
    blocks = [[free.pop() for _ in range(-(-(a + b) // block_tokens))] for a, b in steps]
    qs = [torch.randn(a + b, 4, HEAD_SIZE, generator=generator) for a, b in steps]
    ks = [torch.randn(a + b, num_kv_heads, HEAD_SIZE, generator=generator) for a, b in steps]
    vs = [torch.randn(a + b, num_kv_heads, HEAD_SIZE, generator=generator) for a, b in steps]
    for spans in ([(0, a) for a, _ in steps], [(a, a + b) for a, b in steps]):
        for ids, (lo, _) in zip(blocks, spans, strict=True):
            first = next(token for token in range(lo + 1) if sees(lo, token, sight))
            for position in range(first // block_tokens):
                ratio = block_tokens // view.shape[2]
                view[:, ids[position] * ratio : (ids[position] + 1) * ratio] = math.nan
                ids[position] = -1
        meta = metadata(
            [(ids, lo, hi - lo) for ids, (lo, hi) in zip(blocks, spans, strict=True)],
            block_tokens,
            sight,
        )
        q, k, v = (
            torch.cat([t[lo:hi] for t, (lo, hi) in zip(full, spans, strict=True)])
            for full in (qs, ks, vs)
        )
        backend.write(view, k, v, meta)
        got = backend.attend(q, view, meta, sight)
        want = torch.cat(
            [
                naive(q_all[lo:hi], k_all[:hi], v_all[:hi], sight)
                for q_all, k_all, v_all, (lo, hi) in zip(qs, ks, vs, spans, strict=True)
            ]
        )
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("sight", [*map(Sight, (1, 8, 9, 20)), Sight(chunk=9), Sight(chunk=16)])
@pytest.mark.parametrize("start", [24, 27, 31, 32])
def test_each_token_that_is_seen_counts(layout: str, sight: Sight, start: int) -> None:
    """One token decoded at position ``start``, one value set apart at each position in turn: it
    reaches the answer exactly where it is in the window or the chunk.
    """
    backend, view = make_cache(layout, 8, 1)
    blocks = [5, 3, 8, 1, 2]
    key = torch.zeros(start + 1, 1, HEAD_SIZE)
    for position in range(start + 1):
        value = torch.zeros(start + 1, 1, HEAD_SIZE)
        value[position] = 1.0
        meta = metadata([(blocks, 0, start + 1)], 8)
        backend.write(view, key, value, meta)
        meta = metadata([(blocks, start, 1)], 8, sight)
        got = float(backend.attend(torch.zeros(1, 1, HEAD_SIZE), view, meta, sight)[0, 0, 0])
        num_seen = sum(sees(start, token, sight) for token in range(start + 1))
        assert got == pytest.approx(1 / num_seen if sees(start, position, sight) else 0.0)


@pytest.mark.parametrize(("layout", "block_tokens"), [("HND", 24), ("NHD", 24), ("NHD", 64)])
def test_write_touches_exactly_its_slots(layout: str, block_tokens: int) -> None:
    """Two tokens of block 3 and one of block 1, read back by an address written out by hand."""
    backend, view = make_cache(layout, block_tokens, 2, num_blocks=4)
    view.fill_(-1.0)
    meta = metadata([([3], 10, 2), ([1], 0, 1)], block_tokens)
    key = torch.arange(3 * 2 * HEAD_SIZE).view(3, 2, HEAD_SIZE).float()
    backend.write(view, key, key + 100, meta)
    assert int((view != -1.0).sum()) == 2 * key.numel()
    for row, (block, slot) in enumerate([(3, 10), (3, 11), (1, 0)]):
        for head in range(2):
            kernel = 8 if (layout, block_tokens) == ("NHD", 24) else block_tokens
            at = block * (block_tokens // kernel) + slot // kernel
            k, v = view[0, at, slot % kernel, head], view[1, at, slot % kernel, head]
            assert torch.equal(k, key[row, head])
            assert torch.equal(v, key[row, head] + 100)


def test_metadata_by_hand() -> None:
    meta = metadata([([5, 2, 7], 15, 3), ([4], 0, 2)], 8)
    assert (meta.query_starts, meta.seq_lens, meta.block_tokens) == ((0, 3, 5), (18, 2), 8)
    assert meta.block_table.tolist() == [[5, 2, 7], [4, 0, 0]]
    assert meta.slot_mapping.tolist() == [2 * 8 + 7, 7 * 8, 7 * 8 + 1, 32, 33]
    assert {meta.block_table.dtype, meta.slot_mapping.dtype} == {torch.int64}


def test_backends_say_where_their_bytes_lie() -> None:
    hnd, nhd = attention_backend("HND"), attention_backend("NHD")
    assert (hnd.get_name(), nhd.get_name()) == ("HND", "NHD")
    for backend in (hnd, nhd):
        assert backend.get_kv_cache_shape(10, 16, 2, 64) == (2, 10, 16, 2, 64)
        assert backend.get_builder_cls() is PagedMetadataBuilder
    assert hnd.get_kv_cache_stride_order() == (0, 1, 3, 2, 4)
    assert nhd.get_kv_cache_stride_order() == (1, 0, 2, 3, 4)
    assert list(hnd.get_supported_kernel_block_sizes()) == [MultipleOf(8)]
    assert list(nhd.get_supported_kernel_block_sizes()) == [8, 16, 32, 64]
    with pytest.raises(ModelError, match="layout: expected HND or NHD, got 'DNH'"):
        attention_backend("DNH")
