"""Pools: shapes by hand, regions that point at the bytes of the views, and refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvxfer.tensors.allocate import (
    KVPoolSpec,
    PoolLayout,
    allocate_kv_pool,
    kv_pool_nbytes,
    plane_of,
    regions_of,
)


def make_spec(
    layout: PoolLayout = PoolLayout.HND,
    block_tokens: int = 16,
    heads: tuple[int, int] = (2, 5),
    dtype: torch.dtype = torch.float32,
    num_blocks: int = 4,
) -> KVPoolSpec:
    return KVPoolSpec(
        layout=layout,
        layer_names=("model.layers.0.self_attn", "model.layers.1.self_attn"),
        num_blocks=num_blocks,
        block_tokens=block_tokens,
        head_lo=heads[0],
        head_hi=heads[1],
        head_size=6,
        dtype=dtype,
    )


@pytest.mark.parametrize(
    ("layout", "block_tokens", "shape", "kernel_blocks"),
    [
        (PoolLayout.HND, 8, (2, 4, 3, 8, 6), 1),
        (PoolLayout.HND, 24, (2, 4, 3, 24, 6), 1),
        (PoolLayout.HND, 64, (2, 4, 3, 64, 6), 1),
        (PoolLayout.NHD, 8, (4, 2, 8, 3, 6), 1),
        (PoolLayout.NHD, 16, (4, 2, 16, 3, 6), 1),
        (PoolLayout.NHD, 24, (12, 2, 8, 3, 6), 3),
        (PoolLayout.NHD, 32, (4, 2, 32, 3, 6), 1),
        (PoolLayout.NHD, 48, (12, 2, 16, 3, 6), 3),
        (PoolLayout.NHD, 64, (4, 2, 64, 3, 6), 1),
        (PoolLayout.NHD, 128, (8, 2, 64, 3, 6), 2),
    ],
)
def test_shapes(
    layout: PoolLayout, block_tokens: int, shape: tuple[int, ...], kernel_blocks: int
) -> None:
    spec = make_spec(layout, block_tokens)
    pool = allocate_kv_pool(spec)
    assert [tuple(view.shape) for view in pool.layers.values()] == [shape, shape]
    assert {region.kernel_blocks for region in pool.regions} == {kernel_blocks}
    # 2 layers x K and V x 4 blocks x tokens x 3 heads x 6 values x 4 bytes
    assert pool.buffer.numel() == kv_pool_nbytes(spec) == 2 * 2 * 4 * block_tokens * 3 * 6 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("layout", "block_tokens"), [(PoolLayout.HND, 24), (PoolLayout.NHD, 24), (PoolLayout.NHD, 32)]
)
def test_regions_point_at_the_views(
    layout: PoolLayout, block_tokens: int, dtype: torch.dtype
) -> None:
    """Every value is found, once, by the address formula of the Region."""
    spec = make_spec(layout, block_tokens, dtype=dtype)
    pool = allocate_kv_pool(spec)
    pool.buffer.copy_(torch.arange(pool.buffer.numel()) * 37 % 251)
    raw, seen = pool.buffer.numpy(), 0
    names = [(region.layer, region.plane) for region in pool.regions]
    first, second = pool.layers
    assert names == [(first, "k"), (first, "v"), (second, "k"), (second, "v")]
    for region in pool.regions:
        tokens = plane_of(pool.layers[region.layer], "kv".index(region.plane), layout)
        assert (region.group, region.memory, region.num_blocks) == (0, 0, 4)
        assert (region.head_lo, region.head_hi) == (2, 5)
        kernel_tokens = block_tokens // region.kernel_blocks
        for block in range(4):
            for token in range(block_tokens):
                kernel = block * region.kernel_blocks + token // kernel_tokens
                for head in (2, 3, 4):
                    address = (
                        region.offset
                        + kernel * region.stride_block
                        + (head - region.head_lo) * region.stride_head
                        + token % kernel_tokens * region.stride_token
                    )
                    got = raw[address : address + region.inner_nbytes].tobytes()
                    want = tokens[kernel, token % kernel_tokens, head - 2].contiguous()
                    assert got == want.view(torch.uint8).numpy().tobytes()
                    seen += len(got)
    assert seen == pool.buffer.numel()


def test_strides_by_hand() -> None:
    k, v, *_ = allocate_kv_pool(make_spec(PoolLayout.HND, 16)).regions
    assert (k.stride_block, k.stride_head, k.stride_token, k.inner_nbytes) == (1152, 384, 24, 24)
    assert (k.offset, v.offset) == (0, 4608)
    k, v, *_ = allocate_kv_pool(make_spec(PoolLayout.NHD, 16)).regions
    assert (k.stride_block, k.stride_head, k.stride_token, k.inner_nbytes) == (2304, 24, 72, 24)
    assert (k.offset, v.offset) == (0, 1152)


def test_allocator_backs_the_pool_and_keeps_its_content() -> None:
    spec = make_spec()
    taken: list[Tensor] = []

    def allocator(nbytes: int) -> Tensor:
        taken.append(torch.full((nbytes + 64,), 0x3F, dtype=torch.uint8)[64:])
        return taken[0]

    pool = allocate_kv_pool(spec, allocator, memory=3)
    assert pool.buffer is taken[0]
    assert pool.regions[0].offset == 0  # from the buffer's first byte, not its storage's
    assert {region.memory for region in pool.regions} == {3}
    pool.layers["model.layers.0.self_attn"][0, 0, 0, 0, 0] = 0.0
    assert taken[0][:6].tolist() == [0, 0, 0, 0, 0x3F, 0x3F]


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(100), "expected a contiguous one-dimensional uint8 tensor, got torch.float32"),
        (torch.zeros(100, dtype=torch.uint8), "expected at least 18432 bytes, got 100"),
        (torch.zeros(18433, dtype=torch.uint8)[1:], "expected memory aligned to 4 bytes"),
        (torch.zeros(2, 9216, dtype=torch.uint8), r"of shape \(2, 9216\)"),
    ],
)
def test_allocators_that_do_not_fit_are_refused(tensor: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        allocate_kv_pool(make_spec(), lambda _: tensor)


def test_specs_and_views_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="block_tokens: expected a positive multiple of 8, got 12"):
        make_spec(block_tokens=12)
    with pytest.raises(ValueError, match=r"expected 0 <= head_lo < head_hi, got \[3, 3\)"):
        make_spec(heads=(3, 3))
    with pytest.raises(ValueError, match="num_blocks: expected more than 0, got 0"):
        make_spec(num_blocks=0)
    spec = make_spec()
    pool = allocate_kv_pool(spec)
    with pytest.raises(ValueError, match="x: expected torch.float32 of shape"):
        regions_of({"x": torch.zeros(1)}, spec, pool.buffer)
    with pytest.raises(ValueError, match="x: expected a view of the buffer of"):
        regions_of({"x": torch.zeros(spec.layer_shape)}, spec, pool.buffer)
