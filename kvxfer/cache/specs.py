"""What one layer keeps in a block, how many bytes a block of it has, and how many blocks one
request can need at a time.

A layer that looks back at all tokens needs blocks for all of them; one with a window needs those of
the window and of the tokens that are computed in one step; a state layer needs the state that a
step reads and the one that it writes.

Before each step, blocks are dropped that no later token looks at; then the table grows to hold the
step's tokens. The most blocks after any such growth are :meth:`KVCacheSpec.max_blocks`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import index
from typing import Any, ClassVar, TypeAlias

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


PlanningConfig: TypeAlias = Any
"""What a cache's size depends on: settings of whatever engine, in its sections.

- ``model_config.max_model_len``: tokens of the longest request
- ``scheduler_config.max_num_batched_tokens``: tokens of the largest step
- ``scheduler_config.disable_hybrid_kv_cache_manager``: one group only (missing or None: False)
- ``cache_config.num_gpu_blocks_override``: blocks of the pool whatever the memory is (missing or
  None: as many as fit)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """What every kind of layer has: the tokens of its blocks. Raises TypeError for a size that is
    not an int; ValueError for a size below 1.
    """

    block_size: int

    def __post_init__(self) -> None:
        check_positive("block_size", self.block_size, "set it to the tokens of a block, 16 say")

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer on one rank, padding included."""
        raise NotImplementedError

    kind: ClassVar[str]
    """The kind of layer, in the words of vLLM's KV events."""

    @property
    def kept(self) -> str:
        """What a request keeps of it, in words; layers that differ in it cannot share a table."""
        raise NotImplementedError

    def max_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """The most blocks that a request holds at a time; it never falls when ``num_tokens`` grows.
        ``num_tokens``: all tokens it will ever have. ``step_tokens``: the most of them that are
        computed in one step.
        """
        raise NotImplementedError

    def max_memory_usage_bytes(self, config: PlanningConfig) -> int:
        """Bytes that one request of the longest length takes in one layer.

        Reads ``config.model_config.max_model_len`` and
        ``config.scheduler_config.max_num_batched_tokens``. The null block of the pool is not in it.
        """
        longest = config.model_config.max_model_len
        step_tokens = config.scheduler_config.max_num_batched_tokens
        return self.max_blocks(longest, step_tokens) * self.page_size_bytes


def ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def check_int(name: str, value: object) -> None:
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
    """TypeError unless it is an int, ValueError below 1; ``advice``: what to change."""
    check_int(name, value)
    if value < 1:
        raise ValueError(f"{name}: expected at least 1, got {value}{advice and f'; {advice}'}")


def _check_dtype(dtype: str) -> None:
    if dtype not in DTYPE_NBYTES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPE_NBYTES)}, got {dtype!r}")


