"""What the scheduler side tells the workers, step by step. Expectations are written out by hand."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace as Bag
from typing import Any

import msgspec
import pytest

from kvxfer.config import Config
from kvxfer.connector.params import LoadWanted, make_params, parse_params, prefill_params
from kvxfer.connector.records import (
    NO_ORDERS,
    AbortLoad,
    ConnectorMetadata,
    EndOffer,
    Hold,
    KVConnectorOutput,
    NewLoad,
    NewOffer,
    OfferBlocks,
    Unhold,
)
from kvxfer.connector.scheduler_side import SchedulerConnector
from kvxfer.errors import ConfigError
from kvxfer.transfer.tokens import token_digest
from kvxfer.transfer.wire import Reason
from tests.connector.scheduler import (
    ENGINE,
    INCARNATION,
    PROMPT,
    SOURCE,
    Blocks,
    Request,
    connector,
    ends_of,
    handed,
    offering,
    rank_manifest,
    step,
    wanting,
)

# ---------------------------------------------------------------- offers


def test_an_offer_is_minted_grows_and_is_computed_in_chunks() -> None:
    c = connector()
    c.on_new_request(offering())
    first = c.build_connector_meta(step(new=(("r", [3, 4], 0),), counts={"r": 32}))
    (offer,) = first.offers
    assert offer == NewOffer(
        request_id="r", nonce=offer.nonce, num_tokens=40, digest=token_digest(PROMPT)
    )
    assert len(offer.nonce) == 16
    assert first.blocks == (OfferBlocks("r", ((3, 4),)),)
    assert (first.computed, first.grown) == ((), (("r", 32),))
    second = c.build_connector_meta(step(cached=(("r", [9], 32),), counts={"r": 8}))
    assert second == ConnectorMetadata(blocks=(OfferBlocks("r", ((3, 4, 9),)),), computed=("r",))
    keep, params = c.request_finished(offering(), [3, 4, 9])
    assert keep
    assert params is not None
    assert params["remote_engine_id"] == "me"
    assert params["kvxfer"] == {
        "incarnation": INCARNATION.hex(),
        "number": 1,
        "nonce": offer.nonce.hex(),
        "tokens": 40,
        "endpoint": "tcp://127.0.0.1:5999",
        "digest": token_digest(PROMPT).hex(),
        "protocol": 3,
        "named_nonces": True,
    }
    assert c.has_orders()
    assert c.build_connector_meta(step()) == ConnectorMetadata(delayed=("r",))
    assert not c.has_orders()


@pytest.mark.parametrize(
    ("num_cached", "num_computed", "num_open"),
    [
        (None, 32, 0),  # nobody has asked for it: another connector may have loaded these tokens
        (16, 16, 16),
        (16, 32, 16),  # the other 16 are loaded by the step itself
        (32, 16, 16),  # a shorter hit when it was admitted
    ],
)
def test_what_prefill_has_cached_opens_before_its_first_step(
    num_cached: int | None, num_computed: int, num_open: int
) -> None:
    c = connector()
    request = Request(kv_transfer_params=prefill_params("0f" * 16))
    c.on_new_request(request)
    if num_cached is not None:
        assert c.get_num_new_matched_tokens(request, num_cached) == (0, False)
    told = c.build_connector_meta(step(new=(("r", [3, 4, 5], num_computed),), counts={"r": 4}))
    (offer,) = told.offers
    assert (offer.open_tokens, offer.name) == (num_open, b"\x0f" * 16)
    assert told.grown == (("r", num_computed + 4),)


@pytest.mark.parametrize(
    ("others", "decoding", "num_open"),
    [
        ({"a": (0, 24)}, (), 40),  # perhaps the last 24 are computed by this very step
        ({"a": (16, 24)}, (), 24),  # what it found may be loaded by the step, by another connector
        ({"a": (0, 24), "b": (24, 40)}, (), 0),
        ({}, ("x", "y", "z"), 61),  # one token each may fill a block
    ],
)
def test_what_prefill_has_cached_may_be_of_other_requests_of_the_step(
    others: dict[str, tuple[int, int]], decoding: tuple[str, ...], num_open: int
) -> None:
    """Engines name blocks when they schedule them, before they are computed."""
    c = connector()
    request = Request(
        prompt_token_ids=tuple(range(80)), kv_transfer_params=prefill_params("0f" * 16)
    )
    c.on_new_request(request)
    c.get_num_new_matched_tokens(request, 64)
    told = c.build_connector_meta(
        step(
            new=(*((i, [9], n) for i, (n, _) in others.items()), ("r", [3, 4, 5, 6, 7], 64)),
            cached=tuple((i, None, 100) for i in decoding),
            counts={i: n for i, (_, n) in others.items()} | dict.fromkeys(decoding, 1) | {"r": 16},
        )
    )
    (offer,) = told.offers
    assert offer.open_tokens == num_open


def test_a_preempted_offer_begins_anew_under_its_name() -> None:
    c = connector()
    request = Request(kv_transfer_params=prefill_params("0f" * 16))
    c.on_new_request(request)
    first = c.build_connector_meta(step(new=(("r", [3, 4], 0),), counts={"r": 32}))
    told = c.build_connector_meta(step(preempted=frozenset("r")))
    assert told.ended == (EndOffer("r", first.offers[0].nonce, Reason.PREEMPTED),)
    assert told.grown == ()
    c.get_num_new_matched_tokens(request, 16)
    again = c.build_connector_meta(
        step(cached=(("r", [7, 8], 16),), counts={"r": 8}, resumed=frozenset("r"))
    )
    (offer,) = again.offers
    assert (offer.open_tokens, offer.name) == (16, b"\x0f" * 16)
    assert offer.nonce != first.offers[0].nonce
    assert again.grown == (("r", 24),)


def test_offers_do_not_grow_where_they_are_not_to() -> None:
    c = connector(grow_offers=False)
    c.on_new_request(offering())
    c.get_num_new_matched_tokens(offering(), 16)
    told = c.build_connector_meta(step(new=(("r", [3, 4], 16),), counts={"r": 8}))
    assert (told.offers[0].open_tokens, told.grown) == (0, ())


def test_blocks_after_the_offered_tokens_are_not_told() -> None:
    c = connector()
    c.on_new_request(offering())
    c.build_connector_meta(step(new=(("r", [3, 4, 5], 0),), counts={"r": 40}))
    assert c.build_connector_meta(step(cached=(("r", [6], 40),), counts={"r": 1})).blocks == ()


def test_an_aborted_offer_ends_before_its_blocks_come_back() -> None:
    c = connector()
    c.on_new_request(offering())
    told = c.build_connector_meta(step(new=(("r", [3, 4], 0),), counts={"r": 32}))
    assert c.request_finished(offering(status="FINISHED_ABORTED"), [3, 4]) == (True, None)
    assert c.build_connector_meta(step()) == ConnectorMetadata(
        ended=(EndOffer("r", told.offers[0].nonce, Reason.ABORTED),), delayed=("r",)
    )


@pytest.mark.parametrize("status", ["FINISHED_ABORTED", "FINISHED_ERROR"])
def test_a_computed_offer_of_a_request_that_failed_is_taken_back(status: str) -> None:
    c = connector()
    c.on_new_request(offering())
    c.build_connector_meta(step(new=(("r", [3, 4, 5], 0),), counts={"r": 40}))
    assert c.request_finished(offering(status=status), [3, 4, 5]) == (True, None)
    assert ends_of(c.build_connector_meta(step())) == {"r": Reason.ABORTED}


def test_an_offer_that_no_worker_knows_needs_nothing() -> None:
    c = connector()
    c.on_new_request(offering())
    assert c.request_finished(offering(status="FINISHED_ABORTED"), []) == (False, None)
    assert not c.has_orders()


def test_a_preempted_offer_dies_and_gets_a_new_nonce() -> None:
    c = connector()
    c.on_new_request(offering())
    first = c.build_connector_meta(step(new=(("r", [3, 4], 0),), counts={"r": 32}))
    gone = c.build_connector_meta(step(preempted=frozenset({"r"})))
    assert gone == ConnectorMetadata(
        ended=(EndOffer("r", first.offers[0].nonce, Reason.PREEMPTED),)
    )
    again = c.build_connector_meta(
        step(cached=(("r", [7, 8, 9], 0),), counts={"r": 40}, resumed=frozenset({"r"}))
    )
    assert again.offers[0].nonce != first.offers[0].nonce
    assert again.blocks == (OfferBlocks("r", ((7, 8, 9),)),)
    assert again.computed == ("r",)


def test_reset_cache_breaks_every_offer() -> None:
    c = connector()
    c.on_new_request(offering())
    c.build_connector_meta(step(new=(("r", [3, 4, 5], 0),), counts={"r": 40}))
    assert c.reset_cache()
    assert ends_of(c.build_connector_meta(step())) == {"r": Reason.RESET}
    assert c.request_finished(offering(), [3, 4, 5]) == (True, None)  # it is over: not told
    assert c.build_connector_meta(step()) == ConnectorMetadata(delayed=("r",))


def test_a_forgotten_request_is_offered_until_it_is_sent() -> None:
    """Another of its id is none of the offer's business, and offers nothing."""
    c = connector()
    c.on_new_request(offering())
    c.build_connector_meta(step(new=(("r", [3, 4, 5], 0),), counts={"r": 40}))
    assert c.request_finished(offering(), [3, 4, 5])[0]
    c.build_connector_meta(step())
    c.forget_request("r")
    c.on_new_request(offering())
    again = c.build_connector_meta(step(new=(("r", [6, 7, 8], 0),), counts={"r": 40}))
    assert again == ConnectorMetadata()
    assert c.build_connector_meta(step(preempted=frozenset({"r"}))) == ConnectorMetadata()
    assert c.request_finished(offering(), [6, 7, 8]) == (False, None)
    stats = c.get_kv_connector_stats()
    assert stats is not None
    assert stats.reasons == {"id_in_use": 1}
    c.reset_cache()
    assert ends_of(c.build_connector_meta(step())) == {"r": Reason.RESET}
    c.update_connector_output(KVConnectorOutput(finished_sending={"r"}))
    c.on_new_request(offering())
    new = c.build_connector_meta(step(new=(("r", [3, 4, 5], 0),), counts={"r": 40}))
    assert len(new.offers) == 1


