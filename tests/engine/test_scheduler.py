"""The scheduler alone: who runs, which blocks are used, and that they come back. Counts by hand."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any

import pytest

from kvxfer.cache.hashing import get_hash_fn_by_name
from kvxfer.cache.kv_events import BlockRemoved, BlockStored
from kvxfer.config import Config
from kvxfer.connector.records import (
    FoundOffer,
    KVConnectorOutput,
    KVConnectorStats,
    LoadReport,
)
from kvxfer.engine.config import OnLoadFailure, Role
from kvxfer.engine.digest import KVDigest
from kvxfer.engine.request import Finished, NewToken, Request, Status
from kvxfer.engine.scheduler import Scheduler
from kvxfer.errors import ConfigError, OutOfBlocks
from kvxfer.transfer.wire import Reason
from tests.engine.scheduler_rig import EOS, Rig, cache, config


def finished(events: Sequence[NewToken | Finished]) -> list[str]:
    return [event.request.request_id for event in events if isinstance(event, Finished)]


def received(
    name: str, reason: Reason | None = None, report: LoadReport | None = None
) -> KVConnectorOutput:
    return KVConnectorOutput(
        finished_recving={name},
        failed_recving={name: reason.value} if reason else None,
        kv_connector_stats=KVConnectorStats(loads=(report,)) if report else None,
    )


# ---------------------------------------------------------------- alone


def test_prompt_then_one_token_a_step_then_blocks_come_back() -> None:
    rig = Rig(enable_prefix_caching=False)
    rig.add("a", range(10), max_new=3)
    step, events = rig.step()
    assert step.num_scheduled_tokens == {"a": 10}
    assert step.scheduled_new_reqs[0].block_ids == ((1, 2),)
    assert step.zero_block_ids == (1, 2)
    assert events == [NewToken("a", 1, 0.5)]
    assert rig.free == 8
    step, events = rig.step()
    assert step.num_scheduled_tokens == {"a": 1}
    assert step.scheduled_cached_reqs.new_token_ids == ((1,),)
    assert step.scheduled_cached_reqs.num_computed_tokens == (10,)
    step, events = rig.step()
    assert step.scheduled_cached_reqs.new_token_ids == ((2,),)  # each token is told once
    assert events[0] == NewToken("a", 3, 0.5)
    assert finished(events) == ["a"]
    assert rig.requests["a"].status is Status.FINISHED_LENGTH_CAPPED
    assert rig.free == 10
    assert rig.scheduler.has_work()  # the workers must hear of the end
    step, _ = rig.step()
    assert step.finished_req_ids == {"a"}
    assert step.num_scheduled_tokens == {}
    assert not rig.scheduler.has_work()


def test_end_of_sequence_ends_a_request() -> None:
    rig = Rig()
    rig.add("a", range(5), max_new=8)
    _, events = rig.step(token=EOS)
    assert finished(events) == ["a"]
    assert rig.requests["a"].status is Status.FINISHED_STOPPED
    assert rig.requests["a"].output_token_ids == [EOS]


def test_long_prompts_are_computed_in_pieces() -> None:
    rig = Rig(max_num_batched_tokens=12)
    rig.add("a", range(20), max_new=1)
    rig.add("b", range(30, 40), max_new=1)
    step, events = rig.step()
    assert step.num_scheduled_tokens == {"a": 12}
    assert events == []
    step, events = rig.step()
    assert step.num_scheduled_tokens == {"a": 8, "b": 4}
    assert finished(events) == ["a"]
    step, events = rig.step()
    assert step.num_scheduled_tokens == {"b": 6}
    assert finished(events) == ["b"]


def test_blocks_for_all_new_tokens_are_reserved_at_admission() -> None:
    rig = Rig()
    rig.add("a", range(8), max_new=57)  # 65 tokens: 9 blocks of the 10
    rig.add("b", range(20, 24), max_new=5)  # 9 tokens: 2 blocks
    rig.step()
    assert [rig.requests[name].status.name for name in "ab"] == ["RUNNING", "WAITING"]
    for _ in range(56):
        rig.step()
    assert rig.requests["a"].status is Status.FINISHED_LENGTH_CAPPED
    step, _ = rig.step()
    assert step.num_scheduled_tokens == {"b": 4}


def test_first_come_first_served() -> None:
    rig = Rig()
    rig.add("large", range(70), max_new=1)  # 9 blocks
    rig.add("larger", range(100, 172), max_new=1)  # 10 blocks
    rig.add("small", range(5), max_new=1)  # would fit beside the first
    step, _ = rig.step()
    assert list(step.num_scheduled_tokens) == ["large"]
    step, _ = rig.step()
    assert list(step.num_scheduled_tokens) == ["larger"]


def test_max_num_seqs() -> None:
    rig = Rig(max_num_seqs=2)
    for name in "abc":
        rig.add(name, range(4), max_new=2)
    step, _ = rig.step()
    assert list(step.num_scheduled_tokens) == ["a", "b"]
    rig.step()
    step, _ = rig.step()
    assert list(step.num_scheduled_tokens) == ["c"]


def test_what_can_never_fit_is_refused_with_both_numbers() -> None:
    rig = Rig(max_model_len=200)
    with pytest.raises(OutOfBlocks, match="81 tokens need 11 blocks of 8, the cache has 10"):
        rig.add("a", range(80), max_new=1)
    rig.add("b", range(79), max_new=1)
    with pytest.raises(OutOfBlocks, match="requests may have 20 tokens"):
        Rig(max_model_len=20).add("c", range(20), max_new=1)


def test_an_id_in_use_is_refused() -> None:
    rig = Rig()
    rig.add("a", range(4))
    with pytest.raises(ValueError, match="request a: expected a new id, got one in use"):
        rig.scheduler.add(Request("a", (1,), 1))


def test_prefix_hit_leaves_the_last_token_to_compute() -> None:
    rig = Rig()
    rig.add("a", range(24), max_new=1)
    rig.step()
    rig.add("b", range(24), max_new=1)  # fully cached: its last block is computed again
    step, _ = rig.step()
    assert step.num_scheduled_tokens == {"b": 8}
    assert rig.requests["b"].num_cached_tokens == 16
    assert step.scheduled_new_reqs[0].num_computed_tokens == 16
    assert step.scheduled_new_reqs[0].block_ids == ((1, 2, 4),)
    assert step.zero_block_ids == (4,)  # the hit is not zeroed
    rig.add("c", [*range(8), 50, 51], max_new=1)
    step, _ = rig.step()
    assert step.num_scheduled_tokens == {"c": 2}
    # a found nothing, b 16, c 8, of 24, 24 and 10 tokens
    assert rig.scheduler.prefix_hit_rate == 24 / 58


def test_generated_tokens_are_found_too() -> None:
    rig = Rig()
    rig.add("a", range(7), max_new=4)
    for _ in range(4):
        rig.step()
    # KV of 10 tokens is there (the last was never an input): one full block
    rig.add("b", [*range(7), 1, 2, 3], max_new=1)
    step, _ = rig.step()
    assert step.num_scheduled_tokens == {"b": 2}


def test_names_and_events_for_a_router() -> None:
    """The names are vLLM's, of ``PYTHONHASHSEED=0`` and blocks of 8."""
    rig = Rig(
        num_blocks=4,
        enable_kv_cache_events=True,
        prefix_caching_hash_algo="sha256",
        kv=Config(hash_seed="0"),
    )
    rig.add("a", range(17))
    rig.step()
    (event,) = rig.scheduler.take_events()
    assert isinstance(event, BlockStored)
    assert event.token_ids == list(range(16))
    function = get_hash_fn_by_name("sha256")
    first = function((function("0"), tuple(range(8)), None))
    second = function((first, tuple(range(8, 16)), None))
    names: list[bytes | int] = [int.from_bytes(name[-8:], "big") for name in (first, second)]
    assert event.block_hashes == names
    rig.add("b", range(50, 66))
    rig.step()
    events = rig.scheduler.take_events()
    # Three blocks: one without a name, then the end of the first prompt.
    assert events[0] == BlockRemoved(block_hashes=names[1:], medium="GPU", group_idx=0)
    assert [type(event) for event in events[1:]] == [BlockStored]
    assert rig.scheduler.take_events() == []


