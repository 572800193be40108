"""What the scheduler side tells the workers each step, and what the workers tell back. Plain
records, msgpack-ready.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from kvxfer.transfer.manifest import EngineManifest, MemfdHandle, RankId
from kvxfer.transfer.wire import OfferRef, Reason


class Identity(NamedTuple):
    """Which rank of which engine, in which life."""

    engine_id: str
    incarnation: bytes
    rank: RankId


GroupBlockIds = tuple[tuple[int, ...], ...]
"""Block ids by KV cache group, positional from the request's first token, -1 where there is no
block.
"""

BlockPlaces = tuple[tuple[int, int], ...]
"""Blocks of a request by (group, position in the group's table)."""

TraceHeaders = tuple[tuple[str, str], ...]
"""W3C trace context: names and values of a request's headers ``traceparent`` and ``tracestate``."""


class NewOffer(msgspec.Struct, frozen=True, kw_only=True):
    """A new offer, sent with the request's first step. ``num_tokens``: how many tokens are offered,
    from token 0; ``open_tokens``: of these, how many are surely there before that step. ``name``:
    the id that a router gave the request; empty: none.
    """

    request_id: str
    nonce: bytes
    num_tokens: int
    digest: bytes
    open_tokens: int = 0
    name: bytes = b""


class OfferBlocks(msgspec.Struct, frozen=True):
    """The block table of an offered request as of this step (the whole table, not an increment)."""

    request_id: str
    block_ids: GroupBlockIds


class EndOffer(msgspec.Struct, frozen=True):
    """The engine takes the blocks back: the offer must be over before they are reused."""

    request_id: str
    nonce: bytes
    reason: Reason


class SourceRef(msgspec.Struct, frozen=True, kw_only=True):
    """Where an offer is: the front door of the source engine, and the offer. Parsed from
    kv_transfer_params. ``digest``: of the offered tokens as this engine knows them; sent with each
    message about the offer. ``curve_public_key``: which of the keys in ``curve_keys_dir`` it has.
    """

    engine_id: str
    endpoint: str
    offer: OfferRef
    num_tokens: int
    digest: bytes = b""
    curve_public_key: str | None = None


class NewLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Read tokens ``[token_lo, token_hi)`` of an offer into these blocks. ``trace``: headers of the
    request's trace, see :mod:`kvxfer.connector.tracing`. ``in_step``: the step that orders it
    computes with its KV, and reports it (:mod:`kvxfer.connector.loads`). ``wait_s``: of another
    load, how long that step may wait for its end, to report it. ``grows``: the source may compute
    them still.
    """

    request_id: str
    source: SourceRef
    token_lo: int
    token_hi: int
    block_ids: GroupBlockIds
    trace: TraceHeaders = ()
    in_step: bool = False
    wait_s: float = 0.0
    grows: bool = False


class FindOffer(msgspec.Struct, frozen=True):
    """Ask the source engine for the offer that a router has named. ``source.offer``: the name in
    the place of the nonce; ``source.digest``: of the whole prompt. Rank 0 asks, and answers with
    :class:`FoundOffer`: again, if the offer is not complete when it is found. ``is_wanted``: by a
    request here; else it is looked for to be given up, as long as that keeps no other one waiting.
    """

    source: SourceRef
    is_wanted: bool = True

    @property
    def name(self) -> str:
        """Of its answers. The router's id alone does not say which prompt is looked for, and
        whoever chooses the params may give one id to several.
        """
        return msgspec.json.encode(self.source).decode()


class FoundOffer(msgspec.Struct, frozen=True):
    """What has become of a FindOffer. ``source``: the offer's; None: it was not found, and why.
    ``is_complete``: all its tokens can be read.
    """

    source: SourceRef | None
    is_complete: bool = False
    reason: Reason | None = None
    detail: str = ""


class AbortLoad(msgspec.Struct, frozen=True):
    """The engine no longer wants a load that was handed to the workers. It is still reported,
    once.
    """

    request_id: str
    reason: Reason


class Hold(msgspec.Struct, frozen=True):
    """From this step on, extend this offer's lease until the load ends or Unhold (rank 0 sends the
    Keeps).
    """

    request_id: str
    source: SourceRef


class Unhold(msgspec.Struct, frozen=True):
    """This request does not want the offer any more. ``reason``: no other request of this engine
    wants it either, so rank 0 sends Cancel to every source rank. None: another request still uses
    the offer, or it has been read.
    """

    request_id: str
    source: SourceRef
    reason: Reason | None = None


class ConnectorMetadata(msgspec.Struct, frozen=True):
    """One step's orders for all ranks of one engine. Everything is empty in most steps. Not
    ``kw_only``: pickling would take twice as long.

    ``manifest`` comes with the first step, and again when it changes. ``blocks`` leave out the
    blocks that windows have dropped, so later code need not. ``computed`` names the offered
    requests whose last offered token is computed by this very step: their ready event is recorded
    at its end. ``grown``: other offered requests, and how many of their tokens are computed when
    this step is over. ``delayed`` names the finished requests whose blocks the engine keeps until
    finished_sending: finished_sending is reported only for these, at once if the offer is already
    over. An offer may end while its request still runs, and a running request must not be freed.
    ``num_open``: of an engine that drains, the requests whose KV it still is to offer, give or
    take; None if the ranks know.
    """

    manifest: EngineManifest | None = None
    offers: tuple[NewOffer, ...] = ()
    blocks: tuple[OfferBlocks, ...] = ()
    computed: tuple[str, ...] = ()
    grown: tuple[tuple[str, int], ...] = ()
    ended: tuple[EndOffer, ...] = ()
    delayed: tuple[str, ...] = ()
    loads: tuple[NewLoad, ...] = ()
    aborts: tuple[AbortLoad, ...] = ()
    holds: tuple[Hold, ...] = ()
    unholds: tuple[Unhold, ...] = ()
    finds: tuple[FindOffer, ...] = ()
    num_open: int | None = None

    @property
    def has_only_loads(self) -> bool:
        """Nothing but loads, and offers that are held until then or not any more."""
        others = self.manifest or self.offers or self.blocks or self.delayed or self.aborts
        return not (others or self.finds) and self.num_open is None


NO_ORDERS = ConnectorMetadata()
"""Those of most steps."""


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """How one load went on one rank. ``reason`` None: every route was valid.

    Moments are seconds of this host's time.monotonic(), in this order; 0 where the load never got
    there. ``handed_s``: the engine gave the order. ``started_s``: the first Pull left.
    ``granted_s``: the first Grant came. ``placed_s``: the last byte was in its place.
    ``finished_s``: the last verdict came. ``spans``: of an offer that grew, when this rank heard
    how many tokens are open. ``peer``: the front door of the source engine.
    ``incomplete_blocks``: (group, position) of blocks that were filled only partly, because the
    source had let go of their first tokens. ``has_empty_draft``: the source has no draft, this
    rank's engine has one.
    """

    request_id: str
    reason: Reason | None
    detail: str = ""
    nbytes: int = 0
    handed_s: float = 0.0
    started_s: float = 0.0
    granted_s: float = 0.0
    placed_s: float = 0.0
    finished_s: float = 0.0
    peer: str = ""
    transports: tuple[str, ...] = ()
    incomplete_blocks: BlockPlaces = ()
    has_empty_draft: bool = False
    trace: TraceHeaders = ()
    spans: tuple[tuple[float, int], ...] = ()


class NearSource(msgspec.Struct, frozen=True, array_like=True):
    """A source engine that a rank can load from within a step: every wire is direct, every board
    open. A load of n tokens takes ``latency_s + n * token_s``, by the wires' trials. ``boards``: of
    the source ranks that it asks.
    """

    latency_s: float
    token_s: float
    boards: tuple[MemfdHandle, ...]


NearSources = dict[bytes, NearSource]
"""Of one rank, by the incarnation of the source engine."""


class KVConnectorStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the last report; ``aggregate`` adds two. ``reasons``: why KV was not used, by
    Reason value; ``failed``: the part of these counts that are loads which began and failed.
    ``gauges``: those that have changed, by metric and labels as :mod:`kvxfer.connector.metrics` has
    them; the later one holds.
    """

    counts: dict[str, int] = {}
    reasons: dict[str, int] = {}
    failed: dict[str, int] = {}
    loads: tuple[LoadReport, ...] = ()
    gauges: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """The sum of both; neither is changed."""
        return KVConnectorStats(
            counts=_added(self.counts, other.counts),
            reasons=_added(self.reasons, other.reasons),
            failed=_added(self.failed, other.failed),
            loads=self.loads + other.loads,
            gauges=self.gauges | other.gauges,
        )

    def is_empty(self) -> bool:
        """Whether nothing was counted since the last report."""
        return not (self.counts or self.reasons or self.loads or self.gauges)


