"""The two ends of the conformance check: a process that gives, and a sink in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TypeVar

import numpy as np
import torch
import zmq
from zmq.utils import garbage

from kvxfer.config import Config
from kvxfer.tensors.shared_memory import make_pool
from kvxfer.testing.cases import POISON, POOL_NBYTES, source_bytes
from kvxfer.transfer.manifest import RankId, RankManifest
from kvxfer.transports import base
from kvxfer.transports.copy_thread import CopyJob, CopyThread
from kvxfer.transports.guard import Guard
from kvxfer.transports.registry import published_infos
from kvxfer.transports.wake_up import WakeUp

Context = zmq.Context[zmq.Socket[bytes]]
C = TypeVar("C", bound=base.SinkCompletion)


MakeSource = Callable[[base.LocalMemory, CopyThread, base.Wake, Context], base.SourceTransport]
"""Makes the giving side; a function of a module, because it is called in another process."""
MakeSink = Callable[[base.LocalMemory, CopyThread, base.Wake, Context], base.SinkTransport]
"""Makes the taking side; a function of a module."""


# ------------------------------------------------------------------ what occupies a copy thread


class PiecesJob(CopyJob):
    """A job out of an iterator, each step of which is a piece, and a listener."""

    __slots__ = ("_listener", "_pieces")

    def __init__(
        self,
        lane: Hashable,
        pieces: Iterator[object],
        listener: Callable[[CopyJob], None] = lambda _: None,
        work_nbytes: int | None = None,
    ) -> None:
        super().__init__(lane, work_nbytes)
        self._pieces = pieces
        self._listener = listener

    def run(self) -> bool:
        return next(self._pieces, self) is not self

    def on_end(self) -> None:
        self._listener(self)


# ------------------------------------------------------------------ what the parent tells a child


@dataclass(frozen=True, slots=True)
class Send:
    """Give; after ``hold_after`` sent chunks keep the packed ones back (-1: never)."""

    request: base.SendRequest
    hold_after: int = -1


@dataclass(frozen=True, slots=True)
class Release:
    """Send what was held back, and hold nothing any more."""

    key: base.TransferKey


@dataclass(frozen=True, slots=True)
class StopSend:
    key: base.TransferKey


@dataclass(frozen=True, slots=True)
class Close:
    """Close the transport, say which threads are left, and end."""


Command = Send | Release | StopSend | Close


def wait_for(
    transport: base.SendingSource | base.SinkTransport | None, *fds: int, timeout_s: float
) -> None:
    """Sleep until one of the descriptors or the transport's sockets can be read."""
    poller = zmq.Poller()
    for fd in fds:
        poller.register(fd, zmq.POLLIN)
    for socket in transport.pollables() if transport is not None else ():
        poller.register(socket, zmq.POLLIN)
    poller.poll(max(0, round(timeout_s * 1000)))


# ------------------------------------------------------------------ the giving process


@dataclass(slots=True)
class _Held:
    hold_after: int
    num_sent: int = 0
    sequences: list[int] = field(default_factory=list)


