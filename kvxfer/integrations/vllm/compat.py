"""The names of vLLM's connector interface that the plugin needs, in all of vLLM 0.26 to 0.33.

Where a version lacks one, a stand-in takes its place that this version will never ask for.
"""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base

KVConnectorBase = base.KVConnectorBase_V1
KVConnectorMetadata = base.KVConnectorMetadata
KVConnectorRole = base.KVConnectorRole


@dataclass
class _TransferResults:
    """Before versions that report failures by request."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


class _Nothing(ABC):  # noqa: B024  # a base class that asks for nothing
    """In the place of a base class that this version does not have."""


KVConnectorHandshakeMetadata: Any = getattr(base, "KVConnectorHandshakeMetadata", _Nothing)
KVConnectorTransferResults: Any = getattr(base, "KVConnectorTransferResults", _TransferResults)
KVConnectorWorkerMetadata: Any = getattr(base, "KVConnectorWorkerMetadata", _Nothing)
SupportsHMA: Any = getattr(base, "SupportsHMA", _Nothing)

REPORTS_FAILED_REQUESTS: bool = hasattr(base, "KVConnectorTransferResults")
"""A failed load is named by its request; before, by block ids, which one group alone can do."""


def peer_hit_source() -> object | None:
    """What vLLM's prompt token counters call tokens from a peer; None: it does not tell sources."""
    sources = getattr(base, "CacheHitSource", None)
    return getattr(sources, "P2P", None)


def counts_no_references(vllm_config: Any) -> bool:
    """A block's reference count is looked at for nothing but whether it is free.

    Versions that have cascade attention take a block for every running request's when its count is
    their number; a pin would add one.
    """
    return bool(getattr(vllm_config.model_config, "disable_cascade_attn", True))
