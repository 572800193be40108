"""Routes of loads with windows, without sockets: every pair of engines against a simulation that
drops blocks token by token, and a copy that goes token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace as Bag
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.connector.given_offer import PullRefused, asked_of, own_ids, read_pull
from kvxfer.connector.load_routes import (
    Addressing,
    RouteRun,
    make_routes,
    next_read,
    open_tokens_of,
    take_granted_ids,
    ways_of,
)
from kvxfer.connector.peer import Peer
from kvxfer.connector.records import NewLoad, SourceRef
from kvxfer.errors import ProtocolError
from kvxfer.transfer.chunks import chunk_list
from kvxfer.transfer.compatibility import check_compatible
from kvxfer.transfer.layout import Interior
from kvxfer.transfer.manifest import EngineManifest, RankId, RankManifest
from kvxfer.transfer.plan import ALL, Plan, RegionName, make_plan
from kvxfer.transfer.pull import PullResolver
from kvxfer.transfer.windows import Clipped, Keeping, Missing, group_keepings
from kvxfer.transfer.wire import Consumer, Grant, OfferRef, Pull, Verify
from kvxfer.transports.base import DirectSource, SinkTransport, SourceTransport
from kvxfer.transports.shm_direct import ShmSink
from kvxfer.transports.stream_sink import StreamSink
from kvxfer.transports.stream_source import StreamSource
from tests.builders import EngineShape, build_manifest, pull_classes
from tests.oracle import oracle_copy
from tests.transfer.naive import Bytes, Memories, pack, side_addresses, unpack
from tests.transfer.naive_windows import kept_tokens, simulated

LIFE = b"s" * 16
NUM_BLOCKS = 130
# Nothing is read or sent
SINKS: dict[str, SinkTransport] = {
    "shm": ShmSink.__new__(ShmSink),
    "zmq": StreamSink.__new__(StreamSink),
}
SOURCES: dict[str, SourceTransport] = {
    "shm": DirectSource("shm", ()),
    "zmq": StreamSource.__new__(StreamSource),
}

Table = tuple[tuple[int, ...], ...]


def hybrid(draw: st.DrawFn, window: int, tp_size: int, cell_tokens: int) -> EngineShape:
    """Two layers, one with a window, in the same bytes; any block size and layout."""
    kernel_blocks = draw(st.sampled_from((1, 2)))
    return EngineShape(
        tp_size=tp_size,
        groups=(0, 1),
        windows=(window, None),
        shares=((1, 0),),
        kernel_blocks=kernel_blocks,
        block_tokens=kernel_blocks * cell_tokens * draw(st.sampled_from((1, 2, 3, 4, 6))),
        layout=draw(st.sampled_from(("HND", "NHD"))),
        outermost=draw(st.sampled_from(("planes", "blocks", "inner"))),
        num_blocks=NUM_BLOCKS,
        inner_nbytes=4,
        cell_tokens=cell_tokens,
    )


@st.composite
def pairs(draw: st.DrawFn) -> tuple[EngineShape, EngineShape]:
    window = draw(st.integers(1, 14))
    tp_sizes = draw(st.sampled_from(((1, 1), (2, 1), (1, 2))))
    more = draw(st.sampled_from((0, 0, 1, 5)))
    cells = draw(st.sampled_from((1, 1, 2, 3)))
    return hybrid(draw, window + more, tp_sizes[0], cells), hybrid(draw, window, tp_sizes[1], cells)


def tables(shape: EngineShape, num_tokens: int, kept: list[set[int]], seed: int) -> Table:
    """Ids of no order that no two groups share; -1 for blocks without a kept token."""
    num_blocks = -(-num_tokens // shape.block_tokens)
    order = iter(np.random.default_rng(seed).permutation(np.arange(1, NUM_BLOCKS)).tolist())
    return tuple(
        tuple(
            next(order) if any(t // shape.block_tokens == at for t in tokens) else -1
            for at in range(num_blocks)
        )
        for tokens in kept
    )


def peer_of(plan: Plan, source: EngineManifest, rank: RankId, wire: str) -> Peer:
    """As much of a peer as routes are made from."""
    return cast(
        "Peer",
        Bag(
            plan=plan,
            routes=plan.of_sink(rank),
            entries={entry.rank: entry for entry in source.ranks},
            can_verify=False,
            can_cut=False,
            choices={
                entry.rank: Bag(
                    transport=wire,
                    chunk_nbytes=lambda nbytes: 4096 if wire == "zmq" else 0,
                    least_growing_nbytes=0,
                )
                for entry in source.ranks
            },
        ),
    )


def random_memories(engine: EngineManifest, seed: int) -> Memories:
    rng = np.random.default_rng(seed)
    return {
        entry.rank: [rng.integers(0, 256, m.nbytes, dtype=np.uint8) for m in entry.memories]
        for entry in engine.ranks
    }


def moved(
    plan: Plan,
    source: EngineManifest,
    order: NewLoad,
    given: tuple[Table, Memories],
    taken: tuple[RankId, Memories],
    wire: str,
    growth: Sequence[int],
) -> set[tuple[int, int]]:
    """Carry a load of one sink rank out, of an offer that grows; returns its incomplete blocks."""
    rank, memories = taken
    addressing = Addressing(Consumer(b"k" * 16, rank), SINKS, can_leave_unhashed=True)
    routes = make_routes(order, ways_of(peer_of(plan, source, rank, wire), addressing), addressing)
    incomplete: set[tuple[int, int]] = set()
    for source_rank, run in routes.items():
        incomplete |= run.incomplete
        entry, pool = source.rank(source_rank), given[1][source_rank]
        unread = asked_of(run.pull, str(source_rank), SOURCES)
        served = read_pull(unread, PullResolver(entry), SOURCES, order.source.num_tokens)
        ids = own_ids(given[0], group_keepings(entry.regions), order.source.num_tokens)
        if run.request is None:
            assert run.pull.is_null
        elif served.stream is None:
            read_as_it_grows(run, order, entry, given[0], pool[0], memories[rank][0], growth)
        else:
            for chunk in chunk_list(run.pull.classes, run.pull.chunk_nbytes):
                asked, number = run.pull.classes[chunk.class_index], chunk.class_index
                dense = pack(served.sides[number], asked, chunk, ids, pool)
                side = run.request.classes[number].sink
                unpack(side, asked, chunk, order.block_ids, memories[rank], dense)
    return incomplete


def read_as_it_grows(
    run: RouteRun,
    order: NewLoad,
    entry: RankManifest,
    table: Table,
    pool: Bytes,
    taken: Bytes,
    growth: Sequence[int],
) -> None:
    """Read a route in pieces. Of the source's pool only what is open has been computed."""
    offered, lo = order.source.num_tokens, 0
    keepings, computed = group_keepings(entry.regions), np.full_like(pool, 0xEE)
    is_read = np.zeros(len(taken), np.bool_)
    for open_tokens in (*growth, offered):
        spans = dict.fromkeys(keepings, (0, open_tokens))
        ids = own_ids(table, keepings, open_tokens)
        regions, memory = entry.regions, [computed]
        oracle_copy(regions, [pool], regions, memory, source_ids=ids, sink_ids=ids, spans=spans)
        is_all = open_tokens == offered
        grant = Grant(order.source.offer, run.pull.consumer, ids, offered)
        grant = grant if is_all else msgspec.structs.replace(grant, open_tokens=open_tokens)
        hi = open_tokens_of(grant, run)
        if hi == lo:
            continue
        take_granted_ids(run, ids, hi)
        request = next_read(run, lo, hi)
        lo = hi
        if request is None:  # what has opened is of no use to this sink
            continue
        for copied, asked in zip(request.classes, request.pull_classes, strict=True):
            span = (asked.token_lo, asked.token_hi)
            for (_, at), (_, to) in zip(
                side_addresses(copied.source, request.source_ids, span),
                side_addresses(copied.sink, request.sink_ids, span),
                strict=True,
            ):
                assert not is_read[to : to + asked.inner_nbytes].any()
                is_read[to : to + asked.inner_nbytes] = True
                taken[to : to + asked.inner_nbytes] = computed[at : at + asked.inner_nbytes]
    assert lo == ALL


