"""Requests that a router sends to both engines at once: the sink finds the offer by the router's
id, and loads what is open while the rest is computed.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import msgspec
import pytest

from kvxfer.connector import given_offer, keeper, worker_side
from kvxfer.connector.keeper import MAX_WANTED
from kvxfer.connector.params import early_params, make_params, mint_request, prefill_params
from kvxfer.connector.records import FindOffer, NewOffer, SourceRef
from kvxfer.transfer.wire import OfferRef
from kvxfer.transports.base import TransferKey
from kvxfer.transports.stream_source import StreamSource
from tests.builders import EngineShape
from tests.connector.rig import (
    POISON,
    STUCK_S,
    Engine,
    expect_moved,
    io_thread_of,
    kept_by,
    num_pulls,
    only_peer_of,
    pass_s,
    service_of,
    stuck,
    until,
)
from tests.connector.sides import Request, Side, table_of
from tests.wires import pipe_of, use_source

SETTINGS: dict[str, Any] = {"load_in_step_s": 0.0, "early_ahead": 0.0}
SHAPE = EngineShape(num_blocks=24, inner_nbytes=64)
TWO = EngineShape(num_blocks=24, inner_nbytes=64, tp_size=2)
PROMPT = tuple(range(100, 180))
HI = len(PROMPT) - 1  # the last token is computed at the decode engine


@contextmanager
def sides(
    source: EngineShape = SHAPE, sink: EngineShape = SHAPE, **settings: Any
) -> Iterator[tuple[Side, Side]]:
    settings = {**SETTINGS, "transport": "shm", **settings}
    with ExitStack() as stack:
        engines = [
            stack.enter_context(Engine(shape, name, fill=fill, announce=False, **settings))
            for shape, name, fill in ((source, "prefill", None), (sink, "decode", POISON))
        ]
        yield Side(engines[0]), Side(engines[1])


def answer_of(source: Side) -> dict[str, Any]:
    """What this prefill engine has answered to another request, as a router keeps it."""
    engine = source.engine
    ref = SourceRef(
        engine_id=engine.engine_id,
        endpoint=engine.endpoint,
        offer=OfferRef(secrets.token_bytes(16), engine.incarnation),
        num_tokens=1,
    )
    return make_params(ref, request_id="other", number=1, tp_size=1, pp_size=1)


def pair_of(
    source: Side, sink: Side, name: str | None = None, prompt: tuple[int, ...] = PROMPT
) -> tuple[Request, Request]:
    """The two requests that a router sends at once."""
    name = name or mint_request()
    prefill = Request(f"p-{name}", prompt, prefill_params(name))
    prefill.table = table_of(source.engine.shape, len(prompt), seed=1)
    decode = Request(f"d-{name}", prompt, early_params(answer_of(source), name))
    decode.table = table_of(sink.engine.shape, len(prompt), seed=2)
    return prefill, decode


def two_of_one_id(source: Side, sink: Side) -> tuple[Request, Request, Request]:
    """A prefill that begins, and two requests that have come to decode with its id."""
    name = mint_request()
    prefill, decode = pair_of(source, sink, name)
    _, other = pair_of(source, sink, name)
    other.request_id = "other"
    for each in (decode, other):
        sink.scheduler.on_new_request(each)
    begin(source, prefill)
    return prefill, decode, other


def begin(source: Side, prefill: Request, num_cached: int = 0) -> None:
    assert source.scheduler.on_new_request(prefill) is None
    assert source.ask(prefill, num_cached) == (0, False)
    prefill.computed = num_cached


def end(source: Side, prefill: Request) -> dict[str, Any]:
    keep, params = source.finish(prefill, "FINISHED_LENGTH_CAPPED")
    assert keep
    assert params is not None
    source.step()
    return params


def is_found(sink: Side, decode: Request) -> bool:
    return sink.ask(decode)[0] is not None


def load_found(sink: Side, decode: Request) -> None:
    sink.until(lambda: is_found(sink, decode))
    sink.load(decode)


@contextmanager
def loading(num_tokens: int, **settings: Any) -> Iterator[tuple[Side, Side, Request, Request]]:
    """Decode loads what ``num_tokens`` of prefill's have opened."""
    with sides(**settings) as (source, sink):
        prefill, decode = pair_of(source, sink)
        begin(source, prefill)
        sink.scheduler.on_new_request(decode)
        source.step([(prefill, num_tokens)])
        load_found(sink, decode)
        yield source, sink, prefill, decode


