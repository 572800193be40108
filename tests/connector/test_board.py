"""Offers that a sink of the same host sees for itself: what the board says is true when it says it,
and whatever it does not say, the source says by message.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.connector import sink as sink_module
from kvxfer.connector.board import (
    NUM_SLOTS,
    PROBES,
    SLOT_NBYTES,
    Board,
    BoardView,
    Ends,
    Posted,
    nonce_of_digests,
)
from kvxfer.connector.records import ConnectorMetadata
from kvxfer.errors import TransportUnavailable
from kvxfer.transfer.manifest import MemfdHandle
from kvxfer.transfer.session import Break
from kvxfer.transfer.source_session import OfferSession
from kvxfer.transfer.wire import Broken, Grant, Reason, Refuse, Verdict, Verify
from tests.builders import EngineShape
from tests.connector.rig import (
    DIGEST,
    POISON,
    STUCK_S,
    Engine,
    expect_copied,
    num_pulls,
    pass_s,
    stuck,
    until,
    watch_reports,
)
from tests.copies import HeldPieces
from tests.spoken import change_messages, watch_messages

ONE = EngineShape(num_kv_heads=2, num_blocks=64)
SPAN = (0, 64)
OFFER = Posted(b"digest", 33, ((7, 8, -1), (), (70_000,)))


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


# ------------------------------------------------------------------ the board by itself


def test_an_offer_is_there_as_long_as_it_is_open(board: Board, view: BoardView) -> None:
    nonce, other = bytes(range(16)), bytes(range(1, 17))
    assert view.find(nonce) is None
    assert not view.is_open(nonce)
    assert board.post(nonce, OFFER)
    assert view.find(nonce) == OFFER
    assert view.is_open(nonce)
    assert view.find(other) is None
    board.end(nonce)
    assert view.find(nonce) is None
    assert not view.is_open(nonce)
    board.end(nonce)  # unknown by now


def test_both_words_of_a_nonce_count(board: Board, view: BoardView) -> None:
    nonce = b"\x01" * 16
    assert board.post(nonce, OFFER)
    assert view.find(b"\x01" * 8 + b"\x02" * 8) is None
    assert view.find(b"\x02" * 8 + b"\x01" * 8) is None


@pytest.mark.parametrize("nonce", [b"", b"\x00", b"\x01" * 15, b"\x01" * 17, b"\x01" * 64])
def test_a_nonce_that_no_source_draws_is_not_found(view: BoardView, nonce: bytes) -> None:
    assert view.find(nonce) is None
    assert not view.is_open(nonce)


def test_a_slot_is_used_again(board: Board, view: BoardView) -> None:
    """All of these begin their search at the same slot; no more of them fit at once."""
    nonces = [b"\x05" * 8 + bytes([i]) * 8 for i in range(PROBES + 2)]
    offers = [replace_ids(number) for number in range(len(nonces))]
    posted = [board.post(*each) for each in zip(nonces, offers, strict=True)]
    assert posted == [True] * PROBES + [False, False]
    board.end(nonces[3])
    assert board.post(nonces[PROBES], offers[PROBES])
    assert not board.post(nonces[PROBES + 1], offers[PROBES + 1])
    found = [view.find(nonce) for nonce in nonces]
    assert found == [*offers[:3], None, *offers[4 : PROBES + 1], None]


def replace_ids(number: int) -> Posted:
    return Posted(None, number, ((number,) * number,))


def test_what_does_not_fit_is_not_shown(board: Board, view: BoardView) -> None:
    few, many = Posted(None, 1, (tuple(range(3000)),)), Posted(None, 1, (tuple(range(9000)),))
    assert not board.post(b"m" * 16, many)
    assert view.find(b"m" * 16) is None
    assert board.post(b"f" * 16, few)
    assert view.find(b"f" * 16) == few


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 11)), max_size=60))
def test_it_says_what_a_dictionary_says(steps: list[tuple[bool, int]]) -> None:
    """Nonces that collide, in any order of begins and ends."""
    board = Board()
    view = BoardView(board.handle)
    try:
        said: dict[int, Posted] = {}
        for number, (begins, which) in enumerate(steps):
            # A nonce is used once: the step makes it another one in the same slots.
            if begins and which not in said:
                offer = replace_ids(number)
                if board.post(_colliding(which, number), offer):
                    said[which] = offer
                else:
                    assert len(said) >= PROBES
            elif not begins and which in said:
                board.end(_colliding(which, said.pop(which).num_tokens))
            for each, offer in said.items():
                assert view.find(_colliding(each, offer.num_tokens)) == offer
        for which in range(12):
            for number in range(len(steps)):
                is_said = which in said and said[which].num_tokens == number
                assert view.is_open(_colliding(which, number)) == is_said
    finally:
        view.close()
        board.close()


def _colliding(which: int, number: int) -> bytes:
    first = which % 3 + NUM_SLOTS * 5  # three neighbours
    return first.to_bytes(8, sys.byteorder) + (which * 1000 + number).to_bytes(8, sys.byteorder)


def test_digests_stand_beside_their_offer_by_its_nonce_and_the_question(
    board: Board, view: BoardView
) -> None:
    ends, nonce, one, other = Ends(board), b"n" * 16, Verify(1, ()), Verify(16, ())
    ends.show_digests(nonce, one, ((1 << 64) - 1, 0))
    assert view.digests(nonce_of_digests(nonce, one)) == ((1 << 64) - 1, 0)
    assert view.digests(nonce_of_digests(nonce, other)) is None
    assert view.digests(nonce_of_digests(b"m" * 16, one)) is None
    assert not view.is_open(nonce)  # they say nothing of the offer
    ends.hide_digests(nonce, other)
    assert view.digests(nonce_of_digests(nonce, one)) is not None
    ends.hide_digests(nonce, one)
    assert view.digests(nonce_of_digests(nonce, one)) is None


def test_a_closed_board_says_that_all_is_over(view: BoardView, board: Board) -> None:
    board.post(b"n" * 16, OFFER)
    board.close()
    assert not view.is_open(b"n" * 16)
    with pytest.raises(TransportUnavailable, match="no such process or descriptor"):
        BoardView(board_handle(board, fd=10_000))


def board_handle(board: Board, **other: Any) -> MemfdHandle:
    handle = board.handle
    fields = {name: getattr(handle, name) for name in handle.__struct_fields__}
    return MemfdHandle(**{**fields, **other})


def test_only_a_board_that_can_be_seen_is_looked_at(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert BoardView.open(None) is None
    for other in ({"boot_id": "elsewhere"}, {"nonce": b"x" * 16}, {"nbytes": SLOT_NBYTES}):
        assert BoardView.open(board_handle(board, **other)) is None
    seen = BoardView.open(board.handle)
    assert seen is not None
    seen.close()
    seen.close()
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert BoardView.open(board.handle) is None
    assert Board.make() is None


def test_a_board_that_holds_nonsense_says_nothing(board: Board, view: BoardView) -> None:
    nonce = b"n" * 16
    board.post(nonce, OFFER)
    (slot,) = board._posted.values()
    board._words[slot + 3] = SLOT_NBYTES  # more than there can be
    assert view.find(nonce) is None
    board._words[slot + 3] = 3  # cut off
    assert view.find(nonce) is None


class Watched:
    """The words of a board, which a reader may look at before any of them is written."""

    def __init__(self, words: Any, look: Callable[[], None]) -> None:
        self._words, self._look = words, look

    def __getitem__(self, index: int) -> Any:
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._words[index] = value
        self._look()

    def release(self) -> None:
        self._words.release()


def test_an_entry_is_whole_whenever_it_is_open(
    board: Board, view: BoardView, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look after each word that is written, in a slot that held another offer before."""
    before, nonce = b"\x05" * 16, b"\x05" * 8 + b"\x06" * 8
    assert board.post(before, Posted(b"other", 7, ((1, 2, 3),)))
    board.end(before)
    seen: list[Posted | None] = []
    monkeypatch.setattr(
        board, "_words", Watched(board._words, lambda: seen.append(view.find(nonce)))
    )
    assert board.post(nonce, OFFER)
    assert set(seen) == {None, OFFER}
    seen.clear()
    board.end(nonce)
    assert seen == [None]


