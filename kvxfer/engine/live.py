"""What the scheduler keeps of live requests, and what it tells of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvxfer.connector.records import LoadReport
from kvxfer.engine.digest import KVDigest
from kvxfer.engine.request import Request
from kvxfer.engine.steps import DigestOrder, GroupIds


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
