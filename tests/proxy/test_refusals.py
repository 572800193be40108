"""What the proxy does not do, what it says instead, and errors that it passes on."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
import pytest
from aiohttp import web

from kvxfer.errors import ConfigError
from kvxfer.proxy.server import serving
from kvxfer.proxy.settings import OnMissingKv, ProxySettings, Side, parse_engines
from tests.helpers import free_port
from tests.proxy.fakes import (
    Answer,
    FakeEngine,
    give,
    give_params,
    give_text,
    run,
    scene,
)

PATHS = ["/v1/completions", "/v1/chat/completions"]
ASKED = {"model": "m", "prompt": "p", "messages": [], "max_tokens": 9, "min_tokens": 2}
KEY = {"Authorization": "Bearer k", "X-Request-Id": "r1"}


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_no_engine_up(side: str) -> None:
    async def scenario() -> None:
        sick = FakeEngine("sick", give_text, health_status=503)
        parts = {"prefill": FakeEngine("p0", give_params), "decode": FakeEngine("d0", give_text)}
        parts[side] = sick
        engines = {name: [engine] for name, engine in parts.items()}
        for policy in OnMissingKv:  # nothing to recompute on either
            async with scene(**engines, on_missing_kv=policy) as s:
                status, reply = await s.post({"prompt": "p"})
                assert status == 503
                assert reply["error"]["type"] == f"no_{side}_engine"
                assert reply["error"]["message"] == (
                    f"no {side} engine is up: {sick.url} answers /health with 503"
                )
                assert s.calls == []
                assert (await s.states())[0] == 503
                assert await s.failures() == {f"no_{side}_engine": 1}

    run(scenario())


NO_KV = [
    give(200, b'{"choices":[]}'),
    give(200, b'{"kv_transfer_params":null}'),
    give(200, b'{"kv_transfer_params":{"do_remote_prefill":false}}'),
]
FAILED = [
    (give(200, b"<html>", "text/html"), 502, "prefill_unreadable"),
    (give(500, b"broken"), 502, "prefill_error"),
    (give(302, b""), 502, "prefill_error"),
]


@pytest.mark.parametrize("policy", OnMissingKv)
@pytest.mark.parametrize("answer", NO_KV)
def test_what_prefill_offers_no_kv_for_is_computed_by_decode(
    caplog: pytest.LogCaptureFixture, answer: Answer, policy: OnMissingKv
) -> None:
    """Whatever is to become of failures: it is none. Each is counted; a warning names the engine
    once a minute.
    """

    async def scenario() -> None:
        async with scene(prefill=answer, on_missing_kv=policy) as s:
            asked = {"prompt": "p", "max_tokens": 3}
            for _ in range(3):
                assert await s.post(asked) == (200, {"choices": [{"text": "hello"}]})
            assert [call.body for call in s.calls if call.engine == "d0"] == [asked] * 3
            name = 'kvxfer_proxy_without_kv_total{reason="prefill_without_kv"}'
            assert (await s.metrics())[name] == 3
            assert await s.failures() == {}
            (line,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
            assert line.startswith(
                "decoding without KV (1 request since the last such line): prefill "
            )
            assert s.prefill[0].url in line

    run(scenario())


@pytest.mark.parametrize(("answer", "status", "reason"), FAILED)
def test_a_failed_prefill_is_refused(answer: Answer, status: int, reason: str) -> None:
    async def scenario() -> None:
        async with scene(prefill=answer) as s:
            got, reply = await s.post({"prompt": "p"}, headers=KEY)
            assert (got, reply["error"]["type"]) == (status, reason)
            assert reply["error"]["code"] == status
            assert reply["error"]["message"].startswith(f"prefill {s.prefill[0].url}: ")
            assert [call.engine for call in s.calls] == ["p0"]  # never a plain request
            assert await s.failures() == {reason: 1}

    run(scenario())


def test_what_prefill_refuses_is_passed_on() -> None:
    """As decode's refusals are: with what tells the client when to come again, and no address."""

    async def busy(_request: web.Request) -> web.StreamResponse:
        headers = {"Retry-After": "7", "Content-Type": "text/x-odd", "X-Request-Id": "r1"}
        return web.Response(status=429, body=b"{'not': json", headers=headers)

    async def scenario() -> None:
        async with scene(prefill=busy) as s:
            url, data = s.url + PATHS[0], b'{"prompt":"p"}'
            async with s.client.post(url, data=data, headers=KEY) as reply:
                assert (reply.status, reply.content_type) == (429, "text/x-odd")
                assert await reply.read() == b"{'not': json"
                for name, value in (("Retry-After", "7"), ("X-Request-Id", "r1")):
                    assert reply.headers.getall(name) == [value]
                for name in ("Content-Type", "Content-Length", "Date", "Server"):
                    assert len(reply.headers.getall(name)) == 1
            assert [call.engine for call in s.calls] == ["p0"]
            assert await s.failures() == {"prefill_error": 1}

    run(scenario())