def _check_padding(padded: int | None, unpadded: int) -> None:
    if padded is None:
        return
    check_int("page_size_padded", padded)
    if padded < unpadded:
        raise ValueError(
            f"page_size_padded: expected at least {unpadded} bytes, got {padded}; None pads nothing"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """What all layers with keys and values have. ``dtype``: name of the element type, a key of
    :data:`DTYPE_NBYTES`. ``page_size_padded``: bytes of a block where it is given more than it
    needs, so that layers of different kinds have blocks of one size. Raises ValueError for a size
    below 1, an unknown dtype, or padding below the block's own bytes.
    """

    num_kv_heads: int
    head_size: int
    dtype: str
    page_size_padded: int | None = None

    def __post_init__(self) -> None:
        # Not super(): slots=True makes a new class, which the zero-argument form does not find on
        # Python 3.11.
        KVCacheSpec.__post_init__(self)
        check_positive("num_kv_heads", self.num_kv_heads)
        check_positive("head_size", self.head_size)
        _check_dtype(self.dtype)
        _check_padding(self.page_size_padded, self.unpadded_page_size_bytes)

    @property
    def unpadded_page_size_bytes(self) -> int:
        """K and V of all heads and tokens of one block."""
        return 2 * self.block_size * self.num_kv_heads * self.head_size * DTYPE_NBYTES[self.dtype]

    @property
    def page_size_bytes(self) -> int:
        return self.page_size_padded or self.unpadded_page_size_bytes

    @property
    def kept(self) -> str:
        return "all tokens"

    def max_blocks(self, num_tokens: int, step_tokens: int) -> int:
        return ceil_div(num_tokens, self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """A layer whose blocks are kept for every token of a request.

    ``sliding_window`` and ``attention_chunk_size`` say what a layer computes that was made to keep
    everything (:func:`~kvxfer.cache.grouping.unify_hybrid_kv_cache_specs`); they do not change what
    is kept. At most one of them is set.
    """

    sliding_window: int | None = None
    attention_chunk_size: int | None = None

    def __post_init__(self) -> None:
        AttentionSpec.__post_init__(self)
        for name in ("sliding_window", "attention_chunk_size"):
            if (value := getattr(self, name)) is not None:
                check_positive(name, value)
        if self.sliding_window is not None and self.attention_chunk_size is not None:
            raise ValueError(
                "sliding_window and attention_chunk_size: expected at most one of them, got "
                f"{self.sliding_window} and {self.attention_chunk_size}"
            )

    kind = "full_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAAttentionSpec(FullAttentionSpec):
    """Multi-head latent attention: one latent vector for each head and token, no separate V."""

    kind = "mla_attention"

    @property
    def unpadded_page_size_bytes(self) -> int:
        """One latent of all heads and tokens of one block."""
        return self.block_size * self.num_kv_heads * self.head_size * DTYPE_NBYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """A token sees the ``sliding_window`` last tokens, itself among them; older ones go."""

    sliding_window: int

    def __post_init__(self) -> None:
        AttentionSpec.__post_init__(self)
        check_positive(
            "sliding_window",
            self.sliding_window,
            "a layer that sees all tokens has a FullAttentionSpec",
        )

    kind = "sliding_window"

    @property
    def kept(self) -> str:
        return f"a window of {self.sliding_window} tokens"

    def max_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """The tokens that a step's first one sees, and the step itself.

        The first of them may be the last of its block, so the others begin a new one.
        """
        held = min(self.sliding_window - 1 + step_tokens, num_tokens)
        most = 1 + ceil_div(held - 1, self.block_size)
        return min(most, ceil_div(num_tokens, self.block_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """A token sees its own chunk of ``attention_chunk_size`` tokens; older chunks go."""

    attention_chunk_size: int

    def __post_init__(self) -> None:
        AttentionSpec.__post_init__(self)
        check_positive(
            "attention_chunk_size",
            self.attention_chunk_size,
            "a layer that sees all tokens has a FullAttentionSpec",
        )

    kind = "chunked_local_attention"

    @property
    def kept(self) -> str:
        return f"chunks of {self.attention_chunk_size} tokens"

    def max_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """All but one token of a chunk, and the step that begins there.

        Chunks begin at multiples of the greatest common divisor of chunk and block, so at most the
        rest of a block lies before them.
        """
        held = min(self.attention_chunk_size - 1 + step_tokens, num_tokens)
        before = self.block_size - math.gcd(self.attention_chunk_size, self.block_size)
        most = ceil_div(before + held, self.block_size)
        return min(most, ceil_div(num_tokens, self.block_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec(KVCacheSpec):
    """A layer that keeps a state and no tokens.

    The state after n tokens is in block ``(n - 1) // block_size`` of its table, so that the states
    at the ends of blocks may be kept for reuse by prefix. Where that is not wanted, a
    ``block_size`` of the longest request keeps one state, written over in place.

    Args:
        block_size: tokens between two blocks of the table.
        shapes: shape of each state tensor on this rank (e.g. convolution and recurrence).
        dtypes: element type of each, keys of :data:`DTYPE_NBYTES`.
        num_speculative_blocks: states held after the last one, for tokens that may be rejected.

    Raises:
        ValueError: no shapes, another number of dtypes, a size below 1, an unknown dtype, a
            negative number of speculative blocks, or padding below the states' own bytes.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    page_size_padded: int | None = None
    num_speculative_blocks: int = 0

    def __post_init__(self) -> None:
        KVCacheSpec.__post_init__(self)
        if not self.shapes or len(self.shapes) != len(self.dtypes):
            raise ValueError(
                "shapes and dtypes: expected one dtype for each of one or more shapes, got "
                f"{len(self.shapes)} shapes and {len(self.dtypes)} dtypes"
            )
        for shape in self.shapes:
            for size in shape:
                check_positive("shapes", size)
        for dtype in self.dtypes:
            _check_dtype(dtype)
        check_int("num_speculative_blocks", self.num_speculative_blocks)
        if self.num_speculative_blocks < 0:
            raise ValueError(
                f"num_speculative_blocks: expected at least 0, got {self.num_speculative_blocks}"
            )
        _check_padding(self.page_size_padded, self.unpadded_page_size_bytes)

    @property
    def unpadded_page_size_bytes(self) -> int:
        return sum(
            math.prod(shape) * DTYPE_NBYTES[dtype]
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )

    @property
    def page_size_bytes(self) -> int:
        return self.page_size_padded or self.unpadded_page_size_bytes

    kind = "mamba"

    @property
    def kept(self) -> str:
        return f"the last state and {self.num_speculative_blocks} speculative ones"

    def max_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """The state that a step reads and the one that it writes, each with its speculative ones;
        they are one where the table has one block.
        """
        in_table = ceil_div(num_tokens, self.block_size) + self.num_speculative_blocks
        return min(in_table, 2 * (1 + self.num_speculative_blocks))


@dataclass(slots=True)
class KVCacheTensor:
    """One buffer of ``size`` bytes; the layers of ``shared_by`` lie in the same bytes of it.

    They are either of different groups (a block belongs to one group at a time) or share their KV.
    """

    size: int
    shared_by: list[str]


@dataclass(slots=True)
class KVCacheGroupSpec:
    """Layers that share a block table, and what each of them keeps.

    ``kv_cache_spec`` says for all of them which tokens are kept in blocks of which size.
    ``layer_specs`` has the layers whose own spec differs from it: other heads, hence other bytes
    (groups of one type), or another window of a layer that keeps everything.
    """

    layer_names: list[str]
    kv_cache_spec: KVCacheSpec
    layer_specs: dict[str, KVCacheSpec] = field(default_factory=dict)

    def spec_of(self, layer_name: str) -> KVCacheSpec:
        """The layer's own spec; ValueError for a layer of another group."""
        if layer_name not in self.layer_names:
            raise ValueError(
                f"layer {layer_name}: expected one of the group's layers, "
                f"{', '.join(self.layer_names) or 'none'}; ask the group that has it"
            )
        return self.layer_specs.get(layer_name, self.kv_cache_spec)


@dataclass(slots=True)
class KVCacheConfig:
    """The cache of one rank: ``num_blocks`` of all groups together, with the null block."""

    num_blocks: int
    kv_cache_tensors: list[KVCacheTensor]
    kv_cache_groups: list[KVCacheGroupSpec]


def attention_layer_spec(
    layer_name: str,
    *,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    dtype: str,
    sliding_window: int | None,
    use_mla: bool = False,
    attention_chunk_size: int | None = None,
) -> AttentionSpec:
    """What a layer with a cache of its own keeps on this rank: its window, or everything.

    ``sliding_window``: tokens that a token sees, itself among them; None for all. ``use_mla``:
    latent attention, which keeps one vector for each token. ``attention_chunk_size``: a token sees
    its own chunk of so many tokens instead. Raises ValueError or TypeError, naming the layer, for
    sizes or a dtype that have no spec, and for a window in latent attention.
    """
    if use_mla and sliding_window is not None:
        raise ValueError(
            f"layer {layer_name}: expected no sliding_window with use_mla, got {sliding_window}; "
            "set it to None where the layer sees all tokens"
        )
    shape: dict[str, Any] = {
        "block_size": block_size,
        "num_kv_heads": num_kv_heads,
        "head_size": head_size,
        "dtype": dtype,
    }
    try:
        if attention_chunk_size is not None:
            return ChunkedLocalAttentionSpec(**shape, attention_chunk_size=attention_chunk_size)
        if sliding_window is not None:
            return SlidingWindowSpec(**shape, sliding_window=sliding_window)
        return (MLAAttentionSpec if use_mla else FullAttentionSpec)(**shape)
    except (TypeError, ValueError) as error:
        raise type(error)(f"layer {layer_name}: {error}") from error
