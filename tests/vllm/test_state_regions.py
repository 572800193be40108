"""Where vLLM keeps states, against its own calculator of shapes, its own sharding of a convolution
and its own views of a page.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from kvxfer.errors import ConfigError
from kvxfer.integrations.vllm.facts import CacheModel
from kvxfer.integrations.vllm.regions import ClearedGroup, Located, locate
from kvxfer.tensors.strided_copy import Scratch, strided_copy
from kvxfer.transfer.manifest import EngineManifest, RankManifest
from kvxfer.transfer.plan import make_plan
from tests.builders import EngineShape, build_manifest, pull_classes

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")

NUM_BLOCKS = 5
LAYERS = ("layers.0", "layers.1")
KERNEL_STEPS = 4
"""What a convolution looks at: a token and the inputs of the three before it, which are kept."""
LAYOUTS = list(itertools.product(("SD", "DS"), repeat=2))


class Kind(NamedTuple):
    """A model's state: vLLM's name, its shapes on a rank, and how its convolution is sharded:
    (channels of all ranks, channels that are there twice, is it one group for all).
    """

    mamba_type: str
    shapes: Any
    shards: Any
    num_groups: int | None = None


def mamba2(num_groups: int) -> Kind:
    def shapes(size: int, num_drafted: int = 0) -> Any:
        return calculator().mamba2_state_shape(
            num_spec=num_drafted,
            tp_world_size=size,
            intermediate_size=32,
            n_groups=num_groups,
            num_heads=8,
            head_dim=4,
            state_size=6,
            conv_kernel=KERNEL_STEPS,
        )

    def shards(size: int) -> list[tuple[int, int, bool]]:
        total = num_groups + calculator().extra_groups_for_head_shards(num_groups, size)
        is_one = num_groups % size != 0
        group = (total * 6, (total - num_groups) * 6, is_one)
        return [(32, 0, False), group, group]

    return Kind("MAMBA2", shapes, shards, num_groups)


def delta_net() -> Kind:
    def shapes(size: int, num_drafted: int = 0) -> Any:
        return calculator().gated_delta_net_state_shape(size, 4, 8, 6, 4, 4, num_drafted)

    return Kind("GDN_ATTN", shapes, lambda size: [(24, 0, False), (24, 0, False), (32, 0, False)])


def mamba1() -> Kind:
    def shapes(size: int, num_drafted: int = 0) -> Any:
        return calculator().mamba1_state_shape(size, 32, 6, 4)

    return Kind("MAMBA1", shapes, lambda size: [(32, 0, False)])


def kimi() -> Kind:
    """Kimi Linear's: as many heads of q and k as of v."""

    def shapes(size: int, num_drafted: int = 0) -> Any:
        return calculator().kda_state_shape(
            size, 8, 4, conv_kernel_size=KERNEL_STEPS, num_spec=num_drafted
        )

    return Kind("GDN_ATTN", shapes, lambda size: [(32, 0, False)] * 3)


def short_conv() -> Kind:
    def shapes(size: int, num_drafted: int = 0) -> Any:
        return calculator().short_conv_state_shape(size, 32, KERNEL_STEPS, num_drafted)

    return Kind("SHORT_CONV", shapes, lambda size: [(32, 0, False)])


def linear() -> Kind:
    """No convolution: as many channels are numbered, and none is kept."""

    def shapes(size: int, num_drafted: int = 0) -> Any:
        return calculator().linear_attention_state_shape(8, size, 6)

    return Kind("LINEAR", shapes, lambda size: [])


KINDS = {
    "mamba1": mamba1(),
    "mamba2": mamba2(4),
    "mamba2, one group": mamba2(1),
    "gated delta net": delta_net(),
    "kimi linear": kimi(),
    "short convolution": short_conv(),
    "linear attention": linear(),
}


def calculator() -> Any:
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator

    return MambaStateShapeCalculator


CONVOLUTION = SimpleNamespace(conv1d=SimpleNamespace(weight=torch.empty(1, 1, KERNEL_STEPS)))
"""What is read of a layer's module."""


