"""A scheduler side without workers, its requests and its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace as Bag
from typing import Any

import msgspec

from kvxfer.config import Config
from kvxfer.connector.params import make_params
from kvxfer.connector.records import ConnectorMetadata, SourceRef
from kvxfer.connector.scheduler_side import SchedulerConnector
from kvxfer.transfer.manifest import CacheFacts, EngineIdentity, RankId, RankManifest
from kvxfer.transfer.tokens import token_digest
from kvxfer.transfer.wire import OfferRef, Reason

INCARNATION = b"i" * 16
FACTS = CacheFacts(
    model="llama",
    weights="w",
    rope="r",
    dtype="float32",
    quantisation="none",
    num_kv_heads=4,
    head_size=64,
    num_layers=2,
)
ENGINE = EngineIdentity(
    engine_id="me",
    incarnation=INCARNATION,
    facts=FACTS,
    tp_size=1,
    pp_size=1,
    block_tokens=16,
    layout="HND",
)
PROMPT = tuple(range(40))
SOURCE = SourceRef(
    engine_id="p",
    endpoint="tcp://127.0.0.1:5700",
    offer=OfferRef(b"n" * 16, b"s" * 16),
    num_tokens=40,
    digest=token_digest(PROMPT),
)


@dataclass
class Request:
    request_id: str = "r"
    prompt_token_ids: tuple[int, ...] = PROMPT
    kv_transfer_params: dict[str, Any] | None = None
    status: str = "FINISHED_LENGTH_CAPPED"
    lora_request: object = None
    trace_headers: dict[str, str] | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


@dataclass
class Blocks:
    ids: list[int]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (self.ids,)


def connector(
    *,
    can_send: bool = True,
    can_receive: bool = True,
    now: Callable[[], float] = lambda: 0.0,
    num_own_tokens: int = 1,
    begins_ahead: bool = False,
    **settings: Any,
) -> SchedulerConnector:
    made = SchedulerConnector(
        Config(**settings),
        ENGINE,
        can_send=can_send,
        can_receive=can_receive,
        now=now,
        num_own_tokens=num_own_tokens,
        begins_ahead=begins_ahead,
    )
    made.set_xfer_handshake_metadata_pp_aware({(0, 0): rank_manifest()})
    assert made.build_connector_meta(step()).manifest is not None
    return made


def rank_manifest() -> RankManifest:
    return RankManifest(
        rank=RankId(0, 0),
        control_endpoint="tcp://127.0.0.1:5999",
        data_endpoints={},
        memories=(),
        regions=(),
    )


def step(
    new: tuple[tuple[str, list[int], int], ...] = (),
    cached: tuple[tuple[str, list[int] | None, int], ...] = (),
    counts: dict[str, int] | None = None,
    resumed: frozenset[str] = frozenset(),
    preempted: frozenset[str] = frozenset(),
) -> Any:
    return Bag(
        scheduled_new_reqs=[
            Bag(req_id=i, block_ids=(ids,), num_computed_tokens=n) for i, ids, n in new
        ],
        scheduled_cached_reqs=Bag(
            req_ids=[i for i, _, _ in cached],
            new_block_ids=[None if ids is None else (ids,) for _, ids, _ in cached],
            num_computed_tokens=[n for _, _, n in cached],
            resumed_req_ids=resumed,
        ),
        num_scheduled_tokens=counts or {},
        preempted_req_ids=preempted,
    )


def wanting(nonce: bytes = SOURCE.offer.nonce, **kwargs: Any) -> Request:
    """A decode request."""
    source = msgspec.structs.replace(SOURCE, offer=OfferRef(nonce, SOURCE.offer.incarnation))
    params = make_params(source, request_id="x", number=1, tp_size=1, pp_size=1)
    return Request(kv_transfer_params=params, **kwargs)


def ends_of(metadata: ConnectorMetadata) -> dict[str, Reason]:
    """Which offers end with this step, and why."""
    return {order.request_id: order.reason for order in metadata.ended}


def offering(**kwargs: Any) -> Request:
    """A prefill request."""
    return Request(kv_transfer_params={"do_remote_decode": True}, **kwargs)


def handed(c: SchedulerConnector, nonce: bytes = SOURCE.offer.nonce, **kwargs: Any) -> Request:
    """A request whose load is with the workers."""
    request = wanting(nonce, **kwargs)
    c.on_new_request(request)
    c.get_num_new_matched_tokens(request, 0)
    c.update_state_after_alloc(request, Blocks([5, 6, 7]), 39)
    assert len(c.build_connector_meta(step()).loads) == 1
    return request
