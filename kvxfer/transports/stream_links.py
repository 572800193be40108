"""The connections of one sink of a stream wire, and on which of them something has come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvxfer.transports.channel import Socket
from kvxfer.transports.stream_reads import ReadLink
from kvxfer.transports.stream_wire import make_poller, readable


class Links:
    """One for each source rank, by its control endpoint."""

    def __init__(self) -> None:
        self._links: dict[str, ReadLink] = {}
        self._by_socket: dict[Socket, ReadLink] = {}
        self._poller = make_poller(())

    def __len__(self) -> int:
        return len(self._links)

    def get(self, control_endpoint: str) -> ReadLink | None:
        """The one to this rank."""
        return self._links.get(control_endpoint)

    def all(self) -> list[ReadLink]:
        """Those of now: any of them may be dropped on the way."""
        return list(self._links.values())

    def sockets(self) -> Sequence[Socket]:
        """A DEALER and its monitor for each."""
        return tuple(self._by_socket)

    def readable(self) -> Iterator[tuple[Socket, ReadLink]]:
        """Sockets that have something, of links that were not dropped on the way."""
        for socket in readable(self._poller):
            link = self._by_socket.get(socket)
            if link is not None:
                yield socket, link

    def add(self, link: ReadLink) -> None:
        """A new one."""
        self._links[link.control_endpoint] = link
        self._watch()

    def drop(self, link: ReadLink) -> None:
        """It is closed next."""
        del self._links[link.control_endpoint]
        self._watch()

    def _watch(self) -> None:
        self._by_socket = {
            socket: link
            for link in self._links.values()
            for socket in (link.dealer.socket, link.dealer.monitor)
        }
        self._poller = make_poller(tuple(self._by_socket))
