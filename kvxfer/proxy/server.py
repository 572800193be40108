"""The proxy at work: it listens, watches the engines, asks two of them for each request, and ends
cleanly.

One request: prefill engine, then decode engine, whose answer goes to the client piece by piece as
it comes. A client that goes away cancels what runs for it, and the engine sees its connection
close. A prefill engine keeps the prompt's blocks until a decode engine has taken the KV or given it
up. So one of them hears of every request whose prefill has answered, also when nobody waits for the
answer any more, and gives it up when the proxy hangs up. Where no decode engine can be reached, the
prefill engine's own lease ends it.

With ``Dispatch.TOGETHER`` both are asked at once, once the prefill engine's last answer tells how
decode finds an offer that is not there yet. The client gets nothing before decode has a piece of
its answer. Until then what one side fails ends the other's work, and the request goes on in turn.
So it does where another engine has computed the prompt than the one that decode asks.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import struct
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from socket import SO_LINGER, SOL_SOCKET
from typing import Any

import aiohttp
import msgspec
from aiohttp import hdrs, web

from kvxfer.connector.params import early_params, mint_request
from kvxfer.errors import ConfigError
from kvxfer.log_limit import LogLimit
from kvxfer.proxy.bodies import (
    PATHS,
    REQUEST_ID,
    UNAVAILABLE,
    ClientBody,
    Drains,
    EngineGone,
    EngineRefused,
    ErrorReply,
    NoKv,
    Reason,
    find,
    learned_params,
    parse_body,
    read_params,
    to_client,
    to_decode,
    to_prefill,
)
from kvxfer.proxy.metrics import CONTENT_TYPE, Metrics
from kvxfer.proxy.pool import UP, EnginePool, Seen, State
from kvxfer.proxy.settings import Dispatch, Engine, OnMissingKv, ProxySettings, Side

MODELS = "/v1/models"
_HEALTH = "/health"
_METRICS = "/metrics"
_SERVED = (*(f"POST {path}" for path in PATHS), *(f"GET {p}" for p in (MODELS, _HEALTH, _METRICS)))
"""Every path, for the answer to an unknown one."""

_PROBE_TIMEOUT_S = 30.0
"""A busy engine is not a dead one: on a host with 26 processes for 2 cores a vLLM server that went
on serving took over 5 s for /health. Who does not even connect is found by the connect timeout."""
ABANDONED_S = 1.0
"""How long a decode engine may take to admit a request that nobody waits for. vLLM does not hear of
one whose connection ends before: it reads the request in milliseconds, and a prompt of 100,000
tokens in some tenths of a second."""
DRAINING_S = 30.0
"""So long an engine that said that it drains has no turn, unless it was down in between: then it
is asked again, because its start may have gone unseen."""
MOST_TRIES = 4
"""Of a request that finds an engine gone: the restart of one, of another, and of what died."""
_JSON = "application/json"


class Proxy:
    """The handlers. ``session`` speaks to the engines; the pool and metrics are this proxy's."""

    def __init__(self, settings: ProxySettings, session: aiohttp.ClientSession) -> None:
        self._settings = settings
        self._session = session
        self.pool = EnginePool(settings.engines)
        self.metrics = Metrics()
        self._without_kv: LogLimit[tuple[Engine, Reason]] = LogLimit()
        self._abandoned: set[asyncio.Task[None]] = set()
        self._drains_until_s: dict[Engine, float] = {}
        self._learned: dict[Engine, dict[str, Any]] = {}
        for engine in settings.engines:
            self.metrics.see(engine, is_up=False)

    async def end(self) -> None:
        """Wait until decode engines have heard of what nobody waits for; :data:`ABANDONED_S` at
        most.
        """
        await asyncio.gather(*self._abandoned, return_exceptions=True)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._answer_refusals])
        app.router.add_routes(web.post(path, self.generate) for path in PATHS)
        app.router.add_get(MODELS, self.models, allow_head=False)
        app.router.add_get(_HEALTH, self.health, allow_head=False)
        app.router.add_get(_METRICS, self.show_metrics, allow_head=False)
        return app

    @web.middleware
    async def _answer_refusals(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        try:
            return await handler(request)
        except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as e:
            served = ", ".join(_SERVED)
            refused = ErrorReply(
                e.status,
                Reason.UNKNOWN_PATH,
                f"{request.method} {request.path}: not served here; served: {served}",
            )
        except ErrorReply as e:
            refused = e
        except asyncio.CancelledError:
            self.metrics.fail(Reason.CLIENT_GONE)
            raise
        self.metrics.fail(refused.reason)
        log.debug("%s: %s", refused.reason, refused)
        if isinstance(refused, EngineRefused):
            reply = web.Response(status=refused.status, body=refused.raw)
            reply.headers.extend(refused.headers)
        else:
            reply = web.Response(status=refused.status, body=refused.body(), content_type=_JSON)
        if (request_id := find(request.headers.items(), REQUEST_ID)) is not None:
            reply.headers[REQUEST_ID] = request_id
        return reply

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """A completion or chat request: prefill there, decode elsewhere, answer from decode."""
        self.metrics.requests.labels(request.path).inc()
        with self.metrics.in_flight.track_inprogress():
            body = parse_body(request.path, await self._read(request))
            request_id = find(request.headers.items(), REQUEST_ID) or uuid.uuid4().hex
            asked: ForDecode | None = None
            for left in reversed(range(MOST_TRIES)):
                try:
                    if asked is None:
                        prepared = await self._prepare(request, body, request_id, is_last=not left)
                        if not isinstance(prepared, ForDecode):
                            return prepared
                        asked = prepared
                    return await self._relay("POST", request, request_id, asked)
                except EngineGone as e:
                    side = Side.PREFILL if asked is None else Side.DECODE
                    if not left or not self.pool.is_serving(side):
                        raise
                    self.metrics.retries.labels(e.reason.value).inc()
                    log.info("another engine takes request %s: %s", request_id, e)
                    if asked is not None and asked.is_doubtful:
                        asked = None
                    elif asked is not None:
                        asked = replace(asked, is_doubtful=asked.has_kv and e.was_asked)
            raise AssertionError("the last try returns or raises")

    async def _prepare(
        self, request: web.Request, body: ClientBody, request_id: str, *, is_last: bool
    ) -> ForDecode | web.StreamResponse:
        """Have the prompt computed; the answer itself where decode was asked together with prefill.
        Raises EngineGone where another engine may do it, unless this try ``is_last``, ErrorReply
        for a request that is not to be served.
        """
        # Nobody computes a prompt that nobody can go on with.
        self.pool.require(Side.DECODE)
        prefill = self.pool.pick(Side.PREFILL)
        name = mint_request()
        early = early_params(self._learned.get(prefill), name)
        how = Dispatch.IN_TURN if early is None else Dispatch.TOGETHER
        self.metrics.dispatched.labels(how.value).inc()
        sent = body.for_prefill(None if early is None else name)
        prefilling = asyncio.create_task(self._prefill(prefill, request, sent, request_id))
        try:
            if early is not None:
                return await self._together(request, body, request_id, early, prefilling)
            params = await prefilling
        except (NoKv, ErrorReply) as e:
            if isinstance(e, Drains):
                self._drains_until_s[prefill] = time.monotonic() + DRAINING_S
                self._see(prefill, Seen(State.DRAINING, "drains"))
            may_another = not is_last and self.pool.has_another(prefill)
            if isinstance(e, Drains | EngineGone) and may_another:
                raise EngineGone(e.reason, str(e)) from e
            is_failure = isinstance(e, ErrorReply)
            if is_failure and self._settings.on_missing_kv is OnMissingKv.REFUSE:
                raise
            self._go_on_without_kv(prefill, e)
            return ForDecode(body.for_decode(None), has_kv=False)
        return ForDecode(body.for_decode(params), has_kv=True)

    async def _together(
        self,
        request: web.Request,
        body: ClientBody,
        request_id: str,
        early: dict[str, Any],
        prefilling: asyncio.Task[msgspec.Raw],
    ) -> ForDecode | web.StreamResponse:
        """Decode's answer, or what to ask of another engine where that one has gone. Raises as
        :meth:`_prefill` does, as long as the client has got nothing.
        """
        engine = self.pool.pick(Side.DECODE)
        until_s = asyncio.get_running_loop().time() + ABANDONED_S
        asking = self._ask(engine, "POST", request, request_id, body.for_decode(early))
        beginning = asyncio.create_task(self._begin(engine, asking))
        try:
            await asyncio.wait((prefilling, beginning), return_when=asyncio.FIRST_COMPLETED)
            if not beginning.done():
                params = prefilling.result()  # raises where nothing will come
                if not _are_of_one(early, params):
                    return ForDecode(body.for_decode(params), has_kv=True)
            try:
                answer, first = await beginning
            except EngineGone as e:
                self.metrics.retries.labels(e.reason.value).inc()
                log.info("another engine takes request %s: %s", request_id, e)
                params = await prefilling
                return ForDecode(body.for_decode(params), has_kv=True, is_doubtful=e.was_asked)
            return await self._pass_on(engine, answer, first, request, request_id)
        finally:
            # Once decode has answered, or failed, nobody needs what prefill still does.
            beginning.cancel()
            prefilling.cancel()
            await asyncio.gather(beginning, prefilling, return_exceptions=True)
            self._abandon(asking, until_s)

    async def _begin(
        self, engine: Engine, asking: asyncio.Task[aiohttp.ClientResponse]
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        """An answer with the first piece of its body. Raises EngineGone."""
        try:
            answer = await asyncio.shield(asking)
            first = await _next_chunk(answer)
        except (aiohttp.ClientError, OSError) as e:
            raise self._unreachable(engine, Reason.DECODE_UNREACHABLE, e) from e
        except _AnswerCut as e:
            gone = f"{engine}: {e}"
            raise EngineGone(Reason.DECODE_CUT, gone, was_asked=True) from e
        self._check_gone(engine, answer, is_doubtful=False)
        return answer, first

    def _go_on_without_kv(self, prefill: Engine, e: NoKv | ErrorReply) -> None:
        self.metrics.without_kv.labels(e.reason.value).inc()
        num = self._without_kv.note((prefill, e.reason), time.monotonic())
        if num:
            requests = "1 request" if num == 1 else f"{num} requests"
            log.warning("decoding without KV (%s since the last such line): %s", requests, e)

    async def models(self, request: web.Request) -> web.StreamResponse:
        request_id = find(request.headers.items(), REQUEST_ID) or uuid.uuid4().hex
        for left in reversed(range(MOST_TRIES)):
            try:
                return await self._relay("GET", request, request_id, ForDecode(None, has_kv=False))
            except EngineGone as e:
                if not left or not self.pool.is_serving(Side.DECODE):
                    raise
                self.metrics.retries.labels(e.reason.value).inc()
        raise AssertionError("the last try returns or raises")

    async def health(self, _request: web.Request) -> web.Response:
        """200 when both sides have an engine that is up, else 503; names every engine."""
        is_healthy = self.pool.is_healthy
        said = {"status": "ok" if is_healthy else "unavailable", "engines": self.pool.report()}
        return web.Response(
            status=200 if is_healthy else 503, body=msgspec.json.encode(said), content_type=_JSON
        )

    async def show_metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=self.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def watch(self, engine: Engine) -> None:
        while True:
            await asyncio.sleep(self._settings.health_interval_s)
            await self.probe(engine)

    async def probe(self, engine: Engine) -> None:
        try:
            async with (
                asyncio.timeout(_PROBE_TIMEOUT_S),
                self._session.get(engine.url + _HEALTH, allow_redirects=False) as answer,
            ):
                seen = UP
                if answer.status != 200:
                    seen = Seen(State.DOWN, f"answers {_HEALTH} with {answer.status}")
        except (aiohttp.ClientError, OSError) as e:
            seen = Seen(State.DOWN, _said(e))
        self._see(engine, seen)

    def _see(self, engine: Engine, seen: Seen) -> None:
        if seen.state is State.UP and time.monotonic() < self._drains_until_s.get(engine, 0.0):
            return  # it serves, and would offer nothing
        if seen.state is State.DOWN:
            self._learned.pop(engine, None)  # it comes back as another incarnation
        if seen.state is not State.DRAINING:
            self._drains_until_s.pop(engine, None)
        self.metrics.see(engine, is_up=seen.state is State.UP)
        if not self.pool.see(engine, seen):
            return
        if seen.state is State.UP:
            log.info("%s is up", engine)
        elif seen.state is State.DRAINING:
            log.info("%s drains: requests go to another one, where there is one", engine)
        else:
            log.warning("%s is down: %s", engine, seen.detail)

    async def _read(self, request: web.Request) -> bytes:
        """The client's whole body; ErrorReply (413) as soon as it is known to be too large."""
        limit_nbytes = self._settings.max_body_nbytes
        too_large = ErrorReply(
            413,
            Reason.BODY_TOO_LARGE,
            f"body: expected at most {limit_nbytes} bytes; --max-body-nbytes sets the bound",
        )
        if (request.content_length or 0) > limit_nbytes:
            raise too_large
        body = bytearray()
        try:
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > limit_nbytes:
                    raise too_large
        except web.RequestPayloadError as e:
            raise ErrorReply(400, Reason.BAD_BODY, f"body: cannot be read: {e}") from e
        return bytes(body)

    async def _prefill(
        self, engine: Engine, request: web.Request, body: bytes, request_id: str
    ) -> msgspec.Raw:
        """The params of the prompt's KV. Raises NoKv or ErrorReply, naming the engine."""
        sent_s = time.monotonic()
        limit_s = self._settings.prefill_timeout_s
        try:
            async with asyncio.timeout(limit_s) as timeout:
                async with self._session.post(
                    engine.url + request.path,
                    data=body,
                    headers=to_prefill(request.headers.items(), request_id),
                    allow_redirects=False,
                ) as answer:
                    raw = await answer.read()
        except (aiohttp.ClientError, OSError) as e:
            if timeout.expired():
                raise ErrorReply(
                    502,
                    Reason.PREFILL_TIMEOUT,
                    f"{engine}: expected an answer in {limit_s:g} s (--timeout-s), got none",
                ) from e
            raise self._unreachable(engine, Reason.PREFILL_UNREACHABLE, e) from e
        self.metrics.prefill_s.observe(time.monotonic() - sent_s)
        self._note_status(engine, answer.status)
        params = read_params(str(engine), answer.status, raw, answer.headers.items())
        if self._settings.dispatch is Dispatch.TOGETHER:
            self._learn(engine, learned_params(params))
        return params

    def _learn(self, engine: Engine, answer: dict[str, Any]) -> None:
        """Nothing, and for good until it is down, of a URL that has answered as two engines: which
        one computes the next prompt cannot be known before.
        """
        known = self._learned.get(engine, answer)
        is_same = known.get("remote_engine_id") == answer.get("remote_engine_id")
        self._learned[engine] = answer if is_same else {}

    async def _relay(
        self,
        method: str,
        request: web.Request,
        request_id: str,
        asked: ForDecode,
    ) -> web.StreamResponse:
        """Ask a decode engine, and give its answer to the client as it comes, errors included.
        Raises EngineGone where another engine may be asked.
        """
        engine = self.pool.pick(Side.DECODE)
        until_s = asyncio.get_running_loop().time() + ABANDONED_S
        asking = self._ask(engine, method, request, request_id, asked.body)
        try:
            answer = await (asyncio.shield(asking) if asked.has_kv else asking)
        except asyncio.CancelledError:
            if asked.has_kv:
                self._abandon(asking, until_s)
            raise
        except (aiohttp.ClientError, OSError) as e:
            raise self._unreachable(engine, Reason.DECODE_UNREACHABLE, e) from e
        try:
            self._check_gone(engine, answer, is_doubtful=asked.is_doubtful)
            return await self._pass_on(engine, answer, b"", request, request_id)
        finally:
            answer.close()  # not release: an answer that was not read to its end must be aborted

    def _check_gone(
        self, engine: Engine, answer: aiohttp.ClientResponse, *, is_doubtful: bool
    ) -> None:
        """Raises EngineGone for an answer that leaves the request to another engine."""
        self._note_status(engine, answer.status)
        is_gone = answer.status == UNAVAILABLE and self.pool.has_another(engine)
        if is_gone or (is_doubtful and answer.status >= 500):
            raise EngineGone(Reason.DECODE_ERROR, f"{engine}: answered {answer.status}")

    def _ask(
        self,
        engine: Engine,
        method: str,
        request: web.Request,
        request_id: str,
        body: bytes | None,
    ) -> asyncio.Task[aiohttp.ClientResponse]:
        asked = self._session.request(
            method,
            engine.url + request.path,
            data=body,
            headers=to_decode(request.headers.items(), request_id),
            allow_redirects=False,
        )

        async def answer() -> aiohttp.ClientResponse:
            return await asked

        return asyncio.create_task(answer())

    def _abandon(self, asking: asyncio.Task[aiohttp.ClientResponse], until_s: float) -> None:
        """By ``until_s`` of the loop's clock the engine has heard of it; then nobody waits."""
        task = asyncio.create_task(_hang_up(asking, until_s))
        self._abandoned.add(task)
        task.add_done_callback(self._abandoned.discard)

    async def _pass_on(
        self,
        engine: Engine,
        answer: aiohttp.ClientResponse,
        first: bytes,
        request: web.Request,
        request_id: str,
    ) -> web.StreamResponse:
        """``first``: what was read of it."""
        if answer.status >= 400:
            self.metrics.fail(Reason.DECODE_ERROR)
        reply = web.StreamResponse(status=answer.status, reason=answer.reason)
        reply.headers.extend(to_client(answer.headers.items()))
        reply.headers.setdefault(REQUEST_ID, request_id)
        try:
            await reply.prepare(request)
            if first:
                await reply.write(first)
            while chunk := await _next_chunk(answer):
                await reply.write(chunk)
            await reply.write_eof()
        except _AnswerCut as e:
            self.metrics.fail(Reason.DECODE_CUT)
            log.warning("%s broke off its answer: %s", engine, e)
            # The status has been sent. A clean end would pass the piece off as the whole.
            _cut(request, reply)
        except ConnectionError:
            # Found by a write before the server noticed; it knows what to do with such a reply.
            self.metrics.fail(Reason.CLIENT_GONE)
        return reply

    def _note_status(self, engine: Engine, status: int) -> None:
        if status == UNAVAILABLE:
            self._see(engine, Seen(State.DOWN, f"answered {status}"))

    def _unreachable(self, engine: Engine, reason: Reason, e: Exception) -> EngineGone:
        was_asked = not isinstance(e, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
        if not was_asked:
            # Nobody listens: the next request need not find out again. The next probe may differ.
            self._see(engine, Seen(State.DOWN, _said(e)))
        return EngineGone(reason, f"{engine}: {_said(e)}", was_asked=was_asked)


@dataclass(frozen=True, slots=True)
class ForDecode:
    """What a decode engine is asked. ``has_kv``: blocks are kept for it until a decode engine has
    heard of it. ``is_doubtful``: one that has gone was asked before, and may have taken them.
    """

    body: bytes | None
    has_kv: bool
    is_doubtful: bool = False


def _are_of_one(early: dict[str, Any], params: msgspec.Raw) -> bool:
    """Whether the engine that decode was told to ask is the one that has answered. Behind one URL
    there may be several (data-parallel ranks, a Kubernetes Service), or by now another life.
    """
    return early_params(learned_params(params), early["kvxfer"]["request"]) == early


async def _hang_up(asking: asyncio.Task[aiohttp.ClientResponse], until_s: float) -> None:
    """As soon as the answer begins, or when it has had time to begin."""
    try:
        async with asyncio.timeout_at(until_s):
            answer = await asking
    except (aiohttp.ClientError, OSError) as e:
        log.debug("a request that nobody waits for: %s", _said(e))
    else:
        answer.close()


def _cut(request: web.Request, reply: web.StreamResponse) -> None:
    """End the connection in a way that tells the client that more should have come."""
    transport = request.transport
    if transport is None:  # it has gone
        return
    headers = reply.headers
    if not (hdrs.CONTENT_LENGTH in headers or hdrs.TRANSFER_ENCODING in headers):
        # For a client of HTTP/1.0 a connection's end is the answer's, unless it is a reset
        socket = transport.get_extra_info("socket")
        socket.setsockopt(SOL_SOCKET, SO_LINGER, _RESET)
    transport.close()


class _AnswerCut(Exception):
    """An engine's answer ended before its end."""


async def _next_chunk(answer: aiohttp.ClientResponse) -> bytes:
    """What has come, at least one byte; empty at the end."""
    try:
        return await answer.content.readany()
    except (aiohttp.ClientError, OSError) as e:
        raise _AnswerCut(_said(e)) from e


def _said(e: BaseException) -> str:
    """An error in words; a timeout of our own has none, and aiohttp's say the address once more."""
    number = e.os_error.errno if isinstance(e, aiohttp.ClientConnectorError) else None
    if number is not None and number in errno.errorcode:
        return os.strerror(number).lower()
    return str(e) or ("no answer in time" if isinstance(e, TimeoutError) else type(e).__name__)


_RESET = struct.pack("ii", 1, 0)
_SHUTDOWN_S = 1.0
"""What requests in flight get to end when the proxy does."""

log = logging.getLogger("kvxfer.proxy")


@asynccontextmanager
async def serving(settings: ProxySettings) -> AsyncIterator[str]:
    """Run the proxy inside the block; yields the URL where it listens.

    Every engine has been probed once by then. Raises ConfigError when it cannot listen.
    """
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(_open_session(settings))
        proxy = Proxy(settings, session)
        await asyncio.gather(*(proxy.probe(engine) for engine in settings.engines))
        # handler_cancellation: a client that goes away cancels what is being done for it.
        runner = web.AppRunner(
            proxy.app(), access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S
        )
        await runner.setup()
        stack.push_async_callback(proxy.end)
        stack.push_async_callback(runner.cleanup)
        url = await _listen(runner, settings)
        for engine in settings.engines:
            stack.push_async_callback(_end, asyncio.create_task(proxy.watch(engine)))
        log.info(
            "proxy listens at %s; prefill: %s; decode: %s",
            url,
            ", ".join(engine.url for engine in settings.prefill),
            ", ".join(engine.url for engine in settings.decode),
        )
        yield url


def _open_session(settings: ProxySettings) -> aiohttp.ClientSession:
    """Towards the engines. Nothing of one client's stays for the next: no cookies, no redirects."""
    return aiohttp.ClientSession(
        # force_close: a server may close an idle connection just as the next request is written
        # into it (vLLM's does after 5 s), and a POST must not be repeated. Costs a round trip.
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=settings.connect_timeout_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("User-Agent",),
    )


async def _listen(runner: web.AppRunner, settings: ProxySettings) -> str:
    host, port = settings.host, settings.port
    site = web.TCPSite(runner, host, port)
    try:
        await site.start()
    except OSError as e:
        if e.errno == errno.EADDRINUSE:
            what = "is in use; end what listens there, or choose another port"
        else:
            what = f"cannot listen there: {e.strerror or e}"
        raise ConfigError(f"--listen: {host}:{port} {what}") from e
    bound = runner.addresses[0][1]
    return f"http://[{host}]:{bound}" if ":" in host else f"http://{host}:{bound}"


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
