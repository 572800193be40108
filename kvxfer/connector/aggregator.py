"""Merge the outputs of all ranks of an engine into the one record that its scheduler reads."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from kvxfer.bounded import Bounded
from kvxfer.connector.records import FoundOffer, KVConnectorOutput, NearSources

log = logging.getLogger("kvxfer.connector")

MOST_OPEN_IDS = 1 << 16
"""Ids that some ranks have reported and others have not, for each direction. An engine has far
fewer requests at a time: where there are more, the oldest are reports that nobody will complete.
About 20 MB."""


class RankOutput(Protocol):
    """What a rank returns from a step: any record with this attribute.

    ``kv_connector_output``: None, or any record with attributes of :class:`KVConnectorOutput`;
    a missing attribute counts as empty. ``failed_recving`` may be a set of request ids or map each
    to a reason. ``kv_connector_worker_meta``, if there, is merged by its ``aggregate``.
    """

    kv_connector_output: Any


_RankOutput = TypeVar("_RankOutput", bound=RankOutput)


class FinishedCounting(Protocol):
    """A connector, as far as the aggregator is concerned."""

    def get_finished_count(self) -> int | None:
        """How many reports complete a request; None: one per rank."""


@dataclass(slots=True)
class _Open:
    """A request that not every expected rank has reported.

    ``expected`` is 0 before the first report. ``reason`` is None without a failure, "" where the
    ranks state none; ``detail``: the failure in words.
    """

    reported: set[int] = field(default_factory=set)
    expected: int = 0
    reason: str | None = None
    detail: str = ""
    incomplete: set[tuple[int, int]] = field(default_factory=set)


class _Tally:
    """Which positions have reported which request ids, for one direction."""

    def __init__(self, direction: str) -> None:
        self.num_dropped = 0
        self._direction = direction
        self._open: Bounded[str, _Open] = Bounded(MOST_OPEN_IDS)
        self._completed: dict[str, _Open] = {}

    def at(self, request_id: str) -> _Open:
        one = self._open.get(request_id)
        if one is None:
            one = self._open[request_id] = _Open()
        return one

    def report(self, request_id: str, position: int, expected: int) -> None:
        one = None if request_id in self._completed else self.at(request_id)
        if one is None or position in one.reported:
            self._drop(request_id, position)
            return
        one.reported.add(position)
        one.expected = one.expected or expected
        if len(one.reported) >= one.expected:
            self._completed[request_id] = self._open.pop(request_id)

    def take_completed(self) -> dict[str, _Open]:
        completed, self._completed = self._completed, {}
        return completed

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
    cannot complete a request for another. vLLM counts reports without a look at which rank sent
    them. A failure on one rank, and the blocks that its load left incomplete, are held until all
    ranks have reported the request.

    **An id that comes again** completes again: a preempted request loads anew, and a client may
    use an id twice. A report is dropped as a duplicate in two cases. First, its rank has reported
    the request already and others have not: the request still lives, so no other has its id.
    Second, the request was completed in the same call of :meth:`aggregate`: the scheduler has not
    heard of it, so nobody can have used the id anew. Every other report belongs to the next
    request of that id. A rank that repeats itself in a later call than the one that completed the
    request looks the same as a new request. Ranks do not do that: a rank forgets a request when it
    reports it. If one did, its report would count for it once the id comes again, and is forgotten
    after 65,536 other ids that nobody completes.

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
        self._kept: list[tuple[int, object]] = []

    @classmethod
    def from_connector(cls, connector: FinishedCounting, world_size: int) -> KVOutputAggregator:
        """One report per rank, unless the connector says otherwise."""
        return cls(connector.get_finished_count() or world_size)

    @property
    def num_dropped(self) -> int:
        """Reports that were dropped as duplicates."""
        return self._sending.num_dropped + self._recving.num_dropped

    def aggregate(
        self, outputs: Sequence[_RankOutput | None], output_rank: int = 0
    ) -> _RankOutput | None:
        """Merge one round into ``outputs[output_rank]`` and return it; no other input is changed.

        The merged record is of the ranks' own class, made with those of its attributes that
        :class:`RankOutput` names; without a record of any rank it is a :class:`KVConnectorOutput`.
        When the output rank has no output this round, None is returned and the round is kept for
        the next call; vLLM forgets it. Raises IndexError for an output rank that is not there,
        TypeError for statistics or events of different types.
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
        self._note_failures(rounds)
        self._count(rounds)
        target.kv_connector_output = self._merged(rounds)
        return target

    def _note_failures(self, rounds: Sequence[tuple[int, object]]) -> None:
        """Before any report is counted: a rank's failure holds for a request that another rank's
        report completes in this round.
        """
        for _, output in rounds:
            details = getattr(output, "failure_details", None) or {}
            for request_id, reason in _failures(output).items():
                one = self._recving.at(request_id)
                if one.reason is None:
                    one.reason, one.detail = reason, details.get(request_id, "")
            for request_id, places in (getattr(output, "incomplete_blocks", None) or {}).items():
                self._recving.at(request_id).incomplete.update(places)

    def _count(self, rounds: Sequence[tuple[int, object]]) -> None:
        for position, output in rounds:
            expected = getattr(output, "expected_finished_count", None) or 0
            if expected > 0:
                self._expected = expected
            for request_id in getattr(output, "finished_sending", None) or ():
                self._sending.report(request_id, position, self._expected)
            for request_id in getattr(output, "finished_recving", None) or ():
                self._recving.report(request_id, position, self._expected)

    def _merged(self, rounds: Sequence[tuple[int, object]]) -> object:
        stats, worker_meta, events = None, None, None
        invalid: set[int] = set()
        near: dict[str, NearSources] = {}
        found: dict[str, FoundOffer] = {}
        for _, output in rounds:
            near |= getattr(output, "near", None) or {}
            found |= getattr(output, "found", None) or {}
            stats = _added("kv_connector_stats", stats, output)
            worker_meta = _added("kv_connector_worker_meta", worker_meta, output)
            events = _joined(events, getattr(output, "kv_cache_events", None))
            invalid |= getattr(output, "invalid_block_ids", None) or set()
        # Now that nothing is refused any more: who was taken is not reported again
        sent, received = self._sending.take_completed(), self._recving.take_completed()
        failed = {
            request_id: one.reason for request_id, one in received.items() if one.reason is not None
        }
        incomplete = {
            request_id: tuple(sorted(one.incomplete))
            for request_id, one in received.items()
            # Blocks of a failed load are given up as a whole.
            if one.incomplete and request_id not in failed
        }
        like: Any = rounds[0][1] if rounds else KVConnectorOutput()
        as_set = (
            isinstance(getattr(like, "failed_recving", None), AbstractSet) or "" in failed.values()
        )
        fields = {
            "finished_sending": set(sent) or None,
            "finished_recving": set(received) or None,
            "failed_recving": set(failed) if as_set else failed or None,
            "failure_details": {name: received[name].detail for name in failed} or None,
            "incomplete_blocks": incomplete or None,
            "kv_connector_stats": stats,
            "kv_connector_worker_meta": worker_meta,
            "kv_cache_events": events,
            "invalid_block_ids": invalid,
            "near": near or None,
            "found": found or None,
            "expected_finished_count": self._expected,
            "must_drain": any(getattr(output, "must_drain", False) for _, output in rounds),
        }
        return type(like)(**{name: each for name, each in fields.items() if hasattr(like, name)})


def _failures(output: object) -> Mapping[str, str]:
    """Failed request ids, each with its reason, "" where the record states none."""
    failed = getattr(output, "failed_recving", None) or {}
    return failed if isinstance(failed, Mapping) else dict.fromkeys(failed, "")


def _added(name: str, total: Any, output: object) -> Any:  # noqa: ANN401 - of any engine
    """By their own ``aggregate``, which may add in place."""
    new = getattr(output, name, None)
    if new is None or total is None:
        # A copy: never into a rank's own record.
        return copy.deepcopy(new) if total is None else total
    _check_same_type(name, total, new)
    return total.aggregate(new)


def _joined(total: Any, new: Any) -> Any:  # noqa: ANN401 - of any engine
    """Cache events, counted by how many ranks saw them."""
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
