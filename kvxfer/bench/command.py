"""The command ``kvxfer bench``: which benchmarks there are, and one or all of them in a row."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import time
from collections.abc import Sequence
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
BENCHMARKS = {
    "cache": "names of blocks, and the pool of blocks",
    "transfer": "each wire between two processes, host memory or GPUs",
    "connector": "a load from offer to accepted, two engines",
    "kernels": "the copying kernel, and the link (a GPU)",
    "streams": "zmq over several TCP streams, on many cores",
    "link": "each wire over a slow link that it makes (root)",
    "early": "prefill and decode asked at once, over a slow link (root)",
    "soak": "what many small transfers leave behind",
}
ONLY_NAMED = {"streams", "link", "early", "soak"}
"""They run only where somebody asks for them."""


def benchmark(name: str) -> Benchmark:
    """Imported here, because each needs torch and some need Triton."""
    found: Benchmark = import_module(f"kvxfer.bench.{name}").BENCHMARK
    return found


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
        listed = "\n".join(f"  {name:<14}{what}" for name, what in BENCHMARKS.items())
        without = ", ".join(name for name in BENCHMARKS if name in ONLY_NAMED)
        parser.usage = "kvxfer bench [NAME ...] [--quick] [--out DIR] [--note NOTE]"
        parser.description = f"Without a NAME: all that can run here, without {without}."
        parser.epilog = f"benchmarks:\n{listed}\n\nkvxfer bench NAME --help: the options of one."
        return parser
    chosen = benchmark(names[0])
    parser.description = reflowed(import_module(chosen.run.__module__).__doc__ or "")
    for option in chosen.options:
        told = dict(option.words)
        if "choices" in told:  # or argparse writes all of them into a line, twice
            told["metavar"] = option.flag[2:].upper()
            told["help"] = fill(f"{told['help']}: {', '.join(told['choices'])}", 55)
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


def main(arguments: Sequence[str]) -> int:
    """Exit status. Raises SystemExit for options that are wrong."""
    names = list(arguments[: next((i for i, a in enumerate(arguments) if a[:1] == "-"), None)])
    if unknown := sorted(set(names) - set(BENCHMARKS)):
        parser_of([]).error(
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
    wanted = names or [name for name in BENCHMARKS if name not in ONLY_NAMED]
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
    began_s, status = time.monotonic(), 0
    print(f"results: {out}")
    try:
        for number, (name, options) in enumerate(chosen.items(), start=1):
            print(f"== {name} ({number} of {len(chosen)})")
            session = Session(command, out, given.note)
            status = max(status, benchmark(name).run(session, options))
    except KeyboardInterrupt:
        print(f"stopped; what was measured until then is in {out}")
        return STOPPED
    print(f"done after {words_of(time.monotonic() - began_s)}; results: {out}")
    return status
