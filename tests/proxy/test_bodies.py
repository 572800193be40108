"""What a client's body becomes, and what a prefill answer is read as. Expectations by hand."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.proxy.bodies import (
    CHAT,
    COMPLETIONS,
    PATHS,
    ErrorReply,
    NoKv,
    Reason,
    parse_body,
    read_params,
)

ASKING = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
GOOD = b'{"do_remote_prefill":true,"kvxfer":{"number":1.50,"name":"\\u00e9"}}'


STREAMS_NOT: list[dict[str, Any]] = [{}, {"stream": False}, {"stream": None}]


def refused(path: str, raw: bytes) -> ErrorReply:
    with pytest.raises(ErrorReply) as e:
        parse_body(path, raw)
    return e.value


def test_completion_becomes_two() -> None:
    body = parse_body(
        COMPLETIONS,
        b'{"model":"m","prompt":[1,2,3],"max_tokens":64,"min_tokens":8,"stream":true,'
        b'"stream_options":{"include_usage":true},"temperature":0.70,"stop":["x"]}',
    )
    assert json.loads(body.for_prefill()) == {
        "model": "m",
        "prompt": [1, 2, 3],
        "max_tokens": 1,
        "stream": False,
        "temperature": 0.7,
        "stop": ["x"],
        "kv_transfer_params": ASKING,
    }
    assert body.for_decode(msgspec.Raw(GOOD)) == (
        b'{"model":"m","prompt":[1,2,3],"max_tokens":64,"min_tokens":8,"stream":true,'
        b'"stream_options":{"include_usage":true},"temperature":0.70,"stop":["x"],'
        b'"kv_transfer_params":' + GOOD + b"}"
    )


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"max_completion_tokens": 9}, {"max_tokens": 1, "max_completion_tokens": 1}),
        ({"max_tokens": 9}, {"max_tokens": 1}),
        ({}, {"max_tokens": 1}),
    ],
)
def test_chat_becomes_two(given: dict[str, int], sent: dict[str, int]) -> None:
    asked = {"messages": [{"role": "user", "content": "hi"}], **given}
    body = parse_body(CHAT, json.dumps(asked).encode())
    assert json.loads(body.for_prefill()) == {
        "messages": [{"role": "user", "content": "hi"}],
        "stream": False,
        "kv_transfer_params": ASKING,
        **sent,
    }
    assert json.loads(body.for_decode(None)) == asked


def test_values_are_not_written_anew() -> None:
    raw = (
        b'{"prompt":"\\u00e9\\/","seed":123456789012345678901234567890,"top_p":1.10,"x":{"y":[ 1]}}'
    )
    assert parse_body(COMPLETIONS, raw).for_decode(None) == raw


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
OTHERS = st.dictionaries(st.sampled_from(["model", "seed", "tools", "x", "é"]), JSON_VALUES)


@given(OTHERS, st.sampled_from(PATHS))
def test_other_fields_go_to_both(fields: dict[str, Any], path: str) -> None:
    body = parse_body(path, json.dumps(fields).encode())
    assert json.loads(body.for_decode(None)) == fields
    sent = json.loads(body.for_prefill())
    for name in ("max_tokens", "stream", "kv_transfer_params"):
        del sent[name]
    assert sent == fields


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "param", "advice"),
    [
        ({"kv_transfer_params": {}}, "kv_transfer_params", "the proxy sets them"),
        ({"kv_transfer_params": 3}, "kv_transfer_params", "leave them out"),
        ({"n": 2}, "n", "send the request several times"),
        ({"best_of": 2}, "best_of", "send the request several times and choose"),
        ({"use_beam_search": True}, "use_beam_search", "send it to an engine itself"),
        ({"prompt_logprobs": 0}, "prompt_logprobs", "send it to an engine itself"),
    ],
)
def test_refused_everywhere(path: str, fields: dict[str, Any], param: str, advice: str) -> None:
    e = refused(path, json.dumps({"prompt": "p", **fields}).encode())
    assert (e.status, e.reason, e.param) == (400, Reason.NOT_TRANSFERABLE, param)
    assert str(e).startswith(f"{param}: expected ")
    assert advice in str(e)


@pytest.mark.parametrize("path", PATHS)
def test_params_of_the_clients_own_have_no_second_way(path: str) -> None:
    """vLLM hands what is in vllm_xargs to its connector."""
    xargs = {"kv_transfer_params": "x", "other": 1}
    asked = {"prompt": "p", "vllm_xargs": xargs}
    e = refused(path, json.dumps(asked).encode())
    assert (e.status, e.reason, e.param) == (400, Reason.NOT_TRANSFERABLE, "vllm_xargs")
    assert str(e).startswith("vllm_xargs: kv_transfer_params: expected none")
    del xargs["kv_transfer_params"]
    assert json.loads(parse_body(path, json.dumps(asked).encode()).for_decode(None)) == asked


NO_NUMBERS: tuple[Any, ...] = ("abc", [1], {}, 1.5, -1)
NO_TRUTHS: tuple[Any, ...] = ("maybe", 2, [])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *(({"max_tokens": value}, "max_tokens") for value in (*NO_NUMBERS, 0)),
        *(({"min_tokens": value}, "min_tokens") for value in NO_NUMBERS),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        *(({"stream": value}, "stream") for value in NO_TRUTHS),
        *(({"stream_options": {"x": 1}, **more}, "stream_options") for more in STREAMS_NOT),
        ({"stream_options": "x", "stream": True}, "stream_options"),
        ({"stream_options": {"include_usage": "maybe"}, "stream": True}, "stream_options"),
    ],
)
def test_what_prefill_would_not_see_is_refused(
    path: str, fields: dict[str, Any], param: str
) -> None:
    """It would compute a prompt for decode, which refuses the request."""
    e = refused(path, json.dumps({"prompt": "p", **fields}).encode())
    assert (e.status, e.reason, e.param) == (400, Reason.NOT_TRANSFERABLE, param)
    assert str(e).startswith(f"{param}: expected ")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"max_completion_tokens": "abc"}, "max_completion_tokens"),
        (CHAT, {"max_completion_tokens": 0}, "max_tokens"),
        (CHAT, {"max_completion_tokens": 3, "max_tokens": 9, "min_tokens": 4}, "min_tokens"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "prompt"),
        (COMPLETIONS, {"prompt": [[1, 2], [3]]}, "prompt"),
        (COMPLETIONS, {"prompt_embeds": "AAAA"}, "prompt_embeds"),
        (COMPLETIONS, {"echo": True, "logprobs": 0}, "echo"),
        (CHAT, {"echo": True}, "echo"),
    ],
)
def test_refused_on_one_path(path: str, fields: dict[str, Any], param: str) -> None:
    e = refused(path, json.dumps(fields).encode())
    assert (e.status, e.reason, e.param) == (400, Reason.NOT_TRANSFERABLE, param)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt": ["only one"]}),
        (COMPLETIONS, {"prompt": [[1, 2, 3]]}),
        (COMPLETIONS, {"prompt": [1, 2, 3]}),
        (COMPLETIONS, {"prompt": []}),  # the engine says what is wrong with it
        (COMPLETIONS, {"prompt": "p", "echo": True}),
        (COMPLETIONS, {"prompt": "p", "logprobs": 5}),
        (COMPLETIONS, {"prompt": "p", "n": 1, "best_of": 1, "use_beam_search": False}),
        # vLLM reads all these as numbers or truth, or never looks at them
        (COMPLETIONS, {"prompt": "p", "max_tokens": "5", "min_tokens": " 2 ", "stream": "yes"}),
        (COMPLETIONS, {"prompt": "p", "max_tokens": 5.0, "min_tokens": True, "stream": 1}),
        (COMPLETIONS, {"prompt": "p", "max_tokens": "5.0", "min_tokens": None, "stream": None}),
        (COMPLETIONS, {"prompt": "p", "max_tokens": 10**400, "stream": "FALSE"}),
        (COMPLETIONS, {"prompt": "p", "max_tokens": 0, "echo": True}),
        (COMPLETIONS, {"prompt": "p", "max_tokens": None, "max_completion_tokens": "abc"}),
        (COMPLETIONS, {"prompt": "p", "stream_options": {}, "stream": False}),
        (COMPLETIONS, {"prompt": "p", "stream_options": {"include_usage": 1}, "stream": "no"}),
        (CHAT, {"messages": [], "max_completion_tokens": 9, "max_tokens": -1, "min_tokens": 9}),
        (CHAT, {"messages": [], "min_tokens": 9}),
        (CHAT, {"messages": [], "n": None, "logprobs": True, "top_logprobs": 3}),
    ],
)
def test_served(path: str, fields: dict[str, Any]) -> None:
    body = parse_body(path, json.dumps(fields).encode())
    assert json.loads(body.for_decode(None)) == fields


def test_a_null_of_the_clients_own_is_no_value() -> None:
    raw = (
        b'{"prompt":"p","kv_transfer_params":{"do_remote_prefill":true},"kv_transfer_params":null}'
    )
    assert parse_body(COMPLETIONS, raw).for_decode(None) == b'{"prompt":"p"}'


@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b"[]", b"null", b"3", b"{", b'{"prompt":"p"} more', b"\xff", b'{"prompt":"\xff"}'),
        *(b'{"n":"2"}', b'{"x":NaN}', b'{"x":' * 100_000),
    ],
    ids=lambda raw: raw[:20],
)
def test_not_a_body(raw: bytes) -> None:
    e = refused(COMPLETIONS, raw)
    assert (e.status, e.reason) == (400, Reason.BAD_BODY)
    assert str(e).startswith("body: expected a JSON object: ")


def test_the_error_body_is_openais() -> None:
    e = ErrorReply(400, Reason.NOT_TRANSFERABLE, "n: no", param="n")
    assert json.loads(e.body()) == {
        "error": {"message": "n: no", "type": "not_transferable", "param": "n", "code": 400}
    }


def test_params_are_taken_as_they_are() -> None:
    answer = b'{"id":"x","kv_transfer_params": ' + GOOD + b' ,"choices":[]}'
    assert bytes(read_params("prefill http://p:1", 200, answer)) == GOOD


@pytest.mark.parametrize(
    ("status", "raw", "want", "reason", "told"),
    [
        (200, b'{"kv_transfer_params":[]}', 502, "prefill_unreadable", "got `array`"),
        (200, b'{"kv_transfer_params":3}', 502, "prefill_unreadable", "got `int`"),
        (200, b'{"kv_transfer_params":{', 502, "prefill_unreadable", "truncated"),
        (200, b"<html>", 502, "prefill_unreadable", "malformed"),
        (200, b"", 502, "prefill_unreadable", "truncated"),
        (500, b"broken", 502, "prefill_error", "answered 500: broken"),
        (302, b"", 502, "prefill_error", "answered 302"),
        (503, b"\xff", 502, "prefill_error", "answered 503"),
        # What the client sent is the reason: it must not look like a fault to be tried again.
        (400, b"too long", 400, "prefill_error", "answered 400: too long"),
        (401, b"", 401, "prefill_error", "answered 401"),
    ],
)
def test_prefill_failed(status: int, raw: bytes, want: int, reason: str, told: str) -> None:
    with pytest.raises(ErrorReply) as e:
        read_params("prefill http://p:1", status, raw)
    assert (e.value.status, e.value.reason) == (want, reason)
    assert str(e.value).startswith("prefill http://p:1: ")
    assert told in str(e.value)


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b'{"id":"x"}', "answered without kv_transfer_params"),
        (b'{"kv_transfer_params":null}', "answered without kv_transfer_params"),
        (b'{"kv_transfer_params":{}}', "do_remote_prefill: true"),
        (b'{"kv_transfer_params":{"do_remote_prefill":false}}', "do_remote_prefill: true"),
    ],
)
def test_prefill_offers_no_kv(raw: bytes, told: str) -> None:
    with pytest.raises(NoKv, match=f"prefill http://p:1: .*{told}"):
        read_params("prefill http://p:1", 200, raw)
