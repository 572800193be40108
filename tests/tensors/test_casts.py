"""Copies that cast, on a CPU, against the oracle: every element and every byte beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import replace as replace_shape
from itertools import groupby, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from numpy.typing import NDArray

from kvxfer.errors import IncompatiblePeer
from kvxfer.tensors.device_copy import DeviceCopier, bind_copy, bind_side
from kvxfer.tensors.device_memory import DeviceMemory
from kvxfer.tensors.strided_copy import Scratch, gather, scatter, strided_copy
from kvxfer.tensors.strided_index import Ids, side_ids
from kvxfer.transfer.chunks import chunk_list
from kvxfer.transfer.layout import Region
from kvxfer.transfer.manifest import EngineManifest, RankId, RankManifest, validate_manifest
from kvxfer.transfer.plan import CopyClass, DenseOrder, Route, Side, make_plan
from kvxfer.transfer.pull import PullResolver, pull_class, route_nbytes
from tests import planted
from tests.builders import EngineShape, build_memories, pull_classes, scattered_ids
from tests.casts import SCALES, TYPES, cast_engine, expect_cast, fill, settle_nans
from tests.tensors.strided_cases import POISON, assert_same_bytes
from tests.tensors.test_device_copy import DEVICE, new_stream
from tests.transfer.test_interleave import shapes

# NumPy's, in Triton's interpreter, of values that overflow as they should
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

Bytes = NDArray[np.uint8]
Span = tuple[tuple[int, int], tuple[int, int]]
TOKENS = (5, 27)
SOURCE = EngineShape(tp_size=2, num_kv_heads=4, outermost="inner")
SINK = EngineShape(num_kv_heads=4, layout="NHD", block_tokens=24, kernel_blocks=3)


@dataclass(frozen=True, slots=True)
class Sides:
    """Two engines, with the source's bytes and a request's ids."""

    source: EngineManifest
    sink: EngineManifest
    given: dict[RankId, list[Bytes]]
    taken: dict[RankId, list[Bytes]]
    ids: tuple[tuple[int, ...], tuple[int, ...]]


def make_sides(source: EngineManifest, sink: EngineManifest, num_tokens: int = TOKENS[1]) -> Sides:
    ids = tuple(
        scattered_ids(
            *(num_tokens, each.block_tokens),
            *(each.ranks[0].regions[0].num_blocks, number),
        )
        for number, each in enumerate((source, sink))
    )
    given = {entry.rank: build_memories(entry, POISON) for entry in source.ranks}
    for entry in source.ranks:
        fill(entry, given[entry.rank], ids[0], num_tokens)
    taken = {entry.rank: build_memories(entry, POISON) for entry in sink.ranks}
    return Sides(source, sink, given, taken, (ids[0], ids[1]))


def check(sides: Sides, wire: str, chunk_nbytes: int = 1500) -> None:
    expect_casts(sides, carried_out(sides, wire, chunk_nbytes))


def carried_out(sides: Sides, wire: str, chunk_nbytes: int) -> dict[RankId, list[Bytes]]:
    """Whole engines, as the transports drive them: plan, Pull, chunk list. ``wire``: direct or
    chunks, and by which code. Returns what the source's memories were before.
    """
    before = {rank: [m.copy() for m in memories] for rank, memories in sides.given.items()}
    for route in make_plan(sides.source, sides.sink).routes:
        move = Move(
            route,
            sides.source.rank(route.source_rank),
            sides.given[route.source_rank],
            sides.taken[route.sink_rank],
            sides.ids,
        )
        how = by_kernel if "kernel" in wire else on_cpu
        nbytes = how(move, chunk_nbytes if "chunks" in wire else 0)
        assert nbytes == route_nbytes(pull_classes(route, {0: TOKENS}))
    return before


def expect_casts(sides: Sides, before: dict[RankId, list[Bytes]]) -> None:
    """By the oracle."""
    for entry in sides.sink.ranks:
        want = build_memories(entry, POISON)
        any_nan = expect_cast(sides.source, before, entry, want, sides.ids, TOKENS)
        settle_nans(sides.taken[entry.rank], want, any_nan)
        assert_same_bytes(sides.taken[entry.rank], want)
    for rank, memories in before.items():
        assert_same_bytes(sides.given[rank], memories)


@dataclass(frozen=True, slots=True)
class Move:
    """One route, its memories, and the ids of both sides."""

    route: Route
    source: RankManifest
    given: list[Bytes]
    taken: list[Bytes]
    tables: tuple[tuple[int, ...], tuple[int, ...]]

    def ids(self, each: CopyClass) -> tuple[Ids, Ids]:
        """Of both sides of a class."""
        return side_ids(each.source, self.tables[:1]), side_ids(each.sink, self.tables[1:])

    def chunks(
        self, chunk_nbytes: int
    ) -> Iterator[tuple[Side, Side, tuple[Ids, Ids], DenseOrder, int, Span]]:
        """Both sides of each chunk and their ids, its order and bytes, its regions and tokens."""
        classes = pull_classes(self.route, {0: TOKENS})
        resolved = PullResolver(self.source).resolve(classes)
        for chunk in chunk_list(classes, chunk_nbytes):
            index = chunk.class_index
            copied = self.route.classes[index]
            sides = resolved[index], copied.sink, self.ids(copied)
            span = ((chunk.region_lo, chunk.region_hi), (chunk.token_lo, chunk.token_hi))
            yield *sides, classes[index].order, chunk.nbytes, span


def span_of(each: CopyClass) -> tuple[int, int]:
    asked = pull_class(each, *TOKENS)
    return asked.token_lo, asked.token_hi


def on_cpu(move: Move, chunk_nbytes: int) -> int:
    given, taken = ([torch.from_numpy(m) for m in each] for each in (move.given, move.taken))
    if not chunk_nbytes:
        return sum(
            strided_copy(given, taken, each, *move.ids(each), span_of(each), scratch=Scratch())
            for each in move.route.classes
        )
    total = 0
    for source, sink, ids, order, nbytes, span in move.chunks(chunk_nbytes):
        dense = torch.full((nbytes,), POISON, dtype=torch.uint8)
        gather(given, source, ids[0], order, *span, dense)
        scatter(taken, sink, ids[1], *span, dense)
        total += nbytes
    return total


def by_kernel(move: Move, chunk_nbytes: int) -> int:
    """On a GPU, or in Triton's interpreter."""
    given, taken = (
        [torch.from_numpy(m.copy()).to(DEVICE) for m in each] for each in (move.given, move.taken)
    )
    sources, sinks = (
        [DeviceMemory(tensor.data_ptr(), tensor.numel()) for tensor in each]
        for each in (given, taken)
    )
    copier, stream, total = DeviceCopier(DEVICE), new_stream(), 0
    if not chunk_nbytes:
        for each in move.route.classes:
            bound, asked = bind_copy(each, sources, sinks), span_of(each)
            total += copier.copy(bound, *move.ids(each), asked, stream=stream, programs=3).nbytes
    else:
        chunks = move.chunks(chunk_nbytes)
        for (_, tokens), alike in groupby(chunks, key=lambda each: (id(each[1]), each[-1][1])):
            group = list(alike)
            source, sink, ids, order, *_ = group[0]
            pieces = [
                (regions, torch.full((nbytes,), POISON, dtype=torch.uint8, device=DEVICE))
                for *_, nbytes, (regions, _) in group
            ]
            side, stream = bind_side(source, sources), new_stream()  # behind the poison
            total += copier.pack(side, ids[0], order, tokens, *pieces, stream=stream).nbytes
            copier.unpack(bind_side(sink, sinks), ids[1], tokens, *pieces, stream=stream)
            copier.mark(stream).synchronize()  # the chunks are freed
    copier.mark(stream).synchronize()
    for memory, tensor in zip(move.taken, taken, strict=True):
        memory[:] = tensor.cpu().numpy()
    return total


