"""The naive KV reader: by hand, across layouts, and over ranks with different heads."""

from __future__ import annotations

import time
from hashlib import blake2b

import msgspec
import pytest
import torch

from kvxfer.engine.digest import Difference, KVDigest, compare, kv_digests, merge_digests
from kvxfer.tensors.allocate import KVPool, KVPoolSpec, PoolLayout, allocate_kv_pool
from kvxfer.transfer.layout import Interior, Region


def value_of(layer: int, plane: int, head: int, token: int) -> float:
    return float(layer * 10000 + plane * 5000 + head * 1000 + token)


def filled_pool(
    layout: PoolLayout, block_tokens: int, heads: tuple[int, int], block_ids: list[int], tokens: int
) -> KVPool:
    """A pool whose every (layer, plane, head, token) of one request has a value of its own."""
    spec = KVPoolSpec(
        layout=layout,
        layer_names=("a", "b"),
        num_blocks=16,
        block_tokens=block_tokens,
        head_lo=heads[0],
        head_hi=heads[1],
        head_size=2,
        dtype=torch.float32,
    )
    pool = allocate_kv_pool(spec)
    pool.buffer.fill_(0xEE)
    n = spec.kernel_tokens
    for layer, view in enumerate(pool.layers.values()):
        for token in range(tokens):
            block, slot = block_ids[token // block_tokens], token % block_tokens
            for head in range(*heads):
                for plane in (0, 1):
                    value = value_of(layer, plane, head, token)
                    if layout is PoolLayout.HND:
                        view[plane, block, head - heads[0], slot] = value
                    else:
                        at = block * spec.kernel_blocks + slot // n
                        view[at, plane, slot % n, head - heads[0]] = value
    return pool


def digest(pool: KVPool, block_ids: list[int], tokens: int) -> KVDigest:
    return kv_digests(pool.regions, pool.buffer, block_ids, tokens)


HND16 = (PoolLayout.HND, 16, [9, 2, 5])
NHD24 = (PoolLayout.NHD, 24, [7, 1])


def ranks(side: tuple[PoolLayout, int, list[int]], splits: list[tuple[int, int]]) -> list[KVDigest]:
    layout, block_tokens, ids = side
    return [digest(filled_pool(layout, block_tokens, s, ids, 37), ids, 37) for s in splits]


def test_digest_by_hand() -> None:
    (rank,) = ranks(HND16, [(2, 4)])
    assert rank.num_tokens == 37
    keys = [(d.layer, d.plane, d.head) for d in rank.planes]
    assert keys == [(x, p, h) for x in ("a", "b") for p in ("k", "v") for h in (2, 3)]
    for found in rank.planes:
        layer, plane = "ab".index(found.layer), "kv".index(found.plane)
        want = b""
        for token in range(37):
            value = value_of(layer, plane, found.head, token)
            raw = torch.tensor([value, value]).numpy().tobytes()
            want += blake2b(raw, digest_size=8).digest()
        assert found.tokens == want


@pytest.mark.parametrize(
    "splits",
    [[(0, 4)], [(0, 2), (2, 4)], [(0, 1), (1, 2), (2, 3), (3, 4)], [(0, 2)] * 2 + [(2, 4)] * 2],
)
def test_equal_kv_in_any_layout_and_split_is_equal(splits: list[tuple[int, int]]) -> None:
    assert compare(ranks(HND16, [(0, 4)]), ranks(NHD24, splits)) == []
    assert compare(ranks(NHD24, splits), ranks(HND16, [(0, 4)])) == []


def test_one_changed_byte_is_named() -> None:
    layout, block_tokens, ids = NHD24
    pool = filled_pool(layout, block_tokens, (0, 4), ids, 37)
    # token 30 is slot 6 of block 1: the first kernel block of that block
    pool.layers["b"][3, 1, 6, 2, 1] += 1
    pool.layers["b"][3, 1, 7, 2, 1] += 1
    found = compare(ranks(HND16, [(0, 4)]), [digest(pool, ids, 37)])
    want = Difference(layer="b", plane="v", head=2, first_token=30, reason="source and sink differ")
    assert found == [want]
    assert str(want) == "b v head 2 from token 30: source and sink differ"


def test_slots_behind_the_last_token_do_not_count() -> None:
    layout, block_tokens, ids = HND16
    pool = filled_pool(layout, block_tokens, (0, 4), ids, 37)
    pool.layers["a"][0, 5, 0, 5] += 1  # token 37
    assert compare(ranks(NHD24, [(0, 4)]), [digest(pool, ids, 37)]) == []


def test_missing_heads_and_disagreeing_replicas_are_named() -> None:
    whole, (low,) = ranks(HND16, [(0, 2)]), ranks(HND16, [(0, 1)])
    reasons = {(d.layer, d.plane, d.head): d.reason for d in compare(whole, [low])}
    assert reasons == {(x, p, 1): "missing on the sink" for x in "ab" for p in "kv"}
    reasons = {(d.layer, d.plane, d.head): d.reason for d in compare([low], whole)}
    assert reasons == {(x, p, 1): "missing on the source" for x in "ab" for p in "kv"}
    layout, block_tokens, ids = HND16
    pool = filled_pool(layout, block_tokens, (0, 1), ids, 37)
    pool.layers["a"][0, 9, 0, 4] += 1
    torn = digest(pool, ids, 37)
    assert [str(d) for d in compare([low, torn], [low])] == [
        "a k head 0 from token 4: source replicas differ"
    ]
    assert [str(d) for d in compare([low], [low, torn])] == [
        "a k head 0 from token 4: sink replicas differ"
    ]


def test_different_lengths_differ_at_the_first_missing_token() -> None:
    layout, block_tokens, ids = HND16
    short = digest(filled_pool(layout, block_tokens, (0, 1), ids, 37), ids, 20)
    found = compare(ranks(HND16, [(0, 1)]), [short])
    assert [d.first_token for d in found] == [20] * 4


def test_travels_as_msgpack() -> None:
    (rank,) = ranks(HND16, [(0, 2)])
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(rank), type=KVDigest)
    assert compare([rank], [again]) == []
    assert merge_digests([again])[0].num_tokens == 37


