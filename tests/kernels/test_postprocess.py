"""The post-processing kernels, on a GPU or in Triton's interpreter: compared, byte for byte, with a
loop over sets, tokens and heads.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvxfer.kernels.block_rewrite import (
    BlockOrder,
    BlockRewrite,
    longest_cycle,
    plan_of,
    rewrite_blocks_ref,
)
from kvxfer.kernels.rewrite_kernel import fits, plane_table, rewrite_blocks
from tests.helpers import assert_same_bytes, poisoned
from tests.kernels.compiling import printed_without_interpreter
from tests.kernels.rewrite_cases import Case, check, naive, order, received


def test_a_block_written_out_by_hand(device: torch.device) -> None:
    # Two received blocks of two tokens, three heads; an element is head * 10 + token.
    sent = [0, 1, 10, 11, 20, 21, 2, 3, 12, 13, 22, 23]
    by_head = [0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23]
    by_token = [0, 10, 20, 1, 11, 21, 2, 12, 22, 3, 13, 23]

    def run(rewrite: BlockRewrite, values: list[int], ids: list[int]) -> list[int]:
        outer, inner = rewrite.num_heads, rewrite.local.block_tokens
        if not rewrite.local.by_head:
            outer, inner = inner, outer
        memory = torch.tensor(values, device=device).view(-1, outer, inner, 1)
        rewrite_blocks(plane_table([memory]), torch.tensor(ids, device=device), rewrite)
        return memory.flatten().tolist()

    assert run(BlockRewrite(3, order("HND 2"), order("HND 4")), sent, [0]) == by_head
    assert run(BlockRewrite(3, order("HND 2"), order("NHD 4")), sent, [0]) == by_token
    assert run(BlockRewrite(3, order("HND 4"), order("NHD 4")), by_head, [0]) == by_token
    assert run(BlockRewrite(3, order("NHD 4"), order("HND 4")), by_token, [0]) == by_head
    # The other direction: one received block over two local ones, in order and not.
    assert run(BlockRewrite(3, order("HND 4"), order("HND 2")), by_head, [0, 1]) == sent
    swapped = run(
        BlockRewrite(3, order("HND 4"), order("HND 2")), by_head[6:] + by_head[:6], [1, 0]
    )
    assert swapped == sent[6:] + sent[:6]


LAYOUTS = list(product(("HND", "NHD"), repeat=2))
SIZES = [(2, 4), (4, 2), (4, 4), (2, 8), (6, 4), (4, 6), (1, 3), (3, 1), (1, 1)]


@pytest.mark.parametrize(("received_layout", "local_layout"), LAYOUTS)
@pytest.mark.parametrize(("received_tokens", "local_tokens"), SIZES)
@pytest.mark.parametrize("width", [16, 12])
def test_every_pair_of_blocks(
    received_layout: str,
    received_tokens: int,
    local_layout: str,
    local_tokens: int,
    width: int,
    device: torch.device,
) -> None:
    case = Case(
        received=order(f"{received_layout} {received_tokens}"),
        local=order(f"{local_layout} {local_tokens}"),
        width=width,
        num_planes=2,
    )
    check(case, device)


@pytest.mark.parametrize("width", [1, 5, 6, 20, 24, 48])
def test_rows_of_any_width(width: int, device: torch.device) -> None:
    check(Case(order("HND 2"), order("HND 4"), width=width), device)
    check(Case(order("HND 2"), order("NHD 4"), width=width), device)


@pytest.mark.parametrize(("width", "gap"), [(5, 3), (6, 10), (32, 32), (16, 4)])
def test_rows_with_gaps(width: int, gap: int, device: torch.device) -> None:
    """As K beside V: what lies between the rows belongs to others."""
    check(Case(order("HND 2"), order("HND 4"), width=width, gap=gap), device)
    check(Case(order("HND 4"), order("NHD 4"), width=width, gap=gap), device)


@pytest.mark.parametrize(("width", "tile_nbytes"), [(132, 1), (656, 128), (1152, 256), (132, 4096)])
def test_programs_of_any_size(width: int, tile_nbytes: int, device: torch.device) -> None:
    """Several programs a block, whose columns do not fill the last one."""
    check(Case(order("HND 4"), order("HND 8"), width=width, tile_nbytes=tile_nbytes), device)
    check(Case(order("HND 2"), order("NHD 4"), width=width, tile_nbytes=tile_nbytes), device)


@pytest.mark.parametrize(("width", "gap"), [(1152, 0), (1152, 64), (656, 16), (528, 4), (132, 12)])
def test_cycles_longer_than_a_program(width: int, gap: int, device: torch.device) -> None:
    """One of 14 runs and one of 299: slices of rows, the last one narrower or not."""
    case = Case(order("HND 6"), order("NHD 6"), num_heads=5, width=width, gap=gap)
    check(case, device)
    check(replace(case, received=order("HND 4"), num_planes=2), device)
    if width >= 656:
        row_units = width // 16
        sliced = plan_of(case.rewrite, row_units, 16, case.tile_nbytes)
        assert sliced.num_slices > 1
    check(
        Case(order("HND 200"), order("NHD 200"), width=width, gap=gap, num_sets=1),
        device,
    )


@pytest.mark.parametrize(("width", "gap"), [(132, 0), (132, 4), (656, 0), (656, 48), (1152, 128)])
def test_blocks_as_they_are_used(width: int, gap: int, device: torch.device) -> None:
    """Programs of the default size, several bins a set."""
    case = Case(
        order("HND 4"),
        order("NHD 16"),
        num_heads=4,
        width=width,
        gap=gap,
        num_planes=2,
        tile_nbytes=32768,
    )
    check(case, device)
    check(replace(case, received=order("HND 24"), num_sets=1), device)


def test_more_planes_than_one_launch_has(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvxfer.kernels.rewrite_kernel.MAX_PLANES", 2)
    for width in (16, 12):
        check(Case(order("HND 2"), order("NHD 4"), width=width, num_planes=5), device)


def test_units_divide_every_address_stride_and_size(device: torch.device) -> None:
    """A GPU ends with an error at an address that is no multiple; the interpreter does not mind."""
    memory = poisoned((4, 4, 2, 144), device)
    assert plane_table([memory]).unit_nbytes == 16
    for offset, unit_nbytes in ((4, 4), (8, 8), (6, 2), (1, 1), (32, 16)):
        shifted = poisoned((offset + memory.nbytes,), device)[offset:].view(memory.shape)
        assert plane_table([memory, shifted]).unit_nbytes == unit_nbytes
    assert plane_table([memory[..., :132]]).unit_nbytes == 4
    assert (
        plane_table(
            [memory.view(-1)[: 4 * 1148].view(4, -1)[:, :1120].view(4, 5, 2, 112)]
        ).unit_nbytes
        == 4
    )


def test_blocks_farther_than_int32(device: torch.device) -> None:
    """Said of small blocks, so that offsets are computed as for such ones."""
    case = Case(order("HND 6"), order("NHD 4"), gap=16)
    pool = received(case, device)
    want = naive(case, pool)
    ids = torch.tensor(case.block_ids, device=device)
    planes = plane_table([pool[..., : case.width]])
    assert not planes.is_wide
    rewrite_blocks(replace(planes, is_wide=True), ids, case.rewrite)
    assert_same_bytes(pool, want.to(device))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    def any_order() -> BlockOrder:
        return BlockOrder(draw(st.integers(1, 6)), draw(st.booleans()))

    return Case(
        received=any_order(),
        local=any_order(),
        num_heads=draw(st.integers(1, 5)),
        width=draw(st.sampled_from([1, 2, 3, 4, 8, 16, 24])),
        gap=draw(st.sampled_from([0, 0, 1, 8, 16])),
        num_sets=draw(st.integers(0, 2)),
        tile_nbytes=draw(st.sampled_from([16, 128])),
    )


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
    rewrite_blocks(plane_table([dense, wide[:, 1]]), ids, rewrite)
    assert_same_bytes(dense, want)
    assert_same_bytes(wide[:, 1], want)
    assert not wide[:, 0].any()


def test_nothing_to_do(device: torch.device) -> None:
    memory = poisoned((3, 2, 4, 8), device)
    planes = plane_table([memory])
    some, none = torch.tensor([1], device=device), torch.tensor([], dtype=torch.int64)
    rewrite_blocks(planes, some, BlockRewrite(2, order("HND 4"), order("HND 4")))
    rewrite_blocks(planes, none.to(device), BlockRewrite(2, order("HND 2"), order("HND 4")))
    rewrite_blocks_ref(memory, none.to(device), BlockRewrite(2, order("HND 2"), order("HND 4")))
    assert_same_bytes(memory, poisoned((3, 2, 4, 8), device))


def test_refusals(device: torch.device) -> None:
    memory = poisoned((4, 2, 4, 8), device)
    planes, ids = plane_table([memory]), torch.tensor([0, 1, 2], device=device)
    join = BlockRewrite(2, order("HND 2"), order("HND 4"))
    refused: list[tuple[str, Tensor, BlockRewrite]] = [
        ("block_ids: expected a contiguous dim", ids.view(3, 1), join),
        ("block_ids: expected a contiguous dim", ids[::2], join),
        (
            "rewrite: expected blocks of 8 rows, as the planes have, got 3 heads of 4 tokens",
            ids,
            BlockRewrite(3, order("HND 2"), order("HND 4")),
        ),
        (
            "indices: expected a multiple of 2 blocks, because received blocks of 8 tokens lie "
            "over that many local ones of 4, got 3",
            ids,
            BlockRewrite(2, order("HND 8"), order("HND 4")),
        ),
    ]
    for message, block_ids, rewrite in refused:
        with pytest.raises(ValueError, match=re.escape(message)):
            rewrite_blocks(planes, block_ids, rewrite)
    for tile_nbytes in (48, 262144, 0):
        message = f"tile_nbytes: expected a power of two up to 131072, got {tile_nbytes}"
        with pytest.raises(ValueError, match=message):
            rewrite_blocks(planes, ids, join, tile_nbytes=tile_nbytes)
    with pytest.raises(TypeError, match="block_ids: expected int64, got torch.int32"):
        rewrite_blocks(planes, ids.int(), join)
    with pytest.raises(ValueError, match="block_tokens: expected 1 or more, got 0"):
        order("HND 0")
    with pytest.raises(ValueError, match="num_heads: expected 1 or more, got 0"):
        BlockRewrite(0, order("HND 2"), order("HND 2"))
    with pytest.raises(ValueError, match="views: expected at least one, got none"):
        plane_table([])
    with pytest.raises(ValueError, match=re.escape("expected blocks of (2, 4, 8) elements of 1")):
        plane_table([memory, memory.view(torch.int16)])
    for uneven in (memory[:, :, :3], memory[..., ::2]):
        with pytest.raises(ValueError, match="views: expected rows at equal distances"):
            plane_table([uneven])
    assert_same_bytes(memory, poisoned((4, 2, 4, 8), device))


def test_the_longest_cycle_of_one_program(device: torch.device) -> None:
    """Too long for 16 bytes of each run; sets with more runs have shorter cycles."""
    longest = Case(order("HND 2810"), order("NHD 2810"), num_sets=1)
    assert longest_cycle(longest.rewrite) == 8428
    assert fits(longest.rewrite)
    check(longest, device)
    longer = BlockRewrite(3, order("HND 5550"), order("NHD 5550"))
    assert not fits(longer)
    planes = plane_table([torch.zeros(1, 5550, 3, 1, dtype=torch.uint8, device=device)])
    with pytest.raises(ValueError, match="cycles of at most 16384 runs, got one of 16648"):
        rewrite_blocks(planes, torch.tensor([0], device=device), longer)
    assert fits(BlockRewrite(128, order("HND 256"), order("NHD 256")))


PTX = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvxfer.kernels import rewrite_kernel as module
from kvxfer.kernels.block_rewrite import BlockOrder, BlockRewrite, plan_of
rewrite = BlockRewrite(8, BlockOrder(4, True), BlockOrder(16, False))
for unit, word, row_units in ((16, module.tl.int64, 16), (4, module.tl.int32, 33)):
    plan = plan_of(rewrite, row_units, unit, 32768)
    consts = dict(BLOCK_RUNS=128, SET_BLOCKS=1, RUN_TOKENS=1, ROW_UNITS=row_units)
    consts |= dict(IS_DENSE=True, IS_WIDE=False, NUM_BINS=len(plan.runs))
    consts |= dict(BIN_RUNS=plan.runs.shape[1], NUM_SLICES=plan.num_slices, COLUMNS=plan.columns)
    consts |= dict(MAGIC=plan.magic, SHIFT=plan.shift, UNITS=plan.lanes)
    consts |= dict(BUSY_UNITS=plan.busy_units, WORD=word, VEC=2 if unit == 16 else 1)
    signature = dict.fromkeys(("table", "block_ids", "pairs"), "*i64")
    source = ASTSource(
        fn=module.rewrite_kernel,
        signature=signature | dict.fromkeys(consts, "constexpr"),
        constexprs={(3 + at,): value for at, value in enumerate(consts.values())},
    )
    warps = module._num_warps(plan.busy_units, unit)
    target = GPUTarget("cuda", 90, 32)
    kernel = triton.compile(source, target=target, options=dict(num_warps=warps))
    stores = re.findall(r"st[.]global[.]([a-z0-9.]+)", kernel.asm["ptx"])
    print(warps, *sorted(set(stores)))
"""


