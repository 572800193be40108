"""Latents that are packed with their scales, and compressed ones, in vLLM's own views: DeepSeek
V3.2 with its indexer and DeepSeek V4, between unlike block sizes and any tensor parallel sizes.

The truth is a second cache that is written by the layouts that vLLM's kernels state: all rows of
values of a page, then all rows of scales; one row for each k tokens, there with the last of them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import UNSET
from msgspec.structs import replace as with_fields
from torch import Tensor

from kvxfer.errors import ConfigError, IncompatiblePeer
from kvxfer.integrations.vllm.interior import Cells, Named, Opaque, Rows, look_inside, trace_rows
from kvxfer.integrations.vllm.probes import trace_packed
from kvxfer.integrations.vllm.regions import Located, locate
from kvxfer.integrations.vllm.specs import LayerSpec, layer_specs
from kvxfer.tensors.strided_copy import Scratch, gather, scatter, strided_copy
from kvxfer.transfer.chunks import chunk_list
from kvxfer.transfer.compatibility import differences
from kvxfer.transfer.manifest import EngineManifest
from kvxfer.transfer.plan import CopyClass, Plan, PullClass, Route, make_plan
from kvxfer.transfer.pull import PullResolver, pull_class
from tests import planted
from tests.vllm.test_regions import POISON, manifest, model_of

# vLLM loads parts of torch that other parts of torch call deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")

NUM_TOKENS = 700
NUM_BLOCKS = {4: 200, 8: 100, 64: 14, 128: 8, 256: 5, 512: 4}


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's cache. ``rows``: bytes of each kind of row in a page; ``kernel_tokens`` of the
    backend's blocks, None: the blocks themselves.
    """

    name: str
    rows: tuple[int, ...]
    spec: Callable[[int], Any]
    group: int = 0
    cell_tokens: int = 1
    kernel_tokens: int | None = None


def latent(block_tokens: int, **fields: Any) -> Any:
    from vllm.v1 import kv_cache_interface as interface

    defaults: dict[str, Any] = {"num_kv_heads": 1, "max_tp_shards": 1, "dtype": torch.uint8}
    return interface.MLAAttentionSpec(block_size=block_tokens, **(defaults | fields))


def packed(state_content_bytes: int, **fields: Any) -> dict[str, Any]:
    from vllm.v1.kv_cache_interface import KVQuantMode

    return {
        "head_size": 512 if state_content_bytes == 584 else 576,
        "cache_dtype_str": "fp8_ds_mla",
        "kv_quant_mode": KVQuantMode.FP8_PER_TENSOR,
        "state_content_bytes": state_content_bytes,
    } | fields


def window(tokens: int, **fields: Any) -> Callable[[int], Any]:
    def spec(block_tokens: int) -> Any:
        from vllm.v1 import kv_cache_interface as interface

        return interface.SlidingWindowMLASpec(
            block_size=block_tokens, num_kv_heads=1, sliding_window=tokens, **fields
        )

    return spec


