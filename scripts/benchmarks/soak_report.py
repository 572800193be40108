"""The report of many small transfers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from scripts.benchmarks.results import Table, today, write_report
from scripts.benchmarks.soak import MOST_GROWTH_NBYTES, WARM_TRANSFERS, Held, Soaked


@dataclass(slots=True)
class SoakReport:
    """Written after each wire."""

    out: Path
    facts: dict[str, str]
    soaked: list[Soaked] = field(default_factory=list)
    lost: list[tuple[str, str]] = field(default_factory=list)
    date: str = field(default_factory=today)

    def add(self, soaked: Soaked) -> None:
        """One more wire."""
        for held in soaked.held:
            print(f"{soaked.wire:8} " + "  ".join(_row(soaked, held)[1:]), flush=True)
        self.soaked.append(soaked)
        self.write()

    def write(self) -> None:
        """All that there is."""
        text = (
            f"After {WARM_TRANSFERS} transfers of warm-up; memory is resident memory in KiB, the "
            "first look, then what each quarter has added to it, after a garbage collection and "
            f"malloc_trim each. Allowed in all: {MOST_GROWTH_NBYTES >> 10} KiB, and not one thread "
            "or descriptor more."
        )
        header = (
            *("wire", "process", "transfers", "bytes each", "ms each", "memory KiB"),
            *("1st", "2nd", "3rd", "4th quarter", "threads", "descriptors", "leaks"),
        )
        rows = tuple(_row(soaked, held) for soaked in self.soaked for held in soaked.held)
        write_report(
            self.out,
            f"soak_cpu_{self.date}",
            f"Many small transfers between two processes, {self.date}",
            self.facts,
            [
                Table("what is left", text, header, rows),
                Table("not measured", "", ("wire", "why"), tuple(self.lost)),
            ],
            {"soaked": [asdict(soaked) for soaked in self.soaked], "lost": dict(self.lost)},
        )


def _row(soaked: Soaked, held: Held) -> tuple[str, ...]:
    looks = [usage.rss_nbytes for usage in held.usages]
    added = [later - earlier for earlier, later in zip(looks, looks[1:], strict=False)]
    first, last = held.usages[0], held.usages[-1]
    return (
        *(soaked.wire, held.side, str(soaked.num_transfers), str(soaked.nbytes)),
        *(f"{soaked.duration_s / soaked.num_transfers * 1e3:.3f}", str(looks[0] >> 10)),
        *(f"{nbytes / 1024:+g}" for nbytes in added),
        f"{first.num_threads} -> {last.num_threads}",
        f"{first.num_descriptors} -> {last.num_descriptors}",
        "; ".join(held.leaks()) or "none",
    )
