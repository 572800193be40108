"""Scattered KV between two processes of one host, beside plain TCP sockets, in one run.

- sockets: blocking sendmsg and recvmsg_into straight between the pools, the same scattered 32 KiB
  pieces, raw: no layout change.
- unix-sockets: the same over a Unix socket, the limit of what zmq does between processes of one
  host.
- zmq, shm: the transports through their contract, control over a pipe, a copy thread on each side.
- zmq-tcp: zmq as between two hosts, without its Unix socket.

Bytes are checked first, and nothing is timed if they are wrong. Timed on the sink from the request
to the last byte in place. Cases: 32 KiB pieces (16 tokens, 8 heads of 256 bytes) to equal blocks,
and HND 16 to NHD 32 in 256-byte runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np
import torch
import zmq
from numpy.typing import NDArray

from kvxfer.config import Config
from kvxfer.tensors.shared_memory import SharedPool, open_shared
from kvxfer.testing_peer import Context, WakeUp
from kvxfer.transfer.manifest import MemfdHandle, RankId, RankManifest
from kvxfer.transfer.pull import chunk_nbytes_for
from kvxfer.transports.base import (
    LocalMemory,
    Packed,
    PeerGone,
    ReadBroke,
    ReadDone,
    ReadRequest,
    SendRequest,
    SinkTransport,
    SourceTransport,
    TransferKey,
)
from kvxfer.transports.copy_thread import CopyThread
from kvxfer.transports.registry import data_endpoints, make_sinks, make_sources
from kvxfer.transports.zmq_sink import ZmqSink
from scripts.benchmarks.pools import LLAMA_8B, Pool, Request
from scripts.benchmarks.wire_ways import poller_of

RawAddresses = dict[str, bytes | tuple[str, int]]

MIB = 1 << 20
# Llama-3 8B in 16-bit on one rank: a block is 32 KiB
NUM_REGIONS, NUM_HEADS, INNER_NBYTES = LLAMA_8B.regions, LLAMA_8B.heads, LLAMA_8B.inner_nbytes
TOKENS = 16
PIECE_NBYTES = NUM_HEADS * INNER_NBYTES * TOKENS
GOALS = {"zmq": 0.6, "shm": 1.4}
SOCKETS = "sockets"
LIMITS = {
    SOCKETS: "two copies through the kernel, one core on each side",
    "unix-sockets": "two copies through the kernel, one core on each side",
    "zmq": "as zmq-tcp, but the two copies are those of the Unix socket",
    "zmq-tcp": "the sockets' two copies, one to pack and one to unpack; three threads on each side",
    "shm": "one copy by one core, out of memory into memory",
}


@dataclass(frozen=True, slots=True)
class Load:
    """One size and layout. Pools hold ``num_blocks`` blocks of 16 tokens."""

    name: str
    nbytes: int
    num_blocks: int
    is_permuted: bool

    @property
    def num_tokens(self) -> int:
        return self.nbytes // (NUM_REGIONS * PIECE_NBYTES) * TOKENS

    @property
    def sink_tokens(self) -> int:
        return 2 * TOKENS if self.is_permuted else TOKENS

    def source_ids(self) -> tuple[int, ...]:
        return _ids(1, self.num_blocks, self.num_tokens // TOKENS)

    def sink_ids(self) -> tuple[int, ...]:
        num_blocks = self.num_blocks * TOKENS // self.sink_tokens
        return _ids(2, num_blocks, self.num_tokens // self.sink_tokens)

    def request(self) -> Request:
        """The same between pools."""
        num_sink_blocks = self.num_blocks * TOKENS // self.sink_tokens
        layout = "NHD" if self.is_permuted else "HND"
        return Request(
            Pool("HND", TOKENS, self.num_blocks, LLAMA_8B),
            Pool(layout, self.sink_tokens, num_sink_blocks, LLAMA_8B),
            self.num_tokens,
        )

    def raw(self) -> Load:
        """What the sockets move: the same pieces, as they are."""
        return replace(self, is_permuted=False)

    def pieces(self, ids: tuple[int, ...]) -> list[int]:
        """Byte offsets of the 32 KiB pieces of equal blocks, block by block in each region."""
        blocks = np.array(ids, dtype=np.int64)
        regions = np.arange(NUM_REGIONS, dtype=np.int64)[:, None] * self.num_blocks
        offsets: list[int] = ((regions + blocks) * PIECE_NBYTES).ravel().tolist()
        return offsets


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed transfer."""

    load: str
    transport: str
    nbytes: int
    duration_s: float

    @property
    def gb_per_s(self) -> float:
        return self.nbytes / self.duration_s / 1e9


def _ids(seed: int, num_blocks: int, num_wanted: int) -> tuple[int, ...]:
    return tuple(int(i) for i in np.random.default_rng(seed).permutation(num_blocks)[:num_wanted])


