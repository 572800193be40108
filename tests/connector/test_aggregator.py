"""Reports of several ranks into one. Expectations are written out by hand."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvxfer.connector.aggregator import MOST_OPEN_IDS, KVOutputAggregator
from kvxfer.connector.records import KVConnectorOutput, KVConnectorStats


@dataclass
class Output:
    kv_connector_output: Any = None


def sent(*ids: str) -> Output:
    return Output(KVConnectorOutput(finished_sending=set(ids)))


def received(*ids: str, failed: dict[str, str] | None = None) -> Output:
    return Output(KVConnectorOutput(finished_recving=set(ids), failed_recving=failed))


def nothing() -> Output:
    return Output(KVConnectorOutput())


def merged(
    aggregator: KVOutputAggregator, *outputs: Output | None, output_rank: int = 0
) -> KVConnectorOutput:
    result: KVConnectorOutput = merged_any(aggregator, *outputs, output_rank=output_rank)
    return result


def merged_any(
    aggregator: KVOutputAggregator, *outputs: Output | None, output_rank: int = 0
) -> Any:  # noqa: ANN401 -- whatever class the ranks' records have
    target = outputs[output_rank]
    assert target is not None
    assert aggregator.aggregate(list(outputs), output_rank) is target
    assert target.kv_connector_output is not None
    return target.kv_connector_output


def test_a_request_is_done_when_every_rank_has_reported() -> None:
    aggregator = KVOutputAggregator(2)
    first = merged(aggregator, sent("a"), nothing())
    assert first.finished_sending is None
    second = merged(aggregator, nothing(), sent("a", "b"))
    assert second.finished_sending == {"a"}
    assert second.finished_recving is None
    assert merged(aggregator, sent("b"), nothing()).finished_sending == {"b"}


def test_sending_and_receiving_count_apart() -> None:
    aggregator = KVOutputAggregator(2)
    result = merged(aggregator, sent("a"), received("a"))
    assert (result.finished_sending, result.finished_recving) == (None, None)
    result = merged(aggregator, received("a"), sent("a"))
    assert (result.finished_sending, result.finished_recving) == ({"a"}, {"a"})


def test_a_rank_that_repeats_itself_does_not_stand_for_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    aggregator = KVOutputAggregator(2)
    with caplog.at_level(logging.WARNING, "kvxfer.connector"):
        for _ in range(3):
            assert merged(aggregator, sent("a"), nothing()).finished_sending is None
    assert aggregator.num_dropped == 2
    assert len(caplog.records) == 1
    assert merged(aggregator, nothing(), sent("a")).finished_sending == {"a"}


def test_an_id_that_comes_again_completes_again() -> None:
    aggregator = KVOutputAggregator(2)
    for _ in range(3):
        assert merged(aggregator, sent("a"), sent("a")).finished_sending == {"a"}
        assert merged(aggregator, received("a"), nothing()).finished_recving is None
        assert merged(aggregator, nothing(), received("a")).finished_recving == {"a"}
    assert aggregator.num_dropped == 0


def test_a_report_in_the_round_that_completed_the_request_is_dropped() -> None:
    """Of a third rank where two are expected, and of a rank that reports in a kept round too."""
    aggregator = KVOutputAggregator(2)
    result = merged(aggregator, sent("a"), sent("a"), sent("a"))
    assert (result.finished_sending, aggregator.num_dropped) == ({"a"}, 1)
    assert aggregator.aggregate([None, sent("b"), sent("b")]) is None
    result = merged(aggregator, nothing(), sent("b"), nothing())
    assert (result.finished_sending, aggregator.num_dropped) == ({"b"}, 2)
    for request_id in ("a", "b"):  # none of these counts for the next of its id
        assert merged(aggregator, sent(request_id), nothing()).finished_sending is None
        result = merged(aggregator, nothing(), sent(request_id))
        assert result.finished_sending == {request_id}


def test_the_failures_of_one_request_are_not_the_next_ones_of_its_id() -> None:
    aggregator = KVOutputAggregator(2)
    result = merged(aggregator, received("a", failed={"a": "x"}), received("a"))
    assert result.failed_recving == {"a": "x"}
    result = merged(aggregator, received("a"), received("a"))
    assert (result.finished_recving, result.failed_recving) == ({"a"}, None)


def test_a_failure_counts_in_the_round_that_completes_the_request() -> None:
    """Also of a rank behind those that complete it."""
    result = merged(KVOutputAggregator(1), received("a"), received("a", failed={"a": "x"}))
    assert (result.finished_recving, result.failed_recving) == ({"a"}, {"a": "x"})


def test_what_nobody_completes_is_forgotten_oldest_first() -> None:
    aggregator = KVOutputAggregator(2)
    for name in ("0", "1"):
        merged(aggregator, sent(name), nothing())
    later = set(map(str, range(2, MOST_OPEN_IDS + 2)))
    merged(aggregator, sent(*later), nothing())
    assert merged(aggregator, nothing(), sent(*later)).finished_sending == later
    for name in ("0", "1"):
        assert merged(aggregator, nothing(), sent(name)).finished_sending is None


@dataclass
class FieldOutput:
    """The field's record: failures are a set of ids, and there are no incomplete blocks."""

    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    kv_connector_stats: Any = None
    kv_cache_events: Any = None
    kv_connector_worker_meta: Any = None
    invalid_block_ids: set[int] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)
    expected_finished_count: int = 0


