"""A wire of kvxfer through its contract, without a connector: one process gives, the other takes.

A direct wire between GPUs reads by itself, and nobody is asked. In host memory the sink says what
it wants over a socket, as a connector's control channel would, and is timed from there to the
report that everything is in place. One IO thread on each side drives the wire.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec
import torch
import zmq

from kvxfer.bench.core import Timing, timed
from kvxfer.bench.members import SINK, SOURCE, Devices, Member
from kvxfer.bench.pools import Request
from kvxfer.bench.sockets import CONNECT_S, Address, accept, connect, hear, listen, say
from kvxfer.config import Config, load_config
from kvxfer.transfer.costs import REFERENCE_TOKENS, Workload
from kvxfer.transfer.manifest import RankId, RankManifest
from kvxfer.transfer.plan import CopyClass, PullClass
from kvxfer.transfer.pull import block_chunk_nbytes, pull_class, route_nbytes
from kvxfer.transports.base import (
    DirectSink,
    Packed,
    PeerGone,
    Readable,
    ReadBroke,
    ReadDone,
    ReadRequest,
    ReceivingSink,
    SendingSource,
    SendRequest,
    SinkTransport,
    TransferKey,
    Trial,
)
from kvxfer.transports.channel import Context
from kvxfer.transports.choice import Choice, choose
from kvxfer.transports.copy_thread import Copier
from kvxfer.transports.guard import Guard
from kvxfer.transports.parallel import make_context, make_copier
from kvxfer.transports.registry import (
    PIPES,
    data_endpoints,
    make_sinks,
    make_sources,
    published_infos,
)
from kvxfer.transports.stream_sink import StreamSink
from kvxfer.transports.wake_up import WakeUp

READ_S = 30.0
LONGEST_WAIT_MS = 100  # a wire wakes us; this is for one that forgot
ZMQ_TCP = "zmq-tcp"
"""The wire zmq as between two hosts: without its Unix socket."""
INCARNATION = b"bench-sink-bench"


BETWEEN_HOSTS = {ZMQ_TCP: "zmq", "tcp": "tcp"}
"""Wires whose messages go over TCP on one host, too."""


class TcpSink(StreamSink):
    uses_unix_sockets = False


def wire_config(wire: str, **settings: object) -> Config:
    chosen = {
        "transport": BETWEEN_HOSTS.get(wire, wire),
        "port": 0,
        "trust_network": True,
        **settings,
    }
    return load_config(chosen, environ={}).config


class Hands:
    """What a wire needs beside its memory, and how its IO thread waits."""

    def __init__(self, config: Config, device: torch.device, *watched: Readable) -> None:
        self.copy_thread, self.wake = make_copier(config, device), WakeUp()
        self.context = make_context(config)
        Guard(self.context, config)
        self._poller, self._polled = zmq.Poller(), list[Readable]()
        self.watched = list(watched)

    @property
    def all(self) -> tuple[Copier, WakeUp, Context]:
        return self.copy_thread, self.wake, self.context

    def wait(self, wire: SendingSource | SinkTransport | None) -> set[Readable]:
        """What can be read, of the wire or of what else is watched; what a wire has to be watched
        for may change every time.
        """
        wanted: list[Readable] = [self.wake.fd, *self.watched]
        wanted.extend(wire.pollables() if wire is not None else ())
        if wanted != self._polled:
            self._poller, self._polled = zmq.Poller(), wanted
            for each in wanted:
                self._poller.register(each, zmq.POLLIN)
        ready = {each for each, _ in self._poller.poll(LONGEST_WAIT_MS)}
        if self.wake.fd in ready:
            self.wake.clear()
        return ready

    def close(self) -> None:
        self.copy_thread.close()
        self.context.term()
        self.wake.close()


# ------------------------------------------------------------------ the giving process


class SendIds(msgspec.Struct, tag=True):
    """What a Pull does on a direct wire; the answer is the same, as a Grant."""

    ids: tuple[int, ...]


class SendChunks(msgspec.Struct, tag=True):
    """What a Pull does on a stream wire."""

    request: SendRequest


_commands = msgspec.msgpack.Decoder(SendIds | SendChunks)


class Giving(Member):
    """The source: serves its wire and the sink's requests on a thread."""

    def __init__(self, devices: Devices, nbytes: int, config: Config) -> None:
        super().__init__({SOURCE: devices.source}, nbytes)
        memory = self.memories[SOURCE].local
        self._listener = listen(config.host)
        self._hands = Hands(config, memory.device, self._listener.fileno())
        sources = make_sources(memory, config, *self._hands.all)
        (source,) = sources.values()
        self._source = source if isinstance(source, SendingSource) else None
        self.given = RankManifest(
            rank=RankId(0, 0),
            control_endpoint=f"tcp://{config.host}:1",
            data_endpoints=data_endpoints(sources),
            memories=published_infos(sources, memory),
            regions=(),
        )
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def manifest(self) -> RankManifest:
        return self.given

    def address(self) -> Address:
        """Where a sink says what it wants."""
        host, port = self._listener.getsockname()
        return host, port

    def _serve(self) -> None:
        control: socket.socket | None = None
        while not self._over.is_set():
            ready = self._hands.wait(self._source)
            for completion in self._source.poll() if self._source is not None else ():
                if self._source is not None and isinstance(completion, Packed):
                    self._source.send_packed(completion.key, completion.sequence)
            if self._listener.fileno() in ready:
                control = accept(self._listener)
                self._hands.watched = [control.fileno()]
            elif control is not None and control.fileno() in ready:
                try:
                    self._obey(control, _commands.decode(hear(control)))
                except ConnectionError:  # the sink has closed
                    break
        if control is not None:
            control.close()

    def _obey(self, control: socket.socket, command: SendIds | SendChunks) -> None:
        match command:
            case SendIds():
                say(control, msgspec.msgpack.encode(command))
            case SendChunks(request) if self._source is not None:
                self._source.submit_send(request)

    def close(self) -> None:
        self._over.set()
        self._hands.wake()
        self._thread.join()
        self._listener.close()
        if self._source is not None:
            self._source.close()
        self._hands.close()
        super().close()


