"""What a copy over the direct wire between GPUs costs: a large and a small one, each timed until
the host has seen its end, and by the GPU's own clock.

The host's time says how long a launch may have to wait, the GPU's what the link carries: where many
processes take turns on a GPU, a copy of 10 us was seen over after 2 ms, and as a rate of the link
that had ``auto`` take ``zmq``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from kvxfer.tensors.device_copy import CopySettings, DeviceCopier, Launched, flat_copy
from kvxfer.tensors.device_launch import Event, Stamp
from kvxfer.tensors.device_memory import DeviceMemory, Gpu
from kvxfer.transfer.costs import WireCosts, fit_direct_costs
from kvxfer.transports.base import TRIAL_SMALL_NBYTES

TRIAL_NBYTES = 32 << 20
"""80 us of such a link, ten times what a launch costs."""
LEAST_TIMINGS, MOST_TIMINGS, TIMINGS_S = 4, 16, 0.02
"""Of each size. Where other processes use the GPU as well, each launch may wait for their turns,
milliseconds each, and the more there are the sooner one does not.
"""
EQUAL_TIMINGS, EQUAL_SHARE, QUICK_S = 3, 1.1, 0.001
"""So many within a tenth of the least are enough if that is too short to hold another's turn. All
sixteen of both sizes were 7 ms of a first load of 22. What is that short is watched without pause:
beside vLLM's thread, which computes in Python, a copy of 0.2 ms was seen over after 1.1.
"""


@dataclass(frozen=True, slots=True)
class Timing:
    """The least that copies of ``nbytes`` took: ``seen_s`` from the call until the host saw the
    end, ``copied_s`` between stamps of the GPU before and behind.
    """

    nbytes: int
    seen_s: float
    copied_s: float


def measure_copies(gpu: Gpu, memory: DeviceMemory) -> WireCosts:
    """Of up to 32 MiB from there into new memory of this GPU; from any thread. Raises RuntimeError,
    PyTorch's, where CUDA fails.
    """
    nbytes = min(memory.nbytes, TRIAL_NBYTES)
    landing = torch.empty(nbytes, dtype=torch.uint8, device=gpu.device)
    stream = gpu.make_stream()
    # The ring is one thread's, and this may be any
    copier = DeviceCopier(gpu.device, CopySettings(ring_nbytes=1 << 16))
    timings: list[Timing] = []
    for most_nbytes in (nbytes, min(nbytes, TRIAL_SMALL_NBYTES)):
        bound = flat_copy(memory.address, landing.data_ptr(), most_nbytes)
        ids, num_tokens = np.zeros(1, np.int64), bound.sink.tile.block_tokens
        launch = partial(copier.copy, bound, ids, ids, (0, num_tokens), stream=stream)
        timings.append(time_copy(launch, partial(copier.stamp, stream)))
    return costs_of(*timings)


def costs_of(large: Timing, small: Timing) -> WireCosts:
    """The rate by the GPU's clock, the latency by the host's."""
    costs = fit_direct_costs((small.nbytes, small.copied_s), (large.nbytes, large.copied_s))
    latency_s = max(small.seen_s - small.nbytes / costs.bytes_per_s, 0.0)
    return replace(costs, latency_s=latency_s)


def time_copy(launch: Callable[[], Launched], stamp: Callable[[], Stamp]) -> Timing:
    """Of some copies the least: the first one pays for page tables and a cold path."""
    timings_s: list[float] = []
    copied_s = math.inf
    began_s = time.perf_counter()
    while len(timings_s) < MOST_TIMINGS:
        first = stamp()
        started_s = time.perf_counter()
        launched, last = launch(), stamp()
        _wait(last, is_quick=min(timings_s, default=0.0) <= QUICK_S)
        ended_s = time.perf_counter()
        timings_s.append(ended_s - started_s)
        copied_s = min(copied_s, last.since_s(first))
        if len(timings_s) < LEAST_TIMINGS:
            continue
        least_s = min(timings_s)
        num_equal = sum(timing_s <= EQUAL_SHARE * least_s for timing_s in timings_s)
        is_known = num_equal >= EQUAL_TIMINGS and least_s <= QUICK_S
        if is_known or ended_s - began_s > TIMINGS_S:
            break
    return Timing(launched.nbytes, max(min(timings_s), 1e-9), max(copied_s, 1e-9))


def _wait(event: Event, *, is_quick: bool) -> None:
    """Until it is over; for a quick one without letting go of the interpreter, for a while."""
    until_s = time.perf_counter() + (QUICK_S if is_quick else 0.0)
    while time.perf_counter() < until_s:
        if event.query():
            return
    event.synchronize()