class Rank:
    """One rank of an engine: its pages, and vLLM's views of them."""

    def __init__(
        self, kind: Kind, tp_rank: int, tp_size: int, *, is_filled: bool, num_drafted: int = 0
    ) -> None:
        from vllm.model_executor.layers.mamba.abstract import MambaBase
        from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
        from vllm.v1.kv_cache_interface import MambaSpec

        self.kind, self.tp_rank, self.tp_size = kind, tp_rank, tp_size
        self.shapes = kind.shapes(tp_size, num_drafted)
        has_conv = kind.mamba_type != "LINEAR"
        self.dtypes = (torch.int16, torch.int32, torch.int32)[not has_conv :][: len(self.shapes)]
        spec = MambaSpec(
            block_size=64,
            shapes=self.shapes,
            dtypes=self.dtypes,
            page_size_padded=4096,
            mamba_type=MambaAttentionBackendEnum[kind.mamba_type],
            num_speculative_blocks=num_drafted,
        )
        self.pages = {
            name: torch.full((NUM_BLOCKS, 1, 1, 4096), 0x5A, dtype=torch.int8) for name in LAYERS
        }
        self.states: dict[str, tuple[Tensor, ...]] = {}
        layer: Any = SimpleNamespace(
            get_state_shape=lambda: self.shapes, get_state_dtype=lambda: self.dtypes
        )
        for name, page in self.pages.items():
            MambaBase.bind_kv_cache(layer, page)
            self.states[name] = layer.kv_cache
        if is_filled:
            self.fill(block=3)
        group = SimpleNamespace(layer_names=list(LAYERS), kv_cache_spec=spec)
        self.located: Located = locate(
            self.pages,
            SimpleNamespace(num_blocks=NUM_BLOCKS, kv_cache_groups=[group]),
            tp_rank=tp_rank,
            tp_size=tp_size,
            model=CacheModel(
                dtype=torch.float32,
                num_kv_heads=4,
                head_counts=frozenset({4}),
                num_state_groups=kind.num_groups,
                layers=dict.fromkeys(LAYERS, CONVOLUTION),
            ),
        )

    def fill(self, block: int) -> None:
        """Each channel of the model has its number, in the place that vLLM's loader gives it. What
        was kept of tokens that may be rejected is something else.
        """
        from vllm.model_executor.layers.mamba.mamba_mixer2 import mamba_v2_sharded_weight_loader
        from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

        shards = self.kind.shards(self.tp_size)
        for number, views in enumerate(self.states.values()):
            for recurrence in views[bool(shards) :]:
                heads, *rest = recurrence.shape[1:]
                count = heads * torch.Size(rest).numel()
                first = self.tp_rank * count + 100_000 * (number + 1)
                values = torch.arange(first, first + count).reshape(heads, *rest)
                recurrence[block] = values.to(recurrence.dtype)
        if not shards:
            return
        steps = KERNEL_STEPS - 1
        local = torch.zeros(self.shapes[0][0 if is_conv_state_dim_first() else 1], 1)
        whole = torch.arange(1, 1 + sum(full - extra for full, extra, _ in shards)).float()
        loader = mamba_v2_sharded_weight_loader(shards, self.tp_size, self.tp_rank)
        loader(local, whole[:, None])
        channels = (local * 10 + torch.arange(steps)).to(torch.int16)  # [channel][step]
        for number, (conv, *_) in enumerate(self.states.values()):
            by_step = conv[block].T if is_conv_state_dim_first() else conv[block]
            by_step[:steps] = channels.T + number
            by_step[steps:] = DRAFTED


DRAFTED = -7


def engine(name: str, ranks: list[Rank]) -> EngineManifest:
    base = build_manifest(EngineShape(tp_size=len(ranks)), name)
    entries: list[RankManifest] = [
        replace(entry, regions=rank.located.regions, memories=rank.located.memory.infos)
        for entry, rank in zip(base.ranks, ranks, strict=True)
    ]
    return replace(base, ranks=tuple(entries))


def made(
    kind: Kind,
    size: int,
    layout: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_filled: bool,
    num_drafted: int = 0,
) -> list[Rank]:
    from vllm.model_executor.layers.mamba import mamba_utils

    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: layout)
    return [
        Rank(kind, rank, size, is_filled=is_filled, num_drafted=num_drafted) for rank in range(size)
    ]


def copy_state(source: list[Rank], sink: list[Rank]) -> None:
    """What a plan says of one request, whose state is in block 3 on both sides."""
    ids = torch.tensor([3]).numpy()
    for route in make_plan(engine("source", source), engine("sink", sink)).routes:
        given, taken = (
            list(ranks[rank.tp].located.memory.tensors)
            for ranks, rank in ((source, route.source_rank), (sink, route.sink_rank))
        )
        wanted = pull_classes(route, {0: (0, 60)})
        for copied, asked in zip(route.classes, wanted, strict=True):
            span = (asked.token_lo, asked.token_hi)
            strided_copy(given, taken, copied, ids, ids, span, scratch=Scratch())