Pair = tuple[str, str, str, str]
"""Type and scales of the source, type and scales of the sink."""


def pairs() -> list[Pair]:
    """Every two types with every two kinds of scales that make a cast."""
    return [
        each
        for each in product(TYPES, SCALES, TYPES, SCALES)
        if (each[:2] != each[2:] or each[1] in ("tensor", "head"))
        and not (each[1] == each[3] == "token")
    ]


def some_pairs() -> list[Pair]:
    """Each two types once, and each two kinds of scales."""
    kinds = [each for each in product(SCALES, SCALES) if each != ("token", "token")]
    found = []
    for number, (dtype, sink_dtype) in enumerate(product(TYPES, TYPES)):
        scales, sink_scales = kinds[number * 4 % len(kinds)]
        if dtype == sink_dtype and scales == sink_scales == "none":
            sink_scales = "tensor"
        found.append((dtype, scales, sink_dtype, sink_scales))
    return found


def sides_of(pair: Pair, name: str = "") -> tuple[EngineManifest, EngineManifest]:
    """``name``: of the shapes, if they are not those of most tests."""
    source, sink = SHAPES[name] if name else (SOURCE, SINK)
    return cast_engine(source, "source", *pair[:2]), cast_engine(sink, "sink", *pair[2:])


def check_pair(pair: Pair, wire: str) -> None:
    source, sink = sides_of(pair)
    if pair[:2] == pair[2:]:  # of the same scales nothing is cast
        sink = with_scales(sink, 1.25)
    check(make_sides(source, sink), wire, 3000)


