"""An engine of vLLM that is told to drain: what its scheduler does, awake and asleep; SIGTERM."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from kvxfer.connector.params import NOT_OFFERED_PARAMS
from kvxfer.transfer.wire import Draining
from kvxfer.transports.guard import unix_endpoint
from tests.connector.rig import until
from tests.connector.test_drain import asking
from tests.vllm import cases
from tests.vllm.engines import Connector, EngineConfig
from tests.vllm.scheduler_rig import OFFERED, Status
from tests.vllm.servers import serving
from tests.vllm.test_pins import prefill_and_pin
from tests.vllm.test_reports import prompt

if TYPE_CHECKING:
    from tests.vllm.scheduler_rig import Engine

# vLLM loads parts of torch that other parts of torch call deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

MakeEngine = Callable[..., "Engine"]


def endpoint_of(engine: Engine) -> str:
    manifest = engine.worker.get_handshake_metadata().manifest
    return unix_endpoint(manifest.control_endpoint)


def test_an_engine_that_steps_offers_nothing_more(make_engine: MakeEngine) -> None:
    source, sink = make_engine(role="kv_producer"), make_engine(role="kv_consumer", fill=0xEE)
    tokens = prompt(100)
    source.request("p", tokens, OFFERED, max_tokens=1)
    source.run()
    with asking(endpoint_of(source)) as ask:
        assert ask() == Draining(1, is_heard=False)
        source.run()
        source.run()
        until(lambda: ask() == Draining(1, is_heard=True))
        source.request("q", prompt(60, seed=3), OFFERED, max_tokens=1)
        source.run()
        assert source.params_of("q") == dict(NOT_OFFERED_PARAMS)
        request = sink.request("d", tokens, source.params_of("p"))
        sink.run_until(lambda: request.status == Status.RUNNING)
        source.run_until(source.is_quiet)
        until(lambda: ask() == Draining(0, is_heard=True))
    assert source.reports_of("finished_sending", "p") == 1


def test_an_engine_that_sleeps_serves_what_is_pinned(make_engine: MakeEngine) -> None:
    """Its scheduler cannot be asked: nothing waits in it, and the rank says what is open."""
    source, sink = make_engine(role="kv_producer"), make_engine(role="kv_consumer", fill=0xEE)
    tokens = prompt(100)
    params, _ = prefill_and_pin(source, tokens)
    with asking(endpoint_of(source)) as ask:
        assert ask() == Draining(1, is_heard=False)
        request = sink.request("d", tokens, params)
        sink.run_until(lambda: request.status == Status.RUNNING)
        until(lambda: ask() == Draining(0, is_heard=False))
    source.run_until(source.is_quiet)


@pytest.mark.parametrize("is_seen", [True, False])
def test_an_engine_that_sleeps_offers_nothing_after_the_answer(
    make_engine: MakeEngine, is_seen: bool
) -> None:
    """Nothing that a rank reports reaches its scheduler before the next request. Where the memory
    of no rank can be seen, that one is still offered.
    """
    source = make_engine(role="kv_producer")
    if not is_seen:
        said = dataclasses.replace(source.worker.get_handshake_metadata(), drain_flag=None)
        source.connector.scheduler_side.set_xfer_handshake_metadata_pp_aware({(0, 0): said})
    with asking(endpoint_of(source)) as ask:
        assert ask() == Draining(0, is_heard=False)
        source.request("q", prompt(60, seed=3), OFFERED, max_tokens=1)
        source.run()
        assert (source.params_of("q") == dict(NOT_OFFERED_PARAMS)) is is_seen
        source.request("r", prompt(60, seed=4), OFFERED, max_tokens=1)
        source.run()
        assert source.params_of("r") == dict(NOT_OFFERED_PARAMS)


def test_a_decode_engine_loads_nothing_more(make_engine: MakeEngine) -> None:
    """The prompt is computed there, and its source has the blocks back at once."""
    source, sink = make_engine(role="kv_producer"), make_engine(role="kv_consumer", fill=0xEE)
    tokens = prompt(100)
    source.request("p", tokens, OFFERED, max_tokens=1)
    source.run()
    with asking(endpoint_of(sink)) as ask:
        assert ask() == Draining(0, is_heard=False)
        sink.request("plain", prompt(30, seed=4), None, max_tokens=9)
        sink.run()
        sink.run()
        until(lambda: ask() == Draining(0, is_heard=True))
    request = sink.request("d", tokens, source.params_of("p"))
    orders = sink.run()
    assert not orders.loads
    assert request.status == Status.RUNNING
    source.run_until(source.is_quiet)  # long before the lease


@pytest.mark.slow
def test_a_server_that_ends_in_its_time_serves_what_it_offered() -> None:
    """SIGTERM with ``--shutdown-timeout``: vLLM steps until nobody needs the KV."""
    prefill = EngineConfig(
        Connector(role="kv_producer"), in_process=False, more={"shutdown_timeout": 60}
    )
    decode = EngineConfig(Connector(role="kv_consumer"), in_process=False)
    with serving(prefill, decode) as (source, sink, _):
        tokens, first = cases.prompt(300), cases.prompt(200)
        sink.complete(first, 1, kv_transfer_params=source.prefill(first))
        params = source.prefill(tokens)
        time.sleep(1.0)  # it sleeps by then: a pin that is younger than 0.1 s is not waited for
        os.kill(source.process.pid, signal.SIGTERM)
        until(lambda: "mode=drain" in source.process.log())
        before = sink.metric("vllm:kvxfer_requests_loaded_total")
        sink.complete(tokens, 1, kv_transfer_params=params)
        assert sink.metric("vllm:kvxfer_requests_loaded_total") == before + 1
        source.process.wait(60)
