"""NIXL as a pipe: one READ or one WRITE for each chunk, from staging to staging.

With READ the sink fetches a chunk when it is announced. With WRITE the source puts it into the
sink's staging, and announces it when it lies there. The sink chooses one of the two by its trial
(``stream_trial``); the source makes its end to match.

NIXL has no descriptor that tells when a transfer is over. On one host NIXL copies by itself, and a
transfer is over when it has been posted. Otherwise an alarm wakes the IO thread after 50 us, 100,
200 and so on, and the IO thread looks.

Neither NIXL nor UCX can tell when a peer has stopped using memory that it may reach. So such
staging is not reused until the other end has said that it is over, or cannot be reached any more. A
sink that was stopped may act on an announcement long after its source has dropped it, and would
take the bytes of another request for its own. Staging is freed only after the agent: over TCP UCX
reads and writes at an address without asking whether it is still registered.
"""

from __future__ import annotations

import logging
import secrets
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Annotated

import msgspec
import torch
import zmq

from kvxfer.config import Config
from kvxfer.errors import TransportUnavailable
from kvxfer.transports.native_peers import check_way, net_devices, parse_address
from kvxfer.transports.nixl_agent import MOST_ADDRESS, Area, NixlAgent, Operation, Request
from kvxfer.transports.pipe import (
    Parts,
    Pipe,
    PipeBroken,
    SinkLane,
    Slots,
    SourceLane,
    StagingSize,
    check_no_parts,
    make_staging,
    trial_slots,
)
from kvxfer.transports.wake_up import Alarm

WAYS: tuple[Operation, ...] = ("WRITE", "READ")
"""WRITE is the usual one. WRITE over READ in GB/s, NIXL 1.5.1: between two processes of a busy host
of 2 cores, each of which packs or unpacks beside it, 1.5 where UCX copies by itself and 1.0 over
TCP (medians of 8 interleaved pairs of runs, chunks of 1 and 4 MiB); from one H200 to another over
NVLink, in pieces of 16 KiB, 1.1.
"""
CLOSE_S = 0.7
"""How long ``close`` waits for what has no end yet."""
KEPT_S = 1.0
"""What has no end after this long counts as quarantined."""

_log = logging.getLogger("kvxfer.transports")
_quarantine: list[End] = []  # what outlives its pipe


class NixlSourceLane(SourceLane):
    """The giving end. ``mover``: it writes; else its staging is read."""

    def __init__(self, pipe: NixlPipe, end: End, operation: Operation) -> None:
        self._pipe = pipe
        self._end = end
        self._mover = end if isinstance(end, Mover) else None
        self._sent: deque[int] = deque()
        self._moved: set[int] = set()
        self._parts = end.staging.parts
        self.address = end.address(operation)

    def staging(self, slot: int, nbytes: int) -> torch.Tensor:
        return self._parts[slot][:nbytes]

    def send(self, slot: int, generation: int, nbytes: int) -> Parts:
        """A WRITE begins; for a READ there is nothing to do."""
        if self._mover is not None:
            self._mover.start(slot, nbytes)
        self._sent.append(slot)
        return ()

    def poll(self) -> Sequence[int]:
        """What was written, in the order of ``send``; what will be read, at once."""
        if self._mover is None:
            sent = list(self._sent)
            self._sent.clear()
            return sent
        self._moved.update(self._mover.moved())
        sent = []
        while self._sent and self._sent[0] in self._moved:
            slot = self._sent.popleft()
            self._moved.remove(slot)
            sent.append(slot)
        return sent

    def close(self) -> None:
        """What was not written yet may still be: into a sink's staging that is kept for it."""
        self._pipe.retire(self._end)
        self._parts = []
        self._sent.clear()


