"""Times the loads of an honest pair without and beside each hostile case of ``tests/hostile``.

Source, sink and attacker are processes of this host, and the attacker has a core of its own where
there are two or more: then what loads take longer is the source's work. Loads go over ``zmq`` on
TCP, one after the other, and every one must succeed with the right bytes. Quiet and attacked loads
take turns, so that other work on the machine falls on both; an attacked turn lasts as long as one
whole attack at least. "a busy core" attacks nobody and computes: what a process beside the pair
costs anyway.

    python scripts/hostile.py --loads 400 --out scripts/results
    python scripts/hostile.py --pairs 4 --spread       with 24 cores: a quarter of the cases each
"""

from __future__ import annotations

import argparse
import ctypes
import fnmatch
import gc
import multiprocessing
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from multiprocessing.synchronize import Event
from pathlib import Path
from threading import Lock
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec

from kvxfer.bench.core import (
    Columns,
    Report,
    Table,
    Tail,
    facts_of,
    line_of,
    table,
    tail_columns,
    tail_of,
)
from kvxfer.bench.engines import SWITCH_INTERVAL_S
from kvxfer.bench.workers import Worker
from kvxfer.connector.records import SourceRef
from tests.hostile.cases import CASES, Case, Fate, Target, address_of, repeat
from tests.hostile.rig import (
    NO_KEYS,
    Content,
    Giver,
    Keys,
    Peak,
    honest_sink,
    honest_source,
    take,
)

TURNS = 4
"""Quiet and attacked loads, in turns."""
LIMIT = 2.0
"""Of p99 beside an attack and without."""
MOST_TRIES = 4
"""Of a case that is beyond the limit. On a machine that stands still for 20 ms in one load of 100,
with and without an attack, one case in five is, and other ones in each run.
"""
BEGIN_S = 60.0
"""For an attacker's process to import what it needs; it takes 1.5."""
BUSY = Case(name="a busy core", fate=Fate.SILENT)
START_S = 0.3
"""From an attacker's begin to the loads beside it."""
REST_S, REST_LOADS = 0.25, 5
"""What an attacker has left is read before the next loads count as those without."""
IMPORTED = ["kvxfer.bench.core", "kvxfer.bench.engines", "tests.hostile.rig"]
"""What this module needs: or each attacker, which begins with it, imports that again."""
MOST_TURN_S = 120.0
"""An attack that takes longer is told as one that was not reached."""
SOON_S = 2.0
"""When the source ends a handshake that is only begun: such an attack takes as long."""


class Cores(msgspec.Struct, frozen=True):
    """Who computes where."""

    attacker: tuple[int, ...]
    pair: tuple[int, ...]

    @property
    def text(self) -> str:
        if self.attacker == self.pair:
            return f"{len(self.pair)}, shared by all"
        return f"attacker {len(self.attacker)}, source and sink {len(self.pair)} others"


def divided(cores: Collection[int], *, is_shared: bool = False) -> Cores:
    """One for the attacker and the others for the pair; all for both where they share."""
    first, *others = sorted(cores)
    if is_shared or not others:
        return Cores((first, *others), (first, *others))
    return Cores((first,), tuple(others))


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One case. Times in ms, without it and meanwhile."""

    name: str
    quiet: Tail
    attacked: Tail
    peak_nbytes: int
    grown_nbytes: int
    """Memory of the source's process beyond what it had before: at the worst moment, and after."""
    counts: dict[str, int]
    rounds: int
    missed: tuple[str, ...]
    """What the case counts at the source and was not counted: it was no attack, or another one."""
    tries: int = 1
    """This is the last one."""

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
    "tries": lambda row: str(row.tries),
    "peak memory": lambda row: f"{row.peak_nbytes >> 20} MB",
    "memory after": lambda row: f"{row.grown_nbytes >> 20} MB",
    "counted": lambda row: ", ".join(f"`{name}` {number}" for name, number in row.counts.items()),
}


SHOWN = ("case", "without p99", "meanwhile p99", "p99 ratio", "tries", "rounds", "peak memory")
OFTEN = ("connections.refused.address", "connections.refused.key", "control.malformed")
"""Counters that many cases move."""