def _added(left: dict[str, int], right: dict[str, int]) -> dict[str, int]:
    return {key: left.get(key, 0) + right.get(key, 0) for key in left.keys() | right.keys()}


class KVConnectorOutput(msgspec.Struct, kw_only=True):
    """What one rank, or after aggregation one engine, reports after a step. Empty is None, as in
    the field's contract.

    ``failed_recving`` maps a request to the name of the reason; its ids are in ``finished_recving``
    too. ``failure_details``: the same requests, why in words. ``incomplete_blocks``: of loads in
    ``finished_recving`` that succeeded, the blocks that hold all tokens that their request needs,
    but not all tokens of a full block. The engine must leave these blocks out when it names the
    request's blocks for prefix reuse. ``near``: by rank, where it has changed. ``must_drain``: an
    operator has told a rank that the engine is to drain. ``found``: by the name of
    the FindOffer, of the front door.
    """

    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    failed_recving: dict[str, str] | None = None
    failure_details: dict[str, str] | None = None
    incomplete_blocks: dict[str, BlockPlaces] | None = None
    kv_connector_stats: KVConnectorStats | None = None
    kv_cache_events: Any = None
    near: dict[str, NearSources] | None = None
    found: dict[str, FoundOffer] | None = None
    invalid_block_ids: set[int] = set()
    expected_finished_count: int = 0
    must_drain: bool = False
