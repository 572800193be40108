"""The truth about a cast, and made-up engines whose caches have types and scales.

The oracle takes one element at a time. Types are tables of exponent and mantissa bits; products and
quotients are float32. It shares nothing with the code under test, PyTorch's casts included.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
from msgspec.structs import replace

from kvxfer.transfer.layout import ITEM_NBYTES, Elements, Region
from kvxfer.transfer.manifest import EngineManifest, RankId, RankManifest
from tests.builders import EngineShape, build_manifest
from tests.oracle import Bytes, keeps, number_kept, oracle_address

TYPES = tuple(ITEM_NBYTES)
SCALES = ("none", "tensor", "head", "token")
SCALE_NBYTES = 4


@dataclass(frozen=True, slots=True)
class Format:
    """IEEE's, but for e4m3fn, which has no infinity and one NaN."""

    exponent_bits: int
    mantissa_bits: int
    largest: float
    saturates: bool = False
    has_infinity: bool = True

    @property
    def bias(self) -> int:
        return (1 << (self.exponent_bits - 1)) - 1


FORMATS = {
    "float32": Format(8, 23, float(np.finfo(np.float32).max)),
    "bfloat16": Format(8, 7, (2 - 2**-7) * 2.0**127),
    "float16": Format(5, 10, 65504.0),
    "float8_e4m3fn": Format(4, 3, 448.0, saturates=True, has_infinity=False),
    "float8_e5m2": Format(5, 2, 57344.0, saturates=True),
}


@cache
def decode(bits: int, dtype: str) -> float:
    """The number that an element's bits stand for."""
    found = FORMATS[dtype]
    mantissa = bits & ((1 << found.mantissa_bits) - 1)
    exponent = (bits >> found.mantissa_bits) & ((1 << found.exponent_bits) - 1)
    sign = -1.0 if bits >> (found.mantissa_bits + found.exponent_bits) else 1.0
    last = (1 << found.exponent_bits) - 1
    if exponent == last and found.has_infinity:
        return math.nan if mantissa else sign * math.inf
    if exponent == last and mantissa == (1 << found.mantissa_bits) - 1:
        return math.nan
    whole = mantissa + ((1 << found.mantissa_bits) if exponent else 0)
    return sign * whole * 2.0 ** (max(exponent, 1) - found.bias - found.mantissa_bits)


def encode(value: float, dtype: str) -> int | None:
    """The bits of the nearest number of a type, ties to even; None: any NaN."""
    found = FORMATS[dtype]
    if math.isnan(value):
        return None
    sign = int(math.copysign(1.0, value) < 0) << (found.mantissa_bits + found.exponent_bits)
    size = min(abs(value), found.largest) if found.saturates else abs(value)
    infinity = ((1 << found.exponent_bits) - 1) << found.mantissa_bits
    if math.isinf(size):
        return sign | infinity
    exponent = max(math.frexp(size)[1] - 1, 1 - found.bias) if size else 1 - found.bias
    whole = round(size / 2.0 ** (exponent - found.mantissa_bits))  # Python's: ties to even
    bits = whole + ((exponent + found.bias - 1) << found.mantissa_bits)
    return sign | min(bits, infinity if found.has_infinity else bits)


@cache
def naive_cast(
    cell: tuple[int, ...],
    source: str,
    sink: str,
    source_scale: float = 1.0,
    sink_scale: float | None = 1.0,
) -> tuple[list[int | None], float]:
    """The elements of one head and token, and their scale: made of them where ``sink_scale`` is
    None.
    """
    with np.errstate(all="ignore"):
        values = [np.float32(decode(bits, source)) * np.float32(source_scale) for bits in cell]
        if sink_scale is not None:
            quotients = [value / np.float32(sink_scale) for value in values]
            return [encode(float(each), sink) for each in quotients], sink_scale
        sizes = [abs(each) for each in values if not np.isnan(each)]
        most = min(max(sizes, default=np.float32(0)), np.finfo(np.float32).max)
        largest = FORMATS[sink].largest if FORMATS[sink].saturates else 1.0
        scale = max(np.float32(most) / np.float32(largest), np.float32(1e-6))
        inverse = np.float32(1) / scale
        return [encode(float(each * inverse), sink) for each in values], float(scale)


# ------------------------------------------------------------------ made-up engines


