"""Buffers, views and binding: strides by hand, every byte of a view in its own block, refusals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvxfer.cache.specs import (
    DTYPE_NBYTES,
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
from kvxfer.tensors.kv_cache import (
    add_kv_sharing_layers_to_kv_cache_groups,
    allocate_kv_cache,
    bind_kv_cache,
    init_kv_cache,
    reshape_kv_cache,
)
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


def full(block_size: int = 8, heads: int = 2, head_size: int = 4, **more: Any) -> FullAttentionSpec:
    settings = {"dtype": "float32", **more}
    return FullAttentionSpec(
        block_size=block_size, num_kv_heads=heads, head_size=head_size, **settings
    )


def sliding(**more: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=8, num_kv_heads=2, head_size=4, dtype="float32", sliding_window=5, **more
    )


def config_of(
    num_blocks: int, groups: list[tuple[list[str], KVCacheSpec]], buffers: list[list[str]]
) -> KVCacheConfig:
    """Every buffer has the blocks of its first layer."""
    specs = {layer: spec for layers, spec in groups for layer in layers}
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[
            KVCacheTensor(size=num_blocks * specs[layers[0]].page_size_bytes, shared_by=layers)
            for layers in buffers
        ],
        kv_cache_groups=[KVCacheGroupSpec(list(layers), spec) for layers, spec in groups],
    )


def one_layer(spec: KVCacheSpec, num_blocks: int = 3) -> KVCacheConfig:
    return config_of(num_blocks, [(["l.0"], spec)], [["l.0"]])


def view_of(spec: KVCacheSpec, backend: type[Stated], num_blocks: int = 3) -> Tensor:
    config = one_layer(spec, num_blocks)
    view = reshape_kv_cache(config, allocate_kv_cache(config, "cpu"), {"l.0": backend})["l.0"]
    assert isinstance(view, Tensor)
    return view


# Allocation


def test_one_buffer_for_all_layers_that_share_it() -> None:
    config = config_of(
        3, [(["l.0", "l.2"], full()), (["l.1", "l.3"], sliding())], [["l.0", "l.1"], ["l.2", "l.3"]]
    )
    raw = allocate_kv_cache(config, "cpu")
    assert list(raw) == ["l.0", "l.1", "l.2", "l.3"]
    assert raw["l.0"] is raw["l.1"]
    assert raw["l.2"] is raw["l.3"]
    assert raw["l.0"].data_ptr() != raw["l.2"].data_ptr()
    # 3 blocks x K and V x 8 tokens x 2 heads x 4 values x 4 bytes
    assert [(t.dtype, tuple(t.shape)) for t in raw.values()] == [(torch.int8, (1536,))] * 4
    assert not any(t.any() for t in raw.values())


def test_an_allocator_is_called_once_and_its_content_stays() -> None:
    config = config_of(3, [(["l.0", "l.1"], full())], [["l.0"], ["l.1"]])
    asked: list[int] = []
    memory = torch.full((4096 + 1536 + 10,), 0x3F, dtype=torch.uint8)

    def allocator(nbytes: int) -> Tensor:
        asked.append(nbytes)
        return memory

    raw = allocate_kv_cache(config, "cpu", allocator=allocator)
    assert asked == [4096 + 1536]  # the second buffer begins at the next 4096
    assert [t.data_ptr() - memory.data_ptr() for t in raw.values()] == [0, 4096]
    assert [(t.dtype, tuple(t.shape)) for t in raw.values()] == [(torch.int8, (1536,))] * 2
    assert set(raw["l.1"].tolist()) == {0x3F}


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.zeros(9999), "expected a contiguous one-dimensional uint8 tensor, got torch.float3"),
        (torch.zeros(2, 9999, dtype=torch.uint8), r"of shape \(2, 9999\)"),
        (torch.zeros(1535, dtype=torch.uint8), "expected at least 1536 bytes, got 1535"),
        (torch.zeros(9999, dtype=torch.uint8)[4:], "expected memory aligned to 64 bytes"),
        (torch.zeros(9999, dtype=torch.uint8, device="meta"), "expected memory on cpu, got meta"),
    ],
)
def test_allocators_that_do_not_fit_are_refused(tensor: Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        allocate_kv_cache(one_layer(full()), "cpu", allocator=lambda _: tensor)


def test_wrong_buffers_are_refused() -> None:
    config = one_layer(full())
    config.kv_cache_tensors.append(KVCacheTensor(size=8, shared_by=["l.0"]))
    with pytest.raises(ValueError, match="l.0: expected one buffer for it, got two"):
        allocate_kv_cache(config, "cpu")
    config.kv_cache_tensors[:] = [KVCacheTensor(size=0, shared_by=["l.0"])]
    with pytest.raises(ValueError, match="buffer of l.0: expected at least 1 byte, got 0"):
        allocate_kv_cache(config, "cpu")


# Views


@pytest.mark.parametrize(
    ("backend", "spec", "shape", "strides"),
    [
        # [2, blocks, tokens, heads, D] over [2, 3, heads 2, tokens 8, D 4]
        (Hnd, full(), (2, 3, 8, 2, 4), (192, 64, 4, 32, 1)),
        # over [3, 2, tokens 8, heads 2, D 4]
        (Nhd, full(), (2, 3, 8, 2, 4), (64, 128, 8, 4, 1)),
        (BlocksFirst, full(), (3, 2, 8, 2, 4), (128, 64, 8, 4, 1)),
        # over [2, heads 2, blocks 3, tokens 8, D 4]
        (HeadsOutside, full(), (2, 3, 8, 2, 4), (192, 32, 4, 96, 1)),
        (Packed, full(), (3, 2, 8, 8), (128, 64, 8, 1)),
        # 24 tokens are three kernel blocks of 8, not one of 16 and a half
        (NhdOfEight, full(24), (2, 9, 8, 2, 4), (64, 128, 8, 4, 1)),
        # a block of 512 bytes in 640: V stays behind K, and 32 values are left
        (Nhd, full(page_size_padded=640), (2, 3, 8, 2, 4), (64, 160, 8, 4, 1)),
        # K and V outermost get half of it each
        (Hnd, full(page_size_padded=640), (2, 3, 8, 2, 4), (240, 80, 4, 32, 1)),
        # three kernel blocks get a third of 1632 bytes each
        (NhdOfEight, full(24, page_size_padded=1632), (2, 9, 8, 2, 4), (64, 136, 8, 4, 1)),
    ],
)
def test_views_by_hand(
    backend: type[Stated],
    spec: AttentionSpec,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> None:
    view = view_of(spec, backend)
    assert (tuple(view.shape), view.stride(), view.dtype) == (shape, strides, torch.float32)
    assert view.storage_offset() == 0


def test_a_latent_view_by_hand() -> None:
    spec = MLAAttentionSpec(block_size=8, num_kv_heads=1, head_size=6, dtype="bfloat16")
    view = view_of(spec, Mla)
    assert (tuple(view.shape), view.stride(), view.dtype) == ((3, 8, 6), (48, 6, 1), torch.bfloat16)


def test_given_kernel_block_sizes_are_used() -> None:
    config = one_layer(full(24))
    raw = allocate_kv_cache(config, "cpu")
    view = reshape_kv_cache(config, raw, {"l.0": Nhd}, kernel_block_sizes=[12])["l.0"]
    assert isinstance(view, Tensor)
    assert tuple(view.shape) == (2, 6, 12, 2, 4)


def test_state_views_by_hand() -> None:
    spec = MambaSpec(
        block_size=8, shapes=((2, 3), ()), dtypes=("float32", "bfloat16"), page_size_padded=32
    )
    config = one_layer(spec)
    raw = allocate_kv_cache(config, "cpu")
    conv, scalar = reshape_kv_cache(config, raw, {})["l.0"]
    assert (tuple(conv.shape), conv.stride(), conv.dtype) == ((3, 2, 3), (8, 3, 1), torch.float32)
    assert (tuple(scalar.shape), scalar.stride(), scalar.dtype) == ((3,), (16,), torch.bfloat16)
    conv.fill_(1.0)
    scalar.fill_(1.0)
    # in every block 6 floats, one bfloat16 behind them, and 6 bytes of padding
    floats, halves = [0, 0, -128, 63] * 6, [-128, 63]
    assert raw["l.0"].tolist() == (floats + halves + [0] * 6) * 3


def test_states_in_the_second_buffer_of_an_allocation() -> None:
    spec = MambaSpec(
        block_size=8, shapes=((2, 3), ()), dtypes=("float32", "bfloat16"), page_size_padded=32
    )
    config = config_of(3, [(["l.0", "l.1"], spec)], [["l.0"], ["l.1"]])
    memory = torch.zeros(4096 + 96, dtype=torch.uint8)
    raw = allocate_kv_cache(config, "cpu", allocator=lambda nbytes: memory[:nbytes])
    conv, scalar = reshape_kv_cache(config, raw, {})["l.1"]
    offsets = [view.data_ptr() - memory.data_ptr() for view in (conv, scalar)]
    assert offsets == [4096, 4096 + 24]  # the scalar behind 6 floats


@given(
    backend=st.sampled_from([Hnd, Nhd, NhdOfEight, BlocksFirst, HeadsOutside, Packed]),
    dtype=st.sampled_from(["float32", "bfloat16", "uint8"]),
    block_size=st.sampled_from([8, 16, 24]),
    heads=st.integers(1, 3),
    head_size=st.sampled_from([1, 3, 4]),
    num_blocks=st.integers(1, 4),
    pad=st.sampled_from([0, 0, 1, 2]),
)
def test_every_byte_of_a_block_lies_in_the_blocks_own_bytes(
    backend: type[Stated],
    dtype: str,
    block_size: int,
    heads: int,
    head_size: int,
    num_blocks: int,
    pad: int,
) -> None:
    """Fill block b with its number through the view: the buffer then holds it where the rule of
    sharing puts block b, as often as the block has bytes.
    """
    outer = {Hnd: 2, HeadsOutside: 2 * heads}.get(backend, 1)
    kernel_tokens = {16: 16, 24: 8}.get(block_size, 8) if backend is NhdOfEight else block_size
    kernel_blocks = block_size // kernel_tokens
    page = 2 * block_size * heads * head_size * DTYPE_NBYTES[dtype]
    padded = page + pad * outer * kernel_blocks * DTYPE_NBYTES[dtype]
    spec = full(block_size, heads, head_size, dtype=dtype, page_size_padded=padded)
    config = one_layer(spec, num_blocks)
    raw = allocate_kv_cache(config, "cpu")["l.0"]
    view = reshape_kv_cache(config, {"l.0": raw}, {"l.0": backend})["l.0"]
    assert isinstance(view, Tensor)
    dim = 0 if backend in (BlocksFirst, Packed) else 1
    content = view.view(torch.uint8)  # of bytes, as not every number is a bfloat16
    raw.fill_(-1)
    for block in range(num_blocks):
        lo = block * kernel_blocks
        content.narrow(dim, lo, kernel_blocks).fill_(block)
    by_place = raw.view(outer, num_blocks, padded // outer)
    for block in range(num_blocks):
        found = by_place[:, block].flatten().tolist()
        assert found.count(block) == page
        assert found.count(-1) == padded - page


def test_layers_of_one_group_keep_their_own_heads() -> None:
    wide, narrow = full(heads=3), full(heads=1)
    group = KVCacheGroupSpec(["l.0", "l.1"], wide, {"l.1": narrow})
    tensors = [KVCacheTensor(2 * wide.page_size_bytes, ["l.0"])]
    tensors += [KVCacheTensor(2 * narrow.page_size_bytes, ["l.1"])]
    config = KVCacheConfig(2, tensors, [group])
    add_kv_sharing_layers_to_kv_cache_groups({"l.2": "l.1"}, config.kv_cache_groups)
    buffers = allocate_kv_cache(config, "cpu")
    backends = dict.fromkeys(group.layer_names, Hnd)
    views = reshape_kv_cache(config, {**buffers, "l.2": buffers["l.1"]}, backends)
    shapes = {name: tuple(v.shape) for name, v in views.items() if isinstance(v, Tensor)}
    assert shapes == {
        "l.0": (2, 2, 8, 3, 4),
        "l.1": (2, 2, 8, 1, 4),
        "l.2": (2, 2, 8, 1, 4),
    }


def test_layers_of_two_groups_share_the_bytes_of_a_block() -> None:
    wide = full(16, 1, 4)  # other tokens and heads, equal bytes
    config = config_of(4, [(["l.0"], wide), (["l.1"], sliding())], [["l.0", "l.1"]])
    raw = allocate_kv_cache(config, "cpu")
    views = reshape_kv_cache(config, raw, {"l.0": NhdOfEight, "l.1": Nhd})
    first, second = views["l.0"], views["l.1"]
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    second[:, 2] = 7.0
    assert (first[:, 2] == 7.0).all()
    assert first[:, [0, 1, 3]].count_nonzero() == 0


@pytest.mark.parametrize(
    ("backends", "other", "said"),
    [
        ((Hnd, Nhd), sliding(), r"l.0 and l.1 share a buffer: .* 512 bytes in 2 piece\(s\) and bl"),
        ((Hnd, HeadsOutside), sliding(), r"in 2 piece\(s\) and blocks of 512 bytes in 4 piece"),
        ((Nhd, Nhd), sliding(page_size_padded=504 + 16), "512 bytes in 1 .* 520 bytes in 1"),
    ],
)
def test_layers_that_put_a_block_elsewhere_cannot_share(
    backends: tuple[type[Stated], type[Stated]], other: KVCacheSpec, said: str
) -> None:
    config = config_of(2, [(["l.0"], full()), (["l.1"], other)], [["l.0", "l.1"]])
    config.kv_cache_tensors[0].size = 2000
    raw = allocate_kv_cache(config, "cpu")
    with pytest.raises(ValueError, match=said):
        reshape_kv_cache(config, raw, {"l.0": backends[0], "l.1": backends[1]})


def test_a_state_beside_planes_outside_the_blocks_is_refused() -> None:
    state = MambaSpec(block_size=8, shapes=((128,),), dtypes=("float32",))
    config = config_of(2, [(["l.0"], state), (["l.1"], full())], [["l.0", "l.1"]])
    raw = allocate_kv_cache(config, "cpu")
    with pytest.raises(ValueError, match="l.0 and l.1 share a buffer"):
        reshape_kv_cache(config, raw, {"l.1": Hnd})
    views = reshape_kv_cache(config, raw, {"l.1": Nhd})
    assert isinstance(views["l.0"], list)


class TwoSizes(Stated):
    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return (num_blocks, 3 * block_size, num_kv_heads, head_size)


class NoBlocks(Stated):
    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return (2 * num_blocks * block_size, num_kv_heads, head_size)


class Disordered(Stated):
    order = (0, 1, 1, 3, 4)


@pytest.mark.parametrize(
    ("backend", "spec", "said"),
    [
        (Hnd, full(page_size_padded=516), "page_size_padded: .*got 516; pad to a multiple of 8"),
        (NhdOfEight, full(24, page_size_padded=1544), "3 kernel blocks.* pad to a multiple of 12"),
        (Nhd, full(page_size_padded=514), "whole elements of 4 bytes, got 514"),
        (Mla, full(heads=1), "expected 256 bytes in a block, as its spec says, got 128"),
        (NoBlocks, full(), "NoBlocks: expected one dimension that counts blocks"),
        (Disordered, full(), "Disordered: expected a stride order of the dimensions 0 to 4"),
        (NhdOfEight, full(12), "block_size: expected one that splits"),
    ],
)
def test_views_that_cannot_be_made_are_refused(
    backend: type[Stated], spec: AttentionSpec, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        view_of(spec, backend)


def test_wrong_arguments_of_reshape_are_refused() -> None:
    config = one_layer(full())
    raw = allocate_kv_cache(config, "cpu")
    with pytest.raises(KeyError, match="l.0: expected a buffer for it, got none"):
        reshape_kv_cache(config, {}, {"l.0": Nhd})
    with pytest.raises(KeyError, match="l.0: expected an attention backend for it, got none"):
        reshape_kv_cache(config, raw, {})
    with pytest.raises(KeyError, match="expected layers of the groups, got l.7 beside them"):
        reshape_kv_cache(config, {**raw, "l.7": raw["l.0"]}, {"l.0": Nhd})
    with pytest.raises(ValueError, match="kernel_block_sizes: expected one for each of 1 groups"):
        reshape_kv_cache(config, raw, {"l.0": Nhd}, kernel_block_sizes=[])
    with pytest.raises(ValueError, match="expected tokens that divide the block of 8, got 3"):
        reshape_kv_cache(config, raw, {"l.0": Nhd}, kernel_block_sizes=[3])
    with pytest.raises(ValueError, match="expected a buffer of 1536 bytes for 3 blocks of 512"):
        reshape_kv_cache(config, {"l.0": raw["l.0"][:1535]}, {"l.0": Nhd})
    with pytest.raises(ValueError, match="expected a flat buffer of bytes, got torch.int8 of sha"):
        reshape_kv_cache(config, {"l.0": raw["l.0"].view(3, 512)}, {"l.0": Nhd})
    config.num_blocks = 0
    with pytest.raises(ValueError, match="num_blocks: expected at least 1, got 0"):
        reshape_kv_cache(config, raw, {"l.0": Nhd})
    state = MambaSpec(block_size=8, shapes=((3,), (4,)), dtypes=("uint8", "float32"))
    with pytest.raises(ValueError, match="state 1: expected blocks and the states before it to b"):
        view_of(state, Nhd)
    unknown = config_of(3, [(["l.0"], KVCacheSpec(block_size=4))], [])
    with pytest.raises(NotImplementedError, match="got KVCacheSpec"):
        reshape_kv_cache(unknown, raw, {}, kernel_block_sizes=[4])


# Binding


def context_of(*names: str) -> dict[str, SimpleNamespace]:
    return {name: SimpleNamespace(kv_cache=None) for name in names}


def caches_of(*names: str) -> dict[str, Tensor]:
    return {name: torch.zeros(1) for name in names}


def bound_order(caches: dict[str, Tensor], num_attn_module: int = 1) -> list[str]:
    runner: list[Tensor] = []
    context = context_of(*caches, "other")
    bind_kv_cache(caches, context, runner, num_attn_module)
    assert all(context[name].kv_cache is cache for name, cache in caches.items())
    assert context["other"].kv_cache is None
    by_id = {id(cache): name for name, cache in caches.items()}
    return [by_id[id(cache)] for cache in runner]


def test_the_runners_list_is_in_the_order_of_the_layers() -> None:
    names = ["model.layers.10.attn", "model.layers.2.attn", "model.layers.0.attn"]
    assert bound_order(caches_of(*names)) == names[::-1]


def test_several_attentions_of_one_layer() -> None:
    names = ["d.1.self_attn", "d.1.cross_attn", "d.0.self_attn", "d.0.cross_attn"]
    assert bound_order(caches_of(*names), 2) == [*names[2:], *names[:2]]
    assert bound_order(caches_of(*names)) == [*names[2:], *names[:2]]
    names = ["m.1.attn.1", "m.1.attn.0", "m.0.attn.1", "m.0.attn.0"]
    assert bound_order(caches_of(*names), 2) == names[::-1]


@pytest.mark.parametrize("num_attn_module", [1, 2])
def test_a_draft_model_is_bound_beside_the_model(num_attn_module: int) -> None:
    names = ["model.layers.0.attn", "model.layers.1.attn"]
    drafts = [f"draft_{name}" for name in names]
    found = bound_order(caches_of(*names, *drafts), num_attn_module)
    assert found == [names[0], drafts[0], names[1], drafts[1]]


@pytest.mark.parametrize(
    ("names", "num_attn_module", "said"),
    [
        (["attn"], 1, "'attn': expected one number between its dots, got 0"),
        (["m.1.e.2"], 1, "'m.1.e.2': expected one number between its dots, got 2"),
        (["m.1.e.2.f.3"], 2, "expected one or two numbers between its dots, got 3"),
        (["l.0"], 0, "num_attn_module: expected at least 1, got 0"),
    ],
)
def test_names_that_give_no_order_are_refused(
    names: list[str], num_attn_module: int, said: str
) -> None:
    context, runner = context_of(*names), list[Tensor]()
    with pytest.raises(ValueError, match=said):
        bind_kv_cache(caches_of(*names), context, runner, num_attn_module)
    assert not runner
    assert all(layer.kv_cache is None for layer in context.values())


def test_bind_refuses_a_second_time_and_unknown_layers() -> None:
    caches, runner = caches_of("l.0"), [torch.zeros(1)]
    with pytest.raises(ValueError, match="runner_kv_caches: expected an empty list, got 1"):
        bind_kv_cache(caches, context_of("l.0"), runner)
    runner.clear()
    with pytest.raises(KeyError, match="expected a layer for every cache, got none for l.0"):
        bind_kv_cache(caches, context_of("l.1"), runner)
    assert not runner


# All together


@pytest.mark.parametrize("named_by_the_config", [False, True])
def test_init_allocates_shares_and_binds(named_by_the_config: bool) -> None:
    more = ["l.3"] if named_by_the_config else []
    config = config_of(
        3, [(["l.2", "l.0"], full()), (["l.1", *more], sliding())], [["l.0", "l.1", *more], ["l.2"]]
    )
    context, runner = context_of("l.0", "l.1", "l.2", "l.3"), list[Tensor]()
    memories: list[Tensor] = []

    def allocator(nbytes: int) -> Tensor:
        memories.append(torch.zeros(nbytes, dtype=torch.uint8))
        return memories[0]

    caches = init_kv_cache(
        runner,
        context,
        config,
        {"l.0": Hnd, "l.1": Hnd, "l.2": Hnd},
        "cpu",
        allocator=allocator,
        shared_kv_cache_layers={"l.3": "l.1"},
    )
    assert sorted(caches) == ["l.0", "l.1", "l.2", "l.3"]
    assert [group.layer_names for group in config.kv_cache_groups] == [
        ["l.2", "l.0"],
        ["l.1", "l.3"],
    ]
    assert caches["l.3"] is caches["l.1"]
    for name, bound in zip(["l.0", "l.1", "l.2", "l.3"], runner, strict=True):
        assert bound is caches[name] is context[name].kv_cache
    assert len(memories) == 1
    runner[3][0, 1, 0, 0, 0] = 1.0
    assert runner[0][0, 1, 0, 0, 0] == 1.0  # the same buffer
    assert memories[0].count_nonzero() == 2  # the bytes of one 1.0
    # The second buffer's views begin where it begins.
    assert [bound.data_ptr() - memories[0].data_ptr() for bound in runner] == [0, 0, 4096, 0]


def test_a_sharer_whose_backend_reads_other_bytes_is_refused() -> None:
    config, context = one_layer(full()), context_of("l.0", "l.1")
    said = "l.1 shares the cache of l.0: expected a backend with the same .* got Hnd and Nhd"
    with pytest.raises(ValueError, match=said):
        init_kv_cache(
            [], context, config, {"l.0": Nhd, "l.1": Hnd}, "cpu",
            shared_kv_cache_layers={"l.1": "l.0"},
        )  # fmt: skip
    assert context["l.0"].kv_cache is None
    backends: dict[str, type[Stated]] = {"l.0": Nhd, "l.1": NhdOfEight}
    init_kv_cache([], context, config, backends, "cpu", shared_kv_cache_layers={"l.1": "l.0"})
    assert context["l.1"].kv_cache is context["l.0"].kv_cache
