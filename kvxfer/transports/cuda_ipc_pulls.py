"""The copies of a direct wire between GPUs: launches on one stream, for reads that take turns.

Few bytes are on their way at a time, so that a read that is given up ends soon. Runs on the IO
thread, which sees what is over (:mod:`~kvxfer.transports.launches`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from kvxfer.tensors.device_copy import DeviceCopier
from kvxfer.tensors.device_launch import Event, Stream
from kvxfer.tensors.device_memory import MappedMemory
from kvxfer.transfer.wire import Reason
from kvxfer.transports.attachments import Attached
from kvxfer.transports.base import (
    Progress,
    ReadBroke,
    ReadDone,
    ReadStopped,
    SinkCompletion,
    TransferKey,
    Wake,
)
from kvxfer.transports.completions import Completions
from kvxfer.transports.launches import Flight, Launches

IN_FLIGHT_NBYTES = 2 << 30
"""Bytes launched and not seen complete: two launches, 5 ms of a link of 400 GB/s."""
MAX_LAUNCHES = 64
"""On their way. Behind 200 of them CUDA lets a thread wait for room, and ours would not let go of
the GIL meanwhile.
"""


@dataclass(slots=True, eq=False)
class _Pull:
    """One read. ``launches``: event and bytes of each, made as they are taken; None when no more
    follow. ``end``: how it ends once nothing of it is in flight, None while it goes well.
    """

    key: TransferKey
    attached: Attached[MappedMemory]
    launches: Iterator[tuple[Event, int]] | None
    num_in_flight: int = 0
    nbytes: int = 0
    end: SinkCompletion | None = None

    def end_as(self, end: SinkCompletion) -> None:
        """No more launches; the first reason counts."""
        self.launches = None
        self.end = self.end or end


class Pulls:
    """Those of one sink, which takes what they note."""

    def __init__(
        self,
        copier: DeviceCopier,
        stream: Stream,
        completions: Completions[SinkCompletion],
        wake: Wake,
        counts: Counter[str],
    ) -> None:
        self._copier, self._stream, self._wake, self._counts = copier, stream, wake, counts
        self._completions = completions
        self._pulls: dict[TransferKey, _Pull] = {}
        self._turns: deque[_Pull] = deque()
        self._in_flight: Launches[_Pull] = Launches(wake)
        self.broken = ""
        """Why nothing can be read any more: a CUDA error is for ever."""

    def __contains__(self, key: TransferKey) -> bool:
        return key in self._pulls

    @property
    def is_idle(self) -> bool:
        """Nothing is on its way."""
        return not self._pulls

    @property
    def attached(self) -> set[Attached[MappedMemory]]:
        """From where something is read."""
        return {pull.attached for pull in self._pulls.values()}

    def begin(
        self,
        key: TransferKey,
        attached: Attached[MappedMemory],
        launches: Iterator[tuple[Event, int]],
        after: torch.cuda.Event | None,
    ) -> None:
        """Launch what can be, behind the event. Raises RuntimeError, of CUDA's."""
        if after is not None:
            self._copier.wait(self._stream, after)
        pull = self._pulls[key] = _Pull(key, attached, launches)
        self._turns.append(pull)
        self._advance(self._launch)
        self._wake()  # somebody has to see it through

    def stop(self, key: TransferKey) -> None:
        """What was launched is the last of it."""
        pull = self._pulls.get(key)
        if pull is None:
            self._completions.tell(ReadStopped(key))
            return
        pull.end = None  # whatever it was going to say, it was asked to stop
        pull.end_as(ReadStopped(key))
        if self.finish():
            self._wake()

    def lose(self, attached: Attached[MappedMemory], detail: str) -> None:
        """Nothing more is read from there."""
        for pull in self._pulls.values():
            if pull.attached is attached:
                pull.end_as(ReadBroke(pull.key, Reason.PEER_LOST, detail))

    def follow(self) -> None:
        """See what is over, launch what follows, and look again at what will be over soon."""
        self._advance(self._follow)

    def land_now(self) -> None:
        """See what is over, launch what follows; then ``follow`` is to be called, too."""
        self._advance(self._land_now)

    def finish(self) -> bool:
        """The ends of reads that have nothing in flight; True if there was one."""
        over = [
            pull
            for pull in self._pulls.values()
            if pull.launches is None and not pull.num_in_flight
        ]
        for pull in over:
            del self._pulls[pull.key]
            self._completions.note(pull.end or ReadDone(pull.key, pull.nbytes, certified=False))
        return bool(over)

    def drain(self) -> None:
        """Launch no more, and wait for what runs."""
        for pull in self._pulls.values():
            pull.end_as(ReadStopped(pull.key))
        try:
            self._in_flight.synchronize()
            self._land(self._in_flight.land())
        except RuntimeError as exc:
            self._break(str(exc))
        self.finish()

    def close(self) -> None:
        """End the thread that waits for the GPU; nothing is on its way any more."""
        self._in_flight.close()

    def _advance(self, step: Callable[[], object]) -> None:
        """One of the three below. An error of CUDA's ends all reads."""
        try:
            step()
        except RuntimeError as exc:
            self._break(str(exc))

    def _follow(self) -> None:
        landed = self._in_flight.land()
        while True:
            self._land(landed)
            self._launch()
            landed = self._in_flight.land_close()
            if not landed:
                break
        self._in_flight.expect()

    def _land_now(self) -> None:
        self._land(self._in_flight.land())
        if self._launch():
            self._wake()

    def _launch(self) -> bool:
        """One launch for each read in turn, as long as few are on their way, and few bytes, and the
        host need not wait for room for their ids. False if there was none.
        """
        in_flight, has_launched = self._in_flight, False
        while self._turns and in_flight.nbytes < IN_FLIGHT_NBYTES and len(in_flight) < MAX_LAUNCHES:
            if not self._copier.has_room():
                break
            pull = self._turns.popleft()
            if pull.launches is None:
                continue
            try:
                following = next(pull.launches, None)
            except (RuntimeError, ValueError) as exc:
                pull.end_as(ReadBroke(pull.key, Reason.READ_FAILED, f"launch: {exc}"))
                following = (self._copier.mark(self._stream), 0)  # a part of it may run
            if following is None:
                pull.launches = None
                continue
            if pull.launches is not None:
                self._turns.append(pull)
            in_flight.add(pull, *following)
            pull.num_in_flight += 1
            has_launched = True
        return has_launched

    def _land(self, landed: Sequence[Flight[_Pull]]) -> None:
        """Take note of launches that are over."""
        for flight in landed:
            pull = flight.owner
            pull.num_in_flight -= 1
            pull.nbytes += flight.nbytes
            if pull.launches is not None:
                self._completions.note(Progress(pull.key, pull.nbytes))

    def _break(self, detail: str) -> None:
        """Nothing runs in this process's context any more."""
        self.broken = f"this GPU cannot be used any more: {detail}"
        self._counts["gpu_broken"] += 1
        self._in_flight.forget()
        for pull in self._pulls.values():
            pull.num_in_flight = 0
            pull.end_as(ReadBroke(pull.key, Reason.READ_FAILED, self.broken))
