"""Loads that are part of the step that orders them: which are promised, and that every rank keeps
the promise or says in the same step that it cannot.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.connector import rank_service, worker_side
from kvxfer.connector.board import Board, Posted
from kvxfer.connector.loads import ALONE_S, DISTRUST_S, DecodeSteps, StepLoads
from kvxfer.connector.records import (
    ConnectorMetadata,
    KVConnectorOutput,
    NearSource,
    NewLoad,
    SourceRef,
)
from kvxfer.connector.scheduler_side import SchedulerConnector
from kvxfer.tensors.device_launch import HostEvent
from kvxfer.transfer.wire import OfferRef, Reason
from kvxfer.transports.base import ReadRequest, TransferKey
from kvxfer.transports.copy_thread import CopyJob
from kvxfer.transports.shm_direct import ShmSink
from tests.builders import EngineShape
from tests.connector.rig import POISON, Engine, awaited_loads, expect_copied, until
from tests.connector.scheduler import SOURCE, Blocks, Request, connector, offering, wanting
from tests.connector.scheduler import step as scheduled
from tests.copies import HeldPieces
from tests.wires import run_pieces, use_sink

ONE = EngineShape(num_kv_heads=2, num_blocks=64)
TWO = EngineShape(tp_size=2, num_kv_heads=2, num_blocks=64)
LIFE, DIGEST = b"l" * 16, b"d" * 32
STEP_S = 0.0061
LIMITS_S = {None: STEP_S / 3, 0.004: 0.004, 2 * ALONE_S: 2 * ALONE_S}
"""By what is set: where other requests run, and decode steps take STEP_S."""

# ------------------------------------------------------------------ what is promised


@pytest.fixture(scope="module")
def boards() -> Iterator[list[Board]]:
    made = [Board(), Board()]
    yield made
    for board in made:
        board.close()


def source_of(number: int) -> SourceRef:
    return SourceRef(
        engine_id="p",
        endpoint="tcp://127.0.0.1:5700",
        offer=OfferRef(number.to_bytes(16, "little"), LIFE),
        num_tokens=100,
        digest=DIGEST,
    )


def promised_time_s(
    loads: StepLoads, source: SourceRef, num_tokens: int, ranks: list[str], now_s: float
) -> float | None:
    """How long a load will take that can be part of the step; else None."""
    time_s = loads.time_s(source, num_tokens, ranks, now_s)
    return time_s if loads.can_promise(time_s) else None


# What the board of a source rank shows of an offer
SHOWN = st.sampled_from(["open", "any tokens", "other tokens", "over", "never"])
# What a rank has said of the source: None, or its latency, its time for a token, and its boards
SAID = st.none() | st.tuples(
    st.sampled_from([0.0, 0.0003, 0.0019]),
    st.sampled_from([0.0, 0.00001, 0.0003]),
    st.sets(st.integers(0, 1)),
)
_number = iter(range(1 << 60))


@given(
    said=st.lists(SAID, min_size=1, max_size=3),
    num_ranks=st.integers(1, 3),
    shown=st.tuples(SHOWN, SHOWN),
    num_tokens=st.integers(1, 60),
    set_s=st.sampled_from(list(LIMITS_S)),
    promised_s=st.lists(st.sampled_from([0.0001, 0.001, ALONE_S - 0.0003]), max_size=2),
    running=st.sets(st.sampled_from(["r", "s"])),
    late_for_s=st.none() | st.sampled_from([0.0, DISTRUST_S - 1, DISTRUST_S]),
    begins_ahead=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_a_load_is_promised_where_all_that_it_needs_is_there(
    boards: list[Board],
    said: list[tuple[float, float, set[int]] | None],
    num_ranks: int,
    shown: tuple[str, str],
    num_tokens: int,
    set_s: float | None,
    promised_s: list[float],
    running: set[str],
    late_for_s: float | None,
    begins_ahead: bool,
) -> None:
    source = source_of(next(_number))
    ahead_s = 0.001 if begins_ahead else 0.0
    for board, what in zip(boards, shown, strict=True):
        digest = {"any tokens": None, "other tokens": b"o" * 32}.get(what, DIGEST)
        if what != "never":
            assert board.post(source.offer.nonce, Posted(digest, 100, ((1,),)))
        if what == "over":
            board.end(source.offer.nonce)
    loads = StepLoads(set_s, begins_ahead=begins_ahead)
    loads.begin_step({"q": 1}, 0.0)
    loads.begin_step({"q": 1}, STEP_S)
    for rank, each in enumerate(said):
        handles = tuple(boards[number].handle for number in sorted(each[2])) if each else ()
        near = {LIFE: NearSource(each[0], each[1], handles)} if each else {}
        loads.learn({f"pp0tp{rank}": near})
    loads.begin_step(dict.fromkeys(running, 1), 1.0)
    for time_s in promised_s:
        loads.promise(time_s)
    if late_for_s is not None:
        loads.was_late(source, 100.0 - late_for_s)
    ranks = [f"pp0tp{rank}" for rank in range(num_ranks)]
    try:
        asked = source, num_tokens, ranks, 100.0
        got = promised_time_s(loads, *asked)
        waits_s = loads.wait_s(loads.time_s(*asked))
        loads.begin_step({"t": 1}, 2.0)
        in_next = promised_time_s(loads, *asked)
        loads.ended("t")
        alone = promised_time_s(loads, *asked)
    finally:
        for board in boards:
            board.end(source.offer.nonce)
        loads.close()

    # The same, said naively
    want = math.inf
    if len(said) == num_ranks and None not in said:
        times = [each[0] + each[1] * num_tokens for each in said if each]
        are_open = all(
            shown[number] in {"open", "any tokens"} for each in said if each for number in each[2]
        )
        if are_open and (late_for_s is None or late_for_s >= DISTRUST_S):
            want = max(times)
    among_others_s = LIMITS_S[set_s]
    alone_s = max(among_others_s, ALONE_S)
    limit_s = among_others_s if running else alone_s
    assert got == (want if sum(promised_s) + want <= limit_s else None)
    left_s = max(0.0, limit_s - sum(promised_s))
    assert waits_s == pytest.approx(left_s if running and want <= left_s + ahead_s else 0)
    assert in_next == (want if want <= among_others_s else None)
    assert alone == (want if want <= alone_s else None)


def test_without_a_limit_nothing_is_mapped(boards: list[Board]) -> None:
    loads = StepLoads(0.0)
    loads.learn({"pp0tp0": {LIFE: NearSource(0.0, 0.0, (boards[0].handle,))}})
    assert promised_time_s(loads, source_of(0), 1, ["pp0tp0"], 0.0) is None


def test_a_source_that_is_gone_is_forgotten(boards: list[Board]) -> None:
    loads, source = StepLoads(None), source_of(1 << 64)
    assert boards[0].post(source.offer.nonce, Posted(DIGEST, 100, ((1,),)))
    loads.learn({"pp0tp0": {LIFE: NearSource(0.001, 0.0, (boards[0].handle,))}})
    assert promised_time_s(loads, source, 1, ["pp0tp0"], 0.0) == 0.001
    loads.learn({"pp0tp0": {}})
    assert promised_time_s(loads, source, 1, ["pp0tp0"], 0.0) is None
    loads.close()


# Steps of the same requests: their tokens, and how long each is before the next one
STEPS = st.tuples(
    st.sampled_from([{"a": 1}, {"a": 16}, {"a": 4, "b": 1}, {"a": 17, "b": 1}, {"b": 2048}, {}]),
    st.lists(st.integers(1, 100), min_size=1, max_size=20),
)


@given(st.lists(STEPS, max_size=4))
def test_a_decode_step_lasts_until_the_next_one_of_the_same_requests(
    runs: list[tuple[dict[str, int], list[int]]],
) -> None:
    steps = [(num_tokens, wait_s) for num_tokens, waits_s in runs for wait_s in waits_s]
    decode, now_s, lasted_s = DecodeSteps(), 100, []
    for number, (num_tokens, wait_s) in enumerate(steps):
        decode.order(frozenset(num_tokens), max(num_tokens.values(), default=0), now_s)
        before, waited_s = steps[number - 1] if number else ({}, 0)
        is_same = sorted(before) == sorted(num_tokens) != []
        if is_same and all(
            tokens < 17 for each in (before, num_tokens) for tokens in each.values()
        ):
            lasted_s.append(waited_s)
        now_s += wait_s
    last_s = sorted(lasted_s[-15:])
    middle = len(last_s) // 2
    if not last_s:
        assert decode.median_s == 0
    elif len(last_s) % 2:
        assert decode.median_s == last_s[middle]
    else:
        assert decode.median_s == (last_s[middle - 1] + last_s[middle]) / 2


def test_no_load_is_among_others_before_a_decode_step_was_seen(boards: list[Board]) -> None:
    loads, source = StepLoads(None), source_of((1 << 64) + 1)
    assert boards[0].post(source.offer.nonce, Posted(DIGEST, 100, ((1,),)))
    loads.learn({"pp0tp0": {LIFE: NearSource(0.001, 0.0, (boards[0].handle,))}})
    got = []
    for now_s in (1.0, 1.004):
        loads.begin_step({"r": 1}, now_s)
        got.append(promised_time_s(loads, source, 1, ["pp0tp0"], now_s))
    assert got == [None, 0.001]
    loads.close()


@contextmanager
def near_source(side: SchedulerConnector, takes_s: float) -> Iterator[None]:
    """A source that shows its offer, and of which every load takes so long."""
    board = Board()
    assert board.post(SOURCE.offer.nonce, Posted(SOURCE.digest, 40, ((1,),)))
    near = NearSource(takes_s, 0.0, (board.handle,))
    side.update_connector_output(
        KVConnectorOutput(near={"pp0tp0": {SOURCE.offer.incarnation: near}})
    )
    yield
    side.shutdown()
    board.close()


def test_a_load_is_part_of_the_step_that_nobody_else_waits_for() -> None:
    """Three steps' worth of copies: not while another request runs, and again when it has ended."""
    side = connector(load_in_step_s=0.003)
    with near_source(side, 0.009):
        request, other = wanting(), Request(request_id="other")
        side.on_new_request(request)
        ask = partial(side.get_num_new_matched_tokens, request, 0)
        assert ask() == (39, False)
        side.build_connector_meta(scheduled(counts={"other": 1}))
        assert ask() == (39, True)
        side.request_finished(other, [])
        assert ask() == (39, False)
        side.update_state_after_alloc(request, Blocks([4, 5, 6]), 39)
        (load,) = side.build_connector_meta(scheduled(counts={"r": 40})).loads
        assert load.in_step
        assert load.wait_s == 0


