"""What one layer keeps in a block, and so how many bytes a block of it has."""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_NBYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""Bytes of one element, by dtype name (torch's names without ``torch.``)."""


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """What every kind of layer has: the tokens of its blocks."""

    block_size: int

    def __post_init__(self) -> None:
        _check_positive("block_size", self.block_size)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer on one rank."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class FullAttentionSpec(KVCacheSpec):
    """A layer that attends to every token before: K and V of ``block_size`` tokens a block.

    Args:
        block_size: tokens of a block.
        num_kv_heads: KV heads on this rank.
        head_size: elements of one head of one token.
        dtype: name of the element type, a key of :data:`DTYPE_NBYTES`.

    Raises:
        ValueError: a size below 1 or an unknown dtype.
    """

    num_kv_heads: int
    head_size: int
    dtype: str

    def __post_init__(self) -> None:
        # Not super(): slots=True makes a new class, which the zero-argument form does not find on
        # Python 3.11.
        KVCacheSpec.__post_init__(self)
        _check_positive("num_kv_heads", self.num_kv_heads)
        _check_positive("head_size", self.head_size)
        if self.dtype not in DTYPE_NBYTES:
            raise ValueError(
                f"dtype: expected one of {', '.join(DTYPE_NBYTES)}, got {self.dtype!r}"
            )

    @property
    def page_size_bytes(self) -> int:
        """K and V of all heads and tokens of one block."""
        return 2 * self.block_size * self.num_kv_heads * self.head_size * DTYPE_NBYTES[self.dtype]


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name}: expected at least 1, got {value}")
