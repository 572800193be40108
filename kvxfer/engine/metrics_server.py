"""``/metrics`` of a reference engine, for Prometheus. Needs the extra ``metrics``."""

from __future__ import annotations

import os
import threading
from functools import partial
from typing import Any

from kvxfer.connector.metrics import Exporter, Kind, Tables
from kvxfer.errors import ConfigError
from kvxfer.extras import install

PREFIX = "kvxfer_"
_FRESH_S = 2.0
"""How long a scrape waits for the step that collects the ranks' numbers, at most."""


class MetricsServer:
    """Serves on a thread of its own; the driver puts the numbers in. A scrape asks for a step by
    ``fileno``, because ranks report in steps and an idle engine makes none.
    """

    def __init__(self, address: str) -> None:
        """Listen on ``HOST:PORT`` (port 0: any). ConfigError where that cannot be had."""
        try:
            import prometheus_client as client
        except ImportError as e:
            raise ConfigError(
                f"metrics: prometheus-client is not installed; {install('metrics')}"
            ) from e
        registry = client.CollectorRegistry()
        registry.register(self)  # first: what follows is then fresh
        self._exporter = Exporter(
            {
                Kind.COUNTER: partial(client.Counter, registry=registry),
                Kind.GAUGE: partial(client.Gauge, registry=registry),
                Kind.HISTOGRAM: partial(client.Histogram, registry=registry),
            },
            PREFIX,
        )
        self._stepped = threading.Condition()
        self._num_steps = 0
        host, _, port = address.rpartition(":")
        try:
            self._server, self._thread = client.start_http_server(
                int(port), host.strip("[]"), registry
            )
        except OSError as e:
            raise ConfigError(
                f"metrics: cannot listen on {address}: {e}; choose another address or port"
            ) from e
        self.endpoint = f"http://{host}:{self._server.server_port}/metrics"
        self.fileno = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def observe(self, tables: Tables) -> None:
        self._exporter.observe(tables)
        with self._stepped:
            self._num_steps += 1
            self._stepped.notify_all()

    def collect(self) -> list[Any]:
        """Called by the registry before it collects the metrics: waits for a step."""
        with self._stepped:
            if self.fileno < 0:  # closed since the scraper has connected
                return []
            before = self._num_steps
            os.eventfd_write(self.fileno, 1)
            self._stepped.wait_for(lambda: self._num_steps > before, _FRESH_S)
        return []

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        with self._stepped:  # scrapes may still run: what has the number next is not theirs
            fileno, self.fileno = self.fileno, -1
        os.close(fileno)