def test_an_offer_without_the_blocks_that_it_named_is_not_told() -> None:
    """The engine has dropped the first block, as it does behind a window."""
    c = connector()
    for name in ("whole", "less"):
        c.on_new_request(offering(request_id=name))
    new = (("whole", [3, 4, 5], 0), ("less", [6, 7, 8], 0))
    c.build_connector_meta(step(new=new, counts={"whole": 40, "less": 40}))
    keep, params = c.request_finished(offering(request_id="whole"), [3, 4, 5, 9])
    assert (keep, params is not None) == (True, True)
    assert c.request_finished(offering(request_id="less"), [-1, 7, 8]) == (True, None)
    orders = c.build_connector_meta(step())
    assert ends_of(orders) == {"less": Reason.ABORTED}
    assert orders.delayed == ("whole", "less")
    stats = c.get_kv_connector_stats()
    assert stats is not None
    assert stats.reasons == {"window": 1}


def test_a_preemption_that_is_told_after_the_end() -> None:
    """Preempted between two steps, and aborted before the second: another request of that id is
    nobody's offer.
    """
    c = connector()
    c.on_new_request(offering())
    c.build_connector_meta(step(new=(("r", [3, 4], 0),), counts={"r": 32}))
    assert c.request_finished(offering(status="FINISHED_ABORTED"), []) == (True, None)
    told = c.build_connector_meta(step(preempted=frozenset({"r"})))
    assert ends_of(told) == {"r": Reason.ABORTED}
    assert (len(told.ended), told.delayed) == (1, ("r",))
    c.update_connector_output(KVConnectorOutput(finished_sending={"r"}))
    again = c.build_connector_meta(step(new=(("r", [6, 7, 8], 0),), counts={"r": 40}))
    assert again == ConnectorMetadata()