class NixlSinkLane(SinkLane):
    """The taking end. ``mover``: it reads; else its staging is written."""

    def __init__(self, pipe: NixlPipe, end: End, operation: Operation) -> None:
        self._pipe = pipe
        self._end, self._operation = end, operation
        self._mover = end if isinstance(end, Mover) else None
        self._nbytes = [0] * end.staging.slots.num_slots
        self._written: list[int] = []
        self._parts = end.staging.parts
        self.address = end.address(operation)

    def connected(self, address: bytes) -> None:
        theirs = Address.decode(address)
        if (theirs.connection, theirs.operation) != (self._end.connection, self._operation):
            raise PipeBroken(
                f"nixl: expected a source that serves {self._operation}, got {theirs.operation}"
            )
        self._end.meet(theirs)

    def announced(
        self, slot: int, generation: int, nbytes: int, parts: Sequence[zmq.Frame]
    ) -> None:
        check_no_parts(parts)
        self._nbytes[slot] = nbytes
        if self._mover is not None:
            self._mover.start(slot, nbytes)
        else:
            self._written.append(slot)

    def poll(self) -> Sequence[int]:
        if self._mover is not None:
            return self._mover.moved()
        written, self._written = self._written, []
        return written

    def payload(self, slot: int) -> torch.Tensor:
        return self._parts[slot][: self._nbytes[slot]]

    def free(self, slot: int) -> None:
        """Nothing has to be made ready."""

    def path(self, signals: str) -> str:
        """By which of NIXL's operations; UCX below does not say what it takes."""
        return self._operation

    def close(self) -> None:
        """A READ that goes on ends in staging that is kept for it."""
        self._pipe.retire(self._end)
        self._parts = []
        self._written = []


class NixlPipe(Pipe):
    """An agent of NIXL's, and what its ends have in common.

    Raises TransportUnavailable: what is missing, and what to install.
    """

    name = "nixl"
    reads_peers = True
    ways = WAYS

    def __init__(self, device: torch.device, config: Config) -> None:
        self._host = NixlHost(device, config)
        self._ends: dict[bytes, End] = {}
        self._closing: list[End] = []
        self._is_open = True

    @property
    def quarantined_nbytes(self) -> int:
        """Staging that was closed some time ago and that a peer may still reach."""
        before_s = time.monotonic() - KEPT_S
        late = (end for end in self._closing if (end.closed_s or 0.0) < before_s)
        return sum(end.staging.slots.nbytes for end in late)

    def ways_between(self, device_types: Collection[str]) -> Sequence[str]:
        """No READ where a GPU is: if its sink is killed meanwhile, UCX ends the source's process
        ("unexpected error: Endpoint timeout"), in both runs on one H200.
        """
        if set(device_types) == {"cpu"}:
            return self.ways
        return tuple(way for way in self.ways if way != "READ")

    @classmethod
    def staging_size(cls, device_type: str) -> StagingSize:
        """On a GPU less than others: what the READ of a trial has taken stays with the source, and
        earlier sinks try one.
        """
        usual = super().staging_size(device_type)
        if device_type == "cpu":
            return usual
        kept_nbytes = trial_slots(device_type).nbytes
        return replace(usual, nbytes=usual.nbytes - kept_nbytes)

    @property
    def is_idle(self) -> bool:
        return not self._ends

    def open_source(self, address: bytes, slots: Slots, *, fd: int | None = None) -> NixlSourceLane:
        try:
            theirs = Address.decode(address)
            end = self._source_end(theirs, slots, fd)
        except PipeBroken as exc:
            raise TransportUnavailable(str(exc)) from exc
        self._ends[end.connection] = end
        return NixlSourceLane(self, end, theirs.operation)

    def _source_end(self, theirs: Address, slots: Slots, fd: int | None) -> End:
        if theirs.connection in self._ends:
            raise PipeBroken("nixl: expected a new connection, got one that is open")
        host = self._host
        end: End
        if theirs.operation == "READ":
            end = Reached(host, host.staging_to_reach(slots), theirs.connection)
        else:
            end = Writer(host, Staging(host, slots), theirs.connection, "WRITE")
        try:
            if fd is not None:
                check_way("nixl", fd)
            end.meet(theirs)
        except PipeBroken:
            end.staging.give_back()
            raise
        return end

    def open_sink(self, slots: Slots, way: str = "") -> NixlSinkLane:
        operation: Operation = "READ" if self.way_named(way) == "READ" else "WRITE"
        connection, host = secrets.token_bytes(16), self._host
        end: End
        if operation == "READ":
            end = Mover(host, Staging(host, slots), connection, "READ")
        else:
            end = WrittenTo(host, host.staging_to_reach(slots), connection)
        self._ends[connection] = end
        return NixlSinkLane(self, end, operation)

    def fds(self) -> Sequence[int]:
        return (self._host.alarm.fd,) if self._is_open else ()

    def progress(self) -> None:
        if not self._is_open:
            return
        self._host.alarm.clear()
        if not self._ends:
            return
        for peer, note in self._host.agent.notes():
            end = self._ends.get(note[len(GO) :])
            if end is not None and end.peer in ("", peer):
                end.heard(note[: len(GO)])
        self._closing = [end for end in self._closing if not self._has_ended(end)]
        if self._closing:
            self._host.alarm.after(SLOW_LOOK_S)

    def _has_ended(self, end: End) -> bool:
        if not end.is_over():
            return False
        del self._ends[end.connection]
        end.let_go()
        return True

    def close(self) -> None:
        """Memory of operations that do not end is kept until the process ends."""
        if not self._is_open:
            return
        for end in list(self._ends.values()):
            self.retire(end)
        give_up_s = time.monotonic() + CLOSE_S
        while self._closing and time.monotonic() < give_up_s:
            self.progress()
            time.sleep(0.001)
        self._is_open = False
        self._keep_the_rest()

    def _keep_the_rest(self) -> None:
        """Give back all but what has no end."""
        rest, host = self._closing, self._host
        if rest:
            nbytes = sum(end.staging.slots.nbytes for end in rest)
            _log.warning("nixl: %d bytes of staging are kept: peers may still use them", nbytes)
            _quarantine.extend(rest)
        if any(isinstance(end, Mover) for end in rest):
            host.alarm.close()  # the agent goes on: its requests do
            return
        for end in rest:  # memory alone is kept: on one host a peer can write without the agent
            end.staging.deregister()
        host.close()

    def retire(self, end: End) -> None:
        """Keep the staging of a closed end until nothing can touch it. Idempotent."""
        if end.closed_s is not None:
            return
        end.closed_s = time.monotonic()
        if not self._has_ended(end):
            self._closing.append(end)
            self._host.alarm.after(LAST_LOOK_S)