@pytest.mark.parametrize(
    ("takes_s", "begins_ahead", "wait_s"),
    [(0.0031, False, 0.0), (0.0031, True, 0.003), (0.004, True, 0.003), (0.0041, True, 0.0)],
)
def test_a_step_waits_for_a_load_that_will_soon_have_ended(
    takes_s: float, begins_ahead: bool, wait_s: float
) -> None:
    """And for one such load alone."""
    side = connector(load_in_step_s=0.003, begins_ahead=begins_ahead)
    with near_source(side, takes_s):
        request, other = wanting(), wanting(request_id="r2")
        side.build_connector_meta(scheduled(counts={"running": 1}))
        for each in (request, other):
            side.on_new_request(each)
        assert side.get_num_new_matched_tokens(request, 0) == (39, True)
        side.update_state_after_alloc(request, Blocks([4, 5, 6]), 39)
        (load,) = side.build_connector_meta(scheduled(counts={"running": 1})).loads
        assert (load.in_step, load.wait_s) == (False, wait_s)


@pytest.mark.parametrize(
    ("cached", "has_offer", "is_taken"),
    [(0, False, True), (16, False, True), (8, False, False), (0, True, False)],
)
def test_orders_for_loads_are_taken_before_the_step(
    cached: int, has_offer: bool, is_taken: bool
) -> None:
    """Not where a load begins within a block, nor where a step may end an offer whose blocks the
    load gets: they are still read.
    """
    side = connector()
    request = wanting()
    if has_offer:
        side.on_new_request(offering(request_id="given"))
    side.on_new_request(request)
    assert side.get_num_new_matched_tokens(request, cached) == (39 - cached, True)
    side.update_state_after_alloc(request, Blocks([4, 5, 6]), 39 - cached)
    taken = side.take_load_orders()
    rest = side.build_connector_meta(scheduled(counts={"running": 1}))
    for orders, has_it in ((taken, is_taken), (rest, not is_taken)):
        loads = orders.loads if orders is not None else ()
        assert [load.token_lo for load in loads] == [cached] * has_it
        assert bool(orders is not None and orders.holds) == has_it


