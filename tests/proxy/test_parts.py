"""Settings, headers and the pool: each by itself."""

from __future__ import annotations

import ast
import inspect

import pytest

import kvxfer.proxy.bodies
import kvxfer.proxy.pool
import kvxfer.proxy.settings
from kvxfer.errors import ConfigError
from kvxfer.proxy.bodies import ErrorReply, find, to_client, to_decode, to_prefill
from kvxfer.proxy.pool import UP, EnginePool, Seen, State
from kvxfer.proxy.settings import Engine, ProxySettings, Side, parse_engines

DOWN = Seen(State.DOWN, "refused the connection")
P = [Engine(Side.PREFILL, f"http://p{i}:1") for i in range(2)]
D = [Engine(Side.DECODE, f"http://d{i}:1") for i in range(3)]


def test_urls() -> None:
    engines = parse_engines(Side.DECODE, ["http://a:1", "https://b.c:2/", "http://[::1]:3"])
    assert [engine.url for engine in engines] == ["http://a:1", "https://b.c:2", "http://[::1]:3"]
    assert str(engines[0]) == "decode http://a:1"


@pytest.mark.parametrize(
    "url",
    [
        *("", "a:1", "http://a", "http://:1", "ftp://a:1", "http://a:0", "http://a:70000"),
        *("http://a:1/v1", "http://a:1?x", "http://a:1#x", "http://me:pw@a:1", "http://[::1:1"),
    ],
)
def test_bad_urls(url: str) -> None:
    with pytest.raises(ConfigError) as e:
        parse_engines(Side.PREFILL, [url])
    assert str(e.value) == f"--prefill: expected http://HOST:PORT, got {url!r}"


