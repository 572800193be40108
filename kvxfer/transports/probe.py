"""Choose the wire to a peer by what trials with real bytes cost, and say why the others were not
taken.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from kvxfer.errors import TransportUnavailable
from kvxfer.transfer.costs import (
    REFERENCE_TOKENS,
    Staging,
    WireCosts,
    Workload,
    plan_staging,
)
from kvxfer.transfer.manifest import RankManifest
from kvxfer.transports.base import SinkTransport, Trial

TRIAL_TIMEOUT_S = 2.0
LATE_TIMEOUT_S = 0.25
"""For a trial when a direct wire works already: ten times what one takes on a quiet machine."""
STREAM_MARGIN = 0.25
"""A stream wire is taken before a direct one that works if it is over in less than this part of
the time. A direct wire costs the source nothing, neither staging nor copies nor processor time,
which a trial does not see. And a trial on a busy GPU or host was seen wrong by more than two.
"""
COPIES_OF_A_STREAM = 2
"""The pack of its first chunk and the unpack of its last begin as late as copies of a direct wire
do, by its latency: on a GPU that many processes use, milliseconds. A stream's trial has none of
that, because what it moves lies in staging already; beside twelve other runs of tests on two GPUs
``zmq`` was taken for that in two of 30.
"""
CHEAP_STREAM_BYTES_PER_S = 20e9
"""No stream that costs little to try comes near it: one thread copies through the kernel, 3 GB/s on
a CPU and 6 between GPUs. Beside a direct wire that even this could not beat by the margin its trial
would only hold up the first load: by 27 ms on two busy cores, two thirds of it.
"""


@dataclass(frozen=True, slots=True)
class Choice:
    """The wire to one source rank.

    Its name, its trial, which who has the choice closes, how long a transfer of ``workload`` takes
    by that, why each other wire was not taken, and of a stream wire the staging of its connection.
    """

    transport: str
    trial: Trial
    workload: Workload
    duration_s: float
    staging: Staging | None = None
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def costs(self) -> WireCosts:
        """What the trial measured."""
        return self.trial.costs

    @property
    def is_stream(self) -> bool:
        """Whether the source packs and sends."""
        return self.staging is not None

    def chunk_nbytes(self, nbytes: int) -> int:
        """Of the Pull of a transfer of so many bytes; 0 on a direct wire."""
        return self.staging.chunk_nbytes(self.costs, nbytes) if self.staging is not None else 0

    def __str__(self) -> str:
        """For the one log line of a peer."""
        path = f" over {self.trial.path}" if self.trial.path else ""
        cut = ""
        if (staging := self.staging) is not None:
            chunk = _size(self.chunk_nbytes(self.workload.nbytes))
            cut = (
                f" in chunks of {chunk}, {staging.num_slots} slots of {_size(staging.slot_nbytes)}"
            )
        return (
            f"{self.transport}{path} at {self.costs.gb_per_s:.2f} GB/s, "
            f"{self.costs.latency_s * 1e6:.0f} us: {REFERENCE_TOKENS} tokens "
            f"({_size(self.workload.nbytes)}) in {_ms(self.duration_s)} ms{cut}"
            + "".join(f"; not {name}: {reason}" for name, reason in self.reasons.items())
        )


def probe(
    candidates: Mapping[str, SinkTransport],
    source: RankManifest,
    workload: Workload,
    *,
    min_gbps: float | None = None,
    timeout_s: float = TRIAL_TIMEOUT_S,
    last_timeout_s: float | None = None,
) -> Choice:
    """Try the candidates and take the one over which a transfer of ``workload`` is over first, of
    those that move bytes at ``min_gbps`` or more; a stream before a direct wire only where it takes
    less than ``STREAM_MARGIN`` of the time.

    Those that cost little to try are tried first, direct ones before streams, then, unless a direct
    wire works, the dear ones. Streams are not tried that could not be taken any more. Blocks for up
    to ``timeout_s`` for each candidate, less once a direct wire works, and for ``last_timeout_s``
    (if given) altogether; all that is left of it is for the last one, if none works until then: on
    a host with many times more work than cores a trial that takes 10 ms alone was seen to take 4 s.
    May be called from any thread. The trial of what is returned is to be closed.

    Raises TransportUnavailable with every reason when none is left: with one candidate, a wire
    asked for by name, that is its own reason.
    """
    until_s = None if last_timeout_s is None else time.monotonic() + last_timeout_s
    tried: list[Choice] = []
    working: dict[str, Choice] = {}
    reasons: dict[str, str] = {}
    direct: Choice | None = None
    taken: Choice | None = None
    # Stable: otherwise in their order, so that those in use longest are tried first
    in_order = sorted(candidates.items(), key=lambda item: (item[1].is_dear, item[1].is_stream))
    try:
        for position, (name, transport) in enumerate(in_order):
            if direct is not None and (reason := _why_not_try(transport, direct)):
                reasons[name] = f"not tried, because {reason}"
                continue
            limit_s = min(timeout_s, LATE_TIMEOUT_S) if direct is not None else timeout_s
            if until_s is not None:
                left_s = max(until_s - time.monotonic(), 0.0)
                is_last = position == len(in_order) - 1 and not working
                limit_s = left_s if is_last else min(limit_s, left_s)
            try:
                choice = _try(name, transport, source, workload, limit_s)
            except TransportUnavailable as exc:
                reasons[name] = str(exc).removeprefix(f"{name}: ")
                continue
            choice = _behind(choice, direct)
            tried.append(choice)
            gbps = choice.costs.gb_per_s
            if min_gbps is not None and gbps < min_gbps:
                reasons[name] = f"expected at least min_gbps {min_gbps} GB/s, got {gbps:.3f}"
                continue
            working[name] = choice
            direct = _soonest(working.values(), is_stream=False)
        taken = _best(working, reasons, source)
    finally:
        for choice in tried:
            if taken is None or choice.transport != taken.transport:
                choice.trial.close()
    return taken


def _why_not_try(transport: SinkTransport, direct: Choice) -> str:
    """Beside a direct wire that works; empty if it is worth trying."""
    if transport.is_dear:
        return "a direct wire works"
    least_s = direct.workload.nbytes / CHEAP_STREAM_BYTES_PER_S + _late_s(direct)
    if transport.is_stream and least_s > STREAM_MARGIN * direct.duration_s:
        return f"{direct.transport} takes {_ms(direct.duration_s)} ms for {REFERENCE_TOKENS} tokens"
    return ""


def _try(
    name: str, transport: SinkTransport, source: RankManifest, workload: Workload, limit_s: float
) -> Choice:
    """What a transfer would take. Raises TransportUnavailable."""
    trial = transport.trial(source, limit_s)
    costs, bounds = trial.costs, transport.staging_bounds(source)
    if bounds is None:
        duration_s = costs.direct_s(workload.nbytes)
        return Choice(name, trial, workload, duration_s)
    try:
        staging = replace(plan_staging(costs, workload, bounds), way=trial.way)
    except ValueError as exc:
        trial.close()
        raise TransportUnavailable(str(exc)) from exc
    chunk_nbytes = staging.chunk_nbytes(costs, workload.nbytes)
    duration_s = costs.stream_s(workload.nbytes, chunk_nbytes)
    return Choice(name, trial, workload, duration_s, staging)


def _late_s(direct: Choice) -> float:
    """How much later a stream's chunks are in place than its trial says."""
    return COPIES_OF_A_STREAM * direct.costs.latency_s


