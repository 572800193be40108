"""The comparison on real engines as tables: samples, equalities and goals."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvxfer.bench.core import Columns, Report, Table, table
from scripts.benchmarks.vllm_cases import POOLS, Equality, Sample

ACCEPTED_MS = {8192: 5.0, 32768: 16.0}
"""Goals of kvxfer: from the start of a load to the moment when all of it is accepted."""
FIRST_EXTRA_MS = 30.0
FIRST_TOKEN_EXTRA_MS = 6.0
"""What decode's first token may take beyond one step of its engine."""
SIDE_BY_SIDE = (
    "Milliseconds, medians. *load*: as decode's engine thread sees it, from the call that hands a "
    "load over to the call that reports it, of several requests the last one; *first token*: from "
    "submission to decode, likewise; *KV here*: the same prompt again, its KV in decode's prefix "
    "cache; *step*: between two tokens."
)
EQUAL = (
    "*KV*: checksums over every element of K and V, in all layers, of prefill's blocks and of "
    "decode's. *decode*, *prefill*: how many of the tokens are those of that engine alone, the "
    "prompt's KV in its prefix cache; *cold*: of decode alone with nothing cached, where prefill "
    "computes more than one token in a step and rounding may turn a near tie."
)


@dataclass(frozen=True, slots=True)
class Goal:
    """A number that must not be above a bound."""

    what: str
    got_ms: float
    bound_ms: float

    @property
    def is_met(self) -> bool:
        return self.got_ms <= self.bound_ms


@dataclass(frozen=True, slots=True)
class Case:
    """The samples of both connectors, but for a pair's first transfer."""

    pool: str
    together: int
    tokens: int
    nixl: tuple[Sample, ...]
    ours: tuple[Sample, ...]


def cases_of(samples: Sequence[Sample]) -> list[Case]:
    """In the order of the tables."""
    found = {(s.pool, s.together, s.tokens) for s in samples if not s.is_first}
    ordered = sorted(found, key=lambda case: (POOLS.index(case[0]), case[1:]))
    return [
        Case(*case, _of(samples, "nixl", *case), _of(samples, "kvxfer", *case)) for case in ordered
    ]


def _of(
    samples: Iterable[Sample], connector: str, pool: str, together: int, tokens: int
) -> tuple[Sample, ...]:
    case = (connector, pool, together, tokens, False)
    return tuple(
        s for s in samples if (s.connector, s.pool, s.together, s.tokens, s.is_first) == case
    )


def _load_s(sample: Sample) -> float | None:
    return max(sample.loads_s, default=None)


def _first_token_s(sample: Sample) -> float:
    return max(sample.first_token_s)


def _step_s(sample: Sample) -> float:
    return sample.step_s


def _local_s(sample: Sample) -> float | None:
    return sample.local_s or None


def _median_ms(samples: Iterable[Sample], value: Callable[[Sample], float | None]) -> float | None:
    found = [v for sample in samples if (v := value(sample)) is not None]
    return 1e3 * statistics.median(found) if found else None


def _ms(samples: Iterable[Sample], value: Callable[[Sample], float | None]) -> str:
    median_ms = _median_ms(samples, value)
    return "" if median_ms is None else f"{median_ms:.1f}"


def _own(samples: Iterable[Sample], name: str) -> str:
    found = [sample.own[name] for sample in samples if name in sample.own]
    if not found:
        return ""
    value = statistics.median(found)
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


