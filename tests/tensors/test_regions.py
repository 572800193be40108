"""Regions of bound views: the bytes that the view has, found through ``Region.address``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

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
from kvxfer.tensors.cache_views import LayerCache
from kvxfer.tensors.kv_cache import allocate_kv_cache, init_kv_cache, reshape_kv_cache
from kvxfer.tensors.regions import kv_regions
from kvxfer.transfer.layout import Region, same_bytes
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


def config_of(spec: KVCacheSpec, num_blocks: int = 3) -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[KVCacheTensor(num_blocks * spec.page_size_bytes, ["l.0"])],
        kv_cache_groups=[KVCacheGroupSpec(["l.0"], spec)],
    )


def regions_of(
    config: KVCacheConfig, backend: type[Stated], heads: tuple[int, int]
) -> tuple[Tensor, Tensor, tuple[Region, ...]]:
    """The only layer's buffer, view and regions."""
    raw = allocate_kv_cache(config, "cpu")
    views = reshape_kv_cache(config, raw, {"l.0": backend})
    view = views["l.0"]
    assert isinstance(view, Tensor)
    regions = kv_regions(config, views, {"l.0": backend}, [raw["l.0"]], *heads)
    return raw["l.0"], view, regions


def read(raw: Tensor, region: Region, block: int, head: int, token: int) -> bytes:
    start = region.address(block, head, token)
    return bytes(raw.view(torch.uint8)[start : start + region.inner_nbytes].tolist())


def stored(view: Tensor, backend: type[Stated], place: tuple[int, int, int, int]) -> Tensor:
    """The values of (plane, kernel block, token, head), by the meaning of the logical shape."""
    plane, block, token, head = place
    if backend is Packed:
        width = view.shape[3] // 2
        return view[block, head, token, plane * width : (plane + 1) * width]
    if backend is BlocksFirst:
        return view[block, plane, token, head]
    if backend is Mla:
        return view[block, token]
    return view[plane, block, token, head]


@given(
    backend=st.sampled_from([Hnd, Nhd, NhdOfEight, BlocksFirst, HeadsOutside, Packed]),
    dtype=st.sampled_from(["float32", "bfloat16", "uint8"]),
    block_size=st.sampled_from([8, 16, 24]),
    heads=st.sampled_from([(0, 1), (2, 4), (3, 6)]),
    head_size=st.sampled_from([1, 2, 5]),
    num_blocks=st.integers(1, 3),
    pad=st.sampled_from([0, 48]),
)
def test_every_value_is_where_its_region_says(
    backend: type[Stated],
    dtype: str,
    block_size: int,
    heads: tuple[int, int],
    head_size: int,
    num_blocks: int,
    pad: int,
) -> None:
    num_heads = heads[1] - heads[0]
    unpadded = full(block_size, num_heads, head_size, dtype=dtype).page_size_bytes
    pad *= num_heads  # so that heads outside the blocks get whole elements, too
    spec = full(block_size, num_heads, head_size, dtype=dtype, page_size_padded=unpadded + pad)
    raw, view, regions = regions_of(config_of(spec, num_blocks), backend, heads)
    raw.copy_(torch.randint(-128, 128, raw.shape, dtype=torch.int8))
    kernel_tokens = view.shape[2]
    seen: set[int] = set()
    assert [region.plane for region in regions] == ["k", "v"]
    for plane, region in enumerate(regions):
        assert (region.layer, region.group, region.memory) == ("l.0", 0, 0)
        assert (region.num_blocks, region.block_tokens) == (num_blocks, block_size)
        assert region.kernel_blocks == block_size // kernel_tokens
        assert region.window is None
        for block in range(num_blocks):
            for token in range(block_size):
                kernel, slot = divmod(block * block_size + token, kernel_tokens)
                for head in range(*heads):
                    want = stored(view, backend, (plane, kernel, slot, head - heads[0]))
                    want_bytes = bytes(want.contiguous().view(torch.uint8).tolist())
                    assert read(raw, region, block, head, token) == want_bytes
                    start = region.address(block, head, token)
                    seen.update(range(start, start + region.inner_nbytes))
    assert len(seen) == num_blocks * unpadded  # every byte of the content, once