@pytest.mark.parametrize(("takes_s", "is_asynchronous"), [(0.0009, False), (0.0011, True)])
def test_a_load_makes_a_step_of_others_a_third_longer(
    takes_s: float, is_asynchronous: bool
) -> None:
    times_s = [1.0]
    side = connector(now=lambda: times_s[-1])
    with near_source(side, takes_s):
        for _ in range(3):
            times_s.append(times_s[-1] + 0.003)
            side.build_connector_meta(scheduled(counts={"other": 1}))
        request = wanting()
        side.on_new_request(request)
        assert side.get_num_new_matched_tokens(request, 0) == (39, is_asynchronous)


# ------------------------------------------------------------------ what the ranks do


@pytest.fixture(autouse=True)
def wait_for_late_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is."""
    for module in (rank_service, worker_side):
        monkeypatch.setattr(module, "LATE_S", 300.0)


def engines(wire: str, shape: EngineShape = ONE, **more: Any) -> tuple[Engine, Engine]:
    return (
        Engine(TWO, "prefill", fill=None, transport=wire),
        Engine(shape, "decode", fill=POISON, transport=wire, **more),
    )


def offered(source: Engine, name: str) -> SourceRef:
    ref = source.offer(name, 64, [1, 2, 3, 4])
    posted = source.count("board.posted")
    source.compute(name)
    until(lambda: source.count("board.posted") == posted + len(source.workers))
    return ref


def order(name: str, ref: SourceRef, ids: tuple[int, ...] = (5, 6, 7, 8)) -> NewLoad:
    return NewLoad(
        request_id=name,
        source=ref,
        token_lo=0,
        token_hi=64,
        block_ids=(ids,),
        in_step=True,
    )


def step(
    sink: Engine, *loads: NewLoad, compute: Callable[[], None] = lambda: None
) -> list[dict[str, Reason | None]]:
    """One step of every rank, with what it reports: of each load why it failed, or None."""
    metadata = ConnectorMetadata(loads=loads)
    for worker in sink.workers:
        worker.bind_connector_metadata(metadata)
        worker.start_load_kv()
    compute()
    reported = []
    for worker in sink.workers:
        worker.wait_for_save()
        reported.append({load.request_id: load.reason for load in worker.collect().loads})
        worker.clear_connector_metadata()
    return reported


def meet(source: Engine, sink: Engine) -> None:
    ref = offered(source, "first")
    sink.load("first", ref, [9, 10, 11, 12], (0, 64))
    until(lambda: sink.received("first"))


@contextmanager
def held_loads(patch: pytest.MonkeyPatch) -> Iterator[tuple[Engine, Engine, HeldPieces]]:
    """A source and a sink that have met. What is copied from then on waits until it may end."""
    held = HeldPieces(patch, "shm", lambda job: False)
    source, sink = engines("shm")
    with source, sink:
        meet(source, sink)
        held.is_held = lambda job: True
        yield source, sink, held


@pytest.mark.parametrize("wire", ["shm", "cuda_ipc"])
@pytest.mark.parametrize("shape", [ONE, TWO], ids=["one", "two"])
def test_the_step_computes_with_the_kv_and_reports_the_load(wire: str, shape: EngineShape) -> None:
    slow = "read:slow=20ms" if wire == "shm" else ""
    source, sink = engines(wire, shape, faults=slow)
    with source, sink:
        meet(source, sink)
        for pool in sink.pools:
            pool.tensor.fill_(POISON)

        def compute() -> None:
            expect_copied(source, sink, [1, 2, 3, 4], [5, 6, 7, 8], (0, 64))

        ref = offered(source, "d")
        assert step(sink, order("d", ref), compute=compute) == [{"d": None}] * len(sink.workers)
        until(lambda: source.sent("d"))


def shm_on_a_stream(patch: pytest.MonkeyPatch) -> tuple[list[object], list[object]]:
    """Copies as if they were on a GPU's stream. What the engine's stream is told to wait for, and
    behind what each copy begins.
    """
    waited: list[object] = []
    begin_behind: list[object] = []
    stream = SimpleNamespace(wait=waited.append, record=HostEvent)
    patch.setattr("kvxfer.connector.worker_side.stream_of", lambda device: stream)

    class OnStream(ShmSink):
        def copied(self, keys: Collection[TransferKey]) -> Any:
            return f"behind {len(keys)} copies"

        def submit_read(self, request: ReadRequest) -> None:
            begin_behind.append(request.after)
            super().submit_read(request)

    use_sink(patch, "shm", OnStream)
    return waited, begin_behind


def test_behind_copies_of_a_gpu_the_verdict_comes_with_the_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The copies are on a stream, and the step's work behind them: nothing is waited for before."""
    waited, _ = shm_on_a_stream(monkeypatch)
    with held_loads(monkeypatch) as (source, sink, held):
        for pool in sink.pools:
            pool.tensor.fill_(POISON)
        ref = offered(source, "d")

        def compute() -> None:
            assert waited == ["behind 2 copies"]
            assert bool((sink.pools[0].tensor == POISON).all())  # they are still to come
            held.may_end.set()

        assert step(sink, order("d", ref), compute=compute) == [{"d": None}]
        expect_copied(source, sink, [1, 2, 3, 4], [5, 6, 7, 8], (0, 64))


