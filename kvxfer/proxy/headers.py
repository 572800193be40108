"""Which headers go on to an engine, and which come back. Pure.

Hop-by-hop headers (RFC 9110, 7.6.1) belong to one connection and end here, with every header that
``Connection`` names. Authorization goes on: the engines check it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

Headers = list[tuple[str, str]]
REQUEST_ID: Final = "X-Request-Id"

_HOP_BY_HOP = {
    *("connection", "keep-alive", "proxy-connection", "proxy-authenticate", "proxy-authorization"),
    *("te", "trailer", "transfer-encoding", "upgrade"),
}
# The proxy writes the body anew (already decompressed), and has answered what was expected.
_OF_THE_BODY = {"host", "content-length", "content-type", "content-encoding", "expect"}
_ENCODING = "accept-encoding"


def to_prefill(headers: Iterable[tuple[str, str]], request_id: str) -> Headers:
    """For the prefill engine, whose answer the proxy itself reads: not compressed."""
    kept = _to_engine(headers, request_id, _ENCODING, "accept")
    return [*kept, ("Accept", "application/json"), ("Accept-Encoding", "identity")]


def to_decode(headers: Iterable[tuple[str, str]], request_id: str) -> Headers:
    """For the decode engine, whose answer goes to the client as it comes."""
    kept = _to_engine(headers, request_id)
    # Said explicitly: a client that names no encoding must not get one that we could read.
    if not any(name.lower() == _ENCODING for name, _ in kept):
        kept.append(("Accept-Encoding", "identity"))
    return kept


def to_client(headers: Iterable[tuple[str, str]]) -> Headers:
    """For the client, from a decode engine's answer."""
    return _end_to_end(list(headers))


def find(headers: Iterable[tuple[str, str]], name: str) -> str | None:
    """The first value of a header that is not empty."""
    return next((v for k, v in headers if k.lower() == name.lower() and v), None)


def _to_engine(headers: Iterable[tuple[str, str]], request_id: str, *without: str) -> Headers:
    dropped = {REQUEST_ID.lower(), *_OF_THE_BODY, *without}
    kept = [(k, v) for k, v in _end_to_end(list(headers)) if k.lower() not in dropped]
    return [*kept, ("Content-Type", "application/json"), (REQUEST_ID, request_id)]


def _end_to_end(headers: Headers) -> Headers:
    named = {
        word.strip().lower()
        for name, value in headers
        if name.lower() == "connection"
        for word in value.split(",")
    }
    return [(k, v) for k, v in headers if k.lower() not in _HOP_BY_HOP | named]
