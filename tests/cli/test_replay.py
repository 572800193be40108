"""The run over all prompts, against engines that are scripts behind real request channels."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest
import zmq

from kvxfer.cli import replay
from kvxfer.cli.outcome import Result
from kvxfer.cli.prompts import Prompt
from kvxfer.cli.replay import Replay, RunEngine
from kvxfer.cli.sides import Work
from kvxfer.engine.config import OnLoadFailure
from kvxfer.engine.rpc import (
    Abort,
    Ask,
    Done,
    Generate,
    Info,
    RequestRefused,
    RpcClient,
    RpcServer,
    ToClient,
    Token,
)
from kvxfer.errors import KvxferError, PeerLost, ProtocolError
from kvxfer.proxy.settings import Dispatch
from tests.helpers import free_port

PARAMS = {"offer": 1}
Answer = Callable[[Generate], list[ToClient]]


def done(request: Generate, params: dict[str, int] | None = None) -> Done:
    return Done(
        request_id=request.request_id,
        status="FINISHED_LENGTH_CAPPED",
        kv_transfer_params=params,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_cached_tokens=0,
        num_external_tokens=0,
        failure=None,
        loads=(),
        digests=(),
    )


def tokens(request: Generate) -> list[ToClient]:
    """Token i is the prompt's first plus i."""
    first = request.prompt_token_ids[0]
    return [Token(request.request_id, first + i, 1.0) for i in range(request.max_new_tokens)]


def prefill(request: Generate) -> list[ToClient]:
    assert request.kv_transfer_params == {"do_remote_decode": True, "do_remote_prefill": False}
    assert request.max_new_tokens == 1
    return [*tokens(request), done(request, PARAMS)]


def decode(request: Generate) -> list[ToClient]:
    return [*tokens(request), done(request)]


class Scripted:
    """An engine that answers as told, one request after the other."""

    def __init__(
        self,
        answer: Answer,
        *,
        port: int = 0,
        delay_s: float = 0.0,
        aborted: Answer = lambda _: [],
    ) -> None:
        self._aborted, self._known = aborted, dict[str, Generate]()
        self.heard: list[Generate] = []
        self.taken_back: list[Abort] = []
        self.most_at_once = 0
        self._answer, self._delay_s = answer, delay_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._server = RpcServer(self._context, "127.0.0.1", port)
        self.endpoint = self._server.endpoint
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        try:
            self._serve_until_stopped()
        finally:
            self._server.close()

    def _serve_until_stopped(self) -> None:
        waiting: list[tuple[bytes, Generate]] = []
        while not self._stop.is_set():
            self._server.socket.poll(10)
            for client, message in self._server.receive():
                if isinstance(message, Ask):
                    info = Info(
                        engine_id="scripted",
                        vocab_size=8,
                        max_model_len=8,
                        num_blocks=2,
                        num_free_blocks=1,
                        prefix_hit_rate=0.0,
                        pids=(),
                        counts={},
                    )
                    self._server.send(client, info)
                elif isinstance(message, Abort):
                    self.taken_back.append(message)
                    # An engine says nothing more of it, also where it had no time to begin
                    waiting = [each for each in waiting if each[1].request_id != message.request_id]
                    for answer in self._aborted(self._known[message.request_id]):
                        self._server.send(client, answer)
                elif isinstance(message, Generate):
                    self.heard.append(message)
                    self._known[message.request_id] = message
                    waiting.append((client, message))
            self.most_at_once = max(self.most_at_once, len(waiting))
            if waiting:
                time.sleep(self._delay_s)
                client, request = waiting.pop(0)
                for answer in self._answer(request):
                    self._server.send(client, answer)

    def stop(self) -> None:
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join()
            self._context.term()


@contextmanager
def engines(*all_of_them: Scripted) -> Iterator[list[RpcClient]]:
    clients: list[RpcClient] = []
    try:
        clients += [RpcClient(e.endpoint, connect_timeout_s=60) for e in all_of_them]
        yield clients
    finally:
        for client in clients:
            client.close()
        for engine in all_of_them:
            engine.stop()


