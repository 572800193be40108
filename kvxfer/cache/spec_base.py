"""What all cache specs have in common: the base class, the bytes of an element, and the checks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import index
from typing import Protocol

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


class _ModelSettings(Protocol):
    @property
    def max_model_len(self) -> int: ...


class _SchedulerSettings(Protocol):
    @property
    def max_num_batched_tokens(self) -> int: ...


class MemoryConfig(Protocol):
    """What the size of a cache depends on: the longest request and the largest step, in tokens."""

    @property
    def model_config(self) -> _ModelSettings: ...
    @property
    def scheduler_config(self) -> _SchedulerSettings: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """What every kind of layer has: the tokens of its blocks.

    Raises:
        TypeError: a size that is not an int.
        ValueError: a size below 1.
    """

    block_size: int

    def __post_init__(self) -> None:
        check_positive("block_size", self.block_size, "set it to the tokens of a block, 16 say")

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer on one rank."""
        raise NotImplementedError

    @property
    def kind(self) -> str:
        """The kind of layer, in the words of vLLM's KV events."""
        raise NotImplementedError

    @property
    def kept(self) -> str:
        """What a request keeps of it, in words; layers that differ in it cannot share a table."""
        raise NotImplementedError

    def max_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """The most blocks that a request holds at a time; it never falls when ``num_tokens`` grows.

        Args:
            num_tokens: all tokens it will ever have.
            step_tokens: the most of them that are computed in one step.
        """
        raise NotImplementedError

    def max_memory_usage_bytes(self, config: MemoryConfig) -> int:
        """Bytes that one request of the longest length takes in one layer.

        Reads ``config.model_config.max_model_len`` and
        ``config.scheduler_config.max_num_batched_tokens``. The null block of the pool is not in it.
        """
        num_blocks = self.max_blocks(
            config.model_config.max_model_len, config.scheduler_config.max_num_batched_tokens
        )
        return num_blocks * self.page_size_bytes


def ceil_div(value: int, divisor: int) -> int:
    """``value / divisor``, rounded up."""
    return -(-value // divisor)


def check_int(name: str, value: object) -> None:
    """TypeError unless ``value`` is an int."""
    if not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {value!r}")


def check_ids(name: str, ids: Iterable[object]) -> list[int]:
    """The ids as ints; TypeError for one that is no integer, never cut down to one."""
    checked = []
    for position, value in enumerate(ids):
        try:
            checked.append(index(value))  # type: ignore[arg-type]  # that is what it finds out
        except TypeError as exc:
            raise TypeError(f"{name}[{position}]: expected an integer, got {value!r}") from exc
    return checked


def check_positive(name: str, value: int, advice: str = "") -> None:
    """TypeError unless ``value`` is an int, ValueError unless it is at least 1; ``advice`` says
    what to change where the name alone does not.
    """
    check_int(name, value)
    if value < 1:
        raise ValueError(f"{name}: expected at least 1, got {value}{advice and f'; {advice}'}")


def check_dtype(dtype: str) -> None:
    """ValueError unless ``dtype`` is a key of :data:`DTYPE_NBYTES`."""
    if dtype not in DTYPE_NBYTES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPE_NBYTES)}, got {dtype!r}")


def check_padding(padded: int | None, unpadded: int) -> None:
    """TypeError unless ``padded`` is an int or None, ValueError when it is fewer bytes than a block
    has.
    """
    if padded is None:
        return
    check_int("page_size_padded", padded)
    if padded < unpadded:
        raise ValueError(
            f"page_size_padded: expected at least {unpadded} bytes, got {padded}; None pads nothing"
        )