def main() -> int:
    """Exit status: 0 no case is beyond the limit, 1 one is."""
    options = _options()
    if options.part:
        for row in _measure(options):
            print(msgspec.json.encode(row).decode(), flush=True)
        return 0
    command = shlex.join(["python", "scripts/hostile.py", *sys.argv[1:]])
    facts = facts_of(command, ("pyzmq",)) | {"cores": _cores_text(options)}
    title = "Loads of an honest pair beside hostile peers"
    report = Report(options.out, "hostile", title, facts, _tables) if options.out else None
    rows: list[Row] = []
    if report is not None:
        report.records["rows"] = rows

    def add(row: Row) -> None:
        rows.append(row)
        print(line_of(COLUMNS, row, SHOWN), flush=True)
        if report is not None:  # each time: whoever ends the run keeps what there is
            report.write()

    if options.pairs > 1:
        _side_by_side(options.pairs, add)
    else:
        for row in _measure(options):
            add(row)
    missed = [row for row in rows if row.missed or not row.rounds]
    for row in missed:
        what = ", ".join(row.missed) or "a whole attack"
        print(f"{row.name}: expected {what} within a turn, got none: it was not reached")
    beyond = [row for row in rows if row.ratio > options.limit]
    for row in beyond:
        print(f"{row.name}: p99 {row.ratio:.1f} times that without, expected {options.limit:g}")
    return 1 if beyond or missed else 0


def _cores_text(options: argparse.Namespace) -> str:
    parts = shares(os.sched_getaffinity(0), options.pairs)
    texts = {divided(part, is_shared=options.share_cores).text for part in parts}
    text = " or ".join(sorted(texts))
    return text if options.pairs == 1 else f"{options.pairs} pairs side by side, of each: {text}"


def shares(cores: Collection[int], number: int) -> list[list[int]]:
    """Of each pair, its cores, which lie side by side. Raises SystemExit for fewer cores."""
    if len(cores) < number:
        raise SystemExit(f"--pairs: expected at most {len(cores)}, one for each core, got {number}")
    own = sorted(cores)
    ends = [len(own) * index // number for index in range(number + 1)]
    return [own[begin:end] for begin, end in pairwise(ends)]


def _side_by_side(number: int, add: Callable[[Row], None]) -> None:
    """Each pair has cores of its own, and every so many'th case. Raises SystemExit if one fails."""
    all_cores = os.sched_getaffinity(0)
    parts: list[subprocess.Popen[str]] = []
    try:
        for index, cores in enumerate(shares(all_cores, number)):
            os.sched_setaffinity(0, cores)  # which the new process inherits
            argv = [sys.executable, __file__, *sys.argv[1:], "--part", f"{index}/{number}"]
            parts.append(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True))
        os.sched_setaffinity(0, all_cores)
        lock = Lock()
        with ThreadPoolExecutor(number) as readers:
            list(readers.map(partial(_read_rows, add=add, lock=lock), parts))
        failed = [index for index, part in enumerate(parts) if part.wait()]
    finally:
        for part in parts:
            part.kill()
    if failed:
        raise SystemExit(f"parts {failed}: expected all their cases, they ended before")


def _read_rows(part: subprocess.Popen[str], add: Callable[[Row], None], lock: Lock) -> None:
    for line in part.stdout or ():
        row = msgspec.json.decode(line, type=Row)
        with lock:
            add(row)


class Taker:
    """The honest sink, in a process of its own as engines have."""

    def __init__(self, keys: Keys, life: bytes, sent: Content) -> None:
        self._stack = ExitStack()
        self._sink = self._stack.enter_context(honest_sink(keys, life))
        self._sent = sent
        _do_as_engines_do()

    def take(self, ref: SourceRef) -> float:
        """How long that load takes, in ms."""
        begin_s = time.perf_counter()
        take(self._sink, ref, self._sent)
        return (time.perf_counter() - begin_s) * 1e3

    def forget(self) -> None:
        """The reports of its loads."""
        for worker in self._sink.workers:
            worker.get_kv_connector_stats()

    def close(self) -> None:
        self._stack.close()


class Pair(NamedTuple):
    giver: Giver
    taker: Worker

    def times_ms(self, number: int) -> list[float]:
        """Of so many loads, one after the other."""
        return [self.taker.call(float, "take", self.giver.offer()) for _ in range(number)]


@contextmanager
def _pair(keys: Keys) -> Iterator[Pair]:
    with honest_source(keys, connect_timeout_s=SOON_S) as giver:
        taker = Worker("sink", Taker, keys, giver.sink_life, giver.sent)
        try:
            pair = Pair(giver, taker)
            pair.times_ms(1)
            yield pair
        finally:
            taker.close()


def _do_as_engines_do() -> None:
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()  # as serving processes do: a full collection of what imports left takes 75 ms


