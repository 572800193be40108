"""What a wire costs, and what follows from it: how long a transfer takes, in chunks of which size,
with how many in flight.

A transfer over a stream wire goes through three stages, pack, wire and unpack, of which the wire is
taken for the slowest: the time is that of the wire, the pack of the first chunk and the unpack of
the last::

    latency_s + nbytes / bytes_per_s + 2 * chunk / bytes_per_s + chunks * message_s

Small chunks cost messages, large ones do not overlap; in between, where both cost the same, the
sum is least: ``chunk = sqrt(nbytes * message_s * bytes_per_s / 2)``. On a direct wire nothing is
packed, and a transfer is one message.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_FILLED_STAGES = 2  # pack and unpack
_STAGES = 3


@dataclass(frozen=True, slots=True)
class WireCosts:
    """``latency_s``: from the question for a message to its first byte. ``message_s``: what each
    message takes beside its bytes when they follow one another. ``bytes_per_s``: of a large one.

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
        """1e9 bytes a second."""
        return self.bytes_per_s / 1e9

    def direct_s(self, nbytes: int) -> float:
        """How long a transfer takes where the sink reads by itself."""
        return self.latency_s + self.message_s + nbytes / self.bytes_per_s

    def stream_s(self, nbytes: int, chunk_nbytes: int) -> float:
        """How long it takes in chunks of that size."""
        num_chunks = math.ceil(nbytes / chunk_nbytes)
        filled_nbytes = _FILLED_STAGES * min(chunk_nbytes, nbytes)
        return (
            self.latency_s
            + num_chunks * self.message_s
            + (nbytes + filled_nbytes) / self.bytes_per_s
        )

    def chunk_nbytes(self, nbytes: int, least: int, most: int) -> int:
        """The chunk with which a transfer is over first, within bounds: a power of two, so that
        transfers of about the same size use staging of the same size.
        """
        best = math.sqrt(nbytes * self.message_s * self.bytes_per_s / _FILLED_STAGES)
        return min(most, max(least, 1 << round(math.log2(max(best, 1.0)))))

    def num_slots(self, chunk_nbytes: int, most: int) -> int:
        """Chunks that keep the wire busy: one in each stage, and what the wire carries between a
        question and its answer.
        """
        carried_nbytes = self.latency_s * self.bytes_per_s
        return min(most, _STAGES + math.ceil(carried_nbytes / chunk_nbytes))


def fit_costs(
    small: tuple[int, float], burst: tuple[int, float], large: tuple[int, float]
) -> WireCosts:
    """The costs of a wire from three measurements, each from the question to the last byte.

    Args:
        small: bytes of one small message, and its duration in seconds.
        burst: how many such messages were asked for at once, and the duration of all.
        large: bytes of one large message, and its duration.

    Noise may make a large message faster than a small one; what comes out is then the rate of the
    large one alone. Raises ValueError for what is no measurement.
    """
    (small_nbytes, small_s), (num_messages, burst_s), (large_nbytes, large_s) = small, burst, large
    if (
        not 0 < small_nbytes < large_nbytes
        or num_messages < 2
        or min(small_s, burst_s, large_s) <= 0
    ):
        raise ValueError(
            "measurement: expected a small message, two or more of them and a larger one, "
            f"got {small}, {burst}, {large}"
        )
    slowest, fastest = large_nbytes / large_s, 4 * large_nbytes / large_s
    more_s = large_s - small_s
    bytes_per_s = (large_nbytes - small_nbytes) / more_s if more_s > 0 else slowest
    bytes_per_s = min(max(bytes_per_s, slowest), fastest)  # a latency is part of both, not all
    bytes_s = small_nbytes / bytes_per_s
    message_s = max((burst_s - small_s) / (num_messages - 1) - bytes_s, 0.0)
    return WireCosts(max(small_s - bytes_s, 0.0), message_s, bytes_per_s)
