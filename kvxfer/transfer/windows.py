"""What a group with a window keeps of a request, and what of it can move to another engine. Pure.

A layer with a window of W tokens computes the token at position n from the W tokens that end with
it, n - W + 1 to n. A layer with chunks of W tokens computes it from those of its own chunk, n // W
* W to n: a window whose begin stands still until the next chunk. With n tokens computed, an engine
has let go of every block that lies wholly before that, so it keeps the tokens from
:meth:`Keeping.kept_start` on: a multiple of its own block size. The start that the sink keeps may
therefore lie before the one that the source has kept, though never by a token that the sink's next
token looks at::

    blocks of 16 at the source   |  dropped  |.....|.....|.....     holds from 48
    blocks of 32 at the sink     |  dropped  |..........|....       keeps from 32
                                             ^ 32 to 47: there is nothing to fill them with

Then the sink's first block is filled from 48 on, gives correct results, and must never be named for
prefix reuse: a request that found it by its tokens would read 16 tokens that were never written.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec import UnsetType

from kvxfer.transfer.layout import Region


@dataclass(frozen=True, slots=True)
class Keeping:
    """What an engine keeps of a request in one group: ``window`` None everything, else the blocks
    that its window, or its chunk of so many tokens, has not left behind. ``is_state``: one block,
    which has the state after the last token.
    """

    block_tokens: int
    window: int | None = None
    is_state: bool = False
    is_chunk: bool = False

    def needed_start(self, num_computed_tokens: int) -> int:
        """The first token that the next one looks at."""
        if self.window is None:
            return 0
        if self.is_chunk:
            return num_computed_tokens // self.window * self.window
        return max(0, num_computed_tokens - self.window + 1)

    def kept_start(self, num_computed_tokens: int) -> int:
        """The first token of the first kept block; a block goes when the next token looks at
        nothing in it.
        """
        return self.needed_start(num_computed_tokens) // self.block_tokens * self.block_tokens

    def includes(self, other: Keeping) -> bool:
        """Does who keeps this have what the next token looks at in a group that keeps ``other``?"""
        if self.window is None or other.window is None:
            return self.window is None
        if self.is_chunk:
            return other.is_chunk and self.window % other.window == 0
        return other.window <= self.window  # a chunk never begins before its window does

    def held_start(self, num_offered_tokens: int) -> int:
        """The first token that a source holds of an offer.

        One token less counts as computed than is offered: a sink that was offered its whole prompt
        computes the last token again, to sample from it, and needs that token's window.
        """
        return self.kept_start(max(0, num_offered_tokens - 1))

    def edge(self, num_offered_tokens: int) -> range:
        """Positions of the blocks that a source holds of an offer although an engine that has
        computed the offered tokens lets go of them.

        It is one block where the window of the last offered token begins with the last token of a
        block, all blocks of the chunk that ends with the offer, and none elsewhere.
        """
        gone, held = (
            start(num_offered_tokens) // self.block_tokens
            for start in (self.kept_start, self.held_start)
        )
        return range(held, gone)

    def __str__(self) -> str:
        if self.is_state:
            return f"a state in each {self.block_tokens} tokens"
        return f"{self.kept} in blocks of {self.block_tokens}"

    @property
    def kept(self) -> str:
        """In words, of what keeps tokens."""
        if self.window is None:
            return "everything"
        return f"{'chunks' if self.is_chunk else 'a window'} of {self.window} tokens"


@dataclass(frozen=True, slots=True)
class Whole:
    """Tokens ``[token_lo, token_hi)`` move; every block that the sink keeps is complete then."""

    token_lo: int
    token_hi: int


@dataclass(frozen=True, slots=True)
class Clipped:
    """Tokens ``[token_lo, token_hi)`` move; the sink's block at ``position`` of its table lacks
    earlier ones, which nothing will look at: it must not be named for prefix reuse.
    """

    token_lo: int
    token_hi: int
    position: int


@dataclass(frozen=True, slots=True)
class Missing:
    """The sink's next token needs tokens from ``needed_start``; the source holds none before
    ``held_start``.
    """

    needed_start: int
    held_start: int
    sink: Keeping
    source: Keeping

    def explain(self, layer: str) -> str:
        return (
            f"{layer}: expected tokens from {self.needed_start} on, which the sink needs (it keeps "
            f"{self.sink}); the source has let go of those before {self.held_start} (it keeps "
            f"{self.source})"
        )


Move = Whole | Clipped | Missing
"""What becomes of one group of a load."""


def group_move(
    token_lo: int, token_hi: int, num_offered_tokens: int, *, sink: Keeping, source: Keeping
) -> Move:
    """What moves of tokens ``[token_lo, token_hi)`` in one group, and what it leaves at the sink.

    The sink has the tokens before ``token_lo``, as far as it keeps them, and goes on at
    ``token_hi``.
    """
    wanted_start = max(token_lo, sink.kept_start(token_hi))
    held_start = source.held_start(num_offered_tokens)
    if held_start <= wanted_start or wanted_start >= token_hi:
        return Whole(wanted_start, token_hi)
    needed_start = max(token_lo, sink.needed_start(token_hi))
    if needed_start < min(held_start, token_hi):
        return Missing(needed_start, held_start, sink, source)
    # Now the sink's block in which its window starts begins before what the source holds.
    return Clipped(min(held_start, token_hi), token_hi, wanted_start // sink.block_tokens)


def may_clip(sink: Keeping, source: Keeping) -> bool:
    """Is there an offer of which the source lacks the start of the sink's first kept block?

    The source's start is a multiple of its own block size, so it lies at multiples of the common
    divisor behind the start of a sink block, and at least the difference of the windows before the
    start of the sink's window. Never where the source's block is a multiple of the sink's, nor
    where all chunks of the sink begin with a block. For other chunks the answer may be yes where
    there is none (chunks of 10 tokens in blocks of 15 and 6).
    """
    if sink.window is None or source.window is None:
        return False
    if sink.is_chunk:
        return all(tokens % sink.block_tokens for tokens in (source.block_tokens, sink.window))
    difference = source.window - sink.window
    return difference + math.gcd(source.block_tokens, sink.block_tokens) < sink.block_tokens


def keeping_of(region: Region) -> Keeping:
    if isinstance(region.state_tokens, UnsetType):
        is_chunk = region.is_chunk is True
        return Keeping(region.table_tokens, region.window, is_chunk=is_chunk)
    return Keeping(region.state_tokens, is_state=True)


def group_keepings(regions: Iterable[Region]) -> dict[int, Keeping]:
    """What is kept, by group. Raises ValueError where two regions of a group disagree."""
    found: dict[int, Keeping] = {}
    for region in regions:
        keeping = keeping_of(region)
        first = found.setdefault(region.group, keeping)
        if first != keeping:
            raise ValueError(
                f"group {region.group}: expected all layers to keep {first}, "
                f"got {keeping} of {region.layer}/{region.plane}"
            )
    return found


def held_ids(
    block_ids: Sequence[Sequence[int]], keepings: Mapping[int, Keeping], num_offered_tokens: int
) -> tuple[tuple[int, ...], ...]:
    """A block table as an offer may tell it: -1 for every block that the windows let go of.

    Its id may stand in the table still, and be another request's by now. Of a state one id is left,
    that of the block with the state after the last offered token, once it is in the table. Groups
    that are not in ``keepings`` stay as they are.
    """
    return tuple(
        _held_ids(ids, keepings[group], num_offered_tokens) if group in keepings else tuple(ids)
        for group, ids in enumerate(block_ids)
    )


def edge_ids(
    block_ids: Sequence[Sequence[int]], keepings: Mapping[int, Keeping], num_offered_tokens: int
) -> tuple[tuple[int, ...], ...]:
    """A block table of which only the blocks of :meth:`Keeping.edge` are left, -1 before them. A
    group without such a block is empty.
    """
    edges = (
        keepings[group].edge(num_offered_tokens) if group in keepings else range(0)
        for group in range(len(block_ids))
    )
    return tuple(
        (-1,) * edge.start + tuple(ids[edge.start : edge.stop]) if edge else ()
        for ids, edge in zip(block_ids, edges, strict=True)
    )


def _held_ids(ids: Sequence[int], keeping: Keeping, num_offered_tokens: int) -> tuple[int, ...]:
    if keeping.is_state:
        position = (num_offered_tokens - 1) // keeping.block_tokens
        return tuple(ids[position : position + 1])
    num_gone = min(keeping.held_start(num_offered_tokens) // keeping.block_tokens, len(ids))
    return (-1,) * num_gone + tuple(ids[num_gone:])
