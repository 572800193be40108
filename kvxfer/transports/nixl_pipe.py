"""NIXL as a pipe: one READ or one WRITE for each chunk, from staging to staging.

With READ the sink fetches a chunk when it is announced. With WRITE the source puts it into the
sink's staging, and announces it when it lies there. The sink chooses one of the two by its trial
(``stream_trial``); the source makes its end to match.

NIXL has no descriptor that tells when a transfer is over. On one host NIXL copies by itself, and a
transfer is over when it has been posted. Otherwise an alarm wakes the IO thread after 50 us, 100,
200 and so on, and the IO thread polls.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch
import zmq

from kvxfer.config import Config
from kvxfer.errors import TransportUnavailable
from kvxfer.transports.base import Wake
from kvxfer.transports.nixl_agent import Operation
from kvxfer.transports.nixl_ends import (
    GO,
    LAST_LOOK_S,
    SLOW_LOOK_S,
    Address,
    End,
    Mover,
    NixlHost,
    Reached,
    Staging,
    Writer,
    WrittenTo,
)
from kvxfer.transports.pipe import (
    Parts,
    Pipe,
    PipeBroken,
    SinkLane,
    Slots,
    SourceLane,
    StagingSize,
    check_no_parts,
)
from kvxfer.transports.stream_trial import trial_slots

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
        """The beginning of the slot."""
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
        """Reading or being written may begin."""
        theirs = Address.decode(address)
        if (theirs.connection, theirs.operation) != (self._end.connection, self._operation):
            raise PipeBroken(
                f"nixl: expected a source that serves {self._operation}, got {theirs.operation}"
            )
        self._end.meet(theirs)

    def announced(
        self, slot: int, generation: int, nbytes: int, parts: Sequence[zmq.Frame]
    ) -> None:
        """A READ begins; what was written is there."""
        check_no_parts(parts)
        self._nbytes[slot] = nbytes
        if self._mover is not None:
            self._mover.start(slot, nbytes)
        else:
            self._written.append(slot)

    def poll(self) -> Sequence[int]:
        """Slots whose payload has come since the last call, in any order."""
        if self._mover is not None:
            return self._mover.moved()
        written, self._written = self._written, []
        return written

    def payload(self, slot: int) -> torch.Tensor:
        """The beginning of the slot."""
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

    def __init__(self, device: torch.device, config: Config, wake: Wake) -> None:
        self._host = NixlHost(device, config, wake)
        self._ends: dict[bytes, End] = {}
        self._closing: list[End] = []
        self._is_open = True

    @property
    def quarantined_nbytes(self) -> int:
        """Staging that was closed some time ago and that a peer may still reach, or that an
        operation still goes on with.
        """
        before_s = time.monotonic() - KEPT_S
        late = (end for end in self._closing if (end.closed_s or 0.0) < before_s)
        return sum(end.staging.slots.nbytes for end in late)

    @classmethod
    def staging_size(cls, device_type: str) -> StagingSize:
        """On a GPU less than others: what the trial's READ has taken stays with the source."""
        usual = super().staging_size(device_type)
        if device_type == "cpu":
            return usual
        kept_nbytes = trial_slots(device_type).nbytes
        return replace(usual, nbytes=usual.nbytes - kept_nbytes)

    @property
    def is_idle(self) -> bool:
        """Whether no closed end is still in use."""
        return not self._ends

    def open_source(self, address: bytes, slots: Slots) -> NixlSourceLane:
        """For either operation, as the sink says."""
        try:
            theirs = Address.decode(address)
            end = self._source_end(theirs, slots)
        except PipeBroken as exc:
            raise TransportUnavailable(str(exc)) from exc
        self._ends[end.connection] = end
        return NixlSourceLane(self, end, theirs.operation)

    def _source_end(self, theirs: Address, slots: Slots) -> End:
        if theirs.connection in self._ends:
            raise PipeBroken("nixl: expected a new connection, got one that is open")
        host = self._host
        end: End
        if theirs.operation == "READ":
            end = Reached(host, host.staging_to_reach(slots), theirs.connection)
        else:
            end = Writer(host, Staging(host, slots), theirs.connection, "WRITE")
        try:
            end.meet(theirs)
        except PipeBroken:
            end.staging.give_back()
            raise
        return end

    def open_sink(self, slots: Slots, way: str = "") -> NixlSinkLane:
        """The end asks its source for the operation of ``way``."""
        operation: Operation = "READ" if self.way_named(way) == "READ" else "WRITE"
        connection, host = secrets.token_bytes(16), self._host
        end: End
        if operation == "READ":
            end = Mover(host, Staging(host, slots), connection, "READ")
        else:
            end = WrittenTo(host, host.staging_to_reach(slots), connection)
        self._ends[connection] = end
        return NixlSinkLane(self, end, operation)

    def progress(self) -> None:
        """Notes of the peers, and ends that were closed."""
        if not self._is_open or not self._ends:
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
        """Wait a moment for operations in flight. Memory of those that do not end is kept until the
        process ends.
        """
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
