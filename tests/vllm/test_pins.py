"""What is held for long is pinned and its request let go, with vLLM's own scheduler and pool."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.integrations.vllm.views import Pins, pins_of
from kvxfer.transfer.wire import Reason
from tests.vllm.scheduler_rig import BLOCK, OFFERED, Engine, Rig, Status
from tests.vllm.test_reports import OURS, prompt

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM loads parts of torch that other parts call deprecated
    from kvxfer.integrations.vllm.compat import KvxferWorkerMetadata, counts_no_references
    from kvxfer.integrations.vllm.scheduler import ASLEEP_S, PIN_AFTER_S

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

MakeRig = Callable[..., Rig]
MakeEngine = Callable[..., Engine]
SOON_S = 0.001
NUM_BLOCKS_OF_40 = 3

# ---------------------------------------------------------------- the bookkeeping


@dataclass(slots=True)
class Block:
    block_id: int
    ref_cnt: int = 1


@dataclass(slots=True)
class Pool:
    """As much of vLLM's as is used."""

    blocks: list[Block] = field(default_factory=lambda: [Block(number) for number in range(10)])
    freed: list[int] = field(default_factory=list)

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        for block in ordered_blocks:
            block.ref_cnt -= 1
            self.freed.append(block.block_id)

    def counts(self) -> list[int]:
        return [block.ref_cnt for block in self.blocks]


def test_every_block_of_every_group_has_one_reference_more() -> None:
    pool = Pool()
    pins = Pins(pool)
    pins.pin("a", ((3, 4), (-1, 7)))
    pins.pin("b", ((4,), ()))
    assert pool.counts() == [1, 1, 1, 2, 3, 1, 1, 2, 1, 1]
    assert len(pins) == 2
    assert pins.unpin({"a", "other"}) == {"a"}
    assert pool.freed == [7, 4, 3]
    assert pool.counts() == [1, 1, 1, 1, 2, 1, 1, 1, 1, 1]
    assert pins.unpin({"a"}) == set()
    pins.unpin_all()
    assert pool.counts() == [1] * 10
    assert not pins


def test_a_request_is_pinned_once() -> None:
    pins = Pins(Pool())
    pins.pin("a", ((1,),))
    with pytest.raises(ValueError, match="request a: expected no pin"):
        pins.pin("a", ((2,),))


@pytest.mark.parametrize("name", ["blocks", "touch", "free_blocks"])
def test_a_pool_that_lacks_something_is_left_alone(name: str) -> None:
    parts = {"blocks": [], "touch": print, "free_blocks": print}
    assert pins_of(SimpleNamespace(**parts)) is not None
    del parts[name]
    assert pins_of(SimpleNamespace(**parts)) is None


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, True), ({"disable_cascade_attn": True}, True), ({"disable_cascade_attn": False}, False)],
)
def test_counts_that_mean_more_are_left_alone(settings: dict[str, bool], expected: bool) -> None:
    config = SimpleNamespace(model_config=SimpleNamespace(**settings))
    assert counts_no_references(config) is expected


# ---------------------------------------------------------------- steps by hand


@dataclass(slots=True)
class Clock:
    """Stands still until it is told."""

    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(frozen=True, slots=True)
class Source:
    """An engine that offers, and its clock."""

    rig: Rig
    clock: Clock

    @property
    def side(self) -> Any:
        return self.rig.connector.scheduler_side

    def hold(self, request_id: str = "p", num_tokens: int = 40, seed: int = 0) -> None:
        """A request that has ended, and whose blocks are kept."""
        self.rig.request(request_id, prompt(num_tokens, seed), OFFERED, max_tokens=1)
        self.rig.step()
        assert self.rig.params_of(request_id) is not None
        assert self.rig.step().delayed == (request_id,)
        assert request_id in self.rig.scheduler.requests

    def pin(self, **request: Any) -> None:
        """The same, for longer than a step likes to wait."""
        self.hold(**request)
        self.clock.now_s += PIN_AFTER_S + SOON_S
        self.rig.step()
        assert not self.rig.scheduler.requests

    def sleep(self) -> None:
        """vLLM waits for something to do."""
        assert not self.rig.scheduler.has_requests()
        self.clock.now_s += 10.0


