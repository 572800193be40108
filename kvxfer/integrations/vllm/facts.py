"""What both engines must agree on, read from vLLM's configs.

The texts do not depend on how an engine is set up: not on the model's path, the parallel sizes, the
block size, the layout, nor on whether its cache manager keeps windows apart. So they come from the
model's config wherever that has them, and not from the layers of one rank.

The weights of a model from a hub are named by repository and commit, those of a directory by
samples of its files: the same weights give the same name, and the reverse is likely, not certain,
because a change between the samples is not seen. What the user puts over the model's config
(``hf_overrides``) stands behind the name: the same weights make other KV with it. Where the two
sides got the same weights in different ways (one from a hub, the other from a directory), the
setting ``weights_identity`` names them on both.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from msgspec import UNSET, UnsetType

from kvxfer.errors import ConfigError
from kvxfer.integrations.vllm.settings import plugin_settings
from kvxfer.integrations.vllm.specs import LayerSpec, StateSpec, layer_specs
from kvxfer.transfer.interleave import Interleave
from kvxfer.transfer.manifest import CacheFacts

_INDEX_NAME = "model.safetensors.index.json"
_PATTERNS = ("*.safetensors", "*.gguf", "*.bin", "*.pt", "*.pth")
# A hub's cache: models--ORG--NAME/snapshots/COMMIT, which vLLM puts for the name when offline.
_SNAPSHOT = re.compile(r"models--(?P<repo>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})/?$")
_SAMPLE_NBYTES = 4096
_NUM_SAMPLES = 256
"""Of all files together, at least 8 of each: 1 MiB, where reading all of 16 GB takes 40 s."""
_NOT_THE_MODEL = frozenset(
    {"_name_or_path", "_commit_hash", "transformers_version", "torch_dtype", "dtype"}
)
"""Fields of a model's config that a copy or another version of the library may change."""


def weights_identity(
    model_config: Any, load_config: Any = None, revision: str | None = None
) -> str:
    """The name of the weights of a vLLM ``ModelConfig``. ``revision``: overrides the model's own.
    Raises ConfigError for a directory or file without weights.
    """
    model = getattr(model_config, "model_weights", "") or model_config.model
    revision = revision or getattr(model_config, "revision", None)
    hf_config = model_config.hf_config
    if _is_dummy(load_config):
        name = f"dummy-{_config_digest(hf_config.to_dict())}"
    elif found := _SNAPSHOT.search(model):
        name = f"{found['repo'].replace('--', '/')}@{found['commit']}"
    elif Path(model).exists():
        name = _files_identity(model)
    else:
        commit = getattr(hf_config, "_commit_hash", None)
        name = f"{model}@{commit or revision or 'main'}"
    return name + _online_quantisation(model_config)


