"""Wires that misbehave, for tests of everything above them. Only code can ask for it.

    with injected("read:slow=50ms"):        every wire that this process makes meanwhile
        worker = WorkerConnector(...)
    install("read:slow=50ms")               every wire that this process makes from now on

The faults, several are separated by commas:

    "read:stall=5s;nth=2"          the second read hears of nothing for 5 s
    "read:hold"                    every read hears of nothing until ``let_go`` of what
                                   ``injected`` yields
    "read:fail"                    every read breaks
    "read:slow=50ms"               every piece of copying takes 50 ms longer
    "read:blank"                   every read ends well, and no byte has been written
    "read:flip=0.1;seed=3"         in a tenth of the pieces of copying one bit of what was written
    "chunk:drop=0.1;seed=3"        a tenth of the chunks arrive as nobody's
    "chunk:corrupt_header=0.1"     or with a header that cannot be read
    "chunk:duplicate"              every chunk arrives twice
    "chunk:flip=0.1;seed=3"        a tenth of the chunks arrive with one bit of their KV flipped
    "send:die_after=3"             the process is killed when it has sent 3 chunks

``read`` faults are the sink's and work on every wire; ``chunk`` and ``send`` faults are the
source's and work on stream wires. Where a GPU copies, there is no ``slow``, ``blank`` and ``flip``.
A flip is logged, with its transfer, before anybody can see the bit.
"""

from __future__ import annotations

import logging
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np
import torch

from kvxfer.config import Config
from kvxfer.errors import ConfigError
from kvxfer.tensors.strided_copy import gather, scatter
from kvxfer.tensors.strided_index import side_ids
from kvxfer.transfer.costs import Staging, StagingBounds
from kvxfer.transfer.manifest import RankManifest
from kvxfer.transfer.plan import CopyClass, Side
from kvxfer.transfer.wire import Reason
from kvxfer.transports import base, registry
from kvxfer.transports.channel import Context
from kvxfer.transports.copy_thread import Copier, CopyJob
from kvxfer.transports.pipe import MakePipe, Parts
from kvxfer.transports.shm_direct import _Read
from kvxfer.transports.stream_connections import Connection
from kvxfer.transports.stream_packing import ChunkJob
from kvxfer.transports.stream_source import StreamSource
from kvxfer.transports.stream_wire import ChunkHeader, Header, encode

_OF_COPIES = frozenset({"read:slow", "read:blank", "read:flip", "chunk:flip"})
_OF_HEADERS = frozenset({"chunk:drop", "chunk:corrupt_header", "chunk:duplicate"})
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s)")
_log = logging.getLogger("kvxfer.testing")


@dataclass(frozen=True, slots=True)
class Fault:
    """``value``: seconds, a probability or a number; ``nth``: one read, from 1; None: every one."""

    name: str
    value: float
    nth: int | None = None
    seed: int = 0


def parse_faults(text: str) -> tuple[Fault, ...]:
    """The faults of a text. Raises ConfigError that names what is not understood."""
    return tuple(_parse_one(part.strip()) for part in text.split(",")) if text.strip() else ()


def _duration_s(text: str | None) -> float:
    match = _DURATION.fullmatch(text or "")
    if match is None:
        raise ValueError("a duration such as 5s or 50ms")
    return float(match[1]) * (0.001 if match[2] == "ms" else 1.0)


def _probability(text: str | None) -> float:
    if text is None:
        return 1.0
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ValueError("a probability from 0 to 1")
    return value


def _count(text: str | None) -> float:
    if text is None or not re.fullmatch(r"\d{1,9}", text) or int(text) < 1:
        raise ValueError("a whole number above 0")
    return int(text)


def _nothing(text: str | None) -> float:
    if text is not None:
        raise ValueError("no value")
    return 0.0


