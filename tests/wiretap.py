"""Somebody on the network who reads what two sides say to each other."""

from __future__ import annotations

import select
import socket
import threading
from contextlib import ExitStack


class Wiretap:
    """Connections to ``beside(endpoint)`` reach the endpoint; ``heard`` is what was said on them,
    both ways, by endpoint.
    """

    def __init__(self) -> None:
        self.heard: dict[str, bytearray] = {}
        self._taps: dict[str, str] = {}
        self._stack = ExitStack()

    def beside(self, endpoint: str) -> str:
        """Where to connect in the place of ``tcp://host:port``; always the same."""
        if endpoint not in self._taps:
            listener = self._stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            self._taps[endpoint] = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
            self.heard[endpoint] = bytearray()
            threading.Thread(target=self._accept, args=(listener, endpoint), daemon=True).start()
        return self._taps[endpoint]

    def close(self) -> None:
        """Take no more connections; those that are there end with their ends."""
        self._stack.close()

    def _accept(self, listener: socket.socket, endpoint: str) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        while True:
            try:
                near, _ = listener.accept()
            except OSError:  # it was closed
                return
            far = socket.create_connection((host, int(port)))
            args = near, far, self.heard[endpoint]
            threading.Thread(target=_pass_on, args=args, daemon=True).start()


def _pass_on(near: socket.socket, far: socket.socket, heard: bytearray) -> None:
    others = {near: far, far: near}
    with near, far:
        while True:
            for each in select.select(list(others), [], [])[0]:
                try:
                    said = each.recv(1 << 16)
                    others[each].sendall(said)
                except OSError:
                    return
                heard.extend(said)
                if not said:
                    return