def _config_digest(config: Mapping[str, Any]) -> str:
    """A digest of a model's config, of what describes the model."""
    kept = {name: value for name, value in config.items() if name not in _NOT_THE_MODEL}
    text = json.dumps(kept, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _online_quantisation(model_config: Any) -> str:
    """Weights that vLLM quantises while it loads them are not those of the files.

    A checkpoint that is quantised itself says so, and the method's name then depends on the device.
    """
    method = getattr(model_config, "quantization", None)
    if method is None or getattr(model_config.hf_config, "quantization_config", None):
        return ""
    return f" quantised to {method}"


def _overrides(vllm_config: Any) -> str:
    """What the user puts over the model's config, all of it: what changes no KV of one model does
    of another. Dummy weights are named by the config with it. Of a draft's there are only vLLM's
    own, a function of its version. Raises ConfigError for what two engines cannot compare.
    """
    overrides = getattr(vllm_config.model_config, "hf_overrides", None)
    if not overrides or _is_dummy(vllm_config.load_config):
        return ""
    try:
        text = json.dumps(overrides, sort_keys=True, separators=(",", ":"))
    except TypeError as exc:
        raise ConfigError(
            f"hf_overrides: expected values that JSON has, got {type(overrides).__name__} ({exc}); "
            "two engines cannot compare a function: name the model with what it changes by the "
            "setting weights_identity, the same on both sides"
        ) from exc
    return _short(f" with {text}")


def _is_dummy(load_config: Any) -> bool:
    load_format = getattr(load_config, "load_format", "auto")
    return bool(getattr(load_format, "value", load_format) == "dummy")


@functools.lru_cache(maxsize=8)
def _files_identity(model: str) -> str:
    path = Path(model)
    files = [path] if path.is_file() else _weight_files(path)
    if not files:
        raise ConfigError(
            f"weights: expected files {', '.join(_PATTERNS)} in {path}, got none; name the weights "
            "by the setting weights_identity, the same on both sides"
        )
    digest = hashlib.blake2b(digest_size=16)
    config = path / "config.json"
    if config.is_file():
        digest.update(_config_digest(json.loads(config.read_text("utf-8"))).encode())
    num_samples = max(8, _NUM_SAMPLES // len(files))
    for file in files:
        nbytes = file.stat().st_size
        digest.update(f"{file.name if path.is_dir() else ''} {nbytes} ".encode())
        with file.open("rb") as stream:
            for sample in range(num_samples):
                stream.seek(max(0, nbytes - _SAMPLE_NBYTES) * sample // (num_samples - 1))
                digest.update(stream.read(_SAMPLE_NBYTES))
    return f"files-{digest.hexdigest()}"


def _weight_files(folder: Path) -> list[Path]:
    """The files that the index names, or else all of the first kind that is there."""
    index = folder / _INDEX_NAME
    if index.is_file():
        names = json.loads(index.read_text("utf-8"))["weight_map"].values()
        return [folder / name for name in sorted(set(names))]
    for pattern in _PATTERNS:
        if files := sorted(folder.glob(pattern)):
            return files
    return []


_SHOWN_CHARS = 160
_PATTERN_FIELDS = (
    *("sliding_window_pattern", "_sliding_window_pattern", "use_sliding_window"),
    *("max_window_layers", "global_attn_every_n_layers", "cross_layer_attention_pattern"),
)
"""Where a config without ``layer_types`` says which layers have windows."""
_ROPE_FIELDS = ("rope_theta", "partial_rotary_factor", "rope_local_base_freq")
_DRAFTS_WITH_KV = frozenset({"draft_model", "extract_hidden_states"})
_DRAFT_NAME = re.compile(r"(^|\.)(draft_model|mtp|eagle_layers)\.")
_LAYER_NUMBER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheModel:
    """What the place of a layer's cache depends on, besides its view and its spec.

    Attributes:
        num_kv_heads: the most that a layer of the model or its draft has.
        head_counts: every number of KV heads that a layer of the model has.
        draft_counts: the same of its draft; empty without one that keeps KV.
        num_layers: of the model, in all pipeline stages.
        cache_dtype: vLLM's name for what the cache keeps of K and V; "auto" keeps them as they are.
        num_state_groups: of B and C of Mamba2's layers, where the model's config says so.
        interleave: which tokens the rank keeps of layers that context parallelism shards.
        layers: vLLM's modules of attention by the layer's name, those of this rank; empty where
            there are none, as in the scheduler.
    """

    dtype: torch.dtype
    num_kv_heads: int
    head_counts: frozenset[int]
    draft_counts: frozenset[int] = frozenset()
    num_layers: int = 0
    cache_dtype: str = "auto"
    num_state_groups: int | None = None
    interleave: Interleave | UnsetType = UNSET
    layers: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def is_draft(self, layer: str) -> bool:
        """vLLM numbers a draft's layers behind the model's, or gives them a prefix."""
        number = _LAYER_NUMBER.search(layer)
        is_behind = number is not None and int(number[1]) >= self.num_layers
        return bool(self.draft_counts) and (is_behind or bool(_DRAFT_NAME.search(layer)))


def cache_model(vllm_config: Any, cp_rank: int = 0) -> CacheModel:
    """Read from a ``VllmConfig`` of any rank, or of the scheduler. ``cp_rank``: the rank's place in
    its context parallel group.
    """
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    compilation = getattr(vllm_config, "compilation_config", None)
    counts, draft = _head_counts(model), _draft(vllm_config)
    draft_counts = _head_counts(draft.draft_model_config) if draft else frozenset()
    cp_size = getattr(parallel, "decode_context_parallel_size", 1)
    # The older name counts where it is set, as in vLLM, which may not have compared them yet.
    runs = (getattr(parallel, f"{prefix}_kv_cache_interleave_size", 1) for prefix in ("dcp", "cp"))
    run = next((each for each in runs if each > 1), 1)
    return CacheModel(
        dtype=model.dtype,
        num_kv_heads=max(counts | draft_counts),
        head_counts=counts,
        draft_counts=draft_counts,
        num_layers=model.get_total_num_hidden_layers(),
        cache_dtype=vllm_config.cache_config.cache_dtype,
        num_state_groups=_num_state_groups(model.hf_text_config),
        interleave=Interleave(cp_size, cp_rank, run) if cp_size > 1 else UNSET,
        layers=getattr(compilation, "static_forward_context", None) or {},
    )


def cache_facts(vllm_config: Any, kv_cache_config: Any) -> CacheFacts:
    """The facts of an engine for its manifest; none of them is unknown. Raises ConfigError for a
    cache or weights that cannot be described.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    text_config = model.hf_text_config
    specs = [spec for _, spec in layer_specs(kv_cache_config).values()]
    named = plugin_settings(vllm_config).weights_identity
    architectures = getattr(model.hf_config, "architectures", None) or ()
    return CacheFacts(
        model=" ".join((model.hf_config.model_type, *architectures)),
        weights=named or weights_identity(model, vllm_config.load_config) + _overrides(vllm_config),
        rope=rope_text(text_config, model.max_model_len),
        dtype=_joined(_dtype_text(spec) for spec in specs),
        quantisation=_quantisation(
            vllm_config, {spec.quantisation for spec in specs if isinstance(spec, LayerSpec)}
        ),
        num_kv_heads=1 if model.use_mla else cache_model(vllm_config).num_kv_heads,
        head_size=model.get_head_size(),
        num_layers=model.get_total_num_hidden_layers(),
        is_mla=bool(model.use_mla),
        draft_layers=_draft_layers(vllm_config),
        dcp_size=getattr(parallel, "decode_context_parallel_size", 1),
        attention=attention_text(text_config),
    )


def num_own_tokens(vllm_config: Any, kv_cache_config: Any) -> int:
    """How many tokens at the end of a prompt decode computes itself. A draft's KV of a token is
    made with the next one, and of a later module with one more for each module before it: what
    prefill has where those lie behind the prompt was made with guesses. A window leaves no room
    for more than one.
    """
    specs = (spec for _, spec in layer_specs(kv_cache_config).values())
    if any(isinstance(spec, StateSpec) or spec.window for spec in specs):
        return 1
    return max(1, int(getattr(vllm_config, "num_prefill_lookahead_tokens", 1)))


def _dtype_text(spec: LayerSpec | StateSpec) -> str:
    if isinstance(spec, LayerSpec):
        return str(spec.dtype).removeprefix("torch.")
    return f"state {' '.join(str(dtype).removeprefix('torch.') for dtype in spec.dtypes)}"


def rope_text(config: Any, max_model_len: int) -> str:
    """The rotary settings of a Hugging Face text config, in one spelling for both of its own
    (``rope_theta`` with ``rope_scaling``, or ``rope_parameters``); "none" without any.
    """
    found: dict[str, Any] = {
        name: getattr(config, name)
        for name in _ROPE_FIELDS
        if getattr(config, name, None) is not None
    }
    for source in ("rope_scaling", "rope_parameters"):
        found.update(getattr(config, source, None) or {})
    if not found:
        return "none"
    kinds = {name: value for name, value in found.items() if isinstance(value, Mapping)}
    plain = {name: value for name, value in found.items() if name not in kinds}
    # By kind of layer: what stands beside the kinds holds for none of them.
    parts = kinds or {"": plain}
    texts = [
        f"{kind}({text})" if kind else text
        for kind, text in sorted((kind, _rope_part(part)) for kind, part in parts.items())
    ]
    if any(_rope_type(part) == "longrope" for part in parts.values()):
        # Which of its two sets of factors a model uses depends on the longest request it admits.
        trained = getattr(config, "original_max_position_embeddings", None)
        trained = found.get("original_max_position_embeddings", trained)
        texts.append("long" if trained is None or max_model_len > trained else "short")
    return _short(" ".join(texts))


def attention_text(config: Any) -> str:
    """What each layer of a Hugging Face text config looks at; "full" where all look at everything.

    What an engine *keeps* is not in it, so the hybrid cache manager makes no difference.
    """
    parts = []
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    types = getattr(config, "layer_types", None)
    kinds = sorted(set(types or ()) - {"full_attention"})
    if window is not None and (types is None or kinds):
        parts.append(f"window {window}")
    if chunk is not None:
        parts.append(f"chunk {chunk}")
    if kinds:
        letters = {"full_attention": "F"} | {kind: kind[0] for kind in kinds}
        legend = _joined(f"{letters[kind]}={kind}" for kind in kinds)
        parts.append(f"layers {_runs([letters[kind] for kind in types or ()])} ({legend})")
    elif types is None and parts:
        parts += [
            f"{name} {value}"
            for name in _PATTERN_FIELDS
            if (value := getattr(config, name, None)) is not None
        ]
    if shared := getattr(config, "num_kv_shared_layers", None):
        parts.append(f"last {shared} layers share KV")
    return _short(", ".join(parts)) or "full"


def _rope_type(part: Mapping[str, Any]) -> str:
    name = part.get("rope_type") or part.get("type") or "default"
    # Legacy names: Phi-3's first, and Qwen2-VL's, whose sections are a field of their own.
    return {"su": "longrope", "mrope": "default"}.get(name, name)


def _rope_part(part: Mapping[str, Any]) -> str:
    kept = {
        name: value
        for name, value in part.items()
        if name not in ("rope_type", "type") and value is not None
    }
    if kept.get("partial_rotary_factor") == 1:
        del kept["partial_rotary_factor"]
    return " ".join((_rope_type(part), *(f"{name}={_number(kept[name])}" for name in sorted(kept))))


def _number(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{float(value):.10g}"
    return json.dumps(value, sort_keys=True, default=str, separators=(",", ":"))


def _runs(letters: Sequence[str]) -> str:
    """Run lengths as text: the letters ``sssF`` give ``3sF``."""
    runs = ((letter, len(list(run))) for letter, run in itertools.groupby(letters))
    return "".join(f"{count if count > 1 else ''}{letter}" for letter, count in runs)


def _short(text: str) -> str:
    """Long texts end in a digest of what does not fit."""
    if len(text) <= _SHOWN_CHARS:
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return f"{text[:_SHOWN_CHARS]}... {digest}"


def _joined(values: Any) -> str:
    return ", ".join(sorted(set(values)))


def _quantisation(vllm_config: Any, modes: set[str]) -> str:
    """How values stand for KV, with what fixes the scales: the checkpoint, or each token's own."""
    if modes == {"none"}:
        return "none"
    cache = vllm_config.cache_config
    if getattr(cache, "calculate_kv_scales", False):
        raise ConfigError(
            "calculate_kv_scales: expected scales that both engines have, got some that each "
            "calculates from its first request; use a checkpoint with KV scales, or "
            "calculate_kv_scales=False"
        )
    parts = sorted(modes)
    if any(mode.startswith("fp8_per_") for mode in modes):  # the others are named by their type
        parts.append(_fp8_type(cache.cache_dtype))
    skipped = getattr(cache, "kv_cache_dtype_skip_layers", None)
    if skipped:
        parts.append(f"without layers {_joined(map(str, skipped))}")
    return _short(" ".join(parts))


def element_type(dtype: torch.dtype, quantisation: str, cache_dtype: str) -> str:
    """What a layer's cache keeps, by PyTorch's name."""
    if not quantisation.startswith("fp8"):
        return str(dtype).removeprefix("torch.")
    return "float8_e5m2" if cache_dtype == "fp8_e5m2" else _fp8_type(cache_dtype)


def _fp8_type(cache_dtype: str) -> str:
    """Which of the types of one byte. "fp8" is the platform's own, and platforms differ."""
    if cache_dtype not in ("auto", "fp8", "fp8_e4m3", "fp8_per_token_head"):
        return cache_dtype
    from vllm.platforms import current_platform

    return str(current_platform.fp8_dtype()).removeprefix("torch.")


def _head_counts(model: Any) -> frozenset[int]:
    """How many KV heads the layers of a ``ModelConfig`` have; newer versions say it by layer."""
    counts = {int(model.get_total_num_kv_heads())}
    arch = getattr(model, "model_arch_config", None)
    for layer in getattr(arch, "per_layer_overrides", None) or ():
        if "total_num_kv_heads" in layer:
            counts.add(int(layer["total_num_kv_heads"]))
    config = model.hf_text_config
    if other := getattr(config, "num_global_key_value_heads", None):
        counts.add(int(other))
    counts |= {int(count) for count in getattr(config, "num_key_value_heads_per_layer", None) or ()}
    return frozenset(counts)


def _num_state_groups(config: Any) -> int | None:
    counts = (getattr(config, name, None) for name in ("mamba_n_groups", "n_groups"))
    found = {int(count) for count in counts if count is not None}
    return found.pop() if len(found) == 1 else None


def _draft(vllm_config: Any) -> Any | None:
    """The speculative config, if its draft keeps KV."""
    config = getattr(vllm_config, "speculative_config", None)
    if config is None or getattr(config, "draft_model_config", None) is None:
        return None
    return config if config.use_eagle() or config.method in _DRAFTS_WITH_KV else None


def _draft_layers(vllm_config: Any) -> tuple[str, ...]:
    config = _draft(vllm_config)
    if config is None:
        return ()
    load_config = getattr(config, "draft_load_config", None) or vllm_config.load_config
    identity = weights_identity(
        config.draft_model_config, load_config, getattr(config, "revision", None)
    )
    return (f"{config.method} of {identity}",)
