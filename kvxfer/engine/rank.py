"""What runs in each process of an engine. Rank 0 drives; the others answer its steps."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread

import msgspec
import torch
import zmq

from kvxfer.connector.scheduler_side import SchedulerConnector
from kvxfer.engine.collectives import AllReduce, claim_device, end_with_peers, join
from kvxfer.engine.config import Role
from kvxfer.engine.driver import Driver
from kvxfer.engine.links import (
    DRAIN,
    STOP,
    Activity,
    Drained,
    DriverLink,
    Failed,
    Life,
    Output,
    RankLink,
    RankSpec,
    Ready,
    Started,
    keeps_store,
    link_address,
)
from kvxfer.engine.metrics_server import MetricsServer
from kvxfer.engine.rpc import RpcServer
from kvxfer.engine.runner import Runner, engine_identity, model_of
from kvxfer.errors import KvxferError

log = logging.getLogger("kvxfer.engine")
_life = msgspec.msgpack.Decoder(Life)

SWITCH_INTERVAL_S = 2e-4
"""How long a thread may keep the interpreter while another waits. With Python's 5 ms an IO thread
beside a busy engine thread answers in 10 ms, with this in 45 us (measured)."""
_LAST_GRACE_S = 8.0
"""A rank that was told to end, lost its parent or failed, and still hangs after this (in a
collective with a dead rank, say) ends itself. Below the parent's own STOP_TIMEOUT_S."""


def rank_main(spec: RankSpec, parent: Connection) -> None:
    """A process's life: one configuration after the other, until the parent says stop or goes."""
    # Ctrl-C, systemd and timeout(1) reach the whole group: the parent decides when its ranks end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    torch.set_num_threads(1)
    # What is loaded by now stays. Not looked at again, a collection takes 1 ms instead of 100.
    gc.freeze()
    orders = _Orders(parent)
    with ExitStack() as stack:
        stack.callback(_clean_up, spec, orders)
        try:
            device = claim_device(spec.device)
            process = _Process(spec, parent, orders, join(spec, device, stack))
        except (KvxferError, OSError, RuntimeError) as e:
            _report_failure(parent, e)
            return
        if spec.peer_pids:
            end_with_peers(spec.peer_pids, lambda: orders.is_last)
        while (life := orders.next()) is not None and _live(process, life):
            gc.collect()  # pools and sockets of that life that reference cycles still hold


def _clean_up(spec: RankSpec, orders: _Orders) -> None:
    """Remove the store. The parent does so too, unless it was killed."""
    if orders.is_orphan or not keeps_store(spec.collectives):
        shutil.rmtree(Path(spec.store).parent, ignore_errors=True)


class _Orders:
    """What the parent says, heard by a thread of its own: ends the process if nothing else does."""

    def __init__(self, parent: Connection) -> None:
        self._parent = parent
        self._lives: deque[Life | None] = deque()
        # For polling: readable when the present life is over.
        self.fileno = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
        # For polling: readable when the present life is to drain.
        self.drain_fileno = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.is_last = False  # nothing follows: this process is to end
        self.is_orphan = False  # the parent ended without saying so
        Thread(target=self._listen, name="orders", daemon=True).start()

    def next(self) -> Life | None:
        os.eventfd_read(self.fileno)
        with suppress(BlockingIOError):  # who was told to drain was the life before
            os.eventfd_read(self.drain_fileno)
        return self._lives.popleft()

    def _listen(self) -> None:
        while (order := self._receive()) != STOP:
            if order == DRAIN:
                os.eventfd_write(self.drain_fileno, 1)
            else:
                self._say(_life.decode(order))
        self.is_last = True
        self._say(None)
        _end_late()

    def _receive(self) -> bytes:
        try:
            return self._parent.recv_bytes()
        except (EOFError, OSError):
            self.is_orphan = True
            return STOP

    def _say(self, life: Life | None) -> None:
        self._lives.append(life)
        os.eventfd_write(self.fileno, 1)


