"""Loads between caches of other types and scales, over real wires; and who is refused one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from numpy.typing import NDArray

from kvxfer.transfer.wire import Reason
from tests.builders import EngineShape, build_memories
from tests.casts import cast_engine, expect_cast, fill, settle_nans
from tests.connector.rig import POISON, Engine, until
from tests.tensors.strided_cases import assert_same_bytes

# NumPy's, in Triton's interpreter, of values that overflow as they should
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

TWO = EngineShape(tp_size=2, num_kv_heads=4, outermost="inner")
ONE = EngineShape(num_kv_heads=4, block_tokens=32, layout="NHD", outermost="blocks")
SPAN = (16, 39)
SOURCE_IDS, SINK_IDS = (5, 2, 7), (6, 1)
Type = tuple[str, str]
BF16: Type = ("bfloat16", "none")


@contextmanager
def engines(
    given: Type, taken: Type, source: dict[str, Any], sink: dict[str, Any]
) -> Iterator[tuple[Engine, Engine]]:
    bases = cast_engine(TWO, "prefill", *given), cast_engine(ONE, "decode", *taken)
    facts = [{name: getattr(b.facts, name) for name in ("dtype", "quantisation")} for b in bases]
    with (
        Engine(TWO, "prefill", fill=POISON, base=bases[0], facts=facts[0], **source) as prefill,
        Engine(ONE, "decode", fill=POISON, base=bases[1], facts=facts[1], **sink) as decode,
    ):
        for entry, pool in zip(bases[0].ranks, prefill.pools, strict=True):
            memories = build_memories(entry, POISON)
            fill(entry, memories, SOURCE_IDS, SPAN[1])
            pool.tensor.copy_(torch.from_numpy(memories[0]))
        yield prefill, decode


def load(source: Engine, sink: Engine) -> set[str | None]:
    ref = source.offer("d", SPAN[1], SOURCE_IDS)
    source.compute("d")
    sink.load("d", ref, SINK_IDS, SPAN)
    until(lambda: sink.received("d"))
    return sink.reasons("d")


def bytes_of(engine: Engine, rank: int) -> list[NDArray[Any]]:
    return [engine.pools[rank].tensor.cpu().numpy()]


KINDS: dict[str, tuple[Type, Type]] = {
    "quantise": (BF16, ("float8_e4m3fn", "tensor")),
    "quantise by token": (BF16, ("float8_e4m3fn", "token")),
    "dequantise by token": (("float8_e4m3fn", "token"), BF16),
    "requantise": (("float8_e5m2", "head"), ("float8_e4m3fn", "tensor")),
}


@pytest.mark.parametrize(
    ("kind", "transport"),
    [
        *product(KINDS, ("shm", "zmq")),
        *product(("quantise by token", "requantise"), ("cuda_ipc",)),
    ],
)
def test_a_load_is_cast(kind: str, transport: str) -> None:
    given, taken = KINDS[kind]
    settings: dict[str, Any] = {"transport": transport, "allow_cast": True}
    with engines(given, taken, settings, settings) as (source, sink):
        assert load(source, sink) == {None}
        (entry,) = sink.manifest.ranks
        want = build_memories(entry, POISON)
        memories = {r.rank: bytes_of(source, n) for n, r in enumerate(source.manifest.ranks)}
        ids = (SOURCE_IDS, SINK_IDS)
        any_nan = expect_cast(source.manifest, memories, entry, want, ids, SPAN)
        got = bytes_of(sink, 0)
        settle_nans(got, want, any_nan)
        assert_same_bytes(got, want)


@pytest.mark.parametrize(
    ("source", "sink", "field"),
    [
        ({}, {"allow_cast": True}, "dtype: source has bfloat16, sink has float8_e4m3fn"),
        ({"allow_cast": True}, {}, "set allow_cast on both"),
        (
            {"allow_cast": True},
            {"allow_cast": True, "verify": "sample"},
            "verify: expected off with KV that is cast, got sample",
        ),
    ],
    ids=["the source allows none", "the sink allows none", "verified"],
)
def test_who_does_not_agree_is_refused_by_name(
    source: dict[str, Any], sink: dict[str, Any], field: str
) -> None:
    sides = ({"transport": "shm", **each} for each in (source, sink))
    with engines(BF16, ("float8_e4m3fn", "none"), *sides) as (prefill, decode):
        assert load(prefill, decode) == {Reason.INCOMPATIBLE}
        assert bytes_of(decode, 0)[0].min() == POISON
        assert field in decode.reports("d")[0].detail


def test_equal_types_are_copied_and_verified_as_ever() -> None:
    settings: dict[str, Any] = {"transport": "shm", "allow_cast": True}
    kind: Type = ("float8_e4m3fn", "token")
    with engines(kind, kind, settings, {**settings, "verify": "all"}) as (source, sink):
        assert load(source, sink) == {None}
        assert sink.count("verify.equal") == 2
