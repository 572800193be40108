"""The proxy as a server: listens, watches the engines, and ends cleanly."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import aiohttp
from aiohttp import web

from kvxfer.errors import ConfigError
from kvxfer.proxy.handlers import Proxy
from kvxfer.proxy.settings import ProxySettings

SHUTDOWN_S = 1.0
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
            proxy.app(), access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S
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
