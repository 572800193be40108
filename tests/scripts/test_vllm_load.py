"""The serving benchmark (scripts/vllm_load) without engines: requests, contenders, numbers, and the
hand-over from prefill's client to decode's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.bench.core import Report, tail_of
from scripts import vllm_load
from scripts.benchmarks.load_host import DECODE, PREFILL, WHOLE, EngineHost, Part
from scripts.benchmarks.load_plan import (
    BY_NAME,
    MODELS,
    TINY,
    Job,
    Load,
    Plan,
    Span,
    StateModel,
    engine_args,
    engine_nbytes,
    groups_of,
    jobs_of,
    largest_that_fits,
    parse_contender,
    parse_loads,
    prompt_of,
)
from scripts.benchmarks.load_stats import (
    Answer,
    Cell,
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

# ------------------------------------------------------------------ requests


def jobs(load: Load, round_number: int = 0, duration_s: float = 10.0, **more: int) -> list[Job]:
    options = {"seed": 1, "block_tokens": 16, "distinct_tokens": 1 << 20} | more
    return list(jobs_of(load, round_number, duration_s, **options))


def test_arrivals_are_poisson_and_follow_from_seed_load_and_round() -> None:
    load = Load(rate=50)
    found = jobs(load, duration_s=100)
    gaps_s = [b.arrival_s - a.arrival_s for a, b in zip(found, found[1:], strict=False)]
    assert len(found) == pytest.approx(5000, rel=0.06)  # 4 deviations
    assert min(gaps_s) >= 0
    assert sum(gap_s > 0.02 for gap_s in gaps_s) / len(gaps_s) == pytest.approx(
        1 / math.e, abs=0.03
    )
    assert found == jobs(load, duration_s=100)
    arrivals = [job.arrival_s for job in found[:9]]
    for other in (jobs(load, 1), jobs(load, seed=2), jobs(replace(load, output=Span(1, 2)))):
        assert [job.arrival_s for job in other[:9]] != arrivals


@given(
    rate=st.floats(0.2, 20),
    least=st.integers(1, 300),
    more=st.integers(0, 300),
    block_tokens=st.sampled_from([1, 16, 64]),
    distinct_tokens=st.integers(1, 3000),
    round_number=st.integers(0, 3),
)
def test_requests_are_within_what_was_asked(
    rate: float, least: int, more: int, block_tokens: int, distinct_tokens: int, round_number: int
) -> None:
    load = Load(rate, Span(least, least + more), Span(3, 5))
    found = jobs(
        load, round_number, 5.0, block_tokens=block_tokens, distinct_tokens=distinct_tokens
    )
    lengths: dict[int, int] = {}
    for at, job in enumerate(found):
        assert (job.index, lengths.setdefault(job.prompt_id, job.prompt_tokens)) == (
            at,
            job.prompt_tokens,
        )
        assert 0 <= job.arrival_s < 5
        assert 3 <= job.output_tokens <= 5
        assert (job.prompt_tokens - 1) % block_tokens == 0
        assert least - block_tokens <= job.prompt_tokens <= least + more + block_tokens
    assert found
    assert len(lengths) == 1 or sum(lengths.values()) <= distinct_tokens
    assert not lengths.keys() & {job.prompt_id for job in jobs(load, round_number + 1)}


def test_requests_that_come_at_equal_times() -> None:
    (load,) = parse_loads("every=2.5,prompt=992,output=4")
    assert str(load) == "every=2.5,prompt=992,output=4"
    assert [job.arrival_s for job in jobs(load, 1, 7.0)] == [0, 2.5, 5]
    assert {(job.prompt_tokens, job.output_tokens) for job in jobs(load)} == {(993, 4)}


def test_prompts_are_all_different() -> None:
    assert prompt_of(1, 2, 40, 500) == prompt_of(1, 2, 40, 500)
    assert len({tuple(prompt_of(s, n, 8, 500)) for s in range(3) for n in range(9)}) == 27
    assert all(3 <= token < 20 for token in prompt_of(1, 1, 500, 20))


def test_loads_are_all_combinations() -> None:
    found = parse_loads("rate=2/4,prompt=33/1000-8000,output=64")
    assert [str(load) for load in found] == [
        f"rate={rate},prompt={prompt},output=64" for rate in (2, 4) for prompt in (33, "1000-8000")
    ]
    assert max(load.most_tokens for load in found) == 8064


def written(folder: Path, *lines: object) -> str:
    path = folder / "t.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(path)


def test_a_trace_goes_on_from_round_to_round_and_begins_again(tmp_path: Path) -> None:
    lines = [
        {"timestamp": ms, "input_length": 17 + 16 * n, "output_length": 2, "hash_ids": [1]}
        for n, ms in enumerate((0, 1000, 2500, 3000))
    ]
    (load,) = parse_loads(f"trace={written(tmp_path, *lines)}")
    assert str(load) == "trace=t.jsonl"
    assert load.most_tokens == 17 + 48 + 2
    rounds = [[(j.arrival_s, j.prompt_tokens) for j in jobs(load, n, 2.0)] for n in range(3)]
    assert rounds == [  # 3 s and the mean gap: it begins again after 3.75 s
        [(0.0, 17), (1.0, 33)],
        [(0.5, 49), (1.0, 65), (1.75, 17)],
        [(0.75, 33)],
    ]
    assert [job.arrival_s for job in jobs(load, 11, 0.1)] == [0.0]  # never none at all


def test_what_a_trace_does_not_say_is_drawn(tmp_path: Path) -> None:
    (load,) = parse_loads(f"trace={written(tmp_path, {'output_length': 7})},rate=3,prompt=65")
    assert str(load) == "trace=t.jsonl,rate=3,prompt=65"
    assert {(job.prompt_tokens, job.output_tokens) for job in jobs(load)} == {(65, 7)}
    assert len({job.arrival_s for job in jobs(load)}) > 5


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([{"timestamp": -1}], r"line 1: .*>= 0"),
        ([{"input_length": "a"}], "line 1: .*`int"),
        ([{"tokens": 3}], "line 1: expected some of timestamp, input_length, output_length"),
        ([{"timestamp": 2}, {"timestamp": 1}], "line 2: expected the fields of line 1, and arr"),
        ([{"timestamp": 2}, {"output_length": 1}], "line 2: expected the fields of line 1"),
        ([{"timestamp": 0}], "the last one's arrival above 0"),
        ([], "expected lines in t.jsonl"),
    ],
)
def test_a_trace_that_is_none(lines: list[object], said: str, tmp_path: Path) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=said):
        parse_loads(f"trace={written(tmp_path, *lines)}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rate=0", "expected a rate above 0"),
        ("prompt=9-3", "expected numbers like 64 or 64-128, got 9-3"),
        ("every=0", "expected every above 0, and no rate"),
        ("rate=1,every=2", "expected every above 0, and no rate"),
        ("prompts=9", "expected rate, every, prompt, output and trace, got prompts"),
        ("trace=/nowhere", "No such file"),
    ],
)
def test_a_load_that_is_none(text: str, said: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=said):
        parse_loads(text)


# ------------------------------------------------------------------ contenders, models


def test_contenders_take_settings_arguments_and_variables() -> None:
    found = parse_contender(
        'kvxfer,wire=zmq,lease_s=5,names=["a","b"],engine.async_scheduling=false,'
        "decode.block_size=64,decode.VLLM_KV_CACHE_LAYOUT=NHD,UCX_TLS=tcp"
    )
    assert found.extra == {"transport": "zmq", "lease_s": 5, "names": ["a", "b"]}
    assert found.engine == {
        "prefill": {"async_scheduling": False},
        "decode": {"async_scheduling": False, "block_size": 64},
    }
    assert found.environment == {
        "prefill": {"UCX_TLS": "tcp"},
        "decode": {"VLLM_KV_CACHE_LAYOUT": "NHD", "UCX_TLS": "tcp"},
    }
    names = ("kvxfer,wire=zmq", "nixl", "kvxfer,wire=zmq,lease_s=5", "kvxfer,name=mine,lease_s=5")
    assert [parse_contender(name).name for name in names] == [
        *("kvxfer:zmq", "nixl", "kvxfer,wire=zmq,lease_s=5", "mine"),
    ]
    plain, floor, other = map(parse_contender, ("plain", "floor", "nixl"))
    assert plain.pair_key == floor.pair_key != other.pair_key


@pytest.mark.parametrize(
    "text", ["ucx", "plain,wire=zmq", "nixl,both.x=1", "nixl,3", "floor,name=x"]
)
def test_a_contender_that_is_none(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=rf"^{text}: expected "):
        parse_contender(text)


def plan(*contenders: str, gpus: tuple[str, ...] = ()) -> Plan:
    return Plan(
        tuple(map(parse_contender, contenders)), (Load(),), TINY, gpus, 1 << 16, 16, 2, 1.0, 1,
        drain_s=1.0, warm_up_s=1.0, seed=1, ends_s=0.0, engine={"max_num_seqs": 5},
    )  # fmt: skip


def test_decode_runs_graphs_on_gpus_and_settings_reach_the_engine() -> None:
    kvxfer, nixl, plain = map(parse_contender, ("kvxfer,lease_s=5,decode.seed=3", "nixl", "plain"))
    on_gpu = plan("plain", gpus=("0", "0"))
    decode = engine_args(on_gpu, kvxfer, "decode", 77)
    assert decode["compilation_config"]["cudagraph_mode"] == "FULL_DECODE_ONLY"
    assert (decode["enforce_eager"], decode["seed"], decode["max_num_seqs"]) == (False, 3, 5)
    transfer = decode["kv_transfer_config"]
    assert transfer["kv_role"] == "kv_consumer"
    assert transfer["kv_connector_extra_config"] == {"port": 77, "log_level": "INFO", "lease_s": 5}
    assert engine_args(on_gpu, kvxfer, "prefill", 7)["enforce_eager"]
    assert not engine_args(on_gpu, plain, "prefill", 7)["enforce_eager"]
    assert "kv_transfer_config" not in engine_args(on_gpu, plain, "decode", 7)
    assert engine_args(on_gpu, nixl, "decode", 7)["kv_transfer_config"]["kv_role"] == "kv_both"
    assert engine_args(plan("plain"), nixl, "decode", 7)["enforce_eager"]


def test_the_largest_model_that_fits_is_taken_and_pairs_come_in_groups() -> None:
    assert 15e9 < MODELS["llama-8b"].weights_nbytes < 17e9
    assert MODELS["llama-8b"].kv_nbytes == 131072
    latents = BY_NAME["deepseek-v3.2"]
    assert latents.kv_nbytes == 12 * (1152 + 132)
    assert 14e9 < latents.weights_nbytes < 19e9
    assert latents.config(64)["architectures"] == ["DeepseekV32ForCausalLM"]
    states = replace(BY_NAME["qwen3-next"], layers=12)
    assert isinstance(states, StateModel)
    assert states.kv_nbytes == 3 * 2 * 2 * 256 * 2
    assert states.state_nbytes == 9 * (3 * 8192 + 32 * 128 * 128) * 2  # as vLLM's shapes of it
    assert states.config(64)["layer_types"].count("full_attention") == 3
    for model in MODELS.values():
        assert largest_that_fits(4, 1000, 4 * engine_nbytes(model, 1000)) is model
    assert largest_that_fits(4, 1000, 1).name == "llama-1b"
    assert groups_of(["a", "b", "a", "c"], 2) == [["a", "b"], ["c"]]
    assert groups_of(["a", "b"], 0) == [["a"], ["b"]]


# ------------------------------------------------------------------ numbers


@given(st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(math.nan)), max_size=30))
def test_tails_are_those_of_a_sorted_list(values: list[float]) -> None:
    known = sorted(value for value in values if not math.isnan(value))

    def at(share: float) -> float:
        place = share * (len(known) - 1)
        low = known[int(place)]
        return low + (known[math.ceil(place)] - low) * (place - int(place))

    want = (*map(at, (0.5, 0.9, 0.99)), known[-1]) if known else (math.nan,) * 4
    assert tail_of(values) == pytest.approx(want, nan_ok=True, abs=1e-6)


def served(contender: str = "mine", index: int = 0, **fields: Any) -> Served:
    usual: dict[str, Any] = {
        **{"load": "l", "round_number": 0, "contender": contender, "index": index},
        **{"arrival_s": 1.0 * index, "prompt_tokens": 33, "prefilled_s": 0.1},
        **{"token_s": (0.12, 0.13, 0.16), "tokens": (7, 8, 9), "cached_tokens": 32, "error": ""},
    }
    return Served(**(usual | fields))


def test_times_of_a_request() -> None:
    one = served()
    assert one.ttft_ms == pytest.approx(120)
    assert one.handover_ms == pytest.approx(20)
    assert one.gaps_ms == pytest.approx([10, 30])
    assert one.tpot_ms == pytest.approx(20)
    assert math.isnan(served(prefilled_s=None).handover_ms)
    assert json.loads(json.dumps(one.record()))["gaps_ms"] == "10.00 30.00"
    assert "ttft_ms" not in served(error="it ended", token_s=()).record()


@pytest.mark.parametrize(
    ("objective", "is_met"),
    [
        ("ttft=120.1", True), ("ttft=119", False), ("tpot=20.1", True), ("tpot=19", False),
        ("gap=30.1", True), ("gap=29", False), ("handover=20.1", True), ("handover=19", False),
        ("ttft=120.1,gap=29", False),
    ],
)  # fmt: skip
def test_an_objective_is_met_by_all_of_its_parts(objective: str, is_met: bool) -> None:
    assert Objective.parse(objective).is_met(served()) is is_met
    assert not Objective.parse(objective).is_met(served(error="it ended"))


def test_objectives() -> None:
    assert str(Objective.parse("ttft=500,gap=20")) == "ttft 500 ms, gap 20 ms"
    for text in ("ttft", "e2e=5", "ttft=fast"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected milliseconds of ttft, tpot"):
            Objective.parse(text)
    assert Objective.parse("handover=1").is_met(served(prefilled_s=None))  # it has none


def test_a_cell_counts_what_went_wrong_and_what_was_good() -> None:
    found = [
        *(served("floor", n, prefilled_s=0.11) for n in range(4)),
        served(index=0),
        served(index=1, tokens=(7, 8, 1), token_s=(0.2, 0.21, 0.3)),
        served(index=2, cached_tokens=16, tokens=(1, 8, 9), runs=(8, 4)),
        served(index=3, error="it ended", token_s=(), tokens=()),
    ]
    floor, mine = cells_of(found, Objective(ttft=150), {})
    assert (floor.contender, floor.requests, floor.equal) == ("floor", 4, 1.0)
    assert (mine.requests, mine.failed, mine.recomputed) == (4, 1, 1)
    assert mine.ttft_ms[0] == pytest.approx(120)
    assert mine.handover_ms == pytest.approx((20, 84, 98.4, 100))
    assert mine.beyond_floor_ms == pytest.approx(10)
    assert (mine.equal, mine.equal_first) == pytest.approx((1 / 3, 2 / 3))
    taken_s = 2.16  # from the first arrival to the third request's last token
    assert mine.tokens_per_s == pytest.approx(9 / taken_s)
    assert (mine.good_per_s, mine.good_share) == pytest.approx((2 / taken_s, 0.5))
    assert mine.run_blocks == 2
    assert cells_of(found, Objective(), {"mine": True})[1].recomputed == 0


def test_the_aim_of_both_at_once_is_the_longer_one_and_a_chunk() -> None:
    def taking(contender: str, prefilled_s: float, first_s: float) -> list[Served]:
        times = {"prefilled_s": prefilled_s, "token_s": (first_s,) * 3, "prompt_tokens": 993}
        return [served(contender, n, **times) for n in range(3)]

    floor, turn = taking("floor", 0.3, 0.31), taking("kvxfer:zmq", 0.32, 0.93)
    for first_s, is_met in ((0.735, True), (0.736, False)):  # 1.1 * 0.6 + 0.6 / 8
        both = taking("early:zmq", 0.4, first_s)
        pairs = {"early:zmq": "kvxfer:zmq", "early:ucx": "kvxfer:ucx"}
        (aim,) = aims_of([*floor, *turn, *both], pairs, 128)
        assert (aim.prefill_ms, aim.transfer_ms) == pytest.approx((300, 600))
        assert aim.bound_ms == pytest.approx(735)
        assert aim.num_chunks == 8
        assert replace(aim, transfer_ms=aim.transfer_ms + 1e-6).is_met is is_met
    assert str(aim) == "early:zmq: first token after 736 ms, aim 735, in turn 930"
    (of_slow,) = aims_of([*taking("floor", 2.0, 2.01), *turn, *both], pairs, 128)
    assert of_slow.bound_ms == pytest.approx(1.1 * 2000 + 75)
    failed = [replace(each, error="it ended") for each in turn]
    assert not aims_of([*floor, *failed, *both], pairs, 128)
    assert not aims_of([*turn, *both], pairs, 128)


def test_rounds_are_added_up_and_loads_kept_apart() -> None:
    found = [served(round_number=n, load=load) for n in range(2) for load in ("l", "m")]
    cells = cells_of(found, Objective(), {})
    assert [(cell.load, cell.requests) for cell in cells] == [("l", 2), ("m", 2)]
    assert cells[0].requests_per_s == pytest.approx(2 / 0.32)
    assert math.isnan(cells[0].beyond_floor_ms)
    assert math.isnan(cells[0].equal)


def test_both_engines_answers_are_one_request() -> None:
    asked = (Job(0, 0.5, 33, 2, 0), Job(1, 0.7, 33, 2, 1), Job(2, 0.9, 17, 2, 2))
    answers = [
        Answer(0, prefilled_s=100.6, runs=(3, 2)),
        Answer(1, prefilled_s=100.8, error="prefill offered no KV"),
        Answer(2, prefilled_s=101.0),
        Answer(0, token_s=(100.7, 100.8), tokens=(4, 5), cached_tokens=32),
        Answer(2, token_s=(101.1,), tokens=(4,)),
    ]
    first, second, third = merged("mine", "l", 1, asked, 100.0, answers)
    assert first.prefilled_s == pytest.approx(0.1)
    assert first.token_s == pytest.approx((0.2, 0.3))
    assert (first.key, first.cached_tokens, first.runs) == (("l", 1, 0), 32, (3, 2))
    assert second.error == "prefill offered no KV"
    assert third.error == "it did not end in time"  # one token of two


def report_of(cells: list[Cell], found: list[Served]) -> Report:
    report = Report(Path(), "vllm_load", "t", {"command": "c", "objective": "o"}, tables)
    report.records = {"cells": cells, "requests": [each.record() for each in found]}
    return report


def test_what_a_reader_sees() -> None:
    names = ("floor", "kvxfer:cuda_ipc", "plain")
    found = [
        served(
            name,
            n,
            prompt_tokens=tokens,
            cached_tokens=tokens - 1,
            prefilled_s=None if name == "plain" else 0.1,
        )
        for name in names
        for n, tokens in enumerate((33, 65, 4097))
    ]
    cells = cells_of([*found[:-1], replace(found[-1], error="e")], Objective(), {"plain": True})
    lines = summary(cells)
    assert max(map(len, lines)) <= 80
    assert lines[1] == "l (n=3)"
    words = "kvxfer:cuda_ipc 120.0 120.0 20.0 20.0 20.0 0.0 20.0 30.0 30.0 100%"
    assert " ".join(lines[3].split()) == words
    assert lines[-1] == "    1 failed"
    (table,) = [each for each in tables(report_of(cells, found)) if each.rows]
    assert table.header.count("hand-over p90") == 1
    assert "*good*: o." in table.text
    plot = plot_for(1024)(report_of(cells, found))
    assert plot is not None
    assert [(line.name, line.is_limit) for line in plot.lines] == [
        ("floor", True), ("kvxfer:cuda_ipc", False),
    ]  # fmt: skip
    assert plot.lines[1].y == pytest.approx((20, 20, 20))
    assert plot.lines[1].x == pytest.approx((33 << 10, 65 << 10, 4097 << 10), rel=0.2)
    assert plot_for(1)(report_of(cells, found[3:])) is None


def test_tokens_up_to_the_first_that_differs() -> None:
    assert [leading(*pair) for pair in (((1, 2), (1, 2)), ((1, 2), (1, 3)), ((), (1,)))] == [
        2,
        1,
        0,
    ]


LIKELY = ({7: -0.1, 4: -3.0}, {8: -1.0, 2: -1.25}, {9: -0.5, 1: -0.5})


@pytest.mark.parametrize(
    ("tokens", "gap"),
    [
        ((7, 8, 9), 0.0),
        ((), 0.0),  # of a request that failed
        ((4, 8, 9), 2.9),
        ((7, 2, 1), 0.25),  # what follows another token says nothing
        ((7, 8, 1), 0.0),
        ((7, 3, 9), math.inf),
    ],
)
def test_how_much_less_likely_the_first_other_token_is(tokens: tuple[int, ...], gap: float) -> None:
    assert less_likely(tokens, (7, 8, 9), LIKELY) == pytest.approx(gap)


@pytest.mark.parametrize("gap", [0.0, 0.2, 0.4, math.inf])
@pytest.mark.parametrize("gpus", [(), ("0", "1")], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("contender", ["mine", "plain"])
def test_other_tokens_are_wrong_where_rounding_has_no_reason(
    contender: str, gpus: tuple[str, ...], gap: float
) -> None:
    report = report_of([], [])
    report.records["checks"] = [
        Check("floor", 33, 16, 16, 16, 0.0),
        Check(contender, 33, 16, 5 if gap else 16, 16, gap),
    ]
    made = plan("floor", "kvxfer,name=mine,wire=zmq", "plain", gpus=gpus)
    is_wrong = contender == "mine" and gap > (0.3 if gpus else 0.05)
    assert vllm_load.went_wrong(report, made) == is_wrong
    (said,) = vllm_load.tokens_told(report.records["checks"])
    assert said.endswith(
        f"5 of 16 tokens equal, the next {gap:.2f} less likely" if gap else "equal"
    )
    (table,) = [each for each in tables(report) if each.title == "Tokens before timing"]
    assert list(table.rows[1][-2:]) == [f"{gap:.2f}" if gap else "", ""]


# ------------------------------------------------------------------ from one client to the other


class Host(EngineHost):
    """A client whose engine answers at once: prompts of 49 tokens fail, of 65 never end."""

    def __init__(self, handed: Connection) -> None:
        self._handed = handed
        self._loop = asyncio.new_event_loop()
        self._engine = SimpleNamespace(errored=False, shutdown=lambda: None)
        self.seen: list[tuple[str, str, Any]] = []

    async def _generate(
        self,
        request_id: str,
        prompt: Any,
        max_tokens: int,
        params: Any = None,
        num_likely: int = 0,
    ) -> AsyncIterator[Any]:
        self.seen.append((request_id, prompt["cache_salt"], params))
        length = len(prompt["prompt_token_ids"])
        if length == 49:
            raise ValueError("too long")
        if length == 65:
            await asyncio.sleep(60)
        for number in range(max_tokens):
            await asyncio.sleep(0.001)
            likely = {number + n: SimpleNamespace(logprob=-float(n)) for n in range(num_likely)}
            output = SimpleNamespace(
                token_ids=[number], finish_reason="length", logprobs=[likely] if likely else None
            )
            told = {"do_remote_prefill": True, "remote_block_ids": [[4, 5, 9]], "of": request_id}
            yield SimpleNamespace(
                outputs=[output],
                finished=number == max_tokens - 1,
                num_cached_tokens=length - 1,
                kv_transfer_params=told if params else None,
            )


def part_of(role: str, lengths: tuple[int, ...], **more: Any) -> Part:
    asked = tuple(Job(n, 0.001 * n, length, 3, n) for n, length in enumerate(lengths))
    now_s = time.perf_counter()
    return Part(role, "seg", asked, 1, 500, "s", begins_s=now_s, ends_s=now_s + 300, **more)


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Of prefill and of decode."""
    reader, writer = Pipe(duplex=False)
    with closing(Host(writer)) as prefill, closing(Host(reader)) as decode:
        yield prefill, decode


