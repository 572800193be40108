"""A wire of kvxfer in host memory through its contract, without a connector: the sink says what it
wants over a socket, as a connector's control channel would, and is timed from there to the report
that everything is in place. One IO thread on each side drives the wire.
"""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass

import msgspec
import zmq

from kvxfer.config import Config
from kvxfer.transfer.costs import REFERENCE_TOKENS, Workload
from kvxfer.transfer.manifest import RankId, RankManifest
from kvxfer.transfer.plan import CopyClass, PullClass
from kvxfer.transfer.pull import block_chunk_nbytes, pull_class, route_nbytes
from kvxfer.transports.base import (
    Packed,
    Readable,
    ReadRequest,
    SendRequest,
    SinkTransport,
    SourceTransport,
    TransferKey,
)
from kvxfer.transports.choice import Choice, choose
from kvxfer.transports.registry import data_endpoints, make_sinks, make_sources, published_infos
from kvxfer.transports.stream_sink import StreamSink
from kvxfer.transports.zmq_pipe import ZmqPipe
from scripts.benchmarks.devices import Devices
from scripts.benchmarks.members import SINK, SOURCE, Member, Timing, timed
from scripts.benchmarks.pools import Request
from scripts.benchmarks.raw_sockets import CONNECT_S, connect, hear, listen, say, without_delay
from scripts.benchmarks.usage import Usage, usage_now
from scripts.benchmarks.wire_ways import LONGEST_WAIT_MS, Hands, new_hands, until_read

ZMQ_TCP = "zmq-tcp"
"""The wire zmq as between two hosts: without its Unix socket."""
INCARNATION = b"bench-sink-bench"


class TcpSink(StreamSink):
    """The taking end of ``zmq-tcp``."""

    uses_unix_sockets = False


class SendIds(msgspec.Struct, tag=True):
    """What a Pull does on a direct wire; the answer is the same, as a Grant."""

    ids: tuple[int, ...]


class SendChunks(msgspec.Struct, tag=True):
    """What a Pull does on a stream wire."""

    request: SendRequest


_commands = msgspec.msgpack.Decoder(SendIds | SendChunks)


class Looker:
    """Waits until something of a wire, or of what else is watched, can be read."""

    def __init__(self, hands: Hands, *others: Readable) -> None:
        self._hands, self._others = hands, others
        self._poller = zmq.Poller()
        self._watched: list[Readable] = []

    def wait(self, wire: SourceTransport | SinkTransport, timeout_ms: int) -> set[Readable]:
        """What can be read; what a wire has to be watched for may change every time."""
        wanted: list[Readable] = [self._hands.wake.fd, *self._others, *wire.pollables()]
        if wanted != self._watched:
            self._poller = zmq.Poller()
            for each in wanted:
                self._poller.register(each, zmq.POLLIN)
            self._watched = wanted
        ready = {each for each, _ in self._poller.poll(timeout_ms)}
        if self._hands.wake.fd in ready:
            self._hands.wake.clear()
        return ready


