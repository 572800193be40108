"""Engines that only speak HTTP, and a proxy in front of them, all in one loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDictProxy

from kvxfer.proxy.server import serving
from kvxfer.proxy.settings import ProxySettings, Side, parse_engines

TIMEOUT_S = 120.0

# As a prefill engine with kvxfer answers, with numbers and escapes that a re-encoding would change.
PARAMS = (
    b'{"do_remote_prefill":true,"do_remote_decode":false,"remote_engine_id":"p0",'
    b'"remote_block_ids":[[7,8],[]],"remote_host":"10.0.0.1","remote_port":5700,'
    b'"kvxfer":{"incarnation":"i\\u00e9","number":12345678901234567890123,"nonce":"q\\/==",'
    b'"tokens":31,"endpoint":"tcp://10.0.0.1:5700","x":1.50}}'
)


@dataclass(frozen=True)
class Call:
    """One request that an engine got."""

    engine: str
    path: str
    raw: bytes
    headers: CIMultiDictProxy[str]

    @property
    def body(self) -> dict[str, Any]:
        decoded: dict[str, Any] = msgspec.json.decode(self.raw)
        return decoded


Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def give_params(_request: web.Request) -> web.StreamResponse:
    body = b'{"id":"cmpl-1","choices":[{"text":"x"}],"kv_transfer_params":' + PARAMS + b"}"
    return web.Response(body=body, content_type="application/json")


async def give_text(_request: web.Request) -> web.StreamResponse:
    return web.json_response({"choices": [{"text": "hello"}]}, headers={"X-Engine": "yes"})


def give(status: int, body: bytes, content_type: str = "application/json") -> Answer:
    async def answer(_request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, body=body, content_type=content_type)

    return answer


@dataclass
class FakeEngine:
    """``answer`` takes every POST; ``calls`` is shared by the engines of a test, in order."""

    name: str
    answer: Answer
    calls: list[Call] = field(default_factory=list)
    health_status: int = 200
    models_status: int = 200
    url: str = ""
    stop: Callable[[], Awaitable[None]] = field(init=False)

    async def _post(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        self.calls.append(Call(self.name, request.path, raw, request.headers))
        return await self.answer(request)

    async def _models(self, _request: web.Request) -> web.Response:
        models = {"data": [{"id": f"model of {self.name}"}]}
        return web.json_response(models, status=self.models_status)

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(status=self.health_status)

    @asynccontextmanager
    async def running(self, port: int = 0) -> AsyncIterator[None]:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/{rest:.*}", self._post)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1
        )
        await runner.setup()
        self.stop = runner.cleanup
        try:
            await web.TCPSite(runner, "127.0.0.1", port).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield
        finally:
            await runner.cleanup()


@dataclass(frozen=True)
class Scene:
    """A proxy, its engines, and a client of it."""

    url: str
    client: aiohttp.ClientSession
    calls: list[Call]
    prefill: Sequence[FakeEngine]
    decode: Sequence[FakeEngine]

    async def post(
        self, body: object, path: str = "/v1/completions", **options: Any
    ) -> tuple[int, dict[str, Any]]:
        raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
        async with self.client.post(self.url + path, data=raw, **options) as reply:
            assert reply.content_type == "application/json"
            decoded: dict[str, Any] = msgspec.json.decode(await reply.read())
            return reply.status, decoded

    async def metrics(self) -> dict[str, float]:
        """Every sample by its name with labels."""
        async with self.client.get(self.url + "/metrics") as reply:
            assert reply.content_type == "text/plain"
            lines = (await reply.text()).splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return {name: float(value) for name, value in pairs}

    async def failures(self) -> dict[str, float]:
        """Failures that were counted, by reason."""
        return {
            name.split('"')[1]: count
            for name, count in (await self.metrics()).items()
            if name.startswith("kvxfer_proxy_failures_total") and count
        }

    async def states(self) -> tuple[int, dict[str, str]]:
        """Status of /health, and every engine's state by its fake's name."""
        names = {engine.url: engine.name for engine in (*self.prefill, *self.decode)}
        async with self.client.get(self.url + "/health") as reply:
            report = await reply.json()
            return reply.status, {names[e["url"]]: e["state"] for e in report["engines"]}


@asynccontextmanager
async def scene(
    *,
    prefill: Answer | Sequence[FakeEngine] = give_params,
    decode: Answer | Sequence[FakeEngine] = give_text,
    **options: Any,
) -> AsyncIterator[Scene]:
    """One engine a side, or those that are given, started; probes come every 50 ms."""
    p = [FakeEngine("p0", prefill)] if callable(prefill) else list(prefill)
    d = [FakeEngine("d0", decode)] if callable(decode) else list(decode)
    calls: list[Call] = []
    async with AsyncExitStack() as stack:
        for engine in (*p, *d):
            engine.calls = calls
            await stack.enter_async_context(engine.running())
        settings = ProxySettings(
            prefill=parse_engines(Side.PREFILL, [engine.url for engine in p]),
            decode=parse_engines(Side.DECODE, [engine.url for engine in d]),
            port=0,
            **{"health_interval_s": 0.05, **options},
        )
        url = await stack.enter_async_context(serving(settings))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        yield Scene(url, client, calls, p, d)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    """Run a test's scenario to its end, within a bound."""
    asyncio.run(asyncio.wait_for(scenario, TIMEOUT_S))


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for it; ``run`` bounds the wait."""
    while not await condition():
        await asyncio.sleep(0.01)
