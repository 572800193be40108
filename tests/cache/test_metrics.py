"""Hit rates over a window, computed by hand."""

from __future__ import annotations

import pytest

from kvxfer.cache.metrics import PrefixCacheStats, PrefixCachingMetrics


def test_nothing_observed() -> None:
    assert PrefixCachingMetrics().max_recent_requests == 1000
    assert PrefixCachingMetrics().hit_rate == 0.0
    assert PrefixCachingMetrics().empty


def test_a_rate_of_zero_is_told_from_no_rate() -> None:
    metrics = PrefixCachingMetrics()
    metrics.observe(PrefixCacheStats(requests=1, queries=30, hits=0))
    assert not metrics.empty
    metrics.reset()
    assert metrics.empty


def test_rate_is_by_tokens() -> None:
    metrics = PrefixCachingMetrics()
    metrics.observe(PrefixCacheStats(requests=1, queries=30, hits=0))
    metrics.observe(PrefixCacheStats(requests=1, queries=10, hits=10))
    assert metrics.hit_rate == 0.25


def test_oldest_observation_leaves_whole() -> None:
    metrics = PrefixCachingMetrics(max_recent_requests=5)
    metrics.observe(PrefixCacheStats(requests=3, queries=10, hits=10))
    metrics.observe(PrefixCacheStats(requests=2, queries=10, hits=0))
    assert metrics.hit_rate == 0.5  # 5 requests: all stay
    metrics.observe(PrefixCacheStats(requests=1, queries=10, hits=5))
    assert metrics.hit_rate == 0.25  # 6 are too many: the first 3 go


def test_newest_observation_always_stays() -> None:
    metrics = PrefixCachingMetrics(max_recent_requests=5)
    metrics.observe(PrefixCacheStats(requests=1, queries=10, hits=0))
    metrics.observe(PrefixCacheStats(requests=50, queries=100, hits=80))
    assert metrics.hit_rate == 0.8


def test_observation_without_requests_is_ignored() -> None:
    metrics = PrefixCachingMetrics()
    metrics.observe(PrefixCacheStats(requests=0, queries=100, hits=0))
    metrics.observe(PrefixCacheStats(requests=1, queries=4, hits=1))
    assert metrics.hit_rate == 0.25


@pytest.mark.parametrize(
    ("stats", "hit_rate"),
    [
        (PrefixCacheStats(requests=1, queries=8, hits=2, reset=True), 0.25),
        (PrefixCacheStats(reset=True), 0.0),
    ],
)
def test_reset_comes_before_the_observation(stats: PrefixCacheStats, hit_rate: float) -> None:
    metrics = PrefixCachingMetrics()
    metrics.observe(PrefixCacheStats(requests=1, queries=8, hits=8))
    metrics.observe(stats)
    assert metrics.hit_rate == hit_rate


def test_reset() -> None:
    metrics = PrefixCachingMetrics()
    metrics.observe(PrefixCacheStats(requests=1, queries=8, hits=8))
    metrics.reset()
    assert metrics.hit_rate == 0.0


def test_bad_numbers() -> None:
    with pytest.raises(ValueError, match="max_recent_requests: expected at least 1, got 0"):
        PrefixCachingMetrics(0)
    with pytest.raises(ValueError, match="hits: expected 0 to 3, the number of queries, got 4"):
        PrefixCacheStats(requests=1, queries=3, hits=4)
    with pytest.raises(ValueError, match="requests: expected at least 0, got -1"):
        PrefixCacheStats(requests=-1)