@given(pairs(), st.integers(2, 50), st.sampled_from(("shm", "zmq")), st.data())
@settings(max_examples=60)
def test_every_pair_moves_what_a_simulation_says(
    shapes: tuple[EngineShape, EngineShape], offered: int, wire: str, data: st.DataObject
) -> None:
    source_shape, sink_shape = shapes
    source, sink = build_manifest(source_shape, "source"), build_manifest(sink_shape, "sink")
    check_compatible(source, sink)
    plan = make_plan(source, sink)
    hi = data.draw(st.sampled_from((offered, offered - 1)), "hi")
    lo = data.draw(st.integers(0, hi - 1), "lo")
    growth = sorted(data.draw(st.sets(st.integers(1, offered - 1), max_size=4), "growth"))

    # The source's table names the blocks that it has dropped too: they must not be read.
    given_ids = tables(source_shape, offered, [set(range(offered))] * 2, seed=1)
    windows = sink_shape.windows
    kept = [kept_tokens(hi, Keeping(sink_shape.block_tokens, window)) for window in windows]
    taken_ids = tables(sink_shape, hi, kept, seed=2)
    keepings = [
        (Keeping(sink_shape.block_tokens, mine), Keeping(source_shape.block_tokens, theirs))
        for mine, theirs in zip(windows, source_shape.windows, strict=True)
    ]
    moves = [simulated(lo, hi, offered, *pair) for pair in keepings]
    spans = {
        group: (move.token_lo, move.token_hi)
        for group, move in enumerate(moves)
        if not isinstance(move, Missing)
    }
    assert set(spans) == {0, 1}

    given_bytes, taken_bytes = random_memories(source, 3), random_memories(sink, 4)
    expected = {rank: [m.copy() for m in memories] for rank, memories in taken_bytes.items()}
    order = NewLoad(
        request_id="r",
        source=SourceRef(
            engine_id="source", endpoint="", offer=OfferRef(b"n" * 16, LIFE), num_tokens=offered
        ),
        token_lo=lo,
        token_hi=hi,
        block_ids=taken_ids,
    )
    incomplete = {(group, m.position) for group, m in enumerate(moves) if isinstance(m, Clipped)}
    for taker in sink.ranks:
        for giver in source.ranks:
            oracle_copy(
                giver.regions,
                given_bytes[giver.rank],
                taker.regions,
                expected[taker.rank],
                source_ids=given_ids,
                sink_ids=taken_ids,
                spans=spans,
            )
        target = (taker.rank, taken_bytes)
        pools = given_ids, given_bytes
        assert moved(plan, source, order, pools, target, wire, growth) == incomplete
        np.testing.assert_array_equal(taken_bytes[taker.rank][0], expected[taker.rank][0])