@pytest.mark.parametrize(
    ("backend", "spec", "k", "v_offset"),
    [
        # (block, head, token) strides in bytes
        (Hnd, full(), (256, 128, 16), 768),
        (Nhd, full(), (512, 16, 32), 256),
        (Nhd, full(page_size_padded=640), (640, 16, 32), 256),
        (Hnd, full(page_size_padded=640), (320, 128, 16), 960),
        (Packed, full(), (512, 256, 32), 16),
    ],
)
def test_strides_by_hand(
    backend: type[Stated], spec: AttentionSpec, k: tuple[int, int, int], v_offset: int
) -> None:
    _, _, regions = regions_of(config_of(spec), backend, (0, 2))
    for region, offset in zip(regions, (0, v_offset), strict=True):
        assert (region.stride_block, region.stride_head, region.stride_token) == k
        assert (region.offset, region.inner_nbytes) == (offset, 16)


def test_a_latent_is_one_plane() -> None:
    spec = MLAAttentionSpec(block_size=8, num_kv_heads=1, head_size=6, dtype="bfloat16")
    raw, view, (region,) = regions_of(config_of(spec), Mla, (0, 1))
    assert (region.plane, region.head_lo, region.head_hi) == ("latent", 0, 1)
    raw.copy_(torch.randint(-128, 128, raw.shape, dtype=torch.int8))
    for block in range(3):
        for token in range(8):
            want = bytes(view[block, token].contiguous().view(torch.uint8).tolist())
            assert read(raw, region, block, 0, token) == want


def test_groups_windows_sharers_and_memories() -> None:
    """Two groups in two buffers of one allocation, a third group in an allocation of its own."""
    window = SlidingWindowSpec(
        block_size=8, num_kv_heads=2, head_size=4, dtype="float32", sliding_window=5
    )
    was_window = full(sliding_window=5)  # keeps everything
    config = KVCacheConfig(
        num_blocks=3,
        kv_cache_tensors=[KVCacheTensor(1536, ["l.0", "l.1"]), KVCacheTensor(1536, ["l.2"])],
        kv_cache_groups=[
            KVCacheGroupSpec(["l.0", "l.2"], was_window),
            KVCacheGroupSpec(["l.1"], window),
        ],
    )
    taken: list[Tensor] = []

    def allocator(nbytes: int) -> Tensor:
        taken.append(torch.zeros(nbytes, dtype=torch.uint8))
        return taken[0]

    context = {f"l.{i}": SimpleNamespace(kv_cache=None) for i in range(5)}
    backends: dict[str, type[Stated]] = dict.fromkeys(context, Nhd)
    caches: dict[str, LayerCache] = init_kv_cache(
        [], context, config, backends, "cpu", allocator=allocator,
        shared_kv_cache_layers={"l.3": "l.1"},
    )  # fmt: skip
    apart = config_of(full())
    raw = allocate_kv_cache(apart, "cpu")
    caches["l.4"] = reshape_kv_cache(apart, raw, {"l.0": Nhd})["l.0"]
    config.kv_cache_groups.append(KVCacheGroupSpec(["l.4"], full()))
    regions = kv_regions(config, caches, backends, [taken[0], raw["l.0"]], 4, 6)
    assert [
        (r.layer, r.plane, r.group, r.memory, r.offset, r.window, r.head_lo) for r in regions
    ] == [
        ("l.0", "k", 0, 0, 0, None, 4),
        ("l.0", "v", 0, 0, 256, None, 4),
        ("l.2", "k", 0, 0, 4096, None, 4),
        ("l.2", "v", 0, 0, 4352, None, 4),
        ("l.1", "k", 1, 0, 0, 5, 4),
        ("l.1", "v", 1, 0, 256, 5, 4),
        ("l.3", "k", 1, 0, 0, 5, 4),
        ("l.3", "v", 1, 0, 256, 5, 4),
        ("l.4", "k", 2, 1, 0, None, 4),
        ("l.4", "v", 2, 1, 256, None, 4),
    ]
    assert same_bytes(regions[4], regions[6])
    assert not same_bytes(regions[0], regions[4])  # another group


