"""Sizes of blocks, computed by hand."""

from __future__ import annotations

import pytest

from kvxfer.cache.specs import FullAttentionSpec, KVCacheSpec


@pytest.mark.parametrize(
    ("spec", "page_size_bytes"),
    [
        pytest.param(FullAttentionSpec(16, 8, 128, "bfloat16"), 65536, id="8b-tp1"),
        pytest.param(FullAttentionSpec(16, 1, 128, "float16"), 8192, id="8b-tp8"),
        pytest.param(FullAttentionSpec(24, 2, 16, "float32"), 6144, id="small-float32"),
        pytest.param(FullAttentionSpec(1, 1, 1, "float8_e4m3fn"), 2, id="smallest"),
    ],
)
def test_page_size(spec: KVCacheSpec, page_size_bytes: int) -> None:
    assert spec.page_size_bytes == page_size_bytes


def test_specs_are_values() -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=64, dtype="float32")
    assert spec == FullAttentionSpec(16, 8, 64, "float32")
    assert len({spec, FullAttentionSpec(16, 8, 64, "float32")}) == 1
    assert spec != FullAttentionSpec(16, 8, 64, "float16")
    with pytest.raises(AttributeError):
        spec.block_size = 32  # type: ignore[misc]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 8, 64), "block_size: expected at least 1, got 0"),
        ((16, -1, 64), "num_kv_heads: expected at least 1, got -1"),
        ((16, 8, 0), "head_size: expected at least 1, got 0"),
    ],
)
def test_bad_sizes(sizes: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FullAttentionSpec(*sizes, "float32")


def test_bad_dtype() -> None:
    with pytest.raises(ValueError, match=r"dtype: expected one of float32, .*, got 'int4'"):
        FullAttentionSpec(16, 8, 64, "int4")
