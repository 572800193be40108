"""Where the time of a hand-over goes: calls of decode's engine core and of its connector, for each
request that is alone there.

A request's window begins when it comes to the core, and ends with the step that has computed its
first token. Calls are noted by wrappers of a few dozen methods, about 1 us each. What a call takes
is told without the noted calls within it, so that all of them and the rest are the window.
"""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Self

import numpy as np

from kvxfer.bench.core import Table, number_text
from scripts.benchmarks.load_stats import Answer

FOLDER = "HANDOVER_TRACE"
"""The environment variable that has engines note their calls, into this folder."""
Point = tuple[str, str, tuple[str, ...]]
"""A module, a class in it, and methods of that."""
_V1 = "vllm.v1."
_POINTS: tuple[Point, ...] = (
    (_V1 + "engine.core", "EngineCore", ("add_request",)),
    (_V1 + "core.sched.scheduler", "Scheduler", ("schedule", "update_from_output", "make_stats")),
    (_V1 + "executor.uniproc_executor", "UniProcExecutor", ("execute_model", "sample_tokens")),
    *(
        (_V1 + module, "GPUModelRunner", ("execute_model", "sample_tokens", *names))
        for module, names in (
            ("worker.gpu_model_runner", ("_update_states", "_prepare_inputs", "_model_forward")),
            ("worker.gpu.model_runner", ("prepare_inputs", "prepare_attn", "sample")),
        )
    ),
    (_V1 + "worker.gpu.cudagraph_utils", "ModelCudaGraphManager", ("run_fullgraph",)),
    (_V1 + "worker.gpu.async_utils", "AsyncOutput", ("get_output",)),
    (
        "kvxfer.integrations.vllm.connector",
        "KvxferConnector",
        (
            *("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc"),
            *("build_connector_meta", "handle_preemptions", "bind_connector_metadata"),
            *("start_load_kv", "wait_for_save", "get_finished", "get_transfer_results"),
            *("get_block_ids_with_load_errors", "get_kv_connector_stats"),
            *("build_connector_worker_meta", "clear_connector_metadata"),
            *("update_connector_output", "request_finished", "request_finished_all_groups"),
        ),
    ),
)
"""Methods of vLLM 0.26 to 0.33; what a version lacks is left out."""
BEFORE, TO_CORE = "until decode is asked", "until the engine core has it"
REST, TO_CLIENT = "the rest of the core", "until the client has the token"