def cast_engine(
    shape: EngineShape, name: str, dtype: str, scales: str, *, num_elements: int = 8
) -> EngineManifest:
    """An engine whose planes have ``num_elements`` of a type for each head and token. With scales
    of tokens each cell ends in its scale, as vLLM has it.
    """
    tail_nbytes = SCALE_NBYTES if scales == "token" else 0
    item_nbytes = ITEM_NBYTES[dtype]
    inner_nbytes = num_elements * item_nbytes + tail_nbytes
    shape = dataclasses.replace(shape, inner_nbytes=inner_nbytes, channel_nbytes=item_nbytes)
    manifest = build_manifest(shape, name)
    facts = replace(manifest.facts, dtype=dtype, quantisation=scales, head_size=num_elements)
    ranks = tuple(_with_elements(rank, dtype, scales, tail_nbytes) for rank in manifest.ranks)
    return replace(manifest, facts=facts, ranks=ranks)


def _with_elements(rank: RankManifest, dtype: str, scales: str, tail_nbytes: int) -> RankManifest:
    regions: list[Region] = []
    for region in rank.regions:
        inner_nbytes = region.inner_nbytes - tail_nbytes
        elements = Elements(dtype, made_scales(region, scales))
        if tail_nbytes:
            plane = f"{region.plane}_scale"
            elements = Elements(dtype, scale_plane=plane)
            regions.append(
                replace(
                    region,
                    plane=plane,
                    offset=region.offset + inner_nbytes,
                    inner_nbytes=SCALE_NBYTES,
                    elements=Elements("float32"),
                )
            )
        regions.append(replace(region, inner_nbytes=inner_nbytes, elements=elements))
    return replace(rank, regions=tuple(regions))


def made_scales(region: Region, scales: str) -> tuple[float, ...]:
    """Others for each layer and plane, and each head; float32, and hardly a power of two."""
    layer = int(region.layer.rpartition(".")[2])
    of_plane = 0.25 * (layer + 1) + (0.5 if region.plane == "v" else 0.0)
    if scales == "tensor":
        return (float(np.float32(of_plane * 0.3)),)
    if scales == "head":
        heads = range(region.head_lo, region.head_hi)
        return tuple(float(np.float32(of_plane / (head + 3))) for head in heads)
    return ()


def fill(rank: RankManifest, memories: list[Bytes], ids: Sequence[int], num_tokens: int) -> None:
    """Values of every kind in the cells of a request: of the seed (layer, plane, head, token)
    alone, so that replicas agree.
    """
    for region in rank.regions:
        assert region.elements
        for head in range(region.head_lo, region.head_hi):
            for token in filter(partial(keeps, region), range(num_tokens)):
                seed = f"{region.layer} {region.plane} {head} {token}"
                if region.plane.endswith("_scale"):
                    cell = some_scale(seed)
                    places = [(0, SCALE_NBYTES)]
                else:
                    cell = some_elements(seed, region.elements.dtype, _num_elements(region))
                    places = list(_element_places(region))
                start = _cell_address(region, ids, token, head)
                for number, (at, size) in enumerate(places):
                    place = start + at
                    memories[region.memory][place : place + size] = cell[
                        number * size : (number + 1) * size
                    ]


def some_scale(seed: str) -> Bytes:
    rng = np.random.default_rng((*seed.encode(),))
    return rng.uniform(2.0**-6, 1.0, 1).astype(np.float32).view(np.uint8)


@cache
def some_elements(seed: str, dtype: str, count: int) -> Bytes:
    """Half of them of KV's size, half of any bits."""
    rng = np.random.default_rng((*seed.encode(),))
    item_nbytes = ITEM_NBYTES[dtype]
    cells = rng.integers(0, 256, (count, item_nbytes), np.uint8)
    for at in range(0, count, 2):
        bits = encode(float(np.float32(rng.normal(0, 3))), dtype)
        assert bits is not None
        cells[at] = np.frombuffer(bits.to_bytes(item_nbytes, "little"), np.uint8)
    cells.flags.writeable = False  # every rank and every test gets the same
    return cells.reshape(-1)


