"""Hostile peers beside a storm: the cases of ``tests/hostile`` that need no set-up of their own."""

from __future__ import annotations

import random
import time
from contextlib import suppress

import msgspec

from tests.hostile.cases import CASES, Target, address_of, attack

BESIEGING = tuple(
    number
    for number, case in enumerate(CASES)
    if case.origin == "loopback" and not (case.keys or case.slow or case.waits)
)


def besiege(target: bytes, seed: int, duration_s: float) -> None:
    """One attack after the other for so long, in a process of its own."""
    drawn = random.Random(seed)
    decoded = msgspec.json.decode(target, type=Target)
    end_s = time.monotonic() + duration_s
    while time.monotonic() < end_s:
        number = drawn.choice(BESIEGING)
        if CASES[number].port == "data" and not decoded.data:
            continue
        # The target may have been killed, or stand still
        with suppress(OSError, ValueError):
            attack(CASES[number], decoded, address_of(CASES[number], drawn.randrange(2000)))
