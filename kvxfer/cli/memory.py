"""Whether the engines of a command fit into this machine's memory, before a process starts: one
that takes more than there is takes the machine along.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvxfer.cli.report import nbytes_text
from kvxfer.engine.config import CPU, EngineConfig
from kvxfer.engine.kv_plan import plan_kv_caches
from kvxfer.engine.model_config import ModelConfig
from kvxfer.errors import ConfigError

_UNBOUNDED_NBYTES = 1 << 60
"""Above this a limit of a control group is none."""


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
    """Raises ConfigError where all needs together are more than ``free_nbytes`` (None: nobody
    knows), naming the largest.
    """
    total_nbytes = sum(need.nbytes for need in needs)
    if free_nbytes is None or total_nbytes <= free_nbytes:
        return
    largest = max(needs, key=lambda need: need.nbytes)
    raise ConfigError(
        f"{largest.options}: expected engines that fit into {nbytes_text(free_nbytes)} of free "
        f"memory, got {nbytes_text(total_nbytes)}, {nbytes_text(largest.nbytes)} of it for "
        f"{largest.what}; choose less"
    )


def free_host_nbytes(root: Path = Path("/")) -> int | None:
    """Memory that this process may still take: of the machine, and of the control groups that it is
    in. None where the system does not tell. ``root``: of the file system, for tests.
    """
    bounds = [*_of_machine(root / "proc/meminfo"), *_of_groups(root)]
    return max(0, min(bounds)) if bounds else None


def _of_machine(file: Path) -> Iterator[int]:
    for line in _lines(file):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield int(value.split()[0]) << 10


def _of_groups(root: Path) -> Iterator[int]:
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        group = base / path.lstrip("/")
        # A container may see its own group as the mount's root, under another path
        for folder in (*_up_to(group, base), base):
            yield from _of_group(folder, is_v1=bool(controllers))


def _up_to(group: Path, base: Path) -> Iterator[Path]:
    while group != base and base in group.parents:
        yield group
        group = group.parent


def _of_group(folder: Path, *, is_v1: bool) -> Iterator[int]:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    limit_name, used_name, cache_name = (
        names if is_v1 else ("memory.max", "memory.current", "inactive_file")
    )
    limit = next(_lines(folder / limit_name), "max")
    used = next(_lines(folder / used_name), "0")
    if not limit.isdecimal() or int(limit) > _UNBOUNDED_NBYTES:
        return
    stat = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat"))
    yield int(limit) - int(used) + int(stat.get(cache_name, 0))  # the kernel gives the cache back


def _lines(file: Path) -> Iterator[str]:
    try:
        yield from file.read_text().splitlines()
    except OSError:
        return


def _weights_nbytes(model: ModelConfig, tp_size: int) -> int:
    """Of all ranks: each has its part of the layers, and whole embeddings."""
    query, kv = model.num_heads * model.head_size, model.num_kv_heads * model.head_size
    attention = model.hidden_size * (2 * query + 2 * kv)
    layer = attention + 3 * model.hidden_size * model.intermediate_size
    embeddings = model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    return (model.num_layers * layer + tp_size * embeddings) * (
        4 if model.dtype == "float32" else 2
    )
