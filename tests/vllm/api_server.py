"""vLLM's OpenAI server as a function for a fork of the process that has imported vLLM."""

from __future__ import annotations

import multiprocessing as mp
import sys
from types import SimpleNamespace
from typing import Any


def serve(arguments: list[str]) -> None:
    """``vllm serve``, until a signal ends it; ``arguments`` are those of its command line.

    Engines and their workers are forks too. vLLM spawns on CPUs, because threads of OpenMP are
    lost in a fork: there are none with OMP_NUM_THREADS=1. Two data-parallel ranks start in 10 s so,
    else in 75 s, as server, coordinator, engines and workers import vLLM one after the other. And
    ranks of a mixture of experts work here, which they do not in vLLM's CPU build.
    """
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.utils import system_utils

    context = mp.get_context("fork")
    # vLLM's modules have bound get_mp_context itself: what that calls is replaced.
    as_forks = {"get_context": lambda _method: context}
    system_utils.multiprocessing = SimpleNamespace(**vars(mp) | as_forks)
    _add_collectives()
    sys.argv = ["vllm", *arguments]
    entry.main()


def _add_collectives() -> None:
    """What the ranks of a mixture of experts need, and vLLM's communicator for CPUs does not have:
    tensors of which each rank has another number of rows, ``sizes``.
    """
    import torch
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        if isinstance(input_, list):
            return [all_gatherv(self, each, dim, sizes) for each in input_]
        sizes = sizes or [input_.shape[0]] * self.world_size
        padded = input_.new_zeros((max(sizes), *input_.shape[1:]))
        padded[: input_.shape[0]] = input_
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=self.device_group)
        return torch.cat([part[:rows] for part, rows in zip(parts, sizes, strict=True)])

    def reduce_scatterv(
        self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None
    ) -> Any:
        sizes = sizes or [input_.shape[0] // self.world_size] * self.world_size
        whole = input_.clone()
        torch.distributed.all_reduce(whole, group=self.device_group)
        return whole.split(sizes)[self.rank_in_group].clone()

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv
