"""Times the loads of an honest pair without and beside each hostile case of ``tests/hostile``.

The pair and the attacker are processes of this host; loads go over ``zmq`` on TCP, one after the
other, and every one must succeed with the right bytes. Quiet and attacked loads take turns, so that
other work on the machine falls on both. "a busy core" attacks nobody and computes: what a process
beside the pair costs anyway.

    python scripts/hostile.py --loads 400 --out scripts/results
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import multiprocessing
import os
import platform
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec

from kvxfer.bench.engines import SWITCH_INTERVAL_S
from tests.hostile.cases import CASES, Case, Fate, Target, address_of, repeat
from tests.hostile.rig import Honest, Usage, honest_pair

TURNS = 4
"""Quiet and attacked loads, in turns."""
BUSY = Case(name="a busy core", fate=Fate.SILENT)
START_S = 0.3
"""Within which an attacker is at work."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One case. Times in ms: median, 99th percentile, most."""

    name: str
    quiet: tuple[float, float, float]
    attacked: tuple[float, float, float]
    grown_nbytes: int
    counts: dict[str, int]

    @property
    def ratio(self) -> float:
        """Of the 99th percentiles."""
        return self.attacked[1] / self.quiet[1]


def main() -> int:
    """Exit status: 0 no case is beyond the limit, 1 one is."""
    options = _options()
    cases = [
        (number, case)
        for number, case in enumerate((*CASES, BUSY))
        if any(fnmatch.fnmatch(case.name, pattern) for pattern in options.cases)
    ]
    rows: list[Row] = []
    # Processes that have what an attack needs, and nothing of the engines
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.hostile.cases"])
    with ExitStack() as stack:
        pairs = {
            has_keys: stack.enter_context(honest_pair(has_keys=has_keys))
            for has_keys in {case.keys for _, case in cases}
        }
        sys.setswitchinterval(SWITCH_INTERVAL_S)  # both engines share this interpreter
        gc.collect()
        gc.freeze()  # as serving processes do: a full collection of what imports left takes 75 ms
        for number, case in cases:
            rows.append(_measured(context, pairs[case.keys], number, case, options.loads))
            row = rows[-1]
            print(f"{row.name:52} p99 {row.quiet[1]:6.1f} {row.attacked[1]:6.1f} ms", flush=True)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        stem = options.out / f"hostile_{time.strftime('%Y-%m-%d')}"
        stem.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(rows)))
        stem.with_suffix(".md").write_text(_report(rows, options.loads), encoding="utf-8")
    beyond = [row for row in rows if row.ratio > options.limit]
    for row in beyond:
        print(f"{row.name}: p99 {row.ratio:.1f} times that without, expected {options.limit:g}")
    return 1 if beyond else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--loads", type=int, default=400, help="loads without, and as many beside")
    parser.add_argument("--cases", nargs="+", default=["*"], help="patterns of names")
    parser.add_argument("--limit", type=float, default=2.0, help="of the ratio of p99")
    parser.add_argument("--out", type=Path, help="folder of the dated results")
    return parser.parse_args()


def _attacker(number: int, target: bytes, address: str) -> None:
    if number == len(CASES):
        while True:
            pass
    repeat(CASES[number], msgspec.json.decode(target, type=Target), address)


def _measured(
    context: multiprocessing.context.ForkServerContext,
    honest: Honest,
    number: int,
    case: Case,
    num_loads: int,
) -> Row:
    before, counts = Usage.now(), dict(honest.source.take_stats().counts)
    quiet: list[float] = []
    attacked: list[float] = []
    for turn in range(TURNS):
        quiet += _times_ms(honest, num_loads // TURNS)
        address = address_of(case, (number * TURNS + turn) % 5000)
        attacker = context.Process(
            target=_attacker, args=(number, msgspec.json.encode(honest.target), address)
        )
        attacker.start()
        try:
            time.sleep(START_S)
            attacked += _times_ms(honest, num_loads // TURNS)
        finally:
            attacker.kill()
            attacker.join()
    gc.collect()
    after = honest.source.take_stats().counts
    moved = {
        name: after[name] - counts.get(name, 0)
        for name in (
            *case.counts,
            "connections.refused.address",
            "connections.refused.key",
            "control.malformed",
        )
        if after.get(name, 0) > counts.get(name, 0)
    }
    return Row(
        name=case.name,
        quiet=_summary(quiet),
        attacked=_summary(attacked),
        grown_nbytes=max(0, Usage.now().resident_nbytes - before.resident_nbytes),
        counts=moved,
    )


def _times_ms(honest: Honest, number: int) -> list[float]:
    times: list[float] = []
    for _ in range(number):
        ref = honest.offer()
        begin_s = time.perf_counter()
        honest.finish(ref)
        times.append((time.perf_counter() - begin_s) * 1e3)
    return times


def _summary(times_ms: list[float]) -> tuple[float, float, float]:
    ordered = sorted(times_ms)
    return statistics.median(ordered), ordered[int(0.99 * len(ordered)) - 1], ordered[-1]


def _report(rows: list[Row], num_loads: int) -> str:
    ratios = sorted(row.ratio for row in rows)
    lines = [
        f"# Loads of an honest pair beside hostile peers, {time.strftime('%Y-%m-%d')}",
        "",
        f"Command: `python scripts/hostile.py --loads {num_loads}`. {os.cpu_count()} cores, "
        f"shared; load average {os.getloadavg()[0]:.1f}; Python {platform.python_version()}.",
        "`zmq` over TCP; the attacker is a process of the host that begins anew at once.",
        f"All {2 * num_loads * len(rows):,} loads succeeded with the right bytes.",
        "",
        "| case | without: median, p99, most (ms) | meanwhile | p99 ratio | memory | counted |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = (" , ".join(f"{ms:.1f}" for ms in each) for each in (row.quiet, row.attacked))
        counts = ", ".join(f"`{name}` {number}" for name, number in row.counts.items())
        lines.append(
            f"| {row.name} | {' | '.join(cells)} | {row.ratio:.2f} | "
            f"{row.grown_nbytes >> 20} MB | {counts} |"
        )
    lines += [
        "",
        f"Ratios of p99: median {statistics.median(ratios):.2f}, most {ratios[-1]:.2f}.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
