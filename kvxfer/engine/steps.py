"""What the scheduler sends to every rank for one step, and what comes back, as msgpack."""

from __future__ import annotations

import msgspec

from kvxfer.connector.records import ConnectorMetadata, KVConnectorOutput
from kvxfer.engine.digest import KVDigest

GroupIds = tuple[tuple[int, ...], ...]
"""Block ids by group and position, -1 where a request has no block."""


class NewRequestData(msgspec.Struct, frozen=True, kw_only=True):
    """A request in its first step: workers keep its tokens and its block table."""

    req_id: str
    prompt_token_ids: tuple[int, ...]
    block_ids: GroupIds
    num_computed_tokens: int


class CachedRequestData(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that the workers know: one entry each in lists of equal length, as the connector
    contract has them.

    ``new_block_ids``: by group, what the tables have got at their ends; None where nothing. Blocks
    that a window has left behind are not taken out of the workers' tables: nothing looks at them.
    ``new_token_ids``: what was sampled in the step before, from which ranks take their tokens.
    """

    req_ids: tuple[str, ...] = ()
    new_block_ids: tuple[GroupIds | None, ...] = ()
    resumed_req_ids: frozenset[str] = frozenset()
    num_computed_tokens: tuple[int, ...] = ()
    new_token_ids: tuple[tuple[int, ...], ...] = ()


class DigestOrder(msgspec.Struct, frozen=True):
    """Of the first ``num_tokens``, as far as the tables have them, before this step computes."""

    req_id: str
    block_ids: GroupIds
    num_tokens: int


class SchedulerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One step. Without ``num_scheduled_tokens`` only the connector is served."""

    scheduled_new_reqs: tuple[NewRequestData, ...] = ()
    scheduled_cached_reqs: CachedRequestData = CachedRequestData()
    num_scheduled_tokens: dict[str, int] = {}
    finished_req_ids: frozenset[str] = frozenset()
    preempted_req_ids: frozenset[str] = frozenset()
    zero_block_ids: tuple[int, ...] = ()
    digests: tuple[DigestOrder, ...] = ()
    kv_connector_metadata: ConnectorMetadata | None = None


class Sample(msgspec.Struct, frozen=True):
    """The greedy token of a request and how far its logit is ahead of the second."""

    req_id: str
    token_id: int
    logit_gap: float


class StepOutput(msgspec.Struct, kw_only=True):
    """What one rank returns; samples come from rank 0 only."""

    samples: tuple[Sample, ...] = ()
    kv_connector_output: KVConnectorOutput | None = None
    digests: dict[str, KVDigest] = {}