def of_field(**fields: Any) -> Output:
    return Output(FieldOutput(**fields))


def test_a_record_of_the_field() -> None:
    aggregator = KVOutputAggregator(2)
    result = merged_any(
        aggregator,
        of_field(
            finished_sending={"s"},
            finished_recving={"a", "b"},
            failed_recving={"early"},
            kv_connector_stats=OwnStats([1]),
            kv_connector_worker_meta=OwnStats([10]),
            kv_cache_events=Events(["stored 1"]),
            invalid_block_ids={1},
        ),
        of_field(
            finished_recving={"a", "b"},
            failed_recving={"b"},
            kv_connector_stats=OwnStats([2]),
            kv_connector_worker_meta=OwnStats([20]),
            kv_cache_events=Events(["stored 2"]),
            invalid_block_ids={2},
        ),
    )
    assert result == FieldOutput(
        finished_recving={"a", "b"},
        failed_recving={"b"},
        kv_connector_stats=OwnStats([1, 2]),
        kv_connector_worker_meta=OwnStats([10, 20]),
        kv_cache_events=Events(["stored 1", "stored 2"], num_workers=2),
        invalid_block_ids={1, 2},
        expected_finished_count=2,
    )
    both = [of_field(finished_recving={"early"}, finished_sending={"s"}) for _ in range(2)]
    result = merged_any(aggregator, *both)
    # A rank that fails before it reports the end fails the request.
    assert (result.failed_recving, result.finished_recving) == ({"early"}, {"early"})
    assert (result.finished_sending, aggregator.num_dropped) == ({"s"}, 1)


@dataclass
class OlderOutput:
    """A record of the field's first years."""

    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None


def test_a_record_without_most_attributes() -> None:
    aggregator = KVOutputAggregator(2)
    result = merged_any(
        aggregator, Output(OlderOutput({"a"}, None)), Output(OlderOutput({"a"}, {"b"}))
    )
    assert result == OlderOutput({"a"}, None)


def test_the_workers_change_the_expected_count_of_later_requests() -> None:
    """A rank that reports twice counts once, here and not in the field's own aggregator."""
    aggregator = KVOutputAggregator(4)
    assert merged(aggregator, of_field(finished_sending={"old"})).finished_sending is None
    result = merged_any(
        aggregator,
        of_field(finished_sending={"old"}, expected_finished_count=2),
        of_field(finished_recving={"new"}, expected_finished_count=2),
        of_field(finished_recving={"new"}),
    )
    assert (result.expected_finished_count, result.finished_recving) == (2, {"new"})
    assert result.failed_recving == set()
    last = [of_field(finished_sending={"old"}) for _ in range(4)]
    assert merged(aggregator, *last).finished_sending == {"old"}