# ------------------------------------------------------------------ the taking process


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request as a wire knows it."""

    copy_class: CopyClass
    pull: PullClass
    source_ids: tuple[int, ...]
    sink_ids: tuple[int, ...]
    chunk_nbytes: int


class Taking(Member):
    """The sink; drives its wire while it waits."""

    def __init__(self, devices: Devices, nbytes: int, config: Config) -> None:
        super().__init__({SINK: devices.sink}, nbytes)
        memory = self.memories[SINK].local
        self._hands = Hands(config, memory.device)
        self.sink: SinkTransport
        if devices.wire in BETWEEN_HOSTS:
            make_pipe = PIPES[BETWEEN_HOSTS[devices.wire]]
            self.sink = TcpSink(make_pipe, memory, config, *self._hands.all)
        else:
            (self.sink,) = make_sinks(memory, config, *self._hands.all).values()
        self._met: tuple[RankManifest, Choice] | None = None
        self._control: socket.socket | None = None
        self._num_reads = 0
        self._wanted: dict[Request, Wanted] = {}

    def meet(self, source: RankManifest, address: Address | None, request: Request) -> str:
        """Try the wire, as a connector does at the first contact, for such requests; what the trial
        says. ``address``: where the source is asked; None: nobody is, the wire reads by itself.
        """
        copy_class, _ = request.copy_class()
        pulls = (pull_class(copy_class, 0, REFERENCE_TOKENS),)
        workload = Workload(route_nbytes(pulls), block_chunk_nbytes(pulls))
        choice = choose({self.sink.name: self.sink}, source, workload)
        self._met = source, choice
        self._attach(choice.trial)
        if address is not None:
            self._control = connect(address)
            self._control.settimeout(CONNECT_S)
        return str(choice)

    def _attach(self, trial: Trial | None) -> None:
        source, choice = self._known
        if isinstance(self.sink, DirectSink):
            self.sink.attach(source, trial)
        else:
            self.sink.attach(source, choice.staging)

    @property
    def _known(self) -> tuple[RankManifest, Choice]:
        if self._met is None:
            raise RuntimeError("sink: expected meet before run")
        return self._met

    def run(self, way: str, request: Request) -> Timing:
        ask = self._begin(request)
        self.sink.poll()  # as an IO thread does after an end: then the last slots go back
        self.flush()
        return timed(ask, self._wait)

    def many(self, request: Request, count: int) -> float:
        """One after the other; seconds of all."""
        started_s = time.perf_counter()
        for _ in range(count):
            self._begin(request)()
            self._wait()
        return time.perf_counter() - started_s

    def reattach(self, request: Request, times: int) -> None:
        """Leave the source, come back and read once, again and again."""
        for _ in range(times):
            self.sink.detach(self._known[0].control_endpoint)
            self._attach(None)
            self.many(request, 1)

    def _begin(self, request: Request) -> Callable[[], None]:
        """What asks for a new read of it; kernels that it needs are compiled before."""
        source, choice = self._known
        if request not in self._wanted:
            # A connector has its classes from a plan, and so has a wire
            copy_class, pull = request.copy_class()
            self.sink.trial(source, CONNECT_S, (copy_class,)).close()
            ids = tuple(request.source_ids.tolist()), tuple(request.sink_ids.tolist())
            chunk_nbytes = choice.chunk_nbytes(request.nbytes)
            self._wanted[request] = Wanted(copy_class, pull, *ids, chunk_nbytes)
        self._num_reads += 1
        key = TransferKey(self._num_reads.to_bytes(16), INCARNATION, "pp0tp0", "pp0tp0")
        return partial(self._ask, key, source, self._wanted[request])

    def _ask(self, key: TransferKey, source: RankManifest, wanted: Wanted) -> None:
        classes, pulls = (wanted.copy_class,), (wanted.pull,)

        def read(ids: tuple[tuple[int, ...], ...], chunk_nbytes: int) -> ReadRequest:
            places = (wanted.sink_ids,)
            return ReadRequest(key, source, classes, pulls, ids, places, chunk_nbytes)

        if isinstance(self.sink, DirectSink) and self._control is None:
            self.sink.submit_read(read((wanted.source_ids,), 0))
            return
        assert self._control is not None
        if isinstance(self.sink, ReceivingSink):
            self.sink.submit_expect(read((), wanted.chunk_nbytes))
            sides, ids = (wanted.copy_class.source,), (wanted.source_ids,)
            asked = SendRequest(key, pulls, sides, ids, wanted.chunk_nbytes)
            say(self._control, msgspec.msgpack.encode(SendChunks(asked)))
        else:
            say(self._control, msgspec.msgpack.encode(SendIds(wanted.source_ids)))
            granted = msgspec.msgpack.decode(hear(self._control), type=SendIds).ids
            self.sink.submit_read(read((granted,), 0))

    def _wait(self) -> None:
        """Until the wire says that the read is done, as an IO thread waits: asleep. Raises
        RuntimeError where it breaks, TimeoutError.
        """
        deadline_s = time.monotonic() + READ_S
        while True:
            for completion in self.sink.poll():
                match completion:
                    case ReadDone():
                        return
                    case ReadBroke() | PeerGone():
                        raise RuntimeError(f"{self.sink.name}: {completion}")
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{self.sink.name}: expected the read done in {READ_S:g} s")
            self._hands.wait(self.sink)

    def close(self) -> None:
        """Unmap or disconnect, and end its threads."""
        if self._control is not None:
            self._control.close()
        self.sink.close()
        self._hands.close()
        super().close()
