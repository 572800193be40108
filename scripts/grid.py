"""Run the grid: prefill and decode engines of every TP size, block size, layout and number of KV
heads against each other, 3,600 cells, over shm and zmq by turns; and a sample of the same shapes
with models whose layers have windows ("hybrid-...") or share KV ("kv-sharing-...").

Each cell compares the tokens of three prompts with a single-engine run and the KV with the
source's. Prints the cells in which something differs; exit status 0 only if there is none.
"""

from __future__ import annotations

import argparse
import fnmatch
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec

from kvxfer.bench.frame import count
from tests.end_to_end.grid import (
    MODELS,
    TRANSPORTS,
    Cell,
    Fleet,
    Outcome,
    all_cells,
    in_run_order,
    window_cells,
)

EXAMPLE = "p2.16.HND-d1.32.NHD-h4-*"
SHOWN_PROBLEMS = 3
REPORT_EVERY_S = 30.0
"""A line says this often how far the run is."""


def main() -> int:
    """Exit status: 0 all equal, 1 something differs, 130 cut off by ctrl-C."""
    options = _options()
    grid = [*all_cells(), *window_cells()]
    cells = _chosen(grid, options)
    outcomes: list[Outcome] = []
    started_s = time.monotonic()
    is_cut_off = False
    try:
        _run(cells, outcomes, options.max_failures)
    except KeyboardInterrupt:
        is_cut_off = True
    wall_s = time.monotonic() - started_s
    failed = [outcome for outcome in outcomes if outcome.problems]
    _show(failed)
    _say(f"{wall_s:.0f} s")
    _summarise(outcomes, cells, grid)
    if options.json is not None:
        _write(options.json, outcomes, num_asked=len(cells), wall_s=wall_s)
    if is_cut_off:
        return 130
    return int(bool(failed) or len(outcomes) < len(cells))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/grid",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--cells",
        action="append",
        metavar="PATTERN",
        help=f"run the cells whose name matches, for example '{EXAMPLE}'; may be given again",
    )
    parser.add_argument("--sample", type=count, metavar="N", help="N of the chosen cells")
    parser.add_argument("--seed", type=int, default=0, help="chooses the sample (default 0)")
    parser.add_argument(
        "--transport", choices=TRANSPORTS, help="one wire for all cells (default: by turns)"
    )
    parser.add_argument(
        "--max-failures",
        type=count,
        default=20,
        metavar="N",
        help="stop after so many failing cells (default 20)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every outcome to FILE")
    return parser.parse_args()


def _chosen(grid: Sequence[Cell], options: argparse.Namespace) -> list[Cell]:
    cells = list(grid)
    if options.transport is not None:
        cells = [replace(cell, transport=options.transport) for cell in cells]
    if options.cells is not None:
        wanted: set[str] = set()
        for pattern in options.cells:
            found = fnmatch.filter(map(str, cells), pattern)
            if not found:
                sys.exit(
                    f"--cells: expected a pattern of cell names such as {EXAMPLE}, got "
                    f"{pattern!r}, which matches none of {len(cells)} (the first: {cells[0]})"
                )
            wanted.update(found)
        cells = [cell for cell in cells if str(cell) in wanted]
    if options.sample is not None and options.sample < len(cells):
        cells = random.Random(options.seed).sample(cells, options.sample)
    return in_run_order(cells)


def _run(cells: Sequence[Cell], outcomes: list[Outcome], max_failures: int) -> None:
    """Appends to ``outcomes`` as cells end, so that a run that is cut off can still be told."""
    num_failed, reported_s = 0, time.monotonic()
    with Fleet() as fleet:
        for cell in cells:
            outcome = fleet.run(cell)
            outcomes.append(outcome)
            if outcome.problems:
                num_failed += 1
                _say(f"differs: {cell}: {outcome.problems[0]}")
            if num_failed >= max_failures:
                _say(f"stopped after {num_failed} failing cells (--max-failures)")
                return
            if time.monotonic() - reported_s >= REPORT_EVERY_S:
                reported_s = time.monotonic()
                _say(f"{len(outcomes)} of {len(cells)} cells, {num_failed} differ")


def _say(text: str) -> None:
    print(text, flush=True)


def _show(failed: Sequence[Outcome]) -> None:
    if not failed:
        return
    _say(f"{len(failed)} cells:")
    for outcome in failed:
        left = len(outcome.problems) - SHOWN_PROBLEMS
        more = [f"... and {left} more (--json has all)"] if left > 0 else []
        _say("\n    ".join((f"{outcome.cell}:", *outcome.problems[:SHOWN_PROBLEMS], *more)))
    first = failed[0].cell
    _say(f"again: scripts/grid --transport {first.transport} --cells '{first}'")


def _summarise(outcomes: Sequence[Outcome], asked: Sequence[Cell], grid: Sequence[Cell]) -> None:
    """How many cells of each model were equal, and how long they took."""
    num_asked = Counter(cell.model for cell in asked)
    num_grid = Counter(cell.model for cell in grid)
    for model in MODELS:
        ran = [outcome for outcome in outcomes if outcome.cell.model == model]
        num_equal = sum(not outcome.problems for outcome in ran)
        if num_asked[model]:
            _say(
                f"{model}: {num_equal} of {len(ran)} cells equal ({num_asked[model]} asked for, "
                f"{num_grid[model]} in the grid)"
            )
    if walls_s := sorted(outcome.wall_s for outcome in outcomes):
        mean_s = statistics.fmean(walls_s)
        _say(
            f"per cell: mean {mean_s:.2f} s, median {statistics.median(walls_s):.2f} s, longest "
            f"{walls_s[-1]:.2f} s; the whole grid at the mean: {mean_s * len(grid) / 60:.0f} min"
        )


def _write(path: Path, outcomes: Sequence[Outcome], *, num_asked: int, wall_s: float) -> None:
    known = {
        "asked": num_asked,
        "run": len(outcomes),
        "equal": sum(not outcome.problems for outcome in outcomes),
        "wall_s": wall_s,
        "cells": [{"name": str(outcome.cell), **asdict(outcome)} for outcome in outcomes],
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(known)))


if __name__ == "__main__":
    sys.exit(main())
