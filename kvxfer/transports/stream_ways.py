"""The trial of a pipe that has several ways: each is tried, and the fastest taken.

The usual way's trial is whole. The others are only there to be compared with it: they get by with a
large and a small message, so that what they leave behind stays small (the staging that a READ of
NIXL's has taken stays with the source).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import TypeAlias

from kvxfer.errors import TransportUnavailable
from kvxfer.transfer.costs import WireCosts
from kvxfer.transports.base import Trial
from kvxfer.transports.pipe import Pipe, Slots
from kvxfer.transports.stream_link import Link
from kvxfer.transports.stream_trial import TrialTaker
from kvxfer.transports.wake_up import WakeUp

WAY_MARGIN = 0.8
"""Another way than the usual one is taken if its large message takes at most so much of the time:
one of 4 MiB scatters by more than the rest from trial to trial on cores that are shared.
"""
LEAST_FURTHER_S = 0.25
"""A further way may take as long as the usual one, which asks for more, and at least this: ten
times what one takes on a quiet machine."""
NUM_AGAIN = 4
"""How often both are timed again where another way looks faster. Without that 2 of 12 trials took
NIXL's READ between two processes on two busy cores, one of them over TCP, where WRITE takes 4 ms
and READ 8.
"""

MakeLink: TypeAlias = Callable[[Slots, str], Link]
"""A connection for one way's trial. Raises TransportUnavailable."""

_log = logging.getLogger("kvxfer.transports")


@dataclass(frozen=True, slots=True)
class TriedWay:
    """A way that works. ``large_s``: what the large message took over it."""

    way: str
    costs: WireCosts
    large_s: float
    path: str


def further_slots(slots: Slots) -> Slots:
    """Of a trial that is only there to be compared: for the large message and for a small one."""
    return Slots(min(slots.num_slots, 2), slots.slot_nbytes)


def best_way(tried: Sequence[TriedWay]) -> TriedWay:
    """The first, unless another one is so much faster that it was no accident."""
    first = tried[0]
    best = min(tried, key=lambda each: each.large_s)
    return best if best.large_s <= WAY_MARGIN * first.large_s else first


def try_ways(
    pipe: Pipe, make_link: MakeLink, slots: Slots, wake: WakeUp, timeout_s: float
) -> Trial:
    """Try each way of the pipe, over a connection of its own; the trial of the one to take.

    Blocks for ``timeout_s`` at most, all ways together. A way that fails is left out. Raises
    TransportUnavailable if every one does: why the usual one did.
    """
    until_s = time.monotonic() + timeout_s
    tried: dict[str, TriedWay] = {}
    takers: dict[str, TrialTaker] = {}
    errors: list[TransportUnavailable] = []
    limit_s = timeout_s
    with ExitStack() as links:
        for way in pipe.ways:
            is_usual = way == pipe.ways[0]
            began_s = time.monotonic()
            try:
                link = make_link(slots if is_usual else further_slots(slots), way)
                links.enter_context(closing(link))
                taker = takers[way] = TrialTaker(pipe, link, wake, limit_s)
                measured = taker.run()
                tried[way] = TriedWay(way, measured.costs, measured.large_s, link.path)
            except TransportUnavailable as exc:
                errors.append(exc)
                _log.debug("%s: no trial of %s: %s", pipe.name, way, exc)
            now_s = time.monotonic()
            limit_s = until_s - now_s
            if tried:
                limit_s = min(limit_s, max(now_s - began_s, LEAST_FURTHER_S))
            if limit_s <= 0:
                break
        if not tried:
            raise errors[0]
        return _choose(pipe, list(tried.values()), takers, until_s)


def _choose(
    pipe: Pipe, tried: Sequence[TriedWay], takers: Mapping[str, TrialTaker], until_s: float
) -> Trial:
    """Where another way than the first looks faster, both are timed again, in turn."""
    first, best = tried[0], best_way(tried)
    if best is not first:
        try:
            for _ in range(NUM_AGAIN):
                first = _again(first, takers[first.way], until_s)
                best = _again(best, takers[best.way], until_s)
            best = best_way((first, best))
        except TransportUnavailable as exc:
            _log.debug("%s: %s and not %s: %s", pipe.name, first.way, best.way, exc)
            best = first
    if len(tried) > 1:
        latest = {each.way: each for each in (*tried, first, best)}
        listed = ", ".join(f"{way} {each.large_s * 1e3:.3g} ms" for way, each in latest.items())
        _log.debug("%s: %s for the large message: %s", pipe.name, listed, best.way)
    # Only the usual way's trial has measured it, by a burst
    costs = replace(best.costs, message_s=first.costs.message_s)
    return Trial(costs, best.path, best.way)


def _again(tried: TriedWay, taker: TrialTaker, until_s: float) -> TriedWay:
    large_s = taker.time_large(max(until_s - time.monotonic(), 0.0))
    return replace(tried, large_s=min(tried.large_s, large_s))
