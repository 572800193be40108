"""Digests of KV against a naive one, which goes cell by cell over the addresses of the oracle: on
the CPU, and by the kernel in Triton's interpreter or on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.kernels.kv_digest import NUM_PARAMS
from kvxfer.tensors.device_digest import DeviceDigester
from kvxfer.tensors.kv_digest import (
    HEAD,
    STEP,
    TOKEN,
    Cells,
    add_digests,
    cells_of,
    mix,
    picked_tokens,
    seed_of,
)
from kvxfer.transfer.plan import PullClass, RegionName, Side
from tests.conftest import HAS_CUDA
from tests.oracle import oracle_bytes
from tests.tensors.strided_cases import (
    Case,
    Pool,
    cases,
    copy_classes_of,
    expected,
    make_pool,
    plain,
)

DEVICE = torch.device("cuda" if HAS_CUDA else "cpu")
WIDTH = 1 << 64


def naive_mix(word: int) -> int:
    """As Steele, Lea and Flood (2014) end SplitMix64."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % WIDTH
    word = (word ^ word >> 27) * 0x94D049BB133111EB % WIDTH
    return word ^ word >> 31


def naive_digest(case: Case, pool: Pool, name: RegionName, tokens: Sequence[int], seed: int) -> int:
    """By the definition, in whole numbers."""
    region = next(r for r in pool.regions if (r.layer, (r.plane,)) == (name.layer, name.planes))
    text = "\0".join((name.layer, *name.planes)).encode()
    named = int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
    total = 0
    for token in tokens:
        for head in range(case.head_lo, case.head_hi):
            inner = oracle_bytes(region, pool.memories, pool.ids.tolist(), token, head).tobytes()
            value = 0
            for number in range(-(-len(inner) // 8)):
                word = int.from_bytes(inner[8 * number : 8 * number + 8], "little")
                factor = naive_mix((seed + (number + 1) * STEP) % WIDTH) | 1
                value += (word ^ word >> 32) * factor
            key = naive_mix(named ^ seed) + head * HEAD + token * TOKEN
            total += naive_mix((value + key) % WIDTH)
    return total % WIDTH


def wanted_of(case: Case, names: tuple[RegionName, ...], side: Side) -> PullClass:
    return PullClass(
        regions=names,
        head_lo=case.head_lo,
        head_hi=case.head_hi,
        inner_nbytes=case.inner_nbytes,
        order=side.tile.order,
        token_lo=case.token_lo,
        token_hi=case.token_hi,
    )


def host_digests(pool: Pool, cells: Cells, seed: int, piece_nbytes: int = 0) -> list[int]:
    sums = np.zeros(len(cells.names), np.uint64)
    nbytes = sum(add_digests(pool.tensors, cells, seed, sums, piece_nbytes))
    assert nbytes >= cells.nbytes  # words are filled up
    found: list[int] = sums.tolist()
    return found


def kernel_digests(
    pool: Pool, classes: Sequence[Cells], seed: int, ring_nbytes: int = 1 << 16
) -> list[int]:
    memories = [tensor.to(DEVICE) for tensor in pool.tensors]
    return DeviceDigester(memories, ring_nbytes).digests(classes, seed)


def filled_alike(case: Case, source: Pool, sink: Pool) -> None:
    """The sink's cells become those of the source, by the oracle."""
    for memory, wanted in zip(sink.memories, expected(case, source, sink), strict=True):
        memory[:] = wanted


@settings(max_examples=max(10, settings().max_examples // 2))
@given(
    case=cases(),
    every=st.sampled_from((1, 2, 16)),
    seed=st.integers(0, WIDTH - 1),
    piece_nbytes=st.sampled_from((1, 5000, 0)),
)
def test_both_sides_have_the_digest_of_the_definition(
    case: Case, every: int, seed: int, piece_nbytes: int
) -> None:
    """Whatever their block sizes, layouts, heads before and behind, widths; K apart from V, K and V
    side by side, channels apart, latents (one head); and by the kernel.
    """
    source = make_pool(case.source, case, poison=False, seed=case.seed)
    sink = make_pool(case.sink, case, poison=True, seed=case.seed + 1)
    filled_alike(case, source, sink)
    for copied in copy_classes_of(case, source, sink).values():
        wanted = wanted_of(case, copied.names, copied.sink)
        tokens = picked_tokens(case.token_lo, case.token_hi, every, seed).tolist()
        digests = [naive_digest(case, source, name, tokens, seed) for name in copied.names]
        for pool, side in ((source, copied.source), (sink, copied.sink)):
            cells = cells_of(side, wanted, [pool.ids.tolist()], every, seed)
            assert host_digests(pool, cells, seed, piece_nbytes) == digests


@settings(max_examples=max(5, settings().max_examples // 12))
@given(case=cases(), every=st.sampled_from((1, 16)), seed=st.integers(0, WIDTH - 1))
def test_the_kernel_agrees(case: Case, every: int, seed: int) -> None:
    pool = make_pool(case.source, case, poison=False, seed=case.seed)
    other = make_pool(case.sink, case, poison=True, seed=case.seed)
    ids = pool.ids.tolist()
    classes = [
        cells_of(copied.source, wanted_of(case, copied.names, copied.source), [ids], every, seed)
        for copied in copy_classes_of(case, pool, other).values()
    ]
    digests = [digest for cells in classes for digest in host_digests(pool, cells, seed)]
    assert kernel_digests(pool, classes, seed) == digests


@pytest.mark.parametrize("num_tokens", [1, 20])
def test_a_load_that_fills_the_ring_many_times_has_the_same_digest(num_tokens: int) -> None:
    """In a ring of five launches of five tokens each."""
    pool = pool_of()
    (copied,) = copy_classes_of(CASE, pool, pool).values()
    wanted = wanted_of(replace(CASE, token_hi=num_tokens), copied.names, copied.sink)
    cells = cells_of(copied.source, wanted, [pool.ids.tolist()], 1, 9)
    words = 5 * (NUM_PARAMS + 3 * len(copied.names) + 8 + 11)
    twice = kernel_digests(pool, [cells, cells], 9, 8 * words)
    assert twice == host_digests(pool, cells, 9) * 2
    with pytest.raises(ValueError, match="digests: expected fewer regions"):
        kernel_digests(pool, [cells], 9, 8 * (words - 50))


@given(
    cuts=st.lists(st.integers(0, 96), max_size=4),
    head_cut=st.integers(1, 3),
    block_tokens=st.sampled_from((8, 16, 32)),
)
def test_parts_add_up(cuts: list[int], head_cut: int, block_tokens: int) -> None:
    """So the ranks of unequal TP, and chunks, make up the digest of the whole."""
    shape = plain("HND", block_tokens, num_heads=4)
    case = Case(
        source=shape, sink=shape, inner_nbytes=16, head_lo=0, head_hi=4, token_lo=0, token_hi=96,
        in_order=False, seed=1,
    )  # fmt: skip
    pool = make_pool(shape, case, poison=False, seed=1)

    def of(head_lo: int, head_hi: int, token_lo: int, token_hi: int) -> np.ndarray:
        part = replace(case, head_lo=head_lo, head_hi=head_hi, token_lo=token_lo, token_hi=token_hi)
        (copied,) = copy_classes_of(part, pool, pool).values()
        wanted = wanted_of(part, copied.names, copied.sink)
        cells = cells_of(copied.source, wanted, [pool.ids.tolist()], 1, 7)
        return np.array(host_digests(pool, cells, 7), np.uint64)

    edges = [0, *sorted(cuts), 96]
    parts = [
        of(*heads, lo, hi)
        for heads in ((0, head_cut), (head_cut, 4))
        for lo, hi in zip(edges, edges[1:], strict=False)
    ]
    assert (sum(parts[1:], parts[0]) == of(0, 4, 0, 96)).all()


@given(
    token_lo=st.integers(0, 100),
    num_tokens=st.integers(0, 200),
    every=st.integers(1, 40),
    seed=st.integers(0, WIDTH - 1),
)
def test_a_sample_takes_one_token_of_each_run(
    token_lo: int, num_tokens: int, every: int, seed: int
) -> None:
    token_hi = token_lo + num_tokens
    picked = picked_tokens(token_lo, token_hi, every, seed).tolist()
    assert all(token_lo <= token < token_hi for token in picked)
    runs = {token // every for token in range(token_lo, token_hi)}
    assert [token // every for token in picked] == sorted(runs)


def test_every_token_of_a_run_is_taken_by_some_seed() -> None:
    taken = [picked_tokens(0, 16 * 64, 16, seed_of(bytes([n]))) % 16 for n in range(8)]
    counts = np.bincount(np.concatenate(taken), minlength=16)
    assert counts.min() > 10  # 32 each, on average


# ------------------------------------------------------------------ what changes it

SHAPE = plain("NHD", 16, num_heads=2)
CASE = Case(
    source=SHAPE, sink=SHAPE, inner_nbytes=64, head_lo=0, head_hi=2, token_lo=0, token_hi=64,
    in_order=False, seed=3,
)  # fmt: skip


def digests_of(pool: Pool, seed: int = 5, names: tuple[RegionName, ...] = ()) -> list[int]:
    (copied,) = copy_classes_of(CASE, pool, pool).values()
    wanted = wanted_of(CASE, names or copied.names, copied.sink)
    return host_digests(pool, cells_of(copied.source, wanted, [pool.ids.tolist()], 1, seed), seed)


def pool_of() -> Pool:
    return make_pool(SHAPE, CASE, poison=False, seed=3)


@given(bit=st.integers(0, 64 * 8 - 1), head=st.integers(0, 1), token=st.integers(0, 63))
def test_one_bit_changes_the_digest_of_its_region_alone(bit: int, head: int, token: int) -> None:
    pool = pool_of()
    before = digests_of(pool)
    region = pool.regions[1]
    at = region.offset + int(pool.ids[token // 16]) * region.stride_block
    at += head * region.stride_head + token % 16 * region.stride_token + bit // 8
    pool.memories[region.memory][at] ^= 1 << bit % 8
    after = digests_of(pool)
    assert [was != now for was, now in zip(before, after, strict=True)] == [
        number == 1 for number in range(len(before))
    ]


@pytest.mark.parametrize("bit", [7, 15, 31, 63])
def test_the_same_high_bits_of_two_words_do_not_cancel(bit: int) -> None:
    """Without the fold two flips of bit 63 do, whatever the factors are."""
    for first, second in ((0, 1), (0, 7), (3, 4)):
        pool = pool_of()
        before = digests_of(pool)
        region = pool.regions[0]
        at = region.offset + int(pool.ids[0]) * region.stride_block
        for word in (first, second):
            pool.memories[region.memory][at + 8 * word + bit // 8] ^= 1 << bit % 8
        assert digests_of(pool)[0] != before[0]


def test_places_count_and_not_only_bytes() -> None:
    pool = pool_of()
    before = digests_of(pool)
    swapped = replace(pool, ids=pool.ids[[1, 0, 2, 3]])
    assert not set(digests_of(swapped)) & set(before)
    names = tuple(RegionName(r.layer, (r.plane,)) for r in (*pool.regions[1:], pool.regions[0]))
    assert not set(digests_of(pool, names=names)) & set(before)
    assert not set(digests_of(pool, seed=6)) & set(before)
    pool.memories[0][:], pool.memories[1][:] = 0, 0
    assert len(set(digests_of(pool))) == len(before)  # of equal cells, too


def test_numbers_of_the_definition() -> None:
    """The first numbers of SplitMix64 from seed 1234567, as its authors' code prints them."""
    states = np.arange(1, 4, dtype=np.uint64) * np.uint64(STEP) + np.uint64(1234567)
    assert mix(states).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_blocks_that_are_not_there_are_refused() -> None:
    pool = pool_of()
    (copied,) = copy_classes_of(CASE, pool, pool).values()
    wanted = wanted_of(CASE, copied.names, copied.sink)
    for wrong in ([*pool.ids[:3], -1], [*pool.ids[:3], 10_000], pool.ids[:3]):
        with pytest.raises(ValueError, match="block_ids: expected"):
            cells_of(copied.source, wanted, [list(wrong)], 1, 1)
    cells = cells_of(copied.source, wanted, [pool.ids.tolist()], 1, 1)
    with pytest.raises(ValueError, match="bytes inside memory"):
        list(add_digests([t[:100] for t in pool.tensors], cells, 1, np.zeros(6, np.uint64)))
    with pytest.raises(ValueError, match="bytes inside memory"):
        DeviceDigester([t[:100].to(DEVICE) for t in pool.tensors]).digests([cells], 1)
