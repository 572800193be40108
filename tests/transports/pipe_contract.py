"""What any pipe must do (kvxfer/transports/pipe.py), between two processes and with real bytes.

A test of a pipe is ``check_pipe(PipeCase(make_pipe), scenario)`` for each of ``scenario_names()``;
``make_pipe`` is a function of a module, because it is called in other processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing as mp
import os
import random
import re
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from _pytest.mark import ParameterSet

from kvxfer.transports.pipe import Pipe, Slots
from tests.helpers import run_pair
from tests.transports.pipe_nodes import TIMEOUT_S, Ended, MakePipe, Node, PipeCase, Stage

__all__ = ["NUM_OPENS_ON_GPU", "MakePipe", "PipeCase", "check_pipe", "scenario_names"]

SMALL = Slots(num_slots=4, slot_nbytes=256 << 10)
LARGE = Slots(num_slots=8, slot_nbytes=2 << 20)
NUM_OPENS_ON_GPU = 60
"""Connections that come and go there: each takes its memory from the driver, and gives it back."""
NUM_LATE = 4
"""Threads, and descriptors, that a library or CUDA may add once, however late. A leak of one a
connection adds 45 and more."""


# ------------------------------------------------------------------ what leaks


def resident_nbytes(device: torch.device) -> int:
    """Staging and all else that this process holds on the device."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Held:
    """Threads of this process by name, and its descriptors by what they are open on."""

    threads: Counter[str]
    fds: Counter[str]

    @classmethod
    def now(cls) -> Held:
        """What ends meanwhile is left out."""
        threads: Counter[str] = Counter()
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                threads[(task / "comm").read_text().strip()] += 1
        fds: Counter[str] = Counter()
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                # "socket:[4711]": the number says nothing
                fds[re.sub(r":\[\d+\]$", "", os.readlink(f"/proc/self/fd/{fd}"))] += 1
        return cls(threads, fds)


def leaked(held: Sequence[Held]) -> str:
    """What is more after each of some equal numbers of connections than before it, or more by
    NUM_LATE after all of them; empty if nothing is. What came once is no leak.
    """
    found = []
    for what in ("threads", "fds"):
        each: list[Counter[str]] = [getattr(one, what) for one in held]
        nums = [one.total() for one in each]
        if nums[-1] - nums[0] > NUM_LATE or all(a < b for a, b in pairwise(nums)):
            more = dict(each[-1] - each[0])
            found.append(f"{what}: {nums} in turn, more in the end: {more} of {dict(each[-1])}")
    return "; ".join(found)


def quarantined_nbytes(pipe: Pipe) -> int:
    """What the pipe says that it keeps because an operation on it has no end."""
    return int(getattr(pipe, "quarantined_nbytes", 0))


# ------------------------------------------------------------------ scenarios


def sizes_of(slots: Slots, num: int) -> list[int]:
    """1 byte to a whole slot."""
    some = random.Random(7)
    edges = [1, slots.slot_nbytes, 2, slots.slot_nbytes - 1, 4096, 4097, 8191, 8193]
    return edges + [some.randint(1, slots.slot_nbytes) for _ in range(num - len(edges))]


def _source_of_bytes(case: PipeCase, channel: Connection) -> None:
    node = Node(case, channel)
    node.sizes[1] = sizes_of(SMALL, 60)
    node.until_given(1)
    node.check()
    node.stage("compared")
    node.close_lane(1)
    node.close()


def _sink_of_bytes(case: PipeCase, channel: Connection) -> None:
    node = Node(case, channel)
    node.slow_credits = True
    node.attach(1, SMALL)
    node.until_taken(1, 60)
    node.check()
    node.stage("compared")
    node.close_lane(1)
    node.close()


def _source_of_three(case: PipeCase, channel: Connection) -> None:
    node = Node(case, channel)
    node.sizes = {1: sizes_of(SMALL, 40), 2: sizes_of(SMALL, 40)[::-1]}
    node.slow_credits = True
    node.attach(3, SMALL)
    node.until_given(1)
    node.until_given(2)
    node.until_taken(3, 30)
    node.check()
    node.stage("compared")
    node.close()  # with all lanes


def _sink_of_three(case: PipeCase, channel: Connection) -> None:
    node = Node(case, channel)
    node.sizes = {3: sizes_of(SMALL, 30)}
    node.slow_credits = True
    node.attach(1, SMALL)
    node.attach(2, SMALL)
    node.until_taken(1, 40)
    node.until_taken(2, 40)
    node.until_given(3)
    node.check()
    node.stage("compared")
    node.close()


_CLOSE_ROUNDS = 8


