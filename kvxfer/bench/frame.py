"""What all benchmarks have in common: how one says which options it has, and what it is given."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvxfer.bench.core import Report, Table, facts_of
from kvxfer.bench.plots import Plot, Timeline
from kvxfer.bench.pools import SHAPES, TINY, request_of


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a benchmark. ``usual``: its value where none is given; ``quick``: with --quick.
    ``words``: what argparse is told of it."""

    flag: str
    usual: Any
    quick: Any
    words: dict[str, Any]


def option(flag: str, usual: Any = None, quick: Any = None, **words: Any) -> Option:  # noqa: ANN401
    """``quick`` is as usual where it is not said."""
    return Option(flag, usual, usual if quick is None else quick, words)


def _layouts(text: str) -> str:
    """Of two sides. Raises ArgumentTypeError."""
    try:
        request_of(TINY, text, 1, 1)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{exc}; write HND16->NHD64, say") from exc
    return text


def count(text: str) -> int:
    """Raises ArgumentTypeError."""
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text}")
    return int(text)


def positive(text: str) -> float:
    """Raises ArgumentTypeError."""
    with suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")


CASES = (
    option("--shapes", nargs="+", choices=tuple(SHAPES), help="of the model"),
    option("--layouts", type=_layouts, nargs="+", metavar="HND16->NHD64", help="of both sides"),
    option("--tokens", type=count, nargs="+", help="of a request"),
    option("--rounds", type=count, help="that each contender runs"),
)


def cases(**usual_and_quick: tuple[Any, Any]) -> tuple[Option, ...]:
    """The options of cases, with (usual, quick) of each that is named."""
    return tuple(
        option(each.flag, *usual_and_quick.get(each.flag[2:], (None, None)), **each.words)
        for each in CASES
    )


class Progress:
    """How far a run is, on one clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._total = self._done = 0
        self._began_s = clock()

    def plan(self, num_cases: int) -> None:
        self._total, self._done, self._began_s = num_cases, 0, self._clock()

    def step(self) -> None:
        self._done += 1
        left_s = (self._clock() - self._began_s) / self._done * (self._total - self._done)
        if left_s > 0:
            print(f"  -- case {self._done} of {self._total}, about {words_of(left_s)} left")


def words_of(duration_s: float) -> str:
    if duration_s < 90:
        return f"{max(1, round(duration_s))} s"
    return f"{round(duration_s / 60)} min"


@dataclass(frozen=True, slots=True)
class Session:
    """One run of one benchmark: where its results go, and what they say of it."""

    command: str
    out: Path
    note: str = ""
    progress: Progress = field(default_factory=Progress)

    def report(
        self,
        name: str,
        title: str,
        tables: Callable[[Report], list[Table]],
        plot: Callable[[Report], Plot | Timeline | None] | None = None,
        packages: tuple[str, ...] = (),
        **facts: str,
    ) -> Report:
        """``facts``: more than the command, the machine and the ``packages``."""
        known = facts_of(self.command, packages, self.note) | facts
        return Report(self.out, name, title, known, tables, plot or (lambda report: None))


@dataclass(frozen=True, slots=True)
class Benchmark:
    """``run`` returns the exit status: 1 where somebody did something wrong. ``missing``: why this
    machine cannot run it with these options, or nothing."""

    options: tuple[Option, ...]
    run: Callable[[Session, argparse.Namespace], int]
    missing: Callable[[argparse.Namespace], str] = lambda options: ""
