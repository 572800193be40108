"""Times the loads of an honest pair without and beside each hostile case of ``tests/hostile``.

The pair and the attacker are processes of this host; loads go over ``zmq`` on TCP, one after the
other, and every one must succeed with the right bytes. Quiet and attacked loads take turns, so that
other work on the machine falls on both. "a busy core" attacks nobody and computes: what a process
beside the pair costs anyway.

    python scripts/hostile.py --loads 400 --out scripts/results
"""

from __future__ import annotations

import argparse
import ctypes
import fnmatch
import gc
import multiprocessing
import statistics
import sys
import time
from contextlib import ExitStack
from multiprocessing.synchronize import Event
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec

from kvxfer.bench.core import Columns, Report, Table, Tail, facts_of, table, tail_columns, tail_of
from kvxfer.bench.engines import SWITCH_INTERVAL_S
from tests.hostile.cases import CASES, Case, Fate, Target, address_of, repeat
from tests.hostile.rig import Honest, Usage, honest_pair

TURNS = 4
"""Quiet and attacked loads, in turns."""
BEGIN_S = 60.0
"""For an attacker's process to import what it needs; it takes 1.5."""
BUSY = Case(name="a busy core", fate=Fate.SILENT)
START_S = 0.3
"""From an attacker's begin to the loads beside it."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One case. Times in ms, without it and meanwhile."""

    name: str
    quiet: Tail
    attacked: Tail
    grown_nbytes: int
    counts: dict[str, int]
    rounds: int
    has_missed: bool
    """Nothing of what the case counts at the source was counted: it was no attack."""

    @property
    def ratio(self) -> float:
        """Of the 99th percentiles."""
        return self.attacked[2] / self.quiet[2]


COLUMNS: Columns[Row] = {
    "case": lambda row: row.name,
    **tail_columns("without", lambda row: row.quiet),
    **tail_columns("meanwhile", lambda row: row.attacked),
    "p99 ratio": lambda row: f"{row.ratio:.2f}",
    "rounds": lambda row: f"{row.rounds:,}",
    "memory": lambda row: f"{row.grown_nbytes >> 20} MB",
    "counted": lambda row: ", ".join(f"`{name}` {number}" for name, number in row.counts.items()),
}


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
            print(f"{row.name:52} p99 {row.quiet[2]:6.1f} {row.attacked[2]:6.1f} ms", flush=True)
    if options.out is not None:
        facts = facts_of(f"python scripts/hostile.py --loads {options.loads}", ("pyzmq",))
        title = "Loads of an honest pair beside hostile peers"
        report = Report(options.out, "hostile", title, facts, _tables)
        report.records["rows"] = rows
        report.write()
    missed = [row.name for row in rows if row.has_missed]
    for name in missed:
        print(f"{name}: expected the source to count it, got nothing: it was not reached")
    beyond = [row for row in rows if row.ratio > options.limit]
    for row in beyond:
        print(f"{row.name}: p99 {row.ratio:.1f} times that without, expected {options.limit:g}")
    return 1 if beyond or missed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--loads", type=int, default=400, help="loads without, and as many beside")
    parser.add_argument("--cases", nargs="+", default=["*"], help="patterns of names")
    parser.add_argument("--limit", type=float, default=2.0, help="of the ratio of p99")
    parser.add_argument("--out", type=Path, help="folder of the dated results")
    return parser.parse_args()


def _attacker(
    number: int, target: bytes, address: str, begins: Event, rounds: ctypes.c_uint64
) -> None:
    known = msgspec.json.decode(target, type=Target)

    def count() -> None:
        rounds.value += 1

    begins.set()  # behind what this process imports, which takes longer than a turn
    if number == len(CASES):
        while True:
            count()
    repeat(CASES[number], known, address, count)


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
    rounds = context.RawValue(ctypes.c_uint64)
    for turn in range(TURNS):
        quiet += _times_ms(honest, num_loads // TURNS)
        address, begins = address_of(case, (number * TURNS + turn) % 5000), context.Event()
        target = msgspec.json.encode(honest.target)
        attacker = context.Process(target=_attacker, args=(number, target, address, begins, rounds))
        attacker.start()
        try:
            if not begins.wait(BEGIN_S):
                raise TimeoutError(f"{case.name}: expected its attacker to begin, it did not")
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
        quiet=tail_of(quiet),
        attacked=tail_of(attacked),
        grown_nbytes=max(0, Usage.now().resident_nbytes - before.resident_nbytes),
        counts=moved,
        rounds=rounds.value,
        has_missed=bool(case.counts) and not any(name in moved for name in case.counts),
    )


def _times_ms(honest: Honest, number: int) -> list[float]:
    times: list[float] = []
    for _ in range(number):
        ref = honest.offer()
        begin_s = time.perf_counter()
        honest.finish(ref)
        times.append((time.perf_counter() - begin_s) * 1e3)
    return times


def _tables(report: Report) -> list[Table]:
    rows: list[Row] = report.records["rows"]
    ratios = sorted(row.ratio for row in rows)
    text = (
        "Milliseconds of a load. `zmq` over TCP; the attacker is a process of the host that begins "
        "anew at once. All loads succeeded with the right bytes. Ratios of p99: median "
        f"{statistics.median(ratios):.2f}, most {ratios[-1]:.2f}."
    )
    return [table("cases", text, COLUMNS, rows)]


if __name__ == "__main__":
    sys.exit(main())
