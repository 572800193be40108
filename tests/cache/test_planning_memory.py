"""What one request needs, in blocks and bytes counted by hand."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.cache import (
    check_enough_kv_cache_memory,
    estimate_max_model_len,
    get_kv_cache_config,
    get_kv_cache_config_uniform_type,
)
from kvxfer.cache.specs import KVCacheSpec
from tests.cache.planning_cases import (
    Unchanged,
    alternating,
    chunked,
    config,
    full,
    latent,
    layers,
    state,
    window,
)

# 1000 tokens are 63 blocks, the null block is one more.
HYBRID = alternating(2, window(), full())
# A window of 48 and a step of 64 hold 111 tokens, the first one the last of its block: 1 + 7
# blocks. With 63 of the full layers and the null block: 72 blocks of 2 layers.
HYBRID_NBYTES = 72 * 2 * 256

NEEDS = [
    pytest.param(layers((1, full())), 64 * 256, id="one-layer"),
    pytest.param(layers((32, full(8))), 64 * 32 * 8 * 256, id="32-layers"),
    pytest.param(layers((2, full()), (1, full(2))), 64 * (256 + 256 + 512), id="one-type"),
    pytest.param(layers((2, window())), 9 * 2 * 256, id="windows"),
    # 63 + 64 = 127 tokens from the beginning of a block: 8 blocks
    pytest.param(layers((2, chunked())), 9 * 2 * 256, id="chunks"),
    pytest.param(layers((2, state())), 2 * 2 * 256, id="states"),
    pytest.param(HYBRID, HYBRID_NBYTES, id="hybrid"),
    # Three groups of windows, cut to 2 layers: 63 + 3 * 8 + 1 blocks
    pytest.param(layers((2, full()), (6, window())), 88 * 2 * 256, id="three-to-one"),
    # 3 and 4 layers, not cut: a block has the bytes of 4 layers
    pytest.param(layers((3, full()), (4, window())), 72 * 4 * 256, id="padded"),
    # The full layer's block has 64 tokens, so 16 blocks; with 8 and the null block 25 of 1024
    pytest.param(layers((1, full()), (1, window(num_kv_heads=4))), 25 * 1024, id="grown"),
    # 63 blocks, one state, the null block
    pytest.param(layers((1, full(2)), (1, state())), 65 * 512, id="state-beside-full"),
]


@pytest.mark.parametrize(("spec", "nbytes"), NEEDS)
def test_enough_to_the_byte(spec: dict[str, KVCacheSpec], nbytes: int) -> None:
    settings = config()
    with Unchanged(settings, spec):
        check_enough_kv_cache_memory(settings, spec, nbytes)
        with pytest.raises(
            ValueError, match=f"expected at least {nbytes} bytes .*got {nbytes - 1}"
        ):
            check_enough_kv_cache_memory(settings, spec, nbytes - 1)


def test_message() -> None:
    # 71 blocks: 8 for the windows, the null block, and 62 for full layers, 992 tokens
    message = (
        "memory for the KV cache: expected at least 36864 bytes for one request of max_model_len "
        "1000 tokens (72 blocks of 512 bytes, the null block included), got 36863; lower "
        "max_model_len to 992 or less, or give the cache more memory (kv_cache_memory_nbytes, or "
        "gpu_memory_utilization where it is a share)"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        check_enough_kv_cache_memory(config(), HYBRID, HYBRID_NBYTES - 1)


@pytest.mark.parametrize("available", [-1, 0, 255, 256, 511])
def test_nothing_fits(available: int) -> None:
    spec = layers((1, full()))
    message = f"got {available}; give the cache more memory"
    with pytest.raises(ValueError, match=re.escape(message)):
        check_enough_kv_cache_memory(config(), spec, available)
    assert estimate_max_model_len(config(), spec, available) == 0


@pytest.mark.parametrize("available", [-5, 0, 1])
def test_no_layers_always_fit(available: int) -> None:
    check_enough_kv_cache_memory(config(), {}, available)
    assert estimate_max_model_len(config(), {}, available) == 1000


def test_override_decides() -> None:
    spec = layers((1, full()))
    check_enough_kv_cache_memory(config(num_gpu_blocks_override=64), spec, 0)
    # 63 blocks without the null block are 62, 992 tokens.
    message = (
        "num_gpu_blocks_override: expected at least 64 blocks for one request of max_model_len "
        "1000 tokens, the null block included, got 63; lower max_model_len to 992 or less, or "
        "raise num_gpu_blocks_override"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        check_enough_kv_cache_memory(config(num_gpu_blocks_override=63), spec, 1 << 40)
    assert estimate_max_model_len(config(num_gpu_blocks_override=63), spec, 1 << 40) == 992


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_model_len": 0}, "max_model_len: expected at least 1, got 0"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens: expected at least 1, got -1"),
        ({"num_gpu_blocks_override": 0}, "num_gpu_blocks_override: expected at least 1, got 0"),
    ],
)
def test_bad_settings(changed: dict[str, Any], message: str) -> None:
    for function in (check_enough_kv_cache_memory, estimate_max_model_len, get_kv_cache_config):
        with pytest.raises(ValueError, match=message):
            function(config(**changed), layers((1, full())), 1 << 20)


@pytest.mark.parametrize("available", [1e9, None, "1 GiB"])
def test_memory_is_a_number_of_bytes(available: Any) -> None:
    """A share of the memory is a float where it is not rounded, and so would be the blocks."""
    for function in (
        check_enough_kv_cache_memory,
        estimate_max_model_len,
        get_kv_cache_config,
        get_kv_cache_config_uniform_type,
    ):
        with pytest.raises(
            TypeError, match=f"available_memory: expected an int, got {available!r}"
        ):
            function(config(), layers((1, full())), available)


@pytest.mark.parametrize(
    ("spec", "available", "expected"),
    [
        # 5 blocks, 4 without the null block
        pytest.param(layers((1, full())), 5 * 256, 64, id="full"),
        pytest.param(layers((1, full())), 5 * 256 + 255, 64, id="rest-of-a-block"),
        pytest.param(layers((2, full())), 5 * 256, 16, id="two-layers"),
        pytest.param(layers((1, full())), 1 << 30, 1000, id="model-length"),
        # 7 blocks hold 112 tokens. From 113 on, 8 are needed, and 8 are enough for any length.
        pytest.param(layers((1, window())), 8 * 256, 112, id="window-short"),
        pytest.param(layers((1, window())), 9 * 256, 1000, id="window-any-length"),
        pytest.param(layers((1, state())), 2 * 256, 1000, id="state-any-length"),
        # 20 blocks: 8 for windows, 11 for full layers
        pytest.param(HYBRID, 20 * 512, 176, id="hybrid"),
        # 9 blocks: 4 and 4
        pytest.param(HYBRID, 9 * 512, 64, id="hybrid-short"),
    ],
)
def test_estimate(spec: dict[str, KVCacheSpec], available: int, expected: int) -> None:
    settings = config()
    with Unchanged(settings, spec):
        assert estimate_max_model_len(settings, spec, available) == expected


class Frozen(SimpleNamespace):
    """Settings that cannot be written to."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AssertionError(f"{name} was written")


