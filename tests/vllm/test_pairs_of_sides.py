"""Two of vLLM's schedulers, two real worker sides, real wires, no model: every load handed to the
worker is reported once, and its bytes are the source's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import kvxfer
from kvxfer.connector.metrics import PHASES, TOTAL, times_of
from tests.vllm.scheduler_rig import BLOCK, OFFERED, Engine, Status
from tests.vllm.test_reports import prompt

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

MakeEngine = Callable[..., Engine]
POISON = 0xEE


@pytest.fixture
def pair(make_engine: MakeEngine) -> tuple[Engine, Engine]:
    return make_engine(role="kv_producer"), make_engine(role="kv_consumer", fill=POISON)


def prefill(source: Engine, request_id: str, tokens: list[int]) -> dict[str, Any]:
    """Run a prompt at the source: the params for the sink."""
    source.request(request_id, tokens, OFFERED, max_tokens=1)
    source.run()
    params = source.params_of(request_id)
    assert params is not None
    source.run()
    return params


def finish_both(source: Engine, sink: Engine) -> None:
    """Until every block on both sides came back."""

    def step_source() -> bool:
        if source.scheduler.has_requests():
            source.run()
        return sink.is_quiet() and source.is_quiet()

    sink.run_until(step_source)


def test_engines_that_only_take_kv_start_on_one_host(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has chosen a port: were it 5700 for all, only one would start."""
    monkeypatch.delenv("KVXFER_PORT", raising=False)
    engines = [make_engine(role="kv_consumer", port=None) for _ in range(2)]
    endpoints = {
        engine.worker.get_handshake_metadata().manifest.control_endpoint for engine in engines
    }
    assert len(endpoints) == 2


