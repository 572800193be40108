"""Our connector with a clock around every call that vLLM makes, for tests of its cost.

A step begins with the first scheduling call after the last step's output and ends with the call
after it. Engines in one process have both sides here, so that a step is the sum of both.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

from kvxfer.integrations.vllm.connector import KvxferConnector
from tests.vllm.faulty_connector import FaultyConnector

# Calls of a step, in the order in which vLLM makes them; those of a request's life among them.
_BEFORE = (
    "get_num_new_matched_tokens",
    "get_loaded_kv_cache_group_ids",
    "update_state_after_alloc",
)
_AFTER = (
    *("handle_preemptions", "bind_connector_metadata", "start_load_kv", "wait_for_layer_load"),
    *("save_kv_layer", "wait_for_save", "get_transfer_results", "get_finished"),
    *("get_block_ids_with_load_errors", "get_kv_connector_stats", "build_connector_worker_meta"),
    *("get_kv_connector_kv_cache_events", "clear_connector_metadata", "update_connector_output"),
    *("take_events", "request_finished", "request_finished_all_groups", "has_pending_push_work"),
)


class Clock:
    """Seconds (wall, CPU) in the connector by step: those of steps with a forward pass are kept."""

    def __init__(self) -> None:
        self.steps_s: list[tuple[float, float]] = []
        self._this_s = [0.0, 0.0]
        self._next_s = [0.0, 0.0]
        self._has_forward = False
        self._is_inside = False

    def begin(self, has_forward: bool) -> None:
        """``build_connector_meta``: the scheduling calls before it belong to its step."""
        if self._has_forward:
            self.steps_s.append((self._this_s[0], self._this_s[1]))
        self._this_s, self._next_s, self._has_forward = self._next_s, [0.0, 0.0], has_forward

    def timed(self, call: Callable[[], Any], *, is_next: bool) -> Any:
        """Add the time of a call; calls within a call count once."""
        if self._is_inside:
            return call()
        self._is_inside = True
        begun_cpu_s = time.thread_time()
        begun_s = time.perf_counter()  # last before the call and first after it: it is the cheaper
        try:
            return call()
        finally:
            ended_s = time.perf_counter()
            ended_cpu_s = time.thread_time()
            self._is_inside = False
            spent = self._next_s if is_next else self._this_s
            spent[0] += ended_s - begun_s
            spent[1] += ended_cpu_s - begun_cpu_s


CLOCK = Clock()


def _timed(name: str) -> Callable[..., Any]:
    method = getattr(KvxferConnector, name)
    is_next = name in _BEFORE

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return CLOCK.timed(lambda: method(self, *args, **kwargs), is_next=is_next)

    return call


class TimedConnector(FaultyConnector):
    """The connector under test."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        CLOCK.begin(scheduler_output.total_num_scheduled_tokens > 0)
        build = super().build_connector_meta
        return CLOCK.timed(lambda: build(scheduler_output), is_next=False)

    def forget_times(self) -> None:
        """Begin anew."""
        CLOCK.steps_s.clear()

    def times(self) -> dict[str, float]:
        """Of the steps since ``forget_times``; fields of ``costs.Steps``."""
        wall_us = sorted(1e6 * wall_s for wall_s, _ in CLOCK.steps_s)
        return {
            "num_steps": len(wall_us),
            "p50_us": statistics.median(wall_us),
            "p90_us": wall_us[len(wall_us) * 9 // 10],
            "cpu_p50_us": statistics.median(1e6 * cpu_s for _, cpu_s in CLOCK.steps_s),
        }


for _name in (*_BEFORE, *_AFTER):
    if hasattr(KvxferConnector, _name):
        setattr(TimedConnector, _name, _timed(_name))
