"""The proxy between a client and engines: who is asked what, and what comes back when."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvxfer.proxy import server
from kvxfer.proxy.server import serving
from kvxfer.proxy.settings import ProxySettings, Side, parse_engines
from tests.proxy.fakes import (
    PARAMS,
    Answer,
    FakeEngine,
    give,
    give_params,
    give_text,
    run,
    scene,
    until,
)

PATHS = ["/v1/completions", "/v1/chat/completions"]
ASKED = {"model": "m", "prompt": "p", "messages": [], "max_tokens": 9, "min_tokens": 2}
KEY = {"Authorization": "Bearer k", "X-Request-Id": "r1"}


@pytest.mark.parametrize("path", PATHS)
def test_one_request_becomes_two(path: str) -> None:
    async def scenario() -> None:
        async with scene() as s:
            raw = json.dumps(ASKED).encode()
            async with s.client.post(s.url + path, data=raw, headers=KEY) as reply:
                assert reply.status == 200
                assert await reply.read() == b'{"choices": [{"text": "hello"}]}'
                assert reply.headers["Content-Type"] == "application/json; charset=utf-8"
                assert reply.headers["X-Engine"] == "yes"
                assert reply.headers["X-Request-Id"] == "r1"
            prefill, decode = s.calls
            assert (prefill.engine, prefill.path) == ("p0", path)
            assert (decode.engine, decode.path) == ("d0", path)
            for call in s.calls:
                assert call.headers["Authorization"] == "Bearer k"
                assert call.headers["X-Request-Id"] == "r1"
                assert call.headers["Content-Type"] == "application/json"
            assert prefill.body == {
                "model": "m",
                "prompt": "p",
                "messages": [],
                "max_tokens": 1,
                "stream": False,
                "kv_transfer_params": {
                    "do_remote_decode": True,
                    "do_remote_prefill": False,
                    "remote_engine_id": None,
                    "remote_block_ids": None,
                    "remote_host": None,
                    "remote_port": None,
                },
            }
            # Byte for byte, nested key included.
            assert decode.raw.endswith(b',"kv_transfer_params":' + PARAMS + b"}")
            without = {k: v for k, v in decode.body.items() if k != "kv_transfer_params"}
            assert without == ASKED

    run(scenario())


def test_a_request_without_an_id_gets_one() -> None:
    async def scenario() -> None:
        async with scene() as s:
            for _ in range(2):
                await s.post({"prompt": "p"})
            ids = [call.headers["X-Request-Id"] for call in s.calls]
            assert ids[0] == ids[1] != ids[2] == ids[3]
            assert all(len(each) == 32 for each in ids)

    run(scenario())


def test_two_by_three_engines_take_turns() -> None:
    async def scenario() -> None:
        prefill = [FakeEngine(f"p{i}", give_params) for i in range(2)]
        decode = [FakeEngine(f"d{i}", give_text) for i in range(3)]
        async with scene(prefill=prefill, decode=decode) as s:
            for _ in range(6):
                assert (await s.post({"prompt": "p"}))[0] == 200
            names = [call.engine for call in s.calls]
            assert names == ["p0", "d0", "p1", "d1", "p0", "d2", "p1", "d0", "p0", "d1", "p1", "d2"]

    run(scenario())


def test_a_sick_engine_is_skipped_until_it_is_well(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        decode = [FakeEngine(f"d{i}", give_text) for i in range(2)]
        async with scene(decode=decode) as s:

            async def used() -> Counter[str]:
                s.calls.clear()
                for _ in range(4):
                    assert (await s.post({"prompt": "p"}))[0] == 200
                return Counter(call.engine for call in s.calls if call.engine != "p0")

            assert await s.states() == (200, {"p0": "up", "d0": "up", "d1": "up"})
            assert await used() == {"d0": 2, "d1": 2}
            decode[0].health_status = 500

            async def is_down() -> bool:
                return (await s.states()) == (200, {"p0": "up", "d0": "down", "d1": "up"})

            await until(is_down)
            assert await used() == {"d1": 4}
            up = f'kvxfer_proxy_engine_up{{engine="{decode[0].url}",side="decode"}}'
            assert (await s.metrics())[up] == 0
            decode[0].health_status = 200

            async def is_up() -> bool:
                return (await s.states())[1]["d0"] == "up"

            await until(is_up)
            assert await used() == {"d0": 2, "d1": 2}
            assert (await s.metrics())[up] == 1
            url = decode[0].url
        news = [r.getMessage() for r in caplog.records if f"decode {url} is" in r.getMessage()]
        assert news == [
            f"decode {url} is up",
            f"decode {url} is down: answers /health with 500",
            f"decode {url} is up",
        ]

    with caplog.at_level(logging.INFO, "kvxfer.proxy"):
        run(scenario())
    # One line at the start, two engines' first states besides those above, none for a request.
    assert len(caplog.records) == 6


def test_streams_come_as_they_are_sent() -> None:
    gate = asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        await reply.write(b"data: 1\n\n")
        await gate.wait()
        await reply.write(b"data: 2\n\n")
        await gate.wait()
        await reply.write(b"data: [DONE]\n\n")
        return reply

    async def scenario() -> None:
        async with scene(decode=stream) as s:
            asked = {"prompt": "p", "stream": True, "stream_options": {"include_usage": True}}
            async with s.client.post(s.url + PATHS[0], json=asked) as reply:
                assert reply.content_type == "text/event-stream"
                assert await reply.content.readany() == b"data: 1\n\n"
                assert not gate.is_set()  # the engine has not gone on
                assert (await s.metrics())["kvxfer_proxy_in_flight"] == 1
                gate.set()
                assert await reply.read() == b"data: 2\n\ndata: [DONE]\n\n"
            prefill, decode = s.calls
            assert prefill.body["stream"] is False
            assert "stream_options" not in prefill.body
            assert decode.body["stream"] is True
            assert decode.body["stream_options"] == {"include_usage": True}

            async def is_over() -> bool:
                return (await s.metrics())["kvxfer_proxy_in_flight"] == 0

            await until(is_over)

    run(scenario())


@pytest.mark.parametrize("where", ["prefill", "decode before its answer", "decode stream"])
def test_a_client_that_goes_away_ends_the_engines_work(where: str) -> None:
    started, aborted = asyncio.Event(), asyncio.Event()

    async def work(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse()
        if where == "decode stream":
            await reply.prepare(request)
            await reply.write(b"data: 1\n\n")
        started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            aborted.set()
            raise
        return reply

    async def scenario() -> None:
        answers: dict[str, Answer] = {where.split()[0]: work}
        async with scene(**answers) as s:
            ask = asyncio.create_task(s.client.post(s.url + PATHS[0], json={"prompt": "p"}))
            await started.wait()
            assert not aborted.is_set()
            if where == "decode stream":
                (await ask).close()
            else:
                ask.cancel()
            await aborted.wait()

            async def is_counted() -> bool:
                return await s.failures() == {"client_gone": 1}

            await until(is_counted)
            assert (await s.metrics())["kvxfer_proxy_in_flight"] == 0
            assert len(s.calls) == (1 if where == "prefill" else 2)

    run(scenario())


def test_who_goes_away_after_prefill_is_still_heard_of_by_decode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A decode engine that admits the request only then: its abort gives the blocks back."""
    monkeypatch.setattr(server, "ABANDONED_S", 300.0)
    asked, may_admit = asyncio.Event(), asyncio.Event()
    ends: list[str] = []

    async def admit(request: web.Request) -> web.StreamResponse:
        asked.set()
        try:
            await may_admit.wait()
            ends.append("admitted")
            reply = web.StreamResponse()
            await reply.prepare(request)
            await reply.write(b"data: 1\n\n")
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ends.append("aborted")
            raise
        return reply

    async def scenario() -> None:
        async with scene(decode=admit) as s:
            ask = asyncio.create_task(s.client.post(s.url + PATHS[0], json={"prompt": "p"}))
            await asked.wait()
            ask.cancel()

            async def is_counted() -> bool:
                return await s.failures() == {"client_gone": 1}

            async def is_aborted() -> bool:
                return "aborted" in ends

            await until(is_counted)
            may_admit.set()
            await until(is_aborted)
            assert ends == ["admitted", "aborted"]

    run(scenario())


