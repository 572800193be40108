"""kv_transfer_params at the door."""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any

import msgspec
import pytest

from kvxfer.connector.params import (
    LoadWanted,
    OfferWanted,
    Plain,
    early_params,
    make_params,
    mint_request,
    parse_params,
    prefill_params,
)
from kvxfer.connector.records import SourceRef
from kvxfer.transfer.wire import OfferRef

SOURCE = SourceRef(
    engine_id="prefill-1",
    endpoint="tcp://10.0.0.7:5700",
    offer=OfferRef(bytes(range(16)), bytes(range(16, 32))),
    num_tokens=77,
    digest=bytes(range(32)),
)


KEY = "sixteen letters."
PUBLIC_KEY = "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID"


def params(key: str | None = None, **ours: Any) -> dict[str, Any]:
    made = make_params(SOURCE, request_id="r1", number=3, tp_size=2, pp_size=1, key=key)
    made["kvxfer"] |= ours
    return made


def test_made_params_are_the_fields_that_routers_know() -> None:
    assert json.loads(json.dumps(params())) == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "prefill-1",
        "remote_block_ids": [],
        "remote_request_id": "r1",
        "remote_host": "10.0.0.7",
        "remote_port": 5700,
        "tp_size": 2,
        "pp_size": 1,
        "remote_num_tokens": 77,
        "kvxfer": {
            "incarnation": "101112131415161718191a1b1c1d1e1f",
            "number": 3,
            "nonce": "000102030405060708090a0b0c0d0e0f",
            "tokens": 77,
            "endpoint": "tcp://10.0.0.7:5700",
            "digest": "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
            "protocol": 3,
            "named_nonces": True,
        },
    }


def test_made_params_parse_back() -> None:
    assert parse_params(json.loads(json.dumps(params()))) == LoadWanted(SOURCE)


def test_params_without_a_digest_are_an_older_source_s() -> None:
    raw = params()
    del raw["kvxfer"]["digest"]
    assert parse_params(raw) == LoadWanted(msgspec.structs.replace(SOURCE, digest=b""))


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (None, Plain("no_params")),
        ({}, Plain("no_params")),
        (
            {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None},
            OfferWanted(),
        ),
        ({"do_remote_decode": None, "do_remote_prefill": None}, Plain("null_params")),
        ({"do_remote_prefill": True, "remote_engine_id": "x"}, Plain("other_connector")),
    ],
)
def test_kinds(raw: dict[str, Any] | None, expected: object) -> None:
    assert parse_params(raw) == expected


@pytest.mark.parametrize(
    ("raw", "detail"),
    [
        ({"do_remote_decode": "yes"}, "do_remote_decode"),
        (params(nonce="00"), "nonce: expected 16 bytes in hex, got 1"),
        (params(nonce="zz"), "fromhex"),
        (params(digest="00"), "digest: expected 32 bytes in hex, got 1"),
        (params(incarnation=7), "incarnation"),
        (params(endpoint="http://10.0.0.7:80"), "expected tcp://host:port"),
        (params(endpoint="tcp://10.0.0.7"), "expected tcp://host:port"),
        (params(endpoint="tcp://10.0.0.7:99999"), "Port out of range"),
        (params(tokens=0), "expected at least 1, got 0"),
        (params(tokens="77"), "tokens"),
        (params() | {"remote_engine_id": None}, "remote_engine_id: expected a name, got none"),
        (params() | {"kvxfer": [1]}, "kvxfer"),
    ],
)
def test_what_cannot_be_understood_is_named(raw: dict[str, Any], detail: str) -> None:
    parsed = parse_params(raw)
    assert isinstance(parsed, Plain)
    assert parsed.reason == "bad_params"
    assert detail in parsed.detail


# ------------------------------------------------------------------ signed


def test_signed_params_are_followed_with_the_key_and_without_one() -> None:
    signed = json.loads(json.dumps(params(KEY)))
    assert parse_params(signed, KEY) == LoadWanted(SOURCE)
    assert parse_params(signed) == LoadWanted(SOURCE)


def test_the_signature_is_what_it_has_always_been() -> None:
    """Engines of another version must make the same one."""
    signed = (
        b"\x98\xb0kvxfer.params.v1\xa9prefill-1\xb3tcp://10.0.0.7:5700"
        b"\xc4\x10"
        + bytes(range(16, 32))
        + b"\xc4\x10"
        + bytes(range(16))
        + b"M\xc4\x20"
        + bytes(range(32))
        + b"\x03"
    )
    expected = hmac.new(KEY.encode(), signed, hashlib.sha256).hexdigest()
    assert params(KEY)["kvxfer"]["signature"] == expected


