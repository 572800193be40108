"""The picture of a report: a few lines with the limit, and where, when and how it was taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TypeVar

from kvxfer.transfer.costs import size_text

MOST_LINES = 8
"""More cannot be told apart; the others are in the report's tables."""

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Line:
    """One line; ``is_limit``: what the hardware can do, to which the others compare."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    is_limit: bool = False


@dataclass(frozen=True, slots=True)
class Plot:
    """Both axes logarithmic, x in bytes. Raises ValueError for more than MOST_LINES lines, and
    without a limit.
    """

    title: str
    x_name: str
    y_name: str
    lines: tuple[Line, ...]

    def __post_init__(self) -> None:
        if len(self.lines) > MOST_LINES or not any(line.is_limit for line in self.lines):
            names = ", ".join(line.name for line in self.lines)
            raise ValueError(
                f"plot: expected at most {MOST_LINES} lines, a limit among them, got {names}"
            )


def line(
    name: str,
    records: Sequence[R],
    xy: Callable[[R], tuple[float, float]],
    *,
    is_limit: bool = False,
) -> Line:
    points = [xy(record) for record in records]
    return Line(name, tuple(x for x, _ in points), tuple(y for _, y in points), is_limit)


def plot_of(title: str, x_name: str, y_name: str, lines: Iterable[Line]) -> Plot | None:
    """Limits first, then the others in their order, as many as there is room for; None without
    points or without a limit.
    """
    drawn = sorted((each for each in lines if each.x), key=lambda each: not each.is_limit)
    if not drawn or not drawn[0].is_limit:
        return None
    return Plot(title, x_name, y_name, tuple(drawn[:MOST_LINES]))


def draw(path: Path, plot: Plot, conditions: Sequence[str]) -> bool:
    """False without matplotlib. ``conditions``: lines below the title."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("plot: expected matplotlib, found none; install kvxfer[bench]")
        return False
    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogFormatter

    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    limits = cycle(("kx--", "k+:"))
    for each in plot.lines:
        style = next(limits) if each.is_limit else "o-"
        name = f"{each.name} (limit)" if each.is_limit else each.name
        axes.plot(each.x, each.y, style, markersize=4, label=name)
    axes.set(yscale="log", xlabel=plot.x_name, ylabel=plot.y_name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda nbytes, _: size_text(nbytes))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))
    axes.grid(visible=True, which="both", alpha=0.3)
    figure.legend(fontsize=8, loc="outside right upper")
    figure.suptitle(plot.title, fontsize=12)
    axes.set_title("\n".join(conditions), fontsize=8, color="dimgray", wrap=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True
