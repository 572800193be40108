"""What scripts/vllm_load found: requests as records, their statistics, tables and the plot."""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from kvxfer.bench.core import (
    Columns,
    Report,
    Table,
    Tail,
    number_text,
    table,
    tail_columns,
    tail_of,
)
from kvxfer.bench.plots import Plot, line, plot_of
from scripts.benchmarks.load_plan import Job

FLOOR = "floor"
_OBJECTIVES = ("ttft", "tpot", "gap", "handover")


@dataclass(frozen=True, slots=True)
class Answer:
    """What one engine says of one request. Times are of the hosts' shared clock, one per token.

    Attributes:
        prefilled_s: when prefill had answered; None: another engine's part, or no prefill.
        asked_s: when the engine was asked.
        cached_tokens: of the prompt, that the engine did not compute.
        runs: how many blocks the KV lies in, and how many runs of rising ids these make.
        likely: of each token, where it was asked for, the likeliest ones' log probabilities.
    """

    index: int
    prefilled_s: float | None = None
    asked_s: float = 0.0
    token_s: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()
    cached_tokens: int = 0
    error: str = ""
    runs: tuple[int, int] | None = None
    likely: tuple[Mapping[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One request of one contender. Times are seconds from its scheduled arrival: a client that
    comes late makes no engine look faster.
    """

    load: str
    round_number: int
    contender: str
    index: int
    arrival_s: float
    prompt_tokens: int
    prefilled_s: float | None
    token_s: tuple[float, ...]
    tokens: tuple[int, ...]
    cached_tokens: int
    error: str
    runs: tuple[int, int] | None = None
    likely: tuple[Mapping[int, float], ...] = ()

    @property
    def key(self) -> tuple[str, int, int]:
        """The same for every contender."""
        return self.load, self.round_number, self.index

    @property
    def ttft_ms(self) -> float:
        return 1e3 * self.token_s[0]

    @property
    def handover_ms(self) -> float:
        """From prefill's answer to decode's first token; nan: one engine did both."""
        return math.nan if self.prefilled_s is None else 1e3 * (self.token_s[0] - self.prefilled_s)

    @property
    def gaps_ms(self) -> list[float]:
        """Between its tokens, at the client."""
        found: list[float] = (1e3 * np.diff(self.token_s)).tolist()
        return found

    @property
    def tpot_ms(self) -> float:
        """Mean time between tokens; 0 of a single one."""
        return 1e3 * (self.token_s[-1] - self.token_s[0]) / max(1, len(self.token_s) - 1)

    def record(self) -> dict[str, Any]:
        """For the JSON, the gaps as one text: a line for each of them would be most of the file."""
        known = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in {"token_s", "tokens", "prefilled_s", "likely"}
        }
        if self.error:
            return known
        return known | {
            "ttft_ms": round(self.ttft_ms, 3),
            "handover_ms": None if self.prefilled_s is None else round(self.handover_ms, 3),
            "gaps_ms": " ".join(f"{gap:.2f}" for gap in self.gaps_ms),
            "tokens": " ".join(map(str, self.tokens)),
        }


def merged(
    contender: str,
    load: str,
    round_number: int,
    jobs: Sequence[Job],
    begins_s: float,
    answers: Sequence[Answer],
) -> list[Served]:
    """What two engines say of each request of a segment."""
    found = []
    for job in jobs:
        of_job = [answer for answer in answers if answer.index == job.index]
        tokens = next((each for each in of_job if each.token_s), Answer(job.index))
        prefill = next((a for a in of_job if a.prefilled_s is not None), Answer(job.index))
        errors = [each.error for each in of_job if each.error]
        if not errors and len(tokens.tokens) < job.output_tokens:
            errors = ["it did not end in time"]
        arrived_s = begins_s + job.arrival_s
        found.append(
            Served(
                load=load,
                round_number=round_number,
                contender=contender,
                index=job.index,
                arrival_s=job.arrival_s,
                prompt_tokens=job.prompt_tokens,
                prefilled_s=prefill.prefilled_s and prefill.prefilled_s - arrived_s,
                token_s=tuple(each - arrived_s for each in tokens.token_s),
                tokens=tokens.tokens,
                cached_tokens=tokens.cached_tokens,
                error="; ".join(errors),
                runs=prefill.runs,
                likely=tokens.likely,
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class Objective:
    """What a request must meet to count as good, in ms; none of it said: all that ended well."""

    ttft: float = math.inf
    tpot: float = math.inf
    gap: float = math.inf
    handover: float = math.inf

    @classmethod
    def parse(cls, text: str) -> Objective:
        """``ttft=500,tpot=20,gap=50,handover=40``. Raises ArgumentTypeError."""
        try:
            given = {name: float(ms) for name, _, ms in (p.partition("=") for p in text.split(","))}
            return cls(**given)
        except (TypeError, ValueError) as exc:
            raise argparse.ArgumentTypeError(
                f"{text}: expected milliseconds of {', '.join(_OBJECTIVES)}, as in ttft=500,tpot=20"
            ) from exc

    def is_met(self, served: Served) -> bool:
        return (
            not served.error
            and served.ttft_ms <= self.ttft
            and served.tpot_ms <= self.tpot
            and max(served.gaps_ms, default=0.0) <= self.gap
            and not served.handover_ms > self.handover
        )

    def __str__(self) -> str:
        known = {name: getattr(self, name) for name in _OBJECTIVES}
        return ", ".join(f"{n} {ms:g} ms" for n, ms in known.items() if ms < math.inf) or "it ends"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One contender under one load. Milliseconds; rates: from a round's first arrival to its last
    token.

    Attributes:
        recomputed: requests whose decode computed more than the last token of the prompt.
        good: requests a second that met the objective; good_share: of all that arrived.
        equal, equal_first: shares whose tokens, or first token, are those of the reference; nan
            where there is none.
        run_blocks: mean length of a run of rising block ids; nan where the connector tells no ids.
    """

    load: str
    contender: str
    requests: int
    failed: int
    recomputed: int
    ttft_ms: Tail
    handover_ms: Tail
    beyond_floor_ms: float
    gap_ms: Tail
    tokens_per_s: float
    requests_per_s: float
    good_per_s: float
    good_share: float
    equal: float
    equal_first: float
    run_blocks: float


def cells_of(
    served: Sequence[Served], objective: Objective, recomputes: Mapping[str, bool]
) -> list[Cell]:
    """By load, contenders in the order in which they came. ``recomputes``: by contender, whether
    decode computes prompts (two plain engines). The floor's tokens are the reference.
    """
    by_cell: dict[tuple[str, str], list[Served]] = defaultdict(list)
    for each in served:
        by_cell[each.load, each.contender].append(each)
    loads = list(dict.fromkeys(load for load, _ in by_cell))
    contenders = list(dict.fromkeys(each.contender for each in served))
    reference = {each.key: each.tokens for each in served if each.contender == FLOOR}
    floors_ms = {
        load: tail_of(e.handover_ms for e in by_cell.get((load, FLOOR), ()) if not e.error)[0]
        for load in loads
    }
    return [
        _cell(found, objective, reference, floors_ms[load], recomputes.get(contender, False))
        for load in loads
        for contender in contenders
        if (found := by_cell.get((load, contender)))
    ]


def _cell(
    served: Sequence[Served],
    objective: Objective,
    reference: Mapping[tuple[str, int, int], tuple[int, ...]],
    floor_ms: float,
    recomputes: bool,
) -> Cell:
    ended = [each for each in served if not each.error]
    taken_s = sum(_duration_s(part) for part in _by_round(served))
    compared = [(each.tokens, reference[each.key]) for each in ended if each.key in reference]
    good = sum(objective.is_met(each) for each in served)
    handover_ms = tail_of(each.handover_ms for each in ended)
    blocks, runs = np.array([each.runs or (0, 0) for each in served]).sum(axis=0).tolist()
    return Cell(
        load=served[0].load,
        contender=served[0].contender,
        requests=len(served),
        failed=len(served) - len(ended),
        recomputed=0
        if recomputes
        else sum(each.cached_tokens < each.prompt_tokens - 1 for each in ended),
        ttft_ms=tail_of(each.ttft_ms for each in ended),
        handover_ms=handover_ms,
        beyond_floor_ms=handover_ms[0] - floor_ms,
        gap_ms=tail_of(gap for each in ended for gap in each.gaps_ms),
        tokens_per_s=_ratio(sum(len(each.tokens) for each in ended), taken_s),
        requests_per_s=_ratio(len(ended), taken_s),
        good_per_s=_ratio(good, taken_s),
        good_share=good / len(served),
        equal=_ratio(sum(ours == theirs for ours, theirs in compared), len(compared)),
        equal_first=_ratio(sum(o[:1] == t[:1] for o, t in compared), len(compared)),
        run_blocks=_ratio(blocks, runs),
    )


def _by_round(served: Sequence[Served]) -> Iterable[list[Served]]:
    found: dict[int, list[Served]] = defaultdict(list)
    for each in served:
        found[each.round_number].append(each)
    return found.values()


def _duration_s(served: Sequence[Served]) -> float:
    ends_s = [each.arrival_s + each.token_s[-1] for each in served if each.token_s]
    return max(ends_s, default=0.0) - min(each.arrival_s for each in served)


def _ratio(one: float, other: float) -> float:
    return one / other if other > 0 else math.nan


AIM = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """Of requests whose decode hears of them together with prefill; medians, in milliseconds.
    ``prefill_ms``: of the floor. ``transfer_ms``: of a hand-over in turn, less the floor's.
    """

    load: str
    contender: str
    prefill_ms: float
    transfer_ms: float
    in_turn_ms: float
    together_ms: float
    num_chunks: int

    @property
    def bound_ms(self) -> float:
        longer_ms = max(self.prefill_ms, self.transfer_ms)
        return AIM * longer_ms + self.transfer_ms / self.num_chunks

    @property
    def is_met(self) -> bool:
        return self.together_ms <= self.bound_ms

    def __str__(self) -> str:
        said = f"{self.contender}: first token after {self.together_ms:.0f} ms"
        return f"{said}, aim {self.bound_ms:.0f}, in turn {self.in_turn_ms:.0f}"


def aims_of(served: Sequence[Served], pairs: Mapping[str, str], chunk_tokens: int) -> list[Aim]:
    """``pairs``: of contenders that ask both engines at once, the one that is the same in turn;
    both and the floor were measured. ``chunk_tokens``: of a step of prefill.
    """
    by_cell: dict[tuple[str, str], list[Served]] = defaultdict(list)
    for each in served:
        if not each.error:
            by_cell[each.load, each.contender].append(each)
    return [
        Aim(
            load=load,
            contender=early,
            prefill_ms=tail_of(1e3 * (e.prefilled_s or math.nan) for e in floor)[0],
            transfer_ms=tail_of(e.handover_ms for e in turns)[0]
            - tail_of(e.handover_ms for e in floor)[0],
            in_turn_ms=tail_of(e.ttft_ms for e in turns)[0],
            together_ms=tail_of(e.ttft_ms for e in both)[0],
            num_chunks=max(-(-e.prompt_tokens // chunk_tokens) for e in both),
        )
        for load in dict.fromkeys(load for load, _ in by_cell)
        for early, turn in pairs.items()
        if (both := by_cell.get((load, early)))
        and (turns := by_cell.get((load, turn)))
        and (floor := by_cell.get((load, FLOOR)))
    ]


# ------------------------------------------------------------------ tables


@dataclass(frozen=True, slots=True)
class Check:
    """One prompt through a contender, alone and before anything is timed. ``less_likely``: see
    :func:`less_likely`.
    """

    contender: str
    prompt_tokens: int
    new_tokens: int
    equal_tokens: int
    distinct_tokens: int
    less_likely: float
    error: str = ""


def leading(tokens: Sequence[int], others: Sequence[int]) -> int:
    """How many are equal before the first that is not."""
    pairs = zip(tokens, others, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(others)))


NEAR = {"float32": 0.05, "bfloat16": 0.3}
"""Of two log probabilities: where tokens are so much apart at most, rounding may choose. Those of
other prompts' tokens lie 3 and more lower.
"""


def less_likely(
    tokens: Sequence[int], own: Sequence[int], likely: Sequence[Mapping[int, float]]
) -> float:
    """How much less likely the first token that is not the reference's own is to the reference, as
    a difference of log probabilities; 0: all are equal, inf: it is not among its likeliest. Engines
    that round otherwise part where two tokens are nearly as likely; wrong KV has no reason to.
    ``likely``: of each of the reference's tokens.
    """
    at = leading(tokens, own)
    if at == min(len(tokens), len(own)):
        return 0.0
    return likely[at][own[at]] - likely[at].get(tokens[at], -math.inf)


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.0%}"


CELL: Columns[Cell] = {
    "contender": lambda cell: cell.contender,
    "requests": lambda cell: str(cell.requests),
    "failed": lambda cell: str(cell.failed),
    "recomputed": lambda cell: str(cell.recomputed),
    **tail_columns("TTFT", lambda cell: cell.ttft_ms),
    **tail_columns("hand-over", lambda cell: cell.handover_ms),
    "beyond floor p50": lambda cell: number_text(cell.beyond_floor_ms),
    **tail_columns("between tokens", lambda cell: cell.gap_ms),
    "tokens/s": lambda cell: number_text(cell.tokens_per_s),
    "requests/s": lambda cell: number_text(cell.requests_per_s, 2),
    "good/s": lambda cell: number_text(cell.good_per_s, 2),
    "good": lambda cell: _share(cell.good_share),
    "equal tokens": lambda cell: _share(cell.equal),
    "equal first": lambda cell: _share(cell.equal_first),
    "blocks a run": lambda cell: number_text(cell.run_blocks),
}
CHECK_TEXT = (
    "*equal*: before the first that is not the reference's, which is the first contender's. *less "
    "likely*: that other token to the reference, as a difference of log probabilities. Rounding "
    "chooses between tokens that are nearly as likely; wrong KV has no reason to."
)
CHECK: Columns[Check] = {
    "contender": lambda check: check.contender,
    "prompt tokens": lambda check: f"{check.prompt_tokens:,}",
    "equal tokens": lambda check: f"{check.equal_tokens} of {check.new_tokens}",
    "distinct tokens": lambda check: str(check.distinct_tokens),
    "less likely": lambda check: f"{check.less_likely:.2f}" if check.less_likely else "",
    "note": lambda check: check.error,
}
AIMED: Columns[Aim] = {
    "load": lambda aim: aim.load,
    "contender": lambda aim: aim.contender,
    "chunks": lambda aim: str(aim.num_chunks),
    "prefill": lambda aim: number_text(aim.prefill_ms),
    "transfer": lambda aim: number_text(aim.transfer_ms),
    "TTFT in turn": lambda aim: number_text(aim.in_turn_ms),
    "together": lambda aim: number_text(aim.together_ms),
    "aim": lambda aim: number_text(aim.bound_ms),
    "met": lambda aim: "yes" if aim.is_met else "no",
}
AIM_TEXT = (
    "Medians, in milliseconds. *prefill*: the floor's. *transfer*: the hand-over in turn, less the "
    f"floor's. *aim*: of together, {AIM:g} of the longer of these two, and one chunk's transfer."
)
TEXT = (
    "Milliseconds. *TTFT*: from a request's scheduled arrival to decode's first token. "
    "*hand-over*: from prefill's answer to that token. *floor*: decode has the prompt's KV in its "
    "own prefix cache. *recomputed*: requests of whose prompt decode computed more than a token. "
    "*equal*: tokens are the floor's; under load steps have other shapes, and rounding may turn a "
    "near tie. *blocks a run*: of neighbouring ids, where the connector tells them."
)


def tables(report: Report) -> list[Table]:
    """The tokens that were checked, then a table of each load."""
    cells: list[Cell] = report.records.get("cells", [])
    loads = list(dict.fromkeys(cell.load for cell in cells))
    text = f"{TEXT} *good*: {report.facts.get('objective', '')}."
    aims: list[Aim] = report.records.get("aims", [])
    return [
        *([table("Both engines asked at once", AIM_TEXT, AIMED, aims)] if aims else []),
        table("Tokens before timing", CHECK_TEXT, CHECK, report.records.get("checks", [])),
        *(table(load, text, CELL, [c for c in cells if c.load == load]) for load in loads),
    ]


SHOWN = (
    *(("TTFT p50", "ttft"), ("TTFT p99", "p99"), ("hand-over p50", "hand")),
    *(("hand-over p99", "p99"), ("hand-over max", "max"), ("beyond floor p50", "+flr")),
    *(("between tokens p50", "gap"), ("between tokens p99", "p99"), ("between tokens max", "max")),
    ("good", "good"),
)
"""Columns of the summary, and what they are called there."""


def summary(cells: Sequence[Cell]) -> list[str]:
    """A line of 80 columns for each contender under each load; what went wrong below it."""
    lines = [f"{'ms':<18}" + "".join(f"{short:>6}" for _, short in SHOWN)]
    for load in dict.fromkeys(cell.load for cell in cells):
        found = [cell for cell in cells if cell.load == load]
        most = max(cell.requests for cell in found)
        lines.append(f"{load} (n={most})")
        for cell in found:
            values = (CELL[name](cell) for name, _ in SHOWN)
            lines.append(
                f"  {cell.contender[:16]:<16}" + "".join(f"{_short(v):>6}" for v in values)
            )
            wrong = {"fewer": most - cell.requests, "failed": cell.failed}
            wrong |= {"recomputed": cell.recomputed}
            if said := ", ".join(f"{n} {what}" for what, n in wrong.items() if n):
                lines.append(f"    {said}")
    return lines if cells else []


def _short(text: str) -> str:
    """In five columns."""
    return text if len(text) <= 5 else text.partition(".")[0]


def plot_for(kv_nbytes: int) -> Callable[[Report], Plot | None]:
    """Hand-over by the size of the prompt's KV, all loads together; the floor is the limit."""

    def plot(report: Report) -> Plot | None:
        rows = [row for row in report.records.get("requests", []) if row.get("handover_ms")]
        lines = []
        for name in dict.fromkeys(row["contender"] for row in rows):
            sizes: dict[int, list[float]] = defaultdict(list)
            for row in rows:
                if row["contender"] == name:  # two points an octave
                    size = round(2 * math.log2(row["prompt_tokens"] * kv_nbytes))
                    sizes[size].append(row["handover_ms"])
            points = [(2 ** (size / 2), tail_of(sizes[size])[0]) for size in sorted(sizes)]
            lines.append(line(name, points, lambda point: point, is_limit=name == FLOOR))
        return plot_of(
            "From prefill's answer to decode's first token", "KV of the prompt",
            "hand-over, median ms", lines,
        )  # fmt: skip

    return plot
