"""One real vLLM engine in a process of its own, driven by JSON lines over a socket.

A call is one line, ``{"call": number, "do": name, ...}``; its answer ``{"call": number, "value":
...}`` or ``{"call": number, "error": text}``. A request that ends is told without being asked:
``{"finished": Finished as a dict}``.

The loop here is the engine's own when the engine runs in this process
(VLLM_ENABLE_V1_MULTIPROCESSING=0): it steps while the scheduler has anything left, blocks that wait
for a peer included, as EngineCore's loop does.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
from importlib import import_module
from typing import Any


class Worker:
    """The engine, its requests, and the calls of the test."""

    def __init__(
        self, sock: socket.socket, engine_args: dict[str, Any], idle_step_s: float
    ) -> None:
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self._sock = sock
        self._idle_step_s = idle_step_s
        self._pending = b""
        self._running = True
        started_s = time.perf_counter()
        self._engine = LLMEngine.from_engine_args(EngineArgs(**engine_args))
        self._core = getattr(self._engine.engine_core, "engine_core", None)
        self._submitted_s: dict[str, float] = {}
        self._first_s: dict[str, float] = {}
        self._send({"ready": time.perf_counter() - started_s})

    def run(self) -> None:
        """Until the socket closes or the test says so."""
        while self._running:
            # As vLLM's own loop: without work the scheduler is asked again only after a call. An
            # engine in another process puts its outputs into a queue that cannot be waited for.
            idle_s = 0.002 if self._core is None else None
            readable, _, _ = select.select(
                [self._sock], [], [], 0.0 if self._has_work() else idle_s
            )
            if readable and not self._read():
                return
            if self._has_work():
                self._step()

    def _has_work(self) -> bool:
        if self._core is not None:
            return bool(self._core.scheduler.has_requests())
        return not self._engine.engine_core.outputs_queue.empty()

    def _step(self) -> None:
        outputs = self._engine.step()
        for output in outputs:
            request_id = output.request_id
            if output.outputs and output.outputs[0].token_ids:
                self._first_s.setdefault(request_id, time.perf_counter())
            if output.finished and request_id in self._submitted_s:
                self._send({"finished": self._finished(output)})
        if not outputs and self._core is not None and self._idle_step_s:
            time.sleep(self._idle_step_s)

    def _finished(self, output: Any) -> dict[str, Any]:
        (answer,) = output.outputs
        now_s = time.perf_counter()
        submitted_s = self._submitted_s.pop(output.request_id)
        return {
            "request_id": output.request_id,
            "token_ids": list(answer.token_ids),
            "reason": str(answer.finish_reason),
            "num_cached_tokens": output.num_cached_tokens or 0,
            "params": getattr(output, "kv_transfer_params", None),
            "first_token_s": self._first_s.pop(output.request_id, now_s) - submitted_s,
            "total_s": now_s - submitted_s,
            "logprobs": [
                {token: found.logprob for token, found in step.items()}
                for step in answer.logprobs or ()
            ],
        }

    def _read(self) -> bool:
        chunk = self._sock.recv(1 << 20)
        self._pending += chunk
        *lines, self._pending = self._pending.split(b"\n")
        for line in lines:
            message = json.loads(line)
            number, name = message.pop("call"), message.pop("do")
            try:
                value = getattr(self, f"do_{name}")(**message)
            except Exception as error:  # noqa: BLE001 (the test gets it)
                self._send({"call": number, "error": f"{type(error).__name__}: {error}"})
            else:
                self._send({"call": number, "value": value})
        return bool(chunk)

    def _send(self, message: dict[str, Any]) -> None:
        self._sock.sendall(json.dumps(message, default=repr).encode() + b"\n")

    def do_submit(self, requests: list[dict[str, Any]]) -> None:
        """Add requests; all of them are known to the scheduler before its next step."""
        from vllm import SamplingParams

        for request in requests:
            extra = request.get("params")
            sampling = SamplingParams(
                max_tokens=request["max_tokens"],
                ignore_eos=True,
                detokenize=False,
                extra_args=None if extra is None else {"kv_transfer_params": extra},
                **{"temperature": 0, **request.get("sampling", {})},
            )
            self._submitted_s[request["request_id"]] = time.perf_counter()
            self._engine.add_request(
                request["request_id"], {"prompt_token_ids": request["prompt"]}, sampling
            )

    def do_abort(self, request_id: str) -> bool:
        """Abort; False if the request had ended. An aborted request sends no ``finished``."""
        known = self._submitted_s.pop(request_id, None) is not None
        self._first_s.pop(request_id, None)
        self._engine.abort_request([request_id])
        return known

    def do_reset_prefix_cache(self) -> bool:
        """False where blocks are in use."""
        return bool(self._engine.reset_prefix_cache())

    def do_blocks(self) -> dict[str, int]:
        """Free and total blocks, and requests that the scheduler has not forgotten."""
        scheduler = self._scheduler()
        pool = scheduler.kv_cache_manager.block_pool
        return {
            "num_free": pool.get_num_free_blocks(),
            "num_total": pool.num_gpu_blocks,
            "num_requests": len(scheduler.requests),
            "num_running": len(scheduler.running),
        }

    def do_poison(self, layers: list[str], value: float) -> int:
        """Fill the KV cache of layers, those with such a word in the name; how many there are."""
        context = self._scheduler().vllm_config.compilation_config.static_forward_context
        caches = [
            layer.kv_cache
            for name, layer in context.items()
            if any(word in name for word in layers)
        ]
        for cache in caches:
            cache.fill_(value)
        return len(caches)

    def do_groups(self) -> list[str]:
        """The kinds of the KV cache groups' specs."""
        groups = self._scheduler().kv_cache_config.kv_cache_groups
        return [type(group.kv_cache_spec).__name__ for group in groups]

    def do_block_tokens(self) -> list[int]:
        """Of the KV cache groups. A state may ask for more than the engine was told."""
        groups = self._scheduler().kv_cache_config.kv_cache_groups
        return [group.kv_cache_spec.block_size for group in groups]

    def do_metrics(self) -> dict[str, float]:
        """Counters and gauges of prometheus by ``name{label=value,...}`` without engine, model."""
        from prometheus_client import REGISTRY

        found: dict[str, float] = {}
        for family in REGISTRY.collect():
            for sample in family.samples:
                labels = {
                    name: value
                    for name, value in sample.labels.items()
                    if name not in {"engine", "model_name"}
                }
                inside = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
                found[f"{sample.name}{{{inside}}}" if inside else sample.name] = sample.value
        return found

    def do_call_connector(self, path: str) -> Any:
        """Follow a dotted path from the scheduler's connector; a function there is called."""
        found: Any = self._scheduler().connector
        for name in path.split("."):
            found = getattr(found, name)
        return found() if callable(found) else found

    def do_quit(self) -> None:
        """End after this answer."""
        self._running = False

    def shutdown(self) -> None:
        self._engine.engine_core.shutdown()

    def _scheduler(self) -> Any:
        if self._core is None:
            raise RuntimeError("the scheduler is in another process; use an in-process engine")
        return self._core.scheduler


def serve(sock: socket.socket, engine_args: dict[str, Any], idle_step_s: float) -> None:
    """Start the engine and serve until the socket closes.

    ``sock``: a connected stream socket; ``engine_args``: arguments of vLLM's EngineArgs;
    ``idle_step_s``: sleep after a step without output.
    """
    if patch := os.environ.get("ENGINE_PATCH"):  # what this build of vLLM lacks for a model
        import_module(patch).apply()
    with sock:
        worker = Worker(sock, engine_args, idle_step_s)
        try:
            worker.run()
        finally:
            worker.shutdown()