def serve_source(pipe: Connection, make_source: MakeSource, seed: int, device: str) -> None:
    """The child: a pool, a copy thread, the transport, and the commands of the parent."""
    pool = make_pool(device, POOL_NBYTES)
    pool.tensor.copy_(
        torch.from_numpy(np.frombuffer(bytearray(source_bytes(seed)), dtype=np.uint8))
    )
    if pool.tensor.device.type == "cuda":
        torch.cuda.synchronize(pool.tensor.device)
    copy_thread, context, wake = CopyThread(), zmq.Context[zmq.Socket[bytes]](), WakeUp()
    guard = Guard(context, Config())
    memory = base.LocalMemory((pool.tensor,), (pool.info,))
    made = make_source(memory, copy_thread, wake, context)
    transport = made if isinstance(made, base.SendingSource) else None  # else it has nothing to do
    (info,) = published_infos({made.name: made}, memory)
    pipe.send((made.name, transport and transport.data_endpoint(), info))
    held: dict[base.TransferKey, _Held] = {}
    while True:
        wait_for(transport, pipe.fileno(), wake.fd, timeout_s=60)
        wake.clear()
        for completion in transport.poll() if transport is not None else ():
            if transport is not None and isinstance(completion, base.Packed):
                _on_packed(transport, held, completion)
            pipe.send(completion)
        if not pipe.poll():
            continue
        try:
            command: Command = pipe.recv()
        except EOFError:  # the parent is gone
            return
        if isinstance(command, Close):
            break
        if transport is not None:
            _obey(transport, held, command)
    if transport is not None:
        transport.close()
    copy_thread.close()
    context.term()
    guard.join()
    wake.close()
    pool.close()
    # pyzmq has one for the process, from the first message on that is sent from its own memory
    stay = (threading.main_thread(), garbage.gc.thread)
    pipe.send([thread.name for thread in threading.enumerate() if thread not in stay])


def _on_packed(
    transport: base.SendingSource, held: dict[base.TransferKey, _Held], packed: base.Packed
) -> None:
    state = held.get(packed.key)
    if state is not None and 0 <= state.hold_after <= state.num_sent:
        state.sequences.append(packed.sequence)
        return
    if state is not None:
        state.num_sent += 1
    transport.send_packed(packed.key, packed.sequence)


def _obey(
    transport: base.SendingSource, held: dict[base.TransferKey, _Held], command: Command
) -> None:
    match command:
        case Send(request, hold_after):
            held[request.key] = _Held(hold_after)
            transport.submit_send(request)
        case Release(key):
            state = held[key]
            state.hold_after = -1
            for sequence in state.sequences:
                transport.send_packed(key, sequence)
            state.sequences.clear()
        case StopSend(key):
            transport.stop_send(key)


def serve_idle_sink(
    pipe: Connection, make_sink: MakeSink, request: base.ReadRequest, device: str
) -> None:
    """A child that attaches, expects one read, and polls until it is killed."""
    sink = SinkPeer(make_sink, device)
    sink.transport.attach(request.source)
    if isinstance(sink.transport, base.ReceivingSink):
        sink.transport.submit_expect(request)
    pipe.send("expecting")
    while not pipe.poll(0.01):
        sink.transport.poll()


