"""The plan is what the connector does: both with the same manifests, over real wires on a CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import pytest
from msgspec.structs import replace

from kvxfer.cache.specs import ceil_div
from kvxfer.plan.geometry import Geometry, make_manifest
from kvxfer.plan.transfer_plan import Cut, Refusal, TransferPlan, plan_transfer
from kvxfer.transfer.costs import Staging, WireCosts
from kvxfer.transfer.manifest import EngineManifest, RankManifest
from kvxfer.transfer.windows import group_keepings
from kvxfer.transports import shm_direct
from kvxfer.transports.base import ReadRequest, TransferKey, Trial
from kvxfer.transports.copy_thread import CopyJob
from kvxfer.transports.launches import Launches
from kvxfer.transports.pipe import CHUNK_S
from kvxfer.transports.shm_direct import ShmSink
from kvxfer.transports.stream_sink import StreamSink
from kvxfer.transports.stream_source import StreamSource
from tests.builders import EngineShape
from tests.connector import rig
from tests.connector.conftest import stand_in_for_gpus  # noqa: F401  # autouse
from tests.connector.rig import Engine, Table, until
from tests.wires import pipe_of, run_pieces, use_sink, use_source

NUM_TOKENS = 300
SMALL = Geometry(layers=6, kv_heads=4, head_dim=64, device="cpu")
HYBRID = replace(SMALL, windows="40/40/full", prefix_caching=False)
LATENT = Geometry(layers=12, head_dim=576, mla=True, device="cpu")
REFERENCE = replace(SMALL, engine="kvxfer")
PAIRS = {
    "tp4-tp2": (replace(SMALL, tp=4), replace(SMALL, tp=2, block=64, layout="NHD")),
    "tp1-tp2 windows": (HYBRID, replace(HYBRID, tp=2, block=48)),
    "latent": (replace(LATENT, tp=4), replace(LATENT, tp=2, block=32)),
    "dcp": (
        replace(LATENT, tp=4, dcp=4, dcp_interleave=16),
        replace(LATENT, tp=2, dcp=2, block=32),
    ),
    "stages": (replace(SMALL, pp=2, tp=2), replace(SMALL, layout="NHD", pp=3)),
    "reference": (REFERENCE, replace(REFERENCE, tp=2, block=24, layout="NHD")),
}


@contextmanager
def engines(
    source: Geometry, sink: Geometry, wire: str, patch: pytest.MonkeyPatch
) -> Iterator[tuple[Engine, Engine]]:
    """A pair with the plan's manifests."""
    patch.setattr(rig, "build_manifest", lambda manifest, engine_id: manifest)
    given, taken = (
        make_manifest(option, geometry, NUM_TOKENS)
        for option, geometry in (("--source", source), ("--sink", sink))
    )
    can_leave = sink.engine == "kvxfer" or not sink.prefix_caching
    with (
        Engine(shape_of(given), "source", fill=None, transport=wire) as giver,
        Engine(
            shape_of(taken),
            "sink",
            fill=0xEE,
            transport=wire,
            can_leave_unhashed=can_leave,
        ) as taker,
    ):
        yield giver, taker


def shape_of(manifest: EngineManifest) -> EngineShape:
    """It has the fields of one that engines look at."""
    return cast("EngineShape", manifest)


def table_of(manifest: EngineManifest) -> Table:
    """Blocks for all tokens in each group, that share nothing."""
    keepings = sorted(group_keepings(r for rank in manifest.ranks for r in rank.regions).items())
    table: list[tuple[int, ...]] = []
    first = 1
    for _, kept in keepings:
        count = ceil_div(NUM_TOKENS, kept.block_tokens)
        table.append(tuple(range(first, first + count)))
        first += count
    return tuple(table)


def load(giver: Engine, taker: Engine) -> None:
    offer = giver.offer_groups("r", NUM_TOKENS, table_of(giver.manifest))
    giver.compute("r")
    taker.load_groups("d", offer, table_of(taker.manifest), (0, NUM_TOKENS))
    until(lambda: taker.received("d"))


class Seen:
    """What the wires are asked for and do, of engines that are made after it."""

    def __init__(self, patch: pytest.MonkeyPatch, costs: WireCosts) -> None:
        """``costs``: what a trial of ``zmq`` measures."""
        seen = self
        self.requests: dict[tuple[str, str], ReadRequest] = {}
        self.staging: dict[str, tuple[int, int]] = {}
        self.num_sent: Counter[tuple[str, str]] = Counter()
        self.num_jobs = 0

        class Shm(ShmSink):
            def submit_read(self, request: ReadRequest) -> None:
                seen.note(request)
                super().submit_read(request)

        class Sink(StreamSink):
            def trial(self, *_: object) -> Trial:
                return Trial(costs)

            def attach(self, source: RankManifest, staging: Staging | None = None) -> None:
                assert staging is not None
                seen.staging[str(source.rank)] = (staging.num_slots, staging.slot_nbytes)
                super().attach(source, staging)

            def submit_expect(self, request: ReadRequest) -> None:
                seen.note(request)
                super().submit_expect(request)

        class Source(StreamSource):
            def send_packed(self, key: TransferKey, sequence: int) -> None:
                seen.num_sent[key.source_rank, key.sink_rank] += 1
                super().send_packed(key, sequence)

        use_sink(patch, "shm", Shm)
        use_sink(patch, "zmq", partial(Sink, pipe_of("zmq")))
        use_source(patch, "zmq", partial(Source, pipe_of("zmq")))
        run_pieces(patch, "shm", self._run)

    def note(self, request: ReadRequest) -> None:
        self.requests[request.key.source_rank, request.key.sink_rank] = request

    def _run(self, job: CopyJob) -> bool:
        was_piece = job.run()  # there is a look for another behind the last one
        self.num_jobs += was_piece
        return was_piece


