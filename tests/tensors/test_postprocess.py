"""Received blocks in local order: compared, byte for byte, with loops over tokens and heads."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvxfer.tensors.postprocess import (
    kv_postprocess_blksize_and_layout_on_receive,
    kv_postprocess_blksize_on_receive,
    kv_postprocess_layout_on_receive,
    zero_uncovered_tokens,
)
from tests.helpers import assert_same_bytes, poisoned

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
    """The same memory afterwards: one element of a head of a token after the other."""
    before = memory.view(torch.uint8).reshape(case.num_blocks, -1, case.width * case.dtype.itemsize)
    after = before.clone()
    heads, tokens, small = case.num_heads, case.num_tokens, case.small_tokens
    for block in case.ids:
        for token, head in product(range(tokens), range(heads)):
            part, slot = divmod(token, small)
            was = (part * heads + head) * small + slot
            becomes = token * heads + head if TOKEN_MAJOR[case.function] else head * tokens + token
            after[block, becomes] = before[block, was]
    return after.reshape(memory.view(torch.uint8).shape).view(case.dtype)


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


GRID = [
    Case(function, ratio, heads, small, 2, dtype, heads_first, (4, 0, 3))
    for function, ratio, (heads, small), dtype, heads_first in product(
        FUNCTIONS,
        (1, 2, 3, 4),
        ((3, 4), (1, 4), (4, 1), (8, 2)),
        (torch.uint8, torch.bfloat16),
        (True, False),
    )
    if function != "layout" or ratio == 1
]


def test_the_grid_matches_the_loops() -> None:
    for case in GRID:
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
        ((2, 4, 3, 8, 2), [0], ValueError, "cache: expected 4 dimensions, blocks first, heads and"),
    ],
    ids=["above", "below", "twice", "float", "bool", "2-D ids", "5-D cache"],
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
