"""The copy by kernel against the naive oracle: on a GPU, or on the CPU in Triton's interpreter."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from kvxfer.kernels.strided_work import NUM_PARAMS, WHOLE_GPU, Launch
from kvxfer.tensors import device_copy
from kvxfer.tensors.device_copy import (
    BoundSide,
    CopySettings,
    DeviceCopier,
    Launched,
    bind_copy,
    bind_side,
    chunk_works,
    empty_works,
)
from kvxfer.tensors.device_launch import Slot, Stream
from kvxfer.tensors.device_memory import DeviceMemory
from kvxfer.tensors.strided_copy import Scratch, strided_copy
from kvxfer.tensors.strided_index import Ids, are_blocks
from kvxfer.transfer.plan import Base, CopyClass, DenseOrder, Tile, make_plan
from tests.conftest import HAS_CUDA
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
)
from tests.transfer.test_states import KINDS, StateCase, shape_of

Bytes = NDArray[np.uint8]
DEVICE = torch.device("cuda" if HAS_CUDA else "cpu")
# The interpreter takes some ms for each tile
EXAMPLES = 6 * settings().max_examples if HAS_CUDA else max(8, settings().max_examples // 3)


@dataclass(frozen=True, slots=True)
class OnDevice:
    """A pool's memories on the device, and where."""

    tensors: list[Tensor]

    @property
    def memories(self) -> list[DeviceMemory]:
        return [DeviceMemory(tensor.data_ptr(), tensor.numel()) for tensor in self.tensors]

    @property
    def arrays(self) -> list[Bytes]:
        return [tensor.cpu().numpy() for tensor in self.tensors]


def on_device(memories: Sequence[Bytes]) -> OnDevice:
    return OnDevice([torch.from_numpy(memory.copy()).to(DEVICE) for memory in memories])


def new_stream() -> torch.cuda.Stream | None:
    """One that comes behind what was done so far."""
    if not HAS_CUDA:
        return None
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    return stream


def check_direct(case: Case, copier: DeviceCopier | None = None, programs: int = 3) -> None:
    source = make_pool(case.source, case, poison=False, seed=case.seed)
    sink = make_pool(case.sink, case, poison=True, seed=case.seed + 1)
    want = expected(case, source, sink)
    given_pool, taken = on_device(source.memories), on_device(sink.memories)
    copier = copier or DeviceCopier(DEVICE)
    stream = new_stream()
    for planes, copy_class in copy_classes_of(case, source, sink).items():
        bound = bind_copy(copy_class, given_pool.memories, taken.memories)
        span = (case.token_lo, case.token_hi)
        done = copier.copy(bound, source.ids, sink.ids, span, stream=stream, programs=programs)
        num_tokens, heads = case.token_hi - case.token_lo, case.head_hi - case.head_lo
        assert done.nbytes == num_tokens * heads * case.inner_nbytes * len(planes) * NUM_LAYERS
        assert (done.event is None) == (done.nbytes == 0)
        if done.event:
            done.event.synchronize()
    assert_same_bytes(taken.arrays, want)
    assert_same_bytes(given_pool.arrays, source.memories)


def check_chunks(case: Case, chunk_tokens: int) -> None:
    """Pack by chunks of some regions and ``chunk_tokens`` tokens, any cut; unpack by launches of
    one chunk or two.
    """
    source = make_pool(case.source, case, poison=False, seed=case.seed)
    sink = make_pool(case.sink, case, poison=True, seed=case.seed + 1)
    given_pool, taken = on_device(source.memories), on_device(sink.memories)
    copier = DeviceCopier(DEVICE)
    for planes, copy_class in copy_classes_of(case, source, sink).items():
        num_regions = len(copy_class.names)
        sides = (
            bind_side(copy_class.source, given_pool.memories),
            bind_side(copy_class.sink, taken.memories),
        )
        order = copy_class.sink.tile.order
        for lo in range(case.token_lo, case.token_hi, chunk_tokens):
            tokens, cut = (lo, min(lo + chunk_tokens, case.token_hi)), lo % num_regions
            wanted = {
                regions: naive_dense(case, source, planes, *regions, *tokens)
                for regions in ((cut, min(cut + 2, num_regions)), (0, cut))
                if regions[0] < regions[1]
            }
            pieces = packed(copier, sides[0], source.ids, order, tokens, *wanted)
            assert_same_bytes([dense.cpu().numpy() for _, dense in pieces], [*wanted.values()])
            done = copier.unpack(sides[1], sink.ids, tokens, *pieces, stream=new_stream())
            over(done, sum(want.size for want in wanted.values()))
            pieces = packed(copier, sides[1], sink.ids, order, tokens, *wanted)
            assert_same_bytes([dense.cpu().numpy() for _, dense in pieces], [*wanted.values()])
    whole = expected(case, source, sink)
    for got, full, first in zip(taken.arrays, whole, sink.memories, strict=True):
        assert not (got[full == first] != first[full == first]).any()


