"""Offers that grow over real wires: what is open is read while the rest is computed, and the naive
copy says what has to lie there. Nothing but what is open was computed: all else of a source's
blocks is poison until its step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvxfer.connector.records import ConnectorMetadata, SourceRef
from kvxfer.transfer.layout import Interior
from tests.builders import MAMBA2, EngineShape
from tests.connector.rig import (
    PATIENT,
    POISON,
    WIRES,
    Engine,
    Table,
    expect_moved,
    until,
)
from tests.oracle import oracle_copy

UNCOMPUTED = 0x77
SETTINGS: dict[str, Any] = {**PATIENT, "early_wait_s": 60.0, "chunk_nbytes": 4096}
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
    "opaque": tuple(
        replace(LARGE, interior=Interior.OPAQUE, kernel_blocks=2, outermost=outermost)
        for outermost in ("blocks", "blocks")
    ),
}


def table_of(shape: EngineShape, num_tokens: int, seed: int) -> Table:
    """Ids in no order, that no two groups share."""
    num = -(-num_tokens // shape.block_tokens)
    ids = np.random.default_rng(seed).permutation(np.arange(1, shape.num_blocks)).tolist()
    return tuple(tuple(ids[g * num : (g + 1) * num]) for g in range(shape.num_groups))


def first_blocks(shape: EngineShape, table: Table, num_tokens: int) -> Table:
    return tuple(ids[: -(-num_tokens // shape.block_tokens)] for ids in table)


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
        blocks = self.engine._blocks(self.name, self.table)
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
        block = sink.shape.block_tokens
        spans = {group: (lo, -(-hi // block) * block) for group, (lo, hi) in spans.items()}
    expect_moved(source, sink, prefill.table, taken, spans)


def _kept(num_tokens: int, window: int, sink: Engine) -> int:
    return max(0, num_tokens - window + 1) // sink.shape.block_tokens * sink.shape.block_tokens


def has_arrived(prefill: Prefill, sink: Engine, taken: Table, span: tuple[int, int]) -> bool:
    try:
        expect_loaded(prefill, sink, taken, span)
    except AssertionError:
        return False
    return True


@pytest.fixture(params=[(pair, wire) for pair in PAIRS for wire in WIRES], ids="-".join)
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
    hi = data.draw(st.integers(1, num_tokens), "hi")
    if sink.shape.state:
        hi = num_tokens
    lo = data.draw(st.integers(0, hi - 1), "lo")
    if sink.shape.interior is Interior.OPAQUE:
        lo -= lo % sink.shape.block_tokens
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
