"""The wires by name: which of them a worker makes, and what its manifest says of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from kvxfer.config import Config
from kvxfer.errors import TransportUnavailable
from kvxfer.transfer.manifest import MemoryInfo
from kvxfer.transports.base import LocalMemory, SinkTransport, SourceTransport, Wake
from kvxfer.transports.copy_thread import Copier
from kvxfer.transports.faults import FaultySink, FaultyZmqSource, faulty_copier, parse_faults
from kvxfer.transports.shm_direct import ShmSink, ShmSource
from kvxfer.transports.zmq_sink import ZmqSink
from kvxfer.transports.zmq_source import ZmqSource
from kvxfer.transports.zmq_stream import Context

AUTO_LAST = "zmq"
"""What works everywhere: where even this cannot be made, ``auto`` fails."""

_log = logging.getLogger("kvxfer.transports")
T = TypeVar("T", SourceTransport, SinkTransport)
_Maker = Callable[[LocalMemory, Config, Copier, Wake, Context], T]

# In the order of preference of "auto".
_SOURCES: dict[str, _Maker[SourceTransport]] = {"shm": ShmSource, "zmq": ZmqSource}
_SINKS: dict[str, _Maker[SinkTransport]] = {"shm": ShmSink, "zmq": ZmqSink}


def make_sources(
    memory: LocalMemory, config: Config, copy_thread: Copier, wake: Wake, context: Context
) -> dict[str, SourceTransport]:
    """The giving side of the configured wire; with ``auto`` of each that the memory allows.

    Raises TransportUnavailable with the reason when a wire that was asked for by name cannot be
    had.
    """
    faults = parse_faults(config.faults)
    makers = _SOURCES | {"zmq": FaultyZmqSource} if faults else _SOURCES
    made: dict[str, SourceTransport] = {}
    for name in _wanted(_SOURCES, config):
        try:
            made[name] = makers[name](memory, config, copy_thread, wake, context)
        except TransportUnavailable as exc:
            if config.transport != "auto" or name == AUTO_LAST:
                _close_all(made)
                raise
            _log.debug("not offered: %s", exc)
    return made


def make_sinks(
    memory: LocalMemory, config: Config, copy_thread: Copier, wake: Wake, context: Context
) -> dict[str, SinkTransport]:
    """The taking side of the configured wire; with ``auto`` of all, best first, for the probe.

    Raises TransportUnavailable with the reason when a wire that was asked for by name cannot be
    had.
    """
    faults = parse_faults(config.faults)
    made: dict[str, SinkTransport] = {}
    for name in _wanted(_SINKS, config):
        sink = _SINKS[name](memory, config, faulty_copier(copy_thread, faults), wake, context)
        made[name] = FaultySink(sink, faults, wake) if faults else sink
    return made


def data_endpoints(sources: Mapping[str, SourceTransport]) -> dict[str, str]:
    """For the manifest: where sinks attach, by wire."""
    endpoints = {name: source.data_endpoint() for name, source in sources.items()}
    return {name: endpoint for name, endpoint in endpoints.items() if endpoint is not None}


def published_infos(
    sources: Mapping[str, SourceTransport], memory: LocalMemory
) -> tuple[MemoryInfo, ...]:
    """For the manifest: handles only where ``shm`` is served.

    So no sink maps what is not offered.
    """
    if "shm" in sources:
        return memory.infos
    return tuple(msgspec.structs.replace(info, handle=None) for info in memory.infos)


def _wanted(makers: Mapping[str, object], config: Config) -> tuple[str, ...]:
    if config.transport == "auto":
        return tuple(makers)
    if config.transport not in makers:
        raise TransportUnavailable(
            f"transport: expected one of auto, {', '.join(makers)}, got {config.transport}; "
            "this version does not have it"
        )
    return (config.transport,)


def _close_all(made: Mapping[str, SourceTransport]) -> None:
    for source in made.values():
        source.close()