def test_a_preemption_that_is_told_only_when_the_request_comes_back() -> None:
    c = connector()
    c.on_new_request(offering())
    first = c.build_connector_meta(step(new=(("r", [3, 4], 0),), counts={"r": 32}))
    again = c.build_connector_meta(
        step(cached=(("r", [7, 8, 9], 0),), counts={"r": 40}, resumed=frozenset({"r"}))
    )
    assert again.ended == (EndOffer("r", first.offers[0].nonce, Reason.PREEMPTED),)
    assert again.offers[0].nonce != first.offers[0].nonce
    assert again.computed == ("r",)


def test_steps_without_orders_share_one_record() -> None:
    """Offers that are computed and kept, and loads in flight, take nothing of a step."""
    c = connector()
    c.on_new_request(offering())
    c.on_new_request(wanting(request_id="d"))
    c.build_connector_meta(step(new=(("r", [3, 4, 5], 0),), counts={"r": 40}))
    assert c.build_connector_meta(step()) is NO_ORDERS
    c.request_finished(offering(), [3, 4, 5])
    c.update_state_after_alloc(wanting(request_id="d"), Blocks([5, 6, 7]), 39)
    told = c.build_connector_meta(step())
    assert (told.delayed, [load.request_id for load in told.loads]) == (("r",), ["d"])
    for _ in range(2):
        assert c.build_connector_meta(step()) is NO_ORDERS


