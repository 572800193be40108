"""One end of a connection over UCX: a worker, its endpoint, its staging and what is under way.

UCX matches tags within a worker and has no way to take back a message that has begun to arrive. So
each end has a worker of its own, and what belongs to a connection ends with it: what was posted,
what has come unasked, and what is half received.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvxfer.errors import TransportUnavailable
from kvxfer.transports.pipe import PipeBroken, Slots
from kvxfer.transports.staging import make_staging
from kvxfer.transports.ucx_library import Endpoint, Request, StartsOperation, Ucx

SLOT_BITS, GENERATION_BITS = 12, 20
CONNECTION_BITS = 64 - SLOT_BITS - GENERATION_BITS
MAX_SLOTS = (1 << SLOT_BITS) - 1


def tag_of(connection: int, slot: int, generation: int) -> int:
    """64 bits that no two messages under way have in common; generations wrap. The slot behind the
    last is that of short messages (``ucx_mail``).
    """
    generation &= (1 << GENERATION_BITS) - 1
    return (connection << SLOT_BITS | slot) << GENERATION_BITS | generation


class UcxEnd:
    """All that there is of one end. ``restless`` is called when it has something to do although its
    descriptor is silent.
    """

    def __init__(
        self,
        ucx: Ucx,
        context: object,
        device: torch.device,
        slots: Slots,
        restless: Callable[[UcxEnd], None],
    ) -> None:
        """Raises TransportUnavailable."""
        if slots.num_slots > MAX_SLOTS:
            raise TransportUnavailable(
                f"ucx: expected at most {MAX_SLOTS} slots, got {slots.num_slots}"
            )
        self.slots, self.ucx, self._restless = slots, ucx, restless
        staging = make_staging(slots.nbytes, device)
        self.parts: list[torch.Tensor] = list(staging.view(slots.num_slots, -1))
        self._arrays = [ucx.array(part) for part in self.parts]
        self._cuts = list(zip(self.parts, self._arrays, strict=True))
        """The beginning of each slot that was used last: most chunks are as long as the one before,
        and to cut a tensor takes 5 us, 25 of a cold processor."""
        self.worker = ucx.worker(context)
        self.fd = self.worker.epoll_file_descriptor
        self._endpoint: Endpoint | None = None
        self._under_way: dict[Request, object] = {}
        """What may still touch memory, and which: UCX itself keeps no reference to it."""

    def connect(self, address: bytes) -> None:
        """To the peer's worker. Raises PipeBroken."""
        self._endpoint = self.ucx.connect(self.worker, address)

    def beginning(self, slot: int, nbytes: int) -> torch.Tensor:
        """So much of the slot."""
        return self._cut(slot, nbytes)[0]

    def send(self, slot: int, tag: int, nbytes: int) -> Request:
        """The beginning of the slot. Raises PipeBroken."""
        return self.start(self.endpoint.tag_send, self._cut(slot, nbytes)[1], tag)

    def _cut(self, slot: int, nbytes: int) -> tuple[torch.Tensor, object]:
        known = self._cuts[slot]
        if known[0].numel() != nbytes:
            part = self.parts[slot][:nbytes]
            known = self._cuts[slot] = (part, self.ucx.array(part))
        return known

    def receive(self, slot: int, tag: int) -> Request:
        """Into the slot. Raises PipeBroken."""
        return self.start(self.endpoint.tag_recv, self._arrays[slot], tag)

    @property
    def is_connected(self) -> bool:
        """Whether the peer's address is known."""
        return self._endpoint is not None

    @property
    def endpoint(self) -> Endpoint:
        """Raises PipeBroken before it is connected."""
        if self._endpoint is None:
            raise PipeBroken("ucx: expected the peer's address before any chunk, got none")
        return self._endpoint

    def start(self, operation: StartsOperation, array: object, tag: int) -> Request:
        """One of the endpoint's, on an array of ``ucx``. Raises PipeBroken."""
        try:
            request = operation(array, self.ucx.tag(tag))
        except self.ucx.Error as exc:
            raise PipeBroken(f"ucx: expected to send and receive, got {exc!r}") from exc
        self._under_way[request] = array
        # What that began may have to go on, or may be done already: then the descriptor is silent.
        if self.worker.progress_once() or not self.worker.arm():
            self._restless(self)
        return request

    def check(self) -> None:
        """Raises PipeBroken for an operation that has failed, or a peer that has gone."""
        for request in [request for request in self._under_way if request.completed]:
            self.take(request)
        if self._endpoint is None or self._endpoint.alive:
            return
        try:
            self._endpoint.raise_on_error()
        except self.ucx.Error as exc:
            raise PipeBroken(f"ucx: expected a peer that is there, got {exc!r}") from exc
        raise PipeBroken("ucx: expected an open connection, got one that the peer has closed")

    def take(self, request: Request) -> None:
        """It has completed. Raises PipeBroken if it has failed."""
        self._under_way.pop(request, None)
        try:
            request.check_error()
        except self.ucx.Error as exc:
            raise PipeBroken(f"ucx: expected a chunk to get through, got {exc!r}") from exc

    def finish(self) -> bool:
        """Cancel everything and let go of UCX's part. False if an operation has no end: then
        nothing is let go of.
        """
        if self._endpoint is not None:
            self._endpoint.close_blocking()
        self.worker.cancel_inflight_requests()  # those of an endpoint that had failed before
        if not all(request.completed for request in self._under_way):
            return False
        # The worker goes, and with it what UCX has of messages that had begun; the memory after it.
        self._under_way.clear()
        del self._endpoint, self.worker
        return True
