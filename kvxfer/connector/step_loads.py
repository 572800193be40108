"""Loads that are part of the step that orders them: which ones the scheduler side promises.

Such a request computes in this very step, with KV whose verdict is looked at before the step's
result leaves its rank. A load that fails then fails its request, or has it computed again. So one
is promised only where all that it needs is there: every rank has met the source, its wires are
direct, the boards show the offer with the request's own tokens, and the copies are short. Any other
load is asynchronous: its request waits, and others compute meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from kvxfer.connector.board import BoardView
from kvxfer.connector.records import NearSource, NearSources, SourceRef
from kvxfer.transfer.manifest import MemfdHandle

DISTRUST_S = 60.0
"""After a step has waited in vain, loads from that source are asynchronous for so long: the step
has held up every request of its engine.
"""


def predicted_s(near: Iterable[NearSource], num_tokens: int) -> float:
    """How long a load takes on the slowest of the ranks, which load side by side."""
    return max(each.latency_s + num_tokens * each.token_s for each in near)


class StepLoads:
    """What the ranks have said of their sources, and how much of a step is promised.

    Args:
        limit_s: of all loads of one step together, by prediction. 0: none is promised.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._near: dict[str, NearSources] = {}
        self._boards: dict[MemfdHandle, BoardView | None] = {}
        self._until_s: dict[bytes, float] = {}
        self._promised_s = 0.0

    def learn(self, near: Mapping[str, NearSources]) -> None:
        """Take the tables of the ranks whose sources have changed, and map their boards."""
        if not self._limit_s:
            return
        self._near.update(near)
        sources = [source for table in self._near.values() for source in table.values()]
        wanted = {handle for source in sources for handle in source.boards}
        for handle in self._boards.keys() - wanted:
            self._close(handle)
        for handle in wanted - self._boards.keys():
            self._boards[handle] = BoardView.open(handle)

    def time_s(
        self, source: SourceRef, num_tokens: int, ranks: Collection[str], now_s: float
    ) -> float | None:
        """How long these ranks will take for a load that may be promised now; else None."""
        life = source.offer.incarnation
        if self._near.keys() != set(ranks) or now_s < self._until_s.get(life, now_s):
            return None
        near = [table[life] for table in self._near.values() if life in table]
        if len(near) < len(ranks):
            return None
        time_s = predicted_s(near, num_tokens)
        if self._promised_s + time_s > self._limit_s:
            return None
        boards = {handle for each in near for handle in each.boards}
        return time_s if all(self._shows(handle, source) for handle in boards) else None

    def promise(self, time_s: float) -> None:
        """This much of the step is taken."""
        self._promised_s += time_s

    def begin_step(self) -> None:
        """Nothing of the next step is promised yet."""
        self._promised_s = 0.0

    def was_late(self, source: SourceRef, now_s: float) -> None:
        """A step has waited in vain for a load."""
        self._until_s = {life: s for life, s in self._until_s.items() if s > now_s}
        self._until_s[source.offer.incarnation] = now_s + DISTRUST_S

    def close(self) -> None:
        """Unmap the boards. Idempotent."""
        for handle in list(self._boards):
            self._close(handle)
        self._near = {}

    def _shows(self, handle: MemfdHandle, source: SourceRef) -> bool:
        board = self._boards.get(handle)
        posted = board.find(source.offer.nonce) if board is not None else None
        return posted is not None and posted.digest in (None, source.digest)

    def _close(self, handle: MemfdHandle) -> None:
        board = self._boards.pop(handle)
        if board is not None:
            board.close()