def test_opaque_blocks_are_read_when_they_are_full_or_at_the_end() -> None:
    shape, rank = EngineShape(num_blocks=20, interior=Interior.OPAQUE), RankId(0, 0)
    engine = build_manifest(shape, "p")
    plan = make_plan(engine, build_manifest(shape, "d"))
    addressing = Addressing(Consumer(b"k" * 16, rank), SINKS, can_leave_unhashed=True)
    source = SourceRef(engine_id="p", endpoint="", offer=OfferRef(b"n" * 16, LIFE), num_tokens=70)
    order = NewLoad(
        request_id="r",
        source=source,
        token_lo=16,
        token_hi=69,
        block_ids=((1, 2, 3, 4, 5),),
        grows=True,
    )
    ways = ways_of(peer_of(plan, engine, rank, "shm"), addressing)
    (run,) = make_routes(order, ways, addressing).values()
    spans: list[tuple[int, int] | None] = []
    grant = Grant(source.offer, run.pull.consumer, (), 70)
    assert [
        open_tokens_of(msgspec.structs.replace(grant, open_tokens=num), run) for num in (69, 79, 80)
    ] == [69, 79, ALL]  # the last block is not full before
    for lo, hi in ((0, 20), (20, 40), (40, 47), (47, 65), (65, ALL)):
        take_granted_ids(run, ((1, 2, 3, 4, 5),), hi)
        request = next_read(run, lo, hi)
        asked = request.pull_classes[0] if request else None
        spans.append((asked.token_lo, asked.token_hi) if asked else None)
    assert spans == [None, (16, 32), None, (32, 64), (64, 80)]


@pytest.mark.parametrize("can_cut", [False, True])
def test_what_grows_is_sent_in_chunks_of_few_tokens(can_cut: bool) -> None:
    shape, rank = EngineShape(num_blocks=400, inner_nbytes=1 << 14), RankId(0, 0)
    engine = build_manifest(shape, "p")
    plan = make_plan(engine, build_manifest(shape, "d"))
    addressing = Addressing(Consumer(b"k" * 16, rank), SINKS, can_leave_unhashed=True)
    peer = cast("Any", peer_of(plan, engine, rank, "zmq"))
    peer.choices[rank].chunk_nbytes = lambda nbytes: 64 << 20
    peer.can_cut = can_cut
    ways = ways_of(peer, addressing)
    sizes: list[int] = []
    spans: list[tuple[int, int]] = []
    parts: list[int | msgspec.UnsetType] = []
    asked = ((3000, False, 0), (3000, True, 0), (100, True, 0), (6000, True, 0))
    for num_tokens, grows, least in (*asked, (3000, True, 40 << 20), (3000, True, 80 << 20)):
        peer.choices[rank].least_growing_nbytes = least
        order = NewLoad(
            request_id="r",
            source=SourceRef(
                engine_id="p",
                endpoint="",
                offer=OfferRef(b"n" * 16, LIFE),
                num_tokens=num_tokens,
            ),
            token_lo=0,
            token_hi=num_tokens,
            block_ids=(tuple(range(400)),),
            grows=grows,
        )
        (run,) = make_routes(order, ways, addressing).values()
        assert run.pull.grows is (True if grows else msgspec.UNSET)
        sizes.append(run.pull.chunk_nbytes)
        parts.append(run.pull.part_tokens)
        chunks = chunk_list(run.pull.classes, run.pull.chunk_nbytes, run.pull.cut_tokens)
        spans.append((max(c.token_hi - c.token_lo for c in chunks), chunks[0].region_hi))
    # 32 KiB a token of one region, of which there are four. An eighth of 3,000 tokens is less than
    # the 512 at which a source of an earlier version cuts: of one region then. That of 100 is less
    # than a block, that of 6,000 more than 512: chunks are as large as for all. Over a fast wire
    # they are larger than an eighth, but never larger than for all
    if can_cut:
        assert parts == [msgspec.UNSET, 384, 16, msgspec.UNSET, 384, 384]
        assert sizes == [64 << 20, 384 << 17, 16 << 17, 64 << 20, 384 << 17, 64 << 20]
        assert spans == [(512, 4), (384, 4), (16, 4), (512, 4), (384, 4), (512, 4)]
        return
    assert set(parts) == {msgspec.UNSET}
    assert sizes == [64 << 20, 384 << 15, 16 << 15, 64 << 20, 40 << 20, 64 << 20]
    assert spans == [(512, 4), (384, 1), (16, 1), (512, 4), (512, 2), (512, 4)]