# ------------------------------------------------------------------ the ends of connections


FIRST_LOOK_S, LAST_LOOK_S = 50e-6, 1e-3
"""When a transfer is looked at that goes on: each time twice as late, and again from the first on
when one has ended."""
SLOW_LOOK_S = 0.1
"""How often a peer is asked for that has to let go of staging."""
GO, OVER = b"go", b"ov"
"""Notes of NIXL's, before the name of a connection: the sink knows the source, which may write from
now on; the end that reads or writes has done so for the last time."""


class Staging:
    """Registered memory, by slots. Raises TransportUnavailable."""

    def __init__(self, host: NixlHost, slots: Slots, nbytes: int = 0) -> None:
        """``nbytes``: of the memory, where that is more than the slots have."""
        self._agent = host.agent
        with host.on_device():
            self.memory = make_staging(max(nbytes, slots.nbytes), host.device)
            self._registered = self._agent.register(Area.of(self.memory))
        self.cut(slots)

    def cut(self, slots: Slots) -> None:
        """From now on these slots lie at the beginning of the memory."""
        self.slots, self.area = slots, Area.of(self.memory).part(0, slots.nbytes)
        nbytes = slots.slot_nbytes
        self.parts = [self.memory[n * nbytes :][:nbytes] for n in range(slots.num_slots)]

    def metadata(self) -> bytes:
        return self._agent.metadata(self._registered)

    def slot(self, slot: int, nbytes: int) -> Area:
        return self.area.part(slot * self.slots.slot_nbytes, nbytes)

    def deregister(self) -> None:
        """Peers cannot reach it any more, where the hardware checks it."""
        self._agent.deregister(self._registered)

    def give_back(self) -> None:
        self.deregister()
        del self.memory, self.parts