def source_of(rig: Rig) -> Source:
    clock = Clock()
    rig.set_clock(clock)
    return Source(rig, clock)


@pytest.fixture
def make_rig(tmp_path: Path) -> MakeRig:
    return lambda **settings: Rig(tmp_path, **settings)


@pytest.fixture
def source(make_rig: MakeRig) -> Source:
    return source_of(make_rig())


def test_a_long_hold_needs_no_steps(source: Source) -> None:
    rig = source.rig
    source.hold()
    rig.step()
    assert rig.scheduler.has_requests()  # a short one does
    source.clock.now_s += PIN_AFTER_S + SOON_S
    rig.step()
    assert not rig.scheduler.requests
    assert not rig.scheduler.has_requests()
    assert rig.free_blocks() == rig.num_free - NUM_BLOCKS_OF_40
    assert rig.stats["offers_pinned"] == {"": 1}
    source.sleep()
    assert rig.scheduler.has_requests()  # somebody woke it, and asks
    rig.step(sent=["p"])
    assert rig.is_quiet()


def test_a_short_hold_is_vllms_own(source: Source) -> None:
    rig = source.rig
    source.hold()
    source.clock.now_s += PIN_AFTER_S - SOON_S
    rig.step()
    assert "p" in rig.scheduler.requests
    source.clock.now_s += 2 * SOON_S
    rig.step(sent=["p"])  # in the step that would pin it
    assert rig.is_quiet()
    assert "offers_pinned" not in rig.stats


def test_an_engine_that_computes_pins_nothing(source: Source) -> None:
    rig = source.rig
    source.hold()
    rig.request("busy", prompt(20, seed=1), max_tokens=3)
    source.clock.now_s += 1.0
    for _ in range(3):
        rig.step()
        assert "p" in rig.scheduler.requests
    assert "busy" not in rig.scheduler.requests
    rig.step()
    assert not rig.scheduler.requests


def test_the_worker_is_asked_to_answer(source: Source) -> None:
    source.hold()
    asked = []
    for _ in range(3):
        source.rig.schedule()
        asked.append(source.rig.in_flight[-1].kv_connector_metadata.wants_answer)
        source.rig.finish()
        source.clock.now_s += PIN_AFTER_S + SOON_S
    assert asked == [False, True, False]


def test_several_come_back_as_they_are_reported(source: Source) -> None:
    rig = source.rig
    for number in range(3):
        source.hold(f"p{number}", num_tokens=40, seed=number)
    source.clock.now_s += PIN_AFTER_S + SOON_S
    rig.step(sent=["p1"])
    assert rig.free_blocks() == rig.num_free - 2 * NUM_BLOCKS_OF_40
    source.sleep()
    rig.step(sent=["p2"])
    assert rig.free_blocks() == rig.num_free - NUM_BLOCKS_OF_40
    rig.step(sent=["p0"])
    assert rig.is_quiet()


def test_a_request_that_finds_no_block_waits_for_pins(make_rig: MakeRig) -> None:
    """It keeps the engine stepping, and the step brings the workers' report."""
    source = source_of(make_rig(num_blocks=9))  # one of them is vLLM's null block
    rig = source.rig
    source.pin(num_tokens=80)
    source.sleep()
    request = rig.request("big", prompt(60, seed=1), max_tokens=1)
    for _ in range(5):
        assert rig.scheduler.has_requests()
        rig.step()
        assert request.status == Status.WAITING
    rig.step(sent=["p"])
    rig.step()
    assert request.status == Status.FINISHED_LENGTH_CAPPED
    rig.step()
    assert rig.is_quiet()


def test_the_name_of_a_pinned_block_is_hit(source: Source) -> None:
    rig = source.rig
    source.pin()
    rig.request("again", prompt(40), max_tokens=3)
    rig.schedule()
    (new,) = rig.in_flight[-1].scheduled_new_reqs
    assert new.num_computed_tokens == 2 * BLOCK
    rig.finish()
    rig.step(sent=["p"])  # while it runs
    assert rig.free_blocks() == rig.num_free - NUM_BLOCKS_OF_40
    rig.step()
    rig.step()
    assert rig.is_quiet()


