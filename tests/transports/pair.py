"""A source and a sink of one wire in one process, driven by hand."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch
import zmq

from kvxfer.config import Config
from kvxfer.errors import TransportUnavailable
from kvxfer.tensors.shared_memory import SharedPool
from kvxfer.testing.cases import (
    CASES,
    POISON,
    POOL_NBYTES,
    Move,
    make_move,
    naive_copy,
    source_bytes,
)
from kvxfer.testing.peers import Context, is_end
from kvxfer.transfer.manifest import RankId, RankManifest
from kvxfer.transports.base import (
    DirectSink,
    LocalMemory,
    Packed,
    ReadDone,
    ReadRequest,
    SendingSource,
    SendRequest,
    SinkCompletion,
    SinkTransport,
    SourceCompletion,
    TransferKey,
    Trial,
    Wake,
)
from kvxfer.transports.copy_thread import CopyThread
from kvxfer.transports.guard import Guard
from kvxfer.transports.parallel import make_context, make_copier
from kvxfer.transports.pipe import MakePipe, Pipe
from kvxfer.transports.registry import data_endpoints, make_sinks, make_sources, published_infos
from kvxfer.transports.stream_connections import Connections
from kvxfer.transports.stream_link import Link
from kvxfer.transports.stream_sink import StreamSink
from kvxfer.transports.stream_source import StreamSource
from kvxfer.transports.stream_wire import STREAM_VERSION, Attach, Expect
from kvxfer.transports.wake_up import WakeUp
from kvxfer.transports.zmq_pipe import ZmqPipe

ATTACH = Attach(STREAM_VERSION, 4, 4 << 20, "zmq")
"""What a sink with four slots says first."""
CONFIG = Config(staging_slots=4, peer_silent_s=300.0, connect_timeout_s=300.0, zmq_streams=1)
ZMQ = msgspec.structs.replace(CONFIG, transport="zmq")


def zmq_pipe(memory: LocalMemory, config: Config, wake: Wake) -> Pipe:
    """Without pinned memory, also beside a GPU."""
    return ZmqPipe()


class TcpSink(StreamSink):
    """Of a source on the same host, too."""

    uses_unix_sockets = False


def stream_side(
    side: Callable[..., Any],
    make_pipe: MakePipe,
    config: Config,
    memory: LocalMemory,
    copy_thread: CopyThread,
    wake: Wake,
    context: Context,
) -> Any:
    """A stream's source or sink, of ``check_transport`` but for the first three."""
    return side(make_pipe, memory, config, copy_thread, wake, context)


def key_of(number: int) -> TransferKey:
    return TransferKey(number.to_bytes(16), b"sink-incarnation", "pp0tp0", "pp0tp0")


def expect_of(key: TransferKey) -> Expect:
    """What the sink of this read says to the source rank."""
    return Expect(key.nonce, key.incarnation, key.sink_rank)


def may_have_something(transport: SendingSource | SinkTransport) -> bool:
    """False for one that is idle and of which nothing can be read."""
    if not transport.is_idle:
        return True
    poller = zmq.Poller()
    for pollable in transport.pollables():
        poller.register(pollable, zmq.POLLIN)
    return bool(poller.poll(0))


