"""The wires by name: which of them a worker makes, and what its manifest says of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import msgspec

from kvxfer.config import Config
from kvxfer.errors import TransportUnavailable
from kvxfer.transfer.manifest import MemoryInfo
from kvxfer.transports.base import LocalMemory, SinkTransport, SourceTransport, Wake
from kvxfer.transports.copy_thread import Copier
from kvxfer.transports.faults import (
    FaultySink,
    FaultyZmqSource,
    check_device_faults,
    faulty_copier,
    parse_faults,
)
from kvxfer.transports.shm_direct import ShmSink, ShmSource
from kvxfer.transports.zmq_sink import ZmqSink
from kvxfer.transports.zmq_source import ZmqSource
from kvxfer.transports.zmq_stream import Context

AUTO = {"cuda": ("cuda_ipc",), "cpu": ("shm", "zmq")}
"""What ``auto`` may take for memory on such a device, best first."""

_log = logging.getLogger("kvxfer.transports")
T = TypeVar("T", SourceTransport, SinkTransport)
_Maker = Callable[[LocalMemory, Config, Copier, Wake, Context], T]


def _cuda_ipc_source(
    memory: LocalMemory, config: Config, copy_thread: Copier, wake: Wake, context: Context
) -> SourceTransport:
    with _needs_cuda(memory):
        from kvxfer.transports.cuda_ipc_direct import CudaIpcSource
    return CudaIpcSource(memory, config, copy_thread, wake, context)


def _cuda_ipc_sink(
    memory: LocalMemory, config: Config, copy_thread: Copier, wake: Wake, context: Context
) -> SinkTransport:
    with _needs_cuda(memory):
        from kvxfer.transports.cuda_ipc_direct import CudaIpcSink
    return CudaIpcSink(memory, config, copy_thread, wake, context)


@contextmanager
def _needs_cuda(memory: LocalMemory) -> Iterator[None]:
    """Around an import that takes Triton, which a host without GPUs need not have."""
    memory.require("cuda_ipc", "cuda")
    try:
        yield
    except ImportError as exc:
        raise TransportUnavailable(
            f"cuda_ipc: expected Triton, got {exc}; install kvxfer[cuda]"
        ) from exc


_SOURCES: dict[str, _Maker[SourceTransport]] = {
    "cuda_ipc": _cuda_ipc_source,
    "shm": ShmSource,
    "zmq": ZmqSource,
}
_SINKS: dict[str, _Maker[SinkTransport]] = {
    "cuda_ipc": _cuda_ipc_sink,
    "shm": ShmSink,
    "zmq": ZmqSink,
}


def make_sources(
    memory: LocalMemory, config: Config, copy_thread: Copier, wake: Wake, context: Context
) -> dict[str, SourceTransport]:
    """The giving side of the configured wire; with ``auto`` of each that the memory allows.

    Raises TransportUnavailable with the reason when a wire that was asked for by name cannot be
    had.
    """
    faults = parse_faults(config.faults)
    makers = _SOURCES | {"zmq": FaultyZmqSource} if faults else _SOURCES
    wanted = _wanted(makers, config, memory)
    return _make(wanted, config, lambda make: make(memory, config, copy_thread, wake, context))


def make_sinks(
    memory: LocalMemory, config: Config, copy_thread: Copier, wake: Wake, context: Context
) -> dict[str, SinkTransport]:
    """The taking side of the configured wire; with ``auto`` of each that the memory allows, best
    first, for the probe.

    Raises TransportUnavailable with the reason when a wire that was asked for by name cannot be
    had.
    """
    faults = parse_faults(config.faults)

    wanted = _wanted(_SINKS, config, memory)
    if "cuda_ipc" in wanted:
        check_device_faults(faults)

    def make(maker: _Maker[SinkTransport]) -> SinkTransport:
        sink = maker(memory, config, faulty_copier(copy_thread, faults), wake, context)
        return FaultySink(sink, faults, wake) if faults else sink

    return _make(wanted, config, make)


def _make(
    wanted: Mapping[str, _Maker[T]], config: Config, make: Callable[[_Maker[T]], T]
) -> dict[str, T]:
    """With ``auto`` a wire that cannot be had is left out, but not the last: after it there is
    none.
    """
    made: dict[str, T] = {}
    for name, maker in wanted.items():
        try:
            made[name] = make(maker)
        except TransportUnavailable as exc:
            if config.transport != "auto" or name == list(wanted)[-1]:
                for transport in made.values():
                    transport.close()
                raise
            _log.debug("not offered: %s", exc)
    return made


def data_endpoints(sources: Mapping[str, SourceTransport]) -> dict[str, str]:
    """For the manifest: where sinks attach, by wire."""
    endpoints = {name: source.data_endpoint() for name, source in sources.items()}
    return {name: endpoint for name, endpoint in endpoints.items() if endpoint is not None}


def published_infos(
    sources: Mapping[str, SourceTransport], memory: LocalMemory
) -> tuple[MemoryInfo, ...]:
    """For the manifest: handles of the direct wire that is served, so no sink maps what is not
    offered.
    """
    for source in sources.values():
        if handles := source.handles():
            return tuple(
                msgspec.structs.replace(info, handle=handle)
                for info, handle in zip(memory.infos, handles, strict=True)
            )
    return tuple(msgspec.structs.replace(info, handle=None) for info in memory.infos)


def _wanted(
    makers: Mapping[str, _Maker[T]], config: Config, memory: LocalMemory
) -> dict[str, _Maker[T]]:
    if config.transport == "auto":
        kind = next((tensor.device.type for tensor in memory.tensors), "cpu")
        if kind not in AUTO:
            raise TransportUnavailable(
                f"transport: expected memory on one of {', '.join(AUTO)}, got {kind}"
            )
        return {name: makers[name] for name in AUTO[kind]}
    if config.transport not in makers:
        raise TransportUnavailable(
            f"transport: expected one of auto, {', '.join(makers)}, got {config.transport}; "
            "this version does not have it"
        )
    return {config.transport: makers[config.transport]}
