"""A sample of the grid in which every pair of values occurs, and that its checks see a difference.

``scripts/grid`` runs all of it.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvxfer.engine.config import Role
from kvxfer.engine.digest import DIGEST_NBYTES, KVDigest
from kvxfer.engine.engine import Result
from tests.end_to_end.grid import (
    WINDOWED,
    Cell,
    Exchange,
    Fleet,
    all_cells,
    in_run_order,
    pairwise_cells,
    problems_of,
    window_cells,
)

SCRIPT = Path(__file__).parents[2] / "scripts" / "grid.py"
# Written out once more, so that no value is lost from the grid unseen.
AXES: dict[str, list[Any]] = {
    "prefill_tp": [1, 2, 4],
    "decode_tp": [1, 2, 4],
    "prefill_block": [8, 16, 24, 32, 64],
    "decode_block": [8, 16, 24, 32, 64],
    "prefill_layout": ["HND", "NHD"],
    "decode_layout": ["HND", "NHD"],
    "kv_heads": [1, 2, 4, 8],
}
WIRES = ["shm", "zmq"]
PLANTED = Cell(
    prefill_tp=2,
    prefill_block=16,
    prefill_layout="HND",
    decode_tp=1,
    decode_block=32,
    decode_layout="NHD",
    kv_heads=4,
    transport="shm",
)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet() as fleet:
        yield fleet


@pytest.mark.parametrize("cell", pairwise_cells(), ids=str)
def test_a_cell_is_equal(fleet: Fleet, cell: Cell) -> None:
    before = fleet.pids()
    assert fleet.run(cell).problems == ()
    assert before.items() <= fleet.pids().items()  # no process was started twice


@pytest.mark.parametrize("cell", pairwise_cells(WINDOWED), ids=str)
def test_a_cell_of_a_model_with_windows_is_equal(fleet: Fleet, cell: Cell) -> None:
    assert fleet.run(cell).problems == ()


@pytest.mark.parametrize("models", [("full",), ("hybrid", "kv-sharing"), ("hybrid",)])
def test_every_pair_of_values_is_in_the_sample(models: tuple[str, ...]) -> None:
    cells = pairwise_cells(models)
    axes = {**AXES, "transport": WIRES, "model": models}
    for (one, ones), (other, others) in itertools.combinations(axes.items(), 2):
        found = {(getattr(cell, one), getattr(cell, other)) for cell in cells}
        assert found == set(itertools.product(ones, others)), (one, other)
    assert 25 <= len(cells) <= 32  # 5 x 5 block sizes are 25 pairs
    assert cells == pairwise_cells(models)


def test_the_grid_has_every_cell_once() -> None:
    cells = all_cells()
    shapes = {tuple(getattr(cell, name) for name in AXES) for cell in cells}
    assert len(cells) == 3600
    assert shapes == set(itertools.product(*AXES.values()))
    assert sum(cell.transport == "shm" for cell in cells) == 1800
    for name, values in AXES.items():
        for value in values:
            wires = {cell.transport for cell in cells if getattr(cell, name) == value}
            assert wires == set(WIRES), (name, value)
    assert len({str(cell) for cell in cells}) == 3600


def test_models_with_windows_have_a_sample_each() -> None:
    cells = window_cells()
    by_model = Counter(cell.model for cell in cells)
    assert set(by_model) == {"hybrid", "kv-sharing"}
    assert all(25 <= number <= 32 for number in by_model.values())
    assert len({str(cell) for cell in cells}) == len(cells)
    assert str(replace(PLANTED, model="hybrid")) == "hybrid-p2.16.HND-d1.32.NHD-h4-shm"


def test_prompts_are_shorter_than_a_block_a_block_and_long() -> None:
    for cell in all_cells():
        short, block, long = cell.prompt_lengths
        assert short < min(cell.prefill_block, cell.decode_block)
        assert block == cell.prefill_block
        assert long > 2 * max(cell.prefill_block, cell.decode_block)
        assert long % cell.prefill_block
        assert long % cell.decode_block


def test_an_engine_stays_as_long_as_it_can() -> None:
    """One new life per cell and a few more: 4,080, where any order that changes both sides with
    each cell takes 7,200.
    """
    lives: dict[tuple[str, int], tuple[Any, ...]] = {}
    number = 0
    for cell in all_cells():
        prefill = (cell.prefill_block, cell.prefill_layout)
        decode = (cell.decode_block, cell.decode_layout, cell.transport)
        for key, life in (
            (("prefill", cell.prefill_tp), (cell.kv_heads, *prefill)),
            (("decode", cell.decode_tp), (cell.kv_heads, *decode)),
        ):
            number += lives.get(key) != life
            lives[key] = life
    assert number <= 4200


def test_order_does_not_depend_on_where_the_cells_come_from() -> None:
    cells = all_cells()
    assert in_run_order(reversed(cells)) == cells


# ------------------------------------------------------------------ the checks see a difference


@pytest.fixture(scope="module")
def exchange(fleet: Fleet) -> Exchange:
    """A prompt of 175 tokens that went right."""
    found = fleet.exchanges(PLANTED)[-1]
    assert problems_of(found, PLANTED) == []
    return found


def with_done(answer: Result, **changes: Any) -> Result:
    return replace(answer, done=msgspec.structs.replace(answer.done, **changes))


def with_flipped(digest: KVDigest, plane: int, token: int) -> KVDigest:
    """One bit of one token's digest is another one."""
    planes = list(digest.planes)
    tokens = bytearray(planes[plane].tokens)
    tokens[token * DIGEST_NBYTES + 3] ^= 1
    planes[plane] = msgspec.structs.replace(planes[plane], tokens=bytes(tokens))
    return msgspec.structs.replace(digest, planes=tuple(planes))