def test_no_events_unless_they_are_asked_for() -> None:
    rig = Rig()
    rig.add("a", range(17))
    rig.step()
    assert rig.scheduler.take_events() == []


def test_unknown_names_of_blocks() -> None:
    with pytest.raises(ConfigError, match="prefix_caching_hash_algo: hash function: expected sha"):
        config(prefix_caching_hash_algo="md5")


def test_no_hits_without_prefix_caching() -> None:
    rig = Rig(enable_prefix_caching=False)
    for name in "ab":
        rig.add(name, range(24), max_new=1)
        step, _ = rig.step()
        assert step.num_scheduled_tokens == {name: 24}
    assert rig.scheduler.prefix_hit_rate == 0.0


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_abort_gives_blocks_back_wherever_the_request_stands(num_steps: int) -> None:
    rig = Rig(max_num_batched_tokens=12)
    rig.add("a", range(20), max_new=5)
    for _ in range(num_steps):
        rig.step()
    events = rig.scheduler.abort("a")
    assert finished(events) == ["a"]
    assert rig.requests["a"].status is Status.FINISHED_ABORTED
    assert rig.free == 10
    assert rig.scheduler.abort("a") == []
    assert rig.scheduler.abort("never heard of") == []
    step, _ = rig.step()
    assert step.finished_req_ids == ({"a"} if num_steps else set())
    assert not rig.scheduler.has_work()


