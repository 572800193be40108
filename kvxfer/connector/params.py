"""``kv_transfer_params``: what travels with a request through routers and sidecars.

The keys of the NIXL connector are kept, because routers forward them verbatim; ours stand under one
key, ``kvxfer``. They are a hint and a freshness check, not a credential for KV: block ids come only
from a Grant. They contain the digest of the tokens, with which a holder may extend the lease or
cancel the offer; the nonce alone allows neither. Anybody who can send a request to an HTTP server
can write params. With a ``params_key`` the source signs them, and unsigned ones are not followed.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec

from kvxfer.connector.records import SourceRef
from kvxfer.transfer.wire import OfferRef

NONCE_NBYTES = 16
DIGEST_NBYTES = 32
NOT_OFFERED_PARAMS: Mapping[str, object] = MappingProxyType(
    {"do_remote_prefill": False, "do_remote_decode": False, "kvxfer_refused": "draining"}
)
"""In the place of an offer, of an engine that drains: a router asks another one. Whoever forwards
them gets a plain request.
"""
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]  # what msgpack carries to the ranks


@dataclass(frozen=True, slots=True)
class OfferWanted:
    """Prefill this request and offer its KV."""


@dataclass(frozen=True, slots=True)
class LoadWanted:
    """Load this request's KV from this source."""

    source: SourceRef


@dataclass(frozen=True, slots=True)
class Plain:
    """An ordinary request. ``reason`` is counted: no_params, null_params, other_connector,
    bad_params or bad_signature.
    """

    reason: str
    detail: str = ""


Params = OfferWanted | LoadWanted | Plain


class _Ours(msgspec.Struct, frozen=True):
    incarnation: str
    number: _Count
    nonce: str
    tokens: _Count
    endpoint: str
    digest: str = ""
    curve_public_key: str | None = None
    signature: str = ""


class _Outer(msgspec.Struct, frozen=True):
    do_remote_prefill: bool | None = None
    do_remote_decode: bool | None = None
    remote_engine_id: str | None = None
    kvxfer: _Ours | None = None


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
        outer = msgspec.convert(dict(raw), _Outer)
        if outer.do_remote_decode:
            return OfferWanted()
        if not outer.do_remote_prefill:
            return Plain("null_params")
        if outer.kvxfer is None:
            return Plain("other_connector")
        source = _source(outer.kvxfer, outer.remote_engine_id)
        if key is not None:
            signature = outer.kvxfer.signature
            expected = _signature(source, outer.kvxfer.number, key)
            if not hmac.compare_digest(signature.encode(), expected.encode()):
                got = "another" if signature else "none"
                detail = f"expected one made with this engine's params_key, got {got}"
                return Plain("bad_signature", f"kvxfer.signature: {detail}")
        return LoadWanted(source)
    except (msgspec.ValidationError, ValueError, TypeError) as e:
        return Plain("bad_params", f"kv_transfer_params: {e}")


def _source(ours: _Ours, engine_id: str | None) -> SourceRef:
    if not engine_id:
        raise ValueError("remote_engine_id: expected a name, got none")
    (engine_id + ours.endpoint).encode()  # JSON has texts that no message can carry
    url = urlsplit(ours.endpoint)
    if url.scheme != "tcp" or not url.hostname or not url.port:
        raise ValueError(f"kvxfer.endpoint: expected tcp://host:port, got {ours.endpoint!r}")
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


def _signature(source: SourceRef, number: int, key: str) -> str:
    """Signature over every field that the sink follows; in msgpack no two sets of values are
    encoded alike.
    """
    signed = msgspec.msgpack.encode(
        ("kvxfer.params.v1", source.engine_id, source.endpoint)
        + (source.offer.incarnation, source.offer.nonce, source.num_tokens, source.digest, number)
        + ((source.curve_public_key,) if source.curve_public_key is not None else ())
    )
    return hmac.digest(key.encode(), signed, "sha256").hex()


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
    url = urlsplit(source.endpoint)
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
            **_if_set("curve_public_key", source.curve_public_key),
            **_if_set("signature", _signature(source, number, key) if key is not None else None),
        },
    }


def _if_set(name: str, value: str | None) -> dict[str, str]:
    return {} if value is None else {name: value}