def run_both(
    hosts: tuple[Host, Host], prefill_part: Part, decode_part: Part
) -> tuple[list[Answer], list[Answer]]:
    prefill, decode = hosts
    prefill._handed.send(("an older segment", prefill_part.jobs[0], {}, False))
    with ThreadPoolExecutor(1) as pool:
        decoding = pool.submit(decode.run, decode_part)
        return prefill.run(prefill_part), decoding.result(120)


def test_each_request_goes_from_prefill_to_decode(hosts: tuple[Host, Host]) -> None:
    lengths, decode = (17, 33, 49, 17), hosts[1]
    prefilled, decoded = run_both(
        hosts, part_of(PREFILL, lengths, moves_kv=True), part_of(DECODE, lengths, moves_kv=True)
    )
    assert {a.index: a.error for a in prefilled} == {0: "", 1: "", 2: "ValueError: too long", 3: ""}
    assert {a.index: a.runs for a in prefilled}[0] == (3, 2)
    assert {a.index: a.tokens for a in decoded} == dict.fromkeys((0, 1, 3), (0, 1, 2))
    by_index = {answer.index: answer.prefilled_s or 0.0 for answer in prefilled}
    assert all(by_index[answer.index] < answer.token_s[0] for answer in decoded)
    assert {(name, params["of"]) for name, _, params in decode.seen} == {
        (f"seg/{n}", f"seg/{n}") for n in (0, 1, 3)
    }
    assert len({salt for _, salt, _ in decode.seen}) == 3