class Pair:
    """One process, two ends. ``hold``: packed chunks stay where they are. ``is_apart``: the sink
    has threads of ZeroMQ of its own, as in a process of its own.
    """

    def __init__(
        self,
        source_config: Config,
        sink_config: Config | None = None,
        *,
        small_nbytes: int = 0,
        is_apart: bool = False,
    ) -> None:
        self.copy_thread = make_copier(
            source_config, torch.device("cpu"), small_nbytes=small_nbytes
        )
        self.wake, self.context = WakeUp(), make_context(source_config)
        self.sink_context = make_context(source_config) if is_apart else self.context
        Guard(self.context, source_config)
        self.source_pool, self.sink_pool = (
            SharedPool.create(POOL_NBYTES),
            SharedPool.create(POOL_NBYTES),
        )
        content = np.frombuffer(bytearray(source_bytes(5)), dtype=np.uint8)
        self.source_pool.tensor.copy_(torch.from_numpy(content))
        self.sink_pool.tensor.fill_(POISON)
        given = LocalMemory((self.source_pool.tensor,), (self.source_pool.info,))
        taken = LocalMemory((self.sink_pool.tensor,), (self.sink_pool.info,))
        hands = self.copy_thread, self.wake
        self.sources = make_sources(given, source_config, *hands, self.context)
        self.sinks = make_sinks(taken, sink_config or source_config, *hands, self.sink_context)
        self.manifest = RankManifest(
            rank=RankId(0, 0),
            control_endpoint="tcp://127.0.0.1:5701",
            data_endpoints=data_endpoints(self.sources),
            memories=published_infos(self.sources, given),
            regions=(),
        )
        self.sending = [each for each in self.sources.values() if isinstance(each, SendingSource)]
        self.hold = False
        self.said: list[SourceCompletion] = []
        self.seen: list[SinkCompletion] = []

    @property
    def source(self) -> Any:
        """Of whichever contract."""
        return next(iter(self.sources.values()))

    @property
    def sink(self) -> Any:
        """Of whichever contract."""
        return next(iter(self.sinks.values()))

    def start(self, key: TransferKey, move: Move) -> None:
        sink = self.sink
        if isinstance(sink, DirectSink):
            sink.submit_read(read_request(key, move, self.manifest, is_stream=False))
        else:
            sink.submit_expect(read_request(key, move, self.manifest))
            self.source.submit_send(send_request(key, move))

    def turn(self) -> None:
        """One look at everything, but for what is idle, as the IO thread does it."""
        self.wake.clear()
        for source in filter(may_have_something, self.sending):
            for completion in source.poll():
                self.said.append(completion)
                if isinstance(completion, Packed) and not self.hold:
                    source.send_packed(completion.key, completion.sequence)
        for sink in filter(may_have_something, self.sinks.values()):
            self.seen.extend(sink.poll())

    def num_wakes(self) -> int:
        """How often the IO thread was woken since it was last asked."""
        try:
            return int.from_bytes(os.read(self.wake.fd, 8), "little")  # eventfd(2): it counts
        except BlockingIOError:
            return 0

    def until(self, wanted: Callable[[], bool], timeout_s: float = 120.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not wanted():
            assert time.monotonic() < deadline_s, (self.said[-5:], self.seen[-5:])
            self.turn()
            time.sleep(0.001)

    def said_kind(self, kind: type[SourceCompletion], key: TransferKey) -> bool:
        return any(isinstance(c, kind) and c.key == key for c in self.said)

    def end(self, key: TransferKey, timeout_s: float = 120.0) -> SinkCompletion:
        """The one end of a read."""

        def ends() -> list[SinkCompletion]:
            return [completion for completion in self.seen if is_end(key, completion)]

        self.until(lambda: bool(ends()), timeout_s)
        assert len(ends()) == 1
        return ends()[0]

    def trial(self, timeout_s: float = 120.0) -> Trial:
        """The sink's, beside the source's loop. Raises TransportUnavailable."""
        results: list[Trial | TransportUnavailable] = []

        def run() -> None:
            try:
                results.append(self.sink.trial(self.manifest, timeout_s))
            except TransportUnavailable as exc:
                results.append(exc)

        thread = threading.Thread(target=run)
        thread.start()
        self.until(lambda: not thread.is_alive(), timeout_s + 30.0)  # it may be late, not for ever
        thread.join()
        if isinstance(results[0], TransportUnavailable):
            raise results[0]
        return results[0]

    def content(self) -> bytes:
        return bytes(self.sink_pool.tensor.numpy())

    def expected(self, move: Move) -> bytes:
        want = bytearray(b"\xee" * POOL_NBYTES)
        naive_copy(move, source_bytes(5), want)
        return bytes(want)

    def close(self) -> None:
        for source in self.sending:
            source.close()
        for sink in self.sinks.values():
            sink.close()
        self.copy_thread.close()
        self.sink_context.term()
        self.context.term()
        self.wake.close()
        self.source_pool.close()
        self.sink_pool.close()


# What the ends of a stream wire keep to themselves is read here and nowhere else


def connections_of(pair: Pair) -> Connections:
    """Who is attached to the source, and which reads it has named."""
    assert isinstance(pair.source, StreamSource)
    return pair.source._connections


def link_of(pair: Pair) -> Link:
    """The sink's one connection."""
    assert isinstance(pair.sink, StreamSink)
    (link,) = pair.sink._links.values()
    return link


def forget_sink(pair: Pair) -> None:
    """The source takes its one connection for lost, wrongly."""
    (connection,) = connections_of(pair).all()
    pair.source._lose(connection)


def forget_source(pair: Pair, detail: str) -> None:
    """The sink learns at this very moment that its one connection has ended."""
    pair.sink._lose_link(link_of(pair), detail)


def end_stream(pair: Pair, number: int) -> None:
    """The network ends one stream of the sink's one connection; nobody tells the two ends."""
    fd = link_of(pair).dealers[number]._backlog.fd
    with socket.socket(fileno=os.dup(fd)) as taken:
        taken.shutdown(socket.SHUT_RDWR)


def a_move(seed: int = 1) -> Move:
    """Eight blocks of 130 tokens, nine chunks or more."""
    return make_move(CASES[0], seed)


def read_request(
    key: TransferKey, move: Move, source: RankManifest, *, is_stream: bool = True
) -> ReadRequest:
    return ReadRequest(
        key=key,
        source=source,
        classes=(move.copy_class,),
        pull_classes=(move.pull,),
        source_ids=() if is_stream else (move.source_ids,),
        sink_ids=(move.sink_ids,),
        chunk_nbytes=move.case.chunk_nbytes,
    )


def send_request(key: TransferKey, move: Move) -> SendRequest:
    return SendRequest(
        key, (move.pull,), (move.copy_class.source,), (move.source_ids,), move.case.chunk_nbytes
    )


def load(pair: Pair, number: int) -> None:
    """One read through the pair, compared byte by byte."""
    pair.sink_pool.tensor.fill_(0xEE)
    move = a_move(number)
    pair.start(key_of(number), move)
    assert isinstance(pair.end(key_of(number)), ReadDone)
    assert pair.content() == pair.expected(move)
