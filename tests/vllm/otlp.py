"""A collector of OpenTelemetry's spans, by OTLP over HTTP."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True, slots=True)
class Collector:
    """``spans``: protobuf records, in the order in which they came."""

    url: str
    spans: list[Any] = field(default_factory=list)

    def wait_for(self, name: str, trace_id: str, timeout_s: float = 120.0) -> Any:
        """The span of this name in this trace."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            for span in list(self.spans):
                if span.name == name and span.trace_id.hex() == trace_id:
                    return span
            assert time.monotonic() < deadline_s, [(s.name, s.trace_id.hex()) for s in self.spans]
            time.sleep(0.02)


@contextmanager
def collecting() -> Iterator[Collector]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    collector.spans.extend(scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing: tests look at what came."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}/v1/traces")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