def test_a_storm_of_aborts() -> None:
    rig = Rig()
    for i in range(200):
        rig.add(f"r{i}", range(i % 30 + 1), max_new=3)
        if i % 3 == 0:
            rig.step()
        rig.scheduler.abort(f"r{i - i % 2}")
    for i in range(200):
        rig.scheduler.abort(f"r{i}")
    rig.step()
    assert rig.free == 10
    assert not rig.scheduler.has_work()


# ---------------------------------------------------------------- loads


def test_a_load_waits_then_computes_the_rest() -> None:
    rig = Rig(with_connector=True, role=Role.DECODE)
    rig.connector.offered_tokens["a"] = 19
    rig.add("a", range(20), max_new=2)
    step, _ = rig.step()
    assert step.num_scheduled_tokens == {}
    assert rig.connector.allocated == [("a", ((1, 2, 3),), 19)]
    assert rig.requests["a"].status is Status.WAITING_FOR_REMOTE_KVS
    assert step.zero_block_ids == ()  # all three are written by the load
    rig.step(received("a"))
    step, events = rig.step()
    assert step.num_scheduled_tokens == {"a": 1}
    assert step.scheduled_new_reqs[0].num_computed_tokens == 19
    assert events == [NewToken("a", 1, 0.5)]


def test_blocks_beyond_the_load_are_zeroed_when_they_are_taken() -> None:
    rig = Rig(with_connector=True, role=Role.DECODE)
    rig.connector.offered_tokens["a"] = 15
    rig.add("a", range(16), max_new=10)  # 26 tokens: 4 blocks, of which 2 are loaded
    rig.step()
    step, _ = rig.step(received("a"))
    assert step.zero_block_ids == ()
    step, _ = rig.step()  # token 15
    assert step.scheduled_new_reqs[0].block_ids == ((1, 2),)
    assert step.zero_block_ids == ()
    step, _ = rig.step()  # token 16
    assert step.scheduled_cached_reqs.new_block_ids == (((3,),),)
    assert step.zero_block_ids == (3,)
    step, _ = rig.step()
    assert step.scheduled_cached_reqs.new_block_ids == (None,)
    assert step.zero_block_ids == ()


