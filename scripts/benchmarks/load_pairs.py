"""Pairs of vLLM engines of scripts/vllm_load: how they are set up, started, used and ended."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from kvxfer.bench.core import ContenderLost
from kvxfer.bench.slow_link import SlowLink
from kvxfer.bench.workers import Worker, method_for
from scripts.benchmarks import handover_trace
from scripts.benchmarks.load_host import DECODE, PREFILL, WARM_OUTPUT, WHOLE, EngineHost, Part
from scripts.benchmarks.load_plan import SIDES, Contender, Job, Plan, engine_args
from scripts.benchmarks.load_stats import FLOOR, Answer

ROOT = Path(__file__).resolve().parents[2]
START_S = 300.0
_PORTS = count(20_000 + 64 * os.getpid() % 12_000, 8)
"""Of each engine the first of eight: its connector's, and from the fifth on vLLM's own. Two runs at
the same time have others.
"""
LEAD_S = 0.3
"""From the order of a segment to its begin."""
ENVIRONMENT = {
    **{"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"},
    "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    "VLLM_KV_CACHE_LAYOUT": "HND",  # what NixlConnector asks for: the same attention for all
}
ON_CPUS = {
    **{"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
"""With the worker in the engine core's process: each of two would spin for a second after the last
message of the other, so a pair of engines would take four cores.
"""


class Pair:
    """A prefill and a decode engine, with what contenders do on them. Starts at once."""

    def __init__(
        self, plan: Plan, contender: Contender, folder: Path, link: SlowLink | None = None
    ) -> None:
        self.link, self.plan, self.name = link, plan, contender.name
        self.logs = [folder / f"{side}_{_file_name(contender.name)}.log" for side in SIDES]
        reader, writer = get_context("spawn").Pipe(duplex=False)
        with reader, writer:
            self.engines = [
                self._start(contender, at, end) for at, end in enumerate((writer, reader))
            ]

    def _start(self, contender: Contender, at: int, handed: Any) -> Worker:  # noqa: ANN401
        side, gpus, port = SIDES[at], self.plan.gpus, _free_port()
        environment = ENVIRONMENT | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
        environment |= {"VLLM_PORT": str(port + 4)}
        if side == "prefill":
            environment[handover_trace.FOLDER] = ""  # decode's core alone notes its calls
        environment |= {"CUDA_VISIBLE_DEVICES": gpus[at]} if gpus else ON_CPUS
        make: Callable[..., object] = EngineHost
        if self.link is not None:
            host = self.plan.hosts[at]
            make = self.link.inside(at, EngineHost)
            environment |= {"VLLM_HOST_IP": host, "UCX_TLS": "tcp"}
            environment |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": host}
        return Worker(
            f"{contender.name}, {side}", make,
            engine_args(self.plan, contender, side, port), self.logs[at], handed,
            not self.plan.model.has_weights, self.plan.cores[at] if self.plan.cores else (),
            environment=environment | contender.environment[side],
            method=method_for("cuda" if gpus else "cpu"), is_daemon=False,
        )  # fmt: skip

    def both(self, *calls: Sequence[Any], timeout_s: float) -> list[Any]:
        """A method and its arguments for each engine, at the same time. Raises ContenderLost."""
        with ThreadPoolExecutor(2) as pool:
            asked = [
                pool.submit(partial(engine.call, object, *call, timeout_s=timeout_s))
                for engine, call in zip(self.engines, calls, strict=True)
            ]
            try:
                return [each.result() for each in asked]
            except BaseException:  # or the other one would be waited for
                self.kill()
                raise

    def warm_up(self) -> None:
        """Wait for both, and leave their pools as serving does. Raises ContenderLost."""
        plan = self.plan
        try:
            for engine in self.engines:
                engine.ready(START_S)
        except ContenderLost:
            self.kill()  # the other one has memory that is needed
            raise
        longest = max(16, plan.longest - WARM_OUTPUT)
        call = ("warm_up", plan.kv_tokens, longest, plan.model.vocab_size, plan.warm_up_s)
        self.both(call, call, timeout_s=3 * plan.warm_up_s + 60)

    def serve(
        self, contender: Contender, jobs: tuple[Job, ...], label: str, num_likely: int = 0
    ) -> tuple[float, list[Answer]]:
        """One segment: when it began, and what both engines say of each request. Raises
        ContenderLost.
        """
        part = Part(
            WHOLE, label, jobs, self.plan.seed, self.plan.model.vocab_size, contender.name,
            num_likely=num_likely,
        )  # fmt: skip
        primed = replace(part, role=DECODE, salt=f"primed {label}", is_salt_shared=True)
        if contender.kind == FLOOR:
            self.engines[1].call(object, "prime", primed, timeout_s=120)
        begins_s = time.perf_counter() + LEAD_S
        limit_s = jobs[-1].arrival_s + self.plan.drain_s
        parts = {
            "plain": (replace(part, jobs=jobs[::2]), replace(part, jobs=jobs[1::2])),
            FLOOR: (replace(part, role=PREFILL), primed),
        }.get(
            contender.kind,
            [
                replace(part, role=role, moves_kv=True, is_early=contender.kind == "early")
                for role in (PREFILL, DECODE)
            ],
        )
        timed = [replace(each, begins_s=begins_s, ends_s=begins_s + limit_s) for each in parts]
        found = self.both(*(("run", each) for each in timed), timeout_s=limit_s + 30)
        return begins_s, [answer for answers in found for answer in answers]

    def last_words(self) -> list[str]:
        """The errors that their logs end with, each once."""
        logs = [log.read_text(errors="replace") for log in self.logs if log.exists()]
        errors = [found for log in logs for found in re.findall(r"\b\w+Error: .*", log)]
        return list(dict.fromkeys(errors))[-4:]

    def kill(self) -> None:
        """Both engines and all that they started, at once."""
        for engine in self.engines:
            if engine.pid is not None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(engine.pid, signal.SIGKILL)

    def close(self) -> None:
        """End both engines, in order where they can."""
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(Worker.close, self.engines))
        self.kill()


def _file_name(text: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in text)


def _free_port() -> int:
    """Below 32768, where Linux takes ports for outgoing connections from: an engine that starts
    binds it seconds later.
    """
    while True:
        port = next(_PORTS)
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