def with_scales(engine: EngineManifest, factor: float) -> EngineManifest:
    """The engine with other scales."""

    def changed(region: Region) -> Region:
        elements = region.elements
        assert elements
        scales = tuple(scale * factor for scale in elements.scales)
        return replace(region, elements=replace(elements, scales=scales))

    ranks = (replace(r, regions=tuple(map(changed, r.regions))) for r in engine.ranks)
    return replace(engine, ranks=tuple(ranks))


@pytest.mark.parametrize("wire", ["direct", "chunks"])
@pytest.mark.parametrize("pair", some_pairs(), ids="-".join)
def test_types_and_scales(pair: Pair, wire: str) -> None:
    check_pair(pair, wire)


@pytest.fixture
def bfloat16_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("bfloat16_by_default")
@pytest.mark.parametrize("wire", ["direct", "chunks"])
@pytest.mark.parametrize("scales", ["tensor", "head"])
def test_scales_are_float32_whatever_an_engine_makes_its_default(wire: str, scales: str) -> None:
    check_pair(("bfloat16", "none", "float8_e4m3fn", scales), wire)


@pytest.mark.parametrize("wire", ["kernel", "kernel chunks"])
@pytest.mark.parametrize("pair", some_pairs()[1::5], ids="-".join)
def test_types_and_scales_by_kernel(pair: Pair, wire: str) -> None:
    check_pair(pair, wire)


SHAPES = {
    "1 to 2": (EngineShape(num_kv_heads=4), EngineShape(tp_size=2, num_kv_heads=4, layout="NHD")),
    "1 to 4, replicas": (
        EngineShape(num_kv_heads=2, block_tokens=8, layout="NHD"),
        EngineShape(tp_size=4, num_kv_heads=2, block_tokens=32, kernel_blocks=2),
    ),
    "4 to 2": (
        EngineShape(tp_size=4, num_kv_heads=4, outermost="blocks", padding_nbytes=64),
        EngineShape(tp_size=2, num_kv_heads=4, outermost="inner", block_tokens=24),
    ),
    "stages": (
        EngineShape(pp_size=2, num_kv_heads=2, block_tokens=32),
        EngineShape(num_kv_heads=2, block_tokens=16, kernel_blocks=2, layout="NHD"),
    ),
    "K turned": (
        EngineShape(num_kv_heads=4, turned=("k",), outermost="inner"),
        EngineShape(tp_size=2, num_kv_heads=4, turned=("k",), outermost="inner", block_tokens=24),
    ),
    "K turned to NHD": (
        EngineShape(num_kv_heads=2, turned=("k",), outermost="inner"),
        EngineShape(num_kv_heads=2, layout="NHD", block_tokens=8),
    ),
    "latent": (
        EngineShape(is_mla=True, num_kv_heads=1),
        EngineShape(is_mla=True, num_kv_heads=1, block_tokens=64, tp_size=2),
    ),
}
KINDS: list[Pair] = [
    ("bfloat16", "none", "float8_e4m3fn", "head"),
    ("bfloat16", "none", "float8_e4m3fn", "token"),
    ("float8_e4m3fn", "token", "float16", "none"),
    ("float8_e4m3fn", "tensor", "float8_e5m2", "head"),
]


