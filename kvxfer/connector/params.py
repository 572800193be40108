"""``kv_transfer_params``: what travels with a request through routers and sidecars.

In turn: the prefill engine answers a request with params that name its offer, and the router gives
them to the decode engine. At once (*early*): the router makes an id for the request and gives it to
both; where the prefill engine is, it knows from that engine's last answer (:func:`early_params`).

The keys of the NIXL connector are kept, because routers forward them verbatim; ours stand under one
key, ``kvxfer``. They are a hint and a freshness check, not a credential for KV: block ids come only
from a Grant. They contain the digest of the tokens, with which a holder may extend the lease or
cancel the offer; the nonce alone allows neither. Anybody who can send a request to an HTTP server
can write params. With a ``params_key`` the source signs them, and unsigned ones are not followed.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec

from kvxfer.connector.records import SourceRef
from kvxfer.transfer.tokens import DIGEST_NBYTES, NONCE_NBYTES
from kvxfer.transfer.wire import GROWING, PROTOCOL_MAX, OfferRef

NOT_OFFERED_PARAMS: Mapping[str, object] = MappingProxyType(
    {"do_remote_prefill": False, "do_remote_decode": False, "kvxfer_refused": "draining"}
)
"""In the place of an offer, of an engine that drains: a router asks another one. Whoever forwards
them gets a plain request.
"""
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]  # what msgpack carries to the ranks


class OfferWanted(msgspec.Struct, frozen=True):
    """Prefill this request and offer its KV. ``name``: the router's id of it, or empty."""

    name: bytes = b""


class LoadWanted(msgspec.Struct, frozen=True):
    """Load this request's KV from this source. ``is_early``: the offer is not known yet;
    ``source.offer`` has the router's id in the place of the nonce, and there is no digest.
    ``has_named_nonce``: the source makes the first offer's nonce of them
    (:func:`~kvxfer.transfer.tokens.named_nonce`).
    """

    source: SourceRef
    is_early: bool = False
    has_named_nonce: bool = False


class Plain(msgspec.Struct, frozen=True):
    """An ordinary request. ``reason`` is counted: no_params, null_params, other_connector,
    bad_params or bad_signature.
    """

    reason: str
    detail: str = ""


Params = OfferWanted | LoadWanted | Plain
_MAPPINGS = (dict, Mapping)
"""What nearly all are comes first: to ask an abstract class takes 15 us of a cold processor."""


class _Ours(msgspec.Struct, frozen=True):
    incarnation: str
    number: _Count
    nonce: str
    tokens: _Count
    endpoint: str
    digest: str = ""
    curve_public_key: str | None = None
    signature: str = ""


class _Named(msgspec.Struct, frozen=True):
    request: str
    incarnation: str = ""
    endpoint: str = ""
    curve_public_key: str | None = None
    engine_signature: str = ""
    named_nonces: bool = False


class _Outer(msgspec.Struct, frozen=True):
    do_remote_prefill: bool | None = None
    do_remote_decode: bool | None = None
    remote_engine_id: str | None = None
    kvxfer: _Ours | None = None


class _EarlyOuter(msgspec.Struct, frozen=True):
    kvxfer: _Named
    do_remote_prefill: bool | None = None
    do_remote_decode: bool | None = None
    remote_engine_id: str | None = None


def parse_params(raw: Mapping[str, Any] | None, key: str | None = None) -> Params:
    """Parse the params of a new request. Never guesses: malformed params give Plain with the path
    of the mistake.

    Args:
        key: ``params_key``; where there is one, load params that were not signed with it are Plain.
            Params that ask for an offer need no signature: the request is served either way.
    """
    if not raw:
        return Plain("no_params")
    try:
        ours = raw.get("kvxfer") if isinstance(raw, _MAPPINGS) else None
        if isinstance(ours, _MAPPINGS) and "request" in ours:
            return _parse_early(msgspec.convert(dict(raw), _EarlyOuter), key)
        outer = msgspec.convert(dict(raw), _Outer)
        if outer.do_remote_decode:
            return OfferWanted()
        if not outer.do_remote_prefill:
            return Plain("null_params")
        if outer.kvxfer is None:
            return Plain("other_connector")
        source = _source(outer.kvxfer, outer.remote_engine_id)
        if key is not None:
            expected = _signature(source, outer.kvxfer.number, key)
            wrong = _wrong_signature("signature", outer.kvxfer.signature, expected)
            if wrong is not None:
                return wrong
        return LoadWanted(source)
    except (msgspec.ValidationError, ValueError, TypeError) as e:
        return Plain("bad_params", f"kv_transfer_params: {e}")


def _parse_early(outer: _EarlyOuter, key: str | None) -> Params:
    """Raises ValueError."""
    ours = outer.kvxfer
    name = _hex(ours.request, "request")
    if outer.do_remote_decode:
        return OfferWanted(name)
    if not outer.do_remote_prefill:
        return Plain("null_params")
    source = SourceRef(
        engine_id=_engine(outer.remote_engine_id, ours.endpoint),
        endpoint=ours.endpoint,
        offer=OfferRef(name, _hex(ours.incarnation, "incarnation")),
        num_tokens=0,
        curve_public_key=ours.curve_public_key,
    )
    if key is not None:
        expected = _engine_signature(source, key)
        wrong = _wrong_signature("engine_signature", ours.engine_signature, expected)
        if wrong is not None:
            return wrong
    return LoadWanted(source, is_early=True, has_named_nonce=ours.named_nonces)


