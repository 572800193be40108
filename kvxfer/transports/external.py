"""Wires of other packages, found by the entry points of the group ``kvxfer.wires``.

    [project.entry-points."kvxfer.wires"]
    quick = "quick_wire:WIRE"

The name is what the setting ``transport`` says; the object is a :class:`Wire`. A wire that only
moves payload in another way is a pipe (:mod:`kvxfer.transports.pipe`), and ``stream_wire`` makes
the rest of it. A direct wire can publish the handles that a manifest knows, no others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from operator import attrgetter
from typing import TypeVar

from kvxfer.config import OWN_TRANSPORTS, WIRE_GROUP, Config
from kvxfer.errors import TransportUnavailable
from kvxfer.transports.base import (
    DirectSource,
    LocalMemory,
    SinkTransport,
    SourceTransport,
    Wake,
)
from kvxfer.transports.channel import Context
from kvxfer.transports.copy_thread import Copier
from kvxfer.transports.pipe import MakePipe
from kvxfer.transports.stream_sink import StreamSink
from kvxfer.transports.stream_source import StreamSource

Side = TypeVar("Side", bound=SourceTransport | SinkTransport)
Maker = Callable[[LocalMemory, Config, Copier, Wake, Context], Side]
"""One side of a wire for this rank's memory. Raises TransportUnavailable."""

_log = logging.getLogger("kvxfer.transports")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """Both sides of a wire that is not part of kvxfer.

    ``auto_for``: the kinds of memory (``cpu``, ``cuda``) for which ``auto`` tries it, after
    kvxfer's own wires. Empty: only who asks for it by name has it.
    """

    make_source: Maker[SourceTransport]
    make_sink: Maker[SinkTransport]
    auto_for: Collection[str] = ()


def stream_wire(make_pipe: MakePipe, auto_for: Collection[str] = ()) -> Wire:
    """The wire that packs, announces and credits like kvxfer's own, over another pipe."""
    return Wire(
        make_source=partial(StreamSource, make_pipe),
        make_sink=partial(StreamSink, make_pipe),
        auto_for=auto_for,
    )


@cache
def external_wires() -> dict[str, Wire]:
    """The wires of the installed packages, by name. Read once in a process.

    What cannot be used is left out, with one warning that names the entry point and the reason.
    """
    wires: dict[str, Wire] = {}
    found = sorted(entry_points(group=WIRE_GROUP), key=attrgetter("name"))
    names = [point.name for point in found]
    for point in found:
        try:
            wires[point.name] = _loaded(point, num_named=names.count(point.name))
        except Exception as exc:  # noqa: BLE001  # whatever a package does when it is imported
            _log.warning(
                "%s: %s = %s cannot be used: %s: %s; mend or remove the package %s",
                *(WIRE_GROUP, point.name, point.value, type(exc).__name__, exc),
                point.dist.name if point.dist is not None else "that has it",
            )
    return wires


def _loaded(point: EntryPoint, num_named: int) -> Wire:
    """What the entry point names. Raises ValueError, TypeError, and what its import raises."""
    if point.name in OWN_TRANSPORTS:
        raise ValueError(f"expected a name of its own, got {point.name}, which kvxfer has")
    if num_named > 1:
        raise ValueError(f"expected one wire {point.name}, got {num_named}; nobody can choose one")
    wire = point.load()
    if not isinstance(wire, Wire):
        raise TypeError(f"expected kvxfer.transports.external.Wire, got {type(wire).__name__}")
    return wire


def named(name: str, side: Side) -> Side:
    """One side of a wire, under the name that it is registered by: a peer looks for that one.
    Another one is closed. Raises TransportUnavailable.
    """
    if name in OWN_TRANSPORTS or side.name == name:
        return side
    if not isinstance(side, DirectSource):
        side.close()
    raise TransportUnavailable(
        f"{name}: expected a wire that calls itself so, got {side.name}; give both one name"
    )
