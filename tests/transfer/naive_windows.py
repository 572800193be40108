"""What windows keep, one token after the other: the truth about :mod:`kvxfer.transfer.windows`."""

from __future__ import annotations

from kvxfer.transfer.windows import Clipped, Keeping, Missing, Move, Whole


def visible_tokens(position: int, keeping: Keeping) -> set[int]:
    """What the token at a position looks at, itself among them."""
    tokens, before = range(position + 1), set(range(position + 1))
    if keeping.window is None:
        return before
    if keeping.is_chunk:
        return {t for t in tokens if t // keeping.window == position // keeping.window}
    return {t for t in tokens if t > position - keeping.window}


def kept_tokens(num_computed: int, keeping: Keeping) -> set[int]:
    """What is left after computing one token after the other: before each, the blocks go of which
    it sees no token.
    """
    kept: set[int] = set()
    block_tokens = keeping.block_tokens
    for position in range(num_computed + 1):
        visible = visible_tokens(position, keeping)
        blocks = {t // block_tokens for t in kept | {position}}
        seen = {b for b in blocks if any(t // block_tokens == b for t in visible)}
        kept = {t for t in kept if t // block_tokens in seen}
        if position < num_computed:
            kept.add(position)
    return kept


def simulated(lo: int, hi: int, offered: int, sink: Keeping, source: Keeping) -> Move:
    """The same decision, from sets of tokens."""
    held = kept_tokens(offered - 1, source) | {offered - 1}
    wanted = {t for t in kept_tokens(hi, sink) if t >= lo}
    needed = visible_tokens(hi, sink) & set(range(lo, hi))
    if wanted <= held:
        return Whole(min(wanted, default=hi), hi)
    if not needed <= held:
        return Missing(min(needed), min(held), sink, source)
    moved = wanted & held
    assert moved == set(range(min(moved, default=hi), hi))
    (position,) = {t // sink.block_tokens for t in wanted - held}
    return Clipped(min(moved, default=hi), hi, position)
