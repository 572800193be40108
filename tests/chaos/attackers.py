"""Hostile peers all the while that a storm lasts: the cases of ``tests/hostile`` that need no
set-up of their own, one attack after the other, at all prefill engines in turn.

A process makes them, in the network of the engines that it attacks. Which ones come is decided by a
seed, and by which engines there are when the next is due. Each is heard of when it is over.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import msgspec

from kvxfer.engine.group import forkserver
from tests.chaos.network import enter_network
from tests.hostile.cases import CASES, Fate, Target, Waits, address_of, attack

BESIEGING = tuple(
    number
    for number, case in enumerate(CASES)
    if case.origin == "loopback" and not (case.keys or case.slow or case.waits)
)
NUM_ADDRESSES = 2000
WAIT_S = 2.0
"""For each answer: an engine that stands still gives none, and others wait for their attack."""


class _Attack(msgspec.Struct, frozen=True):
    case: int
    target: Target
    address: str


class Siege:
    """``every_s``: between the beginnings of two attacks, where each is over by then.

    ``network``: the process whose network they come from; 0: that of this host. ``counts``: how
    often each case was carried out; what found no engine, or was refused at once, is not one.
    """

    def __init__(self, seed: int, every_s: float, network: int = 0) -> None:
        self.counts: Counter[str] = Counter()
        self._random, self._every_s, self._due_s = random.Random(f"siege {seed}"), every_s, 0.0
        self._busy = ""
        self._ours, theirs = Pipe()
        self._process = forkserver().Process(
            target=_attack_all, args=(theirs, network), daemon=True
        )
        self._process.start()
        theirs.close()

    def go_on(self, serving: Callable[[], Sequence[Target]]) -> None:
        """The next attack, if it is due; never waits. ``serving``: who can be attacked now."""
        if self._busy and self._ours.poll():
            if self._ours.recv():
                self.counts[self._busy] += 1
            self._busy = ""
        now_s = time.monotonic()
        if self._busy or now_s < self._due_s or not (targets := serving()):
            return
        target, number = self._random.choice(targets), self._random.choice(BESIEGING)
        address = address_of(CASES[number], self._random.randrange(NUM_ADDRESSES))
        if CASES[number].port == "control" or target.data:
            self._due_s, self._busy = now_s + self._every_s, CASES[number].name
            self._ours.send_bytes(msgspec.json.encode(_Attack(number, target, address)))

    def close(self) -> None:
        """Nobody attacks any more."""
        self._process.kill()
        self._process.join()
        self._process.close()
        self._ours.close()


def _attack_all(orders: Connection, network: int) -> None:
    """In a process of its own, until the storm ends it or has gone."""
    if network:
        enter_network(network)
    decoder = msgspec.json.Decoder(_Attack)
    with suppress(EOFError):
        while True:
            order = decoder.decode(orders.recv_bytes())
            fate = Fate.REFUSED
            # The target may have been killed, or stand still
            with suppress(OSError, ValueError):
                fate = attack(CASES[order.case], order.target, order.address, waits=Waits(WAIT_S))
            orders.send(fate is not Fate.REFUSED)
