"""What a request gains whose decode engine hears of it together with prefill, over a slow link:
1 Gbit/s with 1 ms of delay each way.

Two reference engines, each in a network namespace of its own (root needed; see slow_link.py). A
prompt is computed in chunks. In turn, decode is asked when prefill has answered, and all of the
prompt's KV moves then. Together, both are asked at once, and KV moves while prefill computes.
Tokens are compared with those that prefill's engine gives alone. The aim: the first token after at
most 1.1 of the longer of prefill and transfer, and one chunk's transfer. With some of the prompt in
prefill's cache: how soon after its first step begins the first of these bytes is on the link.

The picture shows one request's life, of the case in which prefill and transfer are most alike.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvxfer.bench.core import (
    WIRE_PACKAGES,
    ContenderLost,
    Report,
    Table,
    WrongBytes,
    table,
    tell_lost,
)
from kvxfer.bench.frame import Benchmark, Session, option
from kvxfer.bench.plots import Bar, Timeline
from kvxfer.bench.slow_link import (
    ADDRESSES,
    LINK_OPTIONS,
    SlowLink,
    round_trip_ms,
    slow_link,
    speed_of,
)
from kvxfer.bench.wires import wire_config
from kvxfer.bench.workers import Worker, close_all
from kvxfer.connector.params import early_params, mint_request
from kvxfer.connector.records import LoadReport
from kvxfer.engine.config import EngineConfig, Role
from kvxfer.engine.engine import Engine
from kvxfer.engine.runner import Runner
from kvxfer.engine.steps import SchedulerOutput, StepOutput

WIRES = ("zmq", "tcp", "ucx", "nixl")
IN_TURN, TOGETHER = "in turn", "together"
AIM = 1.1
_VOCAB_SIZE = 512
MODEL: dict[str, Any] = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"},
    **{"vocab_size": _VOCAB_SIZE, "hidden_size": 256, "intermediate_size": 512},
    **{"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8},
    **{"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 65536},
    "tie_word_embeddings": False,
}
_NEW_TOKENS = 4
_MOST_THREADS = 4  # with two of the model's heads each
_LEAST_CORES = 6  # two for each engine, whose threads want more than one, and two for the link
_REST_S = 0.2
"""Between two requests: releases have arrived, and blocks are back."""
_DATA_NBYTES = 4096
"""A frame with more than this has KV in it; control messages have some hundred bytes."""
_START_S = 120.0
_KEPT_NBYTES = str(1 << 30)
_ENVIRONMENT = {
    "UCX_TLS": "tcp",
    "OMP_NUM_THREADS": "1",  # the engine says how many threads compute
    # glibc gives a step's scores back to the kernel and takes them anew, unless somebody has taught
    # it otherwise, as the zmq pipe does (zmq_pipe): prefill beside tcp took up to 30 % longer
    "MALLOC_MMAP_THRESHOLD_": _KEPT_NBYTES,
    "MALLOC_TRIM_THRESHOLD_": _KEPT_NBYTES,
}


def set_up_rank(path: str, num_threads: int) -> None:
    """Have a rank compute with so many threads, and write when each of its steps began and ended,
    and of how many tokens.
    """
    execute = Runner.execute

    def noted(self: Runner, step: SchedulerOutput) -> StepOutput:
        torch.set_num_threads(num_threads)  # the engine has set 1 meanwhile
        begin_s = time.monotonic()
        output = execute(self, step)
        num_tokens = sum(step.num_scheduled_tokens.values())
        if num_tokens:
            with open(path, "a") as log:
                log.write(f"[{begin_s}, {time.monotonic()}, {num_tokens}]\n")
        return output

    Runner.execute = noted  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request at one engine; ``begin_s``: it was sent, ``first_s``: its first token came."""

    begin_s: float
    first_s: float
    end_s: float
    token_ids: tuple[int, ...]
    params: dict[str, Any] | None
    failure: str | None
    loads: tuple[LoadReport, ...]