def work(num: int, *, in_flight: int = 8, gap_s: float = 0.0) -> Work:
    prompts = tuple(Prompt(f"p{i}", (10 * i, 1, 2), 3, arrival_s=i * gap_s) for i in range(num))
    return Work(prompts, in_flight)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is forgotten fails its test soon."""
    monkeypatch.setattr(replay, "STALLED_S", 10.0)


def nothing(_done: int, _all: int) -> None:
    pass


def run(
    work: Work,
    links: list[RunEngine],
    *,
    policy: OnLoadFailure = OnLoadFailure.RECOMPUTE,
    progress: Callable[[int, int], None] = nothing,
    dispatch: Dispatch = Dispatch.IN_TURN,
) -> list[Result]:
    prefill, decode, *single = links
    return Replay(
        work,
        prefill=prefill,
        decode=decode,
        single=single[0] if single else None,
        on_load_failure=policy,
        progress=progress,
        dispatch=dispatch,
    ).run()


def test_prefill_hears_why_its_kv_was_not_used() -> None:
    def refuse(request: Generate) -> list[ToClient]:
        end = msgspec.structs.replace(done(request), failure="not_allowed", detail="set it")
        return [*tokens(request), end if request.prompt_token_ids[0] else done(request)]

    first, second = Scripted(prefill), Scripted(refuse)
    with engines(first, second) as clients:
        run(work(2), [RunEngine(client) for client in clients])
        clients[0].ask(5)  # what was said before has been heard
    (taken_back,) = first.taken_back
    assert taken_back == Abort(
        first.heard[1].request_id,
        f"engine scripted on {socket.gethostname()}: not_allowed: set it",
    )
    assert second.taken_back == []


def test_every_prompt_goes_through_both_and_the_single_engine() -> None:
    told: list[tuple[int, int]] = []
    first, second, third = Scripted(prefill), Scripted(decode), Scripted(decode)
    with engines(first, second, third) as clients:
        results = run(
            work(5),
            [RunEngine(client) for client in clients],
            progress=lambda done, total: told.append((done, total)),
        )
    assert [r.name for r in results] == ["p0", "p1", "p2", "p3", "p4"]
    assert results[2].token_ids == (20, 21, 22)
    assert all(r.tokens_equal for r in results)
    assert [g.kv_transfer_params for g in second.heard] == [PARAMS] * 5
    assert [g.kv_transfer_params for g in third.heard] == [None] * 5
    assert third.most_at_once == 1
    assert told == [(done, 5) for done in range(1, 6)]


@pytest.mark.parametrize("slow", ["decode", "single"])
def test_a_request_counts_when_both_have_said_all_of_it(slow: str) -> None:
    """Whichever of the two is behind."""
    told: list[tuple[int, int]] = []
    delays_s = {slow: 0.02}
    second = Scripted(decode, delay_s=delays_s.get("decode", 0.0))
    third = Scripted(decode, delay_s=delays_s.get("single", 0.0))
    with engines(Scripted(prefill), second, third) as clients:
        links = [RunEngine(client) for client in clients]
        results = run(work(5), links, progress=lambda done, total: told.append((done, total)))
    assert told == [(done, 5) for done in range(1, 6)]
    assert [r.tokens_equal for r in results] == [True] * 5


def test_a_wrong_token_is_found() -> None:
    def wrong(request: Generate) -> list[ToClient]:
        return [Token(request.request_id, 0, 1.0), *decode(request)[1:]]

    with engines(Scripted(prefill), Scripted(decode), Scripted(wrong)) as clients:
        results = run(work(2), [RunEngine(client) for client in clients])
    # p0's first token is 0 anyway
    assert [r.tokens_equal for r in results] == [True, False]


@pytest.mark.parametrize("in_flight", [1, 3])
def test_no_more_in_flight_than_asked_for(in_flight: int) -> None:
    slow = Scripted(decode, delay_s=0.02)
    with engines(Scripted(prefill), slow) as clients:
        run(work(8, in_flight=in_flight), [RunEngine(client) for client in clients])
    assert slow.most_at_once <= in_flight
    assert len(slow.heard) == 8


def test_arrivals_are_waited_for() -> None:
    started_s = time.monotonic()
    with engines(Scripted(prefill), Scripted(decode)) as clients:
        run(work(4, gap_s=0.1), [RunEngine(client) for client in clients])
    assert time.monotonic() - started_s >= 0.3


def test_a_request_without_an_offer_is_computed_or_fails_by_policy() -> None:
    for policy, status in (
        (OnLoadFailure.RECOMPUTE, "FINISHED_LENGTH_CAPPED"),
        (OnLoadFailure.FAIL, "FINISHED_ERROR"),
    ):
        second = Scripted(decode)
        with engines(Scripted(decode), second) as clients:  # it gives no kv_transfer_params
            (result,) = run(work(1), [RunEngine(client) for client in clients], policy=policy)
        assert (result.status, result.failure) == (status, "no_offer")
        expected = [None] if policy is OnLoadFailure.RECOMPUTE else []
        assert [g.kv_transfer_params for g in second.heard] == expected


def test_a_refusal_ends_the_run() -> None:
    def refuse(request: Generate) -> list[ToClient]:
        return [RequestRefused(request.request_id, "no room")]

    with (
        engines(Scripted(prefill), Scripted(refuse)) as clients,
        pytest.raises(KvxferError, match="engine scripted refused: no room"),
    ):
        run(work(2), [RunEngine(client) for client in clients])
    with (
        engines(Scripted(lambda _: [RequestRefused("", "what?")]), Scripted(decode)) as clients,
        pytest.raises(ProtocolError, match=r"engine at tcp://.*: what\?"),
    ):
        run(work(2), [RunEngine(client) for client in clients])


def test_answers_to_nobody_are_passed_over() -> None:
    def stranger(request: Generate) -> list[ToClient]:
        return [Token("stranger", 1, 1.0), *decode(request)]

    with engines(Scripted(prefill), Scripted(stranger)) as clients:
        assert len(run(work(2), [RunEngine(client) for client in clients])) == 2


def test_an_engine_that_is_needed_and_goes_ends_the_run() -> None:
    second = Scripted(lambda _: [])
    with engines(Scripted(prefill), second) as clients:
        timer = threading.Timer(0.3, second.stop)
        timer.start()
        with pytest.raises(PeerLost, match=r"the connection ended; is it running\?"):
            run(work(2), [RunEngine(client) for client in clients])
        timer.join()


def lose_prefill(
    policy: OnLoadFailure,
    come_back_s: float,
    restart_s: float | None,
    give: Answer = prefill,
    second: Scripted | None = None,
    dispatch: Dispatch = Dispatch.IN_TURN,
) -> list[Result]:
    """The prefill engine answers the first request, takes the second, and goes."""
    port = free_port()
    answered: list[str] = []

    def once(request: Generate) -> list[ToClient]:
        answered.append(request.request_id)
        return give(request) if len(answered) == 1 else []

    first, again = Scripted(once, port=port), []

    def restart() -> None:
        while len(answered) < 2:
            time.sleep(0.01)
        first.stop()
        if restart_s is not None:
            time.sleep(restart_s)
            again.append(Scripted(give, port=port))

    thread = threading.Thread(target=restart)
    thread.start()
    try:
        with engines(first, second or Scripted(decode)) as clients:
            links = [RunEngine(clients[0], come_back_s=come_back_s), RunEngine(clients[1])]
            results = run(work(4, in_flight=1), links, policy=policy, dispatch=dispatch)
            links[0].client.close()
    finally:
        thread.join()
        for engine in again:
            engine.stop()
    return results


@pytest.mark.parametrize("policy", list(OnLoadFailure))
def test_a_prefill_engine_that_comes_back_is_used_again(policy: OnLoadFailure) -> None:
    results = lose_prefill(policy, come_back_s=120, restart_s=0.3)
    assert [r.failure for r in results] == [None, "prefill_lost", None, None]
    lost = "FINISHED_ERROR" if policy is OnLoadFailure.FAIL else "FINISHED_LENGTH_CAPPED"
    assert [r.status for r in results] == [
        *("FINISHED_LENGTH_CAPPED", lost, "FINISHED_LENGTH_CAPPED", "FINISHED_LENGTH_CAPPED"),
    ]


@pytest.mark.parametrize("policy", list(OnLoadFailure))
def test_a_prefill_engine_that_stays_away_is_done_without(policy: OnLoadFailure) -> None:
    results = lose_prefill(policy, come_back_s=0.5, restart_s=None)
    assert [r.failure for r in results] == [None, *["prefill_lost"] * 3]
    assert {r.status for r in results[1:]} == {
        "FINISHED_ERROR" if policy is OnLoadFailure.FAIL else "FINISHED_LENGTH_CAPPED"
    }


def test_silence_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "STALLED_S", 0.3)
    with (
        engines(Scripted(prefill), Scripted(lambda _: [])) as clients,
        pytest.raises(PeerLost, match="2 requests: expected a word from an engine within 0.3 s"),
    ):
        run(work(2), [RunEngine(client) for client in clients])


ENGINE = {"remote_engine_id": "p", "kvxfer": {"protocol": 2, "incarnation": "ab", "endpoint": "e"}}


def offer(request: Generate) -> list[ToClient]:
    return [*tokens(request), msgspec.structs.replace(done(request), kv_transfer_params=ENGINE)]


def asked_early(request: Generate) -> str | None:
    """The name of an offer that is not there yet."""
    ours = (request.kv_transfer_params or {}).get("kvxfer", {})
    name: str | None = ours.get("request")
    return name


def aborted(request: Generate) -> list[ToClient]:
    return [msgspec.structs.replace(done(request), status="FINISHED_ABORTED")]


def test_together_both_are_asked_once_the_first_answer_has_taught_how() -> None:
    first, second = Scripted(offer, delay_s=0.02), Scripted(decode)
    with engines(first, second) as clients:
        links = [RunEngine(client) for client in clients]
        results = run(work(4, in_flight=1), links, dispatch=Dispatch.TOGETHER)
    assert [r.failure for r in results] == [None] * 4
    assert all(r.ttft_s is not None and r.ttft_s > 0 for r in results)
    names = [asked_early(request) for request in second.heard]
    assert names[0] is None
    assert names == [asked_early(request) for request in first.heard]
    assert len(set(names)) == 4
    assert second.heard[0].kv_transfer_params == ENGINE


@pytest.mark.parametrize("policy", list(OnLoadFailure))
def test_together_without_an_offer_decode_is_asked_again(policy: OnLoadFailure) -> None:
    """It waits for an offer that will never be."""

    def give(request: Generate) -> list[ToClient]:
        return decode(request) if asked_early(request) else offer(request)

    def take(request: Generate) -> list[ToClient]:
        return [tokens(request)[0]] if asked_early(request) else decode(request)

    second = Scripted(take, aborted=aborted)
    with engines(Scripted(give), second) as clients:
        links = [RunEngine(client) for client in clients]
        results = run(work(2, in_flight=1), links, policy=policy, dispatch=Dispatch.TOGETHER)
    assert [r.failure for r in results] == [None, "no_offer"]
    assert len(second.taken_back) == 1
    if policy is OnLoadFailure.RECOMPUTE:
        assert results[1].token_ids == (10, 11, 12)
        assert [request.kv_transfer_params for request in second.heard[2:]] == [None]
    else:
        assert results[1].status == "FINISHED_ABORTED"
        assert len(second.heard) == 2


def test_together_decode_may_be_the_first_to_have_said_all() -> None:
    """The KV of a prompt that it has in its own cache is not waited for."""
    first, second = Scripted(offer, delay_s=0.05), Scripted(decode)
    with engines(first, second) as clients:
        results = run(
            work(6), [RunEngine(client) for client in clients], dispatch=Dispatch.TOGETHER
        )
    assert [(r.failure, len(r.token_ids)) for r in results] == [(None, 3)] * 6


def test_together_an_engine_that_has_come_back_is_learned_anew() -> None:
    """What it said in its last life leads decode to nobody."""
    num_early: list[str | None] = []

    def take(request: Generate) -> list[ToClient]:
        num_early.append(asked_early(request))
        is_in_vain = bool(num_early[-1]) and len(num_early) == 2
        return [tokens(request)[0]] if is_in_vain else decode(request)

    results = lose_prefill(
        OnLoadFailure.RECOMPUTE,
        come_back_s=20,
        restart_s=0.1,
        give=offer,
        second=Scripted(take, aborted=aborted),
        dispatch=Dispatch.TOGETHER,
    )
    assert [r.failure for r in results] == [None, "prefill_lost", None, None]
    # The second one is asked again; the third teaches
    assert [name is not None for name in num_early] == [False, True, False, False, True]


def test_together_an_answer_without_an_offer_changes_nothing_behind_decodes() -> None:
    def give(request: Generate) -> list[ToClient]:
        return decode(request) if asked_early(request) else offer(request)

    first, second = Scripted(give, delay_s=0.05), Scripted(decode)
    with engines(first, second) as clients:
        links = [RunEngine(client) for client in clients]
        results = run(work(2, in_flight=1), links, dispatch=Dispatch.TOGETHER)
    assert [(r.failure, len(r.token_ids)) for r in results] == [(None, 3)] * 2
    assert len(second.heard) == 2


def test_a_prefill_engine_that_goes_takes_only_what_it_had_not_answered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    answered: list[str] = []

    def once(request: Generate) -> list[ToClient]:
        answered.append(request.request_id)
        return prefill(request) if len(answered) == 1 else []

    def take(request: Generate) -> list[ToClient]:
        going.start()
        give_up_s = time.monotonic() + 120
        while "has gone" not in caplog.text:  # who says so reads no answer before he is done
            assert time.monotonic() < give_up_s
            time.sleep(0.001)
        return decode(request)

    first = Scripted(once)
    going = threading.Thread(target=first.stop)
    with engines(first, Scripted(take)) as clients:
        links = [RunEngine(clients[0], come_back_s=20), RunEngine(clients[1])]
        results = run(work(2), links, policy=OnLoadFailure.FAIL)
        going.join()
    assert [r.failure for r in results] == [None, "prefill_lost"]