def test_the_likeliest_tokens_are_told_where_they_are_asked_for(hosts: tuple[Host, Host]) -> None:
    parts = [part_of(role, (17,), num_likely=2) for role in (PREFILL, DECODE)]
    answers = [answer for each in run_both(hosts, parts[0], parts[1]) for answer in each]
    (found,) = merged("mine", "", 0, parts[1].jobs, 0.0, answers)
    assert found.likely == tuple({n: 0.0, n + 1: -1.0} for n in range(3))
    assert "likely" not in found.record()


def test_the_floor_moves_nothing_and_finds_what_was_primed(hosts: tuple[Host, Host]) -> None:
    decode_part, decode = part_of(DECODE, (17, 33), is_salt_shared=True), hosts[1]
    prefilled, decoded = run_both(hosts, part_of(PREFILL, (17, 33)), decode_part)
    assert len(decoded) == 2
    assert [answer.error for answer in (*prefilled, *decoded)] == [""] * 4
    assert {(salt, params) for _, salt, params in decode.seen} == {("s", None)}


def test_what_does_not_end_is_cancelled_and_an_engine_that_died_is_told(
    hosts: tuple[Host, Host],
) -> None:
    host = hosts[0]
    stuck = replace(part_of(WHOLE, (65, 17)), ends_s=time.perf_counter() + 5.0)
    found = {answer.index: answer.error for answer in host.run(stuck)}
    assert found == {0: "it did not end in time", 1: ""}
    assert host.run(replace(stuck, jobs=())) == []
    host._engine.errored = True
    with pytest.raises(RuntimeError, match="the engine died"):
        host.run(part_of(WHOLE, (17,)))


