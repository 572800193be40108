"""A manifest from the network is looked through before anything believes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvxfer.errors import IncompatiblePeer
from kvxfer.transfer.manifest import (
    EngineManifest,
    MemoryInfo,
    RankId,
    parse_endpoint,
    validate_manifest,
)
from tests.builders import EngineShape, build_manifest

Change = Callable[[EngineManifest], EngineManifest]
GOOD = build_manifest(EngineShape(tp_size=2, pp_size=2, num_kv_heads=4, num_layers=4))


def with_rank(manifest: EngineManifest, index: int = 0, **change: object) -> EngineManifest:
    ranks = list(manifest.ranks)
    ranks[index] = replace(ranks[index], **change)
    return replace(manifest, ranks=tuple(ranks))


def with_region(manifest: EngineManifest, **change: object) -> EngineManifest:
    regions = manifest.ranks[0].regions
    return with_rank(manifest, regions=(replace(regions[0], **change), *regions[1:]))


def with_facts(manifest: EngineManifest, **change: object) -> EngineManifest:
    return replace(manifest, facts=replace(manifest.facts, **change))


@pytest.mark.parametrize(
    "shape",
    [
        EngineShape(),
        EngineShape(tp_size=8, num_kv_heads=2, layout="NHD", outermost="blocks"),
        EngineShape(tp_size=4, is_mla=True, num_kv_heads=1, padding_nbytes=5),
        EngineShape(pp_size=2, block_tokens=24, kernel_blocks=3, outermost="inner"),
        EngineShape(num_layers=3, shares=((2, 0),), groups=(0, 1, 0)),
    ],
)
def test_sane_manifests_pass(shape: EngineShape) -> None:
    validate_manifest(build_manifest(shape))


CASES: list[tuple[Change, str]] = [
    (lambda m: replace(m, engine_id=""), "engine_id"),
    (lambda m: replace(m, incarnation=b"short"), "incarnation: expected 16 bytes, got 5"),
    (lambda m: replace(m, protocol=(2, 1)), "protocol: expected 1 <= min <= max"),
    (lambda m: replace(m, tp_size=0), "tp_size: expected 1 or more, got 0"),
    (lambda m: replace(m, tp_size=1 << 40), "ranks: expected at most 1024"),
    (lambda m: replace(m, ranks=m.ranks * 2000), "ranks: expected at most 1024, got 8000"),
    (lambda m: replace(m, block_tokens=-16), "block_tokens: expected 1 or more, got -16"),
    (lambda m: with_facts(m, num_kv_heads=0), "num_kv_heads"),
    (lambda m: with_facts(m, dcp_size=0), "dcp_size"),
    (lambda m: replace(m, ranks=m.ranks[:3]), "got pp1tp1 missing"),
    (lambda m: replace(m, ranks=(*m.ranks[:3], m.ranks[0])), "got pp0tp0, pp1tp1 missing, twice"),
    (lambda m: with_rank(m, rank=RankId(7, 7)), "pp7tp7"),
    (
        lambda m: with_rank(m, control_endpoint="ipc:///tmp/x"),
        "expected tcp://host:port, got 'ipc:",
    ),
    (lambda m: with_rank(m, data_endpoints={"zmq": "tcp://h:0"}), "rank pp0tp0: endpoint"),
    (lambda m: with_rank(m, memories=()), "memory: expected one of 0, got number 0"),
    (
        lambda m: with_rank(m, memories=(MemoryInfo(device="cpu", nbytes=100),)),
        "expected to end within the 100 bytes of memory 0",
    ),
    (lambda m: with_rank(m, memories=(MemoryInfo(device="cpu", nbytes=-1),)), "expected a size"),
    (lambda m: with_region(m, offset=1 << 61), "expected to end within"),
    (lambda m: with_region(m, stride_token=0), "stride_token: expected 1 or more, got 0"),
    (lambda m: with_region(m, stride_block=-256), "stride_block: expected 1 or more, got -256"),
    (lambda m: with_region(m, kernel_blocks=3), "expected a multiple of 3 kernel blocks, got 16"),
    (lambda m: with_region(m, memory=1), "memory: expected one of 1, got number 1"),
    (lambda m: with_region(m, memory=-1), "memory"),
    (lambda m: with_region(m, head_lo=5, head_hi=6), "heads: expected at most 4, got head_hi 6"),
    (lambda m: with_region(m, head_hi=0), "heads: expected head_lo < head_hi"),
    (lambda m: with_region(m, group=256), "group: expected below 256"),
    (lambda m: with_region(m, window=0), "window: expected 1 or more tokens, got 0"),
    (
        lambda m: with_region(m, window=48),
        "group 0: expected all layers to keep a window of 48 tokens in blocks of 16, got "
        "everything in blocks of 16 of layers.0/v",
    ),
    (lambda m: with_region(m, plane="v"), "region layers.0/v: expected once, got it again"),
    (lambda m: with_facts(m, is_mla=True), "heads: expected at most 1"),
]


@pytest.mark.parametrize(("change", "message"), CASES)
def test_nonsense_is_refused_by_name(change: Change, message: str) -> None:
    validate_manifest(GOOD)
    with pytest.raises(IncompatiblePeer) as e:
        validate_manifest(change(GOOD))
    assert message in str(e.value)
    assert "manifest of engine" in str(e.value)


def test_message_stays_short() -> None:
    ranks = tuple(replace(rank, control_endpoint="x" * 10_000) for rank in GOOD.ranks)
    many = replace(GOOD, ranks=tuple(replace(r, memories=()) for r in ranks))
    with pytest.raises(IncompatiblePeer, match="; and 13 more") as e:
        validate_manifest(many)
    assert len(str(e.value)) < 2000


@pytest.mark.parametrize(
    ("endpoint", "host", "port"),
    [
        ("tcp://127.0.0.1:5700", "127.0.0.1", 5700),
        ("tcp://Node-3.example:1", "node-3.example", 1),
        ("tcp://[::1]:65535", "::1", 65535),
    ],
)
def test_endpoint(endpoint: str, host: str, port: int) -> None:
    assert parse_endpoint(endpoint) == (host, port)


@pytest.mark.parametrize(
    "endpoint",
    [
        *("", "tcp://", "tcp://host", "tcp://host:", "tcp://host:0", "tcp://host:65536"),
        *(
            "tcp://host:x",
            "http://host:1",
            "tcp://host:1/path",
            "tcp://user@host:1",
            "tcp://[::1:5",
        ),
        *("tcp://a:1;tcp://b:2", "tcp:// :1 "),
    ],
)
def test_not_an_endpoint(endpoint: str) -> None:
    with pytest.raises(ValueError, match="expected tcp://host:port"):
        parse_endpoint(endpoint)


numbers = st.one_of(st.integers(-2, 40), st.integers(-(1 << 63), (1 << 64) - 1))


@given(data=st.data())
def test_hostile_numbers_end_in_one_error(data: st.DataObject) -> None:
    """Any integer of the message may be anything: accepted or refused, nothing else."""
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(GOOD))
    spots = list(_integers(plain))
    for _ in range(data.draw(st.integers(1, 3))):
        container, key = data.draw(st.sampled_from(spots))
        container[key] = data.draw(numbers)
    manifest = msgspec.convert(plain, EngineManifest)
    try:
        validate_manifest(manifest)
    except IncompatiblePeer:
        return
    for rank in manifest.ranks:
        for region in rank.regions:
            assert 0 <= region.offset < region.end <= rank.memories[region.memory].nbytes


def _integers(value: dict[Any, Any] | list[Any]) -> list[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found: list[tuple[Any, Any]] = []
    for key, member in items:
        if isinstance(member, dict | list):
            found += _integers(member)
        elif isinstance(member, int) and not isinstance(member, bool):
            found.append((value, key))
    return found


def test_rank_by_name() -> None:
    assert GOOD.rank(RankId(1, 0)) is GOOD.ranks[2]
    with pytest.raises(KeyError, match="pp2tp0"):
        GOOD.rank(RankId(2, 0))