# name: (how its value is read, the options it has)
_KINDS: Mapping[str, tuple[Callable[[str | None], float], frozenset[str]]] = {
    "read:stall": (_duration_s, frozenset({"nth"})),
    "read:hold": (_nothing, frozenset({"nth"})),
    "read:fail": (_nothing, frozenset({"nth"})),
    "read:slow": (_duration_s, frozenset()),
    "read:blank": (_nothing, frozenset()),
    "read:flip": (_probability, frozenset({"seed"})),
    "chunk:drop": (_probability, frozenset({"seed"})),
    "chunk:corrupt_header": (_probability, frozenset({"seed"})),
    "chunk:duplicate": (_probability, frozenset({"seed"})),
    "chunk:flip": (_probability, frozenset({"seed"})),
    "send:die_after": (_count, frozenset()),
}


def _parse_one(text: str) -> Fault:
    head, *options = text.split(";")
    name, equals, value = head.partition("=")
    if name not in _KINDS:
        raise ConfigError(f"faults: expected one of {', '.join(_KINDS)}, got {name!r}")
    read_value, allowed = _KINDS[name]
    numbers: dict[str, int] = {}
    try:
        parsed = read_value(value if equals else None)
    except ValueError as exc:
        raise ConfigError(f"faults: {name}: expected {exc}, got {value!r}") from exc
    for option in options:
        key, _, number = option.partition("=")
        if key not in allowed or key in numbers or not re.fullmatch(r"\d{1,9}", number):
            raise ConfigError(
                f"faults: {name}: expected options {sorted(allowed)} with whole numbers, "
                f"got {option!r}"
            )
        numbers[key] = int(number)
    if numbers.get("nth") == 0:
        raise ConfigError(f"faults: {name}: expected nth from 1, got 0")
    return Fault(name, parsed, numbers.get("nth"), numbers.get("seed", 0))


class Holds:
    """Reads that are kept back: for a time, or until :meth:`let_go`. May be asked from any thread:
    each call looks at the dict once.
    """

    def __init__(self) -> None:
        self._wakes: dict[base.TransferKey, base.Wake] = {}

    def __len__(self) -> int:
        """How many are kept back now."""
        return len(self._wakes)

    def __contains__(self, key: base.TransferKey) -> bool:
        return key in self._wakes

    def hold(self, key: base.TransferKey, wake: base.Wake) -> None:
        """Keep this one back. ``wake``: the IO thread that hears of its end."""
        self._wakes[key] = wake

    def end(self, key: base.TransferKey) -> None:
        """It is kept back no longer; nothing if it was not."""
        wake = self._wakes.pop(key, None)
        if wake is not None:
            wake()

    def let_go(self) -> None:
        """All that are kept back now."""
        for key in list(self._wakes):
            self.end(key)


def install(text: str) -> None:
    """Every wire that this process makes from now on has these faults. Raises ConfigError."""
    _install(parse_faults(text), Holds())


def _install(faults: Sequence[Fault], holds: Holds) -> None:
    if not faults:
        return
    for name, make_pipe in registry.PIPES.items():
        registry.SOURCES[name] = partial(_FaultyStreamSource, faults, make_pipe)
    for name, make_sink in registry.SINKS.items():
        registry.SINKS[name] = partial(_make_faulty_sink, faults, holds, make_sink)


@contextmanager
def injected(text: str) -> Iterator[Holds]:
    """Wires that this process makes meanwhile have these faults, and keep them; what they hold is
    let go by what this yields.
    """
    sources, sinks, holds = dict(registry.SOURCES), dict(registry.SINKS), Holds()
    _install(parse_faults(text), holds)
    try:
        yield holds
    finally:
        registry.SOURCES.update(sources)
        registry.SINKS.update(sinks)