class EngineSide:
    """An engine and its client, in this process's namespace."""

    def __init__(self, config: EngineConfig, steps: str, num_threads: int) -> None:
        self._steps = Path(steps)
        set_up = partial(set_up_rank, steps, num_threads)
        self._engine = Engine(config, host=config.kv.host, set_up=set_up)
        self._engine.info()

    def ask(
        self, prompt: tuple[int, ...], max_new_tokens: int, params: dict[str, Any] | None
    ) -> Asked:
        """Raises KvxferError."""
        begin_s = time.monotonic()
        request_id = self._engine.submit(prompt, max_new_tokens, params)
        self._engine.first_token(request_id)
        first_s = time.monotonic()
        result = self._engine.result(request_id)
        done = result.done
        return Asked(
            *(begin_s, first_s, time.monotonic(), result.token_ids),
            *(done.kv_transfer_params, done.failure, done.loads),
        )

    def steps(self) -> list[tuple[float, float, int]]:
        """Since the last call: begin, end and tokens of each step that computed."""
        if not self._steps.exists():
            return []
        lines = self._steps.read_text().splitlines()
        self._steps.unlink()
        return [tuple(json.loads(line)) for line in lines]

    def close(self) -> None:
        self._engine.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One request through both engines. Moments are seconds since it was sent: ``steps`` of prefill
    (begin, end, tokens), ``frames`` on the link (moment, bytes), and of decode's load when it was
    ordered, had its last byte in its place, and its verdict.
    """

    prefill_s: float
    ttft_s: float
    transfer_s: float
    nbytes: int
    steps: tuple[tuple[float, float, int], ...]
    frames: tuple[tuple[float, int], ...]
    handed_s: float
    placed_s: float
    finished_s: float

    @property
    def data(self) -> list[tuple[float, int]]:
        """Frames with KV in them."""
        return [frame for frame in self.frames if frame[1] > _DATA_NBYTES]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Medians of a case, in milliseconds. ``bound_ms``: the aim of the first token, together.
    ``decode_ms``: of together, from the last byte in its place to the first token. ``cached_ms``:
    with most of the prompt in prefill's cache, from its first step's begin to the first of these
    bytes on the link.
    """

    wire: str
    head_size: int
    nbytes: int
    prefill_ms: float
    transfer_ms: float
    in_turn_ms: float
    together_ms: float
    bound_ms: float
    decode_ms: float
    cached_ms: float

    @property
    def is_met(self) -> bool:
        return self.together_ms <= self.bound_ms


COLUMNS = {
    "wire": lambda c: c.wire,
    "KV of the prompt": lambda c: f"{c.nbytes / 2**20:.0f} MiB",
    "prefill ms": lambda c: f"{c.prefill_ms:.0f}",
    "transfer ms": lambda c: f"{c.transfer_ms:.0f}",
    "TTFT in turn": lambda c: f"{c.in_turn_ms:.0f}",
    "together": lambda c: f"{c.together_ms:.0f}",
    "aim": lambda c: f"{c.bound_ms:.0f}",
    "met": lambda c: "yes" if c.is_met else "no",
    "decode": lambda c: f"{c.decode_ms:.0f}",
    "cached leave after": lambda c: f"{c.cached_ms:.1f}",
}
SHOWN = ("wire", "prefill ms", "transfer ms", "TTFT in turn", "together", "aim", "met")
TEXT = (
    "Milliseconds, medians. *TTFT*: from sending the request to decode's first token. *prefill*, "
    "*transfer*: of requests in turn, where each has the machine for itself. *aim*: of together, "
    f"{AIM:g} of the longer of these two, and one chunk's transfer. *decode*: of together, from "
    "the last byte in its place to that token. *cached leave after*: 0.9 of the prompt is in "
    "prefill's cache; from the begin of its first step to these bytes on the link."
)


def tables(report: Report) -> list[Table]:
    return [table("first token", TEXT, COLUMNS, report.records.get("cells", []))]