@pytest.mark.parametrize("num_ahead", [2, 3])
@pytest.mark.parametrize("wire", ["shm", "cuda_ipc"])
def test_loads_that_began_before_their_step_are_part_of_it(wire: str, num_ahead: int) -> None:
    """Beside another one of the step, and in a step without orders."""
    slow = "read:slow=20ms" if wire == "shm" else ""
    tables = [(5, 6, 7, 8), (9, 10, 11, 12), (13, 14, 15, 16)]
    source, sink = engines(wire, faults=slow)
    with source, sink:
        meet(source, sink)
        sink.pools[0].tensor.fill_(POISON)
        loads = [order(f"d{ids[0]}", offered(source, f"d{ids[0]}"), ids) for ids in tables]
        for load in loads[:num_ahead]:
            sink.workers[0].begin_ahead(ConnectorMetadata(loads=(load,)))

        def compute() -> None:
            expect_copied(source, sink, [1, 2, 3, 4] * 3, range(5, 17), (0, 3 * 64))

        reported = step(sink, *loads[num_ahead:], compute=compute)
        assert reported == [{load.request_id: None for load in loads}]


def test_the_step_runs_behind_the_copies_that_began_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited, begin_behind = shm_on_a_stream(monkeypatch)
    source, sink = engines("shm")
    with source, sink:
        meet(source, sink)
        begin_behind.clear()
        for name, ids in (("d", (5, 6, 7, 8)), ("e", (9, 10, 11, 12))):
            load = order(name, offered(source, name), ids)
            sink.workers[0].begin_ahead(ConnectorMetadata(loads=(load,)))
        assert begin_behind == [None] * 4  # not even what the stream held by then
        assert waited == []
        step(sink, compute=lambda: waited.append("computed"))
        assert waited == ["behind 2 copies", "behind 2 copies", "computed"]