@pytest.mark.slow
def test_the_compiler_sees_units() -> None:
    """Compiled for a GPU, which need not be there: 16 and 4 bytes an access."""
    assert printed_without_interpreter(PTX).splitlines() == ["8 v2.b64", "8 b32"]


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
        ("HND 4", "NHD 16", 8),
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
    rewrite_blocks(plane_table(pools), ids, rewrite)
    for pool, want in zip(pools, wants, strict=True):
        rewrite_blocks_ref(want, ids, rewrite)
        assert torch.equal(pool, want)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [256, 248])
def test_a_cache_of_more_than_four_gib(width: int) -> None:
    rewrite = BlockRewrite(8, order("HND 4"), order("NHD 16"))
    num_blocks = 140_000  # of 31 or 32 KiB
    pool = torch.full((num_blocks, 16, 8, width), 0xEE, dtype=torch.uint8, device="cuda")
    ids = torch.tensor([num_blocks - 1, 0, 65_536, 131_071, 131_072, 7], device="cuda")
    pool[ids] = torch.randint(0, 256, (6, 16, 8, width), dtype=torch.uint8, device="cuda")
    small = pool[ids]
    rewrite_blocks(plane_table([pool]), ids, rewrite)
    rewrite_blocks_ref(small, torch.arange(6, device="cuda"), rewrite)
    assert torch.equal(pool[ids], small)
    pool[ids] = 0xEE
    assert bool((pool.view(torch.int64) == -0x1111111111111112).all())