def test_a_failure_waits_until_all_ranks_have_reported() -> None:
    aggregator = KVOutputAggregator(3)
    result = merged(aggregator, received("a", failed={"a": "peer_lost"}), received("a"), nothing())
    assert (result.finished_recving, result.failed_recving) == (None, None)
    result = merged(aggregator, nothing(), nothing(), received("a", failed={"a": "cancelled"}))
    assert result.finished_recving == {"a"}
    assert result.failed_recving == {"a": "peer_lost"}  # the first reason
    assert merged(aggregator, received("b"), received("b"), received("b")).failed_recving is None


def test_the_words_of_a_failure_are_those_of_the_rank_whose_reason_counts() -> None:
    def failing(reason: str, words: str | None) -> Output:
        details = None if words is None else {"a": words}
        output = KVConnectorOutput(
            finished_recving={"a"}, failed_recving={"a": reason}, failure_details=details
        )
        return Output(output)

    aggregator = KVOutputAggregator(2)
    result = merged(aggregator, nothing(), failing("peer_lost", "no word"))
    assert result.failure_details is None
    result = merged(aggregator, failing("cancelled", "given up"), nothing())
    assert result.failed_recving == {"a": "peer_lost"}
    assert result.failure_details == {"a": "no word"}
    without = KVOutputAggregator(2)
    result = merged(without, failing("peer_lost", None), failing("cancelled", "given up"))
    assert result.failure_details == {"a": ""}  # never another reason's


def test_a_round_without_the_output_rank_is_kept() -> None:
    aggregator = KVOutputAggregator(2)
    stats = KVConnectorStats(counts={"loads": 1})
    lost = Output(KVConnectorOutput(finished_sending={"a"}, kv_connector_stats=stats))
    assert aggregator.aggregate([None, lost]) is None
    result = merged(aggregator, sent("a"), nothing())
    assert result.finished_sending == {"a"}
    assert result.kv_connector_stats == stats


def test_another_output_rank_takes_the_result() -> None:
    aggregator = KVOutputAggregator(2)
    assert merged(aggregator, sent("a"), sent("a"), output_rank=1).finished_sending == {"a"}


def test_the_expected_count_of_an_output_holds_for_later_requests_only() -> None:
    aggregator = KVOutputAggregator(4)
    merged(aggregator, sent("old"), nothing(), nothing(), nothing())
    fewer = Output(KVConnectorOutput(expected_finished_count=2))
    merged(aggregator, fewer, nothing(), nothing(), nothing())
    result = merged(aggregator, sent("new"), sent("new", "old"), nothing(), nothing())
    assert result.finished_sending == {"new"}
    result = merged(aggregator, nothing(), nothing(), sent("old"), sent("old"))
    assert result.finished_sending == {"old"}


def test_inputs_are_left_alone() -> None:
    aggregator = KVOutputAggregator(2)
    outputs = [
        Output(
            KVConnectorOutput(
                finished_sending={"a"},
                kv_connector_stats=KVConnectorStats(counts={"loads": 1}, reasons={"ended": 2}),
                invalid_block_ids={1, 2},
            )
        )
        for _ in range(2)
    ]
    first = outputs[0].kv_connector_output
    before = copy.deepcopy([output.kv_connector_output for output in outputs])
    result = merged(aggregator, *outputs)
    assert result.kv_connector_stats == KVConnectorStats(counts={"loads": 2}, reasons={"ended": 4})
    assert result.invalid_block_ids == {1, 2}
    assert [first, outputs[1].kv_connector_output] == before


@dataclass
class Events:
    seen: list[object]
    num_workers: int = 1

    def get_all_events(self) -> list[object]:
        return self.seen

    def add_events(self, events: list[object]) -> None:
        self.seen = self.seen + events

    def increment_workers(self, count: int) -> None:
        self.num_workers += count


