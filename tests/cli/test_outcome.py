"""Judging a run: what counts as equal, over which tokens, and what decides. By hand."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.cli.outcome import (
    Answers,
    KvCheck,
    Result,
    TokenDifference,
    Transfer,
    busy_s,
    judge,
    summarise,
    transfer,
)
from kvxfer.connector.records import LoadReport
from kvxfer.engine.digest import KVDigest, PlaneDigest
from kvxfer.engine.rpc import Done, Token
from kvxfer.transfer.wire import Reason


def token(token_id: int, gap: float = 0.5) -> Token:
    return Token("r", token_id, gap)


def digest(tokens: str, *, head: int = 0) -> KVDigest:
    """One letter per token; a digest is 8 bytes."""
    packed = b"".join(letter.encode() * 8 for letter in tokens)
    plane = PlaneDigest(layer="l0", plane="k", head=head, tokens=packed)
    return KVDigest(num_tokens=len(tokens), planes=(plane,))


def kept(tokens: str, first_token: int) -> KVDigest:
    """As ``digest``; the tokens before ``first_token`` are out of the window."""
    (plane,) = digest(tokens).planes
    plane = msgspec.structs.replace(
        plane, tokens=plane.tokens[8 * first_token :], first_token=first_token
    )
    return KVDigest(num_tokens=len(tokens), planes=(plane,))


def done(**changes: object) -> Done:
    end = Done(
        request_id="r",
        status="FINISHED_LENGTH_CAPPED",
        kv_transfer_params=None,
        num_prompt_tokens=8,
        num_cached_tokens=0,
        num_external_tokens=0,
        failure=None,
        loads=(),
        digests=(),
    )
    return msgspec.structs.replace(end, **changes)


def load(nbytes: int, started_s: float, finished_s: float, **changes: object) -> LoadReport:
    report = LoadReport(
        request_id="r",
        reason=None,
        nbytes=nbytes,
        started_s=started_s,
        finished_s=finished_s,
        transports=("shm",),
    )
    return msgspec.structs.replace(report, **changes)


def moved(nbytes: int, granted_s: float, placed_s: float, wire: str = "shm") -> Transfer:
    """Ordered a second before it could be read, and over half a second after it was."""
    return Transfer(nbytes, (wire,), granted_s - 1, granted_s, placed_s, placed_s + 0.5)


def test_reading_is_timed_apart_from_waiting_and_from_the_verdict() -> None:
    """Ranks that wait and read at different times: from the first to the last of each."""
    first = load(10**9, 5.0, 9.0, handed_s=4.5, granted_s=6.0, placed_s=6.5)
    last = load(10**9, 5.25, 8.0, handed_s=4.75, granted_s=6.25, placed_s=7.0)
    found = transfer([first, msgspec.structs.replace(last, transports=("zmq", "shm"))])
    assert found == Transfer(2 * 10**9, ("shm", "zmq"), 4.5, 6.0, 7.0, 9.0)
    assert (found.wait_s, found.read_s, found.gbps) == (1.5, 1.0, 2.0)


def test_bytes_that_came_before_the_answer_were_read_from_the_pull_on() -> None:
    found = transfer([load(10**9, 5.0, 7.5, placed_s=7.0)])
    assert found == Transfer(10**9, ("shm",), 5.0, 5.0, 7.0, 7.5)
    assert (found.wait_s, found.read_s) == (0.0, 2.0)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=8))
def test_time_in_which_something_was_read(spans: list[tuple[int, int]]) -> None:
    """Against counting each tick."""
    ticks = {tick for begin, length in spans for tick in range(begin, begin + length)}
    assert busy_s([(begin, begin + length) for begin, length in spans]) == len(ticks)


def test_ranks_that_moved_nothing_do_not_count() -> None:
    assert transfer([]) is None
    assert transfer([load(0, 0.0, 0.0), load(0, 5.0, 6.0)]) is None
    found = transfer([load(0, 0.0, 0.0), load(8, 5.0, 6.0)])
    assert found == Transfer(8, ("shm",), 5.0, 5.0, 6.0, 6.0)
    assert moved(8, 5.0, 5.0).gbps is None


def test_equal_tokens() -> None:
    answers = Answers(
        prefill=done(num_cached_tokens=3),
        prefill_tokens=[token(1)],
        decode=done(num_cached_tokens=2),
        tokens=[token(1), token(2)],
        single=[token(1), token(2)],
    )
    result = judge("a", 8, answers)
    assert result.tokens_equal is True
    assert result.token_difference is None
    assert (result.num_prefill_cached_tokens, result.num_decode_cached_tokens) == (3, 2)
    assert result.token_ids == (1, 2)
    assert result.is_good(tokens_decide=True)


def test_a_prefill_that_left_the_last_token_out_answers_nothing() -> None:
    """As with layers that keep a state: decode computes that token."""
    answers = Answers(
        prefill=done(num_prompt_tokens=7),
        prefill_tokens=[token(9)],
        decode=done(),
        tokens=[token(1)],
        single=[token(1)],
    )
    assert judge("a", 8, answers).tokens_equal is True


@pytest.mark.parametrize(
    ("prefill", "tokens", "difference"),
    [
        ([1], [1, 3], TokenDifference(1, 3, 2, 0.5, 0.25)),
        ([1], [1], TokenDifference(1, None, 2, None, 0.25)),
        ([1], [1, 2, 3], TokenDifference(2, 3, None, 0.5, None)),
        ([9], [1, 2], TokenDifference(0, 9, 1, 0.5, 0.25)),
    ],
)
def test_the_first_different_token(
    prefill: list[int], tokens: list[int], difference: TokenDifference
) -> None:
    answers = Answers(
        prefill=done(),
        prefill_tokens=[token(i) for i in prefill],
        decode=done(),
        tokens=[token(i) for i in tokens],
        single=[token(1, 0.25), token(2, 0.25)],
    )
    result = judge("a", 8, answers)
    assert result.tokens_equal is False
    assert result.token_difference == difference
    assert not result.is_good(tokens_decide=True)
    assert result.is_good(tokens_decide=False)


def test_a_difference_in_words() -> None:
    assert str(TokenDifference(3, 7, None, 0.0123, None)) == (
        "token 3: expected None, got 7 (logit gaps - and 0.012)"
    )


def test_only_moved_tokens_are_compared() -> None:
    # tokens 0 and 1 were cached at the sink, 2 to 4 moved, 5 and 6 are not there yet
    answers = Answers(
        prefill=done(digests=(digest("abcdefg"),)),
        decode=done(num_cached_tokens=2, num_external_tokens=3, digests=(digest("XXcde"),)),
    )
    assert judge("a", 8, answers).kv == KvCheck(2, 5, ())


def test_a_moved_token_that_differs_is_named_by_its_position() -> None:
    answers = Answers(
        prefill=done(digests=(digest("abcdefg"), digest("abcdefg", head=1))),
        decode=done(
            num_cached_tokens=2,
            num_external_tokens=3,
            digests=(digest("abcXe"), digest("abcde", head=1)),
        ),
    )
    result = judge("a", 8, answers)
    assert result.kv == KvCheck(2, 5, ("l0 k head 0 from token 3: source and sink differ",))
    assert not result.is_good(tokens_decide=False)


def test_a_missing_head_is_a_difference() -> None:
    answers = Answers(
        prefill=done(digests=(digest("abc"), digest("abc", head=1))),
        decode=done(num_external_tokens=2, digests=(digest("ab"),)),
    )
    kv = judge("a", 8, answers).kv
    assert kv is not None
    assert kv.differences == ("l0 k head 1 from token 0: missing on the sink",)


@pytest.mark.parametrize(
    "decode",
    [
        done(num_cached_tokens=3, digests=(digest("abc"),)),  # fully cached: nothing moved
        done(num_external_tokens=2, digests=(digest(""),)),  # load failed, so it was computed
        done(num_external_tokens=2),  # an engine that does not digest
        None,
    ],
)
def test_nothing_to_compare(decode: Done | None) -> None:
    assert judge("a", 8, Answers(prefill=done(digests=(digest("abc"),)), decode=decode)).kv is None


def test_why_kv_was_not_used() -> None:
    failed = load(0, 0.0, 1.0, reason=Reason.PEER_LOST, detail="no word for 3 s")
    answers = Answers(
        prefill=done(), decode=done(failure="peer_lost", loads=(load(0, 0, 0), failed))
    )
    result = judge("a", 8, answers)
    assert (result.failure, result.detail) == ("peer_lost", "no word for 3 s")
    answers = Answers(failure="prefill_lost", decode=done())
    assert judge("a", 8, answers).failure == "prefill_lost"


def test_a_request_that_never_reached_decode_has_failed() -> None:
    result = judge("a", 8, Answers(failure="prefill_lost"))
    assert result.status == "FINISHED_ERROR"
    assert not result.is_good(tokens_decide=False)


def result(**changes: object) -> Result:
    plain = judge("a", 8, Answers(prefill=done(), decode=done(), tokens=[token(1)]))
    return msgspec.structs.replace(plain, **changes)


def test_summary() -> None:
    results = [
        result(transfer=moved(10**9, 5.0, 6.0), tokens_equal=True, kv=KvCheck(0, 4, ())),
        result(transfer=moved(10**9, 5.5, 6.5, "zmq"), tokens_equal=False, failure=None),
        result(status="FINISHED_ERROR", failure="peer_lost", kv=KvCheck(0, 4, ("x",))),
        result(failure="peer_lost"),
    ]
    summary = summarise(results, tokens_decide=True, wall_s=2.0)
    assert (summary.num_requests, summary.num_failed) == (4, 1)
    assert (summary.num_prompt_tokens, summary.num_new_tokens) == (32, 4)
    assert (summary.num_transfers, summary.nbytes) == (2, 2 * 10**9)
    assert (summary.read_s, summary.gbps) == (1.5, 2 / 1.5)
    assert (summary.median_wait_s, summary.most_wait_s) == (1.0, 1.0)
    assert summary.wires == ("shm", "zmq")
    assert (summary.num_checked_tokens, summary.num_equal_tokens) == (2, 1)
    assert (summary.num_checked_kv, summary.num_equal_kv) == (2, 1)
    assert summary.reasons == {"peer_lost": 2}
    assert not summary.is_good


def test_a_run_that_was_ended_is_not_good() -> None:
    summary = summarise([result()], tokens_decide=True, wall_s=1.0, num_planned=2)
    assert (summary.num_requests, summary.num_planned, summary.is_good) == (1, 2, False)
    assert summarise([result()], tokens_decide=True, wall_s=1.0, num_planned=1).is_good


@pytest.mark.parametrize(
    ("changes", "tokens_decide", "is_good"),
    [
        ({"tokens_equal": True, "kv": KvCheck(0, 1, ())}, True, True),
        ({"tokens_equal": False, "kv": KvCheck(0, 1, ())}, True, False),
        ({"tokens_equal": False, "kv": KvCheck(0, 1, ())}, False, True),
        ({"tokens_equal": True, "kv": KvCheck(0, 1, ("x",))}, True, False),
        ({"tokens_equal": True, "kv": KvCheck(0, 1, ("x",))}, False, False),
        ({"status": "FINISHED_ERROR"}, True, False),
        ({"status": "FINISHED_ABORTED"}, True, False),
        ({"status": "FINISHED_STOPPED"}, True, True),
    ],
)
def test_what_decides(changes: dict[str, object], tokens_decide: bool, is_good: bool) -> None:
    results = [result(), result(**changes)]
    assert summarise(results, tokens_decide=tokens_decide, wall_s=1.0).is_good is is_good


@pytest.mark.parametrize(
    ("changes", "may_recompute", "is_good", "num_recomputed"),
    [
        ({"failure": "incompatible"}, False, False, 1),
        ({"failure": "incompatible"}, True, True, 1),
        ({"failure": "prefill_lost", "tokens_equal": False}, True, False, 1),
        ({"failure": "peer_lost", "status": "FINISHED_ERROR"}, True, False, 0),
        ({}, False, True, 0),  # all of it was cached: nothing was asked for
    ],
)
def test_kv_that_was_asked_for_and_not_used(
    changes: dict[str, object], may_recompute: bool, is_good: bool, num_recomputed: int
) -> None:
    results = [result(), result(**changes)]
    summary = summarise(results, tokens_decide=True, wall_s=1.0, may_recompute=may_recompute)
    assert (summary.is_good, summary.num_recomputed) == (is_good, num_recomputed)


def test_a_request_that_had_no_load_says_why_itself() -> None:
    plain = done(failure="not_allowed", detail="allowed_peers")
    assert judge("a", 8, Answers(prefill=done(), decode=plain)).detail == "allowed_peers"
    assert judge("a", 8, Answers(prefill=done(detail="role"), decode=done())).detail == "role"
    reported = done(loads=(load(0, 0.0, 0.0, reason=Reason.PEER_LOST, detail="gone"),), detail="x")
    assert judge("a", 8, Answers(prefill=done(), decode=reported)).detail == "gone"


@pytest.mark.parametrize(
    ("source", "sink", "differences"),
    [
        (kept("abcdefgh", 0), kept("xxcdefgh", 0), ()),  # before the load
        (kept("abcdefgh", 4), kept("abxxefgh", 0), ()),  # gone at the source
        (kept("abxxefgh", 0), kept("abcdefgh", 4), ()),  # and at the sink
        (
            kept("abcdefgh", 1),
            kept("abcdeXgh", 4),
            ("l0 k head 0 from token 5: source and sink differ",),
        ),
        (
            kept("abcdefgh", 8),
            kept("abcdefgh", 3),
            ("l0 k head 0 from token 8: no token is held by both sides",),
        ),
    ],
)
def test_kv_of_windows_is_compared_where_both_sides_hold_it(
    source: KVDigest, sink: KVDigest, differences: tuple[str, ...]
) -> None:
    answers = Answers(
        prefill=done(digests=(source,)),
        decode=done(num_cached_tokens=2, num_external_tokens=6, digests=(sink,)),
    )
    assert judge("r", 8, answers).kv == KvCheck(2, 8, differences)
