"""The names of vLLM's connector interface that the plugin needs, in all of vLLM 0.26 to 0.33, and
the plugin's records that travel inside vLLM's own: plain data, safe to pickle.

Where a version lacks a name, a stand-in takes its place that this version will never ask for.
"""

from __future__ import annotations

import copyreg
from abc import ABC
from dataclasses import dataclass, field
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.core.sched.scheduler import Scheduler

from kvxfer.connector.records import ConnectorMetadata, FoundOffer, NearSources
from kvxfer.errors import ConfigError
from kvxfer.transfer.manifest import CacheFacts, MemfdHandle, RankManifest


def _unset() -> msgspec.UnsetType:
    return msgspec.UNSET


# UNSET names no module: pickle looks for it in every one that is loaded, by which transformers
# imports what is not installed.
copyreg.pickle(msgspec.UnsetType, lambda _: (_unset, ()))

KVConnectorBase = base.KVConnectorBase_V1
KVConnectorMetadata: Any = base.KVConnectorMetadata
KVConnectorRole = base.KVConnectorRole


@dataclass
class _TransferResults:
    """Before versions that report failures by request."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


class _Nothing(ABC):  # noqa: B024  # a base class that asks for nothing
    """In the place of a base class that this version does not have."""


_KVConnectorHandshakeMetadata: Any = getattr(base, "KVConnectorHandshakeMetadata", _Nothing)
KVConnectorTransferResults: Any = getattr(base, "KVConnectorTransferResults", _TransferResults)
_KVConnectorWorkerMetadata: Any = getattr(base, "KVConnectorWorkerMetadata", _Nothing)
SupportsHMA: Any = getattr(base, "SupportsHMA", _Nothing)

REPORTS_FAILED_REQUESTS: bool = hasattr(base, "KVConnectorTransferResults")
"""A failed load is named by its request; before, by block ids, which one group alone can do."""


DEFERS_FREES: bool = hasattr(Scheduler, "_drain_deferred_frees")
"""Blocks that a step in flight writes are in the pool only after it, in an engine that loads."""


def check_groups(num_groups: int) -> None:
    """Raises ConfigError for several groups where no failed load of theirs could be reported."""
    if num_groups > 1 and not REPORTS_FAILED_REQUESTS:
        raise ConfigError(
            f"KV cache groups: expected 1, got {num_groups}; this vLLM cannot be told which "
            "request's load failed, only blocks of one group: use vLLM 0.30 or later, or "
            "--disable-hybrid-kv-cache-manager"
        )


PASSES_WORKER_METADATA: bool = hasattr(base, "KVConnectorWorkerMetadata")
"""What a worker says beyond vLLM's own words reaches the scheduler side."""


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


@dataclass(frozen=True)
class KvxferMetadata(KVConnectorMetadata):  # type: ignore[misc]  # as in stats.py
    """One step's orders. ``is_idle``: the step computes nothing, so that waiting costs nobody.
    ``wants_answer``: vLLM must call the scheduler side after it, and does only if a worker says
    something.
    """

    orders: ConnectorMetadata
    is_idle: bool
    wants_answer: bool = False


@dataclass(frozen=True)
class KvxferHandshake(_KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What one rank says of itself and of its engine, whose ranks all say the same.

    ``incarnation``: 16 random bytes that the ranks agreed on, one registration of their pools.
    ``drain_flag``: see :mod:`~kvxfer.integrations.vllm.drain_flag`.
    """

    incarnation: bytes
    facts: CacheFacts
    manifest: RankManifest
    drain_flag: MemfdHandle | None = None


@dataclass(frozen=True)
class KvxferWorkerMetadata(_KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Why loads failed on a rank in this step, by request; empty where an answer was wanted.
    ``details``: the same requests, why in words. ``in_step``: loads that were part of this step,
    good or not. ``near`` and ``found``: as :class:`~kvxfer.connector.records.KVConnectorOutput` has
    them. ``must_drain``: an operator has told a rank that the engine is to drain.
    """

    failures: dict[str, str]
    details: dict[str, str] = field(default_factory=dict)
    in_step: tuple[str, ...] = ()
    near: dict[str, NearSources] = field(default_factory=dict)
    must_drain: bool = False
    found: dict[str, FoundOffer] = field(default_factory=dict)

    @property
    def has_news(self) -> bool:
        return bool(self.failures or self.in_step or self.near or self.must_drain or self.found)

    def aggregate(self, other: object) -> KvxferWorkerMetadata:
        """Both together; the first reason for a request counts."""
        if not isinstance(other, KvxferWorkerMetadata):
            return self
        return KvxferWorkerMetadata(
            {**other.failures, **self.failures},
            {**other.details, **self.details},
            tuple({*self.in_step, *other.in_step}),
            {**self.near, **other.near},
            self.must_drain or other.must_drain,
            {**self.found, **other.found},
        )
