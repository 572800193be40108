"""What searches through all worlds of a model have in common."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

W = TypeVar("W")


def trace_to(world: W, parents: Mapping[W, tuple[W, str] | None]) -> list[str]:
    """The labels of the moves from the first world, which has no parent, to this one."""
    labels: list[str] = []
    step = parents[world]
    while step is not None:
        world, label = step
        labels.append(label)
        step = parents[world]
    return labels[::-1]


def without_exit(worlds: Iterable[W], exits: Mapping[W, W], over: Collection[W]) -> W | None:
    """A world from which local moves alone never reach one that is over; None if there is none.

    Following one local move per world (``exits``) is enough: if that path ends, an exit exists.
    """
    good = set(over)
    for world in worlds:
        path: dict[W, None] = {}
        here = world
        while here not in good:
            if here in path or here not in exits:
                return world
            path[here] = None
            here = exits[here]
        good.update(path)
    return None
