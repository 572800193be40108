"""Kernel block sizes, written out by hand."""

from __future__ import annotations

import pytest

from kvxfer.cache.specs import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from kvxfer.tensors.attention import (
    AttentionGroup,
    MultipleOf,
    prepare_kernel_block_sizes,
    select_common_block_size,
)
from tests.tensors.cache_backends import Stated

FULL = FullAttentionSpec(block_size=48, num_kv_heads=1, head_size=4, dtype="float32")
SLIDING = SlidingWindowSpec(
    block_size=64, num_kv_heads=1, head_size=4, dtype="float32", sliding_window=8
)
STATE = MambaSpec(block_size=100, shapes=((3,),), dtypes=("float32",))


def backend(*sizes: int | MultipleOf) -> type[Stated]:
    return type("Made", (Stated,), {"sizes": sizes})


@pytest.mark.parametrize(
    ("block_size", "supported", "want"),
    [
        (16, [(16, 32)], 16),
        (16, [(MultipleOf(16),), (MultipleOf(8),)], 16),
        (64, [(16, 32), (MultipleOf(16),)], 32),
        (64, [(16, 32), (MultipleOf(32), 16)], 32),
        (64, [(16, 32), (16, 64)], 16),
        (96, [(MultipleOf(32),), (16, 48, MultipleOf(96))], 96),  # all take the block itself
        (96, [(32, 48), (16, 48)], 48),
        (24, [(64, 32, 16, 8)], 8),
        (40, [], 40),
    ],
)
def test_the_block_itself_or_the_largest_common_part(
    block_size: int, supported: list[tuple[int | MultipleOf, ...]], want: int
) -> None:
    assert select_common_block_size(block_size, [backend(*sizes) for sizes in supported]) == want


@pytest.mark.parametrize(
    ("block_size", "supported", "said"),
    [
        (24, [(16,)], "got 24 tokens; Made takes 16"),
        (48, [(16, 48), (MultipleOf(32),)], "Made takes 16, 48; Made takes multiples of 32"),
        (8, [(16, MultipleOf(16))], "Made takes 16, multiples of 16"),
        (8, [()], "Made takes none"),
        (0, [(8,)], "block_size: expected at least 1 token, got 0"),
    ],
)
def test_no_common_size_is_refused(
    block_size: int, supported: list[tuple[int | MultipleOf, ...]], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        select_common_block_size(block_size, [backend(*sizes) for sizes in supported])


def config_of(*specs: KVCacheSpec) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layers.{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=2, kv_cache_tensors=[], kv_cache_groups=groups)


def group_of(number: int, spec: KVCacheSpec, *sizes: int | MultipleOf) -> AttentionGroup:
    return AttentionGroup(backend(*sizes), [f"layers.{number}"], spec, number)


def test_sizes_of_all_groups() -> None:
    sizes = prepare_kernel_block_sizes(
        config_of(FULL, SLIDING, STATE, FULL),
        [
            [group_of(0, FULL, 16, 24), group_of(0, FULL, MultipleOf(8))],
            [group_of(1, SLIDING, 16, 32)],
            [group_of(2, STATE, 7)],  # a state has no kernel blocks
            [],  # no layer of the group on this worker
        ],
    )
    assert sizes == [24, 32, 100, 48]


def test_what_cannot_be_prepared_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one list for each of 2 cache groups, got 1"):
        prepare_kernel_block_sizes(config_of(FULL, FULL), [[]])
    with pytest.raises(NotImplementedError, match="got KVCacheSpec"):
        prepare_kernel_block_sizes(config_of(KVCacheSpec(block_size=4)), [[]])
    with pytest.raises(ValueError, match="got 48 tokens; Made takes 32"):
        prepare_kernel_block_sizes(config_of(FULL), [[group_of(0, FULL, 32)]])
    with pytest.raises(ValueError, match="base: expected at least 1 token, got 0"):
        MultipleOf(0)