def test_a_client_that_stays_until_decode_has_begun_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "ABANDONED_S", 0.0)
    aborted = asyncio.Event()
    asked = asyncio.Event()

    async def admit(_request: web.Request) -> web.StreamResponse:
        asked.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            aborted.set()
            raise
        return web.StreamResponse()

    async def scenario() -> None:
        async with scene(decode=admit) as s:
            ask = asyncio.create_task(s.client.post(s.url + PATHS[0], json={"prompt": "p"}))
            await asked.wait()
            ask.cancel()
            await aborted.wait()

    run(scenario())


async def drop(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.StreamResponse()


unavailable = give(503, b"")


@pytest.mark.parametrize("gone", [drop, unavailable, None], ids=["drops", "503", "is not there"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_another_engine_takes_what_one_that_goes_has_not_answered(
    side: str, gone: Answer | None
) -> None:
    """At once, and with the same KV."""

    async def scenario() -> None:
        well = {"prefill": give_params, "decode": give_text}[side]
        pair = [FakeEngine("x", gone or well), FakeEngine("y", well)]
        engines: dict[str, Any] = {side: pair}
        async with scene(**engines, health_interval_s=60) as s:
            if gone is None:
                await pair[0].stop()
            status, answer = await s.post({"prompt": "p"})
            assert (status, answer) == (200, {"choices": [{"text": "hello"}]})
            asked = [call.engine for call in s.calls]
            expected = {"prefill": ["x", "y", "d0"], "decode": ["p0", "x", "y"]}[side]
            assert asked == [name for name in expected if gone or name != "x"]
            assert s.calls[-1].raw.endswith(PARAMS + b"}")
            assert await s.failures() == {}
            retries = {n: v for n, v in (await s.metrics()).items() if "retries_total" in n and v}
            assert list(retries.values()) == [1]
            # Who was refused need not find out again; who was cut off may have been unlucky
            await s.post({"prompt": "p"})
            assert ("x" in [call.engine for call in s.calls[len(asked) :]]) == (gone is drop)

    run(scenario())


def test_kv_that_a_decode_engine_took_with_it_is_computed_again() -> None:
    """The next one finds that its offer was read."""
    answers = iter([give(500, b"{}"), give_text])

    async def fail_once(request: web.Request) -> web.StreamResponse:
        return await next(answers)(request)

    async def scenario() -> None:
        decode = [FakeEngine("d0", drop), FakeEngine("d1", fail_once)]
        async with scene(decode=decode, health_interval_s=60) as s:
            decode_first = s.calls
            status, _ = await s.post({"prompt": "p"})
            assert status == 200
            assert [call.engine for call in decode_first] == ["p0", "d0", "d1", "p0", "d0", "d1"]
            assert await s.failures() == {}

    run(scenario())


def test_an_error_of_decode_is_no_reason_to_ask_another() -> None:
    async def scenario() -> None:
        decode = [FakeEngine("d0", give(500, b"{}")), FakeEngine("d1", give_text)]
        async with scene(decode=decode) as s:
            assert (await s.post({"prompt": "p"}))[0] == 500
            assert [call.engine for call in s.calls] == ["p0", "d0"]

    run(scenario())


DRAINS = b'{"kv_transfer_params":{"do_remote_prefill":false,"kvxfer_refused":"draining"}}'


def test_a_prefill_engine_that_drains_has_no_turn_until_it_was_started_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kvxfer.proxy")

    async def scenario() -> None:
        prefill = [FakeEngine("p0", give(200, DRAINS)), FakeEngine("p1", give_params)]
        async with scene(prefill=prefill) as s:

            async def state() -> str:
                return (await s.states())[1]["p0"]

            async def asked() -> list[str]:
                s.calls.clear()
                assert (await s.post({"prompt": "p"}))[0] == 200
                return [call.engine for call in s.calls]

            assert await asked() == ["p0", "p1", "d0"]
            for _ in range(3):  # it answers /health as before
                assert await asked() == ["p1", "d0"]
                assert await state() == "draining"
            said = f"prefill {prefill[0].url} drains: requests go to another one, where there is"
            assert len([line for line in caplog.messages if line.startswith(said)]) == 1
            assert not [line for line in caplog.messages if "is down" in line]
            port = int(prefill[0].url.rpartition(":")[2])
            await prefill[0].stop()

            async def is_down() -> bool:
                return await state() == "down"

            async def is_up() -> bool:
                return await state() == "up"

            await until(is_down)
            prefill[0].answer = give_params
            async with prefill[0].running(port):
                await until(is_up)
                assert {(await asked())[0] for _ in range(2)} == {"p0", "p1"}

    run(scenario())


def test_where_all_prefill_engines_drain_decode_computes_the_prompt() -> None:
    async def scenario() -> None:
        async with scene(prefill=give(200, DRAINS)) as s:
            for _ in range(2):
                s.calls.clear()
                assert (await s.post({"prompt": "p"}))[0] == 200
                assert [call.engine for call in s.calls] == ["p0", "d0"]
                assert "kv_transfer_params" not in s.calls[1].body
            assert (await s.states())[0] == 200

    run(scenario())


def test_compressed_answers_stay_as_they_are() -> None:
    async def squeeze(_request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"squeezed", headers={"Content-Encoding": "gzip"})

    async def scenario() -> None:
        async with scene(decode=squeeze) as s, aiohttp.ClientSession(auto_decompress=False) as c:
            async with c.post(s.url + PATHS[0], json={"prompt": "p"}) as reply:
                assert reply.headers["Content-Encoding"] == "gzip"
                assert await reply.read() == b"squeezed"
            assert s.calls[0].headers["Accept-Encoding"] == "identity"
            assert s.calls[1].headers["Accept-Encoding"] == "gzip, deflate"

    run(scenario())


def test_nothing_of_one_client_stays_for_the_next() -> None:
    async def set_cookie(_request: web.Request) -> web.StreamResponse:
        return web.json_response({}, headers={"Set-Cookie": "who=first"})

    async def scenario() -> None:
        async with scene(decode=set_cookie) as s:
            for _ in range(2):
                async with (
                    aiohttp.ClientSession() as client,
                    client.post(s.url + PATHS[0], json={"prompt": "p"}) as reply,
                ):
                    assert reply.headers["Set-Cookie"] == "who=first"
            assert not any("Cookie" in call.headers for call in s.calls)

    run(scenario())


def test_models_come_from_a_decode_engine() -> None:
    async def scenario() -> None:
        async with scene() as s, s.client.get(s.url + "/v1/models") as reply:
            assert await reply.json() == {"data": [{"id": "model of d0"}]}

    run(scenario())


@pytest.mark.parametrize("gone", ["503", "is not there"])
def test_models_come_from_another_decode_engine(gone: str) -> None:
    async def scenario() -> None:
        decode = [FakeEngine(f"d{i}", give_text) for i in range(2)]
        async with scene(decode=decode, health_interval_s=60) as s:
            if gone == "503":
                decode[0].models_status = 503
            else:
                await decode[0].stop()
            async with s.client.get(s.url + "/v1/models") as reply:
                assert await reply.json() == {"data": [{"id": "model of d1"}]}
            assert await s.failures() == {}

    run(scenario())


def test_what_is_counted() -> None:
    async def scenario() -> None:
        async with scene() as s:
            for path in (*PATHS, PATHS[0]):
                await s.post({"prompt": "p"}, path)
            counted = await s.metrics()
            assert counted['kvxfer_proxy_requests_total{path="/v1/completions"}'] == 2
            assert counted['kvxfer_proxy_requests_total{path="/v1/chat/completions"}'] == 1
            assert counted["kvxfer_proxy_in_flight"] == 0
            assert counted["kvxfer_proxy_prefill_seconds_count"] == 3
            assert 0 < counted["kvxfer_proxy_prefill_seconds_sum"] < 10
            assert counted['kvxfer_proxy_failures_total{reason="client_gone"}'] == 0

    run(scenario())


def test_one_engine_can_be_both_sides() -> None:
    async def scenario() -> None:
        both = FakeEngine("b", give_params)
        async with both.running():
            settings = ProxySettings(
                prefill=parse_engines(Side.PREFILL, [both.url]),
                decode=parse_engines(Side.DECODE, [both.url]),
                port=0,
            )
            async with (
                serving(settings) as url,
                aiohttp.ClientSession() as client,
                client.post(url + PATHS[0], json={"prompt": "p"}) as reply,
            ):
                assert reply.status == 200
        sent = [call.body["kv_transfer_params"] for call in both.calls]
        assert [params["do_remote_prefill"] for params in sent] == [False, True]

    run(scenario())


def test_many_at_once() -> None:
    """More than the client library's usual 100 connections, none of which waits for another."""
    num_requests = 150
    waiting = 0
    all_there = asyncio.Event()

    async def gather(_request: web.Request) -> web.StreamResponse:
        nonlocal waiting
        waiting += 1
        if waiting == num_requests:
            all_there.set()
        await all_there.wait()
        return web.json_response({})

    async def scenario() -> None:
        async with scene(decode=gather, health_interval_s=5) as s:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

                async def ask() -> int:
                    async with client.post(s.url + PATHS[0], json={"prompt": "p"}) as reply:
                        await reply.read()
                        return reply.status

                statuses = await asyncio.gather(*(ask() for _ in range(num_requests)))
            assert Counter(statuses) == {200: num_requests}

    run(scenario())
