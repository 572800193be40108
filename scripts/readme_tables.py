"""Writes the tables of the README from the newest committed results of each kind.

A table stands between ``<!-- NAME: FILE -->`` and ``<!-- end -->``. Exit status 1 with ``--check``
where the README says something else than the results.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "scripts/results"

SAME_BLOCKS, OTHER_BLOCKS = "8B HND16->HND16 512 tokens", "8B HND16->NHD64 512 tokens"
"""64 MiB. NIXL moves blocks as they are; kvxfer is shown where it changes layout and size too."""


def _lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    shown = (header, ["---"] * len(header), *rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in shown)


def engines_table(result: dict[str, Any]) -> str:
    """Load and first token of one request, median ms, on a fresh pool and on one in random order.

    The floor is the first token of a request whose KV decode had already, beside either connector.
    """
    samples = [s for s in result["samples"] if s["together"] == 1 and not s["is_first"]]
    tokens = sorted({sample["tokens"] for sample in samples})

    def cell(what: str, pool: str, size: int, connectors: Sequence[str]) -> str:
        taken = [
            max(sample[what]) if isinstance(sample[what], list) else sample[what]
            for sample in samples
            if (sample["pool"], sample["tokens"]) == (pool, size)
            and sample["connector"] in connectors
        ]
        return f"{1e3 * statistics.median(taken):.1f}"

    def row(title: str, what: str, *connectors: str) -> list[str]:
        return [title] + [
            f"{cell(what, 'fresh', size, connectors)} "
            f"({cell(what, 'fragmented', size, connectors)})"
            for size in tokens
        ]

    return _lines(
        ["ms", *(f"{size:,} tokens" for size in tokens)],
        [
            row("load, NIXL", "loads_s", "nixl"),
            row("load, kvxfer `cuda_ipc`", "loads_s", "kvxfer"),
            row("first token, NIXL", "first_token_s", "nixl"),
            row("first token, kvxfer", "first_token_s", "kvxfer"),
            row("first token, KV was there", "local_s", "nixl", "kvxfer"),
        ],
    )


def wires_table(result: dict[str, Any]) -> str:
    """GB/s, median, and its ratio to plain TCP sockets of the same run; of NIXL its best setting
    and the one it has by default.
    """
    cells = {(cell["case"], cell["way"]): cell for cell in result["cells"]}

    def row(title: str, case: str, way: str) -> list[str]:
        cell = cells[case, way]
        return [title, f"{cell['gbps'][1]:.2f}", f"{cell['ratios'][1]:.2f}"]

    ways = [way for case, way in cells if case == SAME_BLOCKS]
    nixl = [way for way in ways if way.startswith("NIXL")]
    best = max(nixl, key=lambda way: cells[SAME_BLOCKS, way]["gbps"][1])
    rows = [row("plain TCP sockets", SAME_BLOCKS, "sockets")]
    rows += [row(f"{way}, blocks as they are", SAME_BLOCKS, way) for way in (best, *nixl[:1])]
    for way in ways:
        if way.startswith("kvxfer "):
            rows.append(row(f"{way.replace(' ', ' `', 1)}`, other blocks", OTHER_BLOCKS, way))
    return _lines(["64 MiB of KV", "GB/s", "to sockets"], rows)


TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "engines": ("vllm_gpu_*.json", engines_table),
    "wires": ("transfer_host_*.json", wires_table),
}
_PLACE = re.compile(r"<!-- (?P<name>\w+): [^\n]* -->\n.*?<!-- end -->", re.DOTALL)


def with_tables(page: str, results: Path = RESULTS) -> str:
    """The page with each of its tables made anew. Raises ValueError for a name that has none."""

    def made(place: re.Match[str]) -> str:
        name = place["name"]
        if name not in TABLES:
            raise ValueError(f"table {name!r}: expected one of {', '.join(TABLES)}")
        pattern, make = TABLES[name]
        newest = max(results.glob(pattern))
        table = make(json.loads(newest.read_text()))
        return f"<!-- {name}: {newest.name} -->\n{table}\n<!-- end -->"

    return _PLACE.sub(made, page)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the tables of the README of the results.")
    parser.add_argument("--check", action="store_true", help="only say whether they are equal")
    only_checks = parser.parse_args().check
    path = ROOT / "README.md"
    page = path.read_text()
    made = with_tables(page)
    if not only_checks:
        path.write_text(made)
    elif made != page:
        print("README.md: its tables are not those of the newest results; run this without --check")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
