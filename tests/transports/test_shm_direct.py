"""The end of a read over shared memory: nothing is said before the running copy has ended."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import msgspec
import pytest

from kvxfer.transfer.wire import Reason
from kvxfer.transports.base import Progress, ReadBroke, ReadStopped
from kvxfer.transports.copy_thread import CopyJob
from tests.transports.pair import CONFIG, Pair, a_move, key_of
from tests.wires import run_pieces

SHM = msgspec.structs.replace(CONFIG, transport="shm")


class HeldCopy:
    """The copy of a read, after which there would be three more pieces: the second one waits until
    it is let go.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        self.num_begun = self.num_ended = 0
        run_pieces(monkeypatch, "shm", self.run)

    def run(self, job: CopyJob) -> bool:
        self.num_begun += 1
        job.run()
        if self.num_begun == 2:
            self.entered.set()
            assert self.opened.wait(60)
        self.num_ended += 1
        return self.num_begun < 4


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> HeldCopy:
    return HeldCopy(monkeypatch)


@pytest.fixture
def pair(held: HeldCopy) -> Iterator[Pair]:
    pair = Pair(SHM)
    pair.sink.attach(pair.manifest)
    pair.start(key_of(1), a_move())
    assert held.entered.wait(60)
    yield pair
    held.opened.set()
    pair.close()


def poll_often(pair: Pair) -> None:
    """The copy thread stands still, so another look finds nothing that this does not."""
    for _ in range(3):
        pair.seen.extend(pair.sink.poll())


def test_a_stopped_read_has_not_ended_while_a_piece_is_copied(pair: Pair, held: HeldCopy) -> None:
    pair.sink.stop_read(key_of(1))
    poll_often(pair)
    assert not pair.seen
    pair.sink.stop_read(key_of(1))  # to ask again changes nothing
    poll_often(pair)
    assert not pair.seen
    held.opened.set()
    assert pair.end(key_of(1), timeout_s=60) == ReadStopped(key_of(1))
    assert (held.num_begun, held.num_ended) == (2, 2)
    after = pair.content()
    pair.copy_thread.close()  # whatever it would still do
    assert pair.content() == after


def test_a_detached_read_has_not_ended_while_a_piece_is_copied(pair: Pair, held: HeldCopy) -> None:
    pair.sink.detach(pair.manifest.control_endpoint)
    poll_often(pair)
    assert all(isinstance(each, Progress) for each in pair.seen)
    held.opened.set()
    end = pair.end(key_of(1), timeout_s=60)
    assert isinstance(end, ReadBroke)
    assert end.reason is Reason.PEER_LOST
    assert (held.num_begun, held.num_ended) == (2, 2)


def test_close_waits_for_the_piece_that_is_copied(pair: Pair, held: HeldCopy) -> None:
    closing = threading.Thread(target=pair.sink.close)
    closing.start()
    closing.join(0.1)  # one that does not wait is gone by then
    assert closing.is_alive()
    held.opened.set()
    closing.join(60)
    assert not closing.is_alive()
    assert held.num_ended == 2