def _make_faulty_sink(
    faults: Sequence[Fault],
    holds: Holds,
    make_sink: Callable[[base.LocalMemory, Config, Copier, base.Wake, Context], base.SinkTransport],
    memory: base.LocalMemory,
    config: Config,
    copy_thread: Copier,
    wake: base.Wake,
    context: Context,
) -> base.SinkTransport:
    if any(tensor.device.type != "cpu" for tensor in memory.tensors):
        _check_device_faults([fault for fault in faults if fault.name.startswith("read:")])
    copier = _faulty_copier(copy_thread, faults, memory)
    sink = make_sink(memory, config, copier, wake, context)
    if isinstance(sink, base.DirectSink):
        return _FaultyDirectSink(sink, faults, holds, wake)
    return _FaultyReceivingSink(sink, faults, holds, wake)


# ------------------------------------------------------------------ the taking side


class _WrappedJob(CopyJob):
    """Another job, run in another way: what ``run`` gives instead of its piece."""

    __slots__ = ("_forget", "_run", "inner")

    def __init__(
        self,
        inner: CopyJob,
        run: Callable[[CopyJob], bool],
        forget: Callable[[CopyJob], object],
        work_nbytes: int | None,
    ) -> None:
        super().__init__(inner.lane, work_nbytes)
        self.inner = inner
        self._run = run
        self._forget = forget

    def run(self) -> bool:
        return self._run(self.inner)

    def on_end(self) -> None:
        self._forget(self.inner)
        self.inner.end, self.inner.error = self.end, self.error
        self.inner.has_successor = self.has_successor
        self.inner.on_end()


class ChangedCopier:
    """A copy thread that runs pieces in another way. ``at_once``: small ones where they begin."""

    def __init__(
        self, inner: Copier, run: Callable[[CopyJob], bool], *, at_once: bool = False
    ) -> None:
        self._inner = inner
        self._run = run
        self._at_once = at_once
        self._jobs: dict[CopyJob, _WrappedJob] = {}

    def submit(self, job: CopyJob) -> None:
        work_nbytes = job.work_nbytes if self._at_once else None
        wrapped = _WrappedJob(
            job, self._run, lambda inner: self._jobs.pop(inner, None), work_nbytes
        )
        self._jobs[job] = wrapped
        self._inner.submit(wrapped)

    def cancel(self, job: CopyJob) -> None:
        """Cancel the job's wrapper; the job itself sees the flag."""
        job.cancelled = True
        wrapped = self._jobs.get(job)
        if wrapped is not None:
            self._inner.cancel(wrapped)


def _slowly(delay_s: float) -> Callable[[CopyJob], bool]:
    def run(job: CopyJob) -> bool:
        time.sleep(delay_s)
        return job.cancelled or job.run()  # cancelled: back to the thread, which sees it

    return run


def _copy_nothing(job: CopyJob) -> bool:
    return False


class _Flips:
    """Flips a bit in some of the pieces that it runs: of a chunk, or of what a read has written."""

    def __init__(self, fault: Fault, pools: Sequence[torch.Tensor]) -> None:
        self._share, self._random = fault.value, random.Random(fault.seed)
        self._pools = pools

    def pack(self, job: CopyJob) -> bool:
        """At the source, before the chunk leaves."""
        if not isinstance(job, ChunkJob) or not self._is_due(job):
            return job.run()
        dense = job.dense = job.take_dense()
        has_more = job.run()
        self._flip(dense)
        return has_more

    def land(self, job: CopyJob) -> bool:
        """At the sink, before the copy is said to be over."""
        has_more = job.run()
        if isinstance(job, ChunkJob) and self._is_due(job):
            self._flip_there(job.side, job.block_ids, *job.span)
        elif isinstance(job, _Read) and not has_more and self._is_due(job):
            request = job.request
            sides = [copied.sink for copied in request.classes]
            side, pull = self._random.choice(list(zip(sides, request.pull_classes, strict=True)))
            ids = side_ids(side, request.sink_ids)
            tokens = (pull.token_lo, pull.token_hi)
            self._flip_there(side, ids, (0, len(side.bases)), tokens)
        return has_more

    def _is_due(self, job: CopyJob) -> bool:
        if job.cancelled or self._random.random() >= self._share:
            return False
        key = job.lane
        assert isinstance(key, base.TransferKey)
        _log.info("fault: flips a bit of offer %s for %s", key.nonce.hex(), key.incarnation.hex())
        return True

    def _flip_there(
        self, side: Side, ids: np.ndarray, regions: tuple[int, int], tokens: tuple[int, int]
    ) -> None:
        """Of one token of one region where it lies in the pool."""
        region, token = self._random.randrange(*regions), self._random.randrange(*tokens)
        one = (region, region + 1), (token, token + 1)
        dense = torch.empty(side.tile.num_heads * side.tile.inner_nbytes, dtype=torch.uint8)
        gather(self._pools, side, ids, side.tile.order, *one, dense)
        self._flip(dense)
        scatter(self._pools, side, ids, *one, dense)

    def _flip(self, dense: torch.Tensor) -> None:
        dense[self._random.randrange(len(dense))] ^= 1 << self._random.randrange(8)


