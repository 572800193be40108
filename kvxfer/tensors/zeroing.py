"""Zero whole blocks of all layers of a pool, so that a new owner never sees what another request
left.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvxfer.tensors.allocate import KVPool, PoolLayout


def zero_blocks(pool: KVPool, block_ids: Sequence[int]) -> None:
    """Write zeros to the K and V of every layer of ``block_ids`` (block ids, not kernel blocks);
    nothing else changes.

    Raises ValueError, before anything is written, for an id outside the pool.
    """
    if not block_ids:
        return
    spec = pool.spec
    lowest, highest = min(block_ids), max(block_ids)
    if lowest < 0 or highest >= spec.num_blocks:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(f"block_ids: expected ids in [0, {spec.num_blocks}), got {wrong}")
    ids = torch.tensor(block_ids, dtype=torch.int64, device=pool.buffer.device)
    if spec.layout is PoolLayout.NHD:
        ids = (
            ids[:, None] * spec.kernel_blocks + torch.arange(spec.kernel_blocks, device=ids.device)
        ).flatten()
    block_dim = 1 if spec.layout is PoolLayout.HND else 0
    for view in pool.layers.values():
        view.index_fill_(block_dim, ids, 0)
