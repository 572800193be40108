"""Loads that are part of a step of vLLM's: which engines can have them, and what keeps their KV to
its request until it is proven.

vLLM names the blocks of such a load before any rank has read them. With async scheduling it
schedules one more step before it sees the verdict; a request of that step could hit those blocks,
and the load's own request could be preempted, its token still to come. Hidden names and a dropped
token leave no way to either.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from kvxfer.connector.contract import status_name
from kvxfer.integrations.vllm.compat import PASSES_WORKER_METADATA, KVConnectorBase
from kvxfer.integrations.vllm.views import Tables

_NEEDED = (
    "blocks",
    "cached_block_hash_to_block",
    "cached_block_hashes_by_block",
    "_emit_block_removed_events",
)
"""What is used of vLLM's block pool, in 0.26 to 0.33: blocks by id, blocks by name, names that a
block has beside its first one, and what a router is told.
"""


def why_not_heard() -> str | None:
    """Why the scheduler side hears nothing of what the workers say in their own words."""
    return None if PASSES_WORKER_METADATA else "this vLLM does not pass on what its workers say"


def is_engines_own(connector: object, vllm_config: Any) -> bool:
    """This config is the one by which vLLM's scheduler handles a failed load. Called while
    ``connector`` is made; False too where that cannot be told.

    MultiConnector gives each child a copy of the engine's config, with the child's own
    kv_load_failure_policy in it. Nothing in a copy says that it is one, and vLLM 0.26 to 0.33 make
    a scheduler outside of ``set_current_vllm_config``. So the callers are asked: between the
    scheduler that has this very config and ``connector`` there is no other connector.
    """
    from vllm.v1.core.sched.interface import SchedulerInterface

    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  # no other way to the callers
    while frame is not None:
        maker = frame.f_locals.get("self")
        if isinstance(maker, SchedulerInterface):
            return getattr(maker, "vllm_config", None) is vllm_config
        if isinstance(maker, KVConnectorBase) and maker is not connector:
            return False
        frame = frame.f_back
    return False


def why_never(vllm_config: Any, num_groups: int, *, is_own: bool) -> str | None:
    """Why no load of this engine can be part of a step, and what to do; None if some can.
    ``is_own``: what :func:`is_engines_own` says.
    """
    transfer = vllm_config.kv_transfer_config
    recomputes = getattr(transfer, "kv_load_failure_policy", "fail") == "recompute"
    is_async = bool(vllm_config.scheduler_config.async_scheduling)
    found = {
        f"vLLM cannot be told of a failed block in {num_groups} KV cache groups": num_groups > 1,
        "pipeline stages do not end a step together": (
            vllm_config.parallel_config.pipeline_parallel_size > 1
        ),
        "ranks that share the tokens of a block were never run so": (
            getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1) > 1
        ),
        "a draft model reads KV before its verdict": vllm_config.speculative_config is not None,
        "the engine's kv_load_failure_policy is not known here; MultiConnector tells none of its "
        "connectors": not is_own,
        # vLLM 0.26 to 0.33 schedule the tokens that were in flight once more, with no ids
        "with async scheduling vLLM cannot compute a failed load again; set "
        "kv_load_failure_policy to fail, or --no-async-scheduling": recomputes and is_async,
        # These runners keep the old number of computed tokens on the GPU
        "vLLM's V2 model runner cannot compute a failed load again; set kv_load_failure_policy to "
        "fail": recomputes and bool(getattr(vllm_config, "use_v2_model_runner", False)),
    }
    return why_not_heard() or next((why for why, is_so in found.items() if is_so), None)


@dataclass(slots=True)
class _Open:
    """A request whose load has no verdict yet. ``hidden``: blocks with names that were taken out of
    vLLM's table.
    """

    request: Any
    hidden: list[tuple[Any, Hashable]]


class UnprovenKV:
    """The loads of steps whose output is to come. ``pool``: vLLM's BlockPool; None without a prefix
    cache.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._open: dict[str, _Open] = {}

    @classmethod
    def of(cls, pool: Any) -> UnprovenKV | None:
        """None if the pool is not as we know it."""
        return cls(pool) if all(hasattr(pool, name) for name in _NEEDED) else None

    def begin(self, request: Any, tables: Tables, position: int) -> None:
        """Hide the blocks of a request from this position on. Called before any other request is
        looked at; the block that the step computes itself is among them.
        """
        opened = self._open[request.request_id] = _Open(request, [])
        if self._pool is None:
            return
        known = self._pool.cached_block_hash_to_block
        for block in (self._pool.blocks[i] for ids in tables for i in ids[position:] if i >= 0):
            names = [block.block_hash, *self._more_names(block)]
            opened.hidden += [
                (block, name)
                for name in names
                if name is not None and known.pop(name, block.block_id) is not None
            ]

    def drop_tokens_of_preempted(self) -> None:
        """Called after a step was scheduled: the token of a request that it has preempted is not
        to be told, whatever the verdict, because vLLM looks for failed blocks only among those
        that run.

        vLLM 0.26 needs it, and does so itself where it preempts all. Requests of 0.27 and later
        have no ``async_tokens_to_discard``: an engine that loads preempts none there that a step
        still computes, and where it preempts all it drops what is in flight (read in 0.32).
        """
        for opened in self._open.values():
            request = opened.request
            if status_name(request) == "PREEMPTED" and hasattr(request, "async_tokens_to_discard"):
                request.async_tokens_to_discard = request.num_output_placeholders
                request.num_output_placeholders = 0

    def end(self, request_id: str, *, is_valid: bool) -> None:
        """The verdict: blocks that are good can be found from now on, others have no names."""
        opened = self._open.pop(request_id, None)
        if opened is None or self._pool is None:
            return
        for block, name in opened.hidden:
            has_name = name == block.block_hash or name in self._more_names(block)
            if is_valid and has_name:
                self._pool.cached_block_hash_to_block.insert(name, block)
            elif not is_valid:
                self._more_names(block).discard(name)
                if name == block.block_hash:
                    block.reset_hash()
                self._pool._emit_block_removed_events([name])  # noqa: SLF001  # told when named

    def _more_names(self, block: Any) -> set[Hashable]:
        names: set[Hashable] = self._pool.cached_block_hashes_by_block.get(block.block_id, set())
        return names
