"""Ray Serve LLM: replicas that prefill and decode with KvxferConnector.

Ray asks a backend, by the connector's name, to set up each replica. Without one it warns and
leaves the settings as they are, and every replica would listen on 127.0.0.1. In an application's
config say ``import_path: kvxfer.integrations.ray_serve:build_pd_openai_app``, or call
:func:`register` before ``serve.run``. Tested with Ray 2.60.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.llm._internal.serve.engines.vllm.kv_transfer.base import DefaultConnectorBackend
from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory

from kvxfer.config import load_config
from kvxfer.integrations.vllm.plugin import NAME

if TYPE_CHECKING:
    from ray.serve import Application


class Backend(DefaultConnectorBackend):  # type: ignore[misc]  # Ray has no types here
    """Sets one replica up. Requests are shaped as for NixlConnector, by the base class."""

    def setup(self) -> None:
        """Called in the replica, before its engine starts. Raises ConfigError for settings that
        cannot work.
        """
        data_rank = self.llm_config.engine_kwargs.get("data_parallel_rank")
        complete(
            self.kv_transfer_config,
            host=ray.util.get_node_ip_address(),
            # vLLM tells data-parallel ranks apart by itself
            replica=serve.get_replica_context().rank.rank if data_rank is None else None,
        )


def complete(transfer: MutableMapping[str, Any], *, host: str, replica: int | None) -> None:
    """Fill in what a replica needs and nobody has set.

    ``host``: the address of its node. ``port``: any free one, because several replicas share a node
    and the parameters of a request name the port. An ``engine_id`` that was set gets the replica's
    number behind it, because engines need different ones.
    """
    extra = dict(transfer.get("kv_connector_extra_config") or {})
    ours = {name: extra[name] for name in ("host", "port") if name in extra}
    origins = load_config({}, ours).origins
    for name, value in (("host", host), ("port", 0)):
        if origins[name] == "default":
            extra[name] = value
    transfer["kv_connector_extra_config"] = extra
    if transfer.get("engine_id") and replica is not None:
        transfer["engine_id"] = f"{transfer['engine_id']}-{replica}"


def register() -> None:
    """Tell Ray of the backend, for all processes of the cluster. May be called again."""
    if not KVConnectorBackendFactory.is_registered(NAME):
        KVConnectorBackendFactory.register_backend(NAME, f"{__name__}:{Backend.__name__}")


def build_pd_openai_app(pd_serving_args: dict[str, Any]) -> Application:
    """Ray's own builder of prefill and decode deployments, which knows the connector."""
    register()
    from ray.serve.llm import build_pd_openai_app as build  # imports vLLM

    return build(pd_serving_args)
