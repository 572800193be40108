"""What the processes of an engine are in a storm: the reference engine with a synthetic model, and
a door for what is to happen to them.

Scheduler, driver, connector and wires are the real ones. A "forward" checks the KV of all tokens
that the request has, then writes that of its new ones: see :mod:`tests.chaos.content`.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import torch
import zmq
from torch import Tensor

from kvxfer.connector import rank_service
from kvxfer.connector.rank_service import RankService
from kvxfer.connector.scheduler_side import SchedulerConnector
from kvxfer.engine import rank as rank_module
from kvxfer.engine.attention import attention_backend
from kvxfer.engine.config import EngineConfig
from kvxfer.engine.model_config import load_model_config, shard_for
from kvxfer.engine.rank_cache import RankCache
from kvxfer.engine.request import Request
from kvxfer.engine.runner import Runner
from kvxfer.engine.scheduler import Scheduler
from kvxfer.engine.steps import Sample, SchedulerOutput, StepOutput
from kvxfer.testing.faults import install
from kvxfer.transports import shm_direct
from tests.chaos.content import PlaneView, Words, names_of, next_token
from tests.chaos.deeds import DEEDS, HELD, HELD_STEP, NOBODYS, Deed, Lines
from tests.chaos.mangling import MESSAGE, Mangler
from tests.chaos.network import enter_network
from tests.chaos.standing import write_on_signal
from tests.connector.inside import service_behind, slots_behind

_PTRACE_SEIZE, _PTRACE_INTERRUPT, _PTRACE_DETACH = 0x4206, 0x4207, 17
_WALL = 0x40000000
"""For waitpid: also of threads that are no children."""
WRONG = 0
"""The token that a request gets whose KV is not its own; no prompt and no answer has it."""
STOP_SIGNALS = {
    1.0: signal.SIGHUP,
    3.0: signal.SIGQUIT,
    5.0: signal.SIGTRAP,
    10.0: signal.SIGUSR1,
}
"""Seconds that a single thread stands still when it gets this signal.

