"""The trial of a stream wire: real bytes over a pipe and a connection of their own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import zmq
from torch import Tensor

from kvxfer.errors import ProtocolError, TransportUnavailable
from kvxfer.transfer.costs import WireCosts, fit_costs, fit_direct_costs
from kvxfer.transports.base import TRIAL_NBYTES, TRIAL_SMALL_NBYTES, Wake
from kvxfer.transports.copy_thread import Copier, CopyEnd, CopyJob, Mailbox
from kvxfer.transports.pipe import Pipe, PipeBroken, Slots
from kvxfer.transports.stream_connections import MAX_TRIALS, Connection
from kvxfer.transports.stream_link import Link
from kvxfer.transports.stream_wire import (
    AskTrial,
    Attached,
    Credit,
    Refused,
    TrialHeader,
    decode_to_sink,
    make_poller,
    readable,
)
from kvxfer.transports.visitors import LOOK_S
from kvxfer.transports.wake_up import WakeUp

DEVICE_TRIAL_NBYTES = 32 << 20
"""The large message between GPUs: a fast wire carries 4 MiB in less time than it takes to ask."""
NUM_BURST = 4
"""Small messages that are asked for at once: what each costs when they follow one another."""
SHORT_S = 0.008
"""A trial that takes less goes another round: on a quiet link once is not enough to measure."""
NUM_ROUNDS = 4
CHUNK_S = 100e-6
"""What a chunk costs each side at least, beside its bytes: jobs, credits, and threads that are
woken for them. 64 MiB took 65 ms of processor time in chunks of 4 MiB and 81 ms in chunks of 1 MiB.
"""
DEVICE_CHUNK_S = 400e-6
"""The same where a GPU packs or unpacks: two launches, and looks at their ends. Between two H200s
128 tokens went in two chunks, and 0.4 ms of their 2.4 were the second one's.
"""
_SIZES = (TRIAL_SMALL_NBYTES, TRIAL_NBYTES, DEVICE_TRIAL_NBYTES)


def trial_slots(*device_types: str) -> Slots:
    """One for the large message and one for each of a burst, so that each is filled once.

    ``device_types``: of the memory of both sides, or of the one that says what it admits; between
    unlike ones the large message is the smaller one, which either admits.
    """
    large_nbytes = TRIAL_NBYTES if "cpu" in device_types else DEVICE_TRIAL_NBYTES
    return Slots(1 + NUM_BURST, large_nbytes)


_ROW_NBYTES = 256


def trial_rows(nbytes: int) -> Tensor:
    """What a trial carries, so that the sink can compare it: rows of 256, all the same."""
    return torch.arange(_ROW_NBYTES, dtype=torch.uint8).expand(nbytes // _ROW_NBYTES, _ROW_NBYTES)


# ------------------------------------------------------------------ the giving side


class _Fill(CopyJob):
    """Writes the pattern into a slot."""

    __slots__ = ("_filled", "_staging", "connection", "header")

    def __init__(
        self,
        connection: Connection,
        header: TrialHeader,
        staging: Callable[[int, int], Tensor],
        filled: Mailbox[_Fill],
    ) -> None:
        super().__init__(connection)
        self.connection = connection
        self.header = header
        self._staging = staging
        self._filled = filled

    def run(self) -> bool:
        rows = trial_rows(self.header.nbytes)
        self._staging(self.header.slot, self.header.nbytes).view_as(rows).copy_(rows)
        return False

    def on_end(self) -> None:
        self._filled.put(self)


class TrialGiver:
    """Fills slots of connections that ask for a trial."""

    def __init__(self, copy_thread: Copier, wake: Wake) -> None:
        self._copy_thread = copy_thread
        self._filled: Mailbox[_Fill] = Mailbox(wake)
        self._ready: list[tuple[Connection, TrialHeader | None]] = []
        self._num_filling = 0

    @property
    def is_busy(self) -> bool:
        """Whether there is, or will be, something to drain."""
        return bool(self._ready or self._num_filling)

    def check(self, connection: Connection, message: AskTrial) -> int | None:
        """The slot that it goes into; None if the connection has had its share.

        Raises ProtocolError.
        """
        if message.nbytes not in _SIZES:
            raise ProtocolError(f"trial: expected one of {_SIZES} bytes, got {message.nbytes}")
        if message.nbytes > connection.slots.slot_nbytes:
            raise ProtocolError(
                f"trial: expected slots of {message.nbytes} bytes, got {connection.slots}"
            )
        if connection.num_trials >= MAX_TRIALS:
            return None
        if not connection.free:
            raise ProtocolError("trial: expected a slot to be credited first")
        held = connection.trial_slots  # what need not be filled again, then what holds nothing
        return min(
            connection.free, key=lambda slot: (held.get(slot) != message.nbytes, slot in held, slot)
        )

    def fill(self, connection: Connection, slot: int, nbytes: int) -> None:
        """On the copy thread, unless the slot still has what is asked for."""
        assert connection.lane is not None
        connection.num_trials += 1
        connection.num_filling += 1
        connection.free.remove(slot)
        header = TrialHeader(nbytes, slot, connection.generations[slot])
        if connection.trial_slots.get(slot) == nbytes:
            self._ready.append((connection, header))
            return
        connection.trial_slots[slot] = nbytes
        self._num_filling += 1
        self._copy_thread.submit(_Fill(connection, header, connection.lane.staging, self._filled))

    def drain(self) -> Iterator[tuple[Connection, TrialHeader | None]]:
        """Slots that are full now; without a header: one that cannot be written."""
        ready, self._ready = self._ready, []
        yield from ready
        for job in self._filled.drain():
            yield self._take(job)

    def close(self) -> Iterator[tuple[Connection, TrialHeader | None]]:
        """The last ones, waited for."""
        ready, self._ready = self._ready, []
        yield from ready
        while self._num_filling:
            yield self._take(self._filled.take())

    def _take(self, job: _Fill) -> tuple[Connection, TrialHeader | None]:
        self._num_filling -= 1
        return job.connection, job.header if job.end is CopyEnd.DONE else None


# ------------------------------------------------------------------ the taking side


@dataclass(frozen=True, slots=True)
class Measured:
    """What a trial has found. ``large_s``: the least time that the large message took."""

    costs: WireCosts
    large_s: float


class TrialTaker:
    """Asks for a large message, a small one and, where the connection has slots for it, a burst of
    small ones over a connection of its own, and times the answers.

    The first round is not timed, but its bytes are compared: it opens TCP's window, and whatever
    else is done only once.
    """

    def __init__(self, pipe: Pipe, link: Link[TrialHeader], wake: WakeUp, timeout_s: float) -> None:
        self._pipe = pipe
        self._link = link
        self._wake = wake
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._poller = make_poller((link.dealer.socket, link.dealer.monitor))
        self._arrived: list[int] = []

    def run(self) -> Measured:
        """Blocks. Without a burst a message costs the least that it can.

        Raises TransportUnavailable.
        """
        large, small = (self._link.slots.slot_nbytes, 1), (TRIAL_SMALL_NBYTES, 1)
        burst = (TRIAL_SMALL_NBYTES, min(NUM_BURST, self._link.slots.num_slots - 1))
        asked = (large, small) if burst == small else (large, burst, small)
        best_s = dict.fromkeys(asked, math.inf)
        began_s = time.perf_counter()
        for num_round in range(NUM_ROUNDS):
            for nbytes, count in asked if num_round else asked[:2]:
                duration_s = self._time(nbytes, count, is_first=not num_round)
                if num_round:
                    best_s[nbytes, count] = min(best_s[nbytes, count], max(duration_s, 1e-9))
            if num_round and time.perf_counter() - began_s > SHORT_S:
                break
        ends = ((small[0], best_s[small]), (large[0], best_s[large]))
        if burst == small:
            costs = fit_direct_costs(*ends)
        else:
            costs = fit_costs(ends[0], (burst[1], best_s[burst]), ends[1])
        costs = replace(costs, message_s=max(costs.message_s, CHUNK_S))
        return Measured(costs, best_s[large])

    def time_large(self, timeout_s: float) -> float:
        """The large message once more, after ``run``. Raises TransportUnavailable."""
        self._timeout_s, self._deadline_s = timeout_s, time.monotonic() + timeout_s
        return max(self._time(self._link.slots.slot_nbytes, 1, is_first=False), 1e-9)

    def _time(self, nbytes: int, count: int, *, is_first: bool) -> float:
        link, name = self._link, self._pipe.name
        try:
            began_s = time.perf_counter()
            for _ in range(count):
                link.send(AskTrial(nbytes))
            slots = [self._wait(nbytes) for _ in range(count)]
            duration_s = time.perf_counter() - began_s
            is_equal = True
            for slot in slots:
                if is_first:
                    payload = link.lane.payload(slot)
                    rows = trial_rows(nbytes)
                    is_equal &= torch.equal(payload.cpu().view_as(rows), rows)
                    del payload
                link.free(slot)
        except (PipeBroken, ProtocolError) as exc:
            raise TransportUnavailable(f"{name}: trial with {link.endpoint}: {exc}") from exc
        if not is_equal:
            raise TransportUnavailable(
                f"{name}: the trial bytes from {link.endpoint} differ from what was asked for"
            )
        link.send(Credit(tuple(link.credits)))  # before the next is asked for, so not by the pipe
        link.credits.clear()
        return duration_s

    def _wait(self, nbytes: int) -> int:
        """The slot in which the answer lies."""
        link = self._link
        while True:
            if not self._arrived:
                self._pipe.progress()
                for message in link.lane.heard():
                    self._on_message(memoryview(message), ())
                self._arrived.extend(link.lane.poll())
            if self._arrived:
                slot = self._arrived.pop()
                header = link.awaited.pop(slot)
                if header.nbytes == nbytes:
                    return slot
                raise ProtocolError(f"trial: expected {nbytes} bytes, got {header.nbytes}")
            left_s = self._deadline_s - time.monotonic()
            if left_s <= 0:
                raise TransportUnavailable(
                    f"{self._pipe.name}: expected {nbytes} bytes from {link.endpoint} within "
                    f"{self._timeout_s} s, got no answer"
                )
            self._sleep(min(left_s, LOOK_S))
            ready = readable(self._poller)
            if not ready:
                link.dealer.inspect()
            for socket in ready:
                if socket is link.dealer.monitor:
                    if link.dealer.why_ended() is not None:
                        raise ProtocolError("expected an answer, got the end of the connection")
                    continue
                for first, *parts in link.receive():
                    self._on_message(first.buffer, parts, first)

    def _sleep(self, most_s: float) -> None:
        link = self._link
        poller = make_poller(
            (link.dealer.socket, link.dealer.monitor, self._wake.fd, *self._pipe.fds())
        )
        poller.poll(max(1, round(most_s * 1000)))
        self._wake.clear()

    def _on_message(
        self, message: memoryview, parts: Sequence[zmq.Frame], frame: zmq.Frame | None = None
    ) -> None:
        if not (message.nbytes or parts):
            self._link.send(Credit(()))  # the source looks whether we are here
            return
        match decode_to_sink(message):
            case Attached() as attached:
                self._link.connect(attached, frame)
            case Refused(detail):
                raise TransportUnavailable(
                    f"{self._pipe.name}: {self._link.endpoint} refuses: {detail[:300]}"
                )
            case TrialHeader() as header:
                self._link.announce(header, parts, header)
            case other:
                raise ProtocolError(f"expected a trial, got {type(other).__name__}")
