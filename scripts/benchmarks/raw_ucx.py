"""What UCX itself makes of messages of a chunk's size: the limit of the wire ``ucx``.

Tag messages between two workers with peer error handling, from one buffer for each slot to another,
as large and as many under way as the wire has found best; nothing is packed, announced or unpacked.
UCX is set up as the wire sets it up. Both sides look on for a moment, then sleep.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time

import msgspec
import torch

from kvxfer.config import Config
from kvxfer.transports.native_peers import net_devices
from kvxfer.transports.ucx_library import Endpoint, Ucx
from kvxfer.transports.ucx_library import Request as Operation
from scripts.benchmarks.host_ways import Cut
from scripts.benchmarks.members import Timing, timed
from scripts.benchmarks.pools import Request
from scripts.benchmarks.raw_sockets import CONNECT_S, connect, hear, listen, say, without_delay

RAW_UCX = "raw ucx"
MOST_NBYTES, MOST_SLOTS = 4 << 20, 16
USUAL_CUT = Cut(1 << 20, 8)
"""Where the wire is not there to say how it cuts."""
SPIN_S = 30e-6
"""How long to look on before sleeping."""
LOOK_S = 0.1
"""How long to sleep at most: for a descriptor that says nothing."""


class Messages(msgspec.Struct, frozen=True, array_like=True):
    """So many of that size, with tags that follow each other, ``num_slots`` under way."""

    nbytes: int
    count: int
    num_slots: int
    first_tag: int


_messages = msgspec.msgpack.Decoder(Messages)


class UcxEnd:
    """One worker, with a buffer for each message under way."""

    def __init__(self, config: Config) -> None:
        self._ucx = Ucx()
        self._worker = self._ucx.worker(self._ucx.context(torch.device("cpu"), net_devices(config)))
        self._pattern = torch.arange(MOST_NBYTES).to(torch.uint8)
        self.slots = [self._pattern.clone() for _ in range(MOST_SLOTS)]
        self._endpoint: Endpoint | None = None

    def worker_address(self) -> bytes:
        """For the other end."""
        return bytes(self._worker.address.tobytes())

    def meet(self, address: bytes) -> None:
        """The other end."""
        self._endpoint = self._ucx.connect(self._worker, address)

    def is_intact(self) -> bool:
        """Whether each buffer holds what both ends began with."""
        return all(torch.equal(slot, self._pattern) for slot in self.slots)

    def move(self, messages: Messages, *, is_source: bool) -> None:
        """All of them, in order, a slot each time."""
        if self._endpoint is None:
            raise RuntimeError(f"{RAW_UCX}: expected meet before move")
        start = self._endpoint.tag_send if is_source else self._endpoint.tag_recv
        num_slots = messages.num_slots
        arrays = [self._ucx.array(slot[: messages.nbytes]) for slot in self.slots[:num_slots]]
        requests: list[Operation] = []
        for number in range(messages.count):
            if number >= num_slots:
                self._finish(requests[number - num_slots])
            tag = self._ucx.tag(messages.first_tag + number)
            requests.append(start(arrays[number % num_slots], tag))
        for request in requests[-num_slots:]:
            self._finish(request)

    def _finish(self, request: Operation) -> None:
        quiet_s = time.perf_counter()
        while not request.completed:
            now_s = time.perf_counter()
            if self._worker.progress_once():
                quiet_s = now_s
            elif now_s - quiet_s > SPIN_S and self._worker.arm():
                select.select((self._worker.epoll_file_descriptor,), (), (), LOOK_S)
        request.check_error()

    def close(self) -> None:
        """Disconnect."""
        if self._endpoint is not None:
            self._endpoint.close_blocking()
        del self._endpoint, self._worker


class UcxSource:
    """Sends what it is asked for, on a thread."""

    def __init__(self, config: Config) -> None:
        self._end = UcxEnd(config)
        self._listener = listen(config.host)
        self._control: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def card(self) -> tuple[bytes, tuple[str, int]]:
        """What the sink needs to know."""
        host, port = self._listener.getsockname()
        return self._end.worker_address(), (host, port)

    def meet(self, address: bytes) -> None:
        """The sink, which connects now."""
        self._end.meet(address)
        self._listener.settimeout(CONNECT_S)
        self._control = without_delay(self._listener.accept()[0])
        self._control.settimeout(None)
        self._thread = threading.Thread(target=self._serve, args=(self._control,))
        self._thread.start()

    def _serve(self, control: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the sink has closed
            while True:
                self._end.move(_messages.decode(hear(control)), is_source=True)

    def close(self) -> None:
        """Give everything back."""
        if self._control is not None and self._thread is not None:
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)
            self._thread.join()
            self._control.close()
        self._listener.close()
        self._end.close()


class UcxSink:
    """Asks and takes."""

    def __init__(self, config: Config) -> None:
        self._end = UcxEnd(config)
        self._control: socket.socket | None = None
        self._tag = 0
        self._cuts: dict[int, Cut] = {}

    def worker_address(self) -> bytes:
        """What the source needs to know."""
        return self._end.worker_address()

    def meet(self, card: tuple[bytes, tuple[str, int]]) -> None:
        """The source; connects."""
        address, control = card
        self._end.meet(address)
        self._control = connect(control)

    def check(self) -> None:
        """Each slot is sent once. Raises RuntimeError for wrong bytes."""
        for slot in self._end.slots:
            slot.zero_()
        self._move(Cut(MOST_NBYTES, MOST_SLOTS), MOST_NBYTES * MOST_SLOTS)
        if not self._end.is_intact():
            raise RuntimeError(f"{RAW_UCX}: expected the pattern in every slot, got other bytes")

    def use(self, request: Request, cut: Cut) -> None:
        """How the wire moves such a request."""
        self._cuts[request.nbytes] = cut

    def run(self, way: str, request: Request) -> Timing:
        """As many bytes as the request has, in messages of the size that the wire would take."""
        cut = self._cuts.get(request.nbytes, USUAL_CUT)
        return timed(lambda: None, lambda: self._move(cut, request.nbytes))

    def _move(self, cut: Cut, nbytes: int) -> None:
        if self._control is None:
            raise RuntimeError(f"{RAW_UCX}: expected meet before run")
        size, num_slots = min(cut.chunk_nbytes, MOST_NBYTES), min(cut.num_slots, MOST_SLOTS)
        messages = Messages(size, -(-nbytes // size), num_slots, self._tag)
        say(self._control, msgspec.msgpack.encode(messages))
        self._end.move(messages, is_source=False)
        self._tag += messages.count

    def close(self) -> None:
        """Give everything back."""
        if self._control is not None:
            self._control.close()
        self._end.close()
