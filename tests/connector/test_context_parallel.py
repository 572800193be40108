"""Context parallelism through whole engines: loads over every wire; earlier versions."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from typing import Any

import msgspec
import pytest

from kvxfer.errors import IncompatiblePeer
from kvxfer.transfer.compatibility import check_compatible
from kvxfer.transfer.manifest import EngineManifest
from tests.builders import EngineShape, build_manifest
from tests.conftest import HAS_CUDA
from tests.connector.rig import POISON, WIRES, Engine, expect_copied, until
from tests.connector.sides import table_of

ONE = EngineShape(
    num_kv_heads=1,
    num_blocks=24,
    inner_nbytes=32,
    block_tokens=24,
    layout="NHD",
    protocol=(1, 3),
)
TWO = replace(ONE, tp_size=2, cp_size=2, block_tokens=16, layout="HND", outermost="inner")
LATENT = EngineShape(is_mla=True, num_kv_heads=1, num_blocks=24, inner_nbytes=36, tp_size=4)
PAIRS = {
    "2 to 1": (TWO, ONE),
    "1 to 2": (ONE, replace(TWO, cp_run=4, outermost="planes")),
    "2 in blocks to 4 by token": (
        replace(TWO, cp_run=16),
        replace(TWO, tp_size=4, cp_size=4, layout="NHD"),
    ),
    "latents of 4 to 2, of 4 ranks each": (
        replace(LATENT, cp_size=4, cp_run=16),
        replace(LATENT, cp_size=2, block_tokens=8),
    ),
    "2 of 4 ranks, with K by channel, to 1": (
        replace(ONE, num_kv_heads=2, tp_size=4, cp_size=2, turned=("k",)),
        replace(ONE, num_kv_heads=2),
    ),
}
SPAN = (29, 181)


# Without a GPU its kernel is interpreted, which takes seconds
QUICK = [("2 to 1", "cuda_ipc"), ("1 to 2", "zmq"), ("2 in blocks to 4 by token", "zmq")]
LOADS = [
    pytest.param(
        *(pair, wire),
        marks=()
        if wire == "shm" or (pair, wire) in QUICK or (wire == "cuda_ipc" and HAS_CUDA)
        else pytest.mark.slow,
    )
    for pair, wire in product(PAIRS, WIRES)
]


@pytest.mark.parametrize(("pair", "wire"), LOADS)
def test_every_token_comes_from_the_rank_that_keeps_it(pair: str, wire: str) -> None:
    source_shape, sink_shape = PAIRS[pair]
    given, taken = (
        table_of(shape, SPAN[1], seed)[0] for seed, shape in enumerate((source_shape, sink_shape))
    )
    settings: dict[str, Any] = {"transport": wire}
    with ExitStack() as stack:
        source = stack.enter_context(Engine(source_shape, "prefill", fill=None, **settings))
        verify = "off" if wire == "cuda_ipc" else "all"
        sink = stack.enter_context(
            Engine(sink_shape, "decode", fill=POISON, verify=verify, **settings)
        )
        for replica, original in zip(*halves(source), strict=True):
            replica.tensor.copy_(original.tensor)
        ref = source.offer("d", SPAN[1], given)
        source.compute("d")
        sink.load("d", ref, taken, SPAN)
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {None}
        until(lambda: source.sent("d"))
        expect_copied(source, sink, given, taken, SPAN)
        assert sink.count("verify.differing") == 0
        assert bool(sink.count("verify.equal")) == (verify == "all")


def halves(source: Engine) -> tuple[list[Any], list[Any]]:
    """Pools of ranks that keep the same, and of which: here the second half of the ranks."""
    shape = source.shape
    if shape.heads_of(0) != shape.heads_of(shape.tp_size - 1) or shape.cp_size * 2 > shape.tp_size:
        return [], []
    return source.pools[shape.cp_size :], source.pools[: shape.cp_size]


# ---------------------------------------------------------------- earlier versions


def of_version_2(manifest: EngineManifest) -> EngineManifest:
    """What an engine says that does not know how tokens may be interleaved."""
    return msgspec.structs.replace(manifest, protocol=(1, 2))


def test_a_peer_of_version_2_is_served_where_every_rank_keeps_all_tokens() -> None:
    old, new = of_version_2(build_manifest(ONE, "old")), build_manifest(ONE, "new")
    check_compatible(old, new)
    check_compatible(new, old)


def test_a_peer_of_version_2_is_refused_where_ranks_keep_some_tokens() -> None:
    old, new = of_version_2(build_manifest(ONE, "old")), build_manifest(TWO, "new")
    for source, sink in ((old, new), (new, old)):
        with pytest.raises(IncompatiblePeer, match=r"protocol: .*upgrade the older side"):
            check_compatible(source, sink)


def test_a_source_of_version_2_is_refused_over_the_wire() -> None:
    """By the sink, before it asks for anything."""
    old = of_version_2(build_manifest(ONE, "prefill"))
    with (
        Engine(ONE, "prefill", fill=None, base=old, transport="zmq") as source,
        Engine(TWO, "decode", fill=POISON, transport="zmq") as sink,
    ):
        assert source.manifest.protocol == (1, 2)
        assert sink.manifest.protocol == (3, 3)
        ref = source.offer("d", 20, (1,))
        source.compute("d")
        sink.load("d", ref, (1,), (0, 20))
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"incompatible"}
        assert all(bool((pool.tensor == POISON).all()) for pool in sink.pools)
