"""The commands as a person runs them: their environment, and a model that starts at once."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[1]
OK, DIFFERENT, WRONG, INTERRUPTED = 0, 1, 2, 130
"""Exit statuses."""
# Two layers: engines start and answer in a fraction of a second.
MODEL = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def small_model(folder: Path) -> str:
    """Its path."""
    path = folder / "config.json"
    path.write_bytes(msgspec.json.encode(MODEL))
    return str(path)


def environment(temporary: Path) -> dict[str, str]:
    """This process's, without settings of kvxfer."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("KVXFER_")}
    return {**kept, "TMPDIR": str(temporary), "COLUMNS": "200", "PYTHONPATH": str(ROOT)}
