"""How soon handshakes are answered, by the address that they come from."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from fractions import Fraction

import pytest
import zmq
from hypothesis import example, given
from hypothesis import strategies as st

from kvxfer.config import Config
from kvxfer.transports import guard
from kvxfer.transports.channel import Bounds, Router
from kvxfer.transports.guard import Floods, Guard, Late, Pace
from kvxfer.transports.syn_filter import MOST_SHUT
from tests import zmtp
from tests.connector.rig import until
from tests.helpers import needs_socket_filters

WAIT_S = 120.0


def test_the_first_are_answered_at_once() -> None:
    pace = Pace()
    for since_s in (100.0, 200.0):  # a rest brings all of them back
        prompt = [pace.is_prompt("a", since_s) for _ in range(guard.PROMPT + 3)]
        assert prompt == [True] * guard.PROMPT + [False] * 3


@example(gaps=[(0, "a")] * 12 + [(1, "b"), (1, "a"), (1, "a"), (30, "a")], prompt=2)
@given(
    gaps=st.lists(
        st.tuples(st.sampled_from([0, 0, 0, 1, 3, 30]), st.sampled_from("aab")), max_size=60
    ),
    prompt=st.integers(1, 4),
)
def test_an_address_has_a_bucket_of_tokens(gaps: list[tuple[int, str]], prompt: int) -> None:
    """The oracle: each address has so many, and gets one back in each interval."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard, "PROMPT", prompt)
        patch.setattr(guard, "REFILL_S", 4)
        pace = Pace()
        tokens = {name: (Fraction(prompt), 0) for name in "ab"}
        now_s = 0
        for gap, name in gaps:
            now_s += gap
            left, at_s = tokens[name]
            left = min(Fraction(prompt), left + Fraction(now_s - at_s, 4))
            assert pace.is_prompt(name, now_s) == (left >= 1)
            tokens[name] = left - (left >= 1), now_s


def test_so_many_addresses_are_known() -> None:
    pace = Pace()
    for number in range(3000):
        pace.is_prompt(f"{number}", 0.0)
    assert len(pace._full_s) == guard._MAX_PENALTIES


@example(gaps=[(0, name) for name in "abcde" * 5] + [(30, "f")])
@given(gaps=st.lists(st.tuples(st.sampled_from([0, 0, 0, 1, 9]), st.sampled_from("aaabcd"))))
def test_addresses_have_turns(gaps: list[tuple[int, str]]) -> None:
    """Each one that waits is answered once and behind those of its own address, one in each
    interval at most; and of each other address one at most goes before it from then on.
    """
    late = Late()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard, "PACE_S", 4)
        patch.setattr(guard, "ALL_PACE_S", 2)
        added_s: dict[tuple[str, int], int] = {}
        taken: list[tuple[str, int, float]] = []

        def take(until_s: float) -> None:
            while late and late.due_s < until_s:
                now_s = late.due_s
                (frame,) = late.take(now_s)
                taken.append((chr(frame[0]), frame[1], now_s))

        now_s = 0
        for number, (gap, name) in enumerate(gaps):
            now_s += gap
            take(now_s)
            added_s[name, number] = now_s
            late.add(name, now_s, [bytes([ord(name), number])])
        take(math.inf)
    assert not len(late)
    assert {(name, number) for name, number, _ in taken} == added_s.keys()
    assert len(taken) == len(gaps)
    times_s = [each_s for *_, each_s in taken]
    for index, (name, number, each_s) in enumerate(taken):
        assert index < 3 or each_s >= times_s[index - 3] + 2  # three at once after a rest
        before = [other for other in taken[:index] if other[0] == name]
        assert all(other[1] < number for other in before)
        due_s = max([added_s[name, number], *(other[2] for other in before[-1:])]) + 4
        assert each_s >= due_s
        others = [other[0] for other in taken[:index] if other[2] >= due_s]
        assert len(set(others)) == len(others)


@contextmanager
def listening(*, fails: bool = False) -> Iterator[tuple[Router, Guard, list[str]]]:
    refused: list[str] = []

    def count(reason: str) -> None:
        refused.append(reason)
        if fails:
            raise ZeroDivisionError

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    own = Guard(context, Config(), count)
    with closing(Router(context, Config(), Bounds(1000, 1000, 10))) as router:
        yield router, own, refused
    context.term()
    own.join()


def answer_one_each(pace_s: float, monkeypatch: pytest.MonkeyPatch, most_late: int) -> None:
    """Of an address: one at once, one more in each interval, and so many wait."""
    monkeypatch.setattr(guard, "PROMPT", 1)
    monkeypatch.setattr(guard, "REFILL_S", 10 * pace_s)
    monkeypatch.setattr(guard, "PACE_S", pace_s)
    monkeypatch.setattr(guard, "MOST_LATE_OF", most_late)


