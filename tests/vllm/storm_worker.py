"""An engine of vLLM in a storm: the worker of ``engine_worker.py`` with a door for what befalls it,
and with what became of each request's load.
"""

from __future__ import annotations

import socket
from typing import Any

from kvxfer.config import Config
from kvxfer.connector.ledger import Ledger
from kvxfer.connector.rank_service import RankService
from kvxfer.connector.records import Identity, KVConnectorOutput
from kvxfer.connector.scheduler_side import SchedulerConnector
from tests.chaos.child import Spec, open_door, prepare
from tests.vllm.engine_worker import Worker

COUNTS = {
    "requests.loaded": "vllm:kvxfer_requests_loaded_total",
    "requests.in_step": "vllm:kvxfer_requests_in_step_total",
    "verify.equal": "vllm:kvxfer_verified_total{result=equal}",
    "verify.differing": "vllm:kvxfer_verified_total{result=differing}",
    "preemptions": "vllm:num_preemptions_total",
}
"""As reference engines name what these metrics count."""
_services: list[tuple[RankService, bytes]] = []
"""With the incarnation of each."""
_schedulers: list[SchedulerConnector] = []
_loads: dict[str, str] = {}
"""Why the load of a request failed, "" where it did not, by the scheduler's request id."""


class StormWorker(Worker):
    def __init__(self, sock: socket.socket, engine_args: dict[str, Any], spec: Spec) -> None:
        reach = prepare(spec)
        _watch()
        super().__init__(sock, engine_args, idle_step_s=0.0005)
        self._offsets = open_door(reach, _services[0][0], 0, _services[0][1])

    def _step(self) -> None:
        self._offsets.reset(_schedulers)
        super()._step()

    def _finished(self, output: Any) -> dict[str, Any]:
        # vLLM adds a suffix to the ids that it is given
        own = [each for each in _loads if each.rpartition("-")[0] == output.request_id]
        reasons = [_loads.pop(each) for each in own]
        return super()._finished(output) | {"load": reasons[0] if reasons else None}

    def do_info(self) -> dict[str, Any]:
        """A request that the scheduler has not forgotten counts as a block that is used."""
        blocks, metrics = self.do_blocks(), self.do_metrics()
        return {
            "num_blocks": blocks["num_total"],
            "num_free_blocks": blocks["num_free"] - blocks["num_requests"],
            "counts": {name: int(metrics.get(metric, 0)) for name, metric in COUNTS.items()},
        }


def _watch() -> None:
    """Keep hold of both sides of the connector, and of what the ranks say of loads."""
    make_service, make_scheduler = RankService.__init__, SchedulerConnector.__init__
    update = SchedulerConnector.update_connector_output

    def service(
        self: RankService,
        config: Config,
        ledger: Ledger,
        identity: Identity,
        *args: Any,
        **more: Any,
    ) -> None:
        make_service(self, config, ledger, identity, *args, **more)
        _services.append((self, identity.incarnation))

    def scheduler(self: SchedulerConnector, *args: Any, **kwargs: Any) -> None:
        make_scheduler(self, *args, **kwargs)
        _schedulers.append(self)

    def noting(self: SchedulerConnector, output: KVConnectorOutput) -> None:
        failed = output.failed_recving or {}
        _loads.update({each: failed.get(each, "") for each in output.finished_recving or ()})
        update(self, output)

    for owner, name, function in (
        (RankService, "__init__", service),
        (SchedulerConnector, "__init__", scheduler),
        (SchedulerConnector, "update_connector_output", noting),
    ):
        setattr(owner, name, function)


def serve(sock: socket.socket, engine_args: dict[str, Any], spec: Spec) -> None:
    """Start the engine and serve until the socket closes."""
    with sock:
        worker = StormWorker(sock, engine_args, spec)
        try:
            worker.run()
        finally:
            worker.shutdown()
