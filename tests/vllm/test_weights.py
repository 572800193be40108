"""One name for the same weights, wherever they lie."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.errors import ConfigError
from kvxfer.integrations.vllm.facts import weights_identity

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HfConfig:
    """As much of a Hugging Face config as is read."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


def identity(
    model: str | Path,
    *,
    config: HfConfig | None = None,
    load_format: str = "auto",
    **fields: Any,
) -> str:
    model_config = SimpleNamespace(
        **({"model": str(model), "hf_config": config or HfConfig(hidden_size=8)} | fields)
    )
    return weights_identity(model_config, SimpleNamespace(load_format=load_format))


def make_model(folder: Path, *, weights: bytes = b"w" * 100_000, **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8} | config))
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_a_directory_by_its_files_not_by_its_path(tmp_path: Path) -> None:
    first = identity(make_model(tmp_path / "a", transformers_version="4.51", torch_dtype="float32"))
    assert first == identity(make_model(tmp_path / "b", transformers_version="5.19"))
    assert first.startswith("files-")
    assert str(tmp_path) not in first


@pytest.mark.parametrize(
    "changes",
    [
        {"weights": b"w" * 99_999},
        {"weights": b"w" * 99_999 + b"x"},
        {"weights": b"x" + b"w" * 99_999},
        {"hidden_size": 16},
    ],
    ids=["size", "end", "start", "config"],
)
def test_other_weights_have_another_name(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert identity(make_model(tmp_path / "a")) != identity(make_model(tmp_path / "b", **changes))


def test_the_index_says_which_files_count(tmp_path: Path) -> None:
    folders = [make_model(tmp_path / name) for name in ("a", "b")]
    for folder in folders:
        index = {"weight_map": {"x": "model.safetensors", "y": "model.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folders[1] / "consolidated.safetensors").write_bytes(b"the same in one piece")
    assert identity(folders[0]) == identity(folders[1])


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="weights: expected files .* got none; name the weights"):
        identity(tmp_path)


def test_a_single_file_has_a_name_too(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"weights")
    assert identity(tmp_path / "a.gguf") == identity(tmp_path / "b.gguf")


@pytest.mark.parametrize(
    ("model", "config", "fields", "expected"),
    [
        ("org/name", HfConfig(_commit_hash=COMMIT), {"revision": "v1"}, f"org/name@{COMMIT}"),
        ("org/name", HfConfig(), {"revision": "v1"}, "org/name@v1"),
        ("org/name", HfConfig(), {}, "org/name@main"),
        (f"/x/models--org--name/snapshots/{COMMIT}", HfConfig(), {}, f"org/name@{COMMIT}"),
        ("/tmp/y", HfConfig(), {"model_weights": "s3://b/name"}, "s3://b/name@main"),
    ],
)
def test_a_model_of_a_hub(
    model: str, config: HfConfig, fields: dict[str, Any], expected: str
) -> None:
    assert identity(model, config=config, **fields) == expected


def test_weights_quantised_while_loading_are_others() -> None:
    plain = identity("org/name")
    assert identity("org/name", quantization="fp8") == f"{plain} quantised to fp8"
    # A checkpoint that is quantised itself: the method's name differs by device.
    own = HfConfig(quantization_config={"quant_method": "gptq"})
    assert identity("org/name", config=own, quantization="gptq_marlin") == plain


def test_dummy_weights_are_named_by_the_config() -> None:
    names = [
        identity("a", config=HfConfig(hidden_size=size), load_format="dummy") for size in (8, 8, 16)
    ]
    assert names[0] == names[1] != names[2]
    assert names[0].startswith("dummy-")
