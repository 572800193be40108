"""Real vLLM engines as processes: start, drive, stop, kill, watch.

An :class:`Engine` runs ``engine_worker.py``; a :class:`Fleet` keeps the engines that were used
last, because a start takes seconds. Tests get engines from the ``fleet`` fixture.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tests.helpers import free_port, stop_process
from tests.vllm import engine_worker, models
from tests.vllm.processes import Process

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 180.0
CALL_TIMEOUT_S = 60.0
# Without a size vLLM's CPU build takes nine tenths of the machine's memory.
KV_NBYTES = 64 << 20
MAX_MODEL_LEN = 1024
MODULE = "kvxfer.integrations.vllm"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Of engines that tell a collector: tests/vllm/otlp.py
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    "OTEL_BSP_SCHEDULE_DELAY": "100",
    # What is there already may have another version of vLLM.
    "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
}
# What llm-d's sidecar and vLLM's proxies send with a prefill request.
OFFER: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class EngineDied(RuntimeError):
    """The engine's process has ended; the message has the end of its log."""


class EngineRefused(RuntimeError):
    """A call raised in the engine."""


@dataclass(frozen=True, slots=True)
class Connector:
    """``--kv-transfer-config`` of one engine. Its port is chosen when the engine starts.

    ``faults``: of kvxfer's wires, see faulty_connector.py.
    """

    name: str = "KvxferConnector"
    role: str = "kv_both"
    module: str | None = MODULE
    extra: dict[str, Any] = field(default_factory=dict)
    policy: str = "fail"
    faults: str = ""

    def transfer_config(self, port: int) -> dict[str, Any]:
        """The dict that vLLM takes."""
        extra = dict(self.extra)
        if self.name in {"KvxferConnector", "SharedConnector", "TimedConnector"}:
            extra.setdefault("port", port)
            extra.setdefault("log_level", "INFO")
        if self.name == "MultiConnector":
            for child in extra["connectors"]:
                if child["kv_connector"] == "KvxferConnector":
                    child.setdefault("kv_connector_extra_config", {}).setdefault("port", port)
        name, module = self.name, self.module
        if self.faults:
            extra["faults"] = self.faults
            if name == "KvxferConnector":
                name, module = "FaultyConnector", "tests.vllm.faulty_connector"
        found = {
            "kv_connector": name,
            "kv_role": self.role,
            "kv_load_failure_policy": self.policy,
            "kv_connector_extra_config": extra,
        }
        if module is not None:
            found["kv_connector_module_path"] = module
        return found


