"""The post-processing kernel, on a GPU or in Triton's interpreter: compared, byte for byte, with a
loop over sets, tokens and heads.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvxfer.kernels.block_rewrite import BlockOrder, BlockRewrite, rewrite_blocks_ref
from kvxfer.kernels.postprocess import MAX_TILE_WORDS, fits, rewrite_blocks, segments_of
from tests.helpers import assert_same_bytes, poisoned


@dataclass(frozen=True)
class Case:
    """Blocks of ``width`` bytes a row; ``gap`` bytes of poison behind every row."""

    received: BlockOrder
    local: BlockOrder
    num_heads: int = 3
    width: int = 16
    gap: int = 0
    num_sets: int = 2
    num_covered: int | None = None
    num_segments: int = 1
    tile_words: int = 64

    @property
    def rewrite(self) -> BlockRewrite:
        return BlockRewrite(self.num_heads, self.received, self.local)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Two blocks more than are rewritten."""
        middle = (self.num_heads, self.local.block_tokens)
        outer, inner = middle if self.local.by_head else middle[::-1]
        return (
            self.num_sets * self.rewrite.set_blocks + 2,
            outer,
            inner,
            self.width + self.gap,
        )

    @property
    def block_ids(self) -> list[int]:
        """Neither in order nor side by side."""
        num_blocks = self.shape[0]
        step = next(n for n in (7, 5, 3, 2, 1) if math.gcd(n, num_blocks) == 1)
        return [(4 + step * number) % num_blocks for number in range(num_blocks - 2)]


def order(text: str) -> BlockOrder:
    """Of "HND 16" or "NHD 16"."""
    layout, tokens = text.split()
    return BlockOrder(int(tokens), by_head=layout == "HND")


def place(of: BlockOrder, num_heads: int, token: int, head: int) -> int:
    """The row of a token's head in blocks that lie one behind the other."""
    block, slot = divmod(token, of.block_tokens)
    inside = head * of.block_tokens + slot if of.by_head else slot * num_heads + head
    return block * num_heads * of.block_tokens + inside


def naive(case: Case, memory: Tensor) -> Tensor:
    """The same memory afterwards, one row after the other."""
    rows_of_block = case.num_heads * case.local.block_tokens
    before = memory.cpu().reshape(case.shape[0], rows_of_block, -1)
    after = before.clone()
    num_tokens = len(case.block_ids) * case.local.block_tokens
    for token, head in product(range(num_tokens), range(case.num_heads)):
        number, row = divmod(place(case.local, case.num_heads, token, head), rows_of_block)
        target = after[case.block_ids[number], row, : case.width]
        if case.num_covered is not None and token >= case.num_covered:
            target.zero_()
            continue
        number, row = divmod(place(case.received, case.num_heads, token, head), rows_of_block)
        target.copy_(before[case.block_ids[number], row, : case.width])
    return after.reshape(memory.shape)


def received(case: Case, device: torch.device) -> Tensor:
    """Random bytes, so with NaNs of every kind; poison where nothing was sent."""
    memory = poisoned(case.shape, device)
    ids = torch.tensor(case.block_ids, dtype=torch.int64, device=device)
    sent = torch.randint(0, 256, (len(ids), *case.shape[1:3], case.width)).to(torch.uint8)
    memory[ids, :, :, : case.width] = sent.to(device)
    return memory


def check(case: Case, device: torch.device) -> None:
    pools = [received(case, device) for _ in range(case.num_segments)]
    wants = [naive(case, pool) for pool in pools]
    refs = [pool.clone() for pool in pools]
    ids = torch.tensor(case.block_ids, dtype=torch.int64, device=device)
    views = [pool[..., : case.width] for pool in pools]
    rewrite_blocks(
        segments_of(views), ids, case.rewrite, case.num_covered, tile_words=case.tile_words
    )
    for pool, ref, want in zip(pools, refs, wants, strict=True):
        assert_same_bytes(pool, want.to(device))
        rewrite_blocks_ref(ref[..., : case.width], ids, case.rewrite, case.num_covered)
        assert_same_bytes(ref, want.to(device))


