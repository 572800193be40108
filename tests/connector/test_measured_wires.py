"""What the trials have measured is what goes over the wire, and what the log says."""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from kvxfer.connector.peer import Moments, workload_of
from kvxfer.errors import ProtocolError, TransportUnavailable
from kvxfer.transfer.costs import WireCosts, Workload
from kvxfer.transfer.plan import make_plan
from kvxfer.transports.base import SendRequest, Trial
from kvxfer.transports.pipe import Slots
from kvxfer.transports.shm_direct import ShmSink
from kvxfer.transports.stream_sink import StreamSink
from kvxfer.transports.stream_source import StreamSource
from kvxfer.transports.stream_wire import Attach, ChunkHeader, decode_to_sink, decode_to_source
from tests.builders import EngineShape, build_manifest
from tests.connector.rig import POISON, Engine, expect_copied, until
from tests.spoken import watch_dealers
from tests.wires import pipe_of, use_sink, use_source

KIB, MIB = 1 << 10, 1 << 20
SHAPE = EngineShape(num_kv_heads=2, num_blocks=64)
TOKENS = 960
TOKEN_NBYTES = 2 * 2 * 2 * 8  # layers, planes, heads, bytes


class OnTheWire:
    """What the sink asks for when it attaches, what the source's wire is asked for, and what of it
    the sink hears; of engines that are made after it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = self
        self.slots: list[Slots] = []
        self.chunk_nbytes: list[int] = []
        self.headers: list[ChunkHeader] = []

        class Source(StreamSource):
            def submit_send(self, request: SendRequest) -> None:
                seen.chunk_nbytes.append(request.chunk_nbytes)
                super().submit_send(request)

        use_source(monkeypatch, "zmq", partial(Source, pipe_of("zmq")))
        watch_dealers(monkeypatch, self._hear, self._say)

    def _hear(self, _: object, frame: memoryview) -> None:
        with suppress(ProtocolError):  # of a connection for control
            message = decode_to_sink(frame)
            if isinstance(message, ChunkHeader):
                self.headers.append(message)

    def _say(self, _: object, frame: bytes) -> None:
        with suppress(ProtocolError):
            message = decode_to_source(memoryview(frame))
            if isinstance(message, Attach):
                self.slots.append(Slots(message.num_slots, message.slot_nbytes))


def measured(monkeypatch: pytest.MonkeyPatch, *, shm: WireCosts | str, zmq: WireCosts) -> None:
    """These are the costs, whatever they are."""

    def say(costs: WireCosts | str) -> Trial:
        if isinstance(costs, str):
            raise TransportUnavailable(costs)
        return Trial(costs)

    class Mapping(ShmSink):
        def trial(self, *_: object) -> Trial:
            return say(shm)

    class Stream(StreamSink):
        def trial(self, *_: object) -> Trial:
            return say(zmq)

    use_sink(monkeypatch, "shm", Mapping)
    use_sink(monkeypatch, "zmq", partial(Stream, pipe_of("zmq")))


def load(source: Engine, sink: Engine) -> None:
    """All of one request, with every byte compared."""
    blocks = range(60)
    ref = source.offer("p", TOKENS, blocks)
    source.compute("p")
    sink.load("d", ref, blocks, (0, TOKENS))
    until(lambda: sink.received("d"))
    assert sink.reasons("d") == {None}
    expect_copied(source, sink, list(blocks), list(blocks), (0, TOKENS))


@pytest.mark.parametrize(
    ("costs", "settings", "slots", "chunk_nbytes"),
    [
        # 10 ms away: as many as a connection has at most
        (WireCosts(1e-2, 1e-4, 1e9), {}, Slots(64, 256 * KIB), 256 * KIB),
        # near, and each message takes a second: as large as host memory has them
        (WireCosts(0.0, 1.0, 1e9), {}, Slots(6, 4 * MIB), 4 * MIB),
        (WireCosts(0.0, 1.0, 1e9), {"staging_nbytes": MIB}, Slots(6, 128 * KIB), 128 * KIB),
        (WireCosts(0.0, 1.0, 1e9), {"staging_slots": 3}, Slots(3, 8 * MIB), 4 * MIB),
        (
            WireCosts(1e-2, 1e-4, 1e9),
            {"chunk_nbytes": 4096, "staging_slots": 2},
            Slots(2, 4096),
            4096,
        ),
    ],
)
def test_chunks_and_slots_are_those_of_the_measured_costs_or_of_the_settings(
    monkeypatch: pytest.MonkeyPatch,
    costs: WireCosts,
    settings: dict[str, Any],
    slots: Slots,
    chunk_nbytes: int,
) -> None:
    measured(monkeypatch, shm="not here", zmq=costs)
    seen = OnTheWire(monkeypatch)
    with (
        Engine(SHAPE, "prefill", fill=None, transport="zmq") as source,
        Engine(SHAPE, "decode", fill=POISON, transport="zmq", **settings) as sink,
    ):
        load(source, sink)
    assert seen.slots == [slots]
    assert seen.chunk_nbytes == [chunk_nbytes]
    assert sum(header.nbytes for header in seen.headers) == TOKENS * TOKEN_NBYTES
    assert max(header.nbytes for header in seen.headers) <= chunk_nbytes
    assert {header.slot for header in seen.headers} <= set(range(slots.num_slots))


@pytest.mark.parametrize("has_shm", [True, False])
def test_auto_takes_a_direct_wire_that_works_and_logs_why(
    has_shm: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # 2048 tokens are 128 KiB: 13.1 ms, or 131 us, and twice 131 us to pack and unpack
    slow = WireCosts(0.0, 0.0, 1e7)
    measured(monkeypatch, shm=slow if has_shm else "no room", zmq=WireCosts(1e-6, 0.0, 1e9))
    seen = OnTheWire(monkeypatch)
    with (
        caplog.at_level(logging.INFO, "kvxfer.connector"),
        Engine(SHAPE, "prefill", fill=None) as source,
        Engine(SHAPE, "decode", fill=POISON) as sink,
    ):
        load(source, sink)
        (line,) = (text for text in caplog.messages if "engine prefill at" in text)
    assert re.search(
        r"met in \d+ ms \(hello \d+, plan \d+, trials \d+, ranks \d+, attach \d+\): ", line
    ), line
    assert bool(seen.headers) is not has_shm
    if has_shm:
        assert line.endswith(
            ": shm at 0.01 GB/s, 0 us: 2048 tokens (128 KiB) in 13.1 ms; "
            "not zmq: not tried, because shm works"
        )
    else:
        assert line.endswith(
            ": zmq at 1.00 GB/s, 1 us: 2048 tokens (128 KiB) in 0.394 ms in chunks of 256 KiB, "
            "7 slots of 256 KiB; not shm: no room"
        )


def test_the_parts_of_a_contact_add_up() -> None:
    clock_s = [5.0]
    moments = Moments(lambda: clock_s[0])
    for part, now_s in (("hello", 5.002), ("plan", 5.005), ("hello", 5.006), ("attach", 5.027)):
        clock_s[0] = now_s
        moments.end(part)
    assert str(moments) == "27 ms (hello 3, plan 3, attach 21)"


def test_what_a_route_weighs_by_hand() -> None:
    source, sink = (
        build_manifest(EngineShape(num_kv_heads=4)),
        EngineShape(tp_size=2, num_kv_heads=4),
    )
    plan = make_plan(source, build_manifest(sink, "d"))
    for route in plan.routes:
        # half the heads: 2 layers x 2 planes x 2 heads x 8 bytes; blocks of 16 tokens of 2 heads
        assert workload_of(route) == Workload(2048 * 64, 16 * 2 * 8)