def test_refusals() -> None:
    pool = filled_pool(PoolLayout.HND, 16, (0, 1), [1], 3)
    with pytest.raises(ValueError, match=r"expected ids in \[0, 16\), got 16"):
        digest(pool, [16], 3)
    with pytest.raises(ValueError, match=r"expected ids in \[0, 16\), got -1"):
        digest(pool, [-1], 3)
    with pytest.raises(ValueError, match="expected blocks for 17 tokens, got 1 of 16 tokens"):
        digest(pool, [1], 17)
    opaque: Region = msgspec.structs.replace(pool.regions[0], interior=Interior.OPAQUE)
    with pytest.raises(ValueError, match="a k: expected a plain interior, got opaque"):
        kv_digests([opaque], pool.buffer, [1], 3)
    with pytest.raises(ValueError, match="a k: expected 8 bytes at .*, got a buffer of 64"):
        kv_digests(pool.regions[:1], pool.buffer[:64], [1], 3)
    with pytest.raises(ValueError, match=r"ranks: expected one token count on all, got \[2, 3\]"):
        merge_digests([digest(pool, [1], 2), digest(pool, [1], 3)])


def test_is_quick_enough_for_every_request() -> None:
    """16 k digests: measured 20-44 ms; the limit leaves room for a busy machine."""
    spec = KVPoolSpec(
        layout=PoolLayout.NHD,
        layer_names=("a", "b", "c", "d"),
        num_blocks=16,
        block_tokens=16,
        head_lo=0,
        head_hi=8,
        head_size=64,
        dtype=torch.float32,
    )
    pool = allocate_kv_pool(spec)
    start = time.process_time()
    rank = digest(pool, list(range(16)), 256)
    elapsed_s = time.process_time() - start
    assert sum(len(plane.tokens) // 8 for plane in rank.planes) == 16384
    assert elapsed_s < 0.3
