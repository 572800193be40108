"""How many threads of a rank move chunks at once.

One TCP connection, one of ZeroMQ's threads and one copy thread move 3 to 6 GB/s each. A host with
many cores has several of each; one with two cores loses by more than one.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import zmq

from kvxfer.config import Config
from kvxfer.transports.channel import Context
from kvxfer.transports.copy_thread import CopyThread, CopyThreads
from kvxfer.transports.visitors import most_connections

CORES_PER_STREAM = 4
"""Of each side: a stream keeps two thirds of a core busy with its socket and one third with copies,
and most of a host is the engine's.
"""
MOST_AUTO_STREAMS = 8
MOST_FURTHER = 64
"""With 32 MiB each half of the staging that a source has for all sinks
(``stream_connections.MAX_STAGING_NBYTES``); also at most half of the connections that a listener
may have of one address. So streams keep no sink out.
"""
MAX_SOCKETS = 16384
"""Of one rank: a source rank takes two for control and two for data, and three for each further
stream; ZeroMQ's own bound is 1023.
"""
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # cgroup v2: "QUOTA PERIOD", or "max PERIOD"


def num_cores() -> int:
    """Cores that this process may use, by its affinity and its control group."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = _CPU_QUOTA.read_text().split()
        cores = min(cores, int(quota) // int(period))
    return max(1, cores)


def num_streams(config: Config) -> int:
    """Connections over which ``zmq`` carries the chunks of one peer rank, at most."""
    return config.zmq_streams or max(1, min(MOST_AUTO_STREAMS, num_cores() // CORES_PER_STREAM))


def most_further() -> int:
    """Streams beyond the first of each connection, of one wire at one side."""
    return min(MOST_FURTHER, most_connections() // 4)


def make_context(config: Config) -> Context:
    """With a thread of ZeroMQ for each stream."""
    context: Context = zmq.Context(io_threads=num_streams(config))
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context


def make_copier(config: Config, *, small_nbytes: int = 0) -> CopyThread | CopyThreads:
    """The copy threads of a rank, one for each stream: one packs another layout in host memory at
    1.6 GB/s, where its stream carries 2.2. ``small_nbytes``: as :class:`CopyThread` has it.
    """
    if (number := num_streams(config)) == 1:
        return CopyThread(small_nbytes=small_nbytes)
    return CopyThreads(number, small_nbytes=small_nbytes)