@pytest.mark.parametrize(("plane", "token"), [(0, 0), (5, 77), (15, 173)])
def test_one_other_byte_of_kv_is_named(exchange: Exchange, plane: int, token: int) -> None:
    (digest,) = exchange.decode.done.digests
    which = digest.planes[plane]
    decode = with_done(exchange.decode, digests=(with_flipped(digest, plane, token),))
    assert problems_of(replace(exchange, decode=decode), PLANTED) == [
        f"KV: {which.layer} {which.plane} head {which.head} from token {token}: "
        "source and sink differ"
    ]


def test_ranks_that_lie_or_say_nothing_are_named(exchange: Exchange) -> None:
    (digest,) = exchange.decode.done.digests
    for digests, problem in (
        ((), "decode side: digests: expected those of 1 ranks, got 0"),
        (
            (msgspec.structs.replace(digest, planes=digest.planes[:-1]),),
            "decode side: digested tokens and planes: expected (174, 16), got (174, 15)",
        ),
        (
            (KVDigest(num_tokens=0, planes=digest.planes),),
            "decode side: digested tokens and planes: expected (174, 16), got (0, 16)",
        ),
    ):
        decode = with_done(exchange.decode, digests=digests)
        assert problems_of(replace(exchange, decode=decode), PLANTED) == [problem]


def test_windows_that_begin_elsewhere_are_named(fleet: Fleet) -> None:
    """174 tokens move, in layers with a window those from 112 on, though 96 would do for a block of
    32.
    """
    cell = replace(PLANTED, model="hybrid", kv_heads=1)
    found = fleet.exchanges(cell)[-1]
    assert problems_of(found, cell) == []
    assert found.decode.kv_nbytes == (2 * 174 + 2 * 62) * 512  # K and V of 64 floats
    (digest,) = found.decode.done.digests
    late, *planes = digest.planes
    assert (late.layer, late.first_token) == ("model.layers.0.self_attn", 96)
    late = msgspec.structs.replace(late, first_token=128, tokens=late.tokens[32 * DIGEST_NBYTES :])
    digest = msgspec.structs.replace(digest, planes=(late, *planes))
    decode = with_done(found.decode, digests=(digest,), loads=())
    assert problems_of(replace(found, decode=decode), cell) == [
        "decode side: moved bytes: expected 241664, got 0",
        "decode side: wires: expected {'shm'}, got set()",
        "decode side: digested tokens of model.layers.0.self_attn k head 0: expected (96, 174), "
        "got (128, 174)",
    ]