@dataclass(frozen=True, slots=True)
class Window:
    """One request in the core; ``calls``: seconds of each noted call, by name, in the order in
    which they first ended. Times are of the clock that all processes of a host share.
    """

    request_id: str
    begin_s: float
    end_s: float
    calls: Mapping[str, float]

    @classmethod
    def read(cls, folder: Path) -> list[Self]:
        """All that the engines have noted."""
        lines = [line for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
        return [cls(**json.loads(line)) for line in lines]

    def legs_us(self, answers: Iterable[Answer]) -> dict[str, float]:
        """Of both engines' answers about this request: all of its hand-over, leg by leg."""
        told = list(answers)
        prefilled_s = next(a.prefilled_s for a in told if a.prefilled_s is not None)
        asked_s, first_s = next((a.asked_s, a.token_s[0]) for a in told if a.token_s)
        rest_s = self.end_s - self.begin_s - sum(self.calls.values())
        legs_s = {BEFORE: asked_s - prefilled_s, TO_CORE: self.begin_s - asked_s, **self.calls}
        legs_s |= {REST: rest_s, TO_CLIENT: first_s - self.end_s}
        return {name: 1e6 * seconds for name, seconds in legs_s.items()}


@dataclass(slots=True)
class _Open:
    begin_s: float
    is_alone: bool
    calls: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


class CallNotes:
    """What one engine core notes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open: dict[str, _Open] = {}
        self._within: list[float] = []
        """Of each noted call that runs, from the outermost: seconds of the noted calls in it."""
        self._core: int | None = None

    def arrived(self, request_id: str) -> None:
        now_s = time.perf_counter()
        for each in self._open.values():
            each.is_alone = False
        self._open[request_id] = _Open(now_s, not self._open)

    def stepped(self, request_ids: Iterable[str], num_running: int) -> None:
        """The core has taken in the output of a step of these requests."""
        now_s = time.perf_counter()
        for request_id in set(request_ids) & self._open.keys():
            found = self._open.pop(request_id)
            if found.is_alone and num_running <= 1:
                window = {"request_id": request_id, "begin_s": found.begin_s, "end_s": now_s}
                with self._path.open("a") as file:
                    file.write(json.dumps(window | {"calls": found.calls}) + "\n")

    def noted(self, inner: Callable[..., Any], name: str) -> Callable[..., Any]:
        """The method, which notes what it takes."""

        @functools.wraps(inner)
        def call(*args: Any, **named: Any) -> Any:  # noqa: ANN401
            if self._core != threading.get_ident():
                return inner(*args, **named)
            begin_s = time.perf_counter()
            self._within.append(0.0)
            try:
                return inner(*args, **named)
            finally:
                took_s = time.perf_counter() - begin_s
                own_s = took_s - self._within.pop()
                if self._within:
                    self._within[-1] += took_s
                for each in self._open.values():
                    if each.begin_s <= begin_s:  # what runs when a request comes is the rest
                        each.calls[name] += own_s

        return call

    def listen_to_this_thread(self) -> None:
        """It is the core's, whose calls count."""
        self._core = threading.get_ident()

    def install(self) -> None:
        """From now on methods of this process's vLLM note their calls."""
        self.wrap(_POINTS)
        self._install_ends()

    def wrap(self, points: Iterable[Point]) -> None:
        for module, kind, names in points:
            with suppress(ImportError, AttributeError):
                found = getattr(import_module(module), kind)
                for name in names:
                    if name in vars(found):
                        setattr(found, name, self.noted(vars(found)[name], f"{kind}.{name}"))

    def _install_ends(self) -> None:
        """What begins and ends windows."""
        core = import_module(_V1 + "engine.core").EngineCore
        scheduler = import_module(_V1 + "core.sched.scheduler").Scheduler
        preprocess, update = core.preprocess_add_request, scheduler.update_from_output

        @functools.wraps(preprocess)
        def arrive(self_: Any, request: Any) -> Any:  # noqa: ANN401
            self.arrived(request.request_id)
            return preprocess(self_, request)

        @functools.wraps(update)
        def step(self_: Any, scheduled: Any, *args: Any, **named: Any) -> Any:  # noqa: ANN401
            self.listen_to_this_thread()
            found = update(self_, scheduled, *args, **named)
            self.stepped(scheduled.num_scheduled_tokens, len(self_.running))
            return found

        core.preprocess_add_request, scheduler.update_from_output = arrive, step


def install(folder: Path) -> None:
    """Have this process, an engine core, note its calls."""
    CallNotes(folder / f"{os.getpid()}.jsonl").install()


@dataclass(frozen=True, slots=True)
class Legs:
    """The legs of one hand-over, microseconds by name."""

    load: str
    contender: str
    legs_us: Mapping[str, float]


TEXT = (
    "Microseconds, medians of requests that were alone in decode's engine core, from prefill's "
    "answer to decode's first token. Each call without the noted calls within it; what a step has "
    "begun before the token of the step before it is out counts, too."
)


def legs_tables(found: Sequence[Legs]) -> list[Table]:
    """One of each load: a row for each leg, a column for each contender."""
    return [
        _table(load, [each for each in found if each.load == load])
        for load in dict.fromkeys(each.load for each in found)
    ]


def _table(load: str, found: Sequence[Legs]) -> Table:
    by_contender: dict[str, list[Mapping[str, float]]] = defaultdict(list)
    for each in found:
        by_contender[each.contender].append(each.legs_us)
    last = (REST, TO_CLIENT)
    names = dict.fromkeys(name for each in found for name in each.legs_us if name not in last)
    rows = [
        (name, *(_median(leg.get(name, 0.0) for leg in legs) for legs in by_contender.values()))
        for name in (*names, *last)
    ]
    totals = [_median(sum(leg.values()) for leg in legs) for legs in by_contender.values()]
    header = [f"{name} (n={len(legs)})" for name, legs in by_contender.items()]
    title = f"Where a hand-over's time goes, {load}"
    return Table(title, TEXT, ("", *header), (*rows, ("all of it", *totals)))


def _median(values: Iterable[float]) -> str:
    return number_text(float(np.median(list(values))), 0)