The handler is ``sleep`` of the C library, whose argument is the number of the signal. It may be
called in a handler, and the thread stands wherever it was: with a lock, or with the interpreter.
"""


SLOW_PIECE_NBYTES = 64 << 10
FLIPS, WRONGS = "flips.jsonl", "wrong.jsonl"
"""Files of a storm: which transfers had a bit flipped, and which KV was not a request's own."""


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine's processes are told before they begin. ``planted``: the name of a fault;
    ``faults``: of its wires, see :mod:`kvxfer.testing.faults`. ``network``: the process whose
    network its connector has; 0: that of this host.

    ``slow_s``: if not 0, copies run on the copy thread, in small pieces, each of which takes so
    long after the last look whether it is still wanted.
    """

    folder: str
    engine_id: str
    seed: int
    slow_s: float = 0.0
    planted: str = ""
    faults: str = ""
    network: int = 0


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a process says of itself when it serves. ``threads``: name by thread id."""

    pid: int
    rank: int
    door: str
    incarnation: bytes
    control: str
    data: dict[str, str]
    threads: dict[int, str]


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Through the door. ``number``: of the injection. ``mangle``: how, and ``mangles``: what,
    MESSAGE or CHUNK; ``rest``: nothing any more. ``clock_s``: how far the connector's clock jumps;
    ``wall_s``: time.time(). ``trim``: give free memory back to the kernel. ``state``: write down
    what the connector has to do, into a file.
    """

    number: int = 0
    mangle: tuple[str, ...] = ()
    mangles: str = MESSAGE
    share: float = 0.0
    duration_s: float = 0.0
    rest: bool = False
    clock_s: float = 0.0
    wall_s: float = 0.0
    reset: bool = False
    trim: bool = False
    state: bool = False


@dataclass(slots=True)
class Offsets:
    """Of this process's clocks. ``reset_until_s``: the first step before then resets the cache, as
    the injection of that number has it.
    """

    deeds: Lines
    clock_s: float = 0.0
    wall_s: float = 0.0
    reset_until_s: float = 0.0
    reset_of: int = 0

    def reset(self, connectors: Sequence[SchedulerConnector]) -> None:
        """Before a step: the cache, where that was asked for."""
        if time.monotonic() < self.reset_until_s:
            self.reset_until_s = 0.0
            for connector in connectors:
                connector.reset_cache()
                self.deeds.add(Deed(self.reset_of, "reset"))


schedulers: list[SchedulerConnector] = []
"""The scheduler side of this process, where it has one."""


@dataclass(frozen=True, slots=True)
class Reach:
    """What reaches into this process. ``door``: a socket of this host, whatever network the
    connector gets.
    """

    spec: Spec
    mangler: Mangler
    door: socket.socket
    name: str
    wrong: Lines
    deeds: Lines


def prepare(spec: Spec) -> Reach:
    """What a process needs so that a storm can reach it: first of all in it."""
    write_on_signal(Path(spec.folder))
    _log_errors_to(Path(spec.folder) / f"{os.getpid()}.errors")
    door = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    name = f"kvxfer-storm-{spec.engine_id}-{os.getpid()}"
    door.bind(f"\0{name}")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    for number in STOP_SIGNALS.values():
        libc.signal(int(number), ctypes.cast(libc.sleep, ctypes.c_void_p))
    _send_one_without_a_copy()
    folder = Path(spec.folder)
    deeds = Lines(folder / DEEDS)
    mangler = Mangler(spec.seed, lambda order, what: deeds.add(Deed(order, what)))
    mangler.install()
    if spec.faults:
        install(f"{spec.faults};seed={spec.seed}")
        flips = logging.getLogger("kvxfer.testing")
        flips.setLevel(logging.INFO)
        flips.addHandler(_FlipsInFile(folder / FLIPS))
        flips.propagate = False
    if spec.planted:
        planted = importlib.import_module("tests.chaos.planted")
        planted.BY_NAME[spec.planted].plant()
    return Reach(spec, mangler, door, name, Lines(folder / WRONGS), deeds)


def _log_errors_to(path: Path) -> None:
    """Of the connector: what raised that must not, with its stack."""
    file = logging.FileHandler(path)  # opened now: a storm looks for descriptors that are more
    file.addFilter(lambda record: record.exc_info is not None)
    log = logging.getLogger("kvxfer.connector")
    log.setLevel(logging.ERROR)
    log.addHandler(file)
    log.propagate = False


def set_up(spec: Spec) -> None:
    """First of all in a process of a reference engine."""
    sys.setrecursionlimit(1000)
    os.environ["UCX_DEBUG_SIGNO"] = "SIGUSR2"  # else SIGHUP makes it write everything to the log
    reach = prepare(spec)
    if spec.slow_s:
        _slow_memory(spec.slow_s)

    class ThisRunner(StormyRunner):
        of_process = reach

    class ThisScheduler(SchedulerConnector):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            schedulers[:] = [self]

    _say_what_is_held(reach)

    # Ranks have nothing to sum; they meet over their links alone
    for name, value in (
        ("Runner", ThisRunner),
        ("SchedulerConnector", ThisScheduler),
        ("join", lambda *_: None),
    ):
        setattr(rank_module, name, value)


def _say_what_is_held(reach: Reach) -> None:
    """Whenever the scheduler has HELD_STEP requests more than it ever had."""
    add, most = Scheduler.add, 0

    def add_and_say(self: Scheduler, request: Request) -> None:
        nonlocal most
        add(self, request)
        number = len(self._live)
        if number >= most + HELD_STEP:
            most = number
            reach.deeds.add(Deed(NOBODYS, HELD, reach.spec.engine_id, number))

    Scheduler.add = add_and_say  # type: ignore[method-assign]


class _FlipsInFile(logging.Handler):
    """One line each, (nonce, life of the sink)."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._lines = Lines(path)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.add(record.args)