@pytest.mark.parametrize(("answer", "_status", "reason"), FAILED)
def test_a_failed_prefill_is_recomputed_and_counted(
    answer: Answer, _status: int, reason: str
) -> None:
    async def scenario() -> None:
        async with scene(prefill=answer, on_missing_kv=OnMissingKv.RECOMPUTE) as s:
            asked = {"prompt": "p", "max_tokens": 3}
            assert await s.post(asked) == (200, {"choices": [{"text": "hello"}]})
            assert s.calls[1].body == asked
            counted = await s.metrics()
            assert counted[f'kvxfer_proxy_without_kv_total{{reason="{reason}"}}'] == 1
            assert await s.failures() == {}

    run(scenario())


async def breaks_off(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


@pytest.mark.parametrize("num_prefill", [1, 2])
@pytest.mark.parametrize("policy", OnMissingKv)
def test_after_the_last_try_the_policy_decides(policy: OnMissingKv, num_prefill: int) -> None:
    """However many prefill engines there are to try."""

    async def scenario() -> None:
        prefill = [FakeEngine(f"p{i}", breaks_off) for i in range(num_prefill)]
        async with scene(prefill=prefill, on_missing_kv=policy) as s:
            status, reply = await s.post({"prompt": "p"})
            counted = await s.metrics()
            without = counted['kvxfer_proxy_without_kv_total{reason="prefill_unreachable"}']
            if policy is OnMissingKv.REFUSE:
                assert (status, reply["error"]["type"]) == (502, "prefill_unreachable")
                assert without == 0
            else:
                assert (status, reply) == (200, {"choices": [{"text": "hello"}]})
                assert s.calls[-1].body == {"prompt": "p"}
                assert without == 1

    run(scenario())


def test_prefill_that_takes_too_long() -> None:
    async def wait(_request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        raise AssertionError

    async def scenario() -> None:
        async with scene(prefill=wait, prefill_timeout_s=0.1) as s:
            status, reply = await s.post({"prompt": "p"})
            assert (status, reply["error"]["type"]) == (502, "prefill_timeout")
            assert (
                "expected an answer in 0.1 s (--timeout-s), got none" in reply["error"]["message"]
            )

    run(scenario())


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_engine_that_is_not_there_any_more(side: str) -> None:
    """Its last probe was good. The first request finds out, the next one need not."""

    async def scenario() -> None:
        engine = FakeEngine("x", give_text)
        other = FakeEngine("o", give_params)
        calls = other.calls
        async with other.running():
            async with asyncio.timeout(100), engine.running():
                sides = [engine, other] if side == "prefill" else [other, engine]
                settings = ProxySettings(
                    prefill=parse_engines(Side.PREFILL, [sides[0].url]),
                    decode=parse_engines(Side.DECODE, [sides[1].url]),
                    port=0,
                    health_interval_s=60,
                )
                run_proxy = serving(settings)
                url = await run_proxy.__aenter__()
            async with aiohttp.ClientSession() as client:
                for status, reason in ((502, f"{side}_unreachable"), (503, f"no_{side}_engine")):
                    async with client.post(url + PATHS[0], json={"prompt": "p"}) as reply:
                        error = (await reply.json())["error"]
                        assert (reply.status, error["type"]) == (status, reason)
                        assert engine.url in error["message"]
                        if status == 502:
                            assert error["message"].endswith(f"{engine.url}: connection refused")
            await run_proxy.__aexit__(None, None, None)
        assert len(calls) == (1 if side == "decode" else 0)

    run(scenario())


def test_errors_of_decode_are_passed_on() -> None:
    async def scenario() -> None:
        async with scene(decode=give(422, b"{'not': json", "text/x-odd")) as s:
            async with s.client.post(s.url + PATHS[0], json={"prompt": "p"}) as reply:
                assert (reply.status, reply.content_type) == (422, "text/x-odd")
                assert await reply.read() == b"{'not': json"
            assert await s.failures() == {"decode_error": 1}

    run(scenario())


async def break_off(request: web.Request) -> web.StreamResponse:
    reply = web.StreamResponse()
    await reply.prepare(request)
    await reply.write(b"data: 1\n\n")
    assert request.transport is not None
    request.transport.close()
    return reply


def test_a_piece_is_never_passed_off_as_the_whole() -> None:
    async def scenario() -> None:
        async with scene(decode=break_off) as s:
            async with s.client.post(s.url + PATHS[0], json={"prompt": "p"}) as reply:
                assert reply.status == 200
                with pytest.raises(aiohttp.ClientPayloadError):
                    await reply.read()
            assert await s.failures() == {"decode_cut": 1}

    run(scenario())


def test_a_piece_is_not_the_whole_for_who_takes_the_end_of_a_connection_for_it() -> None:
    """A client of HTTP/1.0: neither a length nor a last chunk tells it that more should come."""

    async def scenario() -> None:
        async with scene(decode=break_off) as s:
            host, _, port = s.url.removeprefix("http://").partition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            asked = b'{"prompt":"p"}'
            head = f"POST {PATHS[0]} HTTP/1.0\r\nContent-Length: {len(asked)}\r\n\r\n"
            writer.write(head.encode() + asked)
            with pytest.raises(ConnectionResetError):
                await reader.read()
            writer.close()

    run(scenario())


def test_bodies_that_are_refused_reach_no_engine() -> None:
    async def scenario() -> None:
        async with scene(max_body_nbytes=100) as s:
            status, reply = await s.post({"prompt": "p", "n": 2})
            assert status == 400
            assert reply["error"]["param"] == "n"
            status, reply = await s.post({"prompt": "p", "kv_transfer_params": {"x": 1}})
            assert (status, reply["error"]["param"]) == (400, "kv_transfer_params")
            assert (await s.post(b"{"))[1]["error"]["type"] == "bad_body"
            assert s.calls == []
            assert await s.failures() == {"not_transferable": 2, "bad_body": 1}

    run(scenario())


@pytest.mark.parametrize("is_chunked", [False, True])
def test_bodies_are_bounded(is_chunked: bool) -> None:
    async def pieces(raw: bytes) -> object:
        for start in range(0, len(raw), 16):
            yield raw[start : start + 16]

    async def scenario() -> None:
        async with scene(max_body_nbytes=100) as s:
            for nbytes, want in ((100, 200), (101, 413)):
                raw = b'{"prompt":"' + b"p" * (nbytes - 13) + b'"}'
                assert len(raw) == nbytes
                data = pieces(raw) if is_chunked else raw
                async with s.client.post(s.url + PATHS[0], data=data) as reply:
                    assert reply.status == want
                    error = (await reply.json()).get("error")
            assert error["type"] == "body_too_large"
            assert error["message"].startswith("body: expected at most 100 bytes")
            assert len(s.calls) == 2

    run(scenario())


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/embeddings", 404), ("POST", "/", 404), ("GET", "/v1/completions", 405)],
)
def test_other_paths_are_told_what_is_served(method: str, path: str, status: int) -> None:
    async def scenario() -> None:
        async with scene() as s:
            async with s.client.request(method, s.url + path) as reply:
                assert reply.status == status
                error = (await reply.json())["error"]
            assert error["message"] == (
                f"{method} {path}: not served here; served: POST /v1/completions, "
                "POST /v1/chat/completions, GET /v1/models, GET /health, GET /metrics"
            )

    run(scenario())


def test_a_port_in_use() -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            settings = ProxySettings(
                prefill=parse_engines(Side.PREFILL, [f"http://127.0.0.1:{free_port()}"]),
                decode=parse_engines(Side.DECODE, [f"http://127.0.0.1:{free_port()}"]),
                port=port,
            )
            with pytest.raises(ConfigError, match=f"--listen: 127.0.0.1:{port} is in use; end"):
                async with serving(settings):
                    pass

    run(scenario())
