"""The wires by name: which of them a worker makes, and what its manifest says of them."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import msgspec

from kvxfer.config import OWN_TRANSPORTS, Config
from kvxfer.errors import ConfigError, TransportUnavailable
from kvxfer.extras import install
from kvxfer.tensors.device_memory import Gpu
from kvxfer.transfer.manifest import MemoryInfo
from kvxfer.transports.base import (
    DirectSink,
    DirectSource,
    LocalMemory,
    ReceivingSink,
    SendingSource,
    SinkTransport,
    SourceTransport,
    Wake,
)
from kvxfer.transports.channel import Context
from kvxfer.transports.copy_thread import Copier
from kvxfer.transports.external import Maker, Wire, external_wires, named, stream_wire
from kvxfer.transports.native_peers import RDMA_DEVICES
from kvxfer.transports.parallel import num_streams
from kvxfer.transports.pipe import MakePipe, Pipe
from kvxfer.transports.shm_direct import ShmSink, shm_source
from kvxfer.transports.tcp_pipe import TcpPipe
from kvxfer.transports.zmq_pipe import ZmqPipe

AUTO = {
    "cuda": ("cuda_ipc", "zmq", "tcp", "ucx", "nixl"),
    "cpu": ("shm", "zmq", "tcp", "ucx", "nixl"),
}
"""What ``auto`` may take for memory on such a device, in the order of preference: the direct wire
if it works, else the fastest of the others.
"""
TCP_PORTS = 64
"""A range of ``data_port`` from which ``auto`` takes ports for ``tcp``, at least: so many have room
for eight ranks with all wires. A rank must not take the port that another one needs for ``zmq``.
"""
OPTIONAL = {"ucx": "ucxx", "nixl": "nixl"}
"""Wires that need a library, and its name. Loading it takes 0.5 s and 20 to 30 MB when an engine
starts, so ``auto`` has them where they can gain something: for memory of a GPU, and where there is
RDMA that they may use (``trust_network``). Else both carry host memory by TCP, and slower than
``zmq`` does (0.5 GB/s instead of 2).
"""

_log = logging.getLogger("kvxfer.transports")
T = TypeVar("T", DirectSource | SendingSource, DirectSink | ReceivingSink)


def _cuda_ipc_source(memory: LocalMemory, *_: object) -> SourceTransport:
    memory.require("cuda_ipc", "cuda")
    with _needs("cuda_ipc", "Triton", "cuda"):
        from kvxfer.transports.cuda_ipc_direct import cuda_ipc_source
    return cuda_ipc_source(memory)


def _cuda_ipc_sink(
    memory: LocalMemory, config: Config, copy_thread: Copier, wake: Wake, context: Context
) -> SinkTransport:
    memory.require("cuda_ipc", "cuda")
    with _needs("cuda_ipc", "Triton", "cuda"):
        from kvxfer.transports.cuda_ipc_direct import CudaIpcSink
    return CudaIpcSink(memory, config, copy_thread, wake, context)


# ---- the pipes of stream wires; a library that need not be installed is imported when asked for


def _zmq_pipe(memory: LocalMemory, config: Config, wake: Wake) -> Pipe:
    is_gpu = any(tensor.device.type == "cuda" for tensor in memory.tensors)
    return ZmqPipe(Gpu(memory.device).pinned if is_gpu else None)


def _tcp_pipe(memory: LocalMemory, config: Config, wake: Wake) -> Pipe:
    is_gpu = any(tensor.device.type == "cuda" for tensor in memory.tensors)
    return TcpPipe(config, wake, Gpu(memory.device).pinned if is_gpu else None)


def _ucx_pipe(memory: LocalMemory, config: Config, wake: Wake) -> Pipe:
    with _needs("ucx", "ucxx", "ucx"):
        from kvxfer.transports.ucx_pipe import UcxPipe
    return UcxPipe(memory.device, config, wake)


def _nixl_pipe(memory: LocalMemory, config: Config, wake: Wake) -> Pipe:
    with _needs("nixl", "NIXL", "nixl"):
        from kvxfer.transports.nixl_pipe import NixlPipe
    return NixlPipe(memory.device, config)


PIPES: dict[str, MakePipe] = {
    "zmq": _zmq_pipe,
    "tcp": _tcp_pipe,
    "ucx": _ucx_pipe,
    "nixl": _nixl_pipe,
}


@contextmanager
def _needs(wire: str, library: str, extra: str) -> Iterator[None]:
    """Wraps the import of an optional library: ImportError becomes TransportUnavailable."""
    try:
        yield
    except ImportError as exc:
        raise TransportUnavailable(
            f"{wire}: expected {library}, got {exc}; {install(extra)}"
        ) from exc


_STREAMS = {name: stream_wire(pipe) for name, pipe in PIPES.items()}
SOURCES: dict[str, Maker[SourceTransport]] = {
    "cuda_ipc": _cuda_ipc_source,
    "shm": shm_source,
    **{name: wire.make_source for name, wire in _STREAMS.items()},
}
SINKS: dict[str, Maker[SinkTransport]] = {
    "cuda_ipc": _cuda_ipc_sink,
    "shm": ShmSink,
    **{name: wire.make_sink for name, wire in _STREAMS.items()},
}
_DIRECT = SOURCES.keys() - PIPES.keys()


def make_sources(
    memory: LocalMemory, config: Config, copy_thread: Copier, wake: Wake, context: Context
) -> dict[str, SourceTransport]:
    """The giving side of the configured wire; with ``auto`` of each that the memory allows.

    Raises TransportUnavailable with the reason when a wire that was asked for by name cannot be
    had, ConfigError when its ``data_port`` cannot.
    """
    if config.transport in OPTIONAL and not config.trust_network:
        wanted = config.transport
        _log.info("%s: for processes of this user on this host; see trust_network", wanted)
    makers = SOURCES | {name: wire.make_source for name, wire in _external(config).items()}
    if config.transport == "auto" and not _has_ports_for_tcp(config, memory.device.type):
        del makers["tcp"]
    if config.data_ports.is_one:
        streams = [name for name in _wanted(makers, config, memory) if name not in _DIRECT]
        if streams == ["tcp"]:
            raise ConfigError(
                f"data_port: expected a range for tcp, which takes two ports, got "
                f"{config.data_port}; give a range of two for each rank"
            )
        if len(streams) > 1:
            raise ConfigError(
                f"data_port: expected a port for each of {', '.join(streams)}, got "
                f"{config.data_port}; give a range, or name the wire with transport"
            )
    return _make(makers, memory, config, copy_thread, wake, context)


def make_sinks(
    memory: LocalMemory, config: Config, copy_thread: Copier, wake: Wake, context: Context
) -> dict[str, SinkTransport]:
    """The taking side of the configured wire; with ``auto`` of each that the memory allows, in the
    order of preference.

    Raises TransportUnavailable with the reason when a wire that was asked for by name cannot be
    had.
    """
    makers = SINKS | {name: wire.make_sink for name, wire in _external(config).items()}
    return _make(makers, memory, config, copy_thread, wake, context)


def _external(config: Config) -> dict[str, Wire]:
    """Wires of other packages. Nothing is loaded for who has named one of kvxfer's own."""
    return {} if config.transport in SOURCES else external_wires()