class Changing:
    """The bytes of a board where a slot changes hands while somebody copies it."""

    def __init__(self, real: Any, change: Callable[[], None]) -> None:
        self._real, self._change = real, change

    def __getitem__(self, span: slice) -> Any:
        self._change()
        return self._real[span]

    def release(self) -> None:
        self._real.release()


@pytest.mark.parametrize("follows", [True, False])
def test_an_entry_that_changes_hands_while_it_is_copied_is_not_taken(
    board: Board, view: BoardView, monkeypatch: pytest.MonkeyPatch, follows: bool
) -> None:
    nonce, other = b"\x05" * 16, b"\x05" * 8 + b"\x06" * 8
    assert board.post(nonce, OFFER)

    def change() -> None:
        board.end(nonce)
        if follows:
            assert board.post(other, Posted(None, 7, ((1, 2, 3),)))

    monkeypatch.setattr(view, "_bytes", Changing(view._bytes, change))
    assert view.find(nonce) is None


WRITER = """
import sys
from kvxfer.connector.board import Board, Posted
board = Board()
handle = board.handle
print(handle.boot_id, handle.pid, handle.fd, handle.nbytes, handle.nonce.hex(), flush=True)
number, before = 0, b""
while True:
    number += 1
    nonce = (5).to_bytes(8, sys.byteorder) + number.to_bytes(8, sys.byteorder)
    board.post(nonce, Posted(None, number, ((number,) * (number % 900),)))
    board.end(before)
    before = nonce
"""


