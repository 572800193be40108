"""The connections of a stream wire's sink."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import pytest
import zmq

from kvxfer.transports.channel import Context, Socket
from kvxfer.transports.stream_links import Links
from kvxfer.transports.stream_reads import ReadLink


@dataclass(eq=False)
class Ends:
    """A link's two sockets, and the far ends of both."""

    control_endpoint: str
    socket: Socket
    monitor: Socket
    far: tuple[Socket, Socket]

    @property
    def dealer(self) -> Ends:
        return self


NewLink = Callable[[str], tuple[ReadLink, Ends]]


@pytest.fixture
def new_link() -> Iterator[NewLink]:
    made: list[Socket] = []

    def socket() -> Socket:
        made.append(context.socket(zmq.PAIR))
        return made[-1]

    def new(name: str) -> tuple[ReadLink, Ends]:
        near, far = (socket(), socket()), (socket(), socket())
        for number, (ours, theirs) in enumerate(zip(near, far, strict=True)):
            ours.bind(f"inproc://{name}-{number}")
            theirs.connect(f"inproc://{name}-{number}")
        ends = Ends(name, *near, far)
        return cast("ReadLink", ends), ends

    context: Context = zmq.Context()
    yield new
    for each in made:
        each.close(linger=0)
    context.term()


def test_links_are_found_by_rank_and_by_what_has_come(new_link: NewLink) -> None:
    links = Links()
    (first, _), (second, ends) = new_link("a"), new_link("b")
    assert not links
    assert not links.sockets()
    links.add(first)
    links.add(second)
    assert (links.get("a"), links.get("b"), links.get("c")) == (first, second, None)
    assert (len(links), links.all()) == (2, [first, second])
    assert list(links.sockets()) == [
        first.dealer.socket,
        first.dealer.monitor,
        second.dealer.socket,
        second.dealer.monitor,
    ]
    assert not list(links.readable())
    ends.far[1].send(b"x")
    assert second.dealer.monitor.poll(5000)
    assert list(links.readable()) == [(second.dealer.monitor, second)]


def test_what_is_dropped_on_the_way_is_not_looked_at_again(new_link: NewLink) -> None:
    links = Links()
    link, ends = new_link("a")
    links.add(link)
    for far, near in zip(ends.far, (link.dealer.socket, link.dealer.monitor), strict=True):
        far.send(b"x")
        assert near.poll(5000)
    seen = []
    for socket, found in links.readable():
        seen.append(socket)
        links.drop(found)
    assert len(seen) == 1
    assert not links.sockets()
    assert not list(links.readable())