def test_layers_of_one_sink_group_may_come_from_several_source_groups() -> None:
    # The source keeps the first layer's window and all of the second; the sink's group has both.
    source = build_manifest(
        EngineShape(groups=(0, 1), windows=(8, None), block_tokens=2, num_blocks=20), "p"
    )
    sink = build_manifest(EngineShape(windows=(8,), block_tokens=6, num_blocks=20), "d")
    plan, rank = make_plan(source, sink), RankId(0, 0)
    order = NewLoad(
        request_id="r",
        source=SourceRef(
            engine_id="p", endpoint="", offer=OfferRef(b"n" * 16, LIFE), num_tokens=19
        ),
        token_lo=0,
        token_hi=18,
        block_ids=((-1, 5, 3),),
    )
    addressing = Addressing(Consumer(b"k" * 16, rank), SINKS, can_leave_unhashed=True)
    ways = ways_of(peer_of(plan, source, rank, "zmq"), addressing)
    (run,) = make_routes(order, ways, addressing).values()
    # Token 18 sees 11 to 18: the source holds from 10 on, the sink keeps from 6 on.
    asked = {c.regions[0].layer: (c.token_lo, c.token_hi) for c in run.pull.classes}
    assert asked == {"layers.0": (10, 18), "layers.1": (6, 18)}
    assert run.incomplete == {(0, 1)}
    # The sink's ids of blocks before the span are not looked at, those of the span are.
    with pytest.raises(ProtocolError, match="group 0: position 1: expected 0 to 19, got -1"):
        make_routes(
            NewLoad(
                request_id="r",
                source=order.source,
                token_lo=0,
                token_hi=18,
                block_ids=((4, -1, 3),),
            ),
            ways,
            addressing,
        )


def test_cells_beyond_the_offer_are_refused() -> None:
    """11 cells of 4 tokens are 44 tokens."""
    shape = EngineShape(cell_tokens=4)
    entry = build_manifest(shape).ranks[0]
    (route,) = make_plan(build_manifest(shape, "p"), build_manifest(shape, "d")).routes
    wanted = pull_classes(route, {0: (0, 44)})
    pull = Pull(
        offer=OfferRef(b"n" * 16, LIFE),
        consumer=Consumer(b"k" * 16, RankId(0, 0)),
        claim=(RankId(0, 0),),
        digest=b"",
        transport="zmq",
        is_null=False,
        classes=wanted,
        chunk_nbytes=4096,
    )
    verified = msgspec.structs.replace(pull, classes=(), verify=Verify(1, wanted))
    for asked in (pull, verified):
        with pytest.raises(PullRefused, match="expected at most the offered 43.*got 44"):
            read_pull(asked_of(asked, "pp0tp0", SOURCES), PullResolver(entry), SOURCES, 43)
    assert read_pull(asked_of(pull, "pp0tp0", SOURCES), PullResolver(entry), SOURCES, 44).sides
    unknown = msgspec.structs.replace(wanted[0], regions=(RegionName("other", ("k",)),))
    asked = msgspec.structs.replace(pull, classes=(unknown,))
    with pytest.raises(PullRefused, match="no region other/k"):  # nothing of it is counted
        read_pull(asked_of(asked, "pp0tp0", SOURCES), PullResolver(entry), SOURCES, 43)
    of_nothing = (msgspec.structs.replace(wanted[0], regions=(), state_of=3),)
    for asked in (
        msgspec.structs.replace(pull, classes=of_nothing),
        msgspec.structs.replace(verified, verify=Verify(1, of_nothing)),
    ):
        with pytest.raises(PullRefused, match="expected at least one region, got none"):
            read_pull(asked_of(asked, "pp0tp0", SOURCES), PullResolver(entry), SOURCES, 44)