@pytest.mark.parametrize("wire", ["shm", "zmq"])
@pytest.mark.parametrize(
    ("source_shape", "sink_shape"), [(SHAPE, SHAPE), (TWO, SHAPE), (SHAPE, TWO)]
)
def test_decode_comes_first_and_loads_as_prefill_computes(
    source_shape: EngineShape, sink_shape: EngineShape, wire: str
) -> None:
    with sides(source_shape, sink_shape, transport=wire, chunk_nbytes=4096) as (source, sink):
        prefill, decode = pair_of(source, sink)
        assert sink.scheduler.on_new_request(decode) is None
        assert sink.ask(decode) == (None, False)
        sink.step()
        begin(source, prefill)
        source.step([(prefill, 32)])
        sink.until(lambda: is_found(sink, decode))
        assert sink.ask(decode) == (HI, True)
        sink.load(decode)
        source.step([(prefill, 32)])
        source.step([(prefill, 16)])
        end(source, prefill)
        sink.until(lambda: decode.request_id in sink.finished)
        assert sink.finished == {decode.request_id: None}
        expect_moved(source.engine, sink.engine, prefill.table, decode.table, {0: (0, HI)})
        source.until(lambda: prefill.request_id in source.sent)


def test_what_prefill_has_cached_leaves_before_its_first_step_is_over() -> None:
    with sides() as (source, sink):
        prefill, decode = pair_of(source, sink)
        sink.scheduler.on_new_request(decode)
        sink.step()
        begin(source, prefill, num_cached=64)
        pool = sink.engine.pools[0].tensor
        ends = source.engine.pools[0].tensor
        poisoned = ends.clone()

        def compute() -> None:
            """The forward pass takes until decode has what was cached."""
            load_found(sink, decode)
            until(lambda: has_read(source, sink, prefill, decode, 64))
            assert (pool == POISON).any()

        source.step([(prefill, 16)], compute=compute)
        assert (ends == poisoned).all()
        end(source, prefill)
        sink.until(lambda: decode.request_id in sink.finished)
        assert sink.finished == {decode.request_id: None}


def awaits(source: Side, name: str) -> bool:
    """Whether a question about this request has come to the source, and waits."""
    offer = NewOffer(
        request_id="", nonce=b"", num_tokens=1, digest=b"", open_tokens=1, name=bytes.fromhex(name)
    )
    return service_of(source.engine).source.awaits([offer])


def test_a_step_begins_when_who_waits_for_what_is_cached_has_been_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_side, "ASIDE_S", STUCK_S)
    with sides() as (source, sink):
        name, service = mint_request(), service_of(source.engine)
        prefill, decode = pair_of(source, sink, name)
        sink.scheduler.on_new_request(decode)
        sink.step()
        until(lambda: awaits(source, name))
        begin(source, prefill, num_cached=64)
        service.io.post(time.sleep, 0.1)  # the thread has other work before
        are_told: list[bool] = []
        source.step([(prefill, 16)], compute=lambda: are_told.append(not awaits(source, name)))
        assert are_told == [True]


