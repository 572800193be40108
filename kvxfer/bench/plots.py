"""The picture of a report: a few lines with the limit, and where, when and how it was taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, TypeVar

from kvxfer.extras import install
from kvxfer.transfer.costs import size_text

MOST_LINES = 8
"""More cannot be told apart; the others are in the report's tables."""
FAR_APART = 4.0
"""The largest of y to the least: below that a logarithmic axis has one number or two on it."""

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
    """x in bytes, logarithmic, and y too where its values lie far apart; else from 0 on. Raises
    ValueError for more than MOST_LINES lines, and without a limit.
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


@dataclass(frozen=True, slots=True)
class Bar:
    """From one moment to another, seconds, with what is written on it where there is room."""

    begin_s: float
    end_s: float
    text: str = ""


@dataclass(frozen=True, slots=True)
class Timeline:
    """What happened when, from 0 on. ``rows``: a name and its bars, from the top; ``marks``: named
    moments; ``steps``: an amount that rises, below the rows; ``limit``: the moment to which all
    compares.
    """

    title: str
    rows: tuple[tuple[str, tuple[Bar, ...]], ...]
    marks: tuple[tuple[str, float], ...]
    steps: tuple[tuple[float, float], ...]
    steps_name: str
    limit: tuple[str, float]


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


def draw(path: Path, plot: Plot | Timeline, conditions: Sequence[str]) -> bool:
    """False without matplotlib. ``conditions``: lines below the title."""
    try:
        import matplotlib as mpl
    except ImportError:
        print(f"plot: expected matplotlib, found none; {install('bench')}")
        return False
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    if isinstance(plot, Plot):
        _draw_lines(axes, plot)
    else:
        _draw_timeline(axes, plot)
    if isinstance(plot, Timeline):
        figure.legend(fontsize=8, loc="outside lower center", ncols=4)
    else:
        figure.legend(fontsize=8, loc="outside right upper")
    figure.suptitle(plot.title, fontsize=12)
    axes.set_title("\n".join(conditions), fontsize=8, color="dimgray", wrap=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def _draw_timeline(axes: Any, plot: Timeline) -> None:  # noqa: ANN401  # matplotlib's
    ends_s = [bar.end_s for _, bars in plot.rows for bar in bars]
    whole_s = max(*ends_s, plot.limit[1])
    for at, (_, bars) in enumerate(plot.rows):
        spans = [(1e3 * bar.begin_s, 1e3 * (bar.end_s - bar.begin_s)) for bar in bars]
        colours = [f"C{2 * at}", f"C{2 * at + 1}"]
        axes.broken_barh(spans, (-at - 0.3, 0.6), facecolors=colours, edgecolor="white")
        for bar in bars:
            if bar.end_s - bar.begin_s > 0.015 * len(bar.text) * whole_s:
                middle_ms = 500 * (bar.begin_s + bar.end_s)
                axes.text(middle_ms, -at, bar.text, ha="center", va="center", fontsize=7)
    least = -len(plot.rows) - 0.4
    if plot.steps:
        most = max(count for _, count in plot.steps)
        points = [(0.0, 0), *plot.steps]
        heights = [least + 0.8 * count / most for _, count in points]
        label = f"{plot.steps_name} (to {most:.0f})"
        axes.plot([1e3 * s for s, _ in points], heights, "k-", label=label)
    for number, (name, moment_s) in enumerate(plot.marks):
        axes.axvline(
            1e3 * moment_s, color=f"C{number + 2}", label=f"{name}, {1e3 * moment_s:.0f} ms"
        )
    name, limit_s = plot.limit
    axes.axvline(1e3 * limit_s, color="k", linestyle="--", label=f"{name}, {1e3 * limit_s:.0f} ms")
    axes.set(xlabel="ms since the request was sent", ylim=(least - 0.1, 0.5))
    axes.set_yticks([-at for at in range(len(plot.rows))], [name for name, _ in plot.rows])


def _draw_lines(axes: Any, plot: Plot) -> None:  # noqa: ANN401  # matplotlib's
    from matplotlib.ticker import LogFormatter

    limits = cycle(("kx--", "k+:"))
    for each in plot.lines:
        style = next(limits) if each.is_limit else "o-"
        name = f"{each.name} (limit)" if each.is_limit else each.name
        axes.plot(each.x, each.y, style, markersize=4, label=name)
    axes.set(xlabel=plot.x_name, ylabel=plot.y_name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda nbytes, _: size_text(nbytes))
    heights = [y for each in plot.lines for y in each.y]
    if max(heights) > FAR_APART * min(heights):
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))
    else:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(visible=True, which="both", alpha=0.3)