def regions_of(plan: TransferPlan) -> Counter[tuple[object, ...]]:
    """(ranks, layer, heads, tokens) of all that is planned, each as often as it has regions."""
    found: Counter[tuple[object, ...]] = Counter()
    for move in plan.moves:
        for layer in move.layers:
            each = (move.source, move.sink, layer, move.heads, move.tokens)
            found[each] += move.num_regions // len(move.layers)
    return found


def asked_of(requests: dict[tuple[str, str], ReadRequest]) -> Counter[tuple[object, ...]]:
    found: Counter[tuple[object, ...]] = Counter()
    for ranks, request in requests.items():
        for pull in request.pull_classes:
            heads = pull.head_lo, pull.head_hi
            tokens = pull.token(pull.token_lo), pull.token(pull.token_hi - 1) + 1
            for name in pull.regions:
                found[(*ranks, int(name.layer.split(".")[2]), heads, tokens)] += 1
    return found


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("wire", ["shm", "zmq"])
def test_what_is_planned_is_what_moves(
    wire: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm_direct, "JOB_NBYTES", 200_000)  # more than one job
    plan = plan_transfer(*PAIRS[name], NUM_TOKENS)
    assert isinstance(plan, TransferPlan)
    measured = {each.wire: each.figures for each in plan.wires}["zmq"]
    costs = WireCosts(measured.latency_s, CHUNK_S, measured.bytes_per_s)
    seen = Seen(monkeypatch, costs)
    with engines(*PAIRS[name], wire, monkeypatch) as (giver, taker):
        load(giver, taker)
        assert taker.reasons("d") == {None}
        assert sum(report.nbytes for report in taker.reports("d")) == plan.nbytes
    (planned,) = (each for each in plan.wires if each.wire == wire)
    check(planned.cuts, seen, wire)
    assert regions_of(plan) == asked_of(seen.requests)


def check(cuts: tuple[Cut, ...], seen: Seen, wire: str) -> None:
    assert {(cut.source, cut.sink) for cut in cuts if cut.num_pieces} == set(seen.requests)
    for cut in cuts:
        ranks = (cut.source, cut.sink)
        if ranks in seen.requests:
            assert cut.chunk_nbytes == seen.requests[ranks].chunk_nbytes
        assert cut.num_pieces == seen.num_sent[ranks] or wire == "shm"
        assert bool(cut.num_slots) == (ranks in seen.requests and wire != "shm")
        if cut.num_slots:
            assert (cut.num_slots, cut.slot_nbytes) == seen.staging[cut.source]
    if wire == "shm":
        assert seen.num_jobs == sum(cut.num_pieces for cut in cuts) > len(seen.requests)
    else:
        assert sum(seen.num_sent.values()) > len(seen.requests), "more than one chunk somewhere"


def test_launches_are_those_of_the_wire_between_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    source, sink = (replace(each, layers=3, tp=1) for each in PAIRS["tp1-tp2 windows"])
    source, sink = (replace(each, head_dim=8) for each in (source, sink))
    on_gpus = [replace(each, device="cuda") for each in (source, sink)]
    plan = plan_transfer(on_gpus[0], on_gpus[1], NUM_TOKENS)
    assert isinstance(plan, TransferPlan)
    launched: list[object] = []
    add = Launches.add

    def note(launches: Launches[Any], *args: Any) -> None:
        launched.append(args)
        add(launches, *args)

    monkeypatch.setattr(Launches, "add", note)
    with engines(source, sink, "cuda_ipc", monkeypatch) as (giver, taker):
        load(giver, taker)
        assert taker.reasons("d") == {None}
    (planned,) = (each for each in plan.wires if each.wire == "cuda_ipc")
    assert len(launched) == sum(cut.num_pieces for cut in planned.cuts) == 3


REFUSED = {
    "fp8": (SMALL, replace(SMALL, kv_cache_dtype="fp8")),
    "dtype": (SMALL, replace(SMALL, dtype="float32")),
    "another model": (SMALL, replace(SMALL, kv_heads=2, layers=5, model="other")),
    "windows": (HYBRID, replace(HYBRID, block=48, prefix_caching=True)),
    "the source keeps less": (HYBRID, replace(HYBRID, windows="full", prefix_caching=False)),
    "other windows": (HYBRID, replace(HYBRID, windows="80/80/full")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_the_engine_s(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_transfer(*REFUSED[name], NUM_TOKENS)
    assert isinstance(plan, Refusal)
    assert plan.reason.startswith("engines source and sink cannot exchange KV: ")
    with engines(*REFUSED[name], "shm", monkeypatch) as (giver, taker):
        load(giver, taker)
        assert taker.reasons("d") == {"incompatible"}
        assert {report.detail for report in taker.reports("d")} == {plan.reason}
    assert plan.reason.endswith(" | ".join(map(str, plan.differences)))
    assert plan.differences


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_that_load_are_not_refused(name: str) -> None:
    assert isinstance(plan_transfer(*PAIRS[name], NUM_TOKENS), TransferPlan)
