"""The configuration of a Llama-family model, and how it is read from files.

Layers may differ in what they see (all tokens, a sliding window, or a chunk) and in whose KV they
read (their own, or that of an earlier layer). Some may keep a state in place of KV.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from kvxfer.errors import ModelError
from kvxfer.transfer.states import StatePart, part_heads

_DTYPES = ("float32", "bfloat16", "float16")


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
    ``has_chunks``: the windows are chunks, a token sees those of its own up to itself.
    ``state_layers``: the numbers of the layers that keep a state (:mod:`kvxfer.engine.state`).
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
    has_chunks: bool = False
    state_layers: tuple[int, ...] = ()
    num_state_heads: int = 8
    num_state_groups: int = 2
    state_head_size: int = 16


class LayerAttention(msgspec.Struct, frozen=True, kw_only=True):
    """``window``: tokens seen, itself among them; None: all. ``chunk``: of its own chunk of so many
    tokens instead. ``target``: whose KV it reads. ``is_state``: it sees none of them, but a state.
    """

    name: str
    window: int | None = None
    chunk: int | None = None
    target: str | None = None
    is_state: bool = False


class TpShard(msgspec.Struct, frozen=True, kw_only=True):
    """What one tensor-parallel rank owns of heads and MLP: global ranges ``[lo, hi)``."""

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
    "chunked": msgspec.structs.replace(
        DEFAULT_MODEL, model_type="chunked", windows=(_WINDOW_TOKENS, None) * 2, has_chunks=True
    ),
    "states": msgspec.structs.replace(DEFAULT_MODEL, model_type="states", state_layers=(0, 2)),
}
"""Models by name, with seeded random weights: sliding and full layers in turn, the same with two
layers that read the KV of the two before them, chunks in place of the windows, and states."""


def layer_names(config: ModelConfig) -> tuple[str, ...]:
    """The names under which the layers' KV is known to the other engine, in order of depth."""
    return tuple(
        f"model.layers.{layer}.{'mixer' if layer in config.state_layers else 'self_attn'}"
        for layer in range(config.num_layers)
    )


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
    if config.state_layers and (config.num_kv_shared_layers or config.windows):
        raise ModelError(
            "state_layers: expected neither windows nor num_kv_shared_layers beside them, got "
            f"{config.windows} and {config.num_kv_shared_layers}"
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
        LayerAttention(
            name=name,
            window=None if config.has_chunks else window,
            chunk=window if config.has_chunks else None,
            target=None if index < num_own else own[window],
            is_state=index in config.state_layers,
        )
        for index, (name, window) in enumerate(zip(names, windows, strict=True))
    )


def attention_pattern(config: ModelConfig) -> str:
    """What the layers see and share, as both sides of a transfer must have it: "full", or layer by
    layer ("48, full, 48, full=1": the last one reads the KV of layer 1; "chunk 48").
    """
    layers = attention_layers(config)
    index = {layer.name: number for number, layer in enumerate(layers)}
    seen = [
        _seen(layer) + ("" if layer.target is None else f"={index[layer.target]}")
        for layer in layers
    ]
    return "full" if set(seen) == {"full"} else ", ".join(seen)


def _seen(layer: LayerAttention) -> str:
    if layer.is_state:
        return "state"
    return f"chunk {layer.chunk}" if layer.chunk else str(layer.window or "full")


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


NUM_TAPS = 4
"""Of the convolution in front of a state: it keeps one row less."""