def test_who_makes_many_waits_and_other_addresses_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_one_each(WAIT_S, monkeypatch, most_late=1)
    with listening() as (router, own, refused), ExitStack() as stack:
        first = stack.enter_context(closing(zmtp.connect(router.endpoint)))
        stack.enter_context(closing(zmtp.connect(router.endpoint, waits=False)))
        until(lambda: len(own._late) == 1)
        for number in range(2):
            place = f"127.0.9.{number + 7}"
            other = stack.enter_context(closing(zmtp.connect(router.endpoint, address=place)))
            other.sendall(zmtp.frame(b"other"))
        first.sendall(zmtp.frame(b"first"))
        assert sorted(_messages(router, 3)) == [b"first", b"other", b"other"]
        with pytest.raises(OSError, match=r"refused|expected|reset"):
            zmtp.connect(router.endpoint)  # one waits already
        assert refused[0] == "pace"  # and perhaps the address is kept out from now on


def test_where_many_wait_one_more_comes_again_and_who_need_not_wait_is_let_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer_one_each(WAIT_S, monkeypatch, most_late=9)
    monkeypatch.setattr(guard, "MOST_LATE", 1)
    with listening(fails=True) as (router, own, refused), ExitStack() as stack:
        stack.enter_context(closing(zmtp.connect(router.endpoint)))
        stack.enter_context(closing(zmtp.connect(router.endpoint, waits=False)))
        until(lambda: len(own._late) == 1)
        for _ in range(2):  # also where it cannot be counted
            with pytest.raises(OSError, match=r"refused|expected|reset"):
                zmtp.connect(router.endpoint)
        zmtp.connect(router.endpoint, address="127.0.9.7").close()
        assert refused == ["pace"] * 2


@needs_socket_filters
def test_who_is_too_late_is_kept_out_and_another_address_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer_one_each(WAIT_S, monkeypatch, most_late=0)
    monkeypatch.setattr(guard, "PENALTY_S", WAIT_S)
    with listening() as (router, own, refused):
        router.visitors.meet()
        zmtp.connect(router.endpoint, address="127.0.9.1").close()
        with pytest.raises(OSError, match=r"refused|expected|reset"):
            zmtp.connect(router.endpoint, address="127.0.9.1")
        until(lambda: refused == ["pace", "flood"])
        with pytest.raises(zmtp.KeptOut):
            zmtp.open_tcp(router.endpoint, address="127.0.9.1", connect_s=0.3)
        zmtp.connect(router.endpoint, address="127.0.9.2").close()
        assert len(own._floods) == 1


@needs_socket_filters
def test_each_time_takes_twice_as_long_and_so_many_are_kept_out_at_most() -> None:
    floods = Floods()
    with socket.create_server(("127.0.0.1", 0)) as server:
        floods.filter.watch(server.fileno())
        now_s = 1000.0
        for length_s in (1, 2, 4, 8, 16, 30, 30):
            floods.shut("10.0.0.1", now_s)
            floods.shut("10.0.0.1", now_s + 0.5)  # of what was accepted before
            floods.open_due(now_s + length_s - 0.01)
            assert len(floods) == 1
            now_s += length_s
            floods.open_due(now_s)
            assert len(floods) == 0
        for number in range(2 * MOST_SHUT):
            floods.shut(f"10.0.1.{number}", now_s)
        assert len(floods) == MOST_SHUT


def test_nobody_is_kept_out_who_has_no_address() -> None:
    """A process of another user, over the Unix socket; nor where there is no listener yet."""
    floods = Floods()
    floods.shut("127.0.9.1", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        floods.filter.watch(server.fileno())
        zmtp.open_tcp(f"tcp://127.0.0.1:{server.getsockname()[1]}", address="127.0.9.1").close()
        floods.shut("localhost:1000:1000:7", 1.0)
    assert len(floods) == 0


def test_who_has_to_wait_is_let_in_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_one_each(0.05, monkeypatch, most_late=9)
    with listening() as (router, _, refused), ExitStack() as stack:
        began_s = time.monotonic()
        for number in range(5):
            peer = stack.enter_context(closing(zmtp.connect(router.endpoint)))
            peer.sendall(zmtp.frame(b"%d" % number))
        assert time.monotonic() - began_s >= 4 * 0.05
        assert sorted(_messages(router, 5)) == [b"0", b"1", b"2", b"3", b"4"]
        assert refused == []


def _messages(router: Router, number: int) -> list[bytes]:
    found: list[bytes] = []
    until_s = time.monotonic() + WAIT_S
    while len(found) < number and time.monotonic() < until_s:
        router.socket.poll(100)
        found += [bytes(frames[1].buffer) for frames in router.poll()]
    return found
