"""Sizes of blocks, computed by hand, and how many of them a request holds, counted step by step."""

from __future__ import annotations

import functools
import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.cache.specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)


def sizes(
    block_size: int = 16, num_kv_heads: int = 8, head_size: int = 64, dtype: str = "float32"
) -> dict[str, Any]:
    return {
        "block_size": block_size,
        "num_kv_heads": num_kv_heads,
        "head_size": head_size,
        "dtype": dtype,
    }


def full(**changed: Any) -> FullAttentionSpec:
    return FullAttentionSpec(**sizes() | changed)


def window(block_size: int, sliding_window: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(**sizes(block_size, 1, 1), sliding_window=sliding_window)


def chunked(block_size: int, attention_chunk_size: int) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(
        **sizes(block_size, 1, 1), attention_chunk_size=attention_chunk_size
    )


def state(block_size: int = 16, num_speculative_blocks: int = 0, **changed: Any) -> MambaSpec:
    fields: dict[str, Any] = {"shapes": ((4, 3), (2, 2, 2)), "dtypes": ("float32", "float16")}
    return MambaSpec(
        block_size=block_size, num_speculative_blocks=num_speculative_blocks, **fields | changed
    )


# ---------------------------------------------------------------------------- bytes of a block


@pytest.mark.parametrize(
    ("spec", "page_size_bytes"),
    [
        # 2 (K and V) * 16 tokens * 8 heads * 128 * 2 bytes
        pytest.param(FullAttentionSpec(**sizes(16, 8, 128, "bfloat16")), 65536, id="8b-tp1"),
        pytest.param(FullAttentionSpec(**sizes(16, 1, 128, "float16")), 8192, id="8b-tp8"),
        pytest.param(FullAttentionSpec(**sizes(24, 2, 16, "float32")), 6144, id="small-float32"),
        pytest.param(FullAttentionSpec(**sizes(1, 1, 1, "float8_e4m3fn")), 2, id="smallest"),
        # One latent: 64 tokens * 1 head * 576 * 2 bytes
        pytest.param(MLAAttentionSpec(**sizes(64, 1, 576, "bfloat16")), 73728, id="latent"),
        pytest.param(window(16, 48), 128, id="window"),
        pytest.param(chunked(16, 64), 128, id="chunked"),
        # 12 * 4 bytes and 8 * 2 bytes
        pytest.param(state(), 64, id="state"),
        pytest.param(state(page_size_padded=100), 100, id="state-padded"),
        pytest.param(
            FullAttentionSpec(**sizes(1, 1, 1), page_size_padded=20), 20, id="attention-padded"
        ),
        pytest.param(
            MLAAttentionSpec(**sizes(1, 1, 1), page_size_padded=4), 4, id="latent-padded-by-0"
        ),
    ],
)
def test_page_size(spec: KVCacheSpec, page_size_bytes: int) -> None:
    assert spec.page_size_bytes == page_size_bytes


def test_specs_are_values() -> None:
    assert full() == FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=64, dtype="float32")
    assert len({full(), full()}) == 1
    assert full() != full(dtype="float16")
    assert full() != full(sliding_window=4)
    assert full() != MLAAttentionSpec(**sizes())
    with pytest.raises(AttributeError):
        full().block_size = 32  # type: ignore[misc]


# ---------------------------------------------------------------------------- refused sizes

BAD_SPECS: list[tuple[type[KVCacheSpec], dict[str, Any], str]] = [
    (FullAttentionSpec, {"block_size": 0}, "block_size: expected at least 1, got 0; set it to"),
    (FullAttentionSpec, {"num_kv_heads": -1}, "num_kv_heads: expected at least 1, got -1"),
    (FullAttentionSpec, {"head_size": 0}, "head_size: expected at least 1, got 0"),
    (FullAttentionSpec, {"dtype": "int4"}, r"dtype: expected one of float32, .*, got 'int4'"),
    (
        FullAttentionSpec,
        {"page_size_padded": 65535},
        "page_size_padded: expected at least 65536 bytes, got 65535",
    ),
    (FullAttentionSpec, {"sliding_window": 0}, "sliding_window: expected at least 1, got 0"),
    (
        FullAttentionSpec,
        {"sliding_window": 4, "attention_chunk_size": 8},
        "sliding_window and attention_chunk_size: expected at most one of them, got 4 and 8",
    ),
    (
        SlidingWindowSpec,
        {"sliding_window": -3},
        "sliding_window: expected at least 1, got -3; a layer that sees all tokens has a Full",
    ),
    (
        SlidingWindowSpec,
        {"sliding_window": 3, "block_size": -1},
        "block_size: expected at least 1, got -1",
    ),
    (
        ChunkedLocalAttentionSpec,
        {"attention_chunk_size": 0},
        "attention_chunk_size: expected at least 1, got 0; a layer that sees all tokens has a Full",
    ),
]