class NixlHost:
    """What all ends of a pipe share: the agent, its known peers, staging. Raises
    TransportUnavailable: what is missing, and what to install.
    """

    def __init__(self, device: torch.device, config: Config) -> None:
        self.device = device
        with self.on_device():
            self.agent = NixlAgent(net_devices(config))
        self.alarm = Alarm()
        self._peers: Counter[str] = Counter()
        self._kept: list[Staging] = []
        usual_nbytes = NixlPipe.staging_size(device.type).nbytes
        self._usual_nbytes = config.staging_nbytes or usual_nbytes

    def on_device(self) -> AbstractContextManager[object]:
        """The CUDA context for calls of NIXL: UCX finds the memory's GPU by the current context."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def add_peer(self, metadata: bytes) -> str:
        """Connections to one agent share what is known of it. Raises PipeBroken."""
        for peer in [peer for peer, num_ends in self._peers.items() if not num_ends]:
            if not self.agent.notify(peer, b""):
                del self._peers[peer]
                self.agent.remove_peer(peer)
        peer = self.agent.add_peer(metadata)
        self._peers[peer] += 1
        return peer

    def remove_peer(self, peer: str) -> None:
        """After its last connection it stays known until it cannot be reached any more: UCX 1.23
        leaves a socket open for each time that a living peer is forgotten.
        """
        self._peers[peer] -= 1

    def staging_to_reach(self, slots: Slots) -> Staging:
        """For a peer to read or write; perhaps kept. Raises TransportUnavailable."""
        fitting = [each for each in self._kept if each.memory.numel() >= slots.nbytes]
        if not fitting:
            return Staging(self, slots, self._rounded(slots.nbytes))
        staging = min(fitting, key=lambda each: each.memory.numel())
        self._kept.remove(staging)
        staging.cut(slots)
        return staging

    def _rounded(self, nbytes: int) -> int:
        """The next power of two, but no more than a connection usually has. What is kept is never
        freed: of few sizes it serves the connections that come, whatever their trials choose.
        """
        most_nbytes = self._usual_nbytes if nbytes <= self._usual_nbytes else sys.maxsize
        return min(1 << (nbytes - 1).bit_length(), most_nbytes)

    def keep(self, staging: Staging) -> None:
        """It stays registered where it is: what a peer knows of an address does not change."""
        self._kept.append(staging)

    def close(self) -> None:
        self.alarm.close()
        for staging in self._kept:
            staging.deregister()
        self.agent.close()
        self._kept = []  # after the agent: over TCP it reads for peers without asking


class Address(msgspec.Struct, frozen=True, array_like=True):
    """What one end says of itself. ``connection``, ``operation``: as the sink has said."""

    connection: Annotated[bytes, msgspec.Meta(min_length=1, max_length=64)]
    operation: Operation
    metadata: bytes
    area: Area
    slot_nbytes: int

    @classmethod
    def decode(cls, address: bytes) -> Address:
        """Parse what the other end sent. Raises PipeBroken."""
        return parse_address("nixl", address, cls)


class End(ABC):
    """One end of a connection. Closed, it is the pipe's until it is over."""

    def __init__(self, host: NixlHost, staging: Staging, connection: bytes) -> None:
        self.host, self.staging, self.connection = host, staging, connection
        self.peer = ""
        self.closed_s: float | None = None

    def meet(self, theirs: Address) -> None:
        """Check the other end's staging and connect to its agent. Raises PipeBroken."""
        slots, area = self.staging.slots, theirs.area
        # A source may have fewer slots than its sink has asked for
        fits = theirs.slot_nbytes == slots.slot_nbytes and not area.nbytes % slots.slot_nbytes
        if not fits or area.address + area.nbytes > MOST_ADDRESS:
            raise PipeBroken(f"nixl: expected staging of {slots}, got {theirs.area}")
        self.peer = self.host.add_peer(theirs.metadata)

    def address(self, operation: Operation) -> bytes:
        staging = self.staging
        nbytes = staging.slots.slot_nbytes
        return msgspec.msgpack.encode(
            Address(self.connection, operation, self.metadata(), staging.area, nbytes)
        )

    @abstractmethod
    def metadata(self) -> bytes:
        """With it the peer can reach what it has to reach, and no more."""

    @abstractmethod
    def heard(self, word: bytes) -> None:
        """A note of the peer's for this connection."""

    @abstractmethod
    def is_over(self) -> bool:
        """Whether nothing can touch the staging any more."""

    def let_go(self) -> None:
        if self.peer:
            self.host.remove_peer(self.peer)


