"""Digests that a source makes before a sink asks for them: which, and that a sink gets those of the
very KV that it asks for.
"""

from __future__ import annotations

from functools import partial

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.connector.board import BoardView, nonce_of_digests
from kvxfer.connector.foresight import MOST_KINDS, MOST_MISSES, Foresight
from kvxfer.connector.given_offer import GivenOffer
from kvxfer.connector.records import SourceRef
from kvxfer.connector.worker_side import WorkerConnector
from kvxfer.transfer.plan import DenseOrder, PullClass, RegionName
from kvxfer.transfer.wire import Grant, Verdict, Verify
from tests.connector.inside import service_behind
from tests.connector.rig import Engine, expect_copied, has_foreseen, live_offers, until
from tests.connector.test_verify import (
    NUM_TOKENS,
    SINK_IDS,
    SOURCE_IDS,
    SPAN,
    Held,
    engines,
    held,
    load,
)
from tests.spoken import change_messages


def question(lo: int, hi: int, *, head: int = 0, every: int = 1) -> Verify:
    wanted = PullClass(
        regions=(RegionName("layer", ("k",)),),
        head_lo=head,
        head_hi=head + 1,
        inner_nbytes=64,
        order=DenseOrder(16, False),
        token_lo=lo,
        token_hi=hi,
    )
    return Verify(every, (wanted,))


def seen(verify: Verify, num_tokens: int) -> Foresight:
    foresight = Foresight()
    foresight.asked(verify, num_tokens)
    return foresight


@given(num_tokens=st.integers(2, 500), other=st.integers(1, 500), lo=st.integers(0, 40))
def test_the_same_is_expected_of_other_prompts(num_tokens: int, other: int, lo: int) -> None:
    """As far from the beginning and from the end."""
    expected = seen(question(0, num_tokens - 1), num_tokens).expected(other)
    assert expected == ([question(0, other - 1)] if other > 1 else [])
    lo = min(lo, num_tokens - 1)
    expected = seen(question(lo, num_tokens), num_tokens).expected(other)
    assert expected == ([question(lo, other)] if other > lo else [])


def test_each_rank_of_a_sink_asks_for_its_own_and_the_oldest_is_forgotten() -> None:
    foresight = Foresight()
    for head in range(MOST_KINDS + 1):
        foresight.asked(question(0, 10, head=head), 10)
    foresight.asked(question(0, 20, head=1), 20)  # of the second it is the last now
    heads = [each.classes[0].head_lo for each in foresight.expected(7)]
    assert heads == [*range(2, MOST_KINDS + 1), 1]


def test_what_is_not_asked_for_is_not_expected_any_more() -> None:
    foresight = seen(question(0, 10), 10)
    for _ in range(MOST_MISSES - 1):
        foresight.missed(question(0, 10), 10)
    foresight.asked(question(0, 30), 30)  # it begins anew
    for _ in range(MOST_MISSES - 1):
        foresight.missed(question(0, 20), 20)
    assert foresight.expected(10) == [question(0, 10)]
    foresight.missed(question(0, 20), 20)
    assert foresight.expected(10) == []
    foresight.missed(question(0, 20), 20)


@pytest.mark.parametrize("field", ["state_of", "cell_tokens"])
def test_of_states_and_cells_nothing_is_expected(field: str) -> None:
    """Their numbers are not those of the tokens."""
    (wanted,) = question(0, 10).classes
    other = msgspec.structs.replace(wanted, **{field: 4})
    assert seen(Verify(1, (wanted, other)), 10).expected(10) == []


# ------------------------------------------------------------------ between engines


@pytest.mark.parametrize("transport", ["shm", "zmq", "cuda_ipc"])
@pytest.mark.parametrize("is_late", [False, True], ids=["made", "in the making"])
def test_they_are_made_before_they_are_asked_for(transport: str, is_late: bool) -> None:
    with engines(transport, "all") as (source, sink):
        verifiers, ref = foreseen(source, sink, NUM_TOKENS - 16)
        if not is_late:
            end(source, verifiers)
        sink.load("e", ref, SINK_IDS, SPAN)
        if is_late:
            until(lambda: all(offer.checks for offer in live_offers(source)))
            assert not sink.received("e")
            end(source, verifiers)
        until(lambda: sink.received("e"))
        assert sink.reasons("e") == {None}
        assert all(len(each.dones) == 1 for each in verifiers)  # none was made again
        assert sink.count("verify.equal") == 4
        expect_copied(source, sink, SOURCE_IDS, SINK_IDS, SPAN)


