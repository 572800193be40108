"""The scheduler over a group of layers that see everything (0) and one with a window (1): which
blocks travel, which are held, zeroed, named. Blocks of 8 tokens, windows of 17 (two blocks before
the next token). Expectations by hand.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.connector.records import KVConnectorOutput
from kvxfer.engine.config import Role
from kvxfer.engine.request import Finished, Status
from kvxfer.errors import OutOfBlocks
from tests.engine.scheduler_rig import BLOCK, Rig

WINDOW = 17


def make(role: Role = Role.DECODE, num_usable: int = 40, **changes: Any) -> Rig:
    changes = {"num_blocks": num_usable + 1, "max_model_len": 1000, **changes}
    return Rig(with_connector=True, windows=(None, WINDOW), role=role, **changes)


def received(name: str, **more: Any) -> KVConnectorOutput:
    return KVConnectorOutput(finished_recving={name}, **more)


def test_blocks_leave_the_window_while_a_request_runs() -> None:
    rig = make()
    rig.add("a", range(30), max_new=20)
    step, _ = rig.step()
    assert step.scheduled_new_reqs[0].block_ids == ((1, 2, 3, 4), (5, 6, 7, 8))
    assert step.zero_block_ids == (1, 2, 3, 4, 5, 6, 7, 8)
    assert rig.num_used == 8
    step, _ = rig.step()  # token 30 sees from 14 on: the first block is out
    assert step.scheduled_cached_reqs.new_block_ids == (None,)
    assert rig.num_used == 7
    rig.step()
    step, _ = rig.step()  # token 32 sees from 16 on, and needs new blocks
    assert step.scheduled_cached_reqs.new_block_ids == (((9,), (10,)),)
    assert step.zero_block_ids == (9, 10)
    assert rig.num_used == 8
    for _ in range(17):
        rig.step()
    assert rig.requests["a"].status is Status.FINISHED_LENGTH_CAPPED
    assert rig.num_used == 0


def test_a_load_gets_the_windows_blocks_only_and_none_is_zeroed() -> None:
    rig = make()
    rig.connector.offered_tokens["a"] = 45
    rig.add("a", range(46), max_new=4)
    step, _ = rig.step()
    # Token 45 sees from 29 on: the window's blocks begin with the fourth.
    assert rig.connector.handed["a"] == ((1, 2, 3, 4, 5, 6), (-1, -1, -1, 7, 8, 9))
    assert step.zero_block_ids == ()
    rig.step(received("a"))
    step, _ = rig.step()
    assert step.num_scheduled_tokens == {"a": 1}
    assert step.scheduled_new_reqs[0].block_ids == rig.connector.handed["a"]
    assert step.zero_block_ids == ()
    rig.step()
    rig.step()
    step, _ = rig.step()  # token 48
    assert step.scheduled_cached_reqs.new_block_ids == (((10,), (11,)),)
    assert step.zero_block_ids == (10, 11)


def test_a_load_after_a_prefix_hit_leaves_out_hit_blocks_behind_the_window() -> None:
    rig = make()
    rig.add("first", range(16))
    rig.step()
    rig.connector.offered_tokens["a"] = 45
    rig.add("a", [*range(16), *range(100, 130)])
    rig.step()
    full, window = rig.connector.handed["a"]
    assert full[:2] == (1, 2)
    assert window[:3] == (-1, -1, -1)
    assert -1 not in window[3:]
    assert rig.requests["a"].num_cached_tokens == 16
    assert rig.requests["a"].num_external_tokens == 29


def test_a_failed_load_starts_over_at_the_head_of_the_queue() -> None:
    rig = make(max_num_seqs=1)
    rig.connector.offered_tokens["a"] = 45
    rig.add("a", range(46), max_new=2)
    rig.step()
    rig.add("b", range(50, 60))
    rig.step(received("a", failed_recving={"a": "peer_lost"}))
    assert rig.num_used == 0
    assert rig.requests["a"].status.name == "WAITING"
    step, _ = rig.step()
    assert step.num_scheduled_tokens == {"a": 46}
    (new,) = step.scheduled_new_reqs
    assert new.num_computed_tokens == 0
    assert not any(-1 in table for table in new.block_ids)
    assert set(step.zero_block_ids) == {i for table in new.block_ids for i in table}
    assert (rig.requests["a"].failure, rig.requests["a"].num_external_tokens) == ("peer_lost", 45)
    rig.step()
    assert rig.requests["a"].status is Status.FINISHED_LENGTH_CAPPED
    assert rig.step()[0].num_scheduled_tokens == {"b": 10}


def test_nothing_of_a_failed_load_is_found() -> None:
    rig = make()
    rig.connector.offered_tokens["a"] = 45
    rig.add("a", range(46))
    rig.step()
    rig.step(received("a", failed_recving={"a": "peer_lost"}))
    rig.scheduler.abort("a")
    rig.add("b", range(46))
    assert rig.step()[0].num_scheduled_tokens == {"b": 46}


def test_a_failed_load_can_be_aborted_while_it_waits() -> None:
    rig = make()
    rig.connector.offered_tokens["a"] = 45
    rig.add("a", range(46))
    rig.step()
    rig.step(received("a", failed_recving={"a": "peer_lost"}))
    (end,) = rig.scheduler.abort("a")
    assert isinstance(end, Finished)
    assert rig.connector.ended["a"] == ()
    assert rig.step()[0].num_scheduled_tokens == {}


def test_loaded_blocks_are_found_but_those_filled_in_part() -> None:
    for incomplete, num_found in (None, 40), ({"a": ((1, 3),)}, 0):
        rig = make()
        rig.connector.offered_tokens["a"] = 45
        rig.add("a", range(46), max_new=9)
        rig.step()
        rig.step(received("a", incomplete_blocks=incomplete))
        for _ in range(9):
            rig.step()
        rig.add("b", range(41))  # 40 tokens end with blocks 3 and 4 of the window
        rig.step()
        assert rig.requests["b"].num_cached_tokens == num_found


def test_an_aborted_load_keeps_its_blocks_until_it_is_reported() -> None:
    rig = make()
    rig.connector.offered_tokens["a"] = 45
    rig.add("a", range(46), max_new=100)
    rig.step()
    handed = rig.connector.handed["a"]
    rig.scheduler.abort("a")
    assert rig.num_used == 9
    rig.add("b", range(200, 240))
    step, _ = rig.step()
    in_use = {i for table in handed for i in table}
    assert not in_use & {i for table in step.scheduled_new_reqs[0].block_ids for i in table}
    rig.step(received("a", failed_recving={"a": "cancelled"}))
    assert rig.num_used == 0


def test_an_offer_keeps_the_window_of_its_last_token_until_it_is_sent() -> None:
    rig = make(role=Role.PREFILL)
    rig.add("a", range(46), max_new=1, is_offered=True)
    step, _ = rig.step()
    # Offered are 46 tokens; a sink computes token 45, which sees from 29 on. Three blocks go.
    assert rig.num_used == 6 + 3
    assert step.scheduled_new_reqs[0].block_ids[1] == (7, 8, 9, 10, 11, 12)
    rig.add("b", range(300, 310))
    step, _ = rig.step()
    taken = {i for table in step.scheduled_new_reqs[0].block_ids for i in table}
    assert not taken & {1, 2, 3, 4, 5, 6, 10, 11, 12}
    assert rig.num_used == 9
    rig.step(KVConnectorOutput(finished_sending={"a"}))
    assert rig.num_used == 0


@pytest.mark.parametrize("num_tokens", range(40, 40 + BLOCK))
def test_an_offer_keeps_its_window_wherever_in_a_block_it_begins(num_tokens: int) -> None:
    """Also where the window of the next token begins with a block, and one block fewer is seen."""
    rig = make(role=Role.PREFILL)
    rig.add("a", range(num_tokens), max_new=1, is_offered=True)
    (full, window) = rig.step()[0].scheduled_new_reqs[0].block_ids
    first = (num_tokens - WINDOW) // BLOCK  # the last offered token sees WINDOW tokens
    assert rig.num_used == len(full) + len(window) - first
    rig.add("b", range(300, 400), max_new=1)
    taken = {i for table in rig.step()[0].scheduled_new_reqs[0].block_ids for i in table}
    assert not taken & {*full, *window[first:]}
    rig.step(KVConnectorOutput(finished_sending={"a"}))
    assert rig.num_used == 0


def test_an_offer_that_runs_on_keeps_its_window() -> None:
    rig = make(role=Role.BOTH)
    rig.add("a", range(46), max_new=40, is_offered=True)
    for _ in range(40):
        rig.step()
    assert rig.requests["a"].status is Status.FINISHED_LENGTH_CAPPED
    assert rig.connector.ended["a"][1][:3] == (-1, -1, -1)
    assert -1 not in rig.connector.ended["a"][1][3:]
    assert rig.num_used == 11 + 8


def test_an_offer_that_ends_early_gives_back_what_was_promised() -> None:
    rig = make(role=Role.BOTH, num_usable=34)
    rig.add("a", range(46), max_new=40, is_offered=True)  # 11 blocks, and as many
    rig.step()
    rig.add("b", range(200, 280), max_new=1)  # 11 and 11
    assert rig.step()[0].num_scheduled_tokens == {"a": 1}
    rig.scheduler.abort("a")
    assert rig.num_used == 9
    assert rig.step()[0].num_scheduled_tokens == {"b": 80}


@pytest.mark.parametrize("is_offered", [False, True])
def test_a_fully_cached_prompt_without_a_shorter_hit(is_offered: bool) -> None:
    """48 tokens are known, with the window at their end only: to compute the last of them, the
    window would have to begin earlier. What an offer has is loaded, else all is computed.
    """
    rig = make()
    rig.connector.offered_tokens["a"] = 48
    rig.add("a", range(49))
    rig.step()
    rig.step(received("a"))
    rig.step()
    rig.connector.offered_tokens = {"b": 47} if is_offered else {}
    rig.connector.asked.clear()
    rig.add("b", range(48))
    step, _ = rig.step()
    assert rig.connector.asked == [("b", 0)]
    assert rig.requests["b"].num_cached_tokens == 0
    assert step.num_scheduled_tokens == ({} if is_offered else {"b": 48})
    assert rig.requests["b"].num_external_tokens == (47 if is_offered else 0)


def test_a_fully_cached_prompt_computes_its_last_block() -> None:
    rig = make()
    rig.add("a", range(48))
    rig.step()
    rig.connector.offered_tokens["b"] = 47
    rig.add("b", range(48))
    assert rig.step()[0].num_scheduled_tokens == {"b": 8}
    assert ("b", 40) in rig.connector.asked  # an offer opens with the tokens of this hit
    assert rig.requests["b"].num_external_tokens == 0  # nothing is worth moving


def test_what_can_never_fit_is_refused_with_both_numbers() -> None:
    with pytest.raises(OutOfBlocks, match="81 tokens need 22 blocks of 8, the cache has 21"):
        make(num_usable=21).add("a", range(80))
    # In steps of 8 the window needs the two blocks before a step and the step's, which may begin
    # in the middle: four. A hold of the window before token 79 adds none.
    rig = make(Role.PREFILL, num_usable=15, max_num_batched_tokens=8)
    rig.add("a", range(80), is_offered=True)
    while rig.requests["a"].status is not Status.FINISHED_LENGTH_CAPPED:
        rig.step()
    assert rig.num_used == 10 + 3
