"""Whole caches: blocks, buffers and groups, written out by hand."""

from __future__ import annotations

import copy
import logging
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.cache import (
    get_kv_cache_config,
    get_kv_cache_config_uniform_type,
    get_kv_cache_configs,
    unify_kv_cache_configs,
)
from kvxfer.cache.specs import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, KVCacheTensor
from tests.cache.planning_cases import (
    Unchanged,
    alternating,
    chunked,
    config,
    full,
    layers,
    state,
    window,
)

# ---------------------------------------------------------------------------- one group


def test_uniform() -> None:
    spec = layers((2, full()))
    settings = config()
    expected = KVCacheConfig(
        num_blocks=100,
        kv_cache_tensors=[KVCacheTensor(25600, ["0"]), KVCacheTensor(25600, ["1"])],
        kv_cache_groups=[KVCacheGroupSpec(["0", "1"], full())],
    )
    with Unchanged(settings, spec):
        # 100 blocks of 2 * 256 bytes, and not quite another
        assert get_kv_cache_config(settings, spec, 51200 + 511) == expected
        assert get_kv_cache_config_uniform_type(settings, spec, 51200 + 511) == expected


def test_uniform_type() -> None:
    spec = {"a": full(), "b": full(2)}
    expected = KVCacheConfig(
        num_blocks=100,
        kv_cache_tensors=[KVCacheTensor(25600, ["a"]), KVCacheTensor(51200, ["b"])],
        kv_cache_groups=[KVCacheGroupSpec(["a", "b"], full(), {"b": full(2)})],
    )
    assert get_kv_cache_config(config(), spec, 100 * 768) == expected
    assert get_kv_cache_config_uniform_type(config(), spec, 100 * 768 + 767) == expected


@pytest.mark.parametrize("available", [0, 1 << 30])
def test_no_layers(available: int) -> None:
    for override in (None, 50):
        settings = config(num_gpu_blocks_override=override)
        assert get_kv_cache_config(settings, {}, available) == KVCacheConfig(1, [], [])


def test_uniform_type_refuses_others() -> None:
    message = (
        "layer 1: expected a window of 48 tokens in blocks of 16 tokens, as layer 0 has, got all "
        "tokens in blocks of 16 tokens; plan layers of several kinds with get_kv_cache_config"
    )
    with pytest.raises(ValueError, match=message):
        get_kv_cache_config_uniform_type(config(), alternating(1, window(), full()), 1 << 20)
    with pytest.raises(ValueError, match="kv_cache_spec: expected one layer or more, got none"):
        get_kv_cache_config_uniform_type(config(), {}, 1 << 20)


# ---------------------------------------------------------------------------- hybrid groups


def test_hybrid() -> None:
    assert get_kv_cache_config(
        config(), alternating(2, window(), full()), 200 * 512
    ) == KVCacheConfig(
        num_blocks=200,
        kv_cache_tensors=[KVCacheTensor(51200, ["0", "1"]), KVCacheTensor(51200, ["2", "3"])],
        kv_cache_groups=[
            KVCacheGroupSpec(["0", "2"], window()),
            KVCacheGroupSpec(["1", "3"], full()),
        ],
    )