def test_estimate_never_writes() -> None:
    settings: Any = Frozen(
        cache_config=Frozen(),
        model_config=Frozen(max_model_len=1000),
        scheduler_config=Frozen(max_num_batched_tokens=64),
    )
    assert estimate_max_model_len(settings, HYBRID, 20 * 512) == 176


KINDS = (full(), full(3), window(), window(5), chunked(), chunked(24), state(), latent())


@given(
    drawn=st.lists(st.sampled_from(KINDS), min_size=1, max_size=8),
    num_batched=st.integers(1, 300),
    max_model_len=st.integers(1, 3000),
    available=st.integers(0, 300_000),
)
def test_estimate_is_the_longest_that_passes(
    drawn: list[KVCacheSpec], num_batched: int, max_model_len: int, available: int
) -> None:
    spec = {str(at): one for at, one in enumerate(drawn)}
    settings = config(max_model_len, num_batched)
    try:
        longest = estimate_max_model_len(settings, spec, available)
    except ValueError:
        assert latent() in drawn
        return
    assert 0 <= longest <= max_model_len
    if longest:
        check_enough_kv_cache_memory(config(longest, num_batched), spec, available)
    if longest < max_model_len:
        with pytest.raises(ValueError, match="memory for the KV cache: expected at least"):
            check_enough_kv_cache_memory(config(longest + 1, num_batched), spec, available)
