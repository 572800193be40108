"""What a wire costs, and what follows from it: how long a transfer takes, in chunks of which size,
with how many in flight.

A transfer over a stream wire goes through three stages, pack, wire and unpack, of which the wire is
taken for the slowest: the time is that of the wire, the pack of the first chunk and the unpack of
the last::

    latency_s + nbytes / bytes_per_s + 2 * chunk / copied_per_s + chunks * message_s

``copied_per_s``, at which chunks are packed and unpacked, is that of the wire, and _COPIED_PER_S at
least. Small chunks cost messages, large ones do not overlap; in between, where both cost the same,
the sum is least: ``chunk = sqrt(nbytes * message_s * copied_per_s / 2)``. On a direct wire nothing
is packed, and a transfer is one message.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

_LEAST_CHUNK_NBYTES = 256 << 10
"""Smaller chunks are not worth their message, even on slow wires: over a link of 1 Gbit/s chunks of
64 KiB reached 0.5 to 0.9 of a socket, those of 256 KiB and 1 MiB 0.95 and more.
"""
_COPIED_PER_S = 1e9
"""Bytes that one thread packs or unpacks in a second on a busy core; 2e9 on a quiet one. With the
rate of a link of 1 Gbit/s in its place, 16 MiB went over it in chunks of 256 KiB. Eight slots hold
18 ms of that link then, and NIXL's came round in 15 ms: where threads came up to 4 ms late the link
stood still for 20 ms of 172, and 16 MiB took 156 ms in chunks of 1 MiB.
"""
_LONGEST_CHUNK_S = 0.01
"""On the wire. What follows on a connection waits for its slots: for 0.1 s where there are ten."""
_BYTES_OVER_MESSAGE = 2
"""Of a chunk of a growing offer, how much longer its bytes take than its message. Between two H100s
a prompt of 1,745 tokens went in 448 chunks of 0.4 MiB that all were ready at once, and its first
token came 80 ms later than in chunks as for a complete offer.
"""
_CHUNKS_OF_STREAM = 4
"""That each of several streams is to have of a transfer, where they are worth their messages: the
first ones leave soon, and few are unpacked when the last ones have come. Over eight between two
H200s 128 MiB took 14.3 to 15.4 ms in chunks of 4 MiB, 15.8 to 17.3 in chunks of 8, and 18.3 to 19.4
in chunks of 2. There is a slot for each of them: of 32 chunks the last four otherwise waited 4 ms
for a credit.
"""
LEAST_SLOTS = 2
"""With one nothing overlaps."""
MOST_SLOTS = 64
"""Of a connection, unless a setting says more: 25 MB on their way in chunks of 1 MiB are 28."""
REFERENCE_TOKENS = 2048
"""What wires are compared by: a prompt of this length."""

_LEAST_NBYTES = 4 << 10  # of a chunk, where there is no room for more
_FILLED_STAGES = 2  # pack and unpack
BUSY_SLOTS = 6
"""One in each stage, and one that waits for it: threads come late to shared cores."""
_LARGE = 16  # slots are for transfers so many times as large as the reference


@dataclass(frozen=True, slots=True)
class WireCosts:
    """``latency_s``: from the question for a message to its first byte. ``message_s``: what each
    chunk takes of both sides beside its bytes, by the kind of their memory; 0 on a direct wire.
    ``bytes_per_s``: of a large message.

    Raises ValueError for a rate that is none.
    """

    latency_s: float
    message_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not (self.latency_s >= 0 and self.message_s >= 0 and 0 < self.bytes_per_s < math.inf):
            raise ValueError(f"costs: expected durations and a rate above 0, got {self}")

    @property
    def gb_per_s(self) -> float:
        return self.bytes_per_s / 1e9

    def direct_s(self, nbytes: int) -> float:
        """How long a transfer takes where the sink reads by itself."""
        return sum(self.terms_s(nbytes).values())

    def stream_s(self, nbytes: int, chunk_nbytes: int) -> float:
        """How long it takes in chunks of that size."""
        return sum(self.terms_s(nbytes, chunk_nbytes).values())

    def terms_s(self, nbytes: int, chunk_nbytes: int = 0) -> dict[str, float]:
        """What the time is the sum of; ``chunk_nbytes`` 0: on a direct wire."""
        num_messages = math.ceil(nbytes / chunk_nbytes) if chunk_nbytes else 1
        filled_nbytes = _FILLED_STAGES * min(chunk_nbytes, nbytes)
        return {
            "latency": self.latency_s,
            "messages": num_messages * self.message_s,
            "wire": nbytes / self.bytes_per_s,
            "pack and unpack": filled_nbytes / self._copied_per_s,
        }

    def chunk_nbytes(self, nbytes: int, least: int, most: int, num_streams: int = 1) -> int:
        """With which a transfer is over first, within bounds and _LONGEST_CHUNK_S: a power of two,
        so that transfers of about the same size use staging of the same size.
        """
        best = math.sqrt(nbytes * self.message_s * self._copied_per_s / _FILLED_STAGES)
        if num_streams > 1:  # their messages are one thread's
            share = nbytes / (num_streams * _CHUNKS_OF_STREAM)
            best = min(best, max(share, self._message_nbytes(num_streams)))
        best = min(best, _LONGEST_CHUNK_S * self.bytes_per_s)
        return min(most, max(least, 1 << round(math.log2(max(best, 1.0)))))

    def worth_nbytes(self, num_streams: int) -> int:
        """Of the least chunk that is worth its message where so many streams carry chunks side by
        side, each at ``bytes_per_s``.
        """
        return int(_BYTES_OVER_MESSAGE * self._message_nbytes(num_streams))

    def _message_nbytes(self, num_streams: int) -> float:
        """What all streams carry in the time of a message."""
        return self.message_s * self.bytes_per_s * num_streams

    @property
    def _copied_per_s(self) -> float:
        return max(self.bytes_per_s, _COPIED_PER_S)

    def num_slots(self, chunk_nbytes: int, most: int, busy_slots: int = BUSY_SLOTS) -> int:
        """Chunks that keep the wire busy: those that keep all stages busy, and twice what the wire
        carries between a question and its answer, because a credit goes as far as the chunk did.
        """
        carried_nbytes = 2 * self.latency_s * self.bytes_per_s
        return min(most, busy_slots + math.ceil(carried_nbytes / chunk_nbytes))


@dataclass(frozen=True, slots=True)
class Workload:
    """``nbytes``: of REFERENCE_TOKENS. ``least_chunk_nbytes``: of the largest block."""

    nbytes: int
    least_chunk_nbytes: int


@dataclass(frozen=True, slots=True)
class StagingBounds:
    """What may be chosen: ``nbytes`` for all slots of one connection, ``most_chunk_nbytes`` for
    each. ``chunk_nbytes`` and ``num_slots`` are settings; None: by measurement. ``is_limit``:
    ``nbytes`` was set, too; else more is taken where settings or blocks need it. ``busy_slots``
    keep all stages busy, so chunks are no larger than that allows. ``num_streams``: how many carry
    chunks side by side; a trial has one of them.
    """

    nbytes: int
    most_chunk_nbytes: int
    is_limit: bool = False
    chunk_nbytes: int | None = None
    num_slots: int | None = None
    busy_slots: int = BUSY_SLOTS
    num_streams: int = 1


@dataclass(frozen=True, slots=True)
class Staging:
    """The slots of one connection, and how transfers are cut for it. ``fixed_nbytes``: the size of
    every chunk; None: as large as is best for each transfer. ``way``: in which the wire moves them,
    as its trial has found; "": the usual one. ``num_streams``: as its bounds have it.
    """

    num_slots: int
    slot_nbytes: int
    fixed_nbytes: int | None
    way: str = ""
    num_streams: int = 1

    def chunk_nbytes(self, costs: WireCosts, nbytes: int) -> int:
        if self.fixed_nbytes is not None:
            return self.fixed_nbytes
        bounds = _LEAST_CHUNK_NBYTES, self.slot_nbytes
        return costs.chunk_nbytes(nbytes, *bounds, self.num_streams)


def plan_staging(costs: WireCosts, workload: Workload, bounds: StagingBounds) -> Staging:
    """The best slots within bounds: as large as a long prompt's chunks, as many as the reference's
    need to keep the wire busy.

    Raises ValueError where what was set leaves no room for them.
    """
    num_least = bounds.num_slots or LEAST_SLOTS
    if (chunk_nbytes := bounds.chunk_nbytes) is None:
        room_nbytes = max(bounds.nbytes // (bounds.num_slots or bounds.busy_slots), _LEAST_NBYTES)
        most_nbytes = min(bounds.most_chunk_nbytes, 1 << room_nbytes.bit_length() - 1)
        chunk_nbytes = costs.chunk_nbytes(
            _LARGE * workload.nbytes, min(_LEAST_CHUNK_NBYTES, most_nbytes), most_nbytes
        )
    slot_nbytes = max(chunk_nbytes, workload.least_chunk_nbytes)
    least_nbytes = num_least * slot_nbytes
    if bounds.is_limit and least_nbytes > bounds.nbytes:
        raise ValueError(
            f"staging_nbytes: expected room for {num_least} chunks of {slot_nbytes} bytes, got "
            f"{bounds.nbytes}; raise it on both sides, or lower chunk_nbytes or staging_slots "
            f"(a chunk holds at least a block, here of {workload.least_chunk_nbytes} bytes)"
        )
    staging = Staging(num_least, slot_nbytes, bounds.chunk_nbytes, num_streams=bounds.num_streams)
    if bounds.num_slots is not None:
        return staging
    most_slots = min(max(bounds.nbytes, least_nbytes) // slot_nbytes, MOST_SLOTS)
    used_nbytes = staging.chunk_nbytes(costs, workload.nbytes)
    busy_slots = max(bounds.busy_slots, BUSY_SLOTS, _CHUNKS_OF_STREAM * bounds.num_streams)
    return replace(staging, num_slots=costs.num_slots(used_nbytes, most_slots, busy_slots))


def fit_costs(small: tuple[int, float], large: tuple[int, float]) -> WireCosts:
    """The costs of a wire, but for ``message_s``: bytes and seconds of a small message and of a
    large one, each from the question to the last byte.

    They may be the same, of a memory that is small itself; the rate is then that of the large one
    alone. So it is where noise makes a large message faster than a small one. Raises ValueError for
    what is no measurement.
    """
    (small_nbytes, small_s), (large_nbytes, large_s) = small, large
    if not 0 < small_nbytes <= large_nbytes or min(small_s, large_s) <= 0:
        raise ValueError(
            f"measurement: expected a small copy and a larger one, got {small}, {large}"
        )
    bytes_per_s = _rate(small, large)
    return WireCosts(max(small_s - small_nbytes / bytes_per_s, 0.0), 0.0, bytes_per_s)


def _rate(small: tuple[int, float], large: tuple[int, float]) -> float:
    """Bytes per second, by what the large one has more; a latency is part of both, not all."""
    (small_nbytes, small_s), (large_nbytes, large_s) = small, large
    slowest, fastest = large_nbytes / large_s, 4 * large_nbytes / large_s
    more_nbytes, more_s = large_nbytes - small_nbytes, large_s - small_s
    bytes_per_s = more_nbytes / more_s if more_nbytes > 0 and more_s > 0 else slowest
    return min(max(bytes_per_s, slowest), fastest)


def size_text(nbytes: float) -> str:
    """Bytes as text, to a tenth of the largest unit of which there is at least one."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B")):
        if nbytes >= unit:
            return f"{round(nbytes / unit, 1):g} {name}"
    return "0 B"
