"""A rewrite as programs that share no byte: whole cycles of its permutation, packed together.

Where each run of a set goes is the same for every set and segment: a permutation. Runs that follow
each other around one of its cycles only take each other's places, so a program that has all of them
in registers before it stores the first one needs no scratch memory and waits for nobody. Pure:
needs no Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kvxfer.kernels.block_rewrite import BlockRewrite, sources_of_runs

# 1024 threads with half of the registers of a multiprocessor
MAX_TILE_NBYTES = 128 << 10
# 16 for each of 1024 threads
MAX_TILE_UNITS = 16384
# Programs become larger before columns become narrower: one of 128 bytes moved 1.5 times as fast as
# one of 64 (scripts/results/postprocess_2026-11-22.md)
WIDE_NBYTES = 512
# of GPU memory: a narrower column is fetched several times
SECTOR_NBYTES = 32
# Of a warp
MIN_LANES = 32
# Programs of an eighth of a tile at least: some are fuller of whole cycles
MIN_TILE_SHARE = 8


@dataclass(frozen=True, slots=True, eq=False)
class RunTable:
    """Which runs a program moves; equal only to itself.

    ``runs`` [num_bins, bin_runs, 2] int32: source and target, counted from the beginning of a set;
    -1 where a bin has no more. All bins together: every run that moves, once; the others too where
    fixed points are kept. ``most_runs``: of the fullest bin.
    """

    runs: Tensor
    most_runs: int

    @property
    def num_bins(self) -> int:
        """Programs for a set and a slice of its columns."""
        return self.runs.shape[0]

    @property
    def bin_runs(self) -> int:
        """Runs of a bin, the missing ones too."""
        return self.runs.shape[1]


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program moves: of each run of a bin ``columns`` units, ``units`` at most in all."""

    units: int
    columns: int
    num_slices: int

    @property
    def capacity(self) -> int:
        """Runs that fit."""
        return self.units // self.columns

    @property
    def shift(self) -> int:
        """For every unit of the tile, unit // columns is unit * magic >> shift, in 31 bits.

        Exact: magic exceeds 2**shift / columns by less than 1, so the quotient is off by less than
        units / 2**shift, which is at most 1 / columns.
        """
        return (self.units * self.columns - 1).bit_length()

    @property
    def magic(self) -> int:
        """See :attr:`shift`."""
        return -(-(1 << self.shift) // self.columns)


@dataclass(frozen=True, slots=True)
class Plan:
    """A tile and the runs of its programs."""

    tile: Tile
    table: RunTable

    @property
    def num_programs(self) -> int:
        """Of a set."""
        return self.table.num_bins * self.tile.num_slices

    @property
    def busy_units(self) -> int:
        """Of the fullest program."""
        return self.table.most_runs * self.tile.columns

    @property
    def lanes(self) -> int:
        """A power of two, of which these are more than half: the compiler would drop the others of
        the tile, but only after it has unrolled them. A minute for a program of 24 units of 2 bytes
        in a tile of 16384.
        """
        return max(MIN_LANES, 1 << (self.busy_units - 1).bit_length())


@cache
def cycles_of(rewrite: BlockRewrite) -> tuple[tuple[int, ...], ...]:
    """Runs in the order of a cycle, each run behind its source; by first run. Fixed points too."""
    sources: list[int] = sources_of_runs(rewrite, torch.device("cpu")).tolist()
    cycles = []
    seen = [False] * len(sources)
    for first in range(len(sources)):
        if seen[first]:
            continue
        cycle = []
        run = first
        while not seen[run]:
            seen[run] = True
            cycle.append(run)
            run = sources[run]
        cycles.append(tuple(reversed(cycle)))
    return tuple(cycles)


@cache
def longest_cycle(rewrite: BlockRewrite) -> int:
    """Runs of it."""
    return max(map(len, cycles_of(rewrite)))


@cache
def run_table(rewrite: BlockRewrite, capacity: int, bin_runs: int, keeps_fixed: bool) -> RunTable:
    """Whole cycles, at most ``capacity`` runs a bin, each bin as long as ``bin_runs``.

    By their first run, so that programs side by side move rows side by side. ``capacity`` is at
    least the longest cycle.
    """
    bins: list[list[tuple[int, int]]] = [[]]
    for cycle in cycles_of(rewrite):
        if len(cycle) == 1 and not keeps_fixed:
            continue
        if len(bins[-1]) + len(cycle) > capacity:
            bins.append([])
        # Python's -1 is the last one: the first run's source
        bins[-1] += [(cycle[at - 1], run) for at, run in enumerate(cycle)]
    none = (-1, -1)
    padded = [sorted(pairs) + [none] * (bin_runs - len(pairs)) for pairs in bins]
    return RunTable(torch.tensor(padded, dtype=torch.int32), max(map(len, bins)))


def tile_of(num_longest: int, run_units: int, unit_nbytes: int, max_units: int) -> Tile:
    """A tile of ``max_units`` that holds a cycle of ``num_longest`` runs; a larger one if it must.

    Columns of the runs are cut where whole runs do not fit.
    """
    largest = min(MAX_TILE_NBYTES // unit_nbytes, MAX_TILE_UNITS)
    wanted = min(run_units, WIDE_NBYTES // unit_nbytes)
    units = max_units
    while units < largest and num_longest * wanted > units:
        units *= 2
    columns = min(run_units, units // num_longest)
    num_slices = -(-run_units // columns)
    # As wide as each other, and whole sectors, if that makes them no wider
    sector = max(1, SECTOR_NBYTES // unit_nbytes)
    even = -(-run_units // (num_slices * sector)) * sector
    return Tile(units, min(columns, even), num_slices)


@cache
def plan_of(
    rewrite: BlockRewrite, run_units: int, unit_nbytes: int, tile_nbytes: int, keeps_fixed: bool
) -> Plan:
    """How programs of about ``tile_nbytes``, a power of two, share a set; see :func:`tile_of`.

    Smaller ones where those are fuller, by an eighth.
    """
    num_longest = longest_cycle(rewrite)
    most = min(max(1, tile_nbytes // unit_nbytes), MAX_TILE_UNITS)
    least = max(1, most // MIN_TILE_SHARE)
    plans = []
    while most >= least:
        tile = tile_of(num_longest, run_units, unit_nbytes, most)
        # Lanes behind the last whole run have an entry too: none needs a mask to read it
        bin_runs = -(-tile.units // tile.columns)
        plans.append(Plan(tile, run_table(rewrite, tile.capacity, bin_runs, keeps_fixed)))
        most //= 2
    fewest = min(plan.num_programs * plan.busy_units for plan in plans)
    return next(plan for plan in plans if plan.num_programs * plan.busy_units * 8 <= fewest * 9)
