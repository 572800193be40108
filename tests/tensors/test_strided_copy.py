"""The CPU copy against the naive oracle: every byte of the sink, and none of the source changed."""

from __future__ import annotations

import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from kvxfer.tensors.strided_copy import Scratch, gather, scatter, strided_copy
from kvxfer.transfer.plan import Base, CopyClass, DenseOrder, Side
from tests.tensors.strided_cases import (
    NUM_LAYERS,
    POISON,
    Case,
    Pool,
    assert_same_bytes,
    cases,
    copy_class_of,
    copy_classes_of,
    expected,
    make_pool,
    naive_dense,
    one_case,
    tile,
)

Bytes = NDArray[np.uint8]
EXAMPLES = 6 * settings().max_examples  # cheap, and the grid is large


def check_direct(case: Case) -> None:
    source = make_pool(case.source, case, poison=False, seed=case.seed)
    sink = make_pool(case.sink, case, poison=True, seed=case.seed + 1)
    before = [memory.copy() for memory in source.memories]
    want = expected(case, source, sink)
    for planes, copy_class in copy_classes_of(case, source, sink).items():
        nbytes = strided_copy(
            source.tensors,
            sink.tensors,
            copy_class,
            source.ids,
            sink.ids,
            (case.token_lo, case.token_hi),
            scratch=Scratch(),
        )
        num_tokens, heads = case.token_hi - case.token_lo, case.head_hi - case.head_lo
        assert nbytes == num_tokens * heads * case.inner_nbytes * len(planes) * NUM_LAYERS
    assert_same_bytes(sink.memories, want)
    assert_same_bytes(source.memories, before)


def check_chunks(case: Case, chunk_tokens: int) -> None:
    """Gather and scatter by chunks of two regions and ``chunk_tokens`` tokens, any cut."""
    source = make_pool(case.source, case, poison=False, seed=case.seed)
    sink = make_pool(case.sink, case, poison=True, seed=case.seed + 1)
    before = [memory.copy() for memory in source.memories]
    want = expected(case, source, sink)
    for planes, copy_class in copy_classes_of(case, source, sink).items():
        num_regions = len(copy_class.names)
        for region_lo in range(0, num_regions, 2):
            region_hi = min(region_lo + 2, num_regions)
            for lo in range(case.token_lo, case.token_hi, chunk_tokens):
                span = ((region_lo, region_hi), (lo, min(lo + chunk_tokens, case.token_hi)))
                check_chunk(case, source, sink, planes, copy_class, span)
    assert_same_bytes(sink.memories, want)
    assert_same_bytes(source.memories, before)


def check_chunk(
    case: Case,
    source: Pool,
    sink: Pool,
    planes: str,
    copy_class: CopyClass,
    span: tuple[tuple[int, int], tuple[int, int]],
) -> None:
    """``span``: regions and tokens."""
    (region_lo, region_hi), (lo, hi) = span
    token_nbytes = (case.head_hi - case.head_lo) * case.inner_nbytes
    nbytes = (region_hi - region_lo) * (hi - lo) * token_nbytes
    dense = torch.full((nbytes,), POISON, dtype=torch.uint8)
    order = copy_class.sink.tile.order
    gather(source.tensors, copy_class.source, source.ids, order, *span, dense)
    assert_same_bytes(
        [dense.numpy()], [naive_dense(case, source, planes, region_lo, region_hi, lo, hi)]
    )
    scatter(sink.tensors, copy_class.sink, sink.ids, *span, dense)


@settings(max_examples=EXAMPLES)
@given(case=cases())
def test_direct_copy_matches_the_oracle(case: Case) -> None:
    check_direct(case)