def test_a_warm_up_serves_twice_the_pool_and_ends_in_time(hosts: tuple[Host, Host]) -> None:
    host = hosts[0]
    assert 2000 <= host.warm_up(1000, 40, 500, 60.0) < 2000 + 12 * 100
    assert len({name for name, _, _ in host.seen}) == len(host.seen) > 30
    began_s = time.perf_counter()
    host.warm_up(1 << 40, 30, 500, 0.05)
    assert time.perf_counter() - began_s < 30


# ------------------------------------------------------------------ the whole plan


def planned(
    monkeypatch: pytest.MonkeyPatch, folder: Path, free_gb: list[int], *options: str
) -> Plan:
    free_nbytes = {str(at): gb << 30 for at, gb in enumerate(free_gb)}
    monkeypatch.setattr(vllm_load, "free_nbytes_of_gpus", lambda: free_nbytes)
    monkeypatch.setattr(vllm_load, "is_installed", lambda library: library != "ucx")
    monkeypatch.setattr("sys.argv", ["vllm_load", *options])
    return vllm_load.plan_of(vllm_load.parse_arguments(), folder)[0]


def test_a_plan_fits_the_gpus_that_are_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one = planned(monkeypatch, tmp_path, [79], "--quick", "--engine", "async_scheduling=false")
    assert [each.name for each in one.contenders] == [
        *("nixl", "kvxfer:cuda_ipc", "early:cuda_ipc", "plain", "floor")
    ]
    assert (one.gpus, one.model.name, one.rounds, one.pairs_at_once) == (
        ("0", "0"),
        "llama-1b",
        2,
        5,
    )
    assert [str(load) for load in one.loads] == [
        f"rate={rate},prompt=1000-8000,output=64-128" for rate in (2, 4)
    ]
    assert one.engine == {"async_scheduling": False}
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["num_hidden_layers"], one.model.path) == (16, str(tmp_path))
    assert config["max_position_embeddings"] >= 8000 + 128 + 16
    two = planned(monkeypatch, tmp_path, [139, 139], "--model", "llama-8b", "--contender", "floor")
    assert (two.gpus, two.pairs_at_once, two.duration_s) == (("0", "1"), 5, 15)
    assert two.cores == ()
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    pinned = planned(monkeypatch, tmp_path, [139, 139], "--cores", "0-1/2-2")
    assert pinned.cores == ((0, 1), (2,))
    many = planned(monkeypatch, tmp_path, [139, 139])
    assert [c.name for c in many.contenders][1:-2] == [
        *("kvxfer:cuda_ipc", "early:cuda_ipc", "kvxfer:nixl", "early:nixl"),
        *("kvxfer:zmq", "early:zmq"),
    ]
    assert many.model.name == "llama-8b"


