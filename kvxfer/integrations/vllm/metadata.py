"""What travels between the scheduler side and the workers inside vLLM's own records: plain data,
safe to pickle.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvxfer.connector.records import ConnectorMetadata
from kvxfer.integrations.vllm.compat import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from kvxfer.transfer.manifest import CacheFacts, RankManifest


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
class KvxferHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What one rank says of itself and of its engine, whose ranks all say the same.

    ``incarnation``: 16 random bytes that the ranks agreed on, one registration of their pools.
    """

    incarnation: bytes
    facts: CacheFacts
    manifest: RankManifest


@dataclass(frozen=True)
class KvxferWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Why loads failed on a rank in this step, by request; empty where an answer was wanted.
    ``details``: the same requests, why in words.
    """

    failures: dict[str, str]
    details: dict[str, str] = field(default_factory=dict)

    def aggregate(self, other: object) -> KvxferWorkerMetadata:
        """Both together; the first reason for a request counts."""
        if not isinstance(other, KvxferWorkerMetadata):
            return self
        return KvxferWorkerMetadata(
            {**other.failures, **self.failures}, {**other.details, **self.details}
        )
