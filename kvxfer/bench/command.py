"""The command ``kvxfer bench``: which benchmarks there are, and one or all of them in a row."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvxfer.bench.frame import Benchmark

WRONG, STOPPED = 2, 130
"""Exit status: cannot run as it was asked to; Ctrl-C. 1 is a benchmark's own: wrong bytes, a leak.
"""
FOLDER = Path("kvxfer-bench")


@dataclass(frozen=True, slots=True)
class Named:
    """``usual_s``, ``quick_s``: about how long it takes, on 2 cores or 2 GPUs."""

    what: str
    usual_s: float
    quick_s: float
    is_asked_for: bool = False  # it runs only where it is named

    def expected_s(self, *, is_quick: bool) -> float:
        return self.quick_s if is_quick else self.usual_s


BENCHMARKS = {
    "cache": Named("names of blocks, and the pool of blocks", 30, 5),
    "strided-copy": Named("copies between two pools in host memory", 10, 2),
    "transfer": Named("each wire between two processes, in host memory", 300, 25),
    "streams": Named("zmq over several TCP streams, on many cores", 200, 40, True),
    "connector": Named("a load from offer to accepted, two engines", 40, 6),
    "gpu-transfer": Named("the wire between two GPUs beside others (a GPU)", 150, 60),
    "kernels": Named("the copying kernel, and the link (a GPU)", 200, 60),
    "postprocess": Named("rewriting and zeroing blocks (a GPU)", 60, 30),
    "link": Named("each wire over a slow link that it makes (root)", 150, 40, True),
    "early": Named("prefill and decode asked at once, over a slow link (root)", 150, 40, True),
    "soak": Named("what many small transfers leave behind", 300, 30, True),
}


def benchmark(name: str) -> Benchmark:
    """Imported here, because each needs torch and some need Triton."""
    found: Benchmark = import_module(f"kvxfer.bench.{name.replace('-', '_')}").BENCHMARK
    return found


def words_of_all() -> str:
    lines = [f"  {name:<14}{named.what}" for name, named in BENCHMARKS.items()]
    return "\n".join(["benchmarks:", *lines])


def reflowed(text: str, width: int = 79) -> str:
    """Paragraphs, and the indented lines of lists below the second word of each, in ``width``."""
    found = []
    for paragraph in text.strip().split("\n\n"):
        if not paragraph.startswith(" "):
            found.append(fill(paragraph, width))
            continue
        items = re.split(r"\n(?= {4}\S)", paragraph)
        below = [re.match(r" +\S.*?  +", item) for item in items]
        found.append(
            "\n".join(
                fill(re.sub(r"\n +", " ", item), width, subsequent_indent=" " * at.end())
                if at
                else item
                for item, at in zip(items, below, strict=True)
            )
        )
    return "\n\n".join(found)


def parser_of(names: Sequence[str]) -> argparse.ArgumentParser:
    """Common options, and with one name those of that benchmark."""
    prog = " ".join(("kvxfer bench", *(names if len(names) == 1 else ())))
    shown = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(prog, allow_abbrev=False, formatter_class=shown)
    parser.add_argument("--quick", action="store_true", help="fewer cases and rounds: for a look")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help=f"of the results (default {FOLDER}/DATE)"
    )
    parser.add_argument("--note", default="", help="of this machine, for the reports")
    if len(names) != 1:
        parser.usage = "kvxfer bench [NAME ...] [--quick] [--out DIR] [--note NOTE]"
        parser.description = "Without a NAME: all that this machine can run, without link and soak."
        parser.epilog = f"{words_of_all()}\n\nkvxfer bench NAME --help: the options of one."
        return parser
    chosen = benchmark(names[0])
    parser.description = reflowed(import_module(chosen.run.__module__).__doc__ or "")
    for option in chosen.options:
        told = dict(option.words)
        if "choices" in told:  # or argparse writes all of them into a line, twice
            told["metavar"] = option.flag[2:].upper()
            told["help"] = f"{told['help']}: {', '.join(told['choices'])}"
        parser.add_argument(option.flag, default=None, **told)
    return parser


def options_of(
    name: str, options: argparse.Namespace, given: argparse.Namespace | None = None
) -> argparse.Namespace:
    """Of a benchmark: what was given, and else what is usual or quick."""
    found = argparse.Namespace()
    for option in benchmark(name).options:
        key = option.flag.removeprefix("--").replace("-", "_")
        value = getattr(given, key, None)
        usual = option.quick if options.quick else option.usual
        setattr(found, key, usual if value is None else value)
    return found


def left_s(spent_s: float, over_s: float, coming_s: float) -> float:
    """What is left of ``coming_s`` expected seconds, when ``over_s`` of them took ``spent_s``."""
    return coming_s * (spent_s / over_s if over_s else 1.0)


def main(arguments: Sequence[str]) -> int:
    """Exit status. Raises SystemExit for options that are wrong."""
    names = list(arguments[: next((i for i, a in enumerate(arguments) if a[:1] == "-"), None)])
    parser = parser_of([])
    if unknown := sorted(set(names) - set(BENCHMARKS)):
        parser.error(
            f"NAME: expected {', '.join(BENCHMARKS)}, got {', '.join(unknown)}; "
            "names come before options"
        )
    given = parser_of(names).parse_args(arguments[len(names) :])
    chosen, left_out = _choose(names, given)
    for name, why in left_out.items():
        print(f"{name}: left out: {why}", file=sys.stderr if names else sys.stdout)
    if not chosen or (names and left_out):
        return WRONG
    return _run(chosen, given, shlex.join(("kvxfer", "bench", *arguments)))


def _choose(
    names: Sequence[str], given: argparse.Namespace
) -> tuple[dict[str, argparse.Namespace], dict[str, str]]:
    """Those that can run, with their options, and why others cannot."""
    wanted = names or [name for name, named in BENCHMARKS.items() if not named.is_asked_for]
    chosen, left_out = {}, {}
    for name in wanted:
        try:
            options = options_of(name, given, given if len(names) == 1 else None)
            why = benchmark(name).missing(options)
        except ModuleNotFoundError as exc:
            why = f"expected the package {exc.name}, found none"
        if why:
            left_out[name] = why
        else:
            chosen[name] = options
    return chosen, left_out


def _run(chosen: dict[str, argparse.Namespace], given: argparse.Namespace, command: str) -> int:
    from kvxfer.bench.core import today
    from kvxfer.bench.frame import Session, words_of

    out = given.out or FOLDER / today()
    expected = {name: BENCHMARKS[name].expected_s(is_quick=given.quick) for name in chosen}
    began_s, over_s, status = time.monotonic(), 0.0, 0
    print(f"results: {out}")
    try:
        for number, (name, options) in enumerate(chosen.items(), start=1):
            coming_s = sum(expected.values()) - over_s
            left = words_of(left_s(time.monotonic() - began_s, over_s, coming_s))
            print(f"== {name} ({number} of {len(chosen)}), about {left} left for all")
            session = Session(command, out, given.note)
            status = max(status, benchmark(name).run(session, options))
            over_s += expected[name]
    except KeyboardInterrupt:
        print(f"stopped; what was measured until then is in {out}")
        return STOPPED
    print(f"done after {words_of(time.monotonic() - began_s)}; results: {out}")
    return status