def _make(
    makers: Mapping[str, Maker[T]],
    memory: LocalMemory,
    config: Config,
    copy_thread: Copier,
    wake: Wake,
    context: Context,
) -> dict[str, T]:
    """With ``auto`` a wire that cannot be had is left out, but not ``zmq``, which is everywhere."""
    made: dict[str, T] = {}
    wanted = _wanted(makers, config, memory)
    # NIXL brings a UCX whose hooks of memory functions take the place of ours: where ours came
    # first the next of ours has none. After it both have theirs, however many there are of each;
    # with UCX's modules for CUDA only NIXL's has, and ours is refused.
    for name in sorted(wanted, key=lambda name: name == "ucx"):
        try:
            made[name] = named(name, makers[name](memory, config, copy_thread, wake, context))
        except Exception as exc:
            is_auto = config.transport == "auto" and name != "zmq"
            is_missing = isinstance(exc, TransportUnavailable)
            is_optional = name in OPTIONAL or name not in OWN_TRANSPORTS
            # A failure in a library that was not asked for by name must not end the engine; a
            # setting that cannot be kept to does
            is_setting = isinstance(exc, ConfigError) and not is_missing
            if is_auto and not is_setting and (is_optional or is_missing):
                # Libraries that are not installed are not among the wanted
                _log.log(logging.INFO if is_optional else logging.DEBUG, "not offered: %s", exc)
                continue
            for wire in made.values():
                if not isinstance(wire, DirectSource):
                    wire.close()
            raise
    return {name: made[name] for name in wanted if name in made}