@pytest.mark.parametrize("num_cached", [0, 64])
def test_a_step_that_nobody_waits_for_begins_at_once(
    num_cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asks for what is cached; or who asks can have nothing before the step is over."""
    monkeypatch.setattr(worker_side, "ASIDE_S", STUCK_S)
    with sides() as (source, sink):
        name, service = mint_request(), service_of(source.engine)
        prefill, decode = pair_of(source, sink, name)
        if not num_cached:
            sink.scheduler.on_new_request(decode)
            sink.step()
            until(lambda: awaits(source, name))
        begin(source, prefill, num_cached)
        known: list[int] = []
        with stuck(source.engine):
            source.step([(prefill, 16)], compute=lambda: known.append(service.source.num_offers))
        assert known == [0]


def has_read(source: Side, sink: Side, prefill: Request, decode: Request, num_tokens: int) -> bool:
    try:
        spans = {0: (0, num_tokens)}
        expect_moved(source.engine, sink.engine, prefill.table, decode.table, spans)
    except AssertionError:
        return False
    return True


def test_decode_comes_when_prefill_is_over() -> None:
    with sides() as (source, sink):
        prefill, decode = pair_of(source, sink)
        begin(source, prefill)
        source.step([(prefill, len(PROMPT))])
        end(source, prefill)
        sink.scheduler.on_new_request(decode)
        load_found(sink, decode)
        sink.until(lambda: decode.request_id in sink.finished)
        assert sink.finished == {decode.request_id: None}
        (report,) = sink.engine.reports(decode.request_id)
        assert report.spans == ()  # it was complete


def test_a_report_says_what_was_open_when() -> None:
    with loading(16) as (source, sink, prefill, decode):
        until(lambda: has_read(source, sink, prefill, decode, 16))
        source.step([(prefill, 64)])
        end(source, prefill)
        sink.until(lambda: decode.request_id in sink.finished)
        (report,) = sink.engine.reports(decode.request_id)
        assert [num_open for _, num_open in report.spans][-2:] == [16, 80]
        moments = [moment for moment, _ in report.spans]
        assert report.handed_s <= moments[0] <= moments[-1] <= report.finished_s


@pytest.mark.parametrize("wire", ["shm", "zmq"])
def test_who_verifies_waits_for_the_last_token_as_for_any_other(wire: str) -> None:
    """All that it wants is open, but its digests are made when the offer is complete."""
    with loading(HI, transport=wire, verify="all", early_wait_s=3600.0) as sides:
        source, sink, prefill, decode = sides
        sink.until(lambda: has_read(source, sink, prefill, decode, HI))
        pass_s(sink.engine, 300.0)  # pull_timeout_s
        retries = sink.engine.count("control.retries")
        sink.until(lambda: sink.finished or sink.engine.count("control.retries") >= retries + 2)
        assert sink.finished == {}
        source.step([(prefill, 1)])
        end(source, prefill)
        sink.until(lambda: decode.request_id in sink.finished)
        assert sink.finished == {decode.request_id: None}
        assert sink.engine.count("verify.equal") == 1


# ------------------------------------------------------------------ what is not found


def test_an_unknown_request_is_waited_for_so_long_and_then_computed_here() -> None:
    with sides(early_wait_s=0.3) as (source, sink):
        _, decode = pair_of(source, sink)
        sink.scheduler.on_new_request(decode)
        assert sink.ask(decode) == (None, False)
        sink.until(lambda: is_found(sink, decode))
        assert sink.ask(decode) == (0, False)
        assert sink.reasons() == {"unknown": 1}
        assert sink.scheduler.num_open == 0


def test_who_has_another_prompt_does_not_learn_the_nonce() -> None:
    with sides() as (source, sink):
        name = mint_request()
        prefill, _ = pair_of(source, sink, name)
        _, decode = pair_of(source, sink, name, PROMPT[::-1])
        begin(source, prefill)
        source.step([(prefill, 16)])
        sink.scheduler.on_new_request(decode)
        sink.until(lambda: is_found(sink, decode))
        assert sink.ask(decode) == (0, False)
        assert sink.reasons() == {"tokens": 1}
        source.step([(prefill, 64)])
        end(source, prefill)
        assert prefill.request_id not in source.sent  # another may come for it


def test_the_oldest_of_too_many_that_are_looked_for_hears_so() -> None:
    with sides() as (source, sink):
        _, decode = pair_of(source, sink)
        sink.scheduler.on_new_request(decode)
        sink.step()
        io_thread_of(sink.engine)
        service, other = service_of(sink.engine), mint_request()
        ref = SourceRef(
            engine_id=source.engine.engine_id,
            endpoint=source.engine.endpoint,
            offer=OfferRef(bytes.fromhex(other), source.engine.incarnation),
            num_tokens=1,
        )
        for number in range(MAX_WANTED):
            order = FindOffer(msgspec.structs.replace(ref, digest=number.to_bytes(4, "big")))
            service.io.post(service.finder.find, order)
        sink.until(lambda: is_found(sink, decode))
        assert sink.ask(decode) == (0, False)
        assert sink.reasons() == {"unknown": 1}


@pytest.mark.parametrize("first", ["right", "wrong", "found"])
def test_two_prompts_of_one_id_have_each_its_own_answer(first: str) -> None:
    with sides() as (source, sink):
        name = mint_request()
        prefill, right = pair_of(source, sink, name)
        _, wrong = pair_of(source, sink, name, PROMPT[::-1])
        wrong.request_id = "wrong"
        for decode in {"right": (right, wrong), "wrong": (wrong, right), "found": (right,)}[first]:
            sink.scheduler.on_new_request(decode)
            sink.step()
        begin(source, prefill)
        source.step([(prefill, 48)])
        sink.until(lambda: is_found(sink, right))
        if first == "found":
            sink.scheduler.on_new_request(wrong)
        sink.until(lambda: is_found(sink, wrong))
        assert sink.ask(wrong) == (0, False)
        assert sink.reasons() == {"tokens": 1}
        sink.load(right)
        source.step([(prefill, 32)])
        end(source, prefill)
        sink.until(lambda: right.request_id in sink.finished)
        assert sink.finished == {right.request_id: None}
        source.until(lambda: prefill.request_id in source.sent)


def test_one_id_at_two_engines_is_looked_for_at_each() -> None:
    with sides() as (source, sink):
        name = mint_request()
        prefill, right = pair_of(source, sink, name)
        _, wrong = pair_of(source, sink, name)
        wrong.request_id = "wrong"
        assert wrong.kv_transfer_params is not None
        wrong.kv_transfer_params["kvxfer"]["incarnation"] = "00" * 16
        for decode in (wrong, right):
            sink.scheduler.on_new_request(decode)
        sink.until(lambda: is_found(sink, wrong))
        assert sink.ask(wrong) == (0, False)
        assert sink.ask(right) == (None, False)
        begin(source, prefill)
        source.step([(prefill, len(PROMPT))])
        end(source, prefill)
        load_found(sink, right)
        sink.until(lambda: right.request_id in sink.finished)
        assert sink.finished == {right.request_id: None}


def test_an_engine_that_was_started_anew_is_not_asked() -> None:
    with sides() as (source, sink):
        _, decode = pair_of(source, sink)
        assert decode.kv_transfer_params is not None
        decode.kv_transfer_params["kvxfer"]["incarnation"] = "00" * 16
        sink.scheduler.on_new_request(decode)
        sink.until(lambda: is_found(sink, decode))
        assert sink.ask(decode) == (0, False)
        assert sink.reasons() == {"incarnation": 1}


def test_an_engine_of_protocol_1_is_not_asked() -> None:
    with sides() as (source, sink):
        service = source.engine.workers[0]._service
        assert service is not None
        manifest = source.scheduler._manifest
        assert manifest is not None
        earlier = msgspec.structs.replace(manifest, protocol=(1, 1))
        service.io.post(lambda: service._set_engine(earlier))
        _, decode = pair_of(source, sink)
        sink.scheduler.on_new_request(decode)
        sink.until(lambda: is_found(sink, decode))
        assert sink.ask(decode) == (0, False)
        assert sink.reasons() == {"incompatible": 1}


def limit_questions(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """A source has room for so many of a connection; one more would be refused."""
    monkeypatch.setattr(given_offer, "MAX_EARLY", most)
    monkeypatch.setattr(keeper, "MAX_ASKED", most)


def moves(source: Side, sink: Side, prefill: Request, decode: Request) -> None:
    """Decode, which has been waiting, finds what prefill computes now, and has it."""
    begin(source, prefill)
    source.step([(prefill, len(PROMPT))])
    end(source, prefill)
    load_found(sink, decode)
    sink.until(lambda: decode.request_id in sink.finished)
    assert sink.finished.pop(decode.request_id) is None
    sink.finish(decode, "FINISHED_STOPPED")


def is_asked(source: Side, decode: Request) -> bool:
    assert decode.kv_transfer_params is not None
    return awaits(source, decode.kv_transfer_params["kvxfer"]["request"])


def test_a_source_is_asked_for_as_many_at_once_as_it_has_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit_questions(monkeypatch, 3)
    with sides() as (source, sink):
        pairs = [pair_of(source, sink) for _ in range(6)]
        for _, decode in pairs:
            sink.scheduler.on_new_request(decode)
        sink.until(lambda: is_asked(source, pairs[2][1]))
        for number, (prefill, decode) in enumerate(pairs):
            assert all(sink.ask(other) == (None, False) for _, other in pairs[number:])
            sink.until(partial(is_asked, source, decode))
            moves(source, sink, prefill, decode)
        assert sink.reasons() == {}
        assert source.engine.count("refused.unknown") == 0


def test_prefill_that_comes_late_is_found_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its question waits behind one that is answered last."""
    limit_questions(monkeypatch, 1)
    with sides() as (source, sink):
        (first, waits), (other, behind) = (pair_of(source, sink) for _ in range(2))
        for decode in (waits, behind):
            sink.scheduler.on_new_request(decode)
        sink.until(lambda: is_asked(source, waits))
        begin(source, other)
        source.step([(other, len(PROMPT))])
        end(source, other)
        assert sink.ask(behind) == (None, False)
        moves(source, sink, first, waits)
        load_found(sink, behind)
        sink.until(lambda: behind.request_id in sink.finished)
        assert sink.finished == {behind.request_id: None}


@pytest.mark.parametrize("comes", ["before", "behind"])
@pytest.mark.parametrize("goes", ["ends", "is turned away"])
def test_a_request_that_has_gone_keeps_no_other_waiting(
    goes: str, comes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one comes ``before`` it goes, or ``behind``."""
    limit_questions(monkeypatch, 1)
    with sides() as (source, sink):
        (_, gone), (prefill, decode) = (pair_of(source, sink) for _ in range(2))
        if goes == "ends":
            sink.scheduler.on_new_request(gone)
        else:
            sink.scheduler.reject_request(gone)
        if goes == "ends" or comes == "behind":
            sink.until(lambda: is_asked(source, gone))
        if comes == "before":
            sink.scheduler.on_new_request(decode)
        if goes == "ends":
            sink.finish(gone, "FINISHED_ABORTED")
        if comes == "behind":
            sink.step()
            assert is_asked(source, gone)
            sink.scheduler.on_new_request(decode)
        sink.until(lambda: is_asked(source, decode))
        assert not is_asked(source, gone)
        moves(source, sink, prefill, decode)
        assert sink.reasons() == {"cancelled": 1}
        assert source.engine.count("refused.unknown") == 0


def test_one_that_is_wanted_again_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_questions(monkeypatch, 1)
    with sides() as (source, sink):
        name = mint_request()
        prefill, decode = pair_of(source, sink, name)
        _, again = pair_of(source, sink, name)
        again.request_id = "again"
        last, other = pair_of(source, sink)
        sink.scheduler.on_new_request(decode)
        sink.until(lambda: is_asked(source, decode))
        sink.finish(decode, "FINISHED_ABORTED")
        sink.step()
        sink.scheduler.on_new_request(again)
        sink.step()
        sink.scheduler.on_new_request(other)
        sink.step()
        moves(source, sink, prefill, again)
        moves(source, sink, last, other)


def test_of_those_that_wait_here_one_that_has_gone_is_never_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit_questions(monkeypatch, 1)
    with sides() as (source, sink):
        (first, asked), (_, gone), (prefill, decode) = (pair_of(source, sink) for _ in range(3))
        for each in (asked, gone, decode):
            sink.scheduler.on_new_request(each)
        sink.until(lambda: is_asked(source, asked))
        sink.finish(gone, "FINISHED_ABORTED")
        sink.step()
        begin(source, first)
        source.step([(first, len(PROMPT))])
        end(source, first)
        load_found(sink, asked)
        sink.until(lambda: is_asked(source, decode) or is_asked(source, gone))
        assert not is_asked(source, gone)
        moves(source, sink, prefill, decode)


def test_two_requests_of_one_id_find_one_offer() -> None:
    with sides() as (source, sink):
        prefill, decode, other = two_of_one_id(source, sink)
        source.step([(prefill, 16)])
        sink.until(lambda: is_found(sink, decode))
        assert sink.ask(other) == (None, False)  # the first one loads
        sink.load(decode)
        source.step([(prefill, 64)])
        end(source, prefill)
        sink.until(lambda: decode.request_id in sink.finished)
        assert sink.ask(other) == (0, False)  # it finds in the prefix cache what that has brought
        for each in (decode, other):
            sink.finish(each, "FINISHED_STOPPED")
        assert sink.scheduler.num_open == 0
        source.until(lambda: prefill.request_id in source.sent)


@pytest.mark.parametrize(("prompt", "num_cached"), [((7,), 0), (PROMPT, HI)])
def test_a_request_that_needs_nothing_waits_for_nobody(
    prompt: tuple[int, ...], num_cached: int
) -> None:
    with sides() as (source, sink):
        prefill, decode = pair_of(source, sink, None, prompt)
        sink.scheduler.on_new_request(decode)
        sink.step()
        assert sink.ask(decode, num_cached) == (0, False)
        assert sink.ask(decode) == ((None, False) if num_cached else (0, False))
        assert sink.ask(decode, num_cached) == (0, False)
        sink.scheduler.update_state_after_alloc(decode, decode, 0)
        assert sink.scheduler.num_open == 0
        assert sink.reasons() == {"local_hit": 1}
        begin(source, prefill)
        source.step([(prefill, len(prompt))])
        end(source, prefill)
        sink.until(lambda: source.engine.count("offers.broken"))
        source.until(lambda: prefill.request_id in source.sent)


# ------------------------------------------------------------------ ends in mid-growth


@pytest.mark.parametrize("wire", ["shm", "zmq"])
def test_a_prefill_that_is_preempted_is_found_again(wire: str) -> None:
    with loading(48, transport=wire, chunk_nbytes=4096) as (source, sink, prefill, decode):
        source.step(preempted=frozenset({prefill.request_id}))
        sink.until(lambda: decode.request_id in sink.finished)
        assert sink.finished.pop(decode.request_id) == "preempted"
        assert sink.ask(decode) == (None, False)  # it is looked for
        source.engine.pools[0].tensor.random_(0, 256)  # another request had the blocks
        prefill.computed = prefill.num_told = 0
        prefill.table = table_of(SHAPE, len(PROMPT), seed=5)
        assert source.ask(prefill) == (0, False)
        source.step([(prefill, 48)])
        load_found(sink, decode)
        source.step([(prefill, 32)])
        end(source, prefill)
        sink.until(lambda: decode.request_id in sink.finished)
        assert sink.finished == {decode.request_id: None}
        expect_moved(source.engine, sink.engine, prefill.table, decode.table, {0: (0, HI)})
        source.until(lambda: prefill.request_id in source.sent)


def test_a_request_that_is_looked_for_again_holds_the_offer_before_no_more() -> None:
    with sides() as (source, sink):
        prefill, decode, other = two_of_one_id(source, sink)
        source.step([(prefill, 48)])
        load_found(sink, decode)
        until(lambda: kept_by(sink.engine) == [decode.request_id, "other"])
        source.step(preempted=frozenset({prefill.request_id}))
        sink.until(lambda: decode.request_id in sink.finished)
        assert sink.finished == {decode.request_id: "preempted"}
        for each in (decode, other):
            assert sink.ask(each) == (None, False)
        sink.until(lambda: not kept_by(sink.engine))
        for each in (decode, other):
            sink.finish(each, "FINISHED_ABORTED")
        assert sink.scheduler.num_open == 0


def test_a_name_passes_on_while_the_stream_of_the_offer_before_is_stopping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stopped: list[Callable[[], None]] = []

    class StopsLater(StreamSource):
        def stop_send(self, key: TransferKey) -> None:
            stopped.append(partial(super().stop_send, key))

    use_source(monkeypatch, "zmq", partial(StopsLater, pipe_of("zmq")))
    with loading(48, transport="zmq", chunk_nbytes=4096) as (source, sink, prefill, decode):
        nonce = source.scheduler._offers._offers[prefill.request_id].nonce
        until(lambda: num_pulls(source.engine, nonce))
        source.step(preempted=frozenset({prefill.request_id}))
        sink.until(lambda: decode.request_id in sink.finished)
        assert sink.finished == {decode.request_id: "preempted"}
        prefill.computed = prefill.num_told = 0
        source.step([(prefill, 48)])
        sink.until(lambda: is_found(sink, decode))
        assert sink.ask(decode) == (HI, True)
        assert stopped
        service = service_of(source.engine)
        for stop in stopped:
            service.io.post(stop)


def test_a_prefill_that_is_aborted_fails_the_load_by_name() -> None:
    with loading(48) as (source, sink, prefill, decode):
        keep, params = source.finish(prefill, "FINISHED_ABORTED")
        assert (keep, params) == (True, None)
        source.until(lambda: prefill.request_id in source.sent)
        sink.until(lambda: decode.request_id in sink.finished)
        assert sink.finished == {decode.request_id: "aborted"}
        assert sink.ask(decode) == (0, False)  # computed here


def test_an_abort_while_finding_gives_the_offer_up_once_it_is_found() -> None:
    with sides() as (source, sink):
        prefill, decode = pair_of(source, sink)
        sink.scheduler.on_new_request(decode)
        sink.step()
        assert sink.finish(decode, "FINISHED_ABORTED") == (False, None)
        assert sink.scheduler.num_open == 0
        begin(source, prefill)
        source.step([(prefill, 16)])
        sink.until(lambda: source.engine.count("offers.broken"))
        source.step([(prefill, 64)])
        keep, _ = source.finish(prefill, "FINISHED_LENGTH_CAPPED")
        assert keep
        source.until(lambda: prefill.request_id in source.sent)


@pytest.mark.parametrize("how", ["turned away", "drains"])
def test_what_is_not_taken_is_found_and_given_up(how: str) -> None:
    with sides() as (source, sink):
        prefill, decode = pair_of(source, sink)
        if how == "drains":
            sink.scheduler.drain()
            assert sink.scheduler.on_new_request(decode) is not None
        else:
            sink.scheduler.reject_request(decode)
        sink.step()
        begin(source, prefill)
        source.step([(prefill, len(PROMPT))])
        end(source, prefill)
        sink.until(lambda: source.engine.count("offers.broken"))
        source.until(lambda: prefill.request_id in source.sent)
        assert source.engine.count("refused.tokens") == 0


def test_an_abort_while_loading_gives_the_blocks_back_on_both_sides() -> None:
    with loading(16) as (source, sink, prefill, decode):
        sink.finish(decode, "FINISHED_ABORTED")
        sink.until(lambda: decode.request_id in sink.finished)
        assert sink.finished == {decode.request_id: "cancelled"}
        source.step([(prefill, 64)])
        source.finish(prefill, "FINISHED_LENGTH_CAPPED")
        source.until(lambda: prefill.request_id in source.sent)


def test_a_prefill_that_is_late_gives_the_blocks_back() -> None:
    with loading(16, early_wait_s=0.4) as (source, sink, prefill, decode):
        sink.until(lambda: decode.request_id in sink.finished)
        assert sink.finished == {decode.request_id: "deadline"}


# ------------------------------------------------------------------ blocks that early loads hold


def test_growing_loads_hold_no_more_than_their_share() -> None:
    with sides(early_share=0.25) as (source, sink):  # 96 of 24 * 16 tokens: one prompt of 80
        pairs = [pair_of(source, sink) for _ in range(2)]
        for number, (prefill, decode) in enumerate(pairs):
            prefill.table = tuple(
                tuple(i + 1 + 5 * number for i in range(5)) for _ in prefill.table
            )
            begin(source, prefill)
            sink.scheduler.on_new_request(decode)
            source.step([(prefill, 16)])
        (first, loading), (second, waiting) = pairs
        sink.until(lambda: is_found(sink, loading))
        sink.until(lambda: sink.scheduler._loads.wanted(waiting.request_id))
        sink.load(loading)
        assert sink.ask(waiting) == (None, False)
        source.step([(second, 64)])  # complete: it holds no blocks for a prefill
        end(source, second)
        load_found(sink, waiting)
        sink.until(lambda: waiting.request_id in sink.finished)
        source.step([(first, 64)])
        end(source, first)
        sink.until(lambda: len(sink.finished) == 2)
        assert set(sink.finished.values()) == {None}


def test_without_a_share_a_load_waits_until_its_offer_is_complete() -> None:
    with sides(early_share=0.0) as (source, sink):
        prefill, decode = pair_of(source, sink)
        begin(source, prefill)
        sink.scheduler.on_new_request(decode)
        source.step([(prefill, 64)])
        sink.until(lambda: sink.scheduler._loads.wanted(decode.request_id))
        assert sink.ask(decode) == (None, False)
        source.step([(prefill, 16)])
        end(source, prefill)
        sink.until(lambda: is_found(sink, decode))


@contextmanager
def waiting(**settings: Any) -> Iterator[tuple[Side, Side, Request, Request]]:
    """Decode waits until prefill's offer is complete, which has opened 48 tokens."""
    with sides(early_share=0.0, keep_s=0.2, **settings) as (source, sink):
        prefill, decode = pair_of(source, sink)
        begin(source, prefill)
        sink.scheduler.on_new_request(decode)
        source.step([(prefill, 48)])
        sink.until(lambda: sink.scheduler._loads.wanted(decode.request_id))
        assert sink.ask(decode) == (None, False)
        yield source, sink, prefill, decode


@pytest.mark.parametrize(
    ("how", "times"),
    [
        ("aborted", {}),
        ("shutdown", {}),
        ("peer_lost", {"early_wait_s": 3600.0}),
        ("unknown", {}),
    ],
)
def test_who_waits_for_the_whole_hears_that_it_will_not_come(
    how: str, times: dict[str, float]
) -> None:
    with waiting(**times) as (source, sink, prefill, decode), ExitStack() as stack:

        def is_told() -> bool:
            pass_s(sink.engine, 10.0)
            return is_found(sink, decode)

        if how == "aborted":
            source.finish(prefill, "FINISHED_ABORTED")
            source.step()
        elif how == "shutdown":
            source.engine.close()
        else:
            stack.enter_context(stuck(source.engine))
        if how == "peer_lost":
            sink.until(lambda: sink.engine.count("peers.ready"))
            service_of(sink.engine).io.post(only_peer_of(sink.engine).lost, "it has gone")
        if how in ("peer_lost", "unknown"):
            sink.until(is_told)
        sink.until(lambda: is_found(sink, decode))
        assert sink.ask(decode) == (0, False)
        assert sink.reasons() == {how: 1}
        assert sink.scheduler.num_open == 0
        sink.until(lambda: not kept_by(sink.engine))


def test_who_waits_for_the_whole_gets_that_of_the_next_offer() -> None:
    with waiting() as (source, sink, prefill, decode):
        source.step(preempted=frozenset({prefill.request_id}))
        prefill.computed = prefill.num_told = 0
        prefill.table = table_of(SHAPE, len(PROMPT), seed=5)
        source.step([(prefill, 48)])
        source.step([(prefill, 32)])
        end(source, prefill)
        load_found(sink, decode)
        sink.until(lambda: decode.request_id in sink.finished)
        assert sink.finished == {decode.request_id: None}
        expect_moved(source.engine, sink.engine, prefill.table, decode.table, {0: (0, HI)})
        source.until(lambda: prefill.request_id in source.sent)


def test_offers_that_do_not_grow_are_found_and_open_once() -> None:
    with sides(grow_offers=False) as (source, sink):
        prefill, decode = pair_of(source, sink)
        begin(source, prefill, num_cached=32)
        sink.scheduler.on_new_request(decode)
        source.step([(prefill, 32)])
        load_found(sink, decode)
        ref = decode.request_id
        source.step([(prefill, 16)])
        end(source, prefill)
        sink.until(lambda: ref in sink.finished)
        (report,) = sink.engine.reports(ref)
        assert {num_open for _, num_open in report.spans} - {0} == {80}
