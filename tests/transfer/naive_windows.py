"""What windows keep, one token after the other: the truth about :mod:`kvxfer.transfer.windows`."""

from __future__ import annotations

from kvxfer.transfer.windows import Clipped, Keeping, Missing, Move, Whole


def kept_tokens(num_computed: int, window: int | None, block_tokens: int) -> set[int]:
    """What is left after computing one token after the other: before each, the blocks go of which
    its window sees no token.
    """
    kept: set[int] = set()
    for position in range(num_computed + 1):
        visible = {t for t in range(position + 1) if window is None or t > position - window}
        blocks = {t // block_tokens for t in kept | {position}}
        seen = {b for b in blocks if any(t // block_tokens == b for t in visible)}
        kept = {t for t in kept if t // block_tokens in seen}
        if position < num_computed:
            kept.add(position)
    return kept


def simulated(lo: int, hi: int, offered: int, sink: Keeping, source: Keeping) -> Move:
    """The same decision, from sets of tokens."""
    held = kept_tokens(offered - 1, source.window, source.block_tokens) | {offered - 1}
    wanted = {t for t in kept_tokens(hi, sink.window, sink.block_tokens) if t >= lo}
    needed = {t for t in range(lo, hi) if sink.window is None or t > hi - sink.window}
    if wanted <= held:
        return Whole(min(wanted, default=hi), hi)
    if not needed <= held:
        return Missing(min(needed), min(held), sink, source)
    moved = wanted & held
    assert moved == set(range(min(moved, default=hi), hi))
    (position,) = {t // sink.block_tokens for t in wanted - held}
    return Clipped(min(moved, default=hi), hi, position)