class Cores(NamedTuple):
    """Who computes where: both engines and the link share none, as on two hosts."""

    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    link: tuple[int, ...]

    @classmethod
    def divided(cls, cores: Iterable[int]) -> Cores:
        """Neighbours stay together, which may be threads of one core; few are shared by all."""
        own = tuple(sorted(cores))
        if len(own) < _LEAST_CORES:
            return cls(own, own, own)
        engines, link = own[:-2], own[-2:]
        half = len(engines) // 4 * 2
        return cls(engines[:half], engines[half:], link)

    @property
    def num_threads(self) -> int:
        """Of each engine, beside two cores for kvxfer's threads and the scheduler."""
        if self.prefill == self.decode:
            return 1
        return min(max(len(self.prefill) - 2, 1), _MOST_THREADS)

    @property
    def text(self) -> str:
        if self.prefill == self.decode:
            return f"{len(self.prefill)}, shared by all"
        counts = f"prefill {len(self.prefill)}, decode {len(self.decode)}, link {len(self.link)}"
        return f"{counts}; engines compute with {self.num_threads}"


@dataclass(frozen=True, slots=True)
class OnCores:
    """``make``, in a process that was just started: its threads and children stay on these."""

    cores: tuple[int, ...]
    make: Callable[..., object]

    def __call__(self, *arguments: object) -> object:
        os.sched_setaffinity(0, self.cores)
        return self.make(*arguments)


class Place(NamedTuple):
    """What all pairs of a run share."""

    link: SlowLink
    cores: Cores
    folder: Path


class Pair:
    """Both engines of a case, joined by the link."""

    def __init__(self, place: Place, wire: str, head_size: int, chunk: int) -> None:
        self._link, cores, folder = place
        model = folder / f"model-{head_size}.json"
        model.write_text(json.dumps(MODEL | {"head_dim": head_size}))
        self._sides = []
        for at, role in enumerate((Role.PREFILL, Role.DECODE)):
            config = EngineConfig(
                role=role,
                engine_id=role.value,
                model=str(model),
                num_blocks=1 + 40 * chunk // 16,
                max_model_len=16 * chunk,
                max_num_batched_tokens=chunk,
                kv=wire_config(
                    wire, host=ADDRESSES[at], allowed_peers=list(ADDRESSES), log_level="ERROR"
                ),
            )
            steps = str(folder / f"steps-{wire}-{head_size}-{role.value}")
            side = Worker(
                f"{role.value} over {wire}",
                self._link.inside(at, OnCores((cores.prefill, cores.decode)[at], EngineSide)),
                *(config, steps, cores.num_threads),
                environment=_ENVIRONMENT,
                is_daemon=False,
            )
            self._sides.append(side)
        self._pool = ThreadPoolExecutor(2)
        self._learned: Mapping[str, Any] | None = None

    def start(self) -> None:
        """Wait until both serve. Raises ContenderLost."""
        for side in self._sides:
            side.ready(_START_S)

    def run(self, how: str, prompt: tuple[int, ...]) -> Life:
        """Raises ContenderLost, also for KV that was not used and for tokens that differ."""
        time.sleep(_REST_S)
        prefill, decode = self._sides
        prefill.call(list, "steps")
        self._link.relayed()
        params: dict[str, Any] = {"do_remote_decode": True}
        name = mint_request()
        early = early_params(self._learned, name) if how == TOGETHER else None
        if early is not None:
            params["kvxfer"] = {"request": name}
            later = self._pool.submit(decode.call, Asked, "ask", prompt, _NEW_TOKENS, early)
            first = prefill.call(Asked, "ask", prompt, 1, params)
            second = later.result()
        else:
            first = prefill.call(Asked, "ask", prompt, 1, params)
            second = decode.call(Asked, "ask", prompt, _NEW_TOKENS, first.params)
        self._learned = first.params
        if second.failure or not second.loads:
            raise ContenderLost(f"{how}: expected KV to move, got {second.failure or 'none moved'}")
        life = self._life(first, second)
        expected = self.alone(prompt, _NEW_TOKENS)
        if second.token_ids != expected:
            raise WrongBytes(f"{how}: expected tokens {expected}, got {second.token_ids}")
        return life

    def _life(self, first: Asked, second: Asked) -> Life:
        begin_s = min(first.begin_s, second.begin_s)
        (load,) = second.loads
        steps = self._sides[0].call(list, "steps")
        frames = self._link.relayed().frames
        return Life(
            prefill_s=first.end_s - first.begin_s,
            ttft_s=second.first_s - begin_s,
            transfer_s=load.placed_s - load.handed_s,
            nbytes=load.nbytes,
            steps=tuple((begun - begin_s, end - begin_s, n) for begun, end, n in steps),
            frames=tuple((moment - begin_s, n) for moment, n in frames),
            handed_s=load.handed_s - begin_s,
            placed_s=load.placed_s - begin_s,
            finished_s=load.finished_s - begin_s,
        )

    def alone(self, prompt: tuple[int, ...], max_new_tokens: int) -> tuple[int, ...]:
        """The tokens of prefill's engine, which keeps the prompt in its cache."""
        asked = self._sides[0].call(Asked, "ask", prompt, max_new_tokens, None)
        return asked.token_ids

    def close(self) -> None:
        close_all(self._sides)
        self._pool.shutdown()


