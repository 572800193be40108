"""Digests of KV in the memory of a GPU: one launch for each geometry class, and a wait for it. For
the copy thread: it waits 0.1 ms and longer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvxfer.kernels.kv_digest import launch_digest
from kvxfer.tensors.kv_digest import (
    HEAD,
    TOKEN,
    Cells,
    Words,
    multipliers,
    region_keys,
    token_offsets,
)


def device_digests(memories: Sequence[Tensor], cells: Cells, seed: int) -> Words:
    """The digest of each region. On a CPU it needs Triton's interpreter (TRITON_INTERPRET=1).

    The caller has checked that blocks and regions lie in the memories. Raises RuntimeError,
    PyTorch's, where the GPU has failed.
    """
    tile, bases, device = cells.side.tile, cells.side.bases, memories[0].device
    offsets = token_offsets(tile, cells.block_ids, cells.tokens)
    addresses = [memories[base.memory].data_ptr() + base.offset for base in bases]
    channels = (tile.inner_nbytes, 0)
    if tile.has_channels_apart:
        channels = (tile.channel_nbytes, tile.stride_channel)
    element = math.gcd(
        *(8, *addresses, *channels, tile.inner_nbytes),
        *(tile.stride_block, tile.stride_head, tile.stride_token),
    )
    keys = cells.tokens.view(np.uint64) * np.uint64(TOKEN)
    token_keys = keys + np.uint64(cells.head_lo * HEAD % (1 << 64))
    arrays = (
        np.array(addresses, np.int64),
        region_keys(cells.names, seed).view(np.int64),
        offsets,
        token_keys.view(np.int64),
        multipliers(-(-tile.inner_nbytes // 8), seed).view(np.int64),
    )
    stream = _stream(device)
    with torch.cuda.stream(stream):
        there = torch.from_numpy(np.concatenate(arrays)).to(device)
        sums = launch_digest(
            *torch.split(there, [array.size for array in arrays]),
            heads=(tile.num_heads, tile.stride_head, int(np.uint64(HEAD).astype(np.int64))),
            inner_nbytes=tile.inner_nbytes,
            channels=channels,
            element_nbytes=element,
        )
        return sums.cpu().numpy().view(np.uint64)


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    """One of this GPU beside that of the engine, which must not wait."""
    if device.type != "cuda":
        return None
    known = _streams.get(device)
    if known is None:
        known = _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return known


_streams: dict[torch.device, torch.cuda.Stream] = {}
"""Of this process."""