@pytest.mark.parametrize("wait_s", [300.0, 0.001])
def test_a_step_waits_for_a_load_that_began_with_it(
    wait_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as it may, and no longer."""
    with held_loads(monkeypatch) as (source, sink, held):
        load = msgspec.structs.replace(
            order("d", offered(source, "d")), in_step=False, wait_s=wait_s
        )

        def end_when_awaited() -> None:
            until(awaited_loads)
            held.may_end.set()

        if wait_s > 1:
            threading.Thread(target=end_when_awaited).start()
            assert step(sink, load) == [{"d": None}]
            return
        assert step(sink, load) == [{}]
        assert step(sink) == [{}]
        held.may_end.set()
        until(lambda: sink.received("d"))


@pytest.mark.parametrize("is_after", [False, True])
def test_an_offer_that_ends_during_the_copy_fails_the_load_in_the_step(
    is_after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[ConnectorMetadata] = []

    def torn(job: CopyJob) -> bool:
        has_more = is_after and job.run()
        for ended in ends:
            source.workers[1].handle_preemptions(ended)
        return has_more if is_after else job.run()

    run_pieces(monkeypatch, "shm", torn, at_once=True)
    source, sink = engines("shm")
    with source, sink:
        meet(source, sink)
        ref = offered(source, "d")
        ends.append(ConnectorMetadata(ended=(source.end_of("d"),)))
        (reported,) = step(sink, order("d", ref))
        assert reported["d"] in {"aborted", "ended"}
        ends.clear()
        assert step(sink, order("e", offered(source, "e"))) == [{"e": None}]


@pytest.mark.parametrize("way", ["over", "stalls", "lost"])
def test_a_promise_that_cannot_be_kept_ends_with_the_step(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way != "over":
        monkeypatch.setattr(worker_side, "LATE_S", 1.0)
    source, sink = engines("shm", faults="read:stall=60s;nth=3")
    with source, sink:
        meet(source, sink)  # of two source ranks: two reads
        ref = offered(source, "d")
        if way == "over":
            source.end("d")
        elif way == "lost":
            ref = msgspec.structs.replace(ref, endpoint="tcp://127.0.0.1:9")
        (reported,) = step(sink, order("d", ref))
        assert (
            reported["d"]
            in {
                "over": {"ended", "aborted"},
                "stalls": {"deadline"},
                "lost": {"deadline", "peer_lost", "incarnation", "not_allowed"},
            }[way]
        )


def test_one_rank_that_fails_says_so_and_the_other_not(monkeypatch: pytest.MonkeyPatch) -> None:
    source, sink = engines("shm", TWO)
    with source, sink:
        meet(source, sink)
        ref = offered(source, "d")
        source.workers[1].handle_preemptions(ConnectorMetadata(ended=(source.end_of("d"),)))
        good, bad = step(sink, order("d", ref))
        assert bad["d"] in {"aborted", "ended"}
        assert good["d"] is None


# ------------------------------------------------------------------ what the ranks say


def near_of(engine: Engine) -> dict[bytes, NearSource] | None:
    (worker,) = engine.workers
    engine.take_stats()
    return worker.take_near()


def test_a_rank_says_which_sources_are_near() -> None:
    source, sink = engines("shm")
    with source, sink:
        assert near_of(sink) is None
        meet(source, sink)
        seen: list[dict[bytes, NearSource] | None] = []

        def has_news() -> bool:
            seen.append(near_of(sink))
            return seen[-1] is not None

        until(has_news)
        ((life, near),) = (seen[-1] or {}).items()
        assert life == source.incarnation
        assert near.boards == tuple(entry.board for entry in source.manifest.ranks)
        assert near.latency_s >= 0
        nbytes = 2 * 2 * 2 * 8  # layers, planes, heads, bytes of a token
        assert nbytes / 1e12 < near.token_s < nbytes / 1e5  # a busy machine is slow
        assert near_of(sink) is None  # once
        source.close()
        until(lambda: near_of(sink) == {})


@pytest.mark.parametrize(
    ("wire", "more"), [("zmq", {}), ("shm", {"offer_board": False})], ids=["stream", "no board"]
)
def test_a_source_that_takes_messages_is_not_near(wire: str, more: dict[str, Any]) -> None:
    source, sink = engines(wire, **more)
    with source, sink:
        ref = source.offer("first", 64, [1, 2, 3, 4])
        source.compute("first")
        sink.load("first", ref, [9, 10, 11, 12], (0, 64))
        until(lambda: sink.received("first"))
        assert near_of(sink) is None