STATE = MambaSpec(block_size=8, shapes=((4,),), dtypes=("float32",))


@pytest.mark.parametrize("spec", [STATE, KVCacheSpec(block_size=8)])
def test_what_has_no_regions_is_named(spec: KVCacheSpec) -> None:
    config = KVCacheConfig(3, [], [KVCacheGroupSpec(["l.0"], spec)])
    said = f"l.0: expected full, sliding-window or chunked attention, got {type(spec).__name__}"
    with pytest.raises(ValueError, match=said):
        kv_regions(config, {"l.0": [torch.zeros(1)]}, {"l.0": Nhd}, [], 0, 2)


class ThreePlanes(Nhd):
    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return (3, num_blocks, block_size, num_kv_heads, head_size)


class HeadsInChannels(Stated):
    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return (2, num_blocks, block_size, num_kv_heads * head_size)


class Rounded(Stated):
    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return (2, num_blocks, block_size, num_kv_heads, head_size + 1)


VIEW = torch.zeros(2, 3, 8, 2, 4)
MEMORY = VIEW.view(-1).view(torch.uint8)


@pytest.mark.parametrize(
    ("view", "backend", "memory", "heads", "said"),
    [
        (VIEW, Stated, MEMORY, (0, 3), r"l.0: heads: expected 2, got \[0, 3\)"),
        (VIEW, Stated, MEMORY[:-1], (0, 2), "l.0: expected a view of one of the 1 memories"),
        (VIEW, Stated, MEMORY[1:], (0, 2), "l.0: expected a view of one of the 1 memories"),
        (VIEW, Stated, VIEW, (0, 2), "memory 0: expected a flat tensor of one-byte elements"),
        (VIEW.int(), Stated, MEMORY, (0, 2), "expected float32 of shape .* got int32 of"),
        (VIEW[:, :2], Stated, MEMORY, (0, 2), r"expected float32 of shape \(2, 3, 8, 2, 4\)"),
        (VIEW[:, :, :3], Stated, MEMORY, (0, 2), "expected kernel blocks that divide a block of"),
        (VIEW[0, 0, 0], Stated, MEMORY, (0, 2), "expected kernel blocks that divide a block of 8"),
        (torch.zeros(2, 3, 8, 4, 2).mT, Stated, MEMORY, (0, 2), "contiguous elements within a"),
        (torch.zeros(3, 3, 8, 2, 4), ThreePlanes, MEMORY, (0, 2), "expected K and V of 4 elements"),
        (VIEW.flatten(3), HeadsInChannels, MEMORY, (0, 2), "expected separate dimensions of bl"),
        (VIEW, Rounded, MEMORY, (0, 2), "Rounded: expected one dimension to double with head_s"),
    ],
)
def test_views_that_are_not_what_they_should_be_are_refused(
    view: Tensor, backend: type[Stated], memory: Tensor, heads: tuple[int, int], said: str
) -> None:
    if view.data_ptr() != VIEW.data_ptr():
        memory = torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage())
    with pytest.raises(ValueError, match=said):
        kv_regions(config_of(full()), {"l.0": view}, {"l.0": backend}, [memory], *heads)


def test_missing_views_and_backends_are_named() -> None:
    config = config_of(full())
    with pytest.raises(KeyError, match="l.0: expected its view, got none"):
        kv_regions(config, {}, {"l.0": Nhd}, [], 0, 2)
    with pytest.raises(KeyError, match="l.0: expected its attention backend, got none"):
        kv_regions(config, {"l.0": VIEW}, {}, [], 0, 2)
    with pytest.raises(TypeError, match="l.0: expected one view, got a list of states"):
        kv_regions(config, {"l.0": [VIEW]}, {"l.0": Nhd}, [], 0, 2)
