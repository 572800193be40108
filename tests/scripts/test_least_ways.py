"""What loads are compared with: loops that move the same request without a connector."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from kvxfer.bench import ucx_loop
from kvxfer.bench.contenders import Way, meet
from kvxfer.bench.least import LEAST, LaunchWays
from kvxfer.bench.members import SIDES, SINK, SOURCE, Devices, Member
from kvxfer.bench.plain_ways import MEMCPY
from kvxfer.bench.pools import TINY, Request, request_of
from kvxfer.bench.ucx_loop import RAW_UCX, UcxLoop
from kvxfer.bench.wires import Cut, wire_config
from kvxfer.bench.workers import FORK_SERVER, Worker, close_all
from kvxfer.transports.pipe import Slots
from tests.helpers import needs_ucxx

CPU = Devices("cpu", "cpu", "ucx")
LAYOUTS = ("HND16->NHD64", "NHD8->NHD8", "NHD24->HND16")


def assert_moved(request: Request, source: Member, sink: Member) -> None:
    tokens = list(range(request.num_tokens))
    assert sink.digests(SINK, request, tokens) == source.digests(SOURCE, request, tokens)
    assert sink.is_untouched_beside(request)


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_a_launch_moves_the_request(layouts: str) -> None:
    request = request_of(TINY, layouts, 80, 128)
    with closing(LaunchWays(CPU, max(request.source.nbytes, request.sink.nbytes))) as ways:
        ways.poison()
        assert ways.run(LEAST, request).total_s > 0
        assert_moved(request, ways, ways)
        ways.poison()
        ways.run(MEMCPY, request)
        assert ways.digests(SINK, request, [1]) != ways.digests(SOURCE, request, [1])


SLOTS = Slots(2, 8192)
CONFIG = wire_config("ucx")


@pytest.fixture(scope="module", params=LAYOUTS)
def loops(request: pytest.FixtureRequest) -> Iterator[tuple[Way, Request]]:
    moved = request_of(TINY, request.param, 80, 128)
    # 40 KiB: more chunks than slots. Two processes, because Triton's interpreter has one thread
    source, sink = workers = [
        Worker(side, UcxLoop, side, CPU, pool, SLOTS, CONFIG, method=FORK_SERVER)
        for side, pool in zip(SIDES, (moved.source, moved.sink), strict=True)
    ]
    try:
        meet(source, sink)
        yield Way(LEAST, source, sink, is_told=True), moved
    finally:
        close_all(workers)


@needs_ucxx
def test_loops_move_the_request_again_and_again(loops: tuple[Way, Request]) -> None:
    way, request = loops
    tokens = list(range(request.num_tokens))
    given = way.source.call(list, "digests", SOURCE, request, tokens)
    for _ in range(2):
        way.sink.call(object, "poison")
        timing = way.run(request)
        assert timing.total_s > timing.post_s > 0
        assert way.sink.call(list, "digests", SINK, request, tokens) == given
        assert way.sink.call(bool, "is_untouched_beside", request)


@needs_ucxx
def test_raw_messages_are_cut_as_they_are_told_and_come_whole() -> None:
    request = request_of(TINY, LAYOUTS[0], 80, 128)
    with (
        closing(UcxLoop(SOURCE, CPU, None, SLOTS, CONFIG)) as source,
        closing(UcxLoop(SINK, CPU, None, SLOTS, CONFIG)) as sink,
    ):
        source.meet(sink.address())
        sink.meet(source.address())
        for cut in (Cut(4096, 1), Cut(1 << 20, 8)):  # more than a slot has, and more slots
            for end in (source, sink):
                end.use(request, cut)
            assert not sink.is_intact(request) or cut.num_slots > 1
            for _ in range(2):
                source.serve(request)
                assert 0 < sink.run(RAW_UCX, request).total_s < 0.09  # nobody slept in vain
                source.served()
            assert sink.is_intact(request)


@needs_ucxx
def test_a_loop_whose_other_side_is_silent_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx_loop, "END_S", 0.1)
    request = request_of(TINY, LAYOUTS[0], 80, 128)
    with (
        closing(UcxLoop(SOURCE, CPU, request.source, SLOTS, CONFIG)) as source,
        closing(UcxLoop(SINK, CPU, request.sink, SLOTS, CONFIG)) as sink,
    ):
        source.meet(sink.address())
        sink.meet(source.address())
        with pytest.raises(TimeoutError, match="other side"):
            sink.run(LEAST, request)
        source._next_word()  # the one that nobody heard
        source.serve(request)
        with pytest.raises(TimeoutError, match="other side"):
            source.served()