def test_a_sink_that_asks_for_something_else_gets_that() -> None:
    """Its own prefix cache has the first tokens."""
    with engines("shm", "all") as (source, sink):
        verifiers, ref = foreseen(source, sink)
        sink.load("e", ref, SINK_IDS, (40, NUM_TOKENS))
        until(lambda: all(len(each.kept) == 2 for each in verifiers))
        end(source, verifiers)
        until(lambda: sink.received("e"))
        assert sink.reasons("e") == {None}


def test_digests_of_an_offer_that_has_changed_its_blocks_are_of_no_other() -> None:
    """What is written behind them is corrupt: a sink has read other bytes than were offered."""
    with engines("shm", "all") as (source, sink):
        verifiers, ref = foreseen(source, sink)
        for pool in source.pools:
            pool.tensor.add_(1)
        end(source, verifiers)
        sink.load("e", ref, SINK_IDS, SPAN)
        until(lambda: sink.received("e"))
        assert "corrupt" in sink.reasons("e")


@pytest.mark.parametrize("transport", ["shm", "cuda_ipc"])
def test_a_board_shows_them_and_no_answer_is_waited_for(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engines(transport, "all") as (source, sink):
        assert load(source, sink, "d") == {None}
        until(partial(source.sent, "d"))
        change_messages(
            monkeypatch, lambda said: () if isinstance(said, Grant | Verdict) else (said,)
        )
        ref = source.offer("e", NUM_TOKENS, SOURCE_IDS)
        source.compute("e")
        until(lambda: [*map(has_foreseen, live_offers(source))] == [True] * len(source.workers))
        offers = live_offers(source)
        assert all(map(shows, source.workers, offers))
        sink.load("e", ref, SINK_IDS, SPAN)
        until(lambda: sink.received("e"))
        assert sink.reasons("e") == {None}
        assert sink.count("verify.equal") == 4
        expect_copied(source, sink, SOURCE_IDS, SINK_IDS, SPAN)
        until(partial(source.sent, "e"))  # it has heard of it all the same
        assert not any(map(shows, source.workers, offers))


def shows(worker: WorkerConnector, offer: GivenOffer) -> bool:
    """Whether the rank's board has the digests that sinks have asked for of the offer before."""
    board = BoardView.open(worker.get_handshake_metadata().board)
    assert board is not None
    (question,) = service_behind(worker).source._foresight.expected(offer.num_tokens)
    found = board.digests(nonce_of_digests(offer.nonce, question))
    board.close()
    return found is not None


def test_offers_that_nobody_verifies_end_them() -> None:
    """And what could not be made is made when it is asked for."""
    with engines("shm", "all") as (source, sink):
        verifiers, ref = foreseen(source, sink)
        for worker, each in zip(source.workers, verifiers, strict=True):
            worker._service.io.post(each.dones.pop(), None)  # type: ignore[union-attr]
            each.kept = []
        sink.load("e", ref, SINK_IDS, SPAN)
        until(lambda: all(len(each.kept) == 1 for each in verifiers))
        end(source, verifiers)
        until(lambda: sink.received("e"))
        assert sink.reasons("e") == {None}
        num_made = [len(each.dones) for each in verifiers]
        for number in range(MOST_MISSES + 2):
            name, num_opened = f"unread {number}", source.count("offers.opened")
            source.offer(name, NUM_TOKENS, SOURCE_IDS)
            source.compute(name)
            until(partial(have_opened, source, num_opened + len(verifiers)))
            source.end(name)
            until(partial(source.sent, name))
        more = [len(each.dones) - before for each, before in zip(verifiers, num_made, strict=True)]
        assert more == [MOST_MISSES] * len(verifiers)


def foreseen(
    source: Engine, sink: Engine, num_tokens: int = NUM_TOKENS
) -> tuple[list[Held], SourceRef]:
    """A load ("d") of so many tokens, and another offer ("e"), whose digests are made and told to
    nobody.
    """
    assert load(source, sink, "d", (0, num_tokens)) == {None}
    verifiers = held(source)
    ref = source.offer("e", NUM_TOKENS, SOURCE_IDS)
    source.compute("e")
    until(lambda: all(len(each.kept) == 1 for each in verifiers))
    return verifiers, ref


def have_opened(source: Engine, num_offers: int) -> bool:
    return source.count("offers.opened") == num_offers


def end(source: Engine, verifiers: list[Held]) -> None:
    """Tell the source of the digests that are made."""
    for worker, verifier in zip(source.workers, verifiers, strict=True):
        verifier.end(worker)
        verifier.kept = []
