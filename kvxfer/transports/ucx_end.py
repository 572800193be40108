"""One end of a connection over UCX: a worker, its endpoint, its staging and what is under way.

UCX matches tags within a worker and has no way to take back a message that has begun to arrive. So
each end has a worker of its own, and what belongs to a connection ends with it: what was posted,
what has come unasked, and what is half received.

Beside payloads it carries announcements and credits: they need no thread of ZeroMQ's, and come with
the wake that the payload needs anyway. Between two GPUs an announcement took 0.1 to 0.2 ms less
that way than over ZeroMQ, of the 2 that a slot was under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from kvxfer.errors import TransportUnavailable
from kvxfer.transports.pipe import PipeBroken, Slots, make_staging
from kvxfer.transports.ucx_library import Endpoint, Request, StartsOperation, Ucx

SLOT_BITS, GENERATION_BITS = 12, 20
CONNECTION_BITS = 64 - SLOT_BITS - GENERATION_BITS
MAX_SLOTS = (1 << SLOT_BITS) - 1
MOST_NBYTES = 1022
"""Of a message: an announcement has 200 or so."""
_LENGTH_NBYTES = 2
MOST_AT_ONCE = 64
"""Taken in one turn, so that no peer has the IO thread to itself."""
LAST_TURNS = 100
"""Of a worker whose operations were cancelled. Those that were seen to need a turn needed one or
two, of a few microseconds."""


def tag_of(connection: int, slot: int, generation: int) -> int:
    """64 bits that no two messages under way have in common; generations wrap. The slot behind the
    last is that of short messages (:class:`UcxMail`).
    """
    generation &= (1 << GENERATION_BITS) - 1
    return (connection << SLOT_BITS | slot) << GENERATION_BITS | generation


class UcxEnd:
    """One end of a connection. ``restless`` is called when the end has something to do although its
    descriptor is not readable.
    """

    def __init__(
        self,
        ucx: Ucx,
        context: object,
        device: torch.device,
        slots: Slots,
        restless: Callable[[UcxEnd], None],
    ) -> None:
        """Allocate the staging and a worker. Raises TransportUnavailable."""
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
        nothing is let go of, and it may be tried again.
        """
        if self._endpoint is not None:
            self._endpoint.close_blocking()
        self.worker.cancel_inflight_requests()  # those of an endpoint that had failed before
        for _ in range(LAST_TURNS):
            if all(request.completed for request in self._under_way):
                break
            self.worker.progress_once()  # a large send that was cancelled ends with the next turn
        else:
            return False
        if self._endpoint is not None:
            self.ucx.forget_cancelled(self._endpoint)
        # The worker goes, and with it what UCX has of messages that had begun; the memory after it.
        self._under_way.clear()
        del self._endpoint, self.worker
        return True


class UcxMail:
    """Both directions of one end. A message's number is in the place of a generation, and one
    receive is posted, for the next: UCX keeps what comes before its turn.
    """

    def __init__(self, end: UcxEnd, connection: int) -> None:
        self._end, self._connection = end, connection
        self._num_sent = self._num_posted = 0
        self._buffer = bytearray(_LENGTH_NBYTES + MOST_NBYTES)
        self._array = end.ucx.array(self._buffer)
        self._posted: Request | None = None
        self._sent: deque[Request] = deque()

    def listen(self) -> None:
        """Once the end is connected. Raises PipeBroken."""
        tag = tag_of(self._connection, MAX_SLOTS, self._num_posted)
        self._posted = self._end.start(self._end.endpoint.tag_recv, self._array, tag)
        self._num_posted += 1

    @property
    def has_arrived(self) -> bool:
        """Whether ``receive`` would return a message."""
        return self._posted is not None and bool(self._posted.completed)

    def send(self, message: bytes) -> bool:
        """False for one that is too long. Raises PipeBroken."""
        if len(message) > MOST_NBYTES:
            return False
        while self._sent and self._sent[0].completed:  # nobody else looks at what a sink has sent
            self._end.take(self._sent.popleft())
        framed = bytearray(len(message).to_bytes(_LENGTH_NBYTES, "little") + message)
        tag = tag_of(self._connection, MAX_SLOTS, self._num_sent)
        array = self._end.ucx.array(framed)
        self._sent.append(self._end.start(self._end.endpoint.tag_send, array, tag))
        self._num_sent += 1
        return True

    def receive(self) -> list[bytes]:
        """What has come. Raises PipeBroken."""
        found: list[bytes] = []
        while self._posted is not None and self._posted.completed and len(found) < MOST_AT_ONCE:
            self._end.take(self._posted)
            nbytes = int.from_bytes(self._buffer[:_LENGTH_NBYTES], "little")
            if nbytes > MOST_NBYTES:
                raise PipeBroken(f"ucx: expected a message of {MOST_NBYTES} bytes, got {nbytes}")
            found.append(bytes(self._buffer[_LENGTH_NBYTES : _LENGTH_NBYTES + nbytes]))
            self.listen()
        return found
