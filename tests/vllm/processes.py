"""Processes of the tests: forked from one that has imported vLLM, or commands; each with a log.

A fork starts an engine in 2 s of CPU time where a new interpreter takes 8 s.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import psutil

PRELOADED = [
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.executor.multiproc_executor",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.gemma3",
    "vllm.model_executor.models.mixtral",
    "kvxfer.connector",
]

_FIRST: dict[str, str] = {}
"""The environment of the first fork, with which the process that all come from has begun."""


class Process:
    """A process with its children and a log."""

    def __init__(self, pid: int, log_path: Path, wait: Callable[[float], bool]) -> None:
        """``wait``: returns whether the process has ended after at most so many seconds."""
        self.pid = pid
        self.log_path = log_path
        self._wait = wait

    @classmethod
    def fork(
        cls, target: Callable[..., None], arguments: tuple[Any, ...], environment: dict[str, str]
    ) -> Process:
        """Call a function of a module in a fork of the process that has imported vLLM."""
        ctx = mp.get_context("forkserver")
        ctx.set_forkserver_preload(PRELOADED)
        if not _FIRST:
            _FIRST.update(environment)
        with _environment(_FIRST):  # what OpenMP reads when torch is loaded
            forkserver.ensure_running()
        own = {name: os.environ.get(name) for name in _FIRST}
        return cls._started(ctx, target, arguments, own | environment)

    @classmethod
    def spawn(
        cls, target: Callable[..., None], arguments: tuple[Any, ...], environment: dict[str, str]
    ) -> Process:
        """Call a function of a module in a new interpreter."""
        with _environment(environment):
            return cls._started(mp.get_context("spawn"), target, arguments, environment)

    @classmethod
    def _started(
        cls,
        ctx: mp.context.ForkServerContext | mp.context.SpawnContext,
        target: Callable[..., None],
        arguments: tuple[Any, ...],
        environment: Mapping[str, str | None],
    ) -> Process:
        log_path = _new_log()
        process = ctx.Process(target=_run, args=(target, arguments, environment, str(log_path)))
        process.start()
        assert process.pid is not None

        def wait(timeout_s: float) -> bool:
            process.join(timeout_s)
            return process.exitcode is not None

        return cls(process.pid, log_path, wait)

    @classmethod
    def command(cls, command: list[str], environment: dict[str, str]) -> Process:
        """Run a command."""
        log_path = _new_log()
        with log_path.open("wb") as log:
            popen = subprocess.Popen(
                command,
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return cls.of(popen, log_path)

    @classmethod
    def of(cls, popen: subprocess.Popen[bytes], log_path: Path) -> Process:
        """One that was started elsewhere and writes its log there."""

        def wait(timeout_s: float) -> bool:
            try:
                popen.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return False
            return True

        return cls(popen.pid, log_path, wait)

    @property
    def is_alive(self) -> bool:
        return not self._wait(0)

    def wait(self, timeout_s: float) -> bool:
        """Has it ended by then?"""
        return self._wait(timeout_s)

    def tree(self) -> list[psutil.Process]:
        """The process and all that it started, as far as they run."""
        try:
            parent = psutil.Process(self.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def cpu_s(self) -> float:
        """CPU time of all of them so far."""
        total_s = 0.0
        for process in self.tree():
            times = process.cpu_times()
            total_s += times.user + times.system
        return total_s

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all of them."""
        _signal(self.tree(), number)

    def kill(self) -> None:
        """SIGKILL for all of them; returns when they are gone, with what they left in memory."""
        if not self.is_alive:
            return
        processes = self.tree()
        shared = _shared_files(processes)
        _signal(processes, signal.SIGKILL)
        self._wait(10)
        psutil.wait_procs(processes, timeout=10)
        for path in shared:
            path.unlink(missing_ok=True)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def log_end(self, num_lines: int = 200) -> str:
        return "\n".join(self.log().splitlines()[-num_lines:])

    def forget(self) -> None:
        """Kill what may still run, and remove the log."""
        self.kill()
        self.log_path.unlink(missing_ok=True)


def _run(
    target: Callable[..., None],
    arguments: tuple[Any, ...],
    environment: Mapping[str, str | None],
    log_path: str,
) -> None:
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    target(*arguments)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _new_log() -> Path:
    handle, name = tempfile.mkstemp(prefix="kvxfer-engine-", suffix=".log")
    os.close(handle)
    return Path(name)


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def _shared_files(processes: list[psutil.Process]) -> set[Path]:
    """Files in /dev/shm that these processes have mapped: killed, they leave them behind."""
    found: set[Path] = set()
    for process in processes:
        try:
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        except OSError:
            continue
        names = (line.split(maxsplit=5)[-1] for line in lines if "/dev/shm/" in line)
        found |= {Path(name) for name in names if "(deleted)" not in name}
    return found
