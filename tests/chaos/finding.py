"""Plants a fault and looks who finds it, and how fast."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from tests.chaos.planted import Planted
from tests.chaos.running import weather
from tests.chaos.storm import make_plan

ROOT = Path(__file__).resolve().parents[2]
NUM_REQUESTS = 300
EVERY = 15
"""Requests for each injection, where a fault needs any."""
MOST_STORMS = 3


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """Who found a planted fault. ``by``: a storm and its seed, or a test; "" for nobody."""

    name: str
    room: str
    by: str
    seconds: float
    said: str


def look_for(planted: Planted, folder: Path, seed: int = 1) -> Found:
    """Storms until one finds it, or the one test."""
    begun_s = time.monotonic()
    by, said = _by_test(planted) if planted.test else _by_storms(planted, folder, seed)
    return Found(
        name=planted.name,
        room=planted.room,
        by=by,
        seconds=round(time.monotonic() - begun_s, 1),
        said=said,
    )


def _by_storms(planted: Planted, folder: Path, first_seed: int) -> tuple[str, str]:
    for seed in range(first_seed, first_seed + MOST_STORMS):
        plan = make_plan(
            seed,
            NUM_REQUESTS,
            fleet=planted.fleet,
            kinds=planted.kinds,
            every=EVERY,
            longest_stop_s=1.2,
            victims=planted.victims,
        )
        summary = weather(
            plan,
            folder / f"{planted.name}-{seed}",
            planted.wire,
            settings=planted.settings,
            planted=planted.name,
        )
        if faults := summary.faults():
            return f"storm over {planted.wire}, seed {seed}", faults[0]
    return "", ""


def _by_test(planted: Planted) -> tuple[str, str]:
    """It must fail with the fault, and with nothing else wrong."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-p", "tests.chaos.planted", planted.test],
        cwd=ROOT,
        env=os.environ | {"PLANTED_FAULT": planted.name, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "E  "))]
    return (planted.test, lines[0] if lines else "") if done.returncode == 1 else ("", "")
