"""A short name of a model's weights, the same on every host that serves them.

The path of a directory is no part of it, so two hosts may keep the model in different places. A
model from a hub is named by repository and commit; a directory by samples of its files: the same
weights give the same name, and the reverse is likely, not certain, because a change between the
samples is not seen. Where the two sides got the same weights in different ways (one from a hub, the
other from a directory), the setting ``weights_identity`` names them on both.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvxfer.errors import ConfigError

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
    """The name of the weights of a vLLM ``ModelConfig``.

    Args:
        revision: overrides the model's own.

    Raises:
        ConfigError: a directory or file without weights.
    """
    model = getattr(model_config, "model_weights", "") or model_config.model
    revision = revision or getattr(model_config, "revision", None)
    hf_config = model_config.hf_config
    load_format = getattr(load_config, "load_format", "auto")
    if getattr(load_format, "value", load_format) == "dummy":
        name = f"dummy-{config_digest(hf_config.to_dict())}"
    elif found := _SNAPSHOT.search(model):
        name = f"{found['repo'].replace('--', '/')}@{found['commit']}"
    elif Path(model).exists():
        name = _files_identity(model)
    else:
        commit = getattr(hf_config, "_commit_hash", None)
        name = f"{model}@{commit or revision or 'main'}"
    return name + _online_quantisation(model_config)


def config_digest(config: Mapping[str, Any]) -> str:
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
        digest.update(config_digest(json.loads(config.read_text("utf-8"))).encode())
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
