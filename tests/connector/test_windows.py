"""Loads of engines with several groups and windows, over real wires. Expectations are by hand.

Of four layers the even ones look back 48 tokens (group 0), the odd ones at everything (group 1).
Layers 0 and 1, and 2 and 3, lie in the same bytes: each group has blocks of its own there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace as Bag
from typing import Any

import pytest
from msgspec.structs import replace as with_fields

from kvxfer.config import Config
from kvxfer.connector.given_offer import own_ids
from kvxfer.connector.records import KVConnectorOutput, OfferBlocks
from kvxfer.connector.scheduler_side import SchedulerConnector
from kvxfer.errors import ConfigError
from kvxfer.transfer.windows import Keeping, held_ids
from kvxfer.transfer.wire import Reason
from kvxfer.transports.base import LocalMemory
from tests.builders import EngineShape, build_manifest, build_regions, identity_of
from tests.connector.rig import POISON, STREAMS, WIRES, Engine, Table, expect_moved, until

HYBRID = EngineShape(
    num_layers=4,
    groups=(0, 1, 0, 1),
    windows=(48, None),
    shares=((1, 0), (3, 2)),
    num_blocks=24,
)
HND16 = HYBRID
HND32 = replace(HYBRID, block_tokens=32)
NHD32 = replace(HYBRID, block_tokens=32, layout="NHD")
NHD24 = replace(HYBRID, block_tokens=24, kernel_blocks=3, layout="NHD")
CHUNK16 = replace(HYBRID, has_chunks=True)
CHUNK32 = replace(CHUNK16, block_tokens=32, layout="NHD")
CHUNK_WIRES = ("shm", "zmq")
TOKEN_NBYTES = 2 * 8 * 2  # 2 heads of 8 bytes, K and V


def table(shape: EngineShape, num_tokens: int, first: int = 0) -> Table:
    """Ids that no two groups share, none of them 0: the null block is nobody's."""
    num_blocks = -(-num_tokens // shape.block_tokens)
    ids = [1 + (first + 5 * i) % (shape.num_blocks - 1) for i in range(2 * num_blocks)]
    return tuple(ids[0::2]), tuple(ids[1::2])


def without(ids: Table, group: int, positions: Sequence[int]) -> Table:
    """The same table, with no blocks at these positions."""
    row = tuple(-1 if at in positions else block for at, block in enumerate(ids[group]))
    return (*ids[:group], row, *ids[group + 1 :])


@dataclass(frozen=True)
class Case:
    """``offered`` tokens, of which the sink has ``lo`` and takes all but the last. ``dropped`` and
    ``unused``: blocks of group 0 that the source has let go of, and that the sink does not have.
    """

    source: EngineShape
    sink: EngineShape
    offered: int
    lo: int
    dropped: tuple[int, ...]
    unused: tuple[int, ...]
    spans: dict[int, tuple[int, int]]
    incomplete: tuple[tuple[int, int], ...] = ()


CASES = {
    # token 100 sees 53 to 100: the source holds from 48 on, the sink keeps from 32 on
    "16 to 32": Case(HND16, NHD32, 101, 0, (0, 1, 2), (0,), {0: (48, 100), 1: (0, 100)}, ((0, 1),)),
    # token 111 sees 64 to 111
    "16 to 32, even": Case(HND16, NHD32, 112, 0, (0, 1, 2, 3), (0, 1), {0: (64, 111), 1: (0, 111)}),
    "32 to 16": Case(NHD32, HND16, 101, 0, (0,), (0, 1, 2), {0: (48, 100), 1: (0, 100)}),
    "16 to 24": Case(HND16, NHD24, 101, 0, (0, 1, 2), (0, 1), {0: (48, 100), 1: (0, 100)}),
    # token 132 sees 85 to 132: held from 80 on, kept from 72 on
    "16 to 24, clipped": Case(
        HND16, NHD24, 133, 0, (0, 1, 2, 3, 4), (0, 1, 2), {0: (80, 132), 1: (0, 132)}, ((0, 3),)
    ),
    # token 120 sees 73 to 120: held from 72 on, kept from 64 on
    "24 to 16": Case(
        NHD24, HND16, 121, 0, (0, 1, 2), (0, 1, 2, 3), {0: (72, 120), 1: (0, 120)}, ((0, 4),)
    ),
    # the sink has 32 tokens of the full group, and keeps none of those in the other
    "hit in one group": Case(NHD32, HND16, 101, 32, (0,), (0, 1, 2), {0: (48, 100), 1: (32, 100)}),
    # its block of 32 to 63 is cached in both groups, and is not written again
    "hit in both groups": Case(
        HND16, NHD32, 101, 64, (0, 1, 2), (0,), {0: (64, 100), 1: (64, 100)}
    ),
    "hit before the clipped block": Case(
        HND16, NHD32, 101, 32, (0, 1, 2), (0,), {0: (48, 100), 1: (32, 100)}, ((0, 1),)
    ),
    "a window larger than the prompt": Case(HND16, NHD32, 41, 0, (), (), {0: (0, 40), 1: (0, 40)}),
    "shorter than a block": Case(HND16, NHD32, 11, 0, (), (), {0: (0, 10), 1: (0, 10)}),
    "window 1": Case(
        replace(HND16, windows=(1, None)),
        replace(NHD32, windows=(1, None)),
        101,
        0,
        (0, 1, 2, 3, 4, 5),
        (0, 1, 2),
        {0: (96, 100), 1: (0, 100)},
    ),
    # 113 offered: token 112 sees itself alone, the source holds nothing before it
    "window 1, nothing held": Case(
        replace(HND16, windows=(1, None)),
        replace(NHD32, windows=(1, None)),
        113,
        0,
        (0, 1, 2, 3, 4, 5, 6),
        (0, 1, 2),
        {1: (0, 112)},
        ((0, 3),),
    ),
    "source keeps a larger window": Case(
        replace(HND16, windows=(64, None)), NHD32, 101, 0, (0, 1), (0,), {0: (32, 100), 1: (0, 100)}
    ),
    # token 100 is of the chunk that begins at 96, with a block of either size
    "chunks": Case(
        CHUNK16, CHUNK32, 101, 0, (0, 1, 2, 3, 4, 5), (0, 1, 2), {0: (96, 100), 1: (0, 100)}
    ),
    # token 72 is of the chunk from 48 on, with which no block of 32 begins
    "chunks, clipped": Case(
        CHUNK16, CHUNK32, 73, 0, (0, 1, 2), (0,), {0: (48, 72), 1: (0, 72)}, ((0, 1),)
    ),
    "chunks, 32 to 16": Case(CHUNK32, CHUNK16, 73, 0, (0,), (0, 1, 2), {0: (48, 72), 1: (0, 72)}),
    # 96 offered: token 95 is computed again, so the source holds the chunk from 48 on
    "the chunk ends with the offer": Case(
        CHUNK16, CHUNK32, 96, 0, (0, 1, 2), (0,), {0: (48, 95), 1: (0, 95)}, ((0, 1),)
    ),
    # 97 offered: token 96 begins a chunk, and needs nothing of it
    "the chunk begins with the last token": Case(
        CHUNK32, CHUNK16, 97, 0, (0, 1, 2), (0, 1, 2, 3, 4, 5), {1: (0, 96)}
    ),
    "all tokens to chunks": Case(
        replace(HND16, windows=(None, None)),
        CHUNK32,
        101,
        0,
        (),
        (0, 1, 2),
        {0: (96, 100), 1: (0, 100)},
    ),
    "chunks, TP 2 to 1": Case(
        replace(CHUNK32, tp_size=2), CHUNK16, 73, 0, (0,), (0, 1, 2), {0: (48, 72), 1: (0, 72)}
    ),
    "TP 2 to 1": Case(
        replace(HND16, tp_size=2),
        NHD32,
        101,
        0,
        (0, 1, 2),
        (0,),
        {0: (48, 100), 1: (0, 100)},
        ((0, 1),),
    ),
    "TP 1 to 2": Case(
        HND16,
        replace(NHD32, tp_size=2),
        101,
        0,
        (0, 1, 2),
        (0,),
        {0: (48, 100), 1: (0, 100)},
        ((0, 1),),
    ),
}


@pytest.mark.parametrize(
    ("name", "wire"),
    [(name, w) for name, c in CASES.items() for w in (CHUNK_WIRES if c.sink.has_chunks else WIRES)],
)
def test_each_group_moves_what_its_window_needs(name: str, wire: str) -> None:
    case = CASES[name]
    with (
        Engine(case.source, "prefill", fill=None, transport=wire) as source,
        Engine(case.sink, "decode", fill=POISON, transport=wire) as sink,
    ):
        # Dropped blocks are not in the source's table for the oracle; the source's own has them.
        stale = table(case.source, case.offered)
        held = without(stale, 0, case.dropped)
        taken = without(table(case.sink, case.offered, first=3), 0, case.unused)
        ref = source.offer_groups("p", case.offered, stale)
        source.compute("p")
        sink.load_groups("d", ref, taken, (case.lo, case.offered - 1))
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {None}
        until(lambda: source.sent("p"))
        expect_moved(source, sink, held, taken, case.spans)
        incomplete = {"d": case.incomplete} if case.incomplete else {}
        assert [results.incomplete for results in sink.results] == [incomplete] * len(sink.results)
        num_tokens = sum(2 * (hi - lo) for lo, hi in case.spans.values())  # 2 layers each
        assert sum(report.nbytes for report in sink.reports("d")) == num_tokens * TOKEN_NBYTES


@pytest.mark.parametrize("wire", WIRES)
def test_a_source_without_windows_has_one_table_for_all_layers(wire: str) -> None:
    one_group = replace(HYBRID, groups=(), windows=(), shares=())
    with (
        Engine(one_group, "prefill", fill=None, transport=wire) as source,
        Engine(NHD32, "decode", fill=POISON, transport=wire) as sink,
    ):
        given: Table = ((3, 1, 4, 15, 9, 2, 6),)
        taken: Table = ((-1, 5, 3, 8), (9, 7, 2, 1))
        ref = source.offer_groups("p", 101, given)
        source.compute("p")
        sink.load_groups("d", ref, taken, (0, 100))
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {None}
        spans = {0: (32, 100), 1: (0, 100)}
        expect_moved(source, sink, (*given, *given), taken, spans)
        assert sink.results[0].incomplete == {}


@pytest.mark.parametrize("wire", WIRES)
def test_layers_that_share_their_kv_move_once(wire: str) -> None:
    # layer 2 has the KV of layer 0, layer 3 that of layer 1: same groups, same bytes
    sharing = replace(HYBRID, shares=((1, 0), (2, 0), (3, 0)))
    with (
        Engine(sharing, "prefill", fill=None, transport=wire) as source,
        Engine(replace(sharing, block_tokens=32), "decode", fill=POISON, transport=wire) as sink,
    ):
        stale = table(sharing, 101)
        taken: Table = ((-1, 5, 3, 8), (9, 7, 2, 1))
        ref = source.offer_groups("p", 101, stale)
        source.compute("p")
        sink.load_groups("d", ref, taken, (0, 100))
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {None}
        held = without(stale, 0, (0, 1, 2))
        expect_moved(source, sink, held, taken, {0: (48, 100), 1: (0, 100)})
        (report,) = sink.reports("d")
        assert report.nbytes == (52 + 100) * TOKEN_NBYTES


@pytest.mark.parametrize("wire", WIRES)
def test_a_load_that_needs_nothing_reads_nothing(wire: str) -> None:
    only_self = EngineShape(windows=(1,))
    with (
        Engine(only_self, "prefill", fill=None, transport=wire) as source,
        Engine(only_self, "decode", fill=POISON, transport=wire) as sink,
    ):
        ref = source.offer("p", 33, [4, 2, 6])
        source.compute("p")
        sink.load("d", ref, [-1, -1, 7], (0, 32))
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {None}
        until(lambda: source.sent("p"))
        expect_moved(source, sink, ((),), ((),), {})
        (report,) = sink.reports("d")
        assert (report.nbytes, report.transports) == (0, ())


@pytest.mark.parametrize("wire", WIRES)
def test_dropped_tokens_are_refused_to_who_asks_for_them(wire: str) -> None:
    with (
        Engine(HND16, "prefill", fill=None, transport=wire) as source,
        Engine(HND16, "decode", fill=POISON, transport=wire) as sink,
    ):
        ref = source.offer_groups("p", 101, table(HND16, 101))
        source.compute("p")
        # The params may say anything: of 50 offered tokens the source would hold all.
        sink.load_groups("d", with_fields(ref, num_tokens=50), table(HND16, 50), (0, 49))
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {Reason.PLAN}
        (report,) = sink.reports("d")
        assert report.detail == (
            "layers.0: tokens: expected from 48 on, got 0; of 101 offered tokens this source keeps "
            "a window of 48 tokens in blocks of 16"
            if wire in STREAMS
            else "block ids of group 0: position 0: expected 0 to 23, got -1, no block"
        )
        assert sink.results[0].incomplete == {}
        expect_moved(source, sink, ((),), ((),), {})


def test_tokens_that_the_source_let_go_of_fail_a_load_by_name() -> None:
    with (
        Engine(HND16, "prefill", fill=1) as source,
        Engine(NHD32, "decode", fill=POISON) as sink,
    ):
        ref = source.offer_groups("p", 201, table(HND16, 201))
        source.compute("p")
        sink.load_groups("d", ref, table(NHD32, 80), (0, 80))  # only a part is wanted
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {Reason.PLAN}
        (report,) = sink.reports("d")
        assert report.detail == (
            "layers.0: expected tokens from 33 on, which the sink needs (it keeps a window of 48 "
            "tokens in blocks of 32); the source has let go of those before 144 (it keeps a window "
            "of 48 tokens in blocks of 16)"
        )
        expect_moved(source, sink, ((),), ((),), {})


def test_a_sink_that_keeps_everything_refuses_a_source_that_does_not() -> None:
    with (
        Engine(HND16, "prefill", fill=1) as source,
        Engine(replace(HND16, windows=()), "decode", fill=POISON) as sink,
    ):
        ref = source.offer_groups("p", 32, table(HND16, 32))
        source.compute("p")
        sink.load_groups("d", ref, table(HND16, 32), (0, 31))
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {Reason.INCOMPATIBLE}
        assert "window of layers.0, layers.2: source has 48 tokens, sink has all tokens" in (
            sink.reports("d")[0].detail
        )


@pytest.mark.parametrize(
    ("given", "taken", "reason"), [(HND16, NHD32, Reason.INCOMPATIBLE), (NHD32, HND16, None)]
)
def test_an_engine_that_hashes_every_block_refuses_the_pair(
    given: EngineShape, taken: EngineShape, reason: Reason | None
) -> None:
    with (
        Engine(given, "prefill", fill=1) as source,
        Engine(taken, "decode", fill=POISON, can_leave_unhashed=False) as sink,
    ):
        ref = source.offer_groups("p", 101, table(given, 101))
        source.compute("p")
        sink.load_groups("d", ref, table(taken, 101), (0, 100))
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {reason}
        if reason is not None:
            (report,) = sink.reports("d")
            assert "block_tokens of layers.0, layers.2: source has 16 with a window of 48, " in (
                report.detail
            )
            assert "switch prefix caching off at the sink" in report.detail


def test_even_a_part_of_an_offer_leaves_nothing_unhashed_where_that_cannot_be() -> None:
    # One window is larger, so no offer that is taken whole can be clipped. This one is not.
    wide = replace(HND16, windows=(64, None))
    with (
        Engine(wide, "prefill", fill=1) as source,
        Engine(NHD32, "decode", fill=POISON, can_leave_unhashed=False) as sink,
    ):
        ref = source.offer_groups("p", 112, table(wide, 112))
        source.compute("p")
        sink.load_groups("d", ref, table(NHD32, 112), (0, 100))
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {Reason.PLAN}
        assert sink.reports("d")[0].detail == (
            "layers.0: expected all of block 1, got its tokens from 48 on, and this engine cannot "
            "keep it from prefix reuse: the source keeps a window of 64 tokens in blocks of 16, "
            "this side a window of 48 tokens in blocks of 32"
        )


def test_incomplete_blocks_come_with_the_end_of_their_load_and_once() -> None:
    with Engine(HND16, "prefill", fill=1) as source, Engine(NHD32, "decode", fill=2) as sink:
        ref = source.offer_groups("p", 101, table(HND16, 101))
        source.compute("p")
        sink.load_groups("d", ref, table(NHD32, 101), (0, 100))
        (worker,) = sink.workers
        assert worker.wait_for_activity(5)
        output = worker.build_output(())
        assert isinstance(output, KVConnectorOutput)
        assert output.finished_recving == {"d"}
        assert output.incomplete_blocks == {"d": ((0, 1),)}
        later = worker.build_output(())
        assert later is None or later.incomplete_blocks is None


def test_layers_of_one_group_keep_one_thing() -> None:
    with Engine(HND16, "other", fill=1) as engine:
        worker = engine.workers[0]
        regions, _ = build_regions(HND16, engine.manifest.ranks[0].rank)
        mixed = tuple(with_fields(r, group=0) for r in regions)
        worker.shutdown()
        memory = LocalMemory((engine.pools[0].tensor,), (engine.pools[0].info,))
        with pytest.raises(ConfigError, match="register_kv_caches: group 0: expected all layers"):
            worker.register_kv_caches(mixed, memory)


# ---------------------------------------------------------------- tables that leave


def test_no_id_of_a_dropped_block_is_granted() -> None:
    stale: Table = ((3, 1, 4, 15, 9, 2, 6), (5, 35, 8, 97, 93, 23, 84), (7, 7))
    keepings = {0: Keeping(16, 48), 1: Keeping(16)}
    assert granted(stale, keepings, 81) == ((-1, -1, 4, 15, 9, 2), (5, 35, 8, 97, 93, 23), ())
    assert granted(stale, {0: Keeping(32, 48)}, 200) == ((-1, -1, -1, -1, 9, 2, 6), (), ())
    with pytest.raises(ValueError, match="group 0: expected 8 for 120 tokens, got 7"):
        granted(stale, keepings, 120)
    with pytest.raises(ValueError, match="group 3: expected 1 for 9 tokens, got no such group"):
        granted(stale, {3: Keeping(16, 4)}, 9)


def granted(table: Table, keepings: dict[int, Keeping], num_tokens: int) -> Table:
    """What the scheduler lets out, and of that what a rank tells."""
    return own_ids(held_ids(table, keepings, num_tokens), keepings, num_tokens)


def scheduler(shape: EngineShape) -> SchedulerConnector:
    manifest = build_manifest(shape, "me")
    made = SchedulerConnector(
        Config(),
        identity_of(manifest, incarnation=b"i" * 16),
        can_send=True,
        can_receive=True,
    )
    ranks = {(entry.rank.pp, entry.rank.tp): entry for entry in manifest.ranks}
    made.set_xfer_handshake_metadata_pp_aware(ranks)
    return made


def step(new: Table | None, more: Table | None, num_computed: int, num_scheduled: int) -> Any:  # noqa: ANN401
    """One step of request r: its first with the table ``new``, or a later one with ``more``."""
    first = [] if new is None else [Bag(req_id="r", block_ids=new, num_computed_tokens=0)]
    return Bag(
        scheduled_new_reqs=first,
        scheduled_cached_reqs=Bag(
            req_ids=[] if first else ["r"],
            new_block_ids=[] if first else [more],
            num_computed_tokens=[] if first else [num_computed],
            resumed_req_ids=frozenset(),
        ),
        num_scheduled_tokens={"r": num_scheduled},
        preempted_req_ids=frozenset(),
    )


def test_workers_never_hear_of_a_dropped_block() -> None:
    made = scheduler(replace(HYBRID, pp_size=2))
    made.on_new_request(
        Bag(
            request_id="r",
            kv_transfer_params={"do_remote_decode": True},
            prompt_token_ids=tuple(range(101)),
            num_prompt_tokens=101,
            status="RUNNING",
        )
    )
    # In steps of 64 tokens. The engine has dropped blocks 3 and 1 when it appends the last three.
    meta = made.build_connector_meta(step(((3, 1, 4, 15), (9, 2, 6, 5)), None, 0, 64))
    assert meta.blocks == (OfferBlocks("r", ((-1, -1, -1, 15), (9, 2, 6, 5))),)
    meta = made.build_connector_meta(step(None, ((3, 1, 8), (10, 7, 11)), 64, 37))
    assert meta.blocks == (OfferBlocks("r", ((-1, -1, -1, 15, 3, 1, 8), (9, 2, 6, 5, 10, 7, 11))),)
    assert meta.computed == ("r",)


def test_ranks_that_keep_different_things_are_not_one_engine() -> None:
    first = build_manifest(replace(HYBRID, pp_size=2), "me")
    other = build_manifest(replace(HYBRID, pp_size=2, windows=(64, None)), "me")
    made = scheduler(replace(HYBRID, pp_size=2))
    with pytest.raises(
        ConfigError,
        match="the ranks' regions: group 0: expected all layers to keep a window of 48 tokens in "
        "blocks of 16, got a window of 64 tokens in blocks of 16 of layers.2/k",
    ):
        made.set_xfer_handshake_metadata_pp_aware({(0, 0): first.ranks[0], (1, 0): other.ranks[1]})
