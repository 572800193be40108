"""Layers that read another layer's cache."""

from __future__ import annotations

import pytest
import torch

from kvxfer.cache.specs import FullAttentionSpec, KVCacheGroupSpec
from kvxfer.tensors.kv_cache import (
    add_kv_sharing_layers_to_kv_cache_groups,
    initialize_kv_cache_for_kv_sharing,
)

SPEC = FullAttentionSpec(block_size=8, num_kv_heads=1, head_size=4, dtype="float32")


def two_groups() -> list[KVCacheGroupSpec]:
    return [KVCacheGroupSpec(["l.0", "l.2"], SPEC), KVCacheGroupSpec(["l.1"], SPEC)]


def names(groups: list[KVCacheGroupSpec]) -> list[list[str]]:
    return [group.layer_names for group in groups]


def test_sharers_join_their_targets_groups() -> None:
    groups, runner_only = two_groups(), {"x"}
    shared = {"l.3": "l.1", "l.4": "l.2", "l.5": "l.1"}
    add_kv_sharing_layers_to_kv_cache_groups(shared, groups, runner_only)
    assert names(groups) == [["l.0", "l.2", "l.4"], ["l.1", "l.3", "l.5"]]
    assert runner_only == {"x", "l.3", "l.4", "l.5"}


def test_a_sharer_has_its_targets_own_spec() -> None:
    """In a group of one type layers may have other heads: a sharer reads its target's bytes."""
    wide, narrow = (
        FullAttentionSpec(block_size=4, num_kv_heads=heads, head_size=2, dtype="float16")
        for heads in (8, 1)
    )
    group = KVCacheGroupSpec(["l.0", "l.1"], narrow, {"l.1": wide})
    add_kv_sharing_layers_to_kv_cache_groups({"l.2": "l.1", "l.3": "l.0"}, [group])
    assert [group.spec_of(f"l.{at}") for at in range(4)] == [narrow, wide, wide, narrow]


def test_a_second_call_adds_nothing() -> None:
    groups = two_groups()
    for _ in range(2):
        add_kv_sharing_layers_to_kv_cache_groups({"l.3": "l.1"}, groups)
    assert names(groups) == [["l.0", "l.2"], ["l.1", "l.3"]]


def test_nothing_shared_changes_nothing() -> None:
    groups, runner_only = two_groups(), set[str]()
    add_kv_sharing_layers_to_kv_cache_groups({}, groups, runner_only)
    assert (names(groups), runner_only) == (names(two_groups()), set())


def test_sharers_get_their_targets_cache() -> None:
    groups, own = two_groups(), [torch.zeros(1), torch.zeros(2), torch.zeros(3)]
    caches = {f"l.{i}": cache for i, cache in enumerate(own)}
    initialize_kv_cache_for_kv_sharing({"l.3": "l.1", "l.4": "l.2"}, groups, caches)
    assert caches["l.3"] is own[1]
    assert caches["l.4"] is own[2]
    assert [caches[f"l.{i}"] for i in range(3)] == own
    assert names(groups) == [["l.0", "l.2", "l.4"], ["l.1", "l.3"]]


@pytest.mark.parametrize(
    ("shared", "error", "said"),
    [
        ({"l.3": "l.9"}, KeyError, "l.3 shares the cache of l.9: expected one of l.0, l.2, l.1"),
        ({"l.3": "l.1", "l.4": "l.3"}, ValueError, "l.4: expected a target with a cache of its"),
        ({"l.3": "l.3"}, ValueError, "got l.3, which shares that of l.3"),
        ({"l.2": "l.1"}, ValueError, "l.2: expected the group of its target l.1, got another"),
    ],
)
def test_wrong_targets_are_refused_and_change_nothing(
    shared: dict[str, str], error: type[Exception], said: str
) -> None:
    groups, runner_only = two_groups(), set[str]()
    with pytest.raises(error, match=said):
        add_kv_sharing_layers_to_kv_cache_groups({"l.5": "l.0", **shared}, groups, runner_only)
    assert (names(groups), runner_only) == (names(two_groups()), set())


def test_a_target_without_a_cache_is_refused() -> None:
    groups, caches = two_groups(), {"l.0": torch.zeros(1)}
    with pytest.raises(KeyError, match="l.3 shares the cache of l.1: expected one of l.0"):
        initialize_kv_cache_for_kv_sharing({"l.4": "l.0", "l.3": "l.1"}, groups, caches)
    assert list(caches) == ["l.0"]
    assert names(groups) == names(two_groups())
