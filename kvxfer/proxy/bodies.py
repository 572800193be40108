"""What goes from a client to engines and back: bodies, headers, and the proxy's own errors. Pure.

Only the top level of a body is taken apart. Every value stays the bytes that came, so numbers,
escapes and the params' nested keys arrive exactly as they were sent. Hop-by-hop headers (RFC 9110,
7.6.1) belong to one connection and end here, with every header that ``Connection`` names.
Authorization goes on: the engines check it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import msgspec

from kvxfer.errors import KvxferError


class Reason(enum.StrEnum):
    """Why a request was not served, was cut, or was served without KV. A label of the counters."""

    UNKNOWN_PATH = "unknown_path"
    BODY_TOO_LARGE = "body_too_large"
    BAD_BODY = "bad_body"
    NOT_TRANSFERABLE = "not_transferable"
    NO_PREFILL_ENGINE = "no_prefill_engine"
    NO_DECODE_ENGINE = "no_decode_engine"
    PREFILL_UNREACHABLE = "prefill_unreachable"
    PREFILL_TIMEOUT = "prefill_timeout"
    PREFILL_ERROR = "prefill_error"
    PREFILL_UNREADABLE = "prefill_unreadable"
    PREFILL_WITHOUT_KV = "prefill_without_kv"
    PREFILL_DRAINING = "prefill_draining"
    DECODE_UNREACHABLE = "decode_unreachable"
    DECODE_ERROR = "decode_error"
    DECODE_CUT = "decode_cut"
    CLIENT_GONE = "client_gone"


class NoKv(KvxferError):
    """A prefill engine has answered, and offers no KV: decode can compute the prompt itself."""

    reason = Reason.PREFILL_WITHOUT_KV


class Drains(NoKv):
    """It offers nothing more, because it is going to end: another one may."""

    reason = Reason.PREFILL_DRAINING


Headers = list[tuple[str, str]]


class ErrorReply(KvxferError):
    """``status``: of HTTP; ``param``: the field of the body that is the reason, if one is."""

    def __init__(
        self, status: int, reason: Reason, message: str, *, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.param = param

    def body(self) -> bytes:
        """The answer's JSON, in the shape of the OpenAI API's errors."""
        error = {
            "message": str(self),
            "type": self.reason.value,
            "param": self.param,
            "code": self.status,
        }
        return msgspec.json.encode({"error": error})


class EngineRefused(ErrorReply):
    """What an engine itself says of a request that it does not take: for the client as it is."""

    def __init__(self, status: int, message: str, raw: bytes, headers: Headers) -> None:
        super().__init__(status, Reason.PREFILL_ERROR, message)
        self.raw = raw
        self.headers = headers


class EngineGone(ErrorReply):
    """An engine that went away, or is going to, while the client has got nothing: another one may
    take the request. ``was_asked``: it may have begun.
    """

    def __init__(self, reason: Reason, message: str, *, was_asked: bool = False) -> None:
        super().__init__(502, reason, message)
        self.was_asked = was_asked


COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"

_KV_PARAMS: Final = "kv_transfer_params"
_PREFILL_PARAMS: Final[Mapping[str, bool | None]] = MappingProxyType(
    {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
)
"""What asks a prefill engine to keep the KV for somebody else."""

# A prefill engine stops after one token: what asks for more, or speaks of a stream, contradicts it.
_DROPPED_FOR_PREFILL = ("min_tokens", "stream_options")
_NULL = b"null"
_QUOTED_CHARS = 300
UNAVAILABLE: Final = 503
"""What an engine answers that takes no request now."""


class _Asked(msgspec.Struct, frozen=True):
    """The fields that decide whether one set of params can describe the request."""

    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    echo: bool | None = None
    logprobs: bool | int | None = None
    prompt_logprobs: int | None = None
    prompt: Any = None
    prompt_embeds: Any = None
    kv_transfer_params: Any = None
    vllm_xargs: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    min_tokens: Any = None
    stream: Any = None
    stream_options: Any = None


class _Answer(msgspec.Struct, frozen=True):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(_NULL)


class _Params(msgspec.Struct, frozen=True):
    do_remote_prefill: bool | None = None
    kvxfer_refused: str | None = None


@dataclass(frozen=True, slots=True)
class ClientBody:
    """A request body that was read and can be served. Values are the client's own bytes of JSON."""

    path: str
    fields: Mapping[str, msgspec.Raw]

    def for_prefill(self, offer: str | None = None) -> bytes:
        """The same request for one token, not streamed, its KV kept for somebody else. ``offer``:
        the name by which a decode engine asks for it before there is an answer.
        """
        fields: dict[str, object] = {
            name: value for name, value in self.fields.items() if name not in _DROPPED_FOR_PREFILL
        }
        params = dict(_PREFILL_PARAMS) | ({} if offer is None else {"kvxfer": {"request": offer}})
        fields |= {"max_tokens": 1, "stream": False, _KV_PARAMS: params}
        if self.path == CHAT and "max_completion_tokens" in fields:
            fields["max_completion_tokens"] = 1
        return msgspec.json.encode(fields)

    def for_decode(self, params: msgspec.Raw | Mapping[str, Any] | None) -> bytes:
        """The client's request with params; a prefill engine's byte for byte. None: without."""
        fields: dict[str, object] = dict(self.fields)
        if params is not None:
            fields[_KV_PARAMS] = params
        return msgspec.json.encode(fields)


