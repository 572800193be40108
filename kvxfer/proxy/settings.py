"""What the proxy was asked for, parsed: engines, policy and bounds."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from kvxfer.errors import ConfigError

# A prompt of 128k tokens is about 1 MB of JSON; images in a chat are several.
MAX_BODY_NBYTES: Final = 32 << 20


class Side(enum.StrEnum):
    """What an engine does for a request."""

    PREFILL = "prefill"
    DECODE = "decode"


class Dispatch(enum.StrEnum):
    """When decode hears of a request: when prefill has answered, or at the same time. Together it
    takes KV while prefill computes; requests go in turn to a prefill engine until its first answer
    has taught how to find its offers.
    """

    IN_TURN = "in-turn"
    TOGETHER = "together"


class OnMissingKv(enum.StrEnum):
    """What happens to a request whose prefill failed. One whose prefill engine answers well and
    offers no KV always goes on to decode, which computes the prompt.
    """

    REFUSE = "refuse"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine of one side. ``url`` is ``http://HOST:PORT``, without a slash at its end."""

    side: Side
    url: str

    def __str__(self) -> str:
        return f"{self.side} {self.url}"


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """Everything that the proxy is told. Raises ConfigError naming the option.

    ``host`` and ``port``: where it listens; port 0 takes a free one. ``prefill_timeout_s`` bounds a
    whole prefill request, its queueing in the engine included; decode requests last as long as
    their client stays. ``max_body_nbytes`` bounds a client's request body.
    """

    prefill: tuple[Engine, ...]
    decode: tuple[Engine, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    on_missing_kv: OnMissingKv = OnMissingKv.REFUSE
    dispatch: Dispatch = Dispatch.IN_TURN
    prefill_timeout_s: float = 300.0
    connect_timeout_s: float = 5.0
    health_interval_s: float = 0.5
    max_body_nbytes: int = MAX_BODY_NBYTES

    def __post_init__(self) -> None:
        for side, engines in ((Side.PREFILL, self.prefill), (Side.DECODE, self.decode)):
            if not engines:
                raise ConfigError(f"--{side}: expected at least one engine, got none")
        for option, value in (
            ("--timeout-s", self.prefill_timeout_s),
            ("--connect-timeout-s", self.connect_timeout_s),
            ("--health-interval-s", self.health_interval_s),
            ("--max-body-nbytes", self.max_body_nbytes),
        ):
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{option}: expected a number above 0, got {value:g}")

    @property
    def engines(self) -> tuple[Engine, ...]:
        return self.prefill + self.decode


def parse_engines(side: Side, urls: Sequence[str]) -> tuple[Engine, ...]:
    """Raises ConfigError naming the option. A URL may stand once on each side."""
    engines = tuple(Engine(side, _parse_url(f"--{side}", url)) for url in urls)
    for number, engine in enumerate(engines):
        if engine in engines[:number]:
            raise ConfigError(f"--{side}: expected different engines, got {engine.url} twice")
    return engines


def _parse_url(option: str, text: str) -> str:
    wrong = ConfigError(f"{option}: expected http://HOST:PORT, got {text!r}")
    try:
        url = urlsplit(text)
        host, port = url.hostname, url.port
    except ValueError:
        raise wrong from None
    has_more = url.path.strip("/") or url.query or url.fragment or url.username is not None
    if url.scheme not in ("http", "https") or not host or not port or has_more:
        raise wrong
    return f"{url.scheme}://[{host}]:{port}" if ":" in host else f"{url.scheme}://{host}:{port}"
