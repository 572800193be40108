"""An engine ends its offers itself, before it lets their blocks go: whatever the IO thread does,
nothing of such an offer is accepted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvxfer.connector import rank_service
from kvxfer.connector.board import Board, BoardView, Ends, Posted
from kvxfer.connector.records import ConnectorMetadata
from kvxfer.transfer.wire import Reason
from tests.builders import EngineShape
from tests.connector.rig import HOST_WIRES, POISON, Engine, num_pulls, service_of, stuck, until
from tests.copies import HeldPieces, is_pack, is_unpack

ONE = EngineShape(num_kv_heads=2, num_blocks=64)
SPAN = (0, 64)
POSTED = Posted(None, 1, ((1,),))
WAIT_S = 120.0


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board()
    yield board
    board.close()


@pytest.fixture
def view(board: Board) -> Iterator[BoardView]:
    view = BoardView(board.handle)
    yield view
    view.close()


# ------------------------------------------------------------------ by itself


def test_an_end_takes_the_offer_off_the_board(board: Board, view: BoardView) -> None:
    ends, nonce = Ends(board), bytes(range(16))
    assert ends.show(nonce, POSTED) is True
    assert ends.reason(nonce) is None
    ends.end(nonce, Reason.PREEMPTED)
    assert not view.is_open(nonce)
    assert ends.reason(nonce) is Reason.PREEMPTED
    ends.end(nonce, Reason.RESET)
    assert ends.reason(nonce) is Reason.PREEMPTED  # the first one stays
    ends.forget(nonce)
    assert ends.reason(nonce) is None


def test_what_has_ended_is_not_shown_any_more(board: Board, view: BoardView) -> None:
    ends, nonce = Ends(board), bytes(range(16))
    ends.end(nonce, Reason.PREEMPTED)  # before the IO thread has heard of it
    assert ends.show(nonce, POSTED) is None
    assert not view.is_open(nonce)


def test_an_end_of_all_is_one_of_those_to_come(board: Board, view: BoardView) -> None:
    ends, shown, new = Ends(board), b"s" * 16, b"n" * 16
    assert ends.show(shown, POSTED)
    ends.end_all(Reason.SHUTDOWN)
    assert ends.show(new, POSTED) is None
    assert [view.is_open(nonce) for nonce in (shown, new)] == [False, False]
    assert {ends.reason(shown), ends.reason(new)} == {Reason.SHUTDOWN}


def test_without_a_board_ends_are_remembered() -> None:
    ends, nonce = Ends(), bytes(range(16))
    assert ends.show(nonce, POSTED) is None
    ends.hide(nonce)
    ends.end(nonce, Reason.RESET)
    assert ends.reason(nonce) is Reason.RESET


def test_an_end_that_meets_an_opening_is_never_overtaken(board: Board, view: BoardView) -> None:
    """One thread shows offers, the other ends each at some moment around that."""
    ends = Ends(board)
    nonces = [i.to_bytes(8, "little") * 2 for i in range(1, 4001)]
    meet = threading.Barrier(2)
    seen: list[bytes] = []

    def show() -> None:
        for nonce in nonces:
            meet.wait(WAIT_S)
            ends.show(nonce, POSTED)

    opening = threading.Thread(target=show)
    opening.start()
    for nonce in nonces:
        meet.wait(WAIT_S)
        ends.end(nonce, Reason.PREEMPTED)
        seen += [nonce] * view.is_open(nonce)
    opening.join(WAIT_S)
    seen += [nonce for nonce in nonces if view.is_open(nonce)]
    assert seen == []


# ------------------------------------------------------------------ a stuck IO thread


def overwrite(engine: Engine) -> None:
    """The engine uses the blocks again."""
    engine.pools[0].tensor.fill_(0x55)


@pytest.mark.parametrize("has_board", [True, False])
def test_blocks_that_are_used_again_are_never_accepted_while_the_source_is_stuck(
    monkeypatch: pytest.MonkeyPatch, has_board: bool
) -> None:
    held = HeldPieces(monkeypatch, "shm")
    with (
        Engine(ONE, "prefill", fill=1, transport="shm", offer_board=has_board) as source,
        Engine(ONE, "decode", fill=POISON, transport="shm", offer_board=has_board) as sink,
    ):
        ref = source.offer("p", 64, range(4))
        source.compute("p")
        sink.load("d", ref, range(4), SPAN)
        assert held.has_begun.wait(WAIT_S)
        with stuck(source):
            # It returns although the IO thread cannot answer
            ended = ConnectorMetadata(ended=(source.end_of("p", Reason.PREEMPTED),))
            source.workers[0].handle_preemptions(ended)
            overwrite(source)
            held.may_end.set()
            until(lambda: sink.count("control.retries") or sink.received("d"), WAIT_S)
            if sink.received("d"):
                assert None not in sink.reasons("d")
        until(lambda: sink.received("d"), WAIT_S)
        assert sink.reasons("d") == {"preempted"}
        until(lambda: source.sent("p"))


def test_a_chunk_that_was_packed_while_the_source_was_stuck_is_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = HeldPieces(monkeypatch, "zmq", is_pack)
    with (
        Engine(ONE, "prefill", fill=1, transport="zmq") as source,
        Engine(ONE, "decode", fill=POISON, transport="zmq") as sink,
    ):
        ref = source.offer("p", 64, range(4))
        source.compute("p")
        sink.load("d", ref, range(4), SPAN)
        assert held.has_begun.wait(WAIT_S)
        # The end as the engine writes it. Its order is kept back: the IO thread knows only that.
        service_of(source).ends.end(source.nonces["p"], Reason.PREEMPTED)
        overwrite(source)
        held.may_end.set()
        until(lambda: sink.received("d"), WAIT_S)
        assert sink.reasons("d") == {"preempted"}
        assert bool((sink.pools[0].tensor == POISON).all())
        until(lambda: source.sent("p"))


def test_a_release_behind_an_end_that_the_io_thread_has_not_heard_of_is_invalid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = HeldPieces(monkeypatch, "shm")
    with (
        Engine(ONE, "prefill", fill=1, transport="shm", offer_board=False) as source,
        Engine(ONE, "decode", fill=POISON, transport="shm", offer_board=False) as sink,
    ):
        ref = source.offer("p", 64, range(4))
        source.compute("p")
        sink.load("d", ref, range(4), SPAN)
        assert held.has_begun.wait(WAIT_S)
        service_of(source).ends.end(source.nonces["p"], Reason.RESET)
        held.may_end.set()
        until(lambda: sink.received("d"), WAIT_S)
        assert sink.reasons("d") == {"reset"}


def test_an_offer_that_ended_before_it_was_ready_never_opens() -> None:
    with Engine(ONE, "prefill", fill=1, transport="shm") as source:
        source.offer("p", 64, range(4))
        service_of(source).ends.end(source.nonces["p"], Reason.PREEMPTED)
        source.compute("p")
        until(lambda: source.sent("p"))
        assert not source.count("board.posted")
        assert source.take_stats().reasons == {"preempted": 1}


def test_a_shutdown_ends_every_offer_also_where_the_io_thread_is_stuck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_service, "DRAIN_S", 0.05)
    source = Engine(ONE, "prefill", fill=1, transport="shm")
    source.offer("p", 64, range(4))
    source.compute("p")
    handle = source.manifest.ranks[0].board
    assert handle is not None
    view = BoardView(handle)
    until(lambda: view.is_open(source.nonces["p"]))
    service = service_of(source)
    with stuck(source):
        source.close()
        assert not view.is_open(source.nonces["p"])
    until(lambda: service.io.stop(WAIT_S))
    service.shutdown()  # of what it had to leave
    view.close()


@pytest.mark.parametrize("wire", HOST_WIRES)
def test_an_offer_that_is_taken_back_in_the_middle_of_a_load_fails_it(
    wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The sink is slow with its credits: a stream of two slots is in the middle when it is broken.
    held = HeldPieces(monkeypatch, wire, lambda job: wire == "shm" or is_unpack(job))
    settings: dict[str, Any] = {"transport": wire, "chunk_nbytes": 4096, "staging_slots": 2}
    with (
        Engine(ONE, "prefill", fill=1, **settings) as source,
        Engine(ONE, "decode", fill=POISON, **settings) as sink,
    ):
        ref = source.offer("p", 960, range(60))
        source.compute("p")
        sink.load("d", ref, range(60), (0, 960))
        until(lambda: source.count("offers.opened") and sink.count("peers.ready"))
        until(lambda: num_pulls(source, source.nonces["p"]))
        source.end("p", Reason.PREEMPTED)
        until(lambda: source.sent("p"))
        held.may_end.set()
        until(lambda: sink.received("d"), WAIT_S)
        assert sink.reasons("d") == {"preempted"}