def test_a_block_written_out_by_hand(device: torch.device) -> None:
    # Two received blocks of two tokens, three heads; an element is head * 10 + token.
    sent = [0, 1, 10, 11, 20, 21, 2, 3, 12, 13, 22, 23]
    by_head = [0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23]
    by_token = [0, 10, 20, 1, 11, 21, 2, 12, 22, 3, 13, 23]

    def run(rewrite: BlockRewrite, values: list[int], ids: list[int], covered: int) -> list[int]:
        outer, inner = rewrite.num_heads, rewrite.local.block_tokens
        if not rewrite.local.by_head:
            outer, inner = inner, outer
        memory = torch.tensor(values, device=device).view(-1, outer, inner, 1)
        rewrite_blocks(segments_of([memory]), torch.tensor(ids, device=device), rewrite, covered)
        return memory.flatten().tolist()

    assert run(BlockRewrite(3, order("HND 2"), order("HND 4")), sent, [0], 4) == by_head
    assert run(BlockRewrite(3, order("HND 2"), order("NHD 4")), sent, [0], 4) == by_token
    assert run(BlockRewrite(3, order("HND 4"), order("NHD 4")), by_head, [0], 4) == by_token
    assert run(BlockRewrite(3, order("NHD 4"), order("HND 4")), by_token, [0], 4) == by_head
    # The other direction: one received block over two local ones, in order and not.
    assert run(BlockRewrite(3, order("HND 4"), order("HND 2")), by_head, [0, 1], 4) == sent
    swapped = run(
        BlockRewrite(3, order("HND 4"), order("HND 2")), by_head[6:] + by_head[:6], [1, 0], 4
    )
    assert swapped == sent[6:] + sent[:6]
    # Three tokens of four.
    want = [0, 1, 2, 0, 10, 11, 12, 0, 20, 21, 22, 0]
    assert run(BlockRewrite(3, order("HND 2"), order("HND 4")), sent, [0], 3) == want
    assert run(BlockRewrite(3, order("HND 4"), order("HND 4")), by_head, [0], 3) == want


LAYOUTS = list(product(("HND", "NHD"), repeat=2))
SIZES = [(2, 4), (4, 2), (4, 4), (2, 8), (6, 4), (4, 6), (1, 3), (3, 1), (1, 1)]


@pytest.mark.parametrize(("received_layout", "local_layout"), LAYOUTS)
@pytest.mark.parametrize(("received_tokens", "local_tokens"), SIZES)
def test_every_pair_of_blocks(
    received_layout: str,
    received_tokens: int,
    local_layout: str,
    local_tokens: int,
    device: torch.device,
) -> None:
    case = Case(
        received=order(f"{received_layout} {received_tokens}"),
        local=order(f"{local_layout} {local_tokens}"),
        num_segments=2,
    )
    check(case, device)


@pytest.mark.parametrize(("received_layout", "local_layout"), LAYOUTS)
@pytest.mark.parametrize(("received_tokens", "local_tokens"), [(2, 4), (4, 2), (4, 4)])
@pytest.mark.parametrize("num_covered", [0, 1, 3, 4, 6, 8])
def test_every_part_that_is_covered(
    received_layout: str,
    received_tokens: int,
    local_layout: str,
    local_tokens: int,
    num_covered: int,
    device: torch.device,
) -> None:
    case = Case(
        received=order(f"{received_layout} {received_tokens}"),
        local=order(f"{local_layout} {local_tokens}"),
        num_sets=4,
        num_covered=num_covered,
    )
    check(case, device)


@pytest.mark.parametrize("width", [1, 5, 6, 20, 24, 48])
def test_rows_of_any_width(width: int, device: torch.device) -> None:
    check(Case(order("HND 2"), order("HND 4"), width=width), device)
    check(Case(order("HND 2"), order("NHD 4"), width=width, num_covered=5), device)


@pytest.mark.parametrize(("width", "gap"), [(5, 3), (6, 10), (32, 32), (16, 4)])
def test_rows_with_gaps(width: int, gap: int, device: torch.device) -> None:
    """As K beside V: what lies between the rows belongs to others."""
    check(Case(order("HND 2"), order("HND 4"), width=width, gap=gap), device)
    check(Case(order("HND 4"), order("NHD 4"), width=width, gap=gap, num_covered=6), device)


