"""What the requests of a test hold: prompts, block tables, and the bytes that each rank must have.

Everything is computed from the case alone, so that every rank knows it without being told.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvxfer.transfer.layout import Region
from tests.builders import EngineShape, LayoutName, Outermost, build_manifest, scattered_ids
from tests.helpers import POISON
from tests.oracle import keeps, oracle_pieces, oracle_value, oracle_write

Bytes = NDArray[np.uint8]

NUM_KV_HEADS = 4
INNER_NBYTES = 32
NUM_SPARE_BLOCKS = 3
# (source, sink): the two sides never have the same strides.
OUTERMOST: tuple[Outermost, Outermost] = ("planes", "blocks")
PADDING_NBYTES = (0, 16)


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: prompt length, and how many blocks of it the sink has itself already."""

    num_tokens: int
    num_local_blocks: int = 0


ASKS = (Ask(17), Ask(2), Ask(151, 1), Ask(64), Ask(131, 2))
"""Lengths below, at and above block sizes, the shortest that has a token to load, local prefixes
of one and two blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A request on both sides. Tables are positional from the first token.

    ``token_lo``, ``token_hi``: what the sink loads. It computes the last prompt token itself.
    """

    number: int
    num_tokens: int
    token_lo: int
    source_ids: tuple[int, ...]
    sink_ids: tuple[int, ...]

    @property
    def token_hi(self) -> int:
        return self.num_tokens - 1

    @property
    def source_id(self) -> str:
        """Its request id at the source."""
        return f"prefill-{self.number}"

    @property
    def sink_id(self) -> str:
        """Its request id at the sink."""
        return f"decode-{self.number}"

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The prompt."""
        return tuple((self.number * 1009 + token * 31) % 32_000 for token in range(self.num_tokens))


@dataclass(frozen=True, slots=True)
class Pair:
    """Both engines' shapes and the requests that go from one to the other."""

    source: EngineShape
    sink: EngineShape
    prompts: tuple[Prompt, ...]

    @property
    def num_loaded_nbytes(self) -> int:
        """Of all requests, over all sink ranks."""
        return sum(
            region.num_heads * region.inner_nbytes
            for rank in build_manifest(self.sink).ranks
            for region in rank.regions
            for prompt in self.prompts
            for token in range(prompt.token_lo, prompt.token_hi)
            if keeps(region, token)
        )


def make_pair(
    tp_sizes: Sequence[int],
    blocks: Sequence[int] = (16, 24),
    layouts: Sequence[LayoutName] = ("HND", "NHD"),
    asks: Sequence[Ask] = ASKS,
    interleaves: Sequence[tuple[int, int]] = ((1, 1), (1, 1)),
) -> Pair:
    """Two engines of one model that differ in what is given as (source, sink) and in the order of
    their planes. ``interleaves``: how many ranks share the tokens, in runs of how many; then the
    model has one head.
    """
    has_one_head = any(size > 1 for size, _ in interleaves)
    table_blocks = [b * size for b, (size, _) in zip(blocks, interleaves, strict=True)]
    tables = [list(_tables([ask.num_tokens for ask in asks], size)) for size in table_blocks]
    shapes = [
        EngineShape(
            tp_size=tp_size,
            num_kv_heads=1 if has_one_head else NUM_KV_HEADS,
            block_tokens=block_tokens,
            num_blocks=sum(map(len, table)) + NUM_SPARE_BLOCKS,
            inner_nbytes=INNER_NBYTES,
            layout=layout,
            outermost=outermost,
            padding_nbytes=padding_nbytes,
            cp_size=cp_size,
            cp_run=cp_run,
        )
        for tp_size, block_tokens, layout, table, outermost, padding_nbytes, (
            cp_size,
            cp_run,
        ) in zip(
            *(tp_sizes, blocks, layouts, tables, OUTERMOST, PADDING_NBYTES, interleaves),
            strict=True,
        )
    ]
    prompts = tuple(
        Prompt(
            number=number,
            num_tokens=ask.num_tokens,
            token_lo=min(ask.num_local_blocks * table_blocks[1], ask.num_tokens - 1),
            source_ids=source_ids,
            sink_ids=sink_ids,
        )
        for number, (ask, source_ids, sink_ids) in enumerate(zip(asks, *tables, strict=True))
    )
    return Pair(shapes[0], shapes[1], prompts)


def _tables(lengths: Iterable[int], block_tokens: int) -> Iterator[tuple[int, ...]]:
    """Block tables that share no block, in no order; block 0 is nobody's."""
    counts = [-(-num_tokens // block_tokens) for num_tokens in lengths]
    last = sum(counts) + NUM_SPARE_BLOCKS - 1
    ids = iter(scattered_ids(last * block_tokens, block_tokens, last, seed=block_tokens))
    for count in counts:
        yield tuple(block_id + 1 for block_id in itertools.islice(ids, count))


def write_tokens(
    memory: Bytes, regions: Iterable[Region], ids: Sequence[int], number: int, lo: int, hi: int
) -> None:
    """Request ``number``'s KV of tokens [lo, hi), which depends on (request, layer, plane, global
    head, token) alone, into a rank's memory: one token and head at a time.
    """
    for region in regions:
        for position in (token for token in range(lo, hi) if keeps(region, token)):
            for head in range(region.head_lo, region.head_hi):
                pieces = oracle_pieces(region, [memory], ids, position, head)
                oracle_write(pieces, oracle_value(region, position, head, number))


def expected_at_sink(nbytes: int, regions: Sequence[Region], prompts: Iterable[Prompt]) -> Bytes:
    """A sink rank's memory once these requests are loaded: poison, but for what was loaded."""
    memory = np.full(nbytes, POISON, dtype=np.uint8)
    for prompt in prompts:
        write_tokens(
            memory, regions, prompt.sink_ids, prompt.number, prompt.token_lo, prompt.token_hi
        )
    return memory


def forgive(expected: Bytes, got: Bytes, regions: Iterable[Region], prompt: Prompt) -> None:
    """Expect whatever is there in the tokens that a failed load was to bring, and nowhere else."""
    for region in regions:
        for position in range(prompt.token_lo, prompt.token_hi):
            for head in range(region.head_lo, region.head_hi):
                wanted = oracle_pieces(region, [expected], prompt.sink_ids, position, head)
                found = oracle_pieces(region, [got], prompt.sink_ids, position, head)
                oracle_write(wanted, np.concatenate(found))


def assert_same(got: Bytes, expected: Bytes) -> None:
    """Byte for byte; says where the first difference is."""
    bad = np.flatnonzero(got != expected)
    assert not bad.size, (
        f"{bad.size} of {got.size} bytes differ, first at {bad[0]}: "
        f"got {got[bad[0]]:#04x}, expected {expected[bad[0]]:#04x}"
    )