def is_equal(load: Load, source: NDArray[np.uint8], sink: NDArray[np.uint8]) -> bool:
    """Compare block by block through plain views of both pools."""
    given = source.reshape(NUM_REGIONS, load.num_blocks, NUM_HEADS, TOKENS, INNER_NBYTES)
    num_tokens = load.sink_tokens
    shape = (NUM_HEADS, num_tokens) if not load.is_permuted else (num_tokens, NUM_HEADS)
    taken = sink.reshape(NUM_REGIONS, load.num_blocks * TOKENS // num_tokens, *shape, INNER_NBYTES)
    sink_ids = load.sink_ids()
    for index, block in enumerate(load.source_ids()):
        at, inside = divmod(index * TOKENS, num_tokens)
        got = taken[:, sink_ids[at]]
        if load.is_permuted:
            got = got[:, inside : inside + TOKENS].transpose(0, 2, 1, 3)
        if not np.array_equal(given[:, block], got):
            return False
    return True


# ------------------------------------------------------------------ sockets: the baseline


def send_raw(sock: socket.socket, pool: memoryview, offsets: list[int]) -> None:
    """Blocking sendmsg of every piece."""
    for buffers in _batches(pool, offsets):
        while buffers:
            _advance(buffers, sock.sendmsg(buffers))


def receive_raw(sock: socket.socket, pool: memoryview, offsets: list[int]) -> None:
    """Blocking recvmsg_into of every piece."""
    for buffers in _batches(pool, offsets):
        while buffers:
            count = sock.recvmsg_into(buffers)[0]
            if not count:
                raise ConnectionError("sockets: expected more bytes, got the end of the stream")
            _advance(buffers, count)


def _batches(pool: memoryview, offsets: list[int]) -> Iterator[list[memoryview]]:
    # 64 pieces (2 MiB) a call: a call takes about that much, and the list of the rest is cut again
    # after each.
    for first in range(0, len(offsets), 64):
        yield [pool[at : at + PIECE_NBYTES] for at in offsets[first : first + 64]]


def _advance(buffers: list[memoryview], count: int) -> None:
    done = 0
    while done < len(buffers) and count >= len(buffers[done]):
        count -= len(buffers[done])
        done += 1
    del buffers[:done]
    if count:
        buffers[0] = buffers[0][count:]


# ------------------------------------------------------------------ the giving process


class SendChunks(msgspec.Struct, tag=True):
    """What a Pull does on a stream wire."""

    request: SendRequest


class SendIds(msgspec.Struct, tag=True):
    """What a Pull does on a direct wire; the answer is the Grant."""

    ids: tuple[int, ...]


class SendRaw(msgspec.Struct, tag=True):
    """Send these pieces over the socket of that name."""

    wire: str
    offsets: list[int]


class End(msgspec.Struct, tag=True):
    """Close everything."""


_COMMANDS = msgspec.msgpack.Decoder(SendChunks | SendIds | SendRaw | End)


def serve(pipe: Connection, pool_nbytes: int, config: Config, raw_addresses: RawAddresses) -> None:
    """The source: a random pool, its transports, and the raw sockets."""
    pool = SharedPool.create(pool_nbytes)
    words = np.random.default_rng(0).integers(0, 1 << 62, pool_nbytes // 8, dtype=np.int64)
    pool.tensor.numpy().view(np.int64)[:] = words
    del words
    copy_thread, context, wake = CopyThread(), zmq.Context[zmq.Socket[bytes]](), WakeUp()
    memory = LocalMemory((pool.tensor,), (pool.info,))
    sources = make_sources(memory, config, copy_thread, wake, context)
    raw = {wire: _connected(address) for wire, address in raw_addresses.items()}
    pipe.send(
        RankManifest(
            rank=RankId(0, 0),
            control_endpoint="tcp://127.0.0.1:1",
            data_endpoints=data_endpoints(sources),
            memories=memory.infos,
            regions=(),
        )
    )
    poller = poller_of(pipe.fileno(), wake.fd, *sources.values())
    view = pool.tensor.numpy().data
    while True:
        ready = dict(poller.poll())
        if wake.fd in ready:
            wake.clear()
        for source in sources.values():
            for completion in source.poll():
                if isinstance(completion, Packed):
                    source.send_packed(completion.key, completion.sequence)
        # Not pipe.poll(), which costs as much as the rest of this loop.
        if pipe.fileno() in ready:
            match _COMMANDS.decode(pipe.recv_bytes()):
                case SendChunks(request):
                    sources["zmq"].submit_send(request)
                case SendIds() as command:
                    pipe.send_bytes(msgspec.msgpack.encode(command))
                case SendRaw(wire, offsets):
                    send_raw(raw[wire], view, offsets)
                case End():
                    _close(sources, copy_thread, context, wake)
                    for sock in raw.values():
                        sock.close()
                    del view
                    pool.close()
                    return


def _connected(address: bytes | tuple[str, int]) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX if isinstance(address, bytes) else socket.AF_INET)
    sock.connect(address)
    return sock


def _close(
    transports: dict[str, SourceTransport] | dict[str, SinkTransport],
    copy_thread: CopyThread,
    context: Context,
    wake: WakeUp,
) -> None:
    for transport in transports.values():
        transport.close()
    copy_thread.close()
    context.term()
    wake.close()


# ------------------------------------------------------------------ the taking process


class TcpSink(ZmqSink):
    """The zmq wire as between two hosts."""

    uses_unix_sockets = False


class Bench:
    """The sink's side, and what it measured."""

    def __init__(self, pool_nbytes: int, config: Config) -> None:
        tcp_listener = socket.create_server(("127.0.0.1", 0))
        unix_listener = socket.socket(socket.AF_UNIX)
        unix_listener.bind(b"")  # the kernel finds a free name
        unix_listener.listen()
        listeners = {SOCKETS: tcp_listener, "unix-sockets": unix_listener}
        processes = get_context("forkserver")
        self.pipe, theirs = processes.Pipe()
        addresses = {wire: listener.getsockname() for wire, listener in listeners.items()}
        self.child = processes.Process(target=serve, args=(theirs, pool_nbytes, config, addresses))
        self.child.start()
        theirs.close()
        self.raw = {wire: listener.accept()[0] for wire, listener in listeners.items()}
        for listener in listeners.values():
            listener.close()
        self.source: RankManifest = self.pipe.recv()
        self.pool = SharedPool.create(pool_nbytes)
        self.pool.tensor.fill_(0xEE)
        self.copy_thread, self.wake = CopyThread(), WakeUp()
        self.context = zmq.Context[zmq.Socket[bytes]]()
        memory = LocalMemory((self.pool.tensor,), (self.pool.info,))
        arguments = (memory, config, self.copy_thread, self.wake, self.context)
        self.sinks = make_sinks(*arguments) | {"zmq-tcp": TcpSink(*arguments)}
        for sink in self.sinks.values():
            sink.attach(self.source)
        self.pollers = {name: poller_of(self.wake.fd, sink) for name, sink in self.sinks.items()}
        self.view = self.pool.tensor.numpy().data
        self.config = config
        self.num_keys = 0

    def tell(self, command: SendChunks | SendIds | SendRaw | End) -> None:
        """In msgpack, as the control channel does: pickle would take 0.5 ms."""
        self.pipe.send_bytes(msgspec.msgpack.encode(command))

    def run(self, transport: str, load: Load) -> float:
        """One transfer; seconds from the request to the last byte in place."""
        if transport in self.raw:
            given, taken = (load.pieces(ids) for ids in (load.source_ids(), load.raw().sink_ids()))
            started_s = time.perf_counter()
            self.tell(SendRaw(transport, given))
            receive_raw(self.raw[transport], self.view, taken)
            return time.perf_counter() - started_s
        return self._run_transport(transport, load)

    def _run_transport(self, transport: str, load: Load) -> float:
        sink, poller = self.sinks[transport], self.pollers[transport]
        self.num_keys += 1
        copy_class, pull = load.request().copy_class()
        key = TransferKey(self.num_keys.to_bytes(16), b"bench-sink-bench", "pp0tp0", "pp0tp0")
        ids, sink_ids = load.source_ids(), load.sink_ids()
        chunk_nbytes = chunk_nbytes_for(load.nbytes, self.config.chunk_nbytes)
        started_s = time.perf_counter()
        if sink.is_stream:
            sink.submit_expect(
                ReadRequest(key, self.source, (copy_class,), (pull,), (), (sink_ids,), chunk_nbytes)
            )
            sent = SendRequest(key, (pull,), (copy_class.source,), (ids,), chunk_nbytes)
            self.tell(SendChunks(sent))
        else:
            self.tell(SendIds(ids))
            granted = msgspec.msgpack.decode(self.pipe.recv_bytes(), type=SendIds).ids
            sink.submit_read(
                ReadRequest(key, self.source, (copy_class,), (pull,), (granted,), (sink_ids,), 0)
            )
        while True:
            for completion in sink.poll():
                match completion:
                    case ReadDone():
                        return time.perf_counter() - started_s
                    case ReadBroke() | PeerGone():
                        raise RuntimeError(f"{sink.name}: {completion}")
            if self.wake.fd in dict(poller.poll(10_000)):
                self.wake.clear()

    def check(self, transport: str, load: Load) -> None:
        """Poison, move, compare; exits if one byte is wrong."""
        self.pool.tensor.fill_(0xEE)
        self.run(transport, load)
        handle = self.source.memories[0].handle
        assert isinstance(handle, MemfdHandle)
        mapped = open_shared(handle)
        moved = load.raw() if transport in self.raw else load
        if not is_equal(moved, mapped.tensor.numpy(), self.pool.tensor.numpy()):
            raise SystemExit(f"{transport}, {load.name}: wrong bytes; nothing was timed")
        mapped.close()

    def close(self) -> None:
        """End both sides."""
        self.tell(End())
        self.child.join(20)
        _close(self.sinks, self.copy_thread, self.context, self.wake)
        for sock in self.raw.values():
            sock.close()
        self.pipe.close()


def _loads(sizes_mib: list[int], num_blocks: int) -> list[Load]:
    layouts = (("equal", False), ("HND16->NHD32", True))
    return [
        Load(f"{size} MiB {name}", size * MIB, num_blocks, is_permuted)
        for size in sizes_mib
        for name, is_permuted in layouts
    ]


def _measure(
    bench: Bench, loads: list[Load], transports: list[str], num_rounds: int
) -> list[Sample]:
    samples: list[Sample] = []
    for round_number in range(num_rounds):
        for load in loads:
            # Each starts as often as the others: what runs first finds the cache as the last case
            # left it.
            turn = round_number % len(transports)
            for transport in transports[turn:] + transports[:turn]:
                samples.append(
                    Sample(load.name, transport, load.nbytes, bench.run(transport, load))
                )
    return samples


def _quantile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def _rows(
    samples: list[Sample], loads: list[Load], transports: list[str]
) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for load in loads:
        speeds = {
            transport: [
                s.gb_per_s for s in samples if (s.load, s.transport) == (load.name, transport)
            ]
            for transport in transports
        }
        for transport, values in speeds.items():
            row: dict[str, object] = {"load": load.name, "transport": transport}
            row |= {f"p{p}": _quantile(values, p) for p in (20, 50, 80)}
            row["ratio"] = statistics.median(values) / statistics.median(speeds[SOCKETS])
            row["goal"] = GOALS.get(transport)
            rows.append(row)
    return rows


def _print(rows: list[dict[str, object]]) -> None:
    print(f"{'load':22} {'wire':12} {'p20':>6} {'p50':>6} {'p80':>6} GB/s  {'ratio':>5}  goal")
    for row in rows:
        goal, ratio = row["goal"], row["ratio"]
        assert isinstance(ratio, float)
        verdict = (
            "" if not isinstance(goal, float) else f"{goal} {'ok' if ratio >= goal else 'MISSED'}"
        )
        print(
            f"{row['load']:22} {row['transport']:12} {row['p20']:6.2f} {row['p50']:6.2f} "
            f"{row['p80']:6.2f}       {ratio:5.2f}  {verdict}"
        )


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = ",".join(name for name in LIMITS if name != SOCKETS)
    parser.add_argument(
        "--transport", default="all", help=f"beside the sockets: all, or some of {names}"
    )
    parser.add_argument("--size-mib", default="64,512", help="sizes, multiples of 4 MiB")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--num-blocks", type=int, default=384, help="blocks of each pool, 2 MiB each"
    )
    parser.add_argument("--chunk-nbytes", type=int, default=Config().chunk_nbytes)
    parser.add_argument("--staging-slots", type=int, default=Config().staging_slots)
    parser.add_argument("--json", type=Path, help="write every sample here")
    options = parser.parse_args(arguments)
    options.transport = (names if options.transport == "all" else options.transport).split(",")
    if unknown := set(options.transport) - set(LIMITS):
        parser.error(f"--transport: expected some of {names}, got {', '.join(sorted(unknown))}")
    return options


def run(arguments: list[str]) -> None:
    """Check, measure, print."""
    options = _options(arguments)
    transports = [SOCKETS, *options.transport]
    config = Config(chunk_nbytes=options.chunk_nbytes, staging_slots=options.staging_slots)
    loads = _loads([int(size) for size in options.size_mib.split(",")], options.num_blocks)
    facts = {
        "host": platform.node(),
        "cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "zmq": zmq.zmq_version(),
        "load1": os.getloadavg()[0],
        "chunk_nbytes": config.chunk_nbytes,
        "staging_slots": config.staging_slots,
        "rounds": options.rounds,
    }
    print(", ".join(f"{name} {value}" for name, value in facts.items() if name != "host"))
    bench = Bench(options.num_blocks * NUM_REGIONS * PIECE_NBYTES, config)
    try:
        for load in loads:
            for transport in transports:
                bench.check(transport, load)
        samples = _measure(bench, loads, transports, options.rounds)
    finally:
        bench.close()
    rows = _rows(samples, loads, transports)
    _print(rows)
    for transport in transports:
        print(f"{transport}: limited by {LIMITS[transport]}")
    if options.json:
        document = {"facts": facts, "rows": rows, "samples": [asdict(sample) for sample in samples]}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