@pytest.mark.parametrize(("width", "tile_words"), [(132, 1), (656, 128), (1152, 256), (132, 4096)])
def test_programs_of_any_size(width: int, tile_words: int, device: torch.device) -> None:
    """Several programs a block, whose columns do not fill the last one."""
    check(Case(order("HND 4"), order("HND 8"), width=width, tile_words=tile_words), device)
    check(Case(order("HND 2"), order("NHD 4"), width=width, tile_words=tile_words), device)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    def any_order() -> BlockOrder:
        return BlockOrder(draw(st.integers(1, 6)), draw(st.booleans()))

    case = Case(
        received=any_order(),
        local=any_order(),
        num_heads=draw(st.integers(1, 5)),
        width=draw(st.sampled_from([1, 2, 3, 4, 8, 16, 24])),
        gap=draw(st.sampled_from([0, 0, 1, 8, 16])),
        num_sets=draw(st.integers(0, 2)),
        tile_words=draw(st.sampled_from([16, 128])),
    )
    num_tokens = len(case.block_ids) * case.local.block_tokens
    covered = draw(st.none() | st.integers(0, num_tokens))
    return replace(case, num_covered=covered)


@given(case=cases())
def test_every_case_matches_the_loops(case: Case) -> None:
    check(case, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def test_layers_of_different_strides(device: torch.device) -> None:
    """The table decides: two allocations, in one of them blocks apart."""
    rewrite = BlockRewrite(2, order("HND 2"), order("HND 4"))
    dense = torch.arange(3 * 2 * 4 * 8, device=device).view(3, 2, 4, 8)
    wide = torch.zeros(3, 2, 2, 4, 8, dtype=torch.int64, device=device)
    wide[:, 1] = dense
    want = dense.clone()
    ids = torch.tensor([2, 0], device=device)
    rewrite_blocks_ref(want, ids, rewrite)
    rewrite_blocks(segments_of([dense, wide[:, 1]]), ids, rewrite)
    assert_same_bytes(dense, want)
    assert_same_bytes(wide[:, 1], want)
    assert not wide[:, 0].any()


def test_nothing_to_do(device: torch.device) -> None:
    memory = poisoned((3, 2, 4, 8), device)
    segments = segments_of([memory])
    some, none = torch.tensor([1], device=device), torch.tensor([], dtype=torch.int64)
    rewrite_blocks(segments, some, BlockRewrite(2, order("HND 4"), order("HND 4")))
    rewrite_blocks(segments, none.to(device), BlockRewrite(2, order("HND 2"), order("HND 4")))
    rewrite_blocks_ref(memory, none.to(device), BlockRewrite(2, order("HND 2"), order("HND 4")), 0)
    assert_same_bytes(memory, poisoned((3, 2, 4, 8), device))


def test_refusals(device: torch.device) -> None:
    memory = poisoned((4, 2, 4, 8), device)
    segments, ids = segments_of([memory]), torch.tensor([0, 1, 2], device=device)
    join = BlockRewrite(2, order("HND 2"), order("HND 4"))
    refused: list[tuple[str, Tensor, BlockRewrite, int | None, int]] = [
        ("block_ids: expected a contiguous dim", ids.view(3, 1), join, None, 64),
        ("block_ids: expected a contiguous dim", ids[::2], join, None, 64),
        (
            "rewrite: expected blocks of 8 rows, as the segments have, got 3 heads of 4 tokens",
            ids,
            BlockRewrite(3, order("HND 2"), order("HND 4")),
            None,
            64,
        ),
        (
            "indices: expected a multiple of 2 blocks, because received blocks of 8 tokens lie "
            "over that many local ones of 4, got 3",
            ids,
            BlockRewrite(2, order("HND 8"), order("HND 4")),
            None,
            64,
        ),
        ("expected at most the 12 tokens of 3 blocks, got 13", ids, join, 13, 64),
        ("expected at most the 12 tokens of 3 blocks, got -1", ids, join, -1, 64),
        ("tile_words: expected a power of two up to 16384, got 48", ids, join, None, 48),
        ("tile_words: expected a power of two up to 16384, got 32768", ids, join, None, 32768),
        (
            "rewrite: expected at most 16384 runs in a set of 8192 blocks, got 65536",
            ids,
            BlockRewrite(2, order("HND 32768"), order("NHD 4")),
            None,
            64,
        ),
    ]
    for message, block_ids, rewrite, covered, tile_words in refused:
        with pytest.raises(ValueError, match=re.escape(message)):
            rewrite_blocks(segments, block_ids, rewrite, covered, tile_words=tile_words)
    with pytest.raises(TypeError, match="block_ids: expected int64, got torch.int32"):
        rewrite_blocks(segments, ids.int(), join)
    with pytest.raises(ValueError, match="block_tokens: expected 1 or more, got 0"):
        order("HND 0")
    with pytest.raises(ValueError, match="num_heads: expected 1 or more, got 0"):
        BlockRewrite(0, order("HND 2"), order("HND 2"))
    with pytest.raises(ValueError, match="views: expected at least one, got none"):
        segments_of([])
    with pytest.raises(ValueError, match=re.escape("expected blocks of (2, 4, 8) elements of 1")):
        segments_of([memory, memory.view(torch.int16)])
    for uneven in (memory[:, :, :3], memory[..., ::2]):
        with pytest.raises(ValueError, match="views: expected rows at equal distances"):
            segments_of([uneven])
    assert_same_bytes(memory, poisoned((4, 2, 4, 8), device))


def test_the_largest_set_of_one_program() -> None:
    largest = BlockRewrite(128, order("HND 128"), order("NHD 128"))
    assert largest.set_runs == MAX_TILE_WORDS
    assert fits(largest)
    assert not fits(BlockRewrite(128, order("HND 256"), order("NHD 256")))
    assert fits(BlockRewrite(128, order("HND 128"), order("HND 256")))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [132, 256, 656, 1152])
