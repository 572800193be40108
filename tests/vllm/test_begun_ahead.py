"""Loads that begin while their step is still being scheduled, where the rank is in the scheduler's
process: that they do, which do not, and that no step in flight writes what they have loaded.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from kvxfer.transports.copy_thread import CopyJob
from tests.connector.rig import awaited_loads, until
from tests.vllm.scheduler_rig import NUM_BLOCKS, ClearedGroup, Located
from tests.vllm.step_rig import ComputingEngine
from tests.vllm.test_step_loads import Pair, assert_right, prompt_of
from tests.wires import run_pieces

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

Make = Callable[..., ComputingEngine]
LIMITS = pytest.mark.parametrize("limit_s", [1.0, 0.0], ids=["in step", "asynchronous"])
SCHEDULING = pytest.mark.parametrize("is_async", [False, True])


@SCHEDULING
@LIMITS
@pytest.mark.parametrize("num_loads", [1, 4])
def test_loads_are_there_before_their_step_is_told_of(
    make: Make, monkeypatch: pytest.MonkeyPatch, num_loads: int, limit_s: float, is_async: bool
) -> None:
    pair = Pair(make, monkeypatch, ("fail", is_async), load_in_step_s=limit_s)
    rng = random.Random(num_loads)
    prompts = [prompt_of(rng) for _ in range(num_loads)]
    requests = [pair.load(f"d{number}", tokens) for number, tokens in enumerate(prompts)]
    orders = pair.sink.schedule()
    for number, tokens in enumerate(prompts):
        until(lambda n=number, t=tokens: pair.sink.has_kv(f"d{n}", t[:-1]))  # type: ignore[misc]
    assert (orders.loads, orders.holds) == ((), ())
    pair.sink.launch()
    pair.settle()
    for request in requests:
        assert_right(request)
    assert pair.sink.is_quiet()


@SCHEDULING
def test_a_step_computes_behind_the_copies_of_all_that_is_part_of_it(
    make: Make, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    """Copies of loads that have begun are held until the engine's thread waits for them."""
    waited_for: set[str] = set()
    is_held = False

    def run(job: CopyJob) -> bool:
        if is_held:
            until(awaited_loads)
            waited_for.update(awaited_loads())
        return job.run()

    run_pieces(monkeypatch, "shm", run)
    pair = Pair(make, monkeypatch, ("fail", is_async))
    rng = random.Random(5)
    for number in range(3):
        prompts = [prompt_of(rng) for _ in range(number + 1)]
        requests = [pair.load(f"d{number}{i}", tokens) for i, tokens in enumerate(prompts)]
        waited_for.clear()
        is_held = True
        pair.sink.schedule()
        assert not any(pair.sink.has_kv(f"d{number}{i}", t[:-1]) for i, t in enumerate(prompts))
        pair.sink.launch()
        assert waited_for == {request.request_id for request in requests}
        is_held = False
        pair.settle()
        for request in requests:
            assert_right(request)
    assert pair.num_in_step == 6
    assert pair.sink.is_quiet()


@LIMITS
def test_a_step_in_flight_writes_no_block_of_a_load(
    make: Make, monkeypatch: pytest.MonkeyPatch, limit_s: float
) -> None:
    """A request goes away while a step computes it, and a load needs nearly all of its blocks. The
    rig has such a step write again when the next one runs.
    """
    pair = Pair(make, monkeypatch, ("fail", True), load_in_step_s=limit_s)
    sink, rng = pair.sink, random.Random(3)
    for number in range(10):
        long = [rng.randrange(900) for _ in range(rng.randrange(620, 640))]
        sink.request(f"a{number}", long, max_tokens=60)
        for _ in range(rng.randrange(3, 40)):
            sink.run()
        assert len(sink.in_flight) == 1
        sink.abort(f"a{number}")
        tokens = [rng.randrange(900) for _ in range(900)]
        request = pair.load(f"d{number}", tokens)
        assert len(tokens) + len(long) > NUM_BLOCKS * 16
        pair.settle()
        assert_right(request)
    assert sink.is_quiet()


def cleared(regions: Any, memory: Any) -> Located:
    return Located(regions, memory, cleared=(ClearedGroup(0, 16, NUM_BLOCKS, ()),))


def drafted(regions: Any, memory: Any) -> Located:
    return Located(regions, memory, drafts=(ClearedGroup(0, 16, NUM_BLOCKS, ()),))


def with_window(regions: Any, memory: Any) -> Located:
    return Located(tuple(replace(region, window=4096) for region in regions), memory)


@pytest.mark.parametrize(
    ("what", "instead"),
    [
        ("kvxfer.integrations.vllm.worker.DEFERS_FREES", False),
        ("tests.vllm.scheduler_rig.Located", cleared),
        ("tests.vllm.scheduler_rig.Located", drafted),
        ("tests.vllm.scheduler_rig.Located", with_window),
    ],
    ids=["a version that frees at once", "a step clears blocks", "a draft", "a window"],
)
def test_what_a_step_may_write_is_not_begun_before_it(
    make: Make, monkeypatch: pytest.MonkeyPatch, what: str, instead: Any
) -> None:
    monkeypatch.setattr(what, instead)
    pair = Pair(make, monkeypatch, ("fail", False))
    tokens = prompt_of(random.Random(4))
    request = pair.load("d", tokens)
    orders = pair.sink.schedule()
    assert [load.request_id for load in orders.loads] == ["d"]
    assert not pair.sink.has_kv("d", tokens[:-1])
    pair.sink.launch()
    pair.settle()
    assert_right(request)