def test_an_offer_that_is_withdrawn_ends_before_its_lease() -> None:
    c = connector()
    request = offering()
    c.on_new_request(request)
    c.build_connector_meta(step(new=(("r", [1, 2, 3], 0),), counts={"r": 40}))
    keep, params = c.request_finished(request, [1, 2, 3])
    assert keep
    assert params is not None
    c.build_connector_meta(step())
    c.withdraw_offer("r")
    c.withdraw_offer("r")
    c.withdraw_offer("never heard of")
    assert c.has_orders()
    (ended,) = c.build_connector_meta(step()).ended
    assert (ended.request_id, ended.reason) == ("r", Reason.ABORTED)
    assert not c.has_orders()
    c.update_connector_output(KVConnectorOutput(finished_sending={"r"}))
    c.withdraw_offer("r")
    assert not c.has_orders()


# ---------------------------------------------------------------- loads


def test_a_load_is_held_then_handed_over_and_never_asked_for_again() -> None:
    c = connector()
    request = wanting()
    c.on_new_request(request)
    assert c.build_connector_meta(step()) == ConnectorMetadata(holds=(Hold("r", SOURCE),))
    for _ in range(2):  # asked any number of times
        assert c.get_num_new_matched_tokens(request, 16) == (23, True)
    c.update_state_after_alloc(request, Blocks([5, 6, 7]), 23)
    load = NewLoad(
        request_id="r",
        source=SOURCE,
        token_lo=16,
        token_hi=39,  # the last prompt token is computed here
        block_ids=((5, 6, 7),),
    )
    assert c.build_connector_meta(step()) == ConnectorMetadata(loads=(load,))
    c.update_state_after_alloc(request, Blocks([5, 6, 7]), 0)  # the second call of async loads
    assert c.get_num_new_matched_tokens(request, 0) == (0, False)
    c.update_connector_output(KVConnectorOutput(finished_recving={"r"}))
    assert c.get_num_new_matched_tokens(request, 0) == (0, False)
    assert c.request_finished(request, [5, 6, 7]) == (False, None)
    assert not c.has_orders()


@pytest.mark.parametrize(
    ("num_own_tokens", "num_tokens", "expected"),
    [(1, 40, (23, True)), (3, 40, (21, True)), (3, 38, (21, True)), (30, 40, (0, False))],
)
def test_the_end_of_a_prompt_is_computed_here(
    num_own_tokens: int, num_tokens: int, expected: tuple[int, bool]
) -> None:
    """Of 40 tokens 16 are cached, and as many are offered as the middle column says."""
    c = connector(num_own_tokens=num_own_tokens)
    source = msgspec.structs.replace(SOURCE, num_tokens=num_tokens)
    params = make_params(source, request_id="x", number=1, tp_size=1, pp_size=1)
    request = Request(kv_transfer_params=params)
    c.on_new_request(request)
    assert c.get_num_new_matched_tokens(request, 16) == expected


