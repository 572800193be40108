"""vLLM's KV connector on top of :mod:`kvxfer.connector`: translation, and nothing else.

``{"kv_connector": "KvxferConnector"}`` finds it by name where the package is installed, and
``"kv_connector_module_path": "kvxfer.integrations.vllm"`` anywhere. Importing this package imports
neither vLLM nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvxfer.integrations.vllm.connector import KvxferConnector

__all__ = ["KvxferConnector"]


def __getattr__(name: str) -> object:
    if name != "KvxferConnector":
        raise AttributeError(f"module 'kvxfer.integrations.vllm' has no attribute {name!r}")
    from kvxfer.integrations.vllm.connector import KvxferConnector

    return KvxferConnector


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
