"""Choose the wire to a peer by a trial with real bytes, and say why the others were not taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvxfer.errors import TransportUnavailable
from kvxfer.transfer.manifest import RankManifest
from kvxfer.transports.base import SinkTransport

TRIAL_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Choice:
    """The wire to one source rank.

    Its name, what its trial measured (GB/s, 1e9 bytes), why each other one was not taken, and by
    which path the trial went where the wire has several.
    """

    transport: str
    gb_per_s: float
    reasons: dict[str, str]
    path: str = ""

    def __str__(self) -> str:
        """For the one log line of a peer."""
        others = "".join(f"; not {name}: {reason}" for name, reason in self.reasons.items())
        path = f" over {self.path}" if self.path else ""
        return f"{self.transport}{path} at {self.gb_per_s:.2f} GB/s{others}"


def probe(
    candidates: Mapping[str, SinkTransport],
    source: RankManifest,
    *,
    min_gbps: float | None = None,
    timeout_s: float = TRIAL_TIMEOUT_S,
    last_timeout_s: float | None = None,
) -> Choice:
    """Try the candidates in their order and take the first one that works.

    It works if it moves bytes, and does so at ``min_gbps`` or more.

    Blocks for up to ``timeout_s`` for each candidate, ``last_timeout_s`` (if given) for the last,
    after which there is no other: on a host with many times more work than cores a trial that takes
    10 ms alone was seen to take 4 s. May be called from any thread. Raises
    TransportUnavailable with every reason when none is left: with one candidate, a wire asked for
    by name, that is its own reason.
    """
    reasons: dict[str, str] = {}
    for position, (name, transport) in enumerate(candidates.items()):
        is_last = position == len(candidates) - 1
        limit_s = last_timeout_s if is_last and last_timeout_s is not None else timeout_s
        try:
            trial = transport.trial(source, limit_s)
        except TransportUnavailable as exc:
            reasons[name] = str(exc).removeprefix(f"{name}: ")
            continue
        if min_gbps is not None and trial.gb_per_s < min_gbps:
            reasons[name] = f"expected at least min_gbps {min_gbps} GB/s, got {trial.gb_per_s:.3f}"
            continue
        for other in list(candidates)[position + 1 :]:
            reasons[other] = f"{name} works and is preferred"
        return Choice(name, trial.gb_per_s, reasons, trial.path)
    listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise TransportUnavailable(
        f"{source.control_endpoint}: expected a wire that works, got none: "
        f"{listed or 'no candidates'}"
    )