def test_a_load_has_the_trace_of_its_request() -> None:
    c = connector()
    request = wanting()
    request.trace_headers = {"traceparent": "00-1-2-01", "tracestate": "a=b", "cookie": "c"}
    c.on_new_request(request)
    c.get_num_new_matched_tokens(request, 0)
    c.update_state_after_alloc(request, Blocks([5, 6, 7]), 39)
    (load,) = c.build_connector_meta(step()).loads
    assert load.trace == (("traceparent", "00-1-2-01"), ("tracestate", "a=b"))


def test_an_adapter_is_part_of_what_is_offered_and_wanted() -> None:
    def digests(adapter: str, path: str) -> tuple[bytes, bytes]:
        c, lora = connector(), Bag(lora_name=adapter, lora_path=path)
        c.on_new_request(offering(request_id="s", lora_request=lora))
        wanted = wanting(lora_request=lora)
        c.on_new_request(wanted)
        assert c.get_num_new_matched_tokens(wanted, 16) == (23, True)
        c.update_state_after_alloc(wanted, Blocks([5, 6, 7]), 23)
        told = c.build_connector_meta(step(new=(("s", [3, 4], 0),), counts={"s": 32}))
        return told.offers[0].digest, told.loads[0].source.digest

    poet = token_digest(PROMPT, (("lora", "poet"),))
    assert digests("poet", "/a") == digests("poet", "/b") == (poet, poet)
    assert digests("cook", "/a")[0] != poet


@pytest.mark.parametrize("num_local", [39, 40, 48])
def test_a_full_local_hit_gives_the_offer_up_at_once(num_local: int) -> None:
    c = connector()
    request = wanting()
    c.on_new_request(request)
    c.build_connector_meta(step())
    assert c.get_num_new_matched_tokens(request, num_local) == (0, False)
    c.update_state_after_alloc(request, Blocks([5, 6, 7]), 0)
    assert c.build_connector_meta(step()) == ConnectorMetadata(
        unholds=(Unhold("r", SOURCE, Reason.LOCAL_HIT),)
    )
    assert c.request_finished(request, [5, 6, 7]) == (False, None)
    assert not c.has_orders()


def test_an_abort_before_allocation_gives_the_offer_up() -> None:
    c = connector()
    c.on_new_request(wanting())
    assert c.request_finished(wanting(status="FINISHED_ABORTED"), []) == (False, None)
    meta = c.build_connector_meta(step())
    assert meta.unholds == (Unhold("r", SOURCE, Reason.CANCELLED),)


def test_an_abort_while_loading_goes_to_the_workers() -> None:
    c = connector()
    request = wanting(status="FINISHED_ABORTED")
    c.on_new_request(request)
    c.get_num_new_matched_tokens(request, 0)
    c.update_state_after_alloc(request, Blocks([5, 6, 7]), 39)
    c.build_connector_meta(step())
    assert c.request_finished(request, [5, 6, 7]) == (False, None)
    assert c.build_connector_meta(step()) == ConnectorMetadata(
        aborts=(AbortLoad("r", Reason.CANCELLED),)
    )


def test_more_tokens_offered_than_the_prompt_has() -> None:
    c = connector()
    request = wanting(prompt_token_ids=PROMPT[:39])
    c.on_new_request(request)
    assert c.get_num_new_matched_tokens(request, 0) == (0, False)
    assert not c.has_orders()  # the offer belongs to another request: it is left alone
    stats = c.get_kv_connector_stats()
    assert stats is not None
    assert stats.reasons == {"tokens": 1}
    assert c.get_kv_connector_stats() is None


