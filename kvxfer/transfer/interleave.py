"""Context parallelism: which tokens a rank keeps, and which of them a source and a sink rank share.
Pure.

Ranks of a context parallel group hold the same heads of other tokens. With ``size`` ranks and runs
of ``run`` tokens, rank ``index`` keeps the tokens p with ``p // run % size == index``, in order: p
is its own token ``p // (run * size) * run + p % run``. A block of its own B tokens stands in the
request's table for ``B * size`` tokens.

What two ranks share repeats every ``lcm(run * size)`` tokens of both sides. All that is copied of a
class is counted in *shared tokens*, from 0 on, the same on both sides: spans, chunks and digests.
:meth:`Shared.count` turns tokens of the request into them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Annotated

import msgspec

from kvxfer.errors import ProtocolError

MAX_PERIOD = 1 << 15
"""Tokens after which what two ranks share repeats: runs of 128 over 16 ranks are 2048. So many runs
of one token take 5 ms to find."""

_Size = Annotated[int, msgspec.Meta(ge=1, le=1024)]
_Run = Annotated[int, msgspec.Meta(ge=1, le=MAX_PERIOD)]


class Interleave(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of a rank: runs of ``run`` go round ``size`` ranks, and every ``index``-th is its
    own.
    """

    size: _Size
    index: Annotated[int, msgspec.Meta(ge=0, lt=1024)]
    run: _Run

    @property
    def period(self) -> int:
        return self.size * self.run

    def own(self, token: int) -> int:
        """The number that a token of the request has among the rank's own."""
        return token // self.period * self.run + token % self.run

    def __str__(self) -> str:
        return f"rank {self.index} of {self.size}, runs of {self.run} tokens"


WHOLE = Interleave(1, 0, 1)
"""A rank that keeps every token."""


class Shared(msgspec.Struct, frozen=True):
    """Tokens that two ranks keep: the runs ``[lo, hi)`` of every ``period`` tokens, in order."""

    period: int
    runs: tuple[tuple[int, int], ...]

    @property
    def num_tokens(self) -> int:
        """In one period."""
        return sum(hi - lo for lo, hi in self.runs)

    def count(self, end: int) -> int:
        """How many there are among the first ``end`` tokens of a request."""
        periods, rest = divmod(end, self.period)
        return periods * self.num_tokens + sum(
            min(hi, rest) - lo for lo, hi in self.runs if lo < rest
        )

    def token(self, number: int) -> int:
        """The request's token that is the ``number``-th of them."""
        periods, rest = divmod(number, self.num_tokens)
        for lo, hi in self.runs:
            if rest < hi - lo:
                break
            rest -= hi - lo
        return periods * self.period + lo + rest


@lru_cache(maxsize=1024)
def shared(source: Interleave, sink: Interleave) -> Shared | None:
    """What two ranks both keep; None: nothing. Raises ProtocolError for an index beyond the size,
    and where it repeats after more than ``MAX_PERIOD`` tokens.
    """
    for each in (source, sink):
        if each.index >= each.size:
            raise ProtocolError(f"interleave: expected an index below the size, got {each}")
    period = math.lcm(source.period, sink.period)
    if period > MAX_PERIOD:
        raise ProtocolError(
            f"interleave: expected tokens that repeat within {MAX_PERIOD}, got {period}: "
            f"{source}, and {sink}"
        )
    rare, other = sorted((source, sink), key=lambda each: -each.period)
    runs = (run for lo, hi in _runs(rare, 0, period) for run in _runs(other, lo, hi))
    found = _joined(runs)
    return Shared(period, found) if found else None


def _runs(kept: Interleave, lo: int, hi: int) -> Iterator[tuple[int, int]]:
    """The tokens of ``[lo, hi)`` that a rank keeps, run by run."""
    first = kept.index * kept.run
    for start in range(first + (lo - first) // kept.period * kept.period, hi, kept.period):
        run = max(start, lo), min(start + kept.run, hi)
        if run[0] < run[1]:
            yield run


def _joined(runs: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Runs in order, those that follow each other without a gap as one."""
    found: list[tuple[int, int]] = []
    for lo, hi in runs:
        if found and found[-1][1] == lo:
            found[-1] = found[-1][0], hi
        else:
            found.append((lo, hi))
    return tuple(found)


class Stripe(msgspec.Struct, frozen=True, kw_only=True):
    """How shared tokens lie at a rank that keeps others between them: in *units* of ``unit_tokens``
    in a row, each within a kernel block. A copy takes the units for blocks. A unit's number is its
    place in the region, counted in ``granule_nbytes``.

    The other fields are those of the pool's own tile.
    """

    kept: Interleave
    tokens: Shared
    unit_tokens: int
    granule_nbytes: int
    block_tokens: int
    kernel_tokens: int
    num_blocks: int
    stride_block: int
    stride_token: int

    def blocks(self, lo: int, hi: int) -> tuple[int, int]:
        """Where in the request's table the blocks of shared tokens ``[lo, hi)`` are, not empty."""
        first, last = (self.kept.own(self.tokens.token(each)) for each in (lo, hi - 1))
        return first // self.block_tokens, last // self.block_tokens + 1

    def num_units(self, num_blocks: int) -> int:
        """How many lie in so many blocks of the request's table."""
        end = num_blocks * self.block_tokens * self.kept.size
        return self.tokens.count(end) // self.unit_tokens


def unit_tokens(kept: Interleave, tokens: Shared, kernel_tokens: int) -> int | None:
    """The longest unit of which shared tokens are made at this rank; None: it keeps no others."""
    if tokens.num_tokens * kept.size == tokens.period:
        return None
    own = _joined((kept.own(lo), kept.own(hi - 1) + 1) for lo, hi in tokens.runs)
    ends = (end for run in own for end in run)
    return math.gcd(kernel_tokens, tokens.period // kept.size, *ends)