def _source_closes(case: PipeCase, channel: Connection) -> None:
    """Even connections end at the source, odd ones at the sink, with chunks on their way."""
    node = Node(case, channel)
    node.sizes = {0: [SMALL.slot_nbytes] * 400}  # goes on beside them
    node.sizes |= {n: [LARGE.slot_nbytes] * 10_000 for n in range(1, _CLOSE_ROUNDS + 1)}
    before_nbytes = 0
    for number in range(1, _CLOSE_ROUNDS + 1):
        node.until_attached(number)
        if number % 2 == 0:
            _until_sent(node, number, 20)
            node.close_lane(number)
            node.until_ended(number)
        else:
            node.until_ended(number)
            node.close_lane(number)
        before_nbytes = before_nbytes or resident_nbytes(node.device)
    _check_given_back(node, before_nbytes)
    node.until_given(0)
    assert 0 not in node.broken, node.broken
    node.stage("compared")
    node.close()


def _until_sent(node: Node, number: int, num_chunks: int) -> None:
    giver = node.givers[number]
    node.until(lambda: giver.num_sent >= num_chunks or number in node.broken, "chunks sent")


def _sink_closes(case: PipeCase, channel: Connection) -> None:
    node = Node(case, channel)
    node.attach(0, SMALL)
    before_nbytes = 0
    for number in range(1, _CLOSE_ROUNDS + 1):
        node.attach(number, LARGE)
        if number % 2 == 0:
            node.until_ended(number)
            node.close_lane(number)
        else:
            node.until_taken(number, 5, or_broken=True)
            node.close_lane(number)
            node.until_ended(number)
        before_nbytes = before_nbytes or resident_nbytes(node.device)
    _check_given_back(node, before_nbytes)
    node.until_taken(0, 400)
    assert 0 not in node.broken, node.broken
    node.stage("compared")
    node.close()


def _check_given_back(node: Node, before_nbytes: int) -> None:
    """Soon: what is under way at a close ends first."""
    for _ in range(node.case.num_looks):
        grown = resident_nbytes(node.device) - before_nbytes
        allowed = 2 * LARGE.nbytes + quarantined_nbytes(node.pipe)
        if grown < allowed:
            return
        node.turn(0.0)
        time.sleep(0.01)
    raise AssertionError(f"staging: {grown} bytes more after {_CLOSE_ROUNDS} connections")


_KILLS = 4


def _survivor_gives(case: PipeCase, channel: Connection) -> None:
    """Its sinks are killed in mid-transfer; then it serves one that is not."""
    node = Node(case, channel)
    node.sizes = {n: [LARGE.slot_nbytes] * 100_000 for n in range(_KILLS)}
    node.sizes[_KILLS] = sizes_of(SMALL, 40)
    _survive(node, lambda n: n in node.givers, lambda n: node.givers[n].num_credited >= 20)
    node.until_given(_KILLS)
    node.stage("compared")
    node.close()


def _survivor_takes(case: PipeCase, channel: Connection) -> None:
    """Its sources are killed in mid-transfer; then it takes from one that is not."""
    node = Node(case, channel)

    def attached(number: int) -> bool:
        if f"up {number}" in node.stages and number not in node.takers:
            node.attach(number, LARGE)
        return number in node.takers

    _survive(node, attached, lambda n: node.takers[n].num_taken >= 20)
    node.attach(_KILLS, SMALL)
    node.until_taken(_KILLS, 40)
    node.stage("compared")
    node.close()


def _survive(node: Node, attached: Callable[[int], bool], is_going: Callable[[int], bool]) -> None:
    before_nbytes = 0
    for number in range(_KILLS):
        node.until(partial(attached, number), "attached")
        node.until(partial(is_going, number), "going")
        node.say(Stage(f"kill {number}"))
        # ZeroMQ says it later; until then the pipe is driven on, and may say it first.
        node.until_ended(number)
        if node.case.is_broken_by_death:
            node.until(partial(node.broken.__contains__, number), "PipeBroken")
        node.close_lane(number)
        node.turn(0.0)
        before_nbytes = before_nbytes or resident_nbytes(node.device)
    grown = resident_nbytes(node.device) - before_nbytes
    allowed = 2 * LARGE.nbytes + quarantined_nbytes(node.pipe)
    assert grown < allowed, f"staging: {grown} bytes more after {_KILLS} deaths"
    kept_nbytes = quarantined_nbytes(node.pipe)
    assert node.case.quarantines or not kept_nbytes, f"staging: {kept_nbytes} bytes kept for good"


def _victim(case: PipeCase, channel: Connection, number: int, is_sink: bool) -> None:
    """Goes on until it is killed; in its own process."""
    node = Node(case, channel)
    if is_sink:
        node.attach(number, LARGE)
    else:
        node.sizes[number] = [LARGE.slot_nbytes] * 100_000
        node.say(Stage(f"up {number}"))

    def die() -> None:
        while f"kill {number}" not in node.stages:
            time.sleep(0.001)
        with node.reading, node.writing:
            os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die, daemon=True).start()
    node.until(lambda: False, "killed")