def test_hybrid_with_empty_places(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvxfer.cache"):
        planned = get_kv_cache_config(config(), layers((2, full()), (5, window())), 200 * 512)
    assert planned.num_blocks == 200
    assert planned.kv_cache_tensors == [
        KVCacheTensor(51200, ["0", "2", "3", "4"]),
        KVCacheTensor(51200, ["1", "5", "6"]),
    ]
    assert [record.getMessage() for record in caplog.records] == [
        "KV cache: groups have 2, 2, 2, 1 layers, so 1 of 8 places in a block stay empty (12.5 %)"
    ]


def test_nothing_is_warned_of_without_empty_places(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvxfer.cache"):
        get_kv_cache_config(config(), alternating(2, window(), full()), 200 * 512)
        get_kv_cache_config(config(), {"a": full(), "b": full(2)}, 200 * 768)
    assert not caplog.records


def test_hybrid_of_other_bytes() -> None:
    # 256 and 1024 bytes of attention grow to 64 tokens; the state is padded to 1024.
    spec = {"f": full(), "w": window(num_kv_heads=4), "s": state()}
    assert get_kv_cache_config(config(), spec, 50 * 1024) == KVCacheConfig(
        num_blocks=50,
        kv_cache_tensors=[KVCacheTensor(51200, ["f", "w", "s"])],
        kv_cache_groups=[
            KVCacheGroupSpec(["f"], full(block_size=64)),
            KVCacheGroupSpec(["w"], window(num_kv_heads=4)),
            KVCacheGroupSpec(["s"], state(page_size_padded=1024)),
        ],
    )


def test_hybrid_disabled() -> None:
    spec = alternating(1, window(), full())
    with Unchanged(spec):
        planned = get_kv_cache_config(config(disable_hybrid_kv_cache_manager=True), spec, 100 * 512)
    assert planned == KVCacheConfig(
        num_blocks=100,
        kv_cache_tensors=[KVCacheTensor(25600, ["0"]), KVCacheTensor(25600, ["1"])],
        kv_cache_groups=[
            KVCacheGroupSpec(["0", "1"], full(sliding_window=48), {"1": full()}),
        ],
    )


# ---------------------------------------------------------------------------- number of blocks


def test_override() -> None:
    planned = get_kv_cache_config(config(num_gpu_blocks_override=70), layers((2, full())), 0)
    assert planned.num_blocks == 70
    assert [tensor.size for tensor in planned.kv_cache_tensors] == [17920, 17920]


def test_too_little_memory() -> None:
    for plan in (get_kv_cache_config, get_kv_cache_config_uniform_type):
        # 64 blocks of 256 bytes
        with pytest.raises(ValueError, match="expected at least 16384 bytes .* got 16383; lower"):
            plan(config(), layers((1, full())), 16383)


KINDS = (full(), full(3), window(), window(5), chunked(24), state(), state(100))


@given(
    drawn=st.lists(st.sampled_from(KINDS), min_size=1, max_size=10),
    available=st.integers(0, 500_000),
)
def test_buffers_fit(drawn: list[KVCacheSpec], available: int) -> None:
    spec = {f"layer{at}": one for at, one in enumerate(drawn)}
    settings = config(max_model_len=40, max_num_batched_tokens=16)
    try:
        planned = get_kv_cache_config(settings, spec, available)
    except ValueError:
        # The largest need of these layers: 10 kinds of blocks, 10 layers, 768 bytes.
        assert available < 50 * 10 * 768
        return
    sizes = [tensor.size for tensor in planned.kv_cache_tensors]
    # All that is left is less than one more block.
    assert sum(sizes) <= available < sum(sizes) // planned.num_blocks * (planned.num_blocks + 1)
    shared = [name for tensor in planned.kv_cache_tensors for name in tensor.shared_by]
    assert sorted(shared) == sorted(spec)
    for tensor in planned.kv_cache_tensors:
        in_groups = [
            (at, group.spec_of(name))
            for at, group in enumerate(planned.kv_cache_groups)
            for name in tensor.shared_by
            if name in group.layer_names
        ]
        # One layer of a group in a buffer, and its blocks fill the buffer.
        assert len({at for at, _ in in_groups}) == len(in_groups)
        assert {own.page_size_bytes * planned.num_blocks for _, own in in_groups} == {tensor.size}


# ---------------------------------------------------------------------------- several workers


def hybrid_worker(num_blocks: int) -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks,
        [KVCacheTensor(256 * num_blocks, ["a", "b"]), KVCacheTensor(256 * num_blocks, ["c"])],
        [KVCacheGroupSpec(["a", "c"], full()), KVCacheGroupSpec(["b"], window())],
    )


def test_unify_takes_the_smallest() -> None:
    workers = [hybrid_worker(30), hybrid_worker(10), hybrid_worker(20)]
    lists = [worker.kv_cache_groups for worker in workers]
    unify_kv_cache_configs(workers)
    assert workers == [hybrid_worker(10)] * 3
    assert [worker.kv_cache_groups for worker in workers] == lists
    assert all(
        worker.kv_cache_groups is groups for worker, groups in zip(workers, lists, strict=True)
    )


def test_unify_buffers_of_other_bytes() -> None:
    spec = {"a": full(), "b": full(2)}
    workers = [get_kv_cache_config(config(), spec, 768 * num) for num in (100, 80)]
    unify_kv_cache_configs(workers)
    assert [tensor.size for tensor in workers[0].kv_cache_tensors] == [80 * 256, 80 * 512]
    assert workers[0] == workers[1]


def test_unify_puts_groups_in_order() -> None:
    turned = hybrid_worker(20)
    turned.kv_cache_groups.reverse()
    turned.kv_cache_groups[1].layer_names.reverse()
    workers = [hybrid_worker(30), turned]
    unify_kv_cache_configs(workers)
    assert [group.layer_names for group in turned.kv_cache_groups] == [["c", "a"], ["b"]]
    assert turned.num_blocks == workers[0].num_blocks == 20


def test_unify_one_and_without_layers() -> None:
    alone = [hybrid_worker(30)]
    unify_kv_cache_configs(alone)
    assert alone == [hybrid_worker(30)]
    empty = [KVCacheConfig(1, [], []), KVCacheConfig(1, [], [])]
    unify_kv_cache_configs(empty)
    assert empty == [KVCacheConfig(1, [], [])] * 2


def other_layers() -> KVCacheConfig:
    worker = hybrid_worker(10)
    worker.kv_cache_groups = [
        KVCacheGroupSpec(["a", "d"], full()),
        KVCacheGroupSpec(["b"], window()),
    ]
    return worker


def other_spec() -> KVCacheConfig:
    worker = hybrid_worker(10)
    worker.kv_cache_groups[1] = KVCacheGroupSpec(["b"], window(8))
    return worker


def other_spec_of_a_layer() -> KVCacheConfig:
    worker = hybrid_worker(10)
    worker.kv_cache_groups[0].layer_specs["c"] = full(2)
    return worker


def other_grouping() -> KVCacheConfig:
    worker = hybrid_worker(10)
    worker.kv_cache_groups = [
        KVCacheGroupSpec(["a"], full()),
        KVCacheGroupSpec(["c"], full()),
        KVCacheGroupSpec(["b"], window()),
    ]
    return worker


def one_group_less() -> KVCacheConfig:
    worker = hybrid_worker(10)
    worker.kv_cache_groups.pop()
    return worker


def ragged() -> KVCacheConfig:
    worker = hybrid_worker(10)
    worker.kv_cache_tensors[1].size = 2559
    return worker


@pytest.mark.parametrize(
    ("worker", "message"),
    [
        (
            other_layers(),
            "worker 2: expected the groups of layers of worker 0, a, c, got a, d; plan all",
        ),
        (other_grouping(), "worker 2: expected the groups of layers of worker 0, a, c, got a; c;"),
        (one_group_less(), "worker 2: expected the groups of layers of worker 0, b, got no more;"),
        (
            other_spec(),
            "worker 2: layer b: expected worker 0's SlidingWindowSpec(block_size=16, "
            "num_kv_heads=1, head_size=4, dtype='float16', page_size_padded=None, "
            "sliding_window=48), got SlidingWindowSpec(",
        ),
        (other_spec_of_a_layer(), "worker 2: layer c: expected worker 0's FullAttentionSpec("),
        (
            ragged(),
            "worker 2: buffer of c: expected a multiple of its 10 blocks, got 2559 bytes",
        ),
        (KVCacheConfig(0, [], []), "worker 2: num_blocks: expected at least 1, got 0"),
    ],
)
def test_unify_refuses(worker: KVCacheConfig, message: str) -> None:
    workers = [hybrid_worker(30), hybrid_worker(20), copy.deepcopy(worker)]
    with Unchanged(workers), pytest.raises(ValueError, match=re.escape(message)):
        unify_kv_cache_configs(workers)


def test_unify_nothing() -> None:
    with pytest.raises(ValueError, match="kv_cache_configs: expected one for each worker, got no"):
        unify_kv_cache_configs([])


# ---------------------------------------------------------------------------- stages of a pipeline


def stage(num_blocks: int, names: str, *specs: KVCacheSpec) -> KVCacheConfig:
    """One layer of each spec, each in a group of its own."""
    groups = [KVCacheGroupSpec([name], spec) for name, spec in zip(names, specs, strict=True)]
    return KVCacheConfig(num_blocks, [KVCacheTensor(256 * num_blocks, list(names))], groups)


def test_unify_stages() -> None:
    first, second = stage(30, "ab", full(), window()), stage(20, "cd", full(), window())
    unify_kv_cache_configs([first, second])
    assert first == stage(20, "ab", full(), window())
    assert second == stage(20, "cd", full(), window())


def test_unify_stages_puts_groups_in_order() -> None:
    workers = [
        stage(30, "abc", full(), window(), window(16)),
        stage(20, "def", window(16), window(), full()),
        stage(25, "fed", full(), window(), window(16)),  # of the second stage, too
    ]
    unify_kv_cache_configs(workers)
    for worker, names in zip(workers, ("abc", "fed", "fed"), strict=True):
        assert [group.layer_names for group in worker.kv_cache_groups] == [[n] for n in names]
        assert worker.num_blocks == 20
        assert worker.kv_cache_tensors[0].size == 256 * 20


def test_unify_stages_with_other_heads() -> None:
    """Heads decide the bytes of a block, not which tokens it holds."""
    workers = [stage(30, "a", full()), stage(20, "b", full(2))]
    unify_kv_cache_configs(workers)
    assert [worker.num_blocks for worker in workers] == [20, 20]


@pytest.mark.parametrize(
    ("worker", "message"),
    [
        (
            stage(9, "cd", full(), window(64)),
            "worker 1: expected groups that keep what worker 0's do, all tokens in blocks of 16 "
            "tokens; a window of 48 tokens in blocks of 16 tokens, got all tokens in blocks of 16 "
            "tokens; a window of 64 tokens in blocks of 16 tokens; plan stages",
        ),
        (stage(9, "c", full()), "worker 1: expected groups that keep what worker 0's do"),
        (stage(9, "cde", full(), window(), full()), "worker 1: expected groups that keep what"),
        (stage(9, "cd", full(block_size=32), window()), "all tokens in blocks of 32 tokens; a"),
        (KVCacheConfig(9, [], []), "got none; plan stages with other proportions together"),
        (stage(9, "cb", full(), window()), "worker 1: expected the groups of layers of worker 0"),
    ],
)
def test_unify_refuses_stages(worker: KVCacheConfig, message: str) -> None:
    workers = [stage(30, "ab", full(), window()), copy.deepcopy(worker)]
    with Unchanged(workers), pytest.raises(ValueError, match=re.escape(message)):
        unify_kv_cache_configs(workers)


def test_stages_planned_together() -> None:
    """Two windows beside each full layer over all, in other proportions on each stage."""
    first: dict[str, KVCacheSpec] = {"a": full(), "b": window(), "c": window(), "d": window()}
    second: dict[str, KVCacheSpec] = {"e": window(), "f": full()}
    plans = get_kv_cache_configs(config(), [first, second, first], [51200, 25600, 76800])
    of_first = [
        KVCacheGroupSpec(["a"], full()),
        KVCacheGroupSpec(["b", "d"], window()),
        KVCacheGroupSpec(["c"], window()),
    ]
    of_second = [
        KVCacheGroupSpec(["f"], full()),
        KVCacheGroupSpec([], window()),
        KVCacheGroupSpec(["e"], window()),
    ]
    # 51200 bytes are 100 blocks of two layers, 25600 as many of one: the buffers are shared.
    tensors = [KVCacheTensor(25600, ["a", "b", "c"]), KVCacheTensor(25600, ["d"])]
    assert plans[0] == plans[2] == KVCacheConfig(100, tensors, of_first)
    assert plans[1] == KVCacheConfig(100, [KVCacheTensor(25600, ["f", "e"])], of_second)
    with Unchanged(plans):
        unify_kv_cache_configs(plans)


def test_a_stage_without_layers() -> None:
    plans = get_kv_cache_configs(config(), [layers((2, full())), {}], [51200, 0])
    assert plans[1] == KVCacheConfig(100, [], [KVCacheGroupSpec([], full())])
    assert get_kv_cache_configs(config(), [{}, {}], [0, 0]) == [KVCacheConfig(1, [], [])] * 2


def test_stages_planned_together_share_the_block_size() -> None:
    """The second stage alone would keep its blocks of 16 tokens."""
    plans = get_kv_cache_configs(config(), [{"a": full(2)}, {"b": window()}], [51200, 51200])
    sizes = [[group.kv_cache_spec.block_size for group in plan.kv_cache_groups] for plan in plans]
    assert sizes == [[16, 32], [16, 32]]


def test_stages_that_cannot_be_planned_together() -> None:
    with pytest.raises(ValueError, match="worker 1: layer a: expected the Full.* of an earlier"):
        get_kv_cache_configs(config(), [{"a": full()}, {"a": full(2)}], [51200, 51200])
    with pytest.raises(ValueError, match="memory for the KV cache: expected at least"):
        get_kv_cache_configs(config(), [{"a": full()}, {"b": full()}], [51200, 1024])
