"""Small attention backends for tests: they state shapes and orders, and attend to nothing."""

from __future__ import annotations

from collections.abc import Sequence

from kvxfer.tensors.attention import AttentionMetadataBuilder, MultipleOf


class Stated:
    """K and V outermost in the logical shape; any kernel block."""

    order: tuple[int, ...] = (0, 1, 2, 3, 4)
    sizes: Sequence[int | MultipleOf] = (MultipleOf(1),)

    @classmethod
    def get_name(cls) -> str:
        return cls.__name__

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    @classmethod
    def get_kv_cache_stride_order(cls) -> tuple[int, ...]:
        return cls.order

    @classmethod
    def get_supported_kernel_block_sizes(cls) -> Sequence[int | MultipleOf]:
        return cls.sizes

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        raise NotImplementedError


class Hnd(Stated):
    """Physical [2, blocks, heads, tokens, D]."""

    order = (0, 1, 3, 2, 4)


class Nhd(Stated):
    """Physical [blocks, 2, tokens, heads, D]."""

    order = (1, 0, 2, 3, 4)


class NhdOfEight(Nhd):
    """Takes kernel blocks of some sizes only."""

    sizes = (8, 16, 32)


class HeadsOutside(Stated):
    """Physical [2, heads, blocks, tokens, D]: four pieces of a block with two heads."""

    order = (0, 3, 1, 2, 4)


class BlocksFirst(Stated):
    """Logical [blocks, 2, tokens, heads, D], in that order: says so by having no order."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    @classmethod
    def get_kv_cache_stride_order(cls) -> tuple[int, ...]:
        raise NotImplementedError


class Packed(Stated):
    """Logical [blocks, heads, tokens, K then V]."""

    order = (0, 1, 2, 3)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return (num_blocks, num_kv_heads, block_size, 2 * head_size)


class Mla(Stated):
    """Logical [blocks, tokens, D]: one latent, no heads."""

    order = (0, 1, 2)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return (num_blocks, block_size, head_size)
