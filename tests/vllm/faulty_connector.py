"""Our connector, whose wires do what ``faults`` of its extra config says, see
kvxfer.testing.faults.
"""

from __future__ import annotations

from typing import Any

from kvxfer.integrations.vllm.connector import KvxferConnector
from kvxfer.testing.faults import injected


class FaultyConnector(KvxferConnector):
    """kvxfer has no such setting: the key is out while it reads them."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        # vLLM makes the scheduler's and the worker's from one config: each finds the key.
        transfer = vllm_config.kv_transfer_config
        extra = dict(transfer.kv_connector_extra_config)
        self._faults = extra.pop("faults", "")
        transfer.kv_connector_extra_config, whole = extra, transfer.kv_connector_extra_config
        try:
            super().__init__(vllm_config, *args, **kwargs)
        finally:
            transfer.kv_connector_extra_config = whole

    def register_kv_caches(self, *args: Any, **kwargs: Any) -> None:
        with injected(self._faults):
            super().register_kv_caches(*args, **kwargs)
