"""An engine that drains: what it takes, what goes on to its end, who may tell it so, and what it
says.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from kvxfer.connector.metrics import key
from kvxfer.connector.params import NOT_OFFERED_PARAMS, Plain, make_params, parse_params
from kvxfer.connector.records import ConnectorMetadata, KVConnectorOutput, SourceRef
from kvxfer.connector.scheduler_side import SchedulerConnector
from kvxfer.transfer.wire import (
    Drain,
    Draining,
    Malformed,
    OfferRef,
    Reason,
    ToSink,
    decode_to_sink,
    encode,
)
from kvxfer.transports.guard import unix_endpoint
from tests.builders import EngineShape
from tests.connector.rig import POISON, Engine, service_of, until
from tests.connector.scheduler import SOURCE, Blocks, Request, connector, step

SHAPE = EngineShape()
OFFER = {"do_remote_decode": True}
DRAINS = Plain("draining", "this engine drains, and takes nothing new")
TIMEOUT_MS = 30_000


def params_of(source: SourceRef) -> dict[str, Any]:
    return make_params(source, request_id="r", number=1, tp_size=1, pp_size=1)


def load_of(request_id: str) -> Request:
    """Of an offer of its own."""
    offer = OfferRef(request_id.encode().ljust(16), b"s" * 16)
    return Request(
        request_id, kv_transfer_params=params_of(msgspec.structs.replace(SOURCE, offer=offer))
    )


# ------------------------------------------------------------------ the scheduler side


def test_nothing_new_is_offered_or_loaded() -> None:
    made = connector()
    made.drain()
    made.drain()
    assert made.on_new_request(Request("o", kv_transfer_params=OFFER)) == DRAINS
    assert made.on_new_request(load_of("l")) == DRAINS
    (unhold,) = made.build_connector_meta(step()).unholds  # the source has its blocks back
    assert (unhold.request_id, unhold.reason) == ("l", Reason.CANCELLED)
    assert made.get_num_new_matched_tokens(load_of("l"), 0) == (0, False)
    assert made.request_finished(Request("o"), [1]) == (False, dict(NOT_OFFERED_PARAMS))
    assert made.request_finished(Request("l"), [1]) == (False, None)
    assert made.num_open == 0
    stats = made.get_kv_connector_stats()
    assert stats is not None
    assert stats.reasons == {"draining": 2}


def test_who_forwards_what_is_said_instead_of_an_offer_gets_a_plain_request() -> None:
    assert parse_params(NOT_OFFERED_PARAMS).__class__ is Plain
    assert connector().on_new_request(Request(kv_transfer_params=dict(NOT_OFFERED_PARAMS))) is None


def test_plain_requests_are_nobodys_business() -> None:
    made = connector()
    made.drain()
    assert made.on_new_request(Request("plain")) is None
    assert made.request_finished(Request("plain"), [1]) == (False, None)


def _want(made: SchedulerConnector) -> None:
    assert made.on_new_request(Request("o", kv_transfer_params=OFFER)) is None
    assert made.on_new_request(load_of("l")) is None


def _schedule(made: SchedulerConnector) -> None:
    made.get_num_new_matched_tokens(load_of("l"), 0)
    made.update_state_after_alloc(load_of("l"), Blocks([1, 2, 3]), 39)
    metadata = made.build_connector_meta(step(new=(("o", [4, 5, 6], 0),), counts={"o": 40}))
    assert [each.request_id for each in metadata.offers] == ["o"]
    assert [each.request_id for each in metadata.loads] == ["l"]


def _compute(made: SchedulerConnector) -> None:
    made.update_connector_output(KVConnectorOutput(finished_recving={"l"}))


def _finish(made: SchedulerConnector) -> None:
    keeps, params = made.request_finished(Request("o"), [4, 5, 6])
    assert keeps
    assert params is not None
    assert params["do_remote_prefill"]
    made.request_finished(load_of("l"), [1, 2, 3])


def _send(made: SchedulerConnector) -> None:
    made.update_connector_output(KVConnectorOutput(finished_sending={"o"}))


STEPS: list[tuple[Callable[[SchedulerConnector], None], int]] = [
    (_want, 2),
    (_schedule, 2),
    (_compute, 1),
    (_finish, 1),
    (_send, 0),
]
"""What happens to an offer and a load in turn, and how many of them are open then."""


@pytest.mark.parametrize("told_after", range(1, len(STEPS) + 1))
def test_what_was_asked_for_before_goes_on_to_its_end(told_after: int) -> None:
    """Told by a rank, in every state of an offer and of a load."""
    made = connector()
    told: list[int | None] = []
    for number, (do, num_open) in enumerate(STEPS, 1):
        do(made)
        assert made.num_open == num_open
        if number == told_after:
            assert not made.is_draining
            made.update_connector_output(KVConnectorOutput(must_drain=True))
            assert made.is_draining
        if made.has_orders():
            told.append(made.build_connector_meta(step()).num_open)
    numbers = [number for number in told if number is not None]
    assert numbers[-1] == 0, "the ranks know that nothing is left"
    assert numbers == sorted(set(numbers), reverse=True), "and each change once"
    assert not made.has_orders()


def test_a_load_that_is_aborted_is_open_until_it_was_reported() -> None:
    made = connector()
    _want(made)
    _schedule(made)
    made.drain()
    made.request_finished(load_of("l"), [1, 2, 3])
    assert made.num_open == 2
    _compute(made)
    assert made.num_open == 1


# ------------------------------------------------------------------ a rank, and who tells it


@contextmanager
def asking(endpoint: str, *keys: str) -> Iterator[Callable[[], ToSink]]:
    """Ask over one connection. ``keys``: own public and secret one, and the engine's."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        if keys:
            dealer.curve_publickey, dealer.curve_secretkey, dealer.curve_serverkey = (
                each.encode() for each in keys
            )
        dealer.connect(endpoint)

        def ask() -> ToSink:
            dealer.send(encode(Drain()))
            assert dealer.poll(TIMEOUT_MS)
            return decode_to_sink(dealer.recv())

        yield ask