def packed(
    copier: DeviceCopier,
    side: BoundSide,
    ids: Ids,
    order: DenseOrder,
    tokens: tuple[int, int],
    *spans: tuple[int, int],
) -> list[tuple[tuple[int, int], torch.Tensor]]:
    """A chunk of the regions of each span, of which nothing was left to chance."""
    region_nbytes = (tokens[1] - tokens[0]) * side.dense_token_nbytes
    sizes = [(hi - lo) * region_nbytes for lo, hi in spans]
    chunks = [torch.full((size,), POISON, dtype=torch.uint8, device=DEVICE) for size in sizes]
    pieces = list(zip(spans, chunks, strict=True))
    over(copier.pack(side, ids, order, tokens, *pieces, stream=new_stream()), sum(sizes))
    return pieces


def over(done: Launched, nbytes: int) -> None:
    """Wait for it: so many bytes were on their way."""
    assert done.nbytes == nbytes
    assert done.event is not None
    done.event.synchronize()


@settings(max_examples=EXAMPLES)
@given(case=cases(), programs=st.sampled_from((WHOLE_GPU, 1, 2, 5)))
def test_direct_copy_matches_the_oracle(case: Case, programs: int) -> None:
    check_direct(small(case), programs=programs)


@settings(max_examples=EXAMPLES if HAS_CUDA else EXAMPLES // 2)
@given(case=cases(), chunk_tokens=st.sampled_from((16, 24, 33, 64, 512)))
def test_chunks_match_the_oracle(case: Case, chunk_tokens: int) -> None:
    case = small(case)
    check_chunks(case, max(chunk_tokens, (case.token_hi - case.token_lo) // 2))


def small(case: Case) -> Case:
    """In the interpreter: no long rows of many tokens."""
    if HAS_CUDA:
        return case
    num_tokens = 20 if case.inner_nbytes > 100 else 80
    return replace(case, token_hi=min(case.token_hi, case.token_lo + num_tokens))


def test_a_prefix_that_ends_inside_a_block_of_kernel_blocks() -> None:
    case = one_case("HND 32", "NHD 48", span=(21, 77))
    case = replace(
        case,
        source=replace(case.source, kernel_blocks=4),
        sink=replace(case.sink, kernel_blocks=3, padding_nbytes=64),
    )
    check_direct(case)


@pytest.mark.parametrize("span", [(0, 96), (13, 77), (17, 19), (5, 24)])
@pytest.mark.parametrize(
    ("source", "sink"), [("NHD 16", "HND 24"), ("HND 64", "HND 16"), ("HND 16", "NHD 8")]
)
def test_chunks_that_cut_the_sinks_blocks(source: str, sink: str, span: tuple[int, int]) -> None:
    case = one_case(source, sink, span=span, inner=6)
    check_chunks(case, span[1] - span[0])


@pytest.mark.parametrize(
    ("source", "sink"),
    [("HND 16 turned", "NHD 24"), ("NHD 16", "HND 24 turned"), ("HND 16 turned", "HND 24 turned")],
)
def test_channels_apart(source: str, sink: str) -> None:
    case = one_case(source, sink, span=(13, 77), inner=12, channel=4)
    check_direct(case)
    check_chunks(case, 40)


@dataclass(frozen=True, slots=True)
class Small:
    """A small copy, bound."""

    source: Pool
    sink: Pool
    copy_class: CopyClass
    given: OnDevice
    taken: OnDevice


@pytest.mark.parametrize(
    ("kind", "layouts", "sizes"),
    [
        ("mamba1", ("SD", "SD"), (2, 1)),
        ("mamba2", ("SD", "DS"), (1, 2)),
        ("mamba2, one group", ("DS", "DS"), (4, 2)),
        ("gated delta net", ("DS", "SD"), (2, 4)),
    ],
)
def test_states(kind: str, layouts: tuple[str, str], sizes: tuple[int, int]) -> None:
    shapes = [
        shape_of(KINDS[kind], size, conv_layout=layout)
        for size, layout in zip(sizes, layouts, strict=True)
    ]
    state = StateCase(shapes[0], shapes[1], 37)
    given_pools = {rank: on_device(m) for rank, m in state.given.items()}
    taken = {rank: on_device(m) for rank, m in state.poisoned().items()}
    copier, stream = DeviceCopier(DEVICE), new_stream()
    for route in make_plan(state.source, state.sink).routes:
        pools = given_pools[route.source_rank].memories, taken[route.sink_rank].memories
        for copy_class, span in state.moves(route):
            given_ids = state.array(0, copy_class.source.group)
            taken_ids = state.array(1, copy_class.sink.group)
            bound = bind_copy(copy_class, *pools)
            done = copier.copy(bound, given_ids, taken_ids, span, stream=stream, programs=3)
            if done.event:
                done.event.synchronize()
    for rank, memories in state.expected().items():
        assert_same_bytes(taken[rank].arrays, memories)


def small_copy(source_layout: str = "HND 16", sink_layout: str = "NHD 32") -> Small:
    case = one_case(source_layout, sink_layout)
    source = make_pool(case.source, case, poison=False, seed=1)
    sink = make_pool(case.sink, case, poison=True, seed=2)
    copy_class = copy_class_of(case, source, sink)
    return Small(source, sink, copy_class, on_device(source.memories), on_device(sink.memories))


def test_launches_are_cut_and_made_one_by_one() -> None:
    """6 regions of 16 bytes a token: at 16 tokens in a launch, 70 tokens are 5."""
    small = small_copy()
    bound = bind_copy(small.copy_class, small.given.memories, small.taken.memories)
    copier = DeviceCopier(DEVICE, CopySettings(launch_nbytes=6 * 16 * 16))
    args = (bound, small.source.ids, small.sink.ids, (0, 70))
    stream = new_stream()
    seen = [launched.nbytes for launched in copier.launches(*args, stream=stream)]
    assert seen == [6 * 16 * tokens for tokens in (16, 32, 48, 64, 70)]
    begun = copier.launches(*args, stream=stream)
    assert [next(begun).nbytes for _ in range(2)] == [6 * 16 * 16, 6 * 16 * 32]
    assert copier.copy(*args, stream=stream).nbytes == 6 * 16 * 70


def test_a_small_ring_cuts_launches_and_is_used_again_and_again() -> None:
    """4 KiB: 512 words, of which a launch gets 128."""
    case = one_case("HND 8", "NHD 8", span=(0, 600), inner=1)
    copier = DeviceCopier(DEVICE, CopySettings(ring_nbytes=4096))
    num_ids = 512 // 4 - NUM_PARAMS - 2 * 6 - 4
    num_tokens = num_ids // 2 * 8
    assert num_tokens < 600
    for seed in range(3 if not HAS_CUDA else 50):
        check_direct(replace(case, seed=seed), copier)


def test_more_regions_than_the_ring_holds() -> None:
    small = small_copy()
    many = tuple(base for base in small.copy_class.source.bases for _ in range(20))
    taken = tuple(base for base in small.copy_class.sink.bases for _ in range(20))
    copy_class = replace(
        small.copy_class,
        source=msgspec.structs.replace(small.copy_class.source, bases=many),
        sink=msgspec.structs.replace(small.copy_class.sink, bases=taken),
    )
    bound = bind_copy(copy_class, small.given.memories, small.taken.memories)
    copier = DeviceCopier(DEVICE, CopySettings(ring_nbytes=4096))
    with pytest.raises(ValueError, match="ring_nbytes: expected .* for 120 regions, got 4096"):
        copier.copy(bound, small.source.ids, small.sink.ids, (0, 70), stream=None)


@pytest.mark.parametrize(
    ("layouts", "num_binaries"),
    [(("NHD 16", "HND 32"), 1), (("HND 16", "NHD 32"), 2), (("HND 16", "HND 16"), 2)],
)
def test_warming_copies_nothing(layouts: tuple[str, str], num_binaries: int) -> None:
    """Also where a single token needs a binary of its own, because those of a block are joined, or
    read one after the other.
    """
    small = small_copy(*layouts)
    bound = bind_copy(small.copy_class, small.given.memories, small.taken.memories)
    assert len(empty_works(bound, 3)) == num_binaries
    DeviceCopier(DEVICE).warm(bound, new_stream()).synchronize()
    assert_same_bytes(small.taken.arrays, small.sink.memories)


@example(one_case("HND 16", "HND 16", span=(13, 33), inner=6), 20, 1 << 40, 5, False)
@example(one_case("HND 16", "HND 16", span=(12, 33), inner=6), 21, 1 << 40, 5, False)
@given(
    case=cases(),
    chunk_tokens=st.sampled_from((1, 16, 24, 33)),
    dense_address=st.sampled_from([(1 << 40) + offset for offset in (0, 16, 48, 8, 4, 1)]),
    programs=st.sampled_from((WHOLE_GPU, 5)),
    is_pack=st.booleans(),
)
def test_no_access_is_wider_than_the_addresses_of_its_launch_allow(
    case: Case, chunk_tokens: int, dense_address: int, programs: int, is_pack: bool
) -> None:
    """A GPU ends with an error at an address that is no multiple; the interpreter does not mind."""
    pool = make_pool(case.sink, case, poison=True, seed=case.seed)
    memories = [DeviceMemory(1 << 30, memory.size) for memory in pool.memories]
    for copy_class in copy_classes_of(case, pool, pool).values():
        side, order = bind_side(copy_class.sink, memories), copy_class.sink.tile.order
        for lo in range(case.token_lo, case.token_hi, chunk_tokens):
            tokens = (lo, min(lo + chunk_tokens, case.token_hi))
            where = (((0, 2), dense_address),)
            for work in chunk_works(
                side, pool.ids, order, tokens, where, programs, is_pack=is_pack
            ):
                _, sources, sinks, *_ = work.arrays
                assert isinstance(work.launch, Launch)
                assert not (sources % work.launch.word_nbytes).any()
                assert not (sinks % work.launch.word_nbytes).any()


@pytest.mark.parametrize(("at", "value"), [(1, -1), (4, 8)])
@pytest.mark.parametrize("side", ["source", "sink"])
def test_ids_outside_the_pool_are_refused_as_on_the_cpu(side: str, at: int, value: int) -> None:
    small = small_copy()
    ids = {"source": small.source.ids.copy(), "sink": small.sink.ids.copy()}
    if side == "sink":
        at = min(at, 2)
        value = -1 if value < 0 else 6
    ids[side][at] = value
    bound = bind_copy(small.copy_class, small.given.memories, small.taken.memories)
    with pytest.raises(ValueError, match=rf"block_ids: expected .*, got {value}$") as on_gpu:
        DeviceCopier(DEVICE).launches(bound, ids["source"], ids["sink"], (0, 70), stream=None)
    with pytest.raises(ValueError, match="block_ids") as on_cpu:
        strided_copy(
            small.source.tensors,
            small.sink.tensors,
            small.copy_class,
            *(ids["source"], ids["sink"], (0, 70)),
            scratch=Scratch(),
        )
    assert str(on_gpu.value) == str(on_cpu.value)
    assert_same_bytes(small.taken.arrays, small.sink.memories)


def test_spans_bases_and_pairs_are_checked() -> None:
    small = small_copy()
    bound = bind_copy(small.copy_class, small.given.memories, small.taken.memories)
    copier = DeviceCopier(DEVICE)
    ids = (small.source.ids, small.sink.ids)
    with pytest.raises(ValueError, match=r"tokens: expected 0 <= lo <= hi, got \[3, 2\)"):
        copier.copy(bound, *ids, (3, 2), stream=None)
    with pytest.raises(ValueError, match="block_ids: expected int64 ids of 700 tokens"):
        copier.copy(bound, *ids, (0, 700), stream=None)
    with pytest.raises(ValueError, match="block_ids: expected int64 ids of 70 tokens"):
        copier.copy(bound, ids[0].astype(np.int32), ids[1], (0, 70), stream=None)
    shorter = [replace(memory, nbytes=memory.nbytes - 1) for memory in small.taken.memories]
    with pytest.raises(ValueError, match="base: expected .* bytes inside memory"):
        bind_copy(small.copy_class, small.given.memories, shorter)
    elsewhere = msgspec.structs.replace(small.copy_class.sink, bases=(Base(2, 0),) * 6)
    with pytest.raises(ValueError, match="base: expected one of 2 memories, got 2"):
        bind_side(elsewhere, small.taken.memories)
    fewer = msgspec.structs.replace(small.copy_class.sink, bases=small.copy_class.sink.bases[:2])
    with pytest.raises(ValueError, match="bases: expected as many on both sides, got 6 and 2"):
        bind_copy(replace(small.copy_class, sink=fewer), small.given.memories, small.taken.memories)


def test_chunks_are_checked() -> None:
    small = small_copy()
    side = bind_side(small.copy_class.sink, small.taken.memories)
    copier, ids = DeviceCopier(DEVICE), small.sink.ids
    dense = torch.zeros(2 * 70 * 16, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ValueError, match=r"chunk: expected 1120 bytes \(1 regions of 1120\)"):
        copier.unpack(side, ids, (0, 70), ((0, 1), dense), stream=None)
    with pytest.raises(ValueError, match=r"regions: expected a range of \[0, 6\), got \[5, 7\)"):
        copier.unpack(side, ids, (0, 70), ((5, 7), dense), stream=None)
    with pytest.raises(ValueError, match="chunk: expected a contiguous one-dimensional uint8"):
        copier.unpack(side, ids, (0, 70), ((0, 2), dense.view(2, -1)), stream=None)
    order = DenseOrder(32, False, channel_nbytes=4)
    with pytest.raises(ValueError, match="order: expected channels of 0 bytes like the tile"):
        copier.pack(side, ids, order, (0, 70), ((0, 2), dense), stream=None)
    with pytest.raises(ValueError, match=r"block_ids: expected ids in \[0, 6\), got -1"):
        copier.unpack(side, np.full(3, -1), (0, 70), ((0, 2), dense), stream=None)
    if HAS_CUDA:
        not_pinned = "chunk: expected a tensor on cuda or in pinned memory, got cpu"
        with pytest.raises(ValueError, match=not_pinned):
            copier.pack(side, ids, side.tile.order, (0, 70), ((0, 2), dense.cpu()), stream=None)
        with pytest.raises(ValueError, match="stream: expected one of cuda, got None"):
            copier.unpack(side, ids, (0, 70), ((0, 2), dense), stream=None)
    assert_same_bytes(small.taken.arrays, small.sink.memories)


def test_ids_of_a_transfer_are_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    small = small_copy()
    side = bind_side(small.copy_class.sink, small.taken.memories)
    copier, ids = DeviceCopier(DEVICE), small.sink.ids
    looks: list[int] = []

    def look(tile: Tile, ids: Ids) -> bool:
        looks.append(ids.size)
        return are_blocks(tile, ids)

    monkeypatch.setattr(device_copy, "are_blocks", look)

    def unpack(ids: Ids, lo: int, hi: int, side: BoundSide = side) -> None:
        dense = torch.zeros((hi - lo) * 16, dtype=torch.uint8, device=DEVICE)
        copier.unpack(side, ids, (lo, hi), ((0, 1), dense), stream=new_stream())

    for lo, hi in ((0, 32), (32, 64), (64, 70)):
        unpack(ids, lo, hi)
    assert looks == [3]
    with pytest.raises(ValueError, match="block_ids: expected int64 ids of 200 tokens"):
        unpack(ids, 64, 200)
    # Others of the same length, of which one that is not needed yet is bad
    others = ids.copy()
    others[2] = -1
    unpack(others, 0, 32)
    with pytest.raises(ValueError, match=r"block_ids: expected ids in \[0, 6\), got -1"):
        unpack(others, 64, 70)
    unpack(ids, 0, 32)
    few = msgspec.structs.replace(side.tile, num_blocks=int(ids.max()))
    with pytest.raises(ValueError, match=rf"block_ids: expected ids in \[0, {ids.max()}\)"):
        unpack(ids, 0, 70, BoundSide(tile=few, addresses=side.addresses))


@pytest.mark.parametrize(
    ("setting", "value"),
    [("launch_programs", 0), ("launch_nbytes", (1 << 30) + 1), ("ring_nbytes", 100)],
)
def test_settings_are_checked(setting: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{setting}: expected .* got {value}"):
        CopySettings(**{setting: value})


def launches_of(copier: DeviceCopier, monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Filled with what it launches from now on."""
    kept: list[Launch] = []
    launch = copier._launcher.launch

    def keep(slot: Slot, sizes: Sequence[int], each: Launch, stream: Stream) -> None:
        kept.append(each)
        launch(slot, sizes, each, stream)

    monkeypatch.setattr(copier._launcher, "launch", keep)
    return kept


def test_a_chunk_is_packed_by_the_whole_gpu_and_a_pool_read_by_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = small_copy()
    copier, stream = DeviceCopier(DEVICE, CopySettings(launch_programs=2)), new_stream()
    side = bind_side(small.copy_class.sink, small.taken.memories)
    bound = bind_copy(small.copy_class, small.given.memories, small.taken.memories)
    span, order = ((0, 2), (0, 70)), side.tile.order
    dense = torch.zeros(2 * 70 * 16, dtype=torch.uint8, device=DEVICE)
    kept = launches_of(copier, monkeypatch)
    copier.pack(side, small.sink.ids, order, span[1], (span[0], dense), stream=stream)
    copier.unpack(side, small.sink.ids, span[1], (span[0], dense), stream=stream)
    assert len(kept) >= 2
    assert all(each.alone for each in kept)
    kept.clear()
    copier.copy(bound, small.source.ids, small.sink.ids, (0, 70), stream=stream)
    copier.unpack(side, small.sink.ids, span[1], (span[0], dense), stream=stream, programs=1)
    assert {(each.alone, each.num_programs) for each in kept} <= {(False, 2), (False, 1)}
    if HAS_CUDA:
        kept.clear()
        pinned = torch.zeros_like(dense, device="cpu").pin_memory()
        copier.pack(side, small.sink.ids, order, span[1], (span[0], pinned), stream=stream)
        assert not any(each.alone for each in kept)
        torch.cuda.synchronize()


@pytest.mark.gpu
def test_the_host_does_not_wait_and_the_event_tells_the_end() -> None:
    """Behind a kernel that runs for a while. CUDA itself waits where some hundred are queued."""
    small = small_copy()
    bound = bind_copy(small.copy_class, small.given.memories, small.taken.memories)
    copier = DeviceCopier(DEVICE)
    stream = new_stream()
    assert stream is not None
    copier.warm(bound, stream).synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(6_000_000_000)  # type: ignore[no-untyped-call]  # three seconds
    args = (bound, small.source.ids, small.sink.ids)
    started_s = time.perf_counter()
    events = [copier.copy(*args, (0, 70), stream=stream).event for _ in range(40)]
    launched_s = time.perf_counter() - started_s
    assert copier.num_waits == 0
    num_over = sum(event is None or event.query() for event in events)
    assert num_over == 0, f"launched within {launched_s:.3f} s"
    last = events[-1]
    assert last is not None
    last.synchronize()
    want = expected(one_case(), small.source, small.sink)
    assert_same_bytes(small.taken.arrays, want)


@pytest.mark.gpu
def test_the_ring_under_many_launches_on_two_streams() -> None:
    """A small ring that wraps hundreds of times, its launches behind a slow kernel: every one
    still finds its own ids. Sink blocks differ by launch, so each shows in the pool.
    """
    case = one_case("HND 16", "NHD 16", span=(0, 16), inner=64)
    source = make_pool(case.source, case, poison=False, seed=1)
    sink = make_pool(case.sink, case, poison=True, seed=2)
    given_pool, taken = on_device(source.memories), on_device(sink.memories)
    bound = bind_copy(copy_class_of(case, source, sink), given_pool.memories, taken.memories)
    copier = DeviceCopier(DEVICE, CopySettings(ring_nbytes=4096))
    streams = [new_stream(), new_stream()]
    num_blocks = bound.sink.tile.num_blocks
    for number in range(300):
        stream = streams[number % 2]
        assert stream is not None
        if number % 50 == 0:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(5_000_000)  # type: ignore[no-untyped-call]
        ids = np.array([number % num_blocks], np.int64)
        copier.copy(bound, np.array([number % 2], np.int64), ids, (0, 16), stream=stream)
    torch.cuda.synchronize()
    assert copier.num_waits > 0
    # num_blocks is 4: block b was written by launches b, b + 4, ..., all of source block b % 2
    assert num_blocks == 4
    for block in range(num_blocks):
        shifted = Pool(sink.regions, sink.memories, np.array([block], np.int64))
        from_block = Pool(source.regions, source.memories, np.array([block % 2], np.int64))
        want = expected(case, from_block, shifted)
        for got, full, first in zip(taken.arrays, want, sink.memories, strict=True):
            written = full != first
            assert (got[written] == full[written]).all()
