"""What runs in each process of an engine. Rank 0 drives; the others answer its steps."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from threading import Thread

import msgspec
import torch
import torch.distributed as dist
import zmq
from torch import Tensor

from kvxfer.connector.scheduler_side import SchedulerConnector
from kvxfer.engine.config import EngineConfig, Role
from kvxfer.engine.driver import Driver
from kvxfer.engine.links import Activity, DriverLink, Output, RankLink, Started, link_address
from kvxfer.engine.model_config import load_model_config
from kvxfer.engine.rpc import RpcServer
from kvxfer.engine.runner import Runner, cache_facts
from kvxfer.errors import KvxferError

log = logging.getLogger("kvxfer.engine")

SWITCH_INTERVAL_S = 2e-4
"""How long a thread may keep the interpreter while another waits. With Python's 5 ms an IO thread
beside a busy engine
thread answers in 10 ms, with this in 45 us (measured)."""
COLLECTIVE_TIMEOUT_S = 60.0
LAST_GRACE_S = 8.0
"""A rank that was told to end, or lost its parent, and still hangs after this (in a collective with
a dead rank, say) ends
itself. Below the parent's own STOP_TIMEOUT_S."""


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What one process is told when it starts. ``token``: random, names the links; ``store``:
    the file that gloo meets at.
    """

    config: EngineConfig
    tp_rank: int
    incarnation: bytes
    token: str
    store: str
    listen_host: str
    listen_port: int
    peer_pids: tuple[int, ...] = ()


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """To the parent: this rank serves (``endpoint``: the request channel, from rank 0)."""

    endpoint: str
    kv_endpoint: str = ""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """To the parent: this rank cannot start, and why. ``kind``: the error's class."""

    kind: str
    error: str


def rank_main(spec: RankSpec, parent: Connection) -> None:
    """A process's whole life: start, tell the parent, serve until the pipe to it closes or
    says stop.
    """
    # Ctrl-C reaches the whole foreground group: the parent decides when its ranks end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    torch.set_num_threads(1)
    Thread(target=_end_with_parent, args=(parent,), name="end-with-parent", daemon=True).start()
    logging.basicConfig(
        level=spec.config.kv.log_level,
        format=f"%(levelname)s {spec.config.engine_id} rank {spec.tp_rank}: %(message)s",
    )
    with ExitStack() as stack:
        try:
            serve = _start(spec, stack, parent)
        except (KvxferError, OSError, RuntimeError, ValueError) as e:
            parent.send_bytes(msgspec.msgpack.encode(Failed(type(e).__name__, str(e))))
            return
        serve()


def _end_with_parent(parent: Connection) -> None:
    wait([parent])  # readable: told to stop, or closed
    time.sleep(LAST_GRACE_S)
    os._exit(1)


def _start(spec: RankSpec, stack: ExitStack, parent: Connection) -> Callable[[], None]:
    config = spec.config
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stack.callback(context.term)
    if spec.tp_rank:
        link = RankLink(context, link_address(spec.token, spec.tp_rank))
        stack.callback(link.close)
    else:
        rpc = RpcServer(context, spec.listen_host, spec.listen_port)
        stack.callback(rpc.close)
        ranks = range(1, config.tp_size)
        links = [DriverLink(context, link_address(spec.token, rank)) for rank in ranks]
        for each in links:
            stack.callback(each.close)
    runner = Runner(
        config,
        tp_rank=spec.tp_rank,
        incarnation=spec.incarnation,
        all_reduce=_join(spec, stack),
    )
    stack.callback(runner.close)
    if spec.tp_rank:
        return lambda: _follow(runner, link, parent)
    model = load_model_config(config.model, num_kv_heads=config.num_kv_heads, dtype=config.dtype)
    connector = None
    if config.role is not Role.ALONE:
        connector = SchedulerConnector(
            config.kv,
            engine_id=config.engine_id,
            incarnation=spec.incarnation,
            facts=cache_facts(config, model),
            tp_size=config.tp_size,
            pp_size=1,
            block_tokens=config.block_size,
            layout=config.layout,
            can_send=config.role in {Role.PREFILL, Role.BOTH},
            can_receive=config.role in {Role.DECODE, Role.BOTH},
        )
    driver = Driver(config, model, runner, links, rpc, connector, spec.peer_pids)
    driver.gather()
    manifest = runner.manifest
    ready = Ready(rpc.endpoint, manifest.control_endpoint if manifest else "")
    parent.send_bytes(msgspec.msgpack.encode(ready))
    return lambda: driver.run(parent)


def _join(spec: RankSpec, stack: ExitStack) -> Callable[[Tensor], Tensor] | None:
    if spec.config.tp_size == 1:
        return None
    dist.init_process_group(
        "gloo",
        init_method=f"file://{spec.store}",
        rank=spec.tp_rank,
        world_size=spec.config.tp_size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    stack.callback(dist.destroy_process_group)

    def all_reduce(partial: Tensor) -> Tensor:
        dist.all_reduce(partial)
        return partial

    return all_reduce


def _follow(runner: Runner, link: RankLink, parent: Connection) -> None:
    """Answer rank 0's steps; tell it when the connector has something to report between them."""
    link.send(Started(runner.manifest))
    poller = zmq.Poller()
    poller.register(link.socket, zmq.POLLIN)
    poller.register(parent.fileno(), zmq.POLLIN)
    activity = runner.connector.activity_fileno() if runner.connector else None
    if activity is not None:
        poller.register(activity, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if parent.fileno() in ready:
            return
        if link.socket in ready:
            link.send(Output(runner.execute(link.receive())))
            if activity is not None:
                poller.register(activity, zmq.POLLIN)
        elif activity in ready:
            # Said once: the step that it causes collects everything, then the poller listens again.
            poller.unregister(activity)
            link.send(Activity())
