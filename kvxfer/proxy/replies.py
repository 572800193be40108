"""What the proxy answers by itself: refusals, each with a reason that is also counted."""

from __future__ import annotations

import enum

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
    DECODE_UNREACHABLE = "decode_unreachable"
    DECODE_ERROR = "decode_error"
    DECODE_CUT = "decode_cut"
    CLIENT_GONE = "client_gone"


class NoKv(KvxferError):
    """A prefill engine has answered, and offers no KV: decode can compute the prompt itself."""

    reason = Reason.PREFILL_WITHOUT_KV


class Refused(KvxferError):
    """A request that the proxy answers by itself, with an error.

    ``status`` is the HTTP status, ``param`` the field of the body that is the reason, if one is.
    """

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
