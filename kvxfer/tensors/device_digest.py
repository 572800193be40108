"""Digests of KV in the memory of a GPU: one launch for each geometry class of a load, all of them
on their way before the one wait. For the copy thread: it waits 0.1 ms and longer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvxfer.kernels.kv_digest import ALIGN_NBYTES, NUM_ARRAYS, NUM_PARAMS, plan_digest
from kvxfer.tensors.cuda_driver import StreamEvent
from kvxfer.tensors.device_launch import GpuLauncher, HostLauncher, JobRing, Slot
from kvxfer.tensors.kv_digest import (
    HEAD,
    TOKEN,
    Cells,
    Words,
    multipliers,
    region_keys,
)
from kvxfer.tensors.strided_index import Ids, check_bases, check_flat, token_offsets
from kvxfer.transfer.plan import Side

RING_NBYTES = 4 << 20
"""For offsets and keys on their way to the GPU: 16 bytes a token."""
AT_ONCE = 2
"""Launches whose digests were not read yet. Each has at most a fifth of the ring: two, the next
one, and what is left over at the ring's end."""
MAX_BOUND = 1024
"""Sides whose addresses are kept; a plan has a handful."""
_HEAD_KEY = int(np.uint64(HEAD).astype(np.int64))


@dataclass(frozen=True, slots=True)
class _Bound:
    """A side in these memories. ``align_nbytes`` divides its addresses, strides and sizes."""

    addresses: Ids
    channels: tuple[int, int] | None
    align_nbytes: int


@dataclass(frozen=True, slots=True)
class _Begun:
    """A launch: its digests are the slot's last words once the event is over, and belong to
    ``sums``.
    """

    slot: Slot
    event: StreamEvent
    sums: Words


class DeviceDigester:
    """Of the memories of one rank, on its GPU. For one thread.

    On the CPU it needs Triton's interpreter (TRITON_INTERPRET=1), for tests.
    """

    def __init__(self, memories: Sequence[Tensor], ring_nbytes: int = RING_NBYTES) -> None:
        """Memories are flat uint8 of one GPU. Raises RuntimeError where there is no driver."""
        device = memories[0].device
        for number, memory in enumerate(memories):
            check_flat(memory, f"memory {number}")
        self._memories = tuple(memories)
        self._ring = JobRing(ring_nbytes, device)
        on_gpu = device.type != "cpu"
        self._launcher = GpuLauncher(device, NUM_ARRAYS) if on_gpu else HostLauncher()
        # Beside the engine's, which must not wait
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._bound: dict[int, tuple[Side, _Bound]] = {}

    def digests(
        self, classes: Sequence[Cells], seed: int, after: StreamEvent | None = None
    ) -> list[int]:
        """The digest of each region, the classes one after the other; of what lies there behind
        ``after``.

        The caller has checked the block ids. Raises ValueError for regions outside the memories or
        too many of them, and RuntimeError, PyTorch's, where the GPU has failed.
        """
        found = [np.zeros(len(cells.names), np.uint64) for cells in classes]
        begun: deque[_Begun] = deque()
        if after is not None:
            self._launcher.wait(self._stream, after)
        for cells, sums in zip(classes, found, strict=True):
            for piece in self._pieces(cells):
                if len(begun) == AT_ONCE:
                    _add(begun.popleft())
                begun.append(_Begun(*self._launch(piece, seed), sums))
        for each in begun:
            _add(each)
        return [digest for sums in found for digest in sums.tolist()]

    def _pieces(self, cells: Cells) -> Iterator[Cells]:
        """Cells of as many tokens as one launch takes."""
        num_others = NUM_PARAMS + 3 * len(cells.names) + -(-cells.side.tile.inner_nbytes // 8)
        step = (self._ring.num_words // 5 - num_others) // 2
        if step < 1:
            raise ValueError(
                f"digests: expected fewer regions and bytes of a head than {num_others} words of "
                f"them, in a ring of {self._ring.num_words}"
            )
        for lo in range(0, cells.tokens.size, step):
            yield replace(cells, tokens=cells.tokens[lo : lo + step])

    def _launch(self, cells: Cells, seed: int) -> tuple[Slot, StreamEvent]:
        tile, bound = cells.side.tile, self._bind(cells.side)
        launch = plan_digest(
            num_regions=bound.addresses.size,
            num_tokens=cells.tokens.size,
            heads=(tile.num_heads, tile.stride_head, _HEAD_KEY),
            inner_nbytes=tile.inner_nbytes,
            channels=bound.channels,
            align_nbytes=bound.align_nbytes,
        )
        token_keys = cells.tokens.view(np.uint64) * np.uint64(TOKEN)
        token_keys += np.uint64(cells.head_lo * HEAD % (1 << 64))
        arrays = (
            np.array(launch.params, np.int64),
            bound.addresses,
            region_keys(cells.names, seed).view(np.int64),
            token_offsets(tile, cells.block_ids, cells.tokens),
            token_keys.view(np.int64),
            multipliers(-(-tile.inner_nbytes // 8), seed).view(np.int64),
            np.zeros(bound.addresses.size, np.int64),
        )
        sizes = [array.size for array in arrays]
        slot = self._ring.take(sum(sizes))
        try:
            np.concatenate(arrays, out=slot.host)
            self._launcher.launch(slot, sizes, launch, self._stream)
            self._launcher.read_back(slot, sum(sizes[:-1]), self._stream)
        finally:  # whatever failed, a part may be on its way
            event = self._launcher.record(self._stream)
            self._ring.close(slot, event)
        return slot, event

    def _bind(self, side: Side) -> _Bound:
        known = self._bound.get(id(side))
        if known is None:
            if len(self._bound) >= MAX_BOUND:
                self._bound.clear()
            # The side is kept with it: its id is another's once it is gone
            known = self._bound[id(side)] = (side, self._bound_now(side))
        return known[1]

    def _bound_now(self, side: Side) -> _Bound:
        tile = side.tile
        check_bases(tile, side.bases, [memory.numel() for memory in self._memories])
        starts = [memory.data_ptr() for memory in self._memories]
        addresses = [starts[base.memory] + base.offset for base in side.bases]
        apart = (tile.channel_nbytes, tile.stride_channel) if tile.has_channels_apart else None
        strides = (tile.stride_block, tile.stride_head, tile.stride_token)
        sizes = (*(apart or ()), tile.inner_nbytes, *strides)
        align_nbytes = math.gcd(ALIGN_NBYTES, *addresses, *sizes)
        return _Bound(np.array(addresses, np.int64), apart, align_nbytes)


def _add(begun: _Begun) -> None:
    begun.event.synchronize()
    begun.sums[:] += begun.slot.host[-begun.sums.size :].view(np.uint64)
