"""The engine's thread in the IO thread's place, for a moment while that one sleeps.

A load over ``cuda_ipc`` that the offer board serves needs nobody else: to begin it is to launch
copies, to end it is to look at an event and at the board. To hand that over to the IO thread and
back takes about as long as to do it, and longer beside an engine that computes, because each thread
that wakes waits for the interpreter. On two H200s a load took, handed over and like this::

    tokens    engine thread   handed over     borrowed
       128    busy            1.03-1.08 ms    0.43-0.44 ms
     1,024    busy            1.7-2.1 ms      0.82-0.86 ms
     8,192    busy            4.5 ms          3.3-3.5 ms
       128    idle            0.45-0.47 ms    0.38-0.45 ms

Whoever borrows does what is short and touches no socket: ZeroMQ may look at its sockets while the
thread polls. What is said meanwhile is deferred, and leaves when the thread has its turn back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvxfer.connector.io_thread import Call, IoThread
from kvxfer.connector.ledger import Ledger
from kvxfer.connector.records import NewLoad
from kvxfer.connector.sink import Sink
from kvxfer.transports.base import DirectSink, SinkTransport


class Borrower:
    """What the engine's thread does of the IO thread's work; only where a wire is quick."""

    def __init__(
        self, io: IoThread, ledger: Ledger, sink: Sink, wires: Iterable[SinkTransport]
    ) -> None:
        self._io = io
        self._ledger = ledger
        self._sink = sink
        self._wires = [wire for wire in wires if isinstance(wire, DirectSink) and wire.is_quick]

    def begin(self, loads: Sequence[NewLoad], *orders: Call) -> bool:
        """Carry out orders, of which these loads are a part and which touch no socket, if the IO
        thread sleeps and they are quick. False: nothing was done.
        """
        if not (self._wires and loads and self._io.borrow()):
            return False
        try:
            if not self._sink.begins_quickly(loads):
                return False
            for order in orders:
                self._io.guard(order)
            return True
        finally:
            self._io.give_back()

    def look(self) -> None:
        """Take note of loads that are over, if the IO thread sleeps."""
        if all(wire.is_idle for wire in self._wires) or not self._io.borrow():
            return
        try:
            for wire in self._wires:
                self._io.guard(self._look_at, wire)
        finally:
            self._io.give_back()

    def _look_at(self, wire: DirectSink) -> None:
        for completion in wire.look():
            self._io.guard(self._sink.on_completion, completion)
        self._ledger.take_counts(wire.name, wire.counts)
