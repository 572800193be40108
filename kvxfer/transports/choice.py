"""The choice of the wire to a source rank, by a trial with real bytes.

A direct wire of kvxfer's that works is taken: it costs the source neither staging nor copies nor
processor time. Where none works each stream wire is timed, and the wire is taken that moves a long
prompt in the least time. Wires of other packages come after kvxfer's own, direct ones too, and are
compared with these.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from operator import attrgetter

from kvxfer.errors import TransportUnavailable
from kvxfer.transfer.costs import (
    REFERENCE_TOKENS,
    Staging,
    StagingBounds,
    WireCosts,
    Workload,
    plan_staging,
    size_text,
)
from kvxfer.transfer.manifest import RankManifest
from kvxfer.transfer.plan import CopyClass
from kvxfer.transports.base import ReceivingSink, SinkTransport, Trial

TRIAL_TIMEOUT_S = 2.0
"""For each wire's trial."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The wire to one source rank.

    Its name; its trial, which the owner of the choice closes; how long a transfer of ``workload``
    takes by the trial; why each other wire was not taken; and, for a stream wire, the staging of
    its connection.
    """

    transport: str
    trial: Trial
    workload: Workload
    duration_s: float
    staging: Staging | None = None
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def costs(self) -> WireCosts:
        return self.trial.costs

    def chunk_nbytes(self, nbytes: int) -> int:
        """The chunk size in the Pull of a transfer of so many bytes; 0 on a direct wire."""
        staging = self.staging
        return staging.chunk_nbytes(self.trial.costs, nbytes) if staging is not None else 0

    @property
    def least_growing_nbytes(self) -> int:
        """Of a chunk of an offer that grows; smaller ones cost more than they bring forward."""
        return self.trial.costs.worth_nbytes(self.staging.num_streams) if self.staging else 0

    def __str__(self) -> str:
        path = f" over {self.trial.path}" if self.trial.path else ""
        cut = ""
        if (staging := self.staging) is not None:
            chunk = size_text(self.chunk_nbytes(self.workload.nbytes))
            slots = f"{staging.num_slots} slots of {size_text(staging.slot_nbytes)}"
            cut = f" in chunks of {chunk}, {slots}"
        return (
            f"{self.transport}{path} at {self.costs.gb_per_s:.2f} GB/s, "
            f"{self.costs.latency_s * 1e6:.0f} us: {REFERENCE_TOKENS} tokens "
            f"({size_text(self.workload.nbytes)}) in {ms_text(self.duration_s)} ms{cut}"
            + "".join(f"; not {name}: {reason}" for name, reason in self.reasons.items())
        )


def choose(
    candidates: Mapping[str, SinkTransport],
    source: RankManifest,
    workload: Workload,
    *,
    classes: Sequence[CopyClass] = (),
    min_gbps: float | None = None,
    timeout_s: float = TRIAL_TIMEOUT_S,
) -> Choice:
    """Try the candidates, in the order of preference. Where the first one that works (that moves
    bytes, at ``min_gbps`` or more) is a direct wire, it is taken, and no other is tried. Else the
    one with the shortest transfer of ``workload`` is taken, also among direct wires that come after
    a stream: those of other packages. ``classes``: what will be copied.

    Blocks for ``timeout_s`` at most, and for TRIAL_TIMEOUT_S for each candidate; but the last one
    has all that is left if none works until then: on a host with many times more work than cores a
    trial that takes 10 ms alone was seen to take 4 s. May be called from any thread. The caller
    closes the trial of the returned choice.

    Raises TransportUnavailable with every reason when no wire works; with one candidate, a wire
    asked for by name, with its own reason.
    """
    until_s = time.monotonic() + timeout_s
    working: list[Choice] = []
    reasons: dict[str, str] = {}
    for number, (name, transport) in enumerate(candidates.items(), 1):
        if working and working[0].staging is None:
            reasons[name] = f"not tried, because {working[0].transport} works"
            continue
        limit_s = max(until_s - time.monotonic(), 0.0)
        if working or number < len(candidates):
            limit_s = min(limit_s, TRIAL_TIMEOUT_S)
        try:
            trial = transport.trial(source, limit_s, classes)
            with ExitStack() as undo:
                undo.callback(trial.close)
                _check_speed(trial, min_gbps)
                bounds = None
                if isinstance(transport, ReceivingSink):
                    bounds = transport.staging_bounds(source)
                working.append(make_choice(name, bounds, trial, workload))
                undo.pop_all()
        except TransportUnavailable as exc:
            reasons[name] = str(exc).removeprefix(f"{name}: ")
    if not working:
        listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise TransportUnavailable(
            f"{source.control_endpoint}: expected a wire that works, got none: "
            f"{listed or 'no candidates'}"
        )
    best = min(working, key=attrgetter("duration_s"))  # equal times: the preferred wire
    for other in working:
        if other is not best:
            durations = f"{ms_text(other.duration_s)} ms instead of {ms_text(best.duration_s)}"
            reasons[other.transport] = f"{durations} for {REFERENCE_TOKENS} tokens"
            other.trial.close()
    return replace(best, reasons=reasons)


def _check_speed(trial: Trial, min_gbps: float | None) -> None:
    """Raises TransportUnavailable for a trial below ``min_gbps``."""
    gbps = trial.costs.gb_per_s
    if min_gbps is not None and gbps < min_gbps:
        raise TransportUnavailable(f"expected at least min_gbps {min_gbps} GB/s, got {gbps:.3f}")


def make_choice(
    name: str, bounds: StagingBounds | None, trial: Trial, workload: Workload
) -> Choice:
    """Raises TransportUnavailable where the settings leave no room for the staging."""
    costs = trial.costs
    if bounds is None:
        return Choice(name, trial, workload, costs.direct_s(workload.nbytes))
    try:
        staging = replace(plan_staging(costs, workload, bounds), way=trial.way)
    except ValueError as exc:
        raise TransportUnavailable(str(exc)) from exc
    chunk_nbytes = staging.chunk_nbytes(costs, workload.nbytes)
    duration_s = costs.stream_s(workload.nbytes, chunk_nbytes)
    return Choice(name, trial, workload, duration_s, staging)


def ms_text(duration_s: float) -> str:
    """Milliseconds as text: three digits below a second, else whole."""
    return f"{duration_s * 1e3:.3g}" if duration_s < 1 else f"{duration_s * 1e3:.0f}"