NIXL = Connector(name="NixlConnector", module=None)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How one engine is set up. ``more``: further arguments of vLLM's EngineArgs; ``variables``: of
    its environment; ``label``: tells engines apart that are set up alike.
    """

    connector: Connector | None = None
    model: str = "llama"
    tp_size: int = 1
    block_tokens: int = 64
    kv_nbytes: int = KV_NBYTES
    in_process: bool = True
    label: str = ""
    # After a step without output, of an engine in the worker's process: while blocks wait for a
    # peer vLLM steps without pause, and the engines of a test share two cores.
    idle_step_s: float = 0.0005
    more: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Equal for configs whose engines are alike."""
        return f"{self!r}"

    def folder(self) -> Path:
        """Of the model."""
        return models.make(self.model)

    def engine_args(self, port: int) -> dict[str, Any]:
        """Arguments of vLLM's EngineArgs."""
        found: dict[str, Any] = {
            "model": str(self.folder()),
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": 16,
            "tensor_parallel_size": self.tp_size,
            "block_size": self.block_tokens,
            "seed": 0,
            "kv_cache_memory_bytes": self.kv_nbytes,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
        }
        if self.connector is not None:
            found["kv_transfer_config"] = self.connector.transfer_config(port)
        return found | self.more

    def environment(self, port: int) -> dict[str, str]:
        """Of the engine's processes."""
        found = dict(ENVIRONMENT)
        found["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if self.in_process else "1"
        found["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port)
        return found | self.variables


@dataclass(frozen=True, slots=True)
class Finished:
    """How a request ended."""

    request_id: str
    token_ids: list[int]
    reason: str  # vLLM's FinishReason: length, stop, abort, error
    num_cached_tokens: int  # found by prefix or brought by the connector
    params: dict[str, Any] | None
    first_token_s: float
    total_s: float
    # Of each new token the likeliest ones, by token id as text; empty unless asked for.
    logprobs: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Blocks:
    """What the scheduler's pool says."""

    num_free: int
    num_total: int
    num_requests: int  # blocks that wait for a peer keep theirs for 0.1 s at least
    num_running: int


class Engine:
    """One engine. Start-up goes on in the background until the first call."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.port = free_port()
        self._request_ids = itertools.count()
        self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = self._launch(theirs)
        self._sock = ours
        self._pending = b""
        self._calls = itertools.count()
        self._answers: dict[int, dict[str, Any]] = {}
        self._finished: dict[str, Finished] = {}
        self.start_s: float | None = None

    def _launch(self, theirs: socket.socket) -> Process:
        """The process that serves on ``theirs``."""
        return Process.fork(
            engine_worker.serve,
            (theirs, self.config.engine_args(self.port), self.config.idle_step_s),
            self.config.environment(self.port),
        )

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> Self:
        """Returns when the engine has started. Raises EngineDied with the end of its log."""
        self._read_until(lambda: self.start_s is not None, timeout_s, "start")
        return self

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int = 16,
        params: dict[str, Any] | None = None,
        **sampling: Any,
    ) -> str:
        """Add one request and return its id at once."""
        return self.submit_all([prompt], max_tokens, [params], **sampling)[0]

    def submit_all(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 16,
        params: Sequence[dict[str, Any] | None] | None = None,
        **sampling: Any,
    ) -> list[str]:
        """Add requests that are all there before the engine's next step."""
        each = params if params is not None else [None] * len(prompts)
        requests = [
            {
                "request_id": f"r{next(self._request_ids)}",
                "prompt": list(prompt),
                "max_tokens": max_tokens,
                "params": param,
                "sampling": sampling,
            }
            for prompt, param in zip(prompts, each, strict=True)
        ]
        self.call("submit", requests=requests)
        return [str(request["request_id"]) for request in requests]

    def result(self, request_id: str, timeout_s: float = CALL_TIMEOUT_S) -> Finished:
        """Wait for the end of a request."""
        self._read_until(lambda: request_id in self._finished, timeout_s, request_id)
        return self._finished.pop(request_id)

    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int = 16,
        params: dict[str, Any] | None = None,
        **sampling: Any,
    ) -> Finished:
        """One request from beginning to end."""
        return self.result(self.submit(prompt, max_tokens, params, **sampling))

    def generate_all(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 16,
        params: Sequence[dict[str, Any] | None] | None = None,
    ) -> list[Finished]:
        """All of them at the same time."""
        return [self.result(each) for each in self.submit_all(prompts, max_tokens, params)]

    def prefill(self, prompt: Sequence[int]) -> Finished:
        """Prefill a prompt for another engine; ``params`` is what a router would forward."""
        return self.generate(prompt, 1, OFFER)

    def abort(self, request_id: str) -> bool:
        """False if the request had ended already."""
        self.call("abort", request_id=request_id)
        known = request_id not in self._finished
        self._finished.pop(request_id, None)
        return known

    def blocks(self) -> Blocks:
        return Blocks(**self.call("blocks"))

    def wait_for_blocks(self, holds: Callable[[Blocks], bool], timeout_s: float = 25.0) -> Blocks:
        """Ask until ``holds``; fails with the last answer."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            blocks = self.blocks()
            if holds(blocks):
                return blocks
            assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {blocks}"
            time.sleep(0.02)

    def reset(self) -> None:
        """Forget the prefix cache. Fails where blocks are in use after 25 s."""
        deadline_s = time.monotonic() + 25
        while not self.call("reset_prefix_cache"):
            assert time.monotonic() < deadline_s, f"blocks stay in use: {self.blocks()}"
            time.sleep(0.05)

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = self.call("metrics")
        return found

    def metric(self, name: str) -> float:
        """One prometheus sample; 0.0 if it is not there (yet)."""
        return self.metrics().get(name, 0.0)

    def groups(self) -> list[str]:
        found: list[str] = self.call("groups")
        return found

    def block_tokens(self) -> list[int]:
        found: list[int] = self.call("block_tokens")
        return found

    def call(self, name: str, timeout_s: float = CALL_TIMEOUT_S, **arguments: Any) -> Any:
        """Call ``do_<name>`` of the worker."""
        self.wait_ready()
        number = next(self._calls)
        line = json.dumps({"call": number, "do": name, **arguments}).encode() + b"\n"
        try:
            self._sock.sendall(line)
        except OSError as error:
            raise EngineDied(self._end(f"{name}: {error}")) from error
        self._read_until(lambda: number in self._answers, timeout_s, name)
        answer = self._answers.pop(number)
        if "error" in answer:
            raise EngineRefused(f"{name}: {answer['error']}")
        return answer["value"]

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """All processes of the engine stand still meanwhile."""
        for process in self.process.tree():
            stop_process(process.pid)
        try:
            yield
        finally:
            self.process.signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL to all processes."""
        self.process.kill()
        self._sock.close()

    def restart(self) -> None:
        """New processes, the same port."""
        self.close()
        self._start()

    def close(self) -> None:
        """End the engine, politely at first."""
        try:
            if self.process.is_alive and self.start_s is not None:
                self.call("quit", timeout_s=5)
                self.process.wait(10)
        except (RuntimeError, TimeoutError):
            pass  # it is killed now
        self._sock.close()
        self.process.forget()

    def _read_until(self, holds: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not holds():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(self._end(f"{what}: no answer in {timeout_s:g} s"))
            readable, _, _ = select.select([self._sock], [], [], left_s)
            if readable:
                self._read(what)

    def _read(self, what: str) -> None:
        try:
            chunk = self._sock.recv(1 << 20)
        except OSError:
            chunk = b""
        if not chunk:
            self.process.wait(5)  # its last words come after the end of the socket
            raise EngineDied(self._end(f"{what}: the engine has ended"))
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "call" in message:
                self._answers[message["call"]] = message
            elif "finished" in message:
                finished = Finished(**message["finished"])
                self._finished[finished.request_id] = finished
            else:
                self.start_s = message["ready"]

    def _end(self, text: str) -> str:
        return f"{text}; the end of its log:\n{self.process.log_end()}"


class Fleet:
    """The engines used last, ``max_alive`` of them. A context manager."""

    def __init__(self, max_alive: int = 3) -> None:
        self._max_alive = max_alive
        self._engines: OrderedDict[str, Engine] = OrderedDict()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for key in list(self._engines):
            self._engines.pop(key).close()

    def engines(self, *configs: EngineConfig) -> list[Engine]:
        """One engine for each config, with empty prefix caches; equal configs share one.

        Those that are not there start at the same time.
        """
        keys = [config.key for config in configs]
        for key in keys:
            if key in self._engines:
                self._engines.move_to_end(key)
        for key in [key for key in keys if key in self._engines]:
            if not self._engines[key].process.is_alive:
                self._engines.pop(key).close()
        missing = {key: config for key, config in zip(keys, configs, strict=True)}
        missing = {key: config for key, config in missing.items() if key not in self._engines}
        while len(self._engines) + len(missing) > self._max_alive and self._evict(keys):
            pass
        for key, config in missing.items():
            self._engines[key] = Engine(config)
        found = [self._engines[key].wait_ready() for key in keys]
        for key in set(keys) - set(missing):
            self._engines[key].reset()
        return found

    def _evict(self, wanted: list[str]) -> bool:
        for key in self._engines:
            if key not in wanted:
                self._engines.pop(key).close()
                return True
        return False

    def fresh(self, *configs: EngineConfig) -> list[Engine]:
        """Like ``engines``, and none of them has done anything before."""
        for config in configs:
            if config.key in self._engines:
                self._engines.pop(config.key).close()
        return self.engines(*configs)