def test_a_hit_ends_before_the_pin(source: Source) -> None:
    rig = source.rig
    source.pin()
    rig.request("again", prompt(40), max_tokens=1)
    rig.step()
    rig.step()
    assert rig.free_blocks() == rig.num_free - NUM_BLOCKS_OF_40
    source.sleep()
    rig.step(sent=["p"])
    assert rig.is_quiet()


def test_groups_that_dropped_blocks(make_rig: MakeRig) -> None:
    source = source_of(make_rig(window=32))
    rig = source.rig
    source.hold(num_tokens=128)
    num_held = rig.num_free - rig.free_blocks()
    assert num_held < 2 * 8  # the second group has null blocks
    source.clock.now_s += PIN_AFTER_S + SOON_S
    rig.step()
    assert rig.num_free - rig.free_blocks() == num_held
    source.sleep()
    rig.step(sent=["p"])
    assert rig.is_quiet()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_report_that_was_on_its_way(make_rig: MakeRig, is_async: bool) -> None:
    """Two steps in flight: the first pins, the second says that it is over."""
    source = source_of(make_rig(is_async=is_async))
    rig = source.rig
    source.hold()
    source.clock.now_s += PIN_AFTER_S + SOON_S
    rig.schedule()
    rig.schedule()
    rig.finish()
    assert not rig.scheduler.requests
    rig.finish(sent=["p"])
    assert rig.is_quiet()


# ---------------------------------------------------------------- what may come meanwhile


def test_abort_of_a_pinned_request(source: Source) -> None:
    rig = source.rig
    source.pin()
    rig.abort("p")
    source.sleep()
    orders = rig.step()
    assert (orders.ended, orders.delayed) == ((), ())  # it had ended: the offer stands
    assert rig.free_blocks() == rig.num_free - NUM_BLOCKS_OF_40
    rig.step(sent=["p"])
    assert rig.is_quiet()


def test_its_id_comes_again(source: Source) -> None:
    """What the ranks report would be of either: the new one offers nothing, and is not freed."""
    rig = source.rig
    source.pin()
    request = rig.request("p", prompt(100, seed=3), OFFERED, max_tokens=4)
    orders = rig.step()
    assert (orders.offers, orders.blocks, orders.computed) == ((), (), ())
    rig.step(sent=["p"])
    assert request.status == Status.RUNNING
    for _ in range(3):
        orders = rig.step()
        assert orders.delayed == ()
    assert request.status == Status.FINISHED_LENGTH_CAPPED
    assert rig.outputs[-1].kv_transfer_params is None
    assert rig.is_quiet()
    assert rig.stats["requests_plain"] == {"id_in_use": 1}
    rig.outputs.clear()
    source.hold(seed=4)  # now it is free again
    rig.step(sent=["p"])
    assert rig.is_quiet()


def test_its_id_comes_again_and_ends_first(source: Source) -> None:
    rig = source.rig
    source.pin()
    rig.request("p", prompt(20, seed=3), OFFERED, max_tokens=1)
    rig.step()
    rig.step()
    assert not rig.scheduler.requests
    assert rig.free_blocks() == rig.num_free - NUM_BLOCKS_OF_40
    source.sleep()
    rig.step(sent=["p"])
    assert rig.is_quiet()


def test_reset(source: Source) -> None:
    rig = source.rig
    source.pin()
    source.sleep()
    assert not rig.scheduler.reset_prefix_cache(reset_connector=True)
    orders = rig.step()
    assert [(end.request_id, end.reason) for end in orders.ended] == [("p", Reason.RESET)]
    rig.step(sent=["p"])
    assert rig.is_quiet()
    assert rig.scheduler.reset_prefix_cache(reset_connector=True)


def test_an_engine_that_is_woken_waits_for_its_pins(source: Source) -> None:
    """vLLM pauses, and ends, when it has no work."""
    rig = source.rig
    source.pin()
    source.clock.now_s += ASLEEP_S - SOON_S
    assert not rig.scheduler.has_requests()
    source.sleep()
    for _ in range(5):
        assert rig.scheduler.has_requests()
        rig.step()
    rig.step(sent=["p"])
    assert rig.is_quiet()