class StateShard(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank owns of a layer that keeps a state: heads, and the groups that they need.
    ``is_turned``: the convolution's rows are kept [channel][step], else [step][channel].
    """

    heads: tuple[int, ...]
    groups: tuple[int, ...]
    heads_per_group: int
    head_size: int
    is_turned: bool

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the rows and of the recurrence."""
        conv = (NUM_TAPS - 1, (len(self.heads) + len(self.groups)) * self.head_size)
        return conv[::-1] if self.is_turned else conv, (len(self.heads), self.head_size)


def conv_parts(config: ModelConfig) -> tuple[StatePart, StatePart]:
    """What the convolution is of, over all ranks: x of each head, g of each group of heads."""
    size = config.state_head_size
    return StatePart("x", config.num_state_heads, size), StatePart(
        "g", config.num_state_groups, size
    )


def state_shard(config: ModelConfig, shard: TpShard, layout: str) -> StateShard:
    """``layout`` NHD keeps the rows turned. Raises ModelError where ranks cannot share equally."""
    try:
        heads, groups = (
            tuple(range(*part_heads(part, shard.tp_rank, shard.tp_size)))
            for part in conv_parts(config)
        )
    except ValueError as exc:
        raise ModelError(f"tp_size: {exc}; choose another TP size") from exc
    return StateShard(
        heads=heads,
        groups=groups,
        heads_per_group=config.num_state_heads // config.num_state_groups,
        head_size=config.state_head_size,
        is_turned=layout == "NHD",
    )


def _check_model(config: ModelConfig) -> None:
    """What holds for every model, wherever its numbers came from. Raises ModelError."""
    if config.dtype not in _DTYPES:
        raise ModelError(f"dtype: expected one of {', '.join(_DTYPES)}, got {config.dtype!r}")
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


_T = TypeVar("_T")
_MODEL_TYPES = ("llama", "mistral", "ministral")
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
"""As in ``layer_types``."""


class _HfConfig(msgspec.Struct, frozen=True):
    """The keys of ``config.json`` that matter here, spelled as there; others are ignored."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: Annotated[int, msgspec.Meta(le=1 << 16)]
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    eos_token_id: int | list[int] | None = None
    torch_dtype: str | None = None
    dtype: str | None = None
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    # UNSET is not null: where the key is missing, transformers takes 4096 for Mistral models
    sliding_window: int | UnsetType | None = UNSET
    layer_types: tuple[str, ...] | None = None
    num_kv_shared_layers: int = 0
    partial_rotary_factor: float | None = None
    quantization_config: dict[str, Any] | None = None


class _HfGenerationConfig(msgspec.Struct, frozen=True):
    eos_token_id: int | list[int] | None = None


def load_model_config(
    path: str | Path | None, *, num_kv_heads: int | None = None, dtype: str | None = None
) -> ModelConfig:
    """Read a model's config.

    ``path``: None for the built-in tiny model, a name of
    :data:`~kvxfer.engine.model_config.BUILT_IN_MODELS` (a folder of that name is ``./hybrid``), a
    Hugging Face folder (config.json and safetensors files), or a bare config file (seeded random
    weights). ``num_kv_heads`` overrides the file's where no weights are read. ``dtype``: float32,
    bfloat16, float16, "auto" for the file's own, or None for float32 (greedy tokens flip by the
    order of summation in bfloat16, 2 % per token). Raises ModelError naming key and value for
    anything missing, malformed or not supported.
    """
    if path is None:
        config = DEFAULT_MODEL
    elif isinstance(path, str) and path in BUILT_IN_MODELS:
        config = BUILT_IN_MODELS[path]
    else:
        config = _from_file(Path(path))
    if dtype != "auto":
        config = msgspec.structs.replace(config, dtype=dtype or "float32")
    if num_kv_heads is not None and num_kv_heads != config.num_kv_heads:
        if config.weights is not None:
            raise ModelError(
                f"num_kv_heads: the weights in {config.weights} have {config.num_kv_heads}, got "
                f"{num_kv_heads}; "
                "other head counts need seeded random weights (a bare config.json)"
            )
        config = msgspec.structs.replace(config, num_kv_heads=num_kv_heads)
    _check_model(config)
    return config


def _from_file(path: Path) -> ModelConfig:
    folder = path if path.is_dir() else None
    file = path / "config.json" if folder else path
    raw = _decode(file, _HfConfig)
    _refuse_unsupported(raw, file)
    if folder and not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{folder}: expected *.safetensors files, got none; "
            f"give {file} itself for seeded random weights"
        )
    theta, scaling = _rope(raw, file)
    eos = raw.eos_token_id
    generation = file.parent / "generation_config.json"
    if folder and generation.is_file():
        # Llama 3 Instruct lists <|eot_id|> only there
        eos = _decode(generation, _HfGenerationConfig).eos_token_id or eos
    if raw.head_dim is None and (
        raw.num_attention_heads < 1 or raw.hidden_size % raw.num_attention_heads
    ):
        raise ModelError(
            f"{file}: num_attention_heads: expected a divisor of hidden_size {raw.hidden_size} "
            f"(there is no head_dim), got {raw.num_attention_heads}"
        )
    return ModelConfig(
        model_type=raw.model_type,
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        num_layers=raw.num_hidden_layers,
        num_heads=raw.num_attention_heads,
        num_kv_heads=raw.num_attention_heads
        if raw.num_key_value_heads is None
        else raw.num_key_value_heads,
        head_size=raw.hidden_size // raw.num_attention_heads
        if raw.head_dim is None
        else raw.head_dim,
        rms_norm_eps=raw.rms_norm_eps,
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=raw.max_position_embeddings,
        tie_word_embeddings=raw.tie_word_embeddings,
        eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
        dtype=raw.dtype or raw.torch_dtype or "float32",
        weights=folder,
        windows=_windows(raw, file),
        num_kv_shared_layers=raw.num_kv_shared_layers,
    )


def _decode(file: Path, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except OSError as exc:
        raise ModelError(
            f"{file}: cannot be read ({exc.strerror}); give a Hugging Face folder, a config.json, "
            f"or one of {', '.join(BUILT_IN_MODELS)}"
        ) from exc
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise ModelError(f"{file}: {exc}") from exc


def _refuse_unsupported(raw: _HfConfig, file: Path) -> None:
    if raw.model_type not in _MODEL_TYPES:
        raise ModelError(
            f"{file}: model_type: expected one of {', '.join(_MODEL_TYPES)}, got "
            f"{raw.model_type!r}; it is not supported"
        )
    expected: tuple[tuple[str, object], ...] = (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("quantization_config", None),
    )
    for key, want in expected:
        if (got := getattr(raw, key)) != want:
            raise ModelError(f"{file}: {key}: expected {want!r}, got {got!r}; it is not supported")
    if raw.partial_rotary_factor not in (None, 1.0):
        raise ModelError(
            f"{file}: partial_rotary_factor: expected 1.0, got {raw.partial_rotary_factor}; it "
            "is not supported"
        )


def _windows(raw: _HfConfig, file: Path) -> tuple[int | None, ...]:
    window = raw.sliding_window
    if raw.model_type == "llama":
        if window not in (UNSET, None):
            raise ModelError(
                f"{file}: sliding_window: expected null for llama, got {window}; it is not "
                f"supported, give model_type ministral"
            )
        window = None
    elif window is UNSET or raw.num_key_value_heads is None:
        # their defaults are those of one model (4096 tokens, 8 heads): not guessed
        missing = "sliding_window" if window is UNSET else "num_key_value_heads"
        raise ModelError(f"{file}: {missing}: expected it to be given for {raw.model_type}")
    assert not isinstance(window, UnsetType)
    if window is not None and window < 1:
        raise ModelError(f"{file}: sliding_window: expected at least 1 token, got {window}")
    kinds = raw.layer_types
    if kinds is None:
        return (window,) * raw.num_hidden_layers if window is not None else ()
    if raw.model_type == "mistral" or (raw.model_type == "llama" and set(kinds) - {FULL}):
        # transformers passes over the key for these two
        raise ModelError(
            f"{file}: layer_types: expected none for {raw.model_type}, got {len(kinds)} layers; "
            "give model_type ministral"
        )
    if len(kinds) != raw.num_hidden_layers:
        raise ModelError(
            f"{file}: layer_types: expected one for each of {raw.num_hidden_layers} layers, got "
            f"{len(kinds)}"
        )
    if unknown := set(kinds) - {FULL, SLIDING}:
        raise ModelError(
            f"{file}: layer_types: expected {FULL} or {SLIDING}, got {min(unknown)!r}; it is not "
            "supported"
        )
    if window is None and SLIDING in kinds:
        raise ModelError(
            f"{file}: sliding_window: expected a number of tokens for {SLIDING}, got null"
        )
    if SLIDING not in kinds:
        return ()
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _rope(raw: _HfConfig, file: Path) -> tuple[float, Llama3Rope | None]:
    """Base and scaling from either spelling."""
    key = "rope_parameters" if raw.rope_parameters else "rope_scaling"
    rope = raw.rope_parameters or raw.rope_scaling or {}
    theta = rope.get("rope_theta", raw.rope_theta)
    # 10000 is what transformers takes when the file names none
    theta = 10000.0 if theta is None else theta
    if isinstance(theta, bool) or not isinstance(theta, int | float):
        raise ModelError(f"{file}: {key}.rope_theta: expected a number, got {theta!r}")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor") not in (None, 1.0):
        raise ModelError(
            f"{file}: {key}.partial_rotary_factor: expected 1.0, got "
            f"{rope['partial_rotary_factor']!r}; "
            "it is not supported"
        )
    if rope_type == "default":
        return float(theta), None
    if rope_type != "llama3":
        raise ModelError(
            f"{file}: {key}.rope_type: expected 'default' or 'llama3', got {rope_type!r}; it is "
            "not supported"
        )
    try:
        return float(theta), msgspec.convert(rope, Llama3Rope)
    except msgspec.ValidationError as exc:
        raise ModelError(f"{file}: {key}: {exc}") from exc
