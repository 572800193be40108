"""Rank 0 of an engine: request channel, scheduler, worker 0, and the loop that joins them."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from kvxfer.connector.aggregator import KVOutputAggregator
from kvxfer.connector.metrics import add, of_scheduler, of_worker
from kvxfer.connector.scheduler_side import SchedulerConnector
from kvxfer.connector.unused_kv import UntakenKV
from kvxfer.engine.config import EngineConfig
from kvxfer.engine.kv_plan import plan_kv_caches
from kvxfer.engine.links import Activity, DriverLink, Output, Started
from kvxfer.engine.metrics_server import MetricsServer
from kvxfer.engine.model_config import ModelConfig
from kvxfer.engine.request import Event, NewToken, Request
from kvxfer.engine.rpc import (
    Abort,
    Ask,
    Done,
    Generate,
    Info,
    RequestRefused,
    RpcServer,
    ToEngine,
    Token,
)
from kvxfer.engine.runner import Runner
from kvxfer.engine.scheduler import Scheduler
from kvxfer.engine.steps import SchedulerOutput, StepOutput
from kvxfer.errors import KvxferError
from kvxfer.transfer.manifest import RankManifest

log = logging.getLogger("kvxfer.engine")


@dataclass(frozen=True, slots=True)
class _Asker:
    """Who asked, and what the client calls the request."""

    client: bytes
    request_id: str


class Driver:
    """One engine's main loop. When there is nothing to do it waits, and looks now and then at
    what its clients hold.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        runner: Runner,
        links: Sequence[DriverLink],
        rpc: RpcServer,
        connector: SchedulerConnector | None,
        pids: Sequence[int],
        metrics: MetricsServer | None = None,
    ) -> None:
        self._config = config
        self._model = model
        self._runner = runner
        self._links = links
        self._rpc = rpc
        self._connector = connector
        self._pids = (os.getpid(), *pids)
        self._metrics = metrics
        kv_cache_config = plan_kv_caches(config, model)[0]
        self._num_blocks = kv_cache_config.num_blocks
        self._scheduler = Scheduler(
            config, connector, kv_cache_config, eos_token_ids=model.eos_token_ids
        )
        self._aggregator = KVOutputAggregator(config.tp_size)
        # Inside, every request has an id of its own: two clients may choose the same one, and one
        # client may use an id again, which must not meet reports of the request before.
        self._serial = itertools.count()
        self._askers: dict[str, _Asker] = {}
        self._own_ids: dict[_Asker, str] = {}
        self._held: dict[_Asker, str] = {}
        self._counts: Counter[str] = Counter()
        self._untaken = UntakenKV()
        self._is_rank_active = False
        self._is_ending = False

    @property
    def _is_draining(self) -> bool:
        """By its parent's word, or an operator's to a rank."""
        return self._is_ending or bool(self._connector and self._connector.is_draining)

    def gather(self) -> None:
        """Wait until every rank is up, and let the connector know all of them."""
        manifests: dict[tuple[int, int], RankManifest] = {}
        for rank, manifest in enumerate([self._runner.manifest, *map(_started, self._links)]):
            if manifest is not None:
                manifests[(0, rank)] = manifest
        if self._connector is not None:
            self._connector.set_xfer_handshake_metadata_pp_aware(manifests)

    def run(self, stop: int, drain: int, on_drained: Callable[[], object]) -> None:
        """Serve until the file descriptor ``stop`` is readable. From when ``drain`` is, nothing new
        is taken; ``on_drained`` is called when no request and no offer is left.
        """
        poller = zmq.Poller()
        poller.register(stop, zmq.POLLIN)
        poller.register(drain, zmq.POLLIN)
        poller.register(self._rpc.socket, zmq.POLLIN)
        poller.register(self._rpc.monitor, zmq.POLLIN)
        own = self._runner.connector
        if own is not None:
            poller.register(own.activity_fileno(), zmq.POLLIN)
        for link in self._links:
            poller.register(link.socket, zmq.POLLIN)
        scrape = self._metrics.fileno if self._metrics is not None else -1
        if self._metrics is not None:
            poller.register(scrape, zmq.POLLIN)
        must_tell = False
        while True:
            if must_tell and self._scheduler.is_empty:
                must_tell = False
                self._rpc.flush()
                on_drained()
            ready = dict(poller.poll(0 if self._scheduler.has_work() else self._rpc.wait_ms))
            if stop in ready:
                return
            if drain in ready:
                os.eventfd_read(drain)
                must_tell = self._is_ending = True
                if self._connector is not None:
                    self._connector.drain()
            for client, message in self._rpc.receive():
                self._handle(client, message)
            self._is_rank_active |= own is not None and own.activity_fileno() in ready
            if scrape in ready:
                os.eventfd_read(scrape)
                self._is_rank_active = True  # a step brings every rank's numbers
            for link in self._links:
                if link.socket in ready:
                    self._hear(link)
            if self._is_rank_active and not self._links:
                # A step that was planned without it would be an empty one
                self._take(SchedulerOutput(), [self._runner.report()])
            if self._scheduler.has_work() or self._is_rank_active:
                self._step()

    def _hear(self, link: DriverLink) -> None:
        while int(link.socket.get(zmq.EVENTS)) & zmq.POLLIN:
            if isinstance(link.receive(), Activity):
                self._is_rank_active = True

    # ------------------------------------------------------------------ one step

    def _step(self) -> None:
        step = self._scheduler.schedule()
        for link in self._links:
            link.send(step)
        outputs = [self._runner.execute(step), *(self._output(link) for link in self._links)]
        self._take(step, outputs)

    def _take(self, step: SchedulerOutput, outputs: Sequence[StepOutput]) -> None:
        """What all ranks say."""
        self._is_rank_active = False
        self._merge(outputs)
        for event in self._scheduler.update(step, outputs):
            self._tell(event)

    def _output(self, link: DriverLink) -> StepOutput:
        while True:
            message = link.receive()
            if isinstance(message, Output):
                return message.output
            # Activity, said before the output: whatever it was, the output carries it.

    def _merge(self, outputs: Sequence[StepOutput]) -> None:
        self._aggregator.aggregate(outputs)
        own = self._connector.get_kv_connector_stats() if self._connector else None
        merged = outputs[0].kv_connector_output
        ranks = merged.kv_connector_stats if merged else None
        for stats in (own, ranks):
            if stats is not None:
                self._counts.update(stats.counts)
                self._counts.update({f"reason:{key}": n for key, n in stats.reasons.items()})
        if self._metrics is not None:
            tables = of_scheduler(own) if own is not None else {}
            if ranks is not None:
                add(tables, of_worker(ranks, time.monotonic()))
            self._metrics.observe(tables)

    # ------------------------------------------------------------------ clients

    def _handle(self, client: bytes, message: ToEngine) -> None:
        match message:
            case Ask():
                self._rpc.send(client, self._info())
            case Abort(request_id=request_id, why=why):
                asker = _Asker(client, request_id)
                own_id = self._own_ids.get(asker) or self._held.pop(asker, "")
                line = why and self._untaken.note(time.monotonic(), request_id, why)
                if line:
                    log.warning("%s", line)
                for event in self._scheduler.abort(own_id):
                    self._tell(event)
            case Generate():
                self._generate(client, message)

    def _generate(self, client: bytes, message: Generate) -> None:
        if self._is_draining:
            why = "the engine drains: it finishes what it has, and takes nothing new"
            self._rpc.send(client, RequestRefused(message.request_id, why, is_draining=True))
            return
        asker = _Asker(client, message.request_id)
        own_id = f"{message.request_id}.{next(self._serial)}"
        try:
            self._check(asker, message)
            self._scheduler.add(
                Request(
                    request_id=own_id,
                    prompt_token_ids=message.prompt_token_ids,
                    max_new_tokens=message.max_new_tokens,
                    kv_transfer_params=message.kv_transfer_params,
                    trace_headers=message.trace_headers,
                )
            )
        except (KvxferError, ValueError) as e:
            self._rpc.send(client, RequestRefused(message.request_id, str(e)))
        else:
            self._askers[own_id] = asker
            self._own_ids[asker] = own_id

    def _check(self, asker: _Asker, message: Generate) -> None:
        tokens, vocab_size = message.prompt_token_ids, self._model.vocab_size
        if asker in self._own_ids:
            raise ValueError(f"request {message.request_id}: expected a new id, got one in use")
        if not tokens or message.max_new_tokens < 1:
            raise ValueError(
                f"request {message.request_id}: expected at least one prompt token and one new "
                f"token, got {len(tokens)} and {message.max_new_tokens}"
            )
        if min(tokens) < 0 or max(tokens) >= vocab_size:
            raise ValueError(
                f"request {message.request_id}: expected token ids in [0, {vocab_size}), "
                f"got {min(tokens)} to {max(tokens)}"
            )

    def _tell(self, event: Event) -> None:
        if isinstance(event, NewToken):
            asker = self._askers[event.request_id]
            token = Token(asker.request_id, event.token_id, event.logit_gap)
            self._rpc.send(asker.client, token)
            return
        request = event.request
        asker = self._askers.pop(request.request_id)
        del self._own_ids[asker]
        if event.kv_transfer_params is not None:
            self._hold(asker, request.request_id)
        plain = request.plain
        done = Done(
            request_id=asker.request_id,
            status=request.status.name,
            kv_transfer_params=event.kv_transfer_params,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_external_tokens=request.num_external_tokens,
            failure=request.failure or (plain.reason if plain else None),
            loads=tuple(request.reports),
            digests=request.digests,
            detail=plain.detail if plain else "",
        )
        self._rpc.send(asker.client, done)

    def _hold(self, asker: _Asker, own_id: str) -> None:
        """Its client may still take the offer back. Those that are over are forgotten here."""
        self._held = {a: i for a, i in self._held.items() if self._scheduler.is_held(i)}
        self._held[asker] = own_id

    def _info(self) -> Info:
        return Info(
            engine_id=self._config.engine_id,
            vocab_size=self._model.vocab_size,
            max_model_len=self._config.max_model_len,
            num_blocks=self._num_blocks,
            num_free_blocks=self._scheduler.num_free_blocks,
            prefix_hit_rate=self._scheduler.prefix_hit_rate,
            pids=self._pids,
            counts={**self._counts, "malformed_requests": self._rpc.num_malformed},
            is_draining=self._is_draining,
        )


def _started(link: DriverLink) -> RankManifest | None:
    message = link.receive()
    if not isinstance(message, Started):
        raise KvxferError(f"rank start: expected Started, got {type(message).__name__}")
    return message.manifest
