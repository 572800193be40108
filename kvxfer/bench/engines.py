"""An engine without a model: pools of a given geometry, and both sides of the connector, driven
step by step as an engine drives them. One request at a time.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvxfer.bench.core import Timing
from kvxfer.bench.members import SINK, SOURCE, Devices, Member
from kvxfer.bench.pools import Pool, Request
from kvxfer.bench.wires import wire_config
from kvxfer.bench.workers import Worker, method_for
from kvxfer.connector.records import ConnectorMetadata, KVConnectorOutput, LoadReport
from kvxfer.connector.scheduler_side import SchedulerConnector
from kvxfer.connector.worker_side import WorkerConnector
from kvxfer.engine.request import Request as Asked
from kvxfer.engine.request import Status
from kvxfer.engine.steps import NewRequestData, SchedulerOutput
from kvxfer.transfer.manifest import CacheFacts, EngineIdentity, RankId

SWITCH_INTERVAL_S = 2e-4  # what the engines set, so that a busy thread lets others run
_ENDS_S = 30.0
_SPIN = 2000
"""Turns of a busy engine's loop between two looks at its results: 0.1 ms of Python."""


@dataclass(frozen=True, slots=True)
class _Allocated:
    ids: tuple[int, ...]

    def get_block_ids(self) -> tuple[tuple[int, ...], ...]:
        return (self.ids,)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTiming(Timing):
    """One accepted load. ``total_s``: from the order to the last verdict, and its parts.
    ``seen_s``: from before the first call of the step to the engine's look at the result. Processor
    time: of the engine's thread in the scheduler's and in the worker's calls, of the IO thread, of
    all other threads of the process.
    """

    start_s: float
    place_s: float
    verdict_s: float
    seen_s: float
    scheduler_cpu_s: float
    worker_cpu_s: float
    io_cpu_s: float
    other_cpu_s: float
    nbytes: int
    transports: tuple[str, ...]


def spin() -> int:
    total = 0
    for number in range(_SPIN):
        total += number * number
    return total


def prompt(num_tokens: int) -> tuple[int, ...]:
    return tuple(number * 7919 % 128_000 for number in range(num_tokens))