@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_arrives_as_vllm_shards_it(
    kind: str, layouts: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for sizes in itertools.product((1, 2, 4), repeat=2):
        source = made(KINDS[kind], sizes[0], layouts[0], monkeypatch, is_filled=True)
        sink = made(KINDS[kind], sizes[1], layouts[1], monkeypatch, is_filled=False)
        expected = made(KINDS[kind], sizes[1], layouts[1], monkeypatch, is_filled=True)
        copy_state(source, sink)
        for got, want in zip(sink, expected, strict=True):
            for name in LAYERS:
                assert torch.equal(got.pages[name], want.pages[name]), (sizes, got.tp_rank, name)


@pytest.mark.parametrize("nums_drafted", [(3, 3), (2, 0), (0, 2), (1, 4)])
@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
@pytest.mark.parametrize(
    "kind", ["mamba2", "mamba2, one group", "gated delta net", "kimi linear", "short convolution"]
)
def test_a_state_moves_without_what_may_be_rejected(
    kind: str,
    layouts: tuple[str, str],
    nums_drafted: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever drafts the two sides have, and nothing else of the sink's pages is touched."""
    for sizes in ((1, 1), (2, 1), (1, 2)):
        source, sink, expected = (
            made(
                KINDS[kind], size, layout, monkeypatch, is_filled=is_filled, num_drafted=num_drafted
            )
            for size, layout, num_drafted, is_filled in (
                (sizes[0], layouts[0], nums_drafted[0], True),
                (sizes[1], layouts[1], nums_drafted[1], False),
                (sizes[1], layouts[1], nums_drafted[1], True),
            )
        )
        for rank, want in zip(sink, expected, strict=True):
            for name in LAYERS:  # where a draft's inputs are, before and after
                (was, *_), (conv, *_) = rank.states[name], want.states[name]
                conv[3] = torch.where(conv[3] == DRAFTED, was[3], conv[3])
        copy_state(source, sink)
        for rank, want in zip(sink, expected, strict=True):
            for name in LAYERS:
                assert torch.equal(rank.pages[name], want.pages[name]), (sizes, rank.tp_rank, name)


@pytest.mark.parametrize("kind", ["mamba1", "linear attention"])
def test_states_without_a_way_back_are_refused(kind: str) -> None:
    reason = "a convolution of .* with room for 2 tokens that may be rejected, got .*without specul"
    with pytest.raises(ConfigError, match=f"layers.0: expected {reason}"):
        Rank(KINDS[kind], 0, 1, is_filled=False, num_drafted=2)


def test_groups_that_nothing_tells_apart_are_refused() -> None:
    kind = mamba2(1)._replace(num_groups=None)
    with pytest.raises(ConfigError, match="layers.0: .* got MAMBA2 with no groups in its config"):
        Rank(kind, 0, 2, is_filled=False)


def test_states_that_are_not_described_are_refused() -> None:
    kind = mamba2(4)._replace(shapes=lambda *_: ((3, 10), (8, 4, 6)))
    with pytest.raises(ConfigError, match=r"layers.0: .* got MAMBA2 with shapes \(\(3, 10\)"):
        Rank(kind, 0, 1, is_filled=False)
    ring = mamba2(4)._replace(shapes=lambda *_: ((3, 80), (8, 4, 6), (8, 2, 4)))
    with pytest.raises(ConfigError, match="a short convolution or linear attention, got MAMBA2 w"):
        Rank(ring, 0, 1, is_filled=False)


def test_the_ranks_of_a_part() -> None:
    regions = Rank(KINDS["gated delta net"], 1, 2, is_filled=False).located.regions
    found = {(r.plane, r.head_lo, r.head_hi, r.inner_nbytes) for r in regions}
    assert found == {
        ("q", 2, 4, 12),
        ("k", 2, 4, 12),
        ("v", 4, 8, 8),
        ("recurrence", 4, 8, 96),
    }
    assert {r.state_tokens for r in regions} == {64}


def test_blocks_of_a_draft_without_kv_are_cleared() -> None:
    """Those of the loaded tokens, in 2 kernel blocks each, with other heads between them."""
    pools = [torch.full((2 * NUM_BLOCKS, 3, 8, 4), float("nan")) for _ in LAYERS]
    views = tuple(pool[:, 1:2] for pool in pools)
    group = ClearedGroup(1, 16, NUM_BLOCKS, views)
    group.clear_all(((), (4, -1, 3, 2, 0)), 16, 50)
    group.clear_all(((), (-1, -1, 1)), 0, 32)  # none of these is there
    group.clear_all(((), ()), 0, 16)
    for pool, view in zip(pools, views, strict=True):
        assert not view[4:8].any()
        assert view[:4].isnan().all()
        assert view[8:].isnan().all()
        assert pool[:, ::2].isnan().all()


def test_what_a_load_leaves_of_a_block_is_cleared() -> None:
    """And nothing else: 2 kernel blocks of 8 tokens are one of 16."""
    views = tuple(torch.full((2 * NUM_BLOCKS, 1, 8, 4), float("nan")) for _ in LAYERS)
    group = ClearedGroup(0, 16, NUM_BLOCKS, views)
    group.clear(((4, 1, 3),), 32)  # ends with a block
    assert all(view.isnan().all() for view in views)
    group.clear(((4, 1, 3),), 33)
    for view in views:
        assert not view[6:8].any()
        assert view[:6].isnan().all()
        assert view[8:].isnan().all()


@pytest.mark.gpu
def test_vllms_kernels_keep_the_state_in_front() -> None:
    from vllm.model_executor.layers.mamba.ops import causal_conv1d, mamba_ssm

    from tests.vllm.state_kernels import check, check_prefill

    check(causal_conv1d.causal_conv1d_update, mamba_ssm.selective_state_update, "cuda")
    check_prefill(causal_conv1d.causal_conv1d_fn, "cuda")