def test_only_missing_tokens_are_loaded() -> None:
    rig = Rig(with_connector=True, role=Role.DECODE)
    rig.add("a", range(16), max_new=1)
    rig.step()
    rig.connector.offered_tokens["b"] = 23
    rig.add("b", range(24), max_new=1)
    rig.step()
    assert rig.connector.allocated[-1][2] == 7
    assert rig.requests["b"].num_cached_tokens == 16
    assert rig.requests["b"].num_external_tokens == 7


def test_loaded_blocks_are_found_only_after_the_load_was_accepted() -> None:
    rig = Rig(with_connector=True, role=Role.DECODE)
    rig.connector.offered_tokens["a"] = 16
    rig.add("a", range(17), max_new=1)
    rig.step()
    rig.add("early", range(17), max_new=1)
    step, _ = rig.step()
    assert step.num_scheduled_tokens == {"early": 17}
    rig.step(received("a"))
    rig.add("late", [*range(16), 5, 5], max_new=1)
    step, _ = rig.step()
    assert step.num_scheduled_tokens["late"] == 2


REPORT = LoadReport(request_id="a", reason=Reason.PEER_LOST, detail="no word for 3 s")


def test_a_failed_load_is_computed_by_policy() -> None:
    rig = Rig(with_connector=True, role=Role.DECODE)
    rig.connector.offered_tokens["a"] = 15
    rig.add("a", range(16), max_new=1)
    rig.step()
    _, events = rig.step(received("a", Reason.PEER_LOST, REPORT))
    assert events == []
    step, events = rig.step()
    assert step.num_scheduled_tokens == {"a": 16}
    (end,) = [event for event in events if isinstance(event, Finished)]
    assert end.request.failure == "peer_lost"
    assert end.request.reports == [REPORT]
    assert rig.free == 10


def test_a_failed_load_fails_its_request_by_policy() -> None:
    rig = Rig(with_connector=True, role=Role.DECODE, on_load_failure=OnLoadFailure.FAIL)
    rig.connector.offered_tokens["a"] = 15
    rig.add("a", range(16), max_new=1)
    rig.step()
    _, events = rig.step(received("a", Reason.PEER_LOST, REPORT))
    assert finished(events) == ["a"]
    assert rig.requests["a"].status is Status.FINISHED_ERROR
    assert rig.requests["a"].failure == "peer_lost"
    assert rig.free == 10
    assert rig.connector.finished == [("a", "FINISHED_ERROR")]


def rig_with_load_in_step(**changes: Any) -> Rig:  # noqa: ANN401
    rig = Rig(with_connector=True, role=Role.DECODE, **changes)
    rig.connector.in_step = True
    rig.connector.offered_tokens["a"] = 16
    rig.add("a", range(17), max_new=2)
    return rig


def test_a_load_of_the_step_is_computed_with_at_once() -> None:
    rig = rig_with_load_in_step()
    step, events = rig.step(received("a"))
    assert step.num_scheduled_tokens == {"a": 1}
    assert step.scheduled_new_reqs[0].num_computed_tokens == 16
    assert step.zero_block_ids == (3,)  # the load fills the two before
    assert events == [NewToken("a", 1, 0.5)]
    rig.connector.offered_tokens["b"] = 16
    rig.add("b", range(17), max_new=1)  # its last block has a new token: the others are found
    step, events = rig.step()
    assert step.num_scheduled_tokens == {"a": 1, "b": 1}
    assert finished(events) == ["a", "b"]
    assert rig.free == 10


def test_a_load_that_fails_its_step_fails_its_request_by_policy() -> None:
    rig = rig_with_load_in_step(on_load_failure=OnLoadFailure.FAIL)
    _, events = rig.step(received("a", Reason.ENDED))
    assert [type(event) for event in events] == [Finished]  # and no token
    assert finished(events) == ["a"]
    assert rig.requests["a"].status is Status.FINISHED_ERROR
    assert rig.free == 10
    rig.add("late", range(17), max_new=1)
    step, _ = rig.step()
    assert step.num_scheduled_tokens == {"late": 17}  # nothing of it was named
    assert step.finished_req_ids == {"a"}


