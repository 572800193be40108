"""The engine's thread does short work of the IO thread while the IO thread sleeps.

A load over ``cuda_ipc`` that the offer board serves needs no message: its begin launches copies,
its end looks at a CUDA event and at the board. The handover to the IO thread and back takes about
as long as this work, and longer beside an engine that computes, because each thread that wakes
waits for the interpreter. On two H200s a load took, handed over to the IO thread and borrowed::

    tokens    engine thread   handed over     borrowed
       128    busy            1.03-1.08 ms    0.43-0.44 ms
     1,024    busy            1.7-2.1 ms      0.82-0.86 ms
     8,192    busy            4.5 ms          3.3-3.5 ms
       128    idle            0.45-0.47 ms    0.38-0.45 ms

A borrower does only short work and touches no socket, because ZeroMQ may look at its sockets while
the IO thread polls. Messages of the borrower are deferred; they leave in the IO thread's next
round, which comes by itself LEISURE_S later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvxfer.connector.io_thread import Call, IoThread
from kvxfer.connector.ledger import Ledger
from kvxfer.connector.records import NewLoad
from kvxfer.connector.sink import Sink
from kvxfer.transports.base import DirectSink, SinkTransport


class Borrower:
    """Work of the IO thread that the engine's thread may do, over these wires."""

    def __init__(
        self, io: IoThread, ledger: Ledger, sink: Sink, wires: Sequence[DirectSink]
    ) -> None:
        self._io, self._ledger, self._sink, self._wires = io, ledger, sink, wires

    @classmethod
    def make(
        cls, io: IoThread, ledger: Ledger, sink: Sink, wires: Iterable[SinkTransport]
    ) -> Borrower | None:
        """None where no wire is quick."""
        quick = [wire for wire in wires if isinstance(wire, DirectSink) and wire.is_quick]
        return cls(io, ledger, sink, quick) if quick else None

    def begin(self, loads: Sequence[NewLoad], order: Call, *, sees_through: bool = False) -> bool:
        """Carry out ``order``, which touches no socket and of which ``loads`` are a part. Only if
        the IO thread sleeps and the loads begin quickly. ``sees_through``: :meth:`look` follows in
        this step, until they have ended. False: nothing was done.
        """
        if not (loads and self._io.borrow(sees_through=sees_through)):
            return False
        try:
            if not self._sink.begins_quickly(loads):
                return False
            self._io.guard(order)
            return True
        finally:
            self._io.give_back()

    def look(self, *, sees_through: bool = False) -> None:
        """Note the loads that have ended, if the IO thread sleeps."""
        if all(wire.is_idle for wire in self._wires):
            return
        if not self._io.borrow(sees_through=sees_through):
            return
        try:
            for wire in self._wires:
                self._io.guard(self._look_at, wire)
        finally:
            self._io.give_back()

    def _look_at(self, wire: DirectSink) -> None:
        for completion in wire.look():
            self._io.guard(self._sink.on_completion, completion)
        if wire.counts:
            self._ledger.take_counts(wire.name, wire.counts)
