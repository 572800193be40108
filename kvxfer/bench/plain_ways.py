"""What one process that sees both GPUs can do: the limits of the hardware, and the usual ways."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kvxfer.bench.core import Timing, timed
from kvxfer.bench.gpu import batch_copy
from kvxfer.bench.members import SIDES, Devices, Member, finish
from kvxfer.bench.pools import Pool, Request

MEMCPY = "memcpy"
LOCAL_MEMCPY = "local memcpy"
MEMSET = "memset"
TORCH = "torch"
BATCH = "cudaMemcpyBatchAsync"
LIMITS = (MEMCPY, LOCAL_MEMCPY, MEMSET)


class PlainWays(Member):
    def __init__(self, devices: Devices, nbytes: int) -> None:
        super().__init__(devices.by_side, nbytes)
        self._source, self._sink = (self.memories[side] for side in SIDES)
        self._devices = (self._source.device, self._sink.device)
        # A GPU may read the other's memory once torch has copied from it to the other
        self._sink.tensor[:1024].copy_(self._source.tensor[:1024])
        self._source.tensor[:1024].copy_(self._sink.tensor[:1024])
        self._other = torch.empty(nbytes, dtype=torch.uint8, device=self._sink.device)
        self._works: dict[tuple[str, Request], Callable[[], object]] = {}

    def run(self, way: str, request: Request) -> Timing:
        """From the first call to the end of all that both devices have to do."""
        work = self._works.get((way, request))
        if work is None:
            work = self._works[way, request] = self._make(way, request)
        self.flush()
        return timed(work, partial(finish, *self._devices))

    def _make(self, way: str, request: Request) -> Callable[[], object]:
        nbytes = request.nbytes
        sink = self._sink.tensor
        if way == MEMCPY:
            return partial(sink[:nbytes].copy_, self._source.tensor[:nbytes])
        if way == LOCAL_MEMCPY:
            return partial(sink[:nbytes].copy_, self._other[:nbytes])
        if way == MEMSET:
            return sink[:nbytes].zero_
        if way == TORCH:
            return torch_copy(request, self._source.tensor, sink)
        source_offsets, sink_offsets = request.pieces()
        return batch_copy(
            source_offsets + self._source.tensor.data_ptr(),
            sink_offsets + sink.data_ptr(),
            request.source.block_nbytes,
        )

    def close(self) -> None:
        self._works.clear()
        super().close()


def torch_copy(request: Request, source: Tensor, sink: Tensor) -> Callable[[], None]:
    """Region by region: index_select, permute, copy to the other GPU, index_copy_.

    Raises ValueError for tokens that do not fill the sink's blocks: these are copied whole.
    """
    block_tokens, num_tokens = request.sink.block_tokens, request.num_tokens
    if num_tokens % block_tokens:
        raise ValueError(f"tokens: expected a multiple of {block_tokens}, got {num_tokens}")
    given, taken = _raw(request.source, source), _raw(request.sink, sink)
    source_ids = torch.from_numpy(request.source_ids).to(source.device)
    sink_ids = torch.from_numpy(request.sink_ids).to(sink.device)

    def run() -> None:
        for theirs, ours in zip(given, taken, strict=True):
            chosen = theirs.index_select(0, source_ids).to(sink.device)
            if not request.is_equal:
                chosen = _regrouped(request, chosen)
            ours.index_copy_(0, sink_ids, chosen)

    return run


def _raw(pool: Pool, memory: Tensor) -> Tensor:
    """[regions, blocks, *, *, inner] as it lies there."""
    blocks = pool.blocks(memory)
    return blocks.transpose(2, 3) if pool.layout == "HND" else blocks


def _regrouped(request: Request, blocks: Tensor) -> Tensor:
    """The source's blocks as blocks of the sink."""
    shape = request.shape
    by_token = blocks.transpose(1, 2) if request.source.layout == "HND" else blocks
    tokens = by_token.reshape(-1, shape.heads, shape.inner_nbytes)[: request.num_tokens]
    grouped = tokens.view(-1, request.sink.block_tokens, shape.heads, shape.inner_nbytes)
    return grouped.transpose(1, 2) if request.sink.layout == "HND" else grouped