def test_what_another_process_sees_is_never_half_an_entry() -> None:
    """Two slots change hands as fast as they can; each entry holds its own number all over."""
    process = subprocess.Popen([sys.executable, "-c", WRITER], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        boot_id, pid, fd, nbytes, nonce = process.stdout.readline().split()
        handle = MemfdHandle(
            boot_id=boot_id,
            pid=int(pid),
            fd=int(fd),
            nbytes=int(nbytes),
            nonce=bytes.fromhex(nonce),
        )
        view = BoardView(handle)
        seen: set[int] = set()
        until_s = time.monotonic() + 240
        while len(seen) < 100 and time.monotonic() < until_s:
            number = view._words[5 * SLOT_NBYTES // 8 + 2]
            wanted = (5).to_bytes(8, sys.byteorder) + number.to_bytes(8, sys.byteorder)
            found = view.find(wanted)
            if found is not None:
                seen.add(number)
                assert found == Posted(None, number, ((number,) * (number % 900),))
        view.close()
        process.kill()
    assert len(seen) == 100


# ------------------------------------------------------------------ between two engines


def prefill(**more: Any) -> Engine:
    return Engine(ONE, "prefill", fill=None, transport="shm", **more)


def decode(**more: Any) -> Engine:
    return Engine(ONE, "decode", fill=POISON, transport="shm", **more)


def offered(source: Engine, name: str = "p") -> Any:
    ref = source.offer(name, 64, range(4))
    source.compute(name)
    until(lambda: source.count("offers.opened"))
    return ref


def silence(monkeypatch: pytest.MonkeyPatch, *kinds: type) -> None:
    """The source never says any of these."""
    change_messages(monkeypatch, lambda said: () if isinstance(said, kinds) else (said,))


def test_a_load_waits_for_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    silence(monkeypatch, Grant, Verdict)
    with prefill() as source, decode() as sink:
        sink.load("d", offered(source), range(10, 14), SPAN)
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {None}
        expect_copied(source, sink, range(4), range(10, 14), SPAN)
        assert (sink.count("board.grants"), sink.count("board.verdicts")) == (1, 1)
        until(lambda: source.sent("p"))  # it has heard of the read all the same
        assert source.count("offers.done") == 1
        assert not source.count("offers.broken")


@pytest.mark.parametrize("blind", ["source", "sink"])
def test_without_a_board_every_answer_comes_by_message(blind: str) -> None:
    with (
        prefill(offer_board=blind != "source") as source,
        decode(offer_board=blind != "sink") as sink,
    ):
        sink.load("d", offered(source), range(4), SPAN)
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {None}
        expect_copied(source, sink, range(4), range(4), SPAN)
        assert sink.count("board.grants") == sink.count("board.verdicts") == 0
        assert source.count("board.posted") == int(blind == "sink")
        until(lambda: source.count("offers.done"))


def test_every_rank_looks_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks read four; the head that two of these hold is read from one, with a null route to
    the other.
    """
    silence(monkeypatch, Grant, Verdict)
    shape = EngineShape(num_kv_heads=2, num_blocks=16)
    with (
        Engine(replace(shape, tp_size=4), "prefill", fill=3, transport="shm") as source,
        Engine(replace(shape, tp_size=1), "decode", fill=POISON, transport="shm") as sink,
    ):
        ref = source.offer("p", 64, range(4))
        source.compute("p")
        until(lambda: source.count("offers.opened") == 4)
        sink.load("d", ref, range(4), SPAN)
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {None}
        expect_copied(source, sink, range(4), range(4), SPAN)
        assert sink.count("board.verdicts") == 4
        until(lambda: source.sent("p"))


def test_other_tokens_are_refused_by_the_source() -> None:
    with prefill() as source, decode() as sink:
        ref = offered(source)
        sink.load("d", ref, range(4), SPAN, b"x" * 32)
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"tokens"}
        assert sink.count("board.grants") == 0
        sink.load("d2", ref, range(4), SPAN, DIGEST)
        until(lambda: sink.received("d2"))
        assert sink.reasons("d2") == {None}


def test_an_offer_that_is_not_open_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_module, "RETRY_S", 300.0)  # it would look at the board again
    with prefill() as source, decode() as sink:
        ref = source.offer("p", 64, range(4))
        sink.load("d", ref, range(4), SPAN)
        until(lambda: num_pulls(source, ref.offer.nonce))  # it has looked, and asked
        source.compute("p")
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {None}
        assert (sink.count("board.grants"), sink.count("board.verdicts")) == (0, 1)


@pytest.mark.parametrize("unsaid", [(), (Broken, Refuse)], ids=["told", "not told"])
def test_an_offer_that_ends_during_the_read_is_not_accepted(
    monkeypatch: pytest.MonkeyPatch, unsaid: tuple[type, ...]
) -> None:
    silence(monkeypatch, *unsaid)
    held = HeldPieces(monkeypatch, "shm")
    with prefill() as source, decode() as sink:
        ref = offered(source)
        until(lambda: source.count("board.posted"))
        sink.load("d", ref, range(4), SPAN)
        until(lambda: sink.count("board.grants"))
        source.end("p", Reason.PREEMPTED)
        held.may_end.set()
        until(lambda: sink.received("d"))
        # "ended" where the source learns of the load after the end
        assert sink.reasons("d") <= {"preempted", "ended"}
        assert sink.count("board.verdicts") == 0


@pytest.mark.parametrize("ids", [(0, 1, 2), (0, 1, 2, 64), (0, 1, 2, -1)])
def test_ids_on_a_board_are_checked_like_those_of_a_grant(
    board: Board, ids: tuple[int, ...]
) -> None:
    with prefill(announce=False) as source, decode() as sink:
        (entry,) = source.manifest.ranks
        lying = msgspec.structs.replace(entry, board=board.handle)
        manifest = msgspec.structs.replace(source.manifest, ranks=(lying,))
        source.step(ConnectorMetadata(manifest=manifest))
        ref = offered(source)
        assert board.post(ref.offer.nonce, Posted(DIGEST, 64, (ids,)))
        sink.load("d", ref, range(4), SPAN)
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"plan"}
        assert bool((sink.pools[0].tensor == POISON).all())


def test_tokens_beyond_those_on_the_board_are_not_read() -> None:
    with prefill() as source, decode() as sink:
        ref = msgspec.structs.replace(offered(source), num_tokens=80)
        sink.load("d", ref, range(5), (0, 80))
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"plan"}


Ending = Callable[[Engine], object]


@pytest.mark.parametrize("ending", ["ended", "expired", "done", "shut down", "cannot be broken"])
def test_the_board_says_so_before_anything_is_freed(
    monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """When an offer's blocks are reported, and when its session cannot end it, sinks know."""
    views: list[BoardView] = []
    were_open: list[bool] = []
    nonce = b""

    if ending == "cannot be broken":
        watch_messages(monkeypatch, _fail_at(lambda _: None, 0, Grant))
        monkeypatch.setattr(OfferSession, "step", _fail_at(OfferSession.step, 1, Break))
    source = prefill(keep_s=0.05)
    (entry,) = source.manifest.ranks
    assert entry.board is not None
    views.append(BoardView(entry.board))
    watch_reports(monkeypatch, source, lambda: were_open.append(views[0].is_open(nonce)))
    with decode() as sink:
        ref = source.offer("p", 64, range(4))
        nonce = ref.offer.nonce
        source.compute("p")
        until(lambda: views[0].is_open(nonce))
        if ending == "ended":
            source.end("p")
        elif ending == "expired":
            pass_s(source, 300.0)
        elif ending == "done":
            sink.load("d", ref, range(4), SPAN)
        elif ending == "cannot be broken":
            # The engine, which takes an offer down itself, has ended nothing.
            sink.load("d", ref, range(4), SPAN)
            until(lambda: not views[0].is_open(nonce))
            assert source.count("offers.unforeseen") == 2  # the Grant, and the end
            monkeypatch.undo()
        elif ending == "shut down":
            source.close()
        if ending not in ("shut down", "cannot be broken"):
            until(lambda: source.sent("p"))
        if ending != "cannot be broken":
            assert were_open == [False]
    assert not views[0].is_open(nonce)
    if ending != "shut down":
        source.close()
    views[0].close()


def _fail_at(call: Callable[..., Any], position: int, kind: type) -> Callable[..., Any]:
    """``call``, which raises where its argument at that place is of this kind."""

    def failing(*arguments: Any) -> Any:
        if isinstance(arguments[position], kind):
            raise OSError("unforeseen")
        return call(*arguments)

    return failing


def test_a_load_reads_from_a_source_that_does_not_answer_now() -> None:
    """Its blocks are what it offered, whether it is busy, stopped or slow."""
    with prefill() as source, decode() as sink:
        ref = offered(source)
        sink.load("first", ref, range(4), SPAN)
        until(lambda: sink.received("first"))
        ref = source.offer("p2", 64, range(4, 8))
        source.compute("p2")
        until(lambda: source.count("offers.opened") == 2)
        with stuck(source):
            sink.load("d", ref, range(8, 12), SPAN)
            until(lambda: sink.received("d"), STUCK_S / 2)
        assert sink.reasons("d") == {None}
        until(lambda: source.sent("p2"))


def test_a_stream_does_not_look() -> None:
    with (
        Engine(ONE, "prefill", fill=1, transport="zmq") as source,
        Engine(ONE, "decode", fill=POISON, transport="zmq") as sink,
    ):
        assert source.manifest.ranks[0].board is None
        sink.load("d", offered(source), range(4), SPAN)
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {None}
        assert sink.count("board.grants") == source.count("board.posted") == 0
