"""The connections to one source engine, and the watch over their silence. On the IO thread."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvxfer.connector.access import server_key_of
from kvxfer.connector.control import ControlClient
from kvxfer.connector.io_thread import Timer
from kvxfer.connector.peer_records import Surroundings
from kvxfer.transfer.wire import Ping, ToSink, ToSource


class PeerLinks:
    """Connections by endpoint, each made at first use.

    Raises KeyError where CURVE pins no key for the engine.

    Args:
        on_message: called with the endpoint and each message.
        on_lost: called with what happened when a connection ended, was refused or stayed silent.
    """

    def __init__(
        self,
        around: Surroundings,
        engine_id: str,
        on_message: Callable[[str, ToSink], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._around = around
        self._server_key = server_key_of(around.config, engine_id)
        self._on_message = on_message
        self._on_lost = on_lost
        self._clients: dict[str, ControlClient] = {}
        self._num_loads = 0
        self._timer: Timer | None = None

    def open(self, endpoint: str) -> ControlClient:
        """The connection to an endpoint."""
        if endpoint not in self._clients:
            self._clients[endpoint] = ControlClient(
                self._around.io,
                self._around.context,
                self._around.config,
                self._around.ledger,
                endpoint,
                self._server_key,
                lambda message: self._on_message(endpoint, message),
                lambda detail: self._on_lost(f"{endpoint}: {detail}"),
            )
        return self._clients[endpoint]

    def problem(self, endpoint: str) -> str:
        """Why the connection to an endpoint does not stand, as far as anybody knows."""
        client = self._clients.get(endpoint)
        return client.dealer.problem if client is not None else ""

    @property
    def is_refused(self) -> bool:
        """A listener does not let this engine in."""
        return any(client.dealer.is_refused for client in self._clients.values())

    def note(self, endpoint: str, problem: str) -> None:
        """The other side says what is wrong."""
        if endpoint in self._clients:
            self._clients[endpoint].dealer.problem = problem

    def send(self, endpoint: str, message: ToSource) -> None:
        """Queue a message."""
        if self._around.io.is_lent:
            self._around.io.defer(partial(self.send, endpoint, message))
            return
        self.open(endpoint).send(message)

    def begin_load(self) -> None:
        """A load waits for answers: from now on silence is noticed."""
        self._num_loads += 1
        if self._timer is None:
            for client in self._clients.values():
                client.unanswered_s = None  # of an earlier load; nobody has listened since
            self._around.io.guard(self._listen)

    def end_load(self) -> None:
        """A load has ended."""
        self._num_loads -= 1

    def close(self) -> None:
        """End all connections; what was sent may still leave."""
        if self._timer is not None:
            self._timer.cancel()
        self._num_loads = 0
        for client in self._clients.values():
            client.close()

    def _listen(self) -> None:
        """Ping a rank that has been silent; one that does not answer is lost."""
        io, silent_s = self._around.io, self._around.config.peer_silent_s
        self._timer = None
        if not self._num_loads:
            return
        self._timer = io.after(silent_s / 8, self._listen)
        now_s = io.now()
        for client in self._clients.values():
            if client.unanswered_s is None:
                if now_s - client.heard_s >= silent_s / 4:
                    client.unanswered_s = now_s
                    io.defer(partial(client.send, Ping()))
            elif now_s - client.unanswered_s >= silent_s / 2:
                silence_s = now_s - client.heard_s
                self._on_lost(f"{client.endpoint} was silent for {silence_s:.1f} s")
                return