def _keeper(case: PipeCase, channel: Connection, *, is_sink: bool) -> None:
    """Starts victims one after the other, says when they are dead, and is the last peer itself."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    for number in range(_KILLS):
        victim = context.Process(target=_victim, args=(case, channel, number, is_sink))
        victim.start()
        victim.join(TIMEOUT_S)
        code = victim.exitcode
        victim.kill()
        assert code == -signal.SIGKILL, f"victim: exit code {code}"
        time.sleep(0.3)
        channel.send(Ended(number))
        _read_rest(channel, number)
    node = Node(case, channel)
    if is_sink:
        node.attach(_KILLS, SMALL)
        node.until_taken(_KILLS, 40)
    else:
        node.sizes[_KILLS] = sizes_of(SMALL, 40)
        node.until_given(_KILLS)
    node.stage("compared")
    node.close()


def _read_rest(channel: Connection, number: int) -> None:
    """What was for the dead, up to the survivor's last word on that connection."""
    while True:
        assert channel.poll(TIMEOUT_S), "survivor: no word"
        if channel.recv() == Ended(number):
            return


def _source_of_many(case: PipeCase, channel: Connection) -> None:
    """Connections come and go; nothing stays."""
    node = Node(case, channel)

    def serve(number: int) -> None:
        node.sizes[number] = [SMALL.slot_nbytes, 1]
        node.until_ended(number)
        node.close_lane(number)

    _check_no_leak(node, serve)
    node.stage("counted")
    node.close()


def _sink_of_many(case: PipeCase, channel: Connection) -> None:
    node = Node(case, channel)

    def take(number: int) -> None:
        node.attach(number, SMALL)
        node.until_taken(number, 2)
        node.close_lane(number)
        node.until_ended(number)

    _check_no_leak(node, take)
    node.stage("counted")
    node.close()


def _check_no_leak(node: Node, connect: Callable[[int], None]) -> None:
    """What there is after a quarter of the connections, and after each quarter that follows."""
    num_opens = node.case.num_opens
    held: list[Held] = []
    before_nbytes = 0
    for number in range(1, num_opens + 1):
        connect(number)
        if number % (num_opens // 4) == 0:
            held.append(Held.now())
            before_nbytes = before_nbytes or resident_nbytes(node.device)
    node.check()
    leaks = leaked(held)
    assert not leaks, f"{num_opens} connections: {leaks}"
    # A sixth of what three quarters had: neither their staging nor what the library has on top
    grown, limit = resident_nbytes(node.device) - before_nbytes, num_opens * SMALL.nbytes // 8
    assert grown < limit, f"{grown} bytes more after {num_opens} connections"
    assert quarantined_nbytes(node.pipe) == 0


_Side = Callable[[PipeCase, Connection], None]
SCENARIOS: dict[str, tuple[_Side, _Side]] = {
    "every byte of every slot and generation": (_source_of_bytes, _sink_of_bytes),
    "connections do not mix": (_source_of_three, _sink_of_three),
    "closed in the middle": (_source_closes, _sink_closes),
    "killed while receiving": (_survivor_gives, partial(_keeper, is_sink=True)),
    "killed while sending": (partial(_keeper, is_sink=False), _survivor_takes),
    "many connections leave nothing": (_source_of_many, _sink_of_many),
}


LONG = {"killed while receiving", "killed while sending", "many connections leave nothing"}


def check_pipe(case: PipeCase, scenario: str, *, timeout_s: float = 240.0) -> None:
    """Run one of SCENARIOS in two processes (and in victims). Fails with what went wrong there."""
    source, sink = SCENARIOS[scenario]
    with TemporaryDirectory() as folder:
        reports = [Path(folder, side) for side in ("source", "sink")]
        sides = [
            partial(_run, side, case, report)
            for side, report in zip((source, sink), reports, strict=True)
        ]
        try:
            run_pair(*sides, timeout_s=timeout_s)
        except AssertionError as exc:
            said = [f"{path.name}: {path.read_text()}" for path in reports if path.exists()]
            raise AssertionError("\n".join([f"{case.make_pipe}: {exc}", *said])) from exc


def _run(side: _Side, case: PipeCase, report: Path, channel: Connection) -> None:
    random.seed(1)
    torch.set_num_threads(1)
    gc.freeze()  # each look at the memory collects: what is imported would take 0.1 s each time
    try:
        side(case, channel)
    except BaseException:
        report.write_text(traceback.format_exc())
        raise


def scenario_names() -> Sequence[str]:
    """For parametrize."""
    return tuple(SCENARIOS)


def scenario_params() -> list[ParameterSet]:
    """The same, those that take 10 s marked."""
    return [
        pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in SCENARIOS
    ]
