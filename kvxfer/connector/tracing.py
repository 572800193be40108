"""OpenTelemetry spans of loads: ``kvxfer.load`` for each rank, one child for each phase.

They are made from the load's report, when the engine collects it: nothing is done while a load
runs, and nothing at all unless OpenTelemetry's API can be imported and this process has set a
tracer provider. A load continues the trace of its request, whose ``trace_headers`` are the HTTP
headers ``traceparent`` and ``tracestate``.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterable, Mapping
from types import ModuleType

from kvxfer.connector.contract import RequestLike
from kvxfer.connector.metrics import PHASES, peer_label, phases_of
from kvxfer.connector.records import LoadReport, TraceHeaders
from kvxfer.transfer.manifest import RankId

NAMES = ("traceparent", "tracestate")  # W3C Trace Context
MAX_CHARS = 1024
"""Of a header, which clients write; longer ones are left out."""


def trace_of(request: RequestLike) -> TraceHeaders:
    """The headers of the request's trace; none where the engine has none."""
    headers: Mapping[str, str] = getattr(request, "trace_headers", None) or {}
    found = ((name, headers.get(name, "")) for name in NAMES)
    return tuple((name, text) for name, text in found if text and len(text) <= MAX_CHARS)


class Tracing:
    """Tells of the loads of one rank."""

    def __init__(self, rank: RankId) -> None:
        self._rank = str(rank)
        self._api = _imported("opentelemetry.trace")
        self._w3c = _imported("opentelemetry.trace.propagation.tracecontext")

    def tell(self, loads: Iterable[LoadReport]) -> None:
        """Make the spans of loads that the engine collects now."""
        if self._api is None or self._w3c is None:
            return
        if isinstance(self._api.get_tracer_provider(), self._api.ProxyTracerProvider):
            return  # nobody has set one
        now_s = time.monotonic()
        for load in loads:
            self._tell(load, now_s, time.time() - now_s)

    def _tell(self, load: LoadReport, now_s: float, epoch_s: float) -> None:
        """``epoch_s``: when this host's monotonic clock was zero."""
        assert self._api is not None
        assert self._w3c is not None
        tracer = self._api.get_tracer("kvxfer")
        facts = {
            "kvxfer.request_id": load.request_id,
            "kvxfer.rank": self._rank,
            "kvxfer.peer": peer_label(load.peer),
            "kvxfer.wire": "+".join(load.transports) or "none",
            "kvxfer.bytes": load.nbytes,
        }
        if load.reason is not None:
            facts |= {"kvxfer.reason": load.reason.value, "kvxfer.detail": load.detail}
        at_s = load.handed_s + epoch_s
        parent = self._w3c.TraceContextTextMapPropagator().extract(dict(load.trace))
        span = tracer.start_span(
            "kvxfer.load", parent, self._api.SpanKind.CLIENT, facts, start_time=_ns(at_s)
        )
        within = self._api.set_span_in_context(span, parent)
        for phase in PHASES if load.reason is None else _reached(load):
            took_s = phases_of(load, now_s)[phase]
            child = tracer.start_span(f"kvxfer.{phase}", within, start_time=_ns(at_s))
            at_s += took_s
            child.end(_ns(at_s))
        if load.reason is not None:
            code = self._api.StatusCode.ERROR
            span.set_status(self._api.Status(code, f"{load.reason.value}: {load.detail}"))
        span.end(_ns(now_s + epoch_s))


def _reached(load: LoadReport) -> tuple[str, ...]:
    """The phases that a load which failed had ended."""
    ends_s = (load.started_s, load.granted_s, load.placed_s)
    return tuple(phase for phase, end_s in zip(PHASES, ends_s, strict=False) if end_s)


def _imported(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _ns(moment_s: float) -> int:
    return int(moment_s * 1e9)
