"""Views that vLLM registers become regions: their places, and the bytes that move by them.

Two kinds of tests: with views and specs made by hand (no vLLM needed), and with vLLM's own specs,
allocation and write operator. There the truth is a second cache into which the same operator wrote
the same tokens by the sink's own slots: every byte of the sink must equal it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import UNSET
from torch import Tensor

from kvxfer.errors import ConfigError, IncompatiblePeer
from kvxfer.integrations.vllm import regions as regions_module
from kvxfer.integrations.vllm.facts import CacheModel
from kvxfer.integrations.vllm.interior import Trace, Write, trace_writes
from kvxfer.integrations.vllm.regions import Located, heads_of, locate
from kvxfer.integrations.vllm.specs import LayerSpec
from kvxfer.integrations.vllm.states import Rank
from kvxfer.tensors.strided_copy import Scratch, strided_copy
from kvxfer.transfer.interleave import Interleave
from kvxfer.transfer.layout import Elements, Interior, Region
from kvxfer.transfer.manifest import CacheFacts, EngineManifest, RankId, RankManifest
from kvxfer.transfer.plan import make_plan

# vLLM loads parts of torch that other parts of torch call deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")

POISON = 0xEE
HEADS = 4


def model_of(num_kv_heads: int = HEADS, *counts: int, **fields: Any) -> CacheModel:
    defaults: dict[str, Any] = {
        "dtype": torch.float32,
        "num_kv_heads": num_kv_heads,
        "head_counts": frozenset({num_kv_heads, *counts}),
    }
    return CacheModel(**(defaults | fields))


def spec_of(**fields: Any) -> LayerSpec:
    defaults: dict[str, Any] = {
        "block_tokens": 16,
        "num_kv_heads": 2,
        "head_size": 4,
        "head_size_v": 4,
        "dtype": torch.float32,
    }
    return LayerSpec(**(defaults | fields))


# ------------------------------------------------------------------------------- made by hand


def side_by_side(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """K before V in every cell."""
    block = int(slots[0]) // cache.shape[2]
    cache[block] = torch.cat((key, value), dim=2).transpose(0, 1)


def transposed(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """All K as [D][N], then all V."""
    block = int(slots[0]) // cache.shape[2]
    pieces = (key.permute(1, 2, 0).flatten(1), value.transpose(0, 1).flatten(1))
    cache[block] = torch.cat(pieces, dim=1).reshape(cache.shape[1:])


def tiled(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Pairs of channels of all tokens, one behind the other."""
    block = int(slots[0]) // cache.shape[2]
    tokens, heads, channels = key.shape
    pairs = key.reshape(tokens, heads, channels // 2, 2).permute(1, 2, 0, 3)
    pieces = (pairs.flatten(1), value.transpose(0, 1).flatten(1))
    cache[block] = torch.cat(pieces, dim=1).reshape(cache.shape[1:])


@dataclass(frozen=True, slots=True)
class ByHand:
    """A platform whose writer and specs a test chooses."""

    monkeypatch: pytest.MonkeyPatch

    def locate(
        self,
        views: Mapping[str, Tensor],
        specs: Mapping[str, tuple[int, LayerSpec]],
        *,
        write: Write = side_by_side,
        num_blocks: int = 6,
        tp_rank: int = 0,
        tp_size: int = 2,
        model: CacheModel | None = None,
    ) -> Located:
        def trace(
            layer: str,
            spec: LayerSpec,
            *,
            num_tokens: int,
            dtype: torch.dtype,
            cache_dtype: str,
        ) -> Trace:
            return trace_writes(write, spec=spec, num_tokens=num_tokens, dtype=dtype)

        self.monkeypatch.setattr(regions_module, "trace_cpu", trace)
        self.monkeypatch.setattr(regions_module, "layer_specs", lambda config: dict(specs))
        config = SimpleNamespace(num_blocks=num_blocks)
        return locate(views, config, tp_rank=tp_rank, tp_size=tp_size, model=model or model_of())


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> ByHand:
    return ByHand(monkeypatch)


def view(
    pool: Tensor, *, layer: int = 0, num_layers: int = 1, blocks: int = 6, cell: int = 8
) -> Tensor:
    """One layer's [B, H, N, C] of layers that lie one behind the other (LBHNC)."""
    return pool.reshape(num_layers, blocks, 2, -1, cell)[layer]


def test_two_layers_of_one_allocation(by_hand: ByHand) -> None:
    pool = torch.zeros(2 * 6 * 2 * 16 * 8)
    views = {name: view(pool, layer=i, num_layers=2) for i, name in enumerate(("a", "b"))}
    specs = {"a": (0, spec_of()), "b": (1, spec_of(window=20))}
    located = by_hand.locate(views, specs, tp_rank=1)
    common: dict[str, Any] = {
        "memory": 0,
        "num_blocks": 6,
        "block_tokens": 16,
        "head_lo": 2,
        "head_hi": 4,
        "inner_nbytes": 16,
        "stride_block": 1024,
        "stride_head": 512,
        "stride_token": 32,
        "elements": Elements("float32"),
    }
    assert located.regions == (
        Region(layer="a", plane="k", group=0, offset=0, **common),
        Region(layer="a", plane="v", group=0, offset=16, **common),
        Region(layer="b", plane="k", group=1, offset=6144, window=20, **common),
        Region(layer="b", plane="v", group=1, offset=6160, window=20, **common),
    )
    (memory,) = located.memory.tensors
    (info,) = located.memory.infos
    assert (memory.dtype, memory.shape, memory.data_ptr()) == (
        *(torch.uint8, (12288,), pool.data_ptr()),
    )
    assert (info.device, info.nbytes, info.handle) == ("cpu", 12288, None)


FP8: dict[str, Any] = {"dtype": torch.uint8, "quantisation": "fp8_per_tensor"}


def module(k_scale: Tensor, v_scale: Tensor) -> SimpleNamespace:
    return SimpleNamespace(_k_scale=k_scale, _v_scale=v_scale)


@pytest.mark.parametrize(
    ("k_scale", "v_scale"),
    [
        pytest.param(torch.tensor(0.5), torch.tensor(0.25), id="of the layer"),
        pytest.param(torch.tensor([0.5, 2.0]), torch.tensor([0.25, 0.75]), id="of each head"),
    ],
)
def test_scales_are_those_of_the_layers_module(
    by_hand: ByHand, k_scale: Tensor, v_scale: Tensor
) -> None:
    pool = torch.zeros(6 * 2 * 16 * 8, dtype=torch.uint8)
    model = model_of(cache_dtype="fp8_e5m2", layers={"a": module(k_scale, v_scale)})
    k, v = by_hand.locate({"a": view(pool)}, {"a": (0, spec_of(**FP8))}, model=model).regions
    assert k.elements == Elements("float8_e5m2", tuple(k_scale.reshape(-1).tolist()))
    assert v.elements == Elements("float8_e5m2", tuple(v_scale.reshape(-1).tolist()))


@pytest.mark.parametrize(
    "layers",
    [{}, {"a": module(torch.tensor(0.0), torch.tensor(0.0))}, {"a": module(*torch.ones(2, 3))}],
    ids=["no module", "zero", "of other heads"],
)
def test_elements_whose_scales_are_not_known_are_not_stated(
    by_hand: ByHand, layers: dict[str, Any]
) -> None:
    pool = torch.zeros(6 * 2 * 16 * 8, dtype=torch.uint8)
    model = model_of(cache_dtype="fp8_e5m2", layers=layers)
    k, v = by_hand.locate({"a": view(pool)}, {"a": (0, spec_of(**FP8))}, model=model).regions
    assert not k.elements
    assert not v.elements


def test_cells_that_end_in_a_scale_of_each_token(by_hand: ByHand) -> None:
    """vLLM's [K | scale | V | scale]."""
    pool = torch.zeros(6 * 2 * 16 * 16, dtype=torch.uint8)
    spec = spec_of(dtype=torch.uint8, quantisation="fp8_per_token_head", cell_nbytes=16)
    model = model_of(cache_dtype="fp8_per_token_head")  # vLLM has no other
    found = by_hand.locate({"a": view(pool, cell=16)}, {"a": (0, spec)}, model=model).regions
    assert [(r.plane, r.offset, r.inner_nbytes, r.stride_token) for r in found] == [
        ("k", 0, 4, 16),
        ("k_scale", 4, 4, 16),
        ("v", 8, 4, 16),
        ("v_scale", 12, 4, 16),
    ]
    assert [r.elements for r in found] == [
        Elements("float8_e4m3fn", scale_plane="k_scale"),
        Elements("float32"),
        Elements("float8_e4m3fn", scale_plane="v_scale"),
        Elements("float32"),
    ]


def test_k_transposed(by_hand: ByHand) -> None:
    pool = torch.zeros(6 * 2 * 16 * 8)
    k, v = by_hand.locate({"a": view(pool)}, {"a": (0, spec_of())}, write=transposed).regions
    assert (k.offset, k.stride_token, k.channel_nbytes, k.stride_channel) == (0, 4, 4, 64)
    assert (v.offset, v.stride_token, v.channel_nbytes, v.stride_channel) == (256, 16, 0, 0)
    assert (k.stride_head, k.stride_block, k.inner_nbytes) == (512, 1024, 16)


def test_a_block_of_several_kernel_blocks(by_hand: ByHand) -> None:
    pool = torch.zeros(6 * 4 * 2 * 4 * 8)
    views = {"a": view(pool, blocks=24)}
    k, v = by_hand.locate(views, {"a": (0, spec_of())}, write=transposed).regions
    assert (k.num_blocks, k.block_tokens, k.kernel_blocks, k.kernel_cells) == (6, 16, 4, 4)
    assert (k.stride_block, k.stride_head, k.stride_channel) == (256, 128, 16)
    assert v.offset == 64


def test_several_allocations_offsets_and_gaps(by_hand: ByHand) -> None:
    first = torch.zeros(7 * 400)
    second = torch.zeros(6 * 2 * 16 * 8)
    views = {
        "a": second.reshape(6, 2, 16, 8),
        # 100 elements before the first block, and gaps behind each
        "b": torch.as_strided(first, (6, 2, 16, 8), (400, 128, 8, 1), 100),
    }
    located = by_hand.locate(views, {name: (0, spec_of()) for name in views})
    assert [(r.memory, r.offset, r.stride_block) for r in located.regions] == [
        *[(0, 0, 1024), (0, 16, 1024), (1, 400, 1600), (1, 416, 1600)],
    ]
    assert [info.nbytes for info in located.memory.infos] == [6144, 11200]


def test_groups_over_each_other_and_layers_that_share_kv(by_hand: ByHand) -> None:
    pool = torch.zeros(6 * 2 * 16 * 8)
    shared = view(pool)
    views = {"full": shared, "window": view(pool), "reader": shared}
    specs = {"full": (0, spec_of()), "window": (1, spec_of(window=4))}
    located = by_hand.locate(views, specs)
    assert [(r.layer, r.plane, r.group, r.offset) for r in located.regions] == [
        *[("full", "k", 0, 0), ("full", "v", 0, 16), ("window", "k", 1, 0)],
        *[("window", "v", 1, 16), ("reader", "k", 0, 0), ("reader", "v", 0, 16)],
    ]


@pytest.mark.parametrize("shape", [(6, 1, 16, 8), (6, 16, 8)], ids=["0.29 on", "up to 0.28"])
def test_a_latent(by_hand: ByHand, shape: tuple[int, ...]) -> None:
    latent = spec_of(num_kv_heads=1, head_size=8, head_size_v=0, is_latent=True)

    def write(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        cache[int(slots[0]) // cache.shape[2]] = key.transpose(0, 1)

    views = {"a": torch.zeros(shape)}
    for rank in (0, 3):
        (region,) = by_hand.locate(
            views, {"a": (0, latent)}, write=write, tp_rank=rank, tp_size=4
        ).regions
        assert (region.plane, region.head_lo, region.head_hi) == ("latent", 0, 1)
        assert (region.inner_nbytes, region.stride_token) == (32, 32)


def test_tiles_are_one_opaque_plane(by_hand: ByHand) -> None:
    views = {"a": torch.zeros(6, 2, 16, 8)}
    (region,) = by_hand.locate(views, {"a": (0, spec_of())}, write=tiled).regions
    assert region.plane.startswith("page:")
    assert region.interior is Interior.OPAQUE
    assert region.is_dense
    assert region.end == 6144
    assert (region.num_heads, region.inner_nbytes, region.stride_head) == (2, 32, 512)


def refusals() -> list[Any]:
    good = spec_of()
    shape = (6, 2, 16, 8)
    narrow = torch.zeros(6, 2, 16, 16)[..., ::2]
    return [
        pytest.param({}, {"a": good}, "a: expected a registered KV cache", id="no view"),
        pytest.param(
            {"a": torch.zeros(shape), "x": torch.zeros(shape)},
            {"a": good},
            "x: expected a layer of a KV cache group, or one that shares",
            id="no group",
        ),
        pytest.param(
            {"a": torch.zeros(shape, device="meta")},
            {"a": good},
            r"device: expected cpu or cuda, got meta \(a\)",
            id="device",
        ),
        pytest.param(
            {"a": torch.zeros(6, 2, 16)}, {"a": good}, r"a: expected a view \[B, H, N", id="3-D"
        ),
        pytest.param(
            {"a": torch.zeros(7, 2, 16, 8)}, {"a": good}, "a multiple of 6 blocks", id="blocks"
        ),
        pytest.param({"a": torch.zeros(6, 2, 8, 8)}, {"a": good}, "hold 16 tokens", id="tokens"),
        pytest.param(
            {"a": torch.zeros(shape, dtype=torch.int32)}, {"a": good}, "of torch.int32", id="type"
        ),
        pytest.param({"a": narrow}, {"a": good}, "a: expected contiguous cells", id="channels"),
        pytest.param(
            {"a": torch.zeros(6, 4, 16, 8)}, {"a": good}, "4 head slots for 2 heads", id="slots"
        ),
        pytest.param({"a": torch.zeros(6, 2, 16, 9)}, {"a": good}, "cells of 36 bytes", id="cells"),
        pytest.param(
            {"a": torch.zeros(1, 2, 16, 8).expand(shape)},
            {"a": good},
            "a: expected a KV cache whose blocks lie apart",
            id="the same block again",
        ),
    ]


@pytest.mark.parametrize(("views", "specs", "message"), refusals())
def test_views_that_are_refused(
    by_hand: ByHand, views: dict[str, Tensor], specs: dict[str, LayerSpec], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        by_hand.locate(views, {name: (0, spec) for name, spec in specs.items()})


def test_ranks_that_share_the_tokens_say_which_they_keep(by_hand: ByHand) -> None:
    views = {"a": torch.zeros(6, 2, 16, 8), "b": torch.zeros(6, 2, 16, 8)}
    kept = Interleave(2, 1, 4)
    specs = {"a": (0, spec_of(is_context_sharded=True)), "b": (1, spec_of())}
    found = by_hand.locate(views, specs, model=model_of(interleave=kept)).regions
    assert {(each.layer, each.interleave) for each in found} == {("a", kept), ("b", UNSET)}
    assert {each.table_tokens for each in found} == {16, 32}


def cleared(view: Tensor) -> list[int]:
    """The blocks that are zero throughout."""
    return [block for block in range(len(view)) if not view[block].any()]


def test_a_draft_whose_tokens_ranks_share_is_cleared(by_hand: ByHand) -> None:
    """A block of 16 of a rank's tokens is one of 32 in the request's table."""
    name = "model.layers.2.self_attn.attn"
    views = {"model.layers.0.self_attn.attn": torch.ones(6, 2, 16, 8)}
    views[name] = torch.ones(6, 2, 16, 8)
    specs = {layer: (0, spec_of(is_context_sharded=True)) for layer in views}
    kept = Interleave(2, 0, 16)
    model = model_of(interleave=kept, draft_counts=frozenset({2}), num_layers=2)
    (draft,) = by_hand.locate(views, specs, model=model).drafts
    draft.clear_all(((1, 2, 3, 4),), 64, 128)
    assert cleared(views.pop(name)) == [3, 4]
    assert not any(map(cleared, views.values()))


def test_a_block_whose_tokens_ranks_share_is_cleared_before_a_load_fills_a_part(
    by_hand: ByHand,
) -> None:
    """Beside one of another type, and of another number of tokens."""
    views = {"a": torch.ones(6, 2, 16, 8), "b": torch.ones(6, 2, 8, 8, dtype=torch.float16)}
    other = {"block_tokens": 8, "dtype": torch.float16}
    specs = {
        "a": (0, spec_of(is_context_sharded=True)),
        "b": (1, spec_of(is_context_sharded=True, **other)),
    }
    groups = by_hand.locate(views, specs, model=model_of(interleave=Interleave(2, 0, 8))).cleared
    for group in groups:
        group.clear(((1, 2, 3), (1, 2, 3, 4, 5)), 2 * 32 + 6)
    assert [cleared(each) for each in views.values()] == [[3], [5]]


@pytest.mark.parametrize("change", [{"window": 20}, {"cell_tokens": 4}])
def test_windows_and_compressed_caches_are_not_shared_by_tokens(
    by_hand: ByHand, change: dict[str, Any]
) -> None:
    views = {"a": torch.zeros(6, 2, 16, 8)}
    specs = {"a": (0, spec_of(is_context_sharded=True, **change))}
    with pytest.raises(ConfigError, match="a: .* decode_context_parallel_size is 2, got a cache"):
        by_hand.locate(views, specs, model=model_of(interleave=Interleave(2, 1, 4)))


@pytest.mark.parametrize(
    ("total", "share", "tp_size", "expected"),
    [
        (4, 4, 1, [(0, 4)]),
        (4, 2, 2, [(0, 2), (2, 4)]),
        (4, 1, 4, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        (2, 1, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (1, 1, 3, [(0, 1), (0, 1), (0, 1)]),
    ],
)
def test_heads_of_each_rank(
    total: int, share: int, tp_size: int, expected: list[tuple[int, int]]
) -> None:
    spec = spec_of(num_kv_heads=share)
    ranks = [Rank(rank, tp_size) for rank in range(tp_size)]
    assert [heads_of("a", spec, rank, model_of(total)) for rank in ranks] == expected


def test_a_stated_number_of_shards_wins() -> None:
    spec = spec_of(num_kv_heads=1, num_shards=2)
    ranks = [heads_of("a", spec, Rank(rank, 4), model_of(8, 2)) for rank in range(4)]
    assert ranks == [(0, 1), (0, 1), (1, 2), (1, 2)]


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (1, [(0, 1), (0, 1), (1, 2), (1, 2)]),  # with more ranks than heads
        (2, [(0, 2)] * 4),  # not parallel
    ],
)
def test_heads_of_a_draft(share: int, expected: list[tuple[int, int]]) -> None:
    """Two, where the model has eight and two on each of four ranks."""
    model = model_of(8, draft_counts=frozenset({2}), num_layers=2)
    ranks = [Rank(rank, 4) for rank in range(4)]
    spec, drafts = spec_of(num_kv_heads=2), spec_of(num_kv_heads=share)
    assert [heads_of("a.layers.2.b", drafts, rank, model) for rank in ranks] == expected
    assert heads_of("a.layers.1.b", spec, ranks[3], model) == (6, 8)


@pytest.mark.parametrize(
    ("share", "tp_size", "model", "message"),
    [
        (1, 4, model_of(4, 2), "expected one number of them .* got 2 or 4"),
        (1, 2, model_of(4), "expected an equal share of 4, .* got 1"),
        (1, 6, model_of(4), ".*on each of 6 ranks"),
        (4, 2, model_of(4), ".*equal share of 8, at most the model's 4"),
    ],
)
def test_heads_that_cannot_be_told(
    share: int, tp_size: int, model: CacheModel, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"a: KV heads: {message}"):
        heads_of("a", spec_of(num_kv_heads=share), Rank(0, tp_size), model)


# ------------------------------------------------------------------- what moves, byte by byte


def manifest(
    ranks: Sequence[Located], block_tokens: int, *, num_kv_heads: int = HEADS, is_mla: bool = False
) -> EngineManifest:
    return EngineManifest(
        engine_id="e",
        incarnation=bytes(16),
        protocol=(1, 1),
        capabilities=(),
        facts=CacheFacts(
            model="m",
            weights="w",
            rope="r",
            dtype="d",
            quantisation="none",
            num_kv_heads=num_kv_heads,
            head_size=1,
            num_layers=1,
            is_mla=is_mla,
        ),
        tp_size=len(ranks),
        pp_size=1,
        block_tokens=block_tokens,
        layout="",
        ranks=tuple(
            RankManifest(
                rank=RankId(0, tp_rank),
                control_endpoint="tcp://127.0.0.1:1",
                data_endpoints={},
                memories=located.memory.infos,
                regions=located.regions,
            )
            for tp_rank, located in enumerate(ranks)
        ),
    )


def move(
    source: Sequence[Located],
    sink: Sequence[Located],
    ids: tuple[Sequence[int], Sequence[int]],
    blocks: tuple[int, int],
    span: tuple[int, int],
    **facts: Any,
) -> None:
    """Tokens of one request, all groups by the same ids."""
    plan = make_plan(manifest(source, blocks[0], **facts), manifest(sink, blocks[1], **facts))
    source_ids, sink_ids = (np.array(each, dtype=np.int64) for each in ids)
    for route in plan.routes:
        for copy_class in route.classes:
            strided_copy(
                source[route.source_rank.tp].memory.tensors,
                sink[route.sink_rank.tp].memory.tensors,
                copy_class,
                source_ids,
                sink_ids,
                span,
                scratch=Scratch(),
            )


@pytest.mark.parametrize("write", [side_by_side, transposed])
@pytest.mark.parametrize("sink_write", [side_by_side, transposed])
def test_between_unlike_interiors(by_hand: ByHand, write: Write, sink_write: Write) -> None:
    """A GPU's cache to a CPU's, as it were: 12 tokens from blocks of 4 to blocks of 8."""
    tokens = torch.arange(2.0 * 12 * 4 * 4).reshape(2, 12, 4, 4)
    pools = []
    for blocks, number, writer, ids in ((4, 6, write, (5, 0, 3)), (8, 3, sink_write, (2, 1))):
        pool = torch.full((number, 4, blocks, 8), float("nan"))
        located = by_hand.locate(
            {"a": pool},
            {"a": (0, spec_of(block_tokens=blocks, num_kv_heads=4))},
            write=writer,
            num_blocks=number,
            tp_size=1,
        )
        pools.append((pool, located, ids))
    (given, source, source_ids), (taken, sink, sink_ids) = pools
    for position, block in enumerate(source_ids):
        lo = position * 4
        part = tokens[:, lo : lo + 4]
        write(part[0], part[1], given, torch.tensor([block * 4]))
    move([source], [sink], (source_ids, sink_ids), (4, 8), (0, 12))
    expected = torch.full_like(taken, float("nan"))
    filled = torch.full((2, 16, 4, 4), float("nan"))
    filled[:, :12] = tokens
    for position, block in enumerate(sink_ids):
        lo = position * 8
        part = filled[:, lo : lo + 8]
        sink_write(part[0], part[1], expected, torch.tensor([block * 8]))
    assert_same_bytes(taken, expected)


def test_unlike_tiles_have_no_plane_in_common(by_hand: ByHand) -> None:
    views = {"a": torch.zeros(6, 2, 16, 8)}
    opaque = by_hand.locate(views, {"a": (0, spec_of())}, write=tiled)
    named = by_hand.locate(views, {"a": (0, spec_of())})
    with pytest.raises(IncompatiblePeer, match="a/page:.* no source rank holds it"):
        make_plan(manifest([named] * 2, 16), manifest([opaque] * 2, 16))


def assert_same_bytes(got: Tensor, expected: Tensor) -> None:
    flat = [each.contiguous().view(torch.uint8).flatten() for each in (got, expected)]
    wrong = (flat[0] != flat[1]).nonzero()
    assert not len(wrong), f"{len(wrong)} of {len(flat[0])} bytes differ, first at {int(wrong[0])}"


# ----------------------------------------------------------------------------- with vLLM itself


@dataclass(frozen=True, slots=True)
class RealRank:
    """One rank's cache of two layers as vLLM allocates it, poisoned, and a copy of it."""

    views: dict[str, Tensor]
    located: Located
    expected: Tensor

    @property
    def storage(self) -> Tensor:
        return self.located.memory.tensors[0]


def real_rank(
    *,
    block_tokens: int,
    kernel_tokens: int,
    num_blocks: int,
    tp: tuple[int, int],
    head_size: int,
    dtype: torch.dtype,
) -> RealRank:
    from vllm.v1 import kv_cache_interface as interface
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    spec = interface.FullAttentionSpec(
        block_size=block_tokens, num_kv_heads=HEADS // tp[1], head_size=head_size, dtype=dtype
    )
    nbytes = spec.page_size_bytes
    tensor = interface.KVCacheTensor(
        size=2 * num_blocks * nbytes,
        layers=["a", "b"],
        layer_stride=num_blocks * nbytes,
        block_stride=nbytes,
    )
    config = interface.KVCacheConfig(
        num_blocks, [tensor], [interface.KVCacheGroupSpec(["a", "b"], spec)]
    )
    views = allocate_kv_cache(
        config, torch.device("cpu"), KVCacheLayout.LBHNC, kernel_block_sizes=[kernel_tokens]
    )
    located = locate(
        views, config, tp_rank=tp[0], tp_size=tp[1], model=model_of(HEADS, dtype=dtype)
    )
    located.memory.tensors[0].fill_(POISON)
    return RealRank(views, located, located.memory.tensors[0].clone())


def write_real(cache: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """vLLM's own operator, called as its CPU backend calls it."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    blocks, heads, tokens, width = cache.shape
    isa = _get_attn_isa(cache.dtype, tokens, width // 2, "auto")
    halves = cache.view(blocks, heads, 2 * tokens, -1).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(key.contiguous(), value.contiguous(), *halves, slots, isa)


def slots_of(ids: Sequence[int], block_tokens: int, num_tokens: int) -> Tensor:
    return torch.tensor(
        [ids[p // block_tokens] * block_tokens + p % block_tokens for p in range(num_tokens)]
    )


def read_planes(cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """K and V ``[T, H, D]`` by the documented page: K [D][N], then V [N][D]."""
    _, heads, tokens, width = cache.shape
    halves = cache.reshape(len(cache), heads, 2, tokens * (width // 2))
    k = halves[:, :, 0].reshape(len(cache), heads, width // 2, tokens)
    v = halves[:, :, 1].reshape(len(cache), heads, tokens, width // 2)
    blocks, inside = slots // tokens, slots % tokens
    return k[blocks, :, :, inside], v[blocks, :, inside]


@pytest.mark.parametrize(
    ("blocks", "kernels", "tp", "head_size", "dtype"),
    [
        ((32, 128), (32, 128), (1, 1), 32, torch.float32),
        ((128, 32), (128, 32), (1, 1), 64, torch.float32),
        ((96, 64), (96, 64), (2, 1), 32, torch.float32),
        ((64, 64), (64, 64), (1, 2), 32, torch.float32),
        ((32, 128), (32, 128), (2, 4), 128, torch.float16),
        ((128, 96), (64, 32), (4, 2), 32, torch.float32),
        ((64, 128), (64, 64), (2, 2), 80, torch.bfloat16),
    ],
)
def test_real_kv_moves_exactly(
    blocks: tuple[int, int],
    kernels: tuple[int, int],
    tp: tuple[int, int],
    head_size: int,
    dtype: torch.dtype,
) -> None:
    pytest.importorskip("vllm")
    num_tokens, lo = 300, 37
    engines = [
        [
            real_rank(
                block_tokens=blocks[side],
                kernel_tokens=kernels[side],
                num_blocks=14,
                tp=(rank, tp[side]),
                head_size=head_size,
                dtype=dtype,
            )
            for rank in range(tp[side])
        ]
        for side in (0, 1)
    ]
    if any(r.interior is Interior.OPAQUE for r in engines[0][0].located.regions):
        pytest.skip("this machine writes tiles for this type")
    order = torch.randperm(13, generator=torch.Generator().manual_seed(1)) + 1
    ids = tuple([int(i) for i in order[: -(-num_tokens // n)]] for n in blocks)
    generator = torch.Generator().manual_seed(2)
    kv = {
        name: torch.randn(2, num_tokens, HEADS, head_size, generator=generator).to(dtype)
        for name in ("a", "b")
    }
    for side, ranks in enumerate(engines):
        slots = slots_of(ids[side], blocks[side], num_tokens)
        share = HEADS // tp[side]
        first = 0 if side == 0 else lo
        for number, rank in enumerate(ranks):
            heads = slice(number * share, (number + 1) * share)
            for name, cache in rank.views.items():
                key, value = kv[name][:, first:, heads]
                write_real(cache, key, value, slots[first:])
            if side == 1:  # remember what it should be, then forget it
                rank.expected.copy_(rank.storage)
                rank.storage.fill_(POISON)
    source, sink = ([rank.located for rank in ranks] for ranks in engines)
    move(source, sink, (ids[0], ids[1]), blocks, (lo, num_tokens))
    for rank in engines[1]:
        assert_same_bytes(rank.storage, rank.expected)
    share = HEADS // tp[1]
    slots = slots_of(ids[1], blocks[1], num_tokens)[lo:]
    for number, rank in enumerate(engines[1]):
        heads = slice(number * share, (number + 1) * share)
        for name, cache in rank.views.items():
            key, value = read_planes(cache, slots)
            assert torch.equal(key, kv[name][0, lo:, heads])
            assert torch.equal(value, kv[name][1, lo:, heads])


def test_a_hybrid_model_s_groups_lie_over_each_other() -> None:
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    fields: dict[str, Any] = {
        "block_size": 64,
        "num_kv_heads": 2,
        "head_size": 32,
        "dtype": torch.float32,
    }
    full = interface.FullAttentionSpec(**fields)
    window = interface.SlidingWindowSpec(**fields, sliding_window=100, extra_retained_tokens=3)
    nbytes = full.page_size_bytes
    groups = [
        interface.KVCacheGroupSpec(["f0", "f1"], full),
        interface.KVCacheGroupSpec(["w0", "w1"], window),
    ]
    tensors = [
        interface.KVCacheTensor(
            size=2 * 5 * nbytes,
            layers=list(group.layer_names),
            layer_stride=5 * nbytes,
            block_stride=nbytes,
        )
        for group in groups
    ]
    config = interface.KVCacheConfig(5, tensors, groups)
    views = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout.LBHNC, [64, 64])
    views["reader"] = views["f1"]
    located = locate(views, config, tp_rank=1, tp_size=2, model=model_of())
    assert [(r.layer, r.group, r.window, r.offset) for r in located.regions if r.plane == "k"] == [
        *[("f0", 0, None, 0), ("f1", 0, None, 5 * nbytes)],
        *[("w0", 1, 103, 0), ("w1", 1, 103, 5 * nbytes), ("reader", 0, None, 5 * nbytes)],
    ]


def test_a_real_latent() -> None:
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    spec = interface.MLAAttentionSpec(
        block_size=64, num_kv_heads=1, head_size=72, dtype=torch.float32
    )
    config = interface.KVCacheConfig(4, [], [interface.KVCacheGroupSpec(["a"], spec)])
    views = {"a": torch.zeros(4, 1, 64, 72)}
    (region,) = locate(views, config, tp_rank=1, tp_size=2, model=model_of()).regions
    assert (region.plane, region.inner_nbytes, region.stride_token) == ("latent", 288, 288)
    assert (region.head_lo, region.head_hi, region.stride_block) == (0, 1, 64 * 288)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block_tokens", [32, 64, 96, 128])
@pytest.mark.parametrize("head_size", [32, 64, 128])
def test_what_the_real_operator_does(dtype: torch.dtype, block_tokens: int, head_size: int) -> None:
    """The table of interior.py."""
    pytest.importorskip("vllm")
    rank = real_rank(
        block_tokens=block_tokens,
        kernel_tokens=block_tokens,
        num_blocks=2,
        tp=(0, 2),
        head_size=head_size,
        dtype=dtype,
    )
    is_tiled = dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    if is_tiled:
        assert {r.interior for r in rank.located.regions} == {Interior.OPAQUE}
        return
    k, v = (r for r in rank.located.regions if r.layer == "a")
    size = dtype.itemsize
    assert (k.plane, k.channel_nbytes, k.stride_channel) == ("k", size, block_tokens * size)
    assert (k.stride_token, v.plane, v.channel_nbytes) == (size, "v", 0)
    assert v.offset - k.offset == block_tokens * head_size * size
    assert v.stride_token == head_size * size