def has_no_shape(name: str, kind: Pair) -> bool:
    """A cell that ends in its scale is not turned."""
    return "token" in kind and "turned" in name


def check_shapes(name: str, kind: Pair, wire: str) -> None:
    check(make_sides(*sides_of(kind, name)), wire, 700)


@pytest.mark.parametrize("wire", ["direct", "chunks"])
@pytest.mark.parametrize(
    ("name", "kind"), [each for each in product(SHAPES, KINDS) if not has_no_shape(*each)]
)
def test_shapes(name: str, kind: Pair, wire: str) -> None:
    check_shapes(name, kind, wire)


@pytest.mark.parametrize(
    ("name", "kind", "wire"),
    [
        ("1 to 2", KINDS[0], "kernel"),
        ("4 to 2", KINDS[1], "kernel"),
        ("stages", KINDS[2], "kernel"),
        ("K turned", KINDS[3], "kernel"),
        ("1 to 4, replicas", KINDS[0], "kernel chunks"),
        ("latent", KINDS[2], "kernel chunks"),
    ],
)
def test_shapes_by_kernel(name: str, kind: Pair, wire: str) -> None:
    check_shapes(name, kind, wire)


# ---------------------------------------------------------------- planted faults


@pytest.mark.parametrize(
    ("plant", "pair", "name", "wire"),
    [
        (
            planted.heads_in_another_order,
            ("float8_e4m3fn", "head", "float16", "none"),
            "",
            "direct",
        ),
        (planted.heads_in_another_order, KINDS[0], "", "chunks"),
        (planted.scales_of_the_source, KINDS[3], "", "direct"),
        (planted.scales_of_the_source, KINDS[3], "", "kernel"),
        (planted.truncated, ("float32", "none", "bfloat16", "none"), "", "chunks"),
        (planted.nothing_saturates, ("float16", "none", "float8_e5m2", "tensor"), "", "chunks"),
        (planted.times_the_reciprocal, ("bfloat16", "none", "float32", "tensor"), "", "kernel"),
        (planted.channels_side_by_side, KINDS[3], "K turned", "kernel"),
    ],
)
def test_planted_casts_are_found(plant: planted.Plant, pair: Pair, name: str, wire: str) -> None:
    """The oracle tells of each."""
    engines = sides_of(pair, name)
    check(make_sides(*engines), wire)
    sides = make_sides(*engines)
    with planted.planted(plant):
        before = carried_out(sides, wire, 1500)
    with pytest.raises(AssertionError, match="bytes differ"):
        expect_casts(sides, before)


# ---------------------------------------------------------------- ranks that share tokens

SHARED = [each for each in product((1, 2, 4), repeat=2) if each != (1, 1)]
OF_TOKENS = [each for each in KINDS if "token" in each]
OTHERS = [each for each in KINDS if "token" not in each]


@st.composite
def sharing(draw: st.DrawFn, cp_size: int, num_heads: int) -> EngineShape:
    """``num_heads``: of the model; 0: a latent. Elements lie at their addresses."""
    shape = draw(shapes(cp_size, num_heads, draw(st.booleans())))
    return replace_shape(shape, padding_nbytes=shape.padding_nbytes and 64)


