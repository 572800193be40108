"""One storm from its plan to its summary, and what it was played on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.chaos.fleet import Fleet, Networks
from tests.chaos.play import IN_FLIGHT, Play, Summary
from tests.chaos.storm import Plan

QUIET = {"log_level": "CRITICAL"}
"""Failed loads are what a storm makes; each would be a line."""


def weather(
    plan: Plan,
    folder: Path,
    wire: str,
    *,
    device: str = "cpu",
    settings: Mapping[str, Any] | None = None,
    planted: str = "",
    faults: str = "",
    networks: Networks | None = None,
    in_flight: int = IN_FLIGHT,
) -> Summary:
    """Start the fleet, play the storm, and end everything. ``folder``: for logs,
    made here; ``planted``, ``faults``, ``networks``: as :class:`Fleet` has them; ``in_flight``: as
    :class:`Play` has it.
    """
    folder.mkdir(parents=True)  # what another storm has written would be taken for this one's
    with Fleet(
        folder,
        plan.fleet,
        wire=wire,
        seed=plan.seed,
        settings={**QUIET, **(settings or {})},
        device=device,
        planted=planted,
        faults=faults,
        networks=networks,
    ) as fleet:
        return Play(plan, fleet, folder, wire, in_flight=in_flight).run()
