"""Whole engines through plan, Pull, chunk list and copy, against the naive oracle."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvxfer.tensors.strided_copy import Scratch, gather, scatter, strided_copy
from kvxfer.tensors.strided_index import side_ids
from kvxfer.transfer.chunks import chunk_list
from kvxfer.transfer.manifest import EngineManifest, RankId, RankManifest
from kvxfer.transfer.plan import make_plan
from kvxfer.transfer.pull import PullResolver, route_nbytes
from tests.builders import EngineShape, build_manifest, build_memories, pull_classes, scattered_ids
from tests.oracle import oracle_copy, oracle_fill
from tests.tensors.strided_cases import (
    POISON,
    assert_same_bytes,
)

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Engine:
    """A made-up engine with its memories, by rank."""

    manifest: EngineManifest
    memories: dict[RankId, list[Bytes]]
    ids: tuple[int, ...]

    def tensors(self, rank: RankId) -> list[Tensor]:
        return [torch.from_numpy(memory) for memory in self.memories[rank]]

    def entry(self, rank: RankId) -> RankManifest:
        return next(entry for entry in self.manifest.ranks if entry.rank == rank)


def make_engine(shape: EngineShape, name: str, num_tokens: int, *, filled: bool) -> Engine:
    manifest = build_manifest(shape, name)
    ids = scattered_ids(num_tokens, shape.table_tokens, shape.num_blocks, seed=len(name))
    memories = {entry.rank: build_memories(entry, POISON) for entry in manifest.ranks}
    if filled:
        for entry in manifest.ranks:
            oracle_fill(entry.regions, memories[entry.rank], ids=[ids], num_tokens=num_tokens)
    return Engine(manifest, memories, ids)


ENGINES = [
    pytest.param(EngineShape(tp_size=2, num_kv_heads=4), EngineShape(num_kv_heads=4), id="2 to 1"),
    pytest.param(
        EngineShape(num_kv_heads=4, outermost="inner"),
        EngineShape(tp_size=4, num_kv_heads=4, outermost="inner", block_tokens=24, kernel_blocks=3),
        id="1 to 4, K and V joined",
    ),
    pytest.param(
        EngineShape(is_mla=True, num_kv_heads=1, inner_nbytes=132, padding_nbytes=4),
        EngineShape(is_mla=True, num_kv_heads=1, inner_nbytes=132, block_tokens=64, tp_size=2),
        id="latent",
    ),
    pytest.param(
        EngineShape(tp_size=4, num_kv_heads=2, layout="NHD", outermost="blocks", num_layers=3),
        EngineShape(tp_size=2, num_kv_heads=2, block_tokens=8, num_blocks=24, num_layers=3),
        id="replicas",
    ),
    pytest.param(
        EngineShape(tp_size=2, num_kv_heads=4, turned=("k",), outermost="inner"),
        EngineShape(num_kv_heads=4, turned=("k",), outermost="inner", block_tokens=24),
        id="K turned, V behind it",
    ),
    pytest.param(
        EngineShape(num_kv_heads=4, turned=("k",), outermost="inner"),
        EngineShape(tp_size=2, num_kv_heads=4, layout="NHD", block_tokens=24, kernel_blocks=3),
        id="K turned to NHD",
    ),
    pytest.param(
        EngineShape(num_kv_heads=4, outermost="inner"),
        EngineShape(
            tp_size=2, num_kv_heads=4, turned=("k", "v"), outermost="blocks", padding_nbytes=3
        ),
        id="packed to K and V turned",
    ),
    pytest.param(
        EngineShape(tp_size=4, num_kv_heads=2, cp_size=2, turned=("k",), block_tokens=8),
        EngineShape(num_kv_heads=2, layout="NHD", block_tokens=24, kernel_blocks=3),
        id="tokens of 2 ranks to 1",
    ),
    pytest.param(
        EngineShape(num_kv_heads=1, block_tokens=24, kernel_blocks=3, outermost="blocks"),
        EngineShape(tp_size=4, num_kv_heads=1, cp_size=4, cp_run=4, block_tokens=8, turned=("k",)),
        id="tokens of 1 rank to 4",
    ),
    pytest.param(
        EngineShape(tp_size=2, num_kv_heads=1, cp_size=2, cp_run=16, padding_nbytes=4),
        EngineShape(tp_size=4, num_kv_heads=1, cp_size=4, layout="NHD", outermost="inner"),
        id="tokens of 2 ranks to 4, blocks in turn to tokens in turn",
    ),
    pytest.param(
        EngineShape(is_mla=True, inner_nbytes=132, tp_size=4, cp_size=4),
        EngineShape(is_mla=True, inner_nbytes=132, tp_size=2, cp_size=2, cp_run=3, block_tokens=12),
        id="latents of 4 ranks to 2",
    ),
]


@pytest.mark.parametrize("wire", ["direct", "chunks"])
@pytest.mark.parametrize("chunk_nbytes", [100, 1500, 1 << 20])
@pytest.mark.parametrize(("source_shape", "sink_shape"), ENGINES)
def test_routes_of_a_plan(
    source_shape: EngineShape, sink_shape: EngineShape, chunk_nbytes: int, wire: str
) -> None:
    """Whole engines, as the transports drive it: plan, Pull, chunk list."""
    span = (16, 83)
    source = make_engine(source_shape, "source", span[1], filled=True)
    sink = make_engine(sink_shape, "the sink", span[1], filled=False)
    want = make_engine(sink_shape, "the sink", span[1], filled=False)
    for route in make_plan(source.manifest, sink.manifest).routes:
        given, taken = source.tensors(route.source_rank), sink.tensors(route.sink_rank)
        classes = pull_classes(route, {0: span})
        sink_ids = [side_ids(each.sink, [sink.ids]) for each in route.classes]
        if wire == "direct":
            nbytes = 0
            for each, asked, taken_ids in zip(route.classes, classes, sink_ids, strict=True):
                ids = (side_ids(each.source, [source.ids]), taken_ids)
                tokens = asked.token_lo, asked.token_hi
                nbytes += strided_copy(given, taken, each, *ids, tokens, scratch=Scratch())
            assert nbytes == route_nbytes(classes)
            continue
        sides = PullResolver(source.entry(route.source_rank)).resolve(classes)
        for chunk in chunk_list(classes, chunk_nbytes):
            index = chunk.class_index
            dense = torch.full((chunk.nbytes,), POISON, dtype=torch.uint8)
            bounds = ((chunk.region_lo, chunk.region_hi), (chunk.token_lo, chunk.token_hi))
            source_ids = side_ids(sides[index], [source.ids])
            gather(given, sides[index], source_ids, classes[index].order, *bounds, dense)
            scatter(taken, route.classes[index].sink, sink_ids[index], *bounds, dense)
    for entry in sink.manifest.ranks:
        for giver in source.manifest.ranks:
            oracle_copy(
                giver.regions,
                source.memories[giver.rank],
                entry.regions,
                want.memories[entry.rank],
                source_ids=[source.ids],
                sink_ids=[sink.ids],
                spans={0: span},
            )
        assert_same_bytes(sink.memories[entry.rank], want.memories[entry.rank])