def check_sharing(data: st.DataObject, kind: Pair, sizes: tuple[int, int], wire: str) -> None:
    """Each element is cast where its own rank keeps its token, and nothing beside it is written."""
    heads = data.draw(st.sampled_from((0, 1, 2)))
    ours, theirs = (data.draw(sharing(size, heads)) for size in sizes)
    source, sink = cast_engine(ours, "source", *kind[:2]), cast_engine(theirs, "sink", *kind[2:])
    for each in (source, sink):
        validate_manifest(each)
    check(make_sides(source, sink), wire, data.draw(st.sampled_from((150, 700))))


@pytest.mark.parametrize("wire", ["direct", "chunks"])
@pytest.mark.parametrize("sizes", SHARED)
@settings(max_examples=8)
@given(data=st.data(), kind=st.sampled_from(OTHERS))
def test_between_ranks_that_share_tokens(
    sizes: tuple[int, int], wire: str, data: st.DataObject, kind: Pair
) -> None:
    check_sharing(data, kind, sizes, wire)


@pytest.mark.parametrize("wire", ["kernel", "kernel chunks"])
@settings(max_examples=2)
@given(data=st.data(), kind=st.sampled_from(OTHERS))
def test_between_ranks_that_share_tokens_by_kernel(
    wire: str, data: st.DataObject, kind: Pair
) -> None:
    check_sharing(data, kind, (2, 4), wire)


@pytest.mark.gpu
@pytest.mark.parametrize("wire", ["kernel", "kernel chunks"])
@pytest.mark.parametrize("sizes", [(1, 2), (4, 2)])
@settings(max_examples=3)
@given(data=st.data(), kind=st.sampled_from(OTHERS))
def test_between_ranks_that_share_tokens_on_a_gpu(
    sizes: tuple[int, int], wire: str, data: st.DataObject, kind: Pair
) -> None:
    check_sharing(data, kind, sizes, wire)


TWO_RANKS = EngineShape(tp_size=2, num_kv_heads=1, num_layers=1, cp_size=2, cp_run=4)


@pytest.mark.parametrize("wire", ["direct", "chunks"])
@pytest.mark.parametrize("kind", OF_TOKENS, ids="-".join)
def test_scales_of_tokens_between_ranks_that_keep_the_same(kind: Pair, wire: str) -> None:
    sink = replace_shape(TWO_RANKS, block_tokens=32, outermost="inner")
    sides = cast_engine(TWO_RANKS, "source", *kind[:2]), cast_engine(sink, "sink", *kind[2:])
    check(make_sides(*sides), wire, 150)


@pytest.mark.parametrize("kind", OF_TOKENS, ids="-".join)
def test_scales_of_tokens_between_ranks_that_keep_others_are_refused(kind: Pair) -> None:
    for size, run in ((2, 2), (1, 1)):
        other = replace_shape(TWO_RANKS, cp_size=size, cp_run=run)
        sides = cast_engine(TWO_RANKS, "source", *kind[:2]), cast_engine(other, "sink", *kind[2:])
        with pytest.raises(IncompatiblePeer, match="scale of each token is cast between equal"):
            make_plan(*sides)


@pytest.mark.gpu
@pytest.mark.parametrize("wire", ["kernel", "kernel chunks"])
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_shapes_on_a_gpu(kind: Pair, wire: str) -> None:
    for name in SHAPES:
        if not has_no_shape(name, kind):
            check_shapes(name, kind, wire)


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["direct", "chunks", "kernel", "kernel chunks"])
@pytest.mark.parametrize("pair", pairs(), ids="-".join)
def test_every_pair_of_types_and_scales(pair: Pair, wire: str) -> None:
    check_pair(pair, wire)


@pytest.mark.gpu
@pytest.mark.parametrize("wire", ["kernel", "kernel chunks"])
@pytest.mark.parametrize("dtype", TYPES)
def test_types_and_scales_on_a_gpu(dtype: str, wire: str) -> None:
    """Not every pair: each takes the compiler some seconds."""
    for pair in some_pairs():
        if pair[0] == dtype:
            check_pair(pair, wire)
