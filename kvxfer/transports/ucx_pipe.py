"""UCX as a pipe: one tag message for each chunk, from staging to staging, and a short one for each
announcement and credit (``ucx_mail``).

Each end of a connection has a UCX worker of its own (``ucx_end``); beside that a tag names the
connection, by a number that the sink draws, the slot and the generation. Over TCP on one device a
worker costs 3 ms, 5 descriptors and next to no memory, and to connect it 10 ms.

A receive is posted for each slot as soon as the source's end is known, and again for the next
generation when the slot is freed. Peer error handling is always on: without it a killed peer takes
the process along or leaves requests without an end.
"""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from kvxfer.config import Config
from kvxfer.errors import TransportUnavailable
from kvxfer.tensors.device_memory import current_context
from kvxfer.transports.base import Wake
from kvxfer.transports.native_peers import net_devices, parse_address
from kvxfer.transports.pipe import Pipe, PipeBroken, Slots
from kvxfer.transports.ucx_end import UcxEnd
from kvxfer.transports.ucx_lanes import SinkAddress, UcxLane, UcxSinkLane, UcxSourceLane
from kvxfer.transports.ucx_library import Ucx

SPIN_S = 30e-6
"""How long ``progress`` looks on after something has happened. What belongs to it follows within
that on one host and in one rack, and the way through sleep and wake takes 20 to 40 us. No longer:
two processes that spin on shared cores lose half to three quarters of their throughput."""
TURN_S = 500e-6
"""After this long the IO thread looks at its other work, and comes back at once."""

_log = logging.getLogger("kvxfer.transports")
_quarantine: list[UcxEnd] = []  # what outlives its pipe


class UcxPipe(Pipe):
    """A UCX context, and a descriptor that tells when one of its workers has something to do."""

    name = "ucx"
    reads_peers = True

    def __init__(self, device: torch.device, config: Config, wake: Wake) -> None:
        """Staging lies on ``device``. Raises TransportUnavailable: what is missing, and what to
        install.
        """
        self._device, self._wake = device, wake
        self.is_fast = device.type == "cuda"
        self._ucx = Ucx()
        with self.on_device():
            self._context: object = self._ucx.context(device, net_devices(config))
        self._epoll = select.epoll()
        self._lanes: dict[int, UcxLane] = {}
        """Those that are open, by the descriptor of their worker."""
        self._restless: set[int] = set()
        """Workers that have something to do although their descriptor may be silent."""
        self._quarantined: list[UcxEnd] = []

    @property
    def quarantined_nbytes(self) -> int:
        """Staging that is kept until the process ends, because an operation on it has no end."""
        return sum(end.slots.nbytes for end in self._quarantined)

    def on_device(self) -> AbstractContextManager[object]:
        """Around every call of UCX: it works in the CUDA context of the thread."""
        return current_context(self._device) if self._device.type == "cuda" else nullcontext()

    def open_source(self, address: bytes, slots: Slots) -> UcxSourceLane:
        """Begins to connect to the sink's worker."""
        try:
            sink = parse_address("ucx", address, SinkAddress)
        except PipeBroken as exc:
            raise TransportUnavailable(str(exc)) from exc
        with self.on_device():
            end = self._new_end(slots)
            try:
                end.connect(sink.worker)
                lane = UcxSourceLane(self, end, sink.connection)
            except PipeBroken as exc:
                self.finish(end)
                raise TransportUnavailable(
                    f"{exc}; unless both sides have trust_network set, UCX stays within a host"
                ) from exc
        self._lanes[end.fd] = lane
        return lane

    def open_sink(self, slots: Slots, way: str = "") -> UcxSinkLane:
        """A worker that waits for the source's address."""
        self.way_named(way)
        with self.on_device():
            end = self._new_end(slots)
            lane = UcxSinkLane(self, end)
        self._lanes[end.fd] = lane
        return lane

    def _new_end(self, slots: Slots) -> UcxEnd:
        end = UcxEnd(self._ucx, self._context, self._device, slots, self.drive_soon)
        self._epoll.register(end.fd, select.EPOLLIN)
        self._restless.add(end.fd)  # its descriptor speaks once it has been armed
        return end

    def fds(self) -> Sequence[int]:
        """One, whatever connections there are."""
        return () if self._epoll.closed else (self._epoll.fileno(),)

    def drive_soon(self, *ends: UcxEnd) -> None:
        """Have ``progress`` called again at once, for these too."""
        self._restless.update(end.fd for end in ends)
        self._wake()

    def progress(self) -> None:
        """Drive the workers that have something to do, until they have not, a payload has arrived,
        or TURN_S is over.
        """
        if self._epoll.closed:
            return
        fds = self._restless | {fd for fd, _ in self._epoll.poll(0)}
        self._restless.clear()
        if lanes := [self._lanes[fd] for fd in fds if fd in self._lanes]:
            with self.on_device():
                self._drive(lanes)

    def _drive(self, lanes: Sequence[UcxLane]) -> None:
        workers = [lane.end.worker for lane in lanes]
        now_s = last_s = time.perf_counter()
        end_s = now_s + TURN_S
        while now_s < end_s:
            if any([worker.progress_once() for worker in workers]):
                last_s = now_s
                if any(lane.has_arrivals for lane in lanes):
                    break
            elif now_s - last_s >= SPIN_S:
                if any(lane.expects_soon(now_s) for lane in lanes):
                    break
                if all([worker.arm() for worker in workers]):
                    return
            now_s = time.perf_counter()
        self.drive_soon(*(lane.end for lane in lanes))

    def finish(self, end: UcxEnd) -> None:
        """This end of a connection is over."""
        self._lanes.pop(end.fd, None)
        self._restless.discard(end.fd)
        self._epoll.unregister(end.fd)
        with self.on_device():
            if not end.finish():
                self._quarantined.append(end)
                _log.warning(
                    "ucx: %d bytes of staging are kept: an operation on them has no end",
                    end.slots.nbytes,
                )

    def close(self) -> None:
        """Close what is open, and UCX. Idempotent."""
        for lane in list(self._lanes.values()):
            lane.close()
        _quarantine.extend(self._quarantined)
        self._epoll.close()
        self._context = None
