"""OpenTelemetry spans of loads: ``kvxfer.load`` for each rank, one child for each phase.

They are made from the load's report, when the engine collects it: nothing is done while a load
runs, and nothing at all unless OpenTelemetry's API can be imported and this process has set a
tracer provider. A load continues the trace of its request, whose ``trace_headers`` are the HTTP
headers ``traceparent`` and ``tracestate``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from kvxfer.connector.contract import RequestLike
from kvxfer.connector.metrics import PHASES, peer_label, phases_of, wire_label
from kvxfer.connector.records import LoadReport, TraceHeaders
from kvxfer.transfer.manifest import RankId

trace: Any = None
w3c: Any = None
with suppress(ImportError):
    trace = import_module("opentelemetry.trace")
    w3c = import_module("opentelemetry.trace.propagation.tracecontext")

NAMES = ("traceparent", "tracestate")  # W3C Trace Context
MAX_CHARS = 1024
"""Of a header, which clients write; longer ones are left out."""


def trace_of(request: RequestLike) -> TraceHeaders:
    headers: Mapping[str, str] | None = getattr(request, "trace_headers", None)
    if not headers:
        return ()
    found = ((name, headers.get(name, "")) for name in NAMES)
    return tuple((name, text) for name, text in found if text and len(text) <= MAX_CHARS)


def tell_of(loads: Iterable[LoadReport], rank: RankId) -> None:
    if trace is None or isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return  # nobody has set a provider
    now_s = time.monotonic()
    for load in loads:
        _tell(load, rank, now_s, time.time() - now_s)


def _tell(load: LoadReport, rank: RankId, now_s: float, epoch_s: float) -> None:
    """``epoch_s``: when this host's monotonic clock was zero."""
    phases: Sequence[str] = PHASES
    status = trace.Status()
    facts = {
        "kvxfer.request_id": load.request_id,
        "kvxfer.rank": str(rank),
        "kvxfer.peer": peer_label(load.peer),
        "kvxfer.wire": wire_label(load),
        "kvxfer.bytes": load.nbytes,
    }
    if load.reason is not None:
        ended = [end_s for end_s in (load.started_s, load.granted_s, load.placed_s) if end_s]
        phases = PHASES[: len(ended)]
        status = trace.Status(trace.StatusCode.ERROR, f"{load.reason.value}: {load.detail}")
        facts |= {"kvxfer.reason": load.reason.value, "kvxfer.detail": load.detail}
    tracer = trace.get_tracer("kvxfer")
    parent = w3c.TraceContextTextMapPropagator().extract(dict(load.trace))
    at_s = load.handed_s + epoch_s
    span = tracer.start_span(
        "kvxfer.load", parent, trace.SpanKind.CLIENT, facts, start_time=_ns(at_s)
    )
    within = trace.set_span_in_context(span, parent)
    for phase in phases:
        child = tracer.start_span(f"kvxfer.{phase}", within, start_time=_ns(at_s))
        at_s += phases_of(load, now_s)[phase]
        child.end(_ns(at_s))
    span.set_status(status)
    span.end(_ns(now_s + epoch_s))


def _ns(moment_s: float) -> int:
    return int(moment_s * 1e9)