@settings(max_examples=EXAMPLES)
@given(case=cases(), chunk_tokens=st.sampled_from((1, 16, 24, 33, 64, 512)))
def test_chunks_match_the_oracle(case: Case, chunk_tokens: int) -> None:
    check_chunks(case, max(chunk_tokens, (case.token_hi - case.token_lo) // 8))


@pytest.mark.parametrize("sink_tokens", [8, 16, 24, 32, 64])
@pytest.mark.parametrize("source_tokens", [8, 16, 24, 32, 64])
@pytest.mark.parametrize("layouts", ["HND HND", "HND NHD", "NHD HND", "NHD NHD"])
def test_every_pair_of_block_sizes_and_layouts(
    layouts: str, source_tokens: int, sink_tokens: int
) -> None:
    source, sink = layouts.split()
    sides = f"{source} {source_tokens}", f"{sink} {sink_tokens}"
    case = one_case(*sides, span=(13, 141), inner=6)
    check_direct(case)
    check_chunks(case, 48)


@pytest.mark.parametrize("sink_tokens", [16, 24, 64])
@pytest.mark.parametrize("source_tokens", [16, 24, 64])
@pytest.mark.parametrize(
    ("turned", "layout"), [("source", "HND"), ("source", "NHD"), ("sink", "NHD"), ("both", "HND")]
)
@pytest.mark.parametrize("span", [(0, 192), (13, 141)])
def test_every_pair_of_block_sizes_with_channels_apart(
    span: tuple[int, int], turned: str, layout: str, source_tokens: int, sink_tokens: int
) -> None:
    source = f"{layout} {source_tokens} {'turned' if turned != 'sink' else ''}"
    sink = f"{layout} {sink_tokens} inner {'turned' if turned != 'source' else ''}"
    case = one_case(source, sink, span=span, inner=12, channel=4)
    check_direct(case)
    check_chunks(case, 48)


def test_sides_must_agree_on_channels() -> None:
    _, source, sink, copy_class = small_case()
    side, tile = copy_class.source, copy_class.source.tile
    by_channel = msgspec.structs.replace(
        side, tile=msgspec.structs.replace(tile, channel_nbytes=4, stride_channel=4)
    )
    with pytest.raises(ValueError, match="expected channels of 0 bytes like the sink, got 4"):
        strided_copy(
            source.tensors,
            sink.tensors,
            replace(copy_class, source=by_channel),
            source.ids,
            sink.ids,
            (0, 70),
            scratch=Scratch(),
        )
    order = DenseOrder(32, False, channel_nbytes=4)
    dense = torch.zeros(70 * 16, dtype=torch.uint8)
    with pytest.raises(ValueError, match="order: expected channels of 0 bytes like the tile"):
        gather(source.tensors, side, source.ids, order, (0, 1), (0, 70), dense)
    far = msgspec.structs.replace(
        side, tile=msgspec.structs.replace(tile, channel_nbytes=4, stride_channel=1 << 20)
    )
    with pytest.raises(ValueError, match="base: expected .* bytes inside memory 0"):
        gather(source.tensors, far, source.ids, order, (0, 1), (0, 70), dense)
    assert all((memory == POISON).all() for memory in sink.memories)


def test_pieces_are_cut_and_joined() -> None:
    # 4608 bytes a token: pieces of 1 MiB hold 227 tokens, so 400 tokens are several pieces.
    check_direct(one_case("NHD 24", "HND 32", span=(5, 405), inner=1152, num_heads=4))


def small_case() -> tuple[Case, Pool, Pool, CopyClass]:
    case = one_case()
    source = make_pool(case.source, case, poison=False, seed=1)
    sink = make_pool(case.sink, case, poison=True, seed=2)
    return case, source, sink, copy_class_of(case, source, sink)


def test_a_stop_ends_the_copy_between_pieces() -> None:
    _, source, sink, copy_class = small_case()
    answers = iter((False, False, True))
    nbytes = strided_copy(
        source.tensors,
        sink.tensors,
        copy_class,
        source.ids,
        sink.ids,
        (0, 70),
        scratch=Scratch(),
        stop=lambda: next(answers),
    )
    assert nbytes == 2 * 70 * 2 * 8  # two of six regions
    third = copy_class.sink.bases[2]
    assert (sink.memories[third.memory][third.offset :] == POISON).all()


def test_the_scratch_grows_and_stays() -> None:
    scratch = Scratch(16)
    assert scratch.take(8).size == 8
    grown = scratch.take(1000)
    assert grown.size == 1000
    assert scratch.take(10).ctypes.data == grown.ctypes.data


def wrong_ids(ids: NDArray[np.int64], at: int, value: int) -> NDArray[np.int64]:
    changed = ids.copy()
    changed[at] = value
    return changed


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (1, -1, r"block_ids: expected ids in \[0, 8\), got -1"),
        (4, 8, r"block_ids: expected ids in \[0, 8\), got 8"),
    ],
)
def test_ids_outside_the_pool_are_refused(at: int, value: int, message: str) -> None:
    _, source, sink, copy_class = small_case()
    ids = wrong_ids(source.ids, at, value)
    with pytest.raises(ValueError, match=message):
        strided_copy(
            source.tensors,
            sink.tensors,
            copy_class,
            ids,
            sink.ids,
            (0, 70),
            scratch=Scratch(),
        )
    assert all((memory == POISON).all() for memory in sink.memories)


