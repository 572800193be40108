"""Offers that grow over real wires: what is open is read while the rest is computed, and the naive
copy says what has to lie there. Nothing but what is open was computed: all else of a source's
blocks is poison until its step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvxfer.connector.records import ConnectorMetadata, SourceRef
from kvxfer.connector.source import IsReady
from kvxfer.transfer.layout import Interior
from kvxfer.transfer.wire import Grant, OfferRef, Reason
from tests.builders import MAMBA2, EngineShape
from tests.conftest import HAS_CUDA
from tests.connector.rig import (
    NIXL,
    POISON,
    UCX,
    WIRES,
    Engine,
    Table,
    expect_moved,
    num_pulls,
    pass_s,
    stuck,
    until,
)
from tests.connector.sides import UNCOMPUTED, first_blocks, table_of
from tests.oracle import oracle_copy
from tests.spoken import change_messages

SETTINGS: dict[str, Any] = {"chunk_nbytes": 4096}
LARGE = EngineShape(num_blocks=24, inner_nbytes=128)
"""128 bytes of one head and token: a chunk of 4 KiB has 16 tokens of one region."""
PAIRS = {
    "equal": (LARGE, LARGE),
    "blocks and layout": (
        replace(LARGE, block_tokens=12, num_blocks=32),
        replace(LARGE, layout="NHD", outermost="blocks"),
    ),
    "TP 2 to 1": (replace(LARGE, tp_size=2), replace(LARGE, block_tokens=24)),
    "TP 1 to 2": (replace(LARGE, layout="NHD"), replace(LARGE, tp_size=2, kernel_blocks=2)),
    "hybrid": tuple(
        replace(
            LARGE,
            groups=(0, 1),
            windows=(window, None),
            shares=((1, 0),),
            block_tokens=block,
            num_blocks=48,
        )
        for window, block in ((40, 16), (32, 8))
    ),
    "states": (
        replace(LARGE, tp_size=2, state=replace(MAMBA2, conv_layout="DS")),
        replace(LARGE, block_tokens=8, num_blocks=48, state=replace(MAMBA2, state_tokens=8)),
    ),
    "compressed": (
        replace(LARGE, tp_size=2, cell_tokens=4, inner_nbytes=512),
        replace(LARGE, block_tokens=24, cell_tokens=4, inner_nbytes=512, layout="NHD"),
    ),
    "opaque": tuple(
        replace(LARGE, interior=Interior.OPAQUE, kernel_blocks=2, outermost=outermost)
        for outermost in ("blocks", "blocks")
    ),
    "tokens of 2 ranks to 1": (
        replace(LARGE, num_kv_heads=1, tp_size=2, cp_size=2, block_tokens=8),
        replace(LARGE, num_kv_heads=1, block_tokens=24, protocol=(1, 3)),
    ),
    "tokens of 1 rank to 2": (
        replace(LARGE, num_kv_heads=1, layout="NHD", protocol=(1, 3)),
        replace(LARGE, num_kv_heads=1, tp_size=2, cp_size=2, cp_run=4, block_tokens=8),
    ),
}


@dataclass
class Prefill:
    """A prompt whose KV is computed step by step: a copy of what the pools hold at first."""

    engine: Engine
    name: str
    num_tokens: int
    table: Table
    num_computed: int = 0

    def __post_init__(self) -> None:
        self.truth = [pool.tensor.cpu().numpy().copy() for pool in self.engine.pools]
        for pool in self.engine.pools:
            pool.tensor.fill_(UNCOMPUTED)

    def write(self, num_tokens: int) -> None:
        """Compute the tokens from the last step's on."""
        groups = range(self.engine.shape.num_groups)
        if self.engine.shape.state and num_tokens < self.num_tokens:
            groups = range(self.engine.shape.num_groups - 1)  # the state is another one still
        span = (self.num_computed, num_tokens)
        for entry, pool, truth in zip(
            self.engine.manifest.ranks, self.engine.pools, self.truth, strict=True
        ):
            regions = [
                msgspec.structs.replace(each, interior=Interior.PLAIN) for each in entry.regions
            ]
            target = pool.tensor.cpu().numpy()
            oracle_copy(
                regions,
                [truth],
                regions,
                [target],
                source_ids=self.table,
                sink_ids=self.table,
                spans=dict.fromkeys(groups, span),
            )
            if pool.tensor.device.type != "cpu":
                pool.tensor.copy_(torch.from_numpy(target))
        self.num_computed = num_tokens

    def blocks(self, num_tokens: int) -> Table:
        return first_blocks(self.engine.shape, self.table, num_tokens)

    def begin(self, cached: int = 0, name: bytes = b"") -> SourceRef:
        """Admit it; its first ``cached`` tokens are there."""
        self.write(cached)
        blocks = self.blocks(max(cached, 1))
        return self.engine.begin(self.name, self.num_tokens, blocks, cached=cached, name=name)

    def step(self, num_tokens: int) -> None:
        """A step ends, after which so many tokens are computed; with the last one it is over."""
        self.write(num_tokens)
        if num_tokens < self.num_tokens:
            self.engine.grow(self.name, num_tokens, self.blocks(num_tokens))
            return
        blocks = self.engine.blocks_of(self.name, self.table)
        self.engine.step(ConnectorMetadata(blocks=(blocks,)))
        self.engine.compute(self.name)


