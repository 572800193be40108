"""Reference engines behind HTTP, as servers of vLLM are: for the proxy, and to be restarted."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from kvxfer.config import Config
from kvxfer.engine.config import EngineConfig, OnLoadFailure, Role
from kvxfer.engine.engine import Engine
from kvxfer.engine.rpc import Done, Generate, RequestRefused, Token
from kvxfer.errors import PeerLost
from kvxfer.proxy.server import serving
from kvxfer.proxy.settings import ProxySettings, Side, parse_engines
from tests.helpers import free_port

DRAIN_S = 60.0
_LOOK_S = 0.002


@dataclass(slots=True)
class _Asked:
    """A request of HTTP that the engine has."""

    answer: asyncio.Future[Done | RequestRefused | PeerLost]
    token_ids: list[int] = field(default_factory=list)


class Front:
    """One engine and its HTTP server. ``served``: how its requests ended, in all its lives;
    ``refused``: how many met it while it drained.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.port = free_port()
        self.served: list[Done] = []
        self.refused = 0
        self._ids = itertools.count()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """A new life, at the same address; returns when it serves."""
        self._engine = await asyncio.to_thread(Engine, self.config)
        client = await asyncio.to_thread(lambda: self._engine.client)
        self._loop = asyncio.get_running_loop()
        self._asked: dict[str, _Asked] = {}
        self._outbox: deque[Generate] = deque()
        self._is_over = self._is_draining = False
        self._pump = threading.Thread(target=self._exchange, args=(client,), daemon=True)
        self._pump.start()
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=DRAIN_S)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def drain(self) -> bool:
        """As its process does that is told to end."""
        return await asyncio.to_thread(self._engine.drain, DRAIN_S)

    async def stop(self) -> None:
        """Nobody listens from here on, and its processes end."""
        await self._runner.cleanup()
        self._is_over = True
        await asyncio.to_thread(self._pump.join)
        await asyncio.to_thread(self._engine.close)

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(status=503 if self._is_draining else 200)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        request_id = f"r{next(self._ids)}"
        asked = self._asked[request_id] = _Asked(self._loop.create_future())
        self._outbox.append(
            Generate(
                request_id,
                tuple(body["prompt"]),
                body["max_tokens"],
                body.get("kv_transfer_params"),
            )
        )
        match await asked.answer:
            case RequestRefused(is_draining=True):
                self.refused += 1
                self._is_draining = True
                return web.Response(status=503)
            case Done() as done:
                self.served.append(done)
                is_good = done.status == "FINISHED_LENGTH_CAPPED"
                if not is_good:
                    why = [(each.reason, each.detail) for each in done.loads]
                    return web.Response(status=500, text=f"{done.status}: {done.failure}: {why}")
                said = {
                    "choices": [{"token_ids": asked.token_ids}],
                    "kv_transfer_params": done.kv_transfer_params,
                }
                return web.json_response(said)
            case error:
                return web.Response(status=500, text=str(error))

    def _exchange(self, client: Any) -> None:
        """On a thread of its own: the client of an engine is used by one."""
        while not self._is_over:
            while self._outbox:
                client.send(self._outbox.popleft())
            try:
                messages = client.poll(_LOOK_S)
            except PeerLost as e:
                for asked in list(self._asked.values()):
                    self._loop.call_soon_threadsafe(_answer, asked, e)
                return
            for message in messages:
                if isinstance(message, Token):
                    self._asked[message.request_id].token_ids.append(message.token_id)
                elif isinstance(message, Done | RequestRefused):
                    asked = self._asked.pop(message.request_id)
                    self._loop.call_soon_threadsafe(_answer, asked, message)


def _answer(asked: _Asked, message: Done | RequestRefused | PeerLost) -> None:
    if not asked.answer.done():
        asked.answer.set_result(message)


@dataclass(frozen=True)
class Site:
    """Two prefill and two decode engines behind the proxy, and a client of it."""

    prefill: tuple[Front, ...]
    decode: tuple[Front, ...]
    url: str
    client: aiohttp.ClientSession

    @property
    def fronts(self) -> tuple[Front, ...]:
        return self.prefill + self.decode

    async def ask(self, prompt: list[int], max_tokens: int) -> list[int]:
        """The tokens of one request; AssertionError for any other end."""
        body = {"prompt": prompt, "max_tokens": max_tokens}
        async with self.client.post(self.url + "/v1/completions", json=body) as reply:
            text = await reply.text()
            assert reply.status == 200, f"{reply.status}: {text}"
            tokens: list[int] = (await reply.json())["choices"][0]["token_ids"]
            return tokens


@asynccontextmanager
async def site(model: str, wire: str, sizes: tuple[int, int, int, int]) -> AsyncIterator[Site]:
    """``sizes``: tensor-parallel ranks of each engine, prefill first. Block sizes differ. A load
    that fails is a request that fails.
    """
    kv = Config(port=0, transport=wire, log_level="ERROR", connect_timeout_s=30.0, lease_s=10.0)
    roles = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)
    fronts = [
        Front(
            EngineConfig(
                role=role,
                engine_id=f"{role.value}{number}",
                model=model,
                tp_size=tp_size,
                block_size=16 if role is Role.PREFILL else 32,
                enable_prefix_caching=False,
                on_load_failure=OnLoadFailure.FAIL,
                kv=kv,
            )
        )
        for number, (role, tp_size) in enumerate(zip(roles, sizes, strict=True))
    ]
    async with AsyncExitStack() as stack:
        await asyncio.gather(*(front.start() for front in fronts))
        for front in fronts:
            stack.push_async_callback(front.stop)
        settings = ProxySettings(
            prefill=parse_engines(Side.PREFILL, [front.url for front in fronts[:2]]),
            decode=parse_engines(Side.DECODE, [front.url for front in fronts[2:]]),
            port=0,
        )
        url = await stack.enter_async_context(serving(settings))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        yield Site(tuple(fronts[:2]), tuple(fronts[2:]), url, client)