def _measure(options: argparse.Namespace) -> Iterator[Row]:
    """All cases that are asked for, one after the other, on this process's cores."""
    cases = _cases(options)
    cores = divided(os.sched_getaffinity(0), is_shared=options.share_cores)
    os.sched_setaffinity(0, cores.pair)  # before there are threads, which inherit it
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with ExitStack() as stack:
        pairs = {
            has_keys: stack.enter_context(_pair(Keys.made() if has_keys else NO_KEYS))
            for has_keys in {case.keys for _, case in cases}
        }
        _do_as_engines_do()
        for number, case in cases:
            giver, taker = pairs[case.keys]
            for tries in range(1, MOST_TRIES + 1):
                # An offer of its own: leases end, and a case may use one up
                pair = Pair(replace(giver, held=giver.offer()), taker)
                row = _measured(context, pair, number, case, cores, options.loads, tries)
                if row.ratio <= options.limit and not row.missed:
                    break
            yield row


def _cases(options: argparse.Namespace) -> Sequence[tuple[int, Case]]:
    """By their numbers; of a part, every so many'th."""
    chosen = [
        (number, case)
        for number, case in enumerate((*CASES, BUSY))
        if any(fnmatch.fnmatch(case.name, pattern) for pattern in options.cases)
        and not (options.spread and case.setting.slow)
    ]
    index, number = map(int, (options.part or "0/1").split("/"))
    return chosen[index::number]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--loads", type=int, default=400, help="loads without, and as many beside")
    parser.add_argument("--cases", nargs="+", default=["*"], help="patterns of names")
    parser.add_argument("--spread", action="store_true", help="only the settings of quick tests")
    parser.add_argument(
        "--share-cores", action="store_true", help="the attacker has no core of its own"
    )
    parser.add_argument(
        "--pairs", type=int, default=1, help="so many run side by side, each with some of the cases"
    )
    parser.add_argument("--part", help=argparse.SUPPRESS)  # of such a pair: 0/4
    parser.add_argument("--limit", type=float, default=LIMIT, help="of the ratio of p99")
    parser.add_argument("--out", type=Path, help="folder of the dated results")
    return parser.parse_args()


def _attacker(
    number: int,
    target: Target,
    address: str,
    cores: Cores,
    begins: Event,
    rounds: ctypes.c_uint64,
) -> None:
    os.sched_setaffinity(0, cores.attacker)

    def count() -> None:
        rounds.value += 1

    begins.set()
    if number == len(CASES):
        while True:
            count()
    repeat(CASES[number], target, address, count)


def _measured(
    context: multiprocessing.context.ForkServerContext,
    pair: Pair,
    number: int,
    case: Case,
    cores: Cores,
    num_loads: int,
    tries: int,
) -> Row:
    source = pair.giver.source
    counts = dict(source.take_stats().counts)
    quiet: list[float] = []
    attacked: list[float] = []
    rounds = context.RawValue(ctypes.c_uint64)
    peak = Peak()
    for turn in range(TURNS):
        quiet += pair.times_ms(num_loads // TURNS)
        address, begins = address_of(case, (number * TURNS + turn) % 5000), context.Event()
        attacker = context.Process(
            target=_attacker, args=(number, pair.giver.target, address, cores, begins, rounds)
        )
        attacker.start()
        try:
            if not begins.wait(BEGIN_S):
                raise TimeoutError(f"{case.name}: expected its attacker to begin, it did not")
            before, end_s = rounds.value, time.monotonic() + MOST_TURN_S
            time.sleep(START_S)
            attacked += pair.times_ms(num_loads // TURNS)
            while rounds.value == before and time.monotonic() < end_s:
                attacked += pair.times_ms(1)
        finally:
            attacker.kill()
            attacker.join()
        time.sleep(REST_S)
        pair.times_ms(REST_LOADS)
    pair.taker.call(object, "forget")
    gc.collect()
    peak_nbytes, grown_nbytes = peak.grown_nbytes, peak.left_nbytes
    after = source.take_stats().counts
    moved = {
        name: after[name] - counts.get(name, 0)
        for name in (*case.counts, *case.one_of, *OFTEN)
        if after.get(name, 0) > counts.get(name, 0)
    }
    return Row(
        name=case.name,
        quiet=tail_of(quiet),
        attacked=tail_of(attacked),
        peak_nbytes=peak_nbytes,
        grown_nbytes=grown_nbytes,
        counts=moved,
        rounds=rounds.value,
        missed=case.uncounted(moved),
        tries=tries,
    )


def _tables(report: Report) -> list[Table]:
    rows: list[Row] = report.records["rows"]
    ratios = sorted(row.ratio for row in rows)
    text = (
        "Milliseconds of a load. `zmq` over TCP; the attacker is a process of the host that begins "
        "anew at once. Memory is the source's beyond what it had. All loads succeeded "
        f"with the right bytes. A case beyond {LIMIT:g} is measured again, {MOST_TRIES} times at "
        f"most. Ratios of p99: median {statistics.median(ratios):.2f}, most "
        f"{ratios[-1]:.2f}."
    )
    return [table("cases", text, COLUMNS, rows)]


if __name__ == "__main__":
    sys.exit(main())
