"""Another connector, to stand beside ours: has as many tokens of every prompt as it is told."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)


class PlainConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """``num_tokens``: None if it never knows. Of models with one group."""

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """What it was told."""
        found = self._kv_transfer_config.kv_connector_extra_config["num_tokens"]
        if found is None:
            return None, False
        return (found, True) if found and not request.num_computed_tokens else (0, False)

    def update_state_after_alloc(self, *args: Any) -> None:
        """Nothing."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Nothing."""
        return KVConnectorMetadata()

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_save(self) -> None:
        """Nothing."""


class OtherConnector(PlainConnector, SupportsHMA):  # type: ignore[misc]
    """``keeps``: the blocks of every finished request."""

    def request_finished_all_groups(self, *args: Any) -> tuple[bool, None]:
        """As it was told."""
        return self._kv_transfer_config.kv_connector_extra_config.get("keeps", False), None