class HostGiving(Member):
    """The source: serves its wire and the sink's requests on a thread."""

    def __init__(self, devices: Devices, nbytes: int, config: Config) -> None:
        super().__init__({SOURCE: devices.source}, nbytes)
        memory = self.memories[SOURCE].local
        self._hands = new_hands()
        hands = (self._hands.copy_thread, self._hands.wake, self._hands.context)
        sources = make_sources(memory, config, *hands)
        (self._source,) = sources.values()
        self._listener = listen(config.host)
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
        """What a sink attaches to."""
        return self.given

    def address(self) -> tuple[str, int]:
        """Where a sink says what it wants."""
        host, port = self._listener.getsockname()
        return host, port

    def usage(self) -> Usage:
        """What this process holds."""
        return usage_now()

    def run(self, way: str, request: Request) -> Timing:
        """Never: the sink asks."""
        raise NotImplementedError(f"{way}: the sink asks")

    def _serve(self) -> None:
        looker = Looker(self._hands, self._listener.fileno())
        control: socket.socket | None = None
        while not self._over.is_set():
            ready = looker.wait(self._source, LONGEST_WAIT_MS)
            for completion in self._source.poll():
                if isinstance(completion, Packed):
                    self._source.send_packed(completion.key, completion.sequence)
            if self._listener.fileno() in ready:
                control = without_delay(self._listener.accept()[0])
                looker = Looker(self._hands, control.fileno())
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
            case SendChunks(request):
                self._source.submit_send(request)

    def close(self) -> None:
        """Give everything back."""
        self._over.set()
        self._hands.wake()
        self._thread.join()
        self._listener.close()
        self._source.close()
        self._hands.close()
        super().close()


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request as a wire knows it."""

    classes: tuple[CopyClass, ...]
    pulls: tuple[PullClass, ...]
    source_ids: tuple[int, ...]
    sink_ids: tuple[int, ...]
    chunk_nbytes: int


@dataclass(frozen=True, slots=True)
class Cut:
    """How a stream wire moves a request: in chunks of that size, so many under way at most. Both 0
    on a direct wire.
    """

    chunk_nbytes: int
    num_slots: int


def workload_of(request: Request) -> Workload:
    """What a connector would tell the probe."""
    copy_class, _ = request.copy_class()
    pulls = (pull_class(copy_class, 0, REFERENCE_TOKENS),)
    return Workload(route_nbytes(pulls), block_chunk_nbytes(pulls))


class HostTaking(Member):
    """The sink; drives its wire while it waits."""

    def __init__(self, devices: Devices, nbytes: int, config: Config) -> None:
        super().__init__({SINK: devices.sink}, nbytes)
        self._hands = new_hands()
        arguments = (
            *(self.memories[SINK].local, config),
            *(self._hands.copy_thread, self._hands.wake, self._hands.context),
        )
        self._sink: SinkTransport
        if devices.wire == ZMQ_TCP:
            self._sink = TcpSink(lambda *_: ZmqPipe(), *arguments)
        else:
            (self._sink,) = make_sinks(*arguments).values()
        self._looker = Looker(self._hands)
        self._control: socket.socket | None = None
        self._source: RankManifest | None = None
        self._choice: Choice | None = None
        self._num_reads = 0
        self._wanted: dict[Request, Wanted] = {}

    def attach(self, source: RankManifest, address: tuple[str, int], request: Request) -> str:
        """Try the wire, as a connector does at the first contact, for such requests, and connect to
        the source; what the trial says.
        """
        self._source = source
        self._choice = choose({self._sink.name: self._sink}, source, workload_of(request))
        self._sink.attach(source, self._choice.staging, self._choice.trial)
        self._control = connect(address)
        self._control.settimeout(CONNECT_S)
        return str(self._choice)

    def cut(self, request: Request) -> Cut:
        """How it moves that."""
        choice = self._attached()[2]
        num_slots = choice.staging.num_slots if choice.staging is not None else 0
        return Cut(choice.chunk_nbytes(request.nbytes), num_slots)

    def reattach(self, request: Request, times: int) -> None:
        """Leave the source, come back and read once, again and again."""
        source, _, choice = self._attached()
        for _ in range(times):
            self._sink.detach(source.control_endpoint)
            self._sink.attach(source, choice.staging)
            self.many(request, 1)

    def run(self, way: str, request: Request) -> Timing:
        """From the request to ReadDone."""
        wanted = self._know(request)
        self.flush()
        return timed(lambda: self._ask(wanted), self._wait)

    def many(self, request: Request, count: int) -> float:
        """One after the other; seconds of all."""
        wanted, started_s = self._know(request), time.perf_counter()
        for _ in range(count):
            self._ask(wanted)
            self._wait()
        return time.perf_counter() - started_s

    def usage(self) -> Usage:
        """What this process holds."""
        return usage_now()

    def counts(self) -> dict[str, int]:
        """What the wire has dropped or refused."""
        return dict(self._sink.counts)

    def _attached(self) -> tuple[RankManifest, socket.socket, Choice]:
        if self._source is None or self._control is None or self._choice is None:
            raise RuntimeError("sink: expected attach before run")
        return self._source, self._control, self._choice

    def _know(self, request: Request) -> Wanted:
        """A connector has its classes from a plan, and so has a wire."""
        if request not in self._wanted:
            copy_class, pull = request.copy_class()
            self._sink.prepare((copy_class,))
            self._wanted[request] = Wanted(
                (copy_class,),
                (pull,),
                tuple(request.source_ids.tolist()),
                tuple(request.sink_ids.tolist()),
                self.cut(request).chunk_nbytes,
            )
        return self._wanted[request]

    def _ask(self, wanted: Wanted) -> None:
        source, control, _ = self._attached()
        self._num_reads += 1
        key = TransferKey(self._num_reads.to_bytes(16), INCARNATION, "pp0tp0", "pp0tp0")

        def read(ids: tuple[tuple[int, ...], ...], chunk_nbytes: int) -> ReadRequest:
            places = (wanted.sink_ids,)
            return ReadRequest(key, source, wanted.classes, wanted.pulls, ids, places, chunk_nbytes)

        if self._sink.is_stream:
            self._sink.submit_expect(read((), wanted.chunk_nbytes))
            (copy_class,), ids = wanted.classes, (wanted.source_ids,)
            asked = SendRequest(key, wanted.pulls, (copy_class.source,), ids, wanted.chunk_nbytes)
            say(control, msgspec.msgpack.encode(SendChunks(asked)))
            return
        say(control, msgspec.msgpack.encode(SendIds(wanted.source_ids)))
        granted = msgspec.msgpack.decode(hear(control), type=SendIds).ids
        self._sink.submit_read(read((granted,), 0))

    def _wait(self) -> None:
        until_read(self._sink, lambda: self._looker.wait(self._sink, LONGEST_WAIT_MS))

    def close(self) -> None:
        """Disconnect, and end its threads."""
        if self._control is not None:
            self._control.close()
        self._sink.close()
        self._hands.close()
        super().close()
