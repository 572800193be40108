"""What a Llama-family model is; :mod:`kvxfer.engine.model_files` reads it from files.

Layers may differ in what they see (all tokens, or a sliding window) and in whose KV they read
(their own, or that of an earlier layer).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvxfer.errors import ModelError

DTYPES = ("float32", "bfloat16", "float16")


class Llama3Rope(msgspec.Struct, frozen=True, kw_only=True):
    """The frequency scaling of Llama 3.1 and later (``rope_type: llama3``)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One decoder.

    ``weights``: the folder of the safetensors files, or None for seeded random weights.
    ``windows``: for each layer how many tokens a token sees, itself among them, None for all; empty
    where every layer sees all. ``num_kv_shared_layers``: the last so many layers keep no KV.
    """

    # omit_defaults: the name of the weights is a hash of these fields, and must not change for
    # models that have none of the fields that came later.

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Rope | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: str
    weights: Path | None
    windows: tuple[int | None, ...] = ()
    num_kv_shared_layers: int = 0


class LayerAttention(msgspec.Struct, frozen=True, kw_only=True):
    """How one layer attends.

    ``window``: tokens that a token sees, itself among them; None for all. ``target``: the layer
    whose KV it reads instead of keeping its own.
    """

    name: str
    window: int | None = None
    target: str | None = None


class TpShard(msgspec.Struct, frozen=True, kw_only=True):
    """Which heads and which part of the MLP one tensor-parallel rank owns; global ranges ``[lo,
    hi)``.
    """

    tp_rank: int
    tp_size: int
    query_lo: int
    query_hi: int
    kv_lo: int
    kv_hi: int
    mlp_lo: int
    mlp_hi: int


DEFAULT_MODEL = ModelConfig(
    model_type="llama",
    vocab_size=2048,
    hidden_size=256,
    intermediate_size=512,
    num_layers=4,
    num_heads=8,
    num_kv_heads=8,
    head_size=64,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    max_position_embeddings=8192,
    tie_word_embeddings=False,
    eos_token_ids=(),
    dtype="float32",
    weights=None,
)


_WINDOW_TOKENS = 48  # three blocks of 16, and no multiple of 32: windows begin inside blocks
BUILT_IN_MODELS = {
    "hybrid": msgspec.structs.replace(
        DEFAULT_MODEL, model_type="ministral", windows=(_WINDOW_TOKENS, None) * 2
    ),
    "kv-sharing": msgspec.structs.replace(
        DEFAULT_MODEL,
        model_type="ministral",
        num_layers=6,
        windows=(_WINDOW_TOKENS, None) * 3,
        num_kv_shared_layers=2,
    ),
}
"""Models by name, with seeded random weights: sliding and full layers in turn, and the same with
two layers that read the KV of the two before them."""


def layer_names(config: ModelConfig) -> tuple[str, ...]:
    """The names under which the layers' KV is known to the other engine, in order of depth."""
    return tuple(f"model.layers.{layer}.self_attn" for layer in range(config.num_layers))


def attention_layers(config: ModelConfig) -> tuple[LayerAttention, ...]:
    """How each layer attends, in order of depth.

    A layer without KV of its own reads that of the last layer before the sharing ones that has the
    same window. Raises ModelError where there is none, and for windows that do not fit the layers.
    """
    names = layer_names(config)
    windows = config.windows or (None,) * config.num_layers
    if len(windows) != config.num_layers:
        raise ModelError(
            f"windows: expected one for each of {config.num_layers} layers, got {len(windows)}"
        )
    num_own = config.num_layers - config.num_kv_shared_layers
    if not 0 < num_own <= config.num_layers:
        raise ModelError(
            f"num_kv_shared_layers: expected 0 to {config.num_layers - 1} of {config.num_layers} "
            f"layers, got {config.num_kv_shared_layers}"
        )
    own = dict(zip(windows[:num_own], names[:num_own], strict=True))  # the last one of a kind stays
    for name, window in zip(names, windows, strict=True):
        if window is not None and window < 1:
            raise ModelError(f"windows: {name}: expected at least 1 token, got {window}")
        if window not in own:
            raise ModelError(
                f"num_kv_shared_layers: {name}: expected a layer with {_kind(window)} among the "
                f"first {num_own}, got none; share fewer layers"
            )
    return tuple(
        LayerAttention(name=name, window=window, target=None if index < num_own else own[window])
        for index, (name, window) in enumerate(zip(names, windows, strict=True))
    )


def attention_pattern(config: ModelConfig) -> str:
    """What the layers see and share, as both sides of a transfer must have it: "full", or layer by
    layer ("48, full, 48, full=1": the last one reads the KV of layer 1).
    """
    layers = attention_layers(config)
    if all(layer.window is None and layer.target is None for layer in layers):
        return "full"
    index = {layer.name: number for number, layer in enumerate(layers)}
    return ", ".join(
        ("full" if layer.window is None else str(layer.window))
        + ("" if layer.target is None else f"={index[layer.target]}")
        for layer in layers
    )


def shard_for(config: ModelConfig, tp_rank: int, tp_size: int) -> TpShard:
    """The part of rank ``tp_rank`` of ``tp_size``; KV heads are replicated when ``tp_size >
    num_kv_heads``.

    Raises ModelError when the TP size neither divides the KV heads nor is a multiple of them, or
    does not divide the query heads or the intermediate size.
    """
    if tp_size < 1 or not 0 <= tp_rank < tp_size:
        raise ModelError(f"tp_rank: expected 0 <= tp_rank < tp_size, got {tp_rank} of {tp_size}")
    num_kv = config.num_kv_heads
    if num_kv % tp_size and tp_size % num_kv:
        raise ModelError(
            f"tp_size: expected a divisor or a multiple of {num_kv} KV heads, got {tp_size}; "
            "choose another TP size"
        )
    for name, count in (
        ("num_heads", config.num_heads),
        ("intermediate_size", config.intermediate_size),
    ):
        if count % tp_size:
            raise ModelError(
                f"tp_size: expected a divisor of {name} {count}, got {tp_size}; choose another "
                "TP size"
            )
    query, mlp = config.num_heads // tp_size, config.intermediate_size // tp_size
    kv_lo = tp_rank * num_kv // tp_size
    return TpShard(
        tp_rank=tp_rank,
        tp_size=tp_size,
        query_lo=tp_rank * query,
        query_hi=(tp_rank + 1) * query,
        kv_lo=kv_lo,
        kv_hi=kv_lo + max(1, num_kv // tp_size),
        mlp_lo=tp_rank * mlp,
        mlp_hi=(tp_rank + 1) * mlp,
    )


def check_model(config: ModelConfig) -> None:
    """What holds for every model, wherever its numbers came from. Raises ModelError."""
    if config.dtype not in DTYPES:
        raise ModelError(f"dtype: expected one of {', '.join(DTYPES)}, got {config.dtype!r}")
    for name in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_size",
        "rope_theta",
        "max_position_embeddings",
    ):
        if (value := getattr(config, name)) <= 0:
            raise ModelError(f"{name}: expected more than 0, got {value}")
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"num_kv_heads: expected a divisor of num_heads {config.num_heads}, got "
            f"{config.num_kv_heads}"
        )
    if config.head_size % 2:
        raise ModelError(
            f"head_size: expected an even number (rotary pairs), got {config.head_size}"
        )
    attention_layers(config)


def _kind(window: int | None) -> str:
    return "full attention" if window is None else f"a window of {window}"
