"""Received blocks in local order: compared, byte for byte, with loops over tokens and heads."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvxfer.kernels.block_rewrite import BlockOrder, BlockRewrite
from kvxfer.kernels.rewrite_kernel import rewrite_blocks
from kvxfer.tensors.postprocess import (
    Postprocessor,
    _launches_of,
    _plane_of,
    kv_postprocess_blksize_and_layout_on_receive,
    kv_postprocess_blksize_on_receive,
    kv_postprocess_layout_on_receive,
    zero_uncovered_tokens,
)
from tests.helpers import assert_same_bytes, poisoned
from tests.kernels.rewrite_cases import moved

Function = Literal["blksize", "layout", "both"]
TOKEN_MAJOR: dict[Function, bool] = {"blksize": False, "layout": True, "both": True}


@dataclass(frozen=True)
class Case:
    function: Function
    ratio: int
    num_heads: int
    small_tokens: int  # of a received block
    width: int
    dtype: torch.dtype
    heads_first: bool  # the order of the view's dimensions, whatever the memory's
    ids: tuple[int, ...]
    num_blocks: int = 6

    @property
    def num_tokens(self) -> int:
        return self.ratio * self.small_tokens

    @property
    def memory_shape(self) -> tuple[int, ...]:
        middle = (self.num_heads, self.num_tokens)
        if TOKEN_MAJOR[self.function]:
            middle = middle[::-1]
        return (self.num_blocks, *middle, self.width)

    def view(self, memory: Tensor) -> Tensor:
        token_major = TOKEN_MAJOR[self.function]
        return memory.transpose(1, 2) if self.heads_first == token_major else memory

    def run(self, cache: Tensor, ids: list[int] | Tensor) -> None:
        if self.function == "blksize":
            kv_postprocess_blksize_on_receive(cache, ids, self.ratio)
        elif self.function == "layout":
            kv_postprocess_layout_on_receive(cache, ids)
        else:
            kv_postprocess_blksize_and_layout_on_receive(cache, ids, self.ratio)


def received(case: Case, seed: int = 0) -> Tensor:
    """Memory of random bytes, so with NaNs of every kind in it; poison where nothing was sent."""
    memory = poisoned(case.memory_shape, dtype=case.dtype)
    generator = torch.Generator().manual_seed(seed)
    raw = memory.view(torch.uint8)
    for block in case.ids:
        raw[block] = torch.randint(0, 256, raw[block].shape, generator=generator).to(torch.uint8)
    return memory


def naive(case: Case, memory: Tensor) -> Tensor:
    """The same memory afterwards."""
    local = BlockOrder(case.num_tokens, by_head=not TOKEN_MAJOR[case.function])
    received = BlockOrder(case.small_tokens, by_head=True)
    after = memory.view(torch.uint8).clone()
    rows = after.view(case.num_blocks, -1, case.width * case.dtype.itemsize)
    for block in case.ids:
        rows[block : block + 1] = moved(
            BlockRewrite(case.num_heads, received, local), rows[block : block + 1]
        )
    return after.view(case.dtype)


def check(case: Case, device: torch.device | str = "cpu") -> None:
    memory = received(case)
    want = naive(case, memory)
    memory = memory.to(device)
    case.run(case.view(memory), list(case.ids))
    assert_same_bytes(memory, want)


def test_a_block_written_out_by_hand() -> None:
    # Two received blocks of two tokens, three heads; an element is head * 10 + token.
    sent = [0, 1, 10, 11, 20, 21, 2, 3, 12, 13, 22, 23]
    by_head = torch.tensor(sent, dtype=torch.int32).view(1, 3, 4, 1)
    kv_postprocess_blksize_on_receive(by_head, [0], 2)
    assert by_head.flatten().tolist() == [0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23]
    by_token = torch.tensor(sent, dtype=torch.int32).view(1, 4, 3, 1)
    kv_postprocess_blksize_and_layout_on_receive(by_token, [0], 2)
    assert by_token.flatten().tolist() == [0, 10, 20, 1, 11, 21, 2, 12, 22, 3, 13, 23]
    # One received block of four tokens.
    sent = [0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23]
    by_token = torch.tensor(sent, dtype=torch.int32).view(1, 4, 3, 1)
    kv_postprocess_layout_on_receive(by_token, [0])
    assert by_token.flatten().tolist() == [0, 10, 20, 1, 11, 21, 2, 12, 22, 3, 13, 23]


FUNCTIONS: list[Function] = ["blksize", "layout", "both"]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    function = draw(st.sampled_from(FUNCTIONS))
    return Case(
        function=function,
        ratio=1 if function == "layout" else draw(st.integers(1, 4)),
        num_heads=draw(st.integers(1, 5)),
        small_tokens=draw(st.integers(1, 4)),
        width=draw(st.integers(1, 3)),
        dtype=draw(
            st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float8_e4m3fn])
        ),
        heads_first=draw(st.booleans()),
        ids=tuple(draw(st.lists(st.integers(0, 5), unique=True, max_size=6))),
    )


@given(case=cases())
def test_every_case_matches_the_loops(case: Case) -> None:
    check(case)


@pytest.mark.gpu
@pytest.mark.parametrize("function", FUNCTIONS)
def test_on_the_gpu(function: Function) -> None:
    ratio = 1 if function == "layout" else 4
    check(Case(function, ratio, 3, 4, 8, torch.bfloat16, True, (4, 0, 3)), "cuda")


def test_ids_may_be_a_tensor_of_any_integers(device: torch.device) -> None:
    case = Case("blksize", 2, 3, 2, 4, torch.float16, True, (5, 1))
    for dtype in (torch.int32, torch.int64):
        memory = received(case)
        want = naive(case, memory)
        memory = memory.to(device)
        case.run(case.view(memory), torch.tensor(case.ids, dtype=dtype, device=device))
        assert_same_bytes(memory, want)


def test_one_plane_of_a_packed_block() -> None:
    """K beside V in the last dimension: each half is a view whose rows have the other between."""
    case = Case("both", 2, 3, 2, 8, torch.uint8, True, (2, 5))
    memory = received(case)
    want = naive(case, memory)
    for half in (slice(0, 5), slice(5, 8)):
        case.run(case.view(memory)[..., half], list(case.ids))
    assert_same_bytes(memory, want)


RUN: dict[Function, Callable[[Tensor, list[int] | Tensor, int], None]] = {
    "blksize": kv_postprocess_blksize_on_receive,
    "layout": lambda cache, ids, _: kv_postprocess_layout_on_receive(cache, ids),
    "both": kv_postprocess_blksize_and_layout_on_receive,
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("shape", "ids", "error", "message"),
    [
        ((4, 3, 8, 2), [1, 4], ValueError, "indices: expected ids in [0, 4), got 4"),
        ((4, 3, 8, 2), [1, -1], ValueError, "indices: expected ids in [0, 4), got -1"),
        ((4, 3, 8, 2), [1, 2, 1], ValueError, "indices: expected every block once, got 1 twice"),
        ((4, 3, 8, 2), torch.ones(1), TypeError, "indices: expected an integer dtype, got torch.f"),
        (
            (4, 3, 8, 2),
            torch.ones(4).bool(),
            TypeError,
            "indices: expected an integer dtype, got t",
        ),
        ((4, 3, 8, 2), torch.ones(1, 1).int(), ValueError, "indices: expected 1 dimension, got sh"),
        ((4, 3, 8, 2), [1.7], TypeError, "indices: expected integers, got [1.7]; pass block ids"),
        ((4, 1, 8, 2), [1, 4], ValueError, "indices: expected ids in [0, 4), got 4"),
        ((4, 8, 1, 2), [1, 2, 1], ValueError, "indices: expected every block once, got 1 twice"),
        ((4, 1, 8, 2), [True], TypeError, "indices: expected integers, got [True]; pass block ids"),
        ((4, 8, 2), [0], ValueError, "cache: expected 4 dimensions, blocks first, heads and"),
    ],
)
def test_refusals_change_nothing(
    function: Function,
    shape: tuple[int, ...],
    ids: list[int] | Tensor,
    error: type[Exception],
    message: str,
) -> None:
    cache = torch.randint(0, 255, shape).to(torch.uint8)
    before = cache.clone()
    with pytest.raises(error, match=re.escape(message)):
        RUN[function](cache, ids, 1)
    assert_same_bytes(cache, before)


def test_larger_blocks_of_several_planes_are_refused() -> None:
    """Their received blocks would have the planes of each one behind the other."""
    for join in (kv_postprocess_blksize_on_receive, kv_postprocess_blksize_and_layout_on_receive):
        with pytest.raises(ValueError, match="pass K and V as views of their own"):
            join(torch.zeros(4, 2, 3, 8, 2), [0], 1)


@pytest.mark.parametrize("heads_first", [True, False])
def test_blocks_of_k_and_v(heads_first: bool) -> None:
    """[blocks, 2, N, H, D], each plane received as [H, N, D]."""
    memory = torch.randint(0, 256, (4, 2, 6, 3, 2)).to(torch.uint8)
    want = memory.clone()
    for block, plane in product((3, 1), range(2)):
        want[block, plane] = memory[block, plane].reshape(3, 6, 2).transpose(0, 1)
    cache = memory.transpose(2, 3) if heads_first else memory
    kv_postprocess_layout_on_receive(cache, [3, 1])
    assert_same_bytes(memory, want)
    with pytest.raises(ValueError, match="indices: expected ids in"):
        kv_postprocess_layout_on_receive(cache, [4])


@pytest.mark.parametrize("ratio", [0, -1, 3, 16])
def test_a_ratio_divides_the_block(ratio: int) -> None:
    message = f"block_size_ratio: expected a divisor of the 8 tokens of a local block, got {ratio}"
    by_head = torch.zeros(2, 3, 8, 2)  # 3 heads, of which the ratio is a divisor
    with pytest.raises(ValueError, match=message):
        kv_postprocess_blksize_on_receive(by_head, [0], ratio)
    with pytest.raises(ValueError, match=message):
        kv_postprocess_blksize_and_layout_on_receive(
            by_head.transpose(1, 2).contiguous(), [0], ratio
        )
    for one_head in (torch.zeros(2, 1, 8, 2), torch.zeros(2, 8, 1, 2)):
        for join in (
            kv_postprocess_blksize_on_receive,
            kv_postprocess_blksize_and_layout_on_receive,
        ):
            with pytest.raises(ValueError, match=message):
                join(one_head, [0], ratio)
            with pytest.raises(TypeError, match="block_size_ratio: expected an integer, got 2.0"):
                join(one_head, [0], 2.0)  # type: ignore[arg-type]
            join(one_head, [0], np.int64(2))  # type: ignore[arg-type]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_blocks_with_gaps_are_refused(function: Function) -> None:
    cache = torch.zeros(2, 3, 8, 2)
    heads_outermost = torch.zeros(3, 2, 8, 2).transpose(0, 1)
    for gaps in (cache[:, :, :4], cache[:, :2, :6], heads_outermost):
        with pytest.raises(ValueError, match="cache: expected blocks without gaps between heads"):
            RUN[function](gaps, [0], 1)


@pytest.mark.parametrize("token_dim", [1, 2])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float8_e5m2])
def test_the_uncovered_tail_is_zero(dtype: torch.dtype, token_dim: int) -> None:
    ids = [4, 1, 3]
    for num_covered in range(13):  # blocks of 4 tokens
        memory = poisoned((5, 3, 4, 2), dtype=dtype)
        raw = memory.view(torch.uint8).clone()
        for position in range(num_covered, 12):
            raw[ids[position // 4], :, position % 4] = 0
        cache = memory if token_dim == 2 else memory.transpose(1, 2)
        zero_uncovered_tokens(cache, ids, num_covered, token_dim=token_dim)
        assert_same_bytes(memory, raw.view(dtype))


@pytest.mark.parametrize(
    ("ids", "num_covered", "token_dim", "message"),
    [
        ([4, 1], 9, 2, "num_covered_tokens: expected at most the 8 tokens of 2 blocks, got 9"),
        ([4, 1], -1, 2, "num_covered_tokens: expected at most the 8 tokens of 2 blocks, got -1"),
        ([4, 5], 1, 2, "indices: expected ids in [0, 5), got 5"),
        ([4, 4], 1, 2, "indices: expected every block once, got 4 twice"),
        ([4], 1, 0, "token_dim: expected one of [1, 4), got 0"),
        ([4], 1, 4, "token_dim: expected one of [1, 4), got 4"),
    ],
)
def test_the_tail_refuses(ids: list[int], num_covered: int, token_dim: int, message: str) -> None:
    cache = poisoned((5, 3, 4, 2))
    with pytest.raises(ValueError, match=re.escape(message)):
        zero_uncovered_tokens(cache, ids, num_covered, token_dim=token_dim)
    assert_same_bytes(cache, poisoned((5, 3, 4, 2)))


def layers(device: torch.device | str, num_blocks: int = 8) -> list[Tensor]:
    """Views [num_blocks, H, N, D] of every kind of memory; 4 tokens a block."""
    size = (num_blocks, 3, 4, 8)

    def random(*shape: int) -> Tensor:
        return torch.randint(0, 256, (*shape, 2)).to(torch.uint8).view(torch.bfloat16)[..., 0]

    by_head, packed = random(*size).contiguous(), random(num_blocks, 3, 4, 16).contiguous()
    k_and_v = random(num_blocks, 2, 4, 3, 8).contiguous().to(device)
    return [
        by_head.to(device),
        k_and_v[:, 0].transpose(1, 2),  # by token
        k_and_v[:, 1].transpose(1, 2),
        packed.to(device)[..., :8],
        random(num_blocks, 8, 3, 4).contiguous().to(device).permute(0, 2, 3, 1),  # channels apart
        random(num_blocks, 5, 4, 8).contiguous().to(device),  # more heads
    ]


def rewritten_by_loops(view: Tensor, small: int, ids: list[int], num_covered: int) -> Tensor:
    """The logical content afterwards of a view whose blocks received [H, small, D] each."""
    by_head = view.stride(1) > view.stride(2)
    num_heads, num_tokens = view.shape[1:3]
    rewrite = BlockRewrite(num_heads, BlockOrder(small, True), BlockOrder(num_tokens, by_head))
    after = view.cpu().clone()
    stored = after if by_head else after.transpose(1, 2)
    rows = moved(rewrite, stored[ids].reshape(len(ids), num_heads * num_tokens, -1))
    stored[ids] = rows.view(stored[ids].shape)
    for position in range(num_covered, len(ids) * num_tokens):
        after[ids[position // num_tokens], :, position % num_tokens] = 0
    return after


@pytest.mark.parametrize("small", [2, 4, 8, 12])
@pytest.mark.parametrize("num_covered", [None, 0, 9, 24])
def test_all_layers_at_once(small: int, num_covered: int | None, device: torch.device) -> None:
    ids = [7, 0, 3, 5, 2, 6]
    caches = layers(device)
    wants = [
        rewritten_by_loops(cache, small, ids, 24 if num_covered is None else num_covered)
        for cache in caches
    ]
    Postprocessor(caches, BlockOrder(small, by_head=True)).run(ids, num_covered)
    for cache, want in zip(caches, wants, strict=True):
        assert_same_bytes(cache, want)


def test_the_launches_of_all_layers_do_the_same(device: torch.device) -> None:
    """What runs on a GPU, here by hand: by geometry; channels apart are rows of one element."""
    ids, caches = [7, 0, 3, 5], layers(device)
    wants = [rewritten_by_loops(cache, 8, ids, 16) for cache in caches]
    received = BlockOrder(8, by_head=True)
    launches = _launches_of(_plane_of(cache, received, 2) for cache in caches)
    widths = [(table.width_nbytes, len(table.table)) for _, table in launches]
    assert sorted(widths) == [(2, 8), (16, 1), (16, 2), (16, 2)]
    for rewrite, table in launches:
        rewrite_blocks(table, torch.tensor(ids, device=device), rewrite)
    for cache, want in zip(caches, wants, strict=True):
        assert_same_bytes(cache, want)


def test_views_of_the_other_order_of_dimensions(device: torch.device) -> None:
    ids = [7, 0]
    caches = [cache.transpose(1, 2) for cache in layers(device)]
    wants = [rewritten_by_loops(cache.transpose(1, 2), 2, ids, 8) for cache in caches]
    Postprocessor(caches, BlockOrder(2, by_head=True), token_dim=1).run(torch.tensor(ids))
    for cache, want in zip(caches, wants, strict=True):
        assert_same_bytes(cache.transpose(1, 2), want)


def test_the_opposite_of_a_rewrite_restores_the_bytes(device: torch.device) -> None:
    whole = layers(device)[0]
    before = whole.clone()
    halves = whole.view(16, 3, 2, 8)  # the same memory as blocks of two tokens
    Postprocessor([whole], BlockOrder(2, by_head=True)).run([1, 6])
    assert not torch.equal(whole.view(torch.int16), before.view(torch.int16))
    Postprocessor([halves], BlockOrder(4, by_head=True)).run([2, 3, 12, 13])
    assert_same_bytes(whole, before)


def test_layers_that_share_a_cache_are_rewritten_once(device: torch.device) -> None:
    first = layers(device)[0]
    want = rewritten_by_loops(first, 2, [1, 4], 8)
    Postprocessor([first, first.view_as(first)], BlockOrder(2, by_head=True)).run([1, 4])
    assert_same_bytes(first, want)


def test_one_head_needs_nothing_moved(device: torch.device) -> None:
    cache = poisoned((4, 1, 6, 2), device)
    cache[1] = torch.arange(12, dtype=torch.uint8).view(1, 6, 2)
    want = cache.clone()
    want[1, 0, 5] = 0
    Postprocessor([cache], BlockOrder(2, by_head=True)).run([1], 5)
    assert_same_bytes(cache, want)
    odd = cache.as_strided((4, 1, 6, 2), (12, 7, 2, 1))  # any stride where there is one
    Postprocessor([odd], BlockOrder(3, by_head=True)).run([1])
    kv_postprocess_blksize_on_receive(odd, [1], 2)
    assert_same_bytes(cache, want)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_one_head_or_one_token_is_left_as_it_is(function: Function, device: torch.device) -> None:
    """Whichever dimension has the one: strides of a contiguous view do not say which it is."""
    for tokens, ratio, swapped, odd in product((1, 2, 12), (1, 2, 4), (True, False), (True, False)):
        if (function == "layout" and ratio > 1) or tokens % ratio:
            continue
        shape = (4, tokens, 1, 2) if swapped else (4, 1, tokens, 2)
        want = torch.arange(4 * tokens * 2, device=device).view(shape)
        cache = want.clone()
        strides = list(cache.stride())
        strides[shape.index(1)] = 7 if odd else strides[shape.index(1)]  # any where there is one
        RUN[function](cache.as_strided(shape, strides), [3, 1], ratio)
        assert torch.equal(cache, want)


def test_no_layers_and_no_blocks() -> None:
    Postprocessor([], BlockOrder(2, by_head=True)).run([5])
    cache = poisoned((4, 3, 4, 2))
    Postprocessor([cache], BlockOrder(2, by_head=True)).run([], 0)
    assert_same_bytes(cache, poisoned((4, 3, 4, 2)))


@pytest.mark.parametrize(
    ("received_tokens", "ids", "num_covered", "message"),
    [
        (2, [1, 4], None, "indices: expected ids in [0, 4), got 4"),
        (2, [-1, 2], None, "indices: expected ids in [0, 4), got -1"),
        (2, [1, 2, 1], None, "indices: expected every block once, got 1 twice"),
        (2, [1, 2], 9, "num_covered_tokens: expected at most the 8 tokens of 2 blocks, got 9"),
        (2, [1, 2], -1, "num_covered_tokens: expected at most the 8 tokens of 2 blocks, got -1"),
        (8, [1, 2, 3], None, "indices: expected a multiple of 2 blocks, because received blocks"),
        (6, [1, 2], None, "indices: expected a multiple of 3 blocks, because received blocks of 6"),
    ],
)
def test_all_layers_or_none(
    received_tokens: int, ids: list[int], num_covered: int | None, message: str
) -> None:
    caches = [poisoned((5, 3, 4, 2)), poisoned((4, 3, 4, 2))]
    both = Postprocessor(caches, BlockOrder(received_tokens, by_head=True))
    with pytest.raises(ValueError, match=re.escape(message)):
        both.run(ids, num_covered)
    with pytest.raises(TypeError, match="indices: expected an integer dtype"):
        both.run(torch.ones(2))
    for cache in caches:
        assert_same_bytes(cache, poisoned(tuple(cache.shape)))


def test_a_postprocessor_refuses() -> None:
    with pytest.raises(ValueError, match="token_dim: expected 1 or 2, got 3"):
        Postprocessor([], BlockOrder(2, by_head=True), token_dim=3)
    with pytest.raises(ValueError, match="caches: expected all on one device, got cpu, meta"):
        Postprocessor(
            [torch.zeros(2, 3, 4, 2), torch.zeros(2, 3, 4, 2, device="meta")],
            BlockOrder(2, by_head=True),
        )
    with pytest.raises(ValueError, match="cache: expected 4 dimensions"):
        Postprocessor([torch.zeros(2, 3, 4)], BlockOrder(2, by_head=True))


@pytest.mark.gpu
def test_a_set_that_no_program_holds() -> None:
    """Of 256 heads of 256 tokens: the torch form does it, on the GPU."""
    cache = torch.randint(0, 256, (3, 256, 256, 2), device="cuda").to(torch.uint8)
    want = cache.cpu()
    kv_postprocess_layout_on_receive(cache, [2, 0])
    kv_postprocess_layout_on_receive(want, [2, 0])
    assert_same_bytes(cache, want)