def test_a_load_that_fails_its_step_is_computed_by_policy() -> None:
    rig = rig_with_load_in_step()
    _, events = rig.step(received("a", Reason.ENDED))
    assert events == []
    step, events = rig.step()
    assert step.num_scheduled_tokens == {"a": 17}
    assert [new.req_id for new in step.scheduled_new_reqs] == ["a"]  # the ranks learn it anew
    assert step.finished_req_ids == {"a"}
    assert events == [NewToken("a", 2, 0.5)]
    _, events = rig.step()
    assert finished(events) == ["a"]
    assert rig.requests["a"].failure == "ended"
    assert rig.free == 10


def test_an_aborted_load_keeps_its_blocks_until_it_is_reported() -> None:
    rig = Rig(with_connector=True, role=Role.DECODE)
    rig.connector.offered_tokens["a"] = 15
    rig.add("a", range(16), max_new=1)
    rig.step()
    assert finished(rig.scheduler.abort("a")) == ["a"]
    assert rig.free == 8  # the load may still write
    rig.step()
    assert rig.free == 8
    rig.step(received("a", Reason.CANCELLED))
    assert rig.free == 10
    rig.step(received("a"))  # a report for something that has gone changes nothing
    assert rig.free == 10


def test_a_blocked_queue_does_not_spin() -> None:
    rig = Rig(with_connector=True, role=Role.DECODE)
    rig.connector.offered_tokens["a"] = 70
    rig.add("a", range(71), max_new=1)
    rig.add("b", range(40), max_new=1)
    rig.step()
    assert not rig.scheduler.has_work()  # b waits for a, and a for its load: nothing to do
    rig.scheduler.abort("a")
    rig.step()
    assert not rig.scheduler.has_work()
    rig.step(received("a", Reason.CANCELLED))
    assert rig.scheduler.has_work()  # the blocks are back
    step, _ = rig.step()
    assert step.num_scheduled_tokens == {"b": 40}


def test_orders_of_the_connector_are_work() -> None:
    rig = Rig(with_connector=True, role=Role.DECODE)
    assert not rig.scheduler.has_work()
    rig.connector.has_more = True
    assert rig.scheduler.has_work()
    rig.step()
    assert not rig.scheduler.has_work()


# ---------------------------------------------------------------- offers


def test_an_offer_keeps_its_blocks_until_it_is_sent() -> None:
    rig = Rig(with_connector=True, role=Role.PREFILL)
    rig.connector.kept.add("a")
    rig.connector.params["a"] = {"x": 1}
    rig.add("a", range(16), max_new=1)
    _, events = rig.step()
    (end,) = [event for event in events if isinstance(event, Finished)]
    assert end.kv_transfer_params == {"x": 1}
    assert rig.free == 8
    with pytest.raises(ValueError, match="one in use"):
        rig.scheduler.add(Request("a", (1,), 1))
    rig.step(KVConnectorOutput(finished_sending={"a"}))
    assert rig.free == 10
    rig.step(KVConnectorOutput(finished_sending={"a"}))
    assert rig.free == 10


def test_an_abort_after_the_end_takes_the_offer_back() -> None:
    rig = Rig(with_connector=True, role=Role.PREFILL)
    rig.connector.kept.add("a")
    rig.connector.params["a"] = {"x": 1}
    rig.add("a", range(16), max_new=1)
    rig.add("b", range(20, 30), max_new=1)  # offers nothing
    rig.step()
    for name in ("a", "b", "never heard of"):
        assert rig.scheduler.abort(name) == []
    assert rig.connector.withdrawn == ["a"]
    assert rig.free == 8  # until the ranks have said that it is over
    rig.step(KVConnectorOutput(finished_sending={"a"}))
    assert rig.free == 10
    rig.scheduler.abort("a")
    assert rig.connector.withdrawn == ["a"]


