"""Offers that a sink asks for before it has found them: the first one of a router's id has a nonce
that can be known before it is told.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvxfer.connector import keeper, loads
from kvxfer.connector.board import BoardView
from kvxfer.connector.loads import LoadBook
from kvxfer.connector.records import (
    NO_ORDERS,
    AbortLoad,
    ConnectorMetadata,
    FoundOffer,
    Hold,
    SourceRef,
    Unhold,
)
from kvxfer.transfer.tokens import named_nonce, token_digest
from kvxfer.transfer.wire import MAX_EARLY, OfferRef, Reason
from tests.builders import EngineShape
from tests.connector.inside import service_behind
from tests.connector.rig import POISON, expect_moved, kept_by, until
from tests.connector.sides import Request, Side, table_of
from tests.connector.test_early import (
    HI,
    PROMPT,
    SHAPE,
    TWO,
    begin,
    end,
    has_read,
    load_found,
    pair_of,
    sides,
)

AHEAD: dict[str, Any] = {"early_ahead": 0.5}
"""Two prompts have room."""


def presume(sink: Side, decode: Request) -> None:
    """Decode asks, before anybody has heard of a prefill, and gets blocks at once."""
    assert sink.scheduler.on_new_request(decode) is None
    assert sink.ask(decode) == (HI, True)
    sink.load(decode)
    sink.step()


def early_of(decode: Request) -> dict[str, Any]:
    params = decode.kv_transfer_params
    assert params is not None
    early: dict[str, Any] = params["kvxfer"]
    return early


def nonce_of(decode: Request) -> bytes:
    early = early_of(decode)
    name, life = (bytes.fromhex(early[each]) for each in ("request", "incarnation"))
    return named_nonce(name, token_digest(decode.prompt_token_ids), life)


def minted(source: Side, prefill: Request) -> bytes:
    return source.scheduler._offers._offers[prefill.request_id].nonce


def num_parked(source: Side, decode: Request) -> list[int]:
    """Pulls of the offer that wait, at each rank of the source."""
    parked = [service_behind(each).source._parked for each in source.engine.workers]
    return [len(each._waiting.get(nonce_of(decode), ())) for each in parked]


def holds_nothing(sink: Side) -> bool:
    book = sink.scheduler._loads
    return not (book._presumed or book._growing or book._users or kept_by(sink.engine))


def is_over(sink: Side, decode: Request) -> bool:
    return decode.request_id in sink.finished


def expect_loaded(source: Side, sink: Side, prefill: Request, decode: Request) -> None:
    """All of it, and nothing is left of it on either side."""
    sink.until(lambda: is_over(sink, decode))
    assert sink.finished == {decode.request_id: None}
    expect_moved(source.engine, sink.engine, prefill.table, decode.table, {0: (0, HI)})
    source.until(lambda: prefill.request_id in source.sent)
    sink.until(lambda: holds_nothing(sink))


@pytest.mark.parametrize("wire", ["shm", "zmq"])
@pytest.mark.parametrize(
    ("source_shape", "sink_shape"), [(SHAPE, SHAPE), (TWO, SHAPE), (SHAPE, TWO)]
)
def test_decode_asks_for_an_offer_before_there_is_one(
    source_shape: EngineShape, sink_shape: EngineShape, wire: str
) -> None:
    """What prefill has cached leaves before decode has heard of it, and all else behind it."""
    settings = {**AHEAD, "transport": wire, "chunk_nbytes": 4096}
    with sides(source_shape, sink_shape, **settings) as (source, sink):
        prefill, decode = pair_of(source, sink)
        presume(sink, decode)
        num_sinks = len(sink.engine.workers)
        until(lambda: num_parked(source, decode) == [num_sinks] * len(source.engine.workers))
        begin(source, prefill, num_cached=32)
        source.step(
            [(prefill, 32)],
            compute=lambda: until(lambda: has_read(source, sink, prefill, decode, 32)),
        )
        source.step([(prefill, 16)])
        end(source, prefill)
        expect_loaded(source, sink, prefill, decode)


def test_an_offer_that_is_complete_is_read_though_nobody_has_said_which_it_is() -> None:
    with sides(**AHEAD) as (source, sink):
        prefill, decode = pair_of(source, sink)
        begin(source, prefill)
        source.step([(prefill, len(PROMPT))])
        end(source, prefill)
        presume(sink, decode)
        expect_loaded(source, sink, prefill, decode)


@pytest.mark.parametrize("verify", ["off", "all"])
def test_a_complete_offer_is_read_within_the_step(verify: str) -> None:
    """Where engines have met: the board shows it under the nonce that is presumed."""
    settings = {**AHEAD, "load_in_step_s": 1.0, "verify": verify}
    with sides(**settings) as (source, sink):
        for number in range(3):
            prefill, decode = pair_of(source, sink)
            begin(source, prefill)
            source.step([(prefill, len(PROMPT))])
            end(source, prefill)
            nonce = nonce_of(decode)
            until(lambda nonce=nonce: shows(source, nonce))  # type: ignore[misc]
            assert sink.scheduler.on_new_request(decode) is None
            assert sink.ask(decode) == (HI, not number)
            sink.load(decode)
            if not number:
                sink.until(lambda decode=decode: is_over(sink, decode))  # type: ignore[misc]
                sink.until(lambda: sink.scheduler._step_loads._near)
            assert sink.finished.pop(decode.request_id) is None
            expect_moved(source.engine, sink.engine, prefill.table, decode.table, {0: (0, HI)})
            sink.engine.pools[0].tensor.fill_(POISON)
            source.until(lambda prefill=prefill: prefill.request_id in source.sent)  # type: ignore[misc]
        sink.until(lambda: holds_nothing(sink))


def shows(source: Side, nonce: bytes) -> bool:
    board = BoardView.open(source.engine.workers[0].get_handshake_metadata().board)
    assert board is not None
    is_open = board.is_open(nonce)
    board.close()
    return is_open


@pytest.mark.parametrize("is_late", [False, True])
def test_a_prefill_that_was_preempted_is_found_again(is_late: bool) -> None:
    """Its first offer is over, and the next one has a nonce that nobody knows before; whether
    decode has asked for the first before or after.
    """
    with sides(**AHEAD) as (source, sink):
        prefill, decode = pair_of(source, sink)
        begin(source, prefill)
        source.step([(prefill, 16)])
        if not is_late:
            presume(sink, decode)
        source.step(preempted=frozenset({prefill.request_id}))
        if is_late:
            presume(sink, decode)
        sink.until(lambda: is_over(sink, decode))
        assert sink.finished.pop(decode.request_id) in ("ended", "preempted")
        assert sink.ask(decode) == (None, False)  # it is looked for, and not presumed again
        prefill.computed = prefill.num_told = 0
        prefill.table = table_of(SHAPE, len(PROMPT), seed=5)
        assert source.ask(prefill) == (0, False)
        source.step([(prefill, 48)])
        assert minted(source, prefill) != nonce_of(decode)
        load_found(sink, decode)
        source.step([(prefill, 32)])
        end(source, prefill)
        expect_loaded(source, sink, prefill, decode)


def test_an_id_that_comes_again_has_another_nonce() -> None:
    """A router that sends a request to prefill once more. Decode, which has presumed the first
    offer, is told of the one that there is now.
    """
    with sides(**AHEAD) as (source, sink):
        prefill, decode = pair_of(source, sink)
        begin(source, prefill)
        source.step([(prefill, len(PROMPT))])
        keep, _ = source.finish(prefill, "FINISHED_ABORTED")
        assert keep
        source.until(lambda: prefill.request_id in source.sent)
        again, _ = pair_of(source, sink, early_of(decode)["request"])
        again.request_id = "again"
        begin(source, again)
        source.step([(again, 48)])
        assert minted(source, again) != nonce_of(decode)
        presume(sink, decode)
        sink.until(lambda: is_over(sink, decode))
        assert sink.finished.pop(decode.request_id) in ("aborted", "preempted")
        load_found(sink, decode)
        source.step([(again, 32)])
        end(source, again)
        sink.until(lambda: is_over(sink, decode))
        assert sink.finished == {decode.request_id: None}


def test_another_prompt_of_the_id_fails_the_load_at_once() -> None:
    """By what is found: its Pull would wait for an offer that never comes."""
    with sides(**AHEAD) as (source, sink):
        prefill, decode = pair_of(source, sink)
        prefill.prompt_token_ids = PROMPT[::-1]
        begin(source, prefill)
        source.step([(prefill, 48)])
        presume(sink, decode)
        sink.until(lambda: is_over(sink, decode))
        assert sink.finished == {decode.request_id: "tokens"}
        assert sink.ask(decode) == (0, False)
        sink.until(lambda: holds_nothing(sink))
        end_of_other(source, prefill)


def end_of_other(source: Side, prefill: Request) -> None:
    """The offer of the other prompt was not given up: it is complete, and can be read."""
    source.step([(prefill, 32)])
    end(source, prefill)
    assert source.scheduler.num_open == 1


@pytest.mark.parametrize("begins", [True, False], ids=["prefill comes", "it never comes"])
def test_an_abort_gives_both_up(begins: bool) -> None:
    """The blocks at once, and the offer as soon as there is one."""
    with sides(**AHEAD, early_wait_s=300.0 if begins else 0.5) as (source, sink):
        prefill, decode = pair_of(source, sink)
        presume(sink, decode)
        until(lambda: num_parked(source, decode) == [1])
        sink.finish(decode, "FINISHED_ABORTED")
        sink.until(lambda: is_over(sink, decode))
        assert sink.finished == {decode.request_id: "cancelled"}
        if begins:
            begin(source, prefill)
            source.step([(prefill, len(PROMPT))])
            end(source, prefill)
            source.until(lambda: prefill.request_id in source.sent)
        sink.until(lambda: holds_nothing(sink))


def test_a_prefill_that_never_comes_gives_the_blocks_back() -> None:
    with sides(**AHEAD, early_wait_s=0.5) as (source, sink):
        _, decode = pair_of(source, sink)
        presume(sink, decode)
        sink.until(lambda: is_over(sink, decode))
        assert sink.finished[decode.request_id] == "unknown"
        assert sink.ask(decode) == (0, False)
        sink.until(lambda: holds_nothing(sink))
        until(lambda: num_parked(source, decode) == [0])


def test_such_loads_hold_no_more_than_their_share() -> None:
    """The third waits until its offer is found, or one of the others is; blocks are not all."""
    with sides(early_ahead=0.5, early_share=1.0) as (source, sink):  # 192 of 384 tokens
        pairs = [pair_of(source, sink) for _ in range(3)]
        for _, decode in pairs[:2]:
            presume(sink, decode)
        last = pairs[2][1]
        assert sink.scheduler.on_new_request(last) is None
        assert sink.ask(last) == (None, False)
        begin(source, pairs[0][0])
        source.step([(pairs[0][0], 16)])
        sink.until(lambda: sink.ask(last) == (HI, True))  # the first is no presumption any more


def test_no_more_are_presumed_than_a_source_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was aborted counts until its offer was found, or is known not to come."""
    assert 2 * loads.MAX_PRESUMED + keeper.MAX_ASKED == MAX_EARLY
    monkeypatch.setattr(loads, "MAX_PRESUMED", 1)
    with sides(**AHEAD) as (source, sink):
        prefill, first = pair_of(source, sink)
        presume(sink, first)
        sink.finish(first, "FINISHED_ABORTED")
        sink.until(lambda: is_over(sink, first))
        last = pair_of(source, sink)[1]
        assert sink.scheduler.on_new_request(last) is None
        assert sink.ask(last) == (None, False)
        begin(source, prefill)
        source.step([(prefill, 16)])
        sink.until(lambda: sink.ask(last) == (HI, True))


