"""What benchmarks write: facts of the machine, tables in Markdown, records in JSON, plots."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import numpy as np
import torch

WIRE_PACKAGES = ("pyzmq", "ucxx-cu13", "libucx-cu13", "nixl")
CROWDED = 10  # lines; more have colours of their own and their names beside the plot
DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Table:
    """One section of a report."""

    title: str
    text: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a plot."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    style: str = "o-"


@dataclass(frozen=True, slots=True)
class Plot:
    """Both axes logarithmic."""

    title: str
    x_name: str
    y_name: str
    lines: tuple[Line, ...]


def facts_of(command: str, packages: Sequence[str] = ()) -> dict[str, str]:
    """Hardware, versions and command; ``packages``: other distributions worth naming."""
    num_cpus = len(os.sched_getaffinity(0))
    facts = {"command": command, "CPUs": f"{platform.machine()}, {num_cpus}"}
    if torch.cuda.is_available():
        facts["GPU"] = f"{torch.cuda.get_device_name()} x {torch.cuda.device_count()}"
    if DRIVER.exists():
        facts["driver"] = DRIVER.read_text().splitlines()[0]
    facts["Python"] = platform.python_version()
    facts["torch"] = f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})"
    for name in packages:
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            facts[name] = "not installed"
    return facts


def today() -> str:
    """As results are named."""
    return datetime.now(UTC).strftime("%Y-%m-%d")


def quantiles(values: Sequence[float]) -> tuple[float, float, float]:
    """p20, p50 and p80."""
    p20, p50, p80 = np.percentile(values, [20, 50, 80]).tolist()
    return p20, p50, p80


def write_report(
    out: Path,
    name: str,
    title: str,
    facts: Mapping[str, str],
    tables: Sequence[Table],
    record: Mapping[str, object],
    *,
    plot: Plot | None = None,
) -> None:
    """``name``.json, .md and .png in the folder ``out``; overwritten each time."""
    out.mkdir(parents=True, exist_ok=True)
    document = {"facts": dict(facts), **record}
    (out / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    lines = [
        f"# {title}",
        "",
        f"Command: `{facts['command']}`",
        "",
        "| what | version |",
        "|---|---|",
    ]
    lines += [f"| {what} | {fact} |" for what, fact in facts.items() if what != "command"]
    if plot is not None and draw(out / f"{name}.png", plot):
        lines += ["", f"![{plot.title}]({name}.png)"]
    for table in tables:
        if not table.rows:
            continue
        lines += ["", f"## {table.title}", "", *([table.text, ""] if table.text else [])]
        lines += ["| " + " | ".join(table.header) + " |", "|" + "---|" * len(table.header)]
        lines += ["| " + " | ".join(row) + " |" for row in table.rows]
    (out / f"{name}.md").write_text("\n".join(lines) + "\n")


def draw(path: Path, plot: Plot) -> bool:
    """False without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("expected matplotlib for the plot, found none; install it")
        return False
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    is_crowded = len(plot.lines) > CROWDED
    if is_crowded:
        colors = plt.get_cmap("tab20")
        axes.set_prop_cycle(color=[colors(number) for number in range(colors.N)])
    for line in plot.lines:
        axes.plot(line.x, line.y, line.style, label=line.name)
    axes.set(yscale="log", xlabel=plot.x_name, ylabel=plot.y_name, title=plot.title)
    axes.set_xscale("log", base=2)
    axes.grid(visible=True, which="both", alpha=0.3)
    if plot.lines:
        if is_crowded:
            axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0))
        else:
            axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
    return True