class BenchEngine(Member):
    """One engine of one rank, which offers (source) or loads (sink)."""

    def __init__(
        self, side: str, devices: Devices, pool: Pool, settings: dict[str, object]
    ) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        super().__init__({side: devices.by_side[side]}, pool.nbytes)
        self._pool = pool
        self._num_requests = 0
        self._reports: dict[str, LoadReport] = {}
        config = wire_config(devices.wire, **settings)
        engine = EngineIdentity(
            engine_id=side,
            incarnation=side.encode().ljust(16, b"-"),
            facts=facts_of(pool),
            tp_size=1,
            pp_size=1,
            block_tokens=pool.block_tokens,
            layout=pool.layout,
        )
        self._scheduler = SchedulerConnector(
            config, engine, can_send=side == SOURCE, can_receive=side == SINK
        )
        memory = self.memories[side]
        self._worker = WorkerConnector(
            config,
            engine,
            RankId(0, 0),
            can_leave_unhashed=True,
            device=memory.device,
        )
        self._worker.register_kv_caches(pool.kv_regions(), memory.local)
        rank = self._worker.get_handshake_metadata()
        self._scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): rank})
        self._step(self._orders())

    # -------------------------------------------------- as the source

    def offer(self, request: Request) -> dict[str, Any]:
        """Prefill and end; the params for the sink."""
        asked = self._asked(prompt(request.num_tokens), {"do_remote_decode": True})
        ids = tuple(request.source_ids.tolist())
        self._scheduler.on_new_request(asked)
        new = NewRequestData(
            req_id=asked.request_id,
            prompt_token_ids=asked.prompt_token_ids,
            block_ids=(ids,),
            num_computed_tokens=0,
        )
        scheduled = {asked.request_id: request.num_tokens}
        self._step(self._orders((new,), scheduled))
        asked.status = Status.FINISHED_LENGTH_CAPPED
        is_kept, params = self._scheduler.request_finished_all_groups(asked, (ids,))
        if not is_kept or params is None:
            raise RuntimeError("source: expected the request offered, it is not")
        self._step(self._orders())
        return params

    def settle(self) -> None:
        """Until nothing is offered any more."""
        self._until(lambda output: bool(output.finished_sending), is_busy=False)

    # -------------------------------------------------- as the sink

    def load(self, request: Request, params: dict[str, Any], is_busy: bool) -> LoadTiming:
        """From the order to the look at its result, by an engine whose thread sleeps meanwhile or
        computes. Raises RuntimeError where the load was not accepted.
        """
        # The last token of a prompt is always computed, so it has one more than the offer.
        asked = self._asked((*prompt(request.num_tokens), 1), params)
        ids = tuple(request.sink_ids.tolist())
        spare = tuple(set(range(request.sink.num_blocks)).difference(ids))[:1]
        self.flush()
        cpu_s = time.thread_time()
        self._scheduler.on_new_request(asked)
        num_tokens, _ = self._scheduler.get_num_new_matched_tokens(asked, 0)
        if not num_tokens:
            raise RuntimeError(f"sink: expected {request.num_tokens} tokens to load, got none")
        self._scheduler.update_state_after_alloc(asked, _Allocated(ids + spare), num_tokens)
        metadata = self._orders()
        scheduler_cpu_s = time.thread_time() - cpu_s

        io_before_s, all_before_s = self._io_cpu_s(), time.process_time()
        cpu_s, started_s = time.thread_time(), time.monotonic()
        output = self._step(metadata)
        if output is None or not output.finished_recving:
            output = self._until(lambda found: bool(found.finished_recving), is_busy=is_busy)
        seen_s, worker_cpu_s = time.monotonic() - started_s, time.thread_time() - cpu_s
        io_cpu_s = self._io_cpu_s() - io_before_s
        other_cpu_s = time.process_time() - all_before_s - worker_cpu_s - io_cpu_s
        self._scheduler.update_connector_output(output)
        report = self._report(asked.request_id)
        # The request ends before the next, as if it had run.
        self._scheduler.request_finished_all_groups(asked, (ids,))
        return LoadTiming(
            total_s=report.finished_s - report.handed_s,
            start_s=report.started_s - report.handed_s,
            place_s=report.placed_s - report.started_s,
            verdict_s=report.finished_s - report.placed_s,
            seen_s=seen_s,
            scheduler_cpu_s=scheduler_cpu_s,
            worker_cpu_s=worker_cpu_s,
            io_cpu_s=io_cpu_s,
            other_cpu_s=max(0.0, other_cpu_s),
            nbytes=report.nbytes,
            transports=report.transports,
        )

    def _report(self, request_id: str) -> LoadReport:
        report = self._reports.pop(request_id, None)
        if report is None:
            raise RuntimeError(f"sink: expected a report of {request_id}, got none")
        if report.reason is not None:
            raise RuntimeError(f"sink: expected an accepted load, got {report}")
        return report

    # -------------------------------------------------- both

    def _asked(self, tokens: tuple[int, ...], params: dict[str, Any]) -> Asked:
        self._num_requests += 1
        return Asked(f"request-{self._num_requests}", tokens, 1, params)

    def _orders(
        self, new: tuple[NewRequestData, ...] = (), scheduled: dict[str, int] | None = None
    ) -> ConnectorMetadata:
        step = SchedulerOutput(scheduled_new_reqs=new, num_scheduled_tokens=scheduled or {})
        return self._scheduler.build_connector_meta(step)

    def _step(self, metadata: ConnectorMetadata) -> KVConnectorOutput | None:
        """One step of the rank, without a forward pass."""
        worker = self._worker
        worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        worker.start_load_kv()
        worker.wait_for_save()
        output = self._output()
        worker.clear_connector_metadata()
        return output

    def _output(self) -> KVConnectorOutput | None:
        """What the rank reports now. A load's report may come a look before its end."""
        output = self._worker.build_output(())
        if output is not None and output.kv_connector_stats is not None:
            self._reports |= {each.request_id: each for each in output.kv_connector_stats.loads}
        return output

    def _until(
        self, is_wanted: Callable[[KVConnectorOutput], bool], *, is_busy: bool
    ) -> KVConnectorOutput:
        """Steps with nothing to compute until one reports it; what others reported meanwhile is of
        the same requests, and is not lost.
        """
        deadline_s = time.monotonic() + _ENDS_S
        while time.monotonic() < deadline_s:
            if is_busy:
                spin()
            else:
                self._worker.wait_for_activity(1.0)
            output = self._output()
            if output is None:
                continue
            if is_wanted(output):
                return output
            self._scheduler.update_connector_output(output)
        raise TimeoutError(f"engine: expected a request to end within {_ENDS_S:g} s")

    def _io_cpu_s(self) -> float:
        return sum(
            time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            for thread in threading.enumerate()
            if thread.name.startswith("kvxfer-io") and thread.ident is not None
        )

    def close(self) -> None:
        self._worker.shutdown()
        super().close()


def facts_of(pool: Pool) -> CacheFacts:
    return CacheFacts(
        model=f"benchmark-{pool.shape.name}",
        weights="none",
        rope="none",
        dtype="bfloat16",
        quantisation="none",
        num_kv_heads=pool.shape.heads,
        head_size=pool.shape.inner_nbytes // 2,
        num_layers=pool.shape.regions // 2,
    )


def start_engines(
    make: type[BenchEngine], devices: Devices, request: Request, settings: dict[str, object]
) -> dict[str, Worker]:
    """One that offers and one that loads requests like this, by side, each in its process."""
    pools = {SOURCE: request.source, SINK: request.sink}
    return {
        side: Worker(
            *(f"{side} engine", make, side, devices, pool, settings),
            method=method_for(devices.sink),
        )
        for side, pool in pools.items()
    }
