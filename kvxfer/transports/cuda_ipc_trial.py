"""What a copy over the direct wire between GPUs costs: a large and a small one, each timed until
the host has seen its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from kvxfer.tensors.cuda_device import Gpu
from kvxfer.tensors.device_copy import CopySettings, DeviceCopier, Launched
from kvxfer.tensors.device_work import DeviceMemory, flat_copy
from kvxfer.tensors.job_ring import Event
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


def measure_copies(gpu: Gpu, memory: DeviceMemory) -> WireCosts:
    """Of up to 32 MiB from there into new memory of this GPU; from any thread. Raises RuntimeError,
    PyTorch's, where CUDA fails.
    """
    nbytes = min(memory.nbytes, TRIAL_NBYTES)
    landing = torch.empty(nbytes, dtype=torch.uint8, device=gpu.device)
    stream = gpu.make_stream()
    # The ring is one thread's, and this may be any
    copier = DeviceCopier(gpu.device, CopySettings(ring_nbytes=1 << 16))
    timings: list[tuple[int, float]] = []
    for most_nbytes in (nbytes, min(nbytes, TRIAL_SMALL_NBYTES)):
        bound = flat_copy(memory.address, landing.data_ptr(), most_nbytes)
        ids, num_tokens = np.zeros(1, np.int64), bound.sink.tile.block_tokens
        launch = partial(copier.copy, bound, ids, ids, 0, num_tokens, stream=stream)
        timings.append(time_copy(launch))
    large, small = timings
    return fit_direct_costs(small, large)


def time_copy(launch: Callable[[], Launched]) -> tuple[int, float]:
    """Its bytes, and the least that it took: the first one pays for page tables and a cold path."""
    timings_s: list[float] = []
    began_s = ended_s = time.perf_counter()
    while len(timings_s) < MOST_TIMINGS:
        started_s = ended_s
        launched = launch()
        if launched.event is not None:
            _wait(launched.event, is_quick=min(timings_s, default=0.0) <= QUICK_S)
        ended_s = time.perf_counter()
        timings_s.append(ended_s - started_s)
        if len(timings_s) < LEAST_TIMINGS:
            continue
        least_s = min(timings_s)
        num_equal = sum(timing_s <= EQUAL_SHARE * least_s for timing_s in timings_s)
        is_known = num_equal >= EQUAL_TIMINGS and least_s <= QUICK_S
        if is_known or ended_s - began_s > TIMINGS_S:
            break
    return launched.nbytes, max(min(timings_s), 1e-9)


def _wait(event: Event, *, is_quick: bool) -> None:
    """Until it is over; for a quick one without letting go of the interpreter, for a while."""
    until_s = time.perf_counter() + (QUICK_S if is_quick else 0.0)
    while time.perf_counter() < until_s:
        if event.query():
            return
    event.synchronize()