def test_ids_outside_the_span_may_be_null() -> None:
    case, source, sink, copy_class = small_case()
    args = (source.tensors, sink.tensors, copy_class)
    strided_copy(
        *args,
        wrong_ids(source.ids, 0, -1),
        wrong_ids(sink.ids, 0, -1),
        (32, 70),
        scratch=Scratch(),
    )
    assert_same_bytes(sink.memories, expected(replace(case, token_lo=32), source, poisoned(sink)))


def poisoned(pool: Pool) -> Pool:
    return Pool(pool.regions, [np.full_like(memory, POISON) for memory in pool.memories], pool.ids)


def test_sizes_and_bases_are_checked() -> None:
    _, source, sink, copy_class = small_case()
    side, tensors, ids = copy_class.sink, sink.tensors, sink.ids
    dense = torch.zeros(70 * 16 * 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"dense: expected 1120 bytes \(1 regions of 1120\), got"):
        scatter(tensors, side, ids, (0, 1), (0, 70), dense)
    with pytest.raises(ValueError, match=r"regions: expected a range of \[0, 6\), got \[5, 7\)"):
        scatter(tensors, side, ids, (5, 7), (0, 70), dense)
    with pytest.raises(ValueError, match="block_ids: expected int64 ids of 97 tokens"):
        scatter(tensors, side, ids, (0, 1), (0, 97), dense)
    with pytest.raises(ValueError, match=r"tokens: expected 0 <= lo <= hi, got \[5, 2\)"):
        scatter(tensors, side, ids, (0, 1), (5, 2), dense)
    with pytest.raises(ValueError, match="out: expected a contiguous one-dimensional uint8"):
        gather(
            source.tensors,
            copy_class.source,
            source.ids,
            side.tile.order,
            (0, 2),
            (0, 70),
            dense.view(2, -1),
        )
    crooked = msgspec.structs.replace(side, bases=(Base(1, tensors[1].numel() - 4),))
    with pytest.raises(ValueError, match="base: expected .* bytes inside memory 1"):
        scatter(tensors, crooked, ids, (0, 1), (0, 70), dense[:1120])
    unknown = msgspec.structs.replace(side, bases=(Base(2, 0),))
    with pytest.raises(ValueError, match="base: expected one of 2 memories, got 2"):
        scatter(tensors, unknown, ids, (0, 1), (0, 70), dense[:1120])
    assert all((memory == POISON).all() for memory in sink.memories)