V32 = (
    Layer("l.attn", (656,), lambda n: latent(n, **packed(656)), kernel_tokens=64),
    Layer("l.indexer", (128, 4), lambda n: latent(n, head_size=132), kernel_tokens=64),
)
V32_BF16 = (
    Layer("l.attn", (1152,), lambda n: latent(n, head_size=576, dtype=torch.bfloat16)),
    V32[1],
)
V4_FIELDS: dict[str, Any] = {"alignment": 576, "model_version": "deepseek_v4"}
V4 = (
    Layer(
        *("l0.attn", (576, 8)),
        lambda n: latent(n, tokens_per_state=4, **packed(584), **V4_FIELDS),
        cell_tokens=4,
    ),
    Layer(
        *("l1.attn", (576, 8)),
        lambda n: latent(n, tokens_per_state=128, **packed(584), **V4_FIELDS),
        cell_tokens=128,
    ),
    Layer(
        *("l0.indexer", (128, 4)),
        lambda n: latent(n, tokens_per_state=4, head_size=132, alignment=576),
        cell_tokens=4,
    ),
    Layer(
        *("l0.swa", (576, 8)),
        lambda n: window(128, dtype=torch.uint8, **packed(584), **V4_FIELDS)(64),
        group=1,
    ),
    Layer(
        *("l0.compressor", (8192,)),
        lambda n: window(8, head_size=2048, dtype=torch.float32, alignment=576)(4),
        group=2,
    ),
)


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank's poisoned cache, and what it has to be in the end."""

    layers: tuple[Layer, ...]
    views: dict[str, Tensor]
    located: Located
    expected: Tensor

    def write(self, table: dict[int, list[int]], spans: dict[int, tuple[int, int]]) -> None:
        """Put the tokens of a request where vLLM's kernels would: into ``expected``."""
        for layer in self.layers:
            view = self.views[layer.name].view(torch.uint8)
            memory = self.expected.as_strided(view.shape, view.stride(), view.storage_offset())
            tokens = self.block_tokens(layer)
            ids, (lo, hi) = table[layer.group], spans[layer.group]
            for position in range(lo, hi):
                if (position + 1) % layer.cell_tokens == 0:
                    block, slot = ids[position // tokens], position % tokens
                    self._write_cell(memory, layer, block, slot, position)

    def block_tokens(self, layer: Layer) -> int:
        return next(r.block_tokens for r in self.located.regions if r.layer == layer.name)

    def _write_cell(
        self, memory: Tensor, layer: Layer, block: int, slot: int, position: int
    ) -> None:
        cells = memory.shape[2]  # of a kernel block
        kernel_blocks = self.block_tokens(layer) // layer.cell_tokens // cells
        kernel_block, cell = divmod(slot // layer.cell_tokens, cells)
        page = memory[block * kernel_blocks + kernel_block].view(-1)
        at = 0
        for number, nbytes in enumerate(layer.rows):
            value = values_of(layer.name, number, nbytes)[position]
            page[at + cell * nbytes : at + (cell + 1) * nbytes] = value
            at += cells * nbytes

    @property
    def storage(self) -> Tensor:
        return self.located.memory.tensors[0]


@functools.cache
def values_of(layer: str, row: int, nbytes: int) -> Tensor:
    """Of each token: the same bytes for no two of them."""
    rng = np.random.default_rng([*layer.encode(), row])
    return torch.from_numpy(rng.integers(0, 256, (NUM_TOKENS, nbytes), np.uint8))


def make_rank(layers: Sequence[Layer], block_tokens: int, tp: tuple[int, int]) -> Rank:
    from vllm.v1 import kv_cache_interface as interface
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    specs = {layer.name: layer.spec(block_tokens) for layer in layers}
    num_blocks = max(NUM_BLOCKS[spec.block_size] for spec in specs.values())
    groups = []
    for _, members in itertools.groupby(layers, key=lambda layer: layer.group):
        named = {layer.name: specs[layer.name] for layer in members}
        spec = interface.UniformTypeKVCacheSpecs(next(iter(named.values())).block_size, named)
        groups.append(interface.KVCacheGroupSpec(list(named), spec))
    starts = dict.fromkeys(specs, 0)
    total = 0
    for name, spec in specs.items():
        starts[name], total = total, total + num_blocks * spec.page_size_bytes
    tensors = [
        interface.KVCacheTensor(
            size=total,
            layers=[name],
            layer_stride=num_blocks * spec.page_size_bytes,
            block_stride=spec.page_size_bytes,
            offset=starts[name],
        )
        for name, spec in specs.items()
    ]
    config = interface.KVCacheConfig(num_blocks, tensors, groups)
    views: dict[str, Tensor] = {}
    for layer, tensor in zip(layers, tensors, strict=True):
        own = interface.KVCacheConfig(num_blocks, [tensor], groups)
        kernels = [layer.kernel_tokens or specs[layer.name].block_size] * len(groups)
        views |= allocate_kv_cache(own, torch.device("cpu"), KVCacheLayout.LBHNC, kernels)
    storage = torch.full((total,), POISON, dtype=torch.uint8)
    views = {
        name: storage.view(torch.int8)
        .as_strided(
            (*view.shape[:3], view.shape[3] * view.element_size()),
            (*(stride * view.element_size() for stride in view.stride()[:3]), 1),
            starts[name],
        )
        .view(view.dtype)
        for name, view in views.items()
    }
    located = locate(
        views,
        config,
        tp_rank=tp[0],
        tp_size=tp[1],
        model=model_of(1, dtype=torch.bfloat16),
    )
    return Rank(tuple(layers), views, located, storage.clone())


class Case:
    """A request at a source and a poisoned sink; blocks of ``sizes`` on the two sides."""

    def __init__(
        self,
        layers: Sequence[Layer],
        sizes: tuple[int, int],
        tp: tuple[int, int] = (1, 1),
        span: tuple[int, int] = (0, NUM_TOKENS),
    ) -> None:
        self.ranks = [
            [make_rank(layers, size, (rank, num)) for rank in range(num)]
            for size, num in zip(sizes, tp, strict=True)
        ]
        self.tables = [
            {
                layer.group: scattered(ranks[0], layer, 7 * side + layer.group)
                for layer in ranks[0].layers
            }
            for side, ranks in enumerate(self.ranks)
        ]
        self.spans = {}
        for layer in layers:
            spec = layer.spec(sizes[1])
            first = span[1] - (getattr(spec, "sliding_window", None) or NUM_TOKENS + 1) + 1
            kept = max(0, first) // spec.block_size * spec.block_size
            self.spans[layer.group] = (max(span[0], kept), span[1])
        everything = dict.fromkeys(self.spans, (0, NUM_TOKENS))
        for rank in self.ranks[0]:
            rank.write(self.tables[0], everything)
            rank.storage.copy_(rank.expected)
        for rank in self.ranks[1]:
            rank.write(self.tables[1], self.spans)

    def plan(self) -> Plan:
        # Block tokens of the manifests say nothing of groups.
        return make_plan(*(manifest([r.located for r in ranks], 1) for ranks in self.ranks))

    def pull(self, plan: Plan) -> None:
        """As direct wires do."""
        for route, given, taken in self._routes(plan):
            for copied in route.classes:
                asked = pull_class(copied, *self.spans[copied.sink.group])
                ids = (self._array(0, copied.source.group), self._array(1, copied.sink.group))
                strided_copy(
                    *(given, taken, copied, *ids, (asked.token_lo, asked.token_hi)),
                    scratch=Scratch(),
                )

    def stream(self, plan: Plan, chunk_nbytes: int) -> None:
        """As stream wires do; all chunks of growing spans of the request."""
        for route, given, taken in self._routes(plan):
            wanted = [pull_class(each, *self.spans[each.sink.group]) for each in route.classes]
            source = manifest([r.located for r in self.ranks[0]], 1)
            sides = PullResolver(source.rank(route.source_rank)).resolve(wanted)
            for chunk in chunk_list(wanted, chunk_nbytes):
                number = chunk.class_index
                bounds = ((chunk.region_lo, chunk.region_hi), (chunk.token_lo, chunk.token_hi))
                side, sink = sides[number], route.classes[number].sink
                dense = torch.full((chunk.nbytes,), 1, dtype=torch.uint8)
                order = wanted[number].order
                gather(given, side, self._array(0, side.group), order, *bounds, dense)
                scatter(taken, sink, self._array(1, sink.group), *bounds, dense)

    def check(self) -> None:
        for rank in self.ranks[1]:
            wrong = (rank.storage != rank.expected).nonzero()
            assert not len(wrong), f"{len(wrong)} bytes differ, first at {int(wrong[0])}"

    def _routes(self, plan: Plan) -> Iterator[tuple[Route, Any, Any]]:
        for route in plan.routes:
            given = self.ranks[0][route.source_rank.tp].located.memory.tensors
            yield route, given, self.ranks[1][route.sink_rank.tp].located.memory.tensors

    def _array(self, side: int, group: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.array(self.tables[side][group], np.int64)


def scattered(rank: Rank, layer: Layer, seed: int) -> list[int]:
    region = next(r for r in rank.located.regions if r.layer == layer.name)
    order = np.random.default_rng(seed).permutation(region.num_blocks)
    return [int(block) for block in order[: -(-NUM_TOKENS // region.block_tokens)]]


MODELS = {"V3.2": V32, "V3.2, bfloat16": V32_BF16, "V4": V4}
SIZES = {
    "V3.2": ((64, 64), (64, 256), (128, 64)),
    "V3.2, bfloat16": ((64, 128),),
    "V4": ((256, 256), (256, 512), (512, 256)),
}


@pytest.mark.parametrize(
    ("model", "sizes"), [(model, sizes) for model in SIZES for sizes in SIZES[model]]
)
def test_packed_latents_move_exactly(model: str, sizes: tuple[int, int]) -> None:
    """Whole, from a prefix on that ends within a state, and over a stream in small chunks."""
    pytest.importorskip("vllm")
    for lo, hi in ((0, NUM_TOKENS), (130, NUM_TOKENS), (256, NUM_TOKENS - 1)):
        case = Case(MODELS[model], sizes, span=(lo, hi))
        case.pull(case.plan())
        case.check()
    case = Case(MODELS[model], sizes)
    case.stream(case.plan(), 5000)
    case.check()


def a_state_that_is_not_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last state moves before its last token is there."""
    asked_of = pull_class

    def asked(copied: CopyClass, lo: int, hi: int) -> PullClass:
        tokens = copied.sink.cell_tokens
        return asked_of(copied, lo, -(-hi // tokens) * tokens)

    monkeypatch.setitem(globals(), "pull_class", asked)


@pytest.mark.parametrize(
    "plant",
    [
        planted.no_scales,
        planted.scales_first,
        planted.cells_of_twice_the_tokens,
        a_state_that_is_not_full,
    ],
)
def test_planted_latents_are_found(plant: planted.Plant) -> None:
    """As :func:`test_packed_latents_move_exactly` compares them."""
    pytest.importorskip("vllm")
    with planted.planted(plant):
        case = Case(V4, (256, 512), span=(256, NUM_TOKENS - 1))
        case.pull(case.plan())
    with pytest.raises(AssertionError, match="bytes differ"):
        case.check()


@pytest.mark.parametrize("model", ["V3.2", "V4"])
def test_every_pair_of_tensor_parallel_sizes(model: str) -> None:
    """Each sink rank reads all of a source rank's latents; the load is spread over the sources."""
    pytest.importorskip("vllm")
    for tp in [(source, sink) for source in (1, 2, 4) for sink in (1, 2, 4)]:
        case = Case(MODELS[model], SIZES[model][1], tp, span=(600, NUM_TOKENS))
        plan = case.plan()
        reading = [(r.sink_rank.tp, r.source_rank.tp) for r in plan.routes if not r.is_null]
        assert reading == [(sink, sink * tp[0] // tp[1]) for sink in range(tp[1])]
        assert {route.source_rank.tp for route in plan.routes} == set(range(tp[0]))
        case.pull(plan)
        case.check()


def test_blocks_that_were_another_type_s_are_cleared_before_they_are_filled_in_part() -> None:
    """Groups of V4 share their memory, and the layers of V3.2 do not."""
    pytest.importorskip("vllm")
    assert not make_rank(V32_BF16, 64, (0, 1)).located.cleared
    rank = make_rank(V4, 256, (0, 1))
    blocks = {(each.group, each.table_tokens): each for each in rank.located.cleared}
    assert list(blocks) == [(0, 256), (1, 64), (2, 4)]
    blocks[0, 256].clear(((3, 1), (), ()), 300)
    for layer in V4[:3]:
        view = rank.views[layer.name]
        assert not view[1].any()
        assert (view[3] == torch.tensor(POISON, dtype=torch.uint8)).all()


def test_other_types_and_compressions_are_refused_by_name() -> None:
    pytest.importorskip("vllm")
    ranks = {
        name: manifest([make_rank(layers, 256, (0, 1)).located], 1)
        for name, layers in (MODELS | {"V4, 8 tokens": other_compression()}).items()
    }
    names = {"V3.2": "uint8", "V3.2, bfloat16": "bfloat16, uint8"}
    stated = [with_dtype(ranks[name], dtype) for name, dtype in names.items()]
    found = differences(*map(without_elements, stated))
    assert [each.field for each in found] == ["dtype", "inner_nbytes of l.attn/latent"]
    with pytest.raises(
        IncompatiblePeer, match="latent heads .*: source has fp8_ds_mla; what can be cast is"
    ):
        make_plan(*stated)
    with pytest.raises(
        IncompatiblePeer, match="l0.attn/latent .*: source has cells of 4 tokens, sink of 8"
    ):
        make_plan(ranks["V4"], ranks["V4, 8 tokens"])


def with_dtype(found: EngineManifest, dtype: str) -> EngineManifest:
    return with_fields(found, facts=with_fields(found.facts, dtype=dtype))


def without_elements(found: EngineManifest) -> EngineManifest:
    """As of an engine that allows no casts."""
    (rank,) = found.ranks
    regions = tuple(with_fields(region, elements=UNSET) for region in rank.regions)
    return with_fields(found, ranks=(with_fields(rank, regions=regions),))


def other_compression() -> tuple[Layer, ...]:
    first = V4[0]
    spec = latent(256, tokens_per_state=8, **packed(584), **V4_FIELDS)
    return (replace(first, spec=lambda n: spec, cell_tokens=8), *V4[1:])


def test_a_block_that_states_do_not_divide_is_refused() -> None:
    pytest.importorskip("vllm")
    spec = latent(64, tokens_per_state=128, head_size=512)
    group = SimpleNamespace(layer_names=["l"], kv_cache_spec=spec)
    with pytest.raises(
        ConfigError, match="block_size: expected a multiple of the 128 tokens that share .* got 64"
    ):
        layer_specs(SimpleNamespace(kv_cache_groups=[group]))


# ------------------------------------------------------------------ what a writer is seen to do


@pytest.mark.gpu  # vLLM has these operators on GPUs only
@pytest.mark.parametrize(("quantisation", "cell_nbytes"), [("none", 132), ("fp8_ds_mla", 656)])
def test_vllm_s_operators_write_the_rows(quantisation: str, cell_nbytes: int) -> None:
    """Those of the indexer and of FlashMLA's latents."""
    rows = trace_packed(quantisation, 64, cell_nbytes, torch.device("cuda", 0))
    assert rows is not None, "the operator could not be asked"
    head_size = 576 if cell_nbytes == 656 else cell_nbytes
    spec = replace(INDEXER, block_tokens=64, head_size=head_size, quantisation=quantisation)
    cells = replace(INDEXER_CELLS, num_tokens=64, cell_nbytes=cell_nbytes, stride_token=cell_nbytes)
    assert isinstance(look_inside("l", spec, cells, trace=rows), Named)


INDEXER = LayerSpec(
    block_tokens=8,
    num_kv_heads=1,
    head_size=132,
    head_size_v=0,
    dtype=torch.uint8,
    is_latent=True,
)
INDEXER_CELLS = Cells(
    num_slots=1, num_tokens=8, cell_nbytes=132, stride_slot=8 * 132, stride_token=132
)


def written(rows: tuple[int, ...], num_tokens: int = 8) -> Rows:
    """Of a writer with these rows; it leaves the last byte of a row out."""
    pool = torch.empty(3, num_tokens, sum(rows), dtype=torch.uint8)

    def write(cache: Tensor, slots: Tensor) -> None:
        page, at = cache[int(slots[0]) // num_tokens].flatten(), 0
        for nbytes in rows:
            first = at + int(slots[0]) % num_tokens * nbytes
            page[first : first + max(1, nbytes - 1)] = 7
            at += num_tokens * nbytes
        cache[int(slots[0]) // num_tokens] = page.reshape(cache.shape[1:])

    return trace_rows(write, pool)


def test_a_writer_confirms_the_rows_or_its_blocks_move_whole() -> None:
    spec, cells = INDEXER, INDEXER_CELLS
    stated = look_inside("l", spec, cells)
    assert isinstance(stated, Named)
    assert [(p.offset, p.inner_nbytes, p.stride_token) for p in stated.planes] == [
        (0, 128, 128),
        (1024, 4, 4),
    ]
    assert look_inside("l", spec, cells, trace=written((128, 4))) == stated
    for rows in ((132,), (4, 128), (120, 12)):
        assert isinstance(look_inside("l", spec, cells, trace=written(rows)), Opaque)
    silent = trace_rows(lambda cache, slots: None, torch.empty(3, 8, 132, dtype=torch.uint8))
    assert isinstance(look_inside("l", spec, cells, trace=silent), Opaque)
    with pytest.raises(ConfigError, match="l: interior: expected states of 4 tokens at constant"):
        look_inside("l", replace(spec, cell_tokens=4), cells, trace=silent)
    with pytest.raises(ConfigError, match="expected the platform to write tokens into their own"):
        trace_rows(write_everywhere, torch.empty(3, 8, 132, dtype=torch.uint8))


def write_everywhere(cache: Tensor, slots: Tensor) -> None:
    cache.fill_(1)
