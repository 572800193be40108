"""The runs of each program, compared with a permutation of rows in plain loops."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from kvxfer.kernels.block_rewrite import (
    BlockRewrite,
    ProgramPlan,
    bins_of,
    cycles_of,
    longest_cycle,
    plan_of,
    tile_of,
)
from tests.kernels.rewrite_cases import order, sources_of_rows

SIZES = [(2, 4), (4, 2), (4, 4), (6, 4), (4, 6), (1, 3), (16, 16), (24, 16)]
REWRITES = [
    BlockRewrite(num_heads, order(f"{received} {sizes[0]}"), order(f"{local} {sizes[1]}"))
    for received, local in product(("HND", "NHD"), repeat=2)
    for sizes in SIZES
    for num_heads in (1, 3, 8)
]


def moves_of(rewrite: BlockRewrite) -> dict[int, int]:
    """Of each run of a set, the run that it comes from; every row of it from there."""
    moves: dict[int, int] = {}
    for target, source in sources_of_rows(rewrite).items():
        run, row = divmod(target, rewrite.run_tokens)
        assert source % rewrite.run_tokens == row
        assert moves.setdefault(run, source // rewrite.run_tokens) == source // rewrite.run_tokens
    return moves


@pytest.mark.parametrize("rewrite", REWRITES, ids=str)
def test_bins_are_the_permutation(rewrite: BlockRewrite) -> None:
    moves = {target: source for target, source in moves_of(rewrite).items() if target != source}
    longest = longest_cycle(rewrite)
    for capacity in (longest, longest + 3, len(moves) + longest):
        runs = bins_of(rewrite, capacity)
        seen: list[tuple[int, int]] = []
        for entries in runs.tolist():
            pairs = [(target, source) for source, target in entries if source >= 0]
            assert entries[len(pairs) :] == [[-1, -1]] * (len(entries) - len(pairs))
            assert {target for target, _ in pairs} == {source for _, source in pairs}
            assert len(pairs) <= capacity
            seen += pairs
        assert len(seen) == len(moves)  # each once
        assert dict(seen) == moves
        if moves:  # no entry that no bin has
            assert bool((runs[:, -1] >= 0).any())
    assert len(runs) == 1


def test_cycles_written_out_by_hand() -> None:
    # [2, 3] to [3, 2]: rows 0..5 come from 0, 3, 1, 4, 2, 5
    rewrite = BlockRewrite(2, order("HND 3"), order("NHD 3"))
    assert sorted(map(sorted, cycles_of(rewrite))) == [[0], [1, 2, 3, 4], [5]]
    assert bins_of(rewrite, 4).tolist() == [[[1, 2], [2, 4], [3, 1], [4, 3]]]


@pytest.mark.parametrize(
    ("rewrite", "longest"),
    [  # run r of [H, T] goes to r * H mod (H * T - 1): the order of H there
        (BlockRewrite(8, order("HND 16"), order("NHD 16")), 7),
        (BlockRewrite(8, order("HND 128"), order("NHD 128")), 10),
        (BlockRewrite(64, order("HND 128"), order("NHD 128")), 13),
        (BlockRewrite(5, order("HND 6"), order("NHD 6")), 14),
        (BlockRewrite(8, order("HND 16"), order("HND 16")), 1),
    ],
    ids=str,
)
def test_the_longest_cycle(rewrite: BlockRewrite, longest: int) -> None:
    assert longest_cycle(rewrite) == longest


@pytest.mark.parametrize(
    ("num_longest", "run_units", "unit_nbytes", "max_units", "tile"),
    [
        pytest.param(7, 16, 16, 2048, (2048, 16), id="rows of 256 bytes"),
        pytest.param(5, 33, 4, 8192, (8192, 33), id="rows of 132 bytes"),
        pytest.param(200, 16, 16, 2048, (4096, 16), id="a larger tile for whole rows"),
        pytest.param(20, 256, 16, 2048, (2048, 86), id="three slices of 4 KiB"),
        pytest.param(100, 256, 16, 2048, (4096, 38), id="slices of 512 bytes at least"),
        pytest.param(1024, 16, 16, 2048, (8192, 8), id="the largest tile"),
        pytest.param(3000, 16, 16, 2048, (8192, 2), id="a sector of each row"),
        pytest.param(8192, 16, 16, 2048, (8192, 1), id="half a sector of each row"),
        pytest.param(16384, 32, 8, 4096, (16384, 1), id="the longest"),
        pytest.param(5000, 132, 1, 16384, (16384, 3), id="single bytes"),
    ],
)
def test_tiles(
    num_longest: int, run_units: int, unit_nbytes: int, max_units: int, tile: tuple[int, int]
) -> None:
    assert tile_of(num_longest, run_units, unit_nbytes, max_units) == tile
    units, columns = tile
    assert num_longest <= units // columns


@pytest.mark.parametrize("num_runs", [1, 7, 16, 31, 512])
@pytest.mark.parametrize("columns", [1, 2, 3, 7, 16, 33, 41, 72, 127, 1023, 5461, 16383, 16384])
def test_division_by_columns(num_runs: int, columns: int) -> None:
    plan = ProgramPlan(torch.zeros(1, min(num_runs, 16384 // columns), 2), columns, 1)
    for lane in range(plan.lanes):
        assert lane * plan.magic < 2**31
        assert lane * plan.magic >> plan.shift == lane // columns


def test_a_smaller_tile_that_is_fuller() -> None:
    # Two cycles of 14 runs and two that stay; whole rows of 64 units
    rewrite = BlockRewrite(5, order("HND 6"), order("NHD 6"))
    both = plan_of(rewrite, 64, 16, 32768)
    assert (len(both.runs), both.busy_units) == (1, 28 * 64)
    # Cycles of 10 runs, of 5 and one of 2: 12 of 10 do in 128, and all but one do in 32
    rewrite = BlockRewrite(8, order("HND 128"), order("NHD 128"))
    assert longest_cycle(rewrite) == 10
    large = plan_of(rewrite, 16, 16, 32768)
    assert (len(large.runs), large.busy_units) == (9, 2032)
    # Four cycles of 95: one in 128 runs, two in 256
    rewrite = BlockRewrite(8, order("HND 24"), order("NHD 16"))
    split = plan_of(rewrite, 16, 16, 32768)
    assert (len(split.runs), split.busy_units) == (4, 95 * 16)


def test_lanes_are_few_where_units_are() -> None:
    # Runs of two tokens, of 2 bytes: six in two cycles, in a tile of 16384 units
    rewrite = BlockRewrite(3, order("HND 4"), order("HND 2"))
    assert plan_of(rewrite, rewrite.run_tokens, 2, 32768).lanes == 32
    many = plan_of(BlockRewrite(8, order("HND 24"), order("NHD 16")), 16, 16, 32768)
    assert (many.busy_units, many.lanes) == (1520, 2048)


@pytest.mark.parametrize("num_runs", [1, 31, 32, 33, 64, 65, 1000, 1024])
def test_no_unit_is_without_a_lane(num_runs: int) -> None:
    plan = ProgramPlan(torch.zeros(1, num_runs, 2), 16, 1)
    assert plan.busy_units <= plan.lanes < max(33, 2 * plan.busy_units)
    assert plan.lanes & (plan.lanes - 1) == 0