def test_a_request_lets_it_sleep_again(source: Source) -> None:
    rig = source.rig
    source.pin()
    source.sleep()
    rig.request("plain", prompt(20, seed=1), max_tokens=1)
    rig.step()
    rig.step()
    assert not rig.scheduler.has_requests()
    assert rig.free_blocks() == rig.num_free - NUM_BLOCKS_OF_40


def test_a_step_may_take_long(source: Source) -> None:
    """As long as a sleep; the engine was awake all the time."""
    rig = source.rig
    source.pin()
    rig.request("plain", prompt(20, seed=1), max_tokens=1)
    rig.schedule()
    source.clock.now_s += 1.0
    rig.finish()
    rig.step()
    assert not rig.scheduler.has_requests()


def test_without_a_pool_vllm_keeps_the_request(source: Source) -> None:
    rig = source.rig
    source.side.bind_block_pool(object())
    source.hold()
    for _ in range(3):
        source.clock.now_s += 1.0
        rig.step()
        assert "p" in rig.scheduler.requests
    rig.step(sent=["p"])
    assert rig.is_quiet()


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("is_first", [False, True])
def test_beside_another_connector(make_rig: MakeRig, is_first: bool, keeps: bool) -> None:
    """Where the other one keeps the request too, MultiConnector's workers report it once, when
    both are done with it.
    """
    other = {
        "kv_connector": "OtherConnector",
        "kv_connector_module_path": "tests.vllm.other_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"num_tokens": 0, "keeps": keeps},
    }
    source = source_of(make_rig(connectors=[OURS, other] if is_first else [other, OURS]))
    rig = source.rig
    source.pin()
    assert not rig.scheduler.has_requests()
    assert rig.free_blocks() == rig.num_free - NUM_BLOCKS_OF_40
    source.sleep()
    rig.step(sent=["p"])
    assert rig.is_quiet()


# ---------------------------------------------------------------- with a real worker side


def prefill_and_pin(source: Engine, tokens: Sequence[int]) -> tuple[dict[str, Any], list[int]]:
    """The params of a prompt whose blocks are pinned, and the blocks."""
    source.request("p", tokens, OFFERED, max_tokens=1)
    source.run()
    (block_ids,) = source.scheduler.kv_cache_manager.get_block_ids("p")
    source.run_until(lambda: not source.scheduler.requests)
    assert source.reports_of("finished_sending", "p") == 0
    params = source.params_of("p")
    assert params is not None
    return params, list(block_ids)


def test_the_worker_answers_where_vllm_would_not_ask(make_engine: MakeEngine) -> None:
    source = make_engine()
    prefill_and_pin(source, prompt(100))
    *before, answer = source.reported
    assert before[-1].is_empty()
    assert not answer.is_empty()
    assert answer.kv_connector_worker_meta == KvxferWorkerMetadata({})


def test_pinned_blocks_are_read(make_engine: MakeEngine) -> None:
    source, sink = make_engine(role="kv_producer"), make_engine(role="kv_consumer", fill=0xEE)
    tokens = prompt(100)
    params, theirs = prefill_and_pin(source, tokens)
    num_steps = len(source.reported)
    assert source.num_free - source.free_blocks() == len(theirs) == 7
    request = sink.request("d", tokens, params)
    sink.run_until(lambda: request.status == Status.RUNNING)
    (ours,) = sink.scheduler.kv_cache_manager.get_block_ids("d")
    for position in range(6):
        assert sink.block(0, ours[position]) == source.block(0, theirs[position])
    assert len(source.reported) == num_steps  # it has slept all the time
    source.run_until(source.is_quiet)
    sink.run_until(sink.is_quiet)
    assert source.reports_of("finished_sending", "p") == 1


def test_the_lease_of_a_pinned_request_ends(make_engine: MakeEngine) -> None:
    """The workers end it while the engine sleeps."""
    source = make_engine(lease_s=0.5, keep_s=0.2)
    prefill_and_pin(source, prompt(100))
    time.sleep(0.6)
    assert source.free_blocks() == source.num_free - 7
    source.run_until(source.is_quiet)
    assert source.reports_of("finished_sending", "p") == 1
    assert source.stats["offers_broken"] == {"expired": 1}
