"""What is behind a stream wire's public face, for tests that say where it stands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvxfer.transports.stream_sink import StreamSink
from kvxfer.transports.stream_source import StreamSource


def slots_of(stream: object) -> list[dict[str, int]]:
    """Of each connection how many slots are in which state, how many the pipe still sends, and
    whether both ends have met.
    """
    stream = getattr(stream, "_wire", stream)  # one with faults
    if isinstance(stream, StreamSource):
        connections = stream._connections.all()
        return [
            _named(each.table.num, len(each.leaving), is_met=each.lane is not None)
            for each in connections
        ]
    if isinstance(stream, StreamSink):
        links = stream._links.values()
        return [_named(link.table.num, 0, is_met=link.is_connected) for link in links]
    return []


def _named(num: Mapping[Any, int], num_leaving: int, *, is_met: bool) -> dict[str, int]:
    slots = {state.name: number for state, number in num.items()}
    return slots | {"leaving": num_leaving, "met": int(is_met)}
