"""What loads are compared with: loops that move the same request without a connector."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from kvxfer.transports.pipe import Slots
from scripts.benchmarks import least_ucx
from scripts.benchmarks.devices import Devices
from scripts.benchmarks.least_ucx import LeastUcx, UcxLoop
from scripts.benchmarks.least_ways import LAUNCH, LaunchWays
from scripts.benchmarks.members import SINK, SOURCE, Member
from scripts.benchmarks.plain_ways import MEMCPY
from scripts.benchmarks.pools import TINY, Request, request_of
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
        assert ways.run(LAUNCH, request).total_s > 0
        assert_moved(request, ways, ways)
        ways.poison()
        ways.run(MEMCPY, request)
        assert ways.digests(SINK, request, [1]) != ways.digests(SOURCE, request, [1])


@pytest.fixture(scope="module", params=LAYOUTS)
def loops(request: pytest.FixtureRequest) -> Iterator[tuple[LeastUcx, Request]]:
    moved = request_of(TINY, request.param, 80, 128)
    # 40 KiB: more chunks than slots. Two processes, because Triton's interpreter has one thread
    with closing(LeastUcx(CPU, moved, Slots(2, 8192))) as least:
        yield least, moved


@needs_ucxx
def test_loops_move_the_request_again_and_again(loops: tuple[LeastUcx, Request]) -> None:
    least, request = loops
    source, sink = least.members
    tokens = list(range(request.num_tokens))
    given = source.call(list, "digests", SOURCE, request, tokens)
    for _ in range(2):
        sink.call(object, "poison")
        timing = least.run(request)
        assert timing.total_s > timing.post_s > 0
        assert sink.call(list, "digests", SINK, request, tokens) == given
        assert sink.call(bool, "is_untouched_beside", request)


@needs_ucxx
def test_a_loop_whose_other_side_is_silent_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(least_ucx, "END_S", 0.1)
    request = request_of(TINY, LAYOUTS[0], 80, 128)
    with (
        closing(UcxLoop(SOURCE, CPU, request.source, Slots(2, 8192))) as source,
        closing(UcxLoop(SINK, CPU, request.sink, Slots(2, 8192))) as sink,
    ):
        source.meet(sink.address())
        sink.meet(source.address())
        with pytest.raises(TimeoutError, match="other side"):
            sink.run(LAUNCH, request)
        source._next_word()  # the one that nobody heard
        source.serve(request)
        with pytest.raises(TimeoutError, match="other side"):
            source.served()
