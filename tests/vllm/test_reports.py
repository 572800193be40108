"""What is reported when, row by row, with vLLM's own scheduler."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvxfer.connector.params import early_params, mint_request
from kvxfer.connector.records import NO_ORDERS
from kvxfer.errors import ConfigError
from kvxfer.transfer.wire import Reason
from tests.vllm.scheduler_rig import BLOCK, OFFERED, Rig, Status, offered_by

# vLLM loads parts of torch that other parts of torch call deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

NONCE = b"n" * 16
MakeRig = Callable[..., Rig]


@pytest.fixture
def make_rig(tmp_path: Path) -> MakeRig:
    """Schedulers with our connector."""

    def make(**settings: Any) -> Rig:
        return Rig(tmp_path, **settings)

    return make


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return [(seed * 31 + 7 * position) % 1000 for position in range(num_tokens)]


def handed(rig: Rig, num_tokens: int = 40, **request: Any) -> Any:
    """A request whose load went to the workers in the last step."""
    found = rig.request("d", prompt(num_tokens), offered_by(NONCE, num_tokens), **request)
    orders = rig.step()
    (load,) = orders.loads
    assert (load.request_id, load.token_lo, load.token_hi) == ("d", 0, num_tokens - 1)
    assert [hold.request_id for hold in orders.holds] == ["d"]
    assert found.status == Status.WAITING_FOR_REMOTE_KVS
    return found


def test_a_load_has_the_trace_of_its_request(make_rig: MakeRig) -> None:
    rig = make_rig()
    for request_id, headers in (("d", {"traceparent": "00-1-2-01", "cookie": "x"}), ("e", None)):
        prompt_ids = prompt(40, seed=ord(request_id))
        nonce = request_id.encode() * 16
        rig.request(request_id, prompt_ids, offered_by(nonce, 40), trace_headers=headers)
        (load,) = rig.step().loads
        assert load.trace == ((("traceparent", "00-1-2-01"),) if headers else ())


def is_not_asked_again(rig: Rig, request: Any) -> bool:
    """Neither now nor after being asked now."""
    return [rig.connector.get_num_new_matched_tokens(request, n) for n in (0, 0, 16)] == [
        (0, False)
    ] * 3


# ---------------------------------------------------------------- decode: handed to the workers


@pytest.mark.parametrize("is_async", [False, True])
def test_accepted(make_rig: MakeRig, is_async: bool) -> None:
    rig = make_rig(is_async=is_async)
    request = handed(rig)
    assert rig.step().loads == ()
    rig.step(received=["d"])
    assert is_not_asked_again(rig, request)
    for _ in range(8):
        orders = rig.step()
        assert (orders.loads, orders.aborts, orders.unholds) == ((), (), ())
    assert len(request.output_token_ids) == 4
    assert rig.is_quiet()
    assert rig.stats["requests_loaded"][""] == 1
    assert "requests_failed" not in rig.stats


def test_asking_changes_nothing(make_rig: MakeRig) -> None:
    rig = make_rig()
    request = rig.request("d", prompt(40), offered_by(NONCE, 40))
    ask = rig.connector.get_num_new_matched_tokens
    assert [ask(request, n) for n in (0, 16, 0, 32, 39, 40)] == [
        (39, True),
        (23, True),
        (39, True),
        (7, True),
        (0, False),
        (0, False),
    ]
    assert len(rig.step().loads) == 1


def test_failed_and_recomputed(make_rig: MakeRig) -> None:
    rig = make_rig(policy="recompute")
    request = handed(rig)
    rig.step(failed={"d": "expired"})
    assert is_not_asked_again(rig, request)
    orders = rig.schedule()
    assert [(u.request_id, u.reason) for u in orders.unholds] == [("d", Reason.EXPIRED)]
    assert (orders.loads, orders.aborts) == ((), ())
    assert request.num_computed_tokens == 40  # all of it in this step
    rig.finish()
    for _ in range(4):
        rig.step()
    assert len(request.output_token_ids) == 4
    assert rig.is_quiet()
    assert rig.stats["requests_failed"] == {"expired": 1}
    assert "requests_plain" not in rig.stats


def test_failed_and_given_up(make_rig: MakeRig) -> None:
    rig = make_rig(policy="fail")
    request = handed(rig)
    rig.step(failed={"d": "peer_lost"})
    assert request.status == Status.FINISHED_ERROR
    # vLLM ends the request before it passes the report on; its source must hear of it all the same.
    orders = rig.step()
    assert [(u.request_id, u.reason) for u in orders.unholds] == [("d", Reason.PEER_LOST)]
    assert rig.is_quiet()
    assert rig.stats["requests_failed"] == {"peer_lost": 1}
    assert "requests_plain" not in rig.stats


def test_failed_without_a_name(make_rig: MakeRig) -> None:
    rig = make_rig()
    handed(rig)
    rig.step(failed={"d": ""})  # told by vLLM's own field alone
    assert [u.reason for u in rig.step().unholds] == [Reason.READ_FAILED]


def test_refused_for_its_tokens_leaves_the_offer(make_rig: MakeRig) -> None:
    rig = make_rig()
    handed(rig)
    rig.step(failed={"d": "tokens"})
    assert rig.step().unholds == ()
    assert rig.stats["requests_failed"] == {"tokens": 1}


def test_aborted_in_flight(make_rig: MakeRig) -> None:
    rig = make_rig()
    request = handed(rig)
    rig.abort("d")
    assert rig.connector.has_pending_push_work()
    orders = rig.step()
    assert [(a.request_id, a.reason) for a in orders.aborts] == [("d", Reason.CANCELLED)]
    assert rig.free_blocks() == rig.num_free - 3
    assert rig.scheduler.has_requests()
    assert rig.step().aborts == ()
    rig.step(failed={"d": "cancelled"})
    rig.step()
    assert rig.is_quiet()
    assert is_not_asked_again(rig, request)
    assert rig.stats["requests_failed"] == {"cancelled": 1}


def test_aborted_returns_false(make_rig: MakeRig) -> None:
    rig = make_rig()
    request = handed(rig)
    request.status = Status.FINISHED_ABORTED
    assert rig.connector.request_finished_all_groups(request, ([1, 2, 3],)) == (False, None)


def test_aborted_too_late(make_rig: MakeRig) -> None:
    """The report is on its way: the load was good, and its blocks come back."""
    rig = make_rig()
    handed(rig)
    rig.schedule()
    rig.abort("d")
    rig.finish(received=["d"])
    orders = rig.step()
    assert ([a.request_id for a in orders.aborts], orders.unholds) == (["d"], ())
    assert rig.is_quiet()


def test_preempted_after_its_load(make_rig: MakeRig) -> None:
    rig = make_rig()
    request = handed(rig)
    rig.step(received=["d"])
    rig.step()
    assert request.status == Status.RUNNING
    rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert request.status == Status.PREEMPTED
    orders = rig.step()
    assert (orders.loads, orders.ended) == ((), ())
    assert is_not_asked_again(rig, request)
    for _ in range(6):
        rig.step()
    assert rig.is_quiet()


# ---------------------------------------------------------------- decode: given up at once


def is_given_up(orders: Any, reason: Reason) -> bool:
    return (orders.loads, orders.aborts) == ((), ()) and [
        (unhold.request_id, unhold.reason, unhold.source.offer.nonce) for unhold in orders.unholds
    ] == [("d", reason, NONCE)]


def test_nothing_to_load(make_rig: MakeRig) -> None:
    """The one token of this prompt is computed here."""
    rig = make_rig()
    rig.request("d", prompt(1), offered_by(NONCE, 1))
    assert is_given_up(rig.step(), Reason.LOCAL_HIT)
    for _ in range(5):
        rig.step()
    assert rig.is_quiet()
    assert rig.stats["requests_plain"] == {"local_hit": 1}


def test_full_local_hit(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.request("before", prompt(2 * BLOCK + 1), max_tokens=1)
    rig.step()
    rig.request("d", prompt(2 * BLOCK + 1), offered_by(NONCE, 2 * BLOCK + 1))
    assert is_given_up(rig.step(), Reason.LOCAL_HIT)


def test_local_hit_leaves_the_rest_to_load(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.request("before", prompt(2 * BLOCK + 1), max_tokens=1)
    rig.step()
    rig.request("d", prompt(100), offered_by(NONCE, 100))
    (load,) = rig.step().loads
    assert (load.token_lo, load.token_hi) == (2 * BLOCK, 99)
    assert len(load.block_ids[0]) == 7


def test_skipped_prefix_reading(make_rig: MakeRig) -> None:
    """Whoever asks for the prompt's log probabilities computes all of it."""
    rig = make_rig()
    rig.request("d", prompt(40), offered_by(NONCE, 40), prompt_logprobs=0)
    assert is_given_up(rig.step(), Reason.LOCAL_HIT)


