"""One request inside the reference engine, and what the scheduler tells of it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvxfer.connector.params import Plain
from kvxfer.connector.records import LoadReport
from kvxfer.engine.digest import KVDigest


class Status(enum.Enum):
    WAITING = enum.auto()
    WAITING_FOR_REMOTE_KVS = enum.auto()
    RUNNING = enum.auto()
    FINISHED_STOPPED = enum.auto()  # an end-of-sequence token
    FINISHED_LENGTH_CAPPED = enum.auto()  # max_new_tokens
    FINISHED_ABORTED = enum.auto()
    FINISHED_ERROR = enum.auto()

    @property
    def is_finished(self) -> bool:
        return self.name.startswith("FINISHED")


@dataclass(slots=True)
class Request:
    """Token counts are totals from the first prompt token. ``num_computed_tokens``: tokens whose KV
    is in the cache.

    ``num_cached_tokens``: the local prefix hit; ``num_external_tokens``: tokens that were to be
    loaded. ``trace_headers``: the trace that its load continues. ``plain``: why it asked for KV and
    got none to load; ``failure``: why its load failed. ``reports``: one for each rank that loaded.
    ``digests``: by rank, only where the engine digests. ``num_told_tokens``: how many of its tokens
    the workers know; None before its first step.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_new_tokens: int
    kv_transfer_params: dict[str, Any] | None = None
    trace_headers: dict[str, str] | None = None
    status: Status = Status.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_external_tokens: int = 0
    failure: str | None = None
    plain: Plain | None = None
    reports: list[LoadReport] = field(default_factory=list)
    digests: tuple[KVDigest, ...] = ()
    num_told_tokens: int | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def all_token_ids(self) -> Sequence[int]:
        return (*self.prompt_token_ids, *self.output_token_ids)


@dataclass(frozen=True, slots=True)
class NewToken:
    request_id: str
    token_id: int
    logit_gap: float


@dataclass(frozen=True, slots=True)
class Finished:
    """A request ended. ``kv_transfer_params``: what it offers others, None for nothing."""

    request: Request
    kv_transfer_params: dict[str, Any] | None


Event = NewToken | Finished