def prompt_of(number: int, num_tokens: int) -> tuple[int, ...]:
    """Prompts of other numbers share no block."""
    return tuple((number * 7919 + at * at * 31 + at * 17) % _VOCAB_SIZE for at in range(num_tokens))


class Contender:
    """A wire, and what its pair has taken."""

    def __init__(
        self, place: Place, wire: str, head_size: int, options: argparse.Namespace
    ) -> None:
        self.name = f"{wire}, heads of {head_size}"
        self._wire, self._head_size, self._chunks = wire, head_size, options.chunks
        self._prompts = (prompt_of(n, options.chunks * options.chunk_tokens) for n in count(1))
        self._lives: dict[str, list[Life]] = {IN_TURN: [], TOGETHER: []}
        self._cached_ms: list[float] = []
        self._pair = Pair(place, wire, head_size, options.chunk_tokens)

    def start(self) -> None:
        """Raises ContenderLost."""
        self._pair.start()

    def run_both(self) -> None:
        """A request in turn and one together. Raises ContenderLost."""
        for how, found in self._lives.items():
            found.append(self._pair.run(how, next(self._prompts)))

    def run_cached(self) -> None:
        """One together, of which prefill has 0.9 in its cache. Raises ContenderLost."""
        prompt = next(self._prompts)
        self._pair.alone(prompt[: len(prompt) * 9 // 10], 1)
        life = self._pair.run(TOGETHER, prompt)
        begins_s = life.steps[0][0]
        leaves_s = min(moment_s for moment_s, _ in life.data if moment_s >= begins_s)
        self._cached_ms.append(1e3 * (leaves_s - begins_s))

    def result(self) -> tuple[Cell, Life]:
        """Without the first of both, which were the warm-up; and the life of the request, together,
        that took the median time.
        """
        turns, both = (found[1:] for found in self._lives.values())
        prefill_s = statistics.median(life.prefill_s for life in turns)
        transfer_s = statistics.median(life.transfer_s for life in turns)
        median = sorted(both, key=lambda life: life.ttft_s)[len(both) // 2]
        cell = Cell(
            wire=self._wire,
            head_size=self._head_size,
            nbytes=median.nbytes,
            prefill_ms=1e3 * prefill_s,
            transfer_ms=1e3 * transfer_s,
            in_turn_ms=1e3 * statistics.median(life.ttft_s for life in turns),
            together_ms=1e3 * median.ttft_s,
            bound_ms=1e3 * (AIM * max(prefill_s, transfer_s) + transfer_s / self._chunks),
            decode_ms=1e3 * statistics.median(life.ttft_s - life.placed_s for life in both),
            cached_ms=statistics.median(self._cached_ms),
        )
        return cell, median

    def close(self) -> None:
        self._pair.close()


def measure(contenders: Sequence[Contender], rounds: int, lost: dict[str, str]) -> list[Contender]:
    """All of them by turns: the speed of a machine changes from minute to minute. Returns those
    that have come through; ``lost``: why another has not.
    """
    left = list(contenders)
    both, cached = [Contender.run_both] * (1 + rounds), [Contender.run_cached] * rounds
    for run in (Contender.start, *both, *cached):
        for contender in tuple(left):
            try:
                run(contender)
            except ContenderLost as exc:
                left.remove(contender)
                lost[contender.name] = str(exc)
                tell_lost(contender.name, exc)
    return left


def timeline(report: Report) -> Timeline | None:
    """Of the case in which prefill and transfer are most alike."""
    cells, lives = report.records["cells"], report.records["lives"]
    if not cells:
        return None
    at = min(range(len(cells)), key=lambda i: abs(cells[i].prefill_ms - cells[i].transfer_ms))
    cell, life = cells[at], lives[at]
    sent = accumulate(nbytes / 2**20 for _, nbytes in life.frames)
    return Timeline(
        title=f"One request's life, both engines asked at once ({cell.wire})",
        rows=(
            ("prefill computes", tuple(Bar(b, e, str(n)) for b, e, n in life.steps)),
            ("KV on the link", tuple(pieces(life.data))),
            (
                "decode's load",
                (Bar(life.handed_s, life.placed_s), Bar(life.placed_s, life.finished_s)),
            ),
            ("decode computes", (Bar(life.finished_s, life.ttft_s),)),
        ),
        marks=(("prefill answers", life.prefill_s), ("first token", life.ttft_s)),
        steps=tuple(zip((moment_s for moment_s, _ in life.frames), sent, strict=True)),
        steps_name="MiB of KV that have left",
        limit=("in turn", cell.in_turn_ms / 1e3),
    )


def pieces(data: Sequence[tuple[float, int]], gap_s: float = 0.002) -> Iterator[Bar]:
    """What is on the link without a pause of ``gap_s``, with its MiB."""
    begins = [
        at for at, (moment_s, _) in enumerate(data) if not at or moment_s - data[at - 1][0] >= gap_s
    ]
    for begin, end in pairwise([*begins, len(data)]):
        nbytes = sum(nbytes for _, nbytes in data[begin:end])
        yield Bar(data[begin][0], data[end - 1][0], f"{nbytes / 2**20:.1f} MiB")


def run(session: Session, options: argparse.Namespace) -> int:
    """1 if a case has not met its aim."""
    speed = speed_of(options)
    with slow_link(speed, "bench early") as link, tempfile.TemporaryDirectory() as folder:
        report = session.report(
            "early_link",
            f"Both engines asked at once, over {speed.words}",
            tables,
            timeline,
            WIRE_PACKAGES,
            link=speed.words,
            prompts=f"{options.chunks} chunks of {options.chunk_tokens} tokens",
        )
        report.facts["round trip"] = f"{round_trip_ms(link):.2f} ms"
        cores = Cores.divided(os.sched_getaffinity(0))
        if link.pid is not None:
            os.sched_setaffinity(link.pid, cores.link)
        report.facts["cores"] = cores.text
        place = Place(link, cores, Path(folder))
        report.records = {"cells": [], "lives": []}
        session.progress.plan(len(options.head_size))
        for head_size in options.head_size:
            report.begin(f"heads of {head_size}", SHOWN)
            with ExitStack() as opened:
                contenders = [
                    opened.enter_context(closing(Contender(place, wire, head_size, options)))
                    for wire in options.transport
                ]
                for contender in measure(contenders, options.rounds, report.lost):
                    cell, life = contender.result()
                    report.add(COLUMNS, cell)
                    report.records["lives"].append(life)
            session.progress.step()
            report.write()
        report.write(is_last=True)
        return int(bool(report.lost) or not all(cell.is_met for cell in report.records["cells"]))


BENCHMARK = Benchmark(
    (
        option("--transport", ["zmq"], nargs="+", choices=WIRES, help="some of the wires"),
        option("--head-size", [256, 128, 64], [128], type=int, nargs="+", help="of the model"),
        option("--chunks", 8, type=int, help="of a prompt (default 8)"),
        option("--chunk-tokens", 128, type=int, help="of a step of prefill (default 128)"),
        option("--rounds", 7, 3, type=int, help="of each case (default 7)"),
        *LINK_OPTIONS,
    ),
    run,
)
