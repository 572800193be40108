"""The chunks that both sides of a stream wire cut a route into, and how many a peer may ask for.
Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvxfer.errors import ProtocolError
from kvxfer.transfer.plan import ALL, Chunk, PullClass
from kvxfer.transfer.pull import MAX_CHUNK_NBYTES, token_nbytes

CHUNK_TOKENS = 512
"""A larger piece of one region gains nothing and costs index arrays, unless all regions of so many
tokens are less than a chunk: 512 tokens of one head are 20 MiB of an 80-layer model's K and V.
"""
_MIN_CHUNK_NBYTES = 4096
"""The least that a peer may ask for: smaller chunks cost more to name than to carry."""
_MAX_CHUNKS = 1 << 16
"""64 GiB in chunks of 1 MiB. The list of so many takes 0.1 s and 11 MB."""


def check_chunks(
    classes: Sequence[PullClass], chunk_nbytes: int, part_tokens: int = CHUNK_TOKENS
) -> int:
    """How many chunks a peer asks for, before any is made; 0 if there is nothing to send. The
    classes are those that :class:`~kvxfer.transfer.pull.PullResolver` has taken.

    Raises ProtocolError for sizes that a source does not serve, those of :func:`num_chunks` and
    chunks under ``_MIN_CHUNK_NBYTES``.
    """
    if not _MIN_CHUNK_NBYTES <= chunk_nbytes <= MAX_CHUNK_NBYTES:
        raise ProtocolError(
            f"chunk_nbytes: expected {_MIN_CHUNK_NBYTES} to {MAX_CHUNK_NBYTES} of a peer, "
            f"got {chunk_nbytes}"
        )
    return num_chunks(classes, chunk_nbytes, part_tokens)


def num_chunks(
    classes: Sequence[PullClass], chunk_nbytes: int, part_tokens: int = CHUNK_TOKENS
) -> int:
    """By arithmetic alone: O(classes). Raises ProtocolError for too many."""
    total = 0
    for class_index, wanted in enumerate(classes):
        lo, hi, one_nbytes = wanted.token_lo, wanted.token_hi, token_nbytes(wanted)
        step = _step_tokens(wanted, one_nbytes, chunk_nbytes, part_tokens)
        # Between the part up to the first cut and that behind the last, all pieces are equal
        first = min(step - lo % step, hi - lo)
        num_equal, last = divmod(hi - lo - first, step)
        for num_tokens, count in ((first, 1), (step, num_equal), (last, 1)):
            if num_tokens:
                fit_regions = max(chunk_nbytes // (num_tokens * one_nbytes), 1)
                total += count * -(-len(wanted.regions) // fit_regions)
        if total > _MAX_CHUNKS:
            raise _too_many(class_index, total, chunk_nbytes)
    return total


def chunk_list(
    classes: Sequence[PullClass], chunk_nbytes: int, part_tokens: int = CHUNK_TOKENS
) -> tuple[Chunk, ...]:
    """The chunks of a route in the order of their sequence numbers; the same on both sides.

    A chunk takes at most ``chunk_nbytes``, but at least one of the sink's kernel blocks, and is cut
    at multiples of it: of all regions as many tokens as fit, or, where these are fewer than
    ``part_tokens``, of so many tokens as many regions as fit.

    Raises ProtocolError for sizes out of bounds.
    """
    if not 0 < chunk_nbytes <= MAX_CHUNK_NBYTES:
        raise ProtocolError(f"chunk_nbytes: expected 1 to {MAX_CHUNK_NBYTES}, got {chunk_nbytes}")
    chunks: list[Chunk] = []
    for class_index, wanted in enumerate(classes):
        num_regions, one_nbytes = len(wanted.regions), token_nbytes(wanted)
        step = _step_tokens(wanted, one_nbytes, chunk_nbytes, part_tokens)
        token_hi = wanted.token_lo
        while token_hi < wanted.token_hi:
            token_lo, token_hi = token_hi, min((token_hi // step + 1) * step, wanted.token_hi)
            piece_nbytes = (token_hi - token_lo) * one_nbytes
            fit_regions = max(chunk_nbytes // piece_nbytes, 1)
            opens_at = ALL if wanted.is_state else wanted.token(token_hi - 1) + 1
            for region_lo in range(0, num_regions, fit_regions):
                region_hi = min(region_lo + fit_regions, num_regions)
                chunks.append(
                    Chunk(
                        sequence=len(chunks),
                        class_index=class_index,
                        region_lo=region_lo,
                        region_hi=region_hi,
                        token_lo=token_lo,
                        token_hi=token_hi,
                        nbytes=(region_hi - region_lo) * piece_nbytes,
                        opens_at=opens_at,
                    )
                )
            if len(chunks) > _MAX_CHUNKS:
                raise _too_many(class_index, len(chunks), chunk_nbytes)
    return tuple(chunks)


def _too_many(class_index: int, num: int, chunk_nbytes: int) -> ProtocolError:
    return ProtocolError(
        f"class {class_index}: expected at most {_MAX_CHUNKS} chunks, "
        f"got {num} of {chunk_nbytes} bytes; ask for larger ones"
    )


def _step_tokens(wanted: PullClass, one_nbytes: int, chunk_nbytes: int, part_tokens: int) -> int:
    """Tokens from one cut to the next: whole kernel blocks of the sink, as many as fit."""
    kernel_tokens = wanted.order.kernel_tokens
    of_all_regions = chunk_nbytes // (one_nbytes * max(1, len(wanted.regions)))
    fit_tokens = min(max(of_all_regions, part_tokens), chunk_nbytes // one_nbytes)
    return max(fit_tokens // kernel_tokens, 1) * kernel_tokens