@pytest.mark.parametrize(
    ("raw", "got"),
    [
        (params(), "none"),
        (params("another key of 16"), "another"),
        (params(KEY, signature="é"), "another"),
        (params(KEY, nonce="ff" * 16), "another"),
        (params(KEY, incarnation="ff" * 16), "another"),
        (params(KEY, endpoint="tcp://10.0.0.8:5700"), "another"),
        (params(KEY, tokens=78), "another"),
        (params(KEY, digest="ff" * 32), "another"),
        (params(KEY, curve_public_key=PUBLIC_KEY), "another"),
        (params(KEY, number=4), "another"),
        (params(KEY) | {"remote_engine_id": "prefill-2"}, "another"),
    ],
)
def test_what_was_not_signed_so_is_plain(raw: dict[str, Any], got: str) -> None:
    parsed = parse_params(raw, KEY)
    assert isinstance(parsed, Plain)
    assert parsed.reason == "bad_signature"
    assert parsed.detail.endswith(f"params_key, got {got}")
    assert KEY not in parsed.detail


def test_to_ask_for_an_offer_needs_no_signature() -> None:
    assert parse_params({"do_remote_decode": True}, KEY) == OfferWanted()


@pytest.mark.parametrize(
    ("changes", "at"),
    [
        ({"number": 1 << 70}, "kvxfer.number"),
        ({"number": -1}, "kvxfer.number"),
        ({"tokens": 1 << 70}, "kvxfer.tokens"),
        ({"endpoint": "tcp://10.0.0.7:5700\ud800"}, "surrogates"),
    ],
)
@pytest.mark.parametrize("key", [None, KEY])
def test_what_no_message_can_carry_is_plain(
    changes: dict[str, Any], at: str, key: str | None
) -> None:
    """JSON has numbers and texts that the orders to the ranks have not."""
    parsed = parse_params(params(KEY, **changes), key)
    assert isinstance(parsed, Plain)
    assert parsed.reason == "bad_params"
    assert at in parsed.detail


# ---------------------------------------------------------------- early dispatch

NAME = bytes(range(48, 64))


def early(answer: dict[str, Any] | None = None, **ours: Any) -> dict[str, Any]:
    """For the decode engine, of what a prefill engine has answered before."""
    made = early_params(json.loads(json.dumps(answer or params())), NAME.hex())
    assert made is not None
    made["kvxfer"] |= ours
    return made


def test_a_router_makes_early_params_of_an_earlier_answer() -> None:
    source = SourceRef(
        engine_id="prefill-1",
        endpoint="tcp://10.0.0.7:5700",
        offer=OfferRef(NAME, SOURCE.offer.incarnation),
        num_tokens=0,
    )
    assert parse_params(early()) == LoadWanted(source, is_early=True, has_named_nonce=True)
    older = early()
    del older["kvxfer"]["named_nonces"]
    assert parse_params(older) == LoadWanted(source, is_early=True)
    assert parse_params(prefill_params(NAME.hex())) == OfferWanted(NAME)
    assert parse_params({"do_remote_decode": True}) == OfferWanted()


def test_ids_of_requests_are_random_and_of_128_bits() -> None:
    names = {mint_request() for _ in range(100)}
    assert len(names) == 100
    assert {len(bytes.fromhex(name)) for name in names} == {16}


@pytest.mark.parametrize(
    "answer",
    [
        None,
        {},
        {"kvxfer": None},
        {"kvxfer": {"endpoint": "tcp://h:1"}},  # of protocol 1
        {"kvxfer": {"protocol": 1}},
        {"kvxfer": {"protocol": "2"}},
    ],
)
def test_who_cannot_be_asked_early_is_asked_in_turn(answer: dict[str, Any] | None) -> None:
    assert early_params(answer, NAME.hex()) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"request": "00"}, "kvxfer.request: expected 16 bytes in hex, got 1"),
        ({"request": "x"}, "non-hexadecimal"),
        ({"incarnation": ""}, "kvxfer.incarnation: expected 16 bytes in hex, got 0"),
        ({"endpoint": "http://h"}, "kvxfer.endpoint: expected tcp://host:port"),
        ({"endpoint": 3}, r"Expected `str`, got `int` - at `$.kvxfer.endpoint`"),
    ],
)
def test_early_params_are_parsed_at_the_door(change: dict[str, Any], says: str) -> None:
    plain = parse_params(early(**change))
    assert isinstance(plain, Plain)
    assert plain.reason == "bad_params"
    assert says in plain.detail


def test_early_params_are_signed_by_the_engine_and_not_by_the_router() -> None:
    signed = params(KEY)
    assert isinstance(parse_params(early(signed), KEY), LoadWanted)
    for wrong in (
        early(signed, engine_signature=""),
        early(signed, endpoint="tcp://10.0.0.8:5700"),
        early(signed, incarnation="00" * 16),
        early(signed, curve_public_key=PUBLIC_KEY),
        early(signed) | {"remote_engine_id": "other"},
        early(params("another key of 16")),
    ):
        plain = parse_params(wrong, KEY)
        assert isinstance(plain, Plain)
        assert plain.reason == "bad_signature"
    assert parse_params(prefill_params(NAME.hex()), KEY) == OfferWanted(NAME)