def test_a_wrong_token_is_named(exchange: Exchange) -> None:
    right = exchange.expected_token_ids
    wrong = (*right[:-1], right[-1] + 1)
    decode = replace(exchange.decode, token_ids=wrong)
    assert problems_of(replace(exchange, decode=decode), PLANTED) == [
        f"decode side: tokens: expected {list(right)}, got {list(wrong)}"
    ]
    prefill = replace(exchange.prefill, token_ids=(right[0] + 1,))
    assert problems_of(replace(exchange, prefill=prefill), PLANTED) == [
        f"prefill side: tokens: expected [{right[0]}], got [{right[0] + 1}]"
    ]


def test_kv_that_was_computed_again_is_no_success(exchange: Exchange) -> None:
    """Right tokens and right KV, but nothing moved, or by another wire."""
    decode = with_done(exchange.decode, failure="peer_lost", num_external_tokens=0, loads=())
    assert problems_of(replace(exchange, decode=decode), PLANTED) == [
        "decode side: failure: expected None, got 'peer_lost'",
        "decode side: moved tokens: expected 174, got 0",
        # K and V of 174 tokens, 2 layers, 4 heads, 16 floats of 4 bytes
        "decode side: moved bytes: expected 178176, got 0",
        "decode side: wires: expected {'shm'}, got set()",
    ]
    assert problems_of(exchange, replace(PLANTED, transport="zmq")) == [
        "decode side: wires: expected {'zmq'}, got {'shm'}"
    ]


def test_a_dead_engine_fails_its_cell_and_not_the_next(fleet: Fleet) -> None:
    fleet.run(PLANTED)
    pids = fleet.pids()[(Role.DECODE, 1)]
    fleet.kill(Role.DECODE, 1)
    (problem,) = fleet.run(replace(PLANTED, decode_block=8)).problems
    assert "died" in problem
    assert fleet.run(PLANTED).problems == ()
    assert fleet.pids()[(Role.DECODE, 1)] != pids


# ------------------------------------------------------------------ the command


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.slow
def test_the_script_runs_the_cells_that_are_asked_for(tmp_path: Path) -> None:
    facts = tmp_path / "facts.json"
    sample = pairwise_cells(("hybrid",))
    hybrid = next(cell for cell in sample if cell.prefill_tp == cell.decode_tp == 1)
    hybrid = replace(hybrid, transport="zmq")
    done = run_script(
        *("--cells", "p1.8.HND-d1.64.NHD-h[24]-*", "--transport", "zmq", "--json", str(facts)),
        *("--cells", str(hybrid)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "full: 2 of 2 cells equal (2 asked for, 3600 in the grid)" in done.stdout
    assert f"hybrid: 1 of 1 cells equal (1 asked for, {len(sample)} in the grid)" in done.stdout
    told = json.loads(facts.read_text())
    assert (told["asked"], told["run"], told["equal"]) == (3, 3, 3)
    assert [cell["name"] for cell in told["cells"]] == [
        "p1.8.HND-d1.64.NHD-h2-zmq",
        "p1.8.HND-d1.64.NHD-h4-zmq",
        str(hybrid),
    ]


def test_a_pattern_without_cells_is_refused() -> None:
    done = run_script("--cells", "p3.*")
    assert done.returncode == 1
    assert "--cells: expected a pattern of cell names such as" in done.stderr
