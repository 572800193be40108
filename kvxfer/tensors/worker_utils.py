"""What a worker decides before and during its run: its memory, and whether a step's residual is
scattered over the ranks.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

_OfTheEngine: TypeAlias = Any
"""A record of whatever engine; the attributes that are read stand under Args."""


def request_memory(init_snapshot: _OfTheEngine, cache_config: _OfTheEngine) -> int:
    """Bytes of the device that the engine may use in all: weights, activations and cache.
    ``init_snapshot``: ``total_memory`` and ``free_memory`` in bytes, before anything was loaded.
    ``cache_config``: ``gpu_memory_utilization``, the engine's share of the total, in (0, 1].
    Returns the total times the share, rounded up. Raises ValueError for a share outside (0, 1], or
    less memory free than the share is.
    """
    share = cache_config.gpu_memory_utilization
    if not 0 < share <= 1:
        raise ValueError(f"gpu_memory_utilization: expected a share in (0, 1], got {share}")
    wanted_nbytes: int = math.ceil(init_snapshot.total_memory * share)
    if init_snapshot.free_memory < wanted_nbytes:
        raise ValueError(
            f"free memory: expected {_gib(wanted_nbytes)} (gpu_memory_utilization {share} of "
            f"{_gib(init_snapshot.total_memory)}), got {_gib(init_snapshot.free_memory)}; lower "
            "gpu_memory_utilization or end what else uses the device"
        )
    return wanted_nbytes


def is_residual_scattered_for_sp(vllm_config: _OfTheEngine, num_input_tokens: int) -> bool:
    """Whether each rank holds only its part of the residual's tokens in this step.

    Args:
        vllm_config: read are ``parallel_config.tensor_parallel_size`` and, of
            ``compilation_config``: ``pass_config.enable_sp`` (or its older name
            ``enable_sequence_parallelism``), ``splitting_ops``, ``use_inductor_graph_partition``
            and ``compile_sizes``.
        num_input_tokens: tokens of the step, with padding.

    Returns:
        False without sequence parallelism or with one rank. Otherwise True in full-graph mode (no
        splitting operations, or partitioned by inductor), else True for the compiled sizes only.

    Raises:
        ValueError: with sequence parallelism, tokens that cannot be divided among the ranks.
    """
    compilation = vllm_config.compilation_config
    num_ranks = vllm_config.parallel_config.tensor_parallel_size
    if num_ranks == 1 or not _sequence_parallel(compilation.pass_config):
        return False
    if num_input_tokens % num_ranks:
        raise ValueError(
            f"num_input_tokens: expected a multiple of tensor_parallel_size {num_ranks} with "
            f"sequence parallelism, got {num_input_tokens}; pad the step"
        )
    if not compilation.splitting_ops or compilation.use_inductor_graph_partition:
        return True
    return num_input_tokens in (compilation.compile_sizes or ())


def _sequence_parallel(pass_config: object) -> bool:
    for name in ("enable_sp", "enable_sequence_parallelism"):
        if hasattr(pass_config, name):
            return bool(getattr(pass_config, name))
    raise ValueError(
        "pass_config: expected enable_sp or enable_sequence_parallelism, got neither; set one"
    )


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
