"""What is behind a connector's public face, for tests that hold it up or give it another clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvxfer.connector.rank_service import RankService
from kvxfer.connector.worker_side import WorkerConnector
from kvxfer.transports.stream_sink import StreamSink
from kvxfer.transports.stream_source import StreamSource


def service_behind(worker: WorkerConnector) -> RankService:
    service = worker._service
    assert service is not None
    return service


def slots_behind(service: RankService) -> dict[str, list[dict[str, int]]]:
    """Of each connection of a stream wire, how many of its slots are in which state, and how many
    the pipe still sends; by side and wire.
    """
    found: dict[str, list[dict[str, int]]] = {}
    for _, streams in service._streams:
        for stream in streams:
            if isinstance(stream, StreamSource):
                each = [(end.table.num, len(end.leaving)) for end in stream._connections.all()]
                found[f"source {stream.name}"] = [_named(num, leaving) for num, leaving in each]
            elif isinstance(stream, StreamSink):
                found[f"sink {stream.name}"] = [
                    _named(link.table.num, 0) for link in stream._links.values()
                ]
    return found


def _named(num: Mapping[Any, int], num_leaving: int) -> dict[str, int]:
    return {state.name: number for state, number in num.items()} | {"leaving": num_leaving}
