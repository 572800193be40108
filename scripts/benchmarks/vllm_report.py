"""The comparison on real engines as a report: tables of samples, equalities and goals."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from scripts.benchmarks.vllm_cases import POOLS, Equality, Sample

_NONE = ""
ACCEPTED_MS = {8192: 5.0, 32768: 16.0}
"""Goals of kvxfer: from the start of a load to the moment when all of it is accepted."""
FIRST_EXTRA_MS = 30.0
FIRST_TOKEN_EXTRA_MS = 6.0
"""What decode's first token may take beyond one step of its engine."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A number that must not be above a bound."""

    what: str
    got_ms: float
    bound_ms: float

    @property
    def is_met(self) -> bool:
        """As it says."""
        return self.got_ms <= self.bound_ms


def report(
    title: str,
    facts: dict[str, str],
    samples: Sequence[Sample],
    equalities: Sequence[Equality],
    problems: Sequence[str],
) -> str:
    """Everything as Markdown."""
    parts = [f"# {title}", _table(("what", "value"), facts.items())]
    if problems:
        parts += ["## What went wrong", "\n".join(f"- {problem}" for problem in problems)]
    if goals := goals_of(samples):
        rows = [
            (g.what, f"{g.got_ms:.1f}", f"{g.bound_ms:.1f}", "yes" if g.is_met else "NO")
            for g in goals
        ]
        parts += ["## Goals", _table(("kvxfer", "ms", "at most", "met"), rows)]
    if samples:
        parts += ["## Side by side", _EXPLAINED, _side_by_side(samples)]
        parts += ["## The first transfer of a pair", _firsts(samples)]
        parts += ["## What the connectors count themselves", _own(samples)]
    if equalities:
        parts += ["## Equal KV, equal tokens", _EQUAL_EXPLAINED, _equal(equalities)]
    return "\n\n".join(parts) + "\n"


_EXPLAINED = (
    "Milliseconds, medians. *load*: as decode's engine thread sees it, from the call that hands a "
    "load over to the call that reports it, of several requests the last one; *first token*: from "
    "submission to decode, likewise; *KV here*: the same prompt again, its KV in decode's prefix "
    "cache; *step*: between two tokens."
)
_EQUAL_EXPLAINED = (
    "*KV*: checksums over every element of K and V, in all layers, of prefill's blocks and of "
    "decode's. *decode*, *prefill*: how many of the tokens are those of that engine alone, the "
    "prompt's KV in its prefix cache; *cold*: of decode alone with nothing cached, where prefill "
    "computes more than one token in a step and rounding may turn a near tie."
)


def _median_ms(values: Iterable[float]) -> float:
    return 1e3 * statistics.median(values)


def _ms(samples: Sequence[Sample], value: Callable[[Sample], float | None]) -> str:
    found = [v for sample in samples if (v := value(sample)) is not None]
    return f"{_median_ms(found):.1f}" if found else _NONE


def _load_s(sample: Sample) -> float | None:
    return max(sample.loads_s, default=None)


def _first_token_s(sample: Sample) -> float:
    return max(sample.first_token_s)


def _step_s(sample: Sample) -> float:
    return sample.step_s


def _local_s(sample: Sample) -> float | None:
    return sample.local_s or None


def _cases(samples: Iterable[Sample]) -> list[tuple[str, int, int]]:
    """(pool, together, tokens) in the order of the table."""
    found = {(s.pool, s.together, s.tokens) for s in samples if not s.is_first}
    return sorted(found, key=lambda case: (POOLS.index(case[0]), case[1:]))


def _of(samples: Iterable[Sample], connector: str, case: tuple[str, int, int]) -> list[Sample]:
    return [
        s
        for s in samples
        if s.connector == connector and (s.pool, s.together, s.tokens) == case and not s.is_first
    ]


