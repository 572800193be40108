"""Plans against a count of every token, head and layer by itself; times against the cost model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvxfer.plan.geometry import Geometry
from kvxfer.plan.transfer_plan import Refusal, TransferPlan, load_figures, plan_transfer
from kvxfer.transfer.costs import WireCosts
from kvxfer.transfer.windows import Keeping
from tests.transfer.naive_windows import kept_tokens

Cell = tuple[int, int, int]
"""(layer, head, token)."""


def holds(geometry: Geometry, rank: str, layer: int, head: int) -> bool:
    """Does this rank hold this head of this layer? By dealing layers and heads out one by one."""
    pp, tp = (int(part) for part in rank.removeprefix("pp").split("tp"))
    if geometry.mla:
        has_head = True
    elif geometry.tp <= geometry.kv_heads:
        has_head = head // (geometry.kv_heads // geometry.tp) == tp
    else:
        has_head = tp // (geometry.tp // geometry.kv_heads) == head
    return has_head and stage_of(geometry, layer) == pp


def stage_of(geometry: Geometry, layer: int) -> int:
    """Stages take turns: the last one is the first to have enough, then the first one."""
    counts = [geometry.layers // geometry.pp] * geometry.pp
    for extra in range(geometry.layers % geometry.pp):
        counts[geometry.pp - 2 - extra] += 1
    stages = [stage for stage, count in enumerate(counts) for _ in range(count)]
    return stages[layer]


def keeps(geometry: Geometry, rank: str, token: int) -> bool:
    """Ranks that share a head take so many tokens each, in turns."""
    tp = int(rank.partition("tp")[2])
    turns = [at for at in range(geometry.dcp) for _ in range(geometry.dcp_interleave)]
    return turns[token % len(turns)] == tp % geometry.dcp


def ranks(geometry: Geometry) -> list[str]:
    return [f"pp{pp}tp{tp}" for pp in range(geometry.pp) for tp in range(geometry.tp)]


def keeping_of(geometry: Geometry, layer: int) -> Keeping:
    pattern = geometry.windows.split("/")
    word = pattern[layer % len(pattern)]
    is_chunk, tokens = word.startswith("chunk"), word.removeprefix("chunk")
    return Keeping(geometry.block, None if word == "full" else int(tokens), is_chunk=is_chunk)


def wanted_tokens(source: Geometry, sink: Geometry, layer: int, num_tokens: int) -> set[int]:
    """What the sink keeps and the source still has, which may have computed one token less."""
    held = kept_tokens(num_tokens - 1, keeping_of(source, layer)) | {num_tokens - 1}
    return kept_tokens(num_tokens, keeping_of(sink, layer)) & held


def cells_of(plan: TransferPlan, source_rank: str, sink_rank: str) -> Iterator[Cell]:
    for move in plan.moves:
        if (move.source, move.sink) == (source_rank, sink_rank):
            for layer in move.layers:
                for head in range(*move.heads):
                    tokens = [
                        token
                        for token in range(*move.tokens)
                        if keeps(plan.source, source_rank, token)
                        and keeps(plan.sink, sink_rank, token)
                    ]
                    assert len(tokens) == move.num_tokens
                    assert tokens[:1] == [move.tokens[0]][: len(tokens)]
                    assert tokens[-1:] == [move.tokens[1] - 1][: len(tokens)]
                    yield from ((layer, head, token) for token in tokens)


def check(plan: TransferPlan) -> None:
    """Every cell that a sink rank wants comes once, from a rank that has it; bytes are counted."""
    source, sink, num_tokens = plan.source, plan.sink, plan.num_tokens
    cell_nbytes = sink.head_dim * (1 if sink.mla else 2)
    cell_nbytes *= 1 if sink.kv_cache_dtype != "auto" else {"float32": 4}.get(sink.dtype, 2)
    moved_nbytes: Counter[tuple[str, str]] = Counter()
    for move in plan.moves:
        moved_nbytes[move.source, move.sink] += move.nbytes
    all_nbytes = 0
    for taker in ranks(sink):
        wanted = {
            (layer, head, token)
            for layer in range(sink.layers)
            for head in range(sink.kv_heads)
            if holds(sink, taker, layer, head)
            for token in wanted_tokens(source, sink, layer, num_tokens)
            if keeps(sink, taker, token)
        }
        come: Counter[Cell] = Counter()
        for giver in ranks(source):
            cells = list(cells_of(plan, giver, taker))
            assert all(holds(source, giver, layer, head) for layer, head, _ in cells)
            assert moved_nbytes[giver, taker] == len(cells) * cell_nbytes
            all_nbytes += len(cells) * cell_nbytes
            come.update(cells)
        assert come == Counter(wanted)
    assert plan.nbytes == all_nbytes
    assert {move.source for move in plan.moves} == set(ranks(source)), "each rank hears of the end"
    for wire in plan.wires:
        assert Counter((cut.source, cut.sink) for cut in wire.cuts) == Counter(
            {(move.source, move.sink): 1 for move in plan.moves}
        )


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Geometry, Geometry]:
    is_mla = draw(st.booleans()) and draw(st.booleans())
    kv_heads = 1 if is_mla else draw(st.sampled_from((1, 2, 4)))
    windows = (
        "full" if is_mla else draw(st.sampled_from(("full", "full", "9", "5/full", "6/6/full")))
    )
    model = Geometry(
        layers=draw(st.integers(2, 5)),
        kv_heads=kv_heads,
        head_dim=8,
        mla=is_mla,
        dtype=draw(st.sampled_from(("float32", "bfloat16"))),
        windows=windows,
        kv_cache_dtype=draw(st.sampled_from(("auto", "auto", "fp8"))),
        prefix_caching=False,
    )

    def served() -> Geometry:
        engine = draw(st.sampled_from(("vllm", "kvxfer")))
        tp = draw(st.sampled_from((1, 2, 4, 8)))
        block = draw(st.sampled_from((8, 16, 24) if engine == "kvxfer" else (1, 4, 6, 16)))
        sizes = [n for n in (1, 2, 4) if n == 1 or tp // kv_heads % n == 0 < tp // kv_heads]
        may_share = engine == "vllm" and windows == "full"
        return replace(
            model,
            engine=engine,
            tp=tp,
            pp=draw(st.sampled_from((1, 1, 2))),
            dcp=draw(st.sampled_from(sizes)) if may_share else 1,
            dcp_interleave=draw(st.sampled_from([n for n in (1, 2, 3, 16) if block % n == 0])),
            block=block,
            layout=draw(st.sampled_from(("HND", "NHD"))),
            device=draw(st.sampled_from(("cpu", "cuda"))),
        )

    return served(), served()


@settings(max_examples=40, deadline=None)
@given(pairs(), st.integers(1, 40))
def test_every_cell_comes_once_from_a_rank_that_has_it(
    pair: tuple[Geometry, Geometry], num_tokens: int
) -> None:
    plan = plan_transfer(*pair, num_tokens)
    assert isinstance(plan, TransferPlan), plan
    check(plan)


def planned(
    source: Geometry, sink: Geometry, num_tokens: int = 2048, gbps: float | None = None
) -> TransferPlan:
    plan = plan_transfer(source, sink, num_tokens, gbps)
    assert isinstance(plan, TransferPlan)
    return plan


LLAMA = Geometry(layers=32, kv_heads=8, head_dim=128)


def test_ranks_that_share_the_tokens_of_a_head() -> None:
    """Runs of 16 over two ranks, and single tokens over four."""
    latent = Geometry(layers=4, head_dim=576, mla=True, tp=2, dcp=2, dcp_interleave=16)
    moves = planned(latent, replace(latent, tp=1, dcp=1), 2048).moves
    assert [(move.source, move.words[2]) for move in moves] == [
        ("pp0tp0", "1024 of 0-2031"),
        ("pp0tp1", "1024 of 16-2047"),
    ]
    assert {move.nbytes for move in moves} == {1024 * 4 * 576 * 2}
    plan = planned(latent, replace(latent, tp=4, dcp=4, dcp_interleave=1), 100)
    check(plan)
    assert len(plan.moves) == 8


@pytest.mark.parametrize("fault", ["head", "token", "layer", "rank", "nbytes", "twice", "silent"])
def test_the_count_finds_planted_faults(fault: str) -> None:
    small = Geometry(layers=3, kv_heads=2, head_dim=8, tp=2)
    plan = planned(small, replace(small, tp=1), 5)
    check(plan)
    first, *rest = plan.moves
    wrong = {
        "head": [replace(first, heads=(1, 2))],
        "token": [replace(first, tokens=(0, 4))],
        "layer": [replace(first, layers=(0, 1))],
        "rank": [replace(first, source="pp0tp1")],
        "nbytes": [replace(first, nbytes=first.nbytes + 1)],
        "twice": [first, replace(first, heads=(0, 2))],
        "silent": [],
    }[fault]
    with pytest.raises(AssertionError):
        check(replace(plan, moves=(*wrong, *rest)))


def test_replicas_share_the_reading() -> None:
    """Of a latent that all ranks hold, and of heads that two ranks hold."""
    latent = Geometry(layers=4, head_dim=576, mla=True, tp=8, indexer=128)
    moves = planned(latent, replace(latent, tp=4)).moves
    assert [move.source for move in moves if move.layers] == [f"pp0tp{tp}" for tp in (0, 2, 4, 6)]
    assert [move.source for move in moves if not move.layers] == [f"pp0tp{n}" for n in (1, 3, 5, 7)]
    assert {move.nbytes for move in moves if move.layers} == {2048 * 4 * (576 * 2 + 132)}
    heads = Geometry(layers=4, kv_heads=2, head_dim=64, tp=4)
    moves = planned(heads, replace(heads, tp=4)).moves
    assert [(move.source, move.sink) for move in moves] == [(f"pp0tp{n}",) * 2 for n in range(4)]


def test_a_load_takes_as_long_as_its_busiest_rank() -> None:
    """All that one sink rank takes from four goes through it."""
    four, one = (planned(replace(LLAMA, tp=tp), replace(LLAMA, tp=1)) for tp in (4, 1))
    for wire in four.wires:
        (alone,) = (each for each in one.wires if each.wire == wire.wire)
        assert wire.busiest == "sink pp0tp0"
        assert wire.duration_s == pytest.approx(sum(wire.terms_s.values()))
        assert wire.terms_s["wire"] == pytest.approx(alone.terms_s["wire"])
    split = planned(replace(LLAMA, tp=4), replace(LLAMA, tp=4))
    assert split.wires[0].terms_s["wire"] == pytest.approx(one.wires[0].terms_s["wire"] / 4)


def test_one_pair_of_ranks_takes_what_the_cost_model_says() -> None:
    plan = planned(LLAMA, replace(LLAMA, block=64))
    assert {wire.wire for wire in plan.wires} == {"cuda_ipc", "zmq", "tcp", "ucx", "nixl"}
    assert plan.wires == tuple(sorted(plan.wires, key=lambda wire: wire.duration_s))
    for wire in plan.wires:
        is_direct, (cut,) = wire.wire == "cuda_ipc", wire.cuts
        figures = wire.figures
        costs = WireCosts(figures.latency_s, 0 if is_direct else 400e-6, figures.bytes_per_s)
        expected_s = (
            costs.direct_s(plan.nbytes)
            if is_direct
            else costs.stream_s(plan.nbytes, cut.chunk_nbytes)
        )
        assert wire.duration_s == pytest.approx(expected_s)
        assert wire.terms_s[wire.limit] == max(wire.terms_s.values())


def test_a_link_limits_what_is_faster_than_it() -> None:
    slow, fast = (planned(LLAMA, LLAMA, 8192, gbps) for gbps in (0.125, 1000.0))
    assert {wire.wire for wire in slow.wires} == {"zmq", "tcp", "ucx", "nixl"}, (
        "shm and cuda_ipc: one host"
    )
    for wire in slow.wires:
        assert wire.limit == "link"
        assert wire.terms_s["link"] == pytest.approx(slow.nbytes / 0.125e9)
    assert all("link" not in wire.terms_s for wire in fast.wires)


@pytest.mark.parametrize("gbps", [None, 50.0])
def test_tcp_is_there_between_gpus_alone_and_faster_than_zmq(gbps: float | None) -> None:
    """As ``auto`` has it: in host memory, on either side, it never tries it."""
    in_host = replace(LLAMA, device="cpu")
    for source, sink in ((in_host, in_host), (in_host, LLAMA), (LLAMA, in_host)):
        assert "tcp" not in {wire.wire for wire in planned(source, sink, gbps=gbps).wires}
    by_name = {wire.wire: wire for wire in planned(LLAMA, LLAMA, gbps=gbps).wires}
    assert by_name["tcp"].duration_s < by_name["zmq"].duration_s


def test_staging_is_for_all_streams() -> None:
    """Slots of 32 MiB on each of 8 sockets, where one stream may have 32 MiB in all."""
    (cut,) = next(wire.cuts for wire in planned(LLAMA, LLAMA).wires if wire.wire == "tcp")
    assert cut.slot_nbytes == cut.chunk_nbytes == 32 << 20
    assert cut.num_slots >= 6
    (cut,) = next(wire.cuts for wire in planned(LLAMA, LLAMA).wires if wire.wire == "zmq")
    assert cut.num_slots * cut.slot_nbytes == 8 * (32 << 20)


def test_a_model_too_large_for_one_list_of_chunks_is_refused_with_the_reason() -> None:
    plan = plan_transfer(
        replace(LLAMA, layers=126, device="cpu"), replace(LLAMA, layers=126), 1 << 21
    )
    assert isinstance(plan, Refusal)
    assert "ask for larger ones" in plan.reason


def test_figures_are_there_for_each_wire_and_way() -> None:
    figures = load_figures()
    places = [(each.wire, each.device, each.num_hosts) for each in figures]
    assert len(set(places)) == len(places) == 16
    for each in figures:
        assert each.latency_s > 1e-5
        assert 1e9 < each.bytes_per_s < 1e12
        assert 1 <= each.most_off < 1.5
        assert each.date in each.results
