"""Helpers of connectors: questions about an engine's configuration and about a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvxfer.connector.contract import SchedulerOutputLike
    from kvxfer.tensors.attention import AttentionBackend, ForwardConfig


class CurrentConfig(Protocol):
    """The part of a configuration that the cache's layout depends on."""

    @property
    def kv_transfer_config(self) -> object | None: ...
    @property
    def model_config(self) -> object: ...


_current_config: ContextVar[CurrentConfig | None] = ContextVar(
    "kvxfer_current_config", default=None
)


@contextmanager
def set_current_config(config: CurrentConfig) -> Iterator[None]:
    """Make ``config`` the current one for the body, in this thread or task; contexts nest."""
    token = _current_config.set(config)
    try:
        yield
    finally:
        _current_config.reset(token)


def get_kv_connector_cache_layout() -> str:
    """The order of a block's bytes that the connector wants: "HND" or "NHD".

    HND where a connector is configured, since a range of heads is then one run of bytes, unless the
    model has latent attention, which has no heads to divide. NHD otherwise, and outside of
    :func:`set_current_config`, where no connector is configured either.

    Reads ``kv_transfer_config`` (None: no connector) and ``model_config.use_mla`` (missing: False)
    of the current configuration.
    """
    config = _current_config.get()
    if config is None or config.kv_transfer_config is None:
        return "NHD"
    return "NHD" if getattr(config.model_config, "use_mla", False) else "HND"


def get_current_attn_backend(vllm_config: ForwardConfig) -> type[AttentionBackend]:
    """The backend of the model's first attention layer.

    Reads ``vllm_config.compilation_config.static_forward_context``, layer name to
    :class:`~kvxfer.tensors.attention.AttentionLayer`.

    Raises:
        ValueError: the model has no attention layer.
    """
    from kvxfer.tensors.attention import attention_layers  # imported here: it needs torch

    layers = attention_layers(vllm_config)
    if not layers:
        raise ValueError(
            "static_forward_context: expected at least one attention layer, got none; ask after "
            "the model is built"
        )
    return next(iter(layers.values())).get_attn_backend()


def yield_req_data(
    scheduler_output: SchedulerOutputLike,
) -> Iterator[tuple[str, Sequence[Sequence[int]] | None, bool]]:
    """Each request of a step as (request id, its block ids by group, whether it was preempted and
    comes back).

    A request in its first step has its full table, and False. A request that comes back has its
    full table, which replaces what was known. Any other has the ids to append, None where there are
    none.

    Raises:
        ValueError: cached requests with another number of ``new_block_ids`` than ``req_ids``.
    """
    cached = scheduler_output.scheduled_cached_reqs
    if len(cached.req_ids) != len(cached.new_block_ids):
        raise ValueError(
            f"new_block_ids: expected one entry for each of {len(cached.req_ids)} cached requests, "
            f"got {len(cached.new_block_ids)}"
        )
    for new in scheduler_output.scheduled_new_reqs:
        yield new.req_id, new.block_ids, False
    for req_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
        yield req_id, block_ids, req_id in cached.resumed_req_ids