def test_fewer_tokens_offered_than_the_prompt_has_are_all_loaded() -> None:
    c = connector()
    request = wanting(prompt_token_ids=(*PROMPT, 77, 78))
    c.on_new_request(request)
    assert c.get_num_new_matched_tokens(request, 16) == (24, True)
    c.update_state_after_alloc(request, Blocks([5, 6, 7]), 24)
    (load,) = c.build_connector_meta(step()).loads
    assert (load.token_lo, load.token_hi, load.source.digest) == (16, 40, token_digest(PROMPT))


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"do_remote_prefill": True}, "other_connector"),
        ({"do_remote_prefill": "x"}, "bad_params"),
        ({"do_remote_prefill": False}, "null_params"),
    ],
)
def test_other_params_make_a_plain_request_and_are_counted(
    params: dict[str, Any], reason: str
) -> None:
    c = connector()
    request = Request(kv_transfer_params=params)
    c.on_new_request(request)
    assert c.get_num_new_matched_tokens(request, 0) == (0, False)
    assert not c.has_orders()
    stats = c.get_kv_connector_stats()
    assert stats is not None
    assert stats.reasons == {reason: 1}


def test_the_other_role_is_refused() -> None:
    prefill = connector(can_receive=False)
    prefill.on_new_request(wanting())
    decode = connector(can_send=False)
    decode.on_new_request(offering())
    for c in (prefill, decode):
        assert not c.has_orders()
        stats = c.get_kv_connector_stats()
        assert stats is not None
        assert stats.reasons == {"role": 1}


def test_an_endpoint_outside_allowed_peers_is_not_even_held() -> None:
    c = connector()
    params = make_params(SOURCE, request_id="x", number=1, tp_size=1, pp_size=1)
    params["kvxfer"]["endpoint"] = "tcp://8.8.8.8:5700"
    c.on_new_request(Request(kv_transfer_params=params))
    assert not c.has_orders()
    stats = c.get_kv_connector_stats()
    assert stats is not None
    assert stats.reasons == {"not_allowed": 1}


def test_params_that_were_not_signed_are_plain_where_there_is_a_key() -> None:
    c = connector(params_key="sixteen letters.")
    made = partial(make_params, SOURCE, request_id="x", number=1, tp_size=1, pp_size=1)
    for reject in (c.on_new_request, c.reject_request):
        reject(Request("unsigned", kv_transfer_params=made()))
        assert not c.has_orders()
    c.on_new_request(Request("signed", kv_transfer_params=made(key="sixteen letters.")))
    assert c.get_num_new_matched_tokens(Request("signed"), 0) == (39, True)
    stats = c.get_kv_connector_stats()
    assert stats is not None
    assert stats.reasons == {"bad_signature": 1}


def test_a_source_with_a_key_signs_what_it_returns() -> None:
    c = connector(params_key="sixteen letters.")
    c.on_new_request(offering())
    c.build_connector_meta(step(new=(("r", [3, 4, 5], 0),), counts={"r": 40}))
    _, params = c.request_finished(offering(), [3, 4, 5])
    assert isinstance(parse_params(params, "sixteen letters."), LoadWanted)
    assert not isinstance(parse_params(params, "another one of 16"), LoadWanted)


@pytest.mark.parametrize(
    ("failure", "unholds"),
    [
        ("peer_lost", (Unhold("r", SOURCE, Reason.PEER_LOST),)),
        ("a reason of another version", (Unhold("r", SOURCE, Reason.CANCELLED),)),
        ("tokens", ()),  # the offer belongs to another request
    ],
)
def test_a_failed_load_is_given_up_at_every_source_rank(
    failure: str, unholds: tuple[Unhold, ...]
) -> None:
    c = connector()
    request = wanting()
    c.on_new_request(request)
    c.get_num_new_matched_tokens(request, 0)
    c.update_state_after_alloc(request, Blocks([5, 6, 7]), 39)
    c.build_connector_meta(step())
    c.update_connector_output(
        KVConnectorOutput(finished_recving={"r"}, failed_recving={"r": failure})
    )
    assert c.build_connector_meta(step()) == ConnectorMetadata(unholds=unholds)
    assert c.get_num_new_matched_tokens(request, 0) == (0, False)