def test_events_are_joined_and_counted() -> None:
    events = [Events(["stored 1"]), Events(["stored 2"])]
    outputs = [Output(KVConnectorOutput(kv_cache_events=each)) for each in events]
    result = merged(KVOutputAggregator(2), *outputs)
    assert result.kv_cache_events == Events(["stored 1", "stored 2"], num_workers=2)
    assert events == [Events(["stored 1"]), Events(["stored 2"])]


@dataclass
class OwnStats:
    """An engine's statistics that add in place."""

    counts: list[int] = field(default_factory=list)

    def aggregate(self, other: OwnStats) -> OwnStats:
        self.counts += other.counts
        return self


def test_statistics_that_add_in_place_do_not_change_a_rank() -> None:
    stats = [OwnStats([1]), OwnStats([2]), OwnStats([3])]
    outputs = [Output(KVConnectorOutput(kv_connector_stats=each)) for each in stats]  # type: ignore[arg-type]
    result = merged(KVOutputAggregator(3), *outputs)
    assert repr(result.kv_connector_stats) == "OwnStats(counts=[1, 2, 3])"
    assert stats == [OwnStats([1]), OwnStats([2]), OwnStats([3])]


def test_statistics_of_different_types_are_refused_and_nothing_else_is_lost() -> None:
    outputs = [received("r"), received("r")]
    outputs[0].kv_connector_output.kv_connector_stats = KVConnectorStats()
    outputs[1].kv_connector_output.kv_connector_stats = OwnStats()
    aggregator = KVOutputAggregator(2)
    with pytest.raises(TypeError, match="expected KVConnectorStats from every rank, got OwnStats"):
        aggregator.aggregate(outputs)
    assert merged(aggregator, nothing(), nothing()).finished_recving == {"r"}


@dataclass
class Connector:
    count: int | None

    def get_finished_count(self) -> int | None:
        return self.count


@pytest.mark.parametrize(("count", "expected"), [(None, 3), (0, 3), (2, 2)])
def test_from_connector(count: int | None, expected: int) -> None:
    aggregator = KVOutputAggregator.from_connector(Connector(count), world_size=3)
    outputs = [sent("a") if rank < expected else nothing() for rank in range(3)]
    assert merged(aggregator, *outputs).finished_sending == {"a"}
    outputs = [sent("b") if rank < expected - 1 else nothing() for rank in range(3)]
    assert merged(aggregator, *outputs).finished_sending is None


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="expected at least 1, got 0"):
        KVOutputAggregator(0)
    with pytest.raises(IndexError):
        KVOutputAggregator(2).aggregate([nothing(), nothing()], output_rank=2)


def incomplete(places: dict[str, tuple[tuple[int, int], ...]], *received_ids: str) -> Output:
    return Output(
        KVConnectorOutput(finished_recving=set(received_ids) or None, incomplete_blocks=places)
    )


def test_incomplete_blocks_of_all_ranks_come_with_the_end_of_the_load() -> None:
    aggregator = KVOutputAggregator(2)
    first = merged(aggregator, incomplete({"a": ((0, 3), (2, 1)), "b": ((0, 1),)}, "a"), nothing())
    assert (first.finished_recving, first.incomplete_blocks) == (None, None)
    second = merged(aggregator, received("b"), incomplete({"a": ((0, 3), (0, 2))}, "a"))
    assert second.finished_recving == {"a"}
    assert second.incomplete_blocks == {"a": ((0, 2), (0, 3), (2, 1))}
    third = merged(aggregator, nothing(), received("b"))
    assert (third.finished_recving, third.incomplete_blocks) == ({"b"}, {"b": ((0, 1),)})


def test_incomplete_blocks_of_a_failed_or_ended_load_are_nobodys() -> None:
    aggregator = KVOutputAggregator(2)
    result = merged(aggregator, incomplete({"a": ((0, 3),)}, "a"), received("a", failed={"a": "x"}))
    assert (result.failed_recving, result.incomplete_blocks) == ({"a": "x"}, None)
    result = merged(aggregator, received("a", "b"), received("a", "b"))
    assert (result.finished_recving, result.incomplete_blocks) == ({"a", "b"}, None)