@pytest.mark.parametrize("how", ["older", "no share", "second of its id"])
def test_others_are_found_first(how: str) -> None:
    with sides(early_ahead=0.0 if how == "no share" else 0.5) as (source, sink):
        prefill, decode = pair_of(source, sink)
        if how == "older":
            del early_of(decode)["named_nonces"]
        if how == "second of its id":
            _, first = pair_of(source, sink, early_of(decode)["request"])
            first.request_id = "first"
            presume(sink, first)
        assert sink.scheduler.on_new_request(decode) is None
        assert sink.ask(decode) == (None, False)
        begin(source, prefill)
        source.step([(prefill, len(PROMPT))])
        end(source, prefill)
        if how != "second of its id":
            load_found(sink, decode)
            sink.until(lambda: is_over(sink, decode))
            assert sink.finished == {decode.request_id: None}


def test_a_request_that_has_all_in_its_own_cache_gives_the_offer_up() -> None:
    with sides(**AHEAD) as (source, sink):
        prefill, decode = pair_of(source, sink)
        assert sink.scheduler.on_new_request(decode) is None
        assert sink.ask(decode) == (HI, True)
        assert sink.ask(decode, HI) == (0, False)  # by now another has brought it
        sink.scheduler.update_state_after_alloc(decode, decode, 0)
        sink.finish(decode, "FINISHED_STOPPED")
        begin(source, prefill)
        source.step([(prefill, len(PROMPT))])
        end(source, prefill)

        def is_sent() -> bool:
            source.step()
            return prefill.request_id in source.sent

        sink.until(is_sent)
        assert holds_nothing(sink)