def parse_body(path: str, raw: bytes) -> ClientBody:
    """Read a client's body. Raises ErrorReply (400) naming the field and what to do instead."""
    try:
        asked = msgspec.json.decode(raw, type=_Asked)
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    # RecursionError: a body nested deeper than the parser goes.
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:
        raise ErrorReply(400, Reason.BAD_BODY, f"body: expected a JSON object: {e}") from e
    for field, is_in_the_way, what in _NOT_TRANSFERABLE[path]:
        if is_in_the_way(asked):
            raise ErrorReply(400, Reason.NOT_TRANSFERABLE, f"{field}: {what}", param=field)
    # A null of the client's own says nothing and would be a second value of the key.
    return ClientBody(path, {name: v for name, v in fields.items() if name != _KV_PARAMS})


def _num_prompts(asked: _Asked) -> int:
    prompt = asked.prompt
    # A list of numbers is one prompt of token ids.
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return len(prompt)
    return 1


# A prefill engine gets other values of the fields that say how long the answer is and how it comes.
# So it would compute the prompt of a request that decode must refuse. What is refused here vLLM
# refuses as well; it takes numbers and truth also as text.
_MostTokens = Callable[[_Asked], tuple[float | None, float]]
_TRUTHS = {"0", "off", "f", "false", "n", "no", "1", "on", "t", "true", "y", "yes"}


def _number(value: object) -> float | None:
    """None: vLLM takes it for no whole number."""
    if not isinstance(value, str | int | float):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    except OverflowError:
        return math.inf
    return number if number.is_integer() else None


def _is_no_number(value: object) -> bool:
    return value is not None and _number(value) is None


def _is_no_truth(value: object) -> bool:
    if isinstance(value, str):
        return value.lower() not in _TRUTHS
    return value is not None and value not in (0, 1)


def _are_no_options(value: object) -> bool:
    if not isinstance(value, dict):
        return value is not None
    return any(map(_is_no_truth, map(value.get, ("include_usage", "continuous_usage_stats"))))


def _most_tokens(asked: _Asked) -> tuple[float | None, float]:
    """Of an answer, and the least that a completion may ask for: one that only echoes, none."""
    return _number(asked.max_tokens), 0 if asked.echo else 1


def _most_tokens_of_chat(asked: _Asked) -> tuple[float | None, float]:
    most = asked.max_completion_tokens
    return _number(asked.max_tokens if most is None else most), 1


def _too_few(most_tokens: _MostTokens) -> Callable[[_Asked], bool]:
    def is_in_the_way(asked: _Asked) -> bool:
        most, least = most_tokens(asked)
        return most is not None and most < least

    return is_in_the_way


def _contradicts(most_tokens: _MostTokens) -> Callable[[_Asked], bool]:
    def is_in_the_way(asked: _Asked) -> bool:
        (most, _), least = most_tokens(asked), _number(asked.min_tokens)
        if least is None:
            return False
        return least < 0 or (most is not None and 0 < most < least)

    return is_in_the_way


def _always_too_many(number: int | None) -> bool:
    return number is not None and number > 1


