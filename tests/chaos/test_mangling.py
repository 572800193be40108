"""What storms do to chunks is done, is counted when it is, and never makes wrong KV."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest

from kvxfer.testing.peers import is_end
from kvxfer.transfer.wire import Reason
from kvxfer.transports.base import ReadBroke, ReadDone, ReadStopped, SinkCompletion
from kvxfer.transports.channel import Dealer, Router
from kvxfer.transports.stream_source import StreamSource
from kvxfer.transports.tcp_pipe import TcpSourceLane
from tests.chaos.mangling import CHUNK, Mangler
from tests.transports.pair import CONFIG, Pair, a_move, key_of

WAYS = (
    *((Router, "send"), (Dealer, "send"), (StreamSource, "_carry"), (TcpSourceLane, "_serve")),
    *((Router, "inspect"), (Dealer, "inspect"), (StreamSource, "inspect")),
)
NUMBER = 7
"""Of the injection."""
NUM_CHUNKS = 9


class Mangled:
    """A pair whose chunks are mangled in one way; ``done``: what was said of them."""

    def __init__(self, wire: str, kind: str, share: float) -> None:
        self.done: Counter[tuple[int, str]] = Counter()
        mangler = Mangler(3, lambda order, what: self.done.update([(order, what)]))
        mangler.install()
        self.pair = Pair(msgspec.structs.replace(CONFIG, transport=wire))
        self.pair.sink.attach(self.pair.manifest)
        mangler.begin(NUMBER, CHUNK, (kind,), share, 600.0)
        self.pair.start(key_of(1), a_move())

    def until(self, wanted: Callable[[], bool]) -> None:
        """Look at what is held back, too, as the IO thread does four times a second."""

        def is_so() -> bool:
            self.pair.source.inspect()
            return wanted()

        self.pair.until(is_so)

    def end(self) -> SinkCompletion:
        """Of the read."""
        self.until(lambda: any(is_end(key_of(1), each) for each in self.pair.seen))
        return self.pair.end(key_of(1))

    def num(self, kind: str) -> int:
        return self.done[NUMBER, f"chunk: {kind}"]


@contextmanager
def mangled(wire: str, kind: str, share: float = 1.0) -> Iterator[Mangled]:
    both = Mangled(wire, kind, share)
    try:
        yield both
    finally:
        both.pair.close()


@pytest.fixture(autouse=True)
def ways_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in WAYS:
        monkeypatch.setattr(owner, name, getattr(owner, name))


@pytest.mark.parametrize("kind", ["duplicate", "delay"])
@pytest.mark.parametrize("wire", ["zmq", "tcp"])
def test_late_and_double_chunks_are_taken_once(wire: str, kind: str) -> None:
    with mangled(wire, kind) as both:
        assert isinstance(both.end(), ReadDone)
        assert both.pair.content() == both.pair.expected(a_move())
        assert both.num(kind) == both.done.total() == NUM_CHUNKS


def test_chunks_out_of_order_are_taken_and_who_was_not_overtaken_was_late() -> None:
    with mangled("zmq", "reorder", 0.5) as both:
        assert isinstance(both.end(), ReadDone)
        assert both.pair.content() == both.pair.expected(a_move())
        assert both.done.total() == both.num("reorder") + both.num("delay")
        assert both.num("reorder") > 0


@pytest.mark.parametrize(
    ("wire", "kind"),
    [*(("zmq", kind) for kind in ("drop", "truncate", "flip")), ("tcp", "drop"), ("tcp", "flip")],
)
def test_what_makes_no_sense_is_not_taken(wire: str, kind: str) -> None:
    """The read stays open until its sink gives it up, or the connection ends."""
    with mangled(wire, kind) as both:
        both.until(lambda: both.num(kind) > 1)
        if not any(is_end(key_of(1), each) for each in both.pair.seen):
            both.pair.sink.stop_read(key_of(1))
        assert isinstance(both.end(), ReadBroke | ReadStopped)


def test_a_connection_that_ends_in_the_middle_of_a_chunk_breaks_its_read() -> None:
    with mangled("tcp", "truncate") as both:
        end = both.end()
        assert isinstance(end, ReadBroke)
        assert end.reason is Reason.PEER_LOST
        assert both.num("truncate") > 0


def test_where_nothing_can_befall_a_chunk_nothing_is_counted() -> None:
    with mangled("tcp", "reorder") as both:
        assert isinstance(both.end(), ReadDone)
        assert not both.done