def test_a_process_of_its_user_drains_an_engine() -> None:
    with Engine(SHAPE, "prefill", fill=None, transport="shm") as engine:
        worker = engine.workers[0]
        engine.offer("r", 40, (1, 2, 3))
        wakes_of = worker.activity_fileno()
        with asking(unix_endpoint(engine.endpoint)) as ask:
            assert ask() == Draining(1, is_heard=False)
            until(lambda: _is_readable(wakes_of))  # an idle engine steps for it
            output = worker.build_output(())
            assert output is not None
            assert output.must_drain
            assert not _is_readable(wakes_of)
            engine.step(ConnectorMetadata(num_open=3))
            until(lambda: ask() == Draining(3, is_heard=True))
            assert not _is_readable(wakes_of), "who has heard is not woken again"
            engine.end("r")
            engine.step(ConnectorMetadata(num_open=0))
            until(lambda: ask() == Draining(0, is_heard=True))
        assert output.kv_connector_stats is not None
        rank = str(engine.manifest.ranks[0].rank)
        assert output.kv_connector_stats.gauges[key("draining", rank)] == 1


def _is_readable(descriptor: int) -> bool:
    poller = zmq.Poller()
    poller.register(descriptor, zmq.POLLIN)
    return bool(poller.poll(0))


def test_nobody_drains_an_engine_over_its_port_without_a_key() -> None:
    with Engine(SHAPE, "prefill", fill=None, transport="shm") as engine:
        with asking(engine.endpoint) as ask:
            answer = ask()
            assert isinstance(answer, Malformed)
            assert answer.detail.startswith("drain: expected a process of the engine's user")
        assert not service_of(engine).is_draining
        assert engine.count("control.not_own") == 1


def test_its_own_key_drains_an_engine_and_no_other_key_that_is_pinned() -> None:
    (own, own_secret), (other, other_secret) = (
        [each.decode() for each in zmq.curve_keypair()] for _ in range(2)
    )
    keys: dict[str, Any] = {"curve_public_key": own, "curve_secret_key": own_secret}
    keys["curve_server_keys"] = {"prefill": own, "decode": other}
    with Engine(SHAPE, "prefill", fill=None, transport="shm", **keys) as engine:
        with asking(engine.endpoint, other, other_secret, own) as ask:
            assert isinstance(ask(), Malformed)
        assert not service_of(engine).is_draining
        with asking(engine.endpoint, own, own_secret, own) as ask:
            assert ask() == Draining(0, is_heard=False)
        assert service_of(engine).is_draining


@pytest.mark.parametrize("wire", ["shm", "zmq"])
def test_an_engine_that_drains_serves_its_open_offers_before_it_ends(wire: str) -> None:
    """One that was computed; the one that never will be is not waited for."""
    with (
        Engine(SHAPE, "prefill", fill=None, transport=wire) as source,
        Engine(SHAPE, "decode", fill=POISON, transport=wire) as sink,
    ):
        worker = source.workers[0]
        ref = source.offer("r", 40, (1, 2, 3))
        source.offer("never", 40, (4, 5, 6))
        source.compute("r")
        until(lambda: source.count("offers.opened"))
        assert worker.serve_open(60.0), "whoever does not drain waits for nobody"
        worker.drain()
        assert not worker.serve_open(0.05)
        served: list[bool] = []
        ending = threading.Thread(target=lambda: served.append(worker.serve_open(60.0)))
        ending.start()
        sink.load("r", ref, (3, 2, 1), (0, 40))
        until(lambda: sink.received("r"))
        assert sink.reasons("r") == {None}
        ending.join()
        assert served == [True]
