"""What is behind a connector's public face, for tests that hold it up or give it another clock."""

from __future__ import annotations

from kvxfer.connector.rank_service import RankService
from kvxfer.connector.worker_side import WorkerConnector
from tests.transports.inside import slots_of


def service_behind(worker: WorkerConnector) -> RankService:
    service = worker._service
    assert service is not None
    return service


def slots_behind(service: RankService) -> dict[str, list[dict[str, int]]]:
    """Of each stream wire, by side and wire: see slots_of."""
    return {
        f"{side} {stream.name}": slots_of(stream)
        for side, streams in service._streams
        for stream in streams
    }
