"""Spans of loads, as an exporter of OpenTelemetry gets them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec, module_from_spec
from typing import Any

import msgspec
import pytest

from kvxfer.connector import tracing
from kvxfer.connector.metrics import PHASES
from kvxfer.connector.records import ConnectorMetadata, NewLoad, SourceRef
from kvxfer.connector.tracing import MAX_CHARS, trace_of
from kvxfer.transfer.manifest import RankId
from tests.builders import EngineShape
from tests.connector.rig import POISON, Engine, until

trace = pytest.importorskip("opentelemetry.trace")
sdk = pytest.importorskip("opentelemetry.sdk.trace")
export = pytest.importorskip("opentelemetry.sdk.trace.export")
in_memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

ONE = EngineShape(num_kv_heads=2, num_blocks=8)
TRACE, SPAN = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
HEADERS = {"traceparent": f"00-{TRACE:032x}-{SPAN:016x}-01", "tracestate": "vendor=1"}


class _Request:
    request_id = "d"
    kv_transfer_params = None
    prompt_token_ids = ()
    num_prompt_tokens = 0
    status = None
    trace_headers: Any = HEADERS


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A tracer provider that keeps what it is told. The global one can be set once only."""
    kept = in_memory.InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(kept))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    yield kept
    provider.shutdown()


def load(sink: Engine, ref: SourceRef, **headers: str) -> None:
    request = _Request()
    request.trace_headers = headers
    order = NewLoad(
        request_id="d",
        source=ref,
        token_lo=0,
        token_hi=ref.num_tokens,
        block_ids=((3,),),
        trace=trace_of(request),
    )
    sink.step(ConnectorMetadata(loads=(order,)))
    until(lambda: sink.received("d"))
    sink.take_stats()


@pytest.mark.parametrize("wire", ["shm", "zmq"])
def test_a_load_continues_the_trace_of_its_request(spans: Any, wire: str) -> None:
    with (
        Engine(ONE, "prefill", fill=1, transport=wire) as source,
        Engine(ONE, "decode", fill=POISON, transport=wire) as sink,
    ):
        ref = source.offer("p", 16, [1])
        source.compute("p")
        load(sink, ref, **HEADERS)
        (report,) = sink.reports("d")
    *children, whole = spans.get_finished_spans()
    assert whole.name == "kvxfer.load"
    assert whole.context.trace_id == TRACE
    assert whole.parent.span_id == SPAN
    assert whole.context.trace_state.get("vendor") == "1"
    assert whole.kind is trace.SpanKind.CLIENT
    assert whole.status.is_ok
    assert dict(whole.attributes) == {
        "kvxfer.request_id": "d",
        "kvxfer.rank": "pp0tp0",
        "kvxfer.peer": source.endpoint.removeprefix("tcp://"),
        "kvxfer.wire": wire,
        "kvxfer.bytes": report.nbytes,
    }
    assert [child.name for child in children] == [f"kvxfer.{phase}" for phase in PHASES]
    assert {child.parent.span_id for child in children} == {whole.context.span_id}
    # They lie end to end, within the load; a float of seconds has 0.2 us.
    moments = [whole.start_time]
    for child in children:
        assert child.start_time == pytest.approx(moments[-1], abs=2000, rel=0)
        assert child.end_time >= child.start_time
        moments.append(child.end_time)
    assert moments[-1] == pytest.approx(whole.end_time, abs=2000, rel=0)
    read = children[PHASES.index("read")]
    took_s = (read.end_time - read.start_time) / 1e9
    granted_s = report.granted_s or report.started_s  # chunks may come before the Grant
    assert took_s == pytest.approx(report.placed_s - granted_s, abs=1e-5)


def test_a_load_that_failed_says_why(spans: Any) -> None:
    with (
        Engine(ONE, "prefill", fill=1) as source,
        Engine(ONE, "decode", fill=POISON) as sink,
    ):
        ref = source.offer("p", 16, [1])
        source.compute("p")
        load(sink, msgspec.structs.replace(ref, digest=b"x" * 32), **HEADERS)
    *children, whole = spans.get_finished_spans()
    assert whole.context.trace_id == TRACE
    assert whole.status.status_code is trace.StatusCode.ERROR
    assert whole.attributes["kvxfer.reason"] == "tokens"
    assert [child.name for child in children] == ["kvxfer.queue"]  # it was refused


def test_without_headers_a_load_is_a_trace_of_its_own(spans: Any) -> None:
    with (
        Engine(ONE, "prefill", fill=1) as source,
        Engine(ONE, "decode", fill=POISON) as sink,
    ):
        ref = source.offer("p", 16, [1])
        source.compute("p")
        load(sink, ref)
    *_, whole = spans.get_finished_spans()
    assert whole.parent is None


def test_nothing_is_made_without_a_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a span was made")

    monkeypatch.setattr(trace, "get_tracer_provider", trace.ProxyTracerProvider)
    monkeypatch.setattr(trace, "get_tracer", fail)
    with (
        Engine(ONE, "prefill", fill=1) as source,
        Engine(ONE, "decode", fill=POISON) as sink,
    ):
        ref = source.offer("p", 16, [1])
        source.compute("p")
        load(sink, ref, **HEADERS)


def test_nothing_is_made_without_the_api(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)  # as if it were not installed
    spec = find_spec(tracing.__name__)
    assert spec is not None
    assert spec.loader is not None
    without = module_from_spec(spec)
    spec.loader.exec_module(without)
    without.tell_of([object()], RankId(0, 0))  # not looked at


def test_headers_of_a_request() -> None:
    request = _Request()
    assert dict(trace_of(request)) == HEADERS
    request.trace_headers = None
    assert trace_of(request) == ()
    request.trace_headers = {"traceparent": "x" * (MAX_CHARS + 1), "other": "y"}
    assert trace_of(request) == ()
