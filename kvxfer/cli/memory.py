"""Whether the engines of a command fit into this machine's memory, before a process starts: one
that takes more than there is takes the machine along.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvxfer.engine.config import CPU, EngineConfig
from kvxfer.engine.kv_plan import plan_kv_caches
from kvxfer.engine.model_config import ModelConfig
from kvxfer.errors import ConfigError
from kvxfer.transfer.costs import size_text


@dataclass(frozen=True, slots=True)
class Need:
    """What takes ``nbytes``, and the options that decide it."""

    nbytes: int
    what: str
    options: str


def needs_of(
    config: EngineConfig, model: ModelConfig, names: Mapping[str, str]
) -> tuple[Need, ...]:
    """What an engine takes of the host's memory: weights and pools of all its ranks. Nothing on
    GPUs, whose memory a rank asks for itself. ``names["pool"]``: the options that decide the size
    of a pool.
    """
    if config.device != CPU:
        return ()
    plans = plan_kv_caches(config, model)
    pool_nbytes = sum(tensor.size for plan in plans for tensor in plan.kv_cache_tensors)
    blocks = f"{plans[0].num_blocks} blocks of {config.block_size} tokens"
    of = f"of engine {config.engine_id}"
    return (
        Need(pool_nbytes, f"the pools {of} (TP {config.tp_size}, {blocks})", names["pool"]),
        Need(_weights_nbytes(model, config.tp_size), f"the weights {of}", "--model"),
    )


def check_memory(needs: Sequence[Need], free_nbytes: int | None) -> None:
    """Raises ConfigError, naming the largest need. ``free_nbytes`` None: unknown."""
    total_nbytes = sum(need.nbytes for need in needs)
    if free_nbytes is None or total_nbytes <= free_nbytes:
        return
    largest = max(needs, key=lambda need: need.nbytes)
    raise ConfigError(
        f"{largest.options}: expected engines that fit into {size_text(free_nbytes)} of free "
        f"memory, got {size_text(total_nbytes)}, {size_text(largest.nbytes)} of it for "
        f"{largest.what}; choose less"
    )


def _weights_nbytes(model: ModelConfig, tp_size: int) -> int:
    attention = 2 * model.hidden_size * model.head_size * (model.num_heads + model.num_kv_heads)
    layer = attention + 3 * model.hidden_size * model.intermediate_size
    embeddings = model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    return (model.num_layers * layer + tp_size * embeddings) * (
        4 if model.dtype == "float32" else 2
    )
