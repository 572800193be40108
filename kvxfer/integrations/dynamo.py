"""NVIDIA Dynamo: its vLLM workers prefill and decode with KvxferConnector.

A prefill worker of Dynamo looks up in a table, by the connector's name, what it asks of the engine
and what it hands to the decode worker, and refuses names that are not in it. Ours needs what
NixlConnector needs: the engine's ``kv_transfer_params`` go to the decode worker as they are.
:func:`register` adds the name; vLLM's plugin calls it wherever Dynamo is installed.
"""

from __future__ import annotations

import logging

from kvxfer.errors import KvxferError

LIKE = "NixlConnector"

_log = logging.getLogger("kvxfer.integrations")


class UnknownDynamo(KvxferError):
    """A Dynamo whose table of connectors is not where it was, or not as it was."""


def register(name: str) -> bool:
    """Make Dynamo's vLLM workers take a connector of this name. May be called again.

    Returns whether Dynamo (1.3 to 1.6) is there. Raises UnknownDynamo for one that has no table
    with NixlConnector in it.
    """
    try:
        from dynamo.vllm import kv_connector_protocols
    except ModuleNotFoundError:
        return False
    except ImportError as exc:
        raise UnknownDynamo(f"dynamo.vllm: expected a table of connectors, got {exc}") from exc
    table = getattr(kv_connector_protocols, "KV_CONNECTOR_PROTOCOLS", None)
    if not isinstance(table, dict) or LIKE not in table:
        got = type(table).__name__ if not isinstance(table, dict) else sorted(table)
        raise UnknownDynamo(
            f"KV_CONNECTOR_PROTOCOLS: expected a table of Dynamo with {LIKE}, got {got}; "
            f"its workers will refuse {name}"
        )
    table.setdefault(name, table[LIKE])
    return True