def _wrong_signature(name: str, signature: str, expected: str) -> Plain | None:
    if hmac.compare_digest(signature.encode(), expected.encode()):
        return None
    got = "another" if signature else "none"
    detail = f"expected one made with this engine's params_key, got {got}"
    return Plain("bad_signature", f"kvxfer.{name}: {detail}")


def _engine(engine_id: str | None, endpoint: str) -> str:
    """The engine's name, if both can be."""
    if not engine_id:
        raise ValueError("remote_engine_id: expected a name, got none")
    engine_id.encode()  # JSON has texts that no message can carry
    _check_endpoint(endpoint)
    return engine_id


@lru_cache(maxsize=1024)  # it costs 20 us of a cold processor, and engines are few
def _check_endpoint(endpoint: str) -> None:
    endpoint.encode()
    url = urlsplit(endpoint)
    if url.scheme != "tcp" or not url.hostname or not url.port:
        raise ValueError(f"kvxfer.endpoint: expected tcp://host:port, got {endpoint!r}")


def _source(ours: _Ours, engine_id: str | None) -> SourceRef:
    engine_id = _engine(engine_id, ours.endpoint)
    if ours.tokens < 1:
        raise ValueError(f"kvxfer.tokens: expected at least 1, got {ours.tokens}")
    return SourceRef(
        engine_id=engine_id,
        endpoint=ours.endpoint,
        offer=OfferRef(_hex(ours.nonce, "nonce"), _hex(ours.incarnation, "incarnation")),
        num_tokens=ours.tokens,
        digest=_hex(ours.digest, "digest", DIGEST_NBYTES) if ours.digest else b"",
        curve_public_key=ours.curve_public_key,
    )


def _hex(text: str, name: str, nbytes: int = NONCE_NBYTES) -> bytes:
    raw = bytes.fromhex(text)
    if len(raw) != nbytes:
        raise ValueError(f"kvxfer.{name}: expected {nbytes} bytes in hex, got {len(raw)}")
    return raw


def _sign(what: str, source: SourceRef, key: str, *more: object) -> str:
    """Of every field that the sink follows; msgpack encodes no two sets alike."""
    keys = () if source.curve_public_key is None else (source.curve_public_key,)
    fields = (what, source.engine_id, source.endpoint, source.offer.incarnation, *more, *keys)
    return hmac.digest(key.encode(), msgspec.msgpack.encode(fields), "sha256").hex()


def _signature(source: SourceRef, number: int, key: str) -> str:
    of_offer = source.offer.nonce, source.num_tokens, source.digest, number
    return _sign("kvxfer.params.v1", source, key, *of_offer)


def _engine_signature(source: SourceRef, key: str) -> str:
    """Of an engine that has the key: it says where it is, whatever it offers."""
    return _sign("kvxfer.engine.v2", source, key)


def make_params(
    source: SourceRef,
    *,
    request_id: str,
    number: int,
    tp_size: int,
    pp_size: int,
    key: str | None = None,
) -> dict[str, Any]:
    """What a finished prefill request returns; JSON-serialisable. The inverse of
    :func:`parse_params`. ``key``: ``params_key``; signs them.

    ``remote_block_ids`` is empty on purpose: ids come from the Grant, and a stale id could be read
    by mistake.
    """
    url, own_key = urlsplit(source.endpoint), source.curve_public_key
    signatures = (
        {}
        if key is None
        else {
            "signature": _signature(source, number, key),
            "engine_signature": _engine_signature(source, key),
        }
    )
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": source.engine_id,
        "remote_block_ids": [],
        "remote_request_id": request_id,
        "remote_host": url.hostname,
        "remote_port": url.port,
        "tp_size": tp_size,
        "pp_size": pp_size,
        "remote_num_tokens": source.num_tokens,
        "kvxfer": {
            "incarnation": source.offer.incarnation.hex(),
            "number": number,
            "nonce": source.offer.nonce.hex(),
            "tokens": source.num_tokens,
            "endpoint": source.endpoint,
            "digest": source.digest.hex(),
            "protocol": PROTOCOL_MAX,
            "named_nonces": True,
            **({} if own_key is None else {"curve_public_key": own_key}),
            **signatures,
        },
    }


def mint_request() -> str:
    return secrets.token_hex(NONCE_NBYTES)


def prefill_params(request: str) -> dict[str, Any]:
    """For the prefill engine of a request that is sent to both at once."""
    return {"do_remote_prefill": False, "do_remote_decode": True, "kvxfer": {"request": request}}


def early_params(answer: Mapping[str, Any] | None, request: str) -> dict[str, Any] | None:
    """For the decode engine of a request that is sent to both at once. ``answer``: the params with
    which the prefill engine has answered another request. None where it cannot be asked early.
    """
    ours = (answer or {}).get("kvxfer")
    if answer is None or not isinstance(ours, Mapping):
        return None
    protocol = ours.get("protocol")
    if not isinstance(protocol, int) or protocol < GROWING:
        return None
    names = ("incarnation", "endpoint", "curve_public_key", "engine_signature", "named_nonces")
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": answer.get("remote_engine_id"),
        "kvxfer": {"request": request, **{name: ours[name] for name in names if name in ours}},
    }


def is_early(params: Mapping[str, Any]) -> bool:
    """Whether these are params of :func:`early_params`, or look like them."""
    ours = params.get("kvxfer")
    return bool(params.get("do_remote_prefill")) and isinstance(ours, Mapping) and "request" in ours
