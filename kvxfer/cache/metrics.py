"""How often a prefix was found in the cache, over the most recent requests."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefixCacheStats:
    """One observation, normally one scheduler step: ``requests`` asked for ``queries`` tokens and
    found ``hits``. ``reset``: the cache was emptied before, and what was observed earlier no longer
    counts. ValueError for a negative count, or more hits than queries.
    """

    requests: int = 0
    queries: int = 0
    hits: int = 0
    reset: bool = False

    def __post_init__(self) -> None:
        if self.requests < 0:
            raise ValueError(f"requests: expected at least 0, got {self.requests}")
        if not 0 <= self.hits <= self.queries:
            raise ValueError(
                f"hits: expected 0 to {self.queries}, the number of queries, got {self.hits}"
            )


class PrefixCachingMetrics:
    """Hit rate in tokens over at least the last observation and at most ``max_recent_requests``
    requests.

    Observations leave whole, oldest first; the newest always stays, however many requests it holds.
    """

    def __init__(self, max_recent_requests: int = 1000) -> None:
        """Raise ValueError when ``max_recent_requests`` is below 1."""
        if max_recent_requests < 1:
            raise ValueError(f"max_recent_requests: expected at least 1, got {max_recent_requests}")
        self.max_recent_requests = max_recent_requests
        self._recent: deque[PrefixCacheStats] = deque()
        self._num_requests = 0
        self._num_queries = 0
        self._num_hits = 0

    def observe(self, stats: PrefixCacheStats) -> None:
        """Take one observation in; one without requests changes nothing except by its ``reset``."""
        if stats.reset:
            self.reset()
        if stats.requests == 0:
            return
        self._recent.append(stats)
        self._add(stats, 1)
        while len(self._recent) > 1 and self._num_requests > self.max_recent_requests:
            self._add(self._recent.popleft(), -1)

    def reset(self) -> None:
        self._recent.clear()
        self._num_requests = self._num_queries = self._num_hits = 0

    @property
    def empty(self) -> bool:
        """Whether nothing was asked: then a hit rate of 0 says nothing."""
        return self._num_queries == 0

    @property
    def hit_rate(self) -> float:
        """Hits per query from 0 to 1; 0 when nothing was asked."""
        return self._num_hits / self._num_queries if self._num_queries else 0.0

    def _add(self, stats: PrefixCacheStats, sign: int) -> None:
        self._num_requests += sign * stats.requests
        self._num_queries += sign * stats.queries
        self._num_hits += sign * stats.hits
