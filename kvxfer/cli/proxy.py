"""What ``kvxfer proxy`` does once its options are read. Imported by the command when it runs."""

from __future__ import annotations

import asyncio
import logging
import signal

from kvxfer.errors import ConfigError
from kvxfer.extras import install
from kvxfer.proxy.settings import ProxySettings

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def run_proxy(settings: ProxySettings, log_level: str) -> int:
    """Serve until a signal comes; returns it. Raises ConfigError."""
    if log_level not in _LEVELS:
        raise ConfigError(f"--log-level: expected one of {', '.join(_LEVELS)}, got {log_level!r}")
    logging.getLogger("kvxfer").setLevel(log_level)
    try:
        import kvxfer.proxy.server  # noqa: F401
    except ModuleNotFoundError as e:
        if e.name not in ("aiohttp", "prometheus_client"):
            raise
        raise ConfigError(
            f"kvxfer proxy: needs {e.name}, which is not installed; {install('proxy')}"
        ) from e
    return asyncio.run(_serve(settings))


async def _serve(settings: ProxySettings) -> int:
    from kvxfer.proxy.server import serving

    loop = asyncio.get_running_loop()
    told: asyncio.Future[int] = loop.create_future()

    def tell(number: int) -> None:
        # Once is enough: a second one must not cut the ending short.
        if not told.done():
            told.set_result(number)

    # The loop's own handlers: an exception raised between any two lines would end inside a library.
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, tell, number)
    async with serving(settings):
        return await told