def expect_loaded(prefill: Prefill, sink: Engine, taken: Table, span: tuple[int, int]) -> None:
    """All that the sink keeps of the span, and nothing else."""
    source = prefill.engine
    spans = {
        group: (max(span[0], 0 if window is None else _kept(span[1], window, sink)), span[1])
        for group, window in enumerate(sink.shape.windows or (None,) * sink.shape.num_groups)
    }
    if sink.shape.interior is Interior.OPAQUE:
        block = sink.shape.table_tokens
        spans = {group: (lo, -(-hi // block) * block) for group, (lo, hi) in spans.items()}
    expect_moved(source, sink, prefill.table, taken, spans)


def _kept(num_tokens: int, window: int, sink: Engine) -> int:
    return max(0, num_tokens - window + 1) // sink.shape.block_tokens * sink.shape.block_tokens


# Without a GPU its kernel is interpreted, which takes as long as all others together
@pytest.fixture(
    params=[
        (pair, wire)
        for pair in PAIRS
        for wire in WIRES
        if wire != "cuda_ipc" or HAS_CUDA or pair in ("equal", "hybrid")
    ],
    ids="-".join,
)
def engines(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Engine]]:
    """Of one pair of shapes over one wire, for many loads."""
    pair, wire = request.param
    source_shape, sink_shape = PAIRS[pair]
    with ExitStack() as stack:
        settings = {**SETTINGS, "transport": wire}
        source = stack.enter_context(Engine(source_shape, "prefill", fill=None, **settings))
        sink = stack.enter_context(Engine(sink_shape, "decode", fill=POISON, **settings))
        yield source, sink


_number = iter(range(1 << 30))


@given(data=st.data())
@settings(
    max_examples=4,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_whatever_the_steps_what_was_read_is_whole(
    engines: tuple[Engine, Engine], data: st.DataObject
) -> None:
    source, sink = engines
    num_tokens = data.draw(st.integers(2, 96), "tokens")
    steps = sorted(data.draw(st.sets(st.integers(1, num_tokens - 1), max_size=4), "steps"))
    cached = data.draw(st.sampled_from((0, *steps)), "cached")
    steps = [n for n in steps if n > cached]
    # A source with windows has only what follows the end of its offer; a state cannot be cut
    least = num_tokens - 1 if source.shape.windows else 1
    hi = num_tokens if sink.shape.state else data.draw(st.integers(least, num_tokens), "hi")
    lo = data.draw(st.integers(0, hi - 1), "lo")
    if sink.shape.interior is Interior.OPAQUE:
        lo -= lo % sink.shape.table_tokens
    comes_at = data.draw(st.integers(0, len(steps)), "the sink comes before step")
    name = f"p{next(_number)}"
    for pool in source.pools:
        pool.tensor.copy_(torch.randint(0, 256, pool.tensor.shape, dtype=torch.uint8))
    for pool in sink.pools:
        pool.tensor.fill_(POISON)
    prefill = Prefill(source, name, num_tokens, table_of(source.shape, num_tokens, seed=1))
    taken = table_of(sink.shape, hi, seed=2)
    ref = prefill.begin(cached)
    for number, num_computed in enumerate([*steps, num_tokens]):
        if number == comes_at:
            sink.load_groups(f"d{name}", ref, taken, (lo, hi), grows=True)
        prefill.step(num_computed)
    until(lambda: sink.received(f"d{name}"))
    assert sink.reasons(f"d{name}") == {None}
    expect_loaded(prefill, sink, taken, (lo, hi))
    until(lambda: source.sent(name))


# ------------------------------------------------------------------ one load, step by step

TOKENS = 80
HALF, SPAN = 48, (0, 80)


@contextmanager
def loading(
    wire: str = "shm",
    shapes: tuple[EngineShape, EngineShape] = (LARGE, LARGE),
    faults: str = "",
    ready_event: Callable[[], IsReady] | None = None,
    **given: Any,
) -> Iterator[tuple[Prefill, Engine, Table]]:
    """A growing load, of which the first half is open."""
    given = {**SETTINGS, "transport": wire, **given}
    with (
        Engine(shapes[0], "prefill", fill=None, ready_event=ready_event, **given) as source,
        Engine(shapes[1], "decode", fill=POISON, faults=faults, **given) as sink,
    ):
        prefill = Prefill(source, "p", TOKENS, table_of(shapes[0], TOKENS, seed=1))
        taken = table_of(shapes[1], TOKENS, seed=2)
        ref = prefill.begin()
        sink.load_groups("d", ref, taken, SPAN, grows=True)
        prefill.step(HALF)
        yield prefill, sink, taken


def has_first_half(prefill: Prefill, sink: Engine, taken: Table) -> bool:
    try:
        expect_loaded(prefill, sink, taken, (0, HALF))
    except AssertionError:
        return False
    return True


def end_of(prefill: Prefill, sink: Engine) -> set[str | None]:
    """The load's reasons, once it and the offer are reported."""
    until(lambda: sink.received("d"))
    until(lambda: prefill.engine.sent("p"))
    return sink.reasons("d")


@pytest.mark.parametrize("wire", ["shm", "zmq", "cuda_ipc", UCX, NIXL])
def test_what_is_open_has_left_before_the_rest_is_computed(wire: str) -> None:
    with loading(wire) as (prefill, sink, taken):
        until(lambda: has_first_half(prefill, sink, taken))
        assert not sink.received("d")
        prefill.step(TOKENS)
        assert end_of(prefill, sink) == {None}
        expect_loaded(prefill, sink, taken, SPAN)


@pytest.mark.parametrize("wire", ["shm", "zmq"])
def test_a_shared_cell_leaves_with_its_last_token(wire: str) -> None:
    source, other = PAIRS["compressed"]
    with loading(wire, (source, other)) as (prefill, sink, taken):
        until(lambda: has_first_half(prefill, sink, taken))
        prefill.step(HALF + 3)
        sink.step(ConnectorMetadata())
        assert has_first_half(prefill, sink, taken)
        prefill.step(TOKENS)
        assert end_of(prefill, sink) == {None}
        expect_loaded(prefill, sink, taken, SPAN)


@pytest.mark.parametrize("wire", WIRES)
def test_growth_is_told_when_the_event_of_its_step_has_completed(wire: str) -> None:
    gates: list[bool] = []

    def event() -> IsReady:
        number = len(gates)
        gates.append(False)
        return lambda: gates[number]

    with loading(wire, ready_event=event) as (prefill, sink, taken):
        until(lambda: num_pulls(prefill.engine, prefill.engine.nonces["p"]))
        sink.step(ConnectorMetadata())
        assert (sink.pools[0].tensor == POISON).all()
        gates[0] = True
        until(lambda: has_first_half(prefill, sink, taken))
        prefill.step(TOKENS)
        assert has_first_half(prefill, sink, taken)
        gates[1] = True
        assert end_of(prefill, sink) == {None}


@pytest.mark.parametrize("wire", ["shm", "zmq"])
@pytest.mark.parametrize("how", ["ended", "stuck", "expired"])
def test_an_offer_that_breaks_in_mid_growth_fails_the_load(wire: str, how: str) -> None:
    with loading(wire) as (prefill, sink, taken):
        until(lambda: has_first_half(prefill, sink, taken))
        source = prefill.engine
        if how == "stuck":
            with stuck(source):  # the engine's end counts, whatever its IO thread does
                source.end("p", Reason.PREEMPTED)
                prefill.engine.pools[0].tensor.fill_(POISON)
                source.step(ConnectorMetadata(computed=("p",), delayed=("p",)))
        else:
            reason = Reason.PREEMPTED if how == "ended" else Reason.EXPIRED
            source.step(ConnectorMetadata(ended=(source.end_of("p", reason),), delayed=("p",)))
        expected = "expired" if how == "expired" else "preempted"
        assert end_of(prefill, sink) == {expected}


@pytest.mark.parametrize("wire", ["shm", "zmq"])
def test_a_sink_of_protocol_1_waits_until_the_same_offer_is_complete(wire: str) -> None:
    with (
        loading(wire) as (prefill, sink, taken),
        Engine(LARGE, "other", fill=POISON, **SETTINGS, transport=wire) as other,
    ):
        source = prefill.engine
        ref = SourceRef(
            engine_id="prefill",
            endpoint=source.endpoint,
            offer=OfferRef(source.nonces["p"], source.incarnation),
            num_tokens=TOKENS,
        )
        other.load_groups("o", ref, taken, SPAN)
        until(lambda: num_pulls(source, source.nonces["p"]) == 2)
        until(lambda: has_first_half(prefill, sink, taken))
        assert (other.pools[0].tensor == POISON).all()
        prefill.step(TOKENS)
        until(lambda: other.received("o"))
        assert other.reasons("o") == {None}
        expect_loaded(prefill, other, taken, SPAN)
        assert end_of(prefill, sink) == {None}


def test_grants_that_are_lost_come_twice_or_too_late_do_no_harm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second one is lost; all later ones come twice, and the one before them once more."""
    kept: list[Grant] = []

    def unreliable(answer: Any) -> Iterable[Any]:  # noqa: ANN401
        if not isinstance(answer, Grant):
            return (answer,)
        kept.append(answer)
        return (answer, *kept[-2:]) if len(kept) != 2 else ()

    change_messages(monkeypatch, unreliable)
    with loading() as (prefill, sink, taken):
        until(lambda: len(kept) > 2)  # it was asked again
        until(lambda: has_first_half(prefill, sink, taken))
        for num_tokens in (56, 64, TOKENS):
            prefill.step(num_tokens)
        assert end_of(prefill, sink) == {None}
        expect_loaded(prefill, sink, taken, SPAN)


def test_block_ids_are_appended_and_never_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(answer: Any) -> Iterable[Any]:  # noqa: ANN401
        if isinstance(answer, Grant) and answer.open_tokens == 64:
            (ids,) = answer.block_ids
            answer = msgspec.structs.replace(answer, block_ids=((ids[1], ids[0], *ids[2:]),))
        return (answer,)

    change_messages(monkeypatch, change)
    with loading() as (prefill, sink, taken):
        until(lambda: has_first_half(prefill, sink, taken))
        prefill.step(64)
        until(lambda: sink.received("d"))
        assert sink.reasons("d") == {"plan"}
        (report,) = sink.reports("d")
        assert "expected the block ids of the Grant before" in report.detail


def test_a_pull_may_overtake_its_offer_at_another_rank() -> None:
    """A sink that was told the nonce by the front door asks rank 1, which has not heard of it."""
    shapes = replace(LARGE, tp_size=2), replace(LARGE, tp_size=2)
    given = {**SETTINGS, "transport": "shm"}
    with (
        Engine(shapes[0], "prefill", fill=None, **given) as source,
        Engine(shapes[1], "decode", fill=POISON, **given) as sink,
    ):
        prefill = Prefill(source, "p", TOKENS, table_of(shapes[0], TOKENS, seed=1))
        taken = table_of(shapes[1], TOKENS, seed=2)
        late = source.workers.pop()
        ref = prefill.begin()
        order = source.last_offer
        sink.load_groups("d", ref, taken, SPAN, grows=True)
        until(lambda: sink.count("peers.ready") == 2)
        until(lambda: num_pulls(source, ref.offer.nonce))
        source.workers.append(late)
        late.bind_connector_metadata(ConnectorMetadata(offers=(order,)))
        prefill.step(TOKENS)
        assert end_of(prefill, sink) == {None}
        expect_loaded(prefill, sink, taken, SPAN)


@pytest.mark.parametrize("wire", ["shm", "zmq"])
def test_digests_are_of_the_whole_at_the_end(wire: str) -> None:
    with loading(wire, verify="all") as (prefill, sink, taken):
        until(lambda: has_first_half(prefill, sink, taken))
        prefill.step(TOKENS)
        assert end_of(prefill, sink) == {None}
        assert sink.count("verify.equal") == 1


@pytest.mark.parametrize("wire", ["shm", "zmq"])
def test_a_first_half_that_was_not_written_is_noticed_at_the_end(wire: str) -> None:
    with loading(wire, verify="all", faults="read:blank") as (prefill, sink, _):
        prefill.step(TOKENS)
        assert end_of(prefill, sink) == {"corrupt"}


@pytest.mark.parametrize("wire", ["shm", "zmq"])
def test_a_sink_that_dies_in_mid_growth_leaves_nothing_behind(wire: str) -> None:
    with loading(wire) as (prefill, sink, taken):
        until(lambda: has_first_half(prefill, sink, taken))
        sink.close()
        prefill.step(TOKENS)
        pass_s(prefill.engine, 300.0)
        until(lambda: prefill.engine.sent("p"))


def test_a_source_that_dies_in_mid_growth_fails_the_load_by_name() -> None:
    with loading() as (prefill, sink, taken):
        until(lambda: has_first_half(prefill, sink, taken))
        prefill.engine.close()
        until(lambda: sink.received("d"))
        assert sink.reasons("d") <= {"shutdown", "peer_lost"}


@pytest.mark.parametrize("wire", ["shm", "zmq"])
def test_a_load_that_is_aborted_in_mid_growth_writes_nothing_more(wire: str) -> None:
    with loading(wire) as (prefill, sink, taken):
        until(lambda: has_first_half(prefill, sink, taken))
        sink.abort("d")
        until(lambda: sink.received("d"))
        for pool in sink.pools:
            pool.tensor.fill_(POISON)
        prefill.step(TOKENS)
        assert end_of(prefill, sink) == {"cancelled"}
        assert all((pool.tensor == POISON).all() for pool in sink.pools)


def test_a_prompt_that_grows_no_further_misses_the_deadline_and_not_before() -> None:
    with loading(pull_timeout_s=0.2) as (prefill, sink, taken):
        until(lambda: has_first_half(prefill, sink, taken))
        for duration_s in (200.0, 1.0, 1.0):  # a read that is stopped is over a round later
            pass_s(sink, duration_s)
        assert not sink.received("d")
        pass_s(sink, 100.0)
        until(lambda: sink.count("loads.failed"))
        (report,) = sink.reports("d")
        assert report.reason == "deadline"
        assert report.finished_s - report.spans[-1][0] >= 300.0
        prefill.step(TOKENS)
        until(lambda: prefill.engine.sent("p"))
