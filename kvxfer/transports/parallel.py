"""How many threads of a rank move chunks at once, and how many descriptors it has.

One TCP connection, one of ZeroMQ's threads and one copy thread move 3 to 6 GB/s each. A host with
many cores has several of each; one with two cores loses by more than one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
from pathlib import Path

import torch
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
MOST_BESIDE_ONE_STREAM, FEW_CORES = 4, 2
"""Threads of ZeroMQ. On three cores a load beside 300 connections that came at once took 7.8 ms
with one of them, and 3.7 with three. On two cores, where it took 20 and 12 with two, loads of 2 MB
took 5.3 ms with one and 5.9 with two.
"""
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
    return config.zmq_streams or streams_on(num_cores())


def streams_on(cores: int) -> int:
    """How many an engine takes by itself where it may use so many cores."""
    return max(1, min(MOST_AUTO_STREAMS, cores // CORES_PER_STREAM))


def most_further() -> int:
    """Streams beyond the first of each connection, of one wire at one side."""
    return min(MOST_FURTHER, most_connections() // 4)


def make_context(config: Config) -> Context:
    """With several threads of ZeroMQ: hundreds of handshakes at once, or a long message that is
    taken back, hold up the connections of one thread. Two cores have one. Where there are several
    streams, there is a thread more for each, and one for who listens for them
    (:func:`stream_threads`).
    """
    cores = num_cores()
    num_beside = min(MOST_BESIDE_ONE_STREAM, cores) if cores > FEW_CORES else 1
    num_for_streams = number + 1 if (number := num_streams(config)) > 1 else 0
    context: Context = zmq.Context(io_threads=num_beside + num_for_streams)
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    if num_for_streams:
        context.setsockopt(zmq.AFFINITY, (1 << num_beside) - 1)  # of all sockets that say nothing
    return context


def stream_threads(context: Context) -> tuple[int, ...]:
    """The threads that only streams have, each as the bit that ``zmq.AFFINITY`` knows it by; none
    where there is one stream. The first is the listener's.

    ZeroMQ gives a connection to the thread that has the fewest, whatever they carry, and does not
    yet count one that was begun a moment ago. Left to that, eight streams had five threads, and
    512 MiB took 84 ms between two GPUs where they take 48 with a thread each.
    """
    others = context.sockopts.get(zmq.AFFINITY, 0)
    if not others:
        return ()
    return tuple(
        1 << number for number in range(context.get(zmq.IO_THREADS)) if not others >> number & 1
    )


def thread_of_stream(context: Context, number: int) -> int:
    """Of the ``number``-th stream that a sink begins; 0: whichever ZeroMQ takes."""
    threads = stream_threads(context)[1:]
    return threads[number % len(threads)] if threads else 0


def make_copier(
    config: Config, device: torch.device, *, small_nbytes: int = 0
) -> CopyThread | CopyThreads:
    """The copy threads of a rank, one for each stream: one packs another layout in host memory at
    1.6 GB/s, where its stream carries 2.2. Beside a GPU one copies for all streams, several chunks
    by one call (:class:`~kvxfer.transports.stream_packing.DevicePacker`), with a core for each.
    ``small_nbytes``: as :class:`CopyThread` has it.
    """
    number = num_streams(config)
    if number == 1 or device.type == "cuda":
        return CopyThread(small_nbytes=small_nbytes, num_cores=number)
    return CopyThreads(number, small_nbytes=small_nbytes)


# ------------------------------------------------------------------ descriptors


NUM_DESCRIPTORS = 4096
"""A source rank takes about 15; the table takes 32 KiB."""

MOST_DESCRIPTORS = 65536
"""What the process's soft limit is raised to, where its hard limit allows: the usual soft limit is
1024, which is for programs that call select().
"""


def make_room() -> None:
    """Raise the soft limit, and let the process have NUM_DESCRIPTORS, or as many as its limit
    allows, without a pause later.

    Where threads share its table, Linux grows it only when every processor has seen the old one go
    (``synchronize_rcu``): 9 to 16 ms at each of 64, 256, 512 and 1024 descriptors. An engine with a
    GPU has more than 200, so its first contact with a peer met one of these pauses. A table never
    shrinks.
    """
    last = min(NUM_DESCRIPTORS, _raise_limit()) - 1
    with contextlib.suppress(OSError):  # no descriptor is left: the next call that needs one raises
        known = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.close(fcntl.fcntl(known, fcntl.F_DUPFD_CLOEXEC, last))
        finally:
            os.close(known)


def _raise_limit() -> int:
    """Raise the soft limit; return how many descriptors the process may have now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft
