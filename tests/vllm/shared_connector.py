"""Our connector in vLLM's CPU build, with caches in memory that other processes can map. Its
engines load over shm then, as those with GPUs do over cuda_ipc, and loads can be part of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from kvxfer.integrations.vllm import regions
from kvxfer.tensors.shared_memory import SharedPool, plain_info
from kvxfer.transfer.manifest import MemoryInfo
from tests.vllm.faulty_connector import FaultyConnector

_pools: dict[int, SharedPool] = {}
"""By address."""


def _zeros(size: Any, **kind: Any) -> torch.Tensor:
    """In the place of torch.zeros, while vLLM makes its caches."""
    pool = SharedPool.create(torch.empty(size, dtype=kind.get("dtype"), device="meta").nbytes)
    _pools[pool.tensor.data_ptr()] = pool
    return pool.tensor.view(kind.get("dtype") or torch.float32).reshape(size)


def _info(tensor: torch.Tensor) -> MemoryInfo:
    pool = _pools.get(tensor.data_ptr())
    return pool.info if pool is not None else plain_info(tensor)


@contextmanager
def _shared() -> Iterator[None]:
    with patch.object(torch, "zeros", _zeros):
        yield


class SharedConnector(FaultyConnector):
    def get_mem_pool_context(self) -> AbstractContextManager[None]:
        return _shared()

    def register_kv_caches(self, *args: Any, **kwargs: Any) -> None:
        with patch.object(regions, "plain_info", _info):
            super().register_kv_caches(*args, **kwargs)