@pytest.mark.parametrize(("kind", "changed", "message"), BAD_SPECS)
def test_bad_attention(kind: type[KVCacheSpec], changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**sizes() | changed)


def test_sizes_are_ints() -> None:
    with pytest.raises(TypeError, match=r"block_size: expected an int, got 16\.0"):
        full(block_size=16.0)
    with pytest.raises(TypeError, match="sliding_window: expected an int, got '48'"):
        SlidingWindowSpec(**sizes(), sliding_window="48")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"page_size_padded: expected an int, got 65536\.5"):
        full(page_size_padded=65536.5)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"block_size": 0}, "block_size: expected at least 1, got 0"),
        ({"shapes": ()}, "expected one dtype for each of one or more shapes, got 0 shapes and 2"),
        ({"dtypes": ("int8",)}, "one or more shapes, got 2 shapes and 1 dtypes"),
        ({"shapes": ((4, 0), (2,))}, "shapes: expected at least 1, got 0"),
        ({"dtypes": ("int8", "half")}, "dtype: expected one of .*, got 'half'"),
        ({"num_speculative_blocks": -1}, "num_speculative_blocks: expected at least 0, got -1"),
        ({"page_size_padded": 63}, "page_size_padded: expected at least 64 bytes, got 63"),
    ],
)
def test_bad_state(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        state(**changed)


# ---------------------------------------------------------------------------- blocks of a request


@pytest.mark.parametrize(
    ("spec", "num_tokens", "step_tokens", "expected"),
    [
        pytest.param(full(), 0, 8, 0, id="no-tokens"),
        pytest.param(full(), 16, 8, 1, id="full-one-block"),
        pytest.param(full(), 17, 8, 2, id="full-two-blocks"),
        # At 17 computed tokens token 15 is seen, the last of its block, and 33 tokens are held
        # at 25: blocks 0 and 1.
        pytest.param(window(16, 3), 1000, 8, 2, id="window-within-blocks"),
        # 47 + 8 = 55 tokens, the first one the last of its block: 1 + 54 / 16
        pytest.param(window(16, 48), 1000, 8, 5, id="window"),
        pytest.param(window(16, 48), 33, 8, 3, id="window-longer-than-request"),
        # 1 token, the one computed
        pytest.param(window(16, 1), 1000, 1, 1, id="window-of-itself"),
        # 63 of a chunk and the 8 of the step, from the beginning of a block: 71 / 16
        pytest.param(chunked(16, 64), 1000, 8, 5, id="chunk"),
        # A chunk of 20 may begin at token 12 of a block: 12 + 19 + 8 = 39 tokens
        pytest.param(chunked(16, 20), 1000, 8, 3, id="chunk-across-blocks"),
        pytest.param(state(1000), 1000, 8, 1, id="state-in-place"),
        pytest.param(state(16), 1000, 8, 2, id="state-read-and-written"),
        pytest.param(state(1000, 2), 1000, 8, 3, id="state-and-two-speculative"),
        pytest.param(state(16, 2), 1000, 8, 6, id="states-and-speculative"),
    ],
)
def test_max_blocks(spec: KVCacheSpec, num_tokens: int, step_tokens: int, expected: int) -> None:
    assert spec.max_blocks(num_tokens, step_tokens) == expected


def test_max_memory_usage() -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=1000),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8),
    )
    assert full().max_memory_usage_bytes(config) == 63 * 65536
    assert window(16, 48).max_memory_usage_bytes(config) == 5 * 128
    assert state().max_memory_usage_bytes(config) == 2 * 64


def first_needed(spec: KVCacheSpec, num_computed: int) -> int:
    """The first token that the token after ``num_computed`` looks at, one by one."""
    token = num_computed
    for seen in range(num_computed + 1):
        match spec:
            case SlidingWindowSpec():
                looks = token - seen < spec.sliding_window
            case ChunkedLocalAttentionSpec():
                looks = token // spec.attention_chunk_size == seen // spec.attention_chunk_size
            case _:
                looks = True
        if looks:
            return seen
    raise AssertionError


