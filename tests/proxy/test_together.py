"""Both engines asked at once: what each is told, and what becomes of one when the other fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from aiohttp import web

from kvxfer.proxy import server
from kvxfer.proxy.settings import Dispatch, OnMissingKv
from tests.proxy.fakes import Answer, FakeEngine, Scene, give, give_text, run, scene, until

COMPLETIONS = "/v1/completions"
TOLD = {
    **{"incarnation": "ab" * 16, "endpoint": "tcp://10.0.0.1:5700", "curve_public_key": "k"},
    **{"engine_signature": "cd", "protocol": 2},
}
"""What a prefill engine says of itself in every answer."""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode engine that has not answered is hung up on."""
    monkeypatch.setattr(server, "ABANDONED_S", 0.05)


def params(**changes: Any) -> dict[str, Any]:
    return {
        **{"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "p"},
        "kvxfer": TOLD | {"nonce": "12", "tokens": 31} | changes,
    }


def offer(**changes: Any) -> web.Response:
    return web.json_response({"choices": [], "kv_transfer_params": params(**changes)})


def early(call: dict[str, Any]) -> str:
    """The name of the offer in a decode request that came before prefill's answer."""
    given = call["kv_transfer_params"]
    name: str = given["kvxfer"]["request"]
    assert given == {
        **{"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "p"},
        "kvxfer": {"request": name} | {k: v for k, v in TOLD.items() if k != "protocol"},
    }
    assert len(bytes.fromhex(name)) == 16
    return name


@dataclass
class Held:
    """An engine's work on the request after the first one: begun, let go on, and how it ended."""

    answer: Answer
    first: Answer
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    may_go_on: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    num_asked: int = 0

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        self.num_asked += 1
        if self.num_asked != 2:
            return await self.first(request)
        self.begun.set()
        try:
            await self.may_go_on.wait()
            return await self.answer(request)
        except asyncio.CancelledError:
            self.aborted.set()
            raise


async def offers(_request: web.Request) -> web.StreamResponse:
    return offer()


async def drops(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


@asynccontextmanager
async def taught(
    prefill: Answer = offers, decode: Answer = give_text, num_others: int = 0, **options: Any
) -> AsyncIterator[tuple[Scene, Held, Held]]:
    """A scene whose first request has taught the proxy, and what both do with the second.
    ``num_others``: decode engines beside, that answer at once.
    """
    held = Held(prefill, offers), Held(decode, give_text)
    others = [FakeEngine(f"d{1 + i}", give_text) for i in range(num_others)]
    settings = {"dispatch": Dispatch.TOGETHER, **options}
    engines = [FakeEngine("d0", held[1]), *others]
    async with scene(prefill=held[0], decode=engines, **settings) as s:
        assert (await s.post({"prompt": "p"}))[0] == 200
        for _ in range(num_others):  # until it is the first one's turn again
            held[0].num_asked = 0
            assert (await s.post({"prompt": "p"}))[0] == 200
        held[0].num_asked = held[1].num_asked = 1
        s.calls.clear()
        yield s, *held


@asynccontextmanager
async def asked(*args: Any, **named: Any) -> AsyncIterator[tuple[Scene, Held, Held, Any]]:
    """Both work on the second request, whose answer is awaited last."""
    async with taught(*args, **named) as (s, prefill, decode):
        answer = ask(s)
        await both_have_begun(prefill, decode)
        yield s, prefill, decode, answer


def ask(s: Scene) -> asyncio.Task[tuple[int, dict[str, Any]]]:
    return asyncio.create_task(s.post({"prompt": "p"}))


async def both_have_begun(*sides: Held) -> None:
    for side in sides:
        await side.begun.wait()


def test_both_hear_of_a_request_before_either_has_answered() -> None:
    async def scenario() -> None:
        async with taught() as (s, prefill, decode):
            names = set()
            for _ in range(2):
                prefill.num_asked = decode.num_asked = 1
                for event in (prefill.begun, decode.begun):
                    event.clear()
                asked = ask(s)
                await both_have_begun(prefill, decode)
                bodies = {call.engine: call.body for call in s.calls}
                name = early(bodies["d0"])
                assert bodies["p0"]["kv_transfer_params"]["kvxfer"] == {"request": name}
                assert bodies["p0"]["max_tokens"] == 1
                assert len({call.headers["X-Request-Id"] for call in s.calls}) == 1
                prefill.may_go_on.set()
                decode.may_go_on.set()
                assert await asked == (200, {"choices": [{"text": "hello"}]})
                names.add(name)
                s.calls.clear()
            assert len(names) == 2
            found = await s.metrics()
            assert found['kvxfer_proxy_dispatched_total{how="together"}'] == 2
            assert found['kvxfer_proxy_dispatched_total{how="in-turn"}'] == 1
            assert await s.failures() == {}

    run(scenario())


@pytest.mark.parametrize("how", ["protocol 1", "told to"])
def test_what_cannot_be_asked_together_goes_in_turn(how: str) -> None:
    async def old(_request: web.Request) -> web.StreamResponse:
        return offer(protocol=1 if how == "protocol 1" else 2)

    async def scenario() -> None:
        dispatch = Dispatch.IN_TURN if how == "told to" else Dispatch.TOGETHER
        async with scene(prefill=old, dispatch=dispatch) as s:
            for _ in range(3):
                assert (await s.post({"prompt": "p"}))[0] == 200
            given = [call.body["kv_transfer_params"] for call in s.calls]
            assert all("kvxfer" not in each for each in given[::2])
            assert [each["kvxfer"]["nonce"] for each in given[1::2]] == ["12"] * 3

    run(scenario())


def test_an_engine_that_was_down_is_learned_anew() -> None:
    async def scenario() -> None:
        async with taught() as (s, prefill, decode):
            prefill.num_asked = decode.num_asked = 9  # nothing is held
            for status, state in ((500, "down"), (200, "up")):
                s.prefill[0].health_status = status

                async def is_seen(want: str = state) -> bool:
                    return (await s.states())[1]["p0"] == want

                await until(is_seen)
            assert (await s.post({"prompt": "p"}))[0] == 200
            assert "kvxfer" not in s.calls[0].body["kv_transfer_params"]
            assert s.calls[1].body["kv_transfer_params"]["kvxfer"]["nonce"] == "12"
            assert (await s.post({"prompt": "p"}))[0] == 200
            early(next(call.body for call in s.calls[2:] if call.engine == "d0"))

    run(scenario())


def of_engine(name: str, incarnation: str) -> dict[str, Any]:
    told = {"incarnation": incarnation * 16, "endpoint": f"tcp://10.0.0.1:{name}"}
    return params(**told) | {"remote_engine_id": name}


def give_kv(given: dict[str, Any]) -> Answer:
    return give(200, msgspec.json.encode({"kv_transfer_params": given}))


@pytest.mark.parametrize("has_begun", [False, True], ids=["silent", "status sent"])
@pytest.mark.parametrize("answered", [of_engine("q", "cd"), of_engine("p", "cd")])
def test_decode_asks_the_engine_that_has_answered(
    answered: dict[str, Any], has_begun: bool
) -> None:
    """Several engines behind one URL, or another life of one: what decode was told is wrong."""
    status_sent = asyncio.Event()

    async def waits(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse()
        await reply.prepare(request)
        status_sent.set()
        await asyncio.sleep(60)
        return reply

    async def scenario() -> None:
        async with asked(prefill=give_kv(answered), decode=waits) as (s, prefill, decode, answer):
            if has_begun:
                decode.may_go_on.set()
                await status_sent.wait()
            prefill.may_go_on.set()
            assert await answer == (200, {"choices": [{"text": "hello"}]})
            await decode.aborted.wait()
            assert [call.engine for call in s.calls[2:]] == ["d0"]
            assert s.calls[2].body["kv_transfer_params"] == answered
            assert await s.failures() == {}

    run(scenario())


@pytest.mark.parametrize(
    ("name", "how"), [("q", "in turn"), ("p", "together")], ids=["two engines", "another life"]
)
def test_a_url_of_several_engines_is_asked_in_turn(name: str, how: str) -> None:
    """Who answers next cannot be told. A new life of the same engine is learned instead."""
    answers = [of_engine("p", "ab"), of_engine(name, "cd")]

    async def takes_turns(request: web.Request) -> web.StreamResponse:
        given = answers.pop(0) if len(answers) > 1 else answers[0]
        return await give_kv(given)(request)

    async def scenario() -> None:
        decode = Held(give_text, give_text)
        async with scene(prefill=takes_turns, decode=decode, dispatch=Dispatch.TOGETHER) as s:
            assert (await s.post({"prompt": "p"}))[0] == 200
            assert (await s.post({"prompt": "p"}))[0] == 200
            for _ in range(2):
                s.calls.clear()
                assert (await s.post({"prompt": "p"}))[0] == 200
                given = next(c.body["kv_transfer_params"] for c in s.calls if c.engine == "d0")
                assert ("request" in given["kvxfer"]) is (how == "together")
                assert given["kvxfer"]["incarnation"] == "cd" * 16

    run(scenario())


@pytest.mark.parametrize("policy", list(OnMissingKv))
def test_what_prefill_fails_ends_decodes_work(policy: OnMissingKv) -> None:
    async def scenario() -> None:
        fails = give(500, b"broken")
        async with asked(prefill=fails, on_missing_kv=policy) as (s, prefill, decode, answer):
            prefill.may_go_on.set()
            status, said = await answer
            await decode.aborted.wait()
            if policy is OnMissingKv.REFUSE:
                assert (status, said["error"]["type"]) == (502, "prefill_error")
                assert len(s.calls) == 2
            else:
                assert (status, said) == (200, {"choices": [{"text": "hello"}]})
                assert "kv_transfer_params" not in s.calls[2].body
                without = (await s.metrics())[
                    'kvxfer_proxy_without_kv_total{reason="prefill_error"}'
                ]
                assert without == 1

    run(scenario())


def test_prefill_that_offers_nothing_is_decoded_without() -> None:
    """As in turn: the engine has answered well."""

    async def scenario() -> None:
        async with asked(prefill=give(200, b"{}")) as (s, prefill, decode, answer):
            prefill.may_go_on.set()
            assert (await answer)[0] == 200
            await decode.aborted.wait()
            assert "kv_transfer_params" not in s.calls[2].body

    run(scenario())


def test_what_decode_refuses_ends_prefills_work() -> None:
    async def scenario() -> None:
        async with asked(decode=give(400, b'{"error":"too long"}')) as (s, prefill, decode, answer):
            decode.may_go_on.set()
            assert await answer == (400, {"error": "too long"})
            await prefill.aborted.wait()
            assert await s.failures() == {"decode_error": 1}

    run(scenario())


def test_what_decode_can_do_alone_ends_prefills_work() -> None:
    """It has the prompt in its own cache."""

    async def scenario() -> None:
        async with asked() as (s, prefill, decode, answer):
            decode.may_go_on.set()
            assert (await answer)[0] == 200
            await prefill.aborted.wait()
            assert await s.failures() == {}

    run(scenario())


@pytest.mark.parametrize("decode", [drops, give(503, b"{}")])
def test_another_decode_engine_takes_it_in_turn(decode: Answer) -> None:
    async def scenario() -> None:
        async with asked(decode=decode, num_others=1) as (s, prefill, held, answer):
            held.may_go_on.set()

            async def is_counted() -> bool:
                found = await s.metrics()
                return any(v and k.startswith("kvxfer_proxy_retries_") for k, v in found.items())

            await until(is_counted)
            assert {call.engine for call in s.calls} == {"p0", "d0"}
            assert not prefill.aborted.is_set()
            prefill.may_go_on.set()
            assert (await answer)[0] == 200
            assert s.calls[2].engine == "d1"
            assert s.calls[2].body["kv_transfer_params"] == params()

    run(scenario())


def test_kv_that_the_engine_before_may_have_taken_is_computed_again() -> None:
    """The second decode engine fails for want of it."""
    answers = [give(500, b"{}"), give_text]

    async def fails_once(request: web.Request) -> web.StreamResponse:
        return await (answers.pop(0) if len(answers) > 1 else give_text)(request)

    async def scenario() -> None:
        held = Held(offers, offers), Held(drops, give_text)
        engines = [FakeEngine("d0", held[1]), FakeEngine("d1", give_text)]
        async with scene(prefill=held[0], decode=engines, dispatch=Dispatch.TOGETHER) as s:
            for _ in range(2):  # the first teaches; then it is d0's turn
                held[0].num_asked = 0
                assert (await s.post({"prompt": "p"}))[0] == 200
            held[0].num_asked = held[1].num_asked = 1
            s.decode[1].answer = fails_once
            s.calls.clear()
            asked = ask(s)
            await both_have_begun(*held)
            for side in held:
                side.may_go_on.set()
            assert (await asked)[0] == 200
            assert [call.engine for call in s.calls].count("p0") == 2
            assert len(answers) == 1

    run(scenario())


def test_a_client_that_goes_away_ends_both() -> None:
    async def scenario() -> None:
        async with asked() as (s, prefill, decode, answer):
            answer.cancel()
            await prefill.aborted.wait()
            await decode.aborted.wait()

            async def is_counted() -> bool:
                return await s.failures() == {"client_gone": 1}

            await until(is_counted)
            assert (await s.metrics())["kvxfer_proxy_in_flight"] == 0

    run(scenario())


def test_a_client_that_goes_away_in_mid_stream_ends_decode() -> None:
    wrote, ended = asyncio.Event(), asyncio.Event()

    async def streams(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse()
        await reply.prepare(request)
        await reply.write(b"data: 1\n\n")
        wrote.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        return reply

    async def scenario() -> None:
        async with taught(decode=streams) as (s, prefill, decode):
            for side in (prefill, decode):
                side.may_go_on.set()
            reply = await s.client.post(s.url + COMPLETIONS, data=b'{"prompt":"p","stream":true}')
            assert await reply.content.readany() == b"data: 1\n\n"
            assert wrote.is_set()
            reply.close()
            await ended.wait()

    run(scenario())


def test_nothing_reaches_the_client_before_decode_has_a_piece() -> None:
    """A stream's status comes before its first token: a prefill that fails then is still told."""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def streams(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse()
        await reply.prepare(request)
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        return reply

    async def scenario() -> None:
        async with taught(prefill=give(500, b"broken"), decode=streams) as (s, prefill, decode):
            asked = ask(s)
            decode.may_go_on.set()
            await begun.wait()
            prefill.may_go_on.set()
            status, said = await asked
            assert (status, said["error"]["type"]) == (502, "prefill_error")
            await ended.wait()

    run(scenario())


def test_a_prefill_engine_that_drains_leaves_the_request_to_another() -> None:
    drains = give(200, msgspec.json.encode({"kv_transfer_params": {"kvxfer_refused": "draining"}}))

    async def scenario() -> None:
        held = Held(drains, offers)
        decode = Held(give_text, give_text)
        engines = [FakeEngine("p0", held), FakeEngine("p1", offers)]
        async with scene(prefill=engines, decode=decode, dispatch=Dispatch.TOGETHER) as s:
            assert (await s.post({"prompt": "p"}))[0] == 200  # teaches p0
            decode.num_asked = 0
            assert (await s.post({"prompt": "p"}))[0] == 200  # teaches p1
            decode.num_asked = 1
            s.calls.clear()
            asked = ask(s)
            await both_have_begun(held, decode)
            held.may_go_on.set()
            assert (await asked)[0] == 200
            await decode.aborted.wait()
            assert (await s.states())[1]["p0"] == "draining"
            second = [call for call in s.calls if call.engine == "d0"][1]
            assert [call.engine for call in s.calls].count("p1") == 1
            early(second.body)

    run(scenario())