def _end_late() -> None:
    time.sleep(_LAST_GRACE_S)
    os._exit(1)


@dataclass(frozen=True, slots=True)
class _Process:
    """What stays from one life to the next. ``all_reduce``: None with one rank."""

    spec: RankSpec
    parent: Connection
    orders: _Orders
    all_reduce: AllReduce | None


def _live(process: _Process, life: Life) -> bool:
    """One life, to its end; False if it could not begin."""
    logging.basicConfig(
        level=life.config.kv.log_level,
        format=f"%(levelname)s {life.config.engine_id} rank {process.spec.tp_rank}: %(message)s",
        force=True,
    )
    with ExitStack() as stack:
        try:
            serve = _start(process, life, stack)
        except (KvxferError, OSError, RuntimeError, ValueError) as e:
            _report_failure(process.parent, e)
            return False
        try:
            serve()
        except Exception as e:
            # What is closed from here on may wait for a rank that has gone.
            Thread(target=_end_late, name="end", daemon=True).start()
            if not isinstance(e, KvxferError):
                raise
            log.error("%s", e)  # noqa: TRY400 - said in one line: the parent ends the engine
            sys.exit(1)
    return True


def _report_failure(parent: Connection, error: Exception) -> None:
    with suppress(OSError):  # the parent may have gone
        parent.send_bytes(msgspec.msgpack.encode(Failed(type(error).__name__, str(error))))


def _start(process: _Process, life: Life, stack: ExitStack) -> Callable[[], None]:
    spec, config = process.spec, life.config
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stack.callback(context.term)
    if spec.tp_rank:
        link = RankLink(context, link_address(life.token, spec.tp_rank))
        stack.callback(link.close)
    else:
        rpc = RpcServer(context, spec.listen_host, spec.listen_port, config.kv)
        stack.callback(rpc.close)
        ranks = range(1, config.tp_size)
        links = [DriverLink(context, link_address(life.token, rank)) for rank in ranks]
        for each in links:
            stack.callback(each.close)
    runner = Runner(
        config,
        tp_rank=spec.tp_rank,
        incarnation=life.incarnation,
        all_reduce=process.all_reduce,
    )
    stack.callback(runner.close)
    if spec.tp_rank:
        return lambda: _follow(runner, link)
    model = model_of(config)
    connector = None
    if config.role is not Role.ALONE:
        connector = SchedulerConnector(
            config.kv,
            engine_identity(config, model, life.incarnation),
            can_send=config.role in {Role.PREFILL, Role.BOTH},
            can_receive=config.role in {Role.DECODE, Role.BOTH},
        )
        stack.callback(connector.shutdown)
    metrics = None
    if config.metrics is not None:
        metrics = MetricsServer(config.metrics)
        stack.callback(metrics.close)
    driver = Driver(config, model, runner, links, rpc, connector, spec.peer_pids, metrics)
    driver.gather()
    drained = msgspec.msgpack.encode(Drained())
    manifest = runner.manifest
    ready = Ready(
        rpc.endpoint,
        manifest.control_endpoint if manifest else "",
        metrics.endpoint if metrics else "",
    )
    process.parent.send_bytes(msgspec.msgpack.encode(ready))
    orders = process.orders
    return lambda: driver.run(
        orders.fileno, orders.drain_fileno, lambda: process.parent.send_bytes(drained)
    )


def _follow(runner: Runner, link: RankLink) -> None:
    """Answer rank 0's steps; tell it when the connector has something to report between them."""
    link.send(Started(runner.manifest))
    poller = zmq.Poller()
    poller.register(link.socket, zmq.POLLIN)
    activity = runner.connector.activity_fileno() if runner.connector else None
    if activity is not None:
        poller.register(activity, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if link.socket in ready:
            step = link.receive()
            if step is None:
                return
            link.send(Output(runner.execute(step)))
            if activity is not None:
                poller.register(activity, zmq.POLLIN)
        elif activity in ready:
            # Said once: the step that it causes collects everything, then the poller listens again.
            poller.unregister(activity)
            link.send(Activity())