class Child:
    """With a pipe to it; by forkserver: threads and locks are not inherited."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        context = get_context("forkserver")
        # The server imports torch once for all children; without effect if it runs already.
        context.set_forkserver_preload([__name__])
        self.seen: list[base.SourceCompletion] = []
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    def take(
        self, kind: type[base.SourceCompletion], key: base.TransferKey
    ) -> base.SourceCompletion | None:
        """A completion of that kind, if it has come; others are kept for later."""
        while self.pipe.poll():
            self.seen.append(self.pipe.recv())
        for completion in self.seen:
            if isinstance(completion, kind) and completion.key == key:
                self.seen.remove(completion)
                return completion
        return None

    def kill(self) -> None:
        """Kill the process with SIGKILL and wait up to 10 s for its end."""
        self.process.kill()
        self.process.join(10)
        self.pipe.close()
        self.process.close()


class SourcePeer(Child):
    """A giving process and its manifest."""

    def __init__(self, make_source: MakeSource, seed: int, timeout_s: float, device: str) -> None:
        super().__init__(serve_source, make_source, seed, device)
        if not self.pipe.poll(timeout_s + 60):  # the first process of a run imports torch
            raise AssertionError("source: expected it to start within a minute, got nothing")
        self.name, endpoint, info = self.pipe.recv()
        self.is_stream = endpoint is not None
        self.bytes = source_bytes(seed)
        self.manifest = RankManifest(
            rank=RankId(0, 0),
            control_endpoint=f"tcp://127.0.0.1:{seed}",
            data_endpoints={} if endpoint is None else {self.name: endpoint},
            memories=(info,),
            regions=(),
        )

    def finish(self, timeout_s: float) -> list[str]:
        """Close it in order; the threads that were left."""
        self.pipe.send(Close())
        deadline_s = time.monotonic() + timeout_s
        left: list[str] | None = None
        while left is None and (left_s := deadline_s - time.monotonic()) > 0:
            if self.pipe.poll(left_s):
                message = self.pipe.recv()
                left = message if isinstance(message, list) else None
        self.process.join(timeout_s)
        if left is None or self.process.exitcode != 0:
            raise AssertionError(
                f"source: expected to close and end with 0, got {self.process.exitcode}"
            )
        self.pipe.close()
        self.process.close()
        return left


# --------------------------------------------------- the taking side, in this process


def is_end(key: base.TransferKey, completion: base.SinkCompletion) -> bool:
    """Whether the completion ends the read of this key."""
    return (
        isinstance(completion, base.ReadDone | base.ReadBroke | base.ReadStopped)
        and completion.key == key
    )


class SinkPeer:
    """A sink transport with a poisoned pool, and what it has said so far."""

    def __init__(self, make_sink: MakeSink, device: str) -> None:
        self.pool = make_pool(device, POOL_NBYTES)
        self.pool.tensor.fill_(POISON)
        self.copy_thread, self.context, self.wake = (
            CopyThread(),
            zmq.Context[zmq.Socket[bytes]](),
            WakeUp(),
        )
        self.settle()
        memory = base.LocalMemory((self.pool.tensor,), (self.pool.info,))
        self.transport = make_sink(memory, self.copy_thread, self.wake, self.context)
        self.seen: list[base.SinkCompletion] = []

    def content(self) -> bytes:
        return self.pool.tensor.cpu().numpy().tobytes()

    def poison(self) -> None:
        self.pool.tensor.fill_(POISON)
        self.settle()

    def settle(self) -> None:
        """What was asked of a GPU on another stream than the wire's is over."""
        if self.pool.tensor.device.type == "cuda":
            torch.cuda.synchronize(self.pool.tensor.device)

    def until(
        self, wanted: Callable[[base.SinkCompletion], bool], timeout_s: float, what: str
    ) -> base.SinkCompletion:
        """Drive the transport until it says what is wanted; remembers everything it says."""
        deadline_s = time.monotonic() + timeout_s
        for index in self._grow(deadline_s):
            if wanted(self.seen[index]):
                return self.seen[index]
        raise AssertionError(f"{what}: expected within {timeout_s} s, got {self.seen[-8:]}")

    def has_ended(self, key: base.TransferKey) -> bool:
        return any(is_end(key, completion) for completion in self.seen)

    def rest(self, duration_s: float) -> None:
        for _ in self._grow(time.monotonic() + duration_s, start=len(self.seen)):
            pass

    def _grow(self, deadline_s: float, start: int = 0) -> Iterator[int]:
        """Positions in ``seen``, old and new ones, until the deadline."""
        while True:
            while start < len(self.seen):
                yield start
                start += 1
            self.seen.extend(self.transport.poll())
            if start < len(self.seen):
                continue
            if time.monotonic() >= deadline_s:
                return
            wait_for(self.transport, self.wake.fd, timeout_s=deadline_s - time.monotonic())
            self.wake.clear()

    def gate(self) -> threading.Event:
        """Occupy the copy thread until the event is set."""
        entered, opened = threading.Event(), threading.Event()

        def pieces() -> Iterator[None]:
            entered.set()
            opened.wait(30)
            yield

        self.copy_thread.submit(PiecesJob("gate", pieces()))
        entered.wait(30)
        return opened

    def close(self) -> None:
        """In the order of a worker that shuts down."""
        self.transport.close()
        self.copy_thread.close()
        self.context.term()
        self.wake.close()
        self.pool.close()
