"""Move the KV cache of a request from its prefill workers to the workers that will decode it.

The names below are imported when they are first used, so that ``import kvxfer`` stays free of torch
and sockets.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvxfer.config import Config, load_config
    from kvxfer.connector.aggregator import KVOutputAggregator
    from kvxfer.connector.scheduler_side import SchedulerConnector
    from kvxfer.connector.worker_side import WorkerConnector
    from kvxfer.transfer.layout import Region
    from kvxfer.transfer.topology import TpKVTopology

__version__ = "0.1.0"

__all__ = [
    "Config",
    "KVOutputAggregator",
    "Region",
    "SchedulerConnector",
    "TpKVTopology",
    "WorkerConnector",
    "__version__",
    "load_config",
]

_HOMES = {
    "Config": "kvxfer.config",
    "KVOutputAggregator": "kvxfer.connector.aggregator",
    "Region": "kvxfer.transfer.layout",
    "SchedulerConnector": "kvxfer.connector.scheduler_side",
    "TpKVTopology": "kvxfer.transfer.topology",
    "WorkerConnector": "kvxfer.connector.worker_side",
    "load_config": "kvxfer.config",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvxfer' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