def _behind(choice: Choice, direct: Choice | None) -> Choice:
    """What was tried, if it is a stream beside a direct wire, with what its trial left out."""
    if direct is None or not choice.is_stream:
        return choice
    return replace(choice, duration_s=choice.duration_s + _late_s(direct))


def _best(working: Mapping[str, Choice], reasons: dict[str, str], source: RankManifest) -> Choice:
    """The one to take, and what to say of the others. Raises TransportUnavailable."""
    if not working:
        listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise TransportUnavailable(
            f"{source.control_endpoint}: expected a wire that works, got none: "
            f"{listed or 'no candidates'}"
        )
    best = _fastest(working.values())
    for name, other in working.items():
        if other is not best:
            reasons[name] = _why_not(other, best)
    return replace(best, reasons=reasons)


def _fastest(working: Collection[Choice]) -> Choice:
    """Of each kind, then of the two by the margin."""
    direct, stream = (_soonest(working, is_stream=is_stream) for is_stream in (False, True))
    if direct is None or stream is None:
        (only,) = filter(None, (direct, stream))
        return only
    return stream if stream.duration_s < STREAM_MARGIN * direct.duration_s else direct


def _soonest(working: Iterable[Choice], *, is_stream: bool) -> Choice | None:
    """Of one kind."""
    of_kind = (choice for choice in working if choice.is_stream is is_stream)
    return min(of_kind, key=lambda choice: choice.duration_s, default=None)


def _why_not(other: Choice, best: Choice) -> str:
    durations = f"{_ms(other.duration_s)} ms instead of {_ms(best.duration_s)}"
    reason = f"{durations} for {REFERENCE_TOKENS} tokens"
    if other.duration_s < best.duration_s:
        return f"{reason}, expected less than {STREAM_MARGIN:g} of a direct wire's"
    return reason


def _ms(duration_s: float) -> str:
    """Three digits."""
    return f"{duration_s * 1e3:.3g}" if duration_s < 1 else f"{duration_s * 1e3:.0f}"


def _size(nbytes: int) -> str:
    """In the largest unit of which there is one."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}"
    return f"{nbytes} bytes"