CASE: Columns[Case] = {
    "pool": lambda case: case.pool,
    "requests": lambda case: str(case.together),
    "tokens": lambda case: f"{case.tokens:,}",
}
TIMES: Columns[Case] = {
    **CASE,
    "load: NIXL": lambda case: _ms(case.nixl, _load_s),
    "load: kvxfer": lambda case: _ms(case.ours, _load_s),
    "first token: NIXL": lambda case: _ms(case.nixl, _first_token_s),
    "first token: kvxfer": lambda case: _ms(case.ours, _first_token_s),
    "KV here": lambda case: _ms([*case.nixl, *case.ours], _local_s),
    "step: NIXL": lambda case: _ms(case.nixl, _step_s),
    "step: kvxfer": lambda case: _ms(case.ours, _step_s),
}
OWN: Columns[Case] = {
    **CASE,
    "NIXL: transfer ms": lambda case: _own(case.nixl, "transfer_ms"),
    "post ms": lambda case: _own(case.nixl, "post_ms"),
    "descriptors": lambda case: _own(case.nixl, "descriptors"),
    "kvxfer: accepted ms": lambda case: _own(case.ours, "accepted_ms"),
    "queue": lambda case: _own(case.ours, "queue_ms"),
    "read": lambda case: _own(case.ours, "read_ms"),
    "verdict": lambda case: _own(case.ours, "verdict_ms"),
    "pickup": lambda case: _own(case.ours, "pickup_ms"),
    "MB": lambda case: _own(case.ours, "MB") or _own(case.nixl, "MB"),
}
FIRSTS: Columns[tuple[Sample, tuple[Sample, ...]]] = {
    "connector": lambda row: row[0].connector,
    "tokens": lambda row: f"{row[0].tokens:,}",
    "load": lambda row: _ms(row[:1], _load_s),
    "later ones": lambda row: _ms(row[1], _load_s),
    "first token": lambda row: _ms(row[:1], _first_token_s),
    "later ones ": lambda row: _ms(row[1], _first_token_s),
}
GOALS: Columns[Goal] = {
    "kvxfer": lambda goal: goal.what,
    "ms": lambda goal: f"{goal.got_ms:.1f}",
    "at most": lambda goal: f"{goal.bound_ms:.1f}",
    "met": lambda goal: "yes" if goal.is_met else "NO",
}
EQUALITIES: Columns[Equality] = {
    "connector": lambda e: e.connector,
    "blocks": lambda e: e.setups,
    "tokens": lambda e: f"{e.tokens:,}",
    "KV": lambda e: {True: "equal", False: "DIFFERS", None: "not compared"}[e.kv_equal],
    "decode": lambda e: f"{e.equal_to_decode} of {e.new_tokens}",
    "prefill": lambda e: f"{e.equal_to_prefill} of {e.new_tokens}",
    "cold": lambda e: f"{e.equal_to_cold} of {e.new_tokens}",
    "distinct tokens": lambda e: str(e.distinct),
}


def tables(report: Report) -> list[Table]:
    """Of what is known so far."""
    samples: list[Sample] = report.records.get("samples", [])
    cases = cases_of(samples)
    firsts = [
        (first, _of(samples, first.connector, first.pool, 1, first.tokens))
        for first in samples
        if first.is_first
    ]
    problems = tuple((problem,) for problem in report.records.get("problems", []))
    return [
        Table("What went wrong", "", ("problem",), problems),
        table("Goals", "", GOALS, goals_of(samples)),
        table("Side by side", SIDE_BY_SIDE, TIMES, cases),
        table("The first transfer of a pair", "", FIRSTS, firsts),
        table("What the connectors count themselves", "", OWN, cases),
        table("Equal KV, equal tokens", EQUAL, EQUALITIES, report.records.get("equalities", [])),
    ]


def goals_of(samples: Sequence[Sample]) -> list[Goal]:
    """Those that these samples say something about."""
    goals = []
    for case in cases_of(samples):
        accepted = [s.own["accepted_ms"] for s in case.ours if "accepted_ms" in s.own]
        first_ms, step_ms = (_median_ms(case.ours, value) for value in (_first_token_s, _step_s))
        if case.together != 1 or first_ms is None or step_ms is None:
            continue
        if case.tokens in ACCEPTED_MS and accepted:
            what = f"{case.tokens:,} tokens accepted, {case.pool} pool"
            goals.append(Goal(what, statistics.median(accepted), ACCEPTED_MS[case.tokens]))
        what = f"{case.tokens:,} tokens, first token, {case.pool} pool"
        goals.append(Goal(what, first_ms, step_ms + FIRST_TOKEN_EXTRA_MS))
    for first in (s for s in samples if s.connector == "kvxfer" and s.is_first and s.loads_s):
        later = _of(samples, "kvxfer", first.pool, 1, first.tokens)
        later_ms = _median_ms(later, _load_s)
        if later_ms is not None:
            bound_ms = later_ms + FIRST_EXTRA_MS
            goals.append(Goal("first load of the pair", 1e3 * max(first.loads_s), bound_ms))
    return goals