def test_an_engine_says_once_where_it_listens(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvxfer.integrations")
    engine = make_engine(role="kv_producer")
    endpoint = engine.worker.get_handshake_metadata().manifest.control_endpoint
    (line,) = [m for m in caplog.messages if m.startswith(f"version {kvxfer.__version__}: engine ")]
    assert f" gives KV at {endpoint}; 1 ranks, transport " in line


def test_bytes_arrive_and_blocks_come_back(pair: tuple[Engine, Engine]) -> None:
    source, sink = pair
    tokens = prompt(100)
    params = prefill(source, "p", tokens)
    (theirs,) = source.scheduler.kv_cache_manager.get_block_ids("p")
    request = sink.request("d", tokens, params)
    sink.run_until(lambda: request.status == Status.RUNNING)
    (ours,) = sink.scheduler.kv_cache_manager.get_block_ids("d")
    for position in range(6):  # the seventh block has 3 of its tokens
        assert sink.block(0, ours[position]) == source.block(0, theirs[position])
    finish_both(source, sink)
    assert sink.reports_of("finished_recving", "d") == 1
    assert sink.reports_of("failed_recving", "d") == 0
    assert source.reports_of("finished_sending", "p") == 1
    assert len(request.output_token_ids) == 4
    assert sink.stats["requests_loaded"] == {"": 1}
    (peer,) = sink.stats["loads"]
    assert sink.stats["loads"] == {peer: 1}
    nbytes = 99 * 2 * 2 * 8  # tokens x planes x heads x bytes
    assert sink.stats["loaded_bytes"] == {peer: nbytes}
    for phase in (TOTAL, *PHASES):
        assert sum(times_of(sink.stats, phase).values()) == 1
    assert 0 < sink.stats["busy_s"]["pp0tp0"] < 10
    assert sink.stats["offers_held"] == source.stats["offers_held"] == {"pp0tp0": 0}
    assert source.stats["blocks_held"] == {"pp0tp0": 0}


def test_only_what_is_missing_moves(pair: tuple[Engine, Engine]) -> None:
    source, sink = pair
    tokens = prompt(100)
    sink.request("before", tokens[: 3 * BLOCK + 1], max_tokens=1)
    sink.run()
    params = prefill(source, "p", tokens)
    sink.request("d", tokens, params)
    finish_both(source, sink)
    assert sum(sink.stats["loaded_bytes"].values()) == (99 - 3 * BLOCK) * 2 * 2 * 8


def test_other_tokens_are_refused(pair: tuple[Engine, Engine]) -> None:
    """Reported once, as failed; the offer stays for the request that it belongs to."""
    source, sink = pair
    params = prefill(source, "p", prompt(100))
    wrong = sink.request("wrong", prompt(100, seed=3), params)
    sink.run_until(lambda: wrong.status.name.startswith("FINISHED"))
    assert sink.reports_of("finished_recving", "wrong") == 1
    assert sink.reports_of("failed_recving", "wrong") == 1
    assert sink.stats["requests_failed"] == {"tokens": 1}
    assert len(wrong.output_token_ids) == 4  # computed here
    right = sink.request("right", prompt(100), params)
    sink.run_until(lambda: right.status == Status.RUNNING)
    sink.run_until(lambda: "requests_loaded" in sink.stats)  # told when its first token is out
    assert sink.stats["requests_loaded"][""] == 1
    finish_both(source, sink)


def test_an_offer_that_is_over(pair: tuple[Engine, Engine]) -> None:
    source, sink = pair
    params = prefill(source, "p", prompt(100))
    source.connector.reset_cache()
    source.run_until(source.is_quiet)
    request = sink.request("d", prompt(100), params)
    sink.run_until(lambda: request.status.name.startswith("FINISHED"))
    assert sink.reports_of("finished_recving", "d") == sink.reports_of("failed_recving", "d") == 1
    assert sink.stats["requests_failed"] == {"ended": 1}
    finish_both(source, sink)
    assert source.stats["offers_broken"] == {"reset": 1}


def test_a_step_that_vllm_does_not_end_is_ended_by_the_next(pair: tuple[Engine, Engine]) -> None:
    source, sink = pair
    source.ends_steps = sink.ends_steps = False
    tokens = prompt(100)
    source.request("p", tokens, OFFERED, max_tokens=1)
    source.run()
    params = source.params_of("p")
    assert params is not None
    request = sink.request("d", tokens, params)

    def is_running() -> bool:
        if source.scheduler.has_requests():
            source.run()
        return bool(request.status == Status.RUNNING)

    sink.run_until(is_running)
    finish_both(source, sink)


def test_source_is_gone(make_engine: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    source = make_engine(role="kv_producer")
    sink = make_engine(role="kv_consumer", policy="fail", connect_timeout_s=0.5, peer_silent_s=0.5)
    params = prefill(source, "p", prompt(100))
    source.worker.shutdown()
    request = sink.request("d", prompt(100), params)
    sink.run_until(lambda: request.status.name.startswith("FINISHED"))
    assert request.status == Status.FINISHED_ERROR
    assert sink.reports_of("finished_recving", "d") == sink.reports_of("failed_recving", "d") == 1
    sink.run_until(sink.is_quiet)
    endpoint = params["kvxfer"]["endpoint"]
    (line,) = [
        r for r in caplog.records if r.levelno >= logging.WARNING and "KV not" in r.getMessage()
    ]
    assert line.levelname == "WARNING"
    assert line.getMessage() == (
        f"request d: KV not used: peer_lost: {endpoint} did not answer within 0.5 s "
        f"(engine here at {endpoint})"
    )


def test_engines_that_cannot_exchange_kv(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    source = make_engine(role="kv_producer", bind_tokens=False)
    sink = make_engine(role="kv_consumer")
    for name in ("d", "e"):
        request = sink.request(name, prompt(100), prefill(source, f"p{name}", prompt(100)))
        sink.run_until(lambda request=request: request.status.name.startswith("FINISHED"))  # type: ignore[misc]
    finish_both(source, sink)
    assert sink.stats["requests_failed"] == {"incompatible": 2}
    assert sink.stats["pairs_unusable"][""] == 1
    (line,) = [
        record
        for record in caplog.records
        if record.levelno >= logging.WARNING and "KV not used" in record.getMessage()
    ]
    assert line.levelname == "ERROR"
    assert "incompatible: bind_tokens: engine here has it off" in line.getMessage()


def test_aborted_in_the_step_of_its_load(pair: tuple[Engine, Engine]) -> None:
    source, sink = pair
    params = prefill(source, "p", prompt(100))
    sink.request("d", prompt(100), params)
    sink.schedule()
    sink.abort("d")  # before the worker has even heard of it
    step = sink.in_flight[-1]
    sink.in_flight.clear()
    sink.worker.bind_connector_metadata(step.kv_connector_metadata)
    finish_both(source, sink)
    assert sink.reports_of("finished_recving", "d") == 1


@pytest.mark.parametrize("tokens", [[0], prompt(100)])
def test_turned_away_releases_the_source_at_once(
    pair: tuple[Engine, Engine], tokens: list[int]
) -> None:
    source, sink = pair
    params = prefill(source, "p", prompt(100))
    sink.request("d", tokens, params, abort_immediately=True)
    sink.abort("d")
    started_s = time.monotonic()
    finish_both(source, sink)
    assert time.monotonic() - started_s < 29  # a lease is 30 s
    assert source.stats["offers_broken"] == {"cancelled": 1}
    assert sink.reports_of("finished_recving", "d") == 0


def test_full_local_hit_releases_the_source_at_once(pair: tuple[Engine, Engine]) -> None:
    source, sink = pair
    tokens = prompt(2 * BLOCK + 1)
    sink.request("before", tokens, max_tokens=1)
    sink.run()
    params = prefill(source, "p", tokens)
    sink.request("d", tokens, params)
    started_s = time.monotonic()
    finish_both(source, sink)
    assert time.monotonic() - started_s < 29
    assert sink.reports_of("finished_recving", "d") == 0


def test_many_loads_with_aborts(make_engine: MakeEngine) -> None:
    source = make_engine(role="kv_producer")
    # A load that is part of its step is no finished_recving: whether one is depends on the time
    sink = make_engine(role="kv_consumer", fill=POISON, load_in_step_s=0)
    num = 8
    all_params = [prefill(source, f"p{i}", prompt(100, seed=i)) for i in range(num)]
    for i, params in enumerate(all_params):
        sink.request(f"d{i}", prompt(100, seed=i), params)
        if i % 2:
            sink.run()
        if i % 3 == 0:
            sink.abort(f"d{i}")
    finish_both(source, sink)
    for i in range(num):
        assert sink.reports_of("finished_recving", f"d{i}") <= 1
    handed = sum(sum(sink.stats.get(name, {}).values()) for name in ("loads", "loads_failed"))
    assert sum(sink.reports_of("finished_recving", f"d{i}") for i in range(num)) == handed


def test_windows_move(make_engine: MakeEngine) -> None:
    source = make_engine(role="kv_producer", window=2 * BLOCK)
    sink = make_engine(role="kv_consumer", window=2 * BLOCK, fill=POISON)
    params = prefill(source, "p", prompt(100))
    request = sink.request("d", prompt(100), params)
    sink.run_until(lambda: request.status == Status.RUNNING)
    assert sink.stats["requests_loaded"][""] == 1
    tables = sink.scheduler.kv_cache_manager.get_block_ids("d")
    theirs = source.scheduler.kv_cache_manager.get_block_ids("p")
    assert sink.block(1, tables[1][5]) == source.block(1, theirs[1][5])
    finish_both(source, sink)


@pytest.mark.parametrize("num_tokens", [94, 95, 96])
def test_the_first_block_of_a_window_moves_where_vllm_drops_it(
    make_engine: MakeEngine, num_tokens: int
) -> None:
    """Token 94 sees 63 to 94, token 95 sees 64 to 95: with 95 computed vLLM drops block 3, which a
    sink needs that computes token 94. It arrives although another request was written since.
    """
    source = make_engine(role="kv_producer", window=2 * BLOCK, num_blocks=24, prefix_caching=False)
    sink = make_engine(role="kv_consumer", window=2 * BLOCK, fill=POISON)
    source.request("p", prompt(num_tokens), OFFERED, max_tokens=1)
    (told,) = source.run().blocks
    params = source.params_of("p")
    source.request("q", prompt(7 * BLOCK - 16, seed=1), max_tokens=1)
    source.schedule()
    (new,) = source.in_flight.pop().scheduled_new_reqs
    for block_id in {*new.block_ids[0], *new.block_ids[1]}:
        source.fill(1, block_id, POISON)
    request = sink.request("d", prompt(num_tokens), params)
    sink.run_until(lambda: request.status == Status.RUNNING)
    assert sink.stats["requests_loaded"][""] == 1
    ours = sink.scheduler.kv_cache_manager.get_block_ids("d")[1]
    for position in (3, 4) if num_tokens < 96 else (4,):
        assert sink.block(1, ours[position]) == source.block(1, told.block_ids[1][position])
        assert POISON.to_bytes() * 64 not in sink.block(1, ours[position])


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_windows_that_would_poison_the_prefix_cache(
    make_engine: MakeEngine, prefix_caching: bool
) -> None:
    """A sink with blocks twice as long may lack the start of its first one: vLLM cannot leave that
    block out of its prefix cache, so with one the pair is refused, and without it moves.
    """
    source = make_engine(role="kv_producer", window=2 * BLOCK)
    sink = make_engine(
        role="kv_consumer",
        window=2 * BLOCK,
        block_tokens=2 * BLOCK,
        prefix_caching=prefix_caching,
    )
    params = prefill(source, "p", prompt(100))
    request = sink.request("d", prompt(100), params)
    sink.run_until(lambda: request.status.name.startswith("FINISHED"))
    finish_both(source, sink)
    assert sink.stats.get("requests_failed") == ({"incompatible": 1} if prefix_caching else None)
    assert sum(sink.stats.get("requests_loaded", {}).values()) == int(not prefix_caching)


def watch_waits(patch: pytest.MonkeyPatch, wait: Callable[[float], bool]) -> None:
    """``wait`` in the place of this thread's waits on a condition: whether it has come about."""
    own, wait_for = threading.current_thread(), threading.Condition.wait_for

    def watched(condition: threading.Condition, is_so: Any, timeout_s: float | None = None) -> Any:
        if threading.current_thread() is not own or timeout_s is None:
            return wait_for(condition, is_so, timeout_s)
        return wait(timeout_s)

    patch.setattr(threading.Condition, "wait_for", watched)


def test_idle_steps_wait(pair: tuple[Engine, Engine]) -> None:
    """An engine that only holds blocks steps 50 times a second once it has done so for a second."""
    source, _ = pair
    prefill(source, "p", prompt(100))
    source.run()
    time.sleep(1.1)
    started_s = time.monotonic()
    num_steps = 0
    while time.monotonic() - started_s < 0.5:
        source.run()
        num_steps += 1
    assert num_steps < 30


def test_idle_steps_wait_longer_the_longer_nothing_ends(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    ends = [False, False, False, True, False]

    def wait(timeout_s: float) -> bool:
        waits.append(timeout_s)
        time.sleep(0.1)
        return ends[len(waits) - 1]

    watch_waits(monkeypatch, wait)
    source = make_engine(role="kv_producer")
    prefill(source, "p", prompt(40))
    while len(waits) < len(ends):
        source.run()
    assert waits[0] == waits[4] == 0.0002
    assert 0.002 <= waits[1] <= waits[2] <= waits[3] <= 0.02


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_versions_without_failed_requests_are_told_all_blocks(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    monkeypatch.setattr("kvxfer.integrations.vllm.worker.REPORTS_FAILED_REQUESTS", False)
    source = make_engine(role="kv_producer")
    sink = make_engine(role="kv_consumer", policy=policy)
    sink.reports_failed_requests = False
    tokens = prompt(100)
    sink.request("before", tokens[: 3 * BLOCK + 1], max_tokens=1)
    sink.run()
    params = prefill(source, "p", tokens)
    source.connector.reset_cache()
    source.run_until(source.is_quiet)
    request = sink.request("d", tokens, params)
    sink.run()
    (ids,) = sink.scheduler.kv_cache_manager.get_block_ids("d")
    sink.run_until(lambda: request.status.name.startswith("FINISHED"))
    (reported,) = [report for report in sink.reported if report.invalid_block_ids]
    assert reported.finished_recving == {"d"}
    assert reported.invalid_block_ids == set(ids[3:])  # the first three were cached here
    assert (request.status == Status.FINISHED_ERROR) == (policy == "fail")
    sink.run_until(sink.is_quiet)
    assert sink.stats["requests_failed"] == {"ended": 1}


@pytest.mark.parametrize(("num_ranks", "waits"), [(1, True), (2, False)])
def test_a_step_that_others_share_does_not_wait(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, num_ranks: int, waits: bool
) -> None:
    """Without a token to compute, beside an offer that nobody takes: other ranks may have some."""
    waited_s: list[float] = []

    def wait(timeout_s: float) -> bool:
        waited_s.append(timeout_s)
        return False

    watch_waits(monkeypatch, wait)
    source = make_engine(role="kv_producer", data_parallel_size=num_ranks)
    prefill(source, "p", prompt(40))
    source.run()
    assert bool(waited_s) == waits