def _check_device_faults(faults: Sequence[Fault]) -> None:
    """For memory of a GPU, which copies by itself. Raises ConfigError for the copy thread's."""
    for fault in faults:
        if fault.name in _OF_COPIES:
            raise ConfigError(
                f"faults: expected none of {', '.join(sorted(_OF_COPIES))} in memory of a GPU, "
                f"got {fault.name}; a GPU's copies take no faults"
            )


def _faulty_copier(copier: Copier, faults: Sequence[Fault], memory: base.LocalMemory) -> Copier:
    for fault in faults:
        if fault.name == "read:slow":
            copier = ChangedCopier(copier, _slowly(fault.value))
        elif fault.name == "read:blank":
            copier = ChangedCopier(copier, _copy_nothing)
        elif fault.name == "read:flip":
            copier = ChangedCopier(copier, _Flips(fault, memory.tensors).land, at_once=True)
    return copier


@dataclass(slots=True)
class _Stalled:
    """``timer``: ends it; None: only who lets go does."""

    timer: threading.Timer | None = None
    held: list[base.SinkCompletion] = field(default_factory=list)

    def end(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer.join()


class _FaultySink(base.TakingSide):
    """A sink whose reads stall or fail; everything else is the inner one's."""

    def __init__(
        self, inner: base.SinkTransport, faults: Sequence[Fault], holds: Holds, wake: base.Wake
    ) -> None:
        self.name, self.counts = inner.name, inner.counts
        self._wire = inner
        self._faults = tuple(faults)
        self._holds = holds
        self._wake = wake
        self._num_reads = 0
        self._failed: list[base.SinkCompletion] = []
        self._stalled: dict[base.TransferKey, _Stalled] = {}

    def trial(
        self, source: RankManifest, timeout_s: float, classes: Sequence[CopyClass] = ()
    ) -> base.Trial:
        return self._wire.trial(source, timeout_s, classes)

    def detach(self, control_endpoint: str) -> None:
        self._wire.detach(control_endpoint)

    def stop_read(self, key: base.TransferKey) -> None:
        """What was held back is forgotten: ReadStopped is the read's one end."""
        stalled = self._stalled.pop(key, None)
        if stalled is not None:
            stalled.end()
            self._holds.end(key)
        self._wire.stop_read(key)

    def pollables(self) -> Sequence[base.Readable]:
        return self._wire.pollables()

    def poll(self) -> list[base.SinkCompletion]:
        """What the inner one says, less what stalls, plus what has stalled long enough."""
        done, self._failed = self._failed, []
        for key, stalled in list(self._stalled.items()):
            if key not in self._holds:
                stalled.end()
                done.extend(stalled.held)
                del self._stalled[key]
        for completion in self._wire.poll():
            key_of = None if isinstance(completion, base.PeerGone) else completion.key
            if key_of is not None and key_of in self._stalled:
                self._stalled[key_of].held.append(completion)
            else:
                done.append(completion)
        return done

    def close(self) -> None:
        for key, stalled in self._stalled.items():
            stalled.end()
            self._holds.end(key)
        self._stalled.clear()
        self._wire.close()

    def _fails(self, key: base.TransferKey) -> bool:
        """Count the read, begin its faults; True if it must not begin."""
        self._num_reads += 1
        for fault in self._faults:
            if fault.nth is not None and fault.nth != self._num_reads:
                continue
            if fault.name == "read:fail":
                self._failed.append(base.ReadBroke(key, Reason.READ_FAILED, "fault: read:fail"))
                self._wake()
                return True
            if fault.name in ("read:stall", "read:hold"):
                self._stalled[key] = stalled = _Stalled()
                self._holds.hold(key, self._wake)
                if fault.name == "read:stall":
                    stalled.timer = threading.Timer(fault.value, self._holds.end, (key,))
                    stalled.timer.daemon = True
                    stalled.timer.start()
        return False


class _FaultyDirectSink(_FaultySink, base.DirectSink):
    """Of a direct wire. The engine's thread never begins its reads."""

    def __init__(
        self, inner: base.DirectSink, faults: Sequence[Fault], holds: Holds, wake: base.Wake
    ) -> None:
        super().__init__(inner, faults, holds, wake)
        self._inner = inner

    def attach(self, source: RankManifest, trial: base.Trial | None = None) -> None:
        self._inner.attach(source, trial)

    def submit_read(self, request: base.ReadRequest) -> None:
        if not self._fails(request.key):
            self._inner.submit_read(request)


class _FaultyReceivingSink(_FaultySink, base.ReceivingSink):
    """The sink of a stream wire with faults."""

    def __init__(
        self, inner: base.ReceivingSink, faults: Sequence[Fault], holds: Holds, wake: base.Wake
    ) -> None:
        super().__init__(inner, faults, holds, wake)
        self._inner = inner

    def staging_bounds(self, source: RankManifest) -> StagingBounds:
        return self._inner.staging_bounds(source)

    def attach(self, source: RankManifest, staging: Staging | None = None) -> None:
        self._inner.attach(source, staging)

    def submit_expect(self, request: base.ReadRequest) -> None:
        if not self._fails(request.key):
            self._inner.submit_expect(request)

    def inspect(self) -> None:
        self._inner.inspect()


# ------------------------------------------------------------------ the giving side


class _FaultyStreamSource(StreamSource):
    """A stream wire's source that loses, garbles or repeats chunks, or dies."""

    def __init__(
        self,
        faults: Sequence[Fault],
        make_pipe: MakePipe,
        memory: base.LocalMemory,
        config: Config,
        copy_thread: Copier,
        wake: base.Wake,
        context: Context,
    ) -> None:
        for fault in faults:
            if fault.name == "chunk:flip":
                if memory.device.type != "cpu":
                    _check_device_faults([fault])
                flips = _Flips(fault, memory.tensors)
                copy_thread = ChangedCopier(copy_thread, flips.pack, at_once=True)
        super().__init__(make_pipe, memory, config, copy_thread, wake, context)
        self._faults = tuple(faults)
        self._random = random.Random(max((fault.seed for fault in self._faults), default=0))
        self._num_chunks = 0

    def _announce(self, connection: Connection, header: Header, parts: Parts) -> bool:
        if not isinstance(header, ChunkHeader):
            return super()._announce(connection, header, parts)
        self._num_chunks += 1
        packed = encode(header)
        for fault in self._faults:
            if fault.name == "send:die_after" and self._num_chunks > fault.value:
                os.kill(os.getpid(), signal.SIGKILL)
            if fault.name not in _OF_HEADERS or self._random.random() >= fault.value:
                continue
            if fault.name == "chunk:drop":
                # Something must arrive all the same: no wire loses a single message, and slots are
                # counted
                packed = encode(msgspec.structs.replace(header, nonce=b"", sequence=-1))
            elif fault.name == "chunk:corrupt_header":
                packed = b"\xc1" + packed[1:]  # 0xc1 is never used in msgpack
            elif not self._tell(connection.identity, packed, *parts):
                return False
        return self._carry(connection, header.slot, packed, parts)
