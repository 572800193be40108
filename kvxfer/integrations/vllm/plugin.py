"""What vLLM's plugin loader calls in every process: makes the connector known by its name."""

from __future__ import annotations

from contextlib import suppress

NAME = "KvxferConnector"


def register() -> None:
    """Make ``kv_connector: KvxferConnector`` work without a module path. May be called again."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with suppress(ValueError):  # the name is registered already
        KVConnectorFactory.register_connector(NAME, "kvxfer.integrations.vllm", NAME)
