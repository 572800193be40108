"""OpenAI servers of vLLM and ``kvxfer proxy`` as processes, and a client for them."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

from tests.helpers import free_port
from tests.vllm import api_server
from tests.vllm.engines import OFFER, EngineConfig
from tests.vllm.processes import Process

START_TIMEOUT_S = 240.0
REQUEST_TIMEOUT_S = 60.0
MODEL = "tiny"


@dataclass(frozen=True, slots=True)
class Server:
    """Something that answers HTTP. ``headers``: those of every completion."""

    url: str
    process: Process
    headers: Mapping[str, str] = field(default_factory=dict)

    def of_rank(self, rank: int) -> Self:
        """The same server; requests go to this data-parallel rank."""
        return replace(self, headers={"X-data-parallel-rank": str(rank)})

    def wait_ready(self, path: str = "/health", timeout_s: float = START_TIMEOUT_S) -> None:
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                with urllib.request.urlopen(self.url + path, timeout=5) as reply:
                    if reply.status == 200:
                        return
            except OSError:
                pass
            assert self.process.is_alive, f"{self.url} has ended:\n{self.process.log_end()}"
            assert time.monotonic() < deadline_s, f"{self.url}:\n{self.process.log_end()}"
            time.sleep(0.2)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as reply:
            text: str = reply.read().decode()
            return text

    def metric(self, name: str, **labels: str) -> float:
        """The sum of one prometheus metric over all labels but these; 0.0 if there is none."""
        values = (
            line.rsplit(" ", 1)[1]
            for line in self.get("/metrics").splitlines()
            if line.startswith((f"{name} ", f"{name}{{"))
            and all(f'{label}="{value}"' in line for label, value in labels.items())
        )
        return sum(map(float, values))

    def complete(self, tokens: Sequence[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
        """One completion. Raises AssertionError with the body of another status than 200."""
        with self._post(tokens, max_tokens, fields) as reply:
            body: dict[str, Any] = json.load(reply)
            return body

    def token_ids(self, tokens: Sequence[int], max_tokens: int, **fields: Any) -> list[int]:
        (choice,) = self.complete(tokens, max_tokens, **fields)["choices"]
        return list(choice["token_ids"])

    def prefill(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Prefill for another engine; what a router would forward."""
        params = self.complete(tokens, 1, kv_transfer_params=OFFER)["kv_transfer_params"]
        assert isinstance(params, dict), params
        return params

    def stream(self, tokens: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
        """The tokens of each event as it arrives."""
        with self._post(tokens, max_tokens, {"stream": True}) as reply:
            for line in reply:
                data = line.decode().strip().removeprefix("data: ")
                if data and data != "[DONE]":
                    for choice in json.loads(data)["choices"]:
                        yield list(choice.get("token_ids") or [])

    def _post(self, tokens: Sequence[int], max_tokens: int, fields: dict[str, Any]) -> Any:
        body = {
            "model": MODEL,
            "prompt": list(tokens),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "detokenize": False,
            "return_token_ids": True,
            **fields,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", **self.headers},
        )
        try:
            return urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{error.code}: {error.read().decode()}") from error


def start_engine(config: EngineConfig) -> Server:
    """``vllm serve`` of this engine, by its module: the command needs a package named vllm."""
    port, kv_port = free_port(), free_port()
    command = serve_command(config, "127.0.0.1", port, kv_port)
    return Server(_url(port), Process.command(command, serve_environment(config, kv_port)))


def serve_command(config: EngineConfig, host: str, port: int, kv_port: int) -> list[str]:
    module = "vllm.entrypoints.openai.api_server"
    return [sys.executable, "-m", module, *_arguments(config, host, port, kv_port)]


@contextmanager
def forked(config: EngineConfig, kv_port: int) -> Iterator[Server]:
    """The same in a fork of the process that has imported vLLM."""
    port = free_port()
    arguments = _arguments(config, "127.0.0.1", port, kv_port)
    process = Process.fork(api_server.serve, (arguments,), serve_environment(config, kv_port))
    try:
        server = Server(_url(port), process)
        server.wait_ready()
        yield server
        os.kill(process.pid, signal.SIGTERM)  # it ends its engines and cleans up after them
        process.wait(10)
    finally:
        process.forget()


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def serve_environment(config: EngineConfig, kv_port: int) -> dict[str, str]:
    return config.environment(kv_port) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


def _arguments(config: EngineConfig, host: str, port: int, kv_port: int) -> list[str]:
    """The command line of ``vllm serve``."""
    found = ["--host", host, "--port", str(port), "--served-model-name", MODEL]
    for name, value in config.engine_args(kv_port).items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            found += [option] if value else []
        else:
            found += [option, json.dumps(value) if isinstance(value, dict) else str(value)]
    return found


def start_proxy(prefill: Sequence[Server], decode: Sequence[Server]) -> Server:
    """``kvxfer proxy`` in front of these engines."""
    port = free_port()
    command = [sys.executable, "-m", "kvxfer", "proxy", "--listen", f"127.0.0.1:{port}"]
    for option, servers in (("--prefill", prefill), ("--decode", decode)):
        for server in servers:
            command += [option, server.url]
    environment = EngineConfig().environment(0)
    return Server(_url(port), Process.command(command, environment))


@contextmanager
def proxied(prefill: Server, decode: Server) -> Iterator[Server]:
    """``kvxfer proxy`` in front of two engines that serve already."""
    proxy = start_proxy([prefill], [decode])
    try:
        proxy.wait_ready()
        yield proxy
    finally:
        proxy.process.forget()


@contextmanager
def serving(prefill: EngineConfig, decode: EngineConfig) -> Iterator[tuple[Server, Server, Server]]:
    """A prefill server, a decode server, and the proxy in front of them."""
    with ExitStack() as stack:
        engines = []
        for config in (prefill, decode):
            engines.append(start_engine(config))
            stack.callback(engines[-1].process.forget)
        for server in engines:
            server.wait_ready()
        proxy = stack.enter_context(proxied(*engines))
        yield engines[0], engines[1], proxy
