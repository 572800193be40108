"""Zeroing: exactly the named blocks of all layers, nothing beside them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvxfer.cache.specs import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from kvxfer.tensors.attention import AttentionGroup, prepare_kernel_block_sizes
from kvxfer.tensors.block_zeroer import KVBlockZeroer, Segment, TableFiller, distinct, segments_of
from kvxfer.tensors.cache_views import find_block_dim
from kvxfer.tensors.kv_cache import init_kv_cache
from tests.tensors.cache_backends import (
    BlocksFirst,
    HeadsOutside,
    Hnd,
    Mla,
    Nhd,
    NhdOfEight,
    Packed,
    Stated,
)

POISON = 0x6E
NUM_BLOCKS = 5


def full(block_size: int = 8, heads: int = 2, head_size: int = 4, **more: Any) -> FullAttentionSpec:
    settings = {"dtype": "float32", **more}
    return FullAttentionSpec(
        block_size=block_size, num_kv_heads=heads, head_size=head_size, **settings
    )


SLIDING = SlidingWindowSpec(
    block_size=8, num_kv_heads=2, head_size=4, dtype="float32", sliding_window=5
)
STATE = MambaSpec(block_size=8, shapes=((128,),), dtypes=("float32",))


class Cache:
    """Bound layers over poisoned buffers, and a zeroer that knows them."""

    def __init__(
        self,
        groups: list[tuple[list[str], KVCacheSpec]],
        buffers: list[list[str]],
        backends: dict[str, type[Stated]],
        shared: dict[str, str] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        specs = {layer: spec for layers, spec in groups for layer in layers}
        self.config = KVCacheConfig(
            num_blocks=NUM_BLOCKS,
            kv_cache_tensors=[
                KVCacheTensor(NUM_BLOCKS * specs[layers[0]].page_size_bytes, layers)
                for layers in buffers
            ],
            kv_cache_groups=[KVCacheGroupSpec(list(layers), spec) for layers, spec in groups],
        )
        self.backends = {
            **backends,
            **{sharer: backends[t] for sharer, t in (shared or {}).items()},
        }
        names = [*specs, *(shared or {})]
        self.context = {name: SimpleNamespace(kv_cache=None) for name in names}
        self.buffers: list[Tensor] = []
        init_kv_cache(
            [], self.context, self.config, self.backends, device, shared_kv_cache_layers=shared
        )
        for layers in buffers:
            cache = self.context[layers[0]].kv_cache
            view = cache[0] if isinstance(cache, list) else cache
            self.buffers.append(torch.empty(0, dtype=torch.uint8, device=device))
            self.buffers[-1].set_(view.untyped_storage())
            self.buffers[-1].fill_(POISON)
        self.zeroer = KVBlockZeroer(device, pin_memory=torch.device(device).type == "cuda")
        self.zeroer.init_meta(
            [group for parts in self.attn_groups() for group in parts],
            prepare_kernel_block_sizes(self.config, self.attn_groups()),
            "auto",
            set(),
            self.context,
        )

    def attn_groups(self) -> list[list[AttentionGroup]]:
        """One entry for each layer, so that backends may differ within a group."""
        return [
            [
                AttentionGroup(self.backends.get(name, Stated), [name], group.kv_cache_spec, number)
                for name in group.layer_names
            ]
            for number, group in enumerate(self.config.kv_cache_groups)
        ]

    def content(self) -> list[bytes]:
        return [buffer.cpu().numpy().tobytes() for buffer in self.buffers]

    def zeroed_naively(self, block_ids: list[int]) -> list[bytes]:
        """The buffers as they must be: every element of a block, found through the view."""
        for group in self.config.kv_cache_groups:
            if not isinstance(group.kv_cache_spec, AttentionSpec):
                continue
            for name in group.layer_names:
                view = self.context[name].kv_cache
                dim = 0 if self.backends[name] in (BlocksFirst, Packed, Mla) else 1
                per_block = view.shape[dim] // NUM_BLOCKS
                for block in block_ids:
                    view.narrow(dim, block * per_block, per_block).zero_()
        want = self.content()
        for buffer in self.buffers:
            buffer.fill_(POISON)
        return want


LAYERS: dict[str, tuple[type[Stated], KVCacheSpec]] = {
    "hnd": (Hnd, full()),
    "nhd": (Nhd, full()),
    "blocks-first": (BlocksFirst, full(dtype="bfloat16")),
    "heads-outside": (HeadsOutside, full(heads=3)),
    "packed": (Packed, full()),
    "latent": (Mla, MLAAttentionSpec(block_size=8, num_kv_heads=1, head_size=6, dtype="float16")),
    "split": (NhdOfEight, full(24)),
    "padded": (Nhd, full(page_size_padded=640)),
    "padded-planes": (Hnd, full(page_size_padded=640)),
    "padded-split": (NhdOfEight, full(24, page_size_padded=1632)),
    "eight-bits": (Nhd, full(dtype="float8_e4m3fn")),
    "odd-bytes": (Hnd, full(7, 1, 3, dtype="uint8")),
    "odd-words": (Nhd, full(7, 1, 3, dtype="float16")),
}


def one_layer(name: str) -> Cache:
    backend, spec = LAYERS[name]
    return Cache([(["l.0"], spec)], [["l.0"]], {"l.0": backend})


IDS = [[], [0], [4], [3, 1], [2, 2], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize("block_ids", IDS, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_zeroes_exactly_the_blocks(name: str, block_ids: list[int]) -> None:
    cache = one_layer(name)
    want = cache.zeroed_naively(block_ids)
    cache.zeroer.zero_block_ids(block_ids)
    assert cache.content() == want
    spec = LAYERS[name][1]
    assert isinstance(spec, AttentionSpec)
    assert want[0].count(0) == len(set(block_ids)) * spec.unpadded_page_size_bytes


def two_groups(device: torch.device | str = "cpu") -> Cache:
    """Full and sliding layers share two buffers, a third is alone, and one layer reads another."""
    return Cache(
        [(["l.0", "l.2", "l.4"], full(16, 1, 4)), (["l.1", "l.3"], SLIDING)],
        [["l.0", "l.1"], ["l.2", "l.3"], ["l.4"]],
        {"l.0": NhdOfEight, "l.1": Nhd, "l.2": Hnd, "l.3": Hnd, "l.4": HeadsOutside},
        {"l.5": "l.3", "l.6": "l.0"},
        device,
    )


@given(block_ids=st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=8))
def test_shared_buffers_in_several_allocations(block_ids: list[int]) -> None:
    cache = two_groups()
    want = cache.zeroed_naively(block_ids)
    cache.zeroer.zero_block_ids(block_ids)
    assert cache.content() == want
    zeros = len(set(block_ids)) * 512  # K and V x 16 tokens x 4 values x 4 bytes
    assert [found.count(0) for found in want] == [zeros] * 3


def test_states_are_left_alone() -> None:
    cache = Cache(
        [(["l.0", "l.2"], STATE), (["l.1"], full())], [["l.0", "l.1"], ["l.2"]], {"l.1": Nhd}
    )
    cache.zeroer.zero_block_ids([1])
    shared, alone = cache.content()
    assert alone.count(POISON) == len(alone)
    assert shared.count(0) == 512
    only = Cache([(["l.0"], STATE)], [["l.0"]], {})
    only.zeroer.zero_block_ids([0, 10**6])  # nothing to zero, so no id is too large
    assert only.content()[0].count(POISON) == NUM_BLOCKS * 512


def test_runner_only_layers_are_passed_over() -> None:
    cache = one_layer("nhd")
    zeroer = KVBlockZeroer("cpu", pin_memory=True)
    group = AttentionGroup(Nhd, ["l.0", "not bound"], full(), 0)
    zeroer.init_meta([group], [8], torch.float32, {"not bound"}, cache.context)
    zeroer.zero_block_ids([3])
    assert cache.content()[0].count(0) == 512


@pytest.mark.parametrize(
    ("block_ids", "error", "said"),
    [
        ([0, 5], ValueError, r"block_ids: expected ids in \[0, 5\), got 5"),
        ([-1, 2], ValueError, r"block_ids: expected ids in \[0, 5\), got -1"),
        ([1, 2.5], TypeError, r"block_ids: expected integers, got \[1, 2\.5\]; pass block ids"),
        (
            [2**70],
            ValueError,
            r"block_ids: expected ids below 2\*\*63, got \[1180591620717411303424\]",
        ),
        ([False], TypeError, r"block_ids: expected integers, got \[False\]"),
        (
            torch.tensor([0.0]),
            TypeError,
            r"block_ids: expected an integer dtype, got torch\.float32",
        ),
        (torch.tensor([5]), ValueError, r"block_ids: expected ids in \[0, 5\), got 5"),
    ],
)
def test_wrong_ids_change_nothing(block_ids: Any, error: type[Exception], said: str) -> None:
    cache = one_layer("split")
    with pytest.raises(error, match=said):
        cache.zeroer.zero_block_ids(block_ids)
    assert cache.content()[0].count(POISON) == len(cache.content()[0])


def test_the_order_of_calls() -> None:
    zeroer = KVBlockZeroer("cpu", pin_memory=False)
    for block_ids in ([], [0]):
        with pytest.raises(RuntimeError, match="zero_block_ids: expected init_meta to be called"):
            zeroer.zero_block_ids(block_ids)
    zeroer.init_meta([], [], "auto", set(), {})
    zeroer.zero_block_ids([0])
    with pytest.raises(RuntimeError, match="init_meta: expected one call, got another"):
        zeroer.init_meta([], [], "auto", set(), {})


VIEW = torch.zeros(2, 3, 8, 2, 4)


@pytest.mark.parametrize(
    ("caches", "kernel_block_sizes", "dtype", "error", "said"),
    [
        ({}, [8], "auto", KeyError, "a: expected it in the forward context, got no such layer"),
        ({"a": None}, [8], "auto", TypeError, "a: expected a bound cache, got NoneType"),
        ({"a": [VIEW]}, [8], "auto", TypeError, "a: expected a bound cache, got list"),
        ({"a": VIEW}, [], "auto", ValueError, "expected one for group 0 of a, b, got 0"),
        ({"a": VIEW}, [3], "auto", ValueError, "expected tokens that divide the block of 8, got 3"),
        ({"a": VIEW}, [4], "auto", ValueError, "a: expected whole blocks of 8 tokens in kernel b"),
        ({"a": VIEW[0, 0, 0]}, [8], "auto", ValueError, "a: expected whole blocks of 8 tokens"),
        ({"a": VIEW.flatten(3)}, [8], "auto", ValueError, "a: expected whole blocks of 8 tokens"),
        ({"a": VIEW[:, :, :4]}, [4], "auto", ValueError, "a: expected whole blocks of 8 tokens"),
        ({"a": VIEW}, [8], "bfloat16", ValueError, "a: expected elements of 2 bytes, got 4"),
        ({"a": VIEW}, [8], torch.int8, ValueError, "a: expected elements of 1 bytes, got 4"),
        ({"a": VIEW.to("meta")}, [8], "auto", ValueError, "a: expected a cache on cpu, got meta"),
        (
            {"a": VIEW, "b": torch.zeros(2, 4, 8, 2, 4)},
            [8], "auto", ValueError, "b: expected 3 blocks, as a has, got 4",
        ),
    ],
)  # fmt: skip
def test_caches_that_do_not_fit_are_refused(
    caches: dict[str, Any],
    kernel_block_sizes: list[int],
    dtype: torch.dtype | str,
    error: type[Exception],
    said: str,
) -> None:
    context = {name: SimpleNamespace(kv_cache=cache) for name, cache in caches.items()}
    if "a" in context:
        context.setdefault("b", context["a"])
    group = AttentionGroup(Stated, ["a", "b"], full(), 0)
    with pytest.raises(error, match=said):
        KVBlockZeroer("cpu", False).init_meta([group], kernel_block_sizes, dtype, set(), context)


def test_layers_that_put_a_block_elsewhere_are_refused() -> None:
    """An Hnd layer has K of all blocks in the first half; an Nhd layer has half of the blocks."""
    buffer = torch.zeros(4 * 128)
    hnd = buffer.view(2, 4, 2, 8, 4).transpose(2, 3)
    nhd = buffer.view(4, 2, 8, 2, 4).transpose(0, 1)
    context = {"a": SimpleNamespace(kv_cache=hnd), "b": SimpleNamespace(kv_cache=nhd)}
    groups = [AttentionGroup(Hnd, ["a"], full(), 0), AttentionGroup(Nhd, ["b"], SLIDING, 1)]
    with pytest.raises(ValueError, match="a and b: expected each block of both in the same bytes"):
        KVBlockZeroer("cpu", False).init_meta(groups, [8, 8], "auto", set(), context)


# Segments


def segments_by_hand(
    view: Tensor, backend: type[Stated], spec: AttentionSpec
) -> list[tuple[int, ...]]:
    base, tokens = view.data_ptr(), view.shape[2 if backend is not Mla else 1]
    dim = find_block_dim(backend, tokens, spec)
    return [
        (segment.address - base, segment.stride_nbytes, segment.nbytes)
        for segment in segments_of("l.0", view, dim, spec.block_size // tokens)
    ]


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("hnd", [(0, 256, 256), (1280, 256, 256)]),
        ("nhd", [(0, 512, 512)]),
        ("blocks-first", [(0, 256, 256)]),
        ("packed", [(0, 512, 512)]),
        ("latent", [(0, 96, 96)]),
        # 3 heads inside K and V: 128 bytes, 5 blocks, heads 640 apart
        ("heads-outside", [(n * 640, 128, 128) for n in range(6)]),
        ("split", [(0, 1536, 1536)]),  # three kernel blocks of 512
        ("padded", [(0, 640, 512)]),
        ("padded-planes", [(0, 320, 256), (1600, 320, 256)]),
        ("padded-split", [(0, 1632, 512), (544, 1632, 512), (1088, 1632, 512)]),
    ],
)
def test_segments_by_hand(name: str, want: list[tuple[int, ...]]) -> None:
    backend, spec = LAYERS[name]
    assert isinstance(spec, AttentionSpec)
    view = one_layer(name).context["l.0"].kv_cache
    assert sorted(segments_by_hand(view, backend, spec)) == want


def test_layers_within_a_block_of_all_layers() -> None:
    """Blocks across layers: [blocks, layers, 2, tokens, heads, D], and K of all before V of all."""
    buffer = torch.zeros(3, 4, 2, 8, 2, 4)
    together = buffer[:, 1].transpose(0, 1)
    assert segments_by_hand(together, Nhd, full()) == [(0, 2048, 512)]
    apart = buffer.view(3, 2, 4, 8, 2, 4)[:, :, 1].transpose(0, 1)
    assert segments_by_hand(apart, Nhd, full()) == [(0, 2048, 256), (1024, 2048, 256)]
    layers = [segments_of(f"l.{i}", buffer[:, i].transpose(0, 1), 1, 1) for i in range(4)]
    found = distinct([segment for layer in layers for segment in layer], 3)
    assert [segment.layer for segment in found] == ["l.0", "l.1", "l.2", "l.3"]


def test_equal_bytes_are_kept_once_and_whole() -> None:
    small, large = Segment("a", 1000, 64, 48), Segment("b", 1000, 64, 64)
    other = Segment("c", 1256, 64, 64)  # right behind the fourth block
    assert distinct([small, other, large, small], 4) == (large, other)


@pytest.mark.parametrize(
    "second",
    [
        Segment("b", 1000, 32, 32),  # another step
        Segment("b", 1032, 64, 33),  # one byte into the next block
        Segment("b", 1064, 64, 64),  # the next block
        Segment("b", 1255, 64, 8),  # the last byte
    ],
)
def test_blocks_in_other_blocks_are_refused(second: Segment) -> None:
    first = Segment("a", 1000, 64, 64)
    with pytest.raises(ValueError, match=": expected each block of both in the same bytes"):
        distinct([second, first], 4)
    assert len(distinct([second, first], 1)) == 2  # of one block there is no other


# The table of addresses and its kernel


def table_of(cache: Cache, device: torch.device | str) -> TableFiller:
    views: dict[str, Tensor] = {}
    segments: list[Segment] = []
    for parts in cache.attn_groups():
        for group in parts:
            (name,), spec = group.layer_names, group.kv_cache_spec
            assert isinstance(spec, AttentionSpec)
            views[name] = cache.context[name].kv_cache
            (tokens,) = prepare_kernel_block_sizes(
                KVCacheConfig(1, [], [KVCacheGroupSpec([name], spec)]), [[group]]
            )
            dim = find_block_dim(group.backend, tokens, spec)
            segments += segments_of(name, views[name], dim, spec.block_size // tokens)
    return TableFiller(
        distinct(segments, NUM_BLOCKS), views, torch.device(device), pin_memory=False
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is off beside a GPU")
@pytest.mark.parametrize("name", [*LAYERS, "two-groups"])
def test_one_launch_zeroes_the_same(name: str) -> None:
    cache = two_groups() if name == "two-groups" else one_layer(name)
    want = cache.zeroed_naively([3, 1])
    table_of(cache, "cpu").zero(np.array([3, 1]))
    assert cache.content() == want


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*LAYERS, "two-groups"])
def test_on_a_gpu(name: str) -> None:
    if name == "two-groups":
        cache = two_groups("cuda")
    else:
        backend, spec = LAYERS[name]
        cache = Cache(
            [(["l.0", "l.1"], spec)],
            [["l.0"], ["l.1"]],
            {"l.0": backend, "l.1": backend},
            device="cuda",
        )
    for block_ids in IDS:
        want = cache.zeroed_naively(block_ids)
        cache.zeroer.zero_block_ids(block_ids)
        torch.cuda.synchronize()
        assert cache.content() == want
        for buffer in cache.buffers:
            buffer.fill_(POISON)
    with pytest.raises(ValueError, match=r"expected ids in \[0, 5\), got 5"):
        cache.zeroer.zero_block_ids([5])


@pytest.mark.parametrize(
    "block_ids",
    [[np.int64(0), np.int32(0)], np.array([0]), torch.tensor([0]), torch.tensor([0, 0]).int()],
    ids=repr,
)
def test_ids_may_be_of_numpy_and_torch(block_ids: Any) -> None:
    """Block 0 too: an array that holds it alone is false."""
    cache = one_layer("hnd")
    cache.zeroer.zero_block_ids(block_ids)
    assert cache.content()[0].count(0) == 512


def test_a_buffer_that_begins_inside_a_storage() -> None:
    """Views of one allocation: offsets count from the storage, not from the buffer."""
    config = KVCacheConfig(3, [KVCacheTensor(1536, ["l.0"])], [KVCacheGroupSpec(["l.0"], full())])
    memory = torch.full((64 + 1536 + 64,), POISON, dtype=torch.uint8)
    context = {"l.0": SimpleNamespace(kv_cache=None)}
    init_kv_cache([], context, config, {"l.0": Nhd}, "cpu", allocator=lambda _: memory[64:])
    zeroer = KVBlockZeroer("cpu", False)
    zeroer.init_meta([AttentionGroup(Nhd, ["l.0"], full(), 0)], [8], "float32", set(), context)
    zeroer.zero_block_ids([1])
    assert set(memory[: 64 + 512].tolist()) == {POISON}
    assert memory[64 + 512 : 64 + 1024].count_nonzero() == 0
    assert set(memory[64 + 1024 :].tolist()) == {POISON}
