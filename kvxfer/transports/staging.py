"""Staging that is given back for good: memory of its own, and none of an allocator's.

What a peer might still write to must never become another tensor's. An allocator would hand it out
again; a mapping of its own is taken from the process when the last tensor of it goes.
"""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import torch

from kvxfer.tensors.device_memory import allocate


def make_staging(nbytes: int, device: torch.device) -> torch.Tensor:
    """Flat uint8, zeroed. Raises TransportUnavailable, or what the device says when it is full."""
    if device.type == "cpu":
        return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
    return torch.as_tensor(_OwnedMemory(nbytes, device), device=device).zero_()


class _OwnedMemory:
    """Memory of a GPU, as tensors take it over; freed with the last of them."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        mapped = allocate(nbytes, device)
        # Not at exit: the driver may be gone by then, and the memory goes with the process.
        weakref.finalize(self, mapped.close).atexit = False
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (mapped.memory.address, False),
            "version": 3,
        }