def held_after_steps(spec: KVCacheSpec, steps: list[int]) -> list[int]:
    """Blocks of a table after each growth: a set of positions that loses and gains."""
    held: set[int] = set()
    counts: list[int] = []
    num_computed = length = 0
    for step in steps:
        if isinstance(spec, AttentionSpec):
            first = first_needed(spec, num_computed) // spec.block_size
            held = {position for position in held if position >= first}
            while length * spec.block_size < num_computed + step:
                held.add(length)
                length += 1
        else:
            assert isinstance(spec, MambaSpec)
            last = (num_computed + step - 1) // spec.block_size
            if num_computed:
                held = {at for at in held if at >= (num_computed - 1) // spec.block_size}
            held |= set(range(max(last, length), last + 1 + spec.num_speculative_blocks))
            length = last + 1 + spec.num_speculative_blocks
        counts.append(len(held))
        num_computed += step
    return counts


def most_held(spec: KVCacheSpec, num_tokens: int, step_tokens: int) -> int:
    """Over all numbers of computed tokens and all sizes of the next step."""
    most = 0
    for num_computed in range(num_tokens):
        first = first_needed(spec, num_computed) // spec.block_size
        for step in range(1, min(step_tokens, num_tokens - num_computed) + 1):
            end = -(-(num_computed + step) // spec.block_size)
            most = max(most, end - first)
    return most


WINDOWED = [
    functools.partial(kind, block_size, size)
    for kind, block_size, size in itertools.product((window, chunked), (1, 2, 3, 4), range(1, 10))
]


@pytest.mark.parametrize("make", WINDOWED, ids=lambda make: f"{make.func.__name__}{make.args}")
def test_max_blocks_is_the_most_that_is_held(make: functools.partial[KVCacheSpec]) -> None:
    spec = make()
    for num_tokens, step_tokens in itertools.product((1, 2, 3, 5, 8, 13, 21), (1, 2, 3, 7, 30)):
        bound = spec.max_blocks(num_tokens, step_tokens)
        exact = most_held(spec, num_tokens, step_tokens)
        assert exact <= bound <= exact + 1, (num_tokens, step_tokens)
    # A long request meets every position of a window in its blocks: no block more than needed.
    for step_tokens in (1, 2, 3, 7):
        assert spec.max_blocks(60, step_tokens) == most_held(spec, 60, step_tokens)


SPECS = st.one_of(
    st.builds(window, st.integers(1, 20), st.integers(1, 60)),
    st.builds(chunked, st.integers(1, 20), st.integers(1, 60)),
    st.builds(state, st.integers(1, 40), st.integers(0, 3)),
    st.builds(lambda block_size: full(block_size=block_size), st.integers(1, 20)),
)


@given(spec=SPECS, step_tokens=st.integers(1, 50), seed=st.integers(0, 9999), data=st.data())
def test_no_run_holds_more(
    spec: KVCacheSpec, step_tokens: int, seed: int, data: st.DataObject
) -> None:
    num_tokens = data.draw(st.integers(1, 150))
    rng = random.Random(seed)
    steps: list[int] = []
    while (rest := num_tokens - sum(steps)) > 0:
        steps.append(min(rest, rng.choice((1, step_tokens, rng.randint(1, step_tokens)))))
    assert max(held_after_steps(spec, steps)) <= spec.max_blocks(num_tokens, step_tokens)


@given(spec=SPECS, num_tokens=st.integers(0, 200), step_tokens=st.integers(1, 50))
def test_longer_requests_and_steps_need_no_fewer(
    spec: KVCacheSpec, num_tokens: int, step_tokens: int
) -> None:
    most = spec.max_blocks(num_tokens, step_tokens)
    assert spec.max_blocks(num_tokens + 1, step_tokens) >= most
    assert spec.max_blocks(num_tokens, step_tokens + 1) >= most


# ---------------------------------------------------------------------------- groups


def test_spec_of_a_layer() -> None:
    wide = full(num_kv_heads=16)
    group = KVCacheGroupSpec(["a", "b"], full(), {"b": wide})
    assert group.spec_of("a") == full()
    assert group.spec_of("b") is wide
    with pytest.raises(ValueError, match="layer c: expected one of the group's layers, a, b; ask"):
        group.spec_of("c")
