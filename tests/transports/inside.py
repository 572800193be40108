"""What is behind a stream wire's public face, for tests that say where it stands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvxfer.transports.stream_sink import StreamSink
from kvxfer.transports.stream_source import StreamSource


def slots_of(stream: object) -> list[dict[str, int]]:
    """Of each connection how many slots are in which state, and how many the pipe still sends."""
    if isinstance(stream, StreamSource):
        connections = stream._connections.all()
        return [_named(each.table.num, len(each.leaving)) for each in connections]
    if isinstance(stream, StreamSink):
        return [_named(link.table.num, 0) for link in stream._links.values()]
    return []


def _named(num: Mapping[Any, int], num_leaving: int) -> dict[str, int]:
    return {state.name: number for state, number in num.items()} | {"leaving": num_leaving}
