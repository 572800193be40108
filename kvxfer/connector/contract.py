"""The attributes of an engine's own records that the connector reads, under vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Protocol


class RequestLike(Protocol):
    """A request. ``status`` is an enum or a string; only its name is read."""

    @property
    def request_id(self) -> str: ...
    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None: ...
    @property
    def prompt_token_ids(self) -> Sequence[int]: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def status(self) -> object: ...


class BlocksLike(Protocol):
    """What was allocated for a request."""

    def get_block_ids(self) -> Sequence[Sequence[int]]:
        """Block ids by KV cache group, positional from the request's first token."""


class NewRequestLike(Protocol):
    """A request in its first step."""

    @property
    def req_id(self) -> str: ...
    @property
    def block_ids(self) -> Sequence[Sequence[int]]: ...
    @property
    def num_computed_tokens(self) -> int: ...


class CachedRequestsLike(Protocol):
    """Requests that were scheduled before: attribute lists of equal length, as the field's contract
    has them.
    """

    @property
    def req_ids(self) -> Sequence[str]: ...
    @property
    def new_block_ids(self) -> Sequence[Sequence[Sequence[int]] | None]: ...
    @property
    def resumed_req_ids(self) -> AbstractSet[str]: ...
    @property
    def num_computed_tokens(self) -> Sequence[int]: ...


class SchedulerOutputLike(Protocol):
    """What one step will run."""

    @property
    def scheduled_new_reqs(self) -> Sequence[NewRequestLike]: ...
    @property
    def scheduled_cached_reqs(self) -> CachedRequestsLike: ...
    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]: ...
    @property
    def preempted_req_ids(self) -> AbstractSet[str] | None: ...


def status_name(request: RequestLike) -> str:
    """The name of the request's status, e.g. FINISHED_STOPPED."""
    return str(getattr(request.status, "name", request.status))