def test_a_digested_offer_is_told_when_its_digest_is_there() -> None:
    rig = Rig(with_connector=True, role=Role.PREFILL, digests=True)
    rig.connector.kept.add("a")
    rig.connector.params["a"] = {"x": 1}
    rig.add("a", range(16), max_new=1)
    _, events = rig.step()
    assert finished(events) == []
    digest = KVDigest(num_tokens=16, planes=())
    step, events = rig.step(digests={"a": digest})
    assert [(order.req_id, order.num_tokens) for order in step.digests] == [("a", 16)]
    (end,) = [event for event in events if isinstance(event, Finished)]
    assert end.request.digests == (digest,)


def test_the_sink_digests_what_it_has_before_it_computes() -> None:
    rig = Rig(with_connector=True, role=Role.DECODE, digests=True)
    rig.connector.offered_tokens["a"] = 15
    rig.add("a", range(16), max_new=2)
    rig.step()
    rig.step(received("a"))
    digest = KVDigest(num_tokens=15, planes=())
    step, _ = rig.step(digests={"a": digest})
    assert [(order.req_id, order.num_tokens) for order in step.digests] == [("a", 15)]
    assert step.num_scheduled_tokens == {"a": 1}
    _, events = rig.step()
    (end,) = [event for event in events if isinstance(event, Finished)]
    assert end.request.digests == (digest,)


def test_block_names_follow_the_configured_seed() -> None:
    """sha256(parent | token ids, uint32 little-endian), from sha256(seed); two blocks of 8."""
    seeded = config(block_size=8, kv=Config(hash_seed="0"))
    scheduler = Scheduler(seeded, None, cache(seeded))
    request = Request("r", tuple(range(1, 20)), 1)
    scheduler.add(request)
    first = hashlib.sha256(hashlib.sha256(b"0").digest() + struct.pack("<8I", *range(1, 9)))
    second = hashlib.sha256(first.digest() + struct.pack("<8I", *range(9, 17)))
    assert request.block_hashes == [first.digest(), second.digest()]


def test_who_looks_for_an_offer_holds_nothing_and_lets_others_pass() -> None:
    rig = Rig(with_connector=True, role=Role.DECODE, max_num_seqs=1)
    rig.connector.finding = {"early"}
    early = rig.add("early", range(40))
    other = rig.add("other", range(100, 120))
    step, _ = rig.step()
    assert step.num_scheduled_tokens == {"other": 20}
    assert (early.status, other.status) == (Status.WAITING, Status.FINISHED_LENGTH_CAPPED)
    assert rig.free == 10
    rig.step()  # tells the ranks that the other one has ended
    assert not rig.scheduler.has_work()  # an idle engine does not ask for ever
    rig.connector.offered_tokens["early"] = 39
    rig.step(KVConnectorOutput(found={"early": FoundOffer(None)}))
    assert rig.scheduler.has_work()
    rig.step()
    assert early.status is Status.WAITING_FOR_REMOTE_KVS
    assert rig.free == 5


def test_a_load_that_was_found_again_counts_as_loaded() -> None:
    """A prefill that was preempted offers anew. The second load begins behind what is cached by
    then.
    """
    rig = Rig(with_connector=True, role=Role.DECODE)
    rig.connector.offered_tokens["early"] = 39
    early = rig.add("early", range(40))
    rig.step()
    lost = KVConnectorOutput(
        finished_recving={"early"}, failed_recving={"early": Reason.PREEMPTED.value}
    )
    rig.connector.finding = {"early"}
    rig.step(lost)
    assert (early.status, early.failure) == (Status.WAITING, "preempted")
    rig.add("other", range(16), max_new=1)  # two of its blocks are cached from now on
    rig.step()
    rig.connector.offered_tokens["early"] = 39
    rig.step(KVConnectorOutput(found={"early": FoundOffer(None)}))
    rig.step()
    assert (early.num_cached_tokens, early.num_external_tokens) == (16, 23)
    rig.step(KVConnectorOutput(finished_recving={"early"}))
    assert early.failure is None
    assert early.num_computed_tokens == 39
    step, _ = rig.step()
    assert step.num_scheduled_tokens == {"early": 1}
    assert early.status is Status.FINISHED_LENGTH_CAPPED
