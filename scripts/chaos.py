"""Storms at volume: two prefill and two decode engines of one and two ranks, whose processes are
killed, stopped and lied to while requests move through them. ``tests/chaos`` says what must hold.

    python scripts/chaos.py --requests 10000 --wire shm zmq ucx nixl --out scripts/results
    python scripts/chaos.py --requests 2000 --wire cuda_ipc --device cuda --out scripts/results
    python scripts/chaos.py --planted --out scripts/results

The last one plants faults, one at a time, and says who finds each.

Exit status: 0 nothing that must not happen has happened (every fault was found), 1 something has.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec

from tests.chaos.finding import Found, look_for
from tests.chaos.planted import PLANTED
from tests.chaos.play import Summary
from tests.chaos.running import hardware, versions, weather
from tests.chaos.storm import make_plan

MOST_PER_STORM = 2500
"""Requests; more are several storms, of seeds in a row, each with a fleet of its own."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A results file."""

    date: str
    command: str
    hardware: str
    versions: dict[str, str]
    storms: list[Summary]


def main() -> int:
    options = _options()
    os.environ["PYTHONPATH"] = sys.path[0]  # the fork server imports before it is told of sys.path
    logging.getLogger("kvxfer").setLevel(logging.CRITICAL)
    folder = options.logs or Path(tempfile.mkdtemp(prefix="storms-"))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    if options.planted:
        return _plant(folder, options.out)
    is_clean = True
    for wire in options.wire:
        storms: list[Summary] = []
        for seed, number in _storms(options.seed, options.requests):
            plan = make_plan(seed, number, every=options.every)
            summary = weather(plan, folder / f"{wire}-{seed}", wire, device=options.device)
            storms.append(summary)
            print(_line(summary), flush=True)
            for problem in summary.problems()[:20]:
                print(f"  {problem[:300]}", flush=True)
            if options.out is not None:
                _write(options, wire, storms)
        is_clean = is_clean and all(each.is_clean for each in storms)
    print(f"logs: {folder}")
    return 0 if is_clean else 1


def _plant(folder: Path, out: Path | None) -> int:
    rows: list[Found] = []
    for planted in PLANTED:
        rows.append(look_for(planted, folder))
        row = rows[-1]
        print(f"{row.name:45} {row.seconds:6.1f} s  {row.by or 'NOT FOUND'}", flush=True)
        if out is not None:
            stem = out / f"chaos_planted_{time.strftime('%Y-%m-%d')}"
            stem.with_suffix(".md").write_text(_table(rows), encoding="utf-8")
    return 0 if all(row.by for row in rows) else 1


def _table(rows: list[Found]) -> str:
    cells = [
        f"| {row.room} | {row.name.replace('_', ' ')} | {row.by or 'nobody'} | {row.seconds:.0f} |"
        for row in rows
    ]
    return "\n".join(
        [
            f"# Faults planted for storms and the suite to find, {time.strftime('%Y-%m-%d')}",
            "",
            f"{sum(bool(row.by) for row in rows)} of {len(rows)} found. Seconds count the start of "
            "engines, or of pytest, and the calm before the storm.",
            "",
            "- Command: `python scripts/chaos.py --planted --out scripts/results`",
            f"- Machine: {hardware()}; shared with other work",
            "- Versions: " + ", ".join(f"{name} {each}" for name, each in versions().items()),
            "- What each one changes: `tests/chaos/planted.py`",
            "",
            "| room | fault | found by | seconds |",
            "|---|---|---|---|",
            *cells,
            "",
        ]
    )


def _storms(seed: int, num_requests: int) -> list[tuple[int, int]]:
    """(seed, requests) of each."""
    full, rest = divmod(num_requests, MOST_PER_STORM)
    sizes = [MOST_PER_STORM] * full + ([rest] if rest else [])
    return [(seed + number, size) for number, size in enumerate(sizes)]


def _line(summary: Summary) -> str:
    return (
        f"{summary.wire} seed {summary.seed}: {summary.num_requests} requests in "
        f"{summary.duration_s:g} s, {sum(summary.injections.values())} injections, "
        f"loaded {summary.ends.get('loaded', 0)}, wrong {len(summary.wrong)}, "
        f"lost {len(summary.lost)}, hung {len(summary.hung)}, leaked {len(summary.leaked)}"
    )


def _write(options: argparse.Namespace, wire: str, storms: list[Summary]) -> None:
    date = time.strftime("%Y-%m-%d")
    record = Record(
        date=date,
        command=f"python scripts/chaos.py --requests {options.requests} --wire {wire} --seed "
        f"{options.seed} --every {options.every} --device {options.device} --out scripts/results",
        hardware=hardware(),
        versions=versions(),
        storms=storms,
    )
    stem = options.out / f"chaos_{wire}_{date}"
    stem.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(record)) + b"\n")
    stem.with_suffix(".md").write_text(_report(record), encoding="utf-8")


def _report(record: Record) -> str:
    storms = record.storms
    wire = storms[0].wire
    total = sum(each.num_requests for each in storms)
    counts = {
        kind: sum(len(getattr(each, kind)) for each in storms)
        for kind in ("wrong", "lost", "hung", "leaked")
    }
    lines = [
        f"# Chaos over `{wire}`, {record.date}",
        "",
        f"{total:,} requests in {sum(each.duration_s for each in storms):,.0f} s: "
        + ", ".join(f"{kind} {number}" for kind, number in counts.items())
        + ".",
        "",
        f"- Command: `{record.command}`",
        f"- Machine: {record.hardware}; shared with other work",
        "- Versions: " + ", ".join(f"{name} {each}" for name, each in record.versions.items()),
        "- Seeds: "
        + ", ".join(str(each.seed) for each in storms)
        + "; `tests/chaos/storm.py` makes the whole plan of each",
        "- Engines: prefill TP 1 and TP 2, decode TP 2 and TP 1, blocks of 16 and 32 tokens, "
        "both layouts",
        "",
    ]
    for title, name in (
        ("What befell the engines", "injections"),
        ("How requests ended at decode", "ends"),
        ("How requests ended at prefill", "prefills"),
    ):
        lines += [f"| {title} | number |", "|---|---|"]
        lines += [f"| {key} | {number:,} |" for key, number in _added(storms, name).items()]
        lines.append("")
    return "\n".join(lines)


def _added(storms: list[Summary], name: str) -> dict[str, int]:
    sums: dict[str, int] = {}
    for each in storms:
        for key, number in getattr(each, name).items():
            sums[key] = sums.get(key, 0) + number
    return dict(sorted(sums.items()))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else "")
    parser.add_argument("--planted", action="store_true", help="faults instead of storms")
    parser.add_argument("--requests", type=int, default=1000, help="of each wire")
    parser.add_argument("--wire", nargs="+", default=["shm"], help="shm, zmq, ucx, nixl, cuda_ipc")
    parser.add_argument("--seed", type=int, default=1, help="of the first storm")
    parser.add_argument("--every", type=int, default=40, help="requests for each injection")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, help="folder of the dated results")
    parser.add_argument(
        "--logs", type=Path, help="folder of the logs; a temporary one if not given"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