def expect_cast(
    source: EngineManifest,
    source_memories: Mapping[RankId, list[Bytes]],
    sink: RankManifest,
    memories: list[Bytes],
    ids: tuple[Sequence[int], Sequence[int]],
    tokens: tuple[int, int],
) -> list[tuple[int, int, str]]:
    """Write into a sink rank's memories what the copy should; returns (memory, byte, type) of what
    may be any NaN.
    """
    any_nan: list[tuple[int, int, str]] = []
    by_name = {(r.layer, r.plane): r for r in sink.regions}
    for region in sink.regions:
        if region.plane.endswith("_scale"):
            continue
        for head in range(region.head_lo, region.head_hi):
            for token in filter(partial(keeps, region), range(*tokens)):
                rank, given = _giver(source, region, head, token)
                theirs = source_memories[rank.rank]
                bits, scale = _cast_cell(rank, given, theirs, region, ids[0], token, head)
                start = _cell_address(region, ids[1], token, head)
                elements = region.elements
                assert elements
                for (at, size), each in zip(_element_places(region), bits, strict=True):
                    place = start + at
                    if each is None:
                        any_nan.append((region.memory, place, elements.dtype))
                        continue
                    raw = np.frombuffer(each.to_bytes(size, "little"), np.uint8)
                    memories[region.memory][place : place + size] = raw
                if elements.scale_plane:
                    scales = by_name[region.layer, elements.scale_plane]
                    place = _cell_address(scales, ids[1], token, head)
                    raw = np.array([scale], np.float32).view(np.uint8)
                    memories[scales.memory][place : place + SCALE_NBYTES] = raw
    return any_nan


def settle_nans(got: list[Bytes], want: list[Bytes], any_nan: list[tuple[int, int, str]]) -> None:
    """Where any NaN is right, take the one that is there."""
    for memory, place, dtype in any_nan:
        size = ITEM_NBYTES[dtype]
        raw = got[memory][place : place + size]
        if math.isnan(decode(int.from_bytes(raw.tobytes(), "little"), dtype)):
            want[memory][place : place + size] = raw


def _cast_cell(
    rank: RankManifest,
    given: Region,
    memories: list[Bytes],
    taken: Region,
    ids: Sequence[int],
    token: int,
    head: int,
) -> tuple[list[int | None], float]:
    ours, theirs = given.elements, taken.elements
    assert ours
    assert theirs
    start = _cell_address(given, ids, token, head)
    cell = tuple(
        [
            int.from_bytes(
                memories[given.memory][start + at : start + at + size].tobytes(), "little"
            )
            for at, size in _element_places(given)
        ]
    )
    source_scale = _scale(given, head)
    if ours.scale_plane:
        scales = next(
            r for r in rank.regions if (r.layer, r.plane) == (given.layer, ours.scale_plane)
        )
        at = _cell_address(scales, ids, token, head)
        raw = memories[scales.memory][at : at + SCALE_NBYTES]
        source_scale = float(np.frombuffer(raw.tobytes(), np.float32)[0])
    sink_scale = None if theirs.scale_plane else _scale(taken, head)
    return naive_cast(cell, ours.dtype, theirs.dtype, source_scale, sink_scale)


def _scale(region: Region, head: int) -> float:
    assert region.elements
    scales = region.elements.scales or (1.0,)
    return scales[head - region.head_lo] if len(scales) > 1 else scales[0]


def _giver(
    source: EngineManifest, wanted: Region, head: int, token: int
) -> tuple[RankManifest, Region]:
    for rank in source.ranks:
        for region in rank.regions:
            is_named = (region.layer, region.plane) == (wanted.layer, wanted.plane)
            if is_named and region.head_lo <= head < region.head_hi and keeps(region, token):
                return rank, region
    raise AssertionError(f"no rank has token {token}, head {head} of {wanted.layer}/{wanted.plane}")


def _num_elements(region: Region) -> int:
    assert region.elements
    return region.inner_nbytes // ITEM_NBYTES[region.elements.dtype]


def _element_places(region: Region) -> Iterator[tuple[int, int]]:
    """Bytes from the first one of a cell, and size, of each element."""
    assert region.elements
    size = ITEM_NBYTES[region.elements.dtype]
    stride = region.stride_channel or size
    for number in range(_num_elements(region)):
        yield number * stride, size


def _cell_address(region: Region, ids: Sequence[int], token: int, head: int) -> int:
    block, slot = divmod(number_kept(region, token), region.block_tokens)
    return oracle_address(region, ids[block], head, slot)