def test_a_read_only_source_is_enough(tmp_path: Path) -> None:
    """Any write into the mapping would kill the process."""
    case, source, sink, copy_class = small_case()
    mapped: list[Tensor] = []
    for number, memory in enumerate(source.memories):
        path = tmp_path / str(number)
        path.write_bytes(memory.tobytes())
        array = np.memmap(path, dtype=np.uint8, mode="r")
        with warnings.catch_warnings(action="ignore"):  # torch has no read-only tensors
            mapped.append(torch.from_numpy(array))
    ids = (source.ids, sink.ids)
    strided_copy(mapped, sink.tensors, copy_class, *ids, (0, 70), scratch=Scratch())
    assert_same_bytes(sink.memories, expected(case, source, poisoned(sink)))


@pytest.mark.parametrize("step", ["gather", "scatter"])
def test_other_threads_run_during_a_call(step: str) -> None:
    """32 MiB in one NumPy call: with the GIL held, this thread would stand still all the while.

    A busy machine can also make it stand still, so one good attempt is enough.
    """
    sizes = {"gather": ("HND", 16), "scatter": ("NHD", 24)}
    layout, block_tokens = sizes[step]
    own = msgspec.structs.replace(tile(layout, block_tokens, block_tokens, 8, 256), num_blocks=1024)
    side = Side(group=0, tile=own, bases=(Base(0, 0),))
    memory = torch.zeros(1024 * own.stride_block, dtype=torch.uint8)
    dense = torch.zeros(1024 * 16 * 8 * 256, dtype=torch.uint8)
    ids = np.random.default_rng(0).permutation(1024)
    order = DenseOrder(24, token_major=True)
    durations_s: list[float] = []

    def copy() -> None:
        start = time.perf_counter()
        if step == "gather":
            gather([memory], side, ids, order, (0, 1), (0, 1024 * 16), dense)
        else:
            scatter([memory], side, ids, (0, 1), (0, 1024 * 16), dense)
        durations_s.append(time.perf_counter() - start)

    longest_gaps_s: list[float] = []
    for _ in range(10):
        thread = threading.Thread(target=copy)
        thread.start()
        last, gap = time.perf_counter(), 0.0
        while thread.is_alive():
            time.sleep(0)
            now = time.perf_counter()
            last, gap = now, max(gap, now - last)
        thread.join()
        longest_gaps_s.append(gap)
        if gap < 0.3 * durations_s[-1]:
            return
    pytest.fail(f"longest gaps {longest_gaps_s} s in calls of {durations_s} s")


@pytest.mark.parametrize("gap_nbytes", [0, 3, 128, 256])
def test_regions_in_one_call_are_as_one_by_one(gap_nbytes: int) -> None:
    """Also those that do not begin at whole granules of the first, and in another order."""
    own, num_tokens = tile("HND", 16, 16, 2, 256), 9 * 16
    extent_nbytes = own.num_blocks * own.stride_block
    bases = tuple(Base(0, 64 + number * (extent_nbytes + gap_nbytes)) for number in (2, 0, 1))
    side = Side(group=0, tile=own, bases=bases)
    numbers = np.random.default_rng(0)
    memory = torch.from_numpy(numbers.integers(0, 256, 64 + 4 * extent_nbytes, dtype=np.uint8))
    ids, nbytes = numbers.permutation(100)[:9], num_tokens * 2 * 256
    together = torch.zeros(3 * nbytes, dtype=torch.uint8)
    gather([memory], side, ids, side.order, (0, 3), (0, num_tokens), together)
    taken = torch.zeros_like(memory), torch.zeros_like(memory)
    scatter([taken[0]], side, ids, (0, 3), (0, num_tokens), together)
    for region in range(3):
        alone = torch.zeros(nbytes, dtype=torch.uint8)
        span = (region, region + 1), (0, num_tokens)
        gather([memory], side, ids, side.order, *span, alone)
        assert torch.equal(together[region * nbytes : (region + 1) * nbytes], alone)
        scatter([taken[1]], side, ids, *span, alone)
    assert torch.equal(*taken)
    assert bool(taken[0].any())