def _side_by_side(samples: Sequence[Sample]) -> str:
    header = (
        *("pool", "requests", "tokens", "load: NIXL", "load: kvxfer"),
        *("first token: NIXL", "first token: kvxfer", "KV here", "step: NIXL", "step: kvxfer"),
    )
    rows = []
    for case in _cases(samples):
        nixl, ours = (_of(samples, name, case) for name in ("nixl", "kvxfer"))
        pool, together, tokens = case
        rows.append(
            (
                *(pool, str(together), f"{tokens:,}", _ms(nixl, _load_s), _ms(ours, _load_s)),
                *(_ms(nixl, _first_token_s), _ms(ours, _first_token_s)),
                *(_ms([*nixl, *ours], _local_s), _ms(nixl, _step_s), _ms(ours, _step_s)),
            )
        )
    return _table(header, rows)


def _firsts(samples: Sequence[Sample]) -> str:
    rows = []
    for first in (sample for sample in samples if sample.is_first):
        later = _of(samples, first.connector, (first.pool, 1, first.tokens))
        rows.append(
            (
                *(first.connector, f"{first.tokens:,}", _ms([first], _load_s)),
                *(_ms(later, _load_s), _ms([first], _first_token_s), _ms(later, _first_token_s)),
            )
        )
    header = ("connector", "tokens", "load", "later ones", "first token", "later ones")
    return _table(header, rows)


def _own(samples: Sequence[Sample]) -> str:
    names = ("accepted_ms", "queue_ms", "read_ms", "verdict_ms", "pickup_ms")
    theirs = ("transfer_ms", "post_ms", "descriptors")
    rows = []
    for case in _cases(samples):
        pool, together, tokens = case
        nixl, ours = (_of(samples, name, case) for name in ("nixl", "kvxfer"))
        rows.append(
            (
                *(pool, str(together), f"{tokens:,}"),
                *(_own_median(nixl, name) for name in theirs),
                *(_own_median(ours, name) for name in names),
                _own_median(ours, "MB") or _own_median(nixl, "MB"),
            )
        )
    header = (
        *("pool", "requests", "tokens", "NIXL: transfer ms", "post ms", "descriptors"),
        *("kvxfer: accepted ms", "queue", "read", "verdict", "pickup", "MB"),
    )
    return _table(header, rows)


def _own_median(samples: Iterable[Sample], name: str) -> str:
    found = [sample.own[name] for sample in samples if name in sample.own]
    if not found:
        return _NONE
    value = statistics.median(found)
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def _equal(equalities: Sequence[Equality]) -> str:
    rows = [
        (
            *(e.connector, e.setups, f"{e.tokens:,}"),
            {True: "equal", False: "DIFFERS", None: "not compared"}[e.kv_equal],
            *(f"{n} of {e.new_tokens}" for n in (e.equal_to_decode, e.equal_to_prefill)),
            *(f"{e.equal_to_cold} of {e.new_tokens}", str(e.distinct)),
        )
        for e in equalities
    ]
    header = (
        *("connector", "blocks", "tokens", "KV", "decode", "prefill", "cold", "distinct tokens"),
    )
    return _table(header, rows)


def goals_of(samples: Sequence[Sample]) -> list[Goal]:
    """Those that these samples say something about."""
    goals = []
    ours = [s for s in samples if s.connector == "kvxfer"]
    for pool, together, tokens in _cases(ours):
        here = _of(ours, "kvxfer", (pool, together, tokens))
        if together != 1:
            continue
        accepted = [s.own["accepted_ms"] for s in here if "accepted_ms" in s.own]
        if tokens in ACCEPTED_MS and accepted:
            what = f"{tokens:,} tokens accepted, {pool} pool"
            goals.append(Goal(what, statistics.median(accepted), ACCEPTED_MS[tokens]))
        goals.append(
            Goal(
                f"{tokens:,} tokens, first token, {pool} pool",
                _median_ms(map(_first_token_s, here)),
                _median_ms(map(_step_s, here)) + FIRST_TOKEN_EXTRA_MS,
            )
        )
    for first in (s for s in ours if s.is_first and s.loads_s):
        later = [
            load for s in _of(ours, "kvxfer", (first.pool, 1, first.tokens)) if (load := _load_s(s))
        ]
        if later:
            bound_ms = _median_ms(later) + FIRST_EXTRA_MS
            goals.append(Goal("first load of the pair", 1e3 * max(first.loads_s), bound_ms))
    return goals


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