class Mover(End):
    """The end that reads or writes, and so knows when its transfers are over."""

    def __init__(
        self, host: NixlHost, staging: Staging, connection: bytes, operation: Operation
    ) -> None:
        super().__init__(host, staging, connection)
        self._operation = operation
        self._theirs: Address | None = None
        self._requests: dict[int, tuple[int, Request]] = {}
        """Of each slot the size and the request for it, which is posted again and again."""
        self._moving: dict[int, Request] = {}
        self._moved: list[int] = []
        self._failed = ""
        self._look_s = FIRST_LOOK_S

    def metadata(self) -> bytes:
        return self.host.agent.metadata()

    def meet(self, theirs: Address) -> None:
        super().meet(theirs)
        self._theirs = theirs

    def heard(self, word: bytes) -> None:
        """Nothing that matters to it."""

    def start(self, slot: int, nbytes: int) -> None:
        """Begin the transfer of one chunk. Raises PipeBroken."""
        request = self._request(slot, nbytes)
        self._moving[slot] = request  # before it is posted: where that fails it is not looked at
        with self.host.on_device():
            if self._look(slot, request.post):
                return
        self._look_s = FIRST_LOOK_S
        self.host.alarm.after(FIRST_LOOK_S)

    def moved(self) -> list[int]:
        """Slots whose transfer is over; those before what has failed. Raises PipeBroken."""
        if self._moving:
            try:
                self._look_at_all()
            except PipeBroken as exc:
                self._failed = str(exc)
        moved, self._moved = self._moved, []
        if moved:
            self._look_s = FIRST_LOOK_S
        elif self._failed:
            raise PipeBroken(self._failed)
        if self._moving:
            self.host.alarm.after(self._look_s)
            self._look_s = min(2 * self._look_s, LAST_LOOK_S)
        return moved

    def is_over(self) -> bool:
        while self._moving:
            try:
                self._look_at_all()
            except PipeBroken:
                continue  # that one is over, too
            return not self._moving
        return True

    def let_go(self) -> None:
        for _, request in self._requests.values():
            request.release()
        self._requests.clear()
        self.staging.give_back()
        if self.peer:
            self.host.agent.notify(self.peer, OVER + self.connection)
        super().let_go()

    def _look_at_all(self) -> None:
        with self.host.on_device():
            for slot, request in list(self._moving.items()):
                self._look(slot, request.is_done)

    def _look(self, slot: int, ask: Callable[[], bool]) -> bool:
        try:
            is_done = ask()
        except PipeBroken:
            del self._moving[slot]
            raise
        if is_done:
            del self._moving[slot]
            self._moved.append(slot)
        return is_done

    def _request(self, slot: int, nbytes: int) -> Request:
        made = self._requests.get(slot)
        if made is not None:
            if made[0] == nbytes:
                return made[1]
            del self._requests[slot]
            made[1].release()
        if self._theirs is None:
            raise PipeBroken("nixl: expected the address of the other end first, got a chunk")
        if (slot + 1) * self._theirs.slot_nbytes > self._theirs.area.nbytes:
            raise PipeBroken(f"nixl: expected a slot of {self._theirs.area}, got number {slot}")
        theirs = self._theirs.area.part(slot * self._theirs.slot_nbytes, nbytes)
        own = self.staging.slot(slot, nbytes)
        request = self.host.agent.request(self._operation, own, self.peer, theirs)
        self._requests[slot] = (nbytes, request)
        return request


class Reached(End):
    """The end whose staging the other one reaches: a source's, which is read, or a sink's, which is
    written.
    """

    def __init__(self, host: NixlHost, staging: Staging, connection: bytes) -> None:
        super().__init__(host, staging, connection)
        self._is_over = False
        self._next_call_s = 0.0

    def metadata(self) -> bytes:
        return self.staging.metadata()

    def heard(self, word: bytes) -> None:
        self._is_over |= word == OVER

    def is_over(self) -> bool:
        now_s = time.monotonic()
        if self.peer and not self._is_over and now_s >= self._next_call_s:
            self._next_call_s = now_s + SLOW_LOOK_S
            # An endpoint that has failed carries nothing more in either direction.
            self._is_over = not self.host.agent.notify(self.peer, b"")
        return self._is_over or not self.peer

    def let_go(self) -> None:
        self.host.keep(self.staging)
        super().let_go()


class WrittenTo(Reached):
    """A sink's end whose staging is written, once it has said GO."""

    def meet(self, theirs: Address) -> None:
        super().meet(theirs)
        if not self.host.agent.notify(self.peer, GO + self.connection):
            raise PipeBroken("nixl: expected a source that can be reached, got an error")


class Writer(Mover):
    """A source's end that writes, not before GO."""

    def __init__(
        self, host: NixlHost, staging: Staging, connection: bytes, operation: Operation
    ) -> None:
        super().__init__(host, staging, connection, operation)
        self._may_write = False
        self._waiting: deque[tuple[int, int]] = deque()

    def heard(self, word: bytes) -> None:
        self._may_write |= word == GO

    def start(self, slot: int, nbytes: int) -> None:
        if self._may_write:
            super().start(slot, nbytes)
        else:
            self._waiting.append((slot, nbytes))
            self.host.alarm.after(FIRST_LOOK_S)

    def moved(self) -> list[int]:
        if self._waiting and not self._may_write:
            self.host.alarm.after(LAST_LOOK_S)
        while self._waiting and self._may_write:
            super().start(*self._waiting.popleft())
        return super().moved()