def test_aborted_before_allocation(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.request("d", prompt(40), offered_by(NONCE, 40))
    rig.abort("d")
    assert is_given_up(rig.step(), Reason.CANCELLED)
    assert rig.is_quiet()
    assert rig.stats["requests_plain"] == {"cancelled": 1}


def test_turned_away_before_admission(make_rig: MakeRig) -> None:
    """vLLM's stand-in for a rejected request has another prompt, and must release all the same."""
    rig = make_rig()
    rig.request("d", [0], offered_by(NONCE, 40), abort_immediately=True)
    rig.abort("d")
    assert rig.scheduler.has_requests()
    orders = rig.step()
    assert orders.holds == ()
    assert is_given_up(orders, Reason.CANCELLED)
    assert rig.is_quiet()
    assert rig.stats["requests_plain"] == {"cancelled": 1}


def test_other_tokens_than_offered_tell_the_source_nothing(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.request("d", prompt(8), offered_by(NONCE, 40))
    orders = rig.step()
    assert (orders.holds, orders.loads, orders.unholds) == ((), (), ())
    rig.abort("d")
    assert rig.step().unholds == ()
    assert rig.stats["requests_plain"] == {"tokens": 1}


# ---------------------------------------------------------------- prefill


@pytest.mark.parametrize("is_async", [False, True])
def test_offered(make_rig: MakeRig, is_async: bool) -> None:
    rig = make_rig(is_async=is_async)
    rig.request("p", prompt(40), OFFERED, max_tokens=1)
    orders = rig.schedule()
    (offer,) = orders.offers
    assert offer.num_tokens == 40
    assert orders.computed == ("p",)
    (table,) = orders.blocks
    assert [len(ids) for ids in table.block_ids] == [3]
    assert min(table.block_ids[0]) > 0
    rig.finish()
    params = rig.params_of("p")
    assert params is not None
    assert params["kvxfer"]["nonce"] == offer.nonce.hex()
    assert (params["do_remote_prefill"], params["remote_num_tokens"]) == (True, 40)
    assert params["remote_request_id"] == "p"
    assert rig.free_blocks() == rig.num_free - 3
    assert rig.step().delayed == ("p",)
    assert rig.scheduler.has_requests()
    rig.step(sent=["p"])
    assert rig.is_quiet()


def test_offered_after_chunks(make_rig: MakeRig) -> None:
    rig = make_rig(max_batched_tokens=32)
    rig.request("p", prompt(80), OFFERED, max_tokens=1)
    seen = [rig.step() for _ in range(3)]
    assert [orders.computed for orders in seen] == [(), (), ("p",)]
    assert [len(orders.blocks[0].block_ids[0]) for orders in seen] == [2, 4, 5]
    assert rig.params_of("p") is not None


def test_aborted_prefill(make_rig: MakeRig) -> None:
    rig = make_rig(max_batched_tokens=32)
    rig.request("p", prompt(80), OFFERED, max_tokens=1)
    rig.step()
    rig.abort("p")
    orders = rig.step()
    assert [(e.request_id, e.reason) for e in orders.ended] == [("p", Reason.ABORTED)]
    assert orders.delayed == ("p",)
    assert not rig.is_quiet()
    rig.step(sent=["p"])
    assert rig.is_quiet()


def test_aborted_before_its_first_step(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.request("p", prompt(80), OFFERED, max_tokens=1)
    rig.abort("p")
    orders = rig.step()
    assert (orders.offers, orders.ended, orders.delayed) == ((), (), ())
    assert rig.is_quiet()


@pytest.mark.parametrize("is_async", [False, True])
def test_preempted_prefill_offers_anew(make_rig: MakeRig, is_async: bool) -> None:
    rig = make_rig(max_batched_tokens=64, is_async=is_async)
    rig.request("p", prompt(80), OFFERED, max_tokens=1)
    (first,) = rig.step().offers
    rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    orders = rig.step()
    assert [(e.request_id, e.reason) for e in orders.ended] == [("p", Reason.PREEMPTED)]
    (second,) = orders.offers
    assert (second.num_tokens, second.nonce != first.nonce) == (80, True)
    assert rig.step().computed == ("p",)
    params = rig.params_of("p")
    assert params is not None
    assert params["kvxfer"]["nonce"] == second.nonce.hex()


@pytest.mark.parametrize("is_async", [False, True])
def test_preempted_and_aborted_before_the_next_step(make_rig: MakeRig, is_async: bool) -> None:
    rig = make_rig(max_batched_tokens=64, is_async=is_async)
    rig.request("p", prompt(80), OFFERED, max_tokens=1)
    rig.step()
    rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    rig.abort("p")
    orders = rig.step()
    assert [(e.request_id, e.reason) for e in orders.ended] == [("p", Reason.ABORTED)]
    assert orders.delayed == ("p",)
    rig.step(sent=["p"])
    assert rig.is_quiet()
    rig.request("p", prompt(40, seed=1), max_tokens=1)  # another one of that id
    assert rig.step() is NO_ORDERS


def test_reset_offers_are_not_told(make_rig: MakeRig) -> None:
    rig = make_rig(max_batched_tokens=64)
    rig.request("p", prompt(80), OFFERED, max_tokens=1)
    rig.step()
    assert rig.connector.reset_cache()
    orders = rig.step()
    assert [e.reason for e in orders.ended] == [Reason.RESET]
    assert rig.params_of("p") is None
    assert rig.step().delayed == ("p",)
    rig.step(sent=["p"])
    assert rig.is_quiet()


def test_steps_with_nothing_new_say_nothing(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.request("p", prompt(40), OFFERED, max_tokens=6)
    rig.request("d", prompt(40, seed=1), max_tokens=6)
    rig.step()
    for _ in range(2):
        assert rig.step() is NO_ORDERS
    assert not rig.connector.has_pending_push_work()


def test_the_manifest_leaves_with_the_first_step(make_rig: MakeRig) -> None:
    rig = make_rig()
    assert rig.connector.has_pending_push_work()
    manifest = rig.step().manifest
    assert manifest is not None
    assert manifest.engine_id == "here"
    assert not rig.scheduler.has_requests()


# ---------------------------------------------------------------- run plain


@pytest.mark.parametrize(
    ("role", "params", "reason"),
    [
        ("kv_producer", offered_by(NONCE, 40), "role"),
        ("kv_consumer", OFFERED, "role"),
        ("kv_both", {"do_remote_prefill": True, "remote_engine_id": "x"}, "other_connector"),
        ("kv_both", {"do_remote_prefill": False, "do_remote_decode": None}, "null_params"),
        ("kv_both", {"do_remote_prefill": True, "kvxfer": 3}, "bad_params"),
        ("kv_both", {"do_remote_decode": [1]}, "bad_params"),
    ],
)
def test_plain(make_rig: MakeRig, role: str, params: dict[str, Any], reason: str) -> None:
    rig = make_rig(role=role)
    request = rig.request("d", prompt(40), params, max_tokens=2)
    orders = rig.step()
    assert (orders.loads, orders.holds, orders.offers) == ((), (), ())
    rig.step()
    assert request.status == Status.FINISHED_LENGTH_CAPPED
    assert rig.params_of("d") is None
    rig.step()
    assert rig.is_quiet()
    assert rig.stats["requests_plain"] == {reason: 1}


@pytest.mark.parametrize("params", [OFFERED, offered_by(NONCE, 40)])
def test_embeddings_are_plain(make_rig: MakeRig, params: dict[str, Any]) -> None:
    rig = make_rig()
    rig.request("d", None, params, prompt_embeds=torch.zeros(40, 64))
    orders = rig.step()
    assert (orders.loads, orders.holds, orders.offers) == ((), (), ())
    assert rig.stats["requests_plain"] == {"prompt_embeds": 1}


@pytest.mark.parametrize("params", [OFFERED, offered_by(NONCE, 40)])
@pytest.mark.parametrize(
    ("names_media", "has_image", "is_plain"),
    [(False, True, True), (False, False, False), (True, True, False)],
)
def test_images_that_vllm_does_not_look_into_are_plain(
    make_rig: MakeRig,
    params: dict[str, Any],
    names_media: bool,
    has_image: bool,
    is_plain: bool,
) -> None:
    rig = make_rig()
    side = rig.connector.scheduler_side
    side._settings = replace(side._settings, names_media=names_media)
    place = SimpleNamespace(offset=2, length=4)
    image = SimpleNamespace(identifier="renderer0-mm-1-image-0", mm_position=place)
    request = rig.request("r", prompt(40))
    request.kv_transfer_params = params
    request.mm_features = [image] if has_image else []
    rig.connector.on_new_request(request)
    request.mm_features = []  # there is no encoder here
    orders = rig.step()
    assert len((*orders.offers, *orders.loads)) == (0 if is_plain else 1)
    assert rig.stats.get("requests_plain", {}) == ({"unnamed_media": 1} if is_plain else {})


def test_no_params_are_not_counted(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.request("a", prompt(40))
    rig.request("b", prompt(40), {})
    for _ in range(5):
        rig.step()
    assert rig.is_quiet()
    assert rig.stats == {}


def test_lora_and_images_enter_the_digest(make_rig: MakeRig) -> None:
    """Of the same tokens: two adapters, or two images, are two offers."""
    rig = make_rig()
    images = [
        SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=2, length=4))
        for name in ("cat", "dog")
    ]
    variants: list[dict[str, Any]] = [
        {},
        {"lora_request": SimpleNamespace(lora_name="a", lora_int_id=1)},
        {"lora_request": SimpleNamespace(lora_name="b", lora_int_id=1)},
        {"mm_features": [images[0]]},
        {"mm_features": [images[1]]},
    ]
    digests = set()
    for number, variant in enumerate(variants):
        request = rig.request(f"plain{number}", prompt(40))
        request.kv_transfer_params = offered_by(bytes([number]) * 16, 40)
        for name, value in variant.items():
            setattr(request, name, value)
        rig.connector.on_new_request(request)
        blocks = SimpleNamespace(get_block_ids=lambda: ([1, 2, 3],))
        rig.connector.update_state_after_alloc(request, blocks, 39)
        rig.scheduler.finish_requests(request.request_id, Status.FINISHED_ABORTED)
    digests = {load.source.digest for load in rig.schedule().loads}
    assert len(digests) == len(variants)


# ---------------------------------------------------------------- several groups


def test_every_group_is_loaded_and_null_blocks_are_minus_one(make_rig: MakeRig) -> None:
    rig = make_rig(window=2 * BLOCK)
    request = rig.request("d", prompt(100), offered_by(NONCE, 100))
    assert rig.connector.get_loaded_kv_cache_group_ids(request) == (0, 1)
    (load,) = rig.step().loads
    full, windowed = load.block_ids
    assert len(full) == len(windowed) == 7
    assert min(full) > 0
    # 99 tokens are loaded; the next looks at 68 to 99, so blocks 0 to 3 are out of the window.
    assert windowed[:4] == (-1,) * 4
    assert min(windowed[4:]) > 0
    rig.step(failed={"d": "deadline"})
    for _ in range(5):
        rig.step()
    assert rig.is_quiet()


EDGE = 95
"""With a window of 32, token 94 looks back to token 63, the last of a block of 16, and token 95 to
64: vLLM drops that block as soon as 95 tokens are computed.
"""


@pytest.mark.parametrize(
    "settings",
    [{}, {"is_async": True}, {"max_batched_tokens": 48}, {"window": 2 * BLOCK + 5}, {"window": 1}],
    ids=str,
)
def test_a_prompt_is_offered_wherever_its_window_begins(
    make_rig: MakeRig, settings: dict[str, Any]
) -> None:
    rig = make_rig(**({"window": 2 * BLOCK} | settings))
    for num_tokens in range(EDGE - 2, EDGE + BLOCK + 2):
        name = f"p{num_tokens}"
        request = rig.request(name, prompt(num_tokens, seed=num_tokens), OFFERED, max_tokens=1)
        while not request.is_finished():
            rig.step()
        assert rig.params_of(name) is not None
        orders = rig.step()
        assert (orders.delayed, orders.ended) == ((name,), ())
        rig.step(sent=[name])
        assert rig.is_quiet()
    assert "requests_plain" not in rig.stats


def windowed(blocks: Sequence[Any]) -> tuple[int, ...]:
    """The table that the workers were told last, of the group with the window."""
    return tuple(blocks[-1].block_ids[1])


def test_the_edge_of_an_offer_is_nobody_elses_until_it_was_sent(make_rig: MakeRig) -> None:
    rig = make_rig(window=2 * BLOCK, num_blocks=24, prefix_caching=False)
    rig.request("p", prompt(EDGE), OFFERED, max_tokens=1)
    told = windowed(rig.step().blocks)
    assert told[:3] == (-1,) * 3
    assert rig.scheduler.kv_cache_manager.get_block_ids("p")[1][:4] == [0] * 4  # vLLM dropped it
    # All others of 23: the offer holds 6 in the group without a window, 3 in that with one.
    rig.request("q", prompt(7 * BLOCK, seed=1), max_tokens=1)
    rig.schedule()
    (new,) = rig.in_flight[-1].scheduled_new_reqs
    assert len(new.block_ids[0] + new.block_ids[1]) == 14 == rig.num_free - 9
    assert told[3] not in new.block_ids[0] + new.block_ids[1]
    rig.finish(sent=["p"])
    rig.step()
    assert rig.is_quiet()


def test_the_edge_of_an_offer_that_was_preempted_comes_back(make_rig: MakeRig) -> None:
    rig = make_rig(window=2 * BLOCK)
    request = rig.request("p", prompt(EDGE), OFFERED, max_tokens=4)
    rig.step()
    rig.step()
    rig.scheduler.running.remove(request)
    rig.scheduler._preempt_request(request, time.monotonic())
    assert rig.free_blocks() == rig.num_free - 1
    orders = rig.step()  # tells of the preemption, and offers anew
    assert [e.reason for e in orders.ended] == [Reason.PREEMPTED]
    assert orders.computed == ("p",)
    for _ in range(3):
        rig.step()
    assert rig.params_of("p") is not None
    rig.step()
    rig.step(sent=["p"])
    assert rig.is_quiet()


def test_the_edge_of_an_offer_that_was_aborted_comes_back(make_rig: MakeRig) -> None:
    rig = make_rig(window=2 * BLOCK)
    rig.request("p", prompt(EDGE), OFFERED, max_tokens=4)
    rig.step()
    rig.abort("p")
    assert [e.reason for e in rig.step().ended] == [Reason.ABORTED]
    rig.step(sent=["p"])
    assert rig.is_quiet()


def test_a_vllm_without_pins_does_not_offer_at_the_edge_of_a_block(make_rig: MakeRig) -> None:
    rig = make_rig(window=2 * BLOCK)
    rig.connector.bind_gpu_block_pool(object())
    for num_tokens, is_offered in ((EDGE - 1, True), (EDGE, False), (EDGE + 1, True)):
        name = f"p{num_tokens}"
        rig.request(name, prompt(num_tokens), OFFERED, max_tokens=1)
        rig.step()
        assert (rig.params_of(name) is not None) == is_offered
        orders = rig.step()
        assert [e.reason for e in orders.ended] == ([] if is_offered else [Reason.ABORTED])
        rig.step(sent=[name])
        assert rig.is_quiet()
    assert rig.stats["requests_plain"] == {"window": 1}


@pytest.mark.parametrize(("max_tokens", "is_offered"), [(1, True), (4, True), (40, False)])
def test_decoding_past_the_offer(make_rig: MakeRig, max_tokens: int, is_offered: bool) -> None:
    """The blocks that the offer needs are dropped as its engine decodes on."""
    rig = make_rig(window=2 * BLOCK)
    rig.request("p", prompt(100), OFFERED, max_tokens=max_tokens)
    for _ in range(max_tokens):
        rig.step()
    assert (rig.params_of("p") is not None) == is_offered


def test_group_with_all_tokens_may_decode_on(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.request("p", prompt(100), OFFERED, max_tokens=40)
    for _ in range(40):
        rig.step()
    assert rig.params_of("p") is not None


# ---------------------------------------------------------------- beside another connector

OURS = {
    "kv_connector": "KvxferConnector",
    "kv_connector_module_path": "kvxfer.integrations.vllm",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"port": 0},
}


def other(num_tokens: int | None = 0) -> dict[str, Any]:
    return {
        "kv_connector": "OtherConnector",
        "kv_connector_module_path": "tests.vllm.other_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"num_tokens": num_tokens},
    }


def test_beside_another_connector(make_rig: MakeRig) -> None:
    rig = make_rig(connectors=[other(), OURS])
    request = handed(rig)
    rig.step(received=["d"])
    for _ in range(6):
        rig.step()
    assert len(request.output_token_ids) == 4
    rig.request("p", prompt(40, seed=2), OFFERED, max_tokens=1)
    rig.step()
    assert rig.params_of("p") is not None
    rig.step()
    rig.step(sent=["p"])
    assert rig.is_quiet()
    assert rig.stats["requests_loaded"][""] == 1


def test_within_multi_connector_an_offer_has_the_blocks_of_all_groups(make_rig: MakeRig) -> None:
    """MultiConnector has two ways to say that a request has ended; the older one names one group.
    vLLM 36549.
    """
    for connectors in (None, [other(), OURS]):
        rig = make_rig(window=2 * BLOCK, connectors=connectors)
        rig.request("p", prompt(100), OFFERED, max_tokens=1)
        (blocks,) = rig.step().blocks
        assert [len(ids) for ids in blocks.block_ids] == [7, 7]
        params = rig.params_of("p")
        assert params is not None
        assert rig.step().delayed == ("p",)
        held = rig.num_free - rig.free_blocks()
        assert held == 7 + 3  # all of one group, the window of the other
        rig.step(sent=["p"])
        assert rig.is_quiet()
        # Only the second group tells that decoding has passed the window
        rig.request("late", prompt(100, seed=1), OFFERED, max_tokens=40)
        for _ in range(40):
            rig.step()
        assert rig.params_of("late") is None


def test_beside_a_connector_for_one_group_there_are_offers(make_rig: MakeRig) -> None:
    """It has vLLM's older call alone, so MultiConnector makes that one for all."""
    plain = {**other(), "kv_connector": "PlainConnector"}
    rig = make_rig(connectors=[plain, OURS], hybrid_manager=False)
    rig.request("p", prompt(40), OFFERED, max_tokens=1)
    rig.step()
    assert rig.params_of("p") is not None
    assert rig.step().delayed == ("p",)
    assert rig.num_free - rig.free_blocks() == 3
    rig.step(sent=["p"])
    assert rig.is_quiet()


def test_another_connector_has_it(make_rig: MakeRig) -> None:
    """Its tokens are loaded, our offer is given up, and its reports are not ours."""
    rig = make_rig(connectors=[other(32), OURS])
    rig.request("d", prompt(40), offered_by(NONCE, 40), max_tokens=1)
    assert is_given_up(rig.step(), Reason.LOCAL_HIT)
    rig.step(received=["d"])
    rig.step()
    rig.step()
    assert rig.is_quiet()
    assert rig.stats["requests_plain"] == {"local_hit": 1}
    assert "requests.loaded" not in rig.stats.get("counts", {})


def test_another_connector_needs_time(make_rig: MakeRig) -> None:
    """It makes vLLM ask again, step after step; our offer is held meanwhile."""
    rig = make_rig(connectors=[other(None), OURS])
    rig.request("d", prompt(40), offered_by(NONCE, 40))
    assert len(rig.step().holds) == 1
    orders = [rig.step() for _ in range(3)]
    assert [(o.loads, o.holds, o.unholds) for o in orders] == [((), (), ())] * 3
    rig.abort("d")
    assert is_given_up(rig.step(), Reason.CANCELLED)


def test_foreign_handshake_is_refused(make_rig: MakeRig) -> None:
    rig = make_rig()
    with pytest.raises(ConfigError, match="put KvxferConnector before it"):
        rig.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): object()})


