"""The trial of a stream wire: real bytes over a pipe and connections of their own.

A pipe with several ways is tried in each, over a connection for each; the fastest way is taken.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from operator import attrgetter

import torch
import zmq
from torch import Tensor

from kvxfer.config import Config
from kvxfer.errors import ProtocolError, TransportUnavailable
from kvxfer.tensors.device_memory import beside_engine
from kvxfer.transfer.costs import WireCosts, fit_costs
from kvxfer.transfer.manifest import RankManifest
from kvxfer.transports.base import TRIAL_NBYTES, TRIAL_SMALL_NBYTES, Readable, Trial
from kvxfer.transports.channel import Context
from kvxfer.transports.copy_thread import CopyJob, Mailbox
from kvxfer.transports.pipe import DEVICE_TRIAL_NBYTES, Pipe, PipeBroken, chunk_s, trial_slots
from kvxfer.transports.stream_connections import MAX_TRIALS, Connection
from kvxfer.transports.stream_link import Link, Terms
from kvxfer.transports.stream_wire import (
    AskTrial,
    Attached,
    Credit,
    Refused,
    TrialHeader,
    decode_to_sink,
    make_poller,
)
from kvxfer.transports.visitors import LOOK_S
from kvxfer.transports.wake_up import WakeUp

SHORT_S = 0.008
"""A trial that takes less goes another round: on a quiet link once is not enough to measure."""
NUM_ROUNDS = 3
WAY_MARGIN = 0.8
"""Another way than the usual one is taken if its large message takes at most so much of the time:
one of 4 MiB scatters by more than the rest from trial to trial on cores that are shared.
"""
NUM_TURNS = 5
"""Rounds in which it must have been that much faster. With fewer 2 of 12 trials took NIXL's READ
between two processes on two busy cores, one of them over TCP, where WRITE takes 4 ms and READ 8.
"""
LEAST_FURTHER_S = 0.25
"""A further way may take as long to begin as the usual one, and at least this: ten times what one
takes on a quiet machine.
"""
_SIZES = (TRIAL_SMALL_NBYTES, TRIAL_NBYTES, DEVICE_TRIAL_NBYTES)

_ROW_NBYTES = 256
_log = logging.getLogger("kvxfer.transports")


def trial_rows(nbytes: int) -> Tensor:
    """What a trial carries, so that the sink can compare it: rows of 256, all the same."""
    return torch.arange(_ROW_NBYTES, dtype=torch.uint8).expand(nbytes // _ROW_NBYTES, _ROW_NBYTES)


# ------------------------------------------------------------------ the giving side


class TrialFill(CopyJob):
    """Writes the pattern into a slot of a connection that asks for a trial."""

    __slots__ = ("_filled", "connection", "header")

    def __init__(
        self, connection: Connection, header: TrialHeader, filled: Mailbox[TrialFill]
    ) -> None:
        super().__init__(connection)
        self.connection = connection
        self.header = header
        self._filled = filled

    def run(self) -> bool:
        rows, lane = trial_rows(self.header.nbytes), self.connection.lane
        assert lane is not None  # it is open as long as a slot is being filled
        staging = lane.staging(self.header.slot, self.header.nbytes)
        with beside_engine(staging.device):
            staging.view_as(rows).copy_(rows)
        return False

    def on_end(self) -> None:
        self._filled.put(self)


def trial_slot(connection: Connection, nbytes: int) -> int | None:
    """Which one so large a message goes into: one that still has the pattern need not be filled
    again, then one that holds nothing. None if the connection has had its share.

    Raises ProtocolError.
    """
    if nbytes not in _SIZES:
        raise ProtocolError(f"trial: expected one of {_SIZES} bytes, got {nbytes}")
    if nbytes > connection.slots.slot_nbytes:
        raise ProtocolError(f"trial: expected slots of {nbytes} bytes, got {connection.slots}")
    if connection.num_trials >= MAX_TRIALS:
        return None
    if not connection.table.free:
        raise ProtocolError("trial: expected a slot to be credited first")
    held = connection.trial_slots
    ranked = ((held.get(slot) != nbytes, slot in held, slot) for slot in connection.table.free)
    return min(ranked)[-1]


# ------------------------------------------------------------------ the taking side


def take_trial(
    pipe: Pipe,
    source: RankManifest,
    device_types: set[str],
    config: Config,
    context: Context,
    wake: WakeUp,
    timeout_s: float,
    *,
    uses_unix_sockets: bool,
) -> Trial:
    """Try each way of a pipe that was made for this. A way that fails is left out.

    ``device_types``: of the memory of both sides. Blocks for ``timeout_s`` at most, all ways
    together. Raises TransportUnavailable if every way fails: why the usual one did.
    """
    slots = trial_slots(*device_types)
    until_s = time.monotonic() + timeout_s
    takers: list[TrialTaker] = []
    errors: list[TransportUnavailable] = []
    limit_s = timeout_s
    with ExitStack() as links:
        for way in pipe.ways_between(device_types):
            began_s = time.monotonic()
            try:
                link = Link(
                    pipe,
                    Terms(slots, way, is_trial=True),
                    source,
                    config,
                    context,
                    uses_unix_sockets=uses_unix_sockets,
                )
                links.enter_context(closing(link))
                taker = TrialTaker(pipe, link, wake, way)
                taker.begin(limit_s)
                takers.append(taker)
            except TransportUnavailable as exc:
                errors.append(exc)
                _log.debug("%s: no trial of %s: %s", pipe.name, way, exc)
            now_s = time.monotonic()
            limit_s = until_s - now_s
            if takers:  # what has begun needs the rest to be timed in
                limit_s = min(limit_s / 2, max(now_s - began_s, LEAST_FURTHER_S))
            if limit_s <= 0:
                break
        best = _time_in_turn(takers, until_s, errors)
    if best is None:
        raise errors[0]
    return Trial(best.costs(chunk_s(device_types)), best.path, best.way)


def _time_in_turn(
    takers: list[TrialTaker], until_s: float, errors: list[TransportUnavailable]
) -> TrialTaker | None:
    """The taker whose way is to be used, if one is left. Takers that fail are added to
    ``errors``.
    """
    began_s = time.perf_counter()
    for number in range(1, NUM_TURNS + 1):
        for taker in list(takers):
            try:
                taker.time_round(until_s - time.monotonic())
            except TransportUnavailable as exc:
                errors.append(exc)
                takers.remove(taker)
        if not takers:
            return None
        is_measured = number >= NUM_ROUNDS or time.perf_counter() - began_s > SHORT_S
        if is_measured and best_way(takers) is takers[0]:
            break
    best = best_way(takers)
    if len(takers) > 1:
        listed = ", ".join(f"{taker.way} {taker.large_s * 1e3:.3g} ms" for taker in takers)
        _log.debug("large messages: %s: %s", listed, best.way)
    return best


def best_way(takers: Sequence[TrialTaker]) -> TrialTaker:
    """The first way, unless another is faster by more than chance explains."""
    best = min(takers, key=attrgetter("large_s"))
    return best if best.large_s <= WAY_MARGIN * takers[0].large_s else takers[0]


class TrialTaker:
    """Asks for a large message and a small one over a connection of its own, and times the answers.
    ``large_s``, ``small_s``: the least that they took.
    """

    def __init__(self, pipe: Pipe, link: Link, wake: WakeUp, way: str) -> None:
        self.way, self.path = way, link.path
        self.large_s = self.small_s = math.inf
        self._pipe = pipe
        self._link = link
        self._wake = wake
        self._timeout_s = self._deadline_s = 0.0
        self._dealer = link.dealers[0]
        self._arrived: list[int] = []

    def begin(self, timeout_s: float) -> None:
        """Without a look at the clock, but the bytes are compared: it opens TCP's window, and
        whatever else is done only once. Raises TransportUnavailable.
        """
        self._limit(timeout_s)
        for nbytes in (self._link.slots.slot_nbytes, TRIAL_SMALL_NBYTES):
            self._time(nbytes, is_first=True)

    def time_round(self, timeout_s: float) -> None:
        """Both messages once more. Raises TransportUnavailable."""
        self._limit(timeout_s)
        self.large_s = min(self.large_s, self._time(self._link.slots.slot_nbytes))
        self.small_s = min(self.small_s, self._time(TRIAL_SMALL_NBYTES))

    def costs(self, message_s: float) -> WireCosts:
        """As timed; ``message_s``: as :class:`WireCosts` has it."""
        large, small = self._link.slots.slot_nbytes, TRIAL_SMALL_NBYTES
        costs = fit_costs((small, self.small_s), (large, self.large_s))
        return replace(costs, message_s=message_s)

    def _limit(self, timeout_s: float) -> None:
        self._timeout_s, self._deadline_s = timeout_s, time.monotonic() + timeout_s

    def _time(self, nbytes: int, *, is_first: bool = False) -> float:
        link, name = self._link, self._pipe.name
        try:
            began_s = time.perf_counter()
            link.send(AskTrial(nbytes))
            slot = self._wait(nbytes)
            duration_s = time.perf_counter() - began_s
            is_equal = True
            if is_first:
                payload, rows = link.lane.payload(slot), trial_rows(nbytes)
                with beside_engine(payload.device):
                    is_equal = torch.equal(payload.cpu().view_as(rows), rows)
                del payload
            link.table.free(slot)
            link.lane.free(slot)
        except (PipeBroken, ProtocolError) as exc:
            raise TransportUnavailable(f"{name}: trial with {link.endpoint}: {exc}") from exc
        if not is_equal:
            raise TransportUnavailable(
                f"{name}: the trial bytes from {link.endpoint} differ from what was asked for"
            )
        credit = Credit(link.table.take_credits())
        link.send(credit)  # before the next is asked for, so not by the pipe
        return max(duration_s, 1e-9)

    def _wait(self, nbytes: int) -> int:
        link = self._link
        while True:
            if not self._arrived:
                self._pipe.progress()
                for message in link.lane.heard():
                    self._on_message(memoryview(message), ())
                self._arrived.extend(link.lane.poll())
            if self._arrived:
                slot = self._arrived.pop()
                header = link.table.headers[slot]
                if header is not None and header.nbytes == nbytes:
                    return slot
                raise ProtocolError(f"trial: expected {nbytes} bytes, got {header}")
            left_s = self._deadline_s - time.monotonic()
            if left_s <= 0:
                raise TransportUnavailable(
                    f"{self._pipe.name}: expected {nbytes} bytes from {link.endpoint} within "
                    f"{self._timeout_s:.3g} s, got {self._progress()}"
                )
            self._look(min(left_s, LOOK_S))

    def _progress(self) -> str:
        """How far it has come without the bytes."""
        if not self._dealer.has_stood:
            return "no connection"
        return "none of them" if self._link.is_connected else "no answer"

    def _look(self, most_s: float) -> None:
        """Wait for what the source or the pipe has to say."""
        dealer = self._dealer
        sockets: tuple[Readable, ...]
        sockets = (dealer.socket, dealer.monitor, self._wake.fd, *self._pipe.fds())
        ready = dict(make_poller(sockets).poll(max(1, round(most_s * 1000))))
        self._wake.clear()
        if not ready.keys() & {dealer.socket, dealer.monitor}:
            dealer.inspect()
        for first, *parts in dealer.receive():
            self._on_message(first.buffer, parts, first)
        if dealer.monitor in ready and (why := dealer.why_ended()) is not None:
            raise ProtocolError(f"expected an answer, got none: {why}")

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
                self._link.announce(header, parts)
                self._link.table.announced(header)
            case other:
                raise ProtocolError(f"expected a trial, got {type(other).__name__}")
