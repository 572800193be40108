"""From what one attention layer computes to what it keeps."""

from __future__ import annotations

from kvxfer.cache.specs import (
    AttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)


def attention_layer_spec(
    layer_name: str,
    *,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    dtype: str,
    sliding_window: int | None,
    use_mla: bool = False,
) -> AttentionSpec:
    """What a layer with a cache of its own keeps on this rank: its window, or everything.

    Args:
        layer_name: for errors.
        block_size: tokens of a block.
        num_kv_heads: KV heads on this rank.
        head_size: elements of one head of one token.
        dtype: name of the element type, without ``torch.``.
        sliding_window: tokens that a token sees, itself among them; None for all.
        use_mla: latent attention, which keeps one vector for each token.

    Raises:
        ValueError, TypeError: sizes or a dtype that have no spec, or a window in latent attention;
            the message names the layer.
    """
    if use_mla and sliding_window is not None:
        raise ValueError(
            f"layer {layer_name}: expected no sliding_window with use_mla, got {sliding_window}; "
            "set it to None where the layer sees all tokens"
        )
    try:
        if sliding_window is not None:
            return SlidingWindowSpec(
                block_size=block_size,
                num_kv_heads=num_kv_heads,
                head_size=head_size,
                dtype=dtype,
                sliding_window=sliding_window,
            )
        kind = MLAAttentionSpec if use_mla else FullAttentionSpec
        return kind(
            block_size=block_size, num_kv_heads=num_kv_heads, head_size=head_size, dtype=dtype
        )
    except (TypeError, ValueError) as error:
        raise type(error)(f"layer {layer_name}: {error}") from error