# ------------------------------------------------------------------ the book by itself


class Book:
    """A load that is presumed and begun; what the book orders then."""

    def __init__(self) -> None:
        self.book = LoadBook()
        self.book.most_growing_tokens = self.book.most_presumed_tokens = 1000
        self.request = Request("d", PROMPT)
        self.early = SourceRef(
            engine_id="prefill",
            endpoint="tcp://h:1",
            offer=OfferRef(b"n" * 16, b"i" * 16),
            num_tokens=0,
        )
        self.book.find(self.request, self.early, has_named_nonce=True)
        assert self.book.num_more_tokens("d", 0) == HI
        assert self.book.allocated("d", ((1, 2, 3, 4, 5),), HI) is None
        orders = self.book.step()
        (self.find,), (load,) = orders.finds, orders.loads
        self.source = load.source
        assert load.grows
        assert not orders.holds

    def found(self, offer: OfferRef | None, *, is_complete: bool = False) -> ConnectorMetadata:
        source = None if offer is None else msgspec.structs.replace(self.source, offer=offer)
        assert self.book.found(self.find.name, FoundOffer(source, is_complete)) == []
        return self.book.step()


def test_an_offer_that_is_found_behind_the_begin_is_held_until_the_load_has_ended() -> None:
    """Its ranks may have reported the load before they hear that it is to be held."""
    each = Book()
    assert each.found(each.source.offer).holds == (Hold("d", each.source),)
    assert each.found(each.source.offer, is_complete=True) == NO_ORDERS
    assert each.book.ended("d")
    assert each.book.step().unholds == (Unhold("d", each.source),)
    assert not each.book.has_orders()


