"""Merge the outputs of all ranks of an engine into the one record that its scheduler reads."""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol, Self

from kvxfer.connector.records import KVConnectorOutput

log = logging.getLogger("kvxfer.connector")

REMEMBERED_IDS = 1 << 16
"""Completed ids that are remembered, so that a late report is dropped instead of starting a new
count. At 1,000 requests per second this is a minute, far longer than a rank can lag behind; about
10 MB."""


class RankOutput(Protocol):
    """What a rank returns from a step: any record with this attribute."""

    kv_connector_output: KVConnectorOutput | None


class FinishedCounting(Protocol):
    """A connector, as far as the aggregator is concerned."""

    def get_finished_count(self) -> int | None:
        """How many reports complete a request; None: one per rank."""


class _Tally:
    """Which positions have reported which request ids, for one direction."""

    def __init__(self, direction: str) -> None:
        self.num_dropped = 0
        self._direction = direction
        self._reported: dict[str, set[int]] = {}
        self._expected: dict[str, int] = {}
        self._completed: OrderedDict[str, None] = OrderedDict()

    def report(self, request_id: str, position: int, expected: int) -> bool:
        """Count one report; True when it completes the request."""
        reported = self._reported.setdefault(request_id, set())
        if request_id in self._completed or position in reported:
            if not reported:
                del self._reported[request_id]
            self._drop(request_id, position)
            return False
        reported.add(position)
        if len(reported) < self._expected.setdefault(request_id, expected):
            return False
        del self._reported[request_id], self._expected[request_id]
        self._completed[request_id] = None
        if len(self._completed) > REMEMBERED_IDS:
            self._completed.popitem(last=False)
        return True

    def is_completed(self, request_id: str) -> bool:
        """Completed, and not so long ago that it was forgotten."""
        return request_id in self._completed

    def _drop(self, request_id: str, position: int) -> None:
        if self.num_dropped == 0:
            log.warning(
                "request %s: rank %d reported finished_%s again; dropped, later ones too",
                *(request_id, position, self._direction),
            )
        self.num_dropped += 1


class KVOutputAggregator:
    """A request is finished when every expected rank has reported it.

    Reports count per (request id, position in ``outputs``), so that a rank that repeats itself
    cannot complete a request for another. A failure on one rank is held until all ranks have
    reported the request, and so are the blocks that a rank's load left incomplete.

    Args:
        expected_finished_count: reports that complete a request; an output's own
          ``expected_finished_count`` above zero
            replaces it for requests whose first report comes later.
    """

    def __init__(self, expected_finished_count: int) -> None:
        if expected_finished_count < 1:
            raise ValueError(
                f"expected_finished_count: expected at least 1, got {expected_finished_count}"
            )
        self._expected = expected_finished_count
        self._sending = _Tally("sending")
        self._recving = _Tally("recving")
        self._failed: dict[str, str] = {}
        self._incomplete: dict[str, set[tuple[int, int]]] = {}
        self._kept: list[tuple[int, KVConnectorOutput]] = []

    @classmethod
    def from_connector(cls, connector: FinishedCounting, world_size: int) -> KVOutputAggregator:
        """One report per rank, unless the connector says otherwise."""
        return cls(connector.get_finished_count() or world_size)

    @property
    def num_dropped(self) -> int:
        """Reports that were dropped: by a position that had reported, or after completion."""
        return self._sending.num_dropped + self._recving.num_dropped

    def aggregate(
        self, outputs: Sequence[RankOutput | None], output_rank: int = 0
    ) -> RankOutput | None:
        """Merge one round into ``outputs[output_rank]`` and return it; no other input is changed.

        When the output rank has no output this round, None is returned and the round is kept for
        the next call. Raises IndexError for an output rank that is not there, TypeError for
        statistics of different types.
        """
        target = outputs[output_rank]
        rounds = self._kept + [
            (position, output.kv_connector_output)
            for position, output in enumerate(outputs)
            if output is not None and output.kv_connector_output is not None
        ]
        if target is None:
            self._kept = rounds
            return None
        self._kept = []
        target.kv_connector_output = self._merge(rounds)
        return target

    def _merge(self, rounds: list[tuple[int, KVConnectorOutput]]) -> KVConnectorOutput:
        sent: set[str] = set()
        received: set[str] = set()
        stats: Any = None
        events: Any = None
        invalid: set[int] = set()
        for position, output in rounds:
            if output.expected_finished_count > 0:
                self._expected = output.expected_finished_count
            for request_id in output.finished_sending or ():
                if self._sending.report(request_id, position, self._expected):
                    sent.add(request_id)
            for request_id, reason in (output.failed_recving or {}).items():
                if not self._recving.is_completed(request_id):
                    self._failed.setdefault(request_id, reason)
            for request_id, places in (output.incomplete_blocks or {}).items():
                if not self._recving.is_completed(request_id):
                    self._incomplete.setdefault(request_id, set()).update(places)
            for request_id in output.finished_recving or ():
                if self._recving.report(request_id, position, self._expected):
                    received.add(request_id)
            stats = _added(stats, output.kv_connector_stats)
            events = _joined(events, output.kv_cache_events)
            invalid |= output.invalid_block_ids
        failed = {
            request_id: self._failed.pop(request_id)
            for request_id in received & self._failed.keys()
        }
        incomplete = {
            request_id: tuple(sorted(self._incomplete.pop(request_id)))
            for request_id in received & self._incomplete.keys()
        }
        return KVConnectorOutput(
            finished_sending=sent or None,
            finished_recving=received or None,
            failed_recving=failed or None,
            # Blocks of a failed load are given up as a whole.
            incomplete_blocks={i: p for i, p in incomplete.items() if i not in failed} or None,
            kv_connector_stats=stats,
            kv_cache_events=events,
            invalid_block_ids=invalid,
            expected_finished_count=self._expected,
        )


class Stats(Protocol):
    """Statistics of a rank; an engine's own kind may add in place."""

    def aggregate(self, other: Self) -> Self:
        """Both together."""


class Events(Protocol):
    """Cache events of a rank, counted by how many ranks saw them."""

    def get_all_events(self) -> list[object]:
        """All of them."""

    def add_events(self, events: list[object]) -> None:
        """Take another rank's."""

    def increment_workers(self, count: int) -> None:
        """So many more ranks are in."""


def _added(total: Stats | None, new: Stats | None) -> Stats | None:
    if new is None or total is None:
        # A copy, because aggregate may add in place: never into a rank's own record.
        return copy.deepcopy(new) if total is None else total
    _check_same_type("kv_connector_stats", total, new)
    return total.aggregate(new)


def _joined(total: Events | None, new: Events | None) -> Events | None:
    if new is None or total is None:
        return copy.deepcopy(new) if total is None else total
    _check_same_type("kv_cache_events", total, new)
    total.add_events(new.get_all_events())
    total.increment_workers(1)
    return total


def _check_same_type(name: str, total: object, new: object) -> None:
    if type(total) is not type(new):
        raise TypeError(
            f"{name}: expected {type(total).__name__} from every rank, got {type(new).__name__}"
        )
