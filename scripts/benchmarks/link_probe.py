"""How long a few bytes take over a link, there and back."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from scripts.benchmarks.raw_sockets import CONNECT_S, connect, hear, listen, say, without_delay

NUM_TRIPS = 50
MESSAGE = bytes(8)


class Echo:
    """Says again whatever it hears, to one peer."""

    def __init__(self, host: str) -> None:
        self._listener = listen(host)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def address(self) -> tuple[str, int]:
        """Where it listens."""
        host, port = self._listener.getsockname()
        return host, port

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # the peer has closed, or nobody came
            self._listener.settimeout(CONNECT_S)
            with without_delay(self._listener.accept()[0]) as sock:
                sock.settimeout(None)
                while True:
                    say(sock, hear(sock))

    def close(self) -> None:
        """Stop listening."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


class RoundTrips:
    """The other end."""

    def measure(self, address: tuple[str, int]) -> list[float]:
        """Seconds of each."""
        taken_s = []
        with connect(address) as sock:
            for _ in range(NUM_TRIPS):
                started_s = time.perf_counter()
                say(sock, MESSAGE)
                hear(sock)
                taken_s.append(time.perf_counter() - started_s)
        return taken_s
