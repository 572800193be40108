"""One vLLM engine of scripts/vllm_load in a process of its own, with the client in front of it.

vLLM's asynchronous front end runs here, as in its server but without HTTP; EngineCore is a process
below. Prefill's client hands each request straight to decode's. Times are of the clock that all
processes of a host share.
"""

# ruff: noqa: ANN401  # vLLM's objects: it has no types where it is not installed
from __future__ import annotations

import asyncio
import gc
import os
import random
import sys
import time
import zlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from kvxfer.connector.params import early_params, mint_request
from scripts.benchmarks import handover_trace
from scripts.benchmarks.load_plan import Job, prompt_of
from scripts.benchmarks.load_stats import Answer

WHOLE, PREFILL, DECODE = "whole", "prefill", "decode"
OFFER: dict[str, Any] = {
    **{"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None},
    **{"remote_block_ids": None, "remote_host": None, "remote_port": None},
}
"""What routers send with a prefill request."""
QKV_STD, OTHER_STD = 0.03, 0.02
"""Of seeded weights. With heads of 128 channels the scores of a random prompt then have a deviation
of about 3.7: a token looks at a few others and not at the mean of all, so tokens depend on KV."""
_WARM_TOGETHER = 12
WARM_OUTPUT = 48
_LABELS = ("engine", "model_name")
"""The same for all."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one engine does of a segment.

    Attributes:
        role: whole requests, their prefill, or their decode.
        segment: its name; what is left of another one is not taken for this one's.
        salt: of the prefix cache. Requests with other salts find nothing of each other.
        is_salt_shared: all requests have that one salt, and find what was primed with it.
        moves_kv: prefill offers its KV, decode is sent the params.
        is_early: decode hears of a request together with prefill.
        num_likely: so many log probabilities of each token are told, too.
        begins_s, ends_s: on the shared clock; what has not ended then is cancelled.
    """

    role: str
    segment: str
    jobs: tuple[Job, ...]
    seed: int
    vocab_size: int
    salt: str
    is_salt_shared: bool = False
    moves_kv: bool = False
    is_early: bool = False
    num_likely: int = 0
    begins_s: float = 0.0
    ends_s: float = 0.0

    def prompt(self, job: Job) -> dict[str, Any]:
        salt = self.salt if self.is_salt_shared else f"{self.salt} {self.id_of(job)}"
        tokens = prompt_of(self.seed, job.prompt_id, job.prompt_tokens, self.vocab_size)
        return {"prompt_token_ids": tokens, "cache_salt": salt}

    def id_of(self, job: Job) -> str:
        """The same on both sides, as routers have it."""
        return f"{self.segment}/{job.index}"


@dataclass(slots=True)
class _Ask:
    """One request while it is served."""

    token_s: list[float]
    tokens: list[int]
    num_likely: int = 0
    likely: list[dict[int, float]] = field(default_factory=list)
    cached_tokens: int = 0
    params: dict[str, Any] | None = None
    reason: str = ""
    asked_s: float = 0.0


def do_without_cutlass() -> None:
    """Have vLLM's Triton kernel make the queries of DeepSeek V3.2 where CUTLASS for Python is not
    installed: 0.32 imports the other kernel before it asks whether that one fits.
    """
    if find_spec("cutlass") is None:
        name = "vllm.models.deepseek_v32.nvidia.ops.fused_q_cutedsl"
        found: Any = sys.modules.setdefault(name, ModuleType(name))
        found.is_fused_q_cutedsl_supported = lambda *_, **__: False
        found.fused_q_cutedsl = None


do_without_cutlass()  # here, for vLLM's worker imports this module before it makes the model


class SeededWeights:
    """Methods that vLLM's worker gets (``worker_extension_cls``)."""

    model_runner: Any

    def note_handovers(self, folder: str) -> None:
        """Of one worker in the process of its engine core."""
        handover_trace.install(Path(folder))

    def seed_weights(self) -> None:
        """Give every parameter values that follow from its name alone. vLLM's dummy weights are all
        of one tiny size: whatever the KV, such a model soon repeats one token.
        """
        import torch

        model = self.model_runner.get_model()
        for name, parameter in model.named_parameters():
            generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
            with torch.inference_mode():
                if "norm" in name:
                    parameter.data.fill_(1)
                else:
                    std = 1.0 if "embed" in name else QKV_STD if "qkv" in name else OTHER_STD
                    parameter.data.normal_(0, std, generator=generator)
        for module in model.modules():
            # Of latents vLLM derives what decode multiplies with. The layer around has it, too.
            if hasattr(module, "kv_b_proj") and hasattr(module, "process_weights_after_loading"):
                module.process_weights_after_loading(self.model_runner.model_config.dtype)


class EngineHost:
    """The object of an engine's process (:class:`kvxfer.bench.workers.Worker`).

    Args:
        handed: prefill's end of the pipe to decode, or decode's.
        is_seeded: the model has no weights of its own.
        cores: for this process and all that it starts; none: those that it has.
    """

    def __init__(
        self,
        engine_args: dict[str, Any],
        log: Path,
        handed: Connection,
        is_seeded: bool,
        cores: tuple[int, ...] = (),
    ) -> None:
        if cores:
            os.sched_setaffinity(0, cores)
        os.setsid()  # one group with all that vLLM starts: killed together, spared Ctrl-C
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        self._handed = handed
        self._learned: dict[str, Any] | None = None
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._engine = self._loop.run_until_complete(_started(engine_args, is_seeded))
        gc.collect()
        gc.freeze()  # as vLLM's server does: what there is now would be looked through in mid-load

    def run(self, part: Part) -> list[Answer]:
        """Serve the part. Raises RuntimeError where the engine died."""
        answers = self._loop.run_until_complete(self._run(part)) if part.jobs else []
        if self._engine.errored:
            raise RuntimeError("the engine died")
        return answers

    async def _run(self, part: Part) -> list[Answer]:
        answers: list[Answer] = []
        serving = (
            [asyncio.create_task(self._receive(part, answers))]
            if part.role == DECODE
            else [asyncio.create_task(self._serve(part, job, answers)) for job in part.jobs]
        )
        _, late = await asyncio.wait(serving, timeout=part.ends_s - time.perf_counter())
        for task in late:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        return answers

    async def _serve(self, part: Part, job: Job, answers: list[Answer]) -> None:
        """A request that arrives; prefill hands it on."""
        prompt = part.prompt(job)
        await asyncio.sleep(max(0.0, part.begins_s + job.arrival_s - time.perf_counter()))
        is_prefill = part.role == PREFILL
        params = OFFER if part.moves_kv else None
        name = mint_request()
        early = early_params(self._learned, name) if part.is_early else None
        if params is not None and early is not None:
            params = params | {"kvxfer": {"request": name}}
            self._handed.send((part.segment, job, early, False))
        max_tokens = 1 if is_prefill else job.output_tokens
        ask = _Ask([], [], part.num_likely)
        error = await self._ask(ask, part.id_of(job), prompt, max_tokens, params)
        ended_s = time.perf_counter()
        if part.moves_kv and not error and not (ask.params or {}).get("do_remote_prefill"):
            error = "prefill offered no KV"
        if ask.params:  # else decode's own count of what it did not compute is not told
            ask.params.pop("remote_prefill_cached_tokens", None)
            self._learned = ask.params
        if is_prefill:
            if early is None:
                self._handed.send((part.segment, job, ask.params, bool(error)))
            answers.append(_answer(job, _Ask([], []), error, ended_s, ask.params))
        else:
            answers.append(_answer(job, ask, error))

    async def _receive(self, part: Part, answers: list[Answer]) -> None:
        """Decode what prefill hands over, until it has told of all requests."""
        told: asyncio.Queue[tuple[Job, Any, bool]] = asyncio.Queue()

        def readable() -> None:
            try:
                while self._handed.poll():
                    segment, *message = self._handed.recv()
                    if segment == part.segment:
                        told.put_nowait(tuple(message))
            except EOFError:  # prefill's process ended, which its own call tells
                self._loop.remove_reader(self._handed.fileno())

        prompts = {job.index: part.prompt(job) for job in part.jobs}
        self._loop.add_reader(self._handed.fileno(), readable)
        try:
            async with asyncio.TaskGroup() as serving:
                for _ in part.jobs:
                    job, params, is_lost = await told.get()
                    if not is_lost:
                        prompt = prompts[job.index]
                        serving.create_task(self._decode(part, job, prompt, params, answers))
        finally:
            self._loop.remove_reader(self._handed.fileno())

    async def _decode(
        self, part: Part, job: Job, prompt: Any, params: Any, answers: list[Answer]
    ) -> None:
        ask = _Ask([], [], part.num_likely)
        params = params if part.moves_kv else None
        error = await self._ask(ask, part.id_of(job), prompt, job.output_tokens, params)
        answers.append(_answer(job, ask, error))

    async def _ask(
        self, ask: _Ask, request_id: str, prompt: Any, max_tokens: int, params: Any
    ) -> str:
        """Why it went wrong, or nothing."""
        ask.asked_s = time.perf_counter()
        try:
            async for output in self._generate(
                request_id, prompt, max_tokens, params, ask.num_likely
            ):
                now_s = time.perf_counter()
                (new,) = output.outputs
                ask.tokens += new.token_ids
                ask.token_s += [now_s] * len(new.token_ids)
                ask.likely += [{i: of.logprob for i, of in at.items()} for at in new.logprobs or ()]
                if output.finished:
                    ask.cached_tokens = output.num_cached_tokens or 0
                    ask.params, ask.reason = output.kv_transfer_params, str(new.finish_reason)
        except asyncio.CancelledError:
            return "it did not end in time"
        except Exception as exc:  # noqa: BLE001  # the others go on; the report counts it
            return f"{type(exc).__name__}: {exc}"
        return "" if ask.reason == "length" else f"it ended by {ask.reason}"

    def _generate(
        self,
        request_id: str,
        prompt: Any,
        max_tokens: int,
        params: Any = None,
        num_likely: int = 0,
    ) -> AsyncIterator[Any]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            **{"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True},
            **{"detokenize": False, "output_kind": RequestOutputKind.DELTA},
            logprobs=num_likely or None,
            extra_args=None if params is None else {"kv_transfer_params": params},
        )
        found: AsyncIterator[Any] = self._engine.generate(prompt, sampling, request_id)
        return found

    def prime(self, part: Part) -> None:
        """Compute the KV of all prompts, one after the other, and leave it in the prefix cache."""

        async def prime() -> None:
            for job in {job.prompt_id: job for job in part.jobs}.values():
                await _drained(self._generate(f"prime {part.id_of(job)}", part.prompt(job), 1))

        self._loop.run_until_complete(prime())

    def warm_up(self, pool_tokens: int, longest: int, vocab_size: int, limit_s: float) -> int:
        """Requests of all lengths, several at a time, until each block of the pool has been given
        out about twice, so that the free blocks lie in the order that serving leaves. Returns how
        many tokens they had; stops after ``limit_s``.
        """
        rng = random.Random(longest)
        ends_s, total = time.perf_counter() + limit_s, 0

        async def serve() -> None:
            nonlocal total
            while total < 2 * pool_tokens and time.perf_counter() < ends_s:
                length = min(longest, round(longest ** rng.uniform(0.4, 1.05)))
                output_tokens = rng.randint(1, WARM_OUTPUT)
                total += length + output_tokens
                name = f"warm/{total}"
                tokens = [rng.randrange(3, vocab_size) for _ in range(length)]
                prompt = {"prompt_token_ids": tokens, "cache_salt": name}
                await _drained(self._generate(name, prompt, output_tokens))

        async def all_of_them() -> None:
            await asyncio.gather(*(serve() for _ in range(_WARM_TOGETHER)))

        self._loop.run_until_complete(all_of_them())
        return total

    def counters(self) -> dict[str, float]:
        """What the connector counted so far, by name and labels."""
        from prometheus_client import REGISTRY

        return {
            " ".join(
                [s.name, *(f"{k}={v}" for k, v in s.labels.items() if k not in _LABELS)]
            ): s.value
            for family in REGISTRY.collect()
            if family.name.startswith(("vllm:kvxfer", "vllm:nixl"))
            for s in family.samples
            if s.value and not s.name.endswith(("_bucket", "_created"))
        }

    def close(self) -> None:
        self._engine.shutdown()
        self._loop.close()
        self._handed.close()


async def _started(engine_args: dict[str, Any], is_seeded: bool) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_args))
    if is_seeded:
        await engine.collective_rpc("seed_weights")
    if folder := os.environ.get(handover_trace.FOLDER):
        await engine.collective_rpc("note_handovers", args=(folder,))
    return engine


async def _drained(outputs: AsyncIterator[Any]) -> None:
    async for _ in outputs:
        pass


def _answer(
    job: Job, ask: _Ask, error: str, prefilled_s: float | None = None, params: Any = None
) -> Answer:
    return Answer(
        index=job.index,
        prefilled_s=prefilled_s,
        asked_s=ask.asked_s,
        token_s=tuple(ask.token_s),
        tokens=tuple(ask.tokens),
        likely=tuple(ask.likely),
        cached_tokens=ask.cached_tokens,
        error=error,
        runs=_runs((params or {}).get("remote_block_ids") or ()),
    )


def _runs(block_ids: Iterable[Any]) -> tuple[int, int] | None:
    """How many blocks, and in how many runs of rising ids; None: the connector tells no ids."""
    ids = [
        each
        for group in block_ids
        for each in (group if isinstance(group, list | tuple) else [group])
    ]
    return (
        (len(ids), sum(a + 1 != b for a, b in zip(ids, ids[1:], strict=False)) + 1) if ids else None
    )