SMI = "0, GPU-aa, 1000\n1, GPU-bb, 2000\n2, GPU-cc, 3000\n"


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, {"0": 1000 << 20, "1": 2000 << 20, "2": 3000 << 20}),
        ("2,1", {"2": 3000 << 20, "1": 2000 << 20}),
        ("GPU-bb", {"GPU-bb": 2000 << 20}),
        ("", {}),
    ],
)
def test_engines_get_the_gpus_that_this_process_may_see(
    visible: str | None, found: dict[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\ncat <<END\n{SMI}END\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert list(vllm_load.free_nbytes_of_gpus().items()) == list(found.items())


def test_over_a_link_engines_are_on_cpus_unless_gpus_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = ("--link", "1,1", "--model", "wide", "--load", "every=1,prompt=992,output=4")
    contenders = ("--contender", "early,wire=zmq", "--contender", "kvxfer,wire=zmq")
    cpus = planned(monkeypatch, tmp_path, [79], *options, *contenders)
    assert (cpus.gpus, cpus.model.kv_nbytes) == ((), 1 << 16)
    assert vllm_load.early_pairs(cpus) == ({"early:zmq": "kvxfer:zmq"}, 2048)
    gpus = planned(monkeypatch, tmp_path, [79], *options, "--gpus", "1", *contenders[:2])
    assert (gpus.gpus, gpus.model.kv_nbytes, len(gpus.hosts)) == (("0", "0"), 1 << 15, 2)
    assert vllm_load.early_pairs(gpus) == ({}, 1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--gpus", "2"), "--gpus: expected at most 1, got 2"),
        (("--contender", "nixl", "--contender", "nixl"), "names that differ, got nixl, nixl"),
        (("--engine", "fast"), "--engine: expected ARG=VALUE, got fast"),
    ],
)
def test_a_plan_that_is_none(
    options: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=said):
        planned(monkeypatch, tmp_path, [79], *options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--contender", "ucx"), "ucx: expected one of nixl, kvxfer, early, plain, floor"),
        (("--model", "gpt"), "invalid choice: 'gpt'"),
        (("--duration-s", "0"), "expected a number above 0, got 0"),
        (("--rounds", "x"), "expected at least 1, got x"),
        (("--cores", "3"), "expected two ranges such as 0-7/8-15, got 3"),
        (("--cores", "1-0/0-1"), "expected two ranges such as 0-7/8-15, got 1-0/0-1"),
        (("--cores", "0-1/2-4"), "expected cores that this process may use, got 3, 4"),
    ],
)
def test_an_option_that_is_none(
    options: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["vllm_load", *options])
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    with pytest.raises(SystemExit):
        vllm_load.parse_arguments()
    assert said in capsys.readouterr().err