def _send_one_without_a_copy() -> None:
    """With the first such message pyzmq makes a thread and sockets of its own, which stay."""
    with zmq.Context() as context, ExitStack() as stack:
        first, second = (stack.enter_context(context.socket(zmq.PAIR)) for _ in range(2))
        first.bind("inproc://first")
        second.connect("inproc://first")
        first.send(bytes(1 << 20), copy=False)
        second.recv()


def _slow_memory(slow_s: float) -> None:
    read_of: Any = shm_direct._Read
    look = read_of._is_cancelled

    def look_and_wait(read: object) -> bool:
        is_cancelled: bool = look(read)
        time.sleep(slow_s)
        return is_cancelled

    for owner, name, value in (
        (rank_service, "SMALL_NBYTES", 1),
        (shm_direct, "JOB_NBYTES", SLOW_PIECE_NBYTES),
        (read_of, "_is_cancelled", look_and_wait),
    ):
        setattr(owner, name, value)
    install(f"read:slow={slow_s * 1000:g}ms")


class StormyRunner(Runner):
    """A rank with the synthetic model."""

    of_process: Reach

    def __init__(
        self,
        config: EngineConfig,
        *,
        tp_rank: int,
        incarnation: bytes,
        all_reduce: Callable[[Tensor], Tensor] | None,
    ) -> None:
        if self.of_process.spec.network:
            # Channels to the client and to other ranks are there already, and stay where they are
            enter_network(self.of_process.spec.network)
        self._config = config
        self._tp_rank = tp_rank
        self._device = torch.device(config.rank_devices[tp_rank])
        model = load_model_config(
            config.model, num_kv_heads=config.num_kv_heads, dtype=config.dtype
        )
        shard = shard_for(model, tp_rank, config.tp_size)
        self.cache = RankCache(config, model, shard, attention_backend(config.layout))
        self._sequences = {}
        self._planes = [PlaneView(each, self.cache.buffer) for each in self.cache.regions]
        self.connector = self._connect(model, incarnation)
        assert self.connector is not None
        self._offsets = open_door(
            self.of_process, service_behind(self.connector), tp_rank, incarnation
        )

    def execute(self, step: SchedulerOutput) -> StepOutput:
        """One step; before it the scheduler's cache is reset, where that was asked for."""
        self._offsets.reset(schedulers)
        self._suspects: dict[str, dict[str, object]] = {}
        output = super().execute(step)
        said = output.kv_connector_output
        failed = (said.failed_recving if said is not None else None) or {}
        for request_id, what in self._suspects.items():
            # A load that was part of this step has failed: what was computed with it is dropped
            if request_id not in failed:
                self._tell_wrong(**what)
        return output

    def _compute(self, num_scheduled_tokens: Mapping[str, int]) -> tuple[Sample, ...]:
        samples: list[Sample] = []
        for req_id, num_new in num_scheduled_tokens.items():
            sequence = self._sequences[req_id]
            lo = sequence.num_computed_tokens
            hi = lo + num_new
            names = names_of(sequence.token_ids)
            ids = sequence.block_ids[0]
            is_right = self._check(req_id, ids, names, lo)
            for plane in self._planes:
                plane.write(ids, names, lo, hi)
            if hi == len(sequence.token_ids) and self._tp_rank == 0:
                samples.append(Sample(req_id, next_token(names[-1]) if is_right else WRONG, 1.0))
        return tuple(samples)

    def _check(self, req_id: str, ids: list[int], names: Words, num_tokens: int) -> bool:
        if not num_tokens:
            return True
        for plane in self._planes:
            wrong = plane.first_wrong(ids, names, num_tokens)
            if wrong is not None:
                token, head = wrong
                self._suspects[req_id] = dict(
                    request=req_id,
                    rank=self._tp_rank,
                    layer=plane.region.layer,
                    plane=plane.region.plane,
                    head=head,
                    token=token,
                    of=num_tokens,
                    block=ids[token // self._config.block_size],
                )
                return False
        return True

    def _tell_wrong(self, **what: object) -> None:
        reach = self.of_process
        reach.wrong.add({"engine": reach.spec.engine_id, "pid": os.getpid(), **what})


# ------------------------------------------------------------------ the door
#
# All that a storm touches behind the connector's public face.


def open_door(reach: Reach, service: RankService, rank: int, incarnation: bytes) -> Offsets:
    """Obey orders from now on, and say so in a file."""
    offsets = Offsets(reach.deeds)
    service.io.now = lambda: time.monotonic() + offsets.clock_s
    wall = time.time
    time.time = lambda: wall() + offsets.wall_s
    doors = threading.Thread(
        target=_serve_door,
        args=(reach, service, offsets),
        daemon=True,
    )
    doors.name = "door"
    doors.start()
    manifest = service.manifest
    facts = Facts(
        pid=os.getpid(),
        rank=rank,
        door=reach.name,
        incarnation=incarnation,
        control=manifest.control_endpoint,
        data=dict(manifest.data_endpoints),
        threads={each.native_id or 0: each.name for each in threading.enumerate()},
    )
    path = Path(reach.spec.folder) / f"{os.getpid()}.facts"
    path.with_suffix(".new").write_bytes(msgspec.json.encode(facts))
    path.with_suffix(".new").rename(path)
    return offsets


def _serve_door(reach: Reach, service: RankService, offsets: Offsets) -> None:
    decoder = msgspec.json.Decoder(Order)
    while True:
        order = decoder.decode(reach.door.recv(4096))
        if order.state:
            _write_state(reach.spec, service)
        offsets.clock_s += order.clock_s
        offsets.wall_s += order.wall_s
        if order.clock_s or order.wall_s:
            reach.deeds.add(Deed(order.number, "clock"))
        if order.mangle:
            reach.mangler.begin(
                order.number, order.mangles, order.mangle, order.share, order.duration_s
            )
        if order.rest:
            reach.mangler.end()
        if order.reset:
            offsets.reset_of, offsets.reset_until_s = order.number, time.monotonic() + 1
        if order.trim:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
        service.io.wake()


def _write_state(spec: Spec, service: RankService) -> None:
    """What waits for the IO thread, and what it has of others: plain numbers, even if it stands."""
    io, source = service.io, service.source
    state = {
        "posted": len(io.posted),
        "deferred": len(io.deferred),
        "is_lent": io.is_lent,
        "offers": source.num_offers,
        "readable": source.num_readable,
        "held_blocks": source.num_held_blocks,
        "loads": service.sink.num_loads,
        "slots": slots_behind(service),
    }
    (Path(spec.folder) / f"{os.getpid()}.state").write_text(json.dumps(state), encoding="ascii")


def tell(facts: Facts, order: Order) -> bool:
    """Through the door of a process; False if it has gone, or does not listen."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        try:
            sock.sendto(msgspec.json.encode(order), f"\0{facts.door}")
        except OSError:
            return False
    return True


def trace_thread(thread: int, duration_s: float) -> bool:
    """A thread that blocks all signals, as ZeroMQ's do, stands still for so long; False if it has
    gone, or nobody may trace it here.
    """
    is_held: SimpleQueue[bool] = SimpleQueue()
    threading.Thread(target=_hold, args=(thread, duration_s, is_held), daemon=True).start()
    return is_held.get()


def _hold(thread: int, duration_s: float, is_held: SimpleQueue[bool]) -> None:
    """Only the thread that traces another may let it go, and it is let go when this one ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    if libc.ptrace(_PTRACE_SEIZE, thread, None, None):
        is_held.put(False)
        return
    libc.ptrace(_PTRACE_INTERRUPT, thread, None, None)
    with suppress(ChildProcessError):  # killed meanwhile
        os.waitpid(thread, _WALL)
    is_held.put(True)
    time.sleep(duration_s)
    libc.ptrace(_PTRACE_DETACH, thread, None, None)


def stop_thread(facts: Facts, thread: int, duration_s: float) -> bool:
    """One thread of a process stands still for so long; False if it has gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    tgkill = 234  # of x86-64
    return bool(libc.syscall(tgkill, facts.pid, thread, int(STOP_SIGNALS[duration_s])) == 0)