def data_endpoints(sources: Mapping[str, SourceTransport]) -> dict[str, str]:
    return {
        name: source.data_endpoint()
        for name, source in sources.items()
        if isinstance(source, SendingSource)
    }


def published_infos(
    sources: Mapping[str, SourceTransport], memory: LocalMemory
) -> tuple[MemoryInfo, ...]:
    """With handles of the direct wire that is served: no sink maps what is not offered."""
    for source in sources.values():
        if isinstance(source, DirectSource):
            return tuple(
                msgspec.structs.replace(info, handle=handle)
                for info, handle in zip(memory.infos, source.handles, strict=True)
            )
    return tuple(msgspec.structs.replace(info, handle=None) for info in memory.infos)


def _wanted(makers: Collection[str], config: Config, memory: LocalMemory) -> list[str]:
    if config.transport == "auto":
        kind = next((tensor.device.type for tensor in memory.tensors), "cpu")
        if kind not in AUTO:
            raise TransportUnavailable(
                f"transport: expected memory on one of {', '.join(AUTO)}, got {kind}"
            )
        candidates = [name for name in AUTO[kind] if name in makers]
        own = [name for name in candidates if _is_worth_it(name, kind, config)]
        return own + [name for name, wire in _external(config).items() if kind in wire.auto_for]
    if config.transport not in makers:
        raise TransportUnavailable(
            f"transport: expected one of auto, {', '.join(makers)}, got {config.transport}; "
            "no package that is installed has it, or a warning above says why it cannot be used"
        )
    return [config.transport]


def _has_ports_for_tcp(config: Config, device_type: str) -> bool:
    ports = config.data_ports
    if ports.first == 0 or len(ports.in_order) >= TCP_PORTS:
        return True
    if _is_worth_it("tcp", device_type, config):
        _log.info(
            "tcp: not offered, because data_port is %s; give a range of %d ports or more, or name "
            "it with transport",
            *(ports, TCP_PORTS),
        )
    return False


def is_for_tcp(device_type: str, num_streams: int) -> bool:
    """Several sockets, because with one it is no faster than ``zmq``; and memory of a GPU, because
    in host memory it carries no more than as many streams of ``zmq``: 4.1 to 4.8 GB/s, and 4.2 to
    5.4 (``scripts/results/streams_cpu_32_cores_2026-11-25.md``).
    """
    return device_type != "cpu" and num_streams > 1


def _is_worth_it(name: str, device_type: str, config: Config) -> bool:
    """Whether ``auto`` has this wire: see OPTIONAL and ``is_for_tcp``; ``tcp`` where no key says
    that bytes are to be encrypted.
    """
    if name == "tcp":
        return config.curve_public_key is None and is_for_tcp(device_type, num_streams(config))
    if name not in OPTIONAL:
        return True
    if importlib.util.find_spec(OPTIONAL[name]) is None:
        return False
    if device_type != "cpu":
        return True
    has_rdma = RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir())
    if has_rdma and not config.trust_network:
        _log.info("%s: not tried, although there is RDMA: see trust_network", name)
    return has_rdma and config.trust_network