def test_loads_are_counted_and_failures_by_their_reason() -> None:
    c = connector()
    for name in ("a", "b", "f"):
        handed(c, name.encode() * 16, request_id=name)
    c.update_connector_output(
        KVConnectorOutput(finished_recving={"a", "b", "f"}, failed_recving={"f": "peer_lost"})
    )
    c.on_new_request(Request(kv_transfer_params={"do_remote_prefill": True}))
    stats = c.get_kv_connector_stats()
    assert stats is not None
    assert stats.counts == {"requests.loaded": 2}
    assert stats.reasons == {"peer_lost": 1, "other_connector": 1}
    assert stats.failed == {"peer_lost": 1}
    assert c.get_kv_connector_stats() is None


def test_loads_of_others_are_not_counted() -> None:
    c = connector()
    c.update_connector_output(
        KVConnectorOutput(finished_recving={"a", "b"}, failed_recving={"b": "peer_lost"})
    )
    assert c.get_kv_connector_stats() is None
    assert not c.has_orders()


@pytest.mark.parametrize(
    ("failed", "unholds"),
    [
        ({}, ()),
        ({"r": "peer_lost"}, (Unhold("r", SOURCE, Reason.PEER_LOST),)),
        ({"r": "tokens"}, ()),
    ],
)
def test_a_request_that_ends_before_its_load_is_reported(
    failed: dict[str, str], unholds: tuple[Unhold, ...]
) -> None:
    """As where an engine fails the request for its load, and passes the report on afterwards."""
    c = connector()
    request = handed(c, status="FINISHED_ERROR")
    assert c.request_finished(request, [5, 6, 7]) == (False, None)
    assert c.request_finished(request, [5, 6, 7]) == (False, None)
    assert c.get_kv_connector_stats() is None  # the report says what it was
    assert c.build_connector_meta(step()).aborts == (AbortLoad("r", Reason.CANCELLED),)
    c.update_connector_output(KVConnectorOutput(finished_recving={"r"}, failed_recving=failed))
    assert c.build_connector_meta(step()) == ConnectorMetadata(unholds=unholds)
    c.update_connector_output(KVConnectorOutput(finished_recving={"r"}, failed_recving=failed))
    assert not c.has_orders()


@pytest.mark.parametrize("tokens", [(0,), PROMPT])
def test_a_request_that_is_turned_away_gives_its_offer_up(tokens: tuple[int, ...]) -> None:
    c = connector()
    request = wanting(prompt_token_ids=tokens, status="FINISHED_ABORTED")
    c.reject_request(request)
    assert c.get_num_new_matched_tokens(request, 0) == (0, False)
    assert c.request_finished(request, []) == (False, None)
    orders = c.build_connector_meta(step())
    assert orders == ConnectorMetadata(unholds=(Unhold("r", SOURCE, Reason.CANCELLED),))
    stats = c.get_kv_connector_stats()
    assert stats is not None
    assert stats.reasons == {"cancelled": 1}


def test_only_offers_of_ours_are_given_up() -> None:
    c = connector(can_receive=False)
    c.reject_request(wanting())
    c.reject_request(offering())
    c.reject_request(Request())
    assert not c.has_orders()


def test_every_rank_must_register() -> None:
    with pytest.raises(ConfigError, match=r"expected \(pp, tp\) \[\(0, 0\)\], got \[\]"):
        connector().set_xfer_handshake_metadata_pp_aware({})


@pytest.mark.parametrize("bind_tokens", [True, False])
def test_the_manifest_says_whether_tokens_are_bound(bind_tokens: bool) -> None:
    made = SchedulerConnector(
        Config(bind_tokens=bind_tokens),
        ENGINE,
        can_send=True,
        can_receive=True,
    )
    made.set_xfer_handshake_metadata_pp_aware({(0, 0): rank_manifest()})
    manifest = made.build_connector_meta(step()).manifest
    assert manifest is not None
    assert manifest.capabilities == (("bind_tokens",) if bind_tokens else ()) + ("verify", "parts")