@pytest.mark.parametrize(
    ("received_order", "local_order", "num_heads"),
    [
        ("HND 16", "HND 128", 8),
        ("HND 128", "HND 16", 8),
        ("HND 128", "NHD 128", 8),
        ("NHD 64", "HND 64", 5),
        ("HND 24", "NHD 16", 8),
        ("HND 128", "NHD 128", 128),
    ],
)
def test_large_blocks(received_order: str, local_order: str, num_heads: int, width: int) -> None:
    """Many programs at a time, of the default size; the bytes of one are no other one's."""
    rewrite = BlockRewrite(num_heads, order(received_order), order(local_order))
    middle = (num_heads, rewrite.local.block_tokens)
    shape = (30, *(middle if rewrite.local.by_head else middle[::-1]), width)
    pools = [torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda") for _ in range(6)]
    wants = [pool.clone() for pool in pools]
    ids = torch.randperm(30, device="cuda")[:24]
    num_covered = 24 * rewrite.local.block_tokens - 5
    rewrite_blocks(segments_of(pools), ids, rewrite, num_covered)
    for pool, want in zip(pools, wants, strict=True):
        rewrite_blocks_ref(want, ids, rewrite, num_covered)
        assert torch.equal(pool, want)


@pytest.mark.gpu
def test_a_cache_of_more_than_four_gib() -> None:
    rewrite = BlockRewrite(8, order("HND 4"), order("NHD 16"))
    num_blocks = 140_000  # of 32 KiB
    pool = torch.full((num_blocks, 16, 8, 256), 0xEE, dtype=torch.uint8, device="cuda")
    ids = torch.tensor([num_blocks - 1, 0, 65_536, 131_071, 131_072, 7], device="cuda")
    pool[ids] = torch.randint(0, 256, (6, 16, 8, 256), dtype=torch.uint8, device="cuda")
    small = pool[ids]
    rewrite_blocks(segments_of([pool]), ids, rewrite)
    rewrite_blocks_ref(small, torch.arange(6, device="cuda"), rewrite)
    assert torch.equal(pool[ids], small)
    pool[ids] = 0xEE
    assert bool((pool.view(torch.int64) == -0x1111111111111112).all())