def test_the_same_engine_on_both_sides_but_once_on_each() -> None:
    p, d = parse_engines(Side.PREFILL, ["http://a:1"]), parse_engines(Side.DECODE, ["http://a:1"])
    assert len(ProxySettings(prefill=p, decode=d).engines) == 2
    with pytest.raises(ConfigError, match="--decode: expected different engines, got http://a:1"):
        parse_engines(Side.DECODE, ["http://a:1", "http://a:1/"])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"prefill": ()}, "--prefill: expected at least one engine, got none"),
        ({"decode": ()}, "--decode: expected at least one engine, got none"),
        ({"prefill_timeout_s": 0.0}, "--timeout-s: expected a number above 0, got 0"),
        ({"connect_timeout_s": float("nan")}, "--connect-timeout-s: expected a number above 0"),
        ({"health_interval_s": float("inf")}, "--health-interval-s: expected a number above 0"),
        ({"max_body_nbytes": -1}, "--max-body-nbytes: expected a number above 0, got -1"),
    ],
)
def test_bad_settings(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as e:
        ProxySettings(**{"prefill": tuple(P), "decode": tuple(D), **options})  # type: ignore[arg-type]
    assert sentence in str(e.value)


CLIENT = [
    ("Host", "proxy:8000"),
    ("Connection", "keep-alive, X-Mine"),
    ("X-Mine", "hop"),
    ("Keep-Alive", "5"),
    ("TE", "trailers"),
    ("Transfer-Encoding", "chunked"),
    ("Upgrade", "h2c"),
    ("Proxy-Authorization", "secret"),
    ("Content-Length", "5"),
    ("Content-Type", "text/plain"),
    ("Content-Encoding", "gzip"),
    ("Expect", "100-continue"),
    ("Accept", "text/event-stream"),
    ("Accept-Encoding", "gzip"),
    ("Authorization", "Bearer k"),
    ("x-request-id", "r1"),
    ("X-Session", "s"),
    ("traceparent", "00-1-2-01"),
]


def test_headers_to_engines() -> None:
    assert to_prefill(CLIENT, "r1") == [
        ("Authorization", "Bearer k"),
        ("X-Session", "s"),
        ("traceparent", "00-1-2-01"),
        ("Content-Type", "application/json"),
        ("X-Request-Id", "r1"),
        ("Accept", "application/json"),
        ("Accept-Encoding", "identity"),
    ]
    assert to_decode(CLIENT, "r1") == [
        ("Accept", "text/event-stream"),
        ("Accept-Encoding", "gzip"),
        ("Authorization", "Bearer k"),
        ("X-Session", "s"),
        ("traceparent", "00-1-2-01"),
        ("Content-Type", "application/json"),
        ("X-Request-Id", "r1"),
    ]
    assert ("Accept-Encoding", "identity") in to_decode([], "r1")


def test_headers_to_clients() -> None:
    engine = [
        *(("Connection", "close"), ("Transfer-Encoding", "chunked"), ("Set-Cookie", "a")),
        *(("Content-Type", "text/event-stream"), ("Set-Cookie", "b"), ("Server", "uvicorn")),
    ]
    assert to_client(engine) == [
        *(("Set-Cookie", "a"), ("Content-Type", "text/event-stream")),
        *(("Set-Cookie", "b"), ("Server", "uvicorn")),
    ]


def test_an_empty_request_id_is_none() -> None:
    assert find([("X-Request-ID", "")], "x-request-id") is None
    assert find(CLIENT, "X-Request-Id") == "r1"


def pool(*up: Engine) -> EnginePool:
    made = EnginePool([*P, *D])
    for engine in up:
        made.see(engine, UP)
    return made


def test_sides_take_turns_separately() -> None:
    engines = pool(*P, *D)
    picked = [(engines.pick(Side.PREFILL), engines.pick(Side.DECODE)) for _ in range(6)]
    assert picked == [
        *((P[0], D[0]), (P[1], D[1]), (P[0], D[2])),
        *((P[1], D[0]), (P[0], D[1]), (P[1], D[2])),
    ]


def test_who_is_down_is_skipped_and_comes_back() -> None:
    engines = pool(*D)
    assert engines.pick(Side.DECODE) is D[0]
    assert engines.see(D[1], DOWN)
    assert [engines.pick(Side.DECODE) for _ in range(3)] == [D[2], D[0], D[2]]
    assert engines.see(D[1], UP)
    assert [engines.pick(Side.DECODE) for _ in range(3)] == [D[0], D[1], D[2]]


def test_looking_uses_up_no_turn() -> None:
    engines = pool(*D)
    for turn in D:
        engines.require(Side.DECODE)
        assert engines.pick(Side.DECODE) is turn


def test_only_changes_are_news() -> None:
    engines = pool()
    seen = [UP, UP, DOWN, Seen(State.DOWN, "another reason"), UP]
    assert [engines.see(P[0], each) for each in seen] == [True, False, True, False, True]


def test_nobody_up_names_everybody() -> None:
    engines = pool()
    engines.see(P[1], DOWN)
    with pytest.raises(ErrorReply) as e:
        engines.pick(Side.PREFILL)
    assert (e.value.status, e.value.reason) == (503, "no_prefill_engine")
    assert str(e.value) == (
        "no prefill engine is up: http://p0:1 not asked yet, http://p1:1 refused the connection"
    )
    with pytest.raises(ErrorReply, match="no decode engine is up: ") as e:
        engines.require(Side.DECODE)
    assert e.value.reason == "no_decode_engine"


def test_healthy_takes_one_of_each() -> None:
    assert not pool().is_healthy
    assert not pool(*P).is_healthy
    assert not pool(*D).is_healthy
    engines = pool(P[1], D[2])
    assert engines.is_healthy
    engines.see(D[2], DOWN)
    assert not engines.is_healthy
    assert engines.report()[-1] == {
        "side": "decode",
        "url": "http://d2:1",
        "state": "down",
        "detail": "refused the connection",
    }


def test_what_decides_knows_no_http_library() -> None:
    for module in (
        *(kvxfer.proxy.bodies, kvxfer.proxy.bodies, kvxfer.proxy.pool),
        *(kvxfer.proxy.bodies, kvxfer.proxy.settings),
    ):
        tree = ast.parse(inspect.getsource(module))
        froms = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        tops = {str(name).partition(".")[0] for name in froms | names}
        assert not tops & {"aiohttp", "prometheus_client", "asyncio", "socket", "logging"}, module