_Rule = tuple[str, Callable[[_Asked], bool], str]
_OWN_PARAMS = (
    "expected none, got some; the proxy sets them: leave them out, or talk to an engine itself"
)
_NUMBER = "expected a whole number, got something else"
_TOO_FEW = "expected at least 1, got less"
_LEAST = "expected 0 to what the answer may have at most, got less or more"
_ONE_SEQUENCE = "one prefill's KV serves one sequence; "
_PROMPT_LOGPROBS = (
    "log probabilities of the prompt need the prompt computed by the engine that answers, "
    "so its KV would not be transferred; "
)
_FOR_BOTH: tuple[_Rule, ...] = (
    (
        _KV_PARAMS,
        lambda a: a.kv_transfer_params is not None,
        _OWN_PARAMS,
    ),
    (
        "vllm_xargs",
        # vLLM gives these to its connector as well
        lambda a: isinstance(a.vllm_xargs, dict) and _KV_PARAMS in a.vllm_xargs,
        f"{_KV_PARAMS}: {_OWN_PARAMS}",
    ),
    ("max_tokens", lambda a: _is_no_number(a.max_tokens), _NUMBER),
    ("min_tokens", lambda a: _is_no_number(a.min_tokens), _NUMBER),
    ("stream", lambda a: _is_no_truth(a.stream), "expected true or false, got something else"),
    (
        "stream_options",
        lambda a: bool(a.stream_options) and not a.stream,
        "expected none without stream: true; leave them out, or ask for a stream",
    ),
    (
        "stream_options",
        lambda a: _are_no_options(a.stream_options),
        "expected an object of true and false, got something else",
    ),
    (
        "n",
        lambda a: _always_too_many(a.n),
        f"expected 1; {_ONE_SEQUENCE}send the request several times",
    ),
    (
        "best_of",
        lambda a: _always_too_many(a.best_of),
        f"expected 1; {_ONE_SEQUENCE}send the request several times and choose",
    ),
    (
        "use_beam_search",
        lambda a: bool(a.use_beam_search),
        f"expected false; {_ONE_SEQUENCE}send it to an engine itself",
    ),
    (
        "prompt_logprobs",
        lambda a: a.prompt_logprobs is not None,
        f"expected none; {_PROMPT_LOGPROBS}send it to an engine itself",
    ),
)
_NOT_TRANSFERABLE: Mapping[str, tuple[_Rule, ...]] = {
    COMPLETIONS: (
        *_FOR_BOTH,
        ("max_tokens", _too_few(_most_tokens), _TOO_FEW),
        ("min_tokens", _contradicts(_most_tokens), _LEAST),
        (
            "prompt",
            lambda a: _num_prompts(a) > 1,
            "expected one prompt, got a list of several; one set of params describes one prompt: "
            "send one request for each",
        ),
        (
            "prompt_embeds",
            lambda a: a.prompt_embeds is not None,
            "expected none; KV is matched by token ids: send the prompt as text or token ids",
        ),
        (
            "echo",
            # vLLM reads logprobs 0 as "of the prompt too", like any other number.
            lambda a: bool(a.echo) and a.logprobs is not None,
            f"expected it without logprobs; {_PROMPT_LOGPROBS}leave out echo or logprobs",
        ),
    ),
    CHAT: (
        *_FOR_BOTH,
        ("max_completion_tokens", lambda a: _is_no_number(a.max_completion_tokens), _NUMBER),
        ("max_tokens", _too_few(_most_tokens_of_chat), _TOO_FEW),
        ("min_tokens", _contradicts(_most_tokens_of_chat), _LEAST),
        (
            "echo",
            # vLLM asks for the prompt's log probabilities whenever a chat echoes.
            lambda a: bool(a.echo),
            f"expected false; {_PROMPT_LOGPROBS}leave out echo",
        ),
    ),
}
PATHS: Final = tuple(_NOT_TRANSFERABLE)
"""Where requests that become two are taken."""


def read_params(
    engine: str, status: int, raw: bytes, headers: Iterable[tuple[str, str]] = ()
) -> msgspec.Raw:
    """The params in a prefill engine's answer, as the bytes that came.

    Raises, with ``engine`` in the message, EngineRefused for a 4xx, which is about what the client
    sent, ErrorReply (502) for any other error and for an answer that cannot be read, EngineGone for
    503, and NoKv for one without params that ask the decode engine to take the KV (Drains where
    they say that the engine is going to end).
    """
    if status == UNAVAILABLE:
        raise EngineGone(Reason.PREFILL_ERROR, f"{engine}: answered {status}")
    if status != 200:
        told = f"{engine}: answered {status}: {raw[:_QUOTED_CHARS].decode(errors='replace')}"
        if 400 <= status < 500:
            raise EngineRefused(status, told, raw, to_client(headers))
        raise ErrorReply(502, Reason.PREFILL_ERROR, told)
    try:
        params = msgspec.json.decode(raw, type=_Answer).kv_transfer_params
        is_null = bytes(params) == _NULL
        marks = None if is_null else msgspec.json.decode(params, type=_Params)
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:
        raise ErrorReply(
            502,
            Reason.PREFILL_UNREADABLE,
            f"{engine}: expected a JSON object with {_KV_PARAMS}, got one that cannot be read: {e}",
        ) from e
    if marks is None:
        raise NoKv(
            f"{engine}: answered without {_KV_PARAMS}; its log or its metrics say why. If it "
            "always does, is it running with a KV connector whose role can send?"
        )
    if marks.kvxfer_refused == "draining":
        raise Drains(f"{engine}: drains, and offers no KV")
    if not marks.do_remote_prefill:
        raise NoKv(
            f"{engine}: answered with {_KV_PARAMS} without do_remote_prefill: true, "
            "which a decode engine runs as a plain request"
        )
    # A copy: Raw is a view that would keep the whole answer.
    return params.copy()


REQUEST_ID: Final = "X-Request-Id"

_HOP_BY_HOP = {
    *("connection", "keep-alive", "proxy-connection", "proxy-authenticate", "proxy-authorization"),
    *("te", "trailer", "transfer-encoding", "upgrade"),
}
# The proxy writes the body anew (already decompressed), and has answered what was expected.
_OF_THE_BODY = {"host", "content-length", "content-type", "content-encoding", "expect"}
_ENCODING = "accept-encoding"


def learned_params(params: msgspec.Raw) -> dict[str, Any]:
    """The same as a mapping, from which later requests learn where that engine is; empty if it
    cannot be read.
    """
    try:
        return msgspec.json.decode(params, type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return {}


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