def test_what_is_found_behind_the_end_is_not_held() -> None:
    each = Book()
    assert each.book.ended("d")
    assert each.found(each.source.offer) == NO_ORDERS


def test_what_is_found_behind_an_abort_is_given_up() -> None:
    """Where the Cancels of the ranks have come to nobody."""
    each = Book()
    assert each.book.finish("d") is None
    assert each.book.step().aborts == (AbortLoad("d", Reason.CANCELLED),)
    assert each.book.ended("d", "cancelled")
    orders = each.book.step()
    assert orders.finds == (msgspec.structs.replace(each.find, is_wanted=False),)
    assert each.found(each.source.offer).unholds == (
        Unhold(each.find.name, each.source, Reason.CANCELLED),
    )


@pytest.mark.parametrize(
    ("is_another", "reason"), [(True, Reason.PREEMPTED), (False, Reason.UNKNOWN)]
)
def test_a_load_of_another_offer_ends(is_another: bool, reason: Reason) -> None:
    """And the one that there is is looked for again."""
    each = Book()
    other = OfferRef(b"o" * 16, b"i" * 16) if is_another else None
    assert each.found(other).aborts == (AbortLoad("d", reason),)
    assert each.book.ended("d", reason)
    orders = each.book.step()
    assert orders.unholds == (Unhold("d", each.source, reason),)
    assert bool(orders.finds) == is_another
    assert each.book.num_more_tokens("d", 0) == (None if is_another else 0)
    assert not each.book._presumed
