"""Blocks of vLLM's pool that are kept whatever vLLM does with their request: one reference more to
each of them.

While vLLM itself keeps a finished request it steps without pause. A pin keeps the blocks alone, so
that vLLM can forget the request and sleep. A block that a window has left behind is kept likewise.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from kvxfer.integrations.vllm.views import Tables

NEEDED = ("blocks", "touch", "free_blocks")
"""What is used of vLLM's block pool: the list of its blocks by id, one reference more, one less."""

_log = logging.getLogger("kvxfer.integrations")


def pins_of(pool: Any) -> Pins | None:
    """Pins in vLLM's block pool; None, with a line in the log, if it is not as we know it."""
    missing = [name for name in NEEDED if not hasattr(pool, name)]
    if missing:
        _log.info(
            "vLLM's block pool: expected %s; without them the engine steps while it holds blocks, "
            "and offers no prompt whose window begins at the edge of a block",
            ", ".join(missing),
        )
        return None
    return Pins(pool)


class Pins:
    """The pinned blocks of an engine, by request. True while there are some.

    Args:
        pool: vLLM's BlockPool, of all KV cache groups together.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._tables: dict[str, Tables] = {}

    def __len__(self) -> int:
        return len(self._tables)

    def tables(self, request_id: str) -> Tables:
        """What :meth:`pin` was given for this request; nothing without a pin."""
        return self._tables.get(request_id, ())

    def pin(self, request_id: str, tables: Tables) -> None:
        """Keep these blocks, which somebody else holds now; -1 is none. Raises ValueError for a
        request that has a pin.
        """
        if request_id in self._tables:
            raise ValueError(f"request {request_id}: expected no pin, got a second one")
        self._pool.touch(self._blocks(tables))
        self._tables[request_id] = tables

    def unpin(self, request_ids: Iterable[str]) -> set[str]:
        """Give back what these requests have pinned: those of them that had a pin."""
        unpinned = {request_id for request_id in request_ids if request_id in self._tables}
        for request_id in unpinned:
            # The last first, as vLLM frees a request: a prefix is worth more than its end.
            self._pool.free_blocks(reversed(self._blocks(self._tables.pop(request_id))))
        return unpinned

    def unpin_all(self) -> None:
        """Give back everything."""
        self.unpin(list(self._tables))

    def _blocks(self, tables: Tables) -> list[Any]:
        blocks = self._pool.blocks
        return [blocks[block_id] for ids in tables for block_id in ids if block_id >= 0]
