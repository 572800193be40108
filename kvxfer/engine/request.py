"""One request inside the reference engine."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from kvxfer.connector.params import Plain
from kvxfer.connector.records import LoadReport
from kvxfer.engine.digest import KVDigest
from kvxfer.engine.steps import DigestOrder, GroupIds

class Status(enum.Enum):
    """Where a request stands."""

    WAITING = enum.auto()
    WAITING_FOR_REMOTE_KVS = enum.auto()
    RUNNING = enum.auto()
    FINISHED_STOPPED = enum.auto()  # an end-of-sequence token
    FINISHED_LENGTH_CAPPED = enum.auto()  # max_new_tokens
    FINISHED_ABORTED = enum.auto()
    FINISHED_ERROR = enum.auto()

    @property
    def is_finished(self) -> bool:
        """Nothing more will be computed."""
        return self.name.startswith("FINISHED")


@dataclass(slots=True)
class Request:
    """Token counts are totals from the first prompt token. ``num_computed_tokens``: tokens whose KV
    is in the cache.

    ``num_cached_tokens``: the local prefix hit; ``num_external_tokens``: tokens that were to be
    loaded. ``plain``: why it asked for KV and got none to load; ``failure``: why its load failed.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_new_tokens: int
    kv_transfer_params: dict[str, Any] | None = None
    status: Status = Status.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_external_tokens: int = 0
    failure: str | None = None
    plain: Plain | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt and output so far."""
        return (*self.prompt_token_ids, *self.output_token_ids)


@dataclass(frozen=True, slots=True)
class NewToken:
    """A request has one more token."""

    request_id: str
    token_id: int
    logit_gap: float


@dataclass(frozen=True, slots=True)
class Finished:
    """A request ended. ``digests`` only where the engine digests, by rank."""

    request: Request
    kv_transfer_params: dict[str, Any] | None
    loads: tuple[LoadReport, ...]
    digests: tuple[KVDigest, ...] = ()


Event = NewToken | Finished


@dataclass(slots=True)
class Live:
    """What the scheduler keeps of a request beside the request itself."""

    request: Request
    is_known_to_workers: bool = False
    num_tokens_told: int = 0
    reports: list[LoadReport] = field(default_factory=list)
    digests: tuple[KVDigest, ...] = ()

    def take_untold(self) -> tuple[int, ...]:
        """Tokens sampled since the workers were last told, now told."""
        told, self.num_tokens_told = self.num_tokens_told, self.request.num_tokens
        return tuple(self.request.output_token_ids[told - self.request.num_prompt_tokens :])


@dataclass(slots=True)
class Orders:
    """What the next step carries besides tokens to compute."""

    finished: set[str] = field(default_factory=set)
    digests: list[DigestOrder] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Share:
    """A request's part of a step: how many tokens, and the blocks that its tables get for them."""

    live: Live
    num_new_tokens: int
    new_block_ids: GroupIds


@dataclass(frozen=True, slots=True)
class BlockTables:
    """A request's block tables as the connector reads them."""

    block_ids: GroupIds

    def get_block_ids(self) -> GroupIds:
        """By group."""
        return self.block_ids