def early_of_another() -> dict[str, Any]:
    engine = {"incarnation": "74" * 16, "endpoint": "tcp://127.0.0.1:5700", "protocol": 2}
    early = early_params({"remote_engine_id": "e", "kvxfer": engine}, mint_request())
    assert early is not None
    return early


@pytest.mark.parametrize(
    ("token", "reason", "wanted"), [(0, "cancelled", [True, False]), (-1, "bad_params", [])]
)
def test_an_early_request_that_is_turned_away_is_looked_for(
    make_rig: MakeRig, token: int, reason: str, wanted: list[bool]
) -> None:
    """Whatever its tokens are: vLLM does not look at them first. No request waits for it."""
    rig = make_rig()
    rig.request("d", [token], early_of_another(), abort_immediately=True)
    rig.abort("d")
    assert [find.is_wanted for find in rig.step().finds] == wanted
    assert rig.is_quiet()
    assert rig.stats["requests_plain"] == {reason: 1}


def test_an_early_request_is_plain_where_nobody_hears_what_is_found(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be asked for, step after step, for ever."""
    monkeypatch.setattr("kvxfer.integrations.vllm.step_loads.PASSES_WORKER_METADATA", False)
    rig = make_rig()
    request = rig.request("d", prompt(40), early_of_another(), max_tokens=1)
    assert rig.step().finds == ()
    assert len(request.output_token_ids) == 1
    assert rig.stats["requests_plain"] == {"early": 1}
    rig.step()
    assert rig.is_quiet()
