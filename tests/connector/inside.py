"""What is behind a connector's public face, for tests that hold it up or give it another clock."""

from __future__ import annotations

from kvxfer.connector.rank_service import RankService
from kvxfer.connector.worker_side import WorkerConnector


def service_behind(worker: WorkerConnector) -> RankService:
    service = worker._service
    assert service is not None
    return service
